"""Runs the model for the engine: prefills prompts and decodes in bursts.

A burst is a number of decode steps with one read-back at its end. A step (embedding, layers,
head, sampling, stop and length tests) advances the rows on the device; on CUDA it is captured once
per batch size and replayed. Launching does not wait for the device (capturing does); only `collect`
does.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from roll_lite.engine.arena import Arena, cache_shape
from roll_lite.engine.attention_backends import (
    BACKENDS,
    DecodeMetadata,
    Metadata,
    PrefillMetadata,
)
from roll_lite.engine.decode_batch import SCRATCH_PAGE, DecodeBatch, RowTensors
from roll_lite.engine.expert_record import ExpertRecord
from roll_lite.engine.request import Sequence
from roll_lite.engine.sampler import sample
from roll_lite.engine.scheduler import Chunk
from roll_lite.models.logprobs import row_chunks
from roll_lite.models.transformer import Transformer
from roll_lite.models.truncation import truncate

ROW_BUCKETS = (
    1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512, 576, 640, 704,
    768, 832, 896, 960, 1024,
)  # fmt: skip
LARGE_BUCKET = 128
LENGTH_BUCKET = 512
TRUNCATION = {"top_k": torch.int64, "top_p": torch.float32, "min_p": torch.float32}


@dataclass(slots=True)
class InFlightBatch:
    """A prefill or burst that was launched on the device, and where its results will be."""

    sequences: list[Sequence]
    token_ids_SN: Tensor
    logprobs_SN: Tensor
    rows: list[Tensor]
    """After a burst: the last token and the length of each row; empty after a prefill."""
    ready: torch.cuda.Event | None
    moved: tuple[list[int], np.ndarray] | None = None
    """If rows were taken out since its launch: those that were kept, and the lengths of all as of
    the last burst that was collected."""
    discarded: set[Sequence] = field(default_factory=set)
    """Sequences that were sent back since its launch: what it samples for them does not count."""


class Runner:
    def __init__(
        self,
        model: Transformer,
        *,
        backend: str,
        num_pages: int,
        page_size: int,
        max_num_seqs: int,
        max_burst: int,
        records_experts: bool,
    ):
        self.model = model
        self.backend = backend
        self.device = model.embedding.device
        self.page_size = page_size
        self.max_num_seqs = max_num_seqs
        shape = cache_shape(model, num_pages, page_size)
        dtype = model.embedding.dtype
        cache_bytes = torch.Size(shape).numel() * dtype.itemsize
        rows = ExpertRecord.shape(model.config, num_pages, page_size) if records_experts else (0,)
        self.arena = Arena(cache_bytes + torch.Size(rows).numel(), self.device)
        self.cache = self.arena.tensor(shape, dtype)
        self.record: ExpertRecord | None = None
        if records_experts:
            self.record = ExpertRecord(self.arena.tensor(rows, torch.uint8, cache_bytes))
        longest = min(model.config.max_positions, num_pages * page_size)
        self.batch = DecodeBatch(max_num_seqs, -(-longest // page_size), self.device)
        self._step_index = torch.zeros(1, dtype=torch.int64, device=self.device)
        self._out_ids = self._step_index.new_zeros(max_burst, max_num_seqs)
        self._out_logprobs = self._out_ids.float()
        num_counters = max_num_seqs, model.local_config.num_kv_heads
        self._finished_BK = torch.zeros(num_counters, dtype=torch.int32, device=self.device)
        self._graphs: dict[tuple[int, int, bool], torch.cuda.CUDAGraph] = {}
        self._capture_stream: torch.cuda.Stream | None = None  # one: each keeps memory of its own
        self._use_graphs = self.device.type == "cuda" and backend != "torch"

    @torch.inference_mode()
    def prefill(
        self,
        chunks: list[Chunk],
        readers: list[tuple[int, Sequence]],
        copies: list[tuple[int, int]],
    ) -> InFlightBatch:
        """Compute chunks into the KV cache, copy pages, sample the first token of each reader.

        A reader is a chunk's index and a sequence that continues from it.
        """
        hidden_CH = self._hidden(chunks)
        if copies:
            source, target = self._tensor(copies).unbind(1)
            self.cache[:, :, target] = self.cache[:, :, source]
            if self.record:
                self.record.copy(source, target)
        sequences = [sequence for _, sequence in readers]
        rows = self._tensor([chunk for chunk, _ in readers])
        ids, logprobs = self._sample(hidden_CH[rows], sequences)
        return self._launch(sequences, ids[None], logprobs[None])

    def _hidden(self, chunks: list[Chunk]) -> Tensor:
        """The hidden state of each chunk's last token."""
        token_ids = [t for c in chunks for t in c.sequence.token_ids[c.start : c.end]]
        starts = np.array([chunk.start for chunk in chunks])
        lengths = np.array([chunk.end for chunk in chunks]) - starts
        ends = lengths.cumsum()
        positions = np.arange(ends[-1]) + np.repeat(starts - (ends - lengths), lengths)
        max_length = int((starts + lengths).max())
        page_table = np.full((len(chunks), -(-max_length // self.page_size)), SCRATCH_PAGE)
        for row, chunk in zip(page_table, chunks, strict=True):
            pages = chunk.sequence.pages[: len(row)]
            row[: len(pages)] = pages
        page, slot = np.divmod(positions, self.page_size)
        slots = page_table[np.repeat(np.arange(len(chunks)), lengths), page]
        ends_C = self._tensor(ends)
        meta = PrefillMetadata(
            cache=self.cache,
            slots_T=self._tensor(slots * self.page_size + slot),
            page_table_BP=self._tensor(page_table, torch.int32),
            starts_B=self._tensor(starts),
            cu_seqlens=F.pad(ends_C, (1, 0)).int(),
            max_seqlen=int(lengths.max()),
            max_length=max_length,
        )
        hidden_TH = self._run_model(self._tensor(token_ids), self._tensor(positions), meta)
        return hidden_TH[ends_C - 1]

    def _run_model(self, token_ids_T: Tensor, positions_T: Tensor, meta: Metadata) -> Tensor:
        """Hidden states of tokens whose keys, values and experts go to the slots of `meta`."""
        attend = BACKENDS[self.backend][isinstance(meta, DecodeMetadata)](meta)
        if self.record is None:
            return self.model.hidden_states(token_ids_T, positions_T, attend)
        chosen: list[Tensor] = []

        def choose(number: int, ids_TK: Tensor) -> Tensor:
            chosen.append(ids_TK)
            return ids_TK

        hidden_TH = self.model.hidden_states(token_ids_T, positions_T, attend, choose)
        self.record.write(meta.slots_T, chosen)
        return hidden_TH

    def _sample(self, hidden_RH: Tensor, sequences: list[Sequence]) -> tuple[Tensor, Tensor]:
        """The next token of each sequence, sampled from its row, and its logprob."""
        temperatures = [s.params.temperature for s in sequences]
        temperatures_R = self._tensor([t or 1.0 for t in temperatures], torch.float32)
        is_greedy_R = self._tensor([t == 0 for t in temperatures], torch.bool)
        keys_R2 = self._tensor([s.noise_key for s in sequences]).view(-1, 2)
        positions_R = self._tensor([s.length for s in sequences])
        found = [(positions_R[:0], temperatures_R[:0])]
        for rows in row_chunks(len(sequences)):
            logits_CV = self.model.logits(hidden_RH[rows])
            if any(s.params.is_truncated for s in sequences[rows]):
                options = (
                    self._tensor([getattr(s.params, name) for s in sequences[rows]], dtype)
                    for name, dtype in TRUNCATION.items()
                )
                logits_CV = truncate(logits_CV, temperatures_R[rows], *options, self.model.shard)
            of_rows = (x[rows] for x in (temperatures_R, is_greedy_R, keys_R2, positions_R))
            found.append(sample(logits_CV, *of_rows, self.model.shard))
        ids, logprobs = zip(*found, strict=True)
        return torch.cat(ids), torch.cat(logprobs)

    @torch.inference_mode()
    def decode(self, sequences: list[Sequence], num_steps: int) -> InFlightBatch:
        """A burst: each sequence samples up to `num_steps` tokens, until it ends."""
        self.batch.place(sequences)
        num_rows = self.num_rows(len(sequences))
        run = self._step_runner(num_rows, int(self.batch.lengths().max()) + num_steps - 1)
        self.batch.upload(num_rows)
        return self._burst(run, num_steps)

    @torch.inference_mode()
    def keep_rows(self, sequences: list[Sequence], launched: InFlightBatch) -> None:
        """Take out the rows of sequences that are not given, while the device still runs the burst
        that was launched."""
        lengths = self.batch.lengths()
        rows = self.batch.rows_of(sequences)
        self.batch.move(rows, self._tensor(rows))
        launched.moved = rows, lengths

    @torch.inference_mode()
    def decode_ahead(self, num_steps: int, num_steps_before: int) -> InFlightBatch:
        """The next burst of the rows, launched while the device still runs the last one.

        Rows that end in the last burst are inactive in this one.
        """
        self.batch.add_pages()
        longest = int(self.batch.lengths().max()) + num_steps_before + num_steps - 1
        num_rows = self.num_rows(len(self.batch.sequences))
        run = self._step_runner(num_rows, longest)
        self.batch.upload(num_rows, ["page_table"])
        return self._burst(run, num_steps)

    def _burst(self, run: Callable[[], object], num_steps: int) -> InFlightBatch:
        self._step_index.zero_()
        for _ in range(num_steps):
            run()
        n = len(self.batch.sequences)
        rows = self.batch.on_device.first(n)
        return self._launch(
            list(self.batch.sequences),
            self._out_ids[:num_steps, :n],
            self._out_logprobs[:num_steps, :n],
            rows.token_ids,
            rows.lengths,
        )

    def _launch(self, sequences: list[Sequence], *results: Tensor) -> InFlightBatch:
        """Start copying results to the host: token ids, logprobs and what a burst says of rows."""
        ready = None
        if self.device.type == "cuda":
            results = [x.to("cpu", non_blocking=True) for x in results]
            ready = torch.cuda.Event()
            ready.record()
        else:
            results = [x.clone() for x in results]
        ids_SN, logprobs_SN, *rows = results
        return InFlightBatch(sequences, ids_SN, logprobs_SN, rows, ready)

    def collect(
        self, launched: InFlightBatch
    ) -> list[tuple[Sequence, np.ndarray, np.ndarray, bool]]:
        """Wait for a batch and return what it sampled: for each sequence the tokens and their
        logprobs, and whether these are all finite."""
        if launched.ready:
            launched.ready.synchronize()
        ids_NS = launched.token_ids_SN.numpy().T.copy()
        logprobs_NS = launched.logprobs_SN.numpy().T.copy()
        counts = np.ones(len(ids_NS), dtype=np.int64)
        if launched.rows:
            last_ids, lengths = (x.numpy() for x in launched.rows)
            rows, before = launched.moved or (slice(None), self.batch.lengths())
            counts = lengths - before
            self.batch.advanced(last_ids[rows], lengths[rows])
        is_sampled = np.arange(ids_NS.shape[1]) < counts[:, None]
        is_finite = (np.isfinite(logprobs_NS) | ~is_sampled).all(1).tolist()
        return [
            (sequence, ids[:count], logprobs[:count], finite)
            for sequence, ids, logprobs, count, finite in zip(
                launched.sequences, ids_NS, logprobs_NS, counts.tolist(), is_finite, strict=True
            )
        ]

    def num_rows(self, num_sequences: int) -> int:
        """Rows to compute with: rounded up to a bucket where CUDA graphs are used."""
        if not self._use_graphs:
            return num_sequences
        rounded = -(-num_sequences // LARGE_BUCKET) * LARGE_BUCKET
        num_rows = next((b for b in ROW_BUCKETS if b >= num_sequences), rounded)
        return min(num_rows, self.max_num_seqs)

    def _step_runner(self, num_rows: int, max_length: int) -> Callable[[], object]:
        """A callable that runs one decode step: the step itself, or its captured graph."""
        is_truncated = any(sequence.params.is_truncated for sequence in self.batch.sequences)
        if self._use_graphs:
            num_splits = -(-max_length // LENGTH_BUCKET)
            max_length = LENGTH_BUCKET * (1 << (num_splits - 1).bit_length())

        def step() -> None:
            self._step(self.batch.on_device.first(num_rows), max_length, is_truncated)

        # Truncation over ranks reads numbers on the host, which a graph cannot.
        if not self._use_graphs or (is_truncated and self.model.shard):
            return step
        key = (num_rows, max_length, is_truncated)
        if key not in self._graphs:
            num_bytes = num_rows * self._row_bytes(max_length, is_truncated)
            self._graphs[key] = self._capture(step, num_bytes)
        return self._graphs[key].replay

    def _row_bytes(self, max_length: int, is_truncated: bool) -> int:
        """More than a decode step allocates for a row."""
        config = self.model.local_config
        logits = config.vocab_size * (40 if is_truncated else 8)  # truncation sorts them
        splits = config.num_heads * config.head_dim * (max_length // LENGTH_BUCKET) * 4
        return logits + splits + 2**16

    def _capture(self, step: Callable[[], None], num_bytes: int) -> torch.cuda.CUDAGraph:
        """Capture with all rows inactive, so that the warm-up run changes nothing.

        Memory that torch has cached, training's too, goes back to the driver only if the capture
        may need it; `torch.cuda.graph` would always give it back.
        """
        held = self.batch.deactivate()
        stream = self._capture_stream = self._capture_stream or torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        try:
            with torch.cuda.stream(stream):
                self._step_index.zero_()
                step()  # compiles kernels, initialises cuBLAS
            torch.cuda.current_stream(self.device).wait_stream(stream)
            self._step_index.zero_()
            if torch.cuda.mem_get_info(self.device)[0] < num_bytes:
                torch.cuda.empty_cache()  # during a capture none is freed
            graph = torch.cuda.CUDAGraph()
            pool = next(iter(self._graphs.values())).pool() if self._graphs else None
            with torch.cuda.stream(stream):
                graph.capture_begin(pool, capture_error_mode="thread_local")
                try:
                    step()
                finally:
                    graph.capture_end()
        finally:
            self.batch.restore(held)
        return graph

    def _step(self, rows: RowTensors, max_length: int, is_truncated: bool) -> None:
        """One token for every active row."""
        is_active_B = rows.lengths < rows.limits
        positions_B = rows.lengths - 1
        page_B = rows.page_table.gather(1, (positions_B // self.page_size)[:, None])[:, 0]
        page_B = torch.where(is_active_B, page_B, SCRATCH_PAGE)  # its page may be reassigned
        meta = DecodeMetadata(
            cache=self.cache,
            slots_T=page_B * self.page_size + positions_B % self.page_size,
            page_table_BP=rows.page_table,
            lengths_B=torch.where(is_active_B, rows.lengths, 1),  # inactive: one key
            max_length=max_length,
            finished_BK=self._finished_BK,
        )
        hidden_BH = self._run_model(rows.token_ids, positions_B, meta)
        logits_BV = self.model.logits(hidden_BH)
        shard = self.model.shard
        if is_truncated:
            options = (rows.temperatures, rows.top_k, rows.top_p, rows.min_p)
            logits_BV = truncate(logits_BV, *options, shard)
        ids_B, logprobs_B = sample(
            logits_BV, rows.temperatures, rows.is_greedy, rows.keys, rows.lengths, shard
        )
        num_rows = len(ids_B)
        self._out_ids[:, :num_rows].index_copy_(0, self._step_index, ids_B[None])
        self._out_logprobs[:, :num_rows].index_copy_(0, self._step_index, logprobs_B[None])
        self._step_index += 1

        ids_B = torch.where(is_active_B, ids_B, rows.token_ids)
        rows.token_ids.copy_(ids_B)
        rows.lengths.add_(is_active_B)
        is_stop_B = (ids_B[:, None] == rows.stop_ids).any(1) & is_active_B
        rows.limits.copy_(torch.where(is_stop_B, rows.lengths, rows.limits))

    def _tensor(self, values, dtype: torch.dtype = torch.int64) -> Tensor:
        """On the device; copied from pinned memory, so that the host does not wait."""
        tensor = torch.as_tensor(values).to(dtype)
        if self.device.type == "cuda":
            tensor = tensor.pin_memory()
        return tensor.to(self.device, non_blocking=True)
