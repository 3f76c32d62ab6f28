"""The matrix product that all layers use."""

import torch
import torch.nn.functional as F
from torch import Tensor

ROWS = 64


def linear(x_TH: Tensor, weight_NH: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """F.linear. On a CPU, without gradients, rows go in blocks of one fixed size.

    What a CPU computes for a row depends on how many rows there are; in blocks of one size it does
    not, so that a sample's logprobs are the same bits whoever else runs, prefilled or decoded.
    """
    if x_TH.device.type != "cpu" or torch.is_grad_enabled():
        return F.linear(x_TH, weight_NH, bias_N)
    num_rows = len(x_TH)
    padded = -(-num_rows // ROWS) * ROWS
    if padded > num_rows:
        x_TH = F.pad(x_TH, (0, 0, 0, padded - num_rows))
    out = x_TH.new_empty(padded, len(weight_NH))
    weight_HN = weight_NH.T
    for x, y in zip(x_TH.split(ROWS), out.split(ROWS), strict=True):
        torch.mm(x, weight_HN, out=y)
    out = out[:num_rows]
    return out if bias_N is None else out.add_(bias_N)
