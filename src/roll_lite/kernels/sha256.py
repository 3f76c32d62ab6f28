"""SHA-256 of many pieces of equal length, a piece a thread."""

from functools import cache
from math import isqrt

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_BYTES = 64
DIGEST_BYTES = 32


def sha256_pieces(flat: Tensor, piece_bytes: int) -> Tensor:
    """The digests of the pieces of a tensor of bytes, end to end; all pieces are whole."""
    num_pieces = len(flat) // piece_bytes
    out = torch.empty(num_pieces * DIGEST_BYTES, dtype=torch.uint8, device=flat.device)
    threads = 128
    if num_pieces:
        _sha256_pieces[(triton.cdiv(num_pieces, threads),)](
            flat.view(torch.int32), out.view(torch.int32), _constants(flat.device), num_pieces,
            PIECE_BYTES=piece_bytes, THREADS=threads, num_warps=4,
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
    in_ptr, out_ptr, constants_ptr, num_pieces, PIECE_BYTES: tl.constexpr, THREADS: tl.constexpr
):
    piece = tl.program_id(0).to(tl.int64) * THREADS + tl.arange(0, THREADS)
    ok = piece < num_pieces
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
        tl.store(out_ptr + piece * 8 + i, _swapped(state[i]).to(tl.int32, bitcast=True), mask=ok)


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
