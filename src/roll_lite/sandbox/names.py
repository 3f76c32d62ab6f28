"""Names in Python code: what it finds imported, defines and uses, and what tests take from it."""

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
    "bisect", "collections", "copy", "datetime", "functools", "heapq", "itertools", "json", "math",
    "operator", "os", "random", "re", "statistics", "string", "sys", "time", "typing",
)  # fmt: skip
_FROM = {
    "bisect": "bisect_left bisect_right insort",
    "collections": "Counter OrderedDict defaultdict deque namedtuple",
    "dataclasses": "dataclass field",
    "functools": "cache cmp_to_key lru_cache partial reduce",
    "heapq": "heapify heappop heappush heappushpop heapreplace nlargest nsmallest",
    "itertools": "accumulate chain combinations count cycle groupby pairwise permutations product "
    "zip_longest",
    "decimal": "Decimal",
    "fractions": "Fraction",
    "math": "ceil comb factorial floor gcd inf isclose isqrt lcm log log2 pi sqrt",
    "typing": "Any Callable DefaultDict Deque Dict FrozenSet Generator Iterable Iterator List "
    "Mapping Optional Sequence Set Tuple TypeVar Union",
}

USUAL_NAMES: dict[str, Any] = {module: import_module(module) for module in _MODULES} | {
    name: getattr(import_module(module), name)
    for module, names in _FROM.items()
    for name in names.split()
}
"""What programs find imported, as on the sites for which such problems are written. None of these
names is a builtin's."""

OWN_MODULES = (*_MODULES, "cmath", "decimal", "fractions")
"""What tests mean by these names, even if only the program imports them."""


def python_names(tests: str) -> dict[str, Any]:
    """What tests take from Python without importing it, whatever the program makes of the names.

    These are modules of which they use something, as in math.isclose, and usual names beside what
    they test: in `r = f(x)` and `assert Counter(r) == Counter("ab")` the program must not judge its
    own result. Usual names that they only use on data may be what they test, as gcd(4, 6) == 2.
    """
    nodes = list(ast.walk(ast.parse(tests)))
    owners = (node.value for node in nodes if isinstance(node, ast.Attribute))
    modules = {node.id for node in owners if isinstance(node, ast.Name)}.intersection(OWN_MODULES)
    own = set()
    if any(map(_is_tested, names_from_program(tests))):
        names = {node for node in nodes if isinstance(node, ast.Name)} - _on_data(nodes)
        own = {node.id for node in names}.intersection(USUAL_NAMES)
    return {name: import_module(name) for name in modules} | {
        name: USUAL_NAMES[name] for name in own
    }


def _on_data(nodes: list[ast.AST]) -> set[ast.AST]:
    """Names in comparisons, assertions and calls whose result is not used, that read nothing but
    data, builtins and usual names."""
    found: set[ast.AST] = set()
    for node in nodes:
        parts = [node] if isinstance(node, ast.Compare | ast.Expr) else []
        if isinstance(node, ast.Assert):
            parts = [node.test]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            parts = node.args if node.func.attr.startswith("assert") else []
        names = [n for part in parts for n in ast.walk(part) if isinstance(n, ast.Name)]
        if not any(_is_tested(name.id) for name in names):
            found.update(names)
    return found


def _is_tested(name: str) -> bool:
    return name not in USUAL_NAMES and not hasattr(builtins, name)


def defined_and_used_names(source: str) -> tuple[set[str], set[str]]:
    """Global names that the code assigns, imports or defines, and those that it reads."""
    top, *inner = _scopes(symtable.symtable(source, "names", "exec"))
    ours = top.get_symbols()
    inside = list(_globals(inner))
    defined = {symbol.get_name() for symbol in ours if _is_bound(symbol)}
    defined |= {symbol.get_name() for symbol in inside if symbol.is_assigned()}
    return defined, {s.get_name() for s in (*ours, *inside) if s.is_referenced()}


def names_from_program(tests: str) -> set[str]:
    """Names that the tests take from the program: neither builtins nor usual imports.

    If there are none, the builtins, because the program is then asked to define one of them.
    """
    defined, used = defined_and_used_names(tests)
    needed = used - defined
    needed |= {name for module, name in imports(tests) if module == SOLUTION}
    needed -= {*USUAL_NAMES, "*", "__name__"}
    return needed - set(dir(builtins)) or needed


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
