"""Environments by name, the specs that name one with its options, and their tasks.

A spec is `NAME` or `NAME:option=value,option=value`: `frozen_lake:size=8,style=short`. Values are
true, false, numbers and texts.
"""

import hashlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import count, islice
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from roll_lite.checks import UserError, above, at_least
from roll_lite.envs.adapters import GymnasiumGame, OpenEnvGame, TextArenaGame
from roll_lite.envs.env import Env, EpisodeFunction, Player
from roll_lite.envs.frozen_lake import FrozenLake
from roll_lite.envs.guess import Guess
from roll_lite.envs.play import EpisodeOptions, player
from roll_lite.envs.shop import Shop
from roll_lite.envs.sokoban import OTHER_SYMBOLS, Sokoban
from roll_lite.envs.tool import python_tool
from roll_lite.options import Argument, parse_spec
from roll_lite.types import Prompt

EnvMaker = Callable[..., Env] | EpisodeFunction
"""An environment class or a coroutine function; its keyword arguments are its options."""
Split = Literal["train", "held_out"]
Value = bool | int | float | str
TYPE_NAMES = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    NoneType: "left out",
}

ENVS: dict[str, EnvMaker] = {
    "frozen_lake": FrozenLake,
    "frozen_lake_slippery": partial(FrozenLake, is_slippery=True),
    "sokoban": Sokoban,
    "sokoban_symbols": partial(Sokoban, symbols=OTHER_SYMBOLS, search_depth=30),
    "sokoban_8x8": partial(Sokoban, size=8, num_boxes=2, search_depth=10),
    "sokoban_10x10": partial(Sokoban, size=10, num_boxes=2, search_depth=10),
    "shop": Shop,
    "guess": Guess,
    "tool": python_tool,
    "gymnasium": GymnasiumGame,
    "textarena": TextArenaGame,
    "openenv": OpenEnvGame,
}
"""The environments of this package."""


def parse_env(spec: str) -> tuple[str, dict[str, Value]]:
    """`NAME:option=value,...` -> (name, options)."""
    return parse_spec(spec)


def make_env(spec: str, envs: Mapping[str, EnvMaker] = ENVS) -> EnvMaker:
    """The class or coroutine function of a spec with its options, as `player` takes it.

    Raises ValueError for an unknown name or option, or a value that the environment refuses.
    """
    name, options = parse_env(spec)
    if name not in envs:
        raise UserError(f"env={name!r} is not known; use one of {', '.join(envs)}")
    known = options_of(envs[name])
    for option, value in options.items():
        if option not in known:
            listed = ", ".join(known) or "none"
            raise UserError(f"env={spec!r} has no option {option!r}; its options are {listed}")
        if not _fits(value, known[option].annotation):
            wanted = _in_words(known[option].annotation)
            raise UserError(f"env={spec!r}: {option}={value!r} must be {wanted}")
    if missing := [option for option in required_options(envs[name]) if option not in options]:
        raise UserError(f"env={spec!r} lacks {missing[0]}; write {name}:{missing[0]}=...")
    made = partial(envs[name], **options)
    if not inspect.iscoroutinefunction(made):
        _try(made, spec)
    return made


def options_of(maker: EnvMaker) -> dict[str, inspect.Parameter]:
    """The keyword arguments of a class or a coroutine function that a spec can give."""
    parameters = list(inspect.signature(maker, eval_str=True).parameters.values())
    if inspect.iscoroutinefunction(maker):
        parameters = parameters[2:]  # after the conversation and the task
    return {p.name: p for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)}


def required_options(maker: EnvMaker) -> list[str]:
    known = options_of(maker).values()
    return [parameter.name for parameter in known if parameter.default is parameter.empty]


def _fits(value: Value, hint: Any) -> bool:
    """Whether a value is of the type of an option; a whole number is also a float."""
    if hint is inspect.Parameter.empty or hint is Any:
        return True
    if get_origin(hint) is Literal:
        return value in get_args(hint)
    if get_origin(hint) in (UnionType, Union):
        return any(_fits(value, member) for member in get_args(hint))
    return type(value) is hint or (type(value) is int and hint is float)


def _in_words(hint: Any) -> str:
    members = get_args(hint) if get_origin(hint) in (UnionType, Union) else (hint,)
    return " or ".join(
        f"one of {', '.join(map(str, get_args(member)))}"
        if get_origin(member) is Literal
        else TYPE_NAMES.get(member, str(member))
        for member in members
    )


def _try(make: Callable[[], Env], spec: str) -> None:
    """Make one environment, which checks the values of its options."""
    try:
        make()
    except ValueError as error:
        raise UserError(f"env={spec!r}: {error}") from None


@dataclass(frozen=True, kw_only=True)
class EnvOptions:
    """Environments: worker processes."""

    env_workers: int = 4
    """Processes that play episodes, many in each; 0 plays them inline, for a debugger."""
    env_seconds: float = 10.0
    """Time limit of one step of an environment; an episode that takes longer has failed."""
    env_memory_gib: Argument[float] = 2.0
    """Memory of a worker beyond its imports, for all its episodes."""
    env_error_share: Argument[float] = 0.2
    """Stop the run when more than this share of the last 200 episodes failed."""

    def __post_init__(self):
        at_least(0, self, "env_workers")
        above(0, self, "env_seconds", "env_memory_gib")
        if not 0 <= self.env_error_share <= 1:
            raise UserError(f"env_error_share={self.env_error_share} must be from 0 to 1 (never)")

    @property
    def limits(self) -> dict[str, Any]:
        """Arguments of EnvWorkers."""
        return {
            "num_workers": self.env_workers,
            "seconds": self.env_seconds,
            "memory_gib": self.env_memory_gib,
            "max_error_share": self.env_error_share,
        }


def env_players(
    specs: Iterable[str], makers: Mapping[str, EnvMaker], episodes: EpisodeOptions
) -> dict[str, Player]:
    """What plays the episodes of each environment."""
    return {spec: player(make_env(spec, makers), spec, episodes) for spec in specs}


def env_tasks(spec: str, seed: int | str, split: Split = "train") -> Iterator[Prompt]:
    """Endless tasks of one split; to evaluate, give seed=0, whatever the seed of the run."""
    name, _ = parse_env(spec)
    for number in count():
        yield Prompt(
            id=f"{spec}/{split}/{seed}/{number}",
            messages=(),
            domain=spec,
            ground_truth="",
            extra={"split": split},
            seed=task_seed(name, seed, split, number),
        )


def task_seed(name: str, seed: int | str, split: Split, number: int) -> int:
    """63 bits. Options do not change it: variants of an environment play the same tasks.

    Seeds of held-out tasks are odd, the others even, so the splits never share one.
    """
    text = f"{name}/{split}/{seed}/{number}"
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 2 << 1 | (split == "held_out")


def held_out_tasks(specs: Iterable[str], count: int) -> list[Prompt]:
    """`count` tasks of each environment to evaluate on, the same whatever the seed of a run."""
    return [task for spec in specs for task in islice(env_tasks(spec, 0, "held_out"), count)]
