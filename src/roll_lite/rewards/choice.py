r"""Reward for multiple choice: the letter that a reply chooses.

The letter is looked for in boxes and <answer> tags, then in statements ("the answer is (B)"), then
in a line that is only a letter, or else the first and the last line ("B) Paris"). The first place
with a letter counts; two different letters there are not a choice, unless a correction ("Wait, ...
the answer is C") comes between them: then what follows it counts.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

from roll_lite.checks import UserError
from roll_lite.types import Prompt, Score

# Quantifiers are bounded: long runs of marks would otherwise take quadratic time.
# A letter is no letter in CO_2, x^2, A = 5 or A's; a small one needs a mark or an end behind it.
_OPENING = r"(?:\\[([]|\\text(?:bf|it|rm)?|\\mathrm|\\mathbf)?[\s({\[*_\"'$]{0,8}"
_FORMULA = r"\}?_\{?\w|\s?[\^=+]"
_LETTER = (
    rf"{_OPENING}([A-J](?!{_FORMULA})(?:(?<='.)(?=')|(?![A-Za-z0-9'\u2019]))"
    rf"|[a-j](?!{_FORMULA})(?=[)\]}}*\"'$\\<,:;]|[.!]?\s*$|[.!]\s))"
)
_MARKS = r"[\s)}\]*_.:,\"'$]{0,8}"
_MORE = rf"(?:{_MARKS}(?:,|/|&|\bor\b|\band\b){_MARKS}{_LETTER})?"
_LETTERS = re.compile(rf"{_LETTER}{_MORE}{_MORE}")
_STATED = re.compile(
    r"(?:\b(?:answer|choice|option|solution)\b(?:\s+(?:choice|option|letter))?[*\"']{0,3}"
    r"(?:(?:\s+to(?:\s+\w+){1,4})?\s+(?:is|would\s+be|should\s+be|must\s+be)\b|\s*[:=])"
    r"(?:\s+(?:therefore|thus|definitely|clearly|option|choice|answer|letter))*"
    r"|\bI\s+(?:choose|pick|select|would\s+go\s+with|go\s+with)\b(?:\s+(?:option|choice|answer))?"
    r"|####)"
    r"[\s:=*]*",
    re.IGNORECASE,
)
_CORRECT = re.compile(
    r"\b(?:option|choice)?\s*\(?([A-J])\)?\s+is\s+(?:the\s+)?(?:correct|right|best)\b"
)
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{|<answer>")
_CORRECTION = re.compile(
    r"\b(?:wait|actually|correction|sorry|hold on|on second thought|my mistake|i made a mistake)\b",
    re.IGNORECASE,
)
_HINT = re.compile(
    r"boxed|fbox|answer|choice|option|solution|choose|pick|select|with|####|is", re.IGNORECASE
)
"""Something that every place of a letter has in it, except for a line."""
_BARE = re.compile(rf"{_LETTER}[\s)}}\]*_\"'$.\\]*$")
_OPTION = re.compile(
    r"[\s*_]*(?:\(([A-Ja-j])\)|([A-J](?=[*_]*[).:])|[a-j](?=\)))[*_]*[).:])[\s*_]*(?:\S.*)?$"
)


class Choice(NamedTuple):
    letters: frozenset[str]
    """Empty, one letter, or several competing ones."""
    source: str


def choice_answer(prompt: Prompt, reply: str) -> Score:
    """1 if the reply chooses the letter of the ground truth and no other, else 0."""
    letters, source = chosen(reply)
    truth = right_letter(prompt)
    correct = float(letters == {truth})
    parts = {"correct": correct, "ambiguous": float(len(letters) > 1), "none": float(not letters)}
    said = f"chose {' and '.join(sorted(letters))} ({source})" if letters else "chose no letter"
    return Score(value=correct, parts=parts, reason=f"{said}, expected {truth}")


def right_letter(prompt: Prompt) -> str:
    truth = re.fullmatch(r"\(?([A-J])[).]?", prompt.ground_truth.strip())
    if truth is None:
        raise UserError(
            f"prompt {prompt.id} has ground_truth={prompt.ground_truth!r}; "
            "the reward choice_answer needs one letter from A to J"
        )
    return truth[1]


def chosen(reply: str) -> Choice:
    """The letters that a reply names as its answer, and where."""
    text = reply.rpartition("</think>")[2]
    for part in filter(_HINT.search, reversed(_CORRECTION.split(text))):
        if letters := frozenset(_letters_after(_BOX, part)):
            return Choice(letters, "boxed")
        if letters := frozenset(_stated(part)):
            return Choice(letters, "stated")
    letters = frozenset(_in_lines(text))
    return Choice(letters, "a line" if letters else "nowhere")


def _stated(text: str) -> Iterator[str]:
    yield from _letters_after(_STATED, text)
    for statement in _CORRECT.finditer(text):
        yield statement[1]


def _in_lines(text: str) -> Iterator[str]:
    """Lines that are only a letter; else an option in the first or the last line."""
    lines = [*filter(str.strip, text.splitlines())]
    bare = [match[1].upper() for match in map(_BARE.match, lines) if match]
    if bare or not lines:
        yield from bare
        return
    for line in (lines[0], lines[-1]):
        if match := _OPTION.match(line):
            yield (match[1] or match[2]).upper()


def _letters_after(start: re.Pattern, text: str) -> Iterator[str]:
    for found in start.finditer(text):
        if match := _LETTERS.match(text, found.end()):
            yield from (letter.upper() for letter in match.groups() if letter)
