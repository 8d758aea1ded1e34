"""The released games: a directory of game.tw-pddl files, by their splits.

A game file is JSON: its PDDL problem, a grammar with its goal sentence, whether it can be solved, a
walkthrough. The domain and the rest of the grammar are alfworld's own, and are not read.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path

from envs.alfworld.package import DataError

FILE = "game.tw-pddl"
SENTENCE = re.compile(r'"Your task is to: ((?:[^"\\]|\\.)*)"')
DOMAIN = re.compile(r"\(\s*:domain\s+alfred\s*\)", re.IGNORECASE)
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
    folders = [root / split, *sorted(root.glob(f"*/{split}"))]
    folder = next((folder for folder in folders if folder.is_dir()), None)
    if folder is None:
        raise DataError(f"{directory} has no directory {split}")
    files = [
        path
        for path in sorted(folder.rglob(FILE))
        if not any(words in str(path.relative_to(folder)) for words in LEFT_OUT)
    ]
    files = [path for path in files if read_game(path).solvable]
    if not files:
        raise DataError(f"{folder} has no {FILE} of a game that can be solved")
    return files


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
    problem, walkthrough = data["pddl_problem"], data.get("walkthrough") or []
    if not DOMAIN.search(problem) or problem.count("(") != problem.count(")"):
        raise DataError(f"{path}: its pddl_problem is no problem of the domain alfred")
    if not isinstance(walkthrough, list) or not all(isinstance(w, str) for w in walkthrough):
        raise DataError(f"{path}: its walkthrough is no list of commands")
    solvable = bool(data.get("solvable", True))
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
    return words.removesuffix(".")
