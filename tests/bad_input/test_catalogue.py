"""Every case of the catalogue, in this process: what main() says and leaves behind."""

import resource
import time

import pytest
from cases import CASES, SECRET, SMALL, Case
from conftest import TRAINERS, run_main

LINES, SECONDS, MEMORY = 3, 60, 2 * 2**20  # [KiB] by which the process may grow


def memory() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def runs_in(home) -> list[str]:
    return sorted(path.name for path in (home / "runs").glob("*"))


def lines_in(home) -> set[bytes]:
    """The whole lines of all tables of all runs, those that were kept aside included."""
    tables = [path for path in (home / "runs").glob("*/*.jsonl*") if path.is_file()]
    return {
        line for table in tables for line in table.read_bytes().split(b"\n")[:-1] if line.strip()
    }


def files_in(home) -> dict[str, bytes]:
    """What is in the files, but for a run's lock."""
    files = {str(path.relative_to(home)): path for path in home.rglob("*") if path.is_file()}
    return {name: path.read_bytes() for name, path in files.items() if path.name != "lock"}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_case(case: Case, tmp_path):
    words = case.prepare(tmp_path)
    before, left, start = memory(), runs_in(tmp_path), time.monotonic()
    lines_before, files_before = lines_in(tmp_path), files_in(tmp_path)
    short = [*SMALL, "--iterations=1"] if case.script in TRAINERS else []
    done = run_main(case.script, *short, *words, cwd=tmp_path, check=False)
    assert time.monotonic() - start < SECONDS and memory() - before < MEMORY

    said = done.stderr.strip()
    assert "Traceback" not in done.stdout + said and SECRET not in done.stdout + said
    if case.goes_on:
        lines = [line for line in (done.stdout + said).splitlines() if case.says[0] in line]
        assert done.returncode == 0 and lines, done.stdout + said
        assert any(all(part in line for part in case.says) for line in lines), lines
        assert lines_before <= lines_in(tmp_path), "a number is lost"
        return

    lines = said.splitlines()
    assert done.returncode and 0 < len(lines) <= LINES, f"{done.returncode}: {said or done.stdout}"
    assert all(line.isprintable() and len(line) < 1000 for line in lines), said
    assert all(part in said for part in case.says), said
    assert runs_in(tmp_path) == left, "a run was left behind"
    assert files_in(tmp_path) == files_before, "a file was touched"
