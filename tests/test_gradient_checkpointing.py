"""--gradient-checkpointing: the same gradients from a fraction of the memory, for every network."""

import json

from runtime.engines import SamplingParams
from runtime.engines.transformers import TransformersEngine
from runtime.networks import recompute_layers

import divided
import pytest
import torch
from conftest import (
    answers,
    default_model,
    load,
    network,
    random_model,
    read_model,
    run_main,
    settings,
)
from test_processes import UPDATES
from test_scripts import rows, small, without_times


def kept_for_backward(function) -> int:
    """Bytes that autograd keeps while function() builds a graph, parameters included, each storage
    once."""
    seen = {}

    def note(tensor):
        storage = tensor.untyped_storage()
        seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        function()
    return sum(seen.values())


@pytest.mark.parametrize("script", UPDATES)
def test_an_update_is_the_same(script, tmp_path):
    """Of every network of these scripts, the one that sees among them: what it told, its gradients
    and what it computes afterwards."""
    found = []
    for number, options in enumerate(((), ("recompute",))):
        divided.main(script, tmp_path / f"{number}.pt", *options)
        found.append(torch.load(tmp_path / f"{number}.pt"))
    plain, other = found
    assert plain.keys() == other.keys() and any(name.startswith("policy.") for name in plain)
    for name, value in plain.items():
        if isinstance(value, dict):
            assert other[name] == pytest.approx(value, rel=1e-6), name
        else:
            assert value.norm() > 0 and (other[name] - value).norm() <= 1e-6 * value.norm(), name


def test_the_tower_that_sees_is_computed_again_too():
    model = read_model(default_model("istar_visual_sokoban"))
    assert recompute_layers([model])
    assert any("visual" in name and "forward" in vars(m) for name, m in model.named_modules())


@pytest.mark.parametrize("rank", (0, 4))
def test_two_networks_on_one_base_each_have_their_gradient(rank):
    def gradients(recompute: bool) -> list:
        lora, policy = load("rloo_sokoban").lora, network(random_model(0))
        if rank:
            policy = network(policy.with_adapter("policy", lora(rank)).model)
        prm = policy.with_adapter("prm", lora(4))
        for seed, (name, parameter) in enumerate(prm.model.named_parameters()):
            if "lora_B" in name:
                torch.manual_seed(seed)
                torch.nn.init.normal_(parameter, std=0.05)
        if recompute:
            assert recompute_layers([policy.model, prm.model])
        found, ids = [], torch.arange(40)[None]
        for each in (policy, prm):
            loss = each.activate()(input_ids=ids).logits.logsumexp(-1).sum()
            found += torch.autograd.grad(loss, each.trained)
        return found

    for one, two in zip(gradients(False), gradients(True), strict=True):
        assert one.norm() > 0 and (one - two).norm() <= 1e-6 * one.norm()


def test_a_deep_model_keeps_a_fifth_of_its_activations():
    model, ids = random_model(0, layers=24), torch.arange(2048)[None] % 50

    def forward():
        model.base_model(input_ids=ids, use_cache=False)

    plain = kept_for_backward(forward)
    assert recompute_layers([model])
    assert kept_for_backward(forward) < plain / 5


def test_an_engine_samples_as_before():
    model, args = random_model(0), settings()
    said = []
    for recompute in (False, True):
        if recompute:
            assert recompute_layers([model])
        engine = TransformersEngine("", [0], args)
        engine.load(model)
        torch.manual_seed(0)
        sampling = SamplingParams(temperature=1.0, max_tokens=8, stop_token_ids=[0])
        said.append(answers(engine, [[1, 2, 3], [4, 5]], sampling))
    assert said[0] == said[1]


def test_a_run_is_the_same_and_may_change_to_it(tmp_path):
    common = [*small("istar_sokoban"), "--engine", "hf", "--run-name"]
    flag = "--gradient-checkpointing"
    run_main("istar_sokoban", *common, "plain", "--iterations", 2, cwd=tmp_path)
    run_main("istar_sokoban", *common, "less", "--iterations", 2, flag, cwd=tmp_path)
    plain, less = (map(without_times, rows(tmp_path / "runs" / n)) for n in ("plain", "less"))
    assert [*plain] == [*less]
    more = ["", "--resume", "runs/plain", "--iterations", 3, flag]
    run_main("istar_sokoban", *common, *more, cwd=tmp_path)
    assert json.loads((tmp_path / "runs/plain/args.json").read_text())["gradient_checkpointing"]


def test_a_model_without_such_layers_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("runtime.run.recompute_layers", lambda models: False)
    flags = [*small("rloo_sokoban"), "--engine", "hf", "--gradient-checkpointing"]
    done = run_main("rloo_sokoban", *flags, cwd=tmp_path, check=False)
    assert done.stderr.startswith("--gradient-checkpointing True: --model models/tiny-sokoban")
    assert len(done.stderr.splitlines()) == 1
    assert not recompute_layers([torch.nn.Linear(2, 2)])
    assert recompute_layers([read_model(default_model("rloo_sokoban"))])
