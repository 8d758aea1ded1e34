"""Taking up the last whole checkpoint of a run, and setting damaged ones aside."""

import shutil
import sys
from pathlib import Path

from runtime.data import Step, Trajectory
from runtime.distributed import processes
from runtime.models import first_line
from runtime.networks import Network
from runtime.saving import checkpoints
from runtime.saving.checkpoints import DamagedError, install, kept_in, told_when_full
from runtime.saving.files import append, hash_file, lines_of, read_json, replace_file
from runtime.view.terminal import warn

import torch
from safetensors import safe_open


def load_checkpoint(run: Path, networks: list[Network], lists: dict) -> tuple[int, list[dict]]:
    """Take up the run's last whole checkpoint, or none: (its iteration, the rows of metrics.jsonl
    up to it). Damaged ones are set aside. Exits with one line that names the file where none is
    whole, or where one was written by another version or for another model. Of several processes
    the first one reads and cleans up."""
    is_first, iteration, rows = processes.rank() == 0, 0, None
    path, about = processes.broadcast(last_whole(run) if is_first else None)
    if path:
        iteration = about["iteration"]
        for network in networks:
            install(path / "trained.safetensors", network)
            network.skips = about["skipped"].get(network.name, 0)
        for name, given in lists.items():
            given[:] = about["lists"][name]
    if is_first:
        with told_when_full(run):
            for name in ("episodes.jsonl", "eval_episodes.jsonl", "metrics.jsonl"):  # the last one
                rows = cut_table(run / name, iteration if path else -1)
            if path:
                checkpoints.link(run, path, checkpoints.best_of(rows))
    return iteration, processes.broadcast(rows)


def cut_table(table: Path, last: int) -> list[dict]:
    """Leave the rows up to an iteration in a table of the run, and return them. Others go to
    replaced-*.jsonl, and lines that are no rows to *.damaged, with a warning that says what is
    missing."""
    kept, again, damaged = [], [], []
    for line, row in lines_of(table):
        part = damaged if row is None else kept if row["iteration"] <= last else again
        part.append((line, row))
    aside = f"{table.name}.damaged", f"replaced-{table.name}"
    for name, part in zip(aside, (damaged, again)):
        if part:
            append(table.with_name(name), [line for line, _ in part])
    replace_file(table, "".join(f"{line}\n" for line, _ in kept))
    rows, said = [row for _, row in kept], []
    if damaged:
        said.append(f"{len(damaged)} lines cannot be read; they are kept in {aside[0]}")
    if last < 0 and any(row["iteration"] for _, row in again):
        said.append(f"no checkpoint is there, so the run begins again; they are in {aside[1]}")
    lost = sorted({*range(last + 1)} - {row["iteration"] for row in rows})
    if lost and table.name == "metrics.jsonl":
        said.append(f"iterations without a row: {', '.join(map(str, lost))}")
    if said:
        warn(f"{table}: {'; '.join(said)}")
    return rows


def last_whole(run: Path) -> tuple[Path | None, dict]:
    """(path, state.json and lists) of the last whole checkpoint, or (None, {}); damaged ones after
    it are set aside."""
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
    """state.json of a checkpoint, with its lists, every file compared with its hash. Raises
    DamagedError with the file's name; exits where another version wrote it."""
    state = path / "state.json"
    try:
        about = read_json(state)
        number, written = about["format"], about.pop("sum")
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise DamagedError(f"{state}: missing, cut off or not a checkpoint's") from error
    if number != checkpoints.FORMAT:
        reads = f"this version reads {checkpoints.FORMAT}"
        sys.exit(f"{state}: written in format {number}, {reads}")
    if checkpoints.sum_of(about) != written:
        raise DamagedError(f"{state}: not what was written (its hash differs)")
    for name, (size, digest) in about["files"].items():
        file = path / name
        if not file.is_file() or file.stat().st_size != size or hash_file(file) != digest:
            raise DamagedError(f"{file}: missing, or not what was written (its hash differs)")
    try:  # a pickle that a hash vouches for runs no program either
        with safe_open(path / "trained.safetensors", framework="pt"):
            about["lists"] = {}
        if checkpoints.LISTS in about["files"]:
            with torch.serialization.safe_globals([Step, Trajectory]):
                about["lists"] = torch.load(path / checkpoints.LISTS, weights_only=True)
    except Exception as error:  # each library has its own
        raise DamagedError(f"{path}: {first_line(error)}") from error
    return about
