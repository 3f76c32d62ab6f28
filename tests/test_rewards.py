import asyncio

import pytest

from roll_lite.envs.question import Question
from roll_lite.rewards.math import last_number
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
