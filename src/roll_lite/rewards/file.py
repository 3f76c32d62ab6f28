"""A file of rewards, imported by its path, so that no recipe has to be edited:

    def mine(prompt, reply): ...

    REWARDS = {"mine": mine}        # by domain; called in worker processes
    INLINE = {}                     # optional, for rewards that take microseconds

A recipe such as recipes/rlvr.py is such a file too; its Config has the tables.
"""

import importlib.util
import re
import sys
import traceback
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from roll_lite.checks import UserError
from roll_lite.types import AsyncReward, Reward

PREFIX = "rewards_file"
"""With it begin the names of modules that were imported by their path."""


class RewardTables(NamedTuple):
    """Rewards by domain."""

    functions: dict[str, Reward | AsyncReward]
    """Called in worker processes."""
    inline: dict[str, Reward | AsyncReward]
    """Called in the event loop."""


def read_rewards(path: str | Path) -> RewardTables:
    """Raises ValueError for a file that has no table of rewards."""
    check_file(path)
    module = import_file(path)
    recipe = getattr(module, "Config", None)
    tables = RewardTables(
        *(getattr(module, name, getattr(recipe, name, {})) for name in ("REWARDS", "INLINE"))
    )
    for table in tables:
        if not isinstance(table, dict) or not all(map(callable, table.values())):
            raise UserError(f"{path}: {table!r} must be a dictionary from domains to functions")
    if not any(tables):
        raise UserError(
            f"{path} has no rewards; name them by domain, as in REWARDS = {{'mine': my_reward}}"
        )
    return tables


def check_file(path: str | Path) -> None:
    if not Path(path).is_file():
        raise UserError(
            f"rewards={str(path)!r} is not a file; name a Python file that has "
            "REWARDS = {domain: function}"
        )


def import_file(path: str | Path) -> ModuleType:
    """Also modules beside the file can be imported from now on, unless others have their names."""
    path = Path(path).resolve()
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    try:
        return run_module(str(path), re.sub(r"\W", "_", f"{PREFIX}{path}"))
    except Exception as error:  # of any kind: it runs the user's code
        raise UserError(_explain(path, error)) from error


def run_module(path: str, *names: str, package: str | None = None) -> ModuleType:
    """Import a file under names of ours; its functions are pickled under the first."""
    loader = SourceFileLoader(names[0], path)
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(names[0], loader))
    if package:  # python -m package.script may use relative imports
        module.__package__ = package
    sys.modules |= dict.fromkeys(names, module)
    loader.exec_module(module)
    return module


def _explain(path: Path, error: Exception) -> str:
    """Where the import failed, by the line of the file itself, and that line."""
    if isinstance(error, SyntaxError):
        problem = f"{error.filename} line {error.lineno}: SyntaxError: {error.msg}; mend the file"
        source = traceback.format_exception_only(error)[1:-1]  # the line, and marks below it
        return "\n".join([problem, *(line.rstrip() for line in source)])
    frames = traceback.extract_tb(error.__traceback__)
    frame = next((f for f in reversed(frames) if f.filename == str(path)), None)
    place, source = (f"{path} line {frame.lineno}", frame.line) if frame else (path, "")
    problem = f"{place}: {type(error).__name__}: {error}; mend the file"
    return f"{problem}\n    {source}" if source else problem


def imported_files() -> dict[str, str]:
    """Paths of the files that were imported so, by the names of their modules."""
    modules = list(sys.modules.items())  # other threads may import
    return {name: str(m.__file__) for name, m in modules if name.startswith(PREFIX)}
