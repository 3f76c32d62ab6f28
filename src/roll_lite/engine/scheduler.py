"""Decides, step by step, which sequences are prefilled, decode or are preempted.

The scheduler never reads a clock. The oldest sequence always makes progress: it alone fits the pool
(checked at submit), and only younger sequences are preempted in its favour.
"""

from collections import deque
from contextlib import suppress
from typing import NamedTuple

from roll_lite.engine.pages import PagePool
from roll_lite.engine.request import Sequence


class Chunk(NamedTuple):
    """Tokens start..end of a sequence, to be computed in this step."""

    sequence: Sequence
    start: int
    end: int

    @property
    def is_last(self) -> bool:
        return self.end == self.sequence.length


class Scheduler:
    def __init__(self, pool: PagePool, *, max_num_seqs: int, max_prefill_tokens: int, burst: int):
        self.pool = pool
        self._pages_per_burst = pool.pages_for(burst)
        self.max_num_seqs = max_num_seqs
        self.max_prefill_tokens = max_prefill_tokens
        self.waiting: deque[Sequence] = deque()
        self.prefilling: list[Sequence] = []
        """Have pages for all of their tokens, and some of the tokens computed."""
        self.is_closed = False
        """While True no new sequence is admitted, so that those that have started can finish."""
        self.running: list[Sequence] = []
        """Oldest first."""
        self._refused_with: int | None = None
        """Number of free pages when the next waiting sequence was last refused."""
        self.num_preempted = 0
        self.num_reused_tokens = 0

    def schedule_prefill(self) -> list[Chunk]:
        """What to compute under the token budget: partly computed sequences, then waiting ones."""
        chunks: list[Chunk] = []
        budget = self.max_prefill_tokens
        while budget > 0 and (self.prefilling or self._admit()):
            sequence = self.prefilling[0]
            start = sequence.num_computed
            end = sequence.num_computed = min(sequence.length, start + budget)
            # All keys of a step are written before any is read, so sequences of this same step
            # may share these pages already.
            if not sequence.is_suspect:
                self.pool.remember(sequence.token_ids, sequence.pages, end)
            chunks.append(Chunk(sequence, start, end))
            budget -= end - start
            if chunks[-1].is_last:
                self.prefilling.pop(0)
                self.running.append(sequence)
        return chunks

    def _admit(self) -> bool:
        """Give the first waiting sequence its pages, some of them from the prefix cache."""
        if self._is_full() or (sequence := self._next_waiting()) is None:
            return False
        num_tokens = sequence.length
        # The last token is always computed: its hidden state predicts the next token.
        max_pages = 0 if sequence.is_suspect else (num_tokens - 1) // self.pool.page_size
        found = self.pool.find(sequence.token_ids, max_pages)
        shared = self.pool.share(found)
        needed = self.pool.pages_for(num_tokens) - len(shared)
        has_room = self._has_room(needed) if self.running else needed <= self.pool.num_free
        if not has_room:
            self.pool.release(shared)
            self._refused_with = self.pool.num_free
            return False
        self.waiting.remove(sequence)
        sequence.pages = shared + self.pool.allocate(needed)
        sequence.num_computed = len(found) * self.pool.page_size
        self.num_reused_tokens += sequence.num_computed
        self.prefilling.append(sequence)
        return True

    def _next_waiting(self) -> Sequence | None:
        """The first that may be admitted."""
        may_enter = (s for s in self.waiting if s.num_sampled > 0 or not self.is_closed)
        return next(may_enter, None)

    def _has_room(self, num_pages: int) -> bool:
        """With pages to spare for a burst of all, so that the new one is not preempted at once."""
        spare = (len(self.running) + 1) * self._pages_per_burst
        return self.pool.num_free >= num_pages + spare

    def started(self) -> list[Sequence]:
        """Sequences that were admitted and have not ended, including preempted ones."""
        preempted = [sequence for sequence in self.waiting if sequence.num_sampled > 0]
        return [*self.running, *self.prefilling, *preempted]

    def _is_full(self) -> bool:
        return len(self.running) + len(self.prefilling) >= self.max_num_seqs

    def fork(self, leader: Sequence) -> tuple[list[Sequence], list[tuple[int, int]]]:
        """Let the leader's followers share its prefilled prompt.

        Returns the followers that do, and page copies (from, to) that they need. Followers without
        room wait to be prefilled on their own.
        """
        copies: list[tuple[int, int]] = []
        followers, leader.followers = leader.followers, []
        num_full = leader.length // self.pool.page_size
        num_own = len(leader.pages) - num_full  # 1 where the prompt ends within a page
        for i, follower in enumerate(followers):
            if not self._has_room(num_own) or self._is_full():
                self.waiting.extendleft(reversed(followers[i:]))
                return followers[:i], copies
            own = self.pool.allocate(num_own)
            follower.pages = self.pool.share(leader.pages[:num_full]) + own
            copies += zip(leader.pages[num_full:], own, strict=True)
            self.running.append(follower)
        return followers, copies

    @property
    def may_prefill(self) -> bool:
        """Whether `schedule_prefill` may have something to compute."""
        if self.prefilling:
            return True
        if self._is_full() or self._next_waiting() is None:
            return False
        return self._refused_with is None or self.pool.num_free > self._refused_with

    def reserve(self, num_steps: int) -> None:
        """Give running sequences pages for `num_steps`, preempting the newest if need be."""
        survivors: list[Sequence] = []
        queue = deque(self.running)
        while queue:
            sequence = queue.popleft()
            if missing := self._missing(sequence, num_steps):
                while missing > self.pool.num_free and (self.prefilling or queue):
                    self._send_back(self.prefilling.pop() if self.prefilling else queue.pop())
                if missing > self.pool.num_free:
                    self._send_back(sequence)
                    continue
                sequence.pages += self.pool.allocate(missing)
            survivors.append(sequence)
        self.running = survivors

    def reserve_without_preemption(self, num_steps: int) -> bool:
        """Give all running sequences pages for `num_steps`, or none of them; returns which."""
        missing = [self._missing(sequence, num_steps) for sequence in self.running]
        if sum(missing) > self.pool.num_free:
            return False
        for sequence, num_pages in zip(self.running, missing, strict=True):
            if num_pages:
                sequence.pages += self.pool.allocate(num_pages)
        return True

    def _missing(self, sequence: Sequence, num_steps: int) -> int:
        num_keys = min(sequence.length + num_steps, sequence.max_length) - 1
        return max(0, self.pool.pages_for(num_keys) - len(sequence.pages))

    def start_over(self) -> None:
        """Send all sequences back to be prefilled again, oldest first, into pages that share no
        earlier content."""
        for sequences in (self.prefilling, self.running):
            while sequences:
                self._send_back(sequences.pop())
        self.pool.forget_all()

    def remove(self, sequence: Sequence) -> None:
        """Take a finished or aborted sequence out; its pages stay in the prefix cache."""
        for queue in (self.running, self.prefilling, self.waiting):
            with suppress(ValueError):  # it is in another one
                queue.remove(sequence)
                break
        self._refused_with = None
        self._release_pages(sequence)

    def preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._send_back(sequence)

    def _send_back(self, sequence: Sequence) -> None:
        self._release_pages(sequence)
        self.waiting.appendleft(sequence)
        self.num_preempted += 1

    def _release_pages(self, sequence: Sequence) -> None:
        # A running sequence's last token has been sampled, but not computed.
        num_computed = min(sequence.num_computed, sequence.length - 1)
        if not sequence.is_suspect:
            self.pool.remember(sequence.token_ids, sequence.pages, num_computed)
        self.pool.release(sequence.pages)
        sequence.num_computed = 0
