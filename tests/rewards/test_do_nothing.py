"""Prompts that a program which does nothing passes: the command, its cache, and beside a run."""

import asyncio
import json

import pytest
from support.process_checks import wait_until

from roll_lite.rewards import do_nothing
from roll_lite.rewards.__main__ import main
from roll_lite.rewards.code import passes_tests
from roll_lite.rewards.combine import weighted
from roll_lite.rewards.maths import math_answer
from roll_lite.types import Prompt
from roll_lite.workers.do_nothing import DoNothingCheck
from roll_lite.workers.pool import RewardWorkers

HOLLOW = [{"code": "assert True"}, {"code": "import sys\nassert sys.version_info > (3,)"}]
PRINTS_NOTHING = [{"input": "3\n", "output": "\n"}]
SOUND = [{"code": "x = 1\nassert x"}, {"code": "assert gcd(12, 8) == 4"}]


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The files of a cache folder of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    return lambda: list((tmp_path / "caches").rglob("*.txt"))


def write_rows(path, *tests):
    rows = [{"prompt": "?", "domain": "code", "tests": test} for test in tests]
    rows.append({"prompt": "1 + 1?", "domain": "math", "ground_truth": 2})
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def test_check_names_what_nothing_passes(tmp_path, cache, capsys):
    data = write_rows(tmp_path / "data.jsonl", HOLLOW, SOUND, PRINTS_NOTHING, HOLLOW)
    assert main(["check", data]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "4 prompts have tests of programs",
        "3 are passed by a program that does nothing",
        *(f"  {data}:{line}" for line in (1, 4, 3)),
        "0 cannot run",
    ]
    assert main(["check", write_rows(tmp_path / "sound.jsonl", SOUND)]) == 0


def test_check_names_tests_that_cannot_run(tmp_path, cache, capsys):
    data = write_rows(tmp_path / "data.jsonl", SOUND, [{"code": "import pytest"}], [])
    assert main(["check", data]) == 1
    assert f"2 cannot run\n  {data}:2: tests[0] of prompt" in capsys.readouterr().out


def test_a_prompt_is_tried_once(tmp_path, cache, capsys):
    """A second check believes what the first has written, except for torn lines."""
    data = write_rows(tmp_path / "data.jsonl", HOLLOW, SOUND)
    assert main(["check", data]) == 1
    (path,) = cache()
    first, second = path.read_text().split("\n")[1:]
    assert (first[-2:], second[-2:]) == (" 1", " 0")
    path.write_text(f"{first[:-1]}0\n{second[:-2]}")
    assert main(["check", data]) == 0
    assert path.read_text().endswith(second)
    path.write_text("\0\xff 7")
    assert main(["check", data]) == 1
    other = write_rows(tmp_path / "other.jsonl", SOUND, HOLLOW, PRINTS_NOTHING)
    assert main(["check", other]) == 1 and len(cache()) == 2


def test_without_a_place_for_the_cache_it_is_tried_again(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/none")
    data = write_rows(tmp_path / "data.jsonl", HOLLOW)
    assert [main(["check", data]), main(["check", data])] == [1, 1]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"prompt": "?", "domain": []}', ":1: domain=[] must be text"),
        ('{"prompt": "?", "domain": "code", "tests": [5]}', ":1: tests=[5] must be a list of obj"),
        ("[" * 100_000, ":1: nested too deeply"),
        ('{"prompt": "?", "domain": "math"}', "has no prompt of the domain code"),
    ],
)
def test_check_refuses_what_is_no_data(tmp_path, cache, capsys, line, problem):
    (tmp_path / "data.jsonl").write_text(line)
    assert main(["check", str(tmp_path / "data.jsonl")]) == 2
    assert problem in capsys.readouterr().err


def prompt(name, tests, domain="code"):
    return Prompt(id=name, messages=(), domain=domain, ground_truth="1", tests=tuple(tests))


def test_beside_a_run(cache, capsys):
    """In workers of the run: counted nowhere, and the next run knows it at once."""
    both = weighted({"right": (passes_tests, 1.0), "maths": (math_answer, 1.0)})
    rewards = {"code": passes_tests, "both": both, "math": math_answer}
    prompts = [prompt("a", HOLLOW), prompt("b", SOUND), prompt("c", [{"code": "import pytest"}])]
    prompts += [prompt("d", HOLLOW, "both"), prompt("e", HOLLOW, "math")]
    with RewardWorkers(rewards, num_workers=1, seconds=60.0) as workers:
        check = DoNothingCheck(prompts, rewards, dict.fromkeys(rewards, workers))
        assert check.take() == []
        check.start()
        check.join()
        assert [found.id for found in check.take()] == ["a", "d"] and check.take() == []
        assert set(workers.metrics().values()) == {0}
    assert "warning: 2 of 4 prompts with tests are passed by a program that does nothing" in (
        capsys.readouterr().out
    )
    again = DoNothingCheck(prompts[:2] + prompts[3:], rewards, {})
    assert len(cache()) == 1 and again.take() == []


def test_it_waits_for_an_idle_worker_and_ends_with_the_run(cache):
    prompts = [prompt(str(n), [{"code": f"assert {n} + 1"}]) for n in range(9)]
    rewards = {"code": passes_tests}
    endless = "```python\nwhile True: pass\n```"

    async def score_beside(workers, check):
        busy = asyncio.create_task(workers.score(prompts[0], endless))
        while workers.has_idle:
            await asyncio.sleep(0.01)
        check.start()
        await busy
        return cache()

    with RewardWorkers(rewards, num_workers=1, seconds=60.0) as workers:
        check = DoNothingCheck(prompts, rewards, {"code": workers})
        assert asyncio.run(score_beside(workers, check)) == []
        wait_until(cache, 60)
        check.stop()
    check.join()
    assert len(check.take()) == cache()[0].read_text().count(" 1") > 0


def test_known_results_are_found_at_once(cache):
    rewards = {"code": passes_tests}
    trials = do_nothing.Trials([prompt("a", HOLLOW), prompt("b", SOUND)], rewards)
    for name, left in trials.left.items():
        trials.add(name, passes_tests(left, do_nothing.REPLY))
    with RewardWorkers(rewards, num_workers=1) as workers:
        check = DoNothingCheck(
            [prompt("a", HOLLOW), prompt("b", SOUND)], rewards, {"code": workers}
        )
        workers.close()  # nothing is left to try
        check.start()
        assert [found.id for found in check.take()] == ["a"]
        check.join()
