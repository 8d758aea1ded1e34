"""Peak memory of an iStar iteration: predicted from the model's shape and the flags, and measured.

    python benchmarks/memory.py                                       # tiny models, measured; 0.5B to 7B, predicted
    python benchmarks/memory.py --models tiny smollm2 --smollm2 DIR   # a directory in Hugging Face format
    python benchmarks/memory.py --models qwen-0.5b                    # a Qwen2.5-0.5B of random weights: wants a GPU

`predict` is the function. Measured is, in a process of its own, the resident memory (on a GPU: what is allocated) that
building both networks and one update of each adds; the engine is not in it, and is added in the table of cards: its
weights and, on a GPU, 40 % of the card while it is awake. Written: benchmarks/results/memory.md.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

from throughput import load_script

ROOT = Path(__file__).resolve().parent.parent
SHAPES = {  # of Qwen2.5: hidden, intermediate, layers, heads, key-value heads, vocabulary, tied embeddings
    "qwen-0.5b": (896, 4864, 24, 14, 2, 151936, True),
    "qwen-1.5b": (1536, 8960, 28, 12, 2, 151936, True),
    "qwen-7b": (3584, 18944, 28, 28, 4, 152064, False),
}
CARDS = (24, 48, 80, 141)  # GiB of an RTX 4090, an L40S, an A100 or H100, an H200
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

    h, i, layers, heads, keys, vocabulary, tied = shape
    sizes = dict(hidden_size=h, intermediate_size=i, num_hidden_layers=layers, num_attention_heads=heads)
    config = Qwen2Config(**sizes, num_key_value_heads=keys, vocab_size=vocabulary, tie_word_embeddings=tied)
    return Qwen2ForCausalLM(config)


def predict(shape, tokens: int, action_share: float, lora_rank: int, prm_rank: int, dtype: str) -> dict[str, float]:
    """Bytes at the peak of an iteration, by what they are for.

    tokens: --micro-batch-tokens. action_share: of the tokens, those that the agent wrote. lora_rank: 0 trains all.
    Weights that train have four float32 numbers each (value, gradient, two moments), frozen ones one of the dtype."""
    h, i, q, k = shape.hidden, shape.inner, shape.queries, shape.keys
    matrices = [(h, q), (h, k), (h, k), (q, h), (h, i), (h, i), (i, h)]
    dense = shape.layers * sum(a * b for a, b in matrices) + shape.vocabulary * h * (1 if shape.tied else 2)
    adapter = shape.layers * sum(a + b for a, b in matrices)  # of rank 1
    number, frozen = 4, 2 if dtype == "bfloat16" else 4
    # what a layer keeps of a token for its backward pass, as torch's saved tensors show it: two norms with input and
    # output, what the projections read, queries, keys, values, attention's output, four of the feed-forward's width;
    # bfloat16 has a copy of its input for each projection, and its norms stay float32
    if dtype == "bfloat16":
        kept = 4 * 4 * h + 2 * (5 * h + 2 * q + 2 * k + 4 * i) + (6 * (q + k) if shape.head_norms else 0)
    else:
        kept = 4 * (6 * h + 2 * q + 2 * k + 4 * i + (2 * (q + k) if shape.head_norms else 0))
    activations = tokens * (shape.layers + 1) * kept  # and one layer's gradients
    logits = min(tokens * action_share * shape.vocabulary, 2**28) * number * 3  # values, softmax, gradient
    parts = {"policy": dense * (frozen if lora_rank else 4 * number) + 4 * number * adapter * lora_rank}
    parts["PRM"] = (0 if lora_rank else dense * frozen) + 4 * number * adapter * prm_rank
    parts["matrices cast to bfloat16"] = dense * 2 if dtype == "bfloat16" and not lora_rank else 0
    return parts | {"activations": activations, "logits": logits}


def measure(path: str, tokens: int, lora_rank: int, dtype: str) -> None:
    """Print what one update of each network adds to this process's memory [bytes]."""
    sys.path.insert(0, str(ROOT))
    istar = load_script("istar_sokoban")
    import torch
    from transformers import AutoModelForCausalLM

    cuda, frozen = torch.cuda.is_available(), torch.bfloat16 if dtype == "bfloat16" else torch.float32
    device = "cuda" if cuda else "cpu"

    def build(kind):
        if path in SHAPES:
            return random_qwen(SHAPES[path]).to(device, kind)
        return AutoModelForCausalLM.from_pretrained(path, dtype=kind).to(device)

    def memory() -> int:
        if cuda:
            return torch.cuda.max_memory_allocated()
        return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024

    layer = torch.nn.Linear(8, 8).to(device)
    layer(torch.zeros(64, 8, device=device)).sum().backward()  # libraries take theirs at first use
    before = memory()
    policy = build(frozen if lora_rank else torch.float32)
    policy = istar.add_adapter(policy, "policy", lora_rank) if lora_rank else policy
    prm = istar.add_adapter(policy if lora_rank else build(frozen), "prm", 16)
    args = istar.Args(micro_batch_tokens=tokens, dtype=dtype, minibatches=1)
    count = tokens // 512
    steps = [istar.Step("", "", True, 0.0, 0.0, None, []) for _ in range(4)]
    ids = torch.randint(3, policy.config.vocab_size, (count, 512)).tolist()
    step_ids = [number for step in range(4) for number in [-1] * 96 + [step] * 32]  # a quarter are actions
    games = [istar.Trajectory(0, row, step_ids, float(n % 2), steps) for n, row in enumerate(ids)]
    batch = istar.flatten(games)
    old = istar.score_tokens(istar.activate(policy, "policy"), batch, args, "")
    pairs = istar.preference_pairs(batch.outcomes, batch.group)
    optimizers = {}
    for name in ("prm", "policy", "prm", "policy"):  # twice: the moments are there from the first update on
        model = istar.activate(prm if name == "prm" else policy, name)
        if name not in optimizers:
            optimizers[name] = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-6)
        optimizer = optimizers[name]
        if name == "prm":
            istar.prm_update(model, optimizer, batch, old, pairs, args)
        else:
            istar.policy_update(model, optimizer, batch, old, torch.linspace(-1, 1, len(batch.step_traj)), args)
            optimizer.zero_grad()
    print(json.dumps({"peak": memory() - before, "shape": vars(shape_of(policy.config))}))


def measured(path: str, tokens: int, lora_rank: int, dtype: str) -> tuple[float, SimpleNamespace]:
    """(bytes, shape) of a model, from a process of its own, which gives freed memory back at once: what is measured is
    what is needed, and not the holes that the allocator leaves."""
    command = [sys.executable, __file__, "--measure", path, str(tokens), str(lora_rank), dtype]
    environment = os.environ | {"WANDB_MODE": "offline", "MALLOC_MMAP_THRESHOLD_": "1000000"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stderr[-3000:]}")
    answer = json.loads(done.stdout.strip().splitlines()[-1])
    return answer["peak"], SimpleNamespace(**answer["shape"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["tiny"], help="tiny, smollm2, or one of " + ", ".join(SHAPES))
    parser.add_argument("--smollm2", default="", help="its directory")
    parser.add_argument("--tokens", nargs="+", type=int, default=[2048, 4096, 8192], help="--micro-batch-tokens")
    parser.add_argument("--dtypes", nargs="+", default=["float32"], choices=("float32", "bfloat16"))
    parser.add_argument("--measure", nargs=4, metavar=("MODEL", "TOKENS", "RANK", "DTYPE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        path, tokens, rank, dtype = arguments.measure
        return measure(path, int(tokens), int(rank), dtype)
    if "smollm2" in arguments.models and not arguments.smollm2:
        sys.exit("--models smollm2: --smollm2 says where it is")
    lines = [f"`python {' '.join(sys.argv)}`", "", "Measured and predicted, MiB:", ""]
    lines += ["| model | dtype | trains | tokens | predicted | measured | ratio |", "|---|---|---|---|---|---|---|"]
    for model in arguments.models:
        path = {"tiny": str(ROOT / "models" / "tiny-webshop"), "smollm2": arguments.smollm2}.get(model, model)
        for dtype in arguments.dtypes:
            for rank in (0, 16):
                for tokens in arguments.tokens:
                    peak, shape = measured(path, tokens, rank, dtype)
                    total = sum(predict(shape, tokens, 0.25, rank, 16, dtype).values())
                    trains = f"LoRA {rank}" if rank else "all"
                    figures = f"{total / 2**20:,.0f} | {peak / 2**20:,.0f} | {total / peak:.2f}"
                    lines.append(f"| {model} | {dtype} | {trains} | {tokens} | {figures} |")
                    print(lines[-1], flush=True)
    lines += ["", "Predicted for a GPU, bfloat16, 8,192 tokens at a time, a quarter of them actions, GiB:", ""]
    lines += ["| model | trains | weights that train, moments | frozen | activations, logits | engine | total | card |"]
    lines += ["|---|---|---|---|---|---|---|---|"]
    for name, (h, i, layers, heads, keys, vocabulary, tied) in SHAPES.items():
        sizes = dict(hidden=h, inner=i, layers=layers, queries=h, keys=h // heads * keys, vocabulary=vocabulary)
        shape = SimpleNamespace(**sizes, tied=tied, head_norms=False)
        engine = predict(shape, 0, 0, 1, 0, "bfloat16")["policy"] / GIB
        for rank in (0, 64):
            parts = {key: value / GIB for key, value in predict(shape, 8192, 0.25, rank, 16, "bfloat16").items()}
            work = parts["activations"] + parts["logits"]
            frozen = engine if rank else parts["PRM"]
            trained = sum(parts.values()) - work - frozen
            total = trained + frozen + work  # the engine sleeps meanwhile
            awake = (trained + frozen + engine) / 0.6  # it may take 40 % of the card beside what stays
            fits = next((f"{card} GiB" for card in CARDS if max(total * 1.1, awake) <= card), "none of one")
            trains = f"LoRA {rank}" if rank else "all"
            numbers = " | ".join(f"{x:.1f}" for x in (trained, frozen, work, engine, total))
            lines.append(f"| {name} | {trains} | {numbers} | {fits} |")
    print("\n".join(lines))
    (ROOT / "benchmarks" / "results" / "memory.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
