"""WebShop: replays of the original's recorded answers, our own shop, the environment, broken data
and hostile text."""

import gc
import gzip
import json
import os
import random
import shutil
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import envs.webshop as webshop
from envs.webshop import (
    LARGE_FILES,
    NO_LIMIT,
    PRICE_LIMITS,
    SMALL_FILES,
    DataError,
    SearchIndex,
    Session,
    WebShop,
    WebShopArgs,
    analyze,
    contents,
    expert,
    fetch_hub,
    generate_shop,
    load_catalog,
    make_goals,
    parse_action,
    reward,
    world,
)
from envs.webshop.search import _stored_length

RECORDED = ROOT / "tests/data/webshop"


def golden(name):
    with gzip.open(RECORDED / f"golden/{name}.jsonl.gz", "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


@pytest.fixture(scope="module", autouse=True)
def cache_home(tmp_path_factory):
    """An empty cache of our own: tests neither read nor leave anything in the user's."""
    home = tmp_path_factory.mktemp("cache")
    before = os.environ.get("XDG_CACHE_HOME")
    os.environ["XDG_CACHE_HOME"] = str(home)
    yield home
    os.environ.pop("XDG_CACHE_HOME")
    if before is not None:
        os.environ["XDG_CACHE_HOME"] = before


@pytest.fixture(scope="module")
def catalog(cache_home):
    catalog = load_catalog(RECORDED / "data")
    catalog.prices.update((row["asin"], row["price"]) for row in golden("prices_human"))
    return catalog


@pytest.fixture(scope="module")
def goals():
    return golden("goals_human")


@pytest.fixture(scope="module")
def env(cache_home):
    return WebShop()


def respond(action, thought="go"):
    return f"<think>{thought}</think><action>{action}</action>"


# --- recorded answers of the original -------------------------------------------------------------


def test_products_and_documents_equal_the_original(catalog):
    recorded = golden("products_loaded")
    assert len(recorded) == len(catalog.products) == 334
    for row, product in zip(recorded, catalog.products):
        assert {key: product[key] for key in row} == row
    assert [(d["id"], d["contents"]) for d in golden("search_docs")] == [
        (p["asin"], contents(p)) for p in catalog.products
    ]
    assert catalog.skipped == {"asin nan or too long": 2, "asin seen before": 2}


def test_goals_equal_the_original_up_to_the_price_limit(catalog, goals):
    ours = make_goals(catalog, True, seed=0)
    assert len(ours) == len(goals)
    for a, b in zip(ours, goals):
        keys = b.keys() - {"idx", "price_upper", "instruction_text"}
        assert {k: a[k] for k in keys} == {k: b[k] for k in keys}
        assert (
            a["instruction_text"].split(", and price lower")[0]
            == b["instruction_text"].split(", and price lower")[0]
        )
        above = [p for p in PRICE_LIMITS if p > catalog.prices[a["asin"]]][:4]
        assert a["price_upper"] in above[1:] or (
            len(above) < 2 and a["price_upper"] == b["price_upper"] == NO_LIMIT
        )


def test_every_recorded_episode_replays(catalog, goals):
    steps = 0
    for episode in golden("episodes_human"):
        session = Session(catalog, goals[episode["goal_idx"]])
        available = session.available_actions()
        assert session.observation == episode["reset_obs"]
        assert [available["has_search_bar"], available["clickables"]] == episode["reset_avail"]
        for step in episode["steps"]:
            observation, score, done = session.step(step["a"])
            available = session.available_actions()
            answer = (
                observation,
                score,
                done,
                available["has_search_bar"],
                available["clickables"],
            )
            assert answer == tuple(step[k] for k in ("obs", "r", "d", "bar", "click")), (
                episode["ep"],
                step["a"],
            )
            steps += 1
        if "final" in episode:
            assert (session.score, session.info) == (
                episode["final"]["reward"],
                episode["final"]["info"],
            )
            assert session.done
    assert steps == 1004


def test_every_recorded_reward(catalog, goals):
    synthetic = make_goals(catalog, False, seed=0)
    for row in golden("rewards"):
        goal = goals[row["goal_idx"]] if row["goals"] == "human" else synthetic[row["goal_idx"]]
        if (
            row["goals"] == "synth"
        ):  # the limit itself was not recorded, only on which side of it the price was
            limit = row["price"] + 1 if row["info"]["r_price"] else row["price"] / 2
            goal = {**goal, "price_upper": limit}
        score, info = reward(catalog.by_asin[row["asin"]], goal, row["price"], row["options"])
        assert (score, info) == (row["reward"], row["info"]), row


def test_option_matching_colours_and_fuzzy_scores():
    assert webshop.COLOURS == json.loads((RECORDED / "colours.json").read_text())
    for row in golden("option_matrix"):
        chosen, wanted = row["purchased"], row["goal"]
        assert world._matched_options([chosen], [wanted]) == row["match_list"], row
        assert (
            world._matched_options([chosen], {"size": wanted}.items()) == row["match_dict_key_size"]
        ), row
        assert world._matched_options([chosen], [["size", wanted]]) == row["match_dict_key_size"], (
            row
        )
        assert world._plain_colour(chosen) == row["norm_purchased"]
        assert world._plain_colour(wanted) == row["norm_goal"]
    for a, b, score in golden("fuzz"):
        assert (world.fuzz.token_set_ratio(a, b) > 85) == (score > 85), (a, b)


def test_nouns_of_every_name():
    for row in golden("pos"):
        assert world._nouns_of(row["name"]) == [
            t.lower() for t, pos in row["tokens"] if pos in ("NOUN", "PROPN")
        ]


def test_every_analyser_row_and_ranking():
    for row in golden("analyzer"):
        assert analyze(row["text"]) == row["terms"], row["text"]
    index = SearchIndex([(d["id"], d["contents"]) for d in golden("search_docs")])
    for row in golden("search"):
        numbers, scores = index.scores(row["q"])
        assert [index.ids[i] for i in numbers] == index.search(row["q"]) == row["asins"], row["q"]
        assert scores.tolist() == pytest.approx(row["scores"], abs=2e-4)


def test_edge_calls(catalog, goals):
    product, goal = catalog.by_asin[goals[0]["asin"]], goals[0]
    calls = {
        "reset session out of range": lambda: goals[len(goals)],
        "reset session -1": lambda: Session(catalog, goals[-1]).observation,
        "step None": lambda: Session(catalog, goal).step(None),
        "get_reward price_upper=0": lambda: reward(product, {**goal, "price_upper": 0}, 10.0, {}),
        "get_reward price_upper=-1": lambda: reward(product, {**goal, "price_upper": -1}, 10.0, {}),
        "get_reward price None": lambda: reward(product, goal, None, {}),
        "get_reward no goal attributes": lambda: reward(
            product, {**goal, "attributes": []}, 10.0, {}
        ),
        "get_reward no goal options": lambda: str(
            reward(product, {**goal, "goal_options": []}, 10.0, {})
        ),
    }
    rows = golden("edge_calls")
    assert len(rows) == 16
    for row in rows:
        step = row["what"].removeprefix("step ")
        call = calls.get(row["what"]) or (lambda step=step: Session(catalog, goal).step(step)[0])
        if "error" in row:
            with pytest.raises((IndexError, TypeError, ZeroDivisionError)) as error:
                call()
            assert (error.type.__name__, str(error.value)) == (row["error"], row["msg"])
        elif row["what"] in calls:
            assert row["ok"].strip("'\"") == call().strip("'\"")
        elif step.endswith("]"):  # longer calls and answers were cut when recorded
            recorded, answer = row["ok"].strip("'\"").replace("\\'", "'"), call()
            shared = (
                min(len(recorded), len(answer)) if "<r>" not in step else answer.index("Next >")
            )
            assert recorded[:shared] == answer[:shared]


def test_a_session_survives_what_it_raises(catalog, goals):
    session = Session(catalog, goals[0])
    session.step("search[lamp]")
    before = session.observation, session.available_actions()
    for action in (
        "search[<c>]",
        "search[<a> x]",
        "search[" + " ".join(f"w{i}" for i in range(1025)) + "]",
    ):
        with pytest.raises((IndexError, TypeError, ValueError)):
            session.step(action)
        assert (session.observation, session.available_actions()) == before
    assert "Page 2" in session.step("click[next >]")[0]


# --- search ---------------------------------------------------------------------------------------


def test_lengths_as_one_byte_keeps_them():
    assert [_stored_length(n) for n in (0, 1, 39, 40, 41, 42, 55, 56, 57, 88, 100, 1000)] == [
        *(0, 1, 39, 40, 40, 42, 54, 56, 56, 88, 96, 984)
    ]


def test_ties_fall_to_the_smaller_id_and_empty_documents_do_not_count():
    index = SearchIndex(
        [("b", "red lamp"), ("a", "red lamp"), ("c", ""), ("d", "the"), ("e", "blue lamp")]
    )
    assert index.search("red") == ["a", "b"]
    assert index.search("lamp", k=2) == ["a", "b"]
    assert index.search("the") == index.search("") == index.search("zebra") == []
    assert index.idf[index.numbers["red"]] == pytest.approx(
        0.470004
    )  # ln(1 + 1.5 / 2.5): three documents have a term
    assert SearchIndex([]).search("red") == SearchIndex([("a", "")]).search("red") == []
    with pytest.raises(ValueError, match="1025 distinct terms"):
        index.search(" ".join(f"w{i}" for i in range(1025)))


def test_a_damaged_cache_is_rebuilt(tmp_path):
    documents = [("a", "red lamp"), ("b", "blue lamp")]
    first = SearchIndex(documents, tmp_path)
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    assert (
        SearchIndex(documents, tmp_path).search("red lamp")
        == first.search("red lamp")
        == ["a", "b"]
    )
    method = whole.index(b"PK\1\2") + 10  # of compression, in the zip file's directory
    unknown = whole[:method] + b"\xff" + whole[method + 1 :]
    torn = b"", b"{}", whole[: len(whole) // 2], whole[:200] + b"\0" * 40 + whole[240:]
    for damage in (*torn, unknown):
        path.write_bytes(damage)
        assert SearchIndex(documents, tmp_path).search("red lamp") == ["a", "b"]
        assert path.read_bytes() == whole
    assert [p.name for p in tmp_path.iterdir()] == [path.name]  # no temporary file is left behind
    assert SearchIndex(documents, tmp_path / "lamp.txt" / "x").search("red") == ["a"]
    readonly = tmp_path / "file"
    readonly.write_text("")
    assert SearchIndex(documents, readonly).search("red") == ["a"]  # a cache that cannot be written


def test_a_damaged_cache_of_nouns_is_rebuilt(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    names = ["Zinc Lantern for Camping", "Velvet Ottoman"]
    results = []
    for damage in (None, b"", b"[[], 3]", b'{"a": 1}', b"[[]"):
        for path in tmp_path.glob("istar/nouns-*.json"):
            path.write_bytes(damage)
        for name in names:
            world._nouns.pop(name, None)
        webshop.tag_names(names)
        results.append([world._nouns[name] for name in names])
    assert all(r == results[0] for r in results) and "lantern" in results[0][0]
    assert len(list(tmp_path.glob("istar/*"))) == 1


def test_twenty_thousand_documents():
    documents = []
    for seed in range(18):
        shop = load_catalog(None, seed=seed)
        documents += [(f"{seed}-{p['asin']}", contents(p)) for p in shop.products]
    documents = documents[:20_000]
    start = time.process_time()
    index = SearchIndex(documents)
    assert time.process_time() - start < 30
    draw = random.Random(0)
    queries = [" ".join(draw.sample(draw.choice(documents)[1].split(), 8)) for _ in range(100)]
    start = time.process_time()
    assert all(len(index.search(q)) == 50 for q in queries)
    assert (time.process_time() - start) / len(queries) < 0.003


# --- our own shop ---------------------------------------------------------------------------------


def test_the_shop_is_large_and_well_formed(env):
    products, goals = env.catalog.products, env.goals
    assert (
        len(products) >= 1000
        and len({p["query"] for p in products}) >= 25
        and not env.catalog.skipped
    )
    assert len(goals) >= 6000 and len({g["instruction_text"] for g in goals}) > 0.99 * len(goals)
    assert len(env.catalog.by_asin) == len(products) and max(len(p["asin"]) for p in products) <= 10
    assert all(
        4 <= len(p["Title"].split()) <= 10 and p["options"] and p["Attributes"] for p in products
    )
    assert all(0 < env.catalog.prices[p["asin"]] < 1000 and p["Description"] for p in products)
    for goal in goals:
        options = env.catalog.by_asin[goal["asin"]]["options"]
        assert len(goal["goal_options"]) == len(options)
        assert all(
            any(wish in values for values in options.values()) for wish in goal["goal_options"]
        )
    people = json.dumps([g["instruction_text"] for g in goals])
    assert people.isascii()
    assert (
        len(make_goals(env.catalog, False, 0)) > 6000
    )  # synthetic goals come out of the same shop


def test_other_seeds_make_other_shops_and_one_seed_one_shop():
    assert generate_shop(1) == generate_shop(1) != generate_shop(2)
    shop = load_catalog(None, num_products=50, seed=1)
    assert [p["asin"] for p in shop.products] == [row["asin"] for row in generate_shop(1)[0][:50]]
    assert shop.skipped["instruction without its product"] == 6 * (1152 - 50)


@pytest.mark.parametrize("seed", [0, 1])
def test_the_goal_is_reached_and_the_first_hit_is_not_enough(seed, env):
    shop = env.catalog if seed == 0 else load_catalog(None, seed=seed)
    goals = env.goals if seed == 0 else make_goals(shop, True, seed)
    by_sentence = by_words = 0
    scores = []
    for goal in goals[:500]:
        by_sentence += goal["asin"] in shop.search(goal["instruction_text"], 20)
        words = " ".join([*goal["attributes"], goal["query"], *goal["goal_options"]])
        by_words += goal["asin"] in shop.search(words, 20)
        session = Session(shop, goal)
        session.step(f"search[{goal['instruction_text']}]")
        first = next(text for text, (kind, _) in session.clickables.items() if kind == "product")
        session.step(f"click[{first}]")
        scores.append(session.step("click[buy now]")[1])
    assert by_sentence / 500 >= 0.95 and by_words / 500 >= 0.95
    assert sum(scores) / 500 < 0.35


# --- the environment ------------------------------------------------------------------------------


def test_the_same_task_in_three_processes():
    code = (
        "import hashlib, sys; sys.path.insert(0, sys.argv[1]); from envs.webshop import *\n"
        "for catalog in (load_catalog(None), load_catalog(sys.argv[2])):\n"
        "    for human in (True, False):\n"
        "        goals = make_goals(catalog, human, 3)\n"
        "        print(goals[7]['instruction_text'], goals[7]['price_upper'])\n"
        "        print(hashlib.sha256(repr((goals, catalog.prices)).encode()).hexdigest())\n"
    )
    outputs = [
        subprocess.run(
            [sys.executable, "-c", code, str(ROOT), str(RECORDED / "data")],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1", "2")
    ]
    assert outputs[0] == outputs[1] == outputs[2] and len(outputs[0].splitlines()) == 8


def test_members_of_a_group_see_the_same_task_and_tasks_do_not_overlap(env):
    assert env.eval_tasks == range(500) and env.train_tasks == range(500, len(env.goals))
    a, b = env.reset(17), env.reset(17)
    assert a.prompt == b.prompt and a.session is not b.session
    assert env.goals[17]["instruction_text"] in a.prompt and "click[search]" not in a.prompt
    assert len(webshop.RULES.split()) < 80
    assert "1152 products" in env.name and "6912 human goals" in env.name
    for task in (-1, len(env.goals) + 500):
        with pytest.raises(IndexError):
            env.reset(task)


def wanted(goal):
    """What is asked for of which product, whatever the words and the price."""
    options = goal["goal_options"]
    values = options.values() if isinstance(options, dict) else options
    return goal["asin"], frozenset(goal["attributes"]), frozenset(values)


def test_validation_goals_are_nobodys_else(env):
    tasks = env.validation_tasks
    assert tasks == range(len(env.goals), len(env.goals) + 500)
    goals = [env.goal(task) for task in tasks]
    assert not {wanted(goal) for goal in goals} & {wanted(goal) for goal in env.goals}
    texts = {goal["instruction_text"] for goal in goals}
    assert len(texts) == 500 and not texts & {goal["instruction_text"] for goal in env.goals}
    assert all(goal["asin"] in env.catalog.by_asin for goal in goals)
    again = WebShop()
    assert again.goals == env.goals and again.validation_goals == goals
    wins = 0
    for task in tasks[:100]:
        episode = env.reset(task)
        assert env.goal(task)["instruction_text"] in episode.prompt
        for response in expert(episode):
            info = episode.step(response)[3]
        wins += info["success"]
    assert wins == 100


@pytest.mark.parametrize("human", [True, False])
def test_validation_goals_of_published_data_are_of_the_other_kind(human):
    env = WebShop(RECORDED / "data", human_goals=human)
    other = make_goals(env.catalog, not human, 0)
    goals = [env.goal(task) for task in env.validation_tasks]
    assert 100 < len(goals) <= 500 and {*map(wanted, goals)} <= {*map(wanted, other)}
    assert not {wanted(goal) for goal in goals} & {wanted(goal) for goal in env.goals}
    assert env.goals == make_goals(env.catalog, human, 0)
    for task in env.validation_tasks[::25]:
        assert not env.reset(task).done


def test_a_product_of_too_many_options_leaves_validation_goals(data):
    values = [{"value": f"v {number}", "image": None} for number in range(30)]
    options = {f"option {number}": values for number in range(4)}
    edit(data / SMALL_FILES[0], lambda t: t[0].update(customization_options=options))
    with pytest.raises(DataError, match="810,000 combinations of its options"):
        WebShop(data, human_goals=False)
    env = WebShop(data)
    assert 100 < len(env.validation_tasks) <= 500
    first = env.catalog.products[0]["asin"]
    assert first not in {goal["asin"] for goal in env.validation_goals}


def instruction(goal):
    return goal["instruction_text"]


@pytest.mark.parametrize(
    "human, of, expected",
    [(True, instruction, (0, 0)), (True, wanted, (32, 5)), (False, instruction, (13, 3))],
)
def test_what_of_the_evaluation_tasks_is_trained_on(human, of, expected):
    """docs/worlds.md has these numbers: of all 500, and of the panel's 128."""
    env = WebShop(human_goals=human)
    trained = {of(env.goal(task)) for task in env.train_tasks}
    again = [of(env.goal(task)) in trained for task in env.eval_tasks]
    assert (sum(again), sum(again[:128])) == expected


def test_the_flags_make_the_environment():
    def flags(max_steps=10, **world):
        return SimpleNamespace(world=WebShopArgs(**world), max_steps=max_steps)

    env = WebShop.from_args(flags())
    assert env.name == "webshop (own shop): 1152 products, 6912 human goals, 10 steps"
    assert env.outcome == "success"
    data = str(RECORDED / "data")
    changed = dict(webshop_data=data, num_products=100, goals="synthetic", outcome="score")
    env = WebShop.from_args(flags(max_steps=4, **changed))
    assert env.name.startswith(f"webshop ({data}): ") and "synthetic" in env.name
    assert len(env.catalog.products) <= 100 and env.outcome == "score" and env.max_steps == 4
    with pytest.raises(SystemExit, match="--webshop-data nowhere: nowhere: missing"):
        WebShop.from_args(flags(webshop_data="nowhere"))
    with pytest.raises(SystemExit, match="--max-steps 0"):
        WebShop.from_args(flags(max_steps=0))


def test_few_goals_are_split_in_halves_and_none_is_an_error(data):
    env = WebShop(data, max_steps=3)
    assert env.eval_tasks == range(243) and env.train_tasks == range(243, 487)
    edit(data / SMALL_FILES[2], lambda t: t.clear())
    with pytest.raises(DataError, match="nothing to split"):
        WebShop(data)
    with pytest.raises(ValueError):
        WebShop(max_steps=0)


def test_the_expert_shops_well(env):
    wins = steps = 0
    for task in range(200):
        episode = env.reset(task)
        for response in expert(episode):
            thought = response[len("<think>") : response.index("</think>")]
            assert 3 <= len(thought.split()) <= 8
            observation, score, done, info = episode.step(response)
            assert info["valid"] and score == (info["score"] if done else 0.0)
        wins += info["success"]
        steps += episode.steps
    assert wins == 200 and steps / 200 < 6.5


def test_the_outcome_is_the_score_or_the_success(env):
    """A wrong product bought: its score is the outcome, or nothing is; the right one is 1 either
    way."""
    for outcome in ("score", "success"):
        shop, seen = WebShop(outcome=outcome), []
        for answers in (["search[shoes]", None, "click[buy now]"], expert):
            episode = shop.reset(0)
            if answers is expert:
                rewards = [episode.step(response)[1] for response in expert(episode)]
                assert rewards == [0.0] * (len(rewards) - 1) + [1.0]
                continue
            for action in answers:
                action = action or next(
                    a for a in episode.actions() if a[6:7] == "b" and a[7:-1].isdigit()
                )
                _, reward, done, info = episode.step(f"<think>so</think><action>{action}</action>")
                seen.append(reward)
            assert done and 0 < info["score"] < 1 and not info["success"] and seen[:2] == [0.0, 0.0]
        assert seen[2] == (info["score"] if outcome == "score" else 0.0)
    with pytest.raises(ValueError, match="--outcome"):
        WebShop(outcome="reward")


def test_the_noisy_expert_finds_its_way_back(env):
    wins = 0
    for task in range(100):
        episode = env.reset(task)
        for response in expert(episode, noise=0.2, rng=random.Random(task)):
            info = episode.step(response)[3]
            assert info["valid"]
        wins += info["success"]
    assert 60 < wins < 100


def test_the_expert_on_the_recorded_catalogue(catalog, goals):
    scores = []
    for goal in goals[:200]:
        episode = webshop.Episode(Session(catalog, goal), 15)
        for response in expert(episode):
            info = episode.step(response)[3]
        scores.append(info["score"])
    assert sum(scores) / len(scores) > 0.85


def test_an_episode_step_by_step(env):
    episode = env.reset(0)
    goal = env.goals[0]
    assert episode.actions() == ["search[words]"]
    page = episode.text()
    observation, score, done, info = episode.step("no tags at all")
    assert (score, done, info["valid"], info["success"]) == (0.0, False, False, False)
    assert observation.startswith("Invalid action: answer with <think>") and observation.endswith(
        page
    )
    assert episode.session.page_kind == "index" and episode.steps == 1
    assert not episode.step(respond("click[search]"))[3]["valid"]
    observation, _, _, info = episode.step(respond(f"search[{goal['name']}]"))
    assert (
        info["valid"]
        and goal["instruction_text"] not in observation
        and info["anchor"] in observation
    )
    assert "no search bar" in episode.step(respond("search[red]"))[0]
    assert "not on this page" in episode.step(respond("click[buy now]"))[0]
    episode.step(respond(f"click[{goal['asin']}]"))  # upper case is lowered
    assert episode.session.asin == goal["asin"]
    _, score, done, info = episode.step(respond("click[Buy Now]"))
    assert (
        done
        and 0 < score < 1
        and score == info["score"] == info["game_reward"]
        and info["progress"] == 0.0
    )
    hash(info["anchor"])
    with pytest.raises(RuntimeError):
        episode.step(respond("click[buy now]"))


def test_ten_steps_end_an_episode(env):
    episode = env.reset(1)
    dones = [episode.step("?")[2] for _ in range(10)]
    assert dones == [False] * 9 + [True]


def test_queries_that_fail_in_the_original_are_invalid_actions(env):
    for query, valid in (
        ("<c>", 0),
        ("<a> x", 0),
        ("<A>", 0),
        ("<c> beauty", 1),
        ("<q> hoodies", 1),
        ("<r>", 1),
        ("a", 1),
    ):
        episode = env.reset(2)
        assert episode.step(respond(f"search[{query}]"))[3]["valid"] == bool(valid), query


def test_only_a_thought_and_an_action_are_parsed():
    assert parse_action(respond("search[red shirt]")) == "search[red shirt]"
    assert (
        parse_action(" \n<think>\na\nb</think>\n <action> click[< prev] </action>\n")
        == "click[< prev]"
    )
    assert parse_action("<think></think><action>click[a]b]</action>") == "click[a]b]"
    refused = (
        "search[a]",
        "<action>search[a]</action>",
        "<think>a</think>",
        "<think>a</think>b<action>search[a]</action>",
        "<think>a</think><action>search[a]</action>.",
        "a<think>a</think><action>search[a]</action>",
        "<think>a</think><think>b</think><action>search[a]</action>",
        "<think>a</think><action>search[a]</action><action>search[b]</action>",
        "<action>search[a]</action><think>a</think>",
        "<THINK>a</THINK><action>search[a]</action>",
        *map(
            respond,
            (
                "",
                "search",
                "search[]",
                "search[ ]",
                "Search[a]",
                "buy[a]",
                "click[a",
                "search[a]x",
                "search a]",
            ),
        ),
        *map(
            respond,
            (
                "search[[a]]",
                "search[a[b]",
                "search[a\nb]",
                "search[a] search[b",
                f"search[{'a' * 500}]",
            ),
        ),
    )
    assert [parse_action(text) for text in refused] == [None] * len(refused)


def test_clickables_that_no_action_reaches_are_not_offered(catalog, goals):
    goal = next(g for g in goals if g["asin"] == "B0AWKWARD8")
    episode = webshop.Episode(Session(catalog, goal), 10)
    episode.step(respond(f"search[{goal['name']}]"))
    episode.step(respond("click[b0awkward8]"))
    assert "[2 pack]" in episode.session.clickables and "click[[2 pack]]" not in episode.actions()
    for action in episode.actions()[6:]:
        assert episode.step(respond(action))[3]["valid"], action


# --- hostile text ---------------------------------------------------------------------------------

PIECES = (
    "search[ click[ ] [ < prev next > back to search buy now description features reviews "
    "attributes <r> <a> <c> <q> <think> </think> <action> </action> search_results item_page "
    "item_sub_page done B0AWKWARD1 b0awkward9 other plain "
    "<b>html</b> &amp; \\u0000 %s {0} $1 (?:x)* ' \" \\ / | , . ; : ! ? - _ # @ ½ ﬁ ß İ ı ſ Σ ς "
    "抹茶 テキスト ภาษา 한국어 👩‍🔬 🇩🇪 1️⃣ ™ "
    "a\u0301 \u200b \u202e \ufeff \ud800 \x00 \x1b \x85 \u2028 \xa0 \n \r \t "
    "10,000 u.s.a don't shirt's lamp red large"
).split(" ")


def hostile(draw):
    kind = draw.random()
    if kind < 0.3:
        return "".join(
            chr(draw.choice((draw.randrange(128), draw.randrange(0x110000))))
            for _ in range(draw.randrange(30))
        )
    text = draw.choice(("", " ")).join(draw.choice(PIECES) for _ in range(draw.randrange(1, 12)))
    return draw.choice(("{}", "search[{}]", "click[{}]", "search[{}", "{}]")).replace("{}", text)


def raises_as_recorded(action):
    """Whether the original fails on this search: <a> as the first word, or <c> alone."""
    name, argument = webshop.split_action(action)
    words = (argument or "").lower().split(" ")
    return name == "search" and (words[0] == "<a>" or words == ["<c>"])


def test_a_hundred_thousand_hostile_actions(catalog, goals):
    draw = random.Random(0)
    known = 0
    for i in range(100_000):
        if i % 12 == 0:
            session = Session(catalog, draw.choice(goals))
        clickables = session.available_actions()["clickables"]
        action = (
            f"click[{draw.choice(clickables)}]"
            if clickables and draw.random() < 0.3
            else hostile(draw)
        )
        try:
            observation, score, _ = session.step(action)
            assert isinstance(observation, str) and 0.0 <= score <= 1.0
        except (IndexError, TypeError):
            assert raises_as_recorded(action), action
            known += 1
    assert known > 0


def test_a_hundred_thousand_hostile_responses(env):
    draw = random.Random(1)
    valid = 0
    for i in range(100_000):
        if i % 10 == 0:
            episode = env.reset(draw.randrange(len(env.goals)))
        roll = draw.random()
        action = draw.choice(episode.actions()) if roll < 0.3 else hostile(draw)
        text = (
            hostile(draw) if roll > 0.8 else respond(action, hostile(draw) if roll > 0.7 else "go")
        )
        info = episode.step(text)[3]
        valid += info["valid"]
        assert parse_action(text) is not None or not info["valid"]
        if episode.done:
            episode = env.reset(draw.randrange(len(env.goals)))
    assert 10_000 < valid < 60_000


def test_a_megabyte_is_read_in_no_time(env, catalog, goals):
    start = time.process_time()
    for piece in (
        "[",
        "]",
        "<think>",
        "</think>",
        " ",
        "a",
        "\n",
        "<action>",
        "ab ",
        "é",
        "search[",
        "[]",
    ):
        text = piece * (1_000_000 // len(piece))
        for whole in (
            text,
            respond(text),
            f"<think>{text}</think><action>search[a]</action>",
            f"<think>a</think>{text}",
        ):
            parse_action(whole)
            env.reset(0).step(whole)
        for action in (text, f"search[{text}", f"click[{text}]"):
            Session(catalog, goals[0]).step(action)
    Session(catalog, goals[0]).step(f"search[{'lamp ' * 200_000}]")
    assert time.process_time() - start < 20


# --- memory and speed -----------------------------------------------------------------------------


def test_a_second_episode_is_small_and_steps_are_fast(env, catalog, goals):
    def visit(task):
        episode = env.reset(task)
        for response, _ in zip(expert(episode), range(3)):
            episode.step(response)
        return episode

    kept = [visit(0)]
    gc.collect()
    tracemalloc.start()
    kept.append(visit(1))
    assert tracemalloc.get_traced_memory()[0] < 50 * 1024
    kept += [visit(task) for task in range(2, 1002)]
    assert tracemalloc.get_traced_memory()[0] < 1000 * 50 * 1024
    tracemalloc.stop()
    assert all(e.session.catalog is env.catalog for e in kept)

    draw = random.Random(0)
    taken = 0
    start = time.process_time()
    while taken < 5000:
        session = Session(catalog, draw.choice(goals))
        session.step(f"search[{session.goal['name']}]")
        taken += 1
        for _ in range(9):
            clickables = session.available_actions()["clickables"]
            if clickables:
                session.step(f"click[{draw.choice(clickables)}]")
                taken += 1
    assert taken / (time.process_time() - start) > 5000


# --- broken data ----------------------------------------------------------------------------------


@pytest.fixture
def data(tmp_path):
    """A copy of the recorded data files that a test may damage."""
    for name in SMALL_FILES:
        shutil.copy(RECORDED / "data" / name, tmp_path / name)
    return tmp_path


def edit(path, change):
    table = json.loads(path.read_text())
    change(table)
    path.write_text(json.dumps(table))


def test_a_missing_file_is_named(data):
    for name in SMALL_FILES:
        (data / name).rename(data / "away")
        with pytest.raises(DataError, match=f"missing {name}"):
            load_catalog(data)
        (data / "away").rename(data / name)
    with pytest.raises(DataError, match="nowhere.*missing"):
        load_catalog(data / "nowhere")


def test_a_file_cut_short_or_damaged_is_named(data):
    for name in SMALL_FILES:
        path = data / name
        whole = path.read_bytes()
        for damage in (
            whole[: len(whole) // 2],
            b"",
            whole.replace(b":", b";", 1),
            b"\xff" + whole,
            b"3",
            b"null",
        ):
            path.write_bytes(damage)
            with pytest.raises(DataError, match=name):
                load_catalog(data)
        path.write_bytes(whole)


@pytest.mark.parametrize(
    "file, change, message",
    [
        (0, lambda t: t[3].pop("asin"), "row 3: a product without an asin"),
        (0, lambda t: t[3].update(asin=None), "row 3: a product without an asin"),
        (0, lambda t: t.insert(5, "text"), "row 5: a product without an asin"),
        (0, lambda t: t[4].pop("name"), "row 4 .*: no name"),
        (
            0,
            lambda t: t[4].update(pricing="on request"),
            "row 4 .*: unreadable pricing 'on request'",
        ),
        (0, lambda t: t[4].update(pricing="$1.2.3"), "row 4 .*: unreadable pricing"),
        (
            0,
            lambda t: t[4].update(customization_options={"size": [{"image": None}]}),
            "row 4 .*: unreadable custom",
        ),
        (0, lambda t: t[4].update(images=[]), "row 4 .*: unreadable"),
        (0, lambda t: t[4].update(full_description=None), "row 4 .*: .*is no text"),
        (0, lambda t: t.clear(), "no product"),
        (1, lambda t: t.update(B0DPITCU8W={"attributes": "text"}), "row B0DPITCU8W: attributes"),
        (1, lambda t: t.update(B0DPITCU8W=3), "row B0DPITCU8W: attributes"),
        (
            2,
            lambda t: t["B0DPITCU8W"][1].pop("instruction"),
            "row B0DPITCU8W, instruction 1: damaged",
        ),
        (2, lambda t: t.update(B0DPITCU8W="text"), "row B0DPITCU8W: a list"),
    ],
)
def test_a_bad_row_is_named(data, file, change, message):
    edit(data / SMALL_FILES[file], change)
    with pytest.raises(DataError, match=f"{SMALL_FILES[file]}: {message}"):
        load_catalog(data)


def test_rows_that_the_original_skips_are_counted(data):
    edit(data / SMALL_FILES[0], lambda t: t.pop(0))  # B0DPITCU8W goes, its two instructions stay
    catalog = load_catalog(data)
    assert (
        catalog.skipped["instruction without its product"] == 2
        and "B0DPITCU8W" not in catalog.by_asin
    )
    goals = make_goals(catalog, True, 0)
    assert all(g["asin"] != "B0DPITCU8W" for g in goals)
    entries = sum(len(p.get("instructions", ())) for p in catalog.products)
    assert catalog.skipped["instruction without attributes"] == entries - len(goals) > 0
    edit(data / SMALL_FILES[1], lambda t: t["B038C3DZQ1"].update(instruction_attributes=[]))
    with pytest.raises(DataError, match="B038C3DZQ1"):
        make_goals(load_catalog(data), False, 0)


def test_the_large_files_are_taken_where_more_is_asked_for(data):
    for small, large in zip(SMALL_FILES, LARGE_FILES):
        if small != large:
            shutil.copy(data / small, data / large)
    edit(data / LARGE_FILES[0], lambda t: t.__delitem__(slice(10, None)))
    assert len(load_catalog(data).products) == 334
    assert len(load_catalog(data, num_products=2000).products) == 10
    (data / SMALL_FILES[0]).unlink()
    assert len(load_catalog(data).products) == 10


def test_the_hub_files_are_found_where_they_lie(data, monkeypatch):
    import huggingface_hub

    folder = data / "snapshot" / "webshop"
    folder.mkdir(parents=True)
    for name in SMALL_FILES:
        (data / name).rename(folder / name)
    calls = []
    monkeypatch.setattr(
        huggingface_hub,
        "snapshot_download",
        lambda *a, **k: calls.append((a, k)) or str(data / "snapshot"),
    )
    env = WebShop("hub")
    assert len(env.catalog.products) == 334 and "webshop (hub)" in env.name
    assert calls == [
        (
            ("YWZBrandon/webshop-data",),
            {"repo_type": "dataset", "allow_patterns": [f"*{name}" for name in SMALL_FILES]},
        )
    ]
    (folder / SMALL_FILES[2]).unlink()
    assert fetch_hub() == folder
    with pytest.raises(DataError, match="missing items_human_ins.json"):
        WebShop("hub")
