"""view.html in a real browser: what it shows is what the run wrote, and hostile text is text.

The tests that look at a page need chromium and chromedriver (Debian: the packages chromium and
chromium-driver), and selenium; without them they are skipped. Nothing is fetched."""

import base64
import gzip
import json
import re
import shutil
import time
from importlib.util import find_spec
from types import SimpleNamespace
from urllib.parse import urlencode

import runtime.view.viewer
import view
from runtime.saving.files import EPISODE_VERSION, append, to_json, write_json
from runtime.view.report import STEP, episode_lines
from runtime.view.viewer import read_run, thinned, write_page

import pytest
import torch
from conftest import ROOT, random_trajectories, run_main

BROWSERS = map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))
BROWSER = next(filter(None, BROWSERS), None)
MISSING = [
    name
    for name, found in {
        "chromium": BROWSER,
        "chromedriver": shutil.which("chromedriver"),
        "selenium": find_spec("selenium"),
    }.items()
    if not found
]
browser_test = pytest.mark.skipif(bool(MISSING), reason=f"{', '.join(MISSING)} not installed")
FLAGS = """--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync
--disable-background-networking --disable-component-update --force-device-scale-factor=1"""
SMALL = """--engine hf --iterations 2 --tasks-per-iteration 4 --group-size 4 --eval-tasks 4
--eval-samples 1 --eval-every 1"""
MIXED = {"webshop": "--seed 9 --max-steps 7"}  # groups are mixed in both iterations
WORLDS = {
    "sokoban": ".board",
    "visual_sokoban": "img.picture",
    "webshop": ".shop .can",
    "sotopia": ".other",
}
HOSTILE = {
    "script": "<script>window.pwned = 1</script></script><script>window.pwned = 2</script>",
    "handler": '<img src="x" onerror="window.pwned = 3"><svg onload="window.pwned = 4">',
    "attribute": "\"' onmouseover='window.pwned = 5' x=\"",
    "address": "javascript:window.pwned = 6 <a href='javascript:window.pwned=7'>x</a>",
    "comment": "<!-- --> ]]> <!--<script> &lt;b&gt; &amp; {{SCRIPT}} ${window.pwned = 8}",
    "control": "a\x00b\x1b[2J\x07c\x7fd\x9be\u2028f\u2029g",
    "direction": "safe \u202egnp.exe\u202c \u2067abc\u2069 \u05e9\u05dc\u05d5\u05dd end",
    "surrogates": "one \ud800 two \udfff three \U0001f600 whole",
    "combining": "z" + "\u0301" * 60,
}


# ------------ runs ------------


def make_run(path, episodes, panel=(), rows=None, script="istar_sokoban", flags=None):
    """A run's directory, as Run leaves it."""
    path.mkdir(parents=True)
    write_json(path / "args.json", flags or {"alpha": 0.1, "seed": 1})
    write_json(
        path / "run.json", {"starts": [{"script": script, "command": f"python {script}.py"}]}
    )
    last = max((e["iteration"] for e in episodes), default=0)
    rows = rows or [{"iteration": i, "eval/success": i / 10} for i in range(last + 1)]
    append(path / "metrics.jsonl", [to_json(row) for row in rows])
    append(path / "episodes.jsonl", [to_json(e) for e in episodes])
    append(path / "eval_episodes.jsonl", [to_json(e) for e in panel])
    return path


def make_step(
    number=0, observation="You see a door.", action="<think>a</think><action>up</action>"
):
    step = {"observation": observation, "action": action, "valid": number % 3 != 2}
    step |= {"reward": -0.1, "progress": float(number % 2), "tokens": 5, "logprob": -1.5}
    step |= {"implicit_reward": 0.01 * (number - 2), "step_advantage": 0.5 - number}
    return step | {"episode_advantage": 0.25, "advantage": 0.25 + 0.1 * (0.5 - number)}


def make_episode(iteration=1, task=7, outcome=1.0, steps=None, truncated=False, **more):
    episode = {"version": EPISODE_VERSION, "iteration": iteration, "task": task, "outcome": outcome}
    episode |= {"success": outcome >= 1, "score": outcome, "truncated": truncated}
    return episode | {"steps": steps or [make_step(n) for n in range(4)]} | more


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """runs(world) -> the directory of a short run of iStar in it, with the page that it wrote."""
    home, done = tmp_path_factory.mktemp("viewer"), {}

    def run(world, script="istar"):
        name = f"{script}-{world}"
        if name not in done:
            flags = [*SMALL.split(), *MIXED.get(world, "--seed 3 --max-steps 6").split()]
            flags += ["--run-name", name]
            done[name] = run_main(f"{script}_{world}", *flags, cwd=home).stdout
        assert f"the run as a page: runs/{name}/view.html" in done[name]
        return home / "runs" / name

    return run


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for flag in FLAGS.split():
        options.add_argument(flag)
    options.add_argument("about:blank")  # a new tab's own page has requests of its own
    options.add_argument(f"--user-data-dir={tmp_path_factory.mktemp('profile')}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    service = Service(shutil.which("chromedriver"))
    driver = webdriver.Chrome(options=options, service=service)
    yield driver
    driver.quit()


class Page:
    """A page in the browser. js(code, ...) runs a function's body in it, and returns its value."""

    def __init__(self, browser, path, link="", width=1280):
        self.browser, self.js = browser, browser.execute_script
        browser.get("about:blank")
        self.requests()
        browser.get_log("browser")
        self.resize(width)
        start = time.perf_counter()
        browser.get(f"file://{path}{link}")
        self.wait("return document.documentElement.dataset.ready")
        self.seconds = time.perf_counter() - start

    def resize(self, width, height=900):
        metrics = dict(width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    def wait(self, code, seconds=20):
        end = time.perf_counter() + seconds
        while not (value := self.js(code)):
            log = self.browser.get_log("browser")
            assert time.perf_counter() < end, f"{code}: {log}"
            time.sleep(0.01)
        return value

    def requests(self):
        """Addresses of all requests since this was asked last, but for the browser's own."""
        asked = []
        for entry in self.browser.get_log("performance"):
            message = json.loads(entry["message"])["message"]
            if message["method"] == "Network.requestWillBeSent":
                asked.append(message["params"]["request"]["url"])
        return [url for url in asked if not url.startswith("chrome")]

    def assert_quiet(self, path):
        """No word in the console, and no request but the page itself; pictures are in it."""
        assert self.browser.get_log("browser") == []
        asked = {url for url in self.requests() if not url.startswith("data:image/png;base64,")}
        assert asked <= {f"file://{path}"}

    def all(self, selector, value):
        """A value of every element: JavaScript of e."""
        return self.js(f"return [...document.querySelectorAll(`{selector}`)].map(e => {value})")

    def texts(self, selector):
        return self.all(selector, "e.textContent")

    def choose(self, name, value):
        """Give a filter a value, as a user does."""
        code = """const control = document.getElementById('filter-' + arguments[0]);
        if (control.type === 'checkbox') control.checked = arguments[1];
        else control.value = arguments[1];
        control.dispatchEvent(new Event('input', {bubbles: true}));"""
        self.js(code, name, value)

    def press(self, *keys):
        from selenium.webdriver.common.action_chains import ActionChains

        for key in keys:
            ActionChains(self.browser).send_keys(key).perform()
            time.sleep(0.1)

    def groups(self):
        """[(task, outcomes as printed)] of the list."""
        return self.js("""return [...document.querySelectorAll('.group')].map(group => [
        Number(group.querySelector('.task').firstChild.textContent.replace('Task ', '')),
        [...group.querySelectorAll('.member')].map(member => member.textContent)])""")

    def assert_fits(self):
        """Nothing sticks out to the right, at either width."""
        for width in (1280, 400):
            self.resize(width)
            wide = "return document.documentElement.scrollWidth - innerWidth"
            assert self.js(wide) <= 0, f"{width} pixels"
            out = """return [...document.querySelectorAll('section *')].filter(e =>
            e.getBoundingClientRect().right > innerWidth + 1).map(e => e.outerHTML.slice(0, 80))"""
            assert self.js(out) == [], f"{width} pixels"
        self.resize(1280)


def link(iteration, task, episode=0, kind="train", **more):
    return "#" + urlencode(dict(set=kind, iteration=iteration, task=task, episode=episode) | more)


def printed(outcome):
    return f"{round(outcome, 2):g}".removeprefix("0") or "0"


# ------------ what a run writes ------------


def test_a_row_of_episodes_is_what_the_documentation_says():
    trajectories = random_trajectories()
    column = torch.zeros(sum(len(t.steps) for t in trajectories))
    names = "implicit_reward step_advantage episode_advantage advantage".split()
    lines = episode_lines({"iteration": 3}, trajectories, dict.fromkeys(names, column))
    row = json.loads(lines[0])
    assert row["version"] == EPISODE_VERSION and row["iteration"] == 3
    text = (ROOT / "docs" / "episodes.md").read_text()
    told = set(re.findall(r"^\| `(\w+)`", text, re.MULTILINE))
    assert {*row, *row["steps"][0]} <= told and f"version {EPISODE_VERSION}" in text.lower()
    assert told == {*row, *row["steps"][0], "value", "picture"}
    assert STEP == {*row["steps"][0], "picture"} - {*names}  # what no column may be called


@pytest.mark.parametrize("world", WORLDS)
def test_a_run_keeps_its_panel_and_what_credit_is_made_of(runs, world):
    run = runs(world)
    panel, episodes = rows_of(run / "eval_episodes.jsonl"), rows_of(run / "episodes.jsonl")
    assert sorted({e["iteration"] for e in panel}) == [0, 1, 2]
    assert {e["version"] for e in panel + episodes} == {EPISODE_VERSION}
    assert "advantage" not in panel[0]["steps"][0]
    metrics = rows_of(run / "metrics.jsonl")
    for row in metrics:
        shown = [e["success"] for e in panel if e["iteration"] == row["iteration"]]
        assert sum(shown) / len(shown) == row["eval/success"]
    flags = json.loads((run / "args.json").read_text())
    trust = {row["iteration"]: row.get("prm/skill") for row in metrics}
    steps = [(step, trust[e["iteration"]]) for e in episodes for step in e["steps"]]
    for step, skill in steps:
        credit = flags["alpha"] * skill * step["step_advantage"]
        less = 0.0 if step["valid"] else flags["invalid_penalty"]
        expected = step["episode_advantage"] + credit - less
        assert step["advantage"] == pytest.approx(expected, abs=1e-5)
        assert step["logprob"] < 0 < step["tokens"] <= flags["max_action_tokens"]
        assert step["valid"] or step["step_advantage"] == 0
    assert any(step["step_advantage"] for step, _ in steps)
    assert any(step["progress"] for step, _ in steps) == (world != "webshop")


# ------------ the page's file ------------


def unpacked(page):
    text = page.read_text()
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    chunks = re.findall(r'<script type="text/plain" id="chunk-\d+">(.*?)</script>', text)
    return json.loads(data[1]), [json.loads(gzip.decompress(base64.b64decode(c))) for c in chunks]


def test_the_page_holds_every_number_and_text_once(tmp_path):
    steps = [make_step(n, observation=f"page {n % 2}") for n in range(3)]
    run = make_run(tmp_path / "a", [make_episode(steps=steps), make_episode(outcome=0.5)])
    index, (chunk,) = unpacked(write_page([run]))
    (one,) = index["runs"][0]["sets"]
    assert one["episodes"] == [[7, 1.0, True, False, 1, 3], [7, 0.5, False, False, 1, 4]]
    texts = chunk["texts"]
    assert len(texts) == len(set(texts)) == 4
    for told, episode in zip(rows_of(run / "episodes.jsonl"), chunk["episodes"]):
        for step, entries in zip(told["steps"], episode):
            found = dict(zip(chunk["columns"], entries))
            assert texts[found.pop("observation")] == step["observation"]
            assert texts[found.pop("action")] == step["action"]
            assert all(found[key] == pytest.approx(step[key]) for key in found)


def test_rows_without_a_version_and_torn_ones(tmp_path):
    """Runs of earlier versions: no version, success or progress, no evaluation panel."""
    old = make_episode()
    for key in ("version", "success", "score"):
        del old[key]
    for step in old["steps"]:
        for key in ("progress", "tokens", "logprob", "episode_advantage"):
            del step[key]
    run = make_run(tmp_path / "old", [old, old])
    (run / "eval_episodes.jsonl").unlink()
    with (run / "episodes.jsonl").open("a") as file:
        file.write('{"iteration": 1, "task": 7, "outc')
    index, _ = unpacked(write_page([run]))
    assert [e[:3] for e in index["runs"][0]["sets"][0]["episodes"]] == [[7, 1.0, True]] * 2


def test_of_a_long_run_every_nth_iteration_is_shown_and_the_page_says_so(tmp_path):
    counts = {"train": dict.fromkeys(range(1, 101), 40), "eval": {i: 20 for i in range(0, 101, 10)}}
    assert thinned(counts, 10_000) == ({*range(101)}, "")
    kept, told = thinned(counts, 1000)
    shown = sum(n for of in counts.values() for i, n in of.items() if i in kept)
    assert 500 < shown <= 1000 and max(kept) == 100
    order = sorted(kept)
    assert len({b - a for a, b in zip(order, order[1:])}) == 1
    assert told.startswith(f"{shown:,} of 4,220 episodes are on this page: ")

    episodes = [make_episode(iteration=i, task=t) for i in range(1, 11) for t in (1, 2, 3, 4)]
    index, chunks = unpacked(write_page([make_run(tmp_path / "a", episodes)], most=20))
    assert "one iteration in" in index["runs"][0]["told"] and len(chunks) < 10
    assert sum(len(one["episodes"]) for one in index["runs"][0]["sets"]) <= 20


def test_damaged_rows_are_left_out(tmp_path):
    run = make_run(tmp_path / "a", [make_episode()])
    head = b'{"version": 2, "iteration": 1, "task": 3, "outcome": '
    rows = head + b"junk\n", b"[]\n", head + b'1, "truncated": false, "steps": [1]}\n'
    torn = head + b'1, "trunc'  # by a kill: it comes again
    with (run / "episodes.jsonl").open("ab") as file:
        file.write(b"".join(rows) + torn)
    index, chunks = unpacked(write_page([run]))
    (kept,) = index["runs"][0]["sets"]
    assert len(kept["episodes"]) == len(chunks) == 1


@pytest.mark.parametrize(
    "words, said",
    {
        ("nowhere",): "nowhere: no run there",
        (): "view.py takes one run or two, not 0: python view.py runs/NAME",
        ("a", "b", "c"): "view.py takes one run or two, not 3: python view.py runs/NAME",
        ("--episodes", "7", "a", "--out=x", "b", "c"): "view.py takes one run or two, not 3",
        ("a", "--episodes", "0"): "--episodes 0: has to be a whole number from 1 to ",
    }.items(),
)
def test_view_refuses_in_one_line(tmp_path, monkeypatch, capsys, words, said):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["view.py", *words])
    with pytest.raises(SystemExit) as stop:
        view.main()
    told = stop.value.code if isinstance(stop.value.code, str) else capsys.readouterr().err
    assert stop.value.code and re.search(said, told)


def test_a_page_that_cannot_be_written_ends_no_run(tmp_path, monkeypatch, capsys):
    from runtime.view import report

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(runtime.view.viewer, "write_page", full)
    report.write_page(SimpleNamespace(path=tmp_path))
    assert "view.html was not written (No space left on device)" in capsys.readouterr().out


# ------------ in a browser ------------


@browser_test
@pytest.mark.parametrize("world", WORLDS)
def test_the_page_of_a_run(runs, browser, world):
    """Opens without a word in the console and without a request; the world is drawn as such, and
    the numbers are those of episodes.jsonl."""
    run = runs(world)
    path = run / "view.html"
    page = Page(browser, path)
    page.assert_quiet(path)
    assert page.js("return document.querySelectorAll('.curve path').length") > 8
    page.assert_fits()

    episodes = [e for e in rows_of(run / "episodes.jsonl") if e["iteration"] == 2]
    task = episodes[0]["task"]
    group = [e for e in episodes if e["task"] == task]
    episode = max(range(len(group)), key=lambda n: len(group[n]["steps"]))
    page = Page(browser, path, link(2, task, episode))
    assert page.js(f"return document.querySelectorAll('{WORLDS[world]}').length")
    shown = page.js("""return [...document.querySelectorAll('.step')].map(step => ({
        action: step.querySelector('.said').textContent,
        numbers: Object.fromEntries([...step.querySelectorAll('.numbers div')].map(
            d => [d.children[0].textContent, d.children[1].textContent]))}))""")
    steps = group[episode]["steps"]
    assert len(shown) == len(steps)
    labels = {"implicit_reward": "step reward", "step_advantage": "AS"}
    labels |= {"episode_advantage": "AE", "advantage": "A"}
    labels |= {} if world == "webshop" else {"progress": "truth"}
    for found, step in zip(shown, steps):
        assert found["action"] == step["action"]
        for name, label in labels.items():
            if step[name] is None:
                assert found["numbers"][label] == "\u2013"
                continue
            number = float(found["numbers"][label].replace("\u2212", "-"))
            assert number == pytest.approx(step[name], abs=6e-4)
        assert ("truth" in found["numbers"]) == (world != "webshop")


@browser_test
def test_every_switch_colours_by_its_quantity(runs, browser):
    run = runs("sokoban")
    page = Page(browser, run / "view.html")
    switches = page.js("return [...document.querySelectorAll('[name=by]')].map(s => s.value)")
    assert (
        switches
        == "implicit_reward step_advantage episode_advantage advantage progress reward".split()
    )
    index, _ = unpacked(run / "view.html")
    for name in switches:
        page.js("document.querySelector(`[name=by][value=${arguments[0]}]`).click()", name)
        page.wait(f"return state.by === '{name}'")
        time.sleep(0.05)
        pills, lit = page.texts(".pill"), page.texts(".numbers .lit dd")
        assert len(pills) == len(lit) > 0
        for pill, number in zip(pills, lit):
            assert pill.endswith(f" {number}")
        end = index["runs"][0]["scales"][name]
        first, _, last = page.texts(".scale .ends span")
        assert float(last) == pytest.approx(end, abs=6e-4) and first == last.replace("+", "\u2212")
        negative = [lit[n].startswith("\u2212") for n in range(len(lit))]
        assert page.all(".pill", "e.classList.contains('negative')") == negative


@browser_test
def test_colours_hold_in_grey_and_words_on_them_are_read(runs, browser):
    """Of equal sign the stronger is darker; words on any colour have a contrast of 4.5."""
    page = Page(browser, runs("sokoban") / "view.html")
    shades = page.js("""const run = 0, name = 'advantage', end = runs[0].scales[name];
        return Array.from({length: 201}, (_, i) => coloured(0, name, end * (i - 100) / 100))""")

    def luminance(colour):
        if colour.startswith("#"):
            digits = colour[1:] if len(colour) == 7 else "".join(c * 2 for c in colour[1:])
            parts = [int(digits[i : i + 2], 16) for i in (0, 2, 4)]
        else:
            parts = [int(n) for n in re.findall(r"\d+", colour)]
        linear = [
            c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4
            for c in (p / 255 for p in parts)
        ]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    grey = [luminance(shade["colour"]) for shade in shades]
    assert all(a < b for a, b in zip(grey[:100:5], grey[5:101:5]))
    assert all(a > b for a, b in zip(grey[100::5], grey[105::5]))
    for shade, light in zip(shades, grey):
        low, high = sorted([light, luminance(shade["ink"])])
        assert (high + 0.05) / (low + 0.05) >= 4.5, shade


@browser_test
def test_every_filter_does_what_it_says(tmp_path, browser):
    invalid = [make_step(n) | {"valid": n != 1} for n in range(3)]
    valid = [make_step(n) | {"valid": True} for n in range(3)]
    episodes = []
    for iteration in (1, 2, 3):
        for task in range(10 * iteration, 10 * iteration + 5):
            for member in range(4):
                outcome = float((task + member) % 4 < task % 5)
                steps = invalid if member == 1 and task % 2 else valid
                cut = member == 3 and task % 5 == 2
                episodes.append(make_episode(iteration, task, outcome, steps, cut))
    panel = [make_episode(i, t, float(i > t), valid) for i in (0, 3) for t in range(3)]
    for episode in panel:
        episode["steps"] = [{k: s[k] for k in ("observation", "action", "valid")} for s in valid]
    page = Page(browser, write_page([make_run(tmp_path / "a", episodes, panel)]))

    def expected(keep=lambda e: True, iteration=3, of=lambda group: True):
        found = {}
        for e in episodes:
            if iteration in (e["iteration"], None):
                found.setdefault(e["task"], []).append(e)
        found = {task: [e for e in group if keep(e)] for task, group in found.items() if of(group)}
        return {
            task: [printed(e["outcome"]) for e in group] for task, group in found.items() if group
        }

    def shown():
        return dict(page.groups())

    def means(order):
        page.choose("sort", order)
        groups = page.groups()
        return groups, [sum(map(float, found)) / len(found) for _, found in groups]

    assert shown() == expected()
    page.choose("iteration", "1")
    assert shown() == expected(iteration=1)
    page.choose("iteration", "all")
    assert shown() == expected(iteration=None) and len(shown()) == 15
    page.choose("task", "21")
    assert shown() == {21: expected(iteration=2)[21]}
    page.choose("task", "")
    page.choose("outcome", "solved")
    assert shown() == expected(lambda e: e["success"], None)
    page.choose("outcome", "failed")
    assert shown() == expected(lambda e: not e["success"], None)
    page.choose("outcome", "mixed")
    assert shown() == expected(iteration=None, of=lambda g: len({e["outcome"] for e in g}) > 1)
    page.choose("outcome", "any")
    page.choose("invalid", True)
    assert shown() == expected(lambda e: e["steps"] == invalid, None) != {}
    page.choose("invalid", False)
    page.choose("truncated", True)
    assert shown() == expected(lambda e: e["truncated"], None) != {}
    page.choose("truncated", False)

    _, found = means("best")
    assert found == sorted(found, reverse=True) and found[0] > found[-1]
    _, found = means("worst")
    assert found == sorted(found)
    _, found = means("mixed")
    spread = [p * (1 - p) for p in found]
    assert spread == sorted(spread, reverse=True) and spread[0] > spread[-1]
    groups, _ = means("task")
    assert [task for task, _ in groups] == sorted(task for task, _ in groups)

    page.choose("kind", "eval")
    page.choose("iteration", "0")
    assert shown() == {0: ["0"], 1: ["0"], 2: ["0"]}
    page.choose("iteration", "3")
    assert shown() == {0: ["1"], 1: ["1"], 2: ["1"]}
    assert "3 groups, 3 episodes" in page.texts("#found")[0]
    page.choose("task", "999")
    assert shown() == {} and "0 groups" in page.texts("#found")[0]


@browser_test
def test_two_iterations_of_one_task_stand_side_by_side(runs, browser):
    run = runs("sokoban")
    page = Page(browser, run / "view.html", link(2, 1, kind="eval"))
    assert len(page.texts(".pane")) == 1
    options = page.js(
        "return [...document.getElementById('beside-select').options].map(o => o.value)"
    )
    assert options == ["", "0.eval.0.0", "0.eval.1.0"]
    page.js("""const select = document.getElementById('beside-select');
        select.value = '0.eval.0.0'; select.dispatchEvent(new Event('change'))""")
    page.wait("return document.querySelectorAll('.pane').length === 2")
    assert page.texts(".pane h3") == [
        "Task 1, evaluation, iteration 2",
        "Task 1, evaluation, iteration 0",
    ]
    panel = [e for e in rows_of(run / "eval_episodes.jsonl") if e["task"] == 1]
    for n, iteration in enumerate((2, 0)):
        (episode,) = [e for e in panel if e["iteration"] == iteration]
        assert page.texts(f".pane:nth-child({n + 1}) .said") == [
            s["action"] for s in episode["steps"]
        ]
    left, right = page.js(
        "return [...document.querySelectorAll('.pane')].map(p => p.getBoundingClientRect().left)"
    )
    assert right > left + 300
    page.assert_fits()

    address = page.js("return location.hash")  # the address leads there again
    again = Page(browser, run / "view.html", address)
    assert again.texts(".pane h3") == [
        "Task 1, evaluation, iteration 2",
        "Task 1, evaluation, iteration 0",
    ]


@browser_test
def test_two_runs_on_the_same_tasks(runs, browser):
    one, other = runs("sokoban"), runs("sokoban", "rloo")
    path = write_page([one, other])
    assert path == one / "view-against-rloo-sokoban.html"
    page = Page(browser, path)
    page.assert_quiet(path)
    assert page.texts("h1") == ["istar-sokoban against rloo-sokoban"]
    assert len(page.texts(".pane")) == 2  # of the same task
    page.choose("kind", "eval")
    page.choose("iteration", "2")
    means = []
    for run in (one, other):
        found = [e["outcome"] for e in rows_of(run / "eval_episodes.jsonl") if e["iteration"] == 2]
        means.append(sum(found) / len(found))
    told = page.texts("#found")[0]
    assert f"istar-sokoban {means[0]:.3f}, rloo-sokoban {means[1]:.3f}, difference" in told
    counts = [int(n) for n in re.findall(r"(\d+) (?:tasks are better|worse|equal)", told)]
    assert sum(counts) == 4
    page.js("document.querySelector('.member').click()")
    page.wait("return document.querySelectorAll('.pane').length === 2")
    assert [t.split(",")[0] for t in page.texts(".pane h3")] == ["istar-sokoban", "rloo-sokoban"]
    page.assert_fits()


@browser_test
def test_the_page_by_keyboard(tmp_path, browser):
    from selenium.webdriver.common.keys import Keys

    episodes = [make_episode(i, t, float(m)) for i in (1, 2) for t in (5, 6) for m in (0, 1)]
    page = Page(browser, write_page([make_run(tmp_path / "a", episodes)]))
    current = "return [...document.querySelectorAll('.step.current')].map(s => s.dataset.step)"
    page.press("j")
    assert page.js(current) == ["0"] and "step=0" in page.js("return location.hash")
    page.press("j", "j", "k")
    assert page.js(current) == ["1"]
    assert page.js("return document.activeElement.dataset.step") == "1"
    before = page.js("return location.hash")
    page.press("n")
    assert page.js("return location.hash") != before
    page.press("p")
    assert page.js("return location.hash") == re.sub(r"&step=\d+", "", before)
    page.press("[")
    assert page.js("return document.getElementById('filter-iteration').value") == "1"
    page.press("]")
    assert page.js("return document.getElementById('filter-iteration').value") == "2"
    by = page.js("return document.querySelector('[name=by]:checked').value")
    page.press("c")
    assert page.js("return document.querySelector('[name=by]:checked').value") != by
    page.press("?")
    assert page.js("return document.getElementById('keys').open")
    page.press(Keys.ESCAPE)
    assert not page.js("return document.getElementById('keys').open")
    page.press("/", "j")
    assert page.js("return document.activeElement.value") == "j"  # typed, not a move
    page.press(Keys.BACKSPACE)

    page.js("document.querySelector('.skip').focus()")
    reached = set()
    for _ in range(60):  # everything can be reached by Tab, and shows that it is
        page.press(Keys.TAB)
        here = page.js("""const e = document.activeElement;
            return [e.tagName + '.' + (e.id || e.className || e.name || ''),
                getComputedStyle(e.closest('.switch label') || e).outlineStyle]""")
        if here[0] == "BODY.":
            break
        assert here[1] != "none", here[0]
        reached.add(here[0])
    wanted = {"SELECT.more", "SELECT.filter-iteration", "INPUT.filter-task", "A.task", "INPUT.by"}
    assert wanted <= reached and any(name.startswith("A.member") for name in reached)
    page.assert_quiet(tmp_path / "a" / "view.html")


@browser_test
def test_a_link_leads_to_its_step(tmp_path, browser):
    episodes = [make_episode(1, 5, float(m), [make_step(n) for n in range(12)]) for m in (0, 1)]
    path = write_page([make_run(tmp_path / "a", episodes)])
    page = Page(browser, path, link(1, 5, 1, step=9, by="step_advantage"))
    assert page.js("return document.querySelector('.step.current').dataset.step") == "9"
    (box,) = page.all(".step.current", "e.getBoundingClientRect().toJSON()")
    assert -1 <= box["top"] and box["bottom"] <= 901
    assert page.js("return document.querySelector('[name=by]:checked').value") == "step_advantage"
    assert "Episode 2 of 2" in page.texts(".pane .facts")[0]
    for wrong in ("#task=1", link(1, 5, 99), link(7, 5), "#%%%", link(1, 5, beside="9.x.y.z")):
        page = Page(browser, path, wrong)
        assert page.texts(".pane h3") == ["Task 5, training, iteration 1"]
        page.assert_quiet(path)


@pytest.mark.parametrize(
    "script, named, drawn",
    [
        ("gigpo_mine", "visual sokoban 6x6, 1 box, 20 steps", "sokoban"),
        ("mine_sotopia", "corridor of 5 cells", ""),
        ("istar_webshop", "", "webshop"),  # of a run whose world was not recorded
    ],
)
def test_a_world_is_drawn_by_its_own_name(tmp_path, script, named, drawn):
    run = make_run(tmp_path / "a", [make_episode()], script=script)
    write_json(run / "run.json", {"starts": [{"script": script, "command": "", "world": named}]})
    assert read_run(run, 9)["world"] == drawn


@browser_test
@pytest.mark.parametrize("script", ("istar_sokoban", "istar_webshop", "istar_sotopia", "istar_own"))
def test_hostile_text_is_text(tmp_path, browser, script):
    """Whatever a model or a world wrote, nothing of it runs, hides or moves, wherever it stands."""
    world = {
        "istar_sokoban": "####\n#PX#\n####\n{}",
        "istar_webshop": "{0} [SEP] {0}\nActions: click[{0}]",
    }
    world["istar_sotopia"] = "Dan: {}\n3 turns left."
    steps = []
    for text in HOSTILE.values():
        seen = world.get(script, "{}").replace("{0}", text).replace("{}", text)
        steps.append(make_step(0, seen, f"<think>{text}</think><action>{text}</action>"))
        steps.append(make_step(0, text, text))
    flags = {"run_name": HOSTILE["script"], "model": HOSTILE["handler"]}
    run = make_run(tmp_path / "a", [make_episode(steps=steps)], script=script, flags=flags)
    told = f"{script.removeprefix('istar_')} {HOSTILE['handler']}"  # it is drawn by its first word
    start = {"script": script, "command": HOSTILE["script"], "world": told}
    write_json(run / "run.json", {"starts": [start]})
    named = run.rename(tmp_path / "x<img src=x onerror=window.pwned=9>")
    path = write_page([named])
    page = Page(browser, path.rename(tmp_path / "view.html"))
    page.js("for (const d of document.querySelectorAll('details')) d.open = true")
    for selector in (".said", ".world", "summary", ".step"):
        page.js(f"""for (const e of document.querySelectorAll('{selector}'))
            e.dispatchEvent(new MouseEvent('mouseover', {{bubbles: true}}))""")
    time.sleep(0.2)
    assert page.js("return window.pwned === undefined")
    foreign = "script a[href^=java] [onerror] [onload] [onmouseover] iframe object img"
    assert page.texts(", ".join(f"main {selector}" for selector in foreign.split())) == []
    assert page.texts("h1") == [named.name]
    page.assert_quiet(tmp_path / "view.html")

    shown = page.texts(".said")
    for n, text in enumerate(HOSTILE.values()):
        visible = re.sub(
            "[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2060-\u2069\ud800-\udfff]",
            lambda found: f"U+{ord(found[0]):04X}",
            text,
        )
        assert shown[2 * n] == f"<think>{visible}</think><action>{visible}</action>"
        assert shown[2 * n + 1] == visible
    everything = page.js("return document.body.innerText")
    assert not re.search(
        "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", everything
    )
    assert "U+202E" in everything and "U+001B" in everything and "U+D800" in everything
    page.assert_fits()


@browser_test
def test_a_very_long_text_is_clipped_until_it_is_asked_for(tmp_path, browser):
    long = "".join(f"word{n} " for n in range(20_000))[:100_000]
    unbroken = "\U0001f600" + "x" * 99_998
    steps = [make_step(0, long, unbroken), make_step(1, unbroken, "\U0001f600" * 50_000)]
    path = write_page([make_run(tmp_path / "a", [make_episode(steps=steps)], script="own")])
    page = Page(browser, path)
    assert page.seconds < 3 and len(page.js("return document.body.innerText")) < 40_000
    page.assert_fits()
    buttons = page.texts(".clip")
    assert buttons == ["Show all 100,000 characters"] * 4
    for _ in range(4):
        page.js("document.querySelector('.clip').click()")
    assert page.texts(".world pre") == [long, unbroken]
    assert page.texts(".said") == [unbroken, "\U0001f600" * 50_000]
    page.assert_fits()
    page.assert_quiet(path)


@browser_test
def test_ten_thousand_episodes_open_in_three_seconds(tmp_path, browser):
    grid = "######\n#_P__#\n#_X__#\n#__O_#\n#____#\n######\nP 1 2 X 2 2 O 3 3"
    episodes = []
    for iteration in range(1, 80):
        for task in range(16):
            for member in range(8):
                steps = [make_step(n, f"{grid} {iteration} {task} {n}") for n in range(10)]
                episodes.append(make_episode(iteration, task, float(member % 3 == 0), steps))
    episodes = episodes[:10_000]
    run = make_run(tmp_path / "large", episodes)
    start = time.perf_counter()
    path = write_page([run])
    writing = time.perf_counter() - start
    pages = (Page(browser, path) for _ in range(3))  # beside other work one of them may wait
    page = next((page for page in pages if page.seconds < 3), None)
    assert page, f"3 s were not enough; writing took {writing:.2f} s"
    assert "10,000" not in page.texts("#about")[0]  # nothing was thinned
    start = time.perf_counter()
    page.choose("iteration", "all")
    assert "10,000 episodes" in page.texts("#found")[0]
    assert time.perf_counter() - start < 2
    page.assert_quiet(path)


@browser_test
def test_a_picture_is_drawn(tmp_path, browser):
    """What a visual run kept stands in the step that names it, and nothing else does."""
    png = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8z8BQDwAEhQGAhKmMIQAA"
    png += "AABJRU5ErkJggg=="
    names = [f"pictures/{digit * 16}.png" for digit in "ab"]
    hostile = 'x" onerror="window.pwned=1', "https://example.com/a.png", "../outside.png", png
    steps = [make_step(0) | {"picture": name} for name in (*names, None, *hostile)]
    run = make_run(tmp_path / "a", [make_episode(steps=steps), make_episode(steps=steps[::-1])])
    (run / "pictures").mkdir()
    for path in (run / names[0], tmp_path / "outside.png"):
        path.write_bytes(base64.b64decode(png))
    path = write_page([run])
    assert path.read_text().count(png) == 1
    page = Page(browser, path)
    found = page.js(
        "return [...document.querySelectorAll('img')].map(i => [i.src, i.naturalWidth])"
    )
    assert found == [[f"data:image/png;base64,{png}", 1]]
    assert page.js("return window.pwned === undefined")
    assert all(url.startswith("data:") or url == f"file://{path}" for url in page.requests())


@browser_test
def test_a_run_without_episodes_and_one_of_a_script_of_your_own(tmp_path, browser):
    path = write_page(
        [make_run(tmp_path / "none", [], rows=[{"iteration": 0, "eval/success": 0.5}])]
    )
    page = Page(browser, path)
    page.assert_quiet(path)
    assert "no episode" in page.texts("#panes")[0]
    path = write_page([make_run(tmp_path / "own", [make_episode()], script="rloo_corridor")])
    page = Page(browser, path)
    assert page.texts(".world")[0] == "You see a door."
    page.assert_quiet(path)
