"""A job of a worker, on the side of its caller: a reply to score or an episode to play.

An episode asks the model through here. What was asked and replied is kept: if its worker dies
through another episode, a new worker plays it again up to where it was.
"""

import asyncio
import inspect
import pickle
import time
from collections import deque
from collections.abc import Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from roll_lite.envs.env import Conversation, Ending, OutOfTokens, Player
from roll_lite.types import AsyncReward, FinishReason, Message, Prompt, Reward, Score, TurnResult
from roll_lite.workers.channel import Ask, End, Outcome, Reply
from roll_lite.workers.failures import Failure
from roll_lite.workers.link import SupervisorLink


class Mailbox:
    """Messages for one reader; an asyncio.Queue takes much longer."""

    def __init__(self):
        self._messages: list[Any] = []
        self._reader: asyncio.Future | None = None

    def put(self, message: Any) -> None:
        self._messages.append(message)
        if self._reader and not self._reader.done():
            self._reader.set_result(None)

    async def get(self) -> Any:
        while not self._messages:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        return self._messages.pop(0)


class Inbox:
    """Puts messages into mailboxes of an event loop, from any thread. Many messages need one
    wake-up of the loop, which is a system call."""

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self.loop = loop
        self._messages: deque[tuple[Mailbox, Any]] = deque()
        self._is_called = False
        """Whether the loop is going to take what is there."""

    def put(self, mailbox: Mailbox, message: Any) -> None:
        """Nothing happens if the loop is closed."""
        self._messages.append((mailbox, message))
        if not self._is_called:
            self._is_called = True
            with suppress(RuntimeError):  # the loop is closed: nothing waits for it
                self.loop.call_soon_threadsafe(self._take)

    def _take(self) -> None:
        self._is_called = False  # first: what comes from now on calls again
        while self._messages:
            mailbox, message = self._messages.popleft()
            mailbox.put(message)


class Job(Mailbox):
    """A reply to score or, with a conversation, an episode to play. It outlives its workers, whose
    messages it gets."""

    def __init__(
        self, prompt: Prompt, *, reply: str | None = None, chat: Conversation | None = None
    ):
        super().__init__()
        self.prompt = prompt
        self.reply = reply
        self._chat = chat
        self.key: Hashable = object() if reply is None else (prompt.id, reply)
        """Equal when the coordinator scores a reply again."""
        self.last_reply = reply or ""
        self.num_turns = 0
        self.seconds = 0.0
        """Spent in the reward or the environment."""
        self.chat_seconds = 0.0
        self.chat_error: BaseException | None = None
        """What the conversation raised, if it is broken."""
        self._turns: list[tuple[_Asked, Reply]] = []
        """What a worker asked, and the replies that it would get again."""
        self._out_of_tokens: OutOfTokens | None = None

    @property
    def place(self) -> str:
        """Where in an episode it is, for messages."""
        return f", seed {self.prompt.seed}, turn {self.num_turns}" if self._chat else ""

    async def call(self, function: Reward | AsyncReward | Player) -> Ending:
        """Run it in this process."""
        if self._chat:
            return await function(self, self.prompt)
        score = function(self.prompt, self.reply)
        score = await score if inspect.isawaitable(score) else score
        return Ending(reason="returned", score=Score.of(score))

    async def __call__(self, messages: Sequence[Message], **options: Any) -> Message:
        """Ask the model: a job is the Conversation of its player in this process."""
        start = time.monotonic()
        try:
            reply = await self._chat(messages, **options)
        except OutOfTokens:
            raise
        except BaseException as error:
            self.chat_error = error
            raise
        finally:
            self.chat_seconds += time.monotonic() - start
        self.num_turns += 1
        self.last_reply = reply["content"]
        return reply

    @property
    def finish_reason(self) -> FinishReason:
        return self._chat.finish_reason

    def result(self, reward: float = 0.0, **measurements: dict[str, float]) -> None:
        self._chat.result(reward, **measurements)

    async def run_once(self, link: SupervisorLink, payload: bytes, inbox: Inbox) -> Outcome:
        """Run it in a worker and answer what that asks, until it has an outcome or died."""
        known: list[Message] = []
        num_replies = 0
        job_id = link.start(payload, lambda *message: inbox.put(self, message))
        try:
            while isinstance(message := await self._next_message(), Ask):
                messages = known[: message.num_known] + message.messages
                asked = _Asked(messages, message.options, message.results)
                if num_replies == len(self._turns):
                    self._turns.append((asked, await self._ask(num_replies, asked)))
                before, reply = self._turns[num_replies]
                if asked != before:
                    link.send(job_id, None)
                    return _not_reproducible(num_replies, f"it said {asked}, not {before}")
                link.send(job_id, pickle.dumps(reply))
                known = [*messages, reply.message]
                num_replies += 1
        except BaseException:  # cancelled, or the conversation is broken
            link.send(job_id, None)
            raise
        return message if isinstance(message, Failure) else self._end(message, num_replies)

    async def _next_message(self) -> Ask | End | Failure:
        seconds, message = await self.get()
        self.seconds += seconds
        return message

    def _end(self, end: End, num_replies: int) -> Outcome:
        outcome = end.outcome
        if num_replies < len(self._turns):
            shown = outcome.text if isinstance(outcome, Failure) else repr(outcome)
            return _not_reproducible(num_replies, f"it ended: {shown}")
        self._report(end.results)
        is_out = isinstance(outcome, OutOfTokens)
        return (self._out_of_tokens or outcome) if is_out else outcome

    async def _ask(self, number: int, asked: "_Asked") -> Reply:
        self._report(asked.results)
        try:
            message = await self(asked.messages, **asked.options)
        except OutOfTokens as error:
            self._out_of_tokens = error
            return Reply(number, None, "length", str(error))
        return Reply(number, message, self.finish_reason)

    def _report(self, results: list[TurnResult]) -> None:
        for result in results:
            self.result(result.reward, **result.measurements)


@dataclass(frozen=True, slots=True)
class _Asked:
    """What an episode asked: a replay must ask the same."""

    messages: list[Message]
    options: dict[str, Any]
    results: list[TurnResult]

    def __str__(self) -> str:
        return f"{self.messages[-1:]!r:.300} and reported {self.results!r:.300}"


def _not_reproducible(number: int, what: str) -> Failure:
    return Failure(
        "lost",
        "its worker died through another episode, and it cannot be played again: after the same "
        f"{number} replies {what}. Everything random in an environment must come from the seed",
    )
