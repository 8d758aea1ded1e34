"""What episodes were like, the lines of the terminal, and curve.png."""

import hashlib
from pathlib import Path

from runtime import processes
from runtime.files import to_json
from runtime.rounds import faults

import torch
from tqdm import tqdm

TERMINAL = (
    "train/success eval/success eval/goal train/valid_actions prm/pair_accuracy prm/drift".split()
)


def announce(run) -> None:
    """Say what a run is and what an iteration costs at most."""
    args = run.args
    size = sum(p.numel() for p in run.policy_model.parameters()) / 1e6
    model = f"{size:.2f} M parameters, engine {run.engine_kind}, {run.policy_model.device}"
    print(f"{run.script} on {run.env.name}: {model}, all goes to {run.path}")
    if processes.count() > 1:
        how = "sharded (FSDP)" if processes.sharded() else "a copy in each"
        parts = "each has an engine and a share of the tasks"
        print(f"{processes.count()} processes, the policy {how}: {parts}")

    episodes = args.tasks_per_iteration * args.group_size
    sampled = episodes * args.max_steps * args.max_action_tokens
    scored = episodes * args.max_context_tokens
    most = f"at most {sampled:,} tokens sampled, {scored:,} in the trainer"
    print(f"an iteration: {episodes} episodes, {most}", flush=True)


def describe(trajectories: list, kind: str, env=None) -> dict:
    """Means over trajectories; valid_actions over steps, dead_groups over groups; and what the
    world has to say of them (env.summary, of judges and partners).

    success_error is the standard error over tasks. faults, where there were any: episodes whose
    world raised."""
    groups = {}
    for t in trajectories:
        groups.setdefault(t.task, []).append(t)
    steps = [step for t in trajectories for step in t.steps]
    dead = [len({t.outcome for t in group}) == 1 for group in groups.values()]
    row = {
        "valid_actions": mean([step.valid for step in steps]),
        "success": mean([t.success for t in trajectories]),
        "score": mean([t.score for t in trajectories]),
        "truncated": mean([t.truncated for t in trajectories]),
        "return": mean([sum(step.game_reward for step in t.steps) for t in trajectories]),
        "episode_steps": mean([len(t.steps) for t in trajectories]),
        "dead_groups": mean(dead),
    }
    by_task = torch.tensor([mean([t.success for t in group]) for group in groups.values()])
    std = by_task.std(correction=min(1, len(by_task) - 1)).item()
    row["success_error"] = std / len(by_task) ** 0.5

    (raised,) = processes.total([faults.pop("environment", 0)])
    if raised:
        row["faults"] = raised
    if hasattr(env, "summary"):
        row |= env.summary()
    return {f"{kind}/{key}": value for key, value in row.items()}


def mean(values: list) -> float:
    return sum(values) / len(values)


def seen_pictures(t) -> list[bytes]:
    """The PNG that each step of a trajectory of pictures answers: the last before its action."""
    firsts = [t.step_ids.index(step) for step in range(len(t.steps))]
    return [[png for place, png in t.pictures if place < first][-1] for first in firsts]


def save_pictures(trajectories: list, run: Path, most: int) -> dict[bytes, str]:
    """Write the pictures of these episodes to runs/NAME/pictures, each once, while there are at
    most so many: {PNG: its path in the run} of those that are there."""
    directory = run / "pictures"
    directory.mkdir(exist_ok=True)
    there = {f"pictures/{file.name}" for file in directory.glob("*.png")}
    named = {}
    for png in dict.fromkeys(png for t in trajectories for png in seen_pictures(t)):
        name = f"pictures/{hashlib.sha256(png).hexdigest()[:16]}.png"
        if name not in there and len(there) < most:
            (run / name).write_bytes(png)
            there.add(name)
        if name in there:
            named[png] = name
    return named


def episode_lines(row: dict, trajectories: list, columns: dict, pictures=None) -> list[str]:
    """A line of episodes.jsonl for each trajectory; its steps get their entry of every column
    [S], and where the world shows pictures the path of theirs, null if it was not kept."""
    numbers = {name: iter(values.tolist()) for name, values in columns.items()}
    lines = []
    for t in trajectories:
        steps = []
        seen = seen_pictures(t) if t.pictures else []
        for number, step in enumerate(t.steps):
            told = {"observation": step.observation, "action": step.action, "valid": step.valid}
            if seen:
                told["picture"] = (pictures or {}).get(seen[number])
            own = {name: next(values) for name, values in numbers.items()}
            steps.append(told | {"reward": step.game_reward} | own)
        episode = {
            "iteration": row["iteration"],
            "task": t.task,
            "outcome": t.outcome,
            "truncated": t.truncated,
            "steps": steps,
        }
        lines.append(to_json(episode))
    return lines


def show(row: dict) -> None:
    """The terminal's line of an iteration."""
    numbers = [f"{key} {row[key]:.3f}" for key in TERMINAL if row.get(key) is not None]
    head = f"iteration {row['iteration']:4}  {row['time/elapsed']:6.0f} s"
    tqdm.write("  ".join([head, *numbers]))


def draw_curve(rows: list[dict], run: Path) -> None:
    """Draw curve.png: success and return (SOTOPIA: goal), in training and evaluation, against
    iterations and minutes of training."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    lower = "goal" if "eval/goal" in rows[0] else "return"
    figure, axes = plt.subplots(2, 2, figsize=(10, 6), sharex="col", sharey="row")
    scales = [("iteration", 1, "iteration"), ("time/elapsed", 60, "minutes of training")]
    for column, (x, scale, label) in enumerate(scales):
        for axis, key in zip(axes[:, column], ("success", lower)):
            for kind, style in (("train", "-"), ("eval", "o-")):
                seen = [row for row in rows if f"{kind}/{key}" in row]
                xs = [row[x] / scale for row in seen]
                axis.plot(xs, [row[f"{kind}/{key}"] for row in seen], style, label=kind)
            axis.set(xlabel=label, ylabel=key)
    axes[0, 0].legend()
    figure.suptitle(run.name)
    figure.savefig(run / "curve.png")
    plt.close(figure)


def summary(run) -> None:
    """Print success on the panel before and after, with the standard error over its tasks, and the
    world's own measures (SOTOPIA's goal and dimensions)."""
    run_args, env = run.args.run_args, run.eval_env
    panel = f"{run_args.eval_tasks} tasks x {run_args.eval_samples} samples"
    print(f"{env.name}, {panel} at temperature {run_args.eval_temperature}")
    print("iterations   minutes   success (standard error)   score")
    evaluated = [row for row in run.rows if "eval/success" in row]
    ends = evaluated[:1] + evaluated[1:][-1:]
    for row in ends:
        success = f"{row['eval/success']:.3f} ({row['eval/success_error']:.3f})"
        when = f"{row['iteration']:10} {row['time/elapsed'] / 60:9.1f}"
        print(f"{when}   {success:24}   {row['eval/score']:.3f}")
    for key in getattr(env, "measures", ()):
        if all(f"eval/{key}" in row for row in ends):
            values = " -> ".join(f"{row[f'eval/{key}']:.2f}" for row in ends)
            print(f"{key}: {values}")
