"""Checkpoints that are whole or absent, and taking them up again; docs/resume.md has the files. A
thread hashes, syncs and renames them, while the run goes on."""

import hashlib
import io
import os
import shutil
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from copy import copy
from dataclasses import replace
from pathlib import Path

from runtime.data import Step, Trajectory
from runtime.distributed import fsdp, processes
from runtime.networks import Network, adapter_weights, assert_finite, dense_weights, is_adapted
from runtime.saving import files
from runtime.view.terminal import warn

import torch
from safetensors import safe_open
from safetensors.torch import save_file

FORMAT = 3  # of a checkpoint
LISTS = "lists.pt"  # what a script keeps beside its networks
CHEAP = 2**30  # [bytes] a smaller checkpoint is written after every iteration
SHARE = 0.05  # of the run's time, what larger ones may take, if --save-every does not say
writer = ThreadPoolExecutor(1, "checkpoint")
unfinished: list[Future] = []  # the checkpoint that the thread is at work on


class DamagedError(Exception):
    """A checkpoint that is not what was written."""


def best_of(rows: list[dict]) -> int | None:
    """The first iteration with the best evaluation, by SOTOPIA's goal, else success; or None."""
    key = "eval/goal" if any("eval/goal" in row for row in rows) else "eval/success"
    seen = [row for row in rows if row["iteration"] and row.get(key) is not None]
    return max(seen, key=lambda row: row[key])["iteration"] if seen else None


def save_checkpoint(
    run: Path, rows: list[dict], networks: list[Network], tokenizer, args, lists: dict[str, list]
) -> None:
    """Write runs/NAME/checkpoints/N, N the iteration of the last row, where one is due. A new best
    evaluation in between leaves the dense policy alone in exported/N, or a checkpoint where the
    policy is an adapter. All processes call it; it is on the disk after finish_saving(). Parameters
    and moments are named name.index[.moment]; lists: numbers and groups of episodes. Raises
    FloatingPointError where a parameter is not finite."""
    finish_saving()
    began, iteration, is_first = time.perf_counter(), rows[-1]["iteration"], processes.rank() == 0
    draft, best = run / "checkpoints" / "draft", best_of(rows)
    policy = next(network for network in networks if network.name == "policy")
    if is_first:
        shutil.rmtree(draft, ignore_errors=True)  # of a run that was stopped
    ends = iteration == args.iterations or (iteration == best and is_adapted(policy.model))
    is_whole = processes.broadcast(is_first and (ends or is_due(run, rows, args)))
    if not is_whole and iteration != best:
        return
    parts = {}  # {name.index[.moment]: tensor, or this process's part of it}
    for network in networks:
        for i, parameter in enumerate(network.trained):
            moments = network.optimizer.state[parameter] if network.optimizer else {}
            parts[f"{network.name}.{i}"] = parameter.detach()
            parts |= {f"{network.name}.{i}.{name}": moment for name, moment in moments.items()}
    own = {key: fsdp.local(part).contiguous() for key, part in parts.items() if fsdp.is_own(part)}
    assert_finite(own.items())
    if not is_whole:
        write_dense(draft, policy, tokenizer, args)
        if is_first:
            path = run / "exported" / f"{iteration:06d}"
            unfinished.append(writer.submit(put, draft, path, run, best))
        return
    for network in networks:
        if is_adapted(network.model):
            write_adapter(draft / network.name, network.model, network.name)
        else:
            write_dense(draft / network.name, network, tokenizer, args)
    if is_first and lists:
        torch.save({name: kept(entries) for name, entries in lists.items()}, whole := io.BytesIO())
        files.write(draft / LISTS, "wb", whole.getbuffer())
    if own:
        draft.mkdir(exist_ok=True)  # a network's file system may not show the first one's yet
        file = draft / f"trained{'' if is_first else f'-{processes.rank():05d}'}.safetensors"
        save_file(own, file)
        if os.environ.get("GROUP_RANK", "0") != "0":  # another machine: its own has to sync it
            files.sync(file)
    processes.wait()  # all files are there
    if is_first:
        took = time.perf_counter() - began
        skips = {network.name: network.skips for network in networks}
        about = {"format": FORMAT, "iteration": iteration, "skipped": skips, "seconds": took}
        unfinished.append(writer.submit(finish_checkpoint, run, about, best, args.run_args.keep))


def is_due(run: Path, rows: list[dict], args) -> bool:
    """Whether the last row's iteration is one of --save-every; where that is 0, whether the last
    checkpoint was small, or has cost at most SHARE of the time in which the run trained since."""
    if args.run_args.save_every:
        return rows[-1]["iteration"] % args.run_args.save_every == 0
    if not kept_in(run):
        return True
    about = files.read_json(kept_in(run)[-1] / "state.json")
    since = sum(r.get("time/total", 0.0) for r in rows if r["iteration"] > about["iteration"])
    is_small = sum(size for size, _ in about["files"].values()) < CHEAP
    return is_small or about["seconds"] <= SHARE * since


def finish_checkpoint(run: Path, about: dict, best: int | None, keep: int) -> None:
    """Make the draft a checkpoint: state.json with all hashes, its name, the links; old ones go."""
    draft = run / "checkpoints" / "draft"
    found = sorted(path for path in draft.rglob("*") if path.is_file())
    with ThreadPoolExecutor() as threads:  # each process's file in a thread
        sums = zip(found, threads.map(files.hash_file, found))
    about |= {"files": {str(p.relative_to(draft)): [p.stat().st_size, sha] for p, sha in sums}}
    files.write_json(draft / "state.json", about | {"sum": sum_of(about)})
    number, exported = f"{about['iteration']:06d}", run / "exported"
    shutil.rmtree(exported / number, ignore_errors=True)  # of one that was damaged
    put(draft, draft.with_name(number), run, best)
    for old in (*kept_in(run)[:-keep], *exported.glob("[0-9]*")):
        if int(old.name) != best:
            shutil.rmtree(old)


def put(draft: Path, path: Path, run: Path, best: int | None) -> None:
    """Give a draft the place of a directory, once all of it is on the disk, and link to it."""
    for each in (*draft.rglob("*"), draft):
        files.sync(each)
    path.parent.mkdir(exist_ok=True)
    shutil.rmtree(path, ignore_errors=True)
    draft.rename(path)
    files.sync(path.parent)
    link(run, best)


def finish_saving() -> None:
    """Wait until the last checkpoint is on the disk; raises what stopped it."""
    while unfinished:
        wait(unfinished)
        unfinished.pop().result()


def kept(item):
    """What a checkpoint keeps of an entry of a script's list: of episodes their tokens."""
    if isinstance(item, list):
        return [kept(each) for each in item]
    if not isinstance(item, Trajectory):
        return item
    steps = [Step("", "", [], valid=s.valid, progress=s.progress) for s in item.steps]
    return replace(item, steps=steps, anchor=None)


def write_adapter(path: Path, model, name: str, every_rank: bool = False) -> None:
    """Write an adapter as peft's files, by the first process or by each to a path of its own."""
    weights = adapter_weights(model, name)
    if every_rank or processes.rank() == 0:
        path.mkdir(parents=True, exist_ok=True)
        save_file(weights, path / "adapter_model.safetensors")
        config = copy(model.peft_config[name])
        if name != "policy":  # it belongs on the policy of its time, not on --model
            config.base_model_name_or_path = None
        config.save_pretrained(path)


def write_dense(path: Path, network: Network, tokenizer, args) -> None:
    """Write the policy as one dense network in --dtype, as --model reads it. All processes call."""
    causal, weights = network.plain, dense_weights(network.model, args.run_args.dtype)
    if processes.rank():
        return
    shutil.rmtree(path, ignore_errors=True)  # of a start that was killed
    causal.save_pretrained(path, state_dict=weights)
    config = files.read_json(path / "config.json")
    files.write_json(path / "config.json", config | {"dtype": args.run_args.dtype})
    tokenizer.save_pretrained(path)
    if hasattr(causal, "picture_processor"):
        causal.picture_processor.processor.save_pretrained(path)


def export_policy(run: Path, rows: list[dict], networks: list[Network], tokenizer, args) -> None:
    """Write the last and the best LoRA policy as dense models, each once, with links to them."""
    finish_saving()
    policy = next(network for network in networks if network.name == "policy")
    if processes.rank() or not kept_in(run) or not is_adapted(policy.model):
        return
    last, best, exported = kept_in(run)[-1], best_of(rows), run / "exported"
    for name in (path.name for path in kept_in(run) if path == last or int(path.name) == best):
        if not (exported / name).is_dir():
            install(last.with_name(name), policy)
            write_dense(last.with_name("draft"), policy, tokenizer, args)
            put(last.with_name("draft"), exported / name, run, best)
    install(last, policy)


def kept_in(run: Path) -> list[Path]:
    """The run's checkpoints, the oldest first; a draft and damaged ones are none."""
    return sorted((run / "checkpoints").glob("[0-9]" * 6))


def sum_of(about: dict) -> str:
    return hashlib.sha256(files.to_json(about).encode()).hexdigest()


def link(run: Path, best: int | None) -> None:
    """Point runs/NAME/policy, prm and best at the last and best networks, or at their exports."""
    links = {p.name: p for last in kept_in(run)[-1:] for p in last.iterdir() if p.is_dir()}
    if best:
        links["best"] = run / "checkpoints" / f"{best:06d}" / "policy"
    for name, target in links.items():
        exported = run / "exported" / target.parent.name
        if target.name == "policy" and exported.is_dir():
            target = exported
        if target.is_dir():
            (run / ".link").unlink(missing_ok=True)
            (run / ".link").symlink_to(target.relative_to(run))
            (run / ".link").replace(run / name)


def install(path: Path, network: Network) -> None:
    """Copy a network's parameters and moments out of a checkpoint, tensor by tensor, this process's
    rows of each; exits where they are another model's."""
    name, state = network.name, getattr(network.optimizer, "state", {})
    here = {f"{name}.{i}": tuple(p.shape) for i, p in enumerate(network.trained)}
    first, pieces = path / "trained.safetensors", {}  # {key: its rows in each file, not read yet}
    for file in (first, *sorted(path.glob("trained-*.safetensors"))):
        with safe_open(file, framework="pt") as tensors:
            for key in tensors.keys():
                if key.split(".")[0] == name:
                    pieces.setdefault(key, []).append(tensors.get_tensor(key))
    weights = {key: found for key, found in pieces.items() if key.count(".") == 1}
    there = {key: (sum(map(len, p)), *p[0].shape[1:]) for key, p in weights.items()}
    if other := here.items() ^ there.items():
        key, _ = min(other)
        shapes = f"{key} is {there.get(key)} there, {here.get(key)} here"
        sys.exit(f"{first}: of another model or version ({shapes})")
    for key, found in pieces.items():
        _, i, *moment = key.split(".")
        target = parameter = network.trained[int(i)]
        if moment == ["step"]:  # a number, on the CPU unless the optimiser is fused
            step, fused = found[0].clone(), network.optimizer.param_groups[0].get("fused")
            state[parameter]["step"] = step.to(parameter.device) if fused else step
            continue
        if moment:
            target = torch.empty_like(parameter, dtype=found[0].dtype, requires_grad=False)
            state[parameter][moment[0]] = target
        own, rows = [], fsdp.rows(parameter)
        for piece in found:
            own.append(piece[rows[(rows >= 0) & (rows < len(piece))]])
            rows -= len(piece)
        fsdp.local(target.detach()).copy_(torch.cat(own))
        if hasattr(target, "rounded"):
            target.rounded.detach().copy_(target)


def load_checkpoint(run: Path, networks: list[Network], lists: dict) -> tuple[int, list[dict]]:
    """Take up the run's last whole checkpoint, or none: (its iteration, the rows of metrics.jsonl
    up to it). Exits, naming the file, where none is whole or one is of another version or model."""
    is_first, iteration, rows = processes.rank() == 0, 0, None
    path, about = processes.broadcast(last_whole(run) if is_first else None)
    if path:
        iteration = about["iteration"]
        for network in networks:
            install(path, network)
            network.skips = about["skipped"].get(network.name, 0)
        for name, given in lists.items():
            given[:] = about["lists"].get(name, given)  # of an edited script it may be new
    if is_first:
        for name in ("episodes.jsonl", "eval_episodes.jsonl", "metrics.jsonl"):  # the last one
            rows = cut_table(run / name, iteration if path else -1)
        if path:
            link(run, best_of(rows))
    return iteration, processes.broadcast(rows)


def cut_table(table: Path, last: int) -> list[dict]:
    """Leave the rows up to an iteration in a table of the run, and return them. Others go to
    replaced-*.jsonl, and lines that are no rows to *.damaged, with a warning."""
    kept, again, damaged = [], [], []
    for line, row in files.lines_of(table):
        part = damaged if row is None else kept if row["iteration"] <= last else again
        part.append((line, row))
    aside = f"{table.name}.damaged", f"replaced-{table.name}"
    for name, part in zip(aside, (damaged, again)):
        if part:
            files.append(table.with_name(name), [line for line, _ in part])
    files.replace_file(table, "".join(f"{line}\n" for line, _ in kept))
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
    """(path, state.json and lists) of the last whole checkpoint, or (None, {})."""
    damaged = {}  # {path: why}
    for path in reversed(kept_in(run)):
        try:
            about = read_checkpoint(path)
        except DamagedError as error:
            damaged[path] = error
            continue
        for each, why in damaged.items():
            warn(f"{why}; {each.name} is set aside and an earlier checkpoint taken")
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
        about = files.read_json(state)
        number, written = about["format"], about.pop("sum")
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise DamagedError(f"{state}: missing, cut off or not a checkpoint's") from error
    if number != FORMAT:
        sys.exit(f"{state}: written in format {number}, this version reads {FORMAT}")
    if sum_of(about) != written:
        raise DamagedError(f"{state}: not what was written (its hash differs)")
    for name, (size, digest) in about["files"].items():
        file = path / name
        if not file.is_file() or file.stat().st_size != size or files.hash_file(file) != digest:
            raise DamagedError(f"{file}: missing, or not what was written (its hash differs)")
    about["lists"] = {}
    if LISTS in about["files"]:
        with torch.serialization.safe_globals([Step, Trajectory]):  # a forged one runs no program
            about["lists"] = torch.load(path / LISTS, weights_only=True)
    return about


def how_to_go_on(run: Path) -> str:
    if kept := kept_in(run):
        return f": iteration {int(kept[-1].name)} is kept in {run}; go on with --resume {run}"
    if files.rows_of(run / "metrics.jsonl"):
        return f": no iteration was finished; begin it again with --resume {run}"
    return ": nothing was finished, and nothing is kept; start again"
