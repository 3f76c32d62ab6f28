"""Reference logprobs on disk, so that a run that resumes does not compute them again."""

import hashlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from roll_lite.train.packing import TrainingSequence
from roll_lite.train.preference import Pair


def with_reference(
    pairs: Sequence[Pair],
    compute: Callable[[list[TrainingSequence]], list[list[float]]],
    *,
    folder: str | Path,
    path: str | Path,
) -> list[Pair]:
    """Pairs with logprobs of the model in `folder`: from `path`, or else computed and kept there.

    What the file holds of other sequences, or of another model, is computed again.
    """
    sequences = [sequence for pair in pairs for sequence in pair]
    lengths = [len(sequence.token_ids) for sequence in sequences]
    key = _key(Path(folder).resolve(), sequences)
    scores = _remembered(Path(path), key, lengths)
    if scores is None:
        scores = compute(sequences)
        _remember(Path(path), key, scores)
    scored = [
        replace(sequence, reference_logprobs=logprobs)
        for sequence, logprobs in zip(sequences, scores, strict=True)
    ]
    return list(zip(scored[::2], scored[1::2], strict=True))


def _remembered(path: Path, key: str, lengths: list[int]) -> list[list[float]] | None:
    if not path.exists():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            if (file.metadata() or {}).get("key") == key:
                return [part.tolist() for part in file.get_tensor("logprobs").split(lengths)]
        print(f"{path} is of other data or of another model: computing it again", flush=True)
    except SafetensorError as error:
        print(f"{path} is damaged ({error}): computing it again", flush=True)
    return None


def _remember(path: Path, key: str, scores: list[list[float]]) -> None:
    flat_N = torch.tensor([score for row in scores for score in row])
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    save_file({"logprobs": flat_N}, partial, metadata={"key": key})
    partial.rename(path)


def _key(folder: Path, sequences: Sequence[TrainingSequence]) -> str:
    """Names the sequences by their tokens, and the model by its folder and the state of its files.

    Reading the weights to name them would take as long as loading them.
    """
    digest = hashlib.blake2b(digest_size=16)
    for file in sorted([folder / "config.json", *folder.glob("*.safetensors")]):
        stat = file.stat()
        digest.update(f"{file}/{stat.st_size}/{stat.st_mtime_ns}\n".encode())
    for sequence in sequences:
        digest.update(array("q", [len(sequence.token_ids), *sequence.token_ids]).tobytes())
        digest.update(bytes(sequence.loss_mask))
    return digest.hexdigest()
