"""A trainer's memory, given to others while it rests."""

import torch
from torch import Tensor


class Offload:
    """Moves tensors of a CUDA device to host memory and back.

    A tensor's storage is emptied and later filled again, so that parameters, their shards and
    whatever else refers to them stay the same objects. On a CPU there is nothing to give.
    """

    def __init__(self, tensors: list[Tensor]):
        self._tensors = [tensor for tensor in tensors if tensor.is_cuda]
        self._sizes = [tensor.untyped_storage().nbytes() for tensor in self._tensors]
        self._kept: list[Tensor] = []
        self.is_out = False

    def out(self) -> None:
        if self.is_out:
            return
        if not self._kept:  # page-locked once: that takes longer than the copies
            self._kept = [torch.empty_like(t, device="cpu", pin_memory=True) for t in self._tensors]
        for tensor, kept in zip(self._tensors, self._kept, strict=True):
            kept.copy_(tensor, non_blocking=True)
        if self._tensors:
            torch.cuda.synchronize()
        for tensor in self._tensors:
            tensor.untyped_storage().resize_(0)
        if self._tensors:
            torch.cuda.empty_cache()
        self.is_out = True

    def back(self) -> None:
        if not self.is_out:
            return
        for tensor, size, kept in zip(self._tensors, self._sizes, self._kept, strict=True):
            tensor.untyped_storage().resize_(size)
            tensor.copy_(kept, non_blocking=True)
        self.is_out = False
