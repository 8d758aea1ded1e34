"""vLLM servers elsewhere sample, and this process trains (docs/many-gpus.md).

A LoRA policy goes by files, as an adapter on --model; a whole policy in the place of the server's
weights, by NCCL where both sides have GPUs, else by files. Every answer says which weights it is
of. What a lost server owed is asked for again, with the same seed; back, it gets the weights."""

import asyncio
import contextlib
import json
import shutil
import threading
import time
import uuid
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple
from weakref import WeakKeyDictionary

from runtime.distributed import processes
from runtime.engines import EngineError, Sample, SamplingParams, lora_rank_for
from runtime.flags import shown
from runtime.networks import assert_finite, dense_weights, policy_weights
from runtime.saving.checkpoints import write_adapter
from runtime.view.terminal import first_line, warn

import aiohttp
import torch
from safetensors.torch import save_file

BACK_WITHIN = 600.0  # seconds that all servers may be away, or one may take for weights
HEALTHY_WITHIN = 10.0  # seconds in which a server that does not hang says so
SEEN_WITHIN = 10.0  # seconds until the first weights are seen, by whatever file system
PAUSE = 1.0  # seconds until a server that did not answer is asked again
TRIES = 3  # losses in a row, for each server, without a sample
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TRANSFER = {"cuda": "nccl"}.get(DEVICE, "none")  # from memory, where a server was started with it
EXTENSION = "runtime.engines.server_extension.PolicyWeights"
STARTED = "VLLM_SERVER_DEV_MODE=1 VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and --enable-scale-out"
NOT_AN_ANSWER = (LookupError, TypeError, ValueError, AttributeError, RecursionError)  # of JSON


class LostError(EngineError):
    """A server does not answer, or not with the policy's weights."""


class Weights(NamedTuple):
    """What a server is to sample with."""

    version: str  # of the server's own weights, which it says in every answer
    path: str  # where they are: a whole policy's directory, or --model
    adapter: Path | None = None  # a LoRA policy's directory, whose name is its own


class Memory:
    """A whole policy's weights as vLLM's transfer by NCCL reads them, tensor by tensor."""

    weights: dict[str, torch.Tensor] = {}  # on the CPU

    def metadata(self) -> list:
        named = self.weights.items()
        return [SimpleNamespace(name=name, dtype=w.dtype, shape=w.shape) for name, w in named]

    def __iter__(self):
        return ((name, weight.to(DEVICE)) for name, weight in self.weights.items())


class Server:
    def __init__(self, url: str):
        self.url = url.rstrip("/")
        self.weights: Weights | None = None  # None: not known
        self.salt = ""  # of the prefixes that these weights computed
        self.is_lost = False
        self.in_flight = 0  # requests that it has not answered yet
        self.backend, self.workers = None, 0  # of --weight-transfer-config; its processes
        self.transfer = None  # vLLM's, once they are connected

    def note(self, weights: Weights | None) -> None:
        """That the server has these weights from now on. Prefixes that it kept are not theirs."""
        self.weights, self.salt = weights, uuid.uuid4().hex

    def receive(self, memory: Memory, sent: Future) -> None:
        """Have its workers take these weights by NCCL. Sets sent to what prevented it, or None."""
        from vllm.distributed.weight_transfer import clients, nccl_engine
        from vllm.utils.network_utils import get_ip, get_open_port

        try:
            if not self.transfer:
                at = get_ip(), get_open_port(), 1 + self.workers
                group = nccl_engine.NCCLTrainerInitInfo(*at, rank=0)
                client = clients.HTTPVLLMWeightSyncClient(self.url)
                begin = nccl_engine.NCCLTrainerWeightTransferEngine.trainer_init
                self.transfer = begin(group, client=client, source=memory)
            self.transfer.send_weights()
            sent.set_result(None)
        except Exception as error:  # of HTTP, NCCL and vLLM, which have no common class
            sent.set_result(error)


class ServerEngine:
    """directory: of weights for the servers; restarts: how often one was lost."""

    def __init__(self, directory: Path, path, stop_ids: list[int], args, landed=lambda: None):
        self.directory, self.path = directory.resolve(), path
        self.stop_ids, self.args, self.landed = stop_ids, args, landed
        own = torch.Generator().manual_seed(args.seed + processes.rank())  # not the trainer's
        self.generator = own if args.run_args.async_rollout else None
        self.restarts, self.fruitless = 0, 0  # losses; those since the last sample
        self.name, self.updates = processes.broadcast(uuid.uuid4().hex[:8]), 0
        self.servers = [Server(url) for url in args.run_args.engine_url]
        self.memory, self.homes = Memory(), WeakKeyDictionary()  # {task: where its prefix is}
        self.probe = request_of(stop_ids[:1], max_tokens=1)
        asyncio.run(self.check())

    def connected(self):
        """Around everything that servers are asked: one pool of connections for all of them."""
        waits = aiohttp.ClientTimeout(None, sock_connect=10.0, sock_read=1800.0)  # seconds
        pool = aiohttp.TCPConnector(limit=256 * len(self.servers))
        self.client = aiohttp.ClientSession(timeout=waits, connector=pool, trust_env=True)
        return self.client

    async def call(self, server: Server, path: str, content: dict | None = None) -> str:
        """The answer to a request: GET where nothing is sent. Raises LostError, EngineError."""
        request, url = self.client.get if content is None else self.client.post, server.url + path
        try:
            async with request(url, json=content, allow_redirects=False) as response:
                text = (await response.read()).decode(errors="replace")
        except (aiohttp.ClientError, TimeoutError) as error:
            raise LostError(f"{server.url} does not answer ({type(error).__name__})") from error
        if (status := response.status) >= 400:
            kind = LostError if status >= 500 or status == 404 else EngineError
            raise kind(f"{server.url}: status {status}, {shown(text, 200)}")
        return text

    async def check(self) -> None:
        """Raise EngineError where a server is not there, or not started as it has to be."""
        async with self.connected():
            for server in self.servers:
                has_to = f"{server.url} has to be started with"
                try:
                    found = await self.call(server, "/server_info?config_format=json")
                    config = json.loads(found)["vllm_config"]
                    missing = missing_flags(config, self.args)
                    server.backend = (config.get("weight_transfer_config") or {}).get("backend")
                    size = await self.call(server, "/get_world_size")
                    server.workers = json.loads(size)["world_size"]
                    await self.call(server, "/inference/v1/generate", self.probe)
                except (EngineError, *NOT_AN_ANSWER) as error:
                    raise EngineError(f"{shown(error)}; {has_to} {STARTED}") from error
                if missing:
                    raise EngineError(f"{has_to} {missing}")

    async def take(self, server: Server) -> None:
        """Have a server sample with the policy's weights. Raises LostError, EngineError."""
        (version, path, adapter), before = self.weights, server.weights
        by_transfer = server.backend == TRANSFER and not adapter
        if by_transfer and processes.rank():  # the first one sends; an answer says whether it has
            await self.ask(server, self.probe, self.weights)
        elif not before or before.version != version:
            if by_transfer:
                server.transfer = before and server.transfer  # its weights are not known: anew
                if server.transfer:  # of another server at this address no worker would listen
                    await self.ask(server, self.probe, before)
                await self.send(server)
            else:
                order = {"method": "take_policy", "args": [path]}
                await self.call(server, "/collective_rpc", order)
            await self.call(server, "/update_weight_version", {"new_version": version})
        if adapter:
            for old in {adapter, before.adapter if before else adapter}:
                with contextlib.suppress(EngineError):  # it is not there
                    await self.call(server, "/v1/unload_lora_adapter", {"lora_name": old.name})
            names = {"lora_name": adapter.name, "lora_path": str(adapter)}
            await self.call(server, "/v1/load_lora_adapter", names)
        server.note(self.weights)

    async def send(self, server: Server) -> None:
        """Broadcast a whole policy to a server's workers. Raises LostError, EngineError."""
        sent = Future()  # of a daemon: a broadcast to a worker that has died never returns
        threading.Thread(target=server.receive, args=(self.memory, sent), daemon=True).start()
        if error := await asyncio.wrap_future(sent):
            raise LostError(f"{server.url} took no weights ({first_line(error)})") from error

    async def sample(self, context: list[int], sampling: SamplingParams) -> Sample:
        """One answer to a context, of whatever server has one. Raises EngineError."""
        seed = torch.randint(2**31, (), generator=self.generator).item()
        request = request_of(context, **sampling.asked(self.stop_ids), seed=seed)
        while True:
            while not self.ready_servers():
                await asyncio.sleep(PAUSE / 10)
            server = self.choose()
            salt = server.salt
            try:
                sample = await self.ask(server, request)
                self.fruitless = 0
                return sample
            except LostError as error:
                if server.salt != salt:  # another request has told
                    continue
                self.lose(server, error)
                self.restarts += 1
                self.fruitless += 1
                if self.fruitless >= TRIES * len(self.servers):
                    raise EngineError(f"no sample in {TRIES} tries ({error})") from error

    async def ask(self, server: Server, request: dict, weights: Weights | None = None) -> Sample:
        """A server's answer to a request. Raises LostError, EngineError."""
        weights, request = weights or server.weights, request | {"cache_salt": server.salt}
        if weights.adapter:
            request["model"] = weights.adapter.name
        server.in_flight += 1
        try:
            answer = await self.call(server, "/inference/v1/generate", request)
        finally:
            server.in_flight -= 1
        try:
            (choice,) = json.loads(answer)["choices"]
            ids, most = choice["token_ids"], request["sampling_params"]["max_tokens"]
            logprobs = [float(token["logprob"]) for token in choice["logprobs"]["content"]]
            versions = {span["version"] for span in choice["weight_versions"]}
            is_right = 0 < len(ids) == len(logprobs) <= most and ids == [abs(int(i)) for i in ids]
            if not (is_right and all(-1e4 < x <= 1e-3 for x in logprobs)):
                raise ValueError("not so many ids and log-probabilities")
        except NOT_AN_ANSWER as error:
            raise EngineError(f"{server.url}: no sample in its answer") from error
        if versions != {weights.version}:
            raise LostError(f"{server.url} has other weights than the policy's")
        return ids, logprobs

    def ready_servers(self) -> list[Server]:
        return [server for server in self.servers if server.weights == self.weights]

    def choose(self) -> Server:
        """The server that has read the episode's beginning, or one with 8 requests less."""
        home = self.homes.get(asyncio.current_task())
        best = min(self.ready_servers(), key=lambda s: s.in_flight - 8 * (s is home))
        self.homes[asyncio.current_task()] = best
        return best

    def lose(self, server: Server, error: LostError | str) -> None:
        """A server is lost: it may be another one when it is back."""
        server.note(None)
        if not server.is_lost:
            warn(f"{error}; it is waited for, and gets the policy's weights again")
        server.is_lost = True

    async def serve(self) -> None:
        """Bring back servers that were lost. Raises EngineError where all stay away."""
        self.fruitless = 0
        async with self.connected():
            while True:
                await self.bring_back(BACK_WITHIN)
                await asyncio.sleep(PAUSE)

    async def bring_back(self, within: float) -> None:
        """Give the policy's weights to servers without them until one has them; or EngineError."""
        end = time.monotonic() + within
        while True:
            missing = [server for server in self.servers if server.weights != self.weights]
            hopeful = [server for server in missing if not server.is_lost]
            reasons = await asyncio.gather(*map(self.bring, hopeful or missing))
            if self.ready_servers():
                return  # serve() brings those that were lost before
            if time.monotonic() > end:
                raise EngineError(f"{reasons[0]}; it was waited for {within:.0f} s")
            await asyncio.sleep(PAUSE)

    async def bring(self, server: Server) -> str:
        """Have a server take the weights; why it does not, or nothing. Raises EngineError."""
        try:
            async with asyncio.timeout(HEALTHY_WITHIN):
                await self.call(server, "/health")
            async with asyncio.timeout(BACK_WITHIN):
                await self.take(server)
        except (LostError, TimeoutError) as error:
            reason = str(error) or f"{server.url} hangs, or took no weights in {BACK_WITHIN:.0f} s"
            self.lose(server, reason)
            return reason
        if server.is_lost:
            warn(f"{server.url} is back, and has the policy's weights")
        server.is_lost = False
        return ""

    def sleep(self) -> None: ...  # the servers' memory is not the trainer's

    def load(self, model) -> None:
        self.landed()  # what a thread samples with the weights before (--async-rollout)
        self.updates += 1
        path, is_first = self.directory / f"{self.name}-{self.updates}", processes.rank() == 0
        if is_first:
            shutil.rmtree(self.directory, ignore_errors=True)  # those before
            path.mkdir(parents=True)
        if self.args.policy_lora_rank:
            assert_finite(policy_weights(model))
            write_adapter(path, model, "policy")
            self.weights = Weights(f"{self.path} alone", self.path, path)
        else:
            self.memory.weights = weights = dense_weights(model, self.args.run_args.dtype)
            assert_finite(weights.items())
            if is_first and {server.backend for server in self.servers} != {TRANSFER}:
                save_file(weights, path / "model.safetensors")
            self.weights = Weights(path.name, str(path))
        if failed := processes.broadcast(asyncio.run(self.hand_over()) if is_first else ""):
            raise EngineError(failed)
        has = processes.broadcast([server.weights == self.weights for server in self.servers])
        for server, is_ready in zip(self.servers, has) if not is_first else ():
            server.note(self.weights if is_ready else None)
            server.is_lost = not is_ready

    async def hand_over(self) -> str:
        """Have the servers take the weights; why none of them does."""
        sees = "; the servers have to see --model and --runs-dir under the same paths"
        try:
            async with self.connected():
                await self.bring_back(SEEN_WITHIN if self.updates == 1 else BACK_WITHIN)
        except EngineError as error:
            return f"{error}{sees * any(self.directory.rglob('*.safetensors'))}"
        return ""


def missing_flags(config: dict, args) -> str:
    """What a server of this configuration has to be started with besides."""
    model, lora, parallel = (config.get(f"{p}_config") or {} for p in ("model", "lora", "parallel"))
    dtype, rank, length = args.run_args.dtype, args.policy_lora_rank, args.max_context_tokens
    wrong = {
        "--logprobs-mode processed_logprobs": model.get("logprobs_mode") != "processed_logprobs",
        f"--dtype {dtype}": model.get("dtype") != f"torch.{dtype}",
        f"--max-model-len {length}": (model.get("max_model_len") or 0) < length,
        f"--enable-lora --max-lora-rank {lora_rank_for(rank)}": lora.get("max_lora_rank", 0) < rank,
        f"--worker-extension-cls {EXTENSION}": parallel.get("worker_extension_cls") != EXTENSION,
    }
    return " ".join(flag for flag, is_wrong in wrong.items() if is_wrong)


def request_of(context: list[int], **sampling) -> dict:
    """The body of a request for one sample; sampling: vLLM's SamplingParams."""
    sampling |= {"logprobs": 0, "detokenize": False}
    return {"token_ids": context, "sampling_params": sampling}
