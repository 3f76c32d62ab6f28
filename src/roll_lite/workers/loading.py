"""Sends reward functions to another process by name, including those of the running script."""

import functools
import io
import pickle
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from roll_lite.rewards.file import import_file, imported_files, run_module
from roll_lite.types import Reward

MAIN_ELSEWHERE = "__mp_main__"
"""Name of the running script's module in other processes, as in multiprocessing."""


@dataclass(frozen=True, slots=True)
class PackedRewards:
    pickled: bytes
    main_file: str | None
    main_package: str | None
    files: dict[str, str]
    """Files that were imported by their path, by the names of their modules."""


def pack_rewards(rewards: Mapping[str, Reward]) -> PackedRewards:
    """Raises ValueError for rewards that another process cannot import."""
    main = sys.modules["__main__"]
    main_file = getattr(main, "__file__", None)
    for domain, reward in rewards.items():
        if objection := _objection(reward, main_file):
            raise ValueError(
                f"rewards[{domain!r}]={reward!r} {objection}, so a worker process cannot import "
                "it; define it with def at the top level of a file, name it in INLINE, or run with "
                "reward_workers=0"
            )
    sys.modules.setdefault(MAIN_ELSEWHERE, main)  # to unpickle exceptions that the script defines
    pickled = pickle.dumps(dict(rewards))
    return PackedRewards(pickled, main_file, main.__package__, imported_files())


def _objection(reward: Reward, main_file: str | None) -> str:
    """Why another process cannot import the reward; empty if it can."""
    function = reward
    while isinstance(function, functools.partial):
        function = function.func
    if getattr(function, "__module__", None) == "__main__" and main_file is None:
        return "was defined in an interactive session"
    try:
        pickle.dumps(reward)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        return f"cannot be pickled ({error})"
    return ""


def unpack_rewards(packed: PackedRewards) -> dict[str, Reward]:
    return _RewardUnpickler(packed).load()


class _RewardUnpickler(pickle.Unpickler):
    """Imports the coordinator's script, and files that it imported by path, on first reference."""

    def __init__(self, packed: PackedRewards):
        super().__init__(io.BytesIO(packed.pickled))
        self._packed, self._main = packed, None

    def find_class(self, module: str, name: str) -> Any:
        if module == "__main__" and self._main is None:
            self._main = _import_main(self._packed)
        if module in self._packed.files and module not in sys.modules:
            import_file(self._packed.files[module])
        return super().find_class(module, name)


def _import_main(packed: PackedRewards) -> ModuleType:
    """Import the script under another name, so that its `__main__` block does not run."""
    names = (MAIN_ELSEWHERE, "__main__")
    return run_module(packed.main_file, *names, package=packed.main_package)
