"""What a run takes of memory: the prediction counts what is there, warns in time and names flags
that fit."""

import os
from dataclasses import replace

import runtime.memory
from runtime.memory import (
    GIB,
    Setting,
    Shape,
    fitting,
    kept_by_layer,
    needed,
    predict,
    setting_of,
    shape_of,
    tell_if_too_much,
)
from runtime.networks import add_adapter, recompute_layers

import pytest
import torch
from conftest import default_model, load, network, read_model, run_main
from test_gradient_checkpointing import kept_for_backward
from test_scripts import small
from transformers import (
    AutoConfig,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

SIZES = dict(
    hidden_size=128,
    intermediate_size=384,
    num_hidden_layers=6,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=1000,
)
QWEN_7B = Shape(3584, 18944, 28, 3584, 512, 152064, False)


def models():
    for tied in (True, False):
        yield Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=tied))
        yield Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=48, tie_word_embeddings=tied))


def test_weights_are_counted():
    """Norms and biases, which are left out, are less than a hundredth."""
    for model in models():
        shape, count = shape_of(model.config), sum(p.numel() for p in model.parameters())
        assert 0.99 * count < shape.dense <= count
        adapted = add_adapter(model, "policy", load("rloo_sokoban").lora(8))
        assert 8 * shape.adapter == sum(p.numel() for p in adapted.parameters() if p.requires_grad)


def test_what_a_backward_pass_keeps_is_counted():
    for model in models():
        shape, tokens = shape_of(model.config), 512
        weights = sum(p.numel() for p in model.parameters()) * 4

        def forward(model=model, tokens=tokens):
            model.base_model(input_ids=torch.arange(tokens)[None], use_cache=False)

        kept = kept_for_backward(forward) - weights
        assert kept == pytest.approx(
            tokens * shape.layers * kept_by_layer(shape, "float32"), rel=0.15
        )
        assert recompute_layers([model])
        assert kept_for_backward(forward) < weights + 0.2 * kept


def test_the_tower_of_a_model_that_sees_is_counted():
    """Its weights, its adapter, and what it takes where it does not train."""
    model = read_model(default_model("rloo_visual_sokoban"))
    shape, tower = shape_of(model.config), model.base_model.visual
    count = sum(p.numel() for p in tower.parameters())
    assert shape.tower.dense == pytest.approx(count, rel=0.03)  # biases count in so small a model
    adapted = add_adapter(model, "policy", load("rloo_visual_sokoban").lora(2))
    ours = [p.numel() for name, p in adapted.named_parameters() if ".lora_" in name]
    assert 2 * (shape.adapter + shape.tower.adapter) == pytest.approx(sum(ours), rel=0.15)

    def parts(**changes):
        return predict(shape, Setting(64, prm_rank=2, dtype="float32", **changes))

    sees, blind = parts(), parts(freeze_vision=True)
    dense = shape.dense + shape.tower.dense
    assert (sees["policy"], sees["gradients"]) == (12 * dense, 4 * dense)
    assert blind["policy"] == 12 * shape.dense + 4 * shape.tower.dense
    assert blind["gradients"] == 4 * shape.dense and sees["activations"] > blind["activations"]
    assert parts(lora_rank=2, freeze_vision=True)["policy"] == 4 * dense + 24 * shape.adapter
    assert parts(cards=4)["policy"] == sees["policy"] / 4


def test_only_shapes_that_it_counts():
    assert shape_of(LlamaConfig(**SIZES)).keys == 64
    assert shape_of(MixtralConfig(**SIZES)) is None and shape_of(GPT2Config()) is None


def test_less_is_needed_with_each_flag_that_is_for_it():
    whole = Setting(8192, prm_rank=16)
    need = [needed(QWEN_7B, whole, gpu=True)]
    for changes in (dict(recompute=True), dict(recompute=True, cards=8), dict(lora_rank=64)):
        need.append(needed(QWEN_7B, Setting(**vars(whole) | changes), gpu=True))
    assert need[0] > need[1] > need[2] and need[3] < need[0]
    assert need[0] > 16 * QWEN_7B.dense > 4 * 28 * GIB
    without = predict(QWEN_7B, Setting(8192))
    assert predict(QWEN_7B, whole)["PRM"] == 12 * 16 * QWEN_7B.adapter and without["PRM"] == 0


DENSE, RANK = QWEN_7B.dense, QWEN_7B.adapter


@pytest.mark.parametrize(
    "script, changes, expected",
    [
        ("rloo_sokoban", {}, 0),
        ("istar_sokoban", {}, 12 * 16 * RANK),  # an adapter on the policy
        ("istar_sokoban", dict(policy_lora_rank=4, prm_lora_rank=8), 12 * 8 * RANK),
        ("istar_paper_sokoban", {}, 14 * DENSE),  # a full copy
        ("istar_paper_sokoban", dict(policy_lora_rank=4), 12 * 4 * RANK),  # of the adapter
        ("istar_webshop_ablations", dict(prm_lora_rank=0), 14 * DENSE),
        ("prime_webshop", {}, 12 * 16 * RANK + 2 * DENSE),  # on a copy of the initial policy
        ("prime_webshop", dict(policy_lora_rank=4), 12 * 16 * RANK),  # on the policy's base
        ("ppo_webshop", {}, 12 * 16 * RANK + 2 * DENSE),  # on a model of its own, read in --dtype
        ("ppo_webshop", dict(policy_lora_rank=4), 12 * 16 * RANK + 2 * DENSE),
        ("ppo_webshop", dict(critic_lora_rank=0), 14 * DENSE),
        ("istar_webshop_ablations", dict(step_reward="head"), 12 * 16 * RANK + 2 * DENSE),
    ],
)
def test_what_stands_beside_the_policy_is_counted(script, changes, expected):
    """FSDP divides what trains whole and an adapter on it; a base that nobody trains, and the
    adapter on it, stay whole."""
    args = load(script).Args(**changes)
    args.run_args.dtype = "bfloat16"
    parts = predict(QWEN_7B, setting_of(args, 1))
    assert parts["PRM"] == expected
    if not args.policy_lora_rank:
        divided = predict(QWEN_7B, setting_of(args, 8))
        if script == "prime_webshop":  # a copy of the float32 weights
            expected += 2 * DENSE
        elif expected != 12 * 16 * RANK + 2 * DENSE:
            expected = min(expected, 12 * DENSE) / 8  # bfloat16 weights come and go
        assert divided["PRM"] == expected
        assert (parts["policy"], divided["policy"]) == (14 * DENSE, 12 * DENSE / 8)


@pytest.mark.parametrize("script", ["istar_sokoban", "istar_paper_sokoban", "prime_webshop"])
@pytest.mark.parametrize("rank", (0, 4))
def test_no_more_weights_are_there_than_were_counted(script, rank):
    """Of the networks that a script makes: weights x bytes, moments and gradients of what trains;
    norms, which are left out, are less than a hundredth."""
    module, args = load(script), load(script).Args(policy_lora_rank=rank)
    model = next(models())
    shape = shape_of(model.config)
    if rank:
        model = add_adapter(model, "policy", module.lora(rank))
    policy = network(model)
    if script == "prime_webshop":
        prm = policy.initial().with_adapter("prm", module.lora(args.prm_lora_rank))
    elif script == "istar_sokoban":
        prm = policy.with_adapter("prm", module.lora(args.prm_lora_rank))
    else:
        prm = policy.copy("prm")
    weights = {id(p): p.numel() for each in (policy, prm) for p in each.model.parameters()}
    trained = sum(p.numel() for each in (policy, prm) for p in each.trained)
    parts = predict(shape, setting_of(args, 1))
    counted = parts["policy"] + parts["PRM"]
    assert counted == pytest.approx(4 * sum(weights.values()) + 8 * trained, rel=0.01)
    most = max(sum(p.numel() for p in each.trained) for each in (policy, prm))
    assert parts["gradients"] == pytest.approx(4 * most, rel=0.01)


def test_the_engines_share_of_a_card_is_the_flags():
    """What the trainer keeps has the rest beside it; an engine elsewhere takes nothing."""
    adapted = Setting(64, lora_rank=16, recompute=True)
    parts = predict(QWEN_7B, adapted)
    engine = 2 * QWEN_7B.dense
    least = 1.1 * sum(parts.values())
    for share in (0.05, 0.2, 0.9):
        need = needed(QWEN_7B, replace(adapted, engine_share=share), gpu=True)
        assert need >= max(engine / share, least)
    assert needed(QWEN_7B, replace(adapted, engine_share=0.05), gpu=True) == engine / 0.05
    assert needed(QWEN_7B, replace(adapted, engine_share=0.0), gpu=True) == least
    apart = [replace(adapted, engine_share=share) for share in (0.4, 0.0)]
    here, elsewhere = (needed(QWEN_7B, setting, gpu=False) for setting in apart)
    assert here - elsewhere == engine


def test_an_engine_elsewhere_or_on_the_trainers_model_takes_no_share():
    for flags, share in (({}, 0.4), ({"engine": "hf"}, 0), ({"engine_url": ("http://a:8000",)}, 0)):
        args = arguments()
        vars(args.run_args).update(flags)
        assert setting_of(args, 1).engine_share == share


@pytest.mark.parametrize("memory", (200, 79, 40, 23))
@pytest.mark.parametrize("tokens", (2048, 16384))
def test_what_is_proposed_fits(memory, tokens):
    start = Setting(tokens, prm_rank=16)
    found = fitting(QWEN_7B, start, memory * GIB, gpu=True, longest=2048)
    if memory == 23:  # the engine's weights alone want more
        assert found is None
        return
    flags, setting = found
    assert needed(QWEN_7B, setting, gpu=True) <= memory * GIB
    assert flags.startswith("--gradient-checkpointing") and setting.recompute
    assert ("--policy-lora-rank 64" in flags) == (setting.lora_rank == 64) == (memory < 200)
    assert ("--micro-batch-tokens 2048" in flags) == (setting.tokens < tokens)


def arguments(**changes):
    args = load("istar_paper_sokoban").Args(**changes)
    args.run_args.dtype = "bfloat16"
    return args


def test_a_run_that_will_not_fit_is_told_with_flags_that_would(capsys, monkeypatch):
    config = Qwen2Config(
        hidden_size=3584,
        intermediate_size=18944,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
        vocab_size=152064,
    )
    args = arguments(max_context_tokens=8192)
    tell_if_too_much(config, args, 1, 79 * GIB)
    (said,) = capsys.readouterr().out.splitlines()
    assert said.startswith("warning: memory: an iteration needs about ")
    assert "this GPU has 79.0" in said
    assert "--gradient-checkpointing --policy-lora-rank 64 would need" in said

    args.policy_lora_rank = 64
    args.run_args.gradient_checkpointing = True
    tell_if_too_much(config, args, 1, 79 * GIB)
    assert capsys.readouterr().out == ""
    tell_if_too_much(config, args, 1, 10 * GIB)
    assert "a smaller --model" in capsys.readouterr().out
    tell_if_too_much(GPT2Config(), args, 1, 1)
    assert capsys.readouterr().out == ""

    pages = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 20 * GIB // 4096}
    monkeypatch.setattr(os, "sysconf", pages.get)
    tell_if_too_much(config, args, 1, None)
    assert "beside --engine-memory this machine has 18.0" in capsys.readouterr().out
    args.run_args.engine = "hf"
    tell_if_too_much(config, args, 1, None)
    assert ", this machine has 20.0" in capsys.readouterr().out


def test_only_cards_that_share_a_copy_of_the_policy_count(capsys, monkeypatch):
    """Sixteen with two copies (HSDP) are told what eight are."""
    config, said = AutoConfig.from_pretrained(default_model("istar_sokoban")), []
    for cards, copies in ((8, 1), (16, 2), (16, 1)):
        environment = {"WORLD_SIZE": cards, "ACCELERATE_USE_FSDP": "true"}
        environment |= {"PARALLELISM_CONFIG_DP_REPLICATE_SIZE": copies}
        for name, value in environment.items():
            monkeypatch.setenv(name, str(value))
        monkeypatch.setattr(runtime.memory, "needed", lambda _, setting, __: setting.cards * 1e9)
        tell_if_too_much(config, arguments(), cards, 1.0)
        said.append(capsys.readouterr().out.partition(" GiB")[0])
    assert said[0] == said[1] != said[2] and said[0].startswith("warning: memory")


def test_a_run_says_it_before_anything_is_loaded(tmp_path, monkeypatch):
    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(runtime.memory, "needed", lambda *_: 1e15)
    monkeypatch.setattr("runtime.models.read_causal_model", stop)
    flags = [*small("rloo_sokoban"), "--engine", "hf"]
    done = run_main("rloo_sokoban", *flags, cwd=tmp_path, check=False)
    assert done.stdout.count("warning: memory: an iteration needs about") == 1
