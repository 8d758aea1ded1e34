"""Run: a run's directory, rows, clock, seeds, evaluation and saving (docs/metrics.md)."""

import random
import sys
import time
from collections import Counter
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path

from runtime import models
from runtime.checks import check
from runtime.distributed import fsdp, processes
from runtime.ending import current, ends_cleanly
from runtime.engines import EngineError
from runtime.flags import flags_of, refuse
from runtime.memory import tell_if_too_much
from runtime.networks import Network, add_adapter, recompute_layers
from runtime.rollout import play_ahead, rollout
from runtime.saving.checkpoints import export_policy, load_checkpoint, save_checkpoint
from runtime.saving.files import append, to_json, write_json
from runtime.saving.opening import open_run, refuse_other_ranks
from runtime.view import report, stuck, terminal
from runtime.worlds import check_world

import numpy as np
import torch

LOGGED = "policy/loss policy/ratio policy/approx_kl policy/clip_fraction prm/loss prm/margin"
__all__ = ["Run", "ends_cleanly", "mean_of"]


class Run:
    """What a script keeps of a run. eval_env, eval_tasks: the world that evaluates, and its panel.
    is_new: nothing was evaluated yet. path: its directory. reading: how weights are read."""

    def __init__(self, args, env):
        self.args, self.env = args, env
        self.model_path, config, self.eval_env, panel = check(args, env)
        self.device = processes.start(args)
        terminal.begin(args.run_args.quiet)
        cards, card = processes.count() if fsdp.wanted() else 1, None
        if self.device.type == "cuda":
            card = torch.cuda.get_device_properties(self.device).total_memory
        tell_if_too_much(config, args, cards, card)
        self.script, samples = Path(sys.argv[0]).stem, args.run_args.eval_samples
        self.eval_tasks = [task for task in panel for _ in range(samples)]
        self.rows, self.row, self.networks, self.lists = [], {}, [], {}
        self.path, self.board, self.lock, self.began, self.starts = None, None, None, [], []
        self.panel, self.faults = [], 0  # the evaluation's episodes are kept until they are saved
        self.told, self.failed = set(), Counter()  # why it cannot learn; {task: faults}, this start
        self.leads, self.ahead, self.landed = False, None, []  # of --async-rollout
        self.begun = 0.0, 0  # when this start began its iterations, and after which
        current[:] = [self]
        hashes = refuse_other_ranks(self)
        if processes.rank() == 0:
            open_run(self, hashes)
        args.run_args.resume, self.path = processes.broadcast((args.run_args.resume, self.path))
        trust, dtype = args.run_args.trust_remote_code, getattr(torch, args.run_args.dtype)
        self.reading = {"use_safetensors": True, "trust_remote_code": trust, "dtype": dtype}
        torch.manual_seed(args.seed)

    def load_policy(self, lora=None):
        """(model, engine, chat): the policy, with an adapter if there is a peft LoraConfig."""
        from transformers.utils import logging

        logging.disable_progress_bar()  # a bar for each checkpoint would hide the run's own
        args, run_args = self.args, self.args.run_args
        try:
            model = self.read_model()
            trust, processor = run_args.trust_remote_code, getattr(model, "picture_processor", None)
            self.tokenizer = models.read_tokenizer(self.model_path, model, trust)
            stop_ids = models.stop_ids_of(model, self.tokenizer)
            self.chat = models.read_chat(self.tokenizer, stop_ids, args.model, processor, self)
        except models.ModelError as error:
            refuse("model", args.model, str(error))
        self.engine_kind, given = run_args.engine, (self.model_path, self.chat.stop_ids, args)
        if run_args.engine == "auto":
            self.engine_kind = "vllm" if find_spec("vllm") else "hf"
        try:
            if run_args.engine_url:
                from runtime.engines.servers import ServerEngine

                self.engine_kind = "servers"
                self.engine = ServerEngine(self.path / "engine", *given, self.land)
            elif self.engine_kind == "vllm":
                from runtime.engines.vllm import VllmEngine

                self.engine = VllmEngine(*given)
            else:
                from runtime.engines.transformers import TransformersEngine

                self.engine = TransformersEngine(*given)
        except EngineError as error:
            if run_args.engine_url:
                refuse("engine_url", " ".join(run_args.engine_url), str(error))
            refuse("engine", self.engine_kind, f"{error}; --engine hf needs nothing more")
        if lora is not None:
            model = add_adapter(model, "policy", lora)
        self.policy_model = model if fsdp.wanted() else model.to(self.device)
        return self.policy_model, self.engine, self.chat

    def read_model(self):
        """--model's network in --dtype; in float32 where FSDP keeps the weights that train."""
        reading = self.reading | ({"dtype": torch.float32} if fsdp.wanted() else {})
        if not getattr(self.env, "shows_pictures", False):
            return models.read_causal_model(self.model_path, **reading)
        model = models.read_seeing_model(self.model_path, self.args.model, reading)
        if getattr(self.args.world, "freeze_vision", False):
            model.base_model.visual.requires_grad_(False)
        return model

    def resume(self, *networks: Network, **lists: list) -> None:
        """Say what the run is, divide what FSDP shards, and take up the last checkpoint if there is
        one: networks, their optimisers, and the script's lists, which are filled in place."""
        self.networks, self.lists = [*{id(n): n for n in networks}.values()], lists
        of_each = [network.model for network in networks]
        if self.args.run_args.gradient_checkpointing and not recompute_layers(of_each):
            refuse("gradient_checkpointing", True, f"--model {self.args.model} has no such layers")
        if fsdp.wanted():
            fsdp.shard_all(self.networks, self.args.run_args.dtype, self.device)
        report.announce(self)
        self.iteration, self.rows = load_checkpoint(self.path, self.networks, lists)
        if processes.rank() == 0:
            write_json(self.path / "run.json", {"starts": self.starts})
            write_json(self.path / "args.json", flags_of(self.args))
        self.is_new, self.row = not self.iteration, {"iteration": 0, "time/elapsed": 0.0}
        self.seed(0)

    def seed(self, iteration: int) -> None:
        """Set all generators: what an iteration draws depends on (seed, iteration) alone."""
        number = self.args.seed + 1_000_003 * iteration
        random.seed(f"{self.args.seed} {iteration}")
        torch.manual_seed(number)
        np.random.seed((number + processes.rank()) % 2**32)  # vLLM draws seeds from it

    def iterations(self):
        """Yield the iterations that are left, with seeds and a new row; report and export."""
        last = 0 if self.args.run_args.eval_only else self.args.iterations
        self.begun = time.perf_counter(), self.iteration
        for iteration in range(self.iteration + 1, last + 1):
            check_world(self.env, self.args.tasks_per_iteration)  # it may have changed its tasks
            self.seed(iteration)
            self.weights = [*map(stuck.sample_of, self.networks)]
            self.iteration, self.row = iteration, {"iteration": iteration}
            self.started = self.lapped = time.perf_counter()
            self.leads = self.args.run_args.async_rollout
            with ExitStack() as self.leaving:  # it is closed, too, where an error ends main
                yield iteration
                self.land()
        export_policy(self.path, self.rows, self.networks, self.tokenizer, self.args)
        if processes.rank() == 0:
            peak = int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 2**10
            peak = torch.cuda.max_memory_allocated() or peak  # 0 without a card
            self.starts[-1]["peak_memory_gib"] = round(peak / 2**30, 2)
            write_json(self.path / "run.json", {"starts": self.starts})
        report.summary(self)
        report.write_page(self)

    def rollout(self, play, env, tasks: list[int], sampling) -> list:
        """Trajectories of an episode for each task; with --async-rollout, in training, of those
        that the iteration before began (the first one: its own), while a thread plays these."""
        self.land()
        leads, self.leads, given = self.leads, False, (self, play, env, tasks, sampling)
        if not leads:
            return rollout(*given)
        found, self.landed = self.landed or rollout(*given), []
        if self.iteration < self.args.iterations:
            self.ahead = given, play_ahead(self.leaving, *given)
        return found

    def land(self) -> None:
        """Wait for the rollout that a thread plays, before the engine's weights change."""
        if self.ahead:
            (given, played), self.ahead = self.ahead, None
            self.landed = rollout(*given, played.result())
            self.lap("rollout")

    def evaluates(self, iteration: int) -> bool:
        """Whether the panel is played after this iteration."""
        return iteration % self.args.run_args.eval_every == 0 or iteration == self.args.iterations

    def lap(self, name: str) -> None:
        """Add the seconds since the last lap, or since the iteration began, to time/name."""
        before, self.lapped = self.lapped, time.perf_counter()
        self.row[f"time/{name}"] = self.row.get(f"time/{name}", 0.0) + self.lapped - before

    def log(self, kind: str, values: dict) -> None:
        """Put numbers into the iteration's row, as kind/name; exits where one is none."""
        for name, value in values.items():
            value = value.tolist() if hasattr(value, "tolist") else value  # of numpy and torch
            if not isinstance(value, int | float | None):
                sys.exit(f"run.log({kind!r}, ...): {name} is {type(value).__name__}, not a number")
            self.row[f"{kind}/{name}"] = int(value) if isinstance(value, bool) else value

    def log_episodes(self, kind: str, trajectories: list) -> None:
        """Log what episodes were like, of training ("train"), the panel ("eval") or others."""
        env = self.eval_env if kind == "eval" else self.env
        self.row |= report.describe(trajectories, kind, env, self.faults)
        self.faults = 0
        cut = stuck.cut_answers(trajectories, self.args.max_action_tokens, self.chat.stop_ids)
        self.log(kind, {"cut": sum(cut) / len(cut)})
        if kind == "eval":
            self.panel = trajectories
        elif kind == "train":
            self.row["tokens/rollout"] = sum(step >= 0 for t in trajectories for step in t.step_ids)
            self.row["tokens/trained"] = sum(len(t.token_ids) for t in trajectories)

    def save(self, trajectories: list = (), **columns: torch.Tensor) -> None:
        """Write the iteration's row, its episodes, whose steps get their entry of every column [S],
        the terminal's line, curve.png at an evaluation, and a checkpoint where one is due."""
        steps = sum(len(t.steps) for t in trajectories)
        for name in report.STEP & columns.keys():
            sys.exit(f"run.save({name}=...): needs another name: steps have a {name}")
        for name in (n for n, values in columns.items() if getattr(values, "shape", 0) != (steps,)):
            given = getattr(columns[name], "shape", type(columns[name]).__name__)
            sys.exit(f"run.save({name}=...): needs a tensor [{steps}], not {given}")
        if self.iteration:
            total = self.lapped - self.started  # without evaluation
            before = max((row.get("time/elapsed", 0.0) for row in self.rows), default=0.0)
            self.row |= {"time/total": total, "time/elapsed": before + total}
            self.row["engine/restarts"] = self.engine.restarts
            for network, weights in zip(self.networks, self.weights):
                if network.optimizer:
                    self.row[f"{network.name}/moved"] = stuck.moved(network, weights)
            if "advantage" in columns:  # where 0, --invalid-penalty alone trains the policy
                valid = torch.tensor([step.valid for t in trajectories for step in t.steps])
                self.row["policy/credit"] = columns["advantage"][valid].abs().mean().item()
            kinds = {name.partition("/")[0] for name in self.row}
            logged = [name for name in LOGGED.split() if name.partition("/")[0] in kinds]
            self.row = dict.fromkeys(logged) | self.row  # null where nothing could be learnt
        self.rows.append(self.row)
        if processes.rank() == 0:
            most = getattr(self.args.world, "saved_pictures", 0)
            pictures = report.save_pictures(trajectories, self.path, most)
            pictures |= report.save_pictures(self.panel, self.path, most // 2)
            episodes = report.episode_lines(self.row, trajectories, columns, pictures)
            panel = report.episode_lines(self.row, self.panel, {}, pictures)
            append(self.path / "episodes.jsonl", episodes)
            append(self.path / "eval_episodes.jsonl", panel)
            append(self.path / "metrics.jsonl", [to_json(self.row)])
            if self.board:
                self.board.log(self.row, step=self.row["iteration"])
            done, left = self.iteration - self.begun[1], self.args.iterations - self.iteration
            pace = (time.perf_counter() - self.begun[0]) / done if done else 0.0  # s an iteration
            report.show(self.row, pace * left or None)
            if self.panel:
                report.draw_curve(self.rows, self.path)
        if self.iteration:
            kept = self.rows, self.networks, self.tokenizer, self.args, self.lists
            save_checkpoint(self.path, *kept)
            stuck.tell_if_stuck(self.rows, self.told)
        self.panel = []


def mean_of(seen: list[dict]) -> dict:
    """{name: mean} of what all processes have seen; a value counts "weight" times, or once."""
    seen = [{"weight": 1} | stats for stats in processes.gather(seen) if stats.get("weight", 1)]
    weight = sum(stats["weight"] for stats in seen)
    names = [name for name in seen[0] if name != "weight"] if seen else []
    return {name: sum(s["weight"] * s[name] for s in seen) / weight for name in names}
