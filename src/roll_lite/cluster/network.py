"""Which network interface gloo and RPC use.

Left alone, both take the address that this host's own name resolves to. That is often the loopback
address, where other nodes cannot reach it. The interface that leads to the store is the right one.
"""

import os
import socket
import struct
from fcntl import ioctl
from pathlib import Path

from roll_lite.cluster.world import Launch

VARIABLES = ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface


def choose_interface(launch: Launch) -> None:
    """Point gloo and RPC to the interface towards the store, unless the user has chosen one."""
    wanted = [name for name in VARIABLES if name not in os.environ]
    if not wanted:
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
    if interface is not None:  # an IPv6 address, say: torch's own choice stands
        os.environ.update(dict.fromkeys(wanted, interface))


def _own_address(host: str, port: int) -> str:
    """This host's address on the way to another; connecting UDP sends nothing."""
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
