"""FSDP: weights, gradients and moments divided between the processes, as accelerate's configuration
says (configs/fsdp.yaml). Gradients are summed over processes, not averaged."""

import os
from types import MethodType

import torch
import torch.distributed.fsdp as torch_fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, distribute_tensor


def wanted() -> bool:
    """Whether accelerate's configuration asks for FSDP, of several processes."""
    several = int(os.environ.get("WORLD_SIZE", 1)) > 1
    return several and os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"


def copies() -> int:
    """How many copies of the policy the processes share, each on machines of its own (HSDP)."""
    return int(os.environ.get("PARALLELISM_CONFIG_DP_REPLICATE_SIZE", 1)) if wanted() else 1


def shard(model, dtype: str, device) -> None:
    """Divide the model's weights and adapters between the processes, layer by layer. Layers compute
    in --dtype or accelerate's precision, sums are float32. What trains requires gradients first."""
    from accelerate.utils import FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    bfloat16 = dtype == "bfloat16" and MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    options = {"mp_policy": plugin.mixed_precision_policy or bfloat16}
    options |= {"offload_policy": plugin.cpu_offload}
    if copies() > 1:
        sizes = copies(), int(os.environ["WORLD_SIZE"]) // copies()
        options["mesh"] = init_device_mesh(device.type, sizes, mesh_dim_names=("copy", "part"))
    options = {name: value for name, value in options.items() if value}
    reshard = {"reshard_after_forward": plugin.reshard_after_forward}
    for module in list(model.modules()):
        if type(module).__name__ in (model._no_split_modules or ()):
            torch_fsdp.fully_shard(module, **reshard, **options)
    torch_fsdp.fully_shard(model, **options)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    model.through = MethodType(lambda self, function: function(), model)  # with whole weights
    torch_fsdp.register_fsdp_forward_method(model, "through")


def shard_all(networks: list, dtype: str, device) -> None:
    """Divide the weights of these networks (runtime.networks.Network) and bring them to the device;
    their optimisers, without moments yet, get the parts. A base that nobody trains stays whole."""
    for model in {id(n.plain): n.plain for n in networks}.values():
        ours = [network for network in networks if network.plain is model]
        named = {id(parameter): name for name, parameter in model.named_parameters()}
        names = [[named[id(parameter)] for parameter in network.trained] for network in ours]
        for parameter in sum((network.trained for network in ours), []):
            parameter.requires_grad_(True)
        if any(network.model is model for network in ours):
            shard(model, dtype, device)
        model.to(device)
        parts = dict(model.named_parameters())
        for network, own in zip(ours, names):
            network.trained = [parts[name] for name in own]
            if network.optimizer:
                network.optimizer.param_groups[0]["params"] = network.trained


def is_sharded(model) -> bool:
    return isinstance(model, FSDPModule)


def shares(model) -> dict[str, torch.nn.Parameter]:
    """{name: parameter} of a model, of a sharded one this process's part, none of them gathered."""
    for module in model.modules():
        if is_sharded(module):
            module.reshard()
    return dict(model.named_parameters())


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of which each process may have a part; all processes have to ask for it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This process's rows of a tensor, not a copy; a plain one is whole in each process."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def rows(tensor: torch.Tensor) -> torch.Tensor:
    """The numbers of the rows of a tensor that this process has, [n]."""
    every = torch.arange(len(tensor), device=tensor.device)
    if isinstance(tensor, DTensor):
        every = distribute_tensor(every, tensor.device_mesh, tensor.placements, src_data_rank=None)
    return local(every).cpu()


def is_own(tensor: torch.Tensor) -> bool:
    """Whether this process saves what it has of a tensor: of several copies the first one is saved,
    a whole tensor by the first process."""
    if isinstance(tensor, DTensor):
        return not any(tensor.device_mesh.get_coordinate()[:-1])
    return int(os.environ.get("RANK", 0)) == 0
