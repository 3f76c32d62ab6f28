"""One rank's side of role calls: the worker objects, and the thread that runs calls by ticket."""

import gc
import inspect
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from roll_lite.cluster.codec import Message, decode, encode
from roll_lite.cluster.errors import Failure, describe_exception
from roll_lite.cluster.groups import Place

BUILD = "__init__"  # the method of the call that makes the worker objects
THREAD_FRAMES = 2  # of the threading module, above those of this file in a stack
OWN_FRAMES = 3  # _run, _answer and perform, above a role's own code


class Order(NamedTuple):
    """A call as one rank gets it. Orders arrive in any order and run by ticket."""

    ticket: int
    previous: int
    """Ticket of the call that this rank runs before it, 0 for none."""
    role: str
    method: str
    content: Message | tuple
    """Positional and keyword arguments; unpacked for the controller's own rank."""
    is_wanted: bool
    """The controller wants this rank's result."""


class Reply(NamedTuple):
    value: Any = None
    """The result: a Message, or the object itself on the controller's own rank."""
    failure: Failure | None = None


class Status(NamedTuple):
    """What the worker thread does at this moment."""

    ticket: int
    seconds: float
    """How long it has been in this call."""


class Worker:
    def __init__(self, rank: int, device: torch.device):
        self.rank = rank
        self.places: dict[str, Place] = {}
        """By role; set once the process groups have formed, before the first call runs."""
        self._device = device
        self._objects: dict[str, Any] = {}
        self._waiting: dict[int, tuple[Order, Callable[[Reply], None]]] = {}  # by previous ticket
        self._changed = threading.Condition()
        self._is_stopping = False
        self._last = 0
        self._current: tuple[int, float] | None = None
        # A daemon: a call that hangs in a collective must not keep the process alive.
        self._thread = threading.Thread(target=self._run, name="role calls", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, seconds: float) -> bool:
        """End the thread after its current call; False if it is still in it after so long."""
        with self._changed:
            self._is_stopping = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join(seconds)
        return not self._thread.is_alive()

    def put(self, order: Order, reply: Callable[[Reply], None]) -> None:
        """Queue a call. Returns at once; any thread may come with it."""
        with self._changed:
            self._waiting[order.previous] = order, reply
            self._changed.notify()

    def perform(self, role: str, method: str, args: tuple, kwargs: dict) -> Any:
        """Run a method of this rank's worker object, in this thread."""
        if method == BUILD:
            return self._build(role, *args, **kwargs)
        return getattr(self._objects[role], method)(*args, **kwargs)

    def status(self) -> Status | None:
        current = self._current
        return Status(current[0], time.monotonic() - current[1]) if current else None

    def stack(self) -> str:
        """Where the worker thread is, innermost call last."""
        frame = sys._current_frames().get(self._thread.ident)
        lines = traceback.format_stack(frame) if frame else []
        return "".join(lines[THREAD_FRAMES + OWN_FRAMES :]) or "(between calls)"

    def _build(self, role: str, cls: type, /, **kwargs: Any) -> None:
        told = {"place": self.places[role], "places": self.places, "siblings": self._objects}
        wanted = inspect.signature(cls).parameters
        kwargs = {name: value for name, value in told.items() if name in wanted} | kwargs
        if self._objects.pop(role, None) is not None:
            gc.collect()  # sharded modules are in cycles; the new object needs their memory
        self._objects[role] = cls(**kwargs)

    def _run(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # CUDA's current device belongs to the thread
        while (item := self._next()) is not None:
            order, reply = item
            self._current = order.ticket, time.monotonic()
            answer = self._answer(order)
            self._current = None
            reply(answer)
            del item, order, answer  # arguments and results are not kept until the next call

    def _next(self) -> tuple[Order, Callable[[Reply], None]] | None:
        """The call whose turn it is; None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_stopping or self._last in self._waiting)
            if self._is_stopping:
                return None
            item = self._waiting.pop(self._last)
            self._last = item[0].ticket
            return item

    def _answer(self, order: Order) -> Reply:
        is_local = not isinstance(order.content, Message)
        try:
            args, kwargs = order.content if is_local else decode(order.content)
            value = self.perform(order.role, order.method, args, kwargs)
            if not order.is_wanted:
                return Reply()
            return Reply(value if is_local else encode(value))
        except BaseException as error:  # whatever it is, the controller has to hear of it
            return Reply(failure=describe_exception(self.rank, error, own_frames=OWN_FRAMES - 1))
