"""--async-rollout: the next rollout is sampled by servers while the trainer works."""

import asyncio
import gc
import json
import os
import signal
import threading
import time

from runtime.engines import EngineError, servers

import pytest
import torch
from conftest import ROOT, load, run_main
from test_processes import launch
from test_remote import SCRIPT, SMALL, Fake, listening

WORDS = [*SMALL, "--learning-rate", "0.01", "--async-rollout"]
WAITS = 60.0  # seconds, of what has to happen


class Watching(Fake):
    """A server that keeps which weights each of its answers is of. held: it answers nothing while
    this is set, as one that is slow."""

    def __init__(self):
        super().__init__()
        self.open, self.most_open, self.versions, self.order = 0, [], {}, []
        self.held, self.ends = threading.Event(), False

    def answer(self, path, body):
        if path == "/collective_rpc":  # new weights
            self.most_open.append(self.open)
            self.order.append(body["args"][0])
        if path != "/inference/v1/generate":
            return super().answer(path, body)
        self.open += 1
        while self.held.is_set() and not self.ends:
            time.sleep(0.01)
        if self.ends:
            return None, None
        status, found = super().answer(path, body)
        self.open -= 1
        if status == 200:
            logprobs = found["choices"][0]["logprobs"]["content"]
            self.versions[tuple(each["logprob"] for each in logprobs)] = len(self.order)
        return status, found

    def updates_of(self, trajectories) -> set[int]:
        """How often the server had got weights when it sampled these; 1: the initial policy."""
        return {
            self.versions[tuple(step.engine_logprobs)] for t in trajectories for step in t.steps
        }


@pytest.fixture
def watching(monkeypatch):
    """(a server that watches, its address)"""
    monkeypatch.setattr(servers, "PAUSE", 0.05)
    monkeypatch.setattr(load(SCRIPT), "rloo_advantages", lambda o, _: torch.linspace(-1, 1, len(o)))
    fake = Watching()
    with listening(fake) as url:
        yield fake, url
        fake.ends = True


def wait_until(holds) -> None:
    end = time.monotonic() + WAITS
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.005)


def threads_that_play() -> list:
    return [t for t in threading.enumerate() if t.name.startswith("ThreadPoolExecutor")]


def beside_updates(monkeypatch, function) -> None:
    """Call function() at the beginning of every update of the policy."""
    module = load(SCRIPT)
    real = module.policy_update
    monkeypatch.setattr(module, "policy_update", lambda *given: (function(), real(*given))[1])


def rows_of(home) -> list[dict]:
    return [json.loads(row) for row in (home / "runs/base/metrics.jsonl").read_text().splitlines()]


def test_a_rollout_is_sampled_one_update_behind_while_the_trainer_works(
    watching, tmp_path, monkeypatch
):
    fake, url = watching
    seen, counts = [], []
    real = load(SCRIPT).Run.log_episodes

    def log_episodes(run, kind, trajectories):
        seen.append((kind, run.iteration, fake.updates_of(trajectories)))
        real(run, kind, trajectories)

    def works():
        """Until the server has answered something that was asked meanwhile, but in the last one."""
        counts.append(len(fake.versions))
        if len(counts) < 4:
            wait_until(lambda: len(fake.versions) > counts[-1])

    monkeypatch.setattr(load(SCRIPT).Run, "log_episodes", log_episodes)
    beside_updates(monkeypatch, works)
    words = [*WORDS, "--engine-url", url, "--eval-every", "2", "--iterations"]
    run_main(SCRIPT, *words, "4", cwd=tmp_path)
    trained = {iteration: weights for kind, iteration, weights in seen if kind == "train"}
    assert trained == {1: {1}, 2: {1}, 3: {2}, 4: {3}}  # the policy is number t in iteration t
    evaluated = {iteration: weights for kind, iteration, weights in seen if kind == "eval"}
    assert evaluated == {0: {1}, 2: {3}, 4: {5}}  # the newest
    assert fake.most_open == [0] * 5  # no weights change under a request
    gaps = [row["policy/engine_gap"] for row in rows_of(tmp_path)[1:]]
    assert gaps[0] < 1e-4 < 1e-3 < min(gaps[1:])

    seen.clear()  # taken up, the first iteration plays its tasks at once
    before = len(fake.order)
    run_main(SCRIPT, *words, "6", "--resume", "runs/base", cwd=tmp_path)
    assert seen[0] == ("train", 5, {before + 1}) and seen[1] == ("train", 6, {before + 1})
    assert rows_of(tmp_path)[5]["policy/engine_gap"] < 1e-4
    assert not threads_that_play()


def test_the_time_of_a_rollout_is_what_the_trainer_waits_for_it(watching, tmp_path, monkeypatch):
    fake, url = watching

    def waits():
        if not begun:
            fake.held.set()
            threading.Timer(1.5, fake.held.clear).start()
        begun.append(1)

    begun = []
    beside_updates(monkeypatch, waits)
    run_main(SCRIPT, *WORDS, "--engine-url", url, cwd=tmp_path)
    first, last = rows_of(tmp_path)[1:]
    assert first["time/rollout"] > 1.0 > last["time/rollout"]
    assert first["time/sync"] < first["time/rollout"]


def ends_in_one_line(home, url) -> str:
    done = run_main(SCRIPT, *WORDS, "--engine-url", url, cwd=home, check=False)
    (line,) = done.stderr.strip().splitlines()
    assert done.returncode == 1 and "Traceback" not in done.stdout
    assert line.endswith("no iteration was finished; begin it again with --resume runs/base")
    wait_until(lambda: not threads_that_play())  # for which the interpreter's end waits
    gc.collect()
    return line


@pytest.mark.parametrize("when", ("at its beginning", "later"))
@pytest.mark.parametrize("error", (EngineError("it broke"), SystemExit("stopped: it broke")))
def test_what_ends_a_rollout_in_the_thread_ends_the_run_in_one_line(
    error, when, watching, tmp_path, monkeypatch, caplog
):
    module, played = load(SCRIPT), []
    real = module.play

    async def play(*given):
        played.append(1)
        if len(played) <= 6:  # two of the panel, and the four that are played at once
            return await real(*given)
        if when == "later":
            await asyncio.sleep(0.1)
        raise error

    monkeypatch.setattr(module, "play", play)
    assert ends_in_one_line(tmp_path, watching[1]).startswith("stopped: it broke: ")
    assert [record.getMessage() for record in caplog.records] == []


@pytest.mark.parametrize("number", (signal.SIGINT, signal.SIGTERM))
@pytest.mark.parametrize("when", ("in an update", "while the trainer waits"))
def test_a_signal_ends_a_run_at_once_while_a_rollout_is_played(
    number, when, watching, tmp_path, monkeypatch, caplog
):
    """The server does not answer any more."""
    fake, url = watching
    sent = []

    def sends():
        fake.held.set()
        sent.append(time.monotonic())
        if when == "in an update":
            os.kill(os.getpid(), number)
        else:
            threading.Timer(0.5, os.kill, (os.getpid(), number)).start()

    beside_updates(monkeypatch, sends)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        line = ends_in_one_line(tmp_path, url)
    finally:
        signal.signal(signal.SIGINT, before)
    by = " by SIGTERM" if number == signal.SIGTERM else ""
    assert line.startswith(f"stopped{by}: ") and time.monotonic() < sent[0] + 10
    assert [record.getMessage() for record in caplog.records] == []


def test_it_needs_servers(tmp_path):
    done = run_main(SCRIPT, *WORDS, cwd=tmp_path, check=False)
    (line,) = done.stderr.splitlines()
    assert line == "--async-rollout True: it needs --engine-url, servers that sample meanwhile"


@pytest.mark.slow
def test_two_processes_take_weights_when_both_have_played(watching, tmp_path):
    fake, url = watching
    command = [ROOT / f"{SCRIPT}.py", *WORDS, "--iterations", "4", "--processes", "2"]
    command += ["--group-size", "8", "--max-steps", "4"]
    launch("torchrun", *command, "--engine-url", url, cwd=tmp_path)
    assert fake.most_open == [0] * 5
    gaps = [row["policy/engine_gap"] for row in rows_of(tmp_path)[1:]]
    assert gaps[0] < 1e-4 and max(gaps) > 1e-3
