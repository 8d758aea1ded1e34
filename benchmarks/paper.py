"""The tables of the paper, and ALFWorld, beside the commands to reproduce them on cards.

    python benchmarks/paper.py                   # what each command needs, into docs/paper.md
    python benchmarks/paper.py --dry-run         # plays a little of each command first; minutes
    python benchmarks/paper.py --dry-run --only istar-webshop

A command of docs/paper.md is a script with the variables FLAGS, which the page sets before its
table. Its need is predicted by runtime/memory.py, its hours of cards by the passes that
benchmarks/evidence.py counts and the lengths of ASSUMED. A dry run plays the command's own flags,
but for those of SMALL, with random weights of the model's architecture on this machine: one whole
iteration and an evaluation before and after it, in one process, with the transformers engine, on
the worlds that come with the repository. Those that passed are kept in
benchmarks/results/paper.jsonl.
"""

import argparse
import contextlib
import io
import json
import re
import shlex
import shutil
import string
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

from memory import GIB, RATE, shape_named
from throughput import ROOT, load_script

sys.path.insert(0, str(ROOT))

from benchmarks.evidence import PASSES, table, world_and_algorithm
from runtime.memory import Shape, needed, setting_of
from runtime.saving.files import replace_file, rows_of

PAGE = ROOT / "docs" / "paper.md"
PASSED = ROOT / "benchmarks" / "results" / "paper.jsonl"
CARDS, LONGEST = 8, 32768  # tokens of a context that the models take
LLAMA = Shape(4096, 14336, 32, 4096, 1024, 128256, False)  # Llama 3.1 8B
MODELS = {  # --model: its shape
    "Qwen/Qwen2.5-1.5B-Instruct": shape_named("qwen-1.5b"),
    "Qwen/Qwen2.5-7B-Instruct": shape_named("qwen-7b"),
    "Qwen/Qwen2.5-VL-7B-Instruct": shape_named("qwen-vl-7b"),
    "meta-llama/Llama-3.1-8B-Instruct": LLAMA,
}
FLAGS = {  # the variables that the page sets
    "CARDS": f"--processes {CARDS} --dtype bfloat16 --gradient-checkpointing --history 2 "
    "--iterations 200 --learning-rate 5e-7 --lr-halving inf",
    "ABLATED": "--as-published skill length credit preference average --prm-lora-rank 0 "
    "--prm-replay 0 --prm-steps 1 --prm-ridge 0 --beta 0.05 --prm-learning-rate 1e-6",
    "SHOP": "--model Qwen/Qwen2.5-7B-Instruct --webshop-data hub --tasks-per-iteration 16 "
    "--max-action-tokens 512 --max-context-tokens 8192",
    "ROOMS": "--model Qwen/Qwen2.5-VL-7B-Instruct --cell-pixels 28 --tasks-per-iteration 32 "
    "--max-action-tokens 256 --max-context-tokens 4096",
    "TALKS": "--sotopia-data DIR --partner self --judge-url https://HOST/v1 --judge-model NAME "
    "--eval-partner-url https://OTHER/v1 --eval-partner-model gpt-4o --tasks-per-iteration 16 "
    "--max-steps 10 --max-action-tokens 512 --max-context-tokens 8192",
    "HOMES": "--alfworld-data DIR --max-steps 50 --show all --anchor text --inadmissible valid "
    "--tasks-per-iteration 16 --eval-tasks 140 --iterations 150 --learning-rate 1e-6 "
    "--invalid-penalty 0.1 --max-action-tokens 512 --max-context-tokens 4096",
}
QWEN, OTHER = "--model Qwen/Qwen2.5-7B-Instruct", "--model meta-llama/Llama-3.1-8B-Instruct"
SMALLER = "--model Qwen/Qwen2.5-1.5B-Instruct"
RATE_OF_PRM = "--prm-learning-rate 1e-6"
# What is not at hand where this is played, and has a value; then what is smaller.
ELSEWHERE = """webshop-data sotopia-data alfworld-data judge-url judge-model eval-partner-url
eval-partner-model cell-pixels"""  # the tiny model's patches have another size
SMALL = """--processes 1 --engine hf --iterations 1 --tasks-per-iteration 1 --group-size 4
--max-steps 2 --max-action-tokens 8 --eval-tasks 1 --eval-samples 1 --save-every 1"""
# (steps of an episode, tokens of its first message, of an observation, of an answer): assumed
ASSUMED = {
    "webshop": (7, 300, 400, 150),
    "visual_sokoban": (10, 200, 60, 150),
    "sotopia": (10, 500, 0, 80),
    "alfworld": (25, 407, 207, 150),  # benchmarks/shown_commands.py for --show all
}


class Row(NamedTuple):
    """A line of the paper's tables."""

    name: str
    printed: str  # what the paper has; empty: not in the text that was at hand
    command: str  # with the page's variables


TABLES = {  # success and score in percent, goals of 10; plus and minus as printed
    "WebShop: success, score": [
        Row("ppo-webshop", "", "ppo_webshop.py $CARDS $SHOP --critic-learning-rate 1e-5"),
        Row("grpo-webshop", "", "grpo_webshop.py $CARDS $SHOP"),
        Row("reinforce_pp-webshop", "", "reinforce_pp_webshop.py $CARDS $SHOP"),
        Row("rloo-webshop", "77.4 ± 1.1, 87.6 ± 4.7", "rloo_webshop.py $CARDS $SHOP"),
        Row(
            "prime-webshop",
            "81.5 ± 1.8, 91.3 ± 0.6",
            f"prime_webshop.py $CARDS $SHOP {RATE_OF_PRM}",
        ),
        Row("gigpo-webshop", "84.1 ± 3.9, 91.2 ± 1.5", "gigpo_webshop.py $CARDS $SHOP"),
        Row(
            "istar-webshop",
            "86.5 ± 2.8, 93.6 ± 1.0",
            f"istar_paper_webshop.py $CARDS $SHOP {RATE_OF_PRM}",
        ),
    ],
    "WebShop, ablations: success, score": [
        Row(
            "no-step-reward",
            "76.6, 84.2",
            "istar_webshop_ablations.py $CARDS $SHOP --alpha 0",
        ),
        Row(
            "merged-rewards",
            "81.3, 90.7",
            "istar_webshop_ablations.py $CARDS $SHOP $ABLATED --step-reward merged",
        ),
        Row(
            "token-rewards",
            "82.0, 90.0",
            "istar_webshop_ablations.py $CARDS $SHOP $ABLATED --step-reward token --ratio token",
        ),
    ],
    "VisualSokoban: success": [
        Row("grpo-rooms", "", "grpo_visual_sokoban.py $CARDS $ROOMS"),
        Row("reinforce_pp-rooms", "", "reinforce_pp_visual_sokoban.py $CARDS $ROOMS"),
        Row("rloo-rooms", "86.3 ± 0.6", "rloo_visual_sokoban.py $CARDS $ROOMS"),
        Row("gigpo-rooms", "85.9 ± 2.6", "gigpo_visual_sokoban.py $CARDS $ROOMS"),
        Row(
            "istar-rooms",
            "91.7 ± 1.2",
            f"istar_paper_visual_sokoban.py $CARDS $ROOMS {RATE_OF_PRM}",
        ),
    ],
    "SOTOPIA: goal score on hard and on all scenarios, in self-play; then with GPT-4o": [
        Row("grpo-qwen", "6.97, 8.31; 6.42, 7.84", f"grpo_sotopia.py $CARDS $TALKS {QWEN}"),
        Row(
            "istar-qwen",
            "7.11, 8.42; 6.76, 8.36",
            f"istar_paper_sotopia.py $CARDS $TALKS {QWEN} {RATE_OF_PRM}",
        ),
        Row("grpo-llama", "7.92, 9.12; 6.68, 8.14", f"grpo_sotopia.py $CARDS $TALKS {OTHER}"),
        Row(
            "istar-llama",
            "8.06, 9.20; 7.16, 8.45",
            f"istar_paper_sotopia.py $CARDS $TALKS {OTHER} {RATE_OF_PRM}",
        ),
    ],
    "ALFWorld, which is not in the paper: success, from GiGPO's paper": [
        Row("grpo-homes-1.5b", "72.8", f"grpo_alfworld.py $CARDS $HOMES {SMALLER}"),
        Row("gigpo-homes-1.5b", "86.7", f"gigpo_alfworld.py $CARDS $HOMES {SMALLER}"),
        Row(
            "istar-homes-1.5b",
            "",
            f"istar_paper_alfworld.py $CARDS $HOMES {SMALLER} --alpha 1 --prm-learning-rate 2e-6",
        ),
        Row("grpo-homes-7b", "77.6", f"grpo_alfworld.py $CARDS $HOMES {QWEN}"),
        Row("gigpo-homes-7b", "90.8", f"gigpo_alfworld.py $CARDS $HOMES {QWEN}"),
        Row(
            "istar-homes-7b",
            "",
            f"istar_paper_alfworld.py $CARDS $HOMES {QWEN} --alpha 1 --prm-learning-rate 2e-6",
        ),
    ],
}


def words_of(row: Row) -> tuple[str, list[str]]:
    """(script, flags) of a row's command, its variables replaced."""
    script, *flags = shlex.split(string.Template(row.command).substitute(FLAGS))
    return script.removesuffix(".py"), flags


def arguments(script: str, flags: list[str]):
    """The script's Args, as it reads these flags."""
    from runtime.flags import parse

    with patch.object(sys, "argv", [script, *flags]):
        return parse(load_script(script).Args, "")


# ------------ what it needs ------------


def gigabytes(row: Row) -> float:
    """What each of CARDS cards has to have, by prediction [GiB]."""
    script, flags = words_of(row)
    args = arguments(script, flags)
    setting, shape = setting_of(args, CARDS), MODELS[args.model]
    return needed(shape, setting, gpu=True) / GIB


def card_hours(row: Row) -> float:
    """Hours of one card that sustains memory.RATE: training as evidence.py counts its passes, and a
    rollout that takes as long again. With --history 2 a step is a sequence of its own: the first
    message, two turns, what it sees and its answer."""
    script, flags = words_of(row)
    args = arguments(script, flags)
    world, algorithm = world_and_algorithm(f"{script}.py".replace("_ablations", ""))
    steps, first, seen, answer = ASSUMED[world]
    episodes = args.tasks_per_iteration * args.group_size
    turns = (min(step, args.history) + 1 for step in range(steps))
    tokens = episodes * sum(first + n * (seen + answer) for n in turns)
    passes = PASSES | {"istar_paper": (3, 2)}  # it learns from the episodes that it has scored
    without, trained = passes.get(algorithm, (2, 1))
    operations = (2 * without + 6 * trained) * MODELS[args.model].dense * tokens
    return 2 * operations * args.iterations / RATE / 3600


# ------------ dry runs ------------


def random_policy(kind: str, world: str, to: Path) -> None:
    """A small model of the architecture of --model `kind`, with random weights and the tokenizer of
    the world's tiny model."""
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import (
        AutoTokenizer,
        LlamaConfig,
        LlamaForCausalLM,
        Qwen2Config,
        Qwen2ForCausalLM,
    )
    from transformers.utils import logging

    logging.disable_progress_bar()
    tiny = ROOT / "models" / f"tiny-{world.replace('_', '-')}"
    torch.manual_seed(0)
    shutil.copytree(tiny, to)
    if "VL" in kind:  # the tiny model is of that architecture: its weights are drawn anew
        weights = load_file(to / "model.safetensors")
        drawn = {n: torch.randn_like(w) * 0.02 if w.dim() > 1 else w for n, w in weights.items()}
        save_file(drawn, to / "model.safetensors", {"format": "pt"})
        config = json.loads((to / "config.json").read_text())
        config["text_config"]["max_position_embeddings"] = LONGEST
        (to / "config.json").write_text(json.dumps(config))
        return
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    sizes = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2)
    sizes |= dict(num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False)
    sizes |= dict(vocab_size=len(tokenizer), max_position_embeddings=LONGEST)
    sizes |= dict(eos_token_id=tokenizer.eos_token_id, bos_token_id=None)
    llama = "Llama" in kind
    model = LlamaForCausalLM(LlamaConfig(**sizes)) if llama else None
    model = model or Qwen2ForCausalLM(Qwen2Config(**sizes))
    model.save_pretrained(to)


def dry_run(row: Row, home: Path) -> dict:
    """Play a little of a row's command; what it did. Whatever goes wrong is raised."""
    script, flags = words_of(row)
    args = arguments(script, flags)
    world, _ = world_and_algorithm(f"{script}.py".replace("_ablations", ""))
    kept = list(flags)
    for name in ELSEWHERE.split():
        if f"--{name}" in kept:
            place = kept.index(f"--{name}")
            del kept[place : place + 2]
    model = home / f"{row.name}-model"
    random_policy(args.model, world, model)
    small = [*SMALL.split(), "--model", str(model), "--runs-dir", str(home)]
    argv = [f"{script}.py", *kept, *small, "--run-name", row.name, "--quiet"]

    began = time.perf_counter()
    with patch.object(sys, "argv", argv), contextlib.redirect_stdout(io.StringIO()):
        load_script(script).main()
    rows = rows_of(home / row.name / "metrics.jsonl")
    assert [each["iteration"] for each in rows] == [0, 1], rows
    tokens = rows[1]["tokens/rollout"]
    return {"name": row.name, "seconds": round(time.perf_counter() - began, 1), "tokens": tokens}


def dry_runs() -> list[dict]:
    """What is kept of those that passed."""
    lines = PASSED.read_text().splitlines() if PASSED.exists() else []
    return [json.loads(line) for line in lines]


# ------------ the page ------------


def variables() -> str:
    """The page's shell variables."""
    lines = []
    for name, flags in FLAGS.items():
        words, line = flags.split(), f'{name}="'
        for word in words:
            if len(line) + len(word) > 92:
                lines.append(f"{line.rstrip()} \\")
                line = "    "
            line += f"{word} "
        lines.append(f'{line.rstrip()}"')
    return "```bash\n" + "\n".join(lines) + "\n```\n"


def tables(passed: set[str]) -> str:
    """The paper's tables, each with its commands, their needs, and whether a dry run passed."""
    parts = []
    for title, rows in TABLES.items():
        lines = []
        for row in rows:
            played = "yes" if row.name in passed else "no"
            need = f"{gigabytes(row):.0f}"
            cells = [f"`{row.command}`", row.printed or "–", need, f"{card_hours(row):,.0f}"]
            lines.append([*cells, played])
        titles = ["command", "paper", "GiB per GPU", "GPU hours", "dry run"]
        parts.append(f"### {title}\n\n{table(titles, lines)}\n")
    return "\n".join(parts)


def page(text: str, passed: set[str]) -> str:
    """docs/paper.md with its variables and tables written anew."""
    for name, made in (("variables", variables()), ("tables", tables(passed))):
        marked = re.compile(rf"(<!-- paper: {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        assert marked.search(text), f"{PAGE}: no section <!-- paper: {name} -->"
        text = marked.sub(lambda found, made=made: f"{found[1]}{made}{found[2]}", text)
    return text


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--dry-run", action="store_true", help="Play a little of each command.")
    parser.add_argument("--only", nargs="+", default=[], help="Names of rows that are played.")
    options = parser.parse_args()
    rows = [row for group in TABLES.values() for row in group]
    if unknown := {*options.only} - {row.name for row in rows}:
        parser.error(f"--only: no row {', '.join(sorted(unknown))}")

    passed = {each["name"]: each for each in dry_runs()}
    if options.dry_run:
        for row in rows:
            if options.only and row.name not in options.only:
                continue
            passed.pop(row.name, None)
            with tempfile.TemporaryDirectory() as home:
                passed[row.name] = dry_run(row, Path(home))
            print(json.dumps(passed[row.name]), flush=True)
            replace_file(PASSED, "".join(json.dumps(each) + "\n" for each in passed.values()))
    replace_file(PAGE, page(PAGE.read_text(), {*passed}))


if __name__ == "__main__":
    main()
