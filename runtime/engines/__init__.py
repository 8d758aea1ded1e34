"""Engines: what samples from the policy. vllm.py and transformers.py do it in this process,
servers.py asks vLLM servers elsewhere.

    await engine.sample(context, sampling) -> (sampled ids, the log-probability of each)
    await engine.serve()   answers what was asked, beside those who ask, until it is cancelled
    engine.load(model)     samples from this policy's weights from now on
    engine.sleep()         leaves the memory to the trainer until the next load
    engine.restarts        how often an engine or a server was replaced because it failed

Contexts and samples are lists of token ids. `load` and `sleep` are called while nobody asks."""

import asyncio
import copy
from dataclasses import dataclass
from typing import NamedTuple

Sample = tuple[list[int], list[float]]  # sampled ids, and the log-probability of each [nats]


class EngineError(RuntimeError):
    """The engine does not start, or failed for good."""


@dataclass
class SamplingParams:
    """How tokens are sampled, in vLLM's names. Raises ValueError where that is impossible."""

    temperature: float = 1.0  # Logits are divided by it; 0: the most probable token.
    max_tokens: int = 16  # Longest sample [tokens].
    stop_token_ids: list[int] | None = None  # Each ends a sample, as its last; None: the chat's.
    logprobs: int = 0  # vLLM's word for the sampled token's log-probability alone.
    top_p: float = 1.0  # Sample from the most probable tokens with this total probability.
    top_k: int = 0  # Sample from so many most probable tokens; 0: from all.

    def __post_init__(self):
        right = self.temperature >= 0, self.max_tokens >= 1, 0 < self.top_p <= 1, self.top_k >= 0
        if not all(right) or self.logprobs:
            needs = "temperature and top_k from 0, max_tokens from 1, 0 < top_p <= 1, logprobs 0"
            raise ValueError(f"no engine samples so: {self}; it needs {needs}")

    def asked(self, stop_ids: list[int]) -> dict:
        """What vLLM is asked, with these stop tokens where none are given."""
        stops = stop_ids if self.stop_token_ids is None else self.stop_token_ids
        return vars(self) | {"stop_token_ids": stops}

    def clone(self) -> "SamplingParams":
        return copy.deepcopy(self)


class Request(NamedTuple):
    context: list[int]
    sampling: SamplingParams
    answer: asyncio.Future  # of a Sample

    def give(self, sample: Sample) -> None:
        if not self.answer.done():
            self.answer.set_result(sample)


class Engine:
    """What engines in this process share. Each has `await work()`, which does some of what was
    asked. asked: requests that work() has not taken yet; owed: those it has begun to answer."""

    def __init__(self):
        self.restarts = 0
        self.asked: list[Request] = []
        self.owed: dict[str, Request] = {}
        self.bell = asyncio.Event()  # rings when something is asked

    async def sample(self, context: list[int], sampling: SamplingParams) -> Sample:
        """One answer to a context: its ids, the stop token included, with log-probabilities."""
        request = Request(context, sampling, asyncio.get_running_loop().create_future())
        self.asked.append(request)
        self.bell.set()
        return await request.answer

    async def serve(self) -> None:
        """Answer what is asked, until this is cancelled. Raises EngineError, and others."""
        self.bell = asyncio.Event()  # one before may belong to another loop
        try:
            while True:
                if not self.asked and not self.owed:
                    self.bell.clear()
                    await self.bell.wait()
                await self.work()
        finally:
            self.forget_requests()

    def take(self) -> list[Request]:
        """What was asked since the last call, by those who still wait."""
        asked, self.asked = self.asked, []
        return [request for request in asked if not request.answer.done()]

    def forget_requests(self) -> None:
        self.asked, self.owed = [], {}


def lora_rank_for(rank: int) -> int:
    """vLLM's max_lora_rank for an adapter of this rank: 8, 16, 32, ... 512."""
    return max(8, 1 << (rank - 1).bit_length())


async def served(engine, asking) -> list:
    """What these coroutines, which ask the engine, return, in their order, while the engine answers
    beside them. Raises EngineError where it fails for good."""
    tasks = [asyncio.ensure_future(each) for each in (engine.serve(), *asking)]
    serving, asked = tasks[0], asyncio.gather(*tasks[1:])
    try:
        await asyncio.wait({serving, asked}, return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            serving.result()  # raises what stopped the engine
        return await asked
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, asked, return_exceptions=True)
