"""The generation engine: submit requests, call step() until they are done.

engine = Engine(load_model(folder))
turns = engine.generate([Request(prompt_ids=ids, params=SamplingParams(max_tokens=64))])
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from roll_lite.engine.arena import Memory, check_fit, move_to_arena, write
from roll_lite.engine.attention import PAGE_SIZE, choose_backend
from roll_lite.engine.pages import PagePool
from roll_lite.engine.request import Handle, OnTurn, Request, Sequence, check_request
from roll_lite.engine.runner import Flight, Runner, Sampled, pages_within
from roll_lite.engine.sampler import noise_key
from roll_lite.engine.scheduler import Chunk, Scheduler
from roll_lite.models.transformer import Transformer
from roll_lite.progress import ProgressBar
from roll_lite.types import Turn

MAX_PREFILL_TOKENS = {"cuda": 32768, "cpu": 1024}
Running = Literal["go_on", "finish", "abort"]
"""What happens to running samples when new weights come."""


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
        decode: Callable[[list[int]], str] | None = None,
    ):
        """The model's parameters move to memory of the engine.

        `kv_cache_gib` is taken at once; when it runs short the newest samples wait.

        `max_prefill_tokens` are computed in one go: 32,768 on CUDA, 1,024 on a CPU, whose caches
        hold no more. `burst` is the number of tokens that everyone decodes before the host looks
        at them: 16 under CUDA graphs, 1 where nothing is gained by more. `backend` is triton,
        flash_attn or torch. `launch_ahead` keeps the device busy while the host looks at the last
        burst; not on a CPU, which does both. `decode` turns ids into text, for requests with stop
        texts.
        """
        self.model = model.requires_grad_(False)
        self._weights = move_to_arena(model)
        self.policy_version = 0
        weight, config = model.embedding, model.config
        backend = choose_backend(backend, weight.device, weight.dtype, config.head_dim)
        page_size = page_size or PAGE_SIZE[backend]
        num_pages = pages_within(kv_cache_gib, model, page_size)
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
        )
        self.launch_ahead = weight.is_cuda if launch_ahead is None else launch_ahead
        self._needs_weights = False
        self._decode_text = decode
        self._flight: Flight | None = None
        self._rows_are_stale = False
        """Whether a sequence ended that the device goes on with."""
        self._ended: list[Sequence] = []
        """Not yet reported."""
        self._handles: dict[int, Handle] = {}
        self._next_id = 0

    def __str__(self) -> str:
        gib = self.runner.memory.bytes.numel() / 2**30
        ranks = f" on {self.model.shard.size} ranks" if self.model.shard else ""
        return (
            f"engine{ranks}: {self.runner.backend} attention, cache of {self.pool.num_pages:,} "
            f"pages of {self.pool.page_size} tokens ({gib:.2f} GiB), bursts of {self.burst}"
        )

    def submit(self, request: Request, on_turn: OnTurn | None = None) -> Handle:
        self._check(request)
        handle = Handle(self._next_id, [None] * request.num_samples, on_turn)
        self._next_id += 1
        handle.sequences = [
            Sequence(
                request_id=handle.id,
                index=index,
                params=request.params,
                noise_key=noise_key(request.seed, index),
                prompt_ids=list(request.prompt_ids),
            )
            for index in request.indices
        ]
        leader, *leader.followers = handle.sequences
        self._handles[handle.id] = handle
        self.scheduler.waiting.append(leader)
        return handle

    def abort(self, request_id: int) -> None:
        """End a request's unfinished samples with what they have; an unknown id is harmless."""
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
        """Take in what the device has finished, and give it more to do.

        Prompts come first: the more sequences decode together, the better. Callbacks come last of
        all, when everything is in order and the device is busy: they may submit, abort and load.
        """
        if not self.is_ready:
            raise RuntimeError("the engine has no weights since sleep(); call load_weights()")
        with self._working():
            if flight := self._decode_on():
                earlier, self._flight = self._flight, flight
                self._land(earlier)
                return
            if self._flight and self._flight.rows:
                self._land_last()
            if chunks := self.scheduler.schedule_prefill():
                earlier, self._flight = self._flight, self._prefill(chunks)
                self._land(earlier)  # another prefill, while the device works on this one
            else:
                self._land_last()
                if self.scheduler.running:
                    self._flight = self._decode()

    @contextmanager
    def _working(self) -> Iterator[None]:
        """Whatever fails inside, the pages are not trusted and nobody who ended is forgotten."""
        try:
            yield
        except BaseException:
            self._start_over()
            raise
        finally:
            self._report()

    def _start_over(self) -> None:
        """Everyone is computed again: nobody knows what the pages hold, or what the device does."""
        self._flight = None
        for sequence in [s for s in self.scheduler.running if s.finish_reason]:
            self._take_out(sequence)
        self.scheduler.preempt_all()
        self.pool.forget_all()

    def generate(self, requests: list[Request], progress: bool = False) -> list[list[Turn]]:
        """Answer all requests; the turns of each, in order."""
        num_samples = sum(len(request.indices) for request in requests)
        for request in requests:  # before any is submitted
            self._check(request)
        with ProgressBar(num_samples, "generate", enabled=progress) as bar:
            handles = [self.submit(r, lambda index, turn: bar.advance()) for r in requests]
            while not all(handle.is_done for handle in handles):
                self.step()
        return [handle.turns for handle in handles]

    @torch.no_grad()
    def load_weights(
        self,
        weights: Iterable[tuple[str, Tensor]],
        policy_version: int,
        running: Running = "go_on",
    ) -> None:
        """Copy weights in place, from a collection or as they come.

        Running samples go on under them, prefilled again; or finish first under the old ones; or
        are aborted. Requests that wait are answered under the new weights in any case.
        """
        if isinstance(weights, Collection):  # a stream is checked as it comes
            check_fit(self.model, {name: tensor.shape for name, tensor in weights})
        if not self._is_awake:
            raise RuntimeError("the engine sleeps; call wake() before load_weights()")
        if running not in ("go_on", "finish", "abort"):
            raise ValueError(f"running={running!r} is not known; use go_on, finish or abort")
        if running == "finish" and self._needs_weights:
            raise ValueError("running='finish' needs the weights that sleep() gave away; use go_on")
        with self._working():
            self._make_way(running)
            self._needs_weights = True  # until all of them are there
            write(self.model, weights)
            self.policy_version = policy_version
            self._needs_weights = False

    def sleep(self) -> None:
        """Give the memory of cache and weights back to the device; addresses stay reserved.

        Running samples wait, and are prefilled again after wake() and load_weights().
        """
        with self._working():
            self._make_way("go_on")
            self._needs_weights = True
            for memory in self._memories:
                if memory.is_held:
                    memory.give_back()

    def wake(self) -> None:
        """Take the memory again. The weights that were in it are gone: load_weights() is next."""
        for memory in self._memories:
            if not memory.is_held:
                memory.take_again()

    @property
    def is_ready(self) -> bool:
        """Whether it has the weights and the memory to step with."""
        return self._is_awake and not self._needs_weights

    @property
    def _memories(self) -> list[Memory]:
        return [*self._weights, self.runner.memory]

    @property
    def _is_awake(self) -> bool:
        return all(memory.is_held for memory in self._memories)

    def _make_way(self, running: Running) -> None:
        """Leave nothing in the cache or on the device."""
        if running == "finish":
            self._finish_running()
        self._land_last()
        if running == "abort":
            for sequence in self.scheduler.begun():
                for sample in (sequence, *sequence.followers):
                    self._abort(sample)
        self.scheduler.preempt_all()
        self.pool.forget_all()

    def _finish_running(self) -> None:
        self.scheduler.is_closed = True
        try:
            while self.scheduler.begun() or self._flight:
                self.step()
        finally:
            self.scheduler.is_closed = False

    def _decode(self) -> Flight:
        """A burst of everyone who runs."""
        self._rows_are_stale = False
        num_steps = self._num_steps(0)
        self.scheduler.make_room(num_steps)
        return self.runner.decode(self.scheduler.running, num_steps)

    def _decode_on(self) -> Flight | None:
        """Launch the next burst before the last one has landed, if it is of the same rows."""
        flight, running = self._flight, self.scheduler.running
        if not self.launch_ahead or not flight or not flight.rows or not running:
            return None
        num_rows = self.runner.num_rows
        if (
            self._rows_are_stale
            or self.scheduler.has_newcomers
            or num_rows(len(running)) != num_rows(len(flight.sequences))
        ):
            return None
        before = len(flight.token_ids_SN)
        num_steps = self._num_steps(before)
        if num_steps < 1 or not self.scheduler.make_room_for_all(before + num_steps):
            return None
        return self.runner.decode_on(num_steps, before)

    def _num_steps(self, num_under_way: int) -> int:
        longest = max(s.max_length - s.length for s in self.scheduler.running)
        return min(self.burst, longest - num_under_way)

    def _prefill(self, chunks: list[Chunk]) -> Flight:
        """Compute chunks; the first token of every sequence whose prompt is complete."""
        readers, copies = [], []
        for i, chunk in enumerate(chunks):
            if chunk.is_last:
                leader = chunk.sequence
                followers = list(leader.followers)
                copies += self.scheduler.fork(leader)
                readers += [(i, s) for s in (leader, *followers) if s.pages]
        return self.runner.prefill(chunks, readers, copies)

    def _land_last(self) -> None:
        flight, self._flight = self._flight, None
        self._land(flight)

    def _land(self, flight: Flight | None) -> None:
        """Wait for a flight, and hand out what it brought."""
        for sampled in self.runner.land(flight) if flight else ():
            if sampled.sequence.finish_reason is None:  # not aborted meanwhile
                self._extend(sampled)

    def _extend(self, sampled: Sampled) -> None:
        """Append what was sampled; a sequence that ends with it is taken out."""
        sequence, token_ids, logprobs = sampled.sequence, sampled.token_ids, sampled.logprobs
        if not sampled.is_finite:
            num_good = int(np.isfinite(logprobs).argmin())
            token_ids, logprobs = token_ids[:num_good], logprobs[:num_good]
        sequence.extend(token_ids, logprobs, self.policy_version)
        if sequence.params.stop:
            self._cut_at_stop(sequence, len(token_ids))
        if sequence.finish_reason:
            self._take_out(sequence)
        elif not sampled.is_finite:
            self._suspect(sequence)

    def _take_out(self, sequence: Sequence) -> None:
        self.scheduler.remove(sequence)
        self._ended.append(sequence)

    def _cut_at_stop(self, sequence: Sequence, num_new: int) -> None:
        """End a sequence with the token that completes one of its stop texts."""
        sampled = sequence.token_ids[len(sequence.prompt_ids) :]

        def is_stopped(num_tokens: int) -> bool:
            text = self._decode_text(sampled[:num_tokens])
            return any(stop in text for stop in sequence.params.stop)

        if is_stopped(len(sampled)):
            old = len(sampled) - num_new
            sequence.cut(next(n for n in range(old + 1, len(sampled) + 1) if is_stopped(n)))
            sequence.finish_reason = "stop"
            self._rows_are_stale = True

    def _suspect(self, sequence: Sequence) -> None:
        """Its logits are not finite: compute it once more, sharing nothing; then give it up.

        It may have got the trouble from pages that it shares with the one who has it.
        """
        self._rows_are_stale = True
        self.pool.forget(sequence.pages)
        if sequence.is_suspect:
            sequence.finish_reason = "error"
            self._take_out(sequence)
        else:
            sequence.is_suspect = True
            self.scheduler.preempt(sequence)

    def _report(self) -> None:
        """Give the turns of ended sequences to those who wait for them."""
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
                except BaseException as error:  # the others wait for theirs
                    errors.append(error)
        if errors:
            raise errors[0]

    def _check(self, request: Request) -> None:
        in_cache = self.pool.num_pages * self.pool.page_size
        check_request(request, self.model.config, in_cache)
        if request.params.stop and self._decode_text is None:
            raise ValueError(
                f"stop={request.params.stop!r} needs text; give the engine Engine(decode=...)"
            )
