"""Sampling in one pass over the logits: token and logprob, without an fp32 copy."""

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024
NUM_SPLITS = 16


def sample(
    logits_RV: Tensor,
    temperatures_R: Tensor,
    is_greedy_R: Tensor,
    keys_R2: Tensor,
    positions_R: Tensor,
    first: int = 0,
    exchange: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Token ids and fp32 logprobs, by Gumbel-max with counter-based noise.

    With a sharded vocabulary, `first` is the shard's first entry and `exchange` concatenates the
    columns of all shards: a few numbers per row.
    """
    R, V = logits_RV.shape
    device = logits_RV.device
    best = torch.empty(R, NUM_SPLITS, device=device, dtype=torch.float32)
    best_id = torch.empty(R, NUM_SPLITS, device=device, dtype=torch.int32)
    best_logit, m, l = (torch.empty_like(best) for _ in range(3))  # noqa: E741
    token_ids = torch.empty(R, device=device, dtype=torch.int64)
    logprobs = torch.empty(R, device=device, dtype=torch.float32)
    per_split = triton.cdiv(V, NUM_SPLITS * BLOCK) * BLOCK
    _scan[(R, NUM_SPLITS)](
        logits_RV, temperatures_R, is_greedy_R, keys_R2, positions_R,
        best, best_id, best_logit, m, l, V, logits_RV.stride(0), per_split, first,
        NUM_SPLITS=NUM_SPLITS, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
    found = (best, best_id, best_logit, m, l)
    if exchange:
        found = [exchange(x) for x in found]
    num_found = found[0].shape[1]
    _choose[(R,)](
        *found, token_ids, logprobs, num_found,
        FOUND_PAD=triton.next_power_of_2(num_found), num_warps=1,
    )  # fmt: skip
    return token_ids, logprobs


@triton.jit
def _mix(x, also):
    """The hash of engine/sampler.py, in 32-bit arithmetic."""
    x = ((x >> 16) ^ x) * 0x21F0AAAD
    x = x ^ also
    x = ((x >> 15) ^ x) * 0x735A2D97
    return (x >> 15) ^ x


@triton.jit
def _scan(
    logits_ptr, temperature_ptr, is_greedy_ptr, key_ptr, position_ptr,
    best_ptr, best_id_ptr, best_logit_ptr, m_ptr, l_ptr,
    vocab_size, row_stride, per_split, first_entry,
    NUM_SPLITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature = tl.load(temperature_ptr + row)
    noise_scale = 1.0 - tl.load(is_greedy_ptr + row).to(tl.float32)
    key0 = tl.load(key_ptr + 2 * row).to(tl.uint32)
    key1 = tl.load(key_ptr + 2 * row + 1).to(tl.uint32)
    position = tl.load(position_ptr + row).to(tl.uint32)
    zero = key0 * 0
    first = _mix(_mix(position ^ key0, zero) ^ key1, zero)
    second = _mix(_mix(position ^ key1, zero) ^ key0, zero)

    best = -float("inf")
    best_id = split * per_split
    best_logit = -float("inf")
    m = -1e30
    l = 0.0  # noqa: E741
    for start in range(split * per_split, tl.minimum((split + 1) * per_split, vocab_size), BLOCK):
        v = start + tl.arange(0, BLOCK)
        logit = tl.load(logits_ptr + row * row_stride + v, mask=v < vocab_size, other=-float("inf"))
        logit = logit.to(tl.float32) / temperature
        m_new = tl.maximum(m, tl.max(logit, 0))
        l = l * tl.exp(m - m_new) + tl.sum(tl.exp(logit - m_new), 0)  # noqa: E741
        m = m_new
        bits = _mix(first + (first_entry + v).to(tl.uint32) * 0x9E3779B9, second)
        u = (bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10
        # -log(1 - u), with its series where 1 - u would lose the digits of a small u
        e = tl.where(u < 1e-3, u * (1 + u * (0.5 + u * 0.33333334)), -tl.log(1.0 - u))
        noise = -tl.log(tl.minimum(tl.maximum(e, 1e-20), 1e20))
        noisy = logit + noise * noise_scale
        top = tl.max(noisy, 0)
        if top > best:
            where = tl.argmax(noisy, 0)
            best = top
            best_id = start + where
            best_logit = tl.sum(tl.where(tl.arange(0, BLOCK) == where, logit, 0.0), 0)
    out = row * NUM_SPLITS + split
    tl.store(best_ptr + out, best)
    tl.store(best_id_ptr + out, first_entry + best_id)
    tl.store(best_logit_ptr + out, best_logit)
    tl.store(m_ptr + out, m)
    tl.store(l_ptr + out, l)


@triton.jit
def _choose(
    best_ptr, best_id_ptr, best_logit_ptr, m_ptr, l_ptr, token_ptr, logprob_ptr, num_found,
    FOUND_PAD: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    i = tl.arange(0, FOUND_PAD)
    s = row * num_found + i
    ok = i < num_found
    where = tl.argmax(tl.load(best_ptr + s, mask=ok, other=-float("inf")), 0)
    m = tl.load(m_ptr + s, mask=ok, other=-1e30)
    top = tl.max(m, 0)
    lse = top + tl.log(tl.sum(tl.load(l_ptr + s, mask=ok, other=0.0) * tl.exp(m - top), 0))
    chosen = row * num_found + where
    tl.store(token_ptr + row, tl.load(best_id_ptr + chosen).to(tl.int64))
    tl.store(logprob_ptr + row, tl.load(best_logit_ptr + chosen) - lse)
