"""Whether two answers are the same: as text, as values, or item by item.

Words are compared as text, everything else as trees. Units count only if both answers have one,
and `x = 5` is the same answer as 5.
"""

import re
from dataclasses import dataclass
from itertools import product
from typing import Literal

from roll_lite.rewards.maths.notation import (
    SET_OPEN,
    UNIT_LETTERS,
    NotUnderstood,
    TooLarge,
    normalize,
    readings,
    tokenize,
    units_differ,
)
from roll_lite.rewards.maths.parser import (
    Apply,
    Collection,
    Name,
    Number,
    Quantity,
    Relation,
    Tree,
    is_applied,
    parse,
)
from roll_lite.rewards.maths.values import (
    CONSTANTS,
    Undefined,
    agree,
    close,
    names_of,
    same_value,
    values_at_points,
)

MAX_CHARACTERS = 1000
MAX_UNORDERED = 40
_SAME_WORDS = {"true": "yes", "false": "no"}
_FLIPPED = {">": "<", "≥": "≤"}
_COORDINATES = {"x", "y", "z"}
_INFINITY = Name("∞")
_MINUS_INFINITY = Apply("negate", (_INFINITY,))

Kind = Literal["equal", "different", "not comparable", "refused"]


@dataclass(frozen=True, slots=True)
class Verdict:
    kind: Kind
    """`not comparable`: an answer is in no notation that we read; `refused`: it is too large."""
    why: str
    comparer: Literal["roll_lite", "math-verify"] = "roll_lite"


def compare(answer: str, truth: str) -> Verdict:
    """Whether an answer is the true one."""
    if max(len(answer), len(truth)) > MAX_CHARACTERS:
        return Verdict("refused", f"longer than {MAX_CHARACTERS} characters")
    answer, truth = normalize(answer), normalize(truth)
    if not answer:
        return Verdict("different", "the answer is empty")
    if _text_key(answer) == _text_key(truth):
        return Verdict("equal", "same text")
    if _is_phrase(truth) or _is_phrase(answer):
        return Verdict("different", "different words")
    if option := re.fullmatch(r"\(?\s*([A-J])\s*\)?", truth):
        return _compare_choice(answer, option[1])
    return _compare_readings(*_without_bases(answer, truth))


def _text_key(text: str) -> str:
    """The text without insignificant spaces and braces; phrases in lower case."""
    text = re.sub(r"(?<![A-Za-z0-9]) | (?![A-Za-z0-9])", "", re.sub(r"\s+", " ", text))
    text = re.sub(r"\{(\w)\}", r"\1", text)
    return _SAME_WORDS.get(text.lower(), text.lower()) if _is_phrase(text) else text


def _is_phrase(text: str) -> bool:
    """Whether the text is only words, which are compared as text; `now` is one, `abc` is not."""
    if not re.fullmatch(r"[A-Za-z]{2,}(?:[ -][A-Za-z]+){0,20}", text):
        return False
    text = re.sub(r"\b[^\WaeiouAEIOU][aeiou][a-z]\b", "word", text.replace("-", " "))
    return all(token.kind == "word" for token in tokenize(text))


def _compare_choice(answer: str, letter: str) -> Verdict:
    """Compare with the letter of an option; the option's text may follow the letter."""
    match = re.match(r"\(?\s*([A-Ja-j])\s*(?:\)|[.:]|$)", answer)
    if match is None:
        return Verdict("not comparable", f"no option letter; the truth is {letter}")
    return Verdict("equal" if match[1].upper() == letter else "different", f"option {match[1]}")


def _without_bases(answer: str, truth: str) -> tuple[str, str]:
    """Read 43_5 as 43 if the other answer names no base or the same one."""
    pattern = r"([0-9]+)\s*_\s*\{?\s*([0-9]+)\s*\}?"
    a, b = re.fullmatch(pattern, answer), re.fullmatch(pattern, truth)
    if a and b:
        return (answer, truth) if int(a[2]) != int(b[2]) else (a[1], b[1])
    return (a[1] if a else answer), (b[1] if b else truth)


def _compare_readings(answer: str, truth: str) -> Verdict:
    """`equal` if some pair of readings is equal, else the verdict of the first pair."""
    verdicts = []
    for a, b in product(readings(answer), readings(truth)):
        try:
            is_same = _same(_parse(a), _parse(b))
            verdicts.append(Verdict("equal" if is_same else "different", f"{a} against {b}"))
        except (NotUnderstood, Undefined) as error:
            verdicts.append(Verdict("not comparable", str(error)))
        except (TooLarge, OverflowError) as error:  # exact, but too large for a float
            verdicts.append(Verdict("refused", str(error)))
    return next((v for v in verdicts if v.kind == "equal"), verdicts[0])


def _parse(text: str) -> Tree:
    """Parse a text; 1 ± 2 is the list of 3 and -1, and 0, ±1 that of 0, 1 and -1."""
    if "±" not in text:
        return parse(text)
    upper = parse(text.replace("±", "+").replace("∓", "-"))
    lower = parse(text.replace("±", "-").replace("∓", "+"))
    if isinstance(upper, Collection) and upper.opening in ("", SET_OPEN):
        pairs = zip(upper.items, lower.items, strict=True)
        items = (item for pair in pairs for item in dict.fromkeys(pair))
        return Collection(upper.opening, tuple(items), upper.closing)
    return Collection("", (upper, lower), "")


def _same(answer: Tree, truth: Tree) -> bool:
    """Whether two trees are the same answer; raises if that cannot be decided."""
    answer = _with_unit(answer, truth)
    both = (answer, truth)
    kinds = {*map(type, both)}
    if Quantity in kinds:
        return _same_quantity(answer, truth)
    if Relation in kinds:
        return _same_relation(answer, truth)
    if any(is_applied(tree, "union") for tree in both):
        return _same_set(*map(_parts_of_union, both))
    if Collection in kinds and not any(map(_calculates_with_tuples, both)):
        return _same_collection(answer, truth)
    return same_value(answer, truth)


def _parts_of_union(tree: Tree) -> tuple[Tree, ...]:
    """The intervals of a union, or the relations of a list such as `x < 1, x > 2`."""
    if isinstance(tree, Collection) and not tree.opening:
        return tree.items
    return tree.arguments if is_applied(tree, "union") else (tree,)


def _calculates_with_tuples(tree: Tree) -> bool:
    if not isinstance(tree, Apply):
        return False
    return any(isinstance(t, Collection) or _calculates_with_tuples(t) for t in tree.arguments)


def _same_quantity(answer: Tree, truth: Tree) -> bool:
    names = [tree.unit if isinstance(tree, Quantity) else "" for tree in (answer, truth)]
    return not units_differ(*names) and _same(_without_unit(answer), _without_unit(truth))


def _without_unit(tree: Tree) -> Tree:
    return tree.value if isinstance(tree, Quantity) else tree


def _same_relation(answer: Tree, truth: Tree) -> bool:
    answer, truth = _without_membership(answer), _without_membership(truth)
    if isinstance(answer, Relation) and isinstance(truth, Relation):
        return _same_relations(answer, truth)
    if isinstance(answer, Relation):
        return any(_same(value, truth) for value in _values_of_relation(answer, like=truth))
    if isinstance(truth, Relation):
        values = () if _is_curve(truth) else _values_of_relation(truth, like=answer)
        return any(_same(answer, value) for value in values)
    return _same(answer, truth)


def _without_membership(tree: Tree) -> Tree:
    """The set S of `x ∈ S`."""
    is_membership = isinstance(tree, Relation) and tree.operators == ("∈",)
    return tree.sides[1] if is_membership else tree


def _is_curve(truth: Relation) -> bool:
    """Whether it is an equation such as x + y = 5, whose right side is no answer."""
    sums = [t for t in truth.sides if any(is_applied(t, f) for f in ("add", "subtract", "power"))]
    has_number = any(map(_is_constant, truth.sides))
    return has_number and any(set() < names_of(side) <= _COORDINATES for side in sums)


def _values_of_relation(relation: Relation, *, like: Tree) -> tuple[Tree, ...]:
    """The interval or values that a relation gives, whichever the other answer is."""
    is_interval = isinstance(like, Collection | Apply)
    if is_interval and (interval := _as_interval(relation)):
        return (interval,)
    if is_interval and not _is_equation(relation):
        raise NotUnderstood("an inequality that is not solved")
    return (_subject_and_values(relation) or (None, ()))[1]


def _same_relations(answer: Relation, truth: Relation) -> bool:
    if _is_equation(answer) and _is_equation(truth):
        pairs = _subject_and_values(answer), _subject_and_values(truth)
        if None not in pairs and _same(pairs[0][0], pairs[1][0]):
            return any(_same(a, b) for a, b in product(pairs[0][1], pairs[1][1]))
        if len(answer.sides) != 2 or len(truth.sides) != 2:
            raise NotUnderstood("a chain of equations")
        return _is_proportional(answer, truth)
    if len(answer.operators) != len(truth.operators):
        raise NotUnderstood("relations of different forms")
    answer, truth = _pointing_right(answer), _pointing_right(truth)
    if answer.operators != truth.operators:
        return False
    pairs = zip(answer.sides, truth.sides, strict=True)
    is_same = all(_same(a, b) for a, b in pairs)
    return is_same or (len(answer.sides) == 2 and _is_proportional(answer, truth))


def _is_proportional(answer: Relation, truth: Relation) -> bool:
    """Whether the differences of the sides are proportional: x < 1 and -2x > -2."""
    a, b = (Apply("subtract", relation.sides) for relation in (answer, truth))
    if not names_of(a) or not names_of(b):
        return False
    pairs = [
        pair for pair in values_at_points(a, b) if not (close(pair[0], 0) and close(pair[1], 0))
    ]
    if len(pairs) < 2 or any(isinstance(value, tuple) for value in pairs[0]):
        raise NotUnderstood("an identity, or a relation of vectors")
    x, y = pairs[0]
    if x == 0 or y == 0 or not all(close(a * y, b * x) for a, b in pairs):
        return False
    return truth.operators[0] not in "<≤" or (x / y).real > 0


def _same_collection(answer: Tree, truth: Tree) -> bool:
    a, b = (t if isinstance(t, Collection) else Collection("", (t,), "") for t in (answer, truth))
    kinds = {a.opening, b.opening}
    if SET_OPEN in kinds:
        return kinds <= {SET_OPEN, ""} and _same_set(a.items, b.items)
    if len(a.items) != len(b.items):
        return False
    if kinds == {""}:
        return _same_list(a.items, b.items)
    if "" not in kinds and (a.opening, a.closing) != (b.opening, b.closing):
        return False
    return all(_same(x, y) for x, y in zip(a.items, b.items, strict=True))


def _same_set(answer: tuple[Tree, ...], truth: tuple[Tree, ...]) -> bool:
    """Every item equals some item of the other set."""
    _check_size(answer, truth)
    matches = [[_same(a, b) for b in truth] for a in answer]
    return all(map(any, matches)) and all(map(any, zip(*matches, strict=True)))


def _same_list(answer: tuple[Tree, ...], truth: tuple[Tree, ...]) -> bool:
    """The same items with the same multiplicity, in any order."""
    _check_size(answer, truth)
    left = list(truth)
    for item in answer:
        match = next((i for i, other in enumerate(left) if _same(item, other)), None)
        if match is None:
            return False
        del left[match]
    return not left


def _check_size(*items: tuple[Tree, ...]) -> None:
    if max(map(len, items)) > MAX_UNORDERED:
        raise TooLarge(f"more than {MAX_UNORDERED} items in a set or list")


def _with_unit(answer: Tree, truth: Tree) -> Tree:
    """Read `5 m` as a length if the truth has no variable."""
    if not is_applied(answer, "multiply") or names_of(truth):
        return answer
    number, unit = answer.arguments
    if is_applied(unit, "power"):
        unit = unit.arguments[0]
    is_unit = isinstance(unit, Name) and unit.text in UNIT_LETTERS
    return Quantity(number, unit.text) if is_unit and isinstance(number, Number) else answer


def _is_equation(relation: Relation) -> bool:
    return set(relation.operators) <= {"=", "≈"}


def _subject_and_values(relation: Relation) -> tuple[Tree, tuple[Tree, ...]] | None:
    """(x, (10/2, 5)) for `x = 10/2 = 5` and `5 = 10/2 = x`; None for an equation such as x + 1 = 5.

    Numbers that contradict each other are no value. Of others the first and the last count: what is
    between may differ from both by rounding.
    """
    sides = relation.sides
    if _is_of_names(sides[-1]) and not names_of(sides[0]):
        sides = sides[::-1]
    if not _is_equation(relation):
        return None
    if not _is_subject(sides[0]):
        is_identity = all(same_value(side, sides[-1]) for side in sides[:-1])
        return (sides[0], sides[-1:]) if is_identity else None
    if not _is_constant(sides[-1]):
        is_number = _is_constant(sides[0]) and not isinstance(sides[0], Name)
        return None if is_number else (sides[0], sides[-1:])
    is_rounded = "≈" in relation.operators
    last = _without_unit(sides[-1])
    numbers = [side for side in sides if _is_constant(side)]
    wrong = [n for n in numbers if not agree(_without_unit(n), last, is_rounded=is_rounded)]
    if wrong == [sides[0]] and isinstance(sides[0], Name):  # e = 1/2: here e is a variable
        return sides[0], (numbers[1], numbers[-1])
    return sides[0], () if wrong else (numbers[0], numbers[-1])


def _is_subject(tree: Tree) -> bool:
    """Whether it is x, f(x), AB, 2x, a + b, |AB|, (x, y) or a constant, but not x + 1."""
    if isinstance(tree, Collection):
        return all(map(_is_subject, tree.items))
    if is_applied(tree, "multiply"):
        return all(map(_is_subject, tree.arguments))
    is_call = isinstance(tree, Apply) and tree.function.startswith("apply ")
    return is_call or _is_of_names(tree) or _is_constant(tree)


def _is_of_names(tree: Tree) -> bool:
    """Whether it is a name, or a sum, product, power or absolute value of names."""
    if not isinstance(tree, Apply):
        return isinstance(tree, Name)
    if tree.function == "power":
        return _is_of_names(tree.arguments[0])
    is_known = tree.function in ("add", "subtract", "multiply", "abs")
    return is_known and all(map(_is_of_names, tree.arguments))


def _is_constant(tree: Tree) -> bool:
    """Whether it is a number, perhaps with a unit."""
    if isinstance(tree, Apply):
        is_known = not tree.function.startswith("apply ")
        return is_known and all(map(_is_constant, tree.arguments))
    if isinstance(tree, Name):
        return tree.text in CONSTANTS
    return isinstance(tree, Number) or (isinstance(tree, Quantity) and _is_constant(tree.value))


def _pointing_right(relation: Relation) -> Relation:
    """The relation with < and ≤ instead of > and ≥."""
    if not set(relation.operators) <= _FLIPPED.keys():
        return relation
    return Relation(relation.sides[::-1], tuple(_FLIPPED[o] for o in relation.operators[::-1]))


def _as_interval(relation: Relation) -> Collection | Apply | None:
    """The interval of a bounded variable: (2, ∞) for x > 2; None for other relations."""
    relation = _pointing_right(relation)
    sides, operators = relation.sides, relation.operators
    if operators == ("≠",) and isinstance(sides[0], Name):
        below, above = (_MINUS_INFINITY, sides[1]), (sides[1], _INFINITY)
        return Apply("union", (Collection("(", below, ")"), Collection("(", above, ")")))
    if not set(operators) <= {"<", "≤"}:
        return None
    names = [i for i, side in enumerate(sides) if isinstance(side, Name) and side != _INFINITY]
    if len(sides) == 2 and names == [0]:
        sides, operators = (_MINUS_INFINITY, *sides), ("<", *operators)
    elif len(sides) == 2 and names == [1]:
        sides, operators = (*sides, _INFINITY), (*operators, "<")
    elif len(sides) != 3 or names != [1]:
        return None
    opening, closing = "[" if operators[0] == "≤" else "(", "]" if operators[1] == "≤" else ")"
    return Collection(opening, (sides[0], sides[2]), closing)
