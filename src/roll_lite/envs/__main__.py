"""Play an environment, measure how fast and how well an agent plays, or write solvers' episodes.

python -m roll_lite.envs play sokoban
python -m roll_lite.envs play frozen_lake:size=8 --seed 7 --agent solver
python -m roll_lite.envs bench
python -m roll_lite.envs bench sokoban:max_steps=20 frozen_lake --episodes 1000

A human types an action in a line, without the tags: Right. For `tool` it is the whole reply.
"""

import argparse
import asyncio
import inspect
import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from roll_lite.checks import at_least
from roll_lite.envs.agents import Agent, AgentChat, human, random_agent, solver
from roll_lite.envs.game import Game
from roll_lite.envs.play import EnvError
from roll_lite.envs.registry import ENVS, EnvMaker, make_env
from roll_lite.types import Message, Prompt


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        return options.run(options)
    except (ValueError, EnvError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def play(options: argparse.Namespace) -> int:
    """One episode, printed."""
    make = make_env(options.env)
    chat = PrintedChat(_agent(options.agent, make, options.seed))
    try:
        ending = asyncio.run(chat.play(make, _task(options.env, options.seed)))
    except EOFError:
        return 1
    if isinstance(chat.env, Game):
        print(chat.env.observe())
    print(f"{'end':<12}{ending.reason}")
    for name, value in chat.measurements(ending).items():
        print(f"{name:<12}{value:g}")
    return 0


class PrintedChat(AgentChat):
    """Prints what is said."""

    num_printed = 0

    async def __call__(self, messages: Sequence[Message], **options: Any) -> Message:
        for message in messages[self.num_printed :]:
            print(f"--- {message['role']}\n{message['content']}")
        reply = await super().__call__(messages, **options)
        print(f"--- assistant\n{reply['content']}")
        self.num_printed = len(messages) + 1
        return reply

    def result(self, reward: float = 0.0, **measurements: dict[str, float]) -> None:
        super().result(reward, **measurements)
        print(f"--- reward {reward:g}")


def bench(options: argparse.Namespace) -> int:
    """A line for each environment."""
    at_least(1, options, "episodes")
    print(f"{'env':<22}{'episodes/s':>11}{'steps/s':>10}{'success':>9}{'return':>8}{'turns':>7}")
    for spec in options.env or [name for name, make in ENVS.items() if _is_game(make)]:
        make = make_env(spec)
        agent = _agent(options.agent, make, options.seed)
        start, n = time.perf_counter(), options.episodes
        seeds = range(options.seed, options.seed + n)
        totals = asyncio.run(play_episodes(spec, agent, seeds))
        seconds = time.perf_counter() - start
        print(
            f"{spec:<22}{n / seconds:>11,.0f}{totals['turns'] / seconds:>10,.0f}"
            f"{totals['success'] / n:>9.1%}{totals['return'] / n:>8.2f}{totals['turns'] / n:>7.2f}"
        )
    return 0


async def play_episodes(spec: str, agent: Agent, seeds: Sequence[int]) -> Counter[str]:
    """The sums of the episodes' measurements."""
    make, totals = make_env(spec), Counter()
    for seed in seeds:
        chat = AgentChat(agent)
        totals.update(chat.measurements(await chat.play(make, _task(spec, seed))))
    return totals


def _task(spec: str, seed: int) -> Prompt:
    return Prompt(id=f"{spec}/{seed}", messages=(), domain=spec, ground_truth="", seed=seed)


def _agent(name: str, make: EnvMaker, seed: int) -> Agent:
    if name == "human":
        return human
    if not _is_game(make):
        raise ValueError(f"--agent {name} plays games only; use --agent human")
    return solver if name == "solver" else random_agent(seed)


def _is_game(make: EnvMaker) -> bool:
    while hasattr(make, "func"):  # functools.partial
        make = make.func
    return inspect.isclass(make) and issubclass(make, Game)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m roll_lite.envs",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True, metavar="{play,bench}")
    one = commands.add_parser("play", help="play one episode and print it")
    one.add_argument("env", help=f"NAME or NAME:option=value,...; names are {', '.join(ENVS)}")
    one.add_argument("--agent", choices=("human", "random", "solver"), default="human")
    one.set_defaults(run=play)
    many = commands.add_parser("bench", help="play many episodes: speed and success")
    many.add_argument("env", nargs="*", help="default: all games")
    many.add_argument("--agent", choices=("random", "solver"), default="random")
    many.add_argument("--episodes", type=int, default=200, metavar="N", help="default: 200")
    many.set_defaults(run=bench)
    for command in (one, many):
        command.add_argument("--seed", type=int, default=0, metavar="N", help="default: 0")
    return parser


if __name__ == "__main__":
    sys.exit(main())
