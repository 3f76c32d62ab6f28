"""Rewards that hang, crash and fail in every way, while other calls and all counts stay right."""

import asyncio
import os
import random
import re
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from textwrap import dedent

import pytest
from support import worker_rewards
from support.paths import PYTHONPATH, SOURCES
from support.process_checks import is_running, processes_with, sleep_argument, wait_until
from support.reward_calls import prompt, score, score_all
from support.worker_rewards import OwnError, do, is_imported, length, with_parts

from roll_lite.rewards.combine import weighted
from roll_lite.rewards.maths import math_answer
from roll_lite.types import Score
from roll_lite.workers.channel import checked
from roll_lite.workers.failures import (
    RewardCrash,
    RewardError,
    RewardTimeout,
    TooManyFailures,
    user_frames,
)
from roll_lite.workers.pool import MAX_DEATHS, RewardWorkers

REWARDS = {"do": do, "length": length, "parts": with_parts}


@pytest.fixture(scope="module")
def shared():
    with RewardWorkers(REWARDS, num_workers=2, seconds=60.0, max_error_share=1.0) as workers:
        yield workers


@pytest.fixture(scope="module")
def hasty():
    """For calls that reach their time limit."""
    with RewardWorkers({"do": do}, num_workers=2, seconds=0.8, max_error_share=1.0) as workers:
        yield workers


def test_scores_come_back_to_their_calls(shared):
    replies = ["x" * n for n in range(300)]
    assert [s.value for s in score_all(shared, replies, "length")] == list(range(300))


def test_parts_are_plain_numbers(shared):
    result = score(shared, "", "parts")
    assert result == Score(value=0.5, parts={"short": 1.0, "long": 0.0})
    assert type(result.parts["short"]) is float


@pytest.mark.parametrize("reward", [math_answer, partial(math_answer, guess=False)])
def test_what_a_reward_needs_is_imported_before_its_first_call(reward):
    pytest.importorskip("math_verify")
    rewards = {"is_imported": is_imported, "sum": weighted({"right": (reward, 1.0)})}
    with RewardWorkers(rewards, num_workers=2, seconds=60.0) as workers:
        assert score(workers, "math_verify", "is_imported").value == 1
    with RewardWorkers({"is_imported": is_imported}, num_workers=1, seconds=60.0) as workers:
        assert score(workers, "math_verify", "is_imported").value == 0


def test_hang(hasty):
    start = time.monotonic()
    message = r"(?s)longer than reward_seconds=0\.8; its process did not lack.*in hang.*in do"
    with pytest.raises(RewardTimeout, match=message) as error:
        score(hasty, "hang")
    assert error.value.is_final
    assert time.monotonic() - start >= 0.8
    assert score(hasty, "ok").value == 1


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        ("crash", r"ended by signal 11 \(Seg.*in string_at.*in do"),
        ("exit 7", "ended itself with exit code 7"),
        ("exit 0", "ended itself with exit code 0"),
        ("exit 200", "ended itself with exit code 200"),
        ("signal 40", "ended by signal 40"),
        ("allocate 3000", r"more than memory_gib=2\.0"),
        ("print 2000", "printed more than output_kib=1024"),
        ("close", "ended by signal 9"),
    ],
)
def test_crash(shared, reply, message):
    with pytest.raises(RewardCrash, match=f"(?s){message}"):
        score(shared, reply)
    assert score(shared, "ok").value == 1


def test_a_call_whose_worker_was_killed_is_made_again(shared, tmp_path):
    shared.metrics()
    assert score(shared, f"killed-once {tmp_path / 'killed'}").value == 1
    metrics = shared.metrics()
    assert metrics["reward/errors"] == 0 and metrics["reward/replaced"] == 1
    with pytest.raises(RewardCrash, match=r"ended by signal 9"):  # every time
        score(shared, "signal 9")
    metrics = shared.metrics()
    assert metrics["reward/errors"] == 1 and metrics["reward/replaced"] == MAX_DEATHS


def test_within_limits(shared):
    assert score(shared, "allocate 300").value == 300
    assert score(shared, "print 900").value == 1
    assert score(shared, "print 900").value == 1  # the limit is that of a call
    assert score(shared, "sleep 0.2").value == 1


def test_own_exceptions_with_their_traceback(shared):
    with pytest.raises(RewardError, match=r"worker_rewards\.OwnError: mine") as error:
        score(shared, "raise mine")
    (note,) = error.value.__notes__
    assert "raise OwnError(argument)" in note and f"{SOURCES}/roll_lite" not in note


def test_frames_of_a_user_whose_folder_is_called_roll_lite_are_shown():
    ours = f'  File "{SOURCES}/roll_lite/workers/worker.py", line 1 in call\n'
    own = '  File "/home/me/roll_lite/workers/mine.py", line 2 in score\n'
    assert user_frames(own + ours) == own


def test_exceptions_of_any_kind(shared):
    with pytest.raises(RewardError, match="DemandingError: mine"):
        score(shared, "demand mine")
    with pytest.raises(RewardError, match="SystemExit: 3"):
        score(shared, "leave 3")


def test_rewards_must_be_finite(shared):
    with pytest.raises(RewardError, match="reward=nan is not a finite number"):
        score(shared, "nan")


def test_unknown_domain(shared):
    with pytest.raises(ValueError, match=r"domain='other'.*known domains: do, length, parts"):
        score(shared, "", "other")


def test_waiting_for_a_worker_is_not_counted(hasty):
    assert all(s.value == 1 for s in score_all(hasty, ["sleep 0.25"] * 8))


def test_a_late_event_loop_is_no_timeout(hasty):
    async def be_late():
        call = asyncio.ensure_future(hasty.score(prompt(), "sleep 0.1"))
        await asyncio.sleep(0)
        time.sleep(1.0)
        return await call

    assert asyncio.run(be_late()).value == 1


def test_cancelled_calls_leave_the_others_alone(shared, tmp_path):
    async def cancel():
        reply = f"await {tmp_path / 'go'}"
        calls = [asyncio.ensure_future(shared.score(prompt(), reply)) for _ in range(6)]
        await asyncio.sleep(0.05)
        for call in calls[::2]:
            call.cancel()
        (tmp_path / "go").touch()
        return await asyncio.gather(*calls, return_exceptions=True)

    results = asyncio.run(cancel())
    assert [type(result) for result in results] == [asyncio.CancelledError, Score] * 3


def test_from_another_thread(shared):
    results = []
    thread = threading.Thread(target=lambda: results.append(score(shared, "ok")))
    thread.start()
    thread.join()
    assert results == [Score(value=1.0)]


def test_metrics_count_since_the_last(hasty):
    hasty.metrics()
    score_all(hasty, ["ok", "sleep 0.2", "raise x", "crash", "hang", "ok"])
    metrics = hasty.metrics()
    assert metrics.pop("reward/seconds") > 1.0
    assert metrics == {
        "reward/calls": 6,
        "reward/errors": 3,
        "reward/timeouts": 1,
        "reward/crashes": 1,
        "reward/replaced": 2,
    }
    assert set(hasty.metrics().values()) == {0}


def test_children_end_with_a_worker_that_hangs(hasty):
    mark = sleep_argument()
    with pytest.raises(RewardTimeout):
        score(hasty, f"children-and-hang {mark}")
    assert not processes_with(mark)


def test_children_end_with_the_pool():
    mark = sleep_argument()
    with RewardWorkers({"do": do}, num_workers=1) as workers:
        score(workers, f"children {mark}")
        wait_until(lambda: len(processes_with(mark)) == 2)  # one is about to become a sleep
        worker = int(score(workers, "pid").value)
        assert worker == score(workers, "pid").value  # it was not replaced
    assert not processes_with(mark)
    assert not Path(f"/proc/{worker}").exists()


@pytest.mark.slow
def test_one_in_a_hundred_hangs_and_crashes():
    replies = [("x" * n)[:50] for n in range(200)]
    rng = random.Random(0)
    bad = rng.sample(range(200), 4)
    for index in bad[:2]:
        replies[index] = "hang"
    for index in bad[2:]:
        replies[index] = "crash"
    with RewardWorkers({"do": do}, num_workers=4, seconds=4.0) as workers:
        results = score_all(workers, replies)
        metrics = workers.metrics()
    for index, result in enumerate(results):
        expected = {"hang": RewardTimeout, "crash": RewardCrash}.get(replies[index], Score)
        assert type(result) is expected, (index, result)
    assert all(r.value == 1 for i, r in enumerate(results) if i not in bad)
    counts = ("calls", "errors", "timeouts", "crashes")
    assert [metrics[f"reward/{name}"] for name in counts] == [200, 4, 2, 2]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_broken_rewards_are_told_apart(num_workers):
    with RewardWorkers({"do": do}, num_workers=num_workers) as workers:
        results = score_all(workers, ["ok", "raise wrong"] * 100)
        metrics = workers.metrics()
    broken = [isinstance(result, TooManyFailures) for result in results]
    assert sum(broken) == 151 and issubclass(TooManyFailures, RuntimeError)
    first = r"\d+ of the last 50 rewards failed, more than max_error_share=0\.2"
    (text,) = (str(result) for result in results if re.match(first, str(result)))
    example = r"- prompt p\d+, reply 'raise wrong': support\.worker_rewards\.OwnError: wrong"
    assert len(re.findall(example, text)) == 3
    assert re.search(r'worker_rewards.py", line \d+, in do\n +raise OwnError', text)
    assert text.index("raise OwnError") < text.index("\n- prompt p") and "\n\n" not in text
    assert (metrics["reward/calls"], metrics["reward/errors"]) == (200, 100)


def test_a_failure_is_shown_once_with_its_line_and_reply(capfd):
    with RewardWorkers({"do": do}, num_workers=2, seconds=0.8, max_error_share=1.0) as workers:
        score_all(workers, ["raise x", "raise y", "hang", "nan", "raise z", "hang", "ok"])
    shown = capfd.readouterr().err
    assert shown.count("the reward of domain 'do' failed on prompt p") == 3
    assert shown.count("raise OwnError(argument)") == shown.count("worker_rewards.OwnError: ") == 1
    assert shown.count("longer than reward_seconds=0.8") == shown.count("in hang") == 1
    assert shown.count("reply: 'hang'") == shown.count("reply: 'raise ") == 1
    assert "worker_rewards.py" in shown and f"{SOURCES}/roll_lite/workers/supervisor" not in shown


def test_a_few_errors_are_not_broken_rewards():
    with RewardWorkers({"do": do}, num_workers=2) as workers:
        results = score_all(workers, (["ok"] * 5 + ["raise x"]) * 50)
    assert not any(isinstance(result, TooManyFailures) for result in results)


def test_inline():
    """Any function will do, exceptions are those that were raised, and calls are counted."""
    seen = []

    def local(prompt, reply):
        seen.append(os.getpid())
        return do(prompt, reply)

    with RewardWorkers({"do": local}, num_workers=0) as workers:
        assert score(workers, "ok") == Score(value=1.0)
        with pytest.raises(OwnError) as error:
            score(workers, "raise x")
        assert workers.metrics()["reward/errors"] == 1
    assert error.traceback[-1].path == Path(worker_rewards.__file__)
    assert seen == [os.getpid()] * 2


@pytest.mark.parametrize(
    "options",
    [{"num_workers": -1}, {"seconds": 0}, {"memory_gib": 0}, {"max_error_share": 2}],
)
def test_options_are_checked(options):
    with pytest.raises(ValueError, match=f"{next(iter(options))}="):
        RewardWorkers({"do": do}, **options)


async def begun(path):
    """Until a call has made the file."""
    while not path.exists():
        await asyncio.sleep(0.01)


def test_closing_fails_running_calls(tmp_path):
    async def close_meanwhile(workers):
        call = asyncio.ensure_future(workers.score(prompt(), f"hang {tmp_path / 'hangs'}"))
        await begun(tmp_path / "hangs")
        workers.close()
        return await call

    with RewardWorkers({"do": do}, num_workers=1) as workers, pytest.raises(RewardCrash):
        asyncio.run(close_meanwhile(workers))


def test_a_killed_coordinator_leaves_nothing(tmp_path):
    mark = sleep_argument()
    script = f"""
        import asyncio, os
        from roll_lite.types import Prompt
        from roll_lite.workers.pool import RewardWorkers
        from support import worker_rewards

        async def main():
            prompt = Prompt(id="p", messages=(), domain="d", ground_truth="")
            with RewardWorkers({{"d": worker_rewards.do}}, num_workers=2) as workers:
                await workers.score(prompt, "children {mark}")
                print(int((await workers.score(prompt, "pid")).value), flush=True)
                os.kill(os.getpid(), 9)

        asyncio.run(main())
    """
    done = subprocess.run(
        [sys.executable, "-c", dedent(script)],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": PYTHONPATH},
    )
    assert done.returncode == -9, done.stderr
    worker = int(done.stdout)
    wait_until(lambda: not is_running(worker) and not processes_with(mark))


@pytest.mark.parametrize("returned", [None, "good", [1.0]])
def test_what_is_no_number_is_named(returned):
    with pytest.raises(
        TypeError, match=re.escape(f"the reward returned {returned!r}, not a number")
    ):
        checked(returned)
