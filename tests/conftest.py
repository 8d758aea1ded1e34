"""Shared by the tests: the scripts as modules, a small random model, random trajectories, runs as
subprocesses."""

import ast
import asyncio
import contextlib
import functools
import importlib.util
import io
import json
import os
import random
import re
import resource
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest

os.environ.update(
    WANDB_MODE="offline",
    HF_HUB_OFFLINE="1",
    VLLM_NO_USAGE_STATS="1",
    TOKENIZERS_PARALLELISM="false",
)
os.environ.setdefault("GOMP_SPINCOUNT", "0")
if workers := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 0)):  # before anything imports torch
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // workers)))

os.fsync = lambda file: None  # no test cuts the power; a tiny run has 27 of them, 5 ms each

ROOT = Path(__file__).resolve().parent.parent
TINY = ROOT / "models" / "tiny-sokoban"
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

import blocks

VOCABULARY = 50


@pytest.fixture(autouse=True)
def put_back():
    """The tests' own process is not quiet, whatever a run was, and keeps its stderr and what it
    does with errors that nobody caught."""
    from runtime.view import terminal

    hook, err, terminal.settings["quiet"] = sys.excepthook, sys.stderr, False
    yield
    sys.excepthook, sys.stderr, terminal.settings["quiet"] = hook, err, False


def answers(engine, contexts: list[list[int]], sampling) -> list:
    """(ids, log-probabilities) of an answer to each context, in their order."""
    from runtime.engines import served

    return asyncio.run(served(engine, [engine.sample(each, sampling) for each in contexts]))


def scripts_with(*names: str) -> list[str]:
    """The scripts in the repository's root that define all these functions or classes, those of
    tomorrow included."""
    texts = {path.stem: path.read_text() for path in blocks.scripts(ROOT)}
    defines = {
        script: set(re.findall(r"^(?:async def|def|class) (\w+)", text, re.MULTILINE))
        for script, text in texts.items()
    }
    return [script for script in texts if defines[script] >= set(names)]


def text_of(node, lines: list[str]) -> str:
    """The lines of a node; ast.get_source_segment splits the whole text anew for each."""
    return "\n".join(lines[node.lineno - 1 : node.end_lineno])


def distinct(scripts: list[str]) -> list[str]:
    """The first of each set of scripts that differ in their imports, flags, play and main alone:
    what tests/blocks.py keeps equal byte for byte is tested once."""
    first = {}
    for script in scripts:
        text = (ROOT / f"{script}.py").read_text()
        lines, own = text.splitlines(), []
        for node in ast.parse(text).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Assign):
                if getattr(node, "name", "") not in ("Args", "main"):
                    own.append(text_of(node, lines))
        first.setdefault(tuple(own), script)
    return [*first.values()]


TRAINERS = [script for script in scripts_with("play", "main") if script != "warm_start"]
# evaluation tasks of an environment
PANEL = {"visual_sokoban": 128, "sokoban": 128, "webshop": 500, "sotopia": 128, "alfworld": 140}


def pytest_addoption(parser):
    parser.addoption("--on-cpu", action="store_true", help="-m gpu: on a CPU what can run there")
    parser.addoption("--gpu-model", default="", help="-m gpu: a directory, or a name on the hub")


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config):
    """Two processes, where pytest-xdist is installed and neither -n nor -s is given; -n 0: one. A
    card is for one."""
    if config.option.on_cpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    alone = (
        "PYTEST_XDIST_WORKER" in os.environ
        or config.option.markexpr == "gpu"
        or config.option.capture == "no"
        or config.option.collectonly
    )
    if config.pluginmanager.hasplugin("xdist") and config.option.numprocesses is None and not alone:
        config.option.numprocesses, config.option.dist = 2, "loadfile"  # a file's tests share runs
        config.option.loadscopereorder = False  # which would leave long files of few tests last


# What takes longest begins first, in this order, so that the two processes end together.
FIRST = """test_processes test_scripts test_checkpoints test_refusals test_ablations test_catalogue
test_viewer test_engines test_faults test_launch test_remote test_sweeps test_throughput""".split()


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: [*FIRST, item.path.stem].index(item.path.stem))


def pytest_terminal_summary(terminalreporter):
    """What the tests of a GPU have told, as a table."""
    lines = []
    for outcome in ("passed", "failed", "error", "skipped"):
        for report in terminalreporter.stats.get(outcome, ()):
            if "gpu" not in getattr(report, "keywords", ()):  # one of collecting has none
                continue
            test = report.nodeid.partition("::test_")[2]
            figures = [told for name, told in report.user_properties if name == "figure"]
            for name, shown, bound, holds in figures:
                verdict = ("yes" if holds else "**no**") if bound else "told"
                lines.append(f"| {test} | {name} | {shown} | {bound} | {verdict} |")
            if outcome == "skipped":
                why = str(report.longrepr[-1]).removeprefix("Skipped: ")
                lines.append(f"| {test} | not run: {why} | | | |")
            elif outcome != "passed" and all(figure[-1] for figure in figures):
                lines.append(f"| {test} | {outcome}, see above | | | **no** |")
    if lines:
        head = ["| test | what | figure | bound | holds |", f"|{'---|' * 5}"]
        terminalreporter.section("figures")
        terminalreporter.write_line("\n".join([*head, *lines]))


def environment(script: str) -> str:
    """The world of a script: istar_webshop_ablations is of webshop. textgame has no model of its
    own, so tests/test_textgames.py runs its scripts, and no other."""
    return next(world for world in (*PANEL, "textgame") if f"_{world}" in script)


def default_model(script: str) -> Path:
    """What --model is where it is not given."""
    return ROOT / "models" / f"tiny-{environment(script)}".replace("_", "-")


# Scripts that can be started with no flag; where a model is not made yet, its scripts are left to
# the tests of formulas.
READY = [script for script in TRAINERS if default_model(script).is_dir()]


def positions(script: str) -> int:
    """The longest sequence that the script's default model was made for."""
    config = json.loads((default_model(script) / "config.json").read_text())
    return config.get("text_config", config)["max_position_embeddings"]


def read_model(path):
    """The model of a directory, one that sees or one of words alone."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    seeing = "vision_config" in json.loads((Path(path) / "config.json").read_text())
    kind = AutoModelForImageTextToText if seeing else AutoModelForCausalLM
    return kind.from_pretrained(path)


@functools.cache
def load(script: str):
    """A script as a module."""
    spec = importlib.util.spec_from_file_location(script, ROOT / f"{script}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[script] = module  # dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module


def random_model(seed: int = 0, layers: int = 2, tied: bool = True):
    """A Qwen3 as the tiny one is, smaller, with weights wide enough that its log-probabilities
    differ."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        tie_word_embeddings=tied,
        initializer_range=0.3,
    )
    return Qwen3ForCausalLM(config).eval()


def network(model, optimizer=None, name: str = "policy"):
    """The model as a Network; without an optimizer nothing moves what trains now."""
    from runtime.networks import Network

    made = Network(name, model)
    made.optimizer = optimizer
    return made


def random_trajectories(seed=0, groups=3, size=4, history=False, longest=5):
    """Trajectories of unequal lengths with 0/1 outcomes; history: every step is a sequence of its
    own."""
    from runtime.data import Step, Trajectory

    rng, trajectories = random.Random(seed), []
    for group in range(groups):
        for member in range(size):
            ids, step_ids, starts, steps = [], [], [0], []
            for step in range(rng.randint(1, longest)):
                if history and step:
                    starts.append(len(ids))
                words, action = rng.randint(2, 9), rng.randint(1, 4)
                ids += [rng.randrange(VOCABULARY) for _ in range(words + action)]
                step_ids += [-1] * words + [step] * action
                steps.append(Step("", "", [0.0] * action))
            outcome = float(member % 2) if group else float(member > 0)
            trajectories.append(Trajectory(10 + group, ids, step_ids, outcome, steps, starts))
    return trajectories


RUN_ARGS = {  # the flags of the run that the functions look at
    "dtype": "float32",
    "micro_batch_tokens": 8192,
    "engine_memory": 1,
    "engine_gpu_share": 0.4,
    "trust_remote_code": False,
    "processes": 1,
    "eval_tasks": 4,
    "async_rollout": False,
    "engine": "hf",
}


def settings(**changes) -> SimpleNamespace:
    """The arguments that the functions of the scripts look at; those of the run are in run_args."""
    run_args = {name: changes.pop(name, value) for name, value in RUN_ARGS.items()}
    defaults = dict(temperature=1.0, max_grad_norm=1e9, minibatches=1, clip=0.2, ratio="step")
    defaults |= dict(beta=0.05, prm_ridge=0.0, pair_margin=0.0, engine_cap=2.0, as_published=())
    defaults |= dict(max_action_tokens=8, max_context_tokens=1024, history=0, seed=1)
    defaults |= dict(policy_lora_rank=0, step_reward="implicit")
    return SimpleNamespace(run_args=SimpleNamespace(**run_args), **defaults | changes)


@contextlib.contextmanager
def files_end_at(size: int):
    """No file may outgrow so many bytes: a disk that is full at this moment."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))


def free_port() -> str:
    """A port of this machine that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return str(listener.getsockname()[1])


def run_script(script: str, *flags, cwd, check: bool = True) -> subprocess.CompletedProcess:
    """A script of the repository's root in a process of its own, as a user starts it."""
    command = [sys.executable, str(ROOT / f"{script}.py"), *map(str, flags)]
    done = subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, env=os.environ, timeout=1800
    )
    assert not check or done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
    return done


def run_main(
    script: str, *flags, cwd, check: bool = True, curve: bool = False
) -> subprocess.CompletedProcess:
    """What run_script does, in this process: main() of the script, without the seconds in which a
    process of its own imports torch and transformers. What it says is captured, and what ends it
    is told as Python would; errors that nobody foresaw pass. curve: with curve.png, whose drawing
    takes a third of a tiny run."""
    import runtime.view.report as report

    command = [str(ROOT / f"{script}.py"), *map(str, flags)]
    said, warned, code = io.StringIO(), io.StringIO(), 0
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    draw = report.draw_curve if curve else lambda *_: None
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(warned):
        with contextlib.chdir(cwd), patch.object(sys, "argv", command):
            try:
                with patch.object(report, "draw_curve", draw):
                    load(script).main()
            except SystemExit as stop:
                code = stop.code
            finally:  # a script is the whole of its process
                for number, handler in before.items():
                    signal.signal(number, handler)
    if isinstance(code, str):
        warned.write(f"{code}\n")
        code = 1
    done = subprocess.CompletedProcess(command, code or 0, said.getvalue(), warned.getvalue())
    assert not check or not done.returncode, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
    return done
