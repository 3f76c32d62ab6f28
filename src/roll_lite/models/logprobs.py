"""From hidden states to logprobs, for training and generation alike.

Logits of a 152k vocabulary take 0.6 MB per token in fp32, so rows go through the head in chunks,
and the backward pass recomputes each chunk's logits.
"""

import torch
from torch import Tensor

from roll_lite.models.ops import linear
from roll_lite.models.tensor_parallel import TensorShard
from roll_lite.models.truncation import last_left
from roll_lite.types import Truncation

CHUNK_ROWS = 512
CUDA_CHUNK_ROWS = 2048  # its logits stay in 16 bits
ALL = Truncation()
NO_ENTRY = -1e20
"""The logit of padding, and of what a truncation removes, in training: its probability is 0, and 0
times it is 0, unlike with -inf."""


def scaled_logits(hidden_RH: Tensor, head_VH: Tensor, temperature: Tensor | float) -> Tensor:
    """fp32 logits over temperature. A tensor of temperatures has one entry per row."""
    return scale(linear(hidden_RH, head_VH), temperature)


def head_logits(
    hidden_RH: Tensor, head_VH: Tensor, shard: TensorShard | None, padding: float
) -> Tensor:
    """Logits of a rank's part of the vocabulary; rows that only pad it have the logit `padding`."""
    logits_RV = linear(hidden_RH, head_VH)
    if shard and shard.num_entries < len(head_VH):
        logits_RV[:, shard.num_entries :] = padding
    return logits_RV


def scale(logits_RV: Tensor, temperature: Tensor | float) -> Tensor:
    logits_RV = logits_RV.float()
    if isinstance(temperature, Tensor):
        return logits_RV / temperature[:, None]
    return logits_RV if temperature == 1.0 else logits_RV / temperature


def pick_logprobs(logits_RV: Tensor, token_ids_R: Tensor) -> Tensor:
    """Logprob of one token per row of fp32 logits."""
    return torch.log_softmax(logits_RV, dim=-1).gather(1, token_ids_R[:, None])[:, 0]


def row_chunks(num_rows: int, size: int = CHUNK_ROWS) -> list[slice]:
    return [slice(i, min(i + size, num_rows)) for i in range(0, num_rows, size)]


def token_logprobs(
    hidden_RH: Tensor,
    head_VH: Tensor,
    token_ids: Tensor,
    temperature: float = 1.0,
    shard: TensorShard | None = None,
    truncation: Truncation = ALL,
    is_whole_R: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """fp32 logprobs of the given tokens, and the entropy of each row's distribution.

    `token_ids` has one token per row, (R,), or several, (R, K). With a shard, the head is this
    rank's part of the vocabulary, and ranks exchange a few numbers per row. With a truncation both
    are of the tokens that it leaves in; any other has the logprob -inf and no gradient. Rows
    where `is_whole_R` are of all tokens.
    """
    options = temperature, shard, truncation, is_whole_R
    return _TokenLogprobs.apply(hidden_RH, head_VH, token_ids, *options)


def top_logprobs(
    hidden_RH: Tensor,
    head_VH: Tensor,
    k: int,
    temperature: float = 1.0,
    shard: TensorShard | None = None,
    num_entries: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Ids and fp32 logprobs, each (R, k), of the likeliest tokens, the likeliest first.

    With `num_entries`, of the distribution over the first `num_entries` of the vocabulary.
    """
    first = shard.rank * len(head_VH) if shard else 0
    if shard:
        num_entries = min(num_entries or shard.config.vocab_size, shard.config.vocab_size)
    found = [hidden_RH.new_empty(0, k, dtype=dtype) for dtype in (torch.int64, torch.float32)]
    parts = [found]
    for rows in _chunks(hidden_RH):
        scaled_CV = scaled_logits(hidden_RH[rows], head_VH, temperature)
        if num_entries is not None:
            scaled_CV[:, max(0, num_entries - first) :] = -torch.inf
        lse_C1 = scaled_CV.logsumexp(-1, keepdim=True)
        best_CK, ids_CK = scaled_CV.topk(min(k, len(head_VH)), dim=-1)
        if shard:
            lse_C1 = shard.gather(lse_C1).logsumexp(-1, keepdim=True)
            best_CK, ids_CK = (shard.gather(x) for x in (best_CK, ids_CK + first))
            best_CK, places_CK = best_CK.topk(k, dim=-1)
            ids_CK = ids_CK.gather(1, places_CK)
        parts.append([ids_CK, best_CK - lse_C1])
    ids_RK, logprobs_RK = (torch.cat(column) for column in zip(*parts, strict=True))
    return ids_RK, logprobs_RK


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_RH, head_VH, token_ids, temperature, shard, truncation, is_whole_R):
        logprobs = hidden_RH.new_empty(token_ids.shape, dtype=torch.float32)
        token_ids_RK, logprobs_RK = (
            x[:, None] if x.ndim == 1 else x for x in (token_ids, logprobs)
        )
        entropy_R = hidden_RH.new_empty(len(token_ids_RK), dtype=torch.float32)
        lse_R = torch.empty_like(entropy_R)
        last_R1 = lse_R[:, None].clone() if truncation.is_on else None
        ctx.first = first = shard.rank * len(head_VH) if shard else 0
        for rows in _chunks(hidden_RH):
            logits_CV = head_logits(hidden_RH[rows], head_VH, shard, NO_ENTRY)
            if truncation.is_on:
                last_R1[rows] = last_left(logits_CV, temperature, truncation, shard)
                if is_whole_R is not None:
                    last_R1[rows] = last_R1[rows].masked_fill(is_whole_R[rows, None], -torch.inf)
                logits_CV.masked_fill_(logits_CV < last_R1[rows], NO_ENTRY)
            found = _logprobs_and_entropy(logits_CV, token_ids_RK[rows] - first, temperature, shard)
            logprobs_RK[rows], entropy_R[rows], lse_R[rows] = found
        is_outside_RK = None
        if truncation.is_on:
            is_outside_RK = logprobs_RK < NO_ENTRY / (2 * temperature)
            logprobs_RK.masked_fill_(is_outside_RK, -torch.inf)
        kept = hidden_RH, head_VH, token_ids_RK, entropy_R, lse_R, last_R1, is_outside_RK
        ctx.save_for_backward(*kept)
        ctx.temperature = temperature
        ctx.shard = shard
        return logprobs, entropy_R

    @staticmethod
    def backward(ctx, grad_logprobs, grad_entropy_R):
        *kept, last_R1, is_outside_RK = ctx.saved_tensors
        hidden_RH, head_VH, token_ids_RK, entropy_R, lse_R = kept
        grad_logprobs_RK = grad_logprobs.view(token_ids_RK.shape)
        if is_outside_RK is not None:
            grad_logprobs_RK = grad_logprobs_RK.masked_fill(is_outside_RK, 0.0)
        grad_hidden = torch.zeros_like(hidden_RH)
        # Chunks are summed in fp32, so a bf16 gradient does not depend on their number.
        grad_head = None
        if ctx.needs_input_grad[1]:
            grad_head = torch.zeros_like(head_VH, dtype=torch.float32)
        for rows in _chunks(hidden_RH):
            hidden_CH = hidden_RH[rows]
            logits_CV = head_logits(hidden_CH, head_VH, ctx.shard, NO_ENTRY)
            if last_R1 is not None:
                logits_CV.masked_fill_(logits_CV < last_R1[rows], NO_ENTRY)
            grad_CV = _grad_logits(
                logits_CV, lse_R[rows], entropy_R[rows], token_ids_RK[rows] - ctx.first,
                grad_logprobs_RK[rows], grad_entropy_R[rows], ctx.temperature,
            )  # fmt: skip
            grad_hidden[rows] = grad_CV @ head_VH
            if grad_head is not None:
                _add_product(grad_head, grad_CV.T, hidden_CH)
        if ctx.shard:
            grad_hidden = ctx.shard.sum_in_place(grad_hidden)
        if grad_head is not None:
            grad_head = grad_head.to(head_VH.dtype)
        return grad_hidden, grad_head, None, None, None, None, None


def _add_product(sum_VH: Tensor, grad_VC: Tensor, hidden_CH: Tensor) -> None:
    """Add a product to an fp32 sum; on CUDA, without first rounding it to 16 bits."""
    if hidden_CH.is_cuda and hidden_CH.dtype in (torch.bfloat16, torch.float16):
        torch.addmm(sum_VH, grad_VC, hidden_CH, out_dtype=torch.float32, out=sum_VH)
    else:
        sum_VH += grad_VC @ hidden_CH


def _chunks(hidden_RH: Tensor) -> list[slice]:
    return row_chunks(len(hidden_RH), CUDA_CHUNK_ROWS if hidden_RH.is_cuda else CHUNK_ROWS)


def _logprobs_and_entropy(
    logits_CV: Tensor, token_ids_CK: Tensor, temperature: float, shard: TensorShard | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Logprobs of tokens, entropies and log-sum-exps, over all ranks."""
    if shard is None and not logits_CV.is_cuda:  # the same bits as the engine's
        scaled_CV = scale(logits_CV, temperature)
        logp_CV = torch.log_softmax(scaled_CV, dim=-1)
        entropy_C = -(logp_CV.exp() * logp_CV).sum(-1)
        return logp_CV.gather(1, token_ids_CK), entropy_C, scaled_CV.logsumexp(-1)
    lse_C, mean_C = _summarize(logits_CV, temperature)
    is_here_CK = (token_ids_CK >= 0) & (token_ids_CK < logits_CV.shape[1])
    chosen_CK = scale(logits_CV.gather(1, token_ids_CK * is_here_CK), temperature)
    if shard:
        lse_CS = shard.gather(lse_C[:, None])
        share_C = (lse_C - lse_CS.logsumexp(-1)).exp()
        lse_C = lse_CS.logsumexp(-1)
        mean_C = shard.sum_in_place(share_C * mean_C)
        chosen_CK = shard.sum_in_place(torch.where(is_here_CK, chosen_CK, 0.0))
    return chosen_CK - lse_C[:, None], lse_C - mean_C, lse_C


def _summarize(logits_CV: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-sum-exp of the scaled logits, and their mean under the softmax."""
    if logits_CV.is_cuda:
        from roll_lite.kernels.logits import summarize

        return summarize(logits_CV, temperature)
    scaled_CV = scale(logits_CV, temperature)
    return scaled_CV.logsumexp(-1), (scaled_CV.softmax(-1) * scaled_CV).sum(-1)


def _grad_logits(
    logits_CV: Tensor,
    lse_C: Tensor,
    entropy_C: Tensor,
    token_ids_CK: Tensor,
    grad_logprobs_CK: Tensor,
    grad_entropy_C: Tensor,
    temperature: float,
) -> Tensor:
    """Gradient of the unscaled logits, which may be overwritten."""
    if logits_CV.is_cuda:
        from roll_lite.kernels.logits import backward_in_place

        return backward_in_place(
            logits_CV, lse_C, entropy_C, token_ids_CK, grad_logprobs_CK, grad_entropy_C, temperature
        )
    logp_CV = scale(logits_CV, temperature) - lse_C[:, None]
    # d logprob / d logit = onehot - p;   d entropy / d logit = -p (log p + entropy)
    weight_CV = (logp_CV + entropy_C[:, None]).mul_(grad_entropy_C[:, None])
    weight_CV.add_(grad_logprobs_CK.sum(1, keepdim=True))
    grad_CV = logp_CV.exp_().mul_(weight_CV).neg_()
    is_here_CK = (token_ids_CK >= 0) & (token_ids_CK < logits_CV.shape[1])
    grad_CV.scatter_add_(1, token_ids_CK * is_here_CK, grad_logprobs_CK * is_here_CK)
    return grad_CV.div_(temperature).to(logits_CV.dtype)
