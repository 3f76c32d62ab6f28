"""The sandboxes that all calls of a process share: one each, and another for one that died."""

import os
import signal
import struct
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.process_checks import is_running, new_sandbox_processes, wait_until

from roll_lite.processes import children_of
from roll_lite.sandbox.sandbox import (
    Sandbox,
    SandboxEnded,
    SandboxError,
    SharedSandboxes,
    run_job,
)

SLOW = "import time\nprint('begun', flush=True)\ntime.sleep(1)\nprint('ended')"


@pytest.fixture(params=["either", pytest.param("rlimits", marks=pytest.mark.slow)])
def shared(request):
    """Nothing is left behind."""
    isolation = request.getfixturevalue(request.param)._isolation
    with new_sandbox_processes() as started:
        shared = SharedSandboxes(isolation)
        yield shared
        for sandbox in shared._idle:
            sandbox.close()
        wait_until(lambda: not started())  # a monitor whose zygote was killed may be ending


def zygote_of(sandbox):
    return sandbox._process.pid


def run(shared, program="print(1)", **options):
    return shared.run(lambda sandbox: sandbox.run(program, **options)).stdout


def kill(pid):
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not is_running(pid))


def test_threads_run_programs_at_the_same_time(shared):
    both_have_one = threading.Barrier(2, timeout=60)

    def run_one(number):
        def job(sandbox):
            both_have_one.wait()
            return sandbox, sandbox.run(f"print({number})").stdout

        return shared.run(job)

    with ThreadPoolExecutor(2) as threads:
        (first, one), (second, two) = threads.map(run_one, (1, 2))
    assert first is not second and (one, two) == ("1\n", "2\n")
    assert shared.run(lambda sandbox: sandbox) in (first, second)


def test_one_that_was_killed_between_jobs_is_replaced(shared):
    assert run(shared) == "1\n"
    for _ in range(2):
        (dead,) = shared._idle
        kill(zygote_of(dead))
        assert run(shared) == "1\n"
        (other,) = shared._idle
        assert other is not dead and run(shared, "print(2)") == "2\n" and shared._idle == [other]


@pytest.mark.parametrize("victims", ["zygote", "monitor", "both"])
def test_a_job_whose_processes_are_killed_runs_again(shared, victims):
    """Without its zygote a monitor goes on, and answers."""
    run(shared)
    (sandbox,) = shared._idle
    zygote = zygote_of(sandbox)
    with ThreadPoolExecutor(1) as thread:
        answer = thread.submit(run, shared, SLOW)
        wait_until(lambda: any(map(children_of, children_of(zygote))))  # the program's process
        (monitor,) = children_of(zygote)
        for pid in {"zygote": [zygote], "monitor": [monitor], "both": [zygote, monitor]}[victims]:
            kill(pid)
        assert answer.result() == "begun\nended\n"
    assert run(shared) == "1\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_that_reach_all_processes_of_a_job_end_no_sandbox(shared, number):
    """Programs handle them as usual."""
    run(shared)
    (sandbox,) = shared._idle
    with ThreadPoolExecutor(1) as thread:
        answer = thread.submit(run, shared, SLOW)
        wait_until(lambda: any(map(children_of, children_of(zygote_of(sandbox)))))
        for pid in (zygote_of(sandbox), *children_of(zygote_of(sandbox))):
            os.kill(pid, number)
        assert answer.result() == "begun\nended\n"
    assert shared._idle == [sandbox]
    raised = f"import os\nos.kill(os.getpid(), {number:d})\nprint('went on')"
    assert run(shared, raised) == ""


def test_a_job_that_kills_its_sandbox_runs_twice_at_most(shared):
    """As a program that finds its monitor can."""
    calls = []

    def deadly(sandbox):
        calls.append(zygote_of(sandbox))
        kill(zygote_of(sandbox))
        return sandbox.run("print(1)")

    for number in (1, 2):
        with pytest.raises(SandboxEnded, match="ended with -9"):
            shared.run(deadly)
        assert len(set(calls)) == len(calls) == 2 * number
    assert shared._idle == [] and run(shared) == "1\n"


def test_what_is_wrong_with_the_tests_restarts_nothing(shared):
    run(shared)
    (sandbox,) = shared._idle
    tests = "class Box: pass\nassert f(Box())"
    with pytest.raises(SandboxError, match="hand the program a Box") as error:
        run(shared, "def f(x): return True", tests=tests)
    assert not isinstance(error.value, SandboxEnded)
    assert shared._idle == [sandbox] and run(shared) == "1\n"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_one_that_is_killed_while_it_starts_is_replaced(shared, number):
    before = set(children_of(os.getpid()))

    def kill_the_first():
        wait_until(lambda: set(children_of(os.getpid())) - before)
        (started,) = set(children_of(os.getpid())) - before
        os.kill(started, number)
        return started

    with ThreadPoolExecutor(1) as thread:
        killed = thread.submit(kill_the_first)
        assert run(shared) == "1\n"
        # The others may come too late, when it ignores them.
        assert zygote_of(shared._idle[0]) != killed.result() or number != signal.SIGKILL


def test_an_answer_that_ends_in_the_middle():
    """What a monitor had written when it was killed."""

    def die_answering(descriptors):
        (monitor, *_) = map(os.dup, descriptors)

        def answer():
            os.read(monitor, 1 << 16)
            os.write(monitor, struct.pack("!i", 1000) + b"half")
            os.close(monitor)

        threading.Thread(target=answer).start()

    with pytest.raises(EOFError):
        run_job(die_answering, "print(1)")


def test_one_that_was_stopped_ends_when_it_is_closed(monkeypatch):
    monkeypatch.setattr("roll_lite.sandbox.sandbox.CLOSE_SECONDS", 0.1)
    sandbox = Sandbox("rlimits").start()
    os.kill(zygote_of(sandbox), signal.SIGSTOP)
    sandbox.close()
    assert not is_running(zygote_of(sandbox))
