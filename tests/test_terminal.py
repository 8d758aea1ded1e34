"""What a run says: lines that stay and come at once, nothing that moves the cursor, and --quiet."""

import asyncio
import fcntl
import io
import logging
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time

from runtime.rollout import Stage, rollout
from runtime.view import terminal
from runtime.view.report import show

from conftest import ROOT, load, run_main, settings

SMALL = """--engine hf --iterations 3 --tasks-per-iteration 2 --group-size 2 --eval-tasks 2
--eval-samples 1 --max-steps 2 --eval-every 9"""
HOSTILE = "a\x1b[2J\x1b[1;1Hb\rc\x07d\x9b31me\u202ef\ud800g\x00h\x7fi"
# of a terminal's controls those that bars need: back to the line's start, up, and erasing nothing
MOVES = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def start(script, *flags, **streams):
    command = [sys.executable, str(ROOT / f"{script}.py"), *SMALL.split(), *flags]
    return subprocess.Popen(command, env=os.environ, **streams)


# ------------ lines ------------


def test_a_line_of_an_iteration_has_the_time_left(capsys):
    row = {"iteration": 7, "time/elapsed": 61.4, "train/success": 0.5}
    row |= {"prm/pair_accuracy": None, "prm/loss": 0.7}
    show(row, 138.0)
    show(row | {"iteration": 80}, None)
    assert capsys.readouterr().out.splitlines() == [
        "iteration    7      61 s    02:18 left  train/success 0.500",
        "iteration   80      61 s                train/success 0.500",
    ]


def test_the_time_left_is_that_of_this_start(tmp_path):
    """None before an iteration and after the last; a run that goes on counts from there."""
    said = run_main("rloo_sokoban", *SMALL.split(), "--run-name", "a", cwd=tmp_path).stdout
    lines = [line for line in said.splitlines() if re.match(r"iteration +\d", line)]
    assert [" left" in line for line in lines] == [False, True, True, False]
    more = ["--resume", "runs/a", "--iterations", "5", "--override", "iterations"]
    flags = [word for word in SMALL.split() if word not in ("--iterations", "3")]
    said = run_main("rloo_sokoban", *flags, *more, cwd=tmp_path).stdout
    lines = [line for line in said.splitlines() if re.match(r"iteration +\d", line)]
    assert [" left" in line for line in lines] == [True, False]


def test_where_stdout_is_no_terminal_lines_come_at_once_and_are_plain(tmp_path):
    """Seen while the run goes on; and no warning of a library on stderr, nor a bar."""
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=tmp_path)
    with start("istar_sokoban", "--iterations", "200", **pipes) as process:
        seen = []
        while not any(line.startswith("iteration    2") for line in seen):
            ready, _, _ = select.select([process.stdout], [], [], 120)
            assert ready, seen
            seen.append(process.stdout.readline().decode())
        assert process.poll() is None  # long before the end
        process.send_signal(signal.SIGTERM)
        rest, told = process.communicate(timeout=60)
    everything = "".join(seen) + rest.decode()
    assert not MOVES.search(everything) and "left  train/success" in everything
    (last,) = told.decode().strip().splitlines()
    assert last.startswith("stopped by SIGTERM")


def test_in_a_terminal_bars_go_and_lines_stay(tmp_path):
    main, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 160, 0, 0))
    with start("istar_sokoban", cwd=tmp_path, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        text = b""
        while process.poll() is None or select.select([main], [], [], 0)[0]:
            try:
                text += os.read(main, 65536)
            except OSError:
                break
    shown = text.decode()
    assert "episodes" in shown and "\r" in shown  # the bars were there
    controls = {found for found in MOVES.findall(shown)}
    assert controls <= {"\r", "\x1b"} and set(re.findall("\x1b..", shown)) <= {"\x1b[A"}
    screen = []  # what stays: of each line what was written over it last
    for line in shown.replace("\x1b[A", "").split("\n"):
        parts = [part for part in line.split("\r") if part.strip()]
        screen.append(parts[-1].rstrip() if parts else "")
    lines = [line for line in screen if re.match(r"iteration +\d", line)]
    assert [int(line.split()[1]) for line in lines] == [0, 1, 2, 3]


# ------------ what a model wrote ------------


def test_no_text_moves_the_cursor(capsys):
    for tell in (terminal.say, terminal.warn):
        tell(HOSTILE)
        told = capsys.readouterr().out
        assert not MOVES.search(told) and told.count("\n") == 1
        assert r"a\x1b[2J\x1b[1;1Hb\rc\x07d\x9b31me\u202ef\ud800g\x00h\x7fi" in told
    assert terminal.plain("é \U0001f600 \u05d0 tab\t line\n") == "é \U0001f600 \u05d0 tab\t line\n"


class World:
    """Whose first task raises it."""

    def reset(self, task):
        if task == 3:
            raise ValueError(HOSTILE)
        return self

    prompt = "walk"

    def step(self, text):
        return "", 0.0, True, {"valid": True, "success": True, "score": 1.0}


class Player:
    """What samples, and its tokens."""

    stop_ids = [2]

    async def sample(self, context, sampling):
        return [5, 2], [-1.0, -1.0]

    async def serve(self):
        await asyncio.Event().wait()

    def prompt(self, seen):
        return [1]

    def response(self, action):
        return "go"


def test_neither_does_a_world_that_raises_it_or_an_error_that_nobody_foresaw(capsys, monkeypatch):
    monkeypatch.setattr(logging.getLogger("envs"), "propagate", False)  # pytest-xdist sends UTF-8
    terminal.begin(False)
    stage = Stage(Player(), Player(), settings(max_steps=2))
    play = load("rloo_sokoban").play
    assert len(rollout(stage, play, World(), [3, 4, 5, 6, 7], None)) == 4
    told = capsys.readouterr().out
    assert told.startswith("warning: task 3: the world raised ValueError: a\\x1b")
    assert not MOVES.search(told) and told.count("\n") == 1
    logging.getLogger("envs.sotopia.world").warning("scenario %s", HOSTILE)
    assert capsys.readouterr().out.startswith("warning: scenario a\\x1b[2J")

    try:
        raise ValueError(HOSTILE)
    except ValueError:
        sys.excepthook(*sys.exc_info())
    told = capsys.readouterr().err
    assert not MOVES.search(told) and "ValueError: a\\x1b[2J" in told and "Traceback" in told


# ------------ quiet ------------


def test_a_quiet_run_says_nothing(tmp_path):
    done = run_main("istar_sokoban", *SMALL.split(), "--quiet", "--run-name", "q", cwd=tmp_path)
    assert done.stdout == done.stderr == ""
    assert (tmp_path / "runs/q/view.html").exists()


def test_a_quiet_run_warns_and_its_errors_are_told(tmp_path, monkeypatch, capsys):
    terminal.begin(True)
    terminal.say("a line")
    terminal.warn("something")
    assert capsys.readouterr().out == "warning: something\n"
    done = run_main("istar_sokoban", "--quiet", "--eval-tasks", "999", cwd=tmp_path, check=False)
    assert done.returncode == 1 and done.stderr.startswith("--eval-tasks 999: ")


def test_a_quiet_run_shows_no_bar_in_a_terminal():
    from tqdm import tqdm

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    for quiet in (False, True):
        sys.stderr = Terminal()
        terminal.begin(quiet)
        for _ in tqdm(range(3), "rollout", disable=None):
            time.sleep(0.01)
        assert ("rollout" in sys.stderr.getvalue()) != quiet


def test_an_output_that_is_full_or_closed_ends_nothing(monkeypatch):
    """>/dev/full and >&-: what is said is lost, and nothing else."""
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        for _ in range(3):
            terminal.say("a line\n" * 10_000)
    monkeypatch.setattr(sys, "stdout", None)
    terminal.begin(quiet=False)
    terminal.say("a line")
