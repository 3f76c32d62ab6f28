"""System calls that Python does not offer: namespaces, mounts, capabilities, Landlock, seccomp."""

import ctypes
import errno
import os
import platform
import signal
import struct
from collections.abc import Iterable
from contextlib import suppress
from ctypes import c_int, c_size_t, c_uint32, c_ulong

from roll_lite.processes import checked, libc, prctl

_NAMESPACES = {
    "mount": 0x0002_0000, "uts": 0x0400_0000, "ipc": 0x0800_0000,
    "user": 0x1000_0000, "pid": 0x2000_0000, "net": 0x4000_0000,
}  # fmt: skip

READ_ONLY, NO_SUID, NO_DEVICES, NO_EXEC = 1, 2, 4, 8
REMOUNT, BIND, RECURSIVE, PRIVATE = 32, 4096, 16384, 1 << 18
_DETACH = 2

_PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS = 4, 38
_JOIN_SESSION_KEYRING = 1
_CAPABILITY_VERSION_3 = 0x2008_0522


def _syscall(what: str, number: int, *arguments: object) -> int:
    return checked(what, libc.syscall(ctypes.c_long(number), *arguments))


def _number(call: str) -> int:
    numbers = NUMBERS.get(platform.machine())
    if numbers is None:
        raise OSError(f"{call}: its number on {platform.machine()} is not known here")
    return numbers[call]


def unshare(*namespaces: str) -> None:
    """Move this process to new namespaces."""
    flags = sum(_NAMESPACES[name] for name in namespaces)
    checked(f"new namespaces ({', '.join(namespaces)})", libc.unshare(c_int(flags)))


def fork_init() -> int:
    """As os.fork, but the child is the first process of a new pid namespace.

    Python is not told, so the child can do little more than fork. After `unshare` os.fork does the
    same for one namespace; a process cannot leave that to fork into a second.
    """
    flags = c_ulong(_NAMESPACES["pid"] | signal.SIGCHLD)
    return _syscall("clone", _number("clone"), flags, *[None] * 4)


def mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    encoded = [text.encode() if text is not None else None for text in (source, target, kind)]
    result = libc.mount(*encoded, c_ulong(flags), options.encode())
    checked(f"mount {target}", result)


def pivot_root(new_root: str) -> None:
    """Make a folder that is a mount point the root, and unmount the old root."""
    os.chdir(new_root)
    # This mounts the old root on top of the new one
    _syscall("pivot_root", _number("pivot_root"), b".", b".")
    checked("umount2", libc.umount2(b".", _DETACH))
    os.chdir("/")


def forbid_new_privileges() -> None:
    prctl("NO_NEW_PRIVS", _PR_SET_NO_NEW_PRIVS, 1)


def set_inspectable(is_inspectable: bool) -> None:
    """Whether processes of the same user may read this process's memory."""
    prctl("DUMPABLE", _PR_SET_DUMPABLE, int(is_inspectable))


def die_first(proc: int) -> None:
    """When the machine runs out of memory. `proc` is a descriptor of /proc."""
    with suppress(OSError):  # someone set it to the most already
        write_file("self/oom_score_adj", "1000", proc)


def leave_keyring() -> None:
    """Join a new, empty session keyring."""
    with suppress(OSError):  # a kernel without keys, or a container that takes the call away
        _syscall("keyctl", _number("keyctl"), c_int(_JOIN_SESSION_KEYRING), None)


def drop_capabilities() -> None:
    header = (c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    checked("capset", libc.capset(header, (c_uint32 * 6)()))


def unshare_user(inside: int, proc: int, *others: str) -> None:
    """Move this process to a new user namespace, where it is user and group `inside`, and others.

    `proc` is a descriptor of /proc.
    """
    uid, gid = os.geteuid(), os.getegid()
    unshare("user", *others)
    set_inspectable(True)  # otherwise the files below belong to root
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{inside} {uid} 1"),
        ("gid_map", f"{inside} {gid} 1"),
    ):
        write_file(f"self/{name}", text, proc)


def write_file(path: str, text: str, folder: int) -> None:
    descriptor = os.open(path, os.O_WRONLY, dir_fd=folder)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)


# Landlock: which files a process may reach

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # the same on every architecture
_GET_VERSION, _PATH_BENEATH = 1, 1

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
_TRUNCATE, _USE_DEVICE = 1 << 14, 1 << 15
_RIGHTS_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _USE_DEVICE
_READ = _EXECUTE | _READ_FILE | _READ_DIR
_NUM_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}
"""Rights that each version of Landlock knows; 16 from version 5 on."""
_TCP_BIND_CONNECT = 3
_ABSTRACT_SOCKETS_SIGNALS = 3


def restrict_access(readable: Iterable[str], writable: Iterable[str]) -> None:
    """Allow this process only these files and folders; OSError without Landlock.

    Also forbids TCP, and signals and abstract sockets to other processes, if the kernel's Landlock
    can. Call `forbid_new_privileges` first.
    """
    version = _syscall("landlock", _CREATE_RULESET, None, c_size_t(0), c_uint32(_GET_VERSION))
    all_rights = (1 << _NUM_RIGHTS.get(version, 16)) - 1
    ruleset = struct.pack("=QQQ", all_rights, _TCP_BIND_CONNECT, _ABSTRACT_SOCKETS_SIGNALS)
    size = 8 if version < 4 else 16 if version < 6 else 24
    rules = _syscall("landlock", _CREATE_RULESET, ruleset, c_size_t(size), c_uint32(0))
    for path in readable:
        _allow(rules, path, _READ)
    for path in writable:
        _allow(rules, path, all_rights)
    _syscall("landlock", _RESTRICT_SELF, c_int(rules), c_uint32(0))
    os.close(rules)


def _allow(rules: int, path: str, rights: int) -> None:
    target = os.open(path, os.O_PATH | os.O_CLOEXEC)
    if not os.path.isdir(path):
        rights &= _RIGHTS_OF_FILES
    rule = struct.pack("=Qi", rights, target)
    _syscall("landlock", _ADD_RULE, c_int(rules), c_int(_PATH_BENEATH), rule, c_uint32(0))
    os.close(target)


# Seccomp: which system calls a process may make. The filter takes away what no namespace covers,
# what hides memory from the monitor, and what has often been a way into the kernel. Everything else
# is allowed, so that ordinary programs go on working.

_PR_SET_SECCOMP, _SECCOMP_FILTER = 22, 2
_SAME = {
    "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427, "open_tree": 428,
    "move_mount": 429, "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433, "clone3": 435,
    "pidfd_getfd": 438, "process_madvise": 440, "mount_setattr": 442, "quotactl_fd": 443,
    "landlock_create_ruleset": _CREATE_RULESET, "landlock_add_rule": _ADD_RULE,
    "landlock_restrict_self": _RESTRICT_SELF, "memfd_secret": 447, "process_mrelease": 448,
    "setxattrat": 463,
}  # fmt: skip
"""Calls that have the same number on every architecture."""
NUMBERS: dict[str, dict[str, int]] = {
    "x86_64": {
        "mmap": 9, "shmget": 29, "shmat": 30, "shmctl": 31, "socket": 41, "socketpair": 53,
        "setsockopt": 54, "clone": 56, "semget": 64, "semop": 65, "semctl": 66, "shmdt": 67,
        "msgget": 68, "msgsnd": 69, "msgrcv": 70, "msgctl": 71, "ptrace": 101, "syslog": 103,
        "personality": 135, "modify_ldt": 154, "pivot_root": 155, "adjtimex": 159, "setrlimit": 160,
        "chroot": 161, "acct": 163, "settimeofday": 164, "mount": 165, "umount2": 166,
        "swapon": 167, "swapoff": 168, "reboot": 169, "sethostname": 170, "setdomainname": 171,
        "iopl": 172, "ioperm": 173, "init_module": 175, "delete_module": 176, "quotactl": 179,
        "setxattr": 188, "lsetxattr": 189, "fsetxattr": 190, "io_setup": 206, "epoll_create": 213,
        "semtimedop": 220, "clock_settime": 227, "mq_open": 240, "mq_unlink": 241,
        "kexec_load": 246, "add_key": 248, "request_key": 249, "keyctl": 250, "inotify_init": 253,
        "migrate_pages": 256, "unshare": 272, "vmsplice": 278, "move_pages": 279,
        "epoll_create1": 291, "inotify_init1": 294, "perf_event_open": 298, "fanotify_init": 300,
        "prlimit64": 302, "name_to_handle_at": 303, "open_by_handle_at": 304, "clock_adjtime": 305,
        "setns": 308, "process_vm_readv": 310, "process_vm_writev": 311, "kcmp": 312,
        "finit_module": 313, "memfd_create": 319, "kexec_file_load": 320, "bpf": 321,
        "userfaultfd": 323,
    } | _SAME,
    "aarch64": {
        "io_setup": 0, "setxattr": 5, "lsetxattr": 6, "fsetxattr": 7, "epoll_create1": 20,
        "inotify_init1": 26, "umount2": 39, "mount": 40, "pivot_root": 41, "chroot": 51,
        "quotactl": 60, "vmsplice": 75, "acct": 89, "personality": 92, "unshare": 97,
        "kexec_load": 104, "init_module": 105, "delete_module": 106, "clock_settime": 112,
        "syslog": 116, "ptrace": 117, "reboot": 142, "sethostname": 161, "setdomainname": 162,
        "setrlimit": 164, "settimeofday": 170, "adjtimex": 171, "mq_open": 180, "mq_unlink": 181,
        "msgget": 186, "msgctl": 187, "msgrcv": 188, "msgsnd": 189, "semget": 190, "semctl": 191,
        "semtimedop": 192, "semop": 193, "shmget": 194, "shmctl": 195, "shmat": 196, "shmdt": 197,
        "socket": 198, "socketpair": 199, "setsockopt": 208, "add_key": 217, "request_key": 218,
        "keyctl": 219, "clone": 220, "mmap": 222, "swapon": 224, "swapoff": 225,
        "migrate_pages": 238, "move_pages": 239, "perf_event_open": 241, "prlimit64": 261,
        "fanotify_init": 262, "name_to_handle_at": 264, "open_by_handle_at": 265,
        "clock_adjtime": 266, "setns": 268, "process_vm_readv": 270, "process_vm_writev": 271,
        "kcmp": 272, "finit_module": 273, "memfd_create": 279, "bpf": 280, "userfaultfd": 282,
        "kexec_file_load": 294,
    } | _SAME,
}  # fmt: skip
"""Numbers of the calls that the filter looks at, by architecture."""
_ARCHITECTURES = {"x86_64": 0xC000_003E, "aarch64": 0xC000_00B7}
_OTHER_CALLS = 0x4000_0000
"""On x86_64, calls from this number on are those of its 32-bit variant."""

_UNIX = 1
_FAMILIES = (2, 10)
"""Families of sockets that programs may use beside AF_UNIX: AF_INET, AF_INET6."""
_TYPE_OF_SOCKET = 0xF
_STREAMS = (1, 5)
"""Types of AF_UNIX sockets that programs may use, SOCK_STREAM and SOCK_SEQPACKET: others hold what
sockets have sent that are closed since."""
_SOL_SOCKET, _SOL_TCP, _SOL_IPV6 = 1, 6, 41
_LARGE_OPTIONS = (7, 8, 26, 32, 33, 50, 51, 52)
"""Options of SOL_SOCKET: SO_SNDBUF, SO_RCVBUF, what forces them, and filters."""
_FIRST_LARGE_TCP_OPTION = 13
"""TCP_CONGESTION; the options before are numbers and flags."""
_IPV6_V6ONLY = 26
_NEW_NAMESPACES = 0x7E02_0080
"""Flags of clone."""
_SHARED_ANONYMOUS = (0x21, 0x23)
"""Flags of mmap: memory that processes can hold without it being counted as theirs."""
_MAP_KIND = 0x2F
_MAP_HUGETLB = 0x40000
_RLIMIT_CORE = 4

# Instructions of the kernel's filter language, and offsets of what it reads
_LOAD, _AND, _IF_EQUAL, _IF_AT_LEAST, _IF_ANY_BIT, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x45, 0x06
_CALL, _ARCHITECTURE, _ARGUMENTS, _UPPER = 0, 4, 16, 4
_ALLOW = 0x7FFF_0000


def filter_calls() -> None:
    """Refuse system calls that programs do not need, for good."""
    instructions = _FILTERS.get(platform.machine())
    if instructions is None:
        raise OSError(f"seccomp: the system calls of {platform.machine()} are not known here")
    buffer = ctypes.create_string_buffer(instructions, len(instructions))
    program = struct.pack("=H6xQ", len(instructions) // 8, ctypes.addressof(buffer))
    arguments = c_ulong(_SECCOMP_FILTER), program, c_ulong(0), c_ulong(0)
    checked("prctl SECCOMP", libc.prctl(_PR_SET_SECCOMP, *arguments))


def filter_for(machine: str) -> bytes:
    """The instructions of the filter."""
    refused = dict.fromkeys(NUMBERS[machine], _refuse(errno.EPERM)) | {
        "clone3": _refuse(errno.ENOSYS),  # the C library then uses clone, whose flags are readable
        "clone": _examine_clone(),
        "mmap": _examine_mmap(),
        "prlimit64": _examine_prlimit(),
        "setrlimit": _examine_setrlimit(),
        "setsockopt": _examine_option(),
        "socket": _examine_family(),
        "socketpair": _examine_family(),
    }
    cases = sorted((NUMBERS[machine][call], answer) for call, answer in refused.items())
    return b"".join([
        _do(_LOAD, _ARCHITECTURE),
        _unless(_IF_EQUAL, _ARCHITECTURES[machine], _refuse(errno.EPERM)),
        _do(_LOAD, _CALL),
        _when(_IF_AT_LEAST, _OTHER_CALLS, _refuse(errno.EPERM)),
        _find(cases),
    ])  # fmt: skip


def _find(cases: list[tuple[int, bytes]]) -> bytes:
    """A binary search: the kernel tries every call when it takes the filter."""
    if len(cases) <= 2:
        answers = [_when(_IF_EQUAL, number, answer) for number, answer in cases]
        return b"".join([*answers, _do(_RETURN, _ALLOW)])
    middle = len(cases) // 2
    lower, upper = _find(cases[:middle]), _find(cases[middle:])
    return _do(_IF_AT_LEAST, cases[middle][0], if_true=len(lower) // 8) + lower + upper


def _examine_family() -> bytes:
    unix = [
        _load_argument(1), _do(_AND, _TYPE_OF_SOCKET), *_allow_any(_STREAMS),
        _refuse(errno.EPROTONOSUPPORT)
    ]  # fmt: skip
    return b"".join([
        _load_argument(0), _when(_IF_EQUAL, _UNIX, b"".join(unix)), *_allow_any(_FAMILIES),
        _refuse(errno.EAFNOSUPPORT)
    ])  # fmt: skip


def _examine_option() -> bytes:
    """Options of sockets by which the kernel would keep more for one."""
    refused, allowed = _refuse(errno.EPERM), _do(_RETURN, _ALLOW)
    large = [_when(_IF_EQUAL, option, refused) for option in _LARGE_OPTIONS]
    cases = {
        _SOL_SOCKET: [*large, allowed],
        _SOL_TCP: [_when(_IF_AT_LEAST, _FIRST_LARGE_TCP_OPTION, refused), allowed],
        _SOL_IPV6: [*_allow_any([_IPV6_V6ONLY]), refused],
    }
    tests = [
        _when(_IF_EQUAL, level, b"".join([_load_argument(2), *tests]))
        for level, tests in cases.items()
    ]
    return b"".join([_load_argument(1), *tests, refused])


def _examine_clone() -> bytes:
    refused = _when(_IF_ANY_BIT, _NEW_NAMESPACES, _refuse(errno.EPERM))
    return _load_argument(0) + refused + _do(_RETURN, _ALLOW)


def _examine_mmap() -> bytes:
    refused = [_when(_IF_EQUAL, flags, _refuse(errno.EPERM)) for flags in _SHARED_ANONYMOUS]
    return b"".join([
        _load_argument(3), _when(_IF_ANY_BIT, _MAP_HUGETLB, _refuse(errno.EPERM)),
        _do(_AND, _MAP_KIND), *refused, _do(_RETURN, _ALLOW)
    ])  # fmt: skip


def _examine_setrlimit() -> bytes:
    """The limit of core dumps stays."""
    refused = _when(_IF_EQUAL, _RLIMIT_CORE, _refuse(errno.EPERM))
    return _load_argument(0) + refused + _do(_RETURN, _ALLOW)


def _examine_prlimit() -> bytes:
    """It sets a limit if the third argument, a pointer, is not zero."""
    sets = _when(_IF_AT_LEAST, 1, _refuse(errno.EPERM))
    core = _load_argument(2) + sets + _load_argument(2, _UPPER) + sets
    return _load_argument(1) + _when(_IF_EQUAL, _RLIMIT_CORE, core) + _do(_RETURN, _ALLOW)


def _allow_any(values: Iterable[int]) -> list[bytes]:
    return [_when(_IF_EQUAL, value, _do(_RETURN, _ALLOW)) for value in values]


def _load_argument(index: int, half: int = 0) -> bytes:
    """Its lower half: both architectures are little-endian, and no flag is in the upper."""
    return _do(_LOAD, _ARGUMENTS + 8 * index + half)


def _refuse(number: int) -> bytes:
    return _do(_RETURN, 0x0005_0000 | number)


def _when(test: int, value: int, then: bytes) -> bytes:
    """Instructions that run if the test of what was loaded holds, and are skipped if not."""
    return _do(test, value, if_false=len(then) // 8) + then


def _unless(test: int, value: int, then: bytes) -> bytes:
    return _do(test, value, if_true=len(then) // 8) + then


def _do(code: int, value: int, *, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)


_FILTERS = {machine: filter_for(machine) for machine in NUMBERS}
