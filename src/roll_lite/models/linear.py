"""The matrix product that all layers use."""

import torch
import torch.nn.functional as F
from torch import Tensor

ROWS = 64
FEW = (16, 32)
MANY = 512
_is_same: dict[tuple, bool] = {}


def linear(x_TH: Tensor, weight_NH: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """F.linear. On a CPU, without gradients, rows go in blocks that give the same bits.

    What a CPU computes for a row may depend on how many rows there are; in blocks of one size it
    does not, so that a sample's logprobs are the same bits whoever else runs, prefilled or decoded.
    """
    if x_TH.device.type != "cpu" or torch.is_grad_enabled():
        return F.linear(x_TH, weight_NH, bias_N)
    num_rows, weight_HN = len(x_TH), weight_NH.T
    sizes = _block_sizes(num_rows, weight_HN)
    padded = sum(sizes)
    if padded > num_rows:
        x_TH = F.pad(x_TH, (0, 0, 0, padded - num_rows))
    out = x_TH.new_empty(padded, len(weight_NH))
    for x, y in zip(x_TH.split(sizes), out.split(sizes), strict=True):
        torch.mm(x, weight_HN, out=y)
    out = out[:num_rows]
    return out if bias_N is None else out.add_(bias_N)


def _block_sizes(num_rows: int, weight_HN: Tensor) -> list[int]:
    """Blocks of ROWS rows, or where the bits are the same a few of MANY, and a small last one."""
    num_many = 0
    if num_rows >= MANY and _are_the_same_bits(MANY, weight_HN):
        num_many, num_rows = divmod(num_rows, MANY)
    num_blocks, rest = divmod(num_rows, ROWS)
    sizes = [MANY] * num_many + [ROWS] * num_blocks
    if rest:
        fits = (n for n in FEW if n >= rest and _are_the_same_bits(n, weight_HN))
        sizes.append(next(fits, ROWS))
    return sizes


def _are_the_same_bits(size: int, weight_HN: Tensor) -> bool:
    """Whether blocks of so many rows give what blocks of ROWS do.

    In which order a kernel adds up depends on shapes, not on numbers: one try tells. Its products
    cancel, so that the order shows in what is left, in 16 bits too.
    """
    key = size, weight_HN.dtype, weight_HN.shape, weight_HN.stride(), torch.get_num_threads()
    if key not in _is_same:
        generator = torch.Generator().manual_seed(0)
        half = len(weight_HN) // 2
        x_RH = torch.zeros(max(size, ROWS), len(weight_HN), dtype=weight_HN.dtype)
        x_RH[:, :half] = torch.randn(len(x_RH), half, generator=generator)
        x_RH[:, half : 2 * half] = x_RH[:, :half]
        column_H1 = torch.randn(len(weight_HN), 1, generator=generator)
        column_H1[half : 2 * half] = -column_H1[:half]
        tried_HN = torch.empty_like(weight_HN).copy_(column_H1)  # strides are kept
        blocks, others = (
            torch.cat([part @ tried_HN for part in x_RH.split(n)]) for n in (ROWS, size)
        )
        _is_same[key] = torch.equal(blocks, others)
    return _is_same[key]
