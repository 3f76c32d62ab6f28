"""Files of a user's own, given with --code: losses, advantages, rewards, environments and more.

    --code mine.py          # LOSSES, ADVANTAGES, REWARDS, INLINE, ENVS, METRICS, TRACKERS: tables
                            # keep(group), prompts(source, history): functions

Every rank imports the files before options are made. LOSSES and ADVANTAGES join the built-in ones;
what else is there is read from `CodeOptions` where a recipe needs it. Keyword-only parameters of
these functions are options.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from roll_lite.checks import UserError
from roll_lite.options import Argument, OpenOptions, keywords, name_of, where
from roll_lite.own_files import (
    digest_of,
    import_file,
    is_own_function,
    line_of,
    read_table,
    seconds_of_torch,
)
from roll_lite.train.advantages import ADVANTAGES
from roll_lite.train.losses import LOSSES
from roll_lite.types import Group, Prompt

BUILT_IN = {"LOSSES": LOSSES, "ADVANTAGES": ADVANTAGES}
"""Tables that those of the files join: an option names one of their functions."""
TABLES = ("REWARDS", "INLINE", "METRICS", "TRACKERS")
"""Tables all of whose functions are used, so that their options are those of the file."""
FUNCTIONS = {"keep": ("group",), "prompts": ("source", "history")}
"""Functions of a file, with what they are called with."""
NAMES = (*BUILT_IN, *TABLES, "ENVS", *FUNCTIONS)


@dataclass(frozen=True, kw_only=True)
class CodeOptions(OpenOptions):
    """Code of your own, and the options that it brings."""

    code: tuple[str, ...] = ()
    """Python files of your own with LOSSES, ADVANTAGES, REWARDS, INLINE, ENVS, METRICS, TRACKERS,
    keep(group) or prompts(source, history). Their options become flags: --code FILE --help."""
    code_digests: Argument[tuple[str, ...]] = ()
    """What the files were when the run was started."""

    def __post_init__(self):
        load_code(self.code)
        self.check_values()

    @property
    def owners(self) -> dict[str, Callable]:
        owners: dict[str, Callable] = {}
        for function in self._functions():
            for name in keywords(function):
                if owners.setdefault(name, function) is not function:
                    raise UserError(
                        f"{where(function)}: option {name} of {name_of(function)} is also one of "
                        f"{name_of(owners[name])}, {where(owners[name])}; rename one"
                    )
        return owners

    @property
    def open_defaults(self) -> dict[str, Any]:
        return {"code_digests": tuple(map(digest_of, self.code))}

    @property
    def envs(self) -> dict[str, Callable]:
        """Environments by name."""
        return self._table("ENVS")

    @property
    def metrics(self) -> dict[str, Callable[[Sequence[Group]], float]]:
        """Metrics of a step's groups by name."""
        return self._table("METRICS")

    @property
    def trackers(self) -> tuple[Callable, ...]:
        return tuple(self._table("TRACKERS").values())

    @property
    def keep(self) -> Callable[[Group], bool] | None:
        """Whether a group is trained on: if the files' functions all say so."""
        functions = self._named("keep")
        if not functions:
            return None
        return lambda group: all(function(group) for function in functions)

    @property
    def prompts(self) -> Callable[..., Prompt] | None:
        """Which prompt comes next."""
        functions = self._named("prompts")
        if len(functions) > 1:
            raise UserError(
                f"code={' '.join(self.code)} has two functions prompts(source, history); which "
                "prompt comes next is one decision, so leave one out"
            )
        return functions[0] if functions else None

    def rewards(
        self,
        functions: Mapping[str, Callable],
        inline: Mapping[str, Callable],
        domains: Iterable[str] | None = None,
    ) -> tuple[dict[str, Callable], dict[str, Callable]]:
        """A recipe's rewards with those of the files, which replace them by domain.

        Files without a reward for any of the `domains`, all that prompts have, are refused.
        """
        own = self._table("REWARDS"), self._table("INLINE")
        names = own[0].keys() | own[1].keys()
        if names and domains is not None and names.isdisjoint(domains):
            raise UserError(
                f"code={' '.join(self.code)} has rewards for domain {' and '.join(sorted(names))}, "
                f"but the prompts have {' and '.join(map(repr, sorted(domains)))}; give them the "
                "same name"
            )
        kept = ({d: r for d, r in t.items() if d not in names} for t in (functions, inline))
        both = [rest | new for rest, new in zip(kept, own, strict=True)]
        return both[0], both[1]

    def warn_of_torch(self, used: Iterable[Callable], num_workers: int) -> None:
        """Say that worker processes, which import the files of these functions, import torch."""
        modules = {getattr(getattr(f, "func", f), "__module__", "") for f in used}
        for path in self.code if num_workers else ():
            seconds = seconds_of_torch(path)
            if seconds is not None and import_file(path).__name__ in modules:
                print(
                    f"{path} imports torch, so each worker process takes {seconds:.1f} s more to "
                    "start; rewards and environments in a file of their own need none",
                    flush=True,
                )

    def _table(self, name: str) -> dict[str, Callable]:
        """A table of all files, with options filled in."""
        joined: dict[str, Callable] = {}
        for path in self.code:
            for key, function in read_table(path, name).items():
                if key in joined:
                    raise UserError(
                        f"{path} line {line_of(path, name)}: {name} has {key!r}, and so has "
                        "another file of --code; leave one out"
                    )
                joined[key] = function if name == "ENVS" else self._bound(function)
        return joined

    def _named(self, name: str) -> list[Callable]:
        found = [getattr(import_file(path), name, None) for path in self.code]
        return [self._bound(function) for function in found if function is not None]

    def _bound(self, function: Callable) -> Callable:
        """The function with its options."""
        names = _options_of(function)
        values = self.values if names else {}
        return partial(function, **{n: values[n] for n in names}) if names else function

    def _functions(self) -> list[Callable]:
        """The functions with options."""
        found = []
        for path in self.code:
            for name in TABLES:
                found += read_table(path, name).values()
            found += [getattr(import_file(path), name, None) for name in FUNCTIONS]
        return [f for f in dict.fromkeys(found) if f is not None and _options_of(f)]


def _options_of(function: Callable) -> list[str]:
    """Keyword-only parameters of a function or class of a file; others have no flags."""
    if not is_own_function(function) or not (
        inspect.isfunction(function) or inspect.isclass(function)
    ):
        return []
    return list(keywords(function))


def load_code(paths: Iterable[str]) -> None:
    """Import files, and add their losses and advantages to the built-in ones."""
    for path in paths:
        if not Path(path).is_file():
            raise UserError(f"code={path!r} is not a file; name a Python file of yours")
        module = import_file(path)
        if not any(hasattr(module, name) for name in NAMES):
            raise UserError(f"{path} has none of {', '.join(NAMES)}; define one of them")
        for name in (*TABLES, "ENVS"):
            read_table(path, name)
        for name, parameters in FUNCTIONS.items():
            _check_call(getattr(module, name, None), parameters)
        for name, table in BUILT_IN.items():
            _join(table, read_table(path, name), name)


def _join(table: dict[str, Callable], own: Mapping[str, Callable], kind: str) -> None:
    for name, function in own.items():
        if table.setdefault(name, function) is not function:
            raise UserError(
                f"{where(function)}: {kind} has {name!r}, which exists already "
                f"({where(table[name])}); give it another name"
            )
        _ = keywords(function)  # refuses an option without type or default


def _check_call(function: Callable | None, parameters: Sequence[str]) -> None:
    if function is None:
        return
    try:
        inspect.signature(function).bind(*parameters)
    except TypeError:
        raise UserError(
            f"{where(function)}: {name_of(function)}{inspect.signature(function)} must take "
            f"({', '.join(parameters)}); options are keyword-only and have defaults"
        ) from None
