"""Rewards for the format of a reply: tags, length, repetition."""

import pytest

from roll_lite.rewards.format import has_tags, length_target, matches, repetition_penalty
from roll_lite.types import Prompt

PROMPT = Prompt(id="p", messages=(), domain="d", ground_truth="")


@pytest.mark.parametrize(
    ("reply", "value"),
    [
        ("<think>a</think><answer>b</answer>", 1),
        ("\n<think>\na < b\n</think>\n\n<answer>b</answer>\n", 1),
        ("<answer>b</answer><think>a</think>", 0),
        ("<think>a</think>", 0),
        ("<think>a</think><answer>b", 0),
        ("<think> </think><answer>b</answer>", 0),
        ("So <think>a</think><answer>b</answer>", 0),
        ("<think>a</think> so <answer>b</answer>", 0),
        ("<think>a</think><answer>b</answer> so", 0),
        ("<think>a</think><think>a</think><answer>b</answer>", 0),
        ("<think>a<think></think><answer>b</answer>", 0),
        ("<think>a<answer>c</answer></think><answer>b</answer>", 0),
        ("", 0),
    ],
)
def test_tags_in_order_and_nothing_else(reply, value):
    assert has_tags(PROMPT, reply) == value


def test_other_tags():
    assert has_tags(PROMPT, "<plan>a</plan>", tags=("plan",)) == 1.0
    assert has_tags(PROMPT, "<think>a</think>", tags=("plan",)) == 0.0


def test_a_pattern_is_for_the_whole_reply():
    assert matches(PROMPT, " Step 1\nAnswer: 4 ", pattern=r".*Answer: \d+") == 1.0
    assert matches(PROMPT, "Answer: 4 or so", pattern=r".*Answer: \d+") == 0.0


def test_length_falls_in_a_straight_line():
    found = [length_target(PROMPT, "w " * n, words=10, tolerance=5) for n in (0, 5, 8, 10, 12, 20)]
    assert found == pytest.approx([0, 0, 0.6, 1, 0.6, 0])
    with pytest.raises(ValueError, match="tolerance=0"):
        length_target(PROMPT, "w", words=10, tolerance=0)


def reference_penalty(words, n):
    """The share of n-grams that are not the first of their kind, counted one by one."""
    grams = [words[i : i + n] for i in range(len(words) - n + 1)]
    repeated = sum(any(grams[j] == gram for j in range(i)) for i, gram in enumerate(grams))
    return -repeated / len(grams) if grams else 0.0


@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize(
    "text", ["", "a b c", "a b c d e f", "a b a b a b a b", "so so so so so so", "A b a B c a b"]
)
def test_repetition_is_the_share_of_repeated_ngrams(text, n):
    expected = reference_penalty(text.lower().split(), n)
    assert repetition_penalty(PROMPT, text, ngram=n) == pytest.approx(expected, abs=1e-12)


def test_a_loop_is_punished_most():
    assert repetition_penalty(PROMPT, "and then " * 500) < -0.99
    with pytest.raises(ValueError, match="ngram=0"):
        repetition_penalty(PROMPT, "a", ngram=0)
