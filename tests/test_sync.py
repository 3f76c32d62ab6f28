"""Weights from trainers to engines of other layouts, over real ranks."""

from pathlib import Path

import pytest
import torch
from conftest import make_reference, run_torchrun
from forked_ranks import run_ranks

from roll_lite.cluster.device_map import parse_device_map
from roll_lite.models.tensor_parallel import cut_dimension
from roll_lite.sync import Colocated, row_checksums

PROGRAM = Path(__file__).parent / "sync_program.py"

MAPS = [
    "train=0 generate=0-1,tp=2",  # one rank to TP, shared in part
    pytest.param("train=0-1 generate=0-3,tp=2", marks=pytest.mark.slow),  # FSDP to TP
    pytest.param("train=all generate=all", marks=pytest.mark.slow),
    pytest.param("train=0-1,tp=2 generate=2-3", marks=pytest.mark.slow),  # TP to replicas, disjoint
    pytest.param("train=0-1,tp=2 generate=0-1,tp=2", marks=pytest.mark.slow),  # nothing to gather
    pytest.param("train=0-3,tp=2 generate=0-3", marks=pytest.mark.slow),
    pytest.param("train=3 generate=0-2", marks=pytest.mark.slow),
    pytest.param("train=all,tp=2 generate=all,tp=4", marks=pytest.mark.slow),
    pytest.param("train=all,tp=4 generate=all,tp=2", marks=pytest.mark.slow),
]


UNDER_TORCHRUN = ("train=0-1 generate=0-3,tp=2",)


def part_of(name, tensor, rank, size):
    """A rank's part: rows of the vocabulary are padded, and all ranks have the only kv head."""
    if name in ("embedding", "lm_head"):
        padding = tensor.new_zeros(-len(tensor) % size, tensor.shape[1])
        return torch.cat([tensor, padding]).chunk(size)[rank]
    if "attention.qkv" in name:
        return torch.cat([tensor[:, :-2].chunk(size, 1)[rank], tensor[:, -2:]], 1)
    if cut_dimension(name) is None:
        return tensor
    return tensor.chunk(size, cut_dimension(name))[rank]


@pytest.mark.parametrize("device_map", MAPS)
def test_every_engine_holds_its_part_of_the_trainers_weights(tmp_path, device_map):
    odd = {"vocab_size": 199, "num_key_value_heads": 1}
    make_reference("qwen2.5", **odd).save_pretrained(tmp_path / "model")
    ranks = 2 if device_map.endswith("0-1,tp=2") else 4
    start = run_torchrun if device_map in UNDER_TORCHRUN else run_ranks
    start(ranks, PROGRAM, device_map, tmp_path / "model", tmp_path / "result.pt")
    results = torch.load(tmp_path / "result.pt", weights_only=False)
    for kind, version in (("full", 2), ("lora", 2), ("rounds", 22)):
        state, engines = results[kind]
        for rank, size, found, weights in engines:
            assert found == version and weights.keys() == state.keys()
            for name, tensor in state.items():
                assert torch.equal(weights[name], part_of(name, tensor, rank, size)), (kind, name)
    assert "does not hold what it got for norm.weight" in results["broken"]
    parsed = parse_device_map(device_map, ranks)
    if set(parsed["generate"].ranks) - set(parsed["train"].ranks):
        assert "what arrived is not what was sent for embedding" in results["flipped"]


def test_roles_that_weights_travel_by():
    shared = parse_device_map("train=0-1 generate=0-1", 2).with_sync()
    assert shared["sync"].ranks == (0, 1) and "feed" not in shared
    apart = parse_device_map("train=2-3 generate=0-1 reference=4", 5).with_sync()
    assert apart["sync"].ranks == (0, 1, 2, 3) and apart["feed"].ranks == (0, 1, 2)


def test_turns_need_ranks_that_train_and_generate():
    apart = parse_device_map("train=0 generate=1", 2)
    for name in ("engines_sleep", "offload"):
        with pytest.raises(ValueError, match=f"{name}=True is for ranks .*'train=0 generate=1' ha"):
            Colocated(apart, **{name: True})
    Colocated(apart)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(7,), (7, 5), (2, 7, 5)])
def test_sums_see_bits_and_order(shape, dtype):
    x = torch.randn(shape).to(dtype)
    flipped = x.clone()
    flipped.view(torch.int32 if dtype == torch.float32 else torch.int16).view(-1)[3] ^= 1
    assert (row_checksums(x) != row_checksums(flipped)).sum() == 1
    assert not torch.equal(row_checksums(x), row_checksums(x.flip(-1 if x.ndim == 1 else -2)))
    assert torch.equal(row_checksums(x), row_checksums(x.clone()))
