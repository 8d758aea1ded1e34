"""The HTML page of a run, runs/NAME/view.html: one file that opens in a browser from the disk.

It shows curves, the groups of every iteration, and episodes as conversations whose steps are
coloured by their credit. Every run writes it at its end; this script writes it again, also during a
run. With two runs, the page compares them on the tasks that both have.

    python view.py runs/first
    python view.py runs/first runs/second
    python view.py runs/first --episodes 50000
    python view.py --out page.html runs/first
"""

import sys
from dataclasses import dataclass
from pathlib import Path

from runtime.flags import parse
from runtime.view.viewer import MOST, write_page


@dataclass
class Args:
    runs: tuple[str, ...] = ()  # One run, or two runs to compare; --runs may be left out.
    episodes: int = MOST
    """Most episodes of a run on the page; of longer runs it shows every n-th iteration."""
    out: str = ""  # Output file; empty: view.html in the (first) run's directory.


def main():
    words = sys.argv[1:]
    if "--runs" not in words:  # names may stand before options and after them
        before = ["", *words]  # of each word the one before it, which may take it as its value
        takes = [last.startswith("--") and "=" not in last for last in before]
        names = [w for w, taken in zip(words, takes) if not (w.startswith("-") or taken)]
        others = [w for w, taken in zip(words, takes) if w.startswith("-") or taken]
        sys.argv[1:] = [*others, *(["--runs", *names] if names else [])]
    args = parse(Args, __doc__)
    if not 1 <= len(args.runs) <= 2:
        sys.exit(f"view.py takes one run or two, not {len(args.runs)}: python view.py runs/NAME")
    try:
        out = Path(args.out) if args.out else None
        page = write_page([*map(Path, args.runs)], out, args.episodes)
    except OSError as error:
        sys.exit(f"{error.filename}: {error.strerror}")
    print(f"{page} ({page.stat().st_size / 1e6:.1f} MB)")


if __name__ == "__main__":
    main()
