"""The vision tower's attention with a call for each length of window, as it is, against a call for
each window, as transformers has it.

    python benchmarks/tower_attention.py

In turn, each way computes the features of --pictures pictures of noise and their gradient, with the
weights of models/tiny-visual-sokoban:

    rooms      6 x 6 patches, as VisualSokoban's; both layers attend to whole pictures
    windows    10 x 10 patches; the first layer attends within windows of 3 x 3, cut at the edges
    sizes      as windows, with pictures of 10 x 10, 7 x 9 and 6 x 6 patches in turn

Calls are those of torch's attention in a forward pass; seconds are of processor time, forward and
backward together. The ratio is the mean of those of --repeats repeats, with its 95 % interval
(Student's t). Differences are the largest of an output, and of a parameter's gradient over its
norm. Exits with 1 where they are above 1e-6. Written: benchmarks/results/tower-attention.md.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

from throughput import ROOT

sys.path.insert(0, str(ROOT))
from runtime.models import read_seeing_model
from runtime.vision.pictures import BY_LENGTH
from sweeps.results import half_width

import torch

MODEL = str(ROOT / "models" / "tiny-visual-sokoban")
WAYS = "sdpa", BY_LENGTH  # each window, each length
CASES = {"rooms": [(6, 6)], "windows": [(10, 10)], "sizes": [(10, 10), (7, 9), (6, 6)]}


class Tower:
    """A tower, pictures, and what its passes over them cost."""

    def __init__(self, case: str, pictures: int):
        causal = read_seeing_model(MODEL, MODEL, {"dtype": torch.float32})
        self.causal, self.tower, self.calls = causal, causal.base_model.visual, 0
        if case != "rooms":
            self.tower.fullatt_block_indexes = [1]
            self.tower.window_size = 3 * self.tower.patch_size
        sizes = CASES[case]
        grids = [(1, *sizes[number % len(sizes)]) for number in range(pictures)]
        self.grids = torch.tensor(grids)
        torch.manual_seed(0)
        numbers = self.tower.patch_embed.proj.weight[0].numel()
        self.patches = torch.randn(int(self.grids.prod(1).sum()), numbers)
        self.attention = torch.nn.functional.scaled_dot_product_attention

    def counted(self, *given, **options):
        self.calls += 1
        return self.attention(*given, **options)

    def one_pass(self, way: str) -> tuple[float, torch.Tensor, list[torch.Tensor]]:
        """(processor seconds, features, gradients)."""
        self.causal.set_attn_implementation({"vision_config": way})
        self.tower.zero_grad()
        begun = time.process_time()
        features = self.tower(self.patches, self.grids).pooler_output
        features.square().mean().backward()
        seconds = time.process_time() - begun
        return seconds, features.detach(), [p.grad.clone() for p in self.tower.parameters()]


def row_of(case: str, arguments) -> tuple[list, float]:
    """(the case's cells, the largest difference between the ways)."""
    tower, calls, found = Tower(case, arguments.pictures), [], []
    torch.nn.functional.scaled_dot_product_attention = tower.counted
    for way in WAYS:  # which also warms up
        before = tower.calls
        found.append(tower.one_pass(way)[1:])
        calls.append(tower.calls - before)
    torch.nn.functional.scaled_dot_product_attention = tower.attention

    seconds = {way: [] for way in WAYS}
    for repeat in range(arguments.repeats):
        for way in WAYS if repeat % 2 else WAYS[::-1]:
            seconds[way].append(tower.one_pass(way)[0])
    ratios = [ours / loop for loop, ours in zip(*seconds.values())]

    (loop, of_loop), (ours, of_ours) = found
    output = (ours - loop).abs().max().item()
    gradient = max(((b - a).norm() / a.norm()).item() for a, b in zip(of_loop, of_ours))
    times = [f"{statistics.median(seconds[way]):.3f}" for way in WAYS]
    ratio = f"{statistics.mean(ratios):.3f} ± {half_width(ratios):.3f}"
    cells = [case, *map("{:,}".format, calls), *times, ratio, f"{output:.0e}", f"{gradient:.0e}"]
    return cells, max(output, gradient)


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--pictures", type=int, default=128, help="in a pass")
    parser.add_argument("--repeats", type=int, default=10, help="of each way, two or more")
    results = ROOT / "benchmarks" / "results"
    parser.add_argument("--out", type=Path, default=results, help="directory of the table")
    arguments = parser.parse_args()

    titles = ["pictures", "calls, each window", "calls, each length", "seconds, each window"]
    titles += ["seconds, each length", "ratio", "output differs", "gradient differs"]
    rows = [row_of(case, arguments) for case in CASES]
    threads = torch.get_num_threads()
    lines = [f"`{' '.join(['python benchmarks/tower_attention.py', *sys.argv[1:]])}`", ""]
    lines += [f"{arguments.pictures} pictures, two layers, float32; CPU, threads: {threads}", ""]
    lines += [f"| {' | '.join(titles)} |", f"|{'---|' * len(titles)}"]
    lines += [f"| {' | '.join(cells)} |" for cells, _ in rows]
    print("\n".join(lines))
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "tower-attention.md").write_text("\n".join(lines) + "\n")
    sys.exit(any(differ > 1e-6 for _, differ in rows))


if __name__ == "__main__":
    main()
