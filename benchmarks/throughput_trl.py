"""TRL's GRPOTrainer as a contender of throughput.py, which starts this file in TRL's own virtual
environment.

As trl and trl-bf16 it is given what is fastest for it: vLLM in its process, full fine-tuning
without gradient checkpointing, no second pass for old log-probabilities (one optimiser step follows
a rollout, so they are those of the update), and the largest micro-batch of episodes that fits the
tokens of ours. trl-default has checkpointing and the second pass, as TRL has by default.

Two things of TRL 1.16 had to be replaced: its hand-over of weights dies on a CPU (the linear layers
are packed), and its engine would compile for a minute. Everything else is its own: sampling through
trainer.vllm_generation.llm, loss, padding, optimiser. The token layout is our scripts' (Chat), so
the ids are the same.
"""

# ruff: noqa: E402 (what libraries print while they are imported has to go to the log already)

import json
import os
import sys
import time
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from throughput import (
    CONTEXT,
    ENGINE_MEMORY,
    count_tokens,
    environment,
    open_channel,
    resident,
    tokenise,
    wait,
    work,
)

channel = open_channel()
spec = json.loads(sys.argv[2])
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(ENGINE_MEMORY))
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

from runtime.chat import Chat
from runtime.engines.vllm import VllmEngine

import trl.generation.vllm_generation as glue
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from vllm import SamplingParams

plan = json.loads(Path(spec["plan"]).read_text())
dtype, tuned = spec["flags"]["dtype"], spec["flags"].get("tuned", True)
laps = {}


def sync_weights(self) -> None:
    """The hand-over of our scripts, in place of load_weights into packed layers."""
    start = time.perf_counter()
    weights = ((name, parameter.detach()) for name, parameter in self.model.named_parameters())
    self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
    self.llm.apply_model(VllmEngine.repack_tied_head)
    self.llm.reset_prefix_cache()
    laps["sync"] = time.perf_counter() - start


glue.VLLMGeneration.sync_weights = sync_weights
glue.LLM = partial(glue.LLM, enforce_eager=True, dtype=dtype, disable_log_stats=True)


def rollout(prompts: list, trainer) -> dict:
    """Replay the plan's episodes side by side, as our scripts do: the environment is real, and what
    is sampled is sampled for the cost."""
    start = time.perf_counter()
    llm, env = trainer.vllm_generation.llm, worlds[0]
    games = [env.reset(record["task"]) for record in plan["episodes"]]
    ids = [[*pairs[0][0]] for pairs in episodes]
    mask = [[0] * len(i) for i in ids]
    logprobs = [[0.0] * len(i) for i in ids]
    outcomes = [0.0] * len(games)
    for turn in range(plan["turns"]):
        for row, row_mask, row_logprobs, pairs in zip(ids, mask, logprobs, episodes):
            words = pairs[turn][0][len(row) :]
            row += words
            row_mask += [0] * len(words)
            row_logprobs += [0.0] * len(words)

        actions = [pairs[turn][1] for pairs in episodes]
        fixed = dict(temperature=1.0, ignore_eos=True, logprobs=0, detokenize=False)
        limits = [SamplingParams(max_tokens=len(action), **fixed) for action in actions]
        contexts = [{"prompt_token_ids": [*row]} for row in ids]
        outputs = llm.generate(contexts, limits, use_tqdm=False)

        for i, (action, output) in enumerate(zip(actions, outputs)):
            sampled = output.outputs[0]
            places = zip(sampled.token_ids, sampled.logprobs)
            ids[i] += action
            mask[i] += [1] * len(action)
            logprobs[i] += [place[token].logprob for token, place in places]
            _, reward, _, _ = games[i].step(chat.response(action))
            outcomes[i] += reward

    first = [len(pairs[0][0]) for pairs in episodes]
    laps["rollout"] = time.perf_counter() - start
    return {
        "prompt_ids": [row[:n] for row, n in zip(ids, first)],
        "completion_ids": [row[n:] for row, n in zip(ids, first)],
        "env_mask": [row[n:] for row, n in zip(mask, first)],
        "logprobs": [row[n:] for row, n in zip(logprobs, first)],
        "outcome": outcomes,
    }


def reward(completions: list, outcome: list, **_) -> list[float]:
    return outcome


class Gate(TrainerCallback):
    """One step of the trainer for each command."""

    def on_train_begin(self, *_, **__):
        self.wait({})

    def on_step_end(self, *_, **__):
        row = {"seconds": time.perf_counter() - self.began, "logprobs": 0.0, "prm": 0.0, **laps}
        row["update"] = row["seconds"] - row["rollout"] - row["sync"]
        row |= {"processed": counter["tokens"], "peak": resident()}
        self.wait(row | work(plan, episodes, trainer.model))

    def wait(self, row: dict) -> None:
        assert wait(channel, row)["plan"] == spec["plan"], "the trainer is built for one plan"
        counter["tokens"] = 0
        self.began = time.perf_counter()


number, group = len(plan["episodes"]), plan["group"]
tokenizer = AutoTokenizer.from_pretrained(spec["model"])
chat = Chat(tokenizer, [tokenizer.eos_token_id])
episodes = tokenise(plan, chat, 0)
worlds = environment(plan["environment"], plan["turns"])
longest = max(len(pairs[-1][0]) + len(pairs[-1][1]) for pairs in episodes)
divisors = [n for n in range(number, 0, -1) if number % n == 0]
fitting = (n for n in divisors if n * longest <= spec["micro_batch_tokens"] or n == 1)
micro = next(fitting)
tuning = dict(gradient_checkpointing=False, vllm_importance_sampling_correction=False)
config = GRPOConfig(
    output_dir=str(Path(spec["runs_dir"], "trl")),
    per_device_train_batch_size=micro,
    gradient_accumulation_steps=number // micro,
    num_generations=group,
    max_steps=10**9,
    learning_rate=1e-6,
    lr_scheduler_type="constant",
    temperature=1.0,
    bf16=dtype == "bfloat16",
    **(tuning if tuned else {}),
    use_cpu=True,
    use_vllm=True,
    vllm_mode="colocate",
    vllm_max_model_length=CONTEXT[Path(spec["model"]).name],
    model_init_kwargs={"dtype": "float32"},
    report_to="none",
    save_strategy="no",
    logging_strategy="no",
    disable_tqdm=True,
)
prompts = Dataset.from_list([{"prompt": str(i)} for i in range(1000 * number // group)])
trainer = GRPOTrainer(
    spec["model"],
    reward,
    config,
    prompts,
    processing_class=tokenizer,
    rollout_func=rollout,
    callbacks=[Gate()],
)
counter = count_tokens(trainer.model)
trainer.train()
