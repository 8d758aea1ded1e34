"""benchmarks/throughput.py: what it records is replayed, counted by hand, and judged by its bounds."""

import json
import subprocess
import sys

import pytest
from conftest import ROOT, TINY

sys.path.insert(0, str(ROOT / "benchmarks"))
import throughput


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    return throughput.record_plan("sokoban", 2, 1, 4, tmp_path_factory.mktemp("plans"))


def test_a_plan_has_both_outcomes_and_every_turn(plan):
    episodes = json.loads(plan.read_text())["episodes"]
    assert [len(e["texts"]) for e in episodes] == [2] * 4 and len({e["task"] for e in episodes}) == 1
    assert sorted(e["outcome"] for e in episodes) == [0, 0, 1, 1]


def test_every_fourth_group_has_one_outcome(tmp_path):
    episodes = json.loads(throughput.record_plan("sokoban", 3, 8, 2, tmp_path).read_text())["episodes"]
    wins = [sum(e["outcome"] > 0 for e in episodes[i : i + 2]) for i in range(0, 16, 2)]
    assert wins == [1, 1, 1, 0, 1, 1, 1, 2]


def test_windows_that_do_not_tell_the_turn_are_refused():
    def episode(*turns):
        return {"texts": list(turns), "observations": list(turns)}

    assert throughput.distinct(episode("left", "right", "left", "up"), [])
    assert not throughput.distinct(episode("left", "right", "left", "right", "up"), [])
    assert not throughput.distinct(episode("up", "left", "right", "up"), [episode("left", "right", "up")])


@pytest.mark.parametrize("contender", ["grpo-hf", "grpo-window"])
def test_a_contender_replays_the_plan(plan, contender, tmp_path):
    """The tokens of the update are those of the recorded episodes, counted here by hand."""
    flags = throughput.CONTENDERS[contender][1] | {"engine": "hf"}
    spec = dict(script="grpo_webshop", flags=flags, model=str(TINY), plan=str(plan), contender=contender)
    spec |= dict(runs_dir=str(tmp_path), micro_batch_tokens=8192)
    worker, rows = throughput.start((contender,), spec, sys.executable), []
    for _ in range(2):
        print(json.dumps({"plan": str(plan)}), file=worker.process.stdin, flush=True)
        rows.append(throughput.answer(worker))
    throughput.stop(worker)
    assert worker.process.returncode == 0

    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(TINY)
    tokens = sampled = 0
    for e in json.loads(plan.read_text())["episodes"]:
        turns = [{"role": "user", "content": e["prompt"]}]
        for text, observation in zip(e["texts"], e["observations"]):
            turns += [{"role": "assistant", "content": text}, {"role": "user", "content": observation}]
            shown = tokenizer.apply_chat_template(turns[:-1], tokenize=False).rstrip("\n")
            sampled += len(tokenizer.encode(text, add_special_tokens=False)) + 1  # and the stop token
            tokens += len(tokenizer.encode(shown, add_special_tokens=False)) if flags.get("history") else 0
        tokens += 0 if flags.get("history") else len(tokenizer.encode(shown, add_special_tokens=False))
    for row in rows:
        assert (row["sequence_tokens"], row["action_tokens"]) == (tokens, sampled)
        assert row["processed"] >= tokens and row["flops"] > 0 and 0 < row["peak"] < 20
        assert row["seconds"] >= sum(row[phase] for phase in throughput.PHASES)


def test_the_bounds():
    def row(contender, seconds, tokens=100):
        figures = dict(seconds=seconds, logprobs=1.0, update=seconds / 2, flops=1.0, sequence_tokens=tokens)
        figures |= dict(needed_tokens=tokens, processed=2 * tokens, peak=1.0)
        return dict(round=0, model="tiny", workload="sokoban-10", contender=contender, **figures)

    rows = [row("grpo", 4.0), row("trl", 10.0), row("grpo-reencode", 9.0, 400), row("rloo", 4.0), row("istar", 8.0)]
    lines = throughput.checks(rows)
    assert "1. grpo / trl, tiny, sokoban-10, s/iteration: 0.4 (at most 0.5)" in lines
    assert "2. grpo / grpo-reencode, tiny, sokoban-10, tokens: 0.25 (at most 0.35)" in lines
    assert "3. istar / rloo, tiny, sokoban-10, s/iteration: 2 (at most 1.6) NOT HELD" in lines
    assert "4. grpo, tiny, sokoban-10, padding of the tokens processed: 0.5 (at most 0.05) NOT HELD" in lines


def test_the_share_of_the_ceiling_is_that_of_the_same_round():
    def row(number, contender, **figures):
        return dict(round=number, model="smollm2", workload="sokoban-10", contender=contender, **figures)

    rows = []
    for number, (rate, seconds) in enumerate([(100.0, 10.0), (50.0, 15.0), (200.0, 6.0)]):
        rows.append(row(number, "ceiling", mm_float32=rate, mm_bfloat16=4 * rate, copy=1.0))
        rows.append(row(number, "grpo", flops=2.5e11, update=seconds, needed_tokens=1, processed=1))
        rows.append(row(number, "trl-default", flops=2.5e11, update=seconds))  # in bfloat16
    shares = [each["share"] for each in throughput.with_shares(rows) if each["contender"] == "grpo"]
    assert shares == pytest.approx([0.75, 1.0, 0.625])
    shares = [each["share"] for each in throughput.with_shares(rows) if each["contender"] == "trl-default"]
    assert shares == pytest.approx([0.1875, 0.25, 0.15625])
    assert "4. grpo, smollm2, sokoban-10, update's share of the matrix-multiply rate: 0.75 (at least 0.7)" in (
        throughput.checks(rows)
    )
    assert "100" in throughput.rates(rows[:2]) and "50 to 200 GFLOP/s float32" in throughput.rates(rows)


def test_step_time_of_a_small_shape(tmp_path):
    """The script for a GPU, here on the CPU: every phase runs, and its operations are counted."""
    sizes = dict(tasks=2, group=2, turns=3, prompt=20, observation=10, answer=4, rounds=1)
    flags = [part for name, value in sizes.items() for part in (f"--{name}", str(value))]
    command = [sys.executable, "benchmarks/step_time.py", "--shape", "small", "--dtype", "float32", *flags]
    done = subprocess.run([*command, "--out", str(tmp_path)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "step-time-small.md").read_text()
    assert "208 tokens, 48 sampled" in text  # 4 episodes of a prompt, 3 answers, 2 observations
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| ")][1:]
    assert [row[0] for row in rows] == ["rollout", "log-probabilities", "PRM", "update"]
    assert all(float(row[1]) >= 0 and float(row[5]) > 0 for row in rows)
    assert [float(row[3]) / float(rows[0][3]) for row in rows] == pytest.approx([1, 1, 3, 3], rel=0.02)
