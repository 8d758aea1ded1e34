"""What makes the PRM's numbers mean what they say: pairs, precision, several steps, the engine's
weights, and PPO's published layout."""

import json
from types import SimpleNamespace

from runtime.distributed import processes
from runtime.flags import evaluation_tasks
from runtime.networks import engine_weights
from runtime.replay import Replay
from runtime.statistics import pair_statistics, skill

import pytest
import torch
from conftest import default_model, load, read_model, run_main, scripts_with
from peft import PeftModel
from test_math import over_scripts
from test_scripts import small

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


@over_scripts("preference_pairs")
def test_a_threshold_pairs_what_is_above_it_with_the_rest(module):
    """SOTOPIA's goals 7, 6, 9, 2 in tenths; the paper's criterion: above 6 against the rest."""
    outcomes, group = torch.tensor([0.7, 0.6, 0.9, 0.2]), torch.zeros(4, dtype=torch.long)
    pairs = module.preference_pairs(outcomes, group, 0.1, 0.6)
    assert pairs == [(0, 3), (2, 1), (2, 3)]  # 7 and 6 are a point apart, and 9 and 7 both win
    assert module.preference_pairs(outcomes, group, 0.0, 0.6) == [(0, 1), (0, 3), (2, 1), (2, 3)]
    assert module.preference_pairs(outcomes, group, 0.0, 0.95) == []


# ------------ the PRM ------------


def test_pairs_are_counted_and_ranked_by_their_sums():
    """Ties count half: a PRM that has learnt nothing ranks nothing."""
    batch = SimpleNamespace(step_traj=torch.tensor([0, 1, 1, 2, 2, 2]))
    pairs = [(0, 1), (2, 0), (1, 2)]  # the winner is shorter, longer, shorter
    rewards = torch.tensor([2.0, 1.0, 1.0, -1.0, 3.0, 9.0])  # right, wrong, a tie: by common steps
    stats = pair_statistics(rewards, batch, pairs)
    expected = {"pairs": 3, "pair_accuracy": 0.5, "length_accuracy": 2 / 3}
    assert stats == pytest.approx(expected)
    assert pair_statistics(torch.zeros(6), batch, pairs)["pair_accuracy"] == 0.5
    nothing = {"pairs": 0, "pair_accuracy": None, "length_accuracy": None}
    assert pair_statistics(rewards, batch, []) == nothing


@pytest.mark.parametrize(
    "accuracies, num_pairs, expected",
    [
        ([], [], 0.0),
        ([0] * 5, [0] * 5, 0.0),  # no pair in any iteration: nothing is known
        ([0.5], [40], 0.0),
        ([1.0], [3], 0.2),  # the first of five iterations
        ([0.75, 0.75], [8, 8], 0.2),
        ([0.75] * 5, [8] * 5, 0.5),
        ([0.2, 0.4], [9, 9], 0.0),  # worse than chance is no skill turned round
        ([1.0, 0.5, 0.5, 0.5, 0.5], [10, 30, 0, 0, 0], 0.25),  # they count as their pairs do
        ([1.0, 0, 0, 0, 0], [10, 0, 0, 0, 0], 1.0),  # an iteration without a pair says nothing
    ],
)
def test_skill_is_how_much_better_than_chance(accuracies, num_pairs, expected):
    assert skill(accuracies, num_pairs) == pytest.approx(expected, abs=1e-12)


def test_steps_are_scored_and_pairs_ranked_before_the_prm_learns_from_them(tmp_path):
    """With a rate that fits any pair in a step the accuracy would be 1 after it. The first
    iteration's PRM is the policy: it rewards nothing and ranks nothing."""
    eager = ["--prm-steps", "8", "--prm-learning-rate", "0.01"]
    run_main("istar_sokoban", *TINY, *eager, "--seed", 3, cwd=tmp_path)
    _, first, second = rows(tmp_path)
    assert first["prm/pairs"] and first["prm/pair_accuracy"] == 0.5
    assert first["prm/skill"] == first["prm/alpha"] == first["prm/reward_abs"] == 0
    assert second["prm/reward_abs"] > 1e-2  # it has learnt something by now


FORMS = [
    (),
    ("--no-prm-follows",),
    ("--prm-lora-rank", "4"),
    ("--prm-lora-rank", "4", "--no-prm-follows"),
]
LORA = ("--policy-lora-rank", "4")
MOVED = (*FORMS, *((*LORA, *form) for form in FORMS))
STILL = "--dtype bfloat16 --learning-rate 0 --prm-learning-rate 0".split()


@pytest.mark.parametrize("script", ["istar_sokoban", "prime_webshop"])
def test_a_prm_that_has_learnt_nothing_is_the_policy_in_bfloat16_too(tmp_path, monkeypatch, script):
    """Nothing learns, and nothing may differ: the policy's weights and the PRM's are of one
    precision, and would be divided between cards in one. A full copy beside a LoRA policy, whose
    base is bfloat16, is refused."""
    divided = []
    monkeypatch.setattr(processes, "shard", lambda model, *dtype: divided.append(dtype) or model)
    forms = [FORMS[0], (*LORA, *FORMS[2])]
    if script.startswith("istar_"):
        forms = [*FORMS, *((*LORA, *form) for form in FORMS[2:])]
    for number, form in enumerate(forms):
        home = tmp_path / str(number)
        home.mkdir()
        run_main(script, *TINY, *STILL, *form, cwd=home)
        for row in rows(home)[1:]:
            rewarded = row.get("prm/reward_abs", row.get("prm/process_std"))
            assert rewarded < 1e-5, form  # two precisions: 0.03
    assert {*divided} == {("bfloat16",)}
    if script.startswith("istar_"):  # PRIME's is always an adapter
        refused = run_main(script, *TINY[:-2], *STILL, *LORA, check=False, cwd=home)
        assert "--prm-lora-rank 0: a full copy is float32 and the LoRA policy's" in refused.stderr
        assert "--prm-lora-rank 16" in refused.stderr


def test_in_self_chat_the_prm_draws_as_many_groups_as_an_iteration_has(tmp_path, monkeypatch):
    """Each of the 4 tasks has two of them: one of the first speakers, one of the second."""
    numbers, draw = [], Replay.draw

    def noted(replay, number, parts):
        numbers.append(number)
        return draw(replay, number, parts)

    monkeypatch.setattr(Replay, "draw", noted)
    run_main("istar_sotopia", *TINY, "--partner", "self", "--max-steps", 4, cwd=tmp_path)
    assert numbers == [8, 8]


@pytest.mark.parametrize("form", [(), LORA], ids=" ".join)
def test_primes_rewards_are_of_its_prm_against_the_initial_model(tmp_path, monkeypatch, form):
    """beta * (log pi_phi - log pi_ref), of the weights that lie on the disk."""
    seen, module = [], load("prime_webshop")
    flattened = module.flatten

    def flatten(trajectories):
        seen.append(flattened(trajectories))
        return seen[-1]

    monkeypatch.setattr(module, "flatten", flatten)
    flags = ["--prm-learning-rate", "0.01", "--prm-score", "after", "--temperature", "1.3"]
    flags += ["--learning-rate", "0.01", "--beta", "0.5"]
    run_main("prime_webshop", *TINY, *flags, *form, cwd=tmp_path)
    run = tmp_path / "runs" / "it"

    def logprobs(model):
        of_tokens = torch.zeros(len(seen[-1].token_step))
        for sequence in seen[-1].sequences:
            with torch.no_grad():
                logits = model(sequence.ids[None]).logits[0, :-1] / 1.3
            of_ids = logits.log_softmax(-1).gather(1, sequence.ids[1:, None])[:, 0]
            of_tokens[sequence.tokens] = of_ids[sequence.steps[1:] >= 0]
        return of_tokens

    initial = read_model(default_model("prime_webshop"))
    reference = logprobs(initial)
    gaps = logprobs(PeftModel.from_pretrained(initial, run / "prm")) - reference
    expected = 0.5 * module.sum_per_step(gaps, seen[-1])
    lines = (run / "episodes.jsonl").read_text().splitlines()
    episodes = [e for e in map(json.loads, lines) if e["iteration"] == 2]
    rewards = [step["implicit_reward"] for e in episodes for step in e["steps"]]
    torch.testing.assert_close(torch.tensor(rewards), expected, rtol=0, atol=1e-3)
    assert expected.abs().max() > 1e-2
    assert rows(tmp_path)[2]["prm/process_std"] > 1e-3


@pytest.mark.parametrize("form", MOVED, ids=" ".join)
def test_a_prm_that_has_learnt_nothing_rewards_nothing_when_the_policy_has_moved(tmp_path, form):
    """Where it follows the policy; where it stays behind, what the policy learnt is its reward."""
    flags = ["--prm-learning-rate", "0", "--learning-rate", "0.01", "--seed", "3"]
    run_main("istar_sokoban", *TINY, *flags, *form, cwd=tmp_path)
    _, first, second = rows(tmp_path)
    assert first["prm/reward_abs"] < 1e-6 and first["policy/grad_norm"] > 0
    if "--no-prm-follows" in form:
        assert second["prm/reward_abs"] > 1e-2
    else:
        # float32: a product with the sum of two matrices is not quite the sum of two products
        assert second["prm/reward_abs"] < (1e-5 if form[:2] == LORA else 1e-6)


PAPER = """--prm-lora-rank 0 --no-prm-follows --prm-steps 1 --prm-replay 0 --beta 0.05 --alpha 1
--prm-ridge 0 --no-prm-skill --no-mixed-groups-only --credit-invalid --no-equal-length-pairs"""


@pytest.mark.parametrize("script", ISTAR)
def test_the_papers_setting_runs(tmp_path, script):
    short = [*small(script), "--engine", "hf", "--iterations", 2]
    run_main(script, *short, *PAPER.split(), cwd=tmp_path)
    _, first, second = rows(tmp_path)
    assert first["prm/pairs"] and first["prm/grad_norm"] > 0
    assert first["prm/alpha"] == second["prm/alpha"] == 1
    assert second["prm/reward_abs"] > 0


def test_what_is_credited_is_told_by_word_and_progress():
    from benchmarks.what_is_credited import table_of

    def step(action, progress, credit):
        return dict(action=action, progress=progress, step_advantage=credit, episode_advantage=-0.5)

    steps = [step("<think>push up</think><action>up</action>", 1.0, 0.25)] * 3
    steps += [step("<think>walk</think>", -7.0, -1.0), step("<think>walk</think>", -1.0, 0.5)]
    steps += [step("<action></action>", 0.0, 1.0), step("walk", 0.0, 0.0)]  # the last has no credit
    lines = table_of([{"steps": steps[:4]}, {"steps": steps[4:]}], rows=9).splitlines()
    assert lines[2:] == [
        "| push | nearer | 3 | +0.25 | -0.50 |",
        "| walk | farther | 2 | -0.25 | -0.50 |",
        "|  | as far | 1 | +1.00 | -0.50 |",
    ]


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
    assert weights(ratio, 0.5, 5.0, -5.0, -5.0, -5.0).tolist() == pytest.approx([bound, -bound])


# ------------ PPO ------------


def test_ppo_runs_its_published_layout(tmp_path):
    """Many tasks, one trajectory each: PPO compares nothing within a group."""
    layout = "--engine hf --iterations 1 --tasks-per-iteration 6 --group-size 1 --eval-tasks 1"
    layout += " --eval-samples 1 --eval-every 9 --run-name it"
    run_main("ppo_webshop", *layout.split(), cwd=tmp_path)
    assert rows(tmp_path)[1]["policy/grad_norm"] > 0


def test_of_returns_that_do_not_vary_nothing_is_explained(tmp_path):
    flags = "--engine hf --iterations 1 --tasks-per-iteration 2 --group-size 2 --eval-tasks 1"
    flags += " --eval-samples 1 --eval-every 9 --max-steps 1 --invalid-penalty 0 --run-name it"
    run_main("ppo_webshop", *flags.split(), cwd=tmp_path)  # nobody buys in the first step
    assert rows(tmp_path)[1]["critic/explained_variance"] is None


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
