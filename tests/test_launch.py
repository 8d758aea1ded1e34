"""What starts a run on a cluster: the commands in docs/many-gpus.md and in configs/, with stand-ins
for Slurm and Ray that say what they were told, or start it on this machine."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from runtime.flags import flags_of, parse

import pytest
from conftest import ROOT, TRAINERS, free_port, load
from test_processes import SMALL, assert_divided, rows

SMALL = [*SMALL.split(), "--engine", "hf"]


def commands(path: Path) -> list[list[str]]:
    """The words of each command in a page's code blocks."""
    found = []
    for block in re.findall(r"^```bash\n(.*?)^```", path.read_text(), re.DOTALL | re.MULTILINE):
        lines = block.replace("\\\n", " ").splitlines()
        found += [shlex.split(line, comments=True) for line in lines]
    return found


def parsed(words: list[str], monkeypatch) -> dict:
    """The flags after the script's name, as the script reads them."""
    (place,) = (i for i, word in enumerate(words) if word.removesuffix(".py") in TRAINERS)
    monkeypatch.setattr(sys, "argv", words[place:])
    return flags_of(parse(load(words[place].removesuffix(".py")).Args, ""))


def test_the_commands_of_the_page_have_flags_that_there_are(monkeypatch):
    ours = [words for words in commands(ROOT / "docs/many-gpus.md") if "_" in " ".join(words)]
    ours = [words for words in ours if {w.removesuffix(".py") for w in words} & {*TRAINERS}]
    assert len(ours) >= 6
    flags = [parsed(words, monkeypatch) for words in ours]
    assert [flag["processes"] for flag in flags][:3] == [2, 16, 2]
    assert any(flag["engine_url"] for flag in flags)


def shims(home: Path, **programs: str) -> dict:
    """An environment in which these programs are shell scripts."""
    (home / "bin").mkdir()
    for name, body in programs.items():
        (home / "bin" / name).write_text(f"#!/bin/bash\n{body}\n")
        (home / "bin" / name).chmod(0o755)
    own = Path(sys.executable).parent
    return os.environ | {"PATH": f"{home / 'bin'}:{own}:{os.environ['PATH']}"}


def started(command: list, home: Path, environment: dict) -> str:
    options = dict(cwd=home, env=environment, capture_output=True, text=True, timeout=1200)
    done = subprocess.run([*map(str, command)], **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


SAYS = 'printf "%s\\n" "$@"'
HOSTS = '[ "$*" = "show hostnames one,two" ] && printf "one\\ntwo\\n"'
JOB = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "one,two", "SLURM_NNODES": "2"}
JOB |= {"SLURM_GPUS_ON_NODE": "8"}


def test_slurm_starts_a_process_for_each_gpu_of_all_machines(tmp_path, monkeypatch):
    environment = shims(tmp_path, srun=SAYS, scontrol=HOSTS) | JOB
    words = ["istar_webshop.py", "--model", "a b", "--alpha", "1"]
    said = started(["bash", ROOT / "configs/slurm.sh", *words], tmp_path, environment).splitlines()
    assert said[:3] == ["--kill-on-bad-exit=1", "accelerate", "launch"]
    place = said.index("istar_webshop.py")
    told = dict(zip(said[3:place:2], said[4:place:2]))
    assert (told["--config_file"], told["--num_machines"]) == ("configs/fsdp.yaml", "2")
    assert (told["--num_processes"], told["--rdzv_backend"]) == ("16", "c10d")
    assert told["--parallelism_config_dp_replicate_size"] == "2"  # a copy on each machine
    assert (told["--main_process_ip"], told["--main_process_port"]) == ("one", "29500")
    adapter = ["bash", ROOT / "configs/slurm.sh", *words, "--policy-lora-rank", "64"]
    copies = started(adapter, tmp_path, environment).splitlines()
    place = copies.index("istar_webshop.py")
    told = dict(zip(copies[2:place:2], copies[3:place:2]))
    assert (copies[1], told["--nnodes"], told["--nproc_per_node"]) == ("torchrun", "2", "8")
    assert (told["--rdzv_endpoint"], told["--rdzv_id"]) == ("one:29500", "7")
    assert said[said.index("istar_webshop.py") :] == copies[place:-2]
    flags = parsed(said, monkeypatch)
    assert (flags["processes"], flags["model"], flags["alpha"]) == (16, "a b", 1.0)
    assert (flags["resume"], flags["run_name"]) == ("auto", "slurm-7")


def test_what_slurm_starts_trains_and_goes_on_where_it_is_queued_again(tmp_path):
    """Two processes on this machine, whose Slurm has one machine with two GPUs; the PRM's lists of
    past groups are taken up too."""
    here = f"scontrol() {{ echo 127.0.0.1:{free_port()}; }}"
    script = (ROOT / "configs/slurm.sh").read_text().replace(":29500", "")
    (tmp_path / "slurm.sh").write_text(script.replace("set -euo", f"{here}\nset -euo"))
    environment = shims(tmp_path, srun='shift; exec "$@"') | JOB
    environment |= {"SLURM_NNODES": "1", "SLURM_GPUS_ON_NODE": "2"}
    environment |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    words, run = ["bash", "slurm.sh", ROOT / "istar_sokoban.py", *SMALL], tmp_path / "runs/slurm-7"
    said = started(words, tmp_path, environment)
    assert "nothing to go on with" in said
    assert_divided(run, said, iterations=2)
    said = started([*words, "--iterations", "3"], tmp_path, environment)
    assert "goes on with runs/slurm-7" in said
    assert [row["iteration"] for row in rows(run, "metrics.jsonl")] == [0, 1, 2, 3]


def test_ray_is_handed_the_same_command(tmp_path, monkeypatch):
    environment = shims(tmp_path, ray=SAYS) | {"RAY_ADDRESS": "http://head:8265"}
    words = ["bash", ROOT / "configs/ray.sh", "first", "istar_webshop.py", "--model", "a b"]
    for gpus, extra in (("8", {}), ("4", {"GPUS": "4"})):
        said = started(words, tmp_path, environment | extra).splitlines()
        assert said[:4] == ["job", "submit", "--address", "http://head:8265"]
        assert said[4:9] == ["--entrypoint-num-gpus", gpus, "--", "bash", "-c"]
        place, command = said[9].split(" && ", 1)
        assert place == f"cd {tmp_path}"
        flags = parsed(shlex.split(command), monkeypatch)
        assert (flags["processes"], flags["model"]) == (int(gpus), "a b")
        assert (flags["resume"], flags["run_name"]) == ("auto", "first")


@pytest.mark.parametrize("name", ["slurm.sh", "ray.sh"])
def test_without_a_script_they_say_so(name, tmp_path):
    options = dict(cwd=tmp_path, capture_output=True, text=True)
    done = subprocess.run(["bash", ROOT / "configs" / name], **options)
    assert done.returncode and "$1" in done.stderr
    assert subprocess.run(["bash", "-n", ROOT / "configs" / name]).returncode == 0
