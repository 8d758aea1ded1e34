"""An engine that stands apart: vLLM servers on other machines sample, and this process trains.

--engine-url names them; docs/many-gpus.md has the command that starts one. Token ids go there and
come back; nothing is tokenised. The contexts of a call are divided between the servers. Each
context has a seed of its own, so that a sample which is asked for again is the same.

Weights go by files, in a directory of the run that the servers have to see too. A LoRA policy is an
adapter on the weights of --model, under a new name after each update: a name once used would serve
the old weights. A whole policy takes the place of the server's own weights. Every answer says which
weights it is of, and the prefix cache has a new salt whenever weights are taken, so nothing that
others computed is taken for theirs.

A server that is lost in the middle is waited for, unless others are left. What it still owed is
asked for again, and it gets the weights again when it is back.
"""

import asyncio
import itertools
import shutil
import time
import uuid
from pathlib import Path
from typing import NamedTuple

from runtime.distributed import processes
from runtime.engines import EngineError, Sample
from runtime.networks import assert_finite, policy_weights
from runtime.view.terminal import plain, warn

import torch
from safetensors.torch import save_file

BACK_WITHIN = 600.0  # seconds that all servers may be away in the middle of a run
PAUSE = 1.0  # seconds until a server that did not answer is asked again
LONGEST_PAUSE = 10.0  # the same while other servers answer
ANSWERS_WITHIN = 1800.0  # seconds
TRIES = 3  # of a call that no server answers, and of weights that a server does not take
IN_FLIGHT = 256  # requests that one server has at a time
SHARD = 2**31  # bytes of a file of weights, about
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
    """One vLLM server. version, adapter: of the weights that it has; None: not known."""

    def __init__(self, url: str):
        import httpx2  # imported late: an engine in this process does without

        self.httpx = httpx2
        self.url = url.rstrip("/")
        self.version = self.adapter = None
        self.salt = ""  # of the prefixes that these weights computed
        self.asked_again = 0.0  # when a server that was lost may be asked again, by time.monotonic
        waits = httpx2.Timeout(ANSWERS_WITHIN, connect=LONGEST_PAUSE)
        limits = httpx2.Limits(max_connections=IN_FLIGHT)
        self.client = httpx2.Client(base_url=self.url, timeout=waits)
        self.samplers = httpx2.AsyncClient(base_url=self.url, timeout=waits, limits=limits)

    def call(self, method: str, path: str, **content):
        """The JSON of an answer, or {}. Raises LostError where there is none, EngineError where the
        server refuses."""
        try:
            response = self.client.request(method, path, **content)
        except self.httpx.HTTPError as error:
            raise LostError(type(error).__name__) from error
        return self.read(response)

    def read(self, response) -> dict:
        if response.status_code >= 400:
            raise EngineError(f"{self.url}: status {response.status_code}{message_of(response)}")
        try:
            found = response.json()
        except (ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}

    def check(self, args, stop_ids: list[int]) -> None:
        """Raise EngineError where the server is not there, or not started as it has to be."""
        try:
            found = self.call("GET", "/server_info", params={"config_format": "json"})
            self.call("POST", "/inference/v1/generate", json=request_of(stop_ids[:1], 1))
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

    def has(self, weights: Weights) -> bool:
        return (self.version, self.adapter) == (weights.version, weights.adapter)

    def take(self, weights: Weights) -> None:
        """Have the server sample with these weights. Raises LostError, EngineError."""
        for attempt in range(TRIES):
            try:
                if self.version != weights.version:
                    order = {"method": "take_policy", "args": [weights.path]}
                    self.call("POST", "/collective_rpc", json=order)
                    version = {"new_version": weights.version}
                    self.call("POST", "/update_weight_version", json=version)
                if weights.adapter:
                    self.forget(weights.adapter)  # of a try whose answer was lost
                    names = {"lora_name": weights.adapter, "lora_path": weights.adapter_path}
                    self.call("POST", "/v1/load_lora_adapter", json=names)
                self.note(weights)
                return
            except EngineError as error:
                if not self.is_alive():
                    raise LostError(str(error)) from error
                if attempt + 1 == TRIES:
                    seen = "the servers have to see --model and --runs-dir under the same paths"
                    raise EngineError(f"{error}; {seen}") from error
                time.sleep(PAUSE)

    def is_alive(self) -> bool:
        """Whether there is an engine behind the address: its process may have died alone."""
        try:
            self.call("GET", "/health")
        except (LostError, EngineError):
            return False
        return True

    def note(self, weights: Weights) -> None:
        """That the server has these weights from now on. Prefixes that it kept are not theirs."""
        self.version, self.adapter, self.salt = weights.version, weights.adapter, uuid.uuid4().hex

    def lose(self) -> None:
        """Forget which weights the server has: it may be another one now."""
        self.version = self.adapter = None

    def forget(self, tag: str) -> None:
        """Unload an adapter, if it is there."""
        try:
            self.call("POST", "/v1/unload_lora_adapter", json={"lora_name": tag})
        except (LostError, EngineError):
            pass

    async def sample(self, request: dict) -> Sample:
        """Raises LostError, EngineError."""
        version, request = self.version, request | {"cache_salt": self.salt}
        if self.adapter:
            request["model"] = self.adapter
        try:
            response = await self.samplers.post("/inference/v1/generate", json=request)
        except self.httpx.HTTPError as error:
            raise LostError(type(error).__name__) from error
        if response.status_code >= 500 or response.status_code == 404:  # an adapter that it lost
            raise LostError(f"status {response.status_code}{message_of(response)}")
        ids, logprobs, versions = self.answer(self.read(response), request)
        if versions != {version}:
            raise LostError("it has other weights than the policy's")
        return ids, logprobs

    def answer(self, found: dict, request: dict) -> tuple[list[int], list[float], set]:
        """(ids, log-probabilities, versions of the weights) of an answer; or EngineError."""
        try:
            (choice,) = found["choices"]
            ids = choice["token_ids"]
            logprobs = [float(token["logprob"]) for token in choice["logprobs"]["content"]]
            versions = {span["version"] for span in choice.get("weight_versions") or []}
            assert all(type(token) is int and token >= 0 for token in ids)
            assert 0 < len(ids) <= request["sampling_params"]["max_tokens"]
            assert len(ids) == len(logprobs) and all(-1e4 < p <= 1e-3 for p in logprobs)
        except (LookupError, TypeError, ValueError, AssertionError) as error:
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


def request_of(context: list[int], max_tokens: int, **sampling) -> dict:
    """The body of a request for one sample; sampling: more of vLLM's SamplingParams."""
    limits = {"max_tokens": max_tokens, "logprobs": 0, "detokenize": False}
    return {"token_ids": context, "sampling_params": limits | sampling}


class RemoteEngine:
    """vLLM servers. directory: where weights are left for them; they have to see it too."""

    def __init__(self, directory: Path, path: str, stop_ids: list[int], args):
        self.directory, self.path = directory.resolve(), path
        self.stop_ids, self.args = stop_ids, args
        self.restarts = 0  # how often a server was lost, and had to get the weights again
        self.name, self.updates = processes.broadcast(uuid.uuid4().hex[:8]), 0
        self.loop = asyncio.Runner()
        self.servers = [Server(url) for url in args.run_args.engine_url]
        for server in self.servers:
            server.check(args, stop_ids)
        shift = processes.rank() % len(self.servers)  # processes begin with different ones
        self.servers = self.servers[shift:] + self.servers[:shift]

    def sleep(self) -> None:
        """Nothing: the servers' memory is not the trainer's."""

    def load(self, model) -> None:
        """Leave the policy's weights for the servers, and have them take these."""
        assert_finite(policy_weights(model))
        self.updates += 1
        tag = f"{self.name}-{self.updates}"
        path = self.directory / tag
        if processes.rank() == 0:
            shutil.rmtree(self.directory, ignore_errors=True)  # those before
            path.mkdir(parents=True)
        if self.args.policy_lora_rank:
            write_adapter(model, path)
            self.weights = Weights(f"{self.path} alone", self.path, tag, str(path))
        else:
            write_weights(model, path, getattr(torch, self.args.run_args.dtype))
            self.weights = Weights(tag, str(path))

        failed = ""
        if processes.rank() == 0:
            before = [(server, server.adapter) for server in self.servers if server.adapter]
            try:
                self.ready()
            except EngineError as error:
                failed = str(error)
            for server, adapter in before:
                server.forget(adapter)
        if failed := processes.broadcast(failed):
            raise EngineError(failed)
        for server in self.servers if processes.rank() else ():
            server.note(self.weights)

    def ready(self) -> list[Server]:
        """The servers that have the policy's weights, once there is one. Raises EngineError."""
        end, told = time.monotonic() + BACK_WITHIN, False
        while True:
            for server in self.servers:
                if server.has(self.weights) or time.monotonic() < server.asked_again:
                    continue
                try:
                    server.take(self.weights)
                except LostError as error:
                    server.asked_again = time.monotonic() + LONGEST_PAUSE
                    reason = f"{server.url} does not answer ({error})"
            if there := [server for server in self.servers if server.has(self.weights)]:
                if told:
                    warn(f"{there[0].url} is back, and has the policy's weights again")
                return there

            if time.monotonic() > end:
                raise EngineError(f"{reason}; it was waited for {BACK_WITHIN:.0f} s")
            if not told:
                warn(f"{reason}; it is waited for, {BACK_WITHIN:.0f} s at most")
            told = True
            time.sleep(PAUSE)
            for server in self.servers:
                server.asked_again = 0.0

    def generate(self, contexts: list[list[int]], temperature: float) -> list[Sample]:
        seeds = torch.randint(2**31, (len(contexts),)).tolist()
        limits = {"stop_token_ids": self.stop_ids, "temperature": temperature}
        requests = []
        for context, seed in zip(contexts, seeds):
            request = request_of(context, self.args.max_action_tokens, seed=seed, **limits)
            requests.append(request)

        samples, fruitless = [None] * len(contexts), 0
        while missing := [i for i, sample in enumerate(samples) if sample is None]:
            servers = self.ready()
            whose = [servers[n * len(servers) // len(missing)] for n in range(len(missing))]
            answers = self.loop.run(self.ask([requests[i] for i in missing], whose))

            lost = {}
            for i, server, answer in zip(missing, whose, answers):
                if isinstance(answer, LostError):
                    lost[server] = answer
                elif isinstance(answer, BaseException):
                    raise answer
                else:
                    samples[i] = answer
            for server, error in lost.items():
                server.lose()
                self.restarts += 1
                warn(f"{server.url} was lost in the middle of a rollout ({error})")

            fruitless = fruitless + 1 if all(samples[i] is None for i in missing) else 0
            if fruitless == TRIES:
                reasons = "; ".join(f"{server.url}: {error}" for server, error in lost.items())
                raise EngineError(f"no sample in {TRIES} tries ({reasons})")
        return samples

    async def ask(self, requests: list[dict], whose: list[Server]) -> list:
        """The samples of all requests, each by its server; or what it raised."""
        asked = (server.sample(request) for request, server in zip(requests, whose))
        return await asyncio.gather(*asked, return_exceptions=True)


def write_adapter(model, path: Path) -> None:
    """The policy's adapter, as vLLM reads it; by the first process."""
    from peft import get_peft_model_state_dict

    if processes.rank():
        return
    found = get_peft_model_state_dict(model, adapter_name="policy")
    found = {name: tensor.detach().cpu().contiguous() for name, tensor in found.items()}
    save_file(found, path / "adapter_model.safetensors")
    model.peft_config["policy"].save_pretrained(path)


def write_weights(model, path: Path, dtype: torch.dtype) -> None:
    """The policy's weights in this precision, in files of about SHARD bytes; by the first process.
    Of a sharded policy all processes have to ask for all tensors."""
    shard, number = {}, itertools.count(1)
    for name, weight in policy_weights(model):
        if processes.rank():
            continue
        shard[name] = weight.to("cpu", dtype).contiguous()
        if sum(tensor.nbytes for tensor in shard.values()) > SHARD:
            save_file(shard, path / f"model-{next(number):05}.safetensors")
            shard = {}
    if shard:
        save_file(shard, path / f"model-{next(number):05}.safetensors")
