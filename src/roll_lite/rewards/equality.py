r"""Whether two answers are the same: by their text, by their value, item by item.

Expressions with variables are compared at several rational points; no two that differ agree at all
of them unless they were made to. Points are positive where logs or roots occur, so that \ln x^2 is
2 \ln x. Rationals are compared exactly, other numbers to eleven digits, and decimals as
`_rounds` says. A percentage is n or n/100, a unit counts only against another unit, `x = 5` is 5.
"""

import math
import re
from dataclasses import dataclass
from fractions import Fraction
from itertools import product
from random import Random
from typing import Literal

from roll_lite.rewards import units
from roll_lite.rewards.evaluation import Undefined, Value, evaluate, functions_of, names_of
from roll_lite.rewards.expression import parse
from roll_lite.rewards.notation import SET_OPEN, plain, readings, text_key
from roll_lite.rewards.relations import as_interval, is_equation, pointing_right, subject_and_value
from roll_lite.rewards.tokens import NotUnderstood, TooLarge, tokens_of
from roll_lite.rewards.trees import Call, Group, Measured, Name, Number, Relation, Tree

MAX_CHARACTERS = 1000
MAX_UNORDERED = 40
NUM_POINTS = 6
TOLERANCE = 1e-11
SAME_WORDS = {"true": "yes", "false": "no"}

Kind = Literal["equal", "different", "not comparable", "refused"]


@dataclass(frozen=True, slots=True)
class Verdict:
    kind: Kind
    """`not comparable`: one of them is in no notation that we read; `refused`: it is too large."""
    why: str


def compare(found: str, truth: str) -> Verdict:
    """Whether the answer that was found is the true one."""
    if max(len(found), len(truth)) > MAX_CHARACTERS:
        return Verdict("refused", f"longer than {MAX_CHARACTERS} characters")
    keys = [SAME_WORDS.get(key, key) for key in map(text_key, (found, truth))]
    if not keys[0]:
        return Verdict("different", "the answer is empty")
    if keys[0] == keys[1]:
        return Verdict("equal", "same text")
    if _is_phrase(truth) or _is_phrase(found):
        return Verdict("different", "other words")
    if re.fullmatch(r"\(?\s*[A-J]\s*\)?", plain(truth)):
        return _compare_choice(found, plain(truth).strip("() "))
    return _compare_readings(*(_without_base(plain(text)) for text in (found, truth)))


def _is_phrase(text: str) -> bool:
    """Whether it is words and nothing else, which are compared as text."""
    words = plain(text)
    if not re.fullmatch(r"[A-Za-z]{2,}(?:[ -][A-Za-z]+){0,20}", words):
        return False
    return all(token.kind == "word" for token in tokens_of(words.replace("-", " ")))


def _compare_choice(found: str, letter: str) -> Verdict:
    """The letter of an option, alone or before the option's text."""
    match = re.match(r"\(?\s*([A-J])\s*(?:\)|[.:,]|$)", plain(found))
    if match is None:
        return Verdict("not comparable", f"no option, where {letter} is true")
    return Verdict("equal" if match[1] == letter else "different", f"option {match[1]}")


def _without_base(text: str) -> str:
    """43_5 as 43: the base is a unit."""
    match = re.fullmatch(r"(\d+)\s*_\s*\{?\s*(\d+)\s*\}?", text)
    return match[1] if match else text


def _compare_readings(found: str, truth: str) -> Verdict:
    """Equal if one way to read both is; else the verdict of the first way."""
    verdicts = []
    for a, b in product(readings(found), readings(truth)):
        try:
            is_same = same(parse_signs(a), parse_signs(b))
            verdicts.append(Verdict("equal" if is_same else "different", f"{a} against {b}"))
        except (NotUnderstood, Undefined) as error:
            verdicts.append(Verdict("not comparable", str(error)))
        except (TooLarge, OverflowError) as error:  # exact, but beyond what a float holds
            verdicts.append(Verdict("refused", str(error)))
    return next((v for v in verdicts if v.kind == "equal"), verdicts[0])


def parse_signs(text: str) -> Tree:
    """The tree of a text, where 1 ± 2 is the list of 3 and -1."""
    if "±" not in text:
        return parse(text)
    upper = parse(text.replace("±", "+").replace("∓", "-"))
    lower = parse(text.replace("±", "-").replace("∓", "+"))
    return Group("", (upper, lower), "")


def same(found: Tree, truth: Tree) -> bool:
    """Whether two trees are the same answer; raises where that cannot be told."""
    found, truth = _with_unit(found, truth), _with_unit(truth, found)
    if isinstance(found, Measured) or isinstance(truth, Measured):
        return _same_measured(found, truth)
    if isinstance(found, Relation) or isinstance(truth, Relation):
        return _same_relation(found, truth)
    if isinstance(found, Group) or isinstance(truth, Group):
        return _same_group(found, truth)
    if _is_union(found) or _is_union(truth):
        both = _is_union(found) and _is_union(truth)
        return both and _same_in_any_order(found.arguments, truth.arguments)
    return _same_value(found, truth)


def _same_measured(found: Tree, truth: Tree) -> bool:
    values = [tree.value if isinstance(tree, Measured) else tree for tree in (found, truth)]
    names = [tree.unit if isinstance(tree, Measured) else "" for tree in (found, truth)]
    return not units.differ(*names) and same(*values)


def _same_relation(found: Tree, truth: Tree) -> bool:
    found, truth = _without_membership(found), _without_membership(truth)
    if isinstance(found, Relation) and isinstance(truth, Relation):
        return _same_relations(found, truth)
    if isinstance(found, Relation):
        found = _said(found, of=truth)
    elif isinstance(truth, Relation):
        truth = _said(truth, of=found)
    return same(found, truth)


def _without_membership(tree: Tree) -> Tree:
    """S of `x ∈ S`."""
    is_membership = isinstance(tree, Relation) and tree.operators == ("∈",)
    return tree.sides[1] if is_membership else tree


def _said(relation: Relation, *, of: Tree) -> Tree:
    """The value that a relation gives, in the form of an answer that is none."""
    if isinstance(of, Group | Call) and (interval := as_interval(relation)):
        return interval
    pair = subject_and_value(relation)
    if pair is None:
        raise NotUnderstood("one of them is a relation and the other is not")
    return pair[1]


def _same_relations(found: Relation, truth: Relation) -> bool:
    if is_equation(found) and is_equation(truth):
        pairs = subject_and_value(found), subject_and_value(truth)
        if None not in pairs and same(pairs[0][0], pairs[1][0]):
            return same(pairs[0][1], pairs[1][1])
        return _same_equation(found, truth)
    found, truth = pointing_right(found), pointing_right(truth)
    if found.operators == truth.operators:
        return all(same(a, b) for a, b in zip(found.sides, truth.sides, strict=True))
    if len(found.operators) == len(truth.operators):
        return False
    raise NotUnderstood("relations of another form")


def _same_equation(found: Relation, truth: Relation) -> bool:
    """Equations are the same when the differences of their sides are proportional."""
    if len(found.sides) != 2 or len(truth.sides) != 2:
        raise NotUnderstood("a chain of equations")
    a, b = (Call("subtract", relation.sides) for relation in (found, truth))
    pairs = [pair for pair in _values(a, b) if not (_close(pair[0], 0) and _close(pair[1], 0))]
    if len(pairs) < 2:
        raise NotUnderstood("an equation that always holds")
    x, y = pairs[0]
    return x != 0 and y != 0 and all(_close(a * y, b * x) for a, b in pairs)


def _same_group(found: Tree, truth: Tree) -> bool:
    a, b = (t if isinstance(t, Group) else Group("", (t,), "") for t in (found, truth))
    is_one_value = not (isinstance(found, Group) and isinstance(truth, Group))
    kinds = {a.opening, b.opening}
    if SET_OPEN in kinds or kinds == {""}:
        if not kinds <= {SET_OPEN, ""}:
            return False
        if SET_OPEN not in kinds and len(a.items) != len(b.items):
            return False
        return _same_in_any_order(a.items, b.items)
    if is_one_value or len(a.items) != len(b.items):
        return False
    ends = [(g.opening, g.closing) for g in (a, b)]
    if ("", "") not in ends and ends[0] != ends[1]:
        return False
    return all(same(x, y) for x, y in zip(a.items, b.items, strict=True))


def _same_in_any_order(found: tuple[Tree, ...], truth: tuple[Tree, ...]) -> bool:
    """Each has an equal on the other side."""
    if max(len(found), len(truth)) > MAX_UNORDERED:
        raise TooLarge(f"more than {MAX_UNORDERED} items without order")
    matches = [[same(a, b) for b in truth] for a in found]
    return all(map(any, matches)) and all(map(any, zip(*matches, strict=True)))


def _same_value(found: Tree, truth: Tree) -> bool:
    if _is_percent(found) != _is_percent(truth):
        return any(_same_value(a, b) for a, b in product(*map(_percent_readings, (found, truth))))
    if names_of(found) | names_of(truth):
        return all(_close(a, b) for a, b in _values(found, truth))
    a, b = evaluate(found, {}), evaluate(truth, {})
    if a != a or b != b:
        raise Undefined("not a number")
    return _close(a, b) or _rounds(found, truth, a, b)


def _values(found: Tree, truth: Tree) -> list[tuple[Value, Value]]:
    """Both at points where both are defined; too few of these tell nothing."""
    names = sorted(names_of(found) | names_of(truth))
    functions = functions_of(found) | functions_of(truth)
    is_positive = bool(functions & {"ln", "log", "lg", "root"})
    random, pairs = Random(7), []
    for _ in range(3 * NUM_POINTS):
        signs = (1,) if is_positive or len(pairs) % 2 == 0 else (-1, 1)
        point = {
            name: Fraction(random.choice(signs) * random.randrange(3, 40), random.randrange(7, 20))
            for name in names
        }
        try:
            pairs.append((evaluate(found, point), evaluate(truth, point)))
        except (Undefined, TooLarge) as error:
            failure = error
            continue
        if len(pairs) == NUM_POINTS:
            return pairs
    raise failure


def _close(a: Value, b: Value) -> bool:
    if isinstance(a, Fraction) and isinstance(b, Fraction):
        return a == b
    if a in (math.inf, -math.inf) or b in (math.inf, -math.inf):
        return a == b
    a, b = complex(a), complex(b)
    scale = max(abs(a), abs(b))
    if 0 in (a, b):  # sin(pi) is not quite 0
        return scale < 1e-12
    return abs(a - b) <= TOLERANCE * scale


def _rounds(found: Tree, truth: Tree, a: Value, b: Value) -> bool:
    """Decimals stand for what rounds to them: with 3 places in the truth, or with 6 in a reply.

    A decimal reply to a decimal truth needs its 6 places in both.
    """
    if isinstance(a, complex) or isinstance(b, complex):
        return False
    reply_places, true_places = _places(found), _places(truth)
    if reply_places and true_places:
        places = min(reply_places, true_places)
        is_allowed = places >= 6
    else:
        places = reply_places or true_places
        is_allowed = places >= (6 if reply_places else 3)
    return is_allowed and abs(a - b) <= 0.5 * 10.0**-places


def _places(tree: Tree) -> int:
    if isinstance(tree, Call) and tree.function == "negate":
        return _places(tree.arguments[0])
    return tree.places if isinstance(tree, Number) else 0


def _is_union(tree: Tree) -> bool:
    return isinstance(tree, Call) and tree.function == "union"


def _is_percent(tree: Tree) -> bool:
    if isinstance(tree, Call) and tree.function == "negate":
        return _is_percent(tree.arguments[0])
    return isinstance(tree, Call) and tree.function == "percent"


def _percent_readings(tree: Tree) -> list[Tree]:
    """50% as one half and as 50."""
    if not _is_percent(tree):
        return [tree]
    if tree.function == "negate":
        return [Call("negate", (t,)) for t in _percent_readings(tree.arguments[0])]
    return [Call("divide", (tree.arguments[0], Number(Fraction(100)))), tree.arguments[0]]


def _with_unit(tree: Tree, other: Tree) -> Tree:
    """`5 m` as a length, where the other answer has no variable."""
    is_product = isinstance(tree, Call) and tree.function == "multiply"
    if is_product and isinstance(tree.arguments[0], Number) and not names_of(other):
        number, unit = tree.arguments
        if isinstance(unit, Call) and unit.function == "power":
            unit = unit.arguments[0]
        if isinstance(unit, Name) and unit.text in units.LETTERS:
            return Measured(number, unit.text)
    return tree
