"""A stand-in for the package TextWorldExpress: its interface, without Java."""

import json
import random
from types import SimpleNamespace

GAME_NAMES = ["coin", "sorting"]
SEEDS = {"train": range(30), "dev": range(10_000, 10_010), "test": range(20_000, 20_020)}


class PythonInterface:
    taken = {}  # of sorting: what is taken, of each seed, by whichever game

    def load(self, name: str, settings: str) -> str:
        self.name = name
        return ""

    def getTaskDescription(self) -> str:
        return "Find the coin."

    def generateNewGameJSON(self, seed: int, fold: str, gold: bool) -> str:
        if seed not in SEEDS[fold]:
            raise ValueError(f"{seed} is not of {fold}")
        self.random, self.coins, self.lost = random.Random(seed), 0, False
        self.seed, self.taken[seed] = seed, []
        return self.answer("You are in a room.")

    def stepJSON(self, words: str) -> str:
        if self.name == "sorting":
            self.taken[self.seed].append(words)
            return self.answer(f"You have {', '.join(self.taken[self.seed])}.")
        self.coins += words == "take coin"
        self.lost = words == "jump"
        known = words in ("take coin", "jump", "wait")
        return self.answer(f"You {words}." if known else "Unknown action.")

    def answer(self, text: str) -> str:
        room = f"room {self.random.randrange(1000)}"
        told = dict(observation=f"{text}\n\nIt is cold in {room}.", look=room, inventory="")
        told |= dict(validActions=["wait", "take coin", "jump"], score=self.coins / 2 - self.lost)
        return json.dumps(told | dict(tasksuccess=self.coins == 2, taskfailure=self.lost))


class TextWorldExpressEnv:
    def __init__(self):
        runtime = SimpleNamespace(PythonInterface=PythonInterface)
        package = SimpleNamespace(runtime=runtime)
        self._gateway = SimpleNamespace(jvm=SimpleNamespace(textworldexpress=package))

    def load(self, name: str, settings: str):
        pass

    def getValidSeedsTrain(self):
        return [*SEEDS["train"]]

    def getValidSeedsDev(self):
        return [*SEEDS["dev"]]

    def getValidSeedsTest(self):
        return [*SEEDS["test"]]
