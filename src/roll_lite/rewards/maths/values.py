r"""The value of an expression, and whether two expressions have the same value.

Values are exact where they are rational, and limited in size. Expressions with variables are
compared at NUM_POINTS rational points; different expressions do not agree at all of them unless
constructed to. The points are positive where logarithms or roots occur, so \ln x^2 equals 2 \ln x.
Rational values are compared exactly, others to eleven digits; `_rounds` compares decimals, and
n% is n or n/100. The value of a vector or matrix is a tuple of values.
"""

import cmath
import math
import zlib
from collections.abc import Callable, Mapping
from fractions import Fraction
from functools import partial
from itertools import product
from random import Random

from roll_lite.rewards.maths.notation import NotUnderstood, TooLarge
from roll_lite.rewards.maths.parser import (
    SERIES,
    Apply,
    Collection,
    Name,
    Number,
    Tree,
    is_applied,
)

Value = Fraction | float | complex | tuple["Value", ...]
MAX_BITS = 4096
"""Limit for a numerator or denominator: about 1,200 digits."""
MAX_FACTORIAL = 400
NUM_POINTS = 6
TOLERANCE = 1e-11
MOST_WHOLE = 4e13
"""Larger whole numbers are not told apart from their neighbours in floating point."""
_UNKNOWN = {f"apply {name}" for name in ("zeta", "Gamma", "phi", "psi", "Phi", "Psi")}
CONSTANTS: dict[str, Value] = {"pi": math.pi, "e": math.e, "i": 1j, "∞": math.inf}


class Undefined(Exception):
    """The expression has no value at this point."""


def same_value(answer: Tree, truth: Tree) -> bool:
    percents = _percent_readings(answer), _percent_readings(truth)
    if bool(percents[0]) != bool(percents[1]):
        pairs = product(percents[0] or [answer], percents[1] or [truth])
        return any(same_value(a, b) for a, b in pairs)
    is_same = _same_values(answer, truth)
    if not is_same and (functions_of(answer) ^ functions_of(truth)) & _UNKNOWN:
        raise NotUnderstood("a function whose values are not known")
    return is_same


def _same_values(answer: Tree, truth: Tree) -> bool:
    if names_of(answer) | names_of(truth):
        return all(close(a, b) for a, b in values_at_points(answer, truth))
    a, b = evaluate(answer, {}), evaluate(truth, {})
    if a != a or b != b:
        raise Undefined("not a number")
    return close(a, b) or _rounds(answer, truth, a, b)


def agree(a: Tree, b: Tree, *, is_rounded: bool) -> bool:
    """Whether two numbers differ by rounding only: 1/3 and 0.333, or if is_rounded 7.9 and 8."""
    if same_value(a, b):
        return True
    difference = evaluate(Apply("subtract", (a, b)), {})
    if isinstance(difference, complex | tuple):
        return False
    numbers = [number for tree in (a, b) if (number := _number(tree))]
    limits = [_last_digit(number) for number in numbers if number.places]
    if is_rounded:
        limits += [Fraction(1, 2) for number in numbers if not number.places]
        limits.append(abs(evaluate(a, {})) / 100)
    return abs(difference) < max(limits, default=0)


def values_at_points(answer: Tree, truth: Tree) -> list[tuple[Value, Value]]:
    """Values of both trees at NUM_POINTS points; raises if they are defined at too few."""
    names = sorted(names_of(answer) | names_of(truth))
    functions = functions_of(answer) | functions_of(truth)
    is_positive = bool(functions & {"ln", "log", "lg", "root"})
    random = Random(7)
    pairs: list[tuple[Value, Value]] = []
    for _ in range(3 * NUM_POINTS):
        signs = (1,) if is_positive or len(pairs) % 2 == 0 else (-1, 1)
        point = {
            name: Fraction(random.choice(signs) * random.randrange(3, 40), random.randrange(7, 20))
            for name in names
        }
        try:
            pairs.append((evaluate(answer, point), evaluate(truth, point)))
        except (Undefined, TooLarge) as error:
            failure = error
            continue
        if len(pairs) == NUM_POINTS:
            return pairs
    raise failure


def close(a: Value, b: Value) -> bool:
    if isinstance(a, tuple) or isinstance(b, tuple):
        is_alike = isinstance(a, tuple) and isinstance(b, tuple) and len(a) == len(b)
        return is_alike and all(map(close, a, b))
    if isinstance(a, Fraction) and isinstance(b, Fraction):
        return a == b
    if a in (math.inf, -math.inf) or b in (math.inf, -math.inf):
        return a == b
    has_whole = _is_integer(a) or _is_integer(b)
    a, b = complex(a), complex(b)
    scale = max(abs(a), abs(b))
    if 0 in (a, b):  # in floating point, sin(pi) is not quite 0
        return scale < 1e-12
    is_close = abs(a - b) <= TOLERANCE * scale
    if is_close and has_whole and scale > MOST_WHOLE:
        raise NotUnderstood("a whole number that floating point cannot tell from the next")
    return is_close and (not has_whole or abs(a - b) < 0.5)


def _rounds(answer: Tree, truth: Tree, a: Value, b: Value) -> bool:
    """Whether one side is a decimal that the other rounds to.

    The truth needs 3 decimal places for that, the answer 6; if both are decimals, both need 6.
    """
    if isinstance(a, complex | tuple) or isinstance(b, complex | tuple):
        return False
    decimals = [n for n in map(_number, (answer, truth)) if n and n.places]
    num_needed = 6 if _number(answer) in decimals else 3
    is_allowed = decimals and min(n.places for n in decimals) >= num_needed
    return is_allowed and abs(a - b) <= max(map(_last_digit, decimals)) / 2


def _number(tree: Tree) -> Number | None:
    """The tree without its sign if it is a number."""
    if is_applied(tree, "negate"):
        return _number(tree.arguments[0])
    return tree if isinstance(tree, Number) else None


def _last_digit(number: Number) -> Fraction:
    """The value of a one in its last place."""
    return Fraction(10) ** (number.exponent - number.places)


def _percent_readings(tree: Tree) -> list[Tree]:
    """50% as one half and as 50; empty if the tree is not a percentage."""
    if is_applied(tree, "negate"):
        return [Apply("negate", (t,)) for t in _percent_readings(tree.arguments[0])]
    if is_applied(tree, "percent"):
        return [Apply("divide", (tree.arguments[0], Number(Fraction(100)))), tree.arguments[0]]
    return []


def evaluate(tree: Tree, point: Mapping[str, Fraction]) -> Value:
    """The value at a point, given by variable; raises Undefined, TooLarge or NotUnderstood."""
    if isinstance(tree, Number):
        return _bounded(tree.value)
    if isinstance(tree, Name):
        value = point.get(tree.text, CONSTANTS.get(tree.text))
        if value is None:
            raise NotUnderstood(f"{tree.text} has no value")
        return value
    if isinstance(tree, Collection) and (tree.opening, tree.closing) == ("(", ")"):
        return tuple(evaluate(item, point) for item in tree.items)
    if not isinstance(tree, Apply) or tree.function == "union":
        raise NotUnderstood("several values where one was expected")
    try:
        return _bounded(_call(tree, point))
    except OverflowError:
        raise TooLarge(f"{tree.function} of a large number") from None
    except (ZeroDivisionError, ValueError, TypeError) as error:
        raise Undefined(f"{tree.function}: {error}") from None


def _call(tree: Apply, point: Mapping[str, Fraction]) -> Value:
    if tree.function.endswith(SERIES):
        return _series(tree, point)
    arguments = [evaluate(argument, point) for argument in tree.arguments]
    if any(isinstance(argument, tuple) for argument in arguments):
        return _calculate_tuple(tree.function, *arguments)
    if tree.function in _FUNCTIONS:
        return _FUNCTIONS[tree.function](*arguments)
    return _unknown_function(tree.function, *arguments)


def names_of(tree: Tree) -> set[str]:
    """The variables of an expression; constants are not included."""
    if isinstance(tree, Name):
        return set() if tree.text in CONSTANTS else {tree.text}
    if isinstance(tree, Collection):
        return set().union(*map(names_of, tree.items))
    if not isinstance(tree, Apply):
        return set()
    names = set().union(*map(names_of, tree.arguments))
    return names - {tree.arguments[0].text} if tree.function.endswith(SERIES) else names


def functions_of(tree: Tree) -> set[str]:
    if not isinstance(tree, Apply):
        return set()
    return {tree.function}.union(*map(functions_of, tree.arguments))


def _bounded(value: Value) -> Value:
    if isinstance(value, Fraction):
        if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
            raise TooLarge(f"more than {MAX_BITS} bits")
        return value
    if isinstance(value, complex):
        return value if value.imag else value.real
    return value


def _unknown_function(name: str, *arguments: Value) -> Value:
    """A stand-in for f, zeta, ...: equal arguments give equal values."""
    frequency = 1 + zlib.crc32(name.encode()) / 2**32
    return sum(
        cmath.sin(frequency * (k + 1) * argument + frequency)
        for k, argument in enumerate(arguments)
    )


def _series(tree: Apply, point: Mapping[str, Fraction]) -> Value:
    index, first, last, body = tree.arguments
    combine = _FUNCTIONS["add" if tree.function == "sum" else "multiply"]
    total = Fraction(tree.function == "prod")
    for n in range(int(first.value), int(last.value) + 1):
        total = _bounded(combine(total, evaluate(body, {**point, index.text: Fraction(n)})))
    return total


def _calculate_tuple(name: str, a: Value, b: Value | None = None) -> Value:
    """Arithmetic with vectors and with matrices, which are tuples of rows."""
    calculate = partial(_calculate_tuple, name)
    match name, a, b:
        case "add" | "subtract", tuple(), tuple():
            return tuple(calculate(x, y) for x, y in zip(a, b, strict=True))
        case "multiply", tuple(), tuple():
            return _matrix_product(a, b)
        case "multiply" | "divide", tuple(), _:
            return tuple(calculate(x, b) for x in a)
        case "negate", tuple(), _:
            return _calculate_tuple("multiply", Fraction(-1), a)
        case "multiply", _, tuple():
            return tuple(calculate(a, x) for x in b)
    if isinstance(a, tuple) or isinstance(b, tuple):
        raise NotUnderstood(f"{name} of several values")
    return _bounded(_FUNCTIONS[name](a, b))


def _matrix_product(a: Value, b: Value) -> Value:
    """The product of a matrix and a matrix or vector; that of two vectors has several meanings."""
    if not isinstance(a[0], tuple):
        raise NotUnderstood("a product with a vector on the left")
    if not isinstance(b[0], tuple):
        return tuple(_dot(row, b) for row in a)
    return tuple(tuple(_dot(row, column) for column in zip(*b, strict=True)) for row in a)


def _dot(a: Value, b: Value) -> Value:
    return _bounded(sum(x * y for x, y in zip(a, b, strict=True)))


def _power(base: Value, exponent: Value) -> Value:
    if not isinstance(exponent, Fraction):
        return complex(base) ** complex(exponent)
    if not isinstance(base, Fraction):
        is_small = exponent.denominator == 1 and abs(exponent) < 1000
        return base ** int(exponent) if is_small else complex(base) ** float(exponent)
    if exponent.denominator != 1:
        if exponent.denominator > 64:
            return complex(base) ** float(exponent)
        return _power(_root(base, Fraction(exponent.denominator)), Fraction(exponent.numerator))
    if abs(base) == 1:
        return base if exponent.numerator % 2 else Fraction(1)
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if base != 0 and bits * abs(exponent.numerator) > 2 * MAX_BITS:
        raise TooLarge(f"the power of {exponent.numerator}")
    return base**exponent.numerator


def _root(value: Value, degree: Value) -> Value:
    """The principal root, exact if it is rational."""
    if not isinstance(value, Fraction) or not isinstance(degree, Fraction):
        return complex(value) ** (1 / degree)
    if degree.denominator != 1 or not 1 <= degree <= 64:
        return complex(value) ** (1 / float(degree))
    if value > 0:
        parts = [_integer_root(part, int(degree)) for part in (value.numerator, value.denominator)]
        if None not in parts:
            return Fraction(*parts)
    return cmath.sqrt(value) if degree == 2 else complex(value) ** (1 / int(degree))


def _real_root(value: Value, degree: Value) -> Value:
    r"""Odd roots of negative numbers are negative, as in \sqrt[3]{-8}."""
    is_odd = _is_integer(degree) and degree % 2 == 1
    if is_odd and not isinstance(value, complex) and value < 0:
        return -_root(-value, degree)
    return _root(value, degree)


def _integer_root(value: int, degree: int) -> int | None:
    """The integer root, answer by bisection; None if there is none."""
    low, high = 0, 1 << (value.bit_length() // degree + 1)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if middle**degree <= value else (low, middle - 1)
    return low if low**degree == value else None


def _factorial(value: Value) -> Value:
    if isinstance(value, complex):
        raise Undefined("factorial of a complex number")
    if _is_integer(value) and value >= 0:
        if value > MAX_FACTORIAL:
            raise TooLarge(f"the factorial of {value}")
        return Fraction(math.factorial(int(value)))
    return math.gamma(value + 1)


def _binomial(n: Value, k: Value) -> Value:
    if all(_is_integer(value) and value >= 0 for value in (n, k)):
        if n > 10 * MAX_FACTORIAL:
            raise TooLarge(f"{n} over {k}")
        return Fraction(math.comb(int(n), int(k)))
    return _factorial(n) / (_factorial(k) * _factorial(n - k))


def _of_integers(function: Callable[..., int], *values: Value) -> Value:
    if not all(map(_is_integer, values)):
        raise Undefined("not an integer")
    return Fraction(function(*map(int, values)))


def _is_integer(value: Value) -> bool:
    return isinstance(value, Fraction) and value.denominator == 1


def _log(value: Value, base: Value = math.e) -> Value:
    if all(isinstance(v, Fraction) and v > 0 for v in (value, base)) and base != 1:
        guess = round(math.log(value) / math.log(base))
        if abs(guess) < 1000 and _power(base, Fraction(guess)) == value:
            return Fraction(guess)
    return Fraction(0) if value == 1 else cmath.log(value) / cmath.log(base)


_FUNCTIONS: dict[str, Callable[..., Value]] = {
    "add": lambda a, b: a + b,
    "subtract": lambda a, b: a - b,
    "multiply": lambda a, b: a * b,
    "divide": lambda a, b: a / b,
    "negate": lambda a: -a,
    "percent": lambda a: a / 100,
    "power": _power,
    "root": _real_root,
    "factorial": _factorial,
    "binom": _binomial,
    "abs": abs,
    "gcd": partial(_of_integers, math.gcd),
    "lcm": partial(_of_integers, math.lcm),
    "floor": lambda a: Fraction(math.floor(a)),
    "ceil": lambda a: Fraction(math.ceil(a)),
    "exp": cmath.exp,
    "ln": _log,
    "log": _log,
    "lg": lambda a: _log(a, Fraction(10)),
    "cot": lambda a: 1 / cmath.tan(a),
    "sec": lambda a: 1 / cmath.cos(a),
    "csc": lambda a: 1 / cmath.sin(a),
    "arcsin": cmath.asin,
    "arccos": cmath.acos,
    "arctan": cmath.atan,
} | {
    name: getattr(cmath, name)
    for name in ("sin", "cos", "tan", "sinh", "cosh", "tanh", "asin", "acos", "atan")
}
