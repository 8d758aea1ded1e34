"""Sweep files as W&B reads them, and the runner that executes them without a server."""

import contextlib
import io
import itertools
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

from sweeps import file as sweep_file
from sweeps import results as sweep_results
from sweeps import run as runner

import pytest
import yaml
from conftest import ROOT

COMMAND = sweep_file.COMMAND
needs_optuna = pytest.mark.skipif(not find_spec("optuna"), reason="optuna is not installed")
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
scale = float(os.environ.get("SCALE", 1))
if flags.get("broken") == "True" and seed == 1:
    sys.exit("--broken True: this cannot be")
(run / "metrics.jsonl").touch()
done = len((run / "metrics.jsonl").read_text().splitlines())
for iteration in range(done, int(flags.get("iterations", 3))):
    time.sleep(float(flags.get("pause", 0)))
    row = {"iteration": iteration, "eval/success": scale * alpha * (iteration + 1) + seed / 100}
    row["eval/score"] = 1 / (1 + alpha)
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
        path.write_text(yaml.safe_dump(body | more, sort_keys=False))
        return path

    return write


def command(file, *words):
    words = [str(file), "--out", str(file.with_suffix("")), *map(str, words)]
    return [sys.executable, str(ROOT / "sweeps" / "run.py"), *words]


def execute(file, *words, check=True, picture=False):
    """main() of the runner in this process, where a run is looked at more often."""
    said, warned, code = io.StringIO(), io.StringIO(), 0
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(said))
        stack.enter_context(contextlib.redirect_stderr(warned))
        stack.enter_context(patch.object(sys, "argv", command(file, *words)[1:]))
        stack.enter_context(patch.object(runner, "POLL", 0.01))
        if not picture:
            stack.enter_context(patch.object(runner, "picture"))
        try:
            runner.main()
        except SystemExit as stop:
            code = stop.code
    for number, handler in handlers.items():
        signal.signal(number, handler)
    if isinstance(code, str):
        warned.write(f"{code}\n")
        code = 1
    done = SimpleNamespace(returncode=code or 0, stdout=said.getvalue(), stderr=warned.getvalue())
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
    path = file.with_suffix("") / "results.jsonl"
    entries = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [entry for entry in entries if "name" in entry]


def table_of(file):
    return (file.with_suffix("") / "table.md").read_text()


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
def test_every_file_has_rows_that_its_script_reads(file, capsys):
    body, args = runner.read_sweep(file), SimpleNamespace(seeds=[1, 2], more=["--iterations=4"])
    assert sweep_file.flags_of_program(ROOT / body["program"])
    runner.check_flags(file, body, args)
    args = SimpleNamespace(draw_seed=0, trials=None)
    assert body["method"] == "bayes" or len(runner.rows_of_sweep(body, args)) > 2
    assert capsys.readouterr().err == ""


def test_the_flags_of_every_page_are_known_without_importing_torch(tmp_path):
    """So a name that is no flag is refused in a second."""
    pages = [page for page in ROOT.glob("*.py") if " seed: int" in page.read_text()]
    assert len(pages) > 20
    code = "import sys; from pathlib import Path; from sweeps.file import flags_of_program\n"
    code += "for page in sys.argv[1:]: assert 'seed' in flags_of_program(Path(page)), page\n"
    code += "assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code, *pages], cwd=ROOT, check=True)


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
    body["parameters"] |= {name: {"value": value} for name, value in values.items()}
    (config,) = runner.rows_of_sweep(body, SimpleNamespace(trials=None))
    assert config == values

    assert agent_runs(body, config, tmp_path, monkeypatch) == 0
    (by_agent,) = (tmp_path / "runs").glob("*/args.json")
    assert list(tmp_path.glob("wandb/offline-run-*-abcd1234"))  # its own id, not one of ours
    flags = json.loads(by_agent.read_text())
    assert {name: flags[name] for name in values} == values | {"resume": flags["resume"]}
    assert flags.keys() == sweep_file.flags_of_program(ROOT / "istar_sokoban.py").keys()


def test_an_agents_run_and_the_runners_have_the_same_flags(sweep, tmp_path, monkeypatch):
    """The set of runs of a grid that W&B's own expansion has, through both command lines."""
    parameters = {"alpha": {"values": [1, 1.0, 2, 1e-5]}, "quiet": {"values": [True, False]}}
    parameters |= {"names": {"values": [[], ["a", "b"]]}, "text": {"value": "a b"}}
    file = sweep(parameters)
    execute(file, "--seeds", 3)
    ours = [one[0]["flags"] for one in starts_of(file).values()]
    keys = [*parameters]
    ours = sorted(json.dumps([flags[key] for key in keys]) for flags in ours)
    rows = itertools.product([1, 2, 1e-5], [True, False], [[], ["a", "b"]], ["a b"])
    body = runner.read_sweep(file)
    for number, row in enumerate(rows):
        placed = {"seed": 3, "runs-dir": str(tmp_path / "agent"), "run-name": number}
        agent_runs(body, dict(zip(keys, row)) | placed, tmp_path, monkeypatch)
    theirs = [json.loads(path.read_text()) for path in tmp_path.glob("agent/*/starts")]
    theirs = sorted(json.dumps([one["flags"][key] for key in keys]) for one in theirs)
    assert ours == theirs and len(ours) == 12


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
    assert sweep_file.command_of(body, row) == expected


# ------------ the runner ------------


def test_every_combination_is_run_with_every_seed_and_every_parameter(sweep):
    """The first parameter is in every command (CleanRL's tuner drops it), and in the table."""
    parameters = {"alpha": {"values": [1, 2]}, "beta": {"values": ["a", "b"]}}
    file = sweep(parameters | {"gamma": {"value": 7}})
    done = execute(file, "--seeds", 1, 2, 3, picture=True)
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
    file = sweep({"alpha": {"values": [1, 2, 3]}, "pause": {"value": 0.15}})
    process = subprocess.Popen(command(file, "--seeds", 1, 2))
    end = time.monotonic() + 60
    while len(results_of(file)) < 2:
        assert time.monotonic() < end and process.poll() is None
        time.sleep(0.05)
    time.sleep(0.2)
    process.kill()  # nobody can catch it
    process.wait()
    finished = {entry["name"] for entry in results_of(file)}
    begun = starts_of(file)
    time.sleep(0.3)
    for one in begun.values():  # what it had started has ended with it
        assert not is_alive(one[-1]["pid"])

    execute(file, "--seeds", 1, 2)
    starts = starts_of(file)
    assert len(starts) == 6 and 2 <= len(finished) < 6
    for name, one in starts.items():
        assert len(one) == 1 + (name in begun and name not in finished)
        assert all(start["flags"]["resume"] == "auto" for start in one)  # it goes on, not anew
    again = execute(file, "--seeds", 1, 2)
    assert len(results_of(file)) == 6
    assert starts_of(file) == starts and "of 0" not in again.stdout


@pytest.mark.parametrize("sent", (signal.SIGINT, signal.SIGTERM))
def test_a_stopped_runner_stops_its_runs_and_goes_on(sweep, sent):
    """In the middle of the second run; the start after it has the table of a fresh one."""
    file = sweep({"alpha": {"values": [1, 2, 3]}, "pause": {"value": 0.1}})

    def stop():
        while len(starts_of(file)) < 2:
            time.sleep(0.02)
        os.kill(os.getpid(), sent)

    threading.Thread(target=stop, daemon=True).start()
    done = execute(file, check=False)
    told = done.stderr.splitlines()
    assert done.returncode == 1 and len(told) == 1
    assert told[0].startswith("stopped; the same command goes on: python")
    assert len(results_of(file)) == 1 and not any(
        is_alive(start["pid"]) for one in starts_of(file).values() for start in one
    )
    execute(file)
    assert sorted(len(one) for one in starts_of(file).values()) == [1, 1, 2]
    assert table_of(file) == table_of_a_fresh_start(file)


def test_two_runners_do_not_share_a_directory(sweep):
    file = sweep({"pause": {"value": 1}, "iterations": {"value": 1}})
    first = threading.Thread(target=subprocess.run, args=(command(file),), daemon=True)
    first.start()
    while not starts_of(file):
        time.sleep(0.02)
    second = execute(file, check=False)
    assert second.returncode == 1 and "another process is at work there" in second.stderr
    assert len(second.stderr.splitlines()) == 1
    first.join()
    assert len(starts_of(file)) == len(results_of(file)) == 1


# ------------ an edited file ------------


def table_of_a_fresh_start(file, *words):
    """The table of the same file in a directory in which nothing was run."""
    fresh = file.with_suffix("").parent / "fresh" / file.name
    fresh.parent.mkdir(exist_ok=True)
    fresh.write_bytes(file.read_bytes())
    execute(fresh, *words)
    return table_of(fresh)


GRID = {"alpha": {"values": [1, 2]}, "beta": {"values": [7, 5]}}  # beta changes no result
DRAWN = {"alpha": {"min": 0.5, "max": 2.5}, "beta": {"values": [1, 2]}}
EDITS = {  # what the file is first, what it is then, and how many runs are new
    "a value more": (GRID, {"parameters": GRID | {"alpha": {"values": [4, 1, 2]}}}, 2),
    "a value less": (GRID, {"parameters": GRID | {"alpha": {"values": [2]}}}, 0),
    "other values": (GRID, {"parameters": GRID | {"alpha": {"values": [5, 2]}}}, 2),
    "values in another order": (GRID, {"parameters": GRID | {"beta": {"values": [5, 7]}}}, 0),
    "parameters in another order": (GRID, {"parameters": dict(reversed(GRID.items()))}, 0),
    "another range": (DRAWN, {"parameters": DRAWN | {"alpha": {"min": 3.0, "max": 4.0}}}, 5),
    "another metric": (GRID, {"metric": {"name": "eval/score", "goal": "maximize"}}, 0),
    "another goal": (GRID, {"metric": {"name": "eval/success", "goal": "minimize"}}, 0),
    "another command": (GRID, {"command": ["${env}", "SCALE=3", *COMMAND[1:]]}, 4),
    "another program": (GRID, {"program": "other.py"}, 4),
    "another constant": (GRID, {"parameters": GRID | {"gamma": {"value": 1}}}, 4),
    "fewer rows": (DRAWN, {"run_cap": 3}, 0),
}


@pytest.mark.parametrize("edit", EDITS)
def test_an_edited_file_has_the_table_of_a_fresh_start(sweep, tmp_path, edit):
    """And no run that it shares with the file before is run again from its beginning."""
    parameters, changes, new = EDITS[edit]
    if "program" in changes:
        (tmp_path / "other.py").write_text(PROGRAM)
        changes = {"program": str(tmp_path / "other.py")}
    start = {"parameters": parameters, "method": "random" if parameters is DRAWN else "grid"}
    start |= {"run_cap": 5} if parameters is DRAWN else {}
    file = sweep(**start)
    execute(file)
    before, old = len(starts_of(file)), table_of(file)
    sweep(**start | changes)
    execute(file)
    assert len(starts_of(file)) == before + new
    assert table_of(file) == table_of_a_fresh_start(file) != old


def test_another_text_of_its_world_is_another_program(tmp_path, monkeypatch):
    """Of the modules of envs that it imports, and of nothing else."""
    monkeypatch.setattr(sweep_file, "ROOT", tmp_path)
    (tmp_path / "envs" / "house").mkdir(parents=True)
    (tmp_path / "mine.py").write_text("from envs.house import House\nfrom envs.room import Room\n")
    seen = set()
    for number, name in enumerate(("room.py", "house/__init__.py", "house/door.py"), 1):
        (tmp_path / "envs" / name).write_text("a = 1\n")
        seen.add(sweep_file.text_of({"program": "mine.py"}))
        assert len(seen) == number
    for name in ("other.py", "house/door.pyc"):
        (tmp_path / "envs" / name).write_text("a = 1\n")
        assert sweep_file.text_of({"program": "mine.py"}) in seen


def texts_of(home, name: str, start: dict | None = None) -> int:
    """How many programs home/program.py is while a file has one text and then another."""
    seen = set()
    for text in ("a = 1\n", "a = 2\n"):
        (home / name).write_text(text)
        seen.add(sweep_file.text_of({"program": str(home / "program.py")} | (start or {})))
    return len(seen)


def test_a_link_to_a_program_is_what_it_links_to(tmp_path):
    """Python finds a script's imports beside the file that the link names."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/program.py").write_text("import helper\n")
    (tmp_path / "program.py").symlink_to("elsewhere/program.py")
    assert texts_of(tmp_path, "elsewhere/helper.py") == 2


def test_what_a_program_imports_from_a_folder_beside_it_counts(tmp_path):
    (tmp_path / "lib").mkdir()
    (tmp_path / "program.py").write_text("from lib.rooms import SIZE\n")
    assert texts_of(tmp_path, "lib/rooms.py") == 2


IMPORTS = {  # what the program and its modules import: the file that is edited
    "import rooms": "rooms.py",
    "from rooms import SIZE": "rooms.py",
    "from worlds.house.rooms import SIZE": "worlds/house/rooms.py",
    "from worlds import house": "worlds/house/__init__.py",
    "import worlds": "worlds/house/doors.py",
    "from worlds.rooms import SIZE": "worlds/base.py",  # which rooms.py names with a dot
    "from worlds.house.rooms import A": "worlds/base.py",  # with two
}


@pytest.mark.parametrize("line", IMPORTS)
def test_what_a_program_imports_from_pythonpath_counts(line, tmp_path, monkeypatch):
    """Where a user's own world may lie; installed packages do not count."""
    home, edited = tmp_path / "elsewhere", IMPORTS[line]
    (home / "worlds/house").mkdir(parents=True)
    if line == "import worlds":
        (home / "worlds/__init__.py").write_text("")
    (home / "worlds/rooms.py").write_text("from .base import SIZE\n")
    (home / "worlds/house/rooms.py").write_text("from ..base import SIZE as A\n")
    (tmp_path / "here").mkdir()
    (tmp_path / "here/program.py").write_text(f"{line}\n")
    program = {"program": str(tmp_path / "here/program.py")}
    monkeypatch.syspath_prepend(home)
    seen = set()
    for text in ("a = 1\n", "a = 2\n"):
        (home / edited).write_text(text)
        seen.add(sweep_file.text_of(program))
    assert len(seen) == 2
    (home / "not_imported.py").write_text("a = 1\n")
    assert sweep_file.text_of(program) in seen
    installed = home.rename(tmp_path / "site-packages")
    monkeypatch.syspath_prepend(installed)
    (installed / edited).write_text("a = 3\n")
    seen = {sweep_file.text_of(program)}
    (installed / edited).write_text("a = 4\n")
    assert sweep_file.text_of(program) in seen


DEFAULT = """from dataclasses import dataclass
@dataclass
class Args:
    model: str = {!r}
"""
NAMED = ["value", "values", "after --", "after -- with =", "command", "data", "default"]


@pytest.mark.parametrize("how", NAMED)
def test_other_files_that_a_flag_names_are_another_program(how, tmp_path, monkeypatch):
    model = tmp_path / "model"
    model.mkdir()
    text = DEFAULT.format(str(model)) if how == "default" else "a = 1\n"
    (tmp_path / "program.py").write_text(text)
    start = {
        "value": {"parameters": {"model": {"value": str(model)}}},
        "values": {"parameters": {"model": {"values": ["none", str(model)]}}},
        "after --": {"more": ["--model", str(model)]},
        "after -- with =": {"more": [f"--model={model}"]},
        "command": {"command": ["${interpreter}", "${program}", f"--model={model}", "${args}"]},
        "data": {"parameters": {"data_file": {"value": str(model / "config.json")}}},
        "default": {},
    }[how]
    monkeypatch.setattr(sweep_file, "files_of", sweep_file.files_of.__wrapped__)  # it remembers
    assert texts_of(tmp_path, "model/config.json", start) == 2


def test_another_text_of_the_program_is_another_program(sweep, tmp_path):
    file = sweep({"alpha": {"values": [1, 2]}})
    execute(file)
    (tmp_path / "program.py").write_text(PROGRAM.replace("scale * alpha", "7 * alpha"))
    done = execute(file)
    assert "metrics or texts of the program: 2" in done.stdout
    means = [line.split(" | ")[1] for line in table_of(file).splitlines()[4:]]
    assert means == ["42.010", "21.010"]

    (tmp_path / "factor.py").write_text("from deeper import FACTOR\n")
    (tmp_path / "deeper.py").write_text("FACTOR = 2\n")
    text = PROGRAM.replace("scale * alpha", "FACTOR * alpha")
    (tmp_path / "program.py").write_text(f"from factor import FACTOR\n{text}")
    execute(file)
    (tmp_path / "deeper.py").write_text("FACTOR = 3  # once more\n")
    execute(file)
    means = [line.split(" | ")[1] for line in table_of(file).splitlines()[4:]]
    assert means == ["18.010", "9.010"]

    (tmp_path / "program.py").write_text(PROGRAM + "\nPath(__file__).write_text('')\n")
    done = execute(file, check=False)
    assert done.returncode == 1 and "program.py was changed while the sweep ran" in done.stderr
    assert not (file.with_suffix("") / "table.md").exists()  # nor the table of the text before


@needs_optuna
@pytest.mark.parametrize("edit", ("range", "early_terminate"))
def test_an_edited_file_of_bayes_has_the_table_of_a_fresh_start(sweep, edit):
    """Its rows are proposed anew, and a row that was stopped early is played to its end."""
    body = {"method": "bayes", "run_cap": 4, "parameters": {"alpha": {"min": 0.5, "max": 1.5}}}
    body["early_terminate"] = {"type": "hyperband", "min_iter": 99}  # longer than a run
    file = sweep(**body)
    execute(file)
    path = file.with_suffix("") / "results.jsonl"
    text = path.read_text().replace('"finished"', '"stopped early"')
    path.write_text(text)  # as if
    execute(file)
    assert table_of(file).count("stopped early") == 4 and path.read_text() == text

    if edit == "range":
        body["parameters"] = {"alpha": {"min": 6.0, "max": 7.0}}
    else:
        del body["early_terminate"]
    sweep(**body)
    execute(file)
    assert table_of(file) == table_of_a_fresh_start(file)
    assert "stopped early" not in table_of(file) and len(results_of(file)) == 8


@needs_optuna
def test_a_row_that_bayes_proposes_twice_is_run_once(sweep):
    file = sweep({"alpha": {"values": [1]}}, method="bayes", run_cap=4)
    execute(file, "--jobs", min(2, len(os.sched_getaffinity(0))))
    assert [len(one) for one in starts_of(file).values()] == [1]


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


@needs_optuna
def test_bayes_looks_where_it_is_good_stops_what_falls_behind_and_goes_on(sweep):
    parameters = {"alpha": {"min": 0.0, "max": 1.0}, "pause": {"value": 0.08}}
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
        assert sweep_results.half_width(values) == pytest.approx(expected, rel=3e-3)
    assert sweep_results.half_width([1.0]) is None
