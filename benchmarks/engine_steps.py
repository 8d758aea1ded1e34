"""What a step of the engine costs, and what would be saved if episodes did not wait for each other.

    python benchmarks/engine_steps.py

A rollout goes in rounds: whoever plays gets an answer, and the next round begins when the longest
answer is there. With continuous batching an episode would go on as soon as its own answer is. This
says what that is worth:

1. Steps of the engine for the recorded episodes of throughput.py (8 tasks x 8), in rounds and
   without waiting, and the processor seconds of vLLM's engine for both, in turn, medians. Answers
   have the recorded lengths; environments and the trainer take no part.
2. The processor time of one step that samples for so many episodes at a time, by vLLM and by hf,
   in contexts of 100 and of 400 tokens.
3. Steps alone, by arithmetic, for answers of a model that reasons in words: 128 tokens in the mean
   and 512 at most, geometrically distributed, 10 turns.

Processor time is what other work on the machine disturbs least. The result goes to
results/engine-steps.md.
"""

import argparse
import json
import os
import random
import statistics
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]
os.environ["VLLM_NO_USAGE_STATS"] = os.environ["HF_HUB_OFFLINE"] = "1"

from runtime.engines import HfEngine, VllmEngine
from runtime.flags import RunArgs

import torch
from throughput import load_script, record_plan, tokenise
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

WORKLOADS = [("sokoban", 10), ("webshop", 10)]
engines = []  # all of them: where one is freed, vLLM ends the process group of the others too


def engine_of(kind, world: str):
    """An engine of the world's tiny model, which ends no answer by itself; and its tokenizer."""
    path = ROOT / "models" / f"tiny-{world}"
    context = json.loads((path / "config.json").read_text())["max_position_embeddings"]
    args = load_script("grpo_sokoban").Args(run_args=RunArgs(engine_memory=1))
    args.max_context_tokens = context
    engine = kind(str(path), [-1] if kind is HfEngine else [2], args)
    engine.load(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval())
    engines.append(engine)
    return engine, AutoTokenizer.from_pretrained(path)


def sampled(number: int):
    """So many tokens, whatever they are."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    fixed = dict(temperature=1.0, ignore_eos=True, logprobs=0, detokenize=False, skip_clone=True)
    return SamplingParams(max_tokens=number, output_kind=RequestOutputKind.FINAL_ONLY, **fixed)


def play(engine, episodes: list, waits: bool) -> int:
    """Play all episodes, lists of (context, action) for each turn; the engine's steps. waits: the
    next turn begins when every episode has its answer."""
    core = engine.llm.llm_engine
    core.reset_prefix_cache()
    steps, turns, idle = 0, [0] * len(episodes), []

    def ask(number: int) -> None:
        context, action = episodes[number][turns[number]]
        prompt = {"prompt_token_ids": context}
        core.add_request(f"{number}-{turns[number]}", prompt, sampled(len(action)))

    for number in range(len(episodes)):
        ask(number)
    while core.has_unfinished_requests():
        steps += 1
        for output in core.step():
            number = int(output.request_id.split("-")[0])
            turns[number] += 1
            if turns[number] < len(episodes[number]):
                idle.append(number)
        if waits and core.has_unfinished_requests():
            continue
        for number in idle:
            ask(number)
        idle.clear()
    assert turns == [len(turns_of) for turns_of in episodes]
    return steps


def compare(rounds: int, place: Path) -> str:
    """What is 1. above."""
    from runtime.chat import Chat

    lines = ["| episodes | steps in rounds | without waiting | ratio |"]
    lines[0] += " processor s in rounds | without waiting | ratio |"
    lines.append("|---|---|---|---|---|---|---|")
    for world in dict.fromkeys(world for world, _ in WORKLOADS):
        engine, tokenizer = engine_of(VllmEngine, world)
        chat = Chat(tokenizer, [tokenizer.eos_token_id])
        for turns in (turns for name, turns in WORKLOADS if name == world):
            plan = json.loads(record_plan(world, turns, 8, 8, place).read_text())
            episodes = tokenise(plan, chat, 0)
            seconds, steps = {True: [], False: []}, {}
            for _ in tqdm(range(rounds + 1), f"{world}-{turns}", leave=False, disable=None):
                for waits in (True, False):
                    begin = time.process_time()
                    steps[waits] = play(engine, episodes, waits)
                    seconds[waits].append(time.process_time() - begin)
            medians = {w: statistics.median(each[1:]) for w, each in seconds.items()}
            pairs = zip(seconds[False][1:], seconds[True][1:])
            ratio = statistics.median(new / old for new, old in pairs)
            row = f"| {world}, {turns} turns | {steps[True]} | {steps[False]}"
            row += f" | {steps[False] / steps[True]:.2f} | {medians[True]:.3f}"
            lines.append(f"{row} | {medians[False]:.3f} | {ratio:.2f} |")
    return "\n".join(lines)


def step_costs() -> str:
    """What is 2. above."""
    lines = ["| engine | context | 1 episode | 8 | 64 | fixed | for each episode |"]
    lines.append("|---|---|---|---|---|---|---|")
    for name, kind in (("vLLM", VllmEngine), ("hf", HfEngine)):
        engine, _ = engine_of(kind, "sokoban")
        for length in (100, 400):
            rng, costs = random.Random(0), []
            for number in (1, 8, 64):
                contexts = [[rng.randrange(3, 500) for _ in range(length)] for _ in range(number)]
                costs.append(step_cost(engine, contexts))
            each = (costs[2] - costs[0]) / 63
            cells = [f"{1000 * cost:.1f} ms" for cost in (*costs, costs[0] - each)]
            lines.append(f"| {name} | {length} | {' | '.join(cells)} | {1e6 * each:.0f} us |")
    return "\n".join(lines)


def step_cost(engine, contexts: list) -> float:
    """Processor seconds of a step: what 24 more tokens cost, over 24; the least of four."""
    seconds = {6: [], 30: []}
    for _ in range(5):
        for tokens, each in seconds.items():
            if isinstance(engine, HfEngine):
                engine.args.max_action_tokens = tokens
            else:
                engine.sampling = lambda _, tokens=tokens: sampled(tokens)
            begin = time.process_time()
            engine.generate(contexts, 1.0)
            each.append(time.process_time() - begin)
    return (min(seconds[30][1:]) - min(seconds[6][1:])) / 24


def by_arithmetic(episodes: int = 64, turns: int = 10, mean: int = 128, most: int = 512) -> str:
    """What is 3. above."""
    rng, ratios = random.Random(0), []
    for _ in range(100):
        lengths = [
            [min(most, 1 + int(rng.expovariate(1 / mean))) for _ in range(turns)]
            for _ in range(episodes)
        ]
        waiting = sum(map(max, zip(*lengths)))
        ratios.append(max(map(sum, lengths)) / waiting)
    ratio = statistics.mean(ratios)
    shape = f"{episodes} episodes of {turns} turns, {mean} tokens an answer and {most} at most"
    return f"{shape}: {ratio:.2f} of the steps, by arithmetic."


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7, help="Measured repetitions (default: 7).")
    parser.add_argument("--place", type=Path, default=Path("runs/throughput"), help="Recordings.")
    args = parser.parse_args()

    torch.manual_seed(0)
    cores = len(os.sched_getaffinity(0))
    parts = [f"`python benchmarks/engine_steps.py --rounds {args.rounds}`, {cores} core(s)"]
    for part in (lambda: compare(args.rounds, args.place), step_costs, by_arithmetic):
        parts.append(part())
        print(parts[-1])
    (Path(__file__).parent / "results" / "engine-steps.md").write_text("\n\n".join(parts) + "\n")


if __name__ == "__main__":
    main()
