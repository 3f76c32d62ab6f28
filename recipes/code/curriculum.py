"""Learnability (Foster et al. 2025, arXiv 2502.12272): the prompts that succeed half of the time.

A prompt that always succeeds or never does teaches nothing. Of some prompts that the data offers,
the one with the largest p (1 - p) is sampled, where p is the share of its samples that passed so
far; the others come again in a later pass. A prompt that was never sampled counts as p = 0.5, so
it is tried before any other.

python recipes/rlvr.py --code recipes/code/curriculum.py --candidates 8 --data mine.jsonl
"""

from typing import Annotated

from typing_extensions import Doc

import roll_lite as rl

Candidates = Annotated[
    int, Doc("Prompts that are drawn for each one that is sampled."), rl.AtLeast(1)
]


def learnability(prompt: rl.Prompt, history: rl.History) -> float:
    """p (1 - p), the variance of success."""
    p = history[prompt.id].rate if prompt.id in history else 0.5
    return p * (1 - p)


def prompts(source, history: rl.History, *, candidates: Candidates = 4) -> rl.Prompt:
    """The prompt to sample next; the first of several that are as good."""
    drawn = [next(source) for _ in range(candidates)]
    return max(drawn, key=lambda prompt: learnability(prompt, history))
