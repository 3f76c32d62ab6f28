"""Runs a program, then its tests, in this process, which it ends."""

import atexit
import builtins
import linecache
import os
import sys
import threading
import traceback
from collections.abc import Callable
from types import CodeType, ModuleType
from typing import TextIO

from roll_lite.sandbox.program import Job

OUT_OF_MEMORY = 86
"""Exit code of a program that ended with a MemoryError."""
_FILE = "program.py"


def run_and_exit(job: Job, on_passed: Callable[[], None]) -> None:
    """`on_passed` is called when the tests have come to their end, not when a program says so."""
    sys.stdin, sys.stdout, sys.stderr = _open(0, "r"), _open(1, "w"), _open(2, "w")
    code = 1
    try:
        _run(job, on_passed)
        threading._shutdown()  # waits for the program's threads, as the interpreter's end does
        atexit._run_exitfuncs()
        code = 0
    except SystemExit as request:
        code = _requested_code(request)
    except MemoryError:
        code = OUT_OF_MEMORY
    except BaseException as error:  # whatever it raised: this is where the program ends
        _print_traceback(error)
    _flush_and_exit(code)


def _open(descriptor: int, mode: str) -> TextIO:
    return open(descriptor, mode, encoding="utf-8", errors="backslashreplace", closefd=False)


def _run(job: Job, on_passed: Callable[[], None]) -> None:
    module = ModuleType("__main__")
    sys.modules["__main__"], sys.argv = module, [_FILE]
    linecache.cache[_FILE] = (len(job.source), None, job.source.splitlines(True), _FILE)
    tests, untouched = _compiled(job.tests, "tests.py"), dict(vars(builtins))
    exec(_compiled(job.source, _FILE), vars(module))
    if job.tests:
        sys.settrace(None)
        sys.setprofile(None)
        vars(builtins).update(untouched)
        exec(tests, vars(module))
        on_passed()


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
    """From the program's own frames on."""
    frames = error.__traceback__
    while frames and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    traceback.print_exception(type(error), error, frames)


def _flush_and_exit(code: int) -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except Exception:  # the program may have closed or replaced it
            code = code or 1
    os._exit(code)
