"""scripts/record.py: bounds against closed forms, and what the rules refuse."""

import json
import sys
from fractions import Fraction
from math import comb

import pytest
import record


def test_bounds_are_exact():
    """Clopper and Pearson's, one-sided: for one and for all right answers in closed form."""
    assert record.lower_bound(20, 20) == pytest.approx(0.05 ** (1 / 20), abs=1e-9)
    assert record.lower_bound(1, 50) == pytest.approx(1 - 0.95 ** (1 / 50), abs=1e-9)
    assert record.lower_bound(0, 50) == 0
    rate = Fraction(record.lower_bound(10, 20))
    chance = sum(comb(20, k) * rate**k * (1 - rate) ** (20 - k) for k in range(10, 21))
    assert float(chance) == pytest.approx(0.05, abs=1e-9)


def write(folder, *, seed=0, right=90, commit="c0ffee", lr=1e-3, **options):
    config = options | {"seed": seed, "lr": lr, "run_dir": str(folder), "starts": [
        {"command": "python recipes/rlvr.py", "time": "2026-01-02 03:04:05", "commit": commit}
    ]}  # fmt: skip
    (folder / "rlvr").mkdir(parents=True)
    (folder / "rlvr" / "config.json").write_text(json.dumps(config))
    times = {"time/rollout": 2.0, "time/train": 1.0, "time/step": 3.5}
    counts = {"rollout/reply_tokens": 10.0, "rollout/done": 12, "rollout/filtered": 4}
    lines = [{"step": 0, "eval/pass@1": 0.1}, {"step": 1} | times | counts, {"step": 2} | times]
    lines[-1] |= counts
    _write_lines(folder / "rlvr" / "metrics.jsonl", lines)
    for part, count in (("before", 5), ("after", right)):
        answers = [
            {"prompt_id": f"q{i}", "state": "done", "parts": {}, "reward": float(i < count)}
            for i in range(100)
        ]
        _write_lines(folder / part / "rollouts" / "step_00000.jsonl", answers)
    return folder


def _write_lines(path, rows):
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def call(monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", ["record.py", *map(str, arguments)])
    try:
        record.main()
    except SystemExit as stop:
        return str(stop.code)
    return capsys.readouterr().out


def test_two_seeds_above_the_target_are_a_record(tmp_path, monkeypatch, capsys):
    runs = write(tmp_path / "a"), write(tmp_path / "b", seed=1, right=95)
    said = call(monkeypatch, capsys, *runs, "--target", 0.8)
    assert said.startswith("| **7.0** | 7.0, 7.0 | 90.0% (>= 83.6%), 95.0% (>= 89.8%) |")


@pytest.mark.parametrize(
    ("second", "target", "reason"),
    [
        ({"seed": 0}, 0.8, "two seeds are needed"),
        ({"seed": 1, "lr": 2e-3}, 0.8, "the runs differ in lr"),
        ({"seed": 1, "data": ["a"], "lr": 2e-3}, 0.8, "the runs differ in data, lr"),
        ({"seed": 1, "commit": "c0ffee-dirty"}, 0.8, "must be one, known and clean"),
        ({"seed": 1, "right": 85}, 0.8, "seed 1 reaches 85.0%, which is at least 77.8%"),
    ],
)
def test_what_is_no_record(tmp_path, monkeypatch, capsys, second, target, reason):
    runs = write(tmp_path / "a"), write(tmp_path / "b", **second)
    said = call(monkeypatch, capsys, *runs, "--target", target)
    assert said.startswith("no record: ") and reason in said


def test_a_run_without_steps_or_replies_is_named(tmp_path, monkeypatch, capsys):
    run = write(tmp_path / "a")
    (run / "before" / "rollouts" / "step_00000.jsonl").unlink()
    said = call(monkeypatch, capsys, run)
    assert said.startswith(f"error: {run / 'before'} has no replies in rollouts; name folders")
    (run / "rlvr" / "metrics.jsonl").write_text('{"step": 0, "eval/pass@1": 0.1}\n')
    said = call(monkeypatch, capsys, run)
    assert said.startswith(f"error: {run / 'rlvr'} has no step that ended; name folders")


def test_where_the_time_went(tmp_path, monkeypatch, capsys):
    said = call(monkeypatch, capsys, write(tmp_path / "a"))
    assert "5.0% -> 90.0% of 100 (at least 83.6%" in said
    assert "2 steps   7.0 s: rollout 4.0, train 2.0" in said and "about 80 tokens/s" in said
