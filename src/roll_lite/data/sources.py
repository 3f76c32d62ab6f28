"""Rows from a file or a generated task, in an order that resumes from a position."""

import hashlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any, Generic, TypeVar

from roll_lite.checks import UserError, at_least
from roll_lite.data.rows import (
    AS_NAMED,
    Columns,
    Dialogue,
    Preference,
    read_dialogues,
    read_preferences,
    read_prompts,
)
from roll_lite.data.tasks import TASKS, Split, check_task, demonstrations, is_task
from roll_lite.data.tasks import prompts as task_prompts
from roll_lite.hub import data_files, is_data_name
from roll_lite.options import flatten

T = TypeVar("T")


class Positioned:
    """An infinite sequence of rows that a checkpoint resumes from its position."""

    position = 0
    """Number of rows taken so far."""

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class Indexed(Positioned, Generic[T]):
    """Infinite rows, each of which is made from its number alone."""

    def __init__(self, row: Callable[[int], T]):
        self._row = row

    def take(self, count: int) -> list[T]:
        taken = [self._row(number) for number in range(self.position, self.position + count)]
        self.position += count
        return taken


class Shuffled(Indexed[T]):
    """Rows in epochs; the order of an epoch depends only on (seed, epoch)."""

    def __init__(self, rows: Sequence[T], *, seed: int | str):
        super().__init__(self._at)
        self.rows = rows
        self.seed = seed
        self._epoch = -1
        self._order: list[int] = []

    def _at(self, position: int) -> T:
        epoch, place = divmod(position, len(self.rows))
        if epoch != self._epoch:
            self._epoch = epoch
            self._order = list(range(len(self.rows)))
            Random(f"{self.seed}/{epoch}").shuffle(self._order)
        return self.rows[self._order[place]]


class Endless(Positioned, Generic[T]):
    """Rows of an infinite generator that can be restarted from its beginning."""

    def __init__(self, generate: Callable[[], Iterator[T]]):
        self._generate = generate
        self._rows = generate()
        self._reached = 0

    def take(self, count: int) -> list[T]:
        if self._reached != self.position:
            self._rows = islice(self._generate(), self.position, None)
        taken = list(islice(self._rows, count))
        self.position = self._reached = self.position + count
        return taken


def fixed_options(config: Any, *names: str) -> dict[str, Any]:
    """Options that a resumed run must not change: the data, a file by its content, and these."""
    values = flatten(config)
    if is_task(config.data):
        data = {"data": None, "task": config.data}
    else:
        data = {"data": digest(config.data), "task": None}
    return data | {name: values[name] for name in names}


def digest(source: str | Path) -> str:
    """A hash of the content of a file, or of the files of a name."""
    found = hashlib.blake2b(digest_size=8)
    for path in data_files(str(source)):
        found.update(path.read_bytes())
    return found.hexdigest()


def check_source(source: str, envs: Collection[str] = ()) -> None:
    """Raise ValueError for a source that is neither a file nor a task; `envs` are named then."""
    if is_task(source):
        check_task(source)
    elif is_data_name(source):
        data_files(source)  # downloads what is missing, or says why it cannot
    elif not Path(source).is_file():
        known = ", ".join([*(f"{name}:N" for name in TASKS), "rg:DATASET"])
        games = f"; environments are {', '.join(envs)}" if envs else ""
        kinds = "a file, a task nor an environment" if envs else "a file nor a task"
        raise UserError(
            f"{source!r} is neither {kinds}; tasks are {known}{games}; "
            "a name on the Hugging Face Hub is OWNER/NAME:CONFIG:SPLIT or OWNER/NAME:FILE"
        )


def task_dialogues(
    task: str, *, seed: int | str, split: Split = "train", careless: float = 0.0
) -> Iterator[Dialogue]:
    """Dialogues of a task; `careless` is the share of careless replies."""
    for prompt, reply in demonstrations(task, seed=seed, split=split, careless=careless):
        messages = (*prompt.messages, {"role": "assistant", "content": reply})
        yield Dialogue(id=prompt.id, messages=messages)


def task_preferences(task: str, *, seed: int | str, split: Split = "train") -> Iterator[Preference]:
    """Preferences for the right answer over a careless one."""
    for prompt, careless in demonstrations(task, seed=seed, split=split, careless=1.0):
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

    read: Callable[[str, Columns], list[T]]
    draw: Callable[..., Iterator[T]]

    def training(
        self, source: str, seed: int | str, columns: Columns = AS_NAMED, **options: Any
    ) -> Shuffled[T] | Endless[T]:
        """Endless rows of a file or a task; `options` are the task's."""
        if is_task(source):
            return Endless(partial(self.draw, source, seed=seed, **options))
        return Shuffled(self.read(source, columns), seed=seed)

    def held_out(
        self, source: str, options: "HeldOutOptions", columns: Columns = AS_NAMED
    ) -> list[T]:
        """Rows to evaluate on: of a file, or held-out ones of the training task, whatever the
        seed."""
        source = options.eval_data or (source if is_task(source) else "")
        if not source or options.eval_every == 0:
            return []
        if not is_task(source):
            return self.read(source, columns)[: options.eval_rows]
        return list(islice(self.draw(source, seed=0, split="held_out"), options.eval_rows))


@dataclass(frozen=True, kw_only=True)
class HeldOutOptions:
    """Evaluation on held-out rows during training."""

    eval_every: int
    """Steps between evaluations; there is also one at the end. 0 is never."""
    eval_data: str | None = None
    """File or task to evaluate on; None is held-out rows of the task in data."""
    eval_rows: int = 256
    """Most rows to evaluate on."""

    def __post_init__(self):
        at_least(0, self, "eval_every")
        at_least(1, self, "eval_rows")

    def check_files(self) -> None:
        """Refuse a file that is missing."""
        if self.eval_data is not None:
            check_source(self.eval_data)


DIALOGUES = Source(read_dialogues, task_dialogues)
PREFERENCES = Source(read_preferences, task_preferences)
PROMPTS = Source(read_prompts, task_prompts)
