"""Where the answer of a reply is found."""

import pytest

from roll_lite.rewards.final_answer import final_answers


@pytest.mark.parametrize(
    ("reply", "answer", "place"),
    [
        (r"So it is \boxed{5}.", "5", "boxed"),
        (r"\boxed{1} no, \boxed{2}", "2", "boxed"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}", "boxed"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}", "boxed"),
        (r"\boxed {x^{2^{3}}} done", "x^{2^{3}}", "boxed"),
        (r"\boxed{a\boxed{b}c}", r"a\boxed{b}c", "boxed"),
        (r"\fbox{7}", "7", "boxed"),
        (r"x = \boxed{1} or \boxed{2}", "1, 2", "boxed"),
        (r"$\boxed{1}$, $\boxed{2}$ and $\boxed{3}$.", "1, 2, 3", "boxed"),
        (r"\boxed{3} and then it was cut: \boxed{4", "3", "boxed"),
        (r"The answer is 4. \boxed{5} Or the answer is 6.", "5", "boxed"),
        ("The answer is 42.", "42", "stated"),
        ("The final answer is: **42**", "42", "stated"),
        ("Answer: 3.5 apples\nThank you", "3.5 apples", "stated"),
        ("answer is 1. Wait, the answer is 2.", "2", "stated"),
        ("ANSWER = 12", "12", "stated"),
        ("She has 3 + 4 = 7.\n#### 7", "7", "stated"),
        ("#### 1,234", "1,234", "stated"),
        (r"The answer is $\frac{1}{2}$.", r"$\frac{1}{2}$", "stated"),
        ("**Answer:** 9", "9", "stated"),
        ("71", "71", "whole"),
        ("x^2 + 1", "x^2 + 1", "whole"),
        ("one line\nand 12 more\nthen 13 it is", "13", "last number"),
        ("it costs\n$1,234.50 in all", "1,234.50", "last number"),
        ("a\nthe value -7", "-7", "last number"),
        ("a\nfrom 10-3", "3", "last number"),
        ("a\nhence 3/4", "3/4", "last number"),
        ("a\nhence \\frac{3}{4} of it", r"\frac{3}{4}", "last number"),
        ("a\n1, 2, 3", "3", "last number"),
        ("a\n50% of them", "50%", "last number"),
        ("<think>it is \\boxed{1}</think>\nNo 2", "No 2", "whole"),
    ],
)
def test_the_answer_and_its_place(reply, answer, place):
    assert next(final_answers(reply)) == (answer, place)


@pytest.mark.parametrize("reply", ["", "  ", "no\nidea", "<think>5</think>"])
def test_no_answer(reply):
    assert list(final_answers(reply)) == []


def test_a_sentence_is_tried_before_its_number():
    answers = list(final_answers("So the answer is that he has 5 apples."))
    assert answers == [("that he has 5 apples", "stated"), ("5", "last number")]


def test_many_open_boxes_take_no_time():
    assert list(final_answers(r"\boxed{" * 20_000 + "\n"))[:1] == []
