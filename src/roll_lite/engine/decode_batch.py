"""The decode batch: one row per running sequence, in tensors that never move, for CUDA graphs.

The host edits rows between bursts; the device advances them within a burst.
"""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from roll_lite.engine.request import MAX_STOP_IDS, Sequence

SCRATCH_PAGE = 0
"""Where inactive rows write."""


class RowTensors(NamedTuple):
    """Tensors with one row per sequence."""

    token_ids: Tensor
    """The last token, whose key and value are not in the KV cache yet."""
    lengths: Tensor
    """Tokens so far, including the prompt."""
    limits: Tensor
    """The length at which the sequence ends; a row with lengths == limits is inactive."""
    temperatures: Tensor
    is_greedy: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    keys: Tensor
    """Noise keys, (rows, 2)."""
    stop_ids: Tensor
    """(rows, MAX_STOP_IDS), padded with -1."""
    page_table: Tensor
    """(rows, pages), padded with the scratch page."""

    @staticmethod
    def empty(num_rows: int, num_pages: int, **options) -> "RowTensors":
        def full(*shape: int, fill: float = 0, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.full((num_rows, *shape), fill, dtype=dtype, **options)

        return RowTensors(
            token_ids=full(),
            lengths=full(fill=1),
            limits=full(fill=1),
            temperatures=full(fill=1.0, dtype=torch.float32),
            is_greedy=full(dtype=torch.bool),
            top_k=full(),
            top_p=full(fill=1.0, dtype=torch.float32),
            min_p=full(dtype=torch.float32),
            keys=full(2),
            stop_ids=full(MAX_STOP_IDS, fill=-1),
            page_table=full(num_pages, fill=SCRATCH_PAGE, dtype=torch.int32),
        )

    def first(self, num_rows: int) -> "RowTensors":
        return RowTensors(*(rows[:num_rows] for rows in self))

    def as_arrays(self) -> "RowTensors":
        """The same memory as numpy arrays, which the host reads and writes faster."""
        return RowTensors(*(rows.numpy() for rows in self))


class DecodeBatch:
    def __init__(self, max_num_seqs: int, max_pages: int, device: torch.device):
        pinned = {"pin_memory": True} if device.type == "cuda" else {}
        self._host = RowTensors.empty(max_num_seqs, max_pages, **pinned)
        self._edit = self._host.as_arrays()
        self.on_device = RowTensors.empty(max_num_seqs, max_pages, device=device)
        self._blank = RowTensors.empty(1, max_pages, device="cpu").as_arrays()
        self._blank_on_device = RowTensors.empty(1, max_pages, device=device)
        self.sequences: list[Sequence] = []
        """By row."""
        self._placed: list[tuple[list[int], int]] = []
        """By row: the page list that the row was filled from, and how many of its pages."""
        self._uploaded = torch.cuda.Event() if pinned else None
        """Reached when the device has read the host's rows."""

    def place(self, sequences: list[Sequence]) -> None:
        """Give each of these sequences a row, and free all other rows."""
        self._keep(self.rows_of(sequences))
        known = {sequence: row for row, sequence in enumerate(self.sequences)}
        for sequence in sequences:
            row = known.get(sequence)
            if row is None:
                row = len(self.sequences)
                self.sequences.append(sequence)
                self._placed.append(([], 0))
            self._refresh(row, sequence)

    def rows_of(self, sequences: list[Sequence]) -> list[int]:
        wanted = set(sequences)
        return [row for row, held in enumerate(self.sequences) if held in wanted]

    def move(self, rows: list[int], rows_on_device: Tensor) -> None:
        """Keep these rows, moved to the front in their order; the device may be advancing them."""
        if self._uploaded:
            self._uploaded.synchronize()
        num_kept = len(rows)
        num_held = len(self.sequences)
        self._keep(rows)
        for values, blank in zip(self.on_device, self._blank_on_device, strict=True):
            values[:num_kept] = values[rows_on_device]
            values[num_kept:num_held] = blank

    def add_pages(self) -> None:
        """Add pages that were reserved since, while the device still advances the rows."""
        for row, sequence in enumerate(self.sequences):
            if sequence.finish_reason is None:
                self._refresh(row, sequence)

    def lengths(self) -> np.ndarray:
        """By row, as of the last burst that was collected."""
        return self._edit.lengths[: len(self.sequences)].copy()

    def deactivate(self) -> RowTensors:
        """Make all rows on the device inactive, on the scratch page; returns a copy to restore."""
        held = RowTensors(*(values.clone() for values in self.on_device))
        self.restore(self._blank_on_device)
        return held

    def restore(self, rows: RowTensors) -> None:
        for values, restored in zip(self.on_device, rows, strict=True):
            values.copy_(restored)

    def upload(self, num_rows: int, names: Iterable[str] = RowTensors._fields) -> None:
        """Copy the host's rows to the device. While it advances them, copy only `page_table`."""
        for name in names:
            source = getattr(self._host, name)[:num_rows]
            getattr(self.on_device, name)[:num_rows].copy_(source, non_blocking=True)
        if self._uploaded:
            self._uploaded.record()

    def advanced(self, token_ids: np.ndarray, lengths: np.ndarray) -> None:
        """Record on the host how far the device has advanced the rows."""
        self._edit.token_ids[: len(token_ids)] = token_ids
        self._edit.lengths[: len(lengths)] = lengths

    def _refresh(self, row: int, sequence: Sequence) -> None:
        pages = sequence.pages
        edit = self._edit
        placed, count = self._placed[row]
        if placed is not pages:  # a new sequence, or one that was prefilled again
            params = sequence.params
            edit.token_ids[row] = sequence.token_ids[-1]
            edit.lengths[row] = sequence.length
            edit.limits[row] = sequence.max_length
            edit.temperatures[row] = params.temperature or 1.0
            edit.is_greedy[row] = params.temperature == 0
            edit.top_k[row] = params.top_k
            edit.top_p[row] = params.top_p
            edit.min_p[row] = params.min_p
            edit.keys[row] = sequence.noise_key
            edit.stop_ids[row] = -1
            edit.stop_ids[row, : len(params.stop_ids)] = params.stop_ids
            edit.page_table[row] = SCRATCH_PAGE  # no page of an earlier sequence remains
            count = 0
        if count != len(pages):
            edit.page_table[row, count : len(pages)] = pages[count:]
            self._placed[row] = (pages, len(pages))

    def _keep(self, rows: list[int]) -> None:
        """Keep these rows, moved to the front in their order; blank the rest."""
        count = len(self.sequences)
        if len(rows) == count:
            return
        for values, blank in zip(self._edit, self._blank, strict=True):
            values[: len(rows)] = values[rows]
            values[len(rows) : count] = blank
        self.sequences = [self.sequences[row] for row in rows]
        self._placed = [self._placed[row] for row in rows]
