"""safetensors files that are written tensor by tensor, so that one of them is in memory at a time.

The format (https://github.com/huggingface/safetensors) is the length of a header, the header as
JSON and the tensors' bytes, one after another; safetensors itself reads it.
"""

import json
from collections import deque
from pathlib import Path

from runtime.distributed import processes
from runtime.networks import assert_finite

import torch

NAMES = {  # of dtypes, as safetensors has them
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
}


def write_tensors(file: Path, shapes: dict[str, tuple], tensors) -> None:
    """Write (name, tensor) of an iterator, which yields them in the order of shapes, {name: (dtype,
    shape)}; a tensor is brought to that dtype.

    Of several processes the first one writes; the others have parts to give. Raises
    FloatingPointError where a tensor is not finite."""
    if processes.rank():
        deque(tensors, maxlen=0)  # a loop's variable would keep one while the next is made
        return

    header, end = {"__metadata__": {"format": "pt"}}, 0
    for name, (dtype, shape) in shapes.items():
        start, end = end, end + dtype.itemsize * torch.Size(shape).numel()
        place = {"dtype": NAMES[dtype], "shape": [*shape], "data_offsets": [start, end]}
        header[name] = place
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of 8 bytes

    with open(file, "xb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for due, (dtype, shape) in shapes.items():
            name, tensor = next(tensors)
            if name != due or tensor.shape != torch.Size(shape):
                raise ValueError(f"{name} {tuple(tensor.shape)} where {due} {tuple(shape)} is due")
            assert_finite([(name, tensor)])
            tensor = tensor.detach().to("cpu", dtype).contiguous().reshape(-1)
            out.write(tensor.view(torch.uint8).numpy())
            del tensor  # before the next one is made
