"""Replies after another prompt than the one they were sampled from, for a model to score.

The first prompt of a sample is replaced; all tokens after it stay as they were sampled.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from roll_lite.checks import UserError
from roll_lite.train.sequences import TrainingSequence, plain_sequences, samples_of
from roll_lite.types import Group, Message, Prompt, Sample

if TYPE_CHECKING:
    from roll_lite.chat import Chat

Reprompt = Callable[[Prompt], tuple[Message, ...] | None]
"""Other messages in the place of a prompt's; None if this prompt has no others."""


def reprompted_sequences(
    groups: list[Group], chat: Chat, reprompt: Reprompt | None, longest: int
) -> list[TrainingSequence | None]:
    """`plain_sequences(groups)` after other prompts; None where there is no other prompt.

    `longest` is the largest number of tokens that the model reads at once; a sequence that would
    be longer is left out, with a warning.
    """
    if reprompt is None:
        raise UserError(
            "reprompt=None, but the advantage reads reprompted_logprobs_R; give it the function "
            "that makes the other prompts, as in @rl.AdvantageFacts(reprompt=with_demonstration)"
        )
    others = [chat.encode(other) if (other := reprompt(g.prompt)) else None for g in groups]
    other_of = [other for other, g in zip(others, groups, strict=True) for _ in g.samples]
    samples = samples_of(groups)
    found = []
    for sequence in plain_sequences(groups):
        other_ids = other_of[sequence.sample]
        found.append(other_ids and _after(other_ids, sequence, samples[sequence.sample]))
    too_long = [s for s in found if s and len(s.token_ids) - 1 > longest]
    if too_long:
        _warn_of_length(too_long, longest)
    return [s if s and len(s.token_ids) - 1 <= longest else None for s in found]


def at_sampled_places(numbers: list[float], sequence: TrainingSequence) -> list[float]:
    """Numbers of a reprompted sequence's tokens by the places of the tokens in the sequence that
    was sampled; 0 in the prompt."""
    length = len(sequence.token_ids)
    return ([0.0] * length + numbers)[-length:]  # both have the same tokens at their ends


def _after(other_ids: list[int], sequence: TrainingSequence, sample: Sample) -> TrainingSequence:
    prompt_ids = sample.turns[0].prompt_ids
    place = len(prompt_ids)
    if sequence.token_ids[:place] != prompt_ids:
        raise UserError(
            f"{sequence.id} has a sequence that does not begin with its first prompt, so no other "
            "prompt can stand there; leave out history"
        )
    return replace(
        sequence,
        token_ids=other_ids + sequence.token_ids[place:],
        loss_mask=[False] * len(other_ids) + sequence.loss_mask[place:],
    )


def _warn_of_length(sequences: list[TrainingSequence], longest: int) -> None:
    worst = max(sequences, key=lambda sequence: len(sequence.token_ids))
    warnings.warn(
        f"{len(sequences)} sequences of this step are not taught: {worst.id} has "
        f"{len(worst.token_ids) - 1} tokens after its other prompt, over the {longest} that "
        "tokens_per_microbatch and the model's positions allow; shorten what reprompt returns, "
        "lower max_tokens, or raise tokens_per_microbatch",
        stacklevel=3,
    )
