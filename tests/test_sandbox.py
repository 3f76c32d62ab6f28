"""Programs that try to get out, to stay, or to take too much; attacks work without a sandbox."""

import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path
from textwrap import dedent

import pytest

from roll_lite.sandbox.program import Limits, SandboxError, SandboxUnavailable
from roll_lite.sandbox.sandbox import Sandbox, run_program

SOURCES = str(Path(__file__).parent.parent / "src")
QUICK = Limits(seconds=1.0)


@pytest.fixture(scope="module")
def full():
    try:
        sandbox = Sandbox("full")
    except SandboxUnavailable as error:
        pytest.skip(str(error))
    with sandbox:
        yield sandbox


@pytest.fixture(scope="module")
def rlimits():
    with Sandbox("rlimits") as sandbox:
        yield sandbox


@pytest.fixture(params=["full", "rlimits"])
def sandbox(request):
    return request.getfixturevalue(request.param)


def sandbox_processes() -> set[int]:
    """Zygotes of these sources and all that was forked from them: they share a command line."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes()
        except OSError:
            continue
        if b"roll_lite.sandbox.zygote" in command and SOURCES.encode() in command:
            found.add(int(path.parent.name))
    return found


def assert_stays_in(sandbox, program, **more):
    """The program prints REACHED outside a sandbox, and does not inside."""
    program = dedent(program)
    free = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=30
    )
    assert "REACHED" in free.stdout, free.stderr
    outcome = sandbox.run(program, limits=QUICK, **more)
    assert "REACHED" not in outcome.stdout
    return outcome


# What programs may do


def test_prints_reads_and_computes(sandbox):
    outcome = sandbox.run("import heapq\nprint(int(input()) * 2)\nprint('naïve ∑')", stdin="21\n")
    assert (outcome.kind, outcome.stdout, outcome.stderr) == ("ok", "42\nnaïve ∑\n", "")
    assert 0 < outcome.seconds < 10


def test_is_the_main_module_with_a_folder_of_its_own(sandbox):
    program = """
        import os, sys, tempfile
        assert __name__ == "__main__" and sys.modules["__main__"].__dict__ is globals()
        assert os.listdir() == []
        open("here", "w").write("text")
        assert open(os.path.abspath("here")).read() == "text"
        assert sys.argv == ["program.py"]
    """
    for _ in range(2):  # the second finds nothing of the first
        outcome = sandbox.run(dedent(program))
        assert outcome.kind == "ok", outcome.stderr


def test_reads_python_modules_that_were_not_imported_before(full):
    outcome = full.run("import sqlite3, xml.dom, ssl, tempfile\nprint(tempfile.TemporaryFile())")
    assert outcome.kind == "ok", outcome.stderr


def test_threads_processes_and_exit_functions_work(full):
    program = """
        import atexit, multiprocessing, sys, threading
        print(sum(multiprocessing.get_context("fork").Pool(2).map(abs, [-1, -2])))
        threading.Thread(target=lambda: print("thread")).start()
        atexit.register(lambda: print("exit"))
    """
    outcome = full.run(dedent(program))
    assert outcome.stdout == "3\nthread\nexit\n", outcome.stderr


@pytest.mark.parametrize(
    ("program", "kind", "message"),
    [
        ("1 / 0", "error", "ZeroDivisionError: division by zero"),
        ("def f(:", "error", "SyntaxError"),
        ("import sys; sys.exit('no')", "error", "no\n"),
        ("import sys; sys.exit(3)", "error", ""),
        ("import sys; sys.exit(0)", "ok", ""),
        ("raise KeyboardInterrupt", "error", "KeyboardInterrupt"),
        ("import ctypes; ctypes.string_at(0)", "error", ""),
        ("import os; os.kill(os.getpid(), 15)", "error", ""),
        ("x = '\\ud800'; print(x)", "ok", ""),
        ("a = 'null \x00 byte'", "error", ""),
    ],
)
def test_ends_are_told_apart(sandbox, program, kind, message):
    outcome = sandbox.run(program)
    assert outcome.kind == kind
    assert message in outcome.stderr


def test_traceback_shows_the_program_alone(sandbox):
    stderr = sandbox.run("def f():\n    return [][0]\nf()").stderr
    assert "return [][0]" in stderr and "roll_lite" not in stderr


def test_module_level_function():
    assert run_program("print(1)", isolation="rlimits").stdout == "1\n"


# Limits


def test_infinite_loop(sandbox):
    outcome = sandbox.run("print('begun', flush=True)\nwhile True: pass", limits=QUICK)
    assert (outcome.kind, outcome.stdout) == ("timeout", "begun\n")
    assert outcome.seconds < 3


def test_sleeping_and_catching_everything(sandbox):
    program = """
        import signal, time
        for number in range(1, 32):
            if number not in (9, 19):
                signal.signal(number, signal.SIG_IGN)
        while True:
            try:
                time.sleep(100)
            except BaseException:
                pass
    """
    assert sandbox.run(dedent(program), limits=QUICK).kind == "timeout"


@pytest.mark.parametrize("size", [10 * 2**30, 600 * 2**20])
def test_memory(sandbox, size):
    assert sandbox.run(f"x = bytearray({size})").kind == "memory"
    assert sandbox.run("x = bytearray(300 * 2**20)").kind == "ok"


def test_flood_of_output(sandbox):
    for stream in ("stdout", "stderr"):
        program = f"import sys\nfor _ in range(1000): sys.{stream}.write('x' * 2**20)"
        outcome = sandbox.run(program)
        assert outcome.kind == "output"
        assert 2**20 < len(outcome.stdout + outcome.stderr) < 2**21
        assert sandbox.run(program.replace("1000", "1")).kind == "ok"


def test_flood_of_files(full):
    program = """
        for index in range(1000):
            with open(str(index), "wb") as file:
                file.write(bytes(2**20))
    """
    outcome = full.run(dedent(program), limits=Limits(disk_mib=8))
    assert outcome.kind == "error" and "No space left" in outcome.stderr


def test_large_file(sandbox):
    outcome = sandbox.run("open('big', 'wb').write(bytes(2**25))", limits=Limits(disk_mib=8))
    assert outcome.kind == "error" and "OSError" in outcome.stderr


def test_number_of_processes(sandbox):
    program = """
        import os, time
        count = 0
        while True:
            try:
                pid = os.fork()
            except OSError:
                break
            if pid == 0:
                time.sleep(100)
            count += 1
        print(count)
    """
    outcome = sandbox.run(dedent(program), limits=Limits(processes=8))
    assert (outcome.kind, outcome.stdout) == ("ok", "7\n")


def test_fork_bomb(sandbox):
    before = sandbox_processes()
    program = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
    assert sandbox.run(program, limits=QUICK).kind == "timeout"
    assert sandbox_processes() <= before
    assert sandbox.run("print(1)").stdout == "1\n"


def test_open_files(sandbox):
    outcome = sandbox.run("files = [open('x', 'w') for _ in range(1000)]")
    assert outcome.kind == "error" and "Too many open files" in outcome.stderr


# Leftovers


DAEMON = """
    import os, time
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            while True:
                time.sleep(0.01)
        os._exit(0)
"""


@pytest.mark.parametrize("ending", ["", "while True: pass", "os._exit(1)", "os.close(1)"])
def test_daemons_end_with_the_program(sandbox, ending):
    before = sandbox_processes()
    started = time.monotonic()
    sandbox.run(dedent(DAEMON) + ending, limits=QUICK)
    assert time.monotonic() - started < 5
    assert sandbox_processes() <= before


def test_zombies_are_gone(sandbox):
    before = sandbox_processes()
    program = "import os\nfor _ in range(5):\n    if os.fork() == 0: os._exit(0)\nprint('end')"
    assert sandbox.run(program).stdout == "end\n"
    assert sandbox_processes() <= before


def test_closed_descriptors(sandbox):
    program = "import os, time\nos.closerange(0, 1000)\ntime.sleep(0.3)"
    outcome = sandbox.run(program, limits=QUICK)
    assert outcome.kind in ("ok", "error") and outcome.seconds > 0.3
    endless = "import os\nos.closerange(0, 1000)\nwhile True: pass"
    assert sandbox.run(endless, limits=QUICK).kind == "timeout"


def test_flood_of_every_descriptor(sandbox):
    program = """
        import os
        for descriptor in range(3, 1000):
            try:
                while os.write(descriptor, b"+" * 4096): pass
            except OSError:
                pass
    """
    flood = partial(sandbox.run, dedent(program), limits=QUICK)
    assert flood(tests="assert False").kind == "error"
    assert flood(tests="assert False", tests_apart=False).kind == "output"
    assert sandbox.run("print(1)").stdout == "1\n"


def test_temporary_folder_is_removed(rlimits):
    before = set(Path(tempfile.gettempdir()).glob("program-*"))
    program = """
        import os
        os.makedirs("a/b")
        open("a/b/c", "w").close()
        os.symlink("/etc", "a/link")
        os.chmod("a/b", 0)
        os.chmod("a", 0)
    """
    assert rlimits.run(dedent(program)).kind == "ok"
    assert set(Path(tempfile.gettempdir()).glob("program-*")) <= before


def test_killed_client_leaves_nothing():
    before = sandbox_processes()
    client = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "from roll_lite.sandbox.sandbox import Sandbox\n"
            "sandbox = Sandbox('rlimits')\nprint('ready', flush=True)\n"
            "sandbox.run('while True: pass')",
        ],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": SOURCES},
    )
    client.stdout.readline()
    time.sleep(0.3)
    assert len(sandbox_processes() - before) == 3  # zygote, keeper, program
    client.kill()
    client.wait()
    deadline = time.monotonic() + 5
    while sandbox_processes() - before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert sandbox_processes() <= before


# Getting out


def test_secrets_in_files(full, tmp_path):
    home = Path.home() / f".secret-{os.getpid()}"
    secrets = [home, tmp_path / "secret", Path(__file__)]
    try:
        for secret in secrets[:2]:
            secret.write_text("secret")
        for path in secrets:
            assert_stays_in(full, f"open({str(path)!r}).read()\nprint('REACHED')")
    finally:
        home.unlink()


def test_etc_and_root_folder(full):
    assert_stays_in(full, "open('/etc/passwd').read()\nprint('REACHED')")
    assert_stays_in(full, "import os\nos.listdir('/')\nprint('REACHED')")


def test_environment(full, monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "REACHED")
    assert_stays_in(full, "import os\nprint(os.environ.get('SECRET_TOKEN'))")
    find = """
        import ctypes
        environ = ctypes.POINTER(ctypes.c_char_p).in_dll(ctypes.CDLL(None), "environ")
        for entry in environ:
            if not entry:
                break
            print(entry)
    """
    assert_stays_in(full, find)


@pytest.mark.parametrize("name", ["environ", "cmdline", "maps", "status", "fd/0"])
def test_proc_of_others(full, name):
    for pid in (os.getpid(), full._process.pid, "self"):
        path = f"/proc/{pid}/{name}"
        assert_stays_in(full, f"import os\nos.stat({path!r})\nprint('REACHED')")


def test_memory_of_others(full):
    """By the system call too, which needs no /proc."""
    assert_stays_in(full, "open('/proc/self/mem', 'rb').close()\nprint('REACHED')")
    read = """
        import ctypes, os
        buffer = ctypes.create_string_buffer(b"secret")
        class Piece(ctypes.Structure):
            _fields_ = [("start", ctypes.c_void_p), ("size", ctypes.c_size_t)]
        into = ctypes.create_string_buffer(8)
        ours, theirs = Piece(ctypes.addressof(into), 6), Piece(ctypes.addressof(buffer), 6)
        read = ctypes.CDLL(None).process_vm_readv
        # A fork has the same bytes at the same address, and so has whoever forked this process.
        target = os.getppid() if INSIDE else os.fork()
        if target == 0:
            import time; time.sleep(1); os._exit(0)
        if read(target, ctypes.byref(ours), 1, ctypes.byref(theirs), 1, 0) == 6:
            print("REACHED")
    """
    read = dedent(read).replace("INSIDE", "'program.py' in __import__('sys').argv")
    assert_stays_in(full, read)


def connect(family: str, address: object) -> str:
    return f"""
        import socket
        socket.socket(socket.{family}, socket.SOCK_STREAM).connect({address!r})
        print("REACHED")
    """


def test_network(full, tmp_path):
    listeners = [
        (socket.AF_INET, ("127.0.0.1", 0)),
        (socket.AF_UNIX, str(tmp_path / "socket")),
        (socket.AF_UNIX, f"\0abstract-{os.getpid()}"),
    ]
    for family, address in listeners:
        with socket.socket(family, socket.SOCK_STREAM) as listener:
            listener.bind(address)
            listener.listen()
            address = listener.getsockname()
            address = address.decode() if isinstance(address, bytes) else address
            assert_stays_in(full, connect(family.name, address))


def test_no_network_but_ones_own(full):
    program = "import socket\nprint(socket.if_nameindex())"
    assert full.run(program).stdout == "[(1, 'lo')]\n"


def test_writing_outside(full, tmp_path):
    targets = [tmp_path, Path.home(), Path("/var/tmp"), Path(os.__file__).parent]
    for number, folder in enumerate(targets):
        path = folder / f"written-{os.getpid()}-{number}"
        try:
            assert_stays_in(full, f"open({str(path)!r}, 'w').write('x')\nprint('REACHED')")
            path.unlink()
            full.run(f"open({str(path)!r}, 'w').write('x')")
            assert not path.exists()
        finally:
            path.unlink(missing_ok=True)


def test_shared_memory_is_ones_own(full):
    path = f"/dev/shm/written-{os.getpid()}"
    assert full.run(f"open({path!r}, 'w')").kind == "ok"
    assert not os.path.exists(path)
    assert full.run(f"open({path!r})").kind == "error"


def test_links_lead_nowhere(full, tmp_path):
    (tmp_path / "secret").write_text("secret")
    for how in ("symlink", "link"):
        program = f"""
            import os, tempfile
            path = os.path.join(tempfile.mkdtemp(dir={str(tmp_path)!r} if FREE else "."), "way")
            os.{how}({str(tmp_path / "secret")!r}, path)
            open(path).read()
            print("REACHED")
        """.replace("FREE", "__import__('sys').argv[0] == '-c'")
        assert_stays_in(full, program)
    for root in ("/proc/self/root/etc/passwd", "/proc/self/cwd", "/../../etc/passwd"):
        assert_stays_in(full, f"import os\nos.stat({root!r})\nprint('REACHED')")


def test_signals_to_others(full):
    victim = subprocess.Popen(["sleep", "60"])
    try:
        for pid in (victim.pid, os.getpid(), full._process.pid):
            assert_stays_in(full, f"import os\nos.kill({pid}, 0)\nprint('REACHED')")
        full.run("import os\nos.kill(-1, 9)")
        full.run("import os\nos.kill(os.getppid(), 9)\nos.kill(0, 9)")
        assert victim.poll() is None and full._process.poll() is None
    finally:
        victim.kill()
        victim.wait()


def test_has_no_privileges(full):
    program = """
        import ctypes, os
        libc = ctypes.CDLL(None)
        assert os.getresuid() == (65534,) * 3 and os.getresgid() == (65534,) * 3, os.getresuid()
        assert os.getgroups() in ([], [65534])
        for flag in (0x10000000, 0x20000, 0x40000000, 0x20000000):
            assert libc.unshare(flag) == -1, hex(flag)
        assert libc.mount(b"tmpfs", b"/tmp", b"tmpfs", 0, None) == -1
        assert libc.chroot(b"/tmp") == -1
        assert libc.sethostname(b"x", 1) == -1
        assert libc.prctl(39, 0, 0, 0, 0) == 1  # no_new_privs
        assert libc.prctl(1, 0, 0, 0, 0) == 0
        for call in (os.setuid, os.setgid):
            try:
                call(0)
            except OSError:
                continue
            raise AssertionError(call)
    """
    outcome = full.run(dedent(program))
    assert outcome.kind == "ok", outcome.stderr


def test_limits_cannot_be_raised(sandbox):
    program = """
        import resource
        for what in (resource.RLIMIT_AS, resource.RLIMIT_NPROC, resource.RLIMIT_CPU):
            soft, hard = resource.getrlimit(what)
            assert soft == hard != resource.RLIM_INFINITY
            try:
                resource.setrlimit(what, (hard + 1, hard + 1))
            except (ValueError, PermissionError):
                continue
            raise AssertionError(what)
    """
    outcome = sandbox.run(dedent(program))
    assert outcome.kind == "ok", outcome.stderr


# What a result rests on


CHEATS = {
    "says so": "print('ok'); print('+'); print('All tests passed')",
    "leaves": "import os; os._exit(0)",
    "leaves politely": "import sys; sys.exit(0)",
    "leaves at the call": "def f(x):\n    raise SystemExit(0)",
    "leaves hard at the call": "import os\ndef f(x):\n    os._exit(0)",
    "leaves by exec": "import os\ndef f(x):\n    os.execv('/bin/true', ['true'])",
    "defines check": "def check(g): pass\ndef f(x): return 0",
    "patches builtins": (
        "import builtins\nbuiltins.AssertionError = type('E', (BaseException,), {})\n"
        "builtins.all = lambda values: True\nbuiltins.exec = lambda *args: None\n"
        "builtins.compile = lambda *args, **kwargs: None\ndef f(x): return 0"
    ),
    "catches the end": (
        "import sys, atexit\nsys.excepthook = lambda *error: None\n"
        "atexit.register(lambda: __import__('os')._exit(0))\ndef f(x): return 0"
    ),
    "traces": "import sys\nsys.settrace(lambda *args: sys.exit(0))\ndef f(x): return 0",
    "answers on every descriptor": (
        "import os\ndef f(x):\n    for n in range(1, 256):\n        try: os.write(n, b'+ok\\n')\n"
        "        except OSError: pass\n    os._exit(0)"
    ),
    "leaves from a thread": (
        "import os, threading, time\n"
        "threading.Thread(target=lambda: (time.sleep(0.05), os._exit(0))).start()\n"
        "def f(x):\n    time.sleep(10)"
    ),
    "leaves on an alarm": (
        "import os, signal\nsignal.signal(signal.SIGALRM, lambda *args: os._exit(0))\n"
        "signal.alarm(1)\ndef f(x):\n    while True: pass"
    ),
    "kills its parent": "import os\ndef f(x):\n    os.kill(os.getppid(), 9)\n    os._exit(0)",
}
TESTS = "def check(g):\n    assert all([g(3) == 9, g(4) == 16])\ncheck(f)\n"


@pytest.mark.parametrize("name", CHEATS)
@pytest.mark.parametrize("tests_apart", [True, False])
def test_only_tests_that_ran_count(sandbox, name, tests_apart):
    run = partial(sandbox.run, tests=TESTS, tests_apart=tests_apart, limits=Limits(seconds=3))
    assert run("def f(x): return x * x").kind == "ok"
    assert run(CHEATS[name]).kind != "ok"


# The sandbox itself


def test_says_what_the_kernel_lacks():
    """Inside a user namespace that may hold no other."""
    script = """
        import os
        from roll_lite.sandbox import kernel
        from roll_lite.sandbox.sandbox import Sandbox
        proc, uid, gid = os.open("/proc", os.O_PATH), os.getuid(), os.getgid()
        kernel.unshare(kernel.NEW_USER)
        kernel.map_user(0, uid, gid, proc)
        kernel.write_file("sys/user/max_user_namespaces", "0", proc)
        Sandbox("full")
    """
    done = run_script(script)
    assert "user namespace (" in done.stderr and "isolation='rlimits'" in done.stderr
    assert "SandboxUnavailable" in done.stderr


def run_script(script: str) -> subprocess.CompletedProcess:
    environment = os.environ | {"PYTHONPATH": SOURCES}
    command = [sys.executable, "-c", dedent(script)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)


def test_works_for_an_ordinary_user(full):
    """Whose number is not 0, and who has no capability."""
    script = """
        import os
        from roll_lite.sandbox import kernel
        from roll_lite.sandbox.sandbox import Sandbox
        proc, uid, gid = os.open("/proc", os.O_PATH), os.getuid(), os.getgid()
        kernel.unshare(kernel.NEW_USER)
        kernel.map_user(1000, uid, gid, proc)
        kernel.drop_capabilities()
        assert os.getuid() == 1000
        with Sandbox("full") as sandbox:
            print(sandbox.run("import os; print(os.getuid(), os.listdir('/tmp'))"))
            print(sandbox.run("open('/etc/passwd')").stderr)
    """
    done = run_script(script)
    assert "stdout='65534 []\\n'" in done.stdout, done
    assert "FileNotFoundError" in done.stdout or "PermissionError" in done.stdout


def test_unknown_isolation():
    with pytest.raises(ValueError, match="isolation='docker' is not known; use full or rlimits"):
        Sandbox("docker")


@pytest.mark.parametrize("options", [{"seconds": 0}, {"memory_mib": 1}, {"processes": 0}])
def test_limits_are_checked(options):
    with pytest.raises(ValueError, match=f"{next(iter(options))}="):
        Limits(**options)


def test_a_dead_zygote_is_an_error():
    sandbox = Sandbox("rlimits")
    sandbox._process.kill()
    sandbox._process.wait()
    with pytest.raises(SandboxError, match="ended with -9"):
        sandbox.run("print(1)")


def test_threads_take_turns(rlimits):
    results = {}
    threads = [
        threading.Thread(target=lambda n=n: results.update({n: rlimits.run(f"print({n})")}))
        for n in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {n: outcome.stdout for n, outcome in results.items()} == {n: f"{n}\n" for n in range(4)}
