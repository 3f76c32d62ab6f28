"""Kernels of experts against a loop in float64: on a GPU where there is one, else interpreted."""

import pytest
import torch

pytest.importorskip("triton")

from roll_lite.kernels import experts
from roll_lite.kernels.expert_gradients import grouped_mlp
from roll_lite.kernels.experts import Block, Tiles, expert_mlp, list_pairs, route

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if torch.cuda.is_available() else torch.float32
RELATIVE = 1e-2 if torch.cuda.is_available() else 1e-5
SMALL = Tiles(16, Block(32, 32, 4, 2), Block(32, 32, 4, 2))


def relative_error(got, expected):
    return ((got.double().cpu() - expected).norm() / expected.norm()).item()


def make(T, E, K, H, F, seed=0, dtype=DTYPE):
    """x, gate_up, down, ids that differ within a token, weights."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((T, H), (E, 2, F, H), (E, H, F))
    x, gate_up, down = (torch.randn(shape, generator=generator) for shape in shapes)
    ids = torch.rand(T, E, generator=generator).argsort(1)[:, :K].int()
    weights = torch.rand(T, K, generator=generator)
    tensors = x, gate_up * H**-0.5, down * F**-0.5, ids, weights
    return [t.to(DEVICE, dtype if t.is_floating_point() else t.dtype) for t in tensors]


def loop(x, gate_up, down, ids, weights, first_expert=0):
    """One token and one expert at a time."""
    rows = []
    for t in range(len(x)):
        y = torch.zeros_like(x[t])
        for k, expert in enumerate((ids[t] - first_expert).tolist()):
            if 0 <= expert < len(down):
                gate, up = gate_up[expert] @ x[t]
                y = y + weights[t, k] * (down[expert] @ (gate * torch.sigmoid(gate) * up))
        rows.append(y)
    return torch.stack(rows)


def doubles(tensors):
    return [t.cpu().double() if t.is_floating_point() else t.cpu() for t in tensors]


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize(("E", "K"), [(128, 8), (5, 2), (1, 1), (512, 32)])
def test_route(E, K, renormalize):
    logits = torch.randn(3, E + 3, generator=torch.Generator().manual_seed(E)).to(DEVICE)[:, :E]
    ids, weights = route(logits, K, renormalize)
    probs = logits.double().cpu().softmax(-1)
    expected, expected_ids = probs.topk(K)
    if renormalize:
        expected = expected / expected.sum(-1, keepdim=True)
    assert torch.equal(ids.cpu(), expected_ids.int())
    torch.testing.assert_close(weights.double().cpu(), expected, rtol=1e-5, atol=0)


def test_route_of_equal_logits_takes_the_lower_index():
    logits = torch.tensor([[1, 2, 2, 1, 2, 0, 1], [0] * 7, [-1, -1, -1, 5, -1, 5, -1]]).bfloat16()
    ids, weights = route(logits.to(DEVICE), 4, False)
    assert ids.tolist() == [[1, 2, 4, 0], [0, 1, 2, 3], [3, 5, 0, 1]]
    assert weights.dtype == torch.bfloat16
    expected = logits.double().softmax(-1).gather(1, ids.cpu().long())
    torch.testing.assert_close(weights.double().cpu(), expected, rtol=8e-3, atol=0)


def test_route_of_masked_and_broken_rows_has_valid_ids():
    inf, nan = float("inf"), float("nan")
    logits = torch.tensor([[-inf, 3, -inf, -inf, -inf], [nan] * 5, [1, nan, 2, 3, 4]])
    for renormalize in (False, True):
        ids, weights = route(logits.to(DEVICE), 3, renormalize)
        assert ids.tolist() == [[1, 0, 2], [0, 1, 2], [4, 3, 2]]
        assert weights[0].tolist() == [1, 0, 0]
        assert weights[1:].isnan().all()


@pytest.mark.parametrize("chunk", [128, 8192])
@pytest.mark.parametrize("first", [0, 3])
@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8])
def test_lists_hold_each_pair_once_and_in_order(monkeypatch, chunk, first, dtype):
    monkeypatch.setattr(experts, "CHUNK", chunk)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 9, (75, 4), generator=generator)
    ids[ids == 4] = 5  # nobody takes 4
    pairs, starts, tiles, _ = list_pairs(ids.to(DEVICE, dtype), 5, first, 16)
    starts = starts.tolist()
    for e in range(5):
        expected = (ids.flatten() == first + e).nonzero().flatten()
        assert pairs[starts[e] : starts[e + 1]].tolist() == expected.tolist()
    covered = [(e, i) for e, a, b in tiles.T.tolist() for i in range(a, b)]
    assert all(b - a <= 16 for _, a, b in tiles.T.tolist())
    assert covered == [(e, i) for e in range(5) for i in range(starts[e], starts[e + 1])]


@pytest.mark.parametrize(
    ("shape", "tiles"),  # T, E, K, H, F
    [
        ((1, 5, 2, 64, 48), None),
        ((18, 5, 2, 64, 48), SMALL),
        ((12, 3, 3, 40, 24), SMALL),
        ((9, 1, 1, 32, 16), None),
        pytest.param((12, 8, 2, 64, 192), None, marks=pytest.mark.slow),
        pytest.param((150, 5, 2, 64, 48), None, marks=pytest.mark.slow),
    ],
)
def test_expert_mlp(shape, tiles):
    inputs = make(*shape)
    got = expert_mlp(*inputs, tiles=tiles)
    assert relative_error(got, loop(*doubles(inputs))) < RELATIVE


@pytest.mark.parametrize("rows", [16, 64])
def test_one_expert_takes_all(rows):
    inputs = make(20, 6, 1, 32, 16)
    inputs[3].fill_(4)
    tiles = SMALL._replace(rows=rows)
    assert relative_error(expert_mlp(*inputs, tiles=tiles), loop(*doubles(inputs))) < RELATIVE


def test_experts_elsewhere_add_nothing():
    x, gate_up, down, ids, weights = make(9, 6, 3, 32, 16)
    parts = []
    for first in (0, 2, 4):
        local = x, gate_up[first : first + 2], down[first : first + 2], ids, weights
        got = expert_mlp(*local, first_expert=first)
        expected = loop(*doubles(local), first)
        assert relative_error(got, expected) < RELATIVE
        assert (got.cpu()[expected.abs().sum(1) == 0] == 0).all()
        parts.append(got.double())
    whole = loop(*doubles((x, gate_up, down, ids, weights)))
    assert relative_error(sum(parts), whole) < RELATIVE


def test_no_tokens():
    inputs = make(0, 3, 2, 32, 16)
    assert expert_mlp(*inputs).shape == (0, 32)
    assert route(torch.empty(0, 3, device=DEVICE), 2, True)[0].shape == (0, 2)


def test_a_row_does_not_depend_on_the_others():
    inputs = make(12, 3, 2, 32, 16)
    x, gate_up, down, ids, weights = inputs
    whole = expert_mlp(*inputs, tiles=SMALL)
    some = torch.tensor([11, 3, 7], device=DEVICE)
    part = expert_mlp(x[some], gate_up, down, ids[some], weights[some], tiles=SMALL)
    if DEVICE == "cuda":
        assert torch.equal(part, whole[some])
    torch.testing.assert_close(part, whole[some])


def test_rounding_is_where_the_docstring_says():
    """In 16 bits; those of fp16, because the interpreter cannot multiply in bf16."""
    inputs = make(9, 4, 2, 32, 16, dtype=torch.float16)
    got = expert_mlp(*inputs, tiles=SMALL).cpu()
    x, gate_up, down, ids, weights = (t.cpu() for t in inputs)
    expected = torch.zeros(x.shape)
    for k in range(2):
        for t, expert in enumerate(ids[:, k].tolist()):
            gate, up = (gate_up[expert].float() @ x[t].float()).half()
            silu = torch.nn.functional.silu(gate.float()).half()
            out = (down[expert].float() @ (silu * up).float()).half()
            expected[t] += weights[t, k].float() * out.float()
    expected = expected.half()
    torch.testing.assert_close(got, expected, rtol=4e-3, atol=1e-3)
    # What is left are sums that another order of additions rounds to the neighbour.
    assert (got == expected).float().mean() > 0.95


def gradients(mlp, tensors, trained, **options):
    """Output and gradients of the `trained` inputs, whose weights are random."""
    tensors = [t.detach().clone() for t in tensors]
    for i in trained:
        tensors[i].requires_grad_()
    y = mlp(*tensors, **options)
    direction = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y)
    return y.detach(), *torch.autograd.grad((y * direction).sum(), [tensors[i] for i in trained])


EVERYTHING = (0, 1, 2, 4)


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param((40, 3, 2, 64, 48), marks=pytest.mark.slow),
        (6, 4, 3, 40, 24),
        (1, 5, 2, 32, 16),
    ],
)
def test_gradients(shape):
    inputs = make(*shape)
    expected = gradients(loop, doubles(inputs), EVERYTHING)
    for got, exact in zip(gradients(grouped_mlp, inputs, EVERYTHING), expected, strict=True):
        assert got.dtype == DTYPE
        assert relative_error(got, exact) < RELATIVE


def test_gradients_of_experts_that_nobody_takes_are_zero():
    inputs = make(7, 6, 2, 32, 16)
    inputs[3] = torch.tensor([2, 4], dtype=torch.int32, device=DEVICE).repeat(7, 1)
    got = gradients(grouped_mlp, inputs, EVERYTHING)
    expected = gradients(loop, doubles(inputs), EVERYTHING)
    for gradient, exact in zip(got, expected, strict=True):
        assert relative_error(gradient, exact) < RELATIVE
    for gradient in got[2:4]:
        assert (gradient[[0, 1, 3, 5]] == 0).all()


def test_gradients_of_ranks_add_up():
    """Each has two of four experts; where none of a token's are there, its gradients are zero."""
    x, gate_up, down, ids, weights = make(5, 4, 2, 32, 16)
    expected = gradients(loop, doubles((x, gate_up, down, ids, weights)), EVERYTHING)
    ranks = [
        gradients(
            grouped_mlp,
            (x, gate_up[first : first + 2], down[first : first + 2], ids, weights),
            EVERYTHING,
            first_expert=first,
            num_pairs=int(((ids >= first) & (ids < first + 2)).sum()),
        )
        for first in (0, 2)
    ]
    joined = [torch.cat if i in (2, 3) else sum for i in range(5)]
    for join, exact, *parts in zip(joined, expected, *ranks, strict=True):
        assert relative_error(join([part.double() for part in parts]), exact) < RELATIVE


def test_frozen_experts_get_no_gradient():
    inputs = make(3, 3, 2, 32, 16)
    for trained in ((0, 4), (2,), (1,)):
        expected = gradients(loop, doubles(inputs), trained)
        for got, exact in zip(gradients(grouped_mlp, inputs, trained), expected, strict=True):
            assert relative_error(got, exact) < RELATIVE


def test_widths_that_grouped_products_cannot_have_are_refused():
    inputs = make(3, 3, 2, 32, 18)
    with pytest.raises(ValueError, match=r"inner width of 18 on a rank.*of \d; lower tp"):
        gradients(grouped_mlp, inputs, EVERYTHING)
    assert relative_error(*(
        gradients(run, of, (0,))[1] for run, of in ((grouped_mlp, inputs), (loop, doubles(inputs)))
    )) < RELATIVE  # fmt: skip


def test_no_tokens_give_zero_gradients():
    for got in gradients(grouped_mlp, make(0, 3, 2, 32, 16), EVERYTHING)[2:4]:
        assert (got == 0).all()


@pytest.mark.gpu
def test_gradients_of_a_real_width_and_their_bits():
    """Qwen3-30B-A3B's widths, 5 of 16 experts taken by all; twice the same bits."""
    x, gate_up, down, _, weights = make(300, 16, 4, 2048, 768, dtype=torch.bfloat16)
    order = torch.rand(300, 5, generator=torch.Generator().manual_seed(0)).argsort(1)
    ids = torch.tensor([0, 3, 4, 9, 15])[order[:, :4]].int().to(DEVICE)
    inputs = [x, gate_up, down, ids, weights]
    got, again = (gradients(grouped_mlp, inputs, EVERYTHING) for _ in range(2))
    assert all(map(torch.equal, got, again))
    for gradient in got[2:4]:
        assert (gradient[[1, 2, 5, 14]] == 0).all()
    reference = [t.float().cuda() if t.is_floating_point() else t for t in inputs]
    expected = gradients(loop, reference, EVERYTHING)
    for gradient, exact in zip(got, expected, strict=True):
        assert relative_error(gradient, exact.double().cpu()) < RELATIVE


@pytest.mark.gpu
@pytest.mark.parametrize("T", [1, 64, 256, 1024, 4096])
def test_a_captured_graph_takes_new_ids(T):
    """Qwen3-30B-A3B's shape with fewer experts: a replay with other ids, twice the same bits."""
    x, gate_up, down, ids, weights = make(T, 32, 8, 2048, 768, dtype=torch.bfloat16)
    expert_mlp(x, gate_up, down, ids, weights)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = expert_mlp(x, gate_up, down, ids, weights)
    for shift in (1, 5):
        ids.copy_((ids + shift) % 32)
        graph.replay()
        first = got.clone()
        graph.replay()
        assert torch.equal(first, got)
        few = slice(0, 8)
        expected = loop(*doubles((x[few], gate_up, down, ids[few], weights[few])))
        assert relative_error(got[few], expected) < RELATIVE
