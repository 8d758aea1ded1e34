"""istar_webshop_ablations.py: what a run of each ablation writes down is what its formula says, and
without their flags it is istar_webshop.py."""

import json
import math
from dataclasses import fields, replace

from runtime.data import flatten, sum_per_step

import numpy as np
import pytest
import torch
from conftest import (
    TRAINERS,
    load,
    random_trajectories,
    run_main,
)
from test_math import mean, numpy_rloo, std, versions
from test_scripts import rows, same_tensors, small, without_times

SCRIPT = "istar_webshop_ablations"
SKILL = ["--as-published", "skill"]  # A^S counts from the first iteration on


# ------------ runs ------------


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


def played(home, name, *flags, script=SCRIPT, iterations=2):
    """(metrics, the last episodes) of a short run. In its first iteration the PRM has learnt
    nothing, but for one that is `learnt`."""
    short = [*small(script), "--max-steps", 7, "--iterations", iterations]
    short += ["--eval-tasks", 1, "--engine", "hf", "--run-name", name]
    run_main(script, *short, *flags, cwd=home)
    return rows(home / "runs" / name), episodes_of(home, name, iterations)


@pytest.fixture
def learnt(monkeypatch):
    """The PRM's adapter begins with random weights: an iteration is enough."""
    lora = load(SCRIPT).lora

    def drawn(rank):
        return replace(lora(rank), init_lora_weights=False) if rank else None

    monkeypatch.setattr(load(SCRIPT), "lora", drawn)


def episodes_of(home, name, iteration):
    lines = (home / "runs" / name / "episodes.jsonl").read_text().splitlines()
    return [e for e in map(json.loads, lines) if e["iteration"] == iteration]


def steps_of(episodes, key):
    """{task: the values of all steps of its group}."""
    groups = {}
    for episode in episodes:
        groups.setdefault(episode["task"], []).extend(step[key] for step in episode["steps"])
    return groups


def outcomes_of(episodes):
    """{task: the outcomes of its group}."""
    return {e["task"]: [f["outcome"] for f in episodes if f["task"] == e["task"]] for e in episodes}


def ranked_right(episodes, key):
    """Share of the pairs whose better episode has the larger sum over the steps that both have."""
    right = []
    for winner in episodes:
        for loser in episodes:
            if winner["task"] == loser["task"] and winner["outcome"] > loser["outcome"]:
                steps = zip(winner["steps"], loser["steps"])
                margin = sum(ours[key] - theirs[key] for ours, theirs in steps)
                right.append((np.sign(margin) + 1) / 2)
    return mean(right)


def is_ranked_by_the_reward_in_use(home, name):
    """What the log says of step rewards is of those in use."""
    ranked = []
    for row in rows(home / "runs" / name)[1:]:
        if row["prm/pairs"]:
            episodes = episodes_of(home, name, row["iteration"])
            expected = ranked_right(episodes, "implicit_reward")
            assert row["prm/pair_accuracy"] == pytest.approx(expected, abs=1e-4)
            ranked.append(row["prm/pair_accuracy"])
    assert any(share != 0.5 for share in ranked)  # that of a PRM that has learnt nothing


def mixed_tasks(episodes) -> set:
    return {task for task, outcomes in outcomes_of(episodes).items() if len({*outcomes}) > 1}


@pytest.mark.parametrize("published", ((), ("credit",)), ids=str)
def test_ground_truth_is_the_worlds_own_reward(home, published):
    """As published every step has credit; else valid answers of groups that have a pair."""
    name = f"ground-truth{len(published)}"
    flags = ["--step-reward", "ground-truth", *SKILL, *published]
    table, episodes = played(home, name, *flags, iterations=1)
    for task, values in steps_of(episodes, "implicit_reward").items():
        assert values == pytest.approx(steps_of(episodes, "reward")[task])
    rewards, credit = steps_of(episodes, "reward"), steps_of(episodes, "step_advantage")
    valid = {task: np.array(values) for task, values in steps_of(episodes, "valid").items()}
    assert not all(map(np.all, valid.values()))
    for task, values in credit.items():
        counts = np.full(len(values), True) if published else valid[task]
        counts = counts & bool(published or task in mixed_tasks(episodes))
        credited, expected = np.array(rewards[task])[counts], np.zeros(len(values))
        if len({*credited}) > 1:
            expected[counts] = (credited - mean(credited)) / std(credited)
        np.testing.assert_allclose(values, expected, atol=1e-4)
    assert any(map(any, credit.values())) and (published or not all(map(any, credit.values())))
    advantages = steps_of(episodes, "advantage")
    outcome_adv = dict(of_steps_by_rloo(episodes))
    for task, values in advantages.items():  # A = A^E + alpha * A^S, alpha = 1
        expected = np.array(outcome_adv[task]) + credit[task] - 0.1 * ~valid[task]
        np.testing.assert_allclose(values, expected, atol=1e-4)
    assert all(row.get("prm/loss") is None for row in table)  # no PRM learns
    assert table[1]["prm/pairs"]
    is_ranked_by_the_reward_in_use(home, name)


def test_an_explicit_prm_learns_and_goes_on_where_it_stopped(home):
    """With weight 0 its head takes all steps for equal; then it ranks pairs, and gives credit."""
    flags = ["--step-reward", "head", *SKILL, "--prm-steps", 1]
    table, episodes = played(home, "head", *flags)
    assert table[1]["prm/loss"] == pytest.approx(math.log(2))
    assert table[1]["prm/pair_accuracy"] == 0.5 != table[2]["prm/pair_accuracy"]
    assert any(any(values) for values in steps_of(episodes, "step_advantage").values())
    is_ranked_by_the_reward_in_use(home, "head")
    played(home, "half", *flags, "--iterations", 1)
    played(home, "half", *flags, "--resume", "runs/half")
    files = [home / "runs" / name / "prm/adapter_model.safetensors" for name in ("head", "half")]
    assert same_tensors(*files) == []
    assert without_times(table[2]) == without_times(rows(home / "runs/half")[2])


@pytest.mark.parametrize("over", ("turn", "batch"))
def test_a_s_is_standardised_over_what_the_flag_says(home, learnt, over):
    """Of the valid steps of groups that have a pair, since others have no A^S."""
    flags = ["--normalise-over", over, *SKILL]
    _, episodes = played(home, over, *flags, iterations=1)
    mixed = mixed_tasks(episodes)
    assert len(mixed) > 1
    sets, elsewhere = {}, []
    for e in episodes:
        for turn, step in enumerate(e["steps"]):
            pair = step["implicit_reward"], step["step_advantage"]
            if e["task"] in mixed and step["valid"]:
                sets.setdefault((e["task"], turn) if over == "turn" else 0, []).append(pair)
            else:
                elsewhere.append(pair[1])
    assert len(sets) > 4 if over == "turn" else len(sets) == 1
    for pairs in sets.values():
        used, credit = np.array(pairs).T
        expected = np.zeros(len(used))
        if len({*used}) > 1:
            expected = (used - mean(used)) / std(used)
        np.testing.assert_allclose(credit, expected, rtol=1e-3, atol=1e-3)
    assert not any(elsewhere)


def of_steps_by_rloo(episodes):
    """(task, A^E of all steps of its group) of each group."""
    for task, outcomes in outcomes_of(episodes).items():
        group = [e for e in episodes if e["task"] == task]
        advantages = numpy_rloo(outcomes, [0] * len(outcomes))
        yield task, [a for a, e in zip(advantages, group) for _ in e["steps"]]


def test_merged_rewards_have_one_advantage(home, learnt):
    flags = ["--step-reward", "merged", "--alpha", "0.5"]
    _, episodes = played(home, "merged", *flags, iterations=1)
    merged, used = {}, steps_of(episodes, "implicit_reward")
    for e in episodes:
        values = [e["outcome"] + 0.5 * step["implicit_reward"] for step in e["steps"]]
        merged.setdefault(e["task"], []).extend(values)
    assert any(any(values) for values in used.values())
    advantages, valid = steps_of(episodes, "advantage"), steps_of(episodes, "valid")
    for task, values in merged.items():
        expected = np.array(numpy_rloo(values, [0] * len(values))) - 0.1 * ~np.array(valid[task])
        np.testing.assert_allclose(advantages[task], expected, atol=1e-4)
    assert not all(all(values) for values in valid.values())  # the penalty was felt


def test_of_tokens_the_log_has_sums(home, learnt):
    """What is not A^S is RLOO's, the same for all tokens of an episode, less a penalty for each."""
    flags = ["--step-reward", "token", "--ratio", "token", *SKILL]
    table, episodes = played(home, "token", *flags, iterations=1)
    rewards = steps_of(episodes, "implicit_reward")
    assert any(any(values) for values in rewards.values())
    assert any(any(values) for values in steps_of(episodes, "step_advantage").values())
    columns = "tokens", "advantage", "episode_advantage", "step_advantage", "valid"
    for task, of_each in of_steps_by_rloo(episodes):
        values = (steps_of(episodes, key)[task] for key in columns)
        tokens, advantage, of_episode, credit, valid = map(np.array, values)
        np.testing.assert_allclose(of_episode, tokens * np.array(of_each), atol=1e-3)
        expected = of_episode + credit - 0.1 * tokens * ~valid
        np.testing.assert_allclose(advantage, expected, atol=1e-3)
    assert all(row["prm/loss"] for row in table[1:])


def test_without_its_flags_it_is_istar(home):
    """Bit for bit: every logged number, every step's numbers and the weights that come of it."""
    ablations = played(home, "without")
    istar = played(home, "istar", script="istar_webshop")
    assert [*map(without_times, ablations[0])] == [*map(without_times, istar[0])]
    assert ablations[1] == istar[1] and any(row.get("prm/loss") for row in istar[0])
    policies = [home / "runs" / name / "policy/model.safetensors" for name in ("without", "istar")]
    assert same_tensors(*policies) == []


def test_with_the_flags_that_it_names_it_is_istar_as_published(home):
    """But for rounding: the PRM's micro-batches are cut otherwise. Its accuracy is over the steps
    that both of a pair have."""
    flags = [*SKILL, *"length credit preference average --prm-lora-rank 0 --prm-replay 0".split()]
    flags += "--prm-steps 1 --prm-ridge 0 --beta 0.05 --lr-halving inf".split()
    flags += "--learning-rate 1e-4 --prm-learning-rate 2e-4".split()
    table, episodes = played(home, "as-published", *flags)
    expected, published = played(home, "paper", script="istar_paper_webshop")
    for one, two in zip(table, expected, strict=True):
        skip = {"prm/pair_accuracy", "prm/skill", "policy/engine_gap"}
        same = {key for key in without_times(two) if key not in skip and two[key] is not None}
        assert {key: one[key] for key in same} == pytest.approx(
            {key: two[key] for key in same}, rel=1e-2, abs=1e-4
        )
    assert table[-1]["prm/credit_share"] > 0
    for one, two in zip(episodes, published, strict=True):
        for key in ("action", "valid"):
            assert [step[key] for step in one["steps"]] == [step[key] for step in two["steps"]]


@pytest.mark.parametrize("rank", (0, 8))
def test_a_lora_policys_prm_is_an_adapter_either_way(home, rank):
    """On the policy's, or a copy of it."""
    flags = ["--policy-lora-rank", 4, "--prm-lora-rank", rank]
    table, _ = played(home, f"lora{rank}", *flags, iterations=1)
    assert table[1]["prm/pairs"] and table[1]["prm/loss"]
    config = json.loads((home / f"runs/lora{rank}/prm/adapter_config.json").read_text())
    assert config["r"] == (rank or 4)


# ------------ flags ------------


def test_what_does_not_go_together_is_refused(tmp_path):
    def said(*flags):
        done = run_main(SCRIPT, *small(SCRIPT), *flags, cwd=tmp_path, check=False)
        assert done.returncode == 1 and len(done.stderr.splitlines()) == 1
        assert not list(tmp_path.iterdir())
        return done.stderr

    token = ["--step-reward", "token"]
    assert "--step-reward token: " in said(*token) and "--ratio token" in said(*token)
    assert said(*token, "--ratio", "token", "--normalise-over", "turn") == said(*token)
    head = ["--step-reward", "head", "--prm-lora-rank", "0"]
    assert said(*head).startswith("--prm-lora-rank 0: ")
    assert said("--as-published", "skill", "lenght").startswith("--as-published lenght: ")


@pytest.mark.parametrize("script", TRAINERS)
def test_ablations_are_flags_of_one_script_alone(script):
    names = {field.name for field in fields(load(script).Args)}
    own = {"step_reward", "as_published", "normalise_over", "ratio"}
    assert names & own == (own if script == SCRIPT else set())


@pytest.mark.parametrize("script", versions("by_token"))
def test_by_token_keeps_sums(script):
    """A token's step is itself, its trajectory that of its step."""
    batch = flatten(random_trajectories())
    tokens = load(script).by_token(batch)
    assert torch.equal(tokens.step_traj, batch.step_traj[batch.token_step])
    values = torch.randn(len(batch.token_step))
    assert torch.equal(sum_per_step(values, tokens), values)
