"""What programs find imported, as on the sites for which such problems are written."""

from importlib import import_module
from typing import Any

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
    "math": "ceil comb factorial floor gcd inf isqrt lcm log log2 pi sqrt",
    "typing": "Any Callable DefaultDict Deque Dict FrozenSet Generator Iterable Iterator List "
    "Mapping Optional Sequence Set Tuple TypeVar Union",
}

USUAL_NAMES: dict[str, Any] = {module: import_module(module) for module in _MODULES} | {
    name: getattr(import_module(module), name)
    for module, names in _FROM.items()
    for name in names.split()
}
"""None of them is a builtin's name."""
