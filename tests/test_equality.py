"""Answers that are the same and answers that are not, in every notation; nothing takes long."""

import random
import re
import time
from collections import Counter
from fractions import Fraction
from itertools import pairwise, permutations

import pytest
import sympy  # which torch brings
from math_pairs import DIFFERENT, EQUAL, HOSTILE

from roll_lite.rewards.equality import compare
from roll_lite.rewards.tokens import FUNCTIONS


@pytest.mark.parametrize("family", EQUAL, ids=lambda family: family[0])
def test_the_same_answer_in_many_notations(family):
    for found, truth in permutations(family, 2):
        assert compare(found, truth).kind == "equal", (found, truth)


@pytest.mark.parametrize("answers", DIFFERENT, ids=lambda answers: answers[0])
def test_answers_that_look_alike(answers):
    truth, *others = answers
    for found in others:
        assert compare(found, truth).kind != "equal", (found, truth)


def test_neighbouring_families_are_apart():
    for family, following in pairwise(EQUAL):
        if not {*family} & {*following}:
            assert compare(family[0], following[0]).kind != "equal", (family[0], following[0])


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: text[:12])
def test_hostile_answers_take_no_time(text):
    start = time.perf_counter()
    for found, truth in [(text, "5"), ("5", text), (text, f"{text}7"), (text, f"x+{text}")]:
        assert compare(found, truth).kind != "equal"
    assert time.perf_counter() - start < 1.0


@pytest.mark.parametrize(
    ("found", "truth", "kind"),
    [
        ("1/3", "0.333", "equal"), (r"\pi", "3.142", "equal"), (r"\sqrt{2}", "1.414", "equal"),
        ("2/3", "0.667", "equal"), ("2/3", "0.666", "different"), ("1/3", "0.33", "different"),
        ("0.333", "1/3", "different"), ("0.333333", "1/3", "equal"),
        ("3.14159", r"\pi", "different"),
        ("3.141593", r"\pi", "equal"), ("3.141592", r"\pi", "different"),
        ("0.1251", "0.125", "different"), ("0.3333334", "0.3333333", "different"),
        ("0.33333333", "0.3333333", "equal"), ("0.6666667", "0.66666666", "equal"),
        ("22/7", "3.142", "different"), ("3 + i", "3.000", "different"),
    ],
)  # fmt: skip
def test_decimals_stand_for_what_rounds_to_them(found, truth, kind):
    assert compare(found, truth).kind == kind


def test_a_letter_after_a_number_is_a_unit_where_the_truth_has_no_variable():
    for found in ("5 m", "5 m^2", "5 L", "5g"):
        assert compare(found, "5").kind == "equal"
        assert compare("5", found).kind == "different"
    assert compare("5 m", "5 cm").kind == compare("5x", "5").kind == "different"


def notations(value: Fraction) -> list[str]:
    """A rational number, written in different ways."""
    top, bottom = value.numerator, value.denominator
    sign, whole, rest = "-" if top < 0 else "", abs(top) // bottom, abs(top) % bottom
    return [
        f"{top}/{bottom}",
        rf"\frac{{{top}}}{{{bottom}}}",
        rf"{sign}\dfrac{{{3 * abs(top)}}}{{{3 * bottom}}}",
        rf"\left({top}\right) \div {bottom}",
        rf"{sign}({whole} {rest}/{bottom})" if whole and rest else f"x = {top}/{bottom}",
        rf"{top} \cdot {bottom}^{{-1}}",
        rf"\frac{{{100 * top}}}{{{bottom}}}\%",
        rf"${top}/{bottom}$ cm",
        rf"\sqrt[3]{{\frac{{{top**3}}}{{{bottom**3}}}}}",
        rf"\frac{{{top}x}}{{{bottom}x}}",
    ]


def test_random_rationals_in_ten_notations():
    draw = random.Random(0)
    for _ in range(60):
        value = Fraction(draw.randint(-999, 999), draw.choice((1, 2, 3, 7, 12, 250)))
        other = value + Fraction(draw.choice((-1, 1)), draw.choice((1, 3, 1000)))
        texts = notations(value)
        for text in texts:
            assert compare(text, texts[0]).kind == "equal", (text, texts[0])
            assert compare(texts[0], text).kind == "equal", (texts[0], text)
            assert compare(text, f"{other.numerator}/{other.denominator}").kind != "equal", text


def polynomial(draw: random.Random) -> tuple[list[int], str]:
    """Coefficients, lowest first, and the product of random factors that has them."""
    coefficients, text = [1], ""
    for _ in range(draw.randint(1, 4)):
        a, b = draw.choice((1, 2, -3)), draw.randint(-5, 5)
        text += f"({a}x + {b})"
        shifted = [0, *[a * c for c in coefficients]]
        coefficients = [s + b * c for s, c in zip(shifted, [*coefficients, 0], strict=True)]
    return coefficients, text


def test_random_products_are_their_expansions():
    draw = random.Random(1)
    for _ in range(80):
        coefficients, text = polynomial(draw)
        expanded = " + ".join(f"{c}x^{{{k}}}" for k, c in enumerate(coefficients))
        assert compare(text, expanded).kind == "equal", (text, expanded)
        assert compare(text, f"{expanded} + 1").kind == "different"
        assert compare(text, f"{expanded} + x").kind == "different"


def test_random_sums_have_the_value_that_python_gives_them():
    draw = random.Random(2)
    for _ in range(150):
        numbers = [draw.randint(1, 30) for _ in range(draw.randint(2, 6))]
        signs = [draw.choice("+-*/") for _ in numbers[1:]]
        text = str(numbers[0]) + "".join(f"{s}{n}" for s, n in zip(signs, numbers[1:], strict=True))
        value = eval(re.sub(r"(\d+)", r"Fraction(\1)", text))
        assert compare(text, f"{value.numerator}/{value.denominator}").kind == "equal", text


def sympy_expression(draw: random.Random, depth: int) -> sympy.Expr:
    x, y = sympy.symbols("x y", positive=True)
    if depth == 0:
        fraction = sympy.Rational(draw.randint(1, 9), draw.randint(1, 7))
        return draw.choice([x, y, fraction, sympy.pi, sympy.sqrt(3), sympy.E])
    a, b = (sympy_expression(draw, depth - 1) for _ in range(2))
    function = draw.choice((sympy.sin, sympy.exp, sympy.log, sympy.sqrt, sympy.atan))
    return draw.choice([a + b, a + b, a - b, a * b, a * b, a / (1 + b**2), a**2, function(a)])


def test_expressions_that_sympy_transforms_stay_the_same():
    draw, kinds = random.Random(4), Counter()
    for _ in range(60):
        expression = sympy_expression(draw, 3)
        text = sympy.latex(expression)
        for transformed in (sympy.expand(expression), sympy.together(expression)):
            kind = compare(text, sympy.latex(transformed)).kind
            kinds[kind] += 1
            assert kind in ("equal", "refused"), (text, transformed)
            other = sympy.latex(transformed + sympy.Rational(1, 3))
            assert compare(text, other).kind in ("different", "refused"), (text, other)
    assert kinds["equal"] > 110  # the others are longer than an answer may be


def test_damaged_answers_are_judged_too():
    """Signs that are cut out, put in or repeated raise nothing."""
    draw, texts = random.Random(3), [text for family in EQUAL + DIFFERENT for text in family]
    signs = "".join(sorted(set("".join(texts))))
    for _ in range(1500):
        text = draw.choice(texts) + draw.choice(texts)
        for _ in range(draw.randint(1, 5)):
            i, j = sorted(draw.randrange(len(text) + 1) for _ in range(2))
            middle = draw.choice(("", text[i:j] * draw.randint(2, 9), draw.choice(signs)))
            text = text[:i] + middle + text[j:]
        assert compare(text, draw.choice(texts)).why
        assert compare(draw.choice(texts), text).why


@pytest.mark.parametrize("name", sorted(FUNCTIONS))
def test_every_function_has_values(name):
    assert compare(f"{name}(1/2) + x", rf"x + {name} \frac12").kind == "equal"
    assert compare(f"{name}x", f"{name}(x)").kind == "equal"
    assert compare(f"{name}(1/2)", f"{name}(1/3)").kind == "different"


def test_why_is_told():
    assert "\\mathbb is not known" in compare(r"\mathbb{R}", "5").why
    assert compare("9^9^9^9", "5").kind == "refused"
    assert compare("((1+x)^{1000})^{1000}", "5").kind == "refused"
    assert compare("Borya", "Anna").kind == "different"
    assert compare("a " * 400, "5").kind == "refused"
    assert compare("x" * 2000, "5").kind == "refused"
