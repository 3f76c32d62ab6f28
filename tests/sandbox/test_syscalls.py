"""System calls that programs do not have, the memory of a whole job, and what goes on working."""

import os
import platform
import re
import resource
import socket
import struct
from pathlib import Path
from textwrap import dedent

import pytest
from support.scripts import run_script

from roll_lite.sandbox.kernel import NUMBERS, filter_for
from roll_lite.sandbox.sandbox import Limits

HEADERS = (
    "/usr/include/x86_64-linux-gnu/asm/unistd_64.h",
    "/usr/include/asm/unistd_64.h",
    "/usr/include/asm-generic/unistd.h",
)
EXAMINED = {"mmap", "clone", "prlimit64", "setrlimit", "setsockopt", "socket", "socketpair"}


def test_numbers_are_those_of_the_kernels_headers():
    name = {"x86_64": "unistd_64.h", "aarch64": "asm-generic/unistd.h"}[platform.machine()]
    found = [path for path in HEADERS if path.endswith(name) and Path(path).exists()]
    if not found:
        pytest.skip("there are no headers of the kernel")
    text = Path(found[0]).read_text()
    known = dict(re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", text))
    numbers = NUMBERS[platform.machine()]
    newer = {call for call in numbers if call not in known}
    assert newer <= {
        "memfd_secret", "process_mrelease", "quotactl_fd", "mount_setattr", "setxattrat"
    }  # fmt: skip
    assert numbers == {call: int(known.get(call, numbers[call])) for call in numbers}


def run_filter(machine: str, call: int, arguments: tuple[int, ...], architecture: int) -> int:
    """What the filter answers: a second implementation of the instructions that it uses."""
    data = {0: call, 4: architecture}
    for index, argument in enumerate(arguments):
        data[16 + 8 * index] = argument & 0xFFFFFFFF
        data[20 + 8 * index] = argument >> 32
    program, at, value = filter_for(machine), 0, 0
    while True:
        code = int.from_bytes(program[8 * at : 8 * at + 2], "little")
        if_true, if_false = program[8 * at + 2], program[8 * at + 3]
        constant = int.from_bytes(program[8 * at + 4 : 8 * at + 8], "little")
        at += 1
        if code == 0x06:
            return constant
        if code == 0x20:
            value = data[constant]
        elif code == 0x54:
            value &= constant
        else:
            holds = {0x15: value == constant, 0x35: value >= constant, 0x45: value & constant}[code]
            at += if_true if holds else if_false


ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
ALLOW, EPERM, ENOSYS, EAFNOSUPPORT = 0x7FFF0000, 0x50001, 0x50026, 0x50061
EPROTONOSUPPORT = 0x5005D


@pytest.mark.parametrize("machine", NUMBERS)
def test_the_filter(machine):
    numbers = NUMBERS[machine]

    def answer(call, *arguments, architecture=ARCHITECTURES[machine]):
        number = numbers.get(call, call)
        return run_filter(machine, number, (*arguments, 0, 0, 0, 0)[:6], architecture)

    for call in range(600):
        names = [name for name, number in numbers.items() if number == call]
        expected = EPERM if names and names[0] not in EXAMINED else ALLOW
        if names == ["clone3"]:
            expected = ENOSYS
        if not names or names[0] not in ("setsockopt", "socket", "socketpair"):
            assert answer(call) == expected, (call, names)
    assert answer(63, architecture=0x40000003) == EPERM
    assert answer(0x40000000 + 1) == EPERM
    for family in range(50):
        expected = ALLOW if family in (1, 2, 10) else EAFNOSUPPORT
        kind = 0x80801  # SOCK_STREAM with flags
        assert answer("socket", family, kind) == answer("socketpair", family, kind) == expected
    for kind in range(1, 8):
        assert answer("socketpair", 1, kind) == (ALLOW if kind in (1, 5) else EPROTONOSUPPORT)
        assert answer("socket", 2, kind) == ALLOW
    for flag in (
        0x80,
        0x20000,
        0x2000000,
        0x4000000,
        0x8000000,
        0x10000000,
        0x20000000,
        0x40000000,
    ):
        assert answer("clone", flag | 17) == EPERM
    assert answer("clone", 0x3D0F00) == ALLOW  # a thread
    assert answer("mmap", 0, 4096, 3, 0x22) == answer("mmap", 0, 4096, 3, 1) == ALLOW
    assert answer("mmap", 0, 4096, 3, 0x21) == EPERM
    assert answer("mmap", 0, 4096, 3, 0x40022) == EPERM  # huge pages
    for pointer in (1, 1 << 32, (1 << 47) - 8):
        assert answer("prlimit64", 0, resource.RLIMIT_CORE, pointer) == EPERM
        assert answer("prlimit64", 0, resource.RLIMIT_AS, pointer) == ALLOW
    assert answer("prlimit64", 0, resource.RLIMIT_CORE, 0) == ALLOW
    assert answer("setrlimit", resource.RLIMIT_CORE) == EPERM
    for option, is_large in [
        *((getattr(socket, name), False) for name in ("SO_REUSEADDR", "SO_KEEPALIVE", "SO_LINGER")),
        *((getattr(socket, name), True) for name in ("SO_SNDBUF", "SO_RCVBUF")),
        *((option, True) for option in (26, 32, 33, 50, 51, 52)),
    ]:
        expected = EPERM if is_large else ALLOW
        assert answer("setsockopt", 3, socket.SOL_SOCKET, option) == expected
    assert answer("setsockopt", 3, socket.IPPROTO_TCP, socket.TCP_NODELAY) == ALLOW
    assert answer("setsockopt", 3, socket.IPPROTO_TCP, 14) == EPERM  # keys for MD5
    assert answer("setsockopt", 3, socket.IPPROTO_IPV6, socket.IPV6_V6ONLY) == ALLOW
    for level in (0, 17, 41, 263):
        assert answer("setsockopt", 3, level, 35) == EPERM


def test_calls_are_refused(sandbox):
    calls = sorted(set(NUMBERS[platform.machine()].values()))
    program = f"""
        import ctypes, errno
        libc = ctypes.CDLL(None, use_errno=True)
        calls, refused = {calls}, []
        for call in calls:
            if libc.syscall(ctypes.c_long(call), *[ctypes.c_long(-1)] * 6) == -1:
                refused.append(errno.errorcode[ctypes.get_errno()])
        print(len(refused) == len(calls), sorted(set(refused)))
    """
    outcome = sandbox.run(dedent(program))
    # clone and mmap with such arguments fail in any case
    assert outcome.stdout.startswith("True") and "'EPERM'" in outcome.stdout, outcome.stderr
    assert not {"'EFAULT'", "'EBADF'"} & set(outcome.stdout.split()), outcome.stdout


def test_families_of_sockets(sandbox):
    program = """
        import socket
        for family in range(64):
            try:
                socket.socket(family, socket.SOCK_DGRAM)
                print(family)
            except OSError:
                pass
    """
    assert set(sandbox.run(dedent(program)).stdout.split()) <= {"1", "2", "10"}


def test_keys_of_the_user_are_left_behind():
    script = """
        import ctypes, os
        from roll_lite.sandbox import kernel
        libc = ctypes.CDLL(None, use_errno=True)
        numbers = kernel.NUMBERS[os.uname().machine]
        def call(name, *arguments):
            return libc.syscall(ctypes.c_long(numbers[name]), *arguments)
        def has_key():
            return call("keyctl", 10, -3, b"user", b"secret", 0) > 0
        kernel.leave_keyring()  # so that the test changes no keyring but its own
        added = call("add_key", b"user", b"secret", b"text", ctypes.c_size_t(4), -3)
        print("skip" if added == -1 else has_key())
        kernel.leave_keyring()
        print(has_key())
    """
    done = run_script(script).stdout.split()
    if done[0] == "skip":
        pytest.skip("this kernel has no keys")
    assert done == ["True", "False"]


# Memory

SMALL = Limits(memory_mib=160, seconds=20, processes=256)
HOLD = """
    import os, sys, time
    def hold(number, make):
        "In so many processes."
        for _ in range(number):
            reading, writing = os.pipe()
            if os.fork() == 0:
                kept = make()
                os.write(writing, b"x")
                time.sleep(100)
            os.close(writing)
            os.read(reading, 1)
        time.sleep(1)
        print("HELD")
"""


def test_the_memory_limit_is_of_the_whole_job(sandbox):
    outcome = sandbox.run(dedent(HOLD) + "hold(6, lambda: b'x' * (50 << 20))", limits=SMALL)
    assert (outcome.kind, outcome.stdout) == ("memory", "")


def test_shared_pages_count_once(sandbox):
    if os.geteuid() != 0:
        pytest.skip("to other users the kernel does not tell what is shared")
    program = dedent(HOLD) + "kept = b'x' * (60 << 20)\nhold(5, lambda: None)"
    outcome = sandbox.run(program, limits=SMALL)
    assert (outcome.kind, outcome.stdout) == ("ok", "HELD\n")


def test_files_count_too(full):
    program = """
        import time
        for number in range(20):
            with open(str(number), "wb") as file:
                file.write(b"x" * (10 << 20))
        time.sleep(1)
        print("HELD")
    """
    limits = Limits(memory_mib=128, disk_mib=256)
    assert full.run(dedent(program), limits=limits).kind == "memory"


SYSTEM_V = "import ctypes\nif ctypes.CDLL(None).{} == -1: raise OSError"
HIDDEN = {
    "memfd": "import os\nos.memfd_create('x')",
    "System V memory": SYSTEM_V.format("shmget(0, 1 << 20, 0o1600)"),
    "System V semaphores": SYSTEM_V.format("semget(0, 100, 0o1600)"),
    "System V messages": SYSTEM_V.format("msgget(0, 0o1600)"),
    "shared memory without a file": "import mmap\nmmap.mmap(-1, 1 << 20)",
}


XATTR = "import os\nos.mkdir('x')\nos.setxattr('x', 'system.posix_acl_access', ACL)"
ACL = struct.pack("<IHHIHHIHHI", 2, 1, 7, 2**32 - 1, 4, 7, 2**32 - 1, 32, 7, 2**32 - 1)
HIDDEN |= {
    "large sockets": (
        "import socket\na, b = socket.socketpair()\n"
        "a.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 22)"
    ),
    "datagrams of closed sockets": (
        "import socket\na, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)"
    ),
    "datagrams by another name": (
        "import socket\na, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_RAW)"
    ),
    "Landlock rules": (
        "import ctypes, struct\nif ctypes.CDLL(None).syscall(444, struct.pack('QQ', 0, 3), "
        "ctypes.c_size_t(16), 0) == -1: raise OSError"
    ),
    "inotify": "import ctypes\nif ctypes.CDLL(None).inotify_init() == -1: raise OSError",
    "epoll": "import select\nselect.epoll()",
    "lists of access": XATTR.replace("ACL", repr(ACL)),
}


@pytest.mark.parametrize("name", HIDDEN)
def test_no_memory_is_hidden(full, name):
    """That which a process can hold without it being counted as its own."""
    outcome = full.run(HIDDEN[name])
    assert outcome.kind == "error" and re.search("OSError|PermissionError", outcome.stderr)


COUNTED = {
    "sockets that nobody accepts": """
        import socket, time
        listener = socket.socket(socket.AF_UNIX)
        listener.bind("s")
        listener.listen(4096)
        for _ in range(1000):
            sender = socket.socket(socket.AF_UNIX)
            sender.setblocking(False)
            sender.connect("s")
            try:
                while True:
                    sender.send(bytes(1 << 15))
            except BlockingIOError:
                sender.close()
        time.sleep(1)
    """,
    "tables of pages": """
        import ctypes, time
        libc = ctypes.CDLL(None)
        libc.mmap.restype = ctypes.c_void_p
        for number in range(1, 40000):
            where = ctypes.c_void_p(number << 32)
            if libc.mmap(where, ctypes.c_size_t(4096), 1, 0x100022, -1, ctypes.c_long(0)) > 0:
                ctypes.string_at(where.value, 1)
        time.sleep(1)
    """,
}


def test_memory_of_processes_whose_first_thread_has_ended_counts(sandbox):
    """To ask such a process is not enough."""
    program = """
        import ctypes, os, threading, time
        def hold():
            time.sleep(0.5)  # until the first thread has ended
            kept.append(b"x" * (30 << 20))
            time.sleep(600)
        kept = []
        for _ in range(6):
            if os.fork() == 0:
                threading.Thread(target=hold).start()
                ctypes.CDLL(None).syscall(EXIT, 0)
        time.sleep(5)
    """
    number = {"x86_64": "60", "aarch64": "93"}[platform.machine()]
    outcome = sandbox.run(dedent(program).replace("EXIT", number), limits=SMALL)
    assert outcome.kind == "memory", outcome.stderr


@pytest.mark.parametrize("name", COUNTED)
def test_memory_of_the_kernel_counts(full, name):
    outcome = full.run(dedent(COUNTED[name]), limits=SMALL)
    assert outcome.kind == "memory", outcome.stderr


def test_timers_are_few(sandbox):
    program = """
        import ctypes
        libc = ctypes.CDLL(None)
        timer, number = ctypes.c_void_p(), 0
        while number < 10000 and libc.timer_create(0, None, ctypes.byref(timer)) == 0:
            number += 1
        print(number)
    """
    assert int(sandbox.run(dedent(program)).stdout) <= 1024


def test_standard_input_cannot_grow(sandbox):
    program = "import os\nprint(os.read(0, 9))\nos.write(0, b'more')"
    outcome = sandbox.run(program, stdin="text")
    assert (outcome.kind, outcome.stdout) == ("error", "b'text'\n")


def test_programs_die_before_others(rlimits):
    program = (
        "print(open('/proc/self/oom_score_adj').read())\nopen('/proc/self/oom_score_adj', 'w')"
    )
    assert rlimits.run(program).stdout.strip() == "1000"


# What goes on working

ORDINARY = {
    "threads": (
        "from concurrent.futures import ThreadPoolExecutor\n"
        "print(sum(ThreadPoolExecutor(4).map(abs, range(9))))", "36"
    ),
    "processes": (
        "from multiprocessing import get_context\nc = get_context('fork')\nq = c.Queue()\n"
        "p = c.Process(target=q.put, args=(36,))\np.start()\nprint(q.get())\np.join()", "36"
    ),
    "shared values": (
        "from multiprocessing import get_context\nc = get_context('fork')\nv = c.Value('i', 0)\n"
        "def add():\n    for _ in range(18):\n        with v.get_lock(): v.value += 1\n"
        "ps = [c.Process(target=add) for _ in range(2)]\n[p.start() for p in ps]\n"
        "[p.join() for p in ps]\nprint(v.value)", "36"
    ),
    "coroutines": (
        "import asyncio\nasync def f(x):\n    await asyncio.sleep(0.01)\n    return x\n"
        "async def main(): return sum(await asyncio.gather(*map(f, range(9))))\n"
        "print(asyncio.run(main()))", "36"
    ),
    "sockets": (
        "import socket\na, b = socket.socketpair()\na.sendall(b'36')\n"
        "print(b.recv(9).decode())", "36"
    ),
    "temporary files": (
        "import tempfile\nwith tempfile.NamedTemporaryFile('w+') as f:\n    f.write('36')\n"
        "    f.seek(0)\n    print(f.read())", "36"
    ),
    "mapped files": (
        "import mmap\nopen('x', 'wb').write(b'36')\nf = open('x', 'r+b')\n"
        "m = mmap.mmap(f.fileno(), 0)\nprint(m[:2].decode())", "36"
    ),
    "alarms": (
        "import signal\nsignal.signal(signal.SIGALRM, lambda *_: print(36))\nsignal.alarm(1)\n"
        "signal.pause()", "36"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ORDINARY)
def test_ordinary_programs_work(full, name):
    program, printed = ORDINARY[name]
    outcome = full.run(program)
    assert (outcome.kind, outcome.stdout.strip()) == ("ok", printed), outcome.stderr
