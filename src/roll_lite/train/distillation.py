"""Learning from a teacher's likeliest tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from roll_lite.checks import UserError, check_choices, read_only_if
from roll_lite.train.losses import LossResult, required

if TYPE_CHECKING:
    from torch import Tensor

    from roll_lite.train.batch import MicroBatch

LARGEST_MASS = -(2.0**-20)  # log of the k tokens' mass; fp32 cannot tell more from all of it


@dataclass(frozen=True, kw_only=True)
class DistillLoss:
    """Divergence between teacher p and student q.

    Both are over the teacher's k likeliest tokens, and one entry for all other tokens.
    forward: KL(p, q).  reverse: KL(q, p).  skewed: KL(p, skew p + (1 - skew) q) (DistiLLM).
    js: KL(p, m) / 2 + KL(q, m) / 2, with m = (p + q) / 2.
    """

    kind: Literal["forward", "reverse", "skewed", "js"] = "forward"
    """Divergence between teacher and student."""
    skew: float = 0.1
    """kind=skewed: the teacher's share in the mixture that it is compared with."""

    def __post_init__(self):
        check_choices(self)
        read_only_if(self.kind == "skewed", "kind='skewed'", self, "skew")
        if not 0 < self.skew < 1:
            raise UserError(f"skew={self.skew} must lie between 0 and 1")

    def __call__(self, logprobs_RK: Tensor, entropy_R: Tensor, batch: MicroBatch) -> LossResult:
        """`logprobs_RK`: the student's, of `batch.teacher_ids_RK`."""
        student = complete(logprobs_RK)
        teacher = complete(required(batch, "teacher_logprobs_RK").to(student.dtype))
        measurements = {
            "loss/entropy": entropy_R.detach(),
            "loss/kl": kl(teacher, student.detach()),
            "loss/teacher_tail": teacher[:, -1].exp(),
            "loss/student_tail": student[:, -1].detach().exp(),
        }
        return self._divergence(teacher, student), measurements

    def _divergence(self, teacher: Tensor, student: Tensor) -> Tensor:
        if self.kind == "forward":
            return kl(teacher, student)
        if self.kind == "reverse":
            return kl(student, teacher)
        if self.kind == "skewed":
            return kl(teacher, mix(teacher, student, self.skew))
        middle = mix(teacher, student, 0.5)
        return (kl(teacher, middle) + kl(student, middle)) / 2


def complete(logprobs_RK: Tensor) -> Tensor:
    """(R, K + 1): with the log of the remaining mass as last entry, so rows are distributions."""
    from torch import cat  # not above: options are read without torch

    mass_R1 = logprobs_RK.logsumexp(-1, keepdim=True).clamp(max=LARGEST_MASS)
    # log(1 - exp(x)), by the form that keeps its digits.
    is_near_R1 = mass_R1 > -math.log(2)
    near_R1 = (-mass_R1.where(is_near_R1, -1.0).expm1()).log()
    far_R1 = (-mass_R1.masked_fill(is_near_R1, -1.0).exp()).log1p()
    return cat([logprobs_RK, near_R1.where(is_near_R1, far_R1)], dim=-1)


def kl(logp: Tensor, logq: Tensor) -> Tensor:
    return (logp.exp() * (logp - logq)).sum(-1)


def mix(logp: Tensor, logq: Tensor, share: float) -> Tensor:
    """log(share p + (1 - share) q)."""
    return (logp + math.log(share)).logaddexp(logq + math.log1p(-share))
