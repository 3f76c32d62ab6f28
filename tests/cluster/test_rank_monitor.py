"""How the monitor of a rank ends: as the rank did, or with the run."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from support.paths import SOURCES
from support.process_checks import is_running, wait_until

from roll_lite.cluster.launch import Launch
from roll_lite.cluster.rank_monitor import needs_monitor
from roll_lite.device_map import parse_device_map
from roll_lite.processes import state_of

PROGRAM = """
import os, signal, sys, time
import torch
from roll_lite.cluster.launch import Launch
from roll_lite.cluster.rank_monitor import fork_rank

def stop(*_):
    print("stopping", flush=True)
    sys.exit(9)

def act(word):
    if word == "may_fail":
        monitor.allow_failure(Launch(rank=1, world_size=2, port=int(sys.argv[1])), "run/a")
    elif word == "must_not_fail":
        monitor.forbid_failure()
    elif word == "exit":
        sys.exit(int(sys.argv[-1]))
    elif word == "abort":
        os.abort()

if "bad" in sys.argv:
    torch.cuda._is_in_bad_fork = lambda: True  # as if CUDA were in use
monitor = fork_rank()
if "bad" in sys.argv:
    assert monitor is None
signal.signal(signal.SIGTERM, stop)
for word in sys.argv[2:]:
    act(word)
print(os.getpid(), flush=True)
for line in sys.stdin:
    monitor.wake()
time.sleep(600)
"""


@pytest.fixture
def store():
    return dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)


@pytest.fixture
def start(store):
    started = []

    def run(*words, port=store.port):
        command = [sys.executable, "-c", PROGRAM, str(port), *words]
        process = subprocess.Popen(
            command, env=os.environ | {"PYTHONPATH": SOURCES}, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate()


def test_a_rank_wakes_its_monitor_which_ends_as_it_does(start):
    process = start()
    rank = int(process.stdout.readline())
    process.send_signal(signal.SIGSTOP)
    wait_until(lambda: state_of(process.pid) == "T")
    print("wake", file=process.stdin, flush=True)
    wait_until(lambda: state_of(process.pid) != "T")
    os.kill(rank, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL


@pytest.mark.slow
def test_a_monitor_ends_as_a_rank_that_exits_aborts_or_may_fail(start):
    ends = {
        start("exit", "0"): 0,
        start("exit", "3"): 3,
        start("abort"): -signal.SIGABRT,
        start("bad", "exit", "5"): 5,
    }
    ends |= {start("may_fail", "exit", "0"): 0, start("may_fail", "must_not_fail", "exit", "4"): 4}
    assert [process.wait() for process in ends] == [*ends.values()]


@pytest.mark.slow
def test_the_monitor_of_a_rank_that_may_fail_ends_with_the_run(start, store):
    failed, aborted = start("may_fail", "exit", "3"), start("may_fail", "abort")
    killed, stopped = start("may_fail"), start("may_fail")
    rank = int(killed.stdout.readline())
    os.kill(rank, signal.SIGKILL)
    stopped.stdout.readline()
    stopped.terminate()  # as torchrun does it: the rank decides, and the monitor does not stay
    assert stopped.wait() == 9 and stopped.stdout.readline() == "stopping\n"
    wait_until(lambda: not is_running(rank))
    monitors = [failed, aborted, killed]
    assert [monitor.poll() for monitor in monitors] == [None] * 3
    store.set("run/a/ended", "")
    assert [monitor.wait() for monitor in monitors] == [0] * 3


def test_a_monitor_fails_if_the_run_cannot_have_ended_well(start):
    stores = [dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)]
    port = stores[0].port
    process = start("may_fail", "exit", "3", port=port)
    wait_until(lambda: num_connections(port) == 2)  # of the store itself, and of the monitor
    stores.clear()
    assert process.wait() == 1


def num_connections(port):
    """To a port of this machine: the columns are of /proc/net/tcp, and state 01 is connected."""
    tables = [Path(f"/proc/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
    rows = [row.split() for table in tables for row in table]
    return sum(row[2].endswith(f":{port:04X}") and row[3] == "01" for row in rows)


def test_a_rank_ends_with_its_monitor(start):
    process = start("may_fail")
    rank = int(process.stdout.readline())
    process.kill()
    wait_until(lambda: not is_running(rank))


def test_only_spare_ranks_of_torchrun_have_a_monitor():
    launch = Launch(rank=3, world_size=4, launcher="folder")
    apart, last = parse_device_map("train=0-1 generate=2-3", 4), Launch(rank=3, world_size=4)
    assert needs_monitor(launch, apart) and not needs_monitor(last, apart)
    assert not needs_monitor(launch, parse_device_map("train=all generate=all", 4))
    first = Launch(world_size=4, launcher="folder")
    assert not needs_monitor(first, parse_device_map("train=2-3 generate=0-1", 4))
