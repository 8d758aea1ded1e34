"""Ten text games: do they run without a network, how fast, and what a random player scores.

    python benchmarks/textgames.py                # needs requirements-games.txt, and Java for twx
    python benchmarks/textgames.py --episodes 20

Prints the table of docs/worlds.md. A random player draws one of the game's actions each turn: those
that the game lists, or those below. Steps are counted a second of processor time, Java's included,
without the starts of episodes.
"""

import argparse
import os
import random
import socket
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from envs.textgames import GameError, TextGame, TextWorldExpress

WAYS = ("up", "down", "left", "right")
DIGITS = "0123456789"
GAMES = {  # the most steps of an episode, and how an action is drawn
    "textarena:FrozenLake-v0": (15, lambda draw: draw.choice(WAYS)),
    "textarena:2048-v0-ultra-easy": (30, lambda draw: draw.choice(WAYS)),
    "textarena:Blackjack-v0": (30, lambda draw: draw.choice(("hit", "stand"))),
    "textarena:Minesweeper-v0-small": (20, lambda draw: " ".join(draw.choices(DIGITS[:5], k=2))),
    "textarena:Wordle-v0": (6, lambda draw: "apple"),
    "gem:game:Sokoban-v0-easy": (20, lambda draw: draw.choice(WAYS)),
    "gem:game:GuessTheNumber-v0-hard": (7, lambda draw: str(draw.randint(1, 50))),
    "gem:game:Game2048-v0-easy": (50, lambda draw: draw.choice(WAYS)),
    "gem:game:Sudoku-v0-easy": (15, lambda draw: " ".join(draw.choices(DIGITS[1:5], k=3))),
    "twx:coin": (30, None),
    "twx:twc": (30, None),
    "twx:cookingworld": (30, None),
}


def local_only(host, *rest, find=socket.getaddrinfo, **more):
    """socket.getaddrinfo of this machine alone: TextWorldExpress speaks to its Java process."""
    if host not in (None, "localhost", "127.0.0.1"):
        raise OSError("no network")
    return find(host, *rest, **more)


def processor_time(env) -> float:
    """Seconds of this process, and of Java where it runs the game."""
    seconds = time.process_time()
    if env.package is TextWorldExpress:
        process = TextWorldExpress.java()._gateway.java_process.pid
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        seconds += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return seconds


def row(game: str, episodes: int) -> str:
    """A row of the table."""
    most, action = GAMES[game]
    try:
        env = TextGame(game, most)
    except GameError as error:
        return f"| `{game}` | no: {str(error)[:90]} | | | | | |"
    starts, scores, wins, steps, seconds = set(), [], 0, 0, 0.0
    for task in env.eval_tasks[:episodes]:
        episode, draw, began = env.reset(task), random.Random(f"player {task}"), processor_time(env)
        starts.add(episode.prompt)
        while not episode.done:
            words = action(draw) if action else draw.choice(episode.game.actions)
            _, reward, _, info = episode.step(f"<think>so</think><action>{words}</action>")
            steps += 1
        seconds += processor_time(env) - began
        scores.append(reward)
        wins += info["success"]
    shares = f"{wins / len(scores):.2f} | {sum(scores) / len(scores):.2f}"
    return f"| `{game}` | yes | {most} | {len(starts)} | {steps / seconds:,.0f} | {shares} |"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--episodes", type=int, default=128, help="of each game, of its panel")
    episodes = parser.parse_args().episodes
    socket.getaddrinfo = local_only
    starts = f"different first texts of {episodes}"
    print(f"| game | runs offline | most steps | {starts} | steps/s | success | score |")
    print("|---|---|---|---|---|---|---|")
    for game in GAMES:
        print(row(game, episodes), flush=True)


if __name__ == "__main__":
    main()
