"""What samples: vLLM in this process, or transformers on the trainer's model.

    engine.generate(contexts, temperature) -> [(sampled ids, their log-probabilities), ...]
    engine.load(model)     samples from this policy's weights from now on
    engine.sleep()         leaves the memory to the trainer until the next load
    engine.restarts        how often the engine was replaced because it failed

Contexts and samples are lists of token ids; nothing is tokenised here.
"""

import contextlib
import gc
import hashlib
import logging
import os
import warnings

from runtime.distributed import processes
from runtime.engines.server_extension import repack_tied_head
from runtime.models import first_line
from runtime.networks import assert_finite, compute_with, plain, policy_weights
from runtime.view.terminal import warn
from runtime.vision.pictures import Album, never_sampled, opened, pictures_of

import torch
from torch.nn.functional import pad


class EngineError(RuntimeError):
    """vLLM does not start, or failed twice."""


Sample = tuple[list[int], list[float]]  # sampled ids, and the log-probability of each


class HfEngine:
    """transformers on the trainer's own model, for machines without vLLM.

    Keys and values of the last contexts and their samples are kept: of a context that goes on where
    one of them ended only the rest is read. Where contexts do not all fit --engine-memory (on a GPU
    --engine-gpu-share), they are read in parts, each from its beginning."""

    def __init__(self, path: str, stop_ids: list[int], args):
        self.stop_ids, self.args, self.restarts = stop_ids, args, 0

    def load(self, model) -> None:
        """Take the trainer's own model; what the old weights computed is forgotten."""
        assert_finite(policy_weights(model))
        self.model = model
        self.sleep()

    def sleep(self) -> None:
        """Leave the memory to the trainer; nothing that was read is kept."""
        self.forget()
        self.album = None  # of a model that sees: the pictures of contexts since the last load

    def forget(self) -> None:
        """Empty the cache of keys and values."""
        self.cache, self.seen = None, torch.zeros(0, 0)
        self.rows = []  # (context, the same with its sample) of each row of the cache
        self.shift = 0  # [B, 1] by how much positions differ from places, where there are pictures

    def generate(self, contexts: list[list[int]], temperature: float) -> list[Sample]:
        if not contexts:
            return []
        compute_with(self.model, ("policy",))
        if any(map(pictures_of, contexts)):
            self.album = self.album or Album(plain(self.model))
            with torch.no_grad(), self.autocast():
                contexts = self.album.numbered(contexts)
        longest = max(map(len, contexts)) + self.args.max_action_tokens
        if len(contexts) <= self.fitting(2 * longest):  # half of the columns may be hidden ones
            return self.sample(contexts, temperature)

        samples, most = [], self.fitting(longest)
        for i in range(0, len(contexts), most):
            self.forget()
            samples += self.sample(contexts[i : i + most], temperature)
        return samples

    def fitting(self, columns: int) -> int:
        """How many contexts of so many tokens the memory holds: a key and a value for each layer
        and head."""
        config = self.model.config.get_text_config(decoder=True)
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        width = getattr(config, "head_dim", None)
        width = width or config.hidden_size // config.num_attention_heads
        number = 2 if self.args.run_args.dtype == "bfloat16" else 4  # [bytes]
        token = 2 * config.num_hidden_layers * heads * width * number  # [bytes]

        memory = self.args.run_args.engine_memory * 2**30
        if self.model.device.type == "cuda":
            memory = self.args.run_args.engine_gpu_share * torch.cuda.mem_get_info()[1]
        return max(1, int(memory // (token * columns)))

    @torch.no_grad()
    def sample(self, contexts: list[list[int]], temperature: float) -> list[Sample]:
        """Sample after contexts whose keys and values fit the memory."""
        logprobs = self.read(contexts, temperature)  # [B, vocabulary]
        stops = torch.tensor(self.stop_ids, device=logprobs.device)
        alive = torch.ones_like(logprobs[:, :1], dtype=torch.bool)  # [B, 1]
        sampled, theirs = [], []
        while alive.any() and len(sampled) < self.args.max_action_tokens:
            if sampled:
                logprobs = self.forward(sampled[-1], alive, temperature)
            ids = logprobs.argmax(-1, keepdim=True)  # [B, 1]
            if temperature:
                ids = logprobs.exp().multinomial(1)
            sampled.append(ids)
            theirs.append(logprobs.gather(1, ids))
            alive = alive & ~torch.isin(ids, stops)

        samples = []
        for ids, logprobs in zip(torch.cat(sampled, 1).tolist(), torch.cat(theirs, 1).tolist()):
            ends = (i + 1 for i, token in enumerate(ids) if token in self.stop_ids)
            end = next(ends, len(ids))
            samples.append((ids[:end], logprobs[:end]))
        self.rows = [(context, context + ids) for context, (ids, _) in zip(contexts, samples)]
        return samples

    def read(self, contexts: list[list[int]], temperature: float) -> torch.Tensor:
        """Bring the cache to these contexts; log-probabilities of what follows, [B, vocabulary].

        Equal contexts, as a group's at the start, are read once. The cache has a column for each
        token of the widest row: what a row has not, self.seen [B, columns] hides."""
        numbers = {context: row for row, context in enumerate(dict.fromkeys(map(tuple, contexts)))}
        device = self.model.device
        self.reuse([[*context] for context in numbers])

        new = [context[n:] for context, n in zip(numbers, self.seen.sum(1).tolist())]
        longest = max(map(len, new))
        ids = [[0] * (longest - len(c)) + [*c] for c in new]
        real = [[False] * (longest - len(c)) + [True] * len(c) for c in new]
        ids, real = torch.tensor(ids, device=device), torch.tensor(real, device=device)
        places = [None] * longest
        if self.album:
            places = self.place(list(numbers), longest).split(512, 2)
        parts = zip(ids.split(512, 1), real.split(512, 1), places)  # bounds activations and mask
        for part_ids, part_real, part_places in parts:
            logprobs = self.forward(part_ids, part_real, temperature, part_places)

        if len(numbers) < len(contexts):
            rows = torch.tensor([numbers[tuple(context)] for context in contexts], device=device)
            self.cache.reorder_cache(rows)
            self.seen, logprobs = self.seen[rows], logprobs[rows]
            if self.album:
                self.shift = self.shift[rows]
        return logprobs

    def place(self, contexts: list[list[int]], width: int) -> torch.Tensor:
        """Positions [3, B, width] of the contexts' last tokens, on the right; and self.shift, for
        what is sampled after them."""
        places = [self.album.positions(context) for context in contexts]  # [3, T] of each
        after = [[int(p.max()) + 1 - p.shape[1]] for p in places]
        self.shift = torch.tensor(after, device=self.model.device)  # [B, 1]
        rows = [pad(p, (max(0, width - p.shape[1]), 0))[:, -width:] for p in places]
        return torch.stack(rows, 1).to(self.model.device)

    def reuse(self, contexts: list[list[int]]) -> None:
        """Leave in the cache what these contexts share with the rows that it has, or empty it."""
        from runtime.engines.caches import RoomyLayer

        from transformers import DynamicCache
        from transformers.cache_utils import DynamicLayer

        cache = DynamicCache(config=self.model.config)
        # a sliding window would count hidden columns too
        whole = all(type(layer) is DynamicLayer for layer in cache.layers)
        if whole:
            cache.layers = [RoomyLayer() for _ in cache.layers]
        dense = self.seen.shape[1] <= 2 * max(map(len, contexts))
        kept = iter(enumerate(self.rows if whole and dense else []))  # episodes keep their order
        found = []
        for context in contexts:
            rows = (i for i, (old, _) in kept if context[: len(old)] == old)
            found.append(next(rows, None))

        device = self.model.device
        if all(row is None for row in found):
            self.cache = cache
            self.seen = torch.zeros(len(contexts), 0, dtype=torch.bool, device=device)
            return

        common = []
        for row, context in zip(found, contexts):
            read = [] if row is None else self.rows[row][1]
            common.append(len(os.path.commonprefix([context[:-1], read])))
        rows = torch.tensor([row or 0 for row in found], device=device)
        self.cache.reorder_cache(rows)
        self.seen = self.seen[rows]
        self.seen &= self.seen.cumsum(1) <= torch.tensor(common, device=device)[:, None]

    def autocast(self):
        bfloat16 = self.args.run_args.dtype == "bfloat16"
        return torch.autocast(self.model.device.type, torch.bfloat16, enabled=bfloat16)

    def forward(self, ids, real, temperature: float, places=None) -> torch.Tensor:
        """Log-probabilities [B, vocabulary] of what follows ids [B, n], of which `real` [B, n] are
        the row's own; places [3, B, n]: their positions where there are pictures among them."""
        causal, self.seen = plain(self.model), torch.cat([self.seen, real], 1)
        if places is None:
            places = (self.seen.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :] + self.shift
        with self.autocast():
            inputs = {"input_ids": ids}
            if self.album:
                inputs = {"inputs_embeds": self.album.embeddings(ids)}
            output = causal.base_model(
                **inputs,
                attention_mask=self.seen.long(),
                position_ids=places,
                past_key_values=self.cache,
                use_cache=True,
            )
            hidden = output.last_hidden_state[:, -1]
            logits = causal.get_output_embeddings()(hidden).float().div_(temperature or 1.0)
        for token in never_sampled(causal.config):
            logits[:, token] = -torch.inf
        return logits.log_softmax(-1)


class VllmEngine:
    """vLLM in this process; log-probabilities are those at the sampling temperature."""

    def __init__(self, path: str, stop_ids: list[int], args):
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(args.run_args.engine_memory))
        logging.getLogger("vllm").setLevel(logging.ERROR)  # it warns before it reads its own level
        warnings.filterwarnings("ignore", category=FutureWarning, module=r"vllm\.")  # about torch
        from transformers import AutoConfig
        from vllm import LLM, SamplingParams

        self.cuda = torch.cuda.is_available()
        config = AutoConfig.from_pretrained(path, trust_remote_code=args.run_args.trust_remote_code)
        self.image_token = getattr(config, "image_token_id", None)  # of a model that sees
        settings = dict(
            dtype=args.run_args.dtype,
            seed=args.seed,
            max_model_len=args.max_context_tokens,
            skip_tokenizer_init=True,
            logprobs_mode="processed_logprobs",
            disable_log_stats=True,
            load_format="safetensors",
            use_tqdm_on_load=False,
            trust_remote_code=args.run_args.trust_remote_code,
        )
        if self.cuda:
            share = args.run_args.engine_gpu_share
            settings |= dict(gpu_memory_utilization=share, enable_sleep_mode=True)
        else:
            # With vLLM's own 128 short turns are computed again: a prefix is kept in whole blocks.
            settings |= dict(enforce_eager=True, block_size=32, max_num_batched_tokens=8192)
        if self.image_token is not None:
            from runtime.vision.vllm_pictures import read_without_torchvision

            read_without_torchvision()
            # what a picture becomes is asked of the tokenizer; one that many steps show is kept
            settings |= dict(skip_tokenizer_init=False, mm_device_do_normalize=False)
            settings |= dict(limit_mm_per_prompt={"image": args.max_steps, "video": 0})
        if self.cuda and processes.count() > 1:  # an engine each, in the process group there is
            settings |= dict(distributed_executor_backend="external_launcher")
        self.engine, self.restarts = lambda: LLM(path, **settings), 0
        self.llm = self.start()
        self.asleep = False

        limits = dict(
            max_tokens=args.max_action_tokens,
            stop_token_ids=stop_ids,
            logprobs=0,  # of the sampled token alone
            detokenize=False,
            skip_clone=True,  # a deep copy for each request is a twentieth of a rollout
        )
        if never := never_sampled(config):
            limits["logit_bias"] = dict.fromkeys(never, -100.0)  # the most that vLLM takes
        self.sampling = lambda temperature: SamplingParams(temperature=temperature, **limits)

    def start(self):
        """A new engine; raises EngineError."""
        try:
            return self.engine()
        except Exception as error:
            raise EngineError(f"vLLM does not start ({first_line(error)})") from error

    def generate(self, contexts: list[list[int]], temperature: float) -> list[Sample]:
        if not contexts:
            return []
        outputs = self.outputs([self.prompt(context) for context in contexts], temperature)
        seen = [list(output.prompt_token_ids) for output in outputs]
        assert seen == contexts, "the engine saw other ids"
        samples = []
        for output in outputs:
            ids, places = list(output.outputs[0].token_ids), output.outputs[0].logprobs
            samples.append((ids, [place[i].logprob for i, place in zip(ids, places)]))
        return samples

    def outputs(self, prompts: list[dict], temperature: float) -> list:
        """vLLM's answers. If it fails a new engine takes its place, once in a run."""
        try:
            return self.llm.generate(prompts, self.sampling(temperature), use_tqdm=False)
        except Exception as error:
            failed = f"the engine failed ({type(error).__name__}: {error})"
            if self.restarts or processes.count() > 1:  # several start together or not at all
                raise EngineError(f"the engine failed ({first_line(error)})") from error

        # only here is the failed one free to go: the error's traceback held it
        warn(f"{failed}; a new one takes its place")
        self.replace()
        try:
            return self.llm.generate(prompts, self.sampling(temperature), use_tqdm=False)
        except Exception as again:
            raise EngineError(f"the engine failed twice ({first_line(again)})") from again

    def replace(self) -> None:
        """End the engine, whose memory the new one needs, and start one with the current
        weights."""
        self.restarts = 1
        with contextlib.suppress(Exception):  # it has failed already
            self.llm.llm_engine.engine_core.shutdown()
        self.llm = None
        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()
        self.llm, self.asleep = self.start(), False
        self.load(self.model)

    def prompt(self, context: list[int]) -> dict:
        """A context as vLLM takes it: one image token for each picture, which it expands."""
        pictures = pictures_of(context)
        if not pictures:
            return {"prompt_token_ids": context}
        ids, shown = [], [place for place, _ in pictures]
        for place, token in enumerate(context):
            if token != self.image_token or place in shown:
                ids.append(token)
        return {
            "prompt_token_ids": ids,
            "multi_modal_data": {"image": [opened(png) for _, png in pictures]},
            "multi_modal_uuids": {
                "image": [hashlib.sha256(png).hexdigest() for _, png in pictures]
            },
        }

    def load(self, model) -> None:
        """Take the policy's weights, and forget the prefixes and the pictures that the old ones
        computed."""
        assert_finite(policy_weights(model))
        self.model = model
        if self.asleep:
            self.llm.wake_up(["weights"])  # the cache of keys comes when this takes no more memory
        weights = {"weights_iterator": policy_weights(model)}
        self.llm.collective_rpc("reload_weights", kwargs=weights)
        self.llm.apply_model(self.repack_tied_head)
        if self.asleep:
            self.llm.wake_up(["kv_cache"])
            self.asleep = False
        self.llm.reset_prefix_cache()
        if self.image_token is not None:
            self.llm.reset_mm_cache()
            self.llm.llm_engine.reset_encoder_cache()

    repack_tied_head = staticmethod(repack_tied_head)

    def sleep(self) -> None:
        """Leave the GPU to the trainer until the next load, which brings all weights: none are
        kept."""
        if self.cuda and not self.asleep:
            self.llm.sleep(level=2)
            self.asleep = True
