"""Sends rewards and environments to another process by name, also those of the running script."""

import io
import pickle
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from roll_lite.checks import UserError
from roll_lite.own_files import import_file, imported_files, run_module

MAIN_ELSEWHERE = "__mp_main__"
"""Name of the running script's module in other processes, as in multiprocessing."""


@dataclass(frozen=True, slots=True)
class Packed:
    """Rewards or environments by domain."""

    pickled: bytes
    main_file: str | None
    main_package: str | None
    files: dict[str, str]
    """Files that were imported by their path, by the names of their modules."""


def pack(table: Mapping[str, Any], name: str, remedy: str) -> Packed:
    """Raises ValueError, which calls the table `name`, for what another process cannot import."""
    main = sys.modules["__main__"]
    main_file = getattr(main, "__file__", None)
    for domain, value in table.items():
        if reason := _why_not_importable(value, main_file):
            raise UserError(
                f"{name}[{domain!r}]={value!r} {reason}, so a worker process cannot import it; "
                f"{remedy}"
            )
    pickled = pickle.dumps(dict(table))
    return Packed(pickled, main_file, main.__package__, imported_files())


def _why_not_importable(value: Any, main_file: str | None) -> str:
    """Why another process cannot import what the value refers to; empty if it can."""
    try:
        pickled = pickle.dumps(value)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        return f"cannot be pickled ({error})"
    if b"__main__" in pickled and main_file is None:
        return "was defined in an interactive session"
    return ""


def unpack(packed: Packed) -> dict[str, Any]:
    return _Unpickler(packed).load()


class _Unpickler(pickle.Unpickler):
    """Imports the coordinator's script, and files that it imported by path, on first reference."""

    def __init__(self, packed: Packed):
        super().__init__(io.BytesIO(packed.pickled))
        self._packed = packed
        self._main = None

    def find_class(self, module: str, name: str) -> Any:
        if module == "__main__" and self._main is None:
            self._main = _import_main(self._packed)
        if module in self._packed.files and module not in sys.modules:
            import_file(self._packed.files[module])
        return super().find_class(module, name)


def _import_main(packed: Packed) -> ModuleType:
    """Import the script under another name, so that its `__main__` block does not run."""
    names = (MAIN_ELSEWHERE, "__main__")
    return run_module(packed.main_file, *names, package=packed.main_package)
