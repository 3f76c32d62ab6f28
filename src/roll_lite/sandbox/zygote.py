"""The zygote, which forks a monitor for each job.

It is a fresh interpreter that `Sandbox` starts with an empty environment. It has imported the
modules that programs often use. Jobs pass through it as descriptors that it does not read: all
later programs are copies of its memory.
"""

import gc
import os
import resource
import signal
import socket
from contextlib import suppress
from importlib import import_module

from roll_lite.sandbox.isolation import MAX_DESCRIPTORS, Namespaces, ResourceLimits
from roll_lite.sandbox.monitor import SETUP_SECONDS, monitor_and_exit
from roll_lite.sandbox.sandbox import READY, Job, SandboxError, exchange

PRELOADED = (
    "array", "bisect", "cmath", "collections", "copy", "datetime", "decimal", "enum", "fractions",
    "functools", "hashlib", "heapq", "io", "itertools", "json", "math", "operator", "queue",
    "random", "re", "statistics", "string", "struct", "textwrap", "typing",
)  # fmt: skip
_NUM_DESCRIPTORS = 3
"""Of a job, see `sandbox.exchange`."""
_TRIAL = Job(source="", inputs=[""], tests=["pass"], seconds=SETUP_SECONDS)


def serve(descriptor: int, isolation: str) -> None:
    """Fork monitors one after another. The first answer says why the isolation fails, or READY."""
    client = socket.socket(fileno=os.dup(descriptor))  # a low number, so that programs close it
    os.close(descriptor)
    # SIGTERM may reach all processes of a job. The run still needs this one, and ends it itself.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    for name in PRELOADED:
        import_module(name)
    gc.disable()  # until a program starts: collecting copies the memory that forks share
    gc.freeze()
    resource.setrlimit(resource.RLIMIT_NOFILE, (MAX_DESCRIPTORS, MAX_DESCRIPTORS))
    try:
        place = Namespaces() if isolation == "full" else ResourceLimits()
        exchange(_TRIAL, lambda descriptors: _fork_monitor(place, descriptors))
        os.wait()
    except (OSError, AttributeError, SandboxError, EOFError) as error:
        # AttributeError: a C library without the function
        client.send((str(error).strip() or type(error).__name__).splitlines()[-1].encode())
        return
    client.send(READY.encode())
    with suppress(ConnectionError):
        while descriptors := socket.recv_fds(client, 1, _NUM_DESCRIPTORS)[1]:  # else it has ended
            monitor = _fork_monitor(place, descriptors)
            for descriptor in descriptors:
                os.close(descriptor)
            os.waitpid(monitor, 0)


def _fork_monitor(place: Namespaces | ResourceLimits, descriptors: list[int]) -> int:
    pid = os.fork()
    if pid == 0:
        monitor_and_exit(place, *descriptors)
    return pid
