"""Reward for programs: run the reply's code against the prompt's tests in the sandbox.

A test is {"code": "assert ..."}, which runs after the program and sees its names, or
{"input": stdin, "output": expected stdout}. Set options with functools.partial(passes_tests, ...).
"""

import ast
import math
import re
import sys
import textwrap
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import takewhile
from typing import Any

from roll_lite.checks import UserError
from roll_lite.rewards.format import without_thinking
from roll_lite.sandbox.names import (
    FUNCTIONS,
    OTHER_NAMES,
    SOLUTION,
    defined_and_used_names,
    does_something,
    imports,
    names_from_program,
    uncalled_tests,
)
from roll_lite.sandbox.sandbox import (
    Isolation,
    Limits,
    Outcome,
    Sandbox,
    SandboxUnavailable,
    run_repeatedly,
)
from roll_lite.types import Prompt, Score

Test = dict[str, str]

ABSENT = {"np", "numpy", "pd", "pandas", "pytest", "scipy", "sympy", "torch"}
"""What tests mean by these is not in the sandbox, and a program's own is no substitute."""

_SHORTEST_FENCE = 3
_MOST_PARSED = 20_000
"""Characters of a reply that are parsed outside the sandbox, which takes 20 ms."""
_COST_OF_BLOCK = 100
"""Characters that take as long to parse as the start of a block does."""
_LONGEST_SHOWN = 160
"""Characters of an output that the reason of a score names."""
_RUNNERS = re.compile(r"\b(unittest\.main|TextTestRunner|TestProgram)\(")
_LANGUAGE = re.compile(r"[ \t]*(\w*)")
_LANGUAGES = ("", "python", "python3", "py", "py3")
_READERS = {"input", "open", "stdin", "sys"}
_DECIMAL = re.compile(r"[+-]?(?:[0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))(?:[eE][+-]?[0-9]+)?")
_NUMBER = re.compile(rf"{_DECIMAL.pattern}|[+-]?[0-9]+")


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
    """1 if the reply's program passes all tests, else 0; with `partial`, the share it passes.

    `limits` apply to each test, `seconds` to all tests together: tests that have not passed by then
    count as failed. Keep `seconds` below the limit of the reward workers, which raise an error.
    Code tests run in a process of their own; with tests_apart=False, in the program's process (see
    `run_job`). The part `unreadable` is 1 if there is no code block, or none that is Python.
    """
    tests = check_tests(prompt)
    source = program_of(reply, tests)
    is_readable = source is not None and _is_python(source)
    num_passed = 0
    failure = "no code block" if source is None else "the code block is not Python"
    if is_readable:
        how = {"limits": limits, "isolation": isolation, "tests_apart": tests_apart}
        num_passed, failure = _run_tests(source, tests, partial, seconds, **how)
    share = num_passed / len(tests)
    parts = {
        "no_code_block": float(source is None),
        "unreadable": float(not is_readable),
        "tests_passed": share,
    }
    value = share if partial else float(share == 1)
    return Score(value=value, parts=parts, reason=failure or "all tests passed")


def program_of(reply: str, tests: Sequence[Test]) -> str | None:
    """The code block that defines most of what the tests use, of equals the last.

    Blocks must be marked as Python or not at all. For tests with input and output it is the block
    that reads, or else prints.
    """
    found = code_blocks(without_thinking(reply))
    blocks = [code for language, code in found if language.lower() in _LANGUAGES]
    if not blocks:
        return None
    codes = [test["code"] for test in tests if "code" in test]
    return _fittest(blocks, set().union(*map(_names_from_program, codes)))


def code_blocks(text: str) -> Iterator[tuple[str, str]]:
    """Language and code of the blocks between fences, line by line, in linear time.

    The last one may be left open, or closed where its last line ends.
    """
    lines = text.split("\n")
    fence = ""
    language = ""
    start = 0
    for number, line in enumerate(lines):
        if not fence:
            fence, language = _opening(line)
            start = number + 1
        elif _closes(line, fence):
            yield language, "".join(f"{line}\n" for line in lines[start:number])
            fence = ""
    if fence and start < len(lines):
        rest = "\n".join(lines[start:])
        is_closed = rest.rstrip().endswith(fence)
        yield language, rest.rstrip().removesuffix(fence) if is_closed else rest


def _opening(line: str) -> tuple[str, str]:
    """The fence that the line opens a block with, and the language; nothing if it opens none."""
    text = line.lstrip(" \t")
    after = text.lstrip(text[:1]) if text[:1] in ("`", "~") else text
    num_marks = len(text) - len(after)
    if num_marks < _SHORTEST_FENCE or "`" in after:
        return "", ""
    return text[:num_marks], _LANGUAGE.match(after)[1]


def _closes(line: str, fence: str) -> bool:
    text = line.strip(" \t")
    return text.startswith(fence) and not text.strip("`~")


_names_from_program = lru_cache(maxsize=4096)(names_from_program)


def _fittest(blocks: list[str], wanted: set[str]) -> str:
    """From the last on, parsing only blocks whose words may make them fitter."""
    best = textwrap.dedent(blocks[-1])
    if len(blocks) == 1:
        return best
    most = -2
    left = _MOST_PARSED
    for block in reversed(blocks):
        if _possible_fitness(block, wanted) <= most:
            continue
        left -= len(block) + _COST_OF_BLOCK
        if left < 0:
            break
        block = textwrap.dedent(block)
        if (fitness := _fitness(block, wanted)) > most:
            best = block
            most = fitness
    return best


def _possible_fitness(block: str, wanted: set[str]) -> int:
    if wanted:
        return sum(name in block for name in wanted)
    return 2 * any(name in block for name in _READERS) + ("print" in block)


def _fitness(block: str, wanted: set[str]) -> int:
    names = _names(block)
    if names is None:
        return -1
    defined, used = names
    if wanted:
        return len(wanted & defined)
    return 2 * bool(_READERS & (used | defined)) + ("print" in used)


@lru_cache(maxsize=16)  # the block that is chosen is asked for twice
def _names(source: str) -> tuple[set[str], set[str]] | None:
    """Names that the code defines and uses; None if it is not Python."""
    try:
        with warnings.catch_warnings(action="ignore"):
            return defined_and_used_names(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # ValueError: null bytes
        return None


def _is_python(source: str) -> bool:
    """Whether Python can parse it; only the sandbox finds out whether a long text is Python."""
    return len(source) > _MOST_PARSED or _names(source) is not None


def _run_tests(
    source: str, tests: Sequence[Test], partial: bool, seconds: float, *, limits: Limits, **how: Any
) -> tuple[int, str]:
    """How many tests passed, and what the first did that failed.

    Unless `partial`, this ends soon after the first test that the program does not pass.
    """
    num_run = num_passed = 0
    failure = ""
    end = time.monotonic() + seconds
    while num_run < len(tests) and (partial or num_passed == num_run):
        left = end - time.monotonic()
        if left <= 0:
            failure = failure or f"no time was left for test {num_run + 1} of {len(tests)}"
            break
        batch = _next_batch(tests, num_run, partial)
        within = replace(limits, seconds=min(limits.seconds, left))
        outcomes = run_repeatedly(source, seconds=left, limits=within, **_runs(batch), **how)
        has_passed = list(map(_has_passed, outcomes, batch))
        if not failure and not all(has_passed):
            place = has_passed.index(False)
            what = _failure(outcomes[place], batch[place], is_last=place == len(outcomes) - 1)
            failure = f"test {num_run + place + 1} of {len(tests)} failed: {what}"
        num_run += len(outcomes)  # at least 1
        num_passed += sum(has_passed)
    return num_passed, failure


def _failure(outcome: Outcome, test: Test, *, is_last: bool) -> str:
    """Why a run failed; stderr is that of all runs of a job, so it explains the last one only."""
    if outcome.kind == "ok":
        printed, expected = (
            " ".join(text[: 4 * _LONGEST_SHOWN].split())[:_LONGEST_SHOWN]
            for text in (outcome.stdout, test["output"])
        )
        return f"printed {printed!r}, expected {expected!r}"
    lines = outcome.stderr[-_LONGEST_SHOWN:].strip().splitlines() if is_last else []
    return lines[-1] if outcome.kind == "error" and lines else outcome.kind


def _next_batch(tests: Sequence[Test], num_run: int, partial: bool) -> list[Test]:
    """The next tests of one kind: 1, 2, 4, ... where it shows only afterwards that one failed."""
    is_code = "code" in tests[num_run]
    most = len(tests) if is_code or partial else num_run + 1
    rest = tests[num_run : num_run + most]
    return list(takewhile(lambda test: ("code" in test) == is_code, rest))


def _runs(batch: list[Test]) -> dict[str, list[str]]:
    if "code" in batch[0]:
        return {"tests": [test["code"] for test in batch]}
    return {"inputs": [test["input"] for test in batch]}


def _has_passed(outcome: Outcome, test: Test) -> bool:
    is_ok = outcome.kind == "ok"
    return is_ok and ("code" in test or same_output(outcome.stdout, test["output"]))


def same_output(printed: str, expected: str) -> bool:
    """The same words, however they are spaced; decimal numbers to within a millionth."""
    found = printed.split()
    wanted = expected.split()
    return len(found) == len(wanted) and all(map(_is_same_word, found, wanted))


def _is_same_word(found: str, wanted: str) -> bool:
    if found == wanted:
        return True
    if not (_DECIMAL.fullmatch(wanted) and _NUMBER.fullmatch(found)):
        return False
    is_finite = math.isfinite(float(wanted))  # else it is too large for any digits to count
    return is_finite and math.isclose(float(found), float(wanted), rel_tol=1e-6, abs_tol=1e-6)


def check_isolation(isolation: Isolation) -> None:
    """Raise ValueError if programs cannot be isolated so on this machine."""
    try:
        with Sandbox(isolation):
            pass
    except SandboxUnavailable as error:
        raise UserError(
            f'the reward for code runs no programs: {error}, as REWARDS = {{"code": partial('
            'passes_tests, isolation="rlimits")} in a file given with --code'
        ) from None


def check_tests(prompt: Prompt) -> tuple[Test, ...]:
    """The prompt's tests; raises ValueError if there are none or one cannot be run."""
    if not prompt.tests:
        raise UserError(f"prompt {prompt.id} has no tests; code needs at least one")
    for index, test in enumerate(prompt.tests):
        problem = _problem(test)
        if problem:
            raise UserError(f"tests[{index}] of prompt {prompt.id} {problem}")
    return prompt.tests


def _problem(test: dict[str, Any]) -> str:
    """What is wrong with a malformed test, so that no reply is blamed for it."""
    if set(test) not in ({"code"}, {"input", "output"}):
        return f'has {sorted(test)}; give it "code", or "input" and "output"'
    if not all(isinstance(value, str) for value in test.values()):
        return f"must hold texts only: {test}"
    return _problem_of_code(test["code"]) if "code" in test else ""


@lru_cache(maxsize=4096)  # the replies to a prompt have the same tests
def _problem_of_code(code: str) -> str:
    if not code.strip():
        return "has no code, so every program would pass; write assertions"
    try:
        compile(code, "tests.py", "exec", dont_inherit=True)
    except SyntaxError as error:
        return f"is not Python: {error}"
    known = {*sys.stdlib_module_names, SOLUTION}
    missing = sorted({module for module, _ in imports(code)} - known)
    if missing:
        return (
            f"imports {missing[0]}, which the sandbox does not have; use Python's own library, and "
            f"import the program as {SOLUTION}"
        )
    defined, used = defined_and_used_names(code)
    if absent := sorted(ABSENT & used - defined):
        return f"uses {absent[0]}, which the sandbox does not have; use Python's own library"
    about = names_from_program(code) - defined
    if len(about) > 1 and about <= OTHER_NAMES:
        return (
            f"is about {' or '.join(sorted(about))}, and does not say which; import what the "
            f"program is to define: from {SOLUTION} import {min(about)}"
        )
    runner = _RUNNERS.search(code)
    if runner or ("unittest", "main") in imports(code):
        called = runner[1] if runner else "unittest.main"
        return f"calls {called}; leave the call out, because test cases run without it"
    uncalled = uncalled_tests(code)
    if not (uncalled or does_something(code)):
        return "only defines things, so every program would pass; call what it defines"
    nodes = list(ast.walk(ast.parse(code)))
    if any(isinstance(node, ast.Expr) and isinstance(node.value, ast.Compare) for node in nodes):
        return "compares and does nothing with the result, so every program would pass; assert it"
    if any(isinstance(node, ast.Assert) and isinstance(node.test, ast.Tuple) for node in nodes):
        return "asserts a tuple, which always holds; leave out the parentheses"
    if any(isinstance(node, ast.Await) for node in nodes):
        return "awaits, but tests run in a process apart from the program's event loop"
    return next((problem for test in uncalled if (problem := _problem_of_call(test))), "")


def _problem_of_call(test: ast.AST) -> str:
    if isinstance(test, ast.ClassDef):
        methods = (node for node in test.body if isinstance(node, FUNCTIONS))
        tests = [node for node in methods if node.name.startswith("test")]
        if not (test.bases or tests):
            return f"has no test in {test.name}; name its methods test..."
        return next(filter(None, map(_problem_of_body, tests)), "")
    given = test.args
    num_needed = len(given.posonlyargs + given.args) - len(given.defaults)
    if isinstance(test, ast.AsyncFunctionDef) or num_needed or None in given.kw_defaults:
        return f"does not call {test.name}, which needs arguments or an event loop; call it"
    return _problem_of_body(test)


def _problem_of_body(test: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    is_async = isinstance(test, ast.AsyncFunctionDef)
    if is_async or any(isinstance(node, ast.Yield | ast.YieldFrom) for node in ast.walk(test)):
        return f"has {test.name}, a coroutine or generator, whose body never runs; make it plain"
    return ""
