"""What pictures cost: an iteration of RLOO on VisualSokoban against one on Sokoban, and the vision
tower's share of it.

    python benchmarks/pictures.py --rounds 3

Each way plays whole iterations with its tiny model, hf engine, same tasks and seeds, in turn with
the others, and takes the rollout, the old log-probabilities and the update apart:

    words             rloo_sokoban.py
    pictures          rloo_visual_sokoban.py
    frozen            the same with --freeze-vision
    encoded again     the same as pictures; the tower sees all pictures of a context in every turn

Figures are medians of processor seconds for 1,000 steps of episodes: policies play episodes of
different lengths, and other work on the machine disturbs those less. The tower's share of the
rollout is timed around its forward passes; its share of the update is what --freeze-vision saves.
Written: benchmarks/results/pictures.md.
"""

import argparse
import random
import statistics
import sys
import time
from pathlib import Path

from throughput import ROOT, load_script

WAYS = ("words", "pictures", "frozen", "encoded again")
PHASES = ("rollout", "log-probabilities", "update")


class Way:
    """One way to spend an iteration: its model, engine and script."""

    def __init__(self, name: str, model: str):
        from runtime.chat import Chat
        from runtime.engines.transformers import TransformersEngine
        from runtime.models import read_seeing_model
        from runtime.networks import Network
        from runtime.rollout import Stage

        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        seeing = name != "words"
        self.name = name
        self.module = load_script("rloo_visual_sokoban" if seeing else "rloo_sokoban")
        self.args = self.module.Args()
        path = str(ROOT / (model if seeing else "models/tiny-sokoban"))
        reading = {"dtype": torch.float32, "trust_remote_code": False}
        if seeing:
            causal = read_seeing_model(path, path, reading)
            world = self.module.VisualSokoban
        else:
            causal = AutoModelForCausalLM.from_pretrained(path, **reading)
            world = self.module.Sokoban
        if name == "frozen":
            causal.base_model.visual.requires_grad_(False)
        self.env = world.from_args(self.args)

        tokenizer = AutoTokenizer.from_pretrained(path)
        processor = getattr(causal, "picture_processor", None)
        self.chat = Chat(tokenizer, [tokenizer.eos_token_id], processor)
        self.engine = TransformersEngine(path, self.chat.stop_ids, self.args)
        self.stage = Stage(self.engine, self.chat, self.args)
        self.policy = Network("policy", causal)
        self.policy.optimizer = torch.optim.AdamW(self.policy.trained, 1e-6, weight_decay=0.0)
        self.in_tower = 0.0
        if seeing:
            self.time_tower(causal.base_model.visual)
        if name == "encoded again":
            self.forget_pictures()

    def time_tower(self, tower) -> None:
        """Add up the processor seconds of the tower's forward passes."""

        def before(*_):
            self.begun = time.process_time()

        def after(*_):
            self.in_tower += time.process_time() - self.begun

        tower.register_forward_pre_hook(before)
        tower.register_forward_hook(after)

    def forget_pictures(self) -> None:
        """Have the tower see all pictures of the contexts again in every turn but the first, in
        which it sees them anyway."""
        from runtime.data import pictures_of
        from runtime.vision.pictures import tower_features

        import torch

        generate = self.engine.generate

        @torch.no_grad()
        def forgetful(contexts, sampling):
            if self.engine.album:
                known = self.engine.album.numbers
                shown = [png for context in contexts for _, png in pictures_of(context)]
                tower_features(self.policy.model, [png for png in shown if png in known])
            return generate(contexts, sampling)

        self.engine.generate = forgetful

    def iteration(self, number: int, tasks: int) -> dict:
        """Processor seconds of the phases, steps, and those that the rollout spent in the tower."""
        from runtime.data import flatten
        from runtime.engines import SamplingParams
        from runtime.networks import batch_logprobs
        from runtime.rollout import rollout

        import torch

        torch.manual_seed(number)
        drawn = random.Random(number).sample(self.env.train_tasks, tasks)
        drawn = sorted(drawn * self.args.group_size)
        self.engine.load(self.policy.model)
        self.in_tower = 0.0

        clock = [time.process_time()]
        sampling = SamplingParams(1.0, self.args.max_action_tokens, self.chat.stop_ids)
        games = rollout(self.stage, self.module.play, self.env, drawn, sampling)
        batch = flatten(games)
        self.engine.sleep()
        clock.append(time.process_time())
        tower = self.in_tower
        old = batch_logprobs(self.policy, batch, self.args)
        clock.append(time.process_time())
        advantages = torch.randn(len(batch.step_traj))
        self.module.policy_update(self.policy, batch, old, advantages, self.args)
        clock.append(time.process_time())

        row = {phase: end - begin for phase, begin, end in zip(PHASES, clock, clock[1:])}
        pictures = len({png for t in games for _, png in t.pictures})
        shown = sum(len(t.pictures) for t in games)
        return row | {
            "total": clock[-1] - clock[0],
            "tower in the rollout": tower,
            "steps": len(batch.step_traj),
            "tokens": sum(len(t.token_ids) for t in games),
            "distinct": pictures / max(shown, 1),
        }


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--rounds", type=int, default=3, help="iterations of each way")
    parser.add_argument("--tasks", type=int, default=16, help="tasks, 8 episodes each")
    parser.add_argument("--model", default="models/tiny-visual-sokoban", help="the model that sees")
    results = ROOT / "benchmarks" / "results"
    parser.add_argument("--out", type=Path, default=results, help="directory of the table")
    arguments = parser.parse_args()

    ways = [Way(name, arguments.model) for name in WAYS]
    rows = {name: [] for name in WAYS}
    for number in range(arguments.rounds + 1):
        for way in ways:
            row = way.iteration(number, arguments.tasks)
            if number:  # the first one warms up
                rows[way.name].append(row)
                print(way.name, {key: round(value, 2) for key, value in row.items()}, flush=True)

    def median(name: str, key: str) -> float:
        return statistics.median(1000 * row[key] / row["steps"] for row in rows[name])

    lines = [f"`python {' '.join(sys.argv)}`", ""]
    titles = " | ".join(["way", *PHASES, "all", "/ words", "tokens a step"])
    lines += [f"| {titles} |", f"|{'---|' * (len(PHASES) + 4)}"]
    for name in WAYS:
        numbers = [median(name, key) for key in (*PHASES, "total")]
        ratio = median(name, "total") / median("words", "total")
        cells = [
            *(f"{x:.1f}" for x in numbers),
            f"{ratio:.2f}",
            f"{median(name, 'tokens') / 1000:.0f}",
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")

    total = median("pictures", "total")
    rollout = median("pictures", "tower in the rollout")
    update = median("pictures", "update") - median("frozen", "update")
    scored = median("pictures", "log-probabilities") - median("frozen", "log-probabilities")
    again = median("encoded again", "total") / total
    distinct = statistics.median(row["distinct"] for row in rows["pictures"])
    lines += [
        "",
        "Processor seconds for 1,000 steps of episodes, one thread. Of an iteration with pictures "
        f"the tower takes {rollout / total:.0%} in the rollout, {scored / total:.0%} in the old "
        f"log-probabilities and {update / total:.0%} in the update. {distinct:.0%} of the pictures "
        f"shown are distinct; to see all again in every turn takes {again:.2f} times the "
        "time.",
    ]
    print("\n".join(lines))
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "pictures.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
