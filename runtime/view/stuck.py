"""A run that cannot learn says so: once for each reason, in one line that names the flag."""

from runtime.view.terminal import warn

import torch

ROWS = 3  # iterations in a row after which it is said
REASONS = {  # column of metrics.jsonl: (its value where nothing can be learnt, what to say)
    "train/truncated": (
        1,
        "every episode ended because its context was full: a larger --max-context-tokens, a "
        "smaller --max-action-tokens or --history N makes room",
    ),
    "train/cut": (
        1,
        "every answer was cut at --max-action-tokens: a larger one lets it end, unless the model "
        "never writes the end of a turn that its chat template has",
    ),
    "train/valid_actions": (
        0,
        "no answer had a valid action: look at episodes.jsonl; the model does not know the "
        "format (warm_start.py), or --max-action-tokens is too small for it",
    ),
    "train/dead_groups": (
        1,
        "all episodes of every group had the same outcome, which teaches nothing: a higher "
        "--temperature, a larger --group-size or easier tasks",
    ),
    "prm/pairs": (
        0,
        "no two episodes of a group made a preference pair, so the PRM learns nothing: a smaller "
        "--pair-margin, a larger --group-size or a higher --temperature",
    ),
    "policy/moved": (
        0,
        "no weight of the policy changed: --learning-rate is below their precision, or 0",
    ),
}


def sample_of(network) -> list[torch.Tensor]:
    """The first weights of each tensor that a network trains, of this process's part."""
    parts = [getattr(p, "_local_tensor", p).detach() for p in network.trained]
    return [part.flatten()[:1024].clone() for part in parts]


def tell_if_stuck(rows: list[dict], told: set[str]) -> None:
    """Warn of each reason that holds in the last rows and is not in `told` yet."""
    last = [row for row in rows[-ROWS:] if row["iteration"]]
    for column, (value, advice) in REASONS.items():
        stuck = len(last) == ROWS and all(row.get(column) == value for row in last)
        if stuck and column not in told:
            told.add(column)
            warn(f"{ROWS} iterations in a row ({column} {value}): {advice}")
