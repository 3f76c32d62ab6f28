"""Counted operations against torch's own counter."""

import torch
from support.models import make_reference
from torch.utils.flop_counter import FlopCounterMode

from roll_lite.models.attention import PackedAttention
from roll_lite.models.cost import forward_flops, training_flops
from roll_lite.models.hf import load_model


def test_operations_are_those_that_torch_counts(tmp_path):
    """Matrix products; attention by hand, which its counter knows on a CPU since torch 2.15."""
    make_reference("qwen3").save_pretrained(tmp_path / "model")
    model, length, num_rows = load_model(tmp_path / "model"), 128, 64
    ids, positions = torch.arange(length), torch.arange(length)
    attention = PackedAttention(torch.tensor([0, length], dtype=torch.int32), length)
    inputs = ids, positions, attention, torch.arange(num_rows), torch.arange(num_rows)
    with FlopCounterMode(display=False) as counter:
        logprobs, _ = model(*inputs)
    counts = {"num_tokens": length, "num_rows": num_rows}
    forward = forward_flops(model.config, **counts, num_pairs=0)
    assert products(counter) == forward
    with FlopCounterMode(display=False) as counter:
        logprobs.sum().backward()
    again = 2 * num_rows * model.embedding.numel()  # the head's logits, on the way back
    whole = training_flops(model.config, **counts, num_pairs=0)
    assert forward + products(counter) - again == whole
    assert training_flops(model.config, is_frozen=True, **counts, num_pairs=0) == 2 * forward
    # Scores and weighted values of 3 layers x 4 heads of 32.
    assert forward_flops(model.config, **counts, num_pairs=10) - forward == 10 * 2 * 2 * 3 * 4 * 32


def products(counter):
    return counter.get_flop_counts()["Global"][torch.ops.aten.mm]
