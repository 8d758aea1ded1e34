"""What does a PRM reward? The step advantage A^S of a run, by the first word of the answer and by
what the step did for the goal.

    python benchmarks/what_is_credited.py runs/NAME --first 3 --last 14

A row is a word and a sign of the world's own progress (Sokoban: of the moves that the solver still
needs). Where A^S follows the word and not the progress, the PRM has learnt what winners say, and
not where it helps. Steps without an A^S are left out. The table goes to the terminal, and with
--out to a file, with its command.
"""

import argparse
import re
import sys
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from runtime.saving.files import read_json, rows_of

SIGNS = {1: "nearer", 0: "as far", -1: "farther"}


def table_of(episodes, rows: int) -> str:
    """A table of the most frequent kinds of steps, Markdown; episodes: lines of episodes.jsonl."""
    kinds = defaultdict(list)  # {(word, sign): [(A^S, A^E), ...]}
    for episode in episodes:
        for step in episode["steps"]:
            if step["step_advantage"]:
                words = re.findall(r"\w+", re.sub(r"<[^<>]*>", " ", step["action"]))
                sign = (step["progress"] > 0) - (step["progress"] < 0)
                kinds[words[0] if words else "", sign].append(
                    (step["step_advantage"], step["episode_advantage"])
                )
    lines = ["| first word | the goal is | steps | mean A^S | mean A^E |", "|---|---|---|---|---|"]
    for (word, sign), steps in sorted(kinds.items(), key=lambda kind: -len(kind[1]))[:rows]:
        credit, outcome = (sum(values) / len(steps) for values in zip(*steps))
        lines.append(f"| {word} | {SIGNS[sign]} | {len(steps)} | {credit:+.2f} | {outcome:+.2f} |")
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="Directory of a finished run of iStar.")
    parser.add_argument("--first", type=int, default=1, help="The first iteration that counts.")
    parser.add_argument("--last", type=int, default=10**9, help="The last iteration that counts.")
    parser.add_argument("--rows", type=int, default=8, help="So many kinds of steps are shown.")
    parser.add_argument("--out", type=Path, help="The table is written to this file too.")
    given = parser.parse_args()

    file = given.run / "episodes.jsonl"
    if not file.exists():
        sys.exit(f"{given.run}: there is no episodes.jsonl in it")
    episodes = [row for row in rows_of(file) if row["iteration"] <= given.last]
    table = table_of((e for e in episodes if e["iteration"] >= given.first), given.rows)
    print(table, end="")
    if given.out:
        started = read_json(given.run / "run.json")["starts"][0]["command"]
        about = f"`{started}`, iterations {given.first} to {given.last}\n\n"
        given.out.write_text(about + table)


if __name__ == "__main__":
    main()
