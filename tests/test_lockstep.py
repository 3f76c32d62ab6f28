"""Ranks that work together and are called, with every delay that a network may bring."""

import queue
import random
import threading
import time

import pytest

from roll_lite.engine.lockstep import Lockstep

SECONDS = 10  # a rank that waits so long waits for ever


class Channel:
    """A broadcast from the first rank to the other; both ends meet, as in gloo."""

    def __init__(self):
        self.queue, self.taken = queue.Queue(), queue.Queue()

    def send(self, message):
        self.queue.put(message)
        self.taken.get(timeout=SECONDS)

    def receive(self):
        message = self.queue.get(timeout=SECONDS)
        self.taken.put(None)
        return message


class Engine:
    """What Lockstep needs of a RanksEngine; work is a number of steps that is left."""

    def __init__(self, channel, is_first):
        self.channel, self.is_first, self.left, self.num_steps = channel, is_first, 0, 0

    def step(self):
        self.channel.send("step")
        self.left -= 1
        self.num_steps += 1

    def pause(self, pause):
        self.channel.send(pause)

    def follow(self):
        while (message := self.channel.receive()) == "step":
            self.num_steps += 1
        return message


def run_rank(engine, inbox, num_calls, meet, errors):
    """The loop of a worker thread: letters, then the call that is due, or else work."""
    lockstep, num_run, calls = Lockstep(engine), 0, {}
    try:
        is_busy = False
        while num_run < num_calls:
            while not inbox.empty() or not is_busy:
                kind, number = inbox.get(timeout=SECONDS)
                if kind == "letter":
                    lockstep.count_letter()
                    engine.left += number
                else:
                    calls[number] = True
                is_busy = True
            if calls.pop(num_run + 1, False):
                lockstep.make_way(num_run + 1)
                assert meet.wait(timeout=SECONDS) in (0, 1)  # the collective inside of the call
                num_run += 1
                engine.left += num_run % 2  # a call may leave work, too
            elif engine.is_first:
                is_busy = engine.left > 0
                engine.step() if is_busy else lockstep.settle()
            else:
                is_busy = lockstep.may_have_work
                if is_busy:
                    lockstep.follow()
    except Exception as error:
        errors.append(error)
        meet.abort()


def deliver(messages, inbox, seed):
    """Calls in their order, and letters in theirs, but each after a time of its own."""
    r = random.Random(seed)
    for message in messages:
        if r.random() < 0.5:
            time.sleep(r.random() * 0.006)
        inbox.put(message)


@pytest.mark.parametrize("seed", range(6))
def test_ranks_never_wait_for_each_other_for_ever(seed):
    r = random.Random(seed)
    num_calls, calls = 60, iter(range(1, 1000))
    kinds = ["letter"] * 60 + ["call"] * (num_calls - 1)
    r.shuffle(kinds)
    messages = [(k, r.randrange(4) if k == "letter" else next(calls)) for k in [*kinds, "call"]]
    channel, meet, errors = Channel(), threading.Barrier(2), []
    engines = [Engine(channel, is_first) for is_first in (True, False)]
    inboxes = [queue.Queue(), queue.Queue()]
    threads = [
        threading.Thread(target=run_rank, args=(e, i, num_calls, meet, errors), daemon=True)
        for e, i in zip(engines, inboxes, strict=True)
    ] + [
        threading.Thread(target=deliver, args=(messages, inbox, f"{seed} {rank}"), daemon=True)
        for rank, inbox in enumerate(inboxes)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(3 * SECONDS)
    assert not errors and not any(thread.is_alive() for thread in threads)
    assert engines[0].num_steps == engines[1].num_steps > 0
