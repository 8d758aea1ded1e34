"""Ablations of iStar on WebShop: between istar_webshop.py and the paper, and other step rewards.

In float32 and without flags it is istar_webshop.py (which defines the symbols) with RLOO's A^E; in
bfloat16, or with --async-rollout, A lacks the weight of its --engine-cap. The flags change:

    --as-published skill         alpha is not scaled by the PRM's skill.
    --as-published length        Pairs compare all their steps, not the first min(T+, T-).
    --as-published credit        Every step gets A^S, also if invalid or in a group without a pair.
    --as-published preference    The regression on log pi_old is not subtracted from r_phi.
    --as-published average       The PRM's latest weights score steps, not their moving average.
    --prm-lora-rank 0            The PRM is a full copy of the policy, and is not averaged.
    --prm-replay 0               The PRM is trained on this iteration's pairs only.
    --step-reward ground-truth   The world's own step rewards replace the PRM's.
    --step-reward merged         One advantage, of r_o + alpha * r_phi; each step is a sample.
    --step-reward token          Each token has a reward, an advantage and a ratio.
    --step-reward head           A linear head (arXiv 2507.07981): no average, no regression.
    --normalise-over turn        A^S compares the steps of a turn in a group; batch: all steps.
    --ratio token                A ratio per token; step-mean: a step's geometric mean (GSPO).

istar_paper_webshop.py: --as-published skill length credit preference average --prm-lora-rank 0
--prm-replay 0 --prm-steps 1 --prm-ridge 0 --beta 0.05 --lr-halving inf, at its learning rates.
"""

import random
import sys
from dataclasses import dataclass, field
from typing import Literal

from envs.webshop import WebShop, WebShopArgs
from runtime.data import Step, Trajectory, flatten, joined, micro_batches, sum_per_step
from runtime.engines import SamplingParams
from runtime.flags import Flat, RunArgs, parse
from runtime.networks import Network, action_logprobs, batch_logprobs, over_batch, sum_gradients
from runtime.run import Run, ends_cleanly, mean_of

import torch
from peft import LoraConfig, get_peft_model
from torch.nn.functional import logsigmoid
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW, swa_utils
from transformers import AutoModelForTokenClassification


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
    policy_lora_rank: int = 0  # Rank of the policy's LoRA adapter; 0: all parameters train.

    alpha: float = 1.0  # Weight alpha of the step advantage A^S (paper: 1).
    beta: float = 1.0  # Scale beta of the PRM's rewards and loss (paper: 0.05).
    prm_learning_rate: float = 3e-3  # Learning rate of the PRM (AdamW; paper: 1e-6 for 7B).
    prm_lora_rank: int = 16  # Rank of the PRM's adapter; 0: a full copy (paper).
    prm_steps: int = 8  # PRM steps per iteration (paper: 1).
    prm_replay: int = field(default=256, metadata={"least": 0})  # Latest groups; 0: only new ones.
    prm_ridge: float = 0.1  # Weight of the mean r_phi^2 in the PRM's loss (paper: 0).

    as_published: tuple[str, ...] = ()  # The paper's choices to use (see above).
    step_reward: Literal["implicit", "merged", "token", "head", "ground-truth"] = "implicit"
    """Source of the step reward, and how it is used (see above)."""
    normalise_over: Literal["group", "turn", "batch"] = "group"  # Scope of A^S's standardisation.
    ratio: Literal["step", "step-mean", "token"] = "step"  # Unit of a ratio (see above).


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


def step_advantages(rewards, compared) -> torch.Tensor:
    """A^S = (r_phi - mean) / std over the units with the same number, [U] from [U] and [U]."""
    return grpo_advantages(rewards, compared)


def per_ratio(values, micro, ratio: str):
    """Of the values [k] of a micro-batch's tokens: they, or each step's sum [s] or mean [s]."""
    if ratio == "token":
        return values
    sums = sum_per_step(values, micro)
    if ratio == "step-mean":
        sums = sums / torch.bincount(micro.token_step).to(sums.device)
    return sums


def policy_loss(logprobs, old_logprobs, advantages, clip: float) -> tuple[torch.Tensor, dict]:
    """-mean min(rho A, clip(rho, 1-eps, 1+eps) A), rho = exp(logprobs - old_logprobs), [s]."""
    log_ratio = logprobs - old_logprobs
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - clip, 1 + clip)
    loss = -torch.min(ratio * advantages, clipped * advantages).mean()

    stats = {"loss": loss, "ratio": ratio.mean()}
    stats["approx_kl"] = (ratio - 1 - log_ratio).mean()
    stats["clip_fraction"] = (ratio != clipped).float().mean()
    return loss, {name: value.item() for name, value in stats.items()}


def policy_update(policy: Network, batch, old_logprobs, advantages, args) -> dict:
    """--minibatches optimiser steps, each on a random share of the episodes. In bfloat16, where old
    values differ by rounding, the first has ratios of 1. old_logprobs [K], advantages [S]."""
    seen = []  # statistics of each micro-batch
    grad_norms = []
    for share in torch.randperm(len(batch.outcomes)).tensor_split(args.minibatches):
        ours = torch.isin(batch.step_traj, share)  # [S]
        num_ratios = int(ours.sum())
        if args.ratio == "token":
            num_ratios = int(ours[batch.token_step].sum())
        for micro in micro_batches(batch, args, only=ours & (advantages != 0)):
            new = per_ratio(action_logprobs(policy, micro, args), micro, args.ratio)
            old = per_ratio(old_logprobs[micro.tokens].to(new.device), micro, args.ratio)
            if args.run_args.dtype == "bfloat16" and not grad_norms:
                old = new.detach()
            steps = micro.steps  # [s] or [k], of each ratio
            if args.ratio == "token":
                steps = batch.token_step[micro.tokens]
            loss, stats = policy_loss(new, old, advantages[steps].to(new.device), args.clip)
            (loss * len(new) / num_ratios).backward()
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


def preference_pairs(outcomes, group) -> list[tuple[int, int]]:
    """Every (winner, loser) of a group; equal outcomes give none. outcomes [N], group [N]."""
    better = outcomes[:, None] > outcomes[None, :] + 1e-5  # [N, N]
    same_group = group[:, None] == group[None, :]
    return [tuple(pair) for pair in (better & same_group).nonzero().tolist()]


def step_rewards(prm_logprobs, old_logprobs, beta: float) -> torch.Tensor:
    """r_phi = beta * (log pi_phi(a_t|o_1:t) - log pi_old(a_t|o_1:t)), [S] from [S] and [S]."""
    return beta * (prm_logprobs - old_logprobs)


def reward_model(path: str, rank: int, **reading):
    """The initial model with a linear head of 0 and an adapter, "prm"; peft saves both."""
    model = AutoModelForTokenClassification.from_pretrained(path, num_labels=1, **reading)
    torch.nn.init.zeros_(model.score.float().weight)  # trained in float32
    adapter = lora(rank)
    adapter.exclude_modules, adapter.task_type = ["score"], "TOKEN_CLS"
    return get_peft_model(model, adapter, adapter_name="prm")


def head_rewards(prm: Network, batch, args, graph=False):
    """r_phi of every step, [S]: the head's output that predicts the last token of the answer."""

    def values(prm, micro, args):  # [k]
        return prm.at_actions(micro, args, lambda hidden, _: prm.plain.score(hidden)[:, 0].float())

    last = torch.bincount(batch.token_step).cumsum(0) - 1  # [S]
    return over_batch(values, prm, batch, args, graph=graph)[last]


def policy_slope(rewards, log_old, step_group) -> torch.Tensor:
    """Slope of r_phi on log pi_old within groups, from [s] each. A PRM that only sharpens the
    policy ranks pairs well, as rare answers are often wrong, but only reinforces pi_old."""
    means = torch.bincount(step_group, log_old) / torch.bincount(step_group)  # of each group
    centred = log_old - means[step_group]
    return (centred @ rewards) / centred.square().sum().clamp(min=1e-9)


def margins(rewards, step_traj, pairs: list, all_steps: bool) -> torch.Tensor:
    """L(tau+) - L(tau-) of each pair, [P] from [S], over the first min(T+, T-) steps of both:
    failures last until the step limit, so length alone would rank them. all_steps: all of both."""
    of_each = rewards.split(torch.bincount(step_traj).tolist())  # N of [T]
    found = []
    for winner, loser in pairs:
        both = None if all_steps else min(len(of_each[winner]), len(of_each[loser]))
        found.append(of_each[winner][:both].sum() - of_each[loser][:both].sum())
    return torch.stack(found)


def dpo_loss(margins: torch.Tensor) -> torch.Tensor:
    """Mean of -log sigmoid(L(tau+) - L(tau-)), from [P]."""
    return -logsigmoid(margins).mean()


def prm_update(prm: Network, policy: Network, episodes: list[Trajectory], args) -> dict:
    """One optimiser step: trajectory DPO on all pairs of these episodes, ridge on their steps."""
    batch = flatten(episodes)
    pairs = preference_pairs(batch.outcomes, batch.group)
    if args.step_reward == "head":
        rewards = head_rewards(prm, batch, args, graph=True)  # [S]
    else:
        log_old = sum_per_step(batch_logprobs(policy, batch, args), batch)  # [S] current policy
        log_phi = sum_per_step(batch_logprobs(prm, batch, args, graph=True), batch)  # [S]
        rewards = step_rewards(log_phi, log_old, args.beta)  # [S]
    margin = margins(rewards, batch.step_traj, pairs, "length" in args.as_published)  # [P]
    loss = dpo_loss(margin) + args.prm_ridge * rewards.square().mean()
    loss.backward()
    grad_norm = optimizer_step(prm, args)
    return {"loss": loss.item(), "margin": margin.mean().item(), "grad_norm": grad_norm}


def draw(replay: list, args) -> list[list[Trajectory]]:
    """Episodes for each of --prm-steps steps: best and worst of each of two groups of a replay."""
    if replay and args.prm_replay == 0:  # all new episodes of groups with a pair
        return [[t for group in replay for t in group]] * args.prm_steps
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


def by_token(batch):
    """The same batch with every action token as a separate step, for advantages [K]."""
    step_traj = batch.step_traj[batch.token_step]  # [K]
    return batch._replace(step_traj=step_traj, token_step=torch.arange(len(step_traj)))


def compared_with(batch, over: str):
    """A number for every step, [S]; A^S is standardised over the steps of each number."""
    group = batch.group[batch.step_traj]  # [S]
    if over == "batch":
        return torch.zeros_like(group)
    if over == "group":
        return group
    turns = torch.cat([torch.arange(n) for n in torch.bincount(batch.step_traj)])  # [S]
    return group * len(turns) + turns


@ends_cleanly  # Ctrl-C, SIGTERM, a full disk, gradients that are not finite: exits with one line
def main():
    args = parse(Args, __doc__)  # tyro: a flag for each field above
    per_token = args.step_reward == "token"
    if unknown := set(args.as_published) - {"skill", "length", "credit", "preference", "average"}:
        sys.exit(f"--as-published {min(unknown)}: it takes skill length credit preference average")
    if args.step_reward == "head" and not args.prm_lora_rank:
        sys.exit("--prm-lora-rank 0: with --step-reward head it is at least 1")
    if per_token and (args.ratio != "token" or args.normalise_over != "group"):
        sys.exit("--step-reward token: it needs --ratio token and --normalise-over group")
    env = WebShop.from_args(args)
    run = Run(args, env)  # directory, rows, W&B, seeds, checkpoints: nothing that is learnt

    # ------------ Models ------------
    model, engine, chat = run.load_policy(lora(args.policy_lora_rank))
    policy = Network("policy", model)  # a transformers model; the engine: vLLM, or this model
    policy.optimizer = AdamW(policy.trained, args.learning_rate, weight_decay=0.0)

    if args.step_reward == "head":
        prm = reward_model(run.model_path, args.prm_lora_rank, **run.reading)
        prm = Network("prm", prm.to(run.device))
    elif args.prm_lora_rank:
        prm = policy.with_adapter("prm", lora(args.prm_lora_rank))  # as the policy: r_phi = 0
    else:
        prm = policy.copy("prm")
    prm.optimizer = AdamW(prm.trained, args.prm_learning_rate, weight_decay=0.0)
    latest = not args.prm_lora_rank or {"head", "average"} & {args.step_reward, *args.as_published}
    average = prm if latest else prm.copy("prm_average")  # it scores steps
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
        units = by_token(batch) if per_token else batch  # U = K tokens, or S steps, have a reward
        pairs = preference_pairs(batch.outcomes, batch.group)
        step_group = batch.group[units.step_traj]  # [U]
        invalid = batch.invalid[batch.token_step] if per_token else batch.invalid  # [U]
        paired = torch.isin(step_group, batch.group[[winner for winner, _ in pairs]])  # [U]
        credited = paired & ~invalid | ("credit" in args.as_published)  # [U]
        if args.step_reward == "ground-truth":
            rewards = torch.tensor([step.game_reward for t in episodes for step in t.steps])  # [S]
        elif args.step_reward == "head":
            rewards = head_rewards(average, batch, args)  # [S]
        else:
            log_old = sum_per_step(old_logprobs, units)  # [U]
            log_phi = sum_per_step(batch_logprobs(average, batch, args), units)  # [U]
            rewards = step_rewards(log_phi, log_old, args.beta)  # [U]
            if "preference" not in args.as_published:
                slope = policy_slope(rewards[credited], log_old[credited], step_group[credited])
                rewards = rewards - slope * log_old  # [U]
        run.log("prm", {"pairs": len(pairs), "pair_accuracy": None})
        if pairs:
            of_steps = sum_per_step(rewards, batch) if per_token else rewards  # [S]
            margin = margins(of_steps, batch.step_traj, pairs, all_steps=False)  # [P]
            accuracies.append(((margin.sign() + 1) / 2).mean().item())  # a tie: 0.5
            run.log("prm", {"pair_accuracy": accuracies[-1]})

        winners = {episodes[winner].task for winner, _ in pairs}
        replay += [[t for t in episodes if t.task == task] for task in sorted(winners)]
        del replay[: max(0, len(replay) - (args.prm_replay or len(winners)))]
        if args.step_reward != "ground-truth":
            learnt = [prm_update(prm, policy, part, args) for part in draw(replay, args)]
            swa_utils.get_ema_multi_avg_fn(0.8)(average.trained, prm.trained, None)
            run.log("prm", mean_of(learnt))
        run.lap("prm")

        # ------------ 4. Advantages: A = A^E + alpha * skill * A^S - penalty ------------
        episode_adv = rloo_advantages(batch.outcomes, batch.group)[units.step_traj]  # [U]
        compared = compared_with(units, args.normalise_over)  # [U]
        step_adv = torch.zeros_like(rewards)  # [U]
        step_adv[credited] = step_advantages(rewards[credited], compared[credited])

        trust = 1.0 if "skill" in args.as_published else skill(accuracies)
        weighted = args.alpha * trust * step_adv  # [U]
        advantages = episode_adv + weighted - args.invalid_penalty * invalid  # [U]
        if args.step_reward == "merged":
            merged = batch.outcomes[batch.step_traj] + args.alpha * rewards  # [S]
            advantages = rloo_advantages(merged, compared) - args.invalid_penalty * invalid
        progress = batch.progress[batch.token_step] if per_token else batch.progress  # [U]
        seen = episode_adv[credited], step_adv[credited], progress[credited]
        run.log("prm", {"skill": trust} | credit_statistics(*seen, weighted[credited]))

        # ------------ 5. Policy: clipped surrogate; then the engine gets the new weights --------
        decay = 1 + (iteration - 1) / args.lr_halving
        policy.optimizer.param_groups[0]["lr"] = args.learning_rate / decay
        run.log("policy", policy_update(policy, units, old_logprobs, advantages, args))
        run.log("policy", {"engine_gap": gap, "advantage_mean": advantages.mean().item()})
        run.lap("update")
        engine.load(policy.model)
        run.lap("sync")

        # ------------ Log, evaluate, save ------------
        run.log_episodes("train", episodes)
        if run.evaluates(iteration):
            run.log_episodes("eval", run.rollout(play, run.eval_env, run.eval_tasks, evaluation))
        columns = dict(implicit_reward=rewards, step_advantage=step_adv, advantage=advantages)
        columns |= dict(episode_advantage=episode_adv)
        if per_token:  # sums over the tokens of a step
            columns = {name: sum_per_step(values, batch) for name, values in columns.items()}
        run.save(episodes, **columns)


if __name__ == "__main__":
    main()
