r"""Rewards for questions of mathematics.

The answer of a reply is its last \boxed{...}, else what follows "answer is" or ####, else the whole
of a short line, else the last number. Ours compares first (`equality`). Where it cannot read one of
the two, and math-verify is installed, that package decides; it has no say where ours has one. Its
algebra may take for ever, and its time limit is a signal, which only the main thread of a process
gets: on other threads it is not asked. Arithmetic on huge numbers ignores the signal, so it belongs
in workers that are killed when they take too long.
"""

import importlib.util
import logging
import re
import threading
from decimal import Decimal
from typing import NamedTuple

from roll_lite.rewards.equality import Verdict, compare
from roll_lite.rewards.final_answer import final_answers
from roll_lite.types import Prompt, Score

SECONDS = 2
"""For each step of math-verify."""
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


class Judged(NamedTuple):
    """An answer that was found, where, and what it is worth."""

    answer: str | None
    place: str
    verdict: Verdict


def math_answer(prompt: Prompt, reply: str) -> Score:
    """1 when the reply's answer is the ground truth, else 0; `boxed` says whether it has a box."""
    check_truth(prompt)
    judged = judge(reply, prompt.ground_truth)
    correct = float(judged.verdict.kind == "equal")
    parts = {"correct": correct, "boxed": float(judged.place == "boxed")}
    return Score(value=correct, parts=parts)


def check_truth(prompt: Prompt) -> None:
    if not prompt.ground_truth.strip():
        raise ValueError(
            f"prompt {prompt.id} has ground_truth={prompt.ground_truth!r}; "
            "the reward math_answer needs the true answer"
        )


def judge(reply: str, truth: str) -> Judged:
    """The reply's answer and its verdict; the next candidate counts where one is not readable."""
    candidates = [Judged(*answer, compare(answer.text, truth)) for answer in final_answers(reply)]
    if not candidates:
        return Judged(None, "nowhere", Verdict("different", "the reply has no answer"))
    for judged in candidates:
        if judged.verdict.kind != "not comparable":
            return judged
    first = candidates[0]
    return first._replace(verdict=second_opinion(first.answer, truth) or first.verdict)


def second_opinion(answer: str, truth: str) -> Verdict | None:
    """That of math-verify, if it can be asked and takes the answers for equal."""
    is_main_thread = threading.current_thread() is threading.main_thread()
    if not is_main_thread or importlib.util.find_spec("math_verify") is None:
        return None
    import math_verify  # an extra, slow to import, and seldom needed

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it tells of every timeout
    sides = [math_verify.parse(rf"\boxed{{{t}}}", parsing_timeout=SECONDS) for t in (truth, answer)]
    is_equal = all(sides) and math_verify.verify(*sides, timeout_seconds=SECONDS)
    return Verdict("equal", "math-verify says so") if is_equal else None


def last_number(prompt: Prompt, reply: str) -> float:
    """1 when the last number of the reply is the ground truth, else 0."""
    numbers = _NUMBER.findall(reply)
    if not numbers:
        return 0.0
    return float(_value(numbers[-1]) == _value(prompt.ground_truth))


def _value(number: str) -> Decimal:
    return Decimal(number.replace(",", ""))
