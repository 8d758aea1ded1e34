"""Gradients: two passes equal plain autograd, micro-batches equal one batch, padding and order change nothing."""

import copy
import math
import random

import pytest
import torch
from conftest import VOCABULARY, load, random_model, random_trajectories, scripts_with, settings

BUDGETS = (1, 40, 100, 8192)  # one sequence a micro-batch, a few, all


class Capture:
    """An optimizer that keeps the gradients instead of following them."""

    def __init__(self, model):
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.param_groups = [{"params": self.parameters}]

    def zero_grad(self):
        for parameter in self.parameters:
            parameter.grad = None

    def step(self):
        self.gradient = flat(p.grad if p.grad is not None else torch.zeros_like(p) for p in self.parameters)


def flat(tensors):
    return torch.cat([t.detach().reshape(-1).double() for t in tensors])


def assert_same(gradient, expected):
    """Equal to 1e-5 of their length."""
    assert expected.norm() > 1e-4, "a gradient of zero compares to nothing"
    assert (gradient - expected).norm() <= 1e-5 * expected.norm()


def plain_logprobs(model, trajectories, temperature=1.0):
    """[trajectory][step] -> log-probabilities of its tokens: one sequence at a time, no padding, all logits."""
    result = []
    for t in trajectories:
        steps = [[] for _ in t.steps]
        for start, end in zip(t.starts, [*t.starts[1:], len(t.token_ids)]):
            ids = torch.tensor([t.token_ids[start:end]])
            logprobs = torch.log_softmax(model(input_ids=ids).logits[0].float() / temperature, -1)
            for place in range(start + 1, end):
                if t.step_ids[place] >= 0:
                    steps[t.step_ids[place]].append(logprobs[place - start - 1, t.token_ids[place]])
        result.append(steps)
    return result


def gradient_of(loss, model):
    parameters = [p for p in model.parameters() if p.requires_grad]
    return flat(torch.autograd.grad(loss, parameters))


def prm_model(module, seed=0):
    """A random model with a PRM adapter that is not the identity any more."""
    model = module.activate(module.add_adapter(random_model(seed), "prm", 4), "prm")
    torch.manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    return model


def old_logprobs_of(module, batch, args):
    return module.score_tokens(random_model(0), batch, args, "")


def history(value):
    return pytest.mark.parametrize("history", value, ids=lambda h: "windows" if h else "whole")


@pytest.fixture(params=scripts_with("prm_update"))
def istar(request):
    return load(request.param)


@pytest.fixture(params=scripts_with("policy_update"))
def trainer(request):
    return load(request.param)


# ------------ the PRM: trajectory DPO in two passes ------------


def plain_prm_gradient(model, trajectories, old, pairs, args):
    """Autograd of mean -log sigmoid(beta (L+ - L-)) + mean relu(|log ratio| - bound)^2, written out; the
    second sum is over the trajectories that stand in a pair, its mean over all steps."""
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
    drifts = [torch.relu(abs(r) - args.prm_drift_bound) ** 2 for number in compared for r in ratios[number]]
    return gradient_of(sum(losses) / len(losses) + sum(drifts) / sum(map(len, ratios)), model)


@history((False, True))
@pytest.mark.parametrize(
    "changes",
    [
        dict(equal_length_pairs=False),
        dict(equal_length_pairs=True),
        dict(equal_length_pairs=False, prm_reduce="mean", temperature=0.7),
        dict(prm_drift_bound=0.05),  # most steps are beyond it
    ],
    ids=str,
)
def test_dpo_gradient_equals_autograd_for_any_micro_batch(istar, changes, history):
    model, trajectories = prm_model(istar), random_trajectories(istar, groups=4, history=history)
    for trajectory in trajectories[4:8]:
        trajectory.outcome = 1.0  # a group of one outcome stands in no pair
    batch, optimizer = istar.flatten(trajectories), Capture(model)
    args = settings(beta=0.5, **changes)
    old = old_logprobs_of(istar, batch, args)
    pairs = istar.preference_pairs(batch.outcomes, batch.group)
    expected = plain_prm_gradient(model, trajectories, old, pairs, args)
    for budget in BUDGETS:
        args.micro_batch_tokens = budget
        stats = istar.prm_update(model, optimizer, batch, old, pairs, args)
        assert_same(optimizer.gradient, expected)
        assert stats["prm/grad_norm"] == pytest.approx(expected.norm().item(), rel=1e-4)


def test_drift_beyond_the_bound_is_what_adds_to_the_gradient(istar):
    """The case above with a bound tests nothing unless the penalty is felt."""
    model, trajectories = prm_model(istar), random_trajectories(istar)
    batch, optimizer, gradients = istar.flatten(trajectories), Capture(model), []
    for bound in (0.05, 1e9):
        args = settings(prm_drift_bound=bound)
        pairs = istar.preference_pairs(batch.outcomes, batch.group)
        istar.prm_update(model, optimizer, batch, old_logprobs_of(istar, batch, args), pairs, args)
        gradients.append(optimizer.gradient)
    assert (gradients[0] - gradients[1]).norm() > 0.1 * gradients[1].norm()


def test_prm_learns_a_planted_difference(istar):
    """Winners say 7, losers 8, in the middle of noise: pairs never learnt from are ranked right, the adapter moves."""

    def planted(seed):
        trajectories = random_trajectories(istar, seed, groups=4)
        for t in trajectories:
            for place, step in enumerate(t.step_ids):
                t.token_ids[place] = (7 if t.outcome else 8) if step >= 0 else t.token_ids[place]
        batch = istar.flatten(trajectories)
        return batch, old_logprobs_of(istar, batch, args), istar.preference_pairs(batch.outcomes, batch.group)

    args = settings(prm_drift_bound=1.0)
    model = istar.activate(istar.add_adapter(random_model(0), "prm", 4), "prm")
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)
    stats = [istar.prm_update(model, optimizer, *planted(seed), args) for seed in range(30)]
    assert stats[0]["prm/pair_accuracy"] == 0.0 and stats[0]["prm/margin"] == 0.0  # it starts as the policy
    assert stats[0]["prm/loss"] == pytest.approx(math.log(2), rel=1e-5) and stats[0]["prm/grad_norm"] > 0
    assert stats[-1]["prm/pair_accuracy"] > 0.9 and stats[-1]["prm/margin"] > 0
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {name for name in before if "lora_" in name}


# ------------ the policy ------------


def plain_policy_gradient(model, trajectories, old, advantages, args):
    """Autograd of -mean min(rho A, clip(rho) A) over tokens or steps, written out."""
    flat_old, flat_advantages, terms = iter(old.tolist()), iter(advantages.tolist()), []
    for steps in plain_logprobs(model, trajectories, args.temperature):
        for step in steps:
            advantage, logratios = next(flat_advantages), [token - next(flat_old) for token in step]
            if args.ratio != "token":
                logratios = [sum(logratios) / (len(logratios) if args.ratio == "step-mean" else 1)]
            for logratio in logratios:
                rho = torch.exp(logratio)
                clipped = torch.clamp(rho, 1 - args.clip, 1 + args.clip)
                terms.append(torch.minimum(rho * advantage, clipped * advantage))
    return gradient_of(-sum(terms) / len(terms), model)


def policy_case(module, history=False, seed=0):
    """(model, trajectories, batch, old log-probabilities of another model, advantages)."""
    trajectories = random_trajectories(module, seed, history=history)
    batch, model = module.flatten(trajectories), random_model(0)
    torch.manual_seed(seed)
    old = module.score_tokens(model, batch, settings(), "") + 0.15 * torch.randn(len(batch.token_step))
    return model, trajectories, batch, old, torch.randn(len(batch.step_traj))


@history((False, True))
@pytest.mark.parametrize("ratio", ("step", "step-mean", "token"))
def test_policy_gradient_equals_autograd_for_any_micro_batch(trainer, ratio, history):
    model, trajectories, batch, old, advantages = policy_case(trainer, history)
    args, optimizer = settings(ratio=ratio), Capture(model)
    expected, stats = plain_policy_gradient(model, trajectories, old, advantages, args), []
    for args.micro_batch_tokens in BUDGETS:
        stats.append(trainer.policy_update(model, optimizer, batch, old, advantages, args))
        assert_same(optimizer.gradient, expected)
        assert stats[-1] == pytest.approx(stats[0], rel=1e-4)
    assert 0.05 < stats[0]["policy/clip_fraction"] < 0.95  # both branches were taken


def test_unknown_old_logprobs_are_those_of_the_update(trainer):
    """One optimiser step on what the policy itself has played: no pass of its own is needed for them."""
    model, _, batch, _, advantages = policy_case(trainer)
    args, one, two = settings(), Capture(model), Capture(model)
    old = trainer.score_tokens(model, batch, args, "")
    stats = [trainer.policy_update(model, one, batch, old, advantages, args)]
    unknown = torch.full_like(old, math.nan)
    stats.append(trainer.policy_update(model, two, batch, unknown, advantages, args))
    assert_same(two.gradient, one.gradient)
    assert stats[1] == pytest.approx(stats[0], rel=1e-4, abs=1e-6)
    assert stats[1]["policy/ratio"] == 1 and stats[1]["policy/approx_kl"] == 0
    felt = ~unknown.isnan()
    assert felt.any() and torch.allclose(unknown[felt], old[felt], atol=1e-6)


def test_temperature_is_in_the_gradient(trainer):
    model, trajectories, batch, old, advantages = policy_case(trainer)
    args, optimizer = settings(temperature=0.6), Capture(model)
    trainer.policy_update(model, optimizer, batch, old, advantages, args)
    assert_same(optimizer.gradient, plain_policy_gradient(model, trajectories, old, advantages, args))


def test_minibatches_share_the_trajectories(trainer):
    """Every trajectory is in one minibatch: with a policy that does not move, they average to the whole gradient."""
    model, trajectories, batch, old, advantages = policy_case(trainer, history=True)
    args, seen = settings(minibatches=4, ratio="token"), []

    class Collect(Capture):
        def step(self):
            super().step()
            seen.append(self.gradient)

    calls, real = [], trainer.action_logprobs

    def counted(model, sequences, args):
        calls.extend(sequences)
        return real(model, sequences, args)

    trainer.action_logprobs = counted
    try:
        trainer.policy_update(model, Collect(model), batch, old, advantages, args)
    finally:
        trainer.action_logprobs = real
    assert len(seen) == 4
    assert sorted(id(ids) for ids, _, _ in calls) == sorted(id(ids) for ids, _, _ in batch.sequences)


@history((False, True))
def test_order_of_trajectories_changes_nothing(trainer, history):
    """Groups stay, everything else is shuffled; the gradient of the policy and of the PRM are the same."""
    trajectories = random_trajectories(trainer, history=history)
    shuffled = random.Random(1).sample(trajectories, len(trajectories))
    gradients = []
    for order in (trajectories, shuffled):
        batch, model = trainer.flatten(order), random_model(0)
        old = trainer.score_tokens(random_model(3), batch, settings(), "")
        advantages = (batch.outcomes - 0.3)[batch.step_traj]
        optimizer, args = Capture(model), settings(ratio="token", micro_batch_tokens=60)
        trainer.policy_update(model, optimizer, batch, old, advantages, args)
        gradients.append([optimizer.gradient])
        if hasattr(trainer, "prm_update"):
            prm = prm_model(trainer)
            optimizer, pairs = Capture(prm), trainer.preference_pairs(batch.outcomes, batch.group)
            args.prm_drift_bound = 1.0
            trainer.prm_update(prm, optimizer, batch, old_logprobs_of(trainer, batch, args), pairs, args)
            gradients[-1].append(optimizer.gradient)
    for first, second in zip(*gradients):
        assert_same(second, first)


# ------------ credit per token, PRIME's PRM, PPO's critic ------------


def with_names(*names):
    """Run the test once for every script that defines these names."""
    return pytest.mark.parametrize("script", scripts_with(*names))


@history((False, True))
@with_names("by_token")
def test_policy_gradient_with_an_advantage_per_token_equals_autograd(script, history):
    module = load(script)
    model, trajectories, batch, old, _ = policy_case(module, history)
    advantages, args, optimizer = torch.randn(len(old)), settings(ratio="token"), Capture(model)
    terms, flat_old, flat_advantages = [], iter(old.tolist()), iter(advantages.tolist())
    for steps in plain_logprobs(model, trajectories):
        for token in (token for step in steps for token in step):
            rho, advantage = torch.exp(token - next(flat_old)), next(flat_advantages)
            terms.append(torch.minimum(rho * advantage, torch.clamp(rho, 0.8, 1.2) * advantage))
    expected = gradient_of(-sum(terms) / len(terms), model)
    for args.micro_batch_tokens in BUDGETS:
        module.policy_update(model, optimizer, module.by_token(batch), old, advantages, args)
        assert_same(optimizer.gradient, expected)


@history((False, True))
@pytest.mark.parametrize("per_step", (False, True), ids=lambda p: "steps" if p else "trajectories")
@with_names("cross_entropy_update")
def test_cross_entropy_gradient_equals_autograd_for_any_micro_batch(script, per_step, history):
    """Labels of trajectories as PRIME has them, or of steps; a trajectory may be spread over sequences."""
    module = load(script)
    model, trajectories = prm_model(module), random_trajectories(module, history=history)
    batch, optimizer, args = module.flatten(trajectories), Capture(model), settings(beta=0.7)
    reference = old_logprobs_of(module, batch, args)
    flat_reference, losses, right = iter(reference.tolist()), [], []
    for trajectory, steps in zip(trajectories, plain_logprobs(model, trajectories)):
        rewards = [[0.7 * (token - next(flat_reference)) for token in step] for step in steps]
        for owned in rewards if per_step else [sum(rewards, [])]:
            chance = torch.sigmoid(sum(owned))
            losses.append(-torch.log(chance if trajectory.outcome else 1 - chance))
            right.append((chance.item() > 0.5) == (trajectory.outcome > 0.5))
    expected = gradient_of(sum(losses) / len(losses), model)
    owner = batch.token_step if per_step else batch.step_traj[batch.token_step]
    labels = batch.outcomes[batch.step_traj] if per_step else batch.outcomes
    log_ratios = module.score_tokens(model, batch, args, "") - reference
    for args.micro_batch_tokens in BUDGETS:
        stats = module.cross_entropy_update(model, optimizer, batch, log_ratios, owner, labels, args)
        assert_same(optimizer.gradient, expected)
        assert stats["prm/loss"] == pytest.approx((sum(losses) / len(losses)).item(), rel=1e-4)
        assert stats["prm/accuracy"] == pytest.approx(sum(right) / len(right))
        assert stats["prm/grad_norm"] == pytest.approx(expected.norm().item(), rel=1e-4)


@with_names("cross_entropy_update")
def test_cross_entropy_learns_a_planted_difference(script):
    """Successes say 7, failures 8: outcomes never learnt from are told apart, and only the adapter moves."""
    module = load(script)

    def planted(seed):
        trajectories = random_trajectories(module, seed, groups=4)
        for t in trajectories:
            for place, step in enumerate(t.step_ids):
                t.token_ids[place] = (7 if t.outcome else 8) if step >= 0 else t.token_ids[place]
        batch = module.flatten(trajectories)
        log_ratios = module.score_tokens(model, batch, args, "") - old_logprobs_of(module, batch, args)
        return batch, log_ratios, batch.step_traj[batch.token_step], batch.outcomes

    args, model = settings(), module.activate(module.add_adapter(random_model(0), "prm", 4), "prm")
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)
    stats = [module.cross_entropy_update(model, optimizer, *planted(seed), args) for seed in range(30)]
    assert stats[0]["prm/loss"] == pytest.approx(math.log(2), rel=1e-5) and stats[0]["prm/grad_norm"] > 0
    assert stats[-1]["prm/loss"] < stats[0]["prm/loss"] - 0.05 and stats[-1]["prm/accuracy"] > 0.9
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {name for name in before if "lora_" in name}


@pytest.fixture
def critic(tmp_path):
    """make(module) -> a critic on a small random model, whose head and adapter are not 0 any more."""

    def make(module):
        random_model(0).save_pretrained(tmp_path / "model")
        model = module.add_value_head(str(tmp_path / "model"), 4)
        assert not any(p.any() for name, p in model.named_parameters() if "score" in name)  # V starts at 0
        torch.manual_seed(0)
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                torch.nn.init.normal_(parameter, std=0.05 if "lora_" in name else 0.3)
        return model

    return make


def plain_values(model, trajectories):
    """[trajectory][step] -> V before each of its tokens: one sequence at a time, by the model's own forward pass."""
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
@pytest.mark.parametrize("gae", ("step", "token"))
@with_names("critic_update")
def test_critic_gradient_equals_autograd_for_any_micro_batch(script, gae, history, critic):
    module = load(script)
    model, trajectories = critic(module), random_trajectories(module, history=history)
    batch, optimizer, args = module.flatten(trajectories), Capture(model), settings(value_clip=0.1)
    steps = [step for steps in plain_values(model, trajectories) for step in steps]
    values = torch.stack([token for step in steps for token in (step[:1] if gae == "step" else step)])
    at, _, _ = module.credit_units(batch, torch.zeros(len(steps), dtype=torch.bool), 0.1, gae)
    ours = module.score_values(model, batch, args)[at]
    assert (ours - values).abs().max() < 1e-5
    torch.manual_seed(1)
    old, returns = values.detach() + 0.2 * torch.randn(len(values)), torch.randn(len(values))
    near = torch.minimum(torch.maximum(values, old - 0.1), old + 0.1)
    loss = torch.maximum((values - returns).square(), (near - returns).square()).mean() / 2
    expected = gradient_of(loss, model)
    for args.micro_batch_tokens in BUDGETS:
        stats = module.critic_update(model, optimizer, batch, at, old, returns, args)
        assert_same(optimizer.gradient, expected)
        assert stats["critic/loss"] == pytest.approx(loss.item(), rel=1e-4)
        assert stats["critic/grad_norm"] == pytest.approx(expected.norm().item(), rel=1e-4)


@with_names("critic_update")
def test_critic_learns_returns_and_is_saved_whole(script, critic, tmp_path):
    """It fits what it is told; what a run saves of it, peft's adapter with the head, computes the same again."""
    from peft import PeftModel
    from transformers import AutoModelForTokenClassification

    module = load(script)
    model, batch = critic(module), module.flatten(random_trajectories(module))
    args, invalid = settings(minibatches=2, value_clip=10.0), torch.zeros(len(batch.step_traj), dtype=torch.bool)
    at, chain, _ = module.credit_units(batch, invalid, 0.1, "step")
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    returns, losses = batch.outcomes[chain], []
    for _ in range(40):
        values = module.score_values(model, batch, args)[at]
        losses.append(module.critic_update(model, optimizer, batch, at, values, returns, args)["critic/loss"])
    assert losses[-1] < 0.2 * losses[0]
    model.save_pretrained(tmp_path, selected_adapters=["critic"])
    base = AutoModelForTokenClassification.from_pretrained(tmp_path / "model", num_labels=1)
    again = PeftModel.from_pretrained(base, tmp_path / "critic", adapter_name="critic")
    assert torch.equal(module.score_values(again, batch, args), module.score_values(model, batch, args))


# ------------ log-probabilities and padding: in every script that has them ------------


def test_an_update_of_a_millionth_is_not_lost_in_bfloat16(trainer):
    """--dtype bfloat16 is that of the matrix products; weights that train are float32. As bfloat16 they stand still."""
    model = random_model(0)
    before = [p.detach().clone() for p in model.parameters()]
    batch = trainer.flatten(random_trajectories(trainer))
    optimizer, args = torch.optim.AdamW(model.parameters(), lr=1e-6, weight_decay=0.0), settings(dtype="bfloat16")
    old = trainer.score_tokens(model, batch, args, "")
    trainer.policy_update(model, optimizer, batch, old, torch.linspace(-1, 1, len(batch.step_traj)), args)
    moved = torch.cat([(p.detach() - b).abs().flatten() for p, b in zip(model.parameters(), before)])
    assert moved.max() == pytest.approx(1e-6, rel=0.2) and (moved > 5e-7).float().mean() > 0.5
    rounded = [(p.bfloat16() == b.bfloat16()).float().mean() for p, b in zip(model.parameters(), before)]
    assert sum(rounded) / len(rounded) > 0.99


def test_logits_in_chunks_change_nothing(trainer):
    """Of a large vocabulary the head takes a few tokens at a time and computes its logits again for the gradient."""
    model = random_model(0)
    batch, args, results = trainer.flatten(random_trajectories(trainer)), settings(temperature=0.7), []
    for vocabulary in (VOCABULARY, 2**27):  # all tokens at once, two at a time
        model.config.vocab_size = vocabulary
        logprobs = trainer.action_logprobs(model, batch.sequences, args)
        weights = torch.linspace(-1, 1, len(logprobs))
        results.append((logprobs.detach(), gradient_of((logprobs * weights).sum(), model)))
    assert torch.allclose(results[0][0], results[1][0], atol=1e-6)
    assert_same(results[1][1], results[0][1])


@pytest.fixture(params=scripts_with("action_logprobs"))
def scorer(request):
    return load(request.param)


@history((False, True))
def test_logprobs_are_those_of_single_sequences(scorer, history):
    model, trajectories = random_model(0), random_trajectories(scorer, history=history)
    batch = scorer.flatten(trajectories)
    nested = plain_logprobs(model, trajectories)
    expected = torch.stack([token for steps in nested for step in steps for token in step])
    counts = [len(step) for steps in nested for step in steps]
    assert torch.bincount(batch.token_step).tolist() == counts  # every action token belongs to its own step
    assert batch.step_traj.tolist() == [n for n, t in enumerate(trajectories) for _ in t.steps]
    for budget in BUDGETS:
        ours = scorer.score_tokens(model, batch, settings(micro_batch_tokens=budget), "")
        assert (ours - expected).abs().max() < 1e-4


@pytest.mark.parametrize("filler", (0, 1, VOCABULARY - 1))
def test_content_of_padding_changes_nothing(scorer, filler, monkeypatch):
    model, batch = random_model(0), scorer.flatten(random_trajectories(scorer))
    expected = scorer.score_tokens(model, batch, settings(), "")
    real, padded = torch.nn.utils.rnn.pad_sequence, []

    def pad(tensors, batch_first, padding_value=filler):
        out = real(tensors, batch_first=batch_first, padding_value=padding_value)
        padded.append(out.numel() - sum(map(len, tensors)))
        return out

    monkeypatch.setattr(torch.nn.utils.rnn, "pad_sequence", pad)
    assert torch.equal(scorer.score_tokens(model, batch, settings(), ""), expected)
    assert sum(padded) > 0


def test_companions_in_the_batch_change_nothing(scorer):
    """A short sequence alone, and beside a long one whose padding it gets."""
    model, batch = random_model(0), scorer.flatten(random_trajectories(scorer))
    short, long = (f(batch.sequences, key=lambda s: len(s[0])) for f in (min, max))
    alone = scorer.action_logprobs(model, [short], settings())
    together = scorer.action_logprobs(model, [long, short], settings())[-len(alone) :]
    assert len(long[0]) > len(short[0]) and (alone - together).abs().max() < 1e-5


def test_micro_batches_keep_to_the_budget_and_lose_nothing(scorer):
    batch = scorer.flatten(random_trajectories(scorer))
    for budget in (1, 40, 100):
        parts = scorer.micro_batches(batch, budget)
        assert all(len(s) == 1 or len(s) * max(len(ids) for ids, _, _ in s) <= budget for s, _ in parts)
        assert sorted(torch.cat([places for _, places in parts]).tolist()) == [*range(len(batch.token_step))]
        assert sum(len(s) for s, _ in parts) == len(batch.sequences)


def test_adapters_share_one_base(istar):
    """Two adapters on one model: the policy's starts as the identity, and neither trains or feels the other."""
    base = random_model(0)
    expected, count = [p.detach().clone() for p in base.parameters()], sum(p.numel() for p in base.parameters())
    policy = istar.add_adapter(base, "policy", 4)
    prm = istar.add_adapter(policy, "prm", 4)
    assert prm is policy and {*policy.peft_config} == {"policy", "prm"}
    batch = istar.flatten(random_trajectories(istar))
    reference = istar.score_tokens(random_model(0), batch, settings(), "")
    for name, other in (("policy", "prm"), ("prm", "policy")):
        istar.activate(policy, name)
        trained = {n for n, p in policy.named_parameters() if p.requires_grad}
        assert trained and all(f".{name}." in n for n in trained)
        assert torch.equal(istar.score_tokens(policy, batch, settings(), ""), reference)
        for n, p in policy.named_parameters():
            if f".{other}." in n and "lora_B" in n:
                torch.nn.init.normal_(p)  # what the other one learns is not seen here
        assert torch.equal(istar.score_tokens(policy, batch, settings(), ""), reference)
        for n, p in policy.named_parameters():
            if "lora_B" in n:
                torch.nn.init.zeros_(p)
    plain = [p for n, p in policy.named_parameters() if "lora_" not in n]
    assert sum(p.numel() for p in plain) == count and all(torch.equal(p, e) for p, e in zip(plain, expected))


def test_policy_weights_of_a_lora_policy_are_dense_and_leave_the_base(trainer):
    """What the engine gets computes what the adapter computes; the model it came from is as it was."""
    model = trainer.activate(trainer.add_adapter(random_model(0), "policy", 4), "policy")
    trainer.add_adapter(model, "prm", 4)
    trainer.activate(model, "policy")
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)  # the PRM's too: it may not leak
    before = copy.deepcopy(model.state_dict())
    dense = random_model(9)
    missing, unexpected = dense.load_state_dict(dict(trainer.policy_weights(model)), strict=False)
    assert not unexpected and missing in ([], ["lm_head.weight"])
    batch = trainer.flatten(random_trajectories(trainer))
    merged, adapter = (trainer.score_tokens(m, batch, settings(), "") for m in (dense, model))
    assert (merged - adapter).abs().max() < 1e-3
    assert (adapter - trainer.score_tokens(random_model(0), batch, settings(), "")).abs().max() > 1e-2
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


# ------------ behaviour cloning ------------


@pytest.mark.parametrize("share, draws", [(0.0, 1), (1.0, 1), (0.25, 400)])
def test_cloning_loss_counts_a_share_of_the_environments_tokens(share, draws):
    """Over every token but a sequence's first: an answer's always, the environment's with the probability `share`."""
    module, model = load("warm_start"), random_model(0)
    batch, expected = module.flatten(random_trajectories(module)), 0.0
    for ids, steps, _ in batch.sequences:
        logprobs = model(ids[None]).logits[0].log_softmax(-1)
        for place in range(1, len(ids)):
            expected -= (1.0 if steps[place] >= 0 else share) * logprobs[place - 1, ids[place]].item()
    torch.manual_seed(0)
    args = settings(observation_share=share)
    with torch.no_grad():
        losses = [module.cloning_loss(model, batch.sequences, args).item() for _ in range(draws)]
    assert sum(losses) / draws == pytest.approx(expected, rel=1e-5 if draws == 1 else 0.01)
    assert draws == 1 or len({*losses}) > 1
