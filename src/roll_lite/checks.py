"""Checks of option values, for the `__post_init__` of options. Standard library only."""

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from dataclasses import fields as dataclass_fields
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

USER_ERROR = 2
"""Exit code where the user has to change something."""


class UserError(ValueError):
    """Something that the user has to change: the message names it, its value and the remedy, and is
    shown without a traceback."""


@dataclass(frozen=True)
class Bound:
    """A bound of an option, in the type of a keyword: Annotated[float, Doc("..."), AtLeast(0)]."""

    bound: float

    def check(self, name: str, value: Any) -> None:
        """None means not set."""
        raise NotImplementedError


class AtLeast(Bound):
    def check(self, name: str, value: Any) -> None:
        if value is not None and not value >= self.bound:
            raise UserError(f"{name}={value} must be at least {self.bound}")


class AtMost(Bound):
    def check(self, name: str, value: Any) -> None:
        if value is not None and not value <= self.bound:
            raise UserError(f"{name}={value} must be at most {self.bound}")


class Above(Bound):
    def check(self, name: str, value: Any) -> None:
        if value is not None and not value > self.bound:
            raise UserError(f"{name}={value} must be above {self.bound}")


def at_least(minimum: float, options: Any, *fields: str) -> None:
    """Refuse options with a smaller value in one of the fields; None means not set."""
    for field in fields:
        AtLeast(minimum).check(field, getattr(options, field))


def above(bound: float, options: Any, *fields: str) -> None:
    """Refuse options with a value that is not above the bound; None means not set."""
    for field in fields:
        Above(bound).check(field, getattr(options, field))


def finite(options: Any, *fields: str) -> None:
    """Refuse infinity and nan; None means not set."""
    for field in fields:
        value = getattr(options, field)
        if value is not None and not math.isfinite(value):
            raise UserError(f"{field}={value} must be a finite number")


def check_choices(options: Any) -> None:
    """Refuse a value that the Literal type of its field does not name."""
    for field, choices in _choices(type(options)).items():
        check_choice(field, getattr(options, field), choices)


def check_choice(name: str, value: Any, choices: tuple) -> None:
    """Refuse a value that is none of the choices, if there are any."""
    if choices and value not in choices:
        known = ", ".join(str(choice) for choice in choices if choice is not None)
        raise UserError(f"{name}={value!r} is not known; use one of {known}")


def choices_of(hint: Any) -> tuple:
    """The choices of a Literal type, with None where it may be left out; none for other types."""
    is_union = get_origin(hint) in (Union, UnionType)
    members = get_args(hint) if is_union else [hint]
    choices = [c for m in members if get_origin(m) is Literal for c in get_args(m)]
    return (*choices, *([None] if choices and type(None) in members else []))


@cache
def _choices(cls: type) -> dict[str, tuple]:
    """The choices of each field."""
    return {name: choices_of(hint) for name, hint in get_type_hints(cls).items()}


def read_only_if(is_read: bool, condition: str, options: Any, *fields: str) -> None:
    """Refuse changed fields that nothing reads; `condition` says when they are read."""
    for field, value, default in () if is_read else changed(options, fields):
        raise UserError(f"{field}={value!r} is only read with {condition}; leave it at {default!r}")


def unread_with(reason: str, options: Any, *fields: str) -> None:
    """Refuse changed fields that nothing reads, for the reason given."""
    for field, value, default in changed(options, fields):
        raise UserError(f"{field}={value!r} is not read with {reason}; leave it at {default!r}")


def changed(options: Any, names: Iterable[str]) -> Iterator[tuple[str, Any, Any]]:
    """Name, value and default of the named fields whose value is not the default."""
    for field in dataclass_fields(options):
        value = getattr(options, field.name)
        if field.name in names and value != field.default:
            yield field.name, value, field.default


def refuse_changes(folder: Path, written: Mapping[str, Any], fixed: Mapping[str, Any]) -> None:
    """Refuse to resume a run with other values of its fixed options than were `written`."""
    here = json.loads(json.dumps(fixed))  # as JSON reads it back
    known = [name for name in here if name in written]  # the run may be older than the option
    if changed := [name for name in known if here[name] != written[name]]:
        listed = ", ".join(f"{n}={here[n]!r} (was {written[n]!r})" for n in changed)
        raise UserError(
            f"the run in {folder} cannot be resumed with {listed}; give what it was "
            "started with, or name another run_dir"
        )


def parse_range(name: str, text: str) -> range | None:
    """The numbers of a text like 5 or 5-8; None if it is empty."""
    if not text:
        return None
    found = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    if not found or int(found[1]) > int(found[2] or found[1]):
        raise UserError(f"{name}={text!r} is not a range of numbers; write it as 5 or 5-8")
    return range(int(found[1]), int(found[2] or found[1]) + 1)
