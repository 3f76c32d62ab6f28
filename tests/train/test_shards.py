"""Rectangles of tensors: any layout reads what any other wrote, to the bit."""

import random
import zlib
from functools import partial
from itertools import pairwise, product
from math import prod

import pytest
import torch
from safetensors.torch import load_file

from roll_lite.train.shards import Piece, check_cover, read_shards, write_shard


def random_bits(shape, dtype, generator):
    """Every bit pattern, with nan, infinities and negative zeros among them."""
    num_bytes = prod(shape) * torch.empty(0, dtype=dtype).itemsize
    data = torch.randint(256, (num_bytes,), dtype=torch.uint8, generator=generator)
    return data.view(dtype).view(shape)


def same_bits(a, b):
    return a.dtype == b.dtype and torch.equal(*(t.contiguous().view(torch.uint8) for t in (a, b)))


def random_rectangles(shape, num_ranks, rng):
    """One (offsets, sizes) a rank: a random grid, empty cells included, over shuffled ranks."""
    counts = [1] * len(shape)
    for _ in range(4):
        grown = list(counts)
        grown[rng.randrange(len(shape))] += 1
        counts = grown if prod(grown) <= num_ranks else counts
    cuts = [
        [0, *sorted(rng.randint(0, size) for _ in range(count - 1)), size]
        for size, count in zip(shape, counts, strict=True)
    ]
    cells = [
        (tuple(a for a, _ in cell), tuple(b - a for a, b in cell))
        for cell in product(*map(pairwise, cuts))
    ]
    cells += [(shape, (0,) * len(shape))] * (num_ranks - len(cells))
    rng.shuffle(cells)
    return cells


def layout(shapes, num_ranks, rng):
    """For each rank, its rectangle of each tensor."""
    by_name = {name: random_rectangles(shape, num_ranks, rng) for name, shape in shapes.items()}
    return [{name: cells[r] for name, cells in by_name.items()} for r in range(num_ranks)]


def cut(tensor, offsets, sizes):
    return tensor[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))]


@pytest.mark.parametrize("seed", range(12))
def test_any_layout_reads_what_another_wrote(tmp_path, seed):
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    dtypes = [torch.float32, torch.bfloat16, torch.uint8, torch.bool]
    wholes = {}
    for i in range(16):
        shape = tuple(rng.randint(1, 9) for _ in range(i % 4 + 1))
        dtype = dtypes[i // 4]
        bits = random_bits(shape, torch.uint8 if dtype == torch.bool else dtype, generator)
        wholes[f"model.blocks.{i}"] = bits > 127 if dtype == torch.bool else bits
    shapes = {name: tuple(whole.shape) for name, whole in wholes.items()}
    records = []
    for rank, rectangles in enumerate(layout(shapes, rng.randint(1, 7), rng)):
        pieces = {n: Piece(cut(wholes[n], *r), r[0], shapes[n]) for n, r in rectangles.items()}
        records.append(write_shard(tmp_path, rank, pieces))
        in_file = load_file(tmp_path / records[-1].file)  # the library agrees about the format
        assert in_file.keys() == {n for n, p in pieces.items() if p.tensor.numel()}
        assert all(same_bits(in_file[name], pieces[name].tensor) for name in in_file)
        assert all(tensor.data_ptr() % tensor.itemsize == 0 for tensor in in_file.values())
    check_cover(records)
    for rectangles in layout(shapes, rng.randint(1, 7), rng):
        wanted = {
            n: Piece(torch.zeros(sizes, dtype=wholes[n].dtype), offsets, shapes[n])
            for n, (offsets, sizes) in rectangles.items()
        }
        read_shards(tmp_path, records, wanted)
        for name, rectangle in rectangles.items():
            assert same_bits(wanted[name].tensor, cut(wholes[name], *rectangle)), name


HALF = partial(torch.zeros, 2, 4)


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ({0: Piece(HALF(), (0, 0), (4, 4))}, r"a has 8 of 16 elements"),
        ({0: Piece(HALF(), (0, 0), (4, 4)), 1: Piece(HALF(), (0, 0), (4, 4))}, "more than one"),
        (
            {0: Piece(HALF(), (0, 0), (4, 4)), 1: Piece(HALF().bfloat16(), (2, 0), (4, 4))},
            "float32.*bfloat16|bfloat16.*float32",
        ),
    ],
)
def test_pieces_that_are_not_whole_tensors_are_refused(tmp_path, ranks, message):
    records = [write_shard(tmp_path, rank, {"a": piece}) for rank, piece in ranks.items()]
    with pytest.raises(ValueError, match=message):
        check_cover(records)


def test_a_file_written_twice_is_refused(tmp_path):
    records = [write_shard(tmp_path, 0, {n: Piece.whole(torch.zeros(2))}) for n in ("a", "b")]
    with pytest.raises(ValueError, match=r"shard-00000\.safetensors was written 2 times"):
        check_cover(records)


def test_a_record_is_what_lies_on_disk(tmp_path):
    record = write_shard(tmp_path, 12, {"a": Piece.whole(torch.randn(7, 111))})
    data = (tmp_path / "shard-00012.safetensors").read_bytes()
    assert (record.file, record.size) == ("shard-00012.safetensors", len(data))
    assert record.crc32 == zlib.crc32(data)


def test_pieces_that_cannot_be_stored_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"offsets=\(3,\) does not lie within shape=\(4,\)"):
        Piece(torch.zeros(2), (3,), (4,))
    with pytest.raises(ValueError, match=r"a has dtype=torch\.complex64"):
        write_shard(tmp_path, 0, {"a": Piece.whole(torch.zeros(2, dtype=torch.complex64))})
