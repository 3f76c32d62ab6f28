"""Checks of option values, and options that follow from the signatures of functions."""

import inspect
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields as dataclass_fields
from dataclasses import is_dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from typing_extensions import Doc

T = TypeVar("T")


def at_least(minimum: float, options: Any, *fields: str) -> None:
    """Refuse options with a smaller value in one of the fields, naming field and value."""
    for field in fields:
        if not getattr(options, field) >= minimum:
            raise ValueError(f"{field}={getattr(options, field)} must be at least {minimum}")


def above(bound: float, options: Any, *fields: str) -> None:
    """Refuse options with a value that is not above the bound; None means not set."""
    for field in fields:
        value = getattr(options, field)
        if value is not None and not value > bound:
            raise ValueError(f"{field}={value} must be above {bound}")


def finite(options: Any, *fields: str) -> None:
    """Refuse infinity and nan; None means not set."""
    for field in fields:
        value = getattr(options, field)
        if value is not None and not math.isfinite(value):
            raise ValueError(f"{field}={value} must be a finite number")


def check_choices(options: Any) -> None:
    """Refuse a value that the Literal type of its field does not name."""
    for field, choices in _choices(type(options)).items():
        if (value := getattr(options, field)) not in choices:
            known = ", ".join(str(choice) for choice in choices if choice is not None)
            raise ValueError(f"{field}={value!r} is not known; use one of {known}")


@cache
def _choices(cls: type) -> dict[str, tuple]:
    """The choices of each field with a Literal type, with None where it may be left out."""
    found = {}
    for name, hint in get_type_hints(cls).items():
        members = [hint] if get_origin(hint) is Literal else get_args(hint)
        choices = [c for m in members if get_origin(m) is Literal for c in get_args(m)]
        if choices:
            found[name] = (*choices, *([None] if type(None) in members else []))
    return found


def read_only_if(is_read: bool, condition: str, options: Any, *fields: str) -> None:
    """Refuse changed fields that nothing reads; `condition` says when they are read."""
    for field, value, default in () if is_read else _changed(options, fields):
        raise ValueError(
            f"{field}={value!r} is only read with {condition}; leave it at {default!r}"
        )


def unread_with(reason: str, options: Any, *fields: str) -> None:
    """Refuse changed fields that nothing reads, for the reason given."""
    for field, value, default in _changed(options, fields):
        raise ValueError(f"{field}={value!r} is not read with {reason}; leave it at {default!r}")


def _changed(options: Any, names: Iterable[str]) -> Iterator[tuple[str, Any, Any]]:
    """Name, value and default of the named fields whose value is not the default."""
    for field in dataclass_fields(options):
        value = getattr(options, field.name)
        if field.name in names and value != field.default:
            yield field.name, value, field.default


def refuse_changes(folder: Path, written: Mapping[str, Any], fixed: Mapping[str, Any]) -> None:
    """Refuse to resume a run with other values of its fixed options than were `written`."""
    here = json.loads(json.dumps(fixed))  # as JSON reads it back
    if changed := [name for name in here if here[name] != written.get(name)]:
        listed = ", ".join(f"{n}={here[n]!r} (was {written.get(n)!r})" for n in changed)
        raise ValueError(
            f"the run in {folder} cannot be resumed with {listed}; give what it was "
            "started with, or name another run_dir"
        )


# ---- options in parts
#
# The Config of a recipe has the options of its parts as fields; on the command line they are flat.


def flatten(options: Any) -> dict[str, Any]:
    """All options by name, those of the parts included."""
    flat: dict[str, Any] = {}
    for field in dataclass_fields(options):
        value = getattr(options, field.name)
        flat |= flatten(value) if is_dataclass(value) else {field.name: value}
    return flat


def from_flat(config: type[T], **options: Any) -> T:
    """A Config from flat names, as on the command line: each goes to the part that has it."""
    values = {}
    for field in dataclass_fields(config):
        if is_dataclass(part := field.default):
            given = {name: options.pop(name) for name in flatten(part) if name in options}
            values[field.name] = replace(part, **given)
        elif field.name in options:
            values[field.name] = options.pop(field.name)
    if options:
        raise ValueError(f"{', '.join(options)} is not an option of this recipe; see its --help")
    return config(**values)


# ---- options from signatures
#
# A table such as LOSSES maps names to functions whose keyword-only parameters are their options:
#
#     def cispo(logprobs_R, ..., *, clip_low: Annotated[float, Doc("...")] = 0.2): ...
#
# The options exist once, in the signature: fields, flags, help and "nobody reads this" follow.


@cache
def keywords(function: Callable) -> dict[str, tuple[Any, Any]]:
    """The options of a function: type (with its Doc) and default of each keyword-only parameter."""
    hints = get_type_hints(function, include_extras=True)
    return {
        name: (hints[name], parameter.default)
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY
    }


def with_options_of(field: str, table: Mapping[str, Callable]) -> Callable[[type], type]:
    """Decorates a class, below @dataclass, whose `field` names a function of the table.

    Adds a field for each option of the functions. Where functions have different defaults for an
    option, the field's default is None, which leaves it to the function.
    """

    def add_fields(cls: type) -> type:
        cls.__annotations__[field] = Literal[tuple(table)]
        for name, readers in _readers(table).items():
            hint, default = keywords(table[readers[0]])[name]
            kind, doc = get_args(hint)
            if any(keywords(table[reader])[name][1] != default for reader in readers):
                own = ", ".join(f"{keywords(table[r])[name][1]} for {r}" for r in readers)
                kind, default, doc = kind | None, None, Doc(f"{doc.documentation} None is {own}.")
            help_text = f"{', '.join(readers)}: {doc.documentation}"
            cls.__annotations__[name] = Annotated[kind, Doc(help_text)]
            setattr(cls, name, default)
        return cls

    return add_fields


def choose(table: Mapping[str, Callable], field: str, options: Any) -> Callable:
    """The function that `options.field` names, with its options filled in.

    An option that was changed and that this function does not read is refused.
    """
    check_choices(options)
    name = getattr(options, field)
    function = table[name]
    for option, value, default in _changed(options, _readers(table)):
        if option not in keywords(function):
            raise ValueError(
                f"{option}={value!r} is not read by {field}={name!r}, only by "
                f"{', '.join(_readers(table)[option])}; leave it at {default!r}"
            )
    values = {option: getattr(options, option) for option in keywords(function)}
    return partial(function, **{o: value for o, value in values.items() if value is not None})


def _readers(table: Mapping[str, Callable]) -> dict[str, list[str]]:
    """For each option, the names of the functions that read it."""
    readers: dict[str, list[str]] = {}
    for name, function in table.items():
        for option in keywords(function):
            readers.setdefault(option, []).append(name)
    return readers
