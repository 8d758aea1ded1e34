"""A world of two steps for the tests of bad input: WORLD is its program, whose lines a test may
exchange; `run_in` trains a copy of a script on it, in this process."""

import contextlib
import importlib.util
import io
import re
import subprocess
import sys
from unittest.mock import patch

import runtime.view.report

from conftest import ROOT

WORLD = """
import asyncio, math, random
from dataclasses import dataclass
from types import SimpleNamespace
import numpy as np
import torch

@dataclass
class Flags:
    length: int = 2  # Steps of an episode.
    # FLAGS

class World:
    name = "tiny world"
    train_tasks, eval_tasks, validation_tasks = range(100, 200), range(50), range(200, 250)
    # WORLD

    def __init__(self):
        self.begun = 0

    @classmethod
    def from_args(cls, args):
        return cls()

    def reset(self, task):
        self.begun += 1
        # RESET
        return Episode(self, task)

class Episode:
    def __init__(self, world, task):
        self.world, self.task, self.steps, self.prompt = world, task, 0, f"task {task}: go"
        self.first = world.begun
        # BEGIN

    def step(self, text):
        self.steps += 1
        observation, reward, done = "on", 0.25, self.steps == 2
        info = {"valid": True, "success": done, "score": 0.5}
        # STEP
        return observation, reward, done, info

    # MORE
"""
SMALL = """--engine hf --tasks-per-iteration 2 --group-size 2 --eval-tasks 2 --eval-samples 1
--eval-every 9 --max-steps 4 --iterations 1 --seed 3 --run-name a""".split()


def program(**lines: str) -> str:
    """The world with these lines in the places of its comments: step="reward = None"."""
    text = WORLD
    for place, line in lines.items():
        found = re.search(rf"^( *)# {place.upper()}$", text, re.MULTILINE)
        body = "\n".join(found[1] + each for each in line.splitlines())
        text = text[: found.start()] + body + text[found.end() :]
    return text


def module_of(path, name: str):
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module


def write(home, script: str = "rloo_sokoban", **lines: str) -> None:
    """The world and a copy of a script that plays it, in home: tiny.py and mine.py."""
    (home / "tiny.py").write_text(program(**lines))
    text = (ROOT / f"{script}.py").read_text()
    world = re.search(r"^from envs\.\w+ import (\w+), (\w+)$", text, re.MULTILINE)
    there = f"from tiny import World as {world[1]}, Flags as {world[2]}"
    (home / "mine.py").write_text(text.replace(world[0], there))


def run_there(home, *words: str, stdout=None) -> subprocess.CompletedProcess:
    """What mine.py says that is started there with these words, in this process; without curve.png,
    which takes half of the time."""
    command = [str(home / "mine.py"), *SMALL, *map(str, words)]
    said, warned, code = stdout or io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(warned):
        no_curve = patch.object(runtime.view.report, "draw_curve")
        with contextlib.chdir(home), patch.object(sys, "argv", command), no_curve:
            try:
                module_of(home / "tiny.py", "tiny")
                module_of(home / "mine.py", "mine").main()
            except SystemExit as stop:
                code = stop.code
    if isinstance(code, str):
        warned.write(f"{code}\n")
        code = 1
    told = "" if stdout else said.getvalue()
    return subprocess.CompletedProcess(command, code or 0, told, warned.getvalue())


def run_in(home, *words: str, script: str = "rloo_sokoban", **lines: str):
    write(home, script, **lines)
    return run_there(home, *words)
