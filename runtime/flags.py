"""The flags of a run, what values every flag may have, and reading the command line."""

import ast
import json
import math
import sys
from contextlib import suppress
from dataclasses import dataclass, field, fields, is_dataclass, replace
from difflib import get_close_matches
from itertools import takewhile
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import tyro

T = TypeVar("T")
Flat = Annotated[T, tyro.conf.arg(name="")]  # flags of a dataclass under their own names: --engine


def usual_dtype() -> str:
    import torch  # it takes a second, which view.py need not wait

    return "bfloat16" if torch.cuda.is_available() else "float32"


@dataclass
class RunArgs:
    """Flags of a run. Precision, prompts, contexts and --async-rollout affect what is learnt."""

    engine: Literal["auto", "vllm", "hf"] = "auto"
    """Sampler: vllm, or hf (transformers; bit-reproducible on a CPU); auto: vllm if installed."""
    engine_url: tuple[str, ...] = ()  # Addresses of vLLM servers that sample: http://host:8000.
    async_rollout: bool = False  # Servers sample with the previous weights while the trainer works.
    engine_memory: int = 2  # Engine's KV cache on a CPU [GiB]; what does not fit is recomputed.
    engine_gpu_share: float = 0.4  # Share of a GPU's memory that the engine takes to sample.
    dtype: Literal["float32", "bfloat16"] = field(default_factory=usual_dtype)
    """Precision of engine and trainer (optimisers: float32): bfloat16 on a GPU, else float32."""
    micro_batch_tokens: int = 8192  # Maximum tokens in a forward pass; does not change the result.
    gradient_checkpointing: bool = False  # Recompute layers: less memory, a third more time.
    eval_every: int = 10  # Iterations between evaluations; the last iteration is always evaluated.
    eval_only: bool = False  # Evaluate --model and stop, without training.
    eval_set: Literal["panel", "validation"] = "panel"
    """Tasks for evaluation: the panel, which is reported, or those on which settings are chosen."""
    eval_tasks: int = 128  # Number of evaluation tasks, the first ones of the world's list.
    eval_samples: int = 2  # Episodes per task in an evaluation.
    eval_temperature: float = 0.4  # Temperature in evaluation (iStar paper: 0.4); 0: greedy.
    runs_dir: str = "runs"  # Directory in which runs are kept.
    run_name: str = ""  # Name of this run's directory in --runs-dir; empty: script, seed and time.
    resume: str = ""  # Run to continue (runs/NAME); auto: the one that this command began.
    override: tuple[str, ...] = ()  # Flags that --resume lets differ: e.g. seed clip.
    save_every: int = 0  # Iterations between checkpoints; 0: as often as takes 5 % of the time.
    keep: int = 2  # Number of latest checkpoints that are kept; the best evaluation's is kept too.
    processes: int = 1  # Number of processes that the launcher started (docs/many-gpus.md).
    chat_template_kwargs: str = ""
    """Variables of --model's chat template, a JSON object: '{"enable_thinking": false}'."""
    drop_thoughts: bool = False  # Leave thoughts (to </think>) of past answers out, as Qwen3 does.
    trust_remote_code: bool = False  # Run the Python code that comes with --model.
    quiet: bool = False  # Print only warnings and errors.
    track: bool = False  # Log to Weights & Biases too; an agent of a sweep always does.

    def __post_init__(self):
        with suppress(ValueError, RecursionError):
            if isinstance(json.loads(self.chat_template_kwargs or "{}"), dict):
                return
        needs = """has to be a JSON object, as '{"enable_thinking": false}'"""
        refuse("chat_template_kwargs", self.chat_template_kwargs, needs)


MOST = 10_000_000  # of what is counted
LARGE, SMALL = 1e9, 1e-9  # of what is measured
NAME = 100  # bytes, of a directory or a file


@dataclass(frozen=True)
class Range:
    """Numbers of a kind, int or float, from `least` to `most`, both included; `or_zero`: and 0."""

    kind: type
    least: float
    most: float
    or_zero: bool = False

    def __str__(self) -> str:
        number, form = ("a whole number", ",d") if self.kind is int else ("a number", "g")
        return f"{'0 or ' * self.or_zero}{number} from {self.least:{form}} to {self.most:{form}}"

    @property
    def metavar(self) -> str:
        """How --help shows it: INT>=1, FLOAT>0, 0<=FLOAT<=1."""
        name = self.kind.__name__.upper()
        if self.least == SMALL:
            return f"{name}>=0" if self.or_zero else f"{name}>0"
        if self.most >= MOST:
            return name if self.least < 0 else f"{name}>={self.least:g}"
        return f"{self.least:g}<={name}<={self.most:g}"

    def refusal(self, text: str) -> str:
        """What a value has to be, where this text is none; else nothing."""
        with suppress(ValueError):
            value = self.kind(text)
            if self.least <= value <= self.most or (self.or_zero and value == 0):
                return ""
        return f"has to be {self}"


@dataclass(frozen=True)
class Text:
    """Printable characters, on one line; `component`: as a directory of this name needs it."""

    component: bool = False
    kind = str
    metavar = "STR"

    def refusal(self, text: str) -> str:
        """What is wrong with this text, or nothing."""
        if not text.isprintable():
            return "has characters that are not printable"
        most, length = NAME if self.component else 4096, len(text.encode())  # bytes
        if length > most:
            return f"has {length:,} bytes, {most:,} are the most"
        if self.component and (text in (".", "..") or "/" in text or text != text.strip()):
            return "has to be the name of one directory, without a path or blanks around it"
        return ""


# What the value of a flag may be, of every script and world. A flag of your own, which is not here,
# is any finite number or any printable line. A page whose flag differs says so beside it:
# group_size: int = field(default=8, metadata={"least": 1})
TABLE = {
    Range(int, 0, MOST): """history policy_lora_rank critic_lora_rank prm_lora_rank prm_steps
        save_every num_products saved_pictures min_updates""",
    Range(int, 1, MOST): """iterations tasks_per_iteration max_steps max_action_tokens episodes
        max_context_tokens minibatches eval_every eval_tasks keep micro_batch_tokens processes signs
        prm_replay in_flight crossings guarded needed max_updates demonstrations batch_size""",
    Range(int, 2, 10_000): "group_size",
    Range(int, 1, 10_000): "eval_samples engine_memory",
    Range(int, 0, 2**32 - 1): "seed",
    Range(int, 1, 4): "num_boxes",
    Range(int, 6, 10): "room_size",
    Range(int, 1, 1024): "cell_pixels",
    Range(int, 1, 100): "tries",
    Range(int, 1, 256): "layers",
    Range(int, 1, 16_384): "hidden heads kv_heads",
    Range(int, 259, 1_000_000): "vocabulary",
    Range(float, 0.0, 1.0): """learning_rate prm_learning_rate critic_learning_rate gamma gae_lambda
        step_gamma distance_discount target noise observation_share""",
    Range(float, 0.0, 0.9999): "prm_average",  # 1: the average never moves
    Range(float, 0.05, 0.95): "engine_gpu_share",
    Range(float, SMALL, LARGE): "temperature clip value_clip engine_cap timeout rotary_base",
    Range(float, SMALL, LARGE, or_zero=True): "eval_temperature",
    Range(float, SMALL, math.inf): "lr_halving max_grad_norm",  # inf: without a limit
    Range(float, 0.0, LARGE): """alpha beta invalid_penalty prm_ridge prm_weight_decay
        pair_margin step_weight""",
    Text(): """model runs_dir resume out webshop_data sotopia_data alfworld_data game
        partner_url partner_model judge_url judge_model eval_partner_url eval_partner_model
        eval_judge_url eval_judge_model chat_template_kwargs""",
    Text(component=True): "run_name",
}
RANGES = {name: values for values, names in TABLE.items() for name in names.split()}
OWN = {  # of a flag that is not in the table
    int: Range(int, -(2**63), 2**63 - 1),
    float: Range(float, -sys.float_info.max, sys.float_info.max),
    str: Text(),
    tuple[str, ...]: Text(),
}


@dataclass
class Flag:
    """What a flag may be."""

    kind: Any  # its type
    default: Any
    values: Range | Text | None  # of the table; None where the type says all

    def refusal(self, value: str) -> str:
        """Why this cannot be the flag's value, or nothing."""
        if get_origin(self.kind) is Literal:
            choices = [str(choice) for choice in get_args(self.kind)]
            named = ", ".join(choice or '""' for choice in choices)
            return "" if value in choices else f"has to be one of {named}"
        if isinstance(self.values, Text) and not value:  # only where it is empty by itself
            return "" if self.default == "" else "is empty"
        return self.values.refusal(value) if self.values else ""


def parse(args_class: type[T], description: str) -> T:
    """The script's flags from the command line; exits with one line where a flag is unknown or its
    value is not what its type and the table say. --flag=False is read, and --flag=['a', 'b']."""
    flags, argv = kinds_of(args_class), sys.argv[1:]
    if not {"-h", "--help"} & {*argv}:
        argv = check_words(argv, flags)
    return tyro.cli(args_class, args=argv, description=description)


def kinds_of(args_class) -> dict[str, Flag]:
    """All flags by their names, nested ones too, with the range of each number for --help. Exits
    where two dataclasses have a flag of one name, or where a type is not plain."""
    flags, nested, hints = {}, [], get_type_hints(args_class, include_extras=True)
    for each in fields(args_class):
        marks = getattr(hints[each.name], "__metadata__", ())
        kind = hints[each.name].__origin__ if marks else hints[each.name]
        if is_dataclass(kind):
            nested.append(kind)
            args_class.__annotations__[each.name] = Flat[kind]  # where tyro looks
            continue
        if kind not in (*OWN, bool) and get_origin(kind) is not Literal:
            plain = "int, float, bool, str, Literal or tuple[str, ...]"
            name = getattr(kind, "__name__", kind) if not get_args(kind) else kind
            sys.exit(f"--{each.name.replace('_', '-')}: the type of a flag is {plain}, not {name}")
        values = RANGES.get(each.name)
        if not values or values.kind is not kind:
            values = OWN.get(kind)
        values = replace(values, **each.metadata) if each.metadata else values
        flags[each.name] = Flag(kind, each.default, values)
        if isinstance(values, Range) and not marks:
            told = Annotated[kind, tyro.conf.arg(metavar=values.metavar)]
            args_class.__annotations__[each.name] = told
    owners = {each.name: args_class.__name__ for each in fields(args_class)}
    for part in reversed(nested):  # the world's is the last
        for name, flag in kinds_of(part).items():
            if name in owners:
                both = f"{owners[name]} and {part.__name__} both have it"
                own = owners[name] if part is RunArgs else part.__name__  # the user's
                sys.exit(f"--{name.replace('_', '-')}: {both}; rename {own}.{name}")
            flags[name], owners[name] = flag, part.__name__
    return flags


def check_words(argv: list[str], flags: dict[str, Flag]) -> list[str]:
    """The command line as tyro reads it; exits with one line that names what is wrong in it."""
    words, checked, lists = [*argv], [], {}  # {flag: values}, of each time that it is given
    while words:
        word = words.pop(0)
        flag, equals, value = word.partition("=")
        flag, name = flag.replace("_", "-"), flag.removeprefix("--").replace("-", "_")
        if name not in flags and is_flag(word, flags) and not equals:  # --no-flag
            checked.append(flag)
            continue
        if name not in flags or not word.startswith("--"):
            near = get_close_matches(name, flags, 1)
            meant = f"; perhaps --{near[0].replace('_', '-')}" if near else ""
            sys.exit(f"{shown(word)}: no such flag{meant}; --help names them all")
        kind, values = flags[name].kind, [value] if equals else []
        if kind is bool:
            if equals and value.lower() not in ("true", "false"):
                refuse(name, value, "True or False")
            checked.append(flag if value.lower() != "false" else f"--no-{flag[2:]}")
            continue
        if get_origin(kind) is tuple:
            values += [words.pop(0) for word in takewhile(lambda w: w[:2] != "--", [*words])]
            if value.startswith("["):
                try:
                    values[:1] = map(str, ast.literal_eval(value))
                except (ValueError, SyntaxError, TypeError):
                    refuse(name, value, "no list, as in ['a', 'b']")
        elif not equals:
            if not words or is_flag(words[0], flags):
                sys.exit(f"{flag}: a value is missing")
            values.append(words.pop(0))
        for value in values:
            if reason := flags[name].refusal(value):
                refuse(name, "..." if name.endswith("url") else value, reason)  # it may hold a key
        if get_origin(kind) is tuple:
            lists.setdefault(flag, []).extend(values)
        else:
            checked.append(f"{flag}={value}")
    return checked + [word for flag, values in lists.items() for word in (flag, *values)]


def is_flag(word: str, flags: dict[str, Flag]) -> bool:
    """Whether a word of the command line is the name of a flag, or --no-flag of a boolean."""
    name = word.partition("=")[0].removeprefix("--").replace("-", "_")
    opposite = flags.get(name.removeprefix("no_"))
    return word.startswith("--") and (name in flags or (opposite and opposite.kind is bool))


def flags_of(args) -> dict:
    """All flags by their names, as JSON can say them; not what a dataclass has computed of them."""
    flags = {}
    for name, value in ((each.name, getattr(args, each.name)) for each in fields(args)):
        if is_dataclass(value):
            flags |= flags_of(value)
        else:
            value = list(value) if isinstance(value, tuple) else value
            flags[name] = "inf" if isinstance(value, float) and value == math.inf else value
    return flags


def refuse(name: str, value, reason: str) -> None:
    """Exit with one line that names the flag, what was given and why it cannot be."""
    sys.exit(f"--{name.replace('_', '-')} {shown(value)}: {shown(reason, 900)}")


def shown(value, most: int = 300) -> str:
    """A value as one line can show it: nothing of it reaches the terminal as control."""
    text = str(value) or '""'
    text = text if text.isprintable() else ascii(text)
    return text if len(text) <= most else f"{text[:most]}..."
