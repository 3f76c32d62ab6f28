"""Mixtures of experts against transformers' and against formulas."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from roll_lite.models.attention import PackedAttention
from roll_lite.models.config import LoraOptions, UnsupportedModelError, parse_config
from roll_lite.models.hf import INDEX, CheckpointError, hf_tensors, load_model
from roll_lite.models.hf_write import save_model
from roll_lite.models.lora import ExpertAdapter
from roll_lite.models.mlp import _grouped, _one_by_one, top_experts

SMALL = {
    "vocab_size": 199, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}  # fmt: skip
QWEN = {"intermediate_size": 96, "moe_intermediate_size": 24, "num_experts": 7}
MIXTURES = {
    "all sparse": ("qwen3_moe", {"head_dim": 16, "num_experts_per_tok": 3, "norm_topk_prob": True}),
    "some dense": ("qwen3_moe", {"head_dim": 16, "num_experts_per_tok": 3, "mlp_only_layers": [1]}),
    "shared": ("qwen2_moe", {"num_experts_per_tok": 3, "shared_expert_intermediate_size": 40}),
    "every other": (
        "qwen2_moe",
        {
            "num_experts_per_tok": 2, "shared_expert_intermediate_size": 40,
            "decoder_sparse_step": 2, "norm_topk_prob": True,
        },
    ),
    "mixtral": ("mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2}),
}  # fmt: skip
LENGTHS = (1, 7, 40)


def reference(name):
    kind, changes = MIXTURES[name]
    sizes = {"intermediate_size": 48} if kind == "mixtral" else QWEN
    config = transformers.AutoConfig.for_model(kind, **SMALL, **sizes, **changes)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():  # not norms and routers of 1 and 0
            parameter.add_(0.15 * torch.randn_like(parameter))
    return model.eval()


def relative(found, expected):
    return ((found - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("name", MIXTURES)
def test_logits_and_all_gradients_are_those_of_transformers(name, tmp_path):
    expected_model = reference(name)
    expected_model.save_pretrained(tmp_path)
    model = load_model(tmp_path)
    sequences = [torch.randint(0, 199, (n,)) for n in LENGTHS]
    cu_seqlens = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    positions = torch.cat([torch.arange(n) for n in LENGTHS])
    attend = PackedAttention(cu_seqlens, max(LENGTHS))
    logits = model.logits(model.hidden_states(torch.cat(sequences), positions, attend))
    expected = torch.cat([expected_model(ids[None]).logits[0] for ids in sequences])
    assert relative(logits, expected) < 1e-5
    logits.square().mean().backward()
    expected.square().mean().backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    found = hf_tensors(found, model.config, "fused")
    for hf_name, parameter in expected_model.named_parameters():
        assert relative(found.pop(hf_name), parameter.grad) < 1e-5, hf_name
    assert not found


@pytest.mark.parametrize("name", MIXTURES)
def test_a_folder_is_written_as_transformers_writes_it(name, tmp_path):
    expected_model = reference(name)
    expected_model.save_pretrained(tmp_path / "theirs")
    save_model(tmp_path / "ours", load_model(tmp_path / "theirs"), like=tmp_path / "theirs")
    theirs, ours = (
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / folder).state_dict()
        for folder in ("theirs", "ours")
    )
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(tensor, ours[name]) for name, tensor in theirs.items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MIXTURES)
def test_both_layouts_are_the_same_model(name, dtype, tmp_path):
    """transformers writes experts one by one, and has them fused in memory."""
    written = reference(name).to(dtype)
    written.save_pretrained(tmp_path / "one by one")
    write_in_files(tmp_path / "fused", written, 3)
    models = [load_model(tmp_path / folder, dtype=dtype) for folder in ("one by one", "fused")]
    first, second = (dict(model.named_parameters()) for model in models)
    assert first.keys() == second.keys()
    assert all(tensor.equal(second[name]) for name, tensor in first.items())


def write_in_files(folder, model, count):
    """The tensors of a model as it has them in memory, spread over files with an index."""
    folder.mkdir()
    model.config.save_pretrained(folder)
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    assert any(name.endswith("mlp.experts.gate_up_proj") for name in tensors)
    files = {name: f"part-{i % count}.safetensors" for i, name in enumerate(tensors)}
    for file in set(files.values()):
        save_file({n: t for n, t in tensors.items() if files[n] == file}, folder / file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": files}))


def test_missing_experts_are_named(tmp_path):
    reference("all sparse").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    kept = {n: t for n, t in tensors.items() if ".experts.5." not in n and ".experts.6." not in n}
    assert len(tensors) - len(kept) == 3 * 2 * 3
    save_file(kept, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError) as error:
        load_model(tmp_path)
    first = "missing model.layers.0.mlp.experts.5.gate_proj.weight, "
    assert first in str(error.value) and " and 14 more; not expected none" in str(error.value)
    assert "copy or download it again" in str(error.value) and len(str(error.value)) < 500


def test_equal_probabilities_go_to_the_first_experts():
    logits = torch.tensor([[0.1, 0.3, 0.3, 0.1, 0.2], [0.2] * 5]).log()
    ids, weights = top_experts(logits, 3, True)
    assert ids.tolist() == [[1, 2, 4], [0, 1, 2]]
    torch.testing.assert_close(weights, torch.tensor([[0.375, 0.375, 0.25], [1 / 3] * 3]))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts_per_tok": 9}, "num_experts_per_tok=9 is more than the 7 experts; lower"),
        ({"mlp_only_layers": [3]}, r"mlp_only_layers=\[3\] must be numbers of layers"),
        ({"model_type": "deepseek_v3"}, "'deepseek_v3' is not supported: its router chooses"),
        ({"moe_intermediate_size": None}, "moe_intermediate_size=None must be"),
    ],
)
def test_mixtures_that_cannot_be_computed_are_refused(changes, message):
    kind, options = MIXTURES["all sparse"]
    hf = {"model_type": kind, **SMALL, **QWEN, **options} | changes
    with pytest.raises(UnsupportedModelError, match=message):
        parse_config(json.loads(json.dumps(hf)))


def test_a_mixture_without_sparse_layers_is_a_dense_model():
    kind, options = MIXTURES["all sparse"]
    hf = {"model_type": kind, **SMALL, **QWEN, **options, "decoder_sparse_step": 100}
    assert parse_config(hf).experts is None
    assert parse_config(hf | {"decoder_sparse_step": 1}).experts.dense_layers == ()


@pytest.mark.parametrize("adapted", [(), (0,), (0, 1)])
def test_grouped_products_are_those_one_by_one(adapted):
    """With an expert that no token has, and pairs of experts on other ranks."""
    torch.manual_seed(0)
    weights = [torch.randn(5, 2 * 24, 16), torch.randn(5, 16, 24)]
    adapters = [None, None]
    for k in adapted:
        adapters[k] = ExpertAdapter(weights[k], LoraOptions(rank=8), None, True)
        for parameter in adapters[k].parameters():
            torch.nn.init.normal_(parameter)
    experts = torch.tensor([0, 0, 0, 1, 3, 3, 4, 5, 5])
    x = torch.randn(9, 16)
    results = []
    for run in (_one_by_one, _grouped):
        leaves = [t.clone().requires_grad_() for t in (x, *weights)]
        out = run(leaves[0], experts, *leaves[1:], adapters)
        trained = [p for adapter in adapters if adapter for p in adapter.parameters()]
        results.append([out, *torch.autograd.grad(out.square().sum(), [*leaves, *trained])])
    for expected, found in zip(*results, strict=True):
        assert relative(found, expected) < 1e-5
    assert not results[1][0][7:].any() and results[1][1][:7].all() and not results[1][1][7:].any()
    assert not results[1][2][2].any()


@pytest.mark.gpu
@pytest.mark.parametrize("name", MIXTURES)
def test_kernels_compute_what_the_plain_loop_does(name, tmp_path):
    reference(name).save_pretrained(tmp_path)
    results = []
    for device in ("cpu", "cuda"):
        model = load_model(tmp_path, device=device)
        ids, positions = torch.arange(40, device=device), torch.arange(40, device=device)
        attend = PackedAttention(torch.tensor([0, 40], dtype=torch.int32, device=device), 40)
        hidden = model.hidden_states(ids, positions, attend)
        hidden.square().mean().backward()
        with torch.no_grad():
            again = model.hidden_states(ids, positions, attend)
        grads = [p.grad.cpu() for n, p in model.named_parameters() if n != "lm_head"]
        results.append([hidden.detach().cpu(), again.cpu(), *grads])
    for expected, found in zip(*results, strict=True):
        assert relative(found, expected) < 2e-3
