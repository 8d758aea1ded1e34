"""Servers elsewhere: vLLM on other machines samples, and this process trains.

--engine-url names them; docs/many-gpus.md has the command that starts one. A request goes to the
server that has the fewest, with a seed of its own, so that a sample which is asked for again is the
same.

Weights go by files, in a directory of the run that the servers have to see too. A LoRA policy is an
adapter on the weights of --model, under a new name after each update: a name once used would serve
the old weights. A whole policy takes the place of the server's own weights. Every answer says which
weights it is of, and the prefix cache has a new salt whenever weights are taken, so nothing that
others computed is taken for theirs.

A server that is lost in the middle is waited for, unless others are left. What it still owed is
asked for again, and it gets the weights again when it is back.
"""

import asyncio
import contextlib
import shutil
import time
import uuid
from pathlib import Path
from typing import NamedTuple
from weakref import WeakKeyDictionary

from runtime.distributed import processes
from runtime.engines import EngineError, Sample, SamplingParams
from runtime.networks import adapter_weights, assert_finite, on_cpu, policy_weights
from runtime.view.terminal import plain, warn

import httpx2
import torch
from safetensors.torch import save_file

BACK_WITHIN = 600.0  # seconds that all servers may be away in the middle of a run
PAUSE = 1.0  # seconds until a server that did not answer is asked again
LONGEST_PAUSE = 10.0  # the same while other servers answer
ANSWERS_WITHIN = 1800.0  # seconds
TRIES = 3  # losses in a row, for each server, without a sample; and of weights that one refuses
IN_FLIGHT = 256  # connections for each server
PREFIX = 8  # requests by which a server may have more to do and still keep its episodes
EXTENSION = "runtime.engines.server_extension.PolicyWeights"
STARTED = "VLLM_SERVER_DEV_MODE=1 VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and --enable-scale-out"


class LostError(Exception):
    """A server does not answer, or not with the policy's weights."""


class Weights(NamedTuple):
    """What a server is to sample with."""

    version: str  # of the server's own weights, which it says in every answer
    path: str  # where they are: a whole policy's directory, or --model
    adapter: str | None = None  # of a LoRA policy, by its name
    adapter_path: str | None = None


class Server:
    """One vLLM server. weights: those that it has; None: not known."""

    def __init__(self, url: str):
        self.url = url.rstrip("/")
        self.weights: Weights | None = None
        self.salt = ""  # of the prefixes that these weights computed
        self.asked_again = 0.0  # when a server that was lost may be asked again, by time.monotonic
        self.in_flight = 0  # requests that it has not answered yet
        self.client = None  # the pool of connections of the event loop that runs now

    async def send(self, method: str, path: str, **content):
        """The response to a request; LostError where there is none."""
        try:
            return await self.client.request(method, self.url + path, **content)
        except httpx2.HTTPError as error:
            raise LostError(type(error).__name__) from error

    async def call(self, method: str, path: str, **content) -> dict:
        """The JSON of an answer, or {}. Raises LostError, EngineError where the server refuses."""
        return self.read(await self.send(method, path, **content))

    def read(self, response) -> dict:
        if response.status_code >= 400:
            raise EngineError(f"{self.url}: status {response.status_code}{message_of(response)}")
        try:
            found = response.json()
        except (ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}

    async def check(self, args, stop_ids: list[int]) -> None:
        """Raise EngineError where the server is not there, or not started as it has to be."""
        try:
            found = await self.call("GET", "/server_info", params={"config_format": "json"})
            probe = request_of(stop_ids[:1], max_tokens=1)
            await self.call("POST", "/inference/v1/generate", json=probe)
        except LostError as error:
            raise EngineError(f"{self.url} does not answer ({error})") from error
        except EngineError as error:
            raise EngineError(f"{error}; it has to be started with {STARTED}") from error

        config = found.get("vllm_config")
        config = config if isinstance(config, dict) else {}
        model, lora = (config.get(f"{part}_config") or {} for part in ("model", "lora"))
        needs = {}
        if model.get("logprobs_mode") != "processed_logprobs":
            needs["--logprobs-mode"] = "processed_logprobs"
        if model.get("dtype") != f"torch.{args.run_args.dtype}":
            needs["--dtype"] = args.run_args.dtype
        if (model.get("max_model_len") or 0) < args.max_context_tokens:
            needs["--max-model-len"] = args.max_context_tokens
        if (lora.get("max_lora_rank") or 0) < args.policy_lora_rank:
            needs["--enable-lora --max-lora-rank"] = args.policy_lora_rank
        cpu = (config.get("device_config") or {}).get("device") == "cpu"
        if cpu and (config.get("scheduler_config") or {}).get("enable_chunked_prefill"):
            # on a CPU vLLM dies of a request with a seed whose context is read in parts
            needs["--no-enable-chunked-prefill --max-num-batched-tokens"] = 8192
        extension = (config.get("parallel_config") or {}).get("worker_extension_cls")
        if extension != EXTENSION:
            needs["--worker-extension-cls"] = EXTENSION
        if needs:
            flags = " ".join(f"{flag} {value}" for flag, value in needs.items())
            raise EngineError(f"{self.url} has to be started with {flags}")

    # ------------ weights ------------

    def note(self, weights: Weights | None) -> None:
        """That the server has these weights from now on. Prefixes that it kept are not theirs."""
        self.weights, self.salt = weights, uuid.uuid4().hex

    async def take(self, weights: Weights) -> None:
        """Have the server sample with these weights. Raises LostError, EngineError."""
        for attempt in range(TRIES):
            try:
                if not self.weights or self.weights.version != weights.version:
                    order = {"method": "take_policy", "args": [weights.path]}
                    await self.call("POST", "/collective_rpc", json=order)
                    version = {"new_version": weights.version}
                    await self.call("POST", "/update_weight_version", json=version)
                if weights.adapter:
                    await self.forget(weights.adapter)  # of a try whose answer was lost
                    names = {"lora_name": weights.adapter, "lora_path": weights.adapter_path}
                    await self.call("POST", "/v1/load_lora_adapter", json=names)
                self.note(weights)
                return
            except EngineError as error:
                if not await self.is_alive():
                    raise LostError(str(error)) from error
                if attempt + 1 == TRIES:
                    seen = "the servers have to see --model and --runs-dir under the same paths"
                    raise EngineError(f"{error}; {seen}") from error
                await asyncio.sleep(PAUSE)

    async def is_alive(self) -> bool:
        """Whether there is an engine behind the address: its process may have died alone."""
        try:
            await self.call("GET", "/health")
        except (LostError, EngineError):
            return False
        return True

    async def forget(self, adapter: str) -> None:
        """Unload an adapter, if it is there."""
        with contextlib.suppress(LostError, EngineError):
            await self.call("POST", "/v1/unload_lora_adapter", json={"lora_name": adapter})

    # ------------ samples ------------

    async def sample(self, request: dict) -> Sample:
        """Raises LostError, EngineError."""
        weights, request = self.weights, request | {"cache_salt": self.salt}
        if weights.adapter:
            request["model"] = weights.adapter
        self.in_flight += 1
        try:
            response = await self.send("POST", "/inference/v1/generate", json=request)
        finally:
            self.in_flight -= 1
        if response.status_code >= 500 or response.status_code == 404:  # an adapter that it lost
            raise LostError(f"status {response.status_code}{message_of(response)}")
        ids, logprobs, versions = self.answer(self.read(response), request)
        if versions != {weights.version}:
            raise LostError("it has other weights than the policy's")
        return ids, logprobs

    def answer(self, found: dict, request: dict) -> tuple[list[int], list[float], set]:
        """(ids, log-probabilities, versions of the weights) of an answer; or EngineError."""
        try:
            (choice,) = found["choices"]
            ids = choice["token_ids"]
            logprobs = [float(token["logprob"]) for token in choice["logprobs"]["content"]]
            versions = {span["version"] for span in choice.get("weight_versions") or []}
            if not all(type(token) is int and token >= 0 for token in ids):
                raise ValueError("no token ids")
            if not 0 < len(ids) == len(logprobs) <= request["sampling_params"]["max_tokens"]:
                raise ValueError("too many tokens or none, or not a log-probability of each")
            if not all(-1e4 < logprob <= 1e-3 for logprob in logprobs):
                raise ValueError("no log-probabilities")
        except (LookupError, TypeError, ValueError) as error:
            raise EngineError(f"{self.url}: no sample in its answer") from error
        return ids, logprobs, versions


def message_of(response) -> str:
    """What an answer says of an error, as a piece of one line."""
    try:
        error = response.json()["error"]
        text = str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, LookupError, TypeError, RecursionError):
        return ""
    lines = plain(text).split("\n")
    return f" ({lines[0][:200]})"


def request_of(context: list[int], **sampling) -> dict:
    """The body of a request for one sample; sampling: vLLM's SamplingParams."""
    sampling |= {"logprobs": 0, "detokenize": False}
    return {"token_ids": context, "sampling_params": sampling}


class ServerEngine:
    """vLLM servers. directory: where weights are left for them; they have to see it too.

    restarts: how often a server was lost, and had to get the weights again."""

    def __init__(self, directory: Path, path: str, stop_ids: list[int], args):
        self.directory, self.path = directory.resolve(), path
        self.stop_ids, self.args = stop_ids, args
        self.restarts, self.fruitless = 0, 0  # losses; those since the last sample
        self.name, self.updates = processes.broadcast(uuid.uuid4().hex[:8]), 0
        self.servers = [Server(url) for url in args.run_args.engine_url]
        self.there, self.lost = asyncio.Event(), asyncio.Event()
        self.homes = WeakKeyDictionary()  # of an episode's task: the server that has its prefix
        asyncio.run(self.check())
        shift = processes.rank() % len(self.servers)  # processes begin with different ones
        self.servers = self.servers[shift:] + self.servers[:shift]

    @contextlib.asynccontextmanager
    async def connected(self):
        """Around everything that servers are asked: one pool of connections for all of them."""
        waits = httpx2.Timeout(ANSWERS_WITHIN, connect=LONGEST_PAUSE)
        limits = httpx2.Limits(max_connections=IN_FLIGHT * len(self.servers))
        async with httpx2.AsyncClient(timeout=waits, limits=limits) as client:
            for server in self.servers:
                server.client = client
            yield

    async def check(self) -> None:
        async with self.connected():
            for server in self.servers:
                await server.check(self.args, self.stop_ids)

    # ------------ samples ------------

    async def sample(self, context: list[int], sampling: SamplingParams) -> Sample:
        """One answer to a context, of whatever server has one. Raises EngineError."""
        stops = sampling.stop_token_ids
        request = request_of(
            context,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            max_tokens=sampling.max_tokens,
            stop_token_ids=self.stop_ids if stops is None else stops,
            seed=torch.randint(2**31, ()).item(),
        )
        while True:
            await self.there.wait()
            there, server = self.there, self.choose()
            salt = server.salt
            try:
                sample = await server.sample(request)
                self.fruitless = 0
                return sample
            except LostError as error:
                # else another request has told, or the rollout is over
                if server.salt == salt and self.there is there:
                    self.lose(server, error)

    def ready_servers(self) -> list[Server]:
        """Those that have the policy's weights."""
        return [server for server in self.servers if server.weights == self.weights]

    def choose(self) -> Server:
        """The server with the fewest requests in flight; an episode stays with the one that has
        read its beginning, unless that has much more to do."""
        episode = asyncio.current_task()
        home = self.homes.get(episode)
        best = min(self.ready_servers(), key=lambda s: s.in_flight - PREFIX * (s is home))
        self.homes[episode] = best
        return best

    def lose(self, server: Server, error: LostError) -> None:
        """A server is lost: it gets the weights again when it is back. Raises EngineError where
        servers come back and are lost again without a sample."""
        server.note(None)  # it may be another one now
        self.restarts += 1
        self.fruitless += 1
        warn(f"{server.url} was lost in the middle of a rollout ({error})")
        if self.fruitless >= TRIES * len(self.servers):
            raise EngineError(f"no sample in {TRIES} tries ({server.url}: {error})")
        self.lost.set()
        if not self.ready_servers():
            self.there.clear()

    async def serve(self) -> None:
        """Hold the connections, and bring back servers that were lost, until this is cancelled.
        Raises EngineError where all stay away."""
        self.fruitless = 0
        async with self.connected():
            try:
                while True:
                    self.lost.clear()
                    if self.ready_servers():
                        self.there.set()  # they need not wait for the others
                    await self.ready()
                    self.there.set()
                    away = len(self.ready_servers()) < len(self.servers)
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(self.lost.wait(), LONGEST_PAUSE if away else None)
            finally:  # the next rollout may have another loop
                self.there, self.lost = asyncio.Event(), asyncio.Event()

    # ------------ weights ------------

    def sleep(self) -> None:
        """Nothing: the servers' memory is not the trainer's."""

    def load(self, model) -> None:
        """Leave the policy's weights for the servers, and have them take these."""
        self.updates += 1
        tag = f"{self.name}-{self.updates}"
        path = self.directory / tag
        if processes.rank() == 0:
            shutil.rmtree(self.directory, ignore_errors=True)  # those before
            path.mkdir(parents=True)
        if self.args.policy_lora_rank:
            assert_finite(policy_weights(model))
            adapter = adapter_weights(model, "policy")
            if processes.rank() == 0:
                save_file(adapter, path / "adapter_model.safetensors")
                model.peft_config["policy"].save_pretrained(path)
            self.weights = Weights(f"{self.path} alone", self.path, tag, str(path))
        else:
            dtype = getattr(torch, self.args.run_args.dtype)
            weights = on_cpu((name, tensor.to(dtype)) for name, tensor in policy_weights(model))
            if processes.rank() == 0:
                save_file(weights, path / "model.safetensors")
            self.weights = Weights(tag, str(path))

        failed = ""
        if processes.rank() == 0:
            try:
                asyncio.run(self.hand_over())
            except EngineError as error:
                failed = str(error)
        if failed := processes.broadcast(failed):
            raise EngineError(failed)
        for server in self.servers if processes.rank() else ():
            server.note(self.weights)

    async def hand_over(self) -> None:
        """Have the servers take the weights, and forget the adapters of those before."""
        before = [(s, s.weights.adapter) for s in self.servers if s.weights and s.weights.adapter]
        async with self.connected():
            await self.ready()
            await asyncio.gather(*(server.forget(adapter) for server, adapter in before))

    async def ready(self) -> None:
        """Wait until a server has the policy's weights; others are asked once. Raises
        EngineError."""
        end, told = time.monotonic() + BACK_WITHIN, False
        while True:
            missing = [server for server in self.servers if server.weights != self.weights]
            if len(missing) < len(self.servers):  # those that are away may wait
                now = time.monotonic()
                missing = [server for server in missing if now >= server.asked_again]
            reasons = await asyncio.gather(*map(self.bring, missing))
            if there := self.ready_servers():
                if told:
                    warn(f"{there[0].url} is back, and has the policy's weights again")
                return

            reason = next(filter(None, reasons), "every server was lost again")
            if time.monotonic() > end:
                raise EngineError(f"{reason}; it was waited for {BACK_WITHIN:.0f} s")
            if not told:
                warn(f"{reason}; it is waited for, {BACK_WITHIN:.0f} s at most")
            told = True
            await asyncio.sleep(PAUSE)

    async def bring(self, server: Server) -> str:
        """Have a server take the weights; why it does not answer, or nothing."""
        try:
            await server.take(self.weights)
        except LostError as error:
            server.asked_again = time.monotonic() + LONGEST_PAUSE
            return f"{server.url} does not answer ({error})"
        return ""
