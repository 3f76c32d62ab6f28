"""Random sequences and groups that the tests of training share."""

import torch

from roll_lite.train.packing import TrainingSequence
from roll_lite.types import Group, Prompt, Sample, Score, Turn


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
