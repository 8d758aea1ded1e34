"""When can credit that is learnt from outcomes help? Crossings without a network, in a minute.

    python benchmarks/tabular_credit.py

A policy with a table of logits plays envs/crossings.py's game: at some of 16 crossings the sign
decides, and a walk succeeds with enough right answers. RLOO (none), RLOO with an implicit PRM (prm:
a table too, pi_old times exp(D), fitted by trajectory DPO to past groups, scored before it learns,
trusted by its skill), and RLOO with the true credit (truth) learn with Adam at several rates.
Nothing generalises here, so what the PRM adds is what it knows sooner than the policy. A row has
the success after so many iterations, the mean over --seeds seeds that learn side by side, with the
standard error of the last; the last line of a rate has the share of truth's gain over none that
prm has, where that gain is at least 0.1.
"""

import argparse
from pathlib import Path

import torch
from torch.nn.functional import logsigmoid, one_hot
from torch.optim import Adam

RESULTS = Path(__file__).resolve().parent / "results"
SIGNS, WAYS, TURNS, GUARDED, NEEDED, GROUPS, SIZE = 40, 2, 16, 10, 7, 4, 8
SHOWN = (0, 10, 20, 30, 40, 50, 60)


class World:
    """Walks of `seeds` worlds at once. A cell is a sign at a guarded place, or one elsewhere."""

    def __init__(self, seeds: int):
        self.draw = torch.Generator().manual_seed(0)
        self.seeds = torch.arange(seeds)[:, None, None, None]
        self.right = torch.randint(WAYS, (seeds, 2 * SIGNS), generator=self.draw)

    def of(self, table, cells):
        """The entries of table [B, cells, ...] for cells [B, N, G, T]."""
        return table[self.seeds, cells]

    def play(self, logits, groups: int, size: int):
        """(cells, answers, right, outcomes): [B, N, G, T] each, the outcomes [B, N, G]."""
        shape = len(logits), groups, TURNS
        signs = torch.randint(SIGNS, shape, generator=self.draw)
        order = torch.rand(shape, generator=self.draw).argsort(-1)
        cells = (signs + SIGNS * (order >= GUARDED))[:, :, None].expand(-1, -1, size, -1)
        chances = self.of(logits.softmax(-1), cells).cumsum(-1)
        thrown = torch.rand(*cells.shape, 1, generator=self.draw)
        answers = (chances < thrown).sum(-1).clamp(max=WAYS - 1)
        right = (answers == self.of(self.right, cells)) & (cells < SIGNS)
        return cells, answers, right, (right.sum(-1) >= NEEDED).float()


def pairs_of(sums, outcomes):
    """(margins, which of them are pairs), [B, N, G, G] from [B, N, G]."""
    better = outcomes[..., :, None] > outcomes[..., None, :]
    return sums[..., :, None] - sums[..., None, :], better.float()


def train(credit: str, rate: float, seeds: int) -> torch.Tensor:
    """Success by seed and iteration of SHOWN, [B, 7]."""
    world = World(seeds)
    logits = torch.zeros(seeds, 2 * SIGNS, WAYS)
    known = torch.zeros_like(logits, requires_grad=True)  # log pi_phi - log pi_old, up to a norm
    policy_adam, prm_adam, past, shown = Adam([logits], rate), Adam([known], 0.1), [], []
    ranked = torch.zeros(seeds, 2)  # pairs of recent iterations: right ones, all

    def rewards(cells, answers):
        new = (logits + known).log_softmax(-1) - logits.log_softmax(-1)
        return world.of(new, cells).gather(-1, answers[..., None])[..., 0]

    for iteration in range(SHOWN[-1] + 1):
        if iteration in SHOWN:
            shown.append(world.play(logits, 100, SIZE)[-1].mean((1, 2)))
        cells, answers, right, outcomes = world.play(logits, GROUPS, SIZE)
        others = (outcomes.sum(2, keepdim=True) - outcomes) / (SIZE - 1)
        advantages = (outcomes - others)[..., None].expand(*cells.shape)  # RLOO

        if credit == "truth":
            chance = world.of(logits.softmax(-1), cells)
            chance = chance.gather(-1, world.of(world.right, cells)[..., None])[..., 0]
            steps, trust = torch.where(cells < SIGNS, right.float() - chance, 0.0), 1.0
        if credit == "prm":
            with torch.no_grad():
                steps = rewards(cells, answers)
            margins, pairs = pairs_of(steps.sum(-1), outcomes)
            now = [((margins > 0) * pairs).sum((1, 2, 3)), pairs.sum((1, 2, 3))]
            ranked = 0.8 * ranked + torch.stack(now, -1)
            accuracy = ranked[:, 0] / ranked[:, 1].clamp(min=1)
            trust = (2 * accuracy - 1).clamp(min=0)[:, None, None, None]
            past.append((cells, answers, outcomes))
            for _ in range(2):  # steps of trajectory DPO, each on GROUPS past groups
                every = [torch.cat(parts, 1) for parts in zip(*past)]
                drawn = torch.randperm(every[0].shape[1], generator=world.draw)[:GROUPS]
                old_cells, old_answers, old_outcomes = (x[:, drawn] for x in every)
                of_steps = rewards(old_cells, old_answers)
                margins, pairs = pairs_of(of_steps.sum(-1), old_outcomes)
                loss = -(logsigmoid(margins) * pairs).sum((1, 2, 3))
                loss = loss / pairs.sum((1, 2, 3)).clamp(min=1)
                prm_adam.zero_grad()
                (loss + 0.1 * of_steps.square().mean((1, 2, 3))).sum().backward()
                prm_adam.step()
        if credit != "none":
            spread = steps.square().mean((1, 2, 3), keepdim=True).sqrt().clamp(min=1e-6)
            advantages = advantages + trust * (steps / spread).clamp(-3, 3)

        score = one_hot(answers, WAYS) - world.of(logits.softmax(-1), cells)
        gradient = torch.zeros_like(logits).view(seeds, -1)
        places = (cells[..., None] * WAYS + torch.arange(WAYS)).reshape(seeds, -1)
        weighted = (score * advantages[..., None]).reshape(seeds, -1)
        gradient.scatter_add_(1, places, -weighted / cells[0].numel())
        logits.grad = gradient.view_as(logits)
        policy_adam.step()
    return torch.stack(shown, 1)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=32)
    seeds = parser.parse_args().seeds
    torch.set_num_threads(1)
    titles = ["rate", "credit", *[f"{iteration}" for iteration in SHOWN]]
    lines = [f"| {' | '.join(titles)} |", f"|{'---|' * len(titles)}"]
    for rate in (0.02, 0.03, 0.05, 0.1, 0.2, 0.4):
        found = {credit: train(credit, rate, seeds) for credit in ("none", "prm", "truth")}
        means = {credit: success.mean(0) for credit, success in found.items()}
        for credit, success in found.items():
            error = success[:, -1].std().item() / seeds**0.5
            cells = [f"{mean:.3f}" for mean in means[credit].tolist()]
            lines.append(f"| {rate} | {credit} | {' | '.join(cells)} ({error:.3f}) |")
        gaps = [(means[credit] - means["none"]).tolist() for credit in ("prm", "truth")]
        cells = [f"{prm / truth:.2f}" if truth >= 0.1 else "" for prm, truth in zip(*gaps)]
        lines.append(f"| {rate} | share | {' | '.join(cells)} |")
    table = "\n".join(lines) + "\n"
    (RESULTS / "tabular-credit.md").write_text(table)
    print(table)


if __name__ == "__main__":
    main()
