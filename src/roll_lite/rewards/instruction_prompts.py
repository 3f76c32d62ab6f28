"""Prompts with random instructions, for the task `instructions:N`.

A reply is drawn first: a text with random features. The constraints are then read off it, so they
can always be fulfilled together, and the reply is an example.
"""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any, NamedTuple

from roll_lite.checks import UserError
from roll_lite.rewards.instructions import MEASURES, keyword

MAX_CONSTRAINTS = 8
_VOCABULARY = (
    "bread rivers trains winter gardens bridges music maps clocks paper islands lamps",
    "teachers farmers sailors children artists travellers neighbours engineers",
    "admire describe remember discuss paint study protect celebrate",
    "villages harbours museums mountains markets libraries valleys kitchens",
)
_TOPICS, _SUBJECTS, _VERBS, _PLACES = (words.split() for words in _VOCABULARY)
_TIMES = ("every morning", "after lunch", "in silence", "with great care", "once a year", "")
_OPENINGS = ("Dear reader", "In short", "Once upon a time", "To begin with")
_CLOSINGS = ("Thank you for reading.", "That is all.", "Any other questions?")
_FEATURE_SHARE = 0.35  # of texts that have a given feature


Constraint = dict[str, Any]


class Instructions(NamedTuple):
    topic: str
    tests: tuple[Constraint, ...]
    reply: str
    """A text that fulfils all constraints."""

    @property
    def question(self) -> str:
        lines = [f"- {describe(test)}" for test in self.tests]
        return "\n".join([f"Write about {self.topic} and follow these instructions:", *lines])


@dataclass(frozen=True, slots=True)
class Draft:
    text: str
    topic: str
    features: frozenset[str]


_BOUNDS = {"min": "at least", "max": "at most", "exact": "exactly"}
_SENTENCES = {
    "keywords": "Use these words: {words}.",
    "forbidden_words": "Do not use these words: {words}.",
    "keyword": "Use the word {word} {bound} {count} times.",
    "letter": "Use the letter {letter} {bound} {count} times.",
    "bullets": "Write {bound} {count} bullet points that begin with a hyphen.",
    "highlights": "Highlight {bound} {count} parts with *asterisks*.",
    "placeholders": "Use {bound} {count} placeholders in square brackets.",
    "capital_words": "Write {bound} {count} words all in capitals.",
    "paragraphs": "Write {bound} {count} paragraphs with blank lines between them.",
    "starts_with": "Begin with: {text}",
    "ends_with": "End with: {text}",
    "title": "Give it a title in <<double angular brackets>>.",
    "postscript": "Add a postscript that begins with {marker}",
    "no_commas": "Do not use commas.",
    "lowercase": "Use lowercase letters only.",
    "uppercase": "Use capital letters only.",
}


def describe(test: Constraint) -> str:
    """A drawn constraint as a sentence for the prompt."""
    bound, _, measure = test["kind"].partition("_")
    if bound not in _BOUNDS:
        bound = ""
        measure = test["kind"]
    default = f"Write {{bound}} {{count}} {measure}."
    fields = test | {"words": ", ".join(test.get("words", ())), "bound": _BOUNDS.get(bound)}
    return _SENTENCES.get(measure, default).format(**fields)


def draw_instructions(random: Random, count: int) -> Instructions:
    """Draw `count` different constraints and a reply that fulfils them."""
    if not 1 <= count <= MAX_CONSTRAINTS:
        raise UserError(f"count={count} must be from 1 to {MAX_CONSTRAINTS} constraints")
    draft = _draft(random)
    rules = [read for needed, read in _RULES if not needed or needed in draft.features]
    tests = tuple(read(draft, random) for read in random.sample(rules, count))
    return Instructions(draft.topic, tests, draft.text)


def _draft(random: Random) -> Draft:
    topic = random.choice(_TOPICS)
    features = {name for name in _FEATURES if random.random() < _FEATURE_SHARE}
    if "title" in features:  # only one of them can be first
        features.discard("opening")
    pieces = [
        " ".join(_sentence(random, topic) for _ in range(random.randint(1, 3)))
        for _ in range(random.randint(1, 3))
    ]
    for name in _FEATURES:  # in this order: features of the start and the end are added last
        if name in features:
            _add_feature(name, pieces, random, topic)
    text = "\n\n".join(pieces)
    case = random.choice(("lowercase", "uppercase", "", "", ""))
    if case:
        text = text.lower() if case == "lowercase" else text.upper()
        features = {case} | (features & {"bullets", "highlights", "title", "digits"})
    return Draft(text, topic, frozenset(features))


def _sentence(random: Random, topic: str) -> str:
    subject, verb, place = (random.choice(words) for words in (_SUBJECTS, _VERBS, _PLACES))
    time = random.choice(_TIMES)
    return f"{subject.capitalize()} {verb} {topic} near {place} {time}".strip() + "."


def _add_feature(name: str, pieces: list[str], random: Random, topic: str) -> None:
    piece = _FEATURES[name](random, topic)
    if name == "opening":
        pieces[0] = f"{piece}: {pieces[0]}"
    elif name == "title":
        pieces.insert(0, piece)
    else:
        pieces.append(piece)


def _bullets(random: Random, topic: str) -> str:
    items = random.sample(_PLACES, random.randint(2, 4))
    return "\n".join(f"- {topic} of {item}" for item in items)


def _highlights(random: Random, topic: str) -> str:
    return f"Mind the *{random.choice(_PLACES)}* and the *{random.choice(_VERBS)}*."


def _placeholders(random: Random, topic: str) -> str:
    return f"Write to [name] at [{random.choice(('address', 'place', 'city'))}]."


_FEATURES: dict[str, Callable[[Random, str], str]] = {
    "bullets": _bullets,
    "highlights": _highlights,
    "placeholders": _placeholders,
    "digits": lambda random, topic: f"There are {random.randint(100, 9999)} of them.",
    "opening": lambda random, topic: random.choice(_OPENINGS),
    "title": lambda random, topic: f"<<All about {topic}>>",
    "postscript": lambda random, topic: f"P.S. {_sentence(random, topic)}",
    "closing": lambda random, topic: random.choice(_CLOSINGS),
}


def _bounded(measure: str, *bounds: str, slack: int = 0) -> Callable[[Draft, Random], Constraint]:
    """A bound that the text keeps, loosened by up to `slack`."""

    def read(draft: Draft, random: Random) -> Constraint:
        bound = random.choice(bounds)
        away = random.randint(0, slack)
        count = MEASURES[measure](draft.text)
        if bound == "min":
            count = max(count - away, 1)
        elif bound == "max":
            count += away
        return {"kind": f"{bound}_{measure}", "count": count}

    return read


def _keywords(draft: Draft, random: Random) -> Constraint:
    words = (*_SUBJECTS, *_VERBS, *_PLACES)
    present = [word for word in words if keyword(draft.text, word=word)]
    return {"kind": "keywords", "words": random.sample(present, 2)}


def _forbidden(draft: Draft, random: Random) -> Constraint:
    absent = [w for w in (*_TOPICS, *_PLACES) if not keyword(draft.text, word=w)]
    return {"kind": "forbidden_words", "words": random.sample(absent, 2)}


def _keyword_count(draft: Draft, random: Random) -> Constraint:
    kind = random.choice(("min_keyword", "max_keyword"))
    count = keyword(draft.text, word=draft.topic)
    return {"kind": kind, "word": draft.topic, "count": count}


def _letter_count(draft: Draft, random: Random) -> Constraint:
    letter = random.choice("aeimnorst")
    count = MEASURES["letter"](draft.text, letter=letter) - random.randint(0, 3)
    return {"kind": "min_letter", "letter": letter, "count": max(count, 0)}


def _opens(draft: Draft, random: Random) -> Constraint:
    return {"kind": "starts_with", "text": next(o for o in _OPENINGS if o in draft.text)}


def _closes(draft: Draft, random: Random) -> Constraint:
    return {"kind": "ends_with", "text": next(c for c in _CLOSINGS if c in draft.text)}


def _named(kind: str, **fields: str) -> Callable[[Draft, Random], Constraint]:
    return lambda draft, random: {"kind": kind, **fields}


_RULES: tuple[tuple[str, Callable[[Draft, Random], Constraint]], ...] = (
    ("", _bounded("words", "min", "max", slack=10)),
    ("", _bounded("sentences", "min", "max", "exact", slack=1)),
    ("", _bounded("paragraphs", "exact")),
    ("", _bounded("capital_words", "max", slack=2)),
    ("", _keywords),
    ("", _forbidden),
    ("", _keyword_count),
    ("", _letter_count),
    ("", _named("no_commas")),
    ("bullets", _bounded("bullets", "exact", "min")),
    ("highlights", _bounded("highlights", "min")),
    ("placeholders", _bounded("placeholders", "min")),
    ("digits", _bounded("digits", "exact", "min")),
    ("opening", _opens),
    ("title", _named("title")),
    ("postscript", _named("postscript", marker="P.S.")),
    ("closing", _closes),
    ("lowercase", _named("lowercase")),
    ("uppercase", _named("uppercase")),
)
"""For each constraint: the feature that a text needs for it, and how it is read off the text."""
