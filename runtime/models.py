"""Reading --model: what cannot be a policy is refused in a line that names the file and the fix."""

import json
from datetime import datetime
from pathlib import Path

from runtime.chat import Chat
from runtime.distributed import processes
from runtime.flags import refuse
from runtime.view import terminal
from runtime.view.terminal import first_line
from runtime.vision.pictures import BY_LENGTH, PictureProcessor, attention_by_length

import torch

AFTER_HEAD = "final_logit_softcapping", "logit_scale", "logits_scaling"  # of config.json


class ModelError(ValueError):
    """What is wrong with a model, in one line that names the file."""


def check_directory(path: Path) -> None:
    """Raise ModelError where files or headers cannot be those of a model; no weight is read."""
    for file in sorted(path.iterdir()):
        if file.suffix in (".json", ".safetensors", ".jinja", ".txt") and not file.is_file():
            raise ModelError(f"{file.name} is no file (a pipe, a directory or a broken link)")
    if (path / "adapter_config.json").exists() and not (path / "config.json").exists():
        raise ModelError("an adapter alone: merge it into its base model (peft's merge_and_unload)")
    for file in [*path.glob("*_config.json"), *path.glob("tokenizer.json")]:
        read_object(file)
    if read_object(path / "config.json").get("quantization_config"):
        raise ModelError("config.json: quantised weights do not train; take the model in bfloat16")
    check_headers(path)


def read_object(file: Path) -> dict:
    """The JSON object in a file, or ModelError."""
    try:
        found = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{file.name} is missing, cut off or no JSON") from error
    if not isinstance(found, dict):
        raise ModelError(f"{file.name} is no JSON object")
    return found


def check_headers(path: Path) -> None:
    """Raise ModelError where safetensors cannot be read, or have weights that do not train."""
    from safetensors import SafetensorError, safe_open

    for file in sorted(path.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():
                    dtype = (part := tensors.get_slice(name)).get_dtype()
                    if dtype not in ("F64", "F32", "F16", "BF16") and len(part.get_shape()) > 1:
                        raise ModelError(f"{file.name}: quantised weights do not train ({dtype})")
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{file.name} is no safetensors file ({error})") from error


def read_causal_model(path: str, kind: str = "AutoModelForCausalLM", **reading):
    """transformers' causal language model, by its class of this name, or ModelError."""
    import transformers

    transformers.logging.set_verbosity_error()  # its table of missing weights is a line of ours
    reading |= {"output_loading_info": True, "ignore_mismatched_sizes": True}
    try:
        model, found = getattr(transformers, kind).from_pretrained(path, **reading)
    except Exception as error:  # each part of it has its own
        raise ModelError(first_line(error)) from error
    if other := sorted(found["mismatched_keys"]):
        name, there, here = other[0]
        raise ModelError(f"the weight {name} has another shape, {tuple(there)}, than {tuple(here)}")
    if missing := sorted(found["missing_keys"]):
        named = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
        raise ModelError(f"{len(missing)} of its weights are missing in the safetensors: {named}")
    for name, tensor in model.named_parameters():
        if not tensor.isfinite().all():
            raise ModelError(f"the weight {name} has numbers that are not finite")
    if kind == "AutoModelForCausalLM":
        check_head(model)
    return model


def read_seeing_model(path: str, model: str, reading: dict):
    """A Qwen2.5-VL with what reads pictures for it, model.picture_processor."""
    from transformers import AttentionInterface

    causal = read_causal_model(path, "AutoModelForImageTextToText", **reading)
    causal.picture_processor = PictureProcessor(path, causal.config, model)
    AttentionInterface.register(BY_LENGTH, attention_by_length)
    causal.set_attn_implementation({"vision_config": BY_LENGTH})
    return causal


def check_head(model) -> None:
    """Raise ModelError where logits are not what the head makes of the last hidden states."""
    ids = torch.arange(3)[None] % model.get_input_embeddings().weight.shape[0]
    try:
        with torch.no_grad():
            logits = model(input_ids=ids, use_cache=False).logits
            hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
            ours = model.get_output_embeddings()(hidden)
    except Exception as error:  # each architecture has its own
        raise ModelError(f"it computes no logits ({first_line(error)})") from error
    if not torch.allclose(logits, ours, rtol=1e-2, atol=1e-3, equal_nan=True):
        config = model.config.get_text_config()
        found = [f"{name} {getattr(config, name)}" for name in AFTER_HEAD if hasattr(config, name)]
        named = ", ".join(found) or config.model_type
        raise ModelError(f"its logits are scaled or capped after its head ({named})")


def read_tokenizer(path: str, model, trust: bool):
    """The model's tokenizer, whose every token has a row in the embedding; or ModelError."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust)
        length = len(tokenizer)
    except Exception as error:
        raise ModelError(f"its tokenizer cannot be read ({first_line(error)})") from error
    rows = model.get_input_embeddings().weight.shape[0]
    if length > rows:
        raise ModelError(f"its tokenizer has {length} tokens, and its embedding {rows} rows")
    if not tokenizer.encode("a word", add_special_tokens=False):
        raise ModelError("its tokenizer knows no word: tokenizer.json is missing or empty")
    return tokenizer


def stop_ids_of(model, tokenizer) -> list[int]:
    """The tokens that end an answer, by the tokenizer and by generation_config.json."""
    ends = model.generation_config.eos_token_id
    ends = ends if isinstance(ends, list) else [ends]
    return sorted({end for end in (tokenizer.eos_token_id, *ends) if type(end) is int})


def read_chat(tokenizer, stop_ids: list[int], name: str, processor=None, run=None) -> Chat:
    """The layout of a conversation, in a run with its template_options; or ModelError. Where no
    token ends an answer, the template's mark does; a template with another end is told."""
    if not tokenizer.chat_template:
        raise ModelError("no chat template: add chat_template.jinja, or take an instruct model")
    try:
        chat = Chat(tokenizer, stop_ids, processor, template_options(run, tokenizer) if run else {})
    except Exception as error:  # a template is a program, and may do anything
        why = f"its chat template cannot be used ({first_line(error)}); edit a copy: it gets"
        raise ModelError(f"{why} user and assistant in turn, without a system message") from error
    if run:
        chat.drops_thoughts = run.args.run_args.drop_thoughts
        chat.most = run.args.max_context_tokens
    added = set(tokenizer.get_added_vocab().values())
    marks = [token for token in chat.between if token in added]
    mark = tokenizer.convert_ids_to_tokens(marks[0]) if marks else "no token"
    if not stop_ids:
        if not marks:
            raise ModelError("no end-of-text token (eos_token), and its chat template has no mark")
        chat.stop_ids = marks[:1]
        terminal.warn(f"--model {name} names no end-of-text token; its template's is {mark}")
    elif not {*stop_ids} & {*chat.between}:
        ends = " ".join(map(str, tokenizer.convert_ids_to_tokens(stop_ids)))
        there = f"its tokenizer ends an answer with {ends}, its chat template with {mark}"
        terminal.warn(f"--model {name}: {there}; answers may go on to --max-action-tokens")
    return chat


def template_options(run, tokenizer) -> dict:
    """What a run gives to the chat template: --chat-template-kwargs, and the day it began."""
    from transformers.utils.chat_template_utils import _get_template_variables

    given = run.args.run_args.chat_template_kwargs
    options = json.loads(given or "{}")
    read = _get_template_variables(tokenizer.get_chat_template())
    read -= {"messages", "add_generation_prompt"}  # which Chat gives
    if unread := [name for name in options if name not in read]:
        refuse("chat_template_kwargs", given, f"--model's chat template takes no {unread[0]}")
    if any(value in ("true", "false", "True", "False") for value in options.values()):
        refuse("chat_template_kwargs", given, "true and false stand without quotes")
    began = datetime.fromisoformat(processes.broadcast(run.starts and run.starts[0]["time"]))
    return {"strftime_now": began.strftime} | options
