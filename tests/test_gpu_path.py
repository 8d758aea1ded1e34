"""The path of a GPU, on a machine without one: torch says that there is one, and vLLM is a stand-in
that keeps to what vLLM 0.32 asks of its caller and raises where it would."""

import sys
import weakref
from dataclasses import make_dataclass
from types import ModuleType, SimpleNamespace

import runtime.models
from runtime.distributed import processes
from runtime.engines import EngineError
from runtime.engines.transformers import TransformersEngine
from runtime.engines.vllm import VllmEngine
from runtime.models import ModelError, read_causal_model
from runtime.networks import adapter_weights, policy_weights
from runtime.rollout import Stage, rollout
from runtime.run import Run

import conftest
import numpy as np
import pytest
import torch
import transformers
from accelerate import PartialState
from conftest import TINY, answers, settings
from safetensors.torch import load_file
from test_engines import STOP, adapted, contexts_of, move, sampling_of, tiny

PARTS = {"weights", "kv_cache"}
TINY_SHAPE = dict(
    vocab_size=60,
    hidden_size=32,
    intermediate_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)


class Core:
    """vLLM's engine core in the process: its weights are in the allocator, of which there is one in
    a process, until it is shut down or nothing refers to it."""

    alive = weakref.WeakSet()

    def __init__(self):
        assert not Core.alive, "CuMem allocator can only be used for one instance per process."
        Core.alive.add(self)

    def shutdown(self):
        Core.alive.discard(self)


class LLM:
    """vLLM's LLM: sleeping parts cannot be used, and level 2 forgets the weights and adapters."""

    made, fails, used = [], 0, set()

    def __init__(self, path, **settings):
        self.settings, self.calls, self.resident = settings, [], set(PARTS)
        self.weights = None  # those of the file
        self.asked, self.adapters = {}, {}
        self.llm_engine = SimpleNamespace(
            engine_core=Core(),
            add_request=self.add_request,
            step=self.step,
            add_lora=self.add_lora,
            remove_lora=self.adapters.pop,
            list_loras=lambda: {*self.adapters},
            abort_request=lambda names: [self.asked.pop(name) for name in names],
        )
        LLM.made.append(weakref.ref(self))
        assert 0 < settings["gpu_memory_utilization"] < 1 and settings["enable_sleep_mode"]

    def sleep(self, level):
        assert self.resident == PARTS, "Executor is already sleeping."
        self.resident = set()
        if level == 2:
            self.weights = None
            self.adapters.clear()
        self.calls.append(f"sleep {level}")

    def wake_up(self, tags=None):
        tags = set(tags or PARTS)
        assert not tags & self.resident, f"Tag {tags} is not in sleeping tags"
        self.resident |= tags
        self.calls.append(f"wake {'+'.join(sorted(tags))}")

    def collective_rpc(self, method, kwargs):
        assert method == "reload_weights" and "weights" in self.resident, "illegal memory access"
        self.weights = {name: tensor.clone() for name, tensor in kwargs["weights_iterator"]}
        self.calls.append("reload")

    def apply_model(self, function):
        assert "weights" in self.resident, "illegal memory access"
        function(torch.nn.Linear(1, 1))  # has no head that was packed for a CPU

    def reset_prefix_cache(self):
        assert "kv_cache" in self.resident, "illegal memory access"
        self.calls.append("reset")

    def add_lora(self, request):
        assert "weights" in self.resident and self.settings["enable_lora"]
        assert len(self.adapters) < 1 and request.lora_int_id not in LLM.used
        LLM.used.add(request.lora_int_id)
        self.adapters[request.lora_int_id] = load_file(
            f"{request.lora_path}/adapter_model.safetensors"
        )
        self.calls.append("adapter")

    def add_request(self, name, prompt, params, lora_request=None):
        assert name not in self.asked and params.output_kind == "final only"
        assert params.flat_logprobs
        assert {*self.adapters} == ({lora_request.lora_int_id} if lora_request else set())
        self.asked[name] = prompt["prompt_token_ids"]

    def step(self):
        """An answer of one token to whoever asked."""
        there = self.weights is not None or self.settings.get("enable_lora")
        assert self.resident == PARTS and there, "illegal memory access"
        if LLM.fails:
            LLM.fails -= 1
            raise RuntimeError("CUDA error: an illegal memory access was encountered\nand more")
        sample = SimpleNamespace(token_ids=[5], logprobs=SimpleNamespace(logprobs=[-1.0]))
        asked, self.asked = self.asked, {}
        return [
            SimpleNamespace(request_id=name, prompt_token_ids=ids, outputs=[sample], finished=True)
            for name, ids in asked.items()
        ]


@pytest.fixture
def gpu(monkeypatch):
    """A machine that says it has a GPU; what was freed on it is in the list."""
    PartialState(cpu=not torch.cuda.is_available())  # the device that later tests have
    freed, vllm = [], ModuleType("vllm")
    vllm.LLM, vllm.SamplingParams = LLM, SimpleNamespace
    vllm.sampling_params = ModuleType("vllm.sampling_params")
    vllm.lora, vllm.lora.request = ModuleType("vllm.lora"), ModuleType("vllm.lora.request")
    vllm.lora.request.LoRARequest = lambda name, number, path: SimpleNamespace(
        lora_name=name, lora_int_id=number, lora_path=path
    )
    vllm.sampling_params.RequestOutputKind = SimpleNamespace(FINAL_ONLY="final only")
    for module in (vllm, vllm.sampling_params, vllm.lora, vllm.lora.request):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: freed.append(len(Core.alive)))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (2**33, 80 * 2**30))
    Core.alive.clear()
    LLM.made, LLM.fails, LLM.used = [], 0, set()
    return freed


def test_weights_come_before_the_cache_wakes_and_none_are_kept_in_between(gpu):
    args, model = settings(engine_gpu_share=0.55), tiny()
    engine = VllmEngine(str(TINY), [STOP], args)
    assert engine.llm.settings["gpu_memory_utilization"] == 0.55
    assert "distributed_executor_backend" not in engine.llm.settings
    engine.load(model)
    assert engine.llm.calls == ["reload", "reset"]  # it has never slept
    for update in (1, 2):
        engine.llm.calls.clear()
        assert len(answers(engine, contexts_of(model), sampling_of())) == 6
        engine.sleep()
        engine.sleep()  # the second one does nothing
        move(model, update)
        engine.load(model)
        order = ["sleep 2", "wake weights", "reload", "wake kv_cache", "reset"]
        assert engine.llm.calls == order
        for name, tensor in policy_weights(model):
            assert torch.equal(engine.llm.weights[name], tensor), name


def test_the_base_of_an_adapter_survives_sleep(gpu):
    """A LoRA policy in bfloat16 is a new adapter after each update, on weights that stay."""
    model = adapted(tiny().bfloat16(), "policy", "prm")
    engine = VllmEngine(str(TINY), [STOP], settings(dtype="bfloat16", policy_lora_rank=4))
    assert engine.llm.settings["max_lora_rank"] == 8  # vLLM makes room for no fewer
    engine.load(model)
    for update in (1, 2):
        engine.llm.calls.clear()
        assert len(answers(engine, contexts_of(model), sampling_of())) == 6
        engine.sleep()
        move(model, update)
        engine.load(model)
        order = ["sleep 1", "wake weights", "adapter", "wake kv_cache", "reset"]
        assert engine.llm.calls == order
        (found,), ours = engine.llm.adapters.values(), adapter_weights(model, "policy")
        assert found.keys() == ours.keys()
        assert all(torch.equal(found[name], ours[name]) for name in found)
    LLM.fails = 1  # the engine in its place gets the adapter too
    assert len(answers(engine, contexts_of(model), sampling_of())) == 6
    assert engine.restarts == 1 and len(LLM.used) == 4


def test_a_failed_engine_is_gone_before_another_one_starts(gpu, capsys):
    model = tiny()
    engine = VllmEngine(str(TINY), [STOP], settings())
    engine.load(model)
    LLM.fails = 1
    assert answers(engine, [[5, 6]], sampling_of()) == [([5], [-1.0])]
    first, second = LLM.made
    assert first() is None and second() is engine.llm and engine.restarts == 1
    assert gpu == [0]  # memory was given back when no engine was there any more
    assert "a new one takes its place" in capsys.readouterr().out
    engine.sleep()
    engine.load(model)
    LLM.fails = 1
    with pytest.raises(EngineError, match=r"the engine failed twice \(RuntimeError: CUDA error"):
        answers(engine, [[5, 6]], sampling_of())


def test_an_engine_that_fails_twice_at_once_ends_the_run(gpu):
    engine = VllmEngine(str(TINY), [STOP], settings())
    engine.load(tiny())
    LLM.fails = 2
    with pytest.raises(EngineError, match="failed twice"):
        answers(engine, [[5, 6]], sampling_of())


def test_an_engine_that_saw_other_ids_is_caught_and_not_replaced(gpu):
    """vLLM says what it saw; where that is not what it was asked, the rollout stops."""
    engine = VllmEngine(str(TINY), [STOP], settings())
    engine.load(tiny())
    engine.prompt = lambda context: {"prompt_token_ids": [*context, 7]}
    with pytest.raises(EngineError, match="saw other ids"):
        answers(engine, [[5, 6]], sampling_of())
    assert len(LLM.made) == 1 and engine.owed == {}


def test_of_several_processes_none_is_replaced(gpu, monkeypatch):
    monkeypatch.setattr(processes, "count", lambda: 2)
    engine = VllmEngine(str(TINY), [STOP], settings())
    assert engine.llm.settings["distributed_executor_backend"] == "external_launcher"
    engine.load(tiny())
    LLM.fails = 1
    with pytest.raises(EngineError, match="the engine failed"):
        answers(engine, [[5, 6]], sampling_of())
    assert len(LLM.made) == 1


def test_transformers_cache_has_its_share_of_a_gpu(gpu):
    """80 GiB, of which 40 %: 16 GiB where it is 20 %."""
    model = tiny()
    engines = [
        TransformersEngine("", [STOP], settings(engine_gpu_share=share)) for share in (0.4, 0.2)
    ]
    for engine in engines:
        engine.model = SimpleNamespace(config=model.config, device=torch.device("cuda"))
    most, half = (engine.fitting(1024) for engine in engines)
    config = model.config
    token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 4
    assert most == int(0.4 * 80 * 2**30 / (token * 1024)) and abs(most - 2 * half) <= 1


def test_processes_have_seeds_of_their_own(monkeypatch, tmp_path):
    """vLLM's newer runner draws the seeds of requests from numpy, transformers' engine from torch;
    outside of a rollout all processes draw the same from torch."""
    for name in ("announce", "summary", "write_page"):
        monkeypatch.setattr(f"runtime.run.report.{name}", lambda run: None)
    monkeypatch.setattr("runtime.run.load_checkpoint", lambda *saved: (0, []))
    for name in ("export_policy", "write_json", "check_world"):
        monkeypatch.setattr(f"runtime.run.{name}", lambda *saved: None)
    monkeypatch.setattr(processes, "count", lambda: 2)
    numbers, sampled, shared = [], [], []

    async def play_all(*_):
        sampled.append(torch.rand(()).item())
        return ["an episode"], []

    monkeypatch.setattr("runtime.rollout.play_all", play_all)
    monkeypatch.setattr(processes, "gather", lambda items: items)

    def draw():
        numbers.append(np.random.rand())
        rollout(Stage(None, None, None), None, None, [1, 2], None)
        shared.append(torch.rand(()).item())

    for rank in (0, 1):
        monkeypatch.setattr(processes, "rank", lambda rank=rank: rank)
        switches = ("eval_only", "gradient_checkpointing", "async_rollout")
        run_args = SimpleNamespace(**dict.fromkeys(switches, False))
        run = Run.__new__(Run)
        given = dict(seed=1, iterations=2, tasks_per_iteration=2, run_args=run_args)
        run.args = make_dataclass("Args", given)(**given)
        run.env = None
        run.path, run.starts, run.tokenizer, run.ahead = tmp_path, [{}], None, None
        run.resume(SimpleNamespace(model=None, trained=[]))
        draw()  # the evaluation at the start
        for _ in run.iterations():
            draw()
    assert len({*numbers}) == len({*sampled}) == 6
    assert shared[:3] == shared[3:] and len({*shared}) == 3


@pytest.mark.parametrize(
    ("family", "changes", "told"),
    [
        ("Gemma2", {"final_logit_softcapping": 0.05}, "final_logit_softcapping 0.05"),
        ("Cohere", {"logit_scale": 0.0625}, "logit_scale 0.0625"),
        ("Granite", {"logits_scaling": 8.0}, "logits_scaling 8.0"),
    ],
)
def test_logits_that_are_not_the_heads_own_are_refused(family, changes, told, tmp_path):
    config = getattr(transformers, f"{family}Config")(**TINY_SHAPE, **changes)
    torch.manual_seed(0)
    getattr(transformers, f"{family}ForCausalLM")(config).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=rf"scaled or capped after its head \(.*{told}"):
        read_causal_model(str(tmp_path))


def test_logits_that_are_the_heads_own_are_not(tmp_path):
    """Granite with a scale of 1, and Gemma 2 without a cap."""
    for family, changes in (
        ("Granite", {"logits_scaling": 1.0}),
        ("Gemma2", {"final_logit_softcapping": None}),
    ):
        config = getattr(transformers, f"{family}Config")(**TINY_SHAPE, **changes)
        getattr(transformers, f"{family}ForCausalLM")(config).save_pretrained(tmp_path / family)
        read_causal_model(str(tmp_path / family))
    for dtype in (torch.float32, torch.bfloat16):
        runtime.models.check_head(tiny().to(dtype))


def test_the_table_of_a_card_has_every_figure_and_what_was_not_run():
    """What -m gpu ends with; of other tests there is nothing in it."""
    Report = SimpleNamespace
    of_gpu = dict(keywords={"gpu": 1}, longrepr="E  AssertionError")
    figures = [("figure", ["gap [nats]", "0.01", "at most 0.02", True])]
    bad = [
        ("figure", ["share", "0.2", "at least 0.35", False]),
        ("figure", ["rate", "7", "", True]),
    ]
    stats = {
        "passed": [
            Report(nodeid="tests/test_gpu.py::test_a", user_properties=figures, **of_gpu),
            Report(nodeid="tests/test_page.py::test_b", user_properties=[], keywords={}),
        ],
        "failed": [
            Report(nodeid="tests/test_gpu.py::test_c[x]", user_properties=bad, **of_gpu),
            Report(nodeid="tests/test_gpu.py::test_d", user_properties=figures, **of_gpu),
        ],
    }
    left = dict(keywords={"gpu": 1}, longrepr=("test_gpu.py", 1, "Skipped: only a card can tell"))
    stats["skipped"] = [Report(nodeid="tests/test_gpu.py::test_e", user_properties=[], **left)]
    said = []
    conftest.pytest_terminal_summary(
        Report(stats=stats, section=said.append, write_line=said.append)
    )
    title, table = said
    assert title == "figures" and table.splitlines()[2:] == [
        "| a | gap [nats] | 0.01 | at most 0.02 | yes |",
        "| c[x] | share | 0.2 | at least 0.35 | **no** |",
        "| c[x] | rate | 7 |  | told |",
        "| d | gap [nats] | 0.01 | at most 0.02 | yes |",
        "| d | failed, see above | | | **no** |",
        "| e | not run: only a card can tell | | | |",
    ]
    said.clear()
    conftest.pytest_terminal_summary(Report(stats={"passed": stats["passed"][1:]}))
    assert said == []
