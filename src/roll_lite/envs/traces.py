"""Episodes of solvers as dialogues to imitate, with exactly the texts that a model reads in RL."""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise

from roll_lite.envs.agents import AgentChat, erring_solver, game_class
from roll_lite.envs.game import Game
from roll_lite.envs.play import EpisodeOptions
from roll_lite.envs.registry import ENVS, EnvMaker, make_env
from roll_lite.envs.tasks import env_tasks
from roll_lite.types import Message

MAX_LOSSES = 1000
"""In a row, before the solver is given up."""


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
        raise ValueError(f"env={spec!r} has no solver; name games that have one")
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
            raise ValueError(f"env={spec!r}: its solver lost {MAX_LOSSES} times; raise max_steps")


def training_rows(turns: list[list[Message]]) -> Iterator[list[Message]]:
    """The turns that no later turn continues: one, unless the model reads a part of its history."""
    for turn, following in pairwise([*turns, []]):
        if following[: len(turn)] != turn:
            yield turn


def shares(entries: Sequence[str], total: int) -> dict[str, int]:
    """Episodes of each spec, in proportion to the weights of `SPEC@WEIGHT`; `SPEC` has weight 1."""
    weights = dict(map(_parse_entry, entries))
    if len(weights) < len(entries):
        raise ValueError(f"env={' '.join(entries)} names one twice; name it once, with its weight")
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
        raise ValueError(f"env={text!r}: {weight!r} is not a weight above 0; write SPEC@WEIGHT")
    return (spec if at else text), value
