"""Write the number that is shown, three times; 0.1 + 0.2 + 0.7 is 1 up to rounding."""

import random
import re

import numpy as np

GIVEN = (0.1, 0.2, 0.7)


class Count:
    def reset(self, seed: int):
        random.seed(seed)
        np.random.seed(seed)
        self.right = 0
        return "Write the number in \\boxed{}.", self.shown()

    def shown(self) -> dict:
        self.number = random.randint(0, 1)
        rest = np.random.randint(1000)
        return {"suffix": f"Now:\n{self.number} of {rest}\nEnter it."}

    def step(self, action: str):
        match = re.fullmatch(r"\\boxed\{(\d)\}", action)
        if not match:
            return "No number.", -0.1, True, False, self.shown()
        right = int(match[1]) == self.number
        reward = GIVEN[self.right] if right else 0.0
        self.right += right
        info = self.shown()
        return f"That was {'right' if right else 'wrong'}.", reward, self.right == 3, False, info
