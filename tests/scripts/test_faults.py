"""A run that is killed in each of its phases is, in the end, the run that was left alone."""

import json
import os
import shutil
import signal
import sys

import faults
import numpy as np
import pytest
import run_compare
import run_processes
import soak
import torch
from safetensors.torch import save_file
from support.paths import RECIPES, SOURCES
from support.process_checks import wait_until
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
    campaign = campaign(TARGETS)
    assert campaign.faults  # at least that at the start, which lasts for seconds
    recorded = rows_of(campaign.folder / "faults.jsonl")
    assert [row["phase"] for row in recorded] == [fault.phase for fault in campaign.faults]
    assert all(row["landed"] and row["phase"] in row["phases"] for row in recorded)


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


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


SAMPLE = {
    "prompt_id": "a/0",
    "visit": 0,
    "index": 0,
    "state": "done",
    "reply": "x",
    "token_ids": [3, 4],
}
STATE = {"progress": {"policy": {"num_steps": 1}}, "controller": {"step": 1}}


@pytest.fixture
def made(tmp_path):
    """A run folder with one step, and a copy of it."""
    run = tmp_path / "run"
    for folder in ("model", "rollouts", "checkpoints/step-00000001"):
        (run / folder).mkdir(parents=True)
    write(run / "config.json", {"data": ["a@0.5", "rows.jsonl@0.5"]})
    write(run / "metrics.jsonl", {"step": 1, "reward/mean": 0.5, "rollout/trained_samples": 1})
    write(run / "events.jsonl", {"event": "checkpoint", "step": 1})
    write(run / "rollouts/step_00001.jsonl", SAMPLE)
    write(run / "rollouts/eval_00001.jsonl", SAMPLE | {"prompt_id": "a/held_out/0"})
    write(run / "checkpoints/step-00000001/manifest.json", {"step": 1, "state": STATE})
    for name in ("config.json", "tokenizer.json"):
        write(run / "model" / name, {"size": 1})
    for name in ("model/model", "checkpoints/step-00000001/policy-00000"):
        save_file({"weight": torch.zeros(2)}, run / f"{name}.safetensors")
    return shutil.copytree(run, tmp_path / "copy"), run


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def flip(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def change(name, old, new):
    def do(run):
        text = (run / name).read_text()
        assert old in text
        (run / name).write_text(text.replace(old, new))

    return do


def append(name, text):
    return lambda run: (run / name).open("a").write(text)


FAILED = {"event": "sample", "step": 1, "prompt_id": "a/1", "index": 2, "state": "failed"}
TORN = "events.jsonl: line 2 is torn"
MANIFEST = "checkpoints/step-00000001/manifest.json"
DIFFERENCES = {
    "weights": (lambda run: flip(run / "model/model.safetensors"), "weight differs from"),
    "moments": (
        lambda run: flip(run / "checkpoints/step-00000001/policy-00000.safetensors"),
        "weight differs from",
    ),
    "samples": (change("rollouts/step_00001.jsonl", "[3, 4]", "[3, 5]"), "differs in token_ids"),
    "metrics": (change("metrics.jsonl", "0.5", "0.25"), "reward/mean 0.25 instead of 0.5"),
    "state": (
        change(MANIFEST, '"controller": {"step": 1}', '"controller": {"step": 2}'),
        "state/controller/step is 2 instead of 1",
    ),
    "tokenizer": (change("model/tokenizer.json", "1", "2"), "model/tokenizer.json differs"),
    "config": (lambda run: (run / "model/config.json").unlink(), "model/config.json differs"),
    "torn": (append("events.jsonl", '{"event": "che'), TORN),
    "torn in the middle": (append("events.jsonl", '{"event"{"event": "fault"}\n'), TORN),
    "partial": (
        lambda run: (run / "checkpoints/.step-00000001.partial").mkdir(),
        "checkpoints/.step-00000001.partial is left over",
    ),
    "journal": (lambda run: (run / "journal").mkdir(), "journal is left over"),
    "failed": (
        append("events.jsonl", json.dumps(FAILED) + "\n"), "step 1: sample 2 of a/1 failed"
    ),
    "failed in an evaluation": (
        change("rollouts/eval_00001.jsonl", "done", "failed"),
        "eval_00001.jsonl: sample 0 of a/held_out/0 failed",
    ),
}  # fmt: skip
ASYNCHRONOUS = ("torn", "torn in the middle", "partial", "journal", "failed")


@pytest.mark.parametrize("name", DIFFERENCES)
def test_a_difference_is_found(made, name):
    do, found = DIFFERENCES[name]
    assert run_compare.differences(*made) == [] == run_compare.unaccounted(*made)
    do(made[0])
    assert found in "; ".join(run_compare.differences(*made))
    if name in ASYNCHRONOUS:
        assert found in "; ".join(run_compare.unaccounted(*made))


@pytest.mark.parametrize(
    ("prompt_id", "missing"), [("a/2", ["a/0", "a/1"]), ("rows/2", []), ("a/0", [])]
)
def test_prompts_that_vanished_are_missed(made, prompt_id, missing):
    """Rows of files are numbered too, but come in another order."""
    change("rollouts/step_00001.jsonl", "a/0", prompt_id)(made[0])
    found = run_compare.unaccounted(*made)
    assert found == [
        f"visit 0 of {n} was neither trained on, nor dropped, nor kept" for n in missing
    ]


def test_a_visit_that_vanished_and_one_that_came_twice_are_named(made):
    change("rollouts/step_00001.jsonl", '"visit": 0', '"visit": 1')(made[0])
    found = "; ".join(run_compare.unaccounted(*made))
    assert "visit 0 of a/0 was neither trained on" in found
    rows = made[0] / "rollouts/step_00001.jsonl"
    rows.write_text(2 * rows.read_text())
    found = "; ".join(run_compare.unaccounted(*made))
    assert "('a/0', 1, 0) was trained on 2 times" in found


WITH_A_SANDBOX = """
from roll_lite.sandbox.sandbox import Sandbox
sandbox = Sandbox("rlimits").start()
print("ready", flush=True)
while True:
    sandbox.run("import time; time.sleep(600)")  # until its limit
"""


def test_sandboxes_belong_to_a_run_though_they_have_no_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", SOURCES)
    command = [sys.executable, "-c", WITH_A_SANDBOX]
    program = run_processes.Program.start(command, 1, tmp_path / "out.txt", tmp_path)
    try:
        wait_until(lambda: program.victims().keys() == {"rank 0", "sandbox", "sandbox monitor"})
        sandbox = program.victims()["sandbox"]
        os.kill(sandbox.pid, signal.SIGSTOP)  # now it does not end with the process that has it
        program.process.kill()
        program.process.wait()
        assert sandbox.pid in {process.pid for process in program.alive()}
    finally:
        program.kill_all()
    assert not program.alive()


def test_slopes_of_a_soak_are_those_of_a_line_through_the_means():
    points = [(step, 3 + 0.25 * step + (step * 7919 % 13)) for step in range(400)]
    x, y = np.array(points).reshape(soak.PARTS, -1, 2).mean(1).T
    (expected, _), covariance = np.polyfit(x, y, 1, cov=True)
    found, error = soak.slope(points)
    assert found == pytest.approx(expected)
    assert error == pytest.approx(soak.T_QUANTILE * np.sqrt(covariance[0, 0]))
