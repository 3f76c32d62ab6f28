# ruff: noqa: E501 (tables)
"""The registry of rewards, their environment, and the commands that try and rescore replies."""

import asyncio
import io
import json
import sys
from fractions import Fraction
from functools import partial
from textwrap import dedent

import pytest
from support.paths import RECIPES
from support.scripts import run_script

from roll_lite.envs.env import Ending
from roll_lite.envs.play import ask
from roll_lite.report.run import Run
from roll_lite.rewards.__main__ import main, rescore
from roll_lite.rewards.code import passes_tests
from roll_lite.rewards.maths import last_number
from roll_lite.rewards.registry import REWARDS, check_prompts
from roll_lite.rollout.evaluation import describe_groups
from roll_lite.types import REWARD_METRICS, Group, Prompt, Sample, Score, Turn, number
from roll_lite.workers.channel import checked, read_message, write_end
from roll_lite.workers.failures import ErrorBudget


def prompt(truth):
    return Prompt(id="p", messages=(), domain="d", ground_truth=truth)


class Says:
    """A conversation in which the model says one thing."""

    def __init__(self, reply):
        self.reply, self.finish_reason = reply, "stop"

    async def __call__(self, messages):
        return {"role": "assistant", "content": self.reply}

    async def retried(self, call):
        return await call()


def answered(reply, reward):
    return asyncio.run(ask(Says(reply), prompt("x"), reward=reward)).score


def test_a_question_ends_with_its_score():
    score = Score(value=0.5, parts={"format": 0.1, "answer": 0.4})
    assert answered("y", lambda p, reply: score) == score
    assert answered("x", lambda p, reply: reply == p.ground_truth) == Score(value=1.0)


@pytest.mark.parametrize(
    ("domain", "fields", "reply", "reason"),
    [
        ("math", {"ground_truth": "41"}, r"So \boxed{42}", "extracted 42 (boxed), expected 41"),
        ("math", {"ground_truth": "41"}, "<think>41", "the reply has no answer, expected 41"),
        ("math", {"ground_truth": "4" * 99}, "5", f"extracted 5 (whole), expected {'4' * 80}"),
        ("choice", {"ground_truth": "B"}, "The answer is (B).", "chose B (stated), expected B"),
        ("choice", {"ground_truth": "B"}, "Who knows?", "chose no letter, expected B"),
        ("instructions", {"tests": ({"kind": "min_words", "count": 9}, {"kind": "lowercase"})}, "ab", "not fulfilled: min_words 9"),
        ("instructions", {"tests": ({"kind": "lowercase"},)}, "ab", "all constraints are fulfilled"),
    ],
)  # fmt: skip
def test_graders_say_why(domain, fields, reply, reason):
    asked = Prompt(id="p", messages=(), domain=domain, **{"ground_truth": ""} | fields)
    assert REWARDS[domain](asked, reply).reason == reason


def test_a_reason_of_a_worker_is_text_of_a_bounded_length():
    score = checked(Score(value=1, reason=["x" * 1000]))
    ending = Ending(reason="returned", score=score)
    sent = read_message(json.loads(write_end(ending))).outcome.score
    assert sent == Score(value=1.0) and sent.reason == "['" + "x" * 498


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


@pytest.mark.parametrize("reward", ["passes_tests", "weighted({'a': (passes_tests, 1.0)})"])
def test_code_rewards_need_isolation_that_works(reward):
    """Checked before a run, here in a user namespace that may hold no other."""
    script = f"""
        import os
        from functools import partial
        from roll_lite.rewards.code import passes_tests
        from roll_lite.rewards.combine import weighted
        from roll_lite.rewards.registry import check_prompts
        from roll_lite.sandbox import kernel
        from roll_lite.types import Prompt
        proc = os.open("/proc", os.O_PATH)
        kernel.unshare_user(1000, proc)
        kernel.write_file("sys/user/max_user_namespaces", "0", proc)
        fields = {{"messages": (), "ground_truth": "", "tests": ({{"code": "assert f"}},)}}
        prompt = Prompt(id="p", domain="code", **fields)
        check_prompts([prompt], {{"code": partial(passes_tests, isolation="rlimits")}})
        check_prompts([], {{"code": {reward}}})
        print("so far")
        check_prompts([prompt], {{"code": {reward}}})
    """
    done = run_script(script)
    assert done.stdout == "so far\n", done.stderr
    assert "UserError: the reward for code runs no programs: isolation='full'" in done.stderr
    assert 'partial(passes_tests, isolation="rlimits")' in done.stderr


@pytest.mark.parametrize(
    ("arguments", "lines"),
    [
        (["math", "--truth", "1/2", "--reply", r"So \boxed{0.5}."], ["answer    0.5 (boxed)", "verdict   equal", "score     1"]),
        (["math", "--truth", "1/2", "--answer", "0.51"], ["verdict   different", "why       0.51 against 1/2", "score     0"]),
        (["math", "--truth", "5 is one\n#### 1,234", "--answer", "1234"], ["verdict   equal", "score     1"]),
        (["math", "--truth", "5", "--reply", "who knows?\nnobody"], ["answer    None (nowhere)", "why       the reply has no answer"]),
        (["choice", "--truth", "B", "--reply", "The answer is A or B."], ["letters   A B (stated)", "parts     correct 0, ambiguous 1, none 0"]),
        (["choice", "--truth", "B", "--answer", "B"], ["letters   B (boxed)", "score     1"]),
        (["instructions", "--tests", '[{"kind": "no_commas"}, {"kind": "title"}]', "--reply", "No."], ['yes       {"kind": "no_commas"}', 'no        {"kind": "title"}', "score     0.5"]),
    ],
)  # fmt: skip
def test_try_says_why(arguments, lines, capsys):
    assert main(["try", *arguments]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert all(line in printed for line in lines), printed


def test_try_reads_a_reply_from_stdin(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("The answer is 5."))
    assert main(["try", "math", "--truth", "5"]) == 0
    assert "answer    5 (stated)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["math", "--reply", "5"], "ground_truth=''"),
        (["choice", "--truth", "X", "--reply", "A"], "one letter from A to J"),
        (["instructions", "--tests", "{", "--reply", "A"], "--tests is not JSON"),
        (["instructions", "--tests", "{}", "--reply", "A"], "must be a list of objects"),
        (["instructions", "--tests", '[{"kind": "x"}]', "--reply", "A"], "kind='x' is not known"),
        (["instructions", "--tests", "[]", "--answer", "A"], "--answer is not read"),
    ],
)
def test_try_names_what_is_wrong(arguments, message, capsys):
    assert main(["try", *arguments]) == 2
    assert message in capsys.readouterr().err


ROWS = [
    {"reply": r"\boxed{4}", "ground_truth": "4", "reward": 1.0},
    {"reply": "5", "ground_truth": "4", "domain": "math", "reward": 1},
    {"reply": "B", "ground_truth": "B", "domain": "choice", "reward": 1.0},
    {"reply": "a, b", "tests": [{"kind": "no_commas"}, {"kind": "lowercase"}], "domain": "instructions"},
    {"reply": "", "ground_truth": "4", "error": "Traceback", "reward": None},
    {"reply": "B", "ground_truth": "Paris", "domain": "choice"},
    {"ground_truth": "4"},
    {"reply": 4, "ground_truth": "4"},
    {"reply": "4", "ground_truth": "4", "domain": "poetry"},
]  # fmt: skip


def test_rows_of_a_file(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS) + "{\n")
    report = rescore(path)
    assert report.values == [0.0, 1.0, 0.5]
    assert report.verdicts == {
        "wrong": 1,
        "right": 1,
        "partly right": 1,
        "not scored": 1,
        "error": 6,
    }
    assert report.disagreements == [f"{path}:2: 0 now, 1 recorded"]
    errors = "\n".join(report.errors)
    assert f"{path}:1: domain=None has no reward; name one of math, choice" in errors
    assert f"{path}:6: prompt {path}:6 has ground_truth='Paris'" in errors
    assert f"{path}:7: no field 'reply'" in errors and f"{path}:8: reply=4 must be text" in errors
    assert f"{path}:9: domain='poetry'" in errors and f"{path}:10: Expecting" in errors


def test_the_rollouts_of_a_run(tmp_path, capsys):
    prompt = Prompt(id="p", messages=(), domain="math", ground_truth="4")
    samples = [Sample(prompt=prompt, index=i, reply=reply) for i, reply in enumerate("445")]
    for sample, value in zip(samples, (1.0, 0.0, 0.0), strict=True):
        sample.score = Score(value=value)
        sample.enter("done", 0)
    run = Run(tmp_path / "run", prompt, num_steps=1, shown={})
    run.write_rollouts(1, [Group(prompt=prompt, samples=samples)])
    run.flush()
    capsys.readouterr()
    path = tmp_path / "run" / "rollouts" / "step_00001.jsonl"
    assert main(["score", str(path), "--domain", "math"]) == 0
    printed = capsys.readouterr().out
    assert "mean      0.6667 of 3" in printed and f"{path}:2: 1 now, 0 recorded" in printed
    assert main(["score", str(path)]) == 0  # rows have their domain
    assert main(["score", str(tmp_path / "none.jsonl")]) == 2


OWN_FILE = """
async def asked(prompt, reply):
    return prompt.extra["level"] / 4

def mine(prompt, reply):
    return float(prompt.messages[0]["content"] in reply)

REWARDS = {"asked": asked}
INLINE = {"mine": mine, "math": mine}
"""


@pytest.fixture
def own_file(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.path", list(sys.path))
    (tmp_path / "own.py").write_text(OWN_FILE)
    return str(tmp_path / "own.py")


def test_try_rewards_of_a_file(own_file, capsys):
    options = ["--code", own_file, "--reply", "x"]
    assert main(["try", "asked", *options, "--extra", '{"level": 3}']) == 0
    assert "score     0.75" in capsys.readouterr().out
    assert main(["try", "asked", *options]) == 2
    assert f"error: KeyError: 'level' ({own_file} line 3" in capsys.readouterr().err
    assert main(["try", "mine", "--reply", "x"]) == 2
    assert "domain='mine' has no reward" in capsys.readouterr().err


def test_try_says_the_reason(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.path", list(sys.path))
    text = """
        from roll_lite.types import Score
        def mine(prompt, reply):
            return Score(value=0.5, reason="half of it")
        REWARDS = {"mine": mine}
    """
    (tmp_path / "reasoned.py").write_text(dedent(text))
    assert main(["try", "mine", "--code", str(tmp_path / "reasoned.py"), "--reply", "x"]) == 0
    assert "score     0.5\nreason    half of it\n" in capsys.readouterr().out


@pytest.mark.parametrize("value", ["0.5", b"1", None, [1.0]])
def test_a_text_is_no_number(value):
    with pytest.raises(TypeError, match="not a number"):
        Score.of(value)
    with pytest.raises(TypeError, match=r"grade=.* is not a number"):
        number("grade", value)
    assert number("grade", True) == 1.0 and Score.of(Fraction(1, 2)).value == 0.5


def test_score_with_rewards_of_files(own_file, tmp_path, capsys):
    rows = [
        {"reply": "x", "domain": "asked", "extra": {"level": 1}, "reward": 0.25},
        {"reply": "xy", "domain": "math", "messages": [{"role": "user", "content": "y"}]},
        {"reply": "cba", "domain": "reverse", "ground_truth": "cba", "reward": 1.0},
        {"reply": "x", "domain": "asked"},
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = ["--code", str(RECIPES / "rlvr.py"), "--code", own_file]
    assert main(["score", str(tmp_path / "rows.jsonl"), *files]) == 1
    printed = capsys.readouterr().out
    assert "mean      0.7500 of 3" in printed and "disagreements       0" in printed
    assert f"rows.jsonl:4: KeyError: 'level' ({own_file} line 3)" in printed


def test_no_part_of_a_score_takes_the_place_of_a_metric():
    """Every name that a run has under reward/ besides parts and domains is refused."""
    sample = Sample(prompt=prompt(""), index=0, score=Score(value=1.0, parts={"own": 1.0}))
    sample.add_turn(
        Turn(prompt_ids=[1], token_ids=[2], logprobs=[0.0], finish_reason="stop", versions=[])
    )
    sample.enter("done", 0)
    names = {*describe_groups([Group(prompt=prompt(""), samples=[sample])])}
    names |= {*ErrorBudget(1.0).metrics()}
    ours = {name.removeprefix("reward/") for name in names if name.startswith("reward/")} - {"own"}
    assert ours == REWARD_METRICS
    for name in ours:
        with pytest.raises(ValueError, match=f"parts has '{name}', but reward/{name} is a metric"):
            Score(value=0.0, parts={"own": 1.0, name: 1.0})
