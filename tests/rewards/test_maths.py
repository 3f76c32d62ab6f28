"""Mathematical answers: comparing them in every notation, finding them in replies, scoring them."""

import importlib.util
import random
import re
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from functools import partial
from itertools import pairwise, permutations

import pytest
import sympy  # which torch brings
from support.math_pairs import DIFFERENT, EQUAL, HOSTILE
from support.paths import DOCS

from roll_lite.rewards.maths import Verdict, compare, grade_reply, last_number, math_answer
from roll_lite.rewards.maths.notation import FUNCTIONS
from roll_lite.rewards.maths.reward import final_answers
from roll_lite.types import Prompt


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
    start = time.process_time()
    for found, truth in [(text, "5"), ("5", text), (text, f"{text}7"), (text, f"x+{text}")]:
        assert compare(found, truth).kind != "equal"
    assert time.process_time() - start < 1.0


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


GUESSES = " = ".join(map(str, range(491, 510)))


@pytest.mark.parametrize(
    "answer",
    [
        r"x \approx " + r" \approx ".join(map(str, range(496, 501))),
        f"x = {GUESSES} = 5.0e2",
        "x = 5.0e2 = 497 = 5.0e2",
    ],
)
def test_a_chain_of_guesses_is_not_the_one_that_is_right(answer):
    """Rounding joins the first and the last value of a chain, not all between."""
    assert compare(answer, "497").kind != "equal"


def test_the_ends_of_a_chain_are_its_values():
    chain = r"x = \pi \approx 3.1416 \approx 3.14"
    assert [compare(chain, truth).kind for truth in (r"\pi", "3.14")] == ["equal", "equal"]
    assert compare("x = 10/2 = 5", "5").kind == compare("5 = 10/2 = x", "10/2").kind == "equal"


@pytest.mark.parametrize(
    ("answer", "truth", "kind"),
    [
        (r"2^{60} e^0", str(2**60 - 1), "not comparable"),
        (r"10^{15} \cos 0", str(10**15 - 1), "not comparable"),
        (r"10^{12} \cos 0", str(10**12 - 1), "different"),
        (r"10^{12} \cos 0", str(10**12), "equal"),
        (r"(\sqrt{2})^{40}", str(2**20), "equal"),
        (r"2^{60} e^0", r"2^{60} \cos 0", "equal"),
    ],
)
def test_large_whole_numbers_are_not_equal_to_their_neighbours(answer, truth, kind):
    assert compare(answer, truth).kind == kind


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
    for _ in range(12):
        expression = sympy_expression(draw, 3)
        text = sympy.latex(expression)
        for transformed in (sympy.expand(expression), sympy.together(expression)):
            kind = compare(text, sympy.latex(transformed)).kind
            kinds[kind] += 1
            assert kind in ("equal", "refused"), (text, transformed)
            other = sympy.latex(transformed + sympy.Rational(1, 3))
            assert compare(text, other).kind in ("different", "refused"), (text, other)
    assert kinds["equal"] > 20  # the others are longer than an answer may be


def test_damaged_answers_are_judged_too():
    """Signs that are cut out, put in or repeated raise nothing."""
    draw, texts = random.Random(3), [text for family in EQUAL + DIFFERENT for text in family]
    signs = "".join(sorted(set("".join(texts))))
    for _ in range(600):
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


def documented_verdicts() -> list[tuple[str, ...]]:
    """The table of docs/reference/maths.md: answer, truth and verdict."""
    text = (DOCS / "reference" / "maths.md").read_text()
    text = text.replace(r"\|AB\|", r"\vert AB\vert ")  # a bar in a table needs a backslash
    return re.findall(r"^\|[^|]*\| `([^`]+)` \| `([^`]+)` \| ([a-z ]+) \|$", text, re.MULTILINE)


def test_the_documentation_tells_the_truth():
    assert len(documented_verdicts()) > 65
    for answer, truth, kind in documented_verdicts():
        assert compare(answer, truth).kind == kind, (answer, truth)


@pytest.mark.parametrize(
    ("reply", "answer", "source"),
    [
        (r"So it is \boxed{5}.", "5", "boxed"),
        (r"\boxed{1} no, \boxed{2}", "2", "boxed"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}", "boxed"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}", "boxed"),
        (r"\boxed {x^{2^{3}}} done", "x^{2^{3}}", "boxed"),
        (r"\boxed{a\boxed{b}c}", r"a\boxed{b}c", "boxed"),
        (r"\fbox{7}", "7", "boxed"),
        (r"x = \boxed{1} or \boxed{2}", "1, 2", "boxed"),
        (r"$\boxed{1}$, $\boxed{2}$ and $\boxed{3}$.", "1, 2, 3", "boxed"),
        (r"\boxed{3} and then it was cut: \boxed{4", "3", "boxed"),
        (r"\boxed{5}" + "\n\n" + r"\boxed{5}", "5", "boxed"),
        (r"$\boxed{5}$ and $\boxed{5}$", "5", "boxed"),
        ("<answer> 5 </answer>", "5", "stated"),
        ("So 3 + 4.\n<answer>\nThe answer is 7.\n</answer> Done, 8", "7", "stated"),
        (r"<answer>\boxed{7}</answer>", "7", "boxed"),
        ("<answer>1</answer> no <answer>2</answer>", "2", "stated"),
        (r"The answer is 4. \boxed{5} Or the answer is 6.", "5", "boxed"),
        ("The answer is 42.", "42", "stated"),
        ("The final answer is: **42**", "42", "stated"),
        ("Answer: 3.5 apples\nThank you", "3.5 apples", "stated"),
        ("answer is 1. Wait, the answer is 2.", "2", "stated"),
        ("ANSWER = 12", "12", "stated"),
        ("She has 3 + 4 = 7.\n#### 7", "7", "stated"),
        ("#### 1,234", "1,234", "stated"),
        (r"The answer is $\frac{1}{2}$.", r"$\frac{1}{2}$", "stated"),
        ("**Answer:** 9", "9", "stated"),
        ("71", "71", "whole"),
        ("x^2 + 1", "x^2 + 1", "whole"),
        ("one line\nand 12 more\nthen 13 it is", "13", "last number"),
        ("it costs\n$1,234.50 in all", "1,234.50", "last number"),
        ("a\nthe value -7", "-7", "last number"),
        ("a\nfrom 10-3", "3", "last number"),
        ("a\nhence 3/4", "3/4", "last number"),
        ("a\nhence \\frac{3}{4} of it", r"\frac{3}{4}", "last number"),
        ("a\n1, 2, 3", "3", "last number"),
        ("a\n50% of them", "50%", "last number"),
        ("<think>it is \\boxed{1}</think>\nNo 2", "No 2", "whole"),
    ],
)
def test_the_answer_and_its_source(reply, answer, source):
    assert next(final_answers(reply)) == (answer, source)


@pytest.mark.parametrize(
    "reply",
    ["", "  ", "no\nidea", "<think>5</think>", "<think>So 5", r"So 5 is \boxed{4", "<answer>5"],
)
def test_replies_without_an_answer(reply):
    assert list(final_answers(reply)) == []


@pytest.mark.parametrize(
    ("reply", "is_marked"),
    [
        (r"it is \boxed{5}", True), ("The answer is 5.", True), ("#### 5", True),
        ("<answer>5</answer>", True), ("The answer is that he has 5 apples.", True),
        ("5", False), ("First 2 + 3 = 5.\nThen 5 - 0 = 5 and", False), ("x = 5", False),
    ],
)  # fmt: skip
def test_a_reply_that_marks_no_answer_is_paid_only_if_we_may_guess(reply, is_marked):
    assert math_answer(prompt("5"), reply).value == 1.0
    assert partial(math_answer, guess=False)(prompt("5"), reply).value == is_marked


@pytest.mark.parametrize(
    ("reply", "right", "wrong"),
    [
        (r"\boxed{1}, so the other root is \boxed{2}", "1, 2", "1"),
        (r"$x = \boxed{1}$ and $y = \boxed{2}$", "(1, 2)", "(2, 1)"),
        (r"(a) \boxed{3} (b) \boxed{4} (c) \boxed{3}", "(3, 4)", "3, 5"),
        (r"It is \boxed{5}. In words, \boxed{5} again.", "5", "5, 5"),
        (r"\boxed{1}, \boxed{1}, \boxed{2}", "1, 1, 2", "1, 2, 2"),
        (r"First \boxed{1}, finally \boxed{2}", "2", "1"),
    ],
)
def test_several_boxes_are_the_last_one_or_all_together(reply, right, wrong):
    assert math_answer(prompt(right), reply).value == 1.0
    assert math_answer(prompt(wrong), reply).value == 0.0


def test_a_sentence_is_tried_before_its_number():
    answers = list(final_answers("So the answer is that he has 5 apples."))
    assert answers == [("that he has 5 apples", "stated"), ("5", "last number")]


def test_many_open_boxes_take_no_time():
    assert list(final_answers(r"\boxed{" * 20_000 + "\n"))[:1] == []


def prompt(truth):
    return Prompt(id="p", messages=(), domain="math", ground_truth=truth)


@pytest.mark.parametrize(
    ("reply", "truth", "correct", "boxed"),
    [
        (r"Thus \boxed{\dfrac{1}{2}}.", "0.5", 1, 1),
        (r"Thus \boxed{\dfrac{1}{3}}.", "0.5", 0, 1),
        ("The answer is 18 dollars per day.", "18", 1, 0),
        ("The answer is that Janet makes $18.", "18", 1, 0),
        ("First 9 * 2 = 18.\nShe makes 18 dollars a day", "18", 1, 0),
        ("#### 1,234", "1234", 1, 0),
        ("23 + 48 = 71.", "71", 1, 0),
        ("71 or 72", "72", 0, 0),
        ("They made\nabout 5 million", "5", 0, 0),
        ("They made\nabout 5 million", "5000000", 1, 0),
        (r"\boxed{} 5", "5", 0, 1),
        (r"\boxed{B}", "B", 1, 1),
        (r"\boxed{\textbf{(B) } 12}", "B", 1, 1),
        (r"The answer is \(x = 5\).", "5", 1, 0),
        (r"The answer is \max(2, 5).", "2", 0, 0),
        ("Yes", "Yes", 1, 0),
        (r"\boxed{\text{True}}", "Yes", 1, 1),
        (r"\boxed{1} and \boxed{2}", "1", 0, 1),
        ("", "5", 0, 0),
        (r"\boxed{9^{9^{9^{9}}}}", "5", 0, 1),
        (r"\boxed{9^{9^{9^{9}}}}", "9^{9^{9^{9}}}", 1, 1),
    ],
)
def test_scores_of_replies(reply, truth, correct, boxed):
    score = math_answer(prompt(truth), reply)
    unreadable = any(text in reply for text in (r"\max", "9^{9")) and not correct
    parts = {"correct": correct, "boxed": boxed, "unreadable": unreadable, "math_verify": 0}
    assert score.value == correct and score.parts == parts


@pytest.mark.parametrize(
    "digits",
    ["\u0664\u0662", "\uff14\uff12", "\u096a\u0968", "\U0001d7d2\U0001d7d0", "4\u0662", "\u06642"],
)
def test_digits_of_other_alphabets_are_no_numbers(digits):
    for reply in (rf"\boxed{{{digits}}}", f"The answer is {digits}.", digits, f"So\n{digits}\n"):
        assert math_answer(prompt("42"), reply).value == 0
    for answer, truth in ((f"{digits}.0", "42.0"), (rf"\frac{{{digits}}}{{2}}", "21")):
        assert compare(answer, truth).kind != "equal"


def test_a_prompt_without_its_answer_is_an_error():
    with pytest.raises(ValueError, match="prompt p has ground_truth=' '"):
        math_answer(prompt(" "), "5")


needs_math_verify = pytest.mark.skipif(
    not importlib.util.find_spec("math_verify"), reason="needs math-verify"
)


@needs_math_verify
def test_math_verify_reads_what_we_do_not():
    verdict = grade_reply(r"\boxed{\max(2, 5)}", r"\max(5, 2)").verdict
    assert verdict == Verdict("equal", "math-verify says so", "math-verify")
    assert grade_reply(r"\boxed{\max(2, 5)}", "4").verdict.kind == "not comparable"
    parts = math_answer(prompt(r"\max(5, 2)"), r"\boxed{\max(2, 5)}").parts
    assert parts == {"correct": 1, "boxed": 1, "unreadable": 1, "math_verify": 1}


@needs_math_verify
def test_math_verify_is_not_asked_about_what_we_read():
    """It finds these equal."""
    for answer, truth in [
        ("43 = 42", "42"),
        ("x + 1 = 5", "5"),
        ("won", "now"),
        ("4x = 0 - y", "0"),
    ]:
        assert grade_reply(rf"\boxed{{{answer}}}", truth).verdict.kind == "different"


@needs_math_verify
@pytest.mark.parametrize(
    ("answer", "truth"),
    [
        (r"\{z \in \mathbb{C} \mid |z| \geq 1\}", r"\{z \in \mathbb{C} \mid |z| \leq 1\}"),
        (r"\{z \in \mathbb{C} \mid |z| < 1\}", r"\{z \in \mathbb{C} \mid |z| \leq 1\}"),
        (r"\{z \mid |z - i| \geq 1\}", r"\{z \mid |z - i| \leq 1\}"),
        (r"\|x\| \le 2", r"\|x\| \ge 2"),
        (r"\neg 5", r"\max(5, 2)"),
        (r"n \geq \max(5, 2) \text{ odd}", r"n \geq \max(5, 2) \text{ even}"),
    ],
)
def test_math_verify_reads_a_whole_answer_or_none(answer, truth):
    """Not the last number or the first formula in it."""
    assert grade_reply(rf"\boxed{{{answer}}}", truth).verdict.kind != "equal"
    assert grade_reply(rf"\boxed{{{truth}}}", truth).verdict.kind == "equal"


@needs_math_verify
def test_math_verify_is_asked_on_every_thread_and_stopped(monkeypatch):
    with ThreadPoolExecutor() as pool:
        grade = pool.submit(grade_reply, r"\boxed{\max(2, 5)}", r"\max(5, 2)").result()
    assert grade.verdict.comparer == "math-verify"
    monkeypatch.setattr("roll_lite.rewards.maths.reward.MATH_VERIFY_SECONDS", 0.1)
    endless = r"\boxed{\sum_{n=1}^{\infty} \frac{1}{n^5+1}}"
    assert grade_reply(endless, "5").verdict.kind == "not comparable"


def test_without_math_verify_we_say_that_we_cannot_tell(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert grade_reply(r"\boxed{\max(2, 5)}", r"\max(5, 2)").verdict.kind == "not comparable"


@pytest.mark.parametrize(
    ("reply", "truth", "score"),
    [
        ("71", "71", 1.0),
        ("23 + 48 = 71.", "71", 1.0),
        ("The answer is 1,234.", "1234", 1.0),
        ("It is 1234.50", "1234.5", 1.0),
        ("-7", "-7", 1.0),
        ("7", "-7", 0.0),
        ("71 or 72", "71", 0.0),
        ("no idea", "71", 0.0),
        ("", "71", 0.0),
        ("710", "71", 0.0),
        ("007", "7", 1.0),
        ("\u0667", "7", 0.0),
        ("\uff17\uff11", "71", 0.0),
        ("7\u0667", "77", 0.0),
    ],
)
def test_last_number(reply, truth, score):
    assert last_number(prompt(truth), reply) == score


def test_a_solution_of_gsm8k_is_the_truth_behind_its_mark():
    solution = "She sold 48/2 = <<48/2=24>>24 clips.\nIn all 48+24 = <<48+24=72>>72.\n#### 1,072"
    assert math_answer(prompt(solution), "So the answer is 1072.").value == 1.0
    assert math_answer(prompt(solution), "So the answer is 72.").value == 0.0
    with pytest.raises(ValueError, match="needs the true answer"):
        math_answer(prompt("24 clips. ####"), "24")
