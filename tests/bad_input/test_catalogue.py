"""Every case of the catalogue, in this process: what main() says and leaves behind."""

import resource
import time

import pytest
from catalogue import CASES, Case
from conftest import run_main

SMALL = "--engine hf --iterations 1 --tasks-per-iteration 2 --group-size 2".split()
SMALL += "--eval-tasks 2 --eval-samples 1 --eval-every 1 --max-steps 2".split()
LINES, SECONDS, MEMORY = 3, 60, 2 * 2**20  # [KiB] by which the process may grow


def memory() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def runs_in(home) -> list[str]:
    return sorted(path.name for path in (home / "runs").glob("*"))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_case(case: Case, tmp_path):
    words = case.prepare(tmp_path)
    before, left, start = memory(), runs_in(tmp_path), time.monotonic()
    done = run_main(case.script, *SMALL, *words, cwd=tmp_path, check=False)
    assert time.monotonic() - start < SECONDS and memory() - before < MEMORY

    said = done.stderr.strip()
    assert "Traceback" not in done.stdout + said
    if case.goes_on:
        lines = [line for line in (done.stdout + said).splitlines() if case.says[0] in line]
        assert done.returncode == 0 and lines, done.stdout + said
        assert all(part in lines[0] for part in case.says), lines
        return

    lines = said.splitlines()
    assert done.returncode and 0 < len(lines) <= LINES, f"{done.returncode}: {said or done.stdout}"
    assert all(line.isprintable() and len(line) < 1000 for line in lines), said
    assert all(part in said for part in case.says), said
    assert runs_in(tmp_path) == left, "a run was left behind"
