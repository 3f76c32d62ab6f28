"""Estimated seconds against what one H200 took, and sums by hand.

The measurements are in docs/notebook/2026-11-18-benchmarks.md.
"""

import json
from dataclasses import replace

import pytest

from roll_lite.device_map import parse_device_map
from roll_lite.models.config import planned_config, shape_config
from roll_lite.models.cost import DENSE_BF16, count_parameters
from roll_lite.planning import __main__ as plan_command
from roll_lite.planning.plan import Plan, PlanOptions, Samples
from roll_lite.planning.render import render
from roll_lite.planning.speed import (
    HOST_RATE,
    NETWORK_RATE,
    Machine,
    Pass,
    copy_seconds,
    generate_seconds,
    known_machine,
    run_seconds,
    shard_seconds,
    step_seconds,
    sync_seconds,
    update_seconds,
)

SCRIPT = plan_command.__file__
H200 = known_machine("NVIDIA H200")
GIB = 2**30
FULL = {"length": 2048, "num_rows": 2048}


def test_gpus_are_known_by_a_part_of_their_name():
    assert all(known_machine(f"NVIDIA {part} 80GB HBM3").gpu == part for part in DENSE_BF16)
    assert known_machine("cpu") is None
    # measured: a bf16 matrix product at 777 TFLOP/s, a copy at 4.27 TB/s
    assert H200.products == pytest.approx(777e12, rel=0.01)
    assert H200.memory == pytest.approx(4.27e12, rel=0.01)


@pytest.mark.parametrize(
    ("shape", "tokens", "checkpointing", "tokens_per_second", "logprobs_per_second"),
    [
        ("qwen3-0.6b", 65536, "none", 83_300, 302_000),
        ("qwen3-0.6b", 65536, "selective", 74_700, 297_000),
        ("qwen3-0.6b", 65536, "full", 67_800, 298_000),
        ("qwen3-1.7b", 32768, "none", 39_200, 141_000),
        ("qwen3-8b", 32768, "full", 8_200, 35_400),
        ("smollm2-135m", 65536, "none", 196_000, 699_000),
    ],
)
def test_training_takes_about_what_a_gpu_took(
    shape, tokens, checkpointing, tokens_per_second, logprobs_per_second
):
    config = shape_config(shape)
    work = Pass(config=config, machine=H200, num_samples=tokens / 2048, **FULL)
    seconds = work.training(checkpointing, is_frozen=False)
    seconds += update_seconds(count_parameters(config).total, H200)
    assert seconds == pytest.approx(tokens / tokens_per_second, rel=0.16)
    assert work.scoring == pytest.approx(tokens / logprobs_per_second, rel=0.25)


@pytest.mark.parametrize(
    ("shape", "tokens", "checkpointing", "measured"),
    [
        ("qwen3-0.6b", 65536, "none", 0.791),
        ("qwen3-0.6b", 65536, "full", 1.012),
        ("qwen3-1.7b", 32768, "none", 0.702),
        ("qwen3-8b", 32768, "none", 2.291),
        ("qwen3-8b", 32768, "full", 3.188),
    ],
)
def test_training_adapters_takes_about_what_a_gpu_took(shape, tokens, checkpointing, measured):
    work = Pass(config=shape_config(shape), machine=H200, num_samples=tokens / 2048, **FULL)
    assert work.training(checkpointing, is_frozen=True) == pytest.approx(measured, rel=0.12)


@pytest.mark.parametrize(
    ("shape", "options", "generate", "train"),
    [
        ("qwen3-0.6b", {"kv_cache_gib": 35.0}, 6.54, 4.05),
        ("qwen3-1.7b", {"kv_cache_gib": 35.0}, 7.55, 7.42),
        (
            "qwen3-8b",
            {"kv_cache_gib": 40.0, "checkpointing": "full", "moments": "bfloat16"},
            15.0,
            34.3,
        ),
    ],
)
def test_a_step_takes_about_what_a_gpu_took(shape, options, generate, train):
    """256 samples of 256 + 1,024 tokens on one rank, the engine asleep during training."""
    device_map = parse_device_map("train=all generate=all", 1)
    batch = PlanOptions(engines_sleep=True, **options)
    seconds = step_seconds(Plan(shape_config(shape), device_map, batch, 139 * GIB), H200)
    assert seconds["generate"] == pytest.approx(generate, rel=0.2)
    assert seconds["train"] == pytest.approx(train, rel=0.2)


def generated(num_samples, **lengths):
    return Samples(num_generated=num_samples, num_trained=0, num_updates=1, **lengths)


@pytest.mark.parametrize(
    ("shape", "workload", "tokens_per_second"),
    [
        ("smollm2-135m", "R", 203_250),
        ("smollm2-135m", "N", 68_850),
        ("qwen3-0.6b", "R", 74_629),
        ("qwen3-0.6b", "N", 26_759),
        ("qwen3-8b", "R", 23_503),
        ("qwen3-8b", "N", 10_241),
    ],
)
def test_generation_takes_about_what_a_gpu_took(shape, workload, tokens_per_second):
    """With the workload's mean and longest lengths."""
    lengths = {"prompt_tokens": 200, "reply_tokens": 287, "longest_reply": 512}
    num_samples, per_prompt = 1024, 16
    if workload == "N":
        lengths = {"prompt_tokens": 562, "reply_tokens": 587, "longest_reply": 1024}
        num_samples, per_prompt = 256, 1
    seconds = generate_seconds(
        shape_config(shape), H200, 1, samples=generated(num_samples, **lengths),
        samples_per_prompt=per_prompt, at_once=num_samples,
    )  # fmt: skip
    tokens = num_samples * lengths["reply_tokens"]
    assert seconds == pytest.approx(tokens / tokens_per_second, rel=0.16)


def test_a_colocated_step_of_32b_takes_about_what_a_gpu_took():
    """LoRA of rank 16, 64 samples of 21 + 256 tokens; engine and trainer take turns."""
    batch = PlanOptions(
        prompts_per_step=8, prompt_tokens=21, max_tokens=256, checkpointing="full",
        lora_rank=16, kv_cache_gib=12.0, engines_sleep=True, offload=True,
    )  # fmt: skip
    device_map = parse_device_map("train=all generate=all", 1)
    plan = Plan(shape_config("qwen3-32b"), device_map, batch, 139 * GIB)
    seconds = step_seconds(plan, H200)
    assert seconds["generate"] == pytest.approx(5.11, rel=0.2)
    assert seconds["train"] == pytest.approx(6.61, rel=0.2)
    moved = 2 * 65.5e9 / HOST_RATE  # frozen weights, when the engine had a copy of them
    assert seconds["step"] == pytest.approx(15.08 - moved, rel=0.2)
    assert sum(seconds[name] for name in ("reload", "offload", "sync")) < 0.5
    # 84.6 GiB were in use, with micro-batches of 8,832 tokens; planned for 16,384
    assert 84.6 <= plan.needed / GIB < 1.15 * 84.6


ADDITION = {  # two seeds on one H200: medians of a step
    "rollout/started": 1024, "rollout/trained_samples": 168, "rollout/reply_tokens": 12.1,
    "rollout/longest_reply": 30,
    "train/tokens_per_second": 61_000, "time/rollout": 0.324, "time/prepare": 0.006,
    "time/train": 0.145, "time/sync": 0.005, "time/step": 0.487,
}  # fmt: skip


def test_a_run_is_shown_beside_the_plan_of_its_samples(tmp_path, command):
    """recipes/rlvr.py, addition with SmolLM2 on one H200: most of it is the host's time."""
    options = {
        "recipe": "rlvr", "model": "gone", "prompts_per_step": 128, "samples_per_prompt": 8,
        "max_tokens": 48, "updates_per_step": 4, "epochs": 1, "tokens_per_microbatch": 32768,
        "kv_cache_gib": 8.0, "engines_sleep": False, "offload": False, "max_staleness": 0.0,
        "checkpointing": "none", "moments": "float32", "lora_rank": 0, "lora_targets": ["qkv"],
        "device_map": "auto", "kl_coef": 0.0, "reference": None, "denominator": "behaviour",
        "starts": [{"hardware": "1 x NVIDIA H200", "ranks": {"train": [[0]], "generate": [[0]]}}],
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(options))
    slow = {name: 30 * value for name, value in ADDITION.items()}  # the first two are left out
    rows = [slow, slow, ADDITION, ADDITION | {"eval/pass@1": 0.9}]
    lines = [json.dumps(row) for row in [*rows, {"eval/pass@1": 0.9}]]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    code, printed = command(SCRIPT, "--run", tmp_path, "--model", "smollm2-135m")
    assert code == 0
    table = {line.split()[0]: line.split()[1:] for line in printed.splitlines() if line}
    assert list(table) == ["seconds", "generate", "prepare", "train", "sync", "step"]
    for name in ("generate", "train", "sync", "step"):
        planned, measured, ratio = map(float, table[name])
        assert planned == pytest.approx(measured, rel=0.2), name
        assert ratio == pytest.approx(planned / measured, abs=0.1)  # of rounded numbers


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"recipe": "sft"}, "is a run of sft; only rlvr's are planned"),
        ({"starts": [{"hardware": "4 CPU cores"}]}, "ran on 4 CPU cores"),
    ],
)
def test_a_run_that_cannot_be_planned_is_refused(tmp_path, changed, message):
    (tmp_path / "config.json").write_text(json.dumps({"recipe": "rlvr"} | changed))
    (tmp_path / "metrics.jsonl").write_text("\n".join([json.dumps(ADDITION)] * 3))
    with pytest.raises(ValueError, match=message):
        run_seconds(tmp_path)


ROUND = Machine(gpu="round", products=1e12, attention=1e11, memory=1e10, link=1e9)


def test_a_pass_by_hand():
    """qwen3-0.6b: 28 layers, 16 heads of 128; two samples of 100 tokens, 60 of them with a loss."""
    config = shape_config("qwen3-0.6b")
    work = Pass(config=config, machine=ROUND, num_samples=2, length=100, num_rows=60)
    matrices = 28 * (1024 * 128 * (16 + 16 + 16) + 3 * 1024 * 3072)
    products = 2 * matrices * 200 / 1e12
    head = 2 * 151936 * 1024 * 120 / 1e12
    attention = 28 * 4 * 16 * 128 * 2 * 5050 / 1e11
    other = 160 * 200 * 28 * 1024 / 1e10
    assert work.forward == pytest.approx((products, head, attention, other))
    whole = products + head + attention + other
    assert work.scoring == pytest.approx(whole)
    full = {"checkpointing": "full", "is_frozen": False}
    expected = 4 * whole - head
    assert work.training(**full) == pytest.approx(expected)
    lora = full | {"is_frozen": True}
    assert work.training(**lora) == pytest.approx(expected - products - head)
    # two ranks: half of all that, and two sums of 2 x 1,024 bytes a layer, forward and backward,
    # of which a ring sends each byte once
    reduced = 2 * 28 * 2 * 2 * 1024 * 200 / 1e9
    none = {"checkpointing": "none", "is_frozen": False}
    assert replace(work, tp=2).training(**none) == pytest.approx(1.5 * whole + reduced)


def test_traffic_by_hand():
    config = shape_config("qwen3-0.6b")
    assert shard_seconds(config, 1e9, 4, 1, False) == pytest.approx(8 * 0.59604992 * 3 / 4)
    assert shard_seconds(config, 1e9, 1, 1, False) == 0
    # gradients in fp32 of a thousand parameters: a ring of four sends 3/4 of them, twice
    assert copy_seconds(1000, 1e9, 4) == pytest.approx(4e-6 * 2 * 3 / 4)
    assert copy_seconds(1000, 1e9, 1) == 0
    assert sync_seconds(config, ROUND, 1e9, 1) == pytest.approx(0.003 + 0.59604992 * 0.6)
    assert sync_seconds(config, ROUND, 1e9, 2) == pytest.approx(0.003 + 0.59604992 * (1.4 + 1))


def test_a_decoding_step_reads_the_experts_that_its_rows_use():
    config = planned_config("qwen3-30b-a3b")
    lengths = {"prompt_tokens": 1, "reply_tokens": 1000, "longest_reply": 1000}
    one, many = (
        generate_seconds(
            config, H200, 1, samples=generated(n, **lengths), samples_per_prompt=n, at_once=n
        )
        for n in (1, 256)
    )
    # one row reads the 3.0 G parameters it uses (no embedding), 256 rows nearly all of 30.2 G
    fixed = 1000 * 48 * 30e-6
    assert (one - fixed) * 0.85 * H200.memory / 1000 == pytest.approx(2 * 3.04e9, rel=0.02)
    assert (many - fixed) * 0.85 * H200.memory / 1000 == pytest.approx(2 * 30.2e9, rel=0.3)


def test_generation_of_experts_is_between_vllm_and_the_roofline():
    """Output tokens per second of the 30B on one H200; vLLM 0.20.2 with logprobs on."""
    one_each = {"prompt_tokens": 562, "reply_tokens": 587, "longest_reply": 1024}
    groups = {"prompt_tokens": 200, "reply_tokens": 287, "longest_reply": 512}
    for lengths, num, per_prompt, vllm, roofline in (
        (one_each, 256, 1, 5_900, 8_300), (groups, 1024, 16, 6_700, 30_200)
    ):  # fmt: skip
        seconds = generate_seconds(
            planned_config("qwen3-30b-a3b"), H200, 1, samples=generated(num, **lengths),
            samples_per_prompt=per_prompt, at_once=num,
        )  # fmt: skip
        assert vllm < num * lengths["reply_tokens"] / seconds < roofline


def test_what_travels_where_experts_are_dealt():
    """48 layers of 128 experts of 3 x 2,048 x 768, dealt to 8 of 64 ranks."""
    config = planned_config("qwen3-30b-a3b")
    experts = 48 * 128 * 3 * 2048 * 768
    rest = 30_532_122_624 - experts
    received = rest * 63 / 64 + experts / 8 * 7 / 8  # from the 8 ranks with the same experts
    assert shard_seconds(config, 1e9, 64, 1, False, 8) == pytest.approx(8e-9 * received)
    assert shard_seconds(config, 1e9, 8, 1, True, 8) == pytest.approx(4e-9 * rest * 7 / 8)
    sizes = {"config": config, "machine": H200, "num_samples": 1, "length": 1000, "num_rows": 1}
    near = Pass(**sizes)
    far = Pass(**sizes, ep=8, between_experts=1e9)
    # A token is on 5.251 ranks, 7 of 8 times on another one; there and back, in bf16.
    once = 1000 * 48 * 5.251 * 7 / 8 * 2048 * 2 / 1e9
    assert far.scoring - near.scoring == pytest.approx(2 * once, rel=1e-3)
    for checkpointing, times in (("none", 4), ("selective", 6), ("full", 6)):
        more = far.training(checkpointing, False) - near.training(checkpointing, False)
        assert more == pytest.approx(times * once, rel=1e-3)


def make_plan(text, **changes):
    batch = PlanOptions(checkpointing="full", **changes)
    return Plan(shape_config("qwen3-8b"), parse_device_map(text, 8), batch, 80 * GIB)


def test_teachers_are_frozen_models_that_share_the_samples():
    one, two = (
        make_plan(f"train=all generate=all {teachers}")
        for teachers in ("reference=all", "teacher=all teacher_math=all")
    )
    machine = known_machine("H200")
    reference = step_seconds(one, machine)["reference"]
    taught = step_seconds(two, machine)
    assert taught["teacher"] + taught["teacher_math"] == pytest.approx(reference)
    weights = 2 * count_parameters(one.config).total // 8  # bf16, sharded over 8 ranks
    added = two.ranks[0].needed - one.ranks[0].needed
    assert added == pytest.approx(weights, rel=0.1)


def test_parts_follow_each_other_unless_engines_run_ahead():
    machine = H200
    shared = step_seconds(make_plan("train=all generate=all reference=all"), machine)
    assert list(shared) == ["generate", "reference", "train", "sync", "step"]
    assert shared["step"] == pytest.approx(sum(shared.values()) / 2)
    apart = make_plan("train=0-3 generate=4-7")
    in_turn = step_seconds(apart, machine)
    ahead = step_seconds(replace(apart, options=replace(apart.options, max_staleness=1)), machine)
    assert in_turn["step"] == pytest.approx(sum(in_turn.values()) / 2)
    assert ahead["step"] == max(ahead["generate"], ahead["train"] + ahead["sync"])
    twice = replace(apart, options=replace(apart.options, epochs=2))
    assert step_seconds(twice, machine)["train"] == pytest.approx(2 * in_turn["train"])


def test_small_micro_batches_wait_for_the_network():
    """Weights and gradients of each one cross it: 8 bytes a parameter, 7 of 8 shares."""
    plan = make_plan("train=all generate=all", tokens_per_microbatch=1280)
    near, far = (step_seconds(plan, replace(H200, ranks_per_node=n))["train"] for n in (8, 4))
    traffic = 32 * 8 * 8_190_735_360 * 7 / 8 / NETWORK_RATE
    update = update_seconds(8_190_735_360 / 8, H200)
    assert far == pytest.approx(traffic + update) and near < far / 4


def test_a_plan_that_does_not_fit_has_no_seconds():
    fits = make_plan("train=all generate=all")
    assert "seconds: about" in render(fits, H200) and "seconds" not in render(fits)
    cramped = replace(fits, device_bytes=20 * GIB)
    assert "seconds" not in render(cramped, H200)
