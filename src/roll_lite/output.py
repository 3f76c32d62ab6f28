"""Standard streams that a run outlives: output that cannot be written is dropped.

The terminal may have been closed, a reader such as head may have ended, the disk of a log may be
full. The run folder says once that output was lost (report/run.py).
"""

import io
import os
import select
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import TextIO

from typing_extensions import Buffer

ERRORS = "backslashreplace"
"""What becomes of characters that the encoding lacks."""
STREAMS = {"stdout": 1, "stderr": 2}
_lost: dict[str, str] = {}
"""Streams that could not be written, each with the first error."""
_told: set[str] = set()


class _Output(io.FileIO):
    """The file below a standard stream."""

    def __init__(self, name: str):
        super().__init__(STREAMS[name], "w", closefd=False)
        self.name = f"<{name}>"
        self._stream = name

    def write(self, data: Buffer) -> int:
        try:
            while (num_written := super().write(data)) is None:
                select.select([], [self], [])  # what shares the terminal may make it non-blocking
            return num_written
        except OSError as error:
            _lost.setdefault(self._stream, str(error))
            return memoryview(data).nbytes


def protect() -> None:
    """Have this process go on when its output cannot be written.

    Streams that something else has replaced, such as a notebook, are left alone, and so are those
    of an earlier call.
    """
    _open_if_closed(0)
    for name, descriptor in STREAMS.items():
        if error := _open_if_closed(descriptor):
            _lost[name] = str(error)
    for name in STREAMS:
        stream = getattr(sys, name)
        if stream is getattr(sys, f"__{name}__"):
            setattr(sys, name, _protected(name, stream))


def newly_lost() -> Iterator[tuple[str, str]]:
    """Each stream that could not be written, once, with the error."""
    for name in _lost.keys() - _told:
        _told.add(name)
        yield name, _lost[name]


def _open_if_closed(descriptor: int) -> OSError | None:
    """Otherwise the next file would get the number, and all that is printed to it. Call it for the
    lower descriptors first. Returns the error of one that was closed."""
    try:
        os.fstat(descriptor)
    except OSError as error:
        os.open(os.devnull, os.O_RDWR)
        return error
    return None


def _protected(name: str, stream: TextIO | None) -> TextIO:
    """A stream like one that Python made; None is of a descriptor that was closed."""
    output = _Output(name)
    if stream is None:
        return io.TextIOWrapper(io.BufferedWriter(output), encoding="utf-8", errors=ERRORS)
    with suppress(OSError):
        stream.flush()
    is_unbuffered = isinstance(stream.buffer, io.RawIOBase)  # python -u
    return io.TextIOWrapper(
        output if is_unbuffered else io.BufferedWriter(output),
        encoding=stream.encoding,
        errors=ERRORS,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )
