"""Messages that other threads bring into an event loop."""

import asyncio
import threading

from roll_lite.workers.job import Inbox, Mailbox


def test_every_mailbox_gets_its_message_from_whichever_thread():
    async def run():
        inbox = Inbox(asyncio.get_running_loop())
        mailboxes = [Mailbox() for _ in range(4000)]

        def put(first):
            for number in range(first, 4000, 4):
                inbox.put(mailboxes[number], number)

        threads = [threading.Thread(target=put, args=(first,)) for first in range(4)]
        for thread in threads:
            thread.start()
        return await asyncio.gather(*(mailbox.get() for mailbox in mailboxes))

    assert asyncio.run(run()) == list(range(4000))


def test_many_messages_need_one_wake_up():
    async def run():
        inbox = Inbox(asyncio.get_running_loop())
        wake, num_wakes = inbox.loop.call_soon_threadsafe, 0

        def count(*call):
            nonlocal num_wakes
            num_wakes += 1
            wake(*call)

        inbox.loop.call_soon_threadsafe = count
        for number in range(3):
            mailboxes = [Mailbox() for _ in range(100)]
            for mailbox in mailboxes:
                inbox.put(mailbox, number)
            assert await asyncio.gather(*(mailbox.get() for mailbox in mailboxes)) == [number] * 100
        return num_wakes

    assert asyncio.run(run()) == 3


def test_a_cancelled_call_and_a_closed_loop_need_nothing():
    async def run():
        inbox = Inbox(asyncio.get_running_loop())
        cancelled, other = Mailbox(), Mailbox()
        call = asyncio.ensure_future(cancelled.get())
        call.cancel()
        inbox.put(cancelled, 1)
        inbox.put(other, 2)
        return inbox, await other.get()

    inbox, result = asyncio.run(run())
    assert result == 2
    inbox.put(Mailbox(), 3)
