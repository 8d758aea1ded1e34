"""What samples: vLLM in this process, or transformers' generate. Both have two methods that scripts call.

engine.generate(contexts, temperature) -> [(sampled ids, their log-probabilities)]    lists of ids in, and out
engine.load(model)                        samples from this policy's weights from now on
engine.restarts                           how often it was replaced because it failed
"""

import gc
import os

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # the engine lives in this process and takes its weights
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch
from peft import PeftModel
from tqdm import tqdm
from transformers import GenerationConfig

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
    """transformers' generate on the trainer's own model, for machines without vLLM; each context is encoded again."""

    def __init__(self, path: str, stop_ids: list[int], args):
        self.stop_ids, self.args, self.restarts = stop_ids, args, 0

    @torch.no_grad()
    def generate(self, contexts: list[list[int]], temperature: float) -> list[tuple[list[int], list[float]]]:
        samples, device, limit = [], self.model.device, self.args.max_action_tokens
        outputs = dict(return_dict_in_generate=True, output_scores=True)
        config = GenerationConfig(max_new_tokens=limit, eos_token_id=self.stop_ids, pad_token_id=0, **outputs)
        config.update(do_sample=temperature > 0, temperature=temperature or 1.0, top_k=0)
        for part in (contexts[i : i + 64] for i in range(0, len(contexts), 64)):  # bounds the scores kept: [64, new, V]
            width = max(map(len, part))
            ids = torch.tensor([[0] * (width - len(c)) + c for c in part], device=device)
            mask = torch.tensor([[0] * (width - len(c)) + [1] * len(c) for c in part], device=device)
            with torch.autocast(device.type, torch.bfloat16, enabled=self.args.dtype == "bfloat16"):
                out = self.model.generate(input_ids=ids, attention_mask=mask, generation_config=config)
            sampled = out.sequences[:, width:]  # [B, new]
            logprobs = torch.stack(out.scores, 1).float().log_softmax(-1).gather(2, sampled[..., None])[..., 0]
            for row, row_logprobs in zip(sampled.tolist(), logprobs.tolist()):
                end = next((i + 1 for i, token in enumerate(row) if token in self.stop_ids), len(row))
                samples.append((row[:end], row_logprobs[:end]))
        return samples

    def load(self, model) -> None:
        """The trainer's own model, without its own top-p, top-k or penalties: they would bend the policy."""
        assert_finite(policy_weights(model))
        self.model = model
        plain(model).generation_config = GenerationConfig()


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
