"""The flags of a run, reading the command line, and refusing what cannot work."""

import ast
import math
import os
import re
import sys
from dataclasses import dataclass, fields, is_dataclass
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints
from urllib.parse import urlsplit

from runtime.models import ModelError, check_directory, read_object
from runtime.ranges import UNDECLARED, Count, Name, Natural, Range, Share, Text, ZeroOrMore
from runtime.view.terminal import warn

import tyro

ROOT = Path(__file__).resolve().parent.parent
T = TypeVar("T")
Flat = Annotated[T, tyro.conf.arg(name="")]  # flags of a dataclass under their own names: --engine


@dataclass
class RunArgs:
    """Flags of a run: nothing of them changes what is learnt, but for --dtype's precision."""

    engine: Literal["auto", "vllm", "hf"] = "auto"
    """What samples: vllm, or hf (transformers; a seed repeats bit for bit); auto: vllm if there."""
    engine_url: tuple[str, ...] = ()
    """Addresses of vLLM servers that sample instead: http://a:8000 http://b:8000."""
    engine_memory: Count = 2
    """Memory of the engine's cache of keys and values on a CPU [GiB]; see --engine-gpu-share."""
    engine_gpu_share: Share = 0.4
    """Share of a GPU's memory that the engine has, all in all; vLLM leaves it while it sleeps."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of engine, matrix products and frozen weights; the rest is float32."""
    micro_batch_tokens: Count = 8192
    """Most tokens in one forward and backward pass: bounds the memory, changes no result."""
    gradient_checkpointing: bool = False
    """Compute each layer again in the backward pass: less memory, by a third more time."""
    eval_every: Count = 10
    """Iterations from one evaluation to the next; the last iteration is always evaluated."""
    eval_only: bool = False
    """Evaluate --model on the panel and stop."""
    eval_set: Literal["panel", "validation"] = "panel"
    """Tasks that evaluate: the panel that is reported, or those on which rates are chosen."""
    eval_tasks: Count = 128
    """Size of the evaluation panel: always the first tasks of the world's fixed list."""
    eval_samples: Count = 2
    """Episodes per task of the panel."""
    eval_temperature: ZeroOrMore = 0.4
    """Sampling temperature in evaluation (paper: 0.4); 0 takes the likeliest token."""
    runs_dir: str = "runs"
    """Directory in which runs are kept."""
    run_name: Name = ""
    """Directory of this run below --runs-dir; empty: script, seed and time."""
    resume: str = ""
    """Run to go on with (runs/NAME), its flags given again; auto: the one this command began."""
    override: tuple[str, ...] = ()
    """Flags that may differ from those of the run that goes on, as in: learning-rate seed."""
    save_every: Natural = 0
    """Iterations from one checkpoint to the next; 0: so many that saving takes 5 % of the time."""
    keep: Count = 2
    """Checkpoints that are kept, the last ones; that of the best evaluation is kept too."""
    processes: Count = 1
    """Processes that the launcher has started (docs/many-gpus.md); another number is refused."""
    trust_remote_code: bool = False
    """Run the program that comes with --model; without this flag such a model is refused."""
    quiet: bool = False
    """Print warnings and errors alone."""
    track: bool = False
    """Log to Weights & Biases too (WANDB_MODE=offline works), as a sweep's agent always does."""


# ------------ the command line ------------


def parse(args_class: type[T], description: str) -> T:
    """The script's flags from the command line; exits with one line where a flag is unknown or its
    value is not what its type says (runtime/ranges.py).

    Beside --flag and --no-flag a boolean may be written as W&B's sweeps do it, --flag=True or
    --flag=False, and a list as --flag=['a', 'b']."""
    kinds = kinds_of(args_class)
    argv = [part for word in sys.argv[1:] for part in as_words(word, kinds)]
    if not {"-h", "--help"} & {*argv}:
        check_words(argv, kinds)
    return tyro.cli(args_class, args=argv, description=description)


def kinds_of(args_class) -> dict[str, tuple[Any, Any]]:
    """{name: (its type, its default)} of all flags, also those of nested dataclasses."""
    kinds, hints = {}, get_type_hints(args_class, include_extras=True)
    for each in fields(args_class):
        kind = hints[each.name]
        nested = getattr(kind, "__origin__", kind)
        if is_dataclass(nested):
            kinds |= kinds_of(nested)
        else:
            kinds[each.name] = kind, each.default
    return kinds


def as_words(word: str, kinds: dict) -> list[str]:
    """--flag=True as --flag, --flag=False as --no-flag, --flag=['a', 'b'] as --flag a b; another
    word as it is."""
    name, equals, value = word.partition("=")
    name = name.removeprefix("--").replace("-", "_")
    if not word.startswith("--") or not equals or name not in kinds:
        return [word]

    flag, kind = name.replace("_", "-"), kinds[name][0]
    if kind is bool:
        if value.lower() not in ("true", "false"):
            refuse(name, value, "True or False")
        return [f"--{flag}" if value.lower() == "true" else f"--no-{flag}"]

    if get_origin(kind) is tuple and value.startswith("["):
        try:
            values = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            refuse(name, value, "no list, as in ['a', 'b']")
        return [f"--{flag}", *map(str, values)]
    return [word]


def check_words(argv: list[str], kinds: dict) -> None:
    """Exit with one line where a word of the command line is no flag, or not what a flag needs.
    Words without a flag are taken where a field is tyro.conf.Positional."""
    takes_words = any(map(is_positional, kinds.values()))
    kinds = {name: kind for name, kind in kinds.items() if not is_positional(kind)}
    words = iter(enumerate(argv))
    for place, word in words:
        if takes_words and not word.startswith("-"):
            if reason := Text(may_be_empty=False).refusal(word):
                sys.exit(f"{shown(word)}: {reason}")
            continue
        flag, equals, value = word.partition("=")
        name = flag.removeprefix("--").replace("-", "_")
        if name.removeprefix("no_") in kinds and kinds[name.removeprefix("no_")][0] is bool:
            if not equals:
                continue
        if not word.startswith("--") or name not in kinds:
            near = get_close_matches(name, kinds, 1)
            meant = f"; perhaps --{near[0].replace('_', '-')}" if near else ""
            sys.exit(f"{shown(word)}: no such flag{meant}; --help names them all")

        kind, default = kinds[name]
        if get_origin(kind) is tuple:  # all words up to the next flag
            for word in argv[place + 1 :]:
                if word.startswith("--"):
                    break
                next(words)
            continue
        if not equals:
            value = next(words, (0, None))[1]
            if value is None or is_flag(value, kinds):
                sys.exit(f"{flag}: a value is missing")
        if reason := refusal(kind, default, value):
            refuse(name, "..." if name.endswith("url") else value, reason)  # it may hold a key


def is_positional(kind: tuple[Any, Any]) -> bool:
    """Whether a flag of kinds_of is words without a name."""
    return tyro.conf.Positional in getattr(kind[0], "__metadata__", ())


def is_flag(word: str, kinds: dict) -> bool:
    """Whether a word of the command line is the name of a flag."""
    name = word.partition("=")[0].removeprefix("--").replace("-", "_")
    return word.startswith("--") and (name in kinds or name.removeprefix("no_") in kinds)


def refusal(kind, default, value: str) -> str:
    """Why this value cannot be that of a flag of this type, or nothing."""
    if get_origin(kind) is Literal:
        choices = [str(choice) for choice in get_args(kind)]
        named = ", ".join(choice or '""' for choice in choices)
        return "" if value in choices else f"has to be one of {named}"
    found = [m for m in getattr(kind, "__metadata__", ()) if isinstance(m, Range | Text)]
    if not found and kind in UNDECLARED:
        found = [UNDECLARED[kind]]
    if not found and kind is str:  # only where it is empty by itself may it be empty
        found = [Text(may_be_empty=default == "")]
    return found[0].refusal(value) if found else ""


def flags_of(args) -> dict:
    """All flags by their names, as JSON can say them."""
    flags = {}
    for name, value in vars(args).items():
        if is_dataclass(value):
            flags |= flags_of(value)
        elif isinstance(value, tuple):
            flags[name] = list(value)
        elif isinstance(value, float) and not math.isfinite(value):
            flags[name] = str(value)
        else:
            flags[name] = value
    return flags


# ------------ what cannot work ------------

MOST_EPISODES = 1_000_000  # side by side


def check(args, env) -> tuple[str, Any]:
    """The directory (or hub name) of --model, and its configuration; exits with one line that names
    the flag where arguments cannot work. Nothing is loaded but the model's configuration."""
    run_args = args.run_args
    tasks = evaluation_tasks(env, run_args.eval_set)
    if run_args.eval_tasks > len(tasks):
        there = f"the {run_args.eval_set} of {env.name} has {len(tasks)}"
        refuse("eval_tasks", run_args.eval_tasks, there)
    if args.tasks_per_iteration > len(env.train_tasks):
        reason = f"{env.name} has {len(env.train_tasks)} training tasks"
        refuse("tasks_per_iteration", args.tasks_per_iteration, reason)
    episodes = {"group_size": args.tasks_per_iteration * args.group_size}
    episodes["eval_samples"] = run_args.eval_tasks * run_args.eval_samples
    for name, number in episodes.items():
        if number > MOST_EPISODES:
            value = flags_of(args)[name]
            refuse(name, value, f"{number:,} episodes at once, {MOST_EPISODES:,} are the most")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    if run_args.engine_memory > memory:
        reason = f"this machine has {memory:.0f} GiB of memory"
        refuse("engine_memory", run_args.engine_memory, reason)
    if args.max_action_tokens >= args.max_context_tokens:
        reason = f"an answer alone fills --max-context-tokens {args.max_context_tokens}"
        refuse("max_action_tokens", args.max_action_tokens, reason)
    check_servers(args, env)
    if run_args.engine == "vllm" and not run_args.engine_url and not find_spec("vllm"):
        refuse("engine", "vllm", "vllm is not installed; --engine hf needs nothing more")
    check_writable("runs_dir", run_args.runs_dir)
    return check_model(args, env)


def evaluation_tasks(env, eval_set: str):
    """The tasks of the world that evaluates, where --eval-set is this; exits where it has none."""
    world = getattr(env, "eval_env", env)
    if eval_set == "panel":
        return world.eval_tasks
    if not hasattr(world, "validation_tasks"):
        refuse("eval_set", eval_set, f"{env.name} has no validation_tasks (envs/README.md)")
    return world.validation_tasks


def refuse(name: str, value, reason: str) -> None:
    """Exit with one line that names the flag, what was given and why it cannot be."""
    sys.exit(f"--{name.replace('_', '-')} {shown(value)}: {shown(reason, 900)}")


def shown(value, most: int = 300) -> str:
    """A value as one line can show it: nothing of it reaches the terminal as control."""
    text = str(value) or '""'
    text = text if text.isprintable() else ascii(text)
    return text if len(text) <= most else f"{text[:most]}..."


def check_servers(args, env) -> None:
    """Refuse addresses of servers that are none, and what servers cannot do."""
    from runtime.vision.pictures import shows_pictures

    run_args = args.run_args
    for url in run_args.engine_url:
        if reason := check_address(url):
            refuse("engine_url", "...", reason)  # it may hold a key
    if run_args.engine_url and run_args.engine == "hf":
        refuse("engine", "hf", "the servers of --engine-url are vLLM's")
    if run_args.engine_url and shows_pictures(env):
        refuse("engine_url", " ".join(run_args.engine_url), "pictures are not sent to servers")


def check_address(url: str) -> str:
    """What is wrong with the address of a server, or nothing."""
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        parts.hostname.encode("idna")
    except (ValueError, AttributeError):  # a port or an address that is none
        usable = False
    if not usable or not url.isprintable() or re.search(r"[\s\\]", url):
        return "no http address, as http://localhost:8000"
    if set("@?#") & set(url) or parts.path.strip("/"):
        return "no user, password, path, query or fragment belongs in the address"
    return ""


def check_writable(flag: str, directory: str) -> None:
    trial = Path(directory, f".{os.getpid()}")
    try:
        trial.mkdir(parents=True)
        trial.rmdir()
    except OSError as error:
        refuse(flag, directory, f"cannot be written ({error.strerror})")


def check_model(args, env) -> tuple[str, Any]:
    """The directory or hub name of --model, whose files were looked at, and its configuration."""
    places = Path(args.model), ROOT / args.model
    path = next((str(place.resolve()) for place in places if place.is_dir()), args.model)
    trust = args.run_args.trust_remote_code
    check_files(Path(path), args.model)
    check_ranks(args, Path(path))
    config = config_of(path, args.model, trust)

    if Path(path).is_dir():
        check_safetensors(Path(path), args.model)
    if trust:
        runs = f"runs whatever program comes with {args.model}"
        warn(f"--trust-remote-code {runs}")
    check_sight(path, config, args, env)
    longest = config.get_text_config().max_position_embeddings
    if args.max_context_tokens > longest:
        reason = f"--model {args.model} was made for {longest}"
        refuse("max_context_tokens", args.max_context_tokens, reason)
    return path, config


def check_files(path: Path, model: str) -> None:
    """Refuse a directory whose files cannot be a model's, before anything of them is read."""
    if path.is_dir():
        try:
            check_directory(path)
        except ModelError as error:
            refuse("model", model, str(error))


def check_ranks(args, path: Path) -> None:
    """Refuse an adapter that is wider than the model itself."""
    if not (path / "config.json").is_file():
        return
    config = read_object(path / "config.json")
    width = (config.get("text_config") or config).get("hidden_size")
    for name, rank in flags_of(args).items():
        if name.endswith("lora_rank") and width and rank > width:
            refuse(name, rank, f"--model {args.model} is {width} wide")


def config_of(path: str, model: str, trust: bool):
    """The model's configuration, which says for how long sequences it was made; or a refusal."""
    from huggingface_hub.utils.logging import set_verbosity_error
    from transformers import AutoConfig

    set_verbosity_error()  # without a network it would count its tries
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust)
        config.get_text_config().max_position_embeddings  # noqa: B018 (a policy has one)
        return config
    except Exception as error:  # hub, file system and configuration have no common class
        if "trust_remote_code" in str(error):
            reason = "it brings a program of its own, which only --trust-remote-code runs"
            refuse("model", model, reason)
        first = str(error).splitlines()[0]
        refuse("model", model, f"no model, in a directory or on the hub ({first})")


def check_sight(path: str, config, args, env) -> None:
    """Where the world shows pictures, refuse a model that does not see them, or not as they are;
    where it shows none, one that is made for them."""
    from runtime.vision.pictures import PictureProcessor, shows_pictures

    if shows_pictures(env):
        picture = env.reset(env.eval_tasks[0]).picture
        PictureProcessor(path, config, args.model).patches(picture)
    elif hasattr(config, "vision_config"):
        reason = "made for pictures, and this world shows none: see *_visual_sokoban.py"
        refuse("model", args.model, reason)


def check_safetensors(path: Path, model: str) -> None:
    """Refuse a directory without safetensors."""
    if not any(path.glob("*.safetensors")):
        refuse("model", model, "no .safetensors file there, and pickles (.bin) are not read")
