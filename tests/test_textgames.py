"""Text games: stand-ins for the three packages (tests/data/games) show what the world does with
any game; where the packages are installed, ten real games are played as well."""

import json
import logging
import random
import sys
from importlib.util import find_spec
from types import SimpleNamespace

from envs import textgames
from envs.textgames import GameError, Generators, TextGame
from runtime.worlds import Door, check_world

import numpy as np
import pytest
from conftest import ROOT, run_main

FAKES = {
    "textarena:Doors-v0": ("up", "down", "left", "right"),
    "textarena:Swapped-v0": ("up", "down", "left", "right"),
    "gem:game:Count-v0": ("0", "1"),
    "twx:coin": ("wait", "look"),
    "twx:sorting": ("wait", "look", "take coin"),
}
WAYS = ("up", "down", "left", "right")
REAL = {  # each with some actions
    "textarena:FrozenLake-v0": WAYS,
    "textarena:2048-v0": WAYS,
    "textarena:Blackjack-v0": ("hit", "stand"),
    "textarena:Minesweeper-v0": ("0 0", "3 4", "7 7", "5 1"),
    "gem:game:Sokoban-v0-easy": WAYS,
    "gem:game:GuessTheNumber-v0-hard": ("25", "12", "40", "7"),
    "gem:game:Game2048-v0-easy": WAYS,
    "twx:coin": ("look around", "move north", "move south", "move east", "move west"),
    "twx:twc": ("look around", "move north", "move south", "inventory"),
    "twx:simonsays": ("slice apple", "eat apple"),
    "twx:sorting": ("look around", "inventory", "take 4l of glass", "put 4l of glass in box"),
    "textarena:Countdown-v0": ("0 1 +", "0 1 *", "2 1 -", "0 9 +"),
}
PACKAGES = ("textarena", "gem", "textworld_express")


@pytest.fixture
def fakes(monkeypatch):
    """The stand-ins instead of the packages, and Java that is there."""
    mine = {name: module for name, module in sys.modules.items() if is_game(name)}
    forget()
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "data" / "games"))
    monkeypatch.setattr(textgames.shutil, "which", lambda name: f"/bin/{name}")
    yield
    forget()
    sys.modules.update(mine)


def is_game(module: str) -> bool:
    return module.partition(".")[0] in PACKAGES


def forget():
    for name in [*filter(is_game, sys.modules)]:
        del sys.modules[name]
    textgames.seeds_of.cache_clear()
    textgames.TextWorldExpress.java.cache_clear()


def answer(words: str) -> str:
    return f"<think>so</think><action>{words}</action>"


def told_by(episode, actions, draw):
    """Plays one action, if the episode is not over: what was told."""
    if episode.done:
        return None
    return episode.step(answer(draw.choice(actions)))


def assert_apart(game: str, actions) -> None:
    """Two interleaved episodes are as two alone, and the process's generators stay as they are."""
    before = random.getstate(), np.random.get_state()
    env = TextGame(game, max_steps=12)
    tasks, alone = [*env.eval_tasks[:2], env.eval_tasks[0]], []  # also two of one task
    for number, task in enumerate(tasks):
        episode, draw = env.reset(task), random.Random(number)
        alone.append([episode.prompt] + [told_by(episode, actions, draw) for _ in range(12)])
    episodes = [env.reset(task) for task in tasks]
    draws = [random.Random(number) for number, _ in enumerate(tasks)]
    together = [[episode.prompt] for episode in episodes]
    for _ in range(12):
        for episode, draw, told in zip(episodes, draws, together):
            told.append(told_by(episode, actions, draw))
    assert together == alone and sum(step is not None for step in alone[0]) > 1
    after = random.getstate(), np.random.get_state()
    assert before[0] == after[0]
    assert all(np.array_equal(one, other) for one, other in zip(before[1], after[1]))


@pytest.mark.parametrize("game", FAKES)
def test_episodes_do_not_change_each_other(game, fakes):
    assert_apart(game, FAKES[game])


@pytest.mark.parametrize("game", REAL)
def test_real_episodes_do_not_change_each_other(game):
    package = {"twx": "textworld_express"}.get(game.partition(":")[0], game.partition(":")[0])
    if not find_spec(package):
        pytest.skip(f"{package} is not installed")
    assert_apart(game, REAL[game])


def test_states_are_put_back_where_a_game_raises(fakes):
    """And its own go on from where it raised: a second run draws the same."""
    level, handlers = logging.root.level, logging.root.handlers[:]
    env, last = TextGame("textarena:Doors-v0"), []
    assert (logging.root.level, logging.root.handlers) == (level, handlers)
    for _ in range(2):
        episode, state = env.reset(3), random.getstate()
        with pytest.raises(RuntimeError, match="broken"):
            episode.step(answer("break"))
        assert random.getstate() == state
        last.append(episode.generators.python)
    assert last[0] == last[1] != Generators(3).python


def test_the_tasks_are_three_sets_and_one_start_each(fakes):
    for game in FAKES:
        env = TextGame(game)
        check_world(env)
        assert len({env.reset(task).prompt for task in env.eval_tasks}) > 10
        assert (
            env.reset(env.train_tasks[0]).prompt == TextGame(game).reset(env.train_tasks[0]).prompt
        )
    assert (env.eval_tasks[0], env.validation_tasks[0], env.train_tasks[0]) == (20_000, 10_000, 0)


def test_what_the_player_sees_and_gets(fakes):
    """TextArena: rules and what does not change once, the player's own words never."""
    env = TextGame("textarena:Doors-v0", max_steps=9)
    episode = Door(env, 5).reset(5)
    assert episode.prompt.startswith(textgames.FORM) and "Type [up]" in episode.prompt
    board = episode.own.board
    assert board == episode.own.anchor and board.split("\n\n")[1] in episode.prompt

    observation, reward, done, info = episode.step(answer("fly"))
    assert observation.startswith("No such door!\n\n") and "Go on." not in observation
    assert not info["valid"] and (reward, done) == (0.0, False)
    shown = episode.own.board
    observation, reward, done, info = episode.step("up")
    assert observation == f"{textgames.NO_FORM}\n\n{shown.split(chr(10) * 2)[1]}"
    assert not info["valid"] and info["anchor"] == shown

    for number in range(1, 4):
        way = episode.own.game.env.door
        observation, reward, done, info = episode.step(answer(way))
        assert observation.startswith(f"You went {way}.") and info["valid"]
        assert (reward, done, info["success"]) == ((1.0, True, True) if number == 3 else (0, 0, 0))
    assert observation.endswith("You passed 3 doors.")
    with pytest.raises(RuntimeError, match="is over"):
        episode.own.step(answer("up"))
    assert env.summary() == {"finished": 1.0, "refused": 0.25, "unread": 0.0}
    assert env.summary() == {}


def test_a_game_that_exchanges_arguments_is_played(fakes):
    env = TextGame("textarena:Swapped-v0")
    episode = env.reset(0)
    observation, _, _, info = episode.step(answer("fly"))
    assert observation.startswith("No such door!") and not info["valid"]
    observation, reward, done, info = env.reset(0).step(answer(episode.game.env.door))
    assert observation.startswith("You went") and info["valid"]
    _, reward, done, info = episode.step(answer("fly"))
    assert (reward, done, info["valid"]) == (0.0, True, False)
    assert env.summary()["unread"] == 0


def play(env, *words):
    episode = env.reset(env.train_tasks[1])
    steps = [episode.step(answer(each(episode) if callable(each) else each)) for each in words]
    assert all(reward == 0 for _, reward, *_ in steps[:-1])
    return steps[-1]


def test_rewards_are_from_0_to_1(fakes):
    door = lambda episode: episode.game.env.door  # noqa: E731
    number = lambda episode: str(episode.game.env.number)  # noqa: E731
    wrong = lambda episode: str(1 - episode.game.env.number)  # noqa: E731
    doors, points = TextGame("textarena:Doors-v0"), TextGame("textarena:Set-v0")
    assert play(doors, door, "fly", "fly")[1:3] == (0.0, True)  # the game's -1
    assert play(points, door, door, door)[1] == 0.6  # 12 of 20 points
    count, coin = TextGame("gem:game:Count-v0", max_steps=3), TextGame("twx:coin", max_steps=3)
    _, reward, done, info = play(count, number, number, number)
    assert (reward, done, info["success"]) == (1.0, True, True)
    _, reward, done, info = play(count, number, wrong, number)
    assert (reward, done, info["success"]) == (0.3, True, False)  # the step limit's end
    _, reward, done, info = play(count, "no number")
    assert (reward, done, info["valid"], info["game_reward"]) == (0.0, True, False, -0.1)
    assert play(coin, "take coin", "take coin")[1:3] == (1.0, True)
    assert play(coin, "take coin", "wait", "dance")[1] == 0.5
    _, reward, done, info = play(coin, "jump")
    assert (reward, done, info["valid"]) == (0.0, True, True)
    assert not play(coin, "dance")[3]["valid"]


BAD = ["", "up", "<action>up</action", answer(""), answer("a\nb"), answer("\ud800"), answer("²")]
BAD += [answer("up" * 50_000), answer("\x00"), "<think></think>" * 9]


@pytest.mark.parametrize("game", FAKES)
def test_bad_text_is_an_invalid_action(game, fakes):
    env = TextGame(game, max_steps=2)
    for text in BAD:
        observation, reward, _, info = env.reset(env.eval_tasks[0]).step(text)
        assert not info["valid"] and reward == 0.0 and observation


LINES = {
    "chess": "has to be textarena:NAME, twx:NAME or gem:NAME",
    "textarena:Door": "there is no such game for one player; near names: textarena:Doors-v0",
    "textarena:Duel-v0": "there is no such game for one player; near names: textarena:",
    "textarena:Gone-v0": "there is no such game for one player",
    "textarena:Locked-v0": "it cannot be opened (LookupError: Resource words not found.)",
    "gem:math:Sums": "there is no such game for one player; near names: gem:game:Count-v0",
    "twx:coins": "there is no such game for one player; near names: twx:coin",
}


def line_of(game: str, async_rollout: bool = False) -> str:
    run_args = SimpleNamespace(async_rollout=async_rollout)
    args = SimpleNamespace(world=SimpleNamespace(game=game), max_steps=15, run_args=run_args)
    with pytest.raises(SystemExit) as stop:
        TextGame.from_args(args)
    return stop.value.code


@pytest.mark.parametrize("game", LINES)
def test_a_game_that_cannot_be_is_one_line(game, fakes):
    line = line_of(game)
    assert line.startswith(f"--game {game}: {LINES[game]}") and "\n" not in line
    assert "-train" not in line and "Duel" not in line.partition(": ")[2]


def test_a_thread_does_not_play_what_sets_the_trainers_generators(fakes):
    line = line_of("textarena:Doors-v0", async_rollout=True)
    assert line.startswith("--async-rollout: a text game sets the generators")


@pytest.mark.parametrize("game", FAKES)
def test_a_missing_package_is_one_line_with_the_command(game, fakes, monkeypatch):
    package = {"twx": "textworld_express"}.get(game.partition(":")[0], game.partition(":")[0])
    monkeypatch.setitem(sys.modules, package, None)
    line = line_of(game)
    assert line.startswith(f"--game {game}: ") and line.endswith(textgames.INSTALL)
    assert package in line and "\n" not in line


def test_missing_java_is_one_line(fakes, monkeypatch):
    monkeypatch.setattr(textgames.shutil, "which", lambda name: None)
    assert "Java" in line_of("twx:coin")
    with pytest.raises(GameError):
        TextGame("twx:coin")


SMALL = "--iterations 2 --tasks-per-iteration 2 --group-size 2 --eval-tasks 2 --eval-samples 1"
SMALL += " --max-steps 2 --engine hf --run-name new"
RUNS = {"rloo": "textarena:Doors-v0", "gigpo": "gem:game:Count-v0", "istar": "twx:coin"}


@pytest.mark.parametrize("algorithm", RUNS)
def test_a_script_trains(algorithm, fakes, tmp_path):
    game = RUNS[algorithm]
    done = run_main(f"{algorithm}_textgame", "--game", game, *SMALL.split(), cwd=tmp_path)
    assert f"textgame {game}, 2 steps" in done.stdout
    rows = [json.loads(line) for line in (tmp_path / "runs/new/metrics.jsonl").open()]
    assert [row["iteration"] for row in rows] == [0, 1, 2]
    assert all(row["policy/grad_norm"] > 0 for row in rows[1:])
    episodes = [json.loads(line) for line in (tmp_path / "runs/new/episodes.jsonl").open()]
    assert len(episodes) == 8 and all(0 <= episode["outcome"] <= 1 for episode in episodes)
