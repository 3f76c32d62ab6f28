"""Context parallelism; tests/train/test_layouts.py compares training over ranks with one rank."""

import pytest
import torch

from roll_lite.device_map import parse_device_map
from roll_lite.models.attention import PackedAttention
from roll_lite.models.config import shape_config
from roll_lite.models.context_parallel import ContextShard
from roll_lite.planning.plan import Plan, PlanOptions

GPU = pytest.param("cuda", marks=pytest.mark.gpu)


def cut(lengths, size, device="cpu"):
    """Parts of a packed batch whose token ids are their places, and the places of all rows."""
    total = sum(lengths)
    places, starts = torch.arange(total), torch.tensor([0, *lengths]).cumsum(0).int()
    rows = places[::2]
    batch = [x.to(device) for x in (places, places, starts, rows)]
    return [ContextShard(rank, size, None).cut(*batch) for rank in range(size)], rows.to(device)


@pytest.mark.parametrize(
    ("lengths", "size"), [([64], 2), ([5, 40, 1, 13], 2), ([3, 30], 4), ([1], 4)]
)
def test_every_token_and_every_row_is_on_one_rank(lengths, size):
    parts, rows = cut(lengths, size)
    tokens = torch.cat([part.token_ids_L for part in parts]).tolist()
    padding = len(tokens) - sum(lengths)
    assert sorted(tokens) == sorted([*range(sum(lengths)), *[0] * padding])
    assert len({len(part.token_ids_L) for part in parts}) == 1
    assert sorted(torch.cat([part.chosen for part in parts]).tolist()) == list(range(len(rows)))
    for part in parts:
        assert part.token_ids_L[part.rows].tolist() == rows[part.chosen].tolist()


def test_a_long_sequence_costs_every_rank_the_same():
    parts, _ = cut([4096], 4)
    pairs = [sum(int(token) + 1 for token in part.token_ids_L) for part in parts]
    assert len(set(pairs)) == 1


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize(
    ("lengths", "size"), [([64], 2), ([5, 400, 1, 130], 2), ([3, 30], 4), ([1], 4)]
)
def test_spans_attend_as_whole_sequences_do(lengths, size, device):
    """Also on a GPU, whose kernel must align the last query of a sequence with its last key."""
    total, generator = sum(lengths), torch.Generator().manual_seed(0)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    q, k, v = (torch.randn(total, heads, 64, generator=generator) for heads in (4, 2, 2))
    q, k, v = (x.to(device, dtype).requires_grad_() for x in (q, k, v))
    starts = torch.tensor([0, *lengths], device=device).cumsum(0).int()
    expected = PackedAttention(starts, max(lengths)).attend(q, k, v)
    weights = torch.randn(expected.shape, generator=generator).to(device, dtype)
    wanted = torch.autograd.grad((expected * weights).sum(), (q, k, v))
    found, out = 0.0, torch.zeros_like(expected)
    for part in cut(lengths, size, device)[0]:
        chunk = len(part.token_ids_L) // 2
        padded = [
            torch.nn.functional.pad(x, (0, 0, 0, 0, 0, size * 2 * chunk - total)) for x in (q, k, v)
        ]
        for span in part.attention.spans:
            seen = slice(span.first_key, span.end)
            mine = slice(span.end - chunk, min(span.end, total))
            if mine.start >= total:
                continue
            keys, values = padded[1][seen], padded[2][seen]
            here = span.attention.attend(padded[0][span.end - chunk : span.end], keys, values)
            here = here[: mine.stop - mine.start]
            out[mine] = here.detach()
            found = found + (here * weights[mine]).sum()
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if device == "cpu" else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(out, expected, **tolerance)
    for mine, theirs in zip(torch.autograd.grad(found, (q, k, v)), wanted, strict=True):
        torch.testing.assert_close(mine, theirs, **tolerance)


def activations(cp, sample_tokens):
    batch = PlanOptions(
        prompts_per_step=4, samples_per_prompt=1, prompt_tokens=1, max_tokens=sample_tokens - 1,
        tokens_per_microbatch=2**16, kv_cache_gib=8, engines_sleep=True,
    )  # fmt: skip
    device_map = parse_device_map(f"train=all,cp={cp} generate=all", 4)
    plan = Plan(shape_config("qwen3-0.6b"), device_map, batch, device_bytes=80 * 2**30)
    return max(part.memory.activations for part in plan.ranks)


def test_four_ranks_plan_a_quarter_of_a_long_sample_and_all_of_its_keys():
    keys = 2**16 * 2 * 8 * 128 * 2  # keys and values of 64k tokens in one layer, bf16
    quarter = activations(1, 2**14 + 1)
    assert activations(4, 2**16 + 1) == quarter + (28 + 2) * keys
    assert activations(1, 2**16 + 1) > 2.5 * activations(4, 2**16 + 1)
