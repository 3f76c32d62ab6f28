"""Learnability (Foster et al. 2025, arXiv 2502.12272): the prompts that succeed half of the time.

A prompt that always succeeds or never does teaches nothing. Of some prompts that the data offers,
the one whose rewards varied most, p (1 - p), is sampled; the others come again in a later pass. A
prompt that was never sampled counts as p = 0.5, so it is tried before any other.

python recipes/rlvr.py --code recipes/code/curriculum.py --candidates 8 --data mine.jsonl
"""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from typing_extensions import Doc

import roll_lite as rl

Candidates = Annotated[int, Doc("Prompts that are drawn for each one that is sampled.")]


def learnability(prompt: rl.Prompt, history: Mapping[str, Any]) -> float:
    """p (1 - p), where p is the mean reward of the prompt's samples so far."""
    visits = history.get(prompt.id)
    p = visits.rate if visits and visits.num_samples else 0.5
    return p * (1 - p)


def prompts(
    source: Iterator[rl.Prompt], history: Mapping[str, Any], *, candidates: Candidates = 4
) -> rl.Prompt | None:
    """The prompt to sample next; None when there are no more."""
    drawn = [prompt for _ in range(candidates) if (prompt := next(source, None))]
    return max(drawn, key=lambda prompt: learnability(prompt, history), default=None)
