"""Games on strings by name, from three optional packages: TextArena, TextWorldExpress and GEM.

    env = TextGame("textarena:FrozenLake-v0")
    episode = env.reset(env.eval_tasks[0])      # the same task, the same game, on any machine
    text = "<think>go down</think><action>down</action>"
    observation, reward, done, info = episode.step(text)

These games draw from the process's global generators. Here each episode has states of `random` and
`numpy.random` of its own, which are in place only while its game runs: episodes do not change each
other, and the process's own states stay as they are. All games are for one player.
"""

import contextlib
import difflib
import functools
import importlib
import io
import json
import logging
import random
import re
import shutil
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from envs.response import action_words

import numpy as np

EVAL_TASKS = VALIDATION_TASKS = 128
TRAIN_TASKS = 10_000
MOST_CHARACTERS = 200  # of an action; no game has a longer one
UNREADABLE = (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError)
INSTALL = ".venv/bin/python -m pip install --no-deps -r requirements-games.txt"

FORM = """Answer with a short thought and one action, without brackets or \\boxed{} around it:
<think>...</think><action>...</action>"""
NO_FORM = "Invalid answer, nothing happened. Write <think>...</think><action>...</action>."
UNREAD = "Invalid action, the game could not read it."


class GameError(ValueError):
    """A game that cannot be played; the message is one line."""


class Said(NamedTuple):
    """What a game says after an action, or at its start."""

    text: str
    board: str = ""  # the part of the text that shows the game's state; empty where none does
    total: float = 0.0  # the game's own rewards so far
    done: bool = False
    valid: bool = True


class Generators:
    """States of `random` and `numpy.random`: at first those after seeding with `seed`."""

    def __init__(self, seed: int):
        self.python = random.Random(seed).getstate()
        self.numpy = np.random.RandomState(seed).get_state()

    @contextlib.contextmanager
    def in_place(self):
        """Around what draws: it draws from these states, which go on, and the process's own are
        put back. What it prints is dropped: it would tear the progress bar."""
        python, numpy, printed = random.getstate(), np.random.get_state(), io.StringIO()
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        try:
            with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
                yield
        finally:
            self.python, self.numpy = random.getstate(), np.random.get_state()
            random.setstate(python)
            np.random.set_state(numpy)


def imported(module: str):
    """A module of a package; what its import does to logging is undone. Raises GameError where it,
    or something that it imports, is not installed."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise GameError(f"the package {error.name} is not installed: {INSTALL}") from None
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)


# ------------ The packages: a class each, whose objects are games that run ------------


class Seeded:
    """A game of which a task is the seed."""

    points = {}  # the most, of a game that counts points

    @staticmethod
    def tasks(name: str) -> list:
        """(panel, validation, training)."""
        first, second = EVAL_TASKS, EVAL_TASKS + VALIDATION_TASKS
        return [range(first), range(first, second), range(second, second + TRAIN_TASKS)]


class TextArena(Seeded):
    """A game of TextArena (Guertler et al., arXiv 2504.11442). It gives its reward at its end: 1
    for a win, else what it counts as done, from 0 to 1; in some games -1 for a second invalid
    action in a row."""

    points = {"Set-v0": 20}
    same = re.compile("You attempted an invalid move. Reason: | Please resubmit a valid move.*")

    @staticmethod
    def names() -> list[str]:
        """Those for one player, by the games' files. Two more names of each, which differ in what
        is not used here, are left out."""
        home, names = Path(imported("textarena").__file__).parent, []
        for name, spec in imported("textarena.envs.registration").ENV_REGISTRY.items():
            module = str(spec.entry_point).partition(":")[0].split(".")
            file = home.joinpath(*module[1:]).with_suffix(".py")
            if not name.endswith(("-raw", "-train")) and file.is_file():
                if "SinglePlayerState" in file.read_text(encoding="utf-8"):
                    names.append(name)
        return names

    def __init__(self, name: str, seed: int):
        env = imported("textarena").make(name)
        while hasattr(env, "env"):  # a wrapper, which would repeat all that was said before
            env = env.env
        self.env = env
        env.reset(num_players=1, seed=seed)
        refuse = env.state.set_invalid_move
        ordered = functools.partial(sorted, key=lambda value: not isinstance(value, str))
        # some games exchange the reason and the reward
        env.state.set_invalid_move = lambda *values, **named: refuse(*ordered(values), **named)
        self.start = self.said()

    def act(self, words: str) -> Said:
        done, _ = self.env.step(words if "[" in words else f"[{words}]")
        return self.said(bool(done))

    def said(self, done: bool = False) -> Said:
        """What is new since the last call, without the player's own words. Some games log these
        with the arguments exchanged: the text is then a number."""
        _, messages = self.env.get_observation()
        heard = [(kind, text) for _, text, kind in messages if isinstance(text, str)]
        told = [(kind.name, text) for kind, text in heard if kind.name != "PLAYER_ACTION"]
        board = "\n".join(text for kind, text in told if kind == "GAME_BOARD")
        texts = [self.same.sub("", text) for _, text in told]
        rewards, about = self.env.close() if done else (None, {0: {}})
        texts += [about[0].get("reason") or ""]
        total = (rewards or {}).get(0, 0.0)
        valid = not (self.env.state.error_count or about[0].get("invalid_move"))
        return Said("\n\n".join(texts), board, float(total), done, valid)


class TextWorldExpress(Seeded):
    """A game of TextWorldExpress (Jansen and Côté, arXiv 2208.01174); one Java process runs all.
    Its score is from 0 to 1, and below 0 where the game is lost. Java keeps the things of `sorting`
    once for all episodes: there an episode whose turn it is again is played again up to there."""

    last = None  # the game that was begun last

    @staticmethod
    @functools.cache
    def java():
        """The package's own environment, which starts Java; its games share that process."""
        package = imported("textworld_express")
        if not shutil.which("java"):
            raise GameError("TextWorldExpress needs Java, and there is no command java")
        return package.TextWorldExpressEnv()

    @staticmethod
    def names() -> list[str]:
        return list(imported("textworld_express").GAME_NAMES)

    @classmethod
    def tasks(cls, name: str) -> list:
        """(panel, validation, training): the seeds of the game's test, dev and train folds, which
        differ in more than the seed."""
        env = cls.java()
        env.load(name, "")
        return [env.getValidSeedsTest(), env.getValidSeedsDev(), env.getValidSeedsTrain()]

    def __init__(self, name: str, seed: int):
        folds = zip(("test", "dev", "train"), seeds_of(type(self), name))
        fold = next(fold for fold, seeds in folds if seed in seeds)
        self.server = self.java()._gateway.jvm.textworldexpress.runtime.PythonInterface()
        if fault := self.server.load(name, ""):
            raise GameError(fault)
        self.key, self.shares, self.told = (seed, fold, False), name == "sorting", []
        start = self.said(self.begin())
        self.start = start._replace(text=f"{self.server.getTaskDescription()}\n\n{start.text}")

    def begin(self) -> str:
        TextWorldExpress.last = self
        return self.server.generateNewGameJSON(*self.key)

    def act(self, words: str) -> Said:
        if self.shares and TextWorldExpress.last is not self:
            self.begin()
            for earlier in self.told:
                self.server.stepJSON(earlier)
        self.told.append(words)
        valid = words in self.actions
        return self.said(self.server.stepJSON(words))._replace(valid=valid)

    def said(self, answer: str) -> Said:
        told = json.loads(answer)
        self.actions = sorted(told["validActions"])
        text = f"{told['observation']}\n\nYou can: {', '.join(self.actions)}."
        score = float(told["score"])
        done = bool(told["tasksuccess"] or told["taskfailure"] or score >= 1)
        return Said(text, told["look"] + told["inventory"], score, done)


class Gem(Seeded):
    """A game of GEM (Liu et al., arXiv 2510.01051); what GEM has besides games is left out. Its
    rewards add up to 1 for a win. An action that it cannot read ends it and costs 0.1."""

    @staticmethod
    def names() -> list[str]:
        imported("gem.envs")  # which fills the registry
        registry = imported("gem.envs.registration").ENV_REGISTRY
        return [name for name in registry if name.startswith("game:")]

    def __init__(self, name: str, seed: int):
        self.env, self.total = imported("gem").make(name), 0.0
        self.start = self.said(*self.env.reset(seed=seed))

    def act(self, words: str) -> Said:
        boxed = words if "\\boxed" in words else f"\\boxed{{{words}}}"
        text, reward, terminated, truncated, info = self.env.step(boxed)
        self.total += float(reward)
        said = self.said(text, info)
        return said._replace(done=bool(terminated or truncated), valid=reward >= 0)

    def said(self, text: str, info: dict) -> Said:
        suffix = info.get("suffix", "")
        board = suffix if "\n" in suffix.strip() else ""  # one line only asks for an action
        return Said(f"{text}\n\n{suffix}", board, self.total)


PACKAGES = {"textarena": TextArena, "twx": TextWorldExpress, "gem": Gem}


@functools.cache
def seeds_of(package, name: str) -> tuple:
    return tuple(package.tasks(name))


# ------------ The world ------------


@dataclass
class TextGameArgs:
    """The flags of this world."""

    game: str = "textarena:FrozenLake-v0"
    """Game, as package:name with the package's own names: textarena:FrozenLake-v0, twx:coin,
    gem:game:Sokoban-v0-easy."""


class TextGame:
    """A game by its name. A task is a seed, and none is in two of the three sets.

    Raises GameError where the package is missing, or where it has no such game for one player.
    """

    measures = ["finished"]

    def __init__(self, game: str = "textarena:FrozenLake-v0", max_steps: int = 15):
        kind, _, name = game.partition(":")
        if kind not in PACKAGES or not name:
            raise GameError("has to be textarena:NAME, twx:NAME or gem:NAME")
        self.package, self.game, self.max_steps = PACKAGES[kind], name, max_steps
        self.name = f"textgame {game}, {max_steps} steps"
        self.points = self.package.points.get(name, 1)
        self.counts = Counter()  # of episodes and steps since the last summary
        with Generators(0).in_place():  # a package may draw when it is imported
            names = self.package.names()
            if name not in names:
                near = difflib.get_close_matches(name, names, 6, 0.5) or sorted(names)[:8]
                near = ", ".join(f"{kind}:{name}" for name in near)
                raise GameError(f"there is no such game for one player; near names: {near}")
            sets = seeds_of(self.package, name)
        self.eval_tasks, self.validation_tasks, self.train_tasks = sets
        try:
            self.reset(self.eval_tasks[0])
        except GameError:
            raise
        except Exception as error:  # of a game's own class
            told = re.sub(r"\x1b\[\d*m|\*{3,}", "", str(error))  # colours, and lines of stars
            told = " ".join(f"{type(error).__name__}: {told}".split())[:200]
            raise GameError(f"it cannot be opened ({told})") from None

    @classmethod
    def from_args(cls, args) -> "TextGame":
        """The environment of a script's flags; exits with one line where it cannot be."""
        if args.run_args.async_rollout:
            sys.exit("--async-rollout: a text game sets the generators that the trainer draws from")
        try:
            return cls(args.world.game, args.max_steps)
        except GameError as error:
            sys.exit(f"--game {args.world.game}: {error}")

    def reset(self, task: int) -> "Episode":
        return Episode(self, task)

    def summary(self) -> dict[str, float]:
        """Of the episodes and answers since the last call, of all processes: finished, the share of
        episodes that their game ended, not a limit; refused, the share of answers in the right form
        that the game did not take; unread, the share of them on which it raised."""
        from runtime.distributed import processes  # brings torch, which an episode does not need

        counts = sum(processes.gather([self.counts]), Counter())
        self.counts = Counter()
        shares = {"finished": "episodes", "refused": "actions", "unread": "actions"}
        return {name: counts[name] / counts[of] for name, of in shares.items() if counts[of]}


class Episode:
    """One game. `prompt` is the first user message; `step` takes the model's whole response."""

    def __init__(self, env: TextGame, task: int):
        self.env, self.generators = env, Generators(task)
        self.steps, self.total, self.done = 0, 0.0, False
        with self.generators.in_place():
            self.game = env.package(env.game, task)
        said = self.game.start
        self.board, self.history = said.board, said.text
        start = paragraphs(said.text)
        self.opening = self.last = {*start}
        self.prompt = "\n\n".join([FORM, *start])

    @property
    def anchor(self) -> str:
        """The state by which steps are compared: what the game shows of it; where it shows nothing,
        all that was said and done."""
        return self.board or self.history

    @property
    def score(self) -> float:
        """The game's rewards so far as a part of the most, 0 to 1."""
        return min(max(round(self.total / self.env.points, 6), 0.0), 1.0)

    def step(self, text: str) -> tuple[str, float, bool, dict]:
        """Play a response.

        Anything but a thought and one action is invalid: a step passes, and the game does not hear
        of it. Returns (observation, reward, done, info): reward 0.0 until the last step, which has
        the score. info holds valid (also False where the game says so), success (the score is 1),
        score, anchor and game_reward (the game's own). Raises RuntimeError after the end of the
        episode, and what a game raises that fails, but never for the text itself.
        """
        if self.done:
            raise RuntimeError("this episode is over: reset the environment")
        counts = self.env.counts
        counts["episodes"] += self.steps == 0
        self.steps += 1

        before, words = self.total, (action_words(text) or "").strip()
        said, observation = None, NO_FORM
        if words and len(words) <= MOST_CHARACTERS and words.isprintable():
            counts["actions"] += 1
            try:
                with self.generators.in_place():
                    said = self.game.act(words)
            except UNREADABLE:  # a game that reads such words wrongly
                observation = UNREAD
                counts["unread"] += 1
        if said:
            self.board, self.total, self.done = said.board or self.board, said.total, said.done
            self.history += f"\n\n{words}\n\n{said.text}"
            observation = self.news(said.text) or said.text
            self.last = {*paragraphs(said.text)}
            counts["finished"] += said.done
        elif board := self.news(self.board):
            observation = f"{observation}\n\n{board}"

        valid = bool(said and said.valid)
        counts["refused"] += bool(said) and not valid
        self.done = self.done or self.steps >= self.env.max_steps
        info = {
            "valid": valid,
            "success": self.score == 1.0,
            "score": self.score,
            "anchor": self.anchor,
            "game_reward": self.total - before,
        }
        return observation, self.score if self.done else 0.0, self.done, info

    def news(self, text: str) -> str:
        """A text without the paragraphs that stand in the game's first text and in its last one
        too: rules and lists that do not change, and a board that is still the first."""
        both = self.opening & self.last
        return "\n\n".join(part for part in paragraphs(text) if part not in both)


def paragraphs(text: str) -> list[str]:
    return [part.strip("\n") for part in text.split("\n\n") if part.strip()]
