"""Messages between ranks, over torch.distributed.rpc: control only, tensors go by collectives.

Handlers run in threads of the RPC agent and out of order: they look something up or put it into a
queue, never more. Messages are pickled, so the ranks trust each other; nobody else may reach the
port. No other file imports torch.distributed.rpc.
"""

import warnings
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed import rpc
from torch.futures import Future

Handler = Callable[..., Any]

NUM_THREADS = 4
STOP_SECONDS = 5.0
_lifelines: list[Future] = []
_handlers: dict[str, Handler] = {}
_meeting: dict[str, Any] = {}


def start(store: dist.Store, rank: int, world_size: int, handlers: dict[str, Handler]) -> None:
    """Connect the ranks. Later `send(rank, name, ...)` calls `handlers[name](...)` there."""
    _handlers.update(handlers)
    if not _meeting:  # schemes can be registered once
        dist.register_rendezvous_handler("rolllite", _rendezvous)
    _meeting.update(store=store, rank=rank, world_size=world_size)
    # init_rpc takes no store. The environment's would hold the addresses of an earlier attempt.
    # Sockets only: the shared-memory transport polls, which takes a core from every rank.
    options = rpc.TensorPipeRpcBackendOptions(
        init_method="rolllite://", num_worker_threads=NUM_THREADS, _transports=["uv"]
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "deprecated", with nothing in its place
        rpc.init_rpc(_name(rank), rank=rank, world_size=world_size, rpc_backend_options=options)


def send(rank: int, name: str, *args: Any, timeout: float = 0) -> Future:
    """The answer of the handler on that rank; it fails at once when the rank dies.

    A handler may return a Future, to answer later. A timeout of 0 waits for ever.
    """
    return rpc.rpc_async(_name(rank), _handle, args=(name, args), timeout=timeout)


def ask(rank: int, name: str, *args: Any, timeout: float) -> Any:
    return send(rank, name, *args, timeout=timeout).wait()


def stop(*, clean: bool) -> None:
    """Disconnect. A clean stop waits for all ranks to stop, which a dead one never does."""
    if not clean:
        rpc.shutdown(graceful=False)
        return
    for lifeline in _lifelines:
        lifeline.set_result(None)
    rpc.shutdown(graceful=True, timeout=STOP_SECONDS)


def hold_lifeline() -> Future:
    """A handler that answers when the program ends: the caller hears if this process dies first."""
    _lifelines.append(Future())
    return _lifelines[-1]


def _name(rank: int) -> str:
    return f"rank{rank}"


def _rendezvous(url: str, **options: Any):
    yield _meeting["store"], _meeting["rank"], _meeting["world_size"]


@rpc.functions.async_execution
def _handle(name: str, args: tuple) -> Future:
    answer = _handlers[name](*args)
    if isinstance(answer, Future):
        return answer
    done = Future()
    done.set_result(answer)
    return done
