"""Peak memory of two processes that share a policy (FSDP) while it trains, is saved and is taken up
again.

    python benchmarks/saving.py                     # 54 M parameters on a CPU
    python benchmarks/saving.py --hidden 1024       # 190 M
    python benchmarks/saving.py --against TREE      # and with the runtime/ of another version

Measured is each process's resident memory at its peak: in two updates (AdamW, a few tokens), in
save_checkpoint until the process can train on, while the thread hashes and syncs, and in
load_checkpoint (the pages of the file that is read are counted; the kernel takes them back when it
wants); and the bytes of the checkpoint's files that it writes. While it saves, a process may have
its training's peak, twice the largest tensor and, the first one, the dense policy; it may write its
share of weights and moments and, the first one, the dense policy. Else this exits with 1. Written:
benchmarks/results/saving.md.
"""

import argparse
import gc
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

from throughput import ROOT, resident

PHASES = ("training", "saving", "finishing", "loading")


def build(hidden: int):
    """A Qwen2 of random weights, equal in every process."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=12,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 256,
        vocab_size=16384,
        tie_word_embeddings=True,
    )
    return Qwen2ForCausalLM(config).eval()


def work(hidden: int, home: Path, tree: Path) -> None:
    """What each process does, with the runtime/ of a tree; its figures go to home/RANK.json."""
    sys.path.insert(0, str(tree))
    from runtime.distributed import fsdp, processes
    from runtime.networks import Network
    from runtime.saving.checkpoints import finish_saving, load_checkpoint, save_checkpoint

    import torch
    from transformers import AutoTokenizer

    run_args = SimpleNamespace(processes=2, engine="none", eval_tasks=2, dtype="float32")
    run_args.save_every, run_args.keep = 1, 1
    args = SimpleNamespace(tasks_per_iteration=2, policy_lora_rank=0, run_args=run_args)
    args.iterations = 1
    device = processes.start(args)
    model = build(hidden)
    policy = Network("policy", model)
    sizes = [4 * parameter.numel() for parameter in model.parameters()]
    optimizer = policy.optimizer = torch.optim.AdamW(policy.trained, 1e-6, fused=False)
    fsdp.shard_all([policy], "float32", device)
    is_sharded = fsdp.is_sharded(model)
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "models" / "tiny-sokoban")
    run, rows = home / "run", [{"iteration": 1, "time/elapsed": 1.0}]
    if processes.rank() == 0:
        (run / "checkpoints").mkdir(parents=True)
    processes.wait()

    def train() -> None:
        ids = torch.arange(128)[None]
        for _ in range(2):
            optimizer.zero_grad()
            hidden = model.through(lambda: policy.hidden(ids)) if is_sharded else policy.hidden(ids)
            hidden.square().mean().backward()
            optimizer.step()
        optimizer.zero_grad()

    def save() -> None:
        save_checkpoint(run, rows, [policy], tokenizer, args, {})

    peaks, seconds = {}, {}
    steps = train, save, finish_saving, lambda: load_checkpoint(run, [policy], {})
    for phase, step in zip(PHASES, steps, strict=True):
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")
        start = time.perf_counter()
        step()
        seconds[phase], peaks[phase] = time.perf_counter() - start, resident() * 1e9
        processes.wait()

    about = json.loads((run / "checkpoints" / "000001" / "state.json").read_text())
    first, kept = processes.rank() == 0, about["files"].items()
    written = sum(size for name, (size, _) in kept if first != name.startswith("trained-"))
    told = {"peaks": peaks, "seconds": seconds, "written": written}
    told |= {"largest": max(sizes), "parameters": sum(sizes) // 4}
    (home / f"{processes.rank()}.json").write_text(json.dumps(told))


def measured(hidden: int, tree: Path) -> list[dict]:
    """The figures of both processes."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = str(listener.getsockname()[1])
    # freed memory goes back at once: what is measured is what is needed
    own = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    own |= {"MALLOC_MMAP_THRESHOLD_": "100000", "MALLOC_TRIM_THRESHOLD_": "100000"}
    command = [sys.executable, "-m", "accelerate.commands.launch", "--main_process_port", port]
    command += ["--config_file", str(ROOT / "configs" / "fsdp.yaml"), __file__]
    with tempfile.TemporaryDirectory(prefix="saving-") as home:
        command += ["--hidden", str(hidden), "--work", home, "--against", str(tree)]
        done = subprocess.run(command, capture_output=True, text=True, env=own)
        if done.returncode:
            sys.exit(f"{' '.join(command)}\n{done.stderr[-3000:]}")
        return [json.loads(Path(home, f"{rank}.json").read_text()) for rank in (0, 1)]


def table(told: list[dict]) -> list[str]:
    titles = " | ".join(f"{phase} [MiB] | [s]" for phase in PHASES)
    lines = ["", f"| process | writes [MiB] | {titles} |", f"|{'---|' * 10}"]
    for rank, each in enumerate(told):
        cells = [f"{each['written'] / 2**20:,.0f}"]
        cells += [f"{each['peaks'][p] / 2**20:,.0f} | {each['seconds'][p]:.2f}" for p in PHASES]
        lines.append(f"| {rank} | {' | '.join(cells)} |")
    return [*lines, ""]


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--hidden", type=int, default=512, help="width of the model: 256 x n")
    results = ROOT / "benchmarks" / "results"
    parser.add_argument("--out", type=Path, default=results, help="directory of the table")
    parser.add_argument("--against", type=Path, help="another version's directory")
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        return work(arguments.hidden, arguments.work, arguments.against)

    told = measured(arguments.hidden, ROOT)
    size, largest = told[0]["parameters"], told[0]["largest"]
    lines = [f"`{' '.join(['python benchmarks/saving.py', *sys.argv[1:]])}`", ""]
    lines += [
        f"{size / 1e6:.0f} M parameters, float32, two processes on a CPU. A process's share of"
    ]
    lines[-1] += f" weights and moments is {size * 6 / 2**20:,.0f} MiB, the dense policy"
    lines[-1] += f" {size * 4 / 2**20:,.0f} MiB, the largest tensor {largest / 2**20:,.0f} MiB."
    lines[-1] += " Peaks of resident memory (libraries included):"
    lines += table(told)
    held = True
    for rank, each in enumerate(told):
        most = each["peaks"]["training"] + 2 * largest + (0 if rank else 4 * size)
        held &= max(each["peaks"]["saving"], each["peaks"]["finishing"]) <= most
        held &= each["written"] <= 1.01 * size * (6 if rank else 10)
    verdict = "holds" if held else "does NOT hold"
    bound = "While they save, processes have their training's peak and twice the largest tensor at"
    bound += " most, and each writes its share; the first one has and writes the dense policy too"
    lines += [f"{bound}: **{verdict}**."]
    if arguments.against:
        lines += ["", f"The same with the version in `{arguments.against}`:"]
        lines += table(measured(arguments.hidden, arguments.against.resolve()))
    print("\n".join(lines))
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "saving.md").write_text("\n".join(lines).rstrip() + "\n")
    if not held:
        sys.exit(1)


if __name__ == "__main__":
    main()
