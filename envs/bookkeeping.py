"""What every script does beside its algorithm: refuse bad arguments, say what a run is doing and what came of it.

    runs/NAME/metrics.jsonl     a row per iteration; iteration 0 is the evaluation before training
    runs/NAME/episodes.jsonl    a row per trajectory: every step's text, validity, rewards and advantage
    runs/NAME/curve.png         success and return, against iterations and against minutes of training

Checkpoints, --resume and what happens when something fails: checkpoints.py. Both stand here because they are the same
in all scripts, and nothing of them changes what is learnt.
"""

import os
import sys
from importlib.util import find_spec
from pathlib import Path

import matplotlib
import torch
from safetensors import SafetensorError, safe_open
from tqdm import tqdm
from transformers import AutoConfig
from transformers.utils import logging

from envs import processes
from envs.checkpoints import append, faults, to_json

logging.disable_progress_bar()  # a bar for each checkpoint would hide the run's own
matplotlib.use("Agg")
import matplotlib.pyplot as plt

POSITIVE = (
    "iterations tasks_per_iteration max_steps max_action_tokens max_context_tokens minibatches micro_batch_tokens "
    "eval_every eval_tasks eval_samples save_every keep engine_memory lr_halving prm_lora_rank prm_steps "
    "critic_lora_rank"
).split()
NOT_NEGATIVE = (
    "history policy_lora_rank eval_temperature engine_correction learning_rate prm_learning_rate beta "
    "critic_learning_rate value_clip gamma gae_lambda step_gamma step_weight".split()
)
TERMINAL = "train/success eval/success eval/goal train/valid_actions prm/pair_accuracy prm/drift".split()


def check(args, env) -> str:
    """The directory (or hub name) of --model; exits with one line that names the flag where arguments cannot work.

    Nothing is loaded but the model's configuration. Every script's Args is accepted: what it lacks is not checked.
    """
    least = dict.fromkeys(POSITIVE, 1) | dict.fromkeys(NOT_NEGATIVE, 0) | {"group_size": 2}
    wrong = [(name, f"has to be at least {n}") for name, n in least.items() if getattr(args, name, n) < n]
    if args.temperature <= 0:
        wrong.append(("temperature", "training samples, so it is above 0; --eval-temperature may be 0 (greedy)"))
    if args.top_p != 1:
        wrong.append(("top_p", "stays 1: the gradient is that of the full softmax, so sampling must be too"))
    if args.eval_tasks > len(env.eval_tasks):
        wrong.append(("eval_tasks", f"the panel of {env.name} has {len(env.eval_tasks)}"))
    if args.tasks_per_iteration > len(env.train_tasks):
        wrong.append(("tasks_per_iteration", f"{env.name} has {len(env.train_tasks)} training tasks"))
    if args.engine == "vllm" and not find_spec("vllm"):
        wrong.append(("engine", "vllm is not installed; --engine hf needs nothing more"))
    if getattr(args, "granularity", "step") == "token":  # each token has an advantage of its own
        if args.ratio != "token":
            wrong.append(
                ("ratio", "--granularity token has an advantage for each token, so the ratio is of tokens too")
            )
        if args.step_reward == "ground-truth" or args.merge_rewards:
            wrong.append(("granularity", "not with --step-reward ground-truth or --merge-rewards, which are of steps"))
    for name, reason in wrong:
        sys.exit(f"--{name.replace('_', '-')} {getattr(args, name)}: {reason}")
    try:
        Path(args.runs_dir, f".{os.getpid()}").mkdir(parents=True)
        Path(args.runs_dir, f".{os.getpid()}").rmdir()
    except OSError as error:
        sys.exit(f"--runs-dir {args.runs_dir}: cannot be written ({error.strerror})")
    places = Path(args.model), Path(__file__).parent.parent / args.model
    path = next((str(place.resolve()) for place in places if place.is_dir()), args.model)
    try:
        trust = getattr(args, "trust_remote_code", False)
        longest = AutoConfig.from_pretrained(path, trust_remote_code=trust).max_position_embeddings
    except Exception as error:  # the hub's, the file system's and the configuration's errors have no common class
        if "trust_remote_code" in str(error):
            sys.exit(f"--model {args.model}: it brings a program of its own, which only --trust-remote-code runs")
        sys.exit(f"--model {args.model}: no model, in a directory or on the hub ({str(error).splitlines()[0]})")
    files = sorted(Path(path).glob("*.safetensors")) if Path(path).is_dir() else []
    if Path(path).is_dir() and not files:
        sys.exit(f"--model {args.model}: no .safetensors file there, and pickles (.bin) are not read")
    for file in files:
        try:
            safe_open(file, framework="pt").keys()
        except (SafetensorError, OSError) as error:
            sys.exit(f"--model {args.model}: {file.name} is no safetensors file ({error})")
    if trust:
        print(f"warning: --trust-remote-code runs whatever program comes with {args.model}", file=sys.stderr)
    if args.max_context_tokens > longest:
        sys.exit(f"--max-context-tokens {args.max_context_tokens}: --model {args.model} was made for {longest}")
    return path


def announce(script: str, env, policy, kind: str, args, run: Path) -> None:
    """Say what a run is and what an iteration costs at most."""
    number, size = args.tasks_per_iteration * args.group_size, sum(p.numel() for p in policy.parameters()) / 1e6
    sampled, scored = number * args.max_steps * args.max_action_tokens, number * args.max_context_tokens
    print(f"{script} on {env.name}: {size:.2f} M parameters, engine {kind}, {policy.device}, all goes to {run}")
    if processes.count() > 1:
        how = "sharded (FSDP)" if processes.sharded() else "a copy in each"
        print(f"{processes.count()} processes, the policy {how}: each has an engine and a share of the tasks")
    print(f"an iteration: {number} episodes, at most {sampled:,} tokens sampled, {scored:,} in the trainer", flush=True)


def spent(laps: dict[str, float], rows: list[dict]) -> dict:
    """Seconds of an iteration by its parts, from the clock at the end of each (the first entry: at the start), and of
    training since it began, without evaluation."""
    names = [*laps]
    row = {f"time/{name}": laps[name] - laps[last] for last, name in zip(names, names[1:])}
    total = laps[names[-1]] - laps[names[0]]
    return row | {"time/total": total, "time/elapsed": rows[-1]["time/elapsed"] + total}


def record(run: Path, rows: list[dict], row: dict, board, trajectories=(), columns=None) -> None:
    """Append an iteration's row to rows, metrics.jsonl, the terminal, W&B (board) and curve.png; its trajectories to
    episodes.jsonl, where each step gets its entry of every column [S]. Of several processes the first one writes."""
    rows.append(row)
    if processes.rank():
        return
    columns = {key: iter(values.tolist()) for key, values in (columns or {}).items()}
    episodes = []
    for t in trajectories:
        words = [{"observation": s.observation, "action": s.action, "valid": s.valid} for s in t.steps]
        numbers = [{"reward": s.reward} | {key: next(values) for key, values in columns.items()} for s in t.steps]
        episode = {"iteration": row["iteration"], "task": t.task, "outcome": t.outcome, "truncated": t.truncated}
        episodes.append(to_json(episode | {"steps": [w | n for w, n in zip(words, numbers)]}))
    append(run / "episodes.jsonl", episodes)
    append(run / "metrics.jsonl", [to_json(row)])
    board.log(row, step=row["iteration"])
    shown = "  ".join(f"{key} {row[key]:.3f}" for key in TERMINAL if row.get(key) is not None)
    tqdm.write(f"iteration {row['iteration']:4}  {row['time/elapsed']:6.0f} s  {shown}")
    draw_curve(rows, run)


def describe(trajectories: list, kind: str, env=None) -> dict:
    """What episodes were like: means over trajectories, valid_actions over steps, dead_groups over groups, and what the
    environment has to say of them (env.summary, of judges and partners). faults, where there were any: episodes whose
    environment raised."""
    groups = {}
    for t in trajectories:
        groups.setdefault(t.task, []).append(t)
    values = {"valid_actions": [step.valid for t in trajectories for step in t.steps]}
    values |= {key: [getattr(t, key) for t in trajectories] for key in ("success", "score", "truncated")}
    values["return"] = [sum(step.reward for step in t.steps) for t in trajectories]
    values["episode_steps"] = [len(t.steps) for t in trajectories]
    values["dead_groups"] = [len({t.outcome for t in group}) == 1 for group in groups.values()]
    by_task = torch.tensor([sum(t.success for t in group) / len(group) for group in groups.values()])
    error = by_task.std(correction=min(1, len(by_task) - 1)).item() / len(by_task) ** 0.5  # of the mean, over tasks
    row = {key: sum(v) / len(v) for key, v in values.items()} | {"success_error": error}
    (raised,) = processes.total([faults.pop("environment", 0)])
    row |= {"faults": raised} if raised else {}
    return {f"{kind}/{key}": value for key, value in (row | getattr(env, "summary", dict)()).items()}


def draw_curve(rows: list[dict], run: Path) -> None:
    """Success and return (SOTOPIA: goal), in training and evaluation, against iterations and minutes of training."""
    lower = "goal" if "eval/goal" in rows[0] else "return"
    figure, axes = plt.subplots(2, 2, figsize=(10, 6), sharex="col", sharey="row")
    for column, (x, scale, label) in enumerate((("iteration", 1, "iteration"), ("time/elapsed", 60, "minutes"))):
        for axis, key in zip(axes[:, column], ("success", lower)):
            for kind, style in (("train", "-"), ("eval", "o-")):
                seen = [row for row in rows if f"{kind}/{key}" in row]
                axis.plot([r[x] / scale for r in seen], [r[f"{kind}/{key}"] for r in seen], style, label=kind)
            axis.set(xlabel=f"{label} of training" if column else label, ylabel=key)
    axes[0, 0].legend()
    figure.suptitle(run.name)
    figure.savefig(run / "curve.png")
    plt.close(figure)


def report(env, rows: list[dict], args) -> None:
    """Success on the panel before and after, with the standard error over its tasks; SOTOPIA's goal and dimensions."""
    exam = getattr(env, "exam", env)
    print(f"{exam.name}, {args.eval_tasks} tasks x {args.eval_samples} samples at temperature {args.eval_temperature}")
    print("iterations   minutes   success (standard error)   score")
    evaluated = [row for row in rows if "eval/success" in row]
    ends = evaluated[:1] + evaluated[1:][-1:]
    for row in ends:
        success = f"{row['eval/success']:.3f} ({row['eval/success_error']:.3f})"
        print(f"{row['iteration']:10} {row['time/elapsed'] / 60:9.1f}   {success:24}   {row['eval/score']:.3f}")
    for key in getattr(exam, "measures", ()):
        if all(f"eval/{key}" in row for row in ends):
            print(f"{key}: {' -> '.join(format(row[f'eval/{key}'], '.2f') for row in ends)}")
