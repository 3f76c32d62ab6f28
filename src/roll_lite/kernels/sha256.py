"""SHA-256 of many pieces of equal length, a piece a thread."""

from collections.abc import Sequence
from functools import cache
from math import isqrt

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_BYTES = 64
DIGEST_BYTES = 32
THREADS = 32


def sha256_pieces(flats: Sequence[Tensor], piece_bytes: int) -> Tensor:
    """The digests of the pieces of tensors of bytes, end to end; zeros fill a tensor's last piece.

    A piece takes a thread as long as the longest chain of operations, so all are in one launch.
    """
    device = flats[0].device
    sizes = [len(flat) for flat in flats]
    rests = [
        flat[size // piece_bytes * piece_bytes :] for flat, size in zip(flats, sizes, strict=True)
    ]
    filled = torch.zeros(len(flats), piece_bytes, dtype=torch.uint8, device=device)
    pairs = [(row[: len(rest)], rest) for row, rest in zip(filled, rests, strict=True) if len(rest)]
    if pairs:
        torch._foreach_copy_(*map(list, zip(*pairs, strict=True)))
    work = []  # of programs: address, number of pieces, place of the first digest
    num_pieces = 0
    for flat, row, size in zip(flats, filled, sizes, strict=True):
        whole, rest = divmod(size, piece_bytes)
        for start in range(0, whole, THREADS):
            address = flat.data_ptr() + start * piece_bytes
            work.append((address, min(THREADS, whole - start), num_pieces + start))
        if rest:
            work.append((row.data_ptr(), 1, num_pieces + whole))
        num_pieces += whole + bool(rest)
    out = torch.empty(num_pieces * DIGEST_BYTES, dtype=torch.uint8, device=device)
    if work:
        _sha256_pieces[(len(work),)](
            torch.tensor(work).to(device), out.view(torch.int32), _constants(device),
            PIECE_BYTES=piece_bytes, THREADS=THREADS, num_warps=1,
        )  # fmt: skip
    return out


@cache
def _constants(device: torch.device) -> Tensor:
    """The 64 of the rounds, then the 8 of the first state: fractions of roots of primes."""
    primes = [n for n in range(2, 312) if all(n % d for d in range(2, isqrt(n) + 1))]
    of_rounds = [_cube_root(p << 96) for p in primes]
    numbers = [*of_rounds, *(isqrt(p << 64) for p in primes[:8])]
    return torch.tensor([n % 2**32 for n in numbers]).to(torch.int32).to(device)


def _cube_root(number: int) -> int:
    low, high = 0, 1 << 40
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if middle**3 <= number else (low, middle)
    return low


@triton.jit
def _sha256_pieces(
    work_ptr, out_ptr, constants_ptr, PIECE_BYTES: tl.constexpr, THREADS: tl.constexpr
):
    work = work_ptr + tl.program_id(0) * 3
    in_ptr = tl.load(work).to(tl.pointer_type(tl.int32))
    piece = tl.arange(0, THREADS)
    ok = piece < tl.load(work + 1)
    out = tl.load(work + 2) + piece
    state = ()
    for i in tl.static_range(8):
        state += (tl.full([THREADS], 0, tl.uint32) + _constant(constants_ptr, 64 + i),)
    num_blocks: tl.constexpr = PIECE_BYTES // 64
    for block in range(num_blocks + 1):  # the last is the padding
        is_piece = ok & (block < num_blocks)
        words = ()
        for i in tl.static_range(16):
            at = in_ptr + piece * (PIECE_BYTES // 4) + block * 16 + i
            word = _swapped(tl.load(at, mask=is_piece, other=0).to(tl.uint32, bitcast=True))
            if i == 0:
                word = tl.where(is_piece, word, 0x80000000)
            if i == 15:
                word = tl.where(is_piece, word, PIECE_BYTES * 8)
            words += (word,)
        after = state
        for sixteen in range(3):
            for i in tl.static_range(16):
                after = _round(after, words[0], _constant(constants_ptr, sixteen * 16 + i))
                words = words[1:] + (_next_word(words),)  # noqa: RUF005
        for i in tl.static_range(16):
            after = _round(after, words[i], _constant(constants_ptr, 48 + i))
        added = ()
        for i in tl.static_range(8):
            added += (state[i] + after[i],)
        state = added
    for i in tl.static_range(8):
        tl.store(out_ptr + out * 8 + i, _swapped(state[i]).to(tl.int32, bitcast=True), mask=ok)


@triton.jit
def _round(state, word, constant):
    a, b, c, d, e, f, g, h = state
    s1 = _rotated(e, 6) ^ _rotated(e, 11) ^ _rotated(e, 25)
    first = h + s1 + (g ^ (e & (f ^ g))) + constant + word
    s0 = _rotated(a, 2) ^ _rotated(a, 13) ^ _rotated(a, 22)
    second = s0 + ((a & b) ^ (a & c) ^ (b & c))
    return first + second, a, b, c, d + first, e, f, g


@triton.jit
def _next_word(words):
    x, y = words[1], words[14]
    s0 = _rotated(x, 7) ^ _rotated(x, 18) ^ (x >> 3)
    s1 = _rotated(y, 17) ^ _rotated(y, 19) ^ (y >> 10)
    return words[0] + s0 + words[9] + s1


@triton.jit
def _rotated(x, n: tl.constexpr):
    return (x >> n) | (x << (32 - n))


@triton.jit
def _swapped(x):
    """Its bytes in the other order."""
    return (x << 24) | ((x & 0xFF00) << 8) | ((x >> 8) & 0xFF00) | (x >> 24)


@triton.jit
def _constant(constants_ptr, number):
    return tl.load(constants_ptr + number).to(tl.uint32, bitcast=True)
