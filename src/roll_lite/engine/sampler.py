"""Sampling with counter-based noise: a token depends on (seed, sample, position), not on the batch.

Gumbel-max: the argmax of logits plus Gumbel noise is a draw from their softmax. The noise of each
vocabulary entry is a hash of the sequence's key, the position and the entry.
"""

import torch
from torch import Tensor

from roll_lite.models.logprobs import pick_logprobs, row_chunks, scale
from roll_lite.models.tensor_parallel import TensorShard

_MASK = 0xFFFFFFFF
_GOLDEN = 0x9E3779B9 - 2**32  # spreads entries over all 32 bits; as a signed integer


def noise_key(seed: int, index: int) -> tuple[int, int]:
    """The 64-bit key of one sample's random numbers, as two 32-bit words."""
    x = (seed * 0x9E3779B97F4A7C15 + index * 0xD1B54A32D192ED03 + 0x8CB92BA72F3D8DD7) % 2**64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) % 2**64
    x ^= x >> 31
    return x >> 32, x & _MASK


def sample(
    logits_RV: Tensor,
    temperatures_R: Tensor,
    is_greedy_R: Tensor,
    keys_R2: Tensor,
    positions_R: Tensor,
    shard: TensorShard | None = None,
) -> tuple[Tensor, Tensor]:
    """Token ids, and their fp32 logprobs under the scaled logits that they were drawn from.

    With a shard, the logits are this rank's vocabulary entries; ranks exchange their best one.
    """
    num_entries = logits_RV.shape[1]
    first = shard.rank * num_entries if shard else 0
    if logits_RV.is_cuda:
        from roll_lite.kernels.sample import sample as fused

        exchange = shard.gather if shard else None
        return fused(logits_RV, temperatures_R, is_greedy_R, keys_R2, positions_R, first, exchange)
    has_greedy = bool(is_greedy_R.any())
    found = []
    # A few rows at a time, so that intermediates stay in the CPU's cache.
    for rows in row_chunks(len(logits_RV), max(1, 2**18 // num_entries)):
        logits_CV = scale(logits_RV[rows], temperatures_R[rows])
        noise_CV = gumbel(keys_R2[rows], positions_R[rows], first, first + num_entries)
        if has_greedy:
            noise_CV.masked_fill_(is_greedy_R[rows, None], 0.0)
        best_C, ids_C = noise_CV.add_(logits_CV).max(-1)
        logit_C = logits_CV.gather(1, ids_C[:, None])[:, 0]
        found.append((ids_C, best_C, logit_C, pick_logprobs(logits_CV, ids_C)))
    ids_R, best_R, logit_R, logprobs_R = (torch.cat(x) for x in zip(*found, strict=True))
    if shard is None:
        return ids_R, logprobs_R
    # Not logsumexp, whose rounding depends on the number of rows. Where truncation has removed all
    # of this rank's entries, the best is -inf and log_softmax nan.
    lse_R = (logit_R - logprobs_R).masked_fill_(logit_R == -torch.inf, -torch.inf)
    best_RS, logit_RS, lse_RS = (shard.gather(x[:, None]) for x in (best_R, logit_R, lse_R))
    ids_RS = shard.gather(ids_R[:, None] + first)
    winner_R1 = best_RS.argmax(-1, keepdim=True)
    logprobs_R = logit_RS.gather(1, winner_R1)[:, 0] - lse_RS.logsumexp(-1)
    return ids_RS.gather(1, winner_R1)[:, 0], logprobs_R


def gumbel(keys_R2: Tensor, positions_R: Tensor, first: int, end: int) -> Tensor:
    """Gumbel noise (R, V) of entries first..end, the same numbers on every device."""
    first_R, second_R = _words(keys_R2, positions_R)
    entry_V = torch.arange(first, end, device=keys_R2.device, dtype=torch.int32) * _GOLDEN
    bits_RV = _mix(first_R[:, None] + entry_V, second_R[:, None]).view(torch.uint32)
    # -log(1 - u) keeps its precision for small u, which is where the large noise comes from.
    minus_uniform_RV = bits_RV.float().add_(0.5).mul_(-(2.0**-32))
    return minus_uniform_RV.log1p_().neg_().clamp_(1e-20, 1e20).log_().neg_()


def _words(keys_R2: Tensor, positions_R: Tensor) -> tuple[Tensor, Tensor]:
    """Two 32-bit words that seed the noise of a row."""
    key0_R, key1_R = keys_R2.to(torch.int32).unbind(1)
    positions_R = positions_R.to(torch.int32)
    first_R = _mix(_mix(positions_R ^ key0_R) ^ key1_R)
    second_R = _mix(_mix(positions_R ^ key1_R) ^ key0_R)
    return first_R, second_R


def _mix(x: Tensor, also: Tensor | None = None) -> Tensor:
    """A 32-bit integer hash: two rounds of xor-shift (logical) and multiply (modulo 2**32)."""
    x = _shift(x, 16).bitwise_xor_(x).mul_(0x21F0AAAD)
    if also is not None:
        x ^= also
    x ^= _shift(x, 15)
    x *= 0x735A2D97
    x ^= _shift(x, 15)
    return x


def _shift(x: Tensor, num_bits: int) -> Tensor:
    """Logical shift to the right."""
    return (x >> num_bits).bitwise_and_((1 << 32 - num_bits) - 1)
