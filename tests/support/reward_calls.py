"""Calls of rewards in worker processes, one or many at once."""

import asyncio

from roll_lite.types import Prompt


def prompt(domain="do", id="p0"):
    return Prompt(id=id, messages=(), domain=domain, ground_truth="")


def score(workers, reply, domain="do"):
    return asyncio.run(workers.score(prompt(domain), reply))


def score_all(workers, replies, domain="do"):
    """Scores and exceptions, in order."""

    async def gather():
        calls = (workers.score(prompt(domain, f"p{i}"), r) for i, r in enumerate(replies))
        return await asyncio.gather(*calls, return_exceptions=True)

    return asyncio.run(gather())
