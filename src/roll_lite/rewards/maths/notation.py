# ruff: noqa: RUF001 (mathematical signs are what this file is about)
r"""From the text of an answer to tokens.

`normalize` turns LaTeX, Unicode and plain text into one notation. Fractions, roots, functions and
Greek letters stay LaTeX commands; wrappers, spacing, currency and degree signs are removed;
operators become one character. `tokenize` splits the result.
"""

import re
from dataclasses import dataclass

MAX_TOKENS = 250
SET_OPEN, SET_CLOSE, UNION = "⦃", "⦄", "∪"

_DIGIT_GROUPS = re.compile(
    r"(?<=[0-9])(?:\{,\}|,\\! ?|\\[,;:! ]|~|\u2009|\u202f|\u00a0)(?=[0-9]{3}(?![0-9]))"
)
_SPACED_GROUPS = re.compile(r"(?<![\w.,/^}])[0-9]{1,3}(?: [0-9]{3})+(?![0-9/]| [0-9])")
_WRAPPER = re.compile(
    r"\\(?:text|textbf|textit|textrm|textnormal|mathrm|mathbf|mathit|mathsf|mbox|hbox|boxed|fbox|"
    r"operatorname|boldsymbol|bm|mathcal|emph)\s*\*?\s*\{([^{}]*)\}"
)
_REMOVED = re.compile(
    r"\\(?:left|right|[bB]igg?[lr]?|displaystyle|textstyle|limits|rm|bf)(?![A-Za-z])\s*\.?"
    r"|\^\s*\{?\s*\\circ\s*\}?|\\degree|°|\\?\$|[€£¥]|`|\*\*\*|\\\(|\\\)|\\\[|\\\]"
)
_SPACE = re.compile(r"\\(?:[,;:! ]|quad|qquad|hspace\{[^{}]*\})|~|\\\\|\s+")
_COMMANDS = {
    "dfrac": r"\frac ", "tfrac": r"\frac ", "cfrac": r"\frac ", "dbinom": r"\binom ",
    "tbinom": r"\binom ", "cdot": "*", "times": "*", "ast": "*", "div": "/", "le": "≤",
    "leq": "≤", "leqslant": "≤", "ge": "≥", "geq": "≥", "geqslant": "≥", "lt": "<", "gt": ">",
    "ne": "≠", "neq": "≠", "approx": "≈", "simeq": "≈", "in": "∈", "cup": UNION, "pm": "±",
    "mp": "∓", "infty": "∞", "lbrace": SET_OPEN, "rbrace": SET_CLOSE, "emptyset": "∅",
    "varnothing": "∅", "lvert": "|", "rvert": "|", "vert": "|", "mid": "|", "lor": ",",
    "land": ",", "colon": ":", "ldots": "…", "dots": "…", "cdots": "…", "varphi": r"\phi ",
    "varepsilon": r"\epsilon ", "vartheta": r"\theta ", "lbrack": "[", "rbrack": "]",
}  # fmt: skip
_COMMAND = re.compile(r"\\([A-Za-z]+)")
_SHORT_TOP = re.compile(r"\\(frac|binom)\s*([0-9a-z])")  # \frac12 is \frac{1}{2}
_SHORT_BOTTOM = re.compile(r"(\\(?:frac|binom)\s*\{[^{}]*\})\s*([0-9a-z])")
_CHARACTERS = str.maketrans({
    "−": "-", "–": "-", "—": "-", "×": "*", "·": "*", "⋅": "*", "∗": "*", "÷": "/", "⁄": "/",
    "π": r"\pi ", "√": r"\sqrt ", "∛": r"\sqrt[3]", "½": r"\frac{1}{2}",
    "⅓": r"\frac{1}{3}", "⅔": r"\frac{2}{3}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}",
    "≦": "≤", "≧": "≥", "（": "(", "）": ")", "，": ",", "θ": r"\theta ", "α": r"\alpha ",
    "β": r"\beta ", "λ": r"\lambda ", "φ": r"\phi ", "％": "%", "\u200b": None,
})  # fmt: skip
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺ⁿ", "0123456789-+n")
_BUILDER = re.compile(  # { x ∈ R | x > 2 } is its condition
    rf"{SET_OPEN}\s*(\\?[A-Za-z]+)\s*(?:∈\s*(?:\\mathbb\s*\{{?\s*R\s*\}}?|ℝ|R)\s*)?[|:]"
    rf"(?=[^{SET_CLOSE}]*\1)([^{SET_OPEN}{SET_CLOSE}]*){SET_CLOSE}"
)
_MATRIX = re.compile(r"\\begin\{([pb]?matrix|array)\}(?:\{[lcr|]*\})?(.*?)\\end\{\1\}", re.DOTALL)
_NUMBERS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen "
    "fifteen sixteen seventeen eighteen nineteen twenty"
)
_NUMBER_WORDS = _NUMBERS.split()
SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_OPERATIONS = {"plus": "+", "minus": "-", "times": "*", "divided by": "/", "over": "/"}
_POWERS = {"squared": "^2", "cubed": "^3"} | {word: f"*10^{n}" for word, n in SCALES.items()}
_OPERATION = re.compile(rf"(?<=[0-9]) ({'|'.join(_OPERATIONS)})(?= -?[0-9])")
_POWER = re.compile(rf"(?<=[0-9]) ?({'|'.join(_POWERS)})(?![A-Za-z])")
_CHOOSE = re.compile(r"([0-9]+) choose ([0-9]+)")
_UNITS = {
    "mm": "millimeter millimeters millimetre millimetres",
    "cm": "centimeter centimeters centimetre centimetres",
    "m": "meter meters metre metres",
    "km": "kilometer kilometers kilometre kilometres",
    "in": "inch inches",
    "ft": "foot feet",
    "yd": "yard yards",
    "mi": "mile miles",
    "mg": "milligram milligrams",
    "g": "gram grams",
    "kg": "kilogram kilograms",
    "lb": "pound pounds lbs",
    "oz": "ounce ounces",
    "s": "second seconds sec secs",
    "min": "minute minutes mins",
    "h": "hour hours hr hrs",
    "d": "day days",
    "wk": "week weeks",
    "yr": "year years yrs",
    "mL": "ml milliliter milliliters millilitre millilitres",
    "L": "liter liters litre litres",
    "$": "dollar dollars usd USD",
    "¢": "cent cents",
    "°": "degree degrees deg",
    "rad": "radian radians",
    "mph": "",
}
_CANONICAL_UNITS = {
    word: symbol for symbol, words in _UNITS.items() for word in (symbol, *words.split())
}
UNIT_LETTERS = {
    symbol: words.split()[0]
    for symbol, words in _UNITS.items()
    if len(symbol) == 1 and symbol.isalpha()
}
"""Units that look like variables, and their spelled-out names."""
_FUNCTION_NAMES = (
    "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh ln log lg exp abs asin acos atan"
)
_GREEK_LETTERS = (
    "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi rho sigma tau "
    "upsilon phi chi psi omega Gamma Delta Theta Lambda Xi Sigma Phi Psi Omega ell"
)
_WORDS = "yes no not on of to in the all any has for are day few"
FUNCTIONS, _GREEK, _SHORT_WORDS = (
    frozenset(names.split()) for names in (_FUNCTION_NAMES, _GREEK_LETTERS, _WORDS)
)
_DOUBLED = re.compile(  # as in text that was escaped for JSON
    r"(?<!\\)\\\\(?=[{}%]|(?:frac|sqrt|binom|pi|sum|prod|gcd|begin|end|left|right|text|mathrm|mathbb|"
    rf"{'|'.join([*_COMMANDS, *FUNCTIONS, *_GREEK])})(?![A-Za-z]))"
)
_CONSTANT_WORDS = {"pi": "pi", "infinity": "∞", "inf": "∞", "oo": "∞", "Infinity": "∞"}
_PHRASE = re.compile(r" +[A-Za-z]{4,}")  # after a short word: the word is not a product of letters
_TOKEN = re.compile(
    r"\s*(?:(?P<number>(?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+)(?:[eE][+-]?[0-9]+(?![0-9.]))?)"
    rf"|(?P<command>\\[A-Za-z]+)|(?P<word>[A-Za-z]+)|(?P<symbol>[^\s\w\\]|[_{SET_OPEN}{SET_CLOSE}]))"
)


class NotUnderstood(Exception):
    """The text is in no notation that this package reads."""


class TooLarge(Exception):
    """The text is readable, but exceeds one of the size limits."""


@dataclass(frozen=True, slots=True)
class Token:
    kind: str
    """number, name, function, command, word, symbol, or end."""
    text: str


END = Token("end", "")


def normalize(text: str) -> str:
    """Rewrite an answer in the one notation that the tokenizer and the parser read."""
    text = _DOUBLED.sub(lambda match: "\\", text.strip().strip("*"))
    text = _DIGIT_GROUPS.sub("", text)
    text = text.replace(r"\{", SET_OPEN).replace(r"\}", SET_CLOSE).replace(r"\%", "%")
    text = _ascii(_MATRIX.sub(_matrix_as_tuple, text))
    text = _REMOVED.sub(" ", _unwrap(text))
    text = _COMMAND.sub(lambda match: _COMMANDS.get(match[1], match[0]), text)
    text = _SPACE.sub(" ", text).replace("**", "^")
    text = _SHORT_TOP.sub(r"\\\1{\2}", text)
    text = _SHORT_BOTTOM.sub(r"\1{\2}", text)
    text = text.replace("<=", "≤").replace(">=", "≥").replace("!=", "≠")
    text = re.sub(r"\b(?:or|and)\b", ",", text)
    text = re.sub(r",(?:\s*,)+", ",", text)
    text = re.sub(r"^[\s:]+|[\s.;:]+$", "", text)
    text = _SPACED_GROUPS.sub(lambda match: match[0].replace(" ", ""), text)
    return _number_word(_BUILDER.sub(r"{\2}", _without_words(text)))


def readings(text: str) -> list[str]:
    """Ways to read a normalized text: 1,234 as one number, then as two.

    Inside brackets a comma always separates items.
    """
    pieces = []
    depth = start = 0
    for match in re.finditer(rf"[(\[{SET_OPEN}{SET_CLOSE})\]]", text):
        if depth == 0:
            pieces.append(_join_digits(text[start : match.start()]))
            start = match.start()
        depth = max(0, depth + (1 if match.group() in f"([{SET_OPEN}" else -1))
        if depth == 0:
            pieces.append(text[start : match.end()])
            start = match.end()
    pieces.append(text[start:] if depth else _join_digits(text[start:]))
    joined = "".join(pieces)
    return [joined] if joined == text else [joined, text]


def _join_digits(text: str) -> str:
    return re.sub(
        r"(?<![0-9.,])[0-9]{1,3}(?:,[0-9]{3})+(?![0-9,])",
        lambda match: match[0].replace(",", ""),
        text,
    )


def _ascii(text: str) -> str:
    text = re.sub(r"[⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺ⁿ]+", lambda m: "^{" + m[0].translate(_SUPERSCRIPTS) + "}", text)
    return text.translate(_CHARACTERS)


def _unwrap(text: str) -> str:
    r"""Replace \text{...} and similar wrappers by their content, up to four levels deep."""
    for _ in range(4):
        text = _WRAPPER.sub(_content, text)
    return text


def _content(match: re.Match) -> str:
    r"""Spell out unit letters: the m of 5\text{ m} is a unit, not a variable."""
    return f" {UNIT_LETTERS.get(match[1].strip(), match[1])} "


def _matrix_as_tuple(match: re.Match) -> str:
    """A matrix is a tuple of its rows; a single row or column is a tuple of its entries."""
    rows = [row.split("&") for row in re.split(r"\\\\", match[2]) if row.strip()]
    if len(rows) == 1 or all(len(row) == 1 for row in rows):
        return f"({', '.join(entry for row in rows for entry in row)})"
    return "(" + ", ".join(f"({', '.join(row)})" for row in rows) + ")"


def _number_word(text: str) -> str:
    word = text.strip().casefold()
    return str(_NUMBER_WORDS.index(word)) if word in _NUMBER_WORDS else text


def _without_words(text: str) -> str:
    """Words that calculate with the number before them: 5 million, 6 minus 1, 10 choose 3."""
    text = _OPERATION.sub(lambda match: _OPERATIONS[match[1]], text)
    text = _POWER.sub(lambda match: _POWERS[match[1]], text)
    return _CHOOSE.sub(r"\\binom{\1}{\2}", text)


def is_unit(word: str) -> bool:
    return word in _CANONICAL_UNITS and word != "in"  # which is a preposition more often


def units_differ(unit: str, other: str) -> bool:
    """Whether both units are known and different; an unknown word agrees with every unit."""
    known = [_CANONICAL_UNITS.get(u) for u in (unit, other)]
    return None not in known and known[0] != known[1]


def tokenize(text: str) -> list[Token]:
    tokens: list[Token] = []
    position = 0
    text = text.rstrip()
    while position < len(text):
        match = _TOKEN.match(text, position)
        if not match:
            raise NotUnderstood(f"{text[position:].strip()[:10]!r} is not readable")
        is_in_phrase = _PHRASE.match(text, match.end()) is not None
        tokens += _split(match.lastgroup, match[match.lastgroup], is_in_phrase)
        position = match.end()
        if len(tokens) > MAX_TOKENS:
            raise TooLarge(f"more than {MAX_TOKENS} tokens")
    return tokens


def _split(kind: str, text: str, is_in_phrase: bool) -> list[Token]:
    """Tokens of one match: a short word without a known meaning is a product of letters."""
    bare = text.removeprefix("\\")
    if kind in ("number", "symbol"):
        return [Token(kind, text)]
    if bare in FUNCTIONS:
        return [Token("function", bare)]
    if bare in _CONSTANT_WORDS:
        return [Token("name", _CONSTANT_WORDS[bare])]
    if kind == "command" or bare in ("sqrt", "gcd", "lcm"):
        return [Token("name" if bare in _GREEK else "command", bare)]
    if len(text) == 1:
        return [Token("name", text)]
    function = next((f for f in FUNCTIONS if text.startswith(f) and len(text) == len(f) + 1), None)
    if function:
        return [Token("function", function), Token("name", text[-1])]
    if len(text) > 3 or is_in_phrase or text.lower() in _SHORT_WORDS or text in _CANONICAL_UNITS:
        return [Token("word", text)]
    return [Token("name", letter) for letter in text]
