"""Kill a run with SIGKILL at random moments, take it up each time, and compare the end with an
uninterrupted run.

    python benchmarks/kill_and_resume.py --kills 20               # --engine hf: equal bit for bit
    python benchmarks/kill_and_resume.py --kills 5 --engine vllm  # every iteration's row just once
    python benchmarks/kill_and_resume.py --kills 3 --script rloo_sokoban

A moment is a place in the run: an iteration and a share of its time, counted from where the program
says that it begins (so also while a checkpoint is read or written); one in five is a moment in the
start of the program. Every start is the same command with `--resume auto`, as a scheduler gives it.
Exits with 1 where something differs. Written: benchmarks/results/NAME.md, the moments and what was
compared.
"""

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from runtime.saving.files import rows_of

import torch
from safetensors.torch import load_file
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
BEGINS = "an iteration:"  # what a script prints when all is loaded
SMALL = "--tasks-per-iteration 4 --group-size 4 --max-steps 4 --seed 5"
SMALL += " --eval-tasks 4 --eval-samples 1 --eval-every 4"


def start(arguments, home: Path, name: str) -> subprocess.Popen:
    """The script as a scheduler starts it; what it says goes to NAME.log."""
    words = [*SMALL.split(), "--iterations", str(arguments.iterations)]
    words += ["--engine", arguments.engine, "--run-name", name, "--resume", "auto"]
    command = [sys.executable, str(ROOT / f"{arguments.script}.py"), *words]
    with (home / f"{name}.log").open("w") as log:
        return subprocess.Popen(command, cwd=home, stdout=log, stderr=subprocess.STDOUT)


def wait_for(condition, process: subprocess.Popen) -> None:
    """Until the condition holds or the process has ended."""
    while process.poll() is None and not condition():
        time.sleep(0.01)


def rows(run: Path) -> list[dict]:
    """The whole lines of metrics.jsonl."""
    return rows_of(run / "metrics.jsonl")


def finish(process: subprocess.Popen, home: Path, name: str) -> None:
    if process.wait():
        sys.exit(f"the run failed:\n{(home / f'{name}.log').read_text()[-3000:]}")


def kill_at(arguments, home: Path, moment: tuple, seconds: float) -> str:
    """Start the run, kill it at the moment: what was there then, for the table."""
    iteration, share = moment
    process, run, log = start(arguments, home, "killed"), home / "runs/killed", home / "killed.log"
    if iteration is None:
        time.sleep(share * 10)
    else:
        wait_for(lambda: BEGINS in log.read_text(), process)
        wait_for(lambda: any(row["iteration"] >= iteration - 1 for row in rows(run)), process)
        seen, end = len(rows(run)), time.time() + share * seconds
        # at most an iteration goes by
        wait_for(lambda: time.time() > end or len(rows(run)) > seen, process)
    process.kill()
    process.wait()

    last = max((row["iteration"] for row in rows(run)), default=None)
    checkpoints = run / "checkpoints"
    kept = max((path.name for path in checkpoints.glob("[0-9]*")), default="none")
    draft = ", a draft" if (checkpoints / "draft").exists() else ""
    return f"last row {last}, checkpoint {kept}{draft}"


def without_times(run: Path) -> list[dict]:
    """The rows, without their clocks."""
    return [
        {key: value for key, value in row.items() if not key.startswith("time/")}
        for row in rows(run)
    ]


def differences(one: Path, other: Path, exact: bool) -> list[str]:
    """What is not equal in two finished runs. exact: parameters, metrics and episodes bit for bit;
    else every iteration has one row and its episodes."""
    mine, theirs = without_times(one), without_times(other)
    episodes = []
    for run in (one, other):
        lines = (run / "episodes.jsonl").read_text().splitlines()
        episodes.append([json.loads(line) for line in lines])

    found = []
    if [row["iteration"] for row in mine] != [row["iteration"] for row in theirs]:
        found.append("rows")
    if [e["iteration"] for e in episodes[0]] != [e["iteration"] for e in episodes[1]]:
        found.append("numbers of episodes")
    if not exact:
        return found

    if mine != theirs:
        found.append("metrics")
    if episodes[0] != episodes[1]:
        found.append("episodes")
    last = max(path.name for path in (one / "checkpoints").iterdir())
    for name in (f"checkpoints/{last}/trained.safetensors", "policy/model.safetensors"):
        first, second = load_file(one / name), load_file(other / name)
        alike = first.keys() == second.keys()
        if not alike or not all(torch.equal(first[key], second[key]) for key in first):
            found.append(name)
    return found


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    add = parser.add_argument
    add("--script", default="istar_sokoban", help="which script, without .py")
    add("--engine", default="hf", choices=("hf", "vllm"))
    add("--kills", type=int, default=20)
    add("--iterations", type=int, default=12)
    add("--seed", type=int, default=0, help="of the moments")
    name = "of the table under benchmarks/results; empty: none is written"
    add("--name", default="", help=name)
    arguments = parser.parse_args()

    home, rng = Path(tempfile.mkdtemp(prefix="kill-and-resume-")), random.Random(arguments.seed)
    straight, killed = home / "runs" / "straight", home / "runs" / "killed"
    process = start(arguments, home, "straight")
    wait_for(lambda: len(rows(straight)) > 1, process)
    clock = time.time()
    finish(process, home, "straight")
    seconds = (time.time() - clock) / max(1, arguments.iterations - 1)

    last = arguments.iterations
    moments = sorted((rng.randint(1, last), rng.random()) for _ in range(arguments.kills))
    moments = [(None if rng.random() < 0.2 else i, share) for i, share in moments]
    seen = []
    for moment in tqdm(moments, "kills", disable=None):
        seen.append(kill_at(arguments, home, moment, seconds))
    finish(start(arguments, home, "killed"), home, "killed")

    exact = arguments.engine == "hf"
    found = differences(straight, killed, exact)
    verdict = f"differs: {', '.join(found)} ({home})" if found else "equal"
    compared = "rows and numbers of episodes"
    if exact:
        compared = "parameters, moments, metrics and episodes, bit for bit"
    lines = [f"`python {' '.join(sys.argv)}`", ""]
    lines += [f"{arguments.kills} kills; {compared}: **{verdict}**", ""]
    lines += ["| kill | iteration | share of its time | left behind |", "|---|---|---|---|"]
    for number, ((iteration, share), left) in enumerate(zip(moments, seen), 1):
        lines.append(f"| {number} | {iteration or 'start'} | {share:.2f} | {left} |")
    print("\n".join(lines))
    if arguments.name:
        results = ROOT / "benchmarks" / "results"
        (results / f"{arguments.name}.md").write_text("\n".join(lines) + "\n")
    if found:
        sys.exit(1)
    shutil.rmtree(home)


if __name__ == "__main__":
    main()
