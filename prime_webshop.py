r"""PRIME on WebShop: token rewards from an implicit process reward model (PRM) of outcomes.

Cui et al., arXiv 2502.01456; a baseline of iStar (arXiv 2509.19199). iStar's PRM learns which of
two trajectories was better; PRIME's learns whether a trajectory succeeds. r_o: the outcome, 0 or 1;
y_k: the k-th action token of a trajectory, of all its answers together; pi_old: the policy that
sampled this iteration's episodes; pi_theta: the policy in training; pi_phi: the PRM; pi_ref: the
initial model, where pi_phi starts.

    token reward   r(y_k) = beta * (log pi_phi(y_k|.) - log pi_ref(y_k|.)),  L(tau) = sum_k r(y_k)
    PRM            min_phi -E[r_o log sigmoid(L(tau)) + (1 - r_o) log(1 - sigmoid(L(tau)))]
    advantage      A(y_k) = sum over l >= k of (r(y_l) - B(tau)) + r_o(tau) - mean of others' r_o,
                   B(tau) = mean over the group's others of their mean token reward
    policy         max_theta E min(rho A, clip(rho, 1-eps, 1+eps) A),
                   rho = pi_theta / pi_old of each token

--variant istar-code is the simpler variant in a public copy of the release of iStar's authors (it
is not known which of its options gave their table). Each step is a sample, labelled with its
episode's outcome, so the cross-entropy is per step; pi_ref is pi_old. The advantage of a step is
n / (n-1) * (R - mean of R over the first steps of the group's n trajectories), where R is the
outcome plus the step's summed reward; at a first step this is R minus the mean of others' R.

Left out, as in istar_webshop.py: KL to a reference, entropy bonus, dual clip; and of PRIME's
release the filter for prompts of medium accuracy, the coefficients of the two parts, and whitening.

    python prime_webshop.py                         # the tiny model: 30 minutes on one CPU core
    python prime_webshop.py --model Qwen/Qwen2.5-1.5B-Instruct --dtype bfloat16 \
        --max-action-tokens 512 --max-context-tokens 16384 --gradient-checkpointing \
        --learning-rate 1e-6 --lr-halving inf --prm-learning-rate 1e-6  # one GPU of 80 GB
"""

import random
import sys
from dataclasses import dataclass, field
from typing import Literal

from envs.webshop import WebShop, WebShopArgs
from runtime.data import Step, Trajectory, flatten, joined, micro_batches, sum_per_step
from runtime.engines import SamplingParams
from runtime.flags import Flat, RunArgs, parse
from runtime.networks import Network, action_logprobs, batch_logprobs, sum_gradients
from runtime.run import Run, ends_cleanly, mean_of

import torch
from peft import LoraConfig
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW


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
    group_size: int = 8  # Episodes per task: a group (iStar paper: G = 8).
    temperature: float = 1.0  # Sampling temperature in training, and of all log-probabilities.
    learning_rate: float = 5e-4  # Learning rate of the policy (AdamW; iStar paper: 5e-7 for 7B).
    lr_halving: float = 40.0  # Iteration t has the rate lr / (1 + (t-1) / lr_halving); inf: lr.
    minibatches: int = 2  # Optimiser steps per iteration, each on a random share of the episodes.
    max_grad_norm: float = 1.0  # Largest gradient norm; larger gradients are scaled down to it.
    clip: float = 0.2  # Half width eps of the interval that clips the ratio (iStar paper: 0.2).
    invalid_penalty: float = 0.1  # Subtracted from A at a step whose answer is invalid.
    engine_cap: float = 2.0  # Cap on A's weight, pi_old by the trainer / pi_old by the engine.
    policy_lora_rank: int = 0  # Rank of the policy's LoRA adapter; 0: all parameters train.

    variant: Literal["prime", "istar-code"] = "prime"
    """PRIME as published, or the variant in a copy of iStar's release (see above)."""
    beta: float = 0.05  # Scale beta of the PRM's rewards and loss (paper: 0.05).
    prm_learning_rate: float = 1e-3  # Learning rate of the PRM (AdamW; paper: 1e-6 for 7B).
    prm_weight_decay: float = 0.01  # Weight decay of the PRM, towards the initial model.
    prm_lora_rank: int = 16  # Rank of the PRM, a LoRA adapter on the initial model.
    prm_score: Literal["before", "after"] = "before"
    """Token rewards are computed before or after the PRM's update; the paper tries both."""


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


def rloo_advantages(outcomes: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
    """r - mean of the group's others, [N] from [N] and [N] (Ahmadian et al., arXiv 2402.14740).
    Alone in a group: 0."""
    same = (group[:, None] == group[None, :]).double()  # [N, N]
    others = same.sum(1) - 1
    exact = outcomes.double()  # so that equal outcomes give exactly 0
    mean_of_others = (same @ exact - exact) / others.clamp(min=1)
    return torch.where(others > 0, exact - mean_of_others, 0.0).to(outcomes.dtype)


def by_token(batch):
    """The same batch with every action token as a separate step, for advantages [K]."""
    step_traj = batch.step_traj[batch.token_step]  # [K]
    return batch._replace(step_traj=step_traj, token_step=torch.arange(len(step_traj)))


def token_rewards(prm_logprobs, ref_logprobs, beta: float) -> torch.Tensor:
    """beta * (log pi_phi - log pi_ref) of every action token, [K] from [K] and [K]."""
    return beta * (prm_logprobs - ref_logprobs)


def outcome_logits(rewards, owner, number: int) -> torch.Tensor:
    """L of every trajectory (or step), [number]: the sum of the token rewards [K] that it owns
    (owner [K])."""
    return rewards.new_zeros(number).index_add(0, owner, rewards)


def prime_advantages(outcomes, group, rewards, token_traj) -> torch.Tensor:
    """Leave-one-out of the outcomes [N] plus, from each token on, the sum of token rewards [K]
    minus the mean token reward of the group's others: [K]. token_traj [K] ascends. Alone in a
    group: the baseline is its own mean, the outcome's part is 0."""
    counts = torch.bincount(token_traj)  # [N]
    means = outcome_logits(rewards, token_traj, len(outcomes)) / counts  # [N]
    others = means - rloo_advantages(means, group)  # [N]

    centred = (rewards - others[token_traj]).double()  # [K], float64: differences of long sums
    running = centred.cumsum(0)  # [K]
    last = counts.cumsum(0) - 1  # [N] the last token of each trajectory
    to_go = running[last][token_traj] - running + centred  # [K]
    return to_go.to(rewards.dtype) + rloo_advantages(outcomes, group)[token_traj]


def istar_code_advantages(outcomes, group, rewards, step_traj) -> torch.Tensor:
    """n / (n-1) * (R_t - mean over the group's n trajectories of their first R), R_t = r_o + step
    reward: [S] from [N], [N], [S], [S]. Alone: 0."""
    totals = outcomes[step_traj] + rewards  # [S]
    lengths = torch.bincount(step_traj)  # [N]
    first = lengths.cumsum(0) - lengths  # [N] the first step of each trajectory
    same = (group[:, None] == group[None, :]).to(rewards.dtype)  # [N, N]
    members = same.sum(1)  # [N]
    baseline = same @ totals[first] / members  # [N]
    scale = torch.where(members > 1, members / (members - 1).clamp(min=1), 0.0)  # [N]
    return scale[step_traj] * (totals - baseline[step_traj])


def cross_entropy_update(prm: Network, batch, log_ratios, owner, labels, args) -> dict:
    """One optimiser step of the mean cross-entropy of labels (0 or 1) under sigmoid(L), L of owners
    as outcome_logits has it; returns statistics from before it.

    log_ratios [K] are log pi_phi - log pi_ref, without a graph. The loss depends on the PRM only
    through them. Its derivatives with respect to them weight the log-probabilities, which are
    back-propagated by micro-batch, so an episode may consist of several sequences (--history)."""
    log_ratios = log_ratios.clone().requires_grad_()
    logits = outcome_logits(args.beta * log_ratios, owner, len(labels))
    loss = binary_cross_entropy_with_logits(logits, labels)
    (slope,) = torch.autograd.grad(loss, log_ratios)  # [K]

    for micro in micro_batches(batch, args):
        logprobs = action_logprobs(prm, micro, args)  # [k] with a graph
        (logprobs * slope[micro.tokens].to(logprobs.device)).sum().backward()
    grad_norm = optimizer_step(prm, args)

    right = (logits.sign() * (2 * labels - 1) + 1) / 2  # a logit of 0: 0.5
    return {"loss": loss.item(), "accuracy": right.mean().item(), "grad_norm": grad_norm}


@ends_cleanly  # Ctrl-C, SIGTERM, a full disk, gradients that are not finite: exits with one line
def main():
    args = parse(Args, __doc__)  # tyro: a flag for each field above
    if args.world.outcome != "success":
        sys.exit(f"--outcome {args.world.outcome}: the cross-entropy needs 0 or 1, so success")
    env = WebShop.from_args(args)
    run = Run(args, env)  # directory, rows, W&B, seeds, checkpoints: nothing that is learnt

    # ------------ Models ------------
    model, engine, chat = run.load_policy(lora(args.policy_lora_rank))
    policy = Network("policy", model)  # a transformers model; the engine: vLLM, or this model
    policy.optimizer = AdamW(policy.trained, args.learning_rate, weight_decay=0.0)

    reference = policy.initial()  # pi_ref, frozen
    prm = reference.with_adapter("prm", lora(args.prm_lora_rank))  # it starts as pi_ref: r = 0
    prm.optimizer = AdamW(prm.trained, args.prm_learning_rate, weight_decay=args.prm_weight_decay)

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

        # ------------ 3. PRM: cross-entropy on the outcome, then a reward for each token --------
        token_traj = batch.step_traj[batch.token_step]  # [K]
        if args.variant == "prime":
            owner, labels = token_traj, batch.outcomes  # an episode is a sample
            ref_logprobs = batch_logprobs(reference, batch, args)  # [K]
        else:
            owner, labels = batch.token_step, batch.outcomes[batch.step_traj]  # a step is a sample
            ref_logprobs = old_logprobs

        prm_logprobs = batch_logprobs(prm, batch, args)  # [K]
        log_ratios = prm_logprobs - ref_logprobs
        run.log("prm", cross_entropy_update(prm, batch, log_ratios, owner, labels, args))
        if args.prm_score == "after":
            prm_logprobs = batch_logprobs(prm, batch, args)  # [K]
        rewards = token_rewards(prm_logprobs, ref_logprobs, args.beta)  # [K]
        step_rewards = sum_per_step(rewards, batch)  # [S]
        run.lap("prm")

        # ------------ 4. Advantages: outcome and token rewards, minus the others' means ---------
        outcome_adv = rloo_advantages(batch.outcomes, batch.group)[batch.step_traj]  # [S]
        if args.variant == "prime":
            credited = by_token(batch)  # each token has an advantage
            advantages = prime_advantages(batch.outcomes, batch.group, rewards, token_traj)  # [K]
            process_adv = advantages - outcome_adv[batch.token_step]  # [K]
            advantages = advantages - args.invalid_penalty * batch.invalid[batch.token_step]
            step_adv = sum_per_step(advantages, batch) / torch.bincount(batch.token_step)  # [S]
        else:
            credited = batch  # each step has one
            parts = batch.outcomes, batch.group, step_rewards, batch.step_traj
            advantages = istar_code_advantages(*parts)  # [S]
            process_adv = advantages - outcome_adv  # [S]
            advantages = advantages - args.invalid_penalty * batch.invalid
            step_adv = advantages
        spread = {"process_std": process_adv.std().item(), "outcome_std": outcome_adv.std().item()}
        run.log("prm", spread)

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
        run.save(episodes, implicit_reward=step_rewards, advantage=step_adv)


if __name__ == "__main__":
    main()
