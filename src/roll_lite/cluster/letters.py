"""Messages outside the tickets: posts to a role's objects, and their reports to the controller."""

import threading
from collections.abc import Callable
from typing import NamedTuple

from torch.futures import Future

from roll_lite.cluster import rpc
from roll_lite.cluster.codec import Message, decode


class Letter(NamedTuple):
    role: str
    replica: int
    content: Message | tuple
    """Arguments; unpacked within one process."""

    @property
    def args(self) -> tuple:
        return decode(self.content) if isinstance(self.content, Message) else self.content


class Outbox:
    """Letters to one rank, in order: one message is under way, the next brings all put meanwhile.

    Handlers of several messages would run in any order, and hundreds of small ones cost more.
    """

    def __init__(self, rank: int, handler: str, on_lost: Callable[[], None]):
        self._rank = rank
        self._handler = handler
        self._on_lost = on_lost
        self._letters: list[Letter] = []
        self._is_sending = False
        self._lock = threading.Lock()

    def put(self, letter: Letter) -> None:
        """Returns at once; any thread may come with it."""
        with self._lock:
            self._letters.append(letter)
            if self._is_sending:
                return
            self._is_sending = True
        self._send()

    def _send(self) -> None:
        with self._lock:
            letters, self._letters = self._letters, []
        try:
            answer = rpc.send(self._rank, self._handler, letters)
        except RuntimeError:
            self._on_lost()
        else:
            answer.add_done_callback(self._on_answer)

    def _on_answer(self, answer: Future) -> None:
        try:
            answer.value()
        except RuntimeError:  # handlers do not raise: it is the connection
            self._on_lost()
            return
        with self._lock:
            has_more = self._is_sending = bool(self._letters)
        if has_more:  # not the field: others may have begun to send by now
            self._send()
