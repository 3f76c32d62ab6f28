"""The generation engine: submit requests, call step() until they are done.

engine = Engine(load_model(folder))
turns = engine.generate([Request(prompt_ids=ids, params=SamplingParams(max_tokens=64))])
"""

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from roll_lite.checks import UserError
from roll_lite.engine.arena import Arena, check_fit, move_to_arena, pages_within, write
from roll_lite.engine.attention_backends import PAGE_SIZE, choose_backend
from roll_lite.engine.expert_record import ExpertRecord
from roll_lite.engine.pages import PagePool
from roll_lite.engine.request import (
    Decode,
    Handle,
    OnTurn,
    Request,
    Sequence,
    check_request,
    find_stop,
)
from roll_lite.engine.runner import InFlightBatch, Runner
from roll_lite.engine.sampler import noise_key
from roll_lite.engine.scheduler import Chunk, Scheduler
from roll_lite.models.lora import is_of_adapter
from roll_lite.models.transformer import Transformer
from roll_lite.progress import ProgressBar
from roll_lite.types import Turn

MAX_PREFILL_TOKENS = {"cuda": 32768, "cpu": 1024}
OnNewWeights = Literal["go_on", "finish", "abort"]
"""What running samples do when weights update: continue, finish first, or end."""


class Engine:
    def __init__(
        self,
        model: Transformer,
        *,
        kv_cache_gib: float = 1.0,
        page_size: int | None = None,
        max_num_seqs: int = 1024,
        max_prefill_tokens: int | None = None,
        burst: int | None = None,
        backend: str = "auto",
        launch_ahead: bool | None = None,
        decode: Decode | None = None,
        records_experts: bool = False,
    ):
        """The model's parameters move to arenas, unless they are in some. With adapters new weights
        are those of the adapters alone, and all stay when the engine sleeps.

        - `kv_cache_gib` is allocated at once; when it runs short the newest samples wait.
        - `max_prefill_tokens` per step: 32,768 on CUDA, 1,024 on a CPU, to fit its caches.
        - `burst`: tokens that are decoded before the host reads them; 16 on CUDA, 1 on a CPU.
        - `backend`: auto, triton, flash_attn or torch.
        - `launch_ahead`: launch the next burst before the host has read the last one; CUDA only.
        - `decode` turns token ids into text, for requests with stop texts.
        - `records_experts` of a mixture: turns say which experts each token had.
        """
        self.model = model.requires_grad_(False)
        self.weight_arenas = move_to_arena(model)
        parameters = dict(model.named_parameters())
        adapters = {name: p for name, p in parameters.items() if is_of_adapter(name)}
        self.takes_adapters = bool(adapters)
        self._parameters = adapters or parameters
        self.policy_version = 0
        weight = model.embedding
        backend = choose_backend(backend, weight.device, weight.dtype, model.config.head_dim)
        page_size = page_size or PAGE_SIZE[backend]
        rows = ExpertRecord.shape(model.config, 1, page_size) if records_experts else (0,)
        num_pages = pages_within(kv_cache_gib, model, page_size, torch.Size(rows).numel())
        self.pool = PagePool(num_pages, page_size)
        self.burst = burst or (16 if weight.is_cuda else 1)
        self.scheduler = Scheduler(
            self.pool,
            max_num_seqs=max_num_seqs,
            max_prefill_tokens=max_prefill_tokens or MAX_PREFILL_TOKENS[weight.device.type],
            burst=self.burst,
        )
        self.runner = Runner(
            model,
            backend=backend,
            num_pages=num_pages + 1,
            page_size=page_size,
            max_num_seqs=max_num_seqs,
            max_burst=self.burst,
            records_experts=records_experts,
        )
        self.launch_ahead = weight.is_cuda if launch_ahead is None else launch_ahead
        self._needs_weights = False
        self._decode_text = decode
        self._in_flight: InFlightBatch | None = None
        self._rows_are_stale = False
        """Whether the batch has rows of sequences that no longer run."""
        self._ended: list[Sequence] = []
        """Sequences whose turns are not yet reported."""
        self._handles: dict[int, Handle] = {}
        self._next_id = 0

    def __str__(self) -> str:
        gib = self.runner.arena.bytes.numel() / 2**30
        ranks = f" on {self.model.shard.size} ranks" if self.model.shard else ""
        return (
            f"engine{ranks}: {self.runner.backend} attention, cache of {self.pool.num_pages:,} "
            f"pages of {self.pool.page_size} tokens ({gib:.2f} GiB), bursts of {self.burst}"
        )

    def submit(self, request: Request, on_turn: OnTurn | None = None) -> Handle:
        self._check(request)
        seed = request.noise_seed
        sequences = [
            Sequence(
                request_id=self._next_id,
                index=index,
                params=request.params,
                noise_key=noise_key(seed, index),
                prompt_ids=list(request.prompt_ids),
            )
            for index in request.indices
        ]
        handle = Handle(self._next_id, sequences, [None] * request.num_samples, on_turn)
        self._handles[self._next_id] = handle
        self._next_id += 1
        leader, *leader.followers = sequences
        self.scheduler.waiting.append(leader)
        return handle

    def abort(self, request_id: int) -> None:
        """End a request's unfinished samples with the tokens they have; ignores unknown ids."""
        handle = self._handles.get(request_id)
        unfinished = [s for s in handle.sequences if s.finish_reason is None] if handle else []
        for sequence in unfinished:
            self._abort(sequence)
        self._report()

    def _abort(self, sequence: Sequence) -> None:
        sequence.finish_reason = "abort"
        self._rows_are_stale = True
        self._take_out(sequence)

    def abort_all(self) -> None:
        for request_id in list(self._handles):
            self.abort(request_id)

    @property
    def has_work(self) -> bool:
        return bool(self._handles)

    def step(self) -> None:
        """Collect what the device has finished, and launch more work.

        Prefill comes first: the more sequences decode together, the better. Callbacks come last,
        when the state is consistent and the device is busy: they may submit, abort and load.
        """
        if self._needs_weights:
            raise RuntimeError("the engine has no weights since sleep(); call load_weights()")
        if not self.is_ready:
            raise RuntimeError("the engine has no KV cache since sleep(); call wake()")
        with self._working():
            if launched := self._decode_ahead():
                self._collect(then=launched)
                return
            chunks = self.scheduler.schedule_prefill()
            if not chunks:
                self._collect()
                chunks = self.scheduler.schedule_prefill()  # there may be room now
            if chunks:
                self._collect(then=self._prefill(chunks))
            elif self.scheduler.running:
                self._in_flight = self._decode()

    @contextmanager
    def _working(self) -> Iterator[None]:
        """After an error no page is trusted; samples that ended are reported in any case."""
        try:
            yield
        except BaseException:
            self._start_over()
            raise
        finally:
            self._report()

    def _start_over(self) -> None:
        """Recompute all sequences: the content of the pages is unknown."""
        self._in_flight = None
        for sequence in [s for s in self.scheduler.running if s.finish_reason]:
            self._take_out(sequence)
        self.scheduler.start_over()

    def generate(self, requests: list[Request], progress: bool = False) -> list[list[Turn]]:
        """Run all requests to the end; returns the turns of each, in order."""
        num_samples = sum(len(request.indices) for request in requests)
        for request in requests:  # all, before any is submitted
            self._check(request)
        with ProgressBar(num_samples, "generate", "samples", enabled=progress) as bar:
            handles = [
                self.submit(r, lambda index, turn: bar.advance(1, len(turn.token_ids)))
                for r in requests
            ]
            while not all(handle.is_done for handle in handles):
                self.step()
        return [handle.turns for handle in handles]

    @torch.no_grad()
    def load_weights(
        self,
        weights: Iterable[tuple[str, Tensor]],
        policy_version: int,
        running: OnNewWeights = "go_on",
    ) -> None:
        """Copy weights in place, from a collection or a stream.

        Running samples continue under the new weights after another prefill (`go_on`), or first
        finish under the old ones, or are aborted. Waiting requests get the new weights.
        """
        if isinstance(weights, Collection):  # a stream is checked as it arrives
            shapes = {name: tensor.shape for name, tensor in weights}
            check_fit(self._parameters, shapes)
        if not all(arena.is_held for arena in self.weight_arenas):
            raise RuntimeError("the engine is asleep; call wake() before load_weights()")
        if running not in ("go_on", "finish", "abort"):
            raise UserError(f"running={running!r} is not known; use go_on, finish or abort")
        if running == "finish" and not self.is_ready:
            raise UserError("running='finish' needs the memory that sleep() released; use go_on")
        with self._working():
            self._clear(running)
            self._needs_weights = True  # until all have arrived
            write(self._parameters, weights)
            self.policy_version = policy_version
            self._needs_weights = False

    def sleep(self) -> None:
        """Release the memory of KV cache and weights; addresses stay reserved. With adapters the
        weights stay.

        Running samples wait, and are prefilled again after wake() and load_weights().
        """
        with self._working():
            self._clear("go_on")
            self._needs_weights = not self.takes_adapters
            for arena in self._arenas:
                arena.release()

    def wake(self, part: Literal["all", "weights"] = "all") -> None:
        """Restore the memory that sleep() released. Weights in it are lost: call load_weights().

        With part="weights" the KV cache sleeps on, so that a trainer may keep its memory until its
        weights are loaded.
        """
        for arena in self._arenas if part == "all" else self.weight_arenas:
            arena.restore()

    @property
    def is_ready(self) -> bool:
        """Whether the engine has weights and memory, so that it can step."""
        return all(arena.is_held for arena in self._arenas) and not self._needs_weights

    @property
    def _arenas(self) -> list[Arena]:
        """What sleeps."""
        return [*([] if self.takes_adapters else self.weight_arenas), self.runner.arena]

    def _clear(self, running: OnNewWeights) -> None:
        """Leave nothing in the KV cache or running on the device."""
        if running == "finish":
            self._finish_running()
        self._collect()
        if running == "abort":
            for sequence in self.scheduler.started():
                for sample in (sequence, *sequence.followers):
                    self._abort(sample)
        self.scheduler.start_over()

    def _finish_running(self) -> None:
        self.scheduler.is_closed = True
        try:
            while self.scheduler.started() or self._in_flight:
                self.step()
        finally:
            self.scheduler.is_closed = False

    def _decode(self) -> InFlightBatch:
        """Launch a burst of all running sequences."""
        self._rows_are_stale = False
        num_steps = self._num_steps(0)
        self.scheduler.reserve(num_steps)
        return self.runner.decode(self.scheduler.running, num_steps)

    def _decode_ahead(self) -> InFlightBatch | None:
        """Launch the next burst before the last is collected, unless a prefill is due or pages are
        short."""
        earlier = self._in_flight
        running = self.scheduler.running
        is_burst = earlier is not None and bool(earlier.rows)
        if not self.launch_ahead or not is_burst or not running or self.scheduler.may_prefill:
            return None
        before = len(earlier.token_ids_SN)
        num_steps = self._num_steps(before)
        if num_steps < 1 or not self.scheduler.reserve_without_preemption(before + num_steps):
            return None
        num_rows = self.runner.num_rows
        if self._rows_are_stale or num_rows(len(running)) != num_rows(len(earlier.sequences)):
            self.runner.keep_rows(running, earlier)
            self._rows_are_stale = False
        return self.runner.decode_ahead(num_steps, before)

    def _num_steps(self, num_in_flight: int) -> int:
        longest = max(s.max_length - s.length for s in self.scheduler.running)
        return min(self.burst, longest - num_in_flight)

    def _prefill(self, chunks: list[Chunk]) -> InFlightBatch:
        """Launch chunks; sequences whose prompt is then complete sample their first token."""
        readers: list[tuple[int, Sequence]] = []
        copies: list[tuple[int, int]] = []
        for i, chunk in enumerate(chunks):
            if chunk.is_last:
                forked, page_copies = self.scheduler.fork(chunk.sequence)
                readers += [(i, sequence) for sequence in (chunk.sequence, *forked)]
                copies += page_copies
        return self.runner.prefill(chunks, readers, copies)

    def _collect(self, then: InFlightBatch | None = None) -> None:
        """Wait for the batch in flight, and append its tokens to their sequences.

        `then` is in flight afterwards: the device already runs it.
        """
        launched, self._in_flight = self._in_flight, then
        for sequence, *sampled in self.runner.collect(launched) if launched else ():
            if sequence.finish_reason is None and sequence not in launched.discarded:
                self._extend(sequence, *sampled)
        self._read_experts()

    def _read_experts(self) -> None:
        """Those of the sequences that have just ended, before their pages get other content."""
        if ended := [sequence for sequence in self._ended if sequence.last_pages]:
            found = self.runner.record.read([(s.last_pages, s.length - 1) for s in ended])
            for sequence, rows in zip(ended, found, strict=True):
                sequence.experts = rows
                sequence.last_pages = []

    def _extend(
        self, sequence: Sequence, token_ids: np.ndarray, logprobs: np.ndarray, is_finite: bool
    ) -> None:
        """Append sampled tokens; a sequence that ends with them is taken out."""
        if not is_finite:
            num_good = int(np.isfinite(logprobs).argmin())
            token_ids = token_ids[:num_good]
            logprobs = logprobs[:num_good]
        sequence.extend(token_ids, logprobs, self.policy_version)
        if sequence.params.stop and len(token_ids):
            self._cut_at_stop(sequence, len(token_ids))
        if sequence.finish_reason:
            self._take_out(sequence)
        elif not is_finite:
            self._suspect(sequence)

    def _take_out(self, sequence: Sequence) -> None:
        if self.runner.record and sequence.finish_reason in ("stop", "length"):
            sequence.last_pages = list(sequence.pages)
        self.scheduler.remove(sequence)
        self._ended.append(sequence)

    def _cut_at_stop(self, sequence: Sequence, num_new: int) -> None:
        """End a sequence with the token that completes one of its stop texts."""
        num_sampled = find_stop(sequence, num_new, self._decode_text)
        if num_sampled is not None:
            sequence.truncate(num_sampled)
            sequence.finish_reason = "stop"
            self._rows_are_stale = True

    def _suspect(self, sequence: Sequence) -> None:
        """Handle logits that are not finite: recompute once without shared pages, then fail.

        The cause may be a page shared with another sequence.
        """
        self._rows_are_stale = True
        self.pool.forget(sequence.pages)
        if sequence.is_suspect:
            sequence.finish_reason = "error"
            self._take_out(sequence)
        else:
            sequence.is_suspect = True
            self.scheduler.preempt(sequence)
            if self._in_flight:
                self._in_flight.discarded.add(sequence)

    def _report(self) -> None:
        """Store the turns of ended sequences, and call their callbacks."""
        ended, self._ended = self._ended, []
        handles = [self._handles[sequence.request_id] for sequence in ended]
        for handle, sequence in zip(handles, ended, strict=True):
            handle.turns[sequence.index] = sequence.turn()
            if handle.is_done:
                del self._handles[handle.id]
        errors = []
        for handle, sequence in zip(handles, ended, strict=True):
            if handle.on_turn:
                try:
                    handle.on_turn(sequence.index, handle.turns[sequence.index])
                except BaseException as error:  # after all callbacks
                    errors.append(error)
        if errors:
            raise errors[0]

    def _check(self, request: Request) -> None:
        check_request(
            request,
            self.model.config,
            cache_tokens=self.pool.num_pages * self.pool.page_size,
            has_decoder=self._decode_text is not None,
        )
