"""The results of a sweep: their file, and its table and picture, with means over seeds."""

import json
import re
import statistics
import sys
from pathlib import Path

from runtime.saving.files import append, replace_file, to_json
from sweeps.file import is_number, varied_in

# Student's t for 95 % with 1, 2, ... degrees of freedom
T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
IDENTITY = ("name", "config", "seed", "command", "metric")  # a result with these is used again


def key_of(entry: dict) -> str:
    return to_json([entry.get(name) for name in IDENTITY])


def read_results(path: Path) -> list[dict]:
    """The entries of results.jsonl, which is written again without the line that a kill tore. Where
    other lines are damaged, they are kept in a file beside it, and a line says so."""
    text = path.read_bytes().decode(errors="replace") if path.exists() else ""
    lines = [line for line in text.splitlines() if line.strip()]
    entries = [entry_of(line) for line in lines]
    damaged = [line for line, entry in zip(lines, entries) if not entry]
    if damaged and not entries[-1] and not text.endswith("\n"):
        damaged.pop()
    if damaged:
        aside = path.with_name(f"{path.name}.damaged")
        append(aside, damaged)
        told = f"{len(damaged)} of its lines are no results, and their runs are run again"
        print(f"{path}: {told}; {aside.name} has them", file=sys.stderr)
    entries = [entry for entry in entries if entry]
    replace_file(path, "".join(f"{to_json(entry)}\n" for entry in entries))
    return entries


def entry_of(line: str) -> dict | None:
    """A line of results.jsonl: a result, or a row that bayes has asked for; None if it is none."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(entry, dict):
        return None
    told = entry.get("evaluations")
    right = isinstance(told, list) and told and all(map(is_number, told))
    right = right and entry.get("value") == told[-1] and isinstance(entry.get("state"), str)
    return entry if right or isinstance(entry.get("asked"), dict) else None


# ------------ table and picture ------------


def half_width(values: list[float]) -> float | None:
    """Half of the 95 % interval of a mean, by Student's t; None of one value."""
    if len(values) < 2:
        return None
    return student(len(values) - 1) * statistics.stdev(values) / len(values) ** 0.5


def student(free: float) -> float:
    """The 97.5 % quantile of Student's t; up to 10 degrees of freedom a fraction does not count."""
    if free < len(T) + 1:
        return T[int(free) - 1]
    z = 1.95996
    return z + (z**3 + z) / (4 * free) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * free**2)


def summary(results: dict[int, list[dict]], goal: str) -> list[dict]:
    """The rows, best first, from their results by their numbers: {config, values, mean, half,
    command, early}; those that were stopped early come last, and equal ones in the file's order."""
    rows = []
    for _, row in sorted(results.items()):
        values = [result["value"] for result in row]
        early = any(result["state"] == "stopped early" for result in row)
        rows.append({"config": row[0]["config"], "values": values, "early": early})
        rows[-1] |= {"mean": statistics.mean(values), "half": half_width(values)}
        rows[-1] |= {"command": row[0]["command"]}
    sign = -1 if goal == "maximize" else 1
    return sorted(rows, key=lambda row: (row["early"], sign * row["mean"]))


def table(sweep: dict, rows: list[dict], title: str) -> str:
    """Markdown: a line per row."""
    names = varied_in(sweep)
    head = [*names, sweep["metric"]["name"], "95 % interval", "seeds", "command"]
    lines = [f"# {title}", "", f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for row in rows:
        cells = [shown(row["config"][name]) for name in names]
        between = "–"
        if row["half"] is not None:
            between = f"{row['mean'] - row['half']:.3f} to {row['mean'] + row['half']:.3f}"
        seeds = f"{len(row['values'])}{', stopped early' * row['early']}"
        cells += [f"{row['mean']:.3f}", between, seeds, f"`{row['command']}`"]
        cells = [re.sub(r"\s", " ", cell).replace("|", "\\|") for cell in cells]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def shown(value) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def picture(sweep: dict, rows: list[dict], title: str, path: Path) -> None:
    """Each parameter against the result: a point per row with its interval, and per seed a dot."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = varied_in(sweep)
    size = (4.2 * len(names) + 0.6, 3.6)
    figure, axes = plt.subplots(1, len(names), figsize=size, sharey=True, squeeze=False)
    for axis, name in zip(axes[0], names):
        values = [row["config"][name] for row in rows]
        places, least = values, min((v for v in values if is_number(v) and v > 0), default=1)
        if not all(map(is_number, values)):
            known = sweep["parameters"][name].get("values", values)  # in the file's order
            labels = list(dict.fromkeys(map(str, known)))
            places = [labels.index(str(value)) for value in values]
            axis.set_xticks(range(len(labels)), labels)
            axis.set_xlim(-0.5, len(labels) - 0.5)
        elif 0 <= min(values) and max(values) > 20 * least:  # 0 is linear
            axis.set_xscale("symlog", linthresh=least, linscale=0.5)
            axis.set_xlim(left=0 if min(values) == 0 else min(values) / 1.5)
        for place, row in zip(places, rows):
            style = dict(color="0.6" if row["early"] else "#1f5f9e")
            axis.plot([place] * len(row["values"]), row["values"], ".", alpha=0.5, **style)
            mark = "x" if row["early"] else "o"
            axis.errorbar(place, row["mean"], row["half"], marker=mark, capsize=3, **style)
        axis.set_xlabel(name)
        axis.grid(axis="y", alpha=0.3)
    axes[0, 0].set_ylabel(sweep["metric"]["name"])
    figure.suptitle(title, fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
