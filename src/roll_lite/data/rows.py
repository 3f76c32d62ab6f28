"""JSON lines: every row can say what is wrong with it, and where it stands."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from roll_lite.types import Message

T = TypeVar("T")
ROLES = ("system", "user", "assistant")
KINDS = {
    dict: "an object", list: "a list", str: "text", bool: "a truth value", int: "a number",
    float: "a number", type(None): "null",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a file, which can say what is wrong with it."""

    where: str
    """File and line."""
    number: int
    """Of the line, from 1."""
    fields: dict[str, Any]
    expected: str
    """What a row of this kind has, in words."""
    line: bytes
    """As it stands in the file."""

    def error(self, problem: str) -> ValueError:
        return ValueError(f"{self.where}: {problem}; {self.expected}")

    def text(self, field: str, default: str | None = None) -> str:
        value = self.fields.get(field, default)
        if value is None and field not in self.fields:
            raise self.error(f"no field {field!r}")
        if not isinstance(value, str):
            raise self.error(f"field {field!r} is {KINDS[type(value)]} instead of text")
        return value

    def text_or_number(self, field: str, default: str | None = None) -> str:
        """Text; a number is the text that it is written with, so 1.50 stays 1.50."""
        if type(self.fields.get(field)) not in (int, float):
            return self.text(field, default)
        return json.loads(self.line, parse_int=str, parse_float=str, parse_constant=str)[field]

    def objects(self, field: str) -> tuple[dict[str, Any], ...]:
        """A list of objects; none where the row does not have the field."""
        value = self.fields.get(field, [])
        if not isinstance(value, list):
            raise self.error(f"field {field!r} is {KINDS[type(value)]} instead of a list")
        for i, entry in enumerate(value):
            if not isinstance(entry, dict):
                raise self.error(f"{field}[{i}] is {KINDS[type(entry)]} instead of an object")
        return tuple(value)

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


def read_rows(path: str | Path, parse: Callable[[Row], T], expected: str) -> list[T]:
    """Parse every line that is not blank; errors name the file, the line and what was expected."""
    if not Path(path).is_file():
        raise ValueError(f"{path} is not a file; name one with a JSON object in each line")
    rows = []
    with Path(path).open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                rows.append(parse(_row(f"{path} line {number}", number, line, expected)))
    if not rows:
        raise ValueError(f"{path} is empty; it needs a JSON object in each line: {expected}")
    return rows


def _row(where: str, number: int, line: bytes, expected: str) -> Row:
    try:
        fields = json.loads(line)
    except json.JSONDecodeError as error:
        problem = f"{error.msg}, at character {error.pos + 1}"
        raise ValueError(f"{where}: not JSON ({problem}); {expected}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{where}: not JSON ({error}); {expected}") from None
    if not isinstance(fields, dict):
        raise ValueError(f"{where}: {KINDS[type(fields)]} instead of an object; {expected}")
    return Row(where, number, fields, expected, line)
