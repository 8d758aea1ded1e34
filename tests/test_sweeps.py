"""Sweep files as W&B reads them, and the runner that executes them without a server."""

import importlib.util
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

from runtime.flags import flags_of, parse
from runtime.saving.opening import FREE

import pytest
from conftest import ROOT, load

spec = importlib.util.spec_from_file_location("sweeps_run", ROOT / "sweeps" / "run.py")
runner = importlib.util.module_from_spec(spec)
spec.loader.exec_module(runner)

FILES = sorted((ROOT / "sweeps").glob("*.yaml"))
SCHEMA = ROOT / "tests" / "data" / "wandb-sweeps-0.3.0-schema.json"  # of W&B's own sweep engine
WORLDS = ("sokoban", "webshop", "sotopia")
# What the runner executes in most tests: it takes flags and writes metrics as a script does.
PROGRAM = """
import json, os, sys, time
from pathlib import Path
flags = dict(word.removeprefix("--").split("=", 1) for word in sys.argv[1:])
run = Path(flags["runs-dir"], flags["run-name"])
run.mkdir(parents=True, exist_ok=True)
with (run / "starts").open("a") as file:
    file.write(json.dumps({"pid": os.getpid(), "cores": sorted(os.sched_getaffinity(0)),
                           "flags": flags, "began": time.time()}) + "\\n")
alpha, seed = float(flags.get("alpha", 1)), int(flags["seed"])
if flags.get("broken") == "True" and seed == 1:
    sys.exit("--broken True: this cannot be")
(run / "metrics.jsonl").touch()
done = len((run / "metrics.jsonl").read_text().splitlines())
for iteration in range(done, int(flags.get("iterations", 3))):
    time.sleep(float(flags.get("pause", 0)))
    row = {"iteration": iteration, "eval/success": alpha * (iteration + 1) + seed / 100}
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\\n")
"""


@pytest.fixture
def sweep(tmp_path):
    """sweep(parameters, **more) -> a file whose program is PROGRAM."""
    (tmp_path / "program.py").write_text(PROGRAM)

    def write(parameters, name="sweep", **more):
        body = {"program": str(tmp_path / "program.py"), "method": "grid"}
        body |= {"metric": {"name": "eval/success", "goal": "maximize"}, "parameters": parameters}
        path = tmp_path / f"{name}.yaml"
        path.write_text(json.dumps(body | more))  # JSON is YAML
        return path

    return write


def command(file, *words):
    words = [str(file), "--out", str(file.with_suffix("")), *map(str, words)]
    return [sys.executable, str(ROOT / "sweeps" / "run.py"), *words]


def execute(file, *words, check=True):
    done = subprocess.run(command(file, *words), capture_output=True, text=True, timeout=600)
    assert not check or not done.returncode, done.stdout + done.stderr
    return done


def starts_of(file):
    """{name of a run: its starts}."""
    found = {}
    for path in file.with_suffix("").glob("runs/*/starts"):
        found[path.parent.name] = [json.loads(line) for line in path.read_text().splitlines()]
    return found


def is_alive(pid):
    """Whether the process is there; one that has ended may wait for its parent."""
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def results_of(file):
    entries = runner.read_lines(file.with_suffix("") / "results.jsonl")
    return [entry for entry in entries if "name" in entry]


# ------------ the files ------------


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_wandb_reads_every_file(file):
    """Its own loader, and the schema of its own engine."""
    import jsonschema
    from wandb.sdk.launch.sweeps.utils import load_sweep_config

    config = load_sweep_config(str(file))
    validator = jsonschema.Draft7Validator(json.loads(SCHEMA.read_text()))
    assert [error.message for error in validator.iter_errors(config)] == []
    broken = config | {"method": "guess"}
    assert list(validator.iter_errors(broken))  # it does find faults


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_row_is_read_by_its_script(file, monkeypatch):
    """Each parameter is a flag, and arrives with the value that the row has."""
    body = runner.read_sweep(file)
    if body["method"] == "bayes":
        middle = SimpleNamespace(suggest_float=lambda name, low, high, log: math.sqrt(low * high))
        parameters = body["parameters"].items()
        rows = [{name: runner.suggest(middle, name, p) for name, p in parameters}]
    else:
        rows = runner.rows_of_sweep(body, SimpleNamespace(draw_seed=0, trials=4))
    assert len(rows) > 2 or body["method"] == "bayes"
    for row in rows:
        words = runner.command_of(body, row)
        script = Path(body["program"]).stem
        monkeypatch.setattr(sys, "argv", words[words.index(body["program"]) :])
        flags = flags_of(parse(load(script).Args, ""))
        assert {name: flags[name] for name in row} == row


def test_the_files_cover_what_is_swept():
    names = {file.stem for file in FILES}
    for world in WORLDS:
        for what in ("alpha", "beta", "alpha_beta", "learning_rate"):
            assert f"{what}_{world}" in names
    methods = [runner.read_sweep(file) for file in FILES]
    assert {body["method"] for body in methods} == {"grid", "random", "bayes"}
    for body in methods:
        assert ("early_terminate" in body) == (body["method"] == "bayes")
    lists = [p for b in methods for p in b["parameters"].values() if [] in p.get("values", [])]
    assert lists


# ------------ the command line of W&B's agent ------------


def agent_runs(body, config, cwd, monkeypatch):
    """Let W&B's agent start a row, as if a server had sent it."""
    from wandb import wandb_agent
    from wandb.sdk.launch.sweeps.utils import create_sweep_command

    agent = SimpleNamespace(_sweep_command=create_sweep_command(body.get("command")))
    vars(agent).update(_function=None, _in_jupyter=False, _forward_signals=False)
    vars(agent).update(_run_processes={}, _last_report_time=None)
    row = {name: {"value": value} for name, value in config.items()}
    sent = {"run_id": "abcd1234", "program": str(ROOT / body["program"]), "args": row}
    for name in ("WANDB_RUN_ID", "WANDB_SWEEP_PARAM_PATH"):
        monkeypatch.setenv(name, "")  # it sets them; they are put back afterwards
    monkeypatch.setenv("WANDB_SWEEP_ID", "s1")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.chdir(cwd)
    wandb_agent.Agent._command_run(agent, sent)
    (process,) = agent._run_processes.values()
    return process.wait()


def test_the_agents_run_has_the_arguments_of_the_runners(tmp_path, monkeypatch):
    """Booleans and a list included; and the agent's run is tracked without --track."""
    values = {"iterations": 1, "tasks_per_iteration": 2, "group_size": 2, "eval_tasks": 2}
    values |= {"eval_samples": 1, "max_steps": 2, "engine": "hf", "alpha": 1e-05, "seed": 3}
    values |= {"gradient_checkpointing": False, "quiet": True, "save_every": 2}
    values |= {"override": ["seed", "clip"], "resume": "auto"}  # which --override needs
    body = {"program": "istar_sokoban.py", "method": "grid", "metric": {"name": "eval/success"}}
    body["parameters"] = {name: {"values": [value]} for name, value in values.items()}
    (config,) = runner.grid(body["parameters"])
    assert config == values

    assert agent_runs(body, config, tmp_path, monkeypatch) == 0
    (by_agent,) = (tmp_path / "runs").glob("*/args.json")
    assert list(tmp_path.glob("wandb/offline-run-*-abcd1234"))  # its own id, not one of ours
    for name in ("WANDB_SWEEP_ID", "WANDB_RUN_ID", "WANDB_SWEEP_PARAM_PATH"):
        monkeypatch.delenv(name)

    file = tmp_path / "own.yaml"
    file.write_text(json.dumps(body))
    execute(file, "--seeds", 3)
    (by_runner,) = (tmp_path / "own" / "runs").glob("*/args.json")
    one, other = (json.loads(path.read_text()) for path in (by_agent, by_runner))
    placed = {"run_name", "runs_dir", "resume"}
    assert placed < set(FREE)
    assert {k: v for k, v in one.items() if k not in placed} == {
        k: v for k, v in other.items() if k not in placed
    }
    assert one["override"] == ["seed", "clip"] and one["gradient_checkpointing"] is False
    assert not list((by_runner.parent).glob("wandb")) and one["track"] is other["track"] is False


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_the_runner_builds_the_agents_command(file):
    from wandb.sdk.launch.sweeps import utils

    body = runner.read_sweep(file)
    row = {"alpha": 0.1, "quiet": False, "override": ["a", "b"], "run_name": "x y"}
    args = {name: {"value": value} for name, value in row.items()}
    variables = utils.create_sweep_command_args({"args": args})
    variables |= {"env": ["/usr/bin/env"], "interpreter": [sys.executable]}
    variables["program"] = [body["program"]]
    expected = []
    for part in utils.create_sweep_command(body.get("command")):
        known = variables.get(part[2:-1]) if part.startswith("${") else None
        expected += known or [part]
    assert runner.command_of(body, row) == expected


# ------------ the runner ------------


def test_every_combination_is_run_with_every_seed_and_every_parameter(sweep):
    """The first parameter is in every command (CleanRL's tuner drops it), and in the table."""
    parameters = {"alpha": {"values": [1, 2]}, "beta": {"values": ["a", "b"]}}
    file = sweep(parameters | {"gamma": {"value": 7}})
    done = execute(file, "--seeds", 1, 2, 3)
    starts = starts_of(file)
    assert len(starts) == 2 * 2 * 3 and all(len(one) == 1 for one in starts.values())
    flags = [one[0]["flags"] for one in starts.values()]
    seen = sorted((f["alpha"], f["beta"], f["gamma"], f["seed"]) for f in flags)
    assert seen == sorted((a, b, "7", s) for a in "12" for b in "ab" for s in "123")

    lines = (file.with_suffix("") / "table.md").read_text().splitlines()
    assert lines[2] == "| alpha | beta | eval/success | 95 % interval | seeds | command |"
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[4:]]
    assert len(rows) == 4 and [row[0] for row in rows] == ["2", "2", "1", "1"]  # best first
    for alpha, beta, mean, interval, seeds, told in rows:
        values = [float(alpha) * 3 + seed / 100 for seed in (1, 2, 3)]
        half = 4.303 * statistics.stdev(values) / math.sqrt(3)
        assert float(mean) == pytest.approx(statistics.mean(values), abs=1e-3)
        low, high = map(float, interval.split(" to "))
        middle = statistics.mean(values)
        assert (low, high) == pytest.approx((middle - half, middle + half), abs=2e-3)
        assert seeds == "3" and f"--alpha={alpha} --beta={beta} --gamma=7" in told
    assert (file.with_suffix("") / "table.png").read_bytes()[:4] == b"\x89PNG"
    assert "12 of 12" in done.stdout and "best: " in done.stdout


def test_a_run_that_fails_is_named_and_leaves_the_others_alone(sweep):
    """CleanRL's tuner swallows it. A second start tries it again, and nothing else."""
    file = sweep({"alpha": {"values": [1, 2]}, "broken": {"values": [False, True]}})
    for attempt in (1, 2):
        done = execute(file, "--seeds", 1, 2, check=False)
        assert done.returncode == 1
        told = done.stderr.strip().splitlines()
        assert told[0] == "2 of 8 runs failed:" if attempt == 1 else "failed:" in told[0]
        assert len(told) == 3
        assert all("--broken True: this cannot be" in line and ".log" in line for line in told[1:])
        starts = starts_of(file)
        failed = {line.split(":")[0].strip() for line in told[1:]}
        assert len(starts) == 8 and len(failed) == 2
        for name, one in starts.items():
            assert len(one) == (attempt if name in failed else 1)
        assert len(results_of(file)) == 6
        assert len((file.with_suffix("") / "table.md").read_text().splitlines()) == 4 + 4


def test_killed_and_started_again_it_repeats_no_finished_run(sweep):
    file = sweep({"alpha": {"values": [1, 2, 3]}, "pause": {"value": 0.4}})
    process = subprocess.Popen(command(file, "--seeds", 1, 2))
    end = time.monotonic() + 60
    while len(results_of(file)) < 2:
        assert time.monotonic() < end and process.poll() is None
        time.sleep(0.05)
    time.sleep(0.6)
    process.kill()  # nobody can catch it
    process.wait()
    finished = {entry["name"] for entry in results_of(file)}
    begun = starts_of(file)
    time.sleep(1)
    for one in begun.values():  # what it had started has ended with it
        assert not is_alive(one[-1]["pid"])

    execute(file, "--seeds", 1, 2)
    starts = starts_of(file)
    assert len(starts) == 6 and 2 <= len(finished) < 6
    for name, one in starts.items():
        assert len(one) == 1 + (name in begun and name not in finished)
        assert all(start["flags"]["resume"] == "auto" for start in one)  # it goes on, not anew
    with (file.with_suffix("") / "results.jsonl").open("a") as results:
        results.write('{"name": "torn')
    again = execute(file, "--seeds", 1, 2)
    assert len(results_of(file)) == 6
    assert starts_of(file) == starts and "of 0" not in again.stdout


@pytest.mark.parametrize("sent", (signal.SIGINT, signal.SIGTERM))
def test_a_stopped_runner_stops_its_runs_and_says_how_to_go_on(sweep, sent):
    file = sweep({"alpha": {"values": [1, 2]}, "pause": {"value": 30}})
    process = subprocess.Popen(command(file), stderr=subprocess.PIPE, text=True)
    end = time.monotonic() + 60
    while not starts_of(file):
        assert time.monotonic() < end
        time.sleep(0.05)
    process.send_signal(sent)
    _, told = process.communicate(timeout=20)
    assert process.returncode == 1 and told.startswith("stopped; the same command goes on: ")
    (one,) = starts_of(file).values()
    assert not is_alive(one[0]["pid"])


def test_two_runners_do_not_share_a_directory(sweep):
    file = sweep({"pause": {"value": 30}})
    process = subprocess.Popen(command(file), stderr=subprocess.DEVNULL)
    end = time.monotonic() + 60
    while not starts_of(file):
        assert time.monotonic() < end
        time.sleep(0.05)
    second = subprocess.run(command(file), capture_output=True, text=True, timeout=60)
    assert second.returncode == 1 and "another process is at work there" in second.stderr
    assert process.poll() is None and len(starts_of(file)) == 1
    process.terminate()
    process.wait()


def test_a_changed_file_mixes_no_rows(sweep):
    file = sweep({"alpha": {"values": [1, 2]}})
    execute(file)
    sweep({"alpha": {"values": [5, 2]}})
    execute(file)
    table = (file.with_suffix("") / "table.md").read_text()
    assert "--alpha=5" in table and "--alpha=2" in table and "--alpha=1" not in table
    assert len(results_of(file)) == 3  # 2 was not run again
    execute(file, "--", "--iterations=4")  # what follows -- makes it another run
    assert len(results_of(file)) == 5


def test_random_rows_are_the_same_every_time_and_within_their_ends(sweep):
    parameters = {"a": {"min": 1, "max": 6}, "b": {"min": 0.5, "max": 2.5}}
    parameters["c"] = {"distribution": "log_uniform_values", "min": 1e-4, "max": 1.0}
    parameters |= {"d": {"values": ["x", "y"]}, "e": {"value": False}}
    body = runner.read_sweep(sweep(parameters, method="random"))

    def take(seed):
        return runner.rows_of_sweep(body, SimpleNamespace(draw_seed=seed, trials=400))

    rows = take(0)
    assert rows == take(0) != take(1)
    assert {row["a"] for row in rows} == {1, 2, 3, 4, 5, 6}
    assert {row["d"] for row in rows} == {"x", "y"} and not any(row["e"] for row in rows)
    assert all(0.5 <= row["b"] <= 2.5 and 1e-4 <= row["c"] <= 1 for row in rows)
    assert 0.4 < statistics.mean(row["c"] < 1e-2 for row in rows) < 0.6  # half of the decades


@pytest.mark.skipif(not find_spec("optuna"), reason="optuna is not installed")
def test_bayes_looks_where_it_is_good_stops_what_falls_behind_and_goes_on(sweep):
    parameters = {"alpha": {"min": 0.0, "max": 1.0}, "pause": {"value": 0.12}}
    parameters["iterations"] = {"value": 4}
    early = {"type": "hyperband", "min_iter": 1, "eta": 2}
    file = sweep(parameters, method="bayes", run_cap=14, early_terminate=early)
    execute(file, "--trials", 4)
    first = results_of(file)
    assert len(first) == 4
    done = execute(file)
    results = results_of(file)
    assert results[:4] == first and len(results) == 14
    assert all(len(one) == 1 for one in starts_of(file).values())  # the first four not again
    stopped = [entry for entry in results if entry["state"] == "stopped early"]
    assert any(len(entry["evaluations"]) < 4 for entry in stopped)
    assert "stopped early" in done.stdout
    early, late = ([e["config"]["alpha"] for e in part] for part in (results[:4], results[-5:]))
    assert statistics.mean(late) > statistics.mean(early)  # more is better here
    lines = (file.with_suffix("") / "table.md").read_text().splitlines()[4:]
    marks = ["stopped early" in line for line in lines]
    assert len(lines) == 14 and marks == sorted(marks)  # last


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core")
def test_runs_at_the_same_time_have_cores_of_their_own(sweep):
    file = sweep({"alpha": {"values": [1, 2, 3, 4]}, "pause": {"value": 0.5}})
    execute(file, "--jobs", 2)
    starts = [one[0] for one in starts_of(file).values()]
    cores = [tuple(start["cores"]) for start in starts]
    assert len(set(cores)) == 2 and not set(cores[0]) & set(next(c for c in cores if c != cores[0]))
    written = file.with_suffix("").glob("runs/*/metrics.jsonl")
    first_end = min(path.stat().st_mtime for path in written)
    assert sorted(start["began"] for start in starts)[1] < first_end  # else one after another


def test_students_t():
    """Against tables: half of the interval of values with standard deviation 1 times sqrt(n)."""
    for number, t in {2: 12.706, 3: 4.303, 5: 2.776, 6: 2.571, 11: 2.228, 31: 2.042}.items():
        values = [float(n) for n in range(number)]
        expected = t * statistics.stdev(values) / math.sqrt(number)
        assert runner.half_width(values) == pytest.approx(expected, rel=3e-3)
    assert runner.half_width([1.0]) is None


@pytest.mark.parametrize(
    "more, words, said",
    [
        ({"method": "guess"}, [], "method guess: grid, random or bayes"),
        ({"parameters": {"a": {"min": 0, "max": 1}}}, [], "a: a grid needs values"),
        ({"program": "nothing.py"}, [], "program nothing.py: no such script"),
        ({"metric": {"name": "x", "goal": "up"}}, [], "goal up: minimize or maximize"),
        ({"metric": None}, [], "no metric"),
        ({"metric": {"goal": "maximize"}}, [], "metric: no name"),
        ({"command": ["${program}", "${args_json}"]}, [], "command: ${args_json}: this runner"),
        (
            {"method": "random", "parameters": {"a": {"distribution": "beta", "min": 0, "max": 1}}},
            [],
            "a: this runner draws",
        ),
        ({}, ["--jobs", 0], "--jobs 0: from 1 to "),
        ({}, ["--jobs", 999], "--jobs 999: from 1 to "),
        ({}, ["--seeds", 1, 1], "--seeds 1 1: each only once"),
        ({}, ["--trials", 0], "--trials 0: has to be at least 1"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(sweep, more, words, said):
    file = sweep(**{"parameters": {"alpha": {"values": [1, 2]}}} | more)
    done = execute(file, *words, check=False)
    assert done.returncode == 1 and said in done.stderr and len(done.stderr.splitlines()) == 1
    assert not starts_of(file)
