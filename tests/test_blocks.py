"""tests/blocks.py: it passes here, and fails, readably, on every way in which copies go wrong."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import blocks
import pytest
from conftest import ROOT

MINE = "istar_webshop_mine.py"
ADVANTAGES = "advantages = episode_adv + weighted"
RENAMED = ("for _ in range(args.max_steps):", "for turn in range(args.max_steps):")  # in play


def run(root, *flags):
    command = [sys.executable, str(ROOT / "tests" / "blocks.py"), "--root", str(root), *flags]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.fixture
def tree(tmp_path):
    for path in blocks.scripts(ROOT):
        shutil.copy(path, tmp_path)
    return tmp_path


def git(tree, *words):
    who = ["-c", "user.name=nobody", "-c", "user.email=nobody@example.org"]
    subprocess.run(["git", *who, *words], cwd=tree, check=True, capture_output=True)


def commit(tree):
    """All that is there, as a commit, in a repository of its own."""
    if not (tree / ".git").exists():
        git(tree, "init")
    git(tree, "add", "--all")
    git(tree, "commit", "--message", "all of it")


def edit(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def contents(tree):
    return {path.name: path.read_bytes() for path in tree.glob("*.py")}


def refused(tree, *words):
    done = run(tree)
    assert done.returncode != 0 and all(word in done.stderr for word in words), done.stderr
    return done.stderr


def fix_refused(tree, *files):
    """What --fix says where it changes nothing: one line."""
    before = contents(tree)
    done = run(tree, "--fix", *files)
    assert done.returncode != 0 and len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert "changed" not in done.stdout and contents(tree) == before
    return done.stderr


def one_byte_more(path, number):
    """Put a byte that no one sees to the end of a line; hand back what gives the old text."""
    before = path.read_bytes()
    lines = path.read_text().splitlines(keepends=True)
    lines[number] = lines[number][:-1] + " \n"
    path.write_text("".join(lines))
    return lambda: path.write_bytes(before)


# ------------ check ------------


def test_the_scripts_pass():
    command = [sys.executable, "tests/blocks.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [line.split(":")[0] for line in done.stdout.splitlines()] == list(blocks.SCRIPTS)


def test_the_list_has_every_script_that_the_readme_has():
    linked = re.findall(r"\]\((\w+\.py)\)", (ROOT / "README.md").read_text())
    assert set(linked) == set(blocks.SCRIPTS)


def test_the_readme_shows_the_page_as_it_is():
    """Every piece between the dots, line by line."""
    shown = (ROOT / "README.md").read_text().split("```python\n")[1].split("```")[0]
    page = (ROOT / "istar_webshop.py").read_text()
    assert shown.count("\n") > 15
    assert all(piece in page for piece in shown.split("        ...\n"))


def test_every_shared_part_is_compared(tree):
    """One byte changed in anything that two scripts hold, at its beginning or end, is found once
    and shown as a unified diff: blocks, and functions and classes outside of them."""
    scripts, holders = [blocks.read(path) for path in blocks.scripts(tree)], {}
    for number, script in enumerate(scripts):
        for label in script.places:
            holders.setdefault(label, []).append(number)
    shared = {label: numbers for label, numbers in holders.items() if len(numbers) > 1}
    blocks_of_all = {f"block {name}" for name in blocks.KNOWN}
    assert shared.keys() >= blocks_of_all | {"rloo_advantages", "anchor_groups", "by_token"}

    for label, numbers in shared.items():
        for number in (numbers[0], numbers[-1]):
            script = scripts[number]
            start, end = script.places[label]
            for line in (start, end - 1):
                undo = one_byte_more(script.path, line)
                changed = [*scripts[:number], blocks.read(script.path), *scripts[number + 1 :]]
                faults = blocks.differences(changed)
                assert len(faults) == 1 and "@@" in faults[0], label
                assert f"+++ {script.name}: " in faults[0] or len(numbers) == 2
                undo()
    assert blocks.check(tree)[0] == []


@pytest.fixture(scope="module")
def read_scripts():
    return [blocks.read(path) for path in blocks.scripts(ROOT)]


@pytest.mark.parametrize("script", blocks.SCRIPTS)
def test_main_is_that_of_the_same_algorithm_elsewhere(read_scripts, script, tmp_path):
    """But for the world's class; an algorithm that has one world has nobody to compare with."""
    algorithms = [blocks.algorithm_of(name) for name in blocks.SCRIPTS]
    alone = algorithms.count(blocks.algorithm_of(script)) == 1
    copy = Path(shutil.copy(ROOT / script, tmp_path))
    start, end = blocks.read(copy).definitions["main"]
    for number in (start, end - 1):
        undo = one_byte_more(copy, number)
        changed = [blocks.read(copy) if s.name == script else s for s in read_scripts]
        faults = blocks.differences_of_main(changed)
        assert len(faults) == (not alone) and all(f"{script}: main" in f for f in faults)
        undo()


def test_two_mains_may_differ_by_the_worlds_class_and_by_nothing_else(tree):
    edit(tree / "rloo_sokoban.py", "env = Sokoban.from_args(args)", "env = Rooms.from_args(args)")
    assert blocks.check(tree)[0] == []
    edit(tree / "rloo_sokoban.py", "env = Rooms.from_args(args)", "env = Rooms.from_args(0)")
    refused(tree, "rloo_alfworld.py: main", "rloo_sokoban.py: main")


def test_the_text_of_the_most_is_the_right_one(tree):
    """One changed copy is one fault, also where it is the first of all."""
    first = blocks.scripts(tree)[0]
    edit(first, *RENAMED)
    (fault,) = blocks.check(tree)[0]
    assert f"+++ {first.name}: block rollout" in fault


def test_one_byte_fails_with_a_diff_and_fix_repairs_it(tree):
    path = tree / "rloo_sokoban.py"
    edit(path, "ratio = log_ratio.exp()", "ratio = log_ratio.exp( )")
    said = refused(tree, ".py: block token policy", "rloo_sokoban.py: block token policy")
    assert re.search(r"^-    ratio = log_ratio.exp\(\)$", said, re.M)
    assert re.search(r"^\+    ratio = log_ratio.exp\( \)$", said, re.M)

    commit(tree)
    done = run(tree, "--fix", "rloo_sokoban.py")
    assert done.returncode == 0 and "changed: rloo_sokoban.py" in done.stdout
    assert path.read_bytes() == (ROOT / path.name).read_bytes()
    commit(tree)
    assert "changed: nothing" in run(tree, "--fix", "rloo_sokoban.py").stdout


def test_unknown_block(tree):
    edit(tree / "rloo_sokoban.py", "=== block: token policy ===", "=== block: policies ===")
    refused(tree, "unknown block 'policies'", "rloo_sokoban.py: block 'token policy' is missing")


def test_a_block_that_the_list_does_not_ask_for(tree):
    edit(tree / "rloo_sokoban.py", "def rloo_adv", "# === block: prm ===\ndef rloo_adv")
    edit(tree / "rloo_sokoban.py", "@ends_cleanly", "# === end block ===\n@ends_cleanly")
    refused(tree, "rloo_sokoban.py: block 'prm' is not among those of SCRIPTS")


def test_unclosed_block(tree):
    path = tree / "rloo_sokoban.py"
    head, tail = path.read_text().rsplit("    # === end block ===\n", 1)
    path.write_text(head + tail)
    refused(tree, "is not closed")


def test_block_inside_a_block_and_end_without_one(tree):
    edit(tree / "rloo_sokoban.py", "# === end block ===\n", "\n")
    refused(tree, "opens inside block")
    shutil.copy(ROOT / "rloo_sokoban.py", tree)
    twice = "# === end block ===\n# === end block ===\n"
    edit(tree / "rloo_sokoban.py", "# === end block ===\n", twice)
    refused(tree, "an end without a block")


def test_what_is_no_python_is_named(tree):
    edit(tree / "rloo_sokoban.py", "@ends_cleanly", "<<<<<<< mine\n@ends_cleanly")
    refused(tree, "rloo_sokoban.py:", "invalid syntax")


@pytest.mark.parametrize("script", blocks.SCRIPTS)
def test_missing_block(tree, script):
    """Every block of a script is required, and named where it is not there."""
    path = tree / script
    text, names = path.read_text(), [*blocks.read(path).blocks]
    assert set(names) == set(blocks.SCRIPTS[script]) and len(names) == len({*names})
    for name in names:
        part = re.compile(rf"# === block: {name} ===\n.*?# === end block ===\n", re.DOTALL)
        path.write_text(part.sub("", text, count=1))
        faults = blocks.faults_of_form(blocks.read(path))
        assert faults == [f"{script}: block '{name}' is missing"]


def test_missing_script(tree):
    (tree / "ppo_webshop.py").unlink()
    refused(tree, "ppo_webshop.py: this script is missing")


def test_doubled_block(tree):
    path = tree / "rloo_sokoban.py"
    text = path.read_text()
    block = re.search(r"# === block: token policy ===\n.*?# === end block ===\n", text, re.DOTALL)[
        0
    ]
    path.write_text(text + block)
    refused(tree, "block 'token policy' stands twice")


def test_a_new_script_must_hold_the_blocks_that_the_list_says(tree, monkeypatch):
    (tree / "rloo_chess.py").write_text('"""Nothing yet."""\n')
    assert blocks.check(tree)[0] == []  # nobody listed it: it is its author's own
    monkeypatch.setitem(blocks.SCRIPTS, "rloo_chess.py", blocks.TOKEN)
    faults, _ = blocks.check(tree)
    assert faults == [f"rloo_chess.py: block '{name}' is missing" for name in blocks.TOKEN]


def test_line_budget(tree):
    path = tree / "rloo_sokoban.py"
    lines = path.read_text().splitlines()
    path.write_text("\n".join(lines + ["#"] * (500 - len(lines))) + "\n")
    assert blocks.check(tree)[0] == []
    path.write_text(path.read_text() + "#\n")
    refused(tree, "rloo_sokoban.py: 501 lines, at most 500")


def test_at_most_six_blocks(tree):
    path = tree / "rloo_sokoban.py"
    for number in range(3, 8):
        assert not any("at most 6" in fault for fault in blocks.check(tree)[0])
        more = f"# === block: number {number} ===\n# === end block ===\n"
        path.write_text(path.read_text() + more)
    refused(tree, "rloo_sokoban.py: 7 blocks, at most 6")


# ------------ a copy of one's own ------------


def test_a_copy_of_any_name_is_ones_own(tree):
    """It is not checked, not refused, and --fix of any script leaves it as it is."""
    shutil.copy(tree / "istar_webshop.py", tree / MINE)
    edit(tree / MINE, ADVANTAGES, "advantages = episode_adv + 2 * weighted")
    edit(tree / MINE, *RENAMED)
    mine = (tree / MINE).read_bytes()
    done = run(tree)
    assert done.returncode == 0 and MINE not in done.stdout + done.stderr

    commit(tree)
    for script in ("istar_webshop.py", "rloo_sotopia.py", "warm_start.py"):
        assert blocks.fix(tree, [script]) == []
    assert (tree / MINE).read_bytes() == mine
    assert MINE in fix_refused(tree, MINE)
    assert MINE in fix_refused(tree, "rloo_sokoban.py", str(tree / MINE))


# ------------ fix ------------


def test_fix_touches_its_target_and_there_what_is_shared(tree):
    """What a script does not share stays as it is, main too, and so do all other scripts."""
    path = tree / "rloo_sokoban.py"
    edit(path, "RLOO on Sokoban", "My RLOO")
    edit(path, "group_size: int = 8", "group_size: int = 9")
    edit(path, 'run.lap("sync")', "run.lap('sync')")
    expected = path.read_bytes()
    edit(path, *RENAMED)  # in a block
    edit(path, "others = same.sum(1) - 1", "others = same.sum(1) - 2")  # in rloo_advantages
    commit(tree)
    before = contents(tree)

    done = run(tree, "--fix", "rloo_sokoban.py")
    assert "changed: rloo_sokoban.py\n" in done.stdout
    assert contents(tree) == before | {"rloo_sokoban.py": expected}
    assert "rloo_sokoban.py: main" in done.stderr  # it is shown, and not mended


def test_fix_gives_several_targets_what_the_others_have(tree):
    """So a change that was made in one script and committed comes to all others."""
    edit(tree / "rloo_webshop.py", *RENAMED)
    commit(tree)
    targets = [name for name in blocks.SCRIPTS if name != "rloo_webshop.py"]
    holders = [name for name in targets if "rollout" in blocks.SCRIPTS[name]]
    before = contents(tree)
    done = run(tree, "--fix", *targets)
    assert done.returncode == 0, done.stderr
    assert len(holders) > 1 and f"changed: {', '.join(holders)}\n" in done.stdout
    after = contents(tree)
    for name in holders:
        assert after[name] == before[name].replace(*(words.encode() for words in RENAMED))
    assert after == before | {name: after[name] for name in holders}


def test_fix_leaves_what_no_other_script_has(tree):
    """Two targets that alone hold a block have nobody to take it from."""
    conversations = [name for name in blocks.SCRIPTS if name.endswith("_sotopia.py")]
    edit(tree / conversations[0], "seen = await", "seen  = await")
    commit(tree)
    done = run(tree, "--fix", *conversations)
    assert "changed: nothing" in done.stdout and "block conversation" in done.stderr
    done = run(tree, "--fix", conversations[0])
    assert done.returncode == 0 and f"changed: {conversations[0]}\n" in done.stdout


@pytest.mark.parametrize("how", ("changed", "staged", "new"))
def test_fix_refuses_a_target_whose_changes_are_not_committed(tree, how):
    path = tree / "rloo_sokoban.py"
    if how == "new":
        path.unlink()
        commit(tree)
        shutil.copy(ROOT / path.name, path)
    else:
        commit(tree)
    edit(path, *RENAMED)
    if how == "staged":
        git(tree, "add", path.name)
    for files in ([path.name], ["ppo_webshop.py", path.name]):
        said = fix_refused(tree, *files)
        assert said.startswith(f"--fix {path.name}: it has changes that are not committed")


def test_fix_needs_no_git_and_looks_at_its_targets_alone(tree):
    """Others may have changes that are not committed: so a change goes from one script to all."""
    edit(tree / "rloo_sokoban.py", *RENAMED)
    assert "changed: rloo_sokoban.py\n" in run(tree, "--fix", "rloo_sokoban.py").stdout

    commit(tree)
    edit(tree / "rloo_sokoban.py", *RENAMED)
    targets = [
        n for n in blocks.SCRIPTS if "rollout" in blocks.SCRIPTS[n] and n != "rloo_sokoban.py"
    ]
    done = run(tree, "--fix", *targets)
    assert done.returncode == 0 and f"changed: {', '.join(targets)}\n" in done.stdout


def test_fix_refuses_where_the_others_do_not_agree(tree):
    """It says on what, and who has which text; a committed change of one script is one side."""
    edit(tree / "grpo_sokoban.py", *RENAMED)
    edit(tree / "gigpo_webshop.py", *RENAMED)
    commit(tree)
    said = fix_refused(tree, "rloo_sokoban.py")
    sides = said.strip().split("the others do not agree on block rollout: ")[1].split(" against ")
    assert len(sides) == 2 and "gigpo_webshop.py, grpo_sokoban.py" in sides


def test_fix_refuses_where_the_others_do_not_agree_on_a_function(tree):
    edit(tree / "rloo_webshop.py", "others = same.sum(1) - 1", "others = same.sum(1) - 2")
    commit(tree)
    said = fix_refused(tree, "rloo_sokoban.py")
    assert "do not agree on rloo_advantages: " in said
    assert said.endswith(" against rloo_webshop.py\n")
    done = run(tree, "--fix", "rloo_webshop.py")
    assert done.returncode == 0 and "changed: rloo_webshop.py\n" in done.stdout


@pytest.mark.parametrize("broken", ("rloo_sokoban.py", "grpo_sokoban.py"))
def test_fix_refuses_scripts_whose_blocks_it_cannot_read(tree, broken):
    """The target's and the others': nobody knows where their parts end."""
    edit(tree / broken, "    # === end block ===\n", "")
    commit(tree)
    assert "opens inside block" in fix_refused(tree, "rloo_sokoban.py")


# ------------ what a diff shows ------------

MOST = {  # lines that the diff of two scripts shows at most
    ("rloo", "grpo"): 50,
    ("rloo", "reinforce_pp"): 55,
    ("rloo", "gigpo"): 120,
    ("gigpo", "graphgpo"): 110,
    ("gigpo", "g2po"): 90,
    ("gigpo", "gagpo"): 150,
    ("rloo", "prime"): 190,
    ("rloo", "ppo"): 210,
    ("rloo", "dpo"): 200,
    ("rloo", "istar"): 265,
    ("istar_paper", "istar"): 160,
    ("istar_webshop", "istar_webshop_ablations"): 290,
    ("webshop", "sokoban"): 34,
    ("webshop", "sotopia"): 66,
    ("_sokoban", "_visual_sokoban"): 28,
}
PAIRS = [
    (one, one.replace(*names), most)
    for one in (name.removesuffix(".py") for name in blocks.SCRIPTS)
    for names, most in MOST.items()
    if one.replace(*names) != one and f"{one.replace(*names)}.py" in blocks.SCRIPTS
]


@pytest.mark.parametrize("one, other, most", PAIRS)
def test_two_scripts_differ_by_their_algorithm_or_their_world(one, other, most):
    """What `diff` shows: flags, formulas, docstring and the paragraphs of the algorithm; or the
    world, its defaults and, of a conversation, the rollout. It is little, and it is there."""
    diff = ["diff", f"{one}.py", f"{other}.py"]
    done = subprocess.run(diff, cwd=ROOT, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line[0] in "<>"]
    assert 0.6 * most < len(lines) <= most, done.stdout


def test_every_script_is_compared_with_another():
    compared = {f"{name}.py" for one, other, _ in PAIRS for name in (one, other)}
    assert compared == set(blocks.SCRIPTS) - {"warm_start.py"}
