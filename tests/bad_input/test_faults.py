"""Faults while a run is at work: a disk that fills, signals that come twice, W&B that is not
there, processes that die, an engine without memory."""

import contextlib
import errno
import itertools
import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import runtime.ending
from runtime.distributed import processes
from runtime.saving import checkpoints, files
from runtime.saving.checkpoints import kept

import pytest
from cases import SMALL, finished
from conftest import ROOT, files_end_at, free_port, load, run_main
from test_catalogue import lines_in, runs_in

SCRIPT = "rloo_sokoban"
FAULT = 60  # seconds: no process may hang longer


# ------------ a full disk ------------


def sizes() -> list[int]:
    """Shortly before the end of every file that a run writes: each is met once by a full disk."""
    run = finished(SCRIPT)
    whole = {path.stat().st_size for path in run.rglob("*") if path.is_file()}
    return sorted({max(0, size - 1) for size in whole} | {0, 100})


@pytest.mark.parametrize("resume", [False, True], ids=["a new run", "one that goes on"])
def test_a_disk_that_is_full_at_any_file(resume, tmp_path):
    """One line, no traceback, and every number that was written can be read."""
    tried = 0
    for size in sizes():
        home = tmp_path / str(size)
        (home / "runs").mkdir(parents=True)
        words = [*SMALL, "--iterations", "1", "--run-name", "base"]
        if resume:
            copy = ["cp", "-a", finished(SCRIPT), home / "runs" / "base"]
            subprocess.run(copy, check=True)
            words = [*SMALL, "--iterations", "3", "--resume", "runs/base"]
        before = lines_in(home)
        with files_end_at(size):
            done = run_main(SCRIPT, *words, cwd=home, check=False, curve=True)
        if done.returncode == 0:
            continue
        tried += 1
        said = done.stderr.strip()
        assert len(said.splitlines()) == 1 and "the disk is full" in said, (size, said)
        assert before <= lines_in(home), size
        rows = home / "runs/base/metrics.jsonl"
        kept = sorted(path.name for path in (home / "runs/base/checkpoints").glob("0*"))
        if kept:
            assert f"iteration {int(kept[-1])} is kept" in said and "--resume" in said
        elif rows.exists():
            assert "begin it again with --resume" in said
            assert all(map(json.loads, rows.read_text().splitlines()))
        else:
            assert "nothing is kept; start again" in said and not runs_in(home), (size, said)
    assert tried >= 10


def test_a_disk_that_is_full_as_a_prms_replay_is_written(tmp_path, monkeypatch):
    """torch.save's own error has no number, and names no file."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def full(item):
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
        return kept(item)

    monkeypatch.setattr(checkpoints, "kept", full)
    words = [*SMALL, "--iterations", "1", "--run-name", "base", "--prm-replay", "64"]
    try:
        done = run_main("istar_sokoban", *words, cwd=tmp_path, check=False)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    (said,) = done.stderr.strip().splitlines()
    assert said.startswith("stopped: the disk is full ([Errno 27] File too large: 'runs/base/")
    assert "lists.pt'): no iteration was finished; begin it again with --resume runs/base" in said


def test_a_batch_that_a_full_disk_does_not_take(tmp_path, monkeypatch):
    """The run still says why it stopped, and what is kept."""
    module = load(SCRIPT)

    def stops(*_):
        monkeypatch.setattr(runtime.ending, "replace_file", full)
        raise FloatingPointError("weights are not finite")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "policy_update", stops)
    words = [*SMALL, "--iterations", "1", "--run-name", "base"]
    done = run_main(SCRIPT, *words, cwd=tmp_path, check=False)
    (said,) = done.stderr.strip().splitlines()
    told = "stopped: weights are not finite; runs/base/batch-000001.json cannot be written: "
    assert said.startswith(told) and "--resume runs/base" in said


@pytest.mark.parametrize("rank, told", [(0, "stopped: no: nothing is kept"), (1, 1)])
def test_what_all_processes_end_with_the_first_one_says(rank, told, monkeypatch):
    monkeypatch.setattr(runtime.ending, "how_to_go_on", lambda path: ": nothing is kept")
    monkeypatch.setattr(processes, "rank", lambda: rank)
    with pytest.raises(SystemExit) as end:
        runtime.ending.stop(SimpleNamespace(path="runs/a"), SystemExit("stopped: no"))
    assert end.value.code == told


def test_a_full_disk_names_the_file(tmp_path, monkeypatch):
    """Also where Python's own error does not; what was there is there still, and nothing else."""
    path = tmp_path / "args.json"

    def full(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as disk, pytest.raises(OSError) as stop:
        disk.setattr(os, "fsync", full)
        files.append(path, ["{}"])
    assert str(stop.value) == f"[Errno 28] No space left on device: '{path}'"
    files.write_json(path, {"seed": 1})
    with files_end_at(100), pytest.raises(OSError) as stop:
        files.write_json(path, {"seed": "x" * 200})
    assert stop.value.errno == errno.EFBIG and "args.json" in stop.value.filename
    assert files.read_json(path) == {"seed": 1} and [*tmp_path.iterdir()] == [path]


# ------------ signals ------------


def start(command: list, home, **more) -> subprocess.Popen:
    """A process whose words go to home/said."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | more
    with (home / "said").open("w") as said:
        return subprocess.Popen(command, cwd=home, stdout=said, stderr=said, env=environment)


def wait_for(found, process, home, seconds: float = 300) -> None:
    end = time.monotonic() + seconds
    while not found():
        assert process.poll() is None and time.monotonic() < end, (home / "said").read_text()
        time.sleep(0.02)


def test_a_second_signal_shows_no_traceback(tmp_path):
    """--track writes W&B's offline files, which take a moment to close: the next signals come
    meanwhile."""
    words = [*SMALL, "--iterations", "9999", "--run-name", "base", "--track"]
    command = [sys.executable, "-W", "ignore", str(ROOT / f"{SCRIPT}.py"), *words]
    process = start(command, tmp_path, WANDB_MODE="offline")
    wait_for((tmp_path / "runs/base/policy").exists, process, tmp_path)
    process.send_signal(signal.SIGTERM)
    began, others = time.monotonic(), itertools.cycle([signal.SIGINT, signal.SIGTERM])
    while process.poll() is None and time.monotonic() < began + FAULT:
        time.sleep(0.05)
        process.send_signal(next(others))
    # by a signal while Python itself ends
    assert process.wait(1) in (1, -signal.SIGINT, -signal.SIGTERM)
    assert list((tmp_path / "wandb").glob("offline-run-*"))
    said = (tmp_path / "said").read_text()
    assert "stopped by SIGTERM: iteration" in said and "--resume runs/base" in said
    assert "Traceback" not in said and "Error" not in said, said


# ------------ W&B ------------


@pytest.mark.parametrize(
    "key",
    ["none", *(pytest.param(k, marks=pytest.mark.slow) for k in ("short", "a" * 40))],
    ids=len,
)
def test_tracking_without_wandb_goes_on_offline_and_says_so(key, tmp_path):
    """No key, and (slow) one that is none, and a server that does not answer: W&B's address here is
    a port that nobody listens on."""
    words = [*SMALL, "--iterations", "1", "--run-name", "base", "--track"]
    command = [sys.executable, "-W", "ignore", str(ROOT / f"{SCRIPT}.py"), *words]
    settings = {"WANDB_BASE_URL": f"http://127.0.0.1:{free_port()}", "HOME": str(tmp_path)}
    settings |= {"WANDB_MODE": "online", "WANDB_API_KEY": "" if key == "none" else key}
    process = start(command, tmp_path, **settings)
    wait_for((tmp_path / "runs/base/lock").exists, process, tmp_path)  # now W&B is asked
    began = time.monotonic()
    wait_for(lambda: "warning: --track" in (tmp_path / "said").read_text(), process, tmp_path)
    waited = time.monotonic() - began
    assert process.wait(FAULT) == 0
    said = (tmp_path / "said").read_text()
    assert "WANDB_MODE=offline" in said and "Traceback" not in said and key * 2 not in said
    assert waited < 15, waited
    assert list((tmp_path / "wandb").glob("offline-run-*"))
    assert len((tmp_path / "runs/base/metrics.jsonl").read_text().splitlines()) == 2


# ------------ several processes ------------


def ranks_of(launcher: subprocess.Popen) -> dict[int, int]:
    """{rank: process} of torchrun's workers."""
    found = {}
    children = f"/proc/{launcher.pid}/task/{launcher.pid}/children"
    for child in map(int, open(children).read().split()):
        with contextlib.suppress(OSError):
            words = open(f"/proc/{child}/environ").read().split("\0")
            found |= {int(w.removeprefix("RANK=")): child for w in words if w.startswith("RANK=")}
    return found


LOST = [(1, signal.SIGKILL)]
LOST += [
    pytest.param(*fault, marks=pytest.mark.slow)
    for fault in [(0, signal.SIGKILL), (0, signal.SIGTERM), (1, signal.SIGTERM)]
]


@pytest.mark.parametrize("rank, number", LOST)
def test_a_process_of_two_that_ends_ends_the_run_in_a_line(rank, number, tmp_path):
    """The other one says in seconds that it stops: because it lost this one, or because torchrun
    saw that first and sent it SIGTERM. What torchrun says of it is torchrun's."""
    words = [*SMALL, "--iterations", "9999", "--eval-every", "9999", "--run-name", "two"]
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run"]
    command += ["--nproc_per_node", "2", "--master_port", free_port(), ROOT / f"{SCRIPT}.py"]
    command = [*map(str, command), *words, "--processes", "2"]
    process = start(command, tmp_path, GLOO_SOCKET_IFNAME="lo")
    wait_for((tmp_path / "runs/two/policy").exists, process, tmp_path)
    os.kill(ranks_of(process)[rank], number)
    assert process.wait(FAULT) != 0
    said = (tmp_path / "said").read_text()
    ours, _, _ = said.partition("torch/distributed/run.py")  # torchrun's own traceback begins so
    lost, told = ": another process of this run ended", " by SIGTERM"
    assert re.search(f"\nstopped({lost}|{told}): iteration", said), said
    assert "--resume runs/two" in said and f"{SCRIPT}.py" not in ours.split("stopped")[1]


# ------------ vLLM ------------


@pytest.mark.slow
def test_an_engine_without_memory_or_with_a_model_it_cannot_compute(tmp_path):
    """vLLM asks for more than is free; and it has no attention of this width."""
    pytest.importorskip("vllm")
    from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3ForCausalLM

    tiny = ROOT / "models" / "tiny-sokoban"
    config = AutoModelForCausalLM.from_pretrained(tiny).config
    config.head_dim = 16
    Qwen3ForCausalLM(config).save_pretrained(tmp_path / "narrow")
    AutoTokenizer.from_pretrained(tiny).save_pretrained(tmp_path / "narrow")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**30
    for words, told in {
        ("--engine-memory", str(memory)): "--engine vllm: vLLM does not start",
        ("--model", "narrow"): "stopped: the engine failed twice",
    }.items():
        command = [sys.executable, "-W", "ignore", str(ROOT / f"{SCRIPT}.py"), *SMALL, *words]
        process = start([*command, "--engine", "vllm", "--iterations", "1"], tmp_path)
        assert process.wait(2 * FAULT) == 1
        said = (tmp_path / "said").read_text()
        assert told in said.splitlines()[-1] and "Traceback" not in said, said
        assert not runs_in(tmp_path)


def test_memory_that_runs_out_ends_the_run_in_a_line(tmp_path, monkeypatch):
    """As torch says it on a CPU, in the third iteration."""
    from runtime.engines.transformers import TransformersEngine

    generate, calls = TransformersEngine.generate, []
    metrics = tmp_path / "runs/base/metrics.jsonl"

    def runs_out(self, *args):
        calls.append(1)
        if metrics.exists() and metrics.read_text().count("\n") == 3:  # the start, 1 and 2
            raise RuntimeError("[enforce fail at alloc_cpu.cpp:124] . can't allocate memory: 2 TB")
        return generate(self, *args)

    monkeypatch.setattr(TransformersEngine, "generate", runs_out)
    words = [*SMALL, "--iterations", "9", "--run-name", "base"]
    done = run_main(SCRIPT, *words, cwd=tmp_path, check=False)
    (said,) = done.stderr.strip().splitlines()
    assert said.startswith("stopped: out of memory: iteration 2 is kept in runs/base")
    assert "--micro-batch-tokens" in said and calls
