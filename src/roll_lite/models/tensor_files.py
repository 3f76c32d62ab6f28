"""Safetensors files that are written a tensor at a time."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from roll_lite.checks import UserError

if TYPE_CHECKING:
    from torch import Tensor

FORMAT_NAMES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip


def header(tensors: dict[str, Tensor]) -> bytes:
    """The header of a safetensors file: the length of its JSON, then the JSON."""
    entries = {}
    end = 0
    for name, tensor in tensors.items():
        dtype = dtype_name(tensor)
        if dtype not in FORMAT_NAMES:
            known = ", ".join(FORMAT_NAMES)
            raise UserError(f"{name} has dtype={tensor.dtype}; a checkpoint holds {known}")
        start = end
        end = start + tensor.nbytes
        entries[name] = {
            "dtype": FORMAT_NAMES[dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps({"__metadata__": {"format": "pt"}, **entries}).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def content(tensor: Tensor) -> memoryview:
    from torch import uint8  # not above: the options of checkpoints are read without torch

    on_cpu = tensor.detach().cpu().contiguous()
    return memoryview(on_cpu.view(-1).view(uint8).numpy())


def dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
