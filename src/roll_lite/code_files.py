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
from functools import cache, partial
from pathlib import Path
from typing import Any

from roll_lite.checks import UserError
from roll_lite.options import Argument, OpenOptions, keywords, name_of, unwrapped, where
from roll_lite.own_files import (
    digest_of,
    import_file,
    imports_torch,
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
USED = ("REWARDS", "INLINE", "METRICS", "TRACKERS")
"""Tables all of whose functions are used, so that their options are those of the file."""
TABLES = (*BUILT_IN, *USED, "ENVS")
FUNCTIONS = ("keep", "prompts")
CALLED_WITH = {
    "LOSSES": ("logprobs_R", "delta_R", "advantages_R", "batch"),
    "REWARDS": ("prompt", "reply"),
    "INLINE": ("prompt", "reply"),
    "METRICS": ("groups",),
    "TRACKERS": ("run",),
    "keep": ("group",),
    "prompts": ("source", "history"),
}
"""What functions are called with; of estimators their parameters say it."""


@dataclass(frozen=True)
class Code:
    """What some files define, joined."""

    tables: Mapping[str, Mapping[str, Callable]]
    """Each of TABLES."""
    functions: Mapping[str, Sequence[Callable]]
    """Each of FUNCTIONS, of all files that have it."""
    owners: Mapping[str, Callable]
    """The function of each option."""


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
    def owners(self) -> Mapping[str, Callable]:
        return load_code(self.code).owners

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
        return next(iter(self._named("prompts")), None)

    def rewards(
        self, functions: Mapping[str, Callable], inline: Mapping[str, Callable]
    ) -> tuple[dict[str, Callable], dict[str, Callable]]:
        """A recipe's rewards with those of the files, which replace them by domain."""
        own = self._table("REWARDS"), self._table("INLINE")
        names = own[0].keys() | own[1].keys()
        kept = ({d: r for d, r in t.items() if d not in names} for t in (functions, inline))
        both = [rest | new for rest, new in zip(kept, own, strict=True)]
        return both[0], both[1]

    def only_domain(self, others: Iterable[str] = ()) -> str:
        """The domain of the one reward that the files and `others` have; empty for several."""
        tables = load_code(self.code).tables
        names = {*tables["REWARDS"], *tables["INLINE"], *others}
        return names.pop() if len(names) == 1 else ""

    def check_domains(self, domains: Iterable[str]) -> None:
        """Refuse rewards none of which is for a domain that questions have, if there are any."""
        tables = load_code(self.code).tables
        names = tables["REWARDS"].keys() | tables["INLINE"].keys()
        domains = {*domains}
        if names and domains and names.isdisjoint(domains):
            own = " and ".join(sorted(names))
            known = f"code={' '.join(self.code)} has rewards for domain {own}"
            if domains == {""}:
                raise UserError(
                    f"{known}, but the prompts have no domain; name one of them in the field "
                    f"domain of each row, or for all rows with --columns domain={min(names)}"
                )
            raise UserError(
                f"{known}, but the prompts have {' and '.join(map(repr, sorted(domains)))}; "
                "give them the same name"
            )

    def warn_of_torch(self, used: Iterable[Callable]) -> None:
        """Say that worker processes, which import the files of these functions, import torch."""
        modules = {getattr(unwrapped(function), "__module__", "") for function in used}
        for path in self.code:
            if import_file(path).__name__ in modules and imports_torch(path):
                seconds = seconds_of_torch()
                longer = f"takes {seconds:.1f} s more" if seconds else "takes seconds longer"
                print(
                    f"{path} imports torch, so each worker process {longer} to start; rewards and "
                    "environments in a file of their own need none",
                    flush=True,
                )

    def changed_files(self, before: Mapping[str, Any]) -> list[str]:
        """Files that are not what they were when a run with the options `before` was started."""
        old = dict(zip(before.get("code", ()), before.get("code_digests", ()), strict=False))
        return [path for path in self.code if old.get(path, digest_of(path)) != digest_of(path)]

    def _table(self, name: str) -> dict[str, Callable]:
        """A table of all files, with options filled in; environments get theirs from specs."""
        table = load_code(self.code).tables[name]
        return {n: f if name == "ENVS" else self._bound(f) for n, f in table.items()}

    def _named(self, name: str) -> list[Callable]:
        return [self._bound(function) for function in load_code(self.code).functions[name]]

    def _bound(self, function: Callable) -> Callable:
        """The function with its options."""
        names = _options_of(function)
        values = self.values if names else {}
        return partial(function, **{n: values[n] for n in names}) if names else function


def load_code(paths: Iterable[str]) -> Code:
    """Import files, and add their losses and advantages to the built-in ones."""
    code = _joined_files(tuple(paths))
    for name, table in BUILT_IN.items():
        _add(table, code.tables[name], name)
    return code


@cache
def _joined_files(paths: tuple[str, ...]) -> Code:
    for path in paths:
        _check_file(path)
    tables = {name: _joined(paths, name) for name in TABLES}
    functions = {name: _functions(paths, name) for name in FUNCTIONS}
    _refuse_ambiguous(tables, functions)
    used = [f for name in USED for f in tables[name].values()]
    used += [function for name in FUNCTIONS for function in functions[name]]
    return Code(tables, functions, _owners(used))


def _check_file(path: str) -> None:
    if not Path(path).is_file():
        raise UserError(f"code={path!r} is not a file; name a Python file of yours")
    module = import_file(path)
    if not any(hasattr(module, name) for name in (*TABLES, *FUNCTIONS)):
        names = ", ".join((*TABLES, *FUNCTIONS))
        raise UserError(f"{path} has none of {names}; define one of them")


def _joined(paths: Iterable[str], name: str) -> dict[str, Callable]:
    """A table of all files."""
    joined: dict[str, Callable] = {}
    for path in paths:
        for key, function in read_table(path, name).items():
            if joined.setdefault(key, function) is not function:
                raise UserError(
                    f"{path} line {line_of(path, name)}: {name} has {key!r}, and so has another "
                    "file of --code; leave one out"
                )
            _check_call(function, f"{path} line {line_of(path, name)}", name)
    return joined


def _functions(paths: Iterable[str], name: str) -> list[Callable]:
    """The functions of a name, of all files."""
    found = []
    for path in paths:
        function = getattr(import_file(path), name, None)
        if function is not None:
            _check_call(function, f"{path} line {line_of(path, name)}", name)
            found.append(function)
    return found


def _check_call(function: Any, place: str, name: str) -> None:
    """Refuse what cannot be called as the library does."""
    if not callable(function):
        raise UserError(f"{place}: {name}={function!r} must be a function")
    if name == "ENVS" and inspect.isclass(function):
        _check_env(function)
    if name not in CALLED_WITH:
        return
    _ = _options_of(function)  # refuses one without a type or default
    try:
        signature = inspect.signature(function)
    except ValueError:  # of some builtins
        return
    try:
        signature.bind(*CALLED_WITH[name])
    except TypeError:
        raise UserError(
            f"{where(function)}: {name_of(function)}{signature} must take "
            f"({', '.join(CALLED_WITH[name])}); options are keyword-only and have defaults"
        ) from None


def _check_env(env: type) -> None:
    missing = [method for method in ("reset", "step") if not hasattr(env, method)]
    if missing:
        raise UserError(
            f"{where(env)}: environment {env.__name__} has no {' and no '.join(missing)}; it needs "
            "reset(self, seed) and step(self, reply), as in docs/howto/environment.md"
        )


def _refuse_ambiguous(
    tables: Mapping[str, Mapping[str, Callable]], functions: Mapping[str, Sequence[Callable]]
) -> None:
    """Refuse two rewards of a domain, and two answers to which prompt comes next."""
    if both := tables["REWARDS"].keys() & tables["INLINE"].keys():
        domain = min(both)
        places = (where(tables[name][domain]) for name in ("REWARDS", "INLINE"))
        raise UserError(
            f"domain {domain!r} has a reward in REWARDS and one in INLINE, "
            f"{' and '.join(places)}; leave one out"
        )
    if len(functions["prompts"]) > 1:
        raise UserError(
            f"there are two functions prompts(source, history), "
            f"{' and '.join(map(where, functions['prompts']))}; which prompt comes next is one "
            "decision, so leave one out"
        )


def _owners(functions: Iterable[Callable]) -> dict[str, Callable]:
    """The function of each option."""
    owners: dict[str, Callable] = {}
    for function in functions:
        for name in _options_of(function):
            if owners.setdefault(name, function) is not function:
                raise UserError(
                    f"{where(function)}: option {name} of {name_of(function)} is also one of "
                    f"{name_of(owners[name])}, {where(owners[name])}; rename one"
                )
    return owners


def _options_of(function: Callable) -> list[str]:
    """Keyword-only parameters of a function or class of a file; others have no flags."""
    if not is_own_function(function) or not (
        inspect.isfunction(function) or inspect.isclass(function)
    ):
        return []
    return list(keywords(function))


def _add(table: dict[str, Callable], own: Mapping[str, Callable], kind: str) -> None:
    """Join a built-in table."""
    for name, function in own.items():
        if table.setdefault(name, function) is not function:
            raise UserError(
                f"{where(function)}: {kind} has {name!r}, which exists already "
                f"({where(table[name])}); give it another name"
            )
        _ = keywords(function)  # refuses an option without type or default
