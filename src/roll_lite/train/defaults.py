"""Options that are chosen when none is given: by the size of the model, and by the papers.

Rates are what others train such models with: RL 1e-6 (verl, ROLL, at 7B), SFT 1e-5 to 2e-5, DPO
5e-7, critics 1e-5, and ten times as much for adapters. Small models need more to get anywhere.
"""

import math
from dataclasses import replace
from typing import Any, TypeVar

from roll_lite.models.config import ModelConfig, read_config
from roll_lite.models.cost import count_parameters
from roll_lite.options import flatten, from_flat, mark_chosen
from roll_lite.train.advantages import AdvantageOptions
from roll_lite.train.kl import KLOptions
from roll_lite.train.losses import OF_SEQUENCES, LossOptions

T = TypeVar("T")
RATES = {
    "rl": {20e6: 3e-4, 300e6: 2e-5, 1e9: 2e-6, math.inf: 1e-6},
    "sft": {20e6: 1e-3, 300e6: 1e-4, 3e9: 2e-5, math.inf: 1e-5},
    "preference": {20e6: 1e-4, 300e6: 5e-6, math.inf: 5e-7},
    "critic": {20e6: 1e-3, 300e6: 1e-4, math.inf: 1e-5},
}
"""By the kind of training: the learning rate of models with fewer parameters than this."""
LORA_FACTOR = 10
REPLY_TOKENS = {20e6: 16, math.inf: 1024}
TURN_TOKENS = {20e6: 16, math.inf: 64}


def choose_defaults(cfg: T, **kinds: str) -> T:
    """The config of a recipe with a value for each option of `kinds` that is None; prints them.

    A kind is one of RATES, or the length of a reply or turn:
    `choose_defaults(cfg, lr="rl", max_tokens="reply")`.
    """
    given, config = flatten(cfg), read_config(cfg.model)
    chosen = {
        name: _default(kind, config, bool(given.get("lora_rank")))
        for name, kind in kinds.items()
        if given[name] is None
    }
    if chosen:
        size = count_parameters(config).total / 1e6
        listed = ", ".join(f"{name}={value:g}" for name, value in chosen.items())
        print(f"chosen for a model of {size:,.0f}M parameters: {listed}", flush=True)
    return mark_chosen(from_flat(type(cfg), **given | chosen), chosen)


def default_tokens(kind: str, config: ModelConfig) -> int:
    """Longest reply, or turn of an episode; at most half of the model's positions."""
    tokens = {"reply": REPLY_TOKENS, "turn": TURN_TOKENS}[kind]
    return min(_of_size(tokens, config), config.max_positions // 2)


def check_algorithm(advantages: AdvantageOptions, loss: LossOptions, kl: KLOptions) -> None:
    """Refuse a loss of whole sequences with advantages that differ within them."""
    if loss.loss in OF_SEQUENCES and advantages.differs_by_token(kl.is_in("reward")):
        raise ValueError(
            f"loss={loss.loss!r} has one advantage per sequence; advantage="
            f"{advantages.advantage!r} gives each token its own with these options; use loss=ppo "
            "or cispo, or advantage=grpo"
        )


def paper_advantages(advantages: AdvantageOptions, loss: LossOptions) -> AdvantageOptions:
    """Kimi's advantage is not divided by the deviation, unless the options say so."""
    is_open = advantages.advantage == "grpo" and advantages.divide_by_std is None
    if loss.loss == "kimi" and is_open:
        return replace(advantages, divide_by_std=False)
    return advantages


def _default(kind: str, config: ModelConfig, has_adapters: bool) -> float:
    if kind not in RATES:
        return default_tokens(kind, config)
    rate = _of_size(RATES[kind], config)
    return rate * LORA_FACTOR if has_adapters and kind != "critic" else rate


def _of_size(table: dict[float, Any], config: ModelConfig) -> Any:
    size = count_parameters(config).total
    return next(value for bound, value in table.items() if size < bound)
