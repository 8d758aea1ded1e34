"""What is read from the package alfworld 0.4.2, without importing it: importing writes to the home
directory. Its Python files are parsed, and only literals are taken from them.
"""

import ast
import importlib.util
import json
from functools import cache
from pathlib import Path

VERSION = "0.4.2"


class DataError(ValueError):
    """Data that cannot be used, in one line."""


@cache
def directory() -> Path:
    found = importlib.util.find_spec("alfworld")
    if found is None or not found.submodule_search_locations:
        raise DataError(f"no package alfworld: pip install --no-deps alfworld=={VERSION}")
    return Path(found.submodule_search_locations[0])


def text_of(name: str) -> str:
    path = directory() / name
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise DataError(f"alfworld's {name} cannot be read ({type(error).__name__})") from None


@cache
def constants() -> dict:
    """name -> value of the tables in gen/constants.py."""
    values = {}
    for node in ast.parse(text_of("gen/constants.py")).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            try:
                values[node.targets[0].id] = ast.literal_eval(node.value)
            except ValueError:  # computed there, and not needed here
                pass
    return values


@cache
def can_hold() -> dict[str, tuple[str, ...]]:
    """Class of a receptacle -> classes of what it can hold, sorted."""
    table = dict(constants()["VAL_RECEPTACLE_OBJECTS"])
    tops = table.pop("TableTop")
    table |= dict.fromkeys(("DiningTable", "CoffeeTable", "SideTable"), tops)
    movable = constants()["MOVABLE_RECEPTACLES"]
    return {kind: tuple(sorted(things)) for kind, things in table.items() if kind not in movable}


@cache
def goals() -> dict[str, dict]:
    """Task type -> its goal in PDDL ("pddl") and its goal sentences ("templates")."""
    found = {}
    for node in ast.parse(text_of("gen/goal_library.py")).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript):
            found[ast.literal_eval(node.targets[0].slice)] = ast.literal_eval(node.value)
    return found


def floor_plan(number: int) -> tuple[list[str], dict[str, list[float]]]:
    """(classes of things, receptacle -> [x, z, rotation, horizon] from where it is reached)."""
    layouts = [f"gen/layouts/FloorPlan{number}-{part}.json" for part in ("objects", "openable")]
    things, receptacles = (json.loads(text_of(name)) for name in layouts)
    return things, receptacles
