"""JSON, JSON lines, and files that are written whole or not at all."""

import hashlib
import json
import math
import os
from pathlib import Path

EPISODE_VERSION = 2  # of a row of episodes.jsonl; 1 had no version, and fewer numbers of a step


def finite(value):
    """The value as JSON can say it: what is not a finite number becomes None."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def to_json(value, **options) -> str:
    return json.dumps(finite(value), allow_nan=False, default=repr, **options)


def read_json(path: Path):
    return json.loads(path.read_text())


def write_json(path: Path, value) -> None:
    """Write a file whole or not at all."""
    replace_file(path, to_json(value, indent=1))


def replace_file(path: Path, text: str) -> None:
    """Write text to a draft beside the file, see it on the disk, and put it in the file's place."""
    draft = path.with_name(f".{path.name}.draft")
    with draft.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)
    sync(path.parent)


def append(path: Path, lines: list[str]) -> None:
    """Append lines and see them on the disk."""
    with path.open("a") as file:
        file.write("".join(f"{line}\n" for line in lines))
        file.flush()
        os.fsync(file.fileno())


def sync(path: Path) -> None:
    """See a file or a directory's entries on the disk."""
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


def rows_of(path: Path, last: float = math.inf) -> list[dict]:
    """The rows of a .jsonl up to iteration `last`; a line that a kill tore is none. No file: no
    rows."""
    rows = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            rows.append(json.loads(line))
        except ValueError:
            break  # what follows a torn line is of a later start, which comes again
    return [row for row in rows if row["iteration"] <= last]


def hash_file(path: Path) -> str:
    """The file's SHA-256."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def hash_files(path: Path | None) -> str | None:
    """SHA-256 over names and contents of a directory's files; None where there is no directory (a
    name on the hub)."""
    if path is None or not Path(path).is_dir():
        return None
    together = hashlib.sha256()
    for file in sorted(p for p in Path(path).iterdir() if p.is_file()):
        together.update(f"{file.name} {hash_file(file)}\n".encode())
    return together.hexdigest()
