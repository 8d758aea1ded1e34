"""What a world may do wrong (envs/README.md): it raises, or returns what it may not. And what stops
a rollout in its middle: a signal, or an engine that fails."""

import ast
import asyncio
import gc
import json
import os
import re
import signal
import types
from pathlib import Path

import runtime.engines.transformers
from envs.sokoban import Episode, Sokoban
from envs.sotopia.conversation import Conversation
from runtime.engines import EngineError, SamplingParams
from runtime.rollout import Stage, rollout
from runtime.worlds import summary_of

import numpy as np
import pytest
import torch
from conftest import ROOT, load, run_main, settings

SCRIPT = "rloo_sokoban"
SMALL = """--engine hf --tasks-per-iteration 3 --group-size 4 --eval-tasks 5 --eval-samples 1
--eval-every 1 --max-steps 3 --iterations 1 --seed 3""".split()
PLAY = load(SCRIPT).play


def rows_of(path) -> list[dict]:
    def no(word):
        raise ValueError(f"{word} is no JSON")

    return [json.loads(line, parse_constant=no) for line in path.read_text().splitlines()]


# ------------ a world of one kind of answer ------------


class World:
    """Its episodes end after two steps; the first one of a task returns what is given."""

    name = "a small world"

    def __init__(self, **given):
        self.given, self.begun, self.closed = given, [], []

    def reset(self, task):
        self.begun.append(task)
        return Small(self, task, self.given if self.begun.count(task) == 1 else {})


class Small:
    def __init__(self, world, task, given):
        self.world, self.task, self.given, self.steps = world, task, given, 0
        self.prompt, self.anchor = given.get("prompt", "walk"), given.get("first_anchor")

    def step(self, text):
        self.steps += 1
        info = {"valid": True, "success": self.steps == 2, "score": 0.5}
        if isinstance(more := self.given.get("info", {}), dict):
            info |= more
        info = {key: value for key, value in info.items() if value is not MISSING}
        told = {"observation": "seen", "reward": 0.25, "done": self.steps == 2, "info": info}
        told |= {name: given for name, given in self.given.items() if not isinstance(given, dict)}
        return told.get("result", tuple(told[name] for name in NAMES))

    def close(self):
        self.world.closed.append(self.task)


NAMES, MISSING = ("observation", "reward", "done", "info"), object()


class Chat:
    stop_ids = (2,)

    def prompt(self, seen):
        return [1]

    def observation(self, seen, action):
        return [3]

    def response(self, action):
        return "go"


class Engine:
    async def sample(self, context, sampling):
        await asyncio.sleep(0)
        return [5, 2], [-1.0, -1.0]

    async def serve(self):
        await asyncio.Event().wait()


def played(world, tasks=(7, 7, 7, 8, 8, 8), play=PLAY, engine=None):
    """(trajectories of a rollout in this world, the stage)"""
    stage = Stage(engine or Engine(), Chat(), settings(max_steps=4))
    return rollout(stage, play, world, [*tasks], SamplingParams()), stage


HASHABLE, NUMBER, TRUTH = "something hashable", "a finite number", "True or False"
TUPLE = "a tuple (observation, reward, done, info)"
WRONG = {  # what it is: (what the world gives, the field that is named, what was expected)
    "Gymnasium's five": ({"result": ("seen", 0.0, False, False, {})}, "step", TUPLE),
    "nothing": ({"result": None}, "step", TUPLE),
    "a list of four": ({"result": ["seen", 0.0, False, {}]}, "step", TUPLE),
    "an observation of None": ({"observation": None}, "observation", "a str"),
    "an observation of bytes": ({"observation": b"seen"}, "observation", "a str"),
    "an observation of a list": ({"observation": ["seen"]}, "observation", "a str"),
    "a prompt of bytes": ({"prompt": b"walk"}, "prompt", "a str"),
    "info is a list": ({"info": []}, "info", "a dict"),
    "info is None": ({"info": None}, "info", "a dict"),
    "no valid": ({"info": {"valid": MISSING}}, "info", "the key 'valid'"),
    "no success": ({"info": {"success": MISSING}}, "info", "the key 'success'"),
    "no score": ({"info": {"score": MISSING}}, "info", "the key 'score'"),
    "a reward of NaN": ({"reward": float("nan")}, "reward", NUMBER),
    "a reward of inf in numpy": ({"reward": np.float32("inf")}, "reward", NUMBER),
    "a reward of 400 figures": ({"reward": 10**400}, "reward", NUMBER),
    "a reward in words": ({"reward": "1"}, "reward", NUMBER),
    "a reward of None": ({"reward": None}, "reward", NUMBER),
    "two rewards": ({"reward": torch.zeros(2)}, "reward", NUMBER),
    "no rewards": ({"reward": np.zeros(0)}, "reward", NUMBER),
    "a score of NaN": ({"info": {"score": np.nan}}, "info['score']", NUMBER),
    "a game reward in words": ({"info": {"game_reward": "x"}}, "info['game_reward']", NUMBER),
    "a progress of None": ({"info": {"progress": None}}, "info['progress']", NUMBER),
    "valid is a text": ({"info": {"valid": "yes"}}, "info['valid']", TRUTH),
    "success is 2": ({"info": {"success": 2}}, "info['success']", TRUTH),
    "done is None": ({"done": None}, "done", TRUTH),
    "an anchor of a list": ({"info": {"anchor": [1]}}, "info['anchor']", HASHABLE),
    "an anchor at the start": ({"first_anchor": {1: 2}}, "anchor", HASHABLE),
    "another prompt": ({"prompt": "run"}, "prompt", "the same as in the task's other episodes"),
}


def assert_one_line(stop, *parts) -> None:
    said = stop.value.code
    assert isinstance(said, str) and len(said.splitlines()) == 1 and said.isprintable()
    assert len(said) < 500 and all(part in said for part in parts), said


@pytest.mark.parametrize("what", WRONG)
def test_what_a_world_may_not_return_is_named_in_one_line(what):
    given, field, expected = WRONG[what]
    with pytest.raises(SystemExit) as stop:
        played(World(**given))
    assert_one_line(stop, "a small world: task 7: ", f"{field} is ", f", expected {expected}")


def test_what_it_returned_is_shown_short_and_plain():
    for reward in ("\x1b[2J\n" * 999, b"\x1b[2J" * 999, "\u202e"):
        with pytest.raises(SystemExit) as stop:
            played(World(reward=reward))
        assert_one_line(stop, "reward is ", "expected a finite number")


@pytest.mark.parametrize("task", [1.5, "7", None, float("nan")])
def test_a_task_is_a_whole_number(task):
    with pytest.raises(SystemExit) as stop:
        played(World(), [task])
    assert_one_line(stop, "a small world: a task is ", "expected a whole number")
    trajectories, _ = played(World(), [np.int64(7), torch.tensor(7)])
    assert [t.task for t in trajectories] == [7, 7] and type(trajectories[0].task) is int


def test_a_summary_is_a_dict_of_numbers():
    def world(found):
        return types.SimpleNamespace(name="a small world", summary=lambda: found)

    numbers = {"a": np.float32(0.5), "b": torch.tensor(3), "c": True, 4: 2}
    assert summary_of(world(numbers)) == {"a": 0.5, "b": 3.0, "c": 1.0, "4": 2.0}
    assert summary_of(types.SimpleNamespace()) == {}
    for found in (None, [1], {"goal": "high"}, {"goal": float("nan")}):
        with pytest.raises(SystemExit) as stop:
            summary_of(world(found))
        assert_one_line(stop, "a small world: summary()", "expected a")


# ------------ a world that raises ------------


def raising(*places):
    """A world of which the first episode of each task raises there."""

    class Raising(World):
        def reset(self, task):
            episode = super().reset(task)
            if self.begun.count(task) > 1 or task not in places:
                return episode
            if places[task] == "reset":
                raise KeyError("no such room")
            return Broken(self, task, places[task])

    places = dict(zip((7, 8), places))
    return Raising()


class Broken(Small):
    def __init__(self, world, task, place):
        self.place = place
        super().__init__(world, task, {})

    @property
    def prompt(self):
        if self.place == "prompt":
            raise OSError("the world broke")
        return "walk"

    @prompt.setter
    def prompt(self, text):
        pass

    def step(self, text):
        if self.place == "step":
            raise ValueError("the world broke\nin two lines")
        if self.place == "exit":
            raise SystemExit("the world left")
        return super().step(text)

    def close(self):
        if self.place == "close":
            raise OSError("it does not close")
        super().close()


@pytest.mark.parametrize(
    "place, told",
    {
        "reset": "KeyError: 'no such room'",
        "prompt": "OSError: the world broke",
        "step": "ValueError: the world broke",
        "exit": "SystemExit: the world left",
        "close": "OSError: it does not close",
    }.items(),
)
def test_an_episode_whose_world_raises_is_left_out_named_and_counted(place, told, capsys):
    trajectories, stage = played(raising(place))
    assert [t.task for t in trajectories] == [7, 7, 8, 8, 8] and stage.faults == 1
    assert all(len(t.steps) == 2 and t.success for t in trajectories)
    (line,) = capsys.readouterr().out.splitlines()
    head, end = f"warning: task 7: the world raised {told} ({__file__}, line ", "left out"
    number = re.fullmatch(re.escape(head) + rf"(\d+)\); this episode is {end}", line)[1]
    assert "raise " in Path(__file__).read_text().splitlines()[int(number) - 1]


def test_more_than_a_fifth_end_the_run():
    with pytest.raises(SystemExit) as stop:
        played(raising("step", "exit"))
    assert_one_line(stop, "stopped: 2 of 6 episodes failed (1 x the world raised ")


class Awaited(World):
    """Its episodes are awaited, as those of conversations."""

    def reset(self, task):
        return Wait(super().reset(task))


class Wait:
    def __init__(self, own):
        self.own, self.prompt = own, own.prompt

    async def opening(self):
        await asyncio.sleep(0)
        if "opening" in self.own.given:
            raise SystemExit("nobody is there")
        return self.prompt

    async def step(self, text):
        await asyncio.sleep(0)
        if "raises" in self.own.given:
            raise OSError("the line is dead")
        return self.own.step(text)


def test_a_world_that_is_awaited_is_checked_too(capsys):
    play = load("rloo_sotopia").play
    for what in ("Gymnasium's five", "a reward of NaN", "another prompt"):
        given, field, expected = WRONG[what]
        with pytest.raises(SystemExit) as stop:
            played(Awaited(**given), play=play)
        assert_one_line(stop, "a small world: task 7: ", f"{field} is ", f", expected {expected}")
    for given in ({"opening": 1}, {"raises": 1}):
        trajectories, stage = played(Awaited(**given), [7] * 6, play)
        assert len(trajectories) == 5 and stage.faults == 1
    told = capsys.readouterr().out
    assert "task 7: the world raised SystemExit: nobody is there" in told
    assert "task 7: the world raised OSError: the line is dead" in told


def test_every_episode_is_closed():
    world = World()
    played(world)
    assert sorted(world.closed) == [7, 7, 7, 8, 8, 8]


# ------------ through a whole run ------------


def test_a_run_leaves_out_what_raised_and_trains_on_the_rest(tmp_path, monkeypatch):
    """In training and in the evaluation panel; numbers of numpy and torch are numbers in the run's
    tables."""
    step, reset, calls, resets = Episode.step, Sokoban.reset, [], []

    def stepped(episode, text):
        calls.append(text)
        if len(calls) in (2, 40):  # the panel's second episode, and one of training
            raise SystemExit("the world left") if len(calls) == 2 else OSError("the world broke")
        observation, reward, done, info = step(episode, text)
        numbers = {"valid": np.bool_(info["valid"]), "success": torch.tensor(info["success"])}
        numbers |= {"score": np.float32(info["score"]), "progress": torch.tensor(0.5)}
        numbers |= {"game_reward": np.float64(info["game_reward"]), "anchor": info["anchor"]}
        return np.str_(observation), np.float32(reward), np.bool_(done), numbers

    def begun(env, task):
        resets.append(task in env.train_tasks)
        if sum(resets) == 2:
            resets.append(True)
            raise KeyError("no such room")
        return reset(env, task)

    monkeypatch.setattr(Episode, "step", stepped)
    monkeypatch.setattr(Sokoban, "reset", begun)
    monkeypatch.setattr(Sokoban, "summary", lambda env: {"rooms": np.int64(3)}, raising=False)
    done = run_main(SCRIPT, *SMALL, "--run-name", "faults", cwd=tmp_path)
    run = tmp_path / "runs/faults"
    first, row = rows_of(run / "metrics.jsonl")
    assert first["eval/faults"] == 1 and row["train/faults"] == 2 and "eval/faults" not in row
    assert done.stdout.count("the world raised") == 3
    for told in ("SystemExit: the world left", "OSError: the world broke", "KeyError: 'no such"):
        assert f"the world raised {told}" in done.stdout
    assert row["train/rooms"] == first["eval/rooms"] == 3
    episodes = rows_of(run / "episodes.jsonl")
    assert len(episodes) == 3 * 4 - 2 and len(rows_of(run / "eval_episodes.jsonl")) == 4 + 5
    assert {step["progress"] for e in episodes for step in e["steps"]} == {0.5}
    assert all(isinstance(row[f"train/{key}"], float) for key in ("success", "score", "return"))


def test_a_conversation_that_raises_is_left_out_and_counted(tmp_path, monkeypatch):
    add, calls = Conversation.add, []

    def added(conversation, side, words):
        calls.append(side)
        if len(calls) == 60:  # after the evaluation
            raise OSError("the world broke")
        return add(conversation, side, words)

    monkeypatch.setattr(Conversation, "add", added)
    done = run_main("rloo_sotopia", *SMALL, "--run-name", "lost", cwd=tmp_path)
    *_, row = rows_of(tmp_path / "runs/lost/metrics.jsonl")
    episodes = rows_of(tmp_path / "runs/lost/episodes.jsonl")
    counted = row.get("train/faults", 0) + row.get("train/lost", 0)
    assert counted == 12 - len(episodes) > 0, done.stdout


def test_too_many_end_the_run_in_one_line(tmp_path, monkeypatch):
    def broken(episode, text):
        raise OSError("the world broke")

    monkeypatch.setattr(Episode, "step", broken)
    done = run_main(SCRIPT, *SMALL, "--run-name", "broken", cwd=tmp_path, check=False)
    (line,) = done.stderr.strip().splitlines()
    assert done.returncode == 1
    assert line.startswith("stopped: 5 of 5 episodes failed (5 x the world raised OSError: the wo")
    assert not list((tmp_path / "runs").iterdir())


# ------------ what stops a rollout ------------


def stopped_in(where: str, what, monkeypatch) -> None:
    """From the 40th time on something happens in the engine, or in a world's step."""
    owner, name = {
        "the engine": (runtime.engines.transformers.TransformersEngine, "forward"),
        "a world's step": (Episode, "step"),
    }[where]
    real, calls = getattr(owner, name), []

    def counted(self, *given):
        calls.append(1)
        if len(calls) == 40:
            if isinstance(what, Exception):
                raise what
            os.kill(os.getpid(), what)
        return real(self, *given)

    monkeypatch.setattr(owner, name, counted)


STOPS = {
    "Ctrl-C in the engine": ("the engine", signal.SIGINT, "stopped: "),
    "Ctrl-C in a step": ("a world's step", signal.SIGINT, "stopped: "),
    "SIGTERM in the engine": ("the engine", signal.SIGTERM, "stopped by SIGTERM: "),
    "SIGTERM in a step": ("a world's step", signal.SIGTERM, "stopped by SIGTERM: "),
    "the engine fails": ("the engine", EngineError("it broke"), "stopped: it broke: "),
}


@pytest.mark.parametrize("how", STOPS)
def test_what_stops_a_rollout_ends_in_one_line(how, tmp_path, monkeypatch, caplog):
    """No word of asyncio, neither at once nor when its tasks are collected."""
    where, what, told = STOPS[how]
    stopped_in(where, what, monkeypatch)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        done = run_main(SCRIPT, *SMALL, "--run-name", "a", cwd=tmp_path, check=False)
    finally:
        signal.signal(signal.SIGINT, before)
    gc.collect()
    (line,) = done.stderr.strip().splitlines()
    assert done.returncode == 1 and line.startswith(told), line
    assert "no iteration was finished; begin it again with --resume runs/a" in line
    assert [record.getMessage() for record in caplog.records] == []


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, EngineError, KeyError])
def test_nothing_of_a_stopped_rollout_complains_later(error, caplog):
    """Raised by one episode, by all of them, or by the engine beside them."""

    class Failing(Engine):
        async def serve(self):
            await asyncio.sleep(0)
            raise error("it broke")

    class Asked(Engine):
        calls = 0

        async def sample(self, context, sampling):
            Asked.calls += 1
            if Asked.calls > 2:
                raise error("it broke")
            return await super().sample(context, sampling)

    for engine in (Failing(), Asked()):
        with pytest.raises(error, match="it broke"):
            played(World(), engine=engine)
        gc.collect()
        assert [record.getMessage() for record in caplog.records] == []


# ------------ python -O ------------


def test_no_assert_guards_anything():
    """python -O leaves them out."""
    paths = [
        p for pattern in ("*.py", "envs/**/*.py", "runtime/**/*.py") for p in ROOT.glob(pattern)
    ]
    trees = {path: ast.walk(ast.parse(path.read_text())) for path in paths}
    assert [
        path for path, tree in trees.items() if any(isinstance(n, ast.Assert) for n in tree)
    ] == []
