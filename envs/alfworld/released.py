"""The released games: a directory of game.tw-pddl files, by their splits.

A game file is JSON: its PDDL problem, a grammar with its goal sentence, whether it can be solved, a
walkthrough. The domain and the rest of the grammar are alfworld's own, and are not read.
"""

import json
import os
import random
import re
from dataclasses import dataclass
from pathlib import Path

from envs.alfworld.package import DataError
from envs.alfworld.pddl import ProblemError
from envs.alfworld.plan import House, house, understood

from tqdm import tqdm

FILE = "game.tw-pddl"
SENTENCE = re.compile(r'"Your task is to: ((?:[^"\\]|\\.)*)"')
DOMAIN = re.compile(r"\(\s*:domain\s+alfred\s*\)", re.IGNORECASE)
LONGEST = 500  # characters of a goal sentence
HELD_OUT = 140  # training games that validate, and the most that are a panel of training
LEFT_OUT = ("movable", "Sliced")  # in a path: task types that nobody evaluates


@dataclass(frozen=True)
class GameFile:
    problem: str
    sentence: str
    walkthrough: list[str]
    solvable: bool


def game_files(directory: str, split: str) -> list[Path]:
    """The files of a split, in the order of their paths. Raises DataError where there is none."""
    root = Path(directory)
    try:
        folders = [root / split, *sorted(root.glob(f"*/{split}"))]
        folder = next((folder for folder in folders if folder.is_dir()), None)
    except OSError as error:
        raise DataError(error.strerror) from None
    if folder is None:
        raise DataError(f"{directory} has no directory {split}")
    files = []
    for place, inside, names in os.walk(folder, followlinks=True):
        inside[:] = [name for name in inside if not name.startswith(".")]
        seen = [Path(place, name) for name in names if not name.startswith(".")]
        lost = [path for path in seen if not path.exists()]
        if lost:
            raise DataError(f"{lost[0]}: a link to nothing")
        inner = os.path.relpath(place, folder)
        if FILE in names and not any(words in inner for words in LEFT_OUT):
            files.append(Path(place, FILE))
    return sorted(files)


def read_game(path: Path) -> GameFile:
    """A game file. Raises DataError, with its name, where it is damaged or foreign."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise DataError(f"{path}: not a game file (no JSON)") from None

    if not isinstance(data, dict):
        raise DataError(f"{path}: not a game file (no JSON object)")
    for key in ("pddl_problem", "grammar"):
        if not isinstance(data.get(key), str):
            raise DataError(f"{path}: not a game file (no text {key})")
    problem, walkthrough = data["pddl_problem"], data.get("walkthrough")
    walkthrough = [] if walkthrough is None else walkthrough
    if not DOMAIN.search(problem) or problem.count("(") != problem.count(")"):
        raise DataError(f"{path}: its pddl_problem is no problem of the domain alfred")
    if not isinstance(walkthrough, list) or not all(isinstance(w, str) for w in walkthrough):
        raise DataError(f"{path}: its walkthrough is no list of commands")
    if not isinstance(solvable := data.get("solvable", True), bool):
        raise DataError(f"{path}: its solvable is neither true nor false")
    return GameFile(problem, sentence_of(path, data["grammar"]), walkthrough, solvable)


def sentence_of(path: Path, grammar: str) -> str:
    """The goal sentence, without its full stop, which the engine says itself."""
    match = SENTENCE.search(grammar)
    if match is None or "UNKNOWN GOAL" in match.group(1):
        raise DataError(f"{path}: its grammar has no goal sentence")
    try:
        words = json.loads(f'"{match.group(1)}"')
    except ValueError:
        words = match.group(1)
    words = words.removesuffix(".")
    if not words.isprintable() or not 0 < len(words.strip()) <= LONGEST:
        raise DataError(f"{path}: its goal sentence is empty, too long or not printable")
    return words


def released_house(path) -> House | None:
    """The game of a file, with the file's walkthrough or a shortest way; None where the file says
    that it cannot be solved. Raises DataError, with the file's name, where it is damaged, or
    neither of the two wins it."""
    found = read_game(path)
    if not found.solvable:
        return None
    try:
        for walkthrough in ([*map(understood, found.walkthrough)], ()):
            known = house(found.problem, found.sentence, walkthrough)
            play = known.game.start()
            if play.won:
                raise ProblemError("its goal holds at the start")
            for words in known.walkthrough:
                play.command(words)
            if play.won:
                return known
    except ProblemError as error:
        raise DataError(f"{path}: {error}") from None
    raise DataError(f"{path}: neither its walkthrough nor a search reaches its goal")


def split_files(data: str, split: str) -> tuple[list[list], int]:
    """The released games of the panel, of validation and of training, each panel game once; and how
    many files say that they cannot be solved. All files are read.

    Validation takes games of the training split, and they are not trained on. The games of one task
    (a directory has several trials) stay together. The order is random, so that the first games of
    a panel are of all types.
    """
    found = {name: game_files(data, name) for name in dict.fromkeys(["train", split])}
    files, seen = sum(found.values(), []), {}
    for path in files:
        if (other := seen.setdefault(path.resolve(), path)) != path:
            raise DataError(f"{other} and {path} are one file")
    files = tqdm(files, "games", leave=False, disable=None, delay=1)
    solvable = {path for path in files if released_house(path)}
    left_out = sum(map(len, found.values())) - len(solvable)
    for name, paths in found.items():
        found[name] = [path for path in paths if path in solvable]
        if not found[name]:
            raise DataError(f"{data}: {name} has no {FILE} of a game that can be solved")

    groups = {}
    for path in found["train"]:
        groups.setdefault(path.parent.parent, []).append(path)
    groups = list(groups.values())
    random.Random("alfworld train").shuffle(groups)
    most = max(1, min(HELD_OUT, sum(map(len, groups)) // 5))

    validation = held_out(groups, most)
    tested = held_out(groups, most) if split == "train" else found[split]
    train = sum(groups, [])
    if not (tested and validation and train):
        raise DataError("too few training tasks (directories of games) to hold some of them out")
    random.Random("alfworld panel").shuffle(tested)
    return [tested, validation, train], left_out


def held_out(groups: list[list], number: int) -> list:
    """So many games, or a few more, of whole groups, which are taken from the list."""
    found = []
    while groups and len(found) < number:
        found += groups.pop()
    return found
