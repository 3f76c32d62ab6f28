"""What programs may do, their limits, what they leave behind, and what decides the result."""

import os
import re
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from random import Random
from textwrap import dedent

import pytest
from support.paths import SOURCES
from support.process_checks import wait_until

from roll_lite.sandbox.sandbox import Limits, Sandbox, SandboxError, run_program

QUICK = Limits(seconds=0.5)
"""For programs that reach their time limit."""
ROOMY = Limits(processes=256)
"""For programs that fork: without a namespace the kernel counts all processes of the user, also
those of other sandboxes on the machine."""


# What programs may do


def test_prints_reads_and_computes(sandbox):
    outcome = sandbox.run("import heapq\nprint(int(input()) * 2)\nprint('naïve ∑')", stdin="21\n")
    assert (outcome.kind, outcome.stdout, outcome.stderr) == ("ok", "42\nnaïve ∑\n", "")
    assert outcome.seconds > 0


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
    start = time.monotonic()
    outcome = sandbox.run("while True: pass", limits=QUICK)
    assert outcome.kind == "timeout"
    assert 0.5 <= outcome.seconds <= time.monotonic() - start


def test_sleeping_and_catching_everything(sandbox):
    program = """
        import signal, time
        print("begun", flush=True)
        for number in range(1, 32):
            if number not in (9, 19):
                signal.signal(number, signal.SIG_IGN)
        while True:
            try:
                time.sleep(100)
            except BaseException:
                pass
    """
    outcome = sandbox.run(dedent(program), limits=Limits(seconds=1.5))
    assert (outcome.kind, outcome.stdout) == ("timeout", "begun\n")


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

    def run():
        outcome = sandbox.run(dedent(program), limits=Limits(processes=8))
        return outcome.kind, outcome.stdout

    assert first_equal(run, ("ok", "7\n")) == ("ok", "7\n")


def first_equal(run, expected):
    """Of runs whose limit counts processes: other sandboxes of the machine change it (`ROOMY`)."""
    return next((expected for _ in range(9) if run() == expected), None) or run()


def test_fork_bomb(sandbox, started):
    program = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
    assert sandbox.run(program, limits=QUICK).kind == "timeout"
    assert not started()
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


def test_daemons_that_start_as_the_program_ends(rlimits, started):
    """Many of them, so that the search now and then meets one whose parent is just ending."""
    many = "import os\nfor _ in range(4):\n    if os.fork() == 0: break\n" + dedent(DAEMON)
    for _ in range(8):
        rlimits.run(many, limits=ROOMY)
    assert not started()


@pytest.mark.parametrize("ending", ["", "while True: pass", "os._exit(1)", "os.close(1)"])
def test_daemons_end_with_the_program(sandbox, ending, started):
    is_endless = ending.startswith("while")
    outcome = sandbox.run(dedent(DAEMON) + ending, limits=QUICK if is_endless else ROOMY)
    assert (outcome.kind == "timeout") == is_endless  # it does not wait for the daemon
    assert not started()


@pytest.mark.parametrize(
    "name",
    [
        *(b"\xff", b"x\nVmRSS: 0 kB", b"a) R 1 (b) Z 1"),
        *(pytest.param(name, marks=pytest.mark.slow) for name in (b"\rVmRSS: x", b"\rVmRSS: 0 kB")),
    ],
)
def test_a_name_hides_nothing(sandbox, name, started):
    """Neither memory nor a daemon; and a wrong answer is none of the sandbox's failures."""
    named = f"import ctypes, time\nctypes.CDLL(None).prctl(15, {name!r}, 0, 0, 0)\n"
    tests = "assert f(2) == 4"
    wrong = sandbox.run(
        f"{named}{dedent(DAEMON)}def f(x): time.sleep(0.2)", tests=tests, limits=ROOMY
    )
    assert wrong.kind == "error" and "AssertionError" in wrong.stderr
    large = "for _ in range(3):\n    if os.fork() == 0: break\nx = b'x' * (80 << 20)\n"
    limits = Limits(memory_mib=192, seconds=60, processes=256)
    held = sandbox.run(f"{named}import os\n{large}time.sleep(600)", limits=limits)
    assert held.kind == "memory"
    assert sandbox.run(f"{named}print('end')").stdout == "end\n"
    assert not started()


def test_zombies_are_gone(sandbox, started):
    program = "import os\nfor _ in range(5):\n    if os.fork() == 0: os._exit(0)\nprint('end')"
    assert sandbox.run(program, limits=ROOMY).stdout == "end\n"
    assert not started()


def test_closed_descriptors(sandbox):
    program = "import os, time\nos.closerange(0, 1000)\ntime.sleep(0.5)"
    start = time.monotonic()
    assert sandbox.run(program).kind in ("ok", "error")
    assert time.monotonic() - start > 0.5  # it waited for the program's end
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
    flood = partial(sandbox.run, dedent(program))
    assert flood(tests="assert False").kind == "error"
    assert flood(tests="assert False", tests_apart=False).kind == "output"
    assert sandbox.run("print(1)").stdout == "1\n"


@pytest.mark.parametrize("tests", ["", "assert True"])
def test_inherits_no_descriptors_but_its_own(tests):
    """Even if the client has 400 open, so that the sandbox's own have high numbers."""
    program = """
        import os
        for number in range(3, 2000):
            try:
                print(oct(os.fstat(number).st_mode))
            except OSError:
                pass
    """
    descriptors = [os.open(os.devnull, os.O_RDONLY) for _ in range(400)]
    with Sandbox("rlimits") as sandbox:
        outcome = sandbox.run(dedent(program), tests=tests)
    for descriptor in descriptors:
        os.close(descriptor)
    assert outcome.kind == "ok"
    assert outcome.stdout == ("0o140777\n" if tests else "")  # a socket to the tests


def test_temporary_folder_is_removed(rlimits):
    program = """
        import os
        print(os.getcwd())
        os.makedirs("a/b")
        open("a/b/c", "w").close()
        os.symlink("/etc", "a/link")
        os.chmod("a/b", 0)
        os.chmod("a", 0)
    """
    outcome = rlimits.run(dedent(program))
    assert outcome.kind == "ok"
    (made,) = re.findall(r".*/program-[^/]+", outcome.stdout)
    assert not Path(made).exists()


def test_killed_client_leaves_nothing(started):
    client = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "from roll_lite.sandbox.sandbox import Limits, Sandbox\n"
            "sandbox = Sandbox('rlimits').start()\nprint('ready', flush=True)\n"
            "sandbox.run('while True: pass', limits=Limits(seconds=300))",
        ],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": SOURCES},
    )
    client.stdout.readline()
    wait_until(lambda: len(started()) == 3)  # zygote, monitor, program
    client.kill()
    client.wait()
    wait_until(lambda: not started())


# What decides the result


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
        "signal.setitimer(signal.ITIMER_REAL, 0.1)\ndef f(x):\n    while True: pass"
    ),
    "kills its parent": "import os\ndef f(x):\n    os.kill(os.getppid(), 9)\n    os._exit(0)",
}
TESTS = "def check(g):\n    assert all([g(3) == 9, g(4) == 16])\ncheck(f)\n"


@pytest.mark.parametrize("tests_apart", [True, False])
def test_an_honest_program_passes(sandbox, tests_apart):
    outcome = sandbox.run("def f(x): return x * x", tests=TESTS, tests_apart=tests_apart)
    assert outcome.kind == "ok"


@pytest.mark.parametrize("name", CHEATS)
@pytest.mark.parametrize("tests_apart", [True, False])
def test_only_tests_that_ran_count(sandbox, name, tests_apart):
    try:
        assert sandbox.run(CHEATS[name], tests=TESTS, tests_apart=tests_apart).kind != "ok"
    except SandboxError:  # with limits alone an ordinary user's program can kill its monitor
        assert name == "kills its parent" and os.geteuid() != 0


# Many runs of a program


def kinds_and_prints(outcomes):
    return [(outcome.kind, outcome.stdout) for outcome in outcomes]


def test_each_input_has_a_fresh_program(sandbox):
    program = "import sys\nx = input()\nprint('got', x)\nsys.exit(x == 'c')"
    run = partial(sandbox.run_repeatedly, program, limits=ROOMY)
    expected = [("ok", "got a\n"), ("ok", "got b\n"), ("error", "got c\n")]
    assert kinds_and_prints(run(inputs=["a", "b"])) == expected[:2]
    assert kinds_and_prints(run(inputs=["a", "b", "c", "d"])) == expected


def test_each_test_has_a_copy_of_the_loaded_program(sandbox):
    program = """
        print("loaded")
        seen = []
        def add(x):
            print("adding", x)
            seen.append(x)
            return len(seen)
    """
    tests = [f"x = {number}\nassert add(x) == 1 and seen == [x]" for number in range(3)]
    expected = [("ok", "loaded\nadding 0\n"), ("ok", "adding 1\n"), ("ok", "adding 2\n")]
    run = partial(sandbox.run_repeatedly, dedent(program), limits=ROOMY)
    assert kinds_and_prints(run(tests=tests)) == expected
    outcomes = run(tests=[*tests[:2], "assert x == 1"])
    assert [outcome.kind for outcome in outcomes] == ["ok", "ok", "error"]  # no x of other tests


def test_a_copy_goes_on_with_the_random_numbers_of_the_program(sandbox):
    program = "import random\nrandom.seed(1)\ndef f(): return random.randrange(10**9)"
    expected = Random(1).randrange(10**9)
    tests = [f"assert f() == {expected}"] * 3
    outcomes = sandbox.run_repeatedly(program, tests=tests, limits=ROOMY)
    assert [outcome.kind for outcome in outcomes] == ["ok"] * 3


@pytest.mark.parametrize("kind", ["inputs", "tests"])
def test_the_limit_of_output_is_of_each_run(sandbox, kind):
    """What later runs may print is not for the first."""
    limits = Limits(output_kib=64, processes=256)
    program = "def f(kib): print('x' * (kib << 10))\n"
    program += "f(int(input()))" if kind == "inputs" else ""
    little, much = ("48", "200") if kind == "inputs" else ("f(48)", "f(200)")
    for runs, kinds in (
        ([little, much, *[little] * 8], ["ok", "output"]),
        ([little] * 3, ["ok"] * 3),
    ):
        outcomes = sandbox.run_repeatedly(program, **{kind: runs}, limits=limits)
        assert [outcome.kind for outcome in outcomes] == kinds


def test_limits_hold_for_each_run_and_for_all(rlimits, started):
    run, limits = rlimits.run_repeatedly, Limits(seconds=2, processes=256)
    outcomes = run(
        "import time\ntime.sleep(float(input()))", inputs=["0.4", "0.4", "99"], limits=limits
    )
    assert [outcome.kind for outcome in outcomes] == ["ok", "ok", "timeout"]
    assert outcomes[-1].seconds > 2 * 0.4 + 2
    endless = run(
        "def f():\n    __import__('time').sleep(99)", tests=["assert f", "f()"], seconds=2
    )
    assert [outcome.kind for outcome in endless] == ["ok", "timeout"]
    assert not started()
    prints = run("print('x' * int(input()), end='')", inputs=[f"{2**20}"] * 2)
    assert [len(outcome.stdout) for outcome in prints] == [2**20] * 2
    memory = run("x = bytearray(int(input()))", inputs=["1", f"{2**32}"])
    assert [outcome.kind for outcome in memory] == ["ok", "memory"]


def test_a_program_that_leaves_no_room_for_copies(sandbox):
    """The first test has the program itself; the others can have a new one."""
    program = """
        import os, time
        try:
            while os.fork(): pass
            time.sleep(100)
        except OSError:
            x = 1
    """

    def run():
        outcomes = sandbox.run_repeatedly(dedent(program), tests=["assert x"] * 3)
        return [outcome.kind for outcome in outcomes]

    assert first_equal(run, ["ok"]) == ["ok"]


@pytest.mark.parametrize("name", CHEATS)
def test_a_cheat_among_many_tests(rlimits, name):
    """The third test makes an honest program cheat, which gains it neither that test nor others."""
    cheat = f"def cheat():\n    global f\n    f = abs\n    exec({CHEATS[name]!r}, globals())"
    program = f"def f(x): return x * x\n{cheat}"
    tests = ["assert f(3) == 9", "assert f(4) == 16", f"cheat()\n{TESTS}", "assert f(6) == 36"]
    try:
        outcomes = rlimits.run_repeatedly(program, tests=tests, limits=ROOMY)
        # What the cheat writes may hide the run before it from the monitor, if that is slow.
        assert {outcome.kind for outcome in outcomes[:2]} == {"ok"}
        assert outcomes[2:] == [] or outcomes[2].kind != "ok"
    except SandboxError:
        assert name == "kills its parent" and os.geteuid() != 0


def test_the_other_tests_are_not_in_the_programs_memory(sandbox):
    program = """
        import gc, sys
        def texts():
            frame = sys._getframe()
            while frame:
                yield from frame.f_locals.values()
                frame = frame.f_back
            for thing in gc.get_objects():
                yield from gc.get_referents(thing)
        def find(*parts):
            return sum(isinstance(text, str) and "".join(parts) in text for text in texts())
        known = "a" + "bc"
    """
    tests = [f"assert find('a', 'bc') and not find('xy', 'zzy')  # xyzzy {n}" for n in range(3)]
    outcomes = sandbox.run_repeatedly(dedent(program), tests=tests, limits=ROOMY)
    assert [outcome.kind for outcome in outcomes] == ["ok"] * 3, outcomes[-1].stderr


# The sandbox itself


def test_unknown_isolation():
    with pytest.raises(ValueError, match="isolation='docker' is not known; use full or rlimits"):
        Sandbox("docker")


@pytest.mark.parametrize("options", [{"seconds": 0}, {"memory_mib": 1}, {"processes": 0}])
def test_limits_are_checked(options):
    with pytest.raises(ValueError, match=f"{next(iter(options))}="):
        Limits(**options)


def test_a_dead_zygote_is_an_error():
    sandbox = Sandbox("rlimits").start()
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
