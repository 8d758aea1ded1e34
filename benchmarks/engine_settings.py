"""Seconds of a rollout with the engine's settings: vLLM's own for a CPU against ours, side by side.

    python benchmarks/engine_settings.py --script grpo_sokoban
    python benchmarks/engine_settings.py --script grpo_webshop --rounds 7

Of each setting there is an engine in this process; in every round each plays the same tasks from
the same seed with the script's default flags, after forgetting its prefixes. Episodes differ a
little between settings, because batches do; seconds are therefore per 1,000 sampled tokens too.
Written: benchmarks/results/engine-settings-SCRIPT.md.
"""

import argparse
import os
import random
import statistics
import sys
import time
from types import SimpleNamespace

from throughput import ROOT, load_script

VARIANTS = {  # name: settings beside the script's
    "vLLM's own (128, 2048)": dict(block_size=128, max_num_batched_tokens=2048),
    "block_size 32": dict(block_size=32, max_num_batched_tokens=2048),
    "max_num_batched_tokens 8192": dict(block_size=128, max_num_batched_tokens=8192),
    "both (ours)": {},
}


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    script = "whose environment and flags, without .py"
    parser.add_argument("--script", default="grpo_sokoban", help=script)
    rounds = "measured rollouts of each setting"
    parser.add_argument("--rounds", type=int, default=5, help=rounds)
    arguments = parser.parse_args()
    module = load_script(arguments.script)
    from runtime.chat import Chat
    from runtime.engines import SamplingParams
    from runtime.engines.vllm import VllmEngine
    from runtime.flags import RunArgs
    from runtime.rollout import rollout

    import torch
    import vllm
    from transformers import AutoModelForCausalLM, AutoTokenizer

    args = module.Args(run_args=RunArgs(engine_memory=1))
    path = str(ROOT / args.model)
    world = "WebShop" if hasattr(module, "WebShop") else "Sokoban"
    env = getattr(module, world).from_args(args)
    policy = AutoModelForCausalLM.from_pretrained(path)
    tokenizer = AutoTokenizer.from_pretrained(path)
    stop_ids = [tokenizer.eos_token_id]
    chat, engines, make = Chat(tokenizer, stop_ids), {}, vllm.LLM
    limits = dict(max_tokens=args.max_action_tokens, stop_token_ids=stop_ids)
    sampling = SamplingParams(temperature=args.temperature, **limits)
    for name, changed in VARIANTS.items():
        vllm.LLM = lambda path, changed=changed, **settings: make(path, **settings | changed)
        engines[name] = VllmEngine(path, stop_ids, args)
        engines[name].load(policy)

    tasks = random.Random(0).sample(env.train_tasks, args.tasks_per_iteration)
    tasks = sorted(tasks * args.group_size)
    seconds, rates = {name: [] for name in engines}, {name: [] for name in engines}
    for number in range(arguments.rounds + 1):
        for name, engine in engines.items():
            torch.manual_seed(number)
            engine.llm.reset_prefix_cache()
            start = time.perf_counter()
            run = SimpleNamespace(args=args, chat=chat, engine=engine, faults=0)
            trajectories = rollout(run, module.play, env, tasks, sampling)
            if number:  # the first one warms up
                seconds[name].append(time.perf_counter() - start)
                steps = [step for t in trajectories for step in t.steps]
                sampled = sum(len(step.engine_logprobs) for step in steps)
                rates[name].append(seconds[name][-1] / sampled * 1000)

    first = statistics.median(rates[next(iter(rates))])
    cores = len(os.sched_getaffinity(0))
    lines = [f"`python benchmarks/engine_settings.py {' '.join(sys.argv[1:])}`", ""]
    lines += [f"{len(tasks)} episodes, tiny model, {cores} cores, vLLM on a CPU; medians.", ""]
    titles = "settings | seconds a rollout | seconds per 1,000 sampled tokens | of vLLM's own"
    lines += [f"| {titles} |", "|---|---|---|---|"]
    for name in engines:
        whole, rate = statistics.median(seconds[name]), statistics.median(rates[name])
        lines.append(f"| {name} | {whole:.2f} | {rate:.3f} | {rate / first:.2f} |")
    results = ROOT / "benchmarks" / "results"
    (results / f"engine-settings-{arguments.script}.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
