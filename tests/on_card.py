"""What tests/test_gpu.py measures, each in a process of its own: a card takes one engine in a
process, and memory is that of what is measured.

    python tests/on_card.py NAME JSON    prints what NAME(**JSON) returns, as JSON
    python tests/on_card.py script SCRIPT FLAGS...    runs a script of the root

The script has torch's deterministic algorithms and fused AdamW. FAULT in the environment: the
second process has no memory left in its second update, and FAULT is the file that says when [s].
"""

import copy
import functools
import gc
import json
import math
import os
import random
import runpy
import sys
import time
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import runtime.networks
from runtime.data import Step, Trajectory, flatten, micro_batches, sum_per_step
from runtime.distributed import fsdp, processes
from runtime.engines import SamplingParams
from runtime.engines.vllm import VllmEngine
from runtime.memory import shape_of
from runtime.models import read_chat, read_tokenizer
from runtime.networks import Network, action_logprobs, add_adapter, batch_logprobs

import torch
from conftest import ROOT, answers, load, settings
from test_engines import contexts_of, sampling_of
from test_templates import CHATML, byte_level
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

sys.path.insert(0, str(ROOT / "benchmarks"))
from memory import Setting, measured, most_bytes, networks, random_qwen, reset_peak
from throughput import resident

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
LORA_RANK = 16
BINS = 50  # of tokens with about the same probability in sum


# ------------ a model of a shape, with a tokenizer of bytes and ChatML ------------


def build(path: str, shape: list, seed: int = 0, dtype: str = "float32") -> dict:
    """Save a random Qwen2 of this shape, as benchmarks/memory.py has it. Embeddings are wide enough
    that log-probabilities differ; the first layer outweighs them, else a head that is tied to them
    says what was last read, and the layers after it, which would multiply rounding."""
    torch.manual_seed(seed)
    with torch.device(DEVICE):
        model = random_qwen(tuple(shape))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=byte_level(["<|im_start|>", "<|im_end|>"]),
        chat_template=CHATML,
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
    )
    first = model.model.layers[0]
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(2)
        for projection in (first.self_attn.o_proj, first.mlp.down_proj):
            projection.weight.mul_(10)
    for config in (model.config, model.generation_config):
        config.eos_token_id = config.pad_token_id = tokenizer.eos_token_id
    model.to(getattr(torch, dtype)).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return {}


def policy_of(path: str, dtype=torch.float32):

    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype).to(DEVICE)


# ------------ one engine ------------


class Stage:
    """An engine on the model of a path, and its trainer."""

    def __init__(self, path: str, dtype: str, eager: bool = True, **changes):

        import vllm

        if CUDA and eager:  # no CUDA graphs, whose capture takes time
            vllm.LLM = functools.partial(vllm.LLM, enforce_eager=True)
        defaults = dict(max_action_tokens=32, max_context_tokens=2048, policy_lora_rank=0)
        defaults |= dict(max_steps=4, engine_gpu_share=0.3, engine_memory=1)
        self.args = settings(dtype=dtype, **defaults | changes)
        self.free = torch.cuda.mem_get_info()[0] if CUDA else 0  # [bytes]
        config = json.loads(Path(path, "config.json").read_text())
        self.path, self.stop, self.vocabulary = path, config["eos_token_id"], config["vocab_size"]
        self.engine = VllmEngine(path, [self.stop], self.args)

    def train(self):
        """The trainer's model, which the engine then has too."""
        self.model = policy_of(self.path)
        self.engine.load(self.model)

    def contexts(self, count: int = 12, longest: int = 400) -> list[list[int]]:

        return contexts_of(self.model, count, longest)

    def asked(self, contexts, **changes) -> list:
        """(context, (ids, log-probabilities)) of each."""

        sampling = sampling_of(**{"max_tokens": self.args.max_action_tokens} | changes)
        return [*zip(contexts, answers(self.engine, contexts, sampling))]

    def score(self, sequences: list[list[int]]) -> list[list[float]]:
        """The engine's log-probability of each token of these sequences but the first."""

        one, found = SamplingParams(max_tokens=1), {}
        finish = self.engine.finish

        def finish_and_keep(output):
            ids = list(output.prompt_token_ids)
            places = zip(ids[1:], output.prompt_logprobs[1:])
            found[tuple(ids)] = [place[token].logprob for token, place in places]
            finish(output)

        scoring = self.engine.sampling(one)
        scoring.prompt_logprobs, scoring.skip_reading_prefix_cache = 0, True
        self.engine.finish = finish_and_keep
        try:
            answers(self.engine, sequences, one)
        finally:
            self.engine.finish = finish
            self.engine.params.clear()
        return [found[tuple(ids)] for ids in sequences]


def batch_of(samples):

    trajectories = []
    for number, (context, (ids, logprobs)) in enumerate(samples):
        trajectories.append(Trajectory(number))
        trajectories[-1].append(context, ids)
        trajectories[-1].steps.append(Step("", "", logprobs))
    return flatten(trajectories)


def differences(stage: Stage, samples) -> list[float]:
    """[mean, largest] difference between the engine's and the trainer's log-probability of what was
    sampled [nats]."""

    batch = batch_of(samples)
    ours = batch_logprobs(Network("policy", stage.model), batch, stage.args)
    away = (ours - batch.engine_logprobs).abs()
    return [away.mean().item(), away.max().item()]


def move(model, seed: int) -> None:
    """An update that log-probabilities feel: every parameter by a tenth of its spread."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            size = 0.1 * parameter.std().item() or 0.01
            parameter += size * torch.randn_like(parameter)


def moved(stage: Stage, seed: int) -> None:
    """A cycle: the engine sleeps, the trainer updates, the engine gets the weights."""
    stage.engine.sleep()
    move(stage.model, seed)
    begin = time.perf_counter()
    stage.engine.load(stage.model)
    stage.seconds = time.perf_counter() - begin


def what_runs(stage: Stage) -> dict:
    def runner(worker):
        return type(worker.model_runner).__module__

    def attention(model):
        return sorted({type(m.impl).__name__ for m in model.modules() if hasattr(m, "impl")})

    llm = stage.engine.llm
    return {"runner": llm.collective_rpc(runner)[0], "attention": llm.apply_model(attention)[0]}


def before_and_after_updates(stage: Stage) -> dict:
    """An update that the log-probabilities feel; then three cycles of sleep, training, loading and
    sampling, whose weights and last samples are kept for a fresh engine."""
    found = {"before": differences(stage, stage.asked(stage.contexts()))}
    move(stage.model, 1)
    found["not loaded"] = differences(stage, stage.asked(stage.contexts()))
    stage.engine.load(stage.model)
    found["after"] = differences(stage, stage.asked(stage.contexts()))
    found["cycles"] = []
    for seed in (2, 3, 4):
        moved(stage, seed)
        samples = stage.asked(stage.contexts())
        found["cycles"].append(differences(stage, samples))
    found["load"] = stage.seconds
    sequences = [context + ids for context, (ids, _) in samples]
    kept = Path(stage.path).parent / f"{Path(stage.path).name}-{stage.args.run_args.dtype}"
    Path(f"{kept}.json").write_text(json.dumps([sequences, stage.score(sequences)]))
    # as an engine has them: from_pretrained rounds where it reads, as load does
    stage.model.save_pretrained(kept)
    return found | {"kept": str(kept)}


def memory_of_ten_cycles(stage: Stage) -> dict:
    """GiB: of a card what the process has while the engine sleeps, without the trainer's tensors;
    else the most that was resident. The first of the cycles, and its growth to the last."""
    sizes = []
    for seed in range(10):
        stage.engine.sleep()
        gc.collect()
        if CUDA:
            torch.cuda.empty_cache()
            trainer = sum(p.numel() * p.element_size() for p in stage.model.parameters())
            sizes.append((stage.free - torch.cuda.mem_get_info()[0] - trainer) / 2**30)
        moved(stage, 10 + seed)
        stage.asked(stage.contexts(4))
        if not CUDA:
            sizes.append(resident() * 1e9 / 2**30)
    return {"asleep": sizes[0], "growth": sizes[-1] - sizes[1]}  # the first one warms up


def frequencies(stage: Stage, number: int) -> dict:
    """How far the frequencies of tokens are from the trainer's probabilities, at two temperatures:
    chi squared over bins of about equal probability, less its mean, in its standard deviations.
    mistaken: the same, least, if the temperature were the other one."""
    (context,), off = stage.contexts(1, 40), {}
    with torch.no_grad():
        logits = stage.model(input_ids=torch.tensor([context], device=DEVICE)).logits[0, -1]
    probabilities = {t: (logits.double().cpu() / t).softmax(-1) for t in (1.0, 0.6)}
    for temperature in probabilities:
        drawn = stage.asked([context] * number, max_tokens=1, temperature=temperature)
        tokens = torch.tensor([ids[0] for _, (ids, _) in drawn])
        for assumed, exact in probabilities.items():
            off[temperature, assumed] = chi_squared(tokens, exact)
    found = {f"{t}": off[t, t] for t in probabilities}
    return {"frequencies": found, "drawn": number, "mistaken": min(off[1.0, 0.6], off[0.6, 1.0])}


def chi_squared(tokens: torch.Tensor, exact: torch.Tensor) -> float:
    """Of drawn tokens [n] against probabilities [vocabulary], in standard deviations."""
    falling, order = exact.sort(descending=True)
    bins = torch.empty_like(order)
    bins[order] = ((falling.cumsum(0) - falling / 2) * BINS).long().clamp(max=BINS - 1)
    seen = torch.bincount(bins[tokens], minlength=BINS).double()
    expected = len(tokens) * torch.zeros_like(seen).index_add(0, bins, exact)
    there = expected > 5
    chi = ((seen - expected)[there].square() / expected[there]).sum().item()
    freedom = int(there.sum()) - 1
    return (chi - freedom) / math.sqrt(2 * freedom)


def templates_and_stops(stage: Stage) -> dict:
    """Of a conversation of three turns: whether its ids are those of the whole template. Of answers
    that a quarter of the vocabulary stops: how many do not end with the first token that stops
    them, or are longer than they may be."""
    tokenizer = read_tokenizer(stage.path, stage.model, False)
    chat, rng = read_chat(tokenizer, [stage.stop], stage.path), random.Random(0)
    ids, turns = chat.prompt("What is a wall?"), []
    turns.append({"role": "user", "content": "What is a wall?"})
    for turn in range(2):
        text = rng.choice(("It is a box.", "I push left."))
        action = [*chat.encode(text), stage.stop]  # as if it had been sampled
        stage.asked([ids], max_tokens=4)  # the engine raises where it has read other ids
        turns += [{"role": "assistant", "content": text}, {"role": "user", "content": f"Go {turn}"}]
        ids = ids + action + chat.observation(f"Go {turn}", action)
    whole = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    same = ids == tokenizer.encode(whole, add_special_tokens=False)

    stops, wrong, ended = {*range(0, stage.vocabulary, 4)}, 0, 0
    samples = stage.asked(stage.contexts() * 4, max_tokens=8, stop_token_ids=sorted(stops))
    for _, (ids, logprobs) in samples:
        inside, ends = stops & {*ids[:-1]}, ids[-1] in stops
        wrong += bool(inside) or not (ends or len(ids) == 8) or len(ids) != len(logprobs)
        ended += ends
    return {"templates": same, "stops": [wrong, ended, len(samples)]}


def packing(stage: Stage) -> dict:
    """|ratio - 1| in the first minibatch of a script's update; and what rounding alone may add to
    a step's ratio: its rows are packed unlike those of the old log-probabilities."""
    args = copy.deepcopy(stage.args)
    args.run_args.micro_batch_tokens, args.minibatches = 2048, 1
    batch = batch_of(stage.asked(stage.contexts(16)))
    policy, most = Network("policy", stage.model), 0.0
    old = batch_logprobs(policy, batch, args)
    torch.manual_seed(0)
    ours = torch.isin(batch.step_traj, torch.randperm(len(batch.outcomes)).tensor_split(2)[0])
    for micro in micro_batches(batch, args, only=ours):
        new = sum_per_step(action_logprobs(policy, micro, args), micro)
        ratio = (new - sum_per_step(old[micro.tokens].to(new.device), micro)).exp()
        most = max(most, (ratio - 1).abs().max().item())
    policy.optimizer = torch.optim.SGD(policy.trained, lr=0.0)
    advantages = torch.ones(batch.num_steps)
    stats = load("rloo_sokoban").policy_update(policy, batch, old, advantages, args)
    return {"first ratios": max(abs(stats["ratio"] - 1), stats["clip_fraction"]), "rounding": most}


def trainers_attention(stage: Stage) -> dict:
    """Whether the trainer's forward and backward pass run where torch has its flash attention
    alone."""

    batch = batch_of(stage.asked(stage.contexts(2)))
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        for micro in micro_batches(batch, stage.args):
            action_logprobs(Network("policy", stage.model), micro, stage.args).sum().backward()
    stage.model.zero_grad()
    return {"trainer's flash": True}


def engine(path: str, dtype: str, number: int) -> dict:
    """Everything that one engine can tell; what failed has its traceback as its value."""
    stage, whole = Stage(path, dtype, eager=dtype == "float32"), dtype == "bfloat16"
    stage.train()
    parts = [what_runs, before_and_after_updates, functools.partial(frequencies, number=number)]
    if whole:
        parts += [templates_and_stops, packing, trainers_attention, memory_of_ten_cycles]
    found = {}
    for part in parts:
        try:
            found |= part(stage)
        except Exception:
            found[getattr(part, "__name__", "frequencies")] = traceback.format_exc()
    return found


def fresh(kept: str, dtype: str) -> dict:
    """[mean, largest] difference of log-probabilities between the engine that kept its weights here
    after three cycles and a fresh engine on them [nats]."""
    stage = Stage(kept, dtype)
    sequences, theirs = json.loads(Path(f"{kept}.json").read_text())
    ours = stage.score(sequences)
    away = [abs(a - b) for one, two in zip(ours, theirs) for a, b in zip(one, two)]
    return {"fresh": [sum(away) / len(away), max(away)]}


# ------------ LoRA ------------


def lora(path: str, first_rate: float, least: float) -> dict:
    """Ten steps of AdamW on a LoRA policy in bfloat16, each raising the log-probabilities of some
    episodes and lowering those of others: the correlation of how far the engine's log-probability
    of an episode moves with how far it moves by the trainer in float32. The rate is the first one,
    x 2 until the trainer's spread by `least` [nats]. share: of the trainer's, what the engine's
    is by regression. own: the same for the trainer's forward pass in bfloat16."""

    stage = Stage(path, "bfloat16", policy_lora_rank=LORA_RANK)
    base = policy_of(path, torch.bfloat16)
    torch.manual_seed(0)
    adapted = add_adapter(base, "policy", load("rloo_sokoban").lora(LORA_RANK))
    stage.model = adapted
    stage.engine.load(adapted)
    samples = stage.asked(stage.contexts(24, 200))
    batch = batch_of(samples)
    sequences = [context + ids for context, (ids, _) in samples]
    exact = copy.deepcopy(adapted).float()
    policy, rounded = Network("policy", exact), Network("policy", adapted)
    signs = torch.where(torch.arange(len(samples)) % 2 == 0, 1.0, -1.0).to(DEVICE)

    def by_trainer(network=policy, dtype="float32", backward: bool = False) -> torch.Tensor:
        found = torch.zeros(len(samples), device=DEVICE)
        args = settings(dtype=dtype, micro_batch_tokens=4096)
        for micro in micro_batches(batch, args):
            with torch.set_grad_enabled(backward):
                summed = sum_per_step(action_logprobs(network, micro, args), micro)
            if backward:
                (-signs[micro.steps.to(DEVICE)] * summed).sum().backward()
            found[micro.steps.to(DEVICE)] = summed.detach()
        return found

    def by_engine() -> torch.Tensor:
        scored = zip(stage.score(sequences), samples)
        return torch.tensor([sum(one[-len(ids) :]) for one, (_, (ids, _)) in scored])

    start = copy.deepcopy(exact.state_dict())
    before, engines, rate = by_trainer(), by_engine(), first_rate
    own = by_trainer(rounded, "bfloat16")
    while True:
        exact.load_state_dict(start)
        optimizer = torch.optim.AdamW(policy.trained, rate, weight_decay=0.0)
        for _ in range(10):
            optimizer.zero_grad()
            by_trainer(backward=True)
            optimizer.step()
        shift = (by_trainer() - before).cpu()
        if shift.std() > least or rate > 0.1:
            break
        rate *= 2
    theirs = dict(exact.named_parameters())
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if ".lora_" in name:
                parameter.copy_(theirs[name])
    stage.engine.load(adapted)
    reached, own = by_engine() - engines, (by_trainer(rounded, "bfloat16") - own).cpu()

    def with_shift(of) -> list[float]:
        """[share, correlation]."""
        pair = torch.stack([of, shift])
        return [(torch.cov(pair)[0, 1] / shift.var()).item(), torch.corrcoef(pair)[0, 1].item()]

    deltas = [m.get_delta_weight("policy") for m in exact.modules() if hasattr(m, "lora_A")]
    weights = [m.base_layer.weight for m in exact.modules() if hasattr(m, "lora_A")]
    sizes = [torch.cat([t.detach().flatten() for t in each]).norm() for each in (deltas, weights)]
    size = (sizes[0] / sizes[1]).item()
    told = dict(zip(("share", "correlation"), with_shift(reached))) | {"own": with_shift(own)}
    return told | {"rate": rate, "relative": size, "shift": shift.std().item()}


# ------------ rates ------------


def decode(path: str) -> dict:
    """Tokens a second that 64 sequences get, prompts of 128 tokens included."""
    stage, rng = Stage(path, "bfloat16", eager=False, max_context_tokens=1024), random.Random(0)
    prompts = [[rng.randrange(300, stage.vocabulary) for _ in range(128)] for _ in range(64)]
    stage.asked(prompts, max_tokens=8, stop_token_ids=[])
    begin = time.perf_counter()
    samples = stage.asked(prompts, max_tokens=512, stop_token_ids=[])
    seconds = time.perf_counter() - begin
    return {"decode": sum(len(ids) for _, (ids, _) in samples) / seconds}


def update(path: str, tokens: int = 4096, micros: int = 16) -> dict:
    """FLOP/s of a policy update in bfloat16, over those of torch.mm."""

    rloo, network = load("rloo_sokoban"), Network("policy", policy_of(path, torch.bfloat16))
    network.optimizer = torch.optim.AdamW(network.trained, 1e-6, weight_decay=0.0)
    args = settings(dtype="bfloat16", micro_batch_tokens=tokens, minibatches=1)
    shape, length, rng = shape_of(network.model.config), 1024, random.Random(0)
    words = [
        [rng.randrange(300, shape.vocabulary) for _ in range(length)]
        for _ in range(micros * tokens // length)
    ]
    cut = length * 3 // 4
    batch = batch_of([(ids[:cut], (ids[cut:], [0.0] * (length - cut))) for ids in words])
    old, advantages = batch_logprobs(network, batch, args), torch.ones(len(words))

    def seconds(function, times: int) -> float:
        function()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(times):
            function()
        torch.cuda.synchronize()
        return (time.perf_counter() - begin) / times

    taken = seconds(lambda: rloo.policy_update(network, batch, old, advantages, args), 3)
    count = len(words) * length
    matrices = 6 * count * (shape.layers * shape.layer + shape.hidden * shape.vocabulary / 4)
    attention = 6 * count * length * shape.layers * shape.queries
    a, b = torch.randn(2, 8192, 8192, device=DEVICE, dtype=torch.bfloat16)
    ceiling = 2 * 8192**3 / seconds(lambda: torch.mm(a, b), 10)
    return {"share": (matrices + attention) / taken / ceiling, "mm": ceiling / 1e12}


# ------------ memory ------------


def peak(path: str, prm_rank: int, tokens: int) -> dict:
    """Bytes of an update of each network, measured by benchmarks/memory.py, and predicted."""

    seen, predicted = measured(path, Setting(tokens, 0.25, 0, prm_rank, dtype="bfloat16"))
    return {"measured": seen, "predicted": predicted}


def fsdp_peaks(shape: list) -> dict:
    """Peaks [bytes] of an update of iStar's PRM and of its policy, sharded over these processes: on
    a card what is allocated; on a CPU what is resident beyond what was before the networks."""
    istar, count = load("istar_sokoban"), int(os.environ["WORLD_SIZE"])
    args = settings(dtype="bfloat16", micro_batch_tokens=4096, processes=count, engine="none")
    args.tasks_per_iteration, args.policy_lora_rank, args.prm_ridge = 4, 0, 0.1
    device = processes.start(args)
    torch.manual_seed(0)
    reset_peak()
    before = most_bytes()
    policy, prm = networks(
        lambda kind: random_qwen(tuple(shape)).to(kind), istar.lora, 0, "bfloat16"
    )
    fsdp.shard_all([policy, prm], "bfloat16", device)
    rng, trajectories = random.Random(0), []
    step_ids = [number for step in range(4) for number in [-1] * 192 + [step] * 64]
    for n in range(16):
        ids = [rng.randrange(3, shape[5]) for _ in step_ids]
        steps = [Step("", "", [0.0] * 64) for _ in range(4)]
        trajectories.append(Trajectory(n // 4, ids, step_ids, float(n % 2), steps))
    batch, peaks = flatten(trajectories), {}
    old, advantages = batch_logprobs(policy, batch, args), torch.linspace(-1, 1, 64)
    updates = {"update": lambda: istar.policy_update(policy, batch, old, advantages, args)}
    updates["prm"] = lambda: istar.prm_update(prm, policy, trajectories[:4], args)
    for _ in range(2):  # the moments are there from the second time on
        for name, do in updates.items():
            reset_peak()
            do()
            peaks[name] = most_bytes() - before
    return peaks


# ------------ scripts ------------


def script(name: str, *flags: str) -> None:
    """A script as a user starts it, whose sums are in the same order every time."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.optim.AdamW = functools.partial(torch.optim.AdamW, fused=True)
    if os.environ.get("FAULT") and os.environ.get("RANK") == "1":
        summed, calls = runtime.networks.sum_gradients, []

        def sum_gradients(network):
            calls.append(network)
            if len(calls) == 2:
                Path(os.environ["FAULT"]).write_text(f"{time.time()}")
                raise torch.OutOfMemoryError("CUDA out of memory")
            summed(network)

        runtime.networks.sum_gradients = sum_gradients
    path = str(ROOT / f"{name}.py")
    sys.argv = [path, *flags]
    runpy.run_path(path, run_name="__main__")


if __name__ == "__main__":
    if sys.argv[1] == "script":
        script(*sys.argv[2:])
    else:
        print(f"\n{json.dumps(globals()[sys.argv[1]](**json.loads(sys.argv[2])))}", flush=True)
        if int(os.environ.get("WORLD_SIZE", 1)) > 1:
            processes.end()
