"""Rewards for following instructions that a program can check.

A prompt's tests are its constraints, such as {"kind": "min_words", "count": 50}; `constraints` has
all kinds.
"""

from typing import Any

from roll_lite.rewards.constraints import FIELDS, KINDS, fields_of, holds
from roll_lite.types import Prompt, Score


def instructions_followed(prompt: Prompt, reply: str, *, strict: bool = False) -> Score:
    """The share of constraints that the reply fulfils; with `strict`, 1 for all of them, else 0.

    Parts have the kinds; a second constraint of a kind is called kind_2.
    """
    check_instructions(prompt)
    parts: dict[str, float] = {}
    for constraint in prompt.tests:
        parts[_unused(constraint["kind"], parts)] = float(holds(reply, constraint))
    share = sum(parts.values()) / len(parts)
    return Score(value=float(share == 1) if strict else share, parts=parts)


def check_instructions(prompt: Prompt) -> None:
    """Refuse constraints that no reply could be checked with; for the start of a run."""
    if not prompt.tests:
        raise ValueError(f"prompt {prompt.id} has no tests; give it at least one constraint")
    for number, constraint in enumerate(prompt.tests):
        try:
            _check(constraint)
        except ValueError as error:
            raise ValueError(f"prompt {prompt.id}, tests[{number}]: {error}") from None


def _check(constraint: dict[str, Any]) -> None:
    if not isinstance(constraint, dict):
        raise ValueError(f"{constraint!r} must be an object with a kind")
    kind = constraint.get("kind")
    if kind not in KINDS:
        raise ValueError(f"kind={kind!r} is not known; use one of {', '.join(KINDS)}")
    fields = fields_of(kind)
    given = set(constraint) - {"kind"}
    if missing := sorted(fields - given):
        raise ValueError(f"kind={kind!r} has no field {missing[0]!r}; it needs {_listed(fields)}")
    if unread := sorted(given - fields):
        raise ValueError(f"kind={kind!r} reads no field {unread[0]!r}, only {_listed(fields)}")
    for field in sorted(fields):
        is_right, expected = FIELDS[field]
        if not is_right(constraint[field]):
            raise ValueError(f"{field}={constraint[field]!r} of kind={kind!r} must be {expected}")


def _listed(fields: set[str]) -> str:
    return ", ".join(sorted(fields)) or "none"


def _unused(kind: str, parts: dict[str, float]) -> str:
    number, name = 1, kind
    while name in parts:
        number += 1
        name = f"{kind}_{number}"
    return name
