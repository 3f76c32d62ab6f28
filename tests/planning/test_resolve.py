"""What was left open gets its value once, the same on every rank; what was given stays."""

from dataclasses import replace

import pytest
from support.runs import toy_options

from roll_lite.checks import UserError
from roll_lite.cluster.launch import Launch
from roll_lite.device_map import Device, parse_device_map
from roll_lite.models.memory import usable_bytes
from roll_lite.options import flatten, from_flat
from roll_lite.planning.resolve import lower_cache, plan_run, resolve
from roll_lite.recipes import evaluate, rlvr, sft
from roll_lite.train.advantages import AdvantageFacts, PerSample
from roll_lite.train.losses import LossFacts
from roll_lite.types import SHAPE

CPU, ALONE = Device(), Launch()
LARGE = {"model": f"{SHAPE}qwen3-8b", "run_dir": "no-such-run", "checkpointing": "full"}
FOUR = Launch(world_size=4, local_world_size=4)


def config(toy_folder, **changes):
    return from_flat(rlvr.Config, **toy_options(toy_folder, "no-such-run", **changes))


def resolved(cfg, launch=ALONE, device=CPU):
    return resolve(cfg, launch, device)[0]


def gpu(gib):
    return Device("cuda", "some GPU", gib * 2**30)


def test_nothing_is_left_open_and_what_was_chosen_is_noted(toy_folder):
    cfg = config(toy_folder, lr=None, max_tokens=None, device="auto", kl_coef=0.1)
    found, notes = resolve(cfg, ALONE, CPU)
    values = flatten(found)
    expected = {
        "aggregation": "token_mean", "device": "cpu", "device_map": "train=all generate=all "
        "reference=all", "kl_estimator": "k3", "lr": 3e-4, "max_tokens": 16, "whiten": False,
    }  # fmt: skip
    assert {name: values[name] for name in found.chosen} == expected
    assert notes[0] == "chosen for a model of 0M parameters: lr=0.0003, max_tokens=16"
    unchanged = flatten(cfg).keys() - expected.keys() - {"chosen"}
    assert {n: values[n] for n in unchanged} == {n: flatten(cfg)[n] for n in unchanged}


def test_it_is_a_function_of_its_arguments_alone(toy_folder, monkeypatch, capsys):
    cfg = config(toy_folder, device="auto", loss="gspo", advantage="reinforce++")
    before = flatten(cfg)
    first = resolve(cfg, ALONE, CPU)
    monkeypatch.setenv("WORLD_SIZE", "16")
    monkeypatch.setenv("RANK", "3")
    assert resolve(cfg, ALONE, CPU) == first
    assert flatten(cfg) == before and capsys.readouterr().out == ""
    again, notes = resolve(first[0], ALONE, CPU)
    assert again == first[0] and notes == []


@pytest.mark.parametrize("gib", [64, 140])
def test_all_ranks_come_to_the_same(gib):
    cfg = from_flat(rlvr.Config, **LARGE, kv_cache_gib=20.0)
    first = resolve(cfg, FOUR, gpu(gib))
    for rank in range(1, 4):
        assert resolve(cfg, replace(FOUR, rank=rank, local_rank=rank), gpu(gib)) == first
    turns = {"engines_sleep", "offload"}
    values = flatten(first[0])
    assert {name for name in turns if values[name]} == turns & {*first[0].chosen}
    assert (turns <= {*first[0].chosen}) == (gib == 64)
    assert any(line.startswith("chosen: engines_sleep and offload") for line in first[1]) == (
        gib == 64
    )


def test_a_map_that_was_given_stays_and_then_nobody_takes_turns():
    cfg = from_flat(
        rlvr.Config, **LARGE, kv_cache_gib=20.0, device_map="train=0-2 generate=3", device="cuda"
    )
    found = resolved(cfg, FOUR, gpu(64))
    assert found.device_map == "train=0-2 generate=3"
    assert not {"device", "device_map", "engines_sleep", "offload"} & {*found.chosen}


def test_kimi_does_not_divide_by_the_deviation(toy_folder):
    plain = resolved(config(toy_folder))
    assert plain.advantages.values == {"divide_by_std": True}
    assert "divide_by_std" not in plain.chosen
    found = resolved(config(toy_folder, loss="kimi"))
    assert found.advantages.function.keywords == {"divide_by_std": False}
    assert "divide_by_std" in found.chosen
    for given in (True, False):
        kept = resolved(config(toy_folder, loss="kimi", divide_by_std=given))
        assert kept.advantages.values == {"divide_by_std": given}
        assert "divide_by_std" not in kept.chosen


def test_an_estimator_without_the_option_is_left_alone_with_kimi(toy_folder):
    found = resolved(config(toy_folder, loss="kimi", advantage="rloo"))
    assert found.advantages.values == {} and "divide_by_std" not in found.chosen


def test_losses_and_estimators_of_ones_own_say_what_stands_for_open_options(
    toy_folder, monkeypatch
):
    @LossFacts(aggregation="seq_mean_token_sum", advantage_defaults={"scale": 3.0, "other": 1})
    def loss(logprobs_R, delta_R, advantages_R, batch): ...

    @AdvantageFacts(whitened=True)
    def estimator(rewards_S, *, scale: float = 1.0) -> PerSample: ...

    monkeypatch.setitem(rlvr.rl.LOSSES, "mine", loss)
    monkeypatch.setitem(rlvr.rl.ADVANTAGES, "mine", estimator)
    found = resolved(config(toy_folder, loss="mine", advantage="mine"))
    assert found.policy_loss.aggregation == "seq_mean_token_sum"
    assert found.advantages.whiten is True and found.advantages.values == {"scale": 3.0}
    assert {"aggregation", "whiten", "scale"} <= {*found.chosen}
    kept = resolved(config(toy_folder, loss="mine", advantage="mine", scale=1.0, whiten=False))
    assert kept.advantages.values == {"scale": 1.0} and kept.advantages.whiten is False


@pytest.mark.parametrize(("advantage", "default"), [("grpo", False), ("reinforce++", True)])
def test_whitening_is_given_or_as_the_estimator_says(toy_folder, advantage, default):
    found = resolved(config(toy_folder, advantage=advantage))
    assert found.advantages.whiten is default and "whiten" in found.chosen
    for given in (True, False):
        kept = resolved(config(toy_folder, advantage=advantage, whiten=given))
        assert kept.advantages.whiten is given and kept.advantages.is_whitened is given
        assert "whiten" not in kept.chosen


@pytest.mark.parametrize(("place", "estimator"), [("loss", "k3"), ("reward", "k1")])
def test_the_kl_has_the_estimate_of_its_place(toy_folder, place, estimator):
    found = resolved(config(toy_folder, kl_coef=0.1, kl_in=place))
    assert found.kl.kl_estimator == estimator and "kl_estimator" in found.chosen
    kept = resolved(config(toy_folder, kl_coef=0.1, kl_in=place, kl_estimator="k2"))
    assert kept.kl.kl_estimator == "k2" and "kl_estimator" not in kept.chosen
    assert resolved(config(toy_folder)).kl.kl_estimator is None  # nothing reads it


def test_the_critic_has_a_rate_of_its_own(toy_folder):
    assert resolved(config(toy_folder, advantage="gae")).critic.critic_lr == 1e-3
    assert resolved(config(toy_folder)).critic.critic_lr is None


def test_recipes_without_a_policy_loss_are_resolved(toy_folder):
    cfg = from_flat(sft.Config, model=str(toy_folder), run_dir="no-such-run")
    found = resolved(cfg)
    assert found.chosen == {"device": "auto", "lr": None, "device_map": None}
    assert found.training.lr == 1e-3 and found.device_map == "train=all,tp=1"
    wide = resolved(from_flat(sft.Config, model=str(toy_folder), run_dir="no-such-run", tp=2))
    assert wide.device_map == "train=all,tp=2"


@pytest.mark.parametrize("recipe", [sft, evaluate])
def test_a_map_is_chosen_by_recipes_that_train_a_policy_alone(toy_folder, recipe):
    options = {"model": str(toy_folder), "run_dir": "no-such-run", "device_map": "auto"}
    cfg = from_flat(recipe.Config, **options)
    with pytest.raises(UserError, match="'auto' in the device map is not understood; write role="):
        parse_device_map(resolved(cfg, device=gpu(80)).device_map, 1)


@pytest.mark.parametrize(
    ("samples", "given", "found"), [(1, None, 0.0), (4, None, 1.0), (4, 0.7, 0.7)]
)
def test_an_evaluation_is_greedy_for_one_sample(toy_folder, samples, given, found):
    options = {"model": str(toy_folder), "run_dir": "no-such-run", "samples": samples}
    cfg = resolved(from_flat(evaluate.Config, **options, temperature=given))
    assert cfg.temperature == cfg.params(()).temperature == found
    assert cfg.device_map == "generate=all"


def test_a_cache_is_lowered_to_what_other_programs_leave():
    """By as much as the plan of engines is too large, noted as chosen; never below a sample."""
    roles = "train=0 generate=1-3"
    options = LARGE | {"max_tokens": 1024, "kv_cache_gib": 60.0, "device_map": roles}
    cfg = from_flat(rlvr.Config, **options)
    device_map = parse_device_map(roles, 4)

    def fits(cfg, gib):
        _, engines = plan_run(cfg, device_map, gpu(gib), 256).ranks
        return engines.needed <= usable_bytes(gib * 2**30)

    assert lower_cache(cfg, device_map, None) == (cfg, [])  # on CPUs
    assert fits(cfg, 100) and lower_cache(cfg, device_map, 100 * 2**30) == (cfg, [])
    assert not fits(cfg, 70)
    (lowered, (note,)) = lower_cache(cfg, device_map, 70 * 2**30)
    assert fits(lowered, 70) and not fits(replace(lowered, kv_cache_gib=60.0), 70)
    assert not fits(replace(lowered, kv_cache_gib=lowered.kv_cache_gib + 0.2), 70)
    assert lowered.chosen == {"kv_cache_gib": 60.0} and "70.0 GiB" in note
    assert lower_cache(cfg, device_map, 10 * 2**30) == (cfg, [])  # the weights alone do not fit


@pytest.mark.parametrize(
    ("options", "launch", "gib"),
    [
        ({}, FOUR, 140),
        ({}, FOUR, 64),  # in turns
        ({"lora_rank": 8}, ALONE, 140),
        ({"max_tokens": 64, "prompts_per_step": 1}, FOUR, 140),
        ({"device_map": "train=0-2 generate=3", "max_staleness": 1.0}, FOUR, 100),
        ({"device_map": "train=0-1 generate=2-3,tp=2"}, FOUR, 64),
    ],
)
def test_a_cache_is_chosen_from_plan_and_memory(options, launch, gib):
    """It fits, and is as large as the samples need or as the memory allows; the same on all ranks,
    and noted as chosen. What was given stays."""
    cfg = from_flat(rlvr.Config, **LARGE | {"max_tokens": 1024} | options)
    assert cfg.kv_cache_gib is None
    found, notes = resolve(cfg, launch, gpu(gib))
    last = Launch(world_size=launch.world_size, local_world_size=4, rank=launch.world_size - 1)
    assert resolve(cfg, last, gpu(gib))[0].kv_cache_gib == found.kv_cache_gib
    device_map = parse_device_map(found.device_map, launch.world_size)

    def engines(gib_of_cache):
        plan = plan_run(replace(found, kv_cache_gib=gib_of_cache), device_map, gpu(gib), 256)
        return plan, max(part.needed for part in plan.ranks if "generate" in part.roles)

    plan, needed = engines(found.kv_cache_gib)
    usable = usable_bytes(gib * 2**30)
    assert needed <= usable
    per_engine = cfg.rollout.max_samples_in_flight / device_map["generate"].num_replicas
    wanted = per_engine * plan.sample_bytes / 2**30
    is_enough = found.kv_cache_gib >= wanted - 0.01
    assert is_enough or engines(found.kv_cache_gib + plan.sample_bytes / 2**30 + 0.02)[1] > usable
    assert found.kv_cache_gib <= max(1.0, wanted + 0.01)
    assert f"kv_cache_gib={found.kv_cache_gib:g}, which holds" in notes[-1]
    assert found.chosen["kv_cache_gib"] is None
    kept, _ = resolve(replace(cfg, kv_cache_gib=3.0), launch, gpu(gib))
    assert kept.kv_cache_gib == 3.0 and "kv_cache_gib" not in kept.chosen


@pytest.mark.parametrize(
    ("options", "gib", "samples"),
    [
        ({"data": ("mine.jsonl",)}, 24, None),  # as much as fits
        ({"data": ("mine.jsonl",), "max_tokens": 16}, 140, 1024),  # what an engine decodes at once
        ({"data": ("reverse:2", "addition:2"), "max_tokens": 768}, 140, 512 // 4),
        ({"data": ("mine.jsonl",), "prompts": 100, "samples": 4, "max_tokens": 768}, 140, 100),
        ({"data": ("sokoban",), "prompts": 1}, 140, 0),  # the default holds more
        ({"data": ("mine.jsonl",), "judge": f"{SHAPE}qwen3-8b"}, 80, None),
    ],
)
def test_the_cache_of_an_evaluation_is_chosen_from_prompts_and_memory(options, gib, samples):
    """Those that are asked at once, on four engines; it fits beside weights and a judge."""
    given = {"model": f"{SHAPE}qwen3-0.6b", "run_dir": "no-such-run"} | options
    cfg = from_flat(evaluate.Config, **given)
    found, notes = resolve(cfg, FOUR, gpu(gib))
    device_map = parse_device_map(found.device_map, 4)

    def fits(gib_of_cache):
        plan = plan_run(replace(found, kv_cache_gib=gib_of_cache), device_map, gpu(gib), 256)
        return plan.fits_devices

    sample = plan_run(found, device_map, gpu(gib), 256).sample_bytes / 2**30
    assert fits(found.kv_cache_gib) and found.chosen["kv_cache_gib"] is None
    assert f"kv_cache_gib={found.kv_cache_gib:g}, which holds" in notes[-1]
    if samples is None:
        assert found.kv_cache_gib > 1.0 and not fits(found.kv_cache_gib + sample + 0.02)
    else:
        assert found.kv_cache_gib == pytest.approx(max(1.0, samples * sample), abs=0.011)
    assert resolve(replace(cfg, kv_cache_gib=3.0), FOUR, gpu(gib))[0].kv_cache_gib == 3.0
    assert resolve(cfg, FOUR, CPU)[0].kv_cache_gib == 1.0
    lowered, _ = lower_cache(found, device_map, int((gib - 8) * 2**30))
    assert lowered.kv_cache_gib <= found.kv_cache_gib


def test_the_cache_of_a_cpu_is_not_chosen_by_size(toy_folder):
    found, notes = resolve(config(toy_folder, kv_cache_gib=None), ALONE, CPU)
    assert found.kv_cache_gib == 1.0 and not any("cache" in note for note in notes)
