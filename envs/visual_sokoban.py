"""VisualSokoban: the rooms and rules of envs/sokoban.py, seen as pictures.

    env = VisualSokoban(num_boxes=1)            # 6x6, 15 steps
    episode = env.reset(env.eval_tasks[0])      # the room that Sokoban has for this task
    episode.picture                             # the PNG of what is seen now, bytes
    text = "<think>push left</think><action>left</action>"
    observation, reward, done, info = episode.step(text)

The picture is gym_sokoban's own, in its tiles of 16 x 16 pixels, enlarged without smoothing where
--cell-pixels says so. The words beside it have the tiles and the form of the answer, and never say
where things are.
"""

import functools
import io
import sys
import warnings
from dataclasses import dataclass

from envs import sokoban
from envs.sokoban import INVALID, Sokoban, SokobanArgs

import numpy as np
from gym_sokoban.envs.render_utils import room_to_rgb
from PIL import Image

expert = sokoban.expert

TILE = 16  # side of gym_sokoban's tiles [pixels]
RULES = """You are the green figure in this Sokoban room: push every yellow box onto a target.
Brown bricks are wall, black is floor, a red frame with a dot is a target. A box on a target has a red edge.
You push a box by walking into it and cannot pull.
Answer with a short thought and one action, up, down, left or right:
<think>...</think><action>up</action>"""  # noqa: E501
NOW = "The room now."


@functools.cache
def tiles() -> np.ndarray:
    """gym_sokoban's tiles [7, 16, 16, 3], by its numbers; 6: the player on a target."""
    pairs = [(number, number) for number in range(6)] + [(5, 2)]
    with warnings.catch_warnings():  # of what will change in libraries that gym_sokoban reads with
        warnings.simplefilter("ignore")
        return np.stack([room_to_rgb([[state]], np.array([[fixed]])) for state, fixed in pairs])


@functools.lru_cache(maxsize=4096)
def render(signs: bytes, columns: int, cell: int) -> bytes:
    """The PNG of a room as gym_sokoban's room_to_rgb draws it, its cells `cell` pixels wide. signs:
    a byte for each cell, the number of its tile."""
    grid = np.frombuffer(signs, dtype=np.uint8).reshape(-1, columns)
    drawn = tiles()[grid]  # [rows, columns, 16, 16, 3]
    drawn = drawn.swapaxes(1, 2).reshape(len(grid) * TILE, columns * TILE, 3)
    picture = Image.fromarray(np.ascontiguousarray(drawn))
    if cell != TILE:
        picture = picture.resize((columns * cell, len(grid) * cell), Image.Resampling.NEAREST)
    file = io.BytesIO()
    picture.save(file, format="png")
    return file.getvalue()


@dataclass
class VisualSokobanArgs(SokobanArgs):
    """The flags of this world and its vision tower."""

    cell_pixels: int = TILE
    """Side of a cell in the picture [pixels], 16 as drawn; 28: Qwen2.5-VL has a token per cell."""
    saved_pictures: int = 1000
    """Maximum number of pictures that a run keeps (runs/NAME/pictures), each once."""
    freeze_vision: bool = False
    """Train the language side alone; the tower sees a picture once."""


class VisualSokoban(Sokoban):
    """Sokoban's rooms by task number, with a picture for each observation."""

    shows_pictures = True

    def __init__(
        self, num_boxes: int = 1, size: int = 6, max_steps: int = 15, cell_pixels: int = TILE
    ):
        super().__init__(num_boxes, size, max_steps)
        if cell_pixels < 1:
            raise ValueError(f"--cell-pixels {cell_pixels}: has to be at least 1")
        self.cell_pixels = cell_pixels
        self.name = f"visual {self.name}"

    @classmethod
    def from_args(cls, args) -> "VisualSokoban":
        """The environment of a script's flags; exits with one line that names what cannot be."""
        world = args.world
        try:
            return cls(world.num_boxes, world.room_size, args.max_steps, world.cell_pixels)
        except ValueError as error:
            sys.exit(str(error))

    def reset(self, task: int) -> "Episode":
        return Episode(self.room(task), self.max_steps, self.cell_pixels)


class Episode(sokoban.Episode):
    """One game of envs/sokoban.py; `picture` is what is seen now."""

    def __init__(self, room: sokoban.Room, max_steps: int, cell_pixels: int):
        super().__init__(room, max_steps)
        self.cell_pixels = cell_pixels
        self.prompt = RULES

    def text(self) -> str:
        """The words beside the picture."""
        return NOW

    @property
    def picture(self) -> bytes:
        """The PNG of the room as it is now."""
        state, fixed = self.game.room_state, self.game.room_fixed
        signs = np.where((state == 5) & (fixed == 2), 6, state).astype(np.uint8)
        return render(signs.tobytes(), state.shape[1], self.cell_pixels)


__all__ = ["INVALID", "NOW", "RULES", "Episode", "VisualSokoban", "VisualSokobanArgs", "expert"]
