"""--gradient-checkpointing: the same gradients from a fraction of the memory, for every network."""

import json

from runtime import networks
from runtime.engines import HfEngine
from runtime.networks import Network, add_adapter, recompute_layers, trainable

import pytest
import test_checkpoints
import test_pictures
import torch
from conftest import default_model, network, random_model, read_model, run_main, settings
from test_checkpoints import UPDATES, updated
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


@pytest.mark.parametrize("budget", (8192, 20))  # 20: the PRM computes whole passes again too
@pytest.mark.parametrize("kind", UPDATES)
def test_an_update_is_the_same(kind, budget, tmp_path, monkeypatch):
    """By the scripts' own functions and plain gradient descent with rate 1."""
    _, plain, told = updated(kind, tmp_path, micro_batch_tokens=budget)

    def recomputing(model, *rest):
        assert recompute_layers([model])
        return network(model, *rest)

    monkeypatch.setattr(test_checkpoints, "network", recomputing)
    before, other, also = updated(kind, tmp_path, micro_batch_tokens=budget)
    pairs = [*zip(before, trainable(plain.model), trainable(other.model), strict=True)]
    assert max((one - start).norm() for start, one, _ in pairs) > 1e-3
    for _, one, two in pairs:
        assert (two - one).norm() <= 1e-6 * one.norm()
    assert also == pytest.approx(told, rel=1e-6)


def test_pictures_and_the_tower_that_sees_them():
    model, chat = test_pictures.seeing()
    batch = test_pictures.batch_of(test_pictures.answered(chat, test_pictures.contexts_of(chat)))
    one = test_pictures.gradient_of(model, batch, settings())
    one = [gradient.clone() for gradient in one]
    assert recompute_layers([model])
    assert any("visual" in name and "forward" in vars(m) for name, m in model.named_modules())
    for a, b in zip(one, test_pictures.gradient_of(model, batch, settings()), strict=True):
        assert (a - b).norm() <= 1e-6 * a.norm()


def test_two_adapters_on_one_base_each_have_their_gradient():
    def gradients(recompute: bool) -> list:
        model = add_adapter(add_adapter(random_model(0), "policy", 4), "prm", 4)
        for seed, (name, parameter) in enumerate(model.named_parameters()):
            if "lora_B" in name:
                torch.manual_seed(seed)
                torch.nn.init.normal_(parameter, std=0.05)
        if recompute:
            assert recompute_layers([model, model])
        found = []
        ids = torch.arange(40)[None]
        for name in ("policy", "prm"):
            model.set_adapter(name)
            found += torch.autograd.grad(
                model(input_ids=ids).logits.logsumexp(-1).sum(),
                [p for key, p in model.named_parameters() if f".{name}." in key],
            )
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
        engine = HfEngine("", [0], args)
        engine.load(model)
        torch.manual_seed(0)
        said.append(engine.generate([[1, 2, 3], [4, 5]], 1.0))
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


def test_adamw_is_fused_where_its_parameters_are_on_such_a_device(monkeypatch):
    """On a GPU; here the CPU's own kernel stands in for the GPU's."""
    moved = []
    for devices in (("cuda",), ("cuda", "cpu")):
        monkeypatch.setattr(networks, "FUSED", devices)
        model = random_model(0)
        optimizer = torch.optim.AdamW(trainable(model), lr=1e-2)
        policy = Network("policy", model, optimizer)
        assert bool(optimizer.param_groups[0]["fused"]) == ("cpu" in devices)
        for _ in range(3):
            policy.optimizer.zero_grad()
            sum(p.square().sum() for p in trainable(model)).backward()
            policy.optimizer.step()
        moved.append([p.detach().clone() for p in trainable(model)])
    for one, two in zip(*moved, strict=True):
        assert torch.allclose(one, two, rtol=1e-5, atol=1e-7)
