"""Learning curves of commands over seeds: one table and one picture.

    python benchmarks/learning_curves.py --name sokoban --seeds 1 2 3 --jobs 2 \\
        --command "istar_sokoban.py" --command "rloo_sokoban.py"

Every command runs once for each seed, `--jobs` at a time, each bound to its share of the cores (on 2 cores with
--jobs 2 a run has one core, and is slower than a user's). A run that came to its end is not run again, one that was
stopped goes on: delete it from --runs-dir to begin anew. What comes out, under benchmarks/results/:
NAME.md     the table: success (SOTOPIA: goal, 0 to 10) and score on the panel before and after, minutes
NAME.png    success (goal) on the panel against minutes of training, a line per seed
NAME.jsonl  every evaluation, with the command and the seed: the table and the picture are made of it
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

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from envs.checkpoints import rows_of

RESULTS = ROOT / "benchmarks" / "results"


def run(command: str, seed: int, cores: list[int], directory: Path) -> list[dict]:
    """The rows of one run, finished before or run now; its terminal output goes to a file beside it."""
    name = "".join(c if c.isalnum() else "-" for c in f"{command} {seed}")
    environment = os.environ | {"WANDB_MODE": "offline", "OMP_NUM_THREADS": str(len(cores))}
    arguments = [*shlex.split(command), "--seed", str(seed), "--runs-dir", str(directory), "--run-name", name]
    if rows := rows_of(directory / name / "metrics.jsonl"):
        if rows[-1]["iteration"] == json.loads((directory / name / "args.json").read_text())["iterations"]:
            return rows
    with (directory / f"{name}.log").open("w") as log:
        subprocess.run(
            [sys.executable, *arguments, "--resume", "auto"],
            cwd=ROOT,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            preexec_fn=lambda: os.sched_setaffinity(0, cores),
            check=False,
        )
    return rows_of(directory / name / "metrics.jsonl")


def run_all(tasks: list[tuple[str, int]], jobs: int, directory: Path) -> list[list[dict]]:
    """The rows of each (command, seed), `jobs` runs at a time, each bound to its share of the cores."""
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


def table(evaluations: list[dict]) -> str:
    """Markdown: a line per command and seed."""
    key = f"eval/{measure(evaluations)}"
    titles = "command | seed | iterations | minutes | {0} before | after | gain | lowest after iteration 10 | score"
    lines = [f"| {titles.format(measure(evaluations))} before | after |", f"|{'---|' * 10}"]
    for command, seed in dict.fromkeys((e["command"], e["seed"]) for e in evaluations):
        rows = [e for e in evaluations if (e["command"], e["seed"]) == (command, seed)]
        first, last = rows[0], rows[-1]
        low = min((e[key] for e in rows if e["iteration"] > 10), default=float("nan"))
        error = [f" ± {e['eval/success_error']:.3f}" if key == "eval/success" else "" for e in (first, last)]
        lines.append(
            f"| `{command}` | {seed} | {last['iteration']} | {last['time/elapsed'] / 60:.1f} "
            f"| {first[key]:.3f}{error[0]} | {last[key]:.3f}{error[1]} | {last[key] - first[key]:+.3f} | {low:.3f} "
            f"| {first['eval/score']:.3f} | {last['eval/score']:.3f} |"
        )
    return "\n".join(lines) + "\n"


def picture(evaluations: list[dict], path: Path) -> None:
    """Success (goal) on the panel against minutes: a colour per command, a line per seed."""
    key = measure(evaluations)
    figure, axes = plt.subplots(1, 2, figsize=(11, 4), sharey=True)
    commands = list(dict.fromkeys(e["command"] for e in evaluations))
    for number, command in enumerate(commands):
        for seed in dict.fromkeys(e["seed"] for e in evaluations if e["command"] == command):
            rows = [e for e in evaluations if (e["command"], e["seed"]) == (command, seed)]
            first = seed == min(e["seed"] for e in evaluations if e["command"] == command)
            for axis, x, scale in ((axes[0], "iteration", 1), (axes[1], "time/elapsed", 60)):
                label = command if first else None
                axis.plot([r[x] / scale for r in rows], [r[f"eval/{key}"] for r in rows], f"C{number}", label=label)
    axes[0].set(xlabel="iteration", ylabel=f"{key} on the evaluation panel")
    axes[1].set(xlabel="minutes of training")
    axes[0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", required=True, help="of the result files")
    parser.add_argument("--command", action="append", required=True, help="a script and its flags; several times")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time; the cores are divided between them")
    parser.add_argument("--runs-dir", type=Path, default=ROOT / "runs" / "benchmarks")
    arguments = parser.parse_args()
    RESULTS.mkdir(exist_ok=True)
    tasks = [(command, seed) for seed in arguments.seeds for command in arguments.command]
    evaluations = [
        {"command": command, "seed": seed, **row}
        for (command, seed), rows in zip(tasks, run_all(tasks, arguments.jobs, arguments.runs_dir))
        for row in rows
        if "eval/success" in row
    ]
    evaluations.sort(key=lambda e: (arguments.command.index(e["command"]), e["seed"], e["iteration"]))
    if not evaluations:
        sys.exit(f"no run came to its first evaluation: see the logs in {arguments.runs_dir}")
    (RESULTS / f"{arguments.name}.jsonl").write_text("".join(json.dumps(e) + "\n" for e in evaluations))
    commands = " ".join(f"--command {shlex.quote(command)}" for command in arguments.command)
    seeds = " ".join(map(str, arguments.seeds))
    flags = f"--name {arguments.name} --seeds {seeds} --jobs {arguments.jobs} {commands}"
    text = f"`python benchmarks/learning_curves.py {flags}`\n\n{table(evaluations)}"
    (RESULTS / f"{arguments.name}.md").write_text(text)
    picture(evaluations, RESULTS / f"{arguments.name}.png")
    print(text)


if __name__ == "__main__":
    main()
