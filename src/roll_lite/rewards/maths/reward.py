r"""Find the final answer of a reply, and reward it if it equals the ground truth.

The final answer is the last \boxed{...}, else <answer>...</answer> or what follows "answer is" or
####, else the whole of a reply of one short line, else the last number. `compare` decides.
math-verify, if installed, is asked about every answer that `compare` cannot read, in a process of
its own with a time limit, so that neither the caller's thread nor a hard formula matters.
"""

import importlib.util
import logging
import re
from collections.abc import Iterator
from contextlib import suppress
from decimal import Decimal
from functools import lru_cache
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Literal, NamedTuple

from roll_lite.checks import UserError
from roll_lite.rewards.maths.comparison import MAX_CHARACTERS, Verdict, compare
from roll_lite.rewards.maths.notation import SCALES
from roll_lite.types import Prompt, Score

AnswerSource = Literal["boxed", "stated", "whole", "last number", "nowhere"]

MATH_VERIFY_SECONDS = 4
"""Time limit for math-verify."""
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_BETWEEN_BOXES = re.compile(r"[\s$,;]{0,8}(?:and|or)?[\s$,;]{0,8}")
_STATED = re.compile(r"####|\banswer\b\**(?:\s+is\b|\s*[:=])[\s:=*]*(?:\\\(|\\\[)?", re.IGNORECASE)
_END_OF_SENTENCE = re.compile(r"[.!?](?=\s|\*|$)|\n")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_CUT_OFF = re.compile(rf"<think>|<answer>|{_BOX.pattern}")
_DIGITS = r"[0-9]+(?:(?:,|\{,\}|\\,|,\\! ?)[0-9]{3}(?![0-9]))*(?:\.[0-9]+)?"
_NUMBER = re.compile(
    rf"(?:(?<![\w.)}}])-)?"
    rf"(?:\\[dt]?frac\{{-?[0-9]+\}}\{{-?[0-9]+\}}|{_DIGITS}(?:/[0-9]+|\\?%)?|\.[0-9]+)"
    rf"(?: (?:{'|'.join(SCALES)})\b)?"
)
_PLAIN_NUMBER = re.compile(r"-?[0-9][0-9,]*(?:\.[0-9]+)?")
_DIGIT = re.compile(r"[0-9]")
_LATEX = re.compile(r"\\[A-Za-z]")
_TEXTS = re.compile(r"\\text\w*\s*\{\s*([^{}]*?)\s*\}")
_LONGEST_SHOWN = 80
"""Characters of an answer that the reason of a score names."""
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


def math_answer(prompt: Prompt, reply: str, *, guess: bool = True) -> Score:
    """1 if the final answer equals the ground truth, else 0.

    `guess` also takes the last number of a reply that marks no answer and was not cut off.
    Parts: `correct`; `boxed`, 1 for a box; `unreadable`, 1 for an answer that `compare` cannot
    read; `math_verify`, 1 if math-verify accepted that.
    """
    check_truth(prompt)
    is_cut = prompt.extra.get("finish_reason") == "length"
    truth = true_answer(prompt)
    grade = grade_reply(reply, truth, guess=guess and not is_cut)
    parts = {
        "correct": float(grade.verdict.kind == "equal"),
        "boxed": float(grade.source == "boxed"),
        "unreadable": float(_is_unreadable(grade.verdict)),
        "math_verify": float(grade.verdict.comparer == "math-verify"),
    }
    return Score(value=parts["correct"], parts=parts, reason=_reason(grade, truth))


def _reason(grade: Grade, truth: str) -> str:
    if grade.answer is None:
        return f"{grade.verdict.why}, expected {truth:.{_LONGEST_SHOWN}}"
    said = f"extracted {grade.answer:.{_LONGEST_SHOWN}} ({grade.source})"
    said += f", expected {truth:.{_LONGEST_SHOWN}}"
    return f"{said}: {grade.verdict.why}" if _is_unreadable(grade.verdict) else said


def _is_unreadable(verdict: Verdict) -> bool:
    """Whether `compare` could not read the answer, even if math-verify could."""
    return verdict.comparer == "math-verify" or verdict.kind in ("not comparable", "refused")


def last_number(prompt: Prompt, reply: str) -> float:
    """1 if the last number of the reply equals the ground truth, else 0."""
    numbers = _PLAIN_NUMBER.findall(reply)
    if not numbers:
        return 0.0
    value, truth = (Decimal(text.replace(",", "")) for text in (numbers[-1], prompt.ground_truth))
    return float(value == truth)


def true_answer(prompt: Prompt) -> str:
    """The ground truth, or what follows its ####, as in solutions of GSM8K."""
    return prompt.ground_truth.rpartition("####")[2].strip()


def check_truth(prompt: Prompt) -> None:
    if not true_answer(prompt):
        raise UserError(
            f"prompt {prompt.id} has ground_truth={prompt.ground_truth!r}; "
            "the reward math_answer needs the true answer"
        )


def grade_reply(reply: str, truth: str, *, guess: bool = True) -> Grade:
    """Grade the first candidate for the final answer that is comparable with the truth."""
    answers = final_answers(reply, guess=guess)
    grades = [Grade(*answer, compare(answer.text, truth)) for answer in answers]
    if not grades:
        return Grade(None, "nowhere", Verdict("different", "the reply has no answer"))
    is_boxed = grades[0].source == "boxed"  # then they are the last box, and all boxes together
    wanted = ("equal",) if is_boxed else ("equal", "different", "refused")
    best = next((grade for grade in grades if grade.verdict.kind in wanted), grades[0])
    if best.verdict.kind == "not comparable" and _math_verify_accepts(best.answer, truth):
        return best._replace(verdict=Verdict("equal", "math-verify says so", "math-verify"))
    return best


def _math_verify_accepts(answer: str, truth: str) -> bool:
    """Whether math-verify is installed and finds the answers equal within its time limit."""
    if importlib.util.find_spec("math_verify") is None:
        return False
    import_math_verify()
    processes = get_context("fork")
    receiver, sender = processes.Pipe(duplex=False)
    process = processes.Process(target=_send_verdict, args=(sender, answer, truth), daemon=True)
    process.start()
    sender.close()
    is_equal = False
    with receiver, suppress(EOFError):  # the process ended without a verdict
        is_equal = receiver.poll(MATH_VERIFY_SECONDS) and receiver.recv()
    process.kill()
    process.join()
    return is_equal


def import_math_verify() -> None:
    """Import and compile what processes forked from here share."""
    _ask_math_verify("1", "1")


def _send_verdict(sender: Connection, answer: str, truth: str) -> None:
    sender.send(_ask_math_verify(answer, truth))


@lru_cache(maxsize=1)
def _ask_math_verify(answer: str, truth: str) -> bool:
    import math_verify  # an optional package

    if _TEXTS.findall(answer) != _TEXTS.findall(truth):  # it reads past some of them
        return False
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # not to warn of "no time limit"
    # The whole box: by default, if that cannot be read, the last number in it is the answer.
    whole = math_verify.LatexExtractionConfig(
        boxed_match_priority=0, try_extract_without_anchor=False
    )
    sides = [
        math_verify.parse(rf"\boxed{{{text}}}", [whole], parsing_timeout=0)
        for text in (truth, answer)
    ]
    return all(sides) and math_verify.verify(*sides, timeout_seconds=0)


def final_answers(reply: str, *, guess: bool = True) -> Iterator[FinalAnswer]:
    """Candidates for the final answer, best first; a thinking block is not searched."""
    text = reply.rpartition("</think>")[2]
    boxes = _boxes(text)
    if boxes:
        yield FinalAnswer(boxes[-1], "boxed")
        if len({*boxes}) > 1:
            yield FinalAnswer(", ".join(dict.fromkeys(boxes)), "boxed")
        return
    stated = _last_statement(text)
    if stated:
        yield FinalAnswer(stated, "stated")
        if _LATEX.search(stated):
            return  # a formula: its last number is not its value
        text = stated
    elif not guess or _CUT_OFF.search(text):
        return
    elif "\n" not in text.strip() and 0 < len(text.strip()) <= _LONGEST_LINE:
        yield FinalAnswer(text.strip(), "whole")
    numbers = _NUMBER.findall(_with_last_digit(text))
    if numbers:
        yield FinalAnswer(numbers[-1], "last number")


def _with_last_digit(text: str) -> str:
    """The end of a long text, from well before its last digit on."""
    last = next(_DIGIT.finditer(text[::-1]), None)
    return text[max(0, len(text) - last.end() - MAX_CHARACTERS) :] if last else ""


def _boxes(text: str) -> list[str]:
    """Contents of the closed boxes; boxes joined by `,`, `and` or `or` are one list."""
    lists: list[list[str]] = []
    end = 0
    for match in _BOX.finditer(text):
        if match.start() < end:
            continue  # nested in the previous box
        close = _matching_brace(text, match.end())
        if close is None:
            break
        if not (lists and _BETWEEN_BOXES.fullmatch(text, end, match.start())):
            lists.append([])
        lists[-1].append(text[match.end() : close].strip())
        end = close + 1
    return [", ".join(items if len({*items}) > 1 else items[:1]) for items in lists]


def _matching_brace(text: str, start: int) -> int | None:
    """Position of the brace that closes the one before `start`."""
    depth = 1
    for match in _BRACE.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(match.group(), 0)
        if depth == 0:
            return match.start()
    return None


def _last_statement(text: str) -> str | None:
    """The last <answer>...</answer>, or what follows the last `answer is` or `####`."""
    _, tag, inside = text.rpartition("</answer>")[0].rpartition("<answer>")
    text = inside if tag else text
    statements = list(_STATED.finditer(text))
    if not statements:
        return inside.strip() if tag else None
    rest = text[statements[-1].end() :].lstrip()
    end = _END_OF_SENTENCE.search(rest)
    return rest[: end.start() if end else None].strip().strip("*").strip()
