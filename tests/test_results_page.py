"""docs/results/: each number between the tables is one of a table of its section or of one that the
section links, or it follows from rows as DERIVED computes it. The pages keep their lengths, and
links of the documentation lead somewhere."""

import re
from pathlib import Path
from statistics import mean, stdev

from benchmarks import evidence
from benchmarks.credit import interval

import pytest
from conftest import ROOT

PAGES = {path.name: path.read_text() for path in sorted(evidence.PAGES.glob("*.md"))}
NUMBER = r"(-?\d+\.\d+)"
ALONE = re.compile(rf"(?<![\w.]){NUMBER}(?!\w|\.\d)")
BETWEEN = re.compile(rf"{NUMBER}(?:[^.\d|]{{0,60}}\([^.\d()|-]{{0,20}}|, ){NUMBER} to {NUMBER}")
PLUS_MINUS = re.compile(rf"{NUMBER}[^.\d|]{{0,40}}± {NUMBER}")
LINK = re.compile(r"\]\(([^)#\s]*)#?([\w-]*)\)")
ROWS = evidence.stored_rows(evidence.ROWS)


def rows_of(command: str) -> list[dict]:
    found = [row for row in ROWS if row["command"] == command]
    assert found, f"{command}: no rows"
    return found


def curves_of(command: str) -> list[list[float]]:
    """The scores of each run's evaluations."""
    return [[each["score"] for each in row["evaluations"]] for row in rows_of(command)]


def seconds(command: str) -> float:
    return evidence.Runs(command, rows_of(command), command).seconds()


def credit_seconds(table: str) -> dict[str, float]:
    """{row: seconds an iteration}, in the mean of its seeds, on Crossings."""
    ends = {(r["row"], r["seed"]): r for r in evidence.measured(table)}  # the last of each run
    rows: dict[str, list] = {}
    for (row, _), end in ends.items():
        rows.setdefault(row, []).append(end["seconds"] / end["iteration"])
    return {row: mean(values) for row, values in rows.items()}


def over_the_first(table: str) -> list[float]:
    """Seconds of each row of Crossings over those of the first, from the least."""
    first, *others = credit_seconds(table).values()
    return sorted(taken / first for taken in others)


def success_of(table: str, iteration: int) -> dict[tuple[str, int], float]:
    """{(row, seed): success on Crossings at this iteration}."""
    rows = [row for row in evidence.measured(table) if row["iteration"] == iteration]
    return {(row["row"], row["seed"]): row["success"] for row in rows}


def gaps(table: str, ours: str, theirs: str, iteration: int, seeds=range(99)) -> list[float]:
    """Success of ours less theirs on Crossings, of each of those seeds that both have."""
    success = success_of(table, iteration)
    both = [s for row, s in success if row == ours and (theirs, s) in success and s in seeds]
    return [success[ours, seed] - success[theirs, seed] for seed in both]


def above(*of_gaps) -> tuple[float, float]:
    """(mean, half of the interval) of gaps."""
    return interval(gaps(*of_gaps))


def times_the_first(table: str) -> list[float]:
    """Seconds of the last row of Crossings over those of the first, by seed, from the least."""
    ends = {(r["row"], r["seed"]): r["seconds"] for r in evidence.measured(table)}
    first, *_, last = dict.fromkeys(row for row, _ in ends)
    return sorted(taken / ends[first, s] for (row, s), taken in ends.items() if row == last)


def cell(table: str, row: str, title: str) -> list[float]:
    """The numbers of a cell of benchmarks/credit.py's table."""
    titles, _, *lines = evidence.cells_of(evidence.credit.table(evidence.measured(table)))
    (line,) = [line for line in lines if line[0] == f"`{row}`"]
    return [float(number) for number in ALONE.findall(line[titles.index(title)])]


def less(ours: str, theirs: str) -> list[float]:
    """(mean, low, high) of the last scores of one command less another's."""
    one, other = (evidence.Runs(command, rows_of(command), command) for command in (ours, theirs))
    middle, half = one.less(other)
    return [middle, middle - half, middle + half]


def without_prm(world: str, iterations: int) -> float:
    """How far iStar ends below the same script without its PRM."""
    command = f"istar_{world}.py --iterations {iterations} --eval-every 20"
    return less(f"{command} --alpha 0 --prm-steps 0", command)[0]


def pairs_ranked_right(world: str) -> float:
    """The share of new pairs that today's iStar ranks right on a world, as its page shows it."""
    command, *_ = [c for c in evidence.STUDIES[f"page-{world}"].commands if c.startswith("istar_")]
    return mean(evidence.Runs(command, rows_of(command), command).later("prm/pair_accuracy"))


def solved(command: str) -> list[int]:
    """The tasks that each run of a command solves in all samples after training, and all runs."""
    of_each = [{task for task, s in row["after"].items() if s == 1} for row in rows_of(command)]
    return [*map(len, [*of_each, set.intersection(*of_each)])]


def tokens_of(study: str) -> list[float]:
    """The fewest and the most tokens that a run of a study trains on, in millions."""
    rows = [row for command in evidence.STUDIES[study].commands for row in rows_of(command)]
    trained = [row["evaluations"][-1]["tokens"] / 1e6 for row in rows]
    return [min(trained), max(trained)]


def standard_error(command: str) -> float:
    """That of the gain of a command's one run, over the tasks."""
    (gains,) = evidence.Runs(command, rows_of(command), command).gains()
    return stdev(gains) / len(gains) ** 0.5


RLOO_EARLIER = "rloo_sokoban.py --iterations 40 --eval-every 20 --learning-rate 1e-3"
RLOO_ENDS = sorted(curve[-1] for curve in curves_of(RLOO_EARLIER))
ISTAR, FALLEN = "istar_sokoban.py --iterations 40", " --alpha 1 --prm-steps 2"
FINISHED = "ablations --step-reward runs/credit/rloo---iterations-180-1/policy"
RLOO_ON_ALFWORLD = [
    success for (row, _), success in success_of("alfworld", 30).items() if "rloo" in row
]
SMOLLM2_RLOO, SMOLLM2_ISTAR, _ = evidence.STUDIES["page-smollm2-sokoban"].commands
SLOW_RLOO, SLOW_WITHOUT = (
    f"{row} --learning-rate 1e-5" for row in ("rloo", "istar --alpha 0 --prm-steps 0")
)
SLOW = "istar --alpha 1 --prm-learning-rate 3e-4 --learning-rate 1e-5"
SLOW_GAIN = above("credit-smollm2-slow", SLOW, SLOW_RLOO, 12)
SLOW_OVER_NO_PRM = above("credit-smollm2-slow", SLOW, SLOW_WITHOUT, 12)
OF_AVERAGE = above("credit-page", "istar", "istar --prm-average 0", 60)
OF_ALPHA = less(ISTAR, f"{ISTAR} --alpha 1")
NEW_CLONE = above("credit-smollm2-average", f"{SLOW} --prm-average 0", SLOW_RLOO, 12)
AT_EQUAL_TIME = cell("credit-page", "istar", "at equal time")
ON_PICTURES = "visual_sokoban.py --iterations 30 --eval-every 15"
LIKE_RLOO = "rloo", "grpo", "reinforce_pp", "gigpo", "graphgpo", "ppo"
PAGE = credit_seconds("credit-page")
MINUTES = credit_seconds("credit-minutes")
ABLATION = credit_seconds("credit-ablation")
# Pieces of the pages whose numbers follow from rows, and are in no table.
DERIVED = {
    "on Sokoban 0.597 in [iterations 21 to 40](../../benchmarks/results/credit-head-sokoban.md)": [
        mean(
            row["prm/pair_accuracy"]
            for row in evidence.measured("credit-head-sokoban")
            if row["iteration"] == 40
        )
    ],
    "seeds 1 to 3 (7be7ce4) took 1.633 seconds an iteration": [
        mean(
            row["seconds"] / 60
            for row in evidence.measured("credit-page")
            if row["row"].startswith("istar_paper") and row["seed"] < 4 and row["iteration"] == 60
        )
    ],
    "RLOO reaches 0.926 and an earlier iStar 0.928; at the small one iStar reaches 0.782": [
        cell("credit-rates", "rloo --learning-rate 1e-3", "success at 60")[0],
        cell(
            "credit-rates",
            "istar --prm-steps 2 --learning-rate 1e-3 --alpha 0.1",
            "success at 60",
        )[0],
        cell("credit-page", "istar", "success at 60")[0],
    ],
    "the PRM ranks 0.51 to 0.62 of new pairs correctly (chance: 0.5)": [
        *(f(map(pairs_ranked_right, ("sokoban", "webshop", "sotopia"))) for f in (min, max)),
        0.5,
    ],
    "On Crossings it ends 0.066 ± 0.037 above at a small rate (1.9 times RLOO's time;": [
        *SLOW_GAIN,
        over_the_first("credit-smollm2-slow")[-1],
    ],
    "it is 0.016 ± 0.067 above (45baa17)": NEW_CLONE,
    "in a second study 0.016 ± 0.067": NEW_CLONE,
    "0.005 ± 0.090": above("credit-smollm2-average", f"{SLOW} --prm-average 0.8", SLOW_RLOO, 12),
    "at 2.2 times RLOO's seconds (with other processes running)": [
        PAGE["ablations --step-reward head --prm-learning-rate 1e-3"] / PAGE["rloo"]
    ],
    "ends 0.078 below iStar (± 0.057) and is on par with RLOO (0.013 ± 0.032 below it)": [
        *SLOW_OVER_NO_PRM,
        *above("credit-smollm2-slow", SLOW_RLOO, SLOW_WITHOUT, 12),
    ],
    "0.078 ± 0.057 above the same script without its PRM": SLOW_OVER_NO_PRM,
    "ends 0.210 ± 0.055 above RLOO": above("credit-page", "istar", "rloo", 60),
    "0.063 ± 0.058 below it at equal wall-clock time": [-AT_EQUAL_TIME[0], AT_EQUAL_TIME[1]],
    "iStar ends 0.066 ± 0.037 above RLOO [at a small rate]": SLOW_GAIN,
    "on Sokoban, iStar ends 0.066 above RLOO (0.025 to 0.108": less(SMOLLM2_ISTAR, SMOLLM2_RLOO),
    "iStar ends 0.003 below it on Sokoban, 0.026 on WebShop and 0.255 goal points": [
        without_prm(world, iterations)
        for world, iterations in (("sokoban", 40), ("webshop", 20), ("sotopia", 40))
    ],
    "0.030 ± 0.044 less": OF_AVERAGE,
    "At the largest rate (seed 1) it had 0.531, RLOO 0.793 and the true credit 1.000": [
        success_of("credit-tuning", 60)[f"{row} --learning-rate 1e-3 --eval-set validation", 1]
        for row in ("istar --prm-steps 2", "rloo", "truth")
    ],
    "ends 0.027 below that of 0.1 (-0.034 to 0.088)": [
        OF_ALPHA[0],
        0.1,
        *OF_ALPHA[1:],
    ],
    "at 1.7 times RLOO's time": [PAGE["istar"] / PAGE["rloo"]],
    "1.4 times RLOO's time": [seconds(SMOLLM2_ISTAR) / seconds(SMOLLM2_RLOO)],
    "GraphGPO ends 0.113 above this row (0.006 to 0.219)": less(
        "graphgpo_sokoban.py --iterations 40 --eval-every 20", RLOO_EARLIER
    ),
    "three runs end at 0.293, 0.598 and 0.000": [
        c[-1]
        for c in curves_of(
            "istar_paper_webshop.py --iterations 20 --eval-every 20 "
            "--learning-rate 5e-4 --prm-learning-rate 1e-3"
        )
    ],
    "RLOO's success differs by 0.078 between its three seeds": [
        max(RLOO_ON_ALFWORLD) - min(RLOO_ON_ALFWORLD)
    ],
    "The standard error of one run's success is 0.03 to 0.04 in the first table": [
        f(row["standard_error"] for row in evidence.measured("alfworld")) for f in (min, max)
    ],
    "at 1.4 times RLOO's seconds an iteration": over_the_first("alfworld"),
    "it had 0.59 of the gain of [the true credit]": cell(
        "credit", "istar", "share of truth's gain"
    ),
    "and its iteration takes 1.30 times as long. Its credit has little weight here": [
        seconds(f"istar_{ON_PICTURES}") / seconds(f"rloo_{ON_PICTURES}")
    ],
    "a correlation of 0.23 to 0.24 with the true advantage": [
        f(cell("credit", row, "A with truth")[0] for row in LIKE_RLOO) for f in (min, max)
    ],
    "[0.050 ± 0.040 higher with it]": above(
        "credit-average",
        *(f"istar{x} --eval-set validation" for x in ("", " --prm-average 0")),
        60,
    ),
    "0.030 ± 0.044 higher on the panel": OF_AVERAGE,
    "(-0.033 ± 0.142)": above(
        "credit-ablation", "istar --prm-steps 2 --beta 0.05", "istar --prm-steps 2", 60
    ),
    "Each run trains on 0.50 to 0.53 million tokens": tokens_of("page-smollm2-sokoban"),
    "each trains on 0.17 to 0.18 million": tokens_of("page-smollm2-tuned"),
    "0.219 ± 0.094 with eight new": above("credit-new-seeds", "istar", "rloo", 60),
    "one of its five runs ends at 0.344, the others at 0.480 to 0.574": [
        RLOO_ENDS[at] for at in (0, 1, -1)
    ],
    "iStar's iteration takes 1.8 times as long as RLOO's (": [
        MINUTES["istar"] / MINUTES["rloo --iterations 120"]
    ],
    "at 1.7 times RLOO's seconds per iteration": [PAGE["istar"] / PAGE["rloo"]],
    "2.27 times those of the same script without it": [
        seconds(ISTAR) / seconds(f"{ISTAR} --alpha 0 --beta 0")
    ],
    "iStar's rows take 1.1 to 1.6 seconds an iteration": [
        f(taken for row, taken in ABLATION.items() if row != "rloo") for f in (min, max)
    ],
    "took 1.7 to 2.1 times as long as RLOO's": [
        over_the_first("credit-alpha-beta")[at] for at in (0, -1)
    ],
    "by more than 0.012": [
        max(
            max(curve[:k]) - curve[k]
            for curve in curves_of(f"{ISTAR} --alpha 1")
            for k in range(1, len(curve))
        )
    ],
    "from 0.52 after ten iterations to 0.43": min(
        ((curve[1], curve[-1]) for curve in curves_of(ISTAR + FALLEN)),
        key=lambda ends: ends[1] - ends[0],
    ),
    "ends more than 0.04 below its highest evaluation": [
        max(
            max(curve) - curve[-1]
            for command in evidence.STUDIES["long-sokoban"].commands
            for curve in curves_of(command)
        )
    ],
    "from 0.60, 0.45 and 0.61 to 0.57, 0.36 and 0.48": [
        curve[k]
        for k in (1, -1)
        for curve in curves_of("istar_webshop.py --iterations 20 --alpha 3 --beta 0.05")
    ],
    "two of three seeds end at 0.31": [
        sorted(
            end
            for (row, _), end in success_of("credit-alpha-beta", 60).items()
            if row == "istar --alpha 3 --beta 0.3"
        )[1]
    ],
    "together give 0.047 ± 0.031": interval(
        [
            *gaps("credit-smollm2-slow", SLOW, SLOW_RLOO, 12),
            *gaps("credit-smollm2-average", f"{SLOW} --prm-average 0", SLOW_RLOO, 12),
        ]
    ),
    "(0.56 to 4.19 times RLOO's in the six seeds)": [
        times_the_first("credit-rates")[at] for at in (0, -1)
    ],
    "the first three had given 0.068 ± 0.098": [
        *above("credit-smollm2-slow", SLOW, SLOW_RLOO, 12, range(1, 4))
    ],
    "1.9 times as long as RLOO's while other processes were running (1.6 times in the first "
    "table)": [
        over_the_first("credit-smollm2-slow")[-1],
        over_the_first("credit-smollm2")[-1],
    ],
    "still ends 0.074 above RLOO": [
        curves_of(ours)[1][-1] - curves_of(theirs)[1][-1]
        for theirs, ours, _ in [evidence.STUDIES["page-smollm2-sokoban"].commands]
    ],
    "a standard error of 0.035": [standard_error(evidence.STUDIES["smollm2-sokoban"].commands[0])],
    "it ends 0.065 lower (± 0.061)": above("credit", "istar", "istar --prm-steps 2", 60),
    "success is 0.077 above iStar's (± 0.048": above("credit-progress", FINISHED, "istar", 20),
    "it is on par (-0.021 ± 0.049)": above("credit-progress", FINISHED, "istar", 60),
}
# Numbers of logs that were not kept: the page says so where it tells them.
UNSTORED = (
    "the standard deviation of r_phi grew from 0.06 to 0.93, and before each step the loss on the "
    "drawn pairs, with its ridge, was 0.864 on average, above the 0.693 of an untrained "
    "PRM",
    "it removes 0.013 of the variance of r_phi, and without it 0.527 of new pairs are ranked right "
    "instead of 0.512. Log pi_old alone ranks 0.714 right.",
    "the share of valid answers fell from 0.76 to 0.03, while the PRM ranked almost all new pairs "
    "correctly (a log that was not stored)",
    "a share of 0.93 to 1.00 has equal outcomes, which give RLOO no signal (iStar's runs: 0.70 to "
    "0.86, not stored)",
    "iStar's iteration took 1.43 times as long as RLOO's (not stored)",
    "ranked 0.75 of the 333 new pairs right (not stored",
    "at most 0.16 of A^E (not stored)",
    "ranked 0.50 of new pairs right in iterations 5 to 28, and 0.60 with the replay",
    "the PRM then ranked 0.49 of new pairs correctly (one seed, not stored)",
    "In the first five iterations the PRM ranked 0.579 of new pairs correctly, afterwards 0.483 to "
    "0.507 (not stored)",
    "had a share of valid answers of 0.17 in its fourth iteration (with the ridge: 0.96 or more)",
)


def anchor_of(title: str) -> str:
    return re.sub(r"[^\w -]", "", title.lstrip("# ").lower()).replace(" ", "-")


def sections(text: str) -> dict[str, str]:
    """{anchor: text} of a page's headings, without what is below a heading of their own."""
    parts = re.split(r"(?m)^(?=#+ )", re.sub(r"(?s)```.*?```", "", text))
    return {anchor_of(part.split("\n", 1)[0]): part for part in parts if part}


SECTIONS = {(page, name): text for page in PAGES for name, text in sections(PAGES[page]).items()}


def tables(text: str) -> str:
    """The tables of a section, and the stored ones that it links."""
    files = re.findall(r"\]\(\.\./\.\./benchmarks/results/([\w-]+\.md)\)", text)
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return "\n".join([*lines, *((evidence.ROWS.parent / file).read_text() for file in files)])


def linked(page: str, text: str) -> str:
    """The sections of these pages that a section links."""
    targets = [(path or page, anchor) for path, anchor in LINK.findall(text)]
    return "\n".join(SECTIONS[target] for target in targets if target in SECTIONS)


def prose(text: str) -> str:
    """A section without its tables, its code and what is named above."""
    text = re.sub(r"```.*?```|`[^`]*`", " ", text, flags=re.DOTALL)
    lines = (line.strip() for line in text.splitlines() if not line.startswith(("|", "#")))
    text = " ".join(lines)
    for piece in (*DERIVED, *UNSTORED):
        text = text.replace(re.sub(r"`[^`]*`", " ", piece), " ")
    return text


def near(told: str, number: float) -> bool:
    """Whether the number is told so, with these digits."""
    return abs(float(told) - number) <= 0.5 * unit_of(told) + 1e-9


def unit_of(told: str) -> float:
    """That of the last digit: 0.01 of "0.21"."""
    return 10.0 ** -len(told.split(".")[1])


def unsupported(text: str, others: str) -> list[str]:
    """The numbers and intervals of a section's prose that neither its tables have nor those of the
    sections that it links; the sign of a number alone is told in words."""
    found, said = tables(text) + tables(others), prose(text)
    numbers = [abs(float(number)) for number in ALONE.findall(found)]
    wrong = [
        told
        for told in ALONE.findall(said)
        if not any(near(told.lstrip("-"), number) for number in numbers)
    ]

    cells = [tuple(map(float, cell)) for cell in BETWEEN.findall(found)]
    halves = [tuple(map(float, cell)) for cell in PLUS_MINUS.findall(found)]
    cells += [(middle, middle - half, middle + half) for middle, half in halves]
    cells += [(-middle, -high, -low) for middle, low, high in cells]
    for told in BETWEEN.findall(said):
        if abs(float(told[0]) - (float(told[1]) + float(told[2])) / 2) > 1.1 * unit_of(told[0]):
            wrong.append("{} is not in the middle of {} to {}".format(*told))
        bounds = [c for c in cells if near(told[1], c[1]) and near(told[2], c[2])]
        if not any(near(told[0].lstrip("-"), abs(c[0])) for c in bounds):
            wrong.append("{} ({} to {})".format(*told))
    for middle, half in PLUS_MINUS.findall(said):
        alike = [c for c in cells if near(middle.lstrip("-"), abs(c[0]))]
        if not any(near(half, (c[2] - c[1]) / 2) for c in alike):
            wrong.append(f"{middle} ± {half}")
    return wrong


@pytest.mark.parametrize("page, anchor", SECTIONS)
def test_every_number_of_the_prose_is_one_of_a_table(page, anchor):
    text = SECTIONS[page, anchor]
    assert unsupported(text, linked(page, text)) == []


def test_no_table_with_numbers_is_written_by_hand():
    for page, text in PAGES.items():
        lines = evidence.SECTION.sub("", text).splitlines()
        assert not ALONE.findall("\n".join(x for x in lines if x.startswith("|"))), page


def test_every_number_that_the_readme_found_is_one_that_follows_from_rows():
    found = (ROOT / "README.md").read_text().split("**What was found.**")[1]
    assert ALONE.findall(prose(found.split("## Install")[0])) == []


def test_what_follows_from_rows_is_told_as_it_follows_and_what_was_not_stored_is_named():
    others = (ROOT / name for name in ("README.md", "docs/algorithms.md"))
    texts = [*(path.read_text() for path in others), *PAGES.values()]
    every = " ".join(" ".join(texts).split())
    for piece, numbers in DERIVED.items():
        assert piece in every, piece
        told = ALONE.findall(piece)  # with their signs: what is above is positive
        wrong = [t for t, n in zip(told, numbers, strict=True) if not near(t, n)]
        assert wrong == [], f"{piece}: {[*numbers]}"
    assert [piece for piece in UNSTORED if piece not in every] == []


def test_the_rooms_that_rloo_solves_are_counted():
    told = "{}, {} and {} of the 128 rooms in both samples, {} of them in common"
    page = " ".join(PAGES["pretrained-sokoban.md"].split())
    assert told.format(*solved(SMOLLM2_RLOO)) in page


def test_pages_are_short_and_learning_stands_beside_its_seconds():
    for page, text in PAGES.items():
        lines, pictures = len(text.splitlines()), text.count("![")
        assert lines <= (120 if page == "README.md" else 200), f"{page}: {lines} lines"
        assert page != "README.md" or pictures <= 4
        made = [match[0].splitlines()[1:] for match in evidence.SECTION.finditer(text)]
        for table in ("\n".join(lines) for lines in made):
            if " after | " in table and "correlation of A^S with progress" not in table:
                assert "| seconds an iteration | over RLOO's |" in table
    limits = dict.fromkeys(ROOT.glob("docs/*.md"), 400) | {ROOT / "README.md": 190}
    for path, most in limits.items():
        assert len(path.read_text().splitlines()) <= most, path


def test_a_changed_number_is_seen():
    lines = "| `a` | 0.161 (0.110 to 0.212) |\n| `b` | 0.569 ± 0.049 |\n"
    right = (
        "It rises by 0.16 (0.11 to 0.21), ends 0.161 below (it; 0.110 to 0.212), at 0.57 (± 0.05)."
    )
    assert unsupported(f"# Title 7.5\n{right}\n{lines}", "") == []
    for old, new in (
        ("0.16 ", "0.17 "),
        ("to 0.21)", "to 0.11)"),
        ("(it; 0.110", "(it; -0.110"),
        ("0.57", "0.21"),
    ):
        assert unsupported(right.replace(old, new, 1) + f"\n{lines}", ""), new
    assert unsupported(right, lines) == [] and unsupported(right, "")


DOCS = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]


@pytest.mark.parametrize("path", DOCS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path):
    for target, anchor in LINK.findall(re.sub(r"(?s)```.*?```", "", path.read_text())):
        if not re.match(r"\w+:", target):
            file = (path.parent / target).resolve() if target else path
            assert file.exists(), target
            assert not anchor or anchor in sections(Path(file).read_text()), f"{target}#{anchor}"
