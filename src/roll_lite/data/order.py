"""Rows in an order that resumes: `position` is all that a checkpoint has to keep."""

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from random import Random
from typing import Generic, TypeVar

T = TypeVar("T")


class Positioned:
    position = 0
    """Rows taken so far."""

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class Shuffled(Positioned, Generic[T]):
    """Rows epoch after epoch, each in an order that depends on (seed, epoch) alone."""

    def __init__(self, rows: Sequence[T], *, seed: int | str):
        self.rows, self.seed = rows, seed
        self._epoch, self._order = -1, []

    def take(self, count: int) -> list[T]:
        taken = [self._at(position) for position in range(self.position, self.position + count)]
        self.position += count
        return taken

    def _at(self, position: int) -> T:
        epoch, place = divmod(position, len(self.rows))
        if epoch != self._epoch:
            self._epoch, self._order = epoch, list(range(len(self.rows)))
            Random(f"{self.seed}/{epoch}").shuffle(self._order)
        return self.rows[self._order[place]]


class Endless(Positioned, Generic[T]):
    """Rows of a generator that never ends and always begins alike."""

    def __init__(self, generate: Callable[[], Iterator[T]]):
        self._generate, self._rows, self._reached = generate, generate(), 0

    def take(self, count: int) -> list[T]:
        if self._reached != self.position:
            self._rows = islice(self._generate(), self.position, None)
        taken = list(islice(self._rows, count))
        self.position = self._reached = self.position + count
        return taken
