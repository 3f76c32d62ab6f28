"""Ctrl-C, SIGTERM and resuming: nothing is lost, and what cannot be meant is refused."""

import asyncio
import itertools
import json
import os
import signal
import subprocess
import sys
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import pytest
from support.forked_ranks import run_ranks
from support.launch import run_torchrun
from support.paths import RECIPES
from support.process_checks import child_of_rank, wait_for
from support.recipes import call_recipe
from support.rlvr_program import share_of_good_letters
from support.runs import (
    comparable,
    flags,
    losses,
    run_sft,
    samples_of,
    sft_options,
    steps_of,
    toy_options,
)

from roll_lite import command as commands
from roll_lite.options import from_flat
from roll_lite.recipes import rlvr
from roll_lite.report.config_file import read_options
from roll_lite.report.reader import RunFolder
from roll_lite.rewards.code import passes_tests
from roll_lite.rewards.maths import math_answer
from roll_lite.stopping import Stopped, StopRequest
from roll_lite.train.checkpoint_folders import read_manifest
from roll_lite.train.trainer import Trainer
from roll_lite.types import Prompt
from roll_lite.workers.failures import TooManyFailures
from roll_lite.workers.pool import RewardWorkers

RLVR = RECIPES / "rlvr.py"
SFT = RECIPES / "sft.py"


def interrupting(number, signum=signal.SIGINT):
    """A reward that sends this process a signal at the given call."""
    calls = itertools.count()

    def reward(prompt, reply):
        if next(calls) == number:
            os.kill(os.getpid(), signum)
        return share_of_good_letters(prompt, reply)

    return reward


@pytest.mark.parametrize(
    "signum", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_a_rollout_is_abandoned_and_repeated(here, tmp_path, monkeypatch, signum):
    whole = here("whole", steps=4, drop_equal=True)
    with monkeypatch.context() as patch:
        # After 8 of the evaluation: in the third or fourth step, whatever is dropped.
        patch.setitem(rlvr.Config.INLINE, "reverse", interrupting(8 + 150, signum))
        with pytest.raises(Stopped) as error:
            here("parts", steps=4, drop_equal=True)
    assert error.value.signum == signum
    done = len(steps_of(tmp_path / "parts"))
    assert 1 <= done < 4
    names = [path.name for path in (tmp_path / "parts" / "checkpoints").iterdir()]
    assert names == [f"step-{done:08d}"]
    parts = here("parts", steps=4, drop_equal=True, resume=True)
    assert comparable(parts) == comparable(whole)
    for step in (3, 4):
        assert [s["token_ids"] for s in samples_of(tmp_path / "parts", step)] == [
            s["token_ids"] for s in samples_of(tmp_path / "whole", step)
        ]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_update_is_finished(small_folder, tmp_path, monkeypatch):
    """SIGTERM while the trainer works: the step is complete, and the run goes on after it."""
    run_sft(sft_options(small_folder, tmp_path / "whole"))
    step, calls = Trainer.step, itertools.count()

    def signalled(*args, **kwargs):
        if next(calls) == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "step", signalled)
        with pytest.raises(Stopped):
            run_sft(sft_options(small_folder, tmp_path / "run"))
    assert len(losses(tmp_path / "run")) == 5
    run_sft(sft_options(small_folder, tmp_path / "run", resume=True))
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")


def test_generating_ahead_stops_and_resumes(here, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setitem(rlvr.Config.INLINE, "reverse", interrupting(8 + 150))
        with pytest.raises(Stopped):
            here("run", steps=6, max_staleness=1.0)
    here("run", steps=6, max_staleness=1.0, resume=True)
    ids = [s["prompt_id"] for step in range(1, 7) for s in samples_of(tmp_path / "run", step)]
    assert len(set(ids)) == 6 * 8  # every prompt once


def test_a_second_sigterm_is_no_new_request(capfd):
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(Stopped):
            stop.check()
    assert capfd.readouterr().err.count("SIGTERM: stopping") == 1


def test_a_second_ctrl_c_exits_at_once():
    program = """
import os, signal, roll_lite.stopping as s
with s.StopRequest():
    os.kill(os.getpid(), signal.SIGINT)
    print("first", flush=True)
    os.kill(os.getpid(), signal.SIGINT)
    print("second", flush=True)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (130, "first\n")


def test_resume_takes_the_options_of_the_run(command, small_folder, tmp_path):
    run = tmp_path / "run"
    first = sft_options(small_folder, run, steps=4, lr=3e-3)
    assert command(SFT, *flags(first))[0] == 0
    code, text = command(SFT, "--resume", run, "--steps", 6, "--lr", 1e-3)
    assert code == 0 and len(losses(run)) == 6
    assert "changed: lr 0.003 -> 0.001\n" in text and "changed: steps 4 -> 6\n" in text
    now = read_options(run / "config.json")
    expected = json.loads(json.dumps(first)) | {"steps": 6, "lr": 1e-3}
    assert {name: now[name] for name in expected} == expected
    begun, resumed = json.loads((run / "config.json").read_text())["starts"]
    assert begun["step"] == 0 and "--lr 0.003" in begun["command"]
    assert resumed["step"] == 4
    assert resumed["changed"] == {"lr": [3e-3, 1e-3], "steps": [4, 6]}
    # The old way, with the folder in --run-dir, does the same.
    assert command(SFT, "--resume", "--run-dir", run, "--steps", 7)[0] == 0
    assert read_options(run / "config.json")["lr"] == 1e-3 and len(losses(run)) == 7


def test_what_cannot_change_is_refused_before_anything_starts(command, small_folder, tmp_path):
    run = tmp_path / "run"
    command(SFT, *flags(sft_options(small_folder, run, steps=1)))
    code, text = command(SFT, "--resume", run, "--seed", 5)
    assert code == 2 and "seed=5 (was 0)" in text
    assert "role " not in text and "Traceback" not in text
    code, text = command(SFT, "--resume", tmp_path / "other")
    assert code == 2 and "there is no" in text


def test_a_saved_config_starts_another_run(command, toy_folder, tmp_path):
    first = toy_options(toy_folder, tmp_path / "first", steps=1)
    call_recipe(rlvr, from_flat(rlvr.Config, **first))
    config, other = tmp_path / "first" / "config.json", tmp_path / "other"
    code, text = command(RLVR, "--config", config, "--run-dir", other, "--seed", 2)
    assert code == 0 and "changed: seed 0 -> 2\n" in text
    before, now = read_options(config), read_options(other / "config.json")
    assert now == before | {"seed": 2, "run_dir": str(other)}
    (tmp_path / "broken.json").write_text("[1, 2")
    code, text = command(RLVR, "--config", tmp_path / "broken.json")
    assert code == 2 and "broken.json cannot be read" in text


def test_checkpoints_by_time(here, tmp_path):
    here("run", steps=3, checkpoint_minutes=1e-9, keep_last=5)
    names = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert names == ["step-00000001", "step-00000002", "step-00000003"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "target", "signum"),
    [
        (RLVR, "torchrun", signal.SIGINT),
        (SFT, "worker", signal.SIGTERM),
        (SFT, "torchrun", signal.SIGHUP),  # a closed terminal
    ],
)
def test_two_ranks_stop_with_a_checkpoint(toy_folder, tmp_path, recipe, target, signum):
    """Whichever process gets the signal: rank 0 asks all ranks for their part of a checkpoint."""
    run, log = tmp_path / "run", tmp_path / "log"
    values = toy_options(toy_folder, run, steps=100_000, data="reverse:1")
    if recipe == SFT:
        values = sft_options(toy_folder, run, steps=100_000)
    with two_ranks(recipe, values, log) as process:
        wait_for(lambda: "step 3  " in log.read_text(), process, log)
        os.kill(process.pid if target == "torchrun" else child_of_rank(process.pid, 1), signum)
        process.wait(timeout=600)
    text = log.read_text()
    done = max(json.loads(line)["step"] for line in (run / "metrics.jsonl").open())
    assert f"step-{done:08d}: " in text and "continue with\n    torchrun --nproc-per-node 2" in text
    start = run_torchrun if recipe == RLVR else run_ranks
    start(2, recipe, "--resume", run, "--steps", done + 1)
    assert [row["step"] for row in steps_of(run)] == list(range(1, done + 2))


@contextmanager
def two_ranks(recipe, values, log):
    """Under torchrun, in a session of their own."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", recipe]
    with log.open("w") as output:
        process = subprocess.Popen(
            [*map(str, launch), *map(str, flags(values))],
            stdout=output, stderr=subprocess.STDOUT, env=os.environ | {"OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )  # fmt: skip
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def test_when_rewards_break_the_step_is_repeated(here, tmp_path, monkeypatch):
    """The checkpoint is of the last complete step, and no prompt is skipped."""
    whole = here("whole", steps=4)
    calls = itertools.count()

    def breaking(prompt, reply):
        if next(calls) > 8 + 130:
            raise KeyError("broken")
        return share_of_good_letters(prompt, reply)

    with monkeypatch.context() as patch:
        patch.setitem(rlvr.Config.INLINE, "reverse", breaking)
        with pytest.raises(TooManyFailures):
            here("parts", steps=4)
    done = len(steps_of(tmp_path / "parts"))
    assert 1 <= done < 4
    assert comparable(here("parts", steps=4, resume=True)) == comparable(whole)


@pytest.mark.parametrize("eval_samples", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_an_abandoned_evaluation_is_made_up(here, tmp_path, monkeypatch, eval_samples):
    options = {"steps": 2, "eval_every": 1, "eval_samples": eval_samples}
    here("whole", **options)
    with monkeypatch.context() as patch:
        # In the evaluation after the first step: 8 prompts before it, 64 samples in it.
        number = 8 * eval_samples + 64 + 3
        patch.setitem(rlvr.Config.INLINE, "reverse", interrupting(number))
        with pytest.raises(Stopped):
            here("parts", **options)
    here("parts", resume=True, **options)
    rates = [RunFolder(tmp_path / name).metric("eval/reward") for name in ("whole", "parts")]
    assert rates[0] == rates[1] and [step for step, _ in rates[0]] == [0, 1, 2]


def test_a_made_up_evaluation_is_in_the_checkpoint(here, tmp_path, monkeypatch):
    """Its score too, and how often held-out prompts were answered, on which later seeds depend."""
    options = {"steps": 1, "eval_every": 1}
    here("whole", **options)
    with monkeypatch.context() as patch:
        patch.setitem(rlvr.Config.INLINE, "reverse", interrupting(8 + 64 + 3))
        with pytest.raises(Stopped):
            here("parts", **options)
    here("parts", resume=True, **options)
    folders = [tmp_path / name / "checkpoints" / "step-00000001" for name in ("whole", "parts")]
    whole, parts = map(read_manifest, folders)
    assert parts.score == whole.score is not None and parts.state == whole.state


def test_a_stop_after_an_evaluation_keeps_the_score(here, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setitem(
            rlvr.Config.INLINE, "reverse", interrupting(8 + 64 + 8 + 5)
        )  # in the second rollout
        with pytest.raises(Stopped):
            here("run", steps=4, eval_every=1)
    (folder,) = (tmp_path / "run" / "checkpoints").iterdir()
    ((_, rate),) = [r for r in RunFolder(tmp_path / "run").metric("eval/pass@1") if r[0] == 1]
    assert folder.name == "step-00000001" and read_manifest(folder).score == rate


def test_options_that_were_chosen_are_chosen_again_for_another_model(command, toy_folder, tmp_path):
    values = toy_options(toy_folder, tmp_path / "a", steps=1) | {"lr": None}
    call_recipe(rlvr, from_flat(rlvr.Config, **values))
    written = json.loads((tmp_path / "a" / "config.json").read_text())
    assert written["lr"] == 3e-4
    before = {"aggregation": None, "device_map": "auto", "lr": None, "whiten": None}
    assert written["chosen"] == before
    config, other = tmp_path / "a" / "config.json", tmp_path / "b"
    code, _ = command(RLVR, "--config", config, "--run-dir", other, "--lora-rank", 2)
    assert code == 0 and read_options(other / "config.json")["lr"] == pytest.approx(3e-3)


def test_saved_options_are_checked_after_the_command_line(command, toy_folder, tmp_path):
    values = toy_options(toy_folder, tmp_path / "a", steps=1)
    call_recipe(rlvr, from_flat(rlvr.Config, **values))
    written = json.loads((tmp_path / "a" / "config.json").read_text())
    moved = tmp_path / "moved.json"
    moved.write_text(json.dumps(written | {"model": "no/such/folder"}))
    code, _ = command(RLVR, "--config", moved, "--run-dir", tmp_path / "b", "--model", toy_folder)
    assert code == 0
    moved.write_text(json.dumps(written | {"steps": "many"}))
    code, text = command(RLVR, "--config", moved, "--run-dir", tmp_path / "c")
    assert code == 2 and "Traceback" not in text


@pytest.mark.parametrize(
    "arguments",
    [["--resume"], ["--resume", "a", "--run-dir", "b"], ["--config", "a", "--resume", "b"]],
)
def test_which_run_to_resume_must_be_clear(command, arguments):
    code, text = command(RLVR, *arguments)
    assert code == 2 and "error: --" in text


def test_ignored_signals_stay_ignored():
    """As of a run that was started with nohup, or with & in a script."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopRequest() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            stop.check()
    finally:
        signal.signal(signal.SIGHUP, before)


def test_rewards_go_on_when_sigterm_reaches_all_processes():
    """As from a scheduler. The run needs them until it has its checkpoint."""
    tests = ({"code": "assert double(2) == 4"},)
    code = Prompt(id="b", messages=(), domain="code", ground_truth="", tests=tests)
    reply = "```python\ndef double(x):\n    return 2 * x\n```"
    rewards = {"math": math_answer, "code": partial(passes_tests, isolation="rlimits")}
    # The first program waits for the start of a sandbox, which takes long on a busy machine.
    with RewardWorkers(rewards, num_workers=1, seconds=300.0) as pool:
        assert asyncio.run(pool.score(code, reply)).value == 1
        for pid in descendants(os.getpid()):
            with suppress(ProcessLookupError):  # one that has ended since
                os.kill(pid, signal.SIGTERM)
        prompt = Prompt(id="a", messages=(), domain="math", ground_truth="7")
        assert asyncio.run(pool.score(prompt, r"\boxed{7}")).value == 1
        assert asyncio.run(pool.score(code, reply)).value == 1


def descendants(pid):
    found = []
    with suppress(OSError):  # it has ended
        for child in map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()):
            found += [child, *descendants(child)]
    return found


def test_a_run_is_resumed_by_its_own_recipe(command, toy_folder, tmp_path):
    run = tmp_path / "run"
    call_recipe(rlvr, from_flat(rlvr.Config, **toy_options(toy_folder, run, steps=2)))
    code, text = command(SFT, "--resume", run)
    assert code == 2 and "config.json was written by rlvr.py, and sft.py has no advantage" in text
    code, text = command(RLVR, "--resume", run, "--steps", 1)
    assert code == 2 and "is at step 2 of 1; resume with more steps" in text
    code, text = command(RLVR, "--resume", run)
    assert code == 0 and "is at step 2 of 2: nothing is left to train" in text


def test_an_error_in_mid_run_says_how_to_continue(toy_folder, tmp_path, monkeypatch):
    """And keeps its traceback, for a debugger."""
    values = toy_options(toy_folder, tmp_path / "run", steps=3, checkpoint_every=1)

    def main(cfg):
        call_recipe(rlvr, cfg)
        raise KeyError("a bug")

    monkeypatch.setattr(sys, "argv", ["rlvr.py", *map(str, flags(values | {"data": "reverse:1"}))])
    with pytest.raises(KeyError) as error:
        commands.run(main, rlvr.Config, rlvr.__doc__)
    assert f"rlvr.py --resume {tmp_path / 'run'}" in error.value.__notes__[0]


@pytest.mark.slow
def test_ctrl_c_in_the_first_rollout_of_a_tensor_parallel_engine(toy_folder, tmp_path):
    """No call follows that would part its ranks: the leader lets go of those that follow it."""
    run, log = tmp_path / "run", tmp_path / "log"
    values = toy_options(toy_folder, run, steps=100_000, data="reverse:1", eval_every=0)
    values |= {"device_map": "train=0-1,tp=2 generate=0-1,tp=2", "prompts_per_step": 512}
    with two_ranks(RLVR, values, log) as process:
        wait_for((run / "phase").exists, process, log)
        wait_for(lambda: "rollout" in (run / "phase").read_text(), process, log)
        os.kill(process.pid, signal.SIGINT)
        process.wait(timeout=600)
    text = log.read_text()
    # The step is complete before the signal comes only if this process waits long to send it.
    assert "stopped before the first step was complete" in text or "continue with" in text
    assert "Followers" not in text
