"""The generation engine: submit requests, call step() until they are done.

engine = Engine(load_model(folder))
turns = engine.generate([Request(prompt_ids=ids, params=SamplingParams(max_tokens=64))])
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from roll_lite.engine.batch import MAX_STOP_IDS
from roll_lite.engine.pages import PagePool
from roll_lite.engine.runner import Runner, Sampled, cache_shape
from roll_lite.engine.sampler import noise_key
from roll_lite.engine.scheduler import Chunk, Scheduler
from roll_lite.engine.sequence import Request, Sequence
from roll_lite.models.transformer import Transformer
from roll_lite.progress import ProgressBar
from roll_lite.types import Turn

OnTurn = Callable[[int, Turn], None]
"""Called with a sample's index and its turn the moment the sample ends."""


@dataclass(slots=True, eq=False)
class Handle:
    """A submitted request. `turns[i]` is None until sample i has ended."""

    id: int
    turns: list[Turn | None]
    on_turn: OnTurn | None = None
    sequences: list[Sequence] = field(default_factory=list)

    @property
    def is_done(self) -> bool:
        return all(turn is not None for turn in self.turns)


class Engine:
    def __init__(
        self,
        model: Transformer,
        *,
        kv_cache_gib: float = 1.0,
        page_size: int = 16,
        max_num_seqs: int = 1024,
        max_prefill_tokens: int = 16384,
        burst: int | None = None,
    ):
        """`kv_cache_gib` is taken at once; when it runs short the newest samples wait.

        `burst` is the number of tokens that everyone decodes before the host looks at them: 16
        under CUDA graphs, 1 where nothing is gained by more.
        """
        self.model = model.requires_grad_(False)
        self.policy_version = 0
        num_pages = self._num_pages(kv_cache_gib, page_size)
        self.pool = PagePool(num_pages, page_size)
        self.burst = burst or (16 if model.embedding.is_cuda else 1)
        self.scheduler = Scheduler(
            self.pool,
            max_num_seqs=max_num_seqs,
            max_prefill_tokens=max_prefill_tokens,
            burst=self.burst,
        )
        self.runner = Runner(
            model,
            num_pages=num_pages + 1,
            page_size=page_size,
            max_num_seqs=max_num_seqs,
            max_burst=self.burst,
        )
        self._handles: dict[int, Handle] = {}
        self._next_id = 0

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
                token_ids=list(request.prompt_ids),
                num_prompt_tokens=len(request.prompt_ids),
            )
            for index in range(request.num_samples)
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
            sequence.finish_reason = "abort"
            self.scheduler.remove(sequence)
        self._report(unfinished)

    def abort_all(self) -> None:
        for request_id in list(self._handles):
            self.abort(request_id)

    @property
    def has_work(self) -> bool:
        return bool(self._handles)

    def step(self) -> None:
        """Prefill under the token budget, then decode a burst for everyone who runs.

        Callbacks come last of all, when everything is in order: they may submit, abort and load.
        """
        ended: list[Sequence] = []
        try:
            if chunks := self.scheduler.schedule_prefill():
                ended += self._extend(self._prefill(chunks))
            if self.scheduler.running:
                ended += self._extend(self._decode())
        except BaseException:  # nobody knows what the pages hold now
            self.scheduler.preempt_all()
            self.pool.forget_all()
            raise
        finally:
            self._report(ended)

    def generate(self, requests: list[Request], progress: bool = False) -> list[list[Turn]]:
        """Answer all requests; the turns of each, in order."""
        num_samples = sum(request.num_samples for request in requests)
        for request in requests:  # before any is submitted
            self._check(request)
        with ProgressBar(num_samples, "generate", enabled=progress) as bar:
            handles = [self.submit(r, lambda index, turn: bar.advance()) for r in requests]
            while not all(handle.is_done for handle in handles):
                self.step()
        return [handle.turns for handle in handles]

    @torch.no_grad()
    def load_weights(self, weights: Iterable[tuple[str, Tensor]], policy_version: int) -> None:
        """Copy weights in place. Running samples go on under them, prefilled again."""
        parameters, weights = dict(self.model.named_parameters()), dict(weights)
        wanted = {name: parameter.shape for name, parameter in parameters.items()}
        sent = {name: tensor.shape for name, tensor in weights.items()}
        if wanted != sent:
            differing = sorted(name for name, _ in wanted.items() ^ sent.items())
            raise ValueError(
                f"new weights do not fit the model: {', '.join(dict.fromkeys(differing))}"
            )
        for name, tensor in weights.items():
            parameters[name].copy_(tensor)
        self.policy_version = policy_version
        self.scheduler.preempt_all()
        self.pool.forget_all()

    def _decode(self) -> list[Sampled]:
        longest = max(s.max_length - len(s.token_ids) for s in self.scheduler.running)
        num_steps = min(self.burst, longest)
        return self.runner.decode(self.scheduler.make_room(num_steps), num_steps)

    def _prefill(self, chunks: list[Chunk]) -> list[Sampled]:
        """Compute chunks; the first token of every sequence whose prompt is complete."""
        hidden_SH = self.runner.prefill(chunks)
        rows, sequences, copies = [], [], []
        for row, chunk in enumerate(chunks):
            if not chunk.is_last:
                continue
            leader = chunk.sequence
            followers = list(leader.followers)
            copies += self.scheduler.fork(leader)
            members = [leader, *(f for f in followers if f.pages)]
            rows += [row] * len(members)
            sequences += members
        if not sequences:
            return []
        if copies:
            self.runner.copy_pages(copies)
        hidden_RH = hidden_SH[torch.tensor(rows, device=hidden_SH.device)]
        token_ids, logprobs = self.runner.sample(hidden_RH, sequences)
        return [
            (sequence, [token_id], [logprob])
            for sequence, token_id, logprob in zip(sequences, token_ids, logprobs, strict=True)
        ]

    def _extend(self, sampled: list[Sampled]) -> list[Sequence]:
        """Append what was sampled; the sequences that ended with it, already taken out."""
        ended = []
        for sequence, token_ids, logprobs in sampled:
            is_broken = not math.isfinite(sum(logprobs))
            if is_broken:  # this sample ends with what was good; others go on
                num_good = [math.isfinite(logprob) for logprob in logprobs].index(False)
                token_ids, logprobs = token_ids[:num_good], logprobs[:num_good]
            sequence.extend(token_ids, logprobs, self.policy_version)
            if is_broken:
                self._discard(sequence)
            elif sequence.finish_reason:
                self.scheduler.remove(sequence)
            if sequence.finish_reason:
                ended.append(sequence)
        return ended

    def _discard(self, sequence: Sequence) -> None:
        """End a sequence whose logits are not finite, and leave nothing of it in the cache."""
        sequence.finish_reason = "error"
        sequence.num_computed = 0
        pages = list(sequence.pages)
        self.pool.forget(pages)
        self.scheduler.remove(sequence)
        self.runner.clear_pages([page for page in pages if self.pool.is_free(page)])

    def _report(self, ended: list[Sequence]) -> None:
        """Give the turns of ended sequences to those who wait for them."""
        handles = [self._handles[sequence.request_id] for sequence in ended]
        for handle, sequence in zip(handles, ended, strict=True):
            handle.turns[sequence.index] = sequence.turn()
            if handle.is_done:
                del self._handles[handle.id]
        for handle, sequence in zip(handles, ended, strict=True):
            if handle.on_turn:
                handle.on_turn(sequence.index, handle.turns[sequence.index])

    def _check(self, request: Request) -> None:
        config, ids = self.model.config, request.prompt_ids
        if not ids:
            raise ValueError("prompt_ids is empty; a request needs at least one token")
        if not 0 <= min(ids) <= max(ids) < config.vocab_size:
            raise ValueError(
                f"prompt_ids holds {min(ids)}..{max(ids)}; the vocabulary has ids "
                f"0..{config.vocab_size - 1}"
            )
        if len(request.params.stop_ids) > MAX_STOP_IDS:
            raise ValueError(
                f"stop_ids has {len(request.params.stop_ids)} ids; at most {MAX_STOP_IDS} are held"
            )
        if request.num_samples < 1:
            raise ValueError(f"num_samples={request.num_samples} must be at least 1")
        longest = len(ids) + request.params.max_tokens
        in_cache = self.pool.num_pages * self.pool.page_size
        if longest > min(config.max_positions, in_cache):
            raise ValueError(
                f"{len(ids)} prompt tokens + max_tokens={request.params.max_tokens} exceed the "
                f"model's {config.max_positions} positions or the cache's {in_cache} tokens; "
                "shorten the request or raise kv_cache_gib"
            )

    def _num_pages(self, kv_cache_gib: float, page_size: int) -> int:
        shape = cache_shape(self.model, 1, page_size)
        page_bytes = torch.Size(shape).numel() * self.model.embedding.element_size()
        num_pages = int(kv_cache_gib * 2**30) // page_bytes
        if num_pages < 1:
            raise ValueError(
                f"kv_cache_gib={kv_cache_gib} holds no page of {page_bytes} bytes; raise it"
            )
        return num_pages
