"""view.html: a run as one page that needs nothing from elsewhere.

The page holds an index of its episodes as JSON, and the steps of each iteration as a compressed
chunk that is unpacked when somebody looks at it; so 10,000 episodes open at once. It also holds the
pictures that a visual run kept, each once. What a model or a world wrote reaches the page as JSON
alone, and its script writes it with textContent alone: it is text, whatever it holds. A content
security policy forbids every other script and every request.
"""

import base64
import gzip
import hashlib
import html
import json
import math
import re
import sys
from pathlib import Path

from runtime.saving.files import EPISODE_VERSION, finite, read_json, replace_file, rows_of, to_json

PAGE = Path(__file__).parent / "page"
FILES = {"train": "episodes.jsonl", "eval": "eval_episodes.jsonl"}
MOST = 10_000  # episodes of a page
HEAD = re.compile(r'^\{(?:"version": \d+, )?"iteration": (\d+),')  # how a row begins
TEXTS = ("observation", "action", "picture")  # of a step; every other column is a number
NUMBERS = (int, float, bool, type(None))
COLOURED = (  # what steps can be coloured by, if they have it
    "implicit_reward ground_truth_reward progress_reward reward advantage step_advantage "
    "episode_advantage progress"
).split()
PICTURE = re.compile("pictures/([0-9a-f]{16})[.]png")  # of a step, as runtime/report.py names them
WITHIN = 0.95  # share of the steps whose values lie within the colours' scale


def write_page(runs: list[Path], out: Path | None = None, most: int = MOST) -> Path:
    """Write the page of a run, or of two runs beside each other, and return where it is.

    runs: one or two directories. out: the page; None is view.html in the first of them, and for
    two view-against-B.html. most: episodes of a run on the page; of a larger one older iterations
    are thinned, which the page says. Exits with one line where there is no such run."""
    read = [read_run(Path(run), most) for run in runs]
    name = "view.html" if len(runs) == 1 else f"view-against-{read[1]['name']}.html"
    out = out or Path(runs[0]) / name
    chunks, pictures = [], {}
    for path, run in zip(runs, read):
        for kept in run["sets"]:
            pictures |= pictures_in(Path(path), kept["steps"]["texts"])
            chunks.append(packed(kept.pop("steps")))
            kept["chunk"] = len(chunks) - 1
    replace_file(out, page_of(read, chunks, pictures))
    return out


# ------------ reading ------------


def read_run(path: Path, most: int) -> dict:
    """What the page's index has of a run, with the steps of its sets, which are not packed yet."""
    if not (path / "args.json").is_file():
        sys.exit(f"{path}: no run there")
    flags, starts = record_of(path)
    script = starts[0]["script"]
    rows = rows_of(path / "metrics.jsonl")
    keys = dict.fromkeys(key for row in rows for key in row if key != "iteration")
    metrics = {key: [row.get(key) for row in rows] for key in keys}
    world = re.search("sokoban|webshop|sotopia", script)

    counts = {kind: count(path / file) for kind, file in FILES.items()}
    kept, told = thinned(counts, most)
    sets = []
    for kind, file in FILES.items():
        read, damaged = read_sets(path / file, kind, kept)
        sets += read
        if damaged:
            told = f"{told} {damaged:,} damaged rows of {file} are left out.".strip()
    return {
        "name": path.resolve().name,
        "script": script,
        "world": world[0] if world else "",
        "described": starts[-1].get("world", ""),
        "command": starts[0]["command"],
        "flags": flags,
        "iterations": [row["iteration"] for row in rows],
        "metrics": {key: numbers(values) for key, values in metrics.items()},
        "scales": scales_of(sets),
        "told": told,
        "sets": sets,
    }


def record_of(path: Path) -> tuple[dict, list[dict]]:
    """(flags, starts) of a run; exits with one line where they are not what a run writes."""
    try:
        flags, starts = read_json(path / "args.json"), read_json(path / "run.json")["starts"]
        texts = [starts[0]["script"], starts[0]["command"], starts[-1].get("world", "")]
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        flags, texts = None, []
    if not isinstance(flags, dict) or not all(isinstance(text, str) for text in texts):
        sys.exit(f"{path}: its args.json or run.json is not what a run writes")
    return flags, starts


def count(path: Path) -> dict[int, int]:
    """{iteration: number of rows}, from the beginning of each line."""
    found: dict[int, int] = {}
    if path.exists():
        with path.open(errors="replace") as lines:
            for head in map(HEAD.match, lines):
                if head:
                    iteration = int(head[1])
                    found[iteration] = found.get(iteration, 0) + 1
    return found


def thinned(counts: dict[str, dict[int, int]], most: int) -> tuple[set[int], str]:
    """(the iterations that the page shows, what it says of the others).

    Half of the room is for the last iterations, all of them; in the rest stands every n-th of those
    before."""
    sizes: dict[int, int] = {}
    for of_kind in counts.values():
        for iteration, number in of_kind.items():
            sizes[iteration] = sizes.get(iteration, 0) + number
    total = sum(sizes.values())
    if total <= most:
        return {*sizes}, ""

    recent, used = [], 0
    for iteration in sorted(sizes, reverse=True):
        if recent and used + sizes[iteration] > most / 2:
            break
        recent.append(iteration)
        used += sizes[iteration]
    older = sorted(sizes.keys() - {*recent})
    every = max(1, math.ceil(sum(sizes[i] for i in older) / max(1, most - used)))
    kept = {*recent, *older[::every]}
    shown = sum(sizes[i] for i in kept)
    which = f"every iteration from {recent[-1]} on"
    if older:
        which += f", and one in {every} before it"
    return kept, f"{shown:,} of {total:,} episodes are on this page: {which}."


def read_sets(path: Path, kind: str, kept: set[int]) -> tuple[list[dict], int]:
    """(the episodes of each kept iteration: {kind, iteration, episodes, steps}, in their order, how
    many rows are left out because they are none).

    An episode is [task, outcome, success, truncated, invalid steps, steps]. steps has columns (the
    names), texts (each once) and, for every episode, a list per step: its columns' entries, where
    texts are places in `texts`."""
    sets: dict[int, dict] = {}
    damaged = 0
    if not path.exists():
        return [], damaged
    with path.open(errors="replace") as lines:
        for line in lines:
            head = HEAD.match(line)
            if not head or int(head[1]) not in kept:
                damaged += not head and line.endswith("\n")
                continue
            try:
                episode = json.loads(line)
            except (ValueError, RecursionError):
                damaged += line.endswith("\n")  # else torn by a kill, or being written now
                continue
            version = episode.get("version", 1)
            if type(version) is int and version > EPISODE_VERSION:
                newer = f"a row has version {version}"
                sys.exit(f"{path}: {newer}, and this program reads up to {EPISODE_VERSION}")
            if not is_episode(episode):
                damaged += 1
                continue
            add_episode(sets.setdefault(episode["iteration"], new_set(kind, episode)), episode)
    return [sets[iteration] for iteration in sorted(sets)], damaged


def is_episode(row: dict) -> bool:
    """Whether a row is what docs/episodes.md says, so that the page can show it."""
    whole = all(type(row.get(name)) is int for name in ("iteration", "task"))
    numbers = all(type(row.get(name)) in NUMBERS for name in ("outcome", "success", "truncated"))
    steps = row.get("steps")
    return whole and numbers and isinstance(steps, list) and all(map(is_step, steps))


def is_step(step) -> bool:
    if not isinstance(step, dict) or not {"observation", "action", "valid"} <= step.keys():
        return False
    texts = [step[name] for name in TEXTS if step.get(name) is not None]
    numbers = (value for name, value in step.items() if name not in TEXTS)
    return all(type(t) is str for t in texts) and all(type(n) in NUMBERS for n in numbers)


def new_set(kind: str, episode: dict) -> dict:
    columns = list(episode["steps"][0]) if episode["steps"] else []
    steps = {"columns": columns, "texts": {}, "episodes": []}
    return {"kind": kind, "iteration": episode["iteration"], "episodes": [], "steps": steps}


def add_episode(to: dict, episode: dict) -> None:
    """Add a row of episodes.jsonl to the set of its iteration."""
    told, texts = episode["steps"], to["steps"]["texts"]
    success = episode.get("success", (episode.get("outcome") or 0) >= 1)
    invalid = sum(not step["valid"] for step in told)
    about = [episode["task"], number(episode.get("outcome")), success, episode.get("truncated")]
    to["episodes"].append([*about, invalid, len(told)])

    steps = []
    for step in told:
        entries = []
        for name in to["steps"]["columns"]:
            value = step.get(name)
            if name in TEXTS:
                value = None if value is None else texts.setdefault(value, len(texts))
            entries.append(number(value))
        steps.append(entries)
    to["steps"]["episodes"].append(steps)


def number(value):
    """A number as the page needs it: six digits after the point, None where it is not finite."""
    value = finite(value)
    return round(value, 6) if isinstance(value, float) else value


def numbers(values: list) -> list:
    return [number(value) if isinstance(value, int | float) else None for value in values]


def scales_of(sets: list[dict]) -> dict[str, float]:
    """{column: the absolute value within which WITHIN of the steps lie}, of what colours steps; a
    column that is 0 throughout is left out."""
    values: dict[str, list[float]] = {}
    for one in sets:
        columns = one["steps"]["columns"]
        for name in COLOURED:
            if name in columns:
                place = columns.index(name)
                entries = (step[place] for steps in one["steps"]["episodes"] for step in steps)
                values.setdefault(name, []).extend(abs(x) for x in entries if x)
    scales = {}
    for name in COLOURED:
        if found := sorted(values.get(name, ())):
            scales[name] = found[min(len(found) - 1, int(WITHIN * len(found)))]
    return scales


# ------------ writing ------------


def pictures_in(run: Path, texts) -> dict[str, str]:
    """{name: PNG in base64} of the pictures of a run that these texts name."""
    found = {named[1]: run / named[0] for named in map(PICTURE.fullmatch, texts) if named}
    return {
        name: base64.b64encode(path.read_bytes()).decode("ascii")
        for name, path in found.items()
        if path.is_file()
    }


def packed(steps: dict) -> str:
    """A set's steps as the page's script unpacks them: JSON, gzip, base64."""
    plain = json.dumps(steps | {"texts": list(steps["texts"])}, separators=(",", ":"))
    return base64.b64encode(gzip.compress(plain.encode("ascii"), 5, mtime=0)).decode("ascii")


def page_of(runs: list[dict], chunks: list[str], pictures: dict[str, str]) -> str:
    """The page's text, from page/: its frame, style and script."""
    title = " against ".join(run["name"] for run in runs)
    data = to_json({"runs": runs, "within": WITHIN}, separators=(",", ":"))
    kept = {f"chunk-{number}": chunk for number, chunk in enumerate(chunks)}
    kept |= {f"picture-{name}": png for name, png in pictures.items()}
    packs = (
        f'<script type="text/plain" id="{name}">{text}</script>' for name, text in kept.items()
    )
    style, script = (PAGE / "page.css").read_text(), (PAGE / "page.js").read_text()
    parts = {
        "TITLE": html.escape(title),
        "POLICY": f"default-src 'none'; img-src data:; style-src {hash_of(style)}; "
        f"script-src {hash_of(script)}",
        "STYLE": style,
        "DATA": data.replace("<", "\\u003c"),  # no word of it can end the element
        "CHUNKS": "\n".join(packs),
        "SCRIPT": script,
    }
    frame = (PAGE / "page.html").read_text()
    return re.sub("{{([A-Z]+)}}", lambda found: parts[found[1]], frame)


def hash_of(text: str) -> str:
    """An inline element's text, as a content security policy names it."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
