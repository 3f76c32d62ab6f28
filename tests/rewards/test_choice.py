# ruff: noqa: E501 (tables)
"""The letter that a reply chooses, in many phrasings; two letters are none."""

import time

import pytest

from roll_lite.rewards.choice import choice_answer, chosen
from roll_lite.types import Prompt


def prompt(truth):
    return Prompt(id="p", messages=(), domain="choice", ground_truth=truth)


@pytest.mark.parametrize(
    "reply",
    [
        "B", "B.", "(B)", "B)", " b\n B", "**B**", "**B.**", "*B*", '"B"', "$B$", "[B]",
        "B) Paris", "B. Paris", "(B) Paris", "B: Paris", "**B) Paris**", "**B**: Paris",
        "The answer is B", "The answer is B.", "The answer is (B).", "The answer is (B) Paris.",
        "The answer is **B**.", "The answer is: B", "the answer is B because A is too small.",
        "Answer: B", "ANSWER: B", "Answer: (B)", "**Answer:** B", "**Answer: B**", "answer = B",
        "The correct answer is B.", "The correct option is B) Paris.", "The correct choice is (B)",
        "The correct answer is option B.", "So the answer would be B.", "The answer must be B.",
        "The best answer is B.", "Option B is correct.", "B is the correct answer.",
        "(B) is correct, the others are not.", "I choose B.", "I pick option B", "I would go with B",
        r"\boxed{B}", r"\boxed{(B)}", r"\boxed{\text{B}}", r"\boxed{\textbf{(B)}}", r"$\boxed{B}$",
        r"\boxed{\mathrm{B}}", r"\boxed{B) Paris}", r"\boxed{\text{B) Paris}}", "#### B",
        "A is wrong. C is wrong.\nThe answer is B.", "Both A and D are large.\nSo:\nB",
        "A. London\nThe answer is B", r"If the answer is A, then... no. \boxed{B}",
        "<think>The answer is A</think>The answer is B", "Answer choice: B", "The answer is\n\nB",
        "The answer is B. I repeat, the answer is B.", r"\boxed{B} so the answer is B",
        "Let me see.\nParis is in France.\nB) Paris", "The final answer is $\\boxed{B}$.",
        "<answer>B</answer>", "<answer>\n(B) Paris\n</answer>", "<answer>The answer is B</answer>",
        r"\(B\)", r"The answer is \(B\).", r"\[B\]", "'B'", "The answer is 'B'.", "Answer: 'B'",
        '{"answer": "B"}', "{'answer': 'B'}", '```json\n{"answer": "B"}\n```', '{"answer":"b"}',
        "b", "b)", "(b)", "b) Paris", "(b) Paris", "**b**", r"\boxed{b}", r"\boxed{\text{(b)}}",
        "The answer is b", "The answer is b.", "The answer is (b) Paris.", "Answer: b", "<answer>b</answer>",
        "The answer to this question is B", "The answer to the question is B.",
        "The correct answer to this multiple choice question is (B).", r"\boxed{B} = Paris",
        "The answer is A. Wait, the answer is B.", r"\boxed{A} Wait, no. The answer is B.",
        r"\boxed{A}. Actually, \boxed{B}.", "The answer is C. Hold on, A? I made a mistake: the answer is B",
        "Wait, what? The answer is B. Wait, is it? Yes.", "B_1 is large, so the answer is B",
    ],
)  # fmt: skip
def test_phrasings_of_b(reply):
    score = choice_answer(prompt("B"), reply)
    assert score.value == 1.0 and score.parts == {"correct": 1, "ambiguous": 0, "none": 0}
    assert choice_answer(prompt("C"), reply).value == 0.0


@pytest.mark.parametrize(
    ("reply", "letters"),
    [
        ("The answer is A or B.", "AB"), ("The answer is A and C", "AC"), ("Answer: A, B", "AB"),
        (r"\boxed{A} \boxed{B}", "AB"), (r"\boxed{A, B}", "AB"), (r"\boxed{A,B,C}", "ABC"),
        ("The answer is A. Then the answer is B.", "AB"), ("A\nB", "AB"),
        ("A) London\nB) Paris", "AB"), ("Answer: A/B", "AB"), ("I choose A. I choose B.", "AB"),
        ("The answer is (A) or (B).", "AB"), ("Option A is correct. Option B is correct.", "AB"),
    ],
)  # fmt: skip
def test_two_letters_are_no_choice(reply, letters):
    assert chosen(reply).letters == set(letters)
    for letter in letters:
        score = choice_answer(prompt(letter), reply)
        assert score.value == 0.0 and score.parts["ambiguous"] == 1.0


@pytest.mark.parametrize(
    "reply",
    [
        "", "I do not know.", "The answer is unclear.", "A good question about Paris.",
        "The answer is Paris", "Because of B vitamins it is hard to say which.", "42", r"\boxed{42}",
        "The answer is Absolutely nothing", "Answer: BA", "I think so", "The answer is a mystery",
        "The answer is A's uncle", r"\boxed{}", "<think>B</think>", r"\boxed{CO_2}", r"\boxed{C_2H_4}",
        r"\boxed{H_2O}", r"\boxed{\mathrm{C}_2}", r"\boxed{A = 5}", r"\boxed{B^2}", "The answer is E = mc^2",
        "The answer is C_6H_6", "The answer is e.g. 5", "The answer is a bit of everything", "i think so",
        "<answer>Carbon</answer>", '{"answer": "Carbon"}', "The answer to a question is a question",
    ],
)  # fmt: skip
def test_no_letter(reply):
    assert chosen(reply).letters == frozenset()
    assert choice_answer(prompt("A"), reply).parts == {"correct": 0, "ambiguous": 0, "none": 1}


@pytest.mark.parametrize("truth", ["B", "(B)", "B.", "B)", " B "])
def test_spellings_of_the_truth(truth):
    assert choice_answer(prompt(truth), "The answer is B").value == 1.0


@pytest.mark.parametrize("truth", ["", "b c", "Paris", "K", "AB", "1"])
def test_a_truth_that_is_no_letter_is_an_error(truth):
    with pytest.raises(ValueError, match=r"prompt p has ground_truth=.*one letter from A to J"):
        choice_answer(prompt(truth), "A")


@pytest.mark.parametrize(
    "run",
    [
        " ",
        "*",
        ",",
        "A, ",
        "(",
        "answer is ",
        r"\boxed{",
        "\nA",
        "A is ",
        "wait ",
        "a ",
        "answer to ",
    ],
)
def test_long_runs_take_no_time(run):
    start = time.process_time()
    chosen(rf"The answer is A{run * 20_000}x \boxed{{B{run * 20_000}")
    assert time.process_time() - start < 2.0
