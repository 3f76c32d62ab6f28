"""Python files of a user's own, imported by their path, and the tables in them.

    def mine(prompt, reply): ...

    REWARDS = {"mine": mine}

A recipe is such a file too: replay imports the one that wrote a run.
"""

import hashlib
import importlib.util
import re
import sys
import time
import traceback
import zlib
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

from roll_lite.checks import UserError

PREFIX = "own_file"
"""With it begin the names of modules that were imported by their path."""
_torch_seconds: list[float] = []
"""How long the import of the file took that brought torch, if one did."""


def import_file(path: str | Path) -> ModuleType:
    """The module of a file, which is imported once. Also modules beside the file can be imported
    from now on, unless others have their names."""
    path = Path(path).resolve()
    if not path.is_file():
        raise UserError(f"{path} is not a file; name a Python file")
    name = re.sub(r"\W", "_", f"{PREFIX}{path}") + f"_{zlib.crc32(bytes(path)):08x}"
    if name in sys.modules:
        return sys.modules[name]
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    has_torch = "torch" in sys.modules
    start = time.monotonic()
    try:
        module = run_module(str(path), name)
    except Exception as error:  # of any kind: it runs the user's code
        sys.modules.pop(name, None)
        raise UserError(_explain(path, error)) from error
    if not has_torch and "torch" in sys.modules:
        _torch_seconds.append(time.monotonic() - start)
    return module


def imports_torch(path: str | Path) -> bool:
    """Whether a file has torch, or something of it, as a global name."""
    for value in vars(import_file(path)).values():
        name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", "")
        if str(name).partition(".")[0] == "torch":
            return True
    return False


def seconds_of_torch() -> float | None:
    """Seconds that the import of the file took that brought torch; None if none did."""
    return next(iter(_torch_seconds), None)


def read_table(path: str | Path, name: str) -> dict[str, Callable]:
    """A table of a file, from names to functions or classes; empty if the file has none."""
    table = getattr(import_file(path), name, {})
    if not isinstance(table, dict) or not all(map(callable, table.values())):
        raise UserError(
            f"{path} line {line_of(path, name)}: {name} must be a dictionary from names to "
            f"functions or classes, as in {name} = {{'mine': mine}}"
        )
    return table


def need_table(path: str | Path, name: str) -> dict[str, Callable]:
    """A table that the file must have."""
    if not (table := read_table(path, name)):
        raise UserError(f"{path} has no {name}; write {name} = {{'mine': mine}} in it")
    return table


def line_of(path: str | Path, name: str) -> int:
    """The line at which a file first assigns or defines a name; 0 if it does not."""
    pattern = re.compile(rf"(async def|def|class)?\s*{name}\s*[=:(]")
    lines = Path(path).read_text().splitlines()
    return next((i for i, line in enumerate(lines, start=1) if pattern.match(line)), 0)


def digest_of(path: str | Path) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:12]


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
    """Where the import failed, by the innermost line of the user's, and that line."""
    if isinstance(error, SyntaxError):
        problem = f"{error.filename} line {error.lineno}: SyntaxError: {error.msg}; fix the file"
        source = traceback.format_exception_only(error)[1:-1]  # the line, and marks below it
        return "\n".join([problem, *(line.rstrip() for line in source)])
    frames = traceback.extract_tb(error.__traceback__)
    own = (f for f in reversed(frames) if Path(f.filename).parent == path.parent)
    frame = next(own, None)  # of the file, or of a module beside it
    place, source = (f"{frame.filename} line {frame.lineno}", frame.line) if frame else (path, "")
    remedy = (
        "install it, or put it beside the file"
        if isinstance(error, ModuleNotFoundError)
        else "fix the file"
    )
    problem = f"{place}: {type(error).__name__}: {error}; {remedy}"
    return f"{problem}\n    {source}" if source else problem


def imported_files() -> dict[str, str]:
    """Paths of the files that were imported so, by the names of their modules."""
    modules = list(sys.modules.items())  # other threads may import
    return {name: str(m.__file__) for name, m in modules if name.startswith(PREFIX)}


def is_own_function(function: Any) -> bool:
    """Whether a function is from such a file."""
    return getattr(function, "__module__", "").startswith(PREFIX)
