# ruff: noqa: RUF001 (mathematical signs are what this file is about)
r"""One notation for answers: LaTeX, Unicode and plain text become text that `expression` reads.

`\dfrac12`, `½` and `1/2` differ in more than letters, so fractions, roots, functions and Greek
letters stay commands; wrappers, spacing, currency and degrees go; operators become one character.
"""

import re

from roll_lite.rewards.units import LETTERS

SET_OPEN, SET_CLOSE, UNION = "⦃", "⦄", "∪"

_DIGIT_GROUPS = re.compile(r"(?<=\d)(?:\{,\}|,\\!|\\[,;:! ]|~|\u2009|\u202f|\u00a0)(?=\d{3}(?!\d))")
_WRAPPER = re.compile(
    r"\\(?:text|textbf|textit|textrm|textnormal|mathrm|mathbf|mathit|mathsf|mbox|hbox|boxed|fbox|"
    r"operatorname|boldsymbol|bm|mathcal|emph)\s*\*?\s*\{([^{}]*)\}"
)
_NOTHING = re.compile(
    r"\\(?:left|right|[bB]igg?[lr]?|displaystyle|textstyle|limits|rm|bf)(?![A-Za-z])\s*\.?"
    r"|\^\s*\{?\s*\\circ\s*\}?|\\degree|°|\\?\$|[€£¥]|`|\*\*\*|\\\(|\\\)|\\\[|\\\]"
)
_SPACE = re.compile(r"\\(?:[,;:! ]|quad|qquad|hspace\{[^{}]*\})|~|\\\\|\s+")
_COMMANDS = {
    "dfrac": r"\frac ", "tfrac": r"\frac ", "cfrac": r"\frac ", "dbinom": r"\binom ",
    "tbinom": r"\binom ", "cdot": "*", "times": "*", "ast": "*", "div": "/", "le": "≤",
    "leq": "≤", "leqslant": "≤", "ge": "≥", "geq": "≥", "geqslant": "≥", "lt": "<", "gt": ">",
    "ne": "≠", "neq": "≠", "approx": "=", "simeq": "=", "in": "∈", "cup": UNION, "pm": "±",
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
    "π": r"\pi ", "√": r"\sqrt ", "∛": r"\sqrt[3]", "≈": "=", "½": r"\frac{1}{2}",
    "⅓": r"\frac{1}{3}", "⅔": r"\frac{2}{3}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}",
    "≦": "≤", "≧": "≥", "（": "(", "）": ")", "，": ",", "θ": r"\theta ", "α": r"\alpha ",
    "β": r"\beta ", "λ": r"\lambda ", "φ": r"\phi ", "％": "%", "\u200b": None,
})  # fmt: skip
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺ⁿ", "0123456789-+n")
_MATRIX = re.compile(r"\\begin\{([pb]?matrix|array)\}(?:\{[lcr|]*\})?(.*?)\\end\{\1\}", re.DOTALL)
_NUMBERS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen "
    "fifteen sixteen seventeen eighteen nineteen twenty"
)
_NUMBER_WORDS = _NUMBERS.split()


def plain(text: str) -> str:
    """The answer in the notation that `expression.parse` reads, without what does not matter."""
    text = _DIGIT_GROUPS.sub("", text.strip().strip("*"))
    text = text.replace(r"\{", SET_OPEN).replace(r"\}", SET_CLOSE).replace(r"\%", "%")
    text = _unicode(_MATRIX.sub(_rows, text))
    text = _NOTHING.sub(" ", _unwrapped(text))
    text = _COMMAND.sub(lambda match: _COMMANDS.get(match[1], match[0]), text)
    text = _SPACE.sub(" ", text).replace("**", "^")
    text = _SHORT_TOP.sub(r"\\\1{\2}", text)
    text = _SHORT_BOTTOM.sub(r"\1{\2}", text)
    text = text.replace("<=", "≤").replace(">=", "≥").replace("!=", "≠")
    text = re.sub(r"\b(?:or|and)\b", ",", text)
    text = re.sub(r",(?:\s*,)+", ",", text)
    text = re.sub(r"^[\s:]+|[\s.;:]+$", "", text)
    return _number_word(text)


def readings(text: str) -> list[str]:
    """The ways to read a plain text: 1,234 as one number first, then as two.

    Inside brackets a comma always parts two items.
    """
    pieces, depth, start = [], 0, 0
    for match in re.finditer(rf"[(\[{SET_OPEN}{SET_CLOSE})\]]", text):
        if depth == 0:
            pieces.append(_joined(text[start : match.start()]))
            start = match.start()
        depth = max(0, depth + (1 if match.group() in f"([{SET_OPEN}" else -1))
        if depth == 0:
            pieces.append(text[start : match.end()])
            start = match.end()
    pieces.append(text[start:] if depth else _joined(text[start:]))
    joined = "".join(pieces)
    return [joined] if joined == text else [joined, text]


def _joined(text: str) -> str:
    return re.sub(
        r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])", lambda match: match[0].replace(",", ""), text
    )


def _unicode(text: str) -> str:
    text = re.sub(r"[⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺ⁿ]+", lambda m: "^{" + m[0].translate(_SUPERSCRIPTS) + "}", text)
    return text.translate(_CHARACTERS)


def _unwrapped(text: str) -> str:
    """Without \\text{...} and its like, whose content stays."""
    for _ in range(4):  # as deep as they are nested in earnest
        text, count = _WRAPPER.subn(_content, text)
        if not count:
            break
    return text


def _content(match: re.Match) -> str:
    r"""What is wrapped; a letter such as that of 5\text{ m} is a unit and no variable."""
    return f" {LETTERS.get(match[1].strip(), match[1])} "


def _rows(match: re.Match) -> str:
    """A matrix as a tuple of its rows; one row or one column is a tuple of its entries."""
    rows = [row.split("&") for row in re.split(r"\\\\", match[2]) if row.strip()]
    if len(rows) == 1 or all(len(row) == 1 for row in rows):
        return f"({', '.join(entry for row in rows for entry in row)})"
    return "(" + ", ".join(f"({', '.join(row)})" for row in rows) + ")"


def _number_word(text: str) -> str:
    word = text.strip().casefold()
    return str(_NUMBER_WORDS.index(word)) if word in _NUMBER_WORDS else text
