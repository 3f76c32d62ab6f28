"""Equations and inequalities: what they say about one value, and their common forms."""

from roll_lite.rewards.evaluation import names_of
from roll_lite.rewards.trees import Call, Group, Name, Number, Relation, Tree

_FLIPPED = {"<": ">", ">": "<", "≤": "≥", "≥": "≤"}
_INFINITY = Name("∞")


def is_equation(relation: Relation) -> bool:
    return set(relation.operators) == {"="}


def subject_and_value(relation: Relation) -> tuple[Tree, Tree] | None:
    """x and 5 of `x = 5` and of `5 = x`; nothing of an equation like x + y = 5."""
    if not is_equation(relation):
        return None
    first, last = relation.sides[0], relation.sides[-1]
    if isinstance(last, Name) and not names_of(first):
        return last, first
    return (first, last) if _is_named(first) else None


def _is_named(tree: Tree) -> bool:
    """x, f(x), AB, (x, y), or a sum of numbers as in 2 + 3 = 5; not x + y."""
    if isinstance(tree, Name):
        return True
    if isinstance(tree, Group):
        return all(map(_is_named, tree.items))
    if isinstance(tree, Call):
        if tree.function.startswith("apply "):
            return True
        is_product = tree.function == "multiply"
        return (is_product and all(map(_is_named, tree.arguments))) or _is_constant(tree)
    return isinstance(tree, Number)


def _is_constant(tree: Tree) -> bool:
    if isinstance(tree, Call):
        return all(map(_is_constant, tree.arguments))
    return isinstance(tree, Number)


def pointing_right(relation: Relation) -> Relation:
    """With < and ≤ instead of > and ≥."""
    if not set(relation.operators) <= {">", "≥"}:
        return relation
    return Relation(relation.sides[::-1], tuple(_FLIPPED[o] for o in relation.operators[::-1]))


def as_interval(relation: Relation) -> Group | Call | None:
    """The interval of a variable between bounds: x > 2 is (2, ∞)."""
    relation = pointing_right(relation)
    sides, operators = relation.sides, relation.operators
    if operators == ("≠",) and isinstance(sides[0], Name):
        below, above = _interval(None, "<", "<", sides[1]), _interval(sides[1], "<", "<", None)
        return Call("union", (below, above))
    if not set(operators) <= {"<", "≤"}:
        return None
    names = [i for i, side in enumerate(sides) if isinstance(side, Name) and side != _INFINITY]
    if len(sides) == 2 and names == [0]:
        return _interval(None, "<", operators[0], sides[1])
    if len(sides) == 2 and names == [1]:
        return _interval(sides[0], operators[0], "<", None)
    if len(sides) == 3 and names == [1]:
        return _interval(sides[0], operators[0], operators[1], sides[2])
    return None


def _interval(low: Tree | None, from_low: str, to_high: str, high: Tree | None) -> Group:
    opening, closing = "[" if from_low == "≤" else "(", "]" if to_high == "≤" else ")"
    low = Call("negate", (_INFINITY,)) if low is None else low
    return Group(opening, (low, _INFINITY if high is None else high), closing)
