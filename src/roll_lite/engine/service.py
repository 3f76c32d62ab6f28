"""An engine as the worker of a role: requests come by post, turns go back as reports.

    generate = cluster.role("generate", EngineService, folder="models/tiny")
    generate.post(replica, "submit", key, Request(...))      # or "abort", key

Reports are `("answers", EngineReport)` and `("failed", keys, traceback)`. On tensor-parallel ranks
the first takes the requests, and the others follow it.
"""

import traceback
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from roll_lite.engine.engine import Engine
from roll_lite.engine.lockstep import Lockstep
from roll_lite.engine.ranks import RanksEngine
from roll_lite.engine.sequence import Handle, Request
from roll_lite.models.source import open_model
from roll_lite.models.tensor import TensorShard
from roll_lite.types import Turn

Key = Hashable


class Place(Protocol):
    """What the service reads of its place in the cluster."""

    tp: int
    tp_rank: int
    device: torch.device
    dtype: torch.dtype
    mesh: DeviceMesh
    control: dist.ProcessGroup
    report: Callable[..., None]


class Load(NamedTuple):
    num_running: int
    num_waiting: int
    """Requests, of one or several samples, that have not begun."""
    num_free_pages: int


class EngineReport(NamedTuple):
    """What an engine has to say after a step."""

    turns: list[tuple[Key, int, Turn]]
    """The key of the request, the index of the sample, and how it went on."""
    refused: list[tuple[Key, str]]
    """Requests that the engine cannot answer, and why."""
    load: Load
    policy_version: int
    first_versions: Sequence[tuple[Key, int, int]] = ()
    """When the policy version is new: key, index, and version of the first token, of all samples
    that go on. Those that are not here begin under the new version."""


class EngineService:
    def __init__(self, folder: str | Path, *, place: Place, **options: Any):
        """`options` are the engine's.

        A folder like shape:qwen3-0.6b stands for random weights of that shape, to measure with.
        """
        self.place = place
        shard = TensorShard.of(place.mesh["tp"].get_group()) if place.tp > 1 else None
        model = open_model(folder, device=place.device, dtype=place.dtype, shard=shard)
        self.engine: Engine = (
            RanksEngine(model, control=place.control, **options)
            if shard
            else Engine(model, **options)
        )
        self._handles: dict[Key, Handle] = {}
        self._turns: list[tuple[Key, int, Turn]] = []
        self._refused: list[tuple[Key, str]] = []
        self._reported_version: int | None = None
        self._lockstep = Lockstep(self.engine) if shard else None

    # Calls

    def describe(self) -> str:
        return str(self.engine)

    def version(self) -> int:
        return self.engine.policy_version

    def sleep(self) -> None:
        self.engine.sleep()

    def wake(self) -> None:
        self.engine.wake()

    # What the worker thread runs between calls

    def receive(self, name: str, *args: Any) -> None:
        if self._lockstep:
            self._lockstep.count_letter()
        if name == "submit":
            self._submit(*args)
        elif name == "abort":
            self._abort(*args)
        elif name != "follow":
            raise ValueError(f"an engine does not know {name!r}; use submit or abort")

    def work(self) -> bool:
        """One step, and a report of what it brought; whether there may be more to do."""
        if self.place.tp_rank > 0:
            return self._follow()
        is_busy = self.engine.has_work and self.engine.is_ready
        if is_busy:
            self._step()
        elif self._lockstep:
            self._lockstep.settle()
        self._report()
        return is_busy

    def pause_for_call(self, ticket: int) -> None:
        """All ranks of the replica stop working together: a call comes."""
        if self._lockstep:
            self._lockstep.pause_for_call(ticket)

    def _follow(self) -> bool:
        if not self._lockstep.may_have_work:
            return False
        self._lockstep.follow()
        return True

    def _submit(self, key: Key, request: Request) -> None:
        try:
            self._handles[key] = self.engine.submit(request, partial(self._on_turn, key))
        except ValueError as error:
            self._refused.append((key, str(error)))

    def _abort(self, key: Key) -> None:
        if key in self._handles:
            self.engine.abort(self._handles[key].id)

    def _on_turn(self, key: Key, index: int, turn: Turn) -> None:
        self._turns.append((key, index, turn))
        if key in self._handles and self._handles[key].is_done:
            del self._handles[key]

    def _step(self) -> None:
        try:
            self.engine.step()
        except Exception:  # of any kind: others can answer what this engine cannot
            if self.place.tp > 1:  # its ranks are no longer alike
                raise
            self._give_up()

    def _give_up(self) -> None:
        """Have everything that is under way asked of somebody else."""
        text, keys = traceback.format_exc(), list(self._handles)
        self._report()  # what has ended before
        self.engine.abort_all()
        self._turns.clear()
        self.place.report("failed", keys, text)

    def _report(self) -> None:
        version = self.engine.policy_version
        is_new = version != self._reported_version
        if not self._turns and not self._refused and not is_new:
            return
        scheduler = self.engine.scheduler
        load = Load(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            num_free_pages=self.engine.pool.num_free,
        )
        first_versions = self._first_versions() if is_new else []
        report = EngineReport(self._turns, self._refused, load, version, first_versions)
        self.place.report("answers", report)
        self._turns, self._refused, self._reported_version = [], [], version

    def _first_versions(self) -> list[tuple[Key, int, int]]:
        return [
            (key, sequence.index, sequence.versions[0][1])
            for key, handle in self._handles.items()
            for sequence in handle.sequences
            if sequence.versions and sequence.finish_reason is None
        ]
