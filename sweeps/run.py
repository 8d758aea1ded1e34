"""A W&B sweep file, executed on this machine without a server.

    python sweeps/run.py sweeps/alpha_webshop.yaml --jobs 2 --seeds 1 2 3
    python sweeps/run.py sweeps/alpha_beta_sokoban.yaml --jobs 2 -- --iterations 40

With a server, `wandb sweep` and `wandb agent` take the same file. Here every row of parameters is
run with each seed, `--jobs` runs at a time, each bound to its share of the cores. What follows `--`
is given to all of them. Methods: grid, random, and bayes, which needs optuna; there early_terminate
stops rows that fall behind (with the first seed, and then the others are left out).

Killed and started again, it repeats no run that was finished and goes on with those that were not.
A result is used again where its row, seed, command, metric and the text of the program are the
same, so an edited file has the table of a new start. A run that fails leaves the others alone: it
is named at the end, the exit status is 1, and the next start tries it again. Under
runs/sweeps/NAME/ (--out):

    table.md         a line per row: its mean over seeds, a 95 % interval (Student's t), its command
    table.png        each parameter against the result, with intervals
    results.jsonl    each finished run
    runs/            the runs, and what each printed (.log)
"""

import argparse
import ctypes
import os
import re
import shlex
import signal
import statistics
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from runtime.saving.files import append, lock, replace_file, rows_of, to_json
from sweeps.file import (
    MOST_ROWS,
    TRIALS,
    Job,
    check_flags,
    digest,
    is_number,
    job_of,
    nearest,
    read_sweep,
    rows_of_sweep,
    suggest,
    text_of,
)
from sweeps.results import key_of, picture, read_results, summary, table

PDEATHSIG = 1  # of prctl: the signal that a process gets when its parent dies
POLL = 0.1  # [s]


class Runner:
    """Runs jobs, keeps their results, and knows the failures."""

    def __init__(self, sweep: dict, out: Path, jobs: int):
        self.sweep, self.out, self.locked = sweep, out, lock(out)
        self.study = sweep.get("study")  # of the rows of bayes and of what is stopped early
        kept = read_results(out / "results.jsonl")
        ours = [entry for entry in kept if entry.get("study") == self.study]
        self.asked = [entry["asked"] for entry in ours if "asked" in entry]  # rows of bayes
        self.results = {
            key_of(entry): entry
            for entry in kept
            if "state" in entry and (entry["state"] != "stopped early" or entry in ours)
        }
        self.jobs: dict[str, Job] = {}  # of this start by their names, finished before or now
        self.failed: list[tuple[Job, str]] = []
        self.processes: set[subprocess.Popen] = set()
        self.lock, self.stopping = threading.Lock(), False
        self.free: Queue = Queue()
        cores = sorted(os.sched_getaffinity(0))
        for job in range(jobs):
            self.free.put(cores[job::jobs])
        self.total, self.done, self.started = 0, 0, time.monotonic()

    def run(self, job: Job, falls_behind=None) -> dict | None:
        """A job's result; None where it failed. falls_behind(its evaluations) stops it early."""
        with self.lock:
            self.jobs.setdefault(job.name, job)
            kept = self.result_of(job)
            self.total -= bool(kept)
        if kept:
            for number in range(len(kept["evaluations"]) if falls_behind else 0):
                falls_behind(kept["evaluations"][: number + 1])
            return kept
        if self.stopping:
            return None
        cores, begin = self.free.get(), time.monotonic()
        try:
            status = self.execute(job, cores, falls_behind)
        finally:
            self.free.put(cores)
        if self.stopping:
            return None

        evaluations, log = self.evaluations(job), self.log(job)
        with self.lock:
            self.done += 1
            if reason := self.failure(job, status, evaluations):
                self.failed.append((job, reason))
                print(f"{self.count()}  {job.name}: failed: {reason} ({log})", flush=True)
                return None
            minutes = (time.monotonic() - begin) / 60
            result = self.identity(job) | {"value": evaluations[-1], "evaluations": evaluations}
            result |= {"minutes": minutes, "state": status or "finished", "study": self.study}
            append(self.out / "results.jsonl", [to_json(result)])
            self.results[key_of(result)] = result
            state = "" if status == 0 else ", stopped early"
            told = f"{result['metric']} {result['value']:.3f}{state}"
            print(f"{self.count()}  {job.name}: {told} ({minutes:.1f} min)", flush=True)
        return result

    def identity(self, job: Job) -> dict:
        """What a result has to agree in to be this job's."""
        told = {"name": job.name, "config": job.config, "seed": job.seed, "command": job.command}
        return told | {"metric": self.sweep["metric"]["name"]}

    def result_of(self, job: Job) -> dict | None:
        return self.results.get(key_of(self.identity(job)))

    def failure(self, job: Job, status: int | str, evaluations: list[float]) -> str:
        """Why a job that has ended has no result, or nothing."""
        if status not in (0, "stopped early"):
            by = f"ended by signal {-status}: " if isinstance(status, int) and status < 0 else ""
            return by + last_line(self.log(job))
        if not evaluations:
            name = self.sweep["metric"]["name"]
            names = {key for row in rows_of(self.metrics(job)) for key in row}
            if name in names:
                return f"{name} is no finite number in its last evaluation"
            return f"no {name} in its metrics{nearest(name, names)}"
        if "text" in self.sweep and text_of(self.sweep) != self.sweep["text"]:
            return f"{self.sweep['program']} was changed while the sweep ran; start it again"
        return ""

    def execute(self, job: Job, cores: list[int], falls_behind) -> int | str:
        """The exit status of a job's process, or "stopped early"."""
        place = [f"--seed={job.seed}", f"--runs-dir={self.out / 'runs'}"]
        place += [f"--run-name={job.name}", "--resume=auto"]
        environment = os.environ | {"OMP_NUM_THREADS": str(len(cores))}
        environment |= {"WANDB_MODE": os.environ.get("WANDB_MODE", "offline")}

        def begin():  # in the child: its cores, and it ends when this process does
            os.sched_setaffinity(0, cores)
            ctypes.CDLL(None).prctl(PDEATHSIG, signal.SIGTERM)

        seen = 0
        with self.log(job).open("w") as log:
            try:
                process = subprocess.Popen(
                    [*job.words, *place],
                    cwd=ROOT,
                    env=environment,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    preexec_fn=begin,
                    start_new_session=True,  # Ctrl-C is this process's to pass on
                )
            except OSError as error:  # it is no executable, or the words are too long
                log.write(f"{error.filename}: {error.strerror}")
                return 1
            self.processes.add(process)
            if self.stopping:
                process.terminate()
            while (status := process.poll()) is None:
                time.sleep(POLL)
                evaluations = self.evaluations(job) if falls_behind else []
                if len(evaluations) > seen:
                    seen = len(evaluations)
                    if falls_behind(evaluations):
                        process.terminate()
                        process.wait()
                        status = "stopped early"
                        break
            self.processes.discard(process)
        return status

    def log(self, job: Job) -> Path:
        return self.out / "runs" / f"{job.name}.log"

    def metrics(self, job: Job) -> Path:
        return self.out / "runs" / job.name / "metrics.jsonl"

    def evaluations(self, job: Job) -> list[float]:
        """The values of the metric that the run has logged; none where the last is no number."""
        name = self.sweep["metric"]["name"]
        values = [row[name] for row in rows_of(self.metrics(job)) if name in row]
        ends_well = bool(values) and is_number(values[-1])
        return [*filter(is_number, values)] if ends_well else []

    def count(self) -> str:
        left = max(0, self.total - self.done)
        seconds = (time.monotonic() - self.started) / max(1, self.done) * left
        return f"{self.done:3} of {self.total}, {seconds / 60:.0f} min left"

    def stop(self, *_) -> None:
        """Stop all runs, which keep what they have; a second start goes on with them."""
        self.stopping = True
        for process in list(self.processes):
            process.terminate()


def last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").split("\n")
    words = [line.strip() for line in lines if line.strip()] or ["it printed nothing"]
    return re.sub(r"[\x00-\x1f\x7f-\x9f]", "?", words[-1])[:200]


def run_rows(runner: Runner, rows: list[dict], args) -> None:
    """All rows with all seeds: seed by seed, so that every row is known early."""
    jobs = [
        job_of(runner.sweep, number, config, seed, args.more)
        for seed in args.seeds
        for number, config in enumerate(rows)
    ]
    runner.total = len(jobs)
    found = sum(map(bool, map(runner.result_of, jobs)))
    if others := len(runner.results) - found:
        told = "of other rows, seeds, commands, metrics or texts of the program"
        print(f"stored results that the table leaves out, {told}: {others}")
    with ThreadPoolExecutor(args.jobs) as pool:
        list(pool.map(runner.run, jobs))


def run_bayes(runner: Runner, args) -> None:
    """run_cap rows that optuna proposes, from the results so far."""
    try:
        import optuna
    except ImportError:
        sys.exit("method bayes needs optuna: pip install optuna==5.0.0")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    sweep, parameters = runner.sweep, runner.sweep["parameters"]
    early = sweep.get("early_terminate")
    pruner = optuna.pruners.NopPruner()
    if early:
        least, eta = early.get("min_iter", 3), early.get("eta", 3)
        pruner = optuna.pruners.HyperbandPruner(least, "auto", eta)
    seed = args.draw_seed + 1000 * len(runner.asked)  # a second start proposes other rows
    study = optuna.create_study(
        direction=sweep["metric"]["goal"],
        sampler=optuna.samplers.TPESampler(seed=seed, constant_liar=True),
        pruner=pruner,
    )
    asked, rows = runner.asked, args.trials or sweep.get("run_cap", TRIALS)
    runner.total = rows * len(args.seeds)
    busy: dict[str, threading.Lock] = {}  # a row that is proposed twice is run once

    def propose(number: int):
        """(trial, row): one that was begun before, or a new one."""
        with runner.lock:
            if number < len(asked):
                study.enqueue_trial(asked[number])
            trial = study.ask()
            config = {name: suggest(trial, name, p) for name, p in parameters.items()}
            if number >= len(asked):
                line = to_json({"asked": trial.params, "study": runner.study})
                append(runner.out / "results.jsonl", [line])
            return trial, config

    def one(number: int) -> None:
        if runner.stopping:
            return
        trial, config = propose(number)

        def falls_behind(evaluations: list[float]) -> bool:
            with runner.lock:
                trial.report(evaluations[-1], len(evaluations))
                return trial.should_prune()

        values = []
        for seed in args.seeds:
            job = job_of(sweep, number, config, seed, args.more)
            with busy.setdefault(job.name, threading.Lock()):
                result = runner.run(job, falls_behind if early and seed == args.seeds[0] else None)
            if result is None or result["state"] == "stopped early":
                break
            values.append(result["value"])
        with runner.lock:
            if values and len(values) == len(args.seeds):
                study.tell(trial, statistics.mean(values))
            elif result is None:
                study.tell(trial, state=optuna.trial.TrialState.FAIL)
            else:
                runner.total -= len(args.seeds) - len(values) - 1
                study.tell(trial, state=optuna.trial.TrialState.PRUNED)

    with ThreadPoolExecutor(args.jobs) as pool:
        list(pool.map(one, range(rows)))


# ------------ the command line ------------


def write_results(runner: Runner, file: Path, seeds: list[int]) -> list[dict]:
    """Write table.md and table.png of what is finished, and return the rows."""
    sweep, out = runner.sweep, runner.out
    results: dict[int, list[dict]] = {}
    for job in runner.jobs.values():
        if result := runner.result_of(job):
            results.setdefault(job.row, []).append(result)
    rows = summary(results, sweep["metric"]["goal"])
    if rows:
        title = f"{file.stem}: {sweep['program']}, {sweep['method']}"
        title += f", seed{'s' * (len(seeds) > 1)} {', '.join(map(str, sorted(seeds)))}"
        replace_file(out / "table.md", table(sweep, rows, title))
        picture(sweep, rows, title, out / "table.png")
    for name in () if rows else ("table.md", "table.png"):  # of an earlier start
        (out / name).unlink(missing_ok=True)
    return rows


def read_arguments() -> argparse.Namespace:
    words, more = sys.argv[1:], []
    if "--" in words:
        place = words.index("--")
        words, more = words[:place], words[place + 1 :]
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("file", type=Path, help="The sweep file.")
    parser.add_argument("--jobs", type=int, default=1, help="Runs at a time.")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1], help="Seeds of every row.")
    parser.add_argument("--trials", type=int, help="Most rows (file: run_cap).")
    parser.add_argument("--draw-seed", type=int, default=0, help="Seed of what rows are drawn.")
    parser.add_argument("--out", type=Path, help="Directory (default: runs/sweeps/NAME).")
    parser.error = lambda told: sys.exit(f"{told}; what goes to every run follows --")
    args = parser.parse_args(words)
    args.more = more
    cores = len(os.sched_getaffinity(0))
    if not 1 <= args.jobs <= cores:
        sys.exit(f"--jobs {args.jobs}: from 1 to {cores}, the cores that there are")
    if len({*args.seeds}) < len(args.seeds):
        sys.exit(f"--seeds {' '.join(map(str, args.seeds))}: each only once")
    if args.trials is not None and not 1 <= args.trials <= MOST_ROWS:
        sys.exit(f"--trials {args.trials}: has to be from 1 to {MOST_ROWS:,}")
    if not 0 <= args.draw_seed <= 10**9:
        sys.exit(f"--draw-seed {args.draw_seed}: has to be from 0 to {10**9:,}")
    return args


def main() -> None:
    args = read_arguments()
    sweep = read_sweep(args.file)
    check_flags(args.file, sweep, args)
    sweep["more"] = args.more
    sweep["text"] = text_of(sweep)
    learnt = ("text", "program", "command", "method", "metric", "parameters", "early_terminate")
    sweep["study"] = digest([sweep.get(key) for key in learnt], args.more, args.draw_seed)
    out = (args.out or Path("runs", "sweeps", args.file.stem)).resolve()
    try:
        (out / "runs").mkdir(parents=True, exist_ok=True)
        runner = Runner(sweep, out, args.jobs)
    except OSError as error:
        sys.exit(f"--out {out}: {error.filename}: {error.strerror}")
    try:
        run_all(runner, args)
    finally:
        os.close(runner.locked)


def run_all(runner: Runner, args) -> None:
    """Run what is not finished, write the table; exits with a line where runs failed."""
    signal.signal(signal.SIGTERM, runner.stop)
    signal.signal(signal.SIGINT, runner.stop)
    if runner.sweep["method"] == "bayes":
        run_bayes(runner, args)
    else:
        run_rows(runner, rows_of_sweep(runner.sweep, args), args)

    rows = write_results(runner, args.file, args.seeds)
    if rows:
        tables = f"{runner.out / 'table.md'}, {runner.out / 'table.png'}"
        print(f"{tables}; best: {rows[0]['command']}")
    if runner.stopping:
        sys.exit(f"stopped; the same command goes on: {shlex.join(['python', *sys.argv])}")
    if runner.failed:
        names = [f"  {job.name}: {reason} ({runner.log(job)})" for job, reason in runner.failed]
        sys.exit("\n".join([f"{len(names)} of {runner.total} runs failed:", *names]))


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("stopped before the first run")
