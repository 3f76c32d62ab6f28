"""Which language a text is in: by its script, or by its commonest words."""

import re

SCRIPTS = {
    "ja": r"[\u3040-\u30ff]",
    "ko": r"[\uac00-\ud7af\u1100-\u11ff]",
    "zh": r"[\u4e00-\u9fff]",
    "ru": r"[\u0400-\u04ff]",
    "ar": r"[\u0600-\u06ff]",
    "he": r"[\u0590-\u05ff]",
    "hi": r"[\u0900-\u097f]",
    "th": r"[\u0e00-\u0e7f]",
    "el": r"[\u0370-\u03ff]",
}
"""Japanese comes before Chinese, whose characters it uses too."""
STOP_WORDS = {
    "en": "the of and to in is that it was for with as his he be at by this had not are but from "
    "have you which were they one their all would there",
    "de": "der die und das in den von zu mit ist nicht ein eine auf sich dem des im für auch es "
    "wird sie werden wie aus bei sind oder einer ich",
    "fr": "le la les de des et un une du est en que qui dans pour pas sur au avec il elle ce se "
    "sont par plus ne nous vous cette mais",
    "es": "el la los las de y en que es un una por con para del se no al lo como más pero sus su "
    "le ha este son entre muy",
    "it": "il di che la e è un una per in non con del della si le da sono come gli anche alla più "
    "ma nel questo lo dei al",
    "pt": "o a os as de que e do da em um uma para com não se na no por mais dos como mas foi ao "
    "são ele ela das seu",
    "nl": "de het een van en in is dat op te zijn met voor niet die aan er om ook als maar bij "
    "wordt door naar uit hij nog wel",
}
LANGUAGES = (*SCRIPTS, *STOP_WORDS)
_SCRIPTS = {code: re.compile(pattern) for code, pattern in SCRIPTS.items()}
_STOP_WORDS = {code: frozenset(words.split()) for code, words in STOP_WORDS.items()}
_MOST_KANJI = 10  # characters of Chinese to one kana in Japanese text


def language_of(text: str) -> str | None:
    """The code of the language; None where two fit alike or none does."""
    letters = [character for character in text if character.isalpha()]
    if not letters:
        return None
    counts = {code: len(pattern.findall(text)) for code, pattern in _SCRIPTS.items()}
    if counts["ja"] * _MOST_KANJI >= counts["zh"]:
        counts["ja"] += counts["zh"] if counts["ja"] else 0
    code = max(counts, key=counts.__getitem__)
    if 2 * counts[code] > len(letters):
        return code
    return None if 2 * sum(counts.values()) > len(letters) else _by_stop_words(text)


def _by_stop_words(text: str) -> str | None:
    """The language with the most stop words; a text of several words needs some of them."""
    words = re.findall(r"[^\W\d_]+", text.lower())
    shares = {
        code: sum(word in known for word in words) / len(words)
        for code, known in _STOP_WORDS.items()
    }
    best, second = sorted(shares, key=shares.__getitem__, reverse=True)[:2]
    return best if shares[best] > max(shares[second], 0.1) else None
