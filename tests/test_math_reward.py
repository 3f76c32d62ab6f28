"""The reward of mathematics: from a whole reply to a score."""

import importlib.util
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from roll_lite.rewards.math import judge, math_answer
from roll_lite.types import Prompt


def prompt(truth):
    return Prompt(id="p", messages=(), domain="math", ground_truth=truth)


@pytest.mark.parametrize(
    ("reply", "truth", "correct", "boxed"),
    [
        (r"Thus \boxed{\dfrac{1}{2}}.", "0.5", 1, 1),
        (r"Thus \boxed{\dfrac{1}{3}}.", "0.5", 0, 1),
        ("The answer is 18 dollars per day.", "18", 1, 0),
        ("The answer is that Janet makes $18.", "18", 1, 0),
        ("First 9 * 2 = 18.\nShe makes 18 dollars a day", "18", 1, 0),
        ("#### 1,234", "1234", 1, 0),
        ("23 + 48 = 71.", "71", 1, 0),
        ("71 or 72", "72", 0, 0),
        (r"\boxed{} 5", "5", 0, 1),
        (r"\boxed{B}", "B", 1, 1),
        (r"\boxed{\textbf{(B) } 12}", "B", 1, 1),
        (r"The answer is \(x = 5\).", "5", 1, 0),
        (r"The answer is \max(2, 5).", "2", 0, 0),
        ("Yes", "Yes", 1, 0),
        (r"\boxed{\text{True}}", "Yes", 1, 1),
        (r"\boxed{1} and \boxed{2}", "1", 0, 1),
        ("", "5", 0, 0),
        (r"\boxed{9^{9^{9^{9}}}}", "5", 0, 1),
        (r"\boxed{9^{9^{9^{9}}}}", "9^{9^{9^{9}}}", 1, 1),
    ],
)
def test_scores_of_replies(reply, truth, correct, boxed):
    score = math_answer(prompt(truth), reply)
    assert score.value == correct and score.parts == {"correct": correct, "boxed": boxed}


def test_a_prompt_without_its_answer_is_an_error():
    with pytest.raises(ValueError, match="prompt p has ground_truth=' '"):
        math_answer(prompt(" "), "5")


@pytest.mark.skipif(not importlib.util.find_spec("math_verify"), reason="needs math-verify")
def test_math_verify_reads_what_we_do_not():
    verdict = judge(r"\boxed{\max(2, 5)}", r"\max(5, 2)").verdict
    assert (verdict.kind, verdict.why) == ("equal", "math-verify says so")
    assert judge(r"\boxed{\max(2, 5)}", "4").verdict.kind == "not comparable"


@pytest.mark.skipif(not importlib.util.find_spec("math_verify"), reason="needs math-verify")
def test_math_verify_is_stopped_and_asked_in_the_main_thread_only(monkeypatch):
    monkeypatch.setattr("roll_lite.rewards.math.SECONDS", 1)
    endless = r"\boxed{\sum_{n=1}^{\infty} \frac{1}{n^5+1}}"
    start = time.perf_counter()
    assert judge(endless, "5").verdict.kind == "not comparable"
    assert time.perf_counter() - start < 10
    with ThreadPoolExecutor() as pool:
        judged = pool.submit(judge, r"\boxed{\max(2, 5)}", r"\max(5, 2)").result()
    assert judged.verdict.kind == "not comparable"


def test_without_math_verify_we_say_that_we_cannot_tell(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert judge(r"\boxed{\max(2, 5)}", r"\max(5, 2)").verdict.kind == "not comparable"
