"""How ranks find each other, and what must be equal on all of them.

torchrun's store outlives the ranks: after a restart it still holds the addresses of dead ranks, and
nodes may disagree on the number of restarts. So rank 0 opens a session with a new name at every
start, and a rank asks to join with a token it has just made up: an answer to it cannot be stale.
"""

import errno
import hashlib
import json
import os
import platform
import socket
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from roll_lite.checks import UserError
from roll_lite.cluster.errors import name_ranks
from roll_lite.cluster.launch import Launch, choose_interface, ranks_here
from roll_lite.cluster.ports import is_open_to_the_network
from roll_lite.processes import STOPPED_SECONDS, Process, StoppedProcesses, launcher_pid

RENDEZVOUS_SECONDS = 300.0  # for all ranks to start
STORE_SECONDS = 300.0  # for the store to answer
NOTICE_SECONDS = 20.0  # between two lines that say for whom a start waits
RESOLVE_SECONDS = 5.0  # for a name server that is not ready
REFUSAL_SECONDS = 0.5
POLL_SECONDS = 0.02
LOOK_SECONDS = 1.0  # between two looks at the ranks of this node
OPEN_STORE = (
    "torchrun's store listens on all interfaces, without authentication; torchrun "
    "--rdzv-backend loopback, or PET_RDZV_BACKEND=loopback, keeps it on this machine"
)
PACKAGE = Path(__file__).parent.parent
OWN_BY_RANK = ("run_dir",)
"""Options that may differ: the default has the time in it, and only rank 0 writes to the folder."""
Description = dict[str, Any]


class Session(NamedTuple):
    """One start of all ranks."""

    name: str
    """Prefix of its keys in the store of torchrun, or of rank 0."""
    store: dist.Store
    processes: list[Process]
    """The processes of all ranks."""
    monitored: frozenset[int]
    """Ranks that have a monitor (rank_monitor.py); only rank 0 knows them."""
    free_bytes: int | None
    """The least memory that a rank's GPU has free; only rank 0 knows it."""


def rendezvous(launch: Launch, description: Description, free_bytes: int | None = None) -> Session:
    """Find all other ranks. UserError on all if one has another description than rank 0.

    `free_bytes` of this rank's GPU may differ.
    """
    _resolve(launch)
    choose_interface(launch)
    # On several nodes agents have several names: there those of each node are compared.
    name = f"roll_lite/{launch.launcher}" if launch.num_nodes == 1 else "roll_lite"
    store = dist.PrefixStore(name, _connect(launch))
    me = JoinRequest(uuid.uuid4().hex, Process.find(os.getpid()), launch, description, free_bytes)
    session = _open_session(store, me) if launch.rank == 0 else _join_session(store, me)
    return session._replace(name=f"{name}/{session.name}")


class JoinRequest(NamedTuple):
    token: str
    process: Process
    launch: Launch
    description: Description
    free_bytes: int | None

    def encode(self) -> str:
        return json.dumps([*self[:2], asdict(self.launch), *self[3:]])

    @classmethod
    def decode(cls, text: bytes) -> "JoinRequest":
        token, process, launch, *rest = json.loads(text)
        return cls(token, Process(*process), Launch(**launch), *rest)

    def check_same(self, other: "JoinRequest") -> None:
        """Raise ValueError if another rank cannot work with this one."""
        problem = differences(self.description, other.description)
        if self.launch.node == other.launch.node and self.launch.launcher != other.launch.launcher:
            problem = "another torchrun started it"
        if problem:
            raise UserError(
                f"rank {other.launch.rank} ({other.process}) differs from rank "
                f"{self.launch.rank} ({self.process}): {problem}; start all ranks with the same "
                "code, versions and options"
            )


class Patience:
    """Waits for other ranks, and says from time to time for which; TimeoutError in the end.

    Meanwhile ranks of this node that are stopped are killed, so that torchrun starts again.
    """

    def __init__(self, launch: Launch, names: Callable[[], str]):
        """`names` says what is missing."""
        self._names = names
        self._rank = launch.rank
        self._is_loud = launch.local_rank <= 1  # two ranks are enough
        now = time.monotonic()
        self._end = now + RENDEZVOUS_SECONDS
        self._next_notice = now + NOTICE_SECONDS
        self._next_look = now
        self._stopped = StoppedProcesses(launcher_pid())

    def wait(self) -> None:
        now = time.monotonic()
        if now > self._end:
            raise TimeoutError(
                f"rank {self._rank} waited {RENDEZVOUS_SECONDS:.0f} s for {self._names()}; check "
                "that torchrun was started on every node"
            )
        if now > self._next_notice:
            self._next_notice = now + NOTICE_SECONDS
            if self._is_loud:
                print(f"rank {self._rank} waits for {self._names()}", file=sys.stderr, flush=True)
        if now > self._next_look:
            self._next_look = now + LOOK_SECONDS
            self._kill_stopped()
        time.sleep(POLL_SECONDS)

    def _kill_stopped(self) -> None:
        here = ranks_here()
        seconds = self._stopped.look(here.values())
        for rank, process in here.items():
            if seconds.get(process, 0.0) > STOPPED_SECONDS:
                text = f"rank {rank} ({process}) was stopped (SIGSTOP) while it started"
                print(f"{text}, and is killed", file=sys.stderr, flush=True)
                process.kill()


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
        raise UserError(
            f"MASTER_ADDR={launch.master} does not resolve on {socket.gethostname()}: {problem}; "
            "name a host or an address that every node can reach"
        )


def _connect(launch: Launch) -> dist.TCPStore:
    """The store of torchrun, or of rank 0."""
    is_master = launch.rank == 0 and not launch.launcher_has_store
    if not is_master:
        address = f"{launch.master}:{launch.port}"
        _wait_for_port(launch, f"the store at {address}, of rank 0 or its torchrun")
        if launch.rank == 0 and launch.is_one_node and is_open_to_the_network(launch.port):
            print(OPEN_STORE, file=sys.stderr, flush=True)
    # Not torch's own rendezvous: some versions prefix keys with a node's count of restarts.
    return dist.TCPStore(
        launch.master, launch.port, launch.world_size, is_master=is_master, wait_for_workers=False,
        timeout=timedelta(seconds=STORE_SECONDS),
        master_listen_fd=_listen(launch) if is_master else None,
    )  # fmt: skip


def _listen(launch: Launch) -> int:
    """For rank 0's own store: on one node at the address alone that all ranks were given."""
    family = socket.getaddrinfo(launch.master, launch.port, type=socket.SOCK_STREAM)[0][0]
    host = launch.master if launch.is_one_node else ""
    try:
        server = socket.create_server((host, launch.port), family=family, backlog=socket.SOMAXCONN)
        return server.detach()
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
    address = f"{launch.master}:{launch.port}"
    raise UserError(f"port {address} is taken by another program; set MASTER_PORT to a free one")


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
        raise UserError(answer)
    processes = [Process(*process) for process in answer]
    return Session(session, dist.PrefixStore(session, store), processes, frozenset(), None)


def _get(store: dist.Store, key: str, patience: Patience) -> bytes:
    while not store.check([key]):
        patience.wait()
    return store.get(key)


def _open_session(store: dist.Store, me: JoinRequest) -> Session:
    """Answer join requests until all ranks have joined. Those of dead ranks have no effect."""
    session = uuid.uuid4().hex
    requests = {0: me}
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
    monitored = frozenset(r for r, request in requests.items() if request.launch.has_monitor)
    free = [request.free_bytes for request in requests.values() if request.free_bytes is not None]
    least = min(free, default=None)
    return Session(session, dist.PrefixStore(session, store), processes, monitored, least)


def _check_rank(
    store: dist.Store, session: str, requests: dict[int, JoinRequest], rank: int
) -> None:
    """Refuse a rank that differs; all ranks get the reason."""
    nodes = {r.launch.node: r for _, r in sorted(requests.items(), reverse=True)}
    try:
        for other in (requests[0], nodes[requests[rank].launch.node]):
            other.check_same(requests[rank])
    except ValueError as error:
        store.set(f"{session}/answer", json.dumps(str(error)))
        time.sleep(REFUSAL_SECONDS)  # for ranks to read it, if this process has the store
        raise


def _name_missing(ranks: Sequence[int]) -> str:
    """Ranks by number; those of this node that were stopped also with their processes."""
    here = ranks_here()
    found = {rank: here[rank] for rank in ranks if rank in here}
    stopped = [f"rank {rank} is stopped ({p})" for rank, p in found.items() if p.is_stopped]
    return "; ".join([name_ranks(ranks), *stopped])


def describe(device_map: str, options: Mapping[str, Any]) -> Description:
    """What must be equal on all ranks, as JSON reads it back."""
    shared = {name: value for name, value in options.items() if name not in OWN_BY_RANK}
    described = {
        "the code of roll_lite": _digest(_package()),
        "the code of the program": _digest(_program()),
        "torch": torch.__version__,
        "Python": platform.python_version(),
        "the device map": device_map,
        "options": shared,
    }
    return json.loads(json.dumps(described, default=str))


def differences(own: Description, other: Description) -> str:
    """Name and both values of each difference; empty if there is none."""
    pairs = {name: (other[name], own[name]) for name in own if name != "options"}
    names = sorted({*own["options"], *other["options"]})
    pairs |= {name: (other["options"].get(name), own["options"].get(name)) for name in names}
    unequal = {name: (there, here) for name, (there, here) in pairs.items() if there != here}
    return "; ".join(f"{name} is {there}, not {here}" for name, (there, here) in unequal.items())


def _package() -> dict[str, Path]:
    """Files by name, without the recipes: only the one that runs matters."""
    files = {str(path.relative_to(PACKAGE)): path for path in PACKAGE.rglob("*.py")}
    return {name: path for name, path in files.items() if not name.startswith("recipes")}


def _program() -> dict[str, Path]:
    """The file that was started, and modules beside it, such as a recipe that it imports."""
    started = getattr(sys.modules.get("__main__"), "__file__", None)
    if started is None:  # a notebook
        return {}
    folder = os.path.dirname(os.path.abspath(started))
    files = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    beside = {file for file in files if file and os.path.dirname(os.path.abspath(file)) == folder}
    # torch.ops calls itself _ops.py, which is no file
    return {os.path.basename(file): Path(file) for file in beside if os.path.isfile(file)}


def _digest(files: Mapping[str, Path]) -> str:
    digest = hashlib.sha256()
    for name in sorted(files):
        content = files[name].read_bytes()
        digest.update(f"{name} {len(content)} ".encode() + content)
    return digest.hexdigest()[:12]
