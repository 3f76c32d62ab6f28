"""What torchrun tells this process, and the network interface that leads to the other ranks.

No torch here: a command line asks which rank it is before anything else is imported.
"""

import hashlib
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fcntl import ioctl
from pathlib import Path
from types import FrameType
from typing import TypeVar

from roll_lite.checks import UserError
from roll_lite.processes import (
    RUN_ID,
    Process,
    children_of,
    command_of,
    environment_of,
    launcher_pid,
)

T = TypeVar("T")
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
NCCL_INTERFACE = "NCCL_SOCKET_IFNAME"
LOOPBACK = "127.0.0.1"
LINGER_SECONDS = 5.0
"""Time for the first rank of a node to end torchrun, which acts as soon as one rank has exited."""
POLL_SECONDS = 0.1
TORCHRUN = (b"torchrun", b"torch.distributed.run")
LAST_SECONDS = 60.0
LAST_WORDS = f"""
import select, sys
select.select([int(sys.argv[1])], [], [], {LAST_SECONDS})
print(sys.argv[2], file=sys.stderr)
"""
"""A program without torch that outlives torchrun for an instant."""
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
    master: str = LOOPBACK
    """Host name or address of the store."""
    port: int = 0
    launcher_has_store: bool = False
    """torchrun serves the store, so rank 0 must not."""
    node: int = 0
    launcher: str = ""
    """Identifies this start of torchrun on this node; empty without torchrun. A rank that outlives
    its torchrun finds the store of the next one at the same port."""
    has_monitor: bool = False
    """torchrun does not see this rank fail; see rank_monitor.py."""

    @property
    def is_one_node(self) -> bool:
        """Ranks that torchrun has not started may not be told on how many nodes they are."""
        return self.num_nodes == 1 and self.world_size == self.local_world_size


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
            launcher_has_store=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            node=int(env.get("GROUP_RANK", "0")),
            launcher=_launcher_name(),
        )
    except KeyError as missing:
        raise UserError(
            f"WORLD_SIZE={env['WORLD_SIZE']}, but {missing} is not set; start several ranks with "
            "torchrun, or one with WORLD_SIZE unset"
        ) from None


def first_of_node(question: str, ask: Callable[[], T]) -> T:
    """What the first rank of this node finds, in the form of JSON; the others wait for it.

    Without torchrun every rank asks. Since the ranks were started, a question has one answer.
    """
    launch = read_launch()
    if not launch.launcher or launch.local_world_size == 1:
        return ask()
    name = hashlib.blake2b(question.encode(), digest_size=8).hexdigest()
    path = Path(launch.launcher) / f"{name}.json"
    if launch.local_rank:
        while not path.exists():  # if the first rank fails, torchrun ends this one
            time.sleep(POLL_SECONDS)
        return json.loads(path.read_text())
    found = ask()
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(found))
    partial.rename(path)
    return found


def is_first_rank() -> bool:
    return read_launch().rank == 0


def max_restarts() -> int:
    """How often torchrun would start the ranks again."""
    return int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))


def find_torchrun() -> int | None:
    """The torchrun that started this rank; None if nothing like it did, or it has ended."""
    if RUN_ID not in os.environ:
        return None
    launcher = launcher_pid()
    with suppress(OSError):  # it has ended
        # Other processes may have adopted this one.
        names = {os.path.basename(word) for word in command_of(launcher).split(b"\0")}
        return None if names.isdisjoint(TORCHRUN) else launcher
    return None


def end_torchrun(code: int) -> None:
    """Have torchrun end now, as a restart would only run into the same error again.

    The first rank of each node tells it, and has to exit soon. The others exit with `code` at the
    signal that torchrun sends them; this returns if none comes.
    """
    torchrun = find_torchrun()
    if torchrun is None:
        return
    if read_launch().local_rank == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun sends it to this rank too
        with suppress(OSError):  # it has ended
            os.kill(torchrun, signal.SIGTERM)
        return

    def leave(signum: int, frame: FrameType | None) -> None:
        sys.stdout.flush()
        os._exit(code)

    signal.signal(signal.SIGTERM, leave)
    time.sleep(LINGER_SECONDS)


def may_restart() -> bool:
    """Whether torchrun starts all ranks again when this one fails."""
    names = ("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS")
    done, most = (int(os.environ.get(name, "0")) for name in names)
    return done < most


def print_last(text: str) -> None:
    """Print an error again when torchrun has ended, below what that prints of its own."""
    if (torchrun := find_torchrun()) is None:
        return
    with suppress(OSError):  # it has ended
        waited = os.pidfd_open(torchrun)
        subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", LAST_WORDS, str(waited), f"\n{text}"],
            pass_fds=[waited], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip


def _launcher_name() -> str:
    """Unique for each start of ranks by a torchrun, which makes a folder for their errors."""
    file = os.environ.get(ERROR_FILE)
    return str(Path(file).parent.parent) if file else ""


def ranks_here() -> dict[int, Process]:
    """The processes of all ranks that the same torchrun started, if /proc tells."""
    found = {}
    for pid in children_of(launcher_pid()):
        rank = environment_of(pid).get("RANK")
        with suppress(OSError):  # it has ended
            if rank is not None:
                command = command_of(pid)
                forks = [child for child in children_of(pid) if command_of(child) == command]
                found[int(rank)] = Process.find(forks[0] if forks else pid)  # or its monitor
    return found


def choose_interface(launch: Launch) -> Sequence[str]:
    """Make gloo and RPC use the interface that leads to the store, or on one node the loopback
    interface, unless the user chose one.
    Returns the environment variables that were set.

    By default both use the address that the host's own name resolves to: often the loopback
    address, which other nodes cannot reach. On one node that is all that is needed, wherever the
    store is, so NCCL, which looks for an interface to the network, uses it too.
    """
    names = (*INTERFACE_VARIABLES, NCCL_INTERFACE) if launch.is_one_node else INTERFACE_VARIABLES
    unset = [name for name in names if name not in os.environ]
    if not unset:
        return ()
    address = LOOPBACK if launch.is_one_node else _own_address(launch.master, launch.port)
    interface = _interface_of(address)
    if launch.num_nodes > 1 and address.startswith("127."):
        interface = _default_interface()
        if interface is None:
            raise UserError(
                f"{launch.master} is {address} on this node, which other nodes cannot reach; "
                "start torchrun with --local-addr, or set GLOO_SOCKET_IFNAME and TP_SOCKET_IFNAME"
            )
    if interface is None:  # for an IPv6 address, say: torch's own choice stands
        return ()
    os.environ.update(dict.fromkeys(unset, interface))
    return unset


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
