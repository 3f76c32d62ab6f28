"""Who can connect to the ports of a rank.

TensorPipe, below RPC, has neither a key nor Unix sockets with permissions: it reads the first bytes
of any connection as a length, and any message as a call. So its port admits no new connection once
all ranks are connected.
"""

import ctypes
import os
import socket
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

SO_ATTACH_FILTER = 26  # Linux, without any privilege
BPF_RETURN = 0x06
LISTENS = "0A"
ANYWHERE = {"0" * 8, "0" * 32}
"""Addresses in /proc/net/tcp and tcp6 of what listens on all interfaces."""


@contextmanager
def closed_afterwards() -> Iterator[None]:
    """The ports that this process opens in here admit no connection afterwards; those that they
    have stay. The kernel drops the packets, as if nothing were there."""
    before = _listeners().keys()
    yield
    drop_all = ctypes.create_string_buffer(struct.pack("HBBI", BPF_RETURN, 0, 0, 0))
    program = struct.pack("HxxxxxxP", 1, ctypes.addressof(drop_all))
    opened = _listeners()
    for inode in opened.keys() - before:
        try:
            opened[inode].setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, program)
        except OSError as error:  # another kernel than Linux behind the same calls, as gVisor
            text = f"port {opened[inode].getsockname()[1]} stays open to all programs: {error}"
            print(text, file=sys.stderr, flush=True)


def _listeners() -> dict[int, socket.socket]:
    """Sockets of this process that listen, by their inodes."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # closed meanwhile, or no socket
            descriptor = os.dup(int(name))
            try:
                one = socket.socket(fileno=descriptor)
            except OSError:
                os.close(descriptor)
                raise
            if one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                found[os.fstat(descriptor).st_ino] = one
    return found


def is_open_to_the_network(port: int) -> bool:
    """Whether what listens at this port does so on all interfaces of this machine."""
    lines = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]
    ]
    local = [line[1].split(":") for line in lines if line[3] == LISTENS]
    return any(address in ANYWHERE and int(number, 16) == port for address, number in local)
