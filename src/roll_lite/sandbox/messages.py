"""Values as they travel between a program and its tests: as JSON.

Data is copied, everything else is a reference that only its own side can resolve. Instances of
subclasses of data types arrive as the plain type.
"""

import json
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from datetime import date, datetime, timedelta
from decimal import Decimal
from fractions import Fraction
from functools import cache
from operator import itemgetter
from typing import Any, NoReturn

Refer = Callable[[Any], list]
"""Makes a reference to an object that is not data."""
Resolve = Callable[[list], Any]
"""Finds the object of a reference."""

_SMALL = 2**63
MUTABLE = (list, dict, set, bytearray, deque)
_CONTAINERS: dict[type, Callable] = {
    **{kind: kind for kind in (list, tuple, set, frozenset, deque)},
    type({}.keys()): lambda keys: dict.fromkeys(keys).keys(),
    type({}.values()): lambda values: dict(enumerate(values)).values(),
    type({}.items()): lambda pairs: dict(pairs).items(),
}
"""What makes each of them from what it contains."""
_MAPPINGS = (Counter, OrderedDict, dict)
_LEAVES: dict[type, tuple[Callable, Callable]] = {
    int: (hex, lambda text: int(text, 16)),
    bytes: (bytes.hex, bytes.fromhex),
    bytearray: (bytearray.hex, bytearray.fromhex),
    complex: (lambda z: [z.real, z.imag], lambda pair: complex(*pair)),
    range: (lambda r: [r.start, r.stop, r.step], lambda ends: range(*ends)),
    slice: (lambda s: [s.start, s.stop, s.step], lambda ends: slice(*ends)),
    Decimal: (str, Decimal),
    Fraction: (str, Fraction),
    datetime: (datetime.isoformat, datetime.fromisoformat),
    date: (date.isoformat, date.fromisoformat),
    timedelta: (lambda d: [d.days, d.seconds, d.microseconds], lambda parts: timedelta(*parts)),
}
_KINDS = {kind.__name__: kind for kind in (*_CONTAINERS, *_MAPPINGS, *_LEAVES)}


def dumps(value: Any, refer: Refer) -> bytes:
    return json.dumps(_encode(value, refer)).encode()


def loads(data: bytes, resolve: Resolve) -> Any:
    return _decode(json.loads(data), resolve)


def _encode(value: Any, refer: Refer) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, float):
        return float(value)
    if isinstance(value, str):
        return "".join(value)  # a plain str, if it was a subclass
    if isinstance(value, int) and -_SMALL < value < _SMALL:
        return int(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return ["namedtuple", list(value._fields), [_encode(item, refer) for item in value]]
    for kind in _CONTAINERS:
        if isinstance(value, kind):
            return [kind.__name__, [_encode(item, refer) for item in value]]
    for kind in _MAPPINGS:
        if isinstance(value, kind):
            pairs = [[_encode(k, refer), _encode(v, refer)] for k, v in value.items()]
            return [kind.__name__, pairs]
    for kind, (pack, _) in _LEAVES.items():
        if isinstance(value, kind):
            return [kind.__name__, pack(value)]
    return ["reference", refer(value)]


def _decode(data: Any, resolve: Resolve) -> Any:
    if not isinstance(data, list):
        return data
    name, *_, content = data
    if name == "reference":
        return resolve(content)
    if name == "namedtuple":
        return _row_type(*map(str, data[1]))(_decode(item, resolve) for item in content)
    kind = _KINDS[name]
    if kind in _CONTAINERS:
        return _CONTAINERS[kind](_decode(item, resolve) for item in content)
    if kind in _MAPPINGS:
        return kind({_decode(k, resolve): _decode(v, resolve) for k, v in content})
    return _LEAVES[kind][1](content)


@cache
def _row_type(*fields: str) -> type:
    """A named tuple whose fields can be read; no field can be a special method."""
    names = [name for name in fields if name.isidentifier() and not name.startswith("_")]
    readers = {name: property(itemgetter(fields.index(name))) for name in names}

    def as_dict(row: tuple) -> dict[str, Any]:
        return dict(zip(fields, row, strict=True))

    def replaced(row: tuple, **values: Any) -> tuple:
        return type(row)((as_dict(row) | values).values())

    methods = {"_fields": fields, "_asdict": as_dict, "_replace": replaced}
    return type("Row", (tuple,), readers | methods)


def is_data(value: Any) -> bool:
    try:
        _encode(value, _refuse)
    except TypeError:
        return False
    return True


def _refuse(value: Any) -> NoReturn:
    raise TypeError(f"a {type(value).__name__} is not data")
