"""Speed and memory of the environments WebShop and ALFWorld, one core, no network.

    python benchmarks/environments.py                       # on the tests' recorded catalogue
    python benchmarks/environments.py --webshop-data DIR    # on the published files

Prints one line per figure: name, value, unit, and the bound it is held to.
"""

import argparse
import gc
import random
import sys
import time
import tracemalloc
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from envs.alfworld import AlfWorld
from envs.webshop import (
    SearchIndex,
    Session,
    WebShop,
    contents,
    load_catalog,
    make_goals,
    tag_names,
)


def report(name, value, unit, bound):
    print(f"{name:<44}{value:>12,.2f} {unit:<10} {bound}", flush=True)


def random_steps(catalog, goals, number, seed=0):
    """Take `number` steps of random shopping: a search where there is a bar, else any clickable."""
    draw = random.Random(seed)
    taken = 0
    while taken < number:
        session = Session(catalog, draw.choice(goals))
        for _ in range(10):
            available = session.available_actions()
            if available["has_search_bar"]:
                session.step(f"search[{session.goal[draw.choice(('name', 'instruction_text'))]}]")
            elif available["clickables"]:
                session.step(f"click[{draw.choice(available['clickables'])}]")
            taken += 1


def session_speed(catalog, goals, number=20_000):
    """Steps a second of processor time, after a warm-up."""
    random_steps(catalog, goals, 500)
    start = time.process_time()
    random_steps(catalog, goals, number, seed=1)
    return number / (time.process_time() - start)


def session_memory(catalog, goals, number):
    """Bytes that `number` running sessions hold, each on a product page after a search.

    One more, the first, is not counted.
    """
    kept = []
    tracemalloc.start()
    for i in range(number + 1):
        session = Session(catalog, goals[i % len(goals)])
        session.step(f"search[{session.goal['name']}]")
        session.step(f"click[{list(session.clickables)[-1]}]")
        kept.append(session)
        if i == 0:
            gc.collect()
            before = tracemalloc.get_traced_memory()[0]
    gc.collect()
    after = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return after - before


def index_speed(number):
    """(seconds to build the index of `number` documents, seconds of one search there)."""
    documents = []
    seed = 0
    while len(documents) < number:
        seed += 1
        products = load_catalog(None, seed=seed).products
        documents += [(f"{seed}-{p['asin']}", contents(p)) for p in products]
    documents = documents[:number]
    start = time.perf_counter()
    index = SearchIndex(documents)
    built = time.perf_counter() - start
    draw = random.Random(0)
    queries = [" ".join(draw.sample(draw.choice(documents)[1].split(), 8)) for _ in range(200)]
    start = time.perf_counter()
    for query in queries:
        index.search(query)
    return built, (time.perf_counter() - start) / len(queries)


def random_house_steps(env, tasks, number, seed=0):
    """Take `number` steps of random admissible commands, the world's own work included."""
    draw = random.Random(seed)
    taken = 0
    while taken < number:
        episode = env.reset(draw.choice(tasks))
        while not episode.done and taken < number:
            words = draw.choice(episode.play.admissible)
            episode.step(f"<think>now</think><action>{words}</action>")
            taken += 1


def house_speed(number):
    """(steps a second, seconds of a first reset at most, of another one in the mean)."""
    gc.collect()
    gc.freeze()  # what the other world keeps is not searched in this one's resets
    env = AlfWorld()
    tasks, firsts = env.train_tasks[:200], []
    for task in tasks:
        start = time.process_time()
        env.reset(task)
        firsts.append(time.process_time() - start)
    start = time.process_time()
    for _ in range(200):
        env.reset(tasks[-1])
    again = (time.process_time() - start) / 200
    random_house_steps(env, tasks[-16:], 500)
    start = time.process_time()
    random_house_steps(env, tasks[-16:], number, seed=1)
    return number / (time.process_time() - start), max(firsts), again


def house_memory(games, group):
    """Bytes that `group` episodes of each of so many games hold, after 20 steps each."""
    env, draw = AlfWorld(), random.Random(0)
    gc.collect()
    tracemalloc.start()
    episodes = [env.reset(task) for task in env.train_tasks[:games] for _ in range(group)]
    for episode in episodes:
        for _ in range(20):
            if not episode.done:
                words = draw.choice(episode.play.admissible)
                episode.step(f"<think>now</think><action>{words}</action>")
    gc.collect()
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return held


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    data = str(ROOT / "tests/data/webshop/data")
    parser.add_argument("--webshop-data", default=data, help="directory of a catalogue")
    parser.add_argument("--steps", type=int, default=20_000, help="session steps to time")
    parser.add_argument("--documents", type=int, default=20_000, help="documents to index")
    args = parser.parse_args()

    start = time.perf_counter()
    env = WebShop()
    report("own shop, start", time.perf_counter() - start, "s", "")
    print(env.name)
    start = time.perf_counter()
    catalog = load_catalog(args.webshop_data)
    goals = make_goals(catalog, True, 0)
    tag_names(p["name"] for p in catalog.products)
    catalog.search("warm up")
    report("catalogue, start", time.perf_counter() - start, "s", "")
    print(f"{args.webshop_data}: {len(catalog.products)} products, {len(goals)} goals")
    report("session steps", session_speed(catalog, goals, args.steps), "steps/s", "at least 5,000")
    report("a second episode", session_memory(catalog, goals, 1) / 1024, "KB", "under 50")
    memory = session_memory(catalog, goals, 1000) / 2**20
    report("1,000 sessions on one catalogue", memory, "MB", "")
    built, search = index_speed(args.documents)
    report(f"index of {args.documents:,} documents, built", built, "s", "under 30")
    report("one search there", search * 1e3, "ms", "under 3")

    print(AlfWorld().name)  # the engine: textworld 1.7.0, measured elsewhere on recorded games
    speed, first, again = house_speed(args.steps)
    report("alfworld, steps", speed, "steps/s", "at least 5,000; the engine: 10 to 43")
    report("alfworld, a game's first reset at most", first * 1e3, "ms", "under 20")
    report("alfworld, another reset", again * 1e3, "ms", "under 2; the engine: 160 to 1,700")
    report("alfworld, 128 episodes of 16 games", house_memory(16, 8) / 2**20, "MB", "under 60")


if __name__ == "__main__":
    main()
