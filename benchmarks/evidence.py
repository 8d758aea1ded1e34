"""Every algorithm on every world, over seeds: the runs, and what docs/results/ says of them.

    python benchmarks/evidence.py --plan                    what is to be run, and the machine time
    python benchmarks/evidence.py sokoban webshop --jobs 2  what is left of the runs of two studies
    python benchmarks/evidence.py --table                   pages, tables and pictures of the rows

A study is a list of commands, each run with every seed; the dictionary STUDIES below has them. A
run has one core, and `--jobs` run at the same time, by the runner of sweeps/run.py: killed and
started again, it repeats no finished run and continues the others from their last checkpoints. A
run that fails is named at the end, and the exit status is 1. Two of these commands can run at the
same time if each has an --out of its own.

A finished run is a row of benchmarks/results/evidence.jsonl: its command, seed, flags, commit, its
evaluations, and the score of each task of the panel before and after training. A study whose flags
the scripts no longer have names the commit that has them; its rows stay, and it is not run.

--table generates everything else from these rows and from those of benchmarks/credit.py: the text
between marks on the pages of docs/results/, and under benchmarks/results/ the plan, all tables of
each study and its picture. A score is the success of the last evaluation, in SOTOPIA its goal score
(0 to 10).
"""

import argparse
import hashlib
import json
import math
import os
import re
import shlex
import signal
import statistics
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import credit
from benchmarks.intervals import (
    area,
    interquartile_mean,
    interval,
    new_run,
    probability_of_improvement,
)
from runtime.flags import NAME as LONGEST
from runtime.saving.files import append, replace_file, rows_of, to_json
from sweeps.file import Job
from sweeps.results import half_width
from sweeps.run import Runner

ROWS = ROOT / "benchmarks" / "results" / "evidence.jsonl"
PAGES = ROOT / "docs" / "results"
STORED = "../../benchmarks/results"  # as the pages link it
SECTION = re.compile(r"(<!-- evidence: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
# Stored with an evaluation: the mean over the iterations since the one before.
LOGGED = {
    "prm/pair_accuracy": "new pairs ranked right",
    "prm/credit_share": "credit share of A^E",
    "critic/explained_variance": "variance that the critic explains",
}
# Tables that benchmarks/credit.py makes, and how the titles of those columns begin that the pages
# show. The runs on ALFWorld were started by hand, as the page says.
CREDIT = "alpha-beta rates tuning ablation trials normalisation average new-seeds "
CREDIT += "head-rates head-webshop head-sokoban smollm2-average"
COLUMNS = "row", "seeds", "success at 60", "more than", "A^S", "new pairs ranked right", "seconds"
SMOLLM2_COLUMNS = "success at", "area", "more", "at equal time", "A with", "credit"
CREDIT_TABLES = dict.fromkeys([f"credit-{name}" for name in CREDIT.split()], COLUMNS) | {
    "credit": COLUMNS + ("share of truth's gain",),
    "credit-page": COLUMNS + ("a new seed", "at equal time"),
    "credit-minutes": COLUMNS + ("success at", "at equal time"),
    "credit-progress": COLUMNS + ("success at", "share of truth's gain"),
    "credit-smollm2": COLUMNS + SMOLLM2_COLUMNS,
    "credit-smollm2-slow": COLUMNS + SMOLLM2_COLUMNS,
    "alfworld": ("row", "seeds", *(f"success at {i}" for i in (0, 30, 60, 100, 120)))
    + ("more than", "at equal time", "area", "more area", "seconds"),
    "alfworld-one-seed": ("row", "success at", "seconds"),
    "alfworld-validation": ("row", "success at"),
    "credit-smollm2-rates": (
        "row",
        "success at",
        "area",
        "A with",
        "A^S",
        "new pairs ranked right",
        "credit",
    ),
}
TRUE_CREDIT = ["run", "tasks", "pairs ranked right", "by centred rewards", "A^E", "A^S"]
TRUE_CREDIT += ["A^S centred", "A = A^E + alpha A^S", "A less A^E", "alpha", "best alpha"]
OF_A_RUN = ("seed", "resume", "run_name", "runs_dir", "override", "track", "quiet")  # not stored


# ------------ what is run ------------


class Study(NamedTuple):
    """Commands (a script and its flags), each of them run with every seed; the pages compare each
    with the first."""

    commands: list[str]
    seeds: tuple[int, ...] = (1, 2, 3, 4, 5)
    level: float | None = None  # a score, for the cost of reaching it
    commit: str = ""  # whose scripts have its flags; empty: today's have


def over(flag: str, *values) -> list[str]:
    return [f" --{flag} {value}" for value in values]


def every(algorithms: str, world: str, flags: str = "") -> list[str]:
    """The commands of these algorithms on a world."""
    return [f"{algorithm}_{world}.py{flags}" for algorithm in algorithms.split()]


def on_validation(commands: list[str]) -> Study:
    """A run of each with seed 1, judged on the validation tasks."""
    return Study([f"{command} --eval-set validation" for command in commands], (1,))


def tuning(world: str, rate: float, algorithms: str, iterations: int = 15) -> Study:
    """The budget of every algorithm on a world: TRIES short runs with one seed, judged on the
    validation tasks. An algorithm with coefficients of its own has three rates and three
    values of these; one without has six rates."""
    commands = []
    for algorithm in algorithms.split():
        own = COEFFICIENTS.get(algorithm, [])
        factors = (0.5, 1, 2) if own else (0.25, 0.5, 1, 2, 4, 8)
        tried = over("learning-rate", *(f"{factor * rate:g}" for factor in factors)) + own
        assert len(tried) == TRIES
        script = f"{algorithm}_{world}.py"
        commands += [f"{script}{flag} --iterations {iterations} --eval-every 5" for flag in tried]
    return on_validation(commands)


def published(world: str, flags: str, rate: str, twice: str) -> str:
    """iStar as published at another rate; its PRM has twice the policy's, as there."""
    rates = f"--learning-rate {rate} --prm-learning-rate {twice}"
    return f"istar_paper_{world}.py{flags} {rates}"


def rates_published() -> Study:
    """Rates of iStar as published on the validation tasks; at 1e-3 it collapses on Sokoban."""
    tried = [("3e-5", "6e-5"), ("1e-4", "2e-4"), ("3e-4", "6e-4")]
    worlds = {"sokoban": MIDDLE_20, "webshop": SHORT_20, "sotopia": MIDDLE_20}
    commands = [published(*world, *rates) for world in worlds.items() for rates in tried]
    commands.append(published("sotopia", MIDDLE_20, "1e-3", "2e-3"))
    tried = [("1e-5", "2e-5"), ("3e-5", "6e-5"), ("1e-4", "2e-4")]
    commands += [published("visual_sokoban", PICTURES_15, *rates) for rates in tried]
    return on_validation(commands)


def rates_sokoban() -> Study:
    """Every algorithm's rates on Sokoban's validation tasks, iStar with alpha 0.1 and 1."""
    tried = over("learning-rate", "2.5e-4", "5e-4", "1e-3")
    algorithms = PAGES_SOKOBAN.replace("istar_paper ", "")  # its rates: rates_published
    commands = [x + rate for x in every(algorithms, "sokoban", MIDDLE_20) for rate in tried]
    commands += [f"istar_sokoban.py{MIDDLE_20}{ALPHA_1}{rate}" for rate in tried[:2]]
    commands += every("istar", "sokoban", f"{MIDDLE_20} --learning-rate 1.25e-4")
    return on_validation(commands)


def rates_visual() -> Study:
    """Three rates of RLOO, GRPO and iStar on VisualSokoban, where the scripts have 5e-4."""
    tried = over("learning-rate", "2.5e-4", "5e-4", "1e-3")
    algorithms = every("rloo grpo istar", "visual_sokoban", PICTURES_15)
    return on_validation([algorithm + rate for algorithm in algorithms for rate in tried])


def rates_smollm2() -> Study:
    """Three rates of each algorithm on Sokoban with SmolLM2, six iterations."""
    flags, commands = f"{ON_CORE} --iterations 6 --eval-every 3", []
    for rate, twice in (("1e-5", "2e-5"), ("3e-5", "6e-5"), ("1e-4", "2e-4")):
        own = f" --learning-rate {rate}"
        commands += every("rloo grpo graphgpo", "sokoban", flags + own)
        commands += every("istar", "sokoban", flags + PRM_3E_4 + own)
        commands.append(published("sokoban", flags, rate, twice))
    return on_validation(commands)


TRIED = "rates-", "tuning-"  # studies of one seed on the validation tasks
TRIES = 6
COEFFICIENTS = {
    "gigpo": over("step-weight", 0.3, 3) + over("step-gamma", 0.8),
    "graphgpo": over("step-weight", 0.3, 3) + over("distance-discount", 0.5),
    "prime": over("prm-learning-rate", 3e-4, 3e-3) + over("beta", 0.5),
    "ppo": over("critic-learning-rate", 3e-4, 3e-3) + over("gae-lambda", 1),
    "dpo": over("beta", 0.01, 0.2, 1),
    "istar": over("prm-learning-rate", 3e-4) + over("alpha", 0.3, 3),
}
# Of the present scripts; --eval-every keeps their rows apart from those of the studies before.
PAGES_WEBSHOP = "rloo istar istar_paper graphgpo grpo gagpo g2po gigpo reinforce_pp prime ppo dpo"
PAGES_SOTOPIA = "rloo istar istar_paper grpo reinforce_pp"
PAGES_VISUAL = "rloo istar istar_paper gigpo grpo gagpo g2po reinforce_pp"
PAGES_SOKOBAN = "rloo gagpo g2po istar istar_paper graphgpo gigpo grpo reinforce_pp"
ON_SOKOBAN = "rloo grpo reinforce_pp gigpo graphgpo istar"
ON_WEBSHOP = "rloo grpo reinforce_pp gigpo graphgpo prime ppo dpo istar"
ON_SOTOPIA = "rloo grpo reinforce_pp istar"
ON_VISUAL = "rloo grpo reinforce_pp gigpo istar"
SHORT, MIDDLE, LONG = over("iterations", 20, 40, 300)  # ten bring most of it on WebShop
SHORT_20, MIDDLE_20 = f"{SHORT} --eval-every 20", f"{MIDDLE} --eval-every 20"
PICTURES_15 = " --iterations 30 --eval-every 15"
WITHOUT = " --alpha 0 --beta 0"  # a PRM: the same page, estimator, ratio and rate
NO_PRM = " --alpha 0 --prm-steps 0"  # the same in today's scripts
ALPHA_1, TWO = " --alpha 1", " --prm-steps 2"  # the paper's; the default before it was 8
ALPHAS, BETAS = ["", *over("alpha", 0.1, 0.3, 3)], ["", *over("beta", 0.05, 0.3, 3)]
GRID = [WITHOUT] + [alpha + beta for alpha in ALPHAS for beta in BETAS]  # both are 1 by default
BY_STEP, BY_TOKEN = (["", *over("ratio", "step-mean", other)] for other in ("step", "token"))
RATIOS = [command + ratio for command in every("rloo grpo", "webshop", SHORT) for ratio in BY_STEP]
RATIOS += [f"istar_webshop.py{SHORT}{ratio}" for ratio in BY_TOKEN]
ON_PICTURES = every(ON_VISUAL, "visual_sokoban", " --iterations 30")
ON_PICTURES += [ON_PICTURES[-1] + TWO]
SMOLLM2 = " --model runs/smollm2-sokoban"  # docs/results/pretrained-sokoban.md: its command
PRETRAINED = f"{SMOLLM2} --dtype bfloat16 --max-steps 7 --tasks-per-iteration 8 --iterations 20"
PRETRAINED += " --eval-every 5 --micro-batch-tokens 2048 --learning-rate 3e-5"
# On one H200, side by side: 13 to 15 GiB of the card each. Of a clone of its own.
ON_CARD = f"{SMOLLM2}-2 --dtype bfloat16 --engine hf --max-steps 7 --tasks-per-iteration 8"
ON_CARD += " --iterations 20 --eval-every 10 --save-every 20 --micro-batch-tokens 16384"
ON_CARD += " --learning-rate 3e-5"
# With vLLM, one core a run. Of a clone of its own, too.
ON_CORE = f"{SMOLLM2}-3 --dtype bfloat16 --max-steps 7 --tasks-per-iteration 4 --eval-samples 1"
ON_CORE += " --micro-batch-tokens 4096"
TWELVE = f"{ON_CORE} --iterations 12 --eval-every 6"
PRM_3E_4 = f"{ALPHA_1} --prm-learning-rate 3e-4"
STUDIES = {
    "tuning-sokoban": tuning("sokoban", 1e-3, ON_SOKOBAN),
    "tuning-webshop": tuning("webshop", 5e-4, ON_WEBSHOP, 10),
    "tuning-sotopia": tuning("sotopia", 1e-3, ON_SOTOPIA),
    "rates-published": rates_published(),
    "rates-sokoban": rates_sokoban(),
    "rates-visual-sokoban": rates_visual(),
    "rates-smollm2": rates_smollm2(),
    "page-sokoban": Study(
        every(PAGES_SOKOBAN, "sokoban", MIDDLE_20) + every("istar", "sokoban", MIDDLE_20 + NO_PRM)
    ),
    "page-sokoban-rates": Study(  # the defaults before rates-sokoban
        every("rloo istar", "sokoban", MIDDLE_20)
        + every("rloo gagpo g2po istar gigpo", "sokoban", f"{MIDDLE_20} --learning-rate 1e-3")
        + every("reinforce_pp", "sokoban", f"{MIDDLE_20} --learning-rate 5e-4")
        + every("istar", "sokoban", f"{MIDDLE_20} --prm-average 0 --learning-rate 1e-3")
        + every("istar", "sokoban", f"{MIDDLE_20}{NO_PRM} --learning-rate 1e-3")
        + [published("sokoban", MIDDLE_20, "1e-3", "2e-3")]
    ),
    "page-webshop": Study(
        every(PAGES_WEBSHOP, "webshop", SHORT_20) + every("istar", "webshop", SHORT_20 + NO_PRM),
        (1, 2, 3),
    ),
    "page-webshop-published": Study(
        every("rloo istar istar_paper", "webshop", SHORT_20)
        + [published("webshop", SHORT_20, "5e-4", "1e-3")],
        (1, 2, 3),
    ),
    "page-sotopia": Study(
        every(PAGES_SOTOPIA, "sotopia", MIDDLE_20)
        + every("istar", "sotopia", MIDDLE_20 + NO_PRM)
        + [published("sotopia", MIDDLE_20, "1e-3", "2e-3")]
    ),
    "page-visual-sokoban": Study(
        every(PAGES_VISUAL, "visual_sokoban", PICTURES_15)
        + every("istar", "visual_sokoban", PICTURES_15 + NO_PRM)
        + [published("visual_sokoban", PICTURES_15, "5e-4", "1e-3")],
        (1, 2, 3),
    ),
    "sokoban": Study(every(ON_SOKOBAN, "sokoban", MIDDLE), level=0.5),
    "webshop": Study(every(ON_WEBSHOP, "webshop", SHORT), level=0.55),
    "sotopia": Study(every(ON_SOTOPIA, "sotopia", MIDDLE), level=3.5),
    "visual-sokoban": Study(ON_PICTURES, (1, 2, 3), level=0.45),
    "page-smollm2-sokoban": Study(
        [
            f"rloo_sokoban.py{ON_CARD}",
            f"istar_sokoban.py{ON_CARD}{PRM_3E_4}",
            f"graphgpo_sokoban.py{ON_CARD}",
        ],
        (1, 2, 3),
    ),
    "page-smollm2-tuned": Study(  # each at the rate of rates-smollm2 with the largest area
        every("rloo graphgpo", "sokoban", f"{TWELVE} --learning-rate 1e-5")
        + every("istar", "sokoban", f"{TWELVE}{PRM_3E_4} --learning-rate 1e-5")
        + every("grpo", "sokoban", f"{TWELVE} --learning-rate 3e-5")
        + [published("sokoban", TWELVE, "1e-5", "2e-5")],
        (1, 2, 3),
    ),
    "smollm2-sokoban": Study(
        [
            f"rloo_sokoban.py{PRETRAINED}",
            f"istar_sokoban.py{PRETRAINED} --prm-learning-rate 3e-5{TWO}",
        ],
        (1,),  # 11 and 18 GiB: not beside each other on a machine of 24
    ),
    "long-sokoban": Study(
        [*every("rloo istar", "sokoban", LONG), f"istar_sokoban.py{LONG}{ALPHA_1}"],
        (1, 2, 3),
        level=0.6,
    ),
    "long-webshop": Study(every("rloo istar", "webshop", LONG), (1, 2, 3), level=0.7),
    "prm-sokoban": Study(
        [f"istar_sokoban.py{MIDDLE}{x}" for x in (WITHOUT, "", ALPHA_1, TWO, ALPHA_1 + TWO)]
    ),
    "prm-webshop": Study([f"istar_webshop.py{SHORT}{x}" for x in (WITHOUT, "", TWO)]),
    "prm-sotopia": Study(
        [f"istar_sotopia.py{MIDDLE}{x}" for x in (WITHOUT, "", " --pair-margin 0.1")]
    ),
    "alpha-beta-webshop": Study([f"istar_webshop.py{SHORT}{x}" for x in GRID], (1, 2, 3)),
    "ratios-webshop": Study(RATIOS, commit="e16dea9"),
}
# The studies that have every algorithm of a world, and the world's name.
WORLDS = {
    "sokoban": "Sokoban",
    "visual-sokoban": "VisualSokoban",
    "webshop": "WebShop",
    "sotopia": "SOTOPIA's stand-in (goal, 0 to 10)",
}
# Passes over all tokens of an iteration, (without, with) a gradient; those of every algorithm: one
# that samples, one for log pi_old, one of the update. Sequences that are left out are counted too.
PASSES = {"istar": (4, 2), "prime": (4, 2), "ppo": (3, 2), "dpo": (3, 1)}


def world_and_algorithm(command: str) -> tuple[str, str]:
    """("sokoban", "rloo") of "rloo_sokoban.py --clip 0.1"."""
    script = Path(command.split(".py")[0]).name
    world = next(
        world for world in ("visual_sokoban", "alfworld", *WORLDS) if script.endswith(world)
    )
    return world, script.removesuffix(f"_{world}")


def job_of(command: str, seed: int) -> Job:
    name = re.sub(r"[^\w.+]+", "-", f"{command} seed {seed}".replace(".py", ""))
    if len(name) > LONGEST:
        digest = hashlib.sha256(name.encode()).hexdigest()[:8]
        name = f"{name[: LONGEST - 9]}-{digest}"
    return Job(0, {}, seed, name, [sys.executable, *shlex.split(command)])


def job_command(job: Job) -> str:
    """The command as the studies and docs have it, without python and the seed."""
    return shlex.join(job.words[1:])


def jobs_of(studies: list[str]) -> dict[str, Job]:
    """{name: job}: seed by seed, so that every command is known early; what two studies share is
    run once."""
    jobs = {}
    for study in studies:
        for seed in STUDIES[study].seeds:
            for command in STUDIES[study].commands:
                job = job_of(command, seed)
                jobs[job.name] = job
    return jobs


# ------------ running ------------


def run(studies: list[str], jobs: int, out: Path, stored: Path, only: str = "") -> None:
    """Run the commands that begin with `only` and have no row yet, and store a row of each run
    that ends. Exits with those that failed."""
    done = {row["name"] for row in stored_rows(stored)}
    (out / "runs").mkdir(parents=True, exist_ok=True)
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:jobs])  # a core for each run
    runner = Runner({"metric": {"name": "eval/score"}}, out, jobs)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, runner.stop)
    chosen = [job for job in jobs_of(studies).values() if job_command(job).startswith(only)]
    left = [job for job in chosen if job.name not in done]
    runner.total = len(left)

    def one(job: Job) -> None:
        if result := runner.run(job):
            row = row_of(job, out / "runs" / job.name, result["minutes"])
            with runner.lock:
                append(stored, [to_json(row)])

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(one, left))
    os.close(runner.locked)
    if runner.stopping:
        sys.exit(f"stopped; the same command goes on: {shlex.join(['python', *sys.argv])}")
    if runner.failed:
        names = [f"  {job.name}: {reason} ({runner.log(job)})" for job, reason in runner.failed]
        sys.exit("\n".join([f"{len(names)} of {len(left)} runs failed:", *names]))


def stored_rows(path: Path) -> list[dict]:
    """The rows of finished runs. A last line that a kill tore is taken away: its run is stored
    again. Exits where another line is damaged, or a command's rows were made with other flags."""
    whole, rows = path.read_text().splitlines() if path.exists() else [], []
    for number, line in enumerate(whole, 1):
        try:
            rows.append(json.loads(line))
        except ValueError:
            if number < len(whole):
                sys.exit(f"{path}:{number}: no JSON; take the line away, and its run is made again")
            replace_file(path, "".join(f"{kept}\n" for kept in whole[:-1]))
            print(f"{path}:{number}: a torn line is taken away; its run is made again")
    names = [row["name"] for row in rows]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        sys.exit(f"{path}: {twice[0]} is stored twice; take one of its lines away")

    flags: dict[str, dict] = {}
    for row in rows:
        own, first = row["flags"], flags.setdefault(row["command"], row["flags"])
        if differ := sorted(key for key in own.keys() | first if own.get(key) != first.get(key)):
            made = f"rows of `{row['command']}` were made with other defaults"
            way = "take the old ones away, and give another --out than theirs"
            sys.exit(f"{path}: {made} ({', '.join(differ)}); {way}")
    return rows


def row_of(job: Job, path: Path, minutes: float) -> dict:
    """What is stored of a finished run; minutes: how long its process took, with evaluations."""
    given = json.loads((path / "args.json").read_text())
    flags = {name: value for name, value in given.items() if name not in OF_A_RUN}
    starts = json.loads((path / "run.json").read_text())["starts"]
    start, memory = starts[-1], [each.get("peak_memory_gib", 0.0) for each in starts]
    rows = rows_of(path / "metrics.jsonl")
    goal = "eval/goal" in rows[0]
    evaluations, tokens, sampled, since = [], 0, 0, []
    for row in rows:
        tokens += row.get("tokens/trained", 0)
        sampled += row.get("tokens/rollout", 0)
        since.append(row)
        if "eval/score" in row:
            score = row["eval/goal" if goal else "eval/success"]
            told = {"iteration": row["iteration"], "score": score, "tokens": tokens}
            trained = round(row["time/elapsed"] / 60, 2)
            told |= {"sampled": sampled, "minutes": trained}
            for key in LOGGED if flags.get("beta", 1) else ():  # 0: there is no PRM
                if values := [row[key] for row in since if row.get(key) is not None]:
                    told[key] = round(statistics.mean(values), 4)
            evaluations.append(told)
            since = []

    minutes = max(minutes, trained)  # a run that was taken up had other processes before
    last = evaluations[-1]["iteration"]
    panel = panel_scores(path / "eval_episodes.jsonl", goal, (0, last))
    row = {"name": job.name, "command": job_command(job), "seed": job.seed}
    row |= {"commit": start["commit"], "flags": flags, "parameters": parameters_of(path / "policy")}
    row |= {"minutes": round(minutes, 2), "memory_gib": max(memory), "evaluations": evaluations}
    row["valid"] = round(min(r["train/valid_actions"] for r in rows if r["iteration"]), 4)
    return row | {"before": panel[0], "after": panel[last]}


def panel_scores(path: Path, goal: bool, iterations: tuple) -> dict[int, dict[str, float]]:
    """{iteration: {task: mean over its samples}}, of success, or of the goal score."""
    seen: dict[int, dict[str, list]] = {iteration: {} for iteration in iterations}
    for episode in rows_of(path):
        if episode["iteration"] in seen:
            score = 10 * episode["score"] if goal else float(episode["success"])
            seen[episode["iteration"]].setdefault(str(episode["task"]), []).append(score)
    return {
        iteration: {task: round(statistics.mean(scores), 4) for task, scores in tasks.items()}
        for iteration, tasks in seen.items()
    }


def parameters_of(path: Path) -> int:
    """How many weights a saved model has."""
    from safetensors import safe_open

    number = 0
    for file in path.glob("*.safetensors"):
        with safe_open(file, "np") as tensors:
            names = [*tensors.keys()]
            number += sum(math.prod(tensors.get_slice(name).get_shape()) for name in names)
    return number


# ------------ what the rows say ------------


class Runs(NamedTuple):
    """The stored runs of one command, by seed; label: the command without the flags that all
    commands of its study have."""

    command: str
    rows: list[dict]
    label: str

    def panel(self, when: str) -> list[list[float]]:
        """Scores [S, T] "before" or "after", of the tasks that all runs have at both times."""
        tasks = set.intersection(
            *({*row[time]} for row in self.rows for time in ("before", "after"))
        )
        return [[row[when][task] for task in sorted(tasks)] for row in self.rows]

    def scores(self) -> list[float]:
        """The last evaluation of each run, [S]."""
        return [row["evaluations"][-1]["score"] for row in self.rows]

    def new_run(self) -> str:
        """Where a run with another seed ends. A success rate varies at least as sampling alone
        makes it vary: a task's mean m of two samples has the variance m(1 - m) without a bias (of
        one sample the variance is not known, nor is the range)."""
        if "sotopia" in self.command:
            return new_run(self.scores(), most=10.0)
        if self.rows[0]["flags"].get("eval_samples") == 1:
            return ""
        ends = self.panel("after")
        noise = statistics.mean(sum(m * (1 - m) for m in run) / len(run) ** 2 for run in ends)
        return new_run(self.scores(), math.sqrt(noise))

    def logged(self, key: str) -> list[list[float]]:
        """What each run's evaluations have of a key of LOGGED, [S] of as many as have it."""
        return [[e[key] for e in row["evaluations"] if key in e] for row in self.rows]

    def later(self, key: str) -> list[float]:
        """The mean of what each run logged behind its first evaluation in training, or up to it
        where that was the last; [] where a run logged none."""
        curves = [curve[1:] or curve for curve in self.logged(key)]
        return [*map(statistics.mean, curves)] if all(curves) else []

    def areas(self) -> list[float]:
        """The mean height of each run's curve over its iterations, [S]."""
        found = [row["evaluations"] for row in self.rows]
        curves = [[(e["iteration"], e["score"]) for e in each] for each in found]
        return [area(curve) for curve in curves]

    def gains(self) -> list[list[float]]:
        """After less before, [S, T]."""
        pairs = zip(self.panel("after"), self.panel("before"))
        return [[after - before for after, before in zip(*pair)] for pair in pairs]

    def less(self, other: "Runs") -> tuple[float, float | None]:
        """(mean, half of its interval) of the last scores less another's, seed by seed and task by
        task; (nan, None) where they share no seed."""
        ours, theirs = ({row["seed"]: row["after"] for row in runs.rows} for runs in (self, other))
        gaps = []
        for seed in sorted(ours.keys() & theirs.keys()):
            tasks = sorted(ours[seed].keys() & theirs[seed].keys())
            gaps.append([ours[seed][task] - theirs[seed][task] for task in tasks])
        return estimate(gaps) if gaps else (math.nan, None)

    def seconds(self) -> float:
        """Of training an iteration, in the mean of the runs."""
        ends = [row["evaluations"][-1] for row in self.rows]
        return statistics.mean(60 * end["minutes"] / end["iteration"] for end in ends)


def cost(row: dict, evaluation: dict) -> dict[str, float]:
    """What a run had taken by an evaluation. FLOPs are estimated: 2 per weight and token of a pass
    without a gradient, 6 of one with (Kaplan et al., arXiv 2001.08361), attention not counted."""
    _, algorithm = world_and_algorithm(row["command"])
    without, trained = PASSES.get(algorithm, (2, 1))
    flags = row["flags"]
    group = flags["tasks_per_iteration"] * flags["group_size"]
    flops = (2 * without + 6 * trained) * row["parameters"] * evaluation["tokens"]
    return {
        "iterations": evaluation["iteration"],
        "episodes": evaluation["iteration"] * group,
        "million tokens": evaluation["tokens"] / 1e6,
        "TFLOP": flops / 1e12,
        "minutes": evaluation["minutes"],
    }


def runs_of(study: Study, rows: list[dict]) -> list[Runs]:
    """The runs of each of its commands that has any, in its order."""
    stored = {row["name"]: row for row in rows}
    found = []
    for command, label in zip(study.commands, labels(study.commands)):
        names = [job_of(command, seed).name for seed in study.seeds]
        if own := [stored[name] for name in names if name in stored]:
            found.append(Runs(command, own, label))
    return found


def labels(commands: list[str]) -> list[str]:
    """Each command without the flags that all of them have."""
    split = [command.split(" --") for command in commands]
    shared = set.intersection(*map(set, split)) if len(split) > 1 else set()
    own = [[words[0], *(flag for flag in words[1:] if flag not in shared)] for words in split]
    return [" --".join(words) for words in own]


# ------------ tables ------------


def table(titles: list[str], lines: list[list[str]]) -> str:
    lines = [titles, ["---"] * len(titles), *lines]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def between(mean: float, half: float | None) -> str:
    """A mean with its interval; of one run alone the mean."""
    span = "" if half is None else f" ({mean - half:.3f} to {mean + half:.3f})"
    return f"{mean:.3f}{span}"


def estimate(scores: list[list[float]]) -> tuple[float, float | None]:
    """The mean of scores [S, T] and half of its interval, which needs two seeds and two tasks."""
    if len(scores) > 1 and len(scores[0]) > 1:
        return interval(scores)
    return statistics.mean(map(statistics.mean, scores)), None


def over_tasks(scores: list[list[float]]) -> str:
    return between(*estimate(scores))


def short_table(found: list[Runs], rows: list[dict], today: bool) -> str:
    """What a page shows of a study: each command beside the first, and its seconds beside RLOO's;
    what PRM and critic knew, where a command has one. today: of scripts that can be run again, so
    it says where a new seed's run would end."""
    first, (world, _) = found[0], world_and_algorithm(found[0].command)
    others = [] if "rloo_" in first.label else runs_of(STUDIES[world.replace("_", "-")], rows)
    rloo = (others or found)[0]
    known = [key for key in LOGGED if any(runs.later(key) for runs in found)]
    lines = []
    for runs in found:
        cells = [f"`{runs.command}`", str(len(runs.rows)), over_tasks(runs.panel("before"))]
        cells.append(over_tasks(runs.panel("after")))
        cells += [runs.new_run()] * today
        cells.append("" if runs is first else between(*runs.less(first)))
        cells += [f"{runs.seconds():.1f}", f"{runs.seconds() / rloo.seconds():.2f}"]
        cells += [f"{statistics.mean(v):.3f}" if (v := runs.later(key)) else "" for key in known]
        lines.append(cells)
    titles = ["command", "seeds", "before", "after", *["a new seed"] * today]
    titles += [f"more than `{first.label}`", "seconds an iteration", "over RLOO's"]
    titles += [LOGGED[key] for key in known]
    return table(titles, lines)


def algorithms_table(rows: list[dict]) -> str:
    """By how much each algorithm ends above RLOO on each world, and its seconds over RLOO's."""
    found: dict[str, dict[str, str]] = {"`istar`": {}}
    for name in ("credit", "credit-page"):  # the second has today's iStar
        told = credit.table(measured(name), ("row", "more than", "seconds"))
        _, _, rloo, *lines = cells_of(told)
        for row, more, seconds in lines:
            row = row.replace("istar_paper --prm-learning-rate 3e-4", "istar_paper")  # as published
            if " " not in row:  # with the defaults
                ratio = float(seconds.split()[0]) / float(rloo[-1].split()[0])
                found.setdefault(row, {})["Crossings"] = f"{more}, {ratio:.1f} x"
    for study, title in WORLDS.items():
        first, *others = runs_of(STUDIES[f"page-{study}"], rows) or [None]
        for runs in others:
            if runs.command.split(" --")[1:] == first.command.split(" --")[1:]:
                told = f"{between(*runs.less(first))}, {runs.seconds() / first.seconds():.1f} x"
                name = f"`{world_and_algorithm(runs.command)[1]}`"
                found.setdefault(name, {})[title] = told
    worlds = ["Crossings", *WORLDS.values()]
    lines = [[name, *(own.get(w, "") for w in worlds)] for name, own in found.items()]
    return table(["difference from RLOO, and time", *worlds], lines)


def final_table(found: list[Runs]) -> str:
    """What each command reached. Older rows lack memory and the least share of valid answers in an
    iteration, which is shown from the lowest seed to the highest."""
    lines = []
    for runs in found:
        areas, minutes = runs.areas(), [row["evaluations"][-1]["minutes"] for row in runs.rows]
        cells = [f"`{runs.command}`", str(len(runs.rows)), over_tasks(runs.panel("before"))]
        cells += [f"{interquartile_mean(runs.scores()):.3f}", over_tasks(runs.panel("after"))]
        cells += [over_tasks(runs.gains()), between(statistics.mean(areas), half_width(areas))]
        memory = max(row.get("memory_gib") or math.inf for row in runs.rows)
        valid = sorted({f"{row.get('valid', math.nan):.2f}" for row in runs.rows})
        cells += [f"{statistics.mean(minutes):.1f}", f"{memory:.1f}".replace("inf", "")]
        lines.append([*cells, "" if "nan" in valid else " to ".join({valid[0]: 0, valid[-1]: 0})])
    titles = ["command", "seeds", "before", "after: IQM", "after: mean", "gain", "area", "minutes"]
    return table([*titles, "GiB", "least valid"], lines)


def tuning_table(found: list[Runs]) -> str:
    """The best of each script's runs by the mean height of its curve, beside that with today's
    default rate, and by how much it ended above that, over the tasks."""
    best, lines = {}, []
    for runs in best_first(found):
        best.setdefault(runs.command.split()[0], runs)
    for script, runs in best.items():
        source = (ROOT / script).read_text()
        rate = float(re.search(r"^    learning_rate: float = (\S+)", source, re.MULTILINE)[1])
        default = next((r for r in found if r.label == f"{script} --learning-rate {rate:g}"), None)
        cells = [f"`{script}`", f"`{runs.label.removeprefix(f'{script} ')}`"]
        cells += [f"{runs.areas()[0]:.3f}", f"`--learning-rate {rate:g}`"]
        if default:
            (ours,), (theirs,) = runs.panel("after"), default.panel("after")
            gaps = [a - b for a, b in zip(ours, theirs)]
            above = between(statistics.mean(gaps), half_width(gaps)) if any(gaps) else "–"
            cells += [f"{default.areas()[0]:.3f}", above]
        else:
            cells += ["not tried", ""]
        lines.append(cells)
    titles = ["script", "best of those tried", "area", "today's default", "area"]
    return table([*titles, "best - default, at the end"], lines)


def tried_table(found: list[Runs]) -> str:
    """All of each script's tuning runs."""
    ends = [(runs.label, runs.areas()[0], runs.scores()[0]) for runs in best_first(found)]
    tried = [[f"`{label}`", f"{area:.3f}", f"{end:.3f}"] for label, area, end in ends]
    return table(["tried", "area", "at the end"], tried)


def best_first(found: list[Runs]) -> list[Runs]:
    """Tuning runs, script by script, the largest area of each first."""
    scripts = [runs.command.split()[0] for runs in found]
    return sorted(found, key=lambda r: (scripts.index(r.command.split()[0]), -r.areas()[0]))


def cells_of(told: str) -> list[list[str]]:
    """The lines of a table."""
    return [[c.strip() for c in line.split("|")[1:-1]] for line in told.strip().split("\n")]


def grid(told: str, title: str, name: str = "") -> str:
    """A column of a table as one of its own, under another name: a line for each alpha, a column
    for each beta, both 1 by default. Rows that are not iStar's, or have no PRM, are left out."""
    titles, _, *lines = cells_of(told)
    cells = {}
    for line in lines:
        given = dict(re.findall(r"--(alpha|beta) ([\d.]+)", line[0]))
        alpha, beta = (float(given.get(name, 1)) for name in ("alpha", "beta"))
        if line[0].startswith("`istar") and alpha and beta:
            cells[alpha, beta] = line[titles.index(title)]
    alphas, betas = (sorted({*values}) for values in zip(*cells))
    rows = [[f"{a:g}", *(cells.get((a, b), "–") for b in betas)] for a in alphas]
    return table([f"{name or title}: alpha", *(f"beta {beta:g}" for beta in betas)], rows)


def cost_table(found: list[Runs], level: float) -> str:
    """What it took to reach the level, at the first evaluation there: the median of the runs that
    did."""
    names, lines = ("iterations", "episodes", "million tokens", "TFLOP", "minutes"), []
    for runs in found:
        above = [[e for e in row["evaluations"] if e["score"] >= level] for row in runs.rows]
        costs = [cost(row, at[0]) for row, at in zip(runs.rows, above) if at]
        cells = [f"`{runs.label}`", f"{len(costs)} of {len(runs.rows)}"]
        for name in names:
            values = [each[name] for each in costs]
            cells.append(f"{statistics.median(values):.4g}" if values else "–")
        lines.append(cells)
    return table(["command", f"runs that reach {level:g}", *names], lines)


def comparison_table(found: list[Runs]) -> str:
    """Every two commands: the probability that A is better, and by how much."""
    lines = []
    for one, other in combinations(found, 2):
        better = f"{probability_of_improvement(one.scores(), other.scores()):.2f}"
        lines.append([f"`{one.label}`", f"`{other.label}`", better, between(*one.less(other))])
    return table(["A", "B", "P(A better)", "A - B"], lines)


def logged_table(found: list[Runs]) -> str:
    """What PRM and critic knew, of the commands whose rows have it: the means over the iterations
    up to the first evaluation and over those behind it; "" where no command's have."""
    lines = []
    for runs in found:
        for key, title in LOGGED.items():
            if later := runs.later(key):
                cells = [f"`{runs.label}`", title]
                for values in ([curve[0] for curve in runs.logged(key)], later):
                    cells.append(between(statistics.mean(values), half_width(values)))
                lines.append([*cells, ", ".join(f"{value:.2f}" for value in later)])
    titles = ["command", "logged", "up to the first evaluation", "behind it", "behind it, by seed"]
    return table(titles, lines) if lines else ""


def older_table(rows: list[dict]) -> str:
    """Runs from before the studies, of which only evaluations are stored: means over the seeds."""
    commands: dict[str, dict[int, list[dict]]] = {}
    for row in rows:
        commands.setdefault(row["command"], {}).setdefault(row["seed"], []).append(row)
    lines = []
    for command, by_seed in commands.items():
        runs = [*by_seed.values()]
        key = "eval/goal" if "eval/goal" in runs[0][0] else "eval/success"
        cells = [f"`{command}`", str(len(runs)), str(runs[0][-1]["iteration"])]
        cells += [credit.shown([run[at][key] for run in runs]) for at in (0, -1)]
        for name in ("prm/pair_accuracy", "prm/advantage_progress_correlation"):
            of_runs = [[row[name] for row in run if row.get(name) is not None] for run in runs]
            cells.append(credit.shown([statistics.mean(values) for values in of_runs if values]))
        lines.append(cells)
    titles = ["command", "seeds", "iterations", "before", "after", "new pairs ranked right"]
    return table([*titles, "correlation of A^S with progress"], lines)


def true_credit_table(rows: list[dict]) -> str:
    """What benchmarks/true_credit.py measured: a line for each run, and one for the means of a
    command's runs, with intervals over the seeds."""
    commands, lines = {}, []
    for row in rows:
        commands.setdefault(row["command"], []).append(row)
    for command, runs in commands.items():
        of_runs = []
        for row in sorted(runs, key=lambda row: row["seed"]):
            credits = row["credits"]
            measured = [credits[n]["correlation"] for n in ("A^E", "A^S", "A^S centred", "A")]
            measured.append(credits["A"]["more"])
            right = [row["ranked_right"], row["ranked_right_centred"]]
            of_runs.append([*right, *(middle for middle, _, _ in measured)])
            cells = [f"`{command} --seed {row['seed']}`", f"{row['tasks']}"]
            cells += [f"{share:.3f}" for share in right]
            cells += [f"{value:.3f} ({low:.3f} to {high:.3f})" for value, low, high in measured]
            lines.append([*cells, f"{row['alpha']:.2f}", f"{row['best_weight']:g}"])
        if len(runs) > 1:
            means = [between(statistics.mean(each), half_width(each)) for each in zip(*of_runs)]
            lines.append([f"the mean of {len(runs)}", "", *means, "", ""])
    return table(TRUE_CREDIT, lines)


def plan_table(rows: list[dict]) -> str:
    """Each study: its runs, those that are stored, and the machine time."""
    stored, lines, total = {row["name"]: row for row in rows}, [], [0, 0, 0.0, 0.0]
    seen: set[str] = set()
    for name, study in STUDIES.items():
        jobs = {each: job for each, job in jobs_of([name]).items() if each not in seen}
        seen |= jobs.keys()
        done = [stored[each] for each in jobs if each in stored]
        taken = sum(row["minutes"] for row in done) / 60
        left = sum(expected(job, rows) for each, job in jobs.items() if each not in stored) / 60
        numbers = [len(jobs), len(done), taken, left]
        total = [a + b for a, b in zip(total, numbers)]
        commands = f"{len(study.commands)} x {len(study.seeds)}"
        lines.append([f"`{name}`", commands, *shown(numbers)])
    lines.append(["all", "", *shown(total)])
    titles = ["study", "commands x seeds", "runs", "stored", "core hours taken", "still expected"]
    return table(titles, lines)


def shown(numbers: list) -> list[str]:
    return [f"{n:.1f}" if isinstance(n, float) else str(n) for n in numbers]


def expected(job: Job, rows: list[dict]) -> float:
    """Minutes of a run that was not made yet, by its iterations, as those of its model and, where
    there are any, of its script took."""
    command = job_command(job)
    given = re.search(r"--iterations (\d+)", command)
    model = re.findall(r"--model \S+", command)
    alike = [row for row in rows if re.findall(r"--model \S+", row["command"]) == model] or rows
    alike = [row for row in alike if row["command"].split()[0] == command.split()[0]] or alike
    made = sum(row["evaluations"][-1]["iteration"] for row in alike)
    minutes = sum(row["minutes"] for row in alike)
    return minutes / max(1, made) * int(given[1] if given else 80)


def section(name: str, rows: list[dict]) -> str:
    """What stands on a page between the marks of a study, of a table of Crossings, of older runs,
    or of "algorithms"."""
    if name == "algorithms":
        return f"{algorithms_table(rows)}\n"
    if name == "older":
        return f"{older_table(measured(name))}\n\n[Rows]({STORED}/{name}.jsonl)\n"
    if name in CREDIT_TABLES:
        told = credit.table(measured(name), CREDIT_TABLES[name]).strip()
        if "alpha-beta" in name:
            told = "\n\n".join(grid(told, title) for title in ("success at 60", "A^S with truth"))
        return f"{told}\n\n[All columns]({STORED}/{name}.md)\n"
    if name not in STUDIES:
        sys.exit(f"{PAGES}: evidence: {name}: no such study")
    command, found = f"`python benchmarks/evidence.py {name}`", runs_of(STUDIES[name], rows)
    if not found:
        return f"No run of {command} is stored yet.\n"
    commits = sorted({row["commit"][:7] for runs in found for row in runs.rows})
    files = f"[all its tables]({STORED}/evidence-{name}.md)"
    if name.startswith("rates-"):
        told = tried_table(found)
    elif name.startswith("tuning-"):
        told = tuning_table(found)
    else:
        told = short_table(found, rows, today=name.startswith("page-"))
    if "alpha-beta" in name:
        less = f"more than `{found[0].label}`"
        told = "\n\n".join([grid(told, "after"), grid(told, less, "more than alpha 0")])
    parts = [f"{command}, {files}; rows of {', '.join(commits)}", told]
    if draws(name, found):
        parts.append(f"![Score of {name}]({STORED}/evidence-{name}.png)")
    return "\n\n".join(parts) + "\n"


def all_tables(name: str, rows: list[dict]) -> str:
    """The file of a study that its section links."""
    study, found = STUDIES[name], runs_of(STUDIES[name], rows)
    parts = [f"# {name}", f"`python benchmarks/evidence.py {name}`"]
    if name.startswith(TRIED):
        parts.append(tried_table(found))
    else:
        parts.append(final_table(found))
        if study.level is not None:
            parts.append(cost_table(found, study.level))
        if len(found) > 1 and len(study.seeds) > 1:
            parts.append(comparison_table(found))
    return "\n\n".join(filter(None, [*parts, logged_table(found)])) + "\n"


def measured(name: str) -> list[dict]:
    """The rows of a file beside the studies' own."""
    return rows_of(credit.RESULTS / f"{name}.jsonl")


def files_of(rows: list[dict]) -> dict[Path, str]:
    """{file: text} of all that --table writes but the pictures: the pages with every section made
    of the rows, and the tables beside the rows. Exits where a study has rows and no section."""
    pages, marked = {path: path.read_text() for path in sorted(PAGES.glob("*.md"))}, set()
    for path, text in pages.items():
        marked |= {match[2] for match in SECTION.finditer(text)}
        pages[path] = SECTION.sub(lambda found: found[1] + section(found[2], rows) + found[3], text)
    made = {name for name, study in STUDIES.items() if runs_of(study, rows)}
    if missing := made - marked:
        sys.exit(f"{PAGES}: no section <!-- evidence: {min(missing)} --> for its stored rows")
    tables = {f"evidence-{name}": all_tables(name, rows) for name in made}
    tables |= {name: credit.table(measured(name)) for name in CREDIT_TABLES}
    tables["plan"] = f"{plan_table(rows)}\n"
    tables["true-credit"] = f"{true_credit_table(measured('true-credit'))}\n"
    return pages | {ROWS.with_name(f"{file}.md"): text for file, text in tables.items()}


def draws(name: str, found: list[Runs]) -> bool:
    """Whether a study has a picture: at most thirteen curves, which a reader can distinguish."""
    return not name.startswith(TRIED) and 0 < len(found) <= 13


def picture(found: list[Runs]):
    """The score against iterations and minutes, and what PRM and critic knew against minutes where
    a run has it twice: a line for the mean of the seeds, a band from the lowest to the highest."""
    from matplotlib.figure import Figure

    of_runs = [row["evaluations"] for runs in found for row in runs.rows]
    known = [k for k in LOGGED if any(sum(k in e for e in of_run) > 1 for of_run in of_runs)]
    rows = [["score iteration"] * 3 + ["score minutes"] * 3]
    if known:
        rows.append([f"{key} minutes" for key in known for _ in range(6 // len(known))])
    figure = Figure(figsize=(11, 4 * len(rows)))
    axes = figure.subplot_mosaic(rows)
    for number, runs in enumerate(found):
        style = dict(color=f"C{number % 10}", linestyle=("-", "--", ":")[number // 10 % 3])
        for panel, axis in axes.items():
            key, against = panel.split()
            curves = [[e for e in row["evaluations"] if key in e] for row in runs.rows]
            at = [*zip(*curves)]  # up to the end of the shortest
            x = [statistics.mean(e[against] for e in seeds) for seeds in at]
            y = [[e[key] for e in seeds] for seeds in at]
            axis.plot(x, [*map(statistics.mean, y)], label=runs.label, **style)
            axis.fill_between(x, [*map(min, y)], [*map(max, y)], alpha=0.12, **style)
            unit = " of training" if against == "minutes" else ""
            axis.set(xlabel=against + unit, ylabel=LOGGED.get(key, "score on the panel"))
    axes["score minutes"].sharey(axes["score iteration"])
    axes["score iteration"].legend(fontsize=6)
    figure.tight_layout()
    return figure


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    add = parser.add_argument
    add(
        "studies", nargs="*", help=f"Default: all but those of older commits. {', '.join(STUDIES)}."
    )
    add("--jobs", type=int, default=1, help="Runs at the same time, each on one core (default: 1).")
    add("--only", default="", help="Run only commands with this beginning (default: all).")
    add("--plan", action="store_true", help="Print the runs and their machine time; run nothing.")
    add("--table", action="store_true", help="Make pages, tables and pictures of the rows.")
    add("--out", type=Path, default=ROOT / "runs" / "evidence", help="Directory of the runs.")
    args = parser.parse_args()
    if unknown := [name for name in args.studies if name not in STUDIES]:
        sys.exit(f"{' '.join(unknown)}: no such study; there are {', '.join(STUDIES)}")
    cores = len(os.sched_getaffinity(0))
    if not 1 <= args.jobs <= cores:
        sys.exit(f"--jobs {args.jobs}: from 1 to {cores}, the cores that there are")

    older = {
        name: f"{name}: its flags are those of commit {study.commit}; today's scripts cannot run it"
        for name, study in STUDIES.items()
        if study.commit
    }
    if args.plan:
        print("\n".join([plan_table(stored_rows(ROWS)), "", *older.values()]))
    elif args.table:
        rows = stored_rows(ROWS)
        for path, text in files_of(rows).items():
            replace_file(path, text)
            print(path)
        for name, study in STUDIES.items():
            if draws(name, found := runs_of(study, rows)):
                picture(found).savefig(ROWS.with_name(f"evidence-{name}.png"), dpi=110)
        for name in CREDIT_TABLES:
            credit.picture(measured(name), credit.RESULTS / f"{name}.png")
    else:
        if asked := [name for name in args.studies if name in older]:
            sys.exit(older[asked[0]])
        studies = args.studies or [name for name in STUDIES if name not in older]
        run(studies, args.jobs, args.out.resolve(), ROWS, args.only)


if __name__ == "__main__":
    main()
