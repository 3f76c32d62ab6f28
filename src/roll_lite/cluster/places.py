"""This rank's device, the process groups of each role, and the rank's `Place` in them."""

import os
from collections.abc import Callable, Set
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from roll_lite.checks import UserError
from roll_lite.cluster.launch import Launch
from roll_lite.device_map import Device, DeviceMap, Role, listing

DEVICES = ("auto", "cpu", "cuda")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The position of a worker object in its role."""

    role: str
    rank: int
    """Global rank."""
    replica: int
    """Index of this rank's replica in the role: its data-parallel rank."""
    num_replicas: int
    copy: int
    """Index of the copy of the sharded weights that this rank has a shard of."""
    tp_rank: int
    """Index of this rank among those that hold the model together."""
    tp: int
    cp: int
    """Parts in which the ranks of a replica read its tokens."""
    device: torch.device
    ep: int
    """Parts that experts are dealt into."""
    mesh: DeviceMesh
    """Dimensions dp, cp (where it is above 1) and tp."""
    shards: DeviceMesh
    """Over which weights are sharded: its last dimension. Copies are along the first of two."""
    expert_shards: DeviceMesh | None
    """Over which experts are sharded, where data-parallel ranks hold different ones."""
    ep_group: dist.ProcessGroup | None
    """Those ranks, which exchange tokens."""
    group: dist.ProcessGroup
    """All ranks of the role."""
    control: dist.ProcessGroup
    """gloo group of the ranks of this replica, for commands."""
    report: Callable[..., None]
    """Sends its arguments to the role's listener on the controller; does not wait."""
    lost: Set[int]
    """Ranks of the cluster that had ended when the current call was made."""
    regroup: Callable[[str, list[int]], Any]
    """Forms a group of some ranks, which call it together; no other rank takes part. It has the
    methods of a ProcessGroup."""

    @property
    def dtype(self) -> torch.dtype:
        """What models compute in: bf16 on CUDA, fp32 on a CPU."""
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32


def choose_device(name: str, launch: Launch) -> torch.device:
    """The device of this rank; ranks share GPUs only if there are fewer GPUs than ranks."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UserError("device='cuda', but torch finds no CUDA device; use cpu")
    device = torch.device("cuda", launch.local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def find_device(name: str, launch: Launch, *, measures: bool) -> Device:
    """What this rank computes on; unless it `measures` its memory, CUDA is left alone, so that the
    process can still fork."""
    if name not in DEVICES:
        raise UserError(f"device={name!r} is not known; use {listing(DEVICES, 'or')}")
    if name == "auto":
        name = "cuda" if torch.cuda.device_count() else "cpu"  # as NVML says
    if name == "cpu" or not measures:
        return Device(name)
    properties = torch.cuda.get_device_properties(choose_device(name, launch))
    return Device(name, properties.name, properties.total_memory)


def free_bytes(device: torch.device) -> int | None:
    """What a GPU has free; None for a CPU."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None


def _let_ranks_share_gpus(launch: Launch) -> None:
    """NCCL refuses two ranks on one GPU, unless it takes them for different hosts."""
    settings = {"NCCL_HOSTID": f"rank-{launch.rank}", "NCCL_IB_DISABLE": "1"}
    settings |= {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}
    for name, value in settings.items():
        os.environ.setdefault(name, value)
    if launch.rank == 0:
        print("ranks share a GPU: NCCL connects them by sockets, which is slow and for testing")


def start_group(device: torch.device, launch: Launch, store: dist.Store, *, seconds: float) -> None:
    """Start the default process group; `seconds` is the timeout of every collective."""
    if device.type == "cuda" and torch.cuda.device_count() < launch.local_world_size:
        _let_ranks_share_gpus(launch)
    dist.init_process_group(
        "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl",
        store=store,
        rank=launch.rank,
        world_size=launch.world_size,
        timeout=timedelta(seconds=seconds),
    )


def form_group_again(
    device: torch.device,
    rank: int,
    store: dist.Store,
    seconds: float,
    name: str,
    ranks: list[int],
) -> Any:
    """A group of the ranks that are left. Unlike new_group it does not wait for all of the world;
    only its own methods can be used. A name is used once for the same ranks."""
    name = f"{name}:{'-'.join(map(str, ranks))}"
    store = dist.PrefixStore(name, store)
    timeout = timedelta(seconds=seconds)
    if device.type == "cpu":
        return dist.ProcessGroupGloo(store, ranks.index(rank), len(ranks), timeout)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    options.group_name = name
    options.global_ranks_in_group = ranks
    return dist.ProcessGroupNCCL(store, ranks.index(rank), len(ranks), options)


def make_places(
    device_map: DeviceMap,
    rank: int,
    device: torch.device,
    report: Callable[..., None],
    lost: Set[int],
    regroup: Callable[[str, list[int]], Any],
) -> dict[str, Place]:
    """This rank's place in each of its roles. Collective: all ranks must call it.

    `report(role, replica, *args)` sends a report to the controller. `lost` is a set that changes.

    Roles with the same ranks and sizes share their groups. They never use them at the same time,
    and each NCCL communicator costs memory.
    """
    places = {}
    formed = {}
    for role in device_map.roles:
        layout = role.ranks, role.tp, role.cp, role.num_copies, role.data_ep
        if layout not in formed:
            formed[layout] = _form_groups(role, rank, device)
        if rank in role.ranks:
            index = role.ranks.index(rank)
            replica = index // role.ranks_per_replica
            places[role.name] = Place(
                role=role.name,
                rank=rank,
                replica=replica,
                num_replicas=role.num_replicas,
                copy=index // role.ranks_per_copy,
                tp_rank=index % role.tp,
                tp=role.tp,
                cp=role.cp,
                ep=role.ep,
                device=device,
                report=partial(report, role.name, replica),
                lost=lost,
                regroup=regroup,
                **formed[layout],
            )
    return places


def _form_groups(role: Role, rank: int, device: torch.device) -> dict[str, Any]:
    """The fields of a `Place` that are meshes and groups."""
    ranks = torch.tensor(role.ranks)
    mesh = shards = DeviceMesh(device.type, ranks.view(-1, role.tp), mesh_dim_names=("dp", "tp"))
    if role.num_copies > 1:
        copies = ranks.view(role.num_copies, -1, role.tp)
        shards = DeviceMesh(device.type, copies, mesh_dim_names=("copies", "dp", "tp"))
    # The ranks of a context need the same weights, so these are sharded over them as well.
    if rank in role.ranks:
        shards = shards["copies", "dp"] if role.num_copies > 1 else mesh["dp"]
    expert_shards = ep_group = None
    if role.data_ep > 1:
        dealt = ranks.view(role.num_copies, -1, role.ep, role.tp)
        experts = DeviceMesh(device.type, dealt, mesh_dim_names=("copies", "dp", "ep", "tp"))
        if rank in role.ranks:
            expert_shards = experts["copies", "dp"] if role.num_copies > 1 else experts["dp"]
            ep_group = experts["ep"].get_group()
    if role.cp > 1:
        replicas = ranks.view(-1, role.cp, role.tp)
        mesh = DeviceMesh(device.type, replicas, mesh_dim_names=("dp", "cp", "tp"))
    group = dist.new_group(role.ranks)
    control = None
    if role.ranks_per_replica == 1 and rank in role.ranks:
        control = mesh["tp"].get_group()  # one rank: no gloo group is needed
    for replica in role.replicas if role.ranks_per_replica > 1 else ():
        formed = dist.new_group(replica, backend="gloo")
        if rank in replica:
            control = formed
    return {
        "mesh": mesh, "shards": shards, "expert_shards": expert_shards, "ep_group": ep_group,
        "group": group, "control": control,
    }  # fmt: skip
