"""Episodes as tokens: from what was said, turn by turn, to flat tensors and micro-batches. N
trajectories, S steps and K action tokens are numbered; index tensors say what belongs to what."""

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import NamedTuple

from runtime.distributed import fsdp, processes

import torch
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

FEW = 4  # sequences that go in one pass, with padding

Places = list[tuple[int, bytes]]  # (place of its first token, PNG) of each picture of a sequence


class Context(list):
    """Token ids of a sequence, with the pictures that its image tokens stand for. over: so many
    tokens before it are left out where it is joined to them (--drop-thoughts)."""

    def __init__(self, ids: list[int], pictures: Places, over: int = 0):
        super().__init__(ids)
        self.pictures, self.over = pictures, over


def pictures_of(ids: list[int]) -> Places:
    return getattr(ids, "pictures", [])


def joined(parts: list[list[int]]) -> list[int]:
    """One sequence of several: a list, or a Context where that says more."""
    ids, pictures, over = [], [], 0
    for part in parts:
        kept = len(ids) - getattr(part, "over", 0)
        ids, over = ids[: max(kept, 0)], over - min(kept, 0)
        pictures += [(len(ids) + place, png) for place, png in pictures_of(part)]
        ids += part
    return Context(ids, pictures, over) if pictures or over else ids


class Seen(str):
    """What the agent sees: words, and the PNG of a picture beside them, if the world shows any."""

    picture: bytes | None = None


@dataclass
class Step:
    """One answer of the agent; from `valid` on, what the world says of it (envs/README.md)."""

    observation: str  # the environment's words before the answer
    action: str  # the whole answer
    engine_logprobs: list[float]  # of each sampled token, at the sampling temperature [nats]
    valid: bool = True
    success: bool = False
    score: float = 0.0
    game_reward: float = 0.0  # what the game itself pays for this step
    progress: float = 0.0  # by how much the goal came nearer, if the world knows
    anchor: Hashable = None  # the state after the answer: equal states, equal anchors


@dataclass
class Trajectory:
    """An episode as tokens: the ids that the engine saw and sampled, never tokenised again. Where a
    context does not continue the one before (--history, --drop-thoughts), a new sequence starts."""

    task: int  # trajectories of one task form a group
    token_ids: list[int] = field(default_factory=list)  # [T] prompt, action, observation, ...
    step_ids: list[int] = field(default_factory=list)  # [T] the step of an action's token; else -1
    outcome: float = 0.0  # r_o
    steps: list[Step] = field(default_factory=list)
    starts: list[int] = field(default_factory=lambda: [0])  # first token of each of its sequences
    truncated: bool = False  # ended because --max-context-tokens had no room for another answer
    pictures: Places = field(default_factory=list)
    anchor: Hashable = None  # the state before the first step, as Step.anchor has it

    def append(self, context: list[int], action: list[int]) -> None:
        """The tokens of the next step: the context that the engine saw, and what it sampled."""
        known = len(self.token_ids) - self.starts[-1]
        if self.token_ids[self.starts[-1] :] != context[:known]:
            self.starts.append(len(self.token_ids))
            known = 0
        new = [(place, png) for place, png in pictures_of(context) if place >= known]
        self.pictures += [(self.starts[-1] + place, png) for place, png in new]
        words = context[known:]
        self.token_ids += words + action
        self.step_ids += [-1] * len(words) + [len(self.steps)] * len(action)

    @property
    def success(self) -> bool:
        return bool(self.steps) and self.steps[-1].success

    @property
    def score(self) -> float:
        return self.steps[-1].score if self.steps else 0.0  # how well it went, 0 to 1


class Sequence(NamedTuple):
    """What one row of a forward pass reads."""

    ids: torch.Tensor  # [T]
    is_action: torch.Tensor  # [T]
    tokens: torch.Tensor  # [k] the places of its action tokens among the batch's K
    pictures: list = ()  # (place of its first token, PNG) of each, where the world shows pictures


class Batch(NamedTuple):
    """Trajectories as flat tensors; what belongs together are neighbours."""

    sequences: list  # [Sequence] what the forward passes read
    outcomes: torch.Tensor  # [N]
    group: torch.Tensor  # [N] the group of a trajectory: those of one task
    step_traj: torch.Tensor  # [S] the trajectory of a step
    token_step: torch.Tensor  # [K] the step of an action token
    invalid: torch.Tensor  # [S] the answer had no valid action
    engine_logprobs: torch.Tensor  # [K]
    progress: torch.Tensor  # [S] a ground truth that no algorithm sees

    @property
    def num_steps(self) -> int:
        return len(self.step_traj)


def flatten(trajectories: list[Trajectory]) -> Batch:
    """Number groups, trajectories, steps and action tokens through the batch, in their order."""
    tasks = list(dict.fromkeys(t.task for t in trajectories))
    steps = [step for t in trajectories for step in t.steps]
    sequences, step_traj, token_step = [], [], []
    for number, t in enumerate(trajectories):
        for start, end in zip(t.starts, [*t.starts[1:], len(t.token_ids)]):
            acting = [len(step_traj) + step for step in t.step_ids[start:end] if step >= 0]
            is_action = torch.tensor([step >= 0 for step in t.step_ids[start:end]])
            tokens = torch.arange(len(token_step), len(token_step) + len(acting))
            pictures = [(at - start, png) for at, png in t.pictures if start <= at < end]
            ids = torch.tensor(t.token_ids[start:end])
            sequences.append(Sequence(ids, is_action, tokens, pictures))
            token_step += acting
        step_traj += [number] * len(t.steps)
    return Batch(
        sequences,
        outcomes=torch.tensor([float(t.outcome) for t in trajectories]),
        group=torch.tensor([tasks.index(t.task) for t in trajectories]),
        step_traj=torch.tensor(step_traj),
        token_step=torch.tensor(token_step),
        invalid=torch.tensor([not step.valid for step in steps]),
        engine_logprobs=torch.tensor([x for step in steps for x in step.engine_logprobs]),
        progress=torch.tensor([float(step.progress) for step in steps]),
    )


class MicroBatch(NamedTuple):
    """Sequences that pass through a model together, padded on the right: s steps, k tokens."""

    ids: torch.Tensor  # [B, T]
    is_action: torch.Tensor  # [B, T]
    tokens: torch.Tensor  # [k] the places of the action tokens among the batch's K
    steps: torch.Tensor  # [s] the places of their steps among the batch's S
    token_step: torch.Tensor  # [k] the step of an action token, among these s
    pictures: list = ()  # (row, place of its first token, PNG) of each

    @property
    def num_steps(self) -> int:
        return len(self.steps)


def sum_per_step(values: torch.Tensor, batch: Batch | MicroBatch) -> torch.Tensor:
    """Sums over the action tokens of each step: [S] of values [K], or [s] of values [k]."""
    sums = values.new_zeros(batch.num_steps)
    return sums.index_add(0, batch.token_step.to(values.device), values)


def micro_batches(batch: Batch, args, only=None, label: str = "micro-batches"):
    """Yield this process's micro-batches, under a bar: sequences of similar length, at most
    --micro-batch-tokens with their padding. only: [S]; a sequence takes part where any of its steps
    does. With sharded weights a process that has fewer gets some without steps."""
    sequences = batch.sequences
    if only is not None:
        wanted = only[batch.token_step]  # [K]
        sequences = [s for s in sequences if wanted[s.tokens].any()]
    packs, count = pack(sequences, args.run_args.micro_batch_tokens), processes.count()
    mine, most = packs[processes.rank() :: count], -(-len(packs) // count)
    for sequences in tqdm(mine, label, leave=False, disable=None):
        yield padded(sequences, batch)
    for _ in range(most - len(mine) if fsdp.wanted() else 0):
        yield nothing(batch)


def pack(sequences: list[Sequence], budget: int) -> list[list[Sequence]]:
    """Sequences of similar length together, none a fifth shorter than the longest, at most `budget`
    tokens with their padding, or one sequence; a few whatever their length."""
    if 0 < len(sequences) <= FEW and len(sequences) * max(len(s.ids) for s in sequences) <= budget:
        return [sequences]
    packs: list[list[Sequence]] = []
    for sequence in sorted(sequences, key=lambda s: -len(s.ids)):
        longest = len(packs[-1][0].ids) if packs else 0
        full = not packs or longest * (len(packs[-1]) + 1) > budget
        if full or len(sequence.ids) < 0.8 * longest:
            packs.append([])
        packs[-1].append(sequence)
    return packs


def padded(sequences: list[Sequence], batch: Batch) -> MicroBatch:
    tokens = torch.cat([s.tokens for s in sequences])  # [k]
    steps, token_step = batch.token_step[tokens].unique(return_inverse=True)  # [s], [k]
    ids = pad_sequence([s.ids for s in sequences], batch_first=True)
    is_action = pad_sequence([s.is_action for s in sequences], batch_first=True)
    pictures = [(row, *picture) for row, s in enumerate(sequences) for picture in s.pictures]
    return MicroBatch(ids, is_action, tokens, steps, token_step, pictures)


def nothing(batch: Batch) -> MicroBatch:
    """A micro-batch without steps: a forward and a backward pass that change nothing."""
    first = batch.sequences[0]
    ids = first.ids if first.pictures else first.ids[:2]  # a tower's weights are gathered too
    return padded([Sequence(ids, ids < 0, ids[:0], first.pictures)], batch)  # none is an action
