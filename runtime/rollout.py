"""Episodes that are played side by side: one coroutine each, in one event loop."""

import asyncio
import random
import sys
from collections import Counter
from contextlib import aclosing

from runtime.data import Trajectory
from runtime.distributed import processes
from runtime.engines import served
from runtime.view.terminal import warn
from runtime.worlds import Door, WorldFault, asked, state_of, summary_of, task_of

import torch
from tqdm import tqdm

FAILED_SHARE = 0.2  # of a rollout's episodes; if more worlds raise, the run ends


class Stage:
    """What episodes are played with; a Run is one too."""

    def __init__(self, engine, chat, args):
        self.engine, self.chat, self.args = engine, chat, args
        self.faults = 0  # episodes whose world raised


def rollout(run, play, env, tasks: list[int], sampling) -> list[Trajectory]:
    """An episode for each entry of tasks, played side by side by `play` of the script; this process
    plays its share, and all get all trajectories, in the order of tasks. Those whose world raised
    are left out, named and counted (run.faults). Exits with one line where more than a fifth are,
    or where none is left."""
    tasks = [task_of(env, task) for task in tasks]
    found = {task: asked(env, "together", task, task) for task in tasks}  # which are not divided
    units = [state_of(env, f"together({task})", found[task]) for task in tasks]
    every, count, rank = [*dict.fromkeys(units)], processes.count(), processes.rank()
    ours = {*every[len(every) * rank // count : len(every) * (rank + 1) // count]}
    mine = [task for task, unit in zip(tasks, units) if unit in ours]
    faults: list[str] = []  # what worlds raised
    drawn = random.getstate()  # a world may draw from it
    with torch.random.fork_rng(enabled=count > 1):  # several draw the same numbers afterwards
        if count > 1:
            torch.manual_seed(torch.initial_seed() + 7919 * (1 + rank))
        played = asyncio.run(play_all(run, play, env, mine, sampling, faults))
    random.setstate(drawn)
    faults = processes.gather(faults)
    run.faults += len(faults)
    if len(faults) > FAILED_SHARE * len(tasks):
        reason, number = Counter(faults).most_common(1)[0]
        sys.exit(f"stopped: {len(faults)} of {len(tasks)} episodes failed ({number} x {reason})")
    if played := processes.gather(played):
        return played
    summary_of(env)  # which may say why
    sys.exit(f"stopped: none of {len(tasks)} episodes came to an outcome")


async def play_all(run, play, env, tasks, sampling, faults: list[str]) -> list[Trajectory]:
    """The trajectories of these tasks, without those whose world raised. Raises EngineError."""
    bar = tqdm(total=len(tasks), desc="episodes", leave=False, disable=None, unit="episode")
    begun, firsts = {}, {}  # firsts: {task: its first episode}

    async def one(task: int) -> Trajectory | None:
        try:
            async with aclosing(Door(env, task, begun)) as door:
                t = await play(door, run.engine, run.chat, task, sampling, run.args)
        except WorldFault as fault:
            if not fault.counted:
                warn(f"{fault}; this episode is left out")
                faults.append(str(fault).partition(": ")[2])
            return None
        t.anchor, seen = door.episode.anchor, door.episode.prompt
        first = firsts.setdefault(task, door.episode)
        equal = "the same as in the task's other episodes"
        is_same = (seen, seen.picture) == (first.prompt, first.prompt.picture)
        door.require(is_same, "prompt", seen, equal)
        door.require(t.anchor == first.anchor, "anchor", t.anchor, equal)
        if not t.steps:
            most = run.args.max_context_tokens
            sys.exit(f"--max-context-tokens {most}: too few for task {task}'s prompt and an answer")
        bar.update()
        return t

    try:
        played = await served(run.engine, [one(task) for task in tasks])
        return [t for t in played if t is not None]
    finally:
        bar.close()
