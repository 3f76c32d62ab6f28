"""Sampling in one pass over the logits: token and logprob, without an fp32 copy."""

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 256
NUM_SPLITS = 16
TO_UNIT = tl.constexpr(2.0**-32)


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
    best_logit, weight_sum = torch.empty_like(best), torch.empty_like(best)
    token_ids = torch.empty(R, device=device, dtype=torch.int64)
    logprobs = torch.empty(R, device=device, dtype=torch.float32)
    per_split = triton.cdiv(V, NUM_SPLITS * BLOCK) * BLOCK
    _scan[(R, NUM_SPLITS)](
        logits_RV, temperatures_R, is_greedy_R, keys_R2, positions_R,
        best, best_id, best_logit, weight_sum, V, logits_RV.stride(0), per_split, first,
        NUM_SPLITS=NUM_SPLITS, BLOCK=BLOCK, num_warps=1,
    )  # fmt: skip
    found = (best, best_id, best_logit, weight_sum)
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
    best_ptr, best_id_ptr, best_logit_ptr, sum_ptr,
    vocab_size, row_stride, per_split, first_entry,
    NUM_SPLITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    inverse = 1.0 / tl.load(temperature_ptr + row)
    noise_scale = 1.0 - tl.load(is_greedy_ptr + row).to(tl.float32)
    key0 = tl.load(key_ptr + 2 * row).to(tl.uint32)
    key1 = tl.load(key_ptr + 2 * row + 1).to(tl.uint32)
    position = tl.load(position_ptr + row).to(tl.uint32)
    zero = key0 * 0
    first = _mix(_mix(position ^ key0, zero) ^ key1, zero)
    second = _mix(_mix(position ^ key1, zero) ^ key0, zero)

    # The noise is -log(e) with e = -log(1 - u) >= u, so an entry can only win if u is below
    # exp(logit - best), which is also its weight in the sum. Few entries pass this test, so logs
    # are rarely computed. u times 0.8 is compared: that is a margin for rounding, and a greedy row,
    # which has no noise, passes with every logit above the best, whatever u is. No entry seen is
    # more than 47 above the best (e is at most 1e20): the sum does not overflow.
    best = -1e30
    best_id = split * per_split
    best_logit = -float("inf")
    weights = tl.zeros([BLOCK], tl.float32)
    for start in range(split * per_split, tl.minimum((split + 1) * per_split, vocab_size), BLOCK):
        v = start + tl.arange(0, BLOCK)
        logit = tl.load(logits_ptr + row * row_stride + v, mask=v < vocab_size, other=-float("inf"))
        logit = logit.to(tl.float32) * inverse
        bits = _mix(first + (first_entry + v).to(tl.uint32) * 0x9E3779B9, second).to(tl.float32)
        weight = tl.exp(logit - best)
        may_win = bits * (0.8 * TO_UNIT) < weight
        if tl.max(may_win.to(tl.int32), 0) > 0:
            u = (bits + 0.5) * TO_UNIT
            # -log(1 - u), with its series where 1 - u would lose the digits of a small u
            e = tl.where(u < 1e-3, u * (1 + u * (0.5 + u * 0.33333334)), -tl.log(1.0 - u))
            noise = -tl.log(tl.minimum(tl.maximum(e, 1e-20), 1e20))
            noisy = logit + noise * noise_scale
            top = tl.max(noisy, 0)
            if top > best:
                where = tl.argmax(noisy, 0)
                best_id = start + where
                best_logit = tl.sum(tl.where(tl.arange(0, BLOCK) == where, logit, 0.0), 0)
                weights *= tl.exp(best - top)
                best = top
                weight = tl.exp(logit - best)
        weights += weight
    out = row * NUM_SPLITS + split
    tl.store(best_ptr + out, best)
    tl.store(best_id_ptr + out, first_entry + best_id)
    tl.store(best_logit_ptr + out, best_logit)
    tl.store(sum_ptr + out, tl.sum(weights, 0))


@triton.jit
def _choose(
    best_ptr, best_id_ptr, best_logit_ptr, sum_ptr, token_ptr, logprob_ptr, num_found,
    FOUND_PAD: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    i = tl.arange(0, FOUND_PAD)
    s = row * num_found + i
    ok = i < num_found
    best = tl.load(best_ptr + s, mask=ok, other=-float("inf"))
    where, top = tl.argmax(best, 0), tl.max(best, 0)
    sums = tl.load(sum_ptr + s, mask=ok, other=0.0) * tl.exp(best - top)
    lse = top + tl.log(tl.sum(sums, 0))
    chosen = row * num_found + where
    tl.store(token_ptr + row, tl.load(best_id_ptr + chosen).to(tl.int64))
    tl.store(logprob_ptr + row, tl.load(best_logit_ptr + chosen) - lse)
