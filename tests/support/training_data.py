"""Random sequences and groups, gradients by rows, and small formulas for tests of training."""

import statistics
from dataclasses import fields

import torch

from roll_lite.train.batch import MicroBatch, pack
from roll_lite.train.sequences import TrainingSequence
from roll_lite.types import Group, Prompt, Sample, Score, Turn

STEP = 1e-5  # of finite differences


def random_sequences(num=9, seed=0, longest=40, more=()):
    """Prompts and replies of random lengths; `more` names further fields to fill with noise."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low, high, count):
        return torch.randint(low, high, (count,), generator=generator).tolist()

    sequences = []
    for number, length in enumerate(draw(3, longest, num)):
        prompt = draw(1, length, 1)[0]
        sequence = TrainingSequence(
            id=f"s{number}",
            token_ids=draw(0, 199, length),
            loss_mask=[i >= prompt for i in range(length)],
            logprobs=(-5 * torch.rand(length, generator=generator)).tolist(),
            advantages=torch.randn(1, generator=generator).expand(length).tolist(),
        )
        for field in more:
            noise = 0.4 * torch.randn(length, generator=generator)
            noise += torch.tensor(sequence.logprobs)  # plausible logprobs, and numbers otherwise
            setattr(sequence, field, noise.tolist())
        sequences.append(sequence)
    return sequences


def make_sample(reward, num_turns=1, index=0, prompt_id="p", length=3, finish_reason="stop"):
    """Each turn reads two tokens and samples `length`."""
    prompt = Prompt(id=prompt_id, messages=(), domain="d", ground_truth="")
    score = None if reward is None else Score(value=reward)
    sample = Sample(prompt=prompt, index=index, score=score)
    for turn in range(num_turns):
        sample.add_turn(
            Turn(
                prompt_ids=[*sample.token_ids, 5 * turn, 5 * turn + 1],
                token_ids=[7 + i for i in range(length)],
                logprobs=[-0.1 * (i + 1) - 0.01 * index for i in range(length)],
                finish_reason=finish_reason,
                versions=[(0, 0)],
            )
        )
    return sample


def make_groups(rewards, **options):
    """A group for each list of rewards; sample i of group g samples 2 + g + i tokens a turn."""
    return [
        Group(
            prompt=Prompt(id=f"p{g}", messages=(), domain="d", ground_truth=""),
            samples=[
                make_sample(r, index=i, prompt_id=f"p{g}", length=2 + g + i, **options)
                for i, r in enumerate(group)
            ],
        )
        for g, group in enumerate(rewards)
    ]


def rows_with_loss(sequence):
    return [i for i in range(1, len(sequence.token_ids)) if sequence.loss_mask[i]]


def double(micro):
    values = {f.name: getattr(micro, f.name) for f in fields(MicroBatch)}
    return MicroBatch(
        **{
            name: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v
            for name, v in values.items()
        }
    )


def total_and_gradient(loss, sequences, budget=10**6, **options):
    """The batch's loss, and its derivative by the policy's logprob of (sequence, token)."""
    total, gradient = 0.0, {}
    for micro in map(double, pack(sequences, budget, **options)):
        logprobs_R = micro.values_R.clone().requires_grad_()
        loss_R, measurements = loss(logprobs_R, torch.full_like(logprobs_R, 2.0), micro)
        weighted = (loss_R * micro.weights_R).sum()
        weighted.backward()
        assert all(value.shape == loss_R.shape for value in measurements.values())
        assert not any(value.requires_grad for value in measurements.values())
        total += weighted.item()
        names = [sequences[i].id for i in micro.indices_S.tolist()]
        for r, slope in enumerate(logprobs_R.grad.tolist()):
            token = micro.positions_T[micro.rows_R[r]].item() + 1
            gradient[names[micro.sequence_R[r]], token] = slope
    return total, gradient


def slope(function, numbers, i):
    """The derivative of a function of a list of floats by entry i, by central differences."""
    around = [
        function([x + step * (j == i) for j, x in enumerate(numbers)]) for step in (STEP, -STEP)
    ]
    return (around[0] - around[1]) / (2 * STEP)


def flat(lists):
    return [number for values in lists for number in values]


def standardised(values):
    """Minus mean, over sample standard deviation; 0 where that is 0."""
    if len(values) < 2 or statistics.stdev(values) < 1e-6:
        return [0.0] * len(values)
    mean, std = statistics.fmean(values), statistics.stdev(values)
    return [(v - mean) / (std + 1e-6) for v in values]
