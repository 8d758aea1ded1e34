"""What cannot work, refused before anything is loaded: in one line that names the flag."""

import os
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from runtime.flags import flags_of, refuse
from runtime.models import ModelError, check_directory
from runtime.view.terminal import warn
from runtime.worlds import check_world, opened

MOST_EPISODES = 1_000_000  # side by side
ROOT = Path(__file__).resolve().parent.parent


def check(args, env) -> tuple[str, Any, Any, list[int]]:
    """The directory (or hub name) of --model, its configuration, the world that evaluates and its
    panel; exits with one line that names the flag where arguments cannot work."""
    eval_env, run_args = check_world(env), args.run_args
    panel = panel_of(args, eval_env)
    if args.tasks_per_iteration > len(env.train_tasks):
        reason = f"{env.name} has {len(env.train_tasks)} training tasks"
        refuse("tasks_per_iteration", args.tasks_per_iteration, reason)
    of_iteration = args.tasks_per_iteration * args.group_size
    of_evaluation = run_args.eval_tasks * run_args.eval_samples
    for name, number in {"group_size": of_iteration, "eval_samples": of_evaluation}.items():
        if number > MOST_EPISODES:
            reason = f"{number:,} episodes at once, {MOST_EPISODES:,} are the most"
            refuse(name, flags_of(args)[name], reason)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30  # GiB
    if run_args.engine_memory > memory:
        refuse("engine_memory", run_args.engine_memory, f"this machine has {memory:.0f} GiB")
    if args.max_action_tokens >= args.max_context_tokens:
        reason = f"an answer alone fills --max-context-tokens {args.max_context_tokens}"
        refuse("max_action_tokens", args.max_action_tokens, reason)
    for url in run_args.engine_url:
        if reason := fault_of(url):
            refuse("engine_url", "...", reason)  # it may hold a key
    if run_args.engine_url and run_args.engine == "hf":
        refuse("engine", "hf", "the servers of --engine-url are vLLM's")
    if run_args.engine_url and getattr(env, "shows_pictures", False):
        refuse("engine_url", " ".join(run_args.engine_url), "pictures are not sent to servers")
    if run_args.engine == "vllm" and not run_args.engine_url and not find_spec("vllm"):
        refuse("engine", "vllm", "vllm is not installed; --engine hf needs nothing more")
    check_writable("runs_dir", run_args.runs_dir)
    return *check_model(args, eval_env, panel), eval_env, panel


def panel_of(args, env) -> list[int]:
    """The tasks that evaluate; exits with one line where the world has none, or too few."""
    given = args.run_args
    name = "eval_tasks" if given.eval_set == "panel" else "validation_tasks"
    if (tasks := getattr(env, name, None)) is None:
        refuse("eval_set", given.eval_set, f"{env.name} has no {name} (envs/README.md)")
    if given.eval_tasks > len(tasks):
        reason = f"the {given.eval_set} of {env.name} has {len(tasks)}"
        refuse("eval_tasks", given.eval_tasks, reason)
    return [*islice(tasks, given.eval_tasks)]  # not all sequences have slices


def fault_of(url: str) -> str:
    """What is wrong with the address of a server, or nothing."""
    try:
        parts = urlsplit(url)
        parts.hostname.encode("idna")
        usable = parts.scheme in ("http", "https") and parts.port != 0 and url.isprintable()
    except (ValueError, AttributeError):  # a port or an address that is none
        usable = False
    if not usable or {*" \\"} & {*url}:
        return "no http address, as http://localhost:8000"
    if {*"@?#"} & {*url} or parts.path.strip("/"):
        return "no user, password, path, query or fragment belongs in the address"
    return ""


def check_writable(flag: str, directory: str) -> None:
    trial = Path(directory, f".{os.getpid()}")
    try:
        trial.mkdir(parents=True)
        trial.rmdir()
    except OSError as error:
        refuse(flag, directory, f"cannot be written ({error.strerror})")


def check_model(args, env, panel: list[int]) -> tuple[str, Any]:
    """The directory or hub name of --model, whose files were looked at, and its configuration."""
    places = Path(args.model), ROOT / args.model
    path = next((str(place.resolve()) for place in places if place.is_dir()), args.model)
    trust = args.run_args.trust_remote_code
    check_files(Path(path), args.model)
    config = config_of(path, args.model, trust)
    if os.path.isdir(path) and not any(Path(path).glob("*.safetensors")):
        refuse("model", args.model, "no .safetensors file there, and pickles (.bin) are not read")
    if trust:
        warn(f"--trust-remote-code runs whatever program comes with {args.model}")
    if getattr(env, "shows_pictures", False):  # refused where it does not see one as it is
        from runtime.vision.pictures import PictureProcessor

        picture = opened(env, panel[0]).prompt.picture
        PictureProcessor(path, config, args.model).patches(picture)
    elif hasattr(config, "vision_config"):
        reason = "made for pictures, and this world shows none: see *_visual_sokoban.py"
        refuse("model", args.model, reason)
    longest = config.get_text_config().max_position_embeddings
    if args.max_context_tokens > longest:
        reason = f"--model {args.model} was made for {longest}"
        refuse("max_context_tokens", args.max_context_tokens, reason)
    width = config.get_text_config().hidden_size
    for name, rank in flags_of(args).items():
        if name.endswith("lora_rank") and rank > width:
            refuse(name, rank, f"--model {args.model} is {width} wide")
    return path, config


def check_files(path: Path, model: str) -> None:
    """Refuse a directory whose files cannot be a model's, before anything of them is read."""
    try:
        if path.is_dir():
            check_directory(path)
    except ModelError as error:
        refuse("model", model, str(error))


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
        reason = f"no model, in a directory or on the hub ({str(error).splitlines()[0]})"
        if "trust_remote_code" in str(error):
            reason = "it brings a program of its own, which only --trust-remote-code runs"
        refuse("model", model, reason)
