"""istar_webshop_ablations.py: what a run of each ablation writes down is what its formula says, and
without their flags it is istar_webshop.py."""

import json
from dataclasses import fields

import numpy as np
import pytest
import torch
from conftest import (
    TRAINERS,
    default_model,
    load,
    random_trajectories,
    read_model,
    run_main,
    scripts_with,
)
from test_math import flat, mean, numpy_rloo, over_scripts, product, std, tensors
from test_scripts import rows, same_tensors, small, without_times

SCRIPT = "istar_webshop_ablations"
FLAGS = {
    "ground-truth": ["--step-reward", "ground-truth", "--alpha", "1", "--no-mixed-groups-only"],
    "merged": ["--merge-rewards", "--alpha", "0.5", "--no-prm-skill"],
    "token": ["--granularity", "token", "--ratio", "token", "--alpha", "1", "--no-prm-skill"],
}


@pytest.fixture
def module(request):
    return load(request.param)


@over_scripts("merged_advantages")
@pytest.mark.parametrize("seed, alpha, penalty", product(range(4), (0.0, 0.7), (0.0, 0.1)))
def test_merged_advantages(module, seed, alpha, penalty):
    """Every step is a sample of its group: the others' mean is over the group's steps."""
    outcomes, group, step_traj = flat(seed, "scores")
    rng = np.random.default_rng(seed)
    rewards, invalid = rng.normal(size=len(step_traj)), rng.random(len(step_traj)) < 0.3
    values = [outcomes[t] + alpha * r for t, r in zip(step_traj, rewards)]
    expected = np.array(numpy_rloo(values, group[step_traj])) - penalty * invalid
    batch = module.flatten(random_trajectories(module))
    names = "outcomes", "group", "step_traj"
    batch = batch._replace(**dict(zip(names, tensors(outcomes, group, step_traj))))
    rewards, invalid = tensors(rewards, invalid)
    ours = module.merged_advantages(batch, rewards, alpha, invalid, penalty)
    np.testing.assert_allclose(ours.double().numpy(), expected, rtol=1e-3, atol=1e-4)


# ------------ runs ------------


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


def played(home, name, *flags, script=SCRIPT):
    """(metrics, the last episodes) of a run of two iterations: in the first the PRM has learnt
    nothing."""
    short = [*small(script), "--tasks-per-iteration", 6, "--iterations", 2, "--eval-tasks", 1]
    run_main(script, *short, "--engine", "hf", "--run-name", name, *flags, cwd=home)
    return rows(home / "runs" / name), episodes_of(home, name, iteration=2)


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


def is_ranked_by_the_reward_in_use(home, name, key):
    """What the log says of step rewards is of those in use, and it does not name phi's."""
    ranked = []
    for row in rows(home / "runs" / name)[1:]:
        assert not any("phi_init" in column or "old_init" in column for column in row)
        if row["prm/pairs"]:
            episodes = episodes_of(home, name, row["iteration"])
            assert row["prm/pair_accuracy"] == pytest.approx(ranked_right(episodes, key), abs=1e-4)
            ranked.append(row["prm/pair_accuracy"])
    assert any(share != 0.5 for share in ranked)  # that of a PRM that has learnt nothing


def test_ground_truth_is_the_worlds_own_reward(home):
    table, episodes = played(home, "ground-truth", *FLAGS["ground-truth"], "--temperature", "1.3")
    for episode in episodes:
        for step in episode["steps"]:
            assert step["ground_truth_reward"] == pytest.approx(step["reward"])
            assert "implicit_reward" not in step

    rewards, credit = steps_of(episodes, "reward"), steps_of(episodes, "step_advantage")
    valid = {task: np.array(values) for task, values in steps_of(episodes, "valid").items()}
    for task, values in credit.items():
        credited, expected = np.array(rewards[task])[valid[task]], np.zeros(len(values))
        if len({*credited}) > 1:
            expected[valid[task]] = (credited - mean(credited)) / std(credited)
        np.testing.assert_allclose(values, expected, atol=1e-4)
    assert any(map(any, credit.values())) and not all(map(any, credit.values()))
    assert not all(map(np.all, valid.values()))  # invalid answers have no credit
    advantages = steps_of(episodes, "advantage")
    outcome_adv = dict(of_steps_by_rloo(episodes))
    for task, values in advantages.items():  # A = A^E + alpha * A^S, alpha = 1
        expected = np.array(outcome_adv[task]) + credit[task] - 0.1 * ~valid[task]
        np.testing.assert_allclose(values, expected, atol=1e-4)
    assert all("prm/loss" not in row for row in table)  # no PRM learns
    assert table[1]["prm/pairs"] and all(row["prm/alpha"] == 1 for row in table[1:])
    is_ranked_by_the_reward_in_use(home, "ground-truth", "ground_truth_reward")


def test_progress_is_how_far_a_finished_run_prefers_a_step(home, monkeypatch):
    """beta * (log pi_fin - log pi_init), of the weights that lie on the disk."""
    played(home, "finished", script="rloo_webshop")
    seen, module = [], load(SCRIPT)
    flattened = module.flatten

    def flatten(trajectories):
        seen.append(flattened(trajectories))
        return seen[-1]

    monkeypatch.setattr(module, "flatten", flatten)
    path, flags = "runs/finished/policy", ["--beta", "0.5", "--temperature", "1.3"]
    table, episodes = played(home, "progress", "--step-reward", path, "--alpha", "1", *flags)
    batch = seen[-1]
    logprobs = [torch.zeros(len(batch.token_step)) for _ in range(2)]
    for of_tokens, where in zip(logprobs, (home / path, default_model(SCRIPT))):
        model = read_model(where)
        for sequence in batch.sequences:
            with torch.no_grad():
                logits = model(sequence.ids[None]).logits[0, :-1] / 1.3
            of_ids = logits.log_softmax(-1).gather(1, sequence.ids[1:, None])[:, 0]
            of_tokens[sequence.tokens] = of_ids[sequence.steps[1:] >= 0]
    expected = 0.5 * module.sum_per_step(logprobs[0] - logprobs[1], batch)
    rewards = [step["progress_reward"] for e in episodes for step in e["steps"]]
    np.testing.assert_allclose(rewards, expected.numpy(), atol=1e-4)
    assert expected.abs().max() > 1e-2
    assert any(any(values) for values in steps_of(episodes, "step_advantage").values())
    assert all("prm/loss" not in row for row in table)  # no PRM learns
    is_ranked_by_the_reward_in_use(home, "progress", "progress_reward")


@pytest.mark.parametrize("over", ("turn", "batch"))
def test_a_s_is_standardised_over_what_the_flag_says(home, over):
    """Of the valid steps of groups that have a pair, since others have no A^S."""
    flags = ["--alpha", "1", "--no-prm-skill", "--temperature", "1.3"]
    _, episodes = played(home, over, "--normalise-over", over, *flags)
    mixed = {task for task, outcomes in outcomes_of(episodes).items() if len({*outcomes}) > 1}
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


def test_merged_rewards_have_one_advantage(home):
    _, episodes = played(home, "merged", *FLAGS["merged"], "--temperature", "1.3")
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


def test_of_tokens_the_log_has_sums_and_means(home):
    """What is not A^S is RLOO's, the same for all tokens of an episode."""
    table, episodes = played(home, "token", *FLAGS["token"], "--temperature", "1.3")
    rewards = steps_of(episodes, "implicit_reward")
    assert any(any(values) for values in rewards.values())
    advantages, credit = steps_of(episodes, "advantage"), steps_of(episodes, "step_advantage")
    valid = steps_of(episodes, "valid")
    assert any(any(values) for values in credit.values())
    for task, expected in of_steps_by_rloo(episodes):
        expected = np.array(expected) + credit[task] - 0.1 * ~np.array(valid[task])
        np.testing.assert_allclose(advantages[task], expected, atol=1e-4)
    assert all(row["prm/loss"] for row in table[1:])


def test_without_its_flags_it_is_istar(home):
    """Bit for bit: every logged number, every step's numbers and the weights that come of it."""
    ablations = played(home, "without")
    istar = played(home, "istar", script="istar_webshop")
    assert [*map(without_times, ablations[0])] == [*map(without_times, istar[0])]
    assert ablations[1] == istar[1] and any(row.get("prm/loss") for row in istar[0])
    policies = [home / "runs" / name / "policy/model.safetensors" for name in ("without", "istar")]
    assert same_tensors(*policies) == []


# ------------ flags ------------


def test_what_does_not_go_together_is_refused(tmp_path):
    def said(*flags):
        done = run_main(SCRIPT, *small(SCRIPT), *flags, cwd=tmp_path, check=False)
        assert done.returncode == 1 and len(done.stderr.splitlines()) == 1
        assert not list(tmp_path.iterdir())
        return done.stderr

    token = ["--granularity", "token"]
    assert said(*token).startswith("--ratio step: ") and "--granularity token" in said(*token)
    for other in (["--merge-rewards"], ["--step-reward", "ground-truth"]):
        refused = said(*token, "--ratio", "token", *other)
        assert refused.startswith("--granularity token: ") and other[0] in refused
    assert said("--merge-rewards", "--normalise-over", "turn").startswith("--normalise-over turn: ")


def test_what_is_no_policy_to_compare_with_is_refused(tmp_path):
    def said(path):
        flags = ["--step-reward", path, "--engine", "hf"]
        done = run_main(SCRIPT, *small(SCRIPT), *flags, cwd=tmp_path, check=False)
        assert done.returncode == 1 and len(done.stderr.splitlines()) == 1, done.stderr
        assert done.stderr.startswith(f"--step-reward {path}: ")
        return done.stderr

    for path in (tmp_path / "nothing", "ground_truth"):
        assert "neither a value that --help names nor a directory" in said(path)
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    assert "an adapter alone" in said(tmp_path / "adapter")
    assert "a vocabulary of" in said(default_model("istar_sokoban"))


@pytest.mark.parametrize("script", TRAINERS)
def test_ablations_are_flags_of_one_script_alone(script):
    names = {field.name for field in fields(load(script).Args)}
    own = {"step_reward", "merge_rewards", "normalise_over", "granularity"}
    assert names & own == (own if script == SCRIPT else set())


@pytest.mark.parametrize("script", scripts_with("by_token", "flatten"))
def test_by_token_keeps_sums(script):
    """A token's step is itself, its trajectory that of its step."""
    module = load(script)
    batch = module.flatten(random_trajectories(module))
    tokens = module.by_token(batch)
    assert torch.equal(tokens.step_traj, batch.step_traj[batch.token_step])
    values = torch.randn(len(batch.token_step))
    assert torch.equal(module.sum_per_step(values, tokens), values)
    assert torch.equal(module.per_ratio(values, tokens.token_step, "step"), values)
