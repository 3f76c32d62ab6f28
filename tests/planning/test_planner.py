"""The planner against the real model, measured bytes, and numbers worked out by hand."""

import ast
import inspect
import json
import re
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch
import transformers
from support.models import FAMILIES, SMALL
from support.paths import DOCS

from roll_lite.device_map import auto_device_map, parse_device_map
from roll_lite.engine.arena import cache_shape
from roll_lite.engine.attention_backends import PAGE_SIZE
from roll_lite.engine.engine import MAX_PREFILL_TOKENS, Engine
from roll_lite.models import memory
from roll_lite.models.config import (
    DEFAULT_TARGETS,
    TARGETS,
    LoraOptions,
    parse_config,
    planned_config,
    shape_config,
)
from roll_lite.models.cost import (
    active_parameters,
    adapter_cost,
    block_cost,
    cache_bytes_per_token,
    count_parameters,
    kv_bytes_per_token,
    saved_bytes_per_token,
)
from roll_lite.models.fsdp import shard
from roll_lite.models.logprobs import CUDA_CHUNK_ROWS
from roll_lite.models.lora import add_adapters
from roll_lite.models.memory import (
    RankMemory,
    engine_bytes,
    reference_memory,
    together,
    train_memory,
)
from roll_lite.models.shapes import SHAPES
from roll_lite.models.tensor_parallel import TensorShard
from roll_lite.models.transformer import Transformer
from roll_lite.options import flatten, from_flat
from roll_lite.planning import __main__ as plan_command
from roll_lite.planning.plan import Plan, PlanOptions, take_turns
from roll_lite.planning.render import RECIPE_FLAGS, remedies, render, turns_line, warnings
from roll_lite.planning.speed import HOST_RATE, known_machine, step_seconds
from roll_lite.recipes import rlvr

SCRIPT = plan_command.__file__
GIB = 2**30
HAND = parse_config(
    {
        "model_type": "llama", "vocab_size": 10, "hidden_size": 8, "intermediate_size": 16,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4,
        "rms_norm_eps": 1e-5, "max_position_embeddings": 64, "tie_word_embeddings": False,
    }
)  # fmt: skip


def on_meta(config):
    with torch.device("meta"):
        return Transformer(config)


def numel(parameters):
    return sum(parameter.numel() for parameter in parameters)


EXPERTS = {
    "vocab_size": 99, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-6, "num_experts": 6,
    "max_position_embeddings": 64, "moe_intermediate_size": 8, "num_experts_per_tok": 2,
}  # fmt: skip
MIXTURES = {
    "all sparse": {"model_type": "qwen3_moe"},
    "a dense layer": {"model_type": "qwen3_moe", "mlp_only_layers": [1]},
    "a large dense layer": {
        "model_type": "qwen3_moe", "mlp_only_layers": [1], "intermediate_size": 480
    },
    "shared": {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 12},
    "shared in every other": {
        "model_type": "qwen2_moe", "shared_expert_intermediate_size": 12, "decoder_sparse_step": 2
    },
    "mixtral": {"model_type": "mixtral"},
}  # fmt: skip


@pytest.mark.parametrize("name", MIXTURES)
def test_parameters_of_mixtures_are_counted_exactly(name):
    config = parse_config(EXPERTS | MIXTURES[name])
    model, counts = on_meta(config), count_parameters(config)
    assert counts.total == numel(model.parameters())
    assert counts.block == max(numel(block.parameters()) for block in model.blocks)
    assert counts.root == counts.total - numel(model.blocks.parameters())
    experts = {n: p for n, p in model.named_parameters() if "expert" in n}
    assert active_parameters(config) == counts.total - numel(experts.values()) * 4 // 6
    on_a_rank = [
        sum(p.numel() // (3 if "expert" in n else 1) for n, p in block.named_parameters())
        for block in model.blocks
    ]
    assert count_parameters(config, ep=3).block == max(on_a_rank)
    with torch.device("meta"):
        part = Transformer(config, shard=TensorShard(0, 2, None))
    whole = [p for n, p in part.named_parameters() if n.endswith(("norm.weight", "router", "gate"))]
    held = 2 * (numel(part.parameters()) - numel(whole)) + numel(whole)
    assert count_parameters(config, 2).total == held


@pytest.mark.parametrize("targets", [DEFAULT_TARGETS, tuple(TARGETS), ("out", "expert_down")])
@pytest.mark.parametrize("name", MIXTURES)
def test_adapters_of_mixtures_are_counted_exactly(name, targets):
    config = parse_config(EXPERTS | MIXTURES[name])
    model = on_meta(config)
    with torch.device("meta"):
        add_adapters(model, LoraOptions(rank=3, targets=targets))
    block, whole = adapter_cost(config, 3, targets)
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    assert numel(trained.values()) == whole.parameters
    in_blocks = [numel(p for p in b.parameters() if p.requires_grad) for b in model.blocks]
    assert max(in_blocks) == block.parameters
    dealt = sum(p.numel() // (3 if "experts." in n else 1) for n, p in trained.items())
    assert adapter_cost(config, 3, targets, ep=3)[1].parameters == dealt


def test_what_adapters_of_experts_keep():
    """By hand: 6 experts of 8, of which a token has 2, and an MLP of 48 in one of 3 layers."""
    config = parse_config(EXPERTS | MIXTURES["a dense layer"])
    model = adapter_cost(config, 5, ("out", "gate_up", "expert_gate_up", "expert_down"))[1]
    pair = 32 + 8 + 2 * 5  # what goes into both products, and into the second half of adapters
    assert model.saved == 2 * (5 + 2 * pair) + (5 + 5)
    assert model.saved_fp32 == 2 * 2 * 32  # what comes out
    assert adapter_cost(config, 5, ("out", "gate_up"))[1].saved == 3 * 5 + 5


@pytest.mark.parametrize("family", [*FAMILIES, *SHAPES])
def test_parameters_are_counted_exactly(family):
    if family in SHAPES:
        config = shape_config(family)
    else:
        kind, changes = FAMILIES[family]
        config = parse_config(getattr(transformers, f"{kind}Config")(**SMALL | changes).to_dict())
    model, counts = on_meta(config), count_parameters(config)
    assert counts.total == numel(model.parameters())
    assert counts.block == numel(model.blocks[0].parameters())
    assert counts.root == counts.total - numel(model.blocks.parameters())


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("smollm2-135m", 134_515_008),
        ("qwen3-0.6b", 596_049_920),
        ("qwen3-4b", 4_022_468_096),
        ("qwen3-8b", 8_190_735_360),
        ("qwen3-14b", 14_768_307_200),
        ("qwen3-32b", 32_762_123_264),
        ("qwen3-30b-a3b", 30_532_122_624),
        ("qwen3-235b-a22b", 235_093_634_560),
        ("qwen2.5-0.5b", 494_032_768),
        ("qwen2.5-1.5b", 1_543_714_304),
        ("qwen2.5-7b", 7_615_616_512),
        ("llama-3.2-1b", 1_235_814_400),
        ("llama-3.2-3b", 3_212_749_824),
        ("llama-3.1-8b", 8_030_261_248),
        ("llama-3.1-70b", 70_553_706_496),
        ("llama-3.1-405b", 405_853_388_800),
    ],
)
def test_shapes_have_the_published_size(name, published):
    assert count_parameters(planned_config(name)).total == published


@pytest.mark.parametrize(("name", "billions"), [("qwen3-30b-a3b", 3.3), ("qwen3-235b-a22b", 22.2)])
def test_a_mixture_of_experts_is_that_of_transformers(name, billions):
    config = planned_config(name)
    with torch.device("meta"):
        hf = transformers.AutoConfig.for_model(**SHAPES[name] | {"num_hidden_layers": 1})
        model = transformers.AutoModelForCausalLM.from_config(hf)
    assert count_parameters(config).block == numel(model.model.layers.parameters())
    assert active_parameters(config) / 1e9 == pytest.approx(billions, abs=0.06)  # as published


def test_what_a_token_keeps_in_a_block_of_experts():
    """2,048 units, 32 + 4 + 4 heads of 128, 8 of 128 experts of 768: in bf16 and in fp32."""
    config, qkv = planned_config("qwen3-30b-a3b"), 40 * 128
    kept = 2 * 2048 + (2048 + 2 * qkv + 32 * 128) + (2048 + 2 * 8 * 768)
    in_fp32 = 2 + (32 + 32 + 4) + (128 + 4 * 8)
    assert (block_cost(config).saved, block_cost(config).saved_fp32) == (kept, in_fp32)
    # A token is on 8 * (1 - (7/8)^8) = 5.251 of 8 ranks, and each has a place for 8 experts of it.
    dealt = block_cost(config, ep=8)
    assert dealt.saved - kept == pytest.approx(5.251 * 2048, rel=0.001)
    assert dealt.saved_fp32 - in_fp32 == pytest.approx(3 * 8 * 4.251, rel=0.01)
    more = dealt.workspace - block_cost(config).workspace
    assert more == pytest.approx(8 * 4.251 * 2048, rel=0.001)
    assert cache_bytes_per_token(config, 1, 2) == 48 * (2 * 4 * 128 * 2 + 8)


def test_a_folder_with_a_mixture_of_experts_is_planned(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SHAPES["qwen3-30b-a3b"]))
    assert planned_config(tmp_path) == shape_config("qwen3-30b-a3b")
    device_map = parse_device_map("train=all generate=all", 64)
    options = PlanOptions(checkpointing="full")
    assert Plan(planned_config(tmp_path), device_map, options, 141 * GIB).fits


ROW = r"\| `(qwen3-\d+b-a\d+b)` \| (\d+) \| (\d+) \| `(.+?)` \| `?(.*?)`? \| (\d+) \| (\S+) \|"
PLANNED = re.findall(ROW, (DOCS / "reference" / "cluster.md").read_text())


@pytest.mark.parametrize("row", PLANNED, ids=lambda row: "-".join(row[:3]))
def test_plans_of_large_mixtures_are_those_of_the_page(command, row):
    model, world_size, lora_rank, device_map, chosen, gib, seconds = row
    options = "--world-size", world_size, "--device-gib", 141, "--gpu", "H200"
    printed = command(SCRIPT, "--model", model, *options, "--lora-rank", lora_rank)[1]
    assert ("device map: ep=8: between machines" in printed) == (int(world_size) > 8)
    plan = printed.split("it fits:")[-1]
    totals = re.findall(r"^\d+-\d+ .* ([\d.]+) GiB$", plan, re.M)
    assert f"{max(map(float, totals)):.0f}" == gib
    assert f"seconds: about {seconds} a step" in plan
    for role in parse_device_map(device_map, int(world_size)).roles:
        sizes = f"{role.tp} +{role.ep} +" if "ep" in device_map else f"{role.tp} +"
        assert re.search(rf"^{role.name} +0-\d+ +{sizes}", plan, re.M)
    assert all(flag in plan.splitlines()[-1] for flag in chosen.split("--"))


def test_too_large_a_mixture_is_said_to_need_lora(command):
    """16 bytes for each of 235 G parameters are more than 16 GPUs have."""
    options = "--world-size", 16, "--device-gib", 141, "--gpu", "H200"
    code, printed = command(SCRIPT, "--model", "qwen3-235b-a22b", *options)
    assert code == 1 and "torchrun" not in printed
    assert "--lora-rank 16 together bring it to" in printed


def test_dealt_experts_take_less_while_they_are_gathered():
    """By hand: 128 experts of 3 x 2,048 x 768; a rank keeps as much of them as without ep."""
    config, experts = planned_config("qwen3-30b-a3b"), 128 * 3 * 2048 * 768
    whole, dealt = (train_memory(config, 64, 1, 0, 2, ep=ep) for ep in (1, 8))
    assert whole.gathered - dealt.gathered == 2 * 2 * experts * 7 // 8
    assert (whole.weights, whole.optimizer) == (dealt.weights, dealt.optimizer)


def test_a_shape_may_have_fewer_layers():
    assert shape_config("qwen3-8b/2") == replace(shape_config("qwen3-8b"), num_layers=2)
    for name in ("qwen3-8b/0", "qwen3-8b/37", "qwen3-8b/x"):
        with pytest.raises(ValueError, match="give 1 to 36 layers, as in qwen3-8b/2"):
            shape_config(name)


def test_an_unknown_shape_is_named():
    with pytest.raises(ValueError, match=r"shape='gpt2' is not known; use one of smollm2-135m"):
        shape_config("gpt2")


@pytest.mark.parametrize("tp", [2, 4])
def test_padding_and_repeated_heads_are_counted(tp):
    """Of real models' ranks: 10 rows on 4 ranks, 2 kv heads; only norms are the same on all."""
    with torch.device("meta"):
        model = Transformer(HAND, shard=TensorShard(0, tp, None))
    norms = [p for name, p in model.named_parameters() if name.endswith("norm.weight")]
    held = tp * (numel(model.parameters()) - numel(norms)) + numel(norms)
    assert count_parameters(HAND, tp).total == held
    shape = cache_shape(model, 1, 16)
    assert 16 * kv_bytes_per_token(HAND, tp, 2) == 2 * torch.Size(shape).numel()


def test_bytes_by_hand():
    """H 8, F 16, V 10, D 4, 4 heads over 2 kv heads, 2 layers; 4 ranks; 100 tokens in bf16."""
    counts = count_parameters(HAND)
    assert counts.block == 8 * 4 * 8 + 8 * 16 + 3 * 16 * 8 + 2 * 8 == 784
    assert counts.root == 2 * 10 * 8 + 8 == 168
    assert counts.total == 2 * 784 + 168 == 1736
    # a block: 4 x H, queries and output of 16, keys and values of 8, 3 x F; 2 + 4 numbers in fp32
    block = 2 * (4 * 8 + 2 * 16 + 2 * 8 + 3 * 16) + 4 * (2 + 4)
    assert saved_bytes_per_token(HAND, 1, 2) == 2 * block + 2 * 3 * 8 + 4 * (1 + 4) == 628
    # a chunk of 2048 x 10; the head's gradient in fp32 and in bf16; that of the hidden states
    head = 2 * 2048 * 10 + 6 * 10 * 8 + 100 * 2 * 8
    assert train_memory(HAND, 4, 1, 100, 2) == RankMemory(
        weights=4 * 434, gradients=4 * 434, optimizer=8 * 434, gathered=2 * 1736,
        activations=62_800 + head,
    )  # fmt: skip
    assert reference_memory(HAND, 4, 1, 100, 2) == RankMemory(
        weights=2 * 434, gathered=2 * 1736,
        activations=100 * 2 * (2 * 8 + 3 * 16) + 6 * 2048 * 10,
    )  # fmt: skip
    # full checkpointing keeps the residual stream and what comes to it, 16-bit moments take half
    assert saved_bytes_per_token(HAND, 1, 2, "full") == 2 * (2 * 2 * 8) + 2 * 3 * 8 + 4 * (1 + 4)
    assert train_memory(HAND, 4, 1, 100, 2, moments="bfloat16").optimizer == 4 * 434
    # selective: also qkv of 32, attention of 16 and its 4 sums, `out`, gate and up
    kept = 2 * (2 * 8 + 32 + 16 + 8 + 2 * 16) + 4 * 4
    assert saved_bytes_per_token(HAND, 1, 2, "selective") == 2 * kept + 2 * 3 * 8 + 4 * (1 + 4)
    # tp=2: half of everything but the residual stream, its norms and the last norm
    half = 2 * (4 * 8 + (2 * 16 + 2 * 8 + 3 * 16) // 2) + 4 * (2 + 2)
    assert saved_bytes_per_token(HAND, 2, 2) == 2 * half + 2 * 3 * 8 + 4 * (1 + 4)
    assert train_memory(HAND, 4, 2, 100, 2).gathered == 1736
    # keys and values: 2 layers x 2 x 1 kv head x D 4 in bf16
    assert kv_bytes_per_token(HAND, 2, 2) == 32
    assert engine_bytes(HAND, 2, 1000, 2) == 2 * 868 + 1000 * 32


@pytest.mark.parametrize(
    ("shape", "tokens", "options", "gib"),
    [
        ("qwen3-0.6b", 32768, {}, 51.5),
        ("qwen3-0.6b", 32768, {"checkpointing": "selective"}, 37.5),
        ("qwen3-0.6b", 32768, {"checkpointing": "full"}, 14.9),
        ("qwen3-1.7b", 16384, {}, 60.4),
        ("qwen3-8b", 16384, {"checkpointing": "full", "moments": "bfloat16"}, 107.9),
        ("smollm2-135m", 32768, {}, 18.3),
        ("qwen3-0.6b", 32768, {"lora_rank": 16}, 43.31),
        ("qwen3-0.6b", 32768, {"lora_rank": 16, "checkpointing": "full"}, 7.30),
        ("qwen3-1.7b", 16384, {"lora_rank": 16}, 36.94),
        ("qwen3-8b", 16384, {"lora_rank": 16}, 96.46),
        ("qwen3-8b", 16384, {"lora_rank": 16, "checkpointing": "full"}, 31.07),
    ],
)
def test_training_takes_what_a_gpu_allocated(shape, tokens, options, gib):
    """Peaks on one H200 (torch 2.11) with the batches of scripts/bench/train.py, two an update.

    Those with LoRA are from a trainer that gathered frozen weights, which it no longer does.
    """
    config = shape_config(shape)
    planned = train_memory(config, 1, 1, tokens, 2, **options)
    gib -= memory.gathered_bytes(config, 1, 2) / GIB if "lora_rank" in options else 0
    assert planned.total / GIB == pytest.approx(gib, rel=0.05)


def nbytes(tensors):
    """Allocated bytes, of local shards where there are any."""
    parts = [t.to_local() if hasattr(t, "to_local") else t for t in tensors]
    return sum(tensor.untyped_storage().nbytes() for tensor in parts)


SMALL_QWEN = SHAPES["qwen3-0.6b"] | {
    "vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 2, "head_dim": 16,
}  # fmt: skip


def test_a_real_trainer_holds_what_is_planned(place):
    model = Transformer(parse_config(SMALL_QWEN))
    model.init_weights(0)
    shard(model, place.mesh["dp"], torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    planned = train_memory(model.config, 1, 1, 0, 4)
    assert nbytes(model.parameters()) == planned.weights
    assert nbytes(parameter.grad for parameter in model.parameters()) == planned.gradients
    states = [tensor for state in optimizer.state.values() for tensor in state.values()]
    assert nbytes(states) == pytest.approx(planned.optimizer, rel=0.01)


@pytest.mark.parametrize("targets", [DEFAULT_TARGETS, ("qkv", "down")])
def test_adapters_take_what_is_planned(targets):
    model = on_meta(parse_config(SMALL_QWEN)).to(torch.bfloat16)
    with torch.device("meta"):
        add_adapters(model, LoraOptions(rank=3, targets=targets))
    trained = [p for p in model.parameters() if p.requires_grad]
    block, model_cost = adapter_cost(model.config, 3, targets)
    assert numel(trained) == 2 * block.parameters == model_cost.parameters
    options = {"lora_rank": 3, "lora_targets": targets}
    planned = train_memory(model.config, 1, 1, 0, 2, **options)
    assert planned.weights == nbytes(model.parameters())  # frozen in bf16, adapters in fp32
    assert planned.gradients == 4 * numel(trained) == planned.optimizer / 2
    # A packed token keeps 3 more numbers for each adapter in bf16; with full checkpointing those
    # of the block that is computed again.
    more = [
        train_memory(model.config, 1, 1, 1000, 2, checkpointing=kind, **options).activations
        - train_memory(model.config, 1, 1, 1000, 2, checkpointing=kind, lora_rank=1,
                       lora_targets=()).activations
        for kind in ("none", "full")
    ]  # fmt: skip
    assert more[0] - more[1] == 1000 * 2 * 3 * len(targets)


@pytest.mark.parametrize("name", SHAPES)
def test_a_cached_token_has_the_size_of_the_engines_cache(name):
    config = shape_config(name)
    shape = cache_shape(on_meta(config), 1, 16)
    assert 16 * kv_bytes_per_token(config, 1, 2) == 2 * torch.Size(shape).numel()


def test_the_planner_knows_the_sizes_that_the_code_works_in():
    options = inspect.signature(Engine).parameters
    assert PAGE_SIZE["triton"] == memory.PAGE_TOKENS
    assert options["max_num_seqs"].default == memory.MAX_RUNNING
    assert MAX_PREFILL_TOKENS["cuda"] == memory.MAX_PREFILL_TOKENS
    assert memory.LOGPROB_ROWS == CUDA_CHUNK_ROWS


def test_roles_on_one_rank_add_up_what_stays_and_take_turns_with_the_rest():
    train = RankMemory(weights=1, gradients=2, optimizer=3, gathered=10, activations=50)
    engine = RankMemory(weights=5, activations=55, kv_cache=100)
    assert together([train, engine]) == RankMemory(
        weights=6, gradients=2, optimizer=3, gathered=10, activations=50, kv_cache=100
    )
    assert together([]).total == 0


def test_the_arithmetic_of_a_step():
    batch = PlanOptions(
        prompts_per_step=30, samples_per_prompt=8, prompt_tokens=100, max_tokens=29,
        tokens_per_microbatch=1000, updates_per_step=3, kv_cache_gib=1.0,
    )  # fmt: skip
    device_map = parse_device_map("train=0-3,tp=2 generate=4-7", 8)
    result = Plan(shape_config("qwen3-8b"), device_map, batch, 1000 * GIB)
    # 240 samples of 129 tokens: 80 an update, 40 on each of two trainers; 128 packed tokens each
    assert batch.samples.per_update(device_map["train"]) == 40
    # seven samples in each of six micro-batches
    assert batch.samples.microbatches(device_map["train"], 1000) == 3 * 6
    assert batch.samples.generated_by(device_map["generate"]) == 60
    assert "rank: 120 samples, 15,480 tokens, 18 micro-batches of up to 1,000" in render(result)
    # 9 pages of 16 tokens, each 36 layers x 2 x 8 kv heads x 128 in bf16
    assert result.ranks[1].samples_at_once == 2**30 // (144 * 147456) == 50
    assert result.fits and not warnings(result)
    # 999 packed tokens, which the micro-batch limits, not the 40 samples
    trainer = train_memory(shape_config("qwen3-8b"), 4, 2, 1000, 2)
    assert result.ranks[0].memory == trainer


def test_equal_ranks_are_one_line_and_a_cache_fits_the_fullest_rank_of_its_engine():
    config = shape_config("qwen3-8b")
    device_map = parse_device_map("train=0-4 generate=0-7,tp=2", 8)
    batch = PlanOptions(samples_per_prompt=512, tokens_per_microbatch=4096)
    result = Plan(config, device_map, batch, 80 * GIB)
    assert [(part.ranks, part.roles) for part in result.ranks] == [
        ((0, 1, 2, 3, 4), ("train", "generate")),
        ((5,), ("generate",)),
        ((6, 7), ("generate",)),
    ]
    shared, beside, alone = (part.memory for part in result.ranks)
    assert shared.total == int(0.9 * 80 * GIB) == alone.total
    assert beside.kv_cache == shared.kv_cache < alone.kv_cache  # rank 5 belongs to rank 4's engine
    assert "0-4    train+generate" in render(result)


def test_a_cache_is_no_larger_than_its_samples():
    device_map, _ = auto_device_map(8, shape_config("qwen3-0.6b"), 80 * GIB, ["train", "generate"])
    result = Plan(shape_config("qwen3-0.6b"), device_map, PlanOptions(), 80 * GIB)
    # 32 samples of 1,280 tokens on each rank, 28 layers x 2 x 8 x 128 in bf16
    assert result.ranks[0].memory.kv_cache == 32 * 1280 * 114688
    assert result.ranks[0].samples_at_once == 32


def make_plan(text, world_size=8, name="qwen3-8b", gib=80, **changes):
    device_map = parse_device_map(text, world_size)
    return Plan(planned_config(name), device_map, PlanOptions(**changes), gib * GIB)


def test_copies_of_the_weights_take_memory():
    """16 ranks with two copies hold what 8 ranks with one do."""
    maps = (
        ("train=all,fsdp=8 generate=all", 16),
        ("train=all generate=all", 8),
        ("train=all generate=all", 16),
    )
    plans = [make_plan(text, size, gib=141) for text, size in maps]
    copies, one, spread = (plan.ranks[0].memory.weights for plan in plans)
    assert copies == one > spread


def test_an_engine_that_sleeps_leaves_its_memory_to_the_trainer():
    options = {"text": "train=all generate=all", "checkpointing": "full", "kv_cache_gib": 10.0}
    beside, in_turn = make_plan(**options), make_plan(**options, engines_sleep=True)
    config = shape_config("qwen3-8b")
    trainer = train_memory(config, 8, 1, 16384, 2, checkpointing="full")
    awake, syncing, asleep = in_turn.ranks[0].phases.values()
    assert beside.needed == trainer.total + 2 * 8_190_735_360 + 10 * GIB
    assert asleep == trainer and in_turn.needed == max(awake.total, trainer.total)
    # masters and moments stay: 12 bytes a parameter; gradients come with training
    prompts = 32 * 256 * 2 * (2 * 4096 + 3 * 12288)
    shares = 12 * 8_190_735_360 // 8 + 2 * 8_190_735_360
    assert awake.total == shares + prompts + 10 * GIB
    assert syncing.total == shares  # the cache sleeps on
    assert "train+generate, training" in render(in_turn)
    # ranks without a trainer win nothing
    apart = make_plan("train=0-3 generate=4-7", engines_sleep=True)
    assert [len(part.phases) for part in apart.ranks] == [1, 1]


def test_offloaded_trainers_leave_their_memory_to_the_engine():
    options = {"text": "train=all generate=all reference=all", "checkpointing": "full"}
    options |= {"kv_cache_gib": 60.0, "world_size": 1, "gib": 139.8, "moments": "bfloat16"}
    weights, masters = 2 * 8_190_735_360, 4 * 8_190_735_360
    prompts = MAX_PREFILL_TOKENS["cuda"] * 2 * (2 * 4096 + 3 * 12288)
    plan = make_plan(**options, engines_sleep=True, offload=True)
    generating, syncing, _ = in_turn = [*plan.ranks[0].phases.values()]
    assert generating.total == weights + prompts + 60 * GIB
    assert syncing.total == weights + 2 * masters  # without the reference
    beside = make_plan(**options, offload=True).ranks[0].phases.values()
    more = [a.total - b.total for a, b in zip(beside, in_turn, strict=True)]
    assert more == [0, 60 * GIB, weights + 60 * GIB]
    syncing = [*make_plan(**options, engines_sleep=True, offload=True, lora_rank=16).ranks[0]
               .phases.values()][1]  # fmt: skip
    adapters = adapter_cost(plan.config, 16, DEFAULT_TARGETS)[1].parameters
    assert syncing.total == weights + (2 + 4 + 2 * 2) * adapters  # of the engine, masters, moments
    seconds = step_seconds(plan, known_machine("H200"))
    moved = [2 * masters + weights, 2 * masters]  # the reference never changes
    assert [seconds[name] for name in ("reload", "offload")] == pytest.approx(
        [num_bytes / HOST_RATE for num_bytes in moved]
    )


@pytest.mark.parametrize(
    ("text", "num_ranks", "copies", "is_one"),
    [
        ("train=all generate=all", 1, 1, True),
        ("train=all,tp=2 generate=all,tp=2", 2, 0.5, True),
        ("train=all,fsdp=1 generate=all", 2, 1, True),
        ("train=all generate=all", 2, 1.5, False),  # FSDP cuts
        ("train=all,tp=2 generate=all", 2, 1.5, False),  # half, and an engine with all
        ("train=0 generate=1", 2, 1, False),  # one on each
    ],
)
def test_shared_weights_are_counted_once(text, num_ranks, copies, is_one):
    """Beside them there are adapters, with less than a hundredth of the parameters."""
    options = {"lora_rank": 16, "checkpointing": "full", "kv_cache_gib": 20.0, "gib": 139.8}
    plan = make_plan(text, num_ranks, **options)
    whole = 2 * 8_190_735_360
    assert copies <= plan.ranks[0].memory.weights / whole < copies + 0.02
    said = "one copy of the frozen ones" if is_one else "engines have their own"
    assert f"weights: {said}" in render(plan)
    assert "weights:" not in render(make_plan(text, num_ranks, **options | {"lora_rank": 0}))
    turns = plan.with_options(engines_sleep=True, offload=True)
    least = min(memory.weights / whole for memory in turns.ranks[0].phases.values())
    assert (least >= copies) == (is_one or text == "train=0 generate=1")


@pytest.mark.parametrize(
    ("name", "options", "chosen"),
    [
        ("qwen3-0.6b", {"kv_cache_gib": 40.0}, None),
        ("qwen3-1.7b", {"kv_cache_gib": 90.0}, "chosen: engines_sleep: a rank"),
        (
            "qwen3-8b",
            {"moments": "bfloat16"},
            "chosen: engines_sleep and offload: a rank",
        ),
        ("qwen3-14b", {"lora_rank": 16, "kv_cache_gib": 30.0}, None),
        (
            "qwen3-32b",
            {"lora_rank": 16, "kv_cache_gib": 40.0},
            "chosen: engines_sleep: a rank",
        ),
        ("qwen3-14b", {"moments": "bfloat16"}, None),  # 165 GiB of masters, gradients and moments
    ],
)
def test_auto_takes_turns_where_memory_asks_for_it(name, options, chosen):
    options = {"checkpointing": "full", "kv_cache_gib": 60.0} | options
    plan = make_plan("train=all generate=all", 1, name, gib=139.8, **options)
    new = take_turns(plan)
    assert (new is not plan) == bool(chosen)
    assert not chosen or (new.fits_devices and turns_line(plan, new).startswith(chosen))
    ahead = replace(plan, options=replace(plan.options, max_staleness=1))
    assert take_turns(ahead) is ahead


def test_a_judge_has_its_own_model_and_cache():
    small, device_map = shape_config("qwen3-0.6b"), parse_device_map("train=all judge=all", 1)
    batch = PlanOptions(judge_cache_gib=2.0, checkpointing="full")
    configs = {"judge": small}
    with_judge = Plan(shape_config("qwen3-1.7b"), device_map, batch, 141 * GIB, configs)
    alone = Plan(shape_config("qwen3-1.7b"), parse_device_map("train=all", 1), batch, 141 * GIB)
    assert with_judge.needed - alone.needed == engine_bytes(small, 1, 0) + 2 * GIB


FLAGS = {"--engines-sleep": "engines_sleep", "--offload": "offload",
         "--checkpointing": "checkpointing",
         "--tokens-per-microbatch": "tokens_per_microbatch", "--moments": "moments",
         "--lora-rank": "lora_rank", "--kv-cache-gib": "kv_cache_gib"}  # fmt: skip


def with_options(text, name, world_size, given, words):
    """The plan with the options that a remedy names, read from its text."""
    for flag, field in FLAGS.items():
        if found := re.search(rf"{flag} ?([\w.]*)", words):
            value = found[1]
            is_number = value[:1].isdigit()
            given = given | {field: ast.literal_eval(value) if is_number else value or True}
    if found := re.search('--device-map "(.*?)"', words):
        text = found[1]
    if found := re.search(r"(\d+) ranks", words):
        world_size = int(found[1])
    return make_plan(text, world_size, name, **given)


@pytest.mark.parametrize(
    ("name", "world_size", "given", "expected"),
    [
        ("qwen3-8b", 8, {}, ["--checkpointing full brings it to", "--tokens-per-microbatch 4096"]),
        ("qwen3-0.6b", 1, {"kv_cache_gib": 60.0}, ["--engines-sleep", "--kv-cache-gib 30.0"]),
        (
            "qwen3-8b",
            1,
            {"checkpointing": "full"},
            ["--lora-rank 16", "and 2 ranks together"],
        ),
        ("llama-3.1-70b", 8, {}, ["train=all,tp=2", "16 ranks together", "and --lora-rank 16"]),
    ],
)
def test_every_remedy_does_what_it_says(name, world_size, given, expected):
    text = "train=all generate=all" + (",tp=8" if "70b" in name else "")
    before = make_plan(text, world_size, name, **given)
    assert not before.fits and before.problems[0].endswith("but has 72.0 GiB of 80.0 GiB")
    lines = remedies(before)
    for words in expected:
        assert any(words in line for line in lines), lines
    for line in lines:
        options, said = re.fullmatch(r"(.*?) (?:together )?brings? it to (.*)", line).groups()
        after = with_options(text, name, world_size, given, options)
        amount = f"{after.needed / GIB:,.1f} GiB"
        assert said == amount + ("" if after.fits else ", which is not enough"), line
    assert any(not line.endswith("not enough") for line in lines)


def test_where_nothing_helps_it_says_so():
    lines = remedies(make_plan("train=all generate=all,tp=8", name="llama-3.1-405b"))
    assert re.search(r"\d+ ranks together .* not enough", lines[-2]) and lines[-1].startswith(
        "use larger devices"
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"text": "train=0-3 generate=4-7", "kv_cache_gib": 70.0, "checkpointing": "full"},
            "each of ranks 4-7 needs 86.6 GiB but has 72.0 GiB",
        ),
        (
            {"text": "train=0-3 generate=4-7", "kv_cache_gib": 0.01},
            "ranks 4-7 has a KV cache of 10.2 MiB, which holds no sample of 180.0 MiB; raise kv_ca",
        ),
        (
            {"text": "train=all generate=0-6"},
            "256 samples do not divide over 7 engines: 3 get 36 and wait for those with 37; "
            "use a multiple of 7",
        ),
        (
            {"text": "train=all generate=all", "prompts_per_step": 1, "samples_per_prompt": 6},
            "6 samples do not divide over 8 engines: 2 get 0",
        ),
        (
            {"text": "train=all generate=all", "updates_per_step": 3},
            "86 samples do not divide over 8 ranks of train: 2 get 10",
        ),
        (
            {"text": "train=all generate=all", "tokens_per_microbatch": 1000},
            "a sample of 1279 tokens does not fit a micro-batch; raise tokens_per_microbatch=1000",
        ),
        (
            {"text": "train=all generate=all", "max_tokens": 50000},
            "a sample of 50256 tokens exceeds the model's 40960 positions",
        ),
    ],
)
def test_problems_and_warnings(options, message):
    result = make_plan(**options)
    found = (*result.problems, *warnings(result))
    assert any(re.search(message, text) for text in found), found


def test_nonsense_is_refused():
    with pytest.raises(ValueError, match="max_tokens=0 must be at least 1"):
        PlanOptions(max_tokens=0)
    with pytest.raises(ValueError, match="kv_cache_gib=0 must be above 0"):
        PlanOptions(kv_cache_gib=0)
    with pytest.raises(ValueError, match="memory of role poet is not known; known are train"):
        assert make_plan("train=all generate=all poet=0").problems


@pytest.mark.parametrize(
    "text", ["auto", "train=0-2047,tp=8 generate=0-4095,tp=4 reference=1-4095"]
)
def test_4096_ranks_take_less_than_two_seconds(text):
    config = shape_config("llama-3.1-70b")
    start = time.process_time()
    if text == "auto":
        roles = ["train", "generate", "reference"]
        device_map, _ = auto_device_map(4096, config, 80 * GIB, roles)
    else:
        device_map = parse_device_map(text, 4096)
    shown = render(Plan(config, device_map, PlanOptions(prompts_per_step=4096), 80 * GIB))
    assert time.process_time() - start < 2
    assert len(shown.splitlines()) < 30 and "4095" in shown


def test_the_script_as_a_user_runs_it(tiny_folder, command):
    code, printed = command(SCRIPT, "--model", "qwen3-8b", "--tokens-per-microbatch", "4096")
    assert code == 0 and "warning" not in printed
    assert "device map: train and generate on all 8 ranks" in printed
    assert "8,190,735,360 parameters, 15.3 GiB in bf16" in printed
    arguments = ["--model", tiny_folder, "--device-gib", "None", "--max-tokens", "64"]
    code, printed = command(SCRIPT, *arguments, "--prompt-tokens", "32")
    assert code == 0 and "in fp32" in printed and "seconds" not in printed


def test_the_script_exits_with_1_where_the_run_would_not_fit(command):
    code, printed = command(SCRIPT, "--model", "qwen3-8b")
    assert code == 1 and "does not fit: each of ranks 0-7 needs 115.0 GiB" in printed
    assert "\n  --checkpointing full brings it to 48.9 GiB\n" in printed
    code, printed = command(SCRIPT, "--model", "qwen3-8b", "--checkpointing", "full")
    assert code == 0 and "seconds: about 14 a step" in printed and "H100" in printed
    assert "79% of the published rate" in printed


def test_a_command_to_copy_starts_what_fits(command):
    """The fastest of what fits with one more flag; the seconds are those of the plan with it."""
    shape = ("--model", "qwen3-8b", "--samples-per-prompt", "16")
    _, printed = command(SCRIPT, *shape)
    *lines, last = printed.splitlines()
    assert "with --tokens-per-microbatch 4096 it fits:" in lines
    start, options = last.split(" --data DATA ")
    assert start == "torchrun --nproc-per-node 8 -m roll_lite rlvr --model FOLDER"
    assert "0 of them at once" not in printed
    code, again = command(SCRIPT, *shape, "--tokens-per-microbatch", "4096", "--reference")
    assert code == 0 and again.splitlines()[-1].endswith(options.removeprefix("--max-tokens 1024"))
    assert " --kl-coef 0.001 --max-tokens 1024 " in again
    given = flatten(from_flat(rlvr.Config, check=False))
    assert {*re.findall(r"--([a-z-]+)", options)} <= {name.replace("_", "-") for name in given}
    cache = re.search(r"--kv-cache-gib (\S+)", options)[1]
    code, _ = command(SCRIPT, *shape, *options.split())
    assert code == 0 and float(cache) > 1
    assert all(getattr(PlanOptions(), name) == given[name] for name in RECIPE_FLAGS)


def test_a_command_of_engines_that_sleep_has_their_cache_and_a_note_of_arguments(command):
    shape = ("--model", "qwen3-8b", "--world-size", "8", "--device-gib", "40", "--reference")
    _, printed = command(SCRIPT, *shape)
    *_, last = printed.rstrip().splitlines()
    assert "--engines-sleep" in last and float(last.split("--kv-cache-gib ")[1].split()[0]) > 0
    more = ("--moments", "bfloat16", "--lora-rank", "8", "--kv-cache-gib", "1.25")
    _, printed = command(SCRIPT, "--model", "qwen3-0.6b", "--reference", *more)
    *_, last, note = printed.rstrip().splitlines()
    assert "--kl-coef 0.001" in last and "--kv-cache-gib 1.25" in last
    assert "rl.TrainingOptions(moments='bfloat16')" in note


def test_a_command_has_a_map_that_was_given_and_all_machines(command):
    arguments = ["--world-size", "16", "--device-map", "train=0-7 generate=8-15"]
    code, printed = command(SCRIPT, *arguments, "--max-staleness", "1")
    assert code == 0 and printed.splitlines()[-1].startswith(
        "torchrun --nproc-per-node 8 --nnodes 2 --rdzv-backend c10d --rdzv-endpoint HOST:29500 -m "
        'roll_lite rlvr --model FOLDER --data DATA --device-map "train=0-7 generate=8-15" '
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--device-map", "train=0-9 generate=all"], "there is no rank 9"),
        (["--device-map", "train=all generate=0-2,tp=3"], "does not divide 16 attention heads"),
        (["--device-map", "train=0-3 generate=0-3"], "ranks 4-7 have no role"),
        (["--model", "gpt2"], "neither a folder nor one of smollm2-135m"),
        (["--world", "8"], "--world"),
    ],
)
def test_the_script_refuses_a_bad_map_without_a_traceback(command, arguments, words):
    code, printed = command(SCRIPT, *arguments)
    text = " ".join(printed.replace("│", " ").split())
    assert code == 2 and words in text and "Traceback" not in text


def test_planning_needs_no_torch():
    code = """
import runpy, sys
sys.argv = ["plan"]
try:
    runpy.run_module("roll_lite.planning", run_name="__main__")
except SystemExit as end:
    assert not end.code
sys.exit(3 if "torch" in sys.modules else 0)
"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def test_a_small_cache_says_how_much_would_hold_all_samples():
    options = {"kv_cache_gib": 1.0, "prompts_per_step": 32, "samples_per_prompt": 8}
    small = make_plan("train=all generate=all", **options)
    (line,) = [line for line in render(small).splitlines() if line.startswith("generate, per")]
    gib = int(line.split("--kv-cache-gib ")[1].split()[0])
    enough = make_plan("train=all generate=all", **options | {"kv_cache_gib": float(gib)})
    assert "--kv-cache-gib" not in render(enough).split("generate, per engine")[1].split("\n")[0]
    less = make_plan("train=all generate=all", **options | {"kv_cache_gib": gib - 1.0})
    assert f"--kv-cache-gib {gib} would hold" in render(less)
