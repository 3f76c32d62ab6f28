"""The value of an expression, exact where it is rational, within bounds that keep it quick."""

import cmath
import math
import zlib
from collections.abc import Callable, Mapping
from fractions import Fraction

from roll_lite.rewards.tokens import NotUnderstood, TooLarge
from roll_lite.rewards.trees import Call, Name, Number, Tree

Value = Fraction | float | complex
MAX_BITS = 4096
"""Of a numerator or denominator: about 1,200 digits."""
MAX_FACTORIAL = 400

CONSTANTS: dict[str, Value] = {"pi": math.pi, "e": math.e, "i": 1j, "∞": math.inf}


class Undefined(Exception):
    """The expression has no value at this point."""


def evaluate(tree: Tree, point: Mapping[str, Fraction]) -> Value:
    """The value where names have these values; raises Undefined, TooLarge or NotUnderstood."""
    if isinstance(tree, Number):
        return _bounded(tree.value)
    if isinstance(tree, Name):
        if tree.text in CONSTANTS:
            return CONSTANTS[tree.text]
        if tree.text not in point:
            raise NotUnderstood(f"{tree.text} is not a number")
        return point[tree.text]
    if not isinstance(tree, Call) or tree.function == "union":
        raise NotUnderstood("several values stand where one was expected")
    arguments = [evaluate(argument, point) for argument in tree.arguments]
    try:
        return _bounded(_function(tree.function)(*arguments))
    except OverflowError:
        raise TooLarge(f"{tree.function} of a large number") from None
    except (ZeroDivisionError, ValueError, TypeError) as error:
        raise Undefined(f"{tree.function}: {error}") from None


def names_of(tree: Tree) -> set[str]:
    """Variables, without the constants."""
    if isinstance(tree, Name):
        return set() if tree.text in CONSTANTS else {tree.text}
    return set().union(*map(names_of, tree.arguments)) if isinstance(tree, Call) else set()


def functions_of(tree: Tree) -> set[str]:
    if not isinstance(tree, Call):
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


def _function(name: str) -> Callable[..., Value]:
    if name.startswith("apply "):
        return _unknown_function(name)
    return _FUNCTIONS[name]


def _unknown_function(name: str) -> Callable[..., Value]:
    """Some function that nothing is known of but its name: equal where its arguments are."""
    frequency = 1 + zlib.crc32(name.encode()) / 2**32

    def apply(*arguments: Value) -> Value:
        return sum(
            cmath.sin(frequency * (k + 1) * argument + frequency)
            for k, argument in enumerate(arguments)
        )

    return apply


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
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if abs(base) != 1 and base != 0 and bits * abs(exponent.numerator) > 2 * MAX_BITS:
        raise TooLarge(f"the power of {exponent.numerator}")
    if abs(base) == 1:
        return base if exponent.numerator % 2 else Fraction(1)
    return base**exponent.numerator


def _root(value: Value, degree: Value) -> Value:
    """The principal root; exact where it is rational."""
    if not isinstance(value, Fraction) or not isinstance(degree, Fraction):
        return complex(value) ** (1 / degree)
    if degree.denominator != 1 or not 1 <= degree <= 64:
        return complex(value) ** (1 / float(degree))
    if value > 0:
        parts = [_whole_root(part, int(degree)) for part in (value.numerator, value.denominator)]
        if None not in parts:
            return Fraction(*parts)
    return cmath.sqrt(value) if degree == 2 else complex(value) ** (1 / int(degree))


def _real_root(value: Value, degree: Value) -> Value:
    r"""What \sqrt[3]{-8} means: odd roots of negative numbers are negative."""
    is_odd = isinstance(degree, Fraction) and degree.denominator == 1 and degree % 2 == 1
    if is_odd and not isinstance(value, complex) and value < 0:
        return -_root(-value, degree)
    return _root(value, degree)


def _whole_root(value: int, degree: int) -> int | None:
    """The whole number whose power this is, by bisection."""
    low, high = 0, 1 << (value.bit_length() // degree + 1)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if middle**degree <= value else (low, middle - 1)
    return low if low**degree == value else None


def _factorial(value: Value) -> Value:
    if isinstance(value, complex):
        raise Undefined("factorial of a complex number")
    if isinstance(value, Fraction) and value.denominator == 1 and value >= 0:
        if value > MAX_FACTORIAL:
            raise TooLarge(f"the factorial of {value}")
        return Fraction(math.factorial(int(value)))
    return math.gamma(value + 1)


def _binomial(n: Value, k: Value) -> Value:
    if all(isinstance(v, Fraction) and v.denominator == 1 and v >= 0 for v in (n, k)):
        if n > 10 * MAX_FACTORIAL:
            raise TooLarge(f"{n} over {k}")
        return Fraction(math.comb(int(n), int(k)))
    return _factorial(n) / (_factorial(k) * _factorial(n - k))


def _log(value: Value, base: Value = math.e) -> Value:
    if all(isinstance(v, Fraction) and v > 0 for v in (value, base)) and base != 1:
        guess = round(math.log(value) / math.log(base))
        if abs(guess) < 1000 and _power(base, Fraction(guess)) == value:
            return Fraction(guess)
    return Fraction(0) if value == 1 else cmath.log(value) / cmath.log(base)


def _rounded(rule: Callable) -> Callable[[Value], Value]:
    return lambda value: Fraction(rule(value))


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
    "floor": _rounded(math.floor),
    "ceil": _rounded(math.ceil),
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
