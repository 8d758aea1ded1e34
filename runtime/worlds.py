"""The door through which everything comes that a world returns (envs/README.md): numbers of numpy
and torch become Python's, a field of the wrong type ends the run with one line, and a world that
raises costs its own episode (WorldFault).
"""

import inspect
import math
import sys
from contextlib import contextmanager

from runtime.data import Seen
from runtime.view.terminal import plain

TRUTHS, NUMBERS = ("valid", "success"), ("score", "game_reward", "progress")  # of info
NEEDED = ("valid", "success", "score")


class WorldFault(Exception):
    """A world raised in the middle of an episode."""


class Door:
    """A world as one episode's `play` sees it: its reset and its other attributes."""

    def __init__(self, env, task: int):
        self.env, self.task = env, task
        self.episode = None

    def __getattr__(self, name: str):
        return getattr(self.env, name)

    def reset(self, task: int) -> "Episode":
        """A fresh episode. Raises WorldFault where the world raises."""
        with self.guarded():
            own = self.env.reset(task)
        self.episode = Episode(self, own)
        return self.episode

    def close(self) -> None:
        """Tell the world that its episode is not played on, where it wants to know."""
        if self.episode and hasattr(self.episode.own, "close"):
            with self.guarded():
                self.episode.own.close()

    @contextmanager
    def guarded(self):
        """Around what the world does. Raises WorldFault where it raises."""
        try:
            yield
        except (Exception, SystemExit) as error:
            told = f"the world raised {type(error).__name__}: {str(error).partition(chr(10))[0]}"
            fault = WorldFault(f"task {self.task}: {told}")
            fault.counted = getattr(error, "counted", False)  # by the world itself, in its summary
            raise fault from error

    def require(self, is_right: bool, field: str, found, expected: str) -> None:
        """End the run where a field of what the world returned is not what it has to be."""
        require(is_right, self.env, f"task {self.task}: {field}", found, expected)

    def number(self, field: str, found) -> float:
        value = number_of(found)
        self.require(value is not None, field, found, "a finite number")
        return value

    def truth(self, field: str, found) -> bool:
        self.require(number_of(found) in (0.0, 1.0), field, found, "True or False")
        return bool(found)


class Episode:
    """A world's episode behind the door."""

    def __init__(self, door: Door, own):
        self.door, self.own = door, own
        with door.guarded():
            anchor, prompt = getattr(own, "anchor", None), own.prompt
        self.anchor = self.hashable("anchor", anchor)
        self.prompt = self.seen("prompt", prompt)

    def __getattr__(self, name: str):
        return getattr(self.own, name)

    async def opening(self) -> Seen:
        """The first user message of a conversation, once the other side has opened it."""
        with self.door.guarded():
            words = await self.own.opening()
        return self.seen("opening", words)

    async def leave(self) -> tuple[float, bool, float]:
        """(reward, success, score) of a conversation that ends here."""
        with self.door.guarded():
            reward, success, score = await self.own.leave()
        door = self.door
        return door.number("reward", reward), bool(success), door.number("score", score)

    def step(self, text: str):
        """(observation, reward, done, info) of an answer, or something to await that returns it."""
        with self.door.guarded():
            result = self.own.step(text)
        return self.checked_later(result) if inspect.isawaitable(result) else self.checked(result)

    async def checked_later(self, result) -> tuple[Seen, float, bool, dict]:
        with self.door.guarded():
            result = await result
        return self.checked(result)

    def checked(self, result) -> tuple[Seen, float, bool, dict]:
        """A step's result, of Python's own types; info with the keys that a Step has."""
        door = self.door
        is_step = isinstance(result, tuple) and len(result) == 4
        door.require(is_step, "step", result, "a tuple (observation, reward, done, info)")
        observation, reward, done, info = result
        door.require(isinstance(info, dict), "info", info, "a dict")
        for name in NEEDED:
            door.require(name in info, "info", sorted(map(str, info)), f"the key {name!r}")
        told = {name: door.truth(f"info[{name!r}]", info[name]) for name in TRUTHS}
        told |= {n: door.number(f"info[{n!r}]", info[n]) for n in NUMBERS if n in info}
        told["anchor"] = self.hashable("info['anchor']", info.get("anchor"))
        seen = self.seen("observation", observation)
        return seen, door.number("reward", reward), door.truth("done", done), told

    def hashable(self, field: str, found):
        try:
            hash(found)
        except TypeError:
            self.door.require(False, field, found, "something hashable")
        return found

    def seen(self, field: str, text) -> Seen:
        """Words, with the episode's picture beside them."""
        self.door.require(isinstance(text, str), field, text, "a str")
        seen = Seen(text)
        if getattr(self.door.env, "shows_pictures", False):
            with self.door.guarded():
                png = seen.picture = self.own.picture
            self.door.require(isinstance(png, bytes), "picture", png, "the bytes of a PNG")
        return seen


def require(is_right: bool, env, what: str, found, expected: str) -> None:
    """End the run with one line where something is not what it has to be."""
    if not is_right:
        name = getattr(env, "name", type(env).__name__)
        told = f"{name}: {what} is {type(found).__name__} {found!r}"[:300]
        sys.exit(plain(f"{told}, expected {expected}"))


def number_of(found) -> float | None:
    """A number of Python, numpy or torch as a float; None where it is none, or not finite."""
    try:
        found = found.item() if hasattr(found, "item") else found
        return float(found) if isinstance(found, int | float) and math.isfinite(found) else None
    except (ValueError, RuntimeError, TypeError, OverflowError):  # of an array, more than one
        return None


def task_of(env, task) -> int:
    """A task's number as Python's int; exits with one line where it is none."""
    value = number_of(task)
    require(value is not None and value.is_integer(), env, "a task", task, "a whole number")
    return int(task)


def summary_of(env) -> dict[str, float]:
    """The world's numbers of the episodes since the last call; exits where a value is no number."""
    found = env.summary() if hasattr(env, "summary") else {}
    require(isinstance(found, dict), env, "summary()", found, "a dict of numbers")
    numbers = {key: number_of(value) for key, value in found.items()}
    for key, number in numbers.items():
        require(number is not None, env, f"summary()[{key!r}]", found[key], "a finite number")
    return {str(key): number for key, number in numbers.items()}
