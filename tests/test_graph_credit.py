"""G2PO and GAGPO: the advantages that main makes of random graphs, against a second rendering in
dictionaries and loops, and what may not change them."""

import random
from collections import defaultdict
from types import SimpleNamespace

from runtime.data import Step, Trajectory

import pytest
import torch
from conftest import load
from test_math import advantages_of_main, each_main, mean, std

GRAPHS = range(20)
FLAGS = {
    "g2po": [dict(step_weight=w, step_gamma=g) for w, g in ((1.0, 0.95), (0.5, 1.0), (0.0, 0.9))],
    "gagpo": [dict(gamma=g, gae_lambda=x) for g, x in ((0.95, 0.8), (1.0, 1.0), (0.9, 0.0))],
}


@pytest.fixture(params=each_main(*FLAGS))
def module(request):
    return load(request.param)


def name_of(module) -> str:
    return module.__name__.split("_")[0]


def episode(task, states, outcome, valid=True):
    """An episode that went through these states, the first one and that after each step; one that
    is cut off ends in the same way, with the outcome that it has."""
    steps = [Step("", "", [], anchor=state, valid=valid) for state in states[1:]]
    return Trajectory(task, steps=steps, anchor=states[0], outcome=outcome)


def graph(seed: int) -> list[Trajectory]:
    """A group of eight episodes that return to where they were, one of the same states' names, one
    of a single episode, and one that failed, mixed."""
    draw = random.Random(seed)
    episodes = []
    for task, size in ((3, 8), (8, 5), (4, 1), (6, 3)):
        for _ in range(size):
            states = ["start", *draw.choices("abcde", k=draw.randint(1, 9))]
            outcome = draw.choice((0.0, 1.0, round(draw.random(), 1))) if task != 6 else 0.0
            episodes.append(episode(task, states, outcome))
            for step in episodes[-1].steps:
                step.valid = draw.random() < 0.8
    return draw.sample(episodes, len(episodes))


def ours(module, episodes, **flags) -> list[list[float]]:
    """A of the steps of each episode, by the page."""
    steps = [step for e in episodes for step in e.steps]
    batch = SimpleNamespace(
        outcomes=torch.tensor([e.outcome for e in episodes]),
        group=torch.tensor([e.task for e in episodes]),
        step_traj=torch.tensor([n for n, e in enumerate(episodes) for _ in e.steps]),
        invalid=torch.tensor([not step.valid for step in steps]),
    )
    args = SimpleNamespace(invalid_penalty=0.1, **(FLAGS[name_of(module)][0] | flags))
    found = advantages_of_main(module, episodes=episodes, batch=batch, args=args)
    assert found.dtype == torch.float32 and torch.isfinite(found).all()
    numbers = iter(found.tolist())
    return [[next(numbers) for _ in e.steps] for e in episodes]


def z(numbers: dict) -> dict:
    """Standardised; 0 where all are equal but for rounding, or there is one."""
    values = [*numbers.values()]
    if max(values) - min(values) < 1e-9:
        return dict.fromkeys(numbers, 0.0)
    return {key: (value - mean(values)) / std(values) for key, value in numbers.items()}


def values_of(group: dict[int, Trajectory], gamma: float, wait: int) -> dict:
    """{state: mean of gamma^(steps to come + wait) * outcome over its visits}."""
    visits = defaultdict(list)
    for e in group.values():
        states = [e.anchor, *(step.anchor for step in e.steps)]
        for t, state in enumerate(states[:-1]):
            visits[state].append(gamma ** (len(e.steps) - 1 - t + wait) * e.outcome)
    return {state: mean(returns) for state, returns in visits.items()}


def plain_g2po(group: dict[int, Trajectory], step_weight, step_gamma) -> dict:
    """{(episode, t): A}"""
    value = values_of(group, step_gamma, 1)
    of_episodes = z({n: e.outcome for n, e in group.items()})
    nodes, edges = defaultdict(dict), {}
    for n, e in group.items():
        state = e.anchor
        for t, step in enumerate(e.steps):
            reached = e.outcome if t + 1 == len(e.steps) else value[step.anchor]
            nodes[state][n, t] = reached
            edges[n, t] = reached - value[state]
            state = step.anchor
    of_nodes = {key: a for node in nodes.values() for key, a in z(node).items()}
    of_edges = z(edges)
    return {
        (n, t): of_episodes[n] + step_weight * (of_nodes[n, t] + of_edges[n, t])
        for n, t in of_edges
    }


def plain_gagpo(group: dict[int, Trajectory], gamma, gae_lambda) -> dict:
    """{(episode, t): A}"""
    value, raw = values_of(group, gamma, 0), {}
    for n, e in group.items():
        states = [e.anchor, *(step.anchor for step in e.steps)]
        residuals = []
        for t in range(len(e.steps)):
            last = t + 1 == len(e.steps)
            target = e.outcome if last else gamma * value[states[t + 1]]
            residuals.append(target - value[states[t]])
        for t in range(len(residuals)):
            later = enumerate(residuals[t:])
            raw[n, t] = sum((gamma * gae_lambda) ** k * delta for k, delta in later)
    return z(raw)


def plain(name, episodes, **flags) -> list[list[float]]:
    advantages = {}
    for task in {e.task for e in episodes}:
        group = {n: e for n, e in enumerate(episodes) if e.task == task}
        advantages |= {"g2po": plain_g2po, "gagpo": plain_gagpo}[name](group, **flags)
    return [
        [advantages[n, t] - 0.1 * (not step.valid) for t, step in enumerate(e.steps)]
        for n, e in enumerate(episodes)
    ]


def same(found, expected, tolerance=1e-6):
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, abs=tolerance)


@pytest.mark.parametrize("seed", GRAPHS)
def test_advantages_of_random_graphs(module, seed):
    episodes = graph(seed)
    for flags in FLAGS[name_of(module)]:
        same(ours(module, episodes, **flags), plain(name_of(module), episodes, **flags))


@pytest.mark.parametrize("seed", GRAPHS)
def test_neither_the_order_nor_another_group_changes_anything(module, seed):
    episodes = graph(seed)
    found = ours(module, episodes)
    order = random.Random(seed).sample(range(len(episodes)), len(episodes))
    same(ours(module, [episodes[n] for n in order]), [found[n] for n in order])
    others = [episode(99, ["start", *"abcab"], 1.0), episode(99, ["start", "c"], 0.3)]
    same(ours(module, episodes + others)[: len(episodes)], found)


def test_without_differences_there_is_no_advantage(module):
    """Exactly 0, however the equal numbers round: a failed group; successes by one way; and,
    undiscounted, successes by any way."""
    ways = [["start", *"abc"], ["start", *"bbcad"], ["start", "c"]]
    undiscounted = {"g2po": {"step_gamma": 1.0}, "gagpo": {"gamma": 1.0}}[name_of(module)]
    for outcome in (1.0, 0.7, 1 / 3):
        failed = [episode(1, way, 0.0) for way in ways]
        succeeded = [episode(2, way, outcome) for way in ways]
        assert not any(sum(ours(module, failed), []))
        assert not any(sum(ours(module, failed + succeeded, **undiscounted), []))
        if name_of(module) == "gagpo":  # G2PO's step is worth more, the nearer the end is
            for number in range(1, 9):
                once = [episode(1, ["start", *"abcdefgh"], outcome)] * number
                assert not any(sum(ours(module, once), []))


@pytest.mark.parametrize("gamma", (0.95, 0.9, 0.7))
def test_states_of_equal_value_are_equal(module, gamma):
    """Two ways that are equally long and good, of which one was taken more often, and the mean of
    more numbers rounds otherwise."""
    name = {"g2po": "step_gamma", "gagpo": "gamma"}[name_of(module)]
    for often in range(2, 9):
        ways = [*(episode(1, ["start", *"acx"], 1.0),) * often, episode(1, ["start", *"bdx"], 1.0)]
        found = ours(module, ways, **{name: gamma})
        same([found[0]] * (often + 1), found)


def test_an_invalid_answer_takes_its_penalty_off_A(module):
    """Also where there is nothing else to learn."""
    failed = [episode(1, ["start", "start", "a"], 0.0) for _ in range(3)]
    failed[1].steps[0].valid = False
    same(ours(module, failed), [[0, 0], [-0.1, 0], [0, 0]])


def test_what_an_episode_ends_in_is_no_state_of_the_graph(module):
    """A failure that stops, or is cut off, in a state from which others went on to succeed is worth
    what it is: 0."""
    rest = [episode(1, ["start", *"ab"], 1.0), episode(1, ["start", *"cb"], 0.0)]
    for end in "abz":
        cut = ours(module, [*rest, episode(1, ["start", "a", end], 0.0)])
        same(cut, ours(module, [*rest, episode(1, ["start", "a", "nowhere"], 0.0)]), 0)
        assert cut[2][1] < 0 < cut[0][1]


def test_a_failures_good_step_is_credited(module):
    """start -> a is good, whatever became of it: the episodes that went on from a won two of three
    times, and those from b never. From a one loses."""
    won = [episode(1, ["start", *"ax"], 1.0) for _ in range(2)]
    lost = [episode(1, ["start", *"ay"], 0.0), *(episode(1, ["start", *"by"], 0.0),) * 2]
    flags = {"step_weight": 3.0} if name_of(module) == "g2po" else {"gae_lambda": 0.0}
    found = ours(module, won + lost, **flags)
    good, bad = found[2][0], found[3][0]
    assert good > 0 > bad and found[2][1] < 0 < found[0][1]


def test_g2po_by_hand():
    """Two episodes of two steps, gamma 1/2: V(start) = 1/8, V(a) = 1/2, V(b) = 0."""
    (script,) = each_main("g2po")
    module = load(script)
    episodes = [episode(1, ["start", *"ax"], 1.0), episode(1, ["start", *"bx"], 0.0)]
    root = 2**-0.5  # z of two numbers that differ: +- 1 / sqrt 2
    gains = z({0: 3 / 8, 1: 1 / 2, 2: -1 / 8, 3: 0.0})
    expected = [[2 * root + gains[0], root + gains[1]], [-2 * root + gains[2], -root + gains[3]]]
    same(ours(module, episodes, step_gamma=0.5), expected)


def test_gagpo_by_hand():
    """The same: V(start) = 1/4, V(a) = 1, V(b) = 0; the residuals are 1/4, 0 and -1/4, 0."""
    (script,) = each_main("gagpo")
    module = load(script)
    episodes = [episode(1, ["start", *"ax"], 1.0), episode(1, ["start", *"bx"], 0.0)]
    most = 0.25 / (2 * 0.0625 / 3) ** 0.5
    same(ours(module, episodes, gamma=0.5, gae_lambda=0.8), [[most, 0.0], [-most, 0.0]])
