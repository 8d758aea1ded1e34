"""Gradients: those of the scripts equal plain autograd; micro-batches equal one batch; padding and
order change nothing."""

import copy
import math
import random
from functools import partial

from runtime import data as batching
from runtime.data import batch_logprobs, micro_batches, padded
from runtime.networks import (
    Network,
    action_logprobs,
    add_adapter,
    following,
    initial,
    policy_weights,
    trainable,
)
from runtime.statistics import pair_statistics, prm_statistics

import pytest
import torch
from conftest import (
    VOCABULARY,
    distinct,
    load,
    network,
    random_model,
    random_trajectories,
    scripts_with,
    settings,
)

BUDGETS = (1, 40, 100, 8192)  # one sequence a micro-batch, a few, all


class Capture:
    """An optimizer that keeps the gradients instead of following them."""

    def __init__(self, model):
        self.parameters = trainable(model)
        self.param_groups = [{"params": self.parameters}]

    def zero_grad(self):
        for parameter in self.parameters:
            parameter.grad = None

    def step(self):
        zeros = (torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters)
        self.gradient = flat(zeros)


def captured(model, name: str = "policy"):
    """The model as a Network whose optimizer is a Capture."""
    return network(model, Capture(model), name)


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


def gradient_of(loss, model):
    return flat(torch.autograd.grad(loss, trainable(model)))


def new_prm():
    """A PRM as a run begins with it: the identity."""
    return add_adapter(random_model(0), "prm", 4)


def prm_model(seed=0):
    """A random model with a PRM adapter that is not the identity any more."""
    model = add_adapter(random_model(seed), "prm", 4)
    torch.manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    return model


def old_logprobs_of(batch, args):
    return batch_logprobs(network(random_model(0)), batch, args)


def history(value):
    return pytest.mark.parametrize("history", value, ids=lambda h: "windows" if h else "whole")


@pytest.fixture(params=distinct(scripts_with("prm_update")))
def istar(request):
    return load(request.param)


@pytest.fixture(params=distinct(scripts_with("policy_update")))
def trainer(request):
    return load(request.param)


# ------------ the PRM: trajectory DPO ------------


def plain_prm_gradient(model, trajectories, old, pairs, args):
    """Autograd of mean -log sigmoid(beta (L+ - L-)) + ridge * mean (beta * log ratio)^2, written
    out; the second sum is over the trajectories that stand in a pair, its mean over all steps."""
    flat_old, ratios = iter(old.tolist()), []
    for steps in plain_logprobs(model, trajectories, args.temperature):
        ratios.append([sum(token - next(flat_old) for token in step) for step in steps])
    losses = []
    for winner, loser in pairs:
        sides = [ratios[winner], ratios[loser]]
        if args.equal_length_pairs:
            sides = [side[: min(map(len, sides))] for side in sides]
        sums = [sum(side) / (len(side) if args.prm_reduce == "mean" else 1) for side in sides]
        losses.append(torch.log1p(torch.exp(-args.beta * (sums[0] - sums[1]))))

    compared = {trajectory for pair in pairs for trajectory in pair}
    steps = [ratio for number in compared for ratio in ratios[number]]
    penalty = args.prm_ridge * sum((args.beta * r) ** 2 for r in steps) / sum(map(len, ratios))
    return gradient_of(sum(losses) / len(losses) + penalty, model)


@history((False, True))
@pytest.mark.parametrize(
    "changes",
    [
        dict(equal_length_pairs=False),
        dict(equal_length_pairs=True),
        dict(equal_length_pairs=False, prm_reduce="mean", temperature=0.7),
        dict(prm_ridge=20.0),
    ],
    ids=str,
)
def test_dpo_gradient_equals_autograd_for_any_micro_batch(istar, changes, history):
    prm, trajectories = prm_model(), random_trajectories(istar, groups=4, history=history)
    for trajectory in trajectories[4:8]:
        trajectory.outcome = 1.0  # a group of one outcome stands in no pair
    prm, batch = captured(prm, "prm"), istar.flatten(trajectories)
    args = settings(beta=0.5, **changes)
    old = old_logprobs_of(batch, args)
    pairs = istar.preference_pairs(batch.outcomes, batch.group)
    expected = plain_prm_gradient(prm.model, trajectories, old, pairs, args)
    for args.run_args.micro_batch_tokens in BUDGETS:
        stats = istar.prm_update(prm, batch, old, pairs, args)
        assert stats.keys() == {"loss", "margin"}
        assert_same(prm.optimizer.gradient, expected)
        norm = prm.optimizer_stats()["grad_norm"]
        assert norm == pytest.approx(expected.norm().item(), rel=1e-4)


@history((False, True))
def test_what_a_group_has_beyond_the_budget_is_computed_again(istar, history, monkeypatch):
    """The graphs of at most --micro-batch-tokens wait for the loss of a bundle; passes beyond are
    run a second time for the backward pass, and the gradient is the same."""
    prm = captured(prm_model(), "prm")
    batch = istar.flatten(random_trajectories(istar, history=history))
    args, gradients, bundles, forwards = settings(prm_ridge=20.0), [], [], []
    old = old_logprobs_of(batch, args)
    pairs = istar.preference_pairs(batch.outcomes, batch.group)
    real = istar.pair_bundles

    def noted(*given):
        for bundle_pairs, micros in real(*given):
            bundles.append(micros)
            yield bundle_pairs, micros

    monkeypatch.setattr(istar, "pair_bundles", noted)
    prm.model.get_input_embeddings().register_forward_hook(lambda *_: forwards.append(1))
    for budget in reversed(BUDGETS):
        bundles.clear(), forwards.clear()
        args.run_args.micro_batch_tokens = budget
        istar.prm_update(prm, batch, old, pairs, args)
        gradients.append(prm.optimizer.gradient)
        assert_same(gradients[-1], gradients[0])

        passes = [micro for micros in bundles for micro in micros]
        again = [micro for micro in passes if micro.recompute]
        assert len(forwards) == len(passes) + len(again)
        assert bool(again) == (budget < 8192)
        for micros in bundles:
            waiting = sum(micro.ids.numel() for micro in micros if not micro.recompute)
            total = sum(micro.ids.numel() for micro in micros)
            assert waiting <= budget and (waiting == total) == (total <= budget)
    assert len(bundles) == 3  # with the smallest budget each group is a bundle


def test_the_ridge_is_what_adds_to_the_gradient(istar):
    """The cases above with a ridge test nothing unless it is felt."""
    prm, gradients = captured(prm_model(), "prm"), []
    batch = istar.flatten(random_trajectories(istar))
    pairs = istar.preference_pairs(batch.outcomes, batch.group)
    for ridge in (20.0, 0.0):
        args = settings(prm_ridge=ridge, beta=0.5)
        istar.prm_update(prm, batch, old_logprobs_of(batch, args), pairs, args)
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
        batch = istar.flatten(plant(random_trajectories(istar, seed, groups=4)))
        pairs = istar.preference_pairs(batch.outcomes, batch.group)
        return batch, old_logprobs_of(batch, args), pairs

    def accuracy(batch, old, pairs):
        rewards = istar.score_steps(prm, batch, old, args)
        return pair_statistics(rewards, batch, pairs)["pair_accuracy"]

    args, model = settings(beta=0.5, prm_ridge=0.1), new_prm() if rank else random_model(0)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    prm = network(model, torch.optim.AdamW(trainable(model), lr=3e-3), "prm")
    assert accuracy(*planted(99)) == 0.5  # it starts as the policy
    stats = [istar.prm_update(prm, *planted(seed), args) for seed in range(30)]
    assert stats[0]["margin"] == 0.0 and prm.optimizer_stats()["grad_norm"] > 0
    assert stats[0]["loss"] == pytest.approx(math.log(2), rel=1e-5)
    assert stats[-1]["margin"] > 0 and accuracy(*planted(99)) > 0.9
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {name for name in before if "lora_" in name or not rank}


@history((False, True))
def test_step_rewards_are_beta_times_the_steps_log_ratio(istar, history):
    trajectories = random_trajectories(istar, history=history)
    prm, batch, args = network(prm_model(), name="prm"), istar.flatten(trajectories), settings()
    old = old_logprobs_of(batch, args)
    flat_old, expected = iter(old.tolist()), []
    for steps in plain_logprobs(prm.model, trajectories):
        expected += [0.05 * sum(token.item() - next(flat_old) for token in step) for step in steps]
    for args.run_args.micro_batch_tokens in BUDGETS:
        ours = istar.score_steps(prm, batch, old, args)
        assert ours.tolist() == pytest.approx(expected, abs=1e-5)
    assert max(map(abs, expected)) > 1e-2


# ------------ what a reward is made of ------------


@pytest.mark.parametrize("kind", ("dense", "adapter", "dense, PRM adapted"))
def test_initial_weights_come_and_go(kind):
    """log pi_init is that of the model that was read, and afterwards the policy is as it was."""
    model = random_model(0)
    if kind == "adapter":
        model = add_adapter(model, "policy", 4)
    policy = network(model)
    if kind == "dense, PRM adapted":
        prm = Network("prm", add_adapter(model, "prm", 4), Capture(model), on="policy")
        moved(prm.activate(), 3)
    module, args = load("istar_webshop"), settings()
    batch = module.flatten(random_trajectories(module))
    policy.activate()
    first = batch_logprobs(policy, batch, args)
    moved(model, 1)
    own, weights = batch_logprobs(policy, batch, args), dense(model)
    with initial(policy, partial(random_model, 0)) as network_then:
        assert torch.equal(batch_logprobs(network_then, batch, args), first)
    assert torch.equal(batch_logprobs(policy, batch, args), own) and not torch.equal(own, first)
    assert all(map(torch.equal, weights, dense(model)))


def test_the_terms_of_a_reward_are_told_apart():
    """A PRM that stays behind a policy that moved the right way: its rewards point backwards."""
    module, args = load("istar_webshop"), settings(beta=0.5)
    batch = module.flatten(random_trajectories(module))
    pairs = module.preference_pairs(batch.outcomes, batch.group)
    right = batch.outcomes[batch.step_traj]  # [S]
    batch = batch._replace(progress=right)
    init = torch.zeros(len(batch.token_step))
    old = right[batch.token_step] / torch.bincount(batch.token_step)[batch.token_step]
    rewards = module.step_rewards(0.25 * right, module.sum_per_step(old, batch), args.beta)
    values = torch.ones(len(right), dtype=torch.bool), rewards, right, rewards
    stats = prm_statistics(batch, pairs, *values, old, init, args, 1.0)
    assert stats["old_init_accuracy"] == stats["phi_init_accuracy"] == 1.0
    assert stats["old_init_progress_correlation"] == pytest.approx(1.0)
    assert stats["phi_init_progress_correlation"] == pytest.approx(1.0)
    assert stats["advantage_progress_correlation"] == pytest.approx(-1.0)
    assert pair_statistics(rewards, batch, pairs)["pair_accuracy"] == 0.0
    assert "old_init_accuracy" not in prm_statistics(batch, pairs, *values, old, None, args, 1.0)


# ------------ a PRM that follows the policy ------------


def moved(model, seed: int) -> None:
    """What an optimiser does: all that trains moves, at random."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in trainable(model):
            parameter += 0.05 * torch.randn(parameter.shape, generator=draw)


def dense(model) -> list[torch.Tensor]:
    """The weights that the policy computes with, an adapter added."""
    return [weight.clone() for _, weight in policy_weights(model)]


@pytest.mark.parametrize("lora", (False, True), ids=lambda lora: "adapter" if lora else "dense")
def test_what_a_prm_has_learnt_stays_when_the_policy_moves(lora):
    """phi - pi is the same before and after an update, and where phi is pi it stays so bit for
    bit."""
    model = add_adapter(random_model(0), "policy", 4) if lora else random_model(0)
    policy, phi = network(model), random_model(0)
    prm = Network("prm", phi, Capture(phi), on="policy")
    for seed in range(3):
        before = dense(model)
        with following(prm, policy):
            moved(policy.activate(), seed)
        assert all(torch.equal(p, weight) for p, weight in zip(phi.parameters(), dense(model)))
        assert not all(map(torch.equal, before, dense(model)))

    moved(phi, 9)  # it learns
    for seed in range(3):
        learnt = [p - weight for p, weight in zip(phi.parameters(), dense(model))]
        with following(prm, policy):
            moved(policy.activate(), seed)
        for p, weight, expected in zip(phi.parameters(), dense(model), learnt):
            assert (p - weight - expected).abs().max() < 1e-6
            assert expected.abs().max() > 1e-2


def test_only_a_copy_on_the_policy_is_moved():
    """One on the initial model stays, and an adapter on the policy has its weights already."""
    policy = network(random_model(0))
    for phi, on in (
        (random_model(0), "initial"),
        (add_adapter(random_model(0), "prm", 4), "policy"),
    ):
        before = [p.detach().clone() for p in phi.parameters()]
        with following(Network("prm", phi, Capture(phi), on=on), policy):
            moved(policy.model, 1)
        assert all(map(torch.equal, before, phi.parameters()))


@pytest.mark.parametrize("lora", (False, True), ids=lambda lora: "adapter" if lora else "dense")
def test_an_adapter_stands_on_the_policy_or_on_the_initial_model(batch, lora):
    """What the policy learns is in the log-probabilities of the one and not of the other, and the
    policy feels neither."""
    plain_model = random_model(0)
    if lora:
        model = policy_model = add_adapter(plain_model, "policy", 4)
        phi = add_adapter(model, "prm", 4)
    else:
        policy_model, phi = plain_model, add_adapter(plain_model, "prm", 4)
    own = [p for name, p in phi.named_parameters() if ".prm." in name]
    weights = [p for name, p in phi.named_parameters() if ".policy." in name]
    weights = weights or [p for name, p in phi.named_parameters() if "lora_" not in name]
    sgd = lambda parameters: torch.optim.SGD(parameters, lr=1.0)  # noqa: E731
    policy = Network("policy", policy_model, sgd(weights))
    prm = Network("prm", phi, sgd(own), on="policy")
    apart = Network("prm", phi, sgd(own))  # the same adapter, on the initial model

    logprobs = lambda each: batch_logprobs(each, batch, settings())  # noqa: E731
    initial = logprobs(policy)
    moved(policy.activate(), 1)
    assert {id(p) for p in trainable(policy_model)} == {id(p) for p in weights}
    after = logprobs(policy)
    assert (after - initial).abs().max() > 1e-2
    assert (logprobs(prm) - after).abs().max() < 1e-6
    if lora:  # of a dense policy nothing is left of the initial model
        assert torch.equal(logprobs(apart), initial)
    moved(prm.activate(), 2)
    assert {id(p) for p in trainable(phi)} == {id(p) for p in own}
    moved(prm.model, 3)  # B was 0
    assert (logprobs(prm) - after).abs().max() > 1e-2
    assert torch.equal(logprobs(policy), after)
    loaded = random_model(9)  # what the engine is given and a checkpoint keeps
    missing, unexpected = loaded.load_state_dict(dict(policy_weights(policy_model)), strict=False)
    assert not unexpected and missing in ([], ["lm_head.weight"])
    assert (logprobs(network(loaded)) - after).abs().max() < 1e-3


# ------------ the policy ------------


def plain_policy_gradient(model, trajectories, old, advantages, args):
    """Autograd of -mean min(rho A, clip(rho) A) over tokens or steps, written out."""
    flat_old, flat_advantages, terms = iter(old.tolist()), iter(advantages.tolist()), []
    for steps in plain_logprobs(model, trajectories, args.temperature):
        for step in steps:
            advantage = next(flat_advantages)
            logratios = [token - next(flat_old) for token in step]
            if args.ratio != "token":
                logratios = [sum(logratios) / (len(logratios) if args.ratio == "step-mean" else 1)]
            for logratio in logratios:
                rho = torch.exp(logratio)
                clipped = torch.clamp(rho, 1 - args.clip, 1 + args.clip)
                terms.append(torch.minimum(rho * advantage, clipped * advantage))
    return gradient_of(-sum(terms) / len(terms), model)


def policy_case(module, history=False, seed=0):
    """(policy, trajectories, batch, old log-probabilities of another model, advantages)."""
    trajectories = random_trajectories(module, seed, history=history)
    batch, policy = module.flatten(trajectories), captured(random_model(0))
    torch.manual_seed(seed)
    old = batch_logprobs(policy, batch, settings())
    old = old + 0.15 * torch.randn(len(batch.token_step))
    return policy, trajectories, batch, old, torch.randn(len(batch.step_traj))


@history((False, True))
@pytest.mark.parametrize("ratio", ("step", "step-mean", "token"))
def test_policy_gradient_equals_autograd_for_any_micro_batch(trainer, ratio, history):
    policy, trajectories, batch, old, advantages = policy_case(trainer, history)
    args, stats = settings(ratio=ratio), []
    expected = plain_policy_gradient(policy.model, trajectories, old, advantages, args)
    for args.run_args.micro_batch_tokens in BUDGETS:
        stats.append(trainer.policy_update(policy, batch, old, advantages, args))
        assert_same(policy.optimizer.gradient, expected)
        assert stats[-1] == pytest.approx(stats[0], rel=1e-4)
    assert 0.05 < stats[0]["clip_fraction"] < 0.95  # both branches were taken


@pytest.mark.parametrize("ratio", ("step", "token"))
def test_unknown_old_logprobs_are_those_of_the_update(trainer, ratio):
    """One optimiser step on what the policy itself has played: no pass of its own is needed for
    them, and the update tells how far the engine was from them."""
    policy, _, batch, _, advantages = policy_case(trainer)
    args = settings(ratio=ratio)
    old = batch_logprobs(policy, batch, args)
    engine_logprobs = old + torch.linspace(0.0, 0.1, len(old))
    batch = batch._replace(engine_logprobs=engine_logprobs)
    known = trainer.policy_update(policy, batch, old, advantages, args)
    expected = policy.optimizer.gradient

    for args.run_args.micro_batch_tokens in (8192, 40):
        unknown = trainer.policy_update(policy, batch, None, advantages, args)
        assert_same(policy.optimizer.gradient, expected)
        assert unknown["ratio"] == 1 and unknown["approx_kl"] == 0
        gap = unknown.pop("engine_gap")
        assert unknown == pytest.approx(known, rel=1e-4, abs=1e-6)
        if ratio == "token":  # micro-batches have the weight of their ratios
            assert gap == pytest.approx(0.05, rel=1e-3)
        assert 0.04 < gap < 0.06
    assert "engine_gap" not in known


def test_where_no_step_teaches_the_update_says_so_and_moves_nothing(trainer):
    """All groups dead and all answers valid: there is no mean of anything, and no gradient."""
    _, _, batch, old, advantages = policy_case(trainer)
    names = ["loss", "ratio", "approx_kl", "clip_fraction", "grad_norm", "skipped"]
    for given, told in ((old, names), (None, [*names, "engine_gap"])):
        model = random_model(0)
        before = [p.detach().clone() for p in model.parameters()]
        policy = network(model, torch.optim.AdamW(model.parameters(), weight_decay=0.0))
        stats = trainer.policy_update(
            policy, batch, given, torch.zeros_like(advantages), settings()
        )
        assert stats == dict.fromkeys(told) | {"grad_norm": 0.0, "skipped": 0.0}
        assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before))


@pytest.mark.parametrize("bias", [False, True])
def test_temperature_is_in_the_gradient(trainer, bias):
    policy, trajectories, batch, old, advantages = policy_case(trainer)
    if bias:  # as Phi's head has one
        policy.model.lm_head.bias = torch.nn.Parameter(torch.randn(VOCABULARY), False)
    args = settings(temperature=0.6)
    trainer.policy_update(policy, batch, old, advantages, args)
    expected = plain_policy_gradient(policy.model, trajectories, old, advantages, args)
    assert_same(policy.optimizer.gradient, expected)


def test_minibatches_share_the_trajectories(trainer, monkeypatch):
    """Every trajectory is in one minibatch: with a policy that does not move, they average to the
    whole gradient."""
    policy, trajectories, batch, old, advantages = policy_case(trainer, history=True)
    args, seen, shares = settings(minibatches=4, ratio="token"), [], [[]]

    class Collect(Capture):
        def step(self):
            super().step()
            seen.append(self.gradient)
            shares.append([])

    def counted(network, micro, args):
        shares[-1].extend(micro.tokens.tolist())
        return action_logprobs(network, micro, args)

    monkeypatch.setattr(trainer, "action_logprobs", counted)
    policy.optimizer = Collect(policy.model)
    trainer.policy_update(policy, batch, old, advantages, args)
    assert len(seen) == 4 and shares.pop() == []
    assert sorted(sum(shares, [])) == [*range(len(old))]
    of_trajectory = batch.step_traj[batch.token_step]
    owners = [{*of_trajectory[share].tolist()} for share in shares]
    assert sum(map(len, owners)) == len(trajectories)  # none is in two of them
    whole = sum(len(share) * gradient for share, gradient in zip(shares, seen)) / len(old)
    assert_same(whole, plain_policy_gradient(policy.model, trajectories, old, advantages, args))


@history((False, True))
def test_order_of_trajectories_changes_nothing(trainer, history):
    """Groups stay, everything else is shuffled; the gradient of the policy and of the PRM are the
    same."""
    trajectories = random_trajectories(trainer, history=history)
    shuffled = random.Random(1).sample(trajectories, len(trajectories))
    gradients = []
    for order in (trajectories, shuffled):
        batch, policy = trainer.flatten(order), captured(random_model(0))
        old = batch_logprobs(network(random_model(3)), batch, settings())
        advantages = (batch.outcomes - 0.3)[batch.step_traj]
        args = settings(ratio="token", micro_batch_tokens=60)
        trainer.policy_update(policy, batch, old, advantages, args)
        gradients.append([policy.optimizer.gradient])
        if hasattr(trainer, "prm_update"):
            prm, args.prm_ridge = captured(prm_model(), "prm"), 0.1
            pairs = trainer.preference_pairs(batch.outcomes, batch.group)
            trainer.prm_update(prm, batch, old_logprobs_of(batch, args), pairs, args)
            gradients[-1].append(prm.optimizer.gradient)
    for first, second in zip(*gradients):
        assert_same(second, first)


# ------------ credit per token, PRIME's PRM, PPO's critic ------------


def with_names(*names):
    """Run the test once for every script that defines these names, and differs from the others."""
    return pytest.mark.parametrize("script", distinct(scripts_with(*names)))


@history((False, True))
@with_names("by_token")
def test_policy_gradient_with_an_advantage_per_token_equals_autograd(script, history):
    module = load(script)
    policy, trajectories, batch, old, _ = policy_case(module, history)
    advantages, args = torch.randn(len(old)), settings(ratio="token")
    terms, flat_old, flat_advantages = [], iter(old.tolist()), iter(advantages.tolist())
    for steps in plain_logprobs(policy.model, trajectories):
        for token in (token for step in steps for token in step):
            rho, advantage = torch.exp(token - next(flat_old)), next(flat_advantages)
            clipped = torch.clamp(rho, 0.8, 1.2)
            terms.append(torch.minimum(rho * advantage, clipped * advantage))
    expected = gradient_of(-sum(terms) / len(terms), policy.model)
    for args.run_args.micro_batch_tokens in BUDGETS:
        module.policy_update(policy, module.by_token(batch), old, advantages, args)
        assert_same(policy.optimizer.gradient, expected)


@history((False, True))
@pytest.mark.parametrize("per_step", (False, True), ids=lambda p: "steps" if p else "trajectories")
@with_names("cross_entropy_update")
def test_cross_entropy_gradient_equals_autograd_for_any_micro_batch(script, per_step, history):
    """Labels of trajectories as PRIME has them, or of steps; a trajectory may be spread over
    sequences."""
    module = load(script)
    prm, trajectories = captured(prm_model(), "prm"), random_trajectories(module, history=history)
    batch, args = module.flatten(trajectories), settings(beta=0.7)
    reference = old_logprobs_of(batch, args)
    flat_reference, losses, right = iter(reference.tolist()), [], []
    for trajectory, steps in zip(trajectories, plain_logprobs(prm.model, trajectories)):
        rewards = [[0.7 * (token - next(flat_reference)) for token in step] for step in steps]
        for owned in rewards if per_step else [sum(rewards, [])]:
            chance = torch.sigmoid(sum(owned))
            losses.append(-torch.log(chance if trajectory.outcome else 1 - chance))
            right.append((chance.item() > 0.5) == (trajectory.outcome > 0.5))
    loss = sum(losses) / len(losses)
    expected = gradient_of(loss, prm.model)

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
    trajectories = random_trajectories(module, groups=4, history=history)
    for trajectory in trajectories[4:8]:
        trajectory.outcome = 1.0  # a group of one outcome stands in no pair
    batch, args = module.flatten(trajectories), settings(beta=0.7)
    old = old_logprobs_of(batch, args)
    pairs = module.preference_pairs(batch.outcomes, batch.group)

    flat_old, sums, seen = iter(old.tolist()), [], []
    for steps in plain_logprobs(policy.model, trajectories):
        ratios = [token - next(flat_old) for step in steps for token in step]
        sums.append(sum(ratios))
        seen += [ratio.item() for ratio in ratios if len(sums) - 1 in {*sum(pairs, ())}]
    losses = [torch.log1p(torch.exp(-0.7 * (sums[won] - sums[lost]))) for won, lost in pairs]
    loss = sum(losses) / len(losses)
    expected = gradient_of(loss, policy.model)
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
    module, model = load(script), random_model(0)
    policy = network(model, torch.optim.AdamW(trainable(model), lr=3e-3))
    args = settings(minibatches=4, beta=0.5)
    batches = [module.flatten(plant(random_trajectories(module, s, groups=8))) for s in range(8)]
    for batch in batches:
        old = batch_logprobs(policy, batch, args)
        pairs = module.preference_pairs(batch.outcomes, batch.group)
        stats = module.dpo_update(policy, batch, old, pairs, args)
    assert stats["pair_accuracy"] > 0.9 and stats["margin"] > 0 and stats["approx_kl"] > 0

    before = [parameter.detach().clone() for parameter in model.parameters()]
    stats = module.dpo_update(policy, batch, old, [], args)
    assert all(torch.equal(*both) for both in zip(before, model.parameters()))
    assert stats["loss"] == stats["grad_norm"] == stats["approx_kl"] == 0


@with_names("cross_entropy_update")
def test_cross_entropy_learns_a_planted_difference(script):
    """Successes say 7, failures 8: outcomes never learnt from are told apart, and only the adapter
    moves."""
    module = load(script)

    def planted(seed):
        batch = module.flatten(plant(random_trajectories(module, seed, groups=4)))
        log_ratios = batch_logprobs(prm, batch, args) - old_logprobs_of(batch, args)
        return batch, log_ratios, batch.step_traj[batch.token_step], batch.outcomes

    args, model = settings(), new_prm()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    prm = network(model, torch.optim.AdamW(trainable(model), lr=3e-3), "prm")
    stats = [module.cross_entropy_update(prm, *planted(seed), args) for seed in range(30)]
    assert stats[0]["loss"] == pytest.approx(math.log(2), rel=1e-5) and stats[0]["grad_norm"] > 0
    assert stats[-1]["loss"] < stats[0]["loss"] - 0.05 and stats[-1]["accuracy"] > 0.9
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {name for name in before if "lora_" in name}


@pytest.fixture
def critic_model(tmp_path):
    """make(module, rank) -> a critic on a small random model, whose head and adapter are not 0 any
    more."""

    def make(module, rank=4):
        random_model(0).save_pretrained(tmp_path / "model")
        model = module.add_value_head(str(tmp_path / "model"), rank)
        head = [p for name, p in model.named_parameters() if "score" in name]
        assert head and not any(p.any() for p in head)  # V starts at 0
        torch.manual_seed(0)
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and (rank or "score" in name):
                torch.nn.init.normal_(parameter, std=0.05 if "lora_" in name else 0.3)
        return model

    return make


def test_all_of_a_critic_that_trains_is_float32(tmp_path):
    """A head in bfloat16 would stand still under small steps; what is frozen has --dtype."""
    random_model(0).save_pretrained(tmp_path)
    critic = load("ppo_webshop").add_value_head(str(tmp_path), 4, dtype=torch.bfloat16)
    assert {p.dtype for p in critic.parameters() if p.requires_grad} == {torch.float32}
    assert critic.get_input_embeddings().weight.dtype == torch.bfloat16
    copy = load("ppo_webshop").add_value_head(str(tmp_path), 0, dtype=torch.bfloat16)
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
def test_critic_gradient_equals_autograd_for_any_micro_batch(
    script, gae, rank, history, critic_model
):
    module = load(script)
    critic = captured(critic_model(module, rank), "critic")
    trajectories = random_trajectories(module, history=history)
    batch, args = module.flatten(trajectories), settings(value_clip=0.1)
    steps = [step for steps in plain_values(critic.model, trajectories) for step in steps]
    credited = [token for step in steps for token in (step[:1] if gae == "step" else step)]
    values = torch.stack(credited)
    at, _, _ = module.credit_units(batch, torch.zeros(len(steps), dtype=torch.bool), 0.1, gae)
    ours = module.batch_values(critic, batch, args)[at]
    assert (ours - values).abs().max() < 1e-5

    torch.manual_seed(1)
    old, returns = values.detach() + 0.2 * torch.randn(len(values)), torch.randn(len(values))
    near = torch.minimum(torch.maximum(values, old - 0.1), old + 0.1)
    loss = torch.maximum((values - returns).square(), (near - returns).square()).mean() / 2
    expected = gradient_of(loss, critic.model)
    for args.run_args.micro_batch_tokens in BUDGETS:
        stats = module.critic_update(critic, batch, at, old, returns, args)
        assert_same(critic.optimizer.gradient, expected)
        assert stats["loss"] == pytest.approx(loss.item(), rel=1e-4)
        assert stats["grad_norm"] == pytest.approx(expected.norm().item(), rel=1e-4)


@with_names("critic_update")
def test_critic_learns_returns_and_is_saved_whole(script, critic_model, tmp_path):
    """It fits what it is told; what a run saves of it, peft's adapter with the head, computes the
    same again."""
    from peft import PeftModel
    from transformers import AutoModelForTokenClassification

    module = load(script)
    model, batch = critic_model(module), module.flatten(random_trajectories(module))
    critic = network(model, torch.optim.AdamW(trainable(model), lr=1e-2), "critic")
    args = settings(minibatches=2, value_clip=10.0)
    valid = torch.zeros(len(batch.step_traj), dtype=torch.bool)
    at, chain, _ = module.credit_units(batch, valid, 0.1, "step")
    returns, losses = batch.outcomes[chain], []
    for _ in range(40):
        values = module.batch_values(critic, batch, args)[at]
        losses.append(module.critic_update(critic, batch, at, values, returns, args)["loss"])
    assert losses[-1] < 0.2 * losses[0]

    model.save_pretrained(tmp_path, selected_adapters=["critic"])
    base = AutoModelForTokenClassification.from_pretrained(tmp_path / "model", num_labels=1)
    again = PeftModel.from_pretrained(base, tmp_path / "critic", adapter_name="critic")
    again = module.batch_values(network(again, name="critic"), batch, args)
    assert torch.equal(again, module.batch_values(critic, batch, args))


def test_an_update_of_a_millionth_is_not_lost_in_bfloat16(trainer):
    """--dtype bfloat16 is that of the matrix products; weights that train are float32. As bfloat16
    they stand still."""
    model = random_model(0)
    before = [p.detach().clone() for p in model.parameters()]
    batch, args = trainer.flatten(random_trajectories(trainer)), settings()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, weight_decay=0.0)
    policy = network(model, optimizer, dtype="bfloat16")
    old = batch_logprobs(policy, batch, args)
    assert (old - batch_logprobs(network(model), batch, args)).abs().max() > 1e-3  # it is in use
    advantages = torch.linspace(-1, 1, len(batch.step_traj))
    trainer.policy_update(policy, batch, old, advantages, args)

    pairs = [(p.detach(), b) for p, b in zip(model.parameters(), before)]
    moved = torch.cat([(p - b).abs().flatten() for p, b in pairs])
    assert moved.max() == pytest.approx(1e-6, rel=0.2) and (moved > 5e-7).float().mean() > 0.5
    rounded = [(p.bfloat16() == b.bfloat16()).float().mean() for p, b in pairs]
    assert sum(rounded) / len(rounded) > 0.99


# ------------ log-probabilities and padding ------------


@history((False, True))
@with_names("flatten")
def test_logprobs_are_those_of_single_sequences(script, history):
    module, policy = load(script), network(random_model(0))
    trajectories = random_trajectories(module, history=history)
    batch = module.flatten(trajectories)
    nested = plain_logprobs(policy.model, trajectories)
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
    """A batch for what is in runtime/: which script lays it out makes no difference."""
    module = load(scripts_with("flatten")[0])
    return module.flatten(random_trajectories(module))


@pytest.mark.parametrize("recompute", (False, True))
def test_logits_in_chunks_change_nothing(batch, recompute):
    """Of a large vocabulary the head takes a few tokens at a time and computes its logits again for
    the gradient; the whole pass may be one that is computed again."""
    policy, results = network(random_model(0)), []
    micro, args = padded(batch.sequences, recompute), settings(temperature=0.7)
    for vocabulary in (VOCABULARY, 2**27):  # all tokens at once, two at a time
        policy.model.config.vocab_size = vocabulary
        logprobs = action_logprobs(policy, micro, args)
        weights = torch.linspace(-1, 1, len(logprobs))
        results.append((logprobs.detach(), gradient_of((logprobs * weights).sum(), policy.model)))
    assert torch.allclose(results[0][0], results[1][0], atol=1e-6)
    assert_same(results[1][1], results[0][1])


@pytest.mark.parametrize("filler", (0, 1, VOCABULARY - 1))
def test_content_of_padding_changes_nothing(batch, filler, monkeypatch):
    policy, counts = network(random_model(0)), []
    expected = batch_logprobs(policy, batch, settings())
    real = batching.pad_sequence

    def pad(tensors, batch_first, padding_value=filler):
        out = real(tensors, batch_first=batch_first, padding_value=padding_value)
        counts.append(out.numel() - sum(map(len, tensors)))
        return out

    monkeypatch.setattr(batching, "pad_sequence", pad)
    assert torch.equal(batch_logprobs(policy, batch, settings()), expected)
    assert sum(counts) > 0


def test_companions_in_the_batch_change_nothing(batch):
    """A short sequence alone, and beside a long one whose padding it gets."""
    policy = network(random_model(0))
    short, long = (f(batch.sequences, key=lambda s: len(s.ids)) for f in (min, max))
    alone = action_logprobs(policy, padded([short]), settings())
    together = action_logprobs(policy, padded([long, short]), settings())[-len(alone) :]
    assert len(long.ids) > len(short.ids) and (alone - together).abs().max() < 1e-5


def test_micro_batches_keep_to_the_budget_and_lose_nothing(batch):
    policy, wanted = network(random_model(0)), torch.arange(len(batch.step_traj)) % 7 == 0
    of_wanted = [s for s in batch.sequences if wanted[batch.token_step[s.tokens]].any()]
    assert 0 < len(of_wanted) < len(batch.sequences)
    for budget in (1, 40, 100):
        for only, sequences in ((None, batch.sequences), (wanted, of_wanted)):
            args = settings(micro_batch_tokens=budget)
            micros = [*micro_batches(policy, batch, args, only)]
            assert all(len(m.ids) == 1 or m.ids.numel() <= budget for m in micros)
            places = sorted(place for m in micros for place in m.tokens.tolist())
            assert places == sorted(place for s in sequences for place in s.tokens.tolist())
            rows = [
                (ids[:n].tolist(), steps[:n].tolist())
                for m in micros
                for ids, steps, n in zip(m.ids, m.steps, m.lengths.tolist())
            ]
            assert sorted(rows) == sorted((s.ids.tolist(), s.steps.tolist()) for s in sequences)
            assert all((m.steps >= 0).sum() == len(m.tokens) for m in micros)
    places = [place for s in batch.sequences for place in s.tokens.tolist()]
    assert sorted(places) == [*range(len(batch.token_step))]


def test_adapters_share_one_base(batch):
    """Two adapters on one model: the policy's starts as the identity, and neither trains or feels
    the other."""
    base = random_model(0)
    expected = [p.detach().clone() for p in base.parameters()]
    count = sum(p.numel() for p in base.parameters())
    model = add_adapter(base, "policy", 4)
    assert add_adapter(model, "prm", 4) is model and {*model.peft_config} == {"policy", "prm"}
    reference = batch_logprobs(network(random_model(0)), batch, settings())
    for name, other in (("policy", "prm"), ("prm", "policy")):
        own = [p for n, p in model.named_parameters() if f".{name}." in n]
        one = network(model, torch.optim.SGD(own, 1.0), name)
        one.activate()
        trained = {n for n, p in model.named_parameters() if p.requires_grad}
        assert trained and all(f".{name}." in n for n in trained)
        assert torch.equal(batch_logprobs(one, batch, settings()), reference)
        for n, p in model.named_parameters():
            if f".{other}." in n and "lora_B" in n:
                torch.nn.init.normal_(p)  # what the other one learns is not seen here
        assert torch.equal(batch_logprobs(one, batch, settings()), reference)
        seen = batch_logprobs(network(model, name=other), batch, settings())
        assert (seen - reference).abs().max() > 1e-2  # but there, by the Network of its name
        for n, p in model.named_parameters():
            if "lora_B" in n:
                torch.nn.init.zeros_(p)
    plain = [p for n, p in model.named_parameters() if "lora_" not in n]
    assert sum(p.numel() for p in plain) == count
    assert all(torch.equal(p, e) for p, e in zip(plain, expected))


def test_policy_weights_of_a_lora_policy_are_dense_and_leave_the_base(batch):
    """What the engine gets computes what the adapter computes; the model it came from is as it
    was."""
    model = add_adapter(add_adapter(random_model(0), "policy", 4), "prm", 4)
    policy = network(model)
    policy.activate()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)  # the PRM's too: it may not leak
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


@pytest.mark.parametrize("share, draws", [(0.0, 1), (1.0, 1), (0.25, 400)])
def test_cloning_loss_counts_a_share_of_the_environments_tokens(share, draws):
    """Over every token but a sequence's first: an answer's always, the environment's with the
    probability `share`."""
    module, policy = load("warm_start"), network(random_model(0))
    batch, expected = module.flatten(random_trajectories(module)), 0.0
    for ids, steps, *_ in batch.sequences:
        logprobs = policy.model(ids[None]).logits[0].log_softmax(-1)
        for place in range(1, len(ids)):
            weight = 1.0 if steps[place] >= 0 else share
            expected -= weight * logprobs[place - 1, ids[place]].item()
    torch.manual_seed(0)
    args, micro = settings(observation_share=share), padded(batch.sequences)
    with torch.no_grad():
        losses = [module.cloning_loss(policy, micro, args).item() for _ in range(draws)]
    assert sum(losses) / draws == pytest.approx(expected, rel=1e-5 if draws == 1 else 0.01)
    assert draws == 1 or len({*losses}) > 1
