"""What a run says: lines that stay, above a terminal's bars, in which nothing moves a cursor."""

import logging
import os
import re
import sys
import traceback

from tqdm import tqdm

# controls but for tabs and new lines, marks of direction, and halves of surrogate pairs
MOVING = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
settings = {"quiet": False}
HANDLER = logging.Handler(logging.WARNING)  # the worlds' warnings, as this module says them
HANDLER.emit = lambda record: warn(record.getMessage())


def begin(quiet: bool) -> None:
    """Say errors and the worlds' warnings plainly. quiet: these alone are said, without bars."""
    settings["quiet"] = quiet
    sys.stdout = sys.stdout or open(os.devnull, "w")  # None after >&-
    if quiet:
        sys.stderr.isatty = lambda: False
    logging.getLogger("envs").addHandler(HANDLER)
    sys.excepthook = lambda *e: sys.stderr.write(plain("".join(traceback.format_exception(*e))))


def say(text: str, always: bool = False) -> None:
    """A line, at once; none if the run is quiet."""
    if settings["quiet"] and not always:
        return
    try:
        tqdm.write(plain(text))
        sys.stdout.flush()
    except OSError:  # the reader has left, as `| head -1` does, or >/dev/full
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def warn(text: str) -> None:
    """A line that a quiet run has too."""
    say(f"warning: {text}", always=True)


def plain(text: str) -> str:
    """The text with what would move the cursor written as its code."""
    return MOVING.sub(lambda found: ascii(found[0])[1:-1], text)


def first_line(error: BaseException) -> str:
    """An error's name, and the first line of what it says, short and plain."""
    told = str(traceback.TracebackException(type(error), error, None))  # also if its own str fails
    said = plain(told.strip().partition("\n")[0][:300])
    return f"{type(error).__name__}: {said}".removesuffix(": ")


def raised_at(error: BaseException) -> str:
    """ " (file, line N)" of a world that raised: the deepest outside libraries; "" if in none."""
    frames = [(f.f_code.co_filename, line) for f, line in traceback.walk_tb(error.__traceback__)]
    ours = __file__.removesuffix("view/terminal.py"), "<"
    at = [f" ({file}, line {line})" for file, line in frames if not file.startswith(ours)]
    own = [one for one in at if "-packages/" not in one and os.path.dirname(os.__file__) not in one]
    return ["", *at, *own][-1]
