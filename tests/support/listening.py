"""Run under torchrun by test_loopback.py: prints the addresses on which its processes listen."""

import os
from pathlib import Path

from roll_lite.cluster.cluster import Cluster


def sockets_of(pid):
    links = (os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir() if path.is_symlink())
    return {link[len("socket:[") : -1] for link in links if link.startswith("socket:[")}


def addresses(pids):
    inodes = set().union(*map(sockets_of, pids))
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == "0A" and rest[5] in inodes:
                yield local.partition(":")[0]


if __name__ == "__main__":
    with Cluster("train=all", "cpu"):
        parent = os.getppid()
        ranks = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
        print("listening on", *sorted(set(addresses([parent, *ranks]))), flush=True)
