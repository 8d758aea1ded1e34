"""What every script does beside its algorithm: refuse bad arguments, write a run's directory, take it up again.

    runs/NAME/args.json         the arguments
    runs/NAME/metrics.jsonl     a row per iteration; iteration 0 is the evaluation before training
    runs/NAME/episodes.jsonl    a row per trajectory: every step's text, validity, rewards and advantage
    runs/NAME/curve.png         success and return, against iterations and against minutes of training
    runs/NAME/policy, prm       links into the last checkpoint: Hugging Face format, for from_pretrained
    runs/NAME/checkpoints/N/    policy, prm and trained.safetensors (parameters and moments, for --resume)

It stands here because it is the same in all scripts, and nothing of it changes what is learnt.
"""

import json
import os
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

import matplotlib
import torch
from safetensors.torch import load_file, save_file
from tqdm import tqdm
from transformers import AutoConfig
from transformers.utils import logging

logging.disable_progress_bar()  # a bar for each checkpoint would hide the run's own
matplotlib.use("Agg")
import matplotlib.pyplot as plt

POSITIVE = (
    "iterations tasks_per_iteration max_steps max_action_tokens max_context_tokens minibatches micro_batch_tokens "
    "eval_every eval_tasks eval_samples save_every engine_memory lr_halving prm_lora_rank prm_steps"
).split()
NOT_NEGATIVE = (
    "history policy_lora_rank eval_temperature engine_correction learning_rate prm_learning_rate beta".split()
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
    for name, reason in wrong:
        sys.exit(f"--{name.replace('_', '-')} {getattr(args, name)}: {reason}")
    if args.resume and not Path(args.resume, "checkpoints").is_dir():
        sys.exit(f"--resume {args.resume}: no run there")
    try:
        Path(args.runs_dir, f".{os.getpid()}").mkdir(parents=True)
        Path(args.runs_dir, f".{os.getpid()}").rmdir()
    except OSError as error:
        sys.exit(f"--runs-dir {args.runs_dir}: cannot be written ({error.strerror})")
    places = Path(args.model), Path(__file__).parent.parent / args.model
    path = next((str(place.resolve()) for place in places if place.is_dir()), args.model)
    try:
        longest = AutoConfig.from_pretrained(path).max_position_embeddings
    except Exception as error:  # the hub's, the file system's and the configuration's errors have no common class
        sys.exit(f"--model {args.model}: no model, in a directory or on the hub ({str(error).splitlines()[0]})")
    if args.max_context_tokens > longest:
        sys.exit(f"--max-context-tokens {args.max_context_tokens}: --model {args.model} was made for {longest}")
    return path


def save_checkpoint(run: Path, iteration: int, networks: dict, policy_weights: dict, tokenizer) -> None:
    """Write runs/NAME/checkpoints/N, whole or not at all, link runs/NAME/policy (and prm) to it, drop the older one.

    networks: {name: (model, optimizer)}; "policy" is saved as one dense network, {name: tensor}, the others as the
    LoRA adapter of their name. Trained parameters and their moments go to trained.safetensors as name.index[.moment].
    """
    path, draft, state = run / "checkpoints" / f"{iteration:06d}", run / "checkpoints" / "draft", {}
    shutil.rmtree(draft, ignore_errors=True)
    for name, (model, optimizer) in networks.items():
        if name == "policy":
            plain = model.get_base_model() if hasattr(model, "get_base_model") else model
            plain.save_pretrained(draft / name, state_dict=policy_weights)
        else:
            model.save_pretrained(draft, selected_adapters=[name])  # peft adds the adapter's name to the path
        for i, parameter in enumerate(optimizer.param_groups[0]["params"]):
            moments = {f"{name}.{i}.{key}": value for key, value in optimizer.state[parameter].items()}
            state |= {f"{name}.{i}": parameter.detach(), **moments}
    save_file(state, draft / "trained.safetensors")
    tokenizer.save_pretrained(draft / "policy")
    draft.rename(path)
    for name in networks:
        (run / "link").unlink(missing_ok=True)
        (run / "link").symlink_to(path.relative_to(run) / name)
        (run / "link").replace(run / name)
    for old in sorted((run / "checkpoints").iterdir())[:-1]:
        shutil.rmtree(old)


def load_checkpoint(run: Path, networks: dict, args: dict) -> tuple[int, list[dict]]:
    """Take up the run's last checkpoint: (its iteration, the rows of metrics.jsonl up to it). Later rows
    are dropped: these iterations come again. Flags that bear on the result must be those of the run."""
    path = max((run / "checkpoints").glob("[0-9]*"), default=None) or sys.exit(f"--resume {run}: no checkpoint there")
    saved, free = json.loads((run / "args.json").read_text()), "iterations resume run_name runs_dir track engine_memory"
    for name in args:
        if name not in f"{free} save_every eval_every".split() and args[name] != saved.get(name):
            sys.exit(f"--{name.replace('_', '-')} {args[name]}: the run to be resumed has {saved.get(name)}")
    for key, tensor in load_file(path / "trained.safetensors").items():
        name, i, *moment = key.split(".")
        parameter = networks[name][1].param_groups[0]["params"][int(i)]
        if moment:
            networks[name][1].state[parameter][moment[0]] = tensor.to("cpu" if moment == ["step"] else parameter.device)
        else:
            parameter.data.copy_(tensor)
    rows, iteration = [], int(path.name)
    for file in (run / "episodes.jsonl", run / "metrics.jsonl"):
        rows = [row for row in map(json.loads, file.read_text().splitlines()) if row["iteration"] <= iteration]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return iteration, rows


def record(run: Path, rows: list[dict], row: dict, board, trajectories=(), columns=None) -> None:
    """Append an iteration's row to rows, metrics.jsonl, the terminal, W&B (board) and curve.png; its trajectories to
    episodes.jsonl, where each step gets its entry of every column [S]."""
    rows.append(row)
    columns = {key: iter(values.tolist()) for key, values in (columns or {}).items()}
    with (run / "episodes.jsonl").open("a") as file:
        for t in trajectories:
            words = [{"observation": s.observation, "action": s.action, "valid": s.valid} for s in t.steps]
            numbers = [{"reward": s.reward} | {key: next(values) for key, values in columns.items()} for s in t.steps]
            episode = {"iteration": row["iteration"], "task": t.task, "outcome": t.outcome, "truncated": t.truncated}
            file.write(json.dumps(episode | {"steps": [w | n for w, n in zip(words, numbers)]}) + "\n")
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
    board.log(row)
    shown = "  ".join(f"{key} {row[key]:.3f}" for key in TERMINAL if row.get(key) is not None)
    tqdm.write(f"iteration {row['iteration']:4}  {row['time/elapsed']:6.0f} s  {shown}")
    draw_curve(rows, run)


def describe(trajectories: list, kind: str, env=None) -> dict:
    """What episodes were like: means over trajectories, valid_actions over steps, dead_groups over groups, and what the
    environment has to say of them (env.summary, of judges and partners)."""
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
