"""Options that are chosen when none is given."""

import pytest
from support.runs import toy_options

from roll_lite.models.config import shape_config
from roll_lite.options import flatten, from_flat
from roll_lite.recipes import dpo, rlvr, sft
from roll_lite.train import defaults
from roll_lite.train.advantages import AdvantageOptions
from roll_lite.train.losses import LossOptions


def config(toy_folder, **changes):
    options = toy_options(toy_folder, "no-such-run") | {"lr": None, "max_tokens": None}
    return from_flat(rlvr.Config, **options | changes)


def chosen(monkeypatch, cfg, preset=None, **kinds):
    if preset:  # its size, for the folder of another model
        for module in (defaults, rlvr):
            monkeypatch.setattr(module, "read_config", lambda _: shape_config(preset))
    return flatten(defaults.choose_defaults(cfg, **kinds or cfg.default_kinds))


def test_rates_go_by_size(toy_folder, monkeypatch, capsys):
    cfg = config(toy_folder)
    assert chosen(monkeypatch, cfg)["lr"] == 3e-4
    assert (
        "chosen for a model of 0M parameters: lr=0.0003, max_tokens=16\n" in capsys.readouterr().out
    )
    found = chosen(monkeypatch, cfg, "qwen3-0.6b")
    assert (found["lr"], found["max_tokens"]) == (2e-6, 1024)
    assert chosen(monkeypatch, cfg, "qwen3-8b")["lr"] == 1e-6
    assert chosen(monkeypatch, config(toy_folder, lora_rank=4), "qwen3-8b")["lr"] == pytest.approx(
        1e-5
    )
    critic = config(toy_folder, advantage="gae", loss="ppo")
    assert chosen(monkeypatch, critic, "qwen3-8b")["critic_lr"] == 1e-5


def test_given_values_stay(toy_folder, monkeypatch, capsys):
    cfg = config(toy_folder, lr=5e-5, max_tokens=7)
    assert chosen(monkeypatch, cfg, "qwen3-8b") == flatten(cfg)
    assert capsys.readouterr().out == ""


def test_other_recipes_have_rates_of_their_own(toy_folder, monkeypatch):
    common = {"model": str(toy_folder), "run_dir": "no-such-run"}
    tuning = from_flat(sft.Config, **common)
    assert chosen(monkeypatch, tuning, lr="sft")["lr"] == 1e-3
    assert chosen(monkeypatch, tuning, "qwen3-8b", lr="sft")["lr"] == 1e-5
    preferring = from_flat(dpo.Config, **common)
    assert chosen(monkeypatch, preferring, "qwen3-8b", lr="preference")["lr"] == 5e-7


def test_losses_have_the_defaults_of_their_papers():
    assert LossOptions(loss="gspo").function.keywords == {}
    assert LossOptions(loss="topr").chosen_aggregation == "seq_mean_token_sum"
    assert LossOptions(loss="kimi").chosen_aggregation == "seq_mean_token_mean"
    assert LossOptions(loss="ppo").chosen_aggregation == "token_mean"


def test_kimi_does_not_divide_by_the_deviation():
    kimi, plain = LossOptions(loss="kimi"), AdvantageOptions()
    assert defaults.paper_advantages(plain, kimi).divide_by_std is False
    kept = AdvantageOptions(divide_by_std=True)
    assert defaults.paper_advantages(kept, kimi) == kept
    assert defaults.paper_advantages(plain, LossOptions()) == plain


@pytest.mark.parametrize(
    "changes",
    [
        {"loss": "gspo", "advantage": "gae"},
        {"loss": "kimi", "advantage": "reinforce", "gamma": 0.9},
        {"loss": "topr", "advantage": "reinforce", "kl_coef": 0.1, "kl_in": "reward"},
    ],
)
def test_losses_of_sequences_refuse_advantages_of_tokens(toy_folder, changes):
    with pytest.raises(ValueError, match="has one advantage per sequence"):
        config(toy_folder, **changes)
    config(toy_folder, **changes | {"loss": "ppo"})


def test_losses_of_sequences_take_whole_returns(toy_folder):
    config(toy_folder, loss="gspo", advantage="reinforce")
