"""Play an environment, or measure how fast and how well an agent plays.

python -m roll_lite.envs play sokoban
python -m roll_lite.envs play frozen_lake --seed 7 --agent solver
python -m roll_lite.envs bench
python -m roll_lite.envs bench sokoban frozen_lake --episodes 1000 --max-steps 20

A human types an action in a line, without the tags: Right. For `tool` it is the whole reply.
"""

import argparse
import asyncio
import inspect
import sys
import time
from collections import Counter
from collections.abc import Callable
from random import Random

from roll_lite.checks import at_least
from roll_lite.envs.env import Env, Observation
from roll_lite.envs.game import Game, as_reply
from roll_lite.envs.registry import ENVS, make_env

Agent = Callable[[Env], str]
"""The reply to an environment's last observation."""


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        return options.run(options)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def play(options: argparse.Namespace) -> int:
    """One episode, printed."""
    env = _make(options.env, options)
    agent = _agent(options.agent, env, options.seed)
    observation, _ = env.reset(options.seed)
    _print(observation)
    is_over, total = False, 0.0
    while not is_over:
        try:
            reply = agent(env)
        except EOFError:
            return 1
        observation, reward, terminated, truncated, info = _step(env, reply)
        total, is_over = total + reward, terminated or truncated
        print(f"--- assistant\n{reply}\n--- reward {reward:g}")
        _print(observation)
    if isinstance(env, Game):
        print(env.observe())
    print(f"{'return':<12}{total:g}")
    for name, value in info["parts"].items():
        print(f"{name:<12}{value:g}")
    return 0


def bench(options: argparse.Namespace) -> int:
    """A line for each environment."""
    names = options.env or [name for name in ENVS if name != "tool"]
    at_least(1, options, "episodes")
    print(f"{'env':<22}{'episodes/s':>11}{'steps/s':>10}{'success':>9}{'return':>8}{'turns':>7}")
    for name in names:
        env = _make(name, options)
        agent = _agent(options.agent, env, options.seed)
        start = time.perf_counter()
        totals = Counter()
        for seed in range(options.seed, options.seed + options.episodes):
            totals.update(play_episode(env, agent, seed))
        seconds, n = time.perf_counter() - start, options.episodes
        print(
            f"{name:<22}{n / seconds:>11,.0f}{totals['turns'] / seconds:>10,.0f}"
            f"{totals['success'] / n:>9.1%}{totals['return'] / n:>8.2f}{totals['turns'] / n:>7.2f}"
        )
    return 0


def play_episode(env: Game, agent: Agent, seed: int) -> dict[str, float]:
    """The metrics of an episode, and its return."""
    env.reset(seed)
    is_over, total = False, 0.0
    while not is_over:
        _, reward, terminated, truncated, info = env.step(agent(env))
        total, is_over = total + reward, terminated or truncated
    return {"return": total, **info["parts"]}


def random_agent(seed: int) -> Agent:
    """Plays valid actions, all as likely."""
    random = Random(f"agent {seed}")
    return lambda env: as_reply(random.choice(env.actions()))


def solver(env: Game) -> str:
    """Plays what wins; where nothing does any more, the first action."""
    return as_reply((env.solve() or env.actions())[0])


def human(env: Env) -> str:
    line = input("> ")
    return as_reply(line) if isinstance(env, Game) else line


def _agent(name: str, env: Env, seed: int) -> Agent:
    if name == "human":
        return human
    if not isinstance(env, Game):
        raise ValueError(f"--agent {name} plays games only; use --agent human")
    return solver if name == "solver" else random_agent(seed)


def _make(name: str, options: argparse.Namespace) -> Env:
    if options.max_steps is None:
        return make_env(name)
    if name == "tool":
        raise ValueError("--max-steps is not read with tool, which ends with the final answer")
    return make_env(name, max_steps=options.max_steps)


def _step(env: Env, reply: str) -> tuple[Observation, float, bool, bool, dict]:
    result = env.step(reply)
    return asyncio.run(result) if inspect.iscoroutine(result) else result


def _print(observation: Observation) -> None:
    for message in observation:
        print(f"--- {message['role']}\n{message['content']}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m roll_lite.envs",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True, metavar="{play,bench}")
    one = commands.add_parser("play", help="play one episode and print it")
    one.add_argument("env", help=", ".join(ENVS))
    one.add_argument("--agent", choices=("human", "random", "solver"), default="human")
    one.set_defaults(run=play)
    many = commands.add_parser("bench", help="play many episodes: speed and success")
    many.add_argument("env", nargs="*", help="default: all but tool")
    many.add_argument("--agent", choices=("random", "solver"), default="random")
    many.add_argument("--episodes", type=int, default=200, metavar="N", help="default: 200")
    many.set_defaults(run=bench)
    for command in (one, many):
        command.add_argument("--seed", type=int, default=0, metavar="N", help="default: 0")
        command.add_argument("--max-steps", type=int, metavar="N", help="actions of an episode")
    return parser


if __name__ == "__main__":
    sys.exit(main())
