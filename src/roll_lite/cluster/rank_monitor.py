"""The monitor of a spare rank: the process that torchrun started, which outlives the rank.

torchrun ends all ranks as soon as one has failed. A spare rank only generates, and other replicas
can do its work, so torchrun must not see it fail. Such a rank forks before it touches a device. The
child is the rank; the parent, its monitor, waits for it and then exits with its exit code. Once the
rank may fail, which it says when the cluster is complete, the monitor of a rank that has failed
waits for the end of the run instead.
"""

import json
import os
import resource
import signal
import sys
import time
from contextlib import suppress
from datetime import timedelta
from typing import NamedTuple, NoReturn

import torch
import torch.distributed as dist

from roll_lite.cluster.launch import Launch
from roll_lite.device_map import DeviceMap
from roll_lite.processes import Process, StoppedProcesses, die_with_parent

ENDED = "ended"
"""The key in a session's store that says that the run ends well: no rank is needed any more."""
FORWARDED = (signal.SIGTERM, signal.SIGHUP)
FORK_WORKS = b"y"
FORK_IS_BAD = b"n"
POLL_SECONDS = 0.25
SLOW_POLL_SECONDS = 10.0  # of the store, while the rank lives
STORE_SECONDS = 20.0  # for the store to answer
STOPPED_SECONDS = 150.0  # the controller gives up a silent rank before
LATE_SECONDS = 30.0  # for the rank to exit when the run has ended


class RankMonitor:
    """What a rank tells its monitor."""

    def __init__(self, pipe: int):
        self._pipe = pipe
        self._process = Process.find(os.getppid())

    def wake(self) -> None:
        """Continue the monitor if it was stopped: torchrun waits for it at the end of the run."""
        if self._process.is_stopped:
            with suppress(OSError):
                os.kill(self._process.pid, signal.SIGCONT)

    def allow_failure(self, launch: Launch, session: str) -> None:
        """The run can go on without this rank from now on."""
        self._send([launch.master, launch.port, f"{session}/{ENDED}"])

    def forbid_failure(self) -> None:
        """This rank ends because the run does, so its exit code counts again."""
        self._send(None)

    def _send(self, run: list | None) -> None:
        os.write(self._pipe, json.dumps(run).encode() + b"\n")


def needs_monitor(launch: Launch, device_map: DeviceMap) -> bool:
    """Whether this rank is spare, and torchrun watches it."""
    return launch.rank > 0 and bool(launch.launcher) and device_map.is_spare(launch.rank)


def fork_rank() -> RankMonitor | None:
    """Returns in the child, which dies with its monitor; the parent exits from here.

    Returns None in the parent if a child cannot use CUDA, because this process already has. Then
    the rank has no monitor.
    """
    reader, writer = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    monitor = os.getpid()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    rank = os.fork()
    if rank:
        os.close(writer)
        if os.read(reader, 1) == FORK_WORKS:
            _monitor_and_exit(rank, reader, mask)
        os.close(reader)
        os.waitpid(rank, 0)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        return None
    os.close(reader)
    with suppress(OSError):  # its heartbeat looks at the parent, too
        die_with_parent()
    is_bad = torch.cuda._is_in_bad_fork()
    os.write(writer, FORK_IS_BAD if is_bad else FORK_WORKS)
    if is_bad or os.getppid() != monitor:
        os._exit(1)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    return RankMonitor(writer)


class _Run(NamedTuple):
    """A run that goes on without the rank: its store, and the key that says that it ends well."""

    host: str
    port: int
    key: str

    def open_store(self) -> dist.Store:
        seconds = timedelta(seconds=STORE_SECONDS)
        return dist.TCPStore(
            self.host, self.port, is_master=False, wait_for_workers=False, timeout=seconds
        )

    def has_ended(self) -> bool:
        with suppress(RuntimeError):  # it is too busy, or gone: then the rank exits by itself
            return self.open_store().check([self.key])
        return False

    def wait(self) -> int:
        """An exit code. If the run fails on this node, torchrun kills this process instead."""
        with suppress(RuntimeError):
            store = self.open_store()
            while not store.check([self.key]):
                time.sleep(POLL_SECONDS)
            return 0
        return 1  # the store has ended before the run


class _Messages:
    """What the rank has sent to its monitor."""

    def __init__(self, pipe: int):
        os.set_blocking(pipe, False)  # something that the rank started may hold the other end
        self._pipe = pipe
        self._text = b""

    def run_without_rank(self) -> _Run | None:
        """The run that goes on if the rank fails now; None if the rank must not fail."""
        with suppress(BlockingIOError):
            while part := os.read(self._pipe, 4096):
                self._text += part
        lines = self._text.splitlines()
        run = json.loads(lines[-1]) if lines else None
        return _Run(*run) if run else None


def _monitor_and_exit(rank: int, pipe: int, mask: set) -> NoReturn:
    """`mask` are the signals to be blocked once this process forwards those that it receives."""
    received = []

    def forward(signum: int, _: object) -> None:
        received.append(signum)
        os.kill(rank, signum)

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the controller decides what Ctrl-C does
    forwarded = [s for s in FORWARDED if signal.getsignal(s) is not signal.SIG_IGN]
    for signum in forwarded:
        signal.signal(signum, forward)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    messages = _Messages(pipe)
    _wait_for(rank, messages)
    for signum in forwarded:
        signal.signal(signum, signal.SIG_DFL)
    exit_code = os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1])
    if exit_code and not received and (run := messages.run_without_rank()):
        exit_code = run.wait()
    if exit_code < 0:  # die by the same signal: torchrun reports it
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -exit_code != signal.SIGKILL:
            signal.signal(-exit_code, signal.SIG_DFL)
        os.kill(os.getpid(), -exit_code)
    os._exit(exit_code)


def _wait_for(rank: int, messages: _Messages) -> None:
    """Until a rank has ended; a signal can still be sent to it afterwards.

    It is killed if it stays stopped, or stays when the run has ended: the controller cannot do that
    from another host.
    """
    process = Process.find(rank)
    stopped = StoppedProcesses(os.getppid())
    asked_at = time.monotonic()
    ended_at = None
    while not os.waitid(os.P_PID, rank, os.WEXITED | os.WNOWAIT | os.WNOHANG):
        time.sleep(POLL_SECONDS)
        now = time.monotonic()
        stopped_for = stopped.look([process]).get(process, 0.0)
        if now - asked_at > SLOW_POLL_SECONDS and ended_at is None:
            asked_at = now
            run = messages.run_without_rank()
            ended_at = now if run and run.has_ended() else None
        if stopped_for > STOPPED_SECONDS or (ended_at and now - ended_at > LATE_SECONDS):
            process.kill()
