"""The interface of an environment: text in, text out, all randomness from the seed."""

from typing import Protocol

from roll_lite.types import FinishReason, Message

Observation = tuple[Message, ...]
"""Messages for the model to read; empty when the episode is over."""


class Env(Protocol):
    """An optional attribute `step_state` names the state of a sample during a step; the default is
    `stepping`. Before each step `finish_reason` is set: how the reply ended, `stop` or `length`.
    """

    finish_reason: FinishReason

    def reset(self, seed: int) -> tuple[Observation, dict]:
        """Start an episode: its first messages and an info dictionary."""

    def step(self, action: str) -> tuple[Observation, float, bool, bool, dict]:
        """Take the model's reply: observation, reward, terminated, truncated, info.

        `info["parts"]`, if present, has the named parts of the reward. A step may be a coroutine.
        A step that raises must leave the environment unchanged, because it may be retried.
        """
