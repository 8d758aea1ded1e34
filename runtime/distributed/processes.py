"""Several processes, on one machine or more, that share a training (docs/many-gpus.md). Each plays
whole groups with an engine of its own, and all get all trajectories. Passes are divided and
gradients summed: an update is that of one process with the same trajectories."""

import atexit
import ctypes
import os
import sys
from datetime import timedelta
from pathlib import Path

from runtime.distributed import fsdp

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object, reduce

GIVES = "torchrun --nproc_per_node N script.py --processes N starts N (accelerate launch --cpu: 1)"
gather = gather_object  # the items of all processes' lists, in the processes' order


def start(args) -> torch.device:
    """This process's device, once it knows the others, whom the engine finds connected. Exits
    where the launcher started another number of processes than --processes."""
    run_args = args.run_args
    number, launched = run_args.processes, int(os.environ.get("WORLD_SIZE", 1))
    if launched != number:
        sys.exit(f"--processes {number}: {launched} started; {GIVES}")
    if number % (copies := fsdp.copies()):
        sys.exit(f"--processes {number}: {copies} copies of the policy have to divide it")
    tasks = {"tasks-per-iteration": args.tasks_per_iteration, "eval-tasks": run_args.eval_tasks}
    for flag, given in tasks.items():
        if given < number:
            sys.exit(f"--{flag} {given}: fewer than --processes {number}")
    if number > 1:
        local, neighbours = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
        cores = sorted(os.sched_getaffinity(0), key=place_of)
        first, last = (n * len(cores) // neighbours for n in (local, local + 1))
        os.sched_setaffinity(0, cores[first:last] or cores)  # else every engine pins the same ones
        if neighbours == launched:
            os.environ.setdefault("VLLM_HOST_IP", "127.0.0.1")
    state = PartialState(cpu=not torch.cuda.is_available(), timeout=timedelta(hours=2))
    if fsdp.wanted() and (args.policy_lora_rank or run_args.engine == "hf"):
        sys.exit("--policy-lora-rank, --engine hf: FSDP shards a policy that is trained whole")
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"  # else the first process alone loads
    if not state.is_main_process:
        sys.stdout = open(os.devnull, "w")
        sys.stderr.isatty = lambda: False  # without progress bars
    if state.device.type == "cpu":
        keep_freed_memory()
    return state.device


def place_of(core: int) -> tuple:
    """What sorts cores so that NUMA nodes, and the threads of a physical core, stay together."""
    home = Path(f"/sys/devices/system/cpu/cpu{core}")
    nodes, threads = home.glob("node*"), home.glob("topology/thread_siblings_list")
    return *(node.name for node in nodes), *(file.read_text() for file in threads), core


def keep_freed_memory() -> None:
    """Have glibc keep what large tensors free for the next ones: 6 to 11 % of an iteration
    (benchmarks/results/throughput-threads.md). MALLOC_* in the environment comes first."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries have none
    if mallopt and not any(name.startswith("MALLOC_") for name in os.environ):
        mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD [bytes]
        mallopt(-3, 2**30)  # M_MMAP_THRESHOLD [bytes]


def tell_refusal(line: str) -> None:
    """Connect to the others, who would wait for this process, and tell them why it ends."""
    PartialState(cpu=not torch.cuda.is_available(), timeout=timedelta(minutes=2))
    gather([{"refused": line}])


def count() -> int:
    return PartialState().num_processes


def rank() -> int:
    return PartialState().process_index


def wait() -> None:
    PartialState().wait_for_everyone()


def end() -> None:
    """End this process, with status 0, once all have come here, if there are several. At the
    interpreter's own end a thread of gloo with a tensor left would abort."""
    if count() == 1:
        return
    wait()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(0)


def total(values):
    """The sum over processes of a tensor or of a list of numbers."""
    if count() == 1:
        return values
    tensor = torch.as_tensor(values)
    summed = reduce(tensor.to(PartialState().device), "sum").to(tensor.device)
    return summed if isinstance(values, torch.Tensor) else summed.tolist()


def broadcast(value):
    """The first process's value, whatever the others have."""
    return broadcast_object_list([value])[0]
