"""A process may have any bytes as its name, which say nothing about it or others."""

import math
import os
import signal
import time

import pytest
from support.process_checks import wait_until
from support.scripts import start_script

from roll_lite import processes
from roll_lite.processes import (
    Process,
    StoppedProcesses,
    kill_tree,
    memory_of,
    num_tasks_of,
    read_proc,
    read_stat,
    state_of,
)

NAMES = [b"\xff", b"\rVmRSS: x", b"\rVmRSS: 0 kB", b"x\nVmRSS: 1 kB", b"a) R 1 (b) Z 1"]
MEGABYTES = 64
NAMED = """
    import ctypes, time
    held = b"x" * ({megabytes} << 20)
    ctypes.CDLL(None).prctl(15, {name!r}, 0, 0, 0)
    print("named", flush=True)
    time.sleep(600)
"""


@pytest.fixture(params=NAMES)
def named(request):
    """A process of that name that is no child's child of what the tests kill."""
    process = start_script(NAMED.format(megabytes=MEGABYTES, name=request.param))
    assert process.stdout.readline() == "named\n"
    yield process.pid
    process.kill()
    process.wait()


def test_what_is_read_of_a_process_is_not_its_name(named):
    stat = read_stat(named)
    assert stat.state in "RS" and stat.parent == os.getpid() and stat.start > 0
    proc = os.open("/proc", os.O_PATH)
    for limit in (1 << 40, 0):  # the latter finds out what is shared
        assert 0.9 < memory_of([named], limit, proc) / (MEGABYTES << 20) < 2
    os.close(proc)
    assert b"Threads:" in read_proc(named, "status") and num_tasks_of(os.getuid()) >= 2


def test_a_process_can_be_killed_beside_one(named):
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        pid = os.fork()
        if pid:
            os.write(writing, str(pid).encode())
        while True:
            signal.pause()
    grandchild = int(os.read(reading, 20))
    assert kill_tree(child) == -signal.SIGKILL
    wait_until(lambda: state_of(grandchild) in ("", "Z"))
    assert state_of(named) == "S"


def test_page_tables_count():
    """Pages that were only read take no memory of their own; what leads to them does."""
    script = """
        import ctypes, time
        libc = ctypes.CDLL(None)
        libc.mmap.restype = ctypes.c_void_p
        for number in range(1, 5001):  # each in a table of its own
            where = ctypes.c_void_p(number << 32)
            libc.mmap(where, ctypes.c_size_t(4096), 1, 0x100022, -1, ctypes.c_long(0))
            ctypes.string_at(where.value, 1)
        print("read", flush=True)
        time.sleep(600)
    """
    process = start_script(script)
    assert process.stdout.readline() == "read\n"
    proc = os.open("/proc", os.O_PATH)
    try:
        for limit in (1 << 40, 0):
            assert memory_of([process.pid], limit, proc) > 5000 * 8192
    finally:
        os.close(proc)
        process.kill()
        process.wait()


@pytest.fixture
def sleeping():
    """Starts processes that do nothing; sends them signals and waits until these have landed."""
    started = []

    def start():
        started.append(start_script("import time\nprint('sleeps', flush=True)\ntime.sleep(600)"))
        assert started[-1].stdout.readline() == "sleeps\n"
        return Process.find(started[-1].pid)

    yield start
    for each in started:
        each.kill()
        each.wait()


def send(process, number):
    os.kill(process.pid, number)
    wait_until(lambda: process.is_stopped == (number == signal.SIGSTOP))


def test_only_processes_that_stay_stopped_without_their_launcher_count(sleeping, monkeypatch):
    monkeypatch.setattr(processes, "_PAUSE_SECONDS", math.inf)
    launcher, one, other = sleeping(), sleeping(), sleeping()
    stopped = StoppedProcesses(launcher.pid)
    assert stopped.look([one, other]) == {}
    send(one, signal.SIGSTOP)
    assert stopped.look([one, other]) == {one: 0.0}
    time.sleep(0.01)
    assert stopped.look([one, other])[one] > 0
    send(launcher, signal.SIGSTOP)
    assert stopped.look([one, other]) == {one: 0.0}
    send(launcher, signal.SIGCONT)
    send(one, signal.SIGCONT)
    assert stopped.look([one, other]) == {}


def test_a_launcher_that_cannot_be_seen_is_no_error(sleeping):
    """It has ended, or /proc hides processes of other users."""
    process = sleeping()
    stopped = StoppedProcesses(2**22 + 1)  # above the highest number
    send(process, signal.SIGSTOP)
    assert stopped.look([process]).keys() == {process}
