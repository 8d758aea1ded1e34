"""A run that cannot learn says so: once for each reason, in one line that names the flag."""

from runtime.distributed import fsdp, processes
from runtime.view.terminal import warn

import torch

ROWS = 3  # iterations in a row after which it is said
FEW = 0.01  # share of the weights; so many are near enough to 0 to move at any learning rate
NO_PAIR = (
    lambda number, row: number == 0,
    "no outcomes of a group were far enough apart for a preference pair, so nothing is learnt from "
    "pairs: a larger --group-size, or a smaller --pair-margin if the script has one",
)
REASONS = {  # column of metrics.jsonl: (whether a row of this value teaches nothing, what to say)
    "train/truncated": (
        lambda share, row: share > 0.9,
        "nearly all episodes ended because the context was full: a larger --max-context-tokens, a "
        "smaller --max-action-tokens or --history N makes room",
    ),
    "train/cut": (
        lambda share, row: share == 1,
        "every answer was cut at --max-action-tokens: a larger one lets it end, unless the model "
        "never writes the end of a turn that its chat template has",
    ),
    "train/valid_actions": (
        lambda share, row: share == 0,
        "no answer had a valid action (episodes.jsonl has them): the model does not know the "
        "format, which warm_start.py teaches, or --max-action-tokens is too small for it",
    ),
    "train/dead_groups": (  # a critic, or a reward of steps, may teach all the same
        lambda share, row: share == 1 and not row.get("policy/credit", row.get("policy/grad_norm")),
        "all episodes of every group had the same outcome, which teaches no more than the format "
        "of answers: a higher --temperature, a larger --group-size or easier tasks",
    ),
    "prm/pairs": NO_PAIR,
    "policy/pairs": NO_PAIR,
}
for name, prefix in {"policy": "", "prm": "prm-", "critic": "critic-"}.items():
    flat = f"the {name}'s gradient is 0: equal outcomes, certain answers or --beta 0 (DPO, a PRM)"
    REASONS[grad := f"{name}/grad_norm"] = lambda norm, row: norm == 0, flat
    said = f"the {name}'s weights stay: --{prefix}learning-rate is 0, or below their precision"
    REASONS[f"{name}/moved"] = lambda share, row, grad=grad: share < FEW and row.get(grad), said


def cut_answers(trajectories: list, most: int, stop_ids) -> list[bool]:
    """Of each answer whether it was cut at `most` tokens, before a token that ends a turn."""
    found = []
    for t in trajectories:
        last = dict(zip(t.step_ids, t.token_ids))  # {step: the last token of its answer}
        long = [len(step.engine_logprobs) >= most for step in t.steps]
        found += [is_long and last[n] not in stop_ids for n, is_long in enumerate(long)]
    return found


def sample_of(network) -> list[torch.Tensor]:
    """The first weights of each tensor that a network trains; of a sharded one, of this part."""
    return [fsdp.local(p).detach().flatten()[:1024].clone() for p in network.trained]


def moved(network, before: list[torch.Tensor]) -> float:
    """The share of these weights (sample_of) that have moved since by 1e-9, in all processes."""
    changed = sum(((a - b).abs() > 1e-9).sum() for a, b in zip(before, sample_of(network)))
    changed, number = processes.total([float(changed), float(sum(map(len, before)))])
    return changed / number


def tell_if_stuck(rows: list[dict], told: set[str]) -> None:
    """Warn, unless it was told, of the first reason that holds: others may follow from it."""
    last = [row for row in rows[-ROWS:] if row["iteration"]]
    for column, (is_stuck, advice) in REASONS.items():
        values = [row.get(column) for row in last]
        if len(last) == ROWS and None not in values and all(map(is_stuck, values, last)):
            if column not in told:
                warn(f"{ROWS} iterations in a row ({column} {values[-1]:.3g}): {advice}")
            told.add(column)
            return
