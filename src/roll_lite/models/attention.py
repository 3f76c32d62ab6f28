"""Attention over packed sequences, for training.

A block calls `attend(layer, projected)`; the engine's paged attention has the same signature.
"""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from roll_lite.models.ops import norm_and_rotate


@dataclass(frozen=True, slots=True)
class Projected:
    """Queries, keys and values of a layer, before q/k norm and rotation.

    Attention backends may fuse these steps; `rotated` is the reference.
    """

    qkv_TKGD: Tensor
    """(T, K, G + 2, D): the queries of each kv head, then its key, then its value."""
    cos_TD: Tensor
    sin_TD: Tensor
    q_norm: nn.Module | None
    k_norm: nn.Module | None

    @property
    def norms(self) -> tuple[Tensor | None, Tensor | None, float]:
        """Weights of the q and k norms, if the model has them, and their epsilon."""
        if self.q_norm is None:
            return None, None, 0.0
        return self.q_norm.spread_weight, self.k_norm.spread_weight, self.q_norm.eps

    def rotated(self) -> tuple[Tensor, Tensor, Tensor]:
        """q (T, heads, D), k and v (T, K, D)."""
        return norm_and_rotate(self.qkv_TKGD, self.cos_TD, self.sin_TD, *self.norms)


Attend = Callable[[int, Projected], Tensor]
"""(layer, projected) -> (T, heads, D)."""


@dataclass(frozen=True, slots=True)
class PackedAttention:
    """Causal attention within each of several sequences, packed end to end without padding.

    Queries may be the last tokens of sequences whose keys are given whole.
    """

    cu_seqlens: Tensor
    """int32, (sequences + 1,): where each sequence starts, then the total."""
    max_seqlen: int
    cu_keys: Tensor | None = None
    """The same of the keys, where they are more than the queries."""
    max_keys: int | None = None

    def __call__(self, layer: int, projected: Projected) -> Tensor:
        return self.attend(*projected.rotated())

    def attend(self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        if q_THD.is_cuda and q_THD.dtype in (torch.bfloat16, torch.float16):
            return self._varlen(q_THD, k_TKD, v_TKD)
        return self._sdpa(q_THD, k_TKD, v_TKD)

    def _varlen(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        cu_keys = self.cu_seqlens if self.cu_keys is None else self.cu_keys
        max_keys = self.max_seqlen if self.max_keys is None else self.max_keys
        return _varlen_kernel()(
            q, k.contiguous(), v.contiguous(), self.cu_seqlens, cu_keys, self.max_seqlen, max_keys
        )

    def _sdpa(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Sequences of similar length together, so that little is padded."""
        if self.cu_keys is not None:
            return self._sdpa_one_by_one(q, k, v)
        starts = self.cu_seqlens.tolist()
        lengths = [end - start for start, end in pairwise(starts)]
        if max(lengths) <= 2 * min(lengths):
            return _padded_sdpa(q, k, v, lengths)
        out = torch.empty_like(q)
        for members in _similar(lengths):
            tokens = torch.cat(
                [torch.arange(starts[i], starts[i + 1], device=q.device) for i in members]
            )
            out[tokens] = _padded_sdpa(
                q[tokens], k[tokens], v[tokens], [lengths[i] for i in members]
            )
        return out

    def _sdpa_one_by_one(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The last query of a sequence sees its last key."""
        lengths = self.cu_seqlens.diff().tolist()
        key_lengths = self.cu_keys.diff().tolist()
        parts = []
        for q_QHD, k_SKD, v_SKD in zip(
            q.split(lengths), k.split(key_lengths), v.split(key_lengths), strict=True
        ):
            sees_QS = torch.ones(len(q_QHD), len(k_SKD), dtype=torch.bool, device=q.device)
            out = F.scaled_dot_product_attention(
                *(x.transpose(0, 1) for x in (q_QHD, k_SKD, v_SKD)),
                attn_mask=sees_QS.tril(len(k_SKD) - len(q_QHD)),
                enable_gqa=q.shape[1] != k.shape[1],
            )
            parts.append(out.transpose(0, 1))
        return torch.cat(parts)


def _similar(lengths: list[int]) -> list[list[int]]:
    """Indices in classes whose longest member is at most twice the shortest."""
    classes: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lengths.__getitem__):
        if not classes or lengths[i] > 2 * lengths[classes[-1][0]]:
            classes.append([])
        classes[-1].append(i)
    return classes


def _padded_sdpa(q: Tensor, k: Tensor, v: Tensor, lengths: list[int]) -> Tensor:
    """Pads on the right, which causal attention never sees."""
    column = torch.arange(max(lengths), device=q.device)
    is_token_BL = column < torch.tensor(lengths, device=q.device)[:, None]

    def pad(x: Tensor) -> Tensor:
        padded = x.new_zeros(*is_token_BL.shape, *x.shape[1:])
        padded[is_token_BL] = x
        return padded.transpose(1, 2)

    enable_gqa = q.shape[1] != k.shape[1]
    out = F.scaled_dot_product_attention(
        pad(q), pad(k), pad(v), is_causal=True, enable_gqa=enable_gqa
    )
    return out.transpose(1, 2)[is_token_BL]


@functools.cache
def _varlen_kernel() -> Callable[..., Tensor]:
    """flash-attn where it is installed (extra `[flash]`), else torch's own kernel."""
    try:
        from flash_attn import flash_attn_varlen_func
    except ImportError:
        from torch.nn.attention.varlen import varlen_attn

        # torch 2.11 accepts grouped heads as they are; later versions need enable_gqa.
        known = inspect.signature(varlen_attn).parameters
        grouped = {"enable_gqa": True} if "enable_gqa" in known else {}
        return functools.partial(varlen_attn, window_size=(-1, 0), **grouped)
    return functools.partial(flash_attn_varlen_func, causal=True)
