"""Checks of option values, for the `__post_init__` of a dataclass of options."""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields as dataclass_fields
from pathlib import Path
from typing import Any


def at_least(minimum: float, config: Any, *fields: str) -> None:
    """Refuse a config with a smaller value in one of the fields, naming field and value."""
    for field in fields:
        if not getattr(config, field) >= minimum:
            raise ValueError(f"{field}={getattr(config, field)} must be at least {minimum}")


def above(bound: float, config: Any, *fields: str) -> None:
    for field in fields:
        if not getattr(config, field) > bound:
            raise ValueError(f"{field}={getattr(config, field)} must be above {bound}")


def finite(config: Any, *fields: str) -> None:
    """Refuse infinity and what is no number; None stands for no value."""
    for field in fields:
        value = getattr(config, field)
        if value is not None and not math.isfinite(value):
            raise ValueError(f"{field}={value} must be a finite number")


def one_of(known: Iterable[str], config: Any, *fields: str) -> None:
    for field in fields:
        if getattr(config, field) not in known:
            raise ValueError(
                f"{field}={getattr(config, field)!r} is not known; use one of {', '.join(known)}"
            )


def read_only_if(is_read: bool, condition: str, config: Any, *fields: str) -> None:
    """Refuse fields that were changed though nothing reads them; `condition` says when it would."""
    for field, value, default in () if is_read else _changed(config, fields):
        raise ValueError(
            f"{field}={value!r} is only read with {condition}; leave it at {default!r}"
        )


def unread_with(reason: str, config: Any, *fields: str) -> None:
    """Refuse options that were changed though, for the reason given, nothing reads them."""
    for field, value, default in _changed(config, fields):
        raise ValueError(f"{field}={value!r} is not read with {reason}; leave it at {default!r}")


def _changed(config: Any, names: Iterable[str]) -> Iterator[tuple[str, Any, Any]]:
    """Name, value and default of the named fields whose value is not the default."""
    for field in dataclass_fields(config):
        value = getattr(config, field.name)
        if field.name in names and value != field.default:
            yield field.name, value, field.default


def filled_from(options: type, config: Any, **more: Any) -> Any:
    """A dataclass of options with the values of the config's fields of the same names."""
    names = {field.name for field in dataclass_fields(config)}
    shared = [f.name for f in dataclass_fields(options) if f.name in names and f.name not in more]
    return options(**{name: getattr(config, name) for name in shared}, **more)


def only_read_by(readers: Mapping[str, tuple[str, ...]], config: Any) -> None:
    """Refuse an option that was changed though `config.kind` is not among its readers."""
    for field in dataclass_fields(config):
        value, kinds = getattr(config, field.name), readers.get(field.name)
        if kinds is not None and config.kind not in kinds and value != field.default:
            raise ValueError(
                f"{field.name}={value!r} is not read by kind={config.kind!r}, only by "
                f"{', '.join(kinds)}; leave it at {field.default!r}"
            )


def refuse_changes(folder: Path, written: Mapping[str, Any], fixed: Mapping[str, Any]) -> None:
    """A run goes on with the fixed options that it was begun with, as they were `written`."""
    here = json.loads(json.dumps(fixed))  # as JSON gives it back
    if changed := [name for name in here if here[name] != written.get(name)]:
        listed = ", ".join(f"{n}={here[n]!r} (was {written.get(n)!r})" for n in changed)
        raise ValueError(
            f"the run in {folder} cannot be resumed with {listed}; give what it was "
            "started with, or name another run_dir"
        )
