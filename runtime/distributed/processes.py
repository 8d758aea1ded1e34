"""Several processes, on one machine or more: one training, of which each has a share.

torchrun or accelerate launch starts them; accelerate carries what they tell each other. Every
process has an engine of its own and plays whole groups; then all of them have all trajectories, and
compute advantages and pairs of the whole batch alike. Forward and backward passes are divided,
micro-batch by micro-batch, and gradients are summed before each optimiser step: an update is that
of one process with the same trajectories, and all processes have the same weights. The first
process writes the run's files. With an accelerate configuration for FSDP the policy is sharded
between them.

With one process each function here hands back what it was given.
"""

import atexit
import ctypes
import os
import sys
from datetime import timedelta
from types import MethodType

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object, reduce
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, distribute_tensor

GIVES = (
    "torchrun --nproc_per_node N script.py --processes N starts N "
    "(accelerate launch --cpu starts one, silently)"
)


# What one process does alone, as hashing a large checkpoint, or waiting for a server that went away
PATIENCE = timedelta(hours=2)


class Quiet:
    """A stream that is no terminal, so that progress bars stay away from it."""

    def __init__(self, stream):
        self.stream = stream

    def __getattr__(self, name):
        return getattr(self.stream, name)

    def isatty(self) -> bool:
        return False


def start(args) -> torch.device:
    """This process's device, once it knows the others; before the engine, which finds them
    connected.

    Exits where the launcher started another number of processes than --processes says, or fewer
    tasks than that."""
    run_args = args.run_args
    number, launched = run_args.processes, int(os.environ.get("WORLD_SIZE", 1))
    if launched != number:
        sys.exit(f"--processes {number}: {launched} started; {GIVES}")
    tasks = {
        "--tasks-per-iteration": args.tasks_per_iteration,
        "--eval-tasks": run_args.eval_tasks,
    }
    for flag, given in tasks.items():
        if given < number:
            sys.exit(f"{flag} {given}: fewer than --processes {number}")
    if number > 1:
        divide_cores()
        if int(os.environ["LOCAL_WORLD_SIZE"]) == launched:
            os.environ.setdefault("VLLM_HOST_IP", "127.0.0.1")

    state = PartialState(cpu=not torch.cuda.is_available(), timeout=PATIENCE)
    if state.num_processes != number:
        sys.exit(f"--processes {number}: accelerate connected {state.num_processes}; {GIVES}")
    if sharded() and (args.policy_lora_rank or run_args.engine == "hf"):
        needs = "FSDP shards a policy that is trained whole, sampled by vllm"
        sys.exit(f"--policy-lora-rank, --engine hf: {needs}")
    adapter = getattr(args, "prm_lora_rank", 0)
    if sharded() and adapter and getattr(args, "prm_follows", False):
        way = "0 shards a full copy of it"
        sys.exit(f"--prm-lora-rank {adapter}: no adapter on a sharded policy; {way}")
    against_old = getattr(args, "variant", "") != "prime"  # whose reward is against its own base
    if sharded() and adapter and run_args.dtype == "bfloat16" and against_old:
        reason = "its base computes otherwise than a sharded policy, which would be a reward"
        way = "--prm-lora-rank 0 shards a full copy, --dtype float32 makes both alike"
        sys.exit(f"--prm-lora-rank {adapter} --dtype bfloat16: {reason}; {way}")
    # with it transformers loads weights in the first process only
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"
    if not state.is_main_process:
        sys.stdout, sys.stderr = open(os.devnull, "w"), Quiet(sys.stderr)
    if state.device.type == "cpu":
        keep_freed_memory()
    return state.device


def divide_cores() -> None:
    """Take this process's share of the machine's cores; else every engine pins the same ones."""
    local, neighbours = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[local::neighbours] or cores)


def keep_freed_memory() -> None:
    """Have glibc keep what large tensors free for the next ones.

    It gives it back to the kernel otherwise, and pages taken anew in every pass cost 6 to 11 % of
    an iteration (benchmarks/results/throughput-threads.md). MALLOC_* in the environment, glibc's
    own way to say it, comes first."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries have none
    if mallopt and not any(name.startswith("MALLOC_") for name in os.environ):
        mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD [bytes]
        mallopt(-3, 2**30)  # M_MMAP_THRESHOLD [bytes]


def count() -> int:
    return PartialState().num_processes


def rank() -> int:
    return PartialState().process_index


def wait() -> None:
    """Until all processes have come here."""
    PartialState().wait_for_everyone()


def end() -> None:
    """End this process here, with status 0, if there are several and all of them have come here.

    What was registered to run at the end does. The interpreter's own end is left out: a thread of
    gloo that still has a tensor to give back needs the interpreter for it, and aborts the process
    where that is gone already, so that a whole run counted as failed."""
    if count() == 1:
        return
    wait()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(0)


def lost_another(error: BaseException) -> bool:
    """Whether an error says that one of several processes does not answer any more."""
    if count() == 1 or not isinstance(error, RuntimeError):
        return False
    return isinstance(error, torch.distributed.DistError) or "gloo" in str(error)


# ------------ work: divided; what came of it: together ------------


def my_tasks(tasks: list[int]) -> list[int]:
    """This process's part of tasks in which equal ones are neighbours: whole groups, in their
    order."""
    groups = list(dict.fromkeys(tasks))
    first, last = (len(groups) * i // count() for i in (rank(), rank() + 1))
    mine = set(groups[first:last])
    return [task for task in tasks if task in mine]


def my_part(parts) -> list:
    """This process's part of the micro-batches or bundles."""
    return list(parts)[rank() :: count()]


def most_parts(parts) -> int:
    """How many parts the process with the most has."""
    return -(-len(parts) // count())


def gather(items: list) -> list:
    """The items of all processes, in the processes' order."""
    return gather_object(items) if count() > 1 else items


def total(values):
    """The sum over processes of a tensor or of a list of numbers."""
    if count() == 1:
        return values
    tensor = (
        values if isinstance(values, torch.Tensor) else torch.tensor(values, dtype=torch.float64)
    )
    summed = reduce(tensor.to(PartialState().device), "sum").to(tensor.device)
    return summed if isinstance(values, torch.Tensor) else summed.tolist()


def broadcast(value):
    """The first process's value, whatever the others have."""
    return broadcast_object_list([value])[0] if count() > 1 else value


def sum_gradients(network) -> None:
    """Each gradient of a Network becomes the sum over processes; FSDP has done that already for
    what it shards. Where no process has any, there are none."""
    if count() == 1:
        return
    parameters = network.trained
    (number,) = total([sum(parameter.grad is not None for parameter in parameters)])
    for parameter in parameters if number else ():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        if not isinstance(parameter, DTensor):
            parameter.grad = reduce(parameter.grad, "sum")


def to_float(number: torch.Tensor) -> float:
    """A tensor of one number, of which each process may have a part."""
    return whole(number).item()


# ------------ FSDP: weights divided too ------------


def sharded() -> bool:
    """Whether accelerate's configuration asks for FSDP."""
    return count() > 1 and os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"


def shard(model, dtype: str = "float32"):
    """The model with its weights divided between the processes, layer by layer, if accelerate's
    configuration asks for FSDP: offloading and resharding are as it says. Else the model as it is.

    Where --dtype is bfloat16, a layer's weights are gathered and computed with in bfloat16, unless
    the configuration names a precision; gradients are summed, and weights kept, in float32."""
    if not sharded():
        return model
    from accelerate.utils import FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    options = {}
    if plugin.cpu_offload:
        options["offload_policy"] = plugin.cpu_offload
    if dtype == "bfloat16":
        options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    if plugin.mixed_precision_policy:
        options["mp_policy"] = plugin.mixed_precision_policy
    for module in list(model.modules()):
        if type(module).__name__ in (model._no_split_modules or ()):
            fully_shard(module, reshard_after_forward=plugin.reshard_after_forward, **options)
    fully_shard(model, **options)
    for module in model.modules():
        if isinstance(module, FSDPModule):  # gradients of processes are summed, not averaged
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    model.through = MethodType(lambda self, function, *inputs: function(*inputs), model)
    register_fsdp_forward_method(model, "through")
    return model


def is_sharded(model) -> bool:
    """Whether this model's weights are divided."""
    return isinstance(model, FSDPModule)


def through(model, function, *inputs):
    """function(*inputs), which computes with the model's weights: FSDP gathers them meanwhile."""
    return model.through(function, *inputs) if is_sharded(model) else function(*inputs)


def shares(model) -> dict[str, torch.nn.Parameter]:
    """{name: parameter} of a model, of a sharded one this process's part of each, which are what
    its optimiser has: a forward pass may have left some of them gathered, in memory that FSDP is
    going to free and nobody else may hold."""
    for module in model.modules():
        if is_sharded(module):
            module.reshard()
    return dict(model.named_parameters())


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of which each process may have a part; all processes have to ask for it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def part(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """This process's part of a whole tensor, divided as another one is, on its device."""
    tensor = tensor.to(like.device)
    if not isinstance(like, DTensor):
        return tensor
    return distribute_tensor(
        tensor, like.device_mesh, like.placements, src_data_rank=None
    )  # everyone has it whole
