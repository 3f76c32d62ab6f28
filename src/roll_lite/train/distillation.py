"""Learning from a teacher's likeliest tokens."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Literal

import torch
from torch import Tensor

from roll_lite.checks import check_choices, read_only_if
from roll_lite.cluster.role import RoleHandle, split
from roll_lite.train.batch import MicroBatch, pack
from roll_lite.train.losses import LossResult, required
from roll_lite.train.sequences import TrainingSequence

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
            raise ValueError(f"skew={self.skew} must lie between 0 and 1")

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


def pack_taught(
    sequences: Sequence[TrainingSequence],
    tokens_per_microbatch: int,
    student: RoleHandle,
    teacher: RoleHandle,
    k: int,
    vocab_size: int,
) -> list[MicroBatch]:
    """Micro-batches with the teacher's k likeliest tokens of the student's vocabulary."""
    # A multiple of both: every replica of the student and of the teacher gets equally many.
    num_shards = math.lcm(student.role.num_replicas, teacher.role.num_replicas)
    batch = pack(sequences, tokens_per_microbatch, num_shards=num_shards)
    top = chain.from_iterable(teacher.top_logprobs(split(batch), k, vocab_size))
    return [
        replace(micro, teacher_ids_RK=ids_RK, teacher_logprobs_RK=logprobs_RK)
        for micro, (ids_RK, logprobs_RK) in zip(batch, top, strict=True)
    ]


def complete(logprobs_RK: Tensor) -> Tensor:
    """(R, K + 1): with the log of the remaining mass as last entry, so rows are distributions."""
    mass_R1 = logprobs_RK.logsumexp(-1, keepdim=True).clamp(max=LARGEST_MASS)
    # log(1 - exp(x)), by the form that keeps its digits.
    is_near_R1 = mass_R1 > -math.log(2)
    near_R1 = (-torch.where(is_near_R1, mass_R1, -1.0).expm1()).log()
    far_R1 = (-torch.where(is_near_R1, -1.0, mass_R1).exp()).log1p()
    return torch.cat([logprobs_RK, torch.where(is_near_R1, near_R1, far_R1)], dim=-1)


def kl(logp: Tensor, logq: Tensor) -> Tensor:
    return (logp.exp() * (logp - logq)).sum(-1)


def mix(logp: Tensor, logq: Tensor, share: float) -> Tensor:
    """log(share p + (1 - share) q)."""
    return torch.logaddexp(logp + math.log(share), logq + math.log1p(-share))
