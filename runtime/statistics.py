"""What the scripts log beside their losses."""

import torch


def mean_gap(logprobs: torch.Tensor, engine_logprobs: torch.Tensor) -> float:
    """The mean absolute difference between the trainer's and the engine's log-probabilities, [nats
    per token]."""
    return (logprobs.detach().cpu() - engine_logprobs).abs().mean().item()


def prm_learning(updates: list[dict]) -> dict:
    """What is logged of an iteration's PRM updates: the numbers of the first, which saw pairs that
    nothing had been learnt from, and how many of all were skipped. Without any: None each."""
    if not updates:
        return dict.fromkeys(["loss", "pair_accuracy", "margin", "grad_norm"])
    return updates[0] | {"skipped": sum(update["skipped"] for update in updates)}


def prm_statistics(batch, pairs, scored, rewards, step_adv, prm_logprobs, old_logprobs) -> dict:
    """Whether the PRM's credit means anything: what else ranks the pairs, and what A^S goes along
    with, over the steps that were scored.

    rewards: r_phi; step_adv: A^S; prm_logprobs and old_logprobs: log pi_phi and log pi_old of
    steps; [S] each. A correlation is Pearson's, or None where it is not defined."""
    if not scored.any():
        scored = torch.ones_like(scored)
    lengths = torch.bincount(batch.step_traj)  # [N]
    turns = torch.cat([torch.arange(n) for n in lengths])  # [S]
    drift = prm_logprobs - old_logprobs  # [S]

    stats = {"pairs": len(pairs), "length_accuracy": None}
    if pairs:  # how well length alone ranks them
        shorter = [int(lengths[winner] < lengths[loser]) for winner, loser in pairs]
        stats["length_accuracy"] = sum(shorter) / len(pairs)
    for q in (10, 50, 90):
        stats[f"reward_q{q}"] = rewards[scored].quantile(q / 100).item()
    stats["drift"] = drift[scored].mean().item()  # [nats per step]
    stats["drift_abs"] = drift[scored].abs().mean().item()

    credit = step_adv[scored]
    stats["advantage_turn_correlation"] = correlation(credit, turns[scored])
    stats["advantage_surprise_correlation"] = correlation(credit, -old_logprobs[scored])
    stats["advantage_progress_correlation"] = correlation(credit, batch.progress[scored])
    sums = torch.zeros(len(lengths)).index_add(0, batch.step_traj, rewards)  # [N]
    seen = batch.step_traj[scored].unique()
    stats["score_length_correlation"] = correlation(sums[seen], lengths[seen])
    return stats


def correlation(x: torch.Tensor, y: torch.Tensor) -> float | None:
    """Pearson's correlation of two vectors; None where one of them does not vary."""
    if len(x) < 2:
        return None
    value = torch.corrcoef(torch.stack([x.double(), y.double()]))[0, 1].item()
    return value if value == value else None
