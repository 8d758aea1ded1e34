"""The door through which everything comes that a world returns (envs/README.md).

Numbers of numpy and torch become Python's. A field of the wrong type ends the run with one line
that names world, task, field and what was expected: the world's program is wrong. A world that
raises costs its own episode (WorldFault).
"""

import inspect
import math
import sys

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
        self.episode = Episode(self, self.guarded(self.env.reset, task))
        return self.episode

    def close(self) -> None:
        """Tell the world that its episode is not played on, where it wants to know."""
        if self.episode and hasattr(self.episode.own, "close"):
            self.guarded(self.episode.own.close)

    def guarded(self, function, *inputs):
        """function(*inputs) of the world. Raises WorldFault where it raises."""
        try:
            return function(*inputs)
        except (Exception, SystemExit) as error:
            raise self.fault(error) from error

    async def awaited(self, result):
        """What the world's coroutine returns. Raises WorldFault where it raises."""
        try:
            return await result
        except (Exception, SystemExit) as error:
            raise self.fault(error) from error

    def fault(self, error) -> WorldFault:
        told = str(error).split("\n")[0]
        fault = WorldFault(f"task {self.task}: the world raised {type(error).__name__}: {told}")
        fault.counted = getattr(error, "counted", False)  # by the world itself, in its summary
        return fault

    def refuse(self, field: str, found, expected: str) -> None:
        """End the run: a field of what the world returned is not what it has to be."""
        refuse(self.env, f"task {self.task}: {field}", found, expected)

    def number(self, field: str, found) -> float:
        value = number_of(found)
        if value is None:
            self.refuse(field, found, "a finite number")
        return value

    def truth(self, field: str, found) -> bool:
        if number_of(found) not in (0.0, 1.0):
            self.refuse(field, found, "True or False")
        return bool(found)


class Episode:
    """A world's episode behind the door."""

    def __init__(self, door: Door, own):
        self.door, self.own = door, own
        self.anchor = self.hashable("anchor", door.guarded(getattr, own, "anchor", None))
        self.prompt = self.seen("prompt", door.guarded(getattr, own, "prompt"))

    def __getattr__(self, name: str):
        return getattr(self.own, name)

    async def opening(self) -> Seen:
        """The first user message of a conversation, once the other side has opened it."""
        return self.seen("opening", await self.door.awaited(self.own.opening()))

    async def leave(self) -> tuple[float, bool, float]:
        """(reward, success, score) of a conversation that ends here."""
        reward, success, score = await self.door.awaited(self.own.leave())
        door = self.door
        return door.number("reward", reward), bool(success), door.number("score", score)

    def step(self, text: str):
        """(observation, reward, done, info) of an answer; of a world that has to be awaited,
        something to await."""
        result = self.door.guarded(self.own.step, text)
        return self.checked_later(result) if inspect.isawaitable(result) else self.checked(result)

    async def checked_later(self, result) -> tuple[Seen, float, bool, dict]:
        return self.checked(await self.door.awaited(result))

    def checked(self, result) -> tuple[Seen, float, bool, dict]:
        """A step's result, of Python's own types; info with the keys that a Step has."""
        door = self.door
        if not isinstance(result, tuple) or len(result) != 4:
            door.refuse("step", result, "a tuple (observation, reward, done, info)")
        observation, reward, done, info = result
        if not isinstance(info, dict):
            door.refuse("info", info, "a dict")
        if missing := [name for name in NEEDED if name not in info]:
            door.refuse("info", sorted(map(str, info)), f"the key {missing[0]!r}")
        told = {name: door.truth(f"info[{name!r}]", info[name]) for name in TRUTHS}
        told |= {n: door.number(f"info[{n!r}]", info[n]) for n in NUMBERS if n in info}
        told["anchor"] = self.hashable("info['anchor']", info.get("anchor"))
        seen = self.seen("observation", observation)
        return seen, door.number("reward", reward), door.truth("done", done), told

    def hashable(self, field: str, found):
        try:
            hash(found)
        except TypeError:
            self.door.refuse(field, found, "something hashable")
        return found

    def seen(self, field: str, text) -> Seen:
        """Words, with the episode's picture beside them."""
        if not isinstance(text, str):
            self.door.refuse(field, text, "a str")
        seen = Seen(text)
        if getattr(self.door.env, "shows_pictures", False):
            seen.picture = self.door.guarded(getattr, self.own, "picture")
            if not isinstance(seen.picture, bytes):
                self.door.refuse("picture", seen.picture, "the bytes of a PNG")
        return seen


def refuse(env, what: str, found, expected: str) -> None:
    """End the run with one line."""
    name = getattr(env, "name", type(env).__name__)
    sys.exit(
        plain(
            f"{name}: {what} is {type(found).__name__} {found!r}"[:300] + f", expected {expected}"
        )
    )


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
    if value is None or value != int(value):
        refuse(env, "a task", task, "a whole number")
    return int(task)


def summary_of(env) -> dict[str, float]:
    """What the world has to say of the episodes since the last call, as numbers; {} where it says
    nothing. Exits with one line where a value is no number."""
    found = env.summary() if hasattr(env, "summary") else {}
    if not isinstance(found, dict):
        refuse(env, "summary()", found, "a dict of numbers")
    for key, value in found.items():
        if number_of(value) is None:
            refuse(env, f"summary()[{key!r}]", value, "a finite number")
    return {str(key): number_of(value) for key, value in found.items()}
