"""How a model is optimised: options, learning-rate schedule, and defaults by the model's size.

Rates are what others train such models with: RL 1e-6 (verl, ROLL, at 7B), SFT 1e-5 to 2e-5, DPO
5e-7, critics 1e-5, and ten times as much for adapters. Small models need more to get anywhere.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal

from roll_lite.checks import UserError, above, at_least, check_choices
from roll_lite.models.config import DEFAULT_TARGETS, ModelConfig, lora_options, read_config
from roll_lite.models.cost import count_parameters
from roll_lite.options import Argument, RecipeConfig, flatten

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


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """Optimizer, memory and LoRA."""

    lr: float | None = None
    """Learning rate after warm-up; None chooses by the model's size, and prints it."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after warm-up; linear and cosine end at 0."""
    warmup_steps: int = 0
    """Steps over which the learning rate rises to lr."""
    weight_decay: float = 0.0
    """AdamW's weight decay."""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW's betas: decay of its first and its second moment."""
    max_grad_norm: Argument[float] = 1.0
    """Gradients of a larger norm are scaled down to it."""
    tokens_per_microbatch: int = 16384
    """Tokens of one forward and backward pass: more is faster and takes more memory."""
    checkpointing: Literal["none", "selective", "full"] = "none"
    """Activations that the backward pass recomputes instead of keeping."""
    moments: Argument[Literal["float32", "bfloat16"]] = "float32"
    """Dtype of AdamW's moments."""
    balance_coef: float = 0.0
    """Weight of the loss that spreads tokens evenly over the experts of a mixture."""
    lora_rank: int = 0
    """Train LoRA adapters of this rank instead of all weights; 0 is off."""
    lora_alpha: Argument[float] = 32.0
    """Adapters are scaled by lora_alpha / lora_rank."""
    lora_targets: Argument[tuple[str, ...]] = DEFAULT_TARGETS
    """Projections that get adapters; those of a mixture's experts are expert_gate_up and
    expert_down."""

    def __post_init__(self):
        at_least(0, self, "warmup_steps", "lr", "lora_rank", "weight_decay", "balance_coef")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise UserError(
                f"betas={self.betas} must be two numbers from 0 to below 1, as in (0.9, 0.95)"
            )
        at_least(1, self, "tokens_per_microbatch")
        above(0, self, "max_grad_norm")
        check_choices(self)
        _ = self.policy_options  # refuses unknown adapters

    def schedule_over(self, num_steps: int, lr: float | None = None) -> "Schedule":
        """The learning rates of a run of `num_steps` steps."""
        return Schedule(
            lr=self.lr if lr is None else lr,
            warmup_steps=self.warmup_steps,
            kind=self.schedule,
            num_steps=max(1, num_steps),
        )

    @property
    def trainer_options(self) -> dict[str, Any]:
        """Keyword arguments of any Trainer."""
        return {
            "weight_decay": self.weight_decay,
            "betas": self.betas,
            "max_grad_norm": self.max_grad_norm,
            "checkpointing": self.checkpointing,
            "moments": self.moments,
            "balance_coef": self.balance_coef,
        }

    @property
    def memory_options(self) -> dict[str, Any]:
        """Keyword arguments of `train_memory` in models/memory.py."""
        return {
            "checkpointing": self.checkpointing,
            "moments": self.moments,
            "lora_rank": self.lora_rank,
            "lora_targets": self.lora_targets,
        }

    @property
    def policy_options(self) -> dict[str, Any]:
        """Keyword arguments of the policy's Trainer, which may have adapters."""
        lora = lora_options(self.lora_rank, self.lora_alpha, self.lora_targets)
        return self.trainer_options | {"lora": lora}


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Learning rate of each step: linear warm-up, then constant or decaying to 0."""

    lr: float
    warmup_steps: int = 0
    kind: Literal["constant", "linear", "cosine"] = "constant"
    num_steps: int | None = None
    """Steps of the whole run; linear and cosine need it."""

    def __post_init__(self):
        check_choices(self)
        if self.kind != "constant" and not self.num_steps:
            raise UserError(f"schedule={self.kind!r} needs the number of steps of the run")

    def at(self, step: int) -> float:
        """The learning rate of step `step`, counted from 0."""
        if step < self.warmup_steps:
            return self.lr * (step + 1) / (self.warmup_steps + 1)
        if self.kind == "constant":
            return self.lr
        done = (step - self.warmup_steps) / max(1, self.num_steps - self.warmup_steps)
        left = 1 - min(1.0, done)
        if self.kind == "cosine":
            left = 0.5 * (1 - math.cos(math.pi * left))
        return self.lr * left


# ---- defaults by the size of the model


def sized_defaults(cfg: RecipeConfig) -> tuple[dict[str, Any], list[str]]:
    """A value for each option of a recipe's `default_kinds` that is None, and lines that say so.

    A kind is one of RATES, or the length of a reply or turn: {"lr": "rl", "max_tokens": "reply"}.
    """
    given = flatten(cfg)
    kinds = {name: kind for name, kind in cfg.default_kinds.items() if given[name] is None}
    if not kinds:
        return {}, []
    config = read_config(cfg.model)
    has_adapters = bool(given.get("lora_rank"))
    chosen = {name: _default(kind, config, has_adapters) for name, kind in kinds.items()}
    size = count_parameters(config).total / 1e6
    listed = ", ".join(f"{name}={value:g}" for name, value in chosen.items())
    return chosen, [f"chosen for a model of {size:,.0f}M parameters: {listed}"]


def default_tokens(kind: str, config: ModelConfig) -> int:
    """Longest reply, or turn of an episode; at most half of the model's positions."""
    tokens = {"reply": REPLY_TOKENS, "turn": TURN_TOKENS}[kind]
    return min(_of_size(tokens, config), config.max_positions // 2)


def _default(kind: str, config: ModelConfig, has_adapters: bool) -> float:
    if kind not in RATES:
        return default_tokens(kind, config)
    rate = _of_size(RATES[kind], config)
    return rate * LORA_FACTOR if has_adapters and kind != "critic" else rate


def _of_size(table: dict[float, Any], config: ModelConfig) -> Any:
    size = count_parameters(config).total
    return next(value for bound, value in table.items() if size < bound)
