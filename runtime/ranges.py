"""What the value of a flag may be: a number of a range, or a line of text."""

from dataclasses import dataclass

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
        if self.least < 0:
            return name
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

    component: bool = False
    kind = str
    metavar = "STR"

    def refusal(self, text: str) -> str:
        """What is wrong with this text, or nothing."""
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
