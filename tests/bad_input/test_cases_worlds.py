"""Worlds that users write, and runs that cannot learn: one table of cases. Each expects a line that
names the flag, the file, the field or the task, or the right numbers where the run can go on."""

import asyncio
import contextlib
import gc
import io
import json
import os
import random
import re
import sys
import time
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

from runtime.checks import panel_of
from runtime.data import Step, Trajectory
from runtime.engines import SamplingParams
from runtime.flags import RunArgs
from runtime.rollout import Stage, rollout
from runtime.saving.files import rows_of
from runtime.view.report import describe, episode_lines
from runtime.view.stuck import cut_answers, tell_if_stuck
from runtime.view.viewer import read_run
from runtime.worlds import OURS, Door, WorldFault, check_world

import pytest
import torch
from conftest import load, settings
from PIL import Image as PNG
from test_worlds import Chat, Engine
from tiny_world import module_of, program, run_in, run_there, write

PLAY = load("rloo_sokoban").play


def said_in_one_line(done) -> str:
    """The line with which a run ended that cannot go on."""
    assert done.returncode == 1 and "Traceback" not in done.stdout + done.stderr
    lines = [line for line in done.stderr.splitlines() if line]
    assert len(lines) == 1 and lines[0].isprintable() and len(lines[0]) < 600, done.stderr
    return lines[0]


def line_of(function, *given) -> str:
    with pytest.raises(SystemExit) as stop:
        function(*given)
    said = stop.value.code
    assert isinstance(said, str) and said.isprintable() and len(said) < 600, said
    return said


def world_with(tmp_path, **lines):
    (tmp_path / "tiny.py").write_text(program(**lines))
    return module_of(tmp_path / "tiny.py", "tiny").World()


def stage() -> Stage:
    return Stage(Engine(), Chat(), settings(max_steps=4))


def played(world, tasks, stage) -> list[Trajectory]:
    return rollout(stage, PLAY, world, [*tasks], SamplingParams())


# ------------ the names of flags ------------

TAKEN = [f.name for kind in (load("rloo_sokoban").Args, RunArgs) for f in fields(kind)][::3]
KINDS = {str: '""', bool: "False", int: "1"}


@pytest.mark.parametrize("name", ["seed", *TAKEN])
def test_a_flag_of_the_world_with_a_name_that_is_taken(name, tmp_path):
    """At the start, before anything is read, also of --help; the line says which one to rename."""
    done = run_in(tmp_path, flags=f"{name}: int = 1  # Something else.")
    flag = f"--{name.replace('_', '-')}: "
    said = said_in_one_line(done)
    assert said.startswith(flag) and said.endswith(f" and Flags both have it; rename Flags.{name}")
    assert said_in_one_line(run_there(tmp_path, "--help")) == said
    assert not (tmp_path / "runs").exists()


def test_a_flag_of_the_script_with_a_name_that_every_script_has(tmp_path):
    """The one to rename is the script's own."""
    write(tmp_path)
    text = (tmp_path / "mine.py").read_text()
    (tmp_path / "mine.py").write_text(
        text.replace("    seed: int", "    track: float = 0.5\n    seed: int")
    )
    said = said_in_one_line(run_there(tmp_path))
    assert said == "--track: Args and RunArgs both have it; rename Args.track"


TYPES = {
    "from pathlib import Path\nplace: Path = Path('x')": "--place: {}, not Path",
    "cells: int | None = None": "--cells: {}, not int | None",
    "size: tuple[int, int] = (3, 4)": "--size: {}, not tuple[int, int]",
    "options: dict = field(default_factory=dict)": "--options: {}, not dict",
    "import enum\nclass Hue(enum.Enum):\n    RED = 1\nhue: Hue = Hue.RED": "--hue: {}, not Hue",
}


@pytest.mark.parametrize("lines", TYPES)
def test_a_flag_of_the_world_has_a_plain_type(lines, tmp_path):
    said = said_in_one_line(run_in(tmp_path, flags=f"from dataclasses import field\n{lines}"))
    plain = "the type of a flag is int, float, bool, str, Literal or tuple[str, ...]"
    assert said == TYPES[lines].format(plain)


DEFAULTS = {  # what stands in the place of a value, though nobody gave it: what is said
    "from typing import Literal\nhue: Literal['red', 'blue'] = 'green'": "--hue green: has to be",
    "cells: int = 2.5": "--cells 2.5: has to be a whole number",
    "cells: int = None": "--cells None: has to be a whole number",
    "cells: int = 'many'": "--cells many: has to be a whole number",
    "size: float = math.nan": "--size nan: has to be a number",
    "is_open: bool = 'yes'": "--is_open yes: True or False",
    "num_boxes: int = 77": "--num-boxes 77: has to be a whole number from 1 to 4",
    "cells: int = 3\ndef __post_init__(self): self.cells = 'x'": "--cells x: has to be a whole",
    "def __post_init__(self): raise OSError('no rooms')": "Flags.__post_init__ raised OSError: no",
    "def __post_init__(self): import sys; sys.exit(0)": "Flags.__post_init__ raised SystemExit: 0",
}


@pytest.mark.parametrize("lines", DEFAULTS, ids=lambda lines: lines.splitlines()[-1])
def test_a_default_is_what_its_flag_may_be(lines, tmp_path):
    said = said_in_one_line(run_in(tmp_path, flags=lines))
    assert said.startswith(DEFAULTS[lines].replace("is_open", "is-open")), said
    assert not (tmp_path / "runs").exists()


CLASSES = {
    "@dataclass\nclass Flags:\n    cells: int": "Flags.__init__() missing 1 required positional ",
    "class Flags: pass": "--world: the type of a flag is int, float, bool, str, Literal or ",
}


@pytest.mark.parametrize("lines", CLASSES)
def test_a_dataclass_of_flags_that_cannot_be_read(lines, tmp_path):
    done = run_in(tmp_path, more=f"global Flags\n{lines}")
    assert CLASSES[lines] in said_in_one_line(done)


COMPUTED = """self.cells**2 math.nan -math.inf None (1,2) {1} {'a':1} [np.int64(1)] np.zeros(3)
np.float32(0.5) torch.zeros(2) object()""".split()


def test_what_a_dataclass_of_flags_computes_is_no_flag(tmp_path):
    """It may be of any type; the table of flags does not have it, and --resume finds the run."""
    computes = [f"self.made_{number} = {value}" for number, value in enumerate(COMPUTED)]
    lines = "\n    ".join(["cells: int = 3\ndef __post_init__(self):", *computes])
    assert run_in(tmp_path, "--cells", "4", flags=lines).returncode == 0
    flags = json.loads((tmp_path / "runs/a/args.json").read_text())
    assert flags["cells"] == 4 and not [name for name in flags if name.startswith("made")]
    words = ["--cells", "4", "--run-name", "", "--iterations", "2", "--resume"]
    done = run_there(tmp_path, *words, "auto")
    assert "goes on with runs/a" in done.stdout and done.returncode == 0, done.stderr


@pytest.mark.parametrize("decorator", ["@dataclass", "@dataclass(slots=True)"])
def test_a_dataclass_within_the_worlds_flags_has_flags_too(decorator, tmp_path):
    rooms = f"from dataclasses import field\n{decorator}\nclass Rooms:\n    size: int = 3"
    flags = f"{decorator}\nclass Flags:\n    rooms: Rooms = field(default_factory=Rooms)"
    done = run_in(tmp_path, "--size", "4", more=f"global field, Rooms, Flags\n{rooms}\n{flags}")
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "runs/a/args.json").read_text())["size"] == 4
    assert said_in_one_line(run_there(tmp_path, "--size", "x")).startswith("--size x: has to be a")


def test_of_a_flag_that_is_given_twice_the_last_one_counts(tmp_path):
    """With - or with _, as argparse has it: a script's own words, and then another value."""
    words = "--learning-rate 1 --learning_rate=2e-3 --clip 0.1 --clip 0.3".split()
    assert run_in(tmp_path, *words).returncode == 0
    flags = json.loads((tmp_path / "runs/a/args.json").read_text())
    assert (flags["learning_rate"], flags["clip"]) == (2e-3, 0.3)


def test_a_flag_of_the_world_with_a_name_of_its_own(tmp_path):
    lines = {
        "flags": "seed_of_world: int = 1  # Something else.",
        "step": "reward = torch.tensor(0.5)",
    }
    done = run_in(tmp_path, "--seed-of-world", "7", **lines)
    assert done.returncode == 0 and not done.stderr.strip(), done.stderr
    flags = json.loads((tmp_path / "runs/a/args.json").read_text())
    assert (flags["seed_of_world"], flags["seed"]) == (7, 3)


# ------------ sets of tasks ------------

ONCE, WHOLE = "once, not 2 times", "a whole number"
SEQUENCE = "a sequence of task numbers: a range, a list"
ENDLESS = """from collections.abc import Sequence
class Endless(Sequence):
    def __len__(self): return 40
    def __getitem__(self, index): return 60 + index
train_tasks = Endless()"""
SETS = {  # what the world has: (what is named, what was found or is expected)
    "train_tasks = range(40, 90)": ("train_tasks and eval_tasks", "int 40"),
    "eval_tasks = [1, 2, 150]": ("train_tasks and eval_tasks", "int 150"),
    "validation_tasks = range(199, 300)": ("train_tasks and validation_tasks", "int 199"),
    "validation_tasks = [300, 49]": ("eval_tasks and validation_tasks", "int 49"),
    "train_tasks = range(1, 99, 7)": ("train_tasks and eval_tasks", "int 1"),
    "eval_tasks = range(-5, 10**7, 25)": ("train_tasks and eval_tasks", "int 120"),
    "train_tasks = [*range(60, 90), 75]": ("a task in train_tasks is int 75", ONCE),
    "eval_tasks = [7, 7]": ("a task in eval_tasks is int 7", ONCE),
    "eval_tasks = [7, np.int64(7)]": ("a task in eval_tasks is int 7", ONCE),
    "validation_tasks = (300, 301, 300)": ("a task in validation_tasks is int 300", ONCE),
    "train_tasks = np.arange(60, 90)": ("train_tasks is ndarray", SEQUENCE),
    "train_tasks = torch.arange(60, 90)": ("train_tasks is Tensor", SEQUENCE),
    "train_tasks = {60, 61, 62}": ("train_tasks is set", SEQUENCE),
    "train_tasks = {60: 'a', 61: 'b'}": ("train_tasks is dict", SEQUENCE),
    "train_tasks = (n for n in range(9))": ("train_tasks is generator", SEQUENCE),
    "train_tasks = '0123'": ("train_tasks is str '0123'", SEQUENCE),
    "train_tasks = None": ("train_tasks is NoneType", SEQUENCE),
    "eval_tasks = 128": ("eval_tasks is int 128", SEQUENCE),
    "del eval_tasks": ("eval_tasks is NoneType", SEQUENCE),
    "train_tasks = [60, 61.5]": ("a task is float 61.5", WHOLE),
    "train_tasks = [60, '61']": ("a task is str '61'", WHOLE),
    "eval_tasks = [0, None]": ("a task is NoneType", WHOLE),
    "eval_tasks = [0, [1]]": ("a task is list [1]", WHOLE),
    "eval_env = SimpleNamespace(name='judge')": ("judge: eval_tasks is NoneType", SEQUENCE),
    "eval_env = SimpleNamespace(name='judge', eval_tasks=[3, 3])": ("judge: a task in eval", ONCE),
    "name = None": ("name is NoneType", "a str"),
    "name = 7": ("name is int 7", "a str"),
    "name = 'a\\nb'": ("a b: name is str", "a str of one line"),
    "data = 'nowhere'": ("data is str 'nowhere'", "a directory"),
    "data = __file__": ("data is str", "a directory"),
    "data = 7": ("data is int 7", "a directory"),
    "measures = 'rooms'": ("measures is str 'rooms'", "a list of names"),
    "measures = None": ("measures is NoneType None", "a list of names"),
    "def together(self, task): raise KeyError(task)": ("together(0) raised KeyError: 0",),
    "del name": ("World: name is NoneType", "a str"),
    "def together(self, task): return [task]": ("together(0) is list [0]", "something hashable"),
    "def together(self, task): return math.nan": ("together(0) is float nan", "something hash"),
    "together = 'x'": ("tiny world: together(0) raised TypeError: 'str' object",),
    "train_tasks = property(lambda self: 1 / 0)": ("tiny world: train_tasks raised ZeroDivision",),
    "eval_tasks = property(lambda self: open('/x'))": ("eval_tasks raised FileNotFoundError: ",),
    "data = property(lambda self: 1 / 0)": ("tiny world: data raised ZeroDivisionError",),
    "name = property(lambda self: 1 / 0)": ("World: name raised ZeroDivisionError",),
    "def __getattr__(self, name): raise KeyError(name)": ("eval_env raised KeyError: 'eval_env'",),
    "def __getattr__(self, name): return None": ("measures is NoneType None",),
    "eval_env = 'x'": ("str: name is NoneType", "a str of one line"),
    "eval_env = SimpleNamespace(eval_tasks=range(9))": ("SimpleNamespace: name is NoneType",),
    "train_tasks = []": ("--tasks-per-iteration 2", "has 0 training tasks"),
    ENDLESS: ("train_tasks is Endless <", "expected as many as len()"),
    "train_tasks = range(10**9 + 1, 8, -2)": ("train_tasks and eval_tasks", "int 9,"),
    "train_tasks, eval_tasks = range(10**9), range(10**9 - 3, 10**10, 7)": ("int 999999997,",),
    "eval_tasks = range(1)": ("--eval-tasks 2", "has 1"),
}


@pytest.mark.parametrize("line", SETS)
def test_sets_of_tasks_are_refused_at_the_start(line, tmp_path):
    said = said_in_one_line(run_in(tmp_path, world=line))
    assert all(part in said for part in SETS[line]), said
    assert not (tmp_path / "runs").exists() or not [*(tmp_path / "runs").iterdir()]


@pytest.mark.parametrize("line", ["del validation_tasks", "validation_tasks = None"])
def test_a_world_without_validation_tasks(line, tmp_path):
    said = said_in_one_line(run_in(tmp_path, "--eval-set", "validation", world=line))
    assert said.startswith("--eval-set validation: tiny world has no validation_tasks")


@pytest.mark.parametrize(
    "line",
    [
        "train_tasks = range(51, 10**12)\ndel validation_tasks",
        "train_tasks, eval_tasks = range(1, 99, 2), range(0, 99, 2)",
        "train_tasks = [np.int64(60), torch.tensor(61), 62.0]",
        "train_tasks, eval_tasks = tuple(range(60, 90)), [0, 5, 3]",
        "eval_env = SimpleNamespace(name='another world', eval_tasks=range(150))\ndel eval_tasks",
        "eval_env = None",
        "from collections import deque\neval_tasks = deque(range(50))",
        "from collections import UserList\ntrain_tasks = UserList(range(60, 90))",
    ],
)
def test_sets_of_tasks_that_share_none_are_taken(line, tmp_path):
    world = world_with(tmp_path, world=line)
    evaluates = check_world(world)
    assert evaluates is (getattr(world, "eval_env", None) or world)
    run_args = SimpleNamespace(eval_set="panel", eval_tasks=2)
    panel = panel_of(SimpleNamespace(run_args=run_args), evaluates)
    assert panel == [*evaluates.eval_tasks][:2]


@pytest.mark.parametrize(
    "train, panel",
    [
        (range(0, 10**12, 2), range(1, 10**12, 2)),
        (range(10**12, 0, -2), range(10**12 + 1, 10**11, -4)),
        (range(10**12), range(10**12, 2 * 10**12)),
        (range(5, 10**12, 6), range(4, 10**12, 9)),
    ],
)
def test_long_ranges_that_share_no_task_are_compared_at_once(train, panel):
    world = SimpleNamespace(name="tiny world", train_tasks=train, eval_tasks=panel)
    began = time.monotonic()
    assert check_world(world, 2) is world and time.monotonic() - began < 1


def test_the_first_task_of_two_ranges_is_found():
    """As one by one, for ranges of all kinds."""
    drawn = random.Random(1)
    for _ in range(500):
        ends = [(drawn.randint(-30, 30), drawn.randint(-30, 30)) for _ in range(2)]
        steps = [drawn.choice([-7, -4, -2, -1, 1, 2, 3, 6, 9]) for _ in range(2)]
        train, panel = (range(*pair, step) for pair, step in zip(ends, steps))
        world = SimpleNamespace(name="tiny world", train_tasks=train, eval_tasks=panel)
        if both := {*train} & {*panel}:
            found = re.search(r"eval_tasks is int (-?\d+), ", line_of(check_world, world))
            assert int(found[1]) in both
        else:
            check_world(world)


CHANGED = {  # what changes while the run is at work: what is said
    "self.train_tasks = [*self.train_tasks, self.begun]": "and eval_tasks is int 8, expected none",
    "self.train_tasks = range(2, 20)": "train_tasks and eval_tasks is int 2, expected none",
    "self.train_tasks = [201]": "train_tasks and validation_tasks is int 201, expected none in two",
    "self.train_tasks = None": "train_tasks is NoneType None, expected a sequence of task numbers",
    "self.train_tasks = [300]": "--tasks-per-iteration 2: tiny world has 1 training tasks",
}


@pytest.mark.parametrize("line", CHANGED)
def test_tasks_that_change_during_a_run_do_not_meet_the_panel(line, tmp_path):
    done = run_in(tmp_path, "--iterations", "3", reset=f"if self.begun == 8: {line}")
    assert CHANGED[line] in said_in_one_line(done)
    assert [row["iteration"] for row in rows_of(tmp_path / "runs/a/metrics.jsonl")] == [0, 1]
    easier = "if self.begun == 8: self.train_tasks = range(150, 190)"  # a curriculum may
    assert run_in(tmp_path, "--run-name", "b", reset=easier).returncode == 0


def test_a_world_that_evaluates_is_one_also_where_it_is_empty(tmp_path):
    """Its truth is not asked for, as of one with a length of 0."""
    line = "class Judge(list): name, eval_tasks = 'judge', range(150)\neval_env = Judge()"
    world = world_with(tmp_path, world=line)
    assert check_world(world) is world.eval_env


OTHER = """global other
def other(self):
    own = World.__new__(World)
    own.begun, own.name, own.eval_env, own.train_tasks = 0, 'judge', None, []
    own.eval_tasks = range({})
    return own
World.__init__ = lambda self: vars(self).update(begun=0, eval_env=other(self))"""


@pytest.mark.parametrize(
    "tasks, begin, is_refused",
    [
        ("100, 150", "", True),
        ("99, 150", "", True),  # one of two
        ("100, 150", "if world.name == 'judge': self.prompt += ' faster'", False),
        ("100, 150", "if world.name == 'judge' and task == 101: self.prompt += ' faster'", False),
        ("300, 350", "", False),
    ],
)
def test_a_panel_of_another_env_with_tasks_of_training(tasks, begin, is_refused, tmp_path):
    """Where all that have their numbers begin as they do; else they are tasks of its own."""
    done = run_in(tmp_path, more=OTHER.format(tasks), begin=begin)
    if is_refused:
        said = said_in_one_line(done)
        assert said.startswith("judge: the part of the panel that is in train_tasks, with equal")
        assert "list [100" in said and said.endswith("none; other tasks have other numbers")
    assert done.returncode == is_refused, done.stderr


CONVERSATION = """async def opening(self): return self.prompt
async def leave(self): return 0.0, False, 0.0
at_once = step
async def waits(self, text): return self.at_once(text)
step = waits"""
BOTH = "expected a list that has both"
SIDES = {  # the world's sides_of: what is said
    "": f"is NoneType None, {BOTH}",
    "def sides_of(self, tasks): return None": f"is NoneType None, {BOTH}",
    "def sides_of(self, tasks): return {*tasks}": f"is set {{100}}, {BOTH}",  # groups of one
    "def sides_of(self, tasks): return [*{*tasks}]": f"is list [100], {BOTH}",
    "def sides_of(self, tasks): return (t for t in tasks)": "is generator <generator object",
    "def sides_of(self, tasks): return [t ^ 1 for t in tasks]": f"is list [101, 101], {BOTH}",
    "async def sides_of(self, tasks): return tasks": "is coroutine <coroutine object",
    "def sides_of(self, tasks): raise KeyError('side')": "raised KeyError: 'side'",
    "sides_of = [100]": "raised TypeError: 'list' object is not callable",
}


@pytest.mark.parametrize("line", SIDES)
def test_the_sides_of_a_conversation_are_a_list(line, tmp_path, recwarn):
    said = said_in_one_line(run_in(tmp_path, script="rloo_sotopia", world=line, more=CONVERSATION))
    assert said.startswith(f"tiny world: sides_of([100, 100]) {SIDES[line]}"), said
    assert not [w for w in recwarn if "never awaited" in str(w.message)]


def test_a_conversation_with_both_sides_is_played(tmp_path):
    sides = "def sides_of(self, tasks): return sorted(s for t in tasks for s in (t, t ^ 1))"
    sides += "\ntrain_tasks, eval_tasks = range(100, 200, 2), range(0, 50, 2)"
    done = run_in(tmp_path, script="rloo_sotopia", world=sides, more=CONVERSATION)
    assert done.returncode == 0, done.stderr
    assert len(rows_of(tmp_path / "runs/a/episodes.jsonl")) == 2 * 2 * 2


LACKS = {  # the line of the world: what is said of from_args
    "def from_args(cls, args): return cls()": "TypeError: Episode.from_args() missing 1 required",
    "@classmethod\ndef from_args(args): return 1": "TypeError: Episode.from_args() takes 1 posit",
    "from_args = None": "TypeError: 'NoneType' object is not callable",
}


@pytest.mark.parametrize("line", LACKS)
def test_what_a_script_asks_of_a_world_before_the_run_begins(line, tmp_path):
    said = said_in_one_line(run_in(tmp_path, more=f"{line}\nWorld.from_args = from_args"))
    assert said.startswith(f"main raised {LACKS[line]}"), said
    assert re.search(r"mine\.py, line \d+; see envs/README\.md\)$", said)


def test_a_script_of_a_world_with_other_flags(tmp_path):
    """PRIME asks for --outcome; the line names what is missing, and the line that asks."""
    said = said_in_one_line(run_in(tmp_path, script="prime_webshop"))
    assert said.startswith(
        "main raised AttributeError: 'Flags' object has no attribute 'outcome' ("
    )
    assert re.search(r"mine\.py, line \d+; see envs/README\.md\)$", said)


def test_a_world_of_pictures_needs_no_flags_of_its_own(tmp_path):
    picture = PNG.new("RGB", (32, 32))
    picture.save(tmp_path / "a.png")
    lines = {"world": "shows_pictures = True", "begin": "self.picture = open('a.png', 'rb').read()"}
    done = run_in(tmp_path, script="rloo_visual_sokoban", **lines)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "runs/a/pictures").exists()


FROM_ARGS = """@classmethod
def from_args(cls, args):
    {}
World.from_args = from_args"""


def test_a_world_that_cannot_be_made_is_one_line(tmp_path):
    said = said_in_one_line(run_in(tmp_path, more=FROM_ARGS.format("return args.nothing")))
    told = "Episode.from_args raised AttributeError: 'Args' object has no attribute 'nothing' ("
    assert said.startswith(told)
    assert re.search(r"tiny\.py, line \d+\)$", said)
    said = said_in_one_line(run_in(tmp_path, more=FROM_ARGS.format("return None")))
    assert "name is NoneType None, expected a str" in said


@pytest.mark.parametrize("code", ["", "0", "3"])
def test_a_world_that_leaves_as_it_is_made_says_so(code, tmp_path):
    """Status 0 would say that all was done."""
    done = run_in(tmp_path, more=FROM_ARGS.format(f"import sys; sys.exit({code})"))
    assert re.match(r"Episode\.from_args raised SystemExit.*tiny\.py, line", said_in_one_line(done))
    done = run_in(tmp_path, more=FROM_ARGS.format("import sys; sys.exit('--length 2: no')"))
    assert said_in_one_line(done) == "--length 2: no"


SET = [  # what a library, or somebody's constructor, may set
    "torch.set_default_dtype(torch.float64)",
    "torch.set_default_device('meta')",
    "torch.set_grad_enabled(False)",
    "import os; os.chdir('/')",
    "import io, sys; sys.stdout = io.StringIO()",
]


@pytest.mark.parametrize("line", SET)
def test_what_a_world_sets_as_it_is_made_is_not_the_runs(line, tmp_path):
    step = "reward = 0.5 * (self.first % 2)"
    more = FROM_ARGS.format(f"{line}; return cls()")
    done = run_in(tmp_path, "--group-size", "4", more=more, step=step)
    assert done.returncode == 0 and "iteration    1 " in done.stdout
    assert torch.get_default_dtype() == torch.float32 and torch.is_grad_enabled()
    *_, row = rows_of(tmp_path / "runs/a/metrics.jsonl")
    assert row["policy/moved"] > 0.9


@pytest.mark.parametrize("line", SET[:3])
def test_what_a_worlds_module_sets_as_it_is_imported_is_not_the_runs(line, tmp_path):
    done = run_in(tmp_path, "--group-size", "4", more=line, step="reward = 0.5 * (self.first % 2)")
    assert done.returncode == 0 and torch.is_grad_enabled(), done.stderr
    assert torch.get_default_dtype() == torch.float32
    *_, row = rows_of(tmp_path / "runs/a/metrics.jsonl")
    assert row["policy/moved"] > 0.9


MADE = {  # a default, or what from_args sets: how the line begins
    "is_open: bool = 'False'": "--is-open 'False': from_args, or a default, made it str",
    "cells: int = '5'": "--cells '5': from_args, or a default, made it str",
    "size: float = '0.5'": "--size '0.5': from_args, or a default, made it str",
    "label: str = 5": "--label 5: from_args, or a default, made it int",
    "import numpy as np\ncells: int = np.int64(5)": "--cells np.int64(5): from_args, or a default",
}
CHANGES = {
    "args.group_size = '8'": "--group-size '8': from_args, or a default, made it str",
    "args.learning_rate = np.float32(1e-3)": "--learning-rate np.float32(0.001): from_args, or a",
    "args.run_args.quiet = 'False'": "--quiet 'False': from_args, or a default, made it str",
    "args.max_steps = np.int64(4)": "--max-steps np.int64(4): from_args, or a default, made it int",
    "args.model = 7": "--model 7: from_args, or a default, made it int",
    "args.model = np.zeros(2)": "--model array([0., 0.]): from_args, or a default, made it ndarray",
    "args.clip = np.zeros(2)": "--clip [0. 0.]: has to be a number from 1e-09 to",
    "args.clip = math.nan": "--clip nan: has to be a number from 1e-09 to",
}


@pytest.mark.parametrize("line", [*MADE, *CHANGES])
def test_a_flag_has_the_type_that_it_says(line, tmp_path):
    if line in MADE:
        said = run_in(tmp_path, flags=line)
    else:
        said = run_in(tmp_path, more=FROM_ARGS.format(f"{line}; return cls()"))
    *_, line_of_error = said.stderr.strip().splitlines()
    assert line_of_error.startswith({**MADE, **CHANGES}[line]) and said.returncode == 1
    assert not (tmp_path / "runs").exists()


def test_a_flag_that_a_world_changes_to_another_number_is_the_runs(tmp_path):
    lines = "args.group_size, args.clip, args.lr_halving = 3, 1, math.inf; return cls()"
    assert run_in(tmp_path, more=FROM_ARGS.format(lines)).returncode == 0
    flags = json.loads((tmp_path / "runs/a/args.json").read_text())
    assert (flags["group_size"], flags["clip"], flags["lr_halving"]) == (3, 1, "inf")
    assert len(rows_of(tmp_path / "runs/a/episodes.jsonl")) == 2 * 3


@pytest.mark.parametrize("line", SET)
def test_what_a_summary_or_an_attribute_sets_is_named(line, tmp_path):
    for head in ("def summary(self):", "@property\ndef measures(self):"):
        home = tmp_path / head.split("(")[0].split()[-1]
        home.mkdir()
        said = said_in_one_line(run_in(home, world=f"{head}\n    {line}; return {{}}"))
        assert said.startswith(f"tiny world: {home.name}") and said.endswith(", as before"), said


# ------------ the first prompt, before a run begins ------------

BEGIN = {  # (the lines of the world): what is named
    ("reset", "raise KeyError(task)"): "task 0: the world raised KeyError: 0",
    (
        "reset",
        "if task == 1: raise OSError('it broke\\nin two lines')",
    ): "task 1: the world raised OSE",
    ("reset", "import sys; sys.exit('left')"): "task 0: the world raised SystemExit: left",
    ("reset", "raise StopIteration"): "task 0: the world raised StopIteration",
    ("reset", "raise asyncio.CancelledError"): "task 0: the world raised CancelledError",
    ("reset", "return None"): "has no attribute 'prompt'",
    ("reset", "async def own(): 1\nreturn own()"): "reset is coroutine <coroutine object",
    ("begin", "async def own(): 1\nself.prompt = own()"): "prompt is coroutine <coroutine object",
    ("reset", "return {'prompt': 'go'}"): "has no attribute 'prompt'",
    ("reset", "self.prompt = 'go'; return self"): "task 0: reset is World <tiny.World",
    ("begin", "del self.prompt"): "has no attribute 'prompt'",
    ("begin", "self.prompt = None"): "task 0: prompt is NoneType None, expected a str",
    ("begin", "self.prompt = b'go'"): "task 0: prompt is bytes b'go', expected a str",
    ("begin", "self.prompt = ['go']"): "task 0: prompt is list ['go'], expected a str",
    ("begin", "self.prompt = {'role': 'user'}"): "task 0: prompt is dict",
    ("begin", "self.anchor = [1, 2]"): "task 0: anchor is list [1, 2], expected something hashable",
    ("begin", "self.anchor = float('nan')"): "anchor is float nan, expected something hashable",
    ("begin", "self.anchor = torch.zeros(2)"): "task 0: anchor is Tensor",
    ("begin", "self.anchor = torch.tensor(3)"): "task 0: anchor is Tensor tensor(3), expected some",
    ("begin", "self.anchor = (1, object())"): "task 0: anchor is tuple (1, <object object at",
    (
        "begin",
        "raise type('Panic', (BaseException,), {})('a panic')",
    ): "the world raised Panic: a p",
    ("reset", "return 'obs', {}"): "AttributeError: 'tuple' object has no attribute 'prompt'",
    ("reset", "return Episode"): "has no attribute 'prompt'",
    ("reset", "raise OSError('x' * 10**6)"): "task 0: the world raised OSError: xxx",
    ("reset", "raise OSError('\\x1b[2J\\x07\\u202e')"): "OSError: \\x1b[2J\\x07\\u202e",
    ("reset", "torch.manual_seed(task)"): "task 0: initial_seed() is int 0, expected ",
    ("reset", "import os; os.chdir('/')"): "task 0: getcwd() is str '/', expected ",
}


@pytest.mark.parametrize("where, line", BEGIN)
def test_the_panels_prompts_are_read_in_one_line(where, line, tmp_path, recwarn):
    said = said_in_one_line(run_in(tmp_path, **{where: line}))
    assert said.startswith("tiny world: task ") and BEGIN[where, line] in said, said
    assert not [w for w in recwarn if "never awaited" in str(w.message)]
    assert not (tmp_path / "runs").exists() or not [*(tmp_path / "runs").iterdir()]


def test_episodes_that_share_an_object_are_refused(tmp_path):
    """A world of Gymnasium's kind keeps one episode; here all are played side by side."""
    slots = "class Slots:\n    __slots__ = ('prompt',)\nself.kept = getattr(self, 'kept', Slots())"
    slots = world_with(tmp_path, reset=f"{slots}\nself.kept.prompt = 'go'\nreturn self.kept")
    assert "task 121: reset is Slots <" in line_of(played, slots, [120, 121], stage())
    kept = "self.kept = getattr(self, 'kept', None) or Episode(self, task)\nreturn self.kept"
    said = line_of(played, world_with(tmp_path, reset=kept), [120, 121], stage())
    assert said.startswith("tiny world: task 121: reset is Episode <tiny.Episode object at ")
    assert said.endswith(", expected an object of its own: all are played side by side")


def test_episodes_of_a_task_begin_in_equal_states(tmp_path):
    """Those without an __eq__ of their own never are: no step would be compared with another."""
    world = world_with(tmp_path, begin="self.anchor = object()")
    said = line_of(played, world, [120, 120], stage())
    assert said.startswith("tiny world: task 120: anchor is object <object object at ")
    assert said.endswith(", expected something hashable, equal where states are")
    world = world_with(tmp_path, begin="self.anchor = self.first")
    said = line_of(played, world, [120, 120], stage())
    assert said.startswith("tiny world: task 120: anchor is int 2")
    assert said.endswith(", expected the same as in the task's other episodes")
    state = "self.anchor = (np.int64(task), frozenset('ab'))"
    assert len(played(world_with(tmp_path, begin=state), [120, 120, 121], stage())) == 3


def test_a_close_that_waits_is_awaited(tmp_path, recwarn):
    close = "async def close(self):\n    await asyncio.sleep(0)\n    self.world.closed = True"
    world = world_with(tmp_path, more=close)
    assert len(played(world, [120], stage())) == 1 and world.closed
    assert not [w for w in recwarn if "never awaited" in str(w.message)]


@pytest.mark.parametrize("script", ["gigpo_sokoban", "graphgpo_sokoban"])
def test_a_script_that_compares_states_needs_them(script, tmp_path):
    """At the start, or at the first step that has none; the others do not ask."""
    said = said_in_one_line(run_in(tmp_path, script=script))
    assert "tiny world: task 0: anchor is NoneType None, expected the state: this " in said
    said = said_in_one_line(run_in(tmp_path, script=script, begin="self.anchor = 0"))
    assert said.endswith("['score', 'success', 'valid'], expected the key 'anchor'")
    step = "info['anchor'] = None"
    said = said_in_one_line(run_in(tmp_path, script=script, begin="self.anchor = 0", step=step))
    assert "tiny world: task 0: info['anchor'] is NoneType None, expected the state" in said
    lines = {"begin": "self.anchor = 0", "step": "info['anchor'] = self.steps"}
    done = run_in(tmp_path, script=script, **lines)
    assert done.returncode == 0, done.stderr


def test_step_rewards_of_the_world_need_them(tmp_path):
    """Zeros in their place would be learnt from in silence; other step rewards do not ask."""
    words, step = ("--step-reward", "ground-truth"), "reward = 0.5 * (self.first % 2)"
    script = "istar_webshop_ablations"
    said = said_in_one_line(run_in(tmp_path, *words, script=script, step=step))
    needs = "info is list ['score', 'success', 'valid'], expected the key 'game_reward'"
    assert said == f"tiny world: task 0: {needs}"
    rewards = f"{step}\ninfo['game_reward'] = self.steps * reward"
    assert run_in(tmp_path, *words, script=script, step=rewards).returncode == 0
    episodes = rows_of(tmp_path / "runs/a/episodes.jsonl")
    assert {s["reward"] for e in episodes for s in e["steps"]} == {0.0, 0.5, 1.0}
    assert run_in(tmp_path, "--run-name", "b", script=script, step=step).returncode == 0


# ------------ what a step returns ------------

BROKEN = """class Broken:
    def __repr__(self): raise ValueError("no words")
    def __eq__(self, other): raise ValueError("not equal")
    def __hash__(self): return 1
    def __float__(self): raise ValueError("no number")
    def item(self): raise ValueError("no item")
"""
NUMBER, TRUTH = "a finite number", "True or False"
TUPLE = "a tuple (observation, reward, done, info)"
STEPS = {  # the line in step(): (the field that is named, what is expected)
    "return observation, reward, done, False, info": ("step is tuple", TUPLE),
    "return observation, reward, done": ("step is tuple", TUPLE),
    "return ()": ("step is tuple ()", TUPLE),
    "return 'on'": ("step is str 'on'", TUPLE),
    "return [observation, reward, done, info]": ("step is list", TUPLE),
    "return dict(observation=observation, reward=reward)": ("step is dict", TUPLE),
    "return (each for each in (observation, reward, done, info))": ("step is generator", TUPLE),
    "return done": ("step is bool False", TUPLE),
    "observation = None": ("observation is NoneType None", "a str"),
    "observation = b'on'": ("observation is bytes b'on'", "a str"),
    "observation = ['on']": ("observation is list ['on']", "a str"),
    "observation = {'text': 'on'}": ("observation is dict", "a str"),
    "observation = np.zeros(3)": ("observation is ndarray", "a str"),
    "observation = 7": ("observation is int 7", "a str"),
    "reward = math.nan": ("reward is float nan", NUMBER),
    "reward = -math.inf": ("reward is float -inf", NUMBER),
    "reward = np.float64('nan')": ("reward is float64 np.float64(nan)", NUMBER),
    "reward = torch.tensor(math.inf)": ("reward is Tensor tensor(inf)", NUMBER),
    "reward = 1e300": ("reward is float 1e+300", NUMBER),
    "reward = -(10**12)": ("reward is int -1000000000000", NUMBER),
    "reward = 1 + 2j": ("reward is complex (1+2j)", NUMBER),
    "reward = [1.0]": ("reward is list [1.0]", NUMBER),
    "reward = np.ma.masked": ("reward is MaskedConstant masked", NUMBER),
    "reward = np.ma.array([0.5], mask=[True])": ("reward is MaskedArray", NUMBER),
    "done = np.ma.masked": ("done is MaskedConstant masked", TRUTH),
    "reward = np.zeros((2, 2))": ("reward is ndarray", NUMBER),
    "reward = {'a': 1.0}": ("reward is dict", NUMBER),
    "import decimal; reward = decimal.Decimal('NaN')": ("reward is Decimal", NUMBER),
    "reward = np.datetime64('2020')": ("reward is datetime64", NUMBER),
    "reward = lambda: 1.0": ("reward is function", NUMBER),
    f"{BROKEN}reward = Broken()": ("reward is Broken <Broken instance at", NUMBER),
    "done = 'no'": ("done is str 'no'", TRUTH),
    "done = 2": ("done is int 2", TRUTH),
    "done = np.array([True, False])": ("done is ndarray", TRUTH),
    "done = math.nan": ("done is float nan", TRUTH),
    f"{BROKEN}done = Broken()": ("done is Broken", TRUTH),
    "info = [*info.items()]": ("info is list", "a dict"),
    "info = 'valid'": ("info is str 'valid'", "a dict"),
    "info = {}": ("info is list []", "the key 'valid'"),
    "info = {1: 2, None: 3}": ("info is list ['1', 'None']", "the key 'valid'"),
    "del info['score']": ("info is list ['success', 'valid']", "the key 'score'"),
    "info['valid'] = None": ("info['valid'] is NoneType", TRUTH),
    "info['valid'] = 0.5": ("info['valid'] is float 0.5", TRUTH),
    "info['success'] = 'False'": ("info['success'] is str 'False'", TRUTH),
    "info['score'] = math.inf": ("info['score'] is float inf", NUMBER),
    "info['score'] = None": ("info['score'] is NoneType", NUMBER),
    "info['progress'] = math.nan": ("info['progress'] is float nan", NUMBER),
    "info['game_reward'] = 1e40": ("info['game_reward'] is float 1e+40", NUMBER),
    "info['anchor'] = {1}": ("info['anchor'] is set", "something hashable"),
    "info['anchor'] = np.zeros(2)": ("info['anchor'] is ndarray", "something hashable"),
    f"{BROKEN}info['anchor'] = Broken()": ("info['anchor'] is Broken", "something hashable"),
    "info['anchor'] = torch.tensor(3)": ("info['anchor'] is Tensor", "something hashable"),
    "info['anchor'] = object()": ("info['anchor'] is object", "something hashable"),
    "info['anchor'] = frozenset([object()])": ("info['anchor'] is frozenset", "something hashable"),
    "yield observation": ("step is generator", TUPLE),
    "from types import MappingProxyType; info = MappingProxyType(info)": (
        "info is mappingproxy",
        "a dict",
    ),
    "from collections import defaultdict; info = defaultdict(float)": (
        "info is list []",
        "the key",
    ),
    "import fractions; reward = fractions.Fraction(1, 2)": ("reward is Fraction", NUMBER),
    "class F(float):\n    def __float__(self): raise ValueError\nreward = F(0.5)": (
        "reward is F",
        NUMBER,
    ),
    "torch.set_default_dtype(torch.float64)": (
        "get_default_dtype() is dtype torch.float64",
        "torch.float32, as before",
    ),
    "torch.set_grad_enabled(False)": ("is_grad_enabled() is bool False", "True, as before"),
    "torch.manual_seed(7)": ("initial_seed() is int 7", ""),
    "torch.set_default_device('meta')": ("get_default_device() is device device(type='meta')", ""),
    "import io, sys; sys.stdout = io.StringIO()": ("outputs() is list [<_io.StringIO", ""),
    "import io, sys; sys.stderr = io.StringIO()": ("outputs() is list [<", ""),
    "reward = 10**5000": ("reward is int", NUMBER),
    f"{BROKEN.replace('ValueError', 'SystemExit')}reward = Broken()": ("reward is Broken", NUMBER),
    f"{BROKEN.replace('ValueError', 'SystemExit')}info['anchor'] = Broken()": (
        "info['anchor'] is Broken",
        "something hashable",
    ),
    "async def told(): yield 1\nreturn told()": ("step is async_generator", TUPLE),
    "import os; os.chdir('/')": ("getcwd() is str '/'", ""),
    "import os; os.chdir('/'); raise OSError": ("getcwd() is str '/'", ""),
}


@pytest.mark.parametrize("line", STEPS, ids=lambda line: line.splitlines()[-1])
def test_a_step_is_checked_and_named(line, tmp_path):
    """At the first step, with the world, the task, the field, what it was and what was expected;
    what it set of the process's is as it was."""
    field, expected = STEPS[line]
    ours = [read() for read in OURS]
    episode = Door(world_with(tmp_path, step=line), 120).reset(120)
    said = line_of(episode.step, "go")
    assert said.startswith(f"tiny world: task 120: {field}") and f", expected {expected}" in said
    assert [read() for read in OURS] == ours


@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_a_world_that_closes_an_output_is_told_on_the_other(name, tmp_path):
    world = world_with(tmp_path, step=f"import sys; sys.{name}.close()")
    episode, streams = Door(world, 120).reset(120), [io.StringIO(), io.StringIO()]
    with contextlib.redirect_stdout(streams[0]), contextlib.redirect_stderr(streams[1]):
        said = line_of(episode.step, "go")
        left = streams[name == "stdout"]
        assert sys.stdout is sys.stderr is left and not left.closed
    assert said.startswith("tiny world: task 120: outputs() is list [<")


def test_a_huge_observation_ends_its_episode_soon(tmp_path):
    """Of 5 MB no more is tokenised than a context can have."""
    began = time.monotonic()
    done = run_in(tmp_path, step="observation, done = 'é' * 5_000_000, False")
    assert done.returncode == 0 and time.monotonic() - began < 20
    *_, row = rows_of(tmp_path / "runs/a/metrics.jsonl")
    assert row["train/truncated"] == 1.0 and row["train/episode_steps"] == 1.0


def test_numbers_that_a_world_draws_leave_the_runs_alone(tmp_path):
    """Several processes would else draw other tasks: each plays its own episodes."""
    world = world_with(tmp_path, step="random.seed(7); random.random()")
    random.seed("a run")
    before = random.getstate()
    assert len(played(world, [120], stage())) == 1 and random.getstate() == before


def test_a_reward_that_is_none_ends_a_run_in_its_name(tmp_path):
    """And not in that of the learning rate."""
    done = run_in(tmp_path, step="reward = math.nan if self.task >= 100 else 0.5")
    said = said_in_one_line(done)
    assert said.startswith("tiny world: task 1") and "reward is float nan" in said
    assert "--learning-rate" not in done.stdout + said


async def never():
    return "on", 0.0, False, {}


def test_a_step_that_waits_is_awaited_or_named(tmp_path, recwarn):
    world = world_with(tmp_path, step="async def told(): return 'on', 1, 0, info\nreturn told()")
    step = Door(world, 5).reset(5).step("go")
    observation, reward, done, info = asyncio.run(wait_for(step))
    assert (observation, reward, done, info["score"]) == ("on", 1.0, False, 0.5)
    said = line_of(tuple, Door(world, 5).reset(5).step("go"))
    assert "task 5: step is coroutine" in said and "`await episode.step(text)`" in said
    assert not [w for w in recwarn if "never awaited" in str(w.message)]
    at_once = Door(world_with(tmp_path), 5).reset(5).step("go")
    assert asyncio.run(wait_for(at_once)) == (*at_once,) and [*at_once][1] == 0.25


async def wait_for(step):
    return await step


WAITS = "async def told():\n    {}\n    return observation, reward, done, info\nreturn told()"


def side_by_side(world, beside, tasks=(5, 6)) -> list:
    """What steps that wait return or raise, awaited beside a coroutine of the engine's."""

    async def all_of():
        steps = [wait_for(Door(world, task).reset(task).step("go")) for task in tasks]
        *found, _ = await asyncio.gather(*steps, beside, return_exceptions=True)
        return found

    with pytest.MonkeyPatch.context() as patch:  # a SystemExit in a task would end the loop
        patch.setattr("runtime.worlds.Refused", OSError)
        return asyncio.run(all_of())


async def computes():
    """As an engine that computes while the worlds wait, and in between waits itself."""
    torch.set_grad_enabled(False)
    torch.set_default_dtype(torch.bfloat16)
    await asyncio.sleep(0.02)
    torch.set_grad_enabled(True)
    torch.set_default_dtype(torch.float32)


def test_a_world_that_waits_is_not_blamed_for_what_others_do(tmp_path):
    """Neither for the engine's doing nor for another world's: each while it runs."""
    world = world_with(tmp_path, step=WAITS.format("await asyncio.sleep(0.01)"))
    assert [found[0] for found in side_by_side(world, computes())] == ["on", "on"]
    ours = "if self.task == 5: torch.set_grad_enabled(False)"
    for lines in (f"{ours}\n    await asyncio.sleep(0)", f"await asyncio.sleep(0.01)\n    {ours}"):
        world = world_with(tmp_path, step=WAITS.format(lines))
        first, second = side_by_side(world, asyncio.sleep(0.02))
        assert str(first).startswith("tiny world: task 5: is_grad_enabled() is bool False")
        assert second[0] == "on" and torch.is_grad_enabled()


@pytest.mark.parametrize(
    "line",
    [
        "raise OSError('it broke')",
        "await asyncio.sleep(0); raise OSError('it broke')",
        "await asyncio.to_thread(open, '/nowhere')",
        "await asyncio.wait_for(asyncio.sleep(9), 0.01)",
        "f = asyncio.get_running_loop().create_future(); f.cancel(); await f",
    ],
)
def test_a_step_that_waits_and_raises(line, tmp_path):
    step = Door(world_with(tmp_path, step=WAITS.format(line)), 5).reset(5).step("go")
    with pytest.raises(WorldFault, match="^task 5: the world raised "):
        asyncio.run(wait_for(step))


def test_a_step_that_waits_can_be_stopped(tmp_path):
    """The world's own `finally` runs, and it is no fault of the world's."""
    lines = "try: await asyncio.sleep(9)\n    finally: self.world.stopped = True"
    world = world_with(tmp_path, step=WAITS.format(lines))

    async def stop():
        task = asyncio.create_task(wait_for(Door(world, 5).reset(5).step("go")))
        await asyncio.sleep(0)
        task.cancel()
        await task

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(stop())
    assert world.stopped


# ------------ what goes on, with the right numbers ------------

GOOD = {  # the line in step(): what the two steps of the episode have then
    "reward = np.float32(0.25)": {"outcome": 0.5},
    "reward = torch.tensor([0.25])": {"outcome": 0.5},
    "reward = np.array([[0.25]])": {"outcome": 0.5},
    "reward = np.ma.array([0.25], mask=[False])": {"outcome": 0.5},
    "reward = True": {"outcome": 2.0},
    "reward = -1": {"outcome": -2.0},
    "reward, done = 0, np.bool_(done)": {"outcome": 0.0, "success": True},
    "done = torch.tensor(done)": {"success": True},
    "done = int(done)": {"success": True},
    "info['success'] = np.float64(done)": {"success": True},
    "info['score'] = torch.tensor(0.75)": {"score": 0.75},
    "info['game_reward'] = np.int8(3)": {"reward": 3.0},
    "info['progress'] = torch.tensor([-0.5])": {"progress": -0.5},
    "info['valid'] = np.int64(0)": {"valid": False},
    "info['anything'] = object()": {"outcome": 0.5},
    "from collections import OrderedDict; info = OrderedDict(info)": {"score": 0.5},
    "observation = np.str_('seen')": {"observation": "seen"},
    "observation = ''": {"observation": ""},
    "observation = 'a\\ud800b'": {"observation": "a?b"},
    "observation = '\\x00\\x1b[2J<|im_end|>'": {"observation": "\x00\x1b[2J<|im_end|>"},
    "observation = 'a\\nb\\u2028c'": {"observation": "a\nb\u2028c"},
    "class Four(tuple): pass\nreturn Four((observation, reward, done, info))": {"outcome": 0.5},
}


@pytest.mark.parametrize("line", GOOD, ids=lambda line: line.splitlines()[-1])
def test_numbers_are_numbers_in_the_tables(line, tmp_path):
    """What a world returns of numpy and torch is in metrics.jsonl and episodes.jsonl as JSON."""
    trajectories = played(world_with(tmp_path, step=line), [120, 120, 121], stage())
    row = json.loads(json.dumps(describe(trajectories, "train"), allow_nan=False))
    assert len(trajectories) == 3 and all(type(value) in (int, float) for value in row.values())
    for text in episode_lines({"iteration": 1}, trajectories, {}):
        episode = json.loads(text, parse_constant=pytest.fail)
        first, last = episode["steps"]
        found = {**first, **episode, "observation": last["observation"]}
        for name, value in GOOD[line].items():
            assert found[name] == value and type(found[name]) is type(value), (name, found[name])


def test_a_run_on_such_a_world_has_the_right_numbers(tmp_path):
    step = "reward = torch.tensor(0.5 * (self.first % 2))\ninfo['progress'] = np.float32(0.25)"
    world = "def summary(self): return {'rooms': np.int64(3), 'share': torch.tensor(0.5)}"
    done = run_in(tmp_path, "--eval-every", "1", step=step, world=world)
    assert done.returncode == 0, done.stderr
    first, row = rows_of(tmp_path / "runs/a/metrics.jsonl")
    assert (first["eval/rooms"], row["train/rooms"], row["train/share"]) == (3.0, 3.0, 0.5)
    assert row["train/success"] == row["eval/success"] == 1.0 and row["train/score"] == 0.5
    assert row["train/dead_groups"] == 0.0 and row["train/episode_steps"] == 2.0
    episodes = rows_of(tmp_path / "runs/a/episodes.jsonl")
    assert sorted(e["outcome"] for e in episodes) == [0.0, 0.0, 1.0, 1.0]
    assert {s["progress"] for e in episodes for s in e["steps"]} == {0.25}


# ------------ the world's own numbers ------------

OWN = [*describe([Trajectory(1, steps=[Step("", "", [])])], "x"), "x/faults", "x/cut"]


@pytest.mark.parametrize("name", [key.removeprefix("x/") for key in OWN])
def test_a_summary_has_names_of_its_own(name):
    world = SimpleNamespace(name="tiny world", summary=lambda: {name: 0.125})
    said = line_of(describe, [Trajectory(1, steps=[Step("", "", [])])], "train", world)
    assert said.startswith(f"tiny world: summary()[{name!r}] is float 0.125, expected another name")


@pytest.mark.parametrize("error", ["ZeroDivisionError()", "KeyError('rooms')", "OSError('a\\nb')"])
def test_a_summary_that_raises_is_one_line(error, tmp_path):
    said = said_in_one_line(run_in(tmp_path, world=f"def summary(self): raise {error}"))
    assert said.startswith(f"tiny world: summary() raised {error.partition('(')[0]}")


def test_a_summary_that_leaves_is_no_end_of_the_run(tmp_path):
    """A world that means to end the run gives a line; status 0 would say that all was done."""
    for code in ("0", ""):
        home = tmp_path / (code or "none")
        home.mkdir()
        done = run_in(home, world=f"def summary(self): import sys; sys.exit({code})")
        assert said_in_one_line(done).startswith("tiny world: summary() raised SystemExit")


def test_a_getter_with_a_mistake_is_not_one_that_is_absent(tmp_path):
    for name in ("eval_env", "validation_tasks", "data"):
        home = tmp_path / name
        home.mkdir()
        said = said_in_one_line(run_in(home, world=f"@property\ndef {name}(self): self.judeg"))
        assert f"tiny world: {name} raised AttributeError: " in said and "judeg" in said


# ------------ what only seems to be equal, or other ------------


def test_outcomes_that_differ_by_rounding_are_equal(tmp_path):
    """0.1 + 0.2 + 0.3 and 0.3 + 0.2 + 0.1: advantages are of float32, where they are the same."""
    step = "reward = [[.1, .2, .3], [.3, .2, .1]][self.first % 2][self.steps - 1]"
    done = run_in(tmp_path, step=f"{step}\ndone = self.steps == 3")
    assert done.returncode == 0, done.stderr
    (row,) = rows_of(tmp_path / "runs/a/metrics.jsonl")[1:]
    assert row["train/dead_groups"] == 1.0 and row["policy/grad_norm"] == 0.0


def test_a_state_is_that_of_its_step_also_if_the_world_changes_the_object(tmp_path):
    board = """class Board:
    def __init__(self, n): self.n = n
    def __eq__(self, other): return self.n == other.n
    def __hash__(self): return hash(self.n)
self.board = self.anchor = Board(0)"""
    step = "self.board.n += 1\ninfo['anchor'] = self.board"
    (t,) = played(world_with(tmp_path, begin=board, step=step), [120], stage())
    assert [t.anchor.n, *(step.anchor.n for step in t.steps)] == [0, 1, 2]


# ------------ worlds that raise ------------

BAD = "class Bad(Exception):\n    counted = np.zeros(2)\n    def __str__(self): 1 / 0\n"
RAISED = {  # (the line of step(), the tasks): how many are left out, or the line that ends the run
    ("if self.first == 2: raise OSError('it broke')", 6): 1,
    ("if self.first in (1, 2): raise OSError('it broke')", 10): 2,
    (
        "if self.first < 4: raise OSError('it broke')",
        14,
    ): "stopped: 3 of 14 episodes failed (3 x the",
    ("if self.task == 1: raise KeyError('gone')", 60): "stopped: 20 of 60 episodes failed (20 x ",
    ("if self.first == 3: import sys; sys.exit(0)", 6): 1,
    ("if self.first == 3: import sys; sys.exit()", 6): 1,
    ("if self.first == 3: raise StopIteration", 6): 1,
    ("if self.first == 3: raise StopAsyncIteration", 6): 1,
    ("if self.first == 3: raise asyncio.CancelledError", 6): 1,
    ("if self.first == 3: raise MemoryError('its own')", 6): 1,
    ("if self.first == 3: (lambda f: f(f))(lambda f: f(f))", 6): 1,
    ("if self.first == 3: return self.nothing", 6): 1,
    ("if self.first == 3: raise ExceptionGroup('two', [OSError(), KeyError()])", 6): 1,
    ("if self.steps == 2 and self.first == 3: raise TimeoutError('late')", 6): 1,
    ("if self.first == 3: raise type('Panic', (BaseException,), {})('of Rust')", 6): 1,
    ("if self.first == 3: asyncio.run(asyncio.sleep(0))", 6): 1,
    ("if self.first == 3: raise OSError('\\x1b[2J' * 10**5)", 6): 1,
    (f"{BAD}if self.first == 3: raise Bad", 6): 1,
    ("class S(str):\n    def encode(self, *a): 1 / 0\nif self.first == 3: observation = S()", 6): 1,
    ("class D(dict):\n    def __contains__(self, k): 1 / 0\nif self.first == 3: info = D()", 6): 1,
    ("class T(tuple):\n    def __len__(self): 1 / 0\nif self.first == 3: return T()", 6): 1,
    ("class B(int):\n    def __bool__(self): 1 / 0\nif self.first == 3: done = B(1)", 6): 1,
}


@pytest.mark.parametrize("line, number", RAISED)
def test_an_episode_whose_world_raises(line, number, tmp_path, capsys):
    """Is left out, named and counted; more than a fifth end the run."""
    on, world = stage(), world_with(tmp_path, step=line)
    tasks = [task % 3 for task in range(number)]
    expected = RAISED[line, number]
    if isinstance(expected, str):
        assert line_of(played, world, tasks, on).startswith(expected)
        return
    left = played(world, tasks, on)
    assert len(left) == number - expected and on.faults == expected
    told = capsys.readouterr().out.splitlines()
    assert len(told) == expected and all("; this episode is left out" in each for each in told)
    assert all(each.isprintable() and len(each) < 3000 for each in told)


def failing(which: str, name: str = "OSError('it broke')") -> str:
    return f"if self.task == 7 and {which}: raise {name}"


def test_the_same_task_fails_three_times(tmp_path):
    """In one rollout, or in three of one run; other tasks' failures do not add up to it."""
    world = world_with(tmp_path, step=failing("True"))
    tasks = [7] * 3 + [*range(20, 60)]
    told = "stopped: task 7 failed three times (the world raised OSError: it broke)"
    assert line_of(played, world, tasks, stage()) == told
    on = stage()
    for _ in range(2):
        assert len(played(world, [7, *range(20, 40)], on)) == 20
    assert line_of(played, world, [7, *range(20, 40)], on) == told
    world = world_with(tmp_path, step="if self.task in (7, 8, 9): raise OSError('it broke')")
    assert len(played(world, range(60), stage())) == 57


def test_the_same_task_fails_in_every_evaluation_of_a_run(tmp_path):
    """The run says what is kept."""
    words = "--eval-every 1 --eval-tasks 6 --iterations 9".split()
    done = run_in(tmp_path, *words, step=failing("True").replace("7", "3"))
    said = said_in_one_line(done)
    told = "stopped: task 3 failed three times (the world raised OSError: it broke): "
    assert said.startswith(told)
    assert "iteration 1 is kept in runs/a; go on with --resume runs/a" in said
    assert [row["iteration"] for row in rows_of(tmp_path / "runs/a/metrics.jsonl")] == [0, 1]


def test_a_prompt_that_leaves_no_room_ends_the_run_and_says_what_is_kept(tmp_path):
    """One such task does; the panel's fit, so that an iteration is there."""
    world = world_with(tmp_path, begin="if task == 7: self.prompt = 'go ' * 9999")
    chat = SimpleNamespace(prompt=list, observation=Chat().observation, response=Chat().response)
    told = r"stopped: --max-context-tokens \d+: too few to answer task 7"
    on = Stage(Engine(), chat, settings(max_steps=4))
    assert re.fullmatch(told, line_of(played, world, [7, *range(20, 40)], on))
    begin = "if task >= 100 and world.begun > 12: self.prompt = 'go ' * 9999"
    said = said_in_one_line(run_in(tmp_path, "--iterations", "9", begin=begin))
    told = r"stopped: --max-context-tokens \d+: too few to answer task 1\d\d"
    assert re.fullmatch(told + ": iteration 2 is kept in runs/a; go on with --resume runs/a", said)


def test_a_second_evaluation_set_leaves_the_numbers_of_training_alone(tmp_path):
    write(tmp_path)
    text = (tmp_path / "mine.py").read_text()
    assert run_there(tmp_path).returncode == 0
    saves = "        run.save(episodes, "
    plays = "run.rollout(play, run.env, list(env.validation_tasks)[:3], evaluation)"
    more = f"        run.log_episodes('validation', {plays})\n"
    (tmp_path / "mine.py").write_text(text.replace(saves, more + saves))
    assert run_there(tmp_path, "--run-name", "b").returncode == 0
    rows = [rows_of(tmp_path / f"runs/{name}/metrics.jsonl")[1] for name in "ab"]
    of_training = [k for k in rows[0] if k.startswith(("tokens/", "train/"))]
    assert len(of_training) > 5 and all(rows[0][k] == rows[1][k] for k in of_training)
    assert rows[1]["validation/success"] == 1.0 and "validation/success" not in rows[0]


def test_failures_that_the_world_counts_itself_end_nothing(tmp_path):
    step = "class Lost(Exception): counted = True\nif self.task == 7: raise Lost('it is counted')"
    on = stage()
    assert len(played(world_with(tmp_path, step=step), [7] * 5 + [8], on)) == 1
    assert on.faults == 0 and not on.failed


def test_whether_a_failure_is_counted_may_not_raise(tmp_path):
    lost = "class Lost(Exception): counted = property(lambda self: 1 / 0)\nraise Lost('it is')"
    said = line_of(played, world_with(tmp_path, step=lost), [7], stage())
    assert said == "Lost: counted raised ZeroDivisionError: division by zero"


def test_an_exit_in_a_task_of_the_worlds_own_is_told(tmp_path):
    step = "async def ends(): sys.exit()\nimport sys\nself.own = asyncio.ensure_future(ends())"
    done = run_in(tmp_path, step=step)
    assert done.returncode == 1 and "stopped: sys.exit() in a task of the world's" in done.stderr
    gc.collect()  # asyncio tells of the task now, and not while another test reads a script


def test_a_process_that_the_world_forks_ends_as_usual_at_sigterm(tmp_path, capfd):
    """The run's own handler raises KeyboardInterrupt, whose traceback a worker would print."""
    forks = "import multiprocessing, time\nself.own = multiprocessing.get_context('fork').Process"
    forks += (
        "(target=time.sleep, args=[60])\nself.own.start()\ntime.sleep(0.5)\nself.own.terminate()"
    )
    ends = "self.own.join()\nif self.own.exitcode != 143: raise OSError(self.own.exitcode)"
    done = run_in(tmp_path, begin=forks, step=ends)
    assert done.returncode == 0 and "warning" not in done.stdout
    assert "Traceback" not in done.stderr + capfd.readouterr().err


def test_a_column_of_another_length_is_refused(tmp_path):
    """A number for each token, or one for each episode, where each step gets one."""
    write(tmp_path)
    text = (tmp_path / "mine.py").read_text()
    saves = "run.save(episodes, "
    assert saves in text
    wrong = [
        "batch.engine_logprobs",
        "batch.outcomes",
        "advantages[:, None]",
        "advantages.tolist()",
    ]
    wrong = [("mine", values) for values in wrong] + [("reward", "advantages")]
    for number, (name, values) in enumerate(wrong):
        (tmp_path / "mine.py").write_text(text.replace(saves, f"{saves}{name}={values}, "))
        said = said_in_one_line(run_there(tmp_path, "--run-name", number))
        given = r"(torch\.Size\(\[\d+(, 1)?\]\)|list)"
        needs = rf"a tensor \[\d+\], not {given}"
        if name == "reward":
            needs = "another name: steps have a reward"
        assert re.fullmatch(rf"run\.save\({name}=\.\.\.\): needs {needs}", said)


LOGGED = {  # what a script logs: what the row has, or the type that the line names
    "torch.tensor(0.5)": 0.5,
    "np.float32(0.5)": 0.5,
    "np.bool_(True)": 1,
    "advantages.sum() > 1e9": 0,
    "True": 1,
    "None": None,
    "math.nan": None,
    "torch.tensor(math.nan)": None,
    "'low'": "str",
    "advantages": "list",
    "torch.ones(1)": "list",
    "{'a': 1}": "dict",
    "1j": "complex",
}


@pytest.mark.parametrize("value", LOGGED)
def test_what_a_script_logs_is_a_number(value, tmp_path):
    """Also where it is a tensor or a truth, so that --resume and the page can read the row."""
    write(tmp_path)
    text = (tmp_path / "mine.py").read_text()
    saves = "        run.save(episodes, "
    assert saves in text
    logs = f"        import math, numpy as np\n        run.log('policy', {{'mine': {value}}})\n"
    (tmp_path / "mine.py").write_text(text.replace(saves, logs + saves))
    done, expected = run_there(tmp_path), LOGGED[value]
    if isinstance(expected, str):
        said = said_in_one_line(done)
        assert said == f"run.log('policy', ...): mine is {expected}, not a number"
        return
    assert done.returncode == 0, done.stderr
    *_, row = rows_of(tmp_path / "runs/a/metrics.jsonl")
    assert row["iteration"] == 1 and row["policy/mine"] == expected
    assert type(row["policy/mine"]) is type(expected)


def test_an_exit_of_the_world_is_no_end_of_the_run(tmp_path):
    """sys.exit() and sys.exit(0) in each step: status 1, and one line."""
    for code in ("", "0", "None"):
        done = run_in(tmp_path, step=f"import sys; sys.exit({code})")
        assert said_in_one_line(done).startswith(
            "stopped: 2 of 2 episodes failed (2 x the world rai"
        )


# ------------ a run that cannot learn ------------

COLUMNS = {  # column: (a value at which nothing is learnt, one at which something is, the flag)
    "train/truncated": (1.0, 0.9, "--max-context-tokens"),
    "train/cut": (1.0, 0.99, "--max-action-tokens"),
    "train/valid_actions": (0.0, 0.01, "warm_start.py"),
    "train/dead_groups": (1.0, 0.9, "--temperature"),
    "prm/pairs": (0, 1, "--pair-margin"),
    "policy/pairs": (0, 1, "--pair-margin"),
    "policy/grad_norm": (0.0, 1e-9, "--beta"),
    "policy/moved": (0.0, 0.9, "--learning-rate"),
    "prm/grad_norm": (0.0, 1e-9, "--beta"),
    "prm/moved": (0.0, 0.9, "--prm-learning-rate"),
}
MOVES = {column: moves for column, (_, moves, _) in COLUMNS.items()}


def told_of(rows: list[dict], capsys) -> list[str]:
    """The warnings after each row of these, which get an iteration."""
    told, so_far = set(), []
    for number, row in enumerate(rows):
        so_far.append({"iteration": number + 1} | row)
        tell_if_stuck(so_far, told)
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("column", COLUMNS)
def test_what_holds_in_three_rows_is_told_once(column, capsys):
    stuck, moves, flag = COLUMNS[column]
    bad, good = MOVES | {column: stuck}, MOVES | {column: moves}
    if column == "train/dead_groups":  # which teach nothing where nothing else does
        bad["policy/grad_norm"] = 0.0
    (line,) = told_of([good, bad, bad, bad, bad, good, bad, bad, bad], capsys)
    assert line.startswith(f"warning: 3 iterations in a row ({column} ") and flag in line
    assert told_of([bad, bad, good, bad, bad, good], capsys) == []
    assert told_of([bad, bad, MOVES | {column: None}, bad], capsys) == []
    assert told_of([good] * 5, capsys) == []


def test_the_first_reason_is_told_and_not_what_follows_from_it(capsys):
    bad = {column: stuck for column, (stuck, _, _) in COLUMNS.items()}
    for column in COLUMNS:
        (line,) = told_of([dict(bad)] * 9, capsys)
        assert f"({column} " in line
        bad[column] = MOVES[column]
    assert told_of([bad] * 9, capsys) == []


def test_weights_of_a_network_that_had_no_step_may_stay(capsys):
    """--prm-steps 0, or the world's own rewards in place of the PRM's."""
    assert told_of([MOVES | {"prm/moved": 0.0, "prm/grad_norm": None}] * 4, capsys) == []


def test_a_critic_or_a_reward_of_steps_teaches_where_all_outcomes_are_equal(capsys):
    row = MOVES | {"train/dead_groups": 1.0}
    assert told_of([row] * 4, capsys) == []
    assert told_of([row | {"policy/credit": 1e-9}] * 4, capsys) == []
    for nothing in ({"policy/grad_norm": 0.0}, {"policy/credit": 0.0}):  # or the penalty alone
        (line,) = told_of([row | nothing] * 4, capsys)
        assert "--temperature" in line


CUT = {  # (tokens of the answer, whether it is cut) where 3 are the most and 2 ends a turn
    "at the most, without an end": ([5, 6, 7], True),
    "at the most, with an end": ([5, 6, 2], False),
    "an end in its middle": ([2, 6, 7], True),
    "short": ([5, 2], False),
    "short, without an end": ([5, 6], False),
    "longer": ([5, 6, 7, 8], True),
}


@pytest.mark.parametrize("ids, cut", CUT.values(), ids=CUT)
def test_an_answer_is_cut(ids, cut):
    t = Trajectory(1)
    for answer in (ids, [9, 2]):
        t.append([*t.token_ids, 1, 1], answer)
        t.steps.append(Step("", "", [-1.0] * len(answer)))
    assert cut_answers([t, t], 3, (2, 4)) == [cut, False] * 2


LONG = "observation = 'a word ' * 40\ndone = False"
VARIED = "reward = 0.5 * (self.first % 2)"
INVALID = "reward, info['valid'] = 0.0, self.first % 2"
RUNS = {  # words: (the world's step, the script, pieces of the warning)
    "--temperature 0.01": (
        "reward = 0.5 * ('push' in text)",
        "rloo_sokoban",
        "(train/dead_groups 1)",
    ),
    "--temperature 1": (INVALID, "rloo_sokoban", "(train/dead_groups 1)"),
    "--pair-margin 1.5": (VARIED, "istar_webshop", "(prm/pairs 0)"),
    "--max-action-tokens 3": (VARIED, "rloo_sokoban", "(train/cut 1)"),
    "--pair-margin 1.25": (VARIED, "dpo_webshop", "(policy/pairs 0)"),
    "--learning-rate 1e-12": (VARIED, "rloo_sokoban", "(policy/moved "),
    "--learning-rate 1e-12 --policy-lora-rank 4": (VARIED, "rloo_sokoban", "(policy/moved 0)"),
    "--prm-learning-rate 0": (VARIED, "istar_webshop", "(prm/moved 0)"),
    "--critic-learning-rate 1e-12": (VARIED, "ppo_webshop", "(critic/moved "),
    "--max-context-tokens 130": (f"{VARIED}\n{LONG}", "rloo_sokoban", "(train/truncated 1)"),
}


@pytest.mark.parametrize("words", RUNS)
def test_a_run_that_cannot_learn_says_so_in_one_line(words, tmp_path):
    step, script, told = RUNS[words]
    done = run_in(tmp_path, *words.split(), "--iterations", "4", script=script, step=step)
    assert done.returncode == 0, done.stderr
    (line,) = [each for each in done.stdout.splitlines() if "in a row" in each]
    assert told in line and words.split()[0] in line
    rows = rows_of(tmp_path / "runs/a/metrics.jsonl")
    assert all({"train/cut", "policy/moved"} <= row.keys() for row in rows[1:])
    assert min(row["train/cut"] for row in rows[1:]) == 1.0 or "action" not in words
    metrics = read_run(tmp_path / "runs/a", 99)["metrics"]  # of the viewer
    assert metrics["train/cut"][1:] == [row["train/cut"] for row in rows[1:]]


@pytest.mark.parametrize("words", [(), ("--policy-lora-rank", "4", "--learning-rate", "1e-6")])
def test_a_run_that_learns_says_nothing(words, tmp_path):
    step = f"{VARIED}\ninfo['valid'] = reward > 0"
    done = run_in(tmp_path, "--iterations", "4", *words, step=step)
    assert done.returncode == 0 and "warning" not in done.stdout
    *_, row = rows_of(tmp_path / "runs/a/metrics.jsonl")
    assert row["policy/moved"] > 0.9


# ------------ edited between start and resume ------------


@pytest.mark.parametrize("edited", ["nothing", "mine.py", "tiny.py", "both"])
def test_an_edit_between_two_starts_is_told(edited, tmp_path):
    write(tmp_path)
    assert run_there(tmp_path).returncode == 0
    for name in ("mine.py", "tiny.py"):
        if edited in (name, "both"):
            with open(tmp_path / name, "a") as file:
                file.write("\n# another line\n")
    record = tmp_path / "runs/a/run.json"
    resume = ["--run-name", "", "--resume", "runs/a", "--iterations"]
    done = run_there(tmp_path, *resume, "2")
    assert done.returncode == 0, done.stderr
    told = [line for line in done.stdout.splitlines() if "was edited" in line]
    expected = [name for name in ("mine.py", "tiny.py") if edited in (name, "both")]
    assert [Path(line.split(": ")[2].split()[0]).name for line in told] == expected
    assert all(line.startswith("warning: --resume runs/a: ") for line in told)
    assert [row["iteration"] for row in rows_of(tmp_path / "runs/a/metrics.jsonl")] == [0, 1, 2]
    again = run_there(tmp_path, *resume, "3")  # the edit was told already
    assert again.returncode == 0 and "was edited" not in again.stdout
    starts = json.loads(record.read_text())["starts"]
    assert [len(start["hashes"]) for start in starts] == [3 if "before" in edited else 5, 5, 5]


def test_an_edit_of_a_module_beside_the_world_is_told(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    beside = tmp_path / "beside_the_tiny_world.py"
    beside.write_text("BONUS = 0.5\n")
    assert run_in(tmp_path, world=f"from {beside.stem} import BONUS").returncode == 0
    beside.write_text("BONUS = 0.0\n")
    done = run_there(tmp_path, "--run-name", "", "--resume", "runs/a", "--iterations", "2")
    assert done.returncode == 0 and done.stdout.count("was edited") == 1
    assert f"{beside.name} was edited since this run last started" in done.stdout


def test_an_edit_of_a_class_that_the_world_extends_is_told(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.syspath_prepend(tmp_path / "elsewhere")
    base = tmp_path / "elsewhere/base_of_the_tiny_world.py"
    base.write_text("class Base:\n    bonus = 0.5\n")
    write(tmp_path)
    text = (tmp_path / "tiny.py").read_text().replace("class World:", "class World(Base):")
    (tmp_path / "tiny.py").write_text(f"from {base.stem} import Base\n{text}")
    assert run_there(tmp_path).returncode == 0
    base.write_text("class Base:\n    bonus = 0.0\n")
    done = run_there(tmp_path, "--run-name", "", "--resume", "runs/a", "--iterations", "2")
    assert done.returncode == 0 and done.stdout.count("was edited") == 1
    assert f"{base.name} was edited since this run last started" in done.stdout


def test_a_world_that_is_in_the_script_is_told_once(tmp_path):
    write(tmp_path)
    text = (tmp_path / "mine.py").read_text()
    line = re.search(r"^from tiny import World as (\w+), Flags as (\w+)$", text, re.MULTILINE)
    inside = program(step="pass") + f"\n{line[1]}, {line[2]} = World, Flags"
    (tmp_path / "mine.py").write_text(text.replace(line[0], inside))
    assert run_there(tmp_path).returncode == 0
    with open(tmp_path / "mine.py", "a") as file:
        file.write("\n# another line\n")
    done = run_there(tmp_path, "--run-name", "", "--resume", "runs/a", "--iterations", "2")
    assert done.returncode == 0 and done.stdout.count("was edited") == 1


# ------------ a reader that leaves ------------


def test_a_closed_output_is_no_reason_to_stop(tmp_path):
    """`| head -1`: the run goes on, and ends well."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as closed:
        write(tmp_path)
        done = run_there(tmp_path, stdout=closed)
    assert done.returncode == 0 and not done.stderr.strip()
    assert len(rows_of(tmp_path / "runs/a/metrics.jsonl")) == 2
