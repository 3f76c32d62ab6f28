"""Environments that tests import by name; the model's reply, or the seed, says what they do."""

import asyncio
import os
import random
from pathlib import Path

from roll_lite.envs.env import OutOfTokens
from roll_lite.types import Score
from support.worker_rewards import do

NUM_TURNS = 4


class Walk:
    """A random walk of four turns. A reply such as `hang` is done, as in worker_rewards."""

    stop = ("!",)

    def reset(self, seed):
        self.random, self.place, self.turn = random.Random(seed), 0, 0
        return f"seed {seed}: you are at 0", {"rules": "Walk.", "state": "0"}

    def step(self, action):
        do(None, action)
        self.turn += 1
        self.place += self.random.randint(-9, 9) + len(action)
        measured = {"mean": {"even": self.place % 2 == 0}, "last": {"place": self.place}}
        told = f"{action} with {self.finish_reason}: you are at {self.place}"
        return told, self.place / 8, False, self.turn == NUM_TURNS, measured


class AsyncWalk(Walk):
    """Its coroutines wait, also in tasks of their own. `close` appends to a file."""

    def __init__(self, closed=None):
        self.closed = closed

    async def reset(self, seed):
        return super().reset(seed)

    async def step(self, action):
        what, _, argument = action.partition(" ")
        if what == "wait":
            await asyncio.sleep(float(argument))
        if what == "deep":
            return (await asyncio.gather(self._later(argument), asyncio.sleep(0)))[0]
        return super().step(action)

    async def _later(self, action):
        await asyncio.sleep(0)
        return super().step(action)

    async def close(self):
        if self.closed:
            with Path(self.closed).open("a") as file:
                file.write("closed\n")


class Stubborn(AsyncWalk):
    """Once it waits, it ends neither when it is cancelled nor when it is closed."""

    async def close(self):
        if self.turn == 0:
            await asyncio.sleep(1000)


class Random(Walk):
    """Not the same twice."""

    def reset(self, seed):
        self.noise = random.SystemRandom().random()
        return super().reset(seed)

    def step(self, action):
        told, *rest = super().step(action)
        return f"{told} {self.noise}", *rest


class Unmarked(Walk):
    """Ends the process when no code of an episode runs."""

    async def step(self, action):
        asyncio.get_running_loop().call_soon(os._exit, 3)
        await asyncio.sleep(1000)


async def sum_up(chat, task):
    """A coroutine: asks about its own numbers, forgets what was said, and asks again."""
    numbers = random.Random(task.seed).sample(range(100), 3)
    said = [{"role": "system", "content": "Add."}, {"role": "user", "content": str(numbers)}]
    first = await chat(said, tools=[{"name": "add"}], stop=("\n",), max_tokens=7, state="first")
    do(task, first["content"])
    chat.result(len(first["content"]), mean={"long": 1.0})
    second = await chat([*said, first, {"role": "user", "content": "Again."}])
    said[1]["content"] = "Once more: " + said[1]["content"]  # changes a message that was sent
    third = await chat(said[1:])
    chat.result(0.5)
    return Score(value=len(second["content"]), parts={"third": len(third["content"])})


async def until_full(chat, task):
    """Asks until there is no room, which it catches."""
    said = []
    try:
        while True:
            said += [{"role": "user", "content": f"{len(said)}?"}]
            said.append(await chat(said))
    except OutOfTokens as error:
        return Score(value=len(said), parts={str(error): 1.0})


async def impatient(chat, task):
    """Gives up waiting for the first reply."""
    question = [{"role": "user", "content": "first"}]
    try:
        await asyncio.wait_for(chat(question), 0.01)
    except TimeoutError:
        second = await chat([*question, {"role": "user", "content": "second"}])
        return float(second["content"] == "reply to second")


async def echo(chat, task):
    """Long texts in both directions."""
    text = "x" * task.extra["length"]
    reply = await chat([{"role": "user", "content": text}])
    return float(reply["content"] == text)


async def not_a_number(chat, task):
    return float("nan")
