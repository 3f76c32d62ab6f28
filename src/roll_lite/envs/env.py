"""What an environment is to a rollout: text in, text out, everything random from the seed."""

from typing import Protocol

from roll_lite.types import Message

Observation = tuple[Message, ...]
"""Messages for the model to read; empty when the episode has ended."""


class Env(Protocol):
    """`step_state`, where there is one, names what a step is in the life of a sample: `scoring` of
    a question; `stepping` else.
    """

    def reset(self, seed: int) -> tuple[Observation, dict]:
        """Start an episode: the opening messages and an info dictionary."""

    def step(self, action: str) -> tuple[Observation, float, bool, bool, dict]:
        """Take the model's reply: observation, reward, terminated, truncated, info.

        `info["parts"]`, where present, names the contributions to the reward. A step may be a
        coroutine. One that raises must leave everything as it was: it may be tried again.
        """
