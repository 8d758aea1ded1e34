"""What a flag's value may be, declared beside the flag: `clip: Positive = 0.2`.

A declaration is a type alias. It is all that the page needs to say: the command line refuses what
lies outside in one line with the flag's name, and --help shows it. Not a number (nan) is in none.
"""

import math
import sys
from dataclasses import dataclass
from typing import Annotated

import tyro

MOST = 10_000_000  # of what is counted
LARGE, SMALL = 1e9, 1e-9  # of what is measured
PATH = 4096  # characters of a text, as long as a path may be
NAME, NAME_BYTES = 100, 255  # characters and bytes of a name


@dataclass(frozen=True)
class Range:
    """Numbers of a kind, int or float, from `least` to `most`, both included; `or_zero`: and 0."""

    kind: type
    least: float
    most: float
    or_zero: bool = False

    def __str__(self) -> str:
        number = "a whole number" if self.kind is int else "a number"
        form = ",d" if self.kind is int else "g"
        zero = "0 or " if self.or_zero else ""
        return f"{zero}{number} from {self.least:{form}} to {self.most:{form}}"

    @property
    def metavar(self) -> str:
        """How --help shows it: INT>=1, FLOAT>0, 0<=FLOAT<=1."""
        name = self.kind.__name__.upper()
        if self.least == SMALL:
            return f"{name}>=0" if self.or_zero else f"{name}>0"
        if self.most >= MOST:
            return f"{name}>={self.least:g}"
        return f"{self.least:g}<={name}<={self.most:g}"

    def refusal(self, text: str) -> str:
        """What a value has to be, where this text is none; else nothing."""
        try:
            value = self.kind(text)
        except ValueError:
            return f"has to be {self}"
        inside = self.least <= value <= self.most or (self.or_zero and value == 0)
        return "" if inside else f"has to be {self}"


@dataclass(frozen=True)
class Text:
    """Printable characters, on one line; `component`: as a directory of this name needs it."""

    may_be_empty: bool = True
    component: bool = False

    def refusal(self, text: str) -> str:
        """What is wrong with this text, or nothing."""
        if not text:
            return "" if self.may_be_empty else "is empty"
        if not text.isprintable():
            return "has characters that are not printable"
        most = NAME if self.component else PATH
        if len(text) > most:
            return f"has {len(text):,} characters, {most:,} are the most"
        if self.component and (text in (".", "..") or "/" in text or text != text.strip()):
            return "has to be the name of one directory, without a path or blanks around it"
        if self.component and len(text.encode()) > NAME_BYTES:
            return f"has {len(text.encode())} bytes, {NAME_BYTES} are the most"
        return ""


def whole(least: int, most: int):
    """The type of a flag whose value is a whole number of this range."""
    return declared(Range(int, least, most))


def real(least: float, most: float, or_zero: bool = False):
    """The type of a flag whose value is a number of this range."""
    return declared(Range(float, least, most, or_zero))


def declared(values: Range):
    return Annotated[values.kind, values, tyro.conf.arg(metavar=values.metavar)]


Count = whole(1, MOST)
Natural = whole(0, MOST)  # a count that may be 0
Several = whole(2, MOST)
Seed = whole(0, 2**32 - 1)
Unit = real(0.0, 1.0)  # the unit interval
Share = real(0.05, 0.95)  # of a card's memory
Rate = real(0.0, 1.0)  # of learning, of discount
Positive = real(SMALL, LARGE)
NonNegative = real(0.0, LARGE)
UpToInf = real(SMALL, math.inf)  # inf: without a limit
ZeroOrMore = real(SMALL, LARGE, or_zero=True)  # NonNegative, without numbers that are almost 0
Name = Annotated[str, Text(component=True)]

# what a flag may be that declares nothing, as those of a world that somebody adds
UNDECLARED = {
    int: Range(int, -(2**63), 2**63 - 1),
    float: Range(float, -sys.float_info.max, sys.float_info.max),
}
