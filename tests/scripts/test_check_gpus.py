"""scripts/check_gpus.py: what it prints of ranks that work, and that an error is one."""

import os
import subprocess
import sys

import check_gpus
import pytest


@pytest.mark.slow
def test_ranks_on_a_cpu_are_well():
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    command += [check_gpus.__file__, "--device", "cpu", "--mib", "1"]
    done = subprocess.run(
        command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("all is well\n")
    for what in ("all-reduce", "send", "update, FSDP over all", "reply, tp=2", "weight sync"):
        assert what in done.stdout


def test_layouts_use_all_ranks():
    assert dict(check_gpus.layouts(8, [1, 2])) == {
        "copies4_fsdp2_tp1": "all,tp=1,fsdp=2",
        "copies2_fsdp4_tp1": "all,tp=1,fsdp=4",
        "fsdp4_tp2": "all,tp=2",
        "copies2_fsdp2_tp2": "all,tp=2,fsdp=2",
        "cp8": "all,cp=8",
    }


def test_replies_are_compared_up_to_the_first_difference():
    expected = [([5, 6, 7], [-0.5, -1.0, -2.0])]
    for ids, logprobs, error in [
        ([5, 6, 7], [-0.5, -1.1, -2.0], 0.1),
        ([5, 9, 9], [-0.5, -1.5, -9.0], 0.5),
    ]:
        found = check_gpus.reply_error([(ids, logprobs)], expected)
        assert found == pytest.approx(error)
    assert check_gpus._verdict(float("nan"), 1e-4) == "FAILED"
