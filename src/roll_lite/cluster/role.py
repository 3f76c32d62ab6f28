"""Handles on roles: the controller calls a method, and the role's ranks run it.

trainer = cluster.role("train", Trainer, lr=1e-4)
metrics = trainer.step(batch)                    # runs on all ranks; the first one's result
parts   = trainer.logprobs(split(samples))       # each replica gets its share; a list of results
future  = trainer.step.start(batch)              # does not wait; future.result() does
norms   = trainer.norm.options(collect="all", deadline=60)()
engine.post(replica, "submit", key, request)     # into an object's inbox; nobody waits
"""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from roll_lite.cluster.call import COLLECTS, Request
from roll_lite.cluster.controller import OnFailure, OnReport
from roll_lite.cluster.device_map import Role, listing


@dataclass(frozen=True, slots=True)
class Split:
    values: Sequence | torch.Tensor

    def shares(self, num_shares: int) -> list:
        """Contiguous shares whose sizes differ by at most one, larger ones first."""
        size, larger = divmod(len(self.values), num_shares)
        ends = [0]
        for i in range(num_shares):
            ends.append(ends[-1] + size + (i < larger))
        return [self.values[ends[i] : ends[i + 1]] for i in range(num_shares)]


def split(values: Sequence | torch.Tensor) -> Split:
    """An argument of which each data-parallel replica gets its contiguous share.

    All ranks of a replica get the same share; with fewer values than replicas, some get none.
    """
    if not isinstance(values, (list, tuple, torch.Tensor)):
        raise TypeError(f"split() takes a list, tuple or tensor, not {type(values).__name__}")
    return Split(values)


class Issuer(Protocol):
    def issue(self, request: Request) -> Future: ...

    def post(self, role: Role, replica: int, args: tuple) -> None: ...

    def pump(self, role: Role) -> bool: ...

    def listen(
        self, role: Role, on_report: OnReport | None, on_failure: OnFailure | None
    ) -> None: ...


@dataclass(frozen=True, slots=True)
class Method:
    """A method of a role's workers. Arguments must not change until the call is done."""

    issuer: Issuer
    role: Role
    name: str
    deadline: float
    """Seconds that a rank may be in a call."""
    collect: str | None = None
    """Whose results a call returns: the first replica's, a list of all replicas', or of all ranks'.
    None means replicas if an argument was split, and else first."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run on all ranks of the role, wait, return the result."""
        return self.start(*args, **kwargs).result()

    def start(self, *args: Any, **kwargs: Any) -> Future:
        """Run on all ranks of the role; do not wait."""
        contents = _contents(args, kwargs, self.role.num_replicas)
        is_split = any(isinstance(value, Split) for value in (*args, *kwargs.values()))
        collect = self.collect or ("replicas" if is_split else "first")
        return self.issuer.issue(Request(self.role, self.name, contents, collect, self.deadline))

    def options(self, *, collect: str | None = None, deadline: float | None = None) -> "Method":
        """The same method with another choice of results, or another deadline in seconds."""
        if collect is not None and collect not in COLLECTS:
            raise ValueError(f"collect={collect!r} is not known; use {listing(COLLECTS, 'or')}")
        if deadline is not None and not deadline > 0:
            raise ValueError(f"deadline={deadline} must be above 0 seconds")
        return replace(self, collect=collect or self.collect, deadline=deadline or self.deadline)


class RoleHandle:
    """What the controller holds of a role: its methods are those of the worker class.

    Beside calls there are messages that no ticket orders. The object on the first rank of a replica
    gets what is posted by its method `receive`, between two calls or pieces of work. A piece of
    work is its method `work`, which runs when nothing else does and says whether more is left. It
    reports with `place.report(...)`.
    """

    def __init__(self, issuer: Issuer, role: Role, cls: type, deadline: float, is_alone: bool):
        self.role = role
        self.is_alone = is_alone
        """In a world of one nothing works by itself: somebody has to pump."""
        self._issuer = issuer
        self._cls = cls
        self._deadline = deadline

    def __getattr__(self, name: str) -> Method:
        if name.startswith("_") or not callable(getattr(self._cls, name, None)):
            known = [n for n in dir(self._cls) if not n.startswith("_")]
            raise AttributeError(
                f"{self._cls.__name__}, the worker of role {self.role.name}, has no method {name}; "
                f"it has {listing(known, 'and') if known else 'none'}"
            )
        return Method(self._issuer, self.role, name, self._deadline)

    def post(self, replica: int, name: str, *args: Any) -> None:
        """Have `receive(name, *args)` called on the first rank of a replica; does not wait."""
        self._issuer.post(self.role, replica, (name, *args))

    def pump(self) -> bool:
        """In a world of one: let the object do one piece of work; whether there may be more."""
        return self._issuer.pump(self.role)

    def listen(self, on_report: OnReport, on_failure: OnFailure) -> None:
        """Have reports brought, with the replica's number, and the failure that ends everything."""
        self._issuer.listen(self.role, on_report, on_failure)

    def stop_listening(self) -> None:
        self._issuer.listen(self.role, None, None)

    def __reduce__(self):
        raise TypeError(
            f"the handle of role {self.role.name} stays with the controller; pass the worker what "
            "it needs instead"
        )


def _contents(args: tuple, kwargs: dict, num_replicas: int) -> list[tuple]:
    """The arguments of each replica; one and the same object where nothing is split."""
    if not any(isinstance(value, Split) for value in (*args, *kwargs.values())):
        return [(args, kwargs)] * num_replicas
    columns = [_shares(value, num_replicas) for value in args]
    named = {name: _shares(value, num_replicas) for name, value in kwargs.items()}
    return [
        (tuple(column[i] for column in columns), {name: c[i] for name, c in named.items()})
        for i in range(num_replicas)
    ]


def _shares(value: Any, num_replicas: int) -> list:
    return value.shares(num_replicas) if isinstance(value, Split) else [value] * num_replicas
