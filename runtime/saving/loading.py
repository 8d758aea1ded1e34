"""Taking up the last whole checkpoint of a run, and setting damaged ones aside."""

import json
import shutil
import sys
from pathlib import Path

from runtime.distributed import processes
from runtime.models import first_line
from runtime.networks import Network
from runtime.saving.checkpoints import (
    FORMAT,
    LISTS,
    DamagedError,
    best_of,
    install,
    kept_in,
    link,
    sum_of,
    taken_up,
    told_when_full,
)
from runtime.saving.files import append, copy_aside, hash_file, read_json, read_rows, replace_file
from runtime.view.terminal import say, warn

import torch
from safetensors import safe_open


def load_checkpoint(
    run: Path, networks: list[Network], lists: dict[str, list]
) -> tuple[int, list[dict]]:
    """Take up the run's last whole checkpoint: (its iteration, the rows of metrics.jsonl up to it),
    (0, []) of a run that was stopped before its first. Later rows come again; what they were goes
    to replaced-*.jsonl.

    A damaged checkpoint is set aside as N.damaged with a warning, and the one before it is taken.
    Exits with one line that names the file where none is whole, or where one was written by a newer
    version or for another model. Of several processes the first one cleans up before the others
    read."""
    found = None
    if processes.rank() == 0:
        draft = run / "checkpoints" / "draft"
        if draft.exists():
            say(f"{draft}: a checkpoint that was being written when the run stopped; left out")
            shutil.rmtree(draft)
        found = last_whole(run)

    path, about = processes.broadcast(found)
    iteration, rows = 0, []
    if path:
        iteration = int(path.name)
        for network in networks:
            install(path / "trained.safetensors", network)
            network.skips = about["skipped"].get(network.name, 0)
        for name, given in lists.items():
            given[:] = taken_up(about["lists"][name])
    if processes.rank():
        processes.wait()
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
            names = [network.name for network in networks]
            link(run, path, names, best_of(rows, about["best"]))

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


def last_whole(run: Path) -> tuple[Path | None, dict]:
    """(path, state.json) of the last checkpoint that is what was written; damaged ones after it are
    set aside. No checkpoint: (None, {})."""
    damaged = {}  # {path: why}
    for path in reversed(kept_in(run)):
        try:
            about = read_checkpoint(path)
        except DamagedError as error:
            damaged[path] = error
            warn(f"{error}; {path.name} is set aside and the checkpoint before it taken")
            continue
        for each in damaged:
            shutil.rmtree(each.with_suffix(".damaged"), ignore_errors=True)
            each.rename(each.with_suffix(".damaged"))
        return path, about
    if damaged:
        sys.exit(f"--resume {run}: {[*damaged.values()][0]}; no other checkpoint is whole")
    return None, {}


def read_checkpoint(path: Path) -> dict:
    """state.json of a checkpoint, every file of it compared with its hash. Raises DamagedError with
    the file's name; exits where a newer version wrote it."""
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
        if not file.is_file() or file.stat().st_size != size or hash_file(file) != digest:
            raise DamagedError(f"{file}: missing, or not what was written (its hash differs)")
    try:  # a pickle that a hash vouches for runs no program either
        with safe_open(path / "trained.safetensors", framework="pt"):
            about["lists"] = {}
        if LISTS in about["files"]:
            about["lists"] = torch.load(path / LISTS, weights_only=True)
    except Exception as error:  # each library has its own
        raise DamagedError(f"{path}: {first_line(error)}") from error
    return about
