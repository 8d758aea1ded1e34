"""A model with its adapter and its optimiser, and the log-probabilities that it gives to tokens."""

import math
from contextlib import contextmanager
from functools import partial

from runtime.distributed import processes
from runtime.view.terminal import warn
from runtime.vision.pictures import has_frozen_tower, never_sampled, picture_inputs

import torch
from torch.utils.checkpoint import checkpoint

SKIPS = 3  # so many updates in a row that are not finite end a run
FUSED = ("cuda",)  # devices on which AdamW updates all parameters in one kernel


def is_adapted(model) -> bool:
    """Whether the model is peft's, with adapters on its layers."""
    return hasattr(model, "get_base_model")


def plain(model):
    """The transformers model itself, with its adapters' layers inside if it has any."""
    return model.get_base_model() if is_adapted(model) else model


def trainable(model) -> list[torch.nn.Parameter]:
    """The parameters that an optimiser is for."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def add_adapter(model, name: str, rank: int):
    """The model, computing with one more LoRA adapter on the same base weights and training it
    alone. The adapter starts as the identity. A frozen vision tower gets none."""
    from peft import LoraConfig, get_peft_model

    layers = {"target_modules": "all-linear"}
    if has_frozen_tower(plain(model)):
        layers["exclude_modules"] = r".*\bvisual\..*"
    config = LoraConfig(r=rank, lora_alpha=rank, task_type="CAUSAL_LM", **layers)
    if not is_adapted(model):
        return get_peft_model(model, config, adapter_name=name)
    model.add_adapter(name, config)
    model.set_adapter(name)
    return model


def compute_with(model, adapters: tuple[str, ...]) -> None:
    """Let the model compute with these adapters on its base weights, as many of them as it has;
    where it has none of them, with the base weights alone."""
    for layer in model.modules():
        if hasattr(layer, "lora_A"):
            there = [name for name in adapters if name in layer.lora_A]
            layer.enable_adapters(bool(there))
            if there:
                layer.set_adapter(there)


def recompute_layers(models: list) -> bool:
    """Let the layers of these models keep nothing of a forward pass but their input: the backward
    pass computes them again, with the same result. False where a model has no layers that
    transformers calls fit for it. Passes without a graph, as an engine's, stay as they are."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    of_each = [
        [layer for layer in model.modules() if isinstance(layer, GradientCheckpointingLayer)]
        for model in models
    ]
    for layer in {layer for layers in of_each for layer in layers}:  # two may share their base
        layer.forward = partial(computed_again, layer.forward)
    return all(of_each)


def computed_again(forward, *inputs, **options):
    """forward(*inputs, **options), whose graph keeps the inputs alone."""
    if not torch.is_grad_enabled():
        return forward(*inputs, **options)
    saving = dict(use_reentrant=False, preserve_rng_state=False)  # no layer draws at random
    return checkpoint(forward, *inputs, **saving, **options)


class Network:
    """A model, or one of its adapters, with the optimiser that trains it.

    name: the adapter's, and the network's in checkpoints. on: "policy" for a network that follows
    the policy: as an adapter it computes on the policy's own weights and adapter, as a model of its
    own it is moved by `following`. dtype: that of matrix products, float32 or bfloat16."""

    def __init__(self, name: str, model, optimizer, dtype: str = "float32", on: str = "initial"):
        self.name, self.model, self.optimizer = name, model, optimizer
        self.on = on
        # FSDP's layers compute in bfloat16 by themselves, and keep no copy of their weights
        self.bfloat16 = dtype == "bfloat16" and not processes.is_sharded(plain(model))
        self.skips = 0  # updates in a row that were not finite
        self.norms: list[float] = []  # of the gradients of steps taken, since optimizer_stats()
        self.skipped = 0  # updates that were not finite, since optimizer_stats()
        self.noted: list[tuple] = []  # (tokens, log ratios) of micro-batches, since log_ratios()
        for group in optimizer.param_groups:
            if "fused" in group and all(p.device.type in FUSED for p in group["params"]):
                group["fused"] = True

    @property
    def trained(self) -> list[torch.nn.Parameter]:
        """The parameters that the optimiser trains."""
        return self.optimizer.param_groups[0]["params"]

    def activate(self):
        """The model, computing as this network does and training its parameters alone."""
        compute_with(self.model, (self.on, self.name))
        if not processes.is_sharded(self.model):  # there all train, and some may be gathered now
            self.model.requires_grad_(False)
            for parameter in self.trained:
                parameter.requires_grad_(True)
        return self.model

    def hidden(self, ids: torch.Tensor, pictures=()) -> torch.Tensor:
        """The last hidden states [B, T, H] of ids [B, T], padded on the right: causal attention
        never looks there, so there is no mask. pictures: (row, place, PNG) of each."""
        causal = plain(self.model)
        inputs = {"input_ids": ids}
        if pictures:
            inputs = picture_inputs(causal, ids, pictures)
        return causal.base_model(**inputs, use_cache=False).last_hidden_state

    def token_logprobs(self, micro, is_action: torch.Tensor, temperature: float) -> torch.Tensor:
        """Log-probabilities [k] of the tokens of micro.ids [B, T] where is_action [B, T-1] says
        that position t predicts one. The softmax is float32, and of the whole vocabulary but the
        tokens of pictures and films, which the engine never samples either.

        The head runs only there, never on [T, vocabulary]. Of many such tokens it takes a
        gigabyte's worth of logits at a time, and computes them again in the backward pass; so it
        does with the whole pass where micro.recompute says so."""
        model = self.activate()
        causal = plain(model)
        ids = micro.ids.to(model.device)
        is_action = is_action.to(model.device)
        chunk = max(1, 2**28 // causal.config.get_text_config().vocab_size)
        never = torch.tensor(never_sampled(causal.config), dtype=torch.long, device=ids.device)

        def head(hidden, targets):  # [c, H], [c] -> [c]
            logits = causal.get_output_embeddings()(hidden).float()  # [c, vocabulary]
            logits.div_(temperature)  # after the head, so that its bias is divided too
            if len(never):
                logits = logits.index_fill(1, never, -torch.inf)
            return logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]

        def forward():  # -> [k]
            with self.autocast():
                hidden = self.hidden(ids, micro.pictures)[:, :-1][is_action].split(chunk)
                targets = ids[:, 1:][is_action].split(chunk)
                if len(hidden) == 1:
                    return head(hidden[0], targets[0])
                parts = zip(hidden, targets)
                return torch.cat([checkpoint(head, *part, use_reentrant=False) for part in parts])

        if micro.recompute:
            return checkpoint(forward, use_reentrant=False, preserve_rng_state=False)
        return processes.through(causal, forward)

    def autocast(self):
        """Around a forward pass: matrix products in bfloat16, if --dtype says so."""
        return torch.autocast(self.model.device.type, torch.bfloat16, enabled=self.bfloat16)

    def may_step(self, loss: float, grad_norm: float) -> bool:
        """Whether an update may be taken. Where loss or gradient is not finite it may not, with a
        warning; the third time in a row raises FloatingPointError. Loss: the sum over processes."""
        (loss,) = processes.total([loss])
        if math.isfinite(loss) and math.isfinite(grad_norm):
            self.norms.append(grad_norm)
            self.skips = 0
            return True

        self.skips += 1
        self.skipped += 1
        numbers = f"loss {loss:.3g}, gradient norm {grad_norm:.3g}"
        warn(f"{numbers}: this update is skipped")
        if self.skips >= SKIPS:
            raise FloatingPointError(f"loss or gradient was not finite in {SKIPS} updates in a row")
        return False

    def optimizer_stats(self) -> dict:
        """{grad_norm: the mean norm of the gradients that were followed, 0 if none was; skipped:
        how many were not finite}, since this was asked last."""
        stats = {"grad_norm": sum(self.norms) / max(len(self.norms), 1), "skipped": self.skipped}
        self.norms, self.skipped = [], 0
        return stats

    def note(self, tokens: torch.Tensor, log_ratios: torch.Tensor) -> None:
        """Keep log pi_theta - log pi_old, [k], of the action tokens at these places [k] among the
        batch's K, as an update saw them."""
        self.noted.append((tokens, log_ratios.cpu()))

    def log_ratios(self, number: int) -> torch.Tensor:
        """What was noted since this was asked last, by all processes: [K] for number = K; NaN for
        tokens of which no update saw the ratio."""
        values = torch.full((number,), math.nan)
        for tokens, log_ratios in processes.gather(self.noted):
            values[tokens] = log_ratios
        self.noted = []
        return values


def action_logprobs(network: Network, micro, args) -> torch.Tensor:
    """log pi(token) of a micro-batch's action tokens at the sampling temperature, [k], with a
    graph."""
    is_action = micro.steps[:, 1:] >= 0  # [B, T-1] position t predicts token t + 1
    return network.token_logprobs(micro, is_action, args.temperature)


@contextmanager
def initial(policy: Network, read):
    """The policy's network with the initial weights in place of its own, which come back
    afterwards. read() gives a model of them; a LoRA policy has them for its base."""
    kept = []
    if not is_adapted(policy.model):
        ours = dense_parameters(policy.model).values()
        kept = [(weight, weight.detach().cpu().clone()) for weight in ours]
        for weight, first in zip(ours, read().parameters(), strict=True):
            weight.data.copy_(first)
    try:
        dtype = "bfloat16" if policy.bfloat16 else "float32"
        yield Network("initial", policy.model, policy.optimizer, dtype)
    finally:
        for weight, own in kept:
            weight.data.copy_(own)


@contextmanager
def following(network: Network, policy: Network):
    """Around an update of the policy: a network of its own weights that stands on the policy moves
    as far as the policy moves, from pi_old + D to pi_theta + D, where D is what it has learnt."""
    moves = network.on == "policy" and not is_adapted(network.model)
    if moves:
        add_policy(network.model, policy.model, -1.0)
    yield
    if moves:
        add_policy(network.model, policy.model, 1.0)


@torch.no_grad()
def add_policy(model, policy, factor: float) -> None:
    """Add the policy's weights, times factor, to a model of the same architecture."""
    weights = processes.shares(policy).values()  # of a sharded policy the model has the same ones
    if is_adapted(policy):
        weights = (weight for _, weight in policy_weights(policy))
    for own, weight in zip(processes.shares(model).values(), weights, strict=True):
        own.add_(weight.to(own.dtype), alpha=factor)


def engine_weights(batch, old_logprobs, args) -> torch.Tensor:
    """The weight pi_old(trainer) / pi_old(engine) of each step, [S], within --engine-correction and
    its inverse: of all its tokens together where the ratio is of steps; else the geometric mean of
    theirs, which is of a token's size. old_logprobs [K]."""
    gaps = old_logprobs - batch.engine_logprobs  # [K]
    sums = torch.zeros(len(batch.step_traj)).index_add(0, batch.token_step, gaps)  # [S]
    if args.ratio != "step":
        sums = sums / torch.bincount(batch.token_step)
    cap = max(args.engine_correction, 1 / args.engine_correction)
    return sums.exp().clamp(1 / cap, cap)


def dense_parameters(model) -> dict[str, torch.nn.Parameter]:
    """{name: weight} of the model without its adapters, under the names that it has without."""
    return {
        name.replace(".base_layer.", "."): parameter
        for name, parameter in processes.shares(plain(model)).items()
        if ".lora_" not in name
    }


def policy_shapes(model) -> dict[str, torch.Size]:
    """{name: shape} of what policy_weights yields, in its order."""
    return {name: parameter.shape for name, parameter in dense_parameters(model).items()}


def policy_weights(model):
    """(name, tensor) of the policy as one dense network; LoRA is added on the way, and the base is
    not touched. Of a sharded policy all processes have to ask for all tensors."""
    causal = plain(model)
    for name, parameter in dense_parameters(causal).items():
        layer, _, of_layer = name.rpartition(".")
        adapted = causal.get_submodule(layer)
        if of_layer == "weight" and "policy" in getattr(adapted, "lora_A", ()):
            parameter = parameter + adapted.get_delta_weight("policy")
        yield name, processes.whole(parameter.detach())


def assert_finite(weights) -> None:
    """Raise FloatingPointError where one of these (name, tensor) has a number that is not
    finite."""
    for name, tensor in weights:
        parts = tensor.flatten().split(2**22)  # the answer takes memory too
        if not all(part.isfinite().all() for part in parts):
            raise FloatingPointError(f"the weights are not finite ({name})")
