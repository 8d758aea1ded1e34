"""What the scripts log beside their losses, and what they conclude from it about a PRM."""

import torch

WINDOW = 5  # so many iterations say how far a PRM is trusted


def mean_gap(logprobs: torch.Tensor, engine_logprobs: torch.Tensor) -> float:
    """The mean absolute difference between the trainer's and the engine's log-probabilities, [nats
    per token]."""
    return (logprobs.detach().cpu() - engine_logprobs).abs().mean().item()


def pair_statistics(rewards: torch.Tensor, batch, pairs: list) -> dict:
    """What new episodes say about the PRM before it learns from them: how many pairs they make, the
    share of these that its rewards [S] rank right, and the share that length alone does; None
    without a pair."""
    lengths = torch.bincount(batch.step_traj)  # [N]
    shorter = [float(lengths[winner] < lengths[loser]) for winner, loser in pairs]
    right = ranked_right(rewards, batch, pairs)
    named = {"pair_accuracy": mean(right), "length_accuracy": mean(shorter)}
    return {"pairs": len(pairs)} | named


def ranked_right(values: torch.Tensor, batch, pairs: list) -> list[float]:
    """For each pair whether its winner has the larger sum of values [S] over the first min(T+, T-)
    steps of both: 1, 0, or 0.5 where they are equal."""
    of_each = values.double().split(torch.bincount(batch.step_traj).tolist())  # N of [T]
    right = []
    for winner, loser in pairs:
        both = min(len(of_each[winner]), len(of_each[loser]))
        margin = of_each[winner][:both].sum() - of_each[loser][:both].sum()
        right.append((margin.sign().item() + 1) / 2)
    return right


def mean(values: list[float]) -> float | None:
    """The mean; None where there is nothing."""
    return sum(values) / len(values) if values else None


def in_mixed_group(batch, pairs: list[tuple[int, int]]) -> torch.Tensor:
    """Whether a step's group has a pair, [S]: the others taught the PRM nothing."""
    paired = batch.group[[winner for winner, _ in pairs]]  # [P]
    return torch.isin(batch.group, paired)[batch.step_traj]


def skill(accuracies: list[float], num_pairs: list[int], window: int = WINDOW) -> float:
    """How far a PRM's credit is trusted, 0 to 1: how much better than chance it ranked the pairs of
    the last `window` iterations before it learnt from them, 2 * accuracy - 1, or 0 where it was no
    better. Before there have been as many iterations it is their share of it."""
    right = sum(accuracy * number for accuracy, number in zip(accuracies, num_pairs))
    known = len(num_pairs) / window
    return max(0.0, 2 * right / max(sum(num_pairs), 1) - 1) * known


def prm_statistics(
    batch, pairs, credited, rewards, episode_adv, step_adv, old_logprobs, init_logprobs, args, alpha
) -> dict:
    """Whether the PRM's credit means anything. rewards: r_phi; episode_adv: A^E; step_adv: A^S; [S]
    each; credited [S]: the steps that have any; old_logprobs, init_logprobs: log pi_old and log
    pi_init of tokens [K], the latter None where it is not known; alpha: the weight of A^S.

    credit_share: mean |alpha A^S| over mean |A^E|, in groups that have a pair. A correlation is
    Pearson's, over the credited steps. Each is None where it is not defined.

    log phi - log pi_old = (log phi - log pi_init) - (log pi_old - log pi_init), and each term can
    point elsewhere: phi_init_* and old_init_* say of the last two what pair_accuracy and
    advantage_progress_correlation say of the first."""
    mixed = in_mixed_group(batch, pairs)  # [S]
    of_outcomes = episode_adv[mixed].abs().sum().item()
    stats = {"alpha": alpha, "credit_share": None}
    if of_outcomes:
        stats["credit_share"] = alpha * step_adv[mixed].abs().sum().item() / of_outcomes

    seen = credited if credited.any() else torch.ones_like(credited)
    for q in (10, 50, 90):
        stats[f"reward_q{q}"] = rewards[seen].quantile(q / 100).item()
    stats["reward_abs"] = rewards[seen].abs().mean().item()

    lengths = torch.bincount(batch.step_traj)  # [N]
    turns = torch.cat([torch.arange(n) for n in lengths])  # [S]
    surprise = torch.zeros(len(turns)).index_add(0, batch.token_step, -old_logprobs)  # [S]
    against = {"turn": turns, "surprise": surprise, "progress": batch.progress}
    for name, values in against.items():
        stats[f"advantage_{name}_correlation"] = correlation(step_adv[seen], values[seen])
    sums = torch.zeros(len(lengths)).index_add(0, batch.step_traj, rewards)  # [N]
    ours = batch.step_traj[seen].unique()
    stats["score_length_correlation"] = correlation(sums[ours], lengths[ours])

    if init_logprobs is not None:
        moved = old_logprobs - init_logprobs  # [K]
        old_init = torch.zeros(len(turns)).index_add(0, batch.token_step, moved)  # [S]
        terms = {"old_init": old_init, "phi_init": rewards + args.beta * old_init}
        for name, values in terms.items():
            stats[f"{name}_accuracy"] = mean(ranked_right(values, batch, pairs))
            progress = batch.progress[seen]
            stats[f"{name}_progress_correlation"] = correlation(values[seen], progress)
    return stats


def correlation(x: torch.Tensor, y: torch.Tensor) -> float | None:
    """Pearson's correlation of two vectors; None where one of them does not vary."""
    if len(x) < 2:
        return None
    value = torch.corrcoef(torch.stack([x.double(), y.double()]))[0, 1].item()
    return value if value == value else None
