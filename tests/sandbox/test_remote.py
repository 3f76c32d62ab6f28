"""Tests in their own process mean the same as in the program's, and cannot be deceived."""

import json
from collections import Counter, OrderedDict, deque
from datetime import date, datetime, timedelta
from decimal import Decimal
from fractions import Fraction
from textwrap import dedent

import pytest

from roll_lite.sandbox.messages import dumps, loads
from roll_lite.sandbox.sandbox import SandboxError


@pytest.fixture
def sandbox(either):
    return either


@pytest.mark.parametrize(
    "value",
    [
        None, True, 0, -1, 2**200, -(2**63), 1.5, float("inf"), 1e-320, "text \ud800 \n", "",
        b"\x00\xff", bytearray(b"x"), 2 + 3j, range(1, 9, 2), Decimal("1.10"), Fraction(1, 3),
        [], [[1], ["list", [2]]], (), (1, (2,)), {1, 2}, frozenset({(1, 2)}), deque([1]),
        {"a": {1: None}, (1, 2): [3]}, Counter("aab"), OrderedDict(b=1, a=2),
        {"a": 1, "b": [2]}.keys(), {1: {2}, (3,): 4}.items(),
        datetime(2024, 2, 29, 12, 30), date(2024, 2, 29), timedelta(days=1, microseconds=3),
    ],
    ids=repr,
)  # fmt: skip
def test_data_comes_back_the_same(value):
    data = dumps(value, refer=None)
    json.loads(data)
    result = loads(data, resolve=None)
    assert result == value and type(result) is type(value)


def test_numbers_that_are_none():
    assert str(loads(dumps(float("nan"), None), None)) == "nan"


def test_subclasses_arrive_as_what_they_derive_from():
    class Any(int):
        def __eq__(self, other):
            return True

        __hash__ = int.__hash__

    class Text(str):
        def __eq__(self, other):
            return True

        __hash__ = str.__hash__

    for value, plain in ((Any(3), 3), (Text("x"), "x"), ([Any(3)], [3])):
        assert loads(dumps(value, None), None) == plain
    assert type(loads(dumps(Any(3), None), None)) is int
    assert type(loads(dumps(Text("x"), None), None)) is str


PROGRAM = """
    import math
    import re as regular
    from collections import Counter, namedtuple
    from collections.abc import Callable, Iterator, Sized
    from contextlib import contextmanager
    from dataclasses import dataclass
    from functools import wraps
    from math import sqrt

    LIMIT = 7
    calls = 0
    Row = namedtuple("Row", "x y")

    class Shortage(ValueError):
        pass

    class Plain:
        pass

    class Whole:
        def __init__(self, value): self.value = value
        def __int__(self): return self.value
        def __invert__(self): return Whole(~self.value)
        def __reversed__(self): return iter([9])
        def __format__(self, how): return f"{how} {self.value}"
        def __iadd__(self, other):
            self.value += other.value
            return self

    class Events:
        def __init__(self): self.functions = set()
        def on(self, function): self.functions.add(function)
        def off(self, function): self.functions.remove(function)
        def fire(self): return sum(function() for function in self.functions)

    def logged(function):
        @wraps(function)
        def call(*values): return function(*values)
        return call

    @dataclass
    class Point:
        x: int
        y: int = 0

        def __add__(self, other):
            return Point(self.x + other.x, self.y + other.y)

        def __abs__(self):
            return math.hypot(self.x, self.y)

        def move(self, *, by):
            self.x += by
            return self

    class Node:
        def __init__(self, value, next=None):
            self.value, self.next = value, next

        def __iter__(self):
            while self:
                yield self.value
                self = self.next

    def count():
        global calls
        calls += 1

    def spend(amount):
        if amount > LIMIT:
            error = Shortage("too much", amount)
            error.missing = amount - LIMIT
            raise error
        return amount

    def row(): return Row(1, 2)
    def apply(function, *values): return [function(value) for value in values]
    def safely(function):
        try:
            return function()
        except KeyError as error:
            return f"caught {error.args[0]}"
    def extend(values, table, *, by): values.append(by); table[by] = len(values)
    def maker(step): return lambda value: value + step
    def twice(value): return value * 2
    def kind(value, type): return isinstance(value, type)

    def total(values): return sum(values)
    def first(values, number): return [value for value, _ in zip(values, range(number))]
    def same(value): return value
    def evens(values): return (value for value in values if value % 2 == 0)
    def keys(table): return table.keys()
    def kinds(values): return [isinstance(values, kind) for kind in (Iterator, Sized, Callable)]

    @contextmanager
    def opened():
        yield "inside"
"""

HONEST = [
    "assert LIMIT == 7 and math.floor(1.5) == 1 and sqrt(4) == 2.0",
    "assert regular.match('a', 'abc')",
    "count(); count()\nassert calls == 2",
    "assert row() == (1, 2) and row().y == 2 and row()._fields == ('x', 'y')",
    "assert Counter('aab') == {'a': 2, 'b': 1} and Counter('aab').most_common(1) == [('a', 2)]",
    "p = Point(3)\np.y = 4\nassert (p.x, p.y, abs(p)) == (3, 4, 5.0)",
    "assert Point(1, 2) == Point(1, 2) and Point(1) != Point(2)",
    "assert Point(1) + Point(2, 5) == Point(3, 5) and str(Point(1)) == 'Point(x=1, y=0)'",
    "assert Point(1).move(by=2).x == 3",
    "p = Point(1)\nassert p.move(by=1) is p and isinstance(p, Point) and not isinstance(3, Point)",
    "assert list(Node(1, Node(2))) == [1, 2] and 2 in Node(1, Node(2)) and 3 not in Node(1)",
    "n = Node(1)\nm = Node(2, n)\nassert m.next is n and n.next is None",
    "assert hasattr(Node(1), 'value') and not hasattr(Node(1), 'other')",
    "try:\n    spend(8)\nexcept Shortage as error:\n    assert error.args == ('too much', 8)\n"
    "else:\n    assert False",
    "try:\n    spend(8)\nexcept ValueError as error:\n    assert 'too much' in str(error)\n"
    "else:\n    assert False",
    "try:\n    twice()\nexcept TypeError:\n    pass\nelse:\n    assert False",
    "assert apply(lambda value: value ** 2, 1, 2, 3) == [1, 4, 9]",
    "assert apply(lambda value: twice(value) + LIMIT, 1) == [9]",
    "assert apply(twice, 'a') == ['aa'] and apply(str, 1) == ['1'] and apply(maker(2), 1) == [3]",
    "def fail():\n    raise KeyError('mine')\nassert safely(fail) == 'caught mine'",
    "values, table = [1], {}\nextend(values, table, by=5)\nassert values == [1, 5]\n"
    "assert table == {5: 2}",
    "assert kind(3, int) and not kind(3, str) and kind(Point(1), Point)",
    "with opened() as text:\n    assert text == 'inside'",
    "assert spend(3) in (3, 4) and max(map(spend, range(5))) == 4",
    "def check(candidate):\n    assert candidate(2) == 4\n    assert len(candidate('ab')) == 4\n"
    "check(twice)",
    "assert twice.__name__ == 'twice'",
    "from solution import LIMIT\nimport solution\nassert solution.twice(LIMIT) == 14",
    "try:\n    from solution import absent\nexcept ImportError:\n    pass\nelse:\n    assert False",
    "def test_twice():\n    assert twice(2) == 4\nclass TestLimit:\n"
    "    def test_limit(self):\n        assert LIMIT == 7",
    "class TestTwice:\n    def setup_method(self):\n        self.four = twice(2)\n"
    "    def test_it(self):\n        assert self.four == 4",
    "assert total(iter([1, 2])) == total(map(int, '12')) == total({1: 'a', 2: 'b'}.keys()) == 3",
    "assert total({5: 1, 6: 2}.values()) == 3 and same({1: 2}.items()) == {(1, 2)}",
    "assert keys({1: 2, 3: 4}) == {1, 3} and list(keys({3: 4})) == [3] and keys({}) != [3]",
    "import itertools\nassert first(itertools.count(5), 2) == [5, 6]",
    "assert first(filter(None, [5, 0, 6]), 9) == [5, 6]",
    "numbers = (x * x for x in [1, 2, 3, 4])\nassert first(numbers, 2) == [1, 4] == [1, 4]\n"
    "assert next(numbers) == 16",
    "numbers = iter([1, 2, 3])\nassert same(numbers) is numbers and next(same(numbers)) == 1",
    "numbers = evens(iter(range(5)))\nassert next(numbers) == 0 and list(numbers) == [2, 4]",
    "assert kinds(zip('ab', [1, 2])) == [True, False, False]",
    "assert same([iter([1]), 2])[1] == 2 and total(enumerate([])) == 0",
    "def fail():\n    yield 1\n    raise KeyError('mine')\n"
    "assert safely(lambda: total(fail())) == 'caught mine'",
    "assert [total(pair) for pair in zip([1, 2], map(twice, [3, 4]))] == [7, 10]",
    "numbers = evens([2])\nassert next(numbers) == 2\ntry:\n    next(numbers)\n"
    "except StopIteration:\n    pass\nelse:\n    assert False",
    "values, table = [1], {}\nextend(values=values, table=table, by=5)\n"
    "assert values == [1, 5] and table == {5: 2}",
    "import copy\np = Point(3)\nq = copy.copy(p)\nr = copy.deepcopy(p)\nq.x = 4\n"
    "assert (p.x, q.x, r.x) == (3, 4, 3) and r == p and r is not p",
    "assert row()._asdict() == {'x': 1, 'y': 2} and row()._replace(x=5) == (5, 2)",
    "assert vars(Point(3)) == {'x': 3, 'y': 0} and f'{Whole(1):>3}' == '>3 1'",
    "a = b = Whole(1)\na += Whole(2)\nassert a is b and int(a) == 3 and int(~a) == -4",
    "a = Whole(1)\ndel a.value\nassert not hasattr(a, 'value') and list(reversed(a)) == [9]",
    "from collections.abc import Callable, Iterable, Iterator, Sized\n"
    "for kind in (Callable, Iterable, Iterator, Sized):\n    assert not isinstance(Plain(), kind)\n"
    "assert isinstance(Node(1), Iterable) and isinstance(twice, Callable)",
    "assert not hasattr(Plain(), '__iter__') and hasattr(Node(1), '__iter__')",
    "try:\n    spend(9)\nexcept Shortage as error:\n    assert error.missing == 2",
    "@logged\ndef three(): return 3\nassert three() == 3 and three.__name__ == 'three'",
    "one, two = (lambda: 1), (lambda: 2)\nevents = Events()\nevents.on(one)\nevents.on(two)\n"
    "events.on(one)\nassert events.fire() == 3\nevents.off(one)\nassert events.fire() == 2",
    "from concurrent.futures import ThreadPoolExecutor\nwith ThreadPoolExecutor(6) as pool:\n"
    "    assert list(pool.map(twice, range(200))) == list(range(0, 400, 2))",
    "try:\n    undefined_name\nexcept NameError:\n    pass\nelse:\n    assert False",
]


@pytest.mark.parametrize("tests_apart", [True, False], ids=["apart", "together"])
@pytest.mark.parametrize("tests", HONEST)
def test_tests_mean_the_same(sandbox, tests, tests_apart):
    outcome = sandbox.run(dedent(PROGRAM), tests=tests, tests_apart=tests_apart)
    assert outcome.kind == "ok", outcome.stderr


@pytest.mark.parametrize("tests_apart", [True, False], ids=["apart", "together"])
@pytest.mark.parametrize(
    "tests",
    [
        *("assert twice(2) == 5", "undefined()", "spend(8)", "assert Point(1) == Point(2)"),
        *("def test_twice():\n    assert twice(2) == 5", "from solution import absent"),
        "class TestTwice:\n    def test_twice(self):\n        assert twice(2) == 5",
        "from unittest import TestCase\nclass TestTwice(TestCase):\n    def test_twice(self):\n"
        "        self.assertEqual(twice(2), 5)",
    ],
)
def test_failing_tests_fail(sandbox, tests, tests_apart):
    assert sandbox.run(dedent(PROGRAM), tests=tests, tests_apart=tests_apart).kind == "error"


YES = "class Yes:\n    def __eq__(self, other): return True\n    __hash__ = None\n"
DECEIVERS = {
    "equals everything": YES + "def f(x): return Yes()",
    "is a class that equals everything": YES + "class f(Yes):\n    def __init__(self, x): pass",
    "hides it in a list": YES + "class L(list):\n    __eq__ = Yes.__eq__\ndef f(x): return L()",
    "is a number that equals everything": (
        "class N(float):\n    def __eq__(self, other): return True\n"
        "    def __sub__(self, other): return 0.0\n    def __lt__(self, other): return True\n"
        "def f(x): return N(1)"
    ),
    "is no number and subtracts to zero": (
        YES + "class Zero(Yes):\n    def __sub__(self, other): return 0.0\n"
        "    __rsub__ = __sub__\n    def __abs__(self): return 0.0\n"
        "    def __lt__(self, other): return True\ndef f(x): return Zero()"
    ),
    "takes an object that does": "from unittest.mock import ANY\ndef f(x): return ANY",
    "patches a module": (
        "import math\nmath.isclose = lambda *values, **more: True\n"
        "math.__dict__['fabs'] = lambda x: 0.0\ndef f(x): return 0.0"
    ),
    "redefines a function": "def abs(x): return 0\ndef all(x): return True\ndef f(x): return 0.0",
    "reads the stack": (
        "import sys\ndef f(x):\n    frame = sys._getframe()\n    while frame:\n"
        "        for value in list(frame.f_locals.values()):\n"
        "            for text in (value, getattr(value, 'tests', ''), getattr(\n"
        "                    getattr(value, '_job', None), 'tests', '')):\n"
        "                if ''.join(['f(1', '.5)']) in str(text)[:1000]: return 2.25\n"
        "        frame = frame.f_back\n    return 0.0"
    ),
    "reads all objects": (
        "import gc\ndef f(x):\n    for thing in gc.get_objects():\n"
        "        for value in gc.get_referents(thing):\n"
        "            if isinstance(value, str) and ''.join(['f(1', '.5)']) in value: return 2.25\n"
        "    return 0.0"
    ),
    "writes to every descriptor": (
        "import os\ndef f(x):\n    for descriptor in range(3, 64):\n"
        "        try: os.write(descriptor, b'+' * 17)\n        except OSError: pass\n"
    ),
    "ends where an error is expected": "import os\ndef f(x):\n    os._exit(0)",
}
EXPECTATIONS = [
    "assert f(1.5) == 2.25",
    "assert f(1.5) in [2.25]",
    "assert not f(1.5) != 2.25",
    "assert abs(f(1.5) - 2.25) < 1e-6",
    "import math\nassert math.isclose(f(1.5), 2.25) and all([abs(f(1.5) - 2.25) < 1e-6])",
    "import math\nassert math.isclose(f(1.5), 2.25) or math.fabs(f(1.5) - 2.25) < 1e-6",
    "try:\n    f('x')\nexcept Exception:\n    pass\nassert f(1.5) == 2.25",
]


@pytest.mark.parametrize("name", DECEIVERS)
def test_deceivers_fail(sandbox, name):
    for tests in EXPECTATIONS:
        assert sandbox.run(DECEIVERS[name], tests=tests).kind != "ok", tests


@pytest.mark.parametrize("path", ["__path__", "__spec__", "__loader__"])
def test_a_program_is_no_package(sandbox, path):
    """Its files would be imported into the tests' process."""
    program = f"""
        import os
        with open("f.py", "w") as file:
            file.write("from unittest.mock import ANY\\ndef f(x): return ANY\\nf.f = f")
        {path} = [os.getcwd()]
    """
    for tests in ("from solution import f\nf.f(2)", "import solution.f\nsolution.f.f(2)"):
        assert sandbox.run(dedent(program), tests=tests).kind == "error"


SWALLOWS = """
    import functools
    def quiet(function):
        @functools.wraps(function)
        def call(*values):
            try:
                return function(*values)
            except BaseException:
                return None
        return call
    def stop(x): assert x > 0, "too small"
"""


@pytest.mark.parametrize(
    ("tests", "kind"),
    [
        ("@quiet\ndef check():\n    assert False\ncheck()", "error"),
        ("def check():\n    assert False\nquiet(lambda: check())()", "error"),
        ("def fail():\n    raise KeyError\nassert quiet(fail)() is None", "ok"),
        ("assert quiet(lambda: stop(0))() is None", "ok"),
        (
            "def check():\n    assert False\ntry:\n    quiet(check)()\n    raise KeyError\n"
            "except AssertionError:\n    assert quiet(lambda: 5)() == 5",
            "ok",
        ),
    ],
)
def test_a_program_does_not_swallow_a_failed_assertion(sandbox, tests, kind):
    assert sandbox.run(dedent(SWALLOWS), tests=tests).kind == kind


@pytest.mark.parametrize(
    "claim",
    [
        "callable(f(3))",
        "hasattr(f(3), '__next__')",
        "isinstance(f(3), collections.abc.Iterator)",
        "isinstance(f(3), collections.abc.Sized)",
        "isinstance(f(3), contextlib.AbstractContextManager)",
        "isinstance(f(3), typing.SupportsInt)",
    ],
)
def test_objects_do_not_pass_for_more_than_they_are(sandbox, claim):
    tests = f"import collections.abc, contextlib, typing\nassert {claim}"
    for answer in ("object()", "type('A', (), {'__iter__': None, '__call__': None})()"):
        assert sandbox.run(f"def f(x): return {answer}", tests=tests).kind == "error"


def test_the_honest_program_passes(sandbox):
    for tests in EXPECTATIONS:
        assert sandbox.run("def f(x): return x * x", tests=tests).kind == "ok"


@pytest.mark.parametrize("name", [name for name in DECEIVERS if " descriptor" not in name])
def test_deceivers_are_what_they_say(sandbox, name):
    """In the program's process some tests believe them, except for one that ends too early."""
    kinds = {sandbox.run(DECEIVERS[name], tests=t, tests_apart=False).kind for t in EXPECTATIONS}
    assert ("ok" in kinds) == (name != "ends where an error is expected")


@pytest.mark.parametrize("call", ["process_vm_readv", "process_vm_writev", "ptrace"])
def test_the_tests_process_is_out_of_reach(sandbox, call):
    """The tests' process is the program's parent, and has its memory at the same addresses."""
    program = f"""
        import ctypes, os
        text = ctypes.create_string_buffer(b"secret")
        piece = (ctypes.c_size_t * 2)(ctypes.addressof(text), 6)

        def reach(pid):
            libc = ctypes.CDLL(None, use_errno=True)
            if {call!r} == "ptrace":
                return libc.ptrace(16, pid, None, None)  # attach
            return libc.{call}(pid, piece, 1, piece, 1, 0)

        def reach_parent():
            return reach(os.getppid())
    """
    outcome = sandbox.run(dedent(program), tests="assert reach_parent() == -1")
    assert outcome.kind == "ok", outcome.stderr


def test_what_cannot_cross_is_not_a_wrong_answer(sandbox):
    tests = "class Box: pass\nassert twice(Box()) == 2"
    with pytest.raises(SandboxError, match=r"hand the program a Box; run such .*tests_apart=False"):
        sandbox.run(dedent(PROGRAM), tests=tests)
    swallowed = "class Box: pass\ntry:\n    twice(Box())\nexcept Exception:\n    pass"
    with pytest.raises(SandboxError, match="Box"):
        sandbox.run(dedent(PROGRAM), tests=swallowed)


def test_the_program_may_not_ask_for_more_than_it_was_given(sandbox):
    """It can call the functions that the tests passed to it, and look into none of them."""
    program = """
        def apply(function):
            try:
                function.__globals__
            except TypeError as error:
                return str(error)
            except Exception as error:
                return repr(error)
            return "got them"
    """
    tests = "result = apply(lambda: 1)\nassert result != 'got them', result\nprint(result)"
    outcome = sandbox.run(dedent(program), tests=tests)
    assert outcome.kind == "ok", outcome.stderr
    assert "'Given' object has no attribute '__globals__'" in outcome.stdout
    program = """
        def ask(function, operation, name):
            link = function._remote_link
            try:
                return link.request(operation, function, name)
            except KeyError as error:
                return str(error)
    """
    for operation in ("__getattr__", "__eq__", "__setattr__"):
        tests = f'assert ask(lambda: 1, "{operation}", "__globals__") == "\'{operation}\'"'
        outcome = sandbox.run(dedent(program), tests=tests)
        assert outcome.kind == "ok", outcome.stderr


def test_errors_show_where_the_program_failed(sandbox):
    stderr = sandbox.run("def f(x):\n    return 1 / x", tests="assert f(0) == 1").stderr
    assert "return 1 / x" in stderr and "ZeroDivisionError" in stderr


def test_program_that_fails_before_its_tests(sandbox):
    outcome = sandbox.run("raise OSError('early')", tests="assert True")
    assert outcome.kind == "error" and "OSError: early" in outcome.stderr
    assert sandbox.run("x = bytearray(10**10)", tests="assert True").kind == "memory"
    assert sandbox.run("def f(): return bytearray(10**10)", tests="f()").kind == "memory"
