"""What a GPU has to prove, on one card or two, in about half an hour where nothing is compiled yet:

    python -m pytest -m gpu                     on the machine's cards
    python -m pytest -m gpu --gpu-model DIR     with this model, and not random weights of 0.5B
    python -m pytest -m gpu --on-cpu            the same tests on a CPU, wherever that is honest

Each test tells its figures; the end has one table of all, to paste into an issue. What is measured
is measured by tests/on_card.py, in processes of their own, so that this one has no card."""

import json
import os
import platform
import re
import signal
import subprocess
import sys
import time
from importlib.metadata import version
from importlib.util import find_spec

import pytest
import torch
from conftest import ROOT
from safetensors.torch import load_file
from test_processes import launch, rows, sharded_peaks
from test_requirements import pins

pytestmark = pytest.mark.gpu
vllm = pytest.mark.skipif(not find_spec("vllm"), reason="no vllm")  # the others need the trainer
WORKER = str(ROOT / "tests" / "on_card.py")
QWEN = {  # of Qwen2.5: hidden, intermediate, layers, heads, key-value heads, vocabulary, tied
    "0.5b": (896, 4864, 24, 14, 2, 151936, True),
    "1.5b": (1536, 8960, 28, 12, 2, 151936, True),
    "stand-in": (256, 512, 2, 4, 2, 4096, True),
}
ENVIRONMENT = os.environ | {"GLOO_SOCKET_IFNAME": "lo"}
DRIVER = "580.65.06"  # CUDA 13.0's
SMALL = "--tasks-per-iteration 4 --group-size 4 --max-steps 4 --eval-tasks 4 --eval-samples 1"
SMALL += " --eval-every 9 --seed 5 --engine-gpu-share 0.3"
LONG = "--max-context-tokens 2048 --max-action-tokens 16"  # its tokens are bytes


# ------------ where it runs ------------


@pytest.fixture(scope="session", autouse=True)
def cards(request) -> int:
    """How many there are; 0: a CPU stands in for them."""
    if request.config.option.on_cpu:
        return 0
    if not torch.cuda.device_count():
        pytest.skip("no GPU; --on-cpu runs on a CPU what can be run there")
    return torch.cuda.device_count()


@pytest.fixture(scope="session")
def on_card(cards):
    if not cards:
        pytest.skip("only a card can tell")


@pytest.fixture
def two(cards):
    """Processes are on two cards, or on a CPU."""
    if cards == 1:
        pytest.skip("there is one card")


@pytest.fixture
def figure(record_property, capsys):
    """figure(name, value, low, high): tell it at once; whether it is in its bounds."""

    def tell(name: str, value, low=None, high=None) -> bool:
        numbers = isinstance(value, float) and not isinstance(value, bool)
        shown = f"{value:.4g}" if numbers else str(value)
        bound = " to ".join(f"{bound:g}" for bound in (low, high) if bound is not None)
        if bound and (low is None or high is None):
            bound = f"{'at most' if low is None else 'at least'} {bound}"
        holds = (low is None or value >= low) and (high is None or value <= high)
        with capsys.disabled():  # a run that is stopped has told what it measured
            print(f"\n{name}: {shown} ({bound or 'told'})", end="", flush=True)
        record_property("figure", [name, shown, bound, holds])
        return holds

    return tell


def measured(name: str, **arguments) -> dict:
    """What a function of tests/on_card.py returns, in a process of its own."""
    command = [sys.executable, WORKER, name, json.dumps(arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=400)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return json.loads(done.stdout.strip().splitlines()[-1])


@pytest.fixture(scope="session")
def model(request, cards, tmp_path_factory) -> str:
    """A directory: of --gpu-model, or of random weights in the shape of Qwen2.5-0.5B; on a CPU in a
    small one."""
    given = request.config.option.gpu_model
    if given:
        return given
    path = str(tmp_path_factory.mktemp("model") / "model")
    measured("build", path=path, shape=QWEN["0.5b" if cards else "stand-in"])
    return path


@pytest.fixture(scope="session")
def large(on_card, tmp_path_factory) -> str:
    """Random weights in the shape of Qwen2.5-1.5B."""
    path = str(tmp_path_factory.mktemp("large") / "model")
    measured("build", path=path, shape=QWEN["1.5b"], dtype="bfloat16")
    return path


class Found(dict):
    """What an engine told; who asks for what it could not tell sees why."""

    def __missing__(self, name):
        failed = [text for text in self.values() if isinstance(text, str) and "Traceback" in text]
        raise AssertionError("\n".join([f"no {name}", *failed]))


@pytest.fixture(scope="session")
def engine(model, cards):
    """engine(dtype): all that one engine told in this precision, which is asked once."""
    if not find_spec("vllm"):
        pytest.skip("no vllm")
    found = {}

    def ask(dtype: str) -> Found:
        if dtype not in found:
            number = 20_000 if cards else 2_000
            try:
                found[dtype] = Found(measured("engine", path=model, dtype=dtype, number=number))
            except (AssertionError, subprocess.TimeoutExpired) as error:
                found[dtype] = Found(engine=f"Traceback {error}")
        return found[dtype]

    return ask


# ------------ versions ------------


def version_of(name: str) -> list[int]:

    return [int(part) for part in name.split(".")]


def test_versions(figure, engine, cards):
    """Those of the pins."""
    kind = "" if cards else "-cpu"
    asked = pins(f"requirements{kind}.txt") | {"torch": pins("constraints-gpu.txt")["torch"]}
    names = ["torch", f"vllm{kind}", "transformers", "peft", "accelerate"]
    here = {name: version(name) for name in names}
    told = ", ".join(f"{name} {number}" for name, number in here.items())
    held = figure("versions", f"Python {platform.python_version()}, {told}")
    if cards:
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = subprocess.run(query, capture_output=True, text=True).stdout.split()[0]
        figure("driver", driver)
        held &= figure(f"it is {DRIVER} or later", version_of(driver) >= version_of(DRIVER), low=1)
        card = torch.cuda.get_device_properties(0)
        figure("cards", f"{cards} x {card.name}, {card.total_memory / 2**30:.0f} GiB")
        held &= figure("compute capability", card.major + card.minor / 10, low=8.0)
    figure("vLLM's runner", engine("bfloat16")["runner"])
    other = {name for name in names if here[name].split("+")[0] != asked[name].split("+")[0]}
    assert held and not other, f"not as pinned: {other}"


# ------------ the engine ------------

PRECISIONS = [("bfloat16", 0.02), ("float32", 1e-3)]  # most of the mean difference [nats]


@pytest.mark.parametrize("dtype, most", PRECISIONS)
def test_log_probabilities(dtype, most, engine, figure):
    """Engine against trainer, before and after an update that is felt."""
    found = engine(dtype)
    assert found["not loaded"][0] > 2 * found["after"][0]
    held = [figure(f"{dtype}, {when}, mean [nats]", found[when][0], high=most) for when in TIMES]
    assert all(held)


TIMES = ("before", "after")


@pytest.mark.parametrize("dtype, most", PRECISIONS)
def test_cycles_of_sleep_training_and_loading(dtype, most, engine, figure):
    """Three; after the last one the engine is a fresh one's equal."""
    found = engine(dtype)
    cycles = [mean for mean, _ in found["cycles"]]
    held = figure(f"{dtype}, largest mean of 3 cycles [nats]", max(cycles), high=most)
    away = measured("fresh", kept=found["kept"], dtype=dtype)["fresh"]
    assert figure(f"{dtype}, against a fresh engine [nats]", away[0], high=most / 2) and held


def test_memory_of_ten_cycles(engine, figure, cards):
    """While the engine sleeps, and its growth; on a CPU that of the most that was resident."""
    found = engine("bfloat16")
    held = figure("growth in ten cycles [GiB]", found["growth"], high=0.1)
    if cards:
        held &= figure("asleep, besides the trainer [GiB]", found["asleep"], high=3.0)
    assert held


def test_frequencies(engine, figure):
    for dtype in ("bfloat16", "float32"):
        found = engine(dtype)
        for temperature, off in found["frequencies"].items():
            name = f"{dtype}, {found['drawn']} samples at {temperature}, chi2 [sd]"
            assert figure(name, off, high=4.5)
        assert found["mistaken"] > 10  # the other temperature would be seen


def test_templates_and_stops(engine, figure):
    found = engine("bfloat16")
    wrong, ended, count = found["stops"]
    assert figure("ids are the template's", found["templates"]) and found["templates"]
    assert figure(f"wrong ends of {count}, {ended} by a stop", wrong, high=0) and ended > count / 2


def test_first_ratios(engine, figure):
    """Nothing has been learnt before the first minibatch: ratios that are not 1 are noise."""
    found = engine("bfloat16")
    figure("distance of a step's ratio from 1 by rounding, largest", found["rounding"])
    most = found["first ratios"]
    assert figure("distance of the first minibatch's ratios from 1", most, high=0.05)


def test_flash_attention(engine, figure, cards):
    """In the trainer; on a card in the engine too."""
    found = engine("bfloat16")
    figure("the engine's attention", " ".join(found["attention"]))
    assert figure("the trainer's is flash", found["trainer's flash"])
    assert not cards or all(name.startswith("FlashAttention") for name in found["attention"])


def test_weight_sync(engine, figure):
    for dtype in ("bfloat16", "float32"):
        assert figure(f"{dtype}, load after sleep [s]", engine(dtype)["load"], high=10)


@vllm
def test_lora_in_the_process(model, figure):
    """Updates that are small beside a weight reach what is sampled. A small random model does not
    tell an adapter from a merged one, whose share is nearly as large: a card's or a trained one
    has to (--gpu-model)."""
    found = measured("lora", path=model, first_rate=1e-5, least=0.5)
    figure("rate of ten steps", found["rate"])
    figure("change relative to the weights", found["relative"])
    figure("spread of episodes' shifts by the trainer [nats]", found["shift"])
    figure("share of it in the engine", found["share"])
    for name, value in zip(("share", "correlation"), found["own"]):
        figure(f"{name} of the trainer's own bfloat16", value)
    assert figure("correlation with the engine's", found["correlation"], low=0.95)


# ------------ memory and speed ------------


@pytest.mark.parametrize("algorithm, rank", [("RLOO", 0), ("iStar", 16)])
def test_peak(algorithm, rank, figure, model, cards):
    """Of an iteration's updates, against the prediction; on a CPU, where libraries take their own
    part beside so small a model, within a third."""
    path = "qwen-0.5b" if cards else model
    found = measured("peak", path=path, prm_rank=rank, tokens=4096)
    figure(f"{algorithm}, peak [MiB]", found["measured"] / 2**20)
    low, high = (0.85, 1.05) if cards else (0.67, 1.33)
    share = found["measured"] / found["predicted"]
    assert figure(f"{algorithm}, measured / predicted", share, low, high)


def test_speed_of_an_update(large, figure):
    found = measured("update", path=large)
    figure("torch.mm in bfloat16 [TFLOP/s]", found["mm"])
    assert figure("update, 1.5B, share of it", found["share"], low=0.35)


@vllm
def test_speed_of_decoding(large, figure):
    rate = measured("decode", path=large)["decode"]
    assert figure("decode, 1.5B, 64 sequences [tokens/s]", rate, low=3000)


# ------------ scripts ------------


def start(home, name: str, script: str, *flags: str, **options) -> subprocess.Popen:
    command = [sys.executable, WORKER, "script", script, *SMALL.split(), *flags]
    log = (home / f"{name}.log").open("w")
    command += ["--run-name", name, "--resume", "auto"]
    options |= dict(cwd=home, stdout=log, stderr=subprocess.STDOUT)
    return subprocess.Popen(command, env=ENVIRONMENT, **options)


def ended(process: subprocess.Popen, home, name: str) -> None:
    assert process.wait(timeout=400) == 0, (home / f"{name}.log").read_text()[-4000:]


@vllm
def test_a_script_trains(model, figure, tmp_path):
    flags = ["--model", model, *LONG.split(), "--dtype", "bfloat16", "--engine", "vllm"]
    flags += ["--iterations", "2"]
    ended(start(tmp_path, "first", "istar_sokoban", *flags), tmp_path, "first")
    table = rows(tmp_path / "runs" / "first", "metrics.jsonl")[1:]
    figure("an iteration [s]", table[-1]["time/total"])
    assert len(table) == 2 and all(row["policy/grad_norm"] > 0 for row in table)
    assert figure("policy/engine_gap [nats]", max(r["policy/engine_gap"] for r in table), high=0.02)


def test_kill_and_resume(model, cards, figure, tmp_path):
    """Bit for bit, with fused AdamW: a run that is killed in its second iteration and taken up."""
    flags = ["--engine", "hf", "--iterations", "3"]
    if cards:
        flags += ["--model", model, *LONG.split(), "--dtype", "bfloat16"]
    runs = tmp_path / "runs"
    whole = start(tmp_path, "whole", "istar_sokoban", *flags)
    if cards:  # of a card's memory there is for one
        ended(whole, tmp_path, "whole")
    killed = start(tmp_path, "killed", "istar_sokoban", *flags)
    while killed.poll() is None and not (runs / "killed/checkpoints/000001").exists():
        time.sleep(0.02)
    killed.send_signal(signal.SIGKILL)
    assert killed.wait() == -signal.SIGKILL, (tmp_path / "killed.log").read_text()[-4000:]
    ended(start(tmp_path, "killed", "istar_sokoban", *flags), tmp_path, "killed")
    ended(whole, tmp_path, "whole")
    assert "goes on with" in (tmp_path / "killed.log").read_text()
    one, two = (
        load_file(runs / name / "checkpoints/000003/trained.safetensors")
        for name in ("whole", "killed")
    )
    assert one.keys() == two.keys() and any(name.endswith("exp_avg_sq") for name in one)
    away = sum(not torch.equal(one[name], two[name]) for name in one)
    assert figure(f"tensors of {len(one)} that differ", away, high=0)


@vllm
def test_a_model_that_sees(figure, tmp_path):
    """The tiny Qwen2.5-VL, in the trainer and in vLLM, with torchvision if it is installed."""
    flags = ["--iterations", "1", "--engine", "vllm", "--max-action-tokens", "24"]
    flags += ["--dtype", "float32"]  # in bfloat16 rounding would hide a picture read differently
    ended(start(tmp_path, "seeing", "rloo_visual_sokoban", *flags), tmp_path, "seeing")
    (row,) = rows(tmp_path / "runs" / "seeing", "metrics.jsonl")[1:]
    figure("torchvision", "installed" if find_spec("torchvision") else "not installed")
    assert figure("policy/engine_gap [nats]", row["policy/engine_gap"], high=1e-3)


# ------------ two cards ------------

UPDATES = [("torchrun", ""), ("fsdp", ""), ("fsdp", "untied")]


@pytest.mark.usefixtures("two")
@pytest.mark.parametrize("kind, option", UPDATES)
def test_the_update_of_two_is_that_of_one(kind, option, figure, tmp_path):
    """The gradients of each optimiser step of iStar, relative to their length."""
    divided, options = str(ROOT / "tests" / "divided.py"), option.split()
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    command = [sys.executable, divided, "istar_sokoban", str(tmp_path / "one"), *options]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    launch(kind, divided, "istar_sokoban", tmp_path / "two", *options, cwd=tmp_path)
    steps, away = {}, 0.0
    one, two = (torch.load(tmp_path / name / "istar_sokoban.pt") for name in ("one", "two"))
    for name in one:
        if re.fullmatch(r"\w+\.\d+\.\d+", name):
            steps.setdefault(name.rpartition(".")[0], []).append(name)
    assert {*steps} == {"policy.0", "policy.1", "prm.0"}
    for names in steps.values():
        a, b = (torch.cat([each[name].flatten() for name in names]) for each in (one, two))
        away = max(away, ((a - b).norm() / a.norm()).item())
    name = " ".join(["FSDP" if kind == "fsdp" else "copies", option]).strip()
    assert figure(f"{name}, difference of gradients", away, high=1e-5)


@pytest.mark.usefixtures("two")
def test_peak_of_a_sharded_prm(cards, figure, tmp_path):
    found = sharded_peaks(QWEN["0.5b" if cards else "stand-in"], tmp_path)
    figure("update's peak [GiB]", found["update"] / 2**30)
    assert figure("PRM's by it", found["prm"] / found["update"], high=1.1)


@pytest.mark.usefixtures("two")
def test_a_rank_without_memory_ends_all(figure, tmp_path, monkeypatch):
    monkeypatch.setenv("FAULT", str(tmp_path / "when"))
    flags = [*SMALL.split(), "--engine", "hf", "--processes", "2", "--iterations", "9"]
    done = launch("torchrun", WORKER, "script", "rloo_sokoban", *flags, cwd=tmp_path, check=False)
    seconds = time.time() - float((tmp_path / "when").read_text())
    assert done.returncode and "out of memory" in done.stdout + done.stderr
    assert figure("until all had ended [s]", seconds, high=60)
