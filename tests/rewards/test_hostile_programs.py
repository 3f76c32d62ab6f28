"""Replies that attack the code reward (hostile_programs.toml): none scores, none fails its sample,
and none leaves a process."""

import asyncio
import json
import os
import socket
import tomllib
from functools import partial
from pathlib import Path

import pytest
from support.process_checks import descendants_with, new_sandbox_processes, wait_until

from roll_lite.rewards.code import Limits, check_isolation, check_tests, passes_tests
from roll_lite.types import Prompt
from roll_lite.workers.pool import RewardWorkers

PROGRAMS = tomllib.loads(Path(__file__).with_name("hostile_programs.toml").read_text())["programs"]
NUM_WORKERS = 4
NUM_TESTS = 8  # of a call, so that no worker is left alone with a long list
HANG_SECONDS = 600.0  # only a safety net
SECRET = "kettle-7319-amber"
SURVIVOR = "3000.7319"  # on the command line of processes that are meant to survive
each_test = partial(passes_tests, partial=True, seconds=HANG_SECONDS / 2)
"""Scores the tests one by one, each in a fresh process: 0 if none passed."""
REWARDS = {
    "": each_test,
    "exhaustion": partial(each_test, limits=Limits(seconds=0.5)),
    "honest": partial(each_test, limits=Limits(seconds=60.0)),  # also on a busy machine
}

WRONG = "def square(x): return 0\n"
LONG = {
    "open parentheses": "x = " + "(" * 20_000,
    "signs": "x = " + "-" * 100_000 + "1",
    "a long sum": "x = 1" + "+1" * 20_000,
    "attributes of attributes": "if 0: x" + ".a" * 20_000,
    "calls of calls": "if 0: x" + "()" * 20_000,
    "negations": "x = " + "not " * 20_000 + "1",
    "choices": "x = " + "1 if 1 else " * 10_000 + "1",
    "lambdas": "x = " + "lambda: " * 10_000 + "1",
    "formatted text": "x = " + "f'{" * 1000 + "1" + "}'" * 1000,
    "branches": "if 0: pass\n" + "elif 0: pass\n" * 5000,
    "indents": "".join(" " * i + "if 1:\n" for i in range(500)) + " " * 500 + "pass",
    "open brackets of a pattern": "match 1:\n case " + "[" * 10_000,
    "assignments": "[*a] = " * 5000 + "[]",
    "decorators": "@a\n" * 5000 + "def g(): pass",
    "a nul": "\0",
    "a surrogate": "x = '\ud800'",
    "a long number": "x = " + "9" * 50_000,
    "an unknown encoding": "# coding: nonsense",
    "a constant to compute": "x = 'a' * 10**18; y = 1 << (1 << 40); z = 1 // 0",
    "an open text": '"""',
    "warnings": "x = '\\d'; 1 is 1; assert (1, 'x')",
    "a long line": "#" * 2_000_000,
    "blank lines": "\n" * 100_000,
    "fences": "\n```\n" * 20_000,
    "blocks": "\n```\n```python\ndef square(x): return 1\n" * 2000,
    "backticks": "\n" + "`" * 500_000,
}
"""What follows a wrong program, to break whatever reads the reply."""


def prompt(tests, domain=""):
    return Prompt(id="p", messages=(), domain=domain, ground_truth="", tests=tuple(tests))


def reply(program):
    return f"```python\n{program}\n```"


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """What the programs look for: a file, a port, and names of sockets in their place."""
    secret = tmp_path_factory.mktemp("hostile") / "secret"
    secret.write_text(SECRET)
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket(socket.AF_UNIX) as unix:
        unix.bind(f"\0roll_lite_hostile_{os.getpid()}")
        unix.listen()
        port = str(listener.getsockname()[1])
        yield {"@FILE@": str(secret), "@PORT@": port, "@PID@": str(os.getpid())}
        for server in (listener, unix):
            server.setblocking(False)
            with pytest.raises(BlockingIOError):
                server.accept()
    assert secret.read_text() == SECRET


@pytest.fixture(scope="module")
def started():
    """Sandbox processes that began here: other tests of this process may keep theirs."""
    with new_sandbox_processes() as started:
        yield started


@pytest.fixture(scope="module")
def workers(words, started):
    try:
        check_isolation("full")
    except ValueError as error:
        pytest.skip(str(error))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOSTILE_SECRET", SECRET)
        with RewardWorkers(
            REWARDS, num_workers=NUM_WORKERS, seconds=HANG_SECONDS, max_error_share=1.0
        ) as workers:
            yield workers
    wait_until(lambda: not started() and not descendants_with(SURVIVOR), HANG_SECONDS)


def score(workers, cases):
    """The scores, or exceptions, of replies that are scored at once."""

    async def gather():
        calls = (workers.score(*case) for case in cases)
        return await asyncio.gather(*calls, return_exceptions=True)

    return asyncio.run(asyncio.wait_for(gather(), HANG_SECONDS))


def values(scores):
    return [getattr(score, "value", repr(score)) for score in scores]


def cases(program, words):
    """Prompts and replies of an entry of the file."""

    def fill(test):
        text = json.dumps({"code": test} if isinstance(test, str) else test)
        for word, meaning in words.items():
            text = text.replace(word, meaning)
        return json.loads(text)

    tests = [fill(test) for test in program["tests"]]
    domain = program["kind"] if program["kind"] in REWARDS else ""
    for start in range(0, len(tests), NUM_TESTS):
        check_tests(asked := prompt(tests[start : start + NUM_TESTS], domain))
        yield asked, reply(program["program"])


def score_programs(workers, words, programs):
    """The values that each program's calls gave."""
    calls = [(p["name"], case) for p in programs for case in cases(p, words)]
    found = {}
    scores = score(workers, [case for _, case in calls])
    for (name, _), value in zip(calls, values(scores), strict=True):
        found.setdefault(name, set()).add(value)
    return found


@pytest.mark.slow
def test_hostile_programs_score_nothing(workers, words, started):
    hostile = [program for program in PROGRAMS if program["kind"] != "honest"]
    found = score_programs(workers, words, hostile)
    assert {name: values for name, values in found.items() if values != {0.0}} == {}
    assert len(found) == len(hostile) > 100
    wait_until(lambda: len(started()) <= NUM_WORKERS, HANG_SECONDS)  # a zygote for each worker
    wait_until(lambda: not descendants_with(SURVIVOR), HANG_SECONDS)


@pytest.mark.slow
def test_honest_programs_pass(workers, words):
    honest = [program for program in PROGRAMS if program["kind"] == "honest"]
    assert all(values == {1.0} for values in score_programs(workers, words, honest).values())


@pytest.mark.slow
def test_replies_that_attack_what_reads_them(workers):
    tests = [{"code": "assert square(3) == 9"}, {"input": "3\n", "output": "9\n"}]
    cases = [(prompt(tests), reply(WRONG + more)) for more in LONG.values()]
    found = values(score(workers, cases))
    assert dict(zip(LONG, found, strict=True)) == dict.fromkeys(LONG, 0.0)
