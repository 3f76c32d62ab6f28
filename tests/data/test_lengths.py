"""Prompts and samples that are too long."""

import json

import pytest
from support.runs import toy_options

from roll_lite import data
from roll_lite.data.rows import TEMPLATE_TOKENS, PromptLimit
from roll_lite.options import from_flat
from roll_lite.recipes import rlvr
from roll_lite.rewards.maths import math_answer
from roll_lite.types import Prompt


def prompt(name, text="a", **fields):
    messages = ({"role": "user", "content": text},)
    return Prompt(id=name, messages=messages, domain="", ground_truth="", **fields)


def limit(policy, max_tokens=5, count=lambda p: len(p.messages[0]["content"])):
    return PromptLimit(longest_sample=max_tokens + 3, reply_tokens=3, policy=policy, count=count)


def test_prompts_that_fit_pass():
    prompts = [prompt("a", "12345"), prompt("b", "1")]
    assert limit("error")(prompts) == prompts


def test_long_prompts_are_refused_with_numbers_or_dropped(capsys):
    prompts = [prompt("a", "123456"), prompt("b", "1"), prompt("c", "12345678")]
    problem = "2 of 3 prompts have more than 5 tokens; the longest, c, has 8"
    with pytest.raises(ValueError, match=f"{problem}.* at most 8 tokens.*; or drop them"):
        limit("error")(prompts)
    assert limit("drop")(prompts) == [prompts[1]]
    assert problem in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"2 of 2 prompts.*max_tokens=3$"):
        limit("drop")([prompts[0], prompts[2]])


def test_short_texts_are_not_tokenised():
    def count(prompt):
        raise AssertionError("tokenised")

    assert limit("error", max_tokens=TEMPLATE_TOKENS + 8, count=count)([prompt("a", "é" * 4)])
    with pytest.raises(AssertionError, match="tokenised"):
        limit("error", max_tokens=TEMPLATE_TOKENS + 8, count=count)([prompt("a", "é" * 5)])


@pytest.fixture
def words(tmp_path):
    """Of 30 prompts, three leave no room for a reply in the toy's 64 positions, three little."""
    lengths = [{0: 60, 5: 45}.get(i % 10, 5) for i in range(30)]
    rows = [{"prompt": "w" * length, "domain": "reverse"} for length in lengths]
    path = tmp_path / "words.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_a_run_refuses_or_drops_long_prompts(here, words, tmp_path, capsys):
    with pytest.raises(
        ValueError, match=r"3 of 30 prompts have more than 60 tokens.*at most 64 tokens"
    ):
        here("refused", steps=1, data=(words,))
    here("run", steps=4, data=(words,), long_prompts="drop")
    assert "dropped: 3 of 30 prompts" in capsys.readouterr().out
    with pytest.raises(ValueError, match="or other rows of it fit"):
        here("run", steps=5, data=(words,), long_prompts="drop", max_tokens=20, resume=True)


def test_a_sample_that_becomes_too_long_fails_alone(here, words, tmp_path, monkeypatch):
    """As when a task has a rare long question, which is not known before."""
    monkeypatch.setattr(data, "PromptLimit", lambda **_: lambda prompts: prompts)
    rows = here("run", steps=4, data=(words,), max_refills=10)
    assert len(rows) == 4
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").open()]
    failed = [event for event in events if event.get("state") in ("failed", "filtered")]
    assert failed and all("exceed the 64 that a sample may have" in e["error"] for e in failed)


def test_the_micro_batch_counts_too(toy_folder, tmp_path):
    options = toy_options(toy_folder, tmp_path / "run", tokens_per_microbatch=40)
    assert from_flat(rlvr.Config, **options).longest_sample == 40


def test_a_reply_that_was_cut_off_is_not_guessed_at():
    said = "so that is 3 + 4 = 7"
    question = Prompt(id="a", messages=(), domain="math", ground_truth="7")
    assert math_answer(question, said).value == 1
    cut = Prompt(
        id="a", messages=(), domain="math", ground_truth="7", extra={"finish_reason": "length"}
    )
    assert math_answer(cut, said).value == 0
    assert math_answer(cut, said + r" and \boxed{7}").value == 1
