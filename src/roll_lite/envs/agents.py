"""Agents that play in place of a model: at random, by a solver, from the keyboard; and episodes of
solvers as dialogues to imitate, with exactly the texts that a model reads in RL."""

import asyncio
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, pairwise
from random import Random
from typing import Any

from roll_lite.checks import UserError
from roll_lite.envs.env import Ending, Env
from roll_lite.envs.game import Game
from roll_lite.envs.play import EpisodeOptions, player
from roll_lite.envs.specs import ENVS, EnvMaker, env_tasks, make_env
from roll_lite.types import REDUCTIONS, FinishReason, Message, Prompt, TurnResult

Agent = Callable[[Env | None], str]
"""The reply to the last observation of an environment; None stands for a coroutine's."""
ALL_TURNS = EpisodeOptions()
MAX_LOSSES = 1000
"""Losses in a row, before a solver is given up."""


def random_agent(seed: int | str) -> Agent:
    """Plays valid actions, all as likely."""
    random = Random(f"agent {seed}")

    def reply(game: Game) -> str:
        if not (actions := game.actions()):
            raise UserError(f"{type(game).__name__} takes any text, so no agent plays at random")
        return game.as_reply(random.choice(actions))

    return reply


def solver(game: Game) -> str:
    """Plays what wins; where nothing does any more, the first action."""
    return game.as_reply((game.solve() or game.actions())[0])


def erring_solver(seed: int | str, mistakes: float) -> Agent:
    """A solver that plays at random in a share of the turns, and where nothing wins any more."""
    random = Random(f"mistakes {seed}")
    at_random = random_agent(seed)

    def reply(game: Game) -> str:
        path = [] if random.random() < mistakes else game.solve()
        return game.as_reply(path[0]) if path else at_random(game)

    return reply


def human(env: Env | None) -> str:
    if sys.stdin is None:  # it was closed before Python started
        raise EOFError
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
    """For each turn all that the model would read, and the reply."""
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
        """Measurements of a finished episode, with its return and its number of turns."""
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


def draw_traces(
    spec: str,
    count: int,
    *,
    seed: int | str,
    mistakes: float,
    options: EpisodeOptions,
    envs: Mapping[str, EnvMaker] = ENVS,
) -> Iterator[list[Message]]:
    """Dialogues of `count` episodes of training tasks.

    In a share of the turns, `mistakes`, a random action is played instead of the solver's. Without
    mistakes, an episode that the solver does not win in time is left out.
    """
    make = make_env(spec, envs)
    if (game := game_class(make)) is None or game.solve is Game.solve:
        raise UserError(f"env={spec!r} has no solver; name games that have one")
    num_losses = 0
    for task in env_tasks(spec, seed):
        if count == 0:
            return
        chat = AgentChat(erring_solver(task.id, mistakes))
        is_won = chat.measurements(asyncio.run(chat.play(make, task, options)))["success"]
        num_losses = 0 if is_won else num_losses + 1
        if mistakes or is_won:
            count -= 1
            yield from training_rows(chat.turns)
        elif num_losses == MAX_LOSSES:
            raise UserError(f"env={spec!r}: its solver lost {MAX_LOSSES} times; raise max_steps")


def training_rows(turns: list[list[Message]]) -> Iterator[list[Message]]:
    """The turns that no later turn continues: one, unless the model reads a part of its history."""
    for turn, following in pairwise([*turns, []]):
        if following[: len(turn)] != turn:
            yield turn


def shares(entries: Sequence[str], total: int) -> dict[str, int]:
    """Episodes of each spec, in proportion to the weights of `SPEC@WEIGHT`; `SPEC` has weight 1."""
    weights = dict(map(_parse_entry, entries))
    if len(weights) < len(entries):
        raise UserError(f"env={' '.join(entries)} names one twice; name it once, with its weight")
    bounds = [round(total * part / sum(weights.values())) for part in accumulate(weights.values())]
    counts = [high - low for low, high in pairwise([0, *bounds])]
    return dict(zip(weights, counts, strict=True))


def _parse_entry(text: str) -> tuple[str, float]:
    spec, at, weight = text.rpartition("@")
    try:
        value = float(weight) if at else 1.0
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise UserError(f"env={text!r}: {weight!r} is not a weight above 0; write SPEC@WEIGHT")
    return (spec if at else text), value
