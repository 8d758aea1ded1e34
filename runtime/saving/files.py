"""JSON, JSON lines, and files that are written whole or not at all."""

import fcntl
import hashlib
import json
import math
import os
import sys
from glob import glob
from pathlib import Path

EPISODE_VERSION = 2  # of a row of episodes.jsonl; 1 had no version, and fewer numbers of a step


def finite(value):
    """The value as JSON can say it: what is not a finite number becomes None."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def to_json(value, **options) -> str:
    return json.dumps(finite(value), allow_nan=False, **options)


def read_json(path: Path):
    return json.loads(path.read_text())


def write_json(path: Path, value) -> None:
    replace_file(path, to_json(value, indent=1))


def replace_file(path: Path, content: str | bytes) -> None:
    """Write a file whole or not at all."""
    draft = path.with_name(f".{path.name}.draft")
    draft.unlink(missing_ok=True)
    try:
        write(draft, "xb", content if isinstance(content, bytes) else content.encode())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
    sync(path.parent)


def append(path: Path, lines: list[str]) -> None:
    write(path, "ab", "".join(f"{line}\n" for line in lines).encode(errors="surrogateescape"))


def write(path: Path, mode: str, content: bytes) -> None:
    """Write into a file and see it on the disk; OSError names the file."""
    try:
        with open(path, mode) as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:  # only open's own has it
        error.filename = error.filename or str(path)
        raise


def sync(path: Path) -> None:
    """See a file or a directory's entries on the disk."""
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


def rows_of(path: Path) -> list[dict]:
    """The rows of a .jsonl, without lines that are none."""
    return [row for _, row in lines_of(path) if row]


def lines_of(path: Path):
    """Yield each line of a .jsonl with its row, None where it is none; without a last line that a
    kill tore off, which is of an iteration that comes again. No file: no lines."""
    if not path.exists():
        return
    with path.open(errors="surrogateescape", newline="\n") as lines:
        for line in filter(str.strip, lines):
            row = row_of(line)
            if row or line.endswith("\n") or not line.startswith("{"):
                yield line.removesuffix("\n"), row


def row_of(line: str) -> dict | None:
    """A line as a row, with an iteration, and numbers under names as eval/score; or None."""
    try:
        row = json.loads(line.encode(), parse_constant=int)  # which refuses NaN: that is no JSON
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict) or type(row.get("iteration")) is not int or row["iteration"] < 0:
        return None
    numbers = [value for name, value in row.items() if "/" in name and value is not None]
    return row if all(type(value) in (int, float) for value in numbers) else None


def hash_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def hash_files(path: Path | None) -> str | None:
    """SHA-256 over names and contents of a directory's files, not of hidden ones."""
    if path is None or not os.path.isdir(path := Path(path)):
        return None
    files = [name for name in glob("**", root_dir=path, recursive=True) if (path / name).is_file()]
    together = "".join(f"{name} {hash_file(path / name)}\n" for name in sorted(files))
    return hashlib.sha256(together.encode()).hexdigest()


def lock(path: Path) -> int:
    """Keep other processes out of a directory until this file is closed; exits where one is in."""
    file = os.open(path / "lock", os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW, 0o644)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        sys.exit(f"{path}: another process is at work there")
    return file
