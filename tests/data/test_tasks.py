"""Generated tasks: right answers, disjoint splits, the same for the same seed."""

import re
from itertools import islice

import pytest

from roll_lite.data.tasks import prompts
from roll_lite.rewards.instructions import instructions_followed


def questions(task, split="train", seed=0, count=500):
    return [
        (p.messages[0]["content"], p.ground_truth)
        for p in islice(prompts(task, seed=seed, split=split), count)
    ]


def test_answers_are_right():
    for question, answer in questions("addition:2"):
        a, b = map(int, re.fullmatch(r"What is (\d\d) \+ (\d\d)\?", question).groups())
        assert a + b == int(answer)
    for question, answer in questions("reverse:5"):
        (word,) = re.fullmatch(r"Reverse ([a-z]{5})", question).groups()
        assert list(answer) == [*reversed(word)]
    for question, answer in questions("counting:8"):
        letter, word = re.fullmatch(r"How many (.) in ([a-z]{8})\?", question).groups()
        assert sum(c == letter for c in word) == int(answer)


@pytest.mark.parametrize(
    "task", ["addition:1", "addition:2", "reverse:2", "counting:3", "instructions:1"]
)
def test_no_held_out_question_is_ever_trained_on(task):
    count = 500 if task == "instructions:1" else 3000  # these take a millisecond each
    train = {q for seed in range(3) for q, _ in questions(task, "train", seed, count)}
    held_out = {q for q, _ in questions(task, "held_out", 9, 300)}
    assert held_out and not train & held_out


def test_seeds_name_the_questions():
    assert questions("reverse:5", seed=1) == questions("reverse:5", seed=1)
    assert questions("reverse:5", seed=1) != questions("reverse:5", seed=2)


def test_the_example_of_an_instruction_prompt_follows_all_of_it():
    for prompt in islice(prompts("instructions:3", seed=0), 50):
        assert prompt.domain == "instructions" and len(prompt.tests) == 3
        assert instructions_followed(prompt, prompt.ground_truth).value == 1.0


def test_too_many_instructions_are_refused():
    with pytest.raises(ValueError, match=r"task='instructions:9' is too large; .* N up to 8"):
        next(prompts("instructions:9", seed=0))


@pytest.mark.parametrize("task", ["addition", "addition:0", "addition:x", "poetry:3", ""])
def test_an_unknown_task_lists_the_known_ones(task):
    with pytest.raises(ValueError, match=r"task='.*addition:N, reverse:N, counting:N"):
        next(prompts(task, seed=0))
