"""Results that other threads bring into an event loop."""

import asyncio
import threading

from roll_lite.workers.pool import Inbox


def test_every_future_gets_its_result_from_whichever_thread():
    async def run():
        inbox = Inbox(asyncio.get_running_loop())
        futures = [inbox.loop.create_future() for _ in range(4000)]

        def put(first):
            for number in range(first, 4000, 4):
                inbox.put(futures[number], number)

        threads = [threading.Thread(target=put, args=(first,)) for first in range(4)]
        for thread in threads:
            thread.start()
        return await asyncio.gather(*futures)

    assert asyncio.run(run()) == list(range(4000))


def test_many_results_need_one_wake_up():
    async def run():
        inbox = Inbox(asyncio.get_running_loop())
        wake, num_wakes = inbox.loop.call_soon_threadsafe, 0

        def count(*call):
            nonlocal num_wakes
            num_wakes += 1
            wake(*call)

        inbox.loop.call_soon_threadsafe = count
        for number in range(3):
            futures = [inbox.loop.create_future() for _ in range(100)]
            for future in futures:
                inbox.put(future, number)
            assert await asyncio.gather(*futures) == [number] * 100
        return num_wakes

    assert asyncio.run(run()) == 3


def test_a_cancelled_future_and_a_closed_loop_need_nothing():
    async def run():
        inbox = Inbox(asyncio.get_running_loop())
        cancelled, other = inbox.loop.create_future(), inbox.loop.create_future()
        cancelled.cancel()
        inbox.put(cancelled, 1)
        inbox.put(other, 2)
        return inbox, await other

    inbox, result = asyncio.run(run())
    assert result == 2
    inbox.put(asyncio.Future(loop=asyncio.new_event_loop()), 3)
