"""Pointwise parts of a decoding step, fused."""

import torch
import triton
import triton.language as tl
from torch import Tensor


def silu_mul(gate_up_TF: Tensor) -> Tensor:
    """silu(first half) * second half of the last dimension."""
    T, F2 = gate_up_TF.shape
    out = torch.empty(T, F2 // 2, dtype=gate_up_TF.dtype, device=gate_up_TF.device)
    block = min(1024, triton.next_power_of_2(F2 // 2))
    _silu_mul[(T, triton.cdiv(F2 // 2, block))](gate_up_TF, out, F2 // 2, BLOCK=block, num_warps=4)
    return out


@triton.jit
def _silu_mul(gate_up_ptr, out_ptr, F, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = f < F
    gate = tl.load(gate_up_ptr + token * 2 * F + f, mask=ok).to(tl.float32)
    up = tl.load(gate_up_ptr + token * 2 * F + F + f, mask=ok).to(tl.float32)
    # silu is rounded before the product, as the same two steps in torch would.
    silu = (gate / (1 + tl.exp(-gate))).to(out_ptr.dtype.element_ty).to(tl.float32)
    tl.store(out_ptr + token * F + f, (silu * up).to(out_ptr.dtype.element_ty), mask=ok)
