"""DPO on WebShop: online trajectory DPO of the policy itself, for an agent over many turns.

Rafailov et al., arXiv 2305.18290; a baseline of iStar (arXiv 2509.19199). The loss is that of
iStar's PRM, with the sum over steps and pi_old as the reference, but it trains the policy itself,
and there is no policy gradient. r_o: the outcome; tau+ and tau-: the better and the worse of two
trajectories of one task; o_1:t: what the agent has seen; a_t: its action, all tokens of one answer;
pi_old: the policy that played this iteration's episodes; pi_theta: the policy in training.

    log ratio      L(tau) = sum_t log pi_theta(a_t|o_1:t) - log pi_old(a_t|o_1:t)
    policy         min_theta -E log sigmoid( beta * [L(tau+) - L(tau-)] ),  r_o(tau+) > r_o(tau-),
                   over all pairs within a group

While pi_theta is pi_old, L is 0, and the gradient is REINFORCE's with pairs won less pairs lost as
the advantage, which for outcomes 0 and 1 is RLOO's; later, pairs that are told apart count less.
Left out: the initial model as the reference (online DPO in Guo et al., arXiv 2402.04792, has it),
and iStar's guards. No ratio is clipped; an invalid answer costs what it does to the outcome.

    python dpo_webshop.py                           # the tiny model: 15 minutes on one CPU core
    python dpo_webshop.py --model Qwen/Qwen2.5-1.5B-Instruct --dtype bfloat16 \\
        --learning-rate 1e-6
"""

import random
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import NamedTuple

from envs.webshop import WebShop, WebShopArgs
from runtime.data import batch_logprobs, flat_tensors, micro_batches
from runtime.distributed.processes import broadcast, gather, my_tasks, sum_gradients, to_float
from runtime.flags import Flat, RunArgs, parse
from runtime.networks import Network, action_logprobs, trainable
from runtime.ranges import Count, Natural, NonNegative, Positive, Rate, Seed, Several, Unit, UpToInf
from runtime.rounds import Player, faulty_step, known, leaving_out, rounds
from runtime.run import Run, ends_cleanly
from runtime.statistics import mean_gap

import torch
from torch.nn.functional import logsigmoid
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
    minibatches: Count = 2  # Optimiser steps per iteration, each on a random share of the groups.
    max_grad_norm: UpToInf = 1.0  # Largest gradient norm; a longer gradient is scaled down to it.
    policy_lora_rank: Natural = 0  # Rank of the policy's LoRA adapter; 0: all parameters train.

    beta: NonNegative = 0.05  # Scale beta of the log ratios in the loss; 0: nothing is learnt.
    pair_margin: NonNegative = 0.0  # The outcomes of a pair differ by more than this.
    pair_threshold: Unit = 0.0  # Only outcomes above it win, and only others lose; 0: any pair.


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


def preference_pairs(outcomes, group, margin: float = 0.0, threshold: float = 0.0) -> list[tuple]:
    """Every (winner, loser) of a group whose outcomes differ by more than margin; ties give none.
    With a threshold the winner's is above it and the loser's is not. outcomes [N], group [N]."""
    better = outcomes[:, None] - outcomes[None, :] > margin + 1e-5  # [N, N] float32: 0.3 - 0.2
    if threshold:
        better &= (outcomes > threshold + 1e-5)[:, None] & (outcomes <= threshold + 1e-5)[None, :]
    same_group = group[:, None] == group[None, :]
    return [tuple(pair) for pair in (better & same_group).nonzero().tolist()]


def dpo_loss(log_ratios: torch.Tensor, pairs: list[tuple[int, int]], beta: float) -> torch.Tensor:
    """Mean over pairs of -logsigmoid(beta (L[winner] - L[loser])), L = log_ratios [N]; none: 0."""
    if not pairs:
        return log_ratios.sum() * 0
    winners, losers = torch.tensor(pairs, device=log_ratios.device).T
    margins = beta * (log_ratios[winners] - log_ratios[losers])
    return -logsigmoid(margins).mean()


def trajectory_log_ratios(log_ratios: torch.Tensor, batch: Batch) -> torch.Tensor:
    """L(tau) of every trajectory, [N], from its action tokens' log pi_theta - log pi_old, [K]."""
    sums = log_ratios.new_zeros(len(batch.outcomes))
    return sums.index_add(0, batch.step_traj, sum_per_step(log_ratios, batch))


def pair_advantages(pairs: list[tuple[int, int]], group: torch.Tensor) -> torch.Tensor:
    """(pairs won - pairs lost) / (members of the group - 1) of a trajectory, [N], group [N]: what
    stands for an advantage while pi_theta is pi_old. For the log alone."""
    winners, losers = torch.tensor(pairs, dtype=torch.long).reshape(-1, 2).T
    won, lost = (torch.bincount(side, minlength=len(group)) for side in (winners, losers))
    others = torch.bincount(group)[group] - 1
    return (won - lost) / others.clamp(min=1)


def dpo_update(policy: Network, batch: Batch, old_logprobs, pairs, args) -> dict:
    """--minibatches optimiser steps of trajectory DPO, each on the pairs of a random share of the
    groups; statistics from before each step. old_logprobs [K].

    The loss depends on the policy through the tokens' log ratios alone: differentiate it by them,
    and back-propagate weight * log-probability, micro-batch by micro-batch."""
    losses, margins, seen = [], [], []
    groups = broadcast(torch.randperm(int(batch.group.max()) + 1))

    for minibatch in tqdm(groups.chunk(args.minibatches), "update", leave=False, disable=None):
        ours = [pair for pair in pairs if batch.group[pair[0]] in minibatch]
        if not ours:
            continue
        teaches = torch.isin(batch.step_traj, torch.tensor(ours))  # [S] of trajectories in pairs
        teaching = teaches[batch.token_step]  # [K]

        logprobs = batch_logprobs(policy, batch, args, teaches, "DPO")  # [K]
        log_ratios = torch.where(teaching, logprobs - old_logprobs, 0.0).requires_grad_()
        of_trajectories = trajectory_log_ratios(log_ratios, batch)  # [N]
        loss = dpo_loss(of_trajectories, ours, args.beta)
        (weights,) = torch.autograd.grad(loss, log_ratios)  # [K]

        policy.optimizer.zero_grad()
        for micro in micro_batches(policy, batch, args, only=teaches):
            logprobs = action_logprobs(policy, micro, args)  # [k]
            (logprobs * weights[micro.tokens].to(logprobs.device)).sum().backward()
            policy.note(micro.tokens, logprobs.detach().cpu() - old_logprobs[micro.tokens])

        sum_gradients(policy)
        grad_norm = to_float(clip_grad_norm_(policy.trained, args.max_grad_norm))
        if policy.may_step(loss.item(), grad_norm):  # not if loss or gradient is not finite
            policy.optimizer.step()

        winners, losers = of_trajectories.detach()[torch.tensor(ours)].T  # [P], [P]
        margins.append(args.beta * (winners - losers))
        losses.append(loss.item())
        seen.append(log_ratios.detach()[teaching])

    policy.optimizer.zero_grad()  # frees the gradients' memory
    return update_statistics(losses, margins, seen) | policy.optimizer_stats()


def update_statistics(losses: list[float], margins: list, log_ratios: list) -> dict:
    """What is logged of an update: means over its steps, pairs and action tokens. The margins and
    the accuracy are of pairs in groups that nothing had been learnt from, once pi_theta had moved:
    those of the first step are all 0. None where there are none."""
    stats = {"loss": sum(losses) / max(len(losses), 1), "margin": None, "pair_accuracy": None}
    logratio = torch.cat(log_ratios or [torch.zeros(1)])
    ratio = logratio.exp()
    stats |= {"ratio": ratio.mean().item(), "approx_kl": (ratio - 1 - logratio).mean().item()}
    if len(margins) > 1:
        later = torch.cat(margins[1:])
        stats["margin"] = later.mean().item()
        stats["pair_accuracy"] = (later > 0).double().mean().item()
    return stats


@ends_cleanly  # Ctrl-C, SIGTERM, a full disk or weights that are not finite end in one line
def main():
    args = parse(Args, __doc__)
    env = WebShop.from_args(args)
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

        # ------------ 2. log pi_old of every action token: the reference ------------
        old_logprobs = batch_logprobs(policy, batch, args)  # [K]
        run.log("policy", {"engine_gap": mean_gap(old_logprobs, batch.engine_logprobs)})
        run.lap("logprobs")

        # ------------ 3. Pairs of a better and a worse trajectory of the same task ------------
        pairs = preference_pairs(batch.outcomes, batch.group, args.pair_margin, args.pair_threshold)
        advantages = pair_advantages(pairs, batch.group)[batch.step_traj]  # [S] for the log

        # ------------ 4. Policy: trajectory DPO; then the engine gets the new weights --------
        decay = 1 + (iteration - 1) / args.lr_halving
        policy.optimizer.param_groups[0]["lr"] = args.learning_rate / decay
        learnt = dpo_update(policy, batch, old_logprobs, pairs, args)
        run.log("policy", learnt | {"pairs": len(pairs)})
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
