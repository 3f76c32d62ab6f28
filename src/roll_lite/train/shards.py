"""The tensors of a checkpoint: one safetensors file per rank.

A rank writes its rectangle of every tensor, and ranks of any other layout read the parts they need.
The files hold tensors only; a `ShardRecord` says where each lies in the whole tensor.
"""

from __future__ import annotations

import os
import shutil
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from safetensors import SafetensorError, safe_open

from roll_lite.checks import UserError
from roll_lite.models.tensor_files import content, dtype_name, header
from roll_lite.progress import ProgressBar

if TYPE_CHECKING:
    from torch import Tensor


class DamagedError(UserError):
    """A file of a checkpoint differs from what was written."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A rank's rectangle of a tensor, to write or to fill."""

    tensor: Tensor
    offsets: tuple[int, ...]
    """Where the rectangle begins in the whole tensor."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""

    def copy(self) -> Piece:
        """A piece with a copy of the tensor in the host's memory."""
        tensor = self.tensor.new_empty(self.tensor.shape, device="cpu")
        return Piece(tensor.copy_(self.tensor), self.offsets, self.shape)

    def __post_init__(self):
        local = tuple(self.tensor.shape)
        if not len(local) == len(self.offsets) == len(self.shape) or any(
            offset < 0 or offset + size > whole
            for offset, size, whole in zip(self.offsets, local, self.shape, strict=True)
        ):
            raise UserError(
                f"a piece of shape {local} at offsets={tuple(self.offsets)} does not lie within "
                f"shape={tuple(self.shape)}; give offsets and shape of the whole tensor"
            )

    @staticmethod
    def whole(tensor: Tensor) -> Piece:
        """A tensor that one rank holds whole."""
        return Piece(tensor, (0,) * tensor.dim(), tuple(tensor.shape))


class StoredPiece(NamedTuple):
    """Where the part of a tensor in a file belongs."""

    offsets: tuple[int, ...]
    local_shape: tuple[int, ...]
    whole_shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class ShardRecord:
    """A file of a checkpoint, as its writer describes it."""

    file: str
    size: int
    crc32: int
    pieces: dict[str, StoredPiece]


def write_shard(
    folder: str | Path,
    rank: int,
    pieces: dict[str, Piece],
    *,
    of: str = "shard",
    shows_progress: bool = True,
) -> ShardRecord:
    """Write a rank's file. Pieces on a device are copied to the CPU one at a time."""
    # Wide dtypes first, as safetensors orders them, so that every tensor is aligned.
    ordered = sorted(pieces.items(), key=lambda item: (-item[1].tensor.itemsize, item[0]))
    held = {name: piece for name, piece in ordered if piece.tensor.numel()}
    path = Path(folder) / f"{of}-{rank:05d}.safetensors"
    head = header({name: piece.tensor for name, piece in held.items()})
    size = len(head) + sum(piece.tensor.nbytes for piece in held.values())
    parts = chain([memoryview(head)], (content(piece.tensor) for piece in held.values()))
    return ShardRecord(
        file=path.name,
        size=size,
        crc32=write_durably(path, parts, size, shows_progress),
        pieces={name: _stored(piece) for name, piece in held.items()},
    )


def write_durably(
    path: Path, parts: Iterable[memoryview], size: int, shows_progress: bool = True
) -> int:
    """Write a file of `size` bytes, wait until it is on disk, and return its crc32."""
    crc32 = 0
    bar = ProgressBar(size, "checkpoint", "bytes", enabled=shows_progress)
    with bar, path.open("wb", buffering=0) as file, ThreadPoolExecutor(1) as beside:
        try:
            for part in parts:
                bar.advance(len(part))
                checksum = beside.submit(zlib.crc32, part, crc32)
                while part:  # a disk that fills up accepts a part first
                    part = part[file.write(part) :]
                crc32 = checksum.result()
            os.fsync(file.fileno())
        except OSError as error:
            path.unlink(missing_ok=True)
            free = shutil.disk_usage(path.parent).free
            raise OSError(
                error.errno,
                f"{path} needs {size} bytes and could not be written: {error.strerror} "
                f"({free} bytes are free without it)",
            ) from error
    return crc32


def read_shards(
    folder: str | Path, records: Sequence[ShardRecord], wanted: dict[str, Piece]
) -> None:
    """Fill the wanted pieces, reading only the slices that overlap them."""
    _check_wanted(folder, records, wanted)
    num_unfilled = {name: piece.tensor.numel() for name, piece in wanted.items()}
    num_bytes = sum(piece.tensor.nbytes for piece in wanted.values())
    with ProgressBar(num_bytes, "reading the checkpoint", "bytes") as bar:
        _fill(folder, records, wanted, num_unfilled, bar)
    if incomplete := [name for name, count in num_unfilled.items() if count]:
        raise DamagedError(f"{folder} does not cover the whole of {_some(incomplete)}")


def _fill(
    folder: str | Path,
    records: Sequence[ShardRecord],
    wanted: dict[str, Piece],
    num_unfilled: dict[str, int],
    bar: ProgressBar,
) -> None:
    for record in records:
        overlaps = [
            (name, overlap)
            for name, stored in record.pieces.items()
            if name in wanted and (overlap := _overlap(stored, wanted[name]))
        ]
        if not overlaps:
            continue
        with _open(Path(folder) / record.file) as file:
            for name, (source, target) in overlaps:
                part = file.get_slice(name)[source]
                wanted[name].tensor.detach()[target].copy_(part)
                num_unfilled[name] -= part.numel()
                bar.advance(part.nbytes)


def whole_tensors(records: Sequence[ShardRecord]) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and dtype of every tensor in the files."""
    return {
        name: (stored.whole_shape, stored.dtype)
        for record in records
        for name, stored in record.pieces.items()
    }


def check_cover(records: Sequence[ShardRecord]) -> None:
    """Refuse pieces that do not cover every tensor exactly once."""
    wholes = whole_tensors(records)
    seen: dict[str, set] = {name: set() for name in wholes}
    num_covered = dict.fromkeys(wholes, 0)
    counts = Counter(record.file for record in records)
    wrong = [f"{file} was written {n} times" for file, n in counts.items() if n > 1]
    for record in records:
        for name, stored in record.pieces.items():
            if (stored.whole_shape, stored.dtype) != wholes[name]:
                wrong.append(
                    f"{name} is {stored[2:]} in {record.file} and {wholes[name]} elsewhere"
                )
            if stored.offsets in seen[name]:
                wrong.append(f"{name} at {stored.offsets} is written by more than one rank")
            seen[name].add(stored.offsets)
            num_covered[name] += prod(stored.local_shape)
    wrong += [
        f"{name} has {count} of {prod(wholes[name][0])} elements"
        for name, count in num_covered.items()
        if count != prod(wholes[name][0])
    ]
    if wrong:
        raise UserError(
            f"the pieces of all ranks do not cover every tensor exactly once: {_some(wrong)}"
        )


def _stored(piece: Piece) -> StoredPiece:
    return StoredPiece(
        tuple(piece.offsets),
        tuple(piece.tensor.shape),
        tuple(piece.shape),
        dtype_name(piece.tensor),
    )


def _overlap(stored: StoredPiece, wanted: Piece) -> tuple[tuple, tuple] | None:
    """The slices of both that cover the same part of the tensor."""
    source = []
    target = []
    for stored_at, stored_size, wanted_at, wanted_size in zip(
        stored.offsets, stored.local_shape, wanted.offsets, wanted.tensor.shape, strict=True
    ):
        start = max(stored_at, wanted_at)
        stop = min(stored_at + stored_size, wanted_at + wanted_size)
        if start >= stop:
            return None
        source.append(slice(start - stored_at, stop - stored_at))
        target.append(slice(start - wanted_at, stop - wanted_at))
    return tuple(source), tuple(target)


def _check_wanted(
    folder: str | Path, records: Sequence[ShardRecord], wanted: dict[str, Piece]
) -> None:
    wholes = whole_tensors(records)
    wrong = []
    for name, piece in wanted.items():
        expected = tuple(piece.shape), dtype_name(piece.tensor)
        if name in wholes and wholes[name] != expected:
            (shape, dtype), (our_shape, our_dtype) = wholes[name], expected
            wrong.append(f"{name} is {shape} {dtype}, expected {our_shape} {our_dtype}")
        elif name not in wholes and prod(piece.shape):  # tensors without elements are not stored
            wrong.append(f"{name} is missing")
    if wrong:
        raise UserError(f"{folder} holds other tensors than this model: {_some(wrong)}")


def _open(path: Path):
    try:
        return safe_open(path, framework="pt")
    except FileNotFoundError:
        raise DamagedError(f"{path} is missing") from None
    except SafetensorError as error:
        raise DamagedError(f"{path} is not a whole safetensors file: {error}") from None


def _some(problems: list[str], limit: int = 8) -> str:
    rest = f" and {len(problems) - limit} more" if len(problems) > limit else ""
    return "; ".join(problems[:limit]) + rest
