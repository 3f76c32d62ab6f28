"""Play an environment, measure how fast and how well agents play, write solvers' episodes.

roll-lite envs play sokoban
roll-lite envs play frozen_lake:size=8 --seed 7 --agent solver
roll-lite envs bench
roll-lite envs bench sokoban:max_steps=20 frozen_lake --episodes 1000
roll-lite envs traces frozen_lake sokoban@2 --episodes 2000 --out traces.jsonl

A human types an action in a line, without the tags: Right. For `tool` it is the whole reply.
`--code FILE` names a Python file with environments of your own, ENVS = {name: class or coroutine}.
"""

import argparse
import asyncio
import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

from roll_lite.checks import UserError, at_least
from roll_lite.envs.agents import (
    Agent,
    AgentChat,
    draw_traces,
    game_class,
    human,
    random_agent,
    shares,
    solver,
)
from roll_lite.envs.game import Game
from roll_lite.envs.play import EnvError, EpisodeOptions
from roll_lite.envs.specs import ENVS, EnvMaker, make_env, required_options
from roll_lite.own_files import need_table
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
    make = make_env(options.env, _envs(options))
    chat = PrintedChat(_agent(options.agent, make, options.seed))
    try:
        ending = asyncio.run(chat.play(make, _task(options.env, options.seed)))
    except (EOFError, KeyboardInterrupt):
        print("\nstopped before the episode ended", file=sys.stderr)
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
    envs, n = _envs(options), options.episodes
    print(f"{'env':<22}{'episodes/s':>11}{'steps/s':>10}{'success':>9}{'return':>8}{'turns':>7}")
    for spec in options.env or filter(partial(_is_ready, envs), envs):
        make = make_env(spec, envs)
        agent, start = _agent(options.agent, make, options.seed), time.perf_counter()
        tasks = [_task(spec, seed) for seed in range(options.seed, options.seed + n)]
        totals = asyncio.run(play_episodes(make, agent, tasks))
        seconds = time.perf_counter() - start
        print(
            f"{spec:<22}{n / seconds:>11,.0f}{totals['turns'] / seconds:>10,.0f}"
            f"{totals['success'] / n:>9.1%}{totals['return'] / n:>8.2f}{totals['turns'] / n:>7.2f}"
        )
    return 0


async def play_episodes(make: EnvMaker, agent: Agent, tasks: Sequence[Prompt]) -> Counter[str]:
    """The sums of the episodes' measurements."""
    totals = Counter()
    for task in tasks:
        chat = AgentChat(agent)
        totals.update(chat.measurements(await chat.play(make, task)))
    return totals


def traces(options: argparse.Namespace) -> int:
    """Solvers' episodes as rows for recipes/sft.py."""
    at_least(1, options, "episodes")
    if not 0 <= options.mistakes <= 1:
        raise UserError(f"mistakes={options.mistakes} must be from 0 to 1")
    given = {"seed": options.seed, "mistakes": options.mistakes, "envs": _envs(options)}
    given["options"] = EpisodeOptions(history=options.history)
    num_rows = 0
    with open(options.out, "w") as file:
        for spec, count in shares(options.env, options.episodes).items():
            for messages in draw_traces(spec, count, **given):
                file.write(json.dumps({"messages": messages}, ensure_ascii=False) + "\n")
                num_rows += 1
    print(f"{options.out}: {num_rows:,} dialogues of {options.episodes:,} episodes")
    return 0


def _is_ready(envs: dict[str, EnvMaker], name: str) -> bool:
    """Whether agents can play it without further options."""
    return game_class(envs[name]) is not None and not required_options(envs[name])


def _envs(options: argparse.Namespace) -> dict[str, EnvMaker]:
    return ENVS | need_table(options.code, "ENVS") if options.code else ENVS


def _task(spec: str, seed: int) -> Prompt:
    return Prompt(id=f"{spec}/{seed}", messages=(), domain=spec, ground_truth="", seed=seed)


def _agent(name: str, make: EnvMaker, seed: int) -> Agent:
    if name == "human":
        return human
    if game_class(make) is None:
        raise UserError(f"--agent {name} plays games only; use --agent human")
    return solver if name == "solver" else random_agent(seed)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="roll-lite envs",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True, metavar="{play,bench,traces}")
    one = commands.add_parser("play", help="play one episode and print it")
    one.add_argument("env", help=f"NAME or NAME:option=value,...; names are {', '.join(ENVS)}")
    one.add_argument("--agent", choices=("human", "random", "solver"), default="human")
    one.set_defaults(run=play)
    many = commands.add_parser("bench", help="play many episodes: speed and success")
    many.add_argument("env", nargs="*", help="default: all games")
    many.add_argument("--agent", choices=("random", "solver"), default="random")
    many.add_argument("--episodes", type=int, default=200, metavar="N", help="default: 200")
    many.set_defaults(run=bench)
    rows = commands.add_parser("traces", help="write solvers' episodes as rows for recipes/sft.py")
    rows.add_argument("env", nargs="+", help="SPEC@WEIGHT, or SPEC for weight 1")
    rows.add_argument("--out", required=True, metavar="FILE")
    rows.add_argument("--episodes", type=int, default=2000, metavar="N", help="default: 2000")
    rows.add_argument("--mistakes", type=float, default=0.0, metavar="SHARE", help="default: 0")
    rows.add_argument("--history", type=int, metavar="TURNS", help="as in RL; default: all")
    rows.set_defaults(run=traces)
    for command in (one, many, rows):
        command.add_argument("--seed", type=int, default=0, metavar="N", help="default: 0")
        command.add_argument("--code", metavar="FILE", help="Python file with ENVS")
    return parser


if __name__ == "__main__":
    sys.exit(main())
