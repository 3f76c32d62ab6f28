"""This process among the others: its rank, its device, and the default process group."""

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

MEETING_SECONDS = 300.0  # how long ranks wait for each other at start


@dataclass(frozen=True, slots=True)
class Launch:
    """What torchrun told this process; without torchrun there is one rank."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    """Ranks on this node."""
    num_nodes: int = 1
    master: str = "localhost"
    """Address of the store, at a node's name or number."""
    port: int = 0
    store_is_agents: bool = False
    """torchrun itself serves the store, so rank 0 must not."""


def read_launch() -> Launch:
    env = os.environ
    if int(env.get("WORLD_SIZE", "1")) == 1:
        return Launch()
    try:
        return Launch(
            rank=int(env["RANK"]),
            world_size=int(env["WORLD_SIZE"]),
            local_rank=int(env["LOCAL_RANK"]),
            local_world_size=int(env["LOCAL_WORLD_SIZE"]),
            num_nodes=int(env.get("GROUP_WORLD_SIZE", "1")),
            master=env["MASTER_ADDR"],
            port=int(env["MASTER_PORT"]),
            store_is_agents=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        )
    except KeyError as missing:
        raise ValueError(
            f"WORLD_SIZE={env['WORLD_SIZE']}, but {missing} is not set; start several ranks with "
            "torchrun, or one with WORLD_SIZE unset"
        ) from None


def choose_device(name: str, launch: Launch) -> torch.device:
    """The device of this rank; ranks share GPUs only where there are fewer of them than ranks."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name not in ("cpu", "cuda"):
        raise ValueError(f"device={name!r} is not known; use auto, cpu or cuda")
    if name == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError("device='cuda', but torch finds no CUDA device; use cpu")
    device = torch.device("cuda", launch.local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def device_bytes(device: torch.device) -> int | None:
    """All memory of a device; None for a CPU."""
    is_cuda = device.type == "cuda"
    return torch.cuda.get_device_properties(device).total_memory if is_cuda else None


def choose_backend(device: torch.device, launch: Launch) -> str:
    """nccl where each rank has a GPU of its own; it refuses to share one, gloo does not."""
    if device.type == "cpu":
        return "gloo"
    own = torch.cuda.device_count() >= launch.local_world_size
    return "cpu:gloo,cuda:nccl" if own else "cpu:gloo,cuda:gloo"


def compute_dtype(device: torch.device) -> torch.dtype:
    """What models compute in."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def start_group(device: torch.device, launch: Launch, store: dist.Store, *, seconds: float) -> None:
    """The default process group; a collective in it, or in a part of it, may take so long."""
    dist.init_process_group(
        choose_backend(device, launch),
        store=store,
        rank=launch.rank,
        world_size=launch.world_size,
        timeout=timedelta(seconds=seconds),
    )
