"""Options of a run that trains a policy: which losses and advantages fit together."""

import pytest
from support.runs import toy_options

from roll_lite.options import from_flat
from roll_lite.policy import paper_advantages
from roll_lite.recipes import rlvr
from roll_lite.train.advantages import AdvantageOptions
from roll_lite.train.losses import LossOptions


def config(toy_folder, **changes):
    return from_flat(rlvr.Config, **toy_options(toy_folder, "no-such-run") | changes)


def test_kimi_does_not_divide_by_the_deviation():
    kimi, plain = LossOptions(loss="kimi"), AdvantageOptions()
    assert paper_advantages(plain, kimi).divide_by_std is False
    kept = AdvantageOptions(divide_by_std=True)
    assert paper_advantages(kept, kimi) == kept
    assert paper_advantages(plain, LossOptions()) == plain


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
