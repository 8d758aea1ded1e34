"""docs/paper.md: its commands are commands, and its numbers what benchmarks/paper.py makes."""

import shlex
import sys

import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

from benchmarks import paper

ROWS = {row.name: row for rows in paper.TABLES.values() for row in rows}


def test_the_page_is_what_its_script_makes():
    passed = {row["name"] for row in paper.dry_runs()}
    assert passed == {*ROWS}  # every command was played
    text = paper.PAGE.read_text()
    assert paper.page(text, passed) == text
    wrong = text.replace("| 43 | 58 |", "| 44 | 58 |")
    assert wrong != text and paper.page(wrong, passed) == text


def test_the_variables_of_the_page_are_the_commands_flags():
    assigned = dict(
        word.split("=", 1)
        for word in shlex.split(paper.variables().replace("\\\n", ""), True)[1:-1]
    )
    assert {name: flags.split() for name, flags in assigned.items()} == {
        name: flags.split() for name, flags in paper.FLAGS.items()
    }


@pytest.mark.parametrize("name", ROWS)
def test_a_command_fits_its_cards(name):
    assert paper.gigabytes(ROWS[name]) < 79
    assert 10 < paper.card_hours(ROWS[name]) < 200


def test_a_flag_that_the_script_has_not_is_seen(monkeypatch, capsys):
    monkeypatch.setitem(paper.FLAGS, "SHOP", paper.FLAGS["SHOP"] + " --prm-stepz 1")
    with pytest.raises(SystemExit):
        paper.gigabytes(ROWS["istar-webshop"])


@pytest.mark.parametrize("name", ["istar-webshop", "istar-rooms", "istar-llama"])
def test_a_dry_run_plays_an_iteration(name, tmp_path):
    assert paper.dry_run(ROWS[name], tmp_path)["tokens"] > 0
