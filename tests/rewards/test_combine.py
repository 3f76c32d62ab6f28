"""Rewards added up: values, parts, pickles, and what is refused."""

import pickle
from functools import partial

import pytest

from roll_lite.rewards.combine import weighted
from roll_lite.rewards.format import has_tags, repetition_penalty
from roll_lite.rewards.maths import math_answer
from roll_lite.rewards.registry import REWARDS
from roll_lite.types import Prompt

PROMPT = Prompt(id="p", messages=(), domain="math", ground_truth="4")
REPLY = r"<think>2 + 2</think><answer>\boxed{4}</answer>"


def both():
    return weighted({"correct": (math_answer, 1.0), "format": (has_tags, 0.2)})


def test_the_weighted_sum_and_its_parts():
    score = both()(PROMPT, REPLY)
    assert score.value == pytest.approx(1.2)
    unused = {"correct/unreadable": 0.0, "correct/math_verify": 0.0}
    assert score.parts == {"correct": 1.0, "correct/boxed": 1.0, "format": 1.0} | unused
    score = both()(PROMPT, "<think>2 + 2</think><answer>5</answer>")
    assert score.value == pytest.approx(0.2)
    assert score.parts == {"correct": 0.0, "correct/boxed": 0.0, "format": 1.0} | unused
    assert score.reason == "correct: extracted 5 (stated), expected 4"


def test_options_and_negative_weights():
    reward = weighted({"loop": (partial(repetition_penalty, ngram=1), 0.5), "tags": (has_tags, -1)})
    score = reward(PROMPT, "a a")
    assert score.value == pytest.approx(-0.25) and score.parts == {"loop": -0.5, "tags": 0.0}


def test_sums_of_sums():
    score = weighted({"all": (both(), 0.5)})(PROMPT, REPLY)
    assert score.value == pytest.approx(0.6)
    assert score.parts["all/correct/boxed"] == 1.0 and score.parts["all"] == pytest.approx(1.2)


def test_it_travels_to_workers():
    reward = pickle.loads(pickle.dumps(both()))
    assert reward == both() and reward(PROMPT, REPLY) == both()(PROMPT, REPLY)
    for reward in REWARDS.values():
        assert pickle.loads(pickle.dumps(reward)) is reward


@pytest.mark.parametrize(
    ("rewards", "message"),
    [
        ({}, "rewards={} is empty"),
        ({"a": (has_tags, float("nan"))}, "weight=nan of a must be a finite number"),
        ({"a/b": (has_tags, 1.0)}, "name='a/b'"),
        ({"mean": (has_tags, 1.0)}, "parts has 'mean', but reward/mean is a metric of every run"),
        ({"a": (lambda prompt, reply: 1.0, 1.0)}, "the reward of a cannot be sent to a worker"),
    ],
)
def test_what_is_refused(rewards, message):
    with pytest.raises(ValueError, match=message):
        weighted(rewards)
