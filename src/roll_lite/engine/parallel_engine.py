"""The engine over tensor-parallel ranks: the first rank takes the requests, all do the same work.

Every rank runs the same scheduler on the same commands, so all make the same decisions. Only the
commands given to the first rank since its last step are sent, at the start of each step.
"""

import pickle
from dataclasses import dataclass

import torch
import torch.distributed as dist

from roll_lite.checks import UserError
from roll_lite.engine.engine import Engine
from roll_lite.engine.request import Handle, OnTurn, Request
from roll_lite.models.transformer import Transformer


@dataclass(frozen=True, slots=True)
class Pause:
    """Why the first rank makes the other ranks return from `follow()`."""

    ticket: int | None = None
    """Ticket of the call that all ranks run next; None when the first rank has no work left."""
    num_settled: int = 0
    """Number of posts and calls after which no work was left."""


Command = Request | int | Pause
"""A request to submit, the id of one to abort, or the pause that ends a list of commands."""


class TensorParallelEngine(Engine):
    """An engine whose model is one rank's shard.

    The first rank is used like any other engine. The other ranks call `follow()`, which returns
    when the first rank calls `pause()`: to load weights, each rank its own shard, or to stop.
    """

    def __init__(self, model: Transformer, *, control: dist.ProcessGroup, **options):
        """`control` is a gloo group of the same ranks, for commands."""
        super().__init__(model, **options)
        self.is_first = model.shard.rank == 0
        self._control = control
        self._commands: list[Command] = []
        self._has_failed = False
        num_pages: list[int] = [0] * model.shard.size
        dist.all_gather_object(num_pages, self.pool.num_pages, group=control)
        if len(set(num_pages)) > 1:
            raise UserError(
                f"ranks of one engine have KV caches of {num_pages} pages; "
                "give all the same kv_cache_gib"
            )

    def submit(self, request: Request, on_turn: OnTurn | None = None) -> Handle:
        handle = super().submit(request, on_turn)
        self._commands.append(request)
        return handle

    def abort(self, request_id: int) -> None:
        self._commands.append(request_id)  # first: a callback may add commands
        super().abort(request_id)

    def step(self) -> None:
        self._exchange()
        super().step()

    def load_weights(self, *args, **options) -> None:
        """Load this rank's shard. All ranks call it, the following ones between two `follow()`."""
        self._exchange()
        super().load_weights(*args, **options)

    def sleep(self) -> None:
        self._exchange()
        super().sleep()

    def pause(self, pause: Pause | None = None) -> None:
        """Make the other ranks return from `follow()`."""
        self._commands.append(pause or Pause())
        self._send()

    def follow(self) -> Pause:
        """Repeat the steps of the first rank until it pauses."""
        while (pause := self._receive()) is None:
            super().step()
        return pause

    def _start_over(self) -> None:
        super()._start_over()
        self._has_failed = True  # the other ranks have not failed

    def _exchange(self) -> None:
        """Bring all ranks to the same requests."""
        if self.is_first:
            self._send()
        elif self._receive() is not None:
            raise RuntimeError("the first rank paused where this rank expected a step")

    def _send(self) -> None:
        self._check_health()
        data = torch.frombuffer(bytearray(pickle.dumps(self._commands)), dtype=torch.uint8)
        self._commands = []
        self._broadcast(torch.tensor([len(data)]))
        self._broadcast(data)

    def _receive(self) -> Pause | None:
        """Repeat the commands given to the first rank; returns its pause, if it paused."""
        self._check_health()
        size = torch.zeros(1, dtype=torch.int64)
        self._broadcast(size)
        data = torch.empty(int(size), dtype=torch.uint8)
        self._broadcast(data)
        # Pickle is safe here: the sender is a rank of this same program.
        commands: list[Command] = pickle.loads(data.numpy().tobytes())
        for command in commands:
            if isinstance(command, Pause):
                return command
            if isinstance(command, Request):
                super().submit(command)
            else:
                super().abort(command)
        return None

    def _check_health(self) -> None:
        if self._has_failed:
            raise RuntimeError(
                "a step failed on this rank, so the engine's ranks differ in state; restart the run"
            )

    def _broadcast(self, tensor: torch.Tensor) -> None:
        dist.broadcast(tensor, group_src=0, group=self._control)


class Lockstep:
    """How the ranks of one engine agree when to work and when to run a role call.

    The first rank leads. The others follow while posts or calls may have left work, and return when
    the leader has none or a call is next. Posts and calls reach each rank at different times, so
    each rank counts them. This rules out two deadlocks: a rank that follows an idle leader and
    cannot be called; and a rank that runs a call while the leader still works, or follows again
    before it has run the call that the leader announced.
    """

    def __init__(self, engine: TensorParallelEngine):
        self._engine = engine
        self._num_events = 0
        """Posts and calls so far: each may leave work."""
        self._num_settled = 0
        """Events after which the leader had no work left."""
        self._next_ticket: int | None = None
        """Ticket of a call that the leader has announced and this rank has not run."""

    @property
    def may_have_work(self) -> bool:
        return self._next_ticket is None and self._num_events > self._num_settled

    def count_post(self) -> None:
        self._num_events += 1

    def settle(self) -> None:
        """The leader has no work left until the next post or call."""
        if self.may_have_work:
            self._num_settled = self._num_events
            self._engine.pause(Pause(num_settled=self._num_settled))

    def follow(self) -> None:
        """Work with the leader until it pauses."""
        pause = self._engine.follow()
        self._next_ticket = pause.ticket
        if pause.ticket is None:
            self._num_settled = pause.num_settled

    def pause_for_call(self, ticket: int) -> None:
        """Returns when all ranks have stopped working in order to run this call."""
        if self._engine.is_first:
            self._engine.pause(Pause(ticket=ticket))
        else:
            while self._next_ticket != ticket:
                self.follow()
            self._next_ticket = None
        self._num_events += 1
