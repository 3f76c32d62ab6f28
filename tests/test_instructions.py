"""The reward for following instructions, its parts, and what it refuses."""

import re
from itertools import islice
from random import Random

import pytest

from roll_lite.rewards.constraints import KINDS
from roll_lite.rewards.instruction_prompts import MAX_CONSTRAINTS, describe, draw_instructions
from roll_lite.rewards.instructions import check_instructions, instructions_followed
from roll_lite.tasks import prompts
from roll_lite.types import Prompt


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
    assert score.parts == {"min_words": 1, "no_commas": 0, "keywords": 1, "keywords_2": 0}
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
        ({"kind": "language", "code": "xx"}, "code='xx' .* one of ja, ko, zh"),
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
