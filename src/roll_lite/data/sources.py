"""Where rows come from: a file, or else a generated task."""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Generic, TypeVar

from roll_lite import tasks
from roll_lite.checks import flatten
from roll_lite.data.kinds import (
    Dialogue,
    Preference,
    read_dialogues,
    read_preferences,
    read_prompts,
)
from roll_lite.data.order import Endless, Shuffled

T = TypeVar("T")
DEFAULT_TASK = "reverse:5"


def fixed_options(config: Any, *names: str) -> dict[str, Any]:
    """Options by name, and what is in the file `data`, to compare when a run is resumed."""
    values = flatten(config)
    options = {name: values[name] for name in ("data", *names)}
    if config.data is not None:
        options["data"] = digest(config.data)
    return options


def digest(path: str | Path) -> str:
    """Of what is in a file, to see whether it is still the same."""
    return hashlib.blake2b(Path(path).read_bytes(), digest_size=8).hexdigest()


def check_source(data: str | None, task: str | None) -> None:
    """Refuse two sources at once, and a task that is not known."""
    if data is not None and task is not None:
        raise ValueError(f"data={data!r} and task={task!r} are both given; give one of them")
    tasks.parse_task(task or DEFAULT_TASK)


def task_dialogues(
    task: str, *, seed: int | str, split: tasks.Split = "train", careless: float = 0.0
) -> Iterator[Dialogue]:
    """Dialogue after dialogue, of which a share has a careless reply."""
    for prompt, reply in tasks.demonstrations(task, seed=seed, split=split, careless=careless):
        messages = (*prompt.messages, {"role": "assistant", "content": reply})
        yield Dialogue(id=prompt.id, messages=messages)


def task_preferences(
    task: str, *, seed: int | str, split: tasks.Split = "train"
) -> Iterator[Preference]:
    """The right answer, preferred to a careless one."""
    for prompt, careless in tasks.demonstrations(task, seed=seed, split=split, careless=1.0):
        if careless != prompt.ground_truth:  # a careless answer may be right by chance
            yield Preference(
                id=prompt.id,
                messages=prompt.messages,
                chosen=prompt.ground_truth,
                rejected=careless,
            )


@dataclass(frozen=True, slots=True)
class Source(Generic[T]):
    """Where rows of one kind come from: a file, or else a task."""

    read: Callable[[str], list[T]]
    draw: Callable[..., Iterator[T]]

    def training(
        self, data: str | None, task: str | None, seed: int | str, **options: Any
    ) -> "Shuffled[T] | Endless[T]":
        """Rows without end; the options are of the task."""
        if data is not None:
            return Shuffled(self.read(data), seed=seed)
        return Endless(partial(self.draw, task or DEFAULT_TASK, seed=seed, **options))

    def validation(
        self, path: str | None, data: str | None, task: str | None, count: int
    ) -> list[T]:
        """Rows of a file, or held-out ones of the task that is trained on, for every seed alike."""
        if path is not None:
            return self.read(path)[:count]
        if data is not None:
            return []
        return list(islice(self.draw(task or DEFAULT_TASK, seed=0, split="held_out"), count))


DIALOGUES = Source(read_dialogues, task_dialogues)
PREFERENCES = Source(read_preferences, task_preferences)
PROMPTS = Source(read_prompts, tasks.prompts)
