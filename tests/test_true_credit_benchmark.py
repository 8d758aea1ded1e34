"""benchmarks/true_credit.py: what steps were worth, by playing on from the states before them."""

import json
import sys

from benchmarks import evidence, true_credit
from runtime.chat import Chat
from runtime.data import Step, Trajectory, flatten
from runtime.engines import SamplingParams
from runtime.engines.transformers import TransformersEngine
from runtime.rollout import Stage, rollout
from runtime.saving.files import append, rows_of

import pytest
import torch
from conftest import TINY, load, network, random_model, random_trajectories, run_main, settings
from transformers import AutoModelForCausalLM, AutoTokenizer

SCRIPT = load("istar_sokoban")
FLAGS = "--engine hf --iterations 2 --tasks-per-iteration 4 --eval-tasks 1 --eval-samples 1"
FLAGS = [*FLAGS.split(), "--max-steps", "6"]


@pytest.fixture(scope="module")
def play():
    """play(world, chat, tasks, temperature): the tiny policy's episodes of Sokoban."""
    args = settings(max_action_tokens=16, max_context_tokens=1024, max_steps=8)
    engine = TransformersEngine("", [AutoTokenizer.from_pretrained(TINY).eos_token_id], args)
    engine.load(AutoModelForCausalLM.from_pretrained(TINY))

    def play(env, chat, tasks, heat):
        stage, sampling = Stage(engine, chat, args), SamplingParams(heat, 16)
        return rollout(stage, SCRIPT.play, env, tasks, sampling)

    return play


@pytest.fixture(scope="module")
def chat():
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    return Chat(tokenizer, [tokenizer.eos_token_id])


def test_who_plays_on_greedily_ends_as_the_episode_did(play, chat):
    """The state before every step is entered again to the token: at temperature 0 the rest is the
    same, so that no step was better or worse than the policy."""
    env = SCRIPT.Sokoban(max_steps=8)
    played = play(env, chat, env.train_tasks[:8], 0.0)
    assert {t.outcome for t in played} == {0.0, 1.0}

    def greedily(world, chat, tasks):
        return play(world, chat, tasks, 0.0)

    def play_on(states):
        return true_credit.outcomes_from(states, env, greedily, chat, 2)

    truth, noise = true_credit.true_advantages(played, play_on)
    assert len(truth) == sum(len(t.steps) for t in played)
    assert not truth.any() and not noise.any()


def test_advantages_go_from_value_to_value_and_on_to_the_outcome():
    """Two episodes of one task that part after their first step: V is 0.5 before it, and then 0.75
    and 0.25; equal states are asked once."""
    steps = [Step("", action, []) for action in ("same", "one", "other")]
    won = Trajectory(3, [7, 8, 9], [-1, 0, 1], 1.0, steps[:2])
    lost = Trajectory(3, [7, 8, 5, 6], [-1, 0, -1, 1], 0.0, [steps[0], steps[2]])
    asked = []

    def play_on(states):
        asked.extend(states)
        return torch.tensor([[0.0, 1.0, 0.0, 1.0], [1.0, 1.0, 1.0, 0.0], [0.0, 0.0, 1.0, 0.0]])

    truth, noise = true_credit.true_advantages([won, lost], play_on)
    assert truth.tolist() == [0.25, 0.25, -0.25, -0.25]
    assert [(s.task, s.tokens, s.actions) for s in asked] == [
        (3, (7,), ()),
        (3, (7, 8), ("same",)),
        (3, (7, 8, 5), ("same",)),
    ]
    variances = [1 / 3 / 4, 1 / 4 / 4, 1 / 4 / 4]  # of the means of four plays
    first, second = variances[0] + variances[1], variances[1]
    assert noise.tolist() == pytest.approx([first, second, first, second])


def test_centred_rewards_have_no_mean_over_what_could_have_been_said():
    """At every action token: the sum over the vocabulary of pi_old (log phi - log pi_old), the
    temperature and all, is minus the divergence."""
    batch = flatten(random_trajectories())
    policy, phi = random_model(0), random_model(1)
    args = settings(temperature=0.7)
    kl = true_credit.divergences(network(policy), network(phi), batch, args)
    assert (kl > 0.01).all()
    for sequence in batch.sequences[:4]:
        with torch.no_grad():
            logits = [m(sequence.ids[None]).logits[0, :-1] / 0.7 for m in (policy, phi)]
        old, new = (x[sequence.is_action[1:]].log_softmax(-1) for x in logits)
        expected = (old.exp() * (new - old)).sum(-1)
        torch.testing.assert_close(kl[sequence.tokens], -expected, atol=1e-5, rtol=1e-5)
    same = true_credit.divergences(network(policy), network(policy), batch, args)
    assert same.abs().max() < 1e-6


def test_a_weight_is_how_often_a_step_counts():
    x, y, often = torch.tensor([1.0, 2.0, 4.0]), torch.tensor([2.0, 1.0, 3.0]), [2, 1, 3]
    weights = torch.tensor(often)
    repeated = torch.stack([x, y]).repeat_interleave(weights, 1)
    told = true_credit.correlation(x.double(), y.double(), weights.double()[None])
    assert told.item() == pytest.approx(torch.corrcoef(repeated)[0, 1].item())


def test_the_interval_is_over_tasks():
    """Steps of one task that all are alike count once: 200 tasks, whatever their lengths."""
    torch.manual_seed(0)
    of_tasks = torch.randn(200)
    task = torch.arange(200).repeat_interleave(torch.randint(1, 4, (200,)))

    counts = true_credit.counts_of(task)
    means = counts @ of_tasks[task].double() / counts.sum(1)
    middle, low, high = true_credit.told(means)
    assert low < middle < high
    assert high - low == pytest.approx(2 * 1.96 / 200**0.5, rel=0.25)


def test_the_best_weight_is_that_of_the_sum_that_follows_the_truth():
    torch.manual_seed(0)
    episode_adv, step_adv = torch.randn(2, 5000)
    assert true_credit.best_weight(episode_adv, step_adv, episode_adv + 0.3 * step_adv) == 0.3
    assert true_credit.best_weight(episode_adv, step_adv, episode_adv - 0.3 * step_adv) == 0
    truth, task = episode_adv + 0.3 * step_adv, torch.arange(5000) % 100
    credits = {"A^E": episode_adv, "A": truth}
    found = true_credit.correlations(credits, truth, task)
    assert found["A"]["correlation"] == [1, 1, 1] and found["A^E"]["more"] == [0, 0, 0]
    more = 1 - found["A^E"]["correlation"][0]
    assert found["A"]["more"][0] == pytest.approx(more, abs=1e-4)


@pytest.fixture
def measure(tmp_path, monkeypatch, capsys):
    """measure(*words): the benchmark's text; its rows are in tmp_path/results/rows.jsonl."""
    monkeypatch.chdir(tmp_path)
    rows = tmp_path / "results" / "rows.jsonl"

    def start(*words):
        monkeypatch.setattr(sys, "argv", ["true_credit.py", *words, "--out", str(rows)])
        true_credit.main()
        return capsys.readouterr().out

    return start


def test_as_published_the_prm_is_a_copy_and_all_steps_are_credited(measure, tmp_path):
    run_main("istar_paper_sokoban", *FLAGS, "--run-name", "it", cwd=tmp_path)
    measure("runs/it", "--tasks", "3", "--plays", "2")
    (row,) = rows_of(tmp_path / "results" / "rows.jsonl")
    assert row["alpha"] == 1 and row["command"].startswith("istar_paper_sokoban.py --engine hf")


def test_the_row_of_a_run_and_what_is_refused(measure, tmp_path):
    run_main("istar_sokoban", *FLAGS, "--alpha", "0.3", "--run-name", "it", cwd=tmp_path)
    rows = tmp_path / "results" / "rows.jsonl"
    told = measure("runs/it", "--tasks", "3", "--plays", "2")
    (row,) = rows_of(rows)
    assert told == true_credit.text_of(row)
    logged = rows_of(tmp_path / "runs" / "it" / "metrics.jsonl")
    assert row["alpha"] == pytest.approx(0.3 * logged[-1]["prm/skill"], abs=1e-4)
    assert "`python istar_sokoban.py --engine hf --iterations 2" in told and "--alpha 0.3 " in told
    lines = [line.split(" | ")[0] for line in told.splitlines() if line.startswith("| A^")]
    assert lines[:2] == ["| A^E", "| A^S"] and len(lines) == 6
    assert told.count("\n| 1 | ") == 1 and "pairs r_phi ranks" in told
    assert row["iteration"] == 2 and row["steps"] >= sum(turn["steps"] for turn in row["turns"])

    other = row | {"seed": row["seed"] + 1}
    append(rows, [json.dumps(other)])
    measure("runs/it", "--tasks", "3", "--plays", "3")  # in place of the first
    kept, again = rows_of(rows)
    assert kept == other and again["seed"] == row["seed"] and "--plays 3" in again["how"]

    with pytest.raises(SystemExit, match="--plays has to be 2 or more"):
        measure("runs/it", "--plays", "1")
    with pytest.raises(SystemExit, match="runs/none: no finished run of iStar"):
        measure("runs/none")
    saved = tmp_path / "runs/it/args.json"
    flags = json.loads(saved.read_text())
    saved.write_text(json.dumps(flags | {"history": 2}))
    with pytest.raises(SystemExit, match="--history 2"):
        measure("runs/it")
    saved.write_text(json.dumps(flags | {"beta": 0}))
    with pytest.raises(SystemExit, match="--beta 0"):
        measure("runs/it")


def test_the_table_of_the_page_has_a_line_for_each_run_and_their_means():
    def row(command, seed, followed):
        credits = {
            name: {"correlation": [followed, 0.1, 0.9], "more": [-0.2, -0.3, -0.1]}
            for name in ("A^E", "A^S", "A^S centred", "A", "best")
        }
        right = {"ranked_right": 0.7, "ranked_right_centred": 0.6}
        weights = {"alpha": 0.5, "best_weight": 0.05}
        return {"command": command, "seed": seed, "tasks": 49, "credits": credits} | right | weights

    rows = [row("it", 2, 0.4), row("other", 1, 0.5), row("it", 1, 0.2)]
    _, _, *lines = evidence.true_credit_table(rows).split("\n")
    followed = "0.200 (0.100 to 0.900)"
    assert lines[0].startswith(f"| `it --seed 1` | 49 | 0.700 | 0.600 | {followed} | {followed} |")
    assert lines[0].endswith(f"| {followed} | -0.200 (-0.300 to -0.100) | 0.50 | 0.05 |")
    names = [line.split(" | ")[0].strip("| ") for line in lines]
    assert names == ["`it --seed 1`", "`it --seed 2`", "the mean of 2", "`other --seed 1`"]
    half = 12.706 * 0.1  # Student's t with one degree of freedom, and the standard error
    assert f"| 0.300 ({0.3 - half:.3f} to {0.3 + half:.3f}) |" in lines[2]
