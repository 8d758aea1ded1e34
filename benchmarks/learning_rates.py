"""Learning rates of each algorithm, tried with the same budget: one table.

    python benchmarks/learning_rates.py --name learning-rates-webshop --jobs 2 --rates 2.5e-4 5e-4 1e-3 \\
        --scripts rloo_webshop grpo_webshop reinforce_pp_webshop gigpo_webshop istar_webshop prime_webshop ppo_webshop

Every script runs once with every rate of the policy, everything else as its defaults, `--jobs` at a time, each bound to
its share of the cores. A rate has for its result the mean success over the evaluations (every 5 iterations): what is
learnt, and how soon. What a script learns with its default in the first 15 minutes of training is told too. Runs that
came to their end are not run again. Written: benchmarks/results/NAME.md and NAME.jsonl.
"""

import argparse
import json
import re
import sys
from pathlib import Path

from learning_curves import RESULTS, ROOT, run_all


def default_rate(script: str) -> float:
    """The rate that a script has without a flag."""
    return float(re.search(r"^    learning_rate: float = (\S+)", (ROOT / f"{script}.py").read_text(), re.M)[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", required=True, help="of the result files")
    parser.add_argument("--scripts", nargs="+", required=True, help="without .py")
    parser.add_argument("--rates", nargs="+", required=True, help="learning rates of the policy")
    parser.add_argument("--iterations", type=int, default=15, help="the budget of each run")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time; the cores are divided between them")
    parser.add_argument("--runs-dir", type=Path, default=ROOT / "runs" / "benchmarks")
    arguments = parser.parse_args()
    budget, results = f"--iterations {arguments.iterations} --eval-every 5", []
    tried = [(script, rate) for script in arguments.scripts for rate in arguments.rates]
    tasks = [(f"{script}.py --learning-rate {rate} {budget}", arguments.seed) for script, rate in tried]
    for (script, rate), (command, _), rows in zip(tried, tasks, run_all(tasks, arguments.jobs, arguments.runs_dir)):
        seen = [row for row in rows if "eval/success" in row]
        if not seen or seen[-1]["iteration"] != arguments.iterations:
            sys.exit(f"{command}: did not come to its end, see the log in {arguments.runs_dir}")
        result = {"script": script, "rate": rate, "minutes": rows[-1]["time/elapsed"] / 60}
        result |= {"before": seen[0]["eval/success"], "last": seen[-1]["eval/success"]}
        result["mean"] = sum(row["eval/success"] for row in seen[1:]) / len(seen[1:])
        soon = [row for row in seen if row["time/elapsed"] <= 15 * 60][-1]
        result |= {f"soon {key}": soon[key] for key in ("iteration", "eval/success", "eval/success_error")}
        result["soon minutes"] = soon["time/elapsed"] / 60
        results.append(result)
    lines = [f"`python benchmarks/{Path(sys.argv[0]).name} {' '.join(sys.argv[1:])}`", ""]
    lines += ["Success on the panel: mean of the evaluations, and the last one in brackets.", ""]
    lines += [f"| script | before | {' | '.join(arguments.rates)} |", f"|{'---|' * (2 + len(arguments.rates))}"]
    for script in arguments.scripts:
        own = [result for result in results if result["script"] == script]
        best = max(result["mean"] for result in own)
        cells = [f"{r['mean']:.3f} ({r['last']:.3f})" for r in own]
        cells = [f"**{cell}**" if r["mean"] == best else cell for cell, r in zip(cells, own)]
        lines.append(f"| `{script}.py` | {own[0]['before']:.3f} | {' | '.join(cells)} |")
    lines += ["", "With the default rate, by the last evaluation within 15 minutes of training:", ""]
    lines += ["| script | rate | before | after (standard error) | up | iterations | minutes |", f"|{'---|' * 7}"]
    for r in (result for result in results if float(result["rate"]) == default_rate(result["script"])):
        after = f"{r['soon eval/success']:.3f} ({r['soon eval/success_error']:.3f})"
        up = f"{r['soon eval/success'] - r['before']:+.3f} | {r['soon iteration']} | {r['soon minutes']:.1f}"
        lines.append(f"| `{r['script']}.py` | {r['rate']} | {r['before']:.3f} | {after} | {up} |")
    (RESULTS / f"{arguments.name}.jsonl").write_text("".join(json.dumps(result) + "\n" for result in results))
    (RESULTS / f"{arguments.name}.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
