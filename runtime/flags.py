"""The flags of a run, reading the command line, and refusing what cannot work."""

import math
import os
import sys
from dataclasses import dataclass, fields, is_dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import tyro

ROOT = Path(__file__).resolve().parent.parent
T = TypeVar("T")
Flat = Annotated[T, tyro.conf.arg(name="")]  # flags of a dataclass under their own names: --engine


@dataclass
class RunArgs:
    """Flags of a run: nothing of them changes what is learnt, but for --dtype's precision."""

    engine: Literal["auto", "vllm", "hf"] = "auto"
    """What samples: vllm, or hf (transformers; a seed repeats bit for bit); auto: vllm if there."""
    engine_memory: int = 2
    """Memory of the engine's cache of keys and values on a CPU [GiB]; a GPU gives it 40 %."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of engine, matrix products and frozen weights; the rest is float32."""
    micro_batch_tokens: int = 8192
    """Most tokens in one forward and backward pass: bounds the memory, changes no result."""
    eval_every: int = 10
    """Iterations from one evaluation to the next; the last iteration is always evaluated."""
    eval_only: bool = False
    """Evaluate --model on the panel and stop."""
    eval_tasks: int = 128
    """Size of the evaluation panel: always the first tasks of the world's fixed list."""
    eval_samples: int = 2
    """Episodes per task of the panel."""
    eval_temperature: float = 0.4
    """Sampling temperature in evaluation (paper: 0.4); 0 takes the likeliest token."""
    runs_dir: str = "runs"
    """Directory in which runs are kept."""
    run_name: str = ""
    """Directory of this run below --runs-dir; empty: script, seed and time."""
    resume: str = ""
    """Run to go on with (runs/NAME), its flags given again; auto: the one this command began."""
    override: tuple[str, ...] = ()
    """Flags that may differ from those of the run that goes on, as in: learning-rate seed."""
    save_every: int = 1
    """Iterations from one checkpoint to the next."""
    keep: int = 2
    """Checkpoints that are kept, the last ones; that of the best evaluation is kept too."""
    processes: int = 1
    """Processes that the launcher has started (docs/many-gpus.md); another number is refused."""
    trust_remote_code: bool = False
    """Run the program that comes with --model; without this flag such a model is refused."""
    track: bool = False
    """Log to Weights & Biases too (WANDB_MODE=offline works)."""


# ------------ the command line ------------


def parse(args_class: type[T], description: str) -> T:
    """The script's flags from the command line.

    Beside --flag and --no-flag a boolean may be written as W&B's sweeps do it, --flag=True or
    --flag=False; any other value of it is refused with the flag's name."""
    argv = [as_switch(word, booleans_of(args_class)) for word in sys.argv[1:]]
    return tyro.cli(args_class, args=argv, description=description)


def booleans_of(args_class) -> set[str]:
    """The names of its boolean flags, also of nested dataclasses, with underscores."""
    names = set()
    for each in fields(args_class):
        nested = getattr(each.type, "__origin__", each.type)
        if is_dataclass(nested):
            names |= booleans_of(nested)
        elif each.type is bool:
            names.add(each.name)
    return names


def as_switch(word: str, booleans: set[str]) -> str:
    """--flag=True as --flag, --flag=False as --no-flag; other words as they are."""
    name, equals, value = word.partition("=")
    name = name.removeprefix("--").replace("_", "-")
    if not word.startswith("--") or not equals or name.replace("-", "_") not in booleans:
        return word
    if value.lower() not in ("true", "false"):
        sys.exit(f"--{name} {value}: True or False")
    return f"--{name}" if value.lower() == "true" else f"--no-{name}"


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

LEAST = dict.fromkeys(
    "iterations tasks_per_iteration max_steps max_action_tokens max_context_tokens minibatches "
    "micro_batch_tokens eval_every eval_tasks eval_samples save_every keep engine_memory "
    "lr_halving prm_lora_rank prm_steps critic_lora_rank".split(),
    1,
)
LEAST |= dict.fromkeys(
    "history policy_lora_rank eval_temperature engine_correction learning_rate prm_learning_rate "
    "beta critic_learning_rate value_clip gamma gae_lambda step_gamma step_weight".split(),
    0,
)
LEAST["group_size"] = 2


def check(args, env) -> str:
    """The directory (or hub name) of --model; exits with one line that names the flag where
    arguments cannot work. Nothing is loaded but the model's configuration."""
    flags, run_args = flags_of(args), args.run_args
    for name, least in LEAST.items():
        if name in flags and float(flags[name]) < least:
            refuse(name, flags[name], f"has to be at least {least}")
    if args.temperature <= 0:
        reason = "training samples, so it is above 0; --eval-temperature may be 0 (greedy)"
        refuse("temperature", args.temperature, reason)
    if run_args.eval_tasks > len(env.eval_tasks):
        panel = f"the panel of {env.name} has {len(env.eval_tasks)}"
        refuse("eval_tasks", run_args.eval_tasks, panel)
    if args.tasks_per_iteration > len(env.train_tasks):
        reason = f"{env.name} has {len(env.train_tasks)} training tasks"
        refuse("tasks_per_iteration", args.tasks_per_iteration, reason)
    if run_args.engine == "vllm" and not find_spec("vllm"):
        refuse("engine", "vllm", "vllm is not installed; --engine hf needs nothing more")
    check_writable(run_args.runs_dir)
    return check_model(args, env)


def refuse(name: str, value, reason: str) -> None:
    """Exit with one line that names the flag, what was given and why it cannot be."""
    sys.exit(f"--{name.replace('_', '-')} {value}: {reason}")


def check_writable(runs_dir: str) -> None:
    trial = Path(runs_dir, f".{os.getpid()}")
    try:
        trial.mkdir(parents=True)
        trial.rmdir()
    except OSError as error:
        refuse("runs_dir", runs_dir, f"cannot be written ({error.strerror})")


def check_model(args, env) -> str:
    """The directory or hub name of --model, whose configuration and files were looked at."""
    places = Path(args.model), ROOT / args.model
    path = next((str(place.resolve()) for place in places if place.is_dir()), args.model)
    trust = args.run_args.trust_remote_code
    longest = positions_of(path, args.model, trust)

    if Path(path).is_dir():
        check_safetensors(Path(path), args.model)
    if trust:
        runs = f"runs whatever program comes with {args.model}"
        print(f"warning: --trust-remote-code {runs}", file=sys.stderr)
    check_sight(path, args, env)
    if args.max_context_tokens > longest:
        reason = f"--model {args.model} was made for {longest}"
        refuse("max_context_tokens", args.max_context_tokens, reason)
    return path


def positions_of(path: str, model: str, trust: bool) -> int:
    """The longest sequence that the model was made for, from its configuration."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust)
        return config.get_text_config().max_position_embeddings
    except Exception as error:  # hub, file system and configuration have no common class
        if "trust_remote_code" in str(error):
            reason = "it brings a program of its own, which only --trust-remote-code runs"
            refuse("model", model, reason)
        first = str(error).splitlines()[0]
        refuse("model", model, f"no model, in a directory or on the hub ({first})")


def check_sight(path: str, args, env) -> None:
    """Where the world shows pictures, refuse a model that does not see them, or not as they are;
    where it shows none, one that is made for them."""
    from runtime.pictures import PictureProcessor, shows_pictures

    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(path, trust_remote_code=args.run_args.trust_remote_code)
    if shows_pictures(env):
        picture = env.reset(env.eval_tasks[0]).picture
        PictureProcessor(path, config, args.model).patches(picture)
    elif hasattr(config, "vision_config"):
        reason = "made for pictures, and this world shows none: see *_visual_sokoban.py"
        refuse("model", args.model, reason)


def check_safetensors(path: Path, model: str) -> None:
    """Refuse a directory without readable safetensors."""
    from safetensors import SafetensorError, safe_open

    files = sorted(path.glob("*.safetensors"))
    if not files:
        refuse("model", model, "no .safetensors file there, and pickles (.bin) are not read")
    for file in files:
        try:
            safe_open(file, framework="pt").keys()
        except (SafetensorError, OSError) as error:
            refuse("model", model, f"{file.name} is no safetensors file ({error})")
