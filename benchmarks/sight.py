"""Whether a policy of VisualSokoban acts on what it sees: its success on the panel with pictures of
its own rooms, and of other rooms.

    python benchmarks/sight.py models/tiny-visual-sokoban runs/NAME/policy

Everything else stays: tasks, words, answers and the rooms that are played. The other room is played
along, by the same answers, so its pictures move too; where it is solved, its last one stays. A
random player, who answers with one of the four actions, says what chance is.
"""

import argparse
import random
import statistics
import sys

from throughput import ROOT, load_script

sys.path.insert(0, str(ROOT))
from envs.sokoban import ACTIONS
from envs.visual_sokoban import VisualSokoban
from runtime.chat import Chat
from runtime.engines import SamplingParams
from runtime.engines.transformers import TransformersEngine
from runtime.models import read_seeing_model
from runtime.rollout import Stage, rollout

import torch
from transformers import AutoTokenizer


class Swapped:
    """The world, its episodes with the pictures of other tasks."""

    shows_pictures = True

    def __init__(self, env: VisualSokoban):
        self.env, self.eval_tasks = env, env.eval_tasks

    def reset(self, task: int) -> "SwappedEpisode":
        other = self.eval_tasks[(task + len(self.eval_tasks) // 2) % len(self.eval_tasks)]
        return SwappedEpisode(self.env.reset(task), self.env.reset(other))


class SwappedEpisode:
    def __init__(self, played, shown):
        self.played, self.shown, self.prompt = played, shown, played.prompt

    @property
    def picture(self) -> bytes:
        return self.shown.picture

    def step(self, text: str):
        if not self.shown.done:
            self.shown.step(text)
        return self.played.step(text)


def success(module, env, model: str, samples: int) -> tuple[float, float]:
    """(success on the panel, its standard error over tasks) of a policy."""
    reading = {"dtype": torch.float32, "trust_remote_code": False}
    causal = read_seeing_model(model, model, reading)
    tokenizer = AutoTokenizer.from_pretrained(model)
    chat = Chat(tokenizer, [tokenizer.eos_token_id], causal.picture_processor)
    args = module.Args()
    engine = TransformersEngine(model, chat.stop_ids, args)
    engine.load(causal)
    torch.manual_seed(1)
    tasks = [task for task in env.eval_tasks for _ in range(samples)]
    sampling = SamplingParams(0.4, args.max_action_tokens, chat.stop_ids)
    games = rollout(Stage(engine, chat, args), module.play, env, tasks, sampling)
    return over_tasks([t.task for t in games], [t.success for t in games])


def over_tasks(tasks: list[int], solved: list[bool]) -> tuple[float, float]:
    """Mean and standard error over tasks."""
    of_task: dict[int, list[bool]] = {}
    for task, won in zip(tasks, solved):
        of_task.setdefault(task, []).append(won)
    means = [statistics.mean(each) for each in of_task.values()]
    return statistics.mean(means), statistics.stdev(means) / len(means) ** 0.5


def by_chance(env: VisualSokoban, samples: int) -> tuple[float, float]:
    """Success of a player who takes random actions."""
    rng, tasks, solved = random.Random(0), [], []
    for task in env.eval_tasks:
        for _ in range(samples):
            episode, info = env.reset(task), {}
            while not episode.done:
                action = rng.choice([*ACTIONS])
                *_, info = episode.step(f"<think>walk</think><action>{action}</action>")
            tasks.append(task)
            solved.append(info["success"])
    return over_tasks(tasks, solved)


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("models", nargs="+", help="policies, directories")
    parser.add_argument("--samples", type=int, default=2, help="episodes for each of 128 tasks")
    arguments = parser.parse_args()

    module, env = load_script("rloo_visual_sokoban"), VisualSokoban()
    ways = {"its own pictures": env, "another room's pictures": Swapped(env)}
    for model in arguments.models:
        for name, world in ways.items():
            mean, error = success(module, world, model, arguments.samples)
            print(f"{model}, {name}: {mean:.3f} ± {error:.3f}", flush=True)
    mean, error = by_chance(env, 4)
    print(f"random actions: {mean:.3f} ± {error:.3f}")


if __name__ == "__main__":
    main()
