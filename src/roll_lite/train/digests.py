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
    about = []
    parts = []
    for name, tensor in tensors:
        about.append([name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)])
        parts.append(_digests_of_pieces(_bytes_of(tensor)))
    if not parts:
        return ""
    top = torch.cat(parts)
    while len(top) > TOP_BYTES:
        top = _digests_of_pieces(top)
    found = hashlib.sha256(json.dumps(about).encode())
    top = top.cpu()
    found.update(_memory(top))
    return found.hexdigest()[:CHARACTERS]


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _digests_of_pieces(flat: Tensor) -> Tensor:
    """Of a tensor of bytes; zeros fill the last piece, for the shape is in the digest too."""
    num_whole = len(flat) // PIECE_BYTES * PIECE_BYTES
    whole, rest = flat[:num_whole], flat[num_whole:]
    if flat.is_cuda:
        from roll_lite.kernels.sha256 import sha256_pieces

        if len(rest):
            filled = flat.new_zeros(PIECE_BYTES)
            filled[: len(rest)] = rest
            return torch.cat([sha256_pieces(part, PIECE_BYTES) for part in (whole, filled)])
        return sha256_pieces(whole, PIECE_BYTES)
    memory = _memory(whole)
    pieces = [memory[at : at + PIECE_BYTES] for at in range(0, num_whole, PIECE_BYTES)]
    if len(rest):
        pieces.append(bytes(_memory(rest)).ljust(PIECE_BYTES, b"\0"))
    joined = bytearray().join([hashlib.sha256(piece).digest() for piece in pieces])
    return torch.frombuffer(joined, dtype=torch.uint8) if joined else flat


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
