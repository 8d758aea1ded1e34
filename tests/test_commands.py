"""Every training command of README.md, docs/, envs/README.md, configs/ and the scripts' docstrings:
its flags are the script's, and by prediction it fits the cards that the text beside it names."""

import ast
import functools
import re
import shlex
import sys
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

from runtime.flags import parse
from runtime.memory import GIB, Setting, Shape, needed, setting_of

import pytest
from conftest import ROOT, TRAINERS, load
from test_launch import HOSTS, JOB, SAYS, shims, started

sys.path.insert(0, str(ROOT / "benchmarks"))

from benchmarks.memory import CARD, shape_named

PAGES = [ROOT / "README.md", ROOT / "envs/README.md", *sorted((ROOT / "docs").glob("*.md"))]
CONFIGS = sorted((ROOT / "configs").iterdir())
SCRIPTS = [ROOT / f"{name}.py" for name in (*TRAINERS, "warm_start")]
MODELS = {  # by --model
    f"Qwen/Qwen2.5-{size}-Instruct": shape_named(f"qwen-{size.lower()}")
    for size in ("0.5B", "1.5B", "7B", "VL-3B", "VL-7B")
}
TINY = Shape(64, 256, 3, 128, 64, 4096, True)  # at least what any model of models/ is
STARTS = r"(?:python[\d.]*|uv run|torchrun|accelerate launch|sbatch (?:-\S+ )*configs/slurm\.sh"
STARTS += r"|bash (?:\./)?configs/ray\.sh) "
COMMAND = re.compile(
    rf"{STARTS}(?:[^`\n#]*[ /])?(?:{'|'.join(p.stem for p in SCRIPTS)})\.py[^`\n]*"
)
CARDS = re.compile(r"(\w+) (?:cards?|GPUs?) of (\d+) GB")
NUMBERS = {"one": 1, "two": 2, "four": 4, "eight": 8}
MACHINE = 8 * GIB  # what a command that names no card may take, without one


class Command(NamedTuple):
    path: Path  # where it stands
    text: str
    words: list[str]
    beside: str  # its comment, or else on a page the paragraph before its block

    @property
    def cards(self) -> tuple[int, float] | None:
        """(how many cards, bytes of each) of those that the text names last."""
        named = CARDS.findall(self.beside)
        if not named:
            return None
        number, size = named[-1][0].lower(), int(named[-1][1])
        return NUMBERS.get(number) or int(number), size / 80 * CARD


def commands_of(path: Path) -> list[Command]:
    text = path.read_text()
    if path.suffix == ".py":
        text = ast.get_docstring(ast.parse(text)) or ""
    text = re.sub(r"\\\n[ #]*", "", text)
    if path.suffix == ".md":  # a command in a sentence may be broken
        text = re.sub(r"(?<!`)`[^`]+`", lambda found: found[0].replace("\n", " "), text)
    found = []
    for match in COMMAND.finditer(text):
        command, _, comment = match[0].partition(" #")
        words = [word for word in shlex.split(command) if word not in ("...", "COMMAND")]
        paragraph = text[: text.rfind("```", 0, match.start())].strip().rpartition("\n\n")[2]
        beside = paragraph if path.suffix == ".md" and not CARDS.search(comment) else comment
        found.append(Command(path, command, words, beside))
    return found


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """cluster(words) -> the words that a script of configs/ starts in each machine."""
    home = tmp_path_factory.mktemp("cluster")
    environment = shims(home, srun=SAYS, ray=SAYS, scontrol=HOSTS) | JOB

    def start(words):
        said = started(["bash", ROOT / words[1], *words[2:]], home, environment).splitlines()
        return shlex.split(said[-1]) if said[0] == "job" else said

    return start


def script_of(words) -> int:
    return next(place for place, word in enumerate(words) if ROOT / word in SCRIPTS)


@functools.cache
def args_of(*words: str):
    """A command's arguments, as the script reads them."""
    place = script_of(words)
    with patch.object(sys, "argv", [*words[place:]]):
        return parse(load(Path(words[place]).stem).Args, "")


def need_of(words: list[str]) -> tuple[str, int, float]:
    """(--model, processes, bytes of each) of a command, as the launcher and the script read it."""
    place = script_of(words)
    launcher = dict(zip(words[:place], words[1:place]))
    machines, each = (int(launcher.get(f"--{name}", 1)) for name in ("nnodes", "nproc_per_node"))
    processes, sharded = machines * each, "--config_file" in launcher
    copies = int(launcher.get("--parallelism_config_dp_replicate_size", 1))
    if sharded:
        assert launcher["--config_file"] == "configs/fsdp.yaml"
        processes = int(launcher.get("--num_processes", 2))  # the file's
    args = args_of(*words)
    if words[place] == "warm_start.py":
        setting = Setting(args.run_args.micro_batch_tokens, dtype=args.run_args.dtype)
    else:
        assert args.run_args.processes == processes
        setting = setting_of(args, processes // copies if sharded else 1)
    large = args.model in MODELS
    return args.model, processes, needed(MODELS[args.model] if large else TINY, setting, gpu=large)


def with_flags(commands: list[Command], cluster):
    """(command, its words as configs/ starts them) of those whose flags say what is trained."""
    for command in commands:
        words = cluster(command.words) if "configs/" in command.words[1] else command.words
        if "--help" not in words and (words[0] != "python" or len(words) > 2):
            yield command, words


def faults_of(commands: list[Command], cluster) -> list[str]:
    """What is wrong with commands: a large model needs cards named beside it, and fits them; what
    comes with the repository needs none."""
    found = []
    for command, words in with_flags(commands, cluster):
        model, processes, need = need_of(words)
        is_small = (ROOT / model).is_dir() or model.startswith("runs/") or "SmolLM2-135M" in model
        if model not in ("DIR", "seeing", *MODELS) and not is_small:  # docs/worlds.md makes it
            found.append(f"{command.text}: the size of {model} is not among MODELS")
            continue
        told = f"{command.text}: {need / GIB:.0f} GiB in each of {processes} processes"
        if not model.startswith(("Qwen/", "Hugging")):
            found += [told] if need > MACHINE else []
        elif not command.cards:
            found.append(f"{told}, no cards are named beside it")
        elif command.cards[0] != processes or need > command.cards[1]:
            found.append(f"{told}, {command.cards[0]} x {command.cards[1] / GIB:.0f} named")
    return found


ALL = [command for path in (*PAGES, *CONFIGS, *SCRIPTS) for command in commands_of(path)]
WHERE = dict.fromkeys(command.path for command in ALL)


@pytest.mark.parametrize("path", WHERE, ids=lambda path: path.name)
def test_a_command_fits_the_cards_that_its_text_names(path, cluster):
    assert faults_of([each for each in ALL if each.path == path], cluster) == []


def test_the_commands_are_found():
    """The large ones of every script that has one, and those of each page. That of istar_sotopia
    is in docs/worlds.md."""
    assert len(ALL) > 100 and {each.path.name for each in ALL} >= {"README.md", "install.md"}
    large = {each.path.stem for each in ALL if "--dtype bfloat16" in each.text}
    assert {*TRAINERS} - large == {"istar_webshop_ablations", "istar_sotopia"}
    assert sum("accelerate launch" in each.text for each in ALL) > 10
    words = {each.words[1] for each in ALL if each.words[0] in ("sbatch", "bash")}
    assert words == {"configs/slurm.sh", "configs/ray.sh"}


SAID = {
    "# one card of 80 GB": "",
    "# one card of 40 GB": "1 x 40 named",
    "# eight cards of 80 GB": "8 x 79 named",
    "# 3 cards of 80 GB": "3 x 79 named",
    "# on a GPU": "no cards are named",
}


@pytest.mark.parametrize("says", SAID)
def test_a_command_that_does_not_fit_is_told(says, tmp_path, cluster):
    command = "python rloo_webshop.py --model Qwen/Qwen2.5-1.5B-Instruct \\\n    --dtype bfloat16"
    (tmp_path / "page.md").write_text(f"```bash\n{command}  {says}\n```\n")
    found = faults_of(commands_of(tmp_path / "page.md"), cluster)
    assert len(found) == bool(SAID[says]) and SAID[says] in "".join(found)


@pytest.mark.parametrize("start", ["python3", "uv run", ".venv/bin/python3.11"])
@pytest.mark.parametrize("model", ["HuggingFaceTB/SmolLM2-1.7B-Instruct", "Qwen2.5-7B"])
def test_a_model_of_unknown_size_is_told(start, model, tmp_path, cluster):
    command = f"{start} rloo_webshop.py --model {model}  # one card of 24 GB"
    (tmp_path / "page.md").write_text(f"```bash\n{command}\n```\n")
    (found,) = faults_of(commands_of(tmp_path / "page.md"), cluster)
    assert f"the size of {model} is not among MODELS" in found


def test_a_policy_that_trains_whole_is_sharded_on_a_cluster(cluster):
    for start in (["sbatch", "configs/slurm.sh"], ["bash", "configs/ray.sh", "NAME"]):
        for flags, launcher in (
            ([], "accelerate"),
            (["--policy-lora-rank", "0"], "accelerate"),
            (["--policy-lora-rank", "64"], "torchrun"),
            (["--policy-lora-rank=64"], "torchrun"),
            (["--engine", "hf", "--alpha", "1"], "torchrun"),
            (["--engine=hf"], "torchrun"),
        ):
            words = cluster([*start, "istar_webshop.py", *flags])
            assert launcher in words[: script_of(words)], flags


def test_a_command_for_a_large_model_has_its_rates_and_its_room(cluster):
    """The defaults are the tiny models': learning rates of up to 1e-3 that fall, answers of 16."""
    seen = 0
    for command, words in with_flags(ALL, cluster):
        args = args_of(*words)
        if args.model not in MODELS or "warm_start.py" in words:
            continue
        rates = [rate for name, rate in vars(args).items() if name.endswith("learning_rate")]
        assert max(rates) <= 1e-4 and args.lr_halving == float("inf"), command.text
        assert args.max_action_tokens >= 256 and args.max_context_tokens >= 4096, command.text
        if any(word.startswith("istar_paper_") for word in words):
            assert args.prm_learning_rate == 2 * args.learning_rate, command.text
        seen += 1
    assert seen > 40
