"""Engines: what they sample has the trainer's log-probabilities, before and after updates that move
everything.

vLLM runs in one process of its own (this file, as a script), which measures; the tests look at what
it measured.
"""

import asyncio
import contextlib
import copy
import functools
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import types

from runtime.data import Step, Trajectory, flatten
from runtime.engines import EngineError, SamplingParams, served
from runtime.engines import vllm as vllm_engine
from runtime.engines.transformers import TransformersEngine
from runtime.engines.vllm import VllmEngine
from runtime.networks import Network, add_adapter, batch_logprobs, compute_with, policy_weights

import pytest
import torch
from conftest import ROOT, TINY, answers, random_model, settings
from peft import LoraConfig
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

STOP = json.loads((TINY / "config.json").read_text())["eos_token_id"]


def contexts_of(model, count: int = 6, longest: int = 400) -> list[list[int]]:
    """Random ids of unequal lengths; long, so that blocks of the prefix cache fill, and with a
    common beginning."""
    rng, vocabulary = random.Random(0), model.config.vocab_size

    def some(number):
        return [rng.randrange(3, vocabulary) for _ in range(number)]

    common = some(longest // 2)
    return [common[: rng.randint(5, longest)] + some(20 * i + 3) for i in range(count)]


def tiny():
    return AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)


def adapted(model, *names: str):
    """The model with adapters of these names, computing with the policy's and training it."""
    for name in names:
        model = add_adapter(model, name, config_of_lora())
    model.set_adapter("policy")
    return Network("policy", model).activate()


def config_of_lora():
    return LoraConfig(r=4, lora_alpha=4, target_modules="all-linear")


def sampling_of(**changes) -> SamplingParams:
    """As the settings of the tests have it."""
    return SamplingParams(**{"max_tokens": 8} | changes)


def together(engine, *episodes) -> list:
    """The results of these coroutines, which the engine serves."""
    return asyncio.run(served(engine, episodes))


async def episode(engine, number: int, delay: float = 0.0) -> list:
    """(context, answer) of each turn of an episode, whose turns are as many as its number says;
    the world answers after a delay [s], by sleeping."""
    rng, samples = random.Random(number), []
    context = [3 + number % 3] * 20
    for _ in range(1 + number % 4):
        ids, logprobs = await engine.sample(context, sampling_of(max_tokens=6))
        samples.append((context, (ids, logprobs)))
        if delay:
            await asyncio.sleep(delay)
        context = context + ids + [rng.randrange(3, 150) for _ in range(rng.choice((3, 40)))]
    return samples


class Rounds:
    """Plays as rounds do: a round asks who plays, and the next one begins with all its answers."""

    @types.coroutine
    def sample(self, context, sampling):
        return (yield context, sampling)

    def play(self, engine, number: int) -> list:
        """The results of so many episodes."""
        playing = {n: episode(self, n) for n in range(number)}
        asking, samples = {n: each.send(None) for n, each in playing.items()}, {}
        while asking:
            contexts, sampling = [c for c, _ in asking.values()], asking[min(asking)][1]
            for n, sample in zip([*asking], engine.generate(contexts, sampling)):
                try:
                    asking[n] = playing[n].send(sample)
                except StopIteration as end:
                    samples[n] = end.value
                    del asking[n]
        return [samples[n] for n in range(number)]


def asked(engine, args, contexts) -> list:
    """(context, answer) of each context, sampled as the arguments say."""
    sampling = sampling_of(temperature=args.temperature, max_tokens=args.max_action_tokens)
    return [*zip(contexts, answers(engine, contexts, sampling))]


def gap(engine, model, args, contexts) -> float:
    """The largest difference between the engine's and the trainer's log-probability of a token that
    it samples now."""
    return gap_of(model, args, asked(engine, args, contexts))


def gap_of(model, args, samples, ends: bool = True) -> float:
    """The same of samples (context, (ids, log-probabilities)). ends: those without a stop token are
    as long as the arguments say."""
    trajectories = []
    for context, (ids, logprobs) in samples:
        assert 1 <= len(ids) <= args.max_action_tokens and len(ids) == len(logprobs)
        assert STOP not in ids[:-1]
        assert not ends or ids[-1] == STOP or len(ids) == args.max_action_tokens
        trajectory = Trajectory(0)
        trajectory.append(context, ids)
        trajectory.steps.append(Step("", "", logprobs))
        trajectories.append(trajectory)
    batch = flatten(trajectories)
    ours = batch_logprobs(Network("policy", model), batch, args)
    return (ours - batch.engine_logprobs).abs().max().item()


def move(model, seed: int) -> None:
    """An update that moves every parameter that trains, embeddings included, by a tenth of its
    size."""
    torch.manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            before = parameter.detach().clone()
            size = 0.3 if "lora_B" in name else 0.1 * before.std() + 0.01
            parameter.data += size * torch.randn_like(parameter)
            assert not torch.equal(parameter, before)


# ------------ transformers ------------


@pytest.mark.parametrize("temperature", (0.0, 0.6))
def test_transformers_engine_divides_logits_with_the_bias_of_a_head(temperature):
    model, args = tiny(), settings(temperature=temperature)
    model.lm_head.bias = torch.nn.Parameter(3 * torch.randn(model.config.vocab_size), False)
    engine, (context,) = TransformersEngine(str(TINY), [STOP], args), contexts_of(model)[:1]
    engine.load(model)
    ((_, (ids, logprobs)),) = asked(engine, args, [context])
    logits = model(input_ids=torch.tensor([context + ids])).logits[0, len(context) - 1 : -1]
    expected = (logits / (temperature or 1.0)).log_softmax(-1)
    expected = expected[range(len(ids)), ids]
    assert torch.allclose(torch.tensor(logprobs), expected, atol=1e-4)


@pytest.mark.parametrize("temperature", (1.0, 0.6))
def test_transformers_engine_agrees_with_the_trainer(temperature):
    model, args = tiny(), settings(temperature=temperature)
    engine = TransformersEngine(str(TINY), [STOP], args)
    for update in range(4):
        if update:
            move(model, update)
        engine.load(model)
        assert gap(engine, model, args, contexts_of(model)) < 1e-3


def test_transformers_engine_with_a_lora_policy():
    model, args = adapted(tiny(), "policy"), settings()
    engine = TransformersEngine(str(TINY), [STOP], args)
    for update in range(3):
        move(model, update)
        engine.load(model)
        assert gap(engine, model, args, contexts_of(model)) < 1e-3
    assert gap(engine, tiny(), args, contexts_of(model)) > 1e-2  # the adapter is not idle


@pytest.mark.parametrize("lora", (False, True))
def test_transformers_engine_samples_from_the_policy_whatever_its_weights_were_used_for(lora):
    """A PRM's adapter stands on the policy's own weights and has just been computed with."""
    policy = adapted(tiny(), "policy") if lora else tiny()
    phi = add_adapter(policy, "prm", config_of_lora())
    for name, parameter in phi.named_parameters():
        if ".prm." in name and "lora_B" in name:
            torch.nn.init.normal_(parameter)
    args = settings()
    engine = TransformersEngine(str(TINY), [STOP], args)
    engine.load(policy)
    contexts = contexts_of(policy)
    compute_with(phi, ("policy", "prm"))
    samples = asked(engine, args, contexts)
    assert gap_of(policy, args, samples) < 1e-3
    assert gap_of(tiny(), args, samples) < 1e-3  # nothing has moved the policy
    compute_with(phi, ("policy", "prm"))
    with_prm = phi(input_ids=torch.tensor([contexts[0]])).logits
    compute_with(phi, ("policy",))
    assert (phi(input_ids=torch.tensor([contexts[0]])).logits - with_prm).abs().max() > 0.1


def test_transformers_engine_samples_the_whole_softmax():
    """A model's own sampling settings (top-k, top-p, penalties) may not bend the policy; greedy is
    greedy."""
    model = random_model(0)
    bending = dict(top_k=1, top_p=0.1, temperature=0.1, repetition_penalty=2.0)
    model.generation_config.update(do_sample=True, **bending)
    engine = TransformersEngine("", [STOP], settings())
    engine.load(model)
    torch.manual_seed(0)
    context, one = [5, 6, 7], sampling_of(max_tokens=1)
    drawn = torch.tensor([ids[0] for ids, _ in answers(engine, [context] * 4000, one)])
    with torch.no_grad():
        exact = model(input_ids=torch.tensor([context])).logits[0, -1].softmax(-1)
    frequencies = torch.bincount(drawn, minlength=len(exact)) / len(drawn)
    assert (frequencies - exact).abs().max() < 4 * (exact.max() / len(drawn)).sqrt()
    greedy = answers(engine, [context] * 3, sampling_of(max_tokens=1, temperature=0.0))
    assert {ids[0] for ids, _ in greedy} == {exact.argmax().item()}


def played(engine, turns: int) -> list[tuple[list[int], list[float]]]:
    """Samples of a rollout's shape: groups that begin alike, turns of unequal length, episodes that
    end, a context that comes again, one that goes on otherwise than was sampled (it was cut), and
    one that nobody has seen before."""
    rng, contexts, samples = random.Random(0), [[7] * 30] * 3 + [[8] * 11] * 3, []
    for turn in range(turns):
        torch.manual_seed(turn)
        said = answers(engine, contexts, sampling_of(max_tokens=6))
        samples += zip(contexts, said)
        words = [[rng.randrange(3, 150) for _ in range(rng.choice((3, 40)))] for _ in contexts]
        contexts = [c + ids + more for c, (ids, _), more in zip(contexts, said, words)]
        if turn == 1:
            contexts = [contexts[0], samples[-5][0], contexts[3][:-1], [9] * 17, contexts[5]]
        if turn == 2:
            contexts[1] = contexts[1][: -len(words[1]) - 1] + words[1]
    return samples


@pytest.mark.parametrize("engine_memory", (2, 1e-4), ids=("kept", "in parts"))
def test_transformers_engine_keeps_what_it_has_read(engine_memory):
    """Contexts that go on are read from where they ended, and what comes of it are the trainer's
    log-probabilities."""
    model, args = tiny(), settings(max_action_tokens=6, engine_memory=engine_memory)
    engine, read = TransformersEngine("", [STOP], args), []
    engine.load(model)

    def count(_, inputs, __):
        read.append(inputs[0].numel())

    hook = model.get_input_embeddings().register_forward_hook(count)
    samples = played(engine, 5)
    hook.remove()
    assert gap_of(model, args, samples) < 1e-4
    every = sum(len(context) for context, _ in samples)
    assert (sum(read) < 0.6 * every) == (engine_memory > 1), (sum(read), every)


def test_coroutines_get_what_rounds_give_bit_for_bit():
    """The same batches in the same order; and the same seed gives the same samples again."""
    model, played_out = tiny(), []
    for play in (together, together, Rounds().play):
        engine = TransformersEngine("", [STOP], settings())
        engine.load(model)
        torch.manual_seed(5)
        episodes = [9] if play is not together else [episode(engine, n) for n in range(9)]
        played_out.append(play(engine, *episodes))
        assert engine.asked == []
    assert played_out[0] == played_out[1] == played_out[2]
    turns = [len(samples) for samples in played_out[0]]
    assert turns == [1, 2, 3, 4, 1, 2, 3, 4, 1]


def test_who_asks_at_once_is_answered_at_once_and_parts_have_equal_parameters():
    engine, calls = TransformersEngine("", [STOP], settings()), []
    engine.load(tiny())
    generate = engine.generate

    def counted(contexts, sampling):
        calls.append((len(contexts), sampling.max_tokens))
        return generate(contexts, sampling)

    engine.generate = counted
    asking = [engine.sample([5, 6, 7 + n], sampling_of(max_tokens=1 + n % 2)) for n in range(6)]
    lengths = [len(ids) for ids, _ in together(engine, *asking)]
    assert calls == [(3, 1), (3, 2)]
    assert lengths[::2] == [1, 1, 1] and all(1 <= n <= 2 for n in lengths[1::2])


@pytest.mark.parametrize("delay", (0.0, 0.05))
def test_a_slow_partner_does_not_hinder_others(delay):
    """Somebody else in the loop waits for a second; the episodes are done long before."""
    engine = TransformersEngine("", [STOP], settings())
    engine.load(tiny())
    assert slow_partner(engine, delay) < 0.9


def slow_partner(engine, delay: float) -> float:
    """Seconds until eight episodes were done, of which a ninth waits for a second meanwhile."""
    done = []

    async def timed(number):
        await episode(engine, number, delay)
        done.append(time.perf_counter())

    async def partner():
        await asyncio.sleep(1.0)
        await episode(engine, 3)
        return time.perf_counter()

    begin = time.perf_counter()
    late = together(engine, partner(), *map(timed, range(8)))[0]
    assert late - begin > 1.0 and len(done) == 8
    return max(done) - begin


def test_an_answer_that_nobody_waits_for_is_not_missed():
    """An episode that is cancelled while it waits disturbs nobody, in the loop after it neither."""
    engine = TransformersEngine("", [STOP], settings())
    engine.load(tiny())

    async def gives_up():
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(engine.sample([5, 6], sampling_of()), 0.0)

    _, played_on = together(engine, gives_up(), episode(engine, 3))
    assert len(played_on) == 4
    assert len(answers(engine, [[5, 6]], sampling_of())) == 1


def truncated(probabilities: torch.Tensor, top_p: float, top_k: int) -> torch.Tensor:
    """The distribution [vocabulary] without what top_k and then top_p leave out."""
    kept = torch.zeros_like(probabilities)
    falling = sorted(range(len(kept)), key=lambda token: -probabilities[token])
    falling = falling[: top_k or None]
    whole = probabilities[falling].sum()
    for token in falling:
        if kept.sum() / whole >= top_p:
            break
        kept[token] = probabilities[token]
    return kept / kept.sum()


TRUNCATIONS = ((0.7, 0), (1.0, 4), (0.6, 12))  # (top_p, top_k)


def off_truncated(engine, model, top_p: float, top_k: int, number: int = 2000) -> tuple:
    """(largest difference between a token's frequency and its probability, in standard deviations;
    largest difference of its log-probability), where top_p and top_k leave tokens out."""
    context = [5, 6, 7]
    one = sampling_of(max_tokens=1, temperature=1.3, top_p=top_p, top_k=top_k)
    torch.manual_seed(1)
    drawn = [(ids[0], logprobs[0]) for ids, logprobs in answers(engine, [context] * number, one)]
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([context])).logits[0, -1]
    exact = truncated((logits / 1.3).softmax(-1), top_p, top_k)
    assert 1 < (exact > 0).sum() < 0.5 * len(exact)
    tokens, logprobs = (torch.tensor(column) for column in zip(*drawn))
    frequencies = torch.bincount(tokens, minlength=len(exact)) / number
    deviations = (frequencies - exact).abs() / (exact * (1 - exact) / number).sqrt().clamp(min=1e-6)
    return deviations.max().item(), (logprobs - exact.log()[tokens]).abs().max().item()


@pytest.mark.parametrize(("top_p", "top_k"), TRUNCATIONS)
def test_transformers_engine_samples_what_top_p_and_top_k_leave(top_p, top_k):
    model = random_model(0)
    engine = TransformersEngine("", [STOP], settings())
    engine.load(model)
    deviations, gap = off_truncated(engine, model, top_p, top_k)
    assert deviations < 4.5 and gap < 1e-4
    greedy = sampling_of(max_tokens=1, temperature=0.0, top_p=top_p, top_k=top_k)
    ((_, (logprob,)),) = answers(engine, [[5, 6, 7]], greedy)
    assert logprob < -1e-3  # of the whole softmax: the most probable token is taken anyway


def test_sampling_that_no_engine_has_is_refused():
    for wrong in ({"temperature": -1.0}, {"max_tokens": 0}, {"top_p": 0.0}, {"top_k": -1}):
        with pytest.raises(ValueError, match="no engine samples so"):
            SamplingParams(**wrong)
    with pytest.raises(ValueError, match="logprobs=5.*logprobs 0"):
        SamplingParams(logprobs=5)
    ours = SamplingParams(stop_token_ids=[2])
    other = ours.clone()
    other.temperature = 0.0
    other.stop_token_ids.append(3)
    assert ours == SamplingParams(stop_token_ids=[2])


def test_transformers_engine_forgets_with_the_weights():
    """After load nothing that the old weights computed is used."""
    model, args, context = tiny(), settings(max_action_tokens=6, engine_memory=2), [7] * 20
    engine, fresh = (TransformersEngine("", [STOP], args) for _ in range(2))
    engine.load(model)
    answers(engine, [context], sampling_of(max_tokens=6))
    move(model, 1)
    samples = []
    for each in (engine, fresh):
        each.load(model)
        assert each.cache is None
        torch.manual_seed(0)
        samples.append(answers(each, [context + [9] * 5], sampling_of(max_tokens=6)))
    assert samples[0] == samples[1]
    assert engine.cache.get_seq_length() > 0
    engine.sleep()
    assert engine.cache is None


def test_transformers_engine_reads_a_window_anew():
    """Attention over a window would count what is hidden: such a model's contexts are read from
    their beginning."""
    config = tiny().config
    config.use_sliding_window, config.sliding_window, config.max_window_layers = True, 16, 0
    config.layer_types = ["sliding_attention"] * config.num_hidden_layers
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    args = settings(max_action_tokens=6, engine_memory=2)
    engine = TransformersEngine("", [STOP], args)
    engine.load(model)
    assert gap_of(model, args, played(engine, 4)) < 1e-4


def test_keys_and_values_are_appended_without_copying_them():
    """As transformers' own layer has them, also after rows are chosen anew; memory is new only
    where there is no room."""
    from runtime.engines.transformers import ROOM, RoomyLayer

    from transformers.cache_utils import DynamicLayer

    torch.manual_seed(0)
    ours, theirs, places = RoomyLayer(), DynamicLayer(), []
    for step in range(3 * ROOM):
        rows, tokens = (4, 1 + step % 3) if step < ROOM else (6, 1)
        if step == ROOM:
            for layer in (ours, theirs):
                layer.reorder_cache(torch.tensor([3, 3, 0, 1, 2, 2]))
        keys, values = torch.randn(2, rows, 2, tokens, 8)
        for one, two in zip(ours.update(keys, values), theirs.update(keys, values)):
            assert torch.equal(one, two)
        assert ours.get_seq_length() == theirs.get_seq_length()
        places.append(ours.keys.untyped_storage().data_ptr())
    copies = sum(one != two for one, two in zip(places, places[1:]))
    assert 1 < copies <= 5


# ------------ vLLM ------------


def measure_vllm() -> dict:
    """Largest differences, by name. The engine starts on the tiny model's file."""
    model, args, gaps = tiny(), settings(), {}
    contexts = contexts_of(model)
    engine = VllmEngine(str(TINY), [STOP], args)
    whole, reset = vllm_engine.repack_tied_head, engine.llm.reset_prefix_cache
    assert model.config.tie_word_embeddings
    gaps["start"] = gap(engine, model, args, contexts)
    for top_p, top_k in TRUNCATIONS:
        off = off_truncated(engine, model, top_p, top_k)
        gaps[f"frequencies {top_p} {top_k}"], gaps[f"truncated {top_p} {top_k}"] = off
    for update in (1, 2, 3):
        move(model, update)
        # the update is felt at all
        gaps[f"stale {update}"] = gap(engine, model, args, contexts)
        engine.load(model)
        gaps[f"update {update}"] = gap(engine, model, args, contexts)
    for temperature in (0.6, 1.4):
        other = settings(temperature=temperature)
        gaps[f"temperature {temperature}"] = gap(engine, model, other, contexts)

    move(model, 4)
    vllm_engine.repack_tied_head = lambda network: None
    engine.load(model)
    gaps["without the head"] = gap(engine, model, args, contexts)
    vllm_engine.repack_tied_head = whole
    engine.load(model)
    gaps["with the head"] = gap(engine, model, args, contexts)

    move(model, 5)
    engine.llm.reset_prefix_cache = lambda: None
    engine.load(model)
    gaps["without the reset"] = gap(engine, model, args, contexts)
    engine.llm.reset_prefix_cache = reset
    engine.load(model)
    gaps["with the reset"] = gap(engine, model, args, contexts)

    policy = adapted(tiny(), "policy", "prm")
    for name, parameter in policy.named_parameters():
        if ".prm." in name and "lora_B" in name:
            torch.nn.init.normal_(parameter)  # may not leak into the policy
    for update in (1, 2, 3):
        move(policy, update)
        before = copy.deepcopy(policy.state_dict())
        engine.load(policy)
        gaps[f"lora {update}"] = gap(engine, policy, args, contexts)
        assert all(torch.equal(before[name], value) for name, value in policy.state_dict().items())
    gaps["lora against its base"] = gap(engine, tiny(), args, contexts)
    once, again = (
        [ids for ids, _ in answers(engine, contexts, sampling_of(temperature=0.0))]
        for _ in range(2)
    )
    gaps["greedy differs"] = float(once != again)

    gaps["slow partner"] = slow_partner(engine, 0.0)
    gaps["left over"] = left_over(engine)

    dead, step, steps = engine.llm, engine.llm.llm_engine.step, itertools.count()

    def die(after=0):
        if next(steps) >= after:
            raise RuntimeError("the engine core died")
        return step()

    dead.llm_engine.step = functools.partial(die, after=3)
    sampling = [sampling_of(max_tokens=1 + n) for n in range(6)]  # some are answered before
    asking = [engine.sample(context, each) for context, each in zip(contexts, sampling)]
    samples = [*zip(contexts, together(engine, *asking))]
    gaps["answered before its death"] = float(sum(len(ids) <= 3 for _, (ids, _) in samples))
    gaps["after its death"] = gap_of(policy, args, samples, ends=False)
    gaps["restarts"] = float(engine.restarts if engine.llm is not dead else -1)

    move(policy, 4)
    engine.load(policy)
    gaps["the new one after an update"] = gap(engine, policy, args, contexts)
    gaps["left over by the new one"] = left_over(engine)
    prompt, engine.prompt = engine.prompt, lambda context: {"prompt_token_ids": context[1:]}
    gaps["other ids"] = raised_by(engine, contexts, "the engine saw other ids")
    engine.prompt = prompt
    gaps["after other ids"] = gap(engine, policy, args, contexts)
    engine.llm.llm_engine.step = die
    gaps["the second death"] = raised_by(engine, contexts, "failed twice (RuntimeError: the engine")
    return gaps


def measure_adapter() -> dict:
    """How ten small steps of a LoRA policy in bfloat16 shift log-probabilities, in vLLM and in the
    trainer. The model is a random one whose embeddings have a common part, as trained ones do."""
    import vllm

    config = dict(hidden_size=512, intermediate_size=1024, num_hidden_layers=3, vocab_size=512)
    config |= dict(num_attention_heads=8, num_key_value_heads=4, head_dim=64)
    config |= dict(initializer_range=0.03, tie_word_embeddings=False, eos_token_id=2)
    torch.manual_seed(0)
    base = Qwen3ForCausalLM(Qwen3Config(**config)).bfloat16()
    base.get_input_embeddings().weight.data += 0.1 * torch.randn(512).bfloat16()
    args = settings(dtype="bfloat16", policy_lora_rank=60)  # for which vLLM makes room for 64
    lora = LoraConfig(r=60, lora_alpha=60, target_modules="all-linear")
    model = add_adapter(copy.deepcopy(base), "policy", lora)
    with tempfile.TemporaryDirectory() as path:
        base.save_pretrained(path)
        engine = VllmEngine(path, [2], args)
    core = engine.llm.llm_engine
    trajectory = Trajectory(0)
    trajectory.append([5] * 4, random.Random(0).choices(range(3, 512), k=60))
    trajectory.steps.append(Step("", "", [0.0] * 60))
    batch = flatten([trajectory])

    def of_trainer(causal):
        return batch_logprobs(Network("policy", causal), batch, args)

    def of_engine():
        asked = {"prompt_token_ids": trajectory.token_ids}
        params = vllm.SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
        (found,) = engine.llm.generate(asked, params, use_tqdm=False, lora_request=engine.adapter)
        of_each = zip(trajectory.token_ids[4:], found.prompt_logprobs[4:])
        return torch.tensor([told[token].logprob for token, told in of_each])

    engine.load(model)
    before = of_trainer(model), of_engine()
    policy = Network("policy", model)
    optimizer = torch.optim.AdamW(policy.trained, 1e-5, weight_decay=0.0)
    advantages = torch.randn(60, generator=torch.Generator().manual_seed(1))
    for _ in range(10):
        (batch_logprobs(policy, batch, args, graph=True) * advantages).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        engine.load(model)
    for name, weight in policy_weights(model):
        base.get_parameter(name).data.copy_(weight)  # rounded
    layers = [layer for layer in model.modules() if hasattr(layer, "lora_A")]
    moved = [layer.get_delta_weight("policy").norm() / layer.weight.norm() for layer in layers]
    trainer, vllms, merged = (
        after - old
        for after, old in zip((of_trainer(model), of_engine(), of_trainer(base)), before + before)
    )
    told = {"moved": sum(moved).item() / len(moved), "shift": trainer.std().item()}
    told["gap"] = (before[0] - before[1]).abs().mean().item()
    for name, shift in (("vLLM", vllms), ("merged", merged)):
        told[f"correlation, {name}"] = torch.corrcoef(torch.stack([trainer, shift]))[0, 1].item()
        told[f"share, {name}"] = (shift @ trainer / (trainer @ trainer)).item()
    return told | {"adapters": [*core.list_loras()]}


def raised_by(engine, contexts, told: str) -> float:
    """1 if asking ends in an EngineError that says so."""
    try:
        answers(engine, contexts, sampling_of())
    except EngineError as error:
        return float(told in str(error))
    return 0.0


def left_over(engine) -> float:
    """Requests that are left in the engine and its core where serving was cancelled in the middle
    of answers."""
    core = engine.llm.llm_engine

    async def run():
        serving = asyncio.ensure_future(engine.serve())
        asking = [engine.sample(context, sampling_of()) for context in contexts_of(engine.model)]
        asking = [asyncio.ensure_future(each) for each in asking]
        for _ in range(4):
            await asyncio.sleep(0)
        assert core.get_num_unfinished_requests()
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        for task in asking:
            task.cancel()

    asyncio.run(run())
    running = core.engine_core.engine_core.scheduler.get_num_unfinished_requests()
    return float(
        core.get_num_unfinished_requests() + running + len(engine.owed) + len(engine.asked)
    )


@pytest.fixture(scope="module")
def measured() -> dict:
    """What this file measures as a script: one process, which imports vLLM once."""
    pytest.importorskip("vllm")
    command, own = [sys.executable, __file__], os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=own)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.strip().splitlines()[-1])


@pytest.fixture(scope="module")
def gaps(measured):
    return measured["gaps"]


def test_vllm_agrees_with_the_trainer_before_and_after_updates(gaps):
    assert gaps["start"] < 1e-3
    for update in (1, 2, 3):
        assert gaps[f"stale {update}"] > 1e-2 and gaps[f"update {update}"] < 1e-3


def test_vllm_at_other_temperatures(gaps):
    assert gaps["temperature 0.6"] < 1e-3 and gaps["temperature 1.4"] < 1e-3
    assert gaps["greedy differs"] == 0


def test_vllm_needs_the_tied_head_repacked(gaps):
    """Were the hand-over right without it, this would say so; with it, it is exact."""
    assert gaps["without the head"] > 1e-2 and gaps["with the head"] < 1e-3


def test_vllm_needs_its_prefix_cache_reset(gaps):
    assert gaps["without the reset"] > 1e-2 and gaps["with the reset"] < 1e-3


def test_vllm_takes_a_lora_policy_in_float32_merged_and_leaves_the_base(gaps):
    assert all(gaps[f"lora {update}"] < 1e-3 for update in (1, 2, 3))
    assert gaps["lora against its base"] > 1e-2


def test_vllm_is_replaced_once_when_it_dies_with_the_current_weights(gaps):
    assert gaps["after its death"] < 1e-3 and gaps["the new one after an update"] < 1e-3
    assert gaps["answered before its death"] > 0
    assert gaps["restarts"] == 1.0 and gaps["the second death"] == 1.0


def test_vllm_is_clean_after_it_was_cancelled(gaps):
    assert gaps["left over"] == gaps["left over by the new one"] == 0.0


def test_vllm_that_saw_other_ids_is_caught(gaps):
    assert gaps["other ids"] == 1.0 and gaps["after other ids"] < 1e-3


def test_vllm_answers_beside_a_slow_partner(gaps):
    assert gaps["slow partner"] < 0.9


@pytest.mark.parametrize("left", TRUNCATIONS)
def test_vllm_samples_what_top_p_and_top_k_leave(gaps, left):
    top_p, top_k = left
    assert gaps[f"frequencies {top_p} {top_k}"] < 4.5 and gaps[f"truncated {top_p} {top_k}"] < 1e-3


def test_vllm_shifts_as_the_trainer_does_by_small_steps_of_a_lora_policy_in_bfloat16(measured):
    """Ten steps of AdamW at 1e-5, by which weights move less than bfloat16 can say of most."""
    found = measured["adapter"]
    print(found)
    assert found["correlation, vLLM"] > 0.95 and 0.9 < found["share, vLLM"] < 1.1
    assert found["share, merged"] < 0.6 and found["moved"] < 1e-3
    assert found["gap"] < 0.02
    assert found["adapters"] == [11]  # those before are gone


if __name__ == "__main__":
    print(json.dumps({"gaps": measure_vllm(), "adapter": measure_adapter()}))
