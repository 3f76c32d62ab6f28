"""A process may have any bytes as its name, which say nothing about it or others."""

import os
import signal

import pytest
from support.process_checks import wait_until
from support.scripts import start_script

from roll_lite.processes import (
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
