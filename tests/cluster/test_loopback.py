"""On one node, nothing of a run can be reached from another machine."""

import os
import subprocess
import sys

import pytest
from support.launch import installed
from support.paths import SUPPORT

PROGRAM = SUPPORT / "listening.py"
LOOPBACK = "0100007F"


def torchrun(path, *options):
    return subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *options, "--nproc-per-node=2", PROGRAM],
        capture_output=True, text=True, timeout=600,
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


@pytest.mark.slow
def test_everything_listens_on_loopback(tmp_path):
    done = torchrun(installed(tmp_path), "--rdzv-backend=loopback")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"listening on {LOOPBACK}"


@pytest.mark.slow
def test_several_nodes_need_another_backend(tmp_path):
    done = torchrun(installed(tmp_path), "--rdzv-backend=loopback", "--nnodes=2")
    assert "--rdzv-backend loopback is for one node, but --nnodes is 2" in done.stderr
