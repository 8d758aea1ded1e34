"""Every formula of every script against a second rendering of it, in loops and numpy, on random
flat tensors."""

import ast
import functools
import inspect
import itertools
import math
import re
import textwrap
from types import SimpleNamespace

from runtime.data import Step, Trajectory, sum_per_step

import numpy as np
import pytest
import torch
from conftest import ROOT, load, scripts_with, text_of

SEEDS = range(4)
KINDS = ("binary", "scores")  # of outcomes


def product(*values, **options):
    return [*itertools.product(*values, **options)]


@functools.cache
def functions_of(script: str) -> dict[str, str]:
    """{name: text} of the functions of a script's top level."""
    text = (ROOT / f"{script}.py").read_text()
    lines, kinds = text.splitlines(), ast.FunctionDef | ast.AsyncFunctionDef
    found = [node for node in ast.parse(text).body if isinstance(node, kinds)]
    return {node.name: text_of(node, lines) for node in found}


def versions(*names: str) -> list[str]:
    """The first script of each text that these functions have, with those that they call."""
    first = {}
    for script in scripts_with(*names):
        functions, known, new = functions_of(script), set(), {*names}
        while new:
            known |= new
            words = {word for name in new for word in re.findall(r"\w+", functions.get(name, ""))}
            new = (words & functions.keys()) - known - {"main"}
        first.setdefault(tuple(functions.get(name) for name in sorted(known)), script)
    return [*first.values()]


def over_scripts(*names):
    """Run the test once for every text of these functions among all scripts."""
    return pytest.mark.parametrize("module", versions(*names), indirect=True)


@pytest.fixture
def module(request):
    return load(request.param)


def close(ours: torch.Tensor, theirs, tolerance=1e-5):
    theirs = np.asarray(theirs, dtype=np.float64)
    assert ours.shape == theirs.shape
    ours = ours.detach().double().numpy()
    np.testing.assert_allclose(ours, theirs, rtol=tolerance, atol=tolerance)


def flat(seed: int, outcomes: str = "binary"):
    """Random flat tensors as numpy: outcomes [N], group [N], step_traj [S]. Groups lie mixed; one
    is a group of one, one is all equal, one is one-sided but for a single member."""
    rng = np.random.default_rng(seed)
    group = rng.permutation([0] * 5 + [1] + [2] * 4 + [3] * 6)
    binary, scores = rng.integers(0, 2, len(group)), rng.normal(size=len(group)).round(1)
    values = (binary if outcomes == "binary" else scores).astype(np.float64)
    values[group == 2] = 0.7  # all equal, and not exact in binary
    values[group == 3] = 0.0
    values[np.flatnonzero(group == 3)[0]] = 1.0
    lengths = rng.integers(1, 6, len(group))
    return values, group, np.repeat(np.arange(len(group)), lengths)


def tensors(*arrays):
    kinds = {np.dtype(np.float64): torch.float32, np.dtype(bool): torch.bool}
    return [torch.tensor(a, dtype=kinds.get(a.dtype, torch.long)) for a in arrays]


def mean(values):
    return sum(values) / len(values)


def std(values):
    """Unbiased."""
    centre = mean(values)
    return math.sqrt(sum((v - centre) ** 2 for v in values) / (len(values) - 1))


# ------------ pairs and DPO ------------


def pairs_of(module, outcomes, group) -> list[tuple[int, int]]:
    """Every pair of a better and a worse one of a group, written out; SOTOPIA as published: of a
    goal above 6 and another."""
    pairs = []
    for a, b in product(range(len(group)), repeat=2):
        better = outcomes[a] > outcomes[b] + 1e-6
        if module.__name__ == "istar_paper_sotopia":
            better = outcomes[a] > 0.6 + 1e-6 and outcomes[b] <= 0.6 + 1e-6
        if group[a] == group[b] and better:
            pairs.append((a, b))
    return pairs


@over_scripts("preference_pairs")
@pytest.mark.parametrize("seed, kind", product(SEEDS, KINDS))
def test_preference_pairs(module, seed, kind):
    outcomes, group, _ = flat(seed, kind)
    expected = pairs_of(module, outcomes, group)
    pairs = module.preference_pairs(*tensors(outcomes, group))
    assert sorted(pairs) == sorted(expected) != []
    assert module.preference_pairs(torch.ones(6), torch.zeros(6)) == []


@over_scripts("preference_pairs")
def test_preference_pairs_by_hand(module):
    group = torch.tensor([0, 0, 0, 1, 1, 2])
    binary = torch.tensor([1.0, 0, 1, 0, 0, 1])
    assert module.preference_pairs(binary, group) == [(0, 1), (2, 1)]  # ties: none


WITH_MARGIN = [
    script
    for script in versions("preference_pairs")
    if "margin" in inspect.signature(load(script).preference_pairs).parameters
]


@pytest.mark.parametrize("module", WITH_MARGIN, indirect=True)
@pytest.mark.parametrize("seed", SEEDS)
def test_pairs_differ_by_more_than_the_margin(module, seed):
    outcomes, group, _ = flat(seed, "scores")
    pairs = module.preference_pairs(*tensors(outcomes, group), 0.35)
    expected = {(a, b) for a, b in pairs_of(module, outcomes, group)}
    assert {*pairs} == {(a, b) for a, b in expected if outcomes[a] - outcomes[b] > 0.35} < expected
    assert module.preference_pairs(*tensors(outcomes, group), 9.0) == []
    scores = torch.tensor([0.0, 0.5, 1.0])  # exactly the margin is not more than it
    assert module.preference_pairs(scores, torch.zeros(3), 0.5) == [(2, 0)]


@over_scripts("dpo_loss")
@pytest.mark.parametrize("seed", SEEDS)
def test_dpo_loss(module, seed):
    margins = np.random.default_rng(seed).normal(scale=20, size=12)
    expected = mean([math.log1p(math.exp(-x)) for x in margins])
    close(module.dpo_loss(torch.tensor(margins)), expected)


@over_scripts("dpo_loss")
def test_dpo_loss_far_out(module):
    margins = torch.tensor([1e4, -1e4], requires_grad=True)
    loss = module.dpo_loss(margins)
    assert loss.item() == 5e3
    (slope,) = torch.autograd.grad(loss, margins)
    close(slope, [0.0, -0.5])


def compares_all_steps(module) -> bool:
    """iStar as published and DPO; ours compares the steps that both episodes have."""
    return module.__name__.startswith(("istar_paper_", "dpo_"))


@over_scripts("margins")
@pytest.mark.parametrize("seed", SEEDS)
def test_margins(module, seed):
    outcomes, group, step_traj = flat(seed)
    rewards = np.random.default_rng(seed).normal(size=len(step_traj))
    longest, lengths = int(np.bincount(step_traj).argmax()), np.bincount(step_traj)
    pairs = [(longest, 2), (5, longest), (2, 0), (9, 15)]
    assert any(lengths[a] < lengths[b] for a, b in pairs)
    assert any(lengths[a] > lengths[b] for a, b in pairs)
    choices = {(): compares_all_steps(module)}
    if "all_steps" in inspect.signature(module.margins).parameters:
        choices = {(False,): False, (True,): True}
    for given, everything in choices.items():
        expected = []
        for pair in pairs:
            won, lost = (rewards[step_traj == episode] for episode in pair)
            both = max(map(len, (won, lost))) if everything else min(map(len, (won, lost)))
            expected.append(sum(won[:both]) - sum(lost[:both]))
        close(module.margins(*tensors(rewards, step_traj), pairs, *given), expected)


@over_scripts("margins")
def test_margins_keep_small_sums_after_long_ones(module):
    # in float32 sums by differences of a running total lose the small
    rewards = torch.tensor([4e6, 2e-3, 1e-3])
    given = [False] * ("all_steps" in inspect.signature(module.margins).parameters)
    close(module.margins(rewards, torch.tensor([0, 1, 2]), [(1, 2)], *given), [1e-3], 1e-6)


@over_scripts("pair_advantages")
@pytest.mark.parametrize("seed, kind", product(SEEDS, KINDS))
def test_pair_advantages(module, seed, kind):
    """Pairs won less pairs lost, counted; of outcomes 0 and 1 it is RLOO's advantage."""
    outcomes, group, _ = flat(seed, kind)
    if kind == "binary":
        outcomes = outcomes.round()
    expected = []
    for own, mine in zip(outcomes, group):
        others = outcomes[group == mine]
        won, lost = (others < own - 1e-5).sum(), (others > own + 1e-5).sum()
        expected.append((won - lost) / max(1, len(others) - 1))
    outcomes, group = tensors(outcomes, group)
    ours = module.pair_advantages(module.preference_pairs(outcomes, group), group)
    close(ours, expected)
    if kind == "binary":
        close(ours, numpy_rloo(outcomes.tolist(), group.tolist()))
    assert not module.pair_advantages([], group).any()


@over_scripts("step_rewards")
def test_step_rewards(module):
    prm, old = np.random.default_rng(0).normal(size=(2, 30))
    expected = [0.05 * (p - o) for p, o in zip(prm, old)]
    close(module.step_rewards(*tensors(prm, old), 0.05), expected)


@pytest.mark.parametrize("seed", SEEDS)
def test_sums_per_step(seed):
    rng = np.random.default_rng(seed)
    values, step = rng.normal(size=40), rng.permutation([*range(12), *rng.integers(0, 12, 28)])
    micro = SimpleNamespace(num_steps=12, token_step=torch.tensor(step))
    close(sum_per_step(*tensors(values), micro), [sum(values[step == s]) for s in range(12)])


# ------------ advantages ------------


def numpy_rloo(outcomes, group):
    result = []
    for i in range(len(outcomes)):
        others = [outcomes[j] for j in range(len(outcomes)) if j != i and group[j] == group[i]]
        result.append(outcomes[i] - mean(others) if others else 0.0)
    return result


def numpy_grpo(outcomes, group):
    result = []
    for i in range(len(outcomes)):
        mates = [outcomes[j] for j in range(len(outcomes)) if group[j] == group[i]]
        scale = std(mates) if max(mates) > min(mates) else math.inf
        result.append((outcomes[i] - mean(mates)) / scale)
    return result


def numpy_reinforce_pp(outcomes, group, step_traj):
    centred = []
    for outcome, own in zip(outcomes, group):
        centred.append(outcome - mean([o for o, g in zip(outcomes, group) if g == own]))
    of_steps = [centred[t] for t in step_traj]
    return [(c - mean(of_steps)) / std(of_steps) for c in centred]


@over_scripts("rloo_advantages")
@pytest.mark.parametrize("seed, kind", product(SEEDS, KINDS))
def test_rloo_advantages(module, seed, kind):
    outcomes, group, _ = flat(seed, kind)
    close(module.rloo_advantages(*tensors(outcomes, group)), numpy_rloo(outcomes, group))


@over_scripts("grpo_advantages")
@pytest.mark.parametrize("seed, kind", product(SEEDS, KINDS))
def test_grpo_advantages(module, seed, kind):
    outcomes, group, _ = flat(seed, kind)
    close(module.grpo_advantages(*tensors(outcomes, group)), numpy_grpo(outcomes, group))


@over_scripts("reinforce_pp_advantages")
@pytest.mark.parametrize("seed, kind", product(SEEDS, KINDS))
def test_reinforce_pp_advantages(module, seed, kind):
    outcomes, group, step_traj = flat(seed, kind)
    ours = module.reinforce_pp_advantages(*tensors(outcomes, group, step_traj))
    close(ours, numpy_reinforce_pp(outcomes, group, step_traj))


@over_scripts("rloo_advantages")
@pytest.mark.parametrize("size", range(1, 18))
def test_equal_outcomes_give_an_advantage_of_exactly_0(module, size):
    """A fresh AdamW divides a gradient by its own size, so 3e-8 moves weights as far as 1 does."""
    values = torch.tensor([1 / 3, 0.1, 0.7, 2 / 3, 1e6 / 3])
    outcomes, group = values.repeat_interleave(size), torch.arange(5).repeat_interleave(size)
    assert (module.rloo_advantages(outcomes, group) == 0).all()


@over_scripts("reinforce_pp_advantages")
@pytest.mark.parametrize("size", range(1, 18))
def test_equal_outcomes_far_from_1_are_not_standardised(module, size):
    """Rounding of a mean in float32 is more than 1e-6 here, and would get unit variance."""
    values = torch.tensor([77.7, -99.9, 123.4, 1e6 / 3])
    outcomes, group = values.repeat_interleave(size), torch.arange(4).repeat_interleave(size)
    steps = torch.arange(len(outcomes)).repeat_interleave(2)
    assert (module.reinforce_pp_advantages(outcomes, group, steps) == 0).all()


ESTIMATORS = ("rloo_advantages", "grpo_advantages", "reinforce_pp_advantages")
EACH_ESTIMATOR = [(script, name) for name in ESTIMATORS for script in versions(name)]


def estimate(script, name, outcomes, group):
    steps = [torch.arange(len(outcomes))] if name.startswith("reinforce") else []
    return getattr(load(script), name)(outcomes, group, *steps)


@pytest.mark.parametrize("script, name", EACH_ESTIMATOR)
def test_nothing_to_compare_gives_zero(script, name):
    assert estimate(script, name, torch.tensor([1.0]), torch.tensor([0])).tolist() == [0.0]
    two = estimate(script, name, torch.tensor([1.0, 0.0]), torch.tensor([0, 1]))
    assert two.tolist() == [0.0, 0.0]
    equal = estimate(script, name, torch.full((6,), 0.1), torch.tensor([0, 0, 0, 1, 1, 1]))
    assert equal.abs().max() < 1e-6  # rounding may not be blown up to unit variance


@pytest.mark.parametrize("script, name", EACH_ESTIMATOR)
def test_a_constant_added_to_outcomes_changes_nothing(script, name):
    outcomes, group, _ = flat(0, "scores")
    outcomes, group = tensors(outcomes, group)
    expected = estimate(script, name, outcomes, group)
    close(estimate(script, name, outcomes + 3, group), expected, 1e-4)


@over_scripts("step_advantages")
@pytest.mark.parametrize("seed", SEEDS)
def test_step_advantages(module, seed):
    _, group, step_traj = flat(seed)
    step_group = group[step_traj]
    rewards = np.random.default_rng(seed).normal(scale=0.5, size=len(step_traj))
    close(module.step_advantages(*tensors(rewards, step_group)), numpy_grpo(rewards, step_group))


@over_scripts("step_advantages")
def test_step_advantages_of_equal_rewards_are_zero_not_noise(module):
    group = torch.zeros(200, dtype=torch.long)
    for value in (0.0, 0.1, -1 / 3):
        assert not module.step_advantages(torch.full((200,), value), group).any()
    assert module.step_advantages(torch.tensor([0.4]), torch.tensor([0])).tolist() == [0.0]


def numpy_episode(estimator, outcomes, group, step_traj):
    """A^E of every step."""
    if estimator == "rloo":
        found = numpy_rloo(outcomes, group)
    elif estimator == "grpo":
        found = numpy_grpo(outcomes, group)
    else:
        found = numpy_reinforce_pp(outcomes, group, step_traj)
    return np.array(found)[step_traj]


def episode_case(seed, kind):
    """(outcomes [N], group [N], step_traj [S], invalid [S]) as numpy, and as a batch."""
    outcomes, group, step_traj = flat(seed, kind)
    rng = np.random.default_rng(seed)
    invalid = rng.random(len(step_traj)) < 0.3
    names = "outcomes", "group", "step_traj", "invalid"
    arrays = outcomes, group, step_traj, invalid
    batch = SimpleNamespace(**dict(zip(names, tensors(*arrays))), num_steps=len(step_traj))
    batch.progress = torch.tensor(rng.normal(size=len(step_traj)))
    return arrays, batch


@over_scripts("episode_advantages")
@pytest.mark.parametrize(
    "estimator, seed, kind", product(("rloo", "grpo", "reinforce++"), SEEDS, KINDS)
)
def test_episode_advantages(module, estimator, seed, kind):
    arrays, batch = episode_case(seed, kind)
    ours = module.episode_advantages(batch, estimator)
    close(ours, numpy_episode(estimator, *arrays[:3]), 1e-4)


# ------------ the paragraph of main that makes the advantages ------------


def paragraph(module, title: str) -> str:
    """The statements of main between the banner with this word in its title and the next one."""
    source = inspect.getsource(module.main)
    _, *parts = re.split(r"^ +# -{12} (.+?) -+$", source, flags=re.MULTILINE)
    (body,) = [body for banner, body in zip(parts[0::2], parts[1::2]) if title in banner]
    return textwrap.dedent(body)


def advantages_of_main(module, **given) -> torch.Tensor:
    """What the paragraph leaves in `advantages`, from the names that it finds."""
    names = vars(module) | {"run": Told()} | given
    if "policy_slope" in names:  # part 3 needs to know the credited steps too
        lines = paragraph(module, "PRM").splitlines()
        own = [line for line in lines if line.startswith(("step_group", "paired", "credited"))]
        exec("\n".join(own), names)
    exec(paragraph(module, "Advantages"), names)
    return names["advantages"]


class Told:
    """A run that is told something."""

    def __init__(self):
        self.row = {}

    def log(self, kind, values):
        self.row |= {f"{kind}/{name}": value for name, value in values.items()}


def each_main(*algorithms: str) -> list[str]:
    """The scripts of these algorithms, one for each text of the paragraph."""
    first = {}
    for script in scripts_with("main", "policy_update"):
        if script.startswith(tuple(f"{name}_" for name in algorithms)):
            text = "istar_paper" in script, paragraph(load(script), "Advantages")
            first.setdefault(text, script)
    return [*first.values()]


@pytest.mark.parametrize("module", each_main("rloo", "grpo", "reinforce_pp"), indirect=True)
@pytest.mark.parametrize("seed, kind", product(SEEDS, KINDS))
def test_main_gives_the_policy_the_advantages_of_its_baseline(module, seed, kind):
    """REINFORCE++: whitened over all steps of the batch. An invalid answer costs on A's scale."""
    arrays, batch = episode_case(seed, kind)
    estimator = module.__name__.rsplit("_", 1)[0].replace("reinforce_pp", "reinforce++")
    for penalty in (0.0, 0.1):
        args = SimpleNamespace(invalid_penalty=penalty)
        ours = advantages_of_main(module, batch=batch, args=args)
        close(ours, numpy_episode(estimator, *arrays[:3]) - penalty * arrays[3], 1e-4)
        if estimator == "reinforce++" and not penalty:
            assert abs(ours.double().mean()) < 1e-6
            assert ours.double().std().item() == pytest.approx(1, abs=1e-5)


ISTAR = [script for script in each_main("istar") if "ablations" not in script]
ESTIMATED = product(("rloo", "grpo", "reinforce++"), (0.0, 0.7))


@pytest.mark.parametrize("module", ISTAR, indirect=True)
@pytest.mark.parametrize("estimator, alpha", ESTIMATED)
def test_main_adds_alpha_times_the_step_advantages(module, estimator, alpha):
    """Ours: of valid answers in groups with a pair, times the PRM's skill, here a half. As
    published: of all steps."""
    arrays, batch = episode_case(0, "scores")
    outcomes, group, step_traj, invalid = arrays
    rewards = np.random.default_rng(1).normal(scale=0.5, size=len(step_traj))
    args = SimpleNamespace(estimator=estimator, alpha=alpha, invalid_penalty=0.1)
    pairs = [(int(np.flatnonzero(group == g)[0]),) * 2 for g in set(group) - {0}]
    run, accuracies = Told(), [0.0, 0.9, 0.6, 0.75, 0.5, 1.0]
    given = dict(batch=batch, args=args, run=run, rewards=torch.tensor(rewards).float())
    given |= dict(pairs=pairs, accuracies=accuracies)  # every group but the first has a pair
    ours = advantages_of_main(module, **given)

    published = "paper" in module.__name__
    credited = ~invalid & (group[step_traj] != 0) | published
    of_steps, step_group = np.zeros(len(step_traj)), group[step_traj]
    of_steps[credited] = numpy_grpo(rewards[credited], step_group[credited])
    weighted = alpha * (1.0 if published else 0.5) * of_steps
    of_episodes = numpy_episode(estimator, *arrays[:3])
    close(ours, of_episodes + weighted - 0.1 * invalid, 1e-4)
    if not published:
        assert run.row.pop("prm/skill") == pytest.approx(0.5)
    seen = of_episodes[credited], of_steps[credited], batch.progress.numpy()[credited]
    assert run.row == pytest.approx(numpy_credit(*seen, weighted[credited]), abs=1e-4)


def numpy_credit(episode_adv, step_adv, progress, weighted) -> dict:
    """mean |weighted A^S| / mean |A^E|, and Pearson's correlation of A^S with progress; 0 where A^S
    does not vary."""
    share = np.abs(weighted).mean() / np.abs(episode_adv).mean()
    varies = step_adv.std() > 0 and progress.std() > 0
    correlation = np.corrcoef(step_adv, progress)[0, 1] if varies else 0.0
    told = {"credit_share": share, "advantage_progress_correlation": correlation}
    return {f"prm/{name}": value for name, value in told.items()}


@pytest.mark.parametrize("module", ISTAR, indirect=True)
def test_credit_without_weight_still_has_its_correlation_with_progress(module):
    """Where the skill is 0, as at the start of a run."""
    step_adv = torch.tensor([1.0, -1.0, 0.5])
    told = module.credit_statistics(torch.ones(3), step_adv, 2 * step_adv, 0 * step_adv)
    assert told == pytest.approx({"credit_share": 0, "advantage_progress_correlation": 1})


@pytest.mark.parametrize("module", [s for s in ISTAR if "paper" not in s], indirect=True)
def test_main_takes_a_batch_without_a_step_that_has_credit(module):
    """Every answer invalid: nothing but the episode's advantage, and no NaN."""
    arrays, batch = episode_case(0, "scores")
    batch.invalid = torch.ones_like(batch.invalid)
    args = SimpleNamespace(estimator="rloo", alpha=1.0, invalid_penalty=0.1)
    rewards = torch.randn(len(batch.step_traj))
    given = dict(batch=batch, args=args, rewards=rewards, pairs=[], accuracies=[1.0] * 5)
    ours = advantages_of_main(module, **given)
    close(ours, numpy_episode("rloo", *arrays[:3]) - 0.1, 1e-4)


def group_case(trajectories, outcomes):
    """(outcomes [N], group [N], step_traj [S], invalid [S]) of walks as numpy, and as a batch."""
    group = np.array([t.task for t in trajectories])
    step_traj = np.repeat(np.arange(len(trajectories)), [len(t.steps) for t in trajectories])
    arrays = outcomes, group, step_traj, np.random.default_rng(5).random(len(step_traj)) < 0.3
    names = "outcomes", "group", "step_traj", "invalid"
    return arrays, SimpleNamespace(**dict(zip(names, tensors(*arrays))))


@pytest.mark.parametrize("module", each_main("gigpo"), indirect=True)
@pytest.mark.parametrize("norm, weight", product(("mean", "mean-std"), (0.0, 0.5)))
def test_main_adds_the_advantages_of_anchor_states(module, norm, weight):
    trajectories = walks(5)
    outcomes = np.random.default_rng(5).integers(0, 2, len(trajectories)).astype(np.float64)
    arrays, batch = group_case(trajectories, outcomes)
    returns = [
        0.95 ** (len(t.steps) - 1 - n) * o
        for t, o in zip(trajectories, outcomes)
        for n in range(len(t.steps))
    ]
    states, expected = [state for t in trajectories for state in taken_in(t)], []
    of_episodes = numpy_episode("grpo", *arrays[:3]) - 0.1 * arrays[3]
    for episode, own, state in zip(of_episodes, returns, states):
        mates = [r for r, other in zip(returns, states) if other == state]
        spread = max(mates) - min(mates)
        scale = std(mates) if norm == "mean-std" and spread else 1.0
        expected.append(episode + weight * (own - mean(mates)) / scale)
    args = SimpleNamespace(invalid_penalty=0.1, step_weight=weight, step_gamma=0.95, step_norm=norm)
    run = Told()
    ours = advantages_of_main(module, episodes=trajectories, batch=batch, args=args, run=run)
    close(ours, expected, 1e-4)
    shared = mean([states.count(state) > 1 for state in states])
    assert run.row["anchor/shared"] == pytest.approx(shared)
    assert run.row["anchor/groups"] == len({*states})
    assert run.row["anchor/largest"] == max(map(states.count, states))


# ------------ GiGPO: anchor states ------------


def walks(seed: int):
    """Two tasks whose states have the same names, episodes that come back to where they were, to
    the start too."""
    rng, trajectories = np.random.default_rng(seed), []
    for task in (3, 8):
        for _ in range(5):
            states = [str(rng.integers(0, 4)) for _ in range(rng.integers(1, 7))]
            steps = [Step("", "", [], anchor=state) for state in states]
            trajectories.append(Trajectory(task, steps=steps, anchor={3: "0", 8: "1"}[task]))
    return trajectories


def taken_in(trajectory) -> list[tuple]:
    """(task, state) in which each of its steps was taken."""
    states = [trajectory.anchor, *(step.anchor for step in trajectory.steps)]
    return [(trajectory.task, state) for state in states[:-1]]


@over_scripts("anchor_groups")
@pytest.mark.parametrize("seed", SEEDS)
def test_anchor_groups(module, seed):
    trajectories = walks(seed)
    states = [state for t in trajectories for state in taken_in(t)]
    groups = module.anchor_groups(trajectories).tolist()
    same = [[a == b for b in states] for a in states]
    assert [[a == b for b in groups] for a in groups] == same
    assert {*groups} == {*range(len({*states}))}
    assert any(t.steps[0].anchor == t.anchor for t in trajectories)


@over_scripts("discounted_returns")
@pytest.mark.parametrize("seed, gamma", product(SEEDS, (0.95, 0.5, 1.0)))
def test_discounted_returns(module, seed, gamma):
    outcomes, _, step_traj = flat(seed, "scores")
    expected = []
    for trajectory, outcome in enumerate(outcomes):
        value, backwards = outcome, []
        for _ in range((step_traj == trajectory).sum()):
            backwards.append(value)
            value = 0.0 + gamma * value  # every reward but the last is 0
        expected += backwards[::-1]
    close(module.discounted_returns(*tensors(outcomes, step_traj), gamma), expected)


@over_scripts("discounted_returns")
@pytest.mark.parametrize("gamma", (0.95, 0.9, 0.5))
def test_equal_returns_are_equal_to_the_last_bit(module, gamma):
    """Else a group of equals would have a standard deviation, and its steps an advantage: a
    vectorised power and that of the last few numbers may differ."""
    steps, trajectories = 9, 8
    step_traj = torch.arange(trajectories).repeat_interleave(steps)
    returns = module.discounted_returns(torch.ones(trajectories), step_traj, gamma)
    assert all(len(of_turn.unique()) == 1 for of_turn in returns.reshape(trajectories, steps).T)


@over_scripts("anchor_advantages")
@pytest.mark.parametrize("seed, norm", product(SEEDS, ("mean", "mean-std")))
def test_anchor_advantages(module, seed, norm):
    rng = np.random.default_rng(seed)
    anchor = rng.permutation([0] * 7 + [1] + [2] * 3 + [3] * 2)
    returns = rng.normal(size=len(anchor))
    returns[anchor == 2] = 0.7  # all equal
    expected = []
    for u in range(len(anchor)):
        mates = [returns[v] for v in range(len(anchor)) if anchor[v] == anchor[u]]
        spread = max(mates) - min(mates)
        scale = std(mates) if norm == "mean-std" and spread else 1.0
        expected.append((returns[u] - mean(mates)) / scale if spread else 0.0)
    ours = module.anchor_advantages(*tensors(returns, anchor), norm)
    close(ours, expected)
    assert ours[torch.tensor(anchor) == 1].tolist() == [0.0]  # nothing to be compared with
    for number in range(2, 9):  # equal returns: exactly 0, however they round
        same = torch.full((number,), 0.95) ** torch.arange(20)[:, None]  # [20, number]
        group = torch.arange(20).repeat_interleave(number)
        assert not module.anchor_advantages(same.flatten(), group, norm).any()


@over_scripts("anchor_advantages", "anchor_groups")
@pytest.mark.parametrize("seed", SEEDS)
def test_episodes_of_one_step_make_step_and_episode_advantage_agree(module, seed):
    """All steps stand in their group's first state and return the outcome: A^S is A^E, bit for
    bit."""
    trajectories = walks(seed)
    for t in trajectories:
        del t.steps[1:]
    (outcomes,) = tensors(np.random.default_rng(seed).normal(size=len(trajectories)))
    group, step_traj = torch.tensor([t.task for t in trajectories]), torch.arange(len(trajectories))
    anchor = module.anchor_groups(trajectories)
    returns = module.discounted_returns(outcomes, step_traj, 0.95)
    ours = module.anchor_advantages(returns, anchor, "mean-std")
    assert torch.equal(ours, module.grpo_advantages(outcomes, group)) and ours.abs().max() > 0.5


# ------------ GraphGPO: distances to the goal ------------


def solved_walks(seed: int, share: float):
    """Walks, of which so many end in success."""
    trajectories, rng = walks(seed), np.random.default_rng(seed)
    for t in trajectories:
        t.steps[-1].success = bool(rng.random() < share)
    return trajectories


def plain_distances(trajectories) -> list[float]:
    """Steps from the state after each step to the goal, by relaxing every edge until nothing
    changes; all trajectories of a task make its graph."""
    distances = []
    for t in trajectories:
        edges = []
        for other in trajectories:
            if other.task == t.task:
                states = [other.anchor, *(step.anchor for step in other.steps)]
                states[-1] = "the goal" if other.success else states[-1]
                edges += zip(states, states[1:])
        far = {state: math.inf for edge in edges for state in edge} | {"the goal": 0.0}
        for _ in far:
            for start, end in edges:
                far[start] = min(far[start], far[end] + 1)
        beyond = max(d for d in far.values() if d < math.inf) + 1
        states = [step.anchor for step in t.steps]
        states[-1] = "the goal" if t.success else states[-1]
        distances += [min(far[state], beyond) for state in states]
    return distances


@over_scripts("goal_distances")
@pytest.mark.parametrize("seed, share", product(SEEDS, (0.0, 0.4)))
def test_goal_distances(module, seed, share):
    trajectories = solved_walks(seed, share)
    ours = module.goal_distances(trajectories)
    close(ours, plain_distances(trajectories))
    assert bool((ours == 0).any()) == any(t.success for t in trajectories)


@over_scripts("goal_distances")
def test_a_failures_steps_towards_the_goal_are_credited(module):
    """a -> b -> goal succeeds; a -> b -> c fails after the same good first step; a -> d is far."""

    def walk(states, success):
        steps = [Step("", "", [], anchor=state) for state in states]
        steps[-1].success = success
        return Trajectory(1, steps=steps, anchor="a")

    trajectories = [walk("bz", True), walk("bc", False), walk("dc", False)]
    distances = module.goal_distances(trajectories)
    assert distances.tolist() == [1, 0, 1, 3, 3, 3]
    anchor = module.anchor_groups(trajectories)
    credit = module.grpo_advantages(module.distance_rewards(distances, anchor, 0.5), anchor)
    assert credit[0] == credit[2] > 0 > credit[4] and credit[1] > 0 > credit[3] and credit[5] == 0


@over_scripts("distance_rewards")
@pytest.mark.parametrize("seed, omega", product(SEEDS, (0.1, 0.9)))
def test_distance_rewards_are_credited_as_the_papers(module, seed, omega):
    """r_succ * omega^(d + 1) but for a factor of each group, so A^S is the same; and still there
    where that power is no float any more."""
    rng = np.random.default_rng(seed)
    anchor = rng.permutation([0] * 7 + [1] + [2] * 3 + [3] * 2)
    distances = rng.integers(0, 5, len(anchor)).astype(np.float64)
    rewards = 10 * omega ** (distances + 1)
    expected = numpy_grpo(rewards, anchor)
    for beyond in (0, 400):
        of_states, group = tensors(distances + beyond, anchor)
        ours = module.distance_rewards(of_states, group, omega)
        close(module.grpo_advantages(ours, group), expected, 1e-4)


@pytest.mark.parametrize("module", each_main("graphgpo"), indirect=True)
@pytest.mark.parametrize("weight", (0.0, 0.5))
def test_main_adds_the_advantages_of_distances(module, weight):
    trajectories = solved_walks(5, 0.4)
    arrays, batch = group_case(trajectories, np.array([float(t.success) for t in trajectories]))
    states = [state for t in trajectories for state in taken_in(t)]
    numbers = np.array([states.index(state) for state in states])
    rewards = np.array([0.1 ** (1 + d) for d in plain_distances(trajectories)])
    expected = numpy_episode("grpo", *arrays[:3]) - 0.1 * arrays[3]
    expected = expected + weight * np.array(numpy_grpo(rewards, numbers))
    args = SimpleNamespace(invalid_penalty=0.1, step_weight=weight, distance_discount=0.1)
    ours = advantages_of_main(module, episodes=trajectories, batch=batch, args=args)
    close(ours, expected, 1e-4)


# ------------ PRIME: token rewards ------------


def token_case(seed: int):
    """(outcomes [N], group [N], step_traj [S], token_step [K], token rewards [K]) as numpy."""
    outcomes, group, step_traj = flat(seed)
    rng = np.random.default_rng(seed)
    token_step = np.repeat(np.arange(len(step_traj)), rng.integers(1, 5, len(step_traj)))
    return outcomes, group, step_traj, token_step, rng.normal(scale=0.3, size=len(token_step))


@over_scripts("token_rewards", "outcome_logits")
@pytest.mark.parametrize("seed", SEEDS)
def test_token_rewards_sum_to_the_trajectorys(module, seed):
    outcomes, _, step_traj, token_step, prm = token_case(seed)
    ref = np.random.default_rng(seed + 9).normal(size=len(prm))
    rewards = module.token_rewards(*tensors(prm, ref), 0.05)
    close(rewards, [0.05 * (p - r) for p, r in zip(prm, ref)])
    traj = step_traj[token_step]
    each = 0.05 * (prm - ref)
    sums = [sum(e for e, t in zip(each, traj) if t == n) for n in range(len(outcomes))]
    close(module.outcome_logits(rewards, torch.tensor(traj), len(outcomes)), sums)


@over_scripts("prime_advantages")
@pytest.mark.parametrize("seed", SEEDS)
def test_prime_advantages(module, seed):
    outcomes, group, step_traj, token_step, rewards = token_case(seed)
    traj = step_traj[token_step]
    average = [mean(rewards[traj == n]) for n in range(len(outcomes))]
    expected = []
    for k, n in enumerate(traj):
        others = [m for m in range(len(outcomes)) if group[m] == group[n] and m != n]
        baseline = mean([average[m] for m in others]) if others else average[n]
        to_go = sum(rewards[later] - baseline for later in range(k, len(traj)) if traj[later] == n)
        better = outcomes[n] - mean([outcomes[m] for m in others]) if others else 0.0
        expected.append(to_go + better)
    ours = module.prime_advantages(*tensors(outcomes, group, rewards, traj))
    close(ours, expected)
    assert ours.dtype == torch.float32


@over_scripts("istar_code_advantages")
@pytest.mark.parametrize("seed", SEEDS)
def test_istar_code_advantages(module, seed):
    outcomes, group, step_traj, _, _ = token_case(seed)
    rewards, expected = np.random.default_rng(seed).normal(scale=0.3, size=len(step_traj)), []
    start = [np.flatnonzero(step_traj == n)[0] for n in range(len(outcomes))]
    first = [outcome + rewards[s] for outcome, s in zip(outcomes, start)]
    for s, n in enumerate(step_traj):
        mates = [m for m in range(len(outcomes)) if group[m] == group[n]]
        scale = len(mates) / (len(mates) - 1) if len(mates) > 1 else 0.0
        expected.append(scale * (outcomes[n] + rewards[s] - mean([first[m] for m in mates])))
    ours = module.istar_code_advantages(*tensors(outcomes, group, rewards, step_traj))
    close(ours, expected)


@over_scripts("prime_advantages", "istar_code_advantages")
def test_without_token_rewards_both_variants_are_rloo(module):
    outcomes, group, step_traj, token_step, _ = token_case(0)
    outcomes, group, step_traj, token_step = tensors(outcomes, group, step_traj, token_step)
    rloo = module.rloo_advantages(outcomes, group)[step_traj]
    none = torch.zeros(len(token_step))
    of_tokens = module.prime_advantages(outcomes, group, none, step_traj[token_step])
    assert torch.equal(of_tokens, rloo[token_step])
    none = torch.zeros(len(step_traj))
    close(module.istar_code_advantages(outcomes, group, none, step_traj), rloo)


# ------------ PPO: values and GAE ------------


@over_scripts("credit_units")
@pytest.mark.parametrize("seed, gae", product(SEEDS, ("step", "token")))
def test_credit_units(module, seed, gae):
    outcomes, group, step_traj, token_step, _ = token_case(seed)
    invalid = np.random.default_rng(seed).random(len(step_traj)) < 0.3
    at, chain, rewards = [], [], []
    for s, n in enumerate(step_traj):
        tokens = np.flatnonzero(token_step == s)
        last = s + 1 == len(step_traj) or step_traj[s + 1] != n
        if gae == "step":  # the outcome comes once, with the episode's end
            at.append(tokens[0])
            chain.append(n)
            rewards.append((outcomes[n] if last else 0.0) - 0.1 * invalid[s])
        else:  # every step is an episode: the outcome comes with each one's last token
            at += [*tokens]
            chain += [s] * len(tokens)
            rewards += [0.0] * (len(tokens) - 1) + [outcomes[n] - 0.1 * invalid[s]]
    batch = SimpleNamespace()
    batch.outcomes, batch.step_traj, batch.token_step = tensors(outcomes, step_traj, token_step)
    ours = module.credit_units(batch, torch.tensor(invalid), 0.1, gae)
    assert ours[0].tolist() == at and ours[1].tolist() == chain
    close(ours[2], rewards)


@over_scripts("gae_advantages")
def test_gae_of_an_episode_by_hand(module):
    """Three steps, then one of the next episode: V is passed back within an episode, and not across
    its end."""
    rewards, values = torch.tensor([0.0, -0.1, 1.0, 0.0]), torch.tensor([0.5, 0.4, 0.8, 0.3])
    ours = module.gae_advantages(rewards, values, torch.tensor([0, 0, 0, 1]), 0.9, 0.5)
    third = 1.0 - 0.8
    second = (-0.1 + 0.9 * 0.8 - 0.4) + 0.45 * third
    first = (0.9 * 0.4 - 0.5) + 0.45 * second
    close(ours, [first, second, third, -0.3])


@over_scripts("gae_advantages", "credit_units")
def test_gae_token_of_an_episode_by_hand(module):
    """Two steps of two and three tokens, outcome 1: each ends with the outcome, and nothing passes
    between them."""
    batch = SimpleNamespace(outcomes=torch.ones(1), step_traj=torch.tensor([0, 0]))
    batch.token_step = torch.tensor([0, 0, 1, 1, 1])
    at, chain, rewards = module.credit_units(batch, torch.tensor([False, True]), 0.1, "token")
    assert at.tolist() == [0, 1, 2, 3, 4]
    values = torch.tensor([0.5, 0.6, 0.2, 0.3, 0.4])
    ours = module.gae_advantages(rewards, values, chain, 1.0, 0.5)
    first = [0.1 + 0.5 * 0.4, 0.4]
    last = 0.9 - 0.4
    middle = 0.1 + 0.5 * last
    close(ours, [*first, 0.1 + 0.5 * middle, middle, last])


@over_scripts("gae_advantages")
@pytest.mark.parametrize("seed, gamma, lam", product(SEEDS, (1.0, 0.9), (0.0, 0.95, 1.0)))
def test_gae_advantages(module, seed, gamma, lam):
    _, _, chain = flat(seed)
    rewards, values = np.random.default_rng(seed).normal(size=(2, len(chain)))
    deltas, expected = [], []
    for u in range(len(chain)):
        follows = u + 1 < len(chain) and chain[u + 1] == chain[u]
        deltas.append(rewards[u] + (gamma * values[u + 1] if follows else 0.0) - values[u])
    for u in range(len(chain)):
        later = [v for v in range(u, len(chain)) if chain[v] == chain[u]]
        expected.append(sum((gamma * lam) ** (v - u) * deltas[v] for v in later))
    close(module.gae_advantages(*tensors(rewards, values, chain), gamma, lam), expected)


@over_scripts("value_loss")
@pytest.mark.parametrize("seed, clip", product(SEEDS, (0.2, 1e9)))
def test_value_loss(module, seed, clip):
    new, old, returns = np.random.default_rng(seed).normal(scale=0.5, size=(3, 40))
    terms, clipped = [], 0
    for v, o, r in zip(new, old, returns):
        near = min(max(v, o - clip), o + clip)
        terms.append(max((v - r) ** 2, (near - r) ** 2) / 2)
        clipped += (near - r) ** 2 > (v - r) ** 2
    close(module.value_loss(*tensors(new, old, returns), clip), mean(terms))
    assert clipped > 0 or clip == 1e9


# ------------ ablations ------------


@over_scripts("per_ratio")
@pytest.mark.parametrize("seed", SEEDS)
def test_what_a_ratio_compares(module, seed):
    rng = np.random.default_rng(seed)
    logprobs, step = rng.normal(size=40), rng.permutation([*range(12), *rng.integers(0, 12, 28)])
    of_step = [[logprobs[k] for k in range(40) if step[k] == s] for s in range(12)]
    sums, means = [*map(sum, of_step)], [*map(mean, of_step)]
    micro = SimpleNamespace(num_steps=12, token_step=torch.tensor(step))
    for ratio, values in {"token": logprobs, "step": sums, "step-mean": means}.items():
        close(module.per_ratio(*tensors(logprobs), micro, ratio), values)


@over_scripts("compared_with")
def test_what_a_step_is_compared_with(module):
    _, group, step_traj = flat(0)
    batch = SimpleNamespace(**dict(zip(("group", "step_traj"), tensors(group, step_traj))))
    turn = [sum(step_traj[:s] == step_traj[s]) for s in range(len(step_traj))]
    kinds = {"batch": [0] * len(turn), "group": [*group[step_traj]]}
    kinds["turn"] = [*zip(group[step_traj], turn)]
    for over, expected in kinds.items():
        ours = module.compared_with(batch, over).tolist()
        assert [[a == b for b in ours] for a in ours] == [
            [a == b for b in expected] for a in expected
        ]


# ------------ ratio and policy loss ------------


@over_scripts("policy_loss")
@pytest.mark.parametrize("seed, clip", product(SEEDS, (0.2, 0.05)))
def test_policy_loss(module, seed, clip):
    rng = np.random.default_rng(seed)
    old, advantages = rng.normal(size=(2, 60))
    new = old + rng.normal(scale=0.3, size=60)
    terms, ratios, clipped, cases = [], [], [], set()
    for n, o, a in zip(new, old, advantages):
        rho = math.exp(n - o)
        side = -1 if rho < 1 - clip else 1 if rho > 1 + clip else 0
        bounded = {-1: 1 - clip, 0: rho, 1: 1 + clip}[side]
        terms.append(min(rho * a, bounded * a))
        ratios.append(rho)
        clipped.append(float(side != 0))
        cases.add((a > 0, side))
    assert len(cases) == 6  # both signs of A, inside and beyond both sides of the interval
    loss, stats = module.policy_loss(*tensors(new, old, advantages), clip)
    close(loss, -mean(terms))
    assert stats["ratio"] == pytest.approx(mean(ratios), rel=1e-5)
    assert stats["clip_fraction"] == pytest.approx(mean(clipped), rel=1e-5)
    approx_kl = mean([r - 1 - math.log(r) for r in ratios])
    assert stats["approx_kl"] == pytest.approx(approx_kl, rel=1e-4)
    assert stats["loss"] == pytest.approx(-mean(terms), rel=1e-5)


@over_scripts("policy_loss")
@pytest.mark.parametrize(
    "logratio, advantage, expected",
    [(0.5, 1, 0), (0.5, -1, 1), (-0.5, 1, -1), (-0.5, -1, 0), (0.1, 1, -1)],
)
def test_policy_loss_gradient_stops_only_where_the_clip_binds(
    module, logratio, advantage, expected
):
    """The sign of d loss / d logprob: 0 beyond the clip on the side that the advantage already
    pushed to."""
    new = torch.tensor([logratio], requires_grad=True)
    loss, _ = module.policy_loss(new, torch.zeros(1), torch.tensor([float(advantage)]), 0.2)
    (gradient,) = torch.autograd.grad(loss, new)
    assert gradient.sign().item() == expected


# ------------ names ------------

SIGNATURES = {
    "play": "env engine chat task sampling args",
    "preference_pairs": "outcomes group",
    "dpo_loss": "margins",
    "step_rewards": "prm_logprobs old_logprobs beta",
    "rloo_advantages": "outcomes group",
    "grpo_advantages": "outcomes group",
    "reinforce_pp_advantages": "outcomes group step_traj",
    "policy_loss": "logprobs old_logprobs advantages clip",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_a_name_is_called_alike_in_every_script(name):
    """What comes behind these has a default."""
    given = SIGNATURES[name].split()
    for script in scripts_with(name):
        parameters = inspect.signature(getattr(load(script), name)).parameters
        assert [*parameters][: len(given)] == given, script
        behind = [*parameters.values()][len(given) :]
        assert all(p.default is not p.empty for p in behind), script


def test_the_benchmark_of_the_step_baseline_is_unbiased_only_with_the_others(monkeypatch):
    """Nothing deserves credit there; what iStar's scripts compute has a bias, as the docs say."""
    from benchmarks import step_baseline

    monkeypatch.setattr(step_baseline, "GROUPS", 40_000)
    found = [
        step_baseline.gradients(8, others, np.random.default_rng(1))
        for others in ("", "mean", "mean and std")
    ]
    group, mean, both = (values.mean() for values in found)
    assert group == pytest.approx(0.139, abs=0.006) and mean == pytest.approx(0.068, abs=0.008)
    assert abs(both) < 4 * found[-1].std() / 200
