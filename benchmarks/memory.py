"""Peak memory of an iStar iteration: predicted from the model's shape and the flags, and measured.

    python benchmarks/memory.py                     # tiny models, measured; 0.5B to 7B, predicted
    python benchmarks/memory.py --models tiny smollm2 --smollm2 DIR     # in Hugging Face format
    python benchmarks/memory.py --models qwen-0.5b  # of random weights: wants a GPU

`predict` is the function. Measured is, in a process of its own, the resident memory (on a GPU: what
is allocated) that building both networks and one update of each adds; the engine is not in it, and
is added in the table of cards: its weights and, on a GPU, 40 % of the card while it is awake.
Written: benchmarks/results/memory.md.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

from throughput import ROOT, load_script, resident

SHAPES = {  # Qwen2.5: hidden, intermediate, layers, heads, key-value heads, vocabulary, tied
    "qwen-0.5b": (896, 4864, 24, 14, 2, 151936, True),
    "qwen-1.5b": (1536, 8960, 28, 12, 2, 151936, True),
    "qwen-7b": (3584, 18944, 28, 28, 4, 152064, False),
}
SEEING = {  # the language side of Qwen2.5-VL
    "qwen-vl-3b": (2048, 11008, 36, 16, 2, 151936, True),
    "qwen-vl-7b": (3584, 18944, 28, 28, 4, 152064, False),
}
TOWER = SimpleNamespace(hidden=1280, inner=3420, layers=32, patch=3 * 2 * 14 * 14, merge=2)
PICTURE_SHARE = 0.25  # of a context's tokens, those that stand for pictures
CARDS = (24, 48, 80, 141)  # GiB of an RTX 4090, an L40S, an A100 or H100, an H200
PRM_RANK = 16  # --prm-lora-rank; the default of the scripts is a full copy
GIB = 2**30


def shape_of(config) -> SimpleNamespace:
    """What of a model's configuration counts."""
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return SimpleNamespace(
        hidden=config.hidden_size,
        inner=config.intermediate_size,
        layers=config.num_hidden_layers,
        queries=config.num_attention_heads * width,
        keys=config.num_key_value_heads * width,
        vocabulary=config.vocab_size,
        tied=config.tie_word_embeddings,
        head_norms=config.model_type == "qwen3",
    )


def random_qwen(shape: tuple):
    """A Qwen2 of this shape, as in SHAPES, with random weights."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    hidden, inner, layers, heads, keys, vocabulary, tied = shape
    config = Qwen2Config(
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=keys,
        vocab_size=vocabulary,
        tie_word_embeddings=tied,
    )
    return Qwen2ForCausalLM(config)


def predict(
    shape, tokens: int, action_share: float, lora_rank: int, prm_rank: int, dtype: str
) -> dict[str, float]:
    """Bytes at the peak of an iteration, by what they are for.

    tokens: --micro-batch-tokens. action_share: of the tokens, those that the agent wrote.
    lora_rank: 0 trains all. Weights that train have four float32 numbers each (value, gradient, two
    moments), frozen ones one of the dtype."""
    h, i, q, k = shape.hidden, shape.inner, shape.queries, shape.keys
    matrices = [(h, q), (h, k), (h, k), (q, h), (h, i), (h, i), (i, h)]
    embeddings = shape.vocabulary * h * (1 if shape.tied else 2)
    dense = shape.layers * sum(a * b for a, b in matrices) + embeddings
    adapter = shape.layers * sum(a + b for a, b in matrices)  # of rank 1
    number, frozen = 4, 2 if dtype == "bfloat16" else 4

    kept = kept_by_layer(h, i, q, k, q + k if shape.head_norms else 0, dtype)
    activations = tokens * (shape.layers + 1) * kept  # and one layer's gradients
    logits = min(tokens * action_share * shape.vocabulary, 2**28)
    logits *= number * 3  # values, softmax, gradient

    policy = dense * (frozen if lora_rank else 4 * number)
    prm = 0 if lora_rank else dense * 4  # its base is as precise as the policy
    cast = dense * 2 if dtype == "bfloat16" and not lora_rank else 0
    return {
        "policy": policy + 4 * number * adapter * lora_rank,
        "PRM": prm + 4 * number * adapter * prm_rank,
        "matrices cast to bfloat16": cast,
        "activations": activations,
        "logits": logits,
    }


def kept_by_layer(h: int, i: int, q: int, k: int, head_norms: int, dtype: str) -> int:
    """What a layer keeps of a token for its backward pass [bytes], as torch's saved tensors show
    it: two norms with input and output, what the projections read, queries, keys, values,
    attention's output, four of the feed-forward's width. bfloat16 has a copy of its input for each
    projection, and its norms stay float32."""
    if dtype == "bfloat16":
        return 4 * 4 * h + 2 * (5 * h + 2 * q + 2 * k + 4 * i) + 6 * head_norms
    return 4 * (6 * h + 2 * q + 2 * k + 4 * i + 2 * head_norms)


def predict_tower(shape, tokens: int, lora_rank: int, prm_rank: int, freeze: bool) -> dict:
    """What the vision tower adds to predict's parts, in bfloat16, if no picture of the
    PICTURE_SHARE of the tokens returns. freeze: --freeze-vision, where it has weights alone."""
    h, i, four = TOWER.hidden, TOWER.inner, TOWER.hidden * TOWER.merge**2
    matrices = [(h, 3 * h), (h, h), (h, i), (h, i), (i, h)]
    merger = [(four, four), (four, shape.hidden)]
    dense = TOWER.layers * sum(a * b for a, b in matrices) + TOWER.patch * h
    dense += sum(a * b for a, b in merger)
    adapter = TOWER.layers * sum(a + b for a, b in matrices) + sum(a + b for a, b in merger)
    patches = tokens * PICTURE_SHARE * TOWER.merge**2
    activations = patches * (TOWER.layers + 1) * kept_by_layer(h, i, h, h, 0, "bfloat16")
    prm = 0 if lora_rank else dense * 4
    if freeze:
        return {"policy": dense * (2 if lora_rank else 4), "PRM": prm}
    return {
        "policy": dense * (2 if lora_rank else 16) + 16 * adapter * lora_rank,
        "PRM": prm + 16 * adapter * prm_rank,
        "matrices cast to bfloat16": 0 if lora_rank else dense * 2,
        "activations": activations,
    }


def networks(build, lora_rank: int, dtype: str) -> tuple:
    """(policy, PRM) as a script has them: build(dtype) makes the initial model."""
    from runtime.networks import Network, add_adapter, trainable

    import torch
    from torch.optim import AdamW

    frozen = torch.bfloat16 if dtype == "bfloat16" else torch.float32
    model = build(frozen if lora_rank else torch.float32)
    if lora_rank:
        model = add_adapter(model, "policy", lora_rank)
    optimizer = AdamW(trainable(model), 1e-6, weight_decay=0.0)
    policy = Network("policy", model, optimizer, dtype)

    base = model if lora_rank else build(torch.float32)
    model = add_adapter(base, "prm", PRM_RANK)
    return policy, Network("prm", model, AdamW(trainable(model), 1e-6), dtype)


def measure(path: str, tokens: int, lora_rank: int, dtype: str) -> None:
    """Print what one update of each network adds to this process's memory [bytes]."""
    istar = load_script("istar_sokoban")
    from runtime.batching import batch_logprobs
    from runtime.flags import RunArgs

    import peft  # noqa: F401 (what it takes is not the networks')
    import torch
    from transformers import AutoModelForCausalLM

    cuda = torch.cuda.is_available()
    device = "cuda" if cuda else "cpu"

    def build(kind):
        if path in SHAPES:
            return random_qwen(SHAPES[path]).to(device, kind)
        return AutoModelForCausalLM.from_pretrained(path, dtype=kind).to(device)

    def memory() -> float:
        return torch.cuda.max_memory_allocated() if cuda else resident() * 1e9

    layer = torch.nn.Linear(8, 8).to(device)
    loss = layer(torch.zeros(64, 8, device=device)).sum()
    loss.backward()  # libraries take theirs at first use
    before = memory()

    policy, prm = networks(build, lora_rank, dtype)
    args = istar.Args(run_args=RunArgs(micro_batch_tokens=tokens, dtype=dtype), minibatches=1)
    config = policy.model.config
    steps = [istar.Step("", "", True) for _ in range(4)]
    ids = torch.randint(3, config.vocab_size, (tokens // 512, 512)).tolist()
    step_ids = [number for step in range(4) for number in [-1] * 96 + [step] * 32]
    games = [istar.Trajectory(0, row, step_ids, float(n % 2), steps) for n, row in enumerate(ids)]
    batch = istar.flatten(games)  # a quarter of the tokens are actions

    old = batch_logprobs(policy, batch, args)
    pairs = istar.preference_pairs(batch.outcomes, batch.group)
    advantages = torch.linspace(-1, 1, len(batch.step_traj))
    for _ in range(2):  # the moments are there from the first update on
        istar.prm_update(prm, batch, old, pairs, args)
        istar.policy_update(policy, batch, old, advantages, args)
    print(json.dumps({"peak": memory() - before, "shape": vars(shape_of(config))}))


def measured(path: str, tokens: int, lora_rank: int, dtype: str) -> tuple[float, SimpleNamespace]:
    """(bytes, shape) of a model, from a process of its own, which gives freed memory back at once:
    what is measured is what is needed, and not the holes that the allocator leaves."""
    command = [sys.executable, __file__, "--measure", path, str(tokens), str(lora_rank), dtype]
    environment = os.environ | {"WANDB_MODE": "offline", "MALLOC_MMAP_THRESHOLD_": "1000000"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stderr[-3000:]}")
    answer = json.loads(done.stdout.strip().splitlines()[-1])
    return answer["peak"], SimpleNamespace(**answer["shape"])


def measured_lines(arguments) -> list[str]:
    """The table of what was measured, a row for each setting."""
    lines = ["| model | dtype | trains | tokens | predicted | measured | ratio |", f"|{'---|' * 7}"]
    paths = {"tiny": str(ROOT / "models" / "tiny-webshop"), "smollm2": arguments.smollm2}
    settings = [
        (model, dtype, rank, tokens)
        for model in arguments.models
        for dtype in arguments.dtypes
        for rank in (0, 16)
        for tokens in arguments.tokens
    ]
    for model, dtype, rank, tokens in settings:
        peak, shape = measured(paths.get(model, model), tokens, rank, dtype)
        total = sum(predict(shape, tokens, 0.25, rank, PRM_RANK, dtype).values())
        trains = f"LoRA {rank}" if rank else "all"
        figures = f"{total / 2**20:,.0f} | {peak / 2**20:,.0f} | {total / peak:.2f}"
        lines.append(f"| {model} | {dtype} | {trains} | {tokens} | {figures} |")
        print(lines[-1], flush=True)
    return lines


def predicted_lines() -> list[str]:
    """The table of the cards, a row for each shape and what trains."""
    titles = "model | trains | weights that train, moments | frozen | activations, logits | engine"
    lines = [f"| {titles} | total | card |", f"|{'---|' * 8}"]
    for name, (h, i, layers, heads, keys, vocabulary, tied) in (SHAPES | SEEING).items():
        sizes = dict(hidden=h, inner=i, layers=layers, queries=h, keys=h // heads * keys)
        sizes |= dict(vocabulary=vocabulary, tied=tied, head_norms=False)
        shape = SimpleNamespace(**sizes)
        engine = predict(shape, 0, 0, 1, 0, "bfloat16")["policy"] / GIB
        if name in SEEING:
            engine += predict_tower(shape, 0, 1, 0, True)["policy"] / GIB
        ways = [(0, False), (64, False)] + [(0, True), (64, True)] * (name in SEEING)
        for rank, freeze in ways:
            parts = predict(shape, 8192, 0.25, rank, PRM_RANK, "bfloat16")
            if name in SEEING:
                tower = predict_tower(shape, 8192, rank, PRM_RANK, freeze)
                parts = {key: value + tower.get(key, 0) for key, value in parts.items()}
            parts = {key: value / GIB for key, value in parts.items()}
            work = parts["activations"] + parts["logits"]
            frozen = engine if rank else parts["PRM"]
            trained = sum(parts.values()) - work - frozen
            total = trained + frozen + work  # the engine sleeps meanwhile
            awake = (trained + frozen + engine) / 0.6  # it may take 40 % of the card beside them
            cards = (f"{card} GiB" for card in CARDS if max(total * 1.1, awake) <= card)
            numbers = " | ".join(f"{x:.1f}" for x in (trained, frozen, work, engine, total))
            trains = f"LoRA {rank}" if rank else "all"
            trains += " of the language side" * freeze
            lines.append(f"| {name} | {trains} | {numbers} | {next(cards, 'none of one')} |")
    return lines


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    add = parser.add_argument
    models = "tiny, smollm2, or one of " + ", ".join(SHAPES)
    add("--models", nargs="+", default=["tiny"], help=models)
    add("--smollm2", default="", help="its directory")
    sizes = [2048, 4096, 8192]
    add("--tokens", nargs="+", type=int, default=sizes, help="--micro-batch-tokens")
    add("--dtypes", nargs="+", default=["float32"], choices=("float32", "bfloat16"))
    results = ROOT / "benchmarks" / "results"
    add("--out", type=Path, default=results, help="directory of the table")
    metavar = ("MODEL", "TOKENS", "RANK", "DTYPE")
    add("--measure", nargs=4, metavar=metavar, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        path, tokens, rank, dtype = arguments.measure
        return measure(path, int(tokens), int(rank), dtype)
    if "smollm2" in arguments.models and not arguments.smollm2:
        sys.exit("--models smollm2: --smollm2 says where it is")

    setting = "bfloat16, 8,192 tokens at a time, a quarter of them actions"
    setting += " (qwen-vl: and a quarter of pictures), GiB"
    lines = [f"`python {' '.join(sys.argv)}`", "", "Measured and predicted, MiB:", ""]
    lines += measured_lines(arguments)
    lines += ["", f"Predicted for a GPU, {setting}:", "", *predicted_lines()]
    print("\n".join(lines))
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "memory.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
