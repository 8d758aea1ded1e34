"""The door for what a world returns (envs/README.md): numbers of numpy and torch become Python's, a
wrong type ends the run with one line, a world that raises costs its own episode (WorldFault)."""

import asyncio
import copy
import inspect
import math
import os
import reprlib
import sys
import types
from collections import Counter
from collections.abc import Sequence
from contextlib import contextmanager, suppress
from itertools import combinations, islice
from pathlib import Path

from runtime.data import Seen
from runtime.flags import LARGE, refuse
from runtime.view.terminal import first_line, plain, raised_at

import torch

TRUTHS, NUMBERS = ("valid", "success"), ("score", "game_reward", "progress")  # of info
needed: set[str] = set()  # the keys of info that this script needs, and others do not
began: dict = {}  # OURS as the script began
SHORT = reprlib.Repr()  # what a line shows of a value, also where its own repr raises
SHORT.maxstring = SHORT.maxother = SHORT.maxlong = 150


class WorldFault(Exception):
    """A world raised in the middle of an episode."""


class Refused(SystemExit):
    """What ends a run with one line: a world gave what it may not."""


def outputs(streams: list = ()) -> list:
    """sys.stdout and sys.stderr, or these, without one that is closed."""
    return [s for s in streams or (sys.stdout, sys.stderr) if not getattr(s, "closed", False)]


OURS = {  # what is the process's own, and not a world's: what sets it
    outputs: lambda was: vars(sys).update(zip(("stdout", "stderr"), 2 * outputs(was))),
    os.getcwd: os.chdir,
    torch.initial_seed: torch.manual_seed,
    torch.get_default_device: lambda cpu: torch.set_default_device(None),  # slow if it is set
    torch.get_default_dtype: torch.set_default_dtype,
    torch.is_grad_enabled: torch.set_grad_enabled,
}


@contextmanager
def as_before(env, where: str):
    """Around what a world does. Exits if it set OURS, which is set back."""
    before = {read: read() for read in OURS}
    try:
        yield
    finally:
        for read, was in before.items():
            if (found := read()) != was:
                OURS[read](was)
                require(False, env, f"{where}{read.__name__}()", found, f"{was}, as before")


class Door:
    """A world as one episode's `play` sees it: its reset and its other attributes. begun: what it
    has returned for the episodes that are played beside this one, {id: object}."""

    def __init__(self, env, task: int, begun: dict | None = None):
        self.env, self.task = env, task
        self.episode, self.begun = None, {} if begun is None else begun

    def __getattr__(self, name: str):
        return getattr(self.env, name)

    def reset(self, task: int) -> "Episode":
        """A fresh episode. Raises WorldFault where the world raises."""
        with self.guarded():
            own = self.env.reset(task)
            shared = own is self.env or id(own) in self.begun
            has_state = getattr(own, "__dict__", None) or hasattr(own, "__slots__")
            is_own = not (shared and has_state) and not inspect.iscoroutine(own)
            self.require(is_own, "reset", own, "an object of its own: all are played side by side")
            self.begun[id(own)] = own
            self.episode = Episode(self, own)
        return self.episode

    async def aclose(self) -> None:
        """Tell the world that its episode is not played on, where it wants to know."""
        if self.episode:
            with self.guarded():
                closed = getattr(self.episode.own, "close", lambda: None)()
            if inspect.isawaitable(closed):
                await self.waited(closed)

    @contextmanager
    def guarded(self):
        """Around what the world and its classes do. Raises WorldFault where one of them raises."""
        with as_before(self.env, f"task {self.task}: "):
            try:
                yield
            except (KeyboardInterrupt, GeneratorExit, Refused):
                raise
            except BaseException as error:  # a panic in Rust is no Exception
                with suppress(RuntimeError):  # no loop runs before a run begins
                    stopped = isinstance(error, asyncio.CancelledError)
                    if stopped and asyncio.current_task().cancelling():
                        raise error  # not the world's: the rollout is stopped
                fault = WorldFault(f"task {self.task}: the world raised {first_line(error)}")
                fault.place = raised_at(error)
                fault.counted = number_of(asked(error, "counted", 0)) == 1  # in the summary
                raise fault from error

    @types.coroutine
    def waited(self, awaitable, take=lambda found: found):
        """What the world's awaitable returns, taken; guarded while it runs, not while others do."""
        own = thrown = None
        while True:
            with self.guarded():
                try:
                    own = own or awaitable.__await__()
                    awaited = own.throw(thrown) if thrown else next(own)
                except StopIteration as end:
                    return take(end.value)
            try:
                thrown = yield awaited
            except BaseException as error:
                thrown = error

    def require(self, is_right: bool, field: str, found, expected: str) -> None:
        """End the run where a field of what the world returned is not what it has to be."""
        require(is_right, self.env, f"task {self.task}: {field}", found, expected)

    def number(self, field: str, found) -> float:
        value = number_of(found)
        is_right = value is not None and abs(value) <= LARGE  # float32 has to square its sums
        self.require(is_right, field, found, f"a finite number, {LARGE:g} at most")
        return value

    def truth(self, field: str, found) -> bool:
        self.require(number_of(found) in (0.0, 1.0), field, found, "True or False")
        return bool(found)


class Episode:
    """A world's episode behind the door."""

    def __init__(self, door: Door, own):
        self.door, self.own = door, own
        self.anchor = self.state("anchor", getattr(own, "anchor", None))
        self.prompt = self.seen("prompt", own.prompt)

    def __getattr__(self, name: str):
        return getattr(self.own, name)

    async def opening(self) -> Seen:
        """The first user message of a conversation, once the other side has opened it."""
        with self.door.guarded():
            words = self.own.opening()
        return await self.door.waited(words, lambda words: self.seen("opening", words))

    async def leave(self) -> tuple[float, bool, float]:
        """(reward, success, score) of a conversation that ends here."""
        with self.door.guarded():
            found = self.own.leave()
        found = await self.door.waited(found)
        number, truth = self.door.number, self.door.truth
        with self.door.guarded():
            reward, success, score = found
            return number("reward", reward), truth("success", success), number("score", score)

    def step(self, text: str) -> "Told":
        """(observation, reward, done, info) of an answer, awaited if the world waits."""
        with self.door.guarded():
            return Told(self, self.own.step(text))

    def checked(self, result) -> tuple[Seen, float, bool, dict]:
        """A step's result, of Python's own types; info with the keys that a Step has."""
        door = self.door
        is_step = isinstance(result, tuple) and len(result) == 4
        door.require(is_step, "step", result, "a tuple (observation, reward, done, info)")
        observation, reward, done, info = result
        door.require(isinstance(info, dict), "info", info, "a dict")
        for name in (*TRUTHS, "score", *needed):
            door.require(name in info, "info", sorted(map(str, info)), f"the key {name!r}")
        told = {name: door.truth(f"info[{name!r}]", info[name]) for name in TRUTHS}
        told |= {n: door.number(f"info[{n!r}]", info[n]) for n in NUMBERS if n in info}
        told["anchor"] = self.state("info['anchor']", info.get("anchor"))
        seen = self.seen("observation", observation)
        return seen, door.number("reward", reward), door.truth("done", done), told

    def state(self, field: str, found):
        """A copy of an anchor, which a script that compares steps by their states needs."""
        lacks = found is None and "anchor" in needed
        expected = "the state: this script compares the steps that were taken in equal ones"
        self.door.require(not lacks, field, found, expected)
        return state_of(self.door.env, f"task {self.door.task}: {field}", found)

    def seen(self, field: str, text) -> Seen:
        """Words, with the episode's picture beside them; halves of surrogate pairs become "?"."""
        self.door.require(isinstance(text, str), field, text, "a str")
        seen = Seen(text.encode("utf-8", "replace").decode())
        if getattr(self.door.env, "shows_pictures", False):
            png = seen.picture = self.own.picture
            self.door.require(isinstance(png, bytes), "picture", png, "the bytes of a PNG")
        return seen


class Told:
    """A step's result, which may be awaited; exits if it is not where the world waits."""

    def __init__(self, episode: Episode, result):
        self.episode, self.waits = episode, inspect.isawaitable(result)
        self.result = result if self.waits else episode.checked(result)

    def __await__(self):
        if not self.waits:
            return self.result
        return (yield from self.episode.door.waited(self.result, self.episode.checked))

    def __iter__(self):
        wanted = "a tuple; `await episode.step(text)` in play takes a step that waits"
        self.episode.door.require(not self.waits, "step", self.result, wanted)
        return iter(self.result)


def state_of(env, what: str, found):
    """A copy of a state, which the world may go on changing; exits where it is no equal one."""
    try:
        own = copy.deepcopy(found)
        is_state = hash(found) == hash(own) and bool(found == own)
    except (Exception, SystemExit):  # of a world's own class, or an array
        is_state = False
    require(is_state, env, what, found, "something hashable, equal where states are")
    return own


def require(is_right: bool, env, what: str, found, expected: str) -> None:
    """End the run with one line where something is not what it has to be."""
    if not is_right:
        told = f"{getattr(env, 'name', type(env).__name__)}: {what} is {type(found).__name__}"
        with suppress(Exception, SystemExit):  # a number of 5,000 figures
            told = f"{told} {SHORT.repr(found)}"
        if inspect.iscoroutine(found):
            found.close()  # else Python warns of it as well
        raise Refused(plain(f"{' '.join(told.split())[:300]}, expected {expected}"))


def number_of(found) -> float | None:
    """A number of Python, numpy or torch as a float; None if it is none, masked or not finite."""
    try:
        found = found.item() if hasattr(found, "item") and not getattr(found, "mask", 0) else found
        return float(found) if isinstance(found, int | float) and math.isfinite(found) else None
    except (Exception, SystemExit):  # of more than one number, or of a class of the world's
        return None


def task_of(env, task) -> int:
    """A task's number as Python's int; exits with one line where it is none."""
    value = number_of(task)
    require(value is not None and value.is_integer(), env, "a task", task, "a whole number")
    return int(task)


def check_world(env, least: int = 0):
    """The world that evaluates; exits where one has no name, no right tasks, or few to train on."""
    eval_env = env if (found := asked(env, "eval_env", None)) is None else found
    if (data := asked(env, "data", None)) is not None:
        is_there = isinstance(data, str | Path) and os.path.isdir(data)
        require(is_there, env, "data", data, "a directory")
    for world in {id(each): each for each in (env, eval_env)}.values():
        name, of_a_line = asked(world, "name", None), "a str of one line"
        require(isinstance(name, str) and name.isprintable(), world, "name", name, of_a_line)
        measures = asked(world, "measures", [])
        require(isinstance(measures, list | tuple), world, "measures", measures, "a list of names")
        wanted, sets = {"train_tasks": world is env, "eval_tasks": world is eval_env}, {}
        for kind in (*wanted, "validation_tasks"):
            if (tasks := asked(world, kind, None)) is None and not wanted.get(kind):
                continue
            is_sequence = isinstance(tasks, Sequence) and not isinstance(tasks, str | bytes)
            require(is_sequence, world, kind, tasks, "a sequence of task numbers: a range, a list")
            sets[kind] = tasks[::-1] if isinstance(tasks, range) and tasks.step < 0 else tasks
            if not isinstance(tasks, range):
                sets[kind] = Counter(task_of(world, t) for t in islice(tasks, len(tasks) + 1))
                (task, times), *_ = sets[kind].most_common(1) or [(0, 0)]
                require(times < 2, world, f"a task in {kind}", task, f"once, not {times} times")
                require(sets[kind].total() == len(tasks), world, kind, tasks, "as many as len()")
        for (one, few), (other, many) in combinations(sets.items(), 2):
            few, many = sorted((few, many), key=len)
            if few and isinstance(few, range) and isinstance(many, range):  # they may be long
                few = few[max(0, (many[0] - few[0]) // few.step) :][: many.step + 1]
            both = next((task for task in few if task in many), None)
            require(both is None, world, f"a task in {one} and {other}", both, "none in two sets")
    if least > (number := len(env.train_tasks)):
        refuse("tasks_per_iteration", least, f"{env.name} has {number} training tasks")
    return eval_env


def opened(env, task) -> Episode:
    """A task's fresh episode, before a run begins; exits with one line where the world raises."""
    try:
        return Door(env, task := task_of(env, task)).reset(task)
    except WorldFault as fault:
        sys.exit(plain(f"{env.name}: {fault}{fault.place}"))


def asked(env, name: str, default, *given):
    """An attribute of the world, what its method returns, or the default; exits if it raises."""
    called = f"({', '.join(map(str, given))})" if given or name == "summary" else ""
    try:
        with as_before(env, f"{name}{called}: "):
            is_there = inspect.getattr_static(env, name, None) is not None
            found = getattr(env, name) if is_there else getattr(env, name, default)
            return found(*given) if called and hasattr(env, name) else found
    except (Exception, SystemExit) as error:
        if isinstance(error, SystemExit) and isinstance(error.code, str):
            raise  # a world's own line
        of = type(env).__name__ if name == "name" else getattr(env, "name", type(env).__name__)
        sys.exit(plain(f"{of}: {name}{called} raised {first_line(error)}"))


def summary_of(env) -> dict[str, float]:
    """The world's numbers of the episodes since the last call; exits where a value is no number."""
    found = asked(env, "summary", {})
    require(isinstance(found, dict), env, "summary()", found, "a dict of numbers")
    for key, value in found.items():
        require(number_of(value) is not None, env, f"summary()[{key!r}]", value, "a finite number")
    return {str(key): number_of(value) for key, value in found.items()}
