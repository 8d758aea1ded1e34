"""A run survives: what is damaged, foreign, newer or hostile is refused or set aside, faults end as
promised, and a run that is killed and taken up again is the run that was not killed.

Processes of their own have what kills or limits a process; main() of the other runs is called in
the test's own."""

import contextlib
import json
import math
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from argparse import Namespace
from importlib.metadata import version
from pathlib import Path

import runtime.run
from runtime.data import Step, Trajectory, flatten
from runtime.networks import Network, add_adapter, assert_finite
from runtime.saving import checkpoints
from runtime.saving.checkpoints import (
    FORMAT,
    finish_saving,
    load_checkpoint,
    save_checkpoint,
    sum_of,
)
from runtime.saving.files import append, hash_file, hash_files, write_json
from runtime.saving.opening import provenance

import pytest
import torch
from conftest import (
    READY,
    ROOT,
    TINY,
    default_model,
    environment,
    files_end_at,
    load,
    network,
    random_model,
    random_trajectories,
    read_model,
    run_main,
    settings,
)
from peft import LoraConfig, PeftModel
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from test_scripts import GROUP, SMALL, TASKS, differing, rows, small, without_times
from transformers import AutoModelForCausalLM, AutoTokenizer

ISTAR = "istar_sokoban"
SETTINGS = Namespace(iterations=100, run_args=Namespace(save_every=1, keep=2, dtype="float32"))


class Board:
    """A W&B run that keeps what it is told."""

    def __init__(self):
        self.rows = []

    def log(self, row, step):
        self.rows.append((step, row))


def networks_of(seed: int, layers: int = 2, prm: str = "adapter", dtype=torch.float32):
    """A policy and a PRM with moments, as a script has them; the PRM an adapter on the policy or a
    "model"."""
    policy = network(random_model(seed, layers).to(dtype))
    if prm == "adapter":
        other = policy.with_adapter("prm", LoraConfig(r=4, target_modules="all-linear"))
    else:
        other = network(random_model(seed + 50, layers), name="prm")
    for each in (policy, other):
        each.activate()
        each.optimizer = torch.optim.AdamW(each.trained, lr=1e-3)
        sum(p.square().sum() for p in each.trained).backward()
        each.optimizer.step()
    return [policy, other]


def parameters_of(networks):
    """Everything that --resume has to bring back, as a flat list."""
    tensors = []
    for each in networks:
        for parameter in each.trained:
            moments = [v.clone() for _, v in sorted(each.optimizer.state[parameter].items())]
            tensors += [parameter.detach().clone(), *moments]
    return tensors


def same(one, other):
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other))


def save(run, networks, iteration, success=None, args=SETTINGS, history=None, lists=None):
    """A finished iteration: its row and its checkpoint, as main leaves them."""
    rows = history if history is not None else []
    row = {"iteration": iteration, "time/elapsed": 0.0}
    if success is not None:
        row["eval/success"] = success
    if not rows:
        first = {"iteration": 0, "time/elapsed": 0.0, "eval/success": 0.0, "eval/return": 0.0}
        rows.append(first)
        append(run / "metrics.jsonl", [json.dumps(first)])
    rows.append(row)
    append(run / "metrics.jsonl", [json.dumps(row)])
    append(run / "episodes.jsonl", [json.dumps({"iteration": iteration, "task": 1})])
    save_checkpoint(run, rows, networks, AutoTokenizer.from_pretrained(TINY), args, lists or {})
    finish_saving()
    return rows


@pytest.fixture
def run(tmp_path):
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    return tmp_path / "run"


@pytest.fixture
def two(run):
    """A run with the checkpoints of iterations 1 and 2, and what they hold."""
    first, second = networks_of(1), networks_of(2)
    history = save(run, first, 1)
    save(run, second, 2, history=history)
    return run, parameters_of(first), parameters_of(second)


def iterations_in(table):
    return [json.loads(line)["iteration"] for line in table.read_text().splitlines()]


def names(run):
    return sorted(path.name for path in (run / "checkpoints").iterdir())


# ------------ checkpoints ------------


def test_a_checkpoint_brings_back_everything(two):
    run, _, expected = two
    networks = networks_of(3)
    networks[0].skips = 2
    iteration, history = load_checkpoint(run, networks, {})
    assert iteration == 2 and [row["iteration"] for row in history] == [0, 1, 2]
    assert same(parameters_of(networks), expected)
    assert networks[0].skips == 0
    assert os.readlink(run / "policy") == "checkpoints/000002/policy"
    assert (run / "policy/config.json").exists()


def test_updates_that_were_skipped_before_it_count_after_it(run):
    networks = networks_of(1)
    networks[1].skips = 2
    save(run, networks, 1)
    again = networks_of(2)
    load_checkpoint(run, again, {})
    assert [each.skips for each in again] == [0, 2]


def test_a_checkpoint_is_finished_while_the_run_goes_on(run, monkeypatch):
    """Until it is on the disk there is a draft, which is none; what stops it there is raised."""
    goes_on, real = threading.Event(), checkpoints.finish_checkpoint

    def waits(*about):
        assert goes_on.wait(60)
        real(*about)

    networks, tokenizer = networks_of(1), AutoTokenizer.from_pretrained(TINY)
    history = save(run, networks, 1)
    monkeypatch.setattr(checkpoints, "finish_checkpoint", waits)
    save_checkpoint(run, [*history, {"iteration": 2}], networks, tokenizer, SETTINGS, {})
    assert names(run) == ["000001", "draft"]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may ignore it
    with pytest.raises(KeyboardInterrupt):  # a signal ends the waiting
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        finish_saving()
    signal.signal(signal.SIGINT, before)
    assert names(run) == ["000001", "draft"]
    goes_on.set()
    finish_saving()
    assert names(run) == ["000001", "000002"]

    def full(*about):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoints, "finish_checkpoint", full)
    save_checkpoint(run, [*history, {"iteration": 3}], networks, tokenizer, SETTINGS, {})
    with pytest.raises(OSError, match="No space left"):
        finish_saving()
    finish_saving()  # it is raised once
    monkeypatch.setattr(checkpoints, "finish_checkpoint", real)
    save(run, networks, 4, history=history)  # what is left of it disturbs nobody
    assert names(run) == ["000002", "000004"]


def test_large_checkpoints_are_written_when_they_cost_little_of_the_time(run, monkeypatch):
    monkeypatch.setattr(checkpoints, "CHEAP", 0)
    args = Namespace(iterations=100, run_args=Namespace(save_every=0, keep=9, dtype="float32"))
    rows = [{"iteration": n, "time/total": 10.0} for n in range(100)]
    networks, tokenizer = networks_of(1), AutoTokenizer.from_pretrained(TINY)

    def finished(run, about, *rest):
        real(run, about | {"seconds": 2.5}, *rest)  # as if saving had taken so long

    real = checkpoints.finish_checkpoint
    monkeypatch.setattr(checkpoints, "finish_checkpoint", finished)
    for last in range(1, 14):
        save_checkpoint(run, rows[: last + 1], networks, tokenizer, args, {})
        finish_saving()
    assert names(run) == ["000001", "000006", "000011"]  # 2.5 s of 50 s are 5 %
    monkeypatch.setattr(checkpoints, "CHEAP", 2**30)
    save_checkpoint(run, rows[:15], networks, tokenizer, args, {})
    finish_saving()
    assert names(run)[-1] == "000014"


def test_tensors_that_are_not_finite_are_not_kept():
    tensors = {"a": torch.randn(3, 5).T, "b": torch.tensor(7.0).bfloat16()}
    assert_finite(tensors.items())
    tensors["a"][2, 1] = math.inf
    with pytest.raises(FloatingPointError, match=r"not finite \(a\)"):
        assert_finite(tensors.items())


def test_the_last_ones_and_the_best_are_kept(run):
    history = []
    for iteration, success in enumerate((0.1, 0.5, 0.2, 0.5, None, 0.3), 1):
        history = save(run, networks_of(iteration), iteration, success, history=history)
        best = {1: 1}.get(iteration, 2)  # of equal ones the first
        assert names(run) == sorted({f"{n:06d}" for n in (iteration - 1, iteration, best) if n})
        assert os.readlink(run / "best") == f"checkpoints/{best:06d}/policy"
    sparse = Namespace(iterations=100, run_args=Namespace(save_every=5, keep=1, dtype="float32"))
    for iteration in range(7, 10):
        save(run, networks_of(1), iteration, 0.9 if iteration == 8 else None, sparse, history)
    # 7 to 9 are not due; of 8, the best, the policy is kept, until a checkpoint is due after it
    assert names(run) == ["000002", "000005", "000006"]
    assert os.readlink(run / "best") == "exported/000008"
    assert os.readlink(run / "policy") == "checkpoints/000006/policy"
    assert [path.name for path in (run / "exported").iterdir()] == ["000008"]
    assert same([*read_model(run / "best").parameters()], networks_of(1)[0].trained)
    again = networks_of(9)
    assert load_checkpoint(run, again, {})[0] == 6  # as if it had been killed after 9
    assert os.readlink(run / "best") == "checkpoints/000002/policy"
    save(run, again, 10, 0.7, sparse, history[:7])
    assert names(run) == ["000010"] and not list((run / "exported").iterdir())
    assert os.readlink(run / "best") == "checkpoints/000010/policy"


def test_bfloat16_weights_are_taken_up_with_what_they_were_rounded_from(run):
    networks, others = networks_of(1, dtype=torch.bfloat16), networks_of(2, dtype=torch.bfloat16)
    save(run, networks, 1)
    assert load_checkpoint(run, others, {})[0] == 1
    expected = parameters_of(networks)
    assert same(expected, parameters_of(others))
    assert any((t.bfloat16() != t).any() for t in expected)  # there is something to lose
    dense = [[*policy.plain.parameters()] for policy, _ in (networks, others)]
    assert same(*dense) and torch.bfloat16 in {p.dtype for p in dense[0]}


def test_a_new_best_adapter_is_kept_with_its_moments(run):
    """It is small, and an export needs it."""
    sparse = Namespace(iterations=100, run_args=Namespace(save_every=5, keep=1, dtype="float32"))
    base = network(random_model(1))
    policy = Network(
        "policy", add_adapter(base.model, "policy", LoraConfig(r=4, target_modules="all-linear"))
    )
    policy.optimizer = torch.optim.AdamW(policy.trained, lr=1e-3)
    save(run, [policy], 3, 0.5, sparse)
    assert names(run) == ["000003"] and not (run / "exported").exists()
    assert os.readlink(run / "best") == "checkpoints/000003/policy"


def test_rows_of_several_processes_are_put_together(two):
    """Whatever number of them wrote a checkpoint, and whatever number reads it: three, of which the
    last had no row of the small tensors."""
    run, _, expected = two
    path = run / "checkpoints/000002"
    tensors = load_file(path / "trained.safetensors")
    for rank in range(3):
        name = f"trained-{rank:05d}.safetensors" if rank else "trained.safetensors"
        rows = {}
        for key, tensor in tensors.items():
            if tensor.dim() and key.startswith("policy"):
                size = -(-len(tensor) // 3)
                rows[key] = tensor[rank * size : (rank + 1) * size].clone()
            elif not rank:
                rows[key] = tensor
        save_file(rows, path / name)
        about = json.loads((path / "state.json").read_text())
        about.pop("sum")
        about["files"][name] = [(path / name).stat().st_size, hash_file(path / name)]
        write_json(path / "state.json", about | {"sum": sum_of(about)})
    networks = networks_of(3)
    assert load_checkpoint(run, networks, {})[0] == 2
    assert same(parameters_of(networks), expected)
    (path / "trained-00002.safetensors").unlink()
    assert load_checkpoint(run, networks_of(3), {})[0] == 1
    assert "000002.damaged" in names(run)


def lists_of(seed: int) -> dict[str, list]:
    """What a script keeps beside its networks after so many iterations: groups, and numbers."""
    episodes = random_trajectories(seed, history=True)
    for number, t in enumerate(episodes):
        shown = [bytes([seed]), b"\x89PNG\r\n\x00\xff" * 3, b"a"][: number % 4]
        t.pictures = list(enumerate(shown))
        t.steps[-1].valid, t.steps[-1].progress = False, 0.1 * number
    replay = [episodes[:4], episodes[8:]]
    return {"replay": replay * seed, "accuracies": [0.1 + 0.2 / n for n in range(1, seed + 1)]}


def told_in(lists):
    """What of these lists bears on what is learnt."""
    names = "task token_ids step_ids starts outcome pictures".split()
    groups = [
        [
            [getattr(t, name) for name in names] + [(s.valid, s.progress) for s in t.steps]
            for t in group
        ]
        for group in lists["replay"]
    ]
    return groups, lists["accuracies"]


def test_a_prm_that_is_a_model_and_a_scripts_lists_are_brought_back(run):
    """The PRM's directory is a model that transformers reads; the lists are filled in place."""
    first, second = networks_of(1, prm="model"), networks_of(2, prm="model")
    history = save(run, first, 1, lists=lists_of(1))
    save(run, second, 2, history=history, lists=lists_of(2))
    networks, replay, accuracies, added = networks_of(3, prm="model"), [], [9.0], []
    lists = {"replay": replay, "accuracies": accuracies, "added": added}  # by an edited script
    assert load_checkpoint(run, networks, lists)[0] == 2 and added == []
    assert same(parameters_of(networks), parameters_of(second))
    assert told_in({"replay": replay, "accuracies": accuracies}) == told_in(lists_of(2))
    assert len(replay) == 4 and accuracies == lists_of(2)["accuracies"]
    one, other = (
        flatten([t for g in groups for t in g]) for groups in (replay, lists_of(2)["replay"])
    )
    assert torch.equal(one.token_step, other.token_step) and torch.equal(one.group, other.group)
    kept = AutoModelForCausalLM.from_pretrained(run / "prm")
    assert same([*kept.parameters()], [*second[1].model.parameters()])
    assert not same([*kept.parameters()], [*second[0].model.parameters()])


@pytest.mark.parametrize("how", ("missing", "empty", "truncated", "bit", "foreign"))
@pytest.mark.parametrize("name", ("lists.pt", "prm/model.safetensors"))
def test_damaged_lists_cost_their_checkpoint_too(run, how, name, capsys):
    history = save(run, networks_of(1, prm="model"), 1, lists=lists_of(1))
    save(run, networks_of(2, prm="model"), 2, history=history, lists=lists_of(2))
    damage(run / "checkpoints/000002" / name, how)
    lists = {"replay": [], "accuracies": []}
    assert load_checkpoint(run, networks_of(3, prm="model"), lists)[0] == 1
    assert told_in(lists) == told_in(lists_of(1))
    assert f"000002/{name}" in capsys.readouterr().out
    assert names(run) == ["000001", "000002.damaged"]


def damage(path: Path, how: str) -> None:
    if how == "missing":
        path.unlink()
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "truncated":
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    elif how == "bit":
        content = bytearray(path.read_bytes())
        content[-10] ^= 1  # in state.json a digit of its own hash
        path.write_bytes(content)
    elif how == "foreign":
        path.write_bytes(b"something else altogether")


FILES = (
    "trained.safetensors",
    "policy/model.safetensors",
    "policy/config.json",
    "prm/adapter_model.safetensors",
)


@pytest.mark.parametrize("how", ("missing", "empty", "truncated", "bit", "foreign"))
@pytest.mark.parametrize("name", (*FILES, "state.json"))
def test_a_damaged_checkpoint_is_set_aside_for_the_one_before_it(two, name, how, capsys):
    run, expected, _ = two
    damage(run / "checkpoints/000002" / name, how)
    networks = networks_of(3)
    iteration, history = load_checkpoint(run, networks, {})
    said = capsys.readouterr().out
    assert iteration == 1 and [row["iteration"] for row in history] == [0, 1]
    assert same(parameters_of(networks), expected)
    assert "warning" in said and f"000002/{name}" in said and len(said.strip().splitlines()) == 1
    assert names(run) == ["000001", "000002.damaged"]  # nothing is thrown away
    assert iterations_in(run / "episodes.jsonl") == [1]
    save(run, networks, 2, history=history)  # the run goes on over the place of the damaged one
    assert load_checkpoint(run, networks_of(4), {})[0] == 2


def test_when_no_checkpoint_is_whole_it_says_which_file(two):
    run, *_ = two
    for name in ("000001", "000002"):
        damage(run / "checkpoints" / name / "trained.safetensors", "truncated")
    before = names(run)
    with pytest.raises(SystemExit) as stop:
        load_checkpoint(run, networks_of(3), {})
    (said,) = stop.value.code.splitlines()
    assert "000002/trained.safetensors" in said
    assert names(run) == before  # nothing is lost
    assert iterations_in(run / "metrics.jsonl") == [0, 1, 2]


def test_a_checkpoint_of_a_newer_version_or_another_model_is_refused(two):
    run, *_ = two
    state = run / "checkpoints/000002/state.json"
    about = json.loads(state.read_text())
    for number in (FORMAT + 1, FORMAT - 1):
        state.write_text(json.dumps(about | {"format": number}))
        other = f"000002/state.json: written in format {number}, this version reads {FORMAT}$"
        with pytest.raises(SystemExit, match=other):
            load_checkpoint(run, networks_of(3), {})
    state.write_text(json.dumps(about))
    other = r"000002/trained.safetensors: of another model or version \(policy.\d+"
    with pytest.raises(SystemExit, match=other):
        load_checkpoint(run, networks_of(3, layers=3), {})
    assert names(run) == ["000001", "000002"]


def test_a_half_written_checkpoint_is_skipped_and_written_over(two):
    run, _, expected = two
    shutil.copytree(run / "checkpoints/000002", run / "checkpoints/draft")
    damage(run / "checkpoints/draft/trained.safetensors", "truncated")
    networks = networks_of(3)
    _, history = load_checkpoint(run, networks, {})
    assert history[-1]["iteration"] == 2 and same(parameters_of(networks), expected)
    save(run, networks, 3, history=history)
    assert names(run) == ["000002", "000003"] and load_checkpoint(run, networks, {})[0] == 3


def test_torn_lines_of_the_tables_are_dropped(two):
    run, *_ = two
    for name in ("metrics.jsonl", "episodes.jsonl"):
        with (run / name).open("a") as file:
            file.write('{"iteration": 3, "tas')
    assert load_checkpoint(run, networks_of(3), {})[0] == 2
    for name, expected in (("metrics.jsonl", [0, 1, 2]), ("episodes.jsonl", [1, 2])):
        assert iterations_in(run / name) == expected


class Bomb:
    """What unpickling runs: it leaves a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.mark.parametrize("name", (*FILES[::3], "lists.pt"))
def test_a_pickle_disguised_as_a_checkpoint_executes_nothing(run, tmp_path, name):
    """With a state.json that vouches for it."""
    sign, mark = pickle.dumps(Bomb(tmp_path / "executed")), tmp_path / "executed"
    history = save(run, networks_of(1), 1, lists=lists_of(1))
    save(run, networks_of(2), 2, history=history, lists=lists_of(2))
    path = run / "checkpoints/000002"
    (path / name).write_bytes(sign)
    about = json.loads((path / "state.json").read_text())
    about["files"][name] = [len(sign), hash_file(path / name)]
    about.pop("sum")
    write_json(path / "state.json", about | {"sum": sum_of(about)})
    with contextlib.suppress(SafetensorError, pickle.UnpicklingError):  # adapters are not read
        load_checkpoint(run, networks_of(3), {"replay": [], "accuracies": []})
    assert not mark.exists()
    pickle.loads(sign)  # the bomb is real
    assert mark.exists()


@pytest.mark.parametrize("name", ("pytorch_model.bin", "model.safetensors"))
def test_a_model_of_pickles_is_refused(name, tmp_path):
    model, mark = tmp_path / "model", tmp_path / "executed"
    shutil.copytree(TINY, model)
    (model / "model.safetensors").unlink()
    torch.save({"weight": Bomb(mark)}, model / name)
    said = stopped(ISTAR, "pickles", "--model", model, cwd=tmp_path)
    assert said.startswith(f"--model {model}: ") and len(said.splitlines()) == 1
    assert not mark.exists()
    assert ("pickles" if name.endswith(".bin") else name) in said


# ------------ guards ------------


def test_an_update_that_is_not_finite_is_skipped_and_the_third_in_a_row_ends_the_run(capsys):
    for norm in (math.nan, math.inf, -math.inf):
        policy = network(random_model())
        for _ in range(2):
            assert not policy.may_step(norm)
        assert policy.may_step(0.5)  # a good one in between starts the count anew
        for _ in range(2):
            assert not policy.may_step(norm)
        with pytest.raises(FloatingPointError, match="3 updates in a row"):
            policy.may_step(norm)
        assert capsys.readouterr().out.count("warning: policy: gradient norm") == 5


UPDATES = {  # a network: the script whose function updates it here
    "policy": ISTAR,
    "prm": ISTAR,
    "cross-entropy": "prime_webshop",
    "critic": "ppo_webshop",
}


def updated(kind, home, factor=1.0, **changes):
    """(parameters before, the network after one update, its statistics), by a script's own function
    and plain SGD; what it learns from is multiplied by `factor`."""
    module, episodes = load(UPDATES[kind]), random_trajectories()
    batch, args = flatten(episodes), settings(**changes)
    torch.manual_seed(0)
    learner = network(random_model(0))
    policy, tokens = learner, len(batch.token_step)
    if kind == "critic":
        learner.model.save_pretrained(home / "model")
        learner = network(module.value_model(str(home / "model"), 4), name="critic")
    elif kind != "policy":
        learner = policy.with_adapter("prm", module.lora(4))
    learner.optimizer = torch.optim.SGD(learner.trained, lr=1.0)
    before = [p.detach().clone() for p in learner.trained]

    numbers = factor * -torch.rand(tokens)
    if kind == "policy":
        advantages = factor * torch.randn(batch.num_steps)
        stats = module.policy_update(learner, batch, torch.zeros(tokens), advantages, args)
    elif kind == "prm":
        args.beta *= factor
        stats = module.prm_update(learner, policy, episodes, args)
    elif kind == "cross-entropy":
        owner = batch.step_traj[batch.token_step]
        stats = module.cross_entropy_update(learner, batch, numbers, owner, batch.outcomes, args)
    else:
        args.value_clip = 10.0
        every = torch.arange(tokens)
        stats = module.critic_update(learner, batch, every, torch.zeros(tokens), numbers, args)
    return before, learner, stats


@pytest.mark.parametrize("kind", UPDATES)
def test_a_gradient_that_is_not_finite_moves_nothing(kind, tmp_path):
    before, learner, stats = updated(kind, tmp_path, math.nan)
    assert learner.skips == 1 and math.isnan(stats["grad_norm"])
    assert same(before, learner.trained)
    before, learner, stats = updated(kind, tmp_path)
    assert learner.skips == 0 and stats["grad_norm"] > 0
    assert not same(before, learner.trained)


@pytest.mark.parametrize("kind", UPDATES)
def test_gradients_are_scaled_down_to_the_norm(kind, tmp_path):
    """With SGD at a rate of 1 an update is as long as its gradient."""
    for most in (1e9, 1e-3):
        before, learner, stats = updated(kind, tmp_path, max_grad_norm=most)
        moved = [(old - new).detach().flatten() for old, new in zip(before, learner.trained)]
        length = torch.cat(moved).norm().item()
        assert stats["grad_norm"] > 2e-3, "nothing to scale"
        assert length == pytest.approx(min(most, stats["grad_norm"]), rel=1e-3)


def test_weights_that_are_not_finite_are_not_kept(two):
    run, *_ = two
    for number, name in enumerate(("policy", "prm")):
        networks = networks_of(3)
        networks[number].trained[1].data[0] = math.nan
        with pytest.raises(FloatingPointError, match=name):
            save(run, networks, 3)
        assert "000003" not in names(run)


def test_what_is_recorded_is_json_whatever_the_model_writes(run):
    text = '\ud800 \x00 <|im_end|> \u2028 " \\ 𝕏' * 3
    steps = [Step(text, text, [0.0], False, game_reward=math.nan, progress=math.inf)]
    episode = Trajectory(1, [1, 2], [-1, 0], -math.inf, steps)
    recording = runtime.run.Run.__new__(runtime.run.Run)
    recording.path, recording.board, recording.rows = run, Board(), []
    recording.iteration, recording.panel, recording.networks = 0, [], []
    recording.begun, recording.env = (0.0, 0), None
    recording.args = Namespace(iterations=1, world=None)
    recording.row = {"iteration": 0, "time/elapsed": 0.0, "eval/success": 0.0}
    recording.row |= {"eval/return": math.nan, "policy/loss": math.inf}
    recording.save([episode], advantage=torch.tensor([math.nan]))

    for name in ("metrics.jsonl", "episodes.jsonl"):
        (line,) = (run / name).read_text().splitlines()
        read = json.loads(line, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    assert read["steps"][0]["action"] == text and read["steps"][0]["advantage"] is None
    assert recording.board.rows[0][0] == 0


# ------------ a whole run, in this process, with faults ------------


def begin(script, name, *flags, cwd, iterations=3, check=True):
    """main() of a script with the flags of a short run."""
    common = [*small(script), "--iterations", iterations, "--run-name", name, "--engine", "hf"]
    return run_main(script, *common, *flags, cwd=cwd, check=check)


def stopped(script, name, *flags, cwd, iterations=3) -> str:
    """What a short run says last, which does not end as it should."""
    done = begin(script, name, *flags, cwd=cwd, iterations=iterations, check=False)
    assert done.returncode == 1, done.stdout
    return done.stderr.strip()


def test_weights_of_nan_stop_the_run_with_the_last_good_checkpoint(tmp_path, monkeypatch):
    script = "istar_visual_sokoban"  # whose trajectories have pictures too
    module, calls = load(script), []
    real = module.policy_update

    def poison(policy, *rest):
        stats = real(policy, *rest)
        calls.append(1)
        if len(calls) == 2:
            next(policy.model.parameters()).data.fill_(math.nan)
        return stats

    monkeypatch.setattr(module, "policy_update", poison)
    said = stopped(script, "nan", cwd=tmp_path)
    assert "not finite" in said and "iteration 1 is kept" in said and "--resume runs/nan" in said
    run = tmp_path / "runs/nan"
    batch = json.loads((run / "batch-000002.json").read_text())
    assert len(batch["episodes"]) == TASKS * GROUP
    assert {"old_logprobs", "advantages", "rewards"} <= batch.keys()
    assert batch["episodes"][0]["pictures"] and batch["episodes"][0]["steps"][0]["action"]
    assert names(run) == ["000001"]
    kept = load_file(run / "checkpoints/000001/trained.safetensors")
    assert all(t.isfinite().all() for t in kept.values())


def test_losses_of_nan_are_skipped_counted_and_end_the_run(tmp_path, monkeypatch):
    module = load(ISTAR)
    real = module.policy_loss

    def of_nan(logprobs, *rest):
        return real(logprobs * math.nan, *rest)

    monkeypatch.setattr(module, "policy_loss", of_nan)
    said = stopped(ISTAR, "nan losses", cwd=tmp_path)
    table = rows(tmp_path / "runs/nan losses")
    assert "3 updates in a row" in said
    assert table[1]["policy/loss"] is table[1]["policy/grad_norm"] is None
    assert (tmp_path / "runs/nan losses/batch-000002.json").exists()
    assert "iteration 1 is kept" in said


def test_what_stops_a_script_before_its_run_began_says_so(tmp_path, monkeypatch):
    module = load(ISTAR)
    monkeypatch.setattr(module, "parse", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    before = signal.getsignal(signal.SIGTERM)
    assert stopped(ISTAR, "never", cwd=tmp_path) == "stopped by SIGTERM before a run began"
    assert signal.getsignal(signal.SIGTERM) == before and not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """A run of three iterations, not disturbed."""
    home = tmp_path_factory.mktemp("straight")
    begin(ISTAR, "straight", cwd=home)
    return home / "runs" / "straight"


def assert_equal_runs(one, other):
    assert [*map(without_times, rows(one))] == [*map(without_times, rows(other))]
    assert (one / "episodes.jsonl").read_text() == (other / "episodes.jsonl").read_text()
    for name in ("policy/model.safetensors", "checkpoints/000003/trained.safetensors"):
        assert differing(one, other, name) == []


def test_a_full_disk_leaves_the_last_checkpoint_and_the_run_goes_on_from_there(straight, tmp_path):
    """Files may not outgrow a limit: that of a checkpoint's largest file, or one that the tables
    come to first."""
    run = tmp_path / "runs/straight"
    begin(ISTAR, "straight", cwd=tmp_path, iterations=2)
    files = (run / "checkpoints/000002").rglob("*")
    largest = max(path.stat().st_size for path in files if path.is_file())
    for limit, what in ((largest - 1000, "the checkpoint"), (1000, "the tables")):
        with files_end_at(limit):
            said = stopped(ISTAR, "", "--resume", "runs/straight", cwd=tmp_path)
        last = said.splitlines()[-1]
        assert "the disk is full" in last and "Traceback" not in said, f"{what}: {said}"
        assert names(run) == ["000001", "000002"], what
        assert "iteration 2 is kept" in last
    done = begin(ISTAR, "straight", "--resume", "auto", cwd=tmp_path)
    assert "goes on with runs/straight" in done.stdout
    assert_equal_runs(run, straight)


def test_sigterm_stops_in_seconds_and_a_scheduler_starts_the_same_command_again(straight, tmp_path):
    flags = ["--engine", "hf", *small(ISTAR), "--iterations", "3", "--resume", "auto"]
    command = [sys.executable, str(ROOT / f"{ISTAR}.py"), *flags]
    with (tmp_path / "said").open("w+") as said, (tmp_path / "told").open("w+") as told:
        process = subprocess.Popen(command, cwd=tmp_path, stdout=said, stderr=told)
        end = time.time() + 300
        while not list(tmp_path.glob("runs/*/policy")) and process.poll() is None:
            assert time.time() < end
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 1
        said.seek(0)
        told.seek(0)
        text, (line,) = said.read(), told.read().strip().splitlines()
    assert "nothing to go on with" in text and "Traceback" not in text
    assert line.startswith("stopped by SIGTERM: iteration")
    done = run_main(ISTAR, *flags, cwd=tmp_path)
    (run,) = (tmp_path / "runs").iterdir()
    assert re.fullmatch(ISTAR + r"-9-\d{8}-\d{6}-\d{6}", run.name)
    assert f"goes on with runs/{run.name}" in done.stdout
    assert_equal_runs(run, straight)
    starts = json.loads((run / "run.json").read_text())["starts"]
    assert len(starts) == 2 and len({start["wandb_id"] for start in starts}) == 1


def test_resume_auto_goes_on_with_a_run_whose_flags_are_overridden(straight, tmp_path):
    shutil.copytree(straight, tmp_path / "runs/straight", symlinks=True)
    flags = ["--engine", "hf", *small(ISTAR), "--iterations", "4", "--clip", "0.3"]
    flags += ["--resume", "auto", "--override"]
    done = run_main(ISTAR, *flags, "clip", cwd=tmp_path)
    assert "goes on with runs/straight" in done.stdout
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["straight"]
    assert rows(tmp_path / "runs/straight")[-1]["iteration"] == 4
    said = run_main(ISTAR, *flags, "clipp", cwd=tmp_path, check=False).stderr
    assert said.strip() == "--override clipp: no such flag"


def test_a_bit_that_flips_between_two_starts_costs_an_iteration_not_the_run(straight, tmp_path):
    shutil.copytree(straight, tmp_path / "runs/straight", symlinks=True)
    run = tmp_path / "runs/straight"
    damage(run / "checkpoints/000003/trained.safetensors", "bit")
    done = begin(ISTAR, "straight", "--resume", "auto", cwd=tmp_path)
    assert "000003/trained.safetensors: missing, or not what was written" in done.stdout
    assert_equal_runs(run, straight)


def test_killed_at_random_moments_a_run_ends_as_if_it_had_not_been(tmp_path):
    script = ROOT / "benchmarks" / "kill_and_resume.py"
    command = [sys.executable, str(script), "--kills", "1", "--iterations", "4"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and "**equal**" in done.stdout, done.stdout + done.stderr[-3000:]


# ------------ a LoRA policy ------------


def sizes_in(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


@pytest.fixture(scope="module")
def adapted(tmp_path_factory):
    """A run with a LoRA policy, of which an evaluation before the last one is the best."""
    home, module = tmp_path_factory.mktemp("adapted"), load(ISTAR)
    real = runtime.run.Run.log_episodes

    def worse_and_worse(run, kind, trajectories):
        real(run, kind, trajectories)
        if kind == "eval":
            run.row["eval/success"] = 1 / (1 + run.iteration)

    flags = "--policy-lora-rank 16 --eval-every 1 --learning-rate 1e-2 --keep 1"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runtime.run.Run, "log_episodes", worse_and_worse)
        begin(ISTAR, "adapted", *flags.split(), cwd=home)
    assert module.Args().run_args.dtype == "float32"
    return home / "runs" / "adapted", flags.split()


def merged(checkpoint: Path) -> dict:
    """The base with the checkpoint's adapter in it, by peft."""
    model = PeftModel.from_pretrained(read_model(default_model(ISTAR)), checkpoint / "policy")
    return dict(model.merge_and_unload().named_parameters())


def test_a_lora_policy_is_saved_as_its_adapter_and_exported_once(adapted):
    run, _ = adapted
    assert names(run) == ["000001", "000003"]
    state = load_file(run / "checkpoints/000003/trained.safetensors")
    trained = sum(tensor.nbytes for tensor in state.values())
    assert trained < sizes_in(run / "checkpoints/000003") <= 2 * trained
    assert not list(run.glob("checkpoints/*/policy/model.safetensors"))

    assert sorted(path.name for path in (run / "exported").iterdir()) == ["000001", "000003"]
    assert os.readlink(run / "policy") == "exported/000003"
    assert os.readlink(run / "best") == "exported/000001"
    for link, number in (("policy", "000003"), ("best", "000001")):
        dense = dict(read_model(run / link).named_parameters())
        expected = merged(run / "checkpoints" / number)
        assert dense.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.allclose(dense[name], tensor, atol=1e-6), name
    moved = [differing(run / "exported/000001", run / "exported/000003", "model.safetensors")]
    assert moved[0], "the policy did not learn"


def test_an_export_is_made_by_request_and_read_by_model(adapted, tmp_path):
    """A run that was stopped has adapters; --resume with no more iterations exports them."""
    run = shutil.copytree(adapted[0], tmp_path / "runs/adapted", symlinks=True)
    shutil.rmtree(run / "exported")
    for name, number in (("policy", "000003"), ("best", "000001")):
        (run / name).unlink()
        (run / name).symlink_to(f"checkpoints/{number}/policy")
    said = stopped(ISTAR, "reads", "--model", "runs/adapted/policy", cwd=tmp_path)
    assert "an adapter alone" in said and len(said.splitlines()) == 1
    begin(ISTAR, "", *adapted[1], "--resume", "runs/adapted", cwd=tmp_path)
    for number in ("000001", "000003"):
        one, other = adapted[0] / "exported" / number, run / "exported" / number
        assert differing(one, other, "model.safetensors") == []
    read = ["--model", "runs/adapted/best", "--eval-only"]
    begin(ISTAR, "reads", *read, cwd=tmp_path)


def test_a_lora_run_that_goes_on_is_the_run_that_was_not_stopped(adapted, tmp_path):
    run, flags = tmp_path / "runs/adapted", adapted[1]
    begin(ISTAR, "adapted", *flags, cwd=tmp_path, iterations=2)
    assert os.readlink(run / "policy") == "exported/000002"
    begin(ISTAR, "", *flags, "--resume", "runs/adapted", cwd=tmp_path)
    for name in ("checkpoints/000003/trained.safetensors", "policy/model.safetensors"):
        assert differing(run, adapted[0], name) == []
    linked = {os.readlink(run / name) for name in ("policy", "best")}
    assert linked == {f"exported/{path.name}" for path in (run / "exported").iterdir()}


def test_an_export_of_a_damaged_checkpoint_is_not_taken_for_the_new_one(adapted, tmp_path):
    run = shutil.copytree(adapted[0], tmp_path / "runs/adapted", symlinks=True)
    damage(run / "checkpoints/000003/trained.safetensors", "bit")
    damage(run / "exported/000003/model.safetensors", "foreign")
    begin(ISTAR, "", *adapted[1], "--resume", "runs/adapted", cwd=tmp_path)
    assert differing(run, adapted[0]) == []


def test_a_whole_policy_is_exported_in_the_precision_of_dtype(tmp_path):
    begin(ISTAR, "narrow", "--dtype", "bfloat16", cwd=tmp_path, iterations=1)
    kept = tmp_path / "runs/narrow/checkpoints/000001"
    policy = load_file(kept / "policy/model.safetensors")
    assert {tensor.dtype for tensor in policy.values()} == {torch.bfloat16}
    assert json.loads((kept / "policy/config.json").read_text())["dtype"] == "bfloat16"
    state = load_file(kept / "trained.safetensors")
    assert {tensor.dtype for tensor in state.values()} == {torch.float32}


# ------------ what --resume refuses, and what a run says of itself ------------


@pytest.fixture
def copy(straight, tmp_path):
    """A copy of that run, as runs/straight below tmp_path."""
    return shutil.copytree(straight, tmp_path / "runs/straight", symlinks=True)


RESUME = ["--resume", "runs/straight"]


def test_flags_that_differ_are_listed_and_refused_unless_named(copy, tmp_path):
    other = [*RESUME, "--learning-rate", "5e-4", "--clip", "0.3"]
    said = stopped(ISTAR, "", *other, cwd=tmp_path)
    assert "--learning-rate 0.0005, was 0.00025" in said and "--clip 0.3, was 0.2" in said
    assert "--override" in said
    said = stopped(ISTAR, "", *other, "--override", "clip", "no-such", cwd=tmp_path)
    assert said == "--override no_such: no such flag"
    begin(ISTAR, "", *other, "--override", "learning-rate", "clip", cwd=tmp_path, iterations=4)
    assert [row["iteration"] for row in rows(copy)] == [0, 1, 2, 3, 4]
    assert json.loads((copy / "args.json").read_text())["clip"] == 0.3


def test_a_run_with_a_flag_that_there_is_no_more_is_refused(copy, tmp_path):
    """Else it would go on with another algorithm than it began with."""
    shutil.rmtree(copy / "checkpoints/000003")
    saved = json.loads((copy / "args.json").read_text())
    (copy / "args.json").write_text(json.dumps(saved | {"step_reward": "implicit"}))
    before = {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()}
    said = stopped(ISTAR, "", *RESUME, cwd=tmp_path)
    assert len(said.splitlines()) == 1 and said.startswith("--resume runs/straight: ")
    assert "--step-reward implicit" in said
    assert {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()} == before

    said = stopped(ISTAR, "", *RESUME, "--eval-only", "--override", "eval-only", cwd=tmp_path)
    assert said.endswith("goes on trains; evaluate --model runs/straight/policy")
    auto = ["--resume", "auto", "--eval-only"]
    done = begin(ISTAR, "", *auto, cwd=tmp_path)
    assert "nothing to go on with, a new run" in done.stdout


HOLDER = """
import fcntl, sys
file = open(sys.argv[1])
fcntl.flock(file, fcntl.LOCK_EX)
print("it is mine", flush=True)
sys.stdin.read()
"""


def test_a_run_is_not_begun_in_anothers_place_nor_by_two_processes(copy, tmp_path):
    said = stopped(ISTAR, "straight", cwd=tmp_path)
    assert "--run-name straight" in said and "--resume" in said
    others = [s for s in READY if environment(s) == environment(ISTAR) and s != ISTAR]
    said = stopped(others[0], "", *RESUME, cwd=tmp_path)
    assert f"made by {ISTAR}.py" in said or "other flags" in said

    command = [sys.executable, "-c", HOLDER, copy / "lock"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, **pipes) as other:
        other.stdout.readline()
        said = stopped(ISTAR, "", *RESUME, cwd=tmp_path)
        assert said == "runs/straight: another process is at work there"
        other.stdin.close()
    begin(ISTAR, "", *RESUME, cwd=tmp_path)


def test_another_model_under_the_same_name_is_refused(copy, tmp_path):
    """The PRM's adapter belongs to the model that the run began with."""
    start = json.loads((copy / "run.json").read_text())
    start["starts"][0]["hashes"]["model"] = "0" * 64
    (copy / "run.json").write_text(json.dumps(start))
    said = stopped(ISTAR, "", *RESUME, cwd=tmp_path)
    assert f"--model {load(ISTAR).Args().model}" in said and "hash" in said


def test_versions_are_of_what_is_imported(tmp_path, monkeypatch):
    """Of two packages with a name it is the one that comes first in sys.path."""
    other = tmp_path / "torch-0.0.1.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Name: torch\nVersion: 0.0.1\n")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    told = provenance(Namespace(seed=1), Namespace(name="a world"), {})
    assert told["versions"]["torch"] == version("torch")


def test_a_run_says_what_made_it(straight):
    (start,) = json.loads((straight / "run.json").read_text())["starts"]
    assert 0.2 < start["peak_memory_gib"] < 20  # torch alone is 0.2
    assert {"torch", "transformers", "peft", "python"} <= start["versions"].keys()
    assert start["seed"] == int(SMALL.split()[-1])
    assert f"{ISTAR}.py" in start["command"] and SMALL.split()[0] in start["command"]
    assert start["hardware"]["cores"] >= 1 and start["hardware"]["memory_gib"] > 1
    assert start["time"]
    assert start["hashes"]["model"] == hash_files(default_model(ISTAR))
    assert start["hashes"]["panel"]
    git = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    assert start["commit"] == (git.stdout.strip() if git.returncode == 0 else None)


def test_memory_files_and_processes_do_not_grow(tmp_path):
    """30 iterations end within 5 % of the memory of iteration 10."""
    flags = "--engine hf --iterations 30 --tasks-per-iteration 2 --group-size 2 --max-steps 2"
    flags += " --eval-tasks 2 --eval-samples 1 --eval-every 20 --run-name long"
    command = [sys.executable, str(ROOT / f"{ISTAR}.py"), *flags.split()]
    with (tmp_path / "said").open("w") as said:
        process = subprocess.Popen(command, cwd=tmp_path, stdout=said, stderr=said)
    seen, table = {}, tmp_path / "runs/long/metrics.jsonl"
    while process.poll() is None:
        done = table.read_text().count("\n") - 1 if table.exists() else -1
        if done >= 10:
            try:
                status = Path(f"/proc/{process.pid}/status").read_text()
                open_files = len(os.listdir(f"/proc/{process.pid}/fd"))
                children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
                memory = int(status.split("VmRSS:")[1].split()[0])
            except (OSError, IndexError):
                break
            seen[done] = memory, open_files, len(children.split())
        time.sleep(0.05)
    assert process.wait() == 0, (tmp_path / "said").read_text()[-2000:]
    first, last = (seen[n] for n in (min(seen), max(seen)))
    assert min(seen) <= 12 and max(seen) >= 27
    assert last[0] <= 1.05 * first[0], (first, last)
    assert last[1] <= first[1] + 2 and last[2] <= first[2], (first, last)
