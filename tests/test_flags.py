"""The command line: flags as people and sweeps write them, and what --help says of each."""

import re
import sys
from dataclasses import dataclass, fields, is_dataclass
from functools import cache

from runtime.flags import RunArgs, kinds_of, parse

import pytest
import torch
from conftest import ROOT, TRAINERS, load, run_main, scripts_with

SCRIPTS = scripts_with("Args", "main")
MOST = 35  # flags on a script's page


@pytest.fixture
def parsed(monkeypatch):
    """parsed(script, word, ...) -> Args, as the script reads them from its command line."""

    def parsed(script, *words):
        monkeypatch.setattr(sys, "argv", [f"{script}.py", *words])
        return parse(load(script).Args, "")

    return parsed


def nested(field):
    """The dataclass whose flags a field of Args stands for, or None."""
    kind = getattr(field.type, "__origin__", field.type)
    return kind if is_dataclass(kind) else None


def flags_in(kind) -> list[str]:
    """The flags of a dataclass, those of nested ones included."""
    flags = []
    for field in fields(kind):
        inner = nested(field)
        flags += flags_in(inner) if inner else [f"--{field.name.replace('_', '-')}"]
    return flags


# ------------ what may be written ------------


@dataclass
class Switches:
    prm_skill: bool = True
    decay: bool = False


def test_a_boolean_may_be_written_as_a_sweep_writes_it(monkeypatch):
    for words, expected in {
        ("--prm_skill=False",): False,
        ("--prm-skill=False",): False,
        ("--prm_skill=false",): False,
        ("--no-prm-skill",): False,
        ("--no-prm_skill",): False,
        ("--prm-skill=True",): True,
        ("--prm_skill=true",): True,
        ("--prm-skill",): True,
        (): True,
        ("--prm_skill=False", "--prm_skill=True"): True,  # the last one counts
    }.items():
        monkeypatch.setattr(sys, "argv", ["page.py", *words])
        args = parse(Switches, "")
        assert args.prm_skill is expected and args.decay is False, words


@pytest.mark.parametrize(("gpu", "expected"), [(True, "bfloat16"), (False, "float32")])
def test_a_gpu_computes_in_bfloat16_unless_it_is_told(gpu, expected, monkeypatch, parsed):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    assert parsed(SCRIPTS[0]).run_args.dtype == expected
    assert parsed(SCRIPTS[0], "--dtype=float32").run_args.dtype == "float32"


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_sweeps_whole_line_is_read(script, parsed):
    """Numbers, words and booleans as W&B's ${args} has them, of the page and of nested ones."""
    line = ["--learning_rate=0.25", "--seed=7", "--eval_temperature=0", "--max-steps", "3"]
    args = parsed(script, *line)
    assert (args.learning_rate, args.seed, args.max_steps) == (0.25, 7, 3)
    if script not in TRAINERS:  # warm_start
        assert args.eval_temperature == 0.0
        assert parsed(script, "--decay=True").decay and not parsed(script, "--decay=False").decay
        return

    more = ["--track=True", "--eval_only=true", "--trust_remote_code=False", "--run_name=True=1"]
    if hasattr(load(script).Args, "ratio"):  # DPO has none
        assert parsed(script, "--ratio=step").ratio == "step"
    args = parsed(script, *line, *more, "--override", "seed", "clip")
    run_args = args.run_args
    assert run_args.eval_temperature == 0.0
    assert run_args.track is True and run_args.eval_only is True
    assert run_args.trust_remote_code is False
    assert run_args.run_name == "True=1" and run_args.override == ("seed", "clip")
    for small in (["--learning_rate=1e-05"], ["--learning-rate", "1e-5"]):  # as Python writes it
        assert parsed(script, *small).learning_rate == 1e-5
    if hasattr(args, "alpha"):
        assert parsed(script, "--alpha=1.0").alpha == parsed(script, "--alpha", "1").alpha == 1.0


@pytest.mark.parametrize("script", TRAINERS)
def test_a_list_may_be_written_as_a_sweep_writes_it(script, parsed):
    for written, expected in {
        "--override=['learning_rate', 'seed']": ("learning_rate", "seed"),
        '--override=["clip"]': ("clip",),
        "--override=[]": (),
    }.items():
        args = parsed(script, written, "--seed", "3")
        assert args.run_args.override == expected and args.seed == 3
    several = ["--override=['seed']", "clip", "--seed", "3", "--override", "keep"]
    assert parsed(script, *several).run_args.override == ("seed", "clip", "keep")
    with pytest.raises(SystemExit) as stop:
        parsed(script, "--override=['learning_rate'")
    assert stop.value.code == "--override ['learning_rate': no list, as in ['a', 'b']"


@pytest.mark.parametrize("value", ("maybe", "", "0", "1", "yes", "None", "Truee"))
@pytest.mark.parametrize("script", SCRIPTS)
def test_what_is_no_boolean_is_refused_in_one_line_with_the_flags_name(script, value, parsed):
    flags = [flag for flag in ("--eval_only", "--decay") if knows(script, flag)]
    assert flags
    for flag in flags:
        for written in (flag, flag.replace("_", "-")):
            with pytest.raises(SystemExit) as stop:
                parsed(script, f"{written}={value}")
            shown = value or '""'
            assert stop.value.code == f"{flag.replace('_', '-')} {shown}: True or False"


def knows(script, flag) -> bool:
    return flag.replace("_", "-") in flags_in(load(script).Args)


def test_a_refused_boolean_as_main_says_it(tmp_path):
    done = run_main(TRAINERS[0], "--track=often", cwd=tmp_path, check=False)
    assert (done.returncode, done.stderr) == (1, "--track often: True or False\n")
    assert not list(tmp_path.iterdir())


# ------------ what --help says ------------


@cache
def help_of(script, part: str = "text") -> dict[str, str]:
    """{flag: its help text, in one line, or its metavar}, as --help has them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "1000")  # no text is wrapped
        said = run_main(script, "--help", cwd=ROOT).stdout
    lines = said.splitlines()
    titles = [line.strip(" ╭╮─") for line in lines]
    entries = []
    for line in lines[titles.index("options") + 1 :]:
        text = line[2:].rstrip("│ ")  # without the box, which is blank where nobody looks
        if {*text} <= {*"-─╯"}:
            continue
        if text.startswith("-"):
            entries.append([])
        entries[-1].append(text)

    helps = {}
    for first, *rest in entries:
        flags, *text = re.split(r" {2,}", first, maxsplit=1)
        text = " ".join(part.strip() for part in [*text, *rest])
        for flag in flags.split(", "):
            name, _, metavar = flag.partition(" ")
            helps[name] = text if part == "text" else metavar
    return helps


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_flag_is_in_help_under_its_flat_name(script):
    """Those of the page, of a run and of the world, and none twice or under a prefix."""
    args_class, helps = load(script).Args, help_of(script)
    flags = flags_in(args_class)
    kinds = {field.name: nested(field) for field in fields(args_class)}
    if script in TRAINERS:
        assert kinds["run_args"] is RunArgs and kinds["world"].__module__.startswith("envs.")
        assert {*flags_in(RunArgs), *flags_in(kinds["world"])} < {*flags}
    assert len({*flags}) == len(flags) > 20
    switches = {flag for flag in helps if flag.startswith("--no-")}
    assert helps.keys() - switches == {"-h", "--help", *flags}
    assert {flag.replace("--no-", "--") for flag in switches} < {*flags}


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_help_text_is_a_sentence_of_its_own(script):
    """It stands alone: it is there, does not begin in the middle, and ends."""
    assert len(help_of(script)) > 20
    for flag, text in help_of(script).items():
        if flag in ("-h", "--help"):
            continue
        sentence, _, default = text.rpartition(" (default: ")
        assert default, f"{flag}: {text}"
        assert sentence.strip() and not sentence.startswith("("), f"{flag} has no help text"
        assert not sentence.lower().startswith("of "), f"{flag}: {sentence}"
        assert sentence[0].isupper() and sentence.endswith("."), f"{flag}: {sentence}"


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_shows_the_range_of_every_number(script):
    """From the table: the page has plain types."""
    shown = help_of(script, "metavar")
    assert shown["--seed"] == "INT>=0" and shown["--temperature"] == "FLOAT>0"
    assert shown["--learning-rate"] == "0<=FLOAT<=1" and shown["--model"] == "STR"
    for name, flag in kinds_of(load(script).Args).items():
        if flag.kind in (int, float):
            assert shown[f"--{name.replace('_', '-')}"] == flag.values.metavar != "", name


def test_types_on_pages_and_in_worlds_are_plain():
    pages = [ROOT / f"{script}.py" for script in (*SCRIPTS, "view")]
    for file in (*pages, *ROOT.glob("envs/**/*.py")):
        text = file.read_text()
        assert "Annotated" not in text, file


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_page_has_room_for_its_flags(script):
    """Those of the world and of the run are on other pages."""
    assert len([field for field in fields(load(script).Args) if not nested(field)]) <= MOST
