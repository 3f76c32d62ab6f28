"""Checks of option values, for the `__post_init__` of a recipe's Config."""

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
