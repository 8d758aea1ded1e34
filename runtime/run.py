"""Run: a run's directory, rows, clock, seeds, evaluation and saving; and its clean ends.

    runs/NAME/run.json          each start: command, versions, git commit, hardware, hashes
    runs/NAME/args.json         the flags
    runs/NAME/metrics.jsonl     a row per iteration; iteration 0 is the evaluation before training
    runs/NAME/episodes.jsonl    a row per trajectory: each step's text, validity, rewards, advantage
    runs/NAME/eval_episodes.jsonl    the same of the evaluation panel, without advantages
    runs/NAME/view.html         the run as a page, at its end: viewer.py
    runs/NAME/pictures/         what the steps saw, where the world shows pictures: each once
    runs/NAME/curve.png         success, return and credit, against iterations and minutes
    runs/NAME/checkpoints/      checkpoints.py
    runs/NAME/engine/           the policy's weights for the servers of --engine-url, meanwhile
    runs/NAME/batch-N.json      what was trained on when losses stopped being finite

Nothing here changes what is learnt.
"""

import contextlib
import functools
import math
import os
import random
import shutil
import signal
import socket
import sys
import time
import traceback
import uuid
from dataclasses import asdict, is_dataclass
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

from runtime.data import batch_logprobs
from runtime.distributed import processes
from runtime.engines import EngineError, HfEngine, VllmEngine
from runtime.engines.servers import RemoteEngine
from runtime.flags import check, evaluation_tasks, flags_of, refuse, shown
from runtime.memory import tell_if_too_much
from runtime.models import (
    ModelError,
    check_directory,
    read_causal_model,
    read_chat,
    read_tokenizer,
    stop_ids_of,
)
from runtime.networks import Network, add_adapter, initial, plain, recompute_layers
from runtime.replay import Replay
from runtime.saving.checkpoints import (
    DamagedError,
    export_policy,
    finish_saving,
    has_rows,
    how_to_go_on,
    kept_in,
    load_checkpoint,
    save_checkpoint,
    told_when_full,
)
from runtime.saving.files import append, lock, read_json, to_json, write_json
from runtime.saving.provenance import peak_memory, provenance
from runtime.statistics import WINDOW
from runtime.view import report, terminal
from runtime.vision.pictures import read_seeing_model, shows_pictures

import numpy as np
import torch
from torch.optim import AdamW

ANSWERS_WITHIN = 4.0  # seconds; W&B's client asks twice
FREE = (  # flags that may change when a run is taken up: they do not bear on what is learnt
    "iterations resume override run_name runs_dir track quiet "
    "engine_memory engine_gpu_share engine_url save_every eval_every keep saved_pictures "
    "gradient_checkpointing"
).split()
NO_MEMORY = "can't allocate memory"  # torch, on a CPU
GONE = {  # flags of earlier versions, and the values with which their runs go on unchanged
    "top_p": 1.0,
    "step_reward": "implicit",
    "merge_rewards": False,
    "granularity": "step",
}
TOLD = {  # hashes of run.json: what they are of
    "model": "the files of --model {}",
    "data": "the data",
    "panel": "the evaluation panel's tasks",
}
current: list["Run"] = []  # the run that this process is at work in, for ends_cleanly


class Run:
    """What a script keeps of a run while it trains.

    eval_env, eval_tasks: the world that evaluates and the panel, each task --eval-samples times.
    is_new: nothing has been evaluated yet. path: the run's directory."""

    def __init__(self, args, env):
        self.args, self.env = args, env
        self.model_path, config = check(args, env)
        self.device = processes.start(args)
        terminal.begin(args.run_args.quiet)
        cards, card = processes.count() if processes.sharded() else 1, None
        if self.device.type == "cuda":
            card = torch.cuda.get_device_properties(self.device).total_memory
        tell_if_too_much(config, args, cards, card)
        self.script = Path(sys.argv[0]).stem
        self.eval_env = getattr(env, "eval_env", env)
        tasks = evaluation_tasks(env, args.run_args.eval_set)
        panel = tasks[: args.run_args.eval_tasks]
        self.eval_tasks = [task for task in panel for _ in range(args.run_args.eval_samples)]

        self.rows, self.row, self.networks = [], {}, []
        self.path, self.board, self.lock, self.began = None, NoBoard(), None, []
        self.starts = []  # of run.json, this one included
        self.panel = []  # episodes of the evaluation, until they are saved
        self.begun = 0.0, 0  # when this start began its iterations, and after which
        current[:] = [self]
        open_run(self)
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
        from transformers.utils import logging

        logging.disable_progress_bar()  # a bar for each checkpoint would hide the run's own
        args, run_args = self.args, self.args.run_args
        trust = run_args.trust_remote_code
        model = self.read_model(whole=not args.policy_lora_rank)
        try:
            self.tokenizer = read_tokenizer(self.model_path, model, trust)
            processor = getattr(model, "picture_processor", None)
            stop_ids = stop_ids_of(model, self.tokenizer)
            chat = read_chat(self.tokenizer, stop_ids, args.model, processor)
        except ModelError as error:
            refuse("model", args.model, str(error))

        kind = run_args.engine
        if kind == "auto":
            kind = "vllm" if find_spec("vllm") else "hf"
        if run_args.engine_url:
            kind = "servers"
        self.engine_kind = kind
        servers = functools.partial(RemoteEngine, self.path / "engine")
        engines = {"vllm": VllmEngine, "hf": HfEngine, "servers": servers}
        try:
            self.engine = engines[kind](self.model_path, chat.stop_ids, args)
        except EngineError as error:
            if kind == "servers":
                refuse("engine_url", " ".join(run_args.engine_url), str(error))
            refuse("engine", kind, f"{error}; --engine hf needs nothing more")

        if args.policy_lora_rank:
            model = add_adapter(model, "policy", args.policy_lora_rank)
            if kind == "vllm" and run_args.dtype != "float32":
                rounds = f"vLLM samples with base + adapter rounded to {run_args.dtype}"
                gap = "which small updates do not survive (policy/engine_gap)"
                way = "--engine hf and --engine-url add the adapter itself"
                terminal.warn(f"--policy-lora-rank: {rounds}, {gap}; {way}")
        self.policy_model = processes.shard(model, run_args.dtype).to(self.device)
        return self.policy_model, self.engine, chat

    def read_model(self, whole: bool, flag: str = "model"):
        """The causal language model that a flag names, one that sees where the world shows
        pictures. Weights that train as a whole are float32 always, frozen ones have the precision
        of --dtype."""
        reading = self.reading | ({"dtype": torch.float32} if whole else {})
        given = getattr(self.args, flag)
        path = self.model_path if flag == "model" else given
        try:
            if flag != "model":  # whose files were looked at before anything else
                check_directory(Path(path))
            if not shows_pictures(self.env):
                return read_causal_model(path, **reading)
            model = read_seeing_model(path, given, reading)
        except ModelError as error:
            refuse(flag, given, str(error))
        if self.args.world.freeze_vision:
            model.base_model.visual.requires_grad_(False)
        return model

    def load_frozen(self, flag: str) -> Network:
        """The model that a flag names, as a network that is asked and never trained; flags but
        --model name a directory. Exits where there is none, or none with the policy's tokens."""
        given = getattr(self.args, flag)
        if flag != "model" and not os.path.isdir(given):
            refuse(flag, given, "this is neither a value that --help names nor a directory")
        model = self.read_model(whole=False, flag=flag).to(self.device)
        ours, theirs = (m.config.vocab_size for m in (plain(self.policy_model), model))
        if ours != theirs:
            refuse(flag, given, f"a vocabulary of {theirs} tokens, and --model has {ours}")
        return Network(flag, model, AdamW(model.parameters(), 0.0), self.args.run_args.dtype)

    def load_adapter(self, name: str, rank: int, on: str = "initial"):
        """A model with a LoRA adapter of this name and rank, to be trained: on "policy" the
        policy's own model, so that it follows the policy; on "initial" the initial model, as
        precise as the policy (two precisions would make their log-probabilities differ before
        anything is learnt), which a LoRA policy has for its base. Rank 0: a full copy of the
        initial model, which is float32; exits where the base of a LoRA policy is not."""
        base, dtype = self.policy_model, self.args.run_args.dtype
        lora = self.args.policy_lora_rank and dtype != "float32"
        if rank == 0 and lora and getattr(self.args, "beta", 1):
            reason = (
                f"a full copy is float32 and the LoRA policy's base {dtype}, and the difference"
            )
            way = f"would be a reward; an adapter has the policy's base: --{name}-lora-rank 16"
            refuse(f"{name}_lora_rank", 0, f"{reason} {way}")
        if rank == 0 or (on == "initial" and not self.args.policy_lora_rank):
            base = self.read_model(whole=not (rank and self.args.policy_lora_rank))
            base = processes.shard(base, dtype) if rank == 0 else base
            base = base.to(self.device)
        return add_adapter(base, name, rank) if rank else base

    def resume(self, *networks: Network, replay: Replay | None = None) -> None:
        """Say what the run is, and take up its last checkpoint if there is one; a checkpoint has
        the networks and, where a script has one, what its PRM learns from again."""
        self.networks, self.replay = list(networks), replay
        models = [network.model for network in networks]
        if self.args.run_args.gradient_checkpointing and not recompute_layers(models):
            none = f"--model {self.args.model} has no layers that can be computed again"
            refuse("gradient_checkpointing", True, none)
        report.announce(self)
        self.iteration, self.rows = load_checkpoint(self.path, self.networks, replay)
        if processes.rank() == 0:
            with told_when_full(self.path):
                write_json(self.path / "run.json", {"starts": self.starts})
                write_json(self.path / "args.json", flags_of(self.args))
        self.is_new = not self.iteration
        if self.is_new:
            self.row = {"iteration": 0, "time/elapsed": 0.0}
        torch.manual_seed(self.args.seed + processes.rank())
        np.random.seed((self.args.seed + processes.rank()) % 2**32)

    # ------------ iterations ------------

    def iterations(self):
        """Yield the iterations that are left, each with its own seeds and a new row; then report.

        What an iteration draws depends on (seed, iteration) alone, and on nothing before it."""
        args = self.args
        last = 0 if args.run_args.eval_only else args.iterations
        self.begun = time.perf_counter(), self.iteration
        for iteration in range(self.iteration + 1, last + 1):
            number = args.seed + 1_000_003 * iteration
            random.seed(f"{args.seed} {iteration}")
            torch.manual_seed(number + processes.rank())
            np.random.seed((number + processes.rank()) % 2**32)  # vLLM draws seeds from it
            self.iteration, self.row = iteration, {"iteration": iteration}
            self.started = self.lapped = time.perf_counter()
            yield iteration
        with told_when_full(self.path):
            export_policy(self.path, self.networks, self.tokenizer, self.args)
            if processes.rank() == 0:
                self.starts[-1]["peak_memory_gib"] = round(peak_memory(), 2)
                write_json(self.path / "run.json", {"starts": self.starts})
        report.summary(self)
        report.write_page(self)

    def seconds_left(self) -> float | None:
        """What the iterations that are left will take, from those of this start; None before any,
        and where none are left."""
        begun, first = self.begun
        done = self.iteration - first
        if not done or self.iteration >= self.args.iterations:
            return None
        return (time.perf_counter() - begun) / done * (self.args.iterations - self.iteration)

    def lap(self, name: str) -> None:
        """Log the seconds since the last lap, or since the iteration began, as time/name."""
        now = time.perf_counter()
        self.row[f"time/{name}"] = now - self.lapped
        self.lapped = now

    def log(self, kind: str, values: dict) -> None:
        """Put values into the iteration's row, as kind/name; a later one replaces an earlier
        one."""
        self.row |= {f"{kind}/{name}": value for name, value in values.items()}

    def recent(self, name: str, iterations: int = WINDOW) -> list[float]:
        """What was logged as name in the last iterations, this one included, the oldest first; 0
        where it was not defined."""
        rows = [row for row in (*self.rows, self.row) if row["iteration"]]  # without the start's
        return [row.get(name) or 0 for row in rows[-iterations:]]

    def log_episodes(self, kind: str, trajectories: list) -> None:
        """Log what episodes were like, in training ("train") or on the panel ("eval")."""
        env = self.eval_env if kind == "eval" else self.env
        self.row |= report.describe(trajectories, kind, env)
        if kind == "eval":
            self.panel = trajectories
        if kind == "train":
            sampled = sum(step >= 0 for t in trajectories for step in t.step_ids)
            trained = sum(len(t.token_ids) for t in trajectories)
            self.row |= {"tokens/rollout": sampled, "tokens/trained": trained}

    def initial_logprobs(self, policy: Network, batch) -> torch.Tensor | None:
        """log pi_init of the batch's action tokens, [K], by the initial policy; None except where
        the panel is played, and of a sharded policy: it costs a forward pass."""
        if not self.evaluates(self.iteration) or processes.is_sharded(policy.model):
            return None
        with initial(policy, functools.partial(self.read_model, whole=True)) as network:
            return batch_logprobs(network, batch, self.args, label="initial policy")

    def evaluates(self, iteration: int) -> bool:
        """Whether the panel is played after this iteration."""
        last = iteration == self.args.iterations
        return last or iteration % self.args.run_args.eval_every == 0

    def save(self, trajectories: list = (), **columns: torch.Tensor) -> None:
        """Write the iteration's row, its episodes, whose steps get their entry of every column [S],
        the terminal's line, curve.png, and a checkpoint where one is due."""
        if self.iteration:
            total = self.lapped - self.started  # without evaluation
            before = max((row.get("time/elapsed", 0.0) for row in self.rows), default=0.0)
            elapsed = before + total
            self.row |= {"time/total": total, "time/elapsed": elapsed}
            self.row["engine/restarts"] = self.engine.restarts
        if trajectories and self.networks:
            clip = getattr(self.args, "clip", math.inf)  # DPO clips nothing
            kind = getattr(self.args, "ratio", "step")
            columns |= report.step_ratios(trajectories, self.networks[0], kind, clip)
        self.rows.append(self.row)
        if processes.rank() == 0:
            pictures = {}
            if shows_pictures(self.env):
                most = self.args.world.saved_pictures
                pictures = report.save_pictures(trajectories, self.path, most)
                pictures |= report.save_pictures(self.panel, self.path, most // 2)
            episodes = report.episode_lines(self.row, trajectories, columns, pictures)
            panel = report.episode_lines(self.row, self.panel, {}, pictures)
            append(self.path / "episodes.jsonl", episodes)
            append(self.path / "eval_episodes.jsonl", panel)
            append(self.path / "metrics.jsonl", [to_json(self.row)])
            tables = {}
            if not isinstance(self.board, NoBoard):
                tables = report.tables(episodes=episodes, eval_episodes=panel)
            self.board.log(self.row | tables, step=self.row["iteration"])
            report.show(self.row, self.seconds_left())
            report.draw_curve(self.rows, self.path)
        if self.iteration:
            save_checkpoint(
                self.path, self.rows, self.networks, self.tokenizer, self.args, self.replay
            )
        self.panel = []


class NoBoard:
    """What stands in for a W&B run without --track, so that logging never branches."""

    def log(self, row: dict, step: int) -> None:
        pass

    def finish(self) -> None:
        pass


# ------------ the start of a run ------------


def open_run(run: Run) -> None:
    """Give the run its directory, its lock and its W&B run: those of a new run, or of the one that
    --resume names.

    `--resume auto` is for schedulers, which start the same command again: the run --run-name where
    there is one, else the newest unfinished run of this script with these flags, else a new run.
    Exits with one line where the run cannot be had: it does not exist, its flags differ, another
    process is at work in it. Of several processes the first one opens the run, and the others are
    told where it is."""
    if processes.rank() == 0:
        first_opens(run)
    run_args = run.args.run_args
    run_args.resume, run.path = processes.broadcast((run_args.resume, run.path))


def first_opens(run: Run) -> None:
    """open_run in the first process."""
    args, run_args, script = run.args, run.args.run_args, run.script
    auto = run_args.resume == "auto"
    if auto:
        run_args.resume = str(find_run(args, script) or "")
        found = "nothing to go on with, a new run"
        if run_args.resume:
            found = f"goes on with {run_args.resume}"
        terminal.say(f"--resume auto: {found}")

    name = run_args.run_name or f"{script}-{args.seed}-{time.strftime('%Y%m%d-%H%M%S')}"
    path = Path(run_args.resume or Path(run_args.runs_dir, name))
    if run_args.override and not run_args.resume and not auto:
        refuse("override", " ".join(run_args.override), "it is for a run that --resume takes up")
    if run_args.resume and not os.path.isfile(path / "args.json"):
        sys.exit(f"--resume {run_args.resume}: no run there (it has no args.json)")
    if not run_args.resume and (path / "args.json").exists():
        there = f"{path} has a run already; --resume {path} goes on with it"
        sys.exit(f"--run-name {run_args.run_name}: {there}")

    starts, start = [], provenance(args, run.model_path, run.env, run.eval_env)
    if run_args.resume:
        refuse_others(path)
        try:
            saved, starts = record_of(path)
        except DamagedError as error:
            sys.exit(f"--resume {path}: {error}; without it the run cannot go on")
        refuse_other_flags(path, script, saved, starts, start, args)

    with told_when_full(path):
        made = [each for each in (path, path / "checkpoints") if not each.exists()]
        refuse_others(path)
        (path / "checkpoints").mkdir(parents=True, exist_ok=True)
        run.lock, run.path = lock(path), path
        run.began = [] if run_args.resume else made  # unmade again where nothing begins
    wandb_id = starts[0]["wandb_id"] if starts else uuid.uuid4().hex[:8]
    run.starts = [*starts, {"script": script, "wandb_id": wandb_id, **start}]
    if run_args.track or "WANDB_SWEEP_ID" in os.environ:
        run.board = open_board(path, wandb_id, flags_of(args), run_args.quiet)


def record_of(path: Path) -> tuple[dict, list[dict]]:
    """(flags, starts) of a run, from its args.json and run.json. Raises DamagedError, which names
    the file, where one is not what a run writes."""
    found = []
    for name, looks_right in (("args.json", is_flags), ("run.json", is_starts)):
        try:
            found.append(read_json(path / name))
        except (OSError, ValueError, RecursionError) as error:
            raise DamagedError(f"{path / name} is missing, cut off or no JSON") from error
        if not looks_right(found[-1]):
            raise DamagedError(f"{path / name} is not what a run writes")
    return found[0], found[1]["starts"]


def is_flags(saved) -> bool:
    return isinstance(saved, dict) and "seed" in saved


def is_starts(saved) -> bool:
    starts = saved.get("starts") if isinstance(saved, dict) else None
    return isinstance(starts, list) and bool(starts) and all(map(is_start, starts))


def is_start(start) -> bool:
    hashes = start.get("hashes") if isinstance(start, dict) else None
    texts = isinstance(hashes, dict) and [start.get("script"), start.get("wandb_id")]
    return bool(texts) and all(isinstance(t, str) for t in texts) and {*TOLD} <= hashes.keys()


def find_run(args, script: str) -> Path | None:
    """The run that `--resume auto` goes on with. A directory that holds a damaged one is skipped,
    and named."""
    run_args = args.run_args
    if run_args.run_name:
        named = Path(run_args.runs_dir, run_args.run_name)
        return named if (named / "args.json").exists() else None

    flags = {name: value for name, value in flags_of(args).items() if name not in FREE}
    paths = [path for path in Path(run_args.runs_dir).glob("*/") if (path / "args.json").exists()]
    for path in sorted(paths, key=lambda path: path.stat().st_mtime, reverse=True):
        try:
            saved, starts = record_of(path)
        except DamagedError as error:
            terminal.say(f"--resume auto: {shown(error)}; that directory is skipped")
            continue
        last = max((int(kept.name) for kept in kept_in(path)), default=0)
        ours = starts[0]["script"] == script and flags.items() <= saved.items()
        if ours and last < args.iterations and not lost_flags(saved, args):
            return path
    return None


def refuse_other_flags(path: Path, script: str, saved: dict, starts: list, start: dict, args):
    """Exit with all flags that differ from the run's and are not named in --override; so do files
    and tasks that are others than those of the start before this one."""
    ours = flags_of(args)
    override = {name.replace("-", "_").strip("_") for name in args.run_args.override}
    if unknown := override - ours.keys():
        sys.exit(f"--override {' '.join(sorted(unknown))}: no such flag")
    if starts[0]["script"] != script:
        sys.exit(f"--resume {path}: this run was made by {shown(starts[0]['script'])}.py")
    if lost := lost_flags(saved, args):
        began = f"another version of {script}.py began this run with {', '.join(lost)}"
        sys.exit(f"--resume {path}: {began}, which this one does not have")

    differ = []
    for name, value in ours.items():
        if name not in FREE and name not in override and value != saved.get(name):
            differ.append(f"--{name.replace('_', '-')} {value}, was {shown(saved.get(name))}")
    if differ:
        advice = "give its flags, or name them in --override"
        sys.exit(f"--resume {path}: other flags than the run's ({', '.join(differ)}); {advice}")

    # only these flags, where they are named, let the files and tasks be others
    world = vars(args.world).keys()
    bears = {
        "model": {"model"},
        "data": world,
        "panel": {*world, "eval_set", "eval_tasks", "max_steps"},
    }
    for what, words in TOLD.items():
        same = starts[-1]["hashes"][what] == start["hashes"][what]
        if not same and not override & bears[what]:
            other = f"{words.format(args.model)} are not those that the run began with"
            sys.exit(f"--resume {path}: {other} (their hash differs)")


def lost_flags(saved: dict, args) -> list[str]:
    """The flags of a run that this version does not have, where their value meant something."""
    unknown = saved.keys() - flags_of(args).keys()
    lost = [name for name in unknown if name not in GONE or saved[name] != GONE[name]]
    return [f"--{name.replace('_', '-')} {saved[name]}" for name in sorted(lost)]


def refuse_others(path: Path) -> None:
    """Exit where something else is in the place of a file that a run reads or writes: nothing is
    written through a link to another place."""
    for file in (*path.glob("*.json*"), *path.glob(".*.draft"), path / "curve.png", path / "lock"):
        if os.path.lexists(file) and (file.is_symlink() or not file.is_file()):
            sys.exit(f"{file}: a link, a pipe or a directory in the place of a file; remove it")
    for place in (path / "checkpoints", path / "exported", path / "engine"):
        if os.path.lexists(place) and (place.is_symlink() or not place.is_dir()):
            sys.exit(f"{place}: a link or a file in the place of a directory; remove it")
    for link in (path / "policy", path / "prm", path / "critic", path / "best"):
        if os.path.lexists(link) and not link.is_symlink():
            sys.exit(f"{link}: something else in the place of a link; move it away")


def knock(settings) -> None:
    """Raise OSError where nobody is at W&B's address; its client would try for much longer."""
    proxies = os.environ.get("HTTPS_PROXY") or os.environ.get("https_proxy")
    address = urlsplit(settings.base_url)
    if settings.mode == "online" and not proxies:
        port = address.port or (443 if address.scheme == "https" else 80)
        socket.create_connection((address.hostname, port), ANSWERS_WITHIN).close()


def open_board(path: Path, wandb_id: str, flags: dict, quiet: bool):
    """The W&B run of --track. Where W&B does not answer within seconds, an offline one."""
    import wandb

    options = dict(project="istar", name=path.name, id=wandb_id, resume="allow", config=flags)
    wait = {"init_timeout": ANSWERS_WITHIN, "finish_timeout": 60, "silent": quiet}
    try:
        knock(wandb.setup().settings)
        return wandb.init(**options, settings=wandb.Settings(**wait))
    except Exception as error:  # network, key and service have no common class
        secret = os.environ.get("WANDB_API_KEY") or "\n"
        reason = shown(str(error).split("\n")[0].replace(secret, "..."))
        way = "the run goes on as with WANDB_MODE=offline, and `wandb sync` sends it later"
        terminal.warn(f"--track: W&B cannot be had ({reason}); {way}")
    wandb.teardown()  # its service holds the run half open
    return wandb.init(**options, mode="offline")


# ------------ the end of a run ------------


def ends_cleanly(main):
    """Around a script's main: what stops the run leaves one line that says what is kept and how to
    go on. The W&B run is closed.

    Ctrl-C and SIGTERM (a scheduler's), a full disk, and losses or weights that are not finite, of
    which batch-N.json is left: the trajectories and tensors that main had. Other errors pass. Of
    several processes the first one tells."""

    own_process = main.__module__ == "__main__"

    @functools.wraps(main)
    def guarded():
        current.clear()
        before = signal.signal(signal.SIGTERM, raise_terminated)
        interrupted = signal.getsignal(signal.SIGINT)
        try:
            main()
        except BaseException as error:
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, leave)
            with contextlib.suppress(Exception):  # of two errors the first is told
                finish_saving()
            try:
                stop(current[0] if current else None, error)
            except SystemExit as end:
                if own_process and current and isinstance(end.code, str):  # W&B may take time
                    sys.stderr.write(f"{end.code}\n")
                    sys.exit(1)
                raise
        finally:
            for run in current:
                run.board.finish()
                discard(run)
                if run.lock is not None:
                    os.close(run.lock)
            if not own_process:  # else it ends now, and a signal is quiet
                signal.signal(signal.SIGTERM, before)
                signal.signal(signal.SIGINT, interrupted)
        if own_process:
            processes.end()

    return guarded


def stop(run: Run | None, error: BaseException) -> None:
    """End the process with what a user has to know; pass on errors that nobody foresaw."""
    path = run.path if run else None
    if path is None and isinstance(error, KeyboardInterrupt):
        sys.exit("\nstopped before a run began")
    if path is None:
        raise error

    if isinstance(error, KeyboardInterrupt):
        by = f" by {error}" if str(error) else ""
        sys.exit(processes.rank() or f"\nstopped{by}{how_to_go_on(path)}")

    if isinstance(error, FloatingPointError):
        if processes.rank():
            sys.exit(1)
        file = path / f"batch-{run.iteration:06d}.json"
        with told_when_full(path):
            write_json(file, what_main_had(error))
        advice = "a smaller --learning-rate, named in --override, may help"
        where = f"the batch is in {file}{how_to_go_on(path)}"
        sys.exit(f"\nstopped: {error}; {where} ({advice})")

    if isinstance(error, EngineError):
        other = ", or --engine hf needs nothing more"
        if run.args.run_args.engine_url:
            other = ""
        sys.exit(f"\nstopped: {shown(error)}{how_to_go_on(path)}{other}")

    if isinstance(error, MemoryError | torch.OutOfMemoryError) or NO_MEMORY in str(error):
        less = "a smaller --micro-batch-tokens or --engine-memory needs less"
        sys.exit(f"\nstopped: out of memory{how_to_go_on(path)} ({less})")

    if processes.lost_another(error):
        sys.exit(f"\nstopped: another process of this run ended{how_to_go_on(path)}")

    with told_when_full(path):
        raise error


def discard(run: Run) -> None:
    """Remove the directory that this process made for a run, where nothing was kept in it; and
    weights that servers have taken."""
    if run.path and processes.rank() == 0:
        shutil.rmtree(run.path / "engine", ignore_errors=True)
    if not run.began or has_rows(run.path) or any(run.path.glob("batch-*.json")):
        return
    tables = "metrics.jsonl", "episodes.jsonl", "eval_episodes.jsonl"
    for name in ("args.json", "run.json", *tables, "lock"):
        (run.path / name).unlink(missing_ok=True)
    shutil.rmtree(run.path / "pictures", ignore_errors=True)
    for made in reversed(run.began):
        with contextlib.suppress(OSError):  # somebody else's file is in it
            made.rmdir()


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


def leave(*_):
    """What a signal does while the process is ending already: it ends at once, without a word."""
    os._exit(1)
