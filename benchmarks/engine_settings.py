"""Seconds of a rollout with the engine's settings: vLLM's own for a CPU against ours, side by side.

    python benchmarks/engine_settings.py --script grpo_sokoban
    python benchmarks/engine_settings.py --script grpo_webshop --rounds 7

Of each setting there is an engine in this process; in every round each plays the same tasks from the same seed with the
script's default flags, after forgetting its prefixes. Episodes differ a little between settings, because batches do;
seconds are therefore per 1,000 sampled tokens too. Written: benchmarks/results/engine-settings-SCRIPT.md.
"""

import argparse
import os
import random
import statistics
import sys
import time

from throughput import ROOT, load_script

VARIANTS = {  # name: settings beside the script's
    "vLLM's own (128, 2048)": dict(block_size=128, max_num_batched_tokens=2048),
    "block_size 32": dict(block_size=32, max_num_batched_tokens=2048),
    "max_num_batched_tokens 8192": dict(block_size=128, max_num_batched_tokens=8192),
    "both (ours)": {},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--script", default="grpo_sokoban", help="whose environment and flags, without .py")
    parser.add_argument("--rounds", type=int, default=5, help="measured rollouts of each setting")
    arguments = parser.parse_args()
    module = load_script(arguments.script)
    import torch
    import vllm
    from transformers import AutoModelForCausalLM, AutoTokenizer

    args = module.Args(engine_memory=1)
    path = str(ROOT / args.model)
    env = getattr(module, "WebShop" if hasattr(module, "WebShop") else "Sokoban").from_args(args)
    policy, tokenizer = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    chat, engines, make = module.Chat(tokenizer, [tokenizer.eos_token_id]), {}, vllm.LLM
    for name, changed in VARIANTS.items():
        vllm.LLM = lambda path, changed=changed, **settings: make(path, **settings | changed)
        engines[name] = module.VllmEngine(path, [tokenizer.eos_token_id], args)
        engines[name].load(policy)
    tasks = sorted(random.Random(0).sample(env.train_tasks, args.tasks_per_iteration) * args.group_size)
    seconds, rates = {name: [] for name in engines}, {name: [] for name in engines}
    for number in range(arguments.rounds + 1):
        for name, engine in engines.items():
            torch.manual_seed(number)
            engine.llm.reset_prefix_cache()
            start = time.perf_counter()
            trajectories = module.rollout(env, engine, chat, tasks, args, args.temperature, name)
            if number:  # the first one warms up
                seconds[name].append(time.perf_counter() - start)
                sampled = sum(len(step.engine_logprobs) for t in trajectories for step in t.steps)
                rates[name].append(seconds[name][-1] / sampled * 1000)
    first = statistics.median(rates[next(iter(rates))])
    lines = [f"`python benchmarks/engine_settings.py {' '.join(sys.argv[1:])}`", ""]
    lines += [f"{len(tasks)} episodes, tiny model, {len(os.sched_getaffinity(0))} cores, vLLM on a CPU; medians.", ""]
    lines += [
        "| settings | seconds a rollout | seconds per 1,000 sampled tokens | of vLLM's own |",
        "|---|---|---|---|",
    ]
    for name in engines:
        rate = statistics.median(rates[name])
        lines.append(f"| {name} | {statistics.median(seconds[name]):.2f} | {rate:.3f} | {rate / first:.2f} |")
    (ROOT / "benchmarks" / "results" / f"engine-settings-{arguments.script}.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
