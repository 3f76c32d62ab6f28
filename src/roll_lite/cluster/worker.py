"""One rank's side of roles: the worker objects, and the one thread that runs their code.

The thread reads letters first, then runs the call whose ticket is due; with neither it gives every
object that has a method `work` a turn, and sleeps when all of them say that nothing is left.
"""

import gc
import inspect
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from roll_lite.cluster.codec import Message, decode, encode
from roll_lite.cluster.errors import Failure, describe_exception
from roll_lite.cluster.groups import Place
from roll_lite.cluster.letters import Letter

BUILD = "__init__"  # the method of the call that makes the worker objects
ATTEND = "attend"  # of a call that other ranks of a replica run: nothing to do but to make way
WORK = 0  # stands for a ticket while the worker thread does what no call asked for
OWN_FRAMES = 2  # _answer and perform, above a role's own code in a traceback


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
    """Of a call, or WORK."""
    seconds: float
    """How long it has been in this call, or in one piece of work."""


class Worker:
    def __init__(self, rank: int, device: torch.device):
        self.rank = rank
        self.places: dict[str, Place] = {}
        """By role; set once the process groups have formed, before the first call runs."""
        self.on_fault: Callable[[str, str, Failure], None]
        """Told the role, the method and what it raised, when nobody had called it."""
        self._device = device
        self._objects: dict[str, Any] = {}
        self._waiting: dict[int, tuple[Order, Callable[[Reply], None]]] = {}  # by previous ticket
        self._inbox: list[Letter] = []
        self._changed = threading.Condition()
        self._is_stopping = False
        self._has_fault = False
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

    def post(self, letters: Sequence[Letter]) -> None:
        """Put letters into the inbox. Returns at once; any thread may come with them."""
        with self._changed:
            self._inbox += letters
            self._changed.notify()

    def perform(self, role: str, method: str, args: tuple, kwargs: dict) -> Any:
        """Run a method of this rank's worker object, in this thread."""
        if method == BUILD:
            return self._build(role, *args, **kwargs)
        if method == ATTEND:
            return None
        return getattr(self._objects[role], method)(*args, **kwargs)

    def status(self) -> Status | None:
        current = self._current
        return Status(current[0], time.monotonic() - current[1]) if current else None

    def stack(self) -> str:
        """Where the worker thread is, innermost call last."""
        frame = sys._current_frames().get(self._thread.ident)
        if frame is None or self._current is None:
            return "(between calls)"
        frames = traceback.extract_stack(frame)
        num_own = max(i for i, f in enumerate(frames) if f.filename == __file__) + 1
        return "".join(traceback.format_list(frames[num_own:]))

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
        is_busy = False
        while self._wait(is_busy):
            is_busy = self._take_turn()

    def _wait(self, is_busy: bool) -> bool:
        """Until there is something to do, which somebody busy has; False at the end."""
        with self._changed:
            self._changed.wait_for(
                lambda: is_busy or self._is_stopping or self._inbox or self._last in self._waiting
            )
            return not self._is_stopping

    def _take_turn(self) -> bool:
        """Letters, then a call or a piece of work; whether there may be more to do."""
        self._read_letters()
        with self._changed:
            item = self._waiting.pop(self._last, None)
        if item is None:
            return self._work()
        self._run_call(*item)
        return True

    def _read_letters(self) -> None:
        with self._changed:
            letters, self._inbox = self._inbox, []
        for letter in letters:
            self._unasked(letter.role, "receive", lambda letter=letter: letter.args)

    def _work(self) -> bool:
        """Let all objects work; whether one of them has more to do."""
        has_more = [self._unasked(role, "work", tuple) for role in self._roles_with("work")]
        return any(has_more)

    def _unasked(self, role: str, method: str, args: Callable[[], tuple]) -> Any:
        """Run what no call asked for. Once it has raised, this rank only waits for the end."""
        if self._has_fault:
            return None
        self._current = WORK, time.monotonic()
        try:
            return getattr(self._objects[role], method)(*args())
        except BaseException as error:  # whatever it is, the controller has to hear of it
            self._has_fault = True
            self.on_fault(role, method, describe_exception(self.rank, error, own_frames=1))
            return None
        finally:
            self._current = None

    def _roles_with(self, method: str) -> list[str]:
        return [role for role, obj in self._objects.items() if hasattr(obj, method)]

    def _run_call(self, order: Order, reply: Callable[[Reply], None]) -> None:
        self._last = order.ticket
        self._current = order.ticket, time.monotonic()
        answer = self._answer(order)
        self._current = None
        reply(answer)

    def _answer(self, order: Order) -> Reply:
        is_local = not isinstance(order.content, Message)
        try:
            for role in self._roles_with("pause_for_call"):
                self._objects[role].pause_for_call(order.ticket)
            args, kwargs = order.content if is_local else decode(order.content)
            value = self.perform(order.role, order.method, args, kwargs)
            if not order.is_wanted:
                return Reply()
            return Reply(value if is_local else encode(value))
        except BaseException as error:  # whatever it is, the controller has to hear of it
            return Reply(failure=describe_exception(self.rank, error, own_frames=OWN_FRAMES))
