"""Learning rates of each algorithm, tried with the same budget: one table.

    python benchmarks/learning_rates.py --name learning-rates-webshop --jobs 2 \\
        --rates 2.5e-4 5e-4 1e-3 --scripts rloo_webshop grpo_webshop reinforce_pp_webshop \\
        gigpo_webshop istar_webshop prime_webshop ppo_webshop

Every script runs once with every rate of the policy, everything else as its defaults, `--jobs` at a
time, each bound to its share of the cores. A rate has for its result the mean success over the
evaluations (every 5 iterations) on the validation tasks: what is learnt, and how soon. What a
script learns with its default in the first 15 minutes of training is told too. Runs that came to
their end are not run again. Written: benchmarks/results/NAME.md and NAME.jsonl.
"""

import argparse
import json
import re
import sys
from pathlib import Path

from learning_curves import RESULTS, ROOT, run_all


def default_rate(script: str) -> float:
    """The rate that a script has without a flag."""
    text = (ROOT / f"{script}.py").read_text()
    return float(re.search(r"^    learning_rate: Rate = (\S+)", text, re.MULTILINE)[1])


def result_of(script: str, rate: str, rows: list[dict]) -> dict:
    """What a run learnt, from its rows."""
    seen = [row for row in rows if "eval/success" in row]
    soon = [row for row in seen if row["time/elapsed"] <= 15 * 60][-1]
    after = [row["eval/success"] for row in seen[1:]]
    return {
        "script": script,
        "rate": rate,
        "minutes": rows[-1]["time/elapsed"] / 60,
        "before": seen[0]["eval/success"],
        "last": seen[-1]["eval/success"],
        "mean": sum(after) / len(after),
        "soon iteration": soon["iteration"],
        "soon eval/success": soon["eval/success"],
        "soon eval/success_error": soon["eval/success_error"],
        "soon minutes": soon["time/elapsed"] / 60,
    }


def table(results: list[dict], rates: list[str]) -> list[str]:
    """Markdown: a line per script, a column per rate, the best one bold."""
    lines = [f"| script | before | {' | '.join(rates)} |", f"|{'---|' * (2 + len(rates))}"]
    for script in dict.fromkeys(result["script"] for result in results):
        own = [result for result in results if result["script"] == script]
        best = max(result["mean"] for result in own)
        cells = []
        for result in own:
            cell = f"{result['mean']:.3f} ({result['last']:.3f})"
            cells.append(f"**{cell}**" if result["mean"] == best else cell)
        lines.append(f"| `{script}.py` | {own[0]['before']:.3f} | {' | '.join(cells)} |")
    return lines


def soon_table(results: list[dict]) -> list[str]:
    """Markdown: a line per script, with its default rate."""
    titles = "script | rate | before | after (standard error) | up | iterations | minutes"
    lines = [f"| {titles} |", f"|{'---|' * 7}"]
    for result in results:
        if float(result["rate"]) != default_rate(result["script"]):
            continue
        before, after = result["before"], result["soon eval/success"]
        cells = [f"`{result['script']}.py`", result["rate"], f"{before:.3f}"]
        cells += [f"{after:.3f} ({result['soon eval/success_error']:.3f})"]
        cells += [f"{after - before:+.3f}", str(result["soon iteration"])]
        cells += [f"{result['soon minutes']:.1f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    add = parser.add_argument
    add("--name", required=True, help="of the result files")
    add("--scripts", nargs="+", required=True, help="without .py")
    add("--rates", nargs="+", required=True, help="learning rates of the policy")
    add("--iterations", type=int, default=15, help="the budget of each run")
    add("--seed", type=int, default=1)
    jobs = "runs at a time; the cores are divided between them"
    add("--jobs", type=int, default=1, help=jobs)
    add("--runs-dir", type=Path, default=ROOT / "runs" / "benchmarks")
    arguments = parser.parse_args()

    budget = f"--iterations {arguments.iterations} --eval-every 5 --eval-set validation"
    tried = [(script, rate) for script in arguments.scripts for rate in arguments.rates]
    commands = [f"{script}.py --learning-rate {rate} {budget}" for script, rate in tried]
    tasks = [(command, arguments.seed) for command in commands]
    results = []
    runs = run_all(tasks, arguments.jobs, arguments.runs_dir)
    for (script, rate), command, rows in zip(tried, commands, runs):
        if not rows or rows[-1]["iteration"] != arguments.iterations:
            log = f"see the log in {arguments.runs_dir}"
            sys.exit(f"{command}: did not come to its end, {log}")
        results.append(result_of(script, rate, rows))

    lines = [f"`python benchmarks/{Path(sys.argv[0]).name} {' '.join(sys.argv[1:])}`", ""]
    lines += ["Success on the panel: mean of the evaluations, and the last one in brackets.", ""]
    lines += table(results, arguments.rates)
    soon = "by the last evaluation within 15 minutes of training"
    lines += ["", f"With the default rate, {soon}:", "", *soon_table(results)]
    saved = "".join(json.dumps(result) + "\n" for result in results)
    (RESULTS / f"{arguments.name}.jsonl").write_text(saved)
    (RESULTS / f"{arguments.name}.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
