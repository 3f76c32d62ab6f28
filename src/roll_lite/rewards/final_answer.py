"""Where a reply says its answer: in a box, after "answer is" or ####, or as its last number."""

import re
from collections.abc import Iterator
from typing import Literal, NamedTuple

Place = Literal["boxed", "stated", "whole", "last number"]

_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_BETWEEN_BOXES = re.compile(r"[\s$,;]{0,8}(?:and|or)?[\s$,;]{0,8}")
_STATED = re.compile(r"####|\banswer\b\**(?:\s+is\b|\s*[:=])[\s:=*]*(?:\\\(|\\\[)?", re.IGNORECASE)
_END_OF_SENTENCE = re.compile(r"[.!?](?=\s|\*|$)|\n")
_DIGITS = r"\d+(?:(?:,|\{,\}|\\,)\d{3}(?!\d))*(?:\.\d+)?"
_NUMBER = re.compile(
    rf"(?:(?<![\w.)}}])-)?(?:\\[dt]?frac\{{-?\d+\}}\{{-?\d+\}}|{_DIGITS}(?:/\d+|\\?%)?|\.\d+)"
)
_LATEX = re.compile(r"\\[A-Za-z]")
_LONGEST_LINE = 100  # characters of a reply that may be nothing but its answer


class FinalAnswer(NamedTuple):
    text: str
    place: Place


def final_answers(reply: str) -> Iterator[FinalAnswer]:
    """The answer of a reply, then what else it may be where that is not understood.

    What stands before the end of a thinking block is not part of the answer.
    """
    text = reply.rpartition("</think>")[2]
    box = last_box(text)
    if box is not None:
        yield FinalAnswer(box, "boxed")
        return
    stated = last_statement(text)
    if stated:
        yield FinalAnswer(stated, "stated")
        if _LATEX.search(stated):
            return  # a formula; its last number is not its value
        text = stated
    elif "\n" not in text.strip() and 0 < len(text.strip()) <= _LONGEST_LINE:
        yield FinalAnswer(text.strip(), "whole")
    number = last_number_in(text)
    if number is not None:
        yield FinalAnswer(number, "last number")


def last_box(text: str) -> str | None:
    """Content of the last box that is closed; boxes joined by `,`, `and` or `or` are one list."""
    answer, end = None, 0
    for match in _BOX.finditer(text):
        if match.start() < end:
            continue  # a box within the last one
        close = _matching_brace(text, match.end())
        if close is None:
            break
        content = text[match.end() : close].strip()
        is_joined = answer is not None and _BETWEEN_BOXES.fullmatch(text, end, match.start())
        answer = f"{answer}, {content}" if is_joined else content
        end = close + 1
    return answer


def last_statement(text: str) -> str | None:
    """What follows the last `answer is` or `####`, up to the end of the sentence."""
    statements = list(_STATED.finditer(text))
    if not statements:
        return None
    rest = text[statements[-1].end() :].lstrip()
    end = _END_OF_SENTENCE.search(rest)
    return rest[: end.start() if end else None].strip().strip("*").strip()


def last_number_in(text: str) -> str | None:
    numbers = _NUMBER.findall(text)
    return numbers[-1] if numbers else None


def _matching_brace(text: str, start: int) -> int | None:
    """Where the brace closes that was opened before `start`."""
    depth = 1
    for match in re.compile(r"\\.|[{}]", re.DOTALL).finditer(text, start):
        depth += {"{": 1, "}": -1}.get(match.group(), 0)
        if depth == 0:
            return match.start()
    return None
