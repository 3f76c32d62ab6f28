"""Names in Python code: what it finds imported, defines and uses, and what tests take from it.

A test is about names that it does not define: those that it imports from `solution`, and those that
neither Python nor the usual imports have. Without any, it is about the first of these kinds that it
uses: usual functions (gcd), usual classes (Counter), builtins that calculate (sum), one other such
name (abs). The program must bind one of them, in any way, its own import of Python's included; what
it binds of them is its own. All other usual names and builtins are Python's: in `abs(sqrt(2) - x)`
and `Counter(f(x)) == Counter(y)` the program's `abs` and `Counter` do not judge its results. So are
modules that tests often forget to import (unittest), where they use what these have.
"""

import ast
import builtins
import symtable
from collections.abc import Iterator
from importlib import import_module
from typing import Any

SOLUTION = "solution"
"""The module as which tests can import the program."""
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_IMPORTS = (ast.Import, ast.ImportFrom)
_MODULES = (
    "bisect", "cmath", "collections", "copy", "datetime", "decimal", "fractions", "functools",
    "heapq", "itertools", "json", "math", "operator", "os", "random", "re", "statistics", "string",
    "sys", "time", "typing",
)  # fmt: skip
_FUNCTIONS = {
    "bisect": "bisect_left bisect_right insort",
    "functools": "cache cmp_to_key lru_cache partial reduce",
    "heapq": "heapify heappop heappush heappushpop heapreplace nlargest nsmallest",
    "itertools": "accumulate chain combinations cycle groupby pairwise permutations product "
    "zip_longest",
    "math": "ceil comb factorial floor gcd isqrt lcm log log2 sqrt",
}
_CLASSES = {
    "collections": "Counter OrderedDict defaultdict deque namedtuple",
    "dataclasses": "dataclass field",
    "decimal": "Decimal",
    "fractions": "Fraction",
}
_OTHERS = {
    "math": "inf isclose pi",
    "typing": "Any Callable DefaultDict Deque Dict FrozenSet Generator Iterable Iterator List "
    "Mapping Optional Sequence Set Tuple TypeVar Union",
}

USUAL_NAMES: dict[str, Any] = {module: import_module(module) for module in _MODULES} | {
    name: getattr(import_module(module), name)
    for kind in (_FUNCTIONS, _CLASSES, _OTHERS)
    for module, names in kind.items()
    for name in names.split()
}
"""What programs find imported, as on the sites for which such problems are written. None of these
names is a builtin's."""

_FORGOTTEN = (
    "asyncio", "contextlib", "dataclasses", "enum", "inspect", "io", "numbers", "threading",
    "traceback", "types", "unittest", "warnings",
)  # fmt: skip
_REACHING = {"__import__", "eval", "exec", "globals", "locals", "vars"}
"""With these, tests may take names from the program that they do not show."""
KNOWN_NAMES = {*USUAL_NAMES, *dir(builtins)} - _REACHING
_KINDS = (
    {*" ".join(_FUNCTIONS.values()).split()},
    {*" ".join(_CLASSES.values()).split()},
    {"bin", "chr", "divmod", "hex", "max", "min", "oct", "ord", "pow", "sorted", "sum"},
)
OTHER_NAMES = KNOWN_NAMES.difference(*_KINDS)
"""A test that uses nothing else is about one of these, and must use one only."""


def defined_and_used_names(source: str) -> tuple[set[str], set[str]]:
    """Global names that the code assigns, imports or defines, and those that it reads."""
    top, *inner = _scopes(symtable.symtable(source, "names", "exec"))
    ours = top.get_symbols()
    inside = list(_globals(inner))
    defined = {symbol.get_name() for symbol in ours if _is_bound(symbol)}
    defined |= {symbol.get_name() for symbol in inside if symbol.is_assigned()}
    return defined, {s.get_name() for s in (*ours, *inside) if s.is_referenced()}


def names_from_program(tests: str) -> set[str]:
    """Names that the tests are about, and so take from the program."""
    defined, used = defined_and_used_names(tests)
    free = used - defined - {"__name__"} - forgotten_modules(tests).keys()
    imported = {name for module, name in imports(tests) if module == SOLUTION} - {"*"}
    kinds = (imported | free - KNOWN_NAMES, *(free & kind for kind in _KINDS))
    return next(filter(None, kinds), free)


def forgotten_modules(tests: str) -> dict[str, Any]:
    """Modules of Python that the tests use and do not import."""
    defined, used = defined_and_used_names(tests)
    wanted = (used - defined).intersection(_FORGOTTEN)
    nodes = ast.walk(ast.parse(tests)) if wanted else ()
    asked = [node for node in nodes if isinstance(node, ast.Attribute)]
    asked = [node for node in asked if isinstance(node.value, ast.Name) and node.value.id in wanted]
    modules = {node.value.id: import_module(node.value.id) for node in asked}
    own = {node.value.id for node in asked if not hasattr(modules[node.value.id], node.attr)}
    return {name: module for name, module in modules.items() if name not in own}


def imports(source: str) -> list[tuple[str, str]]:
    """(module, imported name) of each import; `import a.b` gives ("a", "a")."""
    found = [node for node in ast.walk(ast.parse(source)) if isinstance(node, _IMPORTS)]
    return [
        (alias.name.split(".")[0],) * 2
        if isinstance(node, ast.Import)
        else ((node.module or "").split(".")[0], alias.name)
        for node in found
        for alias in node.names
    ]


def uncalled_tests(source: str) -> list[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]:
    """Functions test..., classes Test... and unittest cases that the code only defines."""
    _, used = defined_and_used_names(source)
    return [
        node
        for node in ast.parse(source).body
        if (isinstance(node, FUNCTIONS) and node.name.startswith("test"))
        or (isinstance(node, ast.ClassDef) and (node.name.startswith("Test") or _is_case(node)))
        if node.name not in used
    ]


def _is_case(node: ast.ClassDef) -> bool:
    return any(ast.unparse(base).endswith("TestCase") for base in node.bases)


def does_something(source: str) -> bool:
    """Whether the code asserts, calls or raises anything outside its functions and classes."""
    definitions = (*FUNCTIONS, ast.ClassDef)
    statements = (node for node in ast.parse(source).body if not isinstance(node, definitions))
    nodes = (node for statement in statements for node in ast.walk(statement))
    return any(isinstance(node, ast.Assert | ast.Call | ast.Raise) for node in nodes)


def _is_bound(symbol: symtable.Symbol) -> bool:
    return symbol.is_assigned() or symbol.is_imported() or symbol.is_namespace()


def _scopes(table: symtable.SymbolTable) -> Iterator[symtable.SymbolTable]:
    yield table
    for child in table.get_children():
        yield from _scopes(child)


def _globals(scopes: list[symtable.SymbolTable]) -> Iterator[symtable.Symbol]:
    return (symbol for scope in scopes for symbol in scope.get_symbols() if symbol.is_global())
