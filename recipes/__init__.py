"""The recipes as `roll_lite.recipes`. They import each other by plain names, as scripts do."""

import importlib
import sys
from pathlib import Path
from types import ModuleType

FOLDER = Path(__file__).parent
sys.path.append(str(FOLDER))


def __getattr__(name: str) -> ModuleType:
    """`from roll_lite.recipes import rlvr` gives the module that other recipes import."""
    if not (FOLDER / f"{name}.py").is_file():
        raise AttributeError(f"there is no recipe {name}")
    return importlib.import_module(name)
