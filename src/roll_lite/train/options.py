"""How a recipe trains, as flat options that its Config inherits; they check themselves."""

from dataclasses import dataclass
from typing import Any, Literal

from roll_lite.checks import above, at_least, unread_with
from roll_lite.models.lora import TARGETS, lora_options
from roll_lite.train.optimizer import Schedule


@dataclass(kw_only=True)
class Training:
    lr: float = 1e-3
    """Learning rate after warm-up."""
    warmup_steps: int = 0
    """Steps over which the learning rate rises to lr."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """What the learning rate does after warm-up; linear and cosine end at 0."""
    max_grad_norm: float = 1.0
    """Gradients longer than this are scaled down to it."""
    tokens_per_microbatch: int = 16384
    """Memory budget of one forward and backward pass."""
    checkpointing: Literal["none", "selective", "full"] = "none"
    """What the backward pass computes again to save memory."""
    moments: Literal["float32", "bfloat16"] = "float32"
    """The optimizer's."""
    lora_rank: int = 0
    """Train adapters of this rank instead of all weights; 0 is off."""
    lora_alpha: float = 32.0
    """Adapters count lora_alpha / lora_rank times."""
    lora_targets: tuple[str, ...] = tuple(TARGETS)
    """Which projections get adapters."""

    def __post_init__(self):
        at_least(0, self, "warmup_steps", "lr", "lora_rank")
        at_least(1, self, "tokens_per_microbatch")
        above(0, self, "max_grad_norm")
        if self.lora_rank == 0:
            unread_with("lora_rank=0", self, "lora_alpha", "lora_targets")
        _ = self.schedule_over(1), self.policy_options  # refuse what is not known

    def schedule_over(self, num_steps: int, lr: float | None = None) -> Schedule:
        """Of a run of so many steps."""
        return Schedule(
            lr=self.lr if lr is None else lr,
            warmup_steps=self.warmup_steps,
            kind=self.schedule,
            num_steps=max(1, num_steps),
        )

    @property
    def trainer_options(self) -> dict[str, Any]:
        """Of a Trainer, whatever it trains."""
        return {
            "max_grad_norm": self.max_grad_norm,
            "checkpointing": self.checkpointing,
            "moments": self.moments,
        }

    @property
    def policy_options(self) -> dict[str, Any]:
        """Of the Trainer of the model itself, which may have adapters."""
        lora = lora_options(self.lora_rank, self.lora_alpha, self.lora_targets)
        return self.trainer_options | {"lora": lora}
