"""Runs a recipe in this process, as its command line does."""

from types import ModuleType
from typing import Any

from roll_lite.planning.resolve import resolved


def call_recipe(recipe: ModuleType, cfg: Any) -> Any:
    return recipe.main(resolved(cfg))
