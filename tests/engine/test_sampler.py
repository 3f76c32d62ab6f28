"""Sampling against exact distributions."""

import math

import pytest
import torch

from roll_lite.engine.sampler import gumbel, noise_key, sample
from roll_lite.models.truncation import truncate
from roll_lite.types import SamplingParams


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_sampling_follows_the_softmax(temperature):
    """Chi-squared over 50,000 draws; 5 sigma of the statistic."""
    torch.manual_seed(0)
    logits = torch.randn(40) * 2 / temperature
    draws = 50_000
    keys = torch.tensor([noise_key(3, i) for i in range(draws)])
    positions = torch.arange(draws) % 7
    ids, logprobs = sample(
        (logits * temperature).expand(draws, -1),
        torch.full((draws,), temperature),
        torch.zeros(draws, dtype=torch.bool),
        keys,
        positions,
    )
    exact = torch.softmax(logits.double(), -1)
    torch.testing.assert_close(logprobs.double(), exact.log()[ids], rtol=0, atol=1e-5)
    expected = exact * draws
    big = expected >= 5
    counts = torch.bincount(ids, minlength=40).double()
    cells = torch.cat([counts[big], counts[~big].sum()[None]])
    wanted = torch.cat([expected[big], expected[~big].sum()[None]])
    chi2 = ((cells - wanted) ** 2 / wanted).sum().item()
    freedom = len(cells) - 1
    assert abs(chi2 - freedom) < 5 * (2 * freedom) ** 0.5


def exact_distribution(logits, temperature, top_k=0, top_p=1.0, min_p=0.0):
    """By the definitions, token by token, in float64."""
    order = sorted(range(len(logits)), key=lambda v: -logits[v])
    weights = {v: math.exp(logits[v] / temperature) for v in order}
    kept = order[: top_k or None]
    total, mass, nucleus = sum(weights[v] for v in kept), 0.0, []
    for v in kept:
        if mass >= top_p * total:
            break
        nucleus.append(v)
        mass += weights[v]
    final = [v for v in nucleus if weights[v] >= min_p * weights[order[0]]]
    total = sum(weights[v] for v in final)
    return torch.tensor(
        [weights[v] / total if v in final else 0.0 for v in range(len(logits))], dtype=torch.float64
    )


@pytest.mark.parametrize(
    "options",
    [
        {"top_k": 5},
        {"top_p": 0.8},
        {"min_p": 0.1},
        {"top_k": 12, "top_p": 0.9, "min_p": 0.05, "temperature": 1.5},
        {"top_k": 1},
        {"top_p": 1e-6},
    ],
)
def test_truncated_sampling_follows_its_distribution(options):
    torch.manual_seed(1)
    logits, draws = torch.randn(30) * 2, 20_000
    temperature = options.get("temperature", 1.0)
    params = SamplingParams(max_tokens=1, **options)
    exact = exact_distribution(logits.tolist(), **{"temperature": 1.0} | options)
    rows = logits.expand(draws, -1)
    temperatures = torch.full((draws,), temperature)
    left = truncate(
        rows,
        temperatures,
        torch.full((draws,), params.top_k),
        torch.full((draws,), params.top_p),
        torch.full((draws,), params.min_p),
    )
    keys = torch.tensor([noise_key(9, i) for i in range(draws)])
    ids, logprobs = sample(
        left, temperatures, torch.zeros(draws, dtype=torch.bool), keys, torch.zeros(draws).long()
    )
    torch.testing.assert_close(logprobs.double(), exact.log()[ids], rtol=0, atol=1e-5)
    counts, wanted = torch.bincount(ids, minlength=30).double(), exact * draws
    assert counts[wanted == 0].sum() == 0
    cells = wanted > 0
    chi2 = ((counts[cells] - wanted[cells]) ** 2 / wanted[cells]).sum().item()
    freedom = int(cells.sum()) - 1
    assert abs(chi2 - freedom) <= 5 * (2 * max(1, freedom)) ** 0.5


def test_truncation_leaves_rows_alone_that_did_not_ask():
    torch.manual_seed(0)
    logits = torch.randn(2, 50_000) * 5
    ones = torch.ones(2)
    left = truncate(logits, ones, torch.tensor([0, 3]), ones, torch.zeros(2))
    assert torch.equal(left[0], logits[0])
    assert left[1].isfinite().sum() == 3


def test_noise_is_gumbel_and_uncorrelated():
    keys = torch.tensor([noise_key(seed, index) for seed in range(20) for index in range(20)])
    noise = gumbel(keys, torch.full((400,), 11), 0, 1000).double()
    assert abs(noise.mean().item() - 0.5772) < 0.01
    assert abs(noise.var().item() - torch.pi**2 / 6) < 0.02
    assert torch.corrcoef(noise[:40]).fill_diagonal_(0).abs().max() < 0.17  # 5 sigma of 1/sqrt(V)
    # No two positions share the set of their bits, whatever the order.
    key = torch.tensor([noise_key(1, 1)]).expand(512, 2)
    sums = gumbel(key, torch.arange(512), 0, 4096).double().sort(-1).values.sum(-1)
    assert len(set(sums.tolist())) == 512
    other_position = gumbel(keys, torch.full((400,), 12), 0, 1000).double()
    assert (
        abs(torch.corrcoef(torch.stack([noise.flatten(), other_position.flatten()]))[0, 1]) < 0.01
    )


@pytest.mark.parametrize(
    "field",
    [
        {"max_tokens": 0},
        {"max_tokens": 1, "temperature": -1.0},
        {"max_tokens": 1, "top_k": -1},
        {"max_tokens": 1, "top_p": 0.0},
        {"max_tokens": 1, "top_p": 1.1},
        {"max_tokens": 1, "min_p": -0.1},
    ],
)
def test_bad_sampling_params_are_named(field):
    with pytest.raises(ValueError, match=list(field)[-1]):
        SamplingParams(**field)


@pytest.mark.gpu
def test_noise_is_the_same_on_every_device():
    keys = torch.tensor([noise_key(seed, 1) for seed in range(50)])
    positions = torch.arange(50)
    on_cuda = gumbel(keys.cuda(), positions.cuda(), 0, 1000).cpu()
    torch.testing.assert_close(on_cuda, gumbel(keys, positions, 0, 1000), rtol=1e-5, atol=1e-5)
