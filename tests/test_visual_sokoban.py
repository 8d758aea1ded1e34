"""VisualSokoban: the text world's rooms and rules, gym_sokoban's own picture of each state, and
words that do not tell what is to be seen."""

import io
import random
import re
import warnings

from envs import sokoban, visual_sokoban
from envs.sokoban import Sokoban
from envs.visual_sokoban import NOW, RULES, VisualSokoban

import numpy as np
import pytest
from gym_sokoban.envs.render_utils import room_to_rgb
from PIL import Image

TEXT, SEEN = Sokoban(), VisualSokoban()


def pixels(png: bytes) -> np.ndarray:
    return np.array(Image.open(io.BytesIO(png)).convert("RGB"))


def drawn(episode) -> np.ndarray:
    """gym_sokoban's own picture of an episode's state."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return room_to_rgb(episode.game.room_state, episode.game.room_fixed)


def test_the_same_tasks_play_the_same():
    """Same sets, rooms, answers, rewards and what is told of a step, also for bad answers."""
    sets = ("train_tasks", "eval_tasks", "validation_tasks")
    assert [getattr(SEEN, name) for name in sets] == [getattr(TEXT, name) for name in sets]
    rng, solved, invalid = random.Random(0), 0, 0
    for task in [*SEEN.eval_tasks[:2], *SEEN.train_tasks[:2], *SEEN.validation_tasks[:2]]:
        one, other = TEXT.reset(task), SEEN.reset(task)
        assert one.grid() == other.grid() and one.anchor == other.anchor
        for answer in sokoban.expert(one, 0.2, rng):
            if rng.random() < 0.2:
                answer = rng.choice(["up", "", "<think></think><action>jump</action>"])
            theirs, ours = one.step(answer), other.step(answer)
            assert theirs[1:] == ours[1:]
            solved += ours[1]
            invalid += not ours[3]["valid"]
            assert ours[0] == (NOW if ours[3]["valid"] else f"{sokoban.INVALID}\n{NOW}")
    assert solved and invalid


def test_the_picture_is_gym_sokoban_s():
    """Of every state of some games, the player on a target and boxes on targets among them."""
    seen = set()
    for task in range(12):
        episode = SEEN.reset(task)
        states = [(episode.picture, drawn(episode))]
        for answer in sokoban.expert(episode, 0.5, random.Random(task)):
            seen |= {*episode.grid()}
            episode.step(answer)
            states.append((episode.picture, drawn(episode)))
        seen |= {*episode.grid()}
        assert all(np.array_equal(pixels(png), theirs) for png, theirs in states)
    assert seen == {*"#_OXP*S\n"}


def test_enlarged_without_smoothing():
    small, large = SEEN.reset(3), VisualSokoban(cell_pixels=48).reset(3)
    assert pixels(large.picture).shape == (288, 288, 3)
    assert np.array_equal(pixels(large.picture)[1::3, 1::3], pixels(small.picture))


def test_a_state_is_one_picture_and_states_differ():
    """Equal states show equal bytes, whatever led there; others other ones."""
    by_state = {}
    for task in range(12):
        for attempt in range(3):
            episode, rng = SEEN.reset(task), random.Random(attempt)
            while not episode.done:
                by_state.setdefault(episode.grid(), set()).add(episode.picture)
                action = rng.choice([*sokoban.ACTIONS])
                episode.step(f"<think>walk</think><action>{action}</action>")
    assert len(by_state) > 50 and all(len(pictures) == 1 for pictures in by_state.values())
    assert len(set.union(*by_state.values())) == len(by_state)


def test_the_words_never_say_where_things_are():
    """They are the same in every room, and have no digit and no grid."""
    prompts = {SEEN.reset(task).prompt for task in range(20)}
    assert prompts == {RULES}
    assert not re.search(r"[0-9#_]", RULES + NOW)
    for word in ("yellow box", "Brown bricks", "green figure", "<action>up</action>"):
        assert word in RULES


@pytest.mark.parametrize("cell", (0, -3))
def test_what_cannot_be(cell):
    with pytest.raises(ValueError, match="--cell-pixels"):
        VisualSokoban(cell_pixels=cell)


def test_expert_solves_what_is_seen():
    episode = SEEN.reset(0)
    for answer in visual_sokoban.expert(episode):
        *_, info = episode.step(answer)
    assert info["success"]
