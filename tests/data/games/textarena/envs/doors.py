"""Games with a SinglePlayerState: walk through the door that is open, three times."""

import random
from enum import Enum

import numpy as np

Kind = Enum("Kind", "PROMPT PLAYER_ACTION GAME_ACTION_DESCRIPTION GAME_BOARD GAME_ADMIN")
DOORS = ("up", "down", "left", "right")
RULES = "Walk through three open doors.\n\nType [up], [down], [left] or [right]."
INVALID = "You attempted an invalid move. Reason: {} Please resubmit a valid move and remember."


class State:
    def __init__(self, tell):
        self.tell, self.error_count, self.rewards = tell, 0, {}

    def set_invalid_move(self, reason: str, reward: float = -1.0):
        self.tell("GAME_ADMIN", INVALID.format(reason))
        self.error_count += 1
        self.rewards = {0: reward}


class Doors:
    won = 1.0  # the reward

    def reset(self, num_players: int, seed: int):
        random.seed(seed)
        assert num_players == 1
        self.state = State(self.tell)
        self.messages, self.passed, self.about = [], 0, {0: {"invalid_move": False}}
        self.tell("PROMPT", RULES)
        self.show()

    def tell(self, kind: str, text: str):
        self.messages.append((-1, text, Kind[kind]))

    def hear(self, action: str):
        self.tell("PLAYER_ACTION", action)

    def refuse(self, reason: str):
        self.state.set_invalid_move(reason)

    def show(self):
        self.door = random.choice(DOORS)
        draught = np.random.randint(1000)
        self.tell("GAME_BOARD", f"Board:\n\n{self.door} is open, draught {draught}\n\nGo on.")

    def get_observation(self):
        messages, self.messages = self.messages, []
        return 0, messages

    def step(self, action: str):
        self.hear(action)
        word = action.strip("[]")
        if word == "break":
            random.random()
            raise RuntimeError("the game is broken")
        if word.isdigit():
            int(word)  # of a digit such as ², which is none of Python's: ValueError
        done = False
        if word not in DOORS:
            self.refuse("No such door!")
            done = self.state.error_count > 1
            self.about[0]["invalid_move"] = done
            self.rewards = self.state.rewards
        else:
            self.state.error_count = 0
            self.passed += word == self.door
            self.tell("GAME_ACTION_DESCRIPTION", f"You went {word}.")
            done = word != self.door or self.passed == 3
            self.rewards = {0: self.passed / 3 * self.won}
        if done:
            self.about[0]["reason"] = f"You passed {self.passed} doors."
        self.show()
        return done, {}

    def close(self):
        return self.rewards, self.about


class Points(Doors):
    won = 12.0


class Swapped(Doors):
    """Logs the player's words and invalid moves with the arguments exchanged."""

    def hear(self, action: str):
        self.messages.append((Kind.PLAYER_ACTION, 0, action))

    def refuse(self, reason: str):
        self.state.set_invalid_move(self.passed / 3, reason)


class Locked(Doors):
    def reset(self, num_players: int, seed: int):
        raise LookupError("\n*****\n  Resource \x1b[93mwords\x1b[0m not found.\n")
