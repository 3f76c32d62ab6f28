"""Reward for programs: run the reply's code against the prompt's tests in the sandbox.

A test is {"code": "assert ..."}, which runs after the program and sees its names, or
{"input": stdin, "output": expected stdout}. Set options with functools.partial(passes_tests, ...).
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
    """1 if the last code block passes all tests, else 0; with `partial`, the share it passes.

    `limits` apply to each test, `seconds` to all tests together: tests that have not passed by then
    count as failed. Keep `seconds` below the limit of the reward workers, which raise an error.
    Code tests run in a process of their own; with tests_apart=False, in the program's process (see
    `Sandbox.run`).
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
    """The last closed code block that is marked as Python or not marked at all."""
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


def check_tests(prompt: Prompt) -> tuple[dict[str, str], ...]:
    """The prompt's tests; raises ValueError if there are none or one cannot be run."""
    if not prompt.tests:
        raise ValueError(f"prompt {prompt.id} has no tests; code needs at least one")
    for index, test in enumerate(prompt.tests):
        _check(test, where=f"tests[{index}] of prompt {prompt.id}")
    return prompt.tests


def _check(test: dict[str, Any], *, where: str) -> None:
    """Raise ValueError for a malformed test, so that no reply is blamed for it."""
    if set(test) not in ({"code"}, {"input", "output"}):
        raise ValueError(f'{where} has {sorted(test)}; give it "code", or "input" and "output"')
    if not all(isinstance(value, str) for value in test.values()):
        raise ValueError(f"{where} must hold texts only: {test}")
    if "code" not in test:
        return
    if not test["code"].strip():
        raise ValueError(f"{where} has no code, so every program would pass; write assertions")
    try:
        compile(test["code"], "tests.py", "exec", dont_inherit=True)
    except SyntaxError as error:
        raise ValueError(f"{where} is not Python: {error}") from error
