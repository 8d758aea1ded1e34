"""Sokoban: the same rooms everywhere, a split by layout, strict parsing, an exact solver."""

import random
import subprocess
import sys
import time
from types import SimpleNamespace

from envs.sokoban import (
    ACTIONS,
    INVALID,
    MOVES,
    Episode,
    Room,
    Sokoban,
    SokobanArgs,
    expert,
    parse_action,
    search_state,
    train_room,
)

import numpy as np
import pytest
from conftest import ROOT


@pytest.fixture(scope="module")
def env():
    return Sokoban()


def answer(action):
    return f"<think>so</think><action>{action}</action>"


def symmetries(grid):
    for turned in (np.rot90(grid, k) for k in range(4)):
        yield turned
        yield np.fliplr(turned)


# ------------ rooms ------------


def test_same_rooms_in_another_process(env):
    tasks = [0, 1, 5, 128, 700, 10_127, 10_128]
    code = (
        "import random, numpy; random.seed(7); numpy.random.seed(7)\n"
        "from envs.sokoban import Sokoban; env = Sokoban()\n"
        # in another order, too
        f"print('\\n'.join(env.reset(task).prompt for task in {tasks[::-1]}))"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], cwd=ROOT, capture_output=True, text=True
    )
    assert done.stdout.strip() == "\n".join(env.reset(task).prompt for task in tasks[::-1]), (
        done.stderr
    )


def test_rooms_neither_feel_nor_touch_the_global_random_state():
    shown = []
    for seed in (1, 2):
        train_room.cache_clear()  # or the second room would be the first one
        random.seed(seed)
        np.random.seed(seed)
        states = random.getstate(), np.random.get_state()
        room = Sokoban(size=7).room(200)
        shown.append((room.fixed.tobytes(), room.state.tobytes()))
        assert random.getstate() == states[0]
        assert all(np.array_equal(a, b) for a, b in zip(np.random.get_state(), states[1]))
    assert shown[0] == shown[1]


def test_panel_and_training_never_share_a_layout(env):
    """Compared here by all eight symmetries written out, not by the key that made the split."""
    rooms = [env.room(task) for task in env.eval_tasks]
    assert len(rooms) == 128
    walls, full = {}, set()
    for number, room in enumerate(rooms):
        for grid in symmetries(room.fixed):
            assert walls.setdefault(grid.tobytes(), number) == number, (
                "two rooms of the panel have one layout"
            )
        full |= {grid.tobytes() for grid in symmetries(room.state)}
    training = random.Random(0).sample(env.train_tasks, 600)
    for task in training:
        room = env.room(task)
        assert room.fixed.tobytes() not in walls and room.state.tobytes() not in full
    assert not set(env.eval_tasks) & set(env.train_tasks)
    assert (
        len({env.room(task).state.tobytes() for task in training}) > 300
    )  # training is not a handful of rooms


def test_rooms_are_what_was_asked_for(env):
    for task in (*range(20), *range(200, 220)):
        room = env.room(task)
        assert room.fixed.shape == (6, 6) and len(room.targets) == 1 == len(room.start[1])
        assert 1 <= room.distance(room.start) <= 15
        assert room.start[1] != room.targets
    for task in (-1, 128 + 10_000 + 128):
        with pytest.raises(IndexError):
            env.reset(task)


def test_validation_rooms_have_layouts_of_their_own(env):
    """Neither the panel nor training has them, by all eight symmetries written out."""
    assert env.eval_tasks == range(128) and env.train_tasks == range(128, 10_128)
    assert env.validation_tasks == range(10_128, 10_256)
    walls, full = {}, set()
    for task in env.validation_tasks:
        room = env.room(task)
        assert 1 <= room.distance(room.start) <= 15 and len(room.targets) == 1
        for grid in symmetries(room.fixed):
            assert walls.setdefault(grid.tobytes(), task) == task, "two rooms have one layout"
        full |= {grid.tobytes() for grid in symmetries(room.state)}
    for task in (*env.eval_tasks, *random.Random(2).sample(env.train_tasks, 200)):
        room = env.room(task)
        assert room.fixed.tobytes() not in walls and room.state.tobytes() not in full
    episode = env.reset(env.validation_tasks[0])
    assert [episode.step(text)[3] for text in expert(episode)][-1]["success"]


def test_the_flags_make_the_environment():
    args = SimpleNamespace(world=SokobanArgs(), max_steps=15)
    assert Sokoban.from_args(args).name == "sokoban 6x6, 1 box, 15 steps"
    args = SimpleNamespace(world=SokobanArgs(num_boxes=2, room_size=7), max_steps=20)
    assert Sokoban.from_args(args).name == "sokoban 7x7, 2 boxes, 20 steps"
    for wrong in (dict(num_boxes=0), dict(num_boxes=5), dict(room_size=5)):
        with pytest.raises(SystemExit, match="--room-size . --num-boxes .: "):
            Sokoban.from_args(SimpleNamespace(world=SokobanArgs(**wrong), max_steps=15))


def test_two_boxes():
    env = Sokoban(num_boxes=2, size=7)
    for task in (0, 1, 300):
        episode = env.reset(task)
        assert len(episode.room.targets) == 2 == len(episode.room.start[1])
        assert episode.prompt.split("\n")[-1].count("X ") == 2
        scores = [episode.step(text)[3]["score"] for text in expert(episode)]
        assert scores[-1] == 1.0 and set(scores) <= {0.0, 0.5, 1.0} and 0.5 in scores


# ------------ answers ------------

BAD = {
    "cup": "<think>a</think><action>cup</action>",
    "capitals": "<think>a</think><action>UP</action>",
    "capital tags": "<THINK>a</THINK><ACTION>up</ACTION>",
    "two words": "<think>a</think><action>up up</action>",
    "list": "<think>a</think><action>up, left</action>",
    "two actions": "<think>a</think><action>up</action><action>left</action>",
    "two answers": answer("up") + answer("left"),
    "no thought": "<action>up</action>",
    "no action": "<think>up</think>",
    "bare": "up",
    "text before": "Sure! <think>a</think><action>up</action>",
    "text between": "<think>a</think> so <action>up</action>",
    "text after": "<think>a</think><action>up</action> done",
    "nested thought": "<think>a<think>b</think></think><action>up</action>",
    "nested action": "<think>a</think><action><action>up</action></action>",
    "action in thought": "<think><action>up</action></think>",
    "thought quotes an action": "<think>not <action>left</action></think><action>up</action>",
    "unclosed": "<think>a</think><action>up",
    "wrong order": "<action>up</action><think>a</think>",
    "no movement": "<think>a</think><action>noop</action>",
    "empty action": "<think>a</think><action></action>",
    "empty": "",
    "white space": " \n\t",
    "nul": "<think>a</think><action>up\x00</action>",
    "control": "\x1b[2J\x07\r\x00",
    "surrogate": "\ud800<action>up</action>",
    "other alphabet": "<think>a</think><action>uр</action>",  # a Cyrillic p
    "a megabyte": "x" * 1_000_000,
    "a megabyte of tags": "<think>" * 150_000,
    "a megabyte inside": "<think>a</think><action>" + "up" * 500_000 + "</action>",
}


@pytest.mark.parametrize("text", BAD.values(), ids=BAD.keys())
def test_a_bad_answer_is_told_and_costs_a_step_and_moves_nothing(env, text):
    assert parse_action(text) is None
    episode, begin = env.reset(0), time.perf_counter()
    before = episode.text()
    observation, reward, done, info = episode.step(text)
    assert time.perf_counter() - begin < 1.0
    assert observation == f"{INVALID}\n{before}" and episode.game.num_env_steps == 1
    assert (reward, done, info["valid"], info["success"], info["progress"]) == (
        0.0,
        False,
        False,
        False,
        0.0,
    )
    assert info["game_reward"] == pytest.approx(-0.1)


GOOD = [
    "<think>{}</think><action>{}</action>".format(thought, "left")
    for thought in ("", "a", "a\nb", "x" * 1_000_000)
]
GOOD += [
    "\n <think>up or cup?</think>\n\n<action> left\n</action> \n",
    "<think>1 < 2 <b></think><action>left</action>",
]


@pytest.mark.parametrize("text", GOOD, ids=lambda text: repr(text[:30]))
def test_a_good_answer(text):
    assert parse_action(text) == "left"


def test_bad_answers_use_up_the_episode(env):
    episode = Sokoban(max_steps=3).reset(0)
    dones = [episode.step("")[2] for _ in range(3)]
    assert dones == [False, False, True]
    with pytest.raises(RuntimeError, match="over"):
        episode.step(answer("up"))


def test_info_and_the_games_own_rules(env):
    """Every step of a random walk is what the rules say, by a second rendering of them."""
    rng = random.Random(0)
    for task in range(12):
        episode = env.reset(task)
        while not episode.done:
            player, boxes = search_state(episode.game.room_state)
            action = rng.choice([*ACTIONS])
            dr, dc = MOVES[action]
            target, beyond = (
                (player[0] + dr, player[1] + dc),
                (player[0] + 2 * dr, player[1] + 2 * dc),
            )
            fixed = episode.room.fixed
            moved, pushed = fixed[target] != 0, target in boxes
            if pushed and (fixed[beyond] == 0 or beyond in boxes):
                moved = pushed = False
            observation, reward, done, info = episode.step(answer(action))
            expected = target if moved else player
            after = boxes - {target} | {beyond} if pushed else boxes
            assert search_state(episode.game.room_state) == (expected, after)
            assert set(info) == {"valid", "success", "score", "anchor", "game_reward", "progress"}
            solved = after == episode.room.targets
            assert (
                info["valid"]
                and info["success"] == solved
                and reward == float(solved)
                and info["score"] == solved
            )
            assert observation.rsplit("\n", 1)[0] == info["anchor"]
            assert done == (solved or episode.game.num_env_steps == 15)
            assert info["anchor"].count("P") + info["anchor"].count("S") == 1 + observation.split(
                "\n"
            )[-1].count("S")


def test_reset_gives_a_fresh_episode(env):
    first = env.reset(3)
    prompt = first.prompt
    for text in expert(first):
        first.step(text)
    assert env.reset(3).prompt == prompt and not env.reset(3).done


# ------------ the solver and the expert ------------


def brute_force(room, state):
    """The least number of moves by trying all sequences of moves, breadth first, without the
    solver's tables."""
    level, seen, moves = {state}, {state}, 0
    while level:
        if any(boxes == room.targets for _, boxes in level):
            return moves
        level = {room.move(s, a) for s in level for a in MOVES} - seen
        seen |= level
        moves += 1
    return None


def test_expert_solves_every_room_in_the_least_number_of_moves(env):
    for task in (*env.eval_tasks, *random.Random(1).sample(env.train_tasks, 60)):
        episode = env.reset(task)
        start, least = episode.room.start, episode.room.distance(episode.room.start)
        infos = [episode.step(text)[3] for text in expert(episode)]
        assert len(infos) == least and infos[-1]["success"] and all(info["valid"] for info in infos)
        assert sum(info["progress"] for info in infos) == least
        assert [info["progress"] for info in infos] == [1.0] * least
        if task < 12:
            assert brute_force(episode.room, start) == least


def test_a_room_that_cannot_be_solved_any_more():
    """A box pushed into a corner: the distance is 1 + the worst, and the expert goes on without an
    exception."""
    fixed = np.array(
        [
            [0] * 6,
            [0, 1, 1, 1, 1, 0],
            [0, 1, 1, 1, 1, 0],
            [0, 1, 1, 2, 1, 0],
            [0, 1, 1, 1, 1, 0],
            [0] * 6,
        ]
    )
    state = fixed.copy()
    state[2, 2], state[2, 3] = 4, 5
    room = Room(fixed, state, {})
    dead = ((2, 2), frozenset({(2, 1)}))  # against the left wall, and the target is not there
    assert room.move(room.start, "left") == dead and brute_force(room, dead) is None
    assert dead not in room.distances
    worst = max(room.distances.values())
    assert room.distance(dead) == worst + 1 and room.distance(room.start) == brute_force(
        room, room.start
    )
    for wanted in list(room.distances)[::5]:
        assert room.distance(wanted) == brute_force(room, wanted)
    episode = Episode(room, 6)
    progress = episode.step(answer("left"))[3]["progress"]
    assert progress == room.distance(room.start) - (worst + 1)
    assert len([episode.step(text) for text in expert(episode)]) == 5 and episode.done


def test_noise_of_the_expert(env):
    def play(noise, seed):
        episode = env.reset(7)
        return [text for text in expert(episode, noise, random.Random(seed)) if episode.step(text)]

    assert play(0.5, 1) == play(0.5, 1) and len({tuple(play(1.0, seed)) for seed in range(5)}) > 1
    assert play(0.0, 1) == play(0.0, 2)


def test_five_thousand_demonstrations_in_two_minutes(env):
    """500 of other tasks each, room drawn and solved, scaled by ten; CPU time, so that a busy
    machine does not fail."""
    train_room.cache_clear()
    rng, begin = random.Random(0), time.process_time()
    for task in env.train_tasks[:500]:
        episode = env.reset(task)
        for text in expert(episode, 0.3, rng):
            episode.step(text)
    assert 10 * (time.process_time() - begin) < 120
