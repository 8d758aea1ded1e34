"""PPO on WebShop: proximal policy optimisation with a learnt critic, over many turns.

Schulman et al., arXiv 1707.06347, with GAE, arXiv 1506.02438; a baseline of iStar (arXiv
2509.19199). Credit per step comes from a critic that predicts the outcome, not from a group or a
reward model. o_1:t: what the agent has seen; a_t: its action, all tokens of one answer; r_t: the
reward of a step, the outcome r_o with the last one, else 0; V_psi: the critic; pi_old: the policy
that played this iteration's episodes; pi_theta: the policy in training.

    GAE            delta_t = r_t + gamma * V(o_1:t+1) - V(o_1:t),  V = 0 after the last step
                   A(a_t) = sum over l >= 0 of (gamma * lambda)^l * delta_t+l; standardised
    critic         min_psi E 1/2 max((V - R_t)^2, (clip(V, V_old-c, V_old+c) - R_t)^2),
                   R_t = A + V_old, A before it is standardised
    policy         max_theta E min(rho A, clip(rho, 1-eps, 1+eps) A),
                   rho = pi_theta / pi_old of each token

V(o_1:t) is read where the step's first action token is predicted: the last token of o_1:t. The
critic is the initial model with a value head (transformers' token classification, one label,
weights 0) and a LoRA adapter. --gae token is what the framework of iStar's authors does: every step
is an episode of its own whose last token gets the outcome; values stand before each token, GAE runs
over the tokens of the step, and nothing is passed on between steps.

Left out, as in istar_webshop.py: KL to a reference, entropy bonus, dual clip. Groups are rolled out
as for the other algorithms, so that a batch is the same, but nothing is compared within them.

    python ppo_webshop.py                           # the tiny model: 25 minutes on one CPU core
    python ppo_webshop.py --model Qwen/Qwen2.5-1.5B-Instruct --dtype bfloat16 \\
        --learning-rate 1e-6 --lr-halving inf --critic-learning-rate 1e-5
"""

import random
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from envs.webshop import WebShop, WebShopArgs
from runtime.data import average, batch_logprobs, flat_tensors, micro_batches
from runtime.distributed.processes import (
    broadcast,
    gather,
    my_tasks,
    sum_gradients,
    to_float,
    total,
)
from runtime.flags import Flat, RunArgs, parse, refuse
from runtime.networks import Network, action_logprobs, engine_weights, plain, trainable
from runtime.ranges import Count, Natural, NonNegative, Positive, Rate, Seed, UpToInf
from runtime.rounds import Player, faulty_step, known, leaving_out, rounds
from runtime.run import Run, ends_cleanly
from runtime.statistics import mean_gap

import torch
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
    group_size: Count = 8  # Trajectories per task; none are compared, so 1 is as good (published).
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

    gae: Literal["step", "token"] = "step"
    """Values and GAE run over an episode's steps, or over the tokens of each step."""
    gamma: Rate = 1.0  # Rewards are discounted by this, per step or token (gamma).
    gae_lambda: Rate = 0.95
    """GAE weights what comes later by this (lambda): 1 is the outcome less V, 0 one step ahead."""
    critic_learning_rate: Rate = 1e-3  # The critic's rate (AdamW); 1e-5 is usual for 7B.
    critic_lora_rank: Natural = 16  # Rank of the critic's LoRA adapter; 0: a full copy is trained.
    value_clip: Positive = 0.5  # A value is learnt within this of the old value (c).


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


def by_token(batch: Batch) -> Batch:
    """The same batch with every action token as a step of its own, for advantages [K]."""
    step_traj = batch.step_traj[batch.token_step]  # [K]
    return batch._replace(step_traj=step_traj, token_step=torch.arange(len(step_traj)))


def credit_units(batch: Batch, invalid, penalty: float, gae: str):
    """What has a value and an advantage: the U = S steps, or with --gae token the U = K tokens.

    at [U]: the action token that a unit stands before; chain [U]: what GAE runs along, a trajectory
    or a step; rewards [U]: the outcome with the last one. invalid [S] costs a step `penalty`."""
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
    V_u, [U] from [U] each. A chain's units are neighbours, in order of time; behind its last one V
    and A are 0."""
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


def add_value_head(path: str, rank: int, **read):
    """The initial model with a value head of weight 0 and a LoRA adapter, "critic", both of which
    peft trains and saves. Rank 0: all of it is trained, read in float32."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForTokenClassification

    read |= {} if rank else {"dtype": torch.float32}
    model = AutoModelForTokenClassification.from_pretrained(path, num_labels=1, **read)
    for parameter in model.score.float().parameters():  # all of it trains: in float32
        torch.nn.init.zeros_(parameter)
    if rank == 0:
        return model
    layers = dict(target_modules="all-linear", exclude_modules=["score"], task_type="TOKEN_CLS")
    config = LoraConfig(r=rank, lora_alpha=rank, **layers)
    return get_peft_model(model, config, adapter_name="critic")


def token_values(critic: Network, micro, args) -> torch.Tensor:
    """V before each action token of a micro-batch, [k]: read where the token is predicted."""
    is_action = (micro.steps[:, 1:] >= 0).to(critic.model.device)  # [B, T-1]
    with critic.autocast():
        hidden = critic.hidden(micro.ids.to(critic.model.device))[:, :-1][is_action]  # [k, H]
        return plain(critic.model).score(hidden)[:, 0].float()


@torch.no_grad()
def batch_values(critic: Network, batch: Batch, args) -> torch.Tensor:
    """token_values of the whole batch, [K]."""
    values = torch.zeros(len(batch.token_step))
    for micro in micro_batches(critic, batch, args, label="values"):
        values[micro.tokens] = token_values(critic, micro, args).cpu()
    return total(values)


def critic_update(critic: Network, batch: Batch, at, old_values, returns, args) -> dict:
    """--minibatches optimiser steps, each on a random share of the trajectories; at, old_values,
    returns [U]. A gradient is summed over micro-batches, each weighted by its number of units."""
    unit = torch.full((len(batch.token_step),), -1)  # [K] the unit that stands before a token
    unit[at] = torch.arange(len(at))
    token_traj = batch.step_traj[batch.token_step]  # [K]
    minibatches = broadcast(torch.randperm(len(batch.outcomes))).chunk(args.minibatches)

    loss_sum = 0.0
    for minibatch in tqdm(minibatches, "critic", leave=False, disable=None):
        num_units = int((torch.isin(token_traj, minibatch) & (unit >= 0)).sum())
        ours = torch.isin(batch.step_traj, minibatch)  # [S]
        losses = []
        critic.optimizer.zero_grad()
        for micro in micro_batches(critic, batch, args, only=ours):
            u = unit[micro.tokens]  # [k] the unit before each token, or -1
            values = token_values(critic, micro, args)[u >= 0]
            old = old_values[u[u >= 0]].to(values.device)
            target = returns[u[u >= 0]].to(values.device)
            loss = value_loss(values, old, target, args.value_clip) * len(old)
            (loss / num_units).backward()
            losses.append(loss.item())

        loss_sum += sum(losses)
        sum_gradients(critic)
        grad_norm = to_float(clip_grad_norm_(critic.trained, args.max_grad_norm))
        if critic.may_step(sum(losses), grad_norm):  # not if loss or gradient is not finite
            critic.optimizer.step()

    (loss_sum,) = total([loss_sum])
    return {"loss": loss_sum / len(at)} | critic.optimizer_stats()


@ends_cleanly  # Ctrl-C, SIGTERM, a full disk or weights that are not finite end in one line
def main():
    args = parse(Args, __doc__)
    if args.gae == "token" and args.ratio != "token":
        refuse("ratio", args.ratio, "with --gae token each token has an advantage, so token")
    env = WebShop.from_args(args)
    run = Run(args, env)  # directory, rows, clock, seeds, checkpoints: nothing that is learnt

    # ------------ Models ------------
    model, engine, chat = run.load_policy()
    optimizer = AdamW(trainable(model), args.learning_rate, weight_decay=0.0)
    policy = Network("policy", model, optimizer, args.run_args.dtype)

    model = add_value_head(run.model_path, args.critic_lora_rank, **run.reading).to(run.device)
    optimizer = AdamW(trainable(model), args.critic_learning_rate, weight_decay=0.0)
    critic = Network("critic", model, optimizer, args.run_args.dtype)

    run.resume(policy, critic)
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

        # ------------ 3. Critic: values of the old one, advantages, then its update ------------
        units = credit_units(batch, batch.invalid, args.invalid_penalty, args.gae)
        at, chain, rewards = units  # [U] each
        values = batch_values(critic, batch, args)[at]  # [U]
        advantages = gae_advantages(rewards, values, chain, args.gamma, args.gae_lambda)  # [U]
        returns = advantages + values  # [U]
        run.log("critic", critic_update(critic, batch, at, values, returns, args))
        unexplained, varies = advantages.var().item(), returns.var().item()
        explained = 1 - unexplained / varies if varies > 1e-9 else None
        run.log("critic", {"value": values.mean().item(), "explained_variance": explained})
        run.lap("critic")

        # ------------ 4. Advantages: standardised over the batch ------------
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-6)  # [U]
        credited = by_token(batch) if args.gae == "token" else batch  # what has an advantage each

        # ------------ 5. Policy: clipped surrogate; then the engine gets the new weights --------
        decay = 1 + (iteration - 1) / args.lr_halving
        policy.optimizer.param_groups[0]["lr"] = args.learning_rate / decay
        if args.engine_correction:
            advantages = advantages * engine_weights(credited, old_logprobs, args)
        step_values, step_adv = values, advantages  # [S] for the log
        if args.gae == "token":  # the mean of a step's tokens
            counts = torch.bincount(batch.token_step)  # [S]
            step_values, step_adv = (sum_per_step(x, batch) / counts for x in (values, advantages))
        run.log("policy", policy_update(policy, credited, old_logprobs, advantages, args))
        run.lap("update")

        engine.load(policy.model)
        run.lap("sync")

        # ------------ Log, evaluate, save ------------
        run.log_episodes("train", trajectories)
        if run.evaluates(iteration):
            run.log_episodes("eval", evaluate())
        run.save(trajectories, value=step_values, advantage=step_adv)


if __name__ == "__main__":
    main()
