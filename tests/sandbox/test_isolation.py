"""Programs that try to get out of the sandbox; each attack works outside it."""

import os
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from textwrap import dedent

import pytest
from support.paths import SOURCES
from support.scripts import run_script


def assert_stays_in(sandbox, program):
    """The program prints REACHED outside a sandbox, and does not inside."""
    program = dedent(program)
    free = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=600
    )
    assert "REACHED" in free.stdout, free.stderr
    outcome = sandbox.run(program)
    assert "REACHED" not in outcome.stdout
    return outcome


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
        # A fork and the parent have the same bytes at the same address.
        target = os.getppid() if INSIDE else os.fork()
        if target == 0:
            while True: pass
        if read(target, ctypes.byref(ours), 1, ctypes.byref(theirs), 1, 0) == 6:
            print("REACHED")
        if not INSIDE:
            os.kill(target, 9)
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
    program = """
        import socket
        for index in range(1, 1000):
            try:
                print(index, socket.if_indextoname(index))
            except OSError:
                pass
    """
    assert full.run(dedent(program)).stdout == "1 lo\n"


def test_writing_outside(full, tmp_path):
    targets = [tmp_path, Path.home(), Path("/var/tmp"), Path(os.__file__).parent]
    for number, folder in enumerate(f for f in targets if os.access(f, os.W_OK)):
        path = folder / f"written-{os.getpid()}-{number}"
        try:
            assert_stays_in(full, f"open({str(path)!r}, 'w').write('x')\nprint('REACHED')")
            path.unlink()
            full.run(f"open({str(path)!r}, 'w').write('x')")
            assert not path.exists()
        finally:
            path.unlink(missing_ok=True)


def test_the_times_of_devices_stay(full):
    """The machine's devices can be read and written, not changed."""
    program = """
        import os
        for name in ("null", "zero", "random", "urandom"):
            for times in (None, (1, 1)):
                try:
                    os.utime(f"/dev/{name}", times)
                    print("changed", name)
                except OSError:
                    pass
        print(os.open("/dev/null", os.O_RDWR | os.O_CREAT | os.O_TRUNC) > 0, os.urandom(3) != b"")
        print(open("/dev/null", "w").write("x"), open("/dev/zero", "rb").read(1))
    """
    before = os.stat("/dev/null")
    outcome = full.run(dedent(program))
    assert outcome.stdout == "True True\n1 b'\\x00'\n", outcome
    after = os.stat("/dev/null")
    assert (after.st_mtime_ns, after.st_atime_ns) == (before.st_mtime_ns, before.st_atime_ns)


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
            assert soft <= hard != resource.RLIM_INFINITY
            try:
                resource.setrlimit(what, (hard + 1, hard + 1))
            except (ValueError, PermissionError):
                continue
            raise AssertionError(what)
    """
    outcome = sandbox.run(dedent(program))
    assert outcome.kind == "ok", outcome.stderr


def test_no_core_is_dumped(sandbox):
    """Where a program of the machine takes dumps, a limit of 0 does not keep it from that."""
    program = """
        import resource
        assert resource.getrlimit(resource.RLIMIT_CORE) == (1, 1)
        try:
            resource.setrlimit(resource.RLIMIT_CORE, (0, 1))
        except (OSError, ValueError):
            print("stays")
    """
    outcome = sandbox.run(dedent(program))
    assert outcome.stdout == "stays\n", outcome.stderr


@pytest.mark.parametrize("isolation", ["full", "rlimits"])
def test_programs_do_not_run_before_others(request, isolation):
    """Even where users may, as on machines for MPI: the monitor could not stop such a program."""
    request.getfixturevalue(isolation)
    script = f"""
        import resource
        from roll_lite.sandbox.sandbox import Sandbox
        try:
            resource.setrlimit(resource.RLIMIT_RTPRIO, (50, 50))
            resource.setrlimit(resource.RLIMIT_NICE, (40, 40))
        except ValueError:
            print("skip")
        else:
            with Sandbox({isolation!r}) as sandbox:
                program = "import os\\nos.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))"
                print(sandbox.run(program).stderr)
                print(sandbox.run("import os\\nos.nice(-1)").stderr)
    """
    done = run_script(script)
    if done.stdout == "skip\n":
        pytest.skip("this user may not raise its limits")
    assert done.stdout.count("PermissionError") == 2, done


def test_programs_can_be_terminated(sandbox):
    """A program has the signals of a new process, whatever its sandbox ignores."""
    source = "import os, signal\nos.kill(os.getpid(), signal.SIGTERM)\nprint('goes on')"
    outcome = sandbox.run(source)
    assert outcome.kind == "error" and "goes on" not in outcome.stdout


def test_says_what_the_kernel_lacks():
    """Inside a user namespace that may hold no other."""
    script = """
        import os
        from roll_lite.sandbox import kernel
        from roll_lite.sandbox.sandbox import Sandbox
        proc = os.open("/proc", os.O_PATH)
        kernel.unshare_user(1000, proc)
        kernel.write_file("sys/user/max_user_namespaces", "0", proc)
        Sandbox("full").start()
    """
    done = run_script(script)
    assert "new namespaces (user, mount): No space" in done.stderr
    assert "isolation='rlimits'" in done.stderr and "SandboxUnavailable" in done.stderr


@pytest.mark.parametrize("isolation", ["full", "rlimits"])
def test_says_that_the_kernel_refuses_filters(isolation):
    """Here by a filter of system calls that refuses other filters; programs would all fail."""
    script = f"""
        import ctypes, errno, platform, struct
        from roll_lite.sandbox import kernel
        from roll_lite.sandbox.sandbox import Sandbox
        prctl = {{"x86_64": 157, "aarch64": 167}}[platform.machine()]
        refused = kernel._when(kernel._IF_EQUAL, 22, kernel._refuse(errno.EINVAL))
        program = b"".join([
            kernel._do(kernel._LOAD, kernel._CALL),
            kernel._when(kernel._IF_EQUAL, prctl, kernel._load_argument(0) + refused),
            kernel._do(kernel._RETURN, kernel._ALLOW),
        ])
        kernel._FILTERS[platform.machine()] = program
        kernel.forbid_new_privileges()
        kernel.filter_calls()
        Sandbox({isolation!r}).start()
    """
    done = run_script(script)
    assert f"isolation={isolation!r} does not work on this machine: OSError" in done.stderr
    assert "prctl SECCOMP: Invalid argument" in done.stderr, done.stderr


def test_works_for_an_ordinary_user(full):
    """Whose number is not 0, and who has no capability."""
    script = """
        import os
        from roll_lite.sandbox import kernel
        from roll_lite.sandbox.sandbox import Sandbox
        proc = os.open("/proc", os.O_PATH)
        kernel.unshare_user(1000, proc)
        kernel.drop_capabilities()
        assert os.getuid() == 1000
        with Sandbox("full") as sandbox:
            print(sandbox.run("import os; print(os.getuid(), os.listdir('/tmp'))"))
            print(sandbox.run("open('/etc/passwd')").stderr)
    """
    done = run_script(script)
    assert "stdout='65534 []\\n'" in done.stdout, done
    assert "FileNotFoundError" in done.stdout or "PermissionError" in done.stdout


@pytest.fixture
def python_in_tmp():
    """An interpreter that lives in /tmp: a copy of what it needs of this one's library."""
    folder = Path(tempfile.mkdtemp(prefix="python-", dir="/tmp"))
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    library = Path(os.__file__).parent
    left_out = shutil.ignore_patterns(
        "site-packages", "test", "tests", "idlelib", "ensurepip", "lib2to3", "config-*", "*.pyc",
        "pydoc_data", "tkinter", "turtledemo", "distutils", "asyncio", "email", "xml*", "sqlite3",
    )  # fmt: skip
    shutil.copytree(library, folder / "lib" / name, ignore=left_out, symlinks=True)
    (folder / "bin").mkdir()
    shutil.copy(Path(sys.executable).resolve(), folder / "bin" / "python")
    yield folder / "bin" / "python"
    shutil.rmtree(folder)


def test_a_python_that_lives_in_tmp(full, python_in_tmp):
    script = """
        import os, sys
        from roll_lite.sandbox.sandbox import Sandbox
        assert sys.base_prefix.startswith("/tmp/") and os.__file__.startswith("/tmp/")
        with Sandbox("full") as sandbox:
            # Modules that were not imported before, and a folder to write to
            print(sandbox.run("import calendar, tempfile; print(tempfile.TemporaryFile())"))
            print(sandbox.run("def f(x): return x * x", tests="import fileinput; assert f(3) == 9"))
    """
    libraries = f"{sysconfig.get_config_var('LIBDIR')}:{os.environ.get('LD_LIBRARY_PATH', '')}"
    environment = {"PYTHONPATH": SOURCES, "LD_LIBRARY_PATH": libraries}
    done = subprocess.run(
        [python_in_tmp, "-c", dedent(script)], capture_output=True, text=True, env=environment
    )
    assert done.stdout.count("kind='ok'") == 2, done
