"""Several processes: their update is that of one, their runs are whole, and a wrong number of them
is refused."""

import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

from runtime.distributed import processes
from runtime.flags import flags_of
from runtime.saving import opening

import divided
import pytest
import torch
from conftest import ROOT, free_port, load, run_main, settings

SMALL = """--tasks-per-iteration 4 --group-size 4 --eval-tasks 4 --eval-samples 2 --max-steps 4
--iterations 2 --seed 5"""
DIVIDED = str(ROOT / "tests" / "divided.py")
UPDATES = {  # the networks of a script that are updated
    "istar_sokoban": ["policy", "prm"],
    "istar_paper_sokoban": ["policy", "prm"],
    "istar_visual_sokoban": ["policy", "prm"],
    "prime_webshop": ["policy", "prm"],
    "ppo_webshop": ["policy", "critic"],
    "dpo_webshop": ["policy"],
}


def launch(kind: str, *command, cwd: Path, check: bool = True) -> subprocess.CompletedProcess:
    """A command in two processes: by torchrun, or by accelerate with the configuration for FSDP."""
    port, launcher = free_port(), [sys.executable, "-m", "accelerate.commands.launch"]
    launcher += ["--main_process_port", port]
    if kind == "torchrun":
        launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]
        launcher += ["--master_port", port]
    elif kind == "fsdp":
        launcher += ["--config_file", ROOT / "configs" / "fsdp.yaml"]
    else:
        launcher += ["--cpu", "--num_processes", "2"]
    own = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    options = dict(cwd=cwd, capture_output=True, text=True, timeout=1200, env=own)
    done = subprocess.run([*launcher, *command], **options)
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done


def rows(run: Path, name: str) -> list[dict]:
    return [json.loads(line) for line in (run / name).read_text().splitlines()]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The updates of each script in one process, this one."""
    home = tmp_path_factory.mktemp("alone")
    for script in UPDATES:
        divided.main(script, home / f"{script}.pt")
    return {script: torch.load(home / f"{script}.pt") for script in UPDATES}


SHARDED = ("istar_sokoban", "istar_paper_sokoban", "istar_visual_sokoban")
LAUNCHES = [("torchrun", [*UPDATES], ""), ("fsdp", SHARDED, ""), ("fsdp", SHARDED[:1], "recompute")]
LAUNCHES += [("fsdp", SHARDED[:1], "bfloat16 recompute")]
CASES = [(kind, script, options) for kind, scripts, options in LAUNCHES[:3] for script in scripts]


@pytest.fixture(scope="module")
def divided_in_two(tmp_path_factory):
    """divided_in_two(kind, options) -> the updates of that launch's scripts; each is done once."""
    done = {}

    def start(kind, options):
        if (kind, options) not in done:
            scripts = next(
                names for *key, names, given in LAUNCHES if (*key, given) == (kind, options)
            )
            home = tmp_path_factory.mktemp("divided")
            launch(kind, DIVIDED, ",".join(scripts), home, *options.split(), cwd=home)
            done[kind, options] = {name: torch.load(home / f"{name}.pt") for name in scripts}
        return done[kind, options]

    return start


@pytest.mark.parametrize("kind, script, options", CASES)
def test_the_update_of_two_processes_is_that_of_one(kind, script, options, alone, divided_in_two):
    """Of every network: the gradients that its steps follow, to 1e-5 of their length, and what it
    computes afterwards. recompute: --gradient-checkpointing, against one process without it. FSDP:
    iStar's PRM is an adapter on the sharded policy. Each has been saved and taken up again."""
    one, two = {**alone[script]}, {**divided_in_two(kind, options)[script]}
    assert one.keys() == two.keys()
    for network in UPDATES[script]:
        assert f"after.{network}" in one
        for number in range(2 if network == "policy" else 1):  # its optimiser steps
            names = [name for name in one if name.startswith(f"{network}.{number}.")]
            for each in (one, two):
                whole = torch.cat([each.pop(name).flatten() for name in names])
                each[f"{network}.{number}"] = whole
    for name, value in one.items():
        if isinstance(value, dict):  # what the update told
            assert two[name] == pytest.approx(value, rel=1e-4), name
        else:
            assert value.norm() > 1e-6, name
            assert (two[name] - value).norm() <= 1e-5 * value.norm(), name


def test_fsdp_in_bfloat16_is_as_near_as_autocast(alone, divided_in_two, tmp_path):
    """To float32, that is; gradients stay float32. A PRM that has learnt something too."""
    script, exact = "istar_sokoban", alone["istar_sokoban"]
    divided.main(script, tmp_path / "autocast.pt", "bfloat16")
    kinds = {"fsdp": divided_in_two("fsdp", "bfloat16 recompute")[script]}
    kinds["autocast"] = torch.load(tmp_path / "autocast.pt")
    names = [name for name in exact if name.startswith(("policy.", "prm."))]
    away = {}
    for kind, found in kinds.items():
        assert all(found[name].dtype == torch.float32 for name in names)
        one, two = (torch.cat([each[n].flatten() for n in names]) for each in (exact, found))
        away[kind] = [(found["old"] - exact["old"]).norm(), (two - one).norm()]
        assert torch.cosine_similarity(one, two, dim=0) > 0.98
    for fsdp, autocast in zip(away["fsdp"], away["autocast"]):
        assert 1e-4 < fsdp < 4 * autocast


@pytest.mark.parametrize("script", ["istar_sokoban", "rloo_sotopia"])
def test_two_processes_train(script, tmp_path):
    common = [ROOT / f"{script}.py", *SMALL.split(), "--engine", "hf", "--processes", "2"]
    common += ["--run-name", "two"]
    done = launch("torchrun", *common, cwd=tmp_path)
    assert "2 processes, the policy a copy in each" in done.stdout
    told = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("iteration ")]
    assert told == ["0", "1", "2"]

    run = tmp_path / "runs" / "two"
    table, episodes = rows(run, "metrics.jsonl"), rows(run, "episodes.jsonl")
    assert [row["iteration"] for row in table] == [0, 1, 2] and len(episodes) == 2 * 4 * 4
    tasks = [episode["task"] for episode in episodes[:16]]
    assert all(tasks.count(task) == 4 for task in tasks), "groups are split"
    assert tasks == sorted(tasks)
    assert all(0 < row["policy/engine_gap"] < 1e-3 for row in table[1:])

    if script == "istar_sokoban":
        done = launch("torchrun", *common, "--iterations", "3", "--resume", "auto", cwd=tmp_path)
        assert [row["iteration"] for row in rows(run, "metrics.jsonl")] == [0, 1, 2, 3]
        assert "goes on with" in done.stdout


@pytest.mark.skipif(not find_spec("vllm"), reason="vllm is not installed")
def test_fsdp_trains_as_two_copies_do(tmp_path):
    """Also: two engines beside each other, and the checkpoint of a sharded policy with the PRM's
    adapter on it, from which a run goes on as if it had not ended."""
    common = [ROOT / "istar_sokoban.py", *SMALL.split(), "--engine", "vllm", "--processes", "2"]
    common += ["--eval-every", "1", "--seed", "3"]
    launch("torchrun", *common, "--run-name", "copies", cwd=tmp_path)
    fsdp = [*common, "--run-name", "fsdp"]
    done = launch("fsdp", *fsdp, "--iterations", "1", cwd=tmp_path)
    assert "2 processes, the policy sharded (FSDP)" in done.stdout
    launch("fsdp", *fsdp, "--resume", "auto", cwd=tmp_path)
    copies = rows(tmp_path / "runs" / "copies", "metrics.jsonl")
    shards = rows(tmp_path / "runs" / "fsdp", "metrics.jsonl")
    for one, two in zip(copies, shards, strict=True):
        nulls = [{key for key in row if row[key] is None} for row in (one, two)]
        assert one.keys() == two.keys() and nulls[0] == nulls[1]
        same = {key for key in one if not key.startswith(("time/", "policy/engine_gap"))} - nulls[0]
        expected = {key: one[key] for key in same}
        assert {key: two[key] for key in same} == pytest.approx(expected, rel=1e-3, nan_ok=True)
    assert any(row.get("policy/grad_norm") for row in copies)
    assert all(row["prm/pairs"] and row["prm/grad_norm"] for row in copies[1:])
    for run in ("copies", "fsdp"):
        adapter = tmp_path / "runs" / run / "prm" / "adapter_model.safetensors"
        assert adapter.is_file() and (tmp_path / "runs" / run / "policy/config.json").is_file()


def test_saving_a_sharded_policy_takes_no_more_than_the_policy(tmp_path):
    script = ROOT / "benchmarks" / "saving.py"
    command = [sys.executable, str(script), "--hidden", "512", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and "**holds**" in done.stdout, done.stdout + done.stderr


NUMBER = [*SMALL.split(), "--engine", "hf", "--processes"]


@pytest.mark.parametrize(
    "flags, refused",
    [
        ({"policy_lora_rank": 8}, True),
        ({"engine": "hf"}, True),
        ({"prm_lora_rank": 4, "dtype": "bfloat16"}, False),  # an adapter on the sharded policy
        ({}, False),
    ],
)
def test_what_does_not_go_with_a_sharded_policy_is_refused(monkeypatch, flags, refused):
    monkeypatch.setattr(processes.fsdp, "wanted", lambda: True)
    given = {"engine": "vllm", "tasks_per_iteration": 4, "policy_lora_rank": 0}
    args = settings(**given | flags)
    if not refused:
        processes.start(args)
        return
    with pytest.raises(SystemExit, match="FSDP shards a policy that is trained whole"):
        processes.start(args)


ENDING = """
import atexit, os, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from conftest import settings
from runtime.distributed import processes

class Thread:
    "What gloo's does at times, where the interpreter is gone."
    def __del__(self, abort=os.abort):
        abort()

thread = Thread()
processes.start(settings(processes=2, tasks_per_iteration=4, policy_lora_rank=0, engine="none"))
atexit.register(Path(f"ended-{processes.rank()}").touch)
processes.end()
"""


def test_processes_end_without_the_interpreters_end(tmp_path):
    program = tmp_path / "ending.py"
    program.write_text(ENDING)
    launch("torchrun", program, ROOT / "tests", cwd=tmp_path)
    assert sorted(path.name for path in tmp_path.glob("ended-*")) == ["ended-0", "ended-1"]


@pytest.mark.parametrize("flag", flags_of(load("istar_sokoban").Args()))
def test_a_process_with_another_flag_is_refused_by_all(flag, monkeypatch, tmp_path):
    """In one line, of the first process, which names flag, process and both values."""
    args = load("istar_sokoban").Args(model=str(ROOT / "models" / "tiny-sokoban"))
    env = SimpleNamespace(train_tasks=[3, 4])
    run = SimpleNamespace(args=args, env=env, model_path=args.model, eval_tasks=[1, 2])
    monkeypatch.setattr(opening, "hash_of_panel", lambda args, env: "")
    first = {**flags_of(args)}[flag]

    def told(of_this_process):
        (own,) = of_this_process
        return [own, own, own | {f"--{flag.replace('_', '-')}": "another"}]

    monkeypatch.setattr(processes, "gather", told)
    monkeypatch.setattr(processes, "count", lambda: 3)
    for rank in (0, 1, 2):
        monkeypatch.setattr(processes, "rank", lambda rank=rank: rank)
        with pytest.raises(SystemExit) as stop:
            opening.refuse_other_ranks(run)
        name = f"--{flag.replace('_', '-')}"
        line = f"process 2 was started otherwise than process 0: {name} another, not {first}"
        assert stop.value.code == (1 if rank else line)


@pytest.mark.parametrize(
    "what",
    [
        "the panel",
        "the list of training tasks",
        "the files of the model",
        "the source of the world",
    ],
)
def test_a_process_with_other_files_or_tasks_is_refused(what, monkeypatch, tmp_path):
    """Also a model of the same size, and a panel of the same numbers."""
    script, told = load("istar_sokoban"), []
    model = shutil.copytree(ROOT / "models" / "tiny-sokoban", tmp_path / "model")
    args, env = script.Args(model=str(model)), script.Sokoban()
    run = SimpleNamespace(args=args, env=env, model_path=args.model, eval_tasks=[1, 2])
    monkeypatch.setattr(processes, "count", lambda: 2)
    monkeypatch.setattr(processes, "gather", lambda own: [*told, *own, *own][:2])
    opening.refuse_other_ranks(run)

    monkeypatch.setattr(processes, "gather", lambda own: told.extend(own) or own)
    opening.refuse_other_ranks(run)
    if what == "the panel":
        env.reset = lambda task: SimpleNamespace(prompt="another")
    elif what == "the list of training tasks":
        env.train_tasks = [*env.train_tasks][::-1]
    elif what == "the files of the model":
        weights = (model / "model.safetensors").read_bytes()
        (model / "model.safetensors").write_bytes(weights[:-1] + b"\0")
    else:
        (tmp_path / "sokoban.py").touch()
        monkeypatch.setattr(sys.modules["envs.sokoban"], "__file__", str(tmp_path / "sokoban.py"))
    monkeypatch.setattr(processes, "gather", lambda own: [*told, *own])
    with pytest.raises(SystemExit, match=f"process 1 .* process 0: {what} is another"):
        opening.refuse_other_ranks(run)


def test_another_number_of_processes_is_refused(tmp_path):
    """accelerate launch --cpu starts one, whatever it is asked for."""
    command = [ROOT / "rloo_sokoban.py", *NUMBER, "2"]
    done = launch("cpu", *command, cwd=tmp_path, check=False)
    assert done.returncode and "--processes 2: 1 started" in done.stderr
    assert not list(tmp_path.glob("runs/*/metrics.jsonl"))


@pytest.mark.parametrize("number, started", [(1, 2), (3, 2), (2, 1)])
def test_the_launchers_number_has_to_be_the_flags(number, started, tmp_path, monkeypatch):
    """The same without a launcher: this is how it tells the processes their number."""
    monkeypatch.setenv("WORLD_SIZE", str(started))
    done = run_main("rloo_sokoban", *NUMBER, number, cwd=tmp_path, check=False)
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith(f"--processes {number}: {started} started; ")
    assert not list(tmp_path.glob("runs/*/metrics.jsonl"))


HOSTS = """
set -e
mount -t tmpfs none /run && mkdir /run/netns
ip netns add one && ip netns add two
ip link add eth1 netns one type veth peer name eth1 netns two
for host in one two; do ip -n $host link set lo up; ip -n $host link set eth1 up; done
ip -n one addr add 10.9.0.1/24 dev eth1 && ip -n two addr add 10.9.0.2/24 dev eth1
"""


def separate(script: str, **options) -> subprocess.CompletedProcess:
    """A shell script with two hosts, `one` (10.9.0.1) and `two`, each with a network of its own."""
    command = ["unshare", "-rnm", "bash", "-c", HOSTS + script]
    return subprocess.run(command, capture_output=True, text=True, **options)


@pytest.mark.skipif(
    not shutil.which("unshare") or not shutil.which("ip") or separate("true").returncode,
    reason="this machine lets nobody make network namespaces",
)
def test_two_hosts_train(tmp_path):
    """The launch of several machines: one process on each of two hosts that share nothing but a
    wire and a disk."""
    small = " ".join(SMALL.split())
    command = f"{ROOT / 'rloo_sokoban.py'} {small} --engine hf --processes 2 --run-name hosts"
    torchrun = f"{sys.executable} -m torch.distributed.run --nnodes 2 --nproc_per_node 1"
    place = "--master_addr 10.9.0.1 --master_port 29500"
    start = f"{torchrun} {place} --node_rank {{}} {command}"
    script = f"ip netns exec two {start.format(1)} & ip netns exec one {start.format(0)} && wait $!"
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "eth1", "OMP_NUM_THREADS": "1"}
    done = separate(script, cwd=tmp_path, env=environment, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 processes" in done.stdout
    assert len(rows(tmp_path / "runs" / "hosts", "metrics.jsonl")) == 3
    assert len(rows(tmp_path / "runs" / "hosts", "episodes.jsonl")) == 2 * 4 * 4


FAULTS = """
import resource, torch
from runtime.distributed import processes
processes.keep_freed_memory()
for _ in range(20):  # 100 MB, whose pages are there from some earlier round, or new
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(25 * 10**6)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.parametrize(("variables", "kept"), [({}, True), ({"MALLOC_CHECK_": "0"}, False)])
def test_freed_memory_is_kept_unless_the_environment_says_otherwise(variables, kept):
    clean = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    options = dict(capture_output=True, text=True, env=clean | variables, cwd=ROOT, check=True)
    done = subprocess.run([sys.executable, "-c", FAULTS], **options)
    assert (min(map(int, done.stdout.split())) < 100) == kept
