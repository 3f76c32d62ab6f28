"""Runs the model for the engine: prefills prompts, and decodes in bursts.

A burst is a number of decoding steps with one read-back at its end. A step (embedding, layers,
head, sampling, stop and length tests) advances the rows on the device; on CUDA it is captured once
per batch size and replayed.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from roll_lite.engine.attention import BACKENDS, PrefillAttention, choose_backend
from roll_lite.engine.batch import SCRATCH_PAGE, Batch, Rows
from roll_lite.engine.sampler import sample, truncate
from roll_lite.engine.scheduler import Chunk
from roll_lite.engine.sequence import Sequence
from roll_lite.models.attention import PackedAttention
from roll_lite.models.logprobs import row_chunks
from roll_lite.models.transformer import Transformer

ROW_BUCKETS = (
    1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512, 576, 640, 704,
    768, 832, 896, 960, 1024,
)  # fmt: skip
LARGE_BUCKET = 128
LENGTH_BUCKET = 512
TRUNCATION = {"top_k": torch.int64, "top_p": torch.float32, "min_p": torch.float32}


Sampled = tuple[Sequence, list[int], list[float]]
"""A sequence, the tokens it sampled, and their logprobs."""


class Runner:
    def __init__(
        self,
        model: Transformer,
        *,
        num_pages: int,
        page_size: int,
        max_num_seqs: int,
        max_burst: int,
    ):
        self.model = model
        self.device = model.embedding.device
        self.page_size, self.max_num_seqs = page_size, max_num_seqs
        self.backend = choose_backend(self.device, model.embedding.dtype, model.config.head_dim)
        self.cache = torch.zeros(
            cache_shape(model, num_pages, page_size),
            dtype=model.embedding.dtype,
            device=self.device,
        )
        longest = min(model.config.max_positions, num_pages * page_size)
        self.batch = Batch(max_num_seqs, -(-longest // page_size), self.device)
        self._step_index = torch.zeros(1, dtype=torch.int64, device=self.device)
        shape = (max_burst, max_num_seqs)
        self._out_ids = torch.zeros(shape, dtype=torch.int64, device=self.device)
        self._out_logprobs = torch.zeros(shape, dtype=torch.float32, device=self.device)
        self._graphs: dict[tuple[int, int, bool], torch.cuda.CUDAGraph] = {}
        self._use_graphs = self.backend == "triton"

    @torch.inference_mode()
    def prefill(self, chunks: list[Chunk]) -> Tensor:
        """Compute chunks into the cache; the hidden state of each one's last token."""
        token_ids_T = self._tensor(
            [t for c in chunks for t in c.sequence.token_ids[c.start : c.end]]
        )
        positions_T = torch.cat([torch.arange(c.start, c.end) for c in chunks]).to(self.device)
        slots_T = torch.cat([self._slots(chunk) for chunk in chunks]).to(self.device)
        lengths = [chunk.end - chunk.start for chunk in chunks]
        ends = self._tensor(lengths).cumsum(0)
        width = max(self._num_pages(chunk) for chunk in chunks)
        page_table = [
            c.sequence.pages[: self._num_pages(c)] + [SCRATCH_PAGE] * (width - self._num_pages(c))
            for c in chunks
        ]
        attend = PrefillAttention(
            self.cache,
            slots_T,
            PackedAttention(F.pad(ends, (1, 0)).int(), max(lengths)),
            self._tensor(page_table, torch.int32),
            self._tensor([chunk.start for chunk in chunks]),
            has_context=any(chunk.start for chunk in chunks),
            backend=self.backend,
        )
        return self.model.hidden_states(token_ids_T, positions_T, attend)[ends - 1]

    def _num_pages(self, chunk: Chunk) -> int:
        return -(-chunk.end // self.page_size)

    def _slots(self, chunk: Chunk) -> Tensor:
        """Where the chunk's tokens lie, counted over all pages."""
        pages = torch.tensor(chunk.sequence.pages[: self._num_pages(chunk)])
        slots = (pages[:, None] * self.page_size + torch.arange(self.page_size)).flatten()
        return slots[chunk.start : chunk.end]

    @torch.inference_mode()
    def sample(self, hidden_RH: Tensor, sequences: list[Sequence]) -> tuple[list[int], list[float]]:
        """The next token of each sequence, from its row, and that token's logprob."""
        temperatures_R = self._tensor([s.params.temperature for s in sequences], torch.float32)
        is_greedy_R = temperatures_R == 0
        temperatures_R.masked_fill_(is_greedy_R, 1.0)  # what a greedy token's logprob is under
        keys_R2 = self._tensor([s.noise_key for s in sequences])
        positions_R = self._tensor([len(s.token_ids) for s in sequences])
        token_ids, logprobs = [], []
        for rows in row_chunks(len(sequences)):
            logits_CV = F.linear(hidden_RH[rows], self.model.head_weight)
            if any(s.params.is_truncated for s in sequences[rows]):
                options = (
                    self._tensor([getattr(s.params, name) for s in sequences[rows]], dtype)
                    for name, dtype in TRUNCATION.items()
                )
                logits_CV = truncate(logits_CV, temperatures_R[rows], *options)
            token_ids_C, logprobs_C = sample(
                logits_CV, temperatures_R[rows], is_greedy_R[rows], keys_R2[rows], positions_R[rows]
            )
            token_ids += token_ids_C.tolist()
            logprobs += logprobs_C.tolist()
        return token_ids, logprobs

    @torch.inference_mode()
    def decode(self, sequences: list[Sequence], num_steps: int) -> list[Sampled]:
        """A burst: what each sequence samples in up to so many steps, until it ends."""
        self.batch.place(sequences)
        num_rows, max_length = self._buckets(len(sequences), num_steps)
        is_truncated = any(sequence.params.is_truncated for sequence in sequences)
        run = self._step_runner(num_rows, max_length, is_truncated)
        before = self.batch.lengths(len(sequences))
        self.batch.upload(num_rows)
        self._step_index.zero_()
        for _ in range(num_steps):
            run()
        return self._read_back(before, num_steps)

    def _read_back(self, before: Tensor, num_steps: int) -> list[Sampled]:
        n = len(before)
        rows = self.batch.on_device.first(n)
        ids_BS = self._out_ids[:num_steps, :n].T.cpu()
        logprobs_BS = self._out_logprobs[:num_steps, :n].T.cpu()
        lengths = rows.lengths.cpu()
        self.batch.advanced(rows.token_ids.cpu(), lengths)
        counts = (lengths - before).tolist()
        return [
            (sequence, ids[:count], logprobs[:count])
            for sequence, ids, logprobs, count in zip(
                self.batch.sequences, ids_BS.tolist(), logprobs_BS.tolist(), counts, strict=True
            )
        ]

    def _buckets(self, num_sequences: int, num_steps: int) -> tuple[int, int]:
        """Rows and key slots to compute with: a few sizes where graphs are captured for them."""
        max_length = int(self.batch.lengths(num_sequences).max()) + num_steps - 1
        if not self._use_graphs:
            return num_sequences, max_length
        rounded = -(-num_sequences // LARGE_BUCKET) * LARGE_BUCKET
        num_rows = next((b for b in ROW_BUCKETS if b >= num_sequences), rounded)
        num_rows = min(num_rows, self.max_num_seqs)
        num_splits = -(-max_length // LENGTH_BUCKET)
        return num_rows, LENGTH_BUCKET * (1 << (num_splits - 1).bit_length())

    def _step_runner(self, num_rows: int, max_length: int, is_truncated: bool):
        """A callable that runs one step: the step itself, or its captured graph."""

        def step() -> None:
            self._step(self.batch.on_device.first(num_rows), max_length, is_truncated)

        if not self._use_graphs:
            return step
        key = (num_rows, max_length, is_truncated)
        if key not in self._graphs:
            self._graphs[key] = self._capture(step)
        return self._graphs[key].replay

    def _capture(self, step) -> torch.cuda.CUDAGraph:
        """Rows at rest stay at rest, so the runs before a capture change nothing that matters."""
        self.batch.rest()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._step_index.zero_()
            step()  # compiles kernels, sets up cuBLAS
        torch.cuda.current_stream().wait_stream(stream)
        self._step_index.zero_()
        graph = torch.cuda.CUDAGraph()
        pool = next(iter(self._graphs.values())).pool() if self._graphs else None
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            step()
        return graph

    def _step(self, rows: Rows, max_length: int, is_truncated: bool) -> None:
        """One token for every row that is not at rest."""
        is_active_B = rows.lengths < rows.limits
        positions_B = rows.lengths - 1
        page_B = rows.page_table.gather(1, (positions_B // self.page_size)[:, None])[:, 0]
        attend = BACKENDS[self.backend](
            self.cache,
            page_B * self.page_size + positions_B % self.page_size,
            rows.page_table,
            rows.lengths,
            max_length,
        )
        hidden_BH = self.model.hidden_states(rows.token_ids, positions_B, attend)
        logits_BV = F.linear(hidden_BH, self.model.head_weight)
        if is_truncated:
            logits_BV = truncate(logits_BV, rows.temperatures, rows.top_k, rows.top_p, rows.min_p)
        ids_B, logprobs_B = sample(
            logits_BV, rows.temperatures, rows.is_greedy, rows.keys, rows.lengths
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

    @torch.inference_mode()
    def copy_pages(self, copies: list[tuple[int, int]]) -> None:
        source, target = self._tensor(copies).unbind(1)
        self.cache[:, :, target] = self.cache[:, :, source]

    @torch.inference_mode()
    def clear_pages(self, pages: list[int]) -> None:
        """Zero these and the scratch page: 0 times nan would be nan wherever they are gathered."""
        self.cache[:, :, self._tensor([SCRATCH_PAGE, *pages])] = 0

    def _tensor(self, values: list, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.tensor(values, dtype=dtype).to(self.device, non_blocking=True)


def cache_shape(model: Transformer, num_pages: int, page_size: int) -> tuple[int, ...]:
    config = model.config
    return config.num_layers, 2, num_pages, page_size, config.num_kv_heads, config.head_dim
