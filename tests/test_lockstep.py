"""Ranks that work together and are called, with every delay that a network may bring."""

import queue
import random
import threading
import time

import pytest

from roll_lite.engine.tensor_parallel import Lockstep

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
    """What Lockstep needs of a TensorParallelEngine; work is a number of steps that is left."""

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


def run_rank(engine, inbox, num_messages, meet, errors):
    """The loop of a worker thread: letters, then the call that is due, or else work."""
    lockstep, num_run, calls, is_busy = Lockstep(engine), 0, set(), False
    try:
        while num_messages or calls or is_busy:
            while num_messages and not (is_busy and inbox.empty()):
                kind, number = inbox.get(timeout=SECONDS)
                num_messages, is_busy = num_messages - 1, True
                if kind == "letter":
                    lockstep.count_post()
                    engine.left += number
                else:
                    calls.add(number)
            if num_run + 1 in calls:
                num_run += 1
                calls.remove(num_run)
                lockstep.pause_for_call(num_run)
                meet.wait(timeout=SECONDS)  # the collective inside of the call
                engine.left += num_run % 2  # a call may leave work, too
                is_busy = True
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


def deliver(messages, inbox, seed, last_delay):
    """Everything in order, but each message after a time of its own."""
    r = random.Random(seed)
    for message in messages[:-1]:
        if r.random() < 0.5:
            time.sleep(r.random() * 0.006)
        inbox.put(message)
    time.sleep(last_delay)
    inbox.put(messages[-1])


def make_messages(seed):
    """Letters that bring work and calls; nothing comes after the last to help a rank that waits."""
    r, calls = random.Random(seed), iter(range(1, 62))
    kinds = ["letter", "call"] * 30
    r.shuffle(kinds)
    kinds += ["call"] if seed % 2 else ["letter", "letter"]
    return [(kind, r.randrange(1, 4) if kind == "letter" else next(calls)) for kind in kinds]


@pytest.mark.parametrize("seed", range(8))
def test_ranks_never_wait_for_each_other_for_ever(seed):
    messages = make_messages(seed)
    channel, meet, errors = Channel(), threading.Barrier(2), []
    engines = [Engine(channel, is_first) for is_first in (True, False)]
    threads = []
    for rank, engine in enumerate(engines):
        inbox, last_delay = queue.Queue(), 0.0 if rank else 0.05  # the leader hears of it later
        run = (engine, inbox, len(messages), meet, errors)
        threads.append(threading.Thread(target=run_rank, args=run, daemon=True))
        delivery = (messages, inbox, f"{seed} {rank}", last_delay)
        threads.append(threading.Thread(target=deliver, args=delivery, daemon=True))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(3 * SECONDS)
    assert not errors and not any(thread.is_alive() for thread in threads)
    brought = sum(number for kind, number in messages if kind == "letter")
    left_by_calls = sum(number % 2 for kind, number in messages if kind == "call")
    assert engines[0].num_steps == engines[1].num_steps == brought + left_by_calls
