"""Episodes that are played side by side: one coroutine each, in one event loop."""

import asyncio
import random
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import aclosing

from runtime.data import Trajectory
from runtime.distributed import processes
from runtime.engines import served
from runtime.view.terminal import warn
from runtime.worlds import Door, WorldFault, asked, state_of, summary_of, task_of

import torch
from tqdm import tqdm


class Stage:
    """What episodes are played with; a Run is one too."""

    def __init__(self, engine, chat, args):
        self.engine, self.chat, self.args = engine, chat, args
        self.faults, self.failed = 0, Counter()  # episodes whose world raised; those of each task


def rollout(run, play, env, tasks: list[int], sampling, played=None) -> list[Trajectory]:
    """An episode for each entry of tasks, by `play` of the script; all processes get all, in their
    order. Those whose world raised are left out and counted (run.faults). Exits with one line where
    more than a fifth are, a task's raised three times, or none is left. played: by play_ahead."""
    drawn, count = random.getstate(), processes.count()  # a world may draw from it
    with torch.random.fork_rng(enabled=count > 1):  # several draw the same numbers afterwards
        if count > 1:
            torch.manual_seed(torch.initial_seed() + 7919 * (1 + processes.rank()))
        ours, faults = played or asyncio.run(play_all(run, play, env, tasks, sampling))
    random.setstate(drawn)
    faults = processes.gather(faults)
    run.faults += len(faults)
    for task, flag in (fault for fault in faults if fault[1] == "--max-context-tokens"):
        sys.exit(f"stopped: {flag} {run.args.max_context_tokens}: too few to answer task {task}")
    if len(faults) > 0.2 * len(tasks):
        reason, number = Counter(reason for _, reason in faults).most_common(1)[0]
        sys.exit(f"stopped: {len(faults)} of {len(tasks)} episodes failed ({number} x {reason})")
    for task, reason in faults:
        run.failed[task] += 1
        if run.failed[task] == 3:
            sys.exit(f"stopped: task {task} failed three times ({reason})")
    if trajectories := processes.gather(ours):
        return trajectories
    summary_of(env)  # which may say why
    sys.exit(f"stopped: none of {len(tasks)} episodes came to an outcome")


def play_ahead(leaving, *given):
    """The future of what play_all returns: a thread plays until `leaving`, a stack, is closed."""
    loop = leaving.enter_context(asyncio.Runner(loop_factory=asyncio.new_event_loop)).get_loop()
    task = loop.create_task(play_all(*given))
    loop.run_until_complete(asyncio.sleep(0))  # a reset may draw what the trainer draws from too
    played = ThreadPoolExecutor(1).submit(loop.run_until_complete, task)
    leaving.callback(wait, [played])
    leaving.callback(loop.call_soon_threadsafe, task.cancel)
    return played


async def play_all(run, play, env, tasks, sampling) -> tuple[list[Trajectory], list[tuple]]:
    """(trajectories, task and what its world raised of the others) of this process's share."""
    tasks = [task_of(env, task) for task in tasks]
    units = {t: state_of(env, f"together({t})", asked(env, "together", t, t)) for t in tasks}
    every, count, rank = [*dict.fromkeys(units.values())], processes.count(), processes.rank()
    ours = {*every[len(every) * rank // count : len(every) * (rank + 1) // count]}
    mine, faults = [task for task in tasks if units[task] in ours], []
    begun, firsts = {}, {}  # firsts: {task: its first episode}

    async def one(task: int) -> Trajectory | None:
        try:
            async with aclosing(Door(env, task, begun)) as door:
                t = await play(door, run.engine, run.chat, task, sampling, run.args)
        except WorldFault as fault:
            if not fault.counted:
                warn(f"{fault}{fault.place}; this episode is left out")
                faults.append((task, str(fault).partition(": ")[2]))
            return None
        t.anchor, seen = door.episode.anchor, door.episode.prompt
        first = firsts.setdefault(task, door.episode)
        equal = "the same as in the task's other episodes"
        is_same = (seen, seen.picture) == (first.prompt, first.prompt.picture)
        door.require(is_same, "prompt", seen, equal)
        door.require(t.anchor == first.anchor, "anchor", t.anchor, equal)
        if not t.steps:
            return faults.append((task, "--max-context-tokens"))
        bar.update()
        return t

    with tqdm(total=len(mine), desc="episodes", leave=False, disable=None, unit="episode") as bar:
        played = await served(run.engine, [one(task) for task in mine])
    return [t for t in played if t is not None], faults
