"""ALFWorld: the engine (game.py, pddl.py) in plain Python."""

from envs.alfworld.game import Game, Play
from envs.alfworld.pddl import ProblemError

__all__ = ["Game", "Play", "ProblemError"]
