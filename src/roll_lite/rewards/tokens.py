"""The signs of an answer: numbers, names, functions, words and symbols."""

import re
from dataclasses import dataclass

from roll_lite.rewards.notation import SET_CLOSE, SET_OPEN
from roll_lite.rewards.units import UNITS

MAX_TOKENS = 250
_FUNCTIONS = (
    "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh ln log lg exp abs asin acos atan"
)
_GREEK = (
    "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi rho sigma tau "
    "upsilon phi chi psi omega Gamma Delta Theta Lambda Xi Sigma Phi Psi Omega ell"
)
_SHORT_WORDS = "yes no not on of to in the all any has for are day few"
FUNCTIONS, GREEK, SHORT_WORDS = (
    frozenset(names.split()) for names in (_FUNCTIONS, _GREEK, _SHORT_WORDS)
)
CONSTANT_WORDS = {"pi": "pi", "infinity": "∞", "inf": "∞", "oo": "∞", "Infinity": "∞"}
_PHRASE = re.compile(r" +[A-Za-z]{4,}")  # what follows a short word that is no product
_TOKEN = re.compile(
    r"\s*(?:(?P<number>(?:\d+(?:\.\d+)?|\.\d+)(?:[eE][+-]?\d+(?![\d.]))?)"
    rf"|(?P<command>\\[A-Za-z]+)|(?P<word>[A-Za-z]+)|(?P<symbol>[^\s\w\\]|[_{SET_OPEN}{SET_CLOSE}]))"
)


class NotUnderstood(Exception):
    """The text is not in a notation that we read."""


class TooLarge(Exception):
    """The text is understood, but its value takes more space than an answer should."""


@dataclass(frozen=True, slots=True)
class Token:
    kind: str
    """number, name, function, command, word, symbol, or end."""
    text: str


END = Token("end", "")


def tokens_of(text: str) -> list[Token]:
    tokens, position, text = [], 0, text.rstrip()
    while position < len(text):
        match = _TOKEN.match(text, position)
        if not match:
            raise NotUnderstood(f"{text[position:].strip()[:10]!r} has no meaning here")
        is_in_phrase = _PHRASE.match(text, match.end()) is not None
        tokens += _split(match.lastgroup, match[match.lastgroup], is_in_phrase)
        position = match.end()
        if len(tokens) > MAX_TOKENS:
            raise TooLarge(f"more than {MAX_TOKENS} signs")
    return tokens


def _split(kind: str, text: str, is_in_phrase: bool) -> list[Token]:
    """The tokens of one match: a short word is a product of letters, unless it has a meaning."""
    bare = text.removeprefix("\\")
    if kind in ("number", "symbol"):
        return [Token(kind, text)]
    if bare in FUNCTIONS:
        return [Token("function", bare)]
    if bare in CONSTANT_WORDS:
        return [Token("name", CONSTANT_WORDS[bare])]
    if kind == "command" or bare == "sqrt":
        return [Token("name" if bare in GREEK else "command", bare)]
    if len(text) == 1:
        return [Token("name", text)]
    function = next((f for f in FUNCTIONS if text.startswith(f) and len(text) == len(f) + 1), None)
    if function:
        return [Token("function", function), Token("name", text[-1])]
    if len(text) > 3 or is_in_phrase or text.lower() in SHORT_WORDS or text in UNITS:
        return [Token("word", text)]
    return [Token("name", letter) for letter in text]
