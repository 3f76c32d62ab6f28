"""Several ranks on one GPU, over NCCL: layouts against one rank, and runs that end by themselves.

Where there are as many GPUs as ranks, each has its own.
"""

import json
import subprocess
import sys

import pytest
import torch
import train_programs
from conftest import RECIPES, make_reference, run_torchrun
from test_chaos import chaos
from test_layouts import CASES

from roll_lite.cluster.cluster import Cluster
from roll_lite.models.tiny import build_tiny

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks") / "qwen3"
    make_reference("qwen3", vocab_size=99, num_key_value_heads=1).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def over_ranks(folder):
    result_file = folder.parent / "layouts.pt"
    run_torchrun(4, train_programs.__file__, "layouts", folder, result_file, "cuda")
    return torch.load(result_file, weights_only=False, map_location="cpu")


@pytest.fixture(scope="module")
def alone(folder):
    return on_one_rank(folder, "cuda")


@pytest.fixture(scope="module")
def exact(folder):
    """In fp32, on the CPU."""
    return on_one_rank(folder, "cpu")


def on_one_rank(folder, device):
    results = {}
    with Cluster("train=0", device) as cluster:
        for lora in (None, train_programs.LORA):
            options = train_programs.options(lora)
            trainer = cluster.role("train", train_programs.Probe, folder=folder, **options)
            if lora:
                trainer.shake_adapters()
            results[bool(lora)] = train_programs.measure(trainer, 1)
    return results


@pytest.mark.parametrize(("layout", "lora"), CASES)
def test_training_does_not_depend_on_the_layout(over_ranks, alone, exact, layout, lora):
    """Gradients in bf16 are off by up to 3% on one rank, and about as far on many."""
    got, expected = over_ranks[layout, lora], alone[lora]
    for budget, grads in got["grads"].items():
        for name, grad in grads.items():
            true = exact[lora]["grads"][budget][name]
            error, on_one = (
                ((found.cpu() - true).norm() / true.norm()).item()
                for found in (grad, expected["grads"][budget][name])
            )
            assert on_one < 0.05, (budget, name, on_one)
            assert error < 1.5 * on_one + 5e-3, (layout, budget, name, error, on_one)
    assert got["losses"] == pytest.approx(expected["losses"], rel=1e-2)
    assert all(got["holds"])


def test_every_layout_reads_what_another_wrote(over_ranks):
    expected, _ = over_ranks["resumed"]["fsdp2tp2"]
    for layout, (state, _) in over_ranks["resumed"].items():
        for name, tensor in expected.items():
            assert torch.equal(state[name].cpu(), tensor.cpu()), (layout, name)


MAPS = {
    "train=all generate=all": 2,
    "train=0-1,tp=2 generate=0-1,tp=2": 2,
    "train=0-3,tp=2 generate=0-3,tp=4": 4,
    "train=0-1,tp=2 generate=2-3,tp=2": 4,
    "train=0-1 generate=2-3": 4,
    "train=all,fsdp=2 generate=all,tp=2": 4,
}


@pytest.mark.parametrize(("device_map", "num_ranks"), MAPS.items())
def test_a_run_ends_by_itself(tmp_path, device_map, num_ranks):
    """Also where CUDA graphs have captured collectives of an engine."""
    build_tiny(tmp_path / "tiny")
    command = [
        sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={num_ranks}",
        RECIPES / "rlvr.py", "--model", tmp_path / "tiny", "--run-dir", tmp_path / "run",
        "--device", "cuda", "--device-map", device_map, "--steps", 3, "--eval-every", 0,
        "--kv-cache-gib", 0.2, "--prompts-per-step", 8, "--samples-per-prompt", 4,
    ]  # fmt: skip
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    assert [row["step"] for row in rows if "time/step" in row] == [1, 2, 3]


def test_a_run_goes_on_without_an_engine(tmp_path):
    """Asynchronous, so that samples are counted, not compared bit for bit."""
    build_tiny(tmp_path / "tiny")
    options = [
        "--ranks", 5, "--runs", 1, "--kills", 1, "--targets", "generate/rank 4/SIGKILL",
        "--out", tmp_path / "chaos", "--", RECIPES / "rlvr.py", "--model", tmp_path / "tiny",
        "--device", "cuda", "--device-map", "train=0 generate=1-4,tp=2", "--max-staleness", 1,
        "--steps", 6, "--eval-every", 0, "--kv-cache-gib", 0.2, "--prompts-per-step", 32,
        "--samples-per-prompt", 4, "--max-tokens", 64,
    ]  # fmt: skip
    campaign = chaos.Campaign(chaos.read_options([str(option) for option in options]))
    campaign.run()
    assert not campaign.problems
    assert [fault.outcome for fault in campaign.faults] == [chaos.SURVIVED]
