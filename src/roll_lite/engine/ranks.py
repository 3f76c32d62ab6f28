"""The engine over tensor-parallel ranks: the first takes the requests, all do the same work.

Every rank runs the same scheduler on the same commands, so that all make the same decisions; only
what was asked of the first rank since its last step travels, at the start of each step.
"""

import pickle
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist

from roll_lite.engine.engine import Engine
from roll_lite.engine.sequence import Handle, OnTurn, Request
from roll_lite.models.transformer import Transformer


@dataclass(frozen=True, slots=True)
class Pause:
    """Why the first rank sends the others back from `follow()`."""

    ticket: int | None = None
    """Of the call that all ranks run next; None when the first rank has nothing to do."""
    num_settled: int = 0
    """How many letters and calls left nothing to do."""


Command = tuple[str, Request | int | Pause]


class RanksEngine(Engine):
    """An engine whose model is one rank's part.

    The first rank is used like any other engine. The others call `follow()`, and come back when the
    first one calls `pause()`: to load weights, which every rank does for its own part, or to end.
    """

    def __init__(self, model: Transformer, *, control: dist.ProcessGroup, **options):
        """`control` is a gloo group of the same ranks, for commands."""
        super().__init__(model, **options)
        self.is_first = model.shard.rank == 0
        self._control = control
        self._commands: list[Command] = []
        self._has_failed = False
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(model.shard.size)]
        dist.all_gather(sizes, torch.tensor([self.pool.num_pages]), group=control)
        if len(set(map(int, sizes))) > 1:
            raise ValueError(f"kv_cache_gib differs between ranks: pages {[*map(int, sizes)]}")

    def submit(self, request: Request, on_turn: OnTurn | None = None) -> Handle:
        handle = super().submit(request, on_turn)
        ids = np.array(request.prompt_ids, dtype=np.int32)
        self._commands.append(("submit", replace(request, prompt_ids=ids)))
        return handle

    def abort(self, request_id: int) -> None:
        self._commands.append(("abort", request_id))  # first: a callback may command more
        super().abort(request_id)

    def step(self) -> None:
        self._exchange()
        super().step()

    def load_weights(self, *args, **options) -> None:
        """This rank's part; every rank calls it, the others between two `follow()`."""
        self._exchange()
        super().load_weights(*args, **options)

    def sleep(self) -> None:
        self._exchange()
        super().sleep()

    def pause(self, pause: Pause | None = None) -> None:
        """Send the other ranks back from `follow()`."""
        self._commands.append(("pause", pause or Pause()))
        self._send()

    def follow(self) -> Pause:
        """Do what the first rank does until it pauses."""
        while (pause := self._receive()) is None:
            super().step()
        return pause

    def _start_over(self) -> None:
        super()._start_over()
        self._has_failed = True  # the other ranks have not

    def _exchange(self) -> None:
        """Bring all ranks to the same requests."""
        if self.is_first:
            self._send()
        elif self._receive() is not None:
            raise RuntimeError("the first rank paused where this one expected a step")

    def _send(self) -> None:
        self._check_health()
        data = torch.frombuffer(bytearray(pickle.dumps(self._commands)), dtype=torch.uint8)
        self._commands = []
        self._broadcast(torch.tensor([len(data)]))
        self._broadcast(data)

    def _receive(self) -> Pause | None:
        """Do what was asked of the first rank; its pause, if it paused."""
        self._check_health()
        size = torch.zeros(1, dtype=torch.int64)
        self._broadcast(size)
        data = torch.empty(int(size), dtype=torch.uint8)
        self._broadcast(data)
        # Sent by a rank of this very program, never by anybody else.
        commands: list[Command] = pickle.loads(data.numpy().tobytes())
        for kind, argument in commands:
            if kind == "submit":
                super().submit(replace(argument, prompt_ids=argument.prompt_ids.tolist()))
            elif kind == "abort":
                super().abort(argument)
        kind, argument = commands[-1] if commands else ("", None)
        return argument if kind == "pause" else None

    def _check_health(self) -> None:
        if self._has_failed:
            raise RuntimeError(
                "a step failed on this rank, so the ranks are no longer alike; start them again"
            )

    def _broadcast(self, tensor: torch.Tensor) -> None:
        dist.broadcast(tensor, group_src=0, group=self._control)
