"""Sokoban for language models: text grids, a fixed split, an exact solver.

    env = Sokoban(num_boxes=1)                  # 6x6, 15 steps
    episode = env.reset(env.eval_tasks[0])      # the same task, the same room, on any machine
    text = "<think>push left</think><action>left</action>"
    observation, reward, done, info = episode.step(text)

It stands on gym_sokoban 0.0.6 (Schrader 2018). The game itself (rules, rewards) is gym_sokoban's;
this file adds what a language model needs. Rooms are drawn by gym_sokoban's generator, seeded by
the task alone, until one is solvable within 15 moves and lies on the task's side of the
split. The split looks at the walls and targets, up to rotation and reflection: a layout seen in
training never returns in evaluation, not even mirrored, whatever the places of boxes and player.
"""

import contextlib
import functools
import hashlib
import io
import random
import sys
from collections import deque
from dataclasses import dataclass

from envs.response import action_words

import numpy as np

with contextlib.redirect_stderr(io.StringIO()):  # gym prints a notice about its successor on import
    from gym_sokoban.envs.room_utils import generate_room
    from gym_sokoban.envs.sokoban_env import SokobanEnv

# gym_sokoban's numbers of its push actions; 0 does nothing
ACTIONS = {"up": 1, "down": 2, "left": 3, "right": 4}
MOVES = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
EVAL_TASKS = 128
TRAIN_TASKS = 10_000
VALIDATION_TASKS = 128
# every room can be solved in as many, whatever the step limit: the panel does not depend on flags
MOST_MOVES = 15
EVAL_SHARE = 4  # one layout in EVAL_SHARE belongs to the evaluation side

RULES = """You are P in a Sokoban room: push every box X onto a target O.
# wall, _ floor, * box on a target, S you on a target.
You push a box by walking into it and cannot pull. Positions are row and column.
Answer with a short thought and one action, up, down, left or right:
<think>...</think><action>up</action>"""
INVALID = (
    "Invalid answer, nothing moved. "
    "Write <think>...</think><action>up</action> with up, down, left or right."
)


def parse_action(text: str) -> str | None:
    """The action of a model's whole response.

    None where the response is not exactly a thought and one action.
    """
    action = (action_words(text) or "").strip()
    return action if action in ACTIONS else None


class Room:
    """A room at its start, and how many moves each reachable state is from the solution.

    `fixed` and `state` are gym_sokoban's integer grids (fixed: 0 wall, 1 floor, 2 target; state
    besides: 3 box on target, 4 box, 5 player). A search state is (player cell, frozenset of box
    cells), a cell is (row, column).
    """

    def __init__(self, fixed: np.ndarray, state: np.ndarray, box_mapping: dict):
        self.fixed = fixed.astype(int)
        self.state = state.astype(int)
        self.box_mapping = box_mapping
        self.floor = {(int(r), int(c)) for r, c in np.argwhere(self.fixed > 0)}
        self.targets = frozenset((int(r), int(c)) for r, c in np.argwhere(self.fixed == 2))
        self.start = search_state(self.state)
        self.distances = self.solve()

    def move(self, state, action: str):
        """The state after an action, by the game's rules; the same where the way is blocked."""
        (row, column), boxes = state
        dr, dc = MOVES[action]
        cell = (row + dr, column + dc)
        behind = (row + 2 * dr, column + 2 * dc)

        if cell in boxes:
            if behind not in self.floor or behind in boxes:
                return state
            return cell, boxes - {cell} | {behind}
        return (cell, boxes) if cell in self.floor else state

    def solve(self) -> dict:
        """Moves to the solution for every state that can still reach it.

        The search is breadth first: forwards over all states, then backwards from the solutions.
        """
        parents = {self.start: []}
        queue = deque([self.start])
        while queue:
            state = queue.popleft()
            if state[1] == self.targets:
                continue  # the game ends here
            for action in MOVES:
                after = self.move(state, action)
                if after not in parents:
                    parents[after] = []
                    queue.append(after)
                if after != state:
                    parents[after].append(state)

        distances = {state: 0 for state in parents if state[1] == self.targets}
        queue = deque(distances)
        while queue:
            state = queue.popleft()
            for before in parents[state]:
                if before not in distances:
                    distances[before] = distances[state] + 1
                    queue.append(before)
        return distances

    def distance(self, state) -> int:
        """Moves to the solution; from a state that cannot be solved any more, 1 + the worst."""
        return self.distances.get(state, max(self.distances.values(), default=0) + 1)


def search_state(grid: np.ndarray):
    """The solver's state of a gym_sokoban grid."""
    boxes = frozenset((int(r), int(c)) for r, c in np.argwhere((grid == 3) | (grid == 4)))
    row, column = np.argwhere(grid == 5)[0]
    return (int(row), int(column)), boxes


def layout(fixed: np.ndarray) -> bytes:
    """What the split compares: walls and targets.

    Of the eight rotations and reflections it is the smallest.
    """
    grids = [np.rot90(grid, turns) for grid in (fixed, fixed.T) for turns in range(4)]
    return min(np.ascontiguousarray(grid, dtype=np.uint8).tobytes() for grid in grids)


def is_eval_layout(key: bytes) -> bool:
    """Which side of the split a layout is on.

    A hash of the layout alone tells it, so no list has to be kept.
    """
    return hashlib.sha256(key).digest()[0] % EVAL_SHARE == 0


def draw_room(seed: str, size: int, num_boxes: int) -> Room | None:
    """A room from gym_sokoban's generator.

    None where that gives up, or where the room takes more than MOST_MOVES. The generator draws from
    the global generators of `random` and `numpy.random`: both are seeded here and put back.
    """
    number = int.from_bytes(hashlib.sha256(seed.encode()).digest()[:4], "big")
    python_state = random.getstate()
    numpy_state = np.random.get_state()
    random.seed(number)
    np.random.seed(number)
    steps = int(1.7 * 2 * size)
    try:
        room = Room(*generate_room((size, size), num_steps=steps, num_boxes=num_boxes))
    except (RuntimeError, RuntimeWarning):
        return None
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
    return room if 1 <= room.distance(room.start) <= MOST_MOVES else None


def draw_panel(size: int, num_boxes: int):
    """Yield rooms of the evaluation side whose layouts all differ.

    The first EVAL_TASKS are the panel, the next VALIDATION_TASKS are for validation.
    """
    number = EVAL_TASKS + VALIDATION_TASKS
    seen = set()
    for attempt in range(100_000):
        room = draw_room(f"sokoban eval {attempt}", size, num_boxes)
        key = layout(room.fixed) if room else None
        if room and is_eval_layout(key) and key not in seen:
            seen.add(key)
            yield room
        if len(seen) == number:
            return
    raise ValueError(f"{num_boxes} boxes in rooms of size {size}: {len(seen)} layouts of {number}")


@functools.cache
def panel(size: int, num_boxes: int):
    """The rooms of draw_panel so far, and where the others come from.

    A small test need not draw them all.
    """
    return [], draw_panel(size, num_boxes)


def eval_room(number: int, size: int, num_boxes: int) -> Room:
    """A room of draw_panel, by its number."""
    rooms, others = panel(size, num_boxes)
    while len(rooms) <= number:
        rooms.append(next(others))
    return rooms[number]


@functools.lru_cache(maxsize=4096)
def train_room(task: int, size: int, num_boxes: int) -> Room:
    """The room of a training task.

    It is the first draw that is solvable in time and not on the evaluation side.
    """
    for attempt in range(10_000):
        room = draw_room(f"sokoban train {task} {attempt}", size, num_boxes)
        if room is not None and not is_eval_layout(layout(room.fixed)):
            return room
    rooms = f"room of size {size} with {num_boxes} boxes"
    raise ValueError(f"no {rooms} can be solved in {MOST_MOVES} moves")


@dataclass
class SokobanArgs:
    """The flags of this world."""

    num_boxes: int = 1  # Boxes in a room; 2 are much harder, and 3 take long to find at the start.
    room_size: int = 6  # Side of the room [cells], walls included; large ones take longer to find.


class Sokoban:
    """Sokoban rooms by task number.

    `eval_tasks` (128), `train_tasks` (10,000) and `validation_tasks` (128) never share a layout.
    """

    eval_tasks = range(EVAL_TASKS)
    train_tasks = range(EVAL_TASKS, EVAL_TASKS + TRAIN_TASKS)
    validation_tasks = range(train_tasks.stop, train_tasks.stop + VALIDATION_TASKS)

    def __init__(self, num_boxes: int = 1, size: int = 6, max_steps: int = 15):
        if size < 6 or not 1 <= num_boxes <= size - 2:
            flags = f"--room-size {size} --num-boxes {num_boxes}"
            most = "a room has a side of at least 6, and 1 box to 2 less than its side"
            raise ValueError(f"{flags}: {most}")

        self.num_boxes = num_boxes
        self.size = size
        self.max_steps = max_steps
        boxes = f"{num_boxes} box{'es' * (num_boxes > 1)}"
        self.name = f"sokoban {size}x{size}, {boxes}, {max_steps} steps"

    @classmethod
    def from_args(cls, args) -> "Sokoban":
        """The environment of a script's flags; exits with one line that names what cannot be."""
        try:
            return cls(args.world.num_boxes, args.world.room_size, args.max_steps)
        except ValueError as error:
            sys.exit(str(error))

    def room(self, task: int) -> Room:
        if task in self.eval_tasks:
            return eval_room(task, self.size, self.num_boxes)
        if task in self.validation_tasks:
            number = EVAL_TASKS + self.validation_tasks.index(task)
            return eval_room(number, self.size, self.num_boxes)
        if task in self.train_tasks:
            return train_room(task, self.size, self.num_boxes)
        raise IndexError(f"sokoban has the tasks 0 to {self.validation_tasks.stop - 1}, not {task}")

    def reset(self, task: int) -> "Episode":
        return Episode(self.room(task), self.max_steps)


class Episode:
    """One game. `prompt` is the first user message; `step` takes the model's whole response."""

    def __init__(self, room: Room, max_steps: int):
        self.room = room
        self.done = False

        game = SokobanEnv(room.fixed.shape, max_steps, len(room.targets), reset=False)
        game.room_fixed = room.fixed
        game.room_state = room.state.copy()
        game.box_mapping = dict(room.box_mapping)
        game.player_position = np.argwhere(game.room_state == 5)[0]
        game.num_env_steps = game.reward_last = game.boxes_on_target = 0
        self.game = game

        self.prompt = f"{RULES}\n{self.text()}"

    def grid(self) -> str:
        """The grid, a row a line."""
        rows = []
        for fixed_row, row in zip(self.game.room_fixed, self.game.room_state):
            cells = zip(fixed_row, row)
            signs = ("S" if c == 5 and fixed == 2 else "#_O*XP"[int(c)] for fixed, c in cells)
            rows.append("".join(signs))
        return "\n".join(rows)

    @property
    def anchor(self) -> str:
        """The state by which steps are compared: the grid."""
        return self.grid()

    def text(self) -> str:
        """What the player sees: the grid and the positions of player, boxes and targets."""
        player, boxes = search_state(self.game.room_state)
        things = [("P", player)]
        things += [("X", box) for box in sorted(boxes)]
        things += [("O", target) for target in sorted(self.room.targets)]
        positions = " ".join(f"{name} {row} {column}" for name, (row, column) in things)
        return f"{self.grid()}\n{positions}"

    def step(self, text: str) -> tuple[str, float, bool, dict]:
        """Play a response.

        Anything but a thought and one of the four actions is invalid: time passes, nothing moves.
        Returns (observation, reward, done, info): reward 1.0 on the step that solves the room, else
        0.0. info holds valid, success, score (share of boxes on targets), anchor (the grid),
        game_reward (the game's own: -0.1 a step, +-1 a box, +10 the end) and progress (moves that
        the solver's distance to the goal shrank by; the ground truth). Raises RuntimeError after
        the end of the episode, whatever the text; never for the text itself.
        """
        if self.done:
            raise RuntimeError("this episode is over: reset the environment")

        action = parse_action(text)
        number = ACTIONS.get(action, 0)
        before = self.room.distance(search_state(self.game.room_state))
        _, game_reward, self.done, _ = self.game.step(number, observation_mode="tiny_rgb_array")
        after = self.room.distance(search_state(self.game.room_state))
        success = bool(self.game._check_if_all_boxes_on_target())

        info = {
            "valid": action is not None,
            "success": success,
            "score": self.game.boxes_on_target / self.game.num_boxes,
            "anchor": self.anchor,
            "game_reward": float(game_reward),
            "progress": float(before - after),
        }
        observation = self.text() if info["valid"] else f"{INVALID}\n{self.text()}"
        return observation, float(success), self.done, info


def expert(episode: Episode, noise: float = 0.0, rng: random.Random | None = None):
    """Yield the responses of an exact solver, to be stepped one by one; ends with the episode.

    Every action is on a shortest solution. `noise` is the probability of a random action instead,
    drawn from `rng`; from a room that cannot be solved any more all actions are random.
    """
    rng = rng or random.Random(0)
    while not episode.done:
        room, state = episode.room, search_state(episode.game.room_state)
        if rng.random() < noise or state not in room.distances:
            action = rng.choice(list(ACTIONS))
        else:
            action = min(ACTIONS, key=lambda action: room.distance(room.move(state, action)))
        push = room.move(state, action)[1] != state[1]
        yield f"<think>{'push' if push else 'walk'} {action}</think><action>{action}</action>"
