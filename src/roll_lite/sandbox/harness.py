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

from roll_lite.sandbox.names import SOLUTION, USUAL_NAMES, names_from_program, uncalled_tests
from roll_lite.sandbox.processes import exit_code
from roll_lite.sandbox.remote import (
    OBJECT_OPERATIONS,
    PAIR_OPERATIONS,
    CannotCross,
    Link,
    OtherSideEnded,
    ProgramModule,
    ProgramNames,
    TestsLink,
)
from roll_lite.sandbox.sandbox import Job

OUT_OF_MEMORY = 86
"""Exit code of a program that ended with a MemoryError."""
CANNOT_CROSS = 87
"""Exit code of tests that can only run in the program's process."""
COPY_ENDED = 88
"""Exit code of a copy of the program, when its tests have ended."""
_FILE = "program.py"
_GRACE = 0.2
"""Seconds that a program has to end after its connection to the tests has closed."""


def run_and_exit(job: Job, note: int, token: bytes) -> NoReturn:
    """Writes the token to the descriptor `note` when tests, or a run before the last, end well."""
    _do_and_exit(lambda: _run(job, note, token))


def _run(job: Job, note: int, token: bytes) -> None:
    _feed(job.inputs[0] if job.tests else _take_input(job, note, token))
    sys.stdin, sys.stdout, sys.stderr = _open(0, "r"), _open(1, "w"), _open(2, "w")
    if not job.tests:
        os.close(note)
        _load(job.source)
    elif job.tests_apart:
        _run_apart(job, note, token)
    else:
        _run_together(job, note, token)


def _take_input(job: Job, note: int, token: bytes) -> str:
    """Returns in a copy of this process for each input; for the last, in this process."""
    while len(job.inputs) > 1 and (copy := _fork()):
        code = exit_code(os.waitpid(copy, 0)[1])
        if code:
            os._exit(code)
        _mark_end(note, token)
        del job.inputs[0]
    text = job.inputs[0]
    job.inputs.clear()
    return text


def _fork() -> int | None:
    """The copy's id; 0 in the copy; None if the program's other processes leave no room for it."""
    with suppress(OSError):
        return os.fork()


def _mark_end(note: int, token: bytes) -> None:
    """Of a run, and of what it printed."""
    os.write(1, token)
    os.write(note, token)


def _feed(text: str) -> None:
    """Make the text the standard input."""
    stdin = os.memfd_create("stdin")
    with open(stdin, "wb", closefd=False) as file:
        file.write(text.encode(errors="surrogatepass"))
    os.lseek(stdin, 0, os.SEEK_SET)
    os.dup2(stdin, 0)
    os.close(stdin)


def _run_together(job: Job, note: int, token: bytes) -> None:
    run_tests, untouched = _prepared(job.tests[0]), dict(vars(builtins))
    names = _load(job.source)
    sys.settrace(None)
    sys.setprofile(None)
    vars(builtins).update(untouched)
    sys.modules[SOLUTION] = sys.modules["__main__"]
    run_tests(names)
    os.write(note, token)


def _run_apart(job: Job, note: int, token: bytes) -> None:
    ours, theirs = Pipe()
    program = os.fork()
    if program == 0:
        os.close(note)
        ours.close()
        job.tests.clear()  # the program must not find them in its memory
        _do_and_exit(lambda: _serve(job.source, theirs))
    theirs.close()
    try:
        _run_tests(job.tests, ours, lambda: _mark_end(note, token))
    except OtherSideEnded:
        raise SystemExit(OUT_OF_MEMORY if _ended_with(program) == OUT_OF_MEMORY else 1) from None
    os.write(note, token)
    ours.close()
    _ended_with(program)  # it may still have something to print


def _run_tests(all_tests: list[str], program: Connection, mark_end: Callable[[], None]) -> None:
    """Each with a copy of the program, up to the last, or up to the first without a copy."""
    redefined, is_copy = TestsLink(program).await_answer(), True
    while all_tests and is_copy:
        link, tests = TestsLink(program), all_tests.pop(0)
        is_copy = bool(all_tests) and link.request("copy")
        sys.modules[SOLUTION] = ProgramModule(SOLUTION, link)
        _prepared(tests)(ProgramNames(link, _tested_builtin(tests, redefined)))
        if is_copy:
            link.request("end copy")
            mark_end()


def _tested_builtin(tests: str, redefined: list[str]) -> str | None:
    """The only builtin that the program redefines and the tests take from it."""
    found = names_from_program(tests) & set(redefined)
    return found.pop() if len(found) == 1 else None


def _prepared(tests: str) -> Callable[[dict[str, Any]], None]:
    """Runs the tests' code, then the test functions and classes that it only defines."""
    code, uncalled = _compiled(tests, "tests.py"), [test.name for test in uncalled_tests(tests)]

    def run(names: dict[str, Any]) -> None:
        exec(code, names)
        for name in uncalled:
            test = names[name]
            _run_class(test) if isinstance(test, type) else test()

    return run


def _run_class(test: type) -> None:
    from unittest import TestCase, defaultTestLoader  # most tests do without

    if issubclass(test, TestCase):
        defaultTestLoader.loadTestsFromTestCase(test).debug()  # raises what a test raises
        return
    for name in (name for name in dir(test) if name.startswith("test")):
        getattr(test(), name)()


def _ended_with(program: int) -> int | None:
    """The program's exit code; None if it is still running."""
    has_ended, _, _ = select.select([os.pidfd_open(program)], [], [], _GRACE)
    return exit_code(os.waitpid(program, 0)[1]) if has_ended else None


def _serve(source: str, connection: Connection) -> None:
    """Load the program, and serve the tests' requests until they end."""
    known = set(dir(builtins))
    names = _load(source)
    more = {
        "isinstance": isinstance,
        "name": names.__getitem__,
        "copy": _copy_program,
        "end copy": lambda: _flush_and_exit(COPY_ENDED),
    }
    link = Link(connection, OBJECT_OPERATIONS | PAIR_OPERATIONS | more)
    link.answer([name for name in names if name in known and not name.startswith("__")])
    with suppress(OtherSideEnded):
        link.await_answer()


def _copy_program() -> bool:
    """Whether the connection is now served by a copy of the program; False if there can be none.

    In the program itself, this returns when the copy has ended.
    """
    if threading.active_count() > 1:  # a copy would not have these threads
        return False
    _flush()
    copy = _fork()
    if copy is None:
        return False
    if copy:
        code = exit_code(os.waitpid(copy, 0)[1])
        if code != COPY_ENDED:
            os._exit(code)
    return True


def _load(source: str) -> dict[str, Any]:
    """Run the program as the main module; return its global names."""
    module = ModuleType("__main__")
    vars(module).update(USUAL_NAMES)
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
    os._exit(code if _flush() else code or 1)


def _flush() -> bool:
    """False if the program has closed or replaced a stream."""
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except Exception:
        return False
    return True
