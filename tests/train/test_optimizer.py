"""AdamW, its 16-bit moments and the schedules against torch and formulas; chosen options."""

import math

import pytest
import torch
from support.runs import toy_options

from roll_lite import policy
from roll_lite.models.config import shape_config
from roll_lite.options import from_flat
from roll_lite.recipes import dpo, rlvr, sft
from roll_lite.train import optimizer
from roll_lite.train.adamw import AdamW, round_stochastically
from roll_lite.train.optimizer import Schedule, TrainingOptions


def run(optimizer_of, steps=20):
    generator = torch.Generator().manual_seed(0)
    parameters = {
        name: torch.nn.Parameter(torch.randn(shape, generator=generator))
        for name, shape in (("a", (4, 5)), ("b", (7,)), ("empty", (0, 3)))
    }
    step = optimizer_of(parameters)
    for i in range(steps):
        for parameter in parameters.values():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        step(1e-2 / (i + 1))
    return parameters


def ours(parameters, **options):
    return AdamW(parameters, weight_decay=0.1, **options).step


def of_torch(parameters):
    optimizer = torch.optim.AdamW(parameters.values(), weight_decay=0.1)

    def step(lr):
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()

    return step


def test_updates_equal_torch():
    for mine, theirs in zip(run(ours).values(), run(of_torch).values(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-7)


def test_sixteen_bit_moments_come_close_and_repeat():
    exact, rounded, again = (
        run(lambda p, dtype=dtype: ours(p, moments_dtype=dtype))
        for dtype in (torch.float32, torch.bfloat16, torch.bfloat16)
    )
    for name in exact:
        assert torch.equal(rounded[name], again[name])
        torch.testing.assert_close(rounded[name], exact[name], rtol=0, atol=2e-3)
    assert not torch.equal(rounded["a"], exact["a"])


def test_a_moment_that_changes_by_less_than_bf16_resolves_still_moves():
    """1.0 grows by a thousandth a step: rounding to the nearest would never leave 1."""
    stored = torch.ones(10_000, dtype=torch.bfloat16)
    for step in range(50):
        stored = round_stochastically(stored.float() * 1.001, step)
    assert stored.float().mean().item() == pytest.approx(1.001**50, rel=2e-3)


def test_rounding_is_to_a_neighbour_and_keeps_what_bf16_can_hold():
    x = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    rounded = round_stochastically(x, 3).float()
    assert ((rounded - x).abs() <= x.abs() * 2**-7).all()
    kept = x.to(torch.bfloat16).float()
    assert torch.equal(round_stochastically(kept, 4).float(), kept)


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine"])
def test_schedules(kind):
    schedule = Schedule(lr=2.0, warmup_steps=3, kind=kind, num_steps=13)
    assert [schedule.at(i) for i in range(3)] == pytest.approx([0.5, 1.0, 1.5])
    for i in range(3, 20):
        share = min(1.0, (i - 3) / 10)
        expected = {
            "constant": 2.0,
            "linear": 2.0 * (1 - share),
            "cosine": 2.0 * 0.5 * (1 + math.cos(math.pi * share)),
        }[kind]
        assert schedule.at(i) == pytest.approx(expected)


def test_bad_schedules_are_refused():
    with pytest.raises(ValueError, match=r"schedule='step' is not known; use one of constant"):
        TrainingOptions(schedule="step")
    with pytest.raises(ValueError, match=r"kind='step' is not known; use one of constant"):
        Schedule(lr=1.0, kind="step")
    with pytest.raises(ValueError, match=r"'cosine' needs the number of steps"):
        Schedule(lr=1.0, kind="cosine")


# ---- options that are chosen when none is given


def config(toy_folder, **changes):
    options = toy_options(toy_folder, "no-such-run") | {"lr": None, "max_tokens": None}
    return from_flat(rlvr.Config, **options | changes)


def chosen(monkeypatch, cfg, preset=None):
    """The options that are chosen, and what is said of them."""
    if preset:  # its size, for the folder of another model
        for module in (optimizer, policy):
            monkeypatch.setattr(module, "read_config", lambda _: shape_config(preset))
    return optimizer.sized_defaults(cfg)


def test_rates_go_by_size(toy_folder, monkeypatch):
    cfg = config(toy_folder)
    found, notes = chosen(monkeypatch, cfg)
    assert found == {"lr": 3e-4, "max_tokens": 16}
    assert notes == ["chosen for a model of 0M parameters: lr=0.0003, max_tokens=16"]
    found, _ = chosen(monkeypatch, cfg, "qwen3-0.6b")
    assert found == {"lr": 2e-6, "max_tokens": 1024}
    assert chosen(monkeypatch, cfg, "qwen3-8b")[0]["lr"] == 1e-6
    found, _ = chosen(monkeypatch, config(toy_folder, lora_rank=4), "qwen3-8b")
    assert found["lr"] == pytest.approx(1e-5)
    critic = config(toy_folder, advantage="gae", loss="ppo")
    assert chosen(monkeypatch, critic, "qwen3-8b")[0]["critic_lr"] == 1e-5


def test_given_values_stay(toy_folder, monkeypatch):
    cfg = config(toy_folder, lr=5e-5, max_tokens=7)
    assert chosen(monkeypatch, cfg, "qwen3-8b") == ({}, [])
    found, _ = chosen(monkeypatch, config(toy_folder, max_tokens=7), "qwen3-8b")
    assert found == {"lr": 1e-6}


def test_other_recipes_have_rates_of_their_own(toy_folder, monkeypatch):
    common = {"model": str(toy_folder), "run_dir": "no-such-run"}
    tuning = from_flat(sft.Config, **common)
    assert chosen(monkeypatch, tuning)[0] == {"lr": 1e-3}
    assert chosen(monkeypatch, tuning, "qwen3-8b")[0] == {"lr": 1e-5}
    preferring = from_flat(dpo.Config, **common)
    assert chosen(monkeypatch, preferring, "qwen3-8b")[0] == {"lr": 5e-7}


def test_weight_decay_and_betas_reach_every_trainer():
    options = TrainingOptions(weight_decay=0.1, betas=(0.9, 0.95))
    for found in (options.trainer_options, options.policy_options):
        assert found["weight_decay"] == 0.1 and found["betas"] == (0.9, 0.95)
    for wrong in ((0.9,), (0.9, 1.0), (-0.1, 0.9)):
        with pytest.raises(ValueError, match=r"betas=.* must be two numbers from 0 to below 1"):
            TrainingOptions(betas=wrong)
