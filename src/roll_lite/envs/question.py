"""A question as an episode of one turn: the reply is scored, and the episode is over."""

import inspect
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any, Protocol

from roll_lite.envs.env import Conversation, Ending, Player
from roll_lite.types import AsyncReward, Prompt, Reward, Score, State


class RetryingConversation(Conversation, Protocol):
    """The coordinator's own conversation of a sample."""

    step_state: State
    """The sample's state while its reply is scored."""

    async def retried(self, call: Callable[[], Awaitable[Any]]) -> Any:
        """The result of a call that may fail now and then; only the last attempt raises."""


async def ask(
    chat: RetryingConversation, prompt: Prompt, *, reward: Reward | AsyncReward
) -> Ending:
    """Have the model answer, and score its reply."""
    chat.step_state = "scoring"
    reply = await chat(prompt.messages)
    if chat.finish_reason == "length":  # for rewards that must not guess what was cut off
        prompt = replace(prompt, extra=prompt.extra | {"finish_reason": "length"})

    async def score() -> Score:
        score = reward(prompt, reply["content"])
        return Score.of(await score if inspect.isawaitable(score) else score)

    return Ending(reason="returned", score=await chat.retried(score))


def question_player(rewards: Mapping[str, Reward | AsyncReward]) -> Player:
    """Questions with the reward of their domain."""

    def play(chat: RetryingConversation, prompt: Prompt) -> Awaitable[Ending]:
        if prompt.domain not in rewards:
            raise ValueError(
                f"prompt {prompt.id} has domain={prompt.domain!r}, which has no reward; "
                f"known domains: {', '.join(sorted(rewards))}"
            )
        return ask(chat, prompt, reward=rewards[prompt.domain])

    return play
