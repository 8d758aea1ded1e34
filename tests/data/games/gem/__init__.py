"""A stand-in for the package GEM: its interface, with one small game."""

import importlib

from gem.envs.registration import ENV_REGISTRY


def make(name: str):
    module, _, kind = ENV_REGISTRY[name].partition(":")
    return getattr(importlib.import_module(module), kind)()
