r"""iStar on SOTOPIA as published: the paper's choices, or its code's where the paper has none.

Liu et al., arXiv 2509.19199. An episode has one outcome r_o; iStar computes a reward for each of
its steps without step labels. o_1:t: what the agent has seen; a_t: its action, all tokens of one
answer; pi_old: the policy that sampled this iteration's episodes; pi_theta: the policy in training.

    PRM, by DPO    min_phi -E log sigmoid( L(tau+) - L(tau-) ),  r_o(tau+) > 0.6 >= r_o(tau-),
                   L(tau) = sum_t r_phi(o_1:t, a_t)
    step reward    r_phi(o_1:t, a_t) = beta * (log pi_phi(a_t|o_1:t) - log pi_old(a_t|o_1:t))
    advantage      A(a_t) = A^E(tau) + alpha * A^S(a_t)
                   A^E: RLOO, GRPO or REINFORCE++ on outcomes; A^S: r_phi standardised in its group
    policy         max_theta E min(rho A, clip(rho, 1-eps, 1+eps) A),
                   rho = pi_theta(a_t|o_1:t) / pi_old(a_t|o_1:t)

pi_phi starts as a full copy of the policy. Its rate is twice the policy's, and it makes one update
per iteration, on all pairs of the iteration's episodes, over all of their steps. Rewards are
computed before this update, as in the authors' code. No KL to a reference, entropy bonus or dual
clip. istar_sotopia.py is the same script with our changes; the diff of the two shows them.

    python istar_paper_sotopia.py                     # own scenarios, scored by a rule: 6 minutes
    accelerate launch --config_file configs/fsdp.yaml --num_processes 8 \
        istar_paper_sotopia.py --processes 8 --dtype bfloat16 --gradient-checkpointing \
        --sotopia-data DIR --partner self --judge-url https://HOST/v1 --judge-model NAME \
        --model Qwen/Qwen2.5-7B-Instruct --learning-rate 1e-6 --prm-learning-rate 2e-6 \
        --max-action-tokens 512 --max-context-tokens 16384 --max-steps 10 \
        --history 2  # on eight GPUs of 80 GB; see docs/worlds.md
"""

import math
import random
from dataclasses import dataclass, field
from typing import Literal

from envs.sotopia import Sotopia, SotopiaArgs
from runtime.data import Step, Trajectory, flatten, joined, micro_batches, sum_per_step
from runtime.engines import SamplingParams
from runtime.flags import Flat, RunArgs, parse
from runtime.networks import Network, action_logprobs, batch_logprobs, sum_gradients
from runtime.run import Run, ends_cleanly, mean_of

import torch
from peft import LoraConfig
from torch.nn.functional import logsigmoid
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW


@dataclass
class Args:
    world: Flat[SotopiaArgs] = field(default_factory=SotopiaArgs)
    run_args: Flat[RunArgs] = field(default_factory=RunArgs)

    model: str = "models/tiny-sotopia"  # Initial policy: a directory, or a name on the hub.
    max_steps: int = 6  # Maximum answers per side [steps]: half of all turns (iStar paper: 10).
    max_action_tokens: int = 48  # Longest answer [tokens]; a model that reasons needs 512.
    max_context_tokens: int = 2048  # Longest context [tokens]; a longer episode is truncated.
    history: int = 0  # Past turns that a step sees; 0: all (iStar paper: o_1:t; its runs: 2).
    seed: int = 1  # Seed of tasks, sampling and initialisation.
    iterations: int = 80  # Number of iterations; each has a rollout and its updates.
    tasks_per_iteration: int = 16  # Tasks per iteration (iStar paper: 16, Sokoban 32).
    group_size: int = 8  # Episodes per task: a group (iStar paper: G = 8).
    temperature: float = 1.0  # Sampling temperature in training, and of all log-probabilities.
    learning_rate: float = 3e-4  # Learning rate of the policy (AdamW; iStar paper: 5e-7 for 7B).
    lr_halving: float = math.inf  # Iteration t has the rate lr / (1 + (t-1) / lr_halving); inf: lr.
    minibatches: int = 2  # Optimiser steps per iteration, each on a random share of the episodes.
    max_grad_norm: float = 1.0  # Largest gradient norm; larger gradients are scaled down to it.
    clip: float = 0.2  # Half width eps of the interval that clips the ratio (iStar paper: 0.2).
    invalid_penalty: float = 0.1  # Subtracted from A at a step whose answer is invalid.
    engine_cap: float = 2.0  # Cap on A's weight, pi_old by the trainer / pi_old by the engine.
    policy_lora_rank: int = 0  # Rank of the policy's LoRA adapter; 0: all parameters train.

    estimator: Literal["rloo", "grpo", "reinforce++"] = "grpo"  # Estimator of A^E.
    alpha: float = 1.0  # Weight alpha of the step advantage A^S.
    beta: float = 0.05  # Scale beta of the PRM's rewards and loss.
    prm_learning_rate: float = 6e-4  # Learning rate of the PRM, twice the policy's (7B: 1e-6).


# === block: conversation ===
async def play(env, engine, chat, task: int, sampling: SamplingParams, args) -> Trajectory:
    """One side of a conversation. Sides run concurrently: while one waits, others continue."""
    episode = env.reset(task)
    seen = await episode.opening()
    turns = [chat.prompt(seen)]
    t = Trajectory(task)

    for _ in range(args.max_steps):
        context = joined([turns[0], *turns[1:][-args.history :]])  # o_1:t; history 0: all turns
        if len(context) + args.max_action_tokens > args.max_context_tokens:
            t.truncated = True
            break
        action, logprobs = await engine.sample(context, sampling)
        text = chat.response(action)
        observation, reward, done, info = await episode.step(text)

        t.append(context, action)  # the ids that the engine saw and sampled
        t.steps.append(Step(seen, text, logprobs, **info))
        t.outcome += reward
        if done:
            break
        turns.append(joined([action, chat.observation(observation, action)]))
        seen = observation
    if t.truncated and t.steps:  # the conversation ends here and is judged
        reward, success, score = await episode.leave()
        t.outcome += reward
        t.steps[-1].success, t.steps[-1].score = success, score
    return t
    # === end block ===


# === block: advantages ===
def rloo_advantages(outcomes: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
    """r - mean of the group's others, [N] from [N] and [N] (Ahmadian et al., arXiv 2402.14740).
    Alone in a group: 0."""
    same = (group[:, None] == group[None, :]).double()  # [N, N]
    others = same.sum(1) - 1
    exact = outcomes.double()  # so that equal outcomes give exactly 0
    mean_of_others = (same @ exact - exact) / others.clamp(min=1)
    return torch.where(others > 0, exact - mean_of_others, 0.0).to(outcomes.dtype)


def grpo_advantages(outcomes: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
    """(r - mean) / std within the group, [N] from [N] and [N]; unbiased std (Shao et al., arXiv
    2402.03300). All equal or alone: 0."""
    advantages = torch.zeros_like(outcomes)
    for g in group.unique():
        r = outcomes[group == g]
        if r.max() > r.min():  # else the group gives no signal
            advantages[group == g] = (r - r.mean()) / r.std()
    return advantages


def reinforce_pp_advantages(outcomes, group, step_traj) -> torch.Tensor:
    """r - group mean, standardised over steps; [N] from [N], [N], [S] (Hu et al., 2501.03262)."""
    same = (group[:, None] == group[None, :]).double()  # [N, N]
    exact = outcomes.double()  # so that equal outcomes give exactly 0
    centred = (exact - same @ exact / same.sum(1)).to(outcomes.dtype)
    if len(step_traj) < 2 or centred[step_traj].std() <= 1e-6:
        return torch.zeros_like(centred)  # all are equal within every group
    scaled = centred / centred[step_traj].std()
    return scaled - scaled[step_traj].mean()


def episode_advantages(batch, estimator: str) -> torch.Tensor:
    """A^E of every step, [S]: that of its episode."""
    if estimator == "rloo":
        advantages = rloo_advantages(batch.outcomes, batch.group)  # [N]
    elif estimator == "grpo":
        advantages = grpo_advantages(batch.outcomes, batch.group)
    else:
        advantages = reinforce_pp_advantages(batch.outcomes, batch.group, batch.step_traj)
    return advantages[batch.step_traj]


def step_advantages(rewards, step_group) -> torch.Tensor:
    """A^S = (r_phi - mean) / std over the steps of each group, [S] from [S] and [S]."""
    return grpo_advantages(rewards, step_group)
    # === end block ===


# === block: policy ===
def policy_loss(logprobs, old_logprobs, advantages, clip: float) -> tuple[torch.Tensor, dict]:
    """-mean min(rho A, clip(rho, 1-eps, 1+eps) A), rho = exp(logprobs - old_logprobs), [s] each."""
    log_ratio = logprobs - old_logprobs
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - clip, 1 + clip)
    loss = -torch.min(ratio * advantages, clipped * advantages).mean()

    stats = {"loss": loss, "ratio": ratio.mean()}
    stats["approx_kl"] = (ratio - 1 - log_ratio).mean()
    stats["clip_fraction"] = (ratio != clipped).float().mean()
    return loss, {name: value.item() for name, value in stats.items()}


def engine_weights(batch, old_logprobs, args):
    """min(--engine-cap, pi_old by the trainer / pi_old by the engine) of every step, [S]; 1 in
    float32, where both are equal up to rounding, but for --async-rollout. old_logprobs [K]."""
    if args.run_args.dtype == "float32" and not args.run_args.async_rollout:
        return torch.ones(batch.num_steps)
    mismatch = sum_per_step(old_logprobs - batch.engine_logprobs, batch)  # [S]
    return mismatch.exp().clamp(max=args.engine_cap)


def policy_update(policy: Network, batch, old_logprobs, advantages, args) -> dict:
    """--minibatches optimiser steps, each on a random share of the episodes. In bfloat16, where old
    values differ by rounding, the first has ratios of 1. old_logprobs [K], advantages [S]."""
    seen = []  # statistics of each micro-batch
    grad_norms = []
    weighted = advantages * engine_weights(batch, old_logprobs, args)  # [S]
    for share in torch.randperm(len(batch.outcomes)).tensor_split(args.minibatches):
        ours = torch.isin(batch.step_traj, share)  # [S]
        num_steps = int(ours.sum())
        for micro in micro_batches(batch, args, only=ours & (advantages != 0)):
            new = sum_per_step(action_logprobs(policy, micro, args), micro)  # [s] with a graph
            old = sum_per_step(old_logprobs[micro.tokens].to(new.device), micro)
            if args.run_args.dtype == "bfloat16" and not grad_norms:
                old = new.detach()
            loss, stats = policy_loss(new, old, weighted[micro.steps].to(new.device), args.clip)
            (loss * len(new) / num_steps).backward()
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


def preference_pairs(outcomes, group) -> list[tuple[int, int]]:
    """Every (winner, loser) of a group: goals above 6 win against the others. outcomes [N] are
    goals divided by 10, group [N]."""
    good = outcomes > 0.6 + 1e-5  # [N]
    better = good[:, None] & ~good[None, :]  # [N, N]
    same_group = group[:, None] == group[None, :]
    return [tuple(pair) for pair in (better & same_group).nonzero().tolist()]


def step_rewards(prm_logprobs, old_logprobs, beta: float) -> torch.Tensor:
    """r_phi = beta * (log pi_phi(a_t|o_1:t) - log pi_old(a_t|o_1:t)), [S] from [S] and [S]."""
    return beta * (prm_logprobs - old_logprobs)


def margins(rewards, step_traj, pairs: list) -> torch.Tensor:
    """L(tau+) - L(tau-) of each pair, [P] from [S], over all steps of both."""
    sums = rewards.new_zeros(int(step_traj.max()) + 1).index_add(0, step_traj, rewards)  # [N]
    winners, losers = torch.tensor(pairs).T
    return sums[winners] - sums[losers]


def dpo_loss(margins: torch.Tensor) -> torch.Tensor:
    """Mean of -log sigmoid(L(tau+) - L(tau-)), from [P]."""
    return -logsigmoid(margins).mean()


def prm_update(prm: Network, batch, log_phi, log_old, pairs: list, args) -> dict:
    """One optimiser step of trajectory DPO over all pairs. log_phi, log_old [S]: log pi_phi and
    log pi_old of each step's action.

    The loss depends on the PRM only through log_phi. Its derivatives with respect to it
    weight the log-probabilities' gradients. Their sum over micro-batches is the gradient of the
    loss, in the memory of one micro-batch."""
    phi = log_phi.clone().requires_grad_()  # [S]
    margin = margins(step_rewards(phi, log_old, args.beta), batch.step_traj, pairs)  # [P]
    loss = dpo_loss(margin)
    (slope,) = torch.autograd.grad(loss, phi)  # [S] d loss / d log pi_phi(a_t|o_1:t)

    for micro in micro_batches(batch, args, only=slope != 0):
        logprobs = sum_per_step(action_logprobs(prm, micro, args), micro)  # [s] with a graph
        (logprobs * slope[micro.steps].to(logprobs.device)).sum().backward()
    grad_norm = optimizer_step(prm, args)
    accuracy = ((margin.sign() + 1) / 2).mean().item()  # on new pairs; a tie: 0.5
    told = {"loss": loss.item(), "margin": margin.mean().item(), "grad_norm": grad_norm}
    return told | {"pair_accuracy": accuracy}


def credit_statistics(episode_adv, step_adv, progress, weighted) -> dict:
    """Logged statistics, from [s] each: mean |weighted A^S| / mean |A^E|, and Pearson's correlation
    of A^S with the world's progress, which no algorithm uses (0 if either is constant)."""
    share = weighted.norm(1) / episode_adv.norm(1)
    centred = step_adv - step_adv.mean(), progress - progress.mean()
    correlation = torch.cosine_similarity(*centred, 0)
    return {"credit_share": share.item(), "advantage_progress_correlation": correlation.item()}


@ends_cleanly  # Ctrl-C, SIGTERM, a full disk, gradients that are not finite: exits with one line
def main():
    args = parse(Args, __doc__)  # tyro: a flag for each field above
    env = Sotopia.from_args(args)
    run = Run(args, env)  # directory, rows, W&B, seeds, checkpoints: nothing that is learnt

    # ------------ Models ------------
    model, engine, chat = run.load_policy(lora(args.policy_lora_rank))
    policy = Network("policy", model)  # a transformers model; the engine: vLLM, or this model
    policy.optimizer = AdamW(policy.trained, args.learning_rate, weight_decay=0.0)

    prm = policy.copy("prm")  # it starts as the policy: r_phi = 0
    prm.optimizer = AdamW(prm.trained, args.prm_learning_rate, weight_decay=0.0)

    sampling = SamplingParams(
        temperature=args.temperature,
        max_tokens=args.max_action_tokens,
        stop_token_ids=chat.stop_ids,
        logprobs=0,  # of the sampled token alone
    )
    evaluation = sampling.clone()
    evaluation.temperature = args.run_args.eval_temperature

    run.resume(policy, prm)
    engine.load(policy.model)
    panel = run.eval_env.sides_of(run.eval_tasks)  # in self-chat both sides of each conversation
    if run.is_new:
        run.log_episodes("eval", run.rollout(play, run.eval_env, panel, evaluation))
        run.save()

    for iteration in run.iterations():  # what an iteration draws depends on (seed, iteration) alone
        # ------------ 1. Rollout: a group of episodes for each task, played by pi_old ------------
        tasks = random.sample(env.train_tasks, args.tasks_per_iteration)
        tasks = env.sides_of(sorted(tasks * args.group_size))
        episodes = run.rollout(play, env, tasks, sampling)  # concurrently, in the order of tasks
        batch = flatten(episodes)  # N episodes, S steps, K action tokens
        engine.sleep()
        run.lap("rollout")

        # ------------ 2. log pi_old of every action token, by the trainer's forward ------------
        old_logprobs = batch_logprobs(policy, batch, args)  # [K]
        gap = (old_logprobs - batch.engine_logprobs).abs().mean().item()
        run.lap("logprobs")

        # ------------ 3. PRM: a reward for each step; trajectory DPO within groups ------------
        log_old = sum_per_step(old_logprobs, batch)  # [S]
        log_phi = sum_per_step(batch_logprobs(prm, batch, args), batch)  # [S] before its update
        rewards = step_rewards(log_phi, log_old, args.beta)  # [S]
        pairs = preference_pairs(batch.outcomes, batch.group)
        run.log("prm", {"pairs": len(pairs), "pair_accuracy": None})
        if pairs:
            run.log("prm", prm_update(prm, batch, log_phi, log_old, pairs, args))
        run.lap("prm")

        # ------------ 4. Advantages: A = A^E + alpha * A^S ------------
        episode_adv = episode_advantages(batch, args.estimator)  # [S]
        step_adv = step_advantages(rewards, batch.group[batch.step_traj])  # [S]
        weighted = args.alpha * step_adv  # [S]
        advantages = episode_adv + weighted - args.invalid_penalty * batch.invalid  # [S]
        run.log("prm", credit_statistics(episode_adv, step_adv, batch.progress, weighted))

        # ------------ 5. Policy: clipped surrogate; then the engine gets the new weights --------
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
            run.log_episodes("eval", run.rollout(play, run.eval_env, panel, evaluation))
        columns = dict(implicit_reward=rewards, step_advantage=step_adv, advantage=advantages)
        run.save(episodes, **columns, episode_advantage=episode_adv)


if __name__ == "__main__":
    main()
