"""The connection between the supervisor and a worker.

What goes to a worker is pickled. What comes from it, where user code runs, is JSON: it is never
unpickled, and the supervisor, which checks it, does not wait for the rest of a message.
"""

import socket
import struct
from collections import deque
from collections.abc import Iterator
from contextlib import suppress

MAX_MESSAGE = 64 << 20
"""Bytes of a worker's message."""
CONTINUES, ENDED, LEAVES = range(3)
"""With a worker's message: the job goes on, has ended, or has ended and the worker must be
replaced."""
Message = tuple[int, int, bytes]
"""Job id, one of the three above, JSON."""
Order = tuple[int, bool, bytes | None]
"""Job id, whether the job begins, a pickled message or None to cancel the job."""
_ORDER = struct.Struct("!Qq??")  # length, job id, whether it begins, whether it is None
_HEADER = struct.Struct("!QqB")  # length, job id, state
_chunk = memoryview(bytearray(1 << 16))


class ProtocolError(Exception):
    """A worker sent what no worker sends; the text says what it did."""


def connect() -> tuple["SupervisorEnd", "WorkerEnd"]:
    ours, theirs = socket.socketpair()
    return SupervisorEnd(ours), WorkerEnd(theirs)


class WorkerEnd:
    """Receives orders and sends messages, and waits until that is done."""

    def __init__(self, end: socket.socket):
        self._socket = end

    def fileno(self) -> int:
        return self._socket.fileno()

    def receive(self) -> Order:
        """The next one. Raises EOFError if the supervisor's end is closed."""
        length, job_id, begins, cancels = _ORDER.unpack(self._read(_ORDER.size))
        payload = self._read(length)
        return job_id, begins, None if cancels else payload

    def send(self, message: Message) -> None:
        job_id, state, payload = message
        if len(payload) > MAX_MESSAGE:
            raise ValueError(f"a message of {len(payload)} bytes; send at most {MAX_MESSAGE}")
        self._socket.sendall(_HEADER.pack(len(payload), job_id, state) + payload)

    def close(self) -> None:
        self._socket.close()

    def _read(self, length: int) -> bytearray:
        data = bytearray(length)
        num_read = 0
        while num_read < length:
            num_new = self._socket.recv_into(memoryview(data)[num_read:])
            if not num_new:
                raise EOFError
            num_read += num_new
        return data


class SupervisorEnd:
    """Never waits for the worker, which reads nothing while user code runs and may send half a
    message: what the socket does not take is sent by `flush`, and what came is kept."""

    def __init__(self, end: socket.socket):
        self._socket = end
        self._waiting: deque[memoryview] = deque()
        self._received = bytearray()

    def fileno(self) -> int:
        return self._socket.fileno()

    def post(self, order: Order) -> None:
        job_id, begins, payload = order
        data = payload or b""
        header = _ORDER.pack(len(data), job_id, begins, payload is None)
        self._waiting.append(memoryview(header + data))
        self.flush()

    def flush(self) -> None:
        with suppress(BlockingIOError):
            while self._waiting:
                sent = self._socket.send(self._waiting[0], socket.MSG_DONTWAIT)
                self._waiting[0] = self._waiting[0][sent:]
                if not self._waiting[0]:
                    self._waiting.popleft()

    @property
    def is_flushed(self) -> bool:
        return not self._waiting

    def read(self) -> bool:
        """Take in some of what has arrived; False if the worker's end is closed."""
        try:
            num_read = self._socket.recv_into(_chunk, 0, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        except ConnectionError:
            return False
        self._received += _chunk[:num_read]
        return num_read > 0

    def messages(self) -> Iterator[Message]:
        """Those that are complete."""
        while len(self._received) >= _HEADER.size:
            length, job_id, state = _HEADER.unpack_from(self._received)
            if length > MAX_MESSAGE or state > LEAVES:
                raise ProtocolError("sent something that is no message")
            end = _HEADER.size + length
            if len(self._received) < end:
                break
            payload = bytes(memoryview(self._received)[_HEADER.size : end])
            del self._received[:end]
            yield job_id, state, payload

    @property
    def has_part(self) -> bool:
        """Whether a part of a message has come."""
        return bool(self._received)

    def stop(self) -> None:
        """Receive only what has arrived already: another process may hold the worker's end."""
        with suppress(OSError):  # the worker's end is closed
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()
