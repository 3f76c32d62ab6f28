"""A run that is killed in each of its phases is, in the end, the run that was left alone."""

import json
import shutil

import faults
import numpy as np
import pytest
import run_compare
import soak
from support.paths import RECIPES
from support.runs import flags

TARGETS = (  # what kills rank 0 costs a start; a run survives the others
    "start/rank 0/SIGKILL", "score/worker/SIGKILL", "train/rank 0/SIGTERM",
    "generate/worker/SIGKILL", "evaluate/worker/SIGSEGV", "checkpoint/rank 0/SIGKILL",
    "export/rank 0/SIGKILL",
)  # fmt: skip

FEW_IN_AN_ENGINE = """
from dataclasses import dataclass

import roll_lite as rl
from roll_lite import command
from roll_lite.recipes import rlvr


@dataclass(frozen=True, kw_only=True)
class Config(rlvr.Config):
    rollout: rl.RolloutOptions = rl.RolloutOptions(samples_per_replica=4)


if __name__ == "__main__":
    command.run(rlvr.main, Config, rlvr.__doc__, rlvr.plan)
"""


@pytest.fixture
def campaign(toy_folder, tmp_path):
    """One run of rlvr.py with these faults, after it was compared with one left alone."""

    def run(targets, *, ranks=1, recipe=RECIPES / "rlvr.py", **more):
        values = {
            "model": toy_folder, "data": "reverse:2", "code": slow_reward(tmp_path),
            "reward_workers": 1, "steps": 5, "prompts_per_step": 4, "samples_per_prompt": 2,
            "max_tokens": 4, "eval_every": 2, "eval_prompts": 8, "checkpoint_every": 1,
        } | more  # fmt: skip
        own = ("--runs", 1, "--kills", len(targets), "--gone-within", 600)  # it may be busy here
        own += ("--ranks", ranks, "--targets", *targets, "--out", tmp_path / "chaos")
        command = (*own, "--", recipe, *flags(values))
        campaign = faults.Campaign(faults.read_options([str(word) for word in command]))
        campaign.run()
        assert not campaign.problems
        return campaign

    return run


@pytest.mark.slow
def test_a_run_recovers_from_a_kill_in_every_phase(campaign, tmp_path):
    """A fault whose phase is over before it comes is tried in the next step, or left out."""
    out, campaign = tmp_path / "chaos", campaign(TARGETS)
    assert campaign.faults  # at least that at the start, which lasts for seconds
    recorded = [json.loads(line) for line in (out / "faults.jsonl").read_text().splitlines()]
    assert [row["phase"] for row in recorded] == [fault.phase for fault in campaign.faults]
    assert all(row["landed"] and row["phase"] in row["phases"] for row in recorded)
    check_that_differences_are_found(out / "reference", tmp_path / "copy")


@pytest.mark.slow
def test_a_run_goes_on_without_an_engine_and_is_the_same(campaign, tmp_path):
    """While samples are scored, which takes a second or two, others are generated."""
    recipe = tmp_path / "few_in_an_engine.py"
    recipe.write_text(FEW_IN_AN_ENGINE)
    chaotic = campaign(
        ["score/rank 2/SIGKILL"], ranks=3, recipe=recipe, device_map="train=0 generate=1-2",
        max_tokens=40, prompts_per_step=8, samples_per_prompt=4,
    )  # fmt: skip
    assert [fault.outcome for fault in chaotic.faults] == [faults.SURVIVED]
    printed = (chaotic.folder / "run-001.txt").read_text()
    assert "its samples are generated again by the other engines, 1 of 2" in printed


def slow_reward(folder):
    """Scoring takes long enough to be hit."""
    path = folder / "rewards.py"
    path.write_text(
        "import time\n\n\ndef letters(prompt, reply):\n    time.sleep(0.05)\n"
        "    return sum(letter < 'n' for letter in reply) / 4\n\n\nREWARDS = {'reverse': letters}\n"
    )
    return path


def check_that_differences_are_found(run, copy):
    shutil.copytree(run, copy)
    assert run_compare.differences(copy, run) == []
    (weights,) = (copy / "model").glob("*.safetensors")
    moments = run_compare.newest_checkpoint(copy) / "policy-00000.safetensors"
    for path in (weights, moments):
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
    samples = copy / "rollouts" / "step_00002.jsonl"
    rows = [json.loads(line) for line in samples.read_text().splitlines()]
    rows[3]["token_ids"][-1] += 1
    samples.write_text("".join(json.dumps(row) + "\n" for row in rows))
    metrics = copy / "metrics.jsonl"
    text = metrics.read_text()
    metrics.write_text(text.replace('"loss/grad_norm":', '"loss/grad_norm":1', 1))
    found = " ".join(run_compare.differences(copy, run))
    assert all(word in found for word in ("model: ", "step-0000", "sample 3", "loss/grad_norm"))


def test_slopes_of_a_soak_are_those_of_a_line_through_the_means():
    points = [(step, 3 + 0.25 * step + (step * 7919 % 13)) for step in range(400)]
    x, y = np.array(points).reshape(soak.PARTS, -1, 2).mean(1).T
    (expected, _), covariance = np.polyfit(x, y, 1, cov=True)
    found, error = soak.slope(points)
    assert found == pytest.approx(expected)
    assert error == pytest.approx(soak.T_QUANTILE * np.sqrt(covariance[0, 0]))
