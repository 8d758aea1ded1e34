"""Peak memory of two processes that share a policy (FSDP) while it trains, is saved and is taken up
again.

    python benchmarks/saving.py                     # 54 M parameters on a CPU
    python benchmarks/saving.py --hidden 1024       # 190 M

Measured is each process's resident memory at its peak: in two updates (AdamW, a few tokens), in
save_checkpoint until the process can train on, while the thread hashes and syncs, and in
load_checkpoint (the pages of the file that is read are counted; the kernel takes them back when it
wants). While it saves, the first process collects what it writes, weights, moments and the dense
model, 16 bytes of a parameter: it may have its training's peak and these; the other one its own and
the largest tensor. Else this exits with 1. Written: benchmarks/results/saving.md.
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


def work(hidden: int, home: Path) -> None:
    """What each process does; its figures go to home/RANK.json."""
    sys.path.insert(0, str(ROOT))
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
    optimizer = policy.optimizer = torch.optim.AdamW(policy.trained, 1e-6, fused=False)
    fsdp.shard_all([policy], "float32", device)
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "models" / "tiny-sokoban")
    run, rows = home / "run", [{"iteration": 1, "time/elapsed": 1.0}]
    if processes.rank() == 0:
        (run / "checkpoints").mkdir(parents=True)
    processes.wait()

    def train() -> None:
        ids = torch.arange(128)[None]
        for _ in range(2):
            optimizer.zero_grad()
            hidden = fsdp.through(model, lambda: policy.hidden(ids))
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

    largest = max(parameter.numel() for parameter in model.parameters()) * 4
    size = sum(parameter.numel() for parameter in model.parameters())
    told = {"peaks": peaks, "seconds": seconds, "largest": largest, "parameters": size}
    (home / f"{processes.rank()}.json").write_text(json.dumps(told))


def measured(hidden: int) -> list[dict]:
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
        command += ["--hidden", str(hidden), "--work", home]
        done = subprocess.run(command, capture_output=True, text=True, env=own)
        if done.returncode:
            sys.exit(f"{' '.join(command)}\n{done.stderr[-3000:]}")
        return [json.loads(Path(home, f"{rank}.json").read_text()) for rank in (0, 1)]


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--hidden", type=int, default=512, help="width of the model: 256 x n")
    results = ROOT / "benchmarks" / "results"
    parser.add_argument("--out", type=Path, default=results, help="directory of the table")
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        return work(arguments.hidden, arguments.work)

    told = measured(arguments.hidden)
    size, largest = told[0]["parameters"] / 1e6, told[0]["largest"]
    share = told[0]["parameters"] * 16 / 2 / 2**20
    lines = [f"`{' '.join(['python benchmarks/saving.py', *sys.argv[1:]])}`", ""]
    lines += [f"{size:.0f} M parameters, float32, two processes on a CPU. A process's share of"]
    lines[-1] += f" weights, gradients and moments is {share:,.0f} MiB, the largest tensor"
    lines[-1] += f" {largest / 2**20:,.0f} MiB. Peaks of resident memory (libraries included), MiB:"
    titles = " | ".join(f"{phase} [MiB] | [s]" for phase in PHASES)
    lines += ["", f"| process | {titles} |", f"|{'---|' * 9}"]
    held = True
    for rank, each in enumerate(told):
        cells = (f"{each['peaks'][p] / 2**20:,.0f} | {each['seconds'][p]:.2f}" for p in PHASES)
        lines.append(f"| {rank} | {' | '.join(cells)} |")
        collected = largest if rank else 16 * each["parameters"]
        most = each["peaks"]["training"] + collected
        held &= max(each["peaks"]["saving"], each["peaks"]["finishing"]) <= most
    verdict = "holds" if held else "does NOT hold"
    bound = "While they save, the first process has its training's peak and what it writes at most,"
    bound += " the other one its own and the largest tensor"
    lines += ["", f"{bound}: **{verdict}**."]
    print("\n".join(lines))
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "saving.md").write_text("\n".join(lines) + "\n")
    if not held:
        sys.exit(1)


if __name__ == "__main__":
    main()
