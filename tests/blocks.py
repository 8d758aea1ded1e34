"""Shared blocks of the scripts: equal byte for byte wherever they stand, and present where they must be.

    # === block: rollout ===
    ...
    # === end block ===

python tests/blocks.py                          checks: a unified diff of what differs, and lines outside blocks
python tests/blocks.py --fix istar_sokoban.py   copies that script's blocks over those of the same name elsewhere

Standard library only. Which script must hold which block follows from its name: REQUIRED.
"""

import argparse
import difflib
import fnmatch
import re
import sys
from pathlib import Path

ALGORITHMS = ("istar", "rloo", "grpo", "reinforce_pp", "gigpo", "prime", "ppo")
MAX_LINES = 700
CORE = ("imports", "args", "data", "rollout", "core", "setup", "start", "update")
REQUIRED = (  # (pattern of the file's name, blocks it must hold)
    *((f"{algorithm}_*.py", CORE) for algorithm in ALGORITHMS),
    ("*_sokoban.py", ("sokoban args",)),
    ("*_webshop.py", ("webshop args",)),
    ("*_sotopia.py", ("sotopia args",)),
    (
        "istar_*.py",
        ("rloo_advantages", "grpo_advantages", "reinforce_pp_advantages", "outcome_slope", "by_token", "istar"),
    ),
    ("istar_*.py", ("prm args", "prm setup", "prm iteration")),
    ("rloo_*.py", ("rloo_advantages",)),
    ("grpo_*.py", ("grpo_advantages", "outcome_slope", "grpo iteration")),
    ("reinforce_pp_*.py", ("reinforce_pp_advantages", "whitened", "outcome_slope", "reinforce_pp iteration")),
    ("prime_*.py", ("rloo_advantages", "by_token", "prm setup")),
    ("ppo_*.py", ("by_token",)),
    ("gigpo_*.py", ("grpo_advantages", "outcome_slope", "gigpo", "gigpo args", "gigpo iteration")),
    ("warm_start.py", ("data", "rollout")),
)
START, END = re.compile(r"\s*# === block: (.+) ===\n"), re.compile(r"\s*# === end block ===\n?")


def scripts(root: Path) -> list[Path]:
    """The scripts that are checked, in order of name."""
    patterns = [*(f"{algorithm}_*.py" for algorithm in ALGORITHMS), "warm_start.py"]
    return sorted({path for pattern in patterns for path in root.glob(pattern)})


def split(path: Path) -> tuple[list[str], dict[str, tuple[int, int]], list[str]]:
    """(lines, {block: (first line, line after the last)}, faults) of a script; the marks belong to no block."""
    lines, blocks, faults, name, start = path.read_text().splitlines(keepends=True), {}, [], None, 0
    known = {block for _, names in REQUIRED for block in names}
    for number, line in enumerate(lines):
        opening = START.fullmatch(line)
        if opening and name:
            faults.append(f"{path.name}:{number + 1}: block '{opening[1]}' opens inside block '{name}'")
        elif opening:
            name, start = opening[1], number + 1
            if name in blocks:
                faults.append(f"{path.name}:{number + 1}: block '{name}' stands twice")
            if name not in known:
                faults.append(f"{path.name}:{number + 1}: unknown block '{name}'")
        elif END.fullmatch(line) and name:
            blocks[name], name = (start, number), None
        elif END.fullmatch(line):
            faults.append(f"{path.name}:{number + 1}: an end without a block")
    if name:
        faults.append(f"{path.name}:{start}: block '{name}' is not closed")
    return lines, blocks, faults


def check(root: Path) -> tuple[list[str], list[str]]:
    """(faults, report): what is wrong, and a line per script."""
    faults, report, first = [], [], {}
    for path in scripts(root):
        lines, blocks, found = split(path)
        faults += found
        for pattern, names in REQUIRED:
            if fnmatch.fnmatch(path.name, pattern):
                faults += [f"{path.name}: block '{name}' is missing" for name in names if name not in blocks]
        for name, (start, end) in blocks.items():
            text = lines[start:end]
            other, expected = first.setdefault(name, (path.name, text))
            if text != expected:
                labels = f"{other}: {name}", f"{path.name}: {name}"
                faults.append("".join(difflib.unified_diff(expected, text, *labels)).rstrip())
        if len(lines) > MAX_LINES:
            faults.append(f"{path.name}: {len(lines)} lines, at most {MAX_LINES}")
        outside = len(lines) - sum(end - start + 2 for start, end in blocks.values())
        report.append(f"{path.name}: {len(lines)} lines, {outside} outside blocks")
    return faults, report


def fix(root: Path, source: Path) -> list[str]:
    """Copy the blocks of `source` into every other script that holds them: the files changed."""
    lines, blocks, faults = split(source)
    if faults:
        sys.exit("\n".join(faults))
    changed = []
    for path in scripts(root):
        own, places, found = split(path)
        if path.resolve() == source.resolve() or found:
            continue
        text = own[:]
        for name, (start, end) in sorted(places.items(), key=lambda item: -item[1][0]):
            if name in blocks:
                text[start:end] = lines[slice(*blocks[name])]
        if text != own:
            path.write_text("".join(text))
            changed.append(path.name)
    return changed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fix", metavar="FILE", help="copy this script's blocks into the others")
    parser.add_argument(
        "--root", default=Path(__file__).resolve().parent.parent, type=Path, help="where the scripts are"
    )
    arguments = parser.parse_args()
    if arguments.fix:
        print("changed:", ", ".join(fix(arguments.root, arguments.root / arguments.fix)) or "nothing")
    faults, report = check(arguments.root)
    print("\n".join(report))
    if faults:
        sys.exit("\n".join(faults))


if __name__ == "__main__":
    main()
