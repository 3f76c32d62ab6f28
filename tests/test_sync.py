"""Weights from trainers to engines of other layouts, over real ranks."""

import re
from types import SimpleNamespace

import pytest
import torch
from support.forked_ranks import run_ranks
from support.launch import run_torchrun
from support.models import make_reference
from support.paths import SUPPORT
from support.sync_program import WITHOUT_TRAVEL, check_synced

from roll_lite.device_map import parse_device_map
from roll_lite.engine.arena import ROW_BYTES
from roll_lite.roles import Roles
from roll_lite.sync import digest_of, row_checksums

PROGRAM = SUPPORT / "sync_program.py"

MAPS = [
    "train=0 generate=0-1,tp=2",  # one rank to TP, shared in part
    pytest.param("train=0-1 generate=0-3,tp=2", marks=pytest.mark.slow),  # FSDP to TP
    pytest.param("train=all generate=all", marks=pytest.mark.slow),
    pytest.param("train=0-1,tp=2 generate=2-3", marks=pytest.mark.slow),  # TP to replicas, disjoint
    pytest.param(WITHOUT_TRAVEL, marks=pytest.mark.slow),
    pytest.param("train=0-3,tp=2 generate=0-3", marks=pytest.mark.slow),
    pytest.param("train=3 generate=0-2", marks=pytest.mark.slow),
    pytest.param("train=0 generate=0-1", marks=pytest.mark.slow),  # in the end no rank is fed
    pytest.param("train=0 generate=1-4,tp=2", marks=pytest.mark.slow),
    pytest.param("train=0-1 generate=2-3,tp=2", marks=pytest.mark.slow),  # a part to each
    pytest.param("train=all,tp=2 generate=all,tp=4", marks=pytest.mark.slow),
    pytest.param("train=all,tp=4 generate=all,tp=2", marks=pytest.mark.slow),
]


OF_EXPERTS = [
    "train=0-1,ep=2 generate=0-1,tp=2,ep=2",
    WITHOUT_TRAVEL,
    "train=0-3,tp=2,ep=2 generate=0-3",
    "train=0-1,ep=2 generate=2-3",
    "train=0-3,ep=2 generate=0-3,tp=4,ep=2",
    "train=0 generate=1-4,tp=2,ep=2",
]


UNDER_TORCHRUN = ("train=0-1 generate=0-3,tp=2",)


@pytest.mark.parametrize("device_map", MAPS)
def test_every_engine_holds_its_part_of_the_trainers_weights(tmp_path, device_map):
    odd = {"vocab_size": 199, "num_key_value_heads": 1}
    make_reference("qwen2.5", **odd).save_pretrained(tmp_path / "model")
    ranks = 2 if "generate=0-1" in device_map else 5 if "1-4" in device_map else 4
    start = run_torchrun if device_map in UNDER_TORCHRUN else run_ranks
    start(ranks, PROGRAM, device_map, tmp_path / "model", tmp_path / "result.pt")
    check_synced(tmp_path / "result.pt", device_map, ranks)


@pytest.mark.slow
@pytest.mark.parametrize("device_map", OF_EXPERTS)
def test_every_engine_holds_its_experts(tmp_path, device_map):
    make_reference("qwen3_moe", num_key_value_heads=1).save_pretrained(tmp_path / "model")
    ranks = 1 + max(int(digit) for digit in re.findall(r"[=-](\d)", device_map))
    targets = "qkv,out,expert_gate_up,expert_down"
    arguments = device_map, tmp_path / "model", tmp_path / "result.pt", "cpu", targets
    run_ranks(ranks, PROGRAM, *arguments)
    check_synced(tmp_path / "result.pt", device_map, ranks)


def test_roles_that_weights_travel_by():
    shared = parse_device_map("train=0-1 generate=0-1", 2).with_sync()
    assert shared["sync"].ranks == (0, 1) and "feed0" not in shared
    apart = parse_device_map("train=2-3 generate=0-1 reference=4", 5).with_sync()
    assert apart["sync"].ranks == (0, 1, 2, 3) and apart["feed0"].ranks == (0, 1, 2)
    split = parse_device_map("train=0-1 generate=1-6,tp=2", 7).with_sync()
    assert split["feed0"].ranks == (0, 3, 5)  # of 1, 3 and 5 the first has a trainer
    assert split["feed1"].ranks == (0, 2, 4, 6) and "feed2" not in split


def test_turns_need_ranks_that_train_and_generate():
    apart = SimpleNamespace(device_map=parse_device_map("train=0 generate=1", 2))
    for name in ("engines_sleep", "offload"):
        with pytest.raises(ValueError, match=f"{name}=True is for ranks .*'train=0 generate=1' ha"):
            Roles(apart, **{name: True})
    Roles(apart)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_see_bits_and_order(dtype):
    rows = torch.randn(5, ROW_BYTES // dtype.itemsize).to(dtype)
    sums = row_checksums(rows.flatten())
    assert torch.equal(sums, row_checksums(rows.clone().flatten())) and len(sums) == 5
    for bit in range(8 * ROW_BYTES):
        flipped = rows.clone()
        flipped.view(torch.uint8)[3, bit // 8] ^= 1 << bit % 8
        assert (row_checksums(flipped.flatten()) != sums).tolist() == [False] * 3 + [True, False]
    assert (row_checksums(rows.flip(0).flatten()) != sums).sum() == 4  # the middle one stays


def test_a_digest_depends_on_every_sum_and_its_place():
    def reference(sums):
        """With Python's integers, which do not wrap around."""
        words = []
        for odd in (0x1E3779B97F4A7C15, 0x2545F4914F6CDD1D):
            total = 0
            for place, value in enumerate(sums):
                word = (place * odd ^ value) % 2**64
                for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
                    word = (word ^ word >> 33) * factor % 2**64
                total += word ^ word >> 33
            words.append(f"{total % 2**64:016x}")
        return "".join(words)

    sums = torch.randint(-(2**62), 2**62, (1000,), generator=torch.Generator().manual_seed(0))
    assert digest_of(sums) == reference(sums.tolist())
    seen = {
        digest_of(sums),
        digest_of(sums.flip(0)),
        digest_of(~sums),
        digest_of(sums + 1),
        digest_of(sums[:-1]),
    }
    for place in range(0, 1000, 7):
        changed = sums.clone()
        changed[place] ^= 1 << (place % 63)
        seen.add(digest_of(changed))
        changed[place + 1] += sums[place] - changed[place]  # the sum of both is as it was
        seen.add(digest_of(changed))
    assert len(seen) == 5 + 2 * len(range(0, 1000, 7))
