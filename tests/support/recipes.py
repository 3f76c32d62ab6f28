"""Runs a recipe in this process, as its command line does."""

import gc
import itertools
from types import ModuleType
from typing import Any

from roll_lite.planning.resolve import resolved

_num_calls = itertools.count()


def call_recipe(recipe: ModuleType, cfg: Any) -> Any:
    shorten_collection()
    return recipe.main(resolved(cfg))


def shorten_collection() -> None:
    """A run begins with a collection of garbage, which takes longer than a short run does.

    So only every eighth looks at what was there before: modules, tests, and earlier runs.
    """
    if next(_num_calls) % 8:
        gc.freeze()
