"""Messages between ranks: how values are encoded, RPC, and mailboxes that keep posts in order.

This is the only module that uses torch.distributed.rpc. RPC carries control messages and small CPU
tensors; large tensors travel by collectives. Messages are pickled, so ranks trust each other and
whoever connects before they are complete; then nobody can connect any more (ports.py).
"""

import io
import os
import pickle
import sys
import threading
import warnings
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import rpc
from torch.futures import Future

from roll_lite.checks import UserError
from roll_lite.cluster.ports import closed_afterwards

LONG = 64  # shorter lists are as fast in the pickle
DTYPES = {"i": torch.int32, "q": torch.int64, "d": torch.float64, "b": torch.bool}
CODES = {int: "iq", float: "d", bool: "b"}  # array codes to try, smallest first

Handler = Callable[..., Any]
NUM_THREADS = 4
STDERR = 2  # C++ writes to it too
SHUTDOWN_SECONDS = 5.0
_handlers: dict[str, Handler] = {}
_lifelines: list[Future] = []


class Message(NamedTuple):
    """An encoded value: a pickle whose tensors and long lists of numbers are stored beside it.

    Token ids and logprobs are Python lists inside samples inside groups. Pickling them number by
    number would dominate a call. Long lists of one type are concatenated into one tensor instead,
    and the pickle holds their offsets; they decode to the lists or tuples they were.
    """

    pickled: bytes
    tensors: list[torch.Tensor]
    """Tensors found in the value; only views of larger storages are copied."""
    numbers: dict[str, torch.Tensor]
    """Contents of the long lists, by array code."""


def encode(value: Any) -> Message:
    buffer = io.BytesIO()
    pickler = _Pickler(buffer)
    pickler.dump(value)
    numbers = {
        code: torch.frombuffer(data, dtype=DTYPES[code]) for code, data in pickler.numbers.items()
    }
    return Message(buffer.getvalue(), pickler.tensors, numbers)


def decode(content: Any) -> Any:
    """The value of a Message; anything else was not encoded and is returned as it is."""
    return _Unpickler(content).load() if isinstance(content, Message) else content


class _Pickler(pickle.Pickler):
    def __init__(self, buffer: io.BytesIO):
        super().__init__(buffer, protocol=5)
        self.tensors: list[torch.Tensor] = []
        self.numbers: dict[str, array] = {}
        # By id; holding the object keeps its id from being reused.
        self._seen: dict[int, tuple[Any, Any]] = {}

    def persistent_id(self, obj: Any) -> tuple | None:
        kind = type(obj)
        if kind is torch.Tensor:
            store = self._store_tensor
        elif (kind is list or kind is tuple) and len(obj) > LONG:
            store = self._store_numbers
        else:
            return None
        if id(obj) not in self._seen:
            self._seen[id(obj)] = obj, store(obj)
        return self._seen[id(obj)][1]

    def _store_tensor(self, tensor: torch.Tensor) -> tuple:
        if tensor.device.type != "cpu":
            raise UserError(
                f"a tensor of shape {tuple(tensor.shape)} on {tensor.device} cannot be sent in a "
                "role call; send tensor.cpu(), or move it in a collective"
            )
        tensor = tensor.detach()
        if tensor.untyped_storage().nbytes() > tensor.nbytes:
            tensor = tensor.clone()  # RPC would send the whole storage of a view
        self.tensors.append(tensor)
        return "tensor", len(self.tensors) - 1

    def _store_numbers(self, values: list | tuple) -> tuple | None:
        types = set(map(type, values))
        for code in CODES.get(types.pop(), "") if len(types) == 1 else "":
            try:
                data = array(code, values)
            except OverflowError:
                continue
            numbers = self.numbers.setdefault(code, array(code))
            numbers.extend(data)
            return type(values).__name__, code, len(numbers) - len(data), len(numbers)
        return None


class _Unpickler(pickle.Unpickler):
    def __init__(self, message: Message):
        super().__init__(io.BytesIO(message.pickled))
        self._message = message
        self._lists: dict[tuple, list | tuple] = {}

    def persistent_load(self, where: tuple) -> Any:
        if where[0] == "tensor":
            return self._message.tensors[where[1]]
        if where not in self._lists:
            kind, code, start, end = where
            values = self._message.numbers[code][start:end].tolist()
            self._lists[where] = tuple(values) if kind == "tuple" else values
        return self._lists[where]


def connect(store: dist.Store, rank: int, world_size: int, handlers: dict[str, Handler]) -> None:
    """Start RPC. Afterwards `send(rank, name, ...)` calls `handlers[name](...)` on that rank.

    Handlers run in threads of the RPC agent, out of order: they only look up or enqueue.
    """
    _handlers.update(handlers)
    # init_rpc takes no store, and the environment's may hold addresses from before a restart.
    rendezvous = iter([(store, rank, world_size)])
    dist.register_rendezvous_handler("rolllite", lambda url, **options: rendezvous)
    # Sockets only: the shared-memory transport polls, which costs every rank a core. Tensors go
    # through the same connection: the other channels open 16 ports more, or read foreign memory.
    options = rpc.TensorPipeRpcBackendOptions(
        init_method="rolllite://", num_worker_threads=NUM_THREADS,
        _transports=["uv"], _channels=["basic"],
    )  # fmt: skip
    with warnings.catch_warnings(), closed_afterwards():
        warnings.simplefilter("ignore")  # deprecated, without a replacement
        # It ends with a message in both directions between rank 0 and each other rank, and no two
        # other ranks send each other any: all connections are there.
        rpc.init_rpc(f"rank{rank}", rank=rank, world_size=world_size, rpc_backend_options=options)


def send(rank: int, name: str, *args: Any, timeout: float = 0) -> Future:
    """A future of the handler's answer; it fails at once if the rank dies.

    A handler may return a Future, to answer later. `timeout` is in seconds, 0 for none.
    """
    return rpc.rpc_async(f"rank{rank}", _handle, args=(name, args), timeout=timeout)


@rpc.functions.async_execution
def _handle(name: str, args: tuple) -> Future:
    answer = _handlers[name](*args)
    if isinstance(answer, Future):
        return answer
    done = Future()
    done.set_result(answer)
    return done


def hold_lifeline() -> Future:
    """A handler whose answer comes when the program ends, or fails when this process dies."""
    _lifelines.append(Future())
    return _lifelines[-1]


def silence() -> None:
    """From now on nothing is written to stderr: RPC warns of every connection that ends."""
    sys.stderr.flush()
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, STDERR)
    os.close(nothing)


@contextmanager
def silent() -> Iterator[None]:
    """The same for a while."""
    stderr = os.dup(STDERR)
    silence()
    try:
        yield
    finally:
        os.dup2(stderr, STDERR)
        os.close(stderr)


def disconnect(*, graceful: bool, is_quiet: bool = False) -> None:
    """Stop RPC. A graceful stop waits for all ranks to stop, so all of them must be alive."""
    if not graceful:
        with silent() if is_quiet else nullcontext():
            rpc.shutdown(graceful=False)
        return
    for lifeline in _lifelines:
        lifeline.set_result(None)
    rpc.shutdown(graceful=True, timeout=SHUTDOWN_SECONDS)


class Post(NamedTuple):
    """A message outside the ticket order: to a role's object, or a report to the controller."""

    role: str
    replica: int
    content: Message | tuple
    """Arguments; not encoded within one process."""


class Mailbox:
    """Sends posts to one rank in order: one RPC at a time, each with all posts put meanwhile.

    Concurrent RPCs could be handled in any order, and hundreds of small ones cost more.
    """

    def __init__(self, rank: int, handler: str, on_lost: Callable[[], None]):
        self._rank = rank
        self._handler = handler
        self._on_lost = on_lost
        self._posts: list[Post] = []
        self._is_sending = False
        self._lock = threading.Lock()
        self._is_empty = threading.Event()
        """Set while nothing is left to send."""
        self._is_empty.set()

    def wait_until_sent(self, seconds: float) -> bool:
        """Whether the rank has got all posts within this time; it may have died."""
        return self._is_empty.wait(seconds)

    def put(self, post: Post) -> None:
        """Queue a post, from any thread; returns at once."""
        with self._lock:
            self._posts.append(post)
            self._is_empty.clear()
            if self._is_sending:
                return
            self._is_sending = True
        self._send()

    def _send(self) -> None:
        with self._lock:
            posts, self._posts = self._posts, []
        try:
            answer = send(self._rank, self._handler, posts)
        except RuntimeError:
            self._on_lost()
        else:
            answer.add_done_callback(self._on_answer)

    def _on_answer(self, answer: Future) -> None:
        try:
            answer.value()
        except RuntimeError:  # handlers do not raise, so the connection is gone
            self._on_lost()
            return
        with self._lock:
            has_more = self._is_sending = bool(self._posts)
            if not has_more:
                self._is_empty.set()
        if has_more:  # not self._is_sending: another thread may have started to send by now
            self._send()
