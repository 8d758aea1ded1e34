"""Every algorithm on every world, over seeds: the runs, and what docs/results.md tells of them.

    python benchmarks/evidence.py --plan                    what is to be run, and the machine time
    python benchmarks/evidence.py sokoban webshop --jobs 2  what is left of the runs of two studies
    python benchmarks/evidence.py --table                   tables and pictures of the stored rows

A study is a list of commands, each run with every seed; STUDIES has them. A run has one core, and
`--jobs` go side by side, by the runner of sweeps/run.py: killed and started again, it repeats no
run that was finished and goes on with the others, so a killed machine costs at most what the runs
did since their last checkpoints. A run that fails is named at the end, and the exit status is 1.
Two of these commands can go beside each other if each has an --out of its own.

A finished run is a row of benchmarks/results/evidence.jsonl: its command, seed, flags, commit, its
evaluations, and the score of each task of the panel before and after training. A study whose flags
the scripts no longer have names the commit that has them; its rows stay, and it is not run. --table
makes all else of these rows: the sections of docs/results.md between marks, and a picture of each
study. The tables and pictures of Crossings are made with them, from the rows of
benchmarks/credit.py. Scores are success, in SOTOPIA the goal score (0 to 10), by the last
evaluation.
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
from benchmarks.intervals import interquartile_mean, interval, probability_of_improvement
from runtime.ranges import NAME as LONGEST
from runtime.saving.files import append, replace_file, rows_of, to_json
from sweeps.file import Job
from sweeps.results import half_width
from sweeps.run import Runner

ROWS = ROOT / "benchmarks" / "results" / "evidence.jsonl"
PAGE = ROOT / "docs" / "results.md"
MOST = 12  # commands of a study whose curves are drawn, and of which every two are compared
UNFOLDED = 6  # lines of a comparison that the page shows without a click
SECTION = re.compile(r"(<!-- evidence: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
# Stored with an evaluation: the mean over the iterations since the one before.
LOGGED = {
    "prm/pair_accuracy": "new pairs ranked right",
    "prm/credit_share": "credit share of A^E",
    "critic/explained_variance": "variance that the critic explains",
}
# Tables of benchmarks/credit.py on the page: how the titles of their columns begin (none: all).
SHORT_TABLE = "row", "seeds", "success at 60", "more than", "A^S", "fresh pairs"
CROSSINGS = {
    "credit": (),
    "credit-minutes": ("row", "seeds", "success at", "by minute", "seconds"),
    "credit-alpha-beta": ("row", "seeds", "success at 60", "more than", "A^S", "fresh"),
    "credit-rates": ("row", "seeds", "success at", "more than", "A^S", "fresh pairs"),
    "credit-tuning": SHORT_TABLE[:3] + ("A^S", "fresh pairs"),
    "credit-ablation": SHORT_TABLE,
    "credit-trials": SHORT_TABLE + ("of the way", "seconds"),
    "credit-normalisation": SHORT_TABLE,
    "credit-progress": ("row", "seeds", "success at", "more than", "of the way", "A^S"),
}
TRUE_CREDIT = ["run", "tasks", "pairs ranked right", "by centred rewards", "A^E", "A^S"]
TRUE_CREDIT += ["A^S centred", "A = A^E + alpha A^S", "A less A^E", "alpha", "best alpha"]
OF_A_RUN = ("seed", "resume", "run_name", "runs_dir", "override", "track", "quiet")  # not stored


# ------------ what is run ------------


class Study(NamedTuple):
    """Commands (a script and its flags), each of them run with every seed."""

    commands: list[str]
    seeds: tuple[int, ...] = (1, 2, 3, 4, 5)
    level: float | None = None  # a score, for the cost of reaching it
    commit: str = ""  # whose scripts have its flags; empty: today's have


def over(flag: str, *values) -> list[str]:
    return [f" --{flag} {value}" for value in values]


def every(algorithms: str, world: str, flags: str = "") -> list[str]:
    """The commands of these algorithms on a world."""
    return [f"{algorithm}_{world}.py{flags}" for algorithm in algorithms.split()]


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
    return Study([f"{command} --eval-set validation" for command in commands], (1,))


TRIES = 6
COEFFICIENTS = {
    "gigpo": over("step-weight", 0.3, 3) + over("step-gamma", 0.8),
    "graphgpo": over("step-weight", 0.3, 3) + over("distance-discount", 0.5),
    "prime": over("prm-learning-rate", 3e-4, 3e-3) + over("beta", 0.5),
    "ppo": over("critic-learning-rate", 3e-4, 3e-3) + over("gae-lambda", 1),
    "dpo": over("beta", 0.01, 0.2, 1),
    "istar": over("prm-learning-rate", 3e-4) + over("alpha", 0.3, 3),
}
ON_SOKOBAN = "rloo grpo reinforce_pp gigpo graphgpo istar"
ON_WEBSHOP = "rloo grpo reinforce_pp gigpo graphgpo prime ppo dpo istar"
ON_SOTOPIA = "rloo grpo reinforce_pp istar"
ON_VISUAL = "rloo grpo reinforce_pp gigpo istar"
SHORT, MIDDLE, LONG = over("iterations", 20, 40, 300)  # ten bring most of it on WebShop
WITHOUT = " --alpha 0 --beta 0"  # a PRM: the same page, estimator, ratio and rate
ALPHA_1, TWO = " --alpha 1", " --prm-steps 2"  # the paper's; the default before it was 8
ALPHAS, BETAS = ["", *over("alpha", 0.1, 0.3, 3)], ["", *over("beta", 0.05, 0.3, 3)]
GRID = [WITHOUT] + [alpha + beta for alpha in ALPHAS for beta in BETAS]  # both are 1 by default
BY_STEP, BY_TOKEN = (["", *over("ratio", "step-mean", other)] for other in ("step", "token"))
RATIOS = [command + ratio for command in every("rloo grpo", "webshop", SHORT) for ratio in BY_STEP]
RATIOS += [f"istar_webshop.py{SHORT}{ratio}" for ratio in BY_TOKEN]
ON_PICTURES = every(ON_VISUAL, "visual_sokoban", " --iterations 30")
ON_PICTURES += [ON_PICTURES[-1] + TWO]
SMOLLM2 = " --model runs/smollm2-sokoban"  # SmolLM2-135M-Instruct; docs/results.md has its command
PRETRAINED = f"{SMOLLM2} --dtype bfloat16 --max-steps 7 --tasks-per-iteration 8 --iterations 20"
PRETRAINED += " --eval-every 5 --micro-batch-tokens 2048 --learning-rate 3e-5"
STUDIES = {
    "tuning-sokoban": tuning("sokoban", 1e-3, ON_SOKOBAN),
    "tuning-webshop": tuning("webshop", 5e-4, ON_WEBSHOP, 10),
    "tuning-sotopia": tuning("sotopia", 1e-3, ON_SOTOPIA),
    "sokoban": Study(every(ON_SOKOBAN, "sokoban", MIDDLE), level=0.5),
    "webshop": Study(every(ON_WEBSHOP, "webshop", SHORT), level=0.55),
    "sotopia": Study(every(ON_SOTOPIA, "sotopia", MIDDLE), level=3.5),
    "visual-sokoban": Study(ON_PICTURES, (1, 2, 3), level=0.45),
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
        [f"istar_sokoban.py{MIDDLE}{x}" for x in ("", WITHOUT, ALPHA_1, TWO, ALPHA_1 + TWO)]
    ),
    "prm-webshop": Study([f"istar_webshop.py{SHORT}{x}" for x in ("", WITHOUT, TWO)]),
    "prm-sotopia": Study(
        [f"istar_sotopia.py{MIDDLE}{x}" for x in ("", WITHOUT, " --pair-margin 0.1")]
    ),
    "alpha-beta-webshop": Study([f"istar_webshop.py{SHORT}{x}" for x in GRID], (1, 2, 3)),
    "ratios-webshop": Study(RATIOS, commit="e16dea9"),
}
# Minutes of 80 iterations on one core, where no run has told yet: of iStar, of the others
EXPECTED = {"sokoban": (10, 9), "webshop": (28, 17), "sotopia": (8, 5), "visual_sokoban": (50, 35)}
EXPECTED_SMOLLM2 = (400, 190)
# Passes over all tokens of an iteration, (without, with) a gradient; those of every algorithm: one
# that samples, one for log pi_old, one of the update. Sequences that are left out are counted too.
PASSES = {"istar": (4, 2), "prime": (4, 2), "ppo": (3, 2), "dpo": (3, 1)}


def world_and_algorithm(command: str) -> tuple[str, str]:
    """("sokoban", "rloo") of "rloo_sokoban.py --clip 0.1"."""
    script = Path(command.split(".py")[0]).name
    world = next(world for world in sorted(EXPECTED, key=len)[::-1] if script.endswith(world))
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

    @property
    def seeds(self) -> int:
        return len(self.rows)

    def panel(self, when: str) -> list[list[float]]:
        """Scores [S, T] "before" or "after", of the tasks that all runs have at both times."""
        tasks = set.intersection(
            *({*row[time]} for row in self.rows for time in ("before", "after"))
        )
        return [[row[when][task] for task in sorted(tasks)] for row in self.rows]

    def scores(self) -> list[float]:
        """The last evaluation of each run, [S]."""
        return [row["evaluations"][-1]["score"] for row in self.rows]

    def logged(self, key: str) -> list[list[float]]:
        """What each run's evaluations have of a key of LOGGED, [S] of as many as have it."""
        return [[e[key] for e in row["evaluations"] if key in e] for row in self.rows]

    def areas(self) -> list[float]:
        """The mean height of each run's curve over its iterations, [S]."""
        return [area(row["evaluations"]) for row in self.rows]

    def gains(self) -> list[list[float]]:
        """After less before, [S, T]."""
        pairs = zip(self.panel("after"), self.panel("before"))
        return [[after - before for after, before in zip(*pair)] for pair in pairs]


def area(evaluations: list[dict]) -> float:
    """The area under a curve over its width, by trapezoids."""
    steps = zip(evaluations, evaluations[1:])
    parts = [(b["iteration"] - a["iteration"]) * (a["score"] + b["score"]) / 2 for a, b in steps]
    return sum(parts) / evaluations[-1]["iteration"]


def reached(row: dict, level: float) -> dict | None:
    """The first evaluation of a run at which its score was at least this."""
    return next((e for e in row["evaluations"] if e["score"] >= level), None)


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


def between(mean: float, half: float | None, digits: int = 3) -> str:
    """A mean with its interval; of one run alone the mean."""
    told = f"{mean:.{digits}f}"
    if half is None:
        return told
    return f"{told} ({mean - half:.{digits}f} to {mean + half:.{digits}f})"


def estimate(scores: list[list[float]]) -> tuple[float, float | None]:
    """The mean of scores [S, T] and half of its interval, which needs two seeds and two tasks."""
    if len(scores) > 1 and len(scores[0]) > 1:
        return interval(scores)
    return statistics.mean(map(statistics.mean, scores)), None


def over_tasks(scores: list[list[float]]) -> str:
    return between(*estimate(scores))


def final_table(found: list[Runs]) -> str:
    """What each command reached. Memory and the least share of valid answers in an iteration, from
    one seed to another, are told where every row has them, which older ones do not."""
    rows, lines = [row for runs in found for row in runs.rows], []
    memory = all(row.get("memory_gib") for row in rows)
    valid = all("valid" in row for row in rows)
    for runs in found:
        areas = runs.areas()
        cells = [f"`{runs.command}`", str(runs.seeds), over_tasks(runs.panel("before"))]
        cells += [f"{interquartile_mean(runs.scores()):.3f}", over_tasks(runs.panel("after"))]
        cells += [over_tasks(runs.gains()), between(statistics.mean(areas), half_width(areas))]
        minutes = [row["evaluations"][-1]["minutes"] for row in runs.rows]
        cells.append(f"{statistics.mean(minutes):.1f}")
        if memory:
            cells.append(f"{max(row['memory_gib'] for row in runs.rows):.1f}")
        if valid:
            shares = [f"{row['valid']:.2f}" for row in runs.rows]
            cells.append(" to ".join(sorted({min(shares), max(shares)})))
        lines.append(cells)
    titles = ["command", "seeds", "before", "after: IQM", "after: mean", "gain", "area", "minutes"]
    return table(titles + ["GiB"] * memory + ["least valid"] * valid, lines)


def tuning_table(found: list[Runs]) -> str:
    """The best of each script's runs by the mean height of its curve, beside that with its default
    rate, and by how much it ended above that, over the tasks; then all runs, the best first."""
    by_script: dict[str, list[Runs]] = {}
    for runs in found:
        by_script.setdefault(runs.command.split()[0], []).append(runs)
    lines, tried = [], []
    for script, own in by_script.items():
        own.sort(key=lambda runs: -runs.areas()[0])
        tried += [[f"`{r.label}`", f"{r.areas()[0]:.3f}", f"{r.scores()[0]:.3f}"] for r in own]
        source = (ROOT / script).read_text()
        rate = float(re.search(r"^    learning_rate: float = (\S+)", source, re.MULTILINE)[1])
        for default in (runs for runs in own if runs.label == f"{script} --learning-rate {rate:g}"):
            (ours,), (theirs,) = own[0].panel("after"), default.panel("after")
            gaps = [a - b for a, b in zip(ours, theirs)]
            cells = [f"`{script}`", f"`{own[0].label.removeprefix(f'{script} ')}`"]
            cells += [f"{own[0].areas()[0]:.3f}", f"`--learning-rate {rate:g}`"]
            cells.append(f"{default.areas()[0]:.3f}")
            above = between(statistics.mean(gaps), half_width(gaps)) if any(gaps) else "–"
            lines.append([*cells, above])
    titles = [
        "script",
        "best of those tried",
        "area",
        "default",
        "area",
        "best - default, at the end",
    ]
    every = table(["tried", "area", "at the end"], tried)
    return f"{table(titles, lines)}\n\n{folded('All that was tried', every)}"


def folded(title: str, told: str) -> str:
    """A table that a click opens."""
    return f"<details><summary>{title}</summary>\n\n{told}\n\n</details>"


def alpha_and_beta(command: str) -> tuple[float, float]:
    """An iStar's alpha and beta, both 1 by default."""
    given = dict(re.findall(r"--(alpha|beta) (\S+)", command))
    return float(given.get("alpha", 1)), float(given.get("beta", 1))


def grid(told: str, title: str, name: str = "") -> str:
    """A column of a table as one of its own, under another name: a line for each alpha, a column
    for each beta. Rows that are not iStar's, or have no PRM, are left out."""
    titles, _, *lines = (
        [c.strip(" `") for c in line.split("|")[1:-1]] for line in told.split("\n")
    )
    cells = {}
    for line in lines:
        alpha, beta = alpha_and_beta(line[0])
        if line[0].startswith("istar") and alpha and beta:
            cells[alpha, beta] = line[titles.index(title)]
    alphas, betas = (sorted({*values}) for values in zip(*cells))
    rows = [[f"{a:g}", *(cells.get((a, b), "–") for b in betas)] for a in alphas]
    return table([f"{name or title}: alpha", *(f"beta {beta:g}" for beta in betas)], rows)


def cost_table(found: list[Runs], level: float) -> str:
    """What it took to reach the level: the median of the runs that did."""
    lines = []
    for runs in found:
        costs = [cost(row, at) for row in runs.rows if (at := reached(row, level))]
        cells = [f"`{runs.label}`", f"{len(costs)} of {runs.seeds}"]
        for name in COSTS:
            values = [each[name] for each in costs]
            cells.append(f"{statistics.median(values):.4g}" if values else "–")
        lines.append(cells)
    return table(["command", f"runs that reach {level:g}", *COSTS], lines)


COSTS = ("iterations", "episodes", "million tokens", "TFLOP", "minutes")


def comparison_table(found: list[Runs]) -> str:
    """Every two commands, or where they are many each with the first: the probability that A is
    better, and by how much."""
    pairs = combinations(found, 2)
    if len(found) > MOST:
        pairs = ((runs, found[0]) for runs in found[1:])
    lines = []
    for one, other in pairs:
        better = probability_of_improvement(one.scores(), other.scores())
        ours, theirs = ({row["seed"]: row["after"] for row in runs.rows} for runs in (one, other))
        seeds = sorted(ours.keys() & theirs.keys())
        gaps = []
        for seed in seeds:
            tasks = sorted(ours[seed].keys() & theirs[seed].keys())
            gaps.append([ours[seed][task] - theirs[seed][task] for task in tasks])
        told = over_tasks(gaps) if gaps else "–"
        lines.append([f"`{one.label}`", f"`{other.label}`", f"{better:.2f}", told])
    return table(["A", "B", "P(A better)", "A - B"], lines)


def logged_table(found: list[Runs]) -> str:
    """What PRM and critic knew, of the commands whose rows have it: the means over the iterations
    up to the first evaluation and over those behind it; "" where no command's have."""
    lines = []
    for runs in found:
        for key, title in LOGGED.items():
            curves = runs.logged(key)
            if min(map(len, curves)) > 1:
                later = [statistics.mean(curve[1:]) for curve in curves]
                cells = [f"`{runs.label}`", title]
                for values in ([curve[0] for curve in curves], later):
                    cells.append(between(statistics.mean(values), half_width(values)))
                lines.append([*cells, ", ".join(f"{value:.2f}" for value in later)])
    titles = ["command", "logged", "up to the first evaluation", "behind it", "behind it, by seed"]
    told = table(titles, lines) if lines else ""
    return folded("What PRM and critic knew", told) if len(lines) > 2 * UNFOLDED else told


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
    """Minutes of a run that was not made yet: as those of its script and model that were, by
    iterations."""
    command = job_command(job)
    world, algorithm = world_and_algorithm(command)
    given = re.search(r"--iterations (\d+)", command)
    iterations = int(given[1]) if given else 80
    large = SMOLLM2 in command
    alike = [row for row in rows if row["command"].split()[0] == command.split()[0]]
    alike = [row for row in alike if (SMOLLM2 in row["command"]) == large]
    if alike:
        made = sum(row["evaluations"][-1]["iteration"] for row in alike)
        each = sum(row["minutes"] for row in alike) / made
    else:
        minutes = EXPECTED_SMOLLM2 if large else EXPECTED[world]
        each = minutes[algorithm != "istar"] / 80
    return each * iterations


def section(name: str, rows: list[dict]) -> str:
    """What stands in docs/results.md between the marks of a study, of a table of Crossings, of
    "true-credit", or of "plan"."""
    if name == "plan":
        return f"{plan_table(rows)}\n"
    if name == "true-credit":
        return f"{true_credit_table(rows_of(ROWS.with_name('true-credit.jsonl')))}\n"
    if name in CROSSINGS:
        told = credit.table(crossings(name), CROSSINGS[name])
        if "alpha-beta" not in name:
            return told
        grids = [grid(told.strip(), title) for title in ("success at 60", "A^S with truth")]
        return "\n\n".join([*grids, folded("All rows", told.strip())]) + "\n"
    if name not in STUDIES:
        sys.exit(f"{PAGE}: evidence: {name}: no such study")
    study, found = STUDIES[name], runs_of(STUDIES[name], rows)
    command = f"`python benchmarks/evidence.py {name}`"
    if not found:
        return f"No run of {command} is stored yet.\n"
    if name.startswith("tuning-"):
        return "\n\n".join(filter(None, [command, tuning_table(found), logged_table(found)])) + "\n"
    parts, compared = [command, final_table(found)], ""
    if len(found) > 1 and len(study.seeds) > 1:
        compared = comparison_table(found)
    if "alpha-beta" in name:
        parts[1:] = [grid(parts[1], "after: mean"), folded("All commands", parts[1])]
        if len(found) > MOST:  # each is compared with the first
            parts.insert(2, grid(compared, "A - B", "more than alpha 0"))
    if study.level is not None:
        parts.append(cost_table(found, study.level))
    if compared.count("\n") - 1 > UNFOLDED:
        title = "Every two of them" if len(found) <= MOST else "Each with the first"
        parts.append(folded(title, compared))
    elif compared:
        parts.append(compared)
    if told := logged_table(found):
        parts.append(told)
    if draws(name, found):
        parts.append(f"![Score of {name}](../benchmarks/results/evidence-{name}.png)")
    return "\n\n".join(parts) + "\n"


def crossings(name: str) -> list[dict]:
    """The stored rows of a table of benchmarks/credit.py."""
    return rows_of(credit.RESULTS / f"{name}.jsonl")


def page(text: str, rows: list[dict]) -> str:
    """docs/results.md with every section made of the rows. Exits where a study has rows and no
    section."""
    marked = {match[2] for match in SECTION.finditer(text)}
    for name, study in STUDIES.items():
        if name not in marked and runs_of(study, rows):
            sys.exit(f"{PAGE}: no section <!-- evidence: {name} --> for the study's stored runs")
    return SECTION.sub(lambda found: found[1] + section(found[2], rows) + found[3], text)


def draws(name: str, found: list[Runs]):
    """What draws a study's picture; None where it has none."""
    if name.startswith("tuning-"):
        return None
    if len(found) <= MOST:
        return picture
    return grid_picture if "alpha-beta" in name else None


def picture(found: list[Runs]):
    """The score against iterations and minutes, and what PRM and critic knew against minutes: a
    line for the mean of the seeds, a band from the lowest to the highest."""
    from matplotlib.figure import Figure

    evaluations = [e for runs in found for row in runs.rows for e in row["evaluations"]]
    known = [key for key in LOGGED if any(key in e for e in evaluations)]
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


def grid_picture(found: list[Runs]):
    """The score after training, and the new pairs ranked right behind the first evaluation, against
    alpha: a line for each beta, with 95 % intervals; a band is the command without a PRM."""
    from matplotlib.figure import Figure

    lines: dict[float, dict[float, Runs]] = {}  # beta: alpha: runs
    for runs in sorted(found, key=lambda runs: alpha_and_beta(runs.command)):
        alpha, beta = alpha_and_beta(runs.command)
        lines.setdefault(beta, {})[alpha] = runs
    figure = Figure(figsize=(11, 4))
    score, ranked = figure.subplots(1, 2)
    for runs in lines.pop(0.0, {}).values():
        mean, half = estimate(runs.panel("after"))
        score.axhline(mean, color="grey", label="alpha 0, no PRM")
        score.axhspan(mean - (half or 0), mean + (half or 0), color="grey", alpha=0.15)

    for number, (beta, cells) in enumerate(sorted(lines.items())):
        x = [alpha * 1.04**number for alpha in cells]  # beside each other
        scores = [estimate(runs.panel("after")) for runs in cells.values()]
        shares = []
        for runs in cells.values():
            later = [statistics.mean(curve[1:]) for curve in runs.logged("prm/pair_accuracy")]
            shares.append((statistics.mean(later), half_width(later)))
        for axis, values in ((score, scores), (ranked, shares)):
            means, halves = zip(*values)
            halves = [half or 0 for half in halves]  # one seed has no interval
            axis.errorbar(x, means, halves, marker="o", capsize=3, label=f"beta {beta:g}")

    alphas = sorted({alpha for cells in lines.values() for alpha in cells})
    for axis, label in ((score, "score on the panel"), (ranked, LOGGED["prm/pair_accuracy"])):
        axis.set(xscale="log", xlabel="alpha", ylabel=label)
        axis.set_xticks(alphas, map(str, alphas))
        axis.minorticks_off()
    score.legend(fontsize=8)
    figure.tight_layout()
    return figure


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    add = parser.add_argument
    add("studies", nargs="*", help=f"Studies (default: all): {', '.join(STUDIES)}.")
    add("--jobs", type=int, default=1, help="Runs at a time, each on one core.")
    add("--only", default="", help="Commands that begin so are run (default: all of a study).")
    add("--plan", action="store_true", help="Runs and machine time are told, and nothing is run.")
    add("--table", action="store_true", help="docs/results.md and pictures are made of the rows.")
    add("--out", type=Path, default=ROOT / "runs" / "evidence", help="Directory of the runs.")
    args = parser.parse_args()
    if unknown := [name for name in args.studies if name not in STUDIES]:
        sys.exit(f"{' '.join(unknown)}: no such study; there are {', '.join(STUDIES)}")
    cores = len(os.sched_getaffinity(0))
    if not 1 <= args.jobs <= cores:
        sys.exit(f"--jobs {args.jobs}: from 1 to {cores}, the cores that there are")

    older = {
        name: f"{name}: its flags are those of commit {study.commit}, and it is not run by others"
        for name, study in STUDIES.items()
        if study.commit
    }
    if args.plan:
        print("\n".join([plan_table(stored_rows(ROWS)), "", *older.values()]))
    elif args.table:
        rows = stored_rows(ROWS)
        replace_file(PAGE, page(PAGE.read_text(), rows))
        for name, study in STUDIES.items():
            if found := runs_of(study, rows):
                print(f"{name}\n\n{section(name, rows)}")
                if draw := draws(name, found):
                    draw(found).savefig(ROWS.with_name(f"evidence-{name}.png"), dpi=110)
        for name in CROSSINGS:
            credit.write_results(name, crossings(name))
    else:
        if asked := [name for name in args.studies if name in older]:
            sys.exit(older[asked[0]])
        studies = args.studies or [name for name in STUDIES if name not in older]
        run(studies, args.jobs, args.out.resolve(), ROWS, args.only)


if __name__ == "__main__":
    main()
