"""Rows of data as sequences to train on."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from roll_lite.chat import Chat
from roll_lite.data import Dialogue, Preference
from roll_lite.models.config import read_config
from roll_lite.train.packing import TrainingSequence, truncate
from roll_lite.train.preference import Pair, check_pairs_fit
from roll_lite.types import Message


def encode_dialogues(chat: Chat, dialogues: Iterable[Dialogue]) -> list[TrainingSequence]:
    """With loss on what the assistant says, in all of its turns."""
    return _encode(chat, [(dialogue.id, dialogue.messages) for dialogue in dialogues])


def encode_preferences(
    chat: Chat, preferences: Iterable[Preference], tokens_per_microbatch: int
) -> list[Pair]:
    """With loss on the chosen and the rejected reply only, which fit in one micro-batch."""
    replies = [
        (
            f"{row.id} {field}",
            (*row.messages, {"role": "assistant", "content": getattr(row, field)}),
        )
        for row in preferences
        for field in ("chosen", "rejected")
    ]
    sequences = [_last_turn(sequence) for sequence in _encode(chat, replies)]
    pairs = list(zip(sequences[::2], sequences[1::2], strict=True))
    check_pairs_fit(pairs, tokens_per_microbatch)
    return pairs


def _encode(chat: Chat, named: Sequence[tuple[str, Sequence[Message]]]) -> list[TrainingSequence]:
    encoded = chat.encode_dialogues([messages for _, messages in named])
    return [
        TrainingSequence(id=name, token_ids=token_ids, loss_mask=loss_mask)
        for (name, _), (token_ids, loss_mask) in zip(named, encoded, strict=True)
    ]


def _last_turn(sequence: TrainingSequence) -> TrainingSequence:
    """Without loss on earlier turns of the assistant, which belong to the prompt."""
    start = len(sequence.loss_mask)
    while start and sequence.loss_mask[start - 1]:
        start -= 1
    mask = [i >= start for i in range(len(sequence.loss_mask))]
    return replace(sequence, loss_mask=mask)


def fit(
    sequences: Sequence[TrainingSequence],
    *,
    tokens_per_microbatch: int,
    max_positions: int,
    too_long: str,
) -> tuple[list[TrainingSequence], int]:
    """Sequences that micro-batch and model can hold, and how many were cut for it."""
    limit = min(tokens_per_microbatch, max_positions)
    if too_long == "truncate":
        return truncate(sequences, limit)
    for sequence in sequences:
        if len(sequence.token_ids) > limit + 1:  # the last token is only a target
            raise ValueError(
                f"{sequence.id} has {len(sequence.token_ids)} tokens, and "
                f"tokens_per_microbatch={tokens_per_microbatch} and the model's {max_positions} "
                f"positions allow {limit + 1}; leave it out, or set too_long to truncate"
            )
    return list(sequences), 0


def encode_fitting(
    chat: Chat,
    tokens_per_microbatch: int,
    folders: Iterable[str | Path],
    dialogues: Iterable[Dialogue],
) -> list[TrainingSequence]:
    """Dialogues for the models of several folders; one that is too long is refused."""
    return fit(
        encode_dialogues(chat, dialogues),
        tokens_per_microbatch=tokens_per_microbatch,
        max_positions=min(read_config(folder).max_positions for folder in folders),
        too_long="error",
    )[0]


def check_vocabulary(folder: str | Path, other: str | Path, name: str) -> None:
    """Refuse a second model, called `name`, that means other tokens by the same ids.

    Models of one family may still have vocabularies of different sizes, filled up with entries that
    mean nothing.
    """
    for model in (folder, other):
        read_config(model)  # says what is wrong with a folder that is none
    if not Chat(folder).has_vocabulary_of(Chat(other)):
        raise ValueError(
            f"{name}={str(other)!r} and {str(folder)!r} have different tokenizers; take a {name} "
            "of the same family"
        )
