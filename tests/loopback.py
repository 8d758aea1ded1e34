"""vLLM's transfer of weights by NCCL, with a TCP store in NCCL's place: for machines without GPUs.
vLLM's server loads it as a plugin (`installed`), the trainer by `connected`."""

from datetime import timedelta
from pathlib import Path

from runtime.engines import servers
from runtime.engines.server_extension import repack_tied_head

import torch
from torch.distributed import TCPStore


class Group:
    """What the transfer asks of a NCCL communicator."""

    def __init__(self, info, rank: int):
        self.rank, self.sent, wait = rank, 0, timedelta(seconds=60)
        at = info.master_address, info.master_port, info.world_size
        self.store = TCPStore(*at, is_master=rank == 0, timeout=wait)

    def broadcast(self, tensor: torch.Tensor, src: int, stream=None) -> None:
        self.sent += 1
        if self.rank == src:
            self.store.set(f"{self.sent}", tensor.flatten().view(torch.uint8).numpy().tobytes())
        else:
            content = bytearray(self.store.get(f"{self.sent}"))
            tensor.copy_(torch.frombuffer(content, dtype=tensor.dtype).view(tensor.shape))

    def received(self, info):
        """(name, tensor) of each weight that an update announces."""
        for name, dtype, shape in zip(info.names, info.dtype_names, info.shapes):
            weight = torch.empty(shape, dtype=getattr(torch, dtype))
            self.broadcast(weight, src=0)
            yield name, weight

    def destroy(self) -> None:
        pass


def connected(monkeypatch) -> None:
    """Let the trainer of this process transfer by a store, from a CPU."""
    from vllm.distributed.weight_transfer import nccl_engine

    def broadcast_each(iterator, group, src, post_iter_func, **_):
        for item in iterator:
            group.broadcast(post_iter_func(item), src)

    monkeypatch.setenv("VLLM_HOST_IP", "127.0.0.1")
    monkeypatch.setattr(servers, "TRANSFER", "loopback")
    monkeypatch.setattr(nccl_engine, "open_trainer_endpoint", lambda info: Group(info, 0))
    monkeypatch.setattr(nccl_engine, "packed_nccl_broadcast_producer", broadcast_each)


def installed(site: Path) -> None:
    """Make `register` a plugin of each vLLM that has this directory in its PYTHONPATH."""
    about = site / "loopback-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: loopback\nVersion: 1\n")
    (about / "entry_points.txt").write_text("[vllm.general_plugins]\nl = loopback:register\n")


def register() -> None:
    """In the server's processes: a --weight-transfer-config of the backend "loopback"."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

    class Loopback(NCCLWeightTransferEngine):
        def init_transfer_engine(self, info):
            self.model_update_group = Group(info, info.rank_offset)

        def receive_weights(self, info):
            self.model.load_weights(self.model_update_group.received(info))

        def finish_weight_update(self):
            super().finish_weight_update()
            repack_tied_head(self.model)  # as a CPU needs it

    if "loopback" not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine("loopback", Loopback)
