"""Sampling by counted noise: a token depends on (seed, sample, position), not on who else runs.

Gumbel-max: the argmax of logits plus Gumbel noise is a draw from their softmax. The noise of each
vocabulary entry is a hash of the sequence's key, the position and the entry.
"""

import torch
from torch import Tensor

from roll_lite.models.logprobs import pick_logprobs, scale

_MASK = 0xFFFFFFFF


def noise_key(seed: int, index: int) -> tuple[int, int]:
    """64 bits that name the random numbers of one sample, as two 32-bit words."""
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
) -> tuple[Tensor, Tensor]:
    """Token ids, and fp32 logprobs of them under the scaled logits that they were drawn from."""
    if logits_RV.is_cuda:
        from roll_lite.kernels.sample import sample as fused

        return fused(logits_RV, temperatures_R, is_greedy_R, keys_R2, positions_R)
    logits_RV = scale(logits_RV, temperatures_R)
    noise_RV = gumbel(keys_R2, positions_R, logits_RV.shape[1])
    noise_RV.masked_fill_(is_greedy_R[:, None], 0.0)
    token_ids_R = noise_RV.add_(logits_RV).argmax(-1)
    return token_ids_R, pick_logprobs(logits_RV, token_ids_R)[0]


def truncate(
    logits_RV: Tensor, temperatures_R: Tensor, top_k_R: Tensor, top_p_R: Tensor, min_p_R: Tensor
) -> Tensor:
    """Logits with -inf for the tokens that top-k, then top-p, then min-p leave out.

    The rest keeps its logits, so that sampling and logprobs are of the distribution that is left.
    """
    sorted_RV, order_RV = logits_RV.float().sort(dim=-1, descending=True)
    rank_V = torch.arange(logits_RV.shape[1], device=logits_RV.device)
    is_left = (rank_V < top_k_R[:, None]) | (top_k_R[:, None] == 0)
    scaled_RV = (sorted_RV / temperatures_R[:, None]).masked_fill(~is_left, -torch.inf)
    probs_RV = scaled_RV.softmax(-1)
    # A sum in fp32 reaches 1 before its tail: rows without top-p must not lose that.
    is_left &= (probs_RV.cumsum(-1) - probs_RV < top_p_R[:, None]) | (top_p_R[:, None] >= 1)
    is_left &= probs_RV >= min_p_R[:, None] * probs_RV[:, :1]
    is_left |= rank_V == 0
    left_out_RV = torch.empty_like(is_left).scatter_(1, order_RV, ~is_left)
    return logits_RV.masked_fill(left_out_RV, -torch.inf)


def gumbel(keys_R2: Tensor, positions_R: Tensor, vocab_size: int) -> Tensor:
    """Gumbel noise (R, V), the same numbers on every device. Keys and positions are int64."""
    first_R = _mix(_mix(positions_R ^ keys_R2[:, 0]) ^ keys_R2[:, 1])
    second_R = _mix(_mix(positions_R ^ keys_R2[:, 1]) ^ keys_R2[:, 0])
    entry_V = torch.arange(vocab_size, device=keys_R2.device)
    bits_RV = _mix(_mix(first_R[:, None] ^ entry_V) ^ second_R[:, None])
    # -log(1 - u) keeps its precision for small u, which is where the large noise comes from.
    uniform_RV = bits_RV.float().add_(0.5).mul_(2.0**-32)
    return uniform_RV.neg_().log1p_().neg_().clamp_(1e-20, 1e20).log_().neg_()


def _mix(x: Tensor) -> Tensor:
    """A 32-bit integer hash (two rounds of xor-shift and multiply) held in int64."""
    x = ((x >> 16) ^ x) * 0x21F0AAAD & _MASK
    x = ((x >> 15) ^ x) * 0x735A2D97 & _MASK
    return (x >> 15) ^ x
