"""Rewards that attack their worker, its connection and the supervisor: a run neither hangs nor
loses a sample, and nothing that they make runs in this process."""

import asyncio
import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.episodes import Model, players, task
from support.hostile_rewards import AFTER_THE_ANSWER, INSTEAD_OF_THE_ANSWER, attack, change_state
from support.paths import PYTHONPATH
from support.process_checks import is_running, wait_until
from support.worker_envs import Walk
from support.worker_rewards import do

from roll_lite.envs.env import Ending
from roll_lite.types import Prompt, Score
from roll_lite.workers import link
from roll_lite.workers.failures import (
    RewardCrash,
    RewardError,
    RewardTimeout,
    TooManyFailures,
)
from roll_lite.workers.pool import EnvWorkers, RewardWorkers

HANG_SECONDS = 60  # only a safety net


def pool(**options):
    options = {"num_workers": 1, "seconds": 30.0, "max_error_share": 1.0} | options
    return RewardWorkers({"": attack, "do": do, "state": change_state}, **options)


def prompt(domain=""):
    return Prompt(id="p", messages=(), domain=domain, ground_truth="")


def score(workers, *replies, domain=""):
    """Scores and exceptions of calls that are made at once."""

    async def gather():
        calls = (workers.score(prompt(domain), reply) for reply in replies)
        return await asyncio.gather(*calls, return_exceptions=True)

    return asyncio.run(asyncio.wait_for(gather(), HANG_SECONDS))


@pytest.fixture(scope="module")
def shared():
    with pool() as workers:
        yield workers


@pytest.mark.parametrize("how", ["raise", "return", "exit"])
def test_a_forked_child_that_comes_back_is_no_worker(shared, how):
    """The parent's answer counts, and the same worker goes on."""
    (before,) = score(shared, "pid")
    assert score(shared, f"fork-and-{how}", *["ok"] * 10) == [Score(value=1.0)] * 11
    assert score(shared, "pid") == [before]


@pytest.mark.parametrize("answer", AFTER_THE_ANSWER)
def test_a_worker_that_says_more_than_its_answer_is_replaced(shared, answer):
    """It is counted. The first answer counts, and what the worker had to do then is asked again."""
    shared.metrics()
    assert score(shared, f"answer {answer}", *["ok"] * 3) == [Score(value=1.0)] * 4
    wait_until(lambda: shared._supervisor._num_replaced > shared._supervisor._num_told)
    assert score(shared, "ok") == [Score(value=1.0)]
    metrics = shared.metrics()
    assert metrics["reward/replaced"] >= 1 and metrics["reward/errors"] == 0


@pytest.mark.parametrize("answer", INSTEAD_OF_THE_ANSWER)
def test_a_worker_that_sends_no_answer_is_replaced(shared, answer):
    """The call is made three times, and other calls are not concerned."""
    shared.metrics()
    broken, *others = score(shared, f"answer {answer}", *["ok"] * 3)
    assert type(broken) is RewardCrash and others == [Score(value=1.0)] * 3
    metrics = shared.metrics()
    assert metrics["reward/replaced"] == 3 and metrics["reward/crashes"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("reply", ["answer half", "stop-when-idle", "steal-orders"])
def test_a_worker_that_must_do_something_and_does_not(reply):
    with pool(seconds=0.5) as workers:
        (first,) = score(workers, reply)
        if reply == "stop-when-idle":
            stat = Path(f"/proc/{first.value:.0f}/stat")
            wait_until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T")
        assert score(workers, *["ok"] * 3) == [Score(value=1.0)] * 3
        assert workers.metrics()["reward/replaced"] >= 1


def test_nothing_of_a_worker_runs_here(shared, tmp_path):
    exploded, number = score(shared, f"explode {tmp_path / 'touched'}", "number")
    assert type(exploded) is RewardError and "hostile_rewards.Exploding" in str(exploded)
    assert number == Score(value=2.0)
    assert not (tmp_path / "touched").exists()


def test_a_long_error_is_cut(shared):
    (error,) = score(shared, "long-error")
    assert type(error) is RewardError and len(error.__notes__[0]) < 100_000


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_calls_are_asked_again_when_the_reader_fails(shared, tmp_path):
    """Here because what receives a message raises."""

    def fail(seconds, message):
        (tmp_path / "go").touch()
        raise KeyError("of this test")

    async def fail_meanwhile():
        shared._supervisor.start(pickle.dumps((pickle.dumps(prompt()), "ok")), fail)
        return await shared.score(prompt("do"), f"await {tmp_path / 'go'}")

    assert asyncio.run(asyncio.wait_for(fail_meanwhile(), HANG_SECONDS)) == Score(value=1.0)


@pytest.fixture
def impatient(monkeypatch):
    """A supervisor must answer within a second."""
    monkeypatch.setattr(link, "_PING_SECONDS", 0.1)
    monkeypatch.setattr(link, "_MAX_SILENT", 10)


def test_a_dead_supervisor_is_started_again(shared, tmp_path, capfd):
    """Calls under way are made again: none is lost."""
    (before,) = score(shared, "pid")
    shared.metrics()
    replies = [f"signal-parent {tmp_path / 'once'} 9", *["ok"] * 20]
    assert score(shared, *replies) == [Score(value=1.0)] * 21
    metrics = shared.metrics()
    assert metrics["reward/errors"] == 0 and metrics["reward/replaced"] == 1
    assert not is_running(int(before.value))
    assert "the supervisor of the reward workers has ended; it is" in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGSEGV])
def test_a_stopped_supervisor_is_started_again(impatient, tmp_path, number):
    with pool(num_workers=2) as workers:
        replies = [f"signal-parent {tmp_path / 'once'} {number:d}", *["ok"] * 20]
        assert score(workers, *replies) == [Score(value=1.0)] * 21
        metrics = workers.metrics()
    assert metrics["reward/errors"] == 0 and metrics["reward/replaced"] == 2


@pytest.mark.slow
def test_a_stopped_supervisor_is_not_given_the_time_of_a_busy_one(monkeypatch, tmp_path):
    monkeypatch.setattr(link, "_PING_SECONDS", 0.1)
    monkeypatch.setattr(link, "_MAX_SILENT", 10**9)
    with pool(num_workers=2) as workers:
        replies = [f"signal-parent {tmp_path / 'once'} {signal.SIGSTOP:d}", *["ok"] * 20]
        assert score(workers, *replies) == [Score(value=1.0)] * 21


@pytest.mark.slow
def test_a_supervisor_that_dies_every_time_ends_the_run():
    with pool(num_workers=2) as workers:
        results = score(workers, "signal-parent - 9", *["ok"] * 20)
        assert isinstance(results[0], TooManyFailures)
        assert all(isinstance(r, TooManyFailures) or r == Score(value=1.0) for r in results)


@pytest.mark.slow
def test_episodes_go_on_under_a_new_supervisor(impatient):
    async def kill(model):
        if model.num_replies == 1 and not model.before_was_called:
            model.before_was_called = True
            os.kill(workers._supervisor._supervisor._process.pid, signal.SIGKILL)

    model, undisturbed = Model(before=kill), Model()
    model.before_was_called = False
    with EnvWorkers(players({"walk": Walk}), num_workers=1) as workers:
        played = asyncio.run(asyncio.wait_for(workers.play(model, task()), HANG_SECONDS))
        assert workers.metrics()["env/replayed"] == 1
        assert (
            played == asyncio.run(workers.play(undisturbed, task())) == Ending(reason="truncated")
        )
    assert model.log == undisturbed.log


@pytest.mark.slow
def test_a_supervisor_that_dies_in_every_episode_ends_the_run():
    async def kill(model):
        os.kill(workers._supervisor._supervisor._process.pid, signal.SIGKILL)

    workers = EnvWorkers(players({"walk": Walk}), num_workers=1)
    with workers, pytest.raises(TooManyFailures, match="supervisor of the environment workers"):
        asyncio.run(workers.play(Model(before=kill), task()))


def report(workers, path):
    (pid,) = score(workers, f"report {path}", domain="state")
    return path.read_text(), pid.value


@pytest.mark.parametrize(
    "change", ["folder", "gone", "environment", "handlers", "limits", "mask", "alarm"]
)
def test_what_a_reward_changes_does_not_reach_the_next_call(shared, tmp_path, change):
    before = report(shared, tmp_path / "before")
    score(
        shared, f"{change} {tmp_path / 'folder' if change == 'gone' else tmp_path}", domain="state"
    )
    if change == "alarm":
        assert type(score(shared, "sleep 0.5", domain="state")[0]) is Score
    assert report(shared, tmp_path / "after") == before


def test_a_worker_whose_state_cannot_be_restored_is_replaced(shared, tmp_path):
    before, pid = report(shared, tmp_path / "before")
    assert type(score(shared, "hard-limits", domain="state")[0]) is Score
    after, other = report(shared, tmp_path / "after")
    assert after == before and other != pid


def test_a_stack_is_shown_though_a_reward_took_its_signal():
    with pool(seconds=0.5) as workers:
        score(workers, "handlers", domain="state")
        (late,) = score(workers, "hang", domain="state")
    assert isinstance(late, RewardTimeout) and "in change_state" in str(late)


@pytest.mark.slow
def test_workers_under_a_limit_of_memory():
    """`ulimit -v` below what a worker may have by itself."""
    script = """
        import asyncio, resource
        from roll_lite.types import Prompt
        from roll_lite.workers.pool import RewardWorkers
        from support import worker_rewards

        if __name__ == "__main__":
            resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
            prompt = Prompt(id="p", messages=(), domain="d", ground_truth="")
            with RewardWorkers({"d": worker_rewards.do}, memory_gib=8.0) as workers:
                print(asyncio.run(workers.score(prompt, "allocate 100")).value)
                try:
                    asyncio.run(workers.score(prompt, "allocate 3000"))
                except Exception as error:
                    print(error)
    """
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(line[8:] for line in script.splitlines())],
        capture_output=True, text=True, timeout=HANG_SECONDS,
        env=os.environ | {"PYTHONPATH": PYTHONPATH},
    )  # fmt: skip
    assert done.stdout.splitlines()[0] == "100.0", done.stderr
    assert "needed more than memory_gib=8.0" in done.stdout
