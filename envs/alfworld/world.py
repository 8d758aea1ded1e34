"""ALFWorld (Shridhar et al., arXiv 2010.03768) as a world: households in text, six types of tasks.

    env = AlfWorld()                          # generated houses
    env = AlfWorld("DIR")                     # the released games
    episode = env.reset(env.eval_tasks[0])    # the same task, the same house, on any machine
    text = "<think>look there</think><action>go to desk 1</action>"
    observation, reward, done, info = episode.step(text)

game.py is the engine to the letter. This file adds what a language model and an experiment need: a
prompt, strict parsing of the model's text, a step limit, a split of the tasks, and `expert`.
"""

import random
import sys
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from envs.alfworld import houses
from envs.alfworld.game import ANYWHERE, NOTHING, WELCOME
from envs.alfworld.package import DataError
from envs.alfworld.plan import TYPES, House, closed, commands, house, shortest, understood
from envs.alfworld.released import released_house, split_files
from envs.response import action_words

# the columns of the published tables, and how many tasks of each the published panel has
COLUMNS = dict(zip(TYPES, ("pick", "look", "clean", "heat", "cool", "pick_two")))
SHARES = dict(zip(TYPES, (35, 13, 27, 16, 25, 24)))
TRAIN_TASKS = 6_000
GAMES_KEPT = 64  # read or made lately
MOST_WORDS = 200  # characters; no command is longer
DERIVED = ("atlocation", "objectatlocation", "holdsany")  # facts that follow from others
PASSIVE = ("examine", "look", "inventory", "help")

RULES = """You are in a house. Do the task with one command a turn. You can carry one thing.
Commands: go to X, open X, close X, take X from Y, move X to Y, use X, heat X with Y, cool X with Y,
clean X with Y, examine X, look, inventory. X and Y have a name and a number.
Answer with a short thought and one command: <think>...</think><action>go to desk 1</action>"""
NO_FORM = "Nothing happens. Write <think>...</think><action>go to desk 1</action> with one command."


@dataclass
class AlfWorldArgs:
    """The flags of this world."""

    alfworld_data: str = ""
    """Directory of the released games; empty: generated houses."""

    alfworld_split: Literal["train", "valid_seen", "valid_unseen"] = "valid_seen"
    """Split of the released games that is the panel; train: 140 of its games, which are not trained
    on."""

    show: Literal["none", "new", "all"] = "none"
    """Admissible commands that an observation lists: none, those that are new since the agent went
    there, or all but help (as in published work)."""

    anchor: Literal["state", "text"] = "state"
    """State that groups steps in GiGPO, GraphGPO, G2PO and GAGPO: the true state of the house, or
    the engine's last answer (as published)."""

    inadmissible: Literal["valid", "invalid"] = "invalid"
    """Whether a command that cannot be executed now is an invalid or a valid action (as published).
    In both cases nothing happens, and the engine says so."""


class AlfWorld:
    """Household tasks by number: the panel, then validation, then training.

    data: None generates houses, and no room is in two of the three sets; a directory holds the
    released games. The other arguments are the flags. Raises DataError for data that
    cannot be used.
    """

    def __init__(
        self,
        data=None,
        split="valid_seen",
        max_steps=50,
        show="none",
        anchor="state",
        inadmissible="invalid",
    ):
        if max_steps < 1:
            raise ValueError(f"--max-steps {max_steps}: at least 1")
        self.data, self.max_steps = data, max_steps
        self.show, self.anchor, self.inadmissible = show, anchor, inadmissible
        self.measures = list(COLUMNS.values())
        self.played, self.won = Counter(), Counter()  # by type, since the last summary
        self.house = lru_cache(maxsize=GAMES_KEPT)(self.read if data else self.make)

        if data:
            sets, left_out = split_files(data, split)
            sizes = [len(part) for part in sets]
            self.files = sum(sets, [])
            source = f"{data}, panel {split}"
            source += f", without {left_out} that cannot be solved" if left_out else ""
        else:
            self.tasks = panel("panel") + panel("validation")
            sizes = [len(self.tasks) // 2, len(self.tasks) // 2, TRAIN_TASKS]
            houses.goals()  # read now, and the floor plans: no reset has to wait for them
            for kind in TYPES:
                houses.rooms_for(kind, "train")
            source = "generated houses"
        first, second = sizes[0], sizes[0] + sizes[1]
        self.eval_tasks = range(first)
        self.validation_tasks = range(first, second)
        self.train_tasks = range(second, second + sizes[2])
        games = f"{sizes[0]} games in the panel, {sizes[2]} to train"
        self.name = f"alfworld ({source}): {games}, {max_steps} steps"

    @classmethod
    def from_args(cls, args) -> "AlfWorld":
        """The environment of a script's flags; exits with one line where they cannot be used."""
        flags = args.world
        if flags.alfworld_split != "valid_seen" and not flags.alfworld_data:
            reason = "it is for --alfworld-data; generated houses have one panel"
            sys.exit(f"--alfworld-split {flags.alfworld_split}: {reason}")
        try:
            return cls(
                flags.alfworld_data or None,
                flags.alfworld_split,
                args.max_steps,
                flags.show,
                flags.anchor,
                flags.inadmissible,
            )
        except ValueError as error:
            data = f"--alfworld-data {flags.alfworld_data}: " if flags.alfworld_data else ""
            sys.exit(f"{data}{error}")

    def make(self, task: int) -> House:
        """The game of a task, in a generated house."""
        if task < len(self.tasks):
            wanted, seed = self.tasks[task], f"alfworld {task}"
        else:
            number = task - len(self.tasks)
            seed = f"alfworld train {number}"
            kind = TYPES[number % len(TYPES)]
            wanted = houses.draw(kind, "train", random.Random(seed))
        return house(*houses.make_game(wanted, random.Random(f"{seed} things")))

    def read(self, task: int) -> House:
        """A released game. Raises DataError with the file's name where it was damaged lately."""
        if known := released_house(self.files[task]):
            return known
        raise DataError(f"{self.files[task]}: it was changed during the run")

    def reset(self, task: int) -> "Episode":
        if not 0 <= task < self.train_tasks.stop:
            raise IndexError(f"alfworld has the tasks 0 to {self.train_tasks.stop - 1}, not {task}")
        return Episode(self, self.house(task))

    def summary(self) -> dict[str, float]:
        """The success rates of the six types, of the episodes that began since the last call, of
        all processes. Left out are types that were not played."""
        from runtime.distributed import processes  # brings torch, which an episode does not need

        played, won = (sum(processes.gather([c]), Counter()) for c in (self.played, self.won))
        self.played, self.won = Counter(), Counter()
        return {name: won[k] / played[k] for k, name in COLUMNS.items() if played[k]}


def panel(split: str) -> list[houses.Task]:
    """Different tasks in rooms of a split, as many of each type as the published panel has."""
    rng = random.Random(f"alfworld {split}")
    kinds = [kind for kind, number in SHARES.items() for _ in range(number)]
    rng.shuffle(kinds)
    tasks = {}
    for kind in kinds:
        while (task := houses.draw(kind, split, rng)) in tasks:
            pass
        tasks[task] = True
    return list(tasks)


class Episode:
    """One game. `prompt` is the first user message; `step` takes the model's whole response."""

    __slots__ = "env house play steps done prompt distance shown".split()

    def __init__(self, env: AlfWorld, house: House):
        self.env, self.house, self.play = env, house, house.game.start()
        self.steps, self.done, self.distance = 0, False, house.distance
        self.shown = set()  # commands that were listed since the player came here
        start = self.play.text.removeprefix(WELCOME).strip()
        self.prompt = f"{RULES}\n\n{start}{self.listed()}"

    @property
    def anchor(self) -> str:
        """The state by which steps are compared: where the player is and what has changed, or the
        engine's last answer."""
        if self.env.anchor == "text":
            return self.play.text
        game, facts = self.play.game, self.play.facts
        changed = []
        for name, *things in facts ^ game.start_facts:
            if name not in DERIVED:
                sign = "+" if (name, *things) in facts else "-"
                things = [self.name(thing) for thing in things if thing != game.agent]
                changed.append(f"{sign}{name} {', '.join(things)}")
        for thing, receptacle in self.play.taken:  # what `look` says where places are shared
            if any(len(game.at[place]) > 1 for place in game.receptacles[receptacle]):
                changed.append(f"+taken {self.name(thing)}, {self.name(receptacle)}")
        return "; ".join([self.play.place, *sorted(changed)])

    def name(self, thing: str) -> str:
        return self.play.game.names[thing]

    def listed(self, everything: bool = False) -> str:
        """The line of an observation that lists commands; nothing where there is none to list."""
        if self.env.show == "none":
            return ""
        if self.env.show == "all":
            listed = [words for words in self.play.admissible if words != "help"]
        else:
            here = self.play.local.keys() - ANYWHERE.keys()
            listed = sorted(here if everything else here - self.shown)
            self.shown |= here
        return f"\nYou can: {', '.join(listed)}." if listed else ""

    def step(self, text: str) -> tuple[str, float, bool, dict]:
        """Play a response.

        Anything but a thought and one command of at most 200 printable characters is invalid, and
        so is a command that cannot be given now (--inadmissible valid: it is not): time passes,
        nothing happens. Returns (observation, reward, done, info): reward 1.0 on the step that
        reaches the goal, else 0.0. info holds valid, success, score (how much of the shortest way
        from the start is done, 0..1), anchor, game_reward (the engine's: 1.0 for the goal) and
        progress (commands that the shortest way to the goal shrank by). Raises RuntimeError after
        the end of the episode, whatever the text; never for the text itself.
        """
        if self.done:
            raise RuntimeError("this episode is over: reset the environment")
        if self.steps == 0:
            self.env.played[self.house.kind] += 1
        self.steps += 1

        words = (action_words(text) or "").strip(" \t\r\n")
        readable = 0 < len(words) <= MOST_WORDS and words.isprintable()
        place, before = self.play.place, self.distance
        self.play.command(understood(words) if readable else "")
        possible = self.play.text != NOTHING
        if possible and not words.startswith(PASSIVE):
            self.update()
        if self.play.place != place:
            self.shown.clear()

        success = self.play.won
        self.done = success or self.steps >= self.env.max_steps
        self.env.won[self.house.kind] += success
        progress = 0.0 if before is None or self.distance is None else before - self.distance
        info = {
            "valid": possible or (readable and self.env.inadmissible == "valid"),
            "success": success,
            "score": self.score(),
            "anchor": self.anchor,
            "game_reward": float(success),
            "progress": float(progress),
        }
        said = self.play.text if readable else NO_FORM
        return f"{said}{self.listed(not possible)}", float(success), self.done, info

    def update(self):
        """Measure the distance to the goal anew."""
        if self.house.distance is not None:
            best = shortest(self.play, self.house.wish)
            self.distance = best and best[0]

    def score(self) -> float:
        if self.play.won or not self.house.distance or self.distance is None:
            return float(self.play.won)
        return max(0.0, 1.0 - self.distance / self.house.distance)


def expert(episode: Episode, noise: float = 0.0, rng: random.Random | None = None):
    """Yield the responses of somebody who knows where all is; they end with the episode.

    Every command is on a shortest way to the goal, so without noise they are the walkthrough.
    Where a goal is none of the six types they follow the file's. `noise` is the probability of a
    worse command, drawn from `rng`: half of these are `look`. The others search for a thing that
    was not seen yet: they look at the next place that was not looked at before, in the order in
    which the room lists them, but of another kind than this one. With noise 1 things are thus
    found without knowing where they are. The thought stays the same, so that a clone has to see
    whether the thing is there.
    """
    rng = rng or random.Random(0)
    play, wish, game = episode.play, episode.house.wish, episode.house.game
    seen = set()
    while not episode.done:
        here = game.at.get(play.place, ())
        seen |= {r for r in here if not closed(play, r)}
        best = shortest(play, wish) if wish else None
        rest = episode.house.walkthrough[episode.steps : episode.steps + 1]
        thought, words = "go on", rest and rest[0]
        if best:
            place, (verb, thing, *_) = best[1][0][0], best[1][0][1]
            thought = f"{verb} {episode.name(thing).split()[0]}"
            words = commands(play, best[1])[0]
            is_worse = rng.random() < noise
            if is_worse and rng.random() < 0.5:
                words = "look"
            elif is_worse and verb in ("take", "use") and place not in {*seen, *here}:
                words = search(episode, here, seen)
        yield f"<think>{thought}</think><action>{words}</action>"


def search(episode: Episode, here, seen: set) -> str:
    """The command that looks at a place which is not among those seen: here if it is shut, else at
    the next one in the room's list that is of another kind."""
    if shut := [place for place in here if place not in seen]:
        return f"open {episode.name(shut[0])}"
    listed = [*episode.play.game.receptacles]
    kind = {place: episode.name(place).split()[0] for place in listed}
    after = listed.index(here[0]) + 1 if here else 0
    unseen = [place for place in listed[after:] + listed[:after] if place not in seen]
    other = [place for place in unseen if not here or kind[place] != kind[here[0]]]
    return f"go to {episode.name((other or unseen)[0])}"
