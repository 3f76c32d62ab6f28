"""From hidden states to logprobs: the one path that training and generation share.

All logits of a batch would cost megabytes a token (a 152k vocabulary in fp32), so rows go through
the head in chunks, and the backward pass computes each chunk's logits again.
"""

import torch
from torch import Tensor

from roll_lite.models.linear import linear

CHUNK_ROWS = 512


def scaled_logits(hidden_RH: Tensor, head_VH: Tensor, temperature: Tensor | float) -> Tensor:
    """fp32 logits over temperature. A tensor of temperatures has one entry per row."""
    return scale(linear(hidden_RH, head_VH), temperature)


def scale(logits_RV: Tensor, temperature: Tensor | float) -> Tensor:
    logits_RV = logits_RV.float()
    if isinstance(temperature, Tensor):
        return logits_RV / temperature[:, None]
    return logits_RV if temperature == 1.0 else logits_RV / temperature


def pick_logprobs(logits_RV: Tensor, token_ids_R: Tensor) -> tuple[Tensor, Tensor]:
    """Logprob of one token per row of fp32 logits, and all logprobs."""
    logp_RV = torch.log_softmax(logits_RV, dim=-1)
    return logp_RV.gather(1, token_ids_R[:, None])[:, 0], logp_RV


def row_chunks(num_rows: int) -> list[slice]:
    return [slice(i, min(i + CHUNK_ROWS, num_rows)) for i in range(0, num_rows, CHUNK_ROWS)]


def token_logprobs(
    hidden_RH: Tensor, head_VH: Tensor, token_ids_R: Tensor, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """fp32 logprobs of the given tokens, and the entropy of each row's distribution."""
    return _TokenLogprobs.apply(hidden_RH, head_VH, token_ids_R, temperature)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_RH, head_VH, token_ids_R, temperature):
        logprobs_R = hidden_RH.new_empty(len(token_ids_R), dtype=torch.float32)
        entropy_R = torch.empty_like(logprobs_R)
        for rows in row_chunks(len(token_ids_R)):
            logits_CV = scaled_logits(hidden_RH[rows], head_VH, temperature)
            logprobs_R[rows], logp_CV = pick_logprobs(logits_CV, token_ids_R[rows])
            del logits_CV
            entropy_R[rows] = logp_CV.exp().mul_(logp_CV).sum(-1).neg_()
        ctx.save_for_backward(hidden_RH, head_VH, token_ids_R, entropy_R)
        ctx.temperature = temperature
        return logprobs_R, entropy_R

    @staticmethod
    def backward(ctx, grad_logprobs_R, grad_entropy_R):
        hidden_RH, head_VH, token_ids_R, entropy_R = ctx.saved_tensors
        grad_hidden = torch.zeros_like(hidden_RH)
        # Chunks of a bf16 head are summed in fp32, so the gradient does not depend on their number.
        grad_head = torch.zeros_like(head_VH, dtype=torch.float32)
        for rows in row_chunks(len(token_ids_R)):
            hidden_CH = hidden_RH[rows]
            logp_CV = torch.log_softmax(scaled_logits(hidden_CH, head_VH, ctx.temperature), dim=-1)
            # d logprob / d logit = onehot - p;   d entropy / d logit = -p (log p + entropy)
            weight_CV = logp_CV + entropy_R[rows, None]
            weight_CV.mul_(grad_entropy_R[rows, None]).add_(grad_logprobs_R[rows, None])
            grad_CV = logp_CV.exp_().mul_(weight_CV).neg_()
            grad_CV.scatter_add_(1, token_ids_R[rows, None], grad_logprobs_R[rows, None])
            grad_CV = grad_CV.div_(ctx.temperature).to(head_VH.dtype)
            grad_hidden[rows] = grad_CV @ head_VH
            grad_head += grad_CV.T @ hidden_CH
        return grad_hidden, grad_head.to(head_VH.dtype), None, None
