"""The head's pointwise part in training: log-sum-exp and mean of each row of logits, and gradients.

One program per row. Each direction reads the logits once, in the dtype they were computed in.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096


def summarize(logits_CV: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-sum-exp of the scaled logits, and their mean under the softmax."""
    C, V = logits_CV.shape
    lse_C = torch.empty(C, dtype=torch.float32, device=logits_CV.device)
    mean_C = torch.empty_like(lse_C)
    if C:
        block = min(BLOCK, triton.next_power_of_2(V))
        _summarize[(C,)](logits_CV, lse_C, mean_C, V, 1 / temperature, BLOCK=block, num_warps=8)
    return lse_C, mean_C


@triton.jit
def _summarize(logits_ptr, lse_ptr, mean_ptr, V, inverse_temperature, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    largest = tl.full((), float("-inf"), tl.float32)
    total = tl.zeros((), tl.float32)
    weighted = tl.zeros((), tl.float32)
    for start in range(0, V, BLOCK):
        v = start + tl.arange(0, BLOCK)
        x = tl.load(logits_ptr + row * V + v, mask=v < V, other=float("-inf")).to(tl.float32)
        x *= inverse_temperature
        new_largest = tl.maximum(largest, tl.max(x, 0))
        shrink = tl.exp(largest - new_largest)
        e = tl.exp(x - new_largest)
        total = total * shrink + tl.sum(e, 0)
        weighted = weighted * shrink + tl.sum(tl.where(v < V, e * x, 0.0), 0)
        largest = new_largest
    tl.store(lse_ptr + row, largest + tl.log(total))
    tl.store(mean_ptr + row, weighted / total)


def backward_in_place(
    logits_CV: Tensor,
    lse_C: Tensor,
    entropy_C: Tensor,
    token_ids_CK: Tensor,
    grad_logprobs_CK: Tensor,
    grad_entropy_C: Tensor,
    temperature: float,
) -> Tensor:
    """The gradient of the logits, written over them. Ids outside 0..V-1 match no column."""
    C, V = logits_CV.shape
    if C:
        block = min(BLOCK, triton.next_power_of_2(V))
        K = token_ids_CK.shape[1]
        _backward[(C,)](
            logits_CV, lse_C, entropy_C, token_ids_CK.contiguous(), grad_logprobs_CK.contiguous(),
            grad_entropy_C.contiguous(), V, 1 / temperature, K=K, BLOCK=block, num_warps=8,
        )  # fmt: skip
    return logits_CV


@triton.jit
def _backward(
    logits_ptr, lse_ptr, entropy_ptr, ids_ptr, grad_ptr, grad_entropy_ptr, V, inverse_temperature,
    K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    lse = tl.load(lse_ptr + row)
    entropy = tl.load(entropy_ptr + row)
    grad_entropy = tl.load(grad_entropy_ptr + row)
    grad_sum = tl.zeros((), tl.float32)
    for k in range(K):
        grad_sum += tl.load(grad_ptr + row * K + k)
    for start in range(0, V, BLOCK):
        v = start + tl.arange(0, BLOCK)
        x = tl.load(logits_ptr + row * V + v, mask=v < V, other=0.0).to(tl.float32)
        logp = x * inverse_temperature - lse
        # d logprob / d logit = onehot - p;   d entropy / d logit = -p (log p + entropy)
        grad = -tl.exp(logp) * (grad_sum + grad_entropy * (logp + entropy))
        for k in range(K):
            hit = v == tl.load(ids_ptr + row * K + k)
            grad += tl.where(hit, tl.load(grad_ptr + row * K + k), 0.0)
        grad *= inverse_temperature
        tl.store(logits_ptr + row * V + v, grad.to(logits_ptr.dtype.element_ty), mask=v < V)
