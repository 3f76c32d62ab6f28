"""Environments by name, and the specs that name one with its options.

A spec is `NAME` or `NAME:option=value,option=value`: `frozen_lake:size=8,style=short`. Values are
true, false, numbers and texts.
"""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from roll_lite.envs.adapters import GymnasiumGame, OpenEnvGame, TextArenaGame
from roll_lite.envs.env import Env, EpisodeFunction
from roll_lite.envs.frozen_lake import FrozenLake
from roll_lite.envs.guess import Guess
from roll_lite.envs.shop import Shop
from roll_lite.envs.sokoban import OTHER_SYMBOLS, Sokoban
from roll_lite.envs.tool import python_tool
from roll_lite.options import parse_spec
from roll_lite.rewards.file import import_file

EnvMaker = Callable[..., Env] | EpisodeFunction
"""An environment class or a coroutine function; its keyword arguments are its options."""
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
"""The environments of this package; `read_envs` reads those of a user's file."""


def parse_env(spec: str) -> tuple[str, dict[str, Value]]:
    """`NAME:option=value,...` -> (name, options)."""
    return parse_spec(spec)


def make_env(spec: str, envs: Mapping[str, EnvMaker] = ENVS) -> EnvMaker:
    """The class or coroutine function of a spec with its options, as `player` takes it.

    Raises ValueError for an unknown name or option, or a value that the environment refuses.
    """
    name, options = parse_env(spec)
    if name not in envs:
        raise ValueError(f"env={name!r} is not known; use one of {', '.join(envs)}")
    known = options_of(envs[name])
    for option, value in options.items():
        if option not in known:
            listed = ", ".join(known) or "none"
            raise ValueError(f"env={spec!r} has no option {option!r}; its options are {listed}")
        if not _fits(value, known[option].annotation):
            wanted = _in_words(known[option].annotation)
            raise ValueError(f"env={spec!r}: {option}={value!r} must be {wanted}")
    if missing := [option for option in required_options(envs[name]) if option not in options]:
        raise ValueError(f"env={spec!r} lacks {missing[0]}; write {name}:{missing[0]}=...")
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


def read_envs(path: str | Path) -> dict[str, EnvMaker]:
    """The ENVS of a Python file: environment classes or coroutine functions by name."""
    if not Path(path).is_file():
        raise ValueError(
            f"envs={str(path)!r} is not a file; name a Python file that has ENVS = {{name: class}}"
        )
    envs = getattr(import_file(path), "ENVS", None)
    if not isinstance(envs, dict) or not envs or not all(map(callable, envs.values())):
        raise ValueError(
            f"{path} has no environments; name classes or coroutine functions, as in "
            "ENVS = {'mine': MyEnv}"
        )
    return envs


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
        raise ValueError(f"env={spec!r}: {error}") from None
