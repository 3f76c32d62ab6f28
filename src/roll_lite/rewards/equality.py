r"""Whether two answers are the same: by their text, by their value, item by item.

Words are compared as text, and everything else that we read as trees. A unit counts only against
another unit, and `x = 5` is 5.
"""

import re
from dataclasses import dataclass
from itertools import product
from typing import Literal

from roll_lite.rewards import units
from roll_lite.rewards.evaluation import Undefined, names_of
from roll_lite.rewards.expression import parse
from roll_lite.rewards.notation import SET_OPEN, plain, readings
from roll_lite.rewards.numeric import close, same_value, values_at_points
from roll_lite.rewards.relations import as_interval, is_equation, pointing_right, subject_and_value
from roll_lite.rewards.tokens import NotUnderstood, TooLarge, tokens_of
from roll_lite.rewards.trees import Call, Group, Measured, Name, Number, Relation, Tree

MAX_CHARACTERS = 1000
MAX_UNORDERED = 40
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
    found, truth = plain(found), plain(truth)
    if not found:
        return Verdict("different", "the answer is empty")
    if _text_key(found) == _text_key(truth):
        return Verdict("equal", "same text")
    if _is_phrase(truth) or _is_phrase(found):
        return Verdict("different", "other words")
    if option := re.fullmatch(r"\(?\s*([A-J])\s*\)?", truth):
        return _compare_choice(found, option[1])
    return _compare_readings(*_without_bases(found, truth))


def _text_key(text: str) -> str:
    """What texts share that differ in spaces, braces around one sign, and words in their case."""
    text = re.sub(r"(?<![A-Za-z0-9]) | (?![A-Za-z0-9])", "", re.sub(r"\s+", " ", text))
    text = re.sub(r"\{(\w)\}", r"\1", text)
    return SAME_WORDS.get(text.lower(), text.lower()) if _is_phrase(text) else text


def _is_phrase(text: str) -> bool:
    """Whether it is words and nothing else, which are compared as text."""
    if not re.fullmatch(r"[A-Za-z]{2,}(?:[ -][A-Za-z]+){0,20}", text):
        return False
    return all(token.kind == "word" for token in tokens_of(text.replace("-", " ")))


def _compare_choice(found: str, letter: str) -> Verdict:
    """The letter of an option, alone or before the option's text."""
    match = re.match(r"\(?\s*([A-Ja-j])\s*(?:\)|[.:]|$)", found)
    if match is None:
        return Verdict("not comparable", f"no option, where {letter} is true")
    return Verdict("equal" if match[1].upper() == letter else "different", f"option {match[1]}")


def _without_bases(found: str, truth: str) -> tuple[str, str]:
    """43_5 as 43 beside an answer without a base, which the question has named."""
    pattern = r"(\d+)\s*_\s*\{?\s*(\d+)\s*\}?"
    a, b = re.fullmatch(pattern, found), re.fullmatch(pattern, truth)
    if a and b:
        return (found, truth) if int(a[2]) != int(b[2]) else (a[1], b[1])
    return (a[1] if a else found), (b[1] if b else truth)


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
    found = _with_unit(found, truth)
    if isinstance(found, Measured) or isinstance(truth, Measured):
        return _same_measured(found, truth)
    if isinstance(found, Relation) or isinstance(truth, Relation):
        return _same_relation(found, truth)
    if _is_union(found) or _is_union(truth):
        return _same_set(*map(_parts_of_union, (found, truth)))
    if isinstance(found, Group) or isinstance(truth, Group):
        return _same_group(found, truth)
    return same_value(found, truth)


def _is_union(tree: Tree) -> bool:
    return isinstance(tree, Call) and tree.function == "union"


def _parts_of_union(tree: Tree) -> tuple[Tree, ...]:
    """The intervals of a union, or the relations of a list such as `x < 1, x > 2`."""
    if isinstance(tree, Group) and not tree.opening:
        return tree.items
    return tree.arguments if _is_union(tree) else (tree,)


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
    pairs = [
        pair for pair in values_at_points(a, b) if not (close(pair[0], 0) and close(pair[1], 0))
    ]
    if len(pairs) < 2:
        raise NotUnderstood("an equation that always holds")
    x, y = pairs[0]
    return x != 0 and y != 0 and all(close(a * y, b * x) for a, b in pairs)


def _same_group(found: Tree, truth: Tree) -> bool:
    a, b = (t if isinstance(t, Group) else Group("", (t,), "") for t in (found, truth))
    kinds = {a.opening, b.opening}
    if SET_OPEN in kinds:
        return kinds <= {SET_OPEN, ""} and _same_set(a.items, b.items)
    if len(a.items) != len(b.items):
        return False
    if kinds == {""}:
        return _same_list(a.items, b.items)
    if "" not in kinds and (a.opening, a.closing) != (b.opening, b.closing):
        return False
    return all(same(x, y) for x, y in zip(a.items, b.items, strict=True))


def _same_set(found: tuple[Tree, ...], truth: tuple[Tree, ...]) -> bool:
    """Each has an equal on the other side."""
    _check_size(found, truth)
    matches = [[same(a, b) for b in truth] for a in found]
    return all(map(any, matches)) and all(map(any, zip(*matches, strict=True)))


def _same_list(found: tuple[Tree, ...], truth: tuple[Tree, ...]) -> bool:
    """The same items equally often, in any order."""
    _check_size(found, truth)
    left = list(truth)
    for item in found:
        match = next((i for i, other in enumerate(left) if same(item, other)), None)
        if match is None:
            return False
        del left[match]
    return not left


def _check_size(*items: tuple[Tree, ...]) -> None:
    if max(map(len, items)) > MAX_UNORDERED:
        raise TooLarge(f"more than {MAX_UNORDERED} items without order")


def _with_unit(found: Tree, truth: Tree) -> Tree:
    """`5 m` as a length, where the truth has no variable."""
    is_product = isinstance(found, Call) and found.function == "multiply"
    if is_product and isinstance(found.arguments[0], Number) and not names_of(truth):
        number, unit = found.arguments
        if isinstance(unit, Call) and unit.function == "power":
            unit = unit.arguments[0]
        if isinstance(unit, Name) and unit.text in units.LETTERS:
            return Measured(number, unit.text)
    return found
