import asyncio
from functools import partial

import pytest

from roll_lite.envs.question import Question
from roll_lite.rewards.code import passes_tests
from roll_lite.rewards.math import last_number
from roll_lite.rewards.registry import REWARDS, check_prompts
from roll_lite.types import Prompt, Score


def prompt(truth):
    return Prompt(id="p", messages=(), domain="d", ground_truth=truth)


@pytest.mark.parametrize(
    ("reply", "truth", "score"),
    [
        ("71", "71", 1.0),
        ("23 + 48 = 71.", "71", 1.0),
        ("The answer is 1,234.", "1234", 1.0),
        ("It is 1234.50", "1234.5", 1.0),
        ("-7", "-7", 1.0),
        ("7", "-7", 0.0),
        ("71 or 72", "71", 0.0),
        ("no idea", "71", 0.0),
        ("", "71", 0.0),
        ("710", "71", 0.0),
        ("007", "7", 1.0),
    ],
)
def test_last_number(reply, truth, score):
    assert last_number(prompt(truth), reply) == score


def test_a_question_ends_with_its_score():
    parts = {"format": 0.1, "answer": 0.4}
    env = Question(prompt("x"), lambda p, reply: Score(value=0.5, parts=parts))
    assert asyncio.run(env.step("y")) == ((), 0.5, True, False, {"parts": parts})
    env = Question(prompt("x"), lambda p, reply: reply == "x")
    assert asyncio.run(env.step("x"))[1] == 1.0


@pytest.mark.parametrize(
    ("domain", "fields", "message"),
    [
        ("math", {}, "prompt p has ground_truth=''; the reward math_answer needs"),
        ("choice", {"ground_truth": "Paris"}, "choice_answer needs one letter"),
        ("code", {}, "prompt p has no tests"),
        ("code", {"tests": ({"code": "assert ("},)}, r"tests\[0\] of prompt p is not Python"),
        ("instructions", {"tests": ({"kind": "rhyme"},)}, r"prompt p, tests\[0\]: kind='rhyme'"),
        ("quick code", {}, "prompt p has no tests"),
    ],
)
def test_prompts_that_could_not_be_scored_are_refused(domain, fields, message):
    rewards = REWARDS | {"quick code": partial(passes_tests, partial=True), "mine": last_number}
    good = Prompt(id="g", messages=(), domain="mine", ground_truth="")
    bad = Prompt(id="p", messages=(), domain=domain, **{"ground_truth": ""} | fields)
    with pytest.raises(ValueError, match=message):
        check_prompts([good, bad], rewards)
