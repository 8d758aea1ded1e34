"""What an iteration takes of memory at its peak, in an update: arithmetic on the model's shape and
the flags, before anything is loaded. benchmarks/memory.py compares it with what is measured."""

import os
from dataclasses import dataclass, replace

from runtime.distributed import fsdp
from runtime.networks import LOGITS
from runtime.view.terminal import warn

GIB = 2**30
FEWER = 64  # --policy-lora-rank that is proposed
PICTURES = 0.25  # of a context's tokens, those that stand for pictures: assumed


@dataclass(frozen=True)
class Shape:
    """Of a decoder: what counts of its configuration."""

    hidden: int
    inner: int  # width of the feed-forward
    layers: int
    queries: int  # heads x their width
    keys: int
    vocabulary: int
    tied: bool  # the head's weights are the embedding's
    head_norms: bool = False  # queries and keys are normalised (Qwen3)
    rest: int = 0  # weights of a tower that are in no layer
    patches: int = 0  # of a tower: so many make a token
    tower: "Shape | None" = None  # what sees pictures

    @property
    def matrices(self) -> list[tuple[int, int]]:
        h, i, q, k = self.hidden, self.inner, self.queries, self.keys  # (inputs, outputs) of seven
        return [(h, q), (h, k), (h, k), (q, h), (h, i), (h, i), (i, h)]

    @property
    def layer(self) -> int:
        return sum(a * b for a, b in self.matrices)

    @property
    def embeddings(self) -> int:
        return self.vocabulary * self.hidden * (1 if self.tied else 2)

    @property
    def dense(self) -> int:
        return self.layers * self.layer + self.embeddings + self.rest

    @property
    def adapter(self) -> int:
        return self.layers * sum(a + b for a, b in self.matrices)  # weights, of LoRA's rank 1


@dataclass(frozen=True)
class Setting:
    """What the flags say."""

    tokens: int  # of a micro-batch
    action_share: float = 0.25  # of its tokens, those that the agent wrote
    lora_rank: int = 0  # of the policy; 0: all weights train
    prm_rank: int = 0  # of the PRM's adapter, or of the critic's; 0: there is none
    prm_copy: bool = False  # the PRM is a copy of the policy, or of its adapter if it has one
    own_base: int = 0  # bytes of a weight of a model that is not the policy's; 16: it trains
    dtype: str = "bfloat16"
    recompute: bool = False  # --gradient-checkpointing
    freeze_vision: bool = False  # the tower does not train
    cards: int = 1  # that share a policy which is trained whole (FSDP)
    engine_share: float = 0.4  # of a card, the engine's while it samples; 0: it is elsewhere

    @property
    def number(self) -> int:
        return 2 if self.dtype == "bfloat16" else 4  # bytes of one in matrix products


def shape_of(config) -> Shape | None:
    """The decoder's shape; None where its layers are not dense ones with a gated feed-forward."""
    whole, config = config, config.get_text_config(decoder=True)
    names = "hidden_size intermediate_size num_hidden_layers num_attention_heads vocab_size"
    sizes = [getattr(config, name, None) for name in names.split()]
    experts = [getattr(config, name, None) for name in ("num_experts", "num_local_experts")]
    if any(experts) or not all(type(size) is int and size > 0 for size in sizes):
        return None
    hidden, inner, layers, heads, vocabulary = sizes
    width = getattr(config, "head_dim", None) or hidden // heads
    keys = getattr(config, "num_key_value_heads", None) or heads
    of_whole = getattr(whole, "tie_word_embeddings", False)
    tied = bool(getattr(config, "tie_word_embeddings", of_whole))
    norms, tower = config.model_type.startswith("qwen3"), None
    if whole.model_type == "qwen2_5_vl":
        seeing = whole.vision_config
        wide, patches = seeing.hidden_size, seeing.spatial_merge_size**2
        rest = wide * patches * (wide * patches + hidden)
        rest += wide * seeing.in_channels * seeing.temporal_patch_size * seeing.patch_size**2
        sizes = wide, seeing.intermediate_size, seeing.depth, wide, wide, 0, True
        tower = Shape(*sizes, rest=rest, patches=patches)
    sizes = hidden, inner, layers, heads * width, keys * width, vocabulary, tied, norms
    return Shape(*sizes, tower=tower)


def predict(shape: Shape, setting: Setting, gpu: bool = True) -> dict[str, float]:
    """Bytes at the peak of an iteration, by what they are for. Weights that train have four float32
    numbers each (value, two moments, gradient), and those that compute in bfloat16 one more, which
    is all that a frozen one has. gpu: else the matrix library has buffers, as large as a matrix."""
    adapted, cards, number = bool(setting.lora_rank), setting.cards, setting.number
    trained, adapter, frozen, root = shape.dense, shape.adapter, 0, shape.embeddings
    sees = shape.tower and not setting.freeze_vision
    if shape.tower:
        root += shape.tower.rest
        frozen = 0 if sees else shape.tower.dense
        trained, adapter = trained + sees * shape.tower.dense, adapter + sees * shape.tower.adapter
    first = adapter * setting.lora_rank if adapted else trained / cards  # numbers that train
    beside = 2 * (trained + frozen) if number == 2 and cards == 1 else 4 * frozen / cards
    whole = 12 * trained / cards + beside
    policy = 12 * first + number * (trained + frozen) if adapted else whole
    rank = setting.lora_rank if setting.prm_copy else setting.prm_rank
    second = adapter * rank / (1 if setting.own_base else cards)
    prm = 12 * second + setting.own_base * trained
    if setting.own_base == 16 or setting.prm_copy and not adapted:
        second, prm = trained / cards, whole
    gathered = 0.0
    if cards > 1:  # what belongs to no layer, a layer and the next one; gradients, whole and summed
        gathered = number * (2 * root + 3 * shape.layer) + 4 * shape.layer
    activations = kept(shape, setting, setting.tokens)
    if sees:
        activations += kept(shape.tower, setting, setting.tokens * PICTURES * shape.tower.patches)
    logits = min(setting.tokens * setting.action_share * shape.vocabulary, LOGITS)
    return {
        "policy": policy,
        "PRM": prm,
        "gradients": 4 * max(first, second),
        "weights gathered": gathered,
        "activations": activations,
        "logits": logits * 4 * 3,  # values, softmax, gradient
        "buffers": 0.0 if gpu else 4 * shape.vocabulary * shape.hidden,
    }


def kept(shape: Shape, setting: Setting, tokens: float) -> float:
    """What all layers keep of so many tokens or patches for their backward pass [bytes]."""
    layer = tokens * kept_by_layer(shape, setting.dtype)
    if not setting.recompute:
        return (shape.layers + 1) * layer  # and one layer's gradients
    return tokens * shape.layers * shape.hidden * setting.number + 2 * layer  # inputs, and one


def kept_by_layer(shape: Shape, dtype: str) -> int:
    """What a layer keeps of a token for its backward pass [bytes]: inputs and outputs of norms,
    projections and attention. In bfloat16, norms keep their input in float32."""
    h, i, q, k = shape.hidden, shape.inner, shape.queries, shape.keys
    norms = q + k if shape.head_norms else 0
    if dtype == "bfloat16":
        return 2 * (8 * h + 2 * q + 2 * k + 4 * i) + 6 * norms
    return 4 * (6 * h + 2 * q + 2 * k + 4 * i + 2 * norms)


def needed(shape: Shape, setting: Setting, gpu: bool) -> float:
    """Bytes that a card needs, or a machine without one for this process: 1.1 times the tensors, as
    free memory is in pieces. After an update, the engine has its share beside the trainer's."""
    parts, share = predict(shape, setting, gpu), setting.engine_share
    engine = setting.number * (shape.dense + (shape.tower.dense if shape.tower else 0))
    if not gpu:
        return sum(parts.values()) + (engine if share else 0)
    need = max(1.1 * sum(parts.values()), (parts["policy"] + parts["PRM"]) / (1 - share))
    return max(need, engine / share) if share else need


def fitting(shape, setting: Setting, memory: float, gpu: bool, longest: int):
    """(flags, the setting with them) that fit the memory [bytes], or None; longest [tokens]."""
    changes = {"--gradient-checkpointing": dict(recompute=True)}
    changes[f"--micro-batch-tokens {longest}"] = dict(tokens=min(longest, setting.tokens))
    if not setting.lora_rank:
        changes[f"--policy-lora-rank {FEWER}"] = dict(lora_rank=FEWER, cards=1)
    flags = []
    for flag, change in changes.items():
        before, setting = setting, replace(setting, **change)
        flags += [flag] * (setting != before)
        if needed(shape, setting, gpu) <= memory:
            return " ".join(flags), setting
    return None


def setting_of(args, cards: int) -> Setting:
    """What a script's flags say; cards: that share the policy."""
    run_args = args.run_args
    rank = getattr(args, "prm_lora_rank", getattr(args, "critic_lora_rank", 0))
    prime = hasattr(args, "prm_score") and not args.policy_lora_rank  # on a copy of the policy
    number = 4 if run_args.dtype == "float32" or prime and cards > 1 else 2  # FSDP's is float32
    apart = prime or hasattr(args, "critic_lora_rank") or getattr(args, "step_reward", "") == "head"
    own_base = (number if rank else 16) if apart else 0
    episodes = -(-args.tasks_per_iteration * args.group_size // run_args.processes)
    is_elsewhere, longest = run_args.engine_url or run_args.engine == "hf", args.max_context_tokens
    share = 0.0 if is_elsewhere else run_args.engine_gpu_share
    tokens = min(max(run_args.micro_batch_tokens, longest), episodes * longest)
    copied, frozen = hasattr(args, "prm_learning_rate"), getattr(args.world, "freeze_vision", False)
    told = dict(lora_rank=args.policy_lora_rank, prm_rank=rank, prm_copy=copied and not rank)
    told |= dict(own_base=own_base, freeze_vision=frozen, cards=cards, engine_share=share)
    told |= dict(dtype=run_args.dtype, recompute=run_args.gradient_checkpointing)
    return Setting(tokens, min(1.0, args.max_steps * args.max_action_tokens / longest), **told)


def tell_if_too_much(config, args, cards: int, card: float | None) -> None:
    """Warn, before anything is loaded, where a run needs more memory than there is, with flags that
    would fit. card: bytes of the GPU; None: there is none, the machine's memory counts."""
    if (shape := shape_of(config)) is None:
        return
    gpu, memory, what = card is not None, card, "this GPU has"
    if not gpu:  # where vLLM's cache stays while the trainer works
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        memory, what = memory / int(os.environ.get("LOCAL_WORLD_SIZE", 1)), "this machine has"
        if args.run_args.engine != "hf" and not args.run_args.engine_url:
            memory -= args.run_args.engine_memory * GIB
            what = f"beside --engine-memory {what}"
    setting = setting_of(args, cards // fsdp.copies())
    if (need := needed(shape, setting, gpu)) <= memory:
        return
    parts = predict(shape, setting, gpu).items()
    listed = ", ".join(f"{name} {part / GIB:.1f}" for name, part in parts if part >= GIB / 10)
    advice = "nothing that this library has would fit: a smaller --model"
    if found := fitting(shape, setting, memory, gpu, args.max_context_tokens):
        advice = f"{found[0]} would need {needed(shape, found[1], gpu) / GIB:.1f}"
    sizes = f"about {need / GIB:.1f} GiB by prediction, {what} {memory / GIB:.1f}"
    warn(f"memory: an iteration needs {sizes} ({listed}); {advice}")
