"""How ranks find each other: the launch environment, the network interface, the rendezvous.

torchrun's store outlives the ranks: after a restart it still holds the addresses of dead ranks, and
nodes may disagree on the number of restarts. So rank 0 opens a session with a new name at every
start, and a rank asks to join with a token it has just made up: an answer to it cannot be stale.
"""

import json
import os
import socket
import struct
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from fcntl import ioctl
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from roll_lite.cluster.agent import Process, agent_name, find_rank
from roll_lite.cluster.comparison import Description, differences
from roll_lite.cluster.errors import name_ranks

RENDEZVOUS_SECONDS = 300.0  # for all ranks to start
STORE_SECONDS = 300.0  # for the store to answer
NOTICE_SECONDS = 20.0  # between two lines that say for whom a start waits
RESOLVE_SECONDS = 5.0  # for a name server that is not ready
REFUSAL_SECONDS = 0.5
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
    node: int = 0
    agent: str = ""
    """Of this node. A rank that outlives its agent finds the next agent's store at its port."""
    has_keeper: bool = False
    """torchrun does not see this rank fail; see keeper.py."""


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
            node=int(env.get("GROUP_RANK", "0")),
            agent=agent_name(),
        )
    except KeyError as missing:
        raise ValueError(
            f"WORLD_SIZE={env['WORLD_SIZE']}, but {missing} is not set; start several ranks with "
            "torchrun, or one with WORLD_SIZE unset"
        ) from None


class Session(NamedTuple):
    """One start of all ranks."""

    name: str
    """Prefix of its keys in the store of torchrun, or of rank 0."""
    store: dist.Store
    processes: list[Process]
    """Of all ranks."""
    kept: frozenset[int]
    """Ranks that have a keeper; only rank 0 knows them."""


def rendezvous(launch: Launch, description: Description) -> Session:
    """Meet all other ranks. ValueError on all if the description of one differs from that of rank
    0."""
    _resolve(launch)
    choose_interface(launch)
    # On several nodes agents have several names: there those of each node are compared.
    name = f"roll_lite/{launch.agent}" if launch.num_nodes == 1 else "roll_lite"
    store = dist.PrefixStore(name, _connect(launch))
    me = JoinRequest(uuid.uuid4().hex, Process.find(os.getpid()), launch, description)
    session = _open_session(store, me) if launch.rank == 0 else _join_session(store, me)
    return session._replace(name=f"{name}/{session.name}")


class JoinRequest(NamedTuple):
    token: str
    process: Process
    launch: Launch
    description: Description

    def encode(self) -> str:
        return json.dumps([self.token, self.process, asdict(self.launch), self.description])

    @classmethod
    def decode(cls, text: bytes) -> "JoinRequest":
        token, process, launch, description = json.loads(text)
        return cls(token, Process(*process), Launch(**launch), description)

    def check_same(self, other: "JoinRequest") -> None:
        """Raise ValueError if another rank cannot work with this one."""
        problem = differences(self.description, other.description)
        if self.launch.node == other.launch.node and self.launch.agent != other.launch.agent:
            problem = "another torchrun started it"
        if problem:
            raise ValueError(
                f"rank {other.launch.rank} ({other.process}) differs from rank "
                f"{self.launch.rank} ({self.process}): {problem}; start all ranks with the same "
                "code, versions and options"
            )


class Patience:
    """Waits for other ranks, and says from time to time for which; TimeoutError in the end."""

    def __init__(self, launch: Launch, names: Callable[[], str]):
        """`names` says what is missing."""
        self._names = names
        self._rank, self._is_loud = launch.rank, launch.local_rank <= 1  # two ranks are enough
        now = time.monotonic()
        self._end, self._next = now + RENDEZVOUS_SECONDS, now + NOTICE_SECONDS

    def wait(self) -> None:
        now = time.monotonic()
        if now > self._end:
            raise TimeoutError(
                f"rank {self._rank} waited {RENDEZVOUS_SECONDS:.0f} s for {self._names()}; check "
                "that torchrun was started on every node"
            )
        if now > self._next:
            self._next = now + NOTICE_SECONDS
            if self._is_loud:
                print(f"rank {self._rank} waits for {self._names()}", file=sys.stderr, flush=True)
        time.sleep(POLL_SECONDS)


def _resolve(launch: Launch) -> None:
    """Name an address that does not resolve: torch would repeat a warning for minutes."""
    end = time.monotonic() + RESOLVE_SECONDS
    while True:
        try:
            socket.getaddrinfo(launch.master, launch.port, type=socket.SOCK_STREAM)
            return
        except socket.gaierror as error:
            if error.errno == socket.EAI_AGAIN and time.monotonic() < end:
                time.sleep(0.5)
                continue
            problem = error.strerror
        raise ValueError(
            f"MASTER_ADDR={launch.master} does not resolve on {socket.gethostname()}: {problem}; "
            "name a host or an address that every node can reach"
        )


def _connect(launch: Launch) -> dist.TCPStore:
    """The store of torchrun, or of rank 0."""
    is_master = launch.rank == 0 and not launch.store_is_agents
    address = f"{launch.master}:{launch.port}"
    if not is_master:
        _wait_for_port(launch, f"the store at {address}, of rank 0 or its torchrun")
    # Not torch's own rendezvous: some versions prefix keys with a node's count of restarts.
    seconds = timedelta(seconds=STORE_SECONDS)
    try:
        return dist.TCPStore(
            launch.master, launch.port, launch.world_size, is_master=is_master,
            wait_for_workers=False, timeout=seconds,
        )  # fmt: skip
    except dist.DistNetworkError as error:
        if "EADDRINUSE" not in str(error):
            raise
    raise ValueError(f"port {address} is taken by another program; set MASTER_PORT to a free one")


def _wait_for_port(launch: Launch, name: str) -> None:
    """Until something listens there: torch would repeat a warning meanwhile."""
    patience = Patience(launch, lambda: name)
    while True:
        try:
            socket.create_connection((launch.master, launch.port), timeout=5).close()
            return
        except OSError:
            patience.wait()


def _join_session(store: dist.Store, me: JoinRequest) -> Session:
    patience = Patience(me.launch, partial(_name_missing, [0]))
    store.set(f"join/{me.launch.rank}", me.encode())
    session = _get(store, f"session/{me.token}", patience).decode()
    store.set(f"{session}/joined/{me.launch.rank}", "")
    answer = json.loads(_get(store, f"{session}/answer", patience))
    if isinstance(answer, str):
        raise ValueError(answer)
    processes = [Process(*process) for process in answer]
    return Session(session, dist.PrefixStore(session, store), processes, frozenset())


def _get(store: dist.Store, key: str, patience: Patience) -> bytes:
    while not store.check([key]):
        patience.wait()
    return store.get(key)


def _open_session(store: dist.Store, me: JoinRequest) -> Session:
    """Answer join requests until all ranks have joined. Those of dead ranks have no effect."""
    session, requests = uuid.uuid4().hex, {0: me}
    missing = list(range(1, me.launch.world_size))
    patience = Patience(me.launch, lambda: _name_missing(missing))
    while missing:
        for rank in missing:
            if store.check([f"join/{rank}"]):
                request = JoinRequest.decode(store.get(f"join/{rank}"))
                if request != requests.get(rank):
                    requests[rank] = request
                    store.set(f"session/{request.token}", session)
        joined = [rank for rank in missing if store.check([f"{session}/joined/{rank}"])]
        for rank in joined:
            missing.remove(rank)
            _check_rank(store, session, requests, rank)
        if missing:
            patience.wait()
    processes = [requests[rank].process for rank in range(me.launch.world_size)]
    store.set(f"{session}/answer", json.dumps(processes))
    kept = frozenset(rank for rank, request in requests.items() if request.launch.has_keeper)
    return Session(session, dist.PrefixStore(session, store), processes, kept)


def _check_rank(
    store: dist.Store, session: str, requests: dict[int, JoinRequest], rank: int
) -> None:
    """Refuse a rank that differs, and tell the others why."""
    nodes = {r.launch.node: r for _, r in sorted(requests.items(), reverse=True)}
    try:
        for other in (requests[0], nodes[requests[rank].launch.node]):
            other.check_same(requests[rank])
    except ValueError as error:
        store.set(f"{session}/answer", json.dumps(str(error)))
        time.sleep(REFUSAL_SECONDS)  # for ranks to read it, if this process has the store
        raise


def _name_missing(ranks: Sequence[int]) -> str:
    """Those of this node with their processes, if these were stopped."""
    found = {rank: find_rank(rank) for rank in ranks}
    stopped = [f"rank {rank} is stopped ({p})" for rank, p in found.items() if p and p.is_stopped]
    return "; ".join([name_ranks(ranks), *stopped])


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
