"""Tokens that travel to ranks with their experts, against all experts on one rank."""

import pytest
import torch
from support.expert_program import CASES, RANKS, inputs, with_gradients
from support.forked_ranks import run_ranks
from support.paths import SUPPORT

from roll_lite.models.mlp import mix


@pytest.fixture(scope="module")
def over_ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("experts")
    run_ranks(RANKS, SUPPORT / "expert_program.py", folder / "store", folder)
    return [torch.load(folder / f"{rank}.pt") for rank in range(RANKS)]


@pytest.mark.parametrize("case", CASES)
def test_outputs_and_gradients_are_those_of_one_rank(over_ranks, case):
    of_ranks, experts = inputs(case)
    x, ids, weights = map(torch.cat, zip(*of_ranks, strict=True))
    expected = with_gradients(
        lambda x, weights, gate_up, down: mix(x, gate_up, down, ids, weights), x, weights, *experts
    )
    found = [torch.cat(parts) for parts in zip(*(r[case][0] for r in over_ranks), strict=True)]
    for mine, theirs in zip(found, expected, strict=True):
        assert (mine - theirs).norm() <= 1e-6 * theirs.norm()
    told = [count for results in over_ranks for count in results[case][1]]
    assert len(told) == RANKS and all(said == true for said, true in told)


@pytest.mark.parametrize("case", CASES)
def test_experts_may_be_named_in_32_bits(over_ranks, case):
    for results in over_ranks:
        (expected, *_), _, found = results[case]
        assert found.shape == expected.shape
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
