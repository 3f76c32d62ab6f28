"""The transformer against transformers'."""

import pytest
import torch
from support.models import make_reference

from roll_lite.models.attention import PackedAttention
from roll_lite.models.config import UnsupportedModelError, parse_config
from roll_lite.models.hf import load_model, tensor_slices
from roll_lite.models.logprobs import scaled_logits
from roll_lite.models.ops import linear, silu_mul

LENGTHS = (1, 7, 30, 129)


def pack_ids(sequences):
    lengths = [len(ids) for ids in sequences]
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
    positions = torch.cat([torch.arange(n) for n in lengths])
    return torch.cat(sequences), positions, PackedAttention(cu_seqlens, max(lengths))


def random_sequences(vocab_size=199):
    torch.manual_seed(1)
    return [torch.randint(0, vocab_size, (n,)) for n in LENGTHS]


@torch.no_grad()
@pytest.mark.parametrize(("num_rows", "size"), [(713, 96), (100, 1001), (301, 333)])
def test_a_gated_row_has_the_same_bits_among_any_number_of_rows(num_rows, size):
    """Many enough for several threads, whose parts end in the middle of rows."""
    torch.manual_seed(0)
    x = 3 * torch.randn(num_rows, 2 * size)
    whole = silu_mul(x)
    gate, up = x.double().chunk(2, dim=-1)
    torch.testing.assert_close(whole.double(), gate * gate.sigmoid() * up, rtol=1e-6, atol=1e-12)
    for num_beside in (1, 19, 33):
        assert torch.equal(torch.cat([silu_mul(part) for part in x.split(num_beside)]), whole)
    rounded = x.bfloat16()
    expected = torch.cat([silu_mul(part) for part in rounded.split(19)])
    assert torch.equal(silu_mul(rounded), expected)
    torch.testing.assert_close(expected.float(), whole, rtol=0.03, atol=0.03)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_in", "num_out"), [(64, 160), (576, 40), (1536, 24)])
def test_a_row_has_the_same_bits_among_any_number_of_rows(num_in, num_out, dtype):
    """Numbers that cancel, so that another order of adding up shows in 16 bits too."""
    torch.manual_seed(0)
    x, weight = torch.randn(700, num_in // 2), torch.randn(num_out, num_in // 2)
    x, weight = torch.cat([x, x], 1).to(dtype), torch.cat([weight, -weight], 1).to(dtype)
    whole = linear(x, weight)
    assert whole.abs().max() <= 1e-5 * num_in
    half = x[:, : num_in // 2], weight[:, : num_in // 2]
    exact = half[0].double() @ half[1].double().T
    assert (linear(*half) - exact).abs().max() <= 5e-3 * exact.abs().max()
    for num_rows in (1, 5, 16, 17, 33, 64, 65, 100, 511, 512, 577):
        assert torch.equal(linear(x[:num_rows], weight), whole[:num_rows]), num_rows


@torch.no_grad()
def test_logits_equal_transformers_packed_and_single(family_folder):
    reference, folder = family_folder
    model = load_model(folder)
    sequences = random_sequences()
    packed = scaled_logits(model.hidden_states(*pack_ids(sequences)), model.head_weight, 1.0)
    for ids, ours in zip(sequences, packed.split(LENGTHS), strict=True):
        theirs = reference(ids[None]).logits[0]
        single = scaled_logits(model.hidden_states(*pack_ids([ids])), model.head_weight, 1.0)
        scale = theirs.abs().max()
        assert (single - theirs).abs().max() <= 1e-5 * scale
        assert (ours - theirs).abs().max() <= 1e-5 * scale
        assert (ours - single).abs().max() <= 1e-5 * scale


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama3"])
def test_gradients_equal_transformers(family, tmp_path):
    reference = make_reference(family)
    reference.save_pretrained(tmp_path)
    model = load_model(tmp_path)
    ids = random_sequences()[2]
    token_ids, positions, attend = pack_ids([ids[:-1]])
    logprobs, _ = model(token_ids, positions, attend, torch.arange(len(ids) - 1), ids[1:])
    (-logprobs.mean()).backward()
    reference(ids[None], labels=ids[None]).loss.backward()
    theirs = {name: p.grad for name, p in reference.named_parameters()}
    ours = dict(model.named_parameters())
    for piece in tensor_slices(model.config):
        grad = ours[piece.parameter].grad[piece.index].reshape(piece.hf_shape)
        expected = theirs[piece.hf_name]
        assert (grad - expected).abs().max() <= 1e-5 * expected.abs().max(), piece.hf_name


def test_value_head_is_a_projection_of_the_last_hidden_state(tmp_path):
    reference = make_reference("qwen3")
    reference.save_pretrained(tmp_path)
    model = load_model(tmp_path, head="value")
    assert model.value_head.abs().sum() == 0  # a fresh critic predicts 0
    with torch.no_grad():
        model.value_head.normal_()
    ids = random_sequences()[2]
    hidden = reference(ids[None], output_hidden_states=True).hidden_states[-1][0]
    values = model(*pack_ids([ids]), torch.arange(len(ids)))
    torch.testing.assert_close(values, hidden @ model.value_head[0], rtol=1e-5, atol=1e-5)


LLAMA = {
    "model_type": "llama", "vocab_size": 10, "hidden_size": 8, "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2, "rms_norm_eps": 1e-5, "max_position_embeddings": 64,
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt2"}, "model_type='gpt2'.*llama, mistral, qwen2, qwen3"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_type='yarn'.*llama3"),
        ({"num_key_value_heads": 3}, "num_attention_heads=2.*num_key_value_heads=3"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"rms_norm_eps": None}, "rms_norm_eps=None"),
        ({"num_attention_heads": 0}, "num_attention_heads=0"),
        ({"vocab_size": "many"}, "vocab_size='many'"),
        ({"layer_types": ["linear_attention"]}, "layer_types has .*linear_attention"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rope_parameters"),
    ],
)
def test_unsupported_configs_are_named(change, message):
    with pytest.raises(UnsupportedModelError, match=message):
        parse_config(LLAMA | change)


def test_a_missing_field_is_named():
    with pytest.raises(UnsupportedModelError, match="hidden_size"):
        parse_config({k: v for k, v in LLAMA.items() if k != "hidden_size"})


def test_old_and_new_rope_fields_mean_the_same():
    old = LLAMA | {"rope_theta": 7e4, "rope_scaling": {"type": "linear", "factor": 2.0}}
    new = LLAMA | {"rope_parameters": {"rope_type": "linear", "rope_theta": 7e4, "factor": 2.0}}
    assert parse_config(old) == parse_config(new)


def test_a_sliding_window_limits_the_positions():
    assert parse_config(LLAMA | {"model_type": "mistral", "sliding_window": 16}).max_positions == 16
    window = {"sliding_window": 16, "use_sliding_window": None}
    assert parse_config(LLAMA | window | {"model_type": "mistral"}).max_positions == 16
    typed = window | {"layer_types": ["full_attention", "sliding_attention"]}
    assert parse_config(LLAMA | typed | {"model_type": "qwen3"}).max_positions == 16
    unused = {"model_type": "qwen2", "sliding_window": 16, "use_sliding_window": False}
    assert parse_config(LLAMA | unused).max_positions == 64


@pytest.mark.gpu
def test_bf16_on_cuda_is_close_to_fp32(family_folder):
    """The varlen kernel, forward and backward, against fp32 on the CPU."""
    _, folder = family_folder
    sequences = random_sequences()
    results = []
    for device, dtype in (("cpu", torch.float32), ("cuda", torch.bfloat16)):
        model = load_model(folder, device=device, dtype=dtype)
        ids, positions, attend = pack_ids(sequences)
        attend = PackedAttention(attend.cu_seqlens.to(device), attend.max_seqlen)
        rows, targets = torch.arange(len(ids), device=device), ids.roll(-1).to(device)
        logprobs, _ = model(ids.to(device), positions.to(device), attend, rows, targets)
        logprobs.mean().backward()
        grads = {n: p.grad.float().cpu() for n, p in model.named_parameters()}
        results.append((logprobs.detach().cpu(), grads))
    (exact, exact_grads), (ours, grads) = results
    assert (ours - exact).abs().mean() < 0.02
    for name in grads:
        similarity = torch.cosine_similarity(grads[name].flatten(), exact_grads[name].flatten(), 0)
        assert similarity > 0.995, name
