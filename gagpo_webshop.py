r"""GAGPO on WebShop: generalised advantage grouped policy optimisation, for multi-turn agents.

Zhu et al., arXiv 2605.13217; here a baseline of iStar (2509.19199). Trajectories of a group often
share states. The mean discounted outcome of a state's visits replaces the value of PPO's critic,
and GAE over the steps of an episode gives the advantages. r_o: the outcome; T: the episode's last
step; s_t: the state in which a_t was taken, here the page without the instruction; a_t: an action,
all tokens of one answer; pi_old: the policy that sampled this iteration's episodes; pi_theta: the
policy in training.

    value          V(s) = mean of gamma^(T-t) * r_o over the visits s_t = s;  V(s_T+1) = 0
    TD residual    delta_t = r_t + gamma * V(s_t+1) - V(s_t),  r_T = r_o, before it 0
    advantage      A(a_t) = z(sum over l of (gamma * lambda)^l * delta_t+l) over the group's steps
                   z(x) = (x - mean x) / std x;  alone, or all equal: 0
    policy         max_theta E min(rho A, clip(rho, 1-eps, 1+eps) A),
                   rho = (pi_theta(a_t) / pi_old(a_t))^(1 / tokens of a_t), one for each action

Left out, as in istar_webshop.py: KL to a reference, entropy bonus, dual clip. Our choices: a
truncated episode ends like any other, with its r_o; an invalid answer subtracts --invalid-penalty
from A, as in iStar; gamma and lambda are those of a public reproduction.

    python gagpo_webshop.py                         # the tiny model: 15 minutes on one CPU core
    python gagpo_webshop.py --model Qwen/Qwen2.5-1.5B-Instruct --dtype bfloat16 \
        --max-action-tokens 512 --max-context-tokens 16384 --gradient-checkpointing \
        --learning-rate 1e-6 --lr-halving inf  # one GPU of 80 GB
"""

import random
from dataclasses import dataclass, field

from envs.webshop import WebShop, WebShopArgs
from runtime.data import Step, Trajectory, flatten, joined, micro_batches, sum_per_step
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

    gamma: float = 0.95  # Discount gamma of the outcome per step.
    gae_lambda: float = 0.8  # GAE's lambda; 0: TD residuals, 1: returns minus state values.


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


# === block: action policy ===
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


def mean_per_step(values: torch.Tensor, micro) -> torch.Tensor:
    """Means over the action tokens of each step, [s] of values [k]."""
    return sum_per_step(values, micro) / torch.bincount(micro.token_step).to(values.device)


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
            new = mean_per_step(action_logprobs(policy, micro, args), micro)  # [s] with a graph
            old = mean_per_step(old_logprobs[micro.tokens].to(new.device), micro)
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


def grpo_advantages(outcomes: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
    """(r - mean) / std within the group, [N] from [N] and [N]; unbiased std (Shao et al., arXiv
    2402.03300). All equal or alone: 0."""
    advantages = torch.zeros_like(outcomes)
    for g in group.unique():
        r = outcomes[group == g]
        if r.max() > r.min():  # else the group gives no signal
            advantages[group == g] = (r - r.mean()) / r.std()
    return advantages


def anchor_groups(trajectories: list[Trajectory]) -> torch.Tensor:
    """The anchor group of every step, [S]: steps of one task from the same state: this state is
    the anchor of the step before or, for the first step, of the episode."""
    states = []
    for t in trajectories:
        taken_in = [t.anchor, *(step.anchor for step in t.steps[:-1])]
        states += [(t.task, state) for state in taken_in]
    numbers = {state: number for number, state in enumerate(dict.fromkeys(states))}
    return torch.tensor([numbers[state] for state in states])


def state_values(outcomes, delays, anchor, gamma: float) -> torch.Tensor:
    """V of the state of each step: the mean of gamma^delay * r_o over all steps from this state,
    [S] in float64 from [S] each."""
    returns = outcomes.double() * gamma ** delays.double()
    sums = returns.new_zeros(int(anchor.max()) + 1).index_add(0, anchor, returns)
    return (sums / torch.bincount(anchor))[anchor]


def standardised(values: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
    """z within the group, [S] in float32 from [S] each. Values are rounded to nine decimals, so
    that rounding errors of equal values are not amplified."""
    return grpo_advantages(values.double().round(decimals=9), group).float()


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


def anchor_statistics(anchor, step_adv) -> dict:
    """Anchor groups: number, largest size; shares of steps: not alone in one, step_adv not 0."""
    sizes = torch.bincount(anchor)
    shared = (sizes[anchor] > 1).double().mean().item()
    felt = (step_adv != 0).double().mean().item()
    return {"shared": shared, "groups": len(sizes), "largest": sizes.max().item(), "felt": felt}


@ends_cleanly  # Ctrl-C, SIGTERM, a full disk, gradients that are not finite: exits with one line
def main():
    args = parse(Args, __doc__)  # tyro: a flag for each field above
    env = WebShop.from_args(args)
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

        # ------------ 3. Advantages: GAE over the values of states, standardised in the group ----
        anchor = anchor_groups(episodes)  # [S]
        outcomes = batch.outcomes[batch.step_traj]  # [S]
        last = torch.bincount(batch.step_traj).cumsum(0)[batch.step_traj] - 1  # [S]
        left = last - torch.arange(len(outcomes))  # T - t, [S]
        values = state_values(outcomes, left, anchor, args.gamma)  # [S]
        rewards = outcomes * (left == 0)  # [S]
        gae = gae_advantages(rewards, values, batch.step_traj, args.gamma, args.gae_lambda)  # [S]
        step_adv = standardised(gae, batch.group[batch.step_traj])  # [S]
        advantages = step_adv - args.invalid_penalty * batch.invalid  # [S]
        run.log("anchor", anchor_statistics(anchor, step_adv))

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
        run.save(episodes, step_advantage=step_adv, advantage=advantages)


if __name__ == "__main__":
    main()
