"""Credit where the truth is known: does A^S agree with the true value of a step, and does it help
learning?

    python benchmarks/credit.py --seeds 1 2 3 4 5 6 7 8              # about 70 minutes on one core
    python benchmarks/credit.py --table                              # from the rows that are there
    python benchmarks/credit.py --name ablation --rows istar "istar --prm-lora-rank 16" ...
    python benchmarks/credit.py --world sokoban --name head-sokoban --rows istar ...

The world is envs/crossings.py, the policy models/tiny-crossings. A row is an algorithm's WebShop
script with the world exchanged and nothing else, started with FLAGS below, those of --flags and the
row's own; of two equal flags the last counts. A run that was stopped continues from its checkpoint.
What NAME.jsonl has is not run again. Two of these commands, with different rows or seeds, can run
at the same time.
`truth` is iStar with the true advantage in place of A^S: the ceiling. `ablations` are of
istar_webshop_ablations.py. With --world a row has another world, its tiny model and its flags in
benchmarks/evidence.py; there the true advantage is not known.

The true advantage of a step is P(success) after it less P(success) before it. The walk does not
depend on the answers, so it follows from the probabilities that the policy gives to the right ways
(envs.crossings.advantages). A separate pass, which the minutes leave out, computes these.

What comes out, under benchmarks/results/: NAME.jsonl (an evaluation per row, with the means of what
was logged since the one before), NAME.md and NAME.png.
"""

import argparse
import importlib.util
import json
import math
import os
import shlex
import subprocess
import sys
import time
from itertools import product
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(ROOT / "benchmarks"))
from intervals import area, new_run, student

RESULTS = ROOT / "benchmarks" / "results"

ROWS = ("rloo", "grpo", "gigpo", "prime", "istar", "truth")
SCRIPTS = {"truth": "istar_webshop", "ablations": "istar_webshop_ablations"}  # others: ROW_webshop
LOGGED = ("credit/advantage_truth", "credit/credit_truth")  # means of these are stored and shown
LOGGED += ("prm/pair_accuracy", "prm/skill", "prm/credit_share")
OWN = {  # flags of a row
    "truth": "--prm-lora-rank 1 --prm-steps 0",
}
# The same for every row. The rate is small on purpose (docs/results/crossings.md); it was chosen
# while panel runs of seed 1 were looked at.
FLAGS = {
    "crossings": """--model models/tiny-crossings --max-steps 16 --max-action-tokens 8
--max-context-tokens 512 --tasks-per-iteration 4 --iterations 60 --learning-rate 1.5e-4
--lr-halving inf --eval-every 20 --eval-tasks 256 --eval-samples 1
--eval-temperature 1 --save-every 20 --engine hf""",
    "sokoban": """--model models/tiny-sokoban --max-steps 15 --max-action-tokens 16
--max-context-tokens 1024 --learning-rate 1e-3 --alpha 0.1 --iterations 40 --eval-every 20""",
    "webshop": "--iterations 20 --eval-every 20",
}
WORLDS = {"crossings": "Crossings", "sokoban": "Sokoban", "webshop": "WebShop"}  # and its class


# ------------ a run, in a process of its own ------------


def load_script(name: str, world: str, directory: Path):
    """The module of a WebShop script with the world exchanged."""
    source = (ROOT / f"{name}.py").read_text()
    source = source.replace("envs.webshop", f"envs.{world}").replace("WebShop", WORLDS[world])
    if world != "webshop":
        source = source.replace("args.world.outcome", '"success"')  # PRIME asks: it is 0 or 1 here
    path = directory / f"{name.replace('webshop', world)}.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module


class Measuring:
    """Reads the true advantages off a script's policy, and logs what its advantages have to do with
    them. It stands between main and four of the script's functions."""

    def __init__(self, module, with_truth: bool):
        self.module, self.policy, self.trajectories, self.batch = module, None, [], None
        self.flatten, self.network = module.flatten, module.Network
        self.policy_update = module.policy_update
        module.flatten, module.Network = self.flattening, self.building
        module.policy_update = self.updating
        if with_truth:
            module.step_rewards = lambda phi, old, beta: self.truth(self.batch, self.args)
            module.skill = lambda accuracies: 1.0
            module.policy_slope = lambda *_: 0.0  # nothing is taken off the truth
            self.parse, module.parse = module.parse, self.parsing
        elif hasattr(module, "step_advantages"):
            self.step_advantages = module.step_advantages
            module.step_advantages = self.crediting
        self.credit = None  # A^S of the credited steps

    def parsing(self, *given):
        self.args = self.parse(*given)
        return self.args

    def building(self, name, *rest, **options):
        network = self.network(name, *rest, **options)
        if name == "policy":
            self.policy = network
        return network

    def flattening(self, trajectories):
        if trajectories[0].steps[0].engine_logprobs and not self.inside_prm():
            self.trajectories, self.batch = trajectories, self.flatten(trajectories)
            return self.batch
        return self.flatten(trajectories)

    @staticmethod
    def inside_prm() -> bool:
        """Whether a PRM's update asks, which is of past episodes."""
        return sys._getframe(2).f_code.co_name == "prm_update"

    def crediting(self, rewards, *rest):
        self.credit = self.step_advantages(rewards, *rest)
        return self.credit

    def updating(self, policy, batch, old_logprobs, advantages, args):
        from runtime.ending import current

        began = time.perf_counter()
        true = self.truth(self.batch, args)  # [S]
        seen, of_steps = ~self.batch.invalid, advantages  # [S]
        if len(of_steps) != len(seen):  # PRIME's are of tokens: their mean
            counts = self.batch.token_step.bincount()
            of_steps = self.module.sum_per_step(advantages, self.batch) / counts
        measured = {"advantage_truth": correlation(of_steps[seen], true[seen])}
        if self.credit is not None and len(self.credit) == int(seen.sum()):
            measured["credit_truth"] = correlation(self.credit, true[seen])
        measured["seconds"] = time.perf_counter() - began
        current[0].log("credit", measured)
        return self.policy_update(policy, batch, old_logprobs, advantages, args)

    def truth(self, batch, args):
        """The true advantage of every step of the batch, [S]."""
        from envs.crossings import GUARDED, Crossings, advantages

        import torch

        env, rights = Crossings.from_args(args), self.right_probabilities(batch, args)  # [S]
        true, first = [], 0
        for t in self.trajectories:
            walk = env.walk(t.task)
            of_steps = rights[first : first + len(t.steps)].tolist()
            guarded = [place in GUARDED for place, _ in walk]
            probabilities = [p if g else None for p, g in zip(of_steps, guarded)]
            true += advantages(probabilities, [s.progress > 0 for s in t.steps], env.needed)
            first += len(t.steps)
        return torch.tensor(true)

    def right_probabilities(self, batch, args):
        """The probability that the policy gives to the right way, at the token where it gives a way
        at all, [S]; where an answer has no such token, the mean of the others."""
        from envs.crossings import WAYS, Crossings, right_way
        from runtime.data import micro_batches
        from runtime.ending import current
        from runtime.networks import plain

        import torch

        tokenizer, env = current[0].tokenizer, Crossings.from_args(args)
        ids = [tokenizer.encode(way, add_special_tokens=False) for way in WAYS]
        assert all(len(way) == 1 for way in ids), "a way is one token of models/tiny-crossings"
        way_ids = torch.tensor(ids)[:, 0]  # [4]
        signs = [sign for t in self.trajectories for _, sign in env.walk(t.task)]
        right = torch.tensor([WAYS.index(right_way(sign)) for sign in signs])  # [S]

        found = torch.full((len(right),), math.nan)
        for micro in micro_batches(batch, args):
            is_action = micro.is_action[:, 1:]
            with torch.no_grad():
                causal = plain(self.policy.activate())
                hidden = self.policy.hidden(micro.ids.to(causal.device))[:, :-1]
                hidden = hidden[is_action.to(causal.device)]
                logits = causal.get_output_embeddings()(hidden).float().cpu() / args.temperature
            targets, steps = micro.ids[:, 1:][is_action], batch.token_step[micro.tokens]
            chance = logits.softmax(-1)[:, way_ids]  # [k, 4]
            gives_way = torch.isin(targets, way_ids)
            for k in reversed(gives_way.nonzero()[:, 0].tolist()):  # the first of a step counts
                found[steps[k]] = chance[k, right[steps[k]]]
        return found.nan_to_num(found.nanmean().item())


def correlation(x, y) -> float | None:
    """Pearson's correlation of two vectors; None where one of them does not vary."""
    import torch

    if len(x) < 2:
        return None
    value = torch.corrcoef(torch.stack([x.double(), y.double()]))[0, 1].item()
    return value if value == value else None


def work(row: str, world: str, flags: list[str], directory: Path) -> None:
    """Run a row's script with these flags to its end, in this process."""
    module = load_script(SCRIPTS.get(row, f"{row}_webshop"), world, directory)
    if world == "crossings":
        Measuring(module, with_truth=row == "truth")
    sys.argv = [module.__file__, *flags]
    module.main()


# ------------ many runs ------------


def evaluations(directory: Path, row: str, seed: int) -> list[dict]:
    """The evaluations of a run as rows for the table: success, and the means since the evaluation
    before of what was measured."""
    from runtime.saving.files import rows_of

    since, seconds, found = [], 0.0, []
    for logged in rows_of(directory / "metrics.jsonl"):
        since.append(logged)
        if logged["iteration"]:
            seconds += logged["time/total"] - logged.get("credit/seconds", 0.0)
            seconds -= logged.get("time/evaluation", 0.0)
        if logged.get("eval/success") is None:
            continue
        found.append({"row": row, "seed": seed, "iteration": logged["iteration"]})
        found[-1] |= {"success": logged["eval/success"], "seconds": round(seconds, 2)}
        for name in (*LOGGED, "train/valid_actions"):
            values = [x[name] for x in since if x.get(name) is not None]
            if values:
                found[-1][name] = round(sum(values) / len(values), 4)
        since = []
    return found


def run_row(row: str, world: str, seed: int, directory: Path, common: list[str]) -> list[dict]:
    """The evaluations of a row with a seed: of the run that is there, or of one made now. common:
    flags of every row, which come after FLAGS."""
    name = "".join(c if c.isalnum() else "-" for c in f"{row} {seed}")
    words = shlex.split(row)
    own = shlex.split(OWN.get(words[0], ""))
    flags = [*shlex.split(FLAGS[world]), *common, *own, *words[1:], "--seed", str(seed)]
    iterations = int(flags[len(flags) - flags[::-1].index("--iterations")])
    done = evaluations(directory / name, row, seed) if (directory / name).exists() else []
    if done and done[-1]["iteration"] == iterations:
        return done

    flags += ["--runs-dir", str(directory), "--run-name", name, "--resume", "auto"]
    command = [sys.executable, __file__, "--work", words[0], "--world", world]
    command += ["--runs-dir", str(directory), "--"]
    environment = os.environ | {"WANDB_MODE": "offline"}
    with (directory / f"{name}.log").open("w") as log:
        subprocess.run(
            [*command, *flags], cwd=ROOT, env=environment, stdout=log, stderr=log, check=False
        )
    done = evaluations(directory / name, row, seed)
    if not done or done[-1]["iteration"] != iterations:
        sys.exit(f"{row} seed {seed} failed: its log is {directory / name}.log")
    return done


# ------------ table and picture ------------


def interval(values: list[float]) -> tuple[float, float]:
    """(mean, half of its 95 % interval over seeds, by Student's t; nan for one)."""
    n = len(values)
    mean = sum(values) / n
    if n == 1:
        return mean, math.nan
    variance = sum((x - mean) ** 2 for x in values) / (n - 1)
    return mean, student(n - 1) * math.sqrt(variance / n)


def shown(values: list[float]) -> str:
    if not values:
        return ""
    mean, half = interval(values)
    return f"{mean:.3f}" if math.isnan(half) else f"{mean:.3f} ± {half:.3f}"


def table(rows: list[dict], columns: tuple[str, ...] = ()) -> str:
    """Markdown, a line for a row, means over its seeds: success by iteration; where a new seed's
    run would end, in 95 of 100 cases; by how much it ends above the first row, seed by seed, at the
    last iteration that both have and at the second when the first of the two runs ends (between
    evaluations on a straight line); what share that is of the truth's; the area under the curve
    over its width, and by how much it is above the first row's; what the credit had to do with the
    truth, over the whole run; seconds.
    columns: the beginnings of the titles that are shown (default: all)."""
    curves: dict[str, dict[int, list[dict]]] = {}  # the evaluations of a row's runs, by seed
    for row in sorted(rows, key=lambda row: row["iteration"]):
        curves.setdefault(row["row"], {}).setdefault(row["seed"], []).append(row)
    names = list(dict.fromkeys(row["row"] for row in rows))
    first = names[0]
    iterations = sorted({row["iteration"] for row in rows})

    def at(curve, iteration):
        return [row["success"] for row in curve if row["iteration"] == iteration]

    def area_until(curve, last):
        return area([(x["iteration"], x["success"]) for x in curve if x["iteration"] <= last])

    def compared(name, other):
        """(differences at the last iteration that both have, those by minute, those of the areas up
        to that iteration), of shared seeds."""
        by_iteration, by_minute, of_areas = [], [], []
        for seed in sorted({*curves[name]} & {*curves[other]}):
            both = curves[name][seed], curves[other][seed]
            last = min(curve[-1]["iteration"] for curve in both)
            ours, theirs = (at(curve, last) for curve in both)
            by_iteration += [x - y for x, y in zip(ours, theirs)]
            end = min(curve[-1]["seconds"] for curve in both)
            ours, theirs = (interpolated(curve, end) for curve in both)
            by_minute.append(ours - theirs)
            ours, theirs = (area_until(curve, last) for curve in both)
            of_areas.append(ours - theirs)
        return by_iteration, by_minute, of_areas

    def measured(name, key):
        """The mean of every seed."""
        of_seeds = [[row[key] for row in curve if key in row] for curve in curves[name].values()]
        return [sum(values) / len(values) for values in of_seeds if values]

    ceiling = " ".join(["truth", *first.split()[1:]])  # with the flags of the first row
    gained = compared(ceiling, first)[0] if ceiling in curves else []
    room = sum(gained) / len(gained) if gained else 0.0
    titles = ["row", "seeds", *[f"success at {i}" for i in iterations]]
    titles += ["a new seed", f"more than {first}", "share of truth's gain", "at equal time"]
    titles += [
        "area",
        f"more area than {first}",
        "A with truth",
        "A^S with truth",
        "new pairs ranked right",
        "skill",
    ]
    titles += ["credit share of A^E", "seconds an iteration"]
    shows = [not columns or title.startswith(columns) for title in titles]
    lines = [titles, ["---"] * len(titles)]
    for name in names:
        gain, by_minute, of_areas = compared(name, first)
        cells = [f"`{name}`", str(len(curves[name]))]
        cells += [shown([x for c in curves[name].values() for x in at(c, i)]) for i in iterations]
        cells.append(new_run([curve[-1]["success"] for curve in curves[name].values()]))
        cells.append("" if name == first else shown(gain))
        cells.append(f"{sum(gain) / len(gain) / room:.2f}" if room > 0 and gain else "")
        cells.append("" if name == first else shown(by_minute))
        cells.append(shown([area_until(c, c[-1]["iteration"]) for c in curves[name].values()]))
        cells.append("" if name == first else shown(of_areas))
        cells += [shown(measured(name, key)) for key in LOGGED]
        ends = [curve[-1] for curve in curves[name].values()]
        cells.append(shown([row["seconds"] / row["iteration"] for row in ends]))
        lines.append(cells)
    kept = [[cell for cell, show in zip(cells, shows) if show] for cells in lines]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in kept) + "\n"


def interpolated(curve: list[dict], second: float) -> float:
    """Success at this second of training."""
    import numpy

    return float(numpy.interp(second, *zip(*((row["seconds"], row["success"]) for row in curve))))


def picture(rows: list[dict], path: Path) -> None:
    """Success by iteration and by minute: means over seeds, with their 95 % intervals."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(11, 4.6), sharey=True, layout="constrained")
    for number, name in enumerate(dict.fromkeys(row["row"] for row in rows)):
        style = dict(color=f"C{number % 10}", linestyle=("-", "--")[number // 10 % 2])
        points = {}
        for row in rows:
            if row["row"] == name:
                points.setdefault(row["iteration"], []).append(row)
        iterations = sorted(points)
        minutes = [sum(r["seconds"] for r in points[i]) / len(points[i]) / 60 for i in iterations]
        spread = [interval([r["success"] for r in points[i]]) for i in iterations]
        means = [mean for mean, _ in spread]
        halves = [0.0 if math.isnan(half) else half for _, half in spread]
        for axis, x in zip(axes, (iterations, minutes)):
            axis.plot(x, means, marker="o", markersize=3, label=name, **style)
            low, high = ([m + sign * h for m, h in zip(means, halves)] for sign in (-1, 1))
            axis.fill_between(x, low, high, color=style["color"], alpha=0.15, linewidth=0)
    axes[0].set(xlabel="iteration", ylabel="success", ylim=(0, 1))
    axes[1].set(xlabel="minutes of training")
    named = axes[0].get_legend_handles_labels()
    figure.legend(*named, loc="outside lower center", ncols=4, fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def write_results(name: str, rows: list[dict]) -> str:
    """NAME.md and NAME.png of these rows, and the former's text."""
    text = table(rows)
    (RESULTS / f"{name}.md").write_text(text)
    picture(rows, RESULTS / f"{name}.png")
    return text


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--name", default="credit", help="Name of the result files (default: credit).")
    add("--world", choices=WORLDS, default="crossings", help="Default: crossings.")
    add("--rows", nargs="+", default=ROWS, help=f"With their flags (default: {' '.join(ROWS)}).")
    add("--flags", default="", help="Flags of every row, which override those of this file.")
    add("--seeds", type=int, nargs="+", default=[1], help="Seeds of each row (default: 1).")
    add("--table", action="store_true", help="Make table and picture of the rows.")
    runs = ROOT / "runs" / "credit"
    add("--runs-dir", type=Path, default=runs, help="Directory of the runs.")
    add("--work", help=argparse.SUPPRESS)  # this row, in this process
    args, flags = parser.parse_known_args()
    if args.work:
        return work(args.work, args.world, [word for word in flags if word != "--"], args.runs_dir)
    if flags:
        parser.error(f"unknown: {' '.join(flags)}")
    if args.world != "crossings" and not args.table and "truth" in " ".join(args.rows).split():
        parser.error(f"--rows truth: the true advantage is not known on {args.world}")

    from runtime.saving.files import append, rows_of

    args.runs_dir.mkdir(parents=True, exist_ok=True)
    kept = RESULTS / f"{args.name}.jsonl"
    done = {(row["row"], row["seed"]) for row in rows_of(kept)}
    for seed, row in [] if args.table else product(args.seeds, args.rows):
        if (row, seed) not in done:
            found = run_row(row, args.world, seed, args.runs_dir, shlex.split(args.flags))
            append(kept, [json.dumps(evaluation) for evaluation in found])
            success, seconds = found[-1]["success"], found[-1]["seconds"]
            print(f"{row} seed {seed}: {success:.3f} in {seconds:.0f} s", flush=True)
    print(write_results(args.name, rows_of(kept)))


if __name__ == "__main__":
    main()
