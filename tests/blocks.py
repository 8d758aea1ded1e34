"""The scripts repeat each other on purpose; what they share is equal byte for byte.

    # === block: policy ===
    ...
    # === end block ===

python tests/blocks.py                            checks; what differs is shown as a unified diff
python tests/blocks.py --fix rloo_sokoban.py      gives these files what the other scripts share

SCRIPTS has the scripts and the blocks that each of them holds. A copy of your own is not among
them, whatever its name: it is neither checked nor changed. Standard library only.
"""

import argparse
import ast
import difflib
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

TOKEN = ("rollout", "token policy")  # a ratio per token, as the baselines' papers have it
ACTION = ("rollout", "action policy")  # of each action, by the mean of its tokens
TALK = ("conversation", "token policy")
ISTAR = ("advantages", "policy", "prm")
PAPER = ("advantages", "policy", "paper prm")
SCRIPTS = {
    "dpo_webshop.py": ("rollout",),
    "g2po_alfworld.py": TOKEN,
    "g2po_sokoban.py": TOKEN,
    "g2po_visual_sokoban.py": TOKEN,
    "g2po_webshop.py": TOKEN,
    "gagpo_alfworld.py": ACTION,
    "gagpo_sokoban.py": ACTION,
    "gagpo_visual_sokoban.py": ACTION,
    "gagpo_webshop.py": ACTION,
    "gigpo_alfworld.py": TOKEN,
    "gigpo_sokoban.py": TOKEN,
    "gigpo_textgame.py": TOKEN,
    "gigpo_visual_sokoban.py": TOKEN,
    "gigpo_webshop.py": TOKEN,
    "graphgpo_alfworld.py": TOKEN,
    "graphgpo_sokoban.py": TOKEN,
    "graphgpo_webshop.py": TOKEN,
    "grpo_alfworld.py": TOKEN,
    "grpo_sokoban.py": TOKEN,
    "grpo_sotopia.py": TALK,
    "grpo_visual_sokoban.py": TOKEN,
    "grpo_webshop.py": TOKEN,
    "istar_alfworld.py": ("rollout", *ISTAR),
    "istar_paper_alfworld.py": ("rollout", *PAPER),
    "istar_paper_sokoban.py": ("rollout", *PAPER),
    "istar_paper_sotopia.py": ("conversation", "advantages", "policy"),
    "istar_paper_visual_sokoban.py": ("rollout", *PAPER),
    "istar_paper_webshop.py": ("rollout", *PAPER),
    "istar_sokoban.py": ("rollout", *ISTAR),
    "istar_sotopia.py": ("conversation", *ISTAR),
    "istar_textgame.py": ("rollout", *ISTAR),
    "istar_visual_sokoban.py": ("rollout", *ISTAR),
    "istar_webshop.py": ("rollout", *ISTAR),
    "istar_webshop_ablations.py": ("rollout",),
    "ppo_webshop.py": TOKEN,
    "prime_webshop.py": TOKEN,
    "reinforce_pp_alfworld.py": TOKEN,
    "reinforce_pp_sokoban.py": TOKEN,
    "reinforce_pp_sotopia.py": TALK,
    "reinforce_pp_visual_sokoban.py": TOKEN,
    "reinforce_pp_webshop.py": TOKEN,
    "rloo_alfworld.py": TOKEN,
    "rloo_sokoban.py": TOKEN,
    "rloo_sotopia.py": TALK,
    "rloo_textgame.py": TOKEN,
    "rloo_visual_sokoban.py": TOKEN,
    "rloo_webshop.py": TOKEN,
    "warm_start.py": (),
}
KNOWN = {block for blocks in SCRIPTS.values() for block in blocks}
# Functions of one name that differ on purpose: a ratio is of a step or of a token, a PRM learns in
# more than one way. main differs by the world alone, SOTOPIA's by both sides of a conversation too.
OWN = """Args RunArgs main play policy_loss policy_update engine_weights step_advantages lora
preference_pairs margins prm_update draw""".split()
MAX_LINES, MAX_BLOCKS = 500, 6
START = re.compile(r"\s*# === block: (.+) ===\n")
END = re.compile(r"\s*# === end block ===\n?")
WORLD = re.compile(r"\b\w+\.from_args\(args\)")
SIDES = (  # of a conversation, in main
    (r"    panel = run\.eval_env\.sides_of\(run\.eval_tasks\).*\n", ""),
    (r"env\.sides_of\((sorted\(.+?\))\)\n", r"\1\n"),
    (r"run\.eval_env, panel, evaluation", "run.eval_env, run.eval_tasks, evaluation"),
)


class Script(NamedTuple):
    """A script and what it may share. A place is (first line, line after the last)."""

    path: Path
    lines: list[str]
    blocks: dict[str, tuple[int, int]]  # the places between the marks
    definitions: dict[str, tuple[int, int]]  # of functions and classes of the top level
    faults: list[str]

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def places(self) -> dict[str, tuple[int, int]]:
        """What has to be equal in every script that holds it, blocks first."""
        blocks = {f"block {name}": place for name, place in self.blocks.items()}
        return blocks | {name: at for name, at in self.definitions.items() if name not in OWN}

    def text(self, place: tuple[int, int]) -> str:
        return "".join(self.lines[slice(*place)])


def scripts(root: Path) -> list[Path]:
    """The scripts of the list that are there, in its order."""
    return [root / name for name in SCRIPTS if (root / name).is_file()]


def read(path: Path) -> Script:
    """A script, taken apart; its faults are those of its form."""
    with path.open(newline="") as file:  # the line's end is a byte too
        lines = file.readlines()
    blocks, faults = blocks_of(path, lines)
    definitions = {}
    try:
        definitions = definitions_of("".join(lines))
    except SyntaxError as error:
        faults.append(f"{path.name}:{error.lineno}: {error.msg}")
    return Script(path, lines, blocks, definitions, faults)


def blocks_of(path: Path, lines: list[str]) -> tuple[dict[str, tuple[int, int]], list[str]]:
    """(places of the blocks, faults of their marks)."""
    blocks, faults = {}, []
    name, start = None, 0
    for number, line in enumerate(lines, 1):
        where = f"{path.name}:{number}"
        opening = START.fullmatch(line)
        if opening and name:
            faults.append(f"{where}: block '{opening[1]}' opens inside block '{name}'")
        elif opening:
            name, start = opening[1], number
            if name in blocks:
                faults.append(f"{where}: block '{name}' stands twice")
            if name not in KNOWN:
                faults.append(f"{where}: unknown block '{name}'")
        elif END.fullmatch(line) and name:
            blocks[name] = (start, number - 1)
            name = None
        elif END.fullmatch(line):
            faults.append(f"{where}: an end without a block")
    if name:
        faults.append(f"{path.name}:{start}: block '{name}' is not closed")
    return blocks, faults


def definitions_of(text: str) -> dict[str, tuple[int, int]]:
    """Places of the functions and classes of the top level, decorators included."""
    places = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            places[node.name] = (first - 1, node.end_lineno)
    return places


# ------------ check ------------


def check(root: Path) -> tuple[list[str], list[str]]:
    """(faults, report): what is wrong, and a line per script."""
    all_scripts = [read(path) for path in scripts(root)]
    missing = SCRIPTS.keys() - {script.name for script in all_scripts}
    faults, report = [f"{name}: this script is missing" for name in sorted(missing)], []
    for script in all_scripts:
        faults += script.faults + faults_of_form(script)
        inside = sum(end - start + 2 for start, end in script.blocks.values())
        length = len(script.lines)
        report.append(f"{script.name}: {length} lines, {length - inside} outside blocks")
    return faults + differences(all_scripts) + differences_of_main(all_scripts), report


def faults_of_form(script: Script) -> list[str]:
    """Blocks that a script has to hold, or should not; and its budget of lines and blocks."""
    name, held = script.name, script.blocks.keys()
    asked = SCRIPTS[name]
    faults = [f"{name}: block '{block}' is missing" for block in asked if block not in held]
    others = [block for block in held if block in KNOWN and block not in asked]
    faults += [f"{name}: block '{block}' is not among those of SCRIPTS" for block in others]
    if len(script.lines) > MAX_LINES:
        faults.append(f"{name}: {len(script.lines)} lines, at most {MAX_LINES}")
    if len(held) > MAX_BLOCKS:
        faults.append(f"{name}: {len(held)} blocks, at most {MAX_BLOCKS}")
    return faults


def differences(all_scripts: list[Script]) -> list[str]:
    """A diff of every shared block, function or class that is not as most scripts have it."""
    faults, reported = [], set()  # (script, line) of what was shown already
    labels = dict.fromkeys(label for script in all_scripts for label in script.places)
    for label in sorted(labels, key=lambda label: not label.startswith("block ")):
        holders = [script for script in all_scripts if label in script.places]
        texts = [script.text(script.places[label]) for script in holders]
        usual = usual_of(texts)
        for script, text in zip(holders, texts):
            lines = {(script.name, line) for line in range(*script.places[label])}
            if text != texts[usual] and not lines <= reported:
                names = holders[usual].name, script.name
                faults.append(diff(texts[usual], text, *(f"{name}: {label}" for name in names)))
                reported |= lines
    return faults


def differences_of_main(all_scripts: list[Script]) -> list[str]:
    """A diff of every main that differs from its algorithm's by more than the world's class."""
    algorithms: dict[str, list[Script]] = {}
    for script in all_scripts:
        if "main" in script.definitions:
            algorithms.setdefault(algorithm_of(script.name), []).append(script)

    faults = []
    for holders in algorithms.values():
        texts = [script.text(script.definitions["main"]) for script in holders]
        texts = [WORLD.sub("World.from_args(args)", text) for text in texts]
        for side, one in SIDES:
            texts = [re.sub(side, one, text) for text in texts]
        usual = usual_of(texts)
        for script, text in zip(holders, texts):
            if text != texts[usual]:
                names = holders[usual].name, script.name
                faults.append(diff(texts[usual], text, *(f"{name}: main" for name in names)))
    return faults


def algorithm_of(name: str) -> str:
    """rloo of rloo_visual_sokoban.py; an algorithm of one world has its world's name too."""
    return name.rpartition("_")[0].removesuffix("_visual")


def usual_of(texts: list[str]) -> int:
    """The place of the text that most have; of equally many the first."""
    return texts.index(Counter(texts).most_common(1)[0][0])


def diff(expected: str, text: str, *labels: str) -> str:
    lines = [each.splitlines(keepends=True) for each in (expected, text)]
    return "".join(difflib.unified_diff(*lines, *labels)).rstrip()


# ------------ fix ------------


def fix(root: Path, files: list[str]) -> list[str]:
    """Give these files, and no others, the text that the other holders of what they share agree
    on: the names of those that changed. Exits, before anything is written, where it cannot."""
    targets = [read(target(root, file)) for file in files]
    paths = {script.path for script in targets}
    others = [read(path) for path in scripts(root) if path not in paths]
    if faults := [fault for script in targets + others for fault in script.faults]:
        sys.exit("\n".join(faults))

    texts = {script.path: mended(script, others) for script in targets}
    changed = [script for script in targets if texts[script.path] != "".join(script.lines)]
    for script in changed:
        script.path.write_bytes(texts[script.path].encode())
    return [script.name for script in changed]


def target(root: Path, file: str) -> Path:
    """The script of the list that a file given to --fix is; its changes have to be committed."""
    path = next((p for p in scripts(root) if p.resolve() == (root / file).resolve()), None)
    if path is None:
        sys.exit(f"--fix {file}: not a script of the list; a copy of your own stays as it is")
    status = ["git", "status", "--porcelain", "--", path.name]
    done = subprocess.run(status, cwd=root, capture_output=True, text=True)
    if done.returncode == 0 and done.stdout:
        sys.exit(f"--fix {file}: it has changes that are not committed, and they would be lost")
    return path


def mended(script: Script, others: list[Script]) -> str:
    """The script's text with every part that it shares as the others have it."""
    new = {}  # place: text
    for label, place in script.places.items():
        camps: dict[str, list[str]] = {}  # text: names of those who have it
        for other in others:
            if label in other.places:
                camps.setdefault(other.text(other.places[label]), []).append(other.name)
        if len(camps) > 1:
            sides = " against ".join(", ".join(names) for names in camps.values())
            sys.exit(f"--fix {script.name}: the others do not agree on {label}: {sides}")

        inside = any(start <= place[0] and place[1] <= end for start, end in new)
        if camps and not inside:
            new[place] = next(iter(camps))

    lines = script.lines[:]
    for place in sorted(new, reverse=True):
        lines[slice(*place)] = [new[place]]
    return "".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    here = Path(__file__).resolve().parent.parent
    parser.add_argument("--fix", metavar="FILE", nargs="+", help="the scripts that are changed")
    parser.add_argument("--root", default=here, type=Path, help="where the scripts are")
    arguments = parser.parse_args()
    root = arguments.root.resolve()
    if arguments.fix:
        print("changed:", ", ".join(fix(root, arguments.fix)) or "nothing")
    faults, report = check(root)
    print("\n".join(report))
    if faults:
        sys.exit("\n".join(faults))


if __name__ == "__main__":
    main()
