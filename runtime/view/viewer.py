"""view.html: a run as one page that needs nothing from elsewhere. What a model or a world wrote is
text there, written with textContent alone; a policy forbids other scripts and all requests."""

import gzip
import hashlib
import html
import json
import re
import sys
from base64 import b64encode
from collections import Counter, defaultdict
from pathlib import Path

from runtime.saving.files import finite, read_json, replace_file, rows_of, to_json

import numpy as np

PAGE = Path(__file__).parent / "page"
FILES = {"train": "episodes.jsonl", "eval": "eval_episodes.jsonl"}
MOST = 10_000  # episodes of a page
TEXTS = ("observation", "action", "picture")  # of a step; every other column is a number
COLOURED = """implicit_reward ground_truth_reward reward advantage step_advantage
episode_advantage progress""".split()  # what steps can be coloured by, if they have it
PICTURE = re.compile("pictures/([0-9a-f]{16})[.]png")  # of a step, as report.py names them
WITHIN = 0.95  # share of the steps other than 0 that lie within the colours' scale


def write_page(runs: list[Path], out: Path | None = None, most: int = MOST) -> Path:
    """Write the page of a run, or of two side by side; its path. most: episodes of each run."""
    read = [read_run(run, most) for run in runs]
    out = out or runs[0] / f"{'-against-'.join(['view', *(r['name'] for r in read[1:])])}.html"
    packs = {}  # {id of an element of the page: what it holds}
    for number, (path, kept) in enumerate((p, k) for p, r in zip(runs, read) for k in r["sets"]):
        steps, kept["chunk"] = kept.pop("steps"), number
        plain = json.dumps(steps | {"texts": [*steps["texts"]]}, separators=(",", ":")).encode()
        packs[f"chunk-{number}"] = b64encode(gzip.compress(plain, 5, mtime=0)).decode()
        for named in map(PICTURE.fullmatch, steps["texts"]):
            if named and (path / named[0]).is_file():
                packs[f"picture-{named[1]}"] = b64encode((path / named[0]).read_bytes()).decode()
    held = [f'<script type="text/plain" id="{id}">{text}</script>' for id, text in packs.items()]
    style, script = (PAGE / "page.css").read_text(), (PAGE / "page.js").read_text()
    hashes = {t: b64encode(hashlib.sha256(t.encode()).digest()).decode() for t in (style, script)}
    data = to_json({"runs": read, "within": WITHIN}, separators=(",", ":"))
    parts = {
        "TITLE": html.escape(" against ".join(run["name"] for run in read)),
        "POLICY": f"default-src 'none'; img-src data:; style-src 'sha256-{hashes[style]}'; "
        f"script-src 'sha256-{hashes[script]}'",
        "STYLE": style,
        "DATA": data.replace("<", "\\u003c"),  # no word of it can end the element
        "CHUNKS": "\n".join(held),
        "SCRIPT": script,
    }
    page = re.sub("{{([A-Z]+)}}", lambda found: parts[found[1]], (PAGE / "page.html").read_text())
    replace_file(out, page)
    return out


def read_run(path: Path, most: int) -> dict:
    """What the page's index has of a run, with the steps of its sets."""
    if not (path / "args.json").is_file():
        sys.exit(f"{path}: no run there")
    try:
        flags, starts = {**read_json(path / "args.json")}, read_json(path / "run.json")["starts"]
        told = {"script": starts[0]["script"], "command": starts[0]["command"]}
        named = told["described"] = starts[-1].get("world", "")
        world = re.search("sokoban|webshop|sotopia|alfworld|$", named or told["script"])[0]
        "".join(told.values())  # which are texts
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        sys.exit(f"{path}: its args.json or run.json is not what a run writes")
    rows = rows_of(path / "metrics.jsonl")
    keys = dict.fromkeys(key for row in rows for key in row if "/" in key)
    read = {kind: defaultdict(list) for kind in FILES}  # {kind: {iteration: its episodes}}
    for kind, file in FILES.items():
        for row in filter(is_episode, rows_of(path / file)):  # without damaged ones
            read[kind][row["iteration"]].append(row)
    sizes = {kind: {i: len(rows) for i, rows in found.items()} for kind, found in read.items()}
    kept, said = thinned(sizes, most)
    groups = [(k, i, found[i]) for k, found in read.items() for i in sorted(kept) if i in found]
    steps = [step for *_, of in groups for row in of for step in row["steps"]]
    felt = {n: [abs(number(s[n])) for s in steps if number(s.get(n))] for n in COLOURED}
    return told | {
        "name": path.resolve().name,
        "world": world,
        "flags": flags,
        "iterations": [row["iteration"] for row in rows],
        "metrics": {key: [number(row.get(key)) for row in rows] for key in keys},
        "scales": {name: float(np.quantile(of, WITHIN)) for name, of in felt.items() if of},
        "told": said,
        "sets": [set_of(*group) for group in groups],
    }


def is_episode(row: dict) -> bool:
    """Whether a row is what docs/episodes.md says, so that the page can show it."""
    try:
        numbers = [row["task"], *(row.get(name) for name in ("outcome", "success", "truncated"))]
        for step in row["steps"]:
            texts = [step["observation"], step["action"], step.get("picture") or "", step["valid"]]
            "".join(texts[:3])  # which raises where one is none
            numbers += [value for name, value in step.items() if name not in TEXTS]
        return all(isinstance(value, int | float | None) for value in numbers)
    except (LookupError, TypeError, AttributeError):
        return False


def thinned(counts: dict[str, dict[int, int]], most: int) -> tuple[set[int], str]:
    """(the iterations that the page shows, what it says of it): every n-th, the last included."""
    sizes = sum(map(Counter, counts.values()), Counter())
    kept, every = sorted(sizes), 1
    while sum(sizes[i] for i in kept) > most and every < len(sizes):
        every += 1
        kept = sorted(sizes)[::-every]
    shown = f"{sum(sizes[i] for i in kept):,} of {sizes.total():,} episodes"
    return {*kept}, f"{shown} are on this page: of one iteration in {every}." if every > 1 else ""


def set_of(kind: str, iteration: int, rows: list[dict]) -> dict:
    """The episodes of an iteration: {kind, iteration, episodes, steps}. steps has columns (names),
    texts ({text: its place}) and each episode's steps: their entries, with places of texts."""
    columns = [*dict.fromkeys(name for row in rows for step in row["steps"] for name in step)]
    texts: dict[str, int] = {}

    def entry(value):
        return texts.setdefault(value, len(texts)) if isinstance(value, str) else number(value)

    index, steps = [], []
    for row in rows:
        success = row.get("success", (row.get("outcome") or 0) >= 1)
        invalid = sum(not step["valid"] for step in row["steps"])
        about = [row["task"], number(row.get("outcome")), success, row.get("truncated")]
        index.append([*about, invalid, len(row["steps"])])
        steps.append([[entry(step.get(name)) for name in columns] for step in row["steps"]])
    told = {"columns": columns, "texts": texts, "episodes": steps}
    return {"kind": kind, "iteration": iteration, "episodes": index, "steps": told}


def number(value):
    """A number as the page needs it: six digits after the point, None where it is not finite."""
    value = finite(value)
    return round(value, 6) if isinstance(value, float) else value
