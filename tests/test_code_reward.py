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
from process_checks import sandbox_processes

from roll_lite.rewards import code
from roll_lite.rewards.code import last_code_block, passes_tests
from roll_lite.sandbox.sandbox import Limits, Sandbox, SandboxError, SandboxUnavailable
from roll_lite.types import Prompt
from roll_lite.workers.failures import RewardTimeout
from roll_lite.workers.pool import RewardWorkers

HUMANEVAL = os.environ.get("ROLL_LITE_HUMANEVAL")

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
        "import sys\nfor line in sys.stdin:\n    print('', line.strip().upper())",
        {"input": "ab\ncd", "output": "AB\nCD"},
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
        Sandbox("full").close()
    except SandboxUnavailable:
        return partial(passes_tests, isolation="rlimits")
    return passes_tests


@pytest.mark.parametrize("name", PROBLEMS)
def test_right_and_wrong_programs(judge, name):
    right, wrong, tests = PROBLEMS[name]
    assert judge(make_prompt(tests), reply(right)).value == 1
    assert judge(make_prompt(tests), reply(wrong)).value == 0
    assert judge(make_prompt(tests), reply("pass")).value == 0


def test_parts_and_partial_scores(judge):
    prompt = make_prompt(
        "assert f(1) == 1", "assert f(2) == 4", "assert f(3) == 6", "assert f(0) == 0"
    )
    doubles = reply("def f(x): return 2 * x")
    assert judge(prompt, doubles).value == 0
    score = judge(prompt, doubles, partial=True)
    assert score.value == 0.75
    assert score.parts == {"no_code_block": 0.0, "tests_passed": 0.75}


def test_no_code_block(judge):
    score = judge(make_prompt("assert True"), "def f(x): return 1")
    assert score.value == 0
    assert score.parts["no_code_block"] == 1


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("```python\na = 1\n```", "a = 1\n"),
        ("```\na = 1\n```", "a = 1\n"),
        ("```Py title=x\na = 1\n```  \n", "a = 1\n"),
        ("```python\na = 1\n```\nthen\n```python\nb = 2\n```", "b = 2\n"),
        ("```python\na = 1\n```\nIt prints\n```text\n1\n```", "a = 1\n"),
        ("1. item\n    ```python\n    if a:\n        b = 2\n    ```", "if a:\n    b = 2\n"),
        ("````python\ns = '''\n```\n'''\n````", "s = '''\n```\n'''\n"),
        ("```python\n```", ""),
        ("```python\na = 1", None),
        ("```cpp\nint a;\n```", None),
        ("`a = 1` and ```b = 2```", None),
        ("", None),
    ],
)  # fmt: skip
def test_last_code_block(text, expected):
    assert last_code_block(text) == expected


def test_hanging_programs_take_their_time_and_no_more(judge, monkeypatch):
    """By a clock that every run moves on by its limit, so a busy machine changes nothing."""
    clock, granted, run_program = SimpleNamespace(now=0.0), [], code.run_program

    def run(*args, limits, **how):
        granted.append(limits.seconds)
        clock.now += limits.seconds
        return run_program(*args, limits=limits, **how)

    monkeypatch.setattr(code, "run_program", run)
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

    monkeypatch.setattr(code, "run_program", fail)
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
    ],
)
def test_nothing_scores_without_its_tests(judge, program):
    tests = "def check(g):\n    assert all([g(3) == 9])\ncheck(f)"
    for value in (False, True):
        assert judge(make_prompt(tests), reply(program), partial=value).value == 0


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


def test_a_worker_takes_its_sandbox_along(judge):
    prompt = make_prompt("assert f(3) == 9")
    endless = reply("def f(x):\n    while True: pass")
    before = sandbox_processes()
    with RewardWorkers({"code": judge}, num_workers=1, seconds=1.0) as workers:
        with pytest.raises(RewardTimeout):
            asyncio.run(workers.score(prompt, endless))
        assert sandbox_processes() <= before
    with RewardWorkers({"code": judge}, num_workers=1, seconds=60.0) as workers:
        right = asyncio.run(workers.score(prompt, reply("def f(x): return x * x")))
        assert right.value == 1
        assert len(sandbox_processes() - before) == 1
    assert sandbox_processes() <= before


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


def humaneval_rows():
    if HUMANEVAL is None:
        return []
    return [json.loads(line) for line in Path(HUMANEVAL).read_text().splitlines()]


@pytest.mark.skipif(HUMANEVAL is None, reason="ROLL_LITE_HUMANEVAL does not name HumanEval.jsonl")
def test_humaneval(judge):
    rows = humaneval_rows()
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
