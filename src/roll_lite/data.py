"""Rows to train on: JSON lines of a file, or the generated tasks, in an order that resumes.

dialogue    {"messages": [...]} or {"prompt": text or messages, "reply": text}
preference  {"prompt": text or messages, "chosen": text, "rejected": text}
prompt      {"prompt": text or messages}, perhaps with the texts id, domain and ground_truth

Other fields are ignored.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice, pairwise
from pathlib import Path
from random import Random
from typing import Any, Generic, TypeVar

from roll_lite import tasks
from roll_lite.types import Message, Prompt

T = TypeVar("T")
ROLES = ("system", "user", "assistant")
DEFAULT_TASK = "reverse:5"
DIALOGUE = "a dialogue row has messages, or prompt and reply"
PREFERENCE = "a preference row has prompt, chosen and rejected"
PROMPT = "a prompt row has prompt, and may have id, domain and ground_truth"
KINDS = {
    dict: "an object", list: "a list", str: "text", bool: "a truth value", int: "a number",
    float: "a number", type(None): "null",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialogue:
    """A conversation whose assistant turns are learnt."""

    id: str
    """Named in errors."""
    messages: tuple[Message, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Preference:
    """Two replies to a prompt, one better than the other."""

    id: str
    messages: tuple[Message, ...]
    """The prompt."""
    chosen: str
    rejected: str


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a file, which can say what is wrong with it."""

    where: str
    """File and line."""
    fields: dict[str, Any]
    expected: str
    """What a row of this kind has, in words."""

    def error(self, problem: str) -> ValueError:
        return ValueError(f"{self.where}: {problem}; {self.expected}")

    def text(self, field: str, default: str | None = None) -> str:
        value = self.fields.get(field, default)
        if value is None and field not in self.fields:
            raise self.error(f"no field {field!r}")
        if not isinstance(value, str):
            raise self.error(f"field {field!r} is {KINDS[type(value)]} instead of text")
        return value

    def messages(self, field: str) -> tuple[Message, ...]:
        """The messages of a field; text is a message of the user."""
        value = self.fields.get(field)
        if isinstance(value, str):
            return ({"role": "user", "content": value},)
        if field not in self.fields:
            raise self.error(f"no field {field!r}")
        if not isinstance(value, list) or not value:
            found = "an empty list" if value == [] else KINDS[type(value)]
            raise self.error(f"field {field!r} is {found} instead of messages")
        return tuple(self._message(f"{field}[{i}]", entry) for i, entry in enumerate(value))

    def _message(self, where: str, entry: Any) -> Message:
        if not isinstance(entry, dict):
            raise self.error(f"{where} is {KINDS[type(entry)]} instead of an object")
        role, content = entry.get("role"), entry.get("content")
        if role not in ROLES:
            raise self.error(f"{where} has role {role!r}, not one of {', '.join(ROLES)}")
        if not isinstance(content, str):
            raise self.error(f"{where} has {KINDS[type(content)]} instead of text as its content")
        return {"role": role, "content": content}


def read_dialogues(path: str | Path) -> list[Dialogue]:
    return read_rows(path, _dialogue, DIALOGUE)


def read_preferences(path: str | Path) -> list[Preference]:
    return read_rows(path, _preference, PREFERENCE)


def read_prompts(path: str | Path) -> list[Prompt]:
    return read_rows(path, _prompt, PROMPT)


def fixed_options(config: Any, *names: str) -> dict[str, Any]:
    """Options by name, and what is in the file `data`, to compare when a run is resumed."""
    options = {name: getattr(config, name) for name in ("data", *names)}
    if config.data is not None:
        options["data"] = hashlib.blake2b(Path(config.data).read_bytes(), digest_size=8).hexdigest()
    return options


def read_rows(path: str | Path, parse: Callable[[Row], T], expected: str) -> list[T]:
    """Parse every line that is not blank; errors name the file, the line and what was expected."""
    if not Path(path).is_file():
        raise ValueError(f"{path} is not a file; name one with a JSON object in each line")
    rows = []
    with Path(path).open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                rows.append(parse(_row(f"{path} line {number}", line, expected)))
    if not rows:
        raise ValueError(f"{path} is empty; it needs a JSON object in each line: {expected}")
    return rows


def _row(where: str, line: bytes, expected: str) -> Row:
    try:
        fields = json.loads(line)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{where}: not JSON ({error}); {expected}") from None
    if not isinstance(fields, dict):
        raise ValueError(f"{where}: {KINDS[type(fields)]} instead of an object; {expected}")
    return Row(where, fields, expected)


def _dialogue(row: Row) -> Dialogue:
    if "messages" in row.fields:
        messages = row.messages("messages")
    else:
        reply = {"role": "assistant", "content": row.text("reply")}
        messages = (*row.messages("prompt"), reply)
    roles = [message["role"] for message in messages]
    is_turn = [role == "assistant" for role in roles]
    if not is_turn[-1] or is_turn[0] or any(a and b for a, b in pairwise(is_turn)):
        raise row.error(
            f"the roles are {', '.join(roles)}, but the assistant must reply to others and last"
        )
    return Dialogue(id=row.where, messages=messages)


def _preference(row: Row) -> Preference:
    chosen, rejected = row.text("chosen"), row.text("rejected")
    if chosen == rejected:
        raise row.error("chosen and rejected are the same text, so there is nothing to prefer")
    return Preference(id=row.where, messages=_opening(row), chosen=chosen, rejected=rejected)


def _prompt(row: Row) -> Prompt:
    return Prompt(
        id=row.text("id", default=row.where),
        messages=_opening(row),
        domain=row.text("domain", default=""),
        ground_truth=row.text("ground_truth", default=""),
    )


def _opening(row: Row) -> tuple[Message, ...]:
    """Messages that the model has yet to reply to."""
    messages = row.messages("prompt")
    if messages[-1]["role"] == "assistant":
        raise row.error("the prompt ends with the assistant, who should come after it")
    return messages


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
