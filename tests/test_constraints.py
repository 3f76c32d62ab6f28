# ruff: noqa: E501, RUF001 (tables of texts in several scripts)
"""Every kind of constraint, with texts that fulfil it and texts that do not."""

import time

import pytest

from roll_lite.rewards.constraints import CHECKS, KINDS, MEASURES, fields_of, holds
from roll_lite.rewards.languages import LANGUAGES, language_of

COUNTS = [
    ("words", {}, "One two three.", 3),
    ("words", {}, "It's a well-known fact: 42!", 5),
    ("words", {}, "...", 0),
    ("sentences", {}, "One. Two! Three?", 3),
    ("sentences", {}, "Dr. Smith met Mr. Jones at 3.5 km. They left.", 2),
    ("sentences", {}, "Use e.g. this one", 1),
    ("sentences", {}, 'He said "no." Then he left...', 2),
    ("sentences", {}, "A title\n\nA sentence.", 2),
    ("paragraphs", {}, "a\nb\n\nc\n  \n\nd\n", 3),
    ("paragraphs", {}, "a\nb", 1),
    ("capital_words", {}, "I saw NASA and the EU", 2),
    ("headings", {}, "# One\ntext # no\n### Two\n#no", 2),
    ("bullets", {}, "- a\n* b\n  - c\n-d\ntext - e", 3),
    ("numbered_items", {}, "1. a\n2) b\nin 1. c\n3.d", 2),
    ("placeholders", {}, "[name] lives in [city], see [here](url) and []", 2),
    ("highlights", {}, "*one* and **two** and 3 * 4 * 5 and ** **", 2),
    ("digits", {}, "In 1999, 3 of 4", 6),
    ("keyword", {"word": "sea"}, "Sea, season, the SEA. seas", 2),
    ("keyword", {"word": "high sea"}, "on the High Sea", 1),
    ("letter", {"letter": "a"}, "Anna had a plan", 5),
    ("sections", {"marker": "Section"}, "Section 1\ntext\n## Section 2\nSection three", 2),
]


@pytest.mark.parametrize(("measure", "fields", "reply", "count"), COUNTS)
def test_measures_and_their_bounds(measure, fields, reply, count):
    found = MEASURES[measure](reply, **fields)
    assert found == count
    for bound, fulfilled in {"min": (1, 1, 0), "max": (0, 1, 1), "exact": (0, 1, 0)}.items():
        for limit, expected in zip((count - 1, count, count + 1), fulfilled, strict=True):
            constraint = {"kind": f"{bound}_{measure}", "count": limit, **fields}
            assert holds(reply, constraint) == expected


CASES = [
    ("keywords", {"words": ["red", "blue"]}, ["Red and BLUE."], ["red only", "reddish blue"]),
    ("forbidden_words", {"words": ["red"]}, ["reddish"], ["It is red.", "RED"]),
    ("lowercase", {}, ["all small, 42."], ["Not all", "42"]),
    ("uppercase", {}, ["ALL LARGE, 42."], ["Not ALL", "42"]),
    ("starts_with", {"text": "Dear"}, ["Dear you", "\n Dear"], ["dear you", "Oh Dear"]),
    ("ends_with", {"text": "Bye."}, ["So. Bye.\n"], ["Bye. So", "Bye"]),
    ("json", {}, ['{"a": [1]}', "[1, 2]", '```json\n{"a": 1}\n```', "```\n[]\n```"], ["{a: 1}", "42", 'So: {"a": 1}', "```", "[" * 100_000]),
    ("title", {}, ["<<A title>>\ntext"], ["<title>", "<< >>", "<<a\nb>>"]),
    ("no_commas", {}, ["None here."], ["One, here", "一，二"]),
    ("postscript", {"marker": "P.S."}, ["Text\nP.S. more", "P.S.more"], ["P.S.", "Text P.S. more"]),
    ("quoted", {}, ['"All of it."', " “So.” "], ['"a" b', '"', '""', "plain"]),
    ("one_of", {"options": ["My answer is yes.", "no"]}, ["My answer is yes", "No.", " NO "], ["yes", "no way"]),
    ("two_responses", {}, ["a\n******\nb"], ["a", "a******", "a******a", "a******b******c"]),
    ("repeats", {"text": "Say it. "}, ["Say it. It."], ["Say it.", "It. Say it.", "say it. It"]),
    ("palindrome", {"length": 5}, ["a Level road", "rotor"], ["noon", "levels", "12321"]),
    ("paragraph_starts", {"number": 2, "word": "then"}, ["a\n\nThen b"], ["Then", "then a\n\nb", "a\n\nthence"]),
    ("language", {"code": "de"}, ["Das ist ein Haus und der Garten ist nicht groß."], ["This is a house and the garden is not big."]),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "fields", "good", "bad"), CASES, ids=[c[0] for c in CASES])
def test_checks(kind, fields, good, bad):
    for reply in good:
        assert holds(reply, {"kind": kind, **fields}), reply
    for reply in bad:
        assert not holds(reply, {"kind": kind, **fields}), reply


def test_every_kind_is_tested():
    assert {case[0] for case in CASES} == set(CHECKS)
    assert {case[0] for case in COUNTS} == set(MEASURES)


SAMPLES = {
    "en": "The cat was on the roof and it did not want to come down for the fish.",
    "de": "Die Katze war auf dem Dach und wollte nicht für den Fisch herunterkommen.",
    "fr": "Le chat était sur le toit et il ne voulait pas descendre pour les poissons.",
    "es": "El gato estaba en el tejado y no quería bajar por los peces de la casa.",
    "it": "Il gatto era sul tetto e non voleva scendere per i pesci della casa che è vicina.",
    "pt": "O gato estava no telhado e não queria descer para os peixes da casa, mas foi.",
    "nl": "De kat was op het dak en wilde niet naar beneden komen voor de vis van het huis.",
    "ru": "Кошка сидела на крыше и не хотела спускаться за рыбой.",
    "zh": "猫在屋顶上，不想下来吃鱼。",
    "ja": "猫は屋根の上にいて、魚のために降りたくなかった。",
    "ko": "고양이는 지붕 위에 있었고 내려오고 싶지 않았다.",
    "ar": "كانت القطة على السطح ولم تكن تريد النزول.",
    "he": "החתולה הייתה על הגג ולא רצתה לרדת.",
    "hi": "बिल्ली छत पर थी और नीचे नहीं आना चाहती थी।",
    "th": "แมวอยู่บนหลังคาและไม่อยากลงมา",
    "el": "Η γάτα ήταν στη στέγη και δεν ήθελε να κατέβει.",
}


def test_languages():
    assert {code: language_of(text) for code, text in SAMPLES.items()} == {c: c for c in SAMPLES}
    assert set(SAMPLES) == set(LANGUAGES)
    for text in ("", "42", "Xyzzy plugh", "Hello Кошка"):
        assert language_of(text) is None


def test_an_empty_reply_fulfils_nothing():
    assert not holds(" \n", {"kind": "no_commas"})
    assert not holds("", {"kind": "max_words", "count": 5})


FIELDS = {
    "count": 3, "number": 1, "length": 3, "letter": "a", "word": "a", "text": "a", "marker": "a",
    "words": ["a"], "options": ["a"], "code": "en",
}  # fmt: skip


@pytest.mark.parametrize(
    "reply", [".", "\n", " ", "* ", "**a", "# ", "[", "<<", "- \n", "a ", "```\n", "A. "]
)
def test_degenerate_replies_take_no_time(reply):
    start = time.perf_counter()
    for kind in KINDS:
        holds("x" + reply * 30_000 + "x", {"kind": kind, **{f: FIELDS[f] for f in fields_of(kind)}})
    assert time.perf_counter() - start < 5.0
