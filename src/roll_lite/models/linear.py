"""The matrix product that all layers use."""

import torch
import torch.nn.functional as F
from torch import Tensor

ROWS = 64
MANY = 512
_is_same: dict[tuple, bool] = {}


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
    num_many = padded // MANY if padded >= MANY and _are_the_same_bits(weight_HN) else 0
    sizes = [MANY] * num_many + [ROWS] * ((padded - num_many * MANY) // ROWS)
    for x, y in zip(x_TH.split(sizes), out.split(sizes), strict=True):
        torch.mm(x, weight_HN, out=y)
    out = out[:num_rows]
    return out if bias_N is None else out.add_(bias_N)


def _are_the_same_bits(weight_HN: Tensor) -> bool:
    """Whether a block of MANY rows, which is faster, gives what blocks of ROWS do.

    In which order a kernel adds up depends on shapes, not on numbers: one try tells.
    """
    key = weight_HN.dtype, weight_HN.shape, weight_HN.stride(), torch.get_num_threads()
    if key not in _is_same:
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(MANY, len(weight_HN), generator=generator).to(weight_HN.dtype)
        parts = torch.cat([part @ weight_HN for part in x.split(ROWS)])
        _is_same[key] = torch.equal(parts, x @ weight_HN)
    return _is_same[key]
