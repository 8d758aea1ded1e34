"""Every flag of every script is in the table of ranges, and takes no other value."""

import importlib
import math
import pkgutil
import sys
from dataclasses import dataclass, field
from typing import Literal, get_args, get_origin

import envs
from runtime.flags import OWN, RANGES, TABLE, Range, check_words, flags_of, kinds_of, parse

import pytest
from conftest import load, scripts_with

SCRIPTS = scripts_with("Args", "main")
NO_NUMBER = ("nan", "-nan", "", " ", "1e", "one", "0x10", "[1]", "1,5", "None", "\x1b[2J", "\udcff")
NEVER = ("-inf", "-1", "-1e-300", "-18446744073709551616")
HUGE = str(2**64)

# written by hand, apart from the table: who reads it wrong is caught here
MAY_BE_0 = set(
    "history policy_lora_rank seed num_products min_updates learning_rate prm_learning_rate "
    "critic_learning_rate eval_temperature invalid_penalty alpha beta "
    "prm_lora_rank critic_lora_rank prm_steps prm_ridge prm_weight_decay "
    "pair_margin step_weight gamma gae_lambda step_gamma distance_discount target noise "
    "observation_share prm_average saved_pictures save_every".split()
)
MAY_BE_INFINITE = {"lr_halving", "max_grad_norm"}


def may_be_0(script: str, name: str) -> bool:
    """Whether this flag of a script may be 0; the ablations page has more that may."""
    return name in MAY_BE_0 or (script, name) == ("istar_webshop_ablations", "prm_replay")


def flags_like(script, *kinds) -> dict:
    """{name: Flag} of a script's flags whose value is of one of these kinds."""
    return {n: flag for n, flag in kinds_of(load(script).Args).items() if flag.kind in kinds}


def assert_refused(script, name, value):
    """In one line that names the flag, the value and what it has to be, however it is written."""
    kinds, flag = kinds_of(load(script).Args), f"--{name.replace('_', '-')}"
    for words in ([f"{flag}={value}"], [f"--{name}={value}"], [flag, value]):
        with pytest.raises(SystemExit) as stop:
            check_words(words, kinds)
        said = stop.value.code
        assert said.isprintable() and len(said) < 500, said
        assert said.startswith(f"{flag} ") and ": " in said, said
        shown = value[:300] or '""'
        if name.endswith("url"):  # it may hold a key
            assert not value or shown not in said, said
        else:
            assert not value.isprintable() or shown in said, said


def assert_taken(script, name, value):
    kinds, flag = kinds_of(load(script).Args), f"--{name.replace('_', '-')}"
    check_words([f"{flag}={value}"], kinds)
    check_words([flag, value], kinds)


# ------------ the table ------------


def worlds() -> list:
    """The flags' dataclass of every world."""
    names = [module.name for module in pkgutil.walk_packages(envs.__path__, "envs.")]
    found = {}
    for module in map(importlib.import_module, names):
        found |= {n: kind for n, kind in vars(module).items() if n.endswith("Args")}
    assert len(found) >= 5
    return [*found.values()]


def everywhere() -> list[tuple[str, str, object]]:
    """(where, name, Flag) of every flag that is a number or a text."""
    classes = {script: load(script).Args for script in (*SCRIPTS, "view")}
    classes |= {world.__name__: world for world in worlds()}
    return [
        (where, name, flag)
        for where, args_class in classes.items()
        for name, flag in kinds_of(args_class).items()
        if flag.kind in (int, float, str)
    ]


def test_every_flag_is_in_the_table():
    flags = everywhere()
    assert len(flags) > 500
    for where, name, flag in flags:
        assert name in RANGES, f"--{name} of {where} is not in the table of runtime/flags.py"
        assert RANGES[name].kind is flag.kind, f"--{name} of {where} is {flag.kind} there"
        assert not flag.refusal(str(flag.default)), f"--{name} {flag.default} of {where}"


def test_every_name_of_the_table_is_a_flag_of_a_script_or_world():
    assert {*RANGES} == {name for _, name, _ in everywhere()}
    assert len(RANGES) == sum(len(names.split()) for names in TABLE.values())  # each once


def test_a_flag_of_your_own_takes_any_finite_number_and_any_line():
    @dataclass
    class Own:
        cells: int = 100
        width: float = 1.0
        title: str = ""
        colours: tuple[str, ...] = ()
        clip: int = 3  # of another type than in the table
        group_size: int = field(default=1, metadata={"least": 1})

    flags = kinds_of(Own)
    assert [flags[n].values for n in ("cells", "width", "clip")] == [OWN[int], OWN[float], OWN[int]]
    for words in (
        ["--cells=-9223372036854775808", "--width=-1e308", "--title=a b", "--clip=-1"],
        ["--colours", "red", "green", "--title=", "--group-size=1"],
    ):
        check_words(words, flags)
    for word in (f"--cells={2**63}", "--width=inf", "--width=nan", "--group_size=0", "--title=\n"):
        with pytest.raises(SystemExit) as stop:
            check_words([word], flags)
        assert stop.value.code.startswith(word.partition("=")[0].replace("_", "-"))


# ------------ values ------------


@pytest.mark.parametrize("script", SCRIPTS)
def test_no_flag_takes_what_is_no_number_or_below_0(script):
    for name in flags_like(script, int, float):
        for value in (*NO_NUMBER, *NEVER):
            assert_refused(script, name, value)


@pytest.mark.parametrize("script", SCRIPTS)
def test_zero_infinity_and_2_to_the_64(script):
    for name in flags_like(script, int, float):
        check = assert_taken if may_be_0(script, name) else assert_refused
        check(script, name, "0")
        check = assert_taken if name in MAY_BE_INFINITE else assert_refused
        check(script, name, "inf")
        check(script, name, HUGE if name not in flags_like(script, int) else "inf")
    for name in flags_like(script, int):
        for value in (HUGE, "1.5", "1e3", "9" * 5000):
            assert_refused(script, name, value)


@pytest.mark.parametrize("script", SCRIPTS)
def test_both_ends_of_a_range_are_in_it_and_their_neighbours_are_not(script):
    for name, flag in flags_like(script, int, float).items():
        values = flag.values
        assert isinstance(values, Range)
        ends = values.least, values.most
        for end, beyond in zip(ends, (-math.inf, math.inf)):
            assert_taken(script, name, str(end))
            step = math.copysign(1, beyond)
            next_one = end + int(step) if values.kind is int else math.nextafter(end, beyond)
            if math.isfinite(end):
                assert_refused(script, name, str(next_one))


@pytest.mark.parametrize("script", SCRIPTS)
def test_words_are_one_of_those_that_there_are(script):
    for name, flag in kinds_of(load(script).Args).items():
        if get_origin(flag.kind) is not Literal:
            continue
        for value in (
            "nan",
            "-1",
            "0",
            HUGE,
            "Step",
            "step ",
            "\n",
            *[""] * ("" not in get_args(flag.kind)),
        ):
            assert_refused(script, name, value)
        for value in get_args(flag.kind):
            assert_taken(script, name, value)


@pytest.mark.parametrize("script", SCRIPTS)
def test_texts_are_printable_and_empty_only_where_they_are_so_by_themselves(script):
    for name, flag in flags_like(script, str).items():
        for value in ("a\nb", "\x1b[31m", "a\0b", "\udcff", "a" * 5000, "\u202e", "a\u2028b"):
            assert_refused(script, name, value)
        (assert_taken if flag.default == "" else assert_refused)(script, name, "")
        assert_taken(script, name, "a b")


@pytest.mark.parametrize("script", SCRIPTS)
def test_switches_take_true_and_false_alone(script):
    kinds = kinds_of(load(script).Args)
    switches = [name for name, flag in kinds.items() if flag.kind is bool]
    assert switches
    for name in switches:
        for value in ("nan", "inf", "-1", "0", HUGE, "", "yes"):
            with pytest.raises(SystemExit) as stop:
                check_words([f"--{name}={value}"], kinds)
            flag = f"--{name.replace('_', '-')}"
            assert stop.value.code == flag + f" {value}: True or False".replace(" :", ' "":')


@pytest.mark.parametrize("script", SCRIPTS)
def test_what_is_taken_arrives(script, monkeypatch):
    """Through tyro, as main has it."""
    numbers = flags_like(script, int, float)
    chosen = {name: "0" for name in numbers if may_be_0(script, name)}
    chosen |= {name: "inf" for name in numbers if name in MAY_BE_INFINITE}
    monkeypatch.setattr(sys, "argv", [script, *(f"--{n}={v}" for n, v in chosen.items())])
    flags = flags_of(parse(load(script).Args, ""))
    assert {name: float(flags[name]) for name in chosen} == {n: float(v) for n, v in chosen.items()}


@pytest.mark.parametrize("script", SCRIPTS)
def test_words_that_are_no_flag_are_refused_with_the_nearest(script):
    kinds = kinds_of(load(script).Args)
    for words, told in {
        ("--sed", "3"): "--sed: no such flag; perhaps --seed;",
        ("--seed",): "--seed: a value is missing",
        ("--seed", "--max-steps", "3"): "--seed: a value is missing",
        ("seed",): "seed: no such flag",
        ("--seed", "3", "4"): "4: no such flag",
        ("",): '"": no such flag',
        ("--",): "--: no such flag",
        ("-x",): "-x: no such flag",
        ("--no-seed",): "--no-seed: no such flag",
        ("--run_args.seed=3",): "--run_args.seed=3: no such flag",
        ("\x1b[2J",): "'\\x1b[2J': no such flag",
    }.items():
        with pytest.raises(SystemExit) as stop:
            check_words([*words], kinds)
        assert stop.value.code.startswith(told), stop.value.code
        assert stop.value.code.isprintable()
