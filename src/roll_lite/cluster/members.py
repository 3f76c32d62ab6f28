"""The processes of the ranks: where they run, whether they still do, and how to end one."""

import json
import os
import signal
import socket
from dataclasses import asdict, dataclass
from pathlib import Path

import torch.distributed as dist


@dataclass(frozen=True, slots=True)
class Member:
    host: str
    pid: int
    realm: str
    """Processes of the same realm see each other's pids: one boot of one kernel, one namespace."""

    def __str__(self) -> str:
        return f"pid {self.pid} on {self.host}"

    def process_state(self) -> str:
        """running, stopped or gone. Only a member of the same realm can tell."""
        try:
            stat = Path(f"/proc/{self.pid}/stat").read_text()
        except FileNotFoundError:
            return "gone"
        letter = stat.rpartition(")")[2].split()[0]
        # t, stopped by a debugger, is somebody's wish.
        return {"T": "stopped", "Z": "gone", "X": "gone"}.get(letter, "running")

    def kill(self) -> None:
        try:
            os.kill(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


def this_member() -> Member:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return Member(socket.gethostname(), os.getpid(), f"{boot} {os.readlink('/proc/self/ns/pid')}")


def exchange_members(store: dist.Store, rank: int, world_size: int) -> list[Member]:
    """The processes of all ranks."""
    store.set(f"member/{rank}", json.dumps(asdict(this_member())))
    answers = store.multi_get([f"member/{i}" for i in range(world_size)])
    return [Member(**json.loads(answer)) for answer in answers]
