"""What has been done to the scripts from outside, and what they have to say: one table.

A case is an input and what is expected. `prepare(home)` makes the input in an empty directory, from
which the script is started, and returns its flags. `says` are pieces of the line that is expected:
the flag or the file, and what is wrong. A case that `goes_on` ends as a run should, with a warning
that says so; the others end before anything began, in at most three lines, and leave no run behind.

A world, the viewer and the sweep runner that come later add a list of their own and its name to
CASES at the end.
"""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from conftest import TINY
from safetensors.torch import load_file, save_file


@dataclass(frozen=True)
class Case:
    kind: str  # the class of input
    name: str
    prepare: Callable[[Path], list[str]]
    says: tuple[str, ...]
    script: str = "rloo_sokoban"
    goes_on: bool = False

    def __str__(self) -> str:
        return f"{self.kind}: {self.name}"


def flags(*words: str) -> Callable[[Path], list[str]]:
    """Nothing but words on the command line."""
    return lambda home: [*words]


# ------------ models ------------


def model(change: Callable[[Path], None]) -> Callable[[Path], list[str]]:
    """The tiny model, changed."""

    def prepare(home: Path) -> list[str]:
        change(shutil.copytree(TINY, home / "model"))
        return ["--model", "model"]

    return prepare


def edited(name: str, **changes) -> Callable[[Path], list[str]]:
    """With other values in one of its JSON files; None takes a key away."""

    def change(path: Path) -> None:
        table = json.loads((path / name).read_text()) | changes
        table = {key: value for key, value in table.items() if value is not None}
        (path / name).write_text(json.dumps(table))

    return model(change)


def written(name: str, content: str | bytes) -> Callable[[Path], list[str]]:
    content = content if isinstance(content, bytes) else content.encode()
    return model(lambda path: (path / name).write_bytes(content))


def cut(name: str, share: float) -> Callable[[Path], list[str]]:
    def change(path: Path) -> None:
        whole = (path / name).read_bytes()
        (path / name).write_bytes(whole[: int(len(whole) * share)])

    return model(change)


def removed(*names: str) -> Callable[[Path], list[str]]:
    return model(lambda path: [(path / name).unlink() for name in names])


def pipe(name: str) -> Callable[[Path], list[str]]:
    def change(path: Path) -> None:
        (path / name).unlink(missing_ok=True)
        os.mkfifo(path / name)

    return model(change)


def tensors(change: Callable[[dict], dict]) -> Callable[[Path], list[str]]:
    """With other tensors."""

    def changed(path: Path) -> None:
        found = change(load_file(path / "model.safetensors"))
        save_file(found, path / "model.safetensors", metadata={"format": "pt"})

    return model(changed)


def without(*parts: str) -> Callable[[dict], dict]:
    return lambda found: {n: t for n, t in found.items() if not any(part in n for part in parts)}


def with_number(number: float, name: str) -> Callable[[dict], dict]:
    def change(found: dict) -> dict:
        found[name].view(-1)[7] = number
        return found

    return change


def shards(*missing: str) -> Callable[[Path], list[str]]:
    """In three shards, some of which are missing."""

    def change(path: Path) -> None:
        found = load_file(path / "model.safetensors")
        (path / "model.safetensors").unlink()
        place, names = {}, [*found]
        for number in range(3):
            shard = f"model-0000{number + 1}-of-00003.safetensors"
            part = {name: found[name] for name in names[number::3]}
            place |= dict.fromkeys(part, shard)
            if str(number + 1) not in missing:
                save_file(part, path / shard, metadata={"format": "pt"})
        index = {"metadata": {}, "weight_map": place}
        (path / "model.safetensors.index.json").write_text(json.dumps(index))

    return model(change)


def adapter(home: Path) -> list[str]:
    (home / "model").mkdir()
    (home / "model/adapter_config.json").write_text('{"peft_type": "LORA", "r": 4}')
    save_file({"lora_A": torch.zeros(4, 4)}, home / "model/adapter_model.safetensors")
    return ["--model", "model"]


def no_end(template: str | None = None) -> Callable[[Path], list[str]]:
    """Without a token that ends a text, and with this template."""

    def change(path: Path) -> None:
        for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
            table = json.loads((path / name).read_text())
            drop = ("eos_token_id", "eos_token")
            kept = {key: value for key, value in table.items() if key not in drop}
            (path / name).write_text(json.dumps(kept))
        if template is not None:
            (path / "chat_template.jinja").write_text(template)

    return model(change)


EMBEDDING, LAYER = "model.embed_tokens.weight", "model.layers.1."
TURN = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
BARE = "{% for m in messages %}{{ m.content }}{% endfor %}"
LOOP = "{% for a in range(9999) %}" * 3 + "{% endfor %}" * 3
SUBCLASSES = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
MODELS = [
    ("no such directory", flags("--model", "nowhere/at/all"), ("no model",)),
    ("an empty directory", lambda home: (home / "e").mkdir() or ["--model", "e"], ("config.json",)),
    ("a file", lambda home: (home / "f").touch() or ["--model", "f"], ("no model",)),
    ("an empty name", flags("--model="), ("is empty",)),
    ("a name with a line break", flags("--model=a\nb"), ("printable",)),
    ("a name with ESC", flags("--model=\x1b[31mred"), ("printable",)),
    ("a name that is no text", flags("--model=\udcff"), ("printable",)),
    ("a name that climbs", flags("--model=../../etc"), ("../../etc",)),
    ("a name of a megabyte", flags("--model=" + "a" * 2**20), ("4,096",)),
    ("config.json is missing", removed("config.json"), ("config.json",)),
    ("config.json is cut", cut("config.json", 0.5), ("config.json",)),
    ("config.json is empty", written("config.json", ""), ("config.json",)),
    ("config.json is a list", written("config.json", "[]"), ("config.json",)),
    ("config.json is {}", written("config.json", "{}"), ("--model",)),
    ("config.json is no UTF-8", written("config.json", b"\xff\xfe{}"), ("config.json",)),
    ("config.json is deep", written("config.json", "[" * 200_000), ("config.json",)),
    ("config.json is a pipe", pipe("config.json"), ("config.json", "no file")),
    ("an unknown kind", edited("config.json", model_type="nobody"), ("nobody",)),
    ("no kind", edited("config.json", model_type=None), ("--model",)),
    ("zero heads", edited("config.json", num_attention_heads=0), ("num_attention_heads is 0",)),
    ("negative heads", edited("config.json", num_attention_heads=-2), ("num_attention_heads",)),
    ("heads in words", edited("config.json", num_attention_heads="two"), ("num_attention_heads",)),
    ("half a head", edited("config.json", num_attention_heads=1.5), ("num_attention_heads",)),
    ("no width", edited("config.json", hidden_size=0), ("hidden_size is 0",)),
    ("huge", edited("config.json", hidden_size=10**12), ("hidden_size is 1000000000000",)),
    ("another width", edited("config.json", hidden_size=32), ("another shape",)),
    ("a billion layers", edited("config.json", num_hidden_layers=10**9), ("num_hidden_layers",)),
    ("a million layers", edited("config.json", num_hidden_layers=10**6), ("num_hidden_layers",)),
    (
        "a layer too many",
        edited("config.json", num_hidden_layers=4, layer_types=None),
        ("missing", "layers.3"),
    ),
    ("no positions", edited("config.json", max_position_embeddings=0), ("max_position_emb",)),
    ("positions of nan", written("config.json", '{"max_position_embeddings": NaN}'), ("--model",)),
    ("a smaller vocabulary", edited("config.json", vocab_size=100), ("another shape",)),
    ("another activation", edited("config.json", hidden_act="no_such"), ("--model",)),
    ("quantised", edited("config.json", quantization_config={"bits": 4}), ("quantised",)),
    (
        "a program",
        edited("config.json", auto_map={"AutoConfig": "a.B"}, model_type="x"),
        ("trust",),
    ),
    ("model.safetensors is missing", removed("model.safetensors"), ("safetensors",)),
    ("model.safetensors is cut", cut("model.safetensors", 0.5), ("model.safetensors",)),
    ("model.safetensors lacks a byte", cut("model.safetensors", 0.9999), ("model.safetensors",)),
    ("model.safetensors is empty", written("model.safetensors", ""), ("model.safetensors",)),
    ("model.safetensors is text", written("model.safetensors", "weights"), ("model.safetensors",)),
    ("a header of 2^60", written("model.safetensors", b"\0" * 7 + b"\x10{}"), ("model.safetens",)),
    ("model.safetensors is a pipe", pipe("model.safetensors"), ("model.safetensors", "no file")),
    ("one irrelevant tensor", tensors(lambda _: {"x": torch.ones(2)}), ("num_hidden_layers",)),
    (
        "irrelevant tensors",
        tensors(lambda f: {f"x.{n}": t.clone() for n, t in f.items()}),
        ("miss",),
    ),
    ("no tensor", tensors(lambda _: {}), ("missing",)),
    ("a layer is missing", tensors(without(LAYER)), ("missing", f"{LAYER}input_layernorm.weight")),
    ("a matrix is missing", tensors(without(f"{LAYER}mlp.up")), (f"{LAYER}mlp.up_proj.weight",)),
    ("no embedding", tensors(without("embed_tokens")), (EMBEDDING,)),
    ("a norm is missing", tensors(without("model.norm.weight")), ("model.norm.weight",)),
    ("nan", tensors(with_number(float("nan"), EMBEDDING)), (EMBEDDING, "not finite")),
    ("infinity", tensors(with_number(float("inf"), f"{LAYER}mlp.up_proj.weight")), ("not finite",)),
    ("a nan in a norm", tensors(with_number(float("nan"), "model.norm.weight")), ("model.norm",)),
    (
        "turned",
        tensors(lambda f: f | {EMBEDDING: f[EMBEDDING].T.contiguous()}),
        (EMBEDDING, "shape"),
    ),
    (
        "a number",
        tensors(lambda f: f | {"model.norm.weight": torch.ones(())}),
        ("model.norm.weight",),
    ),
    ("int8", tensors(lambda f: {n: t.to(torch.int8) for n, t in f.items()}), ("quantised", "I8")),
    ("float8", tensors(lambda f: {n: t.to(torch.float8_e4m3fn) for n, t in f.items()}), ("F8",)),
    ("a shard is missing", shards("2"), ("model-00002-of-00003.safetensors is missing",)),
    ("all shards are missing", shards("1", "2", "3"), ("model-00001-of-00003",)),
    ("an index of nothing", written("model.safetensors.index.json", "{}"), ("weight_map",)),
    ("a damaged index", written("model.safetensors.index.json", "{"), ("index.json",)),
    ("an adapter alone", adapter, ("adapter", "merge")),
    ("no tokenizer", removed("tokenizer.json", "tokenizer_config.json"), ("--model", "token")),
    ("tokenizer.json is missing", removed("tokenizer.json"), ("--model", "token")),
    ("tokenizer.json is cut", cut("tokenizer.json", 0.5), ("tokenizer",)),
    ("tokenizer.json is empty", written("tokenizer.json", ""), ("tokenizer",)),
    ("tokenizer.json is {}", written("tokenizer.json", "{}"), ("tokenizer",)),
    ("tokenizer.json is a pipe", pipe("tokenizer.json"), ("tokenizer.json", "no file")),
    ("tokenizer_config.json is cut", cut("tokenizer_config.json", 0.5), ("--model", "token")),
    ("tokenizer_config.json is a list", written("tokenizer_config.json", "[]"), ("--model",)),
    ("generation_config.json is cut", cut("generation_config.json", 0.5), ("--model",)),
    ("no template", removed("chat_template.jinja"), ("no chat template",)),
    ("an empty template", written("chat_template.jinja", ""), ("chat template",)),
    ("a template of nothing", written("chat_template.jinja", "hello"), ("chat template",)),
    ("half a template", cut("chat_template.jinja", 0.6), ("chat template",)),
    ("a template raises", written("chat_template.jinja", "{{ raise_exception('no') }}"), ("no",)),
    ("a template calls", written("chat_template.jinja", SUBCLASSES), ("chat template",)),
    ("in capitals", written("chat_template.jinja", "{{ messages|string|upper }}"), ("template",)),
    ("a content twice", written("chat_template.jinja", TURN + TURN), ("chat template",)),
    ("no roles", written("chat_template.jinja", BARE), ("chat template",)),
    ("a template is a pipe", pipe("chat_template.jinja"), ("chat_template.jinja", "no file")),
    ("a template divides by 0", written("chat_template.jinja", "{{ 1 / 0 }}"), ("chat template",)),
    (
        "no end mark",
        no_end("{% for m in messages %}{{ m.content }} then {% endfor %}go"),
        ("end-of",),
    ),
]
MODELS = [Case("models", name, make, ("--model", *says)) for name, make, says in MODELS]
MODELS += [
    Case(
        *("models", "no end-of-text token, and a template with a mark"),
        no_end(),
        ("warning: --model model names no end-of-text token", "<|im_end|>"),
        goes_on=True,
    )
]


CASES = [*MODELS]
