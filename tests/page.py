"""How a script reads, in numbers: python tests/page.py istar_webshop.py ...    (standard library)

lines; tokens per line of code, without docstrings, comments and blank lines; the share of lines
beyond 100 columns; flags in Args; names taken from runtime/; how many of VERBS stand on the page;
shared blocks. Where all numbers stand is LIMITS in tests/test_page.py.
"""

import ast
import sys
import tokenize
from pathlib import Path
from typing import NamedTuple

# What a reader looks for: where is sampled, played, differentiated, stepped.
VERBS = (
    *("SamplingParams(", "env.reset(", "engine.sample(", "episode.step("),
    *("AdamW(", ".backward()", "clip_grad", "optimizer.step()"),
)
COMMENTS = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
COMMENTS |= {tokenize.ENCODING, tokenize.ENDMARKER}


class Measures(NamedTuple):
    lines: int
    tokens: float  # per line of code
    wide: float  # the share of lines beyond 100 columns
    flags: int
    taken: tuple[str, ...]  # from runtime
    verbs: tuple[str, ...]  # that are on the page
    blocks: int


def measure(path: Path) -> Measures:
    text = path.read_text()
    tree, lines = ast.parse(text), text.splitlines()
    code, count = set(), 0
    described = lines_of_docstrings(tree)
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type not in COMMENTS and token.start[0] not in described:
                count += 1
                code.add(token.start[0])
    return Measures(
        len(lines),
        count / len(code),
        sum(len(line) > 100 for line in lines) / len(lines),
        sum(isinstance(part, ast.AnnAssign) for part in body_of(tree, "Args")),
        tuple(taken(tree)),
        tuple(verb for verb in VERBS if verb in text),
        text.count("# === block: "),
    )


def lines_of_docstrings(tree) -> set[int]:
    """The lines of strings that stand alone, as docstrings and the help of flags do."""
    alone = [n for n in ast.walk(tree) if isinstance(n, ast.Expr)]
    strings = [n for n in alone if isinstance(getattr(n.value, "value", None), str)]
    return {line for n in strings for line in range(n.lineno, n.end_lineno + 1)}


def body_of(tree, name: str) -> list:
    found = [n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == name]
    return found[0].body if found else []


def taken(tree) -> list[str]:
    """The names that are imported from runtime, modules by their whole name."""
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "runtime":
            names += [each.name for each in node.names]
        if isinstance(node, ast.Import):
            names += [n.name for n in node.names if n.name.split(".")[0] == "runtime"]
    return names


if __name__ == "__main__":
    for name in sys.argv[1:]:
        found = measure(Path(name))
        shown = found._replace(taken=len(found.taken), verbs=len(found.verbs))
        numbers = (f"{value:.3g} {title}" for title, value in shown._asdict().items())
        print(f"{name}: {', '.join(numbers)}")
