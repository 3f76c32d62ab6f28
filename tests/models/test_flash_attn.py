"""The package flash-attn where it is installed, in training and in the engine (extra `[flash]`)."""

import importlib.util

import pytest
import torch
from support.models import make_reference

from roll_lite.engine.engine import Engine
from roll_lite.engine.request import Request
from roll_lite.models.attention import PackedAttention, _varlen_kernel
from roll_lite.models.hf import load_model
from roll_lite.types import SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not importlib.util.find_spec("flash_attn"), reason="flash-attn is missing"),
]
LENGTHS = [1, 5, 64, 130, 257, 17]


def exact_attention(q, k, v, num_queries, num_keys):
    """float64, a sequence at a time; the last query sees the last key."""
    parts = []
    for q_QHD, k_SKD, v_SKD in zip(
        q.split(num_queries), k.split(num_keys), v.split(num_keys), strict=True
    ):
        repeats = q.shape[1] // k.shape[1]
        k_SHD, v_SHD = (x.repeat_interleave(repeats, 1) for x in (k_SKD, v_SKD))
        scores = torch.einsum("qhd,shd->hqs", q_QHD, k_SHD) / q.shape[-1] ** 0.5
        sees = torch.ones(scores.shape[1:], device=q.device).tril(len(k_SKD) - len(q_QHD)).bool()
        probs = scores.masked_fill(~sees, -torch.inf).softmax(-1)
        parts.append(torch.einsum("hqs,shd->qhd", probs, v_SHD))
    return torch.cat(parts)


def ends(lengths):
    return torch.tensor([0, *lengths]).cumsum(0).int().cuda()


@pytest.mark.parametrize("num_before", [0, 40])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(14, 2, 64), (8, 8, 128), (16, 8, 128)]
)
def test_training_attention_equals_float64(heads, kv_heads, head_dim, num_before):
    """Forward and backward, with keys before the first query too, as the blocks of a tree have."""
    assert "flash_attn" in _varlen_kernel().func.__module__
    torch.manual_seed(0)
    num_keys = [n + num_before for n in LENGTHS]
    q = torch.randn(sum(LENGTHS), heads, head_dim)
    k, v = (torch.randn(sum(num_keys), kv_heads, head_dim) for _ in range(2))
    upstream = torch.randn(sum(LENGTHS), heads, head_dim)
    attend = PackedAttention(ends(LENGTHS), max(LENGTHS))
    if num_before:
        attend = PackedAttention(ends(LENGTHS), max(LENGTHS), ends(num_keys), max(num_keys))
    ours = [x.bfloat16().cuda().requires_grad_() for x in (q, k, v)]
    found = attend.attend(*ours)
    found.backward(upstream.bfloat16().cuda())
    exact = [x.detach().double().requires_grad_() for x in ours]
    expected = exact_attention(*exact, LENGTHS, num_keys)
    expected.backward(upstream.bfloat16().double().cuda())
    pairs = [(found, expected), *((a.grad, b.grad) for a, b in zip(ours, exact, strict=True))]
    errors = [((a.double() - b).norm() / b.norm()).item() for a, b in pairs]
    print("relative errors", *(f"{error:.1e}" for error in errors))
    assert max(errors) < 6e-3


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("qwen2.5", {"hidden_size": 256, "num_attention_heads": 4}),
        ("qwen3", {"head_dim": 128}),
        ("smollm2", {"hidden_size": 192, "num_attention_heads": 3}),
    ],
)
def test_the_engine_is_as_near_to_float32_as_with_triton(family, sizes, tmp_path):
    """Prefill in chunks, shared prompts, decoding under CUDA graphs, a cache that is too small."""
    make_reference(family, **sizes).save_pretrained(tmp_path)
    exact = load_model(tmp_path, device="cuda", dtype=torch.float32)
    errors = {
        backend: engine_error(tmp_path, exact, backend) for backend in ("triton", "flash_attn")
    }
    print(errors)
    assert errors["flash_attn"] < 1.1 * errors["triton"] < 0.05


@torch.no_grad()
def engine_error(folder, exact, backend):
    """Mean difference between the engine's logprobs and those of the exact model."""
    model = load_model(folder, device="cuda", dtype=torch.bfloat16)
    sizes = model.config
    page = sizes.num_layers * 2 * 256 * sizes.num_kv_heads * sizes.head_dim * 2
    engine = Engine(
        model, backend=backend, kv_cache_gib=10.5 * page / 2**30, max_prefill_tokens=70,
        max_num_seqs=24, burst=6,
    )  # fmt: skip
    assert engine.runner.backend == backend
    generator = torch.Generator().manual_seed(1)
    params = SamplingParams(max_tokens=100, temperature=0.9)
    requests = [
        Request(
            prompt_ids=torch.randint(1, 199, (n,), generator=generator).tolist(),
            params=params, num_samples=4, seed=i,
        )
        for i, n in enumerate([5, 33, 300, 190, 230, 64, 16])
    ]  # fmt: skip
    errors = []
    for turn in (turn for group in engine.generate(requests) for turn in group):
        ids = torch.tensor(turn.prompt_ids + turn.token_ids, device="cuda")
        positions = torch.arange(len(ids), device="cuda")
        rows = positions[len(turn.prompt_ids) - 1 : -1]
        attend = PackedAttention(ends([len(ids)]), len(ids))
        logprobs, _ = exact(ids, positions, attend, rows, ids[rows + 1], 0.9)
        errors.append((torch.tensor(turn.logprobs, device="cuda") - logprobs).abs())
    assert engine.pool.num_free == engine.pool.num_pages
    return torch.cat(errors).mean().item()
