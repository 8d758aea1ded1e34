"""A sweep file: reading it, what is refused before the first run, and its rows.

What W&B takes and this runner does not do is refused by name, never left out in silence.
"""

import ast
import functools
import hashlib
import itertools
import json
import math
import os
import random
import re
import shlex
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import NamedTuple, get_origin

from runtime.flags import Text, check_words, kinds_of, shown
from runtime.saving.files import hash_file, hash_files, to_json

import yaml

ROOT = Path(__file__).resolve().parent.parent
COMMAND = ["${env}", "${interpreter}", "${program}", "${args}"]  # W&B's own
NEEDED = ("program", "method", "metric", "parameters")
TOP = (*NEEDED, "command", "run_cap", "early_terminate")
TOP = (*TOP, "name", "description", "project", "entity")  # these say something to a server alone
KINDS = {  # the distributions that are drawn here, and their keys
    "constant": {"value"},
    "categorical": {"values"},
    "categorical_w_probabilities": {"values", "probabilities"},
    "uniform": {"min", "max"},
    "int_uniform": {"min", "max"},
    "log_uniform_values": {"min", "max"},
}
PLACED = ("seed", "runs_dir", "run_name", "resume")  # flags that the runner gives to each run
LIGHT = {"envs", *sys.stdlib_module_names}  # what is imported to know a program's flags
MOST_ROWS = 10_000
MOST = 1e15  # of an end of what is drawn: their difference is finite, whole numbers are exact
TRIALS = 16  # rows of random and bayes where the file has no run_cap


def nearest(word: str, names) -> str:
    near = get_close_matches(word, [*names], 1)
    return f"; perhaps {near[0]}" if near else ""


class Loader(yaml.SafeLoader):
    """YAML as W&B reads it, but 1e-5 is a number, and a key that stands twice is an error."""

    def construct_mapping(self, node, deep=False):
        keys = [str(key.value) for key, _ in node.value]
        if twice := [key for key in keys if keys.count(key) > 1]:
            raise yaml.YAMLError(f"{twice[0]} stands twice, line {node.start_mark.line + 1}")
        return super().construct_mapping(node, deep)


NUMBER = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$")
Loader.add_implicit_resolver("tag:yaml.org,2002:float", NUMBER, [*"-+0123456789"])


def read_sweep(path: Path) -> dict:
    """The sweep file; exits with one line that names what cannot be."""
    try:
        sweep = yaml.load(path.read_bytes().decode(), Loader)
        json.dumps(sweep)
    except Exception as error:  # PyYAML has no class for what a tag like !!bool cannot read
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        if isinstance(error, UnicodeDecodeError):
            reason = "is no text in UTF-8"
        sys.exit(f"{path}: {shown(reason)}")
    for fault in faults(sweep):
        sys.exit(f"{path}: {shown(fault)}")
    if "goal" not in sweep["metric"]:
        told = f"no goal, so {sweep['metric']['name']} is minimized, as W&B does"
        print(f"{path}: metric: {told}; goal: maximize is the other one", file=sys.stderr)
        sweep["metric"]["goal"] = "minimize"
    if "early_terminate" in sweep and sweep["method"] != "bayes":
        told = "this runner has it for method bayes alone; no run is stopped early"
        print(f"{path}: early_terminate: {told}", file=sys.stderr)
    return sweep


def faults(sweep) -> Iterator[str]:
    """What this runner cannot do with a sweep, as "key: what is wrong; what would be right". Only
    the first one counts: what follows it takes for granted that it is not there."""
    if not isinstance(sweep, dict):
        yield f"has to be a mapping with the keys {', '.join(NEEDED)}"
    for key in sweep:
        if key not in TOP:
            near = nearest(str(key), TOP) or f"; it knows {', '.join(TOP)}"
            yield f"{key}: no key that this runner knows{near}"
    for key in NEEDED:
        if not sweep.get(key):
            yield f"{key}: is missing"
    method, program, metric = sweep["method"], sweep["program"], sweep["metric"]
    if method not in ("grid", "random", "bayes"):
        yield f"method {method}: grid, random or bayes"
    if not isinstance(program, str) or not os.path.isfile(ROOT / program):
        scripts = [path.name for path in ROOT.glob("*.py")]
        near = nearest(str(program), scripts)
        yield f"program {program}: no such script in {ROOT}, where a relative path begins{near}"

    name = metric.get("name") if isinstance(metric, dict) else None
    if not isinstance(name, str) or not name.strip():
        yield "metric: has no name; as in {name: eval/success, goal: maximize}"
    if reason := Text().refusal(name):
        yield f"metric: name {name[:40]!r}: {reason}"
    if unknown := [*metric.keys() - {"name", "goal"}]:
        yield f"metric: {unknown[0]}: this runner knows name and goal"
    if metric.get("goal", "minimize") not in ("minimize", "maximize"):
        yield f"metric: goal {metric['goal']}: minimize or maximize"
    cap = sweep.get("run_cap", 1)
    if type(cap) is not int or not 1 <= cap <= MOST_ROWS:
        yield f"run_cap {cap}: has to be a whole number from 1 to {MOST_ROWS:,}"

    yield from faults_of_command(sweep.get("command") or COMMAND, program)
    if "early_terminate" in sweep:
        early = sweep["early_terminate"]
        if not isinstance(early, dict) or early.get("type") != "hyperband":
            yield "early_terminate: has to be as {type: hyperband, min_iter: 3, eta: 2}"
        if unknown := [*early.keys() - {"type", "min_iter", "eta"}]:
            yield f"early_terminate: {unknown[0]}: this runner knows type, min_iter and eta"
        for key, value, least in ("min_iter", None, 1), ("eta", 3, 2):
            value = early.get(key, value)
            if type(value) is not int or value < least:
                yield f"early_terminate: {key} {value}: has to be a whole number from {least}"

    parameters = sweep["parameters"]
    if not isinstance(parameters, dict):
        yield "parameters: has to be a mapping, as in {alpha: {values: [0.1, 1.0]}}"
    names = [str(name).replace("-", "_") for name in parameters]
    for name, parameter in parameters.items():
        if not re.fullmatch(r"[A-Za-z_][\w-]*", str(name), re.ASCII) or not isinstance(name, str):
            yield f"parameters: {name}: has to be the name of a flag"
        if names.count(name.replace("-", "_")) > 1:
            yield f"{name}: the same flag stands twice, with - and with _"
        if name.replace("-", "_") in PLACED:
            yield f"{name}: {placed(name)}"
        yield from (f"{name}: {fault}" for fault in faults_of_parameter(parameter, method))
    rows = math.prod(len(p.get("values", "1")) for p in parameters.values())
    if method == "grid" and rows > MOST_ROWS and "run_cap" not in sweep:
        yield f"parameters: a grid of {rows:,} rows, {MOST_ROWS:,} are the most without run_cap"


def placed(name: str) -> str:
    instead = {"seed": "--seeds 1 2 3 are the seeds", "runs_dir": "--out DIRECTORY is the place"}
    return f"the runner gives it to each run; {instead.get(name, 'leave it out')}"


def faults_of_command(command, program: str) -> Iterator[str]:
    if not isinstance(command, list):
        yield f"command {command}: has to be a list, as in {COMMAND}"
    words = [*map(str, command)]
    for given, word in zip(command, words):
        if reason := not_one(given):
            yield f"command: {reason}"
        if "${" in word and word not in COMMAND:
            yield f"command: {word}: this runner knows {', '.join(COMMAND)}"
    if "${program}" not in words and program not in words:
        yield f"command {command}: has neither ${{program}} nor {program}"
    if "${args}" not in words:
        yield f"command {command}: has no ${{args}}, so no parameter would reach the program"
    if words.index("${args}") < words.index("${program}" if "${program}" in words else program):
        yield f"command {command}: ${{args}} has to follow the program, whose flags they are"
    if not words[0].startswith("$") and not shutil.which(words[0]):
        yield f"command: {words[0]}: no such program"


def not_one(value) -> str:
    """Why this cannot be a word of a command line, or nothing."""
    if value is None or isinstance(value, dict | list):
        return f"{value}: has to be one word or number"
    reason = Text().refusal(str(value))
    return f"{str(value)[:40]!r}: {reason}" if reason else ""


def faults_of_parameter(parameter, method: str) -> Iterator[str]:
    if not isinstance(parameter, dict):
        yield f"{parameter}: has to be as {{value: 1}}, {{values: [1, 2]}}, {{min: 0.1, max: 1.0}}"
    if "parameters" in parameter:
        yield "nested parameters: a flag has no parts; each one needs a name of its own"
    kind, keys = str(kind_of(parameter)), parameter.keys()
    if kind not in KINDS:
        near = nearest(kind, KINDS)
        yield f"distribution {kind}: this runner draws {', '.join(KINDS)}{near}"
    if extra := sorted(map(str, keys - KINDS[kind] - {"distribution"})):
        near = nearest(extra[0], {*map(str, keys), *set.union(*KINDS.values())} - {extra[0]})
        yield f"{extra[0]}: no key of {kind}, which has {' and '.join(sorted(KINDS[kind]))}{near}"
    if missing := sorted(KINDS[kind] - keys):
        yield f"has no {' and no '.join(missing)}, which {kind} needs"
    if method == "grid" and kind not in ("constant", "categorical"):
        yield f"a grid needs values, not {kind}; as in {{values: [0.1, 1.0]}}"

    if "values" in parameter:
        values, shares = parameter["values"], parameter.get("probabilities")
        if not isinstance(values, list) or not values:
            yield f"values {values}: has to be a list of at least one, as in [0.1, 1.0]"
        if "probabilities" in parameter:
            if method == "bayes":
                yield "probabilities: not with method bayes, which does not draw by them"
            right = isinstance(shares, list) and len(shares) == len(values)
            right = right and all(is_number(share) and share >= 0 for share in shares)
            if not right or abs(sum(shares) - 1) > 1e-3:
                yield f"probabilities {shares}: has to be {len(values)} numbers whose sum is 1"
    for value in ends_of(parameter) if "min" not in parameter else ():
        for part in value if isinstance(value, list) else [value]:
            if part is not None and (reason := not_one(part)):
                yield reason
    for end in ("min", "max") if "min" in parameter else ():
        if not is_number(parameter[end]) or abs(parameter[end]) > MOST:
            yield f"{end} {parameter[end]!r}: has to be a number within ±{MOST:g}, without quotes"
        if kind == "int_uniform" and type(parameter[end]) is not int:
            yield f"{end} {parameter[end]}: has to be whole for int_uniform; or write uniform"
        if kind == "log_uniform_values" and parameter[end] <= 0:
            yield f"{end} {parameter[end]}: has to be above 0 for log_uniform_values"
    if "min" in parameter and parameter["min"] >= parameter["max"]:
        yield f"min {parameter['min']}: has to be below max {parameter['max']}"


def is_number(value) -> bool:
    return type(value) in (int, float) and abs(value) <= sys.float_info.max


def kind_of(parameter: dict) -> str:
    """The parameter's distribution, which W&B takes from the other keys where it is not named."""
    kind = parameter.get("distribution")
    if "probabilities" in parameter and kind in (None, "categorical"):
        return "categorical_w_probabilities"
    if kind is not None:
        return kind
    if "value" in parameter or "values" in parameter:
        return "constant" if "value" in parameter else "categorical"
    whole = all(type(parameter.get(end)) is int for end in ("min", "max"))
    return "int_uniform" if whole else "uniform"


def check_flags(path: Path, sweep: dict, args) -> None:
    """Exit with one line where a flag is given twice, or where the program would refuse a flag or
    its value: before the first run, if the program has a class Args as the scripts have it."""
    parameters = {name.replace("-", "_"): p for name, p in sweep["parameters"].items()}
    fixed = [*map(str, sweep.get("command") or COMMAND)]  # what it gives to every run
    program = "${program}" if "${program}" in fixed else sweep["program"]
    fixed = [word for word in fixed[fixed.index(program) + 1 :] if word != "${args}"]
    given = [(f"{path}: command: ", word) for word in fixed] + [("", word) for word in args.more]
    for where, word in given:
        name = word.partition("=")[0].removeprefix("--").replace("-", "_").removeprefix("no_")
        if word.startswith("--") and name in PLACED:
            sys.exit(f"{where}{word}: {placed(name)}")
        if word.startswith("--") and name in parameters:
            sys.exit(f"{where}{word}: {path} has {name} as a parameter; only one of them can count")
    if not (flags := flags_of_program(ROOT / sweep["program"])):
        return
    words = [f"--{name}={value}" for name, p in sweep["parameters"].items() for value in ends_of(p)]
    try:
        check_words([*words, *fixed], flags)
    except SystemExit as refusal:
        sys.exit(f"{path}: {refusal}")
    check_words([*args.more, *(f"--seed={seed}" for seed in args.seeds)], flags)
    for name, parameter in parameters.items():
        kind = flags[name].kind
        for value in ends_of(parameter):
            many = isinstance(value, list) and get_origin(kind) is not tuple
            if value is None or many or (isinstance(value, bool) and kind is str):
                needs = "has to be one value, in quotes if it is text"
                sys.exit(f"{path}: {name}: {shown(value)}: {needs}")
        if kind_of(parameter) == "int_uniform" and kind is float:
            low, high = parameter["min"], parameter["max"]
            told = f"only whole numbers are drawn, as W&B does; write {low}.0 and {high}.0 for all"
            print(f"{path}: {name}: {told}", file=sys.stderr)


def ends_of(parameter: dict) -> list:
    """The parameter's values, or the ends of what is drawn, as they are drawn."""
    if "min" not in parameter:
        return parameter.get("values", [parameter.get("value")])
    kind = int if kind_of(parameter) == "int_uniform" else float
    return [kind(parameter["min"]), kind(parameter["max"])]


def flags_of_program(path: Path) -> dict | None:
    """The flags of the program's class Args, without the seconds in which it imports torch: only
    its dataclasses and what they are made of are executed. None where that is not enough."""
    module = sys.modules["program"] = ModuleType("program")  # where dataclasses look for names
    try:
        for node in ast.parse(path.read_bytes()).body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                name = getattr(node, "module", None) or node.names[0].name
                light = name == "runtime.flags" or name.split(".")[0] in LIGHT
            else:
                light = isinstance(node, ast.ClassDef) and node.decorator_list
            if light:
                exec(compile(ast.Module([node], []), str(path), "exec"), vars(module))
        return kinds_of(module.Args)
    except SyntaxError as error:
        sys.exit(f"{path}: line {error.lineno}: {error.msg}")
    except Exception:  # whatever a program does there: its first run says what is wrong
        return None
    finally:
        del sys.modules["program"]


class Draw:
    """Draws at random what optuna's trial proposes."""

    def __init__(self, rng: random.Random):
        self.rng = rng

    def suggest_categorical(self, name: str, choices: list, shares=None):
        return self.rng.choices(choices, shares)[0]

    def suggest_int(self, name: str, low: int, high: int) -> int:
        return self.rng.randint(low, high)

    def suggest_float(self, name: str, low: float, high: float, log: bool) -> float:
        if log:
            return math.exp(self.rng.uniform(math.log(low), math.log(high)))
        return self.rng.uniform(low, high)


def suggest(trial, name: str, parameter: dict):
    """The value of a parameter in a row that a trial proposes: optuna's, or Draw."""
    kind, low, high = kind_of(parameter), parameter.get("min"), parameter.get("max")
    if kind == "constant":
        return parameter["value"]
    if "values" in parameter:
        shares = [parameter["probabilities"]] if "probabilities" in parameter else []
        places = [*range(len(parameter["values"]))]
        return parameter["values"][trial.suggest_categorical(name, places, *shares)]
    if kind == "int_uniform":
        return trial.suggest_int(name, low, high)
    return trial.suggest_float(name, low, high, log=kind == "log_uniform_values")


def rows_of_sweep(sweep: dict, args) -> list[dict]:
    """The rows of a grid, of which the first parameter changes slowest, or those that are drawn at
    random; each once, where 1 and 1.0 are the same, as W&B has it."""
    parameters, most = sweep["parameters"], args.trials or sweep.get("run_cap")
    if sweep["method"] == "grid":
        values = [p["values"] if "values" in p else [p["value"]] for p in parameters.values()]
        rows = (dict(zip(parameters, row)) for row in itertools.product(*values))
    else:
        trial = Draw(random.Random(args.draw_seed))
        rows = [
            {name: suggest(trial, name, p) for name, p in parameters.items()}
            for _ in range(most or TRIALS)
        ]
    kept: dict[tuple, dict] = {}
    for row in rows:
        values = (int(v) if type(v) is float and v.is_integer() else v for v in row.values())
        kept.setdefault((*map(str, values),), row)
        if len(kept) == most:
            break
    return [*kept.values()]


def varied_in(sweep: dict) -> list[str]:
    """The names of the parameters that differ from row to row; of one row all."""
    varied = [
        name
        for name, parameter in sweep["parameters"].items()
        if "value" not in parameter and len(parameter.get("values", (1, 2))) > 1
    ]
    return varied or list(sweep["parameters"])


# ------------ rows as commands ------------


class Job(NamedTuple):
    """A row of parameters with one seed."""

    row: int
    config: dict
    seed: int
    name: str  # of its run
    words: list[str]  # the command, without what places the run

    @property
    def command(self) -> str:
        words = ["python" if word == sys.executable else word for word in self.words]
        return shlex.join(words[1:] if words[:2] == ["/usr/bin/env", "python"] else words)


def digest(*things) -> str:
    return hashlib.sha256(to_json(things).encode()).hexdigest()[:8]


def command_of(sweep: dict, config: dict) -> list[str]:
    """The command line that W&B's agent builds of a row."""
    words = {"${env}": ["/usr/bin/env"], "${interpreter}": [sys.executable]}
    words |= {"${program}": [sweep["program"]]}
    words |= {"${args}": [f"--{name}={value}" for name, value in config.items()]}
    parts = map(str, sweep.get("command") or COMMAND)
    return [word for part in parts for word in words.get(part, [part])]


def text_of(sweep: dict) -> str | None:
    """The hash of the program, of what it imports (imported_by), and of all files and directories
    that a flag names: in the command, among the parameters' values, after --
    (sweep["more"]), or as the default of --model."""
    program = (ROOT / sweep["program"]).resolve()  # Python imports from beside a link's target
    if not program.is_file():
        return None
    named = [value for each in sweep.get("parameters", {}).values() for value in ends_of(each)]
    with suppress(SystemExit):  # a program that was edited into none: its next run says so
        flags = flags_of_program(program) or {}
        named += [flags["model"].default] if "model" in flags else []
    words = map(str, (*(sweep.get("command") or ()), *sweep.get("more", ())))
    named += [word.partition("=")[2] or word for word in words]
    hashes = [files_of(ROOT / name) for name in named if name and isinstance(name, str)]
    return digest(*map(hash_file, imported_by(program)), *filter(None, hashes))


@functools.cache
def files_of(path: Path) -> str | None:
    """The hash of a file or of a directory's files; it is kept, as a model may have many GB and
    each job's end asks again. None where there is neither."""
    with suppress(OSError, ValueError):  # a value that is no path
        return hash_file(path) if path.is_file() else hash_files(path)


def imported_by(program: Path) -> list[Path]:
    """A program's file and those of its imports, and theirs, that lie beside it, in its folders, in
    this repository or in a directory of PYTHONPATH; a package that is imported by its own name
    counts as a whole. runtime/ does not decide what is learnt, nor do installed packages count."""
    found, left = set(), [program]
    own = filter(is_own, map(Path.absolute, map(Path, sys.path)))
    places = [*dict.fromkeys((program.parent, ROOT, *own))]
    while left:
        file = left.pop()
        inside = any(map(file.is_relative_to, places)) and ROOT / "runtime" not in file.parents
        if file in found or not inside or not file.is_file():
            continue
        found.add(file)
        left += file.parent.rglob("*.py") if file.name == "__init__.py" else []
        try:
            nodes = [*ast.walk(ast.parse(file.read_bytes()))]
        except (SyntaxError, ValueError):  # which the run will tell
            continue
        for node in nodes:
            if not isinstance(node, ast.Import | ast.ImportFrom):
                continue
            homes, names = places, [alias.name for alias in node.names]
            if isinstance(node, ast.ImportFrom):
                homes = [*file.parents][node.level - 1 :][:1] if node.level else places
                module = node.module or ""  # of `from . import rooms`
                names = [module, *(f"{module}.{name}" for name in names)]
            for path in (f"{home}/{name.replace('.', '/')}" for home in homes for name in names):
                left += [Path(f"{path}.py"), Path(path, "__init__.py")]
    return sorted(found)


def is_own(place: Path) -> bool:
    """Whether a directory in which Python looks for modules has no installed packages."""
    installed = {"site-packages", "dist-packages"} & {*place.parts}
    return not installed and not place.is_relative_to(sysconfig.get_path("stdlib"))


def job_of(sweep: dict, row: int, config: dict, seed: int, more: list[str]) -> Job:
    """A job, whose name depends on what is run alone: not on the order of the parameters, nor on
    the other rows."""
    config = dict(sorted(config.items()))
    words = [*command_of(sweep, config), *more]
    told = "-".join(f"{name}-{value:.3g}" if isinstance(value, float) else f"{name}-{value}"
                    for name, value in config.items())  # fmt: skip
    told = re.sub(r"[^\w.+-]", "_", told, flags=re.ASCII)[:60]
    job = Job(row, config, seed, "", words)
    name = f"{told}-{digest(job.command, sweep['text'])}-seed-{seed}"
    return job._replace(name=name)
