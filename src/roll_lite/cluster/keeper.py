"""The keeper of a spare rank: the process that torchrun started, which outlives the rank.

torchrun ends all ranks as soon as one has failed. A spare rank only generates, and other replicas
can do its work, so torchrun must not see it fail. Such a rank forks before it touches a device. The
child is the rank. The parent, its keeper, waits for it and ends as it ended; once the cluster is
complete it waits for the end of the run instead.
"""

import json
import os
import resource
import signal
import sys
import time
from contextlib import suppress
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist

from roll_lite.cluster.agent import Process
from roll_lite.cluster.device_map import parse_device_map
from roll_lite.cluster.rendezvous import STORE_SECONDS, Launch
from roll_lite.sandbox.kernel import die_with_parent

ENDED = "ended"
"""The key in a session's store that says that the run ends well: no rank is needed any more."""
FORWARDED = (signal.SIGTERM, signal.SIGHUP)
POLL_SECONDS = 0.25
STOPPED_SECONDS = 150.0  # the controller gives up a silent rank before


class Keeper:
    """The rank's side: what it tells its keeper."""

    def __init__(self, pipe: int):
        self._pipe = pipe
        self._process = Process.find(os.getppid())

    def wake(self) -> None:
        """Continue it if it was stopped: torchrun would wait for it when the run has ended."""
        if self._process.is_stopped:
            with suppress(OSError):
                os.kill(self._process.pid, signal.SIGCONT)

    def let_go(self, launch: Launch, session: str) -> None:
        """The run can go on without this rank from now on."""
        text = json.dumps([launch.master, launch.port, f"{session}/{ENDED}"])
        os.write(self._pipe, text.encode())


def needs_keeper(launch: Launch, device_map: str) -> bool:
    """Whether this rank is spare, torchrun watches it, and it can still fork."""
    if launch.rank == 0 or not launch.agent or device_map == "auto":  # which has no spare ranks
        return False
    is_spare = parse_device_map(device_map, launch.world_size).is_spare(launch.rank)
    return is_spare and not torch.cuda.is_initialized()


def fork_rank() -> Keeper:
    """Returns in the child, which dies with its keeper; the parent exits from here."""
    reader, writer = os.pipe()
    os.set_blocking(reader, False)  # something that the rank started may still hold the other end
    sys.stdout.flush()
    sys.stderr.flush()
    keeper = os.getpid()
    rank = os.fork()
    if rank:
        os.close(writer)
        _keep(rank, reader)
    os.close(reader)
    with suppress(OSError):  # its heartbeat looks at the parent, too
        die_with_parent()
    if os.getppid() != keeper:
        os._exit(1)
    return Keeper(writer)


def _keep(rank: int, pipe: int) -> NoReturn:
    received = []

    def forward(signum: int, _: object) -> None:
        received.append(signum)
        os.kill(rank, signum)

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the controller decides what Ctrl-C does
    forwarded = [s for s in FORWARDED if signal.getsignal(s) is not signal.SIG_IGN]
    for signum in forwarded:
        signal.signal(signum, forward)
    _wait_for(rank)
    for signum in forwarded:
        signal.signal(signum, signal.SIG_DFL)
    exit_code = os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1])
    if exit_code and not received and (run := _read(pipe)):
        _wait_for_end(*json.loads(run))
        exit_code = 0
    if exit_code < 0:  # die by the same signal: torchrun reports it
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -exit_code != signal.SIGKILL:
            signal.signal(-exit_code, signal.SIG_DFL)
        os.kill(os.getpid(), -exit_code)
    os._exit(exit_code)


def _wait_for(rank: int) -> None:
    """Until a rank has ended; a signal can still be sent to it afterwards.

    One that stays stopped is killed: the controller cannot do that from another host.
    """
    process, running_at = Process.find(rank), time.monotonic()
    while not os.waitid(os.P_PID, rank, os.WEXITED | os.WNOWAIT | os.WNOHANG):
        time.sleep(POLL_SECONDS)
        if not process.is_stopped:
            running_at = time.monotonic()
        elif time.monotonic() - running_at > STOPPED_SECONDS:
            process.kill()


def _read(pipe: int) -> bytes:
    """What the rank wrote; empty for nothing."""
    try:
        return os.read(pipe, 4096)
    except BlockingIOError:
        return b""


def _wait_for_end(host: str, port: int, key: str) -> None:
    """A run that fails has an end too: torchrun kills this process."""
    seconds = timedelta(seconds=STORE_SECONDS)
    with suppress(RuntimeError):  # the store has ended with rank 0
        store = dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=seconds)
        while not store.check([key]):
            time.sleep(POLL_SECONDS)
