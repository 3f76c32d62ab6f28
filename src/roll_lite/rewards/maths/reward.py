r"""Find the final answer of a reply, and reward it if it equals the ground truth.

The final answer is the last \boxed{...}, else what follows "answer is" or ####, else the whole of
a reply of one short line, else the last number. `compare` decides; math-verify, if installed, is
called only for what `compare` cannot read. Its time limit is a signal, which only the main thread
of a process receives, so it is not called on other threads. Arithmetic on huge numbers ignores the
signal: run this reward in worker processes, which are killed when they take too long.
"""

import importlib.util
import logging
import re
import threading
from collections.abc import Iterator
from decimal import Decimal
from typing import Literal, NamedTuple

from roll_lite.rewards.maths.comparison import Verdict, compare
from roll_lite.types import Prompt, Score

AnswerSource = Literal["boxed", "stated", "whole", "last number", "nowhere"]

MATH_VERIFY_SECONDS = 2
"""Time limit for each step of math-verify."""
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_BETWEEN_BOXES = re.compile(r"[\s$,;]{0,8}(?:and|or)?[\s$,;]{0,8}")
_STATED = re.compile(r"####|\banswer\b\**(?:\s+is\b|\s*[:=])[\s:=*]*(?:\\\(|\\\[)?", re.IGNORECASE)
_END_OF_SENTENCE = re.compile(r"[.!?](?=\s|\*|$)|\n")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_DIGITS = r"\d+(?:(?:,|\{,\}|\\,)\d{3}(?!\d))*(?:\.\d+)?"
_NUMBER = re.compile(
    rf"(?:(?<![\w.)}}])-)?(?:\\[dt]?frac\{{-?\d+\}}\{{-?\d+\}}|{_DIGITS}(?:/\d+|\\?%)?|\.\d+)"
)
_PLAIN_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_LATEX = re.compile(r"\\[A-Za-z]")
_LONGEST_LINE = 100
"""Characters of a one-line reply that is read as an answer as a whole."""


class FinalAnswer(NamedTuple):
    text: str
    source: AnswerSource


class Grade(NamedTuple):
    """The final answer of a reply and its verdict."""

    answer: str | None
    source: AnswerSource
    verdict: Verdict


def math_answer(prompt: Prompt, reply: str) -> Score:
    """1 if the final answer equals the ground truth, else 0; the part `boxed` is 1 for a box."""
    check_truth(prompt)
    grade = grade_reply(reply, prompt.ground_truth)
    correct = float(grade.verdict.kind == "equal")
    parts = {"correct": correct, "boxed": float(grade.source == "boxed")}
    return Score(value=correct, parts=parts)


def last_number(prompt: Prompt, reply: str) -> float:
    """1 if the last number of the reply equals the ground truth, else 0."""
    numbers = _PLAIN_NUMBER.findall(reply)
    if not numbers:
        return 0.0
    value, truth = (Decimal(text.replace(",", "")) for text in (numbers[-1], prompt.ground_truth))
    return float(value == truth)


def check_truth(prompt: Prompt) -> None:
    if not prompt.ground_truth.strip():
        raise ValueError(
            f"prompt {prompt.id} has ground_truth={prompt.ground_truth!r}; "
            "the reward math_answer needs the true answer"
        )


def grade_reply(reply: str, truth: str) -> Grade:
    """Grade the first candidate for the final answer that is comparable with the truth."""
    grades = [Grade(*answer, compare(answer.text, truth)) for answer in final_answers(reply)]
    if not grades:
        return Grade(None, "nowhere", Verdict("different", "the reply has no answer"))
    for grade in grades:
        if grade.verdict.kind != "not comparable":
            return grade
    first = grades[0]
    return first._replace(verdict=_call_math_verify(first.answer, truth) or first.verdict)


def _call_math_verify(answer: str, truth: str) -> Verdict | None:
    """`equal` if math-verify is available and says so, else None."""
    is_main_thread = threading.current_thread() is threading.main_thread()
    if not is_main_thread or importlib.util.find_spec("math_verify") is None:
        return None
    import math_verify  # an optional package, slow to import

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns about every timeout
    limit = MATH_VERIFY_SECONDS
    sides = [math_verify.parse(rf"\boxed{{{t}}}", parsing_timeout=limit) for t in (truth, answer)]
    is_equal = all(sides) and math_verify.verify(*sides, timeout_seconds=limit)
    return Verdict("equal", "math-verify says so") if is_equal else None


def final_answers(reply: str) -> Iterator[FinalAnswer]:
    """Candidates for the final answer, best first; a thinking block is not searched."""
    text = reply.rpartition("</think>")[2]
    box = _last_box(text)
    if box is not None:
        yield FinalAnswer(box, "boxed")
        return
    stated = _last_statement(text)
    if stated:
        yield FinalAnswer(stated, "stated")
        if _LATEX.search(stated):
            return  # a formula: its last number is not its value
        text = stated
    elif "\n" not in text.strip() and 0 < len(text.strip()) <= _LONGEST_LINE:
        yield FinalAnswer(text.strip(), "whole")
    numbers = _NUMBER.findall(text)
    if numbers:
        yield FinalAnswer(numbers[-1], "last number")


def _last_box(text: str) -> str | None:
    """Content of the last closed box; boxes joined by `,`, `and` or `or` are one list."""
    answer, end = None, 0
    for match in _BOX.finditer(text):
        if match.start() < end:
            continue  # nested in the previous box
        close = _matching_brace(text, match.end())
        if close is None:
            break
        content = text[match.end() : close].strip()
        is_joined = answer is not None and _BETWEEN_BOXES.fullmatch(text, end, match.start())
        answer = f"{answer}, {content}" if is_joined else content
        end = close + 1
    return answer


def _matching_brace(text: str, start: int) -> int | None:
    """Position of the brace that closes the one before `start`."""
    depth = 1
    for match in _BRACE.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(match.group(), 0)
        if depth == 0:
            return match.start()
    return None


def _last_statement(text: str) -> str | None:
    """What follows the last `answer is` or `####`, up to the end of the sentence."""
    statements = list(_STATED.finditer(text))
    if not statements:
        return None
    rest = text[statements[-1].end() :].lstrip()
    end = _END_OF_SENTENCE.search(rest)
    return rest[: end.start() if end else None].strip().strip("*").strip()
