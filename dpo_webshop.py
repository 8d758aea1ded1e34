r"""DPO on WebShop: online trajectory DPO of the policy itself, for multi-turn agents.

Rafailov et al., arXiv 2305.18290; here a baseline of iStar (2509.19199). The loss is that of
iStar's PRM, with the sum over steps and pi_old as the reference, but it trains the policy itself,
and there is no policy gradient. r_o: the outcome; tau+ and tau-: the better and the worse of two
trajectories of one task; o_1:t: what the agent has seen; a_t: its action, all tokens of one answer;
pi_old: the policy that sampled this iteration's episodes; pi_theta: the policy in training.

    log ratio      L(tau) = sum_t log pi_theta(a_t|o_1:t) - log pi_old(a_t|o_1:t)
    policy         min_theta -E log sigmoid( beta * [L(tau+) - L(tau-)] ),  r_o(tau+) > r_o(tau-),
                   over all pairs within a group

At pi_theta = pi_old, L is 0, and the gradient is proportional to REINFORCE's with the advantage
"pairs won minus pairs lost", which for outcomes 0 and 1 is proportional to RLOO's. Later, pairs
that are already separated have less weight. Left out: the initial model as the reference (Guo et
al., arXiv 2402.04792, use it), our changes to iStar, clipping, and the penalty for invalid answers.

    python dpo_webshop.py                           # the tiny model: 15 minutes on one CPU core
    python dpo_webshop.py --model Qwen/Qwen2.5-1.5B-Instruct --dtype bfloat16 \
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
from runtime.run import Run, ends_cleanly

import torch
from peft import LoraConfig
from torch.nn.functional import logsigmoid
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
    minibatches: int = 2  # Optimiser steps per iteration, each on a random share of the groups.
    max_grad_norm: float = 1.0  # Largest gradient norm; larger gradients are scaled down to it.
    policy_lora_rank: int = 0  # Rank of the policy's LoRA adapter; 0: all parameters train.

    beta: float = 0.05  # Scale beta of the log ratios in the loss.
    pair_margin: float = 0.0  # The outcomes of a pair differ by more than this.


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


def preference_pairs(outcomes, group, margin: float = 0.0) -> list[tuple[int, int]]:
    """Every (winner, loser) of a group whose outcomes differ by more than margin; equal outcomes
    give none. outcomes [N], group [N]."""
    better = outcomes[:, None] - outcomes[None, :] > margin + 1e-5  # [N, N] 1e-5: rounding
    same_group = group[:, None] == group[None, :]
    return [tuple(pair) for pair in (better & same_group).nonzero().tolist()]


def margins(log_ratios: torch.Tensor, step_traj: torch.Tensor, pairs: list) -> torch.Tensor:
    """The difference of each pair's sums, [P], from the steps' log pi_theta - log pi_old, [S]."""
    sums = log_ratios.new_zeros(int(step_traj.max()) + 1).index_add(0, step_traj, log_ratios)  # [N]
    winners, losers = torch.tensor(pairs).T
    return sums[winners] - sums[losers]


def dpo_loss(margins: torch.Tensor) -> torch.Tensor:
    """Mean of -log sigmoid(L(tau+) - L(tau-)), from [P]."""
    return -logsigmoid(margins).mean()


def pair_advantages(pairs: list[tuple[int, int]], group: torch.Tensor) -> torch.Tensor:
    """(pairs won - pairs lost) / (members of the group - 1) of a trajectory, [N], group [N]: the
    advantage at pi_theta = pi_old. It is only logged."""
    winners, losers = torch.tensor(pairs, dtype=torch.long).reshape(-1, 2).T
    won, lost = (torch.bincount(side, minlength=len(group)) for side in (winners, losers))
    others = torch.bincount(group)[group] - 1
    return (won - lost) / others.clamp(min=1)


def dpo_update(policy: Network, batch, old_logprobs, pairs: list, args) -> dict:
    """--minibatches optimiser steps of trajectory DPO, each on the pairs of a random share of the
    groups; statistics from before each step. old_logprobs [K].

    The loss depends on the policy only through the tokens' log ratios. Its derivatives with
    respect to them weight the log-probabilities, which are back-propagated by micro-batch."""
    losses, found, ratios, grad_norms = [], [], [], []
    for share in torch.randperm(int(batch.group.max()) + 1).tensor_split(args.minibatches):
        ours = [pair for pair in pairs if batch.group[pair[0]] in share]
        if not ours:
            continue
        teaches = torch.isin(batch.step_traj, torch.tensor(ours))  # [S] of episodes in pairs
        teaching = teaches[batch.token_step]  # [K]

        logprobs = batch_logprobs(policy, batch, args, only=teaches)  # [K]
        log_ratios = torch.where(teaching, logprobs - old_logprobs, 0.0).requires_grad_()
        margin = args.beta * margins(sum_per_step(log_ratios, batch), batch.step_traj, ours)  # [P]
        loss = dpo_loss(margin)
        (slope,) = torch.autograd.grad(loss, log_ratios)  # [K]

        for micro in micro_batches(batch, args, only=teaches):
            new = action_logprobs(policy, micro, args)  # [k] with a graph
            (new * slope[micro.tokens].to(new.device)).sum().backward()
        grad_norms.append(optimizer_step(policy, args))
        losses.append(loss.item())
        found.append(margin.detach())
        ratios.append(log_ratios.detach()[teaching])
    grad_norm = sum(grad_norms) / max(len(grad_norms), 1)
    return update_statistics(losses, found, ratios) | {"grad_norm": grad_norm}


def update_statistics(losses: list[float], margins: list, log_ratios: list) -> dict:
    """Logged statistics of an update: means over its steps, pairs and action tokens. Margins and
    accuracy are of pairs in groups before they are trained on, without the first step, whose
    margins are all 0. None if there are none."""
    stats = {"loss": sum(losses) / max(len(losses), 1), "margin": None, "pair_accuracy": None}
    logratio = torch.cat(log_ratios or [torch.zeros(1)])
    ratio = logratio.exp()
    stats |= {"ratio": ratio.mean().item(), "approx_kl": (ratio - 1 - logratio).mean().item()}
    if len(margins) > 1:
        later = torch.cat(margins[1:])
        stats["margin"] = later.mean().item()
        stats["pair_accuracy"] = (later > 0).double().mean().item()
    return stats


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

        # ------------ 3. Pairs of a better and a worse episode of the same task ------------
        pairs = preference_pairs(batch.outcomes, batch.group, args.pair_margin)
        advantages = pair_advantages(pairs, batch.group)[batch.step_traj]  # [S] for the log
        run.log("policy", {"pairs": len(pairs)})

        # ------------ 4. Policy: trajectory DPO; then the engine gets the new weights --------
        decay = 1 + (iteration - 1) / args.lr_halving
        policy.optimizer.param_groups[0]["lr"] = args.learning_rate / decay
        run.log("policy", dpo_update(policy, batch, old_logprobs, pairs, args))
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
