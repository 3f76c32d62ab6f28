"""Episodes: a conversation between the model and an environment of either interface, or one turn of
the model that a reward scores."""

import bdb
import inspect
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

from roll_lite.checks import UserError, at_least, check_choices
from roll_lite.envs.env import (
    Conversation,
    Ending,
    Env,
    EpisodeFunction,
    Observation,
    OutOfTokens,
    Player,
)
from roll_lite.options import Argument
from roll_lite.types import REDUCTIONS, AsyncReward, Message, Prompt, Reward, Score, State, number

CLOSE_THOUGHTS = "</think>"


class EnvError(RuntimeError):
    """An environment raised or returned something unusable; the text names it, seed and turn."""


@dataclass(frozen=True, kw_only=True)
class EpisodeOptions:
    """Episodes: turns, and what the model reads of earlier ones."""

    max_turns: int = 100
    """Most turns of an episode, beside the limit of the environment itself."""
    history: int | None = None
    """Earlier turns that the model reads again; None is all. With a number, every turn that lacks
    an earlier one is a training sequence of its own, as in GiGPO."""
    old_thoughts: Literal["keep", "drop"] = "keep"
    """Whether the model reads the thoughts (<think>) of its earlier turns again. Dropped ones make
    every turn a training sequence of its own."""
    episode_tokens: int | None = None
    """Most tokens that the model may write in an episode, in all turns."""
    at_limit: Argument[Literal["end", "fail"]] = "end"
    """What becomes of an episode that has no room for a further reply, in the context or in
    episode_tokens: it ends, is scored by its turns so far and kept, or it fails."""

    def __post_init__(self):
        at_least(1, self, "max_turns", "episode_tokens")
        at_least(0, self, "history")
        check_choices(self)


ONE_TURN = EpisodeOptions(at_limit="fail")
"""For questions: a prompt that leaves no room for a whole reply is a mistake."""


def player(make: Callable[[], Env] | EpisodeFunction, name: str, options: EpisodeOptions) -> Player:
    """An environment class, or a coroutine function, as a Player."""
    if inspect.iscoroutinefunction(make):
        return _CoroutinePlayer(make, name)
    return _EnvPlayer(make, name, options)


@dataclass(frozen=True, slots=True)
class _CoroutinePlayer:
    episode: EpisodeFunction
    name: str

    async def __call__(self, chat: Conversation, task: Prompt) -> Ending:
        with _naming(lambda: f"{self.name}, seed {task.seed}"):
            score = Score.of(await self.episode(chat, task))
        return Ending(reason="returned", score=score)


@dataclass(frozen=True, slots=True)
class _EnvPlayer:
    make: Callable[[], Env]
    name: str
    options: EpisodeOptions

    async def __call__(self, chat: Conversation, task: Prompt) -> Ending:
        history = _History(self.options)

        def place() -> str:
            return f"{self.name}, seed {task.seed}, turn {history.num_turns}"

        with _naming(place):
            env = self.make()
            observation, info = _checked("reset", 2, await _awaited(env.reset(task.seed)))
            history.rules = info.get("rules", "")
        try:
            while True:
                with _naming(place):
                    history.hear(_messages(observation))
                    key = _state(info, observation)
                reply = await chat(history.messages, state=key, stop=getattr(env, "stop", None))
                history.say(reply)
                with _naming(place):
                    env.finish_reason = chat.finish_reason
                    found = _checked("step", 5, await _awaited(env.step(reply["content"])))
                    observation, reward, terminated, truncated, info = found
                    chat.result(number("reward", reward), **_measurements(info))
                if terminated or truncated:
                    return Ending(reason="terminated" if terminated else "truncated")
                if history.num_turns == self.options.max_turns:
                    return Ending(reason="turns")
        finally:
            if close := getattr(env, "close", None):
                await _awaited(close())


class _History:
    """What was said, and the part of it that the model reads."""

    def __init__(self, options: EpisodeOptions):
        self._options = options
        self.rules = ""
        self._system: list[Message] = []
        self._turns: list[list[Message]] = []
        """What the environment said, then the model's reply."""
        self._heard: list[Message] = []
        """What the environment said last."""

    @property
    def num_turns(self) -> int:
        return len(self._turns)

    @property
    def messages(self) -> list[Message]:
        """The system's messages, the rules in front of what comes first, and the last turns."""
        history = self._options.history
        turns = self._turns if history is None else self._turns[max(0, self.num_turns - history) :]
        shown = [*(message for turn in turns for message in turn), *self._heard]
        if self.rules:
            first = shown[0]
            shown[0] = first | {"content": f"{self.rules}\n\n{first['content']}"}
        return self._system + shown

    def hear(self, messages: list[Message]) -> None:
        if not self._turns:
            self._system = [m for m in messages if m["role"] == "system"]
        self._heard = [m for m in messages if m["role"] != "system" or self._turns]
        if not self._heard:
            raise UserError("the observation is empty, but the episode is not over")

    def say(self, reply: Message) -> None:
        if self._options.old_thoughts == "drop":
            reply = reply | {"content": reply["content"].rpartition(CLOSE_THOUGHTS)[2].lstrip()}
        self._turns.append([*self._heard, reply])


class RetryingConversation(Conversation, Protocol):
    """The coordinator's own conversation of a sample."""

    step_state: State
    """The sample's state while its reply is scored."""

    async def retried(self, call: Callable[[], Awaitable[Any]]) -> Any:
        """The result of a call that may fail now and then; only the last attempt raises."""


async def ask(
    chat: RetryingConversation, prompt: Prompt, *, reward: Reward | AsyncReward
) -> Ending:
    """A question as an episode of one turn: have the model answer, and score its reply."""
    chat.step_state = "scoring"
    reply = await chat(prompt.messages)
    if chat.finish_reason == "length":  # for rewards that must not guess what was cut off
        prompt = replace(prompt, extra=prompt.extra | {"finish_reason": "length"})

    async def score() -> Score:
        return Score.of(await _awaited(reward(prompt, reply["content"])))

    return Ending(reason="returned", score=await chat.retried(score))


def question_player(rewards: Mapping[str, Reward | AsyncReward]) -> Player:
    """Questions with the reward of their domain."""

    def play(chat: RetryingConversation, prompt: Prompt) -> Awaitable[Ending]:
        if prompt.domain not in rewards:
            raise UserError(
                f"prompt {prompt.id} has domain={prompt.domain!r}, which has no reward; "
                f"known domains: {', '.join(sorted(rewards))}"
            )
        return ask(chat, prompt, reward=rewards[prompt.domain])

    return play


async def _awaited(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


def _checked(method: str, count: int, returned: Any) -> tuple:
    """What `reset` or `step` returned, if it has the right form."""
    if not isinstance(returned, tuple) or len(returned) != count or not _is_info(returned[-1]):
        expected = {2: "observation, info", 5: "observation, reward, terminated, truncated, info"}
        raise TypeError(f"{method} returned {returned!r:.200}, not ({expected[count]})")
    return returned


def _is_info(value: Any) -> bool:
    return isinstance(value, dict)


def _messages(observation: Observation) -> list[Message]:
    if isinstance(observation, str):
        return [{"role": "user", "content": observation}]
    is_sequence = isinstance(observation, Sequence)
    if not is_sequence or not all(map(_is_message, observation)):
        raise TypeError(
            f"the observation is {observation!r:.200}; it must be a text, or messages "
            "{'role': ..., 'content': text}"
        )
    return list(observation)


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and all(
        isinstance(value.get(key), str) for key in ("role", "content")
    )


def _state(info: dict[str, Any], observation: Observation) -> str:
    state = info.get("state", observation)
    return state if isinstance(state, str) else repr(state)


def _measurements(info: dict[str, Any]) -> dict[str, dict[str, float]]:
    return {
        kind: {name: number(name, value) for name, value in info[kind].items()}
        for kind in REDUCTIONS
        if kind in info
    }


@contextmanager
def _naming(place: Callable[[], str]) -> Iterator[None]:
    """Errors of the environment say which one it was, its seed and its turn."""
    try:
        yield
    except (OutOfTokens, bdb.BdbQuit):
        raise
    except Exception as error:  # any kind: environments are user code
        raise EnvError(f"{place()}: {type(error).__name__}: {error}") from error
