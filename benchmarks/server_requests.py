"""What a request to a server costs the trainer's processor, with many episodes at a time.

    python benchmarks/server_requests.py

A server that only pretends (it answers 20 tokens after 0.3 s) runs in a process of its own; the
engine of runtime/engines/servers.py asks it for answers to contexts of 1,500 tokens, 4 for each
episode. Told are the processor seconds of the asking process alone, over the requests, and the
seconds of all. The result is appended to results/server-requests.md with the commit.
"""

import argparse
import asyncio
import multiprocessing
import socket
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from runtime.engines import SamplingParams, served
from runtime.engines.servers import EXTENSION, ServerEngine, Weights
from runtime.flags import RunArgs
from runtime.saving.opening import git

import torch

WAIT = 0.3  # seconds that the server takes
TURNS, CONTEXT, ANSWER = 4, 1500, 20  # of an episode; tokens


def pretend(port: int) -> None:
    """Answer as a vLLM server does, at once or, where it samples, after WAIT."""
    from aiohttp import web

    config = {
        "model_config": {
            "logprobs_mode": "processed_logprobs",
            "dtype": "torch.float32",
            "max_model_len": 4096,
        },
        "parallel_config": {"worker_extension_cls": EXTENSION},
    }
    tokens = [{"token": "a", "logprob": -0.1, "top_logprobs": []}] * ANSWER
    choice = {"token_ids": [*range(ANSWER)], "logprobs": {"content": tokens}}
    choice["weight_versions"] = [{"version": "the policy's"}]
    answers = {"/server_info": {"vllm_config": config}}
    answers |= {"/get_world_size": {"world_size": 1}}
    answers["/inference/v1/generate"] = {"choices": [choice]}

    async def answer(request):
        await request.read()
        if request.path.endswith("generate"):
            await asyncio.sleep(WAIT)
        return web.json_response(answers[request.path])

    app = web.Application()
    app.router.add_route("*", "/{any:.*}", answer)
    web.run_app(app, host="127.0.0.1", port=port, print=None)


def measured(url: str, episodes: int) -> tuple[float, float]:
    """(processor milliseconds of a request, seconds of all) for so many episodes at a time."""
    args = argparse.Namespace(
        run_args=RunArgs(engine_url=(url,), dtype="float32"),
        seed=1,
        policy_lora_rank=0,
        max_context_tokens=2048,
    )
    with tempfile.TemporaryDirectory() as home:
        engine = ServerEngine(Path(home), "model", [0], args)
        engine.weights = Weights("the policy's", "model")
        engine.servers[0].note(engine.weights)
        sampling = SamplingParams(max_tokens=ANSWER)

        async def episode():
            for _ in range(TURNS):
                await engine.sample([*range(1000, 1000 + CONTEXT)], sampling)

        began, worked = time.perf_counter(), time.process_time()
        asyncio.run(served(engine, [episode() for _ in range(episodes)]))
        worked, took = time.process_time() - worked, time.perf_counter() - began
    return 1000 * worked / episodes / TURNS, took


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--episodes", type=int, nargs="+", default=[128, 512])
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    torch.set_num_threads(1)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = multiprocessing.get_context("spawn").Process(target=pretend, args=(port,), daemon=True)
    server.start()
    url = f"http://127.0.0.1:{port}"
    while socket.socket().connect_ex(("127.0.0.1", port)):
        time.sleep(0.1)
    commit = git("log", "-1", "--format=%h")
    out = ROOT / "benchmarks/results/server-requests.md"
    lines = out.read_text().splitlines() if out.exists() else []
    if not lines:
        lines = ["`python benchmarks/server_requests.py`, medians of 3, 4 requests an episode", ""]
        lines += ["| commit | episodes at a time | processor ms a request | seconds |"]
        lines += ["|---|---|---|---|"]
    for episodes in given.episodes:
        runs = sorted(measured(url, episodes) for _ in range(given.repeats))
        worked, took = runs[len(runs) // 2]
        lines.append(f"| {commit} | {episodes} | {worked:.2f} | {took:.1f} |")
        print(lines[-1], flush=True)
    out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
