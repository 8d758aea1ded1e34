"""vLLM in this process, by its own step loop: a request for each turn of each episode. A bfloat16
LoRA policy stays an adapter there: added to the weights, small updates would be rounded away."""

import asyncio
import contextlib
import functools
import gc
import hashlib
import itertools
import logging
import os
import tempfile
import warnings
from pathlib import Path

from runtime.data import pictures_of
from runtime.distributed import processes
from runtime.engines import Engine, EngineError, SamplingParams, lora_rank_for
from runtime.engines.server_extension import repack_tied_head
from runtime.networks import assert_finite, policy_weights
from runtime.saving.checkpoints import write_adapter
from runtime.view.terminal import first_line, warn
from runtime.vision.pictures import never_sampled, opened

import torch


class VllmEngine(Engine):
    """vLLM. If it fails, a new one takes its place, once in a run, and owes the same."""

    def __init__(self, path: str, stop_ids: list[int], args):
        super().__init__()
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(args.run_args.engine_memory))
        logging.getLogger("vllm").setLevel(logging.ERROR)  # it warns before it reads its own level
        warnings.filterwarnings("ignore", category=FutureWarning, module=r"vllm\.")  # about torch
        from transformers import AutoConfig
        from vllm import LLM

        self.cuda = torch.cuda.is_available()
        given, trust = args.run_args, args.run_args.trust_remote_code
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust)
        self.image_token = getattr(config, "image_token_id", None)  # of a model that sees
        settings = dict(dtype=given.dtype, max_model_len=args.max_context_tokens)
        settings |= dict(logprobs_mode="processed_logprobs", seed=args.seed)
        settings |= dict(load_format="safetensors", trust_remote_code=trust)
        settings |= dict(skip_tokenizer_init=True, disable_log_stats=True, use_tqdm_on_load=False)
        if self.cuda:
            settings |= dict(gpu_memory_utilization=given.engine_gpu_share, enable_sleep_mode=True)
        else:
            # With vLLM's own 128 short turns are computed again: a prefix is kept in whole blocks.
            settings |= dict(enforce_eager=True, block_size=32, max_num_batched_tokens=8192)
        if self.image_token is not None:
            from runtime.vision.vllm_pictures import read_without_torchvision

            read_without_torchvision()
            # what a picture becomes is asked of the tokenizer; one that many steps show is kept
            settings |= dict(skip_tokenizer_init=False, mm_device_do_normalize=False)
            settings |= dict(limit_mm_per_prompt={"image": args.max_steps, "video": 0})
        self.takes_adapter = bool(args.policy_lora_rank) and args.run_args.dtype != "float32"
        self.adapter, self.adapters = None, itertools.count(1)  # vLLM's request for it; new ids
        if self.takes_adapter:
            settings |= dict(enable_lora=True, max_lora_rank=lora_rank_for(args.policy_lora_rank))
            if self.image_token is not None and not getattr(args.world, "freeze_vision", False):
                settings["enable_tower_connector_lora"] = True
        if self.cuda and processes.count() > 1:  # an engine each, in the process group there is
            settings |= dict(distributed_executor_backend="external_launcher")
        self.engine = functools.partial(LLM, path, **settings)
        self.start()
        self.stop_ids, self.never = stop_ids, never_sampled(config)
        self.names = map(str, itertools.count())  # of requests
        self.params = {}  # vLLM's own sampling parameters, by ours

    def start(self) -> None:
        """Start an engine. Raises EngineError."""
        try:
            self.llm, self.asleep = self.engine(), False
        except Exception as error:
            raise EngineError(f"vLLM does not start ({first_line(error)})") from error

    async def work(self) -> None:
        """Begin what was asked, and take one step of the engine."""
        new = {next(self.names): request for request in self.take()}
        self.owed |= new
        asked = [(self.prompt(r.context), self.sampling(r.sampling)) for r in new.values()]
        try:
            for name, request in zip(new, asked):
                self.llm.llm_engine.add_request(name, *request, lora_request=self.adapter)
            outputs, failed = self.llm.llm_engine.step(), ""
        except Exception as error:
            if self.restarts or processes.count() > 1:  # several start together or not at all
                twice = " twice" if self.restarts else ""
                raise EngineError(f"the engine failed{twice} ({first_line(error)})") from error
            outputs, failed = [], f"the engine failed ({type(error).__name__}: {error})"
        if failed:  # only here is the failed one free to go: the error's traceback held it
            warn(f"{failed}; a new one takes its place")
            self.replace()
        for output in outputs:
            if output.finished:
                self.finish(output)
        await asyncio.sleep(0)

    def finish(self, output) -> None:
        """Give an answer to who asked. Raises EngineError where vLLM has read other ids."""
        request, completion = self.owed.pop(output.request_id), output.outputs[0]
        if list(output.prompt_token_ids) != request.context:
            raise EngineError("the engine saw other ids than it was asked about")
        request.give((list(completion.token_ids), completion.logprobs.logprobs))

    def forget_requests(self) -> None:
        with contextlib.suppress(Exception):  # of an engine that has failed
            self.llm.llm_engine.abort_request([*self.owed])
        super().forget_requests()

    def replace(self) -> None:
        """End the engine, whose memory is needed, and start another one, which owes the same."""
        self.restarts = 1
        with contextlib.suppress(Exception):  # it has failed already
            self.llm.llm_engine.engine_core.shutdown()
        self.llm = None
        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()
        with torch.random.fork_rng():  # it seeds the process's generator
            self.start()
        self.load(self.model)
        self.asked, self.owed = [*self.owed.values(), *self.asked], {}

    def sampling(self, ours: SamplingParams):
        """Sampling parameters as vLLM takes them, built once for all requests with equal ones."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        if (known := repr(ours)) not in self.params:
            asked = ours.asked(self.stop_ids) | {"output_kind": RequestOutputKind.FINAL_ONLY}
            asked |= {"logit_bias": dict.fromkeys(self.never, -100.0) or None}  # vLLM's limit
            asked |= {"detokenize": False, "skip_clone": True, "flat_logprobs": True}  # no copies
            self.params[known] = SamplingParams(**asked)
        return self.params[known]

    def prompt(self, context: list[int]) -> dict:
        """A context as vLLM takes it: one image token for each picture, which it expands."""
        if not (pictures := pictures_of(context)):
            return {"prompt_token_ids": context}
        firsts, pngs = zip(*pictures)
        seen = [i for i, token in enumerate(context) if token != self.image_token or i in firsts]
        images, uuids = [*map(opened, pngs)], [hashlib.sha256(png).hexdigest() for png in pngs]
        told = {"multi_modal_data": {"image": images}, "multi_modal_uuids": {"image": uuids}}
        return {"prompt_token_ids": [context[i] for i in seen]} | told

    def load(self, model) -> None:
        """Take the policy's weights; what the old ones computed is forgotten."""
        assert_finite(policy_weights(model))
        self.model = model
        if self.asleep:
            self.llm.wake_up(["weights"])  # the cache of keys comes when this takes no more memory
        if self.takes_adapter:
            self.take_adapter(model)
        else:
            weights = {"weights_iterator": policy_weights(model)}
            self.llm.collective_rpc("reload_weights", kwargs=weights)
            self.llm.apply_model(repack_tied_head)
        if self.asleep:
            self.llm.wake_up(["kv_cache"])
            self.asleep = False
        self.llm.reset_prefix_cache()
        if self.image_token is not None:
            self.llm.reset_mm_cache()
            self.llm.llm_engine.reset_encoder_cache()

    def take_adapter(self, model) -> None:
        """Take the policy's adapter under a new id: of a used one vLLM has the old weights."""
        from vllm.lora.request import LoRARequest

        number = next(self.adapters)
        for old in self.llm.llm_engine.list_loras():
            self.llm.llm_engine.remove_lora(old)
        with tempfile.TemporaryDirectory() as path:  # vLLM reads it at once
            write_adapter(Path(path), model, "policy", every_rank=True)
            self.adapter = LoRARequest(f"policy-{number}", number, path)
            self.llm.llm_engine.add_lora(self.adapter)

    def sleep(self) -> None:
        """Leave the GPU to the trainer until the next load. Of weights only an adapter's base is
        kept, on the host (level 1): no load brings it back."""
        if self.cuda and not self.asleep:
            self.llm.sleep(level=1 if self.takes_adapter else 2)
            self.asleep = True
