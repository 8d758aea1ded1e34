"""transformers on the trainer's own model. All who ask at once are answered together, in the order
in which they asked: the same seed gives the same samples, bit for bit."""

import asyncio
import os

from runtime.data import pictures_of
from runtime.engines import Engine, Request, Sample, SamplingParams
from runtime.networks import assert_finite, compute_with, plain, policy_weights
from runtime.vision.pictures import Album, never_sampled

import torch
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache, TopKLogitsWarper, TopPLogitsWarper
from transformers.cache_utils import DynamicLayer

ROOM = 64  # tokens that are appended before a layer's keys and values are copied once


class TransformersEngine(Engine):
    """Keys and values of the last contexts are kept: of a context that goes on where one ended only
    the rest is read. Contexts that do not all fit --engine-memory are read in parts."""

    def __init__(self, path: str, stop_ids: list[int], args):
        super().__init__()
        self.stop_ids, self.args, self.dtype = stop_ids, args, args.run_args.dtype

    def load(self, model) -> None:
        assert_finite(policy_weights(model))
        self.model = model
        self.sleep()

    def sleep(self) -> None:
        self.forget()
        self.album = None  # of a model that sees: the pictures of contexts since the last load

    def forget(self) -> None:
        self.cache, self.seen = None, torch.zeros(0, 0)
        self.rows = []  # (context, the same with its sample) of each row of the cache
        self.shift = 0  # [B, 1] by how much positions differ from places, where there are pictures

    async def work(self) -> None:
        """Answer all who have asked, once nobody does in three passes of the event loop."""
        number, quiet = 0, 0
        while quiet < 3:
            quiet = quiet + 1 if number == len(self.asked) else 0
            number = len(self.asked)
            await asyncio.sleep(0)
        parts: dict[str, list[Request]] = {}
        for request in self.take():
            parts.setdefault(repr(request.sampling), []).append(request)
        for requests in parts.values():
            contexts = [request.context for request in requests]
            for request, sample in zip(requests, self.generate(contexts, requests[0].sampling)):
                request.give(sample)

    def generate(self, contexts: list[list[int]], sampling: SamplingParams) -> list[Sample]:
        """Answers to contexts, in their order: in one batch, or as many at a time as fit."""
        compute_with(self.model, ("policy",))
        if any(map(pictures_of, contexts)):
            self.album = self.album or Album(plain(self.model))
            with torch.no_grad(), self.autocast():
                contexts = self.album.numbered(contexts)
        longest = max(map(len, contexts)) + sampling.max_tokens
        if len(contexts) <= self.fitting(2 * longest):  # half of the columns may be hidden ones
            return self.generate_batch(contexts, sampling)
        samples, most = [], self.fitting(longest)
        for i in range(0, len(contexts), most):
            self.forget()
            samples += self.generate_batch(contexts[i : i + most], sampling)
        return samples

    def fitting(self, columns: int) -> int:
        """How many contexts of so many tokens the memory holds: keys and values of all layers."""
        config = self.model.config.get_text_config(decoder=True)
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        even = config.hidden_size // config.num_attention_heads
        width = (getattr(config, "head_dim", None) or even) * getattr(torch, self.dtype).itemsize
        token = 2 * config.num_hidden_layers * heads * width  # [bytes]
        memory = self.args.run_args.engine_memory * 2**30
        if self.model.device.type == "cuda":
            memory = self.args.run_args.engine_gpu_share * torch.cuda.mem_get_info()[1]
        return max(1, int(memory // (token * columns)))

    @torch.no_grad()
    def generate_batch(self, contexts: list[list[int]], sampling: SamplingParams) -> list[Sample]:
        logprobs = self.read(contexts, sampling)  # [B, vocabulary]
        stop_ids = sampling.asked(self.stop_ids)["stop_token_ids"]
        stops = torch.tensor(stop_ids, device=logprobs.device)
        alive = torch.ones_like(logprobs[:, :1], dtype=torch.bool)  # [B, 1]
        sampled, theirs = [], []
        while alive.any() and len(sampled) < sampling.max_tokens:
            if sampled:
                logprobs = self.forward(sampled[-1], alive, sampling)
            ids = logprobs.argmax(-1, keepdim=True)  # [B, 1]
            if sampling.temperature:
                ids = logprobs.exp().multinomial(1)
            sampled.append(ids)
            theirs.append(logprobs.gather(1, ids))
            alive = alive & ~torch.isin(ids, stops)
        samples = []
        for ids, logprobs in zip(torch.cat(sampled, 1).tolist(), torch.cat(theirs, 1).tolist()):
            end = next((i + 1 for i, token in enumerate(ids) if token in stop_ids), len(ids))
            samples.append((ids[:end], logprobs[:end]))
        self.rows = [(context, context + ids) for context, (ids, _) in zip(contexts, samples)]
        return samples

    def read(self, contexts: list[list[int]], sampling: SamplingParams) -> torch.Tensor:
        """Bring the cache to these contexts; log-probabilities of what follows, [B, vocabulary].
        Equal contexts are read once. self.seen [B, columns] hides what a row does not have."""
        numbers = {context: row for row, context in enumerate(dict.fromkeys(map(tuple, contexts)))}
        device = self.model.device
        self.reuse([[*context] for context in numbers])
        new = [torch.tensor(c[n:]) for c, n in zip(numbers, self.seen.sum(1).tolist())]
        ids = pad_sequence(new, True, padding_side="left").to(device)
        real = [torch.ones_like(each, dtype=torch.bool) for each in new]
        real, longest = pad_sequence(real, True, padding_side="left").to(device), ids.shape[1]
        places = [None] * longest
        if self.album:
            places = self.place(list(numbers), longest).split(512, 2)
        for part_ids, part_real, part_places in zip(ids.split(512, 1), real.split(512, 1), places):
            logprobs = self.forward(part_ids, part_real, sampling, part_places)  # bounds memory
        if len(numbers) < len(contexts):
            rows = torch.tensor([numbers[tuple(context)] for context in contexts], device=device)
            self.cache.reorder_cache(rows)
            self.seen, logprobs = self.seen[rows], logprobs[rows]
            if self.album:
                self.shift = self.shift[rows]
        return logprobs

    def place(self, contexts: list[list[int]], width: int) -> torch.Tensor:
        """Positions [3, B, width] of the contexts' last tokens, on the right; sets self.shift."""
        places = [self.album.positions(context) for context in contexts]  # [3, T] of each
        after = [[int(p.max()) + 1 - p.shape[1]] for p in places]
        self.shift = torch.tensor(after, device=self.model.device)  # [B, 1]
        rows = [pad(p, (max(0, width - p.shape[1]), 0))[:, -width:] for p in places]
        return torch.stack(rows, 1).to(self.model.device)

    def reuse(self, contexts: list[list[int]]) -> None:
        """Leave in the cache what these contexts share with the rows that it has, or empty it."""
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
        read = [[] if row is None else self.rows[row][1] for row in found]
        common = [len(os.path.commonprefix([c[:-1], old])) for c, old in zip(contexts, read)]
        rows = torch.tensor([row or 0 for row in found], device=device)
        self.cache.reorder_cache(rows)
        self.seen = self.seen[rows]
        self.seen &= self.seen.cumsum(1) <= torch.tensor(common, device=device)[:, None]

    def autocast(self):
        return torch.autocast(self.model.device.type, torch.bfloat16, self.dtype == "bfloat16")

    def forward(self, ids, real, sampling: SamplingParams, places=None) -> torch.Tensor:
        """Log-probabilities [B, vocabulary] of what follows ids [B, n], of which `real` [B, n] are
        the row's own; places [3, B, n]: their positions where there are pictures among them."""
        causal, self.seen = plain(self.model), torch.cat([self.seen, real], 1)
        if places is None:
            places = (self.seen.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :] + self.shift
        inputs = {"attention_mask": self.seen.long(), "position_ids": places, "input_ids": ids}
        with self.autocast():
            if self.album:
                inputs |= {"input_ids": None, "inputs_embeds": self.album.embeddings(ids)}
            output = causal.base_model(**inputs, past_key_values=self.cache, use_cache=True)
            logits = causal.get_output_embeddings()(output.last_hidden_state[:, -1]).float()
        logits.div_(sampling.temperature or 1.0)
        logits[:, never_sampled(causal.config)] = -torch.inf
        if sampling.temperature and sampling.top_k:
            logits = TopKLogitsWarper(sampling.top_k)(ids, logits)
        if sampling.temperature and sampling.top_p < 1:
            logits = TopPLogitsWarper(sampling.top_p)(ids, logits)
        return logits.log_softmax(-1)


class RoomyLayer(DynamicLayer):
    """A layer's keys and values [B, heads, T, width], with memory behind them for the next tokens:
    transformers' own copies all of them for every token."""

    def update(self, key_states, value_states, *args, **kwargs):
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.rooms = {}  # name: (memory, the part of it that is in use)
        self.keys = self.appended("keys", self.keys, key_states)
        self.values = self.appended("values", self.values, value_states)
        return self.keys, self.values

    def appended(self, name: str, old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        """old and new one after the other: new is written behind old, where there is room."""
        length = old.shape[-2] if old.numel() else 0
        end = length + new.shape[-2]
        memory, used = self.rooms.get(name, (None, None))
        if used is not old or memory.shape[-2] < end:  # the rows are others, or it is full
            memory = new.new_empty(*new.shape[:-2], end + ROOM, new.shape[-1])
            if length:
                memory[..., :length, :] = old
        memory[..., length:end, :] = new
        self.rooms[name] = memory, memory[..., :end, :]
        return self.rooms[name][1]
