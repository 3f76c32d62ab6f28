"""Agents that play in place of a model: at random, by a solver, from the keyboard."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any

from roll_lite.envs.env import Ending, Env
from roll_lite.envs.game import Game
from roll_lite.envs.play import EpisodeOptions, player
from roll_lite.envs.registry import EnvMaker
from roll_lite.types import REDUCTIONS, FinishReason, Message, Prompt, TurnResult

Agent = Callable[[Env | None], str]
"""The reply to the last observation of an environment; None stands for a coroutine's."""
ALL_TURNS = EpisodeOptions()


def random_agent(seed: int | str) -> Agent:
    """Plays valid actions, all as likely."""
    random = Random(f"agent {seed}")

    def reply(game: Game) -> str:
        if not (actions := game.actions()):
            raise ValueError(f"{type(game).__name__} takes any text, so no agent plays at random")
        return game.as_reply(random.choice(actions))

    return reply


def solver(game: Game) -> str:
    """Plays what wins; where nothing does any more, the first action."""
    return game.as_reply((game.solve() or game.actions())[0])


def erring_solver(seed: int | str, mistakes: float) -> Agent:
    """A solver that plays at random in a share of the turns, and where nothing wins any more."""
    random, at_random = Random(f"mistakes {seed}"), random_agent(seed)

    def reply(game: Game) -> str:
        path = [] if random.random() < mistakes else game.solve()
        return game.as_reply(path[0]) if path else at_random(game)

    return reply


def human(env: Env | None) -> str:
    line = input("> ")
    return env.as_reply(line) if isinstance(env, Game) else line


def game_class(make: EnvMaker) -> type[Game] | None:
    """The class of an environment that is a Game, under its options."""
    while isinstance(make, partial):
        make = make.func
    return make if inspect.isclass(make) and issubclass(make, Game) else None


@dataclass(slots=True)
class AgentChat:
    """A Conversation in which an agent replies. It keeps what was read, said and measured."""

    agent: Agent
    env: Env | None = None
    finish_reason: FinishReason = "stop"
    turns: list[list[Message]] = field(default_factory=list)
    """Of each turn all that the model would read, and the reply."""
    results: list[TurnResult] = field(default_factory=list)

    async def __call__(self, messages: Sequence[Message], **_: Any) -> Message:
        reply = {"role": "assistant", "content": self.agent(self.env)}
        self.turns.append([*messages, reply])
        return reply

    def result(self, reward: float = 0.0, **measurements: dict[str, float]) -> None:
        self.results.append(TurnResult(reward=reward, measurements=measurements))

    async def play(
        self, make: EnvMaker, task: Prompt, options: EpisodeOptions = ALL_TURNS
    ) -> Ending:
        def made() -> Env:
            self.env = make()
            return self.env

        is_coroutine = inspect.iscoroutinefunction(make)
        return await player(make if is_coroutine else made, task.domain, options)(self, task)

    def measurements(self, ending: Ending) -> dict[str, float]:
        """Of a finished episode, with its return and its number of turns."""
        found: dict[tuple[str, str], list[float]] = {}
        for result in self.results:
            for how, values in result.measurements.items():
                for name, value in values.items():
                    found.setdefault((name, how), []).append(value)
        score = ending.score
        return {
            "return": sum(r.reward for r in self.results) if score is None else score.value,
            "turns": float(len(self.turns)),
            **{name: REDUCTIONS[how](values) for (name, how), values in found.items()},
            **(score.parts if score else {}),
        }
