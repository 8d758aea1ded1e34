"""benchmarks/throughput.py: what it records is replayed, counted by hand, judged by its bounds, and
compared with another tree; step_time.py in its smallest form."""

import json
import shutil
import sys

import pytest
from conftest import ROOT, TINY

sys.path.insert(0, str(ROOT / "benchmarks"))
import step_time
import throughput


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    return throughput.record_plan("sokoban", 4, 1, 4, tmp_path_factory.mktemp("plans"))


def test_a_plan_has_both_outcomes_and_every_turn(plan):
    episodes = json.loads(plan.read_text())["episodes"]
    assert [len(e["texts"]) for e in episodes] == [4] * 4
    assert len({e["task"] for e in episodes}) == 1
    assert sorted(e["outcome"] for e in episodes) == [0, 0, 1, 1]


def test_every_fourth_group_has_one_outcome(tmp_path):
    plan = json.loads(throughput.record_plan("sokoban", 3, 8, 2, tmp_path).read_text())
    groups = [plan["episodes"][i : i + 2] for i in range(0, 16, 2)]
    wins = [sum(e["outcome"] > 0 for e in group) for group in groups]
    assert wins == [1, 1, 1, 0, 1, 1, 1, 2]


def test_windows_that_do_not_tell_the_turn_are_refused():
    def episode(*turns):
        return {"texts": list(turns), "observations": list(turns)}

    assert throughput.distinct(episode("left", "right", "left", "up"), [])
    assert not throughput.distinct(episode("left", "right", "left", "right", "up"), [])
    before = [episode("left", "right", "up")]
    assert not throughput.distinct(episode("up", "left", "right", "up"), before)


def test_the_code_is_that_of_all_that_runs(tmp_path):
    """Rows of other code are refused: a change in any package that the scripts import is seen."""
    for name in (
        *("envs/world.py", "envs/large/world.py", "runtime/run.py", "runtime/engines/vllm.py"),
        "grpo_webshop.py",
    ):
        before = throughput.code.__wrapped__(root=tmp_path)
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
        assert throughput.code.__wrapped__(root=tmp_path) != before, name


@pytest.mark.parametrize("contender", ["grpo-hf", "grpo-window"])
def test_a_contender_replays_the_plan(plan, contender, tmp_path):
    """The tokens of the update are those of the recorded episodes, counted here by hand. In a
    window of two turns the first three steps go on from each other, and the fourth does not."""
    flags = throughput.CONTENDERS[contender][1] | {"engine": "hf"}
    spec = dict(script="grpo_webshop", flags=flags, contender=contender)
    spec |= dict(model=str(TINY), plan=str(plan), runs_dir=str(tmp_path), micro_batch_tokens=8192)
    worker, rows = throughput.start((contender,), spec, sys.executable), []
    for _ in range(2):
        rows.append(throughput.iterate(worker, plan))
    throughput.stop(worker)
    assert worker.process.returncode == 0

    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(TINY)

    def count(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False))

    tokens = sampled = 0
    for e in json.loads(plan.read_text())["episodes"]:
        turns, lengths = [{"role": "user", "content": e["prompt"]}], []
        for text, observation in zip(e["texts"], e["observations"]):
            turns.append({"role": "assistant", "content": text})
            shown = tokenizer.apply_chat_template(turns, tokenize=False).rstrip("\n")
            turns.append({"role": "user", "content": observation})
            lengths.append(count(shown))
            sampled += count(text) + 1  # and the stop token
        tokens += lengths[-1]
        if flags.get("history"):
            window = tokenizer.apply_chat_template(turns[:1] + turns[3:-1], tokenize=False)
            tokens += lengths[2] - lengths[3] + count(window.rstrip("\n"))
    for row in rows:
        assert (row["sequence_tokens"], row["action_tokens"]) == (tokens, sampled)
        assert row["processed"] >= tokens and row["flops"] > 0 and 0 < row["peak"] < 20
        assert row["seconds"] >= sum(row[phase] for phase in throughput.PHASES) > 0
        assert row["rollout"] > 0 and row["update"] > 0 and row["processor"] > 0


def test_the_bounds():
    def row(contender, seconds):
        figures = dict(seconds=seconds, logprobs=1.0, update=seconds / 2, flops=1.0)
        figures |= dict(sequence_tokens=100, needed_tokens=100, processed=200)
        where = dict(round=0, model="tiny", workload="sokoban-10", contender=contender)
        return where | figures | {"peak": 1.0}

    rows = [row("grpo", 4.0), row("trl", 10.0)]
    lines = throughput.checks([*rows, row("rloo", 4.0), row("istar", 8.0)])
    told = [
        "1. grpo / trl, tiny, sokoban-10, s/iteration: 0.4 (at most 0.5)",
        "2. istar / rloo, tiny, sokoban-10, s/iteration: 2 (at most 1.6) NOT HELD",
        "3. grpo, tiny, sokoban-10, padding of the tokens processed: 0.5 (at most 0.05) NOT HELD",
    ]
    assert set(told) <= set(lines)


def test_the_share_of_the_ceiling_is_that_of_the_same_round():
    def row(number, contender, **figures):
        where = dict(round=number, model="smollm2", workload="sokoban-10", contender=contender)
        return where | figures

    def shares(rows, contender):
        seen = throughput.with_shares(rows)
        return [each["share"] for each in seen if each["contender"] == contender]

    rows = []
    for number, (rate, seconds) in enumerate([(100.0, 10.0), (50.0, 15.0), (200.0, 6.0)]):
        rows.append(row(number, "ceiling", mm_float32=rate, mm_bfloat16=4 * rate, copy=1.0))
        work = dict(flops=2.5e11, update=seconds)
        rows.append(row(number, "grpo", **work, needed_tokens=1, processed=1))
        rows.append(row(number, "trl-default", **work))  # in bfloat16
    assert shares(rows, "grpo") == pytest.approx([0.75, 1.0, 0.625])
    assert shares(rows, "trl-default") == pytest.approx([0.1875, 0.25, 0.15625])

    told = "update's share of the matrix-multiply rate: 0.75 (at least 0.7)"
    assert f"3. grpo, smollm2, sokoban-10, {told}" in throughput.checks(rows)
    assert "100" in throughput.rates(rows[:2])
    assert "50 to 200 GFLOP/s float32" in throughput.rates(rows)


def cells_of(text: str) -> list[list[str]]:
    """The cells of a Markdown table's rows, its title among them."""
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in rows]


def test_two_trees_are_compared_round_by_round():
    """The machine gets slower from round to round, which the ratios do not see."""
    rows = []
    for number, (mine, theirs) in enumerate([(1.1, 1.0), (2.4, 2.0), (3.6, 4.0)]):
        for tree, seconds in (("this", mine), ("other", theirs)):
            where = dict(round=number, model="tiny", workload="sokoban-3", contender="grpo")
            figures = dict.fromkeys(throughput.PHASES, 0.0)
            figures |= dict(seconds=seconds, update=seconds, processor=2 * seconds, others=0.1)
            figures |= dict(sequence_tokens=7, action_tokens=3, peak=2.0 + number / 10)
            rows.append(where | figures | {"tree": tree})
    rows[0]["peak"] = 2.5

    titles, cells = cells_of(throughput.comparison(rows))
    told = dict(zip(titles, cells, strict=True))
    assert (told["other [s]"], told["this [s]"]) == ("2.000", "2.400")
    assert told["this / other (least to most)"] == "1.100 (0.90 to 1.20)"  # 1.1, 1.2, 0.9
    assert told["processor time, this / other"] == "1.014"  # 7.1 / 7
    assert (told["rollout"], told["update"]) == ("+0.0%", "+10.0%")
    assert (told["peak, other [GB]"], told["peak, this [GB]"]) == ("2.20", "2.50")
    assert told["rounds"] == "3" and "NOT THE SAME" not in throughput.comparison(rows)

    for row in rows:
        row["sequence_tokens"] += row["tree"] == "other"
    assert "7, other 8: NOT THE SAME EPISODES" in throughput.comparison(rows)


def test_another_tree_is_driven_by_its_own_code(tmp_path, monkeypatch, capsys):
    """A copy of this tree whose functions have other names and whose scripts wait."""
    other = tmp_path / "other"
    ignored = shutil.ignore_patterns("__pycache__", "results")
    for name in ("benchmarks", "envs", "runtime"):
        shutil.copytree(ROOT / name, other / name, ignore=ignored)
    script = (ROOT / "grpo_webshop.py").read_text()
    flatten = "        batch = flatten(episodes)"
    assert script.count("grpo_advantages") > 1 and script.count(flatten) == 1
    slow = f"        __import__('time').sleep(2)\n{flatten}"
    script = script.replace("grpo_advantages", "advantages_of_grpo").replace(flatten, slow)
    (other / "grpo_webshop.py").write_text(script)

    monkeypatch.setattr(throughput.MODELS["tiny"], "tasks", 1)
    monkeypatch.setattr(throughput.MODELS["tiny"], "group", 4)
    runs = tmp_path / "runs"
    words = f"--against {other} --contenders grpo-hf --workloads sokoban-2 --rounds 1"
    monkeypatch.setattr(sys, "argv", ["throughput.py", *words.split(), "--runs-dir", str(runs)])
    throughput.main()

    titles, cells = cells_of(capsys.readouterr().out)
    told = dict(zip(titles, cells, strict=True))
    assert told["contender"] == "grpo-hf" and told["rounds"] == "1"
    assert float(told["other [s]"]) > max(2, float(told["this [s]"])) and "-" in told["rollout"]
    (results,) = runs.glob("against-*.jsonl")
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    assert [row["tree"] for row in rows] == ["other", "this"] and rows[0]["rollout"] > 2
    assert {row["code"] for row in rows} == {results.stem.removeprefix("against-")}


def test_step_time_of_a_small_shape(tmp_path, monkeypatch):
    """The script for a GPU, here on the CPU: every phase runs, and its operations are counted."""
    sizes = dict(tasks=2, group=2, turns=3, prompt=20, observation=10, answer=4, rounds=1)
    flags = [part for name, value in sizes.items() for part in (f"--{name}", str(value))]
    words = ["--shape", "small", "--dtype", "float32", *flags, "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["step_time.py", *words])
    step_time.main()

    text = (tmp_path / "step-time-small.md").read_text()
    assert "208 tokens, 48 sampled" in text  # 4 episodes of a prompt, 3 answers, 2 observations
    rows = cells_of(text)[1:]
    assert [row[0] for row in rows] == ["rollout", "log-probabilities", "PRM", "update"]
    assert all(float(row[1]) >= 0 and float(row[5]) > 0 for row in rows)
    work = [float(row[3]) / float(rows[0][3]) for row in rows]
    assert work == pytest.approx([1, 1, 5, 3], rel=0.02)
