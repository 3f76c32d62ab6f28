"""`torchrun --max-restarts N ... --resume auto`: runs go on by themselves after a kill."""

import json
import os
import shutil
import subprocess
import sys

import pytest
from safetensors.torch import load_file
from support.launch import installed
from support.paths import PYTHONPATH, RECIPES, SUPPORT
from support.rlvr_program import share_of_good_letters
from support.runs import comparable, flags, losses, samples_of, sft_options, steps_of, toy_options

from roll_lite.checks import UserError
from roll_lite.recipes import rlvr

PROGRAM = SUPPORT / "restarted_program.py"
SFT = RECIPES / "sft.py"


def torchrun(tmp_path, *command, ranks=2):
    """Through the store that only this machine reaches, which outlives the ranks like any other."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--rdzv-backend=loopback"]
    launch += [f"--nproc-per-node={ranks}", "--max-restarts=2"]
    (packages := tmp_path / "packages").mkdir(exist_ok=True)
    path = installed(packages) if not any(packages.iterdir()) else f"{PYTHONPATH}:{packages}"
    done = subprocess.run(
        [*launch, *map(str, command)], capture_output=True, text=True, timeout=1800,
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


@pytest.fixture
def killed_run(toy_folder, tmp_path):
    """Runs rlvr.py on two ranks, which are killed as the plan says."""

    def run(name, plan, **changes):
        values = toy_options(toy_folder, tmp_path / name, data="reverse:1", **changes)
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps(plan))
        code, text = torchrun(tmp_path, PROGRAM, path, *flags(values), "--resume", "auto")
        assert code == 0, text
        return text

    return run


@pytest.mark.slow
def test_a_run_goes_on_by_itself_when_a_rank_is_killed(killed_run, tmp_path):
    """Rank 0 in the fourth rollout: the same run as without, and only that call is repeated."""
    killed_run("whole", {}, steps=5, checkpoint_every=2)
    text = killed_run("killed", {"0": [0, 8 + 3 * 64 + 30]}, steps=5, checkpoint_every=2)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert f"resuming from {killed}/checkpoints/step-00000002" in text
    assert comparable(steps_of(killed)) == comparable(steps_of(whole))
    for step in range(1, 6):
        kept = [[s["token_ids"], s["logprobs"]] for s in samples_of(killed, step)]
        assert kept == [[s["token_ids"], s["logprobs"]] for s in samples_of(whole, step)]
    models = [load_file(path / "model" / "model.safetensors") for path in (killed, whole)]
    assert all(models[0][name].equal(tensor) for name, tensor in models[1].items())
    calls = [sorted((tmp_path / f"{name}.calls").open()) for name in ("killed", "whole")]
    assert len(calls[0]) == len(calls[1]) + 1 and set(calls[0]) == set(calls[1])


@pytest.mark.slow
def test_an_error_of_the_user_is_not_tried_again(tmp_path):
    arguments = [SFT, "--resume", "auto", "--run-dir", tmp_path / "run", "--model", tmp_path]
    code, text = torchrun(tmp_path, *arguments, ranks=1)
    assert code != 0 and text.count(f"error: {tmp_path}") == 2  # again below what torchrun says


def test_the_same_command_starts_a_run_and_goes_on(command, small_folder, tmp_path):
    values = flags(sft_options(small_folder, run := tmp_path / "run", steps=4, checkpoint_every=2))
    again = [SFT, *values, "--resume", "auto"]
    code, text = command(*again)
    assert code == 0 and "starting a new run" in text and len(losses(run)) == 4
    model = (run / "model" / "model.safetensors").stat()
    code, text = command(*again)
    assert code == 0 and f"the run in {run} has finished, at step 4" in text
    assert "role " not in text and (run / "model" / "model.safetensors").stat() == model
    code, text = command(*again, "--steps", 6)
    assert code == 0 and "changed: steps 4 -> 6\n" in text and len(losses(run)) == 6
    code, text = command(*again, "--seed", 5)
    assert code == 2 and "seed=5 (was 0)" in text
    code, text = command(SFT, "--resume", "auto")
    assert code == 2 and "--resume auto needs --run-dir" in text


def test_restarts_without_resume_are_refused(command, monkeypatch, small_folder, tmp_path):
    """They would find the records of the run, and end with an error or begin another."""
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "2")  # as torchrun tells its ranks
    values = flags(sft_options(small_folder, tmp_path / "run", steps=1))
    code, text = command(SFT, *values)
    assert code == 2 and "--max-restarts 2 of torchrun without --resume" in text
    assert not (tmp_path / "run").exists()
    code, text = command(SFT, *values, "--resume", "auto")
    assert code == 0, text


@pytest.mark.parametrize("end", [shutil.rmtree, lambda run: run.rename(f"{run}-moved")])
def test_a_run_without_its_folder_is_not_begun_again(here, monkeypatch, tmp_path, end):
    run = tmp_path / "run"

    def reward(prompt, reply):
        if (run / "rollouts" / "step_00002.jsonl").exists():
            end(run)
        return share_of_good_letters(prompt, reply)

    monkeypatch.setitem(rlvr.Config.INLINE, "reverse", reward)
    with pytest.raises(UserError, match=f"run_dir={run} was removed or moved while"):
        here("run", steps=6, eval_every=0)
    assert not (run / "metrics.jsonl").exists()
