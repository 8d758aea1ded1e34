"""What keeps the scripts readable: their measures, what they take from runtime/, and its form."""

import ast

import runtime

import blocks
import page
import pytest
from conftest import ROOT

ALGORITHMS = [name for name in blocks.SCRIPTS if name != "warm_start.py"]
LIMITS = [  # lines of a script, by how its name begins or ends; the first that fits counts
    ("istar_webshop_ablations", 450),
    ("_sotopia.py", 400),
    ("istar_paper_", 360),
    ("istar_", 400),
    ("prime_", 400),
    ("ppo_", 400),
    ("gagpo_", 300),
    ("gigpo_", 320),
    ("graphgpo_", 320),
    ("", 280),
]
MODULES = sorted((ROOT / "runtime").rglob("*.py"))


def faults_of(name: str, found: page.Measures) -> list[str]:
    """The measures of a script that are beyond their limits."""
    most = next(lines for part, lines in LIMITS if part in name)
    pages = {  # what is: the most that it may be
        f"{found.lines} lines": (found.lines, most),
        f"{found.tokens:.2f} tokens a line of code": (round(found.tokens, 1), 11.5),
        f"{found.wide:.1%} of lines beyond 100 columns": (found.wide, 0.01),
        f"{found.flags} flags": (found.flags, 30),
        f"{len(found.taken)} names of runtime": (len(found.taken), 18),
        f"{found.blocks} blocks": (found.blocks, 6),
    }
    faults = [f"{told}, at most {most}" for told, (value, most) in pages.items() if value > most]
    if name.startswith("istar_"):
        hidden = [verb for verb in page.VERBS if verb not in found.verbs]
        faults += [f"{verb} is not on the page" for verb in hidden]
    return faults


@pytest.mark.parametrize("script", ALGORITHMS)
def test_a_script_is_as_short_and_open_as_it_has_to_be(script):
    assert faults_of(script, page.measure(ROOT / script)) == []


def test_what_a_script_measures(tmp_path):
    """By hand, of a small one; and each measure beyond its limit is told."""
    path = tmp_path / "istar_x.py"
    path.write_text(
        '"""Two\nlines."""\n\nimport runtime.run\nfrom runtime.data import Step, flatten\n\n\n'
        'class Args:\n    """What."""\n    one: int = 1  # One.\n    two: int = 2\n    """Two."""\n'
        f"# === block: x ===\n\ntotal = loss.backward() + {'1' * 100}\n"
    )
    found = page.measure(path)
    assert found.lines == 15 and found.flags == 2 and found.blocks == 1
    assert found.taken == ("runtime.run", "Step", "flatten") and found.verbs == (".backward()",)
    assert found.wide == 1 / 15
    assert found.tokens == (4 + 8 + 3 + 5 + 5 + 9) / 6  # of the six lines of code

    faults = " ".join(faults_of("istar_x.py", found))
    assert "6.7% of lines beyond 100 columns" in faults and faults.count("not on the page") == 7
    large = page.Measures(401, 11.56, 0.0, 31, ("name",) * 19, page.VERBS, 7)
    assert [fault.split()[0] for fault in faults_of("istar_x.py", large)] == [
        *("401", "11.56", "31", "19", "7")
    ]
    assert faults_of("rloo_x.py", large._replace(lines=281))[0] == "281 lines, at most 280"
    assert not faults_of("istar_x.py", page.Measures(400, 11.5, 0.01, 30, (), page.VERBS, 6))


# ------------ runtime ------------


def test_the_table_has_what_the_scripts_take():
    """No name more, none less, and at most 18."""
    taken = {name for script in ALGORITHMS for name in page.measure(ROOT / script).taken}
    assert taken == {*runtime.TAKEN} and len(taken) <= 18
    for name, reason in runtime.TAKEN.items():
        assert len(reason.split()) > 3 and "\n" not in reason, name


def test_no_module_is_longer_than_400_lines():
    lengths = {str(path): len(path.read_text().splitlines()) for path in MODULES}
    assert not {name: length for name, length in lengths.items() if length > 400}


def test_runtime_does_not_grow():
    assert sum(len(path.read_text().splitlines()) for path in MODULES) <= 4800


def test_the_docstring_of_runtime_names_every_module_and_no_other():
    words = {word.rstrip("/") for word in runtime.__doc__.replace(";", " ").split()}
    told = {word for word in words if word.endswith(".py") and "/" not in word}
    flat = {path.name for path in (ROOT / "runtime").glob("*.py")}
    assert told == flat - {"__init__.py"}
    packages = {path.parent.name for path in (ROOT / "runtime").glob("*/__init__.py")}
    assert packages <= words


def name_of(path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imports_of(text: str, known: set[str]) -> set[str]:
    """The modules of `known` that a module imports while it is read, not in its functions."""
    found, nodes = set(), list(ast.parse(text).body)
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Import):
            found |= {each.name for each in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module, *(f"{node.module}.{each.name}" for each in node.names)}
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            nodes += ast.iter_child_nodes(node)
    return found & known


def circle_in(imports: dict[str, set[str]]) -> list[str]:
    """Modules that import each other in a circle; [] where none do."""
    left = dict(imports)
    while free := [name for name, others in left.items() if not others & left.keys()]:
        for name in free:
            del left[name]
    return sorted(left)


def test_no_modules_of_runtime_import_each_other_in_a_circle():
    names = {name_of(path) for path in MODULES}
    imports = {name_of(path): imports_of(path.read_text(), names) for path in MODULES}
    assert imports["runtime.networks"] >= {"runtime.data", "runtime.distributed.fsdp"}
    assert circle_in(imports) == []


def test_a_circle_is_found():
    texts = {"a": "import b", "b": "if True:\n    from c import x", "c": "from a import y", "d": ""}
    assert circle_in({name: imports_of(text, {*texts}) for name, text in texts.items()}) == [*"abc"]
    texts["c"] = "def f():\n    from a import y"
    assert circle_in({name: imports_of(text, {*texts}) for name, text in texts.items()}) == []
