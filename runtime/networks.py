"""A model with its adapter and its optimiser, and the log-probabilities that it gives to tokens."""

import copy
import math
import sys
from functools import partial
from itertools import chain, islice

from runtime.data import micro_batches
from runtime.distributed import fsdp, processes
from runtime.view.terminal import warn
from runtime.vision.pictures import has_frozen_tower, never_sampled, picture_inputs

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.checkpoint import checkpoint

SKIPS = 3  # so many updates in a row that are not finite end a run
LOGITS = 2**28  # so many of them are computed at a time


def is_adapted(model) -> bool:
    """Whether the model is peft's, with adapters on its layers."""
    return hasattr(model, "get_base_model")


def plain(model):
    """The transformers model itself, with its adapters' layers inside if it has any."""
    return model.get_base_model() if is_adapted(model) else model


def compute_with(model, adapters: tuple[str, ...]) -> None:
    """Let the model compute with those of these adapters that it has on its base weights."""
    causal = plain(model)
    if getattr(causal, "computes_with", None) == adapters:
        return
    causal.computes_with, causal.trains = adapters, None  # a layer's set_adapter lets it train
    for layer in model.modules():
        if hasattr(layer, "lora_A"):
            there = [name for name in adapters if name in layer.lora_A]
            layer.__dict__.pop("forward", None)
            if there:
                layer.set_adapter(there)
            else:  # without peft's checks, which a small model feels
                layer.forward = layer.base_layer.forward


def add_adapter(model, name: str, lora):
    """The model with one more LoRA adapter (a peft LoraConfig) on the same base weights, which
    starts as the identity and alone requires gradients. A frozen vision tower gets none."""
    from peft import get_peft_model

    more = "use_dora lora_bias bias lora_dropout modules_to_save trainable_token_indices".split()
    for name in (x for x in more if getattr(lora, x, None) not in (None, False, 0.0, "none")):
        sys.exit(f"LoraConfig({name}=...): only W + scale * B A is supported, without dropout")
    if has_frozen_tower(plain(model)) and not lora.exclude_modules:
        lora.exclude_modules = r".*\bvisual\..*"
    plain(model).requires_grad_(False).computes_with = None  # peft leaves older adapters as is
    if not is_adapted(model):
        return get_peft_model(model, lora, adapter_name=name)
    model.add_adapter(name, lora)
    model.set_adapter(name)
    return model


def master_of(weight: torch.nn.Parameter) -> torch.nn.Parameter:
    """What an optimiser trains for a bfloat16 weight, which small steps would not move: a float32
    copy, to which backward passes add their gradients (arXiv 1710.03740). Else the weight."""
    if weight.dtype != torch.bfloat16:
        return weight
    if not hasattr(weight, "master"):
        weight.master = torch.nn.Parameter(weight.detach().float())
        weight.master.rounded = weight
        weight.register_post_accumulate_grad_hook(pass_on)
    return weight.master


def pass_on(weight) -> None:
    """After a backward pass: a bfloat16 weight's gradient is added to its float32 copy's."""
    master, gradient, weight.grad = weight.master, weight.grad, None
    master.grad = gradient.float() if master.grad is None else master.grad.add_(gradient)


@register_optimizer_step_post_hook
@torch.no_grad()
def round_weights(optimizer, *_) -> None:
    """After any optimiser's step: bfloat16 weights get the values of their float32 copies."""
    for master in chain(*(group["params"] for group in optimizer.param_groups)):
        if hasattr(master, "rounded"):
            master.rounded.copy_(master)


class Network:
    """What computes log-probabilities with some weights, and the optimiser that trains them.
    name: the network's in checkpoints, and its adapter's if it has one. adapters: of those on the
    model, these compute. trained: the parameters that are its own, in float32, for optimisers."""

    def __init__(self, name: str, model, adapters: tuple[str, ...] = ()):
        self.name, self.model, self.adapters = name, model, adapters or (name,)
        self.trained = [master_of(p) for p in model.parameters() if p.requires_grad]
        self.optimizer = None
        self.skips = 0  # updates in a row that were not finite

    @property
    def plain(self):
        return plain(self.model)  # transformers' own, which other networks may share

    def with_adapter(self, name: str, lora) -> "Network":
        """A network that computes with these weights, as they are at any time, plus a LoRA adapter
        of its own (a peft LoraConfig), which alone it trains."""
        if lora is None:
            sys.exit(f"--{name}-lora-rank 0: it trains an adapter, so its rank is at least 1")
        return Network(name, add_adapter(self.model, name, lora), (*self.adapters, name))

    def copy(self, name: str) -> "Network":
        """A network that starts as this one and goes its own way; an adapter if this one is one."""
        from peft import set_peft_model_state_dict

        if not is_adapted(self.model):
            return Network(name, copy.deepcopy(self.model))
        lora = copy.deepcopy(self.model.peft_config[self.name])
        network = Network(name, add_adapter(self.model, name, lora), (*self.adapters[:-1], name))
        set_peft_model_state_dict(self.model, adapter_weights(self.model, self.name), name)
        return network

    def initial(self) -> "Network":
        """The policy as it is now, for good: a LoRA policy's base, or a frozen copy."""
        model = self.model
        if not is_adapted(model):
            model = copy.deepcopy(model).requires_grad_(False)
        return Network("initial", model, ("none",))

    def activate(self):
        """The model, computing as this network does and training its parameters alone."""
        compute_with(self.model, self.adapters)
        if self.plain.trains != self.name:
            self.plain.trains, trained = self.name, [getattr(p, "rounded", p) for p in self.trained]
            if fsdp.is_sharded(self.plain):  # all that trains does so always; peft has changed it
                trained = [p for name, p in self.plain.named_parameters() if ".lora_" in name]
            else:
                self.model.requires_grad_(False)
            for parameter in trained:
                parameter.requires_grad_(True)
        return self.model

    def hidden(self, ids: torch.Tensor, pictures=()) -> torch.Tensor:
        """The last hidden states [B, T, H] of ids [B, T], padded on the right: causal attention
        never looks there, so there is no mask. pictures: (row, place, PNG) of each."""
        causal = plain(self.model)
        inputs = picture_inputs(causal, ids, pictures) if pictures else {"input_ids": ids}
        return causal.base_model(**inputs, use_cache=False).last_hidden_state

    def at_actions(self, micro, args, function) -> torch.Tensor:
        """function(hidden [k, H], ids [k]) of a micro-batch's action tokens: the hidden states from
        which they are predicted, and their ids. Matrix products are in --dtype."""
        model, causal = self.activate(), self.plain
        is_sharded, ids = fsdp.is_sharded(causal), micro.ids.to(model.device)
        is_action = micro.is_action[:, 1:].to(model.device)  # position t predicts token t + 1
        # for float32 adapters and heads on bfloat16 weights; FSDP's layers cast by themselves
        bfloat16 = args.run_args.dtype == "bfloat16" and not is_sharded

        def forward():
            with torch.autocast(model.device.type, torch.bfloat16, enabled=bfloat16):
                hidden = self.hidden(ids, micro.pictures)[:, :-1][is_action]
                return function(hidden, ids[:, 1:][is_action])

        return causal.through(forward) if is_sharded else forward()

    def may_step(self, grad_norm: float) -> bool:
        """Whether this gradient is finite. Else it warns; three in a row: FloatingPointError."""
        self.skips = 0 if math.isfinite(grad_norm) else self.skips + 1
        if self.skips:
            warn(f"{self.name}: gradient norm {grad_norm:.3g}: this update is skipped")
        if self.skips >= SKIPS:
            raise FloatingPointError(f"the gradient was not finite in {SKIPS} updates in a row")
        return not self.skips


def action_logprobs(network: Network, micro, args) -> torch.Tensor:
    """log pi(token) of a micro-batch's action tokens at the sampling temperature, [k]: by a float32
    softmax without the tokens of pictures and films, which the engine never samples. The head runs
    at these tokens only, LOGITS logits at a time, computed again in the backward pass if more."""
    causal = plain(network.model)
    chunk = max(1, LOGITS // causal.config.get_text_config().vocab_size)
    never = torch.tensor(never_sampled(causal.config), dtype=torch.long, device=causal.device)

    def head(hidden, targets):  # [c, H], [c] -> [c]
        logits = causal.get_output_embeddings()(hidden).float()  # [c, vocabulary]
        logits.div_(args.temperature)  # after the head, so that its bias is divided too
        if len(never):
            logits = logits.index_fill(1, never, -torch.inf)
        return logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]

    def logprobs(hidden, targets):  # [k, H], [k] -> [k]
        parts = [*zip(hidden.split(chunk), targets.split(chunk))]
        if len(parts) == 1:
            return head(hidden, targets)
        return torch.cat([checkpoint(head, *part, use_reentrant=False) for part in parts])

    return network.at_actions(micro, args, logprobs)


def over_batch(function, network: Network, batch, args, only=None, graph=False) -> torch.Tensor:
    """function(network, micro-batch, args) [k] of the whole batch, [K] on the CPU; 0 for sequences
    of which no step is in only [S]. graph: a backward pass adds to the network's gradients; where
    there are several micro-batches it computes each again, in the memory of one."""
    start = torch.ones((), requires_grad=graph)  # a leaf, so that autograd calls backward
    return OverBatch.apply(start, function, network, batch, args, only)


def batch_logprobs(network: Network, batch, args, only=None, graph=False) -> torch.Tensor:
    """action_logprobs of the whole batch, [K]; only and graph as over_batch has them."""
    return over_batch(action_logprobs, network, batch, args, only, graph)


class OverBatch(torch.autograd.Function):
    """over_batch as autograd knows it."""

    @staticmethod
    def forward(context, start, function, network, batch, args, only):
        micros = micro_batches(batch, args, only, f"forward passes, {network.name}")
        first = [*islice(micros, 2)]
        keeps = start.requires_grad and len(first) == 1
        values = torch.zeros(len(batch.token_step))
        for micro in chain(first, micros):
            with torch.set_grad_enabled(keeps):
                of_micro = function(network, micro, args)
            values[micro.tokens] = of_micro.detach().cpu()
        context.again = function, network, batch, args, only
        context.kept = [(micro, of_micro)] if keeps else None
        return processes.total(values)

    @staticmethod
    def backward(context, slope):  # [K] of the loss by each value
        function, network, batch, args, only = context.again
        again = ((m, function(network, m, args)) for m in micro_batches(batch, args, only))
        with torch.enable_grad():
            for micro, of_micro in context.kept or again:
                of_micro.backward(slope[micro.tokens].to(of_micro.device))
        context.kept = None
        return (None,) * 6


def sum_gradients(network: Network) -> None:
    """Each gradient of the network becomes the sum over processes, once (FSDP sums what it shards).
    Gradients that the backward pass left on other networks' weights go."""
    own = {id(parameter) for parameter in network.trained}
    for parameter in (getattr(p, "master", p) for p in network.model.parameters()):
        if id(parameter) not in own:
            parameter.grad = None
    if processes.count() == 1:
        return
    (number,) = processes.total([sum(p.grad is not None for p in network.trained)])
    for parameter in network.trained if number else ():  # where no process has any, there are none
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        if not fsdp.is_sharded(network.plain):
            parameter.grad = processes.total(parameter.grad)


def recompute_layers(models: list) -> bool:
    """Let the layers of these models keep nothing of a forward pass but their input: the backward
    pass computes them again, with the same result. False where a model has no such layers."""
    from transformers.modeling_layers import GradientCheckpointingLayer as Layer

    of_each = [[m for m in model.modules() if isinstance(m, Layer)] for model in models]
    options = {"use_reentrant": False, "preserve_rng_state": False}  # no layer draws at random
    for layer in {*chain(*of_each)}:  # two may share their base
        layer.forward = partial(checkpoint, layer.forward, **options)
    return all(of_each)


def policy_weights(model):
    """(name, tensor) of the policy as one dense network; LoRA is added on the way, and the base is
    not touched. Of a sharded policy all processes have to ask for all tensors."""
    causal = plain(model)
    for name, parameter in fsdp.shares(causal).items():
        if ".lora_" in name:
            continue
        name = name.replace(".base_layer.", ".")
        layer, _, of_layer = name.rpartition(".")
        adapted = causal.get_submodule(layer)
        if of_layer == "weight" and "policy" in getattr(adapted, "lora_A", ()):
            parameter = parameter + adapted.get_delta_weight("policy")
        yield name, fsdp.whole(parameter.detach())


def adapter_weights(model, name: str) -> dict[str, torch.Tensor]:
    """{name: tensor on the CPU} of an adapter, as in peft's files; all processes have to ask."""
    from peft import get_peft_model_state_dict

    fsdp.shares(plain(model))
    found = get_peft_model_state_dict(model, adapter_name=name)
    return {key: fsdp.whole(t.detach()).cpu().contiguous() for key, t in found.items()}


def assert_finite(weights) -> None:
    """Raise FloatingPointError, in all processes, where a (name, tensor) is not finite."""
    bad = []
    for name, tensor in weights:
        bad += [name] * (not all(x.isfinite().all() for x in tensor.flatten().split(2**22)))
    if bad := processes.gather(bad):
        raise FloatingPointError(f"the weights are not finite ({bad[0]})")


def dense_weights(model, dtype: str) -> dict[str, torch.Tensor]:
    """{name: tensor} of policy_weights in this dtype, on the CPU of the first process."""
    own = ((n, t.to(getattr(torch, dtype))) for n, t in policy_weights(model))  # all have to ask
    return {name: t.cpu().contiguous() for name, t in own if processes.rank() == 0}
