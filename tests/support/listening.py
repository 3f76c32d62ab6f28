"""Run under torchrun by test_ports.py: prints the addresses on which its processes listen, sends
each of their ports what a browser or a port scanner would, and calls a role."""

import os
import socket
from contextlib import suppress
from pathlib import Path

from roll_lite.cluster.cluster import Cluster

STRAY = (b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", b"\xff" * 64, b"")


class Adder:
    def add(self, numbers):
        return sum(numbers)


def sockets_of(pid):
    links = (os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir() if path.is_symlink())
    return {link[len("socket:[") : -1] for link in links if link.startswith("socket:[")}


def listening(pids):
    """Address and port of all listening sockets of some processes."""
    inodes = set().union(*map(sockets_of, pids))
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == "0A" and rest[5] in inodes:
                address, _, port = local.partition(":")
                yield address, int(port, 16)


def disturb(port):
    for content in STRAY:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=0.5) as stray:
            stray.sendall(content)
            stray.recv(1)


if __name__ == "__main__":
    with Cluster("train=all", "cpu") as cluster:
        parent = os.getppid()
        ranks = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
        print("listening on", *sorted({address for address, _ in listening([parent, *ranks])}))
        adder = cluster.role("train", Adder)
        ports = {port for _, port in listening(ranks)}
        for port in ports:
            disturb(port)
        print(f"{len(ports)} ports, and the sum is {adder.add([1, 2])}", flush=True)
