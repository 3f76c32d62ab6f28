"""Moves the tensors of a model to host memory and back, while the engines use the device."""

from collections.abc import Iterable

import torch
from torch import Tensor

SLAB_BYTES = 2**30
"""Host memory is taken in slabs: torch rounds pinned allocations up to powers of two."""
ALIGNMENT = 256


class Offload:
    """Storages are emptied and refilled in place, so parameters, FSDP's shards and views of them
    stay the same objects, and only their addresses change. On CUDA the host memory is pinned, and
    is taken once. On a CPU the same happens with plain memory, which saves nothing.
    """

    def __init__(self, changing: Iterable[Tensor], fixed: Iterable[Tensor] = ()):
        """`fixed` tensors, such as frozen weights, are copied to the host once."""
        changing = list(changing)
        fixed = list(fixed)
        self.is_out = False
        self._device = (changing + fixed)[0].device
        self._held = {_key(tensor): _storage_bytes(tensor) for tensor in changing + fixed}
        self._fixed = {_key(tensor) for tensor in fixed}
        self._host: dict[int, Tensor] = {}

    def out(self) -> None:
        if self.is_out:
            return
        copied = self._held.keys() - self._fixed
        if not self._host:  # pinned once: pinning takes longer than the copies
            self._host, copied = _host_copies(self._held, self._device), self._held.keys()
        for key in copied:
            self._host[key].copy_(self._held[key], non_blocking=True)
        self._wait()
        for held in self._held.values():
            held.untyped_storage().resize_(0)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # the engine's arenas need free memory of the driver
        self.is_out = True

    def back(self) -> None:
        if not self.is_out:
            return
        for key, held in self._held.items():
            held.untyped_storage().resize_(held.numel())
            held.copy_(self._host[key], non_blocking=True)
        self._wait()
        self.is_out = False

    def _wait(self) -> None:
        """Wait for all copies at once."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def host_copy(self, tensor: Tensor) -> Tensor:
        """The copy of an offloaded tensor, or of a view of one; it may be written to. A tensor that
        stays on the device is its own."""
        if _key(tensor) not in self._host:
            return tensor
        held = self._host[_key(tensor)].view(tensor.dtype)
        start = held.storage_offset() + tensor.storage_offset()
        return held.as_strided(tensor.shape, tensor.stride(), start)


def _key(tensor: Tensor) -> int:
    """Identifies the tensor's storage, which may be empty at the time."""
    return tensor.untyped_storage()._cdata


def _storage_bytes(tensor: Tensor) -> Tensor:
    """A view of the whole storage, with the padding of an uneven shard."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def _host_copies(held: dict[int, Tensor], device: torch.device) -> dict[int, Tensor]:
    """Host memory for each storage, several in a slab: the largest first, each where it fits."""
    sizes = {key: -(-tensor.numel() // ALIGNMENT) * ALIGNMENT for key, tensor in held.items()}
    largest = max(sizes.values())
    slab = max(_power_of_two(largest), min(SLAB_BYTES, _power_of_two(sum(sizes.values()))))
    slabs: list[Tensor] = []
    used: list[int] = []  # bytes of each slab
    copies: dict[int, Tensor] = {}
    for key in sorted(sizes, key=sizes.get, reverse=True):
        found = next((i for i, end in enumerate(used) if end + sizes[key] <= slab), len(slabs))
        if found == len(slabs):
            is_cuda = device.type == "cuda"
            slabs.append(torch.empty(slab, dtype=torch.uint8, pin_memory=is_cuda))
            used.append(0)
        copies[key] = slabs[found][used[found] : used[found] + held[key].numel()]
        used[found] += sizes[key]
    return copies


def _power_of_two(number: int) -> int:
    """The smallest power of two that is not less."""
    return 1 << max(0, number - 1).bit_length()
