"""Digests of tensors against SHA-256 of their bytes, and what changes them."""

import hashlib
import json

import pytest
import torch

from roll_lite.train.digests import CHARACTERS, PIECE_BYTES, RunningDigest, digest_tensors


def digest_by_definition(tensors, top=2**16):
    def pieces(data):
        data = data.ljust(-(-len(data) // PIECE_BYTES) * PIECE_BYTES, b"\0")
        starts = range(0, len(data), PIECE_BYTES)
        return b"".join(hashlib.sha256(data[at : at + PIECE_BYTES]).digest() for at in starts)

    about = [[n, str(t.dtype).split(".")[1], list(t.shape)] for n, t in tensors]
    found = b"".join(pieces(bytes(t.view(torch.uint8).flatten().tolist())) for _, t in tensors)
    while len(found) > top:
        found = pieces(found)
    return hashlib.sha256(json.dumps(about).encode() + found).hexdigest()[:CHARACTERS]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("sizes", [(3,), (2048, 5), (4096, 1, 2047, 2049)])
def test_equals_its_definition(sizes, device):
    torch.manual_seed(0)
    tensors = [(f"w{n}", torch.randn(size)) for n, size in enumerate(sizes)]
    found = digest_tensors((name, tensor.to(device)) for name, tensor in tensors)
    assert found == digest_by_definition(tensors)


def test_digests_of_digests():
    """More bytes than the top takes at once."""
    tensors = [("w", torch.arange(5_000_000, dtype=torch.int32))]
    assert digest_tensors(tensors) == digest_by_definition(tensors)


def test_empty_and_strided_tensors():
    assert digest_tensors([]) == ""
    x = torch.randn(6, 4)
    assert digest_tensors([("x", x.T)]) == digest_tensors([("x", x.T.contiguous())])
    assert digest_tensors([("x", x[:0])]) != digest_tensors([("x", x[:, :0])])


CHANGES = {
    "a bit": lambda x: x.view(torch.int32).__setitem__((2, 1), x.view(torch.int32)[2, 1] ^ 1),
    "the sign of a zero": lambda x: x.__setitem__((0, 0), -0.0),
    "two changes that cancel in a sum": lambda x: (x[1, 1].add_(1), x[1, 2].sub_(1)),
    "two rows swapped": lambda x: x.__setitem__([3, 4], x[[4, 3]].clone()),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_every_change_shows(change):
    x = torch.randn(64, 64)
    x[0, 0] = 0.0
    before = digest_tensors([("x", x)])
    assert digest_tensors([("x", x.clone())]) == before
    change(x)
    assert digest_tensors([("x", x)]) != before


def test_names_types_and_shapes_show():
    x = torch.zeros(4, 6)
    others = [("y", x), ("x", x.view(6, 4)), ("x", x.int())]
    assert len({digest_tensors([other]) for other in [("x", x), *others]}) == 4


def test_running_digests_depend_on_the_order():
    one, two = RunningDigest(), RunningDigest()
    a, b = torch.arange(3), torch.arange(4)
    for running, order in ((one, (a, b)), (two, (b, a))):
        for tensor in order:
            running.add("ids", tensor)
    found = one.take()
    assert found.keys() == {"ids"} and found != two.take()
    assert one.take() == {}
