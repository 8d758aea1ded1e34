"""A W&B sweep file, executed on this machine without a server.

    python sweeps/run.py sweeps/alpha_webshop.yaml --jobs 2 --seeds 1 2 3
    python sweeps/run.py sweeps/alpha_beta_sokoban.yaml --jobs 2 -- --iterations 40

With a server, `wandb sweep` and `wandb agent` take the same file. Here every row of parameters is
run with each seed, `--jobs` runs at a time, each bound to its share of the cores. What follows `--`
is given to all of them. Methods: grid, random, and bayes, which needs optuna; there early_terminate
stops rows that fall behind (with the first seed, and then the others are left out).

Killed and started again, with the same file, it repeats no run that was finished and goes on with
those that were not. A run that fails leaves the others alone: it is named at the end, the exit
status is 1, and the next start tries it again. Under runs/sweeps/NAME/ (--out):

    table.md         a line per row: its mean over seeds, a 95 % interval (Student's t), its command
    table.png        each parameter against the result, with intervals
    results.jsonl    each finished run
    runs/            the runs, and what each printed (.log)
"""

import argparse
import ctypes
import hashlib
import itertools
import json
import math
import os
import random
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
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from runtime.saving.files import append, lock, replace_file, rows_of, to_json

import yaml

COMMAND = ["${env}", "${interpreter}", "${program}", "${args}"]  # W&B's own
TRIALS = 16  # rows of random and bayes where the file has no run_cap
DRAWN = ("uniform", "log_uniform_values", "int_uniform", "categorical", "constant")
# Student's t for 95 % with 1, 2, ... degrees of freedom
T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
PDEATHSIG = 1  # of prctl: the signal that a process gets when its parent dies
POLL = 0.1  # [s]


class Job(NamedTuple):
    """A row of parameters with one seed."""

    row: int
    config: dict
    seed: int
    name: str  # of its run
    words: list[str]  # the command, without what places the run

    @property
    def command(self) -> str:
        return shlex.join(["python", *self.words[self.words.index(sys.executable) + 1 :]])


# ------------ the file ------------


def read_sweep(path: Path) -> dict:
    """The sweep file; exits with one line that names what cannot be."""
    try:
        sweep = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as error:
        sys.exit(f"{path}: {error}")
    for key in ("program", "method", "metric", "parameters"):
        if not isinstance(sweep, dict) or not sweep.get(key):
            sys.exit(f"{path}: no {key}")
    if sweep["method"] not in ("grid", "random", "bayes"):
        sys.exit(f"{path}: method {sweep['method']}: grid, random or bayes")
    if not sweep["metric"].get("name"):
        sys.exit(f"{path}: metric: no name")
    if sweep["metric"].get("goal", "minimize") not in ("minimize", "maximize"):
        sys.exit(f"{path}: goal {sweep['metric']['goal']}: minimize or maximize")
    if not (ROOT / sweep["program"]).is_file():
        sys.exit(f"{path}: program {sweep['program']}: no such script")
    for name, parameter in sweep["parameters"].items():
        check_parameter(path, sweep["method"], name, parameter)
    return sweep


def check_parameter(path: Path, method: str, name: str, parameter: dict) -> None:
    """Refuse what this runner cannot draw."""
    kind = kind_of(parameter)
    if kind not in DRAWN or not {"value", "values", "min"} & parameter.keys():
        sys.exit(f"{path}: {name}: this runner draws {', '.join(DRAWN)}, not {parameter}")
    if method == "grid" and kind not in ("categorical", "constant"):
        sys.exit(f"{path}: {name}: a grid needs values")


def kind_of(parameter: dict) -> str:
    """The parameter's distribution, which W&B takes from the other keys where it is not named."""
    if "value" in parameter:
        return "constant"
    if "values" in parameter:
        return "categorical"
    ends = parameter.get("min"), parameter.get("max")
    whole = all(isinstance(end, int) for end in ends)
    return parameter.get("distribution", "int_uniform" if whole else "uniform")


def grid(parameters: dict) -> list[dict]:
    """Every combination; the first parameter changes slowest."""
    choices = [p["values"] if "values" in p else [p["value"]] for p in parameters.values()]
    return [dict(zip(parameters, row)) for row in itertools.product(*choices)]


def drawn(parameters: dict, rng: random.Random) -> dict:
    """A row at random."""
    row = {}
    for name, parameter in parameters.items():
        kind, low, high = kind_of(parameter), parameter.get("min"), parameter.get("max")
        if kind == "constant":
            row[name] = parameter["value"]
        elif kind == "categorical":
            weights = parameter.get("probabilities")
            row[name] = rng.choices(parameter["values"], weights)[0]
        elif kind == "int_uniform":
            row[name] = rng.randint(low, high)
        elif kind == "uniform":
            row[name] = rng.uniform(low, high)
        else:
            row[name] = math.exp(rng.uniform(math.log(low), math.log(high)))
    return row


def rows_of_sweep(sweep: dict, args) -> list[dict]:
    """The rows of a grid, or those that are drawn at random."""
    if sweep["method"] == "grid":
        return grid(sweep["parameters"])
    rng = random.Random(args.draw_seed)
    number = args.trials or sweep.get("run_cap", TRIALS)
    return [drawn(sweep["parameters"], rng) for _ in range(number)]


def command_of(sweep: dict, config: dict) -> list[str]:
    """The command line that W&B's agent builds of a row."""
    words = {"env": ["/usr/bin/env"], "interpreter": [sys.executable]}
    words |= {"program": [sweep["program"]]}
    words |= {"args": [f"--{name}={value}" for name, value in config.items()]}
    command = []
    for part in map(str, sweep.get("command", COMMAND)):
        macro = re.fullmatch(r"\$\{(.*)\}", part)
        if macro and macro[1] not in words:
            sys.exit(f"command: {part}: this runner knows {', '.join(words)}")
        command += words[macro[1]] if macro else [part]
    return command


def job_of(sweep: dict, row: int, config: dict, seed: int, more: list[str]) -> Job:
    words = [*command_of(sweep, config), *more]
    varied = {name: config[name] for name in varied_in(sweep)}
    told = "-".join(f"{name}-{value:.3g}" if isinstance(value, float) else f"{name}-{value}"
                    for name, value in varied.items())  # fmt: skip
    told = re.sub(r"[^\w.+-]", "_", told)[:80]
    digest = hashlib.sha256(json.dumps(words[words.index(sys.executable) + 1 :]).encode())
    return Job(row, config, seed, f"{told}-{digest.hexdigest()[:6]}-seed-{seed}", words)


def varied_in(sweep: dict) -> list[str]:
    """The names of the parameters that differ from row to row; of one row all."""
    varied = [
        name
        for name, parameter in sweep["parameters"].items()
        if "value" not in parameter and len(parameter.get("values", (1, 2))) > 1
    ]
    return varied or list(sweep["parameters"])


# ------------ running ------------


class Runner:
    """Runs jobs, keeps their results, and knows the failures."""

    def __init__(self, sweep: dict, out: Path, jobs: int):
        self.sweep, self.out, self.locked = sweep, out, lock(out)
        kept = read_lines(out / "results.jsonl")
        whole = "".join(f"{to_json(entry)}\n" for entry in kept)
        replace_file(out / "results.jsonl", whole)  # without a line that a kill tore
        self.results = {entry["name"]: entry for entry in kept if "name" in entry}
        self.asked = [entry["asked"] for entry in kept if "asked" in entry]  # rows of bayes
        self.names: set[str] = set()  # of the runs of this start, finished before or now
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
        self.names.add(job.name)
        if kept := self.results.get(job.name):
            with self.lock:
                self.total -= 1
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

        evaluations, (name, log) = self.evaluations(job), (job.name, self.log(job))
        with self.lock:
            self.done += 1
            if status not in (0, "stopped early") or not evaluations:
                reason = f"no {self.sweep['metric']['name']} in its metrics"
                reason = last_line(log) if status else reason
                self.failed.append((job, reason))
                print(f"{self.count()}  {name}: failed: {reason} ({log})", flush=True)
                return None
            minutes = (time.monotonic() - begin) / 60
            result = {"name": name, "row": job.row, "config": job.config, "seed": job.seed}
            result |= {"value": evaluations[-1], "evaluations": evaluations, "minutes": minutes}
            result |= {"state": status or "finished", "command": job.command}
            append(self.out / "results.jsonl", [to_json(result)])
            self.results[name] = result
            state = "" if status == 0 else ", stopped early"
            told = f"{self.sweep['metric']['name']} {result['value']:.3f}{state}"
            print(f"{self.count()}  {name}: {told} ({minutes:.1f} min)", flush=True)
        return result

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
            process = subprocess.Popen(
                [*job.words, *place],
                cwd=ROOT,
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                preexec_fn=begin,
                start_new_session=True,  # Ctrl-C is this process's to pass on
            )
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

    def evaluations(self, job: Job) -> list[float]:
        """The values of the metric that the run has logged."""
        name = self.sweep["metric"]["name"]
        rows = rows_of(self.out / "runs" / job.name / "metrics.jsonl")
        return [row[name] for row in rows if row.get(name) is not None]

    def count(self) -> str:
        left = max(0, self.total - self.done)
        seconds = (time.monotonic() - self.started) / max(1, self.done) * left
        return f"{self.done:3} of {self.total}, {seconds / 60:.0f} min left"

    def stop(self, *_) -> None:
        """Stop all runs, which keep what they have; a second start goes on with them."""
        self.stopping = True
        for process in list(self.processes):
            process.terminate()


def read_lines(path: Path) -> list[dict]:
    """The entries of a .jsonl; a line that a kill tore is none."""
    entries = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            entries.append(json.loads(line))
        except ValueError:
            break
    return entries


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
        direction=sweep["metric"].get("goal", "minimize"),
        sampler=optuna.samplers.TPESampler(seed=seed, constant_liar=True),
        pruner=pruner,
    )
    asked, rows = runner.asked, args.trials or sweep.get("run_cap", TRIALS)
    runner.total = rows * len(args.seeds)

    def propose(number: int):
        """(trial, row): one that was begun before, or a new one."""
        with runner.lock:
            if number < len(asked):
                study.enqueue_trial(asked[number])
            trial = study.ask()
            config = {name: suggest(trial, name, p) for name, p in parameters.items()}
            if number >= len(asked):
                append(runner.out / "results.jsonl", [to_json({"asked": config})])
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


def suggest(trial, name: str, parameter: dict):
    """A value that optuna proposes."""
    kind = kind_of(parameter)
    if kind == "constant":
        return parameter["value"]
    if kind == "categorical":
        return trial.suggest_categorical(name, parameter["values"])
    low, high = parameter["min"], parameter["max"]
    if kind == "int_uniform":
        return trial.suggest_int(name, low, high)
    return trial.suggest_float(name, low, high, log=kind == "log_uniform_values")


# ------------ table and picture ------------


def half_width(values: list[float]) -> float | None:
    """Half of the 95 % interval of a mean, by Student's t; None of one value."""
    if len(values) < 2:
        return None
    return student(len(values) - 1) * statistics.stdev(values) / len(values) ** 0.5


def student(free: float) -> float:
    """The 97.5 % quantile of Student's t; up to 10 degrees of freedom a fraction does not count."""
    if free < len(T) + 1:
        return T[int(free) - 1]
    z = 1.95996
    return z + (z**3 + z) / (4 * free) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * free**2)


def summary(results: list[dict], goal: str) -> list[dict]:
    """The rows, best first: {config, values, mean, half, command, early}; those that were stopped
    early come last."""
    by_row: dict[int, list[dict]] = {}
    for result in results:
        by_row.setdefault(result["row"], []).append(result)
    rows = []
    for row in by_row.values():
        values = [result["value"] for result in row]
        early = any(result["state"] == "stopped early" for result in row)
        rows.append({"config": row[0]["config"], "values": values, "early": early})
        rows[-1] |= {"mean": statistics.mean(values), "half": half_width(values)}
        rows[-1] |= {"command": row[0]["command"]}
    sign = -1 if goal == "maximize" else 1
    return sorted(rows, key=lambda row: (row["early"], sign * row["mean"]))


def table(sweep: dict, rows: list[dict], title: str) -> str:
    """Markdown: a line per row."""
    names = varied_in(sweep)
    head = [*names, sweep["metric"]["name"], "95 % interval", "seeds", "command"]
    lines = [f"# {title}", "", f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for row in rows:
        cells = [shown(row["config"][name]) for name in names]
        between = "–"
        if row["half"] is not None:
            between = f"{row['mean'] - row['half']:.3f} to {row['mean'] + row['half']:.3f}"
        seeds = f"{len(row['values'])}{', stopped early' * row['early']}"
        cells += [f"{row['mean']:.3f}", between, seeds, f"`{row['command']}`"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def shown(value) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def picture(sweep: dict, rows: list[dict], title: str, path: Path) -> None:
    """Each parameter against the result: a point per row with its interval, and per seed a dot."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = varied_in(sweep)
    size = (4.2 * len(names) + 0.6, 3.6)
    figure, axes = plt.subplots(1, len(names), figsize=size, sharey=True, squeeze=False)
    for axis, name in zip(axes[0], names):
        values = [row["config"][name] for row in rows]
        places = values
        if any(type(value) not in (int, float) for value in values):
            known = sweep["parameters"][name].get("values", values)  # in the file's order
            labels = list(dict.fromkeys(map(str, known)))
            places = [labels.index(str(value)) for value in values]
            axis.set_xticks(range(len(labels)), labels)
            axis.set_xlim(-0.5, len(labels) - 0.5)
        elif 0 <= min(values) and max(values) > 20 * min(filter(None, values)):  # 0 is linear
            axis.set_xscale("symlog", linthresh=min(filter(None, values)), linscale=0.5)
            axis.set_xlim(left=0 if min(values) == 0 else min(values) / 1.5)
        for place, row in zip(places, rows):
            style = dict(color="0.6" if row["early"] else "#1f5f9e")
            axis.plot([place] * len(row["values"]), row["values"], ".", alpha=0.5, **style)
            mark = "x" if row["early"] else "o"
            axis.errorbar(place, row["mean"], row["half"], marker=mark, capsize=3, **style)
        axis.set_xlabel(name)
        axis.grid(axis="y", alpha=0.3)
    axes[0, 0].set_ylabel(sweep["metric"]["name"])
    figure.suptitle(title, fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def write_results(runner: Runner, file: Path) -> list[dict]:
    """Write table.md and table.png of what is finished, and return the rows."""
    sweep = runner.sweep
    results = [result for name, result in runner.results.items() if name in runner.names]
    rows = summary(results, sweep["metric"].get("goal", "minimize"))
    if rows:
        seeds = sorted({result["seed"] for result in results})
        title = f"{file.stem}: {sweep['program']}, {sweep['method']}"
        title += f", seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}"
        replace_file(runner.out / "table.md", table(sweep, rows, title))
        picture(sweep, rows, title, runner.out / "table.png")
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
    parser.add_argument("--trials", type=int, help="Rows of random and bayes (file: run_cap).")
    parser.add_argument("--draw-seed", type=int, default=0, help="Seed of what rows are drawn.")
    parser.add_argument("--out", type=Path, help="Directory (default: runs/sweeps/NAME).")
    args = parser.parse_args(words)
    args.more = more
    cores = len(os.sched_getaffinity(0))
    if not 1 <= args.jobs <= cores:
        sys.exit(f"--jobs {args.jobs}: from 1 to {cores}, the cores that there are")
    if len({*args.seeds}) < len(args.seeds):
        sys.exit(f"--seeds {' '.join(map(str, args.seeds))}: each only once")
    if args.trials is not None and args.trials < 1:
        sys.exit(f"--trials {args.trials}: has to be at least 1")
    return args


def main() -> None:
    args = read_arguments()
    sweep = read_sweep(args.file)
    out = (args.out or Path("runs", "sweeps", args.file.stem)).resolve()
    (out / "runs").mkdir(parents=True, exist_ok=True)
    runner = Runner(sweep, out, args.jobs)
    signal.signal(signal.SIGTERM, runner.stop)
    signal.signal(signal.SIGINT, runner.stop)

    if sweep["method"] == "bayes":
        run_bayes(runner, args)
    else:
        run_rows(runner, rows_of_sweep(sweep, args), args)

    rows = write_results(runner, args.file)
    if rows:
        print(f"{out / 'table.md'}, {out / 'table.png'}; best: {rows[0]['command']}")
    if runner.stopping:
        sys.exit(f"stopped; the same command goes on: {shlex.join(['python', *sys.argv])}")
    if runner.failed:
        names = [f"  {job.name}: {reason} ({runner.log(job)})" for job, reason in runner.failed]
        sys.exit("\n".join([f"{len(names)} of {runner.total} runs failed:", *names]))


if __name__ == "__main__":
    main()
