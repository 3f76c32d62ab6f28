"""How ranks find each other: the launch environment, the network interface, the rendezvous.

torchrun's store outlives the ranks: after a restart it still holds the addresses of dead ranks, and
nodes may disagree on the number of restarts. So rank 0 opens a session with a new name at every
start, and a rank asks to join with a token it has just made up: an answer to it cannot be stale.
"""

import json
import os
import socket
import struct
import time
import uuid
from dataclasses import dataclass
from datetime import timedelta
from fcntl import ioctl
from pathlib import Path

import torch.distributed as dist

from roll_lite.cluster.errors import name_ranks

RENDEZVOUS_SECONDS = 300.0  # for all ranks to start
POLL_SECONDS = 0.02
INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface


@dataclass(frozen=True, slots=True)
class Launch:
    """What torchrun tells this process; without torchrun there is one rank."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    """Ranks on this node."""
    num_nodes: int = 1
    master: str = "localhost"
    """Host name or address of the store."""
    port: int = 0
    store_is_agents: bool = False
    """The torchrun agent serves the store, so rank 0 must not."""


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


def rendezvous(launch: Launch) -> tuple[dist.Store, list[str]]:
    """The store of this session, and the processes of all ranks: pid and host of each, as text."""
    choose_interface(launch)
    # Not torch's own rendezvous: some versions prefix keys with a node's count of restarts.
    torchrun_store = dist.TCPStore(
        launch.master,
        launch.port,
        launch.world_size,
        is_master=launch.rank == 0 and not launch.store_is_agents,
        wait_for_workers=False,
        timeout=timedelta(seconds=RENDEZVOUS_SECONDS),
    )
    store = dist.PrefixStore("roll_lite", torchrun_store)
    process = f"pid {os.getpid()} on {socket.gethostname()}"
    if launch.rank == 0:
        session, others = _open_session(store, launch.world_size)
        store.set(f"{session}/processes", json.dumps([process, *others]))
    else:
        session = _join_session(store, launch.rank, process)
    return dist.PrefixStore(session, store), json.loads(store.get(f"{session}/processes"))


def _join_session(store: dist.Store, rank: int, process: str) -> str:
    token = uuid.uuid4().hex
    store.set(f"join/{rank}", json.dumps([token, process]))
    session = store.get(f"session/{token}").decode()
    store.set(f"{session}/joined/{rank}", "")
    return session


def _open_session(store: dist.Store, world_size: int) -> tuple[str, list[str]]:
    """Answer join requests until all ranks have joined. Those of dead ranks have no effect.

    Returns the session's name and the processes of the ranks from 1 on.
    """
    session = uuid.uuid4().hex
    ranks = range(1, world_size)
    requests: dict[int, list] = {}
    end = time.monotonic() + RENDEZVOUS_SECONDS
    while not store.check([f"{session}/joined/{rank}" for rank in ranks]):
        for rank in ranks:
            if not store.check([f"join/{rank}"]):
                continue
            request = json.loads(store.get(f"join/{rank}"))
            if request != requests.get(rank):
                requests[rank] = request
                store.set(f"session/{request[0]}", session)
        if time.monotonic() > end:
            missing = [rank for rank in ranks if not store.check([f"{session}/joined/{rank}"])]
            raise TimeoutError(
                f"{name_ranks(missing)} did not join within {RENDEZVOUS_SECONDS:.0f} s; check that "
                "torchrun was started on every node"
            )
        time.sleep(POLL_SECONDS)
    return session, [requests[rank][1] for rank in ranks]


def choose_interface(launch: Launch) -> None:
    """Make gloo and RPC use the interface that leads to the store, unless the user chose one.

    By default both use the address that the host's own name resolves to: often the loopback
    address, which other nodes cannot reach.
    """
    unset = [name for name in INTERFACE_VARIABLES if name not in os.environ]
    if not unset:
        return
    address = _own_address(launch.master, launch.port)
    interface = _interface_of(address)
    if launch.num_nodes > 1 and address.startswith("127."):
        interface = _default_interface()
        if interface is None:
            raise ValueError(
                f"{launch.master} is {address} on this node, which other nodes cannot reach; "
                "start torchrun with --local-addr, or set GLOO_SOCKET_IFNAME and TP_SOCKET_IFNAME"
            )
    if interface is not None:  # None for an IPv6 address, say: torch's own choice stands
        os.environ.update(dict.fromkeys(unset, interface))


def _own_address(host: str, port: int) -> str:
    """This host's address on the route to another; connecting a UDP socket sends nothing."""
    family, kind, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)
        return probe.getsockname()[0]


def _interface_of(address: str) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:  # an interface without an IPv4 address
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None


def _default_interface() -> str | None:
    for line in Path("/proc/net/route").read_text().splitlines()[1:]:
        name, destination = line.split()[:2]
        if destination == "00000000":
            return name
    return None
