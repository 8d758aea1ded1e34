"""--engine-url: rollouts from vLLM servers elsewhere.

Most tests ask a server of this file, which speaks vLLM's protocol, computes with transformers, and
can be killed. The slow ones start vLLM's own server.
"""

import asyncio
import contextlib
import http.server
import json
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

from runtime.engines import EngineError, servers
from runtime.engines.servers import EXTENSION, ServerEngine

import loopback
import pytest
import torch
from conftest import ROOT, TINY, answers, free_port, run_main, settings
from peft import PeftModel
from safetensors.torch import load_file
from test_engines import (
    STOP,
    adapted,
    contexts_of,
    episode,
    gap,
    move,
    sampling_of,
    slow_partner,
    tiny,
    together,
)
from test_processes import launch

SMALL = """--tasks-per-iteration 2 --group-size 2 --eval-tasks 2 --eval-samples 1 --max-steps 2
--iterations 2 --max-action-tokens 12 --run-name base""".split()
SCRIPT = "rloo_sokoban"


# ------------ a server ------------


class Fake:
    """What vLLM's server does, as far as the engine asks for it: the weights in it are those that
    it read last, a prefix is read again only under another salt, and a name that was loaded once
    and not unloaded is refused."""

    lock = threading.Lock()  # of all of them: transformers reads one model at a time

    def __init__(self):
        self.model, self.version, self.adapters = tiny(), "default", {}
        self.asked, self.paths, self.prefixes = [], [], {}  # samples, other calls, salt -> model
        self.wrong = lambda path, body: None  # an answer (status, body) in place of the right one
        self.config = {
            "model_config": {
                "logprobs_mode": "processed_logprobs",
                "dtype": "torch.float32",
                "max_model_len": 1024,
            },
            "lora_config": {"max_lora_rank": 16},
            "parallel_config": {"worker_extension_cls": EXTENSION},
        }

    def answer(self, path: str, body: dict) -> tuple[int, object]:
        with self.lock:
            if (wrong := self.wrong(path, body)) is not None:
                return wrong
            if path == "/inference/v1/generate":
                return self.sample(body)
            if path == "/health":
                return 200, {}
            self.paths.append((path, body))
            if path.startswith("/server_info"):
                return 200, {"vllm_config": self.config}
            if path == "/collective_rpc":
                assert body["method"] == "take_policy"
                return self.take(Path(body["args"][0]))
            if path == "/get_world_size":
                return 200, {"world_size": 2}
            if path == "/update_weight_version":
                self.version = body["new_version"]
                return 200, {"success": True}
            name = body["lora_name"]
            if path == "/v1/unload_lora_adapter":
                return (200, {}) if self.adapters.pop(name, None) else (404, {})
            assert path == "/v1/load_lora_adapter"
            if name in self.adapters:
                return 400, {"error": {"message": f"{name} is loaded"}}
            merged = PeftModel.from_pretrained(self.model, body["lora_path"]).merge_and_unload()
            self.adapters[name], self.model = merged, tiny()
            return 200, {}

    def take(self, path: Path) -> tuple[int, object]:
        if not path.is_dir():
            return 500, {"error": {"message": f"no such directory: {path}"}}
        weights = {}
        for file in path.glob("*.safetensors"):
            weights |= load_file(file)
        self.has(weights)
        return 200, {"results": [None]}

    def has(self, weights: dict) -> None:
        """These are the server's weights now."""
        self.model = tiny()
        missing, unknown = self.model.load_state_dict(weights, strict=False)
        assert not unknown and set(missing) <= {"lm_head.weight"}, (missing, unknown)

    @torch.no_grad()
    def sample(self, body: dict) -> tuple[int, object]:
        model, limits = self.model, body["sampling_params"]
        if name := body.get("model"):
            if name not in self.adapters:
                return 404, {"error": {"message": f"no model {name}"}}
            model = self.adapters[name]
        if salt := body.get("cache_salt"):
            model = self.prefixes.setdefault(salt, model)
        self.asked.append(body)
        generator = torch.Generator().manual_seed(limits.get("seed", 0))
        ids, content = list(body["token_ids"]), []
        while len(content) < limits["max_tokens"]:
            logits = model(input_ids=torch.tensor([ids])).logits[0, -1].float()
            logprobs = (logits / (limits.get("temperature") or 1.0)).log_softmax(-1)
            token = logprobs.argmax()
            if limits.get("temperature"):
                token = logprobs.exp().multinomial(1, generator=generator)[0]
            ids.append(int(token))
            content.append({"token_id": ids[-1], "logprob": float(logprobs[token])})
            if ids[-1] in limits.get("stop_token_ids", ()):
                break
        choice = {"index": 0, "token_ids": ids[len(body["token_ids"]) :]}
        choice |= {"logprobs": {"content": content}}
        choice |= {"weight_versions": [{"start": 0, "end": 1, "version": self.version}]}
        return 200, {"choices": [choice]}


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers.get("content-length", 0))) or "{}")
        status, found = self.server.fake.answer(self.path, body)
        if status is None:  # the process dies
            self.close_connection = True
            return
        content = found if isinstance(found, bytes) else json.dumps(found).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_POST

    def log_message(self, *_):
        pass


class Listener(http.server.ThreadingHTTPServer):
    daemon_threads, request_queue_size = True, 128

    def get_request(self):
        self.connections = [*vars(self).get("connections", []), super().get_request()]
        return self.connections[-1]

    def server_close(self):
        """As the kernel does it for a process that ends."""
        super().server_close()
        for connection, _ in vars(self).get("connections", []):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, *_):
        pass


@contextlib.contextmanager
def listening(fake, port: int = 0):
    """The fake at an address of this machine."""
    server = Listener(("127.0.0.1", port), Handler)
    server.fake = fake
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture
def fake():
    """(a fake server, its address)"""
    fake = Fake()
    with listening(fake) as url:
        yield fake, url


@pytest.fixture(autouse=True)
def quickly(monkeypatch):
    monkeypatch.setattr(servers, "PAUSE", 0.05)
    monkeypatch.setattr(servers, "SEEN_WITHIN", 0.2)


def args_for(*urls, rank: int = 0, **changes) -> SimpleNamespace:
    args = settings(policy_lora_rank=rank, **changes)
    args.run_args.engine_url = urls
    return args


def engine_of(args, home: Path) -> ServerEngine:
    return ServerEngine(home / "engine", str(TINY), [STOP], args)


# ------------ samples and weights ------------


def follows(engine, model, args, updates: int, most: float) -> None:
    """The servers have the trainer's log-probabilities after each of these updates."""
    contexts = contexts_of(model)
    for update in range(updates):
        if update:
            move(model, update)
            assert gap(engine, model, args, contexts) > 1e-2  # the update is felt at all
        engine.load(model)
        assert gap(engine, model, args, contexts) < most


@pytest.mark.parametrize("rank", (0, 4), ids=("whole", "LoRA"))
def test_log_probabilities_are_the_trainers_after_every_update(rank, fake, tmp_path):
    model, args = tiny(), args_for(fake[1], rank=rank)
    if rank:
        model = adapted(model, "policy", "prm")
    engine, stale = engine_of(args, tmp_path), engine_of(args, tmp_path)
    for update in range(3):
        if update:
            move(model, update)
        engine.load(model)
        assert gap(engine, model, args, contexts_of(model)) < 1e-4
    contexts = contexts_of(model)
    assert len({body["cache_salt"] for body in fake[0].asked if "cache_salt" in body}) == 3
    (kept,) = (tmp_path / "engine").iterdir()  # the last weights alone
    if rank:
        loaded = [body["lora_name"] for path, body in fake[0].paths if "/load_" in path]
        assert len({*loaded}) == 3 and [*fake[0].adapters] == [kept.name] == loaded[-1:]
        assert sum(path == "/collective_rpc" for path, _ in fake[0].paths) == 1  # --model, once

    # the fake's prefix cache keeps what old weights computed: under the same salt it would be found
    stale.load(model)
    (server,) = stale.servers
    salt = server.salt
    answers(stale, contexts, sampling_of())
    move(model, 4)
    stale.load(model)
    assert gap(stale, model, args, contexts) < 1e-4
    server.salt = salt
    assert gap(stale, model, args, contexts) > 1e-2


def test_a_run_is_taken_up_on_a_server_that_another_run_has_used(fake, tmp_path):
    """A LoRA policy is an adapter on --model, whatever weights the server has had."""
    other = tiny()
    move(other, 9)
    engine_of(args_for(fake[1]), tmp_path / "a").load(other)
    args, model = args_for(fake[1], rank=4), adapted(tiny(), "policy")
    engine = engine_of(args, tmp_path / "b")
    engine.load(model)
    assert gap(engine, model, args, contexts_of(model)) < 1e-4


def test_servers_share_the_load_and_seeds_make_samples_repeat(tmp_path):
    fakes, model = [Fake(), Fake(), Fake()], tiny()
    contexts = contexts_of(model) * 2
    with contextlib.ExitStack() as stack:
        urls = [stack.enter_context(listening(fake)) for fake in fakes]
        samples = []
        for addresses in (urls, urls[:1]):
            engine = engine_of(args_for(*addresses), tmp_path)
            engine.load(model)
            torch.manual_seed(3)
            before = [len(fake.asked) for fake in fakes]
            samples.append(answers(engine, contexts, sampling_of()))
            shares = [len(fake.asked) - n for fake, n in zip(fakes, before)]
            assert shares == ([4, 4, 4] if addresses is urls else [12, 0, 0])
    assert [ids for ids, _ in samples[0]] == [ids for ids, _ in samples[1]]
    assert samples[0][0] != samples[0][6]  # equal contexts have seeds of their own
    assert answers(engine, [], sampling_of()) == []


def test_a_request_says_how_to_sample(fake, tmp_path):
    engine = engine_of(args_for(fake[1]), tmp_path)
    engine.load(tiny())
    answers(engine, [[5, 6]], sampling_of(temperature=0.6, top_p=0.9, top_k=3, max_tokens=2))
    asked = fake[0].asked[-1]["sampling_params"]
    seed = asked.pop("seed")
    assert 0 <= seed < 2**31
    expected = dict(temperature=0.6, top_p=0.9, top_k=3, max_tokens=2, stop_token_ids=[STOP])
    assert asked == expected | dict(logprobs=0, detokenize=False)
    answers(engine, [[5, 6]], sampling_of(stop_token_ids=[7]))
    assert fake[0].asked[-1]["sampling_params"]["stop_token_ids"] == [7]


def test_an_episode_stays_with_the_server_that_has_its_beginning(fake, tmp_path):
    """Its next turns are asked of the same one, whoever has fewer requests by a few."""
    other = Fake()
    with listening(other) as url:
        engine = engine_of(args_for(fake[1], url), tmp_path)
        engine.load(tiny())
        together(engine, *(episode(engine, 3) for _ in range(6)))
        homes = [{tuple(body["token_ids"]) for body in each.asked[1:]} for each in (fake[0], other)]
        assert [len(each.asked) - 1 for each in (fake[0], other)] == [12, 12]
        for ours, theirs in (homes, homes[::-1]):
            for context in (context for context in ours if len(context) > 20):
                assert any(context[: len(shorter)] == shorter for shorter in ours - {context})
                assert not any(context[: len(c)] == c for c in theirs if len(c) > 20)


def test_a_slow_partner_does_not_hinder_others(fake, tmp_path):
    engine = engine_of(args_for(fake[1]), tmp_path)
    engine.load(tiny())
    assert slow_partner(engine, 0.0) < 0.95


def test_a_rollout_that_is_cancelled_loses_no_server(fake, tmp_path, capsys):
    engine = engine_of(args_for(fake[1]), tmp_path)
    engine.load(tiny())
    expected = len(fake[0].asked) + 1

    async def stops():
        while len(fake[0].asked) < expected:
            await asyncio.sleep(0.001)
        raise KeyError

    with pytest.raises(KeyError):
        together(engine, *(engine.sample([7] * 50, sampling_of()) for _ in range(20)), stops())
    assert engine.restarts == 0 and "lost" not in capsys.readouterr().out
    assert gap(engine, tiny(), engine.args, contexts_of(tiny())) < 1e-4
    assert engine.servers[0].in_flight == 0


# ------------ servers that are lost ------------


def dies_after(fake, number: int) -> None:
    """From so many samples on it hangs up, as a process that was killed."""

    def wrong(path, body):
        return (None, None) if len(fake.asked) >= number else None

    fake.wrong = wrong


def test_a_server_that_is_lost_and_comes_back_gets_the_weights_and_nothing_is_lost(
    tmp_path, capsys
):
    first, second, model, args = Fake(), Fake(), tiny(), args_for()
    move(model, 1)
    port = int(free_port())
    with listening(first, port) as url:
        args.run_args.engine_url = (url,)
        engine = engine_of(args, tmp_path)
        engine.load(model)
        torch.manual_seed(0)
        expected = answers(engine, contexts_of(model), sampling_of())
        torch.manual_seed(0)
        dies_after(first, len(first.asked) + 3)
        found = []
        rollout = threading.Thread(
            target=lambda: found.extend(answers(engine, contexts_of(model), sampling_of()))
        )
        rollout.start()
        while first.wrong("", {}) is None:
            time.sleep(0.01)
    time.sleep(0.3)
    assert rollout.is_alive() and not found
    with listening(second, port):
        rollout.join(60)
    assert found == expected and engine.restarts == 1
    assert second.version == engine.weights.version
    assert 3 <= len(second.asked) < len(expected)  # the others had been answered
    said = capsys.readouterr().out.splitlines()
    assert "it is waited for" in said[0] and "is back" in said[1] and len(said) == 2


def test_a_server_whose_engine_died_is_waited_for(fake, tmp_path):
    """It answers everything with 500 until it ends, the new weights too."""
    server, model = fake[0], tiny()
    engine = engine_of(args_for(fake[1]), tmp_path)
    engine.load(model)
    begin, message = time.monotonic(), {"error": "EngineCore encountered an issue"}

    def wrong(path, body):
        return (500, message) if time.monotonic() < begin + 1 else None

    server.wrong = wrong
    assert gap(engine, model, engine.args, contexts_of(model)) < 1e-4
    assert engine.restarts == 1 and time.monotonic() > begin + 1


def test_another_server_takes_over_what_a_lost_one_owed(fake, tmp_path):
    lost, model = Fake(), tiny()
    with listening(lost) as url:
        engine = engine_of(args_for(fake[1], url), tmp_path)
        engine.load(model)
        dies_after(lost, 2)
        torch.manual_seed(0)
        samples = answers(engine, contexts_of(model), sampling_of())
        assert engine.restarts == 1 and all(samples)
        began = time.monotonic()
        answers(engine, contexts_of(model), sampling_of())
        assert time.monotonic() - began < 20


@pytest.mark.parametrize("rank", (0, 4), ids=("whole", "LoRA"))
def test_a_server_that_hangs_delays_one_update_alone(rank, fake, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(servers, "HEALTHY_WITHIN", 3.0)
    hung, model, goes_on = Fake(), tiny(), threading.Event()
    model = adapted(model, "policy") if rank else model
    with listening(hung) as url:
        engine = engine_of(args_for(fake[1], url, rank=rank), tmp_path)
        engine.load(model)
        hung.lock = threading.Lock()
        hung.wrong = lambda path, body: goes_on.wait() and (500, {})
        took = []
        try:
            for update in (1, 2, 3):
                move(model, update)
                began = time.monotonic()
                engine.load(model)
                took.append(time.monotonic() - began)
            assert took[0] > 3.0 > 2 * max(took[1:]), took
            assert gap(engine, model, engine.args, contexts_of(model)) < 1e-4
        finally:
            goes_on.set()
    assert f"{url} hangs, or took no weights in 600 s; it is waited for" in capsys.readouterr().out


def test_a_server_that_hangs_does_not_hinder_another_that_comes_back(fake, tmp_path, monkeypatch):
    """Until the end of the update both were away: one hangs, one does not answer for a second."""
    monkeypatch.setattr(servers, "BACK_WITHIN", 2.0)
    monkeypatch.setattr(servers, "HEALTHY_WITHIN", 0.2)
    hung, model, goes_on = Fake(), tiny(), threading.Event()
    with listening(hung) as url:
        engine = engine_of(args_for(fake[1], url), tmp_path)
        engine.load(model)
        hung.lock, back = threading.Lock(), time.monotonic() + 1
        hung.wrong = lambda path, body: goes_on.wait() and (500, {})
        fake[0].wrong = lambda path, body: (500, {}) if time.monotonic() < back else None
        move(model, 1)
        try:
            engine.load(model)
            assert gap(engine, model, engine.args, contexts_of(model)) < 1e-4
        finally:
            goes_on.set()


def test_a_server_that_came_back_unseen_does_not_sample_with_its_own_weights(fake, tmp_path):
    for rank in (0, 4):
        args, model = args_for(fake[1], rank=rank), tiny()
        model = adapted(model, "policy") if rank else model
        move(model, 1)
        engine = engine_of(args, tmp_path)
        engine.load(model)
        fake[0].__init__()  # between two calls
        assert gap(engine, model, args, contexts_of(model)) < 1e-4
        assert engine.restarts == 1


def test_two_runs_on_one_server_do_not_get_each_others_weights(fake, tmp_path):
    args, model, other = args_for(fake[1]), tiny(), tiny()
    move(other, 1)
    ours, theirs = engine_of(args, tmp_path / "a"), engine_of(args, tmp_path / "b")
    ours.load(model)
    theirs.load(other)
    for engine, policy in ((ours, model), (theirs, other), (ours, model)):
        assert gap(engine, policy, args, contexts_of(model)) < 1e-4


def test_servers_that_stay_away_end_the_run_in_one_line_and_it_goes_on_later(tmp_path, monkeypatch):
    monkeypatch.setattr(servers, "BACK_WITHIN", 0.5)
    fake = Fake()
    with listening(fake) as url:
        words = [*SMALL, "--engine-url", url]
        run_main(SCRIPT, *words, "--iterations", "1", cwd=tmp_path)
        dies_after(fake, len(fake.asked) + 6)
        more = ["--resume", "runs/base", "--iterations", "3"]
        done = run_main(SCRIPT, *words, *more, cwd=tmp_path, check=False)
        (line,) = done.stderr.strip().splitlines()
        assert line.startswith(f"stopped: {url} does not answer (") and "0 s: iteration 1" in line
        assert line.endswith("--resume runs/base") and not (tmp_path / "runs/base/engine").exists()
        assert "warning" in done.stdout and "Traceback" not in done.stdout
    with listening(Fake()) as url:  # at another address
        words[-1] = url
        run_main(SCRIPT, *words, *more, cwd=tmp_path)
    rows = (tmp_path / "runs/base/metrics.jsonl").read_text().splitlines()
    rows = [json.loads(row) for row in rows]
    assert [row["iteration"] for row in rows] == [0, 1, 2, 3]
    assert all(row["policy/engine_gap"] < 1e-4 for row in rows[1:])


@pytest.mark.parametrize("words", ([], ["--policy-lora-rank", "4"]), ids=("whole", "LoRA"))
def test_a_run_with_servers_samples_what_a_run_without_samples(words, fake, tmp_path):
    """Greedily before training, where nothing is drawn."""
    greedy = [*SMALL, "--eval-temperature", "0", "--eval-tasks", "4", *words]
    run_main(SCRIPT, *greedy, "--engine-url", fake[1], cwd=tmp_path)
    (tmp_path / "other").mkdir()
    run_main(SCRIPT, *greedy, "--engine", "hf", cwd=tmp_path / "other")
    apart, inside = (
        json.loads((home / "runs/base/metrics.jsonl").read_text().splitlines()[0])
        for home in (tmp_path, tmp_path / "other")
    )
    assert apart.keys() == inside.keys()
    assert all(apart[name] == inside[name] for name in apart if name.startswith("eval/"))
    assert not (tmp_path / "runs/base/engine").exists()


@pytest.mark.parametrize(
    "words",
    [[], pytest.param(["--policy-lora-rank", "4"], marks=pytest.mark.slow)],
    ids=("whole", "LoRA"),
)
def test_two_processes_share_two_servers(words, fake, tmp_path):
    """The first one leaves the weights; both sample, each with both servers."""
    other = Fake()
    with listening(other) as url:
        command = [ROOT / f"{SCRIPT}.py", *SMALL, *words, "--processes", "2"]
        launch("torchrun", *command, "--engine-url", fake[1], url, cwd=tmp_path)
    rows = (tmp_path / "runs/base/metrics.jsonl").read_text().splitlines()
    rows = [json.loads(row) for row in rows]
    assert [row["iteration"] for row in rows] == [0, 1, 2]
    assert all(row["policy/engine_gap"] < 1e-4 for row in rows[1:])
    for server in (fake[0], other):
        taken = [body for path, body in server.paths if "/load_" in path or "collective" in path]
        assert len(taken) == (4 if words else 3)  # three updates, and once --model
        salts = {body["cache_salt"] for body in server.asked if "cache_salt" in body}
        assert len(salts) >= 3


# ------------ what is refused ------------


def refused(*words, home) -> str:
    """The one line that a run ends with before it begins."""
    done = run_main(SCRIPT, *SMALL, *words, cwd=home, check=False)
    (line,) = done.stderr.strip().splitlines()
    assert done.returncode == 1 and not list(home.glob("runs/*"))
    return line


def test_a_server_that_is_down_at_the_start_is_one_line(tmp_path):
    url = f"http://127.0.0.1:{free_port()}"
    line = refused("--engine-url", url, home=tmp_path)
    assert line.startswith(f"--engine-url {url}: {url} does not answer (ClientConnectorError)")


def test_a_server_that_was_not_started_as_it_has_to_be_is_told_how(fake, tmp_path):
    server, url = fake
    server.wrong = lambda path, body: (404, b"no") if path.startswith("/server_info") else None
    line = refused("--engine-url", url, home=tmp_path)
    assert "status 404" in line and "VLLM_SERVER_DEV_MODE=1" in line

    message = {"error": {"message": "Scale-out endpoints are disabled.\x1b[2J"}}
    server.wrong = lambda path, body: (403, message) if "generate" in path else None
    line = refused("--engine-url", url, home=tmp_path)
    assert "Scale-out" in line and "--enable-scale-out" in line and line.isprintable()

    server.wrong = lambda path, body: None
    server.config["model_config"] |= {"logprobs_mode": "raw_logprobs", "max_model_len": 512}
    server.config["lora_config"], server.config["parallel_config"] = None, {}
    words = ["--dtype", "bfloat16", "--policy-lora-rank", "8"]
    line = refused("--engine-url", url, *words, home=tmp_path)
    assert line.endswith(
        "has to be started with --logprobs-mode processed_logprobs --dtype bfloat16 "
        "--max-model-len 1024 --enable-lora --max-lora-rank 8 "
        f"--worker-extension-cls {EXTENSION}"
    )


def test_weights_that_a_server_does_not_see_are_named(fake, tmp_path, monkeypatch):
    monkeypatch.setattr(Fake, "take", lambda self, path: (500, {"error": "nothing there"}))
    done = run_main(SCRIPT, *SMALL, "--engine-url", fake[1], cwd=tmp_path, check=False)
    (line,) = done.stderr.strip().splitlines()
    assert (
        "status 500" in line
        and "nothing there" in line
        and "--runs-dir under the same path" in line
    )


GOOD = {"token_ids": [5], "logprobs": {"content": [{"logprob": -1.0}]}, "weight_versions": []}


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"\xff\xfe",
        b"[" * 200_000,
        7,
        {},
        {"choices": []},
        {"choices": [{}]},
        {"choices": [GOOD | {"token_ids": []}]},
        {"choices": [GOOD | {"token_ids": [1.5]}]},
        {"choices": [GOOD | {"token_ids": [-1]}]},
        {"choices": [GOOD | {"token_ids": [5] * 99}]},
        {"choices": [GOOD | {"logprobs": None}]},
        {"choices": [GOOD | {"logprobs": {"content": [{"logprob": "x"}]}}]},
        {"choices": [GOOD | {"logprobs": {"content": [{"logprob": float("nan")}]}}]},
        {"choices": [GOOD | {"logprobs": {"content": [{"logprob": 3.0}]}}]},
        {"choices": [GOOD | {"weight_versions": 3}]},
        {"choices": [GOOD | {"weight_versions": [3]}]},
    ],
    ids=lambda answer: repr(answer)[:40],
)
def test_what_is_no_sample_is_an_error(answer, fake, tmp_path):
    engine = engine_of(args_for(fake[1]), tmp_path)
    engine.load(tiny())
    fake[0].wrong = lambda path, body: (200, answer) if "generate" in path else None
    with pytest.raises(EngineError, match="no sample in its answer"):
        answers(engine, [[5, 6]], sampling_of())


@pytest.mark.parametrize(
    ("status", "told"), [(400, "status 400, .*too long"), (503, "no sample in 3 tries")]
)
def test_a_status_is_told(status, told, fake, tmp_path):
    engine = engine_of(args_for(fake[1]), tmp_path)
    engine.load(tiny())
    message = {"error": {"message": "too long\nand more"}}
    fake[0].wrong = lambda path, body: (status, message) if "generate" in path else None
    with pytest.raises(EngineError, match=told):
        answers(engine, [[5, 6]], sampling_of())


# ------------ from memory to memory ------------


class Receiver(Fake):
    """A server of two workers that takes weights from memory."""

    def __init__(self):
        super().__init__()
        self.config["weight_transfer_config"] = {"backend": "loopback"}
        self.groups = []
        self.dies = False  # it goes, with its workers, before it takes any weight

    def answer(self, path: str, body: dict) -> tuple[int, object]:
        info = SimpleNamespace(**body.get("init_info", body.get("update_info", {})))
        if path == "/init_weight_transfer_engine":
            self.paths.append((path, body))
            with ThreadPoolExecutor() as threads:
                ranks = info.rank_offset, info.rank_offset + 1
                self.groups = [*threads.map(loopback.Group, [info] * 2, ranks)]
            return 200, {}
        if path == "/update_weights" and not self.dies:
            self.paths.append((path, body))
            for group in self.groups:
                self.has(dict(group.received(info)))
        if path in ("/start_weight_update", "/update_weights", "/finish_weight_update"):
            return (500, {"error": "no worker"}) if self.dies else (200, {})
        return super().answer(path, body)


@pytest.fixture
def receiver(monkeypatch):
    """(a Receiver, its URL), and what connects a trainer to it."""
    pytest.importorskip("vllm")
    loopback.connected(monkeypatch)
    with listening(made := Receiver()) as url:
        yield made, url


def test_a_whole_policy_goes_from_memory_to_memory(receiver, tmp_path):
    """Without a file, over one connection; a server that was lost gets a new one. An adapter goes
    by files."""
    (fake, url), model = receiver, tiny()
    args = args_for(url)
    engine, contexts = engine_of(args, tmp_path), contexts_of(model)
    follows(engine, model, args, 3, 1e-5)
    assert not [*tmp_path.rglob("*.safetensors")]
    begun = [body["init_info"] for path, body in fake.paths if path.startswith("/init")]
    assert [info["world_size"] for info in begun] == [3]
    assert not any(path == "/collective_rpc" for path, _ in fake.paths)
    fake.dies = True
    threading.Timer(0.5, lambda: setattr(fake, "dies", False)).start()
    move(model, 9)
    engine.load(model)
    assert gap(engine, model, args, contexts) < 1e-5
    assert sum(path.startswith("/init") for path, _ in fake.paths) > 1

    args = args_for(url, rank=4)
    model, engine = adapted(model, "policy", "prm"), engine_of(args, tmp_path)
    fake.paths.clear()
    move(model, 3)
    engine.load(model)
    assert "/v1/load_lora_adapter" in [path for path, _ in fake.paths]


def test_a_server_that_came_back_unseen_is_connected_again(receiver, tmp_path, monkeypatch):
    """Its workers are new ones, which know nothing of the trainer's group."""
    (fake, url), model = receiver, tiny()
    args = args_for(url)
    engine, contexts = engine_of(args, tmp_path), contexts_of(model)
    engine.load(model)
    transfer, sent = engine.servers[0].transfer, []
    monkeypatch.setattr(transfer, "send_weights", lambda: sent.append(transfer))
    fake.__init__()  # between two updates
    move(model, 9)
    engine.load(model)
    assert gap(engine, model, args, contexts) < 1e-5
    assert not sent and engine.servers[0].transfer is not transfer
    engine.servers[0].note(None)  # as after a transfer that was cut off
    engine.load(model)
    assert engine.ready_servers()


def test_only_the_first_process_sends_a_whole_policy(receiver, tmp_path, monkeypatch):
    """Another process has no weights: it waits until a server that was lost has got them."""
    (fake, url), model, rank = receiver, tiny(), [0]
    first, other = (engine_of(args_for(url), tmp_path / name) for name in "ab")
    other.name = first.name
    first_said = []
    monkeypatch.setattr(servers.processes, "rank", lambda: rank[0])
    monkeypatch.setattr(
        servers.processes,
        "broadcast",
        lambda v: first_said.pop(0) if rank[0] else first_said.append(v) or v,
    )
    first.load(model)
    rank[0] = 1
    other.load(model)  # it gets the version alone
    assert other.ready_servers() and not first_said

    def brought(engine, number: int) -> str:
        async def again():
            async with engine.connected():
                return await engine.bring(engine.servers[0])

        rank[0] = number
        return asyncio.run(again())

    for engine in (first, other):
        engine.lose(engine.servers[0], servers.LostError("it does not answer"))
    fake.model, fake.version, before = tiny(), "default", len(fake.paths)  # it is a new one
    assert "has other weights" in brought(other, 1) and not other.ready_servers()
    assert len(fake.paths) == before  # nothing was sent, and no version was told
    assert brought(first, 0) == ""
    told = len(fake.paths)
    assert brought(other, 1) == "" and len(fake.paths) == told  # it has only asked
    assert other.ready_servers() and fake.version == other.weights.version


@pytest.mark.parametrize("has_gpu", [False, True])
def test_weights_go_by_files_unless_both_sides_can(has_gpu, fake, tmp_path, monkeypatch):
    """A server without the flag, and a trainer without a GPU whose server has it."""
    if has_gpu:
        monkeypatch.setattr(servers, "TRANSFER", "nccl")
    fake[0].config["weight_transfer_config"] = None if has_gpu else {"backend": "nccl"}
    args, model = args_for(fake[1]), tiny()
    engine = engine_of(args, tmp_path)
    engine.load(model)
    assert gap(engine, model, args, contexts_of(model)) < 1e-5
    assert [*tmp_path.rglob("*.safetensors")]


def test_a_broadcast_that_does_not_end_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(servers, "BACK_WITHIN", 0.3)
    monkeypatch.setattr(servers, "TRANSFER", "loopback")
    monkeypatch.setattr(servers.Server, "receive", lambda *_: time.sleep(60))
    with listening(Receiver()) as url:
        engine = engine_of(args_for(url), tmp_path)
        with pytest.raises(EngineError, match=f"{url} hangs, or took no weights in 0 s") as error:
            engine.load(tiny())
        assert "--runs-dir" not in str(error.value)  # no file is read


# ------------ vLLM's own server ------------

STARTED = f"""-m vllm.entrypoints.openai.api_server --model {TINY} --dtype float32 --enforce-eager
--enable-scale-out --max-model-len 1024 --logprobs-mode processed_logprobs --enable-lora
--max-lora-rank 16 --no-enable-chunked-prefill --max-num-batched-tokens 8192
--worker-extension-cls {EXTENSION} --host 127.0.0.1 --block-size 32"""
SWITCHES = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
SWITCHES |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "INFO"}


class Started:
    """vLLM's server as a process; what it says is in a file."""

    def __init__(self, home: Path, port: str, *more: str):
        self.url, self.log = f"http://127.0.0.1:{port}", home / "server.log"
        command = [sys.executable, *STARTED.split(), "--port", port, *more]
        paths = os.pathsep.join([str(ROOT), str(ROOT / "tests"), str(home)])
        environment = os.environ | SWITCHES | {"PYTHONPATH": paths}
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                command, cwd=home, stdout=log, stderr=log, env=environment
            )
        end = time.monotonic() + 600
        while not self.answers():
            assert self.process.poll() is None and time.monotonic() < end, self.log.read_text()
            time.sleep(0.2)

    def answers(self) -> bool:
        try:
            return urllib.request.urlopen(f"{self.url}/health", timeout=5).status == 200
        except OSError:
            return False

    def samples(self) -> int:
        """How many it was asked for."""
        return self.log.read_text().count("POST /inference/v1/generate")

    def children(self, pid: int) -> list[int]:
        with contextlib.suppress(OSError):
            found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            return [each for child in found for each in (int(child), *self.children(int(child)))]
        return []

    def kill(self) -> None:
        """As a machine that is lost: with all of its processes."""
        for pid in (*self.children(self.process.pid), self.process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    pytest.importorskip("vllm")
    server = Started(tmp_path_factory.mktemp("server"), free_port())
    yield server
    server.kill()


@pytest.mark.slow
def test_vllms_server_has_the_trainers_log_probabilities(started, tmp_path):
    for rank in (0, 4):
        model, args = tiny(), args_for(started.url, rank=rank)
        model = adapted(model, "policy", "prm") if rank else model
        engine, contexts = engine_of(args, tmp_path), contexts_of(model)
        follows(engine, model, args, 4, 1e-3)
        torch.manual_seed(0)
        once = answers(engine, contexts, sampling_of())
        torch.manual_seed(0)
        assert [ids for ids, _ in answers(engine, contexts, sampling_of())] == [
            ids for ids, _ in once
        ]

    # without a new salt the prefixes of old weights are found
    args, model = args_for(started.url), tiny()
    engine = engine_of(args, tmp_path)
    engine.load(model)
    answers(engine, contexts, sampling_of())
    (server,) = engine.servers
    salt = server.salt
    move(model, 9)
    engine.load(model)
    server.salt = salt
    assert gap(engine, model, args, contexts) > 1e-2


@pytest.mark.slow
def test_vllms_server_takes_weights_from_memory(tmp_path, monkeypatch):
    """By its own routes and its own worker; a store is in the place of NCCL."""
    pytest.importorskip("vllm")
    loopback.connected(monkeypatch)
    loopback.installed(tmp_path)
    transfer = '{"backend": "loopback"}'
    server = Started(tmp_path, free_port(), "--weight-transfer-config", transfer)
    try:
        model, args = tiny(), args_for(server.url)
        follows(engine_of(args, tmp_path), model, args, 4, 1e-3)
        assert not [*tmp_path.rglob("*.safetensors")]
    finally:
        server.kill()


RUN = """--tasks-per-iteration 8 --group-size 8 --eval-tasks 32 --eval-samples 1 --iterations 2
--eval-temperature 0 --run-name base""".split()


def rows_of(home: Path) -> list[dict]:
    rows = (home / "runs/base/metrics.jsonl").read_text().splitlines()
    return [json.loads(row) for row in rows]


def begun(home: Path, *words) -> subprocess.Popen:
    """A run in a process of its own; what it says is in home/said."""
    home.mkdir(exist_ok=True)
    command = [sys.executable, str(ROOT / f"{SCRIPT}.py"), *words]
    with (home / "said").open("w") as said:
        return subprocess.Popen(command, cwd=home, stdout=said, stderr=said, env=os.environ)


@pytest.mark.slow
def test_the_engine_apart_gives_the_metrics_of_the_engine_inside(started, tmp_path):
    apart, inside = tmp_path / "apart", tmp_path / "inside"
    for home, words in ((apart, ["--engine-url", started.url]), (inside, ["--engine", "vllm"])):
        assert begun(home, *RUN, *words).wait(1800) == 0, (home / "said").read_text()
    for ours, theirs in zip(rows_of(apart), rows_of(inside), strict=True):
        assert ours.keys() == theirs.keys()
        if not ours["iteration"]:  # nothing is drawn: the same answers, but for a tie
            assert abs(ours["eval/success"] - theirs["eval/success"]) <= 1 / 32
            continue
        assert max(ours["policy/engine_gap"], theirs["policy/engine_gap"]) < 1e-3
        for name in ("train/success", "train/valid_actions", "train/episode_steps"):
            noise = 0.5 if name != "train/episode_steps" else 6.0  # standard deviation of one
            assert abs(ours[name] - theirs[name]) < 4 * noise * math.sqrt(2 / 64), name


@pytest.mark.slow
def test_a_server_that_is_killed_in_a_rollout_and_started_again(tmp_path):
    """The run waits for it, and goes on with the same weights; every row is there."""
    pytest.importorskip("vllm")
    port = free_port()
    server = Started(tmp_path, port)
    try:
        run = begun(tmp_path / "run", *RUN, "--engine-url", server.url)
        table = tmp_path / "run/runs/base/metrics.jsonl"
        while not table.exists() or len(rows_of(tmp_path / "run")) < 2:  # iteration 1 is whole
            assert run.poll() is None, (tmp_path / "run/said").read_text()
            time.sleep(0.05)
        before = server.samples()
        while server.samples() < before + 20:
            time.sleep(0.01)
        server.kill()
        while "it is waited for" not in (tmp_path / "run/said").read_text():
            assert run.poll() is None
            time.sleep(0.1)
        server = Started(tmp_path, port)
        assert run.wait(1200) == 0, (tmp_path / "run/said").read_text()
    finally:
        server.kill()
    rows = rows_of(tmp_path / "run")
    assert [row["iteration"] for row in rows] == [0, 1, 2]
    assert rows[2]["engine/restarts"] >= 1 and rows[2]["policy/engine_gap"] < 1e-3
    said = (tmp_path / "run/said").read_text()
    assert "is back, and has the policy's weights" in said
