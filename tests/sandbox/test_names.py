"""Names that code defines, and those that tests take from a program."""

import pytest

from roll_lite.sandbox.names import (
    defined_and_used_names,
    does_something,
    imports,
    names_from_program,
    uncalled_tests,
)

CODE = """
import os.path, sys as system
from math import pi as number
total: int = 0
if total:
    class Box:
        inside = hidden
def f(argument):
    global made
    made = [argument for item in other]
    local = abs(total)
"""


def test_names_of_a_program():
    defined, used = defined_and_used_names(CODE)
    assert defined == {"os", "system", "number", "total", "Box", "f", "made"}
    assert used == {"int", "total", "hidden", "other", "abs"}
    assert imports(CODE) == [("os", "os"), ("sys", "sys"), ("math", "pi")]


@pytest.mark.parametrize(
    ("tests", "expected"),
    [
        ("assert f(3) == abs(-9)", {"f"}),
        ("def check(g):\n    assert all([g(3) == 9])\ncheck(f)", {"f"}),
        ("assert Solution().f(3) == math.inf", {"Solution"}),
        ("assert sum(1, 2) == 3", {"sum"}),
        ("assert len(sum(1, 2)) == 3", {"sum"}),
        ("from solution import f as g\nassert all(g(3))", {"f"}),
        ("def test():\n    import solution\n    assert all(solution.f(3))", {"solution"}),
        ("from solution import *\nassert f(3)", {"f"}),
        ("if __name__ == '__main__':\n    assert f(3)", {"f"}),
        ("assert f(3) == sqrt(9) and Counter(f(1))", {"f"}),
        ("assert abs(sqrt(2) - 1.414) < 1e-3 and isclose(sqrt(4), 2)", {"sqrt"}),
        ("assert gcd(4, 6) == 2 and lcm(4, 6) == 12", {"gcd", "lcm"}),
        ("d = deque()\nd.append(1)\nassert len(d) == 1", {"deque"}),
        ("for x in range(3):\n    assert all([sum([x]) == x])", {"sum"}),
        ("assert abs(-3) == 3", {"abs"}),
        ("assert all(abs(x) == -x for x in [-1])", {"all", "abs"}),
        ("from solution import gcd, abs\nassert abs(gcd(4, 6)) == sqrt(4)", {"gcd", "abs"}),
        ("assert globals()['f'](3) == isclose(9, 9)", {"globals"}),
    ],
)
def test_names_that_tests_take_from_the_program(tests, expected):
    assert names_from_program(tests) == expected


@pytest.mark.parametrize(
    ("code", "names", "does"),
    [
        ("def test_a(): pass\ndef helper(): pass\nclass TestB: pass", ["test_a", "TestB"], False),
        ("def test_a(): pass\ntest_a()", [], True),
        ("def test_a(): pass\ndef run(): test_a()\nrun()", [], True),
        ("async def test_a(): pass\nx = {'a': 1}", ["test_a"], False),
        ("def check(): assert f()", [], False),
        ("'''text'''\nif x:\n    assert f", [], True),
    ],
)
def test_tests_that_are_left_uncalled(code, names, does):
    assert [test.name for test in uncalled_tests(code)] == names
    assert does_something(code) == does
