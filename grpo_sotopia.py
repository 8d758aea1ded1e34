"""GRPO on SOTOPIA: group-relative policy optimisation, for an agent over many turns.

Shao et al., arXiv 2402.03300; a baseline of iStar (arXiv 2509.19199). All steps of an episode get
the same credit: its outcome r_o, standardised over its group. o_1:t: what the agent has seen; a_t:
its action, all tokens of one answer; pi_old: the policy that played this iteration's episodes;
pi_theta: the policy in training.

    advantage      A(a_t) = A(tau) = (r_o(tau) - mean r_o) / std r_o over the group's trajectories
    policy         max_theta E min(rho A, clip(rho, 1-eps, 1+eps) A),
                   rho = pi_theta / pi_old of each token

Left out, as in istar_sotopia.py: KL to a reference, entropy bonus, dual clip.

    python grpo_sotopia.py                          # own scenarios, judged by rule: 4 minutes
    python grpo_sotopia.py --sotopia-data DIR --partner self --judge-url https://HOST/v1 \\
        --judge-model NAME --model Qwen/Qwen2.5-7B-Instruct --dtype bfloat16  # see docs/worlds.md
"""

import random
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from envs.sotopia import Sotopia, SotopiaArgs
from runtime.data import average, batch_logprobs, flat_tensors, micro_batches
from runtime.distributed.processes import broadcast, gather, my_tasks, sum_gradients, to_float
from runtime.flags import Flat, RunArgs, parse
from runtime.networks import Network, action_logprobs, engine_weights, trainable
from runtime.ranges import Count, Natural, NonNegative, Positive, Rate, Seed, Several, UpToInf
from runtime.rounds import Player, known, losing, rounds
from runtime.run import Run, ends_cleanly
from runtime.statistics import mean_gap

import torch
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
    ratio: Literal["step", "step-mean", "token"] = "token"
    """What a ratio compares: all tokens of a step (iStar), their mean (GSPO), or each (PPO)."""
    invalid_penalty: NonNegative = 0.1  # Taken off the outcome for an invalid answer's step.
    engine_correction: NonNegative = 0.0
    """Cap on the weight pi_old(trainer) / pi_old(engine) of an advantage; 0: no weights."""
    policy_lora_rank: Natural = 0  # Rank of the policy's LoRA adapter; 0: all parameters train.


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


def grpo_advantages(outcomes, group, std_floor: float = 0.0) -> torch.Tensor:
    """(r - mean) / std within the group, [N] from [N] and [N]; unbiased std (Shao et al., arXiv
    2402.03300). All equal or alone: 0."""
    advantages = torch.zeros_like(outcomes)
    for g in group.unique():
        r = outcomes[group == g]
        if r.max() > r.min():
            advantages[group == g] = (r - r.mean()) / r.std().clamp(min=std_floor)
    return advantages


def outcome_slope(outcomes, advantages, group) -> torch.Tensor:
    """By how much a trajectory's advantage rises with its outcome, [N]; 0 in a group of equal ones.
    A penalty on an invalid answer's outcome, times this, is one on its advantage."""
    slope = torch.zeros_like(outcomes)
    for g in group.unique():
        r, a = outcomes[group == g], advantages[group == g]
        if r.max() > r.min():
            slope[group == g] = (a.max() - a.min()) / (r.max() - r.min())
    return slope


@ends_cleanly  # Ctrl-C, SIGTERM, a full disk or weights that are not finite end in one line
def main():
    args = parse(Args, __doc__)
    env = Sotopia.from_args(args)
    run = Run(args, env)  # directory, rows, clock, seeds, checkpoints: nothing that is learnt

    # ------------ Models ------------
    model, engine, chat = run.load_policy()
    optimizer = AdamW(trainable(model), args.learning_rate, weight_decay=0.0)
    policy = Network("policy", model, optimizer, args.run_args.dtype)

    run.resume(policy)
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
        old_logprobs = None  # one optimiser step needs none: there pi_theta still is pi_old
        if args.minibatches > 1 or args.engine_correction:
            old_logprobs = batch_logprobs(policy, batch, args)  # [K]
            run.log("policy", {"engine_gap": mean_gap(old_logprobs, batch.engine_logprobs)})
        run.lap("logprobs")

        # ------------ 3. Advantages: the outcome, standardised over its group ------------
        standardised = grpo_advantages(batch.outcomes, batch.group)  # [N]
        slope = outcome_slope(batch.outcomes, standardised, batch.group)[batch.step_traj]  # [S]
        penalty = args.invalid_penalty * slope * batch.invalid  # [S] as of an outcome lower by it
        advantages = standardised[batch.step_traj] - penalty  # [S]

        # ------------ 4. Policy: clipped surrogate; then the engine gets the new weights --------
        decay = 1 + (iteration - 1) / args.lr_halving
        policy.optimizer.param_groups[0]["lr"] = args.learning_rate / decay
        if args.engine_correction:
            advantages = advantages * engine_weights(batch, old_logprobs, args)
        run.log("policy", policy_update(policy, batch, old_logprobs, advantages, args))
        run.lap("update")

        engine.load(policy.model)
        run.lap("sync")

        # ------------ Log, evaluate, save ------------
        run.log_episodes("train", trajectories)
        if run.evaluates(iteration):
            run.log_episodes("eval", evaluate())
        run.save(trajectories, advantage=advantages)


if __name__ == "__main__":
    main()
