"""Sequences of similar length together, in the memory of --micro-batch-tokens; no result
changes."""

from typing import NamedTuple

from runtime.distributed import processes
from runtime.networks import Network, action_logprobs, plain

import torch
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm


class Sequence(NamedTuple):
    """What one row of a forward pass reads: an episode, or with --history a step and the turns
    before it."""

    ids: torch.Tensor  # [T]
    steps: torch.Tensor  # [T] the step, of the batch's S, whose action a token belongs to; else -1
    tokens: torch.Tensor  # [k] the places of its action tokens among the batch's K
    pictures: list = ()  # (place of its first token, PNG) of each, where the world shows pictures


class MicroBatch(NamedTuple):
    """Sequences that pass through a model together, padded on the right."""

    ids: torch.Tensor  # [B, T]
    steps: torch.Tensor  # [B, T] as a sequence's; -1 where it is padded
    tokens: torch.Tensor  # [k] the places of the action tokens among the batch's K
    lengths: torch.Tensor  # [B] of the rows, without their padding
    pictures: list = ()  # (row, place of its first token, PNG) of each
    recompute: bool = False  # its graph has no room: it is computed again in the backward pass


def flat_tensors(trajectories: list) -> dict:
    """A batch's fields: N trajectories, S steps and K action tokens, numbered in their order.

    sequences (what the forward passes read), outcomes [N], group [N], step_traj [S], token_step
    [K], invalid [S], engine_logprobs [K], progress [S]. What belongs together are neighbours."""
    tasks = list(dict.fromkeys(t.task for t in trajectories))
    steps = [step for t in trajectories for step in t.steps]
    sequences, step_traj, token_step = [], [], []
    for number, t in enumerate(trajectories):
        for start, end in zip(t.starts, [*t.starts[1:], len(t.token_ids)]):
            numbered = [len(step_traj) + s if s >= 0 else -1 for s in t.step_ids[start:end]]
            acting = [s for s in numbered if s >= 0]
            tokens = torch.arange(len(token_step), len(token_step) + len(acting))
            ids = torch.tensor(t.token_ids[start:end])
            pictures = [(at - start, png) for at, png in t.pictures if start <= at < end]
            sequences.append(Sequence(ids, torch.tensor(numbered), tokens, pictures))
            token_step += acting
        step_traj += [number] * len(t.steps)

    return {
        "sequences": sequences,
        "outcomes": torch.tensor([float(t.outcome) for t in trajectories]),
        "group": torch.tensor([tasks.index(t.task) for t in trajectories]),
        "step_traj": torch.tensor(step_traj),
        "token_step": torch.tensor(token_step),
        "invalid": torch.tensor([not step.valid for step in steps]),
        "engine_logprobs": torch.tensor([x for step in steps for x in step.engine_logprobs]),
        "progress": torch.tensor([step.progress for step in steps]),
    }


def padded(sequences: list[Sequence], recompute: bool = False) -> MicroBatch:
    return MicroBatch(
        ids=pad_sequence([s.ids for s in sequences], batch_first=True),
        steps=pad_sequence([s.steps for s in sequences], batch_first=True, padding_value=-1),
        tokens=torch.cat([s.tokens for s in sequences]),
        lengths=torch.tensor([len(s.ids) for s in sequences]),
        pictures=[(row, *picture) for row, s in enumerate(sequences) for picture in s.pictures],
        recompute=recompute,
    )


def pack(sequences: list[Sequence], budget: int) -> list[list[Sequence]]:
    """Sequences of similar length together, none a fifth shorter than the longest, at most `budget`
    tokens with their padding, or one sequence."""
    packs: list[list[Sequence]] = []
    for sequence in sorted(sequences, key=lambda s: -len(s.ids)):
        longest = len(packs[-1][0].ids) if packs else 0
        full = not packs or longest * (len(packs[-1]) + 1) > budget
        if full or len(sequence.ids) < 0.8 * longest:
            packs.append([])
        packs[-1].append(sequence)
    return packs


def micro_batches(network: Network, batch, args, only=None, label: str = ""):
    """Yield this process's micro-batches of the batch; with a label, under a progress bar.

    only: [S], or the length of whatever batch.token_step numbers; a sequence takes part where any
    of its actions does. None: all do. Of a sharded network the weights are gathered by all
    processes at once: one that has fewer micro-batches takes part in the others' with a token and
    no result."""
    sequences = batch.sequences
    if only is not None:
        wanted = only[batch.token_step]  # [K]
        sequences = [s for s in sequences if wanted[s.tokens].any()]

    packs = pack(sequences, args.run_args.micro_batch_tokens)
    mine = processes.my_part(packs)
    hidden_bar = None if label else True
    for sequences in tqdm(mine, label, leave=False, disable=hidden_bar):
        yield padded(sequences)

    missing = processes.most_parts(packs) - len(mine)
    for _ in range(missing if processes.is_sharded(plain(network.model)) else 0):
        logprobs = action_logprobs(network, nothing(batch), args)  # [0]
        if torch.is_grad_enabled():
            logprobs.sum().backward()


def nothing(batch) -> MicroBatch:
    """A forward pass without a result, of a process that has nothing to do while others have."""
    first = batch.sequences[0]
    ids = torch.zeros(2, dtype=torch.long)
    if first.pictures:  # the tower's weights are gathered too
        ids = first.ids
    return padded([Sequence(ids, torch.full_like(ids, -1), ids[:0], first.pictures)])


@torch.no_grad()
def batch_logprobs(network, batch, args, only=None, label="log-probabilities") -> torch.Tensor:
    """action_logprobs of the whole batch, [K] on the CPU; 0 for sequences of which no step is in
    only [S]."""
    logprobs = torch.zeros(len(batch.token_step))
    for micro in micro_batches(network, batch, args, only, label):
        logprobs[micro.tokens] = action_logprobs(network, micro, args).cpu()
    return processes.total(logprobs)


def pair_bundles(batch, pairs: list[tuple[int, int]], args):
    """Yield (pairs, their micro-batches) of this process, under a progress bar: what a loss over
    pairs has to see at once.

    No pair leaves its group, so a bundle is whole groups, as many as --micro-batch-tokens hold, or
    one. The graphs of as many tokens wait for the loss; what a large group has beyond is computed
    again. Trajectories that stand in no pair are left out. Where weights are divided all processes
    have as many bundles and as many micro-batches in them, if need be without a pair or a result,
    and none is computed again: the weights are gathered by all at once."""
    budget, together = args.run_args.micro_batch_tokens, processes.sharded()
    bundles = group_bundles(batch, pairs, budget)
    mine = processes.my_part(bundles)
    mine += [([], [])] * ((processes.most_parts(bundles) - len(mine)) * together)
    most = 0  # micro-batches of a bundle, where all processes have to make as many
    if together:
        most = max((len(pack(sequences, budget)) for _, sequences in bundles), default=0)
    for bundle_pairs, sequences in tqdm(mine, "PRM", leave=False, disable=None):
        held, micros = 0, []
        for packed in pack(sequences, budget):
            held += len(packed) * len(packed[0].ids)
            micros.append(padded(packed, recompute=held > budget and not together))
        yield bundle_pairs, micros + [nothing(batch)] * max(0, most - len(micros))


def group_bundles(batch, pairs: list[tuple[int, int]], budget: int) -> list:
    """[(pairs, sequences)] of whole groups, as many as `budget` tokens hold, or of one group."""
    compared = {trajectory for pair in pairs for trajectory in pair}
    by_group: dict[int, list[Sequence]] = {}
    for sequence in batch.sequences:
        trajectory = int(batch.step_traj[sequence.steps.max()])
        if trajectory in compared:
            by_group.setdefault(int(batch.group[trajectory]), []).append(sequence)

    bundles, room = [], 0
    for group in sorted(by_group):
        sequences = by_group[group]
        group_pairs = [pair for pair in pairs if batch.group[pair[0]] == group]
        size = sum(len(s.ids) for s in sequences)
        if not bundles or size > room:
            bundles.append(([], []))
            room = budget
        bundles[-1][0].extend(group_pairs)
        bundles[-1][1].extend(sequences)
        room -= size
    return bundles


def average(seen: list[tuple[int, dict]], names: list[str]) -> dict:
    """Means of these statistics, from (weight, {name: value}) of what each process has seen. None
    where nothing was seen."""
    sums = [sum(weight * stats[name] for weight, stats in seen) for name in names]
    *sums, weight = processes.total([*sums, sum(weight for weight, _ in seen)])
    return {name: value / weight if weight else None for name, value in zip(names, sums)}
