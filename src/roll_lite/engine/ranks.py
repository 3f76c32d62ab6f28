"""The engine over tensor-parallel ranks: the first takes the requests, all do the same work.

Every rank runs the same scheduler on the same commands, so that all make the same decisions; only
what was asked of the first rank since its last step travels, at the start of each step.
"""

import pickle
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist

from roll_lite.engine.engine import Engine, Handle, OnTurn
from roll_lite.engine.sequence import Request
from roll_lite.models.transformer import Transformer

Command = tuple[str, Request | int | None]


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

    def submit(self, request: Request, on_turn: OnTurn | None = None) -> Handle:
        handle = super().submit(request, on_turn)
        ids = np.array(request.prompt_ids, dtype=np.int32)
        self._commands.append(("submit", replace(request, prompt_ids=ids)))
        return handle

    def abort(self, request_id: int) -> None:
        super().abort(request_id)
        self._commands.append(("abort", request_id))

    def step(self) -> None:
        if self.is_first:
            self._send()
        elif not self._receive():
            raise RuntimeError("the first rank paused while this one was in the middle of a step")
        super().step()

    def pause(self) -> None:
        """Send the other ranks back from `follow()`, with the same requests as this one."""
        self._commands.append(("pause", None))
        self._send()

    def follow(self) -> None:
        """Do what the first rank does until it pauses."""
        while self._receive():
            super().step()

    def _send(self) -> None:
        data = torch.frombuffer(bytearray(pickle.dumps(self._commands)), dtype=torch.uint8)
        self._commands = []
        self._broadcast(torch.tensor([len(data)]))
        self._broadcast(data)

    def _receive(self) -> bool:
        """Do what was asked of the first rank; False when it paused."""
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
        return not commands or commands[-1][0] != "pause"

    def _broadcast(self, tensor: torch.Tensor) -> None:
        dist.broadcast(tensor, group_src=0, group=self._control)
