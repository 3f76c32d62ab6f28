"""Every algorithm of recipes/rlvr.py on a task that a one-layer model learns in a second."""

import dataclasses
import json
import math
import string
from functools import partial
from pathlib import Path

import pytest
import torch
from support.recipes import call_recipe
from support.runs import comparable, gain

from roll_lite import roles
from roll_lite.models.hf import load_model
from roll_lite.options import from_flat
from roll_lite.recipes import rlvr
from roll_lite.train import sample_rows

REPLY_TOKENS = 4
GOOD = string.ascii_lowercase[:13]  # 13 of 98 tokens


def share_of_good_letters(prompt, reply):
    return sum(letter in GOOD for letter in reply) / REPLY_TOKENS


@pytest.fixture
def train(toy_folder, tmp_path, monkeypatch):
    """Runs the recipe with the options given; returns the metrics of each step."""
    monkeypatch.setitem(rlvr.Config.INLINE, "reverse", share_of_good_letters)
    return partial(run_recipe, toy_folder, tmp_path)


def run_recipe(toy_folder, tmp_path, **changes):
    options = {
        "model": str(toy_folder), "data": ("reverse:1",), "prompts_per_step": 8, "max_tokens": 4,
        "eval_prompts": 1, "eval_every": 100, "kv_cache_gib": 0.005, "lr": 1e-2,
        "run_dir": str(tmp_path / "run"),
    } | changes  # fmt: skip
    call_recipe(rlvr, from_flat(rlvr.Config, **options))
    lines = (Path(options["run_dir"]) / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines[1:]]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="grpo"),
        pytest.param({"advantage": "gae", "critic_lr": 1e-2, "value_clip": 0.5}, id="ppo"),
        pytest.param(
            {"loss": "gspo", "clip_low": 0.02, "clip_high": 0.02}, id="gspo", marks=pytest.mark.slow
        ),
        pytest.param(
            {"loss": "cispo", "clip_low": 1.0, "clip_high": 0.2}, id="cispo", marks=pytest.mark.slow
        ),
    ],
)
def test_it_learns(train, options):
    """Two passes over each batch, so that ratios move and the losses differ."""
    steps = train(steps=12, epochs=2, **options)
    assert gain(steps) > 0.5
    assert any(metrics["policy/clip_fraction"] > 0 for metrics in steps)


def test_with_the_wrong_sign_it_does_not_learn(train, monkeypatch):
    def flipped(*arguments):
        sequences = prepare(*arguments)
        return [dataclasses.replace(s, advantages=[-a for a in s.advantages]) for s in sequences]

    prepare = rlvr.prepare
    monkeypatch.setattr(rlvr, "prepare", flipped)
    steps = train(steps=12, epochs=2)
    assert gain(steps) < -0.05


FURTHER = [
    {"advantage": "rloo"},
    {"advantage": "lite_ppo", "reward_norm": "running"},
    {"advantage": "reinforce", "baseline": "group", "gamma": 0.9},
    {"advantage": "reinforce", "samples_per_prompt": 1, "prompts_per_step": 16},
    {"advantage": "reinforce++", "kl_coef": 0.1, "kl_in": "reward"},
    {"advantage": "gae", "lam": 1.0, "whiten": True, "epochs": 2, "updates_per_step": 2},
    {"divide_by_std": False, "reward_clip": 0.4, "advantage_clip": 0.1},
    {"loss": "segment"},
    {"loss": "tis", "ratio_cap": 2.0},
    {"loss": "topr", "aggregation": "seq_mean_token_sum"},
    {"loss": "raft++", "advantage": "reinforce", "whiten": False},
    {"loss": "kimi", "divide_by_std": False, "aggregation": "seq_mean_token_mean", "tau": 0.5},
    {"loss": "reinforce", "entropy_coef": 0.01},
    {"dual_clip": 3.0, "aggregation": "seq_mean_token_sum_const", "constant": 4.0},
    {"denominator": "old", "correction": "token"},
    {"denominator": "old", "correction": "sequence", "rejection": "token", "rejection_low": 0.9},
    {"kl_coef": 0.1, "kl_estimator": "k2"},
    {"kl_coef": 0.1, "kl_in": "reward", "kl_target": 0.01, "kl_horizon": 100},
    {"overlong": "penalty", "overlong_buffer": 2},
    {"min_group_reward": 0.01, "max_group_reward": 0.9},
]
ALWAYS = ("loss/loss", "loss/entropy", "loss/grad_norm", "policy/ratio", "mismatch/logprob_mean")


@pytest.mark.parametrize("options", FURTHER, ids=str)
def test_two_steps_of_each_further_kind(train, options):
    small = {"prompts_per_step": 4, "samples_per_prompt": 4}
    wanted = set(ALWAYS)
    if options.get("kl_coef"):
        wanted.add("loss/kl")
    if options.get("advantage") == "gae":
        wanted |= {"critic/loss", "critic/value_error", "critic/grad_norm", "time/critic"}
    for metrics in train(steps=2, **(small | options)):
        assert wanted <= set(metrics)
        assert all(math.isfinite(value) for value in metrics.values())
        assert metrics["loss/grad_norm"] > 0


# ---- the critic


@pytest.mark.slow
def test_a_critic_in_warm_up_learns_what_replies_are_worth_and_the_policy_waits(
    train, toy_folder, tmp_path
):
    """With lambda 1 it predicts the reward: knowing t of 4 letters explains t / 4 of its variance.

    That is 3 / 8 on average. It begins below 0, since its first guess is too low for all.
    """
    steps = train(
        steps=16, prompts_per_step=16, updates_per_step=8, epochs=2, advantage="gae", lam=1.0,
        critic_lr=1e-2, critic_warmup_steps=16,
    )  # fmt: skip
    explained = [metrics["critic/explained_variance"] for metrics in steps]
    assert explained[0] < 0
    assert 0.15 < sum(explained[-3:]) / 3 < 0.5
    assert not any("loss/loss" in metrics for metrics in steps)
    before, after = (
        load_model(folder, device=torch.device("cpu"), dtype=torch.float32).state_dict()
        for folder in (toy_folder, tmp_path / "run" / "model")
    )
    assert all(torch.equal(before[name], after[name]) for name in before)


# ---- the reference


def test_the_reference_is_the_starting_model_unless_another_is_named(train, small_folder, tmp_path):
    (metrics,) = train(steps=1, kl_coef=0.1)
    assert abs(metrics["loss/kl"]) < 1e-6
    (metrics,) = train(steps=1, kl_coef=0.1, reference=str(small_folder), run_dir=tmp_path / "b")
    assert metrics["loss/kl"] > 1e-2 and metrics["reference/kl"] > 1e-2


@pytest.mark.parametrize("lora_rank", [0, 2])
def test_a_reference_that_is_only_measured_changes_nothing(train, toy_folder, tmp_path, lora_rank):
    """--reference without --kl-coef; with adapters the starting model is not loaded again."""
    options = {"steps": 3, "lora_rank": lora_rank}
    plain = train(**options)
    measured = train(**options, reference=str(toy_folder), run_dir=tmp_path / "b")
    first, *_, last = [row.pop("reference/kl") for row in measured]
    assert abs(first) < 1e-6 < last
    assert comparable(measured) == comparable(plain)


@pytest.mark.parametrize("kl_in", ["loss", "reward"])
def test_a_strong_kl_penalty_keeps_the_policy_where_it_was(train, kl_in):
    steps = train(steps=12, kl_coef=20.0, kl_in=kl_in, kl_estimator="k2")
    assert abs(gain(steps)) < 0.1


@pytest.mark.parametrize(("target", "is_rising"), [(1e-4, True), (10.0, False)])
def test_the_coefficient_adapts_to_the_target(train, target, is_rising):
    steps = train(steps=4, kl_coef=0.1, kl_in="reward", kl_target=target, kl_horizon=64)
    first, *_, last = [metrics["loss/kl_coef"] for metrics in steps]
    assert (last > first) == is_rising and last != first


# ---- what is trained on


@pytest.fixture
def trained_on(monkeypatch):
    """Groups and sequences, as the recipe gets advantages for the ones and trains on the others."""

    class Rows(sample_rows.Rows):
        def __init__(self, groups, *arguments):
            seen["groups"] = groups
            super().__init__(groups, *arguments)

    def update(trained, *arguments):
        seen["sequences"] = trained
        return original_update(trained, *arguments)

    seen, original_update = {}, rlvr.update
    monkeypatch.setattr(sample_rows, "Rows", Rows)
    monkeypatch.setattr(rlvr, "update", update)
    return seen


def test_overlong_replies_are_masked(train, trained_on):
    """With one token in 98 that ends them, about a quarter of the replies are not cut."""
    (metrics,) = train(steps=1, max_tokens=32, overlong="mask")
    samples = [sample for group in trained_on["groups"] for sample in group.samples]
    kept = [s.token_ids for s in samples if s.turns[-1].finish_reason == "stop"]
    assert [s.token_ids for s in trained_on["sequences"]] == kept
    assert metrics["rollout/trained_samples"] == len(kept)
    assert 0 < len(kept) < len(samples)


def test_overlong_replies_are_penalised(train, trained_on):
    (metrics,) = train(steps=1, overlong="penalty", overlong_buffer=2)
    samples = [sample for group in trained_on["groups"] for sample in group.samples]
    for sample in samples:
        penalty = {4: 1.0, 3: 0.5}.get(sum(sample.loss_mask), 0.0)
        reward = share_of_good_letters(sample.prompt, sample.reply)
        assert sample.score.value == pytest.approx(reward - penalty)
    rewards = [share_of_good_letters(s.prompt, s.reply) for s in samples]
    assert metrics["reward/mean"] == pytest.approx(sum(rewards) / len(rewards))


def test_groups_outside_the_band_are_replaced(train, trained_on):
    (metrics,) = train(steps=1, min_group_reward=0.15, max_group_reward=0.3)
    means = [sum(s.score.value for s in g.samples) / len(g.samples) for g in trained_on["groups"]]
    assert len(means) == 8 and all(0.15 <= mean <= 0.3 for mean in means)
    assert metrics["rollout/filtered"] == 8 * metrics["rollout/refilled"] > 0


def test_fewer_groups_make_fewer_updates_not_smaller_ones(train, monkeypatch):
    """Eight prompts of four samples in four updates are eight samples each."""

    def counting_pack(part, *arguments, **options):
        sizes.append(len(part))
        return pack(part, *arguments, **options)

    pack, sizes = roles.pack, []
    monkeypatch.setattr(roles, "pack", counting_pack)
    (metrics,) = train(
        steps=1, samples_per_prompt=4, updates_per_step=4, max_refills=0, min_group_reward=0.15
    )
    assert 2 <= metrics["rollout/missing_groups"] <= 6
    assert (
        sum(sizes)
        == metrics["rollout/trained_samples"]
        == 32 - 4 * metrics["rollout/missing_groups"]
    )
    assert all(6 <= size <= 11 for size in sizes)


def test_a_step_of_which_no_group_is_worth_training_on_is_skipped_and_says_why(train, capsys):
    (metrics,) = train(steps=1, min_group_reward=2.0, max_refills=2)
    assert metrics["rollout/skipped_steps"] == 1 and "loss/loss" not in metrics
    assert "24 had a mean reward below 2.0; max_refills=2 allows" in capsys.readouterr().out


def test_a_step_without_anything_to_train_on_changes_nothing(train, trained_on, monkeypatch):
    monkeypatch.setattr(rlvr, "prepare", lambda *arguments: [])
    (metrics,) = train(steps=1)
    assert trained_on["sequences"] == [] and metrics["rollout/trained_samples"] == 0
    assert "loss/loss" not in metrics


def test_old_logprobs_are_those_before_the_first_update(train, trained_on):
    train(steps=1, denominator="old", epochs=2)
    for sequence in trained_on["sequences"]:
        assert sequence.old_logprobs == pytest.approx(sequence.logprobs, abs=1e-5)
        assert any(sequence.old_logprobs)


# ---- options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"advantage": "gigpo"}, "advantage='gigpo' needs rewards turn by turn"),
        ({"advantage": "opd"}, "advantage='opd' needs a teacher"),
        ({"advantage": "a2c"}, "advantage='a2c' is not known; use one of grpo"),
        ({"loss": "a2c"}, "loss='a2c' is not known; use one of ppo"),
        ({"lam": 0.9}, "lam=0.9 is read by advantage gae; advantage='grpo' does not"),
        (
            {"loss": "kimi", "clip_low": 0.1},
            "clip_low=0.1 is read by .*'kimi' does not",
        ),
        ({"critic_lr": 0.1}, "critic_lr=0.1 is only read with an advantage that reads values_R"),
        ({"advantage": "gae", "value_clip": 0.0}, "value_clip=0.0 must be above 0"),
        ({"kl_in": "reward"}, "kl_in='reward' is only read with kl_coef above 0"),
        ({"kl_in": "prompt", "kl_coef": 0.1}, "kl_in='prompt' is not known; use one of loss"),
        ({"kl_estimator": "k2"}, "kl_estimator='k2' is only read with kl_coef above 0"),
        ({"constant": 8.0}, "constant=8.0 with aggregation='token_mean'"),
        ({"overlong": "cut"}, "overlong='cut' is not known; use one of train"),
        ({"overlong": "penalty"}, "overlong_buffer=0 must be above 0 and at most max_tokens=4"),
        ({"overlong_buffer": 2}, "overlong_buffer=2 is only read with overlong='penalty'"),
        (
            {"min_group_reward": 0.9, "max_group_reward": 0.1},
            "min_group_reward=0.9 must not exceed max_group_reward=0.1",
        ),
        ({"epochs": 0}, "epochs=0 must be at least 1"),
        ({"samples_per_prompt": 1, "advantage": "rloo"}, "samples_per_prompt=1 must be at least 2"),
    ],
    ids=str,
)
def test_an_option_that_cannot_work_or_is_not_read_is_refused(train, options, message):
    with pytest.raises(ValueError, match=message):
        train(steps=1, **options)
