"""Kill a run with SIGKILL at random moments, take it up each time, and compare the end with an uninterrupted run.

    python benchmarks/kill_and_resume.py --kills 20                          # --engine hf: equal bit for bit
    python benchmarks/kill_and_resume.py --kills 5 --engine vllm             # every iteration's row exactly once
    python benchmarks/kill_and_resume.py --kills 3 --script rloo_sokoban

A moment is a place in the run: an iteration and a share of its time, counted from where the program says that it begins
(so also while a checkpoint is read or written); one in five is a moment in the start of the program. Every start is
the same command with `--resume auto`, as a scheduler gives it. Exits with 1 where something differs. Written:
benchmarks/results/NAME.md, the moments and what was compared.
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

import torch
from safetensors.torch import load_file
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from envs.checkpoints import rows_of

BEGINS = "an iteration:"  # what a script prints when all is loaded
SMALL = "--tasks-per-iteration 4 --group-size 4 --eval-tasks 4 --eval-samples 1 --eval-every 4 --max-steps 4 --seed 5"


def start(arguments, home: Path, name: str) -> subprocess.Popen:
    """The script as a scheduler starts it; what it says goes to NAME.log."""
    flags = [*SMALL.split(), "--iterations", str(arguments.iterations), "--engine", arguments.engine]
    command = [sys.executable, str(ROOT / f"{arguments.script}.py"), *flags, "--run-name", name, "--resume", "auto"]
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
    process, run, log = start(arguments, home, "killed"), home / "runs" / "killed", home / "killed.log"
    if iteration is None:
        time.sleep(share * 10)
    else:
        wait_for(lambda: BEGINS in log.read_text(), process)
        wait_for(lambda: any(row["iteration"] >= iteration - 1 for row in rows(run)), process)
        seen, end = len(rows(run)), time.time() + share * seconds
        wait_for(lambda: time.time() > end or len(rows(run)) > seen, process)  # at most an iteration goes by
    process.kill()
    process.wait()
    last = max((row["iteration"] for row in rows(run)), default=None)
    kept = max((path.name for path in (run / "checkpoints").glob("[0-9]*")), default="none")
    return f"last row {last}, checkpoint {kept}{', a draft' if (run / 'checkpoints' / 'draft').exists() else ''}"


def differences(one: Path, other: Path, exact: bool) -> list[str]:
    """What is not equal in two finished runs. exact: parameters, metrics and episodes bit for bit; else every iteration
    has one row and its episodes."""
    mine, theirs = (
        [{k: v for k, v in r.items() if not k.startswith("time/")} for r in rows(run)] for run in (one, other)
    )
    found = [] if [r["iteration"] for r in mine] == [r["iteration"] for r in theirs] else ["rows"]
    episodes = [
        [json.loads(line) for line in (run / "episodes.jsonl").read_text().splitlines()] for run in (one, other)
    ]
    if [e["iteration"] for e in episodes[0]] != [e["iteration"] for e in episodes[1]]:
        found.append("numbers of episodes")
    if exact:
        found += [] if mine == theirs else ["metrics"]
        found += [] if episodes[0] == episodes[1] else ["episodes"]
        last = max(path.name for path in (one / "checkpoints").iterdir())
        for name in (f"checkpoints/{last}/trained.safetensors", "policy/model.safetensors"):
            first, second = load_file(one / name), load_file(other / name)
            same = first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)
            found += [] if same else [name]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--script", default="istar_sokoban", help="which script, without .py")
    parser.add_argument("--engine", default="hf", choices=("hf", "vllm"))
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--iterations", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--name", default="", help="of the table under benchmarks/results; empty: none is written")
    arguments = parser.parse_args()
    home, rng = Path(tempfile.mkdtemp(prefix="kill-and-resume-")), random.Random(arguments.seed)
    process = start(arguments, home, "straight")
    wait_for(lambda: len(rows(home / "runs" / "straight")) > 1, process)
    clock = time.time()
    finish(process, home, "straight")
    seconds = (time.time() - clock) / max(1, arguments.iterations - 1)
    moments = sorted((rng.randint(1, arguments.iterations), rng.random()) for _ in range(arguments.kills))
    moments = [(None, share) if rng.random() < 0.2 else (i, share) for i, share in moments]
    seen = []
    for moment in tqdm(moments, "kills", disable=None):
        seen.append(kill_at(arguments, home, moment, seconds))
    finish(start(arguments, home, "killed"), home, "killed")
    exact = arguments.engine == "hf"
    found = differences(home / "runs" / "straight", home / "runs" / "killed", exact)
    verdict = f"differs: {', '.join(found)} ({home})" if found else "equal"
    compared = "parameters, moments, metrics and episodes, bit for bit" if exact else "rows and numbers of episodes"
    lines = [f"`python {' '.join(sys.argv)}`", "", f"{arguments.kills} kills; {compared}: **{verdict}**", ""]
    lines += ["| kill | iteration | share of its time | left behind |", "|---|---|---|---|"]
    for number, ((iteration, share), left) in enumerate(zip(moments, seen), 1):
        lines.append(f"| {number} | {iteration or 'start'} | {share:.2f} | {left} |")
    print("\n".join(lines))
    if arguments.name:
        (ROOT / "benchmarks" / "results" / f"{arguments.name}.md").write_text("\n".join(lines) + "\n")
    if found:
        sys.exit(1)
    shutil.rmtree(home)


if __name__ == "__main__":
    main()
