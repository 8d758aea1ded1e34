"""Step time, share of the hardware's rate, and memory of an iStar iteration, with a Qwen-shaped
model of random weights.

    python benchmarks/step_time.py                                   # 0.5B in bfloat16; wants a GPU
    python benchmarks/step_time.py --shape qwen-1.5b --lora-rank 64
    python benchmarks/step_time.py --shape small --dtype float32     # on a CPU, to see it run

The functions are istar_sokoban.py's, with its --engine hf: an episode is a prompt, then answers of
--answer tokens (as many as asked: nothing stops them) and observations of --observation random
tokens, side by side for --tasks x --group episodes; half of a group wins. Phases: rollout,
log-probabilities, PRM (scores, and one update of its adapter by all episodes), update of the policy
(one optimiser step). Medians over rounds; the first round is not counted.

    work        floating-point operations that a phase needs, as benchmarks/throughput.py counts
                them: a forward pass over all tokens for rollout and log-probabilities; for the PRM
                one to score, two for the slope of the loss (policy and PRM), one to learn, and a
                backward pass without the frozen weights' gradients; for the update three
    of ceiling  work over time as a share of torch.mm's best rate in the same run (MFU against what
                the card really gives)
    peak        memory that tensors had at most in the phase; on a CPU the process's resident memory

It ends with what benchmarks/memory.py predicts for it. Written:
benchmarks/results/step-time-SHAPE.md.
"""

import argparse
import asyncio
import platform
import random
import statistics
import sys
import time
from collections import defaultdict
from contextlib import contextmanager
from pathlib import Path

import memory
from throughput import ROOT, load_script, work

SHAPES = memory.SHAPES | {"small": (64, 256, 2, 2, 2, 4096, True)}
PASSES = {"rollout": 1, "log-probabilities": 1, "PRM": 5, "update": 3}  # forward passes' operations
STOP = -1  # no token: every answer is as long as asked


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

    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def play(engine, arguments, vocabulary: int, rng) -> tuple[list, list]:
    """(trajectories, the (context, action) of every turn of each): answers sampled, observations
    drawn."""
    from runtime.data import Step, Trajectory
    from runtime.engines import SamplingParams, served

    def words(count: int) -> list[int]:
        return [rng.randrange(3, vocabulary) for _ in range(count)]

    prompts = [words(arguments.prompt) for _ in range(arguments.tasks)]
    contexts = [list(prompt) for prompt in prompts for _ in range(arguments.group)]
    games = [Trajectory(i // arguments.group) for i in range(len(contexts))]
    pairs = [[] for _ in games]
    for i, t in enumerate(games):
        t.outcome = float(i % 2)

    sampling = SamplingParams(max_tokens=arguments.answer, stop_token_ids=[STOP])
    for _ in range(arguments.turns):
        asking = [engine.sample(context, sampling) for context in contexts]
        said = asyncio.run(served(engine, asking))
        for t, context, own, (ids, logprobs) in zip(games, contexts, pairs, said):
            own.append((list(context), ids))
            t.append(context, ids)
            t.steps.append(Step("", "", logprobs))
        contexts = [t.token_ids + words(arguments.observation) for t in games]
    return games, pairs


def read_arguments():
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    add = parser.add_argument
    add("--shape", default="qwen-0.5b", choices=list(SHAPES))
    dtypes = ("float32", "bfloat16")
    add("--dtype", default="bfloat16", choices=dtypes, help="as the scripts' --dtype")
    add("--lora-rank", type=int, default=0, help="of the policy's adapter; 0: all weights train")
    add("--tasks", type=int, default=8, help="groups of an iteration")
    add("--group", type=int, default=8, help="episodes of a group")
    add("--turns", type=int, default=10, help="of an episode")
    add("--prompt", type=int, default=200, help="tokens of a prompt")
    add("--observation", type=int, default=60, help="tokens of an observation")
    add("--answer", type=int, default=40, help="tokens of an answer")
    add("--micro-batch-tokens", type=int, default=16384, help="as the scripts' flag")
    add("--gradient-checkpointing", action="store_true", help="as the scripts' flag")
    add("--rounds", type=int, default=3, help="measured iterations")
    results = ROOT / "benchmarks" / "results"
    add("--out", type=Path, default=results, help="directory of the table")
    return parser.parse_args()


def main() -> None:
    arguments = read_arguments()
    istar = load_script("istar_sokoban")
    from runtime.data import flatten
    from runtime.engines.transformers import TransformersEngine
    from runtime.flags import RunArgs
    from runtime.networks import batch_logprobs, plain, recompute_layers

    import torch
    import transformers

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and arguments.shape != "small":
        print("no GPU: this will take long", file=sys.stderr)

    def build(dtype):
        """A model of the shape, made where it stays."""
        with torch.device(device):
            return memory.random_qwen(SHAPES[arguments.shape]).to(dtype)

    dtype, tokens = arguments.dtype, arguments.micro_batch_tokens
    run_args = RunArgs(engine="hf", engine_memory=8, dtype=dtype, micro_batch_tokens=tokens)
    args = istar.Args(run_args=run_args, max_action_tokens=arguments.answer, minibatches=1)
    torch.manual_seed(0)
    policy, prm = memory.networks(build, istar.lora, arguments.lora_rank, dtype)
    if arguments.gradient_checkpointing:
        recompute_layers([policy.model, prm.model])
    engine, rng = TransformersEngine("", [STOP], args), random.Random(0)
    shape = memory.shape_of(policy.model.config)
    best = ceiling(torch.bfloat16 if dtype == "bfloat16" else torch.float32, device)
    seconds, peaks = defaultdict(list), defaultdict(float)

    @contextmanager
    def phase(name: str):
        """Notes the time of what is done in it, and the memory at its peak."""
        memory.reset_peak()
        start = now(device)
        yield
        seconds[name].append(now(device) - start)
        peaks[name] = max(peaks[name], memory.most_bytes())

    for _ in range(arguments.rounds + 1):
        engine.load(policy.model)
        with phase("rollout"):
            games, pairs = play(engine, arguments, shape.vocabulary, rng)
        engine.sleep()
        batch = flatten(games)
        advantages = torch.linspace(-1, 1, len(batch.step_traj))
        with phase("log-probabilities"):
            old = batch_logprobs(policy, batch, args)
        with phase("PRM"):
            batch_logprobs(prm, batch, args)
            istar.prm_update(prm, policy, games, args)
        with phase("update"):
            istar.policy_update(policy, batch, old, advantages, args)
        if prm.skips or policy.skips:
            sys.exit("an update was not finite")

    plan = {"episodes": [{"task": t.task, "outcome": t.outcome} for t in games]}
    needs = work(plan, pairs, plain(policy.model))
    hardware = platform.processor() or "CPU"
    if device == "cuda":
        hardware = torch.cuda.get_device_name()
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    millions = sum(p.numel() for p in plain(policy.model).parameters()) / 1e6
    trains = f"LoRA {arguments.lora_rank}" if arguments.lora_rank else "all weights train"
    model = f"{millions:,.1f} M parameters, {dtype}, {trains}"
    counted = f"{needs['sequence_tokens']:,} tokens, {needs['action_tokens']:,} sampled"
    rate = f"Matrix product: {best / 1e12:,.1f} TFLOP/s"
    made = f"{time.strftime('%Y-%m-%d')}, {hardware}, {versions}"
    lines = [f"`{' '.join(['python benchmarks/step_time.py', *sys.argv[1:]])}`", ""]
    lines += [f"{made}. {model}; {len(games)} episodes, {counted}. {rate}.", ""]

    titles = "phase | seconds | tokens/s | work [TFLOP] | of ceiling | peak [GiB]"
    lines += [f"| {titles} |", f"|{'---|' * 6}"]
    for name, passes in PASSES.items():
        median, flops = statistics.median(seconds[name][1:]), passes * needs["flops"]
        rate = needs["action_tokens" if name == "rollout" else "sequence_tokens"] / median
        cells = [name, f"{median:.2f}", f"{rate:,.0f}", f"{flops / 1e12:.3g}"]
        cells += [f"{flops / median / best:.1%}", f"{peaks[name] / 2**30:.1f}"]
        lines.append(f"| {' | '.join(cells)} |")

    rounds = [sum(values) for values in zip(*(seconds[name][1:] for name in PASSES))]
    share = needs["action_tokens"] / needs["sequence_tokens"]
    recompute = arguments.gradient_checkpointing
    setting = memory.Setting(
        tokens, share, arguments.lora_rank, memory.PRM_RANK, dtype=dtype, recompute=recompute
    )
    parts = memory.predict(shape, setting)
    predicted = f"as benchmarks/memory.py predicts it: {sum(parts.values()) / 2**30:.1f} GiB"
    iteration = f"An iteration: {statistics.median(rounds):.2f} s"
    sampled = "tokens/s of the rollout are sampled ones"
    lines += ["", f"{iteration}. {sampled}. Peak of training, {predicted}."]
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / f"step-time-{arguments.shape}.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
