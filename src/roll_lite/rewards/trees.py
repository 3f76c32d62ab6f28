"""What an answer is once it is read: numbers, expressions, groups, relations."""

from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True, slots=True)
class Number:
    value: Fraction
    places: int = 0
    """Digits after the point, as it was written."""


@dataclass(frozen=True, slots=True)
class Name:
    text: str


@dataclass(frozen=True, slots=True)
class Call:
    """An operation or a function of expressions."""

    function: str
    arguments: tuple["Tree", ...]


@dataclass(frozen=True, slots=True)
class Group:
    """Several items: a tuple, an interval, a set, or a list when opening and closing are empty."""

    opening: str
    items: tuple["Tree", ...]
    closing: str


@dataclass(frozen=True, slots=True)
class Relation:
    """Sides and what stands between them: one of = < > ≤ ≥ ≠ ∈."""

    sides: tuple["Tree", ...]
    operators: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Measured:
    value: "Tree"
    unit: str


Tree = Number | Name | Call | Group | Relation | Measured
