"""Constraints on a text that a program can check, in the manner of IFEval (Zhou et al. 2023).

A measure counts something; with a bound it is a constraint: `min_words`, `max_words` and
`exact_words` with the field `count`. A check holds or does not. The keyword arguments of a measure
or check are the constraint's further fields.
"""

import inspect
import json
import re
from collections.abc import Callable
from operator import eq, ge, le
from typing import Any

from roll_lite.rewards.languages import LANGUAGES, language_of

_WORD = re.compile(r"\w+(?:['\u2019-]\w+)*")
_ABBREVIATION = re.compile(r"\b(?:Mr|Mrs|Ms|Dr|Prof|St|vs|etc|e\.g|i\.e|[A-Z])\.(?=\s+\S)")
_SENTENCE_END = re.compile(
    r"(?<![.!?\u3002\uff01\uff1f])[.!?\u3002\uff01\uff1f]+[\"')\]]*(?:\s|$)|\n\s*\n"
)


def words(reply: str) -> int:
    return len(_WORD.findall(reply))


def sentences(reply: str) -> int:
    """Pieces that end with . ! or ?, or with a paragraph; not at abbreviations."""
    text = _ABBREVIATION.sub(lambda match: match[0][:-1], reply)
    return sum(bool(_WORD.search(piece)) for piece in _SENTENCE_END.split(text))


def paragraphs(reply: str) -> int:
    return len(paragraphs_of(reply))


def paragraphs_of(reply: str) -> list[str]:
    return [piece for piece in re.split(r"\n\s*\n", reply) if piece.strip()]


def capital_words(reply: str) -> int:
    """Words of two letters or more, all of them capitals."""
    return sum(len(word) > 1 and word.isupper() for word in _WORD.findall(reply))


def headings(reply: str) -> int:
    return len(re.findall(r"^#{1,6} +\S", reply, re.MULTILINE))


def bullets(reply: str) -> int:
    """Lines that begin with `- ` or `* `."""
    return len(re.findall(r"^[ \t]*[-*] +\S", reply, re.MULTILINE))


def numbered_items(reply: str) -> int:
    return len(re.findall(r"^[ \t]*\d+[.)] +\S", reply, re.MULTILINE))


def placeholders(reply: str) -> int:
    """Texts in square brackets, such as [name], that are no links."""
    return len(re.findall(r"\[[^\[\]\n]+\](?!\()", reply))


def highlights(reply: str) -> int:
    """Pieces *between single* or **double asterisks**."""
    found = re.findall(r"\*\*([^*\n]+)\*\*|(?<!\*)\*([^*\s][^*\n]*)\*(?!\*)", reply)
    return sum(bool((double or single).strip()) for double, single in found)


def digits(reply: str) -> int:
    return sum(character.isdecimal() for character in reply)


def keyword(reply: str, *, word: str) -> int:
    """How often a word or phrase stands there, whatever its case."""
    return len(re.findall(rf"(?<!\w){re.escape(word)}(?!\w)", reply, re.IGNORECASE))


def letter(reply: str, *, letter: str) -> int:
    return reply.lower().count(letter.lower())


def sections(reply: str, *, marker: str) -> int:
    """Lines that begin with the marker and a number: `Section 1`."""
    return len(re.findall(rf"^[#*_ \t]*{re.escape(marker)} +\d+", reply, re.MULTILINE))


def keywords(reply: str, *, words: list[str]) -> bool:
    return all(keyword(reply, word=word) for word in words)


def forbidden_words(reply: str, *, words: list[str]) -> bool:
    return not any(keyword(reply, word=word) for word in words)


def lowercase(reply: str) -> bool:
    return reply.islower()


def uppercase(reply: str) -> bool:
    return reply.isupper()


def starts_with(reply: str, *, text: str) -> bool:
    return reply.lstrip().startswith(text)


def ends_with(reply: str, *, text: str) -> bool:
    return reply.rstrip().endswith(text)


def is_json(reply: str) -> bool:
    """The whole reply is one JSON object or list, perhaps in a ```json block."""
    text = reply.strip()
    if len(text) > 6 and text.startswith("```") and text.endswith("```"):
        text = text[3:-3].removeprefix("json")
    try:
        value = json.loads(text)
    except (json.JSONDecodeError, RecursionError):
        return False
    return isinstance(value, dict | list)


def title(reply: str) -> bool:
    """A title in double angular brackets: <<title>>."""
    return any(piece.strip() for piece in re.findall(r"<<([^\n<>]+)>>", reply))


def no_commas(reply: str) -> bool:
    return not re.search(r"[,\uff0c\u3001]", reply)


def language(reply: str, *, code: str) -> bool:
    return language_of(reply) == code


def postscript(reply: str, *, marker: str) -> bool:
    """Something follows a marker such as P.S. that begins a line."""
    return bool(re.search(rf"^[ \t]*{re.escape(marker)}[ \t]*\S", reply, re.MULTILINE))


def quoted(reply: str) -> bool:
    """The whole reply stands in double quotes."""
    text = reply.strip()
    return len(text) > 2 and (text[0], text[-1]) in (('"', '"'), ("\u201c", "\u201d"))


def one_of(reply: str, *, options: list[str]) -> bool:
    """The reply is one of the options, but for case and a full stop."""
    return reply.strip().strip(".\"'").casefold() in {o.strip(".").casefold() for o in options}


def two_responses(reply: str) -> bool:
    """Two different texts, separated by ******."""
    pieces = [piece.strip() for piece in reply.split("******")]
    return len(pieces) == 2 and all(pieces) and pieces[0] != pieces[1]


def repeats(reply: str, *, text: str) -> bool:
    """The text comes first, word for word, and then something else."""
    start = reply.strip()
    return start.startswith(text.strip()) and len(start) > len(text.strip())


def palindrome(reply: str, *, length: int) -> bool:
    """There is a word of at least so many letters that reads alike from both ends."""
    found = (word.lower() for word in re.findall(r"[^\W\d_]+", reply))
    return any(len(word) >= length and word == word[::-1] for word in found)


def paragraph_starts(reply: str, *, number: int, word: str) -> bool:
    """The paragraph of that number, from 1, begins with the word."""
    pieces = paragraphs_of(reply)
    if number > len(pieces):
        return False
    first = _WORD.search(pieces[number - 1])
    return first is not None and first[0].casefold() == word.casefold()


MEASURES = {
    measure.__name__: measure
    for measure in (
        words, sentences, paragraphs, capital_words, headings, bullets, numbered_items,
        placeholders, highlights, digits, keyword, letter, sections,
    )
}  # fmt: skip
CHECKS: dict[str, Callable[..., bool]] = {
    check.__name__: check
    for check in (
        keywords, forbidden_words, lowercase, uppercase, starts_with, ends_with, title, no_commas,
        language, postscript, quoted, one_of, two_responses, repeats, palindrome, paragraph_starts,
    )
} | {"json": is_json}  # fmt: skip
BOUNDS = {"min": ge, "max": le, "exact": eq}
KINDS = (*(f"{bound}_{name}" for name in MEASURES for bound in BOUNDS), *CHECKS)


def holds(reply: str, constraint: dict[str, Any]) -> bool:
    """Whether a reply fulfils a constraint; an empty reply fulfils none."""
    kind, fields = constraint["kind"], {k: v for k, v in constraint.items() if k != "kind"}
    if not reply.strip():
        return False
    if kind in CHECKS:
        return CHECKS[kind](reply, **fields)
    bound, _, name = kind.partition("_")
    count = fields.pop("count")
    return BOUNDS[bound](MEASURES[name](reply, **fields), count)


def fields_of(kind: str) -> set[str]:
    """Which fields a constraint of this kind has, besides its kind."""
    function = CHECKS.get(kind) or MEASURES[kind.partition("_")[2]]
    fields = set(inspect.signature(function).parameters) - {"reply"}
    return fields if kind in CHECKS else fields | {"count"}


def _is_texts(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(map(_is_text, value))


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _is_whole(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "count": (lambda value: _is_whole(value, 0), "a whole number from 0 on"),
    "number": (lambda value: _is_whole(value, 1), "a whole number from 1 on"),
    "length": (lambda value: _is_whole(value, 1), "a whole number from 1 on"),
    "letter": (lambda value: _is_text(value) and len(value) == 1, "one letter"),
    "word": (_is_text, "text that is not empty"),
    "text": (_is_text, "text that is not empty"),
    "marker": (_is_text, "text that is not empty"),
    "words": (_is_texts, "a list of texts"),
    "options": (_is_texts, "a list of texts"),
    "code": (lambda value: value in LANGUAGES, f"one of {', '.join(LANGUAGES)}"),
}
"""What the value of a field must be, and how to say so."""
