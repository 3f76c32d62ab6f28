"""Rows in an order that resumes: `position` is all that a checkpoint has to keep."""

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from random import Random
from typing import Generic, TypeVar

T = TypeVar("T")


class Shuffled(Generic[T]):
    """Rows epoch after epoch, each in an order that depends on (seed, epoch) alone."""

    def __init__(self, rows: Sequence[T], *, seed: int | str):
        self.rows, self.seed = rows, seed
        self.position = 0
        """Rows taken so far; a checkpoint keeps it and sets it again."""
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


class Endless(Generic[T]):
    """Rows of a generator that never ends and always begins alike."""

    def __init__(self, generate: Callable[[], Iterator[T]]):
        self.position = 0
        self._generate, self._rows, self._reached = generate, generate(), 0

    def take(self, count: int) -> list[T]:
        if self._reached != self.position:
            self._rows = islice(self._generate(), self.position, None)
        taken = list(islice(self._rows, count))
        self.position = self._reached = self.position + count
        return taken
