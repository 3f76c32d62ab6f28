"""Learning from pairs of replies, one preferred to the other: DPO and IPO.

In a micro-batch, sequences 2i and 2i + 1 are the chosen and the rejected reply.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from safetensors import SafetensorError, safe_open

from roll_lite.checks import UserError, above, check_choices, read_only_if
from roll_lite.train.losses import LossResult, required, sum_rows
from roll_lite.train.sequences import Pair, TrainingSequence

if TYPE_CHECKING:
    from torch import Tensor

    from roll_lite.train.batch import MicroBatch


@dataclass(frozen=True, kw_only=True)
class DPOLoss:
    """Preference loss, of the reward margin h between chosen and rejected reply.

    h is the log ratio of the chosen reply minus that of the rejected, summed over tokens.
    sigmoid: -(1 - s) log sigmoid(beta h) - s log sigmoid(-beta h), s the label smoothing.
    ipo: (h - 1 / (2 beta))^2, not divided by lengths, as in the paper.
    """

    kind: Literal["sigmoid", "ipo"] = "sigmoid"
    """sigmoid (DPO) or ipo (squared error)."""
    beta: float = 0.1
    """Scale of the log ratio to the reference."""
    label_smoothing: float = 0.0
    """Probability that a pair is labelled the wrong way round (sigmoid)."""

    def __post_init__(self):
        check_choices(self)
        read_only_if(self.kind == "sigmoid", "kind='sigmoid'", self, "label_smoothing")
        above(0, self, "beta")
        if not 0 <= self.label_smoothing < 0.5:
            raise UserError(
                f"label_smoothing={self.label_smoothing} must be at least 0 and below 0.5"
            )

    def __call__(self, logprobs_R: Tensor, entropy_R: Tensor, batch: MicroBatch) -> LossResult:
        """Every row has the loss of its pair."""
        _check_pairs(batch)
        delta_R = logprobs_R - required(batch, "reference_logprobs_R")
        delta_S = sum_rows(delta_R, batch.sequence_R, batch.num_sequences)
        chosen_P, rejected_P = delta_S.view(-1, 2).unbind(1)
        margin_P = chosen_P - rejected_P
        pair_R = batch.sequence_R // 2
        by_pair = {
            "reward/margin": self.beta * margin_P,
            "reward/accuracy": (1 + margin_P.sign()) / 2,  # at the start, all are ties
            "reward/chosen": self.beta * chosen_P,
            "reward/rejected": self.beta * rejected_P,
        }
        measurements = {name: value_P.detach()[pair_R] for name, value_P in by_pair.items()}
        measurements["loss/entropy"] = entropy_R.detach()
        return self._pair_loss(margin_P)[pair_R], measurements

    def _pair_loss(self, margin_P: Tensor) -> Tensor:
        from torch.nn.functional import logsigmoid  # not above: options are read without torch

        if self.kind == "ipo":
            return (margin_P - 1 / (2 * self.beta)).square()
        agree_P = logsigmoid(self.beta * margin_P)
        disagree_P = logsigmoid(-self.beta * margin_P)
        return -(1 - self.label_smoothing) * agree_P - self.label_smoothing * disagree_P


def _check_pairs(batch: MicroBatch) -> None:
    """A reply without rows would shift the weights of pairs against each other."""
    rows_S = batch.sequence_R.bincount(minlength=batch.num_sequences)
    if batch.num_sequences % 2 or not bool(rows_S.all()):
        raise UserError(
            f"a micro-batch of {batch.num_sequences} sequences with {rows_S.tolist()} tokens to "
            "learn from is not made of pairs; use pack_pairs(), and leave out empty replies"
        )


# ---- reference logprobs on disk


def with_reference(
    pairs: Sequence[Pair],
    compute: Callable[[list[TrainingSequence]], list[list[float]]],
    *,
    folder: str | Path,
    path: str | Path,
) -> list[Pair]:
    """Pairs with the reference logprobs of the model in `folder`.

    They are computed once and kept in the file `path`, for runs that resume. A file of other
    sequences or of another model is computed again.
    """
    sequences = [sequence for pair in pairs for sequence in pair]
    lengths = [len(sequence.token_ids) for sequence in sequences]
    key = _key(Path(folder).resolve(), sequences)
    scores = _cached(Path(path), key, lengths)
    if scores is None:
        scores = compute(sequences)
        _cache(Path(path), key, scores)
    scored = [
        replace(sequence, reference_logprobs=logprobs)
        for sequence, logprobs in zip(sequences, scores, strict=True)
    ]
    return list(zip(scored[::2], scored[1::2], strict=True))


def _cached(path: Path, key: str, lengths: list[int]) -> list[list[float]] | None:
    if not path.exists():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            if (file.metadata() or {}).get("key") == key:
                return [part.tolist() for part in file.get_tensor("logprobs").split(lengths)]
        print(f"{path} is for other data or another model: computing it again", flush=True)
    except SafetensorError as error:
        print(f"{path} is damaged ({error}): computing it again", flush=True)
    return None


def _cache(path: Path, key: str, scores: list[list[float]]) -> None:
    import torch
    from safetensors.torch import save_file

    flat_N = torch.tensor([score for row in scores for score in row])
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    save_file({"logprobs": flat_N}, partial, metadata={"key": key})
    partial.rename(path)


def _key(folder: Path, sequences: Sequence[TrainingSequence]) -> str:
    """Identifies the sequences by their tokens, and the model by the sizes and times of its files.

    Hashing the weights would take as long as loading them.
    """
    digest = hashlib.blake2b(digest_size=16)
    for file in sorted([folder / "config.json", *folder.glob("*.safetensors")]):
        stat = file.stat()
        digest.update(f"{file}/{stat.st_size}/{stat.st_mtime_ns}\n".encode())
    for sequence in sequences:
        digest.update(array("q", [len(sequence.token_ids), *sequence.token_ids]).tobytes())
        digest.update(bytes(sequence.loss_mask))
    return digest.hexdigest()
