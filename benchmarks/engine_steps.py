"""Seconds of a rollout whose episodes do not wait for each other, against one that goes in rounds.

    python benchmarks/engine_steps.py
    python benchmarks/engine_steps.py --seeds 5 --repeats 3
    python benchmarks/engine_steps.py --model DIR --dtype bfloat16 --name engine-steps-smollm2

Each episode is a coroutine: it asks the engine for its next answer as soon as its world has said
something (runtime/rollout.py). A rollout in rounds asks for everybody who still plays at once, by
`llm.generate`, waits for the longest of these answers, and then for all worlds together. Both use
the same vLLM engine, the tiny model and one process.

Uneven: 32 episodes of 2 to 8 turns, answers of 32 tokens in the mean, geometrically distributed, at
most 128. Equal: 32 episodes of 5 turns of 32 tokens. A world takes 0 or 100 ms for an answer (a
partner over HTTP takes longer), and the event loop has that time for others. The lengths, which
depend on the seed, are those of the tokens that the engine really samples.

Both play in turn, each first in every second repeat. What is told is the median over seeds and
repeats of the ratio of seconds, with the least and the greatest; the ratio of the processor seconds
of all, which other work on the machine disturbs less; and that of the engine's steps, which nothing
disturbs. A step costs more the more episodes it samples for: on a CPU with the tiny model 1.3 ms
and 0.2 ms for each. The result goes to results/NAME.md.
"""

import argparse
import asyncio
import os
import random
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ["VLLM_NO_USAGE_STATS"] = os.environ["HF_HUB_OFFLINE"] = "1"

from runtime.engines import SamplingParams
from runtime.engines.vllm import VllmEngine
from runtime.flags import RunArgs

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM

MODEL = ROOT / "models" / "tiny-webshop"
GOALS = {"uneven": 0.65, "equal": 1.05}  # the ratio of seconds should not be greater


@dataclass
class Args:
    """What an engine asks of a script's flags."""

    run_args: RunArgs
    seed: int = 1
    max_context_tokens: int = 3072
    policy_lora_rank: int = 0


@dataclass
class Turn:
    answer: int  # [tokens]
    words: list[int]  # of the world, after the answer


def plan(kind: str, seed: int, episodes: int = 32) -> list[list[Turn]]:
    """The turns of each episode."""
    rng, played = random.Random(f"{kind} {seed}"), []
    for _ in range(episodes):
        turns = rng.randint(2, 8) if kind == "uneven" else 5
        uneven = [min(128, 1 + int(rng.expovariate(1 / 32))) for _ in range(turns)]
        lengths = uneven if kind == "uneven" else [32] * turns
        played.append([Turn(n, [rng.randrange(3, 500) for _ in range(40)]) for n in lengths])
    return played


def sampling_of(number: int) -> SamplingParams:
    return SamplingParams(max_tokens=number, stop_token_ids=[])


def engine_of(model: Path, dtype: str) -> VllmEngine:
    """vLLM with this model, which ends no answer by itself."""
    engine = VllmEngine(str(model), [], Args(RunArgs(engine_memory=1, dtype=dtype)))
    engine.load(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval())
    ours = engine.sampling

    def endless(sampling):
        params = ours(sampling)
        params.ignore_eos = True
        return params

    engine.sampling = endless
    step, engine.steps = engine.llm.llm_engine.step, 0

    def counted():
        engine.steps += 1
        return step()

    engine.llm.llm_engine.step = counted
    return engine


def coroutines(engine, episodes: list[list[Turn]], delay: float) -> int:
    """Play all episodes, side by side; the tokens that were sampled."""

    async def play(number: int) -> int:
        context, sampled = [3 + number % 4] * 60, 0
        for turn in episodes[number]:
            ids, _ = await engine.sample(context, sampling_of(turn.answer))
            sampled += len(ids)
            await asyncio.sleep(delay)
            context = context + ids + turn.words
        return sampled

    async def rollout():
        serving = asyncio.ensure_future(engine.serve())
        sampled = await asyncio.gather(*map(play, range(len(episodes))))
        serving.cancel()
        return sum(sampled)

    return asyncio.run(rollout())


def rounds(engine, episodes: list[list[Turn]], delay: float) -> int:
    """The same in rounds."""
    contexts, sampled = [[3 + number % 4] * 60 for number in range(len(episodes))], 0
    for turn in range(max(map(len, episodes))):
        playing = [number for number, turns in enumerate(episodes) if turn < len(turns)]
        prompts = [{"prompt_token_ids": contexts[number]} for number in playing]
        params = [engine.sampling(sampling_of(episodes[number][turn].answer)) for number in playing]
        outputs = engine.llm.generate(prompts, params, use_tqdm=False)
        for number, output in zip(playing, outputs):
            ids = list(output.outputs[0].token_ids)
            sampled += len(ids)
            contexts[number] = contexts[number] + ids + episodes[number][turn].words
        time.sleep(delay)  # all worlds take their time at once
    return sampled


def measure(engine, kind: str, delay: float, seeds: int, repeats: int) -> str:
    """A row of the table."""
    ratios, seconds = [], {coroutines: [], rounds: []}
    processor, steps = ({coroutines: 0.0, rounds: 0.0} for _ in range(2))
    for seed in tqdm(range(seeds), f"{kind}, {delay} s", leave=False, disable=None):
        episodes = plan(kind, seed)
        tokens = sum(turn.answer for turns in episodes for turn in turns)
        for repeat in range(repeats + 1):
            for play in (coroutines, rounds) if repeat % 2 else (rounds, coroutines):
                engine.llm.reset_prefix_cache()
                begin, used, engine.steps = time.perf_counter(), time.process_time(), 0
                sampled = play(engine, episodes, delay)
                took, used = time.perf_counter() - begin, time.process_time() - used
                if sampled != tokens:
                    raise RuntimeError(f"{sampled} tokens where {tokens} are due")
                if repeat:  # the first one warms up
                    seconds[play].append(took)
                    processor[play] += used
                    steps[play] += engine.steps
            if repeat:
                ratios.append(seconds[coroutines][-1] / seconds[rounds][-1])
    medians = [f"{statistics.median(seconds[play]):.2f}" for play in (rounds, coroutines)]
    spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
    others = [f"{each[coroutines] / each[rounds]:.2f}" for each in (processor, steps)]
    cells = [kind, f"{1000 * delay:.0f} ms", *medians, spread, *others, f"at most {GOALS[kind]}"]
    return f"| {' | '.join(cells)} |"


def main():
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--seeds", type=int, default=3, help="Plans of each kind (default: 3).")
    parser.add_argument("--repeats", type=int, default=3, help="Of each plan (default: 3).")
    parser.add_argument("--model", type=Path, default=MODEL, help="Directory (default: tiny).")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--name", default="engine-steps", help="Of the table.")
    given = parser.parse_args()

    torch.manual_seed(0)
    engine = engine_of(given.model, given.dtype)
    flags = f"--seeds {given.seeds} --repeats {given.repeats}"
    if given.model != MODEL:
        flags += f" --model {given.model} --dtype {given.dtype} --name {given.name}"
    cores = f"{len(os.sched_getaffinity(0))} core(s)"
    model = f"{given.model.name} in {given.dtype}"
    lines = [f"`python benchmarks/engine_steps.py {flags}`, {cores}, vLLM on a CPU, {model}", ""]
    lines.append(
        "| answers | world | rounds [s] | coroutines [s] | ratio | processor | steps | goal |"
    )
    lines.append("|---|---|---|---|---|---|---|---|")
    print("\n".join(lines))
    for kind in GOALS:
        for delay in (0.0, 0.1):
            lines.append(measure(engine, kind, delay, given.seeds, given.repeats))
            print(lines[-1], flush=True)
    (Path(__file__).parent / "results" / f"{given.name}.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
