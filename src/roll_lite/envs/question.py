"""A question as an episode of one turn: the reply is scored, and the episode is over."""

import inspect
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, Protocol

from roll_lite.envs.env import Conversation, Ending
from roll_lite.types import AsyncReward, Prompt, Reward, Score


class RetryingConversation(Conversation, Protocol):
    async def retried(self, call: Callable[[], Awaitable[Any]]) -> Any:
        """The result of a call that may fail now and then; only the last attempt raises."""


async def ask(
    chat: RetryingConversation, prompt: Prompt, *, reward: Reward | AsyncReward
) -> Ending:
    """Have the model answer, and score its reply."""
    reply = await chat(prompt.messages)
    if chat.finish_reason == "length":  # for rewards that must not guess what was cut off
        prompt = replace(prompt, extra=prompt.extra | {"finish_reason": "length"})

    async def score() -> Score:
        score = reward(prompt, reply["content"])
        return Score.of(await score if inspect.isawaitable(score) else score)

    return Ending(reason="returned", score=await chat.retried(score))
