r"""Whether two expressions have the same value.

Expressions with variables are compared at several rational points; no two that differ agree at all
of them unless they were made to. Points are positive where logs or roots occur, so that \ln x^2 is
2 \ln x. Rationals are compared exactly, other numbers to eleven digits, decimals as `_rounds` says,
and a percentage is n or n/100.
"""

import math
from fractions import Fraction
from itertools import product
from random import Random

from roll_lite.rewards.evaluation import Undefined, Value, evaluate, functions_of, names_of
from roll_lite.rewards.tokens import TooLarge
from roll_lite.rewards.trees import Call, Number, Tree

NUM_POINTS = 6
TOLERANCE = 1e-11


def same_value(found: Tree, truth: Tree) -> bool:
    if _is_percent(found) != _is_percent(truth):
        return any(same_value(a, b) for a, b in product(*map(_percent_readings, (found, truth))))
    if names_of(found) | names_of(truth):
        return all(close(a, b) for a, b in values_at_points(found, truth))
    a, b = evaluate(found, {}), evaluate(truth, {})
    if a != a or b != b:
        raise Undefined("not a number")
    return close(a, b) or _rounds(found, truth, a, b)


def values_at_points(found: Tree, truth: Tree) -> list[tuple[Value, Value]]:
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


def close(a: Value, b: Value) -> bool:
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
