"""What --show costs on ALFWorld: tokens of an observation, for each of its values.

    python benchmarks/shown_commands.py --model Qwen/Qwen2.5-1.5B-Instruct

Plays the walkthrough of the panel's first 128 games, once for each value of --show, and prints the
mean tokens of the first message and of an observation by the tokenizer of --model, as a table.
"""

import argparse
import sys
from pathlib import Path
from statistics import mean

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from envs.alfworld import AlfWorld

from transformers import AutoTokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="models/tiny-alfworld", help="whose tokenizer counts")
    tokenizer = AutoTokenizer.from_pretrained(parser.parse_args().model)

    def length(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False))

    print("| `--show` | first message | an observation |\n|---|---|---|")
    for show in ("none", "new", "all"):
        env, firsts, others = AlfWorld(show=show), [], []
        for task in env.eval_tasks[:128]:
            episode = env.reset(task)
            firsts.append(length(episode.prompt))
            for words in episode.house.walkthrough:
                observation, *_ = episode.step(f"<think>x</think><action>{words}</action>")
                others.append(length(observation))
        print(f"| `{show}` | {mean(firsts):.0f} | {mean(others):.0f} |")


if __name__ == "__main__":
    main()
