"""Digests of tensors, the same on every device: SHA-256 of pieces, and of those digests again.

They are computed where the tensors are. A GPU takes a kernel, and sends a few kilobytes.
"""

import ctypes
import hashlib
import json
from collections.abc import Iterable

import torch
from torch import Tensor

PIECE_BYTES = 8192
TOP_BYTES = 2**16
"""Digests of pieces are pieces again, until there are no more than these."""
CHARACTERS = 32
"""128 bits of SHA-256."""


def digest_tensors(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Of their names, types, shapes and bits, in this order."""
    about, flats = [], []
    for name, tensor in tensors:
        about.append([name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)])
        flats.append(_bytes_of(tensor))
    if not flats:
        return ""
    top = _digests_of_pieces(flats)
    while len(top) > TOP_BYTES:
        top = _digests_of_pieces([top])
    found = hashlib.sha256(json.dumps(about).encode())
    top = top.cpu()
    found.update(_memory(top))
    return found.hexdigest()[:CHARACTERS]


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _digests_of_pieces(flats: list[Tensor]) -> Tensor:
    """Of tensors of bytes; zeros fill the last piece of each, for shapes are in the digest too."""
    if flats[0].is_cuda:
        from roll_lite.kernels.sha256 import sha256_pieces

        return sha256_pieces(flats, PIECE_BYTES)
    joined = bytearray()
    for flat in flats:
        num_whole = len(flat) // PIECE_BYTES * PIECE_BYTES
        memory = _memory(flat)
        for at in range(0, num_whole, PIECE_BYTES):
            joined += hashlib.sha256(memory[at : at + PIECE_BYTES]).digest()
        if num_whole < len(flat):
            rest = bytes(memory[num_whole:]).ljust(PIECE_BYTES, b"\0")
            joined += hashlib.sha256(rest).digest()
    return torch.frombuffer(joined, dtype=torch.uint8) if joined else flats[0]


def _memory(flat: Tensor) -> memoryview:
    """Of a tensor that must outlive it. Not by numpy(): torch could not free the storage to offload
    it then."""
    if not len(flat):
        return memoryview(b"")
    return memoryview((ctypes.c_char * len(flat)).from_address(flat.data_ptr())).cast("B")


class RunningDigest:
    """Of tensors that come one after the other, such as the micro-batches of a step, by name."""

    def __init__(self):
        self._found: dict[str, hashlib._Hash] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        """A tensor in host memory."""
        found = self._found.setdefault(name, hashlib.sha256())
        found.update(f"{tensor.dtype}{list(tensor.shape)}".encode())
        flat = _bytes_of(tensor)
        found.update(_memory(flat))

    def add_text(self, name: str, text: str) -> None:
        self._found.setdefault(name, hashlib.sha256()).update(text.encode())

    def take(self) -> dict[str, str]:
        """What was found since the last call."""
        found, self._found = self._found, {}
        return {name: digest.hexdigest()[:CHARACTERS] for name, digest in found.items()}
