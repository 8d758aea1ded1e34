"""What episodes were like, the lines of the terminal, curve.png, and W&B."""

import hashlib
import os
from pathlib import Path

from runtime.distributed import fsdp, processes
from runtime.flags import shown
from runtime.saving.files import EPISODE_VERSION, replace_file, to_json
from runtime.view import viewer
from runtime.view.terminal import say, warn
from runtime.worlds import require, summary_of

import numpy as np
from tqdm import tqdm

TERMINAL = "train/success eval/success eval/goal train/valid_actions prm/pair_accuracy prm/skill"
CREDIT = {  # what curve.png says of a PRM
    "prm/pair_accuracy": "pairs ranked right",
    "prm/skill": "skill",
    "prm/credit_share": "credit share",
    "prm/advantage_progress_correlation": "correlation with progress",
}
STEP = {*"observation action valid reward progress tokens logprob picture".split()}  # of its own


def announce(run) -> None:
    args = run.args
    size = sum(p.numel() for n, p in run.policy_model.named_parameters() if ".prm" not in n) / 1e6
    where = f"{args.run_args.dtype} on {run.policy_model.device}"
    model = f"{size:.2f} M parameters, engine {run.engine_kind}, {where}"
    say(f"{run.script} on {run.env.name}: {model}, all goes to {run.path}")
    if processes.count() > 1:
        how = "sharded (FSDP)" if fsdp.wanted() else "a copy in each"
        say(f"{processes.count()} processes, the policy {how}; each has an engine and its tasks")


def describe(trajectories: list, kind: str, env=None, faults: int = 0) -> dict:
    """{kind/name: mean over trajectories; valid_actions over steps, dead_groups over groups}, with
    what the world says of them (env.summary) and success_error, the standard error over tasks."""
    groups = {}
    for t in trajectories:
        groups.setdefault(t.task, []).append(t)
    by_task = [np.mean([t.success for t in group]) for group in groups.values()]
    values = {
        "valid_actions": [step.valid for t in trajectories for step in t.steps],
        "success": [t.success for t in trajectories],
        "score": [t.score for t in trajectories],
        "truncated": [t.truncated for t in trajectories],
        "return": [sum(step.game_reward for step in t.steps) for t in trajectories],
        "episode_steps": [len(t.steps) for t in trajectories],
        "dead_groups": [len({np.float32(t.outcome) for t in g}) == 1 for g in groups.values()],
    }
    told, row = summary_of(env), {name: float(np.mean(of)) for name, of in values.items()}
    std = float(np.std(by_task, ddof=min(1, len(by_task) - 1)))
    row |= {"success_error": std / len(by_task) ** 0.5} | ({"faults": faults} if faults else {})
    for name in told.keys() & {*row, "faults", "cut"}:
        require(False, env, f"summary()[{name!r}]", told[name], "another name: this is the run's")
    return {f"{kind}/{key}": value for key, value in (told | row).items()}


def save_pictures(trajectories: list, run: Path, most: int) -> dict[bytes, str]:
    """{PNG: its path} of these episodes' pictures; each is written once, `most` in all, to run."""
    many, named = len([*run.glob("pictures/*.png")]), {}
    seen = (getattr(step.observation, "picture", None) for t in trajectories for step in t.steps)
    for png in dict.fromkeys(filter(None, seen)):
        name = f"pictures/{hashlib.sha256(png).hexdigest()[:16]}.png"
        if not (run / name).exists() and many < most:
            (run / "pictures").mkdir(exist_ok=True)
            replace_file(run / name, png)
            many += 1
        if (run / name).exists():
            named[png] = name
    return named


def episode_lines(row: dict, trajectories: list, columns: dict, pictures=None) -> list[str]:
    """A line of episodes.jsonl for each trajectory (docs/episodes.md); its steps get their entry of
    every column [S], and the path of their picture, null if it was not kept."""
    numbers = {name: iter(values.tolist()) for name, values in columns.items()}
    lines = []
    for t in trajectories:
        steps = []
        for step in t.steps:
            told = {"observation": step.observation, "action": step.action, "valid": step.valid}
            told |= {"reward": step.game_reward, "progress": step.progress}
            told |= {"tokens": len(step.engine_logprobs), "logprob": sum(step.engine_logprobs)}
            if t.pictures:
                told["picture"] = (pictures or {}).get(getattr(step.observation, "picture", None))
            steps.append(told | {name: next(values) for name, values in numbers.items()})
        episode = {"version": EPISODE_VERSION, "iteration": row["iteration"], "task": t.task}
        episode |= {"outcome": t.outcome, "success": t.success, "score": t.score}
        lines.append(to_json(episode | {"truncated": t.truncated, "steps": steps}))
    return lines


def open_board(path: Path, wandb_id: str, flags: dict, quiet: bool):
    """The W&B run of --track. Where W&B does not answer within seconds, an offline one."""
    import wandb

    options = dict(project="istar", name=path.name, id=wandb_id, resume="allow", config=flags)
    wait = {"init_timeout": 4.0, "finish_timeout": 60, "silent": quiet}  # seconds
    try:
        return wandb.init(**options, settings=wandb.Settings(**wait))
    except Exception as error:  # network, key and service have no common class
        secret, said = os.environ.get("WANDB_API_KEY") or "\n", str(error).split("\n")[0]
        way = "the run goes on as with WANDB_MODE=offline, and `wandb sync` sends it later"
        warn(f"--track: W&B cannot be had ({shown(said.replace(secret, '...'))}); {way}")
    wandb.teardown()  # its service holds the run half open
    return wandb.init(**options, mode="offline")


def show(row: dict, left: float | None) -> None:
    """The terminal's line of an iteration; left: the seconds that the others will take."""
    numbers = [f"{key} {row[key]:.3f}" for key in TERMINAL.split() if has(row, key)]
    head = f"iteration {row['iteration']:4}  {row['time/elapsed']:6.0f} s"
    ends = "" if left is None else f"{tqdm.format_interval(left)} left"
    say("  ".join([head, f"{ends:>12}", *numbers]))


def has(row: dict, *keys: str) -> bool:
    return all(row.get(key) is not None for key in keys)


def draw_curve(rows: list[dict], run: Path) -> None:
    """Draw curve.png, against iterations and minutes: success, return (or goal), a PRM's credit."""
    from matplotlib.figure import Figure

    lower = "goal" if any("eval/goal" in row for row in rows) else "return"
    panels = {  # {label of the axis: {key: label}}
        name: {f"{kind}/{name}": kind for kind in ("train", "eval")} for name in ("success", lower)
    }
    if credit := {key: of for key, of in CREDIT.items() if any(has(row, key) for row in rows)}:
        panels["credit"] = credit
    figure = Figure(figsize=(10, 3 * len(panels)))
    axes = figure.subplots(len(panels), 2, sharex="col", sharey="row")
    scales = [("iteration", 1, "iteration"), ("time/elapsed", 60, "minutes of training")]
    for pair, (name, lines) in zip(axes, panels.items()):
        for axis, (x, scale, label) in zip(pair, scales):
            for key, title in lines.items():
                seen = [(row[x] / scale, row[key]) for row in rows if has(row, x, key)]
                xs, ys = zip(*seen) if seen else ((), ())
                axis.plot(xs, ys, "o-" if title == "eval" else "-", label=title)
            axis.set(xlabel=label, ylabel=name)
        pair[0].legend(fontsize="small")
    figure.suptitle(run.name, parse_math=False)
    figure.savefig(run / "curve.png")


def summary(run) -> None:
    """Print success on the tasks that evaluate, before and after, and the world's own measures."""
    given, env = run.args.run_args, run.eval_env
    panel = f"{given.eval_tasks} {given.eval_set} tasks x {given.eval_samples} samples"
    say(f"{env.name}, {panel} at temperature {given.eval_temperature}")
    say("iterations   minutes   success (standard error)   score")
    keys = "time/elapsed", "eval/success", "eval/success_error", "eval/score"
    evaluated = [row for row in run.rows if has(row, *keys)]
    ends = evaluated[:1] + evaluated[1:][-1:]
    for row in ends:
        seconds, success, error, score = (row[key] for key in keys)
        mean = f"{success:.3f} ({error:.3f})".ljust(24)
        say(f"{row['iteration']:10} {seconds / 60:9.1f}   {mean}   {score:.3f}")
    for key in getattr(env, "measures", ()):
        if all(has(row, f"eval/{key}") for row in ends):
            say(f"{key}: " + " -> ".join(f"{row[f'eval/{key}']:.2f}" for row in ends))


def write_page(run) -> None:
    """Write the run's page and say where it is. A page that cannot be written ends no run."""
    try:
        if processes.rank() == 0:
            say(f"the run as a page: {viewer.write_page([run.path])}")
    except (OSError, SystemExit) as error:
        warn(f"{run.path}/view.html was not written ({getattr(error, 'strerror', error)})")
