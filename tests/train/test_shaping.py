"""Penalties, masks and weights around the advantages."""

import pytest
from support.training_data import make_groups

from roll_lite.train.sample_rows import with_advantages
from roll_lite.train.shaping import (
    mask_overlong,
    overlong_penalty,
    penalise_overlong,
)


def test_the_overlong_penalty_is_dapos():
    found = [overlong_penalty(n, 100, 20) for n in (1, 80, 85, 90, 100, 130)]
    assert found == pytest.approx([0, 0, -0.25, -0.5, -1, -1])
    with pytest.raises(ValueError, match="buffer=101"):
        overlong_penalty(5, 100, 101)
    (group,) = penalise_overlong(make_groups([[1.0, 1.0, 1.0]]), max_tokens=4, buffer=2)
    assert [s.score.value for s in group.samples] == [1.0, 0.5, 0.0]  # 2, 3 and 4 tokens
    assert [s.score.parts["overlong"] for s in group.samples] == [0.0, -0.5, -1.0]


def test_samples_cut_by_length_are_left_out():
    groups = make_groups([[0.0, 1.0]], finish_reason="length") + make_groups([[0.0, 1.0]])
    sequences = mask_overlong(with_advantages(groups), groups)
    assert [s.id for s in sequences] == [f"sample {i} of prompt p0" for i in (0, 1)]
    assert sequences == with_advantages(groups)[2:]
