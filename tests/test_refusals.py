"""Wrong input is refused before any model is loaded, quickly, in one line that names the flag."""

import json
import os
import resource
import shutil
import subprocess
import sys
from dataclasses import fields

import runtime.checks
from envs.webshop import WebShop
from runtime.flags import flags_of, parse

import pytest
import transformers
from conftest import (
    PANEL,
    READY,
    ROOT,
    TINY,
    default_model,
    environment,
    load,
    positions,
    run_main,
)

NAMED = {  # the flag that the message names: the arguments that are wrong
    "--model": [["--model", "no/such/directory"], ["--model", "/tmp"], ["--model", ""]],
    "--group-size": [["--group-size", "1"], ["--group-size=0"]],
    "--temperature": [["--temperature", "0"], ["--temperature=-1.0"]],
    "--eval-tasks": [["--eval-tasks", "501"], ["--eval-tasks", "0"]],
    "--runs-dir": [["--runs-dir", "a file/below/it"], ["--runs-dir", "a file"]],
    "--max-context-tokens": [["--max-context-tokens", "100000"], ["--max-context-tokens", "0"]],
    "--resume": [["--resume", "no/such/run"]],
    "--iterations": [["--iterations", "0"]],
    "--tasks-per-iteration": [["--tasks-per-iteration", "0"]],
    "--learning-rate": [["--learning-rate=-0.5"]],
    "--minibatches": [["--minibatches", "0"]],
    "--history": [["--history=-1"]],
    "--max-steps": [["--max-steps", "0"]],
    "--eval-only": [["--eval-only=maybe"], ["--eval_only=1"]],
    "--processes": [["--processes", "2"]],
}
CASES = [(flag, wrong) for flag, cases in NAMED.items() for wrong in cases]
OWN = [  # of single scripts
    ("prime_webshop", "--outcome", ["--outcome", "score"]),
    ("istar_webshop_ablations", "--as-published", ["--as-published", "pairs"]),
]


@pytest.fixture
def no_models(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("a model was loaded")

    for loader in (transformers.AutoModelForCausalLM, transformers.AutoTokenizer):
        monkeypatch.setattr(loader, "from_pretrained", refuse)


@pytest.fixture(scope="module", autouse=True)
def one_shop():
    """WebShop of equal flags is built once: it takes a third of a second, and these tests ask for
    it hundreds of times before they are refused."""
    build, shops = WebShop.from_args, {}

    def from_args(args):
        flags = repr((args.world, args.max_steps))
        if flags not in shops:
            shops[flags] = build(args)
        return shops[flags]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WebShop, "from_args", from_args)
        yield


@pytest.fixture
def directory(tmp_path):
    (tmp_path / "a file").write_text("")
    return tmp_path


def refused(script, *flags, cwd) -> str:
    """What a script says that does not start: one line, and nothing else."""
    done = run_main(script, "--eval-tasks=2", *flags, cwd=cwd, check=False)  # a panel is read
    assert done.returncode == 1 and not done.stdout, done
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    return done.stderr.strip()


def assert_refused(script, flag, wrong, directory):
    said = refused(script, *wrong, cwd=directory)
    assert flag in said
    assert wrong[-1].split("=")[-1] in said  # what was given, so that it can be seen
    left = sorted(path.name for path in directory.rglob("*"))
    assert left in (["a file"], ["a file", "runs"])  # no run is begun


def words(case) -> str:
    return " ".join(case) if isinstance(case, list) else case


# PPO compares nothing within a group: one of 1 is right, and tests/test_credit.py trains on it
RIGHT = [("ppo_webshop", ["--group-size", "1"])]
WRONG = [(s, flag, case) for flag, case in CASES for s in READY if (s, case) not in RIGHT]


@pytest.mark.parametrize("script, flag, wrong", WRONG, ids=words)
def test_wrong_input_is_refused(script, flag, wrong, directory, no_models):
    assert_refused(script, flag, wrong, directory)


@pytest.mark.parametrize("script, flag, wrong", OWN)
def test_what_an_algorithm_cannot_do_is_refused(script, flag, wrong, directory, no_models):
    assert_refused(script, flag, wrong, directory)


@pytest.mark.parametrize("script", READY)
def test_a_flag_that_there_is_not_is_refused(script, directory, no_models):
    """--top-p had one value that could be: the loss has the softmax of all tokens."""
    assert refused(script, "--top-p", "0.9", cwd=directory).startswith("--top-p: no such flag")
    assert [path.name for path in directory.rglob("*")] == ["a file"]


@pytest.mark.parametrize("script", READY)
def test_right_input_is_not_refused(script, directory, no_models):
    """The tests above would pass if everything were refused: these arguments come as far as the
    model."""
    tasks, longest = PANEL[environment(script)], positions(script)
    edge = ["--group-size=2", "--model", default_model(script), "--engine", "hf"]
    edge += ["--eval-only=False", "--processes", "1"]
    most = [f"--eval-tasks={tasks}", f"--max-context-tokens={longest}"]
    with pytest.raises(AssertionError, match="a model was loaded"):
        run_main(script, *edge, *most, cwd=directory)
    for flag, value in (("--eval-tasks", tasks + 1), ("--max-context-tokens", longest + 1)):
        assert refused(script, *edge, flag, value, cwd=directory).startswith(f"{flag} {value}: ")


@pytest.mark.parametrize("script", READY)
def test_every_switch_of_a_script_is_read_as_a_sweep_writes_it(script, monkeypatch):
    """Those of the page, of the run and of the world: --prm_skill=False."""
    args = load(script).Args()
    switches = set()
    for part in (args, args.world, args.run_args):
        switches |= {
            each.name for each in fields(part) if isinstance(getattr(part, each.name), bool)
        }
    assert {"eval_only", "track"} <= switches
    for value in (True, False):
        monkeypatch.setattr(sys, "argv", [script, *(f"--{name}={value}" for name in switches)])
        flags = flags_of(parse(load(script).Args, ""))
        assert {flags[name] for name in switches} == {value}


@pytest.mark.parametrize("script", READY)
def test_missing_vllm_is_named(script, directory, no_models, monkeypatch):
    monkeypatch.setattr(runtime.checks, "find_spec", lambda name: None)
    said = refused(script, "--engine", "vllm", cwd=directory)
    assert said.startswith("--engine vllm") and "not installed" in said


def test_directories_without_a_whole_model(directory, no_models):
    """A broken configuration is refused as a missing one is."""
    broken = directory / "broken"
    shutil.copytree(TINY, broken)
    (broken / "config.json").write_text("{not json")
    for script in READY:
        assert "--model" in refused(script, "--model", broken, cwd=directory)


@pytest.mark.parametrize("script", READY[:1])
def test_a_model_with_a_program_of_its_own_is_refused(script, directory, no_models):
    """Nothing of it is run; the message names the flag."""
    own = directory / "own"
    shutil.copytree(TINY, own)
    config = json.loads((own / "config.json").read_text())
    classes = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.Own"}
    config |= {"model_type": "own", "auto_map": classes}
    (own / "config.json").write_text(json.dumps(config))
    (own / "own.py").write_text("from pathlib import Path\nPath('executed').touch()\n")

    assert "--trust-remote-code" in refused(script, "--model", own, cwd=directory)
    assert not (directory / "executed").exists()
    # its program is run, and is no configuration
    run_main(script, "--model", own, "--trust-remote-code", cwd=directory, check=False)
    assert (directory / "executed").exists()


# ------------ as a user starts it ------------


HEAVY = ("wandb", "matplotlib", "spacy", "vllm")  # only where they are used
STARTED = f"""
import os, runpy, sys
*scripts, flag = sys.argv[1:]
codes = []
for script in scripts:
    sys.argv, sys.path[0] = [script, flag], os.path.dirname(script)
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        codes.append(end.code)
for code in codes[:-1]:
    print(code, file=sys.stderr)
print("imported:", *(name for name in {HEAVY} if name in sys.modules), file=sys.stderr)
sys.exit(*codes[-1:])
"""
ONE_EACH = [next(s for s in READY if environment(s) == world) for world in PANEL]
# One of each world, one after another; a refusal imports what --help does too.
QUICK = [(ONE_EACH, "--group-size=1"), (ONE_EACH[:1], "--help"), (["warm_start"], "--help")]
BARE = []  # what importing torch and peft took, which pages name, at each start so far [CPU s]


@pytest.mark.parametrize("scripts, flag", QUICK)
def test_help_and_refusals_take_seconds_and_import_little(scripts, flag, tmp_path):
    """At most twice what importing torch and peft takes on this machine (about 5 s of the
    processor, one thread). What else runs on the machine makes a process dearer, so the cheapest
    of up to five starts counts, and the last start of the imports."""
    python = [sys.executable, "-W", "ignore", "-c"]
    command = [*python, STARTED, *(str(ROOT / f"{script}.py") for script in scripts), flag]
    said = {"cwd": tmp_path, "capture_output": True, "text": True}
    said["env"] = os.environ | {"OMP_NUM_THREADS": "1"}

    def start(command: list[str]) -> tuple[float, subprocess.CompletedProcess]:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(command, **said)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime, done

    spent = []
    while len(spent) < 5 and (not spent or min(spent) > 2 * BARE[-1]):
        if spent or not BARE:
            BARE.append(start([*python, "import torch, peft"])[0])
        seconds, done = start(command)
        spent.append(seconds)

        lines = done.stderr.splitlines()
        assert "imported:" in lines, done.stderr
        if flag == "--help":
            assert done.returncode == 0 and lines == ["imported:"] and "--seed" in done.stdout
        else:
            assert done.returncode == 1 and lines.pop(-2) == "imported:", done.stderr
            assert len(lines) == len(scripts), done.stderr
            assert all(line.startswith("--group-size 1: ") for line in lines), done.stderr
    assert min(spent) <= 2 * BARE[-1], (spent, BARE)
    assert not list(tmp_path.iterdir())


def test_what_is_imported_is_seen(tmp_path):
    """The test above would pass if its program saw nothing."""
    for name in ("wandb", "spacy"):
        (tmp_path / f"{name}.py").touch()
    (tmp_path / "script.py").write_text("import wandb, spacy\n")
    command = [sys.executable, "-c", STARTED, str(tmp_path / "script.py"), "--help"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stderr.splitlines()[-1] == "imported: wandb spacy"
