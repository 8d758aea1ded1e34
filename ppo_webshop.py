"""PPO on WebShop: proximal policy optimisation with a learnt critic, for a language-model agent over many turns.

Schulman et al., arXiv 1707.06347, with GAE, arXiv 1506.02438; a baseline of iStar (arXiv 2509.19199). Credit per step
comes from a critic that predicts the outcome, not from a group or a reward model. Symbols: o_1:t what the agent has
seen, a_t its action (all tokens of one answer), r_t the reward of a step: the outcome r_o with the last one, else 0;
V_psi the critic, pi_old the policy that played this iteration's episodes, pi_theta the policy in training.

    GAE                   delta_t = r_t + gamma * V(o_1:t+1) - V(o_1:t),  V = 0 after the last step
                          A(a_t) = sum over l >= 0 of (gamma * lambda)^l * delta_t+l;  for the policy standardised
    critic                min_psi E 1/2 max((V - R_t)^2, (clip(V, V_old-c, V_old+c) - R_t)^2),  R_t = A + V_old, A as is
    policy                max_theta E min(rho A, clip(rho, 1-eps, 1+eps) A),  rho = pi_theta / pi_old of each token

V(o_1:t) is read where the step's first action token is predicted: the last token of o_1:t. The critic is the initial
model with a value head (transformers' token classification, one label, weights 0) and a LoRA adapter.
--gae token is what the framework of iStar's authors does: every step is an episode of its own whose last token gets the
outcome; values stand before each token, GAE runs over the tokens of the step, and nothing is passed on between steps.

Left out, as in istar_webshop.py: KL to a reference, entropy bonus, dual clip. Groups are rolled out as for the other
algorithms, so that a batch is the same, but nothing is compared within them.

    python ppo_webshop.py                                          # the tiny model on 2 CPU cores, minutes
    python ppo_webshop.py --model Qwen/Qwen2.5-1.5B-Instruct --dtype bfloat16 --learning-rate 1e-6
"""

# === block: imports ===
import os
import random
import sys
import time
from collections.abc import Hashable
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, NamedTuple

os.environ.setdefault("GOMP_SPINCOUNT", "5000")  # threads wait awake for microseconds; longer harms busy machines

import numpy as np
import torch
import tyro
from peft import LoraConfig, PeftModel, get_peft_model
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

from envs import processes
from envs.bookkeeping import announce, check, describe, record, report, spent
from envs.checkpoints import attempt, begin, load_checkpoint, open_run, save_checkpoint, survive, take_step
from envs.engines import HfEngine, VllmEngine, plain, policy_weights

# === end block ===
from envs.webshop import WebShop


@dataclass
class Args:
    # === block: webshop args ===
    model: str = "models/tiny-webshop"  # the first policy: a directory in Hugging Face format, or a name on the hub
    webshop_data: str = ""  # directory of the original's three files, or "hub" to fetch them; empty: our own shop
    num_products: int = 0  # keep the first so many products of the file; 0: all
    goals: Literal["human", "synthetic"] = "human"  # people's instructions, or the original's generated ones
    outcome: Literal["success", "score"] = "success"  # r_o: 1 if all is right, else 0; or the original's reward, 0..1
    max_steps: int = 10  # longest episode [steps]; an invalid answer costs one too
    max_action_tokens: int = 32  # longest answer [tokens]; the tiny model needs 26, one that reasons in words 512
    max_context_tokens: int = 3072  # longest sequence [tokens]; an episode that would outgrow it ends as truncated
    # === end block ===
    # === block: args ===
    engine: Literal["auto", "vllm", "hf"] = "auto"  # what samples: vllm, or hf (transformers); auto: vllm if installed
    seed: int = 1  # of tasks, sampling and initialisation; with --engine hf on a CPU a run repeats itself exactly
    iterations: int = 80  # rounds of rollout and update
    tasks_per_iteration: int = 16  # each played by one group (the paper: 32 on Sokoban, 16 on WebShop)
    group_size: int = 8  # trajectories of one task (G in the paper)
    history: int = 0  # turns of the past that a step sees; 0: all, as the formula o_1:t has it (the published runs: 2)
    temperature: float = 1.0  # of sampling in training, and of every log-probability
    top_p: float = 1.0  # stays 1: the gradient is that of the full softmax, so sampling must be too
    clip: float = 0.2  # half width of the ratio's interval (eps)
    minibatches: int = 2  # optimiser steps of the policy in an iteration, each on its share of the trajectories
    lr_halving: float = 40.0  # iterations until the policy's learning rate has halved: lr / (1 + t / this); inf: never
    max_grad_norm: float = 1.0  # gradients are scaled down to this norm, policy and PRM alike
    invalid_penalty: float = 0.1  # taken off the outcome that a step with an invalid answer sees
    engine_correction: float = 0.0  # cap of truncated importance sampling, pi_old(trainer) / pi_old(engine); 0: off
    policy_lora_rank: int = 0  # train a LoRA adapter of this rank instead of all parameters; 0: all parameters
    dtype: Literal["float32", "bfloat16"] = "float32"  # of engine, matrix products, frozen weights; the rest: float32
    micro_batch_tokens: int = 8192  # most tokens in one forward and backward pass: bounds the memory, changes no result
    engine_memory: int = 2  # of the engine's KV cache on a CPU [GiB]; on a GPU it takes 40 % (vllm sleeps between)
    eval_every: int = 10  # iterations from one evaluation to the next; the last iteration is always evaluated
    eval_only: bool = False  # evaluate --model on the panel and stop
    eval_tasks: int = 128  # size of the evaluation panel: always the first tasks of the environment's fixed list
    eval_samples: int = 2  # episodes per evaluation task
    eval_temperature: float = 0.4  # of sampling in evaluation (the paper: 0.4); 0: greedy
    runs_dir: str = "runs"  # where runs are kept
    run_name: str = ""  # directory of this run below --runs-dir; empty: script, seed and time
    resume: str = ""  # a run (runs/NAME) to go on with, or auto: the one that this command began; give its flags again
    override: tuple[str, ...] = ()  # flags that may differ from those of the run to be resumed: learning-rate seed
    save_every: int = 1  # iterations from one checkpoint to the next
    keep: int = 2  # checkpoints that are kept, the last ones; that of the best evaluation is kept too
    processes: int = 1  # how many the launcher starts (README, "More than one GPU"); another number is refused
    trust_remote_code: bool = False  # run the program that comes with --model; off: such a model is refused
    track: bool = False  # log to Weights & Biases too (WANDB_MODE=offline works)
    # === end block ===
    learning_rate: float = 5e-4  # of the policy (AdamW); measured for the tiny model, the paper has 5e-7 for 7B
    ratio: Literal["step", "step-mean", "token"] = "token"  # of a step's tokens (paper), their mean (GSPO), each (PPO)
    gae: Literal["step", "token"] = "step"  # values and GAE over an episode's steps; or over each step's tokens
    gamma: float = 1.0  # discount, per step or token
    gae_lambda: float = 0.95  # weight of the later in GAE (lambda): 1 is the outcome less V, 0 one step ahead
    critic_learning_rate: float = 1e-3  # of the critic's adapter and head (AdamW); 1e-5 is usual for 7B
    critic_lora_rank: int = 16  # rank of the critic's adapter
    value_clip: float = 0.5  # half width of the interval around the old value that a value is learnt in (c)


# === block: data ===
@dataclass
class Step:
    observation: str  # the environment's words before the action
    action: str  # the whole response
    valid: bool
    reward: float  # the environment's own step reward
    progress: float  # the ground truth where the world knows it: by how much the distance to the goal shrank
    anchor: Hashable  # the state after the action
    engine_logprobs: list[float]  # one per sampled token, as the engine saw them


@dataclass
class Trajectory:
    """An episode as tokens: the ids that the engine saw and sampled, never decoded and tokenised again."""

    task: int  # trajectories of one task form a group
    token_ids: list[int]  # [T] prompt, action, observation, action, ...
    step_ids: list[int]  # [T] the step whose action a token belongs to; -1 where it is the environment's word
    outcome: float  # r_o
    steps: list[Step]
    starts: list[int] = field(default_factory=lambda: [0])  # where sequences start in token_ids; --history: one a step
    success: bool = False
    score: float = 0.0
    truncated: bool = False  # ended by --max-context-tokens


class Batch(NamedTuple):
    """Trajectories as flat tensors: N trajectories, S steps, K action tokens, and the sequences that carry them."""

    sequences: list  # of (ids [T], step of each token [T] or -1, places of its action tokens among the K)
    group: torch.Tensor  # [N]
    outcomes: torch.Tensor  # [N]
    step_traj: torch.Tensor  # [S]
    token_step: torch.Tensor  # [K]


def flatten(trajectories: list[Trajectory]) -> Batch:
    """Number groups, trajectories, steps and action tokens through the batch; what belongs together are neighbours."""
    groups = {task: number for number, task in enumerate(dict.fromkeys(t.task for t in trajectories))}
    sequences, step_traj, token_step = [], [], []
    for number, t in enumerate(trajectories):
        for start, end in zip(t.starts, [*t.starts[1:], len(t.token_ids)]):
            steps = [step + len(step_traj) if step >= 0 else -1 for step in t.step_ids[start:end]]
            actions = [step for step in steps if step >= 0]
            places = torch.arange(len(token_step), len(token_step) + len(actions))
            sequences.append((torch.tensor(t.token_ids[start:end]), torch.tensor(steps), places))
            token_step += actions
        step_traj += [number] * len(t.steps)
    group, outcomes = [groups[t.task] for t in trajectories], [float(t.outcome) for t in trajectories]
    return Batch(sequences, *map(torch.tensor, (group, outcomes, step_traj, token_step)))


def micro_batches(batch: Batch, budget: int, members: list[int] | None = None) -> list:
    """[(sequences, places of their action tokens among the K)]: sequences of similar length, none a fifth shorter than
    the longest, at most `budget` tokens with their padding (or one sequence). members: which; None: all."""
    members, groups = range(len(batch.sequences)) if members is None else members, []
    for i in sorted(members, key=lambda i: -len(batch.sequences[i][0])):
        longest = len(groups[-1][0][0]) if groups else 0
        if not groups or longest * (len(groups[-1]) + 1) > budget or len(batch.sequences[i][0]) < 0.8 * longest:
            groups.append([])
        groups[-1].append(batch.sequences[i])
    return [(group, torch.cat([places for _, _, places in group])) for group in groups]


def action_logprobs(model, sequences: list, args) -> torch.Tensor:
    """Log-probabilities [k] of the action tokens of sequences [(ids, steps, ...), ...] at the sampling temperature.
    Padding is on the right, where causal attention never looks: no mask. The head runs only where an action token is
    predicted, never on [T, vocabulary]; its softmax is float32. Of many such tokens it takes a gigabyte's worth at a
    time, and its logits are computed again in the backward pass."""
    causal, device, pad = plain(model), model.device, torch.nn.utils.rnn.pad_sequence

    def head(hidden, targets):  # [c, H], [c] -> [c]
        logits = causal.get_output_embeddings()(hidden / args.temperature).float()  # [c, vocabulary]
        return logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]

    def forward():  # -> [k]
        with torch.autocast(device.type, torch.bfloat16, enabled=args.dtype == "bfloat16"):
            hidden = causal.base_model(input_ids=ids, use_cache=False).last_hidden_state  # [B, T, H]
            predicts = steps[:, 1:] >= 0  # [B, T-1] position t predicts token t+1
            chunk = max(1, 2**28 // causal.config.vocab_size)
            parts = [*zip(hidden[:, :-1][predicts].split(chunk), ids[:, 1:][predicts].split(chunk))]
            again = len(parts) > 1
            parts = [checkpoint(head, *part, use_reentrant=False) if again else head(*part) for part in parts]
        return torch.cat(parts)

    ids = pad([s[0] for s in sequences], batch_first=True).to(device)  # [B, T]
    steps = pad([s[1] for s in sequences], batch_first=True, padding_value=-1).to(device)  # [B, T]
    return processes.through(causal, forward)


@torch.no_grad()
def score_tokens(model, batch: Batch, args, label: str, members: list[int] | None = None) -> torch.Tensor:
    """action_logprobs of the whole batch, [K] on the CPU, a micro-batch at a time; 0 where a sequence is no member."""
    logprobs, micro = torch.zeros(len(batch.token_step)), micro_batches(batch, args.micro_batch_tokens, members)
    for sequences, places in tqdm(processes.share(micro, even=True), label, leave=False, disable=None):
        logprobs[places] = action_logprobs(model, sequences, args).cpu()
    return processes.total(logprobs)
    # === end block ===


# === block: by_token ===
def by_token(batch: Batch) -> Batch:
    """The same batch with every action token as a step of its own, for advantages [K]."""
    return batch._replace(step_traj=batch.step_traj[batch.token_step], token_step=torch.arange(len(batch.token_step)))
    # === end block ===


def credit_units(batch: Batch, invalid: torch.Tensor, penalty: float, gae: str):
    """What has a value and an advantage, the U = S steps or U = K tokens: (action token that it stands before, [U];
    chain along which GAE runs, [U]: its trajectory, or its step; reward, [U]). invalid [S] costs a step `penalty`."""
    if gae == "step":
        at, chain = torch.searchsorted(batch.token_step, torch.arange(len(batch.step_traj))), batch.step_traj
    else:
        at, chain = torch.arange(len(batch.token_step)), batch.token_step
    last = torch.cat([chain[1:] != chain[:-1], torch.ones(1, dtype=torch.bool)])  # [U]
    if gae == "step":
        return at, chain, batch.outcomes[chain] * last - penalty * invalid
    return at, chain, (batch.outcomes[batch.step_traj] - penalty * invalid)[chain] * last


def gae_advantages(rewards: torch.Tensor, values: torch.Tensor, chain: torch.Tensor, gamma: float, lam: float):
    """sum over l of (gamma * lam)^l * delta_u+l along the chain, delta_u = r_u + gamma * V_u+1 - V_u, [U] from [U]
    each; a chain's units are neighbours, in order of time. Behind its last one V and A are 0."""
    r, v, c, result, later = rewards.tolist(), values.tolist(), chain.tolist(), [0.0] * len(chain), 0.0
    for u in reversed(range(len(c))):
        ends = u + 1 == len(c) or c[u + 1] != c[u]
        delta = r[u] + (0.0 if ends else gamma * v[u + 1]) - v[u]
        result[u] = later = delta + (0.0 if ends else gamma * lam * later)
    return torch.tensor(result)


def value_loss(values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, clip: float) -> torch.Tensor:
    """Mean of 1/2 max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2), a scalar from [U] each."""
    clipped = torch.clamp(values, old_values - clip, old_values + clip)
    return 0.5 * torch.max((values - returns) ** 2, (clipped - returns) ** 2).mean()


def add_value_head(path: str, rank: int, **read) -> PeftModel:
    """The initial model with a value head of weight 0 and a LoRA adapter, "critic"; peft trains and saves both."""
    from transformers import AutoModelForTokenClassification

    model = AutoModelForTokenClassification.from_pretrained(path, num_labels=1, **read)
    torch.nn.init.zeros_(model.score.weight)
    torch.nn.init.zeros_(model.score.bias)
    adapter = dict(target_modules="all-linear", exclude_modules=["score"], task_type="TOKEN_CLS")
    return get_peft_model(model, LoraConfig(r=rank, lora_alpha=rank, **adapter), adapter_name="critic")


def token_values(critic, sequences: list, args) -> torch.Tensor:
    """V before each action token of sequences [(ids, steps, ...), ...], [k]: read where the token is predicted."""
    model, device, pad = plain(critic), critic.device, torch.nn.utils.rnn.pad_sequence
    ids = pad([s[0] for s in sequences], batch_first=True).to(device)  # [B, T]
    steps = pad([s[1] for s in sequences], batch_first=True, padding_value=-1).to(device)  # [B, T]
    with torch.autocast(device.type, torch.bfloat16, enabled=args.dtype == "bfloat16"):
        hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state  # [B, T, H]
        return model.score(hidden[:, :-1][steps[:, 1:] >= 0])[:, 0].float()  # [k]


@torch.no_grad()
def score_values(critic, batch: Batch, args) -> torch.Tensor:
    """token_values of the whole batch, [K] on the CPU, a micro-batch at a time."""
    values, micro = torch.zeros(len(batch.token_step)), micro_batches(batch, args.micro_batch_tokens)
    for sequences, places in tqdm(processes.share(micro), "values", leave=False, disable=None):
        values[places] = token_values(critic, sequences, args).cpu()
    return processes.total(values)


def critic_update(critic, optimizer, batch: Batch, at: torch.Tensor, old_values, returns, args) -> dict:
    """`minibatches` optimiser steps, each on a random share of the trajectories; at, old_values, returns [U]. The
    gradient is summed over micro-batches, weighted by their numbers of units: it equals that of one large batch."""
    unit, norms, total = torch.full((len(batch.token_step),), -1), [], 0.0  # [K] the unit that stands before a token
    unit[at] = torch.arange(len(at))
    traj_of = batch.step_traj[batch.token_step]  # [K]
    shares = processes.from_first(torch.randperm(len(batch.outcomes))).chunk(args.minibatches)
    for share in tqdm(shares, "critic", leave=False, disable=None):
        shared = torch.isin(traj_of, share)  # [K]
        units = int((shared & (unit >= 0)).sum())
        members = [i for i, (_, _, places) in enumerate(batch.sequences) if shared[places].any()]
        optimizer.zero_grad()
        before = total
        for sequences, places in processes.share(micro_batches(batch, args.micro_batch_tokens, members)):
            values, u = token_values(critic, sequences, args), unit[places]  # [k], [k]
            old, target = (x[u[u >= 0]].to(values.device) for x in (old_values, returns))
            loss = value_loss(values[(u >= 0).to(values.device)], old, target, args.value_clip) * len(old)
            (loss / units).backward()
            total += loss.item()
        norms.append(take_step(optimizer, total - before, args.max_grad_norm))
    taken = [norm for norm in norms if norm == norm]  # the others were not finite, so not taken
    (total,) = processes.total([total])
    stats = {"loss": total / len(at), "grad_norm": sum(taken) / max(len(taken), 1), "skipped": len(norms) - len(taken)}
    return {f"critic/{key}": value for key, value in stats.items()}


# === block: rollout ===
class Chat:
    """The token layout of a conversation, taken once from the tokenizer's chat template. Words of the environment are
    encoded as plain text: a template token that stands in them does not become control."""

    def __init__(self, tokenizer, stop_ids: list[int]):
        marks = ["<mark one>", "<mark two>", "<mark three>"]
        turns = [{"role": role, "content": mark} for role, mark in zip(["user", "assistant", "user"], marks)]
        head, rest = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True).split(marks[0])
        parts = head, *rest.split(marks[1])[1].split(marks[2])
        self.head, self.between, self.answer = (tokenizer.encode(p, add_special_tokens=False) for p in parts)
        self.tokenizer, self.stop_ids = tokenizer, stop_ids

    def prompt(self, text: str) -> list[int]:
        """From the start to where the agent answers."""
        words = self.tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
        return self.head + words + self.answer

    def observation(self, text: str, action: list[int]) -> list[int]:
        """From the end of an action to where the agent answers again; its stop token is not fed twice."""
        return self.between[action[-1] == self.between[0] :] + self.prompt(text)[len(self.head) :]

    def response(self, action: list[int]) -> str:
        """The text of an action, without its stop token."""
        return self.tokenizer.decode(action[:-1] if action[-1] in self.stop_ids else action)


def rollout(env, engine, chat: Chat, tasks: list[int], args, temperature: float, label: str) -> list[Trajectory]:
    """One trajectory per episode of tasks, all played side by side: each round, one answer of all whose turn it is. An
    environment of conversations (it has `start`) takes a round's answers together, and drops who got no outcome."""
    together, (tasks, episodes) = hasattr(env, "start"), begin(env, processes.own(tasks))
    prompts = dict(zip(tasks, (episode.prompt for episode in episodes)))
    assert all(prompts[task] == e.prompt for task, e in zip(tasks, episodes)), "a group's first observations differ"
    trajectories = [Trajectory(task, [], [], 0.0, [], []) for task in tasks]
    turns = [[] for _ in episodes]  # tokens: the prompt, then action and observation of each turn
    observations, said, active = {}, {}, list(range(len(episodes)))
    progress = tqdm(total=len(episodes), desc=label, leave=False, disable=None, unit="episode")
    while active:
        ready = [i for i in active if getattr(episodes[i], "ready", True)]
        for i in (i for i in ready if not turns[i]):  # only now: who speaks second has heard the opening
            observations[i], turns[i] = episodes[i].prompt, [chat.prompt(episodes[i].prompt)]
        contexts = {i: sum(turns[i][1:][-args.history :], turns[i][0]) for i in ready}  # [-0:] is the whole history
        longest = args.max_context_tokens - args.max_action_tokens
        answers = dict.fromkeys(episodes[i] for i in ready if len(contexts[i]) > longest)  # None: breaks off
        for i in [i for i in ready if episodes[i] in answers]:
            trajectories[i].truncated = True
            if not trajectories[i].steps:
                sys.exit(f"--max-context-tokens {args.max_context_tokens}: a prompt has {len(contexts[i])} tokens")
            del contexts[i]
        samples = engine.generate(list(contexts.values()), temperature) if contexts else []
        for (i, context), (action, logprobs) in zip(contexts.items(), samples):
            t, text = trajectories[i], chat.response(action)
            if args.history or not t.steps:  # a new sequence; with the whole history an episode is one
                t.starts.append(len(t.token_ids))
            words = context[len(t.token_ids) - t.starts[-1] :]
            t.token_ids += words + action
            t.step_ids += [-1] * len(words) + [len(t.steps)] * len(action)
            assert t.token_ids[t.starts[-1] :] == context + action, "not the ids that the engine saw and sampled"
            answers[episodes[i]], said[i] = text, (text, action, logprobs)
        alone = {episodes[i]: tasks[i] for i in contexts} if not together else {}
        results = env.step(answers) if together else {e: attempt(e, task, answers[e]) for e, task in alone.items()}
        for i in [i for i in active if episodes[i] in results]:
            (observation, reward, _, info), (text, action, logprobs), t = results[episodes[i]], said[i], trajectories[i]
            known = info["valid"], info["step_reward"], info["progress"], info["anchor"]
            t.steps.append(Step(observations[i], text, *known, logprobs))
            t.outcome, t.success, t.score = t.outcome + reward, info["success"], info["score"]
            turns[i].append(action + chat.observation(observation, action))
            observations[i] = observation
        active = [i for i in active if not episodes[i].done and not trajectories[i].truncated]
        progress.update(len(episodes) - len(active) - progress.n)
        progress.set_postfix(success=f"{sum(t.success for t in trajectories) / max(1, progress.n):.2f}")
    progress.close()
    for t, e, kept in zip(trajectories, episodes, env.finish(episodes)) if together else ():
        t.outcome, t.success, t.score = (e.outcome, e.success, e.score) if kept else (None, False, 0.0)
    return processes.gather([t for t in trajectories if t.outcome is not None])
    # === end block ===


# === block: core ===
def ratio_units(token_logprobs: torch.Tensor, token_step: torch.Tensor, num_steps: int, ratio: str) -> torch.Tensor:
    """What a ratio compares: the tokens [K] (token), their sum over a step [S] (step) or their mean [S] (step-mean)."""
    if ratio == "token":
        return token_logprobs
    sums = token_logprobs.new_zeros(num_steps).index_add(0, token_step, token_logprobs)
    return sums if ratio == "step" else sums / torch.bincount(token_step, minlength=num_steps)


def policy_loss(logprobs: torch.Tensor, old_logprobs: torch.Tensor, advantages: torch.Tensor, clip: float):
    """-mean min(rho * A, clip(rho, 1-clip, 1+clip) * A), rho = exp(logprobs - old_logprobs): (scalar, stats), from [S]
    each, or [K] each with --ratio token. approx_kl is mean (rho - 1) - log rho."""
    logratio = logprobs - old_logprobs
    ratio = logratio.exp()
    clipped = ratio.clamp(1 - clip, 1 + clip)
    loss = -torch.min(ratio * advantages, clipped * advantages).mean()
    stats = {"clip_fraction": (ratio != clipped).float(), "approx_kl": ratio - 1 - logratio, "ratio": ratio}
    return loss, {key: value.detach().mean().item() for key, value in stats.items()}


def policy_update(policy, optimizer, batch: Batch, old_logprobs, advantages, args) -> dict:
    """`minibatches` optimiser steps, each on a random share of the trajectories; old_logprobs [K], advantages [S]. The
    gradient is summed over micro-batches, weighted by their numbers of ratios: it equals that of one large batch. Old
    log-probabilities that are nan are the update's own (for one optimiser step), and are written into old_logprobs."""
    names, count, traj_of = ("loss", "clip_fraction", "approx_kl", "ratio"), 0, batch.step_traj[batch.token_step]  # [K]
    totals, norms = {f"policy/{name}": 0.0 for name in names}, []
    shares = processes.from_first(torch.randperm(len(batch.outcomes))).chunk(args.minibatches)
    for share in tqdm(shares, "update", leave=False, disable=None):
        tokens = torch.isin(traj_of, share)  # [K]
        units = int(tokens.sum()) if args.ratio == "token" else len(batch.token_step[tokens].unique())
        felt = tokens & (advantages[batch.token_step] != 0)  # sequences without any add nothing to the gradient
        members = [i for i, (_, _, places) in enumerate(batch.sequences) if felt[places].any()]
        optimizer.zero_grad()
        before = totals["policy/loss"]
        micro = micro_batches(batch, args.micro_batch_tokens, members)
        for sequences, places in processes.share(micro, even=True):
            step, local = batch.token_step[places].unique(return_inverse=True)  # [s] of the batch's S, [k] into them
            new = action_logprobs(policy, sequences, args)
            if not len(places):  # only to take part: FSDP gathers the weights for all processes at once
                new.sum().backward()
                continue
            if old_logprobs[places].isnan().any():  # strictly on-policy: every ratio is 1
                old_logprobs[places] = new.detach().cpu()
            new = ratio_units(new, local.to(new.device), len(step), args.ratio)
            old = ratio_units(old_logprobs[places], local, len(step), args.ratio).to(new.device)
            unit_advantages = advantages[step[local] if args.ratio == "token" else step].to(new.device)
            loss, stats = policy_loss(new, old, unit_advantages, args.clip)
            (loss * len(new) / units).backward()
            count += len(new)
            for key, value in {"loss": loss.item(), **stats}.items():
                totals[f"policy/{key}"] += value * len(new)
        norms.append(take_step(optimizer, totals["policy/loss"] - before, args.max_grad_norm))
    *sums, count = processes.total([*totals.values(), count])
    means, taken = {key: total / max(count, 1) for key, total in zip(totals, sums)}, [n for n in norms if n == n]
    skipped = len(norms) - len(taken)  # updates whose loss or gradient was not finite
    return means | {"policy/grad_norm": sum(taken) / max(len(taken), 1), "policy/skipped": skipped}


def add_adapter(model, name: str, rank: int) -> PeftModel:
    """The model with one more LoRA adapter on the same base weights; it starts as the identity."""
    config = LoraConfig(r=rank, lora_alpha=rank, target_modules="all-linear", task_type="CAUSAL_LM")
    if isinstance(model, PeftModel):
        model.add_adapter(name, config)
    return model if isinstance(model, PeftModel) else get_peft_model(model, config, adapter_name=name)


def activate(model, adapter: str):
    """The model, computing with that adapter and training it alone; a model without adapters as it is."""
    if isinstance(model, PeftModel):
        model.set_adapter(adapter)
    return model
    # === end block ===


def main():
    args = tyro.cli(Args, description=__doc__)
    if args.gae == "token" and args.ratio != "token":
        sys.exit(f"--ratio {args.ratio}: with --gae token advantages differ from token to token, so token")
    env = WebShop.from_args(args)
    # === block: setup ===
    path, device, name = check(args, env), processes.start(args), Path(sys.argv[0]).stem
    run, board = open_run(args, name, path, env)
    torch.manual_seed(args.seed)
    read = dict(use_safetensors=True, trust_remote_code=args.trust_remote_code)
    frozen = torch.bfloat16 if args.dtype == "bfloat16" else torch.float32  # weights that train are float32 always
    dtype = frozen if args.policy_lora_rank else torch.float32
    policy = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, **read)
    tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=args.trust_remote_code)
    ends = policy.generation_config.eos_token_id
    stop_ids = sorted({tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])} - {None})
    chat = Chat(tokenizer, stop_ids)
    kind = args.engine if args.engine != "auto" else "vllm" if find_spec("vllm") else "hf"
    engine = (VllmEngine if kind == "vllm" else HfEngine)(path, stop_ids, args)
    policy = add_adapter(policy, "policy", args.policy_lora_rank) if args.policy_lora_rank else policy
    policy = processes.shard(policy).to(device)
    trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=args.learning_rate, weight_decay=0.0)
    networks = {"policy": (policy, optimizer)}
    # === end block ===
    critic = add_value_head(path, args.critic_lora_rank, dtype=frozen, **read).to(device)
    trained = [parameter for parameter in critic.parameters() if parameter.requires_grad]
    critic_optimizer = torch.optim.AdamW(trained, lr=args.critic_learning_rate, weight_decay=0.0)
    networks["critic"] = (critic, critic_optimizer)
    # === block: start ===
    announce(name, env, policy, kind, args, run)
    saved, rows = load_checkpoint(run, networks)
    exam = getattr(env, "exam", env)  # SOTOPIA may evaluate with another partner and judge
    panel = [task for task in exam.eval_tasks[: args.eval_tasks] for _ in range(args.eval_samples)]
    sit = (exam, engine, chat, panel, args, args.eval_temperature, "evaluation")
    engine.load(activate(policy, "policy"))
    torch.manual_seed(args.seed + processes.rank())
    with survive(run, board) as last:
        if not saved:
            record(run, rows, {"iteration": 0, "time/elapsed": 0.0, **describe(rollout(*sit), "eval", exam)}, board)
        for iteration in range(saved + 1, 0 if args.eval_only else args.iterations + 1):
            random.seed(f"{args.seed} {iteration}")  # what an iteration draws depends on nothing before it
            torch.manual_seed(args.seed + 1_000_003 * iteration + processes.rank())
            np.random.seed((args.seed + 1_000_003 * iteration) % 2**32)
            row, laps = {"iteration": iteration}, {"": time.perf_counter()}

            # ------------ 1. Rollout: a group of trajectories for each task, with the current policy ------------
            tasks = [task for task in random.sample(env.train_tasks, args.tasks_per_iteration)] * args.group_size
            trajectories = rollout(env, engine, chat, sorted(tasks), args, args.temperature, f"rollout {iteration}")
            engine.sleep()
            batch, steps = flatten(trajectories), [step for t in trajectories for step in t.steps]
            last |= {"iteration": iteration, "trajectories": trajectories}
            invalid = torch.tensor([not step.valid for step in steps])  # [S]
            laps["rollout"] = time.perf_counter()

            # ------------ 2. Old log-probabilities: by the trainer's own forward pass ------------
            engine_logprobs = torch.tensor([logprob for step in steps for logprob in step.engine_logprobs])  # [K]
            old_logprobs = unknown = torch.full_like(engine_logprobs, torch.nan)  # [K]
            if args.minibatches > 1 or args.engine_correction or "beta" in vars(args):  # beta: a PRM compares with them
                old_logprobs = score_tokens(activate(policy, "policy"), batch, args, "log-probabilities")
            laps["logprobs"] = time.perf_counter()
            # === end block ===

            # ------------ 3. Critic: values of the old one, advantages, then its update ------------
            at, chain, rewards = credit_units(batch, invalid, args.invalid_penalty, args.gae)  # [U] each
            values = score_values(critic, batch, args)[at]  # [U]
            advantages = gae_advantages(rewards, values, chain, args.gamma, args.gae_lambda)  # [U]
            returns = advantages + values  # [U]
            row |= critic_update(critic, critic_optimizer, batch, at, values, returns, args)
            unexplained = advantages.var() / returns.var().clamp(min=1e-9)
            row |= {"critic/value": values.mean().item(), "critic/explained_variance": 1 - unexplained.item()}
            laps["critic"] = time.perf_counter()

            # ------------ 4. Advantages: standardised over the batch ------------
            advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-6)  # [U]
            columns = {"value": values, "advantage": advantages}  # [S]
            if args.gae == "token":  # from here on a token is a step
                columns = {k: ratio_units(x, chain, len(steps), "step-mean") for k, x in columns.items()}  # [S]
                batch, steps = by_token(batch), [step for step in steps for _ in step.engine_logprobs]

            # === block: update ===
            # ------------ 5. Policy update: clipped surrogate; then the engine gets the new weights ------------
            if args.engine_correction:
                gap = old_logprobs - engine_logprobs  # [K]
                weight = ratio_units(gap, batch.token_step, len(steps), "step").exp()  # [S]
                advantages = advantages * weight.clamp(max=args.engine_correction)
            last |= {"old_logprobs": old_logprobs, "advantages": advantages}
            optimizer.param_groups[0]["lr"] = args.learning_rate / (1 + (iteration - 1) / args.lr_halving)
            old_logprobs = old_logprobs if args.minibatches > 1 else unknown  # of one step: those of the update itself
            row |= policy_update(activate(policy, "policy"), optimizer, batch, old_logprobs, advantages, args)
            optimizer.zero_grad()  # frees their memory until the next update
            laps["update"] = time.perf_counter()
            engine.load(policy)
            laps["sync"] = time.perf_counter()

            gap = (old_logprobs - engine_logprobs).abs().nanmean()  # of the tokens that this process knows
            row |= {"policy/engine_gap": gap.nan_to_num().item(), "engine/restarts": engine.restarts}
            row |= {"tokens/rollout": len(engine_logprobs), "tokens/trained": sum(len(s[0]) for s in batch.sequences)}
            row |= describe(trajectories, "train", env)
            row |= spent(laps, rows)
            if iteration % args.eval_every == 0 or iteration == args.iterations:
                row |= describe(rollout(*sit), "eval", exam)
            record(run, rows, row, board, trajectories, columns)
            save_checkpoint(run, rows, networks, policy_weights(policy), tokenizer, args)
    report(env, rows, args)
    # === end block ===


if __name__ == "__main__":
    main()
