"""Several processes: their update is that of one, their runs are whole, and a wrong number of them
is refused."""

import functools
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
from runtime.saving.checkpoints import load_checkpoint

import divided
import pytest
import torch
from conftest import ROOT, free_port, load, random_model, run_main, settings
from safetensors.torch import load_file

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


def launch(
    kind: str, *command, cwd: Path, check: bool = True, **environment: str
) -> subprocess.CompletedProcess:
    """A command in two processes: by torchrun, or by accelerate with the configuration for FSDP;
    hsdp: in four, as two machines of two cards each."""
    if kind == "torchrun":
        launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]
        launcher += ["--master_port", free_port()]
    else:
        launcher = [sys.executable, "-m", "accelerate.commands.launch"]
        launcher += ["--main_process_port", free_port()]
        launcher += ["--config_file", ROOT / "configs" / "fsdp.yaml"]
        if kind == "hsdp":
            launcher += ["--num_processes", "4", "--parallelism_config_dp_replicate_size", "2"]
    own = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"} | environment
    options = dict(cwd=cwd, capture_output=True, text=True, timeout=1200, env=own)
    done = subprocess.run([*launcher, *command], **options)
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done


def sharded_peaks(shape: tuple, home: Path) -> dict[str, int]:
    """tests/on_card.py's fsdp_peaks [bytes], of the first of two processes, which give freed memory
    back at once."""
    command = str(ROOT / "tests" / "on_card.py"), "fsdp_peaks", json.dumps({"shape": shape})
    done = launch("fsdp", *command, cwd=home, MALLOC_MMAP_THRESHOLD_="100000")
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith('{"')))


def rows(run: Path, name: str) -> list[dict]:
    return [json.loads(line) for line in (run / name).read_text().splitlines()]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The updates of each script in one process, this one."""
    home = tmp_path_factory.mktemp("alone")
    for script in UPDATES:
        divided.main(script, home / f"{script}.pt")
    found = {script: torch.load(home / f"{script}.pt") for script in UPDATES}
    return found | {"home": home}


SHARDED = ["istar_sokoban", "istar_paper_sokoban", "istar_visual_sokoban"]
SHARDED += ["istar_sokoban+recompute"]
LAUNCHES = {"torchrun": [*UPDATES], "fsdp": [*SHARDED, "istar_sokoban+recompute+bfloat16"]}
LAUNCHES["hsdp"] = ["istar_sokoban"]
CASES = [("hsdp", "istar_sokoban")]
CASES += [("torchrun", script) for script in UPDATES] + [("fsdp", script) for script in SHARDED]


@pytest.fixture(scope="module")
def divided_in_two(tmp_path_factory):
    """divided_in_two(kind) -> the updates of that launch's scripts; each is done once."""

    @functools.cache
    def start(kind):
        home = tmp_path_factory.mktemp("divided")
        launch(kind, DIVIDED, ",".join(LAUNCHES[kind]), home, cwd=home)
        found = {name: torch.load(home / f"{name}.pt") for name in LAUNCHES[kind]}
        return found | {"home": home}

    return start


@pytest.mark.parametrize("kind, script", CASES)
def test_the_update_of_several_processes_is_that_of_one(kind, script, alone, divided_in_two):
    """Of every network: the gradients that its steps follow, to 1e-5 of their length, and what it
    computes afterwards. recompute: --gradient-checkpointing, against one process without it. FSDP:
    iStar's PRM is an adapter on the sharded policy. Each has been saved and taken up again."""
    two, script = {**divided_in_two(kind)[script]}, script.partition("+")[0]
    one = {**alone[script]}
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


def test_a_sharded_prm_takes_no_more_memory_than_the_update(tmp_path):
    peaks = sharded_peaks((256, 512, 2, 4, 2, 4096, True), tmp_path)
    assert 2**26 < peaks["prm"] <= 1.1 * peaks["update"]


@pytest.mark.parametrize("kind", ["fsdp", "hsdp"])
def test_one_process_takes_up_what_sharded_ones_saved(kind, alone, divided_in_two):
    """Each of the two parts is in one file, however many processes have it; together they are what
    one process saves of the same update, with the moments."""
    states = []
    for home in (alone["home"], divided_in_two(kind)["home"]):
        run = home / "istar_sokoban"
        made = divided.networks_of(load("istar_sokoban"), random_model, home / "again", "cpu")
        assert load_checkpoint(run, [*made.values()], {})[0] == 1
        states.append({name: network.trained for name, network in made.items()})
        for network in (made["policy"], made["prm"]):
            for parameter in network.trained:
                assert torch.equal(network.optimizer.state[parameter]["exp_avg"], parameter**2)
    for name in states[0]:
        one, several = (torch.cat([p.flatten() for p in state[name]]) for state in states)
        assert (several - one).norm() <= 1e-5 * one.norm()
    files = sorted((run / "checkpoints/000001").glob("trained*"), reverse=True)
    assert [file.name for file in files] == ["trained.safetensors", "trained-00001.safetensors"]
    sizes = [file.stat().st_size for file in files]
    assert sizes[1] == pytest.approx(sizes[0], rel=0.1), "no process writes all of it"
    assert len(load_file(run / "policy/model.safetensors")) > 3


def test_fsdp_in_bfloat16_is_as_near_as_autocast(alone, divided_in_two, tmp_path):
    """To float32, that is; gradients stay float32. A PRM that has learnt something too."""
    script, exact = "istar_sokoban", alone["istar_sokoban"]
    divided.main(script, tmp_path / "autocast.pt", "bfloat16")
    kinds = {"fsdp": divided_in_two("fsdp")[f"{script}+recompute+bfloat16"]}
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


def assert_divided(run: Path, said: str, iterations: int = 2, tasks: int = 4, group: int = 4):
    """Two processes have played whole groups, in the order of their tasks, and said it once."""
    assert "2 processes, the policy a copy in each" in said
    told = [line.split()[1] for line in said.splitlines() if line.startswith("iteration ")]
    table, episodes = rows(run, "metrics.jsonl"), rows(run, "episodes.jsonl")
    assert [row["iteration"] for row in table] == [*range(iterations + 1)] == [*map(int, told)]
    assert len(episodes) == iterations * tasks * group
    played = [episode["task"] for episode in episodes[: tasks * group]]
    assert all(played.count(task) == group for task in played), "groups are split"
    assert played == sorted(played)
    assert all(0 < row["policy/engine_gap"] < 1e-3 for row in table[1:])


def test_conversations_in_two_processes(tmp_path):
    """What tests/test_launch.py starts as Slurm does trains on Sokoban, and goes on."""
    command = [ROOT / "rloo_sotopia.py", *SMALL.split(), "--engine", "hf", "--processes", "2"]
    done = launch("torchrun", *command, "--run-name", "two", cwd=tmp_path)
    assert_divided(tmp_path / "runs/two", done.stdout)


@pytest.mark.skipif(not find_spec("vllm"), reason="vllm is not installed")
def test_fsdp_trains_as_two_copies_do(tmp_path):
    """Also: two engines beside each other, and a sharded policy with the PRM's adapter on it that
    goes on from a checkpoint as if it had not ended, and leaves one."""
    common = [ROOT / "istar_sokoban.py", *SMALL.split(), "--engine", "vllm", "--processes", "2"]
    common += ["--eval-every", "1", "--seed", "3"]
    launch("torchrun", *common, "--run-name", "copies", cwd=tmp_path)
    one, two = (tmp_path / "runs" / name for name in ("copies", "fsdp"))
    shutil.copytree(one, two, symlinks=True)
    shutil.rmtree(two / "checkpoints/000002")
    done = launch("fsdp", *common, "--run-name", "fsdp", "--resume", "auto", cwd=tmp_path)
    assert "2 processes, the policy sharded (FSDP)" in done.stdout
    assert "goes on with runs/fsdp" in done.stdout
    copies, shards = (rows(run, "metrics.jsonl") for run in (one, two))
    assert copies[2] != shards[2]  # at least its times: it was played again
    for row, other in zip(copies, shards, strict=True):
        nulls = [{key for key in each if each[key] is None} for each in (row, other)]
        assert row.keys() == other.keys() and nulls[0] == nulls[1]
        same = {key for key in row if not key.startswith(("time/", "policy/engine_gap"))} - nulls[0]
        expected = {key: row[key] for key in same}
        assert {key: other[key] for key in same} == pytest.approx(expected, rel=1e-3, nan_ok=True)
    assert any(row.get("policy/grad_norm") for row in copies)
    assert all(row["prm/pairs"] and row["prm/grad_norm"] for row in copies[1:])
    for name in ("prm/adapter_model.safetensors", "policy/model.safetensors"):
        before = load_file(one / "checkpoints/000001" / name)
        mine, theirs = (load_file(run / "checkpoints/000002" / name) for run in (one, two))
        assert before.keys() == mine.keys() == theirs.keys()
        moved, away = (
            torch.cat([(t - mine[name]).flatten() for name, t in each.items()]).norm()
            for each in (before, theirs)
        )
        assert away < 0.01 * moved, name


def test_a_process_saves_in_the_memory_of_its_training(tmp_path):
    script = ROOT / "benchmarks" / "saving.py"
    command = [sys.executable, str(script), "--hidden", "512", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and "**holds**" in done.stdout, done.stdout + done.stderr


def test_cores_are_divided_by_nodes_and_both_threads_of_a_core_go_together(monkeypatch):
    """Of a machine with two sockets, 64 physical cores each, whose second threads come last."""
    given = {}
    monkeypatch.setattr(processes, "place_of", lambda core: (core % 128 // 64, core % 128, core))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(256)))
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cores: given.setdefault(rank, cores))
    monkeypatch.setattr(processes, "PartialState", lambda **_: pytest.skip())  # comes after it
    for rank in range(8):
        for name, value in dict(WORLD_SIZE=8, LOCAL_WORLD_SIZE=8, LOCAL_RANK=rank).items():
            monkeypatch.setenv(name, str(value))
        with pytest.raises(pytest.skip.Exception):
            processes.start(settings(processes=8, tasks_per_iteration=8, eval_tasks=8))
    assert sorted(core for cores in given.values() for core in cores) == [*range(256)]
    for rank, cores in given.items():
        assert len(cores) == 32 and {core % 128 // 64 for core in cores} == {rank // 4}
        assert len({core % 128 for core in cores}) == 16


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
    monkeypatch.setattr(opening, "hash_of_panel", lambda run: "")
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
        "the model",
        "the world",
    ],
)
def test_a_process_with_other_files_or_tasks_is_refused(what, monkeypatch, tmp_path):
    """Also a model of the same size, and a panel of the same numbers."""
    script, told = load("istar_sokoban"), []
    model = shutil.copytree(ROOT / "models" / "tiny-sokoban", tmp_path / "model")
    args, env = script.Args(model=str(model)), script.Sokoban()
    run = SimpleNamespace(args=args, env=env, eval_env=env, model_path=args.model)
    run.eval_tasks = [1, 1, 2, 2]
    monkeypatch.setattr(processes, "count", lambda: 2)
    monkeypatch.setattr(processes, "gather", lambda own: [*told, *own, *own][:2])
    opening.refuse_other_ranks(run)

    monkeypatch.setattr(processes, "gather", lambda own: told.extend(own) or own)
    opening.refuse_other_ranks(run)
    if what == "the panel":
        env.reset = lambda task: SimpleNamespace(prompt="another")
    elif what == "the list of training tasks":
        env.train_tasks = [*env.train_tasks][::-1]
    elif what == "the model":
        weights = (model / "model.safetensors").read_bytes()
        (model / "model.safetensors").write_bytes(weights[:-1] + b"\0")
    else:
        (tmp_path / "sokoban.py").touch()
        monkeypatch.setattr(sys.modules["envs.sokoban"], "__file__", str(tmp_path / "sokoban.py"))
    monkeypatch.setattr(processes, "gather", lambda own: [*told, *own])
    with pytest.raises(SystemExit, match=f"process 1 .* process 0: {what} is another"):
        opening.refuse_other_ranks(run)


def test_a_process_that_is_refused_tells_the_others(tmp_path):
    """On another machine nobody else would: without a launcher that ends all, as between two."""
    home = dict(WORLD_SIZE="2", LOCAL_WORLD_SIZE="1", LOCAL_RANK="0", GLOO_SOCKET_IFNAME="lo")
    home |= dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=free_port(), OMP_NUM_THREADS="1")
    line, each = "--learning-rate 7: ", []
    for rank in ("0", "1"):
        command = [sys.executable, ROOT / "rloo_sokoban.py", *NUMBER, "2", "--engine", "hf"]
        command += ["--learning-rate", "7"] if rank == "1" else []
        options = dict(env=os.environ | home | {"RANK": rank}, cwd=tmp_path, text=True)
        each.append(subprocess.Popen(command, stderr=subprocess.PIPE, **options))
    first, second = (process.communicate(timeout=100)[1] for process in each)
    assert [process.returncode for process in each] == [1, 1]
    assert f"process 1 was refused: {line}" in first and second.startswith(line)


@pytest.mark.parametrize("number, started", [(1, 2), (3, 2), (2, 1), (2, None)])
def test_the_launchers_number_has_to_be_the_flags(number, started, tmp_path, monkeypatch):
    """As a launcher tells the processes their number. accelerate launch --cpu starts one, whatever
    it is asked for, and tells it nothing."""
    if started:
        monkeypatch.setenv("WORLD_SIZE", str(started))
    done = run_main("rloo_sokoban", *NUMBER, number, cwd=tmp_path, check=False)
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith(f"--processes {number}: {started or 1} started; ")
    assert not list(tmp_path.glob("runs/*/metrics.jsonl"))


def test_copies_of_a_sharded_policy_have_to_divide_the_processes(monkeypatch):
    told = {"WORLD_SIZE": "4", "ACCELERATE_USE_FSDP": "true"}
    for name, value in (told | {"PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "3"}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit, match="--processes 4: 3 copies of the policy have to divide it"):
        processes.start(settings(processes=4))


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
