"""Crossings: a world for measuring credit, in which the true worth of every step is known.

    env = Crossings()                           # 16 crossings, 10 of them guarded, 7 rights needed
    episode = env.reset(env.eval_tasks[0])      # the same walk, on any machine
    text = "<think>go</think><action>north</action>"
    observation, reward, done, info = episode.step(text)

A walk leads over crossings. Each shows a place and a sign. At a guarded place (a gate, a tower, a
bridge, a ferry) one way is right, and the sign says which; elsewhere any way will do. The walk goes
on whatever is answered, so all episodes of a task see the same, and are equally long. The outcome
is 1 where enough guarded places were answered right, else 0. What each step did for it follows from
the policy's probabilities (`advantages`).
"""

import hashlib
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache

from envs.response import action_words

WAYS = ("north", "east", "south", "west")
GUARDED = ("gate", "tower", "bridge", "ferry")
OPEN = ("mill", "field", "barn", "well")
SIGNS = tuple(
    "raven moon anchor rose lion crown fish sun key oak bell star wolf ship harp plough hand eye "
    "bear lily wheel tree swan rock bull cup axe drum goat hare lamp leaf mask nail owl pear pig "
    "ring rope saw".split()
)
EVAL_TASKS = VALIDATION_TASKS = 512
TRAIN_TASKS = 100_000

RULES = """A walk over crossings. Take the right way at every gate, bridge, tower and ferry; place and sign tell which.
Elsewhere any way will do. Answer: <think>go</think><action>north</action> with north, east, south or west."""  # noqa: E501
INVALID = "Invalid answer."


def drawn(*what) -> random.Random:
    """A generator that depends on these words alone."""
    words = " ".join(map(str, what))
    return random.Random(int.from_bytes(hashlib.sha256(words.encode()).digest()[:8], "big"))


@cache
def right_way(sign: str) -> str:
    """The way that this sign means at a guarded place."""
    return drawn("right", 0, sign).choice(WAYS)


@cache
def wrong_habit(sign: str) -> str:
    """The other way that the expert takes there, half of the time."""
    return drawn("habit", 0, sign).choice([way for way in WAYS if way != right_way(sign)])


@dataclass
class CrossingsArgs:
    crossings: int = 16  # Crossings of a walk; each takes a step.
    guarded: int = 10  # Number of crossings that are guarded.
    needed: int = 7  # Right answers at guarded crossings that a walk needs to succeed.
    signs: int = field(default=len(SIGNS), metadata={"most": len(SIGNS)})
    """Number of different signs, each with a right way of its own."""


class Crossings:
    """Walks, their tasks and their split. No task is in two of the three sets."""

    def __init__(
        self,
        max_steps: int = 16,
        guarded: int | None = None,
        needed: int | None = None,
        signs: int = len(SIGNS),
    ):
        """max_steps: the crossings of a walk; guarded: 10 of them, needed: 7 of those, or as many
        as there are. Raises ValueError where more are asked for than there can be."""
        guarded = min(10, max_steps) if guarded is None else guarded
        needed = min(7, guarded) if needed is None else needed
        if not 1 <= needed <= guarded <= max_steps:
            raise ValueError(f"1 <= needed {needed} <= guarded {guarded} <= crossings {max_steps}")
        if not 1 <= signs <= len(SIGNS):
            raise ValueError(f"1 <= signs {signs} <= {len(SIGNS)}")
        self.signs = SIGNS[:signs]
        self.crossings, self.guarded, self.needed = max_steps, guarded, needed
        self.name = f"{max_steps} crossings, {guarded} guarded, {needed} right answers needed"
        first = EVAL_TASKS + VALIDATION_TASKS  # that is trained on
        self.eval_tasks = range(EVAL_TASKS)
        self.validation_tasks = range(EVAL_TASKS, first)
        self.train_tasks = range(first, first + TRAIN_TASKS)

    @classmethod
    def from_args(cls, args) -> "Crossings":
        """The world of a script's flags. A walk has --crossings steps; --max-steps is no less."""
        world, signs = args.world, getattr(args.world, "signs", len(SIGNS))
        if args.max_steps < world.crossings:
            sys.exit(
                f"--max-steps {args.max_steps}: a walk has --crossings {world.crossings} steps"
            )
        try:
            return cls(world.crossings, world.guarded, world.needed, signs)
        except ValueError as error:
            sys.exit(f"--crossings, --guarded, --needed: {error}")

    def walk(self, task: int) -> list[tuple[str, str]]:
        """The places and signs of a task, in their order."""
        rng = drawn("walk", self.crossings, self.guarded, task)
        guarded = set(rng.sample(range(self.crossings), self.guarded))
        places = (GUARDED if turn in guarded else OPEN for turn in range(self.crossings))
        return [(rng.choice(kind), rng.choice(self.signs)) for kind in places]

    def reset(self, task: int) -> "Episode":
        return Episode(self.walk(task), self.needed)


class Episode:
    """One walk. `anchor` is the crossing that is seen now, for GiGPO."""

    def __init__(self, walk: list[tuple[str, str]], needed: int):
        self.walk, self.needed, self.turn, self.rights = walk, needed, 0, 0
        self.prompt = f"{RULES}\n{self.seen}"

    @property
    def seen(self) -> str:
        return " ".join(self.walk[self.turn]) if self.turn < len(self.walk) else "end"

    @property
    def anchor(self) -> str:
        return f"{self.turn} {self.seen}"

    @property
    def done(self) -> bool:
        return self.turn == len(self.walk)

    def step(self, text: str) -> tuple[str, float, bool, dict]:
        """Play one answer. info["progress"] is 1 for a right answer at a guarded place, -1 for any
        other there, and 0 elsewhere. Raises RuntimeError after the end."""
        if self.done:
            raise RuntimeError("the walk is over")
        place, sign = self.walk[self.turn]
        action = (action_words(text) or "").strip()
        valid, progress = action in WAYS, 0.0
        if place in GUARDED:
            progress = 1.0 if action == right_way(sign) else -1.0
        self.rights += progress > 0
        self.turn += 1

        success = self.done and self.rights >= self.needed
        info = {"valid": valid, "success": success, "progress": progress, "game_reward": progress}
        info |= {"score": min(1.0, self.rights / self.needed), "anchor": self.anchor}
        observation = self.seen if valid else f"{INVALID}\n{self.seen}"
        return observation, float(success), self.done, info


def advantages(right: list[float | None], answers: list[bool], needed: int) -> list[float]:
    """A(o_1:t, a_t) = P(success | a_1:t) - P(success | a_1:t-1) of every step of a walk.

    right: the probability that the policy answers step t right, None at an open place; answers:
    whether it did. Later steps are independent of earlier answers, since the walk does not depend
    on them; so the number of rights to come has a Poisson binomial distribution."""
    # chance[k]: the probability that k more rights come; from the last step to the first
    chance, credits, rights = [1.0], [], sum(a for a, p in zip(answers, right) if p is not None)
    for p, answer in zip(reversed(right), reversed(answers)):
        if p is None:
            credits.append(0.0)
            continue
        after = sum(chance[max(0, needed - rights) :])
        rights -= answer
        without, chance = chance, [0.0] * (len(chance) + 1)
        for k, q in enumerate(without):
            chance[k] += q * (1 - p)
            chance[k + 1] += q * p
        credits.append(after - sum(chance[max(0, needed - rights) :]))
    return credits[::-1]


def expert(episode: Episode, noise: float = 0.0, rng: random.Random | None = None) -> Iterator[str]:
    """Answers of somebody who is unsure: at a guarded place the right way or the sign's wrong
    habit, each half of the time, elsewhere any way. So a clone of it knows which places are
    guarded, and has to find out one bit for each sign. noise: the share of answers that are any way
    at all."""
    rng = rng or random.Random(0)
    while not episode.done:
        place, sign = episode.walk[episode.turn]
        way = rng.choice(WAYS)
        if place in GUARDED:
            way = rng.choice([right_way(sign), wrong_habit(sign)])
        if rng.random() < noise:
            way = rng.choice(WAYS)
        yield f"<think>go</think><action>{way}</action>"
