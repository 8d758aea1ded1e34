"""Learning curves of commands over seeds: one table and one picture.

    python benchmarks/learning_curves.py --name sokoban --seeds 1 2 3 --jobs 2 \\
        --command "istar_sokoban.py" --command "rloo_sokoban.py"

Every command runs once for each seed, `--jobs` at a time, each bound to its share of the cores (on
2 cores with --jobs 2 a run has one core, and is slower than a user's). A run that came to its end
is not run again, one that was stopped goes on: delete it from --runs-dir to begin anew. What comes
out, under benchmarks/results/:

    NAME.md     the table: success (SOTOPIA: goal, 0 to 10) and score on the panel before and after,
                minutes
    NAME.png    success (goal) on the panel against minutes of training, a line per seed
    NAME.jsonl  every evaluation, with the command and the seed: table and picture are made of it
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from runtime.files import rows_of

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def run(command: str, seed: int, cores: list[int], directory: Path) -> list[dict]:
    """The rows of one run, finished before or run now; its terminal output goes to a file beside
    it."""
    name = "".join(c if c.isalnum() else "-" for c in f"{command} {seed}")
    if rows := rows_of(directory / name / "metrics.jsonl"):
        flags = json.loads((directory / name / "args.json").read_text())
        if rows[-1]["iteration"] == flags["iterations"]:
            return rows

    words = [*shlex.split(command), "--seed", str(seed)]
    words += ["--runs-dir", str(directory), "--run-name", name, "--resume", "auto"]
    environment = os.environ | {"WANDB_MODE": "offline", "OMP_NUM_THREADS": str(len(cores))}
    with (directory / f"{name}.log").open("w") as log:
        subprocess.run(
            [sys.executable, *words],
            cwd=ROOT,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            preexec_fn=lambda: os.sched_setaffinity(0, cores),
            check=False,
        )
    return rows_of(directory / name / "metrics.jsonl")


def run_all(tasks: list[tuple[str, int]], jobs: int, directory: Path) -> list[list[dict]]:
    """The rows of each (command, seed), `jobs` runs at a time, each bound to its share of the
    cores."""
    directory.mkdir(parents=True, exist_ok=True)
    cores, free = sorted(os.sched_getaffinity(0)), Queue()
    for job in range(jobs):
        free.put(cores[job::jobs] or cores)

    def one(task):
        command, seed = task
        share = free.get()
        rows = run(command, seed, share, directory)
        free.put(share)
        print(f"{command} seed {seed}: {len(rows)} rows", flush=True)
        return rows

    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(one, tasks))


def measure(evaluations: list[dict]) -> str:
    """What is compared: success, or where conversations are judged the goal score."""
    return "goal" if "eval/goal" in evaluations[0] else "success"


def runs_of(evaluations: list[dict]) -> dict[tuple[str, int], list[dict]]:
    """{(command, seed): its evaluations}."""
    runs = {}
    for row in evaluations:
        runs.setdefault((row["command"], row["seed"]), []).append(row)
    return runs


def table(evaluations: list[dict]) -> str:
    """Markdown: a line per command and seed."""
    compared = measure(evaluations)
    key = f"eval/{compared}"
    titles = f"command | seed | iterations | minutes | {compared} before | after | gain"
    titles += " | lowest after iteration 10 | score before | after"
    lines = [f"| {titles} |", f"|{'---|' * 10}"]
    for (command, seed), rows in runs_of(evaluations).items():
        first, last = rows[0], rows[-1]
        low = min((row[key] for row in rows if row["iteration"] > 10), default=float("nan"))
        before, after = f"{first[key]:.3f}", f"{last[key]:.3f}"
        if compared == "success":
            before += f" ± {first['eval/success_error']:.3f}"
            after += f" ± {last['eval/success_error']:.3f}"
        cells = [f"`{command}`", str(seed), str(last["iteration"])]
        cells += [f"{last['time/elapsed'] / 60:.1f}", before, after]
        cells += [f"{last[key] - first[key]:+.3f}", f"{low:.3f}"]
        cells += [f"{first['eval/score']:.3f}", f"{last['eval/score']:.3f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def picture(evaluations: list[dict], path: Path) -> None:
    """Success (goal) on the panel against minutes: a colour per command, a line per seed."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    compared = measure(evaluations)
    figure, axes = plt.subplots(1, 2, figsize=(11, 4), sharey=True)
    commands = list(dict.fromkeys(row["command"] for row in evaluations))
    labelled = set()
    for (command, _), rows in runs_of(evaluations).items():
        colour = f"C{commands.index(command)}"
        label = None if command in labelled else command
        labelled.add(command)
        success = [row[f"eval/{compared}"] for row in rows]
        iterations = [row["iteration"] for row in rows]
        minutes = [row["time/elapsed"] / 60 for row in rows]
        axes[0].plot(iterations, success, colour, label=label)
        axes[1].plot(minutes, success, colour, label=label)
    axes[0].set(xlabel="iteration", ylabel=f"{compared} on the evaluation panel")
    axes[1].set(xlabel="minutes of training")
    axes[0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    add = parser.add_argument
    add("--name", required=True, help="of the result files")
    commands = "a script and its flags; several times"
    add("--command", action="append", required=True, help=commands)
    add("--seeds", type=int, nargs="+", default=[1, 2, 3])
    jobs = "runs at a time; the cores are divided between them"
    add("--jobs", type=int, default=1, help=jobs)
    add("--runs-dir", type=Path, default=ROOT / "runs" / "benchmarks")
    arguments = parser.parse_args()
    RESULTS.mkdir(exist_ok=True)

    tasks = [(command, seed) for seed in arguments.seeds for command in arguments.command]
    evaluations = []
    for (command, seed), rows in zip(tasks, run_all(tasks, arguments.jobs, arguments.runs_dir)):
        seen = [row for row in rows if "eval/success" in row]
        evaluations += [{"command": command, "seed": seed, **row} for row in seen]
    if not evaluations:
        sys.exit(f"no run came to its first evaluation: see the logs in {arguments.runs_dir}")
    order = arguments.command.index
    evaluations.sort(key=lambda row: (order(row["command"]), row["seed"], row["iteration"]))

    lines = "".join(json.dumps(row) + "\n" for row in evaluations)
    (RESULTS / f"{arguments.name}.jsonl").write_text(lines)
    commands = " ".join(f"--command {shlex.quote(command)}" for command in arguments.command)
    seeds = " ".join(map(str, arguments.seeds))
    flags = f"--name {arguments.name} --seeds {seeds} --jobs {arguments.jobs} {commands}"
    text = f"`python benchmarks/learning_curves.py {flags}`\n\n{table(evaluations)}"
    (RESULTS / f"{arguments.name}.md").write_text(text)
    picture(evaluations, RESULTS / f"{arguments.name}.png")
    print(text)


if __name__ == "__main__":
    main()
