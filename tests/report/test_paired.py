"""Intervals of improvements, beside formulas in plain float64 and a bootstrap over prompts."""

import json
import math
import random
from statistics import fmean, stdev

import pytest

from roll_lite.report.page import run_data
from roll_lite.report.paired import improvement, improvement_over, pass_shares, students_t
from roll_lite.report.reader import RunFolder
from roll_lite.report.terminal import comparison


def below(t, freedom, num=20_000):
    """Student's distribution function, by Simpson's rule over its density."""
    log_scale = math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)
    scale = math.exp(log_scale) / math.sqrt(freedom * math.pi)
    values = [(1 + (t * i / num) ** 2 / freedom) ** (-(freedom + 1) / 2) for i in range(num + 1)]
    total = values[0] + values[-1] + 4 * sum(values[1:-1:2]) + 2 * sum(values[2:-1:2])
    return 0.5 + scale * total * t / num / 3


@pytest.mark.parametrize("freedom", [9, 20, 63, 1023])
def test_the_quantile(freedom):
    assert below(students_t(freedom), freedom) == pytest.approx(0.975, abs=1e-4)


def two_models(num_prompts, num_samples, seed=0):
    """Shares that pass: prompts are easy or hard for both, and the second model is better."""
    draw = random.Random(seed)
    ease = [draw.betavariate(0.5, 0.5) for _ in range(num_prompts)]
    return [
        {
            f"p{i}": sum(draw.random() < min(1, p + more) for _ in range(num_samples)) / num_samples
            for i, p in enumerate(ease)
        }
        for more in (0.0, 0.1)
    ]


@pytest.mark.parametrize("num_samples", [1, 8])
def test_the_interval_is_that_of_a_bootstrap(num_samples):
    before, after = two_models(200, num_samples)
    found = improvement(before, after)
    draw = random.Random(1)
    names = sorted(before)
    means, apart = [], []
    for _ in range(1000):
        old, new = (draw.choices(names, k=len(names)) for _ in "12")
        means.append(fmean(after[name] - before[name] for name in new))
        apart.append(fmean(after[name] for name in new) - fmean(before[name] for name in old))
    assert found.mean == pytest.approx(fmean(means), abs=0.003)
    assert found.half == pytest.approx(1.97 * stdev(means), rel=0.08)
    assert found.half_unpaired == pytest.approx(1.97 * stdev(apart), rel=0.08)
    assert found.half < found.half_unpaired


def test_intervals_hold_the_truth_as_often_as_they_say():
    """500 pairs of models that are equal, over 60 prompts: about 5% of the intervals miss 0."""
    misses = 0
    for seed in range(500):
        draw = random.Random(seed)
        ease = [draw.random() for _ in range(60)]
        both = [{i: float(draw.random() < p) for i, p in enumerate(ease)} for _ in "12"]
        found = improvement(*both)
        misses += abs(found.mean) > found.half
    assert 10 <= misses <= 40


def test_it_is_said_in_words():
    before, after = ({f"p{i}": float(i < n) for i in range(10)} for n in (4, 7))
    # Differences: 1 three times, 0 seven times. t of 9 degrees is 2.262.
    half = 2.262 * math.sqrt((3 * 0.49 + 7 * 0.09) / 9 / 10)
    assert str(improvement(before, after)).startswith(
        f"+0.300 (95% interval {0.3 - half:+.3f} to {0.3 + half:+.3f}, by 10 prompts; ±{half:.3f}"
    )
    equal = improvement(after, after)
    assert (equal.mean, equal.half) == (0, 0.3)  # the rule of three: 3 / 10
    assert improvement({"a": 1.0}, {"a": 0.0}) is None
    assert improvement(dict.fromkeys(before, 0.0), dict.fromkeys(before, 0.0)) is None


def answer(number, reward, state="done", **parts):
    return {
        "prompt_id": f"p{number}", "domain": "d", "messages": [], "ground_truth": "", "tests": [],
        "extra": {}, "state": state, "reward": reward, "parts": parts,
    }  # fmt: skip


def write_run(folder, options, **files):
    (folder / "rollouts").mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(options))
    for name, rows in files.items():
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        (folder / "rollouts" / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    return RunFolder(folder)


def test_shares_that_pass(tmp_path):
    rows = [answer(1, 0.4), answer(1, 0.6), answer(2, 0.0, success=1.0), answer(3, None, "failed")]
    broken = ["{", '{"prompt_id": 3}', json.dumps(answer(4, "1"))]
    run = write_run(tmp_path, {"pass_reward": 0.5}, eval_00000=rows + broken)
    assert sorted(pass_shares(run, "eval_00000", 0.5).values()) == [0.5, 1.0]


def test_both_are_measured_by_the_pass_reward_of_the_later(tmp_path):
    half = {"eval_00000": [answer(i, 0.5) for i in range(12)]}
    a = write_run(tmp_path / "a", {"pass_reward": 1.0}, **half)
    b = write_run(tmp_path / "b", {"pass_reward": 0.5}, **half)
    assert improvement_over(a, b).mean == 0
    assert improvement_over(b, a) is None  # none has a reward of 1


def test_the_page_and_the_comparison_have_it(tmp_path):
    first = [answer(i, float(i < 2)) for i in range(12)]
    last = [answer(i, float(i < 8)) for i in range(12)]
    files = {"eval_00000": first, "eval_00010": last}
    a = write_run(tmp_path / "a", {"pass_reward": None}, **files)
    b = write_run(tmp_path / "b", {}, step_00000=first)
    assert run_data(a, [])["improvement"].mean == 0.5 and run_data(b, [])["improvement"] is None
    assert improvement_over(a, b).mean == -0.5 and improvement_over(b, a).num_prompts == 12
    for run in (a, b):
        (run.folder / "metrics.jsonl").write_text('{"step": 1, "time": 1.0}\n')
        run.refresh()
    assert f"last pass rate of {b.folder} over {a.folder}: -0.500 (95%" in comparison([a, b])
