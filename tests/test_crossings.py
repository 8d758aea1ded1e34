"""Crossings keeps the contract of envs/README.md, and knows the true worth of every step."""

import itertools
import random
import shlex
from collections import Counter
from types import SimpleNamespace

from benchmarks import credit
from envs.crossings import (
    GUARDED,
    INVALID,
    OPEN,
    SIGNS,
    WAYS,
    Crossings,
    advantages,
    expert,
    right_way,
    wrong_habit,
)
from runtime.flags import check_words, kinds_of

import pytest

ENV = Crossings()
TASKS = [*ENV.eval_tasks[:5], *ENV.validation_tasks[:5], *ENV.train_tasks[:5]]
FIRST = "barn pig"
WAYS_OF_SIGNS = "south east south north south east north north".split()


def said(way: str) -> str:
    return f"<think>go</think><action>{way}</action>"


def best(episode) -> str:
    """The right way where there is one."""
    place, sign = episode.walk[episode.turn]
    return right_way(sign) if place in GUARDED else "north"


def test_no_task_is_in_two_of_the_three_sets():
    sets = [set(tasks) for tasks in (ENV.train_tasks, ENV.eval_tasks, ENV.validation_tasks)]
    assert sum(map(len, sets)) == len(set.union(*sets)) and len(ENV.eval_tasks) >= 128


def test_the_same_task_is_the_same_walk_whatever_was_played_before():
    state = random.getstate()
    walks = [ENV.reset(task).walk for task in TASKS]
    again = Crossings()
    assert [again.reset(task).walk for task in reversed(TASKS)] == walks[::-1]
    assert len({str(walk) for walk in walks}) == len(TASKS)
    assert random.getstate() == state
    # on every machine: the first places of a walk, written down once
    assert ENV.reset(0).prompt.splitlines()[-1] == FIRST
    assert [right_way(sign) for sign in SIGNS[:8]] == WAYS_OF_SIGNS


@pytest.mark.parametrize("crossings, guarded, needed", [(16, 10, 7), (5, 5, 1), (3, 1, 1)])
def test_a_walk_has_as_many_guarded_places_as_it_says(crossings, guarded, needed):
    env, places = Crossings(crossings, guarded, needed), Counter()
    for task in range(40):
        walk = env.reset(task).walk
        assert len(walk) == crossings and sum(place in GUARDED for place, _ in walk) == guarded
        assert all(place in GUARDED + OPEN and sign in SIGNS for place, sign in walk)
        places.update(turn for turn, (place, _) in enumerate(walk) if place in GUARDED)
    assert len(places) == crossings  # a guarded place may be anywhere
    assert f"{crossings} crossings" in env.name


def test_a_sign_has_one_right_way_and_another_habit():
    ways = Counter(right_way(sign) for sign in SIGNS)
    assert ways.keys() == {*WAYS} and len({*SIGNS}) == len(SIGNS)
    assert all(wrong_habit(sign) in WAYS and wrong_habit(sign) != right_way(sign) for sign in SIGNS)


@pytest.mark.parametrize("needed", (1, 7, 10))
@pytest.mark.parametrize("rights", (0, 1, 6, 7, 10))
def test_the_outcome_is_1_where_enough_guarded_places_were_answered_right(needed, rights):
    episode, total, seen = Crossings(16, 10, needed).reset(3), 0.0, []
    for turn, (place, _) in enumerate(episode.walk):
        right, guarded = best(episode), place in GUARDED
        wrong = next(way for way in WAYS if way != right)
        answer = right if episode.rights < rights else wrong
        assert episode.anchor.startswith(f"{turn} {place}")
        observation, reward, done, info = episode.step(said(answer))
        total += reward
        assert info["valid"] and done == (turn == 15)
        assert info["progress"] == (0.0 if not guarded else 1.0 if answer == right else -1.0)
        assert info["score"] == min(1.0, episode.rights / needed)
        assert info["anchor"] == episode.anchor and reward == float(info["success"])
        seen.append(observation)
    assert episode.rights == rights and total == float(rights >= needed)
    assert seen == [" ".join(pair) for pair in episode.walk[1:]] + ["end"]
    with pytest.raises(RuntimeError):
        episode.step(said("north"))


HOSTILE = ["", "north", "<action>north</action", "<think></think><action>up</action>", "\0" * 9999]
HOSTILE += ["<action>north</action><action>east</action>", "[" * 10**6, "\ud800\u2028\x1b[2J"]
HOSTILE += [said("north east"), said("NORTH"), said(""), said("north") * 2, f"{said('north')} ok"]


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: ascii(text[:20]))
def test_bad_text_is_an_invalid_answer(text):
    """Time passes, nothing else happens; at a guarded place it is no right answer either."""
    episode = ENV.reset(ENV.train_tasks[0])
    for turn in range(16):
        guarded = episode.walk[turn][0] in GUARDED
        observation, reward, done, info = episode.step(text)
        assert not info["valid"] and not info["success"] and reward == 0.0
        assert observation.startswith(INVALID) and done == (turn == 15)
        assert info["progress"] == (-1.0 if guarded else 0.0) and info["score"] == 0.0
    with pytest.raises(RuntimeError):
        episode.step(text)


def test_the_prompt_tells_how_to_answer():
    prompt = ENV.reset(0).prompt
    assert all(word in prompt for word in (*WAYS, *GUARDED, said("north")))


@pytest.mark.parametrize("numbers", [(16, 17, 7), (16, 10, 11), (3, 10, 7), (4, 0, 0)])
def test_what_cannot_be_is_refused_in_one_line(numbers):
    with pytest.raises(ValueError):
        Crossings(*numbers)
    world = SimpleNamespace(**dict(zip(("crossings", "guarded", "needed"), numbers)))
    with pytest.raises(SystemExit) as stop:
        Crossings.from_args(SimpleNamespace(world=world, max_steps=16))
    assert stop.value.code.startswith("--crossings, --guarded, --needed: ")
    assert len(stop.value.code.splitlines()) == 1


def test_flags_make_the_world():
    world = SimpleNamespace(crossings=6, guarded=4, needed=2)
    env = Crossings.from_args(SimpleNamespace(world=world, max_steps=6))
    assert (env.crossings, env.guarded, env.needed) == (6, 4, 2)


def test_signs_are_as_many_as_the_flag_says():
    world = SimpleNamespace(crossings=16, guarded=10, needed=7, signs=8)
    env = Crossings.from_args(SimpleNamespace(world=world, max_steps=16))
    seen = {sign for task in range(100) for _, sign in env.walk(task)}
    assert len(seen) == 8 < len({sign for task in range(100) for _, sign in ENV.walk(task)})
    for signs in (0, 41):
        with pytest.raises(ValueError, match=f"signs {signs} "):
            Crossings(signs=signs)


@pytest.mark.parametrize("noise", (0.0, 0.4))
def test_the_expert_is_right_half_of_the_time(noise):
    """Where it is not, it follows the sign's wrong habit; noise is a share of any ways."""
    rng, answers = random.Random(1), Counter()
    for task in range(200):
        episode = ENV.reset(task)
        for text in expert(episode, noise, rng):
            place, sign = episode.walk[episode.turn]
            way = text.removeprefix("<think>go</think><action>").removesuffix("</action>")
            kinds = {right_way(sign): "right", wrong_habit(sign): "habit"}
            if place in GUARDED:
                answers[kinds.get(way, "other")] += 1
            else:
                answers[way] += 1
            assert episode.step(text)[3]["valid"]
        assert episode.done
    shares = {kind: answers[kind] / 2000 for kind in ("right", "habit", "other")}
    expected = {"right": 0.5 - 0.25 * noise, "habit": 0.5 - 0.25 * noise, "other": 0.5 * noise}
    assert shares == pytest.approx(expected, abs=0.05)
    assert [answers[way] / 1200 for way in WAYS] == pytest.approx([0.25] * 4, abs=0.05)


# ------------ what a step was worth ------------


def chance(right, rights: int, needed: int) -> float:
    """P(success | rights so far), summed over every way in which the later steps may go."""
    later, total = [p for p in right if p is not None], 0.0
    for answers in itertools.product((False, True), repeat=len(later)):
        if rights + sum(answers) >= needed:
            weight = 1.0
            for p, answer in zip(later, answers):
                weight *= p if answer else 1 - p
            total += weight
    return total


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("needed", (1, 3, 5, 8))
def test_advantages_are_those_of_every_later_answer_enumerated(seed, needed):
    """Also where success is certain or out of reach, and of probabilities 0 and 1."""
    rng = random.Random(seed)
    sure = [0.0, 1.0] if seed % 3 == 0 else []
    draws = [None, *sure, *(rng.random() for _ in range(4))]
    right = [rng.choice(draws) for _ in range(9)]
    answers = [rng.random() < (0.5 if p is None else p) for p in right]
    expected, rights = [], 0
    for turn, (p, answer) in enumerate(zip(right, answers)):
        before = chance(right[turn:], rights, needed)
        rights += p is not None and answer
        expected.append(chance(right[turn + 1 :], rights, needed) - before)
    ours = advantages(right, answers, needed)
    assert ours == pytest.approx(expected, abs=1e-12)
    outcome = float(rights >= needed)
    assert sum(ours) == pytest.approx(outcome - chance(right, 0, needed), abs=1e-12)
    assert all(ours[turn] == 0 for turn, p in enumerate(right) if p is None)


def test_advantages_by_hand():
    assert advantages([0.5], [True], 1) == [0.5] and advantages([0.5], [False], 1) == [-0.5]
    assert advantages([0.5, 0.5], [True, False], 2) == [0.25, -0.5]
    assert advantages([0.5, None, 0.5], [True, True, True], 1) == [0.25, 0.0, 0.0]
    assert advantages([], [], 1) == []


# ------------ the benchmark ------------


def test_what_is_stored_is_not_run_again(tmp_path, monkeypatch, capsys):
    """A seed more adds its runs, and the table is of all; the ceiling has the first row's flags."""
    ends = {"rloo --clip 1": 0.4, "truth --clip 1": 0.9, "istar": 0.6}
    made = []

    def run_row(row, world, seed, directory, common):
        made.append((row, seed))
        found = {"row": row, "seed": seed, "seconds": 60.0}
        return [found | {"iteration": i, "success": ends[row] * i / 60} for i in (0, 60)]

    monkeypatch.setattr(credit, "run_row", run_row)
    monkeypatch.setattr(credit, "RESULTS", tmp_path)
    for seeds in (["1"], ["1", "2"]):
        words = ["credit.py", "--runs-dir", str(tmp_path), "--seeds", *seeds, "--rows", *ends]
        monkeypatch.setattr("sys.argv", words)
        credit.main()
    assert made == [(row, seed) for seed in (1, 2) for row in ends]
    lines = (tmp_path / "credit.md").read_text().splitlines()[2:]
    cells = [[cell.strip() for cell in line.split("|")][1:] for line in lines]
    assert [(row[0], row[1], row[6]) for row in cells] == [
        ("`rloo --clip 1`", "2", "0.00"),
        ("`truth --clip 1`", "2", "1.00"),
        ("`istar`", "2", "0.40"),
    ]
    assert (tmp_path / "credit.png").stat().st_size > 1000


@pytest.mark.parametrize("world, name", credit.WORLDS.items())
def test_a_row_is_a_webshop_script_with_another_world(world, name, tmp_path):
    module = credit.load_script("istar_webshop_ablations", world, tmp_path)
    assert getattr(module, name).__module__.startswith(f"envs.{world}")
    check_words(shlex.split(credit.FLAGS[world]), kinds_of(module.Args))


def test_rows_of_unequal_length_are_compared_by_iteration_and_at_equal_time():
    """b is twice as slow: after 60 s it has done 30 of its iterations. Its second seed alone has no
    partner."""

    def run(row, seed, success, seconds):
        return [
            {"row": row, "seed": seed, "iteration": i, "success": x, "seconds": seconds * i}
            for i, x in success.items()
        ]

    rows = run("a", 1, {0: 0.0, 40: 0.4, 60: 0.5}, 1.0)
    rows += run("b", 1, {0: 0.0, 20: 0.2, 40: 0.6}, 2.0)
    rows += run("b", 2, {0: 0.0, 20: 0.9, 40: 0.9}, 2.0)
    titles, _, *lines = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in credit.table(rows).splitlines()
    ]
    found = dict(zip(titles, lines[1]))
    assert found["more than a"] == "0.200"  # 0.6 - 0.4, after 40 iterations
    assert found["at equal time"] == "-0.100"  # 0.4 - 0.5, after 60 s
    assert found["more area than a"] == "0.050"  # (0.1 + 0.4) / 2 - 0.2, up to iteration 40
    assert found["seeds"] == "2" and found["seconds an iteration"] == "2.000 ± 0.000"
    assert found["success at 40"].startswith("0.750") and found["success at 60"] == ""
    shown = credit.table(rows, ("row", "success at", "at")).splitlines()[0]
    assert shown == f"| {' | '.join([titles[0], *titles[2:6], 'at equal time'])} |"
    assert titles[2:6] == [f"success at {i}" for i in (0, 20, 40, 60)]
