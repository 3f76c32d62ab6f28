"""How ranks find each other, and how those that cannot work together are told apart.

Ranks are threads here: a rendezvous needs a store and nothing else.
"""

import os
import re
import signal
import socket
import subprocess
import sys
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from support.paths import SOURCES
from support.process_checks import is_running, wait_until

from roll_lite import processes
from roll_lite.checks import UserError
from roll_lite.cluster import launch as launching
from roll_lite.cluster import rendezvous, wire
from roll_lite.cluster.launch import INTERFACE_VARIABLES, Launch
from roll_lite.cluster.rendezvous import describe
from roll_lite.cluster.watchdog import Heartbeat
from roll_lite.processes import Process

OPTIONS = {"lr": 0.1, "steps": 3, "run_dir": "runs/a"}


@pytest.fixture(autouse=True)
def interface(monkeypatch):
    for name in INTERFACE_VARIABLES:
        monkeypatch.setenv(name, "lo")


@pytest.fixture(scope="module")
def port():
    """Of a store as an agent has it."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield store.port


def first(port, **changes):
    """The launch of rank 0 of two, under an agent whose name no other has."""
    host = {"master": "127.0.0.1", "port": port, "launcher": uuid.uuid4().hex}
    sizes = {"world_size": 2, "local_world_size": 2, "launcher_has_store": True}
    return Launch(**(sizes | host | changes))


def join_all(*ranks):
    """What each rank gets, or its error; a rank is a launch and a description."""
    with ThreadPoolExecutor(len(ranks)) as threads:
        futures = [threads.submit(rendezvous.rendezvous, *rank) for rank in ranks]
        return [future.exception(600) or future.result() for future in futures]


def second(launch, **changes):
    return replace(launch, rank=1, local_rank=1, **changes)


def test_equal_ranks_meet(port):
    """Only the run folder may differ: its default has the time in it."""
    launch, ours = first(port), describe("train=all", OPTIONS)
    theirs = describe("train=all", OPTIONS | {"run_dir": "runs/b"})
    one, other = join_all((launch, ours), (second(launch, has_monitor=True), theirs))
    assert one.processes == other.processes == [Process.find(os.getpid())] * 2
    one.store.set("key", "value")
    assert other.store.get("key") == b"value"
    assert one.name == other.name and one.monitored == {1}
    plain = dist.TCPStore(launch.master, port, is_master=False, wait_for_workers=False)
    assert plain.get(f"{one.name}/key") == b"value"  # as a monitor reads it


def test_a_rank_that_differs_is_refused_on_all_ranks(port, monkeypatch, tmp_path):
    launch, ours = first(port), describe("train=all", OPTIONS)
    (tmp_path / "module.py").write_text("changed = True")
    monkeypatch.setattr(rendezvous, "PACKAGE", tmp_path)
    monkeypatch.setattr(torch, "__version__", "1.0")
    theirs = describe("train=0", OPTIONS | {"lr": 0.2})
    errors = join_all((launch, ours), (second(launch), theirs))
    assert [type(error) for error in errors] == [UserError] * 2
    assert str(errors[0]) == str(errors[1])
    me = f"pid {os.getpid()} on {socket.gethostname()}"
    assert str(errors[0]).startswith(f"rank 1 ({me}) differs from rank 0 ({me}): the code of ")
    code = "the code of roll_lite"
    for difference in (
        f"{code} is {theirs[code]}, not {ours[code]}; ",
        "; torch is 1.0, not ",
        "; the device map is train=0, not train=all; lr is 0.2, not 0.1; start all ranks with",
    ):
        assert difference in str(errors[0])


def test_every_file_of_the_package_and_the_program_counts(monkeypatch, tmp_path):
    for name in ("a/__init__.py", "b/__init__.py", "program.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"name = {name!r}")
    monkeypatch.setattr(rendezvous, "PACKAGE", tmp_path)
    program = str(tmp_path / "program.py")  # a worker of pytest has no such name
    monkeypatch.setattr(sys.modules["__main__"], "__file__", program, raising=False)
    monkeypatch.chdir(tmp_path)  # where torch.ops seems to have a file
    before = describe("", {})
    assert before == describe("", {})
    (tmp_path / "b/__init__.py").write_text("changed = True")
    changed = describe("", {})
    assert changed["the code of roll_lite"] != before["the code of roll_lite"]
    assert changed["the code of the program"] == before["the code of the program"]
    (tmp_path / "program.py").write_text("changed = True")
    assert describe("", {})["the code of the program"] != changed["the code of the program"]


def test_a_rank_of_another_agent_does_not_join(port, monkeypatch):
    """It outlived its torchrun, and the next one has the same port."""
    same = describe("train=all", {})
    several = first(port, num_nodes=2)  # there the ranks of each node are compared
    errors = join_all((several, same), (second(several, launcher="old"), same))
    assert all("another torchrun started it" in str(error) for error in errors)
    several = first(port, num_nodes=2)
    ours, theirs = join_all((several, same), (second(several, launcher="b", node=1), same))
    assert ours.processes == theirs.processes
    launch = first(port)
    ours, theirs = join_all((launch, same), (second(launch), same))
    assert ours.processes == theirs.processes
    monkeypatch.setattr(rendezvous, "RENDEZVOUS_SECONDS", 0.5)
    (lost,) = join_all((second(launch, launcher="old"), same))
    assert isinstance(lost, TimeoutError) and "rank 1 waited 0 s for rank 0;" in str(lost)


def test_missing_ranks_are_named(port, monkeypatch, capfd):
    monkeypatch.setattr(rendezvous, "RENDEZVOUS_SECONDS", 1.0)
    monkeypatch.setattr(rendezvous, "NOTICE_SECONDS", 0.3)
    same, four = describe("train=all", {}), first(port, world_size=4)
    alone, *_ = join_all((four, same), (second(four), same))
    # a busy machine may be late with rank 1
    text = r"for ranks (1, )?2 and 3"
    assert re.search(f"rank 0 waited 1 s {text}; check that torchrun", str(alone))
    assert re.search(f"rank 0 waits {text}\n", capfd.readouterr().err)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # and does not listen
        launch = first(silent.getsockname()[1])
        (lost,) = join_all((second(launch), same))
    address = f"127.0.0.1:{launch.port}"
    assert f"the store at {address}, of rank 0 or its torchrun" in str(lost)
    assert f"rank 1 waits for the store at {address}" in capfd.readouterr().err


def test_a_stopped_rank_is_named(monkeypatch):
    """A child of this process's own parent would be a rank beside it; here its agent is faked."""
    monkeypatch.setattr(launching, "launcher_pid", os.getpid)
    rank = subprocess.Popen(["sleep", "600"], env=os.environ | {"RANK": "3"})
    try:
        rank.send_signal(signal.SIGSTOP)
        wait_until(lambda: Process.find(rank.pid).is_stopped)
        text = rendezvous._name_missing([1, 3])
        host = socket.gethostname()
        assert text == f"ranks 1 and 3; rank 3 is stopped (pid {rank.pid} on {host})"
        stopped = Process.find(rank.pid)
        assert (
            not stopped._replace(start=1).is_stopped and not stopped._replace(host="x").is_stopped
        )
    finally:
        Process.find(rank.pid).kill()
        rank.wait()


def test_a_rank_that_is_stopped_while_it_starts_is_killed(port, monkeypatch, capfd):
    """By a rank of its node that waits; torchrun then starts all of them again."""
    for module in (launching, rendezvous):
        monkeypatch.setattr(module, "launcher_pid", os.getpid)
    monkeypatch.setattr(rendezvous, "STOPPED_SECONDS", 0.3)
    monkeypatch.setattr(rendezvous, "LOOK_SECONDS", 0.1)
    monkeypatch.setattr(rendezvous, "RENDEZVOUS_SECONDS", 3.0)
    stopped, waiting = (
        subprocess.Popen(["sleep", "600"], env=os.environ | {"RANK": rank}) for rank in "12"
    )
    stopped.send_signal(signal.SIGSTOP)
    try:
        (lost,) = join_all((first(port, world_size=3), describe("train=all", {})))
        assert stopped.poll() == -signal.SIGKILL and waiting.poll() is None
        assert isinstance(lost, TimeoutError)
        text = rf"rank 1 \(pid {stopped.pid} on .*\) was stopped \(SIGSTOP\) while it started, and"
        assert re.search(text, capfd.readouterr().err)
    finally:
        for process in (stopped, waiting):
            process.kill()
            process.wait()


def test_an_address_that_does_not_resolve_is_named(monkeypatch):
    monkeypatch.setattr(rendezvous, "RESOLVE_SECONDS", 0.0)
    (error,) = join_all((first(1, master="no-such-host.invalid"), describe("", {})))
    assert isinstance(error, ValueError)
    assert "MASTER_ADDR=no-such-host.invalid does not resolve on" in str(error)


def test_a_taken_port_is_named():
    with socket.create_server(("127.0.0.1", 0)) as other:
        launch = first(other.getsockname()[1], launcher_has_store=False)
        (error,) = join_all((launch, describe("", {})))
    assert isinstance(error, ValueError)
    assert f"port 127.0.0.1:{launch.port} is taken" in str(error)


RECIPE = """
import os, subprocess, sys, threading, time
from dataclasses import dataclass
from roll_lite import command
from roll_lite.options import RecipeConfig

@dataclass(frozen=True)
class Config(RecipeConfig):
    device: str = "cpu"
    FIXED = ()

def main(cfg):
    {main}

command.run(main, Config, "")
"""
CHILD = RECIPE.format(main="print(os.getpid(), flush=True); time.sleep(600)")
START_CHILD = f"""
    started = []
    def start_child():
        command = [sys.executable, "-c", {CHILD!r}]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE))
        started[0].stdout.readline()  # it runs
    thread = threading.Thread(target=start_child)
    thread.start()
    thread.join()
    try:
        started[0].wait(1.0)
    except subprocess.TimeoutExpired:
        print(started[0].pid, flush=True)
    time.sleep(600)
"""
RANK = RECIPE.format(main=START_CHILD)
AGENT = """
import os, subprocess, sys
environment = os.environ | {"TORCHELASTIC_RUN_ID": "x"}
rank = subprocess.Popen([sys.executable, "-c", sys.argv[1]], env=environment)
print(rank.pid, flush=True)
rank.wait()
"""


def test_a_rank_whose_agent_ended_before_it_began_exits(monkeypatch):
    """Which process adopts orphans depends on the machine, so its command is made up."""
    commands = {1: b"/sbin/init\0", 2: b"/usr/lib/systemd/systemd\0--user\0", 3: b"agent\0"}
    monkeypatch.setattr(processes, "command_of", commands.get)
    assert [processes._is_init(pid) for pid in commands] == [True, True, False]
    commands[1] = b"/usr/bin/python3\0/usr/bin/torchrun\0"  # of a container
    assert not processes._is_init(1)


def test_a_rank_ends_with_its_agent_and_what_it_starts_outlives_a_thread():
    """From the first line of a recipe's command on, as the child's, which a rank started."""
    torchrun = subprocess.Popen(
        [sys.executable, "-c", AGENT, RANK],
        env=os.environ | {"PYTHONPATH": SOURCES},
        stdout=subprocess.PIPE,
        text=True,
    )
    rank, child = (int(torchrun.stdout.readline()) for _ in range(2))
    try:
        assert is_running(rank) and is_running(child)
        torchrun.kill()
        wait_until(lambda: not is_running(rank), seconds=600)
        assert is_running(child)
    finally:
        torchrun.kill()
        torchrun.wait()
        torchrun.stdout.close()
        for pid in filter(is_running, (rank, child)):
            with suppress(ProcessLookupError):  # it has ended since
                os.kill(pid, signal.SIGKILL)


def test_a_rank_that_is_alone_on_its_node_is_killed_when_it_is_stopped():
    impatient = "from roll_lite import processes; processes.STOPPED_SECONDS = 0.5\n" + CHILD
    environment = {"PYTHONPATH": SOURCES, "LOCAL_WORLD_SIZE": "1"}
    agent = subprocess.Popen(
        [sys.executable, "-c", AGENT.replace("rank.wait()", "print(rank.wait())"), impatient],
        env=os.environ | environment, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    rank = int(agent.stdout.readline())
    assert int(agent.stdout.readline()) == rank  # it runs
    os.kill(rank, signal.SIGSTOP)
    try:
        assert agent.communicate(timeout=60)[0] == f"{-signal.SIGKILL}\n"
    finally:
        agent.kill()
        agent.wait()
        with suppress(ProcessLookupError):
            os.kill(rank, signal.SIGKILL)


@pytest.fixture
def send_failing_heartbeats(monkeypatch):
    """Returns why a rank gives up, and the process of its controller."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as controller:

        def send(error):
            reasons = []

            def on_lost(reason):
                reasons.append(reason)
                heartbeat.stop()

            worker = SimpleNamespace(rank=1, status=lambda: None)
            heartbeat = Heartbeat(worker, Process.find(controller.pid), on_lost)
            heartbeat._is_connected = True
            monkeypatch.setattr(wire, "send", Mock(side_effect=error))
            heartbeat.start()
            wait_until(lambda: reasons)
            return reasons[0], controller

        yield send
        controller.kill()


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("On WorkerInfo(id=0, name=rank0):\nMemoryError()"),
        RuntimeError("On WorkerInfo(id=0): MemoryError: <EMPTY MESSAGE>"),
        RuntimeError("Error on Node 0: MemoryError: <EMPTY MESSAGE>"),
    ],
)
def test_a_controller_without_memory_is_given_up(send_failing_heartbeats, error):
    """Its handlers answer every message with MemoryError, as text where a message cannot even be
    read; the process lives."""
    reason, controller = send_failing_heartbeats(error)
    assert reason.startswith("the controller") and reason.endswith("has no memory left")
    assert controller.wait(600) == -signal.SIGKILL


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("MemoryError: <EMPTY MESSAGE>")])
def test_a_rank_without_memory_does_not_blame_the_controller(send_failing_heartbeats, error):
    reason, controller = send_failing_heartbeats(error)
    assert reason == "it has no memory left" and controller.poll() is None
