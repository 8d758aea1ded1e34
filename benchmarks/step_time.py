"""Step time, share of the hardware's rate, and memory of an iStar iteration with a Qwen-shaped model of random weights.

    python benchmarks/step_time.py                                   # 0.5B in bfloat16; wants a GPU
    python benchmarks/step_time.py --shape qwen-1.5b --lora-rank 64
    python benchmarks/step_time.py --shape small --dtype float32     # on a CPU, to see it run

The functions are istar_sokoban.py's, with its --engine hf: an episode is a prompt, then answers of --answer tokens (as
many as asked: nothing stops them) and observations of --observation random tokens, side by side for --tasks x --group
episodes; half of a group wins. Phases: rollout, log-probabilities, PRM (one update of its adapter, and scores), update
of the policy (one optimiser step). Medians over rounds; the first round is not counted.

work: floating-point operations that a phase needs, as benchmarks/throughput.py counts them: a forward pass over all
tokens for rollout and log-probabilities; for the PRM one to learn, its backward pass without the frozen weights'
gradients, and one to score; for the update three. of ceiling: work over time as a share of torch.mm's best rate in the
same run (MFU against what the card really gives). peak: memory that tensors had at most in the phase; on a CPU the
process's resident memory. It ends with what benchmarks/memory.py predicts for it.
Written: benchmarks/results/step-time-SHAPE.md.
"""

import argparse
import platform
import random
import statistics
import sys
import time
from collections import defaultdict
from contextlib import contextmanager
from pathlib import Path

import memory
from throughput import ROOT, load_script, resident, work

SHAPES = memory.SHAPES | {"small": (64, 256, 2, 2, 2, 4096, True)}
PASSES = {"rollout": 1, "log-probabilities": 1, "PRM": 3, "update": 3}  # of a forward pass's operations
STOP = -1  # no token: every answer is as long as asked


def build(shape: str, dtype, device):
    """A model of this shape, made where it stays."""
    import torch

    with torch.device(device):
        return memory.random_qwen(SHAPES[shape]).to(dtype)


def ceiling(dtype, device) -> float:
    """The best rate of a matrix product [FLOP/s]."""
    import torch

    size, seconds = 8192 if device == "cuda" else 2048, []
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    for _ in range(10):
        start = now(device)
        torch.mm(a, b)
        seconds.append(now(device) - start)
    return 2 * size**3 / min(seconds)


def now(device) -> float:
    """The time, when the device has done all it was given [s]."""
    import torch

    torch.cuda.synchronize() if device == "cuda" else None
    return time.perf_counter()


def play(istar, engine, arguments, vocabulary: int, rng) -> tuple[list, list]:
    """(trajectories, of each the (context, action) of every turn): answers sampled, observations drawn."""

    def words(count: int) -> list[int]:
        return [rng.randrange(3, vocabulary) for _ in range(count)]

    prompts = [words(arguments.prompt) for _ in range(arguments.tasks)]
    contexts = [list(prompt) for prompt in prompts for _ in range(arguments.group)]
    games = [istar.Trajectory(i // arguments.group, [], [], float(i % 2), []) for i in range(len(contexts))]
    pairs = [[] for _ in games]
    for turn in range(arguments.turns):
        for t, context, own, (ids, logprobs) in zip(games, contexts, pairs, engine.generate(contexts, 1.0)):
            own.append((list(context), ids))
            t.step_ids += [-1] * (len(context) - len(t.step_ids)) + [turn] * len(ids)
            t.token_ids = context + ids
            t.steps.append(istar.Step("", "", True, 0.0, 0.0, None, logprobs))
        contexts = [t.token_ids + words(arguments.observation) for t in games]
    return games, pairs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen-0.5b", choices=list(SHAPES))
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"), help="as the scripts' --dtype")
    parser.add_argument("--lora-rank", type=int, default=0, help="of the policy's adapter; 0: all weights train")
    parser.add_argument("--tasks", type=int, default=8, help="groups of an iteration")
    parser.add_argument("--group", type=int, default=8, help="episodes of a group")
    parser.add_argument("--turns", type=int, default=10, help="of an episode")
    parser.add_argument("--prompt", type=int, default=200, help="tokens of a prompt")
    parser.add_argument("--observation", type=int, default=60, help="tokens of an observation")
    parser.add_argument("--answer", type=int, default=40, help="tokens of an answer")
    parser.add_argument("--micro-batch-tokens", type=int, default=16384, help="as the scripts' flag")
    parser.add_argument("--rounds", type=int, default=3, help="measured iterations")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", help="directory of the table")
    arguments = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    istar = load_script("istar_sokoban")
    import torch
    import transformers

    device, rank = "cuda" if torch.cuda.is_available() else "cpu", arguments.lora_rank
    frozen = torch.bfloat16 if arguments.dtype == "bfloat16" else torch.float32
    if device == "cpu" and arguments.shape != "small":
        print("no GPU: this will take long", file=sys.stderr)
    flags = dict(max_action_tokens=arguments.answer, micro_batch_tokens=arguments.micro_batch_tokens, engine_memory=8)
    args = istar.Args(**flags, policy_lora_rank=rank, dtype=arguments.dtype, minibatches=1, engine="hf")
    torch.manual_seed(0)
    policy = build(arguments.shape, frozen if rank else torch.float32, device)
    policy = istar.add_adapter(policy, "policy", rank) if rank else policy
    prm = istar.add_adapter(policy if rank else build(arguments.shape, frozen, device), "prm", args.prm_lora_rank)
    optimizers = {}
    for name, model in (("policy", policy), ("prm", prm)):
        weights = [p for p in istar.activate(model, name).parameters() if p.requires_grad]
        optimizers[name] = torch.optim.AdamW(weights, lr=1e-6, weight_decay=0.0)
    engine, rng = istar.HfEngine("", [STOP], args), random.Random(0)
    shape, best = memory.shape_of(policy.config), ceiling(frozen, device)
    seconds, peaks = defaultdict(list), defaultdict(float)

    @contextmanager
    def phase(name: str):
        """Notes the time of what is done in it, and the memory at its peak."""
        torch.cuda.reset_peak_memory_stats() if device == "cuda" else Path("/proc/self/clear_refs").write_text("5")
        start = now(device)
        yield
        seconds[name].append(now(device) - start)
        peak = torch.cuda.max_memory_allocated() if device == "cuda" else resident() * 1e9
        peaks[name] = max(peaks[name], peak)

    for _ in range(arguments.rounds + 1):
        engine.load(istar.activate(policy, "policy"))
        with phase("rollout"):
            games, pairs = play(istar, engine, arguments, shape.vocabulary, rng)
        engine.sleep()
        batch = istar.flatten(games)
        ranked = istar.preference_pairs(batch.outcomes, batch.group)
        advantages = torch.linspace(-1, 1, len(batch.step_traj))
        with phase("log-probabilities"):
            old = istar.score_tokens(policy, batch, args, "log-probabilities")
        istar.activate(prm, "prm")
        with phase("PRM"):
            stats = istar.prm_update(prm, optimizers["prm"], batch, old, ranked, args)
            istar.score_tokens(prm, batch, args, "scores")
        istar.activate(policy, "policy")
        with phase("update"):
            stats |= istar.policy_update(policy, optimizers["policy"], batch, old, advantages, args)
            optimizers["policy"].zero_grad()
        assert not stats["prm/skipped"] + stats["policy/skipped"], "an update was not finite"

    plan = {"episodes": [{"task": t.task, "outcome": t.outcome} for t in games]}
    needs = work(plan, pairs, 0, istar.plain(policy))
    hardware = torch.cuda.get_device_name() if device == "cuda" else platform.processor() or "CPU"
    lines = [
        f"`{' '.join(['python benchmarks/step_time.py', *sys.argv[1:]])}`",
        f"{time.strftime('%Y-%m-%d')}, {hardware}, torch {torch.__version__}, transformers {transformers.__version__}. "
        f"{sum(p.numel() for p in istar.plain(policy).parameters()) / 1e6:,.1f} M parameters, {arguments.dtype}, "
        f"{'LoRA ' + str(rank) if rank else 'all weights train'}; {len(games)} episodes, {needs['sequence_tokens']:,} "
        f"tokens, {needs['action_tokens']:,} sampled. Matrix product: {best / 1e12:,.1f} TFLOP/s.",
        "| phase | seconds | tokens/s | work [TFLOP] | of ceiling | peak [GiB] |\n|---|---|---|---|---|---|",
    ]
    for name, passes in PASSES.items():
        median, flops = statistics.median(seconds[name][1:]), passes * needs["flops"]
        rate = (needs["action_tokens"] if name == "rollout" else needs["sequence_tokens"]) / median
        lines[-1] += f"\n| {name} | {median:.2f} | {rate:,.0f} | {flops / 1e12:.3g} | {flops / median / best:.1%} | "
        lines[-1] += f"{peaks[name] / 2**30:.1f} |"
    rounds = [sum(values) for values in zip(*(seconds[name][1:] for name in PASSES))]
    share = needs["action_tokens"] / needs["sequence_tokens"]
    predicted = memory.predict(shape, args.micro_batch_tokens, share, rank, args.prm_lora_rank, arguments.dtype)
    lines.append(
        f"An iteration: {statistics.median(rounds):.2f} s. tokens/s of the rollout are sampled ones. Peak of training, "
        f"as benchmarks/memory.py predicts it: {sum(predicted.values()) / 2**30:.1f} GiB."
    )
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / f"step-time-{arguments.shape}.md").write_text("\n\n".join(lines) + "\n")
    print("\n\n".join(lines))


if __name__ == "__main__":
    main()
