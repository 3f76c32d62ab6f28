"""The processes of a run. So far there is one: this process, with a process group of its own."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


@dataclass(frozen=True, slots=True)
class World:
    device: torch.device
    dtype: torch.dtype
    """What models compute in: bf16 on CUDA, fp32 on a CPU."""
    mesh: DeviceMesh


@contextmanager
def start_world(device: str = "auto") -> Iterator[World]:
    """A one-rank group in memory, so that sharded code runs as it will on many ranks."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError(
            f"WORLD_SIZE={os.environ['WORLD_SIZE']}: this version runs in one process; start the "
            "recipe with `python`, or with `torchrun --nproc-per-node 1`"
        )
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device not in ("cpu", "cuda"):
        raise ValueError(f"device={device!r} is not known; use auto, cpu or cuda")
    if device == "cuda":
        if not torch.cuda.is_available():
            raise ValueError("device='cuda', but torch finds no CUDA device; use cpu")
        torch.cuda.set_device(0)
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield World(
            device=torch.device(device),
            dtype=torch.bfloat16 if device == "cuda" else torch.float32,
            mesh=init_device_mesh(device, (1,)),
        )
    finally:
        dist.destroy_process_group()
