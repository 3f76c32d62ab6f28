"""Steps without anything to learn from: they are skipped, and five in a row end the run."""

import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections import Counter

import pytest
from safetensors.torch import load_file
from support.paths import PYTHONPATH, RECIPES
from support.rlvr_program import share_of_good_letters
from support.runs import comparable, flags, steps_of, toy_options

from roll_lite.checks import UserError
from roll_lite.cluster.errors import RoleError
from roll_lite.recipes import rlvr
from roll_lite.report.reader import RunFolder
from roll_lite.stopping import Stopped

RLVR = RECIPES / "rlvr.py"
EQUAL = {"drop_equal": True, "max_refills": 0, "eval_every": 0}
GROUPS = 8
SAMPLES = 8


@pytest.fixture
def rewards(monkeypatch):
    """Sets the reward of the runs of `here`."""

    def use(reward):
        monkeypatch.setitem(rlvr.Config.INLINE, "reverse", reward)

    return use


def right(prompt, reply):
    return 1.0


def wrong(prompt, reply):
    return 0.0


def constant_in(steps):
    """The reward of a run without evaluation: 1 in these steps, else by the letters."""
    calls = itertools.count(GROUPS * SAMPLES)

    def reward(prompt, reply):
        step = next(calls) // (GROUPS * SAMPLES)
        return 1.0 if step in steps else share_of_good_letters(prompt, reply)

    return reward


def config_of(run):
    return json.loads((run / "config.json").read_text())


def models(*runs):
    return [load_file(run / "model" / "model.safetensors") for run in runs]


def are_equal(one, other):
    return one.keys() == other.keys() and all(one[name].equal(other[name]) for name in one)


def mine(tmp_path, value, **changes):
    """Options of a run on prompts whose every reply has this reward, for a command."""
    (tmp_path / "mine.py").write_text(
        f"def mine(prompt, reply):\n    return {value}\n\nREWARDS = {{'mine': mine}}\n"
    )
    rows = [{"prompt": f"{n}?", "domain": "mine"} for n in range(40)]
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "data": str(tmp_path / "mine.jsonl"), "code": str(tmp_path / "mine.py"),
        "eval_share": 0.3, "steps": 40, "reward_workers": 1,
    } | EQUAL | {"eval_every": 10} | changes  # fmt: skip


def test_a_model_that_is_always_right_ends_its_run(command, toy_folder, tmp_path):
    run = tmp_path / "run"
    values = flags(toy_options(toy_folder, run, **mine(tmp_path, 1.0)))
    again = [RLVR, *values, "--resume", "auto"]
    code, text = command(*again)
    assert code == 0, text
    assert "step 3 is skipped: all 8 groups of one step were dropped: 8 had equal rewards" in text
    assert "the run ends at step 5 of 40: in 5 steps in a row every sample passed" in text
    assert [row["step"] for row in steps_of(run)] == [1, 2, 3, 4, 5]
    assert {row["rollout/skipped_steps"] for row in steps_of(run)} == {1.0}
    assert [step for step, _ in RunFolder(run).metric("eval/pass@1")] == [0, 5]
    assert (run / "checkpoints" / "step-00000005").is_dir() and not (run / "journal").exists()
    ended = config_of(run)["ended"]
    assert ended["step"] == 5 and ended["has_passed"] and "every sample passed" in ended["why"]
    model = (run / "model" / "model.safetensors").stat()
    code, text = command(*again)
    assert code == 0 and f"the run in {run} has finished, at step 5, as every sample passed" in text
    assert "role " not in text and (run / "model" / "model.safetensors").stat() == model
    code, text = command(RLVR, "--resume", run)
    assert code == 0 and "the run ends at step 10 of 40" in text
    assert config_of(run)["ended"]["step"] == 10


def test_a_model_that_is_always_wrong_ends_its_run_with_an_error(command, toy_folder, tmp_path):
    run = tmp_path / "run"
    again = [RLVR, *flags(toy_options(toy_folder, run, **mine(tmp_path, 0.5)))]
    again += ["--resume", "auto"]
    for last in (5, 10):
        code, text = command(*again)
        assert code == 2 and "there was nothing to learn, and samples fail" in text
        assert f"error: the run ends at step {last} of 40" in text and "Traceback" not in text
        assert (run / "checkpoints" / f"step-{last:08d}").is_dir()
        assert (run / "model" / "model.safetensors").is_file()
        assert [step for step, _ in RunFolder(run).metric("eval/pass@1")][-1] == last
        assert config_of(run)["ended"]["has_passed"] is False


@pytest.mark.parametrize(
    "changes",
    [
        {"max_staleness": 1.0},
        {"engines_sleep": True, "offload": True},
        {"advantage": "gae", "drop_equal": False, "max_group_reward": 0.9},
        {"loss": "ppo", "kl_coef": 0.1, "kl_in": "reward", "extra_groups": 3},
    ],
    ids=str,
)
def test_in_every_mode(here, rewards, tmp_path, changes):
    rewards(right)
    rows = here("run", **EQUAL | changes)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    assert all(row["rollout/skipped_steps"] == 1 and "loss/loss" not in row for row in rows)
    assert config_of(tmp_path / "run")["ended"]["has_passed"]
    untrained = models(tmp_path / "run")[0]
    here("none", steps=1, lr=0.0)
    assert are_equal(untrained, models(tmp_path / "none")[0])


def test_a_filter_that_keeps_nothing(here, rewards, tmp_path, code_file):
    code = (code_file("def keep(group):\n    return False\n\nKEEP = keep\n"),)
    random_rewards = random.Random(0)
    rewards(lambda prompt, reply: random_rewards.random())
    with pytest.raises(UserError, match=r"samples fail.* 8 was not kept by keep\(\)"):
        here("run", code=code, max_refills=0, eval_every=0)
    assert len(steps_of(tmp_path / "run")) == 5


def test_a_skipped_step_counts_and_those_that_follow_go_on(here, rewards, tmp_path):
    """Four in a row, three times, and the last two: the run has all of its steps."""
    skipped = {2, 3, 4, 5, 7, 8, 9, 10, 12, 13, 14, 15, 17, 18}
    rewards(constant_in(skipped))
    rows = here("run", **EQUAL, steps=18, schedule="linear", lr=1e-2, warmup_steps=0)
    assert [row["step"] for row in rows if "rollout/skipped_steps" in row] == sorted(skipped)
    for row in rows:
        if row["step"] not in skipped:
            assert row["loss/lr"] == pytest.approx(1e-2 * (1 - (row["step"] - 1) / 18))
    assert "ended" not in config_of(tmp_path / "run")
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").open()]
    assert [e["step"] for e in events if e["event"] == "skipped"] == sorted(skipped)
    assert not (tmp_path / "run" / "rollouts" / "step_00002.jsonl").exists()


def test_a_run_that_is_stopped_among_empty_steps_goes_on_as_one_that_is_not(
    here, rewards, tmp_path
):
    """From step 4 on all replies are right. Samples that had finished come from the journal."""
    options = EQUAL | {"steps": 20, "eval_every": 20}
    places = ["3 rollout", "5 rollout", "6 rollout", "8 evaluate"]

    def reward_of(name, stop_in=""):
        calls = Counter()

        def reward(prompt, reply):
            _, step, phase, *_ = (tmp_path / name / "phase").read_text().split()
            calls[f"{step} {phase}"] += 1
            if calls[stop_in] == 3:
                os.kill(os.getpid(), signal.SIGINT)
            return 1.0 if int(step) >= 4 else share_of_good_letters(prompt, reply)

        return reward

    rewards(reward_of("whole"))
    whole = here("whole", **options)
    assert [row["step"] for row in whole] == list(range(1, 9))
    for place in places:
        rewards(reward_of(place, place))
        with pytest.raises(Stopped):
            here(place, **options)
        rewards(reward_of(place))
        parts = [row for row in here(place, **options, resume=True) if "time/step" in row]
        assert comparable(parts) == comparable(whole), place
        assert are_equal(*models(tmp_path / place, tmp_path / "whole")), place
        ended = [config_of(tmp_path / name)["ended"] for name in ("whole", place)]
        assert ended[0] == ended[1] and ended[0]["step"] == 8
        rates = [RunFolder(tmp_path / name).metric("eval/pass@1") for name in ("whole", place)]
        assert rates[0] == rates[1] and [step for step, _ in rates[0]] == [0, 8]


def test_a_failed_export_is_made_up(here, rewards, tmp_path):
    rewards(right)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "model").write_text("in the way")
    with pytest.raises(RoleError, match="NotADirectoryError"):
        here("run", **EQUAL)
    ended = config_of(tmp_path / "run")["ended"]
    assert ended["step"] == 5
    shutil.rmtree(tmp_path / "run" / "model")
    rows = here("run", **EQUAL, resume=True)
    assert len(rows) == 5 and (tmp_path / "run" / "model" / "model.safetensors").is_file()
    assert config_of(tmp_path / "run")["ended"] == ended


@pytest.mark.slow
@pytest.mark.parametrize("value", [1.0, 0.5])
def test_torchrun_restarts_neither_end(toy_folder, tmp_path, value):
    values = toy_options(toy_folder, tmp_path / "run", **mine(tmp_path, value))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*command, "--max-restarts=2", RLVR, *map(str, flags(values)), "--resume", "auto"],
        env=os.environ | {"PYTHONPATH": PYTHONPATH, "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=1800,
    )  # fmt: skip
    text = done.stdout + done.stderr
    assert (done.returncode == 0) == (value == 1.0), text
    assert text.count("run folder: ") == 1 and "the run ends at step 5 of 40" in text
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()
