"""The two interfaces of environments, and the conversation that both have with the model.

An environment is an object with Gymnasium's `reset` and `step`, text in and text out (`Env`), or a
coroutine that talks to the model itself (`EpisodeFunction`):

    async def episode(chat, task):
        reply = await chat([{"role": "user", "content": f"What is {task.seed} + 1?"}])
        return float(str(task.seed + 1) in reply["content"])

All randomness comes from the task's seed. The samples of a group have the same seed.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from roll_lite.types import FinishReason, Message, Prompt, Score

Observation = str | Sequence[Message]
"""What the model reads next: a text, which becomes the user's message, or messages."""


class Env(Protocol):
    """An object plays one episode. Both methods may be coroutines.

    Optional attributes: `stop`, texts that end a reply; `finish_reason`, which is set before each
    step: how the reply ended, `stop` or `length`; and a method `close`, which is called at the end.

    Keys of `info`, all optional:
    - `rules`, of reset: a text that stands before whatever the model reads first;
    - `state`: a text that is equal where the environment is in the same state; by default the
      observation;
    - `mean`, `sum`, `last`, `max`: measurements by name, which are combined over the episode in
      that way, as in {"mean": {"valid": 1}, "last": {"success": 0}}.
    """

    def reset(self, seed: int) -> tuple[Observation, dict[str, Any]]:
        """Start an episode: what the model reads first, and `info`."""

    def step(self, action: str) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Take the model's reply: observation, reward, terminated, truncated, `info`."""


class OutOfTokens(Exception):
    """The conversation has no room for a further reply, or had its last turn. An episode that does
    not catch it ends with the rewards of its turns so far."""


class Conversation(Protocol):
    """A sample's conversation with the model, of which every token is recorded."""

    finish_reason: FinishReason
    """How the last reply ended."""

    async def __call__(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        stop: Sequence[str] | None = None,
        max_tokens: int | None = None,
        state: str | None = None,
    ) -> Message:
        """The model's reply to a whole conversation.

        Messages that go on where an earlier call ended, its reply included, continue that call's
        tokens; others begin a further training sequence. `state` is the turn's observation key, by
        default the last message's text. Raises OutOfTokens.
        """

    def result(self, reward: float = 0.0, **measurements: dict[str, float]) -> None:
        """What came of the last reply: `chat.result(1.0, last={"success": 1.0})`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How an episode ended."""

    reason: str
    """terminated or truncated by the environment, turns (too many), tokens or context (no room),
    returned by a coroutine."""
    score: Score | None = None
    """Score that a coroutine returned; None is the sum of the turns' rewards."""


EpisodeFunction = Callable[[Conversation, Prompt], Awaitable[Score | float]]
Player = Callable[[Conversation, Prompt], Awaitable[Ending]]
"""Runs one episode of a task: both interfaces in one form. An error of the call itself, rather than
of what it returns, ends the run."""
