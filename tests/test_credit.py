"""What makes the PRM's numbers mean what they say: pairs, precision, several steps, the engine's
weights, and PPO's published layout."""

import json
import random
from types import SimpleNamespace

from runtime.checks import panel_of
from runtime.data import Trajectory, sum_per_step

import pytest
import torch
from conftest import default_model, load, read_model, run_main
from peft import PeftModel
from test_math import WITH_MARGIN, over_scripts
from test_scripts import small


@pytest.fixture
def module(request):
    return load(request.param)


def rows(home):
    (table,) = home.glob("runs/*/metrics.jsonl")
    return [json.loads(line) for line in table.read_text().splitlines()]


TINY = "--engine hf --iterations 2 --tasks-per-iteration 4 --group-size 4 --eval-tasks 1".split()
TINY += "--eval-samples 1 --eval-every 9 --run-name it".split()


# ------------ pairs ------------


@pytest.mark.parametrize("module", WITH_MARGIN, indirect=True)
def test_a_margin_of_a_point_is_the_same_between_any_two_points(module):
    """Outcomes are SOTOPIA's goals in tenths: in float32 0.3 - 0.2 is above 0.1, 0.5 - 0.4 not."""
    for points in range(10):
        outcomes = torch.tensor([points / 10, (points + 1) / 10])
        assert module.preference_pairs(outcomes, torch.tensor([0, 0]), 0.1) == []
        assert module.preference_pairs(outcomes, torch.tensor([0, 0]), 0.05) == [(1, 0)]


def test_as_published_goals_above_6_win_against_the_rest():
    """SOTOPIA's goals 7, 6, 9, 2 in tenths."""
    pairs_of, group = load("istar_paper_sotopia").preference_pairs, torch.zeros(4, dtype=torch.long)
    pairs = pairs_of(torch.tensor([0.7, 0.6, 0.9, 0.2]), group)
    assert pairs == [(0, 1), (0, 3), (2, 1), (2, 3)]  # 7 and 9 both win
    assert pairs_of(torch.tensor([0.6, 0.5, 0.3, 0.0]), group) == []
    assert pairs_of(torch.tensor([0.7, 0.8, 0.9, 1.0]), group) == []


# ------------ what the PRM learns from ------------


def group_of(task: int, outcomes) -> list[Trajectory]:
    return [Trajectory(task, outcome=outcome) for outcome in outcomes]


@over_scripts("best_and_worst")
def test_of_a_group_the_best_and_the_worst_are_drawn(module):
    """Among equal outcomes by lot."""
    group = group_of(1, (0.5, 0.0, 1.0, 0.5, 0.0, 1.0))
    drawn = [module.best_and_worst(group) for _ in range(60)]
    assert all([t.outcome for t in two] == [0.0, 1.0] for two in drawn)
    assert len({id(t) for two in drawn for t in two}) == 4


@over_scripts("draw")
@pytest.mark.parametrize(
    "steps, groups, sizes",
    [(1, 9, [2]), (3, 9, [2, 2, 2]), (8, 9, [2] + [1] * 7), (2, 3, [2, 1]), (2, 0, [])],
)
def test_what_is_drawn_is_dealt_to_the_prms_steps(module, steps, groups, sizes):
    """Two groups each, two episodes of each group, none twice; the same of a seed."""
    args = SimpleNamespace(prm_steps=steps, prm_replay=99)
    replay = [group_of(task, (0.0, 1.0, 0.5, 0.5)) for task in range(groups)]
    seen, draws = set(), []
    for seed in [*range(40), 0]:
        random.seed(seed)
        dealt = module.draw(replay, args)
        draws.append([[t.task for t in part] for part in dealt])
        assert [len(part) // 2 for part in dealt] == sizes
        assert all(part[::2] == part[1::2] for part in draws[-1])
        tasks = [task for part in draws[-1] for task in part[::2]]
        assert len({*tasks}) == len(tasks)
        seen |= {*tasks}
    assert draws[0] == draws[-1] and seen == {*range(groups)}


def test_without_a_replay_each_step_has_all_new_episodes():
    module, replay = load("istar_webshop_ablations"), [group_of(1, (0.0, 1.0, 0.5))]
    args = SimpleNamespace(prm_steps=3, prm_replay=0)
    assert module.draw(replay, args) == [replay[0]] * 3
    assert module.draw([], args) == []


@pytest.mark.parametrize("most", (3, 99))
def test_past_groups_with_a_pair_are_kept_whole_up_to_the_flag(tmp_path, most, monkeypatch):
    """The last ones, and the pairs' outcomes of what is drawn differ."""
    module, kept = load("istar_sokoban"), []
    draw = module.draw

    def noted(replay, args):
        kept.append([[t.outcome for t in group] for group in replay])
        return draw(replay, args)

    monkeypatch.setattr(module, "draw", noted)
    flags = [*TINY, "--iterations", 3, "--prm-replay", most, "--seed", 3]
    run_main("istar_sokoban", *flags, cwd=tmp_path)
    assert len(kept) == 3 and len(kept[-1]) > len(kept[0]) > 0
    assert all(len(group) == 4 and len({*group}) > 1 for group in kept[-1])
    if most == 3:
        assert len(kept[-1]) == 3
    else:
        assert kept[-1][: len(kept[0])] == kept[0]


# ------------ the PRM ------------


@over_scripts("skill")
@pytest.mark.parametrize(
    "accuracies, expected",
    [
        ([], 0.0),
        ([0.5], 0.0),
        ([1.0], 0.2),  # the first of five iterations
        ([0.75, 0.75], 0.2),
        ([0.75] * 5, 0.5),
        ([0.0] * 3 + [1.0] * 5, 1.0),  # only the last five count
        ([0.2, 0.4], 0.0),  # worse than chance is no skill turned round
    ],
)
def test_skill_is_how_much_better_than_chance(module, accuracies, expected):
    assert module.skill(accuracies) == pytest.approx(expected, abs=1e-12)


def test_steps_are_scored_and_pairs_ranked_before_the_prm_learns_from_them(tmp_path):
    """With a rate that fits any pair in a step the accuracy would be 1 after it. The first
    iteration's PRM is the policy: it rewards nothing and ranks nothing."""
    eager = ["--prm-steps", "8", "--prm-learning-rate", "0.01"]
    run_main("istar_sokoban", *TINY, *eager, "--seed", 3, cwd=tmp_path)
    _, first, second = rows(tmp_path)
    assert first["prm/pairs"] and first["prm/pair_accuracy"] == 0.5
    assert first["prm/skill"] == first["prm/credit_share"] == 0
    before, after = rewards_of(tmp_path, 1), rewards_of(tmp_path, 2)
    assert not any(before) and max(map(abs, after)) > 1e-2  # it has learnt something by now
    assert second["prm/pair_accuracy"] < 1


def rewards_of(home, iteration: int) -> list[float]:
    """What each step of an iteration was rewarded with."""
    (table,) = home.glob("runs/*/episodes.jsonl")
    episodes = [e for e in map(json.loads, table.read_text().splitlines())]
    episodes = [e for e in episodes if e["iteration"] == iteration]
    return [step["implicit_reward"] for e in episodes for step in e["steps"]]


LORA = ("--policy-lora-rank", "4")
STILL = "--dtype bfloat16 --learning-rate 0 --prm-learning-rate 0".split()
ALIKE = [("istar_sokoban", ()), ("istar_sokoban", LORA), ("istar_paper_sokoban", ())]
ALIKE += [("istar_paper_sokoban", LORA), ("prime_webshop", ()), ("prime_webshop", LORA)]


@pytest.mark.parametrize("script, form", ALIKE, ids=str)
def test_a_prm_that_has_learnt_nothing_is_the_policy_in_bfloat16_too(tmp_path, script, form):
    """Nothing learns, and nothing may differ: the policy's weights and the PRM's are of one
    precision."""
    run_main(script, *TINY, "--iterations", 1, "--max-steps", 3, *STILL, *form, cwd=tmp_path)
    assert max(map(abs, rewards_of(tmp_path, 1))) < 1e-5  # two precisions: 0.03


@pytest.mark.parametrize("script, form", ALIKE[:3], ids=str)
def test_what_a_prm_rewards_when_only_the_policy_has_moved(tmp_path, script, form):
    """An adapter on the policy that has learnt nothing: nothing. A copy, as published, stays
    behind: what the policy learnt is its reward."""
    flags = ["--prm-learning-rate", "0", "--learning-rate", "0.01", "--seed", "3"]
    run_main(script, *TINY, *flags, *form, cwd=tmp_path)
    first, second = (max(map(abs, rewards_of(tmp_path, n))) for n in (1, 2))
    assert first < 1e-6 and rows(tmp_path)[1]["policy/grad_norm"] > 0
    if script == "istar_paper_sokoban":
        assert second > 1e-3
    else:  # a product with the sum of two matrices is not quite the sum of two products
        assert second < (1e-4 if form else 1e-6)


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
    flags += ["--learning-rate", "0.01", "--beta", "0.5", "--max-steps", 3]
    run_main("prime_webshop", *TINY, *flags, *form, cwd=tmp_path)
    run = tmp_path / "runs" / "it"

    def logprobs(model):
        of_tokens = torch.zeros(len(seen[-1].token_step))
        for sequence in seen[-1].sequences:
            with torch.no_grad():
                logits = model(sequence.ids[None]).logits[0, :-1] / 1.3
            of_ids = logits.log_softmax(-1).gather(1, sequence.ids[1:, None])[:, 0]
            of_tokens[sequence.tokens] = of_ids[sequence.is_action[1:]]
        return of_tokens

    initial = read_model(default_model("prime_webshop"))
    reference = logprobs(initial)
    gaps = logprobs(PeftModel.from_pretrained(initial, run / "prm")) - reference
    expected = 0.5 * sum_per_step(gaps, seen[-1])
    rewards = rewards_of(tmp_path, 2)
    torch.testing.assert_close(torch.tensor(rewards), expected, rtol=0, atol=1e-3)
    assert expected.abs().max() > 1e-2
    assert rows(tmp_path)[2]["prm/process_std"] > 1e-3


def test_as_published_all_steps_have_credit_from_the_second_iteration_on(tmp_path):
    short = [*small("istar_paper_sokoban"), "--engine", "hf", "--iterations", 2]
    run_main("istar_paper_sokoban", *short, "--run-name", "it", cwd=tmp_path)
    _, first, second = rows(tmp_path)
    assert first["prm/pairs"] and first["prm/pair_accuracy"] == 0.5 and first["prm/grad_norm"] > 0
    assert first["prm/credit_share"] == 0 < second["prm/credit_share"]
    (table,) = tmp_path.glob("runs/*/episodes.jsonl")
    episodes = [e for e in map(json.loads, table.read_text().splitlines()) if e["iteration"] == 2]
    assert all(step["step_advantage"] for e in episodes for step in e["steps"])


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


GAPS = torch.tensor([0.2, 0.1, 0.1, 0.4])  # of a step of one token, and of one of three


@over_scripts("engine_weights")
def test_a_weight_is_of_what_the_ratio_is_of(module):
    """pi_old by the trainer / pi_old by the engine, of a step or a token, and at most the cap."""
    batch = SimpleNamespace(num_steps=2, token_step=torch.tensor([0, 1, 1, 1]))
    of_steps = module.__name__.startswith(("istar_", "gagpo_"))

    def weights(gaps, cap=9.0, dtype="bfloat16", ahead=False):
        run_args = SimpleNamespace(dtype=dtype, async_rollout=ahead)
        args = SimpleNamespace(engine_cap=cap, run_args=run_args)
        batch.engine_logprobs = -gaps
        return module.engine_weights(batch, torch.zeros(4), args)

    expected = torch.tensor([0.2, 0.6]) if of_steps else GAPS
    torch.testing.assert_close(weights(GAPS), expected.exp())
    torch.testing.assert_close(weights(-GAPS), (-expected).exp())
    assert weights(GAPS + 5, cap=2.0).tolist() == [2.0] * len(expected)
    assert weights(GAPS, dtype="float32").tolist() == [1.0] * len(expected)
    torch.testing.assert_close(weights(GAPS, dtype="float32", ahead=True), expected.exp())


# ------------ PPO ------------


def test_ppo_runs_its_published_layout(tmp_path):
    """Many tasks, one trajectory each: PPO compares nothing within a group."""
    layout = "--engine hf --iterations 1 --tasks-per-iteration 6 --group-size 1 --eval-tasks 1"
    layout += " --eval-samples 1 --eval-every 9 --max-steps 4 --run-name it"
    run_main("ppo_webshop", *layout.split(), cwd=tmp_path)
    assert rows(tmp_path)[1]["policy/grad_norm"] > 0


def test_of_returns_that_do_not_vary_nothing_is_explained(tmp_path):
    flags = "--engine hf --iterations 1 --tasks-per-iteration 2 --group-size 2 --eval-tasks 1"
    flags += " --eval-samples 1 --eval-every 9 --max-steps 1 --invalid-penalty 0 --run-name it"
    run_main("ppo_webshop", *flags.split(), cwd=tmp_path)  # nobody buys in the first step
    assert rows(tmp_path)[1]["critic/explained_variance"] is None


def test_ppo_learns_nothing_from_equal_advantages(tmp_path):
    """Every answer is invalid and costs as much; a mean in float32 would be off by rounding, and
    AdamW makes full steps of it."""
    flags = "--engine hf --iterations 1 --tasks-per-iteration 8 --group-size 4 --eval-tasks 1"
    flags += " --eval-samples 1 --eval-every 9 --max-steps 1 --max-action-tokens 1 --run-name it"
    run_main("ppo_webshop", *flags.split(), cwd=tmp_path)
    row = rows(tmp_path)[1]
    assert row["train/valid_actions"] == row["policy/moved"] == 0 and row["critic/moved"] > 0


# ------------ where choices are made ------------


def test_rates_can_be_chosen_apart_from_the_panel(tmp_path):
    """--eval-set validation plays tasks that are neither trained on nor reported."""
    few = "--engine hf --eval-only --eval-tasks 3 --eval-samples 1 --max-steps 2".split()
    env, played = load("rloo_sokoban").Sokoban(), {}
    for name in ("panel", "validation"):
        run_main("rloo_sokoban", *few, "--eval-set", name, "--run-name", name, cwd=tmp_path)
        table = (tmp_path / "runs" / name / "eval_episodes.jsonl").read_text().splitlines()
        played[name] = [json.loads(line)["task"] for line in table]
    assert played["panel"] == list(env.eval_tasks[:3])
    assert played["validation"] == list(env.validation_tasks[:3])


def test_a_world_without_validation_tasks_is_refused():
    world = SimpleNamespace(eval_tasks=range(9), name="corridor")
    run_args = SimpleNamespace(eval_set="panel", eval_tasks=9)
    assert panel_of(SimpleNamespace(run_args=run_args), world) == [*range(9)]
    run_args.eval_set = "validation"
    with pytest.raises(SystemExit) as stop:
        panel_of(SimpleNamespace(run_args=run_args), world)
    assert stop.value.code.startswith("--eval-set validation: corridor has no validation_tasks")
