"""Which process holds what: the program, its tests, earlier jobs. And whose fault a failure is."""

from textwrap import dedent

import pytest

from roll_lite.sandbox.sandbox import Limits, SandboxError

SQUARE = "def f(x): return x * x\n"


@pytest.fixture(params=["either", pytest.param("rlimits", marks=pytest.mark.slow)])
def sandbox(request):
    """What separates processes is the same in both kinds."""
    return request.getfixturevalue(request.param)


# Tests cannot be made to import or run anything

NAMED = {
    "a module that shows a poem": "import types\ndef f(x): return types.ModuleType('this')",
    "a module by another name": "import math\nmath.__name__ = 'this'\nf = math",
    "a class of modules": "import types\nclass M(types.ModuleType): pass\nf = M('this')",
    "a class by another name": (
        "class Meta(type): __name__ = 'exec'\nclass f(metaclass=Meta):\n"
        "    def __init__(self, x): pass"
    ),
    "a function of Python": "f = __import__",
    "an object that pickles": (
        "class P:\n    def __reduce__(self): return (print, ('RAN',))\ndef f(x): return P()"
    ),
    "an object of another class": (
        "class P:\n    __class__ = property(lambda self: __import__('types').ModuleType)\n"
        "    __name__ = 'this'\ndef f(x): return P()"
    ),
    "fields that are methods": (
        "class R(tuple):\n    _fields = ('__eq__', '__class__', 'a b', '')\n"
        "def f(x): return R((1, 2, 3, 4))"
    ),
}


@pytest.mark.parametrize("name", NAMED)
def test_nothing_that_the_program_names_is_imported(sandbox, name):
    """The tests look at their own process: new modules, and what was printed."""
    tests = """
        import sys
        known = set(sys.modules)
        try:
            assert f(3) == 9, "no square"
        except Exception as error:
            seen = error
        assert set(sys.modules) <= known | {"traceback", "solution"}, set(sys.modules) - known
    """
    outcome = sandbox.run(NAMED[name], tests=dedent(tests))
    assert (outcome.kind, outcome.stdout) == ("ok", ""), outcome.stderr
    assert sandbox.run(NAMED[name], tests="assert f(3) == 9").kind == "error"


def test_a_module_cannot_run_the_programs_files(sandbox):
    """`unittest.__main__` runs the tests of the working folder, which it shared once."""
    program = """
        with open("test_all.py", "w") as file:
            file.write("from unittest import *\\nclass T(TestCase):\\n def test(self): pass\\n")
        import types
        def f(x):
            return types.ModuleType("unittest.__main__")
    """
    outcome = sandbox.run(dedent(program), tests="assert f(3) == 9")
    assert outcome.kind == "error" and "Ran 1 test" not in outcome.stderr


def test_the_program_and_its_tests_share_no_folder(sandbox):
    program = "open('left', 'w').close()\nimport os\ndef f(): return os.listdir('.')"
    tests = """
        import os, sys
        assert f() == ["left"] and os.listdir(".") == []
        open("mine", "w").close()
        assert f() == ["left"] and os.listdir(".") == ["mine"]
        assert "" not in sys.path and "." not in sys.path
    """
    outcome = sandbox.run(dedent(program), tests=dedent(tests))
    assert outcome.kind == "ok", outcome.stderr


def test_the_program_cannot_signal_its_tests(full):
    program = """
        import os
        def f():
            reached = []
            for pid in range(1, 300):
                try:
                    os.kill(pid, 0)
                    reached.append(pid)
                except OSError:
                    pass
            return len(reached)
    """
    outcome = full.run(dedent(program), tests="assert f() <= 2")  # itself and perhaps init
    assert outcome.kind == "ok", outcome.stderr


@pytest.mark.parametrize("name", ["math", "operator", "cmath"])
def test_modules_in_tests_are_pythons_own(sandbox, name):
    """Even if the tests leave their import to the program, which has something else instead."""
    liar = f"""
        class {name}:
            isclose = eq = staticmethod(lambda *values, **more: True)
        def f(x): return 0
    """
    test = "eq(f(3), 9)" if name == "operator" else "isclose(f(3), 9)"
    assert sandbox.run(dedent(liar), tests=f"assert {name}.{test}").kind == "error"
    patched = (
        f"import {name}\n{name}.isclose = {name}.eq = lambda *values: True\ndef f(x): return 0"
    )
    assert sandbox.run(patched, tests=f"assert {name}.{test}").kind == "error"
    honest = f"import {name}\n{SQUARE}"
    assert sandbox.run(honest, tests=f"assert {name}.{test}").kind == "ok"


@pytest.mark.parametrize(
    ("lie", "test"),
    [
        ("def Counter(x): return 0", "Counter(f('aab')) == Counter('baa')"),
        ("def sqrt(x): return f(0)", "f(9) == sqrt(9)"),
        ("class deque(list):\n    __eq__ = lambda *_: True", "deque(f('ab')) == deque('ab')"),
        ("pi = 0", "f(1) == pi"),
        ("def Counter(x): return 0", "(lambda c: Counter(c('aab')) == Counter('baa'))(f)"),
    ],
)
def test_usual_names_beside_the_programs_are_pythons_own(sandbox, lie, test):
    """Not what a program makes of them, which the tests would hand what they expect."""
    wrong = f"{lie}\ndef f(x): return 0"
    assert sandbox.run(wrong, tests=f"assert {test}").kind == "error"
    honest = "from math import *\nfrom collections import *\ndef f(x): return "
    value = {"f(9)": "sqrt(x)", "f(1)": "pi"}.get(test[:4], "x")
    assert sandbox.run(honest + value, tests=f"assert {test}").kind == "ok"


POSING = "from collections import namedtuple\n{0} = namedtuple('M', '{1}')(lambda *a, **k: {2})\n"


@pytest.mark.parametrize(
    ("name", "field", "test"),
    [
        ("math", "isclose", "math.isclose(f(2), 1.41, abs_tol=0.1)"),
        ("operator", "eq", "operator.eq(f(2), 1.41)"),
        ("re", "fullmatch", "re.fullmatch('a+', f(2))"),
    ],
)
def test_data_cannot_pass_for_a_module(sandbox, name, field, test):
    """A named tuple of the program has attributes, which may be functions."""
    program = POSING.format(name, field, "True") + "def f(x): return 0"
    assert sandbox.run(program, tests=f"assert {test}").kind == "error"


def test_a_class_of_usual_things_cannot_be_posed_as(sandbox):
    posing = POSING.format("chain", "from_iterable", "[1, 2]") + "def f(x): return 0"
    tests = "assert list(chain.from_iterable(f(2))) == [1, 2]"
    assert sandbox.run(posing, tests=tests).kind == "error"


@pytest.mark.parametrize(
    ("program", "tests"),
    [
        ("string = 'abc'", "assert string.upper() == 'ABC' and string == 'abc'"),
        ("copy = [1]", "assert copy.copy() == [1]"),
        (
            "from collections import namedtuple\ntime = namedtuple('T', 'h m')(1, 2)",
            "assert time.h == 1 and time == (1, 2)",
        ),
        ("count = namedtuple('Count', 'a b')(1, 2)", "assert count.b == 2"),
    ],
)
def test_data_that_is_named_as_a_module_is_the_programs(sandbox, program, tests):
    outcome = sandbox.run(program, tests=tests)
    assert outcome.kind == "ok", outcome.stderr


ENDS = {
    "raises it": "def f(x): raise StopIteration",
    "raises one of its own": "class E(StopIteration): pass\ndef f(x): raise E(4)",
    "has one by another name": "E = type('ValueError', (StopIteration,), {})\ndef f(x): raise E",
    "asks an iterator": "def f(x): return next(iter([]))",
    "cannot be asked": "class F:\n    def __call__(self, x): raise StopIteration\nf = F()",
    "raises the one of coroutines": "def f(x): raise StopAsyncIteration",
}
ITERATIONS = [
    "assert all(map(lambda x: f(x) == x * x, [1, 2, 3]))",
    "assert all(a == b for a, b in zip(map(f, [1, 2]), [1, 4]))",
    "for x in filter(lambda x: f(x) != x * x, [1, 2]):\n    assert False",
    "class Cases:\n    def __iter__(self): return self\n    def __next__(self): return f(3)\n"
    "for y in Cases():\n    assert y == 9\n    break",
    "import solution\nassert all(map(lambda x: solution.f(x) == x * x, [1, 2, 3]))",
]


@pytest.mark.parametrize("name", ENDS)
def test_a_program_does_not_end_the_iterations_of_tests(sandbox, name):
    for tests in ITERATIONS:
        assert sandbox.run(ENDS[name], tests=tests).kind == "error", tests
        assert sandbox.run(SQUARE, tests=tests).kind == "ok", tests


def test_a_program_does_not_end_asynchronous_iterations(full):
    tests = """
        import asyncio
        class Cases:
            def __aiter__(self): return self
            async def __anext__(self): return f(3)
        async def test():
            async for y in Cases():
                assert y == 9
                break
        asyncio.run(test())
    """
    program = "def f(x): raise StopAsyncIteration"
    assert full.run(program, tests=dedent(tests)).kind == "error"
    assert full.run(SQUARE, tests=dedent(tests)).kind == "ok"


def test_no_other_request_ends_the_iterations_of_tests(sandbox):
    program = """
        class Ends:
            def end(self, *_): raise StopIteration
            __getattr__ = __getitem__ = __len__ = __eq__ = __add__ = __abs__ = __iter__ = end
            __str__ = __bool__ = __enter__ = __contains__ = __round__ = end
        e = Ends()
    """
    for use in ["e.x", "e[0]", "len(e)", "e == e", "e + e", "abs(e)", "list(e)", "str(e)"]:
        tests = f"assert list(map(lambda x: {use}, [1, 2])) == []"
        outcome = sandbox.run(dedent(program), tests=tests)
        assert outcome.kind == "error" and "RuntimeError" in outcome.stderr, (use, outcome)


HANDED = ["iter([1])", "map(str, [1])", "(x for x in 'a')", "{1: 2}.keys()", "{1: 2}.values()"]


@pytest.mark.parametrize("handed", HANDED)
def test_a_wrong_answer_that_is_handed_an_iterator_is_wrong(sandbox, handed):
    """Where the right answer is a list, which takes it in the tests' own process."""
    tests = f"result = f(3)\nresult.extend({handed})\nassert len(result) == 2"
    assert sandbox.run("def f(x): return [x]", tests=tests).kind == "ok"
    for wrong in ("class R: pass", "class R:\n    def extend(self, x): pass"):
        assert sandbox.run(f"{wrong}\ndef f(x): return R()", tests=tests).kind == "error"


def test_an_iterator_gives_nothing_but_its_items(sandbox):
    program = """
        def f(values):
            link = values.gi_frame.f_locals["self"]
            remote = values.gi_frame.f_locals["iterator"]
            got = []
            for operation, *operands in (
                ("__call__",), ("__getattr__", "gi_frame"), ("send", 1), ("throw", ValueError),
                ("__iter__",), ("__str__",), ("__len__",), ("__class__",), ("close",),
            ):
                try:
                    got.append((operation, link.request(operation, remote, *operands)))
                except Exception:
                    pass
            try:
                got.append(("function", link.request("__next__", check)))
            except TypeError:
                pass
            return [*got, *values]
        def hold(function):
            global check
            check = function
    """
    tests = """
        expected = 9
        def numbers():
            secret = expected
            yield 1
            yield 2
        hold(lambda: 1)
        result = f(numbers())
        assert result == [1, 2], result
    """
    outcome = sandbox.run(dedent(program), tests=dedent(tests))
    assert outcome.kind == "ok", outcome.stderr


def test_a_program_may_be_asked_for_a_usual_name(sandbox):
    for tests in ("assert gcd(12, 18) == 6", "def check(f): assert f(12, 18) == 6\ncheck(gcd)"):
        assert sandbox.run("def gcd(a, b): return 1", tests=tests).kind == "error"
        assert sandbox.run("def gcd(a, b): return 6", tests=tests).kind == "ok"
    assert sandbox.run("count = 3\ndef f(): pass", tests="f()\nassert count == 3").kind == "ok"
    two = "def count(x): return len(x)\ndef total(x): return sum(x)"
    tests = "assert count([5, 6]) == 2 and total([5, 6]) == 11"
    assert sandbox.run(two, tests=tests).kind == "ok"
    assert sandbox.run(two.replace("len(x)", "0"), tests=tests).kind == "error"


@pytest.mark.parametrize(
    ("program", "tests"),
    [
        ("def f(x): return map(str, x)", "assert f('bac')[:2] == ['b', 'a']"),
        ("class P:\n    pass\ndef f(x): return P()", "assert f('bac')[1:] == 'ac'"),
        (
            "class M:\n    def __enter__(self): return 1\n    def __exit__(self, *_): pass\n"
            "def f(x): return M()",
            "with f(3) as x:\n    assert x == 10",
        ),
    ],
)
def test_wrong_answers_are_no_errors_of_the_sandbox(sandbox, program, tests):
    """A test that does with them what it would do with data."""
    assert sandbox.run(program, tests=tests).kind == "error"


def test_objects_of_the_program_can_be_cut_and_entered(sandbox):
    program = """
        class Deck:
            def __getitem__(self, index): return [1, 2, 3][index]
            def __enter__(self): return self
            def __exit__(self, kind, *_): self.left = kind is None
    """
    tests = """
        deck = Deck()
        assert deck[1:] == [2, 3] and deck[::-1] == [3, 2, 1] and deck[0] == 1
        with deck as same:
            assert same[0] == 1
        assert deck.left
    """
    outcome = sandbox.run(dedent(program), tests=dedent(tests))
    assert outcome.kind == "ok", outcome.stderr


def test_functions_of_python_that_tests_pass_run_in_the_program(sandbox):
    """The program may call what it is given, so that must not be the tests' own eval."""
    program = """
        def apply(function, *values): return function(*values)
        def steal(function): return function("__import__('sys').modules['solution'] and 9")
    """
    tests = """
        import math, operator
        assert apply(len, [1, 2]) == 2 and apply(math.sqrt, 4) == 2.0
        assert apply(operator.add, 1, 2) == 3 and apply(sorted, [2, 1]) == [1, 2]
        try:
            steal(eval)
        except KeyError:
            pass  # there is no module `solution` in the program's process
        else:
            raise AssertionError("it ran here")
    """
    outcome = sandbox.run(dedent(program), tests=dedent(tests))
    assert outcome.kind == "ok", outcome.stderr


# Memory

SEARCH = """
    import ctypes, os
    libc = ctypes.CDLL(None)
    libc.sbrk.restype = ctypes.c_void_p
    reading, writing = os.pipe()

    def pages():
        "Of the heap and of the arenas, read without touching what is not mapped."
        brk, near = libc.sbrk(ctypes.c_long(0)), id([])
        for low, high in ((brk - 2**25, brk), (near - 2**26, near + 2**26)):
            for page in range(low & ~0xFFFF, high, 0x10000):
                if libc.write(writing, ctypes.c_void_p(page), 0x10000) > 0:
                    yield os.read(reading, 0x10000).translate(NEXT)

    NEXT = bytes((byte + 1) % 256 for byte in range(256))

    def found(*texts):
        "Texts, of which each letter is given as the next, so that they are not here themselves."
        return sorted({text for page in pages() for text in texts if text in page})
"""


def shifted(*texts: str) -> str:
    """Arguments for `found`."""
    return ", ".join(repr(bytes(byte + 1 for byte in text.encode())) for text in texts)


def test_the_search_finds_what_is_there(sandbox):
    wanted = shifted("plugh-42"), shifted("plugh-no")
    program = dedent(SEARCH) + f"\nx = 'plugh-' + str(7 * 6)\nprint(found({', '.join(wanted)}))"
    assert sandbox.run(program).stdout == f"[{wanted[0]}]\n"


def test_the_tests_are_not_in_the_programs_memory(sandbox):
    outcome = sandbox.run(dedent(SEARCH), tests=f"assert not found({shifted('xyzzy')})  # xyzzy")
    assert outcome.kind == "ok", outcome.stderr


def test_earlier_jobs_are_not_in_a_programs_memory(sandbox):
    for number in range(5):
        tests = f"assert f({number}) == {number**2}  # of-the-tests" + "!" * 5000
        program = f"{SQUARE}# of-the-source {'!' * 5000}\nprint('of-the-', 'print' * 1000, sep='')"
        assert sandbox.run(program, tests=tests).kind == "ok"
        assert sandbox.run("print(input())", stdin="of-the-input" * 100).kind == "ok"
    wanted = shifted("of-the-tests", "of-the-source", "of-the-print", "of-the-input")
    assert sandbox.run(dedent(SEARCH) + f"\nprint(found({wanted}))").stdout == "[]\n"


# Failures are the program's

BOTH = "class E({}): pass\ndef f(x): raise E({})\n"
FAILURES = {
    "exits as an error": BOTH.format("SystemExit, ValueError", 87),
    "errs as an exit": BOTH.format("ValueError, SystemExit", 0),
    "interrupts as an error": BOTH.format("KeyboardInterrupt, KeyError", 0),
    "exits with an odd code": (
        "class C:\n    def __str__(self): raise SystemExit(0)\nraise SystemExit(C())"
    ),
    "exits with no code": "class S(SystemExit):\n    code = property(lambda self: 1 / 0)\nraise S",
    "raises what cannot be shown": (
        "class E(Exception):\n    def __str__(self): raise KeyboardInterrupt\nraise E"
    ),
    "raises without a base": (
        "class M(type):\n    __mro__ = ()\n    __name__ = 3\n"
        "class E(Exception, metaclass=M): pass\ndef f(x): raise E"
    ),
    "closes everything": "import os\nos.closerange(0, 99)\ndef f(x): return 9",
    "closes everything later": "import os\ndef f(x):\n    os.closerange(0, 99)\n    return 9",
    "patches the end": (
        "import os\nos._exit = lambda code: None\nimport sys\nsys.exit = None\nraise SystemExit(0)"
    ),
    "nests folders": (
        "import os\nfor _ in range(1200):\n    os.mkdir('d')\n    os.chdir('d')\ndef f(x): return 0"
    ),
    "removes its folder": (
        "import os, shutil\nshutil.rmtree(os.getcwd(), ignore_errors=True)\n"
        "try: os.rename(os.getcwd(), '../moved')\nexcept OSError: pass\ndef f(x): return 0"
    ),
    "asks for what cannot cross": (
        "def f(x): return 0\ndef apply(g):\n    g(object)\n    g(ValueError)\n    return g(g)"
    ),
    "answers with junk": (
        "import os\ndef f(x):\n    for n in range(3, 64):\n"
        "        try: os.write(n, b'\\0\\0\\0\\4[1,2')\n        except OSError: pass"
    ),
    "answers too deep": "def f(x):\n    r = []\n    for _ in range(10**5): r = [r]\n    return r",
    "is killed": "import os\nos.kill(os.getpid(), 9)",
    "stops": "import os\ndef f(x): os.kill(os.getpid(), 19)",
}  # fmt: skip


@pytest.mark.parametrize("name", FAILURES)
def test_whatever_a_program_does_is_its_failure(sandbox, name):
    """No SandboxError, with the tests apart or not; and the sandbox goes on."""
    tests = "apply(lambda kind: kind()) if 'cross' in NAME else None\nassert f(3) == 9"
    tests = tests.replace("NAME", repr(name))
    limits = Limits(seconds=1)
    assert sandbox.run(FAILURES[name], tests=tests, limits=limits).kind != "ok"
    sandbox.run(FAILURES[name], limits=limits)
    assert sandbox.run(SQUARE, tests="assert f(3) == 9").kind == "ok"


def test_tests_that_cannot_run_apart_are_an_error(sandbox):
    """What they hand over themselves, and what their functions return to data."""
    for tests in ("f(object())", "class B: pass\napply(lambda x: B(), 1)"):
        with pytest.raises(SandboxError, match="tests_apart=False"):
            sandbox.run(f"{SQUARE}def apply(g, x): return g(x)", tests=tests)


def test_tests_that_catch_everything_do_not_pass_with_a_dead_program(sandbox):
    program = "import os\ndef f(x): os._exit(0)"
    tests = "try:\n    f(3)\nexcept BaseException:\n    pass\nassert True"
    assert sandbox.run(program, tests=tests).kind == "error"
