"""Several ranks on one GPU, over NCCL: layouts against one rank, and runs that end by themselves.

Where there are as many GPUs as ranks, each has its own.
"""

import json
import os
import signal
import subprocess
import time

import check_gpus
import faults
import pytest
import torch
from support import exact_replies, sync_program, train_programs
from support.launch import run_torchrun
from support.models import make_reference
from support.paths import RECIPES
from support.process_checks import wait_for
from support.recipes import call_recipe
from support.sync_program import check_synced
from support.train_programs import CASES

from roll_lite.cluster.cluster import Cluster
from roll_lite.models.tiny import build_tiny
from roll_lite.options import from_flat
from roll_lite.recipes import sft

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
SMALL = ("--steps", 3, "--eval-every", 0, "--kv-cache-gib", 0.2)
GROUPS = (*SMALL, "--prompts-per-step", 8, "--samples-per-prompt", 4)


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
        for lora in (None, train_programs.adapters(folder)):
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


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen2_moe"])
def test_ranks_with_experts_have_the_gradients_of_one(tmp_path, family):
    """In fp32: in bf16 a router may choose other experts."""
    sizes = {"vocab_size": 99, "num_key_value_heads": 2, "num_hidden_layers": 2}
    make_reference(family, **sizes).save_pretrained(folder := tmp_path / family)
    result_file = tmp_path / "layouts.pt"
    run_torchrun(4, train_programs.__file__, "layouts", folder, result_file, DEVICE, "float32")
    results = torch.load(result_file, weights_only=False, map_location="cpu")
    expected = on_one_rank(folder, "cpu")
    for layout, lora in train_programs.cases(folder):
        for budget, grads in results[layout, lora]["grads"].items():
            for name, grad in grads.items():
                true = expected[lora]["grads"][budget][name]
                error = ((grad - true).norm() / true.norm()).item()
                assert error < 1e-5, (layout, budget, name, error)


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen2_moe"])
def test_with_recorded_experts_ranks_round_as_one_does(tmp_path, family):
    """In bf16, in which the experts' widths on a rank must be multiples of 8."""
    sizes = {"vocab_size": 99, "num_key_value_heads": 2, "num_hidden_layers": 2}
    sizes["moe_intermediate_size"] = 32
    make_reference(family, **sizes).save_pretrained(folder := tmp_path / family)
    result_file = tmp_path / "layouts.pt"
    run_torchrun(4, train_programs.__file__, "recorded", folder, result_file, DEVICE)
    results = torch.load(result_file, weights_only=False, map_location="cpu")
    alone = {}
    for device in ("cpu", DEVICE):
        with Cluster("train=0", device) as cluster:
            alone[device] = train_programs.replayed(cluster, folder, "train")
    for layout, grads in results.items():
        for name, true in alone["cpu"].items():
            error, on_one = (
                ((found[name].cpu() - true).norm() / true.norm()).item()
                for found in (grads, alone[DEVICE])
            )
            assert error < 1.5 * on_one + 5e-3, (layout, name, error, on_one)


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
    options = ("--device-map", device_map, *GROUPS)
    done = start(tmp_path, "rlvr", *options, num_ranks=num_ranks)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    assert [row["step"] for row in rows if "time/step" in row] == [1, 2, 3]


SYNCED = {
    "train=0 generate=0-1,tp=2": 2,
    "train=0-1 generate=0-3,tp=2": 4,
    "train=0-1,tp=2 generate=2-3": 4,
    "train=all,tp=2 generate=all,tp=4": 4,
}


@pytest.mark.parametrize(("device_map", "num_ranks"), SYNCED.items())
def test_engines_hold_the_trainers_weights_bit_for_bit(tmp_path, device_map, num_ranks):
    odd = {"vocab_size": 199, "num_key_value_heads": 1}
    make_reference("qwen2.5", **odd).save_pretrained(tmp_path / "model")
    result = tmp_path / "result.pt"
    run_torchrun(num_ranks, sync_program.__file__, device_map, tmp_path / "model", result, DEVICE)
    check_synced(result, device_map, num_ranks)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_ranks_answer_and_learn_like_one(num_ranks, folder):
    """scripts/check_gpus.py in bf16, where a near tie may go either way; and in fp32."""
    table = run_torchrun(num_ranks, check_gpus.__file__, "--device", DEVICE, "--mib", 1)
    print(table)
    assert table.endswith("all is well\n") and "FAILED" not in table
    told = run_torchrun(num_ranks, exact_replies.__file__, folder, DEVICE)
    assert told.splitlines()[-1] == f"{num_ranks} ranks: 16 of 16 replies equal"


ROWS = ("--steps", 3, "--rows-per-step", 8, "--eval-rows", 8, "--data", "reverse:3")
BOTH = "train=0-1,tp=2 generate=0-1,tp=2"
PROGRAMS = {
    "critic and reference": (
        "rlvr", *GROUPS, "--advantage", "gae", "--kl-coef", 0.01,
        "--device-map", f"{BOTH} critic=0-1 reference=0-1,tp=2",
    ),
    "adapters": ("rlvr", *GROUPS, "--lora-rank", 4, "--device-map", BOTH),
    "judge and reward model": (
        "rlvr", *GROUPS, "--data", "{judged}", "--judge", "{judge}", "--reward-model", "{scorer}",
        "--device-map", "train=0-1,tp=2 generate=0-1 judge=0-1 reward_model=0-1",
    ),
    "turns": ("rlvr", *GROUPS, "--engines-sleep", "--offload", "--device-map", BOTH),
    "new weights in flight": (
        "rlvr", *GROUPS, "--max-staleness", 1, "--on-new-weights", "abort",
        "--device-map", "train=0 generate=1",
    ),
    "agentic": ("agentic", *GROUPS, "--data", "frozen_lake", "--device-map", BOTH),
    "sft": ("sft", *ROWS, "--tp", 2),
    "dpo": ("dpo", *ROWS),
    "distill": ("distill", *ROWS, "--teacher", "{tiny}", "--device-map", "train=0-1 teacher=0-1"),
    "distill on policy": (
        "rlvr", *GROUPS, "--data", "reverse:3", "--advantage", "opd", "--teacher", "{tiny}",
        "--device-map", "train=0-1 teacher=0-1 generate=0-1,tp=2",
    ),
    "evaluate": ("evaluate", "--data", "reverse:3", "--prompts", 16, "--kv-cache-gib", 0.2),
}  # fmt: skip


@pytest.fixture(scope="module")
def judge(tmp_path_factory):
    """A tiny model that says yes to everything."""
    folder = tmp_path_factory.mktemp("judge")
    rows = [{"prompt": f"{a}{b}", "reply": "yes"} for a in "abcdef" for b in "uvwxyz"]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    call_recipe(sft, from_flat(
        sft.Config, model=str(build_tiny(folder / "tiny")), data=str(folder / "rows.jsonl"),
        steps=30, rows_per_step=36, lr=5e-3, eval_every=0, device=DEVICE,
        run_dir=str(folder / "run"),
    ))  # fmt: skip
    return folder / "run" / "model"


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_recipe_and_role(tmp_path, judge, reward_folder, name):
    """It does its work and ends by itself."""
    recipe, *options = PROGRAMS[name]
    judged = [
        {"prompt": f"Reverse {word}", "ground_truth": word[::-1], "domain": domain}
        for domain in ("judge", "reward_model")
        for word in ("abc", "xyz", "kl", "mn")
    ]
    (tmp_path / "judged.jsonl").write_text("".join(json.dumps(row) + "\n" for row in judged))
    names = {"{tiny}": build_tiny(tmp_path / "tiny"), "{scorer}": reward_folder[1]}
    names |= {"{judge}": judge, "{judged}": tmp_path / "judged.jsonl"}
    done = start(tmp_path, recipe, *(names.get(option, option) for option in options))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    if recipe == "evaluate":
        assert "eval/pass@1" in rows[-1]
    else:
        assert [row["step"] for row in rows if "time/step" in row] == [1, 2, 3]


def start(folder, recipe, *options, num_ranks=2):
    """Under torchrun, with the tiny model of a folder."""
    command = [
        *faults.launch(num_ranks), RECIPES / f"{recipe}.py", "--model", folder / "tiny",
        "--run-dir", folder / "run", "--device", DEVICE, *options,
    ]  # fmt: skip
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=300)


FAILING = """
from roll_lite.recipes import rlvr

def fail(*arguments, **options):
    raise RuntimeError("my own mistake")

if __name__ == "__main__":
    rlvr.update = fail
    rlvr.command.run(rlvr.main, rlvr.Config, "")
"""


@pytest.mark.parametrize("end", ["Ctrl-C", "a killed rank", "an exception"])
def test_all_processes_end_with_a_run_that_is_cut_short(tmp_path, end):
    """With engines and trainers that are tensor parallel, so that graphs hold collectives."""
    build_tiny(tmp_path / "tiny")
    program = RECIPES / "rlvr.py"
    if end == "an exception":
        program = tmp_path / "failing.py"
        program.write_text(FAILING)
    command = [
        *faults.launch(2), program, "--model", tmp_path / "tiny", "--device", DEVICE,
        "--run-dir", tmp_path / "run", *GROUPS, "--steps", 100_000, "--device-map", BOTH,
    ]  # fmt: skip
    log, metrics = tmp_path / "log", tmp_path / "run" / "metrics.jsonl"
    (tmp_path / "temp").mkdir()
    run = faults.Program.start(list(map(str, command)), 2, log, tmp_path / "temp")
    try:
        if end == "an exception":
            wait_for(lambda: "my own mistake" in log.read_text(), run.process, log)
        else:
            wait_for(metrics.exists, run.process, log)
            wait_for(lambda: "reward/mean" in metrics.read_text(), run.process, log)
            if end == "Ctrl-C":
                os.killpg(run.process.pid, signal.SIGINT)
            else:
                os.kill(run.find("rank 1").pid, signal.SIGKILL)
        since = time.monotonic()
        assert run.process.wait(timeout=120) != 0
        while run.alive():
            assert time.monotonic() < since + 120, run.alive()
            time.sleep(0.1)
        print(f"{end}: all gone after {time.monotonic() - since:.1f} s")
    finally:
        run.kill_all()
    if end == "Ctrl-C":
        assert "continue with" in log.read_text()


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
    campaign = faults.Campaign(faults.read_options([str(option) for option in options]))
    campaign.run()
    assert not campaign.problems
    assert [fault.outcome for fault in campaign.faults] == [faults.SURVIVED]
