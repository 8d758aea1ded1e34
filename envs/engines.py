"""What samples: vLLM in this process, or transformers on the trainer's model. Three methods that scripts call.

engine.generate(contexts, temperature) -> [(sampled ids, their log-probabilities)]    lists of ids in, and out
engine.load(model)                        samples from this policy's weights from now on
engine.sleep()                            leaves its memory to the trainer
engine.restarts                           how often it was replaced because it failed
"""

import gc
import os

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # the engine lives in this process and takes its weights
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch
from peft import PeftModel
from tqdm import tqdm
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from envs import processes


def plain(model):
    """The transformers model itself, with its adapters' layers inside if it has any."""
    return model.get_base_model() if isinstance(model, PeftModel) else model


def policy_weights(model):
    """(name, tensor) of the policy as one dense network; LoRA is added on the way, and the base is not touched. Of a
    sharded policy all processes have to ask for all tensors."""
    causal = plain(model)
    for name, parameter in causal.named_parameters():
        layer = name.removesuffix(".base_layer.weight")
        if layer != name and "policy" in causal.get_submodule(layer).lora_A:
            parameter = parameter + causal.get_submodule(layer).get_delta_weight("policy")
        if ".lora_" not in name:
            yield name.replace(".base_layer.", "."), processes.whole(parameter.detach())


def assert_finite(weights) -> None:
    """Raise FloatingPointError where one of these (name, tensor) has a number that is not finite."""
    for name, tensor in weights:
        if not tensor.isfinite().all():
            raise FloatingPointError(f"the weights are not finite ({name})")


class HfEngine:
    """transformers on the trainer's own model, for machines without vLLM. Keys and values of the last contexts and
    their samples are kept: of a context that goes on where one of them ended only the rest is read. Where contexts do
    not all fit --engine-memory (40 % of a GPU), they are read in parts, each from its beginning."""

    def __init__(self, path: str, stop_ids: list[int], args):
        self.stop_ids, self.args, self.restarts = stop_ids, args, 0

    def load(self, model) -> None:
        """The trainer's own model; what the old weights computed is forgotten."""
        assert_finite(policy_weights(model))
        self.model = model
        self.sleep()

    def sleep(self) -> None:
        """Leave the memory to the trainer; nothing that was read is kept."""
        self.cache, self.rows, self.seen = None, [], torch.zeros(0, 0)  # rows: (context, the same with its sample)

    def generate(self, contexts: list[list[int]], temperature: float) -> list[tuple[list[int], list[float]]]:
        longest = max(map(len, contexts)) + self.args.max_action_tokens
        if len(contexts) <= self.fitting(2 * longest):  # half of the columns may be hidden ones
            return self.sample(contexts, temperature)
        samples, most = [], self.fitting(longest)
        for i in range(0, len(contexts), most):
            self.sleep()
            samples += self.sample(contexts[i : i + most], temperature)
        return samples

    def fitting(self, columns: int) -> int:
        """How many contexts of so many tokens the memory holds: a key and a value for each layer and head."""
        config = self.model.config.get_text_config(decoder=True)
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        token = 2 * config.num_hidden_layers * heads * width * (2 if self.args.dtype == "bfloat16" else 4)  # [bytes]
        cuda = self.model.device.type == "cuda"
        memory = 0.4 * torch.cuda.mem_get_info()[1] if cuda else self.args.engine_memory * 2**30
        return max(1, int(memory // (token * columns)))

    @torch.no_grad()
    def sample(self, contexts: list[list[int]], temperature: float) -> list[tuple[list[int], list[float]]]:
        """Sample after contexts whose keys and values fit the memory."""
        logprobs = self.read(contexts, temperature)  # [B, vocabulary]
        stops = torch.tensor(self.stop_ids, device=logprobs.device)
        alive = torch.ones_like(logprobs[:, :1], dtype=torch.bool)  # [B, 1]
        sampled, theirs = [], []
        while alive.any() and len(sampled) < self.args.max_action_tokens:
            if sampled:
                logprobs = self.forward(sampled[-1], alive, temperature)
            ids = logprobs.exp().multinomial(1) if temperature else logprobs.argmax(-1, keepdim=True)  # [B, 1]
            sampled.append(ids)
            theirs.append(logprobs.gather(1, ids))
            alive = alive & ~torch.isin(ids, stops)
        samples = []
        for row, row_logprobs in zip(torch.cat(sampled, 1).tolist(), torch.cat(theirs, 1).tolist()):
            end = next((i + 1 for i, token in enumerate(row) if token in self.stop_ids), len(row))
            samples.append((row[:end], row_logprobs[:end]))
        self.rows = [(context, context + ids) for context, (ids, _) in zip(contexts, samples)]
        return samples

    def read(self, contexts: list[list[int]], temperature: float) -> torch.Tensor:
        """Bring the cache to these contexts; log-probabilities of what follows, [B, vocabulary]. Equal contexts, as a
        group's at the start, are read once. The cache has a column for each token of the widest row: what a row has
        not, self.seen [B, columns] hides."""
        different = {context: row for row, context in enumerate(dict.fromkeys(map(tuple, contexts)))}
        cache = DynamicCache(config=self.model.config)
        whole = all(type(layer) is DynamicLayer for layer in cache.layers)  # a window would count hidden columns too
        dense = self.seen.shape[1] <= 2 * max(map(len, contexts))
        kept = iter(enumerate(self.rows if whole and dense else []))  # episodes keep their order
        found = [next((i for i, (c, _) in kept if [*context[: len(c)]] == c), None) for context in different]
        device = self.model.device
        if any(i is not None for i in found):
            place = torch.tensor([i or 0 for i in found], device=device)
            both = [([*c[:-1]], self.rows[i][1] if i is not None else []) for i, c in zip(found, different)]
            common = [len(os.path.commonprefix(pair)) for pair in both]
            self.cache.reorder_cache(place)
            self.seen = self.seen[place]
            self.seen &= self.seen.cumsum(1) <= torch.tensor(common, device=device)[:, None]
        else:
            self.cache, self.seen = cache, torch.zeros(len(different), 0, dtype=torch.bool, device=device)
        new = [context[count:] for context, count in zip(different, self.seen.sum(1).tolist())]
        longest = max(map(len, new))
        ids = torch.tensor([[0] * (longest - len(c)) + [*c] for c in new], device=device)
        real = torch.tensor([[False] * (longest - len(c)) + [True] * len(c) for c in new], device=device)
        for part in zip(ids.split(512, 1), real.split(512, 1)):  # bounds activations and mask
            logprobs = self.forward(*part, temperature)
        if len(different) < len(contexts):
            place = torch.tensor([different[tuple(context)] for context in contexts], device=device)
            self.cache.reorder_cache(place)
            self.seen, logprobs = self.seen[place], logprobs[place]
        return logprobs

    def forward(self, ids: torch.Tensor, real: torch.Tensor, temperature: float) -> torch.Tensor:
        """Log-probabilities [B, vocabulary] of what follows ids [B, n], of which `real` are the row's own."""
        causal, self.seen = plain(self.model), torch.cat([self.seen, real], 1)
        positions = (self.seen.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        given = dict(input_ids=ids, attention_mask=self.seen.long(), position_ids=positions, use_cache=True)
        with torch.autocast(ids.device.type, torch.bfloat16, enabled=self.args.dtype == "bfloat16"):
            hidden = causal.base_model(**given, past_key_values=self.cache).last_hidden_state[:, -1]
            logits = causal.get_output_embeddings()(hidden / (temperature or 1.0))
        return logits.float().log_softmax(-1)


class VllmEngine:
    """vLLM in this process: token ids in; sampled ids and their log-probabilities at the sampling temperature out."""

    def __init__(self, path: str, stop_ids: list[int], args):
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(args.engine_memory))
        from vllm import LLM, SamplingParams

        self.cuda = torch.cuda.is_available()
        on_gpu = dict(gpu_memory_utilization=0.4, enable_sleep_mode=True)
        on_cpu = dict(enforce_eager=True, block_size=32, max_num_batched_tokens=8192)  # its own 128: short turns are
        settings = on_gpu if self.cuda else on_cpu  # computed again, because a prefix is kept in whole blocks
        settings |= dict(dtype=args.dtype, seed=args.seed, max_model_len=args.max_context_tokens)
        settings |= dict(skip_tokenizer_init=True, logprobs_mode="processed_logprobs", disable_log_stats=True)
        if self.cuda and processes.count() > 1:  # an engine for each, in the process group that there is
            settings |= dict(distributed_executor_backend="external_launcher")
        settings |= dict(load_format="safetensors", trust_remote_code=args.trust_remote_code)
        self.start, self.restarts = lambda: LLM(path, **settings), 0
        self.llm = self.start()
        limits = dict(max_tokens=args.max_action_tokens, stop_token_ids=stop_ids, logprobs=0, detokenize=False)
        limits |= dict(skip_clone=True)  # a deep copy for each request is a twentieth of a rollout
        self.sampling = lambda temperature: SamplingParams(temperature=temperature, **limits)

    def generate(self, contexts: list[list[int]], temperature: float) -> list[tuple[list[int], list[float]]]:
        prompts = [{"prompt_token_ids": ids} for ids in contexts]
        try:
            outputs = self.llm.generate(prompts, self.sampling(temperature), use_tqdm=False)
        except Exception as error:  # once in a run a new engine takes its place; the second failure is the run's
            if self.restarts or processes.count() > 1:  # several start together or not at all
                raise
            tqdm.write(f"warning: the engine failed ({type(error).__name__}: {error}); a new one takes its place")
            self.llm, self.restarts = None, 1
            gc.collect()
            self.llm = self.start()
            self.load(self.model)
            outputs = self.llm.generate(prompts, self.sampling(temperature), use_tqdm=False)
        assert [list(output.prompt_token_ids) for output in outputs] == contexts, "the engine saw other ids"
        samples = [(list(output.outputs[0].token_ids), output.outputs[0].logprobs) for output in outputs]
        return [(ids, [places[i].logprob for i, places in zip(ids, logprobs)]) for ids, logprobs in samples]

    def load(self, model) -> None:
        """Take the policy's weights, and forget the prefixes that the old ones computed."""
        assert_finite(policy_weights(model))
        self.model = model
        self.llm.wake_up() if self.cuda else None
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": policy_weights(model)})
        self.llm.apply_model(self.repack_tied_head)
        self.llm.reset_prefix_cache()

    @staticmethod
    def repack_tied_head(model) -> None:
        """A CPU head computes with a packed copy of its weight, which reload_weights leaves old if the head is tied."""
        from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

        for head in [m for m in model.modules() if type(m).__name__ == "ParallelLMHead" and hasattr(m, "cpu_linear")]:
            dispatch_cpu_unquantized_gemm(head, remove_weight=False)

    def sleep(self) -> None:
        """Leave the GPU to the trainer until the next load."""
        self.llm.sleep(level=1) if self.cuda else None
