"""Right programs score 1, wrong ones 0, and those that only look right 0 as well."""

import ast
import asyncio
import builtins
import json
import os
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from roll_lite.rewards import code
from roll_lite.rewards.code import passes_tests, program_of, same_output
from roll_lite.sandbox.sandbox import Limits, Sandbox, SandboxError, SandboxUnavailable
from roll_lite.types import Prompt
from roll_lite.workers.failures import RewardTimeout
from roll_lite.workers.pool import RewardWorkers

HUMANEVAL, MBPP = os.environ.get("ROLL_LITE_HUMANEVAL"), os.environ.get("ROLL_LITE_MBPP")

PROBLEMS = {  # name: (a right program, a wrong one, tests)
    "square": ("def f(x): return x * x", "def f(x): return x + x", "assert f(3) == 9"),
    "reverse": (
        "def rev(s):\n    return s[::-1]",
        "def rev(s):\n    return s",
        "assert rev('abc') == 'cba'\nassert rev('') == ''",
    ),
    "fibonacci": (
        "def fib(n):\n    a, b = 0, 1\n    for _ in range(n): a, b = b, a + b\n    return a",
        "def fib(n):\n    return n if n < 2 else fib(n - 1) + fib(n - 3)",
        "assert [fib(n) for n in range(8)] == [0, 1, 1, 2, 3, 5, 8, 13]",
    ),
    "prime": (
        "def is_prime(n):\n    return n > 1 and all(n % d for d in range(2, int(n ** 0.5) + 1))",
        "def is_prime(n):\n    return n % 2 == 1",
        "def check(g): assert g(7) and g(2) and not g(9) and not g(1)\ncheck(is_prime)",
    ),
    "stack": (
        "class Stack:\n    def __init__(self): self.items = []\n"
        "    def push(self, x): self.items.append(x)\n    def pop(self): return self.items.pop()\n"
        "    def __len__(self): return len(self.items)",
        "class Stack:\n    def __init__(self): self.items = []\n"
        "    def push(self, x): self.items.append(x)\n    def pop(self): return self.items.pop(0)\n"
        "    def __len__(self): return len(self.items)",
        "s = Stack()\ns.push(1)\ns.push(2)\nassert len(s) == 2\nassert s.pop() == 2\n",
    ),
    "sorting in place": (
        "def order(values): values.sort()",
        "def order(values): return sorted(values)",
        "values = [3, 1, 2]\norder(values)\nassert values == [1, 2, 3]",
    ),
    "generator": (
        "def evens(n):\n    for i in range(0, n, 2):\n        yield i",
        "def evens(n):\n    yield from range(n)",
        "assert list(evens(6)) == [0, 2, 4]",
    ),
    "callback": (
        "def apply(g, xs): return [g(x) for x in xs]",
        "def apply(g, xs): return xs",
        "assert apply(lambda x: x + 1, [1, 2]) == [2, 3]",
    ),
    "exception": (
        "def root(x):\n    if x < 0: raise ValueError('negative')\n    return x ** 0.5",
        "def root(x): return abs(x) ** 0.5",
        "assert abs(root(2) - 2 ** 0.5) < 1e-9\ntry:\n    root(-1)\nexcept ValueError as error:\n"
        "    assert 'negative' in str(error)\nelse:\n    assert False",
    ),
    "words": (
        "from collections import Counter\ndef count(text): return Counter(text.split())",
        "def count(text): return {w: 1 for w in text.split()}",
        "assert count('a b a') == {'a': 2, 'b': 1}",
    ),
    "standard input": (
        "n = int(input())\nprint(sum(int(input()) for _ in range(n)))",
        "print(input())",
        {"input": "2\n3\n4\n", "output": "7\n"},
    ),
    "several lines": (
        "import sys\nfor line in sys.stdin:\n    print(line.strip().upper() + '  ')\nprint()",
        "import sys\nfor line in sys.stdin:\n    print('', line.strip().title())",
        {"input": "ab\ncd", "output": "AB\nCD"},
    ),
    "a builtin's name": (
        "def sum(a, b):\n    return len([n for n in range(1, min(a, b)) if not (a % n or b % n)])",
        "def sum(a, b):\n    return a + b",
        "assert sum(10, 15) == 2\nassert list(map(int, [sum(4, 6)])) == [2]",
    ),
    "builtins beside the function": (
        "def max(a, b): return a if a > b else b\ndef top(v): return max(v[0], v[1])",
        "def max(*values): return 7\ndef sorted(v): return v\ndef top(v): return 7",
        "assert max([top([1, 5]), top([2, 3])]) == 5 and sorted([top([4, 3]), 1]) == [1, 4]",
    ),
    "usual imports": (
        "def f(v: List[int]) -> Optional[float]:\n    heapify(v)\n"
        "    return math.sqrt(v[0]) + collections.Counter(v)[v[0]]",
        "def f(v: List[int]) -> Optional[float]:\n    heapify(v)\n    return sqrt(v[0])",
        "assert f([9, 4, 4]) == 4.0 and math.isclose(f([1]), 2)",
    ),
    "imported": (
        "def gcd(a, b): return a if not b else gcd(b, a % b)\nclass Box: size = 2",
        "def gcd(a, b): return b\nclass Box: size = 2",
        "from solution import Box, gcd as g\nfrom solution import *\nimport solution\n"
        "assert g(12, 18) == solution.gcd(18, 12) == 6 and Box.size == 2",
    ),
    "test functions": (
        "def add(a, b): return a + b",
        "def add(a, b): return a + b if a else 0",
        "from solution import add\nCASES = [(0, 1, 1)]\ndef check(a, b, c):\n"
        "    assert add(a, b) == c\n\ndef test_one():\n    assert add(1, 2) == 3\n\n"
        "def test_cases():\n    for case in CASES:\n        check(*case)",
    ),
    "test classes": (
        "def add(a, b): return a + b",
        "def add(a, b): return a + b if b else 0",
        "import unittest\nclass TestAdd(unittest.TestCase):\n    def setUp(self): self.one = 1\n"
        "    def test_add(self): self.assertEqual(add(self.one, 2), 3)\n"
        "class TestMore:\n    def test_zero(self): assert add(1, 0) == 1",
    ),
}


def make_prompt(*tests, id="p0"):
    tests = [test if isinstance(test, dict) else {"code": test} for test in tests]
    return Prompt(id=id, messages=(), domain="code", ground_truth="", tests=tuple(tests))


def reply(source):
    return f"Here it is.\n\n```python\n{source}\n```\nDone."


@pytest.fixture(scope="module")
def judge():
    """The reward, with limits alone where the kernel allows no more."""
    try:
        with Sandbox("full"):
            return passes_tests
    except SandboxUnavailable:
        return partial(passes_tests, isolation="rlimits")


@pytest.mark.parametrize("name", PROBLEMS)
def test_right_and_wrong_programs(judge, name):
    right, wrong, tests = PROBLEMS[name]
    assert judge(make_prompt(tests), reply(right)).value == 1
    assert judge(make_prompt(tests), reply(wrong)).value == 0
    assert judge(make_prompt(tests), reply("pass")).value == 0


GCD = "def gcd(a, b):\n    while b: a, b = b, a % b\n    return a"
SQRT = "def sqrt(x): return x ** 0.5"
LIARS = "\ndef abs(x): return 0\ndef any(x): return True\nall = isclose = lambda *a: True"
ABOUT = {  # name: (tests, programs that pass, programs that do not)
    "a usual function": (
        "assert gcd(12, 8) == 4",
        [GCD, "from math import gcd", "from math import *", "import math\ngcd = math.gcd"],
        ["", "pass", "import math", "def gcd(a, b): return 0", "def f(): gcd = 1", "x = gcd"],
    ),
    "bound in another way": (
        "assert gcd(12, 8) == 4",
        [
            "def f():\n    global gcd\n    from math import gcd\nf()",
            f"exec({GCD!r})",
            "globals().update(gcd=lambda a, b: 4)",
            f"@lambda function: (lambda *a: function(*a))\n{GCD}",
            "class gcd(int):\n    def __new__(cls, a, b): return 4",
            "if True:\n    for gcd in [lambda a, b: 4]: pass",
        ],
        [
            f"{GCD}\ndel gcd",
            f"exec({GCD!r}, {{}})",
            f"@lambda function: None\n{GCD}",
            "class A:\n    def gcd(self, a, b): return 4",
            "import builtins\nbuiltins.gcd = lambda a, b: 4",
            "gcd: object",
        ],
    ),
    "two usual functions": (
        "assert gcd(12, 8) == 4 and lcm(4, 6) == 12",
        ["def gcd(a, b): return 4\ndef lcm(a, b): return 12"],
        ["", "def gcd(a, b): return 0\ndef lcm(a, b): return 12"],
    ),
    "a usual function, by import": (
        "from solution import gcd\nassert gcd(12, 8) == 4",
        [GCD, "from math import gcd"],
        ["", "x = 1"],
    ),
    "a usual function, in a call": (
        "def check(g):\n    assert isclose(g(4), 2)\ncheck(sqrt)",
        [SQRT, "from math import *"],
        ["", LIARS, f"def sqrt(x): return 0{LIARS}"],
    ),
    "a usual function beside builtins": (
        "assert abs(sqrt(2) - 1.414) < 1e-3 and any([sqrt(4) == 2]) and all([sqrt(9) == 3])",
        [SQRT, f"{SQRT}{LIARS}"],
        ["", LIARS, f"def sqrt(x): return 0{LIARS}"],
    ),
    "a usual class": (
        "c = Counter('aab')\nassert len(c) == 2 and c['a'] == 2",
        ["from collections import Counter", "def Counter(text): return {'a': 2, 'b': 1}"],
        ["", "def len(x): return 2", "def Counter(text): return {}\ndef len(x): return 2"],
    ),
    "a function beside a usual class": (
        "assert Counter(f('aab')) == Counter('aab')",
        ["def f(x): return x", "def f(x): return x\ndef Counter(x): return 0"],
        ["", "def f(x): return ''\ndef Counter(x): return 0"],
    ),
    "a function beside a module": (
        "assert math.isclose(f(2), 1.41)",
        ["def f(x): return 1.41", "import math\ndef f(x): return 1.41"],
        ["math = namedtuple('m', 'isclose')(lambda *a: True)\ndef f(x): return 0"],
    ),
    "a function beside a module that nothing imports": (
        "unittest.TestCase().assertEqual(f(2), 4)\nassert isinstance(f(3), numbers.Number)",
        ["def f(x): return x * x", "import unittest\ndef f(x): return x * x"],
        [
            "class Own:\n    def assertEqual(self, *a): pass\n"
            "class unittest: TestCase = Own\ndef f(x): return 0"
        ],
    ),
    "data named as a module": (
        "assert types.count(f(2)) == 1",
        ["types = [4]\ndef f(x): return x * x"],
        ["types = [4]\ndef f(x): return 0"],
    ),
    "a builtin": (
        "assert sorted([3, 1]) == [1, 3]",
        ["def sorted(x): return [1, 3]", "from builtins import sorted"],
        ["", "def sorted(x): return x", "def list(x): return x"],
    ),
    "a builtin in others": (
        "assert all([sorted([3, 1]) == [1, 3]]) and abs(sum([1, 2]) - 3) < 1",
        ["def sorted(x): return [1, 3]\ndef sum(x): return 3", f"def sum(x): return 3{LIARS}"],
        ["", LIARS, f"def sum(x): return 9\ndef sorted(x): return 0{LIARS}"],
    ),
    "an absolute value": (
        "assert abs(-3) == 3", ["def abs(x): return 3"], ["", "def any(x): return 3"]
    ),
    "nothing by its name": (
        "assert globals()['f'](3) == 9", ["def f(x): return 9"], ["", "def f(x): return 8"]
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ABOUT)
def test_a_program_must_bind_what_its_test_is_about(judge, name):
    tests, right, wrong = ABOUT[name]
    prompt = make_prompt(tests)
    assert [judge(prompt, reply(program)).value for program in right] == [1] * len(right)
    assert [judge(prompt, reply(f"#\n{program}")).value for program in wrong] == [0] * len(wrong)
    together = partial(judge, prompt, tests_apart=False)
    assert [together(reply(program)).value for program in (right[0], "pass")] == [1, 0]


def test_parts_and_partial_scores(judge):
    prompt = make_prompt(
        "assert f(1) == 1", "assert f(2) == 4", "assert f(3) == 6", "assert f(0) == 0"
    )
    doubles = reply("def f(x): return 2 * x")
    assert judge(prompt, doubles).value == 0
    score = judge(prompt, doubles, partial=True)
    assert score.value == 0.75
    assert score.parts == {"no_code_block": 0.0, "unreadable": 0.0, "tests_passed": 0.75}
    assert score.reason.startswith("test 1 of 4 failed: ")
    assert judge(make_prompt("assert f(2) == 4"), doubles).reason == "all tests passed"
    prompt = make_prompt(*({"input": a, "output": b} for a, b in (("2", "4"), ("3", "6"))))
    score = judge(prompt, reply("x = int(input()); print(x * x)"))
    assert score.reason == "test 2 of 2 failed: printed '9', expected '6'"


def test_replies_without_python(judge):
    for text, has_block in (("def f(x): return 1", False), (reply("Call f(x) to do it."), True)):
        score = judge(make_prompt("assert f(1) == 1"), text)
        parts = {"no_code_block": float(not has_block), "unreadable": 1.0, "tests_passed": 0.0}
        assert (score.value, score.parts) == (0, parts)
        assert score.reason == ("the code block is not Python" if has_block else "no code block")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("```python\na = 1\n```", "a = 1\n"),
        ("```\na = 1\n```", "a = 1\n"),
        ("```Py title=x\na = 1\n```  \n", "a = 1\n"),
        ("~~~py3\na = 1\n~~~", "a = 1\n"),
        ("``` python3\na = 1\n```", "a = 1\n"),
        ("```python\na = 1\n```\nthen\n```python\nb = 2\n```", "b = 2\n"),
        ("```python\na = 1\n```\nIt prints\n```text\n1\n```", "a = 1\n"),
        ("1. item\n    ```python\n    if a:\n        b = 2\n    ```", "if a:\n    b = 2\n"),
        ("````python\ns = '''\n```\n'''\n````", "s = '''\n```\n'''\n"),
        ("~~~python\ns = '''\n```\n'''\n~~~", "s = '''\n```\n'''\n"),
        ("```python\n```", ""),
        ("```python\na = 1", "a = 1"),
        ("```python\na = 1```\n", "a = 1"),
        ("<think>\n```python\na = 1\n```\n</think>\nNo.", None),
        ("<think>\n```python\na = 1\n```\n", None),
        ("```cpp\nint a;\n```", None),
        ("`a = 1` and ```b = 2```", None),
        ("", None),
    ],
)  # fmt: skip
def test_code_blocks(text, expected):
    assert program_of(text, [{"code": "assert True"}]) == expected


EXAMPLE = "Use it so:\n```python\nimport math\nprint(f(math.pi))\n```\nIt prints\n```\n9\n```"
BLOCKS = {  # name: (a test, the reply before and after the right block, the right block)
    "an example follows": ("assert f(3) == math.inf", "", "def f(x): return x", EXAMPLE),
    "a draft precedes": (
        "assert f(3) == 9", reply("def g(x): pass\ndef f(x):\n    return 0"), "f = abs", EXAMPLE
    ),
    "part of the names": (
        "assert f(g(1)) == 9", reply("def f(x): return 1"), "def f(x): pass\ndef g(x): pass",
        reply("def g(x): return x"),
    ),
    "imported names": (
        "from solution import f\ndef test_f(): assert f(3) == 9", "", "class f: pass", EXAMPLE
    ),
    "a builtin": ("assert sum(1, 2) == 3", "", "def sum(a, b): return a + b", EXAMPLE),
    "a broken block": ("assert f(3) == 9", "", "f = 1", reply("def f(x):")),
    "one that reads": (
        {"input": "1", "output": "2"}, reply("print(input())"), "x = input()\nprint(x)", EXAMPLE
    ),
    "one that prints": (
        {"input": "", "output": "2"}, "", "print(2)", "Output:\n```\n2\n```"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BLOCKS)
def test_the_block_that_the_tests_are_about(name):
    test, before, right, after = BLOCKS[name]
    text = f"{before}\n```python\n{right}\n```\n{after}"
    assert program_of(text, make_prompt(test).tests) == right + "\n"


@pytest.mark.parametrize(
    ("expected", "same", "different"),
    [
        ("1 2\n3", ["1\n2 3\n", " 1  2\t3"], ["1 2", "1 2 3 4", "12 3", ""]),
        ("0.5", ["0.50", ".5", "0.5000004", "5e-1", "+0.5"], ["0.51", "0.500001501", "x", "0.5f"]),
        ("3.0", ["3"], ["\u0663", "\uff13", "\u0663.\u0660"]),
        ("1000000.0", ["1000000", "1000000.9", "1e6"], ["1000002", "1_000_000.0"]),
        ("-2.5e3", ["-2500", "-2500.0"], ["2500"]),
        ("3", ["3"], ["3.0", "03", "2.9999999"]),
        ("nan inf Yes", ["nan inf Yes"], ["nan inf YES", "inf nan Yes"]),
        ("1.5e999", ["1.5e999"], ["9" * 1000]),
        ("", ["", " \n"], ["0"]),
    ],
)
def test_outputs(expected, same, different):
    assert [same_output(text, expected) for text in same] == [True] * len(same)
    assert [same_output(text, expected) for text in different] == [False] * len(different)


@pytest.fixture
def jobs(monkeypatch):
    """The number of outcomes of each call of the sandbox."""
    counts, run = [], code.run_repeatedly

    def counted(*args, **how):
        outcomes = run(*args, **how)
        counts.append(len(outcomes))
        return outcomes

    monkeypatch.setattr(code, "run_repeatedly", counted)
    return counts


def test_many_tests_share_a_sandbox(judge, jobs):
    asserts = [f"assert f({n}) == {n * n}" for n in range(40)]
    assert judge(make_prompt(*asserts), reply("def f(x): return x * x")).value == 1
    assert jobs == [40]
    pairs = [{"input": f"{n}\n", "output": f"{n * n}"} for n in range(10)]
    square = reply("print(int(input()) ** 2)")
    assert judge(make_prompt(*pairs), square).value == 1
    assert jobs[1:] == [1, 2, 4, 3]  # so that a program with wrong outputs ends soon
    assert judge(make_prompt(*pairs), square, partial=True).value == 1
    assert jobs[5:] == [10]


def test_some_tests_fail(judge, jobs):
    """After a test that fails, the others have a sandbox of their own."""
    program = reply("def f(x):\n    if x == 2: raise SystemExit(0)\n    return 1 if x != 4 else 2")
    prompt = make_prompt(*[f"assert f({n}) == 1" for n in range(6)])
    assert judge(prompt, program, partial=True).parts["tests_passed"] == pytest.approx(4 / 6)
    assert jobs == [3, 2, 1]
    assert judge(prompt, program).value == 0
    assert jobs[3:] == [3]
    mixed = make_prompt("x = 1\nassert x", {"input": "", "output": "1"}, "assert f(3) == 1")
    assert judge(mixed, reply("print(1)\ndef f(x): return 1")).value == 1
    assert jobs[4:] == [1, 1, 1]


def test_a_program_with_threads_is_started_for_each_test(judge, jobs):
    program = """
import queue, threading
asked, answers = queue.Queue(), queue.Queue()
def work():
    while True: answers.put(asked.get() ** 2)
threading.Thread(target=work, daemon=True).start()
def f(x):
    asked.put(x)
    return answers.get()
"""
    prompt = make_prompt(*[f"assert f({n}) == {n * n}" for n in range(3)])
    assert judge(prompt, reply(program)).value == 1
    assert jobs == [1, 1, 1]


def test_hanging_programs_take_their_time_and_no_more(judge, monkeypatch):
    """By a clock that every run moves on by its limit, so a busy machine changes nothing."""
    clock, granted, run_repeatedly = SimpleNamespace(now=0.0), [], code.run_repeatedly

    def run(*args, limits, **how):
        granted.append(limits.seconds)
        clock.now += limits.seconds
        return run_repeatedly(*args, limits=limits, **how)

    monkeypatch.setattr(code, "run_repeatedly", run)
    monkeypatch.setattr(code, "time", SimpleNamespace(monotonic=lambda: clock.now))
    prompt = make_prompt(*["assert f(1) == 1"] * 10)
    endless = reply("def f(x):\n    while True: pass")
    short = partial(judge, limits=Limits(seconds=0.4))
    assert short(prompt, endless).value == 0 and granted == [0.4]
    assert short(prompt, endless, partial=True, seconds=1.0).value == 0
    assert granted[1:] == pytest.approx([0.4, 0.4, 0.2])


def test_a_broken_sandbox_is_not_a_wrong_answer(judge, monkeypatch):
    def fail(*args, **kwargs):
        raise SandboxError("no processes left")

    monkeypatch.setattr(code, "run_repeatedly", fail)
    with pytest.raises(SandboxError, match="no processes left"):
        judge(make_prompt("assert True"), reply("x = 1"))


@pytest.mark.parametrize(
    ("tests", "message"),
    [
        ([], "prompt p0 has no tests"),
        ([{"code": "assert f( == 1"}], r"tests\[0\] of prompt p0 is not Python"),
        ([{"code": "  \n"}], r"tests\[0\] of prompt p0 has no code"),
        (["assert 1", {"input": "1"}], r"tests\[1\] of prompt p0 has \['input'\]; give it"),
        ([{"input": 1, "output": "1"}], r"tests\[0\] of prompt p0 must hold texts"),
        (["import pytest\nassert f(1)"], "imports pytest, which the sandbox does not have; use"),
        (["X = 1\ndef check(g): assert g(1)"], "only defines things, so every program would pass"),
        (["def test_f(f): assert f(1)"], "does not call test_f, which needs arguments"),
        (["async def test_f(): assert f(1)"], "does not call test_f, .* an event loop; call it"),
        (["f(1) == 1"], "compares and does nothing with the result, .*; assert it"),
        (["def test_f():\n    yield\n    assert f(1)"], "has test_f, a coroutine or generator"),
        (["class TestF:\n    async def test_f(self): assert f(1)"], "has test_f, a coroutine"),
        (["import asyncio\nasync def g(): assert await f(1)\nasyncio.run(g())"], "awaits, but"),
        (["assert np.isclose(f(1), 1)"], "uses np, which the sandbox does not have"),
        (["assert all(abs(x) == -x for x in [-1])"], "is about abs or all, and does not say which"),
        (["import unittest\nunittest.main()"], "calls unittest.main; leave the call out"),
        (["from unittest import main\nmain()"], "calls unittest.main; leave the call out"),
        (["from unittest import *\nTextTestRunner().run(f)"], "calls TextTestRunner; leave the"),
        (["with pytest.raises(ValueError):\n    f(1)"], "uses pytest, which the sandbox does not"),
        (["assert (f(1) == 1, 'no')"], "asserts a tuple, which always holds"),
        (["class TestF:\n    def check(self): assert f(1)"], "has no test in TestF; name its"),
    ],
)
def test_tests_are_checked(judge, tests, message):
    with pytest.raises(ValueError, match=message):
        judge(make_prompt(*tests), reply("f = abs"))


@pytest.mark.parametrize(
    "program",
    [
        "import os; os._exit(0)",
        "import sys; sys.exit()",
        "raise SystemExit",
        "def check(g): pass\nf = None",
        "import builtins\nbuiltins.all = lambda x: True\ndef f(x): return 0",
        "print('9')\nprint('ok')",
        "def all(x): return True\ndef f(x): return 0",
        "def test_f(): pass\ndef all(x): return True\nf = abs",
    ],
)
@pytest.mark.parametrize(
    "tests",
    [
        "def check(g):\n    assert all([g(3) == 9])\ncheck(f)",
        "from solution import f\ndef test_f(): assert all([f(3) == 9])",
        "def test_f():\n    from solution import f\n    assert all([f(3) == 9])",
    ],
)
def test_nothing_scores_without_its_tests(judge, tests, program):
    for value in (False, True):
        assert judge(make_prompt(tests, tests), reply(program), partial=value).value == 0


def test_in_workers(judge):
    """The sandbox of a worker is its own, and ends with it."""
    prompt = make_prompt("assert f(3) == 9")
    replies = [reply(f"def f(x): return {n} * x") for n in range(6)] + ["no code"]
    replies.append(reply("def f(x):\n    while True: pass"))
    reward = partial(judge, seconds=3.0)

    async def score_all(workers):
        return await asyncio.gather(*(workers.score(prompt, text) for text in replies))

    with RewardWorkers({"code": reward}, num_workers=2, seconds=60.0) as workers:
        scores = asyncio.run(score_all(workers))
        assert workers.metrics()["reward/errors"] == 0
    assert [score.value for score in scores] == [0, 0, 0, 1, 0, 0, 0, 0]


def test_a_worker_takes_its_sandbox_along(judge, started):
    prompt = make_prompt("assert f(3) == 9")
    endless = reply("def f(x):\n    while True: pass")
    with RewardWorkers({"code": judge}, num_workers=1, seconds=1.0) as workers:
        with pytest.raises(RewardTimeout):
            asyncio.run(workers.score(prompt, endless))
        assert not started()
    with RewardWorkers({"code": judge}, num_workers=1, seconds=60.0) as workers:
        right = asyncio.run(workers.score(prompt, reply("def f(x): return x * x")))
        assert right.value == 1
        assert len(started()) == 1
    assert not started()


def changed(value):
    """Something else of the same kind."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    if isinstance(value, str):
        return value + "x"
    if isinstance(value, list | tuple):
        return value + type(value)([0])
    return 0 if value is None else None


class ReturnSomethingElse(ast.NodeTransformer):
    """In the body of one function, not in those nested in it."""

    def visit_Return(self, node):
        call = ast.Call(ast.Name("changed", ast.Load()), [node.value or ast.Constant(None)], [])
        return ast.Return(call)

    def visit_FunctionDef(self, node):
        return node

    visit_Lambda = visit_FunctionDef


def broken(source: str, function: str) -> str:
    """The program with other return values of the function."""
    tree = ast.parse(source)
    (definition,) = (n for n in tree.body if getattr(n, "name", "") == function)
    definition.body = [ReturnSomethingElse().visit(node) for node in definition.body]
    helper = ast.parse(Path(__file__).read_text())
    tree.body += [n for n in helper.body if getattr(n, "name", "") == "changed"]
    return ast.unparse(ast.fix_missing_locations(tree))


def holds(source: str, tests: str) -> bool:
    """Without the sandbox and the reward: what Python itself says."""
    try:
        exec(source + "\n" + tests, {"__builtins__": builtins, "__name__": "__main__"})
    except Exception:
        return False
    return True


def rows_of(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


@pytest.mark.skipif(HUMANEVAL is None, reason="ROLL_LITE_HUMANEVAL does not name HumanEval.jsonl")
def test_humaneval(judge):
    rows = rows_of(HUMANEVAL)
    assert len(rows) == 164
    wrong = []
    for row in rows:
        source = row["prompt"] + row["canonical_solution"]
        mutant = broken(source, row["entry_point"])
        tests = f"{row['test']}\ncheck({row['entry_point']})\n"
        assert holds(source, tests) and not holds(mutant, tests), row["task_id"]
        prompt = make_prompt(tests, id=row["task_id"])
        values = [judge(prompt, reply(text)).value for text in (source, mutant)]
        if values != [1, 0]:
            wrong.append((row["task_id"], values))
    assert wrong == []


class ReturnNothing(ast.NodeTransformer):
    def visit_Return(self, node):
        return ast.Return(ast.Constant(None))


@pytest.mark.skipif(MBPP is None, reason="ROLL_LITE_MBPP does not name mbpp.jsonl")
def test_mbpp(judge):
    """With more time than usual: task 123 adds up divisors for seconds."""
    judge = partial(judge, seconds=60.0, limits=Limits(seconds=30.0))
    rows, wrong = rows_of(MBPP), []
    assert len(rows) == 974
    for row in rows:
        mutant = ast.fix_missing_locations(ReturnNothing().visit(ast.parse(row["code"])))
        tests = [f"{row['test_setup_code']}\n{test}" for test in row["test_list"]]
        prompt = make_prompt(*tests, id=str(row["task_id"]))
        values = [judge(prompt, reply(text)).value for text in (row["code"], ast.unparse(mutant))]
        if values != [1, 0]:
            wrong.append((row["task_id"], values))
    assert wrong == []
