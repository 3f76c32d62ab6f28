"""`async def` rewards: many wait at once, under a time limit, beside rewards in processes."""

import asyncio
import os
import threading
from functools import partial

from support.reward_calls import prompt, score, score_all
from support.worker_rewards import do

from roll_lite.rewards.combine import weighted
from roll_lite.types import Score
from roll_lite.workers.failures import RewardError, RewardTimeout
from roll_lite.workers.pool import RewardWorkers


class Meeting:
    """A reward whose calls return when `size` of them have come."""

    def __init__(self, size):
        self.size, self.num_here, self.everyone = size, 0, asyncio.Event()

    async def __call__(self, prompt, reply):
        self.num_here += 1
        if self.num_here == self.size:
            self.everyone.set()
        await self.everyone.wait()
        return len(reply)


class Crowd:
    """A reward that counts how many of its calls run at once."""

    num_here = most = 0

    async def __call__(self, prompt, reply):
        self.num_here += 1
        self.most = max(self.most, self.num_here)
        await asyncio.sleep(0.4)
        self.num_here -= 1
        return 1.0


async def act(prompt, reply):
    if reply == "wait":
        await asyncio.sleep(1000)
    if reply == "leave":
        raise SystemExit(3)
    return float(reply)


def test_all_wait_at_once_and_get_their_own_scores():
    with RewardWorkers({"do": Meeting(200)}, seconds=60.0) as workers:
        results = score_all(workers, ["x" * n for n in range(200)])
        assert workers.metrics()["reward/calls"] == 200
    assert [result.value for result in results] == list(range(200))


def test_no_more_at_once_than_allowed_and_waiting_for_a_place_is_not_counted():
    crowd = Crowd()
    with RewardWorkers({"do": crowd}, seconds=1.0, max_waiting=2) as workers:
        results = score_all(workers, ["x"] * 6)  # longer than the limit in all
    assert [result.value for result in results] == [1.0] * 6
    assert crowd.most == 2


def test_one_that_waits_too_long_says_where():
    with RewardWorkers({"do": partial(act)}, seconds=0.6) as workers:
        late, fine, wrong, leaves = score_all(workers, ["wait", "3", "three", "leave"])
        assert workers.metrics()["reward/timeouts"] == 1
    assert isinstance(late, RewardTimeout) and fine == Score(value=3.0)
    assert "longer than reward_seconds=0.6" in str(late)
    assert "test_async_rewards.py" in str(late) and "await asyncio.sleep(1000)" in str(late)
    assert isinstance(wrong, RewardError) and "in act" in wrong.__notes__[0]
    assert "SystemExit: 3" in str(leaves)


def test_one_that_blocks_the_others_is_reported():
    release = threading.Event()

    async def block(prompt, reply):
        release.wait()

    with RewardWorkers({"do": block}, seconds=0.1) as workers:
        results = score_all(workers, ["a", "b"])
        release.set()
    for result in results:
        assert isinstance(result, RewardTimeout)
        assert "blocked the event loop" in str(result) and "release.wait()" in str(result)
        assert "asyncio/base_events" not in str(result)


def test_beside_rewards_in_processes():
    with RewardWorkers({"do": do, "act": act}, num_workers=1) as workers:
        assert score(workers, "pid").value != os.getpid()
        assert score(workers, "7", "act").value == 7


def test_inline_they_run_in_the_loop_of_the_caller():
    async def loop_of(prompt, reply):
        return id(asyncio.get_running_loop())

    async def compare(workers):
        return (await workers.score(prompt(), "")).value == id(asyncio.get_running_loop())

    with RewardWorkers({"do": loop_of}, num_workers=0) as workers:
        assert asyncio.run(compare(workers))


def test_a_cancelled_call_is_cancelled():
    ended = threading.Event()

    async def wait(prompt, reply):
        try:
            await asyncio.sleep(1000)
        finally:
            ended.set()

    async def cancel(workers):
        call = asyncio.ensure_future(workers.score(prompt(), ""))
        await asyncio.sleep(0.05)
        call.cancel()

    with RewardWorkers({"do": wait}, seconds=60.0) as workers:
        asyncio.run(cancel(workers))
        assert ended.wait(60)


async def half(prompt, reply):
    return Score(value=0.5, parts={"asked": 1.0})


def test_a_sum_with_an_async_reward_is_one():
    both = weighted({"act": (act, 2.0), "half": (half, 1.0), "sync": (do, 10.0)})
    with RewardWorkers({"do": both}) as workers:
        result = score(workers, "4")
    assert result == Score(
        value=18.5, parts={"act": 4.0, "half": 0.5, "half/asked": 1.0, "sync": 1.0}
    )
