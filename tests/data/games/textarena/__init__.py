"""A stand-in for the package TextArena: its interface, with two small games for one player."""

import importlib
import logging
import random

from textarena.envs.registration import ENV_REGISTRY

random.seed(0)  # a package may draw when it is imported
logging.basicConfig(level=logging.INFO)


class Wrapper:
    """What repeats all that was said before."""

    def __init__(self, env):
        self.env = env


def make(name: str):
    module, _, kind = ENV_REGISTRY[name].entry_point.partition(":")
    return Wrapper(getattr(importlib.import_module(module), kind)())
