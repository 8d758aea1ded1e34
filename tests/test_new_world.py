"""What the pages tell to copy works as they tell it: the world of envs/README.md trains, and so
does README.md's copy of a script with another advantage."""

import importlib.util
import json
import os
import random
import re
import shlex
import shutil
import subprocess
import sys
from types import SimpleNamespace

import blocks
import pytest
from conftest import ROOT

PAGE = (ROOT / "envs" / "README.md").read_text()
README = (ROOT / "README.md").read_text()
MINE = "istar_webshop_mine.py"
SMALL = "--iterations 2 --tasks-per-iteration 6 --group-size 4 --eval-tasks 4 --eval-samples 1"
SMALL += " --eval-every 2 --engine hf --run-name new --seed 1"


def blocks_of(page, language, *words):
    """The code blocks of a page in this language in which all these words stand."""
    found = re.findall(rf"^```{language}\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    return [code for code in found if all(word in code for word in words)]


@pytest.fixture
def house(tmp_path):
    """A copy of what a user has, with the page's world in it."""
    for path in blocks.scripts(ROOT):
        shutil.copy(path, tmp_path)
    for name in ("envs", "runtime", "models"):
        shutil.copytree(ROOT / name, tmp_path / name)
    (tmp_path / "tests").mkdir()
    shutil.copy(ROOT / "tests" / "blocks.py", tmp_path / "tests")
    (code,) = blocks_of(PAGE, "python", "class ")
    (tmp_path / "envs" / "corridor.py").write_text(code)
    return tmp_path


def in_house(house, *command) -> str:
    """What a command says there that ends well; no module of this checkout is found from there."""
    here = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=house, capture_output=True, text=True, env=here)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def tables_of(house):
    """(rows, episodes) of the run."""
    files = (house / "runs/new" / name for name in ("metrics.jsonl", "episodes.jsonl"))
    return [[json.loads(line) for line in file.read_text().splitlines()] for file in files]


# ------------ a world ------------


@pytest.fixture
def corridor(house, monkeypatch):
    """The page's world as a module."""
    path = house / "envs" / "corridor.py"
    spec = importlib.util.spec_from_file_location("corridor", path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "corridor", module)  # dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module


def arguments(length):
    return SimpleNamespace(world=SimpleNamespace(corridor_length=length), max_steps=8)


@pytest.mark.parametrize("length", (40, 60))
def test_the_pages_world_keeps_the_pages_contract(corridor, length):
    env = corridor.Corridor.from_args(arguments(length))
    sets = [set(tasks) for tasks in (env.train_tasks, env.eval_tasks, env.validation_tasks)]
    assert all(len(tasks) >= 100 for tasks in sets) and len(env.eval_tasks) >= 128
    assert sum(map(len, sets)) == len(set.union(*sets))
    state = random.getstate()
    for task in (env.train_tasks[0], env.eval_tasks[-1]):
        again = corridor.Corridor.from_args(arguments(length)).reset(task)
        assert env.reset(task).prompt == again.prompt != env.reset(task + 1).prompt
    assert random.getstate() == state

    bad = ["", "left", "<action>left</action", "<think></think><action>up</action>", "\0" * 9999]
    episode = env.reset(env.train_tasks[0])
    for number, text in enumerate([*bad, *bad][:8], 1):
        observation, reward, done, info = episode.step(text)
        assert not info["valid"] and reward == 0.0 and "left or right" in observation
        assert done == (number == 8) and {"valid", "success", "score"} <= info.keys()
    with pytest.raises(RuntimeError):
        episode.step(bad[0])

    episode = env.reset(env.train_tasks[0])
    word, done = "right" if episode.door > episode.place else "left", False
    while not done:
        _, reward, done, info = episode.step(f"<think>there</think><action>{word}</action>")
        assert info["valid"] and reward == info["score"] == float(info["success"])
    assert reward == 1.0


def test_the_pages_world_trains_by_the_pages_commands(house):
    (commands,) = blocks_of(PAGE, "bash", "rloo_corridor.py")
    *edits, start = commands.strip().splitlines()
    in_house(house, "bash", "-c", "\n".join(edits))
    before = (house / "rloo_sokoban.py").read_text().splitlines()
    after = (house / "rloo_corridor.py").read_text().splitlines()
    changed = [new for old, new in zip(before, after, strict=True) if old != new]
    assert len(changed) == 3 and all("Corridor" in line for line in changed)

    python, *command = shlex.split(start)
    assert python == "python" and "--corridor-length" in command
    said = in_house(house, sys.executable, *command, *SMALL.split())
    assert "corridor of 60 cells, 8 steps" in said
    rows, episodes = tables_of(house)
    assert [row["iteration"] for row in rows] == [0, 1, 2]
    assert all(0 <= row["eval/success"] <= 1 for row in (rows[0], rows[2]))
    assert all(row["policy/grad_norm"] > 0 for row in rows[1:])
    assert all(row["train/success"] == row["train/score"] for row in rows[1:])

    assert len(episodes) == 2 * 6 * 4
    assert {episode["outcome"] for episode in episodes} == {0.0, 1.0}
    places = set()
    for episode in episodes:
        first, *others = episode["steps"]
        assert first["observation"].startswith("Walk to the door: ")
        for step, following in zip(episode["steps"], others):
            heard = following["observation"]
            assert "the door is at" in heard
            assert heard.startswith("You are at" if step["valid"] else "Write left or right.")
        places |= {step["observation"].split("You are at ")[1].split(",")[0] for step in others}
    assert len(places) > 6 and max(map(int, places)) < 66
    steps = [step for episode in episodes for step in episode["steps"]]
    assert {step["valid"] for step in steps} == {True, False}
    config = json.loads((house / "runs/new/args.json").read_text())
    assert config["corridor_length"] == 60


@pytest.mark.parametrize("length", (39, 1001))
def test_the_pages_world_refuses_a_flag_in_one_line(corridor, length):
    with pytest.raises(
        SystemExit, match=f"^--corridor-length {length}: has to be from 40 to 1000$"
    ):
        corridor.Corridor.from_args(arguments(length))


# ------------ an advantage ------------


def test_a_copy_with_another_advantage_trains_and_is_left_alone(house):
    """README.md: copy a script, change one line, run it."""
    (copying,) = blocks_of(README, "bash", f"cp istar_webshop.py {MINE}")
    in_house(house, "bash", "-c", copying)
    (diff,) = blocks_of(README, "diff", "step_adv")
    old, new = diff.splitlines()
    assert old[0] == "-" and new[0] == "+" and old[1:] != new[1:]
    text = (house / MINE).read_text()
    assert text.count(f"{old[1:]}\n") == 1
    (house / MINE).write_text(text.replace(old[1:], new[1:]))
    mine = (house / MINE).read_bytes()

    said = in_house(house, sys.executable, "tests/blocks.py")
    assert MINE not in said and len(said.splitlines()) == len(blocks.SCRIPTS)
    flags = [*SMALL.split(), "--max-steps", "7"]  # a purchase takes some steps
    (command,) = blocks_of(README, "bash", f"python {MINE}")
    _, script, *given = shlex.split(command)
    in_house(house, sys.executable, script, *given, *flags)
    (*_, row), episodes = tables_of(house)
    assert row["policy/grad_norm"] > 0 and row["prm/skill"] > 0
    assert len(episodes) == 2 * 6 * 4
    felt = 0
    for episode in episodes[6 * 4 :]:  # the PRM has learnt something by then
        steps = [step for step in episode["steps"] if step["valid"]]
        for step in steps:
            credit = row["prm/skill"] * max(step["step_advantage"], 0.0)
            assert step["advantage"] == pytest.approx(step["episode_advantage"] + credit, abs=1e-5)
        felt += sum(step["step_advantage"] < 0 for step in steps)
    assert felt > 0
    assert (house / MINE).read_bytes() == mine
