"""What an endpoint may send: one table of answers, each asked for once, in this process."""

import asyncio
import gc
import gzip
import json
import resource
import time
import zlib
from pathlib import Path

from envs.sotopia import Endpoint, EndpointError

import pytest
from cases import SECRET, SMALL
from conftest import run_main
from test_sotopia import serve, verdict_for

SECONDS, MEMORY = 10, 200 * 2**10  # [KiB] by which the process may grow
FINE = {"id": "1", "object": "chat.completion", "created": 1, "model": "m"}


def completion(**choice) -> dict:
    return FINE | {"choices": [{"index": 0, "finish_reason": "stop", **choice}]}


def said(content) -> dict:
    return completion(message={"role": "assistant", "content": content})


def packed(size: int, wbits: int) -> bytes:
    """So many zeros, packed a thousandfold; all but the first 16 MB are one piece again and again,
    so the checksum is wrong."""
    packer, zeros = zlib.compressobj(9, zlib.DEFLATED, wbits), bytes(2**24)
    first, again = (packer.compress(zeros) + packer.flush(zlib.Z_FULL_FLUSH) for _ in range(2))
    return first + again * (size // 2**24 - 1) + packer.flush()


def endless(head: bytes, piece: bytes, pause: float = 0.0):
    """A connection that never ends."""

    def send(file) -> None:
        file.write(head)
        while True:
            file.write(piece)
            time.sleep(pause)

    return send


def raw(text: str) -> bytes:
    return text.replace("\n", "\r\n").encode()


OK = "HTTP/1.1 200 OK\ncontent-type: application/json\n"
PIECE = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
WHOLE = json.dumps(said("hello")).encode()
ANSWERS = {  # name: (what is sent, the reason of the failure or the text that is read)
    "a gzip bomb": ((200, packed(2**30, 31), {"content-encoding": "gzip"}), "oversize"),
    "a deflate bomb": ((200, packed(2**28, 15), {"content-encoding": "deflate"}), "oversize"),
    "gzip of a gzip bomb": (
        (200, gzip.compress(packed(2**28, 31)), {"content-encoding": "gzip, gzip"}),
        "oversize",
    ),
    "gzip that is none": ((200, b"hello", {"content-encoding": "gzip"}), "oversize"),
    "half a gzip": ((200, gzip.compress(WHOLE)[:60], {"content-encoding": "gzip"}), "malformed"),
    "brotli": ((200, b"hello", {"content-encoding": "br"}), "oversize"),
    "zstd": ((200, b"hello", {"content-encoding": "zstd"}), "oversize"),
    "100 MB": ((200, b" " * 10**8), "oversize"),
    "a text of 2 MB": ((200, said("a" * 2**21)), "oversize"),
    "an endless body": (endless(raw(f"{OK}transfer-encoding: chunked\n\n"), PIECE), "oversize"),
    "a body until the end": (endless(raw(f"{OK}connection: close\n\n"), b" " * 2**16), "oversize"),
    "endless headers": (endless(raw(OK), b"a: " + b"b" * 1000 + b"\r\n"), "connection"),
    "an endless status": (endless(b"HTTP/1.1 200 ", b"a" * 1000), "connection"),
    "a slow drip": (endless(raw(f"{OK}connection: close\n\n"), b" ", 0.2), "timeout"),
    "silence": (endless(b"", b"", 0.2), "timeout"),
    "less than promised": (raw(f"{OK}content-length: 99\n\n{{}}"), "connection"),
    "a negative length": (raw(f"{OK}content-length: -1\n\n{{}}"), "connection"),
    "two lengths": (raw(f"{OK}content-length: 1\ncontent-length: 2\n\n{{}}"), "connection"),
    "a bad chunk": (raw(f"{OK}transfer-encoding: chunked\n\nzz\n{{}}"), "connection"),
    "no HTTP": (b"SSH-2.0-OpenSSH\r\n", "connection"),
    "HTTP 9.9": (b"HTTP/9.9 200 OK\r\n\r\n", "malformed"),
    "hangs up": (None, "connection"),
    "nothing": ((200, b""), "malformed"),
    "HTML": ((200, b"<html>", {"content-type": "text/html"}), "malformed"),
    "no UTF-8": ((200, b"\xff\xfe{}"), "malformed"),
    "200,000 brackets": ((200, b"[" * 200_000), "malformed"),
    "200,000 braces": ((200, b'{"a":' * 200_000), "malformed"),
    "a number": ((200, 7), "malformed"),
    "null": ((200, None), "malformed"),
    "a list": ((200, []), "malformed"),
    "a text": ((200, "hello"), "malformed"),
    "{}": ((200, {}), "malformed"),
    "no choices": ((200, FINE), "malformed"),
    "choices {}": ((200, FINE | {"choices": {}}), "malformed"),
    "choices by name": ((200, {"choices": {"a": 1}}), "malformed"),
    "choices of numbers": ((200, FINE | {"choices": [1]}), "malformed"),
    "choices []": ((200, FINE | {"choices": []}), "malformed"),
    "choices null": ((200, FINE | {"choices": None}), "malformed"),
    "choices a text": ((200, FINE | {"choices": "hello"}), "malformed"),
    "choices a number": ((200, FINE | {"choices": 1}), "malformed"),
    "choices of lists": ((200, FINE | {"choices": [[]]}), "malformed"),
    "no message": ((200, completion()), "malformed"),
    "message null": ((200, completion(message=None)), "malformed"),
    "message a list": ((200, completion(message=[])), "malformed"),
    "message a text": ((200, completion(message="hello")), "malformed"),
    "content a number": ((200, said(7)), "malformed"),
    "content a list": ((200, said([{"type": "text"}])), "malformed"),
    "content a table": ((200, said({"a": 1})), "malformed"),
    "content true": ((200, said(True)), "malformed"),
    "401 with the key": ((401, {"error": {"message": SECRET}}), "401"),
    "404": ((404, b"no"), "404"),
    "418 of 100 MB": ((418, b" " * 10**8), "oversize"),
    "500 deep": ((500, b"[" * 200_000), "500"),
    "503 that waits for ever": ((503, b"", {"retry-after": "9" * 99}), "503"),
    "429 that waits nan": ((429, b"", {"retry-after": "nan"}), "429"),
    "204": ((204, b""), "malformed"),
    "a redirect to a file": ((302, b"", {"location": "file:///etc/passwd"}), "connection"),
    "content null": ((200, said(None)), ""),
    "half a surrogate pair": ((200, said("a\ud83db")), "a?b"),
    "a NUL": ((200, said("a\0b")), "a\0b"),
    "gzip": ((200, gzip.compress(WHOLE), {"content-encoding": "gzip"}), "hello"),
    "deflate": ((200, zlib.compress(WHOLE), {"content-encoding": "deflate"}), "hello"),
    "more than is asked": ((200, said("hello") | {"a": [1], "usage": 7}), "hello"),
}


def memory() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer(name):
    """It is read, or is a failure with a reason, in bounded time and memory."""
    answer, expected = ANSWERS[name]

    async def ask(url):
        endpoint = Endpoint(url, "m", "NO_KEY", timeout=2.0, tries=1)
        return await endpoint.ask([{"role": "user", "content": "hello \ud83d"}])

    with serve(lambda number, body: answer) as server:
        before, start = memory(), time.monotonic()
        try:
            found = asyncio.run(ask(server.url))
        except EndpointError as error:
            found = error.reason
        assert time.monotonic() - start < SECONDS
        assert memory() - before < MEMORY
    assert found == expected


def test_rollouts_leave_no_connections_open():
    """Each has an event loop of its own."""
    with serve(lambda number, body: "fine") as server:
        endpoint = Endpoint(server.url, "m", "NO_KEY")

        async def rollout():
            asked = [endpoint.ask([{"role": "user", "content": "hello"}]) for _ in range(8)]
            return await asyncio.gather(*asked)

        gc.collect()
        gc.disable()  # with a trainer's objects it runs rarely
        try:
            held = []
            for _ in range(4):
                assert asyncio.run(rollout()) == 8 * ["fine"]
                held.append(len([*Path("/proc/self/fd").iterdir()]))
        finally:
            gc.enable()
    assert held[-1] < held[0] + 16, held


def test_nothing_of_the_environment_leaves(monkeypatch):
    """What is meant for OpenAI goes to OpenAI's own address alone."""
    own = "OPENAI_API_KEY OPENAI_ADMIN_KEY OPENAI_ORG_ID OPENAI_PROJECT_ID".split()
    for name in (*own, "OPENAI_WEBHOOK_SECRET"):
        monkeypatch.setenv(name, SECRET)
    monkeypatch.setenv("OPENAI_CUSTOM_HEADERS", f"x-mine: {SECRET}\nauthorization: Bearer {SECRET}")
    monkeypatch.setenv("THE_KEY", "the key")

    async def ask(url):
        return await Endpoint(url, "m", "THE_KEY").ask([{"role": "user", "content": "hello"}])

    with serve(lambda number, body: "fine") as server:
        assert asyncio.run(ask(server.url)) == "fine"
        (headers,) = server.headers
    assert headers["authorization"] == "Bearer the key"
    assert SECRET not in str(headers) and SECRET not in str(server.bodies)


@pytest.mark.parametrize("name", ["choices by name", "a gzip bomb", "content a list", "hangs up"])
def test_a_judge_that_only_fails_ends_the_run_in_one_line(name, tmp_path):
    answer, reason = ANSWERS[name]
    with serve(lambda number, body: answer) as server:
        words = ["--judge-url", server.url, "--judge-model", "m", "--tries", "1", "--timeout", "5"]
        done = run_main("grpo_sotopia", *SMALL, *words, cwd=tmp_path, check=False)
    line = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1 and line.startswith("stopped: 2 of 2 conversations lost")
    assert f"judge: {reason} x 2" in line and not list((tmp_path / "runs").iterdir())


def test_half_a_surrogate_pair_from_a_partner_reaches_the_tokenizer_as_a_mark(tmp_path):
    def behave(number, body):
        return verdict_for(body) if "response_format" in body else (200, said("hello \ud83d you"))

    with serve(behave) as server:
        words = ["--partner-url", server.url, "--partner-model", "m", "--iterations", "1"]
        words += ["--judge-url", server.url, "--judge-model", "m"]
        run_main("grpo_sotopia", *SMALL, *words, cwd=tmp_path)
        assert any("hello ? you" in str(body["messages"]) for body in server.bodies)
