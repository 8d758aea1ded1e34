"""What a PRM learns from again: which groups are kept and drawn, and that a checkpoint brings them
back."""

import random

from runtime.data import flat_tensors
from runtime.replay import Replay, extremes, past

import pytest
from conftest import load, random_trajectories, scripts_with

MODULE = load(scripts_with("prm_update")[0])


def episodes(seed: int, pictures: bool = False):
    """Trajectories of three groups of four, and the pairs of the first and the last; pictures: some
    are shown in two of them."""
    trajectories = random_trajectories(MODULE, seed, history=True)
    if pictures:
        for number, t in enumerate(trajectories):
            shown = [bytes([seed]), b"\x89PNG\r\n\x00\xff" * 3, b""][: number % 4]
            t.pictures = [(place, png) for place, png in enumerate(shown)]
    return trajectories, [(1, 0), (2, 0), (9, 8)]


def fields_of(group):
    names = "token_ids", "step_ids", "starts", "outcome", "pictures"
    return [[getattr(t, name) for name in names] + [len(t.steps)] for t in group]


def test_groups_with_a_pair_are_kept_whole_under_numbers_of_their_own():
    """The same task in two iterations is two groups."""
    replay = Replay(9)
    first, pairs = episodes(1)
    second, _ = episodes(2)
    replay.add(first, pairs)
    replay.add(second, pairs)
    replay.add(episodes(3)[0], [])  # nothing to learn from
    kept = [first[:4], first[8:], second[:4], second[8:]]
    assert [fields_of(group) for group in replay.groups] == [*map(fields_of, kept)]
    assert [[t.task for t in group] for group in replay.groups] == [[n] * 4 for n in range(4)]
    assert first[0].task == second[0].task


@pytest.mark.parametrize("most", (0, 1, 3, 4))
def test_the_last_ones_are_kept(most):
    """most 0: those of the last iteration alone, and of one without a pair none."""
    replay = Replay(most)
    for seed in range(3):
        replay.add(*episodes(seed))
    numbers = [group[0].task for group in replay.groups]
    assert numbers == [*range(6)][-(most or 2) :]
    replay.add(episodes(3)[0], [])
    assert [group[0].task for group in replay.groups] == (numbers if most else [])


def test_whole_groups_are_drawn_none_twice():
    replay = Replay(9)
    for seed in range(3):
        replay.add(*episodes(seed))
    random.seed(5)
    draws = [[t.task for part in replay.draw(2, 1) for t in part] for _ in range(40)]
    assert all(len({*draw}) == 2 and sorted(draw)[::4] == sorted({*draw}) for draw in draws)
    assert {number for draw in draws for number in draw} == {*range(6)}
    random.seed(5)
    assert [[t.task for part in replay.draw(2, 1) for t in part] for _ in range(40)] == draws
    (everything,) = replay.draw(99, 1)
    assert sorted(t.task for t in everything) == sorted([*range(6)] * 4)
    assert Replay(9).draw(4, 2) == [] == replay.draw(4, 0)


@pytest.mark.parametrize(
    "number, parts, sizes, of_each",
    [
        (5, 1, (5,), 4),
        (5, 2, (3, 2), 4),
        (4, 3, (2, 2, 2), 2),
        (4, 4, (2, 2, 1, 1), 2),  # there are six
        (5, 3, (2, 2, 2), 3),
        (1, 2, (1,), 4),
        (2, 9, (1, 1, 1, 1, 1, 1), 2),
    ],
)
def test_what_is_drawn_is_dealt_into_parts_of_groups(number, parts, sizes, of_each):
    """Each part has half of the number; a single one has all. The trajectories are as many as the
    number of groups has, or two of each."""
    replay = Replay(9)
    for seed in range(3):
        replay.add(*episodes(seed))
    dealt = [[t.task for t in part] for part in replay.draw(number, parts)]
    assert tuple(len({*part}) for part in dealt) == sizes
    assert all(part.count(task) == of_each for part in dealt for task in part)
    assert len({task for part in dealt for task in part}) == sum(sizes)


@pytest.mark.parametrize("most, kept", ((9, 6), (6, 6), (5, 5), (4, 4), (3, 3), (2, 2), (0, 2)))
def test_a_share_of_a_group_has_its_highest_and_lowest_outcomes(most, kept):
    group = [past(t, 0) for t in episodes(1)[0][:6]]
    for t, outcome in zip(group, (0.5, 0.0, 1.0, 0.5, 0.0, 0.5)):
        t.outcome = outcome
    shares = [extremes(group, most) for _ in range(60)]
    for share in shares:
        assert len({id(t) for t in share}) == len(share) == kept
        outcomes = sorted(t.outcome for t in share)
        highest = sorted(t.outcome for t in group)[-(kept - kept // 2) :]
        assert outcomes == [0.0, 0.0, 0.5][: kept // 2] + highest
    seen = {id(t) for share in shares for t in share}  # among equal ones it is by lot
    assert len(seen) == (3 if kept == 2 else 6)


def test_what_is_drawn_is_a_batch_of_the_same_tokens_and_pairs():
    """Outcomes, groups and tokens as if its episodes had been played now."""
    replay, (trajectories, pairs) = Replay(9), episodes(4)
    replay.add(trajectories, pairs)
    mixed = trajectories[:4] + trajectories[8:]
    now, past = MODULE.flatten(mixed), MODULE.Batch(**flat_tensors(*replay.draw(2, 1)))
    if past.group[0] != now.group[0] or past.outcomes.tolist() != now.outcomes.tolist():
        past = MODULE.flatten([t for group in replay.groups for t in group])
    assert past.outcomes.tolist() == now.outcomes.tolist()
    assert past.step_traj.tolist() == now.step_traj.tolist()
    assert past.token_step.tolist() == now.token_step.tolist()
    assert past.group.tolist() == now.group.tolist()
    for one, other in zip(past.sequences, now.sequences, strict=True):
        assert one.ids.tolist() == other.ids.tolist() and one.steps.tolist() == other.steps.tolist()
    pairs_of = [MODULE.preference_pairs(b.outcomes, b.group) for b in (past, now)]
    assert pairs_of[0] == pairs_of[1] != []


@pytest.mark.parametrize("pictures", (False, True))
@pytest.mark.parametrize("most, iterations", ((0, 2), (3, 2), (9, 2), (9, 0)))
def test_a_checkpoint_brings_it_back(tmp_path, pictures, most, iterations):
    """What is drawn after it, too."""
    replay, again = Replay(most), Replay(most)
    for seed in range(iterations):
        replay.add(*episodes(seed, pictures))
    replay.save(tmp_path / "replay.safetensors")
    again.add(*episodes(7))  # goes
    again.load(tmp_path / "replay.safetensors")
    assert again.groups == replay.groups and again.number == replay.number
    assert [*map(fields_of, again.groups)] == [*map(fields_of, replay.groups)]
    assert any(t.pictures for group in again.groups for t in group) == (pictures and iterations > 0)
    for each in (replay, again):
        each.add(*episodes(8, pictures))
    assert again.groups == replay.groups
    random.seed(1)
    drawn = replay.draw(2, 2)
    random.seed(1)
    assert again.draw(2, 2) == drawn != []
