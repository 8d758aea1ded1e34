"""Peak memory of an iteration: predicted from the model's shape and the flags, and measured.

    python benchmarks/memory.py                     # tiny models, measured; 0.5B to 7B, predicted
    python benchmarks/memory.py --models smollm2 --tokens 512   # of its shape, with random weights
    python benchmarks/memory.py --models qwen-0.5b  # wants a GPU
    python benchmarks/memory.py --models            # the predictions alone

runtime/memory.py predicts; a run warns by it. Measured is, in a process of its own, the resident
memory (on a GPU: what is allocated) that building the networks and one update of each adds, in two
micro-batches; the engine is not in it. Every setting is measured: all weights or LoRA, with a PRM
and without (rloo_*.py), with --gradient-checkpointing and without; and all weights divided between
two processes (FSDP), of which the first is measured. Written: benchmarks/results/memory.md.
"""

import argparse
import gc
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

from throughput import ROOT, load_script, resident

sys.path.insert(0, str(ROOT))

from runtime.memory import (
    GIB,
    Setting,
    Shape,
    fitting,
    needed,
    predict,
    shape_of,
)

SHAPES = {  # hidden, intermediate, layers, heads, key-value heads, vocabulary, tied
    "smollm2": (576, 1536, 30, 9, 3, 49152, True),  # of 135M
    "qwen-0.5b": (896, 4864, 24, 14, 2, 151936, True),
    "qwen-1.5b": (1536, 8960, 28, 12, 2, 151936, True),
    "qwen-3b": (2048, 11008, 36, 16, 2, 151936, True),
    "qwen-7b": (3584, 18944, 28, 28, 4, 152064, False),
}
LARGE = [name for name in SHAPES if name != "smollm2"]
SEEING = {  # the language side of Qwen2.5-VL
    "qwen-vl-3b": SHAPES["qwen-3b"],
    "qwen-vl-7b": SHAPES["qwen-7b"],
}
TOWER = (1280, 3420, 32, 1280, 1280, 0, True)  # of Qwen2.5-VL
TINY = ROOT / "models" / "tiny-webshop"
CARD = 79 * GIB  # what an A100 or H100 of "80 GB" has
TOKENS = (2048, 4096, 8192, 16384)
PRM_RANK, LORA_RANK, LESS = 16, 64, 16  # --prm-lora-rank, --policy-lora-rank; as measured
DISK, RATE = 1e9, 4e14  # [bytes/s] of a disk, [FLOP/s] of a card in training: assumed
EPISODES = 128  # of an iteration: 16 groups of 8, as the paper's


def shape_named(name: str) -> Shape:
    """A Shape of SHAPES or SEEING."""
    h, i, layers, heads, keys, vocabulary, tied = (SHAPES | SEEING)[name]
    tower = None
    if name in SEEING:  # patches of 2 x 14 x 14 pixels, 2 x 2 of them a token
        rest = 3 * 2 * 14 * 14 * TOWER[0] + 4 * TOWER[0] * (4 * TOWER[0] + h)
        tower = Shape(*TOWER, rest=rest, patches=4)
    return Shape(h, i, layers, h, h // heads * keys, vocabulary, tied, tower=tower)


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


def networks(build, lora, lora_rank: int, dtype: str, prm_rank: int = PRM_RANK) -> list:
    """[policy, PRM] as a script has them: build(dtype) makes the initial model, lora(rank) is the
    script's. prm_rank 0: the policy alone."""
    from runtime.distributed import fsdp
    from runtime.networks import Network, add_adapter

    import torch
    from torch.optim import AdamW

    model = build(torch.float32 if fsdp.wanted() else getattr(torch, dtype))
    if lora_rank:
        model = add_adapter(model, "policy", lora(lora_rank))
    found = [Network("policy", model)]
    if prm_rank:
        found.append(found[0].with_adapter("prm", lora(prm_rank)))
    for network in found:
        network.optimizer = AdamW(network.trained, 1e-6, weight_decay=0.0)
    return found


def reset_peak() -> None:
    """Let most_bytes() count from now on."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5")


def most_bytes() -> float:
    """The most since reset_peak(): on a card what was allocated, else what was resident."""
    import torch

    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else resident() * 1e9


def measure(path: str, setting: Setting) -> None:
    """Print what one update of each network adds to this process's memory [bytes]; what libraries
    take at their first use, an update of a tiny model has taken before."""
    istar = load_script("istar_sokoban")
    from runtime.data import Step, Trajectory, flatten
    from runtime.distributed import fsdp, processes
    from runtime.flags import RunArgs
    from runtime.networks import batch_logprobs, recompute_layers

    import torch
    from transformers import AutoModelForCausalLM

    flags = dict(dtype=setting.dtype, processes=setting.cards, engine="vllm")
    args = istar.Args(run_args=RunArgs(micro_batch_tokens=setting.tokens, **flags), minibatches=1)
    device, cuda = processes.start(args), torch.cuda.is_available()

    def build(kind):
        if path in SHAPES:
            return random_qwen(SHAPES[path]).to(device, kind)
        return AutoModelForCausalLM.from_pretrained(path, dtype=kind).to(device)

    def tiny(kind):
        return AutoModelForCausalLM.from_pretrained(TINY, dtype=kind).to(device)

    def update(policy, prm: list, games: int, words: int, answer: int) -> None:
        """An update of each by episodes of four steps, half of which win. A PRM sees the pairs of
        half of them: those of one micro-batch."""
        step_ids = [number for step in range(4) for number in [-1] * words + [step] * answer]
        last = policy.model.config.vocab_size
        ids = torch.randint(3, last, (games, len(step_ids))).tolist()
        steps = [Step("", "", [0.0] * answer) for _ in range(4)]
        rows = [Trajectory(0, row, step_ids, float(n % 2), steps) for n, row in enumerate(ids)]
        batch = flatten(rows)
        old = batch_logprobs(policy, batch, args)
        for network in prm:
            istar.prm_update(network, policy, rows[: max(2, games // 2)], args)
        advantages = torch.linspace(-1, 1, len(batch.step_traj))
        istar.policy_update(policy, batch, old, advantages, args)

    policy, *prm = networks(tiny, istar.lora, 0 if fsdp.wanted() else 4, setting.dtype)
    if fsdp.wanted():
        fsdp.shard_all([policy, *prm], setting.dtype, device)
    update(policy, prm, 2, 3, 1)
    del policy, prm
    gc.collect()
    reset_peak()
    before = most_bytes()

    sizes = setting.lora_rank, setting.dtype, setting.prm_rank
    policy, *prm = networks(build, istar.lora, *sizes)
    if setting.recompute:
        assert recompute_layers([network.model for network in (policy, *prm)])
    if fsdp.wanted():
        fsdp.shard_all([policy, *prm], setting.dtype, device)
    update(policy, prm, 2, 3, 1)  # the moments are there from now on
    # two micro-batches in each process, a quarter of them actions
    update(policy, prm, setting.tokens // 128 * setting.cards, 48, 16)
    shape = vars(shape_of(policy.model.config))
    print(json.dumps({"peak": most_bytes() - before, "shape": shape, "gpu": cuda}))
    processes.end()


def measured(path: str, setting: Setting) -> tuple[float, float]:
    """(measured, predicted) bytes of a model, from a process of its own, which gives freed memory
    back at once: what is measured is what is needed, and not the allocator's holes."""
    command = [__file__, "--measure", path, json.dumps(vars(setting))]
    if setting.cards > 1:
        launcher = ["accelerate.commands.launch", "--config_file", ROOT / "configs" / "fsdp.yaml"]
        launcher += ["--num_processes", setting.cards, "--main_process_port", 0]
        command = ["-m", *map(str, launcher), *command]
    command = [sys.executable, *command]
    environment = os.environ | {"WANDB_MODE": "offline", "MALLOC_MMAP_THRESHOLD_": "100000"}
    environment |= {"GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stderr[-3000:]}")
    answer = json.loads(done.stdout.strip().splitlines()[-1])
    parts = predict(Shape(**answer["shape"]), setting, answer["gpu"])
    return answer["peak"], sum(parts.values())


def trains(setting: Setting) -> str:
    return f"LoRA {setting.lora_rank}" if setting.lora_rank else "all"


def measured_lines(arguments) -> list[str]:
    """The table of what was measured, a row for each setting."""
    titles = "model | dtype | trains | processes | PRM | checkpointing | tokens"
    lines = [f"| {titles} | predicted | measured | ratio |", f"|{'---|' * 10}"]
    kinds = [(0, 1), (LESS, 1), (0, 2)]
    ways = itertools.product(arguments.dtypes, arguments.tokens, kinds, (False, True), (16, 0))
    for model, (dtype, tokens, kind, recompute, prm) in itertools.product(arguments.models, ways):
        rank, cards = kind
        setting = Setting(tokens, 0.25, rank, prm, dtype=dtype, recompute=recompute, cards=cards)
        peak, total = measured(str(TINY) if model == "tiny" else model, setting)
        cells = [model, dtype, trains(setting), str(cards), "yes" if prm else "no"]
        cells += ["yes" if recompute else "no", f"{tokens:,}", f"{total / 2**20:,.0f}"]
        cells += [f"{peak / 2**20:,.0f}", f"{total / peak:.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
        print(lines[-1], flush=True)
    return lines


def predicted_lines() -> list[str]:
    """The table of a card's need, a row for each model and what trains: without and with gradient
    checkpointing."""
    titles = " | ".join(f"{tokens:,} tokens" for tokens in TOKENS)
    lines = [f"| model | trains | PRM | cards | {titles} |", f"|{'---|' * (4 + len(TOKENS))}"]
    kinds = [(0, 1), (0, 8), (LORA_RANK, 1)]
    for name, (rank, cards), prm in itertools.product(LARGE, kinds, (PRM_RANK, 0)):
        cells = []
        for tokens in TOKENS:
            setting = Setting(tokens, 0.25, rank, prm, cards=cards)
            need = [
                needed(shape_named(name), setting, gpu=True),
                needed(shape_named(name), Setting(**vars(setting) | {"recompute": True}), gpu=True),
            ]
            cells.append(" / ".join(f"{each / GIB:.0f}" for each in need))
        row = [name, trains(setting), "yes" if prm else "no", "1 or 8" if rank else str(cards)]
        lines.append(f"| {' | '.join([*row, *cells])} |")
    return lines


def fitting_lines() -> list[str]:
    """The flags that fit iStar on one card and on eight, for each model and length."""
    lines = ["| model | tokens | on one card | all weights, on eight |", f"|{'---|' * 4}"]
    for name, tokens in itertools.product(LARGE, TOKENS):
        cells = []
        for cards in (1, 8):
            start = Setting(tokens, 0.25, 0, PRM_RANK, cards=cards)
            shape, flags = shape_named(name), "as they are"
            found = ("", start)
            if needed(shape, start, gpu=True) > CARD:
                found = fitting(shape, start, CARD, gpu=True, longest=tokens)
                flags = found[0] if found else "none"
            if found:
                flags += f" ({needed(shape, found[1], gpu=True) / GIB:.0f} GiB)"
            cells.append(flags)
        lines.append(f"| {name} | {tokens:,} | {' | '.join(cells)} |")
    return lines


def checkpoint_size(shape: Shape, setting: Setting) -> float:
    """Bytes of a checkpoint on the disk: of what trains, the weights in two files (--dtype, where
    they are the whole policy) and two moments."""
    policy = shape.dense * (setting.number + 12)
    if setting.lora_rank:
        policy = 16 * shape.adapter * setting.lora_rank
    whole = setting.own_base == 16 or setting.prm_copy and not setting.lora_rank
    rank = setting.lora_rank if setting.prm_copy else setting.prm_rank
    prm = shape.dense * (setting.number + 12) if whole else 16 * shape.adapter * rank
    return policy + prm


def saving_lines() -> list[str]:
    """The table of checkpoints: how long one holds the training up, and how often that is 5 % of
    the time."""
    titles = "model | trains | cards | checkpoint [GB] | saving [s] | iteration [s]"
    lines = [f"| {titles} | share, after every iteration | 5 % after |", f"|{'---|' * 8}"]
    for name, (rank, cards) in itertools.product(LARGE, [(0, 8), (LORA_RANK, 1)]):
        shape, setting = shape_named(name), Setting(4096, 0.25, rank, PRM_RANK, cards=cards)
        size = checkpoint_size(shape, setting)
        # a forward pass for old log-probabilities, four for the PRM, three for the update; the
        # rollout takes as long again
        operations = 2 * shape.dense * EPISODES * 4096 * (1 + 4 + 3)
        iteration = 2 * operations / (RATE * cards)
        saving = size / DISK
        cells = [name, trains(setting), str(cards), f"{size / 1e9:.1f}", f"{saving:.1f}"]
        cells += [f"{iteration:.0f}", f"{saving / (iteration + saving):.0%}"]
        every = max(1, -(-saving // (0.05 * iteration)))
        cells.append("every iteration" if every == 1 else f"{every:.0f} iterations")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def seeing_lines() -> list[str]:
    """The table of models that see: 8,192 tokens, a quarter of them pictures."""
    lines = ["| model | trains | without | with checkpointing |", f"|{'---|' * 4}"]
    kinds = itertools.product((0, LORA_RANK), (False, True))
    for name, (rank, freeze) in itertools.product(SEEING, kinds):
        cells = []
        for recompute in (False, True):
            setting = Setting(8192, 0.25, rank, PRM_RANK, recompute=recompute, freeze_vision=freeze)
            cells.append(f"{needed(shape_named(name), setting, gpu=True) / GIB:.0f}")
        who = trains(setting) + " of the language side" * freeze
        lines.append(f"| {name} | {who} | {' | '.join(cells)} |")
    return lines


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    add = parser.add_argument
    models = "tiny, or one of " + ", ".join(SHAPES)
    add("--models", nargs="*", default=["tiny"], help=models)
    add("--tokens", nargs="+", type=int, default=[2048, 4096], help="--micro-batch-tokens")
    add("--dtypes", nargs="+", default=["float32"], choices=("float32", "bfloat16"))
    results = ROOT / "benchmarks" / "results"
    add("--out", type=Path, default=results, help="directory of the table")
    add("--measure", nargs=2, metavar=("MODEL", "SETTING"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        path, setting = arguments.measure
        return measure(path, Setting(**json.loads(setting)))

    lines = [f"`{' '.join(['python benchmarks/memory.py', *sys.argv[1:]])}`", ""]
    if arguments.models:
        lines += ["Measured and predicted, MiB:", "", *measured_lines(arguments), ""]
    bfloat16 = "in bfloat16, a quarter of the tokens actions"
    lines += [f"Predicted for a GPU, {bfloat16}: what a card has to have, without /"]
    lines[-1] += " with --gradient-checkpointing [GiB]; tokens are --micro-batch-tokens, which are"
    lines[-1] += " those of the longest episode at least:"
    lines += ["", *predicted_lines(), ""]
    lines += ["Flags that fit iStar into cards of 80 GB (79 GiB), if an episode is that long:"]
    lines += ["", *fitting_lines(), ""]
    assumed = f"{EPISODES} episodes of 4,096 tokens, {RATE / 1e12:.0f} TFLOP/s a card in training"
    assumed += f", a rollout as long as the training, {DISK / 1e9:.0f} GB/s to the disk"
    lines += [f"What saving takes ({assumed}: assumed):", "", *saving_lines(), ""]
    lines += ["Models that see, on one card, 8,192 tokens, a quarter of them pictures [GiB]:"]
    lines += ["", *seeing_lines()]
    print("\n".join(lines))
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "memory.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
