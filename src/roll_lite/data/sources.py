"""Rows from a file or a generated task, in an order that resumes from a position."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any, Generic, TypeVar

from roll_lite import tasks
from roll_lite.data.rows import (
    Dialogue,
    Preference,
    read_dialogues,
    read_preferences,
    read_prompts,
)
from roll_lite.options import flatten

T = TypeVar("T")
DEFAULT_TASK = "reverse:5"


class Positioned:
    """An infinite sequence of rows that a checkpoint resumes from its position."""

    position = 0
    """Number of rows taken so far."""

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class Shuffled(Positioned, Generic[T]):
    """Rows in epochs; the order of an epoch depends only on (seed, epoch)."""

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
    """Rows of an infinite generator that can be restarted from its beginning."""

    def __init__(self, generate: Callable[[], Iterator[T]]):
        self._generate, self._rows, self._reached = generate, generate(), 0

    def take(self, count: int) -> list[T]:
        if self._reached != self.position:
            self._rows = islice(self._generate(), self.position, None)
        taken = list(islice(self._rows, count))
        self.position = self._reached = self.position + count
        return taken


def fixed_options(config: Any, *names: str) -> dict[str, Any]:
    """Options that a resumed run must not change: a digest of the file `data`, and these names."""
    values = flatten(config)
    options = {name: values[name] for name in ("data", *names)}
    if config.data is not None:
        options["data"] = digest(config.data)
    return options


def digest(path: str | Path) -> str:
    """A hash of the content of a file."""
    return hashlib.blake2b(Path(path).read_bytes(), digest_size=8).hexdigest()


def check_source(data: str | None, task: str | None) -> None:
    """Raise ValueError for two sources at once or an unknown task."""
    if data is not None and task is not None:
        raise ValueError(f"data={data!r} and task={task!r} are both given; give one of them")
    tasks.parse_task(task or DEFAULT_TASK)


def task_dialogues(
    task: str, *, seed: int | str, split: tasks.Split = "train", careless: float = 0.0
) -> Iterator[Dialogue]:
    """Dialogues of a task; `careless` is the share of careless replies."""
    for prompt, reply in tasks.demonstrations(task, seed=seed, split=split, careless=careless):
        messages = (*prompt.messages, {"role": "assistant", "content": reply})
        yield Dialogue(id=prompt.id, messages=messages)


def task_preferences(
    task: str, *, seed: int | str, split: tasks.Split = "train"
) -> Iterator[Preference]:
    """Preferences for the right answer over a careless one."""
    for prompt, careless in tasks.demonstrations(task, seed=seed, split=split, careless=1.0):
        if careless != prompt.ground_truth:  # a careless answer can be right by chance
            yield Preference(
                id=prompt.id,
                messages=prompt.messages,
                chosen=prompt.ground_truth,
                rejected=careless,
            )


@dataclass(frozen=True, slots=True)
class Source(Generic[T]):
    """Reads one kind of row from a file, or draws it from a task."""

    read: Callable[[str], list[T]]
    draw: Callable[..., Iterator[T]]

    def training(
        self, data: str | None, task: str | None, seed: int | str, **options: Any
    ) -> Shuffled[T] | Endless[T]:
        """Endless rows of the file or the task; `options` are the task's."""
        if data is not None:
            return Shuffled(self.read(data), seed=seed)
        return Endless(partial(self.draw, task or DEFAULT_TASK, seed=seed, **options))

    def validation(
        self, path: str | None, data: str | None, task: str | None, count: int
    ) -> list[T]:
        """Rows of a file, or held-out rows of the training task, the same for every seed."""
        if path is not None:
            return self.read(path)[:count]
        if data is not None:
            return []
        return list(islice(self.draw(task or DEFAULT_TASK, seed=0, split="held_out"), count))


DIALOGUES = Source(read_dialogues, task_dialogues)
PREFERENCES = Source(read_preferences, task_preferences)
PROMPTS = Source(read_prompts, tasks.prompts)
