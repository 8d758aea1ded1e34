"""Gradients: those of the scripts equal plain autograd; micro-batches equal one batch; padding and
order change nothing."""

import copy
import gc
import math
import random
import weakref
from types import SimpleNamespace

from runtime import data as batching
from runtime.data import Step, Trajectory, flatten, micro_batches, padded, sum_per_step
from runtime.networks import (
    Network,
    action_logprobs,
    batch_logprobs,
    over_batch,
    policy_weights,
    recompute_layers,
    sum_gradients,
)

import pytest
import torch
from conftest import (
    VOCABULARY,
    load,
    network,
    random_model,
    random_trajectories,
    settings,
)
from peft import LoraConfig
from test_math import compares_all_steps, versions
from torch.optim import swa_utils

BUDGETS = (1, 40, 100, 8192)  # one sequence a micro-batch, a few, all


class Capture:
    """An optimiser that keeps the gradients instead of following them."""

    def __init__(self, parameters):
        self.parameters = parameters
        self.param_groups = [{"params": self.parameters}]

    def zero_grad(self):
        for parameter in self.parameters:
            parameter.grad = None

    def step(self):
        zeros = (torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters)
        self.gradient = flat(zeros)


def captured(each):
    """A Network, or one of a model, whose optimiser is a Capture."""
    each = each if isinstance(each, Network) else network(each)
    each.optimizer = Capture(each.trained)
    return each


LOST = dict(use_dora=True, lora_bias=True, lora_dropout=0.1, modules_to_save=["lm_head"])
LOST |= dict(trainable_token_indices=[3], bias="lora_only")


def lora(rank=4):
    return LoraConfig(r=rank, lora_alpha=rank, target_modules="all-linear")


def flat(tensors):
    return torch.cat([t.detach().reshape(-1).double() for t in tensors])


def assert_same(gradient, expected):
    """Equal to 1e-5 of their length."""
    assert expected.norm() > 1e-4, "a gradient of zero compares to nothing"
    assert (gradient - expected).norm() <= 1e-5 * expected.norm()


def plain_logprobs(model, trajectories, temperature=1.0):
    """[trajectory][step] -> log-probabilities of its tokens: one sequence at a time, no padding,
    all logits."""
    result = []
    for t in trajectories:
        steps = [[] for _ in t.steps]
        for start, end in zip(t.starts, [*t.starts[1:], len(t.token_ids)]):
            ids = torch.tensor([t.token_ids[start:end]])
            logprobs = torch.log_softmax(model(input_ids=ids).logits[0].float() / temperature, -1)
            for place in range(start + 1, end):
                if t.step_ids[place] >= 0:
                    logprob = logprobs[place - start - 1, t.token_ids[place]]
                    steps[t.step_ids[place]].append(logprob)
        result.append(steps)
    return result


def gradient_of(loss, each):
    return flat(torch.autograd.grad(loss, each.trained))


def moved(each, seed: int = 0, scale: float = 0.05):
    """The network after all that it trains has moved at random, as by an optimiser."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in each.trained:
            parameter += scale * torch.randn(parameter.shape, generator=draw)
    return each


def prm_of(module, policy, rank=4):
    """A script's PRM beside this policy, that has learnt something: a full copy, as published, or
    an adapter."""
    paper = module.__name__.startswith("istar_paper_")
    copied = paper or not rank
    return moved(policy.copy("prm") if copied else policy.with_adapter("prm", lora(rank)))


def new_prm():
    """(policy, adapter) as a run begins with them: the adapter is the identity."""
    policy = network(random_model(0))
    return policy, policy.with_adapter("prm", lora())


def prm_step(module, prm, policy, trajectories, args) -> dict:
    """A step of the PRM on these episodes, as main takes it."""
    if hasattr(module, "draw"):
        return module.prm_update(prm, policy, trajectories, args)
    batch = flatten(trajectories)
    of_steps = [sum_per_step(batch_logprobs(n, batch, args), batch) for n in (prm, policy)]
    pairs = module.preference_pairs(batch.outcomes, batch.group)
    return module.prm_update(prm, batch, *of_steps, pairs, args)


def old_logprobs_of(batch, args):
    return batch_logprobs(network(random_model(0)), batch, args)


def history(value):
    return pytest.mark.parametrize("history", value, ids=lambda h: "windows" if h else "whole")


@pytest.fixture(params=versions("prm_update"))
def istar(request):
    return load(request.param)


@pytest.fixture(params=versions("policy_update"))
def trainer(request):
    return load(request.param)


# ------------ the PRM: trajectory DPO ------------


def plain_prm_gradient(module, prm, trajectories, old, pairs, args):
    """Autograd of mean -log sigmoid(L+ - L-) + ridge * mean r_phi^2 in one graph, written out; as
    published there is no ridge, and all steps are compared."""
    flat_old, rewards = iter(old.tolist()), []
    for steps in plain_logprobs(prm.activate(), trajectories, args.temperature):
        rewards.append([args.beta * sum(token - next(flat_old) for token in s) for s in steps])
    losses = []
    for pair in pairs:
        won, lost = (rewards[trajectory] for trajectory in pair)
        ablated = module.__name__.endswith("_ablations") and "length" in args.as_published
        if not (compares_all_steps(module) or ablated):
            both = min(len(won), len(lost))
            won, lost = won[:both], lost[:both]
        losses.append(torch.log1p(torch.exp(-(sum(won) - sum(lost)))))
    loss = sum(losses) / len(losses)
    if hasattr(module, "draw"):
        steps = [reward for of_each in rewards for reward in of_each]
        loss = loss + args.prm_ridge * sum(reward**2 for reward in steps) / len(steps)
    return loss, gradient_of(loss, prm)


@history((False, True))
@pytest.mark.parametrize(
    "changes", [{}, dict(prm_ridge=2.0, temperature=0.7, as_published=("length",))], ids=str
)
def test_dpo_gradient_equals_autograd_for_any_micro_batch(istar, changes, history):
    trajectories = random_trajectories(groups=4, history=history)
    for trajectory in trajectories[4:8]:
        trajectory.outcome = 1.0  # a group of one outcome stands in no pair
    policy = network(random_model(0))
    prm, batch = captured(prm_of(istar, policy)), flatten(trajectories)
    args = settings(beta=0.5, **changes)
    old = batch_logprobs(policy, batch, args)
    pairs = istar.preference_pairs(batch.outcomes, batch.group)
    loss, expected = plain_prm_gradient(istar, prm, trajectories, old, pairs, args)
    for args.run_args.micro_batch_tokens in BUDGETS:
        stats = prm_step(istar, prm, policy, trajectories, args)
        assert_same(prm.optimizer.gradient, expected)
        assert stats["loss"] == pytest.approx(loss.item(), rel=1e-4)
        assert stats["grad_norm"] == pytest.approx(expected.norm().item(), rel=1e-4)


def test_the_memory_of_the_prms_update_does_not_grow_with_the_pairs(istar):
    """What autograd keeps at once is a micro-batch's: of 8 episodes of 10 steps as much as of 2."""
    held = Held()
    for size in (2, 8):
        trajectories = equal_trajectories(size)
        policy = network(random_model(0))
        prm, args = captured(prm_of(istar, policy)), settings(micro_batch_tokens=1)
        held.peaks.append(0)
        with torch.autograd.graph.saved_tensors_hooks(held.keep, lambda kept: kept.tensor):
            prm_step(istar, prm, policy, trajectories, args)
        assert not held.now and prm.optimizer.gradient.norm() > 0
    assert held.peaks[0] > 10**5  # [bytes]
    assert held.peaks[1] <= 1.05 * held.peaks[0]


class Held:
    """How much of a graph is there at once: of everything that autograd saves and still has."""

    def __init__(self):
        self.now, self.peaks = 0, []

    def keep(self, tensor):
        return Kept(tensor, self)


class Kept:
    def __init__(self, tensor, held):
        self.tensor, self.held, self.size = tensor, held, tensor.numel() * tensor.element_size()
        held.now += self.size
        held.peaks[-1] = max(held.peaks[-1], held.now)

    def __del__(self):
        self.held.now -= self.size


def equal_trajectories(size: int) -> list:
    """A group of so many episodes of 10 steps, each 60 tokens long; every other one wins."""
    found = random_trajectories(groups=1, size=size)
    for number, t in enumerate(found):
        step = t.steps[0]
        t.token_ids = [(7 * number + place) % VOCABULARY for place in range(60)]
        t.step_ids = [place // 6 if place % 6 > 3 else -1 for place in range(60)]
        t.outcome, t.steps = float(number % 2), [copy.deepcopy(step) for _ in range(10)]
    return found


def test_the_ridge_is_what_adds_to_the_gradient():
    """The cases above with a ridge test nothing unless it is felt."""
    module, policy = load("istar_webshop"), network(random_model(0))
    prm, gradients = captured(prm_of(module, policy)), []
    for ridge in (2.0, 0.0):
        args = settings(prm_ridge=ridge, beta=0.5)
        module.prm_update(prm, policy, random_trajectories(), args)
        gradients.append(prm.optimizer.gradient)
    assert (gradients[0] - gradients[1]).norm() > 0.1 * gradients[1].norm()


def plant(trajectories):
    """Winners say 7 and losers 8, in the middle of noise."""
    for t in trajectories:
        said = 7 if t.outcome else 8
        t.token_ids = [said if s >= 0 else i for i, s in zip(t.token_ids, t.step_ids)]
    return trajectories


@pytest.mark.parametrize("rank", (0, 4))
def test_prm_learns_a_planted_difference(istar, rank):
    """Pairs never learnt from are ranked right; of an adapter its own weights alone move."""

    def planted(seed):
        return plant(random_trajectories(seed, groups=4))

    def accuracy(trajectories):
        batch = flatten(trajectories)
        phi, old = (sum_per_step(batch_logprobs(n, batch, args), batch) for n in (prm, policy))
        pairs = istar.preference_pairs(batch.outcomes, batch.group)
        given = [False] if istar.__name__.endswith("ablations") else []
        margins = istar.margins(phi - old, batch.step_traj, pairs, *given)
        return ((margins.sign() + 1) / 2).mean().item()

    args, policy = settings(beta=0.5, prm_ridge=0.1), network(random_model(0))
    prm = policy.with_adapter("prm", lora()) if rank else policy.copy("prm")
    prm.optimizer = torch.optim.AdamW(prm.trained, lr=1e-2 if rank else 3e-3)
    before = {name: p.detach().clone() for name, p in prm.model.named_parameters()}
    assert accuracy(planted(99)) == 0.5  # it starts as the policy
    stats = [prm_step(istar, prm, policy, planted(seed), args) for seed in range(20)]
    assert stats[0]["margin"] == 0.0 and stats[0]["grad_norm"] > 0
    assert stats[0]["loss"] == pytest.approx(math.log(2), rel=1e-5)
    assert stats[-1]["margin"] > 0 and accuracy(planted(99)) > 0.9
    after = dict(prm.model.named_parameters())
    moved_names = {name for name in before if not torch.equal(after[name], before[name])}
    assert moved_names == {name for name in before if "lora_" in name or not rank}


@pytest.mark.parametrize("more", LOST)
def test_what_an_adapter_would_lose_on_the_way_to_the_engine_is_refused(more):
    """Weights for engines and files are W + scale * B A; dropout would act while it samples."""
    wanted = LoraConfig(r=4, target_modules="all-linear", **{more: LOST[more]})
    with pytest.raises(SystemExit, match=rf"^LoraConfig\({more}=\.\.\.\): "):
        network(random_model(0)).with_adapter("prm", wanted)


@pytest.mark.parametrize("rank", (0, 4))
def test_the_average_starts_as_the_prm_and_follows_it(rank):
    """On a LoRA policy too, whose adapter both compute with; the policy and the PRM stay."""

    def logprobs():
        return [batch_logprobs(each, batch, args) for each in (policy, prm, average)]

    args, batch = settings(), flatten(random_trajectories())
    policy = network(random_model(0))
    if rank:
        policy = moved(network(policy.with_adapter("policy", lora(rank)).model))
    prm = moved(policy.with_adapter("prm", lora()))
    average = prm.copy("prm_average")
    of_policy, first, own = logprobs()
    assert torch.equal(own, first) and not torch.equal(first, of_policy)
    before = [p.detach().clone() for p in average.trained]
    moved(prm)
    _, second, own = logprobs()
    assert torch.equal(own, first) and not torch.equal(second, first)
    swa_utils.get_ema_multi_avg_fn(0.8)(average.trained, prm.trained, None)
    for old, new, found in zip(before, prm.trained, average.trained, strict=True):
        torch.testing.assert_close(found, 0.8 * old + 0.2 * new)
    again, unmoved, own = logprobs()
    assert torch.equal(again, of_policy) and torch.equal(unmoved, second)
    assert not torch.equal(own, first) and not torch.equal(own, second)


def test_as_published_the_pairs_are_ranked_by_the_prm_before_its_step():
    """istar_paper_*: what prm/pair_accuracy says is of pairs that the PRM has not learnt from; a
    tie, as of one that is the policy still, counts half."""
    module, policy, args = load("istar_paper_webshop"), network(random_model(0)), settings(beta=0.5)
    prm = policy.copy("prm")
    prm.optimizer = torch.optim.AdamW(prm.trained, lr=0.01)
    trajectories = plant(random_trajectories())
    accuracies = []
    for _ in range(4):
        stats = prm_step(module, prm, policy, trajectories, args)
        accuracies.append(stats["pair_accuracy"])
    assert accuracies[0] == 0.5 and accuracies[-1] > 0.9


@history((False, True))
def test_a_steps_log_ratio_is_the_sum_of_its_tokens(history):
    """What rewards are made of, for any micro-batch."""
    trajectories, policy = random_trajectories(history=history), network(random_model(0))
    prm, batch, args = moved(policy.with_adapter("prm", lora())), flatten(trajectories), settings()
    old = batch_logprobs(policy, batch, args)
    flat_old, expected = iter(old.tolist()), []
    for steps in plain_logprobs(prm.activate(), trajectories):
        expected += [sum(token.item() - next(flat_old) for token in step) for step in steps]
    for args.run_args.micro_batch_tokens in BUDGETS:
        ours = sum_per_step(batch_logprobs(prm, batch, args) - old, batch)
        assert ours.tolist() == pytest.approx(expected, abs=2e-4)
    assert max(map(abs, expected)) > 0.2


# ------------ networks beside each other ------------


@pytest.mark.parametrize("kind", ("dense", "adapter", "dense, PRM adapted"))
def test_the_initial_policy_stays_what_it_was(kind, batch):
    """log pi_init is that of the model that was read, whatever is learnt; and asking for it leaves
    the policy as it was."""
    policy = network(random_model(0))
    if kind == "adapter":
        policy = network(policy.with_adapter("policy", lora()).model)
    initial = policy.initial()
    prm = policy.with_adapter("prm", lora()) if "PRM" in kind else None
    first = batch_logprobs(policy, batch, settings())
    moved(policy, 1)
    if prm:
        moved(prm, 2)
    own, weights = batch_logprobs(policy, batch, settings()), dense(policy.model)
    assert torch.equal(batch_logprobs(initial, batch, settings()), first)
    assert torch.equal(batch_logprobs(policy, batch, settings()), own)
    assert not torch.equal(own, first)
    assert all(map(torch.equal, weights, dense(policy.model)))


def test_an_adapter_on_the_initial_policy_does_not_follow_it(batch):
    """PRIME's: it starts as pi_ref, and what the policy learns is not in it."""
    for rank in (0, 4):
        policy = network(random_model(0))
        if rank:
            policy = network(policy.with_adapter("policy", lora(rank)).model)
        reference = policy.initial()
        prm = reference.with_adapter("prm", lora())
        first = batch_logprobs(policy, batch, settings())
        moved(policy)
        assert torch.equal(batch_logprobs(prm, batch, settings()), first)
        moved(prm)
        assert torch.equal(batch_logprobs(reference, batch, settings()), first)
        assert (batch_logprobs(prm, batch, settings()) - first).abs().max() > 1e-2
        assert (batch_logprobs(policy, batch, settings()) - first).abs().max() > 1e-2


def dense(model) -> list[torch.Tensor]:
    """The weights that the policy computes with, an adapter added."""
    return [weight.clone() for _, weight in policy_weights(model)]


@pytest.mark.parametrize("rank", (0, 4))
def test_a_copy_goes_its_own_way(rank, batch):
    """It starts with the policy's weights; of a LoRA policy, whose base both have, with those of
    its adapter. Afterwards neither moves the other."""
    policy = network(random_model(0))
    if rank:
        policy = moved(network(policy.with_adapter("policy", lora(rank)).model))
    logprobs = lambda each: batch_logprobs(each, batch, settings())  # noqa: E731
    first = logprobs(policy)
    prm = policy.copy("prm")
    assert (prm.plain is policy.plain) == bool(rank)
    assert [p.shape for p in prm.trained] == [p.shape for p in policy.trained]
    assert {id(p) for p in prm.trained}.isdisjoint({id(p) for p in policy.trained})
    assert torch.equal(logprobs(prm), first)
    moved(policy, 1)
    assert torch.equal(logprobs(prm), first) and not torch.equal(logprobs(policy), first)
    after = logprobs(policy)
    moved(prm, 2)
    assert torch.equal(logprobs(policy), after) and not torch.equal(logprobs(prm), first)


@pytest.mark.parametrize("rank", (0, 4))
def test_an_adapter_follows_the_policy(rank, batch):
    """What the policy learns is in its log-probabilities at once, bit for bit where it has learnt
    nothing itself; the policy, and what an engine gets of it, feels nothing of the adapter. Each
    trains its own parameters."""
    policy = network(random_model(0))
    if rank:
        policy = network(policy.with_adapter("policy", lora(rank)).model)
    prm = policy.with_adapter("prm", lora())
    logprobs = lambda each: batch_logprobs(each, batch, settings())  # noqa: E731
    first = logprobs(policy)
    moved(policy, 1)
    after = logprobs(policy)
    assert (after - first).abs().max() > 1e-2
    assert (logprobs(prm) - after).abs().max() < 1e-5  # two adapters: a sum is added in parts
    assert rank or torch.equal(logprobs(prm), after)
    moved(prm, 2)
    assert (logprobs(prm) - after).abs().max() > 1e-2
    assert torch.equal(logprobs(policy), after)
    for each in (prm, policy, prm):
        model = each.activate()
        training = {id(p) for p in model.parameters() if p.requires_grad}
        assert training == {id(p) for p in each.trained} != set()

    loaded = random_model(9)  # what the engine is given and a checkpoint keeps
    missing, unexpected = loaded.load_state_dict(dict(policy_weights(policy.model)), strict=False)
    assert not unexpected and missing in ([], ["lm_head.weight"])
    assert (logprobs(network(loaded)) - after).abs().max() < 1e-3


@pytest.mark.parametrize("rank", (0, 4))
def test_two_adapters_on_one_policy_train_their_own_parameters(rank, batch):
    policy = network(random_model(0))
    if rank:
        policy = network(policy.with_adapter("policy", lora(rank)).model)
    both = [policy.with_adapter(name, lora()) for name in ("prm", "critic")]
    trained = [{id(p) for p in each.trained} for each in (policy, *both, both[0].copy("average"))]
    assert all(trained) and len(set.union(*trained)) == sum(map(len, trained))
    first = [batch_logprobs(each, batch, settings()) for each in (policy, *both)]
    moved(both[1])
    after = [batch_logprobs(each, batch, settings()) for each in (policy, *both)]
    assert torch.equal(first[0], after[0]) and torch.equal(first[1], after[1])
    assert not torch.equal(first[2], after[2])


def test_a_network_that_trains_an_adapter_needs_one():
    with pytest.raises(SystemExit, match="--prm-lora-rank 0: it trains an adapter"):
        network(random_model(0)).with_adapter("prm", None)


# ------------ the policy ------------


def ratio_of(module, args) -> str:
    """What a ratio of this script compares: iStar's a step, GAGPO's the mean of its tokens, that of
    the other baselines a token, the ablations' what --ratio says."""
    if module.__name__.endswith("_ablations"):
        return args.ratio
    kinds = {"istar": "step", "gagpo": "step-mean"}
    return kinds.get(module.__name__.split("_")[0], "token")


def plain_policy_gradient(module, policy, trajectories, old, advantages, args):
    """Autograd of -mean min(rho A, clip(rho) A) over tokens or steps, written out. advantages: of
    every step, or of every token."""
    flat_old, flat_advantages, terms = iter(old.tolist()), iter(advantages.tolist()), []
    ratio, per_token = ratio_of(module, args), len(advantages) == len(old)
    for steps in plain_logprobs(policy.activate(), trajectories, args.temperature):
        for step in steps:
            given = [next(flat_advantages) for _ in (step if per_token else step[:1])]
            logratios = [token - next(flat_old) for token in step]
            if ratio != "token":
                logratios = [sum(logratios) / (len(logratios) if ratio == "step-mean" else 1)]
            for number, logratio in enumerate(logratios):
                advantage = given[number if per_token else 0]
                rho = torch.exp(logratio)
                clipped = torch.clamp(rho, 1 - args.clip, 1 + args.clip)
                terms.append(torch.minimum(rho * advantage, clipped * advantage))
    return gradient_of(-sum(terms) / len(terms), policy)


def policy_case(history=False, seed=0):
    """(policy, trajectories, batch, old log-probabilities of another model, advantages)."""
    trajectories = random_trajectories(seed, history=history)
    batch, policy = flatten(trajectories), captured(random_model(0))
    torch.manual_seed(seed)
    old = batch_logprobs(policy, batch, settings())
    old = old + 0.15 * torch.randn(len(batch.token_step))
    return policy, trajectories, batch, old, torch.randn(len(batch.step_traj))


@history((False, True))
def test_policy_gradient_equals_autograd_for_any_micro_batch(trainer, history):
    policy, trajectories, batch, old, advantages = policy_case(history)
    for ratio in ("step", "step-mean", "token"):
        args, stats = settings(ratio=ratio), []
        if ratio not in ("step", ratio_of(trainer, args)):
            continue  # it has one ratio, whatever the flag says
        expected = plain_policy_gradient(trainer, policy, trajectories, old, advantages, args)
        for args.run_args.micro_batch_tokens in BUDGETS:
            stats.append(trainer.policy_update(policy, batch, old, advantages, args))
            assert_same(policy.optimizer.gradient, expected)
            assert stats[-1] == pytest.approx(stats[0], rel=1e-4)
        assert stats[0]["grad_norm"] == pytest.approx(expected.norm().item(), rel=1e-4)
        assert 0.05 < stats[0]["clip_fraction"] < 0.95  # both branches were taken


def test_the_engines_weights_are_in_the_gradient(monkeypatch):
    """A = pi_old by the trainer / pi_old by the engine, capped, times A, of steps and of tokens."""
    for script in ("istar_webshop", "rloo_webshop"):
        module, args = load(script), settings()
        policy, trajectories, batch, old, advantages = policy_case()
        per_token = ratio_of(module, args) == "token"
        number = len(old) if per_token else len(advantages)
        weights = torch.rand(number) + 0.5
        monkeypatch.setattr(module, "engine_weights", lambda *_, w=weights: w)
        module.policy_update(policy, batch, old, advantages, args)
        weighted = (advantages[batch.token_step] if per_token else advantages) * weights
        expected = plain_policy_gradient(module, policy, trajectories, old, weighted, args)
        assert_same(policy.optimizer.gradient, expected)


def test_steps_without_an_advantage_stay_out_and_count(trainer):
    """Their sequences are not computed; the mean is over all steps or tokens still."""
    policy, trajectories, batch, old, advantages = policy_case(history=True)
    advantages[batch.step_traj % 3 == 0] = 0.0
    tokens, args = [], settings()
    for micro in micro_batches(batch, args, only=advantages != 0):
        tokens += micro.tokens.tolist()
    assert 0 < len(tokens) < len(old)
    trainer.policy_update(policy, batch, old, advantages, args)
    expected = plain_policy_gradient(trainer, policy, trajectories, old, advantages, args)
    assert_same(policy.optimizer.gradient, expected)


def test_where_no_step_teaches_nothing_moves(trainer):
    """All groups dead and all answers valid: there is no mean of anything, and no gradient."""
    _, _, batch, old, advantages = policy_case()
    policy = network(random_model(0))
    before = [p.detach().clone() for p in policy.trained]
    policy.optimizer = torch.optim.AdamW(policy.trained, weight_decay=0.0)
    none = torch.zeros_like(advantages)
    stats = trainer.policy_update(policy, batch, old, none, settings(minibatches=2))
    assert stats["grad_norm"] == 0.0
    assert all(torch.equal(p, b) for p, b in zip(policy.trained, before))


@pytest.mark.parametrize("bias", [False, True])
def test_temperature_is_in_the_gradient(trainer, bias):
    policy, trajectories, batch, old, advantages = policy_case()
    if bias:  # as Phi's head has one
        policy.model.lm_head.bias = torch.nn.Parameter(torch.randn(VOCABULARY), False)
    args = settings(temperature=0.6)
    trainer.policy_update(policy, batch, old, advantages, args)
    expected = plain_policy_gradient(trainer, policy, trajectories, old, advantages, args)
    assert_same(policy.optimizer.gradient, expected)


def test_minibatches_share_the_trajectories(trainer, monkeypatch):
    """Every trajectory is in one minibatch: with a policy that does not move, they average to the
    whole gradient."""
    policy, trajectories, batch, old, advantages = policy_case(history=True)
    args, seen, shares = settings(minibatches=5), [], [[]]  # which does not divide them

    class Collect(Capture):
        def step(self):
            super().step()
            seen.append(self.gradient)
            shares.append([])

    def counted(network, micro, args):
        shares[-1].extend(micro.tokens.tolist())
        return action_logprobs(network, micro, args)

    monkeypatch.setattr(trainer, "action_logprobs", counted)
    policy.optimizer = Collect(policy.trained)
    trainer.policy_update(policy, batch, old, advantages, args)
    assert len(seen) == 5 and len(trajectories) % 5 and shares.pop() == []
    assert sorted(sum(shares, [])) == [*range(len(old))]
    of_trajectory = batch.step_traj[batch.token_step]
    owners = [{*of_trajectory[share].tolist()} for share in shares]
    assert sum(map(len, owners)) == len(trajectories)  # none is in two of them
    counts = [map(len, shares), (len(batch.token_step[share].unique()) for share in shares)]
    counts = [*counts[ratio_of(trainer, args) != "token"]]
    whole = sum(n * gradient for n, gradient in zip(counts, seen, strict=True)) / sum(counts)
    expected = plain_policy_gradient(trainer, policy, trajectories, old, advantages, args)
    assert_same(whole, expected)


@history((False, True))
def test_order_of_trajectories_changes_nothing(trainer, history):
    """Groups stay, everything else is shuffled; the gradient of the policy and of the PRM are the
    same."""
    trajectories = random_trajectories(history=history)
    shuffled = random.Random(1).sample(trajectories, len(trajectories))
    gradients, args = [], settings(micro_batch_tokens=60, prm_ridge=0.1)
    for order in (trajectories, shuffled):
        batch, policy = flatten(order), captured(random_model(0))
        old = batch_logprobs(network(random_model(3)), batch, args)
        advantages = (batch.outcomes - 0.3)[batch.step_traj]
        trainer.policy_update(policy, batch, old, advantages, args)
        gradients.append([policy.optimizer.gradient])
        if hasattr(trainer, "prm_update"):
            prm = captured(prm_of(trainer, policy))
            prm_step(trainer, prm, policy, order, args)
            gradients[-1].append(prm.optimizer.gradient)
    for first, second in zip(*gradients):
        assert_same(second, first)


# ------------ credit per token, PRIME's PRM, PPO's critic ------------


def with_names(*names):
    """Run the test once for every text of these functions."""
    return pytest.mark.parametrize("script", versions(*names))


@history((False, True))
@with_names("by_token", "policy_update")
def test_policy_gradient_with_an_advantage_per_token_equals_autograd(script, history):
    module = load(script)
    policy, trajectories, batch, old, _ = policy_case(history)
    advantages, args = torch.randn(len(old)), settings(ratio="token")
    expected = plain_policy_gradient(module, policy, trajectories, old, advantages, args)
    for args.run_args.micro_batch_tokens in BUDGETS:
        module.policy_update(policy, module.by_token(batch), old, advantages, args)
        assert_same(policy.optimizer.gradient, expected)


@history((False, True))
@pytest.mark.parametrize("per_step", (False, True), ids=lambda p: "steps" if p else "trajectories")
@with_names("cross_entropy_update")
def test_cross_entropy_gradient_equals_autograd_for_any_micro_batch(script, per_step, history):
    """Labels of trajectories as PRIME has them, or of steps; a trajectory may be spread over
    sequences."""
    module, (policy, prm) = load(script), new_prm()
    prm, trajectories = captured(moved(prm)), random_trajectories(history=history)
    batch, args = flatten(trajectories), settings(beta=0.7)
    reference = batch_logprobs(policy, batch, args)
    flat_reference, losses, right = iter(reference.tolist()), [], []
    for trajectory, steps in zip(trajectories, plain_logprobs(prm.activate(), trajectories)):
        rewards = [[0.7 * (token - next(flat_reference)) for token in step] for step in steps]
        for owned in rewards if per_step else [sum(rewards, [])]:
            chance = torch.sigmoid(sum(owned))
            losses.append(-torch.log(chance if trajectory.outcome else 1 - chance))
            right.append((chance.item() > 0.5) == (trajectory.outcome > 0.5))
    loss = sum(losses) / len(losses)
    expected = gradient_of(loss, prm)

    owner = batch.token_step if per_step else batch.step_traj[batch.token_step]
    labels = batch.outcomes[batch.step_traj] if per_step else batch.outcomes
    log_ratios = batch_logprobs(prm, batch, args) - reference
    for args.run_args.micro_batch_tokens in BUDGETS:
        stats = module.cross_entropy_update(prm, batch, log_ratios, owner, labels, args)
        assert_same(prm.optimizer.gradient, expected)
        assert stats["loss"] == pytest.approx(loss.item(), rel=1e-4)
        assert stats["accuracy"] == pytest.approx(sum(right) / len(right))
        assert stats["grad_norm"] == pytest.approx(expected.norm().item(), rel=1e-4)


@history((False, True))
@with_names("dpo_update")
def test_dpo_of_the_policy_equals_autograd_for_any_micro_batch(script, history):
    module = load(script)
    policy = captured(random_model(1))
    trajectories = random_trajectories(groups=4, history=history)
    for trajectory in trajectories[4:8]:
        trajectory.outcome = 1.0  # a group of one outcome stands in no pair
    batch, args = flatten(trajectories), settings(beta=0.7)
    old = old_logprobs_of(batch, args)
    pairs = module.preference_pairs(batch.outcomes, batch.group)

    flat_old, sums, seen = iter(old.tolist()), [], []
    for steps in plain_logprobs(policy.activate(), trajectories):
        ratios = [token - next(flat_old) for step in steps for token in step]
        sums.append(sum(ratios))
        seen += [ratio.item() for ratio in ratios if len(sums) - 1 in {*sum(pairs, ())}]
    losses = [torch.log1p(torch.exp(-0.7 * (sums[won] - sums[lost]))) for won, lost in pairs]
    loss = sum(losses) / len(losses)
    expected = gradient_of(loss, policy)
    for args.run_args.micro_batch_tokens in BUDGETS:
        stats = module.dpo_update(policy, batch, old, pairs, args)
        assert_same(policy.optimizer.gradient, expected)
        assert stats["loss"] == pytest.approx(loss.item(), rel=1e-4)
        assert stats["ratio"] == pytest.approx(sum(map(math.exp, seen)) / len(seen), rel=1e-4)
        assert stats["grad_norm"] == pytest.approx(expected.norm().item(), rel=1e-4)
        assert stats["pair_accuracy"] is None  # of one step, whose margins say nothing


@with_names("dpo_update")
def test_dpo_of_the_policy_learns_a_planted_difference(script):
    """Successes say 7, failures 8. The margins are those of groups that no step has had before;
    without pairs nothing moves."""
    module, policy = load(script), network(random_model(0))
    policy.optimizer = torch.optim.AdamW(policy.trained, lr=3e-3)
    args = settings(minibatches=4, beta=0.5)
    batches = [flatten(plant(random_trajectories(s, groups=8))) for s in range(8)]
    for batch in batches:
        old = batch_logprobs(policy, batch, args)
        pairs = module.preference_pairs(batch.outcomes, batch.group)
        stats = module.dpo_update(policy, batch, old, pairs, args)
    assert stats["pair_accuracy"] > 0.9 and stats["margin"] > 0 and stats["approx_kl"] > 0

    before = [parameter.detach().clone() for parameter in policy.trained]
    stats = module.dpo_update(policy, batch, old, [], args)
    assert all(torch.equal(*both) for both in zip(before, policy.trained))
    assert stats["loss"] == stats["grad_norm"] == stats["approx_kl"] == 0


@with_names("cross_entropy_update")
def test_cross_entropy_learns_a_planted_difference(script):
    """Successes say 7, failures 8: outcomes never learnt from are told apart, and only the adapter
    moves."""
    module, args, (_, prm) = load(script), settings(), new_prm()

    def planted(seed):
        batch = flatten(plant(random_trajectories(seed, groups=4)))
        log_ratios = batch_logprobs(prm, batch, args) - old_logprobs_of(batch, args)
        return batch, log_ratios, batch.step_traj[batch.token_step], batch.outcomes

    before = {name: p.detach().clone() for name, p in prm.model.named_parameters()}
    prm.optimizer = torch.optim.AdamW(prm.trained, lr=1e-2)
    stats = [module.cross_entropy_update(prm, *planted(seed), args) for seed in range(20)]
    assert stats[0]["loss"] == pytest.approx(math.log(2), rel=1e-5) and stats[0]["grad_norm"] > 0
    assert stats[0]["accuracy"] == 0.5  # rewards of 0, neither right nor wrong
    assert stats[-1]["loss"] < stats[0]["loss"] - 0.05 and stats[-1]["accuracy"] > 0.9
    after = dict(prm.model.named_parameters())
    moved_names = {name for name in before if not torch.equal(after[name], before[name])}
    assert moved_names == {name for name in before if "lora_" in name}


@pytest.fixture
def critic_of(tmp_path):
    """critic_of(module, rank) -> a critic on a small random model, whose head and adapter are not 0
    any more."""

    def make(module, rank=4):
        random_model(0).save_pretrained(tmp_path / "model")
        critic = Network("critic", module.value_model(str(tmp_path / "model"), rank))
        head = [p for name, p in critic.model.named_parameters() if "score" in name]
        assert head and not any(p.any() for p in head)  # V starts at 0
        torch.manual_seed(0)
        for name, parameter in critic.model.named_parameters():
            if parameter.requires_grad and (rank or "score" in name):
                torch.nn.init.normal_(parameter, std=0.05 if "lora_" in name else 0.3)
        return critic

    return make


def test_all_of_a_critic_that_trains_is_float32(tmp_path):
    """A head in bfloat16 would stand still under small steps; what is frozen has --dtype."""
    random_model(0).save_pretrained(tmp_path)
    critic = load("ppo_webshop").value_model(str(tmp_path), 4, dtype=torch.bfloat16)
    assert {p.dtype for p in critic.parameters() if p.requires_grad} == {torch.float32}
    assert critic.get_input_embeddings().weight.dtype == torch.bfloat16
    copy = load("ppo_webshop").value_model(str(tmp_path), 0, dtype=torch.bfloat16)
    given = random_model(0).get_input_embeddings().weight
    assert torch.equal(copy.get_input_embeddings().weight, given)  # not rounded


def plain_values(model, trajectories):
    """[trajectory][step] -> V before each of its tokens: one sequence at a time, by the model's own
    forward pass."""
    result = []
    for t in trajectories:
        steps = [[] for _ in t.steps]
        for start, end in zip(t.starts, [*t.starts[1:], len(t.token_ids)]):
            values = model(input_ids=torch.tensor([t.token_ids[start:end]])).logits[0, :, 0]
            for place in range(start + 1, end):
                if t.step_ids[place] >= 0:
                    steps[t.step_ids[place]].append(values[place - start - 1])
        result.append(steps)
    return result


@history((False, True))
@pytest.mark.parametrize("gae, rank", (("step", 4), ("token", 4), ("step", 0)))
@with_names("critic_update")
def test_critic_gradient_equals_autograd_for_any_micro_batch(script, gae, rank, history, critic_of):
    module = load(script)
    critic = captured(critic_of(module, rank))
    trajectories = random_trajectories(history=history)
    batch, args = flatten(trajectories), settings(value_clip=0.1)
    steps = [step for steps in plain_values(critic.model, trajectories) for step in steps]
    credited = [token for step in steps for token in (step[:1] if gae == "step" else step)]
    values = torch.stack(credited)
    at, _, _ = module.credit_units(batch, torch.zeros(len(steps), dtype=torch.bool), 0.1, gae)
    ours = over_batch(module.token_values, critic, batch, args)[at]
    assert (ours - values).abs().max() < 1e-5

    torch.manual_seed(1)
    old, returns = values.detach() + 0.2 * torch.randn(len(values)), torch.randn(len(values))
    near = torch.minimum(torch.maximum(values, old - 0.1), old + 0.1)
    loss = torch.maximum((values - returns).square(), (near - returns).square()).mean() / 2
    expected = gradient_of(loss, critic)
    for args.run_args.micro_batch_tokens in BUDGETS:
        stats = module.critic_update(critic, batch, at, old, returns, args)
        assert_same(critic.optimizer.gradient, expected)
        assert stats["loss"] == pytest.approx(loss.item(), rel=1e-4)
        assert stats["grad_norm"] == pytest.approx(expected.norm().item(), rel=1e-4)


@history((False, True))
def test_the_gradient_of_a_head_equals_autograd_for_any_micro_batch(history, tmp_path):
    """An explicit PRM: DPO and ridge on the head's values where each answer's last token is
    predicted, in one graph."""
    module, policy = load("istar_webshop_ablations"), network(random_model(0))
    random_model(0).save_pretrained(tmp_path)
    prm = captured(moved(Network("prm", module.reward_model(str(tmp_path), 4)), scale=0.3))
    trajectories = random_trajectories(history=history)
    args = settings(prm_ridge=0.1, step_reward="head")
    batch = flatten(trajectories)
    rewards = [[step[-1] for step in steps] for steps in plain_values(prm.model, trajectories)]
    ours = module.head_rewards(prm, batch, args)
    assert (ours - torch.tensor([r for of_each in rewards for r in of_each])).abs().max() < 1e-5
    losses = []
    for won, lost in module.preference_pairs(batch.outcomes, batch.group):
        both = min(len(rewards[won]), len(rewards[lost]))
        margin = sum(rewards[won][:both]) - sum(rewards[lost][:both])
        losses.append(torch.log1p(torch.exp(-margin)))
    squares = [reward**2 for of_each in rewards for reward in of_each]
    loss = sum(losses) / len(losses) + 0.1 * sum(squares) / len(squares)
    expected = gradient_of(loss, prm)
    for args.run_args.micro_batch_tokens in BUDGETS:
        stats = module.prm_update(prm, policy, trajectories, args)
        assert_same(prm.optimizer.gradient, expected)
        assert stats["loss"] == pytest.approx(loss.item(), rel=1e-4)


@with_names("critic_update")
def test_critic_learns_returns_and_is_saved_whole(script, critic_of, tmp_path):
    """It fits what it is told; what a run saves of it, peft's adapter with the head, computes the
    same again."""
    from peft import PeftModel
    from transformers import AutoModelForTokenClassification

    module = load(script)
    critic, batch = critic_of(module), flatten(random_trajectories())
    critic.optimizer = torch.optim.AdamW(critic.trained, lr=1e-2)
    args = settings(minibatches=2, value_clip=10.0)
    valid = torch.zeros(len(batch.step_traj), dtype=torch.bool)
    at, chain, _ = module.credit_units(batch, valid, 0.1, "step")
    returns, losses = batch.outcomes[chain], []
    for _ in range(40):
        values = over_batch(module.token_values, critic, batch, args)[at]
        losses.append(module.critic_update(critic, batch, at, values, returns, args)["loss"])
    assert losses[-1] < 0.2 * losses[0]

    critic.model.save_pretrained(tmp_path, selected_adapters=["critic"])
    base = AutoModelForTokenClassification.from_pretrained(tmp_path / "model", num_labels=1)
    again = PeftModel.from_pretrained(base, tmp_path / "critic", adapter_name="critic")
    again = over_batch(module.token_values, Network("critic", again), batch, args)
    assert torch.equal(again, over_batch(module.token_values, critic, batch, args))


@pytest.mark.parametrize("kind", (torch.float32, torch.bfloat16))
def test_an_update_of_a_millionth_is_not_lost_in_bfloat16(kind, trainer):
    """--dtype bfloat16 is that of the matrix products; what trains is float32, beside weights in
    bfloat16 too, which are its rounded values. As bfloat16 alone they stand still."""
    policy = network(random_model(0).to(kind))
    before = [p.detach().clone() for p in policy.trained]
    batch, args = flatten(random_trajectories()), settings(dtype="bfloat16")
    policy.optimizer = torch.optim.AdamW(policy.trained, lr=1e-6, weight_decay=0.0)
    old = batch_logprobs(policy, batch, args)
    exact = batch_logprobs(network(random_model(0)), batch, settings())
    assert (old - exact).abs().max() > 1e-3  # it is in use
    batch = batch._replace(engine_logprobs=old)
    advantages = torch.linspace(-1, 1, len(batch.step_traj))
    trainer.policy_update(policy, batch, old, advantages, args)

    pairs = [(p.detach(), b) for p, b in zip(policy.trained, before)]
    moved = torch.cat([(p - b).abs().flatten() for p, b in pairs])
    assert moved.max() == pytest.approx(1e-6, rel=0.2) and (moved > 5e-7).float().mean() > 0.5
    rounded = [(p.bfloat16() == b.bfloat16()).float().mean() for p, b in pairs]
    assert sum(rounded) / len(rounded) > 0.99
    computing = [*policy.model.parameters()]
    assert all(torch.equal(w, p.to(kind)) for w, p in zip(computing, policy.trained))


@pytest.mark.parametrize("budget", BUDGETS)
def test_gradients_of_bfloat16_weights_are_summed_in_float32(budget):
    """Those of all micro-batches: as float32 weights of the same values have them, within rounding
    to bfloat16; none is left on the weights."""
    rounded, found = random_model(0).bfloat16(), []
    for policy in (network(copy.deepcopy(rounded).float()), network(rounded)):
        batch = flatten(random_trajectories())
        args = settings(dtype="bfloat16", micro_batch_tokens=budget)
        captured(policy)
        batch_logprobs(policy, batch, args, graph=True).mean().backward()
        policy.optimizer.step()
        found.append(policy.optimizer.gradient)
    assert {p.grad.dtype for p in policy.trained} == {torch.float32}
    assert all(p.grad is None for p in rounded.parameters())
    assert (found[1] - found[0]).norm() < 0.05 * found[0].norm()


def test_networks_on_the_same_bfloat16_weights_share_their_float32_copies():
    """They go with the last of them; a step of another network leaves no gradient on them."""
    policy = network(random_model(0).bfloat16())
    again = Network("again", policy.model)
    assert all(a is b for a, b in zip(policy.trained, again.trained))
    batch, args = flatten(random_trajectories()), settings(dtype="bfloat16")
    batch_logprobs(again, batch, args, graph=True).mean().backward()
    assert all(p.grad is not None for p in policy.trained)
    prm = policy.with_adapter("prm", lora())
    sum_gradients(prm)
    assert all(p.grad is None for p in policy.trained)
    alive = weakref.ref(policy.trained[0])
    del policy, again, prm, batch
    gc.collect()
    assert alive() is None


# ------------ log-probabilities and padding ------------


@history((False, True))
def test_logprobs_are_those_of_single_sequences(history):
    policy = network(random_model(0))
    trajectories = random_trajectories(history=history)
    batch = flatten(trajectories)
    nested = plain_logprobs(policy.activate(), trajectories)
    expected = torch.stack([token for steps in nested for step in steps for token in step])
    counts = [len(step) for steps in nested for step in steps]
    # every action token belongs to its own step, every step to its own trajectory
    assert torch.bincount(batch.token_step).tolist() == counts
    assert batch.step_traj.tolist() == [n for n, t in enumerate(trajectories) for _ in t.steps]
    for budget in BUDGETS:
        ours = batch_logprobs(policy, batch, settings(micro_batch_tokens=budget))
        assert (ours - expected).abs().max() < 1e-4


@pytest.fixture
def batch():
    return flatten(random_trajectories())


@pytest.mark.parametrize("recompute", (False, True))
def test_logits_in_chunks_change_nothing(batch, recompute):
    """Of a large vocabulary the head takes a few tokens at a time and computes its logits again for
    the gradient; the whole pass may be one that is computed again."""
    policy, results = network(random_model(0)), []
    micro, args = padded(batch.sequences, batch), settings(temperature=0.7)
    assert not recompute or recompute_layers([policy.model])
    for vocabulary in (VOCABULARY, 2**27):  # all tokens at once, two at a time
        policy.model.config.vocab_size = vocabulary
        logprobs = action_logprobs(policy, micro, args)
        weights = torch.linspace(-1, 1, len(logprobs))
        results.append((logprobs.detach(), gradient_of((logprobs * weights).sum(), policy)))
    assert torch.allclose(results[0][0], results[1][0], atol=1e-6)
    assert_same(results[1][1], results[0][1])


@pytest.mark.parametrize("filler", (0, 1, VOCABULARY - 1))
def test_content_of_padding_changes_nothing(batch, filler, monkeypatch):
    policy, counts = network(random_model(0)), []
    expected = batch_logprobs(policy, batch, settings())
    real = batching.pad_sequence

    def pad(tensors, batch_first):
        if tensors[0].dtype == torch.bool:
            return real(tensors, batch_first=batch_first)
        out = real(tensors, batch_first=batch_first, padding_value=filler)
        counts.append(out.numel() - sum(map(len, tensors)))
        return out

    monkeypatch.setattr(batching, "pad_sequence", pad)
    assert torch.equal(batch_logprobs(policy, batch, settings()), expected)
    assert sum(counts) > 0


@pytest.mark.parametrize("script", ("rloo_webshop", "istar_webshop", "istar_sotopia"))
def test_before_the_first_step_every_ratio_is_1(script):
    """Also in bfloat16, where log-probabilities depend on what else is in a forward pass."""
    rng, trajectories = random.Random(0), []
    for task in range(8):
        trajectory = Trajectory(task)
        ids = [rng.randrange(VOCABULARY) for _ in range(rng.randint(60, 180))]
        trajectory.append(ids[:-12], ids[-12:])
        trajectory.steps.append(Step("", "", [-1.0] * 12))
        trajectories.append(trajectory)
    batch, args = flatten(trajectories), settings(dtype="bfloat16", micro_batch_tokens=400)
    policy = network(random_model(0, layers=6))
    old = batch_logprobs(policy, batch, args) + 0.3  # as if rounded otherwise
    advantages = torch.linspace(-1, 1, 8)
    for minibatches, is_exact in ((1, True), (2, False)):
        args.minibatches = minibatches
        policy.optimizer = torch.optim.SGD(policy.trained, lr=0.0)
        said = load(script).policy_update(policy, batch, old, advantages, args)
        assert (said["clip_fraction"] == 0 and said["ratio"] == 1) == is_exact


def test_companions_in_the_batch_change_nothing(batch):
    """A short sequence alone, and beside a long one whose padding it gets."""
    policy = network(random_model(0))
    short, long = (f(batch.sequences, key=lambda s: len(s.ids)) for f in (min, max))
    alone = action_logprobs(policy, padded([short], batch), settings())
    together = action_logprobs(policy, padded([long, short], batch), settings())[-len(alone) :]
    assert len(long.ids) > len(short.ids) and (alone - together).abs().max() < 1e-5


def test_micro_batches_keep_to_the_budget_and_lose_nothing(batch):
    wanted = torch.arange(len(batch.step_traj)) % 7 == 0
    of_wanted = [s for s in batch.sequences if wanted[batch.token_step[s.tokens]].any()]
    assert 0 < len(of_wanted) < len(batch.sequences)
    said = torch.zeros(len(batch.token_step), dtype=torch.long)  # [K] the id of an action token
    for s in batch.sequences:
        said[s.tokens] = s.ids[s.is_action]
    for budget in (1, 40, 100):
        for only, sequences in ((None, batch.sequences), (wanted, of_wanted)):
            micros = [*micro_batches(batch, settings(micro_batch_tokens=budget), only)]
            assert all(len(m.ids) == 1 or m.ids.numel() <= budget for m in micros)
            places = sorted(place for m in micros for place in m.tokens.tolist())
            assert places == sorted(place for s in sequences for place in s.tokens.tolist())
            for m in micros:
                assert torch.equal(m.ids[m.is_action], said[m.tokens])
                assert torch.equal(batch.token_step[m.tokens], m.steps[m.token_step])
                assert len(m.steps) == len(m.steps.unique()) == m.num_steps
    places = [place for s in batch.sequences for place in s.tokens.tolist()]
    assert sorted(places) == [*range(len(batch.token_step))]


def test_policy_weights_of_a_lora_policy_are_dense_and_leave_the_base(batch):
    """What the engine gets computes what the adapter computes; the model it came from is as it
    was."""
    policy = moved(network(network(random_model(0)).with_adapter("policy", lora()).model), 1, 0.3)
    moved(policy.with_adapter("prm", lora()), 2, 0.3)  # the PRM's: it may not leak
    model = policy.activate()
    before = copy.deepcopy(model.state_dict())
    dense = random_model(9)
    missing, unexpected = dense.load_state_dict(dict(policy_weights(model)), strict=False)
    assert not unexpected and missing in ([], ["lm_head.weight"])
    merged = batch_logprobs(network(dense), batch, settings())
    adapter = batch_logprobs(policy, batch, settings())
    initial = batch_logprobs(network(random_model(0)), batch, settings())
    assert (merged - adapter).abs().max() < 1e-3
    assert (adapter - initial).abs().max() > 1e-2
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


# ------------ behaviour cloning ------------


SPLITS = [(1, range(1)), (9, range(5, 9)), (999, range(743, 999))]


@pytest.mark.parametrize("tasks, held_out", SPLITS)
def test_cloning_holds_out_the_last_256_tasks_but_at_most_half(tasks, held_out):
    env = SimpleNamespace(train_tasks=range(tasks))
    taught, held = load("warm_start").split(env)
    assert held == held_out and taught == range(max(1, held_out[0]))


@pytest.mark.parametrize("share, draws", [(0.0, 1), (1.0, 1), (0.25, 400)])
def test_cloning_loss_counts_a_share_of_the_environments_tokens(share, draws):
    """Over every token but a sequence's first: an answer's always, the environment's with the
    probability `share`."""
    module, policy = load("warm_start"), network(random_model(0))
    batch, expected = flatten(random_trajectories()), 0.0
    for ids, is_action, *_ in batch.sequences:
        logprobs = policy.model(ids[None]).logits[0].log_softmax(-1)
        for place in range(1, len(ids)):
            weight = 1.0 if is_action[place] else share
            expected -= weight * logprobs[place - 1, ids[place]].item()
    torch.manual_seed(0)
    args, micro = settings(observation_share=share), padded(batch.sequences, batch)
    with torch.no_grad():
        losses = [module.cloning_loss(policy, micro, args).item() for _ in range(draws)]
    assert sum(losses) / draws == pytest.approx(expected, rel=1e-5 if draws == 1 else 0.01)
    assert draws == 1 or len({*losses}) > 1
