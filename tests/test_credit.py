"""What makes the PRM's numbers mean what they say: pairs, precision, several steps, the engine's
weights, and PPO's published layout."""

import json
from types import SimpleNamespace

from runtime.flags import evaluation_tasks
from runtime.networks import engine_weights
from runtime.statistics import prm_learning

import pytest
import torch
from conftest import load, run_main, scripts_with
from test_math import over_scripts

ISTAR = [script for script in scripts_with("prm_update", "preference_pairs")]


@pytest.fixture
def module(request):
    return load(request.param)


def rows(home):
    (table,) = home.glob("runs/*/metrics.jsonl")
    return [json.loads(line) for line in table.read_text().splitlines()]


TINY = "--engine hf --iterations 2 --tasks-per-iteration 4 --group-size 4 --eval-tasks 1".split()
TINY += "--eval-samples 1 --eval-every 9 --run-name it".split()


# ------------ pairs ------------


@over_scripts("preference_pairs")
def test_a_margin_of_a_point_is_the_same_between_any_two_points(module):
    """Outcomes are SOTOPIA's goals in tenths: in float32 0.3 - 0.2 is above 0.1, 0.5 - 0.4 not."""
    for points in range(10):
        outcomes = torch.tensor([points / 10, (points + 1) / 10])
        assert module.preference_pairs(outcomes, torch.tensor([0, 0]), 0.1) == []
        assert module.preference_pairs(outcomes, torch.tensor([0, 0]), 0.05) == [(1, 0)]


@over_scripts("in_mixed_group")
def test_a_group_without_a_pair_is_not_scored(module):
    """Its outcomes differ, but by no more than the margin."""
    batch = SimpleNamespace(
        outcomes=torch.tensor([0.2, 0.3, 0.2, 0.9, 0.5, 0.5]),
        group=torch.tensor([0, 0, 1, 1, 2, 2]),
        step_traj=torch.tensor([0, 0, 1, 2, 3, 3, 4, 5]),
    )
    pairs = module.preference_pairs(batch.outcomes, batch.group, 0.1)
    expected = [False, False, False, True, True, True, False, False]
    assert module.in_mixed_group(batch, pairs).tolist() == expected
    assert not module.in_mixed_group(batch, []).any()


# ------------ the PRM ------------


def test_of_several_steps_the_first_is_logged_and_every_skipped_one_counts():
    first = {"loss": 0.7, "pair_accuracy": 0.5, "margin": 0.0, "grad_norm": 1.0, "skipped": 1}
    later = {"loss": 0.1, "pair_accuracy": 1.0, "margin": 2.0, "grad_norm": 9.0, "skipped": 0}
    assert prm_learning([first, later, first]) == first | {"skipped": 2}
    assert set(prm_learning([]).values()) == {None}


def test_pairs_are_ranked_before_anything_was_learnt_from_them(tmp_path):
    """With a rate that fits any pair in a step the accuracy would be 1 after it. The first
    iteration's PRM is the policy: it ranks nothing."""
    eager = ["--prm-steps", "8", "--prm-learning-rate", "0.01", "--prm-drift-bound", "9"]
    run_main("istar_sokoban", *TINY, *eager, "--seed", 3, cwd=tmp_path)
    first = rows(tmp_path)[1]
    assert first["prm/pairs"] and abs(first["prm/margin"]) < 1e-5


@pytest.mark.parametrize("script", ["istar_sokoban", "prime_webshop"])
def test_a_prm_that_has_learnt_nothing_is_the_policy_in_bfloat16_too(tmp_path, script):
    """Nothing learns, and nothing may differ: the policy's weights and the PRM's base are of one
    precision."""
    still = "--dtype bfloat16 --learning-rate 0 --prm-learning-rate 0".split()
    run_main(script, *TINY, *still, cwd=tmp_path)
    for row in rows(tmp_path)[1:]:
        rewarded = row.get("prm/drift_abs", row.get("prm/process_std"))
        assert rewarded < 1e-5  # two precisions: 0.03


# ------------ the engine ------------


def gapped(*gaps):
    """A batch of two steps, of one token and of three, with these gaps of log-probabilities."""
    return SimpleNamespace(
        step_traj=torch.tensor([0, 0]),
        token_step=torch.tensor([0, 1, 1, 1]),
        engine_logprobs=-torch.tensor(gaps),
    )


def weights(ratio, cap, *gaps):
    args = SimpleNamespace(ratio=ratio, engine_correction=cap)
    return engine_weights(gapped(*gaps), torch.zeros(4), args).log()


def test_a_weight_is_of_what_the_ratio_is_of():
    gaps = 0.2, 0.1, 0.1, 0.4
    assert weights("step", 9.0, *gaps).tolist() == pytest.approx([0.2, 0.6], abs=1e-6)
    for ratio in ("token", "step-mean"):
        assert weights(ratio, 9.0, *gaps).tolist() == pytest.approx([0.2, 0.2], abs=1e-6)


@pytest.mark.parametrize("ratio", ["step", "step-mean", "token"])
def test_a_weight_is_bounded_on_both_sides(ratio):
    bound = torch.tensor(2.0).log().item()
    assert weights(ratio, 2.0, 5.0, 5.0, 5.0, 5.0).tolist() == pytest.approx([bound, bound])
    assert weights(ratio, 2.0, -5.0, -5.0, -5.0, -5.0).tolist() == pytest.approx([-bound, -bound])


# ------------ PPO ------------


def test_ppo_runs_its_published_layout(tmp_path):
    """Many tasks, one trajectory each: PPO compares nothing within a group."""
    layout = "--engine hf --iterations 1 --tasks-per-iteration 6 --group-size 1 --eval-tasks 1"
    layout += " --eval-samples 1 --eval-every 9 --run-name it"
    run_main("ppo_webshop", *layout.split(), cwd=tmp_path)
    assert rows(tmp_path)[1]["policy/grad_norm"] > 0


# ------------ where choices are made ------------


def test_rates_can_be_chosen_apart_from_the_panel(tmp_path):
    """--eval-set validation plays tasks that are neither trained on nor reported."""
    few = "--engine hf --eval-only --eval-tasks 3 --eval-samples 1".split()
    env, played = load("rloo_sokoban").Sokoban(), {}
    for name in ("panel", "validation"):
        run_main("rloo_sokoban", *few, "--eval-set", name, "--run-name", name, cwd=tmp_path)
        table = (tmp_path / "runs" / name / "eval_episodes.jsonl").read_text().splitlines()
        played[name] = [json.loads(line)["task"] for line in table]
    assert played["panel"] == list(env.eval_tasks[:3])
    assert played["validation"] == list(env.validation_tasks[:3])


def test_a_world_without_validation_tasks_is_refused():
    world = SimpleNamespace(eval_tasks=range(9), name="corridor")
    assert evaluation_tasks(world, "panel") == range(9)
    with pytest.raises(SystemExit) as stop:
        evaluation_tasks(world, "validation")
    assert stop.value.code.startswith("--eval-set validation: corridor has no validation_tasks")
