"""How the keeper of a rank ends: as the rank did, or with the run."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from support.paths import SOURCES
from support.process_checks import is_running, wait_until

from roll_lite.cluster.keeper import needs_keeper
from roll_lite.cluster.rendezvous import Launch
from roll_lite.sandbox.processes import state_of

PROGRAM = """
import os, signal, sys, time
import torch
from roll_lite.cluster.keeper import fork_rank
from roll_lite.cluster.rendezvous import Launch

def stop(*_):
    print("stopping", flush=True)
    sys.exit(9)

def act(word):
    if word == "let_go":
        keeper.let_go(Launch(rank=1, world_size=2, port=int(sys.argv[1])), "run/a")
    elif word == "take_back":
        keeper.take_back()
    elif word == "exit":
        sys.exit(int(sys.argv[-1]))
    elif word == "abort":
        os.abort()

if "bad" in sys.argv:
    torch.cuda._is_in_bad_fork = lambda: True  # as if CUDA were in use
keeper = fork_rank()
if "bad" in sys.argv:
    assert keeper is None
signal.signal(signal.SIGTERM, stop)
for word in sys.argv[2:]:
    act(word)
print(os.getpid(), flush=True)
for line in sys.stdin:
    keeper.wake()
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


def test_a_keeper_ends_as_its_rank(start):
    ends = {start("exit", "3"): 3, (killed := start()): -signal.SIGKILL}
    os.kill(int(killed.stdout.readline()), signal.SIGKILL)
    assert [process.wait() for process in ends] == [*ends.values()]


@pytest.mark.slow
def test_a_keeper_ends_as_a_rank_that_aborts_or_was_let_go(start):
    ends = {start("exit", "0"): 0, start("abort"): -signal.SIGABRT, start("bad", "exit", "5"): 5}
    ends |= {start("let_go", "exit", "0"): 0, start("let_go", "take_back", "exit", "4"): 4}
    assert [process.wait() for process in ends] == [*ends.values()]


@pytest.mark.slow
def test_after_letting_go_a_keeper_ends_with_the_run(start, store):
    failed, aborted = start("let_go", "exit", "3"), start("let_go", "abort")
    killed, stopped = start("let_go"), start("let_go")
    rank = int(killed.stdout.readline())
    os.kill(rank, signal.SIGKILL)
    stopped.stdout.readline()
    stopped.terminate()  # as torchrun does it: the rank decides, and the keeper does not stay
    assert stopped.wait() == 9 and stopped.stdout.readline() == "stopping\n"
    wait_until(lambda: not is_running(rank))
    keepers = [failed, aborted, killed]
    assert [keeper.poll() for keeper in keepers] == [None] * 3
    store.set("run/a/ended", "")
    assert [keeper.wait() for keeper in keepers] == [0] * 3


def test_a_keeper_fails_if_the_run_cannot_have_ended_well(start):
    stores = [dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)]
    port = stores[0].port
    process = start("let_go", "exit", "3", port=port)
    wait_until(lambda: num_connections(port) == 2)  # of the store itself, and of the keeper
    stores.clear()
    assert process.wait() == 1


def num_connections(port):
    """To a port of this machine: the columns are of /proc/net/tcp, and state 01 is connected."""
    tables = [Path(f"/proc/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
    rows = [row.split() for table in tables for row in table]
    return sum(row[2].endswith(f":{port:04X}") and row[3] == "01" for row in rows)


def test_a_rank_ends_with_its_keeper(start):
    process = start("let_go")
    rank = int(process.stdout.readline())
    process.kill()
    wait_until(lambda: not is_running(rank))


def test_a_rank_wakes_its_keeper(start):
    process = start()
    process.stdout.readline()
    process.send_signal(signal.SIGSTOP)
    wait_until(lambda: state_of(process.pid) == "T")
    print("wake", file=process.stdin, flush=True)
    wait_until(lambda: state_of(process.pid) != "T")


def test_only_spare_ranks_of_torchrun_have_a_keeper():
    launch = Launch(rank=3, world_size=4, agent="folder")
    assert needs_keeper(launch, "train=0-1 generate=2-3")
    assert not needs_keeper(launch, "train=all generate=all")
    assert not needs_keeper(launch, "auto")
    assert not needs_keeper(Launch(rank=3, world_size=4), "train=0-1 generate=2-3")
    assert not needs_keeper(Launch(world_size=4, agent="folder"), "train=2-3 generate=0-1")
