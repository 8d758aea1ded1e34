"""What people write into a sweep file, and what the runner says of it: one table.

A case is a text or the changes of a file that runs, words of the command line, and what is
expected: the pieces of the line that is printed (the file or the flag, the key, what is wrong or
what would be right), or of what goes on the flags that the runs got.
"""

import json
from types import SimpleNamespace

from sweeps import run as runner

import pytest
from test_sweeps import execute, results_of, starts_of, sweep, table_of  # noqa: F401

GOOD = {"alpha": {"values": [1, 2]}}
ISTAR = {"program": "istar_sokoban.py"}  # a script, whose flags are known


def runner_arguments(**args):
    return SimpleNamespace(**args)


def drawn(**parameter):
    return {"method": "random", "run_cap": 3, "parameters": {"alpha": parameter}}


def of(**parameters):
    return {"parameters": parameters}


UNIFORM = {"distribution": "uniform", "min": 0.1, "max": 1.0}
HYPERBAND = {"type": "hyperband", "min_iter": 1, "eta": 2}

# changes of a file that runs, or its text -> what is said; nothing is started, the status is 1
REFUSED = {
    "empty": ("", "has to be a mapping with the keys program, method, metric, parameters"),
    "a comment alone": ("# alpha\n", "has to be a mapping with the keys program"),
    "a list": ("- program: a.py\n", "has to be a mapping with the keys program"),
    "a word": ("istar_webshop.py", "has to be a mapping with the keys program"),
    "not UTF-8": (b"program: \xff\xfe.py\n", "is no text in UTF-8"),
    "no YAML": ("program: [a.py\nmethod: grid\n", "line 2, column 7"),
    "a tab": ("program:\n\tmethod: grid\n", "cannot start any token", "line 2"),
    "two documents": ("a: 1\n---\nb: 2\n", "expected a single document"),
    "an object of Python": ("!!python/object:os.system {}", "could not determine a constructor"),
    "a key twice": ("method: grid\nmethod: random\n", "method stands twice", "line 1"),
    "brackets without end": ("[" * 1500, "recursion"),
    "itself": ("&a [*a]", "Circular reference"),
    "a boolean that is none": ("!!bool maybe", "maybe"),
    "a date that is none": ("!!timestamp abc", ""),
    "a date": ("program: a.py\nname: 2024-01-01\n", "date is not JSON serializable"),
    "a key that nobody knows": ({"paramters": 1}, "paramters: no key", "perhaps parameters"),
    "a key of a server": ({"scheduler": {"engine": "optuna"}}, "scheduler: no key", "run_cap"),
    "no program": ({"program": None}, "program: is missing"),
    "a program of 5,000 characters": ({"program": "a" * 5000}, "program aaa"),
    "a program that is not there": ({"program": "istar_webshp.py"}, "perhaps istar_webshop.py"),
    "a program beside the file": (
        {"program": "program.py"},
        "program program.py: no such script in ",
        ", where a relative path begins",
    ),
    "a directory as program": ({"program": "envs"}, "program envs: no such script"),
    "a number as program": ({"program": 3}, "program 3: no such script"),
    "no method": ({"method": None}, "method: is missing"),
    "another method": ({"method": "hyperopt"}, "method hyperopt: grid, random or bayes"),
    "a list as method": ({"method": ["grid"]}, "method ['grid']: grid, random or bayes"),
    "no metric": ({"metric": None}, "metric: is missing"),
    "a word as metric": ({"metric": "eval/success"}, "metric: has no name", "goal: maximize}"),
    "a metric without a name": ({"metric": {"goal": "maximize"}}, "metric: has no name"),
    "an empty name": ({"metric": {"name": " "}}, "metric: has no name"),
    "a name of two lines": ({"metric": {"name": "a\nb"}}, "metric: name 'a\\nb': has characters"),
    "a long name": ({"metric": {"name": "a" * 5000}}, "metric: name 'aaa", "has 5,000 bytes"),
    "another goal": ({"metric": {"name": "a", "goal": "up"}}, "goal up: minimize or maximize"),
    "a target": ({"metric": {"name": "a", "target": 0.9}}, "metric: target: this runner knows"),
    "run_cap 0": ({"run_cap": 0}, "run_cap 0: has to be a whole number from 1"),
    "run_cap 10**12": ({"run_cap": 10**12}, "run_cap 1000000000000: has", "to 10,000"),
    "a word as run_cap": ({"run_cap": "ten"}, "run_cap ten: has to be a whole number from 1"),
    "a command as text": ({"command": "python a.py"}, "command python a.py: has to be a list"),
    "flags before the program": (
        {"command": ["python", "${args}", "${program}"]},
        "${args} has to follow the program",
    ),
    "null in the command": ({"command": ["python", None, "${program}", "${args}"]}, "None: has to"),
    "a mapping in it": (
        {"command": ["python", "${program}", "${args}", {"a": 1}]},
        "{'a': 1}: has",
    ),
    "NUL in it": (
        {"command": ["python", "${program}", "a\0", "${args}"]},
        "'a\\x00': has characters",
    ),
    "a macro": ({"command": ["python", "${program}", "${args_json}"]}, "${args_json}", "${args}"),
    "a command without flags": ({"command": ["python3", "${program}"]}, "has no ${args}"),
    "another script in it": ({"command": ["python", "b.py", "${args}"]}, "has neither ${program}"),
    "no such interpreter": (
        {"command": ["pyhton", "${program}", "${args}"]},
        "command: pyhton: no such program",
    ),
    "a seed in the command": (
        {"command": ["python", "${program}", "--seed=9", "${args}"]},
        "--seed=9: the runner gives it",
    ),
    "early_terminate without type": ({"early_terminate": {"min_iter": 3}}, "type: hyperband"),
    "early_terminate as text": ({"early_terminate": "hyperband"}, "early_terminate: has to be as"),
    "min_iter 0": ({"early_terminate": HYPERBAND | {"min_iter": 0}}, "min_iter 0: has to be"),
    "no min_iter": ({"early_terminate": {"type": "hyperband"}}, "min_iter None: has to be"),
    "eta 1": ({"early_terminate": HYPERBAND | {"eta": 1}}, "eta 1: has to be a whole", "from 2"),
    "max_iter": ({"early_terminate": HYPERBAND | {"max_iter": 9}}, "max_iter: this runner knows"),
    "no parameters": ({"parameters": {}}, "parameters: is missing"),
    "a list of parameters": ({"parameters": [GOOD]}, "parameters: has to be a mapping, as in"),
    "a number as a parameter": (of(alpha=0.5), "alpha: 0.5: has to be as {value: 1}"),
    "a list as a parameter": (of(alpha=[1, 2]), "alpha: [1, 2]: has to be as", "{values: [1, 2]}"),
    "null as a parameter": (of(alpha=None), "alpha: None: has to be as {value: 1}"),
    "no keys": (of(alpha={}), "alpha: has no max and no min, which uniform needs"),
    "a misspelt key": (of(alpha={"vaules": [1]}), "alpha: vaules: no key", "perhaps values"),
    "values and min": (of(alpha={"values": [1], "min": 0}), "alpha: min: no key of categorical"),
    "a name with a blank": (of(**{"the rate": {"value": 1}}), "the rate: has to be the name of a"),
    "a number as name": ({"parameters": {7: {"value": 1}}}, "7: has to be the name of a flag"),
    "the same flag twice": (
        of(**{"learning-rate": {"value": 1}, "learning_rate": {"value": 2}}),
        "learning-rate: the same flag stands twice, with - and with _",
    ),
    "the seed": (of(seed={"values": [1, 2]}), "seed: the runner gives it", "--seeds 1 2 3"),
    "the run's name": (of(run_name={"values": ["a"]}), "run_name: the runner gives it"),
    "the run's name, -": (of(**{"run-name": {"value": "a"}}), "run-name: the runner gives it"),
    "the runs' directory": (of(runs_dir={"value": "a"}), "runs_dir: the runner gives", "--out"),
    "no values": (of(alpha={"values": []}), "alpha: values []: has to be a list of at least one"),
    "one value as values": (of(alpha={"values": 3}), "alpha: values 3: has to be a list"),
    "null as a key": (of(alpha={None: 1}), "alpha: None: no key of uniform"),
    "NUL": (of(alpha={"values": [1, "a\0b"]}), "alpha: 'a\\x00b': has characters that are not"),
    "half of a surrogate pair": (of(alpha={"value": "\ud800"}), "alpha: '\\ud800': has characters"),
    "200,000 characters": (of(alpha={"value": "x" * 200_000}), "alpha: 'xxx", "has 200,000 byte"),
    "NUL in a list": (of(alpha={"value": ["a", "\0"]}), "alpha: '\\x00': has characters"),
    "a mapping as a value": (
        of(alpha={"values": [{"b": 1}]}),
        "alpha: {'b': 1}: has to be one word",
    ),
    "lists of lists": (
        of(alpha={"values": [[1, [2]]]}),
        "alpha: [2]: has to be one word or number",
    ),
    "nested parameters": (of(adam={"parameters": GOOD}), "adam: nested parameters: a flag has no"),
    "a grid of a range": (of(alpha=UNIFORM), "alpha: a grid needs values, not uniform"),
    "a grid of whole numbers": (of(alpha={"min": 1, "max": 3}), "alpha: a grid needs values"),
    "a grid with probabilities": (
        of(alpha={"values": [1, 2], "probabilities": [0.5, 0.5]}),
        "alpha: a grid needs values, not categorical_w_probabilities",
    ),
    **{
        kind: (
            drawn(**UNIFORM | {"distribution": kind}),
            f"alpha: distribution {kind}: this runner draws constant, categorical",
        )
        for kind in ("q_uniform", "log_uniform", "inv_log_uniform_values", "beta", "loguniform")
    },
    "normal": (drawn(distribution="normal", mu=0, sigma=1), "alpha: distribution normal: this"),
    "a list as distribution": (drawn(distribution=["uniform"]), "distribution ['uniform']"),
    "a quantum": (drawn(min=0.0, max=1.0, q=0.1), "alpha: q: no key of uniform"),
    "no max": (drawn(min=0.1), "alpha: has no max, which uniform needs"),
    "no min": (drawn(max=1), "alpha: has no min, which uniform needs"),
    "no bounds": (drawn(distribution="log_uniform_values"), "alpha: has no max and no min"),
    "ends in quotes": (drawn(min="0,1", max=1.0), "alpha: min '0,1': has to be a number"),
    "booleans as ends": (drawn(min=False, max=True), "alpha: min False: has to be a number"),
    "an end that is infinite": (drawn(min=0.0, max=float("inf")), "alpha: max inf: has to be"),
    "an end of 401 figures": (drawn(min=0, max=10**400), "alpha: max 1000"),
    "a grid without end": (
        of(**{f"a{n}": {"values": [*range(10)]} for n in range(9)}),
        "parameters: a grid of 1,000,000,000 rows, 10,000 are the most without run_cap",
    ),
    "ends too far apart": (drawn(min=-1e308, max=1e308), "alpha: min -1e+308: has to be a number"),
    "ends the wrong way": (drawn(min=2, max=1), "alpha: min 2: has to be below max 1"),
    "ends that are equal": (drawn(min=1.0, max=1.0), "alpha: min 1.0: has to be below max 1.0"),
    "the logarithm of 0": (
        drawn(distribution="log_uniform_values", min=0, max=1),
        "alpha: min 0: has to be above 0 for log_uniform_values",
    ),
    "int_uniform with a point": (
        drawn(distribution="int_uniform", min=0.5, max=2),
        "alpha: min 0.5: has to be whole for int_uniform",
    ),
    **{
        f"probabilities {shares}": (
            drawn(values=[1, 2], probabilities=shares),
            f"alpha: probabilities {shares}: has to be 2 numbers whose sum is 1",
        )
        for shares in ([1.0], [0.5, 0.6], [-0.5, 1.5], ["a", "b"], 0.5, None)
    },
    "bayes with probabilities": (
        drawn(values=[1, 2], probabilities=[0.1, 0.9]) | {"method": "bayes"},
        "alpha: probabilities: not with method bayes",
    ),
    # what the script would refuse of each run
    "no flag of the script": (ISTAR | of(alhpa={"value": 1}), "--alhpa=1: no such flag", "--alpha"),
    "no flag, bayes": (
        ISTAR | {"method": "bayes"} | of(prm_rate={"min": 0.1, "max": 1.0}),
        "--prm_rate=0.1: no such flag",
    ),
    "a word as a number": (ISTAR | of(alpha={"values": [1, "much"]}), "--alpha much: has to be"),
    "null as a number": (ISTAR | of(alpha={"values": [None]}), "--alpha None: has to be a number"),
    "a boolean as a number": (ISTAR | of(alpha={"values": [True]}), "--alpha True: has to be a"),
    "a number as a boolean": (ISTAR | of(quiet={"values": [0]}), "--quiet 0: True or False"),
    **{
        f"{value} as text": (
            ISTAR | of(model={"values": [value]}),
            f"model: {value}: has to be one",
        )
        for value in (None, True, ["a", "b"])
    },
    "null as a list": (ISTAR | of(override={"value": None}), "override: None: has to be one value"),
    "an end out of range": (
        ISTAR | drawn(min=-1.0, max=1.0),
        "--alpha -1.0: has to be a number from 0 to",
    ),
    "fractions of a whole number": (
        ISTAR | {"method": "random"} | of(prm_steps={"min": 1.0, "max": 8.0}),
        "--prm-steps 1.0: has to be a whole number",
    ),
}

# words of the command line -> what is said; nothing is started
WORDS = {
    "-- --seed=9": "--seed=9: the runner gives it to each run; --seeds 1 2 3 are the seeds",
    "-- --seed 9": "--seed: the runner gives it to each run",
    "-- --run_name=a": "--run_name=a: the runner gives it to each run; leave it out",
    "-- --runs-dir=a": "--runs-dir=a: the runner gives it to each run; --out DIRECTORY",
    "-- --resume=a": "--resume=a: the runner gives it",
    "-- --alpha=3": "has alpha as a parameter; only one of them can count",
    "--alpha=3": "unrecognized arguments: --alpha=3; what goes to every run follows --",
    "--jobs 0": "--jobs 0: from 1 to ",
    "--jobs 999": "--jobs 999: from 1 to ",
    "--jobs two": "argument --jobs: invalid int value: 'two'",
    "--seeds 1 1": "--seeds 1 1: each only once",
    "--trials 0": "--trials 0: has to be from 1 to 10,000",
    "--trials 10001": "--trials 10001: has to be from 1 to 10,000",
    "--draw-seed -1": "--draw-seed -1: has to be from 0 to 1,000,000,000",
}

# changes -> the values of alpha that the runs have had
RUN = {
    "one value": (of(alpha={"value": 3}), ["3"]),
    "values that are equal": (of(alpha={"values": [1, 1.0, "1", 2]}), ["1", "2"]),
    "booleans": (of(alpha={"value": 1}, quiet={"values": [True, False]}), ["1", "1"]),
    "null": (of(alpha={"value": 1}, model={"values": [None, "a b"]}), ["1", "1"]),
    "lists": (of(alpha={"value": 1}, names={"values": [[], ["a"], ["a", "b"]]}), ["1"] * 3),
    "infinity": (of(alpha={"value": 1}, lr_halving={"value": float("inf")}), ["1"]),
    "run_cap of a grid": (of(alpha={"values": [5, 6, 7]}) | {"run_cap": 2}, ["5", "6"]),
    "run_cap of a grid without end": (
        of(alpha={"value": 5}, **{f"a{n}": {"values": [*range(10)]} for n in range(9)})
        | {"run_cap": 2},
        ["5", "5"],
    ),
    "a literal python3": (
        of(alpha={"values": [1]}) | {"command": ["python3", "${program}", "${args}"]},
        ["1"],
    ),
    "no command": (of(alpha={"values": [1]}) | {"command": None}, ["1"]),
    "what a server shows": (of(**GOOD) | {"name": "a", "description": "b"}, ["1", "2"]),
    "certain probabilities": (drawn(values=[1, 2], probabilities=[0, 1]), ["2"]),
    "categorical with them": (
        drawn(values=[1, 2], probabilities=[1.0, 0.0], distribution="categorical"),
        ["1"],
    ),
    "the distributions by name": (
        of(
            alpha={"distribution": "categorical", "values": [4]},
            beta={"distribution": "constant", "value": 1},
        ),
        ["4"],
    ),
}


def one_of(file, text):
    """The file with these changes, or with this text."""
    if isinstance(text, dict):
        return file(**{"parameters": GOOD} | text)
    path = file(GOOD)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_refused_by_file_and_key(sweep, case):  # noqa: F811
    text, *pieces = REFUSED[case]
    file = one_of(sweep, text)
    done = execute(file, check=False)
    assert done.returncode == 1 and not done.stdout
    assert len(done.stderr.splitlines()) == 1 and len(done.stderr) < 600
    for piece in (str(file), *pieces):
        assert piece in done.stderr
    assert not file.with_suffix("").exists()  # nothing was started, nor made


@pytest.mark.parametrize("words", WORDS)
def test_words_that_cannot_be_are_refused(sweep, words):  # noqa: F811
    file = sweep(GOOD)
    done = execute(file, *words.split(), check=False)
    assert done.returncode == 1 and WORDS[words] in done.stderr
    assert len(done.stderr.splitlines()) == 1 and not file.with_suffix("").exists()


@pytest.mark.parametrize("case", RUN)
def test_what_can_be_is_run_with_the_right_values(sweep, case):  # noqa: F811
    changes, expected = RUN[case]
    file = one_of(sweep, changes)
    execute(file)
    starts = [start["flags"] for one in starts_of(file).values() for start in one]
    assert sorted(flags["alpha"] for flags in starts) == expected
    assert len(table_of(file).splitlines()) == 4 + len(expected)


@pytest.mark.parametrize("make", (lambda path: None, lambda path: path.mkdir()))
def test_a_file_that_is_none(tmp_path, make):
    make(tmp_path / "sweep.yaml")
    done = execute(tmp_path / "sweep.yaml", check=False)
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith(f"{tmp_path / 'sweep.yaml'}: ")


# ------------ what is said, where it goes on ------------


def test_numbers_as_everybody_writes_them(sweep):  # noqa: F811
    """YAML 1.1 reads 1e-5 as text; here it is a number, in quotes it stays text."""
    file = sweep(GOOD)
    text = f"program: {file.with_name('program.py')}\nmethod: random\nrun_cap: 20\n"
    text += "metric: {name: eval/success, goal: maximize}\nparameters:\n"
    text += "  alpha: {min: 1e-5, max: 1E-4}\n  beta: {values: [2e-3, '2e-3', -1e+2]}\n"
    text += "  gamma: {distribution: log_uniform_values, min: 1e-6, max: 1}\n"
    file.write_text(text)
    rows = runner.rows_of_sweep(runner.read_sweep(file), runner_arguments(draw_seed=0, trials=40))
    assert all(1e-5 <= row["alpha"] <= 1e-4 and 1e-6 <= row["gamma"] <= 1 for row in rows)
    assert {row["beta"] for row in rows} == {0.002, "2e-3", -100.0}


def test_a_metric_without_a_goal_is_minimized_and_said_so(sweep):  # noqa: F811
    file = sweep(GOOD, metric={"name": "eval/success"})
    done = execute(file)
    told = "metric: no goal, so eval/success is minimized, as W&B does; goal: maximize is the other"
    assert told in done.stderr and len(done.stderr.splitlines()) == 1
    assert "--alpha=1" in table_of(file).splitlines()[4]  # the best one has the lowest


def test_early_terminate_is_of_bayes_alone(sweep):  # noqa: F811
    done = execute(sweep(GOOD, early_terminate=HYPERBAND))
    assert "early_terminate: this runner has it for method bayes alone" in done.stderr


def test_whole_bounds_draw_whole_numbers_and_say_so_of_a_rate(sweep, capsys):  # noqa: F811
    file = sweep(
        method="random", **ISTAR | of(alpha={"min": 0, "max": 2}, prm_steps={"min": 1, "max": 3})
    )
    body = runner.read_sweep(file)
    runner.check_flags(file, body, runner_arguments(more=[], seeds=[1]))
    told = capsys.readouterr().err.splitlines()
    assert (
        len(told) == 1 and "alpha: only whole numbers are drawn, as W&B does; write 0.0" in told[0]
    )
    rows = runner.rows_of_sweep(body, runner_arguments(draw_seed=0, trials=50))
    assert {row["alpha"] for row in rows} == {0, 1, 2}


def test_flags_of_all_runs_are_read_before_the_first_one(sweep):  # noqa: F811
    file = sweep(**ISTAR | {"parameters": GOOD})
    for words, told in {
        ("--", "--iteratons=3"): "--iteratons=3: no such flag; perhaps --iterations",
        ("--", "--iterations", "0"): "--iterations 0: has to be a whole number from 1",
        ("--seeds", "-1"): "--seed -1: has to be a whole number from 0",
    }.items():
        done = execute(file, *words, check=False)
        assert done.returncode == 1 and told in done.stderr
        assert len(done.stderr.splitlines()) == 1 and not file.with_suffix("").exists()
    broken = file.with_name("program.py")
    broken.write_text("def main(:\n")
    done = execute(sweep(GOOD), check=False)
    assert done.returncode == 1 and done.stderr == f"{broken}: line 1: invalid syntax\n"


def test_a_command_that_cannot_be_started_is_told_of_its_run(sweep):  # noqa: F811
    """The program is no executable; or the words are more than a process may have."""
    many = {f"p{n}": {"value": "x" * 4000} for n in range(1200)}
    for changes, told in (
        (of(alpha={"value": 1}) | {"command": ["${program}", "${args}"]}, "Permission denied"),
        (of(alpha={"value": 1}, **many), "Argument list too long"),
    ):
        done = execute(one_of(sweep, changes), check=False)
        lines = done.stderr.splitlines()
        assert done.returncode == 1 and lines[0] == "1 of 1 runs failed:" and len(lines) == 2
        assert told in lines[1] and "alpha-1" in lines[1]


def test_a_metric_that_the_runs_do_not_have_names_the_nearest(sweep):  # noqa: F811
    done = execute(sweep(GOOD, metric={"name": "eval/sucess", "goal": "maximize"}), check=False)
    told = done.stderr.splitlines()
    assert done.returncode == 1 and told[0] == "2 of 2 runs failed:" and len(told) == 3
    assert "no eval/sucess in its metrics; perhaps eval/success" in told[1]


@pytest.mark.parametrize(
    "program, told",
    {
        "import os; os.kill(os.getpid(), 9)": "ended by signal 9: it printed nothing",
        "print('about to'); import os; os.abort()": "ended by signal 6: ",
        "raise ValueError('no such thing')": "ValueError: no such thing",
        "import nothing_here": "ModuleNotFoundError: No module named 'nothing_here'",
        "print('done')": "no eval/success in its metrics",
        "value = None": "eval/success is no finite number in its last evaluation",
        "value = 0.5 if iteration < 2 else None": "eval/success is no finite number in its last",
        "value = 'high'": "no eval/success in its metrics",
        "value = float('nan')": "no eval/success in its metrics",
    }.items(),
)
def test_why_a_run_has_no_result(sweep, program, told):  # noqa: F811
    file = sweep({"alpha": {"value": 1}})
    path = file.with_name("program.py")
    if program.startswith("value"):
        rate = "scale * alpha * (iteration + 1) + seed / 100"
        program = path.read_text().replace(rate, program.partition("= ")[2])
    path.write_text(program)
    done = execute(file, check=False)
    assert done.returncode == 1 and told in done.stderr.splitlines()[1]


# ------------ the directory of a sweep ------------


def damaged(results: str) -> dict[str, str]:
    """What may have come of results.jsonl: kind -> its text."""
    first, second = results.splitlines(keepends=True)
    entry = json.loads(first)
    return {
        "torn": first + second[:-9],
        "a line of nothing": f"{first}\0\0\0\n{second}",
        "another line": f"[1]\n7\nnull\n{{}}\n{first}",
        "no value": json.dumps(entry | {"value": None}) + "\n" + second,
        "a word as value": json.dumps(entry | {"value": "a", "evaluations": ["a"]}) + "\n" + second,
        "no UTF-8": f"{first}\udcff\n",
        "brackets": f"{'[' * 9999}\n{second}",
        "empty": "",
        "another row's": json.dumps(
            entry | {"config": {"alpha": 9}, "value": 9.0, "evaluations": [9.0]}
        )
        + "\n"
        + second,
        "another sweep's": json.dumps(entry | {"command": "python other.py"}) + "\n",
        "an older version's": json.dumps({"name": entry.get("name"), "row": 0, "value": 9.0})
        + "\n",
    }


@pytest.mark.parametrize("kind", damaged("{}\n{}\n"))
def test_damaged_results_are_run_again_and_the_others_are_kept(sweep, kind):  # noqa: F811
    file = sweep(GOOD)
    execute(file)
    path, before = file.with_suffix("") / "results.jsonl", table_of(file)
    path.write_bytes(damaged(path.read_text())[kind].encode(errors="surrogateescape"))
    done = execute(file)
    assert table_of(file) == before and len(done.stderr.splitlines()) <= 1
    quiet = ("torn", "empty", "another row's", "another sweep's")
    assert (
        bool(done.stderr) == (kind not in quiet) == path.with_name(f"{path.name}.damaged").exists()
    )
    assert execute(file).stderr == ""  # and what was damaged is not there any more


def test_a_sweep_in_the_directory_of_another_has_its_own_table(sweep):  # noqa: F811
    file = sweep(GOOD)
    execute(file)
    other = sweep({"beta": {"values": [1, 2, 3]}}, name="other")
    execute(other, "--out", file.with_suffix(""))
    assert "| beta |" in table_of(file) and "alpha" not in table_of(file)
    assert len(table_of(file).splitlines()) == 4 + 3 and len(results_of(file)) == 5


@pytest.mark.parametrize("what", ("a file", "results", "runs", "lock"))
def test_a_directory_that_cannot_be_is_named(sweep, what):  # noqa: F811
    file = sweep(GOOD)
    out = file.with_suffix("")
    if what == "a file":
        out.write_text("")
    else:
        out.mkdir()
        names = {"results": "results.jsonl", "runs": "runs", "lock": "lock"}
        (out / "runs").write_text("") if what == "runs" else (out / names[what]).mkdir()
    done = execute(file, check=False)
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith(f"--out {out}: {out}")


def test_what_all_runs_fail_at_leaves_no_table_of_the_start_before(sweep):  # noqa: F811
    file = sweep(GOOD)
    execute(file)
    sweep({"broken": {"value": True}})
    done = execute(file, check=False)
    assert done.returncode == 1 and "--broken True: this cannot be" in done.stderr
    assert not (file.with_suffix("") / "table.md").exists()
