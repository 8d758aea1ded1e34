"""What the scripts log beside their losses, and what they conclude from it about a PRM."""

import torch


def mean_gap(logprobs: torch.Tensor, engine_logprobs: torch.Tensor) -> float:
    """The mean absolute difference between the trainer's and the engine's log-probabilities, [nats
    per token]."""
    return (logprobs.detach().cpu() - engine_logprobs).abs().mean().item()


def pair_statistics(sides: torch.Tensor, batch, pairs: list) -> dict:
    """What new episodes say about the PRM before it learns from them: how many pairs they make, the
    share of these that it ranks right (ties count half), and the share that length alone does; None
    without a pair. sides [2P]: the sums of rewards of each pair's winner and loser in turn."""
    stats = {"pairs": len(pairs), "pair_accuracy": None, "length_accuracy": None}
    if pairs:
        margins = sides[0::2] - sides[1::2]  # [P]
        lengths = torch.bincount(batch.step_traj)  # [N]
        winners, losers = torch.tensor(pairs).T
        stats["pair_accuracy"] = ((margins.sign() + 1) / 2).mean().item()
        stats["length_accuracy"] = (lengths[winners] < lengths[losers]).double().mean().item()
    return stats


def in_mixed_group(batch, pairs: list[tuple[int, int]]) -> torch.Tensor:
    """Whether a step's group has a pair, [S]: the others taught the PRM nothing."""
    paired = batch.group[[winner for winner, _ in pairs]]  # [P]
    return torch.isin(batch.group, paired)[batch.step_traj]


def skill(accuracies: list[float], num_pairs: list[int]) -> float:
    """How far a PRM's credit is trusted, 0 to 1: how much better than chance it ranked the pairs of
    recent iterations before it learnt from them, 2 * accuracy - 1, or 0 where it was no better."""
    right = sum(accuracy * number for accuracy, number in zip(accuracies, num_pairs))
    return max(0.0, 2 * right / max(sum(num_pairs), 1) - 1)


def prm_statistics(
    batch, pairs, credited, rewards, old_logprobs, episode_adv, step_adv, alpha: float
) -> dict:
    """Whether the PRM's credit means anything. rewards: r_phi; episode_adv: A^E; step_adv: A^S; [S]
    each; alpha: the weight of A^S; credited [S]: the steps that have any; old_logprobs: log pi_old
    of tokens [K].

    credit_share: mean |alpha A^S| over mean |A^E|, in groups that have a pair. A correlation is
    Pearson's, over the credited steps. Each is None where it is not defined."""
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
    return stats


def correlation(x: torch.Tensor, y: torch.Tensor) -> float | None:
    """Pearson's correlation of two vectors; None where one of them does not vary."""
    if len(x) < 2:
        return None
    value = torch.corrcoef(torch.stack([x.double(), y.double()]))[0, 1].item()
    return value if value == value else None
