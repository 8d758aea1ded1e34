"""The pictures of docs/viewer.md: short runs, and their pages in a real browser.

    python docs/pictures.py            # plays what is not in runs/ yet, and takes the pictures

It needs chromium, chromedriver and selenium, as tests/test_viewer.py does. Written: docs/pictures/.
"""

import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from runtime.saving.files import rows_of
from runtime.view.viewer import write_page

from selenium import webdriver
from selenium.webdriver.chrome.service import Service

PICTURES = ROOT / "docs" / "pictures"
SMALL = "--engine hf --eval-tasks 16 --tasks-per-iteration 8 --seed 1".split()
RUNS = {  # name: script, iterations, iterations from one evaluation to the next
    "sokoban": ("istar_sokoban", 12, 3),
    "sokoban-rloo": ("rloo_sokoban", 12, 3),
    "webshop": ("istar_webshop", 4, 2),
    "sotopia": ("istar_sotopia", 6, 3),
}
FLAGS = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --hide-scrollbars"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def play(name: str) -> Path:
    """The run of this name, played now if it is not there."""
    run = ROOT / "runs" / f"picture-{name}"
    if (run / "view.html").exists():
        return run
    script, iterations, evaluations = RUNS[name]
    command = [sys.executable, f"{script}.py", *SMALL, "--run-name", f"picture-{name}"]
    command += ["--iterations", str(iterations), "--eval-every", str(evaluations)]
    subprocess.run([*command, "--resume", "auto"], cwd=ROOT, check=True)
    return run


def episode_of(run: Path, kind: str) -> dict:
    """What the link to an episode says: a long one of the last iteration that was solved, and from
    which something can be learnt: others of its group failed, or of the panel the same task did
    before training."""
    rows = rows_of(run / {"train": "episodes.jsonl", "eval": "eval_episodes.jsonl"}[kind])
    last, first = rows[-1]["iteration"], rows[0]["iteration"]
    compared = last if kind == "train" else first
    failed = {r["task"] for r in rows if r["iteration"] == compared and not r["success"]}
    rows = [row for row in rows if row["iteration"] == last]
    solved = [row for row in rows if row["success"] and row["task"] in failed]
    best = max(solved or rows, key=lambda row: min(len(row["steps"]), 9))
    group = [row for row in rows if row["task"] == best["task"]]
    at = {"iteration": last, "task": best["task"], "episode": group.index(best)}
    return {"set": kind} | at


class Camera:
    """A headless browser."""

    def __init__(self):
        options = webdriver.ChromeOptions()
        options.binary_location = next(filter(None, map(shutil.which, BROWSERS)))
        profile = tempfile.mkdtemp()
        for flag in [*FLAGS.split(), f"--user-data-dir={profile}"]:
            options.add_argument(flag)
        service = Service(shutil.which("chromedriver"))
        self.driver = webdriver.Chrome(options=options, service=service)

    def take(self, page: Path, name: str, height: int, to: str = "", width=1280, **link) -> None:
        """A picture of the page at what the link opens, from an element down."""
        size = dict(width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        words = "&".join(f"{key}={value}" for key, value in link.items())
        self.driver.get("about:blank")
        self.driver.get(f"file://{page}#{words}")
        while not self.driver.execute_script("return document.documentElement.dataset.ready"):
            time.sleep(0.05)
        place = "document.querySelector(arguments[0]).scrollIntoView()" if to else "scrollTo(0, 0)"
        self.driver.execute_script(place, to)
        time.sleep(0.2)
        self.driver.save_screenshot(str(PICTURES / f"{name}.png"))
        print(PICTURES / f"{name}.png")


def main() -> None:
    runs = {name: play(name) for name in RUNS}
    pages = {name: write_page([run]) for name, run in runs.items()}
    both = write_page([runs["sokoban"], runs["sokoban-rloo"]])
    PICTURES.mkdir(exist_ok=True)
    camera = Camera()

    solved = episode_of(runs["sokoban"], "train")
    camera.take(pages["sokoban"], "page", 1500, by="implicit_reward", **solved)
    for world in ("webshop", "sotopia"):
        found = episode_of(runs[world], "train")
        camera.take(pages[world], world, 950, "main", by="step_advantage", **found)
    panel = episode_of(runs["sokoban"], "eval")
    beside = {"beside": "0.eval.0.0", "by": "progress"}
    camera.take(pages["sokoban"], "side-by-side", 950, "main", **beside, **panel)
    camera.take(both, "two-runs", 1150)
    camera.take(pages["sokoban"], "phone", 1000, "#episode", 400, by="advantage", **solved)
    camera.driver.quit()


if __name__ == "__main__":
    main()
