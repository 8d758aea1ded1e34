r"""PPO on WebShop: proximal policy optimisation with a learnt critic, for multi-turn agents.

Schulman et al., arXiv 1707.06347, with GAE, arXiv 1506.02438; a baseline of iStar (arXiv
2509.19199). Credit per step comes from a critic that predicts the outcome, not from a group or a
reward model. o_1:t: what the agent has seen; a_t: its action, all tokens of one answer; r_t: the
reward of a step: the outcome r_o at the last step, else 0, minus the penalty for an invalid answer;
V_psi: the critic; pi_old: the policy that sampled this iteration's episodes; pi_theta: the policy
in training.

    GAE            delta_t = r_t + gamma * V(o_1:t+1) - V(o_1:t),  V = 0 after the last step
                   A(a_t) = sum over l >= 0 of (gamma * lambda)^l * delta_t+l; standardised
    critic         min_psi E 1/2 max((V - R_t)^2, (clip(V, V_old-c, V_old+c) - R_t)^2),
                   R_t = A + V_old, A before it is standardised
    policy         max_theta E min(rho A, clip(rho, 1-eps, 1+eps) A),
                   rho = pi_theta / pi_old of each token

V(o_1:t) is the output at the last token of o_1:t, which predicts the step's first action token. The
critic is the initial model with a value head (transformers' token classification, one label,
initialised to 0) and a LoRA adapter. --gae token follows the framework of iStar's authors: every
step is a separate episode, and its last token gets the outcome; every token has a value, GAE runs
over the tokens of the step, and no credit passes between steps.

Left out, as in istar_webshop.py: KL to a reference, entropy bonus, dual clip. Groups are sampled as
in the other algorithms, so that batches are the same, but PPO does not use them.

    python ppo_webshop.py                           # the tiny model: 25 minutes on one CPU core
    python ppo_webshop.py --model Qwen/Qwen2.5-1.5B-Instruct --dtype bfloat16 \
        --max-action-tokens 512 --max-context-tokens 16384 --gradient-checkpointing \
        --learning-rate 1e-6 --lr-halving inf --critic-learning-rate 1e-5  # one GPU of 80 GB
"""

import random
from dataclasses import dataclass, field
from typing import Literal

from envs.webshop import WebShop, WebShopArgs
from runtime.data import Step, Trajectory, flatten, joined, micro_batches, sum_per_step
from runtime.engines import SamplingParams
from runtime.flags import Flat, RunArgs, parse
from runtime.networks import Network, action_logprobs, batch_logprobs, over_batch, sum_gradients
from runtime.run import Run, ends_cleanly, mean_of

import torch
from peft import LoraConfig, get_peft_model
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW
from transformers import AutoModelForTokenClassification


@dataclass
class Args:
    world: Flat[WebShopArgs] = field(default_factory=WebShopArgs)
    run_args: Flat[RunArgs] = field(default_factory=RunArgs)

    model: str = "models/tiny-webshop"  # Initial policy: a directory, or a name on the hub.
    max_steps: int = 10  # Longest episode [steps]; an invalid answer costs a step too.
    max_action_tokens: int = 32  # Longest answer [tokens]; a model that reasons needs 512.
    max_context_tokens: int = 3072  # Longest context [tokens]; a longer episode is truncated.
    history: int = 0  # Past turns that a step sees; 0: all (iStar paper: o_1:t; its runs: 2).
    seed: int = 1  # Seed of tasks, sampling and initialisation.
    iterations: int = 80  # Number of iterations; each has a rollout and its updates.
    tasks_per_iteration: int = 16  # Tasks per iteration (iStar paper: 16, Sokoban 32).
    group_size: int = field(default=8, metadata={"least": 1})
    """Episodes per task. PPO does not compare them, so 1 is enough; 8 as in the other scripts."""
    temperature: float = 1.0  # Sampling temperature in training, and of all log-probabilities.
    learning_rate: float = 5e-4  # Learning rate of the policy (AdamW; iStar paper: 5e-7 for 7B).
    lr_halving: float = 40.0  # Iteration t has the rate lr / (1 + (t-1) / lr_halving); inf: lr.
    minibatches: int = 2  # Optimiser steps per iteration, each on a random share of the episodes.
    max_grad_norm: float = 1.0  # Largest gradient norm; larger gradients are scaled down to it.
    clip: float = 0.2  # Half width eps of the interval that clips the ratio (iStar paper: 0.2).
    invalid_penalty: float = 0.1  # Subtracted from the reward of a step whose answer is invalid.
    engine_cap: float = 2.0  # Cap on A's weight, pi_old by the trainer / pi_old by the engine.
    policy_lora_rank: int = 0  # Rank of the policy's LoRA adapter; 0: all parameters train.

    gae: Literal["step", "token"] = "step"
    """Values and GAE run over an episode's steps, or over the tokens of each step."""
    gamma: float = 1.0  # Discount gamma of rewards, per step or token.
    gae_lambda: float = 0.95
    """GAE's lambda; 1: A is the return minus V, 0: A is the TD residual of one step."""
    critic_learning_rate: float = 1e-3  # Learning rate of the critic (AdamW; 1e-5 for 7B).
    critic_lora_rank: int = 16  # Rank of the critic's LoRA adapter; 0: a full copy is trained.
    value_clip: float = 0.5  # Half width c of the interval that clips the value.


# === block: rollout ===
async def play(env, engine, chat, task: int, sampling: SamplingParams, args) -> Trajectory:
    """One episode. Episodes run concurrently: while one awaits the engine, others continue."""
    episode = env.reset(task)
    seen = episode.prompt
    turns = [chat.prompt(seen)]
    t = Trajectory(task)

    for _ in range(args.max_steps):
        context = joined([turns[0], *turns[1:][-args.history :]])  # o_1:t; history 0: all turns
        if len(context) + args.max_action_tokens > args.max_context_tokens:
            t.truncated = True
            break
        action, logprobs = await engine.sample(context, sampling)
        text = chat.response(action)
        observation, reward, done, info = episode.step(text)

        t.append(context, action)  # the ids that the engine saw and sampled
        t.steps.append(Step(seen, text, logprobs, **info))
        t.outcome += reward
        if done:
            break
        turns.append(joined([action, chat.observation(observation, action)]))
        seen = observation
    return t
    # === end block ===


# === block: token policy ===
def policy_loss(logprobs, old_logprobs, advantages, clip: float) -> tuple[torch.Tensor, dict]:
    """-mean min(rho A, clip(rho, 1-eps, 1+eps) A), rho = exp(logprobs - old_logprobs), [k] each."""
    log_ratio = logprobs - old_logprobs
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - clip, 1 + clip)
    loss = -torch.min(ratio * advantages, clipped * advantages).mean()

    stats = {"loss": loss, "ratio": ratio.mean()}
    stats["approx_kl"] = (ratio - 1 - log_ratio).mean()
    stats["clip_fraction"] = (ratio != clipped).float().mean()
    return loss, {name: value.item() for name, value in stats.items()}


def engine_weights(batch, old_logprobs, args) -> torch.Tensor:
    """min(--engine-cap, pi_old by the trainer / pi_old by the engine) of every token, [K]; 1 in
    float32, where both are equal up to rounding, but for --async-rollout. old_logprobs [K]."""
    if args.run_args.dtype == "float32" and not args.run_args.async_rollout:
        return torch.ones_like(old_logprobs)
    return (old_logprobs - batch.engine_logprobs).exp().clamp(max=args.engine_cap)


def policy_update(policy: Network, batch, old_logprobs, advantages, args) -> dict:
    """--minibatches optimiser steps, each on a random share of the episodes. In bfloat16, where old
    values differ by rounding, the first has ratios of 1. old_logprobs [K], advantages [S]."""
    seen = []  # statistics of each micro-batch
    grad_norms = []
    weighted = advantages[batch.token_step] * engine_weights(batch, old_logprobs, args)  # [K]
    for share in torch.randperm(len(batch.outcomes)).tensor_split(args.minibatches):
        ours = torch.isin(batch.step_traj, share)  # [S]
        num_tokens = int(ours[batch.token_step].sum())
        for micro in micro_batches(batch, args, only=ours & (advantages != 0)):
            new = action_logprobs(policy, micro, args)  # [k] with a graph
            old = old_logprobs[micro.tokens].to(new.device)
            if args.run_args.dtype == "bfloat16" and not grad_norms:
                old = new.detach()
            loss, stats = policy_loss(new, old, weighted[micro.tokens].to(new.device), args.clip)
            (loss * len(new) / num_tokens).backward()
            seen.append(stats | {"weight": len(new)})
        grad_norms.append(optimizer_step(policy, args))
    return mean_of(seen) | {"grad_norm": sum(grad_norms) / len(grad_norms)}


def optimizer_step(network: Network, args) -> float:
    """One step on the gradient, clipped to --max-grad-norm. Returns the norm before clipping."""
    sum_gradients(network)  # over processes (accelerate); FSDP has done so
    grad_norm = clip_grad_norm_(network.trained, args.max_grad_norm).item()
    if network.may_step(grad_norm):  # False if not finite; the third time in a row ends the run
        network.optimizer.step()
    network.optimizer.zero_grad()
    return grad_norm


def lora(rank: int) -> LoraConfig | None:
    """An adapter of this rank on every linear layer except the head; 0: none."""
    if rank == 0:
        return None
    return LoraConfig(r=rank, lora_alpha=rank, target_modules="all-linear")
    # === end block ===


def by_token(batch):
    """The same batch with every action token as a separate step, for advantages [K]."""
    step_traj = batch.step_traj[batch.token_step]  # [K]
    return batch._replace(step_traj=step_traj, token_step=torch.arange(len(step_traj)))


def credit_units(batch, invalid, penalty: float, gae: str):
    """The units that have a value and an advantage: U = S steps, or with --gae token U = K tokens.

    at [U]: the first action token of a unit; chain [U]: the trajectory or step that GAE runs along;
    rewards [U]: the outcome at the last unit, minus `penalty` at an invalid [S] step."""
    if gae == "step":
        at = torch.searchsorted(batch.token_step, torch.arange(len(batch.step_traj)))
        chain = batch.step_traj
    else:
        at = torch.arange(len(batch.token_step))
        chain = batch.token_step

    last = torch.cat([chain[1:] != chain[:-1], torch.ones(1, dtype=torch.bool)])  # [U]
    if gae == "step":
        return at, chain, batch.outcomes[chain] * last - penalty * invalid
    of_steps = batch.outcomes[batch.step_traj] - penalty * invalid  # [S]
    return at, chain, of_steps[chain] * last


def gae_advantages(rewards, values, chain, gamma: float, lam: float) -> torch.Tensor:
    """sum over l of (gamma * lam)^l * delta_u+l along the chain, delta_u = r_u + gamma * V_u+1 -
    V_u, [U] from [U] each. The units of a chain are adjacent and in order of time; after the last
    one V and A are 0."""
    r, v, c = rewards.tolist(), values.tolist(), chain.tolist()
    advantages, later = [0.0] * len(c), 0.0
    for u in reversed(range(len(c))):
        if u + 1 == len(c) or c[u + 1] != c[u]:  # the last of its chain
            later = r[u] - v[u]
        else:
            later = r[u] + gamma * v[u + 1] - v[u] + gamma * lam * later
        advantages[u] = later
    return torch.tensor(advantages)


def value_loss(values, old_values, returns, clip: float) -> torch.Tensor:
    """Mean of 1/2 max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2), from [U] each."""
    clipped = torch.clamp(values, old_values - clip, old_values + clip)
    return 0.5 * torch.max((values - returns) ** 2, (clipped - returns) ** 2).mean()


def value_model(path: str, rank: int, **reading):
    """The initial model with a value head, initialised to 0, and a LoRA adapter, "critic"; peft
    trains and saves both. Rank 0: full training, in float32."""
    if rank == 0:
        reading |= {"dtype": torch.float32}
    model = AutoModelForTokenClassification.from_pretrained(path, num_labels=1, **reading)
    for parameter in model.score.float().parameters():  # trained in float32
        torch.nn.init.zeros_(parameter)
    if rank == 0:
        return model
    adapter = lora(rank)
    adapter.exclude_modules = ["score"]
    adapter.task_type = "TOKEN_CLS"
    return get_peft_model(model, adapter, adapter_name="critic")


def token_values(critic: Network, micro, args) -> torch.Tensor:
    """V before each action token of a micro-batch, [k]: the output that predicts the token."""
    return critic.at_actions(
        micro, args, lambda hidden, _: critic.plain.score(hidden)[:, 0].float()
    )


def critic_update(critic: Network, batch, at, old_values, returns, args) -> dict:
    """--minibatches optimiser steps, each on a random share of the episodes; at, old_values,
    returns [U]. A gradient is summed over micro-batches, each weighted by its number of units."""
    unit = torch.full((len(batch.token_step),), -1)  # [K] the unit of each token, or -1
    unit[at] = torch.arange(len(at))
    token_traj = batch.step_traj[batch.token_step]  # [K]
    seen = []  # statistics of each micro-batch
    grad_norms = []
    for share in torch.randperm(len(batch.outcomes)).tensor_split(args.minibatches):
        num_units = int((torch.isin(token_traj, share) & (unit >= 0)).sum())
        for micro in micro_batches(batch, args, only=torch.isin(batch.step_traj, share)):
            units = unit[micro.tokens]  # [k]
            values = token_values(critic, micro, args)[units >= 0]
            old = old_values[units[units >= 0]].to(values.device)
            target = returns[units[units >= 0]].to(values.device)
            loss = value_loss(values, old, target, args.value_clip)
            (loss * len(old) / num_units).backward()
            seen.append({"weight": len(old), "loss": loss.item()})
        grad_norms.append(optimizer_step(critic, args))
    return mean_of(seen) | {"grad_norm": sum(grad_norms) / len(grad_norms)}


@ends_cleanly  # Ctrl-C, SIGTERM, a full disk, gradients that are not finite: exits with one line
def main():
    args = parse(Args, __doc__)  # tyro: a flag for each field above
    env = WebShop.from_args(args)
    run = Run(args, env)  # directory, rows, W&B, seeds, checkpoints: nothing that is learnt

    # ------------ Models ------------
    model, engine, chat = run.load_policy(lora(args.policy_lora_rank))
    policy = Network("policy", model)  # a transformers model; the engine: vLLM, or this model
    policy.optimizer = AdamW(policy.trained, args.learning_rate, weight_decay=0.0)

    model = value_model(run.model_path, args.critic_lora_rank, **run.reading)
    critic = Network("critic", model.to(run.device))
    critic.optimizer = AdamW(critic.trained, args.critic_learning_rate, weight_decay=0.0)

    sampling = SamplingParams(
        temperature=args.temperature,
        max_tokens=args.max_action_tokens,
        stop_token_ids=chat.stop_ids,
        logprobs=0,  # of the sampled token alone
    )
    evaluation = sampling.clone()
    evaluation.temperature = args.run_args.eval_temperature

    run.resume(policy, critic)
    engine.load(policy.model)
    if run.is_new:
        run.log_episodes("eval", run.rollout(play, run.eval_env, run.eval_tasks, evaluation))
        run.save()

    for iteration in run.iterations():  # what an iteration draws depends on (seed, iteration) alone
        # ------------ 1. Rollout: a group of episodes for each task, played by pi_old ------------
        tasks = random.sample(env.train_tasks, args.tasks_per_iteration)
        tasks = sorted(tasks * args.group_size)
        episodes = run.rollout(play, env, tasks, sampling)  # concurrently, in the order of tasks
        batch = flatten(episodes)  # N episodes, S steps, K action tokens
        engine.sleep()
        run.lap("rollout")

        # ------------ 2. log pi_old of every action token, by the trainer's forward ------------
        old_logprobs = batch_logprobs(policy, batch, args)  # [K]
        gap = (old_logprobs - batch.engine_logprobs).abs().mean().item()
        run.lap("logprobs")

        # ------------ 3. Critic: old values, advantages, then the critic's update ------------
        units = credit_units(batch, batch.invalid, args.invalid_penalty, args.gae)
        at, chain, rewards = units  # [U] each
        values = over_batch(token_values, critic, batch, args)[at]  # [U]
        advantages = gae_advantages(rewards, values, chain, args.gamma, args.gae_lambda)  # [U]
        returns = advantages + values  # [U]
        run.log("critic", critic_update(critic, batch, at, values, returns, args))
        unexplained, varies = (x.var(unbiased=False).item() for x in (advantages, returns))
        explained = 1 - unexplained / varies if varies > 1e-9 else None
        run.log("critic", {"value": values.mean().item(), "explained_variance": explained})
        run.lap("critic")

        # ------------ 4. Advantages: standardised over the batch ------------
        exact = advantages.double()  # so that equal advantages give exactly 0
        spread = exact.std() if len(exact) > 1 else 0.0
        advantages = ((exact - exact.mean()) / (spread + 1e-6)).float()  # [U]
        credited = batch  # the units that have an advantage
        step_values, step_adv = values, advantages  # [S] for the log
        if args.gae == "token":
            credited = by_token(batch)
            counts = torch.bincount(batch.token_step)  # [S]
            step_values = sum_per_step(values, batch) / counts
            step_adv = sum_per_step(advantages, batch) / counts

        # ------------ 5. Policy: clipped surrogate; then the engine gets the new weights --------
        decay = 1 + (iteration - 1) / args.lr_halving
        policy.optimizer.param_groups[0]["lr"] = args.learning_rate / decay
        run.log("policy", policy_update(policy, credited, old_logprobs, advantages, args))
        run.log("policy", {"engine_gap": gap, "advantage_mean": advantages.mean().item()})
        run.lap("update")
        engine.load(policy.model)
        run.lap("sync")

        # ------------ Log, evaluate, save ------------
        run.log_episodes("train", episodes)
        if run.evaluates(iteration):
            run.log_episodes("eval", run.rollout(play, run.eval_env, run.eval_tasks, evaluation))
        run.save(episodes, value=step_values, advantage=step_adv)


if __name__ == "__main__":
    main()
