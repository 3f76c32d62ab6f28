"""Logprobs and entropies against float64."""

import pytest
import torch

from roll_lite.models import logprobs as module
from roll_lite.models.logprobs import (
    pick_logprobs,
    scaled_logits,
    token_logprobs,
    top_logprobs,
)


def reference(hidden, head, token_ids, temperature):
    logp = torch.log_softmax(hidden @ head.T / temperature, -1)
    return logp.gather(1, token_ids[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("rows", [1, 37, 96])
def test_value_and_gradient_equal_float64(monkeypatch, rows, temperature):
    monkeypatch.setattr(module, "CHUNK_ROWS", 32)
    torch.manual_seed(rows)
    hidden = torch.randn(rows, 24)
    head = torch.randn(301, 24) * 24**-0.5  # logits of the size that models have
    token_ids = torch.randint(0, 301, (rows,))
    weights = torch.randn(2, rows)  # gradients that differ by row
    results = []
    for function, dtype in ((token_logprobs, torch.float32), (reference, torch.float64)):
        inputs = [x.to(dtype, copy=True).requires_grad_() for x in (hidden, head)]
        logprobs, entropy = function(*inputs, token_ids, temperature)
        (logprobs * weights[0] + entropy * weights[1]).sum().backward()
        results.append([logprobs.detach(), entropy.detach(), *(x.grad for x in inputs)])
    for ours, exact in zip(*results, strict=True):
        assert ours.dtype == torch.float32
        error = (ours.double() - exact).abs().max() / exact.abs().max()
        assert error < 1e-6


def test_sampled_logprobs_are_the_trained_ones():
    torch.manual_seed(0)
    hidden, head = torch.randn(50, 24), torch.randn(301, 24)
    token_ids = torch.randint(0, 301, (50,))
    in_training, _ = token_logprobs(hidden, head, token_ids, 0.7)
    logits = scaled_logits(hidden, head, torch.full((50,), 0.7))
    assert torch.equal(pick_logprobs(logits, token_ids), in_training)


def test_no_rows_give_no_gradient():
    hidden, head = torch.randn(0, 8, requires_grad=True), torch.randn(9, 8, requires_grad=True)
    logprobs, _ = token_logprobs(hidden, head, torch.zeros(0, dtype=torch.int64))
    logprobs.sum().backward()
    assert head.grad.abs().sum() == 0


@pytest.mark.gpu
def test_memory_of_16k_tokens_with_a_152k_vocabulary():
    torch.manual_seed(0)
    hidden = torch.randn(16384, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    head = torch.randn(151936, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    token_ids = torch.randint(0, 151936, (16384,), device="cuda")
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    logprobs, entropy = token_logprobs(hidden, head, token_ids)
    (logprobs.mean() + 0.01 * entropy.mean()).backward()
    peak = torch.cuda.max_memory_allocated() - before
    print(f"peak {peak / 1e9:.2f} GB over the inputs")
    assert peak < 3e9


@pytest.mark.gpu
def test_the_gradient_of_a_bf16_head_is_rounded_once(monkeypatch):
    """That alone is an error of 1.7e-3; rounding each of 16 products as well makes it 2.3e-3."""
    monkeypatch.setattr(module, "CUDA_CHUNK_ROWS", 256)
    torch.manual_seed(0)
    hidden, head = torch.randn(4096, 256), torch.randn(5000, 256) / 16
    inputs = [x.to("cuda", torch.bfloat16).requires_grad_() for x in (hidden, head)]
    token_ids = torch.randint(0, 5000, (4096,), device="cuda")
    logprobs, _ = token_logprobs(*inputs, token_ids)
    logprobs.sum().backward()
    hidden, head = (x.detach().double() for x in inputs)
    logits = (inputs[0] @ inputs[1].T).double().detach()  # rounded to bf16 there too
    grad = torch.nn.functional.one_hot(token_ids, 5000).double() - logits.softmax(-1)
    exact = grad.bfloat16().double().T @ hidden
    error = (inputs[1].grad.double() - exact).norm() / exact.norm()
    print(f"relative error {error:.2e}")
    assert error < 2.0e-3


def test_several_tokens_of_a_row_equal_float64():
    torch.manual_seed(3)
    hidden, head = torch.randn(40, 24), torch.randn(301, 24) * 24**-0.5
    token_ids = torch.stack([torch.randperm(301)[:5] for _ in range(40)])
    weights = torch.randn(40, 5)
    results = []
    for dtype in (torch.float32, torch.float64):
        inputs = [x.to(dtype, copy=True).requires_grad_() for x in (hidden, head)]
        if dtype == torch.float32:
            logprobs, _ = token_logprobs(*inputs, token_ids, 0.7)
        else:
            logprobs = torch.log_softmax(inputs[0] @ inputs[1].T / 0.7, -1).gather(1, token_ids)
        (logprobs * weights).sum().backward()
        results.append([logprobs.detach(), *(x.grad for x in inputs)])
    for ours, exact in zip(*results, strict=True):
        assert (ours.double() - exact).abs().max() < 1e-6 * exact.abs().max()


def test_the_likeliest_tokens():
    torch.manual_seed(4)
    hidden, head = torch.randn(600, 24), torch.randn(301, 24)
    ids, logprobs = top_logprobs(hidden, head, 4, 0.7)
    exact = torch.log_softmax(hidden.double() @ head.double().T / 0.7, -1).topk(4)
    assert torch.equal(ids, exact.indices)
    torch.testing.assert_close(logprobs.double(), exact.values, rtol=1e-5, atol=1e-5)
    # For a reader that knows only the first hundred tokens.
    ids, logprobs = top_logprobs(hidden, head, 4, 0.7, num_entries=100)
    exact = torch.log_softmax(hidden.double() @ head[:100].double().T / 0.7, -1).topk(4)
    assert torch.equal(ids, exact.indices)
    torch.testing.assert_close(logprobs.double(), exact.values, rtol=1e-5, atol=1e-5)
