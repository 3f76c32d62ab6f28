"""The process groups of each role, and a rank's place in them."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from roll_lite.cluster.device_map import DeviceMap, Role
from roll_lite.cluster.world import compute_dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a worker object stands in its role."""

    role: str
    rank: int
    """Among all ranks of the program."""
    replica: int
    """Which replica of the role this rank belongs to: its data-parallel rank."""
    num_replicas: int
    tp_rank: int
    """Which part of the replica this rank is."""
    tp: int
    device: torch.device
    mesh: DeviceMesh
    """Dimensions dp and tp."""
    group: dist.ProcessGroup
    """All ranks of the role."""
    control: dist.ProcessGroup
    """gloo group of the ranks of this replica, for commands."""
    report: Callable[..., None]
    """Sends its arguments to whoever listens to the role at the controller; does not wait."""

    @property
    def dtype(self) -> torch.dtype:
        """What models compute in: bf16 on CUDA, fp32 on a CPU."""
        return compute_dtype(self.device)


def make_places(
    device_map: DeviceMap, rank: int, device: torch.device, report: Callable[..., None]
) -> dict[str, Place]:
    """This rank's place in each of its roles. Every rank has to call this: groups form together.

    `report` takes a role's name, a replica and what an object there reports to the controller.

    Roles with the same ranks and tp share their groups: they take turns, in the same order
    everywhere, and each NCCL communicator costs memory.
    """
    places, formed = {}, {}
    for role in device_map.roles:
        layout = role.ranks, role.tp
        if layout not in formed:
            formed[layout] = _form_groups(role, rank, device)
        if rank in role.ranks:
            places[role.name] = _place(role, rank, device, report, *formed[layout])
    return places


def _form_groups(
    role: Role, rank: int, device: torch.device
) -> tuple[DeviceMesh, dist.ProcessGroup, dist.ProcessGroup | None]:
    mesh = DeviceMesh(device.type, torch.tensor(role.replicas), mesh_dim_names=("dp", "tp"))
    group = dist.new_group(role.ranks)
    control = None
    if role.tp == 1 and rank in role.ranks:
        control = mesh["tp"].get_group()  # of one rank, like the many that need not be formed
    for replica in role.replicas if role.tp > 1 else ():
        formed = dist.new_group(replica, backend="gloo")
        if rank in replica:
            control = formed
    return mesh, group, control


def _place(
    role: Role, rank: int, device: torch.device, report: Callable[..., None], mesh, group, control
) -> Place:
    replica, tp_rank = divmod(role.ranks.index(rank), role.tp)
    return Place(
        role=role.name,
        rank=rank,
        replica=replica,
        num_replicas=role.num_replicas,
        tp_rank=tp_rank,
        tp=role.tp,
        device=device,
        mesh=mesh,
        group=group,
        control=control,
        report=partial(report, role.name, replica),
    )
