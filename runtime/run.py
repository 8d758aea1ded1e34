"""Run: a run's directory, rows, clock, seeds, evaluation and saving; and its clean ends.

    runs/NAME/run.json          each start: command, versions, git commit, hardware, hashes
    runs/NAME/args.json         the flags
    runs/NAME/metrics.jsonl     a row per iteration; iteration 0 is the evaluation before training
    runs/NAME/episodes.jsonl    a row per trajectory: each step's text, validity, rewards, advantage
    runs/NAME/pictures/         what the steps saw, where the world shows pictures: each once
    runs/NAME/curve.png         success and return, against iterations and minutes of training
    runs/NAME/checkpoints/      checkpoints.py
    runs/NAME/batch-N.json      what was trained on when losses stopped being finite

Nothing here changes what is learnt.
"""

import fcntl
import functools
import os
import random
import signal
import sys
import time
import traceback
import uuid
from dataclasses import asdict, is_dataclass
from importlib.util import find_spec
from pathlib import Path

from runtime import processes, report
from runtime.chat import Chat
from runtime.checkpoints import (
    how_to_go_on,
    kept_in,
    load_checkpoint,
    save_checkpoint,
    told_when_full,
)
from runtime.engines import HfEngine, VllmEngine
from runtime.files import append, read_json, to_json, write_json
from runtime.flags import check, flags_of
from runtime.networks import Network, add_adapter, plain
from runtime.pictures import read_seeing_model, shows_pictures
from runtime.provenance import provenance

import numpy as np
import torch

FREE = (  # flags that may change when a run is taken up: they do not bear on what is learnt
    "iterations resume override run_name runs_dir track engine_memory save_every eval_every keep"
).split()
GONE = {  # flags of earlier versions, and the values with which their runs go on unchanged
    "top_p": 1.0,
    "step_reward": "implicit",
    "merge_rewards": False,
    "granularity": "step",
}
current: list["Run"] = []  # the run that this process is at work in, for ends_cleanly


class Run:
    """What a script keeps of a run while it trains.

    eval_env, eval_tasks: the world that evaluates and the panel, each task --eval-samples times.
    is_new: nothing has been evaluated yet. path: the run's directory."""

    def __init__(self, args, env):
        self.args, self.env = args, env
        self.model_path = check(args, env)
        self.device = processes.start(args)
        self.script = Path(sys.argv[0]).stem
        self.eval_env = getattr(env, "eval_env", env)
        panel = self.eval_env.eval_tasks[: args.run_args.eval_tasks]
        self.eval_tasks = [task for task in panel for _ in range(args.run_args.eval_samples)]

        self.path, self.board = open_run(self)
        self.rows, self.row, self.networks = [], {}, []
        current[:] = [self]
        torch.manual_seed(args.seed)

    # ------------ models ------------

    @property
    def reading(self) -> dict:
        """How frozen weights are read: for transformers' from_pretrained."""
        run_args = self.args.run_args
        dtype = torch.bfloat16 if run_args.dtype == "bfloat16" else torch.float32
        trust = run_args.trust_remote_code
        return {"dtype": dtype, "use_safetensors": True, "trust_remote_code": trust}

    def load_policy(self):
        """(model, engine, chat): the policy of --model, with an adapter if --policy-lora-rank says
        so, divided between processes where FSDP is asked for; what samples from it; its tokens."""
        from transformers import AutoTokenizer
        from transformers.utils import logging

        logging.disable_progress_bar()  # a bar for each checkpoint would hide the run's own
        args, run_args = self.args, self.args.run_args
        trust = run_args.trust_remote_code
        dtype = torch.float32  # of weights that train, always
        if args.policy_lora_rank:
            dtype = self.reading["dtype"]
        model = self.read_model(dtype)
        self.tokenizer = AutoTokenizer.from_pretrained(self.model_path, trust_remote_code=trust)
        ends = model.generation_config.eos_token_id
        ends = ends if isinstance(ends, list) else [ends]
        stop_ids = sorted({self.tokenizer.eos_token_id, *ends} - {None})

        kind = run_args.engine
        if kind == "auto":
            kind = "vllm" if find_spec("vllm") else "hf"
        self.engine_kind = kind
        engines = {"vllm": VllmEngine, "hf": HfEngine}
        self.engine = engines[kind](self.model_path, stop_ids, args)

        if args.policy_lora_rank:
            model = add_adapter(model, "policy", args.policy_lora_rank)
        self.policy_model = processes.shard(model).to(self.device)
        processor = getattr(plain(self.policy_model), "picture_processor", None)
        return self.policy_model, self.engine, Chat(self.tokenizer, stop_ids, processor)

    def read_model(self, dtype: torch.dtype):
        """The causal language model of --model, one that sees where the world shows pictures."""
        from transformers import AutoModelForCausalLM

        reading = self.reading | {"dtype": dtype}
        if not shows_pictures(self.env):
            return AutoModelForCausalLM.from_pretrained(self.model_path, **reading)
        model = read_seeing_model(self.model_path, self.args.model, reading)
        if self.args.world.freeze_vision:
            model.base_model.visual.requires_grad_(False)
        return model

    def load_adapter(self, name: str, rank: int):
        """The initial model with a LoRA adapter of this name and rank. A LoRA policy has the same
        base: then the adapter is one more on it."""
        base = self.policy_model
        if not self.args.policy_lora_rank:
            base = self.read_model(self.reading["dtype"]).to(self.device)
        return add_adapter(base, name, rank)

    def resume(self, *networks: Network) -> None:
        """Say what the run is, and take up its last checkpoint if there is one."""
        self.networks = list(networks)
        report.announce(self)
        self.iteration, self.rows = load_checkpoint(self.path, self.networks)
        self.is_new = not self.iteration
        if self.is_new:
            self.row = {"iteration": 0, "time/elapsed": 0.0}
        torch.manual_seed(self.args.seed + processes.rank())

    # ------------ iterations ------------

    def iterations(self):
        """Yield the iterations that are left, each with its own seeds and a new row; then report.

        What an iteration draws depends on (seed, iteration) alone, and on nothing before it."""
        args = self.args
        last = 0 if args.run_args.eval_only else args.iterations
        for iteration in range(self.iteration + 1, last + 1):
            number = args.seed + 1_000_003 * iteration
            random.seed(f"{args.seed} {iteration}")
            torch.manual_seed(number + processes.rank())
            np.random.seed(number % 2**32)
            self.iteration, self.row = iteration, {"iteration": iteration}
            self.started = self.lapped = time.perf_counter()
            yield iteration
        report.summary(self)

    def lap(self, name: str) -> None:
        """Log the seconds since the last lap, or since the iteration began, as time/name."""
        now = time.perf_counter()
        self.row[f"time/{name}"] = now - self.lapped
        self.lapped = now

    def log(self, kind: str, values: dict) -> None:
        """Put values into the iteration's row, as kind/name; a later one replaces an earlier
        one."""
        self.row |= {f"{kind}/{name}": value for name, value in values.items()}

    def log_episodes(self, kind: str, trajectories: list) -> None:
        """Log what episodes were like, in training ("train") or on the panel ("eval")."""
        env = self.eval_env if kind == "eval" else self.env
        self.row |= report.describe(trajectories, kind, env)
        if kind == "train":
            sampled = sum(step >= 0 for t in trajectories for step in t.step_ids)
            trained = sum(len(t.token_ids) for t in trajectories)
            self.row |= {"tokens/rollout": sampled, "tokens/trained": trained}

    def evaluates(self, iteration: int) -> bool:
        """Whether the panel is played after this iteration."""
        last = iteration == self.args.iterations
        return last or iteration % self.args.run_args.eval_every == 0

    def save(self, trajectories: list = (), **columns: torch.Tensor) -> None:
        """Write the iteration's row, its episodes, whose steps get their entry of every column [S],
        the terminal's line, curve.png, and a checkpoint where one is due."""
        if self.iteration:
            total = self.lapped - self.started  # without evaluation
            elapsed = self.rows[-1]["time/elapsed"] + total
            self.row |= {"time/total": total, "time/elapsed": elapsed}
            self.row["engine/restarts"] = self.engine.restarts
        self.rows.append(self.row)
        if processes.rank() == 0:
            pictures = {}
            if shows_pictures(self.env):
                most = self.args.world.saved_pictures
                pictures = report.save_pictures(trajectories, self.path, most)
            lines = report.episode_lines(self.row, trajectories, columns, pictures)
            append(self.path / "episodes.jsonl", lines)
            append(self.path / "metrics.jsonl", [to_json(self.row)])
            self.board.log(self.row, step=self.row["iteration"])
            report.show(self.row)
            report.draw_curve(self.rows, self.path)
        if self.iteration:
            save_checkpoint(self.path, self.rows, self.networks, self.tokenizer, self.args)


class NoBoard:
    """What stands in for a W&B run without --track, so that logging never branches."""

    def log(self, row: dict, step: int) -> None:
        pass

    def finish(self) -> None:
        pass


# ------------ the start of a run ------------


def open_run(run: Run) -> tuple[Path, object]:
    """(directory, W&B run) of a new run, or of the one that --resume names. Writes args.json and
    run.json.

    `--resume auto` is for schedulers, which start the same command again: the run --run-name where
    there is one, else the newest unfinished run of this script with these flags, else a new run.
    Exits with one line where the run cannot be had: it does not exist, its flags differ, another
    process is at work in it. Of several processes the first one opens the run, and the others are
    told where it is."""
    path, board = None, NoBoard()
    if processes.rank() == 0:
        path, board = first_opens(run)
    run.args.run_args.resume, path = processes.broadcast((run.args.run_args.resume, path))
    return path, board


def first_opens(run: Run) -> tuple[Path, object]:
    """open_run in the first process."""
    args, run_args, script = run.args, run.args.run_args, run.script
    if run_args.resume == "auto":
        run_args.resume = str(find_run(args, script) or "")
        found = "nothing to go on with, a new run"
        if run_args.resume:
            found = f"goes on with {run_args.resume}"
        print(f"--resume auto: {found}")

    name = run_args.run_name or f"{script}-{args.seed}-{time.strftime('%Y%m%d-%H%M%S')}"
    path = Path(run_args.resume or Path(run_args.runs_dir, name))
    if run_args.resume and not (path / "args.json").is_file():
        sys.exit(f"--resume {run_args.resume}: no run there")
    if not run_args.resume and (path / "args.json").exists():
        there = f"{path} has a run already; --resume {path} goes on with it"
        sys.exit(f"--run-name {run_args.run_name}: {there}")

    (path / "checkpoints").mkdir(parents=True, exist_ok=True)
    starts = []
    if (path / "run.json").exists():
        starts = read_json(path / "run.json")["starts"]
    start = provenance(args, run.model_path, run.env, run.eval_env)
    if run_args.resume:
        refuse_other_flags(path, script, starts, start, args)
    run.lock = lock(path)
    wandb_id = starts[0]["wandb_id"] if starts else uuid.uuid4().hex[:8]
    starts.append({"script": script, "wandb_id": wandb_id, **start})
    with told_when_full(path):
        write_json(path / "run.json", {"starts": starts})
        write_json(path / "args.json", flags_of(args))
    if not run_args.track:
        return path, NoBoard()

    import wandb

    config = flags_of(args)
    return path, wandb.init(
        project="istar", name=path.name, id=wandb_id, resume="allow", config=config
    )


def find_run(args, script: str) -> Path | None:
    """The run that `--resume auto` goes on with."""
    run_args = args.run_args
    if run_args.run_name:
        named = Path(run_args.runs_dir, run_args.run_name)
        return named if (named / "args.json").exists() else None

    flags = {name: value for name, value in flags_of(args).items() if name not in FREE}
    paths = Path(run_args.runs_dir).glob("*/")
    for path in sorted(paths, key=lambda path: path.stat().st_mtime, reverse=True):
        try:
            saved, first = read_json(path / "args.json"), read_json(path / "run.json")["starts"][0]
        except (OSError, ValueError, KeyError):
            continue  # not a run, or one that never began
        last = max((int(kept.name) for kept in kept_in(path)), default=0)
        ours = first["script"] == script and flags.items() <= saved.items()
        if ours and last < args.iterations and not lost_flags(saved, args):
            return path
    return None


def refuse_other_flags(path: Path, script: str, starts: list, start: dict, args) -> None:
    """Exit with all flags that differ from the run's and are not named in --override."""
    saved, ours = read_json(path / "args.json"), flags_of(args)
    override = {name.replace("-", "_").strip("_") for name in args.run_args.override}
    if unknown := override - ours.keys():
        sys.exit(f"--override {' '.join(sorted(unknown))}: no such flag")
    if starts and starts[0]["script"] != script:
        sys.exit(f"--resume {path}: this run was made by {starts[0]['script']}.py")
    if lost := lost_flags(saved, args):
        began = f"another version of {script}.py began this run with {', '.join(lost)}"
        sys.exit(f"--resume {path}: {began}, which this one does not have")

    differ = []
    for name, value in ours.items():
        if name not in FREE and name not in override and value != saved.get(name):
            differ.append(f"--{name.replace('_', '-')} {value}, was {saved.get(name)}")
    if differ:
        advice = "give its flags, or name them in --override"
        sys.exit(f"--resume {path}: other flags than the run's ({', '.join(differ)}); {advice}")

    told = {
        "model": f"the files of --model {args.model}",
        "data": "the data",
        "panel": "the evaluation panel's tasks",
    }
    for what, words in told.items() if starts and not override else ():
        if starts[0]["hashes"][what] != start["hashes"][what]:
            other = f"{words} are not those that the run began with (their hash differs)"
            sys.exit(f"--resume {path}: {other}")


def lost_flags(saved: dict, args) -> list[str]:
    """The flags of a run that this version does not have, where their value meant something."""
    unknown = saved.keys() - flags_of(args).keys()
    lost = [name for name in unknown if name not in GONE or saved[name] != GONE[name]]
    return [f"--{name.replace('_', '-')} {saved[name]}" for name in sorted(lost)]


def lock(path: Path) -> int:
    """Keep other processes out of the run until the file that this returns is closed."""
    file = os.open(path / "lock", os.O_CREAT | os.O_RDWR, 0o644)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        sys.exit(f"{path}: another process is at work there")
    return file


# ------------ the end of a run ------------


def ends_cleanly(main):
    """Around a script's main: what stops the run leaves one line that says what is kept and how to
    go on. The W&B run is closed.

    Ctrl-C and SIGTERM (a scheduler's), a full disk, and losses or weights that are not finite, of
    which batch-N.json is left: the trajectories and tensors that main had. Other errors pass. Of
    several processes the first one tells."""

    @functools.wraps(main)
    def guarded():
        current.clear()
        before = signal.signal(signal.SIGTERM, raise_terminated)
        try:
            main()
        except BaseException as error:
            stop(current[0] if current else None, error)
        finally:
            signal.signal(signal.SIGTERM, before)
            for run in current:
                run.board.finish()
                if processes.rank() == 0:
                    os.close(run.lock)

    return guarded


def stop(run: Run | None, error: BaseException) -> None:
    """End the process with what a user has to know; pass on errors that nobody foresaw."""
    if run is None and isinstance(error, KeyboardInterrupt):
        sys.exit("\nstopped before a run began")
    if run is None:
        raise error

    if isinstance(error, KeyboardInterrupt):
        by = f" by {error}" if str(error) else ""
        sys.exit(processes.rank() or f"\nstopped{by}{how_to_go_on(run.path)}")

    if isinstance(error, FloatingPointError):
        if processes.rank():
            sys.exit(1)
        file = run.path / f"batch-{run.iteration:06d}.json"
        write_json(file, what_main_had(error))
        advice = "a smaller --learning-rate, named in --override, may help"
        where = f"the batch is in {file}{how_to_go_on(run.path)}"
        sys.exit(f"\nstopped: {error}; {where} ({advice})")

    with told_when_full(run.path):
        raise error


def what_main_had(error: BaseException) -> dict:
    """The tensors and trajectories among main's variables when an error passed through it."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    values = next(frame.f_locals for frame in frames if frame.f_code.co_name == "main")
    had = {}
    for name, value in values.items():
        if isinstance(value, torch.Tensor):
            had[name] = value.tolist()
        elif isinstance(value, list) and value and is_dataclass(value[0]):
            had[name] = [asdict(item) for item in value]
    return had


def raise_terminated(*_):
    raise KeyboardInterrupt("SIGTERM")
