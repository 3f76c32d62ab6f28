"""Handles on roles: the controller calls a method, and the role's ranks run it.

trainer = cluster.role("train", Trainer, lr=1e-4)
metrics = trainer.step(batch)                    # runs on all ranks; returns the first one's result
parts   = trainer.logprobs(split(samples))       # a share for each replica; a list of results
future  = trainer.step.start(batch)              # does not wait; future.result() does
norms   = trainer.norm.options(collect="all", deadline=60)()
engine.post(replica, "submit", key, request)     # a message without a reply; does not wait
"""

from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

import torch

from roll_lite.checks import UserError
from roll_lite.cluster.controller import (
    COLLECTS,
    Call,
    Controller,
    LocalController,
    OnFailure,
    OnReport,
)
from roll_lite.device_map import Role, listing


@dataclass(frozen=True, slots=True)
class split:
    """Mark an argument to be split: each data-parallel replica gets a contiguous share.

    All ranks of a replica get the same share. If there are fewer values than replicas, some shares
    are empty.
    """

    values: list | tuple | torch.Tensor

    def __post_init__(self):
        if not isinstance(self.values, list | tuple | torch.Tensor):
            kind = type(self.values).__name__
            raise TypeError(f"split() takes a list, tuple or tensor, not {kind}")

    def share(self, index: int, num_shares: int) -> list | tuple | torch.Tensor:
        """A contiguous share; sizes differ by at most one, larger shares first."""
        size, num_larger = divmod(len(self.values), num_shares)
        start = index * size + min(index, num_larger)
        return self.values[start : start + size + (index < num_larger)]


@dataclass(frozen=True, slots=True)
class Method:
    """A method of a role's workers. Do not change arguments before the call is done."""

    controller: Controller | LocalController
    role: Role
    name: str
    deadline: float
    """Seconds that a rank may spend in a call."""
    collect: str | None = None
    """Whose results a call returns: the first replica's, all replicas' or all ranks'. None means
    replicas if an argument is split, first otherwise."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run on all ranks of the role, wait, return the result."""
        return self.start(*args, **kwargs).result()

    def start(self, *args: Any, **kwargs: Any) -> Future:
        """Run on all ranks of the role; do not wait."""
        is_split = any(isinstance(value, split) for value in (*args, *kwargs.values()))
        contents = [(args, kwargs)] * self.role.num_replicas  # one object: it is encoded once
        if is_split:
            contents = [_share(args, kwargs, i, len(contents)) for i in range(len(contents))]
        collect = self.collect or ("replicas" if is_split else "first")
        call = Call(
            role=self.role,
            method=self.name,
            contents=contents,
            collect=collect,
            deadline=self.deadline,
        )
        return self.controller.issue(call)

    def options(self, *, collect: str | None = None, deadline: float | None = None) -> "Method":
        """The same method, returning other results or with another deadline in seconds."""
        if collect is not None and collect not in COLLECTS:
            raise UserError(f"collect={collect!r} is not known; use {listing(COLLECTS, 'or')}")
        if deadline is not None and not deadline > 0:
            raise UserError(f"deadline={deadline} must be above 0 seconds")
        return replace(self, collect=collect or self.collect, deadline=deadline or self.deadline)


def _share(args: tuple, kwargs: dict, replica: int, num_replicas: int) -> tuple[tuple, dict]:
    """The arguments that one replica gets."""

    def pick(value: Any) -> Any:
        return value.share(replica, num_replicas) if isinstance(value, split) else value

    return tuple(map(pick, args)), {name: pick(value) for name, value in kwargs.items()}


class RoleHandle:
    """The controller's handle on a role. Its methods are those of the worker class.

    Besides calls there are posts, which no ticket orders. `post` calls the method `receive` of the
    object on a replica's first rank, between two calls. An object with a method `work` is given
    turns when no call is due; `work` returns whether more is left. Objects answer with
    `place.report(...)`, which reaches the listener.
    """

    def __init__(
        self, controller: Controller | LocalController, role: Role, cls: type, deadline: float
    ):
        self.role = role
        self.is_alone = isinstance(controller, LocalController)
        """World size is 1: no thread runs `work`, so the caller must `pump`."""
        self._controller = controller
        self._cls = cls
        self._deadline = deadline

    def __getattr__(self, name: str) -> Method:
        if name.startswith("_") or not callable(getattr(self._cls, name, None)):
            known = [n for n in dir(self._cls) if not n.startswith("_")]
            raise AttributeError(
                f"{self._cls.__name__}, the class of role {self.role.name}, has no method {name}; "
                f"it has {listing(known, 'and') if known else 'none'}"
            )
        return Method(self._controller, self.role, name, self._deadline)

    def post(self, replica: int, name: str, *args: Any) -> None:
        """Call `receive(name, *args)` on the first rank of a replica; does not wait."""
        self._controller.post(self.role, replica, (name, *args))

    def pump(self) -> bool:
        """With world size 1: run `work` once; whether more may be left."""
        return self._controller.pump(self.role)

    def listen(self, on_report: OnReport, on_failure: OnFailure) -> None:
        """Have `on_report(replica, ...)` called with reports, and with "lost" if a spare replica is
        gone; `on_failure` if a rank that is needed is lost."""
        self._controller.listen(self.role, on_report, on_failure)

    def stop_listening(self) -> None:
        self._controller.listen(self.role, None, None)

    def __reduce__(self):
        raise TypeError(
            f"the handle of role {self.role.name} stays with the controller; pass the role what "
            "it needs instead"
        )
