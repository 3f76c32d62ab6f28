"""Hints for runs that cannot learn."""

from roll_lite.report.overview import Hints

HEALTHY = {
    "rollout/truncated": 0.1, "reward/equal_groups": 0.5, "reward/timeouts": 0.0,
    "loss/entropy": 0.4, "loss/skipped_steps": 0.0, "rollout/failed": 1, "rollout/done": 63,
    "mismatch/outside": 0.001, "reward/mean": 0.5,
}  # fmt: skip


def steps(*changes):
    """The hints of each step of a run."""
    hints = Hints()
    return [hints.read(HEALTHY | change) for change in changes]


def test_a_healthy_run_has_no_hints():
    assert steps(*[{}] * 10) == [[]] * 10
    imitating = Hints()  # another recipe, which has no samples
    assert [imitating.read({"loss/loss": 0.01, "loss/entropy": 0.001}) for _ in "12"] == [[], []]


def test_a_hint_is_given_once_with_the_number_and_the_remedy():
    cut = {"rollout/truncated": 0.96}
    found = steps(cut, cut, cut, {}, cut, cut)
    assert [len(hints) for hints in found] == [0, 1, 0, 0, 0, 0]
    assert found[1][0].startswith("96% of the replies were cut") and "--max-tokens" in found[1][0]


def test_steps_in_a_row():
    equal = {"reward/equal_groups": 1.0}
    found = steps(*[equal] * 4, {}, *[equal] * 5)
    assert [bool(hints) for hints in found] == [False] * 9 + [True]
    assert "no group had unequal rewards for 5 steps" in found[-1][0]


def test_other_hints_have_their_numbers():
    assert steps({"reward/timeouts": 12.0})[0][0].startswith("12 rewards timed out")
    assert "entropy fell to 0.004" in steps(*[{"loss/entropy": 0.004}] * 2)[1][0]
    assert "not finite" in steps({"loss/skipped_steps": 1.0})[0][0]
    assert steps({"rollout/failed": 7})[0][0].startswith("7 samples failed, 63 did not")
    assert steps(*[{"mismatch/outside": 0.2}] * 2)[1][0].startswith("20% of the tokens")
