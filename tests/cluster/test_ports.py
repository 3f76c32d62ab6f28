"""Nothing of a run on one node can be reached from another machine, and what connects to a port of
it on this machine does no harm."""

import os
import re
import socket
import subprocess
import sys

import pytest
from support.launch import installed
from support.paths import SUPPORT

from roll_lite.cluster import rendezvous
from roll_lite.cluster.launch import Launch
from roll_lite.cluster.ports import closed_afterwards, is_open_to_the_network

PROGRAM = SUPPORT / "listening.py"
LOOPBACK = "0100007F"


def torchrun(path, *options):
    return subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *options, "--nproc-per-node=2", PROGRAM],
        capture_output=True, text=True, timeout=600,
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


@pytest.mark.slow
def test_everything_listens_on_loopback_and_a_stray_connection_is_harmless(tmp_path):
    done = torchrun(installed(tmp_path), "--rdzv-backend=loopback")
    assert done.returncode == 0, done.stderr
    *_, listening, disturbed = done.stdout.splitlines()
    assert listening == f"listening on {LOOPBACK}"
    assert re.fullmatch(r"[4-9] ports, and the sum is 3", disturbed)  # of RPC and gloo, two ranks
    assert "listens on all interfaces" not in done.stderr


@pytest.mark.slow
def test_several_nodes_need_another_backend(tmp_path):
    done = torchrun(installed(tmp_path), "--rdzv-backend=loopback", "--nnodes=2")
    assert "--rdzv-backend loopback is for one node, but --nnodes is 2" in done.stderr


def test_a_port_that_was_closed_admits_nobody():
    with socket.create_server(("127.0.0.1", 0)) as before:
        with closed_afterwards():
            opened = socket.create_server(("127.0.0.1", 0))
            early = socket.create_connection(opened.getsockname())
            accepted, _ = opened.accept()
        socket.create_connection(before.getsockname()).close()
        with pytest.raises(TimeoutError):
            socket.create_connection(opened.getsockname(), timeout=0.5)
        early.sendall(b"on")
        assert accepted.recv(2) == b"on"
        for each in (opened, early, accepted):
            each.close()


def test_the_store_of_rank_0_listens_where_the_ranks_of_its_node_look_for_it():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    store = rendezvous._connect(Launch(world_size=2, local_world_size=2, port=port))
    assert not is_open_to_the_network(port)
    store.set("key", "value")
    other = rendezvous._connect(Launch(rank=1, world_size=2, local_world_size=2, port=port))
    assert other.get("key") == b"value"


@pytest.mark.parametrize(("host", "is_open"), [("127.0.0.1", False), ("", True)])
def test_what_listens_on_all_interfaces_is_found(host, is_open):
    with socket.create_server((host, 0)) as server:
        assert is_open_to_the_network(server.getsockname()[1]) == is_open
    assert not is_open_to_the_network(server.fileno())
