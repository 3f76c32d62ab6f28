"""Environments by name, each with the settings of a table in docs and in `bench`."""

from collections.abc import Callable
from functools import partial

from roll_lite.envs.env import Env
from roll_lite.envs.frozen_lake import FrozenLake
from roll_lite.envs.guess import Guess
from roll_lite.envs.shop import Shop
from roll_lite.envs.sokoban import OTHER_SYMBOLS, Sokoban
from roll_lite.envs.tool import PythonTool

ENVS: dict[str, Callable[..., Env]] = {
    "frozen_lake": FrozenLake,
    "frozen_lake_slippery": partial(FrozenLake, is_slippery=True),
    "sokoban": Sokoban,
    "sokoban_symbols": partial(Sokoban, symbols=OTHER_SYMBOLS, search_depth=30),
    "sokoban_8x8": partial(Sokoban, size=8, num_boxes=2, search_depth=10),
    "sokoban_10x10": partial(Sokoban, size=10, num_boxes=2, search_depth=10),
    "shop": Shop,
    "guess": Guess,
    "tool": PythonTool,
}
"""Makers of environments: their options are keyword arguments. Add new ones here."""


def make_env(name: str, **options: object) -> Env:
    if name not in ENVS:
        raise ValueError(f"env={name!r} is not known; use one of {', '.join(ENVS)}")
    return ENVS[name](**options)
