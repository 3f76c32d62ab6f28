"""One rank's side of roles: the worker objects, and the one thread that runs their code.

The thread handles posts first, then runs the call whose ticket is next. If there is neither, it
lets every object that has a method `work` do one piece of work, and sleeps when none has any left.
"""

import gc
import inspect
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from roll_lite.cluster.errors import RankFailure, describe_exception
from roll_lite.cluster.places import Place
from roll_lite.cluster.wire import Message, Post, decode, encode

BUILD = "__init__"  # the method of a call that makes the worker objects
BARRIER = "barrier"  # on the replica's ranks outside the called role: pause, and run nothing
BACKGROUND = 0  # in place of a ticket while the thread runs `work` or `receive`


class RankCall(NamedTuple):
    """A call as one rank gets it. They arrive in any order and run by ticket."""

    ticket: int
    previous: int
    """Ticket of the call that this rank runs before it, 0 for none."""
    role: str
    method: str
    content: Message | tuple
    """Positional and keyword arguments; not encoded for the controller's own rank."""
    is_wanted: bool
    """The controller wants this rank's result."""
    lost: frozenset[int] = frozenset()
    """Ranks that have ended; all ranks of a call get the same."""


class RankReply(NamedTuple):
    value: Any = None
    """The result: a Message, or the object itself on the controller's own rank."""
    failure: RankFailure | None = None


class WorkerStatus(NamedTuple):
    """What the worker thread is doing."""

    ticket: int
    """Ticket of the running call, or BACKGROUND."""
    seconds: float
    """Time spent in it so far."""


class Worker:
    def __init__(self, rank: int, device: torch.device):
        self.rank = rank
        self.places: dict[str, Place] = {}
        """By role; set once the process groups have formed, before the first call runs."""
        self.on_fault: Callable[[str, str, RankFailure], None]
        """Gets the role, the method and the exception when `work` or `receive` raises."""
        self.lost: set[int] = set()
        """Ranks that had ended when the current call was issued; places refer to it."""
        self._device = device
        self._objects: dict[str, Any] = {}
        self._queue: dict[int, tuple[RankCall, Callable[[RankReply], None]]] = {}  # by `previous`
        self._posts: list[Post] = []
        self._changed = threading.Condition()
        self._is_stopping = self._finishes = False
        self._has_fault = False
        self._last_ticket = 0
        self._current: tuple[int, float] | None = None
        # A daemon: a call that hangs in a collective must not keep the process alive.
        self._thread = threading.Thread(target=self._run, name="role calls", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, seconds: float, *, finish: bool) -> bool:
        """End the thread after what it does now; False if that takes longer than `seconds`.

        To `finish`, it first has half of the time for all that is left: the leader of a
        tensor-parallel engine whose requests were aborted then lets the ranks go that follow it.
        """
        end = time.monotonic() + seconds
        if finish:
            self._ask_to_stop(finishes=True)
            self._join(seconds / 2)
        self._ask_to_stop(finishes=False)
        self._join(end - time.monotonic())
        return not self._thread.is_alive()

    def _ask_to_stop(self, *, finishes: bool) -> None:
        with self._changed:
            self._is_stopping = True
            self._finishes = finishes
            self._changed.notify()

    def _join(self, seconds: float) -> None:
        if self._thread.is_alive():
            self._thread.join(max(0.0, seconds))

    def forget_objects(self) -> None:
        """Free them, after `stop`. NCCL waits for captured CUDA graphs that use a communicator."""
        self._objects.clear()
        gc.collect()

    def put(self, call: RankCall, reply: Callable[[RankReply], None]) -> None:
        """Queue a call, from any thread; returns at once."""
        with self._changed:
            self._queue[call.previous] = call, reply
            self._changed.notify()

    def post(self, posts: Sequence[Post]) -> None:
        """Queue posts, from any thread; returns at once."""
        with self._changed:
            self._posts += posts
            self._changed.notify()

    def perform(self, role: str, method: str, args: tuple, kwargs: dict) -> Any:
        """Run a method of this rank's worker object, in this thread."""
        if method == BUILD:
            return self._build(role, *args, **kwargs)
        if method == BARRIER:
            return None
        return getattr(self._objects[role], method)(*args, **kwargs)

    def status(self) -> WorkerStatus | None:
        current = self._current
        return WorkerStatus(current[0], time.monotonic() - current[1]) if current else None

    def stack(self) -> str:
        """The stack of the worker thread in the role's code, innermost frame last."""
        frame = sys._current_frames().get(self._thread.ident)
        if frame is None or self._current is None:
            return "(between calls)"
        frames = traceback.extract_stack(frame)
        num_own = max(i for i, f in enumerate(frames) if f.filename == __file__) + 1
        return "".join(traceback.format_list(frames[num_own:]))

    def _build(self, role: str, cls: type, /, **kwargs: Any) -> None:
        offered = {"place": self.places[role], "places": self.places, "siblings": self._objects}
        wanted = inspect.signature(cls).parameters
        kwargs = {name: value for name, value in offered.items() if name in wanted} | kwargs
        if self._objects.pop(role, None) is not None:
            gc.collect()  # sharded modules are in cycles, and the new object needs their memory
        self._objects[role] = cls(**kwargs)

    def _run(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # the current device is per thread
        has_work = False
        while self._wait(has_work):
            has_work = self._take_turn()

    def _wait(self, has_work: bool) -> bool:
        """Wait for a post, a call or background work; False when it is time to stop."""

        def is_left() -> bool:
            return bool(has_work or self._posts or self._last_ticket in self._queue)

        with self._changed:
            self._changed.wait_for(lambda: is_left() or self._is_stopping)
            return not self._is_stopping or (self._finishes and is_left())

    def _take_turn(self) -> bool:
        """Handle posts, then one call or one piece of work; whether more work may be left."""
        with self._changed:
            posts, self._posts = self._posts, []
        for post in posts:
            self._run_background(post.role, "receive", partial(decode, post.content))
        with self._changed:
            item = self._queue.pop(self._last_ticket, None)
        if item is None:
            has_more = [self._run_background(role, "work", tuple) for role in self._with("work")]
            return any(has_more)
        self._run_call(*item)
        return True

    def _run_background(self, role: str, method: str, args: Callable[[], tuple]) -> Any:
        """Run code that no call waits for. After it has raised, no more of it runs."""
        if self._has_fault:
            return None
        self._current = BACKGROUND, time.monotonic()
        try:
            return getattr(self._objects[role], method)(*args())
        except BaseException as error:  # the controller must hear of any kind
            self._has_fault = True
            self.on_fault(role, method, describe_exception(self.rank, error))
            return None
        finally:
            self._current = None

    def _with(self, method: str) -> list[str]:
        """Roles whose object has this method."""
        return [role for role, obj in self._objects.items() if hasattr(obj, method)]

    def _run_call(self, call: RankCall, reply: Callable[[RankReply], None]) -> None:
        self._last_ticket = call.ticket
        self.lost |= call.lost
        self._current = call.ticket, time.monotonic()
        answer = self._answer(call)
        self._current = None
        reply(answer)

    def _answer(self, call: RankCall) -> RankReply:
        is_local = not isinstance(call.content, Message)
        try:
            for role in self._with("pause_for_call"):
                self._objects[role].pause_for_call(call.ticket)
            args, kwargs = decode(call.content)
            value = self.perform(call.role, call.method, args, kwargs)
            if not call.is_wanted:
                return RankReply()
            return RankReply(value if is_local else encode(value))
        except BaseException as error:  # the controller must hear of any kind
            return RankReply(failure=describe_exception(self.rank, error))
