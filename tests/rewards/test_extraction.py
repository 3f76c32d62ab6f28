"""Graders read replies in linear time, whatever a reply repeats, and never raise.

Work is counted as processor time for a text and for one eight times as long, of which the least of
several tries counts: a quadratic search takes 64 times as long.
"""

import time
from functools import partial
from random import Random

import pytest

from roll_lite.envs.tool import call_of
from roll_lite.reward_roles import VerdictError, parse_verdict
from roll_lite.rewards import code, format, instructions
from roll_lite.rewards.choice import choice_answer
from roll_lite.rewards.maths import last_number, math_answer
from roll_lite.types import Prompt

SIZE, TIMES, MOST = 2000, 8, 24
"""Characters of the short text, how much longer the long one is, how much longer it may take."""
SHORTEST = 0.004
"""Seconds of processor time below which nothing is compared."""
PIECES = (
    "```python\n", "`", "```", "```python ", "~~~\n", "~~~\n(\n~~~\n", "~", "~~~a", "\n", " ", "\t",
    "\n \n", "a", "9", "1,", "1.", "1,234", "\\boxed{", "}", "{", "<answer>", "</answer>",
    "<think>", "</think>", "answer is ", "answer to a ", "#### ", "option ", "A ", "B is ", "(B)",
    "*", "**a",
    "_", "- ", "# ", "[", "[a", "<<", "<<a", ".", "! ", "e.g. ", "A.", "P.S.", "a'", "wait ", "$",
    "x=1\n", "def f(): 0\n", "lambda:", "(", "\x0b", "\u3000", "'", '"', "\\frac{1}{", "1 ",
)  # fmt: skip
FIELDS = {
    "count": 3, "number": 2, "length": 3, "letter": "a", "word": "a", "text": "a b",
    "marker": "P.S.", "words": ["a", "b"], "options": ["a", "b"],
}  # fmt: skip


def make_prompt(truth="42"):
    return Prompt(id="p", messages=(), domain="x", ground_truth=truth)


def program(reply):
    source = code.program_of(reply, [{"code": "assert f(3) == 9"}])
    return source is not None and code._is_python(source)


def verdict(text):
    try:
        return parse_verdict(text)
    except VerdictError:
        return None


def instruction(kind, reply):
    fields = {field: FIELDS[field] for field in instructions.fields_of(kind)}
    return instructions.holds(reply, {"kind": kind} | fields)


KINDS = [kind for kind in instructions.KINDS if not kind.startswith(("max_", "exact_", "language"))]
GRADERS = {
    "program": program,
    "output": partial(code.same_output, expected="0.5 1.5"),
    "math": partial(math_answer, make_prompt()),
    "last_number": partial(last_number, make_prompt()),
    "choice": partial(choice_answer, make_prompt("B")),
    "judge": verdict,
    "tool": call_of,
    "tags": partial(format.has_tags, make_prompt()),
    "length": partial(format.length_target, make_prompt()),
    "repetition": partial(format.repetition_penalty, make_prompt()),
} | {kind: partial(instruction, kind) for kind in KINDS}


def text_of(pieces: str, size: int) -> str:
    """Between two words: what is at neither end is looked at again and again by some patterns."""
    return f"x{(pieces * (size // len(pieces) + 1))[:size]}x"


def seconds(grader, text: str, tries: int) -> float:
    taken = []
    for _ in range(tries):
        code._names.cache_clear()
        start = time.process_time()
        grader(text)
        taken.append(time.process_time() - start)
    return min(taken)


def assert_linear(grader, pieces: str) -> None:
    long = text_of(pieces, TIMES * SIZE)
    if seconds(grader, long, 1) < SHORTEST:
        return
    short = text_of(pieces, SIZE)
    taken = seconds(grader, long, 3) / max(seconds(grader, short, 3), SHORTEST / TIMES)
    assert taken < MOST, f"{pieces!r}: {TIMES} times the text took {taken:.0f} times as long"


@pytest.mark.parametrize("name", GRADERS)
def test_repeated_pieces(name):
    for piece in PIECES:
        assert_linear(GRADERS[name], piece)


@pytest.mark.slow
@pytest.mark.parametrize("name", GRADERS)
def test_random_mixtures(name):
    random = Random(name)
    for _ in range(100):
        assert_linear(GRADERS[name], "".join(random.choices(PIECES, k=random.randint(2, 6))))


@pytest.mark.parametrize("name", GRADERS)
def test_halves(name):
    """Something long that never ends, then something else."""
    random = Random(name)
    for _ in range(10):
        first, second = random.sample(PIECES, 2)
        GRADERS[name](text_of(first, SIZE) + text_of(second, SIZE))
