"""The processes of the ranks: where they run, whether they still do, and how to end one."""

import os
import signal
import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


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
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)


def this_member() -> Member:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return Member(socket.gethostname(), os.getpid(), f"{boot} {os.readlink('/proc/self/ns/pid')}")
