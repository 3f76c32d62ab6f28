"""Rewards for programs: the reply's code is run against the prompt's tests, in the sandbox.

A test is {"code": "assert ..."}, which runs after the program and with its names, or
{"input": stdin, "output": what the program must print}. For the options, as a reward of its own:
functools.partial(passes_tests, partial=True).
"""

import re
import textwrap
import time
from dataclasses import replace
from typing import Any

from roll_lite.sandbox.sandbox import Isolation, Limits, run_program
from roll_lite.types import Prompt, Score

_BLOCK = re.compile(
    r"^[ \t]*(?P<fence>`{3,})[ \t]*(?P<language>\w*)[^\n`]*\n"
    r"(?P<code>.*?)"
    r"^[ \t]*(?P=fence)`*[ \t]*$",
    re.MULTILINE | re.DOTALL,
)
_LANGUAGES = ("", "python", "python3", "py")


def passes_tests(
    prompt: Prompt,
    reply: str,
    *,
    partial: bool = False,
    seconds: float = 8.0,
    limits: Limits = Limits(seconds=4.0),  # noqa: B008 (it is frozen)
    isolation: Isolation = "full",
    tests_apart: bool = True,
) -> Score:
    """1 when the last code block passes all tests, else 0; with `partial` the share that it passes.

    `limits` are those of one test. `seconds` are for all of them: what has not passed by then has
    failed. It should stay below the workers' own, which make an error of it. Tests of code run in
    a process of their own, or, with tests_apart=False, in the program's (see `Sandbox.run`).
    """
    tests = check_tests(prompt)
    source = last_code_block(reply)
    if source is None:
        return Score(value=0.0, parts={"no_code_block": 1.0, "tests_passed": 0.0})
    num_passed, end = 0, time.monotonic() + seconds
    for test in tests:
        left = end - time.monotonic()
        if left <= 0:
            break
        within = replace(limits, seconds=min(limits.seconds, left))
        has_passed = _passes(
            source, test, limits=within, isolation=isolation, tests_apart=tests_apart
        )
        num_passed += has_passed
        if not (has_passed or partial):
            break
    share = num_passed / len(tests)
    value = share if partial else float(num_passed == len(tests))
    return Score(value=value, parts={"no_code_block": 0.0, "tests_passed": share})


def last_code_block(reply: str) -> str | None:
    """Of those that are Python, or do not say what they are; one that was cut off is none."""
    blocks = [
        match["code"] for match in _BLOCK.finditer(reply) if match["language"].lower() in _LANGUAGES
    ]
    return textwrap.dedent(blocks[-1]) if blocks else None


def _passes(source: str, test: dict[str, str], *, tests_apart: bool, **how: Any) -> bool:
    if "code" in test:
        outcome = run_program(source, tests=test["code"], tests_apart=tests_apart, **how)
        return outcome.kind == "ok"
    outcome = run_program(source, stdin=test["input"], **how)
    return outcome.kind == "ok" and _lines(outcome.stdout) == _lines(test["output"])


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]


def check_tests(prompt: Prompt) -> list[dict[str, Any]]:
    """The tests, where there are any and all can be run."""
    if not prompt.tests:
        raise ValueError(f"prompt {prompt.id} has no tests, without which code cannot be scored")
    return [_checked(prompt, index) for index in range(len(prompt.tests))]


def _checked(prompt: Prompt, index: int) -> dict[str, Any]:
    """The test, or an error that says what is wrong with it: it is not the reply's fault."""
    test = prompt.tests[index]
    where = f"tests[{index}] of prompt {prompt.id}"
    if set(test) not in ({"code"}, {"input", "output"}):
        raise ValueError(f'{where} has {sorted(test)}; give it "code", or "input" and "output"')
    if not all(isinstance(value, str) for value in test.values()):
        raise ValueError(f"{where} must hold texts: {test}")
    if "code" in test:
        if not test["code"].strip():
            raise ValueError(f"{where} has no code, so that everything would pass it")
        try:
            compile(test["code"], "tests.py", "exec", dont_inherit=True)
        except SyntaxError as error:
            raise ValueError(f"{where} is not Python: {error}") from error
    return test
