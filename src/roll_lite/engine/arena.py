"""Device memory of an engine, which can be released and mapped again at the same address.

On CUDA the address range is reserved once and the driver maps physical memory into it, so captured
graphs stay valid while the trainer uses the memory in between.
"""

import ctypes
import functools
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor, nn

from roll_lite.checks import UserError
from roll_lite.models.transformer import Transformer

ROW_BYTES = 1024  # parameters begin at multiples of it
WRITE_BYTES = 2**28  # copied together
_DEVICE, _PINNED, _READ_WRITE = 1, 1, 3  # enumerators of the CUDA driver API


class Arena:
    """Zeroed bytes on a device."""

    def __init__(self, num_bytes: int, device: torch.device):
        self.is_held = True
        if device.type == "cuda":
            self._mapping = _Mapping(num_bytes, device)
            self.bytes = torch.as_tensor(self._mapping, device=device)
            self.bytes.zero_()
        else:
            self._mapping = None
            self.bytes = torch.zeros(num_bytes, dtype=torch.uint8, device=device)

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype, offset: int = 0) -> Tensor:
        """A view of this memory at a byte offset."""
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        return self.bytes[offset : offset + num_bytes].view(dtype).view(shape)

    def release(self) -> None:
        """Give the memory back. Tensors in the arena must not be touched until `restore`."""
        if not self.is_held:
            return
        if self._mapping:
            torch.cuda.synchronize(self.bytes.device)
            self._mapping.unmap()
        else:
            self._num_bytes = self.bytes.untyped_storage().nbytes()
            self.bytes.untyped_storage().resize_(0)
        self.is_held = False

    def restore(self) -> None:
        """Take the memory again, zeroed."""
        if self.is_held:
            return
        if self._mapping:
            self._mapping.map()
        else:
            self.bytes.untyped_storage().resize_(self._num_bytes)
        self.bytes.zero_()
        self.is_held = True


_ARENAS: WeakValueDictionary[int, Arena] = WeakValueDictionary()
"""By the identity of their memory."""


@torch.no_grad()
def move_to_arena(model: Transformer) -> list[Arena]:
    """Move the frozen parameters into arenas, one per block, except those that are in one: engines
    of one model share them, and an engine and the trainer on its rank."""
    rest = [p for name, p in model.named_parameters() if not name.startswith("blocks.")]
    found = {}
    for part in (*(block.parameters() for block in model.blocks), rest):
        frozen = [p for p in part if not p.requires_grad]
        if outside := [p for p in frozen if _storage(p) not in _ARENAS]:
            arena = _move(outside, model.embedding.device)
            _ARENAS[_storage(arena.bytes)] = arena
        found |= {_storage(p): _ARENAS[_storage(p)] for p in frozen}
    return [*found.values()]


def held_by(arenas: list[Arena], model: Transformer) -> list[dict[str, Tensor]]:
    """The parameters in each arena, in the order of their addresses."""
    held = {_storage(arena.bytes): {} for arena in arenas}
    for name, p in sorted(model.named_parameters(), key=lambda item: item[1].storage_offset()):
        held[_storage(p)][name] = p.detach()
    return [*held.values()]


def check_fit(parameters: dict[str, Tensor], shapes: dict[str, torch.Size]) -> None:
    """Refuse weights whose names and shapes are not exactly the model's."""
    wanted = {name: parameter.shape for name, parameter in parameters.items()}
    if wanted != shapes:
        differing = sorted(name for name, _ in wanted.items() ^ shapes.items())
        raise UserError(f"new weights do not fit the model: {', '.join(dict.fromkeys(differing))}")


def write(parameters: dict[str, Tensor], weights: Iterable[tuple[str, Tensor]]) -> None:
    """Copy weights in place as they arrive, many at once: a launch for each would take longer."""
    shapes = {}
    targets, sources, num_bytes = [], [], 0
    for name, tensor in weights:
        shapes[name] = tensor.shape
        if name in parameters and parameters[name].shape == tensor.shape:
            targets.append(parameters[name])
            sources.append(tensor)
            num_bytes += tensor.nbytes
        if num_bytes >= WRITE_BYTES:
            torch._foreach_copy_(targets, sources)
            targets, sources, num_bytes = [], [], 0
    if targets:
        torch._foreach_copy_(targets, sources)
    check_fit(parameters, shapes)


def _move(parameters: list[nn.Parameter], device: torch.device) -> Arena:
    sizes = [-(-p.nbytes // ROW_BYTES) * ROW_BYTES for p in parameters]
    starts = np.cumsum([0, *sizes]).tolist()
    arena = Arena(starts[-1], device)
    for parameter, start in zip(parameters, starts[:-1], strict=True):
        view = arena.tensor(tuple(parameter.shape), parameter.dtype, start)
        view.copy_(parameter)
        parameter.data = view
    return arena


def _storage(tensor: Tensor) -> int:
    """Identifies the memory that a tensor is a view of."""
    return tensor.untyped_storage()._cdata


def cache_shape(model: Transformer, num_pages: int, page_size: int) -> tuple[int, ...]:
    config = model.local_config
    return config.num_layers, 2, num_pages, page_size, config.num_kv_heads, config.head_dim


def pages_within(kv_cache_gib: float, model: Transformer, page_size: int, beside: int = 0) -> int:
    """Number of pages in a KV cache of this size; `beside` is what a page has beside keys and
    values, in bytes."""
    page_bytes = torch.Size(cache_shape(model, 1, page_size)).numel()
    page_bytes = page_bytes * model.embedding.element_size() + beside
    num_pages = int(kv_cache_gib * 2**30) // page_bytes
    if num_pages < 1:
        raise UserError(
            f"kv_cache_gib={kv_cache_gib} is less than one page of {page_bytes} bytes; raise it"
        )
    free = free_bytes(model.embedding.device)
    if num_pages * page_bytes > free:
        raise UserError(
            f"kv_cache_gib={kv_cache_gib} is more than the {free / 2**30:.1f} GiB that are free on "
            f"{model.embedding.device}; lower it"
        )
    return num_pages


def free_bytes(device: torch.device) -> int:
    """What can still be allocated on a GPU or, on a CPU, in the machine's memory."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return free + kept
    with suppress(OSError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        found = next(line for line in lines if line.startswith("MemAvailable:"))
        return int(found.split()[1]) << 10
    return sys.maxsize  # not Linux


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Properties(ctypes.Structure):
    """CUmemAllocationProp"""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("win32", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class _Access(ctypes.Structure):
    """CUmemAccessDesc"""

    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


class _Mapping:
    """A reserved address range, with physical memory mapped into it or not."""

    def __init__(self, num_bytes: int, device: torch.device):
        torch.cuda.current_stream(device)  # creates a context
        index = torch.cuda.current_device() if device.index is None else device.index
        self._location = _Location(_DEVICE, index)
        self._properties = _Properties(type=_PINNED, location=self._location)
        granularity = ctypes.c_size_t()
        _driver("cuMemGetAllocationGranularity", ctypes.byref(granularity), self._property_ref, 0)
        self._size = -(-num_bytes // granularity.value) * granularity.value
        self._address = ctypes.c_uint64()
        _driver(
            "cuMemAddressReserve", ctypes.byref(self._address), ctypes.c_size_t(self._size),
            ctypes.c_size_t(0), ctypes.c_uint64(0), ctypes.c_uint64(0),
        )  # fmt: skip
        self._is_mapped = False
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (self._address.value, False),
            "version": 2,
        }
        self.map()

    @property
    def _property_ref(self):
        return ctypes.byref(self._properties)

    def map(self) -> None:
        size = ctypes.c_size_t(self._size)
        handle = ctypes.c_uint64()
        torch.cuda.empty_cache()  # memory cached by torch is not free for the driver
        _driver("cuMemCreate", ctypes.byref(handle), size, self._property_ref, ctypes.c_uint64(0))
        try:
            _driver("cuMemMap", self._address, size, ctypes.c_size_t(0), handle, ctypes.c_uint64(0))
        finally:
            _driver("cuMemRelease", handle)  # now only the mapping keeps it alive
        self._is_mapped = True
        access = _Access(self._location, _READ_WRITE)
        try:
            _driver("cuMemSetAccess", self._address, size, ctypes.byref(access), ctypes.c_size_t(1))
        except RuntimeError:
            self.unmap()
            raise

    def unmap(self) -> None:
        _driver("cuMemUnmap", self._address, ctypes.c_size_t(self._size))
        self._is_mapped = False

    def __del__(self):
        try:
            if self._is_mapped:
                torch.cuda.synchronize()
                self.unmap()
            _driver("cuMemAddressFree", self._address, ctypes.c_size_t(self._size))
        except (AttributeError, RuntimeError, TypeError):  # half built, or at exit
            pass


@functools.cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _driver(name: str, *arguments) -> None:
    if error := getattr(_library(), name)(*arguments):
        text = ctypes.c_char_p()
        _library().cuGetErrorString(error, ctypes.byref(text))
        free, total = torch.cuda.mem_get_info()
        raise RuntimeError(
            f"{name} failed with {error} ({(text.value or b'?').decode()}); "
            f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB are free on the device"
        )
