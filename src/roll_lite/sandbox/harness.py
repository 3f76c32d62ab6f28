"""What the processes of a program and of its tests do."""

import atexit
import builtins
import fcntl
import gc
import linecache
import marshal
import os
import random
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from multiprocessing.connection import Connection
from types import CodeType, ModuleType
from typing import Any, NoReturn, TextIO

from roll_lite.processes import exit_code
from roll_lite.sandbox.isolation import Role
from roll_lite.sandbox.kernel import filter_calls
from roll_lite.sandbox.names import (
    KNOWN_NAMES,
    SOLUTION,
    USUAL_NAMES,
    forgotten_modules,
    names_from_program,
    uncalled_tests,
)
from roll_lite.sandbox.remote import (
    OtherSideEnded,
    ProgramLink,
    ProgramModule,
    ProgramNames,
    TestsLink,
)

OUT_OF_MEMORY = 86
"""Exit code of a program that ended with a MemoryError."""
PROGRAM_ENDED = 87
"""Exit code of tests whose program has ended."""
COPY_ENDED = 88
"""Exit code of a copy of the program, when its tests have ended."""
PROBLEM = b"!"
"""With it begins a note that says why the tests cannot run apart from the program."""
_FILE = "program.py"


def run_and_exit(
    role: Role, part: int, notes: socket.socket, token: bytes, link: Connection | None
) -> NoReturn:
    """Run the program or its tests, then exit as the interpreter would.

    `part` is a descriptor of what this process reads (see `run_job`); `link` connects a program and
    tests in a process of their own. The token is sent as a note when a run before the last, or a
    test, ends well.
    """
    run = _run_program if role == "program" else _run_tests
    code = 1
    try:
        with open(part, "rb") as file:
            content = marshal.load(file)
        run(content, notes, token, link)
        threading._shutdown()  # waits for the program's threads
        atexit._run_exitfuncs()
        code = 0
    except SystemExit as request:
        code = _requested_code(request)
    except MemoryError:
        code = OUT_OF_MEMORY
    except BaseException as error:  # the program ends here, so report anything
        _print_traceback(error)
    _flush_and_exit(code)


def _run_program(
    job: dict[str, Any], notes: socket.socket, token: bytes, link: Connection | None
) -> None:
    _feed(_take_input(job["inputs"], notes, token))
    filter_calls()
    _start()
    if job["tests"]:
        _run_together(job["source"], job["tests"][0], notes, token)
        return
    notes.close()
    if link is None:
        _load(job["source"])
    else:
        _serve(job["source"], link)


def _run_tests(
    all_tests: list[str], notes: socket.socket, token: bytes, program: Connection
) -> None:
    """Each with a copy of the program, up to the last, or up to the first without a copy."""
    filter_calls()
    _start()

    def stop(problem: str) -> NoReturn:
        if problem:
            notes.sendall(PROBLEM + problem.encode(errors="replace"))
        _flush_and_exit(PROGRAM_ENDED)

    is_copy = True
    bound = TestsLink(program, stop).start_program()
    while all_tests and is_copy:
        tests = all_tests.pop(0)
        link = TestsLink(program, stop)
        is_copy = bool(all_tests) and link.request("copy")
        sys.modules[SOLUTION] = ProgramModule(SOLUTION, link)
        run_tests = _prepared(tests)
        taken = {name: link.request("name", name) for name in _taken_names(tests, bound)}
        run_tests(ProgramNames(link, USUAL_NAMES | forgotten_modules(tests) | taken))
        if is_copy:
            link.request("end copy")
            _mark_end(notes, token)
    notes.sendall(token)


def _start() -> None:
    gc.enable()
    sys.stdin = _open(0, "r")
    sys.stdout = _open(1, "w")
    sys.stderr = _open(2, "w")


def _take_input(inputs: list[str], notes: socket.socket, token: bytes) -> str:
    """Returns in a copy of this process for each input; for the last, in this process."""
    while len(inputs) > 1 and (copy := _fork()):
        code = exit_code(os.waitpid(copy, 0)[1])
        if code:
            os._exit(code)
        _mark_end(notes, token)
        del inputs[0]
    text = inputs[0]
    inputs.clear()
    return text


def _fork() -> int | None:
    """The copy's id; 0 in the copy; None if the program's other processes leave no room for it."""
    with suppress(OSError):
        return os.fork()


def _mark_end(notes: socket.socket, token: bytes) -> None:
    """Mark the end of a run, and wait until the monitor has read what it printed."""
    _flush()
    notes.sendall(token)
    if not notes.recv(1):
        os._exit(1)  # there is no monitor


def _feed(text: str) -> None:
    """Make the text the standard input, which cannot grow."""
    stdin = os.memfd_create("stdin", os.MFD_ALLOW_SEALING)
    with open(stdin, "wb", closefd=False) as file:
        file.write(text.encode(errors="surrogatepass"))
    os.lseek(stdin, 0, os.SEEK_SET)
    fcntl.fcntl(stdin, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW)
    os.dup2(stdin, 0)
    os.close(stdin)


def _run_together(source: str, tests: str, notes: socket.socket, token: bytes) -> None:
    run_tests = _prepared(tests)
    untouched = vars(builtins) | USUAL_NAMES
    names = _load(source)
    sys.settrace(None)
    sys.setprofile(None)
    vars(builtins).update(untouched)
    _taken_names(tests, names)
    names.update(forgotten_modules(tests))
    sys.modules[SOLUTION] = sys.modules["__main__"]
    run_tests(names)
    notes.sendall(token)


def _taken_names(tests: str, bound: Iterable[str]) -> set[str]:
    """Usual names and builtins that the tests take from a program which binds these. Raises
    NameError if the tests are about such names, and it binds none of them."""
    asked = names_from_program(tests)
    taken = asked.intersection(bound)
    if asked and asked <= KNOWN_NAMES and not taken:
        raise NameError(f"the program does not define {' or '.join(sorted(asked))}")
    return taken


def _prepared(tests: str) -> Callable[[dict[str, Any]], None]:
    """Runs the tests' code, then the test functions and classes that it only defines."""
    code = _compiled(tests, "tests.py")
    uncalled = [test.name for test in uncalled_tests(tests)]

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
        case = test()
        for step in ("setup_method", name, "teardown_method"):  # as pytest does
            getattr(case, step, lambda: None)()


def _serve(source: str, connection: Connection) -> None:
    """Load the program when its tests are ready, and serve their requests until they end."""
    more = {"copy": _copy_program, "end copy": lambda: _flush_and_exit(COPY_ENDED)}
    link = ProgramLink(connection, more)
    with suppress(OtherSideEnded):
        link.await_start()
        link.names = names = _load(source)
        link.answer([name for name in names if name in KNOWN_NAMES and not name.startswith("__")])
        link.await_answer()


def _copy_program() -> bool:
    """Whether the connection is now served by a copy of the program; False if there can be none.

    In the program itself, this returns when the copy has ended.
    """
    if threading.active_count() > 1:  # a copy would not have these threads
        return False
    _flush()
    state = random.getstate()
    copy = _fork()
    if copy is None:
        return False
    if copy == 0:
        random.setstate(state)  # a fork has a seed of its own
    else:
        code = exit_code(os.waitpid(copy, 0)[1])
        if code != COPY_ENDED:
            os._exit(code)
    return True


def _load(source: str) -> dict[str, Any]:
    """Run the program as the main module; return the global names that it binds.

    It finds the usual names among the builtins, so that what it binds itself can be told.
    """
    vars(builtins).update(USUAL_NAMES)
    module = ModuleType("__main__")
    sys.modules["__main__"] = module
    sys.argv = [_FILE]
    linecache.cache[_FILE] = (len(source), None, source.splitlines(True), _FILE)
    exec(_compiled(source, _FILE), vars(module))
    return vars(module)


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
