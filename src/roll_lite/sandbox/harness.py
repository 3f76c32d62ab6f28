"""Runs a program and its tests, in two processes or in one."""

import atexit
import builtins
import linecache
import os
import select
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from types import CodeType, ModuleType
from typing import Any, NoReturn, TextIO

from roll_lite.sandbox.processes import exit_code
from roll_lite.sandbox.remote import (
    OBJECT_OPERATIONS,
    PAIR_OPERATIONS,
    CannotCross,
    Link,
    OtherSideEnded,
    ProgramNames,
    TestsLink,
)
from roll_lite.sandbox.sandbox import Job

OUT_OF_MEMORY = 86
"""Exit code of a program that ended with a MemoryError."""
CANNOT_CROSS = 87
"""Exit code of tests that can only run in the program's process."""
_FILE = "program.py"
_GRACE = 0.2
"""Seconds that a program has to end after its connection to the tests has closed."""


def run_and_exit(job: Job, note: int, token: bytes) -> NoReturn:
    """Writes the token to the descriptor `note` when the tests have run to their end."""
    sys.stdin, sys.stdout, sys.stderr = _open(0, "r"), _open(1, "w"), _open(2, "w")
    if not job.tests:
        os.close(note)
        _do_and_exit(lambda: _load(job.source))
    tests = _compiled(job.tests, "tests.py")
    if not job.tests_apart:
        _do_and_exit(lambda: _run_together(job.source, tests, note, token))
    ours, theirs = Pipe()
    program = os.fork()
    if program == 0:
        os.close(note)
        ours.close()
        job.tests, tests = "", None  # the program must not find them in its memory
        _do_and_exit(lambda: _serve(job.source, theirs))
    theirs.close()
    _do_and_exit(lambda: _run_apart(tests, ours, program, note, token))


def _run_together(source: str, tests: CodeType, note: int, token: bytes) -> None:
    untouched = dict(vars(builtins))
    names = _load(source)
    sys.settrace(None)
    sys.setprofile(None)
    vars(builtins).update(untouched)
    exec(tests, names)
    os.write(note, token)


def _run_apart(
    tests: CodeType, connection: Connection, program: int, note: int, token: bytes
) -> None:
    link = TestsLink(connection)
    try:
        exec(tests, ProgramNames(link, redefined=link.await_answer()))
    except OtherSideEnded:
        raise SystemExit(OUT_OF_MEMORY if _ended_with(program) == OUT_OF_MEMORY else 1) from None
    os.write(note, token)
    connection.close()
    _ended_with(program)  # it may still have something to print


def _ended_with(program: int) -> int | None:
    """The program's exit code; None if it is still running."""
    has_ended, _, _ = select.select([os.pidfd_open(program)], [], [], _GRACE)
    return exit_code(os.waitpid(program, 0)[1]) if has_ended else None


def _serve(source: str, connection: Connection) -> None:
    """Load the program, and serve the tests' requests until they end."""
    known = set(dir(builtins))
    names = _load(source)
    more = {"isinstance": isinstance, "name": names.__getitem__}
    link = Link(connection, OBJECT_OPERATIONS | PAIR_OPERATIONS | more)
    link.answer([name for name in names if name in known and not name.startswith("__")])
    with suppress(OtherSideEnded):
        link.await_answer()


def _load(source: str) -> dict[str, Any]:
    """Run the program as the main module; return its global names."""
    module = ModuleType("__main__")
    sys.modules["__main__"], sys.argv = module, [_FILE]
    linecache.cache[_FILE] = (len(source), None, source.splitlines(True), _FILE)
    exec(_compiled(source, _FILE), vars(module))
    return vars(module)


def _do_and_exit(action: Callable[[], object]) -> NoReturn:
    """Run the action, then exit as the interpreter would."""
    code = 1
    try:
        action()
        threading._shutdown()  # waits for the program's threads
        atexit._run_exitfuncs()
        code = 0
    except SystemExit as request:
        code = _requested_code(request)
    except MemoryError:
        code = OUT_OF_MEMORY
    except CannotCross as error:
        print(error, file=sys.stderr)
        code = CANNOT_CROSS
    except BaseException as error:  # the program ends here, so report anything
        _print_traceback(error)
    _flush_and_exit(code)


def _open(descriptor: int, mode: str) -> TextIO:
    return open(descriptor, mode, encoding="utf-8", errors="backslashreplace", closefd=False)


def _compiled(source: str, name: str) -> CodeType:
    return compile(source, name, "exec", dont_inherit=True)


def _requested_code(request: SystemExit) -> int:
    if isinstance(request.code, int):
        return request.code & 0xFF
    if request.code is None:
        return 0
    print(request.code, file=sys.stderr)
    return 1


def _print_traceback(error: BaseException) -> None:
    """Starting at the program's own frames."""
    frames = error.__traceback__
    while frames and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    traceback.print_exception(type(error), error, frames)


def _flush_and_exit(code: int) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except Exception:  # the program may have closed or replaced it
            code = code or 1
    os._exit(code)
