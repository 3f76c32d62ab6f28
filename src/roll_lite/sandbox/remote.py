"""Calls between a program and its tests, which run in two processes.

Tests hold the program's functions and objects as `Remote`s; calling them returns data. No code of
the program sees a value that the tests expect: a `Remote` equals no data, whatever the program
claims, and what the program patches is patched in its own process.

An iterator of the tests is a generator in the program, which asks for one item after another.

Nothing that arrives from the program makes the tests' process import or run anything: types and
exceptions are looked up in a table, modules of the program stay `Remote`s.
"""

import builtins
import copy
import operator
import sys
import threading
import traceback
from collections import ChainMap
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import suppress
from functools import cache, reduce
from importlib import import_module
from multiprocessing.connection import Connection
from types import GeneratorType, ModuleType
from typing import Any, NoReturn

from roll_lite.sandbox.messages import MUTABLE, dumps, is_data, loads

_MAX_MESSAGE = 64 << 20
"""Bytes."""

_ERRORS = {
    name: kind
    for name, kind in vars(builtins).items()
    if isinstance(kind, type) and issubclass(kind, Exception)
}
_DATA_TYPES = (bool, int, float, complex, str, bytes, bytearray, list, tuple, dict, set, frozenset)
TYPES = _ERRORS | {kind.__name__: kind for kind in (*_DATA_TYPES, range)}
"""Types that the tests' process knows by the name that the program gives. Their instances are data
or exceptions, none of which ends a process."""
_CATCH_ALL = {name: type(name, (Exception,), {}) for name in ("AssertionError", "Exception")}
"""What tests get for such a type of the program's: with it they do not catch their own failure."""
_RAISED = {made: _ERRORS[name] for name, made in _CATCH_ALL.items()}


_ITERATORS = ("builtins", "itertools", "_collections", "array")
"""Modules of Python's own iterators, which have nothing to give but their items."""


class OtherSideEnded(BaseException):
    """Not an Exception: a program that expects one must not catch this."""


OBJECT_OPERATIONS = {
    "__call__": operator.call, "__getattr__": getattr, "__setattr__": setattr,
    "__getitem__": operator.getitem, "__setitem__": operator.setitem,
    "__delitem__": operator.delitem, "__len__": len, "__iter__": iter, "__next__": next,
    "__bool__": bool, "__str__": str, "__repr__": repr, "__hash__": hash, "__int__": int,
    "__float__": float, "__index__": operator.index, "__round__": round, "__abs__": abs,
    "__neg__": operator.neg, "__pos__": operator.pos, "__invert__": operator.invert,
    "__delattr__": delattr, "__reversed__": reversed, "__format__": format,
    "__copy__": copy.copy, "__deepcopy__": lambda value, memo=None: copy.deepcopy(value),
    "__enter__": lambda manager: manager.__enter__(),
    "__exit__": lambda manager: manager.__exit__(None, None, None),
}  # fmt: skip
"""What tests may do with any object of the program."""
_OPTIONAL = frozenset(
    [
        "__call__",
        "__getitem__",
        "__setitem__",
        "__delitem__",
        "__len__",
        "__iter__",
        "__next__",
        "__reversed__",
        "__int__",
        "__float__",
        "__index__",
        "__round__",
        "__abs__",
        "__neg__",
        "__pos__",
        "__invert__",
        "__enter__",
        "__exit__",
    ]
)
"""Those by which Python tells what an object is: callable, iterable, a context manager."""
PAIR_OPERATIONS = {
    name: getattr(operator, name)
    for name in (
        *("__eq__", "__lt__", "__le__", "__gt__", "__ge__", "__add__", "__sub__", "__mul__"),
        *("__truediv__", "__floordiv__", "__mod__", "__pow__", "__matmul__"),
        *("__and__", "__or__", "__xor__", "__iadd__", "__isub__", "__imul__", "__ior__"),
    )
}
"""What tests may do with two objects of the program; with one and data, the program would learn the
data."""


class Handle:
    """An object in the other process."""

    __slots__ = ("_remote_link", "_remote_number")

    def __init__(self, link: "Link", number: int):
        object.__setattr__(self, "_remote_link", link)
        object.__setattr__(self, "_remote_number", number)


class Remote(Handle):
    """An object of the program, as its tests hold it."""

    __slots__ = ()

    def __contains__(self, wanted: object) -> bool:
        return any(item is wanted or item == wanted for item in self)

    def __instancecheck__(self, value: object) -> bool:
        is_theirs = isinstance(value, Remote)
        return is_theirs and bool(self._remote_link.request("isinstance", value, self))


class Given(Handle):
    """What tests have given to the program, which may do nothing with it but call it."""

    __slots__ = ("__name__",)

    def __copy__(self, memo: object = None) -> "Given":
        return self

    __deepcopy__ = __copy__


def _special_method(name: str, *, needs_two: bool) -> Callable:
    def method(self: Handle, *operands: Any, **keywords: Any) -> Any:
        if needs_two and not isinstance(operands[0], Remote):
            return NotImplemented
        if name == "__exit__":  # an exception of the tests is not for the program to see or swallow
            self._remote_link.request(name, self)
            return None
        if name == "__deepcopy__":
            operands = ()
        return self._remote_link.request(name, self, *operands, **keywords)

    return method


_OPTIONAL_METHODS = {name: _special_method(name, needs_two=False) for name in _OPTIONAL}
for _name in OBJECT_OPERATIONS.keys() - _OPTIONAL:
    setattr(Remote, _name, _special_method(_name, needs_two=False))
for _name in PAIR_OPERATIONS:
    setattr(Remote, _name, _special_method(_name, needs_two=True))


@cache
def _class_with(base: type[Handle], operations: frozenset[str]) -> type[Handle]:
    """A subclass that has these of the optional operations."""
    methods = {name: _OPTIONAL_METHODS[name] for name in operations & _OPTIONAL}
    return type(base.__name__, (base,), {"__slots__": ()} | methods)


def _operations_of(value: Any) -> list[str]:
    """Optional ones that the object has."""
    is_generic = isinstance(value, type) and hasattr(value, "__class_getitem__")
    methods = ChainMap(*map(vars, type(value).__mro__))
    found = [name for name in _OPTIONAL if methods.get(name)]
    return [*found, "__getitem__"] if is_generic else found


class Link:
    """One end of the connection. It sends requests, and serves the other side's while it waits."""

    def __init__(self, connection: Connection, operations: Mapping[str, Callable]):
        self._connection = connection
        self._operations = operations
        self._objects: list[Any] = []
        """Objects that the other side has references to, kept alive so that ids stay unique."""
        self._numbers: dict[int, int] = {}
        self._remotes: dict[int, Any] = {}
        self._errors: dict[type, int] = {}
        """The other side's numbers of exception classes that have a stand-in here."""
        self._lock = threading.RLock()

    def request(self, operation: str, *operands: Any, **keywords: Any) -> Any:
        with self._lock:  # threads take turns
            self._send("do", operation, list(operands), keywords)
            return self.await_answer((*operands, *keywords.values()))

    def await_answer(self, operands: tuple = ()) -> Any:
        """The result; copies the other side's changes of mutable operands back into them."""
        while True:
            kind, *content = self._receive()
            if kind == "do":
                self._serve(*content)
            elif kind == "raised":
                raise _exception(*content)
            else:
                result, changes = content
                for index, value in changes:
                    _overwrite(operands[index], value)
                return result

    def answer(self, value: Any, changes: list[tuple[int, Any]] | None = None) -> None:
        self._send("value", value, changes or [])

    def perform(self, operation: str, operands: list, keywords: dict) -> Any:
        return self._operations[operation](*operands, **keywords)

    def refer(self, value: Any) -> list:
        """A reference, which the other side resolves."""
        if isinstance(value, Handle):
            return ["yours", value._remote_number]
        if isinstance(value, type):
            if TYPES.get(value.__name__) is value:
                return ["type", value.__name__]
            if value in self._errors:
                return ["yours", self._errors[value]]
        number = self._numbers.setdefault(id(value), len(self._objects))
        if number == len(self._objects):
            self._objects.append(value)
        if isinstance(value, type) and issubclass(value, Exception):
            return ["error", number, value.__name__, _known_base(value).__name__]
        return ["mine", number, _operations_of(value)]

    def resolve(self, reference: list) -> Any:
        kind, name, *more = reference
        if kind == "yours":
            return self._objects[name]
        if kind == "type":
            return TYPES[name]
        if name not in self._remotes:
            is_error = kind == "error"
            self._remotes[name] = (self._stand_in if is_error else self._handle)(name, *more)
        return self._remotes[name]

    def _handle(self, number: int, operations: list[str]) -> Handle:
        return _class_with(Remote, frozenset(operations))(self, number)

    def _stand_in(self, number: int, name: str, base: str) -> type:
        """A class that tests can catch."""
        made = type(name, (_ERRORS[base],), {})
        self._errors[made] = number
        return made

    def _serve(self, operation: str, operands: list, keywords: dict) -> None:
        given = [*operands, *keywords.values()]
        before = [self._snapshot(operand) for operand in given]
        try:
            result = self.perform(operation, operands, keywords)
        except Exception as error:  # any exception is for the other side to handle
            args = [arg for arg in error.args if isinstance(arg, str | int | float)]
            more = {name: value for name, value in vars(error).items() if is_data(value)}
            self._send("raised", type(error), args, traceback.format_exc(), more)
            return
        changed = [i for i, old in enumerate(before) if old != self._snapshot(given[i])]
        self.answer(result, [(index, given[index]) for index in changed])

    def _snapshot(self, operand: Any) -> bytes | None:
        """The content of a mutable operand; None for others."""
        return dumps(operand, self.refer) if isinstance(operand, MUTABLE) else None

    def _send(self, *message: Any) -> None:
        try:
            self._connection.send_bytes(dumps(message, self.refer))
        except ConnectionError:
            self._end()

    def _receive(self) -> Any:
        return loads(self._receive_bytes(), self.resolve)

    def _receive_bytes(self) -> bytes:
        try:
            return self._connection.recv_bytes(_MAX_MESSAGE)
        except (EOFError, OSError):  # it has ended, or sent something that is not a message
            self._end()

    def _end(self) -> NoReturn:
        raise OtherSideEnded


class ProgramLink(Link):
    """The program's end. `names` are its global names."""

    def __init__(self, connection: Connection, more: Mapping[str, Callable]):
        more = {"isinstance": isinstance, "name": lambda name: self.names[name], **more}
        super().__init__(connection, OBJECT_OPERATIONS | PAIR_OPERATIONS | more)
        self.names: dict[str, Any] = {}
        self._iterators: dict[GeneratorType, int] = {}
        """The tests' numbers of their iterators."""

    def await_start(self) -> None:
        """Until the tests' process is ready."""
        self._receive_bytes()

    def resolve(self, reference: list) -> Any:
        if reference[0] == "global":
            return _named(*reference[1:])
        if reference[0] == "iterator":
            return self._iterator(reference[1])
        return super().resolve(reference)

    def refer(self, value: Any) -> list:
        if isinstance(value, GeneratorType) and value in self._iterators:
            return ["yours", self._iterators[value]]
        return super().refer(value)

    def _iterator(self, number: int) -> GeneratorType:
        if number not in self._remotes:
            self._remotes[number] = made = self._items(Given(self, number))
            self._iterators[made] = number
        return self._remotes[number]

    def _handle(self, number: int, operations: list[str], name: str) -> Given:
        made = _class_with(Given, frozenset(operations))(self, number)
        if name:
            made.__name__ = name
        return made

    def _items(self, iterator: Given) -> Generator:
        with suppress(StopIteration):
            while True:
                yield self.request("__next__", iterator)


class TestsLink(Link):
    """The tests' end: all it runs for the program are functions and iterators passed by the tests.

    `stop` ends the process; what it is called with says why the tests cannot run apart from the
    program, or is empty if the program has ended.
    """

    def __init__(self, connection: Connection, stop: Callable[[str], NoReturn]):
        super().__init__(connection, {"__call__": operator.call, "__next__": next})
        self._stop = stop
        self._is_provoked = False
        self._failure: AssertionError | None = None
        """A failed assertion of a function of the tests: the program, which called it, must not
        swallow it."""

    def start_program(self) -> list[str]:
        """The usual names and builtins that it binds."""
        self._connection.send_bytes(b"")
        return [str(name) for name in self.await_answer()]

    def resolve(self, reference: list) -> Any:
        if reference[0] == "type" and reference[1] in _CATCH_ALL:
            return _CATCH_ALL[reference[1]]
        return super().resolve(reference)

    def request(self, operation: str, *operands: Any, **keywords: Any) -> Any:
        """Only an iterator's StopIteration ends an iteration, as that of a generator (PEP 479)."""
        try:
            result = super().request(operation, *operands, **keywords)
        except (StopIteration, StopAsyncIteration) as error:
            if operation == "__next__":
                raise
            raise RuntimeError(f"the program raised {type(error).__name__}") from error
        finally:
            failure = self._failure
            self._failure = None
        if failure:
            raise failure
        return result

    def perform(self, operation: str, operands: list, keywords: dict) -> Any:
        value = operands[0]
        if not any(value is given for given in self._objects):
            raise TypeError(f"{value} was not given to the program")
        if (operation == "__next__") != _is_iterator(value):
            raise TypeError(f"{operation} of a {type(value).__name__} is not for the program")
        try:
            return super().perform(operation, operands, keywords)
        except AssertionError as error:
            if not hasattr(error, "__notes__"):  # else the program raised it
                self._failure = error
            raise

    def refer(self, value: Any) -> list:
        """Python's own functions and modules go by name, so the program has its own."""
        if name := _name_of(value):
            return ["global", *name]
        reference = super().refer(value)
        if reference[0] == "mine" and _is_iterator(value):
            return ["iterator", *reference[1:]]
        if reference[0] == "mine" and not (callable(value) or isinstance(value, Exception)):
            problem = f"the tests hand the program a {type(value).__name__}"
            if self._is_provoked:
                raise TypeError(problem)
            self._stop(problem)
        if reference[0] == "mine":
            name = getattr(value, "__name__", "")
            reference.append(name if isinstance(name, str) else "")
        return reference

    def _serve(self, operation: str, operands: list, keywords: dict) -> None:
        """What a function returns is the program's fault, if that passes it more than data."""
        before = self._is_provoked
        self._is_provoked = before or not is_data([operands[1:], keywords])
        super()._serve(operation, operands, keywords)
        self._is_provoked = before

    def _end(self) -> NoReturn:
        self._stop("")


class ProgramNames(dict):
    """The tests' global names: their own and `known` ones, then builtins, then the program's."""

    def __init__(self, link: TestsLink, known: Mapping[str, Any]):
        super().__init__(known, __name__="__main__", __builtins__=builtins)
        self._link = link

    def __missing__(self, name: str) -> Any:
        if hasattr(builtins, name):
            raise KeyError(name)
        return self._link.request("name", name)  # KeyError if the program has no such name


class ProgramModule(ModuleType):
    """The program as a module that tests import: `from solution import f`."""

    __all__ = ()  # after `import *` the tests find the program's names as they do without

    def __init__(self, name: str, link: TestsLink):
        super().__init__(name)
        self._link = link

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # with a __path__, tests would import the program's files
            raise AttributeError(name)
        try:
            return self._link.request("name", name)
        except KeyError:
            raise AttributeError(f"the program has no {name}") from None


def _exception(kind: object, args: list, text: str, more: Mapping[str, Any]) -> Exception:
    is_error = isinstance(kind, type) and issubclass(kind, Exception)
    kind = _RAISED.get(kind, kind) if is_error else RuntimeError
    try:
        error = kind(*args)
    except TypeError:  # some need arguments that do not cross
        error = kind.__new__(kind)
    if kind not in _ERRORS.values():  # a class of the other side's own
        for name in more.keys() - {"__notes__", *dir(kind)}:
            setattr(error, name, more[name])
    error.add_note(f"In the program:\n{text}")
    return error


def _is_iterator(value: Any) -> bool:
    return isinstance(value, Iterator) and type(value).__module__ in _ITERATORS


def _overwrite(target: Any, value: Any) -> None:
    """Only data that can change."""
    if not isinstance(target, MUTABLE):
        raise TypeError(f"a {type(target).__name__} cannot be changed")
    target.clear()
    (target.update if isinstance(target, dict | set) else target.extend)(value)


def _name_of(value: Any) -> tuple[str, str] | None:
    """Module and name, if it is a module, function or class of Python's library."""
    if isinstance(value, ModuleType):
        module = value.__name__
        name = ""
    elif isinstance(value, Handle) or (isinstance(value, type) and value in TYPES.values()):
        return None
    else:
        module = getattr(value, "__module__", None)
        name = getattr(value, "__qualname__", None)
    if not (isinstance(module, str) and isinstance(name, str) and module in sys.modules):
        return None
    is_ours = module.split(".")[0] in sys.stdlib_module_names
    with suppress(AttributeError):
        return (module, name) if is_ours and _named(module, name) is value else None
    return None


def _named(module: str, name: str) -> Any:
    return reduce(getattr, name.split(".") if name else (), import_module(module))


def _known_base(error: type) -> type:
    return next(kind for kind in error.__mro__ if kind in _ERRORS.values())
