"""From rows of data to sequences to train on."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from roll_lite.chat import Chat, Transcript
from roll_lite.checks import UserError
from roll_lite.data import Dialogue, Preference
from roll_lite.models.config import read_config
from roll_lite.train.sequences import OPTIONAL, Pair, TrainingSequence


def encode_dialogues(chat: Chat, dialogues: Iterable[Dialogue]) -> list[TrainingSequence]:
    """Loss on the assistant's turns after a prompt; mostly one sequence for each dialogue."""
    named = [Transcript(row.id, row.messages, row.tools, row.num_read) for row in dialogues]
    return [
        TrainingSequence(id=dialogue.name, token_ids=token_ids, loss_mask=loss_mask)
        for dialogue, sequences in zip(named, chat.encode_dialogues(named), strict=True)
        for token_ids, loss_mask in sequences
    ]


def encode_preferences(
    chat: Chat,
    preferences: Iterable[Preference],
    *,
    tokens_per_microbatch: int,
    max_positions: int,
) -> list[Pair]:
    """Loss on the chosen and the rejected reply alone. Nothing is truncated: each must fit the
    model, and both together a micro-batch."""
    named = [
        (
            f"{row.id} {field}",
            (*row.messages, {"role": "assistant", "content": getattr(row, field)}),
        )
        for row in preferences
        for field in ("chosen", "rejected")
    ]
    sequences = [
        TrainingSequence(
            id=name,
            token_ids=read + said,
            loss_mask=[False] * len(read) + [True] * len(said),
        )
        for (name, _), (read, said) in zip(named, chat.encode_replies(named), strict=True)
    ]
    pairs = list(zip(sequences[::2], sequences[1::2], strict=True))
    _check_pairs_fit(pairs, tokens_per_microbatch, max_positions)
    return pairs


def _check_pairs_fit(pairs: Sequence[Pair], tokens_per_microbatch: int, max_positions: int) -> None:
    """Refuse a pair that no micro-batch or not the model holds, before anything is trained."""
    for chosen, rejected in pairs:
        for sequence in (chosen, rejected):
            if (length := len(sequence.token_ids)) > max_positions + 1:
                raise UserError(
                    f"{sequence.id} has {length} tokens, and the model's {max_positions} positions "
                    f"allow {max_positions + 1}; leave the pair out"
                )
        length = len(chosen.token_ids) + len(rejected.token_ids) - 2
        if length > tokens_per_microbatch:
            raise UserError(
                f"{chosen.id} and {rejected.id} have {length} tokens together, over "
                f"tokens_per_microbatch={tokens_per_microbatch}; raise it, or leave the pair out"
            )


def fit(
    sequences: Sequence[TrainingSequence],
    *,
    tokens_per_microbatch: int,
    max_positions: int,
    too_long: str | None = None,
) -> tuple[list[TrainingSequence], int]:
    """Sequences that fit the micro-batch and the model, and how many were truncated for it, which
    is done if `too_long` is truncate; None is the error of a recipe without such an option."""
    limit = min(tokens_per_microbatch, max_positions)
    if too_long == "truncate":
        return truncate(sequences, limit)
    for sequence in sequences:
        if len(sequence.token_ids) > limit + 1:  # the last token is only a target
            raise UserError(
                f"{sequence.id} has {len(sequence.token_ids)} tokens, and "
                f"tokens_per_microbatch={tokens_per_microbatch} and the model's {max_positions} "
                f"positions allow {limit + 1}; leave it out"
                + (", or set too_long to truncate" if too_long else "")
            )
    return list(sequences), 0


def truncate(
    sequences: Sequence[TrainingSequence], tokens_per_microbatch: int
) -> tuple[list[TrainingSequence], int]:
    """Sequences truncated so that each fits in a micro-batch, and how many were truncated."""
    longest = tokens_per_microbatch + 1  # the last token is only a target
    per_token = ("token_ids", "loss_mask", *OPTIONAL)
    result = []
    num_cut = 0
    for sequence in sequences:
        if len(sequence.token_ids) > longest:
            values = {name: getattr(sequence, name) for name in per_token}
            cut = {name: v[:longest] for name, v in values.items() if v is not None}
            width = len(sequence.experts) // (len(sequence.token_ids) - 1)
            cut["experts"] = sequence.experts[: width * tokens_per_microbatch]
            sequence = replace(sequence, **cut)
            num_cut += 1
        result.append(sequence)
    return result, num_cut


def encode_fitting(
    chat: Chat,
    tokens_per_microbatch: int,
    folders: Iterable[str | Path],
    dialogues: Iterable[Dialogue],
) -> list[TrainingSequence]:
    """Dialogues that fit the models of all folders; one that is too long is refused."""
    return fit(
        encode_dialogues(chat, dialogues),
        tokens_per_microbatch=tokens_per_microbatch,
        max_positions=min(read_config(folder).max_positions for folder in folders),
    )[0]


def check_vocabulary(folder: str | Path, other: str | Path, name: str) -> None:
    """Refuse a second model, called `name`, whose tokenizer differs.

    Models of one family may have vocabularies padded to different sizes, which is fine.
    """
    for model in (folder, other):
        read_config(model)  # a clear error for a folder that is not a model
    if not Chat(folder).has_vocabulary_of(Chat(other)):
        raise UserError(
            f"{name}={str(other)!r} and {str(folder)!r} have different tokenizers; take a {name} "
            "of the same family"
        )
