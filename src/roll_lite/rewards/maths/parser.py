r"""Parse a normalized answer into a tree.

Adjacent letters are a product, as in handwriting; words after a value are its unit. Text length,
nesting and exponents are limited, so parsing always ends quickly.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from typing import NoReturn

from roll_lite.rewards.maths.notation import (
    END,
    FUNCTIONS,
    SET_CLOSE,
    SET_OPEN,
    UNION,
    NotUnderstood,
    Token,
    TooLarge,
    is_unit,
    tokenize,
)

MAX_DEPTH = 30
MAX_EXPONENT = 1000
"""Largest power of ten in scientific notation."""
MAX_SUMMED = 3000
r"""Tokens of all terms of a \sum or \prod together."""
SERIES = ("sum", "prod")
APPLIED = frozenset(
    ("f", "g", "h", "F", "G", "H", "zeta", "Gamma", "phi", "psi", "Phi", "Psi", "O", "Theta")
)
"""Names that a bracket makes a function; after other names it is a product, as in x(x + 1)."""
_RELATIONS = "=≈<>≤≥≠∈"
_OPENINGS = {"(": ")]", "[": ")]", SET_OPEN: SET_CLOSE, "{": "}"}
_CLOSINGS = (")", "]", "}", SET_CLOSE)
_ENDS_OF_UNITS = (*_CLOSINGS, ",", ";", "=", "|")


@dataclass(frozen=True, slots=True)
class Number:
    value: Fraction
    places: int = 0
    """Digits after the decimal point, as written."""
    exponent: int = 0
    """The power of ten that follows these digits in scientific notation."""


@dataclass(frozen=True, slots=True)
class Name:
    """A variable or a constant such as pi."""

    text: str


@dataclass(frozen=True, slots=True)
class Apply:
    """An operation or a function with its arguments."""

    function: str
    arguments: tuple["Tree", ...]


@dataclass(frozen=True, slots=True)
class Collection:
    """A tuple, interval or set by its brackets; a list when both brackets are empty."""

    opening: str
    items: tuple["Tree", ...]
    closing: str


@dataclass(frozen=True, slots=True)
class Relation:
    """Sides joined by = ≈ < > ≤ ≥ ≠ or ∈."""

    sides: tuple["Tree", ...]
    operators: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Quantity:
    """A value with a unit."""

    value: "Tree"
    unit: str


Tree = Number | Name | Apply | Collection | Relation | Quantity


def is_applied(tree: Tree, function: str) -> bool:
    return isinstance(tree, Apply) and tree.function == function


def parse(text: str) -> Tree:
    """The tree of a normalized text; raises NotUnderstood or TooLarge."""
    parser = _Parser(tokenize(text))
    tree = parser.items("", "")
    if parser.next != END:
        parser.fail()
    return tree


class _Parser:
    """Recursive descent: one method per precedence level, weakest binding first."""

    def __init__(self, tokens: list[Token]):
        self._tokens = tokens
        self._at = 0
        self._depth = 0
        self._num_bars = 0
        self._num_summed = 0

    @property
    def next(self) -> Token:
        return self.peek(0)

    def peek(self, ahead: int) -> Token:
        place = self._at + ahead
        return self._tokens[place] if place < len(self._tokens) else END

    @contextmanager
    def nested(self) -> Iterator[None]:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise TooLarge(f"nested deeper than {MAX_DEPTH} levels")
        yield
        self._depth -= 1

    def fail(self) -> NoReturn:
        raise NotUnderstood(f"{self.next.text or 'the end'!r} is unexpected")

    def take(self) -> Token:
        token = self.next
        self._at += 1
        return token

    def takes(self, *texts: str) -> str | None:
        """Consume and return the next symbol if it is one of these."""
        if self.next.kind == "symbol" and self.next.text in texts:
            return self.take().text
        return None

    def items(self, opening: str, closings: str) -> Tree:
        """Items up to a closing bracket; a single item, except in a set, stands for itself."""
        items = [self.relation()]
        while self.takes(",", ";"):
            items.append(self.relation())
        closing = self.takes(*closings) if closings else ""
        if closing is None:
            self.fail()
        if len(items) == 1 and opening != SET_OPEN:
            return items[0]
        if opening == "{":  # plain braces around several items are a set
            opening, closing = SET_OPEN, SET_CLOSE
        return Collection(opening, tuple(items), closing)

    def relation(self) -> Tree:
        sides = [self.union()]
        operators: list[str] = []
        while self.next.kind == "symbol" and self.next.text in _RELATIONS:
            operators.append(self.take().text)
            sides.append(self.union())
        return Relation(tuple(sides), tuple(operators)) if operators else sides[0]

    def union(self) -> Tree:
        parts = [self.ratio()]
        while self.takes(UNION):
            parts.append(self.ratio())
        return Apply("union", tuple(parts)) if len(parts) > 1 else parts[0]

    def ratio(self) -> Tree:
        left = self.sum()
        return Apply("divide", (left, self.sum())) if self.takes(":") else left

    def sum(self) -> Tree:
        total = self.signed(self.product)
        while sign := self.takes("+", "-"):
            total = Apply("add" if sign == "+" else "subtract", (total, self.signed(self.product)))
        return self.with_unit(total)

    def signed(self, operand: Callable[[], Tree]) -> Tree:
        sign = self.takes("+", "-")
        if sign is None:
            return operand()
        with self.nested():
            tree = self.signed(operand)
        return Apply("negate", (tree,)) if sign == "-" else tree

    def with_unit(self, value: Tree) -> Tree:
        """The value, with the words that follow it as its unit."""
        words: list[str] = []
        depth = 0
        while self.next.kind == "word" or (words and self.next.kind != "end"):
            text = self.next.text
            depth += text in _OPENINGS
            if depth == 0 and text in _ENDS_OF_UNITS:
                break
            depth -= text in _CLOSINGS
            words.append(self.take().text)
            if len(words) == 1 and is_unit(text) and self.next.kind == "number":
                rest = _items_of(self.sum())  # 3 hours 30 minutes is a tuple
                return Collection("(", (Quantity(value, text), *rest), ")")
        return Quantity(value, " ".join(words)) if words else value

    def product(self) -> Tree:
        total = self.factor()
        while True:
            if sign := self.takes("*", "/"):
                name = "multiply" if sign == "*" else "divide"
                total = Apply(name, (total, self.signed(self.factor)))
            elif self.begins_factor():
                total = Apply("multiply", (total, self.factor()))
            else:
                return total

    def begins_factor(self, *, of_argument: bool = False) -> bool:
        """Whether an implicit product continues; the argument of sin x in sin x cos x does not."""
        kind, text = self.next.kind, self.next.text
        if kind == "function":
            return not of_argument
        if kind in ("name", "command"):
            return text not in ("rfloor", "rceil")
        if kind == "number":  # as in n(n + 1)2^n; adjacent numbers are no product
            return self.peek(-1).text in (")", "]", "}")
        is_bracket = text in _OPENINGS or text == "∞" or (text == "|" and not self._num_bars)
        return kind == "symbol" and is_bracket and not of_argument

    def factor(self) -> Tree:
        tree = self.base()
        while sign := self.takes("!", "^", "%"):
            if sign == "^":
                tree = Apply("power", (tree, self.exponent()))
            else:
                tree = Apply("factorial" if sign == "!" else "percent", (tree,))
        return tree

    def exponent(self) -> Tree:
        """Powers associate to the right: 2^3^2 is 2^9."""
        with self.nested():
            tree = self.signed(self.base)
            return Apply("power", (tree, self.exponent())) if self.takes("^") else tree

    def base(self) -> Tree:
        with self.nested():
            return self.of_token(self.take())

    def of_token(self, token: Token) -> Tree:
        if token.kind == "number":
            return self.mixed(number(token.text))
        if token.kind == "name":
            return self.name(token.text)
        if token.kind == "function":
            return self.function(token.text)
        if token.kind == "command":
            return self.command(token.text)
        if token.kind == "symbol" and token.text in _OPENINGS:
            return self.items(token.text, _OPENINGS[token.text])
        if token.kind == "symbol" and token.text == "|":
            return self.absolute()
        if token.text in ("∞", "∅"):
            return Name(token.text)
        self._at -= 1
        self.fail()

    def absolute(self) -> Tree:
        self._num_bars += 1
        inner = self.sum()
        self._num_bars -= 1
        if not self.takes("|"):
            self.fail()
        return Apply("abs", (inner,))

    def mixed(self, whole: Number) -> Tree:
        r"""1 1/2 and 1\frac{1}{2} are 3/2; before an improper fraction a number is a factor."""
        if whole.value.denominator != 1 or whole.places:
            return whole
        before = self._at
        fraction = None
        if self.next == Token("command", "frac"):
            fraction = self.of_token(self.take())
        elif self.next.kind == "number" and self.peek(1).text == "/":
            top, _, bottom = self.take(), self.take(), self.take()
            if bottom.kind == "number":
                fraction = Apply("divide", (number(top.text), number(bottom.text)))
        if fraction and _is_proper(fraction):
            return Apply("add", (whole, fraction))
        self._at = before
        return whole

    def name(self, text: str) -> Tree:
        if self.takes("_"):
            text += "_" + self.subscript()
        if text in APPLIED and self.next.text == "(":
            self.take()
            return Apply(f"apply {text}", _items_of(self.items("(", ")")))
        return Name(text)

    def subscript(self) -> str:
        if not self.takes("{"):
            return self.take().text
        parts = []
        while not self.takes("}"):
            if self.next == END:
                self.fail()
            parts.append(self.take().text)
        return "".join(parts)

    def function(self, name: str) -> Tree:
        base = self.signed(self.base) if name == "log" and self.takes("_") else None
        power = self.exponent() if self.takes("^") else None
        if self.next.kind == "symbol" and self.next.text in _OPENINGS:
            argument = self.base()
        else:
            argument = self.signed(self.factor)
            while self.begins_factor(of_argument=True):
                argument = Apply("multiply", (argument, self.factor()))
        if power == Apply("negate", (Number(Fraction(1)),)):  # sin^{-1} is arcsin
            if f"arc{name}" not in FUNCTIONS:
                self.fail()
            return Apply(f"arc{name}", (argument,))
        tree = Apply(name, (argument,) if base is None else (argument, base))
        return Apply("power", (tree, power)) if power else tree

    def command(self, name: str) -> Tree:
        if name in ("frac", "binom"):
            arguments = (self.argument(), self.argument())
            return Apply("divide" if name == "frac" else name, arguments)
        if name == "sqrt":
            degree = self.items("[", "]") if self.takes("[") else Number(Fraction(2))
            return Apply("root", (self.argument(), degree))
        if name in ("lfloor", "lceil"):
            inner = self.sum()
            if self.take().text != {"lfloor": "rfloor", "lceil": "rceil"}[name]:
                self.fail()
            return Apply(name[1:], (inner,))
        if name in ("gcd", "lcm") and self.takes("("):
            return Apply(name, _items_of(self.items("(", ")")))
        if name in SERIES:
            return self.series(name)
        raise NotUnderstood(f"\\{name} is not known")

    def series(self, name: str) -> Tree:
        r"""\sum_{k=1}^{3} k^2, with numbers as bounds."""
        bounds = {}
        while sign := self.takes("_", "^"):
            bounds[sign] = self.argument()
        start = self._at
        num_before = self._num_summed
        body = self.product()
        match bounds:
            case {
                "_": Relation((Name() as index, Number() as first), ("=",)),
                "^": Number() as last,
            }:
                num_tokens = self._at - start + self._num_summed - num_before
                self._num_summed += max(0, int(last.value - first.value) + 1) * num_tokens
            case _:
                raise NotUnderstood(f"the bounds of \\{name} are not numbers")
        if self._num_summed > MAX_SUMMED:
            raise TooLarge(f"more than {MAX_SUMMED} tokens in a sum")
        return Apply(name, (index, first, last, body))

    def argument(self) -> Tree:
        return number(self.take().text) if self.next.kind == "number" else self.base()


def number(text: str) -> Number:
    digits, _, exponent = text.lower().partition("e")
    if len(exponent.lstrip("+-")) > 4 or abs(int(exponent or 0)) > MAX_EXPONENT:
        raise TooLarge(f"ten to the power of {exponent[:10]}")
    places = len(digits.partition(".")[2])
    power = int(exponent or 0)
    return Number(Fraction(digits) * Fraction(10) ** power, places, power)


def _items_of(tree: Tree) -> tuple[Tree, ...]:
    return tree.items if isinstance(tree, Collection) else (tree,)


def _is_proper(fraction: Tree) -> bool:
    parts = fraction.arguments
    is_whole = all(isinstance(p, Number) and p.value.denominator == 1 for p in parts)
    return is_whole and 0 < parts[0].value < parts[1].value
