r"""iStar on ALFWorld: step-level credit from an implicit process reward model (PRM).

Liu et al., arXiv 2509.19199. An episode has one outcome r_o; iStar computes a reward for each of
its steps without step labels. o_1:t: what the agent has seen; a_t: its action, all tokens of one
answer; pi_old: the policy that sampled this iteration's episodes; pi_theta: the policy in training.

    PRM, by DPO    min_phi -E log sigmoid( L(tau+) - L(tau-) ),  r_o(tau+) > r_o(tau-),
                   L(tau) = sum_t r_phi(o_1:t, a_t)
    step reward    r_phi(o_1:t, a_t) = beta * (log pi_phi(a_t|o_1:t) - log pi_old(a_t|o_1:t))
    advantage      A(a_t) = A^E(tau) + alpha * skill * A^S(a_t)
                   A^E: RLOO, GRPO or REINFORCE++ on outcomes; A^S: r_phi standardised in its group
    policy         max_theta E min(rho A, clip(rho, 1-eps, 1+eps) A),
                   rho = pi_theta(a_t|o_1:t) / pi_old(a_t|o_1:t)

pi_phi is the policy plus a LoRA adapter, so r_phi depends only on what the adapter has learnt. Not
in istar_paper_alfworld.py: r_phi minus its regression on log pi_old, skill, replay, ridge, averaged
weights, A^S only for valid answers in groups with a pair, pairs of equal length.

    python istar_alfworld.py                          # the tiny model: 40 minutes on one CPU core
    python istar_alfworld.py --model Qwen/Qwen2.5-1.5B-Instruct --dtype bfloat16 \
        --max-steps 50 --max-action-tokens 512 --max-context-tokens 32768 --gradient-checkpointing \
        --learning-rate 1e-6 --lr-halving inf --prm-learning-rate 1e-5  # one GPU of 80 GB
"""

import random
from dataclasses import dataclass, field
from typing import Literal

from envs.alfworld import AlfWorld, AlfWorldArgs
from runtime.data import Step, Trajectory, flatten, joined, micro_batches, sum_per_step
from runtime.engines import SamplingParams
from runtime.flags import Flat, RunArgs, parse
from runtime.networks import Network, action_logprobs, batch_logprobs, sum_gradients
from runtime.run import Run, ends_cleanly, mean_of

import torch
from peft import LoraConfig
from torch.nn.functional import logsigmoid
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW, swa_utils


@dataclass
class Args:
    world: Flat[AlfWorldArgs] = field(default_factory=AlfWorldArgs)
    run_args: Flat[RunArgs] = field(default_factory=RunArgs)

    model: str = "models/tiny-alfworld"  # Initial policy: a directory, or a name on the hub.
    max_steps: int = 20  # Longest episode [steps]; an invalid answer costs a step too.
    max_action_tokens: int = 16  # Longest answer [tokens]; a model that reasons needs 512.
    max_context_tokens: int = 2048  # Longest context [tokens]; a longer episode is truncated.
    history: int = 0  # Past turns that a step sees; 0: all (iStar paper: o_1:t; its runs: 2).
    seed: int = 1  # Seed of tasks, sampling and initialisation.
    iterations: int = 120  # Number of iterations; each has a rollout and its updates.
    tasks_per_iteration: int = 16  # Tasks per iteration (iStar paper: 16, Sokoban 32).
    group_size: int = 8  # Episodes per task: a group (iStar paper: G = 8).
    temperature: float = 1.0  # Sampling temperature in training, and of all log-probabilities.
    learning_rate: float = 1e-3  # Learning rate of the policy (AdamW; iStar paper: 5e-7 for 7B).
    lr_halving: float = 40.0  # Iteration t has the rate lr / (1 + (t-1) / lr_halving); inf: lr.
    minibatches: int = 2  # Optimiser steps per iteration, each on a random share of the episodes.
    max_grad_norm: float = 1.0  # Largest gradient norm; larger gradients are scaled down to it.
    clip: float = 0.2  # Half width eps of the interval that clips the ratio (iStar paper: 0.2).
    invalid_penalty: float = 0.02  # Subtracted from A at a step whose answer is invalid.
    engine_cap: float = 2.0  # Cap on A's weight, pi_old by the trainer / pi_old by the engine.
    policy_lora_rank: int = 0  # Rank of the policy's LoRA adapter; 0: all parameters train.

    estimator: Literal["rloo", "grpo", "reinforce++"] = "rloo"  # Estimator of A^E.
    alpha: float = 0.1  # Weight alpha of the step advantage A^S (paper: 1).
    beta: float = 1.0  # Scale beta of the PRM's rewards and loss (paper: 0.05).
    pair_margin: float = 0.0  # The outcomes of a pair differ by more than this (paper: 0).
    prm_learning_rate: float = 3e-3  # Learning rate of the PRM (AdamW; paper: 1e-6 for 7B).
    prm_lora_rank: int = 16  # Rank of the PRM's adapter (paper: a full copy).
    prm_steps: int = 8  # PRM steps per iteration (paper: 1).
    prm_average: float = 0.8  # Decay per iteration of the average of the PRM's weights (paper: 0).
    prm_replay: int = 256  # Latest groups that the PRM learns from (paper: this iteration's).
    prm_ridge: float = 0.1  # Weight of the mean r_phi^2 in the PRM's loss (paper: 0).


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


# === block: prm ===
def preference_pairs(outcomes, group, margin: float = 0.0) -> list[tuple[int, int]]:
    """Every (winner, loser) of a group whose outcomes differ by more than margin; equal outcomes
    give none. outcomes [N], group [N]."""
    better = outcomes[:, None] - outcomes[None, :] > margin + 1e-5  # [N, N] 1e-5: rounding
    same_group = group[:, None] == group[None, :]
    return [tuple(pair) for pair in (better & same_group).nonzero().tolist()]


def step_rewards(prm_logprobs, old_logprobs, beta: float) -> torch.Tensor:
    """r_phi = beta * (log pi_phi(a_t|o_1:t) - log pi_old(a_t|o_1:t)), [S] from [S] and [S]."""
    return beta * (prm_logprobs - old_logprobs)


def policy_slope(rewards, log_old, step_group) -> torch.Tensor:
    """Slope of r_phi on log pi_old within groups, from [s] each. A PRM that only sharpens the
    policy ranks pairs well, as rare answers are often wrong, but only reinforces pi_old."""
    means = torch.bincount(step_group, log_old) / torch.bincount(step_group)  # of each group
    centred = log_old - means[step_group]
    return (centred @ rewards) / centred.square().sum().clamp(min=1e-9)


def margins(rewards, step_traj, pairs: list) -> torch.Tensor:
    """L(tau+) - L(tau-) of each pair, [P] from [S], over the first min(T+, T-) steps of both:
    failed episodes last until the step limit, so length alone would rank them."""
    of_each = rewards.split(torch.bincount(step_traj).tolist())  # N of [T]
    found = []
    for winner, loser in pairs:
        both = min(len(of_each[winner]), len(of_each[loser]))
        found.append(of_each[winner][:both].sum() - of_each[loser][:both].sum())
    return torch.stack(found)


def dpo_loss(margins: torch.Tensor) -> torch.Tensor:
    """Mean of -log sigmoid(L(tau+) - L(tau-)), from [P]."""
    return -logsigmoid(margins).mean()


def prm_update(prm: Network, policy: Network, episodes: list[Trajectory], args) -> dict:
    """One optimiser step: trajectory DPO on all pairs of these episodes, ridge on their steps."""
    batch = flatten(episodes)
    pairs = preference_pairs(batch.outcomes, batch.group, args.pair_margin)
    log_old = sum_per_step(batch_logprobs(policy, batch, args), batch)  # [S] current policy
    log_phi = sum_per_step(batch_logprobs(prm, batch, args, graph=True), batch)  # [S]
    rewards = step_rewards(log_phi, log_old, args.beta)  # [S]
    margin = margins(rewards, batch.step_traj, pairs)  # [P]
    loss = dpo_loss(margin) + args.prm_ridge * rewards.square().mean()
    loss.backward()
    grad_norm = optimizer_step(prm, args)
    return {"loss": loss.item(), "margin": margin.mean().item(), "grad_norm": grad_norm}


def draw(replay: list, args) -> list[list[Trajectory]]:
    """Episodes for each of --prm-steps steps: best and worst of each of two groups of a replay."""
    groups = random.sample(replay, min(2 * args.prm_steps, len(replay)))
    dealt = [groups[step :: args.prm_steps] for step in range(min(args.prm_steps, len(groups)))]
    return [[t for group in part for t in best_and_worst(group)] for part in dealt]


def best_and_worst(group: list[Trajectory]) -> list:
    """The best and the worst episode of a group; ties are broken at random."""
    by_outcome = sorted(random.sample(group, len(group)), key=lambda t: t.outcome)
    return [by_outcome[0], by_outcome[-1]]


def skill(accuracies: list[float], window: int = 5) -> float:
    """Weight of the credit: accuracy above chance on the last iterations' new pairs (none: 0)."""
    return max(0.0, sum(2 * accuracy - 1 for accuracy in accuracies[-window:]) / window)


def credit_statistics(episode_adv, step_adv, progress, weighted) -> dict:
    """Logged statistics, from [s] each: mean |weighted A^S| / mean |A^E|, and Pearson's correlation
    of A^S with the world's progress, which no algorithm uses (0 if either is constant)."""
    share = weighted.norm(1) / episode_adv.norm(1)
    centred = step_adv - step_adv.mean(), progress - progress.mean()
    correlation = torch.cosine_similarity(*centred, 0)
    return {"credit_share": share.item(), "advantage_progress_correlation": correlation.item()}
    # === end block ===


@ends_cleanly  # Ctrl-C, SIGTERM, a full disk, gradients that are not finite: exits with one line
def main():
    args = parse(Args, __doc__)  # tyro: a flag for each field above
    env = AlfWorld.from_args(args)
    run = Run(args, env)  # directory, rows, W&B, seeds, checkpoints: nothing that is learnt

    # ------------ Models ------------
    model, engine, chat = run.load_policy(lora(args.policy_lora_rank))
    policy = Network("policy", model)  # a transformers model; the engine: vLLM, or this model
    policy.optimizer = AdamW(policy.trained, args.learning_rate, weight_decay=0.0)

    prm = policy.with_adapter("prm", lora(args.prm_lora_rank))  # only it trains; r_phi starts at 0
    prm.optimizer = AdamW(prm.trained, args.prm_learning_rate, weight_decay=0.0)
    average = prm.copy("prm_average")  # average of the PRM's weights, less noisy; it scores steps
    follow = swa_utils.get_ema_multi_avg_fn(args.prm_average)
    replay = []  # the latest groups that have a pair
    accuracies = []  # of the PRM on new pairs, one per iteration that has pairs

    sampling = SamplingParams(
        temperature=args.temperature,
        max_tokens=args.max_action_tokens,
        stop_token_ids=chat.stop_ids,
        logprobs=0,  # of the sampled token alone
    )
    evaluation = sampling.clone()
    evaluation.temperature = args.run_args.eval_temperature

    run.resume(policy, prm, average, replay=replay, accuracies=accuracies)
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

        # ------------ 3. PRM: a reward for each step; trajectory DPO within groups ------------
        log_old = sum_per_step(old_logprobs, batch)  # [S]
        log_phi = sum_per_step(batch_logprobs(average, batch, args), batch)  # [S] before its update
        rewards = step_rewards(log_phi, log_old, args.beta)  # [S]
        pairs = preference_pairs(batch.outcomes, batch.group, args.pair_margin)
        step_group = batch.group[batch.step_traj]  # [S]
        paired = torch.isin(step_group, batch.group[[winner for winner, _ in pairs]])  # [S]
        credited = paired & ~batch.invalid  # no pair: no signal; invalid: r_phi is biased
        slope = policy_slope(rewards[credited], log_old[credited], step_group[credited])
        rewards = rewards - slope * log_old  # [S] the part that log pi_old does not explain
        run.log("prm", {"pairs": len(pairs), "pair_accuracy": None})
        if pairs:
            right = (margins(rewards, batch.step_traj, pairs).sign() + 1) / 2  # [P] a tie: 0.5
            accuracies.append(right.mean().item())
            run.log("prm", {"pair_accuracy": accuracies[-1]})

        for task in sorted({episodes[winner].task for winner, _ in pairs}):
            replay.append([t for t in episodes if t.task == task])
        del replay[: max(0, len(replay) - args.prm_replay)]
        learnt = [prm_update(prm, policy, part, args) for part in draw(replay, args)]
        follow(average.trained, prm.trained, None)
        run.log("prm", mean_of(learnt))
        run.lap("prm")

        # ------------ 4. Advantages: A = A^E + alpha * skill * A^S - penalty ------------
        episode_adv = episode_advantages(batch, args.estimator)  # [S]
        step_adv = torch.zeros_like(rewards)  # [S]
        step_adv[credited] = step_advantages(rewards[credited], step_group[credited])

        weighted = args.alpha * skill(accuracies) * step_adv  # [S]
        advantages = episode_adv + weighted - args.invalid_penalty * batch.invalid  # [S]
        seen = episode_adv[credited], step_adv[credited], batch.progress[credited]
        run.log("prm", {"skill": skill(accuracies)} | credit_statistics(*seen, weighted[credited]))

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
            run.log_episodes("eval", run.rollout(play, run.eval_env, run.eval_tasks, evaluation))
        columns = dict(implicit_reward=rewards, step_advantage=step_adv, advantage=advantages)
        run.save(episodes, **columns, episode_advantage=episode_adv)


if __name__ == "__main__":
    main()
