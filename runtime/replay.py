"""What a process reward model learns from again: episodes of this and of earlier iterations."""

import random
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file, save_file


class PastStep(NamedTuple):
    """What runtime.data.flat_tensors asks of a step; a past one is needed for its tokens
    alone."""

    valid: bool = True
    progress: float = 0.0
    engine_logprobs: tuple = ()


@dataclass
class PastTrajectory:
    """An earlier episode as tokens: a script's Trajectory without texts and log-probabilities."""

    task: int  # the number of its group, whatever the task was
    token_ids: list[int]
    step_ids: list[int]
    starts: list[int]
    outcome: float
    steps: list[PastStep]
    pictures: list = field(default_factory=list)  # (place of its first token, PNG), if any


class Replay:
    """Groups of episodes that have a preference pair, as tokens: the last `most` of them, or with
    most 0 those of the last iteration alone.

    Groups are told apart by a number of their own, so that a task may come in two iterations. A
    checkpoint keeps them: a run that is taken up draws the same."""

    def __init__(self, most: int):
        self.most = most
        self.groups: list[list[PastTrajectory]] = []
        self.number = 0  # of the next group

    def add(self, trajectories: list, pairs: list[tuple[int, int]]) -> None:
        """Keep the groups of an iteration that have a pair; pairs index the trajectories."""
        if not self.most:
            self.groups = []
        for task in dict.fromkeys(trajectories[winner].task for winner, _ in pairs):
            self.groups.append([past(t, self.number) for t in trajectories if t.task == task])
            self.number += 1
        if self.most:
            del self.groups[: -self.most]

    def draw(self, number: int, parts: int) -> list[list[PastTrajectory]]:
        """The trajectories of groups drawn by lot and dealt into so many parts: half of `number`
        groups in each part, and in a single one all. Where there are not as many groups, all of
        them are drawn, and where there are not as many as parts, the parts are fewer.

        Whatever the parts, no more trajectories are drawn than `number` groups have: of more groups
        a share of each, those of the highest and of the lowest outcomes, at least two."""
        wanted = number * max(parts, 2) // 2
        drawn = random.sample(self.groups, min(wanted, len(self.groups)))
        shares = [extremes(group, len(group) * number // len(drawn)) for group in drawn]
        dealt = [shares[part::parts] for part in range(min(parts, len(drawn)))]
        return [[t for group in part for t in group] for part in dealt]

    # ------------ checkpoints ------------

    def save(self, path: Path) -> None:
        """Write all of it: a row for each trajectory, the tokens of all, each picture once."""
        kept = [t for group in self.groups for t in group]
        pngs = list(dict.fromkeys(png for t in kept for _, png in t.pictures))
        number_of = {png: number for number, png in enumerate(pngs)}
        seen = [(place, number_of[png]) for t in kept for place, png in t.pictures]
        sizes = [
            [t.task, len(t.token_ids), len(t.starts), len(t.steps), len(t.pictures)] for t in kept
        ]
        tensors = {
            "number": torch.tensor(self.number),
            "sizes": torch.tensor(sizes, dtype=torch.long).reshape(-1, 5),
            "outcomes": torch.tensor([t.outcome for t in kept], dtype=torch.float64),
            "starts": torch.tensor([i for t in kept for i in t.starts], dtype=torch.int32),
            "token_ids": torch.tensor([i for t in kept for i in t.token_ids], dtype=torch.int32),
            "step_ids": torch.tensor([i for t in kept for i in t.step_ids], dtype=torch.int32),
            "pictures": torch.tensor(seen, dtype=torch.int32).reshape(-1, 2),
            "png_sizes": torch.tensor([len(png) for png in pngs], dtype=torch.long),
            "pngs": torch.tensor(list(b"".join(pngs)), dtype=torch.uint8),
        }
        save_file(tensors, path)

    def load(self, path: Path) -> None:
        """Take up what save wrote."""
        tensors = load_file(path)
        data = iter(bytes(tensors["pngs"].tolist()))
        pngs = [bytes(islice(data, size)) for size in tensors["png_sizes"].tolist()]
        pictures = iter([(place, pngs[number]) for place, number in tensors["pictures"].tolist()])
        starts, ids, steps = (
            iter(tensors[name].tolist()) for name in ("starts", "token_ids", "step_ids")
        )
        self.number, self.groups = int(tensors["number"]), []
        for (task, tokens, parts, count, shown), outcome in zip(
            tensors["sizes"].tolist(), tensors["outcomes"].tolist()
        ):
            t = PastTrajectory(
                task=task,
                token_ids=list(islice(ids, tokens)),
                step_ids=list(islice(steps, tokens)),
                starts=list(islice(starts, parts)),
                outcome=outcome,
                steps=[PastStep()] * count,
                pictures=list(islice(pictures, shown)),
            )
            if not self.groups or self.groups[-1][0].task != task:
                self.groups.append([])
            self.groups[-1].append(t)


def past(t, number: int) -> PastTrajectory:
    """A script's Trajectory as a member of the group of this number."""
    steps = [PastStep()] * len(t.steps)
    return PastTrajectory(
        number, t.token_ids, t.step_ids, t.starts, t.outcome, steps, list(t.pictures)
    )


def extremes(group: list[PastTrajectory], most: int) -> list[PastTrajectory]:
    """At most so many of a group, but two: those of the lowest and of the highest outcomes, half
    each, and among equal ones by lot."""
    if len(group) <= max(most, 2):
        return group
    by_outcome = sorted(random.sample(group, len(group)), key=lambda t: t.outcome)
    low = max(most, 2) // 2
    return by_outcome[:low] + by_outcome[low - max(most, 2) :]
