# ruff: noqa: E501, RUF001 (tables of texts in several scripts)
"""Every kind of constraint, the reward for following instructions, and the prompts drawn for it."""

import importlib.util
import re
import sys
import time
from itertools import islice
from random import Random

import pytest

from roll_lite.data.tasks import prompts
from roll_lite.rewards.instruction_prompts import MAX_CONSTRAINTS, describe, draw_instructions
from roll_lite.rewards.instructions import (
    CHECKS,
    KINDS,
    LANGUAGES,
    MEASURES,
    _language_detector,
    check_instructions,
    fields_of,
    holds,
    instructions_followed,
    language_of,
)
from roll_lite.types import Prompt

COUNTS = [
    ("words", {}, "One two three.", 3),
    ("words", {}, "It's a well-known fact: 42!", 5),
    ("words", {}, "... ____ _", 0),
    ("sentences", {}, "One. Two! Three?", 3),
    ("sentences", {}, "Dr. Smith met Mr. Jones at 3.5 km. They left.", 2),
    ("sentences", {}, "Use e.g. this one", 1),
    ("sentences", {}, 'He said "no." Then he left...', 2),
    ("sentences", {}, "A title\n\nA sentence.", 2),
    ("paragraphs", {}, "a\nb\n\nc\n  \n\nd\n", 3),
    ("paragraphs", {}, "a\nb", 1),
    ("paragraphs", {}, "a\n***\nb\n\nb\n\n***\n\nc", 3),
    ("paragraphs", {}, "a *** b", 2),
    ("paragraphs", {}, "a\n\n---\n\n.\n\nb", 2),
    ("paragraphs", {}, "***a***\n\n* * b", 2),
    ("capital_words", {}, "I saw NASA and the EU", 3),
    ("capital_words", {}, "A U.S. plan: IT'S b. 42 *X* Ab", 4),
    ("headings", {}, "# One\ntext # no\n### Two\n#no", 2),
    ("bullets", {}, "- a\n* b\n  - c\n-d\ntext - e", 3),
    ("bullets", {}, "* * *\n- - -\n* - a", 1),
    ("numbered_items", {}, "1. a\n2) b\nin 1. c\n3.d", 2),
    ("placeholders", {}, "[name] lives in [city], see [here](url) and []", 2),
    ("placeholders", {}, "- [ ] a [...] [x]", 1),
    ("highlights", {}, "*one* and **two** and 3 * 4 * 5 and ** **", 2),
    ("digits", {}, "In 1999, 3 of 4", 6),
    ("keyword", {"word": "sea"}, "Sea, season, the SEA. seas", 2),
    ("keyword", {"word": "high sea"}, "on the High Sea", 1),
    ("keyword", {"word": "sea"}, "_sea_ \uff33\uff45\uff41 sea_level sea1", 3),
    ("letter", {"letter": "a"}, "Anna had a plan", 5),
    ("sections", {"marker": "Section"}, "Section 1\ntext\n## SECTION 2\nSection three", 2),
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
    ("starts_with", {"text": "Dear"}, ["Dear you", "\n Dear", "DEAR YOU", '"Dear you"'], ["Oh Dear", "De ar"]),
    ("ends_with", {"text": "Bye."}, ["So. Bye.\n", "so. bye.", "“So. Bye.”"], ["Bye. So", "Bye"]),
    ("json", {}, ['{"a": [1]}', "[1, 2]", '```json\n{"a": 1}\n```', "```\n[]\n```", '```JSON\n{"A": 1}\n```', '``` Json\n[1]```'], ["{a: 1}", "```JSONL\n[]\n```", '{"A": TRUE}', "42", 'So: {"a": 1}', "```", "[" * 100_000, "[NaN]"]),
    ("title", {}, ["<<A title>>\ntext"], ["<title>", "<< >>", "<<a\nb>>", "<<.>>"]),
    ("no_commas", {}, ["None here.", "\u201aSo\u2018 ist es."], ["One, here", "一，二", "a\u060c b", "a\uff64b", "a\u201a b"]),
    ("postscript", {"marker": "P.S."}, ["Text\nP.S. more", "P.S.more", "p.s. more"], ["P.S.", "Text P.S. more"]),
    ("quoted", {}, ['"All of it."', " “So.” "], ['"a" b', '"', '""', "plain", '"""', '" "']),
    ("one_of", {"options": ["My answer is yes.", "no"]}, ["My answer is yes", "No.", " NO "], ["yes", "no way"]),
    ("two_responses", {}, ["a\n******\nb"], ["a", "a******", "a******a", "a******b******c"]),
    ("repeats", {"text": "Say it. "}, ["Say it. It.", "SAY IT. IT"], ["Say it.", "It. Say it.", '"Say it."']),
    ("palindrome", {"length": 5}, ["a Level road", "rotor"], ["noon", "levels", "12321"]),
    ("paragraph_starts", {"number": 2, "word": "then"}, ["a\n\nThen b"], ["Then", "then a\n\nb", "a\n\nthence"]),
    ("language", {"code": "de"}, ["Das ist ein Haus und der Garten ist nicht groß."], ["This is a house and the garden is not big."]),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "fields", "good", "bad"), CASES, ids=[c[0] for c in CASES])
def test_checks(kind, fields, good, bad):
    if kind == "language":
        pytest.importorskip("py3langid")
    for reply in good:
        assert holds(reply, {"kind": kind, **fields}), reply
    for reply in bad:
        assert not holds(reply, {"kind": kind, **fields}), reply


UNSEEN = "\u200b"
HIDDEN = [
    ({"kind": "forbidden_words", "words": ["bread"]}, f"br{UNSEEN}ead"),
    ({"kind": "forbidden_words", "words": ["bread"]}, "bre\u00adad"),
    ({"kind": "max_keyword", "word": "bread", "count": 1}, f"bread, br{UNSEEN}ead"),
    ({"kind": "min_placeholders", "count": 1}, f"a [{UNSEEN}]"),
    ({"kind": "min_highlights", "count": 1}, f"a **{UNSEEN}**"),
    ({"kind": "min_bullets", "count": 1}, f"a\n- {UNSEEN}"),
    ({"kind": "min_numbered_items", "count": 1}, f"a\n1. {UNSEEN}"),
    ({"kind": "min_words", "count": 2}, "a \u3164 \u115f"),
    ({"kind": "min_paragraphs", "count": 2}, f"{UNSEEN}\n\na"),
    ({"kind": "exact_paragraphs", "count": 1}, f"a\n{UNSEEN}\nb"),
    ({"kind": "title"}, f"<<{UNSEEN}>>"),
    ({"kind": "postscript", "marker": "P.S."}, f"a\nP.S. {UNSEEN}"),
    ({"kind": "two_responses"}, f"a ****** a{UNSEEN}"),
    ({"kind": "no_commas"}, UNSEEN),
]


@pytest.mark.parametrize(("constraint", "reply"), HIDDEN)
def test_characters_that_cannot_be_seen_fulfil_nothing(constraint, reply):
    assert not holds(reply, constraint)


def test_words_with_joiners_are_found():
    """Persian writes a word with a character that cannot be seen."""
    word = "\u0645\u06cc\u200c\u0631\u0648\u0645"
    assert holds(f"\u0645\u0646 {word}.", {"kind": "keywords", "words": [word]})


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
    "uk": "Кішка сиділа на даху і не хотіла спускатися за рибою.",
    "bg": "Котката беше на покрива и не искаше да слезе за рибата.",
    "pl": "Kot siedział na dachu i nie chciał zejść po rybę.",
    "fi": "Kissa oli katolla eikä halunnut tulla alas kalan takia.",
    "vi": "Con mèo ở trên mái nhà và không muốn xuống ăn cá.",
    "sw": "Paka alikuwa juu ya paa na hakutaka kushuka kwa ajili ya samaki.",
    "fa": "گربه روی پشت بام بود و نمی\u200cخواست برای ماهی پایین بیاید.",
    "ur": "بلی چھت پر تھی اور مچھلی کے لیے نیچے نہیں آنا چاہتی تھی۔",
    "bn": "বিড়ালটি ছাদে ছিল এবং মাছের জন্য নিচে নামতে চায়নি।",
    "ta": "பூனை கூரையில் இருந்தது, மீனுக்காக கீழே வர விரும்பவில்லை.",
    "te": "పిల్లి పైకప్పు మీద ఉంది మరియు చేప కోసం కిందికి రావాలనుకోలేదు.",
    "kn": "ಬೆಕ್ಕು ಛಾವಣಿಯ ಮೇಲೆ ಇತ್ತು ಮತ್ತು ಮೀನಿಗಾಗಿ ಕೆಳಗೆ ಬರಲು ಬಯಸಲಿಲ್ಲ.",
    "ml": "പൂച്ച മേൽക്കൂരയിലായിരുന്നു, മീനിനായി ഇറങ്ങാൻ ആഗ്രഹിച്ചില്ല.",
    "mr": "मांजर छतावर होती आणि तिला माशासाठी खाली यायचे नव्हते.",
    "ne": "बिरालो छतमा थियो र माछाको लागि तल आउन चाहँदैनथ्यो।",
    "gu": "બિલાડી છત પર હતી અને માછલી માટે નીચે આવવા માંગતી ન હતી.",
    "pa": "ਬਿੱਲੀ ਛੱਤ 'ਤੇ ਸੀ ਅਤੇ ਮੱਛੀ ਲਈ ਹੇਠਾਂ ਨਹੀਂ ਆਉਣਾ ਚਾਹੁੰਦੀ ਸੀ।",
    "cs": "Kočka byla na střeše a nechtěla kvůli rybě slézt dolů.",
    "da": "Katten var på taget og ville ikke komme ned efter fisken.",
    "hu": "A macska a tetőn volt, és nem akart lejönni a halért.",
    "id": "Kucing itu berada di atap dan tidak mau turun untuk ikan.",
    "no": "Katten var på taket og ville ikke komme ned for fisken, men jeg kunne se den.",
    "ro": "Pisica era pe acoperiș și nu voia să coboare după pește.",
    "sv": "Katten var på taket och ville inte komma ner för fisken.",
    "tr": "Kedi çatıdaydı ve balık için aşağı inmek istemiyordu.",
}


def test_languages():
    pytest.importorskip("py3langid")
    assert {code: language_of(text) for code, text in SAMPLES.items()} == {c: c for c in SAMPLES}
    assert set(SAMPLES) == set(LANGUAGES)
    for code in ("en", "uk", "tr"):
        assert holds(SAMPLES[code].upper(), {"kind": "language", "code": code})
    for text in ("", "42", "ok"):
        assert language_of(text) is None


def test_without_a_detector_languages_are_refused_at_the_start(monkeypatch):
    _language_detector.cache_clear()
    monkeypatch.setitem(sys.modules, "py3langid", None)
    with pytest.raises(ValueError, match=r"tests\[0\]: kind='language' needs .* pip install"):
        check_instructions(prompt({"kind": "language", "code": "uk"}))


def test_thinking_does_not_count():
    thoughts = "<think>\nNo commas, at all.\n</think>\n"
    for text, fulfils in ((thoughts + "None.", 1), (thoughts + "Well, no.", 0), (thoughts, 0)):
        score = instructions_followed(prompt({"kind": "no_commas"}), text)
        assert score.value == fulfils
        assert score.parts["unreadable"] == float(text == thoughts)
    unfinished = instructions_followed(prompt({"kind": "no_commas"}), "<think>\nWell")
    assert (unfinished.value, unfinished.parts["unreadable"]) == (0, 1)
    assert not holds("no commas, at all.</think>Well", {"kind": "max_words", "count": 0})


@pytest.mark.parametrize("case", ["lowercase", "uppercase"])
def test_texts_can_be_given_in_the_case_that_is_asked_for(case):
    tests = (
        {"kind": case},
        {"kind": "starts_with", "text": "Dear Reader"},
        {"kind": "min_sections", "marker": "Part", "count": 1},
        {"kind": "postscript", "marker": "P.P.S"},
        {"kind": "ends_with", "text": "Is there Anything else?"},
    )
    text = "Dear reader\n\nPart 1\nHere.\n\nP.P.S. Once more. Is there anything else?"
    given = text.lower() if case == "lowercase" else text.upper()
    assert instructions_followed(prompt(*tests), given, strict=True).value == 1
    assert instructions_followed(prompt(*tests), text, strict=True).value == 0
    assert instructions_followed(prompt(*tests), given[:-1], strict=True).value == 0


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
    start = time.process_time()
    for kind in KINDS if importlib.util.find_spec("py3langid") else set(KINDS) - {"language"}:
        holds("x" + reply * 30_000 + "x", {"kind": kind, **{f: FIELDS[f] for f in fields_of(kind)}})
    assert time.process_time() - start < 5.0


def prompt(*tests):
    return Prompt(id="p", messages=(), domain="instructions", ground_truth="", tests=tests)


TESTS = (
    {"kind": "min_words", "count": 3},
    {"kind": "no_commas"},
    {"kind": "keywords", "words": ["sea"]},
    {"kind": "keywords", "words": ["ship"]},
)


def test_the_share_that_is_fulfilled():
    score = instructions_followed(prompt(*TESTS), "The sea, wide and blue")
    assert score.value == 0.5
    parts = {"min_words": 1, "no_commas": 0, "keywords": 1, "keywords_2": 0}
    assert score.parts == parts | {"unreadable": 0}
    assert instructions_followed(prompt(*TESTS), "A ship at sea").value == 1.0
    assert instructions_followed(prompt(*TESTS), "").value == 0.0


def test_strict_is_all_or_nothing():
    assert instructions_followed(prompt(*TESTS), "The sea is blue", strict=True).value == 0.0
    assert instructions_followed(prompt(*TESTS), "A ship at sea", strict=True).value == 1.0


@pytest.mark.parametrize(
    ("test", "message"),
    [
        (
            {"kind": "many_words", "count": 3},
            "kind='many_words' is not known; use one of min_words",
        ),
        ({"count": 3}, "kind=None is not known"),
        ({"kind": "min_words"}, "kind='min_words' has no field 'count'; it needs count"),
        ({"kind": "min_keyword", "count": 1}, "no field 'word'; it needs count, word"),
        ({"kind": "no_commas", "count": 1}, "reads no field 'count', only none"),
        (
            {"kind": "min_words", "count": "3"},
            "count='3' of kind='min_words' must be a whole number",
        ),
        ({"kind": "min_words", "count": -1}, "count=-1"),
        ({"kind": "min_words", "count": True}, "count=True"),
        ({"kind": "keywords", "words": "sea"}, "words='sea' .* must be a list of texts"),
        ({"kind": "keywords", "words": []}, r"words=\[\]"),
        ({"kind": "min_letter", "letter": "ab", "count": 1}, "letter='ab' .* one letter"),
        ({"kind": "language", "code": "xx"}, "code='xx' .* one of ar, bg, bn"),
        ({"kind": "starts_with", "text": '""'}, "must be text that is not empty"),
        ("min_words", "must be an object"),
    ],
)
def test_constraints_that_cannot_be_checked_are_refused(test, message):
    with pytest.raises(ValueError, match=rf"prompt p, tests\[1\]: .*{message}"):
        check_instructions(prompt(TESTS[0], test))
    with pytest.raises(ValueError, match=r"tests\[1\]"):
        instructions_followed(prompt(TESTS[0], test), "a reply")


def test_a_prompt_without_constraints_is_refused():
    with pytest.raises(ValueError, match="prompt p has no tests"):
        check_instructions(prompt())


def test_drawn_instructions_can_be_followed_and_mostly_are_not_by_chance():
    followed, kinds, replies = 0, set(), []
    for count in range(1, MAX_CONSTRAINTS + 1):
        for drawn in islice(prompts(f"instructions:{count}", seed=5), 40):
            check_instructions(drawn)
            assert len(drawn.tests) == count
            assert instructions_followed(drawn, drawn.ground_truth, strict=True).value == 1.0
            kinds |= {test["kind"] for test in drawn.tests}
            followed += sum(
                instructions_followed(drawn, other, strict=True).value for other in replies[-1:]
            )
            replies.append(drawn.ground_truth)
    assert len(kinds) > 20 and kinds <= set(KINDS)
    assert followed < 0.2 * len(replies)


def test_the_question_says_every_number_and_word_of_its_constraints():
    for seed in range(50):
        drawn = draw_instructions(Random(seed), 5)
        for test in drawn.tests:
            sentence = describe(test)
            assert sentence in drawn.question and not re.search(r"[{}]|None", sentence)
            for value in (v for key, v in test.items() if key != "kind"):
                for text in value if isinstance(value, list) else [value]:
                    assert str(text) in sentence


@pytest.mark.parametrize("count", [0, MAX_CONSTRAINTS + 1])
def test_too_few_or_too_many_instructions(count):
    with pytest.raises(ValueError, match=f"count={count} must be from 1 to 8"):
        draw_instructions(Random(0), count)
