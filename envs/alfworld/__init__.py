"""ALFWorld: the world (world.py), its engine (game.py, pddl.py), generated houses (houses.py), the
released games (released.py), what is read of the package (package.py), shortest ways (plan.py)."""

from envs.alfworld.game import Game, Play
from envs.alfworld.houses import SPLITS, make_game, rooms_for
from envs.alfworld.package import DataError
from envs.alfworld.pddl import ProblemError
from envs.alfworld.plan import TYPES
from envs.alfworld.world import COLUMNS, RULES, SHARES, AlfWorld, AlfWorldArgs, Episode, expert

__all__ = [
    "COLUMNS",
    "RULES",
    "SHARES",
    "SPLITS",
    "TYPES",
    "AlfWorld",
    "AlfWorldArgs",
    "DataError",
    "Episode",
    "Game",
    "Play",
    "ProblemError",
    "expert",
    "make_game",
    "rooms_for",
]
