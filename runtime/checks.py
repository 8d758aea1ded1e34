"""What cannot work, refused before anything is loaded: in one line that names the flag."""

import os
import re
import sys
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

from runtime.flags import check_words, flags_of, kinds_of, refuse
from runtime.models import ModelError, check_directory
from runtime.worlds import OURS, asked, began, check_world, needed, opened, require

ADDRESS = re.compile(r"https?://([\w.-]{1,253}|\[[\da-f:.]+\])(:[1-9]\d{0,4})?/*", re.ASCII | re.I)
KINDS = {int: int, float: int | float, bool: bool, str: str | None, tuple[str, ...]: list}


def check(args, env) -> tuple[str, Any, Any, list[int]]:
    """The directory (or hub name) of --model, its configuration, the world that evaluates and its
    panel; exits with one line that names the flag where arguments cannot work."""
    flags, kinds = flags_of(args), kinds_of(type(args))
    for read, was in began.items():  # whatever from_args set
        OURS[read](was)
    run_args, script = args.run_args, Path(sys.argv[0])
    check_words([f"--{name}={value}" for name, value in flags.items()], kinds)  # the defaults
    for name, value in flags.items():  # as from_args and the defaults have made them
        if not isinstance(value, KINDS.get(kinds[name].kind, object)) and str(value) != "inf":
            refuse(name, repr(value), f"from_args, or a default, made it {type(value).__name__}")
    text = script.read_text(errors="replace") if script.is_file() else ""
    needed.update(name for name in ("anchor", "game_reward") if f".{name}" in text)
    if flags.get("step_reward", "ground-truth") != "ground-truth":
        needed.discard("game_reward")
    eval_env = check_world(env, args.tasks_per_iteration)
    panel = panel_of(args, eval_env)
    for world, task in ((env, env.train_tasks[0]), (eval_env, panel[0])):
        sides = asked(world, "sides_of", None, [task] * 2) if ".sides_of" in text else [task] * 2
        is_right = isinstance(sides, list) and sides.count(task) == 2
        require(is_right, world, f"sides_of([{task}, {task}])", sides, "a list that has both")
    if args.max_action_tokens >= args.max_context_tokens:
        reason = f"an answer alone fills --max-context-tokens {args.max_context_tokens}"
        refuse("max_action_tokens", args.max_action_tokens, reason)
    if not all(map(ADDRESS.fullmatch, run_args.engine_url)):  # the value may hold a key
        refuse("engine_url", "...", "no http address, as http://localhost:8000, without a path")
    if run_args.async_rollout and not run_args.engine_url:
        refuse("async_rollout", True, "it needs --engine-url, servers that sample meanwhile")
    if run_args.engine_url and run_args.engine == "hf":
        refuse("engine", "hf", "the servers of --engine-url are vLLM's")
    if run_args.engine_url and asked(env, "shows_pictures", False):
        refuse("engine_url", " ".join(run_args.engine_url), "pictures are not sent to servers")
    if run_args.engine == "vllm" and not run_args.engine_url and not find_spec("vllm"):
        refuse("engine", "vllm", "vllm is not installed; --engine hf needs nothing more")
    return *check_model(args, eval_env, panel), eval_env, panel


def panel_of(args, env) -> list[int]:
    """The tasks that evaluate; exits with one line where the world has none, or too few."""
    given = args.run_args
    name = "eval_tasks" if given.eval_set == "panel" else "validation_tasks"
    if (tasks := asked(env, name, None)) is None:
        refuse("eval_set", given.eval_set, f"{env.name} has no {name} (envs/README.md)")
    if given.eval_tasks > len(tasks):
        reason = f"the {given.eval_set} of {env.name} has {len(tasks)}"
        refuse("eval_tasks", given.eval_tasks, reason)
    return [*islice(tasks, given.eval_tasks)]  # not all sequences have slices


def check_model(args, env, panel: list[int]) -> tuple[str, Any]:
    """The directory or hub name of --model, whose files were looked at, and its configuration."""
    from huggingface_hub.utils.logging import set_verbosity_error
    from transformers import AutoConfig

    places = Path(args.model), Path(__file__).resolve().parent.parent / args.model
    path = next((str(place.resolve()) for place in places if place.is_dir()), args.model)
    trust = args.run_args.trust_remote_code
    check_files(Path(path), args.model)
    set_verbosity_error()  # without a network it would count its tries
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust)
        longest = config.get_text_config().max_position_embeddings  # a policy has one
    except Exception as error:  # hub, file system and configuration have no common class
        reason = f"no model, in a directory or on the hub ({str(error).splitlines()[0]})"
        if "trust_remote_code" in str(error):
            reason = "it brings a program of its own, which only --trust-remote-code runs"
        refuse("model", args.model, reason)
    if os.path.isdir(path) and not any(Path(path).glob("*.safetensors")):
        refuse("model", args.model, "no .safetensors file there, and pickles (.bin) are not read")
    if asked(env, "shows_pictures", False):  # refused where it does not see one as it is
        from runtime.vision.pictures import PictureProcessor

        PictureProcessor(path, config, args.model).patches(opened(env, panel[0]).prompt.picture)
    elif hasattr(config, "vision_config"):
        reason = "made for pictures, and this world shows none: see *_visual_sokoban.py"
        refuse("model", args.model, reason)
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
