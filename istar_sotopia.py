"""iStar on SOTOPIA: step-level credit from an implicit process reward model (PRM).

Liu et al., arXiv 2509.19199. An episode has one outcome r_o; iStar makes a reward for each of its
steps, and nobody labels a step. o_1:t: what the agent has seen; a_t: its action, all tokens of one
answer; pi_old: the policy that played this iteration's episodes; pi_theta: the policy in training.

    PRM, by DPO    min_phi -E log sigmoid( beta * [L(tau+) - L(tau-)] ),  r_o(tau+) > r_o(tau-),
                   L(tau) = sum_t log pi_phi(a_t|o_1:t) - log pi_old(a_t|o_1:t)
    step reward    r_phi(o_1:t, a_t) = beta * (log pi_phi(a_t|o_1:t) - log pi_old(a_t|o_1:t))
    advantage      A(a_t) = A^E(tau) + alpha * A^S(a_t)
                   A^E: RLOO, GRPO or REINFORCE++ on outcomes; A^S: r_phi standardised in its group
    policy         max_theta E min(rho A, clip(rho, 1-eps, 1+eps) A),
                   rho = pi_theta(a_t|o_1:t) / pi_old(a_t|o_1:t)

Left out, as in the paper's objective: KL to a reference, entropy bonus, dual clip. Ours: alpha is
multiplied by the PRM's skill, and pairs compare their first min(T+, T-) steps; these and others are
flags, whose help says what the paper does, with reasons in docs/algorithms.md.

    python istar_sotopia.py                         # own scenarios, judged by rule: 6 minutes
    python istar_sotopia.py --sotopia-data DIR --partner self --judge-url https://HOST/v1 \\
        --judge-model NAME --model Qwen/Qwen2.5-7B-Instruct --dtype bfloat16  # see docs/worlds.md
"""

import random
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from envs.sotopia import Sotopia, SotopiaArgs
from runtime.data import average, batch_logprobs, flat_tensors, micro_batches, pair_bundles
from runtime.distributed.processes import broadcast, gather, my_tasks, sum_gradients, to_float
from runtime.flags import Flat, RunArgs, parse
from runtime.networks import Network, action_logprobs, engine_weights, following, trainable
from runtime.ranges import Count, Natural, NonNegative, Positive, Rate, Seed, Several, Unit, UpToInf
from runtime.replay import Replay
from runtime.rounds import Player, known, losing, rounds
from runtime.run import Run, ends_cleanly
from runtime.statistics import in_mixed_group, mean_gap, pair_statistics, prm_statistics, skill

import torch
from torch.nn.functional import logsigmoid
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW
from tqdm import tqdm


@dataclass
class Args:
    world: Flat[SotopiaArgs] = field(default_factory=SotopiaArgs)
    run_args: Flat[RunArgs] = field(default_factory=RunArgs)

    model: str = "models/tiny-sotopia"  # Initial policy: a directory, or a name on the hub.
    max_steps: Count = 6  # Most answers of a side [steps], half of the turns (paper: 10).
    max_action_tokens: Count = 48  # Longest answer [tokens]; one that reasons in words needs 512.
    max_context_tokens: Count = 2048  # Longest sequence [tokens]; what outgrows it is truncated.
    history: Natural = 0  # Past turns that a step sees; 0: all, the paper's o_1:t (its runs: 2).
    seed: Seed = 1  # Seed of tasks, sampling and initialisation.
    iterations: Count = 80  # Each iteration is a rollout and an update.
    tasks_per_iteration: Count = 16  # Tasks per iteration, one group each (paper: 16, Sokoban 32).
    group_size: Several = 8  # Trajectories per task, which are compared (paper: G = 8).
    temperature: Positive = 1.0  # Sampling temperature in training; every log-probability uses it.
    learning_rate: Rate = 1e-3  # Learning rate of the policy (AdamW; paper: 5e-7 for 7B).
    lr_halving: UpToInf = 40.0  # After t iterations the rate is lr / (1 + t / this); inf: constant.
    minibatches: Count = 2  # Optimiser steps per iteration, each on a random share of trajectories.
    max_grad_norm: UpToInf = 1.0  # Largest gradient norm; a longer gradient is scaled down to it.
    clip: Positive = 0.2  # Half width eps of the interval that clips the ratio (paper: 0.2).
    ratio: Literal["step", "step-mean", "token"] = "step"
    """What a ratio compares: all tokens of a step (iStar), their mean (GSPO), or each (PPO)."""
    invalid_penalty: NonNegative = 0.1  # Taken off the outcome for an invalid answer's step.
    engine_correction: NonNegative = 0.0
    """Cap on the weight pi_old(trainer) / pi_old(engine) of an advantage; 0: no weights."""
    policy_lora_rank: Natural = 0  # Rank of the policy's LoRA adapter; 0: all parameters train.

    estimator: Literal["rloo", "grpo", "reinforce++"] = "grpo"  # Estimator of A^E.
    alpha: NonNegative = 1.0  # Weight alpha of the step advantage A^S (paper: 1).
    beta: NonNegative = 1.0  # Scale beta of the PRM's rewards and loss (paper: 0.05); 0: no PRM.
    prm_learning_rate: Rate = 1e-3  # Learning rate of the PRM (AdamW; paper: 1e-6 for 7B).
    prm_lora_rank: Natural = 0  # Rank of the PRM, a LoRA adapter; 0: a full copy (paper).
    prm_follows: bool = True  # The policy's update is applied to the PRM as well (paper: no).
    prm_steps: Natural = 8  # PRM steps per iteration, which divide its episodes (paper: 1).
    prm_replay: Natural = 256  # Number of last groups it draws pairs from; 0: new ones (paper).
    prm_reduce: Literal["sum", "mean"] = "sum"  # L(tau) sums steps, or is a mean (paper's code).
    prm_ridge: NonNegative = 0.1  # Weight of the mean r_phi^2 in the PRM's loss (paper: 0).
    prm_skill: bool = True  # The PRM's accuracy on new pairs scales alpha (paper: no).
    mixed_groups_only: bool = True  # A^S is for groups that have a pair (paper: for all).
    credit_invalid: bool = False  # Invalid answers get A^S too (paper: yes).
    pair_margin: NonNegative = 0.3  # The outcomes of a pair differ by more than this, 3 points.
    pair_threshold: Unit = 0.0  # Only outcomes above it win, only others lose (paper: 0.6); 0: any.
    equal_length_pairs: bool = True  # Pairs compare their first min(T+, T-) steps (paper: all).


# === block: data ===
@dataclass
class Step:
    observation: str  # the environment's words before the action
    action: str  # the whole response
    valid: bool
    game_reward: float = 0.0  # what the game itself pays for this step: for the log alone
    progress: float = 0.0  # by how much the goal came nearer, if the world knows: for the log alone
    anchor: Hashable = None  # the state after the action, so the next step's: for GiGPO
    engine_logprobs: list[float] = field(default_factory=list)  # one per sampled token


@dataclass
class Trajectory:
    """An episode as tokens: the ids that the engine saw and sampled, never tokenised again."""

    task: int  # trajectories of one task form a group
    token_ids: list[int] = field(default_factory=list)  # [T] prompt, action, observation, ...
    step_ids: list[int] = field(default_factory=list)  # [T] the step of an action's token; else -1
    outcome: float = 0.0  # r_o
    steps: list[Step] = field(default_factory=list)
    starts: list[int] = field(default_factory=lambda: [0])  # of its sequences, see --history
    success: bool = False
    score: float = 0.0
    truncated: bool = False  # ended by --max-context-tokens
    pictures: list = field(default_factory=list)  # (place of its first token, PNG), if any


class Batch(NamedTuple):
    """Trajectories as flat tensors: N trajectories, S steps, K action tokens."""

    sequences: list  # what the forward passes read: runtime.data.Sequence
    outcomes: torch.Tensor  # [N]
    group: torch.Tensor  # [N] the group of a trajectory
    step_traj: torch.Tensor  # [S] the trajectory of a step
    token_step: torch.Tensor  # [K] the step of an action token
    invalid: torch.Tensor  # [S] the answer had no valid action
    engine_logprobs: torch.Tensor  # [K]
    progress: torch.Tensor  # [S] a ground truth that no algorithm sees


def flatten(trajectories: list[Trajectory]) -> Batch:
    """Number groups, trajectories, steps and action tokens through the batch, in their order."""
    return Batch(**flat_tensors(trajectories))


def sum_per_step(values: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Sums [S] over the action tokens of each step, of values [K]."""
    sums = values.new_zeros(len(batch.step_traj))
    return sums.index_add(0, batch.token_step, values)
    # === end block ===


# === block: conversation rollout ===
def rollout(env, engine, chat, tasks, args, temperature: float, label: str) -> list[Trajectory]:
    """A trajectory for each side that the policy speaks in the conversations of tasks, played side
    by side: a round is one answer of all whose turn it is. Without an outcome it is dropped."""
    players = []
    for task in my_tasks(tasks):  # the whole groups that this process plays
        with losing(env, task):  # where the world raises, this conversation is lost, not the run
            sides = env.reset(task).conversation.episodes  # in self-chat both
            players += [Player(episode, Trajectory(episode.task), chat) for episode in sides]

    for playing, contexts in rounds(players, args, label):  # until nobody plays; o_1:t as tokens
        answers = engine.generate(contexts, temperature)
        for p, context, (action, logprobs) in zip(playing, contexts, answers):
            p.append_tokens(context, action, args.history)
            p.said = chat.response(action), action, logprobs

        words = {p.episode: p.said[0] for p in playing}
        words |= {p.episode: None for p in players if p.breaks_off()}  # no room for an answer
        heard = env.step(words)  # partners answer together
        for p in players:
            if p.episode in heard:  # its step is complete
                observation, _, _, info = heard[p.episode]
                text, action, logprobs = p.said
                p.trajectory.steps.append(Step(p.observation, text, **known(info, logprobs)))
                p.hear(action, observation)
            p.done = p.done or p.episode.done

    kept = env.finish([p.episode for p in players])  # all verdicts are in
    for p in players:
        p.take_outcome()
    return gather([p.trajectory for p, has_outcome in zip(players, kept) if has_outcome])
    # === end block ===


# === block: policy ===
def per_ratio(values: torch.Tensor, step: torch.Tensor, ratio: str) -> torch.Tensor:
    """What the ratios compare, of the values [k] of a micro-batch's tokens: the tokens themselves,
    or for each of its s steps their sum [s] or mean [s]. step [k] is the step of a token."""
    if ratio == "token":
        return values
    _, place, counts = step.to(values.device).unique(return_inverse=True, return_counts=True)
    sums = values.new_zeros(len(counts)).index_add(0, place, values)
    return sums if ratio == "step" else sums / counts


def policy_loss(logprobs, old_logprobs, advantages, clip: float) -> tuple[torch.Tensor, dict]:
    """-mean min(rho A, clip(rho, 1-eps, 1+eps) A), rho = exp(logprobs - old_logprobs), eps = clip,
    and its statistics, from [S] each; or from [K] each where every token has a ratio."""
    logratio = logprobs - old_logprobs
    ratio = logratio.exp()
    clipped = ratio.clamp(1 - clip, 1 + clip)
    loss = -torch.min(ratio * advantages, clipped * advantages).mean()

    stats = {"loss": loss, "ratio": ratio.mean(), "approx_kl": (ratio - 1 - logratio).mean()}
    stats["clip_fraction"] = (ratio != clipped).float().mean()
    return loss, {name: value.item() for name, value in stats.items()}


def policy_update(policy: Network, batch: Batch, old_logprobs, advantages, args) -> dict:
    """--minibatches optimiser steps, each on a random share of the trajectories. advantages [S].

    A gradient is summed over micro-batches, each weighted by its number of ratios, so it is that of
    one large batch. old_logprobs [K]; baselines give None before a single step: it is on-policy."""
    seen = []  # (number of ratios, statistics) of each micro-batch
    minibatches = broadcast(torch.randperm(len(batch.outcomes))).chunk(args.minibatches)

    for minibatch in tqdm(minibatches, "update", leave=False, disable=None):
        ours = torch.isin(batch.step_traj, minibatch)  # [S]
        teaches = ours & (advantages != 0)  # [S] a sequence with none of them has no gradient
        num_ratios = int(ours.sum())
        if args.ratio == "token":
            num_ratios = int(ours[batch.token_step].sum())

        losses = []
        policy.optimizer.zero_grad()
        for micro in micro_batches(policy, batch, args, only=teaches):
            logprobs = action_logprobs(policy, micro, args)  # [k]
            before = logprobs.detach()
            if old_logprobs is not None:
                before = old_logprobs[micro.tokens].to(before.device)

            token_step = batch.token_step[micro.tokens]  # [k]
            ratio_step = token_step if args.ratio == "token" else token_step.unique()  # in order
            new = per_ratio(logprobs, token_step, args.ratio)
            old = per_ratio(before, token_step, args.ratio)
            loss, stats = policy_loss(new, old, advantages[ratio_step].to(new.device), args.clip)
            if old_logprobs is None:
                stats["engine_gap"] = mean_gap(logprobs, batch.engine_logprobs[micro.tokens])

            (loss * len(new) / num_ratios).backward()
            losses.append(loss.item() * len(new) / num_ratios)
            seen.append((len(new), stats))
            policy.note(micro.tokens, logprobs.detach() - before)  # for the log alone

        sum_gradients(policy)
        grad_norm = to_float(clip_grad_norm_(policy.trained, args.max_grad_norm))
        if policy.may_step(sum(losses), grad_norm):  # not if loss or gradient is not finite
            policy.optimizer.step()

    policy.optimizer.zero_grad()  # frees the gradients' memory
    names = ["loss", "ratio", "approx_kl", "clip_fraction"]
    if old_logprobs is None:
        names.append("engine_gap")
    return average(seen, names) | policy.optimizer_stats()
    # === end block ===


# === block: prm ===
def preference_pairs(outcomes, group, margin: float = 0.0, threshold: float = 0.0) -> list[tuple]:
    """Every (winner, loser) of a group whose outcomes differ by more than margin; ties give none.
    With a threshold the winner's is above it and the loser's is not. outcomes [N], group [N]."""
    better = outcomes[:, None] - outcomes[None, :] > margin + 1e-5  # [N, N] float32: 0.3 - 0.2
    if threshold:
        better &= (outcomes > threshold + 1e-5)[:, None] & (outcomes <= threshold + 1e-5)[None, :]
    same_group = group[:, None] == group[None, :]
    return [tuple(pair) for pair in (better & same_group).nonzero().tolist()]


def pair_log_ratios(step_log_ratios, step_traj, pairs, equal_length: bool, reduce: str):
    """L(tau) of the winner and the loser of each pair, one after the other [2P], and the pairs as
    dpo_loss indexes them: (0, 1), (2, 3), ... L is the sum, or mean, of step_log_ratios [S] over a
    trajectory; with equal_length over the first min(T+, T-) steps, so it depends on the pair."""
    lengths = torch.bincount(step_traj)  # [N]
    first = lengths.cumsum(0) - lengths  # [N] a trajectory's first step
    sides = torch.tensor(pairs, dtype=torch.long).reshape(-1, 2)  # [P, 2]
    counted = lengths[sides]  # [P, 2]
    if equal_length:
        counted = counted.amin(1, keepdim=True).expand(-1, 2)

    running = step_log_ratios.double().cumsum(0)  # [S], float64: differences of long sums follow
    running = torch.cat([running.new_zeros(1), running])  # [S+1]
    log_ratios = running[first[sides] + counted] - running[first[sides]]  # [P, 2]
    if reduce == "mean":
        log_ratios = log_ratios / counted
    return log_ratios.flatten(), [(2 * p, 2 * p + 1) for p in range(len(pairs))]


def dpo_loss(log_ratios: torch.Tensor, pairs: list[tuple[int, int]], beta: float) -> torch.Tensor:
    """Mean over pairs of -logsigmoid(beta (L[winner] - L[loser])), L = log_ratios [N]; none: 0."""
    if not pairs:
        return log_ratios.sum() * 0
    winners, losers = torch.tensor(pairs, device=log_ratios.device).T
    margins = beta * (log_ratios[winners] - log_ratios[losers])
    return -logsigmoid(margins).mean()


def prm_update(prm: Network, batch: Batch, old_logprobs, pairs, args) -> dict:
    """One optimiser step of trajectory DPO over all pairs; its statistics, from before the step.
    Groups go one bundle after another, whose gradients add up to that of one large batch.
    old_logprobs [K]."""
    losses, margins = [], []
    prm.optimizer.zero_grad()
    for bundle_pairs, passes in pair_bundles(batch, pairs, args):
        # log pi_phi - log pi_old of each step; 0 for trajectories that are not in this bundle
        token_ratios = torch.zeros(len(old_logprobs))  # [K]
        for micro in passes:
            new = action_logprobs(prm, micro, args).cpu()  # [k], with a graph
            token_ratios = token_ratios.index_add(0, micro.tokens, new - old_logprobs[micro.tokens])
        log_ratios = sum_per_step(token_ratios, batch)  # [S]

        # -log sigmoid(beta * [L(tau+) - L(tau-)]), and a penalty on large rewards
        sides, side_pairs = pair_log_ratios(
            log_ratios, batch.step_traj, bundle_pairs, args.equal_length_pairs, args.prm_reduce
        )
        dpo = dpo_loss(sides, side_pairs, args.beta) * len(bundle_pairs) / len(pairs)
        ridge = args.prm_ridge * (args.beta * log_ratios).square().mean()
        (dpo + ridge).backward()

        losses.append(dpo.item())
        margins.append(args.beta * (sides[0::2] - sides[1::2]).detach())  # [P]

    sum_gradients(prm)
    grad_norm = to_float(clip_grad_norm_(prm.trained, args.max_grad_norm))
    if prm.may_step(sum(losses), grad_norm):  # not if loss or gradient is not finite
        prm.optimizer.step()

    margin = torch.cat(gather(margins)).mean().item()  # of the pairs of all processes
    return {"loss": sum(gather(losses)), "margin": margin}


def score_steps(prm: Network, batch: Batch, old_logprobs, args) -> torch.Tensor:
    """r_phi of every step by the PRM as it is now, [S]; 0 where there is none (--beta 0)."""
    if not args.beta:
        return torch.zeros(len(batch.step_traj))
    prm_logprobs = batch_logprobs(prm, batch, args, label="PRM")  # [K]
    log_phi = sum_per_step(prm_logprobs, batch)  # [S]
    log_old = sum_per_step(old_logprobs, batch)  # [S]
    return step_rewards(log_phi, log_old, args.beta)


def step_rewards(prm_logprobs, old_logprobs, beta: float) -> torch.Tensor:
    """beta * (log pi_phi(a_t|o_1:t) - log pi_old(a_t|o_1:t)), [S] from [S] and [S]."""
    return beta * (prm_logprobs - old_logprobs)


def step_advantages(rewards, step_group, std_floor: float = 1e-6) -> torch.Tensor:
    """A^S = (r - mean) / max(std, std_floor) over the steps of each group, [S] from [S] and [S]."""
    return grpo_advantages(rewards, step_group, std_floor)
    # === end block ===


# === block: estimators ===
def rloo_advantages(outcomes: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
    """r - mean of the group's others, [N] from [N] and [N] (Ahmadian et al., arXiv 2402.14740).
    Alone in a group: 0."""
    same = (group[:, None] == group[None, :]).to(outcomes.dtype)  # [N, N]
    others = same.sum(1) - 1
    mean_of_others = (same @ outcomes - outcomes) / others.clamp(min=1)
    return torch.where(others > 0, outcomes - mean_of_others, 0.0)


def grpo_advantages(outcomes, group, std_floor: float = 0.0) -> torch.Tensor:
    """(r - mean) / std within the group, [N] from [N] and [N]; unbiased std (Shao et al., arXiv
    2402.03300). All equal or alone: 0."""
    advantages = torch.zeros_like(outcomes)
    for g in group.unique():
        r = outcomes[group == g]
        if r.max() > r.min():
            advantages[group == g] = (r - r.mean()) / r.std().clamp(min=std_floor)
    return advantages


def reinforce_pp_advantages(outcomes, group, step_traj) -> torch.Tensor:
    """r - group mean, over the unbiased std of all steps of the batch, [N]; step_traj [S]
    (REINFORCE++ with baseline, Hu et al., arXiv 2501.03262). All equal within every group: 0."""
    same = (group[:, None] == group[None, :]).to(outcomes.dtype)  # [N, N]
    centred = outcomes - same @ outcomes / same.sum(1)
    if len(step_traj) < 2 or centred[step_traj].std() <= 1e-6:
        return torch.zeros_like(centred)
    return centred / centred[step_traj].std()


def outcome_slope(outcomes, advantages, group) -> torch.Tensor:
    """By how much a trajectory's advantage rises with its outcome, [N]; 0 in a group of equal ones.
    A penalty on an invalid answer's outcome, times this, is one on its advantage."""
    slope = torch.zeros_like(outcomes)
    for g in group.unique():
        r, a = outcomes[group == g], advantages[group == g]
        if r.max() > r.min():
            slope[group == g] = (a.max() - a.min()) / (r.max() - r.min())
    return slope


def episode_advantages(estimator: str, batch: Batch, invalid, penalty: float) -> torch.Tensor:
    """A^E of every step, [S]: that of its trajectory. A step with an invalid answer (invalid [S])
    sees an outcome lower by `penalty`; the group's statistics are of the outcomes as they are."""
    outcomes, group, step_traj = batch.outcomes, batch.group, batch.step_traj
    if estimator == "rloo":
        advantages = rloo_advantages(outcomes, group)[step_traj]  # [S]
        return advantages - penalty * invalid

    if estimator == "grpo":
        advantages = grpo_advantages(outcomes, group)  # [N]
        slope = outcome_slope(outcomes, advantages, group)  # [N] 0 in a group of one outcome
        return advantages[step_traj] - penalty * slope[step_traj] * invalid

    advantages = reinforce_pp_advantages(outcomes, group, step_traj)  # [N]
    slope = outcome_slope(outcomes, advantages, group).max()  # one for the batch
    of_steps = advantages[step_traj]
    return of_steps - of_steps.mean() - penalty * slope * invalid
    # === end block ===


@ends_cleanly  # Ctrl-C, SIGTERM, a full disk or weights that are not finite end in one line
def main():
    args = parse(Args, __doc__)
    env = Sotopia.from_args(args)
    run = Run(args, env)  # directory, rows, clock, seeds, checkpoints: nothing that is learnt

    # ------------ Models ------------
    model, engine, chat = run.load_policy()
    optimizer = AdamW(trainable(model), args.learning_rate, weight_decay=0.0)
    policy = Network("policy", model, optimizer, args.run_args.dtype)

    base = "policy" if args.prm_follows else "initial"
    phi = run.load_adapter("prm", args.prm_lora_rank, base)  # it starts as the policy: r_phi = 0
    optimizer = AdamW(trainable(phi), args.prm_learning_rate, weight_decay=0.0)
    prm = Network("prm", phi, optimizer, args.run_args.dtype, on=base)
    replay = Replay(args.prm_replay)

    run.resume(policy, prm, replay=replay)
    engine.load(policy.model)

    def evaluate():
        temperature = args.run_args.eval_temperature
        return rollout(run.eval_env, engine, chat, run.eval_tasks, args, temperature, "evaluation")

    if run.is_new:
        run.log_episodes("eval", evaluate())
        run.save()

    for iteration in run.iterations():  # what an iteration draws depends on (seed, iteration) alone
        # ------------ 1. Rollout: a group of episodes for each task, played by pi_old ------------
        tasks = random.sample(env.train_tasks, args.tasks_per_iteration)
        tasks = sorted(tasks * args.group_size)
        trajectories = rollout(env, engine, chat, tasks, args, args.temperature, "rollout")
        batch = flatten(trajectories)  # N trajectories, S steps, K action tokens
        engine.sleep()
        run.lap("rollout")

        # ------------ 2. log pi_old of every action token, by the trainer's forward ------------
        old_logprobs = batch_logprobs(policy, batch, args)  # [K]
        run.log("policy", {"engine_gap": mean_gap(old_logprobs, batch.engine_logprobs)})
        run.lap("logprobs")

        # ------------ 3. PRM: a reward for each step; trajectory DPO within groups ------------
        pairing = args.pair_margin, args.pair_threshold
        pairs = preference_pairs(batch.outcomes, batch.group, *pairing)
        rewards = score_steps(prm, batch, old_logprobs, args)  # [S] before it learns from them
        run.log("prm", pair_statistics(rewards, batch, pairs))  # pair_accuracy: of pairs new to it

        replay.add(trajectories, pairs)  # the groups that have a pair
        for groups in replay.draw(len(batch.group.unique()), args.prm_steps if args.beta else 0):
            past = flatten(groups)  # the best and the worst of each group, all of one iteration
            past_logprobs = batch_logprobs(policy, past, args, label="PRM")  # [K] by pi_old now
            past_pairs = preference_pairs(past.outcomes, past.group, *pairing)
            run.log("prm", prm_update(prm, past, past_logprobs, past_pairs, args))
        run.log("prm", prm.optimizer_stats())
        run.lap("prm")

        # ------------ 4. Advantages: A = A^E + alpha * A^S ------------
        step_group = batch.group[batch.step_traj]  # [S]
        episode_adv = episode_advantages(args.estimator, batch, batch.invalid, args.invalid_penalty)
        trust = skill(run.recent("prm/pair_accuracy"), run.recent("prm/pairs"))  # 0 to 1
        run.log("prm", {"skill": trust})
        alpha = args.alpha * (trust if args.prm_skill else 1.0)
        credited = in_mixed_group(batch, pairs) | (not args.mixed_groups_only)  # [S]
        credited &= ~batch.invalid | args.credit_invalid  # r_phi favours whatever is rare
        step_adv = torch.zeros_like(rewards)  # [S]
        step_adv[credited] = step_advantages(rewards[credited], step_group[credited])
        advantages = episode_adv + alpha * step_adv  # [S]

        # ------------ 5. Policy: clipped surrogate; then the engine gets the new weights --------
        decay = 1 + (iteration - 1) / args.lr_halving
        policy.optimizer.param_groups[0]["lr"] = args.learning_rate / decay
        if args.engine_correction:
            advantages = advantages * engine_weights(batch, old_logprobs, args)
        with following(prm, policy):  # --prm-follows: the update moves the PRM as well
            run.log("policy", policy_update(policy, batch, old_logprobs, advantages, args))
        run.lap("update")

        engine.load(policy.model)
        run.lap("sync")

        # ------------ Log, evaluate, save ------------
        terms = rewards, episode_adv, step_adv, old_logprobs, run.initial_logprobs(policy, batch)
        run.log("prm", prm_statistics(batch, pairs, credited, *terms, args, alpha))
        run.log_episodes("train", trajectories)
        if run.evaluates(iteration):
            run.log_episodes("eval", evaluate())
        columns = dict(implicit_reward=rewards, step_advantage=step_adv, advantage=advantages)
        run.save(trajectories, **columns, episode_advantage=episode_adv)


if __name__ == "__main__":
    main()
