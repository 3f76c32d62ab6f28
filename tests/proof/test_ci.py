"""Golden curves: what is equal, within a band, outside, or cannot be compared."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest
from support.paths import ROOT, SOURCES

from roll_lite.proof import ci
from roll_lite.proof.recorded import RecordedRun

METRICS = ["eval/pass@1", "reward/mean"]
GOLDEN = ROOT / "tests" / "golden"
PLANTED = ("self.lr * (step + 1) / (self", "self.lr * step / (self")
"""A learning rate whose warm-up begins a step too late."""


def write_case(folder, command="rlvr", metrics=METRICS, before=()):
    folder.mkdir(parents=True)
    case = {"before": before, "command": command, "metrics": metrics}
    (folder / "case.json").write_text(json.dumps(case))
    return ci.find_cases(folder)[0]


@pytest.fixture
def recorded(evidence, tmp_path):
    """A case, and the run of which it is the record."""
    case, run = write_case(tmp_path / "case"), RecordedRun(evidence)
    ci.write(case, [run, run])
    return case, run


def edit_golden(case, change):
    path = case.folder / "golden.json"
    golden = json.loads(path.read_text())
    change(golden)
    path.write_text(json.dumps(golden))


def edit_step(case, step, change):
    path = case.folder / "steps.jsonl"
    found = [json.loads(line) for line in path.read_text().splitlines()]
    change(next(row for row in found if row["step"] == step))
    path.write_text("".join(json.dumps(row) + "\n" for row in found))


def on_another_machine(golden):
    golden["contract"]["machine"]["cpu"] = "ABACUS"


def test_a_run_equals_its_record(recorded, capsys):
    case, run = recorded
    assert ci.compare(case, [run])
    assert "equal to the last bit, 7 steps" in capsys.readouterr().out
    edit_golden(case, on_another_machine)
    assert ci.compare(case, [run])


def test_the_first_step_and_sample_that_differ_are_shown(recorded, capsys):
    case, run = recorded
    path = run.folder / "rollouts" / "step_00003.jsonl"
    third = json.loads(path.read_text().splitlines()[2])

    def change(row):
        row["digests"]["samples"] = row["digests"]["weights"] = "0" * 32
        row["samples"][2][:2] = ["another reply", 0.25]

    edit_step(case, 3, change)
    edit_step(case, 5, lambda row: row["digests"].update(gradient="0" * 32))
    assert not ci.compare(case, [run])
    shown = capsys.readouterr().out
    assert "The first step that differs is 3: samples, weights\n" in shown
    assert "sample that differs is number 3:" in shown
    assert "reward 0.25" in shown and "'another reply'" in shown
    assert f"reward {third['reward']}" in shown and repr(third["reply"]) in shown


@pytest.mark.parametrize("change", [
    lambda row: row["digests"].pop("gradient"),
    lambda row: row["digests"].update({"batch/new": "0" * 32}),
    lambda row: row.update(step=7),
], ids=["a digest less", "a digest more", "other steps"])  # fmt: skip
def test_other_digests_or_steps_are_a_difference(recorded, change):
    case, run = recorded
    edit_step(case, 6, change)
    assert not ci.compare(case, [run])


def test_only_metrics_of_the_case_are_compared(recorded, tmp_path):
    case, run = recorded
    other = RecordedRun(shutil.copytree(run.folder, tmp_path / "other"))
    other.metrics[4]["rollout/reply_tokens"] += 1
    assert ci.compare(case, [other])
    other.metrics[4]["reward/mean"] += 1e-12
    assert not ci.compare(case, [other])


@pytest.mark.parametrize("far", [1.9, -1.9, 2.1, -2.1])
def test_elsewhere_the_second_half_stays_within_twice_the_range_of_seeds(recorded, capsys, far):
    case, run = recorded
    rewards = [run.metrics[step]["reward/mean"] for step in (4, 5, 6)]
    late = sum(rewards) / 3
    edit_step(case, 2, lambda row: row["digests"].update(gradient="0" * 32))

    def change(golden):
        assert golden["late_means"]["reward/mean"] == [pytest.approx(late, rel=1e-12)] * 2
        first = late + 0.1 * far
        golden["late_means"] = {"reward/mean": [first, first + 0.06, first - 0.04]}
        on_another_machine(golden)

    edit_golden(case, change)
    assert ci.compare(case, [run]) == (abs(far) < 2)
    shown = capsys.readouterr().out
    assert "machine: cpu: ABACUS | " in shown
    assert ("reward/mean: late mean" in shown) == (abs(far) > 2)
    assert "recorded reward/mean now reward/mean" in shown  # the curves


def test_a_step_may_have_no_metrics(evidence, tmp_path):
    """As step 0 of fine-tuning."""
    run = RecordedRun(shutil.copytree(evidence, tmp_path / "other"))
    del run.metrics[0]
    case = write_case(tmp_path / "case")
    ci.write(case, [run, run])
    assert ci.compare(case, [run])


def test_other_options_are_named(recorded, capsys):
    case, run = recorded
    edit_golden(case, lambda golden: golden["contract"]["options"].update(lr=0.5))
    edit_step(case, 1, lambda row: row["digests"].update(gradient="0" * 32))
    assert not ci.compare(case, [run])
    assert "options: lr: 0.5 | 0.001" in capsys.readouterr().out


def test_bands_are_those_of_all_seeds(recorded, tmp_path):
    case, run = recorded
    other = RecordedRun(shutil.copytree(run.folder, tmp_path / "other"))
    for step in (1, 5):  # the first is of the first half
        other.metrics[step]["reward/mean"] += 0.3
    ci.write(case, [run, other])
    means = json.loads((case.folder / "golden.json").read_text())["late_means"]["reward/mean"]
    assert means[1] - means[0] == pytest.approx(0.1)


def test_a_curve_that_is_no_number_is_outside():
    steps = {step: {"metrics": {"loss/loss": float("nan")}} for step in range(4)}
    assert len([*ci._outside({"loss/loss": [1.0, 1.5]}, steps)]) == 1
    steps = {step: {"metrics": {"loss/loss": 1.25}} for step in range(4)}
    assert not [*ci._outside({"loss/loss": [1.0, 1.5]}, steps)]


# ---- bad input


def error_of(capsys, *arguments):
    assert ci.main([*map(str, arguments)]) == 2
    return capsys.readouterr().err


def test_what_is_missing_is_named(tmp_path, capsys, evidence):
    assert "has no case: write" in error_of(capsys, tmp_path / "none")
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "case.json").write_text('{"before": [], "metrics": ["a"]}')
    assert "bad/case.json needs 'command'" in error_of(capsys, tmp_path / "bad")
    case = write_case(tmp_path / "case", metrics=["reward/median"])
    with pytest.raises(ValueError, match=r"golden\.json is missing: roll-lite ci .*case --write"):
        ci.compare(case, [RecordedRun(evidence)])
    with pytest.raises(ValueError, match="'reward/median', which no step of the run has"):
        ci.write(case, [RecordedRun(evidence)])


def test_a_command_that_fails_is_shown(tmp_path, capsys):
    write_case(tmp_path / "case", "sft --modle x")
    shown = error_of(capsys, tmp_path)
    assert re.search(
        "case: sft --modle x --seed 0 --run-dir .* ended with 2:\n.*modle", shown, re.S
    )


# ---- real cases


def test_golden_files_are_small_and_complete():
    assert {case.folder.name for case in ci.find_cases(GOLDEN)} == {"question", "game", "sft"}
    files = [path for path in GOLDEN.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 200_000
    for case in ci.find_cases(GOLDEN):
        golden = json.loads((case.folder / "golden.json").read_text())
        assert {*golden["late_means"]} == {*case.metrics}
        assert all(len(means) == 5 for means in golden["late_means"].values())
        assert "/" not in json.dumps(golden["contract"]["options"]["model"])


@pytest.mark.slow
def test_an_off_by_one_in_the_code_is_found(tmp_path):
    command = (
        "sft --device cpu --model {out}/tiny --data reverse:1 --steps 6 "
        "--rows-per-step 4 --warmup-steps 4 --eval-every 3 --eval-rows 4"
    )
    metrics = ["eval/loss", "loss/loss"]
    write_case(tmp_path / "golden" / "sft", command, metrics, before=["tiny {out}/tiny"])
    copy = tmp_path / "src"
    shutil.copytree(SOURCES, copy, ignore=shutil.ignore_patterns("__pycache__"))

    def call(source, *arguments):
        return subprocess.run(
            [sys.executable, "-m", "roll_lite", "ci", tmp_path / "golden", *arguments],
            env=os.environ | {"PYTHONPATH": str(source)}, capture_output=True, text=True,
        )  # fmt: skip

    assert call(SOURCES, "--write", "--seeds", "1").returncode == 0
    done = call(copy)
    assert (done.returncode, done.stdout) == (0, "sft: equal to the last bit, 7 steps\n")
    path = copy / "roll_lite" / "train" / "optimizer.py"
    code = path.read_text()
    assert PLANTED[0] in code
    path.write_text(code.replace(*PLANTED))
    done = call(copy)
    assert done.returncode == 1, done.stderr
    assert "sft: differs. The first step that differs is 1: weights" in done.stdout


@pytest.mark.slow
def test_a_golden_curve_holds():
    assert ci.main([str(GOLDEN / "sft")]) == 0
