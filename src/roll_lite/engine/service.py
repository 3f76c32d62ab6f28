"""An engine as a role's worker object: requests arrive as posts, turns leave as reports.

    generate = cluster.role("generate", EngineService, folder="models/tiny")
    generate.post(replica, "submit", key, Request(...))      # or "abort", key

Reports are `("answers", EngineReport)` and `("failed", keys, traceback)`. On tensor-parallel ranks
the first rank takes the requests and leads; the other ranks follow it.
"""

import traceback
from collections.abc import Callable
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from roll_lite.chat import Chat
from roll_lite.checks import UserError
from roll_lite.engine.engine import Engine
from roll_lite.engine.parallel_engine import Lockstep, TensorParallelEngine
from roll_lite.engine.request import EngineReport, Handle, Key, Load, Request
from roll_lite.models.hf import open_model
from roll_lite.models.tensor_parallel import TensorShard
from roll_lite.models.transformer import Transformer
from roll_lite.profiling import Profiled
from roll_lite.types import SHAPE, Turn


class EnginePlace(Protocol):
    """What the service needs to know about its place in the cluster."""

    tp: int
    tp_rank: int
    ep: int
    device: torch.device
    dtype: torch.dtype
    mesh: DeviceMesh
    control: dist.ProcessGroup
    report: Callable[..., None]


class EngineService(Profiled):
    def __init__(self, folder: str | Path, *, place: EnginePlace, **options: Any):
        """`options` are those of Engine, except decode. `folder` may be a shape such as
        shape:qwen3-0.6b, which stands for random weights, for benchmarks."""
        self.place = place
        shard = TensorShard.of(place.mesh["tp"].get_group(), place.ep)
        self._folder = str(folder)
        model = self._open(shard)
        options["decode"] = self._decode
        if shard:
            self.engine: Engine = TensorParallelEngine(model, control=place.control, **options)
            self._lockstep: Lockstep | None = Lockstep(self.engine)
        else:
            self.engine = Engine(model, **options)
            self._lockstep = None
        self._handles: dict[Key, Handle] = {}
        self._turns: list[tuple[Key, int, Turn]] = []
        self._refused: list[tuple[Key, str]] = []
        self._reported_version: int | None = None

    def _open(self, shard: TensorShard | None) -> Transformer:
        place = self.place
        return open_model(self._folder, device=place.device, dtype=place.dtype, shard=shard)

    # Role calls

    def describe(self) -> str:
        return str(self.engine)

    def version(self) -> int:
        return self.engine.policy_version

    def sleep(self) -> None:
        self.engine.sleep()

    def wake(self, part: Literal["all", "weights"] = "all") -> None:
        self.engine.wake(part)

    # Run by the rank's worker thread between calls

    def receive(self, name: str, *args: Any) -> None:
        if self._lockstep:
            self._lockstep.count_post()
        if name == "submit":
            self._submit(*args)
        elif name == "abort":
            self._abort(*args)
        elif name != "follow":
            raise UserError(f"an engine does not know {name!r}; use submit or abort")

    def work(self) -> bool:
        """Run one step and report its results; returns whether there may be more to do."""
        if self.place.tp_rank > 0:
            is_busy = self._lockstep.may_have_work
            if is_busy:
                self._lockstep.follow()
            return is_busy
        is_busy = self.engine.has_work and self.engine.is_ready
        if is_busy:
            self._step()
        elif self._lockstep:
            self._lockstep.settle()
        self._report()
        return is_busy

    def pause_for_call(self, ticket: int) -> None:
        """Stop the joint work of the replica's ranks, so that all can run the call `ticket`."""
        if self._lockstep:
            self._lockstep.pause_for_call(ticket)

    def _submit(self, key: Key, request: Request) -> None:
        try:
            if request.params.stop:
                self._decode([])  # raises if the folder has no tokenizer
            self._handles[key] = self.engine.submit(request, partial(self._on_turn, key))
        except ValueError as error:
            self._refused.append((key, str(error)))

    @cached_property
    def _chat(self) -> Chat:
        """Loaded for the first request with stop texts: most have none."""
        if self._folder.startswith(SHAPE):
            raise UserError(
                f"stop texts need a tokenizer, and {self._folder} has none; use stop_ids, or name "
                "a model folder"
            )
        return Chat(self._folder)

    def _decode(self, token_ids: list[int]) -> str:
        """Text for stop texts. Tensor-parallel ranks decode the same tokens with the same
        tokenizer, each for itself, so all end a sample with the same token."""
        return self._chat.decode(token_ids)

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
        except Exception:  # whatever it is, another replica may serve what this one cannot
            if self.place.tp > 1:  # its ranks are no longer in the same state
                raise
            self._fail_all()

    def _fail_all(self) -> None:
        """Report all unfinished requests as failed; the coordinator sends them elsewhere."""
        text = traceback.format_exc()
        keys = list(self._handles)
        self._report()  # samples that finished before
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
        self._turns = []
        self._refused = []
        self._reported_version = version

    def _first_versions(self) -> list[tuple[Key, int, int]]:
        return [
            (key, sequence.index, sequence.versions[0][1])
            for key, handle in self._handles.items()
            for sequence in handle.sequences
            if sequence.versions and sequence.finish_reason is None
        ]
