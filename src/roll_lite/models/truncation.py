"""Top-k, top-p and min-p: which tokens of a distribution are left.

The engine samples among them. The trainer takes logprobs of the same distribution at its own
weights, so that ratios are those of the policy that samples.
"""

import torch
from torch import Tensor

from roll_lite.models.tensor_parallel import TensorShard
from roll_lite.types import Truncation

CANDIDATES = 1024
"""Vocabulary entries, the largest, of which the trainer and each of several ranks look first."""
ROWS_AT_ONCE = 128
"""Rows of the trainer whose logits are sorted at once."""


def truncate(
    logits_RV: Tensor,
    temperatures_R: Tensor,
    top_k_R: Tensor,
    top_p_R: Tensor,
    min_p_R: Tensor,
    shard: TensorShard | None = None,
) -> Tensor:
    """Logits with -inf for the tokens that top-k, then top-p, then min-p remove.

    The remaining logits are unchanged, so sampling and logprobs use the truncated distribution.
    Tokens as likely as the last remaining one remain too.
    """
    options = (temperatures_R, top_k_R, top_p_R, min_p_R)
    logits_RV = logits_RV.float()
    if shard is None:
        last_R1 = _last_of_all(logits_RV, *options)
    else:
        last_R1 = _last_of_largest(logits_RV, shard, *options)
    return logits_RV.masked_fill(logits_RV < last_R1, -torch.inf)


def last_left(
    logits_RV: Tensor, temperature: float, truncation: Truncation, shard: TensorShard | None
) -> Tensor:
    """(R, 1): the smallest remaining logit of each row, for the trainer."""
    found = [logits_RV.new_empty(0, 1, dtype=torch.float32)]
    for part_CV in logits_RV.split(ROWS_AT_ONCE):
        part_CV = part_CV.float()
        options = (part_CV.new_full((len(part_CV),), x) for x in (temperature, *truncation))
        if shard is None and not part_CV.is_cuda:  # as the engine
            found.append(_last_of_all(part_CV, *options))
        else:
            found.append(_last_of_largest(part_CV, shard, *options))
    return torch.cat(found)


def _last_of_all(logits_RV: Tensor, *options: Tensor) -> Tensor:
    sorted_RV = logits_RV.sort(dim=-1, descending=True).values
    return _last_left(sorted_RV, sorted_RV, *options)


def _last_left(
    sorted_RN: Tensor,
    whole_RV: Tensor,
    temperatures_R: Tensor,
    top_k_R: Tensor,
    top_p_R: Tensor,
    min_p_R: Tensor,
) -> Tensor:
    """The smallest remaining logit, from the largest in order; `whole_RV` holds all of them."""
    rank_N = torch.arange(sorted_RN.shape[1], device=sorted_RN.device)
    scaled_RN = sorted_RN / temperatures_R[:, None]
    has_top_k_R1 = top_k_R[:, None] > 0
    is_left_RN = (rank_N < top_k_R[:, None]) | ~has_top_k_R1
    total_R1 = (whole_RV / temperatures_R[:, None]).logsumexp(-1, keepdim=True)
    in_top_k_R1 = scaled_RN.masked_fill(~is_left_RN, -torch.inf).logsumexp(-1, keepdim=True)
    probs_RN = (scaled_RN - torch.where(has_top_k_R1, in_top_k_R1, total_R1)).exp()
    probs_RN.masked_fill_(~is_left_RN, 0.0)
    # An fp32 sum reaches 1 before the tail; rows without top-p must keep their tail.
    is_left_RN &= (probs_RN.cumsum(-1) - probs_RN < top_p_R[:, None]) | (top_p_R[:, None] >= 1)
    is_left_RN &= probs_RN >= min_p_R[:, None] * probs_RN[:, :1]
    num_left_R1 = is_left_RN.sum(-1, keepdim=True).clamp(min=1)
    return sorted_RN.gather(1, num_left_R1 - 1)


def _last_of_largest(logits_RV: Tensor, shard: TensorShard | None, *options: Tensor) -> Tensor:
    """`_last_left` from the largest entries of each rank, without a sort of the whole vocabulary.

    Where these are too few (a flat distribution, a large top-p), from all entries.
    """
    gather = shard.gather if shard else lambda columns: columns
    most = int(options[1].max()) if len(logits_RV) else 0
    for num_candidates in (min(CANDIDATES, logits_RV.shape[1]), logits_RV.shape[1]):
        largest_RC, order_RC = logits_RV.topk(num_candidates)
        sorted_RN = gather(largest_RC).sort(dim=-1, descending=True).values
        temperature_R1 = options[0][:, None]
        others_RV = logits_RV.scatter(1, order_RC, -torch.inf) / temperature_R1
        others_R1 = others_RV.logsumexp(-1, keepdim=True) * temperature_R1  # as one logit
        whole_RV = torch.cat([sorted_RN, gather(others_R1)], -1)
        last_R1 = _last_left(sorted_RN, whole_RV, *options)
        # Above every rank's smallest candidate the list is complete.
        floor_R1 = gather(largest_RC[:, -1:]).amax(-1, keepdim=True)
        is_complete = most <= num_candidates and bool((last_R1 > floor_R1).all())
        if is_complete or num_candidates == logits_RV.shape[1]:
            return last_R1
    raise AssertionError("all entries are always enough")
