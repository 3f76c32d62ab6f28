"""Episodes without a model: what the model says follows a script."""

import asyncio
import copy

from roll_lite.envs.play import EpisodeOptions, player
from roll_lite.types import Prompt


def players(envs, **options):
    return {name: player(make, name, EpisodeOptions(**options)) for name, make in envs.items()}


class Model:
    """A conversation that follows a script, and records what it is told."""

    def __init__(self, *replies, before=None):
        self.replies, self.before = replies, before
        self.finish_reason, self.log, self.num_replies = "stop", [], 0

    async def __call__(self, messages, *, tools=None, stop=(), max_tokens=None, state=None):
        told = list(messages), tools, stop, max_tokens, state
        self.log.append(copy.deepcopy(told))
        if self.before:
            await self.before(self)
        else:
            await asyncio.sleep(0)
        said = f"reply to {messages[-1]['content']}"
        if self.num_replies < len(self.replies):
            said = self.replies[self.num_replies]
        if isinstance(said, BaseException):
            raise said
        self.num_replies += 1
        self.finish_reason = ("stop", "length")[len(said) % 2]
        return {"role": "assistant", "content": said}

    def result(self, reward=0.0, **measurements):
        self.log.append((reward, measurements))


def task(domain="walk", seed=3, **extra):
    return Prompt(
        id=f"p{seed}", messages=(), domain=domain, ground_truth="", seed=seed, extra=extra
    )
