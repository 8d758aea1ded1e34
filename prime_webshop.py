"""PRIME on WebShop: token rewards from an implicit process reward model (PRM) of outcomes.

Cui et al., arXiv 2502.01456; a baseline of iStar (arXiv 2509.19199). Where iStar's PRM learns which
of two trajectories was better, PRIME's learns whether a trajectory succeeds. r_o: the outcome, 0 or
1; y_k: the k-th action token of a trajectory, of all its answers together; pi_old: the policy that
played this iteration's episodes; pi_theta: the policy in training; pi_phi: the PRM; pi_ref: the
initial model, where pi_phi starts.

    token reward   r(y_k) = beta * (log pi_phi(y_k|.) - log pi_ref(y_k|.)),  L(tau) = sum_k r(y_k)
    PRM            min_phi -E r_o log sigmoid(L(tau)) + (1 - r_o) log(1 - sigmoid(L(tau)))
    advantage      A(y_k) = sum over l >= k of (r(y_l) - B(tau)) + r_o(tau) - mean of others' r_o,
                   B(tau) = mean over the group's others of their mean token reward
    policy         max_theta E min(rho A, clip(rho, 1-eps, 1+eps) A),
                   rho = pi_theta / pi_old of each token

--variant istar-code is the simpler one that iStar's authors compare with, as a public copy of their
release shows it (which of its options made their table, it does not say): a step is a sample of its
own, labelled with its episode's outcome, so the cross-entropy is per step; pi_ref is pi_old; a
step's summed reward is added to the outcome, and one leave-one-out over the group (every trajectory
represented by its first step) makes it the advantage of the step.

Left out, as in istar_webshop.py: KL to a reference, entropy bonus, dual clip; and of PRIME's
release the filter for prompts of middling accuracy, coefficients of the two parts, and whitening.

    python prime_webshop.py                         # the tiny model: 30 minutes on one CPU core
    python prime_webshop.py --model Qwen/Qwen2.5-1.5B-Instruct --dtype bfloat16 \\
        --learning-rate 1e-6 --lr-halving inf --prm-learning-rate 1e-6
"""

import random
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from envs.webshop import WebShop, WebShopArgs
from runtime.data import average, batch_logprobs, flat_tensors, micro_batches
from runtime.distributed.processes import broadcast, gather, my_tasks, sum_gradients, to_float
from runtime.flags import Flat, RunArgs, parse, refuse
from runtime.networks import Network, action_logprobs, engine_weights, trainable
from runtime.ranges import Count, Natural, NonNegative, Positive, Rate, Seed, Several, UpToInf
from runtime.rounds import Player, faulty_step, known, leaving_out, rounds
from runtime.run import Run, ends_cleanly
from runtime.statistics import mean_gap

import torch
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW
from tqdm import tqdm


@dataclass
class Args:
    world: Flat[WebShopArgs] = field(default_factory=WebShopArgs)
    run_args: Flat[RunArgs] = field(default_factory=RunArgs)

    model: str = "models/tiny-webshop"  # Initial policy: a directory, or a name on the hub.
    max_steps: Count = 10  # Longest episode [steps]; an invalid answer costs one too.
    max_action_tokens: Count = 32  # Longest answer [tokens]; one that reasons in words needs 512.
    max_context_tokens: Count = 3072  # Longest sequence [tokens]; what outgrows it is truncated.
    history: Natural = 0  # Past turns that a step sees; 0: all, the paper's o_1:t (its runs: 2).
    seed: Seed = 1  # Seed of tasks, sampling and initialisation.
    iterations: Count = 80  # Each iteration is a rollout and an update.
    tasks_per_iteration: Count = 16  # Tasks per iteration, one group each (paper: 16, Sokoban 32).
    group_size: Several = 8  # Trajectories per task, which are compared (paper: G = 8).
    temperature: Positive = 1.0  # Sampling temperature in training; every log-probability uses it.
    learning_rate: Rate = 5e-4  # Learning rate of the policy (AdamW; paper: 5e-7 for 7B).
    lr_halving: UpToInf = 40.0  # After t iterations the rate is lr / (1 + t / this); inf: constant.
    minibatches: Count = 2  # Optimiser steps per iteration, each on a random share of trajectories.
    max_grad_norm: UpToInf = 1.0  # Largest gradient norm; a longer gradient is scaled down to it.
    clip: Positive = 0.2  # Half width eps of the interval that clips the ratio (paper: 0.2).
    ratio: Literal["step", "step-mean", "token"] = "token"
    """What a ratio compares: all tokens of a step (iStar), their mean (GSPO), or each (PPO)."""
    invalid_penalty: NonNegative = 0.1  # Taken off the outcome for an invalid answer's step.
    engine_correction: NonNegative = 0.0
    """Cap on the weight pi_old(trainer) / pi_old(engine) of an advantage; 0: no weights."""
    policy_lora_rank: Natural = 0  # Rank of the policy's LoRA adapter; 0: all parameters train.

    variant: Literal["prime", "istar-code"] = "prime"
    """The algorithm is as published, or what iStar's authors compare with (see the top)."""
    beta: NonNegative = 0.05  # Scale beta of the PRM's rewards and loss (paper: 0.05); 0: no PRM.
    prm_learning_rate: Rate = 1e-3  # Learning rate of the PRM (AdamW; paper: 1e-6 for 7B).
    prm_weight_decay: NonNegative = 0.01  # Weight decay of the PRM: it pulls to the initial model.
    prm_lora_rank: Count = 16  # Rank of the PRM, a LoRA adapter on the initial model.
    prm_score: Literal["before", "after"] = "before"
    """Tokens are scored before the PRM's update, or after it; the paper tries both."""


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


# === block: rollout ===
def rollout(env, engine, chat, tasks, args, temperature: float, label: str) -> list[Trajectory]:
    """A trajectory for each entry of tasks, side by side: in a round all who still play answer."""
    players = []
    for task in my_tasks(tasks):  # the whole groups that this process plays
        with leaving_out(task):  # where the world raises, this episode is left out
            players.append(Player(env.reset(task), Trajectory(task), chat))

    for playing, contexts in rounds(players, args, label):  # until nobody plays; o_1:t as tokens
        answers = engine.generate(contexts, temperature)
        for p, context, (action, logprobs) in zip(playing, contexts, answers):
            text = chat.response(action)
            try:
                observation, reward, p.done, info = p.episode.step(text)
            except Exception as error:  # the world failed: the episode ends on an invalid step
                observation, reward, p.done, info = faulty_step(p, error)

            p.append_tokens(context, action, args.history)
            p.trajectory.steps.append(Step(p.observation, text, **known(info, logprobs)))
            p.trajectory.outcome += reward
            p.trajectory.success, p.trajectory.score = info["success"], info["score"]
            p.hear(action, observation)

    return gather([p.trajectory for p in players])
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


def rloo_advantages(outcomes: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
    """r - mean of the group's others, [N] from [N] and [N] (Ahmadian et al., arXiv 2402.14740).
    Alone in a group: 0."""
    same = (group[:, None] == group[None, :]).to(outcomes.dtype)  # [N, N]
    others = same.sum(1) - 1
    mean_of_others = (same @ outcomes - outcomes) / others.clamp(min=1)
    return torch.where(others > 0, outcomes - mean_of_others, 0.0)


def by_token(batch: Batch) -> Batch:
    """The same batch with every action token as a step of its own, for advantages [K]."""
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
    """Leave-one-out of the outcomes [N] plus, from each token on, the sum of token rewards [K] less
    the mean token reward of the group's others: [K]. token_traj [K] ascends. Alone in a group: the
    baseline is its own mean, the outcome's part is 0."""
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


def cross_entropy_update(prm: Network, batch: Batch, log_ratios, owner, labels, args) -> dict:
    """One optimiser step of the mean cross-entropy of labels (0 or 1) under sigmoid(L), L of owners
    as outcome_logits has it; its statistics, from before the step.

    log_ratios [K] are log pi_phi - log pi_ref, without a graph. The loss depends on the PRM through
    them alone: differentiate it by them, and back-propagate weight * log-probability, micro-batch
    by micro-batch. So a trajectory may be spread over sequences (--history)."""
    log_ratios = log_ratios.clone().requires_grad_()
    logits = outcome_logits(args.beta * log_ratios, owner, len(labels))
    loss = binary_cross_entropy_with_logits(logits, labels)
    (weights,) = torch.autograd.grad(loss, log_ratios)  # [K]

    prm.optimizer.zero_grad()
    for micro in micro_batches(prm, batch, args, label="PRM"):
        logprobs = action_logprobs(prm, micro, args)  # [k]
        (logprobs * weights[micro.tokens].to(logprobs.device)).sum().backward()

    sum_gradients(prm)
    grad_norm = to_float(clip_grad_norm_(prm.trained, args.max_grad_norm))
    if prm.may_step(loss.item(), grad_norm):  # not if loss or gradient is not finite
        prm.optimizer.step()

    accuracy = ((logits > 0) == (labels > 0.5)).double().mean().item()
    return {"loss": loss.item(), "accuracy": accuracy} | prm.optimizer_stats()


@ends_cleanly  # Ctrl-C, SIGTERM, a full disk or weights that are not finite end in one line
def main():
    args = parse(Args, __doc__)
    if args.world.outcome != "success":
        refuse("outcome", args.world.outcome, "the cross-entropy needs 0 or 1, so success")
    if args.variant == "prime" and args.ratio != "token":
        refuse("ratio", args.ratio, "PRIME's advantages differ from token to token, so token")
    env = WebShop.from_args(args)
    run = Run(args, env)  # directory, rows, clock, seeds, checkpoints: nothing that is learnt

    # ------------ Models ------------
    model, engine, chat = run.load_policy()
    optimizer = AdamW(trainable(model), args.learning_rate, weight_decay=0.0)
    policy = Network("policy", model, optimizer, args.run_args.dtype)

    model = run.load_adapter("prm", args.prm_lora_rank)
    optimizer = AdamW(trainable(model), args.prm_learning_rate, weight_decay=args.prm_weight_decay)
    prm = Network("prm", model, optimizer, args.run_args.dtype)
    reference = Network("reference", model, optimizer, args.run_args.dtype)  # without the adapter

    run.resume(policy, prm)
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

        # ------------ 3. PRM: cross-entropy on the outcome, then a reward for each token --------
        token_traj = batch.step_traj[batch.token_step]  # [K]
        if args.variant == "prime":
            owner, labels = token_traj, batch.outcomes  # a trajectory is a sample
            ref_logprobs = batch_logprobs(reference, batch, args, label="reference")  # [K]
        else:
            owner, labels = batch.token_step, batch.outcomes[batch.step_traj]  # a step is one
            ref_logprobs = old_logprobs

        prm_logprobs = batch_logprobs(prm, batch, args, label="PRM, scores")  # [K]
        log_ratios = prm_logprobs - ref_logprobs
        run.log("prm", cross_entropy_update(prm, batch, log_ratios, owner, labels, args))
        if args.prm_score == "after":
            prm_logprobs = batch_logprobs(prm, batch, args, label="PRM, scores")  # [K]
        rewards = token_rewards(prm_logprobs, ref_logprobs, args.beta)  # [K]
        step_rewards = sum_per_step(rewards, batch)  # [S]
        run.lap("prm")

        # ------------ 4. Advantages: outcome and token rewards, against the group's others ------
        outcome_adv = rloo_advantages(batch.outcomes, batch.group)[batch.step_traj]  # [S]
        if args.variant == "prime":
            credited = by_token(batch)  # each token has an advantage
            advantages = prime_advantages(batch.outcomes, batch.group, rewards, token_traj)  # [K]
            process_adv = advantages - outcome_adv[batch.token_step]  # [K]
            advantages = advantages - args.invalid_penalty * batch.invalid[batch.token_step]
        else:
            credited = batch  # each step has one
            parts = batch.outcomes, batch.group, step_rewards, batch.step_traj
            advantages = istar_code_advantages(*parts)  # [S]
            process_adv = advantages - outcome_adv  # [S]
            advantages = advantages - args.invalid_penalty * batch.invalid
        spread = {"process_std": process_adv.std().item(), "outcome_std": outcome_adv.std().item()}
        run.log("prm", spread)

        # ------------ 5. Policy: clipped surrogate; then the engine gets the new weights --------
        decay = 1 + (iteration - 1) / args.lr_halving
        policy.optimizer.param_groups[0]["lr"] = args.learning_rate / decay
        if args.engine_correction:
            advantages = advantages * engine_weights(credited, old_logprobs, args)
        step_adv = advantages  # [S]
        if args.variant == "prime":  # the mean of a step's tokens, for the log
            step_adv = sum_per_step(advantages, batch) / torch.bincount(batch.token_step)  # [S]
        run.log("policy", policy_update(policy, credited, old_logprobs, advantages, args))
        run.lap("update")

        engine.load(policy.model)
        run.lap("sync")

        # ------------ Log, evaluate, save ------------
        run.log_episodes("train", trajectories)
        if run.evaluates(iteration):
            run.log_episodes("eval", evaluate())
        run.save(trajectories, implicit_reward=step_rewards, advantage=step_adv)


if __name__ == "__main__":
    main()
