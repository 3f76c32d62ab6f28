"""What travels in a role call: lists of numbers as tensors, and everything comes back as it was."""

import pickle

import pytest
import torch

from roll_lite.cluster.codec import LONG, decode, encode
from roll_lite.types import Prompt, Sample

IDS = list(range(1000, 1000 + 3 * LONG))


@pytest.mark.parametrize(
    "value",
    [
        IDS,
        tuple(IDS),
        [2**40 + i for i in IDS],
        [2**70 + i for i in IDS],
        [-i / 7 for i in IDS],
        [float("inf"), -0.0, 5e-324] * LONG,
        [i % 3 == 0 for i in IDS],
        [0, 1.5] * LONG,
        [True, 0] * LONG,
        ["token"] * 2 * LONG,
        [[i] * 2 * LONG for i in range(2 * LONG)],
        {"a": (IDS, None), "b": [], 3: {"deep": [1.5] * 2 * LONG}},
        None,
    ],
    ids=lambda value: str(value)[:30],
)
def test_values_come_back_with_their_types(value):
    back = decode(encode(value))
    assert repr(back) == repr(value)  # types and signs too: 1 == 1.0 == True


def test_tokens_of_samples_are_not_pickled():
    ids = IDS * 50
    prompt = Prompt(id="p", messages=(), domain="d", ground_truth="")
    samples = [
        Sample(prompt=prompt, index=i, token_ids=ids, loss_mask=[True] * 9, logprobs=[-0.5] * 9600)
        for i in range(8)
    ]
    message = encode(samples)
    assert decode(message) == samples
    assert len(message.skeleton) < 3000 < len(pickle.dumps(samples)) / 10
    assert {code: t.dtype for code, t in message.numbers.items()} == {
        "i": torch.int32,
        "d": torch.float64,
    }
    assert len(message.numbers["i"]) == len(ids)  # once, as it is one and the same list
    assert len(message.numbers["d"]) == 8 * 9600


def test_what_was_one_object_is_one_object():
    tensor = torch.arange(5)
    a, b, c, d = decode(encode([IDS, IDS, tensor, tensor]))
    assert a is b and c is d


def test_tensors_travel_uncopied_and_views_alone():
    tensor = torch.arange(1000.0)
    whole, view = encode([tensor, tensor[10:20]]).tensors
    assert whole.data_ptr() == tensor.data_ptr()
    assert view.data_ptr() == tensor[10:20].data_ptr()
    assert view.untyped_storage().nbytes() == 40


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12).view(3, 4).T,
        torch.arange(12).view(3, 4)[:, 1],
        torch.arange(12.0).bfloat16()[3:5],
        torch.ones(5, dtype=torch.bool)[2:],
        torch.arange(6).view(3, 2)[3:],
        torch.tensor(3.5),
        torch.arange(3.0)[1],
        torch.ones(2, 2, requires_grad=True),
    ],
)
def test_tensors_come_back(tensor):
    back = decode(encode(tensor))
    assert torch.equal(back, tensor) and back.dtype == tensor.dtype and not back.requires_grad


def test_a_tensor_on_a_device_is_refused():
    with pytest.raises(ValueError, match=r"shape .2, 3. on meta cannot travel.*tensor.cpu"):
        encode([torch.empty(2, 3, device="meta")])
