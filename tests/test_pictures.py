"""Pictures: policy, PRM and engine see them; each is kept and computed once; what is no picture,
or no model that sees, is refused in one line.

vLLM runs in one process of its own (this file, as a script), which measures; a test looks at what
it measured.
"""

import base64
import copy
import importlib
import io
import json
import os
import random
import shutil
import subprocess
import sys
from importlib.util import find_spec
from types import SimpleNamespace

from envs.visual_sokoban import VisualSokoban, expert
from runtime.chat import Chat
from runtime.data import (
    Seen,
    Step,
    Trajectory,
    flatten,
    joined,
    micro_batches,
    pictures_of,
    sum_per_step,
)
from runtime.engines import SamplingParams
from runtime.engines.transformers import TransformersEngine
from runtime.models import read_seeing_model
from runtime.networks import Network, action_logprobs, add_adapter, batch_logprobs
from runtime.rollout import Stage, rollout
from runtime.vision.pictures import (
    BY_LENGTH,
    attention_by_length,
    never_sampled,
    tower_features,
)

import numpy as np
import pytest
import torch
from conftest import ROOT, answers, load, network, run_main, scripts_with, settings
from PIL import Image
from safetensors.torch import load_file
from transformers import AttentionInterface, AutoTokenizer
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import apply_rotary_pos_emb_vision

MODEL = ROOT / "models" / "tiny-visual-sokoban"
READING = {"dtype": torch.float32, "trust_remote_code": False}
ENV = VisualSokoban()
SCRIPTS = [script for script in scripts_with("policy_update", "main") if "_visual_" in script]


def seeing():
    """The tiny model, with its chat."""
    model = read_seeing_model(str(MODEL), "tiny", READING).eval()
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    return model, Chat(tokenizer, [tokenizer.eos_token_id], model.picture_processor)


def seen(words: str, episode) -> Seen:
    """Words, with the episode's picture beside them, as the world's door hands them on."""
    both = Seen(words)
    both.picture = episode.picture
    return both


def lora(rank: int):
    return load(SCRIPTS[0]).lora(rank)


def contexts_of(chat, count: int = 6, other: bool = False) -> list[list[int]]:
    """Contexts of one to four pictures; those of a task share their beginning. other: the same
    words, with pictures of other rooms."""
    rng, contexts = random.Random(0), []
    for number in range(count):
        task = number // 2
        episode = ENV.reset(ENV.train_tasks[task])
        stranger = ENV.reset(ENV.train_tasks[task + 50])
        shown = stranger if other else episode
        turns = [chat.prompt(seen(episode.prompt, shown))]
        for _, text in zip(range(number % 4), expert(episode, 0.8, rng)):
            action = chat.tokenizer.encode(text) + chat.stop_ids
            observation, _, done, _ = episode.step(text)
            if not stranger.done:
                stranger.step(text)
            turns.append(joined([action, chat.observation(seen(observation, shown), action)]))
            if done:
                break
        contexts.append(joined(turns))
    return contexts


def trajectories_of(samples) -> list:
    """A trajectory of one step for each (context, (ids, log-probabilities)), two to a group."""
    trajectories = []
    for number, (context, (ids, logprobs)) in enumerate(samples):
        step = Step("", "", logprobs)
        step_ids = [-1] * len(context) + [0] * len(ids)
        t = Trajectory(number // 2, [*context, *ids], step_ids, number % 2, [step])
        t.pictures = list(pictures_of(context))
        trajectories.append(t)
    return trajectories


def batch_of(samples):
    return flatten(trajectories_of(samples))


def answered(chat, contexts) -> list:
    """The contexts with an answer each, as samples."""
    answer = chat.tokenizer.encode("<think>push left</think><action>left</action>") + chat.stop_ids
    return [(context, (answer, [0.0] * len(answer))) for context in contexts]


def move(model, seed: int) -> None:
    """Move every parameter, of tower, projector and language alike, by a tenth of its size."""
    torch.manual_seed(seed)
    for parameter in model.parameters():
        if not parameter.requires_grad:
            continue
        parameter.data += (0.1 * parameter.std(correction=0) + 0.01) * torch.randn_like(parameter)


def sampled(engine, contexts, temperature: float = 1.0) -> list:
    """The engine's answers, of at most 8 tokens."""
    return answers(engine, contexts, SamplingParams(temperature=temperature, max_tokens=8))


def gap(engine, model, args, contexts) -> float:
    """The largest difference between the engine's and the trainer's log-probability of a token that
    it samples now."""
    samples = list(zip(contexts, sampled(engine, contexts, args.temperature)))
    batch = batch_of(samples)
    return (batch_logprobs(network(model), batch, args) - batch.engine_logprobs).abs().max().item()


def own_weights(network) -> dict:
    """The weights of a network's adapter, by their names."""
    named = network.model.named_parameters()
    return {name: p for name, p in named if f".{network.name}." in name}


# ------------ positions, placeholders ------------


def test_the_forward_pass_is_that_of_transformers():
    """Hidden states against transformers' own way from pixels, grids and token types."""
    model, chat = seeing()
    for context in contexts_of(chat):
        ids = torch.tensor([list(context)])
        processor = model.picture_processor
        pictures = [(0, *picture) for picture in context.pictures]
        patches = [processor.patches(png) for _, _, png in pictures]
        thw = torch.tensor([[1, rows, columns] for _, (rows, columns) in patches])
        with torch.no_grad():
            ours = network(model).hidden(ids, pictures)
            theirs = model.base_model(
                input_ids=ids,
                pixel_values=torch.cat([pixels for pixels, _ in patches]),
                image_grid_thw=thw,
                mm_token_type_ids=(ids == processor.image_token).int(),
                use_cache=False,
            ).last_hidden_state
        assert (ours - theirs).abs().max() < 1e-4


# ------------ the tower's attention ------------

KINDS = {
    "qwen2_vl.Qwen2VisionTransformerPretrainedModel": {"embed_dim": 64, "hidden_size": 32},
    "qwen2_5_vl.Qwen2_5_VisionTransformerPretrainedModel": {"fullatt_block_indexes": [1]},
    "qwen3_vl.Qwen3VLVisionModel": {"deepstack_visual_indexes": [0]},
}
SIZES = torch.tensor([[1, 4, 6], [1, 10, 10], [1, 4, 6], [1, 6, 4], [1, 2, 18]])  # in patches


def attending(monkeypatch) -> list:
    """What will be the windows of each call of torch's attention, [batch]."""
    calls, attention = [], torch.nn.functional.scaled_dot_product_attention

    def counted(query, *rest, **options):
        calls.append(len(query))
        return attention(query, *rest, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", counted)
    return calls


@pytest.mark.parametrize("kind", KINDS)
def test_a_call_of_attention_for_each_length_of_window(kind, monkeypatch):
    """Pictures of several sizes, in two layers: as many calls as lengths, and output and gradients
    of the towers of transformers with a call for each window."""
    family, name = kind.split(".")
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    sizes = {"depth": 2, "hidden_size": 64, "num_heads": 4, "patch_size": 2, "window_size": 16}
    sizes |= {"intermediate_size": 96, "out_hidden_size": 32} | KINDS[kind]
    torch.manual_seed(0)
    tower = getattr(module, name)(getattr(module, name).config_class(**sizes))
    AttentionInterface.register(BY_LENGTH, attention_by_length)
    patches = torch.randn(int(SIZES.prod(1).sum()), 3 * 2 * 2 * 2, requires_grad=True)
    calls, found = attending(monkeypatch), []
    for way in ("sdpa", BY_LENGTH):
        tower.config._attn_implementation = way
        out = tower(patches, SIZES).pooler_output
        wanted = [patches, *tower.parameters()]
        found.append([out, *torch.autograd.grad(out.square().mean(), wanted, allow_unused=True)])
        calls.append("backward")
    for loop, ours in zip(*found):
        assert (loop is None) == (ours is None)  # deepstack's mergers are not in this output
        assert loop is None or torch.allclose(ours, loop, rtol=1e-5, atol=1e-6)

    loop, ours = calls[: calls.index("backward")], calls[calls.index("backward") + 1 : -1]
    # whole pictures: 24 patches thrice, 36 and 100 once; in windows of 8 x 8: 64, 16 twice, 4;
    # 24 thrice; 16 twice and 4, of 2 rows
    whole, windows = [3, 1, 1], [2, 4, 3, 1]
    first = windows if "2_5" in kind else whole
    assert loop == [1] * (sum(first) + sum(whole)) and ours == first + whole


def test_a_model_that_sees_has_that_attention(monkeypatch):
    """A call for each layer, whatever the number of pictures; what is saved does not name it."""
    model, _ = seeing()
    calls = attending(monkeypatch)
    with torch.no_grad():
        tower_features(model, [ENV.reset(task).picture for task in range(5)])
    assert calls == [5, 5]
    assert BY_LENGTH not in json.dumps(model.config.to_dict())


# ------------ the engine ------------


@pytest.mark.parametrize("temperature", (1.0, 0.6))
def test_transformers_engine_agrees_with_the_trainer(temperature):
    """Before and after three hand-overs that move everything."""
    model, chat = seeing()
    args = settings(temperature=temperature)
    engine = TransformersEngine("", chat.stop_ids, args)
    for update in range(4):
        if update:
            move(model, update)
        engine.load(model)
        assert gap(engine, model, args, contexts_of(chat)) < 1e-3


def test_transformers_engine_goes_on_with_an_episode():
    """Keys, values and the tower's outputs of earlier turns are kept, and give what reading anew
    gives."""
    model, chat = seeing()
    args = settings()
    engine, passes = TransformersEngine("", chat.stop_ids, args), []
    engine.load(model)
    tower = model.base_model.visual
    tower.register_forward_pre_hook(lambda module, inputs: passes.append(len(inputs[0])))

    episodes = [ENV.reset(task) for task in [0, 0, 1, 1]]
    turns = [[chat.prompt(seen(e.prompt, e))] for e in episodes]
    answer = "<think>walk up</think><action>up</action>"
    action = chat.tokenizer.encode(answer) + chat.stop_ids
    shown = set()
    for text in ("up", "left", "right"):
        contexts = [joined(each) for each in turns]
        before, columns = sum(passes), engine.seen.shape[1]
        assert gap(engine, model, args, contexts) < 1e-3
        new = {png for c in contexts for _, png in c.pictures} - shown
        trainer = {png for c in contexts for _, png in c.pictures}
        assert sum(passes) - before == 36 * (len(new) + len(trainer))  # each once, in either
        assert columns == 0 or engine.seen.shape[1] > columns
        shown |= new
        for episode, own in zip(episodes, turns):
            if not episode.done:
                words = episode.step(f"<think>walk {text}</think><action>{text}</action>")[0]
                own.append(joined([action, chat.observation(seen(words, episode), action)]))


def test_no_engine_and_no_softmax_has_tokens_of_pictures():
    """A head that wants nothing but image tokens still says words, and both sides give them the
    same probability."""
    model, chat = seeing()
    never = never_sampled(model.config)
    assert len(never) == 2 and model.picture_processor.image_token in never
    words = model.get_output_embeddings().weight
    model.lm_head.weight = torch.nn.Parameter(words.detach().clone())  # no longer tied
    with torch.no_grad():
        model.lm_head.weight[never] = 20 * words.mean(0)
    args = settings()
    engine = TransformersEngine("", chat.stop_ids, args)
    engine.load(model)
    contexts = contexts_of(chat)
    assert gap(engine, model, args, contexts) < 1e-3
    for ids, logprobs in sampled(engine, contexts):
        assert not set(ids) & set(never) and all(np.isfinite(logprobs))


# ------------ seen ------------


def logprobs_of(model, chat, contexts, **changes) -> torch.Tensor:
    return batch_logprobs(network(model), batch_of(answered(chat, contexts)), settings(**changes))


def test_the_policy_sees_and_so_does_the_prm():
    """With the pictures of other rooms log-probabilities and step rewards change, though every
    token is the same."""
    model, chat = seeing()
    contexts, others = contexts_of(chat), contexts_of(chat, other=True)
    assert [list(c) for c in contexts] == [list(c) for c in others]
    mine, theirs = logprobs_of(model, chat, contexts), logprobs_of(model, chat, others)
    differ = (mine - theirs).view(len(contexts), -1).abs().amax(1)
    assert (differ > 1e-3).all()  # in every context

    module = load(scripts_with("step_rewards", "main")[0])
    prm, _ = seeing()
    move(prm, 1)
    rewards = []
    for shown, old in ((contexts, mine), (others, theirs)):
        batch = batch_of(answered(chat, shown))
        new = batch_logprobs(network(prm), batch, settings())
        sums = [sum_per_step(values, batch) for values in (new, old)]
        rewards.append(module.step_rewards(*sums, 0.05))
    assert ((rewards[0] - rewards[1]).abs() > 1e-5).all()


def test_every_picture_of_a_context_counts():
    """Also one of an earlier turn, when the one that is seen now stays."""
    model, chat = seeing()
    (context,) = [c for c in contexts_of(chat) if len(c.pictures) == 4][:1]
    before = logprobs_of(model, chat, [context])
    for number, (place, _) in enumerate(context.pictures):
        changed = joined([context])
        changed.pictures[number] = (place, ENV.reset(ENV.train_tasks[77]).picture)
        assert (logprobs_of(model, chat, [changed]) - before).abs().max() > 1e-4


# ------------ batches ------------


def gradient_of(model, batch, args) -> list[torch.Tensor]:
    model.zero_grad()
    for micro in micro_batches(batch, args):
        (-action_logprobs(network(model), micro, args).sum()).backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def test_padding_order_and_micro_batches_change_nothing():
    """Rows of one to four pictures, together and alone, in either order: log-probabilities and the
    gradient of every parameter, tower and projector included."""
    model, chat = seeing()
    contexts = contexts_of(chat)
    samples = answered(chat, contexts)
    size = len(samples[0][1][0])
    together = batch_of(samples)
    backwards = batch_of(samples[::-1])
    expected = batch_logprobs(network(model), together, settings())
    whole = gradient_of(model, together, settings())
    assert len(whole) == len(list(model.parameters()))
    assert all(gradient.abs().max() > 0 for gradient in whole)

    for tokens in (8192, 700, 1):
        args = settings(micro_batch_tokens=tokens)
        assert (batch_logprobs(network(model), together, args) - expected).abs().max() < 1e-4
        turned = batch_logprobs(network(model), backwards, args).view(-1, size).flip(0).flatten()
        assert (turned - expected).abs().max() < 1e-4
        for ours, theirs in zip(gradient_of(model, together, args), whole):
            assert torch.allclose(ours, theirs, atol=1e-3 * theirs.abs().max())


def test_pictures_stay_with_their_sequences_when_history_is_short():
    """--history 1: from the third step on each is a sequence of its own, with what it saw: the
    room at the start and the one before it."""
    model, chat = seeing()
    args = settings(history=1, max_action_tokens=16, max_steps=4)
    engine = TransformersEngine("", chat.stop_ids, args)
    engine.load(model)
    torch.manual_seed(0)
    stage, sampling = Stage(engine, chat, args), SamplingParams(max_tokens=16)
    batch = flatten(rollout(stage, load(SCRIPTS[0]).play, ENV, [0, 0, 1], sampling))
    assert {len(s.pictures) for s in batch.sequences} == {2}
    assert len(batch.sequences) == len(batch.step_traj) - 3 == 9
    for sequence in batch.sequences:
        image = (sequence.ids == model.picture_processor.image_token).nonzero()[:, 0].tolist()
        places = [place + k for place, _ in sequence.pictures for k in range(36)]
        assert image == places
    ours = batch_logprobs(network(model), batch, args)
    assert (ours - batch.engine_logprobs).abs().max() < 1e-3


def test_the_gradient_of_dpo_is_autograd_s():
    """prm_update's gradient, micro-batch by micro-batch, against one graph of the whole loss."""
    module = load(scripts_with("prm_update", "draw", "main")[0])
    model, chat = seeing()
    policy = network(model)
    prm = policy.with_adapter("prm", lora(4))
    move(prm.model, 3)
    prm.optimizer = torch.optim.SGD(prm.trained, 0.0)
    args = settings(prm_ridge=0.1, beta=0.5)
    episodes = trajectories_of(answered(chat, contexts_of(chat)))
    batch = flatten(episodes)
    pairs = module.preference_pairs(batch.outcomes, batch.group)
    assert len(pairs) == 3 and any(".visual." in name for name in own_weights(prm))

    old = batch_logprobs(policy, batch, args)
    new = torch.zeros(len(old))
    for micro in micro_batches(batch, args):
        new = new.index_add(0, micro.tokens, action_logprobs(prm, micro, args))
    rewards = 0.5 * sum_per_step(new - old, batch)  # [S], a step for each trajectory
    losses = [-torch.nn.functional.logsigmoid(rewards[w] - rewards[l]) for w, l in pairs]
    loss = sum(losses) / len(pairs) + 0.1 * rewards.square().mean()
    expected = torch.autograd.grad(loss, prm.trained)

    kept = {}
    prm.optimizer.step = lambda: kept.update({id(p): p.grad.clone() for p in prm.trained})
    for tokens in (8192, 1):
        args.run_args.micro_batch_tokens = tokens
        told = module.prm_update(prm, policy, episodes, args)
        assert told["loss"] == pytest.approx(loss.item(), abs=1e-5)
        for parameter, gradient in zip(prm.trained, expected):
            tolerance = 1e-4 * gradient.abs().max() + 1e-9
            assert torch.allclose(kept[id(parameter)], gradient, atol=tolerance)


# ------------ each once ------------


def test_a_frozen_tower_sees_a_picture_once():
    model, chat = seeing()
    model.base_model.visual.requires_grad_(False)
    passes = []
    tower = model.base_model.visual
    tower.register_forward_pre_hook(lambda module, inputs: passes.append(len(inputs[0])))
    contexts = contexts_of(chat)
    pictures = {png for context in contexts for _, png in context.pictures}
    for _ in range(3):
        gradient_of(model, batch_of(answered(chat, contexts)), settings(micro_batch_tokens=400))
    assert sum(passes) == 36 * len(pictures)
    assert all(p.grad is None for p in tower.parameters())
    assert model.get_input_embeddings().weight.grad is not None


def test_adapters_leave_a_frozen_tower_alone():
    for frozen in (False, True):
        model, _ = seeing()
        model.base_model.visual.requires_grad_(not frozen)
        model = add_adapter(add_adapter(model, "policy", lora(4)), "prm", lora(4))
        names = [name for name, _ in model.named_parameters() if "lora_" in name]
        for adapter in ("policy", "prm"):
            own = [name for name in names if f".{adapter}." in name]
            assert any("language_model" in name for name in own)
            assert any(".visual." in name for name in own) != frozen


def policy_has_moved(policy) -> bool:
    return any(p.any() for name, p in own_weights(policy).items() if "lora_B" in name)


@pytest.mark.parametrize("frozen", (False, True))
def test_transformers_engine_with_a_lora_policy(frozen):
    model, chat = seeing()
    model.base_model.visual.requires_grad_(not frozen)
    model = add_adapter(model, "policy", lora(4))
    policy = Network("policy", model)
    prm = policy.with_adapter("prm", lora(4))
    args = settings()
    engine, contexts = TransformersEngine("", chat.stop_ids, args), contexts_of(chat)
    for update in range(2):
        prm.activate()
        move(model, 7)  # which nobody samples from
        engine.load(model)
        assert gap(engine, model, args, contexts) < 1e-3
        assert (update > 0) == policy_has_moved(policy)
        policy.activate()
        move(model, update)


# ------------ vLLM ------------


def measure() -> dict:
    """Gaps between vLLM and the trainer before and after three hand-overs that move everything, and
    after ones that move the tower or the projector alone."""
    from runtime.engines.vllm import VllmEngine

    model, chat = seeing()
    args = settings(max_context_tokens=1280, max_steps=15)
    engine = VllmEngine(str(MODEL), chat.stop_ids, args)
    contexts, told = contexts_of(chat), {"gaps": []}
    for update in range(4):
        if update:
            move(model, update)
        engine.load(model)
        told["gaps"].append(gap(engine, model, args, contexts))

    for part in ("patch_embed", "merger"):
        torch.manual_seed(9)
        before = copy.deepcopy(model)
        module = model.base_model.visual.get_submodule(part)
        for parameter in module.parameters():
            parameter.data += parameter.std(correction=0) * torch.randn_like(parameter)
        told[f"{part}, not handed over"] = gap(engine, model, args, contexts)
        engine.load(model)
        told[f"{part}, handed over"] = gap(engine, model, args, contexts)
        told[f"{part}, against the old"] = gap(engine, before, args, contexts)

    never = never_sampled(model.config)
    words = model.get_output_embeddings().weight
    with torch.no_grad():  # tied: what is fed is not changed, as no context has video tokens
        words[never[1]] = 3 * words.mean(0) / words.mean(0).norm() * words.norm(dim=1).max()
    engine.load(model)
    told["a wish for films"] = gap(engine, model, args, contexts)
    said = sampled(engine, contexts * 4)
    told["banned"] = sum(len(set(ids) & set(never)) for ids, _ in said)

    args = settings(max_context_tokens=1280, max_steps=15, dtype="bfloat16", policy_lora_rank=4)
    args.world = SimpleNamespace(freeze_vision=False)
    model = add_adapter(seeing()[0].bfloat16(), "policy", lora(4))
    engine = VllmEngine(str(MODEL), chat.stop_ids, args)
    engine.load(model)
    for name, parameter in model.named_parameters():
        if "visual" in name and "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    told["the tower's adapter, not handed over"] = gap(engine, model, args, contexts)
    engine.load(model)
    told["the tower's adapter, handed over"] = gap(engine, model, args, contexts)
    return told


@pytest.mark.skipif(not find_spec("vllm"), reason="vllm is not installed")
def test_vllm_agrees_with_the_trainer():
    command = [sys.executable, "-W", "ignore", __file__]
    own = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, env=own, timeout=600)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert max(told["gaps"]) < 1e-3 and len(told["gaps"]) == 4
    for part in ("patch_embed", "merger"):
        assert told[f"{part}, handed over"] < 1e-3
        assert told[f"{part}, not handed over"] > 1e-2
        assert told[f"{part}, against the old"] > 1e-2
    assert told["a wish for films"] < 1e-3 and told["banned"] == 0
    assert told["the tower's adapter, handed over"] < 0.1  # in bfloat16
    assert told["the tower's adapter, not handed over"] > 0.2


# ------------ refused ------------


def drawn(size) -> bytes:
    """A PNG of noise."""
    noise = np.random.default_rng(0).integers(0, 255, (*size[::-1], 3)).astype(np.uint8)
    image = Image.fromarray(noise)
    file = io.BytesIO()
    image.save(file, format="png")
    return file.getvalue()


@pytest.mark.parametrize(
    "png, words",
    (
        (b"", "an empty picture"),
        (b"no picture at all", "no picture"),
        (drawn((96, 96))[:200], "no picture"),
        (drawn((100, 96)), "100 x 96 pixels"),
        (drawn((16, 8)), "16 x 8 pixels"),
        (drawn((512, 512)), "512 x 512 pixels"),  # more pixels than its configuration allows
    ),
)
def test_pictures_that_cannot_be_seen(png, words):
    _, chat = seeing()
    with pytest.raises(SystemExit, match=words) as stopped:
        chat.prompt(seen("look", SimpleNamespace(picture=png)))
    assert "\n" not in str(stopped.value)


SMALL = """--engine hf --iterations 1 --tasks-per-iteration 2 --group-size 2 --eval-tasks 2
--eval-samples 1 --max-steps 2""".split()


def test_refusals_at_the_start(tmp_path):
    """Each in one line that names the flag."""
    blind = ROOT / "models" / "tiny-sokoban"
    cases = [
        (["--model", blind], f"--model {blind}: its type qwen3 sees no pictures"),
        (["--cell-pixels", "10"], "60 x 60 pixels: --model models/tiny-visual-sokoban takes"),
        (["--cell-pixels", "64"], "384 x 384 pixels: --model models/tiny-visual-sokoban would"),
        (["--cell-pixels", "0"], "--cell-pixels 0: has to be a whole number from 1 to 1,024"),
        (["--saved-pictures", "-1"], "--saved-pictures -1: has to be a whole number from 0 to "),
    ]
    for flags, words in cases:
        done = run_main(SCRIPTS[0], *SMALL, *flags, cwd=tmp_path, check=False)
        assert done.returncode == 1 and words in done.stderr, done.stderr
        assert len(done.stderr.strip().splitlines()) == 1


def test_a_model_of_half_a_configuration_is_refused(tmp_path):
    model = shutil.copytree(MODEL, tmp_path / "model")
    file = model / "preprocessor_config.json"
    told = json.loads(file.read_text())
    for change, words in (
        ({"merge_size": 2}, "in their patches"),
        (None, "no preprocessor"),
    ):
        file.write_text(json.dumps(told | change)) if change else file.unlink()
        done = run_main(SCRIPTS[0], *SMALL, "--model", model, cwd=tmp_path, check=False)
        assert done.returncode == 1 and words in done.stderr, done.stderr


def test_a_seeing_model_is_not_for_worlds_of_words(tmp_path):
    done = run_main("rloo_sokoban", *SMALL, "--model", MODEL, cwd=tmp_path, check=False)
    assert done.returncode == 1 and "made for pictures" in done.stderr


# ------------ runs ------------


@pytest.mark.parametrize("bound", (1000, 3))
def test_a_run_keeps_its_pictures_once_and_no_more_than_told(bound, tmp_path):
    flags = [*SMALL, "--run-name", "seen", "--saved-pictures", bound]
    run_main(SCRIPTS[0], *flags, cwd=tmp_path)
    run = tmp_path / "runs" / "seen"
    steps, named = [], set()
    for table in ("episodes.jsonl", "eval_episodes.jsonl"):
        rows = map(json.loads, (run / table).read_text().splitlines())
        steps.append([step["picture"] for row in rows for step in row["steps"]])
        assert {*steps[-1]} > {None} or None not in steps[-1]  # some of each were kept
        named |= {*steps[-1]} - {None}
    files = {f"pictures/{path.name}" for path in (run / "pictures").iterdir()}
    assert named == files and 0 < len(files) <= bound
    assert all((None in of_table) == (bound == 3) for of_table in steps)
    page = (run / "view.html").read_text()
    for name in named:
        assert Image.open(run / name).size == (96, 96)
        assert page.count(base64.b64encode((run / name).read_bytes()).decode()) == 1


def test_warm_start_makes_a_model_that_sees(tmp_path):
    """From nothing, and from that again; a script takes what comes of it."""
    small = "--environment visual_sokoban --demonstrations 12 --min-updates 1 --max-updates 1"
    small += " --batch-size 4 --max-steps 2 --eval-every 1 --target 0 --hidden 32 --layers 1"
    small = [*small.split(), "--heads", 1, "--max-context-tokens", 600]
    run_main("warm_start", *small, "--out", "new", cwd=tmp_path)
    run_main("warm_start", *small, "--model", "new", "--out", "newer", cwd=tmp_path)
    flags = [*SMALL, "--model", "newer", "--max-context-tokens", 600, "--run-name", "new"]
    run_main("rloo_visual_sokoban", *flags, cwd=tmp_path)


def test_a_new_tower_looks_at_neighbours():
    """Each of its heads gives most of a patch's attention to one neighbour, as far away as its
    layer says, whatever the picture shows."""
    module = load("warm_start")
    args = module.Args(rotary_base=10.0)
    torch.manual_seed(0)
    model = module.new_seeing_model(AutoTokenizer.from_pretrained(MODEL), args)
    weights = []

    def note(attention, inputs, given):
        queries, keys, _ = attention.qkv(inputs[0]).view(36, 3, 4, 16).unbind(1)  # [36, 4, 16]
        queries, keys = apply_rotary_pos_emb_vision(queries, keys, *given["position_embeddings"])
        scores = torch.einsum("qhd,khd->hqk", queries, keys) * attention.scaling
        weights.append(scores.softmax(-1).view(4, 6, 6, 6, 6))  # head, rows, columns of both

    for block in model.base_model.visual.blocks:
        block.attn.register_forward_pre_hook(note, with_kwargs=True)
    with torch.no_grad():
        tower_features(model, [ENV.reset(0).picture])
    for distance, attention in enumerate(weights, 1):
        offsets = [(0, -distance), (0, distance), (-distance, 0), (distance, 0)]
        for head, (rows, columns) in enumerate(offsets):
            for row, column in ((2, 2), (2, 3), (3, 2), (3, 3)):
                of_one = attention[head, row, column]
                share = of_one[row + rows, column + columns]
                assert share > 0.5 and share == of_one.max()


@pytest.mark.parametrize("rank", (0, 4))
def test_freeze_vision_trains_the_language_side_alone(rank, tmp_path):
    """Also of a LoRA policy; without the flag the tower moves too."""
    before = load_file(MODEL / "model.safetensors")
    for flag in ("--freeze-vision", "--no-freeze-vision"):
        # answers are cut, so they are invalid, and that costs
        flags = [*SMALL, "--policy-lora-rank", rank, "--max-action-tokens", 4, flag]
        flags += ["--learning-rate", 1e-2, "--run-name", flag.strip("-")]
        run_main("rloo_visual_sokoban", *flags, cwd=tmp_path)
        policy = tmp_path / "runs" / flag.strip("-") / "policy"
        after = load_file(policy / "model.safetensors")
        assert after.keys() == before.keys()
        moved = {name for name in before if not torch.equal(before[name], after[name])}
        assert any("visual" not in name for name in moved)
        assert any("visual" in name for name in moved) == (flag != "--freeze-vision")
        again = read_seeing_model(str(policy), "again", READING)  # with its preprocessor
        assert again.picture_processor.patches(ENV.reset(0).picture)[1] == (6, 6)


if __name__ == "__main__":
    print(json.dumps(measure()))
