"""Reward for following instructions that a program can check, in the manner of IFEval (Zhou 2023).

A prompt's tests are its constraints, such as {"kind": "min_words", "count": 50}. A measure counts
something; each measure makes three kinds with the field `count`: `min_words`, `max_words` and
`exact_words`. A check is true or false. The keyword arguments of a measure or check are the
further fields of the constraint.
"""

import inspect
import json
import re
from collections.abc import Callable, Sequence
from functools import cache
from itertools import chain, count
from operator import eq, ge, le
from types import ModuleType
from typing import Any
from unicodedata import normalize

from roll_lite.checks import UserError
from roll_lite.rewards.format import WORD, count_words, without_thinking
from roll_lite.types import Prompt, Score

_ABBREVIATION = re.compile(r"\b(?:Mr|Mrs|Ms|Dr|Prof|St|vs|etc|e\.g|i\.e|[A-Z])\.(?=\s+\S)")
_ABBREVIATED_OR_WORD = re.compile(rf"(?:[^\W\d_]\.){{2,}}|{WORD.pattern}")
_SENTENCE_END = re.compile(
    r"(?<![.!?\u3002\uff01\uff1f])[.!?\u3002\uff01\uff1f]+[\"')\]]*(?:\s|$)|\n\s*\n"
)
_INVISIBLE = re.compile(
    r"[\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180e\u200b-\u200f\u202a-\u202e\u2060-\u206f"
    r"\u2800\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff9-\ufffb\U000e0000-\U000e0fff]"
)
"""Characters that show nothing: with them words would differ that look the same."""
_COMMA = re.compile("[,\u055d\u060c\u3001\ufe10\ufe11\ufe50\ufe51\uff0c\uff64]|\u201a(?=\\s|$)")
"""Commas of all scripts, and the low quotation mark, where it opens nothing."""
LANGUAGES = (
    "ar", "bg", "bn", "cs", "da", "de", "el", "en", "es", "fa", "fi", "fr", "gu", "he", "hi", "hu",
    "id", "it", "ja", "kn", "ko", "ml", "mr", "ne", "nl", "no", "pa", "pl", "pt", "ro", "ru", "sv",
    "sw", "ta", "te", "th", "tr", "uk", "ur", "vi", "zh",
)  # fmt: skip
"""Codes that `language` knows. The detector chooses among these, because fewer are easier to tell
apart."""


def instructions_followed(prompt: Prompt, reply: str, *, strict: bool = False) -> Score:
    """The share of constraints that the reply fulfils; with `strict`, 1 if it fulfils all, else 0.

    Each constraint is a part named after its kind; the second one of a kind is kind_2. The part
    `unreadable` is 1 for a reply that is empty or only a thinking block.
    """
    check_instructions(prompt)
    parts: dict[str, float] = {}
    for constraint in prompt.tests:
        parts[_part_name(constraint["kind"], parts)] = float(holds(reply, constraint))
    share = sum(parts.values()) / len(parts)
    reason = _reason(prompt.tests, list(parts.values()))
    parts["unreadable"] = float(not without_thinking(reply).strip())
    return Score(value=float(share == 1) if strict else share, parts=parts, reason=reason)


def _reason(constraints: Sequence[dict[str, Any]], fulfilled: Sequence[float]) -> str:
    broken = [c for c, is_fulfilled in zip(constraints, fulfilled, strict=True) if not is_fulfilled]
    said = (f"{c['kind']} {' '.join(str(c[f]) for f in c if f != 'kind')}".strip() for c in broken)
    return f"not fulfilled: {', '.join(said)}" if broken else "all constraints are fulfilled"


def check_instructions(prompt: Prompt) -> None:
    """Raise ValueError for constraints that cannot be checked."""
    if not prompt.tests:
        raise UserError(f"prompt {prompt.id} has no tests; give it at least one constraint")
    for number, constraint in enumerate(prompt.tests):
        try:
            _check(constraint)
        except ValueError as error:
            raise UserError(f"prompt {prompt.id}, tests[{number}]: {error}") from None


def _check(constraint: dict[str, Any]) -> None:
    if not isinstance(constraint, dict):
        raise UserError(f"{constraint!r} must be an object with a kind")
    kind = constraint.get("kind")
    if kind not in KINDS:
        raise UserError(f"kind={kind!r} is not known; use one of {', '.join(KINDS)}")
    fields = fields_of(kind)
    given = set(constraint) - {"kind"}
    listed = ", ".join(sorted(fields)) or "none"
    if missing := sorted(fields - given):
        raise UserError(f"kind={kind!r} has no field {missing[0]!r}; it needs {listed}")
    if unread := sorted(given - fields):
        raise UserError(f"kind={kind!r} reads no field {unread[0]!r}, only {listed}")
    for field in sorted(fields):
        is_valid, expected = FIELDS[field]
        if not is_valid(constraint[field]):
            raise UserError(f"{field}={constraint[field]!r} of kind={kind!r} must be {expected}")
    if kind == "language":
        _language_detector()  # raises ValueError now, not in the middle of a run


def _part_name(kind: str, parts: dict[str, float]) -> str:
    names = chain([kind], (f"{kind}_{number}" for number in count(2)))
    return next(name for name in names if name not in parts)


def holds(reply: str, constraint: dict[str, Any]) -> bool:
    """Whether what follows a reply's thinking block fulfils a constraint; nothing fulfils none.

    Characters that cannot be seen count neither in the reply nor in the constraint.
    """
    reply = _INVISIBLE.sub("", without_thinking(reply))
    if not reply.strip():
        return False
    fields = {name: _visible(value) for name, value in constraint.items()}
    kind = fields.pop("kind")
    if kind in CHECKS:
        return CHECKS[kind](reply, **fields)
    bound, _, name = kind.partition("_")
    limit = fields.pop("count")
    return BOUNDS[bound](MEASURES[name](reply, **fields), limit)


def _visible(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_visible(each) for each in value]
    return _INVISIBLE.sub("", value) if isinstance(value, str) else value


def fields_of(kind: str) -> set[str]:
    """Names of the fields of a constraint of this kind, without `kind`."""
    function = CHECKS.get(kind) or MEASURES[kind.partition("_")[2]]
    fields = set(inspect.signature(function).parameters) - {"reply"}
    return fields if kind in CHECKS else fields | {"count"}


def sentences(reply: str) -> int:
    """Sentences end with . ! or ? or a paragraph, not at abbreviations."""
    text = _ABBREVIATION.sub(lambda match: match[0][:-1], reply)
    return sum(bool(WORD.search(piece)) for piece in _SENTENCE_END.split(text))


def paragraphs(reply: str) -> int:
    return len(paragraphs_of(reply))


def paragraphs_of(reply: str) -> list[str]:
    """Texts with words between *** if the reply has that, else between blank lines."""
    pieces = re.split(r"(?<!\S)\*{3,}(?!\S)", reply)
    if len(pieces) == 1:
        pieces = re.split(r"\n\s*\n", reply)
    return [piece for piece in pieces if WORD.search(piece)]


def capital_words(reply: str) -> int:
    """Words whose letters are capitals: I, NASA, U.S."""
    return sum(word.isupper() for word in _ABBREVIATED_OR_WORD.findall(reply))


def headings(reply: str) -> int:
    return len(re.findall(r"^#{1,6} +\S", reply, re.MULTILINE))


def bullets(reply: str) -> int:
    """Lines that begin with `- ` or `* `, without rules such as `* * *`."""
    return len(re.findall(r"^[ \t]*[-*] +(?![-* \t]*$)\S", reply, re.MULTILINE))


def numbered_items(reply: str) -> int:
    return len(re.findall(r"^[ \t]*\d+[.)] +\S", reply, re.MULTILINE))


def placeholders(reply: str) -> int:
    """Texts in square brackets, such as [name]; links and boxes to tick do not count."""
    found = re.findall(r"\[([^\[\]\n]+)\](?!\()", reply)
    return sum(bool(WORD.search(text)) for text in found)


def highlights(reply: str) -> int:
    """Passages in *single* or **double asterisks**."""
    found = re.findall(r"\*\*([^*\n]+)\*\*|(?<!\*)\*([^*\s][^*\n]*)\*(?!\*)", reply)
    return sum(bool((double or single).strip()) for double, single in found)


def digits(reply: str) -> int:
    return sum(character.isdecimal() for character in reply)


def keyword(reply: str, *, word: str) -> int:
    """Occurrences of a word or phrase, ignoring case, the width of letters, and _emphasis_."""
    pattern = rf"(?<![^\W_]){re.escape(normalize('NFKC', word))}(?![^\W_])"
    return len(re.findall(pattern, normalize("NFKC", reply), re.IGNORECASE))


def letter(reply: str, *, letter: str) -> int:
    return reply.lower().count(letter.lower())


def sections(reply: str, *, marker: str) -> int:
    """Lines that begin with the marker, ignoring case, and a number: `Section 1`."""
    start = rf"^[#*_ \t]*{re.escape(marker)} +\d+"
    return len(re.findall(start, reply, re.MULTILINE | re.IGNORECASE))


def keywords(reply: str, *, words: list[str]) -> bool:
    return all(keyword(reply, word=word) for word in words)


def forbidden_words(reply: str, *, words: list[str]) -> bool:
    return not any(keyword(reply, word=word) for word in words)


def lowercase(reply: str) -> bool:
    return reply.islower()


def uppercase(reply: str) -> bool:
    return reply.isupper()


def starts_with(reply: str, *, text: str) -> bool:
    return _plain(reply).startswith(_plain(text))


def ends_with(reply: str, *, text: str) -> bool:
    return _plain(reply).endswith(_plain(text))


def _plain(text: str) -> str:
    """Without case and outer quotes, because other constraints may ask for capitals and quotes."""
    return text.strip().strip('"\u201c\u201d').strip().casefold()


def is_json(reply: str) -> bool:
    """The whole reply is one JSON object or list; a ```json block around it is allowed."""
    text = reply.strip()
    if len(text) > 6 and text.startswith("```") and text.endswith("```"):
        text = re.sub(r"^\s*json\b", "", text[3:-3], flags=re.IGNORECASE)
    try:
        value = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):  # ValueError: also a number of too many digits
        return False
    return isinstance(value, dict | list)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is Python's, not JSON")


def title(reply: str) -> bool:
    """There is a title in double angular brackets: <<title>>."""
    return any(WORD.search(piece) for piece in re.findall(r"<<([^\n<>]+)>>", reply))


def no_commas(reply: str) -> bool:
    return not _COMMA.search(reply)


def language(reply: str, *, code: str) -> bool:
    return language_of(reply) == code


def postscript(reply: str, *, marker: str) -> bool:
    """Some line begins with a marker such as P.S., ignoring case, and text after it."""
    start = rf"^[ \t]*{re.escape(marker)}[ \t]*\S"
    return bool(re.search(start, reply, re.MULTILINE | re.IGNORECASE))


def quoted(reply: str) -> bool:
    """The whole reply is in double quotes."""
    text = reply.strip()
    is_quoted = (text[0], text[-1]) in (('"', '"'), ("\u201c", "\u201d"))
    return is_quoted and bool(_plain(text[1:-1]))


def one_of(reply: str, *, options: list[str]) -> bool:
    """The reply is one of the options, ignoring case and a full stop."""
    return reply.strip().strip(".\"'").casefold() in {o.strip(".").casefold() for o in options}


def two_responses(reply: str) -> bool:
    """Two different texts, separated by ******."""
    pieces = [piece.strip() for piece in reply.split("******")]
    return len(pieces) == 2 and all(pieces) and pieces[0] != pieces[1]


def repeats(reply: str, *, text: str) -> bool:
    """The reply repeats the text, ignoring case, then continues."""
    start = _plain(reply)
    repeated = _plain(text)
    return start.startswith(repeated) and len(start) > len(repeated)


def palindrome(reply: str, *, length: int) -> bool:
    """Some word of at least `length` letters is a palindrome."""
    found = (word.lower() for word in re.findall(r"[^\W\d_]+", reply))
    return any(len(word) >= length and word == word[::-1] for word in found)


def paragraph_starts(reply: str, *, number: int, word: str) -> bool:
    """Paragraph `number`, counted from 1, begins with the word."""
    pieces = paragraphs_of(reply)
    if number > len(pieces):
        return False
    first = WORD.search(pieces[number - 1])
    return first is not None and first[0].casefold() == word.casefold()


def language_of(text: str) -> str | None:
    """The language among LANGUAGES that a text is likeliest in; None for too little text."""
    code, score = _language_detector().classify(text)
    return code if score > -1e38 else None  # the lowest number: it knows no part of the text


@cache
def _language_detector() -> ModuleType:
    """A small package (4.5 MB) that is quick and gives a text the same language every time."""
    try:
        import py3langid
    except ImportError:
        raise UserError(
            "kind='language' needs a language detector; pip install 'py3langid>=0.4'"
        ) from None
    py3langid.set_languages(LANGUAGES)
    return py3langid


def _is_texts(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(map(_is_text, value))


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _is_whole(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


MEASURES: dict[str, Callable[..., int]] = {"words": count_words} | {
    measure.__name__: measure
    for measure in (
        sentences, paragraphs, capital_words, headings, bullets, numbered_items, placeholders,
        highlights, digits, keyword, letter, sections,
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
FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "count": (lambda value: _is_whole(value, 0), "a whole number from 0 on"),
    "number": (lambda value: _is_whole(value, 1), "a whole number from 1 on"),
    "length": (lambda value: _is_whole(value, 1), "a whole number from 1 on"),
    "letter": (lambda value: _is_text(value) and len(value) == 1, "one letter"),
    "word": (_is_text, "text that is not empty"),
    "text": (lambda value: _is_text(value) and bool(_plain(value)), "text that is not empty"),
    "marker": (_is_text, "text that is not empty"),
    "words": (_is_texts, "a list of texts"),
    "options": (_is_texts, "a list of texts"),
    "code": (lambda value: value in LANGUAGES, f"one of {', '.join(LANGUAGES)}"),
}
"""For each field: whether a value is valid, and what error messages say is expected."""
