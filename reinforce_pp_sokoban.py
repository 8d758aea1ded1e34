r"""REINFORCE++ with baseline on Sokoban, for multi-turn agents.

Hu et al., arXiv 2501.03262; a baseline of iStar (arXiv 2509.19199). All steps of an episode get the
same credit: its outcome r_o minus the group's mean, with one scale for the whole batch. GRPO's
scale per group gives rare outcomes of easy or hard tasks the most weight; here all tasks have the
same scale. o_1:t: what the agent has seen; a_t: its action, all tokens of one answer; pi_old: the
policy that sampled this iteration's episodes; pi_theta: the policy in training.

    centred        c(tau) = r_o(tau) - mean of r_o over the group, tau itself included
    advantage      A(a_t) = A(tau) = (c(tau) - mean c) / std c, over all steps of the batch
    policy         max_theta E min(rho A, clip(rho, 1-eps, 1+eps) A),
                   rho = pi_theta / pi_old of each token

Left out, as in istar_sokoban.py: KL to a reference (the paper's k2 loss), entropy bonus, dual clip.
The paper's mean and std are over tokens; here each step counts once. A group of equal outcomes has
c = 0, so its A is -mean c / std c.

    python reinforce_pp_sokoban.py                  # the tiny model: 6 minutes on one CPU core
    python reinforce_pp_sokoban.py --model Qwen/Qwen2.5-1.5B-Instruct --dtype bfloat16 \
        --max-action-tokens 256 --max-context-tokens 8192 \
        --learning-rate 1e-6 --lr-halving inf  # one GPU of 80 GB
"""

import random
from dataclasses import dataclass, field

from envs.sokoban import Sokoban, SokobanArgs
from runtime.data import Step, Trajectory, flatten, joined, micro_batches
from runtime.engines import SamplingParams
from runtime.flags import Flat, RunArgs, parse
from runtime.networks import Network, action_logprobs, batch_logprobs, sum_gradients
from runtime.run import Run, ends_cleanly, mean_of

import torch
from peft import LoraConfig
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW


@dataclass
class Args:
    world: Flat[SokobanArgs] = field(default_factory=SokobanArgs)
    run_args: Flat[RunArgs] = field(default_factory=RunArgs)

    model: str = "models/tiny-sokoban"  # Initial policy: a directory, or a name on the hub.
    max_steps: int = 15  # Longest episode [steps]; an invalid answer costs a step too.
    max_action_tokens: int = 16  # Longest answer [tokens]; a model that reasons needs 256.
    max_context_tokens: int = 1024  # Longest context [tokens]; a longer episode is truncated.
    history: int = 0  # Past turns that a step sees; 0: all (iStar paper: o_1:t; its runs: 2).
    seed: int = 1  # Seed of tasks, sampling and initialisation.
    iterations: int = 80  # Number of iterations; each has a rollout and its updates.
    tasks_per_iteration: int = 16  # Tasks per iteration (iStar paper: 16, Sokoban 32).
    group_size: int = 8  # Episodes per task: a group (iStar paper: G = 8).
    temperature: float = 1.0  # Sampling temperature in training, and of all log-probabilities.
    learning_rate: float = 1e-3  # Learning rate of the policy (AdamW; iStar paper: 5e-7 for 7B).
    lr_halving: float = 40.0  # Iteration t has the rate lr / (1 + (t-1) / lr_halving); inf: lr.
    minibatches: int = 2  # Optimiser steps per iteration, each on a random share of the episodes.
    max_grad_norm: float = 1.0  # Largest gradient norm; larger gradients are scaled down to it.
    clip: float = 0.2  # Half width eps of the interval that clips the ratio (iStar paper: 0.2).
    invalid_penalty: float = 0.1  # Subtracted from A at a step whose answer is invalid.
    engine_cap: float = 2.0  # Cap on A's weight, pi_old by the trainer / pi_old by the engine.
    policy_lora_rank: int = 0  # Rank of the policy's LoRA adapter; 0: all parameters train.


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


def reinforce_pp_advantages(outcomes, group, step_traj) -> torch.Tensor:
    """r - group mean, standardised over steps; [N] from [N], [N], [S] (Hu et al., 2501.03262)."""
    same = (group[:, None] == group[None, :]).double()  # [N, N]
    exact = outcomes.double()  # so that equal outcomes give exactly 0
    centred = (exact - same @ exact / same.sum(1)).to(outcomes.dtype)
    if len(step_traj) < 2 or centred[step_traj].std() <= 1e-6:
        return torch.zeros_like(centred)  # all are equal within every group
    scaled = centred / centred[step_traj].std()
    return scaled - scaled[step_traj].mean()


@ends_cleanly  # Ctrl-C, SIGTERM, a full disk, gradients that are not finite: exits with one line
def main():
    args = parse(Args, __doc__)  # tyro: a flag for each field above
    env = Sokoban.from_args(args)
    run = Run(args, env)  # directory, rows, W&B, seeds, checkpoints: nothing that is learnt

    # ------------ Models ------------
    model, engine, chat = run.load_policy(lora(args.policy_lora_rank))
    policy = Network("policy", model)  # a transformers model; the engine: vLLM, or this model
    policy.optimizer = AdamW(policy.trained, args.learning_rate, weight_decay=0.0)

    sampling = SamplingParams(
        temperature=args.temperature,
        max_tokens=args.max_action_tokens,
        stop_token_ids=chat.stop_ids,
        logprobs=0,  # of the sampled token alone
    )
    evaluation = sampling.clone()
    evaluation.temperature = args.run_args.eval_temperature

    run.resume(policy)
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

        # ------------ 3. Advantages: outcome minus group mean, standardised over the batch ------
        outcome_adv = reinforce_pp_advantages(batch.outcomes, batch.group, batch.step_traj)  # [N]
        advantages = outcome_adv[batch.step_traj]  # [S]
        advantages -= args.invalid_penalty * batch.invalid

        # ------------ 4. Policy: clipped surrogate; then the engine gets the new weights --------
        decay = 1 + (iteration - 1) / args.lr_halving
        policy.optimizer.param_groups[0]["lr"] = args.learning_rate / decay
        run.log("policy", policy_update(policy, batch, old_logprobs, advantages, args))
        run.log("policy", {"engine_gap": gap, "advantage_mean": advantages.mean().item()})
        run.lap("update")
        engine.load(policy.model)
        run.lap("sync")

        # ------------ Log, evaluate, save ------------
        run.log_episodes("train", episodes)
        if run.evaluates(iteration):
            run.log_episodes("eval", run.rollout(play, run.eval_env, run.eval_tasks, evaluation))
        run.save(episodes, advantage=advantages)


if __name__ == "__main__":
    main()
