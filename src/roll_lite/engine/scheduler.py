"""Decides, step by step, who is prefilled, who decodes and who gives up pages. Never reads a clock.

The oldest sequence always makes progress: it alone fits the pool (checked at submit), and only
sequences younger than it are preempted in its favour.
"""

from collections import deque

from roll_lite.engine.pages import PagePool
from roll_lite.engine.sequence import Sequence


class Scheduler:
    def __init__(self, pool: PagePool, *, max_num_seqs: int, max_prefill_tokens: int):
        self.pool = pool
        self.max_num_seqs = max_num_seqs
        self.max_prefill_tokens = max_prefill_tokens
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        """Oldest first."""
        self.num_preempted = 0

    def admit(self) -> list[Sequence]:
        """Move waiting sequences to running, with pages for their tokens; prefill these."""
        admitted, num_tokens = [], 0
        while self.waiting and len(self.running) < self.max_num_seqs:
            sequence = self.waiting[0]
            num_tokens += len(sequence.token_ids)
            # One page more for everyone who runs, so that the newcomer is not preempted at once.
            spare = len(self.running) + 1 if self.running else 0
            needed = self.pool.pages_for(len(sequence.token_ids))
            if self.pool.num_free < needed + spare:
                break
            if admitted and num_tokens > self.max_prefill_tokens:
                break
            self.waiting.popleft()
            sequence.pages = self.pool.allocate(needed)
            self.running.append(sequence)
            admitted.append(sequence)
        return admitted

    def fork(self, leader: Sequence) -> list[tuple[int, int]]:
        """Let the leader's followers share its prefilled prompt; page copies (from, to) to make.

        Followers for whom there is no room wait to be prefilled on their own.
        """
        copies = []
        followers, leader.followers = leader.followers, []
        num_full = len(leader.token_ids) // self.pool.page_size
        num_own = len(leader.pages) - num_full  # 1 where the prompt ends within a page
        for i, follower in enumerate(followers):
            no_room = self.pool.num_free < num_own + len(self.running) + 1
            if no_room or len(self.running) == self.max_num_seqs:
                self.waiting.extendleft(reversed(followers[i:]))
                break
            own = self.pool.allocate(num_own)
            follower.pages = self.pool.share(leader.pages[:num_full]) + own
            copies += zip(leader.pages[num_full:], own, strict=True)
            self.running.append(follower)
        return copies

    def make_room(self, num_steps: int) -> list[Sequence]:
        """Give everyone who runs pages for so many steps, taken from the newest if need be."""
        survivors: list[Sequence] = []
        queue = deque(self.running)
        while queue:
            sequence = queue.popleft()
            num_keys = min(len(sequence.token_ids) + num_steps, sequence.max_length) - 1
            missing = max(0, self.pool.pages_for(num_keys) - len(sequence.pages))
            while missing > self.pool.num_free and queue:
                self._preempt(queue.pop())
            if missing > self.pool.num_free:
                self._preempt(sequence)
            else:
                sequence.pages += self.pool.allocate(missing)
                survivors.append(sequence)
        self.running = survivors
        return list(survivors)

    def preempt_all(self) -> None:
        """Send everyone back to be prefilled again, oldest first."""
        while self.running:
            self._preempt(self.running.pop())

    def remove(self, sequence: Sequence) -> None:
        """Take a finished or aborted sequence out."""
        if sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        self.pool.release(sequence.pages)

    def _preempt(self, sequence: Sequence) -> None:
        self.pool.release(sequence.pages)
        self.waiting.appendleft(sequence)
        self.num_preempted += 1
