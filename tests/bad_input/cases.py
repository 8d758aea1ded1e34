"""What has been done to the scripts from outside, and what they have to say: one table.

A case is an input and what is expected. `prepare(home)` makes the input in an empty directory, from
which the script is started, and returns its flags. `says` are pieces of the line that is expected:
the flag or the file, and what is wrong. A case that `goes_on` ends as a run should, with a warning
that says so; the others end before anything began, in at most three lines, and leave no run behind.

What is built later (a world, a tool) adds a list of its own, and its name to CASES at the end.
"""

import atexit
import functools
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from envs.sotopia import FILES as SOTOPIA_FILES
from envs.webshop import SMALL_FILES, generate_shop

import torch
from conftest import TINY, run_main
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


def fewer_rows(path: Path) -> None:
    """A whole model whose embedding has 100 rows, and a tokenizer of 531 tokens."""
    found = load_file(path / "model.safetensors")
    found["model.embed_tokens.weight"] = found["model.embed_tokens.weight"][:100].clone()
    save_file(found, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text()) | {"vocab_size": 100}
    (path / "config.json").write_text(json.dumps(config))


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
    ("zero heads", edited("config.json", num_attention_heads=0), ()),
    ("negative heads", edited("config.json", num_attention_heads=-2), ()),
    ("heads in words", edited("config.json", num_attention_heads="two"), ("num_attention_heads",)),
    ("half a head", edited("config.json", num_attention_heads=1.5), ("num_attention_heads",)),
    ("no width", edited("config.json", hidden_size=0), ("another shape",)),
    ("another width", edited("config.json", hidden_size=32), ("another shape",)),
    (
        "a layer too many",
        edited("config.json", num_hidden_layers=4, layer_types=None),
        ("missing", "layers.3"),
    ),
    ("no positions", edited("config.json", max_position_embeddings=0), ("was made for 0",)),
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
    ("one irrelevant tensor", tensors(lambda _: {"x": torch.ones(2)}), ("missing",)),
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
    ("a shard is missing", shards("2"), ("model-00002-of-00003.safetensors",)),
    ("all shards are missing", shards("1", "2", "3"), ("safetensors",)),
    ("fewer rows than tokens", model(fewer_rows), ("531 tokens", "100 rows")),
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


# ------------ runs and their directories ------------

SMALL = "--engine hf --tasks-per-iteration 2 --group-size 2".split()
SMALL += "--eval-tasks 2 --eval-samples 1 --eval-every 1 --max-steps 2".split()


@functools.cache
def finished(script: str) -> Path:
    """A run of two iterations, not disturbed."""
    home = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, home)
    run_main(script, *SMALL, "--iterations", 2, "--run-name", "base", cwd=home, curve=True)
    return home / "runs" / "base"


def resumed(change: Callable[[Path], None], *words: str, auto=False, script="rloo_sokoban"):
    """That run, changed, and taken up for a third iteration."""

    def prepare(home: Path) -> list[str]:
        run = shutil.copytree(finished(script), home / "runs" / "base", symlinks=True)
        change(run)
        return ["--iterations", "3", "--resume", "auto" if auto else "runs/base", *words]

    return prepare


def as_it_is(run: Path) -> None:
    pass


def put(name: str, content: str | bytes) -> Callable[[Path], None]:
    content = content if isinstance(content, bytes) else content.encode()
    return lambda run: (run / name).write_bytes(content) and None


def gone(name: str) -> Callable[[Path], None]:
    def change(run: Path) -> None:
        (shutil.rmtree if (run / name).is_dir() else os.unlink)(run / name)

    return change


def changed(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    return lambda run: (run / name).write_bytes(change((run / name).read_bytes())) and None


def line(number: int, content: bytes) -> Callable[[bytes], bytes]:
    """A table with another line in the place of this one."""

    def change(table: bytes) -> bytes:
        lines = table.split(b"\n")
        lines[number] = content
        return b"\n".join(lines)

    return change


def value(name: str, *path, to) -> Callable[[Path], None]:
    """A JSON file of the run with another value at this path."""

    def change(run: Path) -> None:
        table = place = json.loads((run / name).read_text())
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = to
        (run / name).write_text(json.dumps(table))

    return change


def linked(name: str) -> Callable[[Path], None]:
    """A link to a place outside of the run."""

    def change(run: Path) -> None:
        outside = run.parent.parent / "outside"
        if (run / name).is_dir():
            shutil.move(run / name, outside)
        else:
            outside.write_bytes((run / name).read_bytes() if (run / name).exists() else b"")
            (run / name).unlink(missing_ok=True)
        (run / name).symlink_to(outside)

    return change


def directory(name: str) -> Callable[[Path], None]:
    def change(run: Path) -> None:
        (run / name).unlink(missing_ok=True)
        (run / name).mkdir()

    return change


def queue(name: str) -> Callable[[Path], None]:
    def change(run: Path) -> None:
        (run / name).unlink(missing_ok=True)
        os.mkfifo(run / name)

    return change


def all_of(*changes: Callable[[Path], None]) -> Callable[[Path], None]:
    return lambda run: [change(run) for change in changes] and None


def another_model(*words: str) -> Callable[[Path], list[str]]:
    """A run of a model whose weights are replaced before it goes on."""

    def prepare(home: Path) -> list[str]:
        shutil.copytree(TINY, home / "model")
        first = [*SMALL, "--iterations", 1, "--run-name", "base", "--model", "model"]
        run_main("rloo_sokoban", *first, cwd=home)
        found = load_file(home / "model/model.safetensors")
        found["model.norm.weight"] *= 1.01
        save_file(found, home / "model/model.safetensors", metadata={"format": "pt"})
        return ["--iterations", "2", "--resume", "runs/base", "--model", "model", *words]

    return prepare


def beside(**files: str) -> Callable[[Path], list[str]]:
    """A foreign directory in --runs-dir, newer than the run that --resume auto looks for."""

    def prepare(home: Path) -> list[str]:
        words = resumed(as_it_is, auto=True)(home)
        (home / "runs/foreign").mkdir()
        for name, content in files.items():
            (home / "runs/foreign" / f"{name}.json").write_text(content)
        return words

    return prepare


METRICS, EPISODES = "metrics.jsonl", "episodes.jsonl"
LAST, FIRST = "checkpoints/000002/", "checkpoints/000001/"
START = "starts", 0
DEEP = "[" * 200_000
NONSENSE = ("", "{}", "[]", "null", "7", '"text"', "{", '{"seed"', "\xff\xfe", DEEP, "NaN")
RECORDS = [
    (f"{name} is {content[:12]!r}", put(name, content), (name,))
    for name in ("args.json", "run.json")
    for content in NONSENSE
]
RECORDS += [
    ("args.json is missing", gone("args.json"), ("no run there",)),
    ("run.json is missing", gone("run.json"), ("run.json", "missing")),
    ("run.json without a start", value("run.json", "starts", to=[]), ("run.json",)),
    ("a start is a number", value("run.json", *START, to=1), ("run.json",)),
    ("a start without hashes", value("run.json", *START, "hashes", to=None), ("run.json",)),
    ("a start without a script", value("run.json", *START, "script", to=None), ("run.json",)),
    ("another script", value("run.json", *START, "script", to="\x1b[2J"), ("made by",)),
    ("a flag is lost", value("args.json", "no_such_flag", to=1), ("--no-such-flag",)),
    ("a flag differs", value("args.json", "clip", to=0.3), ("--clip 0.2, was 0.3",)),
    ("a flag of another type", value("args.json", "clip", to=["\n"]), ("--clip 0.2, was",)),
    ("args.json is cut", changed("args.json", lambda t: t[: len(t) // 2]), ("args.json",)),
    ("run.json is cut", changed("run.json", lambda t: t[: len(t) // 2]), ("run.json",)),
    ("args.json is a link", linked("args.json"), ("args.json", "link")),
    ("run.json is a link", linked("run.json"), ("run.json", "link")),
    ("metrics.jsonl is a link", linked(METRICS), (METRICS, "link")),
    ("episodes.jsonl is a link", linked(EPISODES), (EPISODES, "link")),
    ("curve.png is a link", linked("curve.png"), ("curve.png", "link")),
    ("lock is a link", linked("lock"), ("lock", "link")),
    ("a draft is a link", linked(".metrics.jsonl.draft"), (".metrics.jsonl.draft", "link")),
    ("checkpoints is a link", linked("checkpoints"), ("checkpoints", "link")),
    ("metrics.jsonl is a directory", directory(METRICS), (METRICS, "place of a file")),
    ("episodes.jsonl is a pipe", queue(EPISODES), (EPISODES, "place of a file")),
    ("run.json is a pipe", queue("run.json"), ("run.json", "place of a file")),
    ("curve.png is a directory", directory("curve.png"), ("curve.png", "place of a file")),
    ("policy is a directory", directory("policy"), ("policy", "move it away")),
    (
        "checkpoints is a file",
        all_of(gone("checkpoints"), put("checkpoints", "")),
        ("checkpoints",),
    ),
    ("exported is a file", put("exported", ""), ("exported", "place of a directory")),
    ("of a newer version", value(f"{LAST}state.json", "format", to=9), ("state.json", "format 9")),
    (
        "no checkpoint is whole",
        all_of(gone(f"{LAST}state.json"), gone(f"{FIRST}state.json")),
        ("whole",),
    ),
]
RECORDS = [Case("runs", name, resumed(change), says) for name, change, says in RECORDS]

NO_ROWS = [
    b"[]",
    b"7",
    b"null",
    b"\xff\xfe\x00",
    b"{}",
    b'{"iteration": "1"}',
    b'{"iteration": -1}',
]
NO_ROWS += [b'{"iteration": 1.0}', b'{"iteration": true}', b'{"iteration": 1, "eval/score": NaN}']
NO_ROWS += [
    b'{"iteration": 1, "eval/score": "x"}',
    b'{"iteration": 1, "a": "\xff"}',
    b"garbage",
    b"\x1b[2J",
    b"[" * 200_000,
]
TABLES = [
    (f"line 2 of {table} is {row[:36]!r}", changed(table, line(1, row)), (table, "1 lines cannot"))
    for table, rows in ((METRICS, NO_ROWS), (EPISODES, NO_ROWS[:4]))
    for row in rows
]
TABLES += [
    ("metrics.jsonl is garbage", put(METRICS, "a\nb\nc\n"), (METRICS, "3 lines", "0, 1, 2")),
    (
        "metrics.jsonl is cut in line 2",
        changed(METRICS, lambda t: t[: t.find(b"\n") + 9]),
        ("1, 2",),
    ),
    ("metrics.jsonl is empty", put(METRICS, ""), (METRICS, "without a row: 0, 1, 2")),
    ("metrics.jsonl is missing", gone(METRICS), (METRICS, "without a row: 0, 1, 2")),
    ("a row is missing", changed(METRICS, line(1, b"")), (METRICS, "without a row: 1")),
    ("NUL after a power cut", changed(METRICS, lambda t: t + b"\0" * 99), (METRICS, "1 lines")),
    ("episodes.jsonl is garbage", put(EPISODES, "a\n\0\n\xff\n"), (EPISODES, "3 lines")),
    ("no checkpoint is left", gone("checkpoints"), (METRICS, "begins again", "replaced-")),
    (
        "a cut checkpoint",
        changed(f"{LAST}trained.safetensors", lambda t: t[:-1]),
        (LAST, "set aside"),
    ),
    ("no state.json", gone(f"{LAST}state.json"), (f"{LAST}state.json", "set aside")),
    ("state.json is []", put(f"{LAST}state.json", "[]"), (f"{LAST}state.json", "set aside")),
    ("state.json is deep", put(f"{LAST}state.json", DEEP), (f"{LAST}state.json", "set aside")),
    (
        "an empty checkpoint",
        lambda run: (run / "checkpoints/000009").mkdir(),
        ("000009", "set aside"),
    ),
]
TABLES = [
    Case("runs", name, resumed(change), ("warning: ", *says), goes_on=True)
    for name, change, says in TABLES
]
OTHER_NAME = resumed(as_it_is, "--run-name", "other"), ("warning: --run-name other", "keeps")
TABLES.append(Case("runs", "another name", *OTHER_NAME, goes_on=True))

HASHES = *START, "hashes"
OVERRIDES = [
    ("another model", another_model(), ("--model model", "hash")),
    (
        "other weights, --override clip",
        another_model("--override", "clip"),
        ("--model model", "hash"),
    ),
    ("--override of no flag", resumed(as_it_is, "--override", "no"), ("--override no",)),
    (
        "--override of one flag of two",
        resumed(as_it_is, "--clip=0.3", "--seed=2", "--override", "clip"),
        ("--seed 2, was 1",),
    ),
    (
        "another panel, --override clip",
        resumed(value("run.json", *HASHES, "panel", to="0"), "--override", "clip"),
        ("panel", "hash"),
    ),
    (
        "other data, --override model seed",
        resumed(value("run.json", *HASHES, "data", to="0"), "--override", "model", "seed"),
        ("the data", "hash"),
    ),
]
OVERRIDES = [Case("runs", name, make, says) for name, make, says in OVERRIDES]
NAMED = resumed(as_it_is, "--eval-tasks", "3", "--override", "eval-tasks")
OVERRIDES += [
    Case("runs", name, make, ("iteration ",), goes_on=True)
    for name, make in {
        "other weights, --override model": another_model("--override", "model"),
        "another panel, --override eval-tasks": NAMED,
    }.items()
]

FOREIGN = [
    dict(args="{}", run="[]"),
    dict(args="{}"),
    dict(args="[]", run="{}"),
    dict(args='{"seed": 1}', run='{"starts": []}'),
    dict(args='{"seed": 1}', run='{"starts": [{}]}'),
    dict(args="\x1b[2J", run="null"),
    dict(args=DEEP, run=DEEP),
    dict(args=""),
]
FOREIGN = [
    Case("runs", f"auto beside {number}", beside(**files), ("foreign", "is skipped"), goes_on=True)
    for number, files in enumerate(FOREIGN)
]
DAMAGED = resumed(put("run.json", "[]"), "--run-name", "base", auto=True)
FOREIGN += [
    Case("runs", "auto beside a stranger", beside(), ("goes on with runs/base",), goes_on=True),
    Case("runs", "auto and a damaged run of this name", DAMAGED, ("run.json",)),
]

BAD_NAMES = [
    *("../x", "..", ".", "/tmp/x", "a/b", "a\nb", "\x1b[2J", "\udcff", "a\0b", "\t", " "),
    *("n" * 101, "\U0001f600" * 100, "\u202e", "a ", " a", "./", "~/", "a\r"),
]
GOOD_NAMES = [r"$\frac{a}$", "$", "n" * 100, "-x", "a b", "\U0001f600", ".hidden", "100%", "{}"]
NAMES = [
    Case("names", ascii(name)[:20], flags(f"--run-name={name}"), ("--run-name",))
    for name in BAD_NAMES
]
NAMES += [
    Case(
        *("names", f"{ascii(name)[:20]} is one"),
        flags(f"--run-name={name}", "--eval-only"),
        (f"all goes to runs/{name}",),
        goes_on=True,
    )
    for name in GOOD_NAMES
]
PLACES = [
    ("--runs-dir=", ("--runs-dir", "is empty")),
    ("--runs-dir=/proc/x", ("--runs-dir /proc/x", "cannot be written")),
    ("--runs-dir=/dev/null", ("--runs-dir /dev/null", "cannot be written")),
    ("--runs-dir=a\nb", ("--runs-dir", "printable")),
    ("--runs-dir=" + "d/" * 3000, ("--runs-dir", "4,096")),
    ("--runs-dir=" + "d" * 300, ("--runs-dir", "cannot be written")),
    ("--resume=nowhere", ("--resume nowhere", "no run there")),
    ("--resume=/dev/null", ("--resume /dev/null", "no run there")),
    ("--resume=.", ("--resume .", "no run there")),
    ("--resume=a\nb", ("--resume", "printable")),
    ("--resume=" + "d" * 300, ("--resume", "no run there")),
    ("--override=clip", ("--override", "--resume")),
]
NAMES += [Case("names", words[:24], flags(words), says) for words, says in PLACES]


# ------------ data ------------


@functools.cache
def shop() -> list:
    """The three tables of a small shop: products, attributes, people's instructions."""
    rows, attributes, human = generate_shop(0)
    asins = [row["asin"] for row in rows[:6]]
    return [rows[:6], {a: attributes[a] for a in asins}, {a: human[a] for a in asins}]


def shop_with(change: Callable[[list], None], *words: str) -> Callable[[Path], list[str]]:
    """That shop with changed tables."""

    def prepare(home: Path) -> list[str]:
        tables = json.loads(json.dumps(shop()))
        change(tables)
        (home / "data").mkdir()
        for name, table in zip(SMALL_FILES, tables):
            text = table if isinstance(table, bytes) else json.dumps(table).encode()
            (home / "data" / name).write_bytes(text)
        return ["--webshop-data", "data", *words]

    return prepare


def at(*path, to) -> Callable[[list], None]:
    """Another value at a place of tables."""

    def change(tables: list) -> None:
        place = tables
        for key in path[:-1]:
            place = place[[*place][key]] if isinstance(place, dict) and key == 0 else place[key]
        key = [*place][0] if isinstance(place, dict) and path[-1] == 0 else path[-1]
        place[key] = to

    return change


def absent(*path) -> Callable[[list], None]:
    def change(tables: list) -> None:
        place = tables
        for key in path[:-1]:
            place = place[key]
        del place[path[-1]]

    return change


def matrix(options: int, values: int) -> dict:
    """Options that combine to values ** options goals."""
    return {f"o{i}": [{"value": f"v{i} {j}"} for j in range(values)] for i in range(options)}


def halves(tables: list) -> None:
    """Half a surrogate pair in every instruction and name."""
    for row in tables[0]:
        row["name"] += " \ud83d"
    for entries in tables[2].values():
        for entry in entries:
            entry["instruction"] = f"\udc00 {entry['instruction']}"


PRODUCTS, ATTRIBUTES, INSTRUCTIONS = SMALL_FILES
ROW = 0, 1  # the second product
SYNTHETIC = "--goals", "synthetic"
SHOP = [
    ("price 5", at(*ROW, "pricing", to=5), (PRODUCTS, "row 1", "pricing")),
    ("price 5.5", at(*ROW, "pricing", to=5.5), (PRODUCTS, "row 1", "pricing")),
    ("price a list", at(*ROW, "pricing", to=["$5"]), (PRODUCTS, "row 1", "pricing")),
    ("price NaN", at(*ROW, "pricing", to=float("nan")), (PRODUCTS, "row 1", "pricing")),
    ("price Infinity", at(*ROW, "pricing", to=float("inf")), (PRODUCTS, "row 1", "pricing")),
    ("price a table", at(*ROW, "pricing", to={"$": 5}), (PRODUCTS, "row 1", "pricing")),
    ("price true", at(*ROW, "pricing", to=True), (PRODUCTS, "row 1", "pricing")),
    ("price in words", at(*ROW, "pricing", to="five"), (PRODUCTS, "row 1", "pricing")),
    ("price $", at(*ROW, "pricing", to="$"), (PRODUCTS, "row 1", "pricing")),
    ("price 1.2.3", at(*ROW, "pricing", to="$1.2.3"), (PRODUCTS, "row 1", "pricing")),
    ("price of 400 figures", at(*ROW, "pricing", to="$" + "9" * 400), (PRODUCTS, "row 1")),
    ("price of a megabyte", at(*ROW, "pricing", to="$" + "." * 2**20), (PRODUCTS, "row 1")),
    ("no asin", absent(*ROW, "asin"), (PRODUCTS, "row 1", "asin")),
    ("asin 7", at(*ROW, "asin", to=7), (PRODUCTS, "row 1", "asin")),
    ("asin empty", at(*ROW, "asin", to=""), (PRODUCTS, "row 1", "asin")),
    ("a row is a list", at(*ROW, to=[]), (PRODUCTS, "row 1")),
    ("a row is null", at(*ROW, to=None), (PRODUCTS, "row 1")),
    ("no name", absent(*ROW, "name"), (PRODUCTS, "row 1", "name")),
    ("name 7", at(*ROW, "name", to=7), (PRODUCTS, "row 1", "name")),
    ("description null", at(*ROW, "full_description", to=None), (PRODUCTS, "row 1")),
    ("bullets of numbers", at(*ROW, "small_description", to=[1, 2]), (PRODUCTS, "row 1")),
    ("category a list", at(*ROW, "category", to=[]), (PRODUCTS, "row 1", "category")),
    ("query 7", at(*ROW, "query", to=7), (PRODUCTS, "row 1", "query")),
    ("no images", at(*ROW, "images", to=[]), (PRODUCTS, "row 1", "images")),
    ("images 7", at(*ROW, "images", to=7), (PRODUCTS, "row 1", "images")),
    ("options a list", at(*ROW, "customization_options", to=[1]), (PRODUCTS, "row 1")),
    ("options of texts", at(*ROW, "customization_options", to={"a": "b"}), (PRODUCTS, "row 1")),
    ("an option of numbers", at(*ROW, "customization_options", to={"a": [1]}), (PRODUCTS, "row 1")),
    (
        "an option's value 7",
        at(*ROW, "customization_options", to={"a": [{"value": 7}]}),
        ("row 1",),
    ),
    ("a value is missing", at(*ROW, "customization_options", to={"a": [{}]}), (PRODUCTS, "row 1")),
    ("products a table", at(0, to={}), (PRODUCTS, "array")),
    ("no product", at(0, to=[]), (PRODUCTS, "no product")),
    ("products null", at(0, to=None), (PRODUCTS, "array")),
    ("products cut", at(0, to=b'[{"asin": "B1", "na'), (PRODUCTS, "cut short")),
    ("products empty", at(0, to=b""), (PRODUCTS, "damaged")),
    ("products no UTF-8", at(0, to=b"\xff\xfe"), (PRODUCTS, "UTF-8")),
    ("products deep", at(0, to=b"[" * 200_000), (PRODUCTS, "deep")),
    ("attributes deep", at(1, to=b'{"a":' * 200_000), (ATTRIBUTES, "deep")),
    ("attributes a list", at(1, to=[]), (ATTRIBUTES, "object")),
    ("an entry a list", at(1, 0, to=[]), (ATTRIBUTES, "attributes")),
    ("attributes 7", at(1, 0, "attributes", to=7), (ATTRIBUTES, "attributes")),
    ("attributes null", at(1, 0, "attributes", to=None), (ATTRIBUTES, "attributes")),
    ("attributes of numbers", at(1, 0, "attributes", to=[1]), (ATTRIBUTES, "attributes")),
    ("instruction 7", at(1, 0, "instruction", to=7), (ATTRIBUTES, "attributes")),
    ("instructions a list", at(2, to=[]), (INSTRUCTIONS, "object")),
    ("instructions cut", at(2, to=b"{"), (INSTRUCTIONS, "cut short")),
    ("an entry 7", at(2, 0, to=7), (INSTRUCTIONS, "list of instructions")),
    ("an instruction null", at(2, 0, 0, to=None), (INSTRUCTIONS, "instruction 0")),
    ("its text 7", at(2, 0, 0, "instruction", to=7), (INSTRUCTIONS, "instruction 0")),
    ("its options null", at(2, 0, 0, "instruction_options", to=None), ("instruction 0",)),
    ("its options numbers", at(2, 0, 0, "instruction_options", to=[7]), ("instruction 0",)),
    ("its attributes a text", at(2, 0, 0, "instruction_attributes", to="a"), ("instruction 0",)),
    ("nobody asks", at(2, to={}), ("0 goals", "nothing to split")),
]
SHOP = [
    Case("data", name, shop_with(change), ("--webshop-data data", *says), "rloo_webshop")
    for name, change, says in SHOP
]
BIG = at(*ROW, "customization_options", to=matrix(9, 12))
EDGE = at(*ROW, "customization_options", to=matrix(6, 9))
SHOP += [
    Case(
        *("data", f"options of {name}, synthetic goals"),
        shop_with(change, *SYNTHETIC),
        ("--webshop-data data", "combinations of its options"),
        "rloo_webshop",
    )
    for name, change in {"9 times 12 values": BIG, "6 times 9 values": EDGE}.items()
]
SHOP += [
    Case("data", words[0], flags(*words), says, "rloo_webshop")
    for words, says in [
        (("--webshop-data=nowhere",), ("--webshop-data nowhere", "missing")),
        (("--webshop-data=/dev/null",), ("--webshop-data /dev/null", "missing")),
        (("--webshop-data=hub",), ("--webshop-data hub", "download")),
        (("--webshop-data=a\nb",), ("--webshop-data", "printable")),
        (("--num-products=one",), ("--num-products one",)),
        (("--num-products=-1",), ("--num-products",)),
        (("--max-steps=0",), ("--max-steps",)),
    ]
]
SHOP += [
    Case(
        *("data", "halves of surrogate pairs in every instruction"),
        shop_with(halves),
        ("iteration    1",),
        "rloo_webshop",
        goes_on=True,
    )
]
ROOMS = [
    ("--room-size=200", ("--room-size 200", "6 to 10")),
    ("--room-size=5", ("--room-size 5", "6 to 10")),
    ("--room-size=1000000000000", ("--room-size",)),
    ("--num-boxes=100", ("--num-boxes 100", "1 to 4")),
    ("--num-boxes=0", ("--num-boxes 0", "1 to 4")),
    ("--num-boxes=-1", ("--num-boxes -1", "1 to 4")),
]
ROOMS = [Case("data", words, flags(words), says) for words, says in ROOMS]


def published() -> list:
    """Environments, people and combos, as SOTOPIA's files have them."""
    environments, people, combos = [], {}, []
    for number in range(6):
        goals = ["Sell the chair.", "Buy the chair."]
        scene = {"scenario": f"A market, stall {number}.", "agent_goals": goals, "relationship": 2}
        environments.append({"pk": f"e{number}", **scene})
    for number in range(4):
        name = {"first_name": f"Ann{number}", "last_name": "Lee", "age": 30, "secret": "None."}
        people[f"a{number}"] = {"pk": f"a{number}", **name}
    for number in range(12):
        pair = [f"a{number % 4}", f"a{(number + 1) % 4}"]
        combos.append({"env_id": f"e{number % 6}", "agent_ids": pair})
    return [environments, people, combos]


def talks_with(change: Callable[[list], None]) -> Callable[[Path], list[str]]:
    def prepare(home: Path) -> list[str]:
        tables = published()
        change(tables)
        (home / "data").mkdir()
        for name, table in zip(SOTOPIA_FILES, tables):
            text = table if isinstance(table, bytes) else json.dumps(table).encode()
            (home / "data" / name).write_bytes(text)
        judge = ["--judge-url", "http://127.0.0.1:9/v1", "--judge-model", "m", "--partner", "self"]
        return ["--sotopia-data", "data", *judge]

    return prepare


SCENES, PEOPLE, PAIRS = SOTOPIA_FILES
SCENE = 0, 1
TALKS = [
    ("pk 7", at(*SCENE, "pk", to=7), (SCENES, "row 1", "pk")),
    ("pk a list", at(*SCENE, "pk", to=["e"]), (SCENES, "row 1", "pk")),
    ("no pk", absent(*SCENE, "pk"), (SCENES, "row 1", "pk")),
    ("scenario 7", at(*SCENE, "scenario", to=7), (SCENES, "row 1", "scenario")),
    ("scenario null", at(*SCENE, "scenario", to=None), (SCENES, "row 1", "scenario")),
    ("goals a text", at(*SCENE, "agent_goals", to="win"), (SCENES, "row 1", "agent_goals")),
    ("one goal", at(*SCENE, "agent_goals", to=["win"]), (SCENES, "row 1", "agent_goals")),
    ("goals of numbers", at(*SCENE, "agent_goals", to=[1, 2]), (SCENES, "row 1", "agent_goals")),
    ("relationship 6", at(*SCENE, "relationship", to=6), (SCENES, "row 1", "relationship")),
    ("relationship -1", at(*SCENE, "relationship", to=-1), (SCENES, "row 1", "relationship")),
    ("relationship 1.5", at(*SCENE, "relationship", to=1.5), (SCENES, "row 1", "relationship")),
    ("relationship 2.0", at(*SCENE, "relationship", to=2.0), (SCENES, "row 1", "relationship")),
    ("relationship true", at(*SCENE, "relationship", to=True), (SCENES, "row 1", "relationship")),
    ("relationship a text", at(*SCENE, "relationship", to="2"), (SCENES, "row 1", "relationship")),
    ("relationship a list", at(*SCENE, "relationship", to=[]), (SCENES, "row 1", "relationship")),
    ("a row is 7", at(*SCENE, to=7), (SCENES, "row 1")),
    ("no rows", at(0, to=[]), (SCENES, "no rows")),
    ("one environment", at(0, to=published()[0][:1]), (PAIRS, "row 1")),
    ("environments null", at(0, to=None), (SCENES, "no rows")),
    ("environments cut", at(0, to=b'[{"pk"'), (SCENES, "no JSON")),
    ("environments no UTF-8", at(0, to=b"\xff\xff"), (SCENES, "no JSON")),
    ("environments deep", at(0, to=b"[" * 200_000), (SCENES, "deep")),
    ("first name 7", at(1, "a1", "first_name", to=7), (PEOPLE, "row 1", "first_name")),
    ("no first name", absent(1, "a1", "first_name"), (PEOPLE, "row 1", "first_name")),
    ("last name a list", at(1, "a1", "last_name", to=[]), (PEOPLE, "row 1", "last_name")),
    ("secret a table", at(1, "a1", "secret", to={}), (PEOPLE, "row 1", "secret")),
    ("occupation 7", at(1, "a1", "occupation", to=7), (PEOPLE, "row 1", "occupation")),
    ("public_info a list", at(1, "a1", "public_info", to=[1]), (PEOPLE, "row 1", "public_info")),
    ("a person null", at(1, "a1", to=None), (PEOPLE, "row 1")),
    ("people deep", at(1, to=b'{"a":' * 200_000), (PEOPLE, "deep")),
    ("people a text", at(1, to="people"), (PEOPLE, "no rows")),
    ("an unknown person", at(2, 1, "agent_ids", to=["a1", "x"]), (PAIRS, "row 1")),
    ("one person", at(2, 1, "agent_ids", to=["a1"]), (PAIRS, "row 1")),
    ("three people", at(2, 1, "agent_ids", to=["a1", "a2", "a3"]), (PAIRS, "row 1")),
    ("people by number", at(2, 1, "agent_ids", to=[1, 2]), (PAIRS, "row 1")),
    ("people in lists", at(2, 1, "agent_ids", to=[[], []]), (PAIRS, "row 1")),
    ("agent_ids 7", at(2, 1, "agent_ids", to=7), (PAIRS, "row 1")),
    ("an unknown environment", at(2, 1, "env_id", to="x"), (PAIRS, "row 1")),
    ("an environment by number", at(2, 1, "env_id", to=1), (PAIRS, "row 1")),
    ("no combos", at(2, to=[]), (PAIRS, "no rows")),
]
TALKS = [
    Case(
        "data",
        f"sotopia, {name}",
        talks_with(change),
        ("--sotopia-data data", *says),
        "grpo_sotopia",
    )
    for name, change, says in TALKS
]

# ------------ endpoints: their addresses ------------

SECRET = "sk-0123456789"
ADDRESSES = [
    "localhost:8000",
    "ftp://localhost/v1",
    "file:///etc/passwd",
    "http://",
    "http://:8000/v1",
    "http://localhost:port/v1",
    "http://localhost:99999/v1",
    "http://localhost:-1/v1",
    "http://localhost:0/v1",
    "http://[::1/v1",
    "http://local host/v1",
    "http://localhost/v1\n",
    "http://localhost/\tv1",
    "http://localhost\\@other/v1",
    f"http://{SECRET}@localhost/v1",
    f"http://user:{SECRET}@localhost/v1",
    f"http://localhost/v1?key={SECRET}",
    f"http://localhost/v1#{SECRET}",
    f"http://localhost/v1#\n{SECRET}",
    f"http://localhost:{SECRET}/v1",
    "http://" + "a" * 300 + "/v1",
    "http://" + "a" * 5000,
    "http://\udcff/v1",
    "javascript:alert(1)",
]
URLS = [
    Case(
        *("endpoints", f"--{flag}-url {ascii(url)[:40]}"),
        flags(f"--{flag}-url={url}", f"--{flag}-model=m"),
        (f"--{flag}-url",),
        "grpo_sotopia",
    )
    for flag in ("judge", "eval-partner")
    for url in ADDRESSES
]
URLS += [
    Case("endpoints", " ".join(words)[:40], flags(*words), says, "grpo_sotopia")
    for words, says in [
        (("--judge-url=http://localhost/v1",), ("--judge-model", "missing")),
        (("--partner-url=http://localhost/v1",), ("--partner-model", "missing")),
        (("--partner=self", "--partner-url=http://a/v1", "--partner-model=m"), ("--partner self",)),
        (("--outcome=overall",), ("--outcome overall", "--judge-url")),
        (("--sotopia-data=x",), ("--sotopia-data", "--judge-url")),
        (("--max-steps=11",), ("--max-steps 11",)),
        (("--timeout=nan",), ("--timeout nan",)),
        (("--timeout=inf",), ("--timeout inf",)),
        (("--timeout=0",), ("--timeout 0",)),
        (("--tries=0",), ("--tries 0",)),
        (("--tries=101",), ("--tries 101",)),
        (("--in-flight=0",), ("--in-flight 0",)),
    ]
]

URLS += [
    Case("engines", f"--engine-url {ascii(url)[:40]}", flags(f"--engine-url={url}"), says)
    for url in (*ADDRESSES, "", "http://localhost:8000/v1")
    for says in [("--engine-url ...: ",)]
]
URLS += [
    Case("engines", " ".join(words), flags(*words), says, script)
    for script, words, says in [
        (
            "rloo_sokoban",
            ("--engine-url=http://a:8000", "--engine=hf"),
            ("--engine hf", "--engine-url are vLLM's"),
        ),
        (
            "rloo_sokoban",
            ("--engine-url=['http://127.0.0.1:9', 'http:']",),
            ("--engine-url ...: ", "http address"),
        ),
        (
            "rloo_sokoban",
            ("--engine=vllm", "--engine-url=http://127.0.0.1:9"),
            ("does not answer",),
        ),
        (
            "rloo_visual_sokoban",
            ("--engine=vllm", "--engine-url=http://a:8000"),
            ("--engine-url", "pictures"),
        ),
    ]
]

# ------------ flags: each range, and what does not go together ------------

# test_every_flag.py has every flag of every script; these go through main
VALUES = """
rloo_sokoban --clip=-1 --clip=nan --clip=0 --max-grad-norm=-1 --max-grad-norm=nan --lr-halving=nan
rloo_sokoban --lr-halving=0 --invalid-penalty=nan --invalid-penalty=-0.1 --learning-rate=inf
rloo_sokoban --learning-rate=nan --learning-rate=2 --temperature=nan --temperature=inf
rloo_sokoban --temperature=1e-300 --eval-temperature=nan --eval-temperature=1e-300 --group-size=1
rloo_sokoban --engine-cap=nan --engine-cap=-1 --seed=-1 --seed=18446744073709551616
rloo_sokoban --minibatches=0 --history=-1 --max-steps=0 --max-steps=1e3 --eval-tasks=0 --keep=0
rloo_sokoban --iterations=0 --iterations=99999999999 --processes=0 --save-every=-1 --eval-every=-1
rloo_sokoban --policy-lora-rank=-1 --engine=tpu --dtype=float16 --ratio=token --track=perhaps
rloo_sokoban --micro-batch-tokens=0 --engine-memory=0 --group-size=10000000 --eval-samples=10000000
rloo_sokoban --max-context-tokens=16 --max-action-tokens=99999 --eval-tasks=129 --no-seed --sed=1
rloo_sokoban --tasks-per-iteration=10001 --processes=2 --top-p=0.9 --clip= --seed=one --seed=0x10
rloo_sokoban --policy-lora-rank=65 --engine-memory=100000 --max-steps=99999999999
istar_sokoban --prm-lora-rank=10000000 --max-action-tokens=1024 --override=clip --resume=x
istar_sokoban --pair-margin=nan --pair-margin=-1 --alpha=inf --alpha=nan --alpha=-1 --beta=nan
istar_sokoban --beta=-0.05 --prm-ridge=nan --prm-ridge=-1 --prm-ridge=inf --prm-replay=0
istar_sokoban --prm-replay=-1 --prm-replay=1.5 --prm-steps=-1 --prm-learning-rate=inf
istar_sokoban --prm-lora-rank=0 --prm-lora-rank=-1 --estimator=best --step-reward=token
istar_paper_sokoban --prm-lora-rank=16 --prm-replay=256 --prm-ridge=0.1 --beta=nan --estimator=best
gigpo_sokoban --step-gamma=1.1 --step-gamma=nan --step-weight=-1 --step-norm=max
graphgpo_sokoban --distance-discount=1.1 --distance-discount=nan --step-weight=-1
dpo_webshop --beta=-1 --beta=nan --pair-margin=-1 --minibatches=0 --clip=0.2 --ratio=step
prime_webshop --outcome=score --ratio=step --variant=new --beta=inf
ppo_webshop --gamma=nan --gamma=1.5 --gae-lambda=-0.1 --value-clip=0 --value-clip=nan --gae=all
ppo_webshop --critic-learning-rate=inf --critic-lora-rank=-1
istar_webshop_ablations --step-reward=token --step-reward=none --ratio=none --as-published=all
warm_start --noise=1.5 --noise=nan --target=2 --kv-heads=3 --heads=0 --vocabulary=10 --hidden=0
warm_start --layers=1000000 --rotary-base=0 --rotary-base=nan --out=/dev/null/x --out=
warm_start --batch-size=0 --environment=chess --observation-share=nan --learning-rate=inf
warm_start --model=nowhere/at/all
"""
FLAGS = []
for words in map(str.split, VALUES.strip().splitlines()):
    for word in words[1:]:
        less = ["--demonstrations=2"] if words[0] == "warm_start" else []
        says = (word.split("=")[0],)
        FLAGS.append(Case("flags", f"{words[0]} {word}", flags(word, *less), says, words[0]))
TOGETHER = {
    "istar_webshop_ablations --step-reward=token": ("--ratio token",),
    "rloo_sokoban --group-size=10000000": ("--group-size", "from 2 to 10,000"),
    "rloo_sokoban --processes=2": ("--processes 2", "1 started"),
}
FLAGS = [replace(case, says=TOGETHER.get(case.name, case.says)) for case in FLAGS]
FEW = "--demonstrations", "2"
CLONING = [
    ("a cut config.json", cut("config.json", 0.5), ("--model model", "config.json")),
    ("a layer is missing", tensors(without(LAYER)), ("--model model", "missing")),
    ("no tokenizer", removed("tokenizer.json"), ("--model model", "token")),
    ("nan", tensors(with_number(float("nan"), EMBEDDING)), ("--model model", "not finite")),
]
CLONING = [
    Case(
        "models", f"{name}, cloned", lambda home, make=make: [*make(home), *FEW], says, "warm_start"
    )
    for name, make, says in CLONING
]


# ------------ the visual world ------------

SEEING = Path(__file__).parent.parent.parent / "models" / "tiny-visual-sokoban"


def seeing(change: Callable[[Path], None], *words: str) -> Callable[[Path], list[str]]:
    """The tiny model that sees, changed."""

    def prepare(home: Path) -> list[str]:
        change(shutil.copytree(SEEING, home / "model"))
        return ["--model", "model", *words]

    return prepare


def with_values(name: str, *path, to) -> Callable[[Path], list[str]]:
    """With another value at this path of one of its JSON files."""
    return seeing(value(name, *path, to=to))


PROCESSOR, TOWER = "preprocessor_config.json", ("config.json", "vision_config")
WORDS_MODEL = ["--model", str(TINY), "--max-context-tokens", "600"]
VISUAL = [
    ("a model of words", lambda home: WORDS_MODEL, ("sees no pictures",)),
    ("no preprocessor", seeing(gone(PROCESSOR)), (PROCESSOR,)),
    ("a preprocessor is cut", seeing(put(PROCESSOR, '{"a')), (PROCESSOR,)),
    ("a preprocessor is a list", seeing(put(PROCESSOR, "[]")), (PROCESSOR, "no JSON object")),
    ("a preprocessor is {}", seeing(put(PROCESSOR, "{}")), (PROCESSOR, "differ")),
    ("a preprocessor is a pipe", seeing(queue(PROCESSOR)), (PROCESSOR, "no file")),
    ("patches of 0", with_values(PROCESSOR, "patch_size", to=0), (PROCESSOR, "differ")),
    ("patches of words", with_values(PROCESSOR, "patch_size", to="a"), (PROCESSOR,)),
    ("another merge", with_values(PROCESSOR, "merge_size", to=2), (PROCESSOR, "differ")),
    ("three frames", with_values(PROCESSOR, "temporal_patch_size", to=3), (PROCESSOR, "differ")),
    ("a size in words", with_values(PROCESSOR, "size", to="big"), (PROCESSOR,)),
    ("no image token", with_values("config.json", "image_token_id", to=9999), ("picture",)),
    ("no heads", with_values(*TOWER, "num_heads", to=0), ()),
    ("a third layer", with_values(*TOWER, "depth", to=3), ("missing",)),
    ("another output", with_values(*TOWER, "out_hidden_size", to=32), ("another shape",)),
    ("a tower in a list", with_values(*TOWER, to=[1]), ()),
    ("no text", with_values("config.json", "text_config", to=[1]), ()),
    (
        "huge words",
        with_values("config.json", "text_config", "hidden_size", to=10**12),
        (),
    ),
    ("no place for a picture", seeing(put("chat_template.jinja", TURN)), ("template",)),
]
VISUAL = [
    Case("models that see", name, make, ("--model", *says), "rloo_visual_sokoban")
    for name, make, says in VISUAL
]
VISUAL += [
    Case("rooms as pictures", words, flags(*words.split()), (says,), "rloo_visual_sokoban")
    for words, says in {
        "--cell-pixels 0": "--cell-pixels 0: has to be a whole number",
        "--cell-pixels nan": "--cell-pixels nan: has to be a whole number",
        "--cell-pixels 17": "multiples of 16 (--cell-pixels)",
        "--saved-pictures -1": "--saved-pictures -1: has to be a whole number",
        "--freeze-vision=2": "--freeze-vision 2: True or False",
        "--policy-lora-rank 65": "--model models/tiny-visual-sokoban is 64 wide",
    }.items()
]
VISUAL.append(
    Case(
        *("models that see", "in a world of words", lambda home: ["--model", str(SEEING)]),
        ("--model", "made for pictures"),
    )
)
for width in (32, 66, 96):
    words = flags("--environment", "visual_sokoban", "--hidden", str(width))
    says = (f"--hidden {width}: a model that sees is 32 x --heads 2 wide",)
    VISUAL.append(Case("models that see", f"a new one {width} wide", words, says, "warm_start"))


# ------------ a run as a page ------------


def viewed(change: Callable[[Path], None], *words: str) -> Callable[[Path], list[str]]:
    """That run, changed, and looked at."""

    def prepare(home: Path) -> list[str]:
        run = shutil.copytree(finished("rloo_sokoban"), home / "runs" / "base")
        change(run)
        return ["runs/base", *words]

    return prepare


EPISODES = "episodes.jsonl"
NO_RUN = "args.json or run.json is not what a run writes"
ROW = b'{"version": 2, "iteration": 1, "task": 1, "outcome": 1, "truncated": false, "steps": '
VIEWER = [
    ("nothing", flags(), "one run or two, not 0"),
    ("three", flags("a", "b", "c"), "one run or two, not 3"),
    ("a run that is not there", flags("nowhere"), "nowhere: no run there"),
    ("ESC", flags("a\x1b[2J"), "not printable"),
    ("a name of 5,000", flags("a" * 5000), "4,096 are the most"),
    ("a flag without a value", viewed(as_it_is, "--episodes"), "--episodes: a value is missing"),
    ("0 episodes", viewed(as_it_is, "--episodes=0"), "--episodes 0: has to be a whole number"),
    ("nan episodes", viewed(as_it_is, "--episodes=nan"), "--episodes nan: has to be"),
    (
        "no such flag",
        viewed(as_it_is, "--epsodes=3"),
        "--epsodes=3: no such flag; perhaps --episodes",
    ),
    ("no args.json", viewed(gone("args.json")), "runs/base: no run there"),
    ("args.json is cut", viewed(put("args.json", '{"a')), NO_RUN),
    ("args.json is a list", viewed(put("args.json", "[]")), NO_RUN),
    ("no run.json", viewed(gone("run.json")), "run.json: No such file"),
    ("run.json is cut", viewed(put("run.json", '{"st')), NO_RUN),
    ("no starts", viewed(put("run.json", '{"starts": []}')), NO_RUN),
    ("a start is a number", viewed(put("run.json", '{"starts": [1]}')), NO_RUN),
    ("no script", viewed(value("run.json", "starts", 0, "script", to=3)), NO_RUN),
    (f"{EPISODES} is a directory", viewed(directory(EPISODES)), "Is a directory"),
]
VIEWER = [Case("a run as a page", name, make, (says,), "view") for name, make, says in VIEWER]
VIEWER += [
    Case(
        *("a run as a page", f"a row with {name}"),
        viewed(changed(EPISODES, line(1, row))),
        ("runs/base/view.html",),
        *("view", True),
    )
    for name, row in {
        "no JSON": ROW + b"junk",
        "nothing": b'{"version": 2, "iteration": 1}',
        "a number for a step": ROW + b"[1]}",
        "an object for words": ROW + b'[{"observation": {}, "action": "", "valid": true}]}',
        "infinity": ROW + b'[{"observation": "", "action": "", "valid": true, "reward": 1e999}]}',
        "no text": b'{"version": 2, "iteration": 1, \xff\xfe',
        "a hundred thousand brackets": ROW + b"[" * 100_000,
    }.items()
]

CASES = [*MODELS, *CLONING, *RECORDS, *TABLES, *OVERRIDES, *FOREIGN, *NAMES, *SHOP, *ROOMS, *TALKS]
CASES += [*URLS, *FLAGS, *VISUAL, *VIEWER]
