"""Divergences from a teacher against plain Python floats."""

import math

import pytest
import torch
from support.training_data import double, slope

from roll_lite.train.batch import pack
from roll_lite.train.distillation import DistillLoss, complete
from roll_lite.train.sequences import TrainingSequence


def distill_case(num_rows=12, k=4, vocabulary=20):
    """Logits of student and teacher, and a micro-batch with the teacher's k likeliest tokens."""
    torch.manual_seed(0)
    student, teacher = 2 * torch.randn(2, num_rows, vocabulary, dtype=torch.float64)
    values, ids = teacher.log_softmax(-1).topk(k, -1)
    unknown = torch.zeros(1, k)
    sequence = TrainingSequence(
        token_ids=[1] * (num_rows + 1),
        loss_mask=[True] * (num_rows + 1),
        teacher_ids=torch.cat([unknown.long(), ids]),
        teacher_logprobs=torch.cat([unknown, values]),
    )
    (micro,) = pack([sequence], 100)
    return student, double(micro)


def expected_divergence(loss, student, teacher):
    """`student` and `teacher`: k logprobs each."""
    p = [math.exp(x) for x in teacher]
    q = [math.exp(x) for x in student]
    p.append(1 - sum(p))
    q.append(1 - sum(q))

    def kl(a, b):
        return sum(x * math.log(x / y) for x, y in zip(a, b, strict=True))

    def mixed(share):
        return [share * x + (1 - share) * y for x, y in zip(p, q, strict=True)]

    return {
        "forward": lambda: kl(p, q),
        "reverse": lambda: kl(q, p),
        "skewed": lambda: kl(p, mixed(loss.skew)),
        "js": lambda: (kl(p, mixed(0.5)) + kl(q, mixed(0.5))) / 2,
    }[loss.kind]()


@pytest.mark.parametrize("kind", ["forward", "reverse", "skewed", "js"])
def test_distillation_compares_completed_distributions(kind):
    loss = DistillLoss(kind=kind, skew=0.3) if kind == "skewed" else DistillLoss(kind=kind)
    student, micro = distill_case()
    picked = student.log_softmax(-1).gather(1, micro.teacher_ids_RK).requires_grad_()
    loss_R, found = loss(picked, torch.zeros(len(picked)), micro)
    loss_R.sum().backward()
    for r, (q, p) in enumerate(
        zip(picked.tolist(), micro.teacher_logprobs_RK.tolist(), strict=True)
    ):
        assert loss_R[r].item() == pytest.approx(expected_divergence(loss, q, p), rel=1e-6)
        for column in range(len(q)):
            expected = slope(lambda q, p=p: expected_divergence(loss, q, p), q, column)
            assert picked.grad[r, column].item() == pytest.approx(expected, rel=1e-4, abs=1e-8)
        tail = 1 - sum(map(math.exp, p))
        assert found["loss/teacher_tail"][r].item() == pytest.approx(tail)
        kl = expected_divergence(DistillLoss(), q, p)
        assert found["loss/kl"][r].item() == pytest.approx(kl, rel=1e-6)


def test_with_all_tokens_distillation_is_the_whole_divergence():
    """The teacher lists the whole vocabulary: nothing is left for the tail, and nothing breaks."""
    student, micro = distill_case(k=20)
    picked = student.log_softmax(-1).gather(1, micro.teacher_ids_RK).float().requires_grad_()
    for kind in ("forward", "reverse", "skewed", "js"):
        loss_R, _ = DistillLoss(kind=kind)(picked, torch.zeros(len(picked)), micro)
        (gradient,) = torch.autograd.grad(loss_R.sum(), picked)
        assert gradient.isfinite().all()
        if kind == "forward":
            p = micro.teacher_logprobs_RK
            exact = (p.exp() * (p - picked.double())).sum(-1)
            assert loss_R.tolist() == pytest.approx(exact.tolist(), abs=1e-4)


@pytest.mark.parametrize("mass", [1e-6, 0.3, 0.5, 0.9, 1 - 1e-4])
def test_the_tail_keeps_its_digits(mass):
    logprobs = torch.tensor([[math.log(mass * 0.75), math.log(mass * 0.25)]], dtype=torch.float64)
    completed = complete(logprobs)
    assert completed.exp().sum().item() == pytest.approx(1.0, abs=1e-12)
    assert completed[0, -1].item() == pytest.approx(math.log1p(-mass), rel=1e-9)
    assert complete(logprobs.float())[0, -1].item() == pytest.approx(math.log1p(-mass), rel=1e-3)


def test_distillation_refuses_what_it_does_not_read():
    with pytest.raises(ValueError, match=r"skew=0\.3 is only read with kind='skewed'"):
        DistillLoss(kind="js", skew=0.3)
    with pytest.raises(ValueError, match="kind='kl' is not known; use one of forward, reverse"):
        DistillLoss(kind="kl")
