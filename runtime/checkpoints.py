"""Checkpoints that are whole or absent, and taking them up again.

    runs/NAME/checkpoints/N/    policy, prm, trained.safetensors (parameters and moments) and
                                state.json, which is written last and has size and SHA-256 of all
    runs/NAME/policy, prm       links into the last checkpoint: Hugging Face format
    runs/NAME/best              link to the policy of the best evaluation

A checkpoint is written under another name, synced to the disk and renamed. Nothing but safetensors
and JSON is read. What an iteration draws depends on (seed, iteration) alone, so there are no random
states to be kept: a run that was killed and taken up again gives what it would have given.
"""

import errno
import hashlib
import json
import shutil
import sys
from contextlib import contextmanager
from pathlib import Path

from runtime import processes
from runtime.files import (
    append,
    copy_aside,
    hash_file,
    read_json,
    read_rows,
    replace_file,
    sync,
    to_json,
    write_json,
)
from runtime.networks import Network, assert_finite, is_adapted, plain, policy_weights
from runtime.terminal import say, warn

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

FORMAT = 1  # of a checkpoint
REPLAY = "replay.safetensors"
FULL = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)  # no space, a file or a quota at its limit


class DamagedError(Exception):
    """A checkpoint that is not what was written."""


def best_of(rows: list[dict], known: list | None = None) -> tuple[int, float] | None:
    """(iteration, score) of the best evaluation after training began: SOTOPIA's goal, else success;
    the first of equal ones. None before there is one. known: that of a checkpoint, whose row may be
    lost."""
    key = "eval/goal" if any("eval/goal" in row for row in rows) else "eval/success"
    seen = [
        (row["iteration"], row[key])
        for row in rows
        if row["iteration"] and row.get(key) is not None
    ]
    if known:
        seen.append((known[0], known[1]))
    return max(seen, key=lambda best: (best[1], -best[0]), default=None)


def best_kept(run: Path) -> list | None:
    """What the run's last checkpoint knows of the best evaluation."""
    kept = kept_in(run)
    return read_json(kept[-1] / "state.json")["best"] if kept else None


def save_checkpoint(
    run: Path, rows: list[dict], networks: list[Network], tokenizer, args, replay=None
) -> None:
    """Write runs/NAME/checkpoints/N, N the iteration of the last row, where one is due: every
    --save-every iterations, after the last one, and after the best evaluation. The last --keep and
    the best are kept.

    The network "policy" is saved as one dense model, the others as the adapter of their name, or as
    the model that they are. replay: the runtime.replay.Replay of a script that has one.
    Trained parameters and their moments go to trained.safetensors as name.index[.moment]. Raises
    FloatingPointError where a parameter is not finite: such a network is not kept. Of several
    processes the first one writes; of a sharded policy the others have parts to give."""
    iteration, best = rows[-1]["iteration"], best_of(rows, best_kept(run))
    always = (args.iterations, best and best[0])
    if iteration % args.run_args.save_every and iteration not in always:
        return

    state = {}
    for network in networks:
        state |= state_of(network)
    dense = {}  # {name: weights} of the policy, and of what is no adapter
    for network in networks:
        if network.name == "policy" or not is_adapted(network.model):
            dense[network.name] = dict(policy_weights(network.model))
    if processes.rank():
        return

    path = run / "checkpoints" / f"{iteration:06d}"
    draft = run / "checkpoints" / "draft"
    if draft.is_symlink():
        draft.unlink()
    shutil.rmtree(draft, ignore_errors=True)
    try:
        assert_finite(state.items())
        tokenizer.save_pretrained(draft / "policy")
        for network in networks:
            if network.name in dense:
                model, weights = plain(network.model), dense[network.name]
                model.save_pretrained(draft / network.name, state_dict=weights)
                if hasattr(model, "picture_processor"):
                    model.picture_processor.processor.save_pretrained(draft / network.name)
            else:  # peft adds the adapter's name to the path
                network.model.save_pretrained(draft, selected_adapters=[network.name])
        if replay:
            replay.save(draft / REPLAY)
        save_file(state, draft / "trained.safetensors")
        skips = {network.name: network.skips for network in networks}
        describe_files(draft, {"iteration": iteration, "best": best, "skipped": skips})
        draft.rename(path)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise

    sync(path.parent)
    link(run, path, networks, best)
    for old in kept_in(run)[: -args.run_args.keep]:
        if not (best and int(old.name) == best[0]):
            shutil.rmtree(old)


def state_of(network: Network) -> dict:
    """A network's trained parameters and their moments, {name.index[.moment]: whole tensor}."""
    state = {}
    for i, parameter in enumerate(network.trained):
        key = f"{network.name}.{i}"
        state[key] = processes.whole(parameter.detach())
        for moment, value in network.optimizer.state[parameter].items():
            state[f"{key}.{moment}"] = processes.whole(value)
    return state


def describe_files(draft: Path, about: dict) -> None:
    """Write state.json, with size and SHA-256 of every file, and see all of it on the disk."""
    files = sorted(path for path in draft.rglob("*") if path.is_file())
    sums = {str(path.relative_to(draft)): [path.stat().st_size, hash_file(path)] for path in files}
    about = {"format": FORMAT, **about, "files": sums}
    write_json(draft / "state.json", about | {"sum": sum_of(about)})
    for path in files:
        sync(path)
    for path in draft.rglob("*"):
        if path.is_dir():
            sync(path)


def kept_in(run: Path) -> list[Path]:
    """The run's checkpoints, the oldest first; a draft and damaged ones are none."""
    return sorted((run / "checkpoints").glob("[0-9]" * 6))


def sum_of(about: dict) -> str:
    return hashlib.sha256(to_json(about).encode()).hexdigest()


def link(run: Path, path: Path, networks: list[Network], best: tuple[int, float] | None) -> None:
    """Point runs/NAME/policy (prm) at the checkpoint, and runs/NAME/best at the best one's
    policy."""
    links = {network.name: path / network.name for network in networks}
    if best and (path.parent / f"{best[0]:06d}").is_dir():
        links["best"] = path.parent / f"{best[0]:06d}" / "policy"
    for name, target in links.items():
        (run / ".link").unlink(missing_ok=True)
        (run / ".link").symlink_to(target.relative_to(run))
        (run / ".link").replace(run / name)


def load_checkpoint(run: Path, networks: list[Network], replay=None) -> tuple[int, list[dict]]:
    """Take up the run's last whole checkpoint: (its iteration, the rows of metrics.jsonl up to it),
    (0, []) of a run that was stopped before its first. Later rows come again: what they were goes
    to replaced-metrics.jsonl and replaced-episodes.jsonl.

    A damaged checkpoint is set aside as N.damaged with a warning, and the one before it is taken.
    So is a copy of a table in which more is damaged than a torn last line: its other rows are read.
    Exits with one line that names the file where none is whole, or where one was written by a newer
    version or for another model. Of several processes the first one reads and cleans up before the
    others read."""
    if processes.rank():
        processes.wait()
    if (run / "checkpoints" / "draft").exists():
        unfinished = "a checkpoint that was being written when the run stopped; left out"
        say(f"{run}/checkpoints/draft: {unfinished}")
        shutil.rmtree(run / "checkpoints" / "draft")

    path, about, tensors = last_whole(run)
    iteration, rows = 0, []
    if path:
        iteration = int(path.name)
        for network in networks:
            install(path / "trained.safetensors", tensors, network)
            network.skips = about["skipped"].get(network.name, 0)
        if replay:
            replay.load(path / REPLAY)
    with told_when_full(run):
        for name in ("episodes.jsonl", "eval_episodes.jsonl", "metrics.jsonl"):
            rows, unreadable = read_rows(run / name)
            if processes.rank() == 0:
                keep_damaged(run / name, rows, unreadable, path)
            again = [row for row in rows if path and row["iteration"] > iteration]
            rows = [row for row in rows if path and row["iteration"] <= iteration]
            if processes.rank() == 0:
                if again:  # they come again; what they were is kept
                    append(run / f"replaced-{name}", map(json.dumps, again))
                replace_file(run / name, "".join(f"{json.dumps(row)}\n" for row in rows))
        if path and processes.rank() == 0:
            link(run, path, networks, best_of(rows, about["best"]))

    if processes.rank() == 0:
        processes.wait()
    return iteration, rows


def keep_damaged(table: Path, rows: list[dict], unreadable: int, checkpoint: Path | None) -> None:
    """Warn of what is missing in a table of the run that goes on from this checkpoint, and keep a
    copy of it where it cannot be read, or where the run begins again."""
    said = []
    if unreadable:
        said.append(f"{unreadable} lines cannot be read; the file is kept as ")
        said[-1] += f"{copy_aside(table).name}, its other {len(rows)} rows are read"
    elif rows and not checkpoint and rows[-1]["iteration"]:
        said.append("no checkpoint is there, so the run begins again; the file is kept as ")
        said[-1] += copy_aside(table).name
    lost = set(range(int(checkpoint.name) + 1) if checkpoint else ())
    lost -= {row["iteration"] for row in rows}
    if table.name == "metrics.jsonl" and lost:
        said.append(f"iterations without a row: {', '.join(map(str, sorted(lost)))}")
    if said:
        warn(f"{table}: {'; '.join(said)}")


def last_whole(run: Path) -> tuple[Path | None, dict, dict]:
    """(path, state.json, tensors) of the last checkpoint that is what was written; damaged ones
    after it are set aside. No checkpoint: (None, {}, {})."""
    damaged, reason = [], None
    for path in reversed(kept_in(run)):
        try:
            about, tensors = read_checkpoint(path)
        except DamagedError as error:
            reason = reason or error
            aside = f"{path.name} is set aside and the checkpoint before it taken"
            warn(f"{error}; {aside}")
            damaged.append(path)
            continue
        for each in damaged:
            shutil.rmtree(each.with_suffix(".damaged"), ignore_errors=True)
            each.rename(each.with_suffix(".damaged"))
        return path, about, tensors

    if damaged:
        sys.exit(f"--resume {run}: {reason}; no other checkpoint is whole")
    return None, {}, {}


def read_checkpoint(path: Path) -> tuple[dict, dict]:
    """(state.json, tensors of trained.safetensors) of a checkpoint, every file of it compared with
    its hash. Raises DamagedError with the file's name; exits where a newer version wrote it."""
    state = path / "state.json"
    try:
        about = read_json(state)
        number, written = about["format"], about.pop("sum")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise DamagedError(f"{state}: missing, cut off or not a checkpoint's") from error
    if number != FORMAT:
        sys.exit(f"{state}: written in format {number}, this version reads {FORMAT}")
    if sum_of(about) != written:
        raise DamagedError(f"{state}: not what was written (its hash differs)")

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


def install(file: Path, tensors: dict, network: Network) -> None:
    """Copy a network's parameters and moments out of a checkpoint's tensors; exits where they are
    another model's."""
    name, parameters = network.name, network.trained
    here = {f"{name}.{i}": tuple(p.shape) for i, p in enumerate(parameters)}
    own = {key: tensor for key, tensor in tensors.items() if key.split(".")[0] == name}
    there = {key: tuple(t.shape) for key, t in own.items() if key.count(".") == 1}
    for key in sorted(here.keys() | there.keys()):
        if here.get(key) != there.get(key):
            shapes = f"{key} is {there.get(key)} there, {here.get(key)} here"
            sys.exit(f"{file}: of another model ({shapes})")

    for key, tensor in own.items():
        _, i, *moment = key.split(".")
        parameter = parameters[int(i)]
        if not moment:
            parameter.data.copy_(processes.part(tensor, parameter))
            continue
        if moment != ["step"]:  # that is a number, which stays on the CPU
            tensor = processes.part(tensor, parameter)
        network.optimizer.state[parameter][moment[0]] = tensor


@contextmanager
def told_when_full(run: Path):
    """Around what writes: a full disk, or a quota or a file at its limit, ends in one line. So does
    a file of the run that cannot be written for another reason."""
    try:
        yield
    except Exception as error:  # libraries in Rust raise plain exceptions
        in_text = any(f"os error {code}" in str(error) for code in FULL)
        if getattr(error, "errno", None) in FULL or in_text:
            full = f"the disk is full ({error}){how_to_go_on(run)}"
            sys.exit(f"\nstopped: {full}, when there is space again")
        inside = isinstance(error, OSError) and error.filename is not None
        if not inside or not Path(error.filename).absolute().is_relative_to(run.absolute()):
            raise
        sys.exit(f"\nstopped: {error.filename}: {error.strerror}{how_to_go_on(run)}")


def has_rows(run: Path) -> bool:
    """Whether the run has finished so much as its first evaluation."""
    table = run / "metrics.jsonl"
    return table.exists() and table.stat().st_size > 0


def how_to_go_on(run: Path) -> str:
    """What is kept of a run, and how to take it up."""
    if kept := kept_in(run):
        return f": iteration {int(kept[-1].name)} is kept in {run}; go on with --resume {run}"
    if has_rows(run):
        return f": no iteration was finished; begin it again with --resume {run}"
    return ": nothing was finished, and nothing is kept; start again"
