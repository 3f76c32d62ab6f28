"""The planner against the real model, measured bytes, and numbers worked out by hand."""

import inspect
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import transformers
from conftest import FAMILIES, SMALL

from roll_lite.cluster import memory
from roll_lite.cluster.device_map import auto_device_map, parse_device_map
from roll_lite.cluster.memory import (
    RankMemory,
    engine_bytes,
    reference_memory,
    together,
    train_memory,
)
from roll_lite.cluster.planner import BatchPlan, plan, render
from roll_lite.engine.attention import PAGE_SIZE
from roll_lite.engine.engine import MAX_PREFILL_TOKENS, Engine
from roll_lite.engine.runner import cache_shape
from roll_lite.models.config import parse_config
from roll_lite.models.cost import count_parameters, kv_bytes_per_token, saved_bytes_per_token
from roll_lite.models.fsdp import shard
from roll_lite.models.logprobs import CUDA_CHUNK_ROWS
from roll_lite.models.presets import SHAPES, shape_config
from roll_lite.models.transformer import Transformer

SCRIPT = Path(__file__).parent.parent / "scripts" / "plan.py"
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
        ("qwen2.5-7b", 7_615_616_512),
        ("qwen3-8b", 8_190_735_360),
        ("llama-3.1-70b", 70_553_706_496),
    ],
)
def test_shapes_have_the_published_size(name, published):
    assert count_parameters(shape_config(name)).total == published


def test_an_unknown_shape_is_named():
    with pytest.raises(ValueError, match=r"shape='gpt2' is not known; use one of smollm2-135m"):
        shape_config("gpt2")


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
    assert train_memory(HAND, 4, 1, 100, 2, moment_bytes=2).optimizer == 4 * 434
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
    ("shape", "tokens", "checkpointing", "moment_bytes", "gib"),
    [
        ("qwen3-0.6b", 32768, "none", 4, 51.5),
        ("qwen3-0.6b", 32768, "selective", 4, 37.5),
        ("qwen3-0.6b", 32768, "full", 4, 14.9),
        ("qwen3-1.7b", 16384, "none", 4, 60.4),
        ("qwen3-8b", 16384, "full", 2, 107.9),
        ("smollm2-135m", 32768, "none", 4, 18.3),
    ],
)
def test_training_takes_what_a_gpu_allocated(shape, tokens, checkpointing, moment_bytes, gib):
    """Peaks of scripts/bench_train.py on one H200 (torch 2.11), two micro-batches an update."""
    options = {"checkpointing": checkpointing, "moment_bytes": moment_bytes}
    planned = train_memory(shape_config(shape), 1, 1, tokens, 2, **options)
    assert planned.total / GIB == pytest.approx(gib, rel=0.05)


def nbytes(tensors):
    """Allocated bytes, of local shards where there are any."""
    parts = [t.to_local() if hasattr(t, "to_local") else t for t in tensors]
    return sum(tensor.untyped_storage().nbytes() for tensor in parts)


def test_a_real_trainer_holds_what_is_planned(place):
    small = {"vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 2, "head_dim": 16}
    model = Transformer(parse_config(SHAPES["qwen3-0.6b"] | small))
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
    batch = BatchPlan(
        prompts_per_step=30, samples_per_prompt=8, prompt_tokens=100, reply_tokens=29,
        tokens_per_microbatch=1000, updates_per_step=3, kv_cache_gib=1.0,
    )  # fmt: skip
    device_map = parse_device_map("train=0-3,tp=2 generate=4-7", 8)
    result = plan(shape_config("qwen3-8b"), device_map, batch, 1000 * GIB)
    # 240 samples of 129 tokens: 80 an update, 40 on each of two trainers; 128 packed tokens each
    assert result.step.samples_per_rank == 3 * 40
    assert result.step.tokens_per_rank == 3 * 40 * 129
    assert result.step.microbatches_per_rank == 3 * 6  # seven samples in each of six micro-batches
    assert result.step.samples_per_replica == 60
    # 9 pages of 16 tokens, each 36 layers x 2 x 8 kv heads x 128 in bf16
    assert result.ranks[1].samples_at_once == 2**30 // (144 * 147456) == 50
    assert not result.warnings
    # 999 packed tokens, which the micro-batch limits, not the 40 samples
    trainer = train_memory(shape_config("qwen3-8b"), 4, 2, 1000, 2)
    assert result.ranks[0].memory == trainer


def test_equal_ranks_are_one_line_and_a_cache_fits_the_fullest_rank_of_its_engine():
    config = shape_config("qwen3-8b")
    device_map = parse_device_map("train=0-4 generate=0-7,tp=2", 8)
    batch = BatchPlan(samples_per_prompt=512, tokens_per_microbatch=4096)
    result = plan(config, device_map, batch, 80 * GIB)
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
    result = plan(shape_config("qwen3-0.6b"), device_map, BatchPlan(), 80 * GIB)
    # 32 samples of 1,280 tokens on each rank, 28 layers x 2 x 8 x 128 in bf16
    assert result.ranks[0].memory.kv_cache == 32 * 1280 * 114688
    assert result.ranks[0].samples_at_once == 32


def warnings(text, world_size=8, name="qwen3-8b", gib=80, **changes):
    device_map = parse_device_map(text, world_size)
    device_bytes = None if gib is None else gib * GIB
    return plan(shape_config(name), device_map, BatchPlan(**changes), device_bytes).warnings


def test_what_does_not_fit_is_said_with_a_remedy_that_works():
    (warning,) = warnings("train=all generate=all")
    assert warning.startswith("ranks 0-7 need 114.8") and "but have 72.0 GiB of 80.0 GiB" in warning
    tokens = int(warning.split("lower tokens_per_microbatch to ")[1].split(",")[0])
    assert not warnings("train=all generate=all", tokens_per_microbatch=tokens)
    assert warnings("train=all generate=all", tokens_per_microbatch=tokens + 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"text": "train=0-3 generate=4-7", "kv_cache_gib": 70.0, "gib": 80},
            "ranks 4-7 need 86.6 GiB but .*lower kv_cache_gib=70.0, raise the tp of generate or",
        ),
        (
            {"text": "train=0-3 generate=4-7", "kv_cache_gib": 0.01},
            "ranks 4-7: a cache of 10.2 MiB holds no sample, which takes 180.0 MiB; raise kv_cache",
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
            {"text": "train=all generate=all", "reply_tokens": 50000},
            "a sample of 50256 tokens exceeds the model's 40960 positions",
        ),
    ],
)
def test_warnings(options, message):
    found = warnings(**options)
    assert any(re.search(message, text) for text in found), found


def test_nonsense_is_refused():
    with pytest.raises(ValueError, match="reply_tokens=0 must be at least 1"):
        BatchPlan(reply_tokens=0)
    with pytest.raises(ValueError, match="kv_cache_gib=0 must be above 0"):
        BatchPlan(kv_cache_gib=0)
    with pytest.raises(ValueError, match="memory of role poet is not known; known are train"):
        warnings("train=all generate=all poet=0")


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
    shown = render(plan(config, device_map, BatchPlan(prompts_per_step=4096), 80 * GIB))
    assert time.process_time() - start < 2
    assert len(shown.splitlines()) < 25 and "4095" in shown


def test_the_script_as_a_user_runs_it(tiny_folder, command):
    code, printed = command(SCRIPT, "--model", "qwen3-8b", "--tokens-per-microbatch", "4096")
    assert code == 0 and "warning" not in printed
    assert "device map: train, generate and reference on all 8 ranks" in printed
    assert "8,190,735,360 parameters, 15.3 GiB in bf16" in printed
    arguments = ["--model", tiny_folder, "--device-gib", "None", "--world-size", "2"]
    code, printed = command(SCRIPT, *arguments)
    assert code == 0 and "in fp32" in printed


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--device-map", "train=0-9 generate=all"], "there is no rank 9"),
        (["--device-map", "train=all generate=0-2,tp=3"], "does not divide 8 key/value heads"),
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
    code = f"""
import runpy, sys
sys.argv = ["plan.py"]
runpy.run_path({str(SCRIPT)!r}, run_name="__main__")
sys.exit(3 if "torch" in sys.modules else 0)
"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0
