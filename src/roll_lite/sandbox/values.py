"""Values as JSON on their way between a program and its tests: data is copied, the rest is named.

What comes from a program is data and nothing else: subclasses arrive as what they derive from, and
objects as references that only the program's own side can follow.
"""

import json
from collections import Counter, OrderedDict, deque, namedtuple
from collections.abc import Callable
from datetime import date, datetime, timedelta
from decimal import Decimal
from fractions import Fraction
from typing import Any

Refer = Callable[[Any], list]
"""Names an object that is no data."""
Follow = Callable[[list], Any]
"""Finds what was named."""

_SMALL = 2**63
_CONTAINERS = (list, tuple, set, frozenset, deque)
_MAPPINGS = (Counter, OrderedDict, dict)
_LEAVES: dict[type, tuple[Callable, Callable]] = {
    int: (hex, lambda text: int(text, 16)),
    bytes: (bytes.hex, bytes.fromhex),
    bytearray: (bytearray.hex, bytearray.fromhex),
    complex: (lambda z: [z.real, z.imag], lambda pair: complex(*pair)),
    range: (lambda r: [r.start, r.stop, r.step], lambda ends: range(*ends)),
    Decimal: (str, Decimal),
    Fraction: (str, Fraction),
    datetime: (datetime.isoformat, datetime.fromisoformat),
    date: (date.isoformat, date.fromisoformat),
    timedelta: (lambda d: [d.days, d.seconds, d.microseconds], lambda parts: timedelta(*parts)),
}
_KINDS = {kind.__name__: kind for kind in (*_CONTAINERS, *_MAPPINGS, *_LEAVES)}


def dumps(value: Any, refer: Refer) -> bytes:
    return json.dumps(_encode(value, refer)).encode()


def loads(data: bytes, follow: Follow) -> Any:
    return _decode(json.loads(data), follow)


def _encode(value: Any, refer: Refer) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, float):
        return float(value)
    if isinstance(value, str):
        return "".join(value)  # a plain one, if it was of a subclass
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


def _decode(data: Any, follow: Follow) -> Any:
    if not isinstance(data, list):
        return data
    name, *_, content = data
    if name == "reference":
        return follow(content)
    if name == "namedtuple":
        return namedtuple("Row", data[1])(*(_decode(item, follow) for item in content))
    kind = _KINDS[name]
    if kind in _CONTAINERS:
        return kind(_decode(item, follow) for item in content)
    if kind in _MAPPINGS:
        return kind({_decode(k, follow): _decode(v, follow) for k, v in content})
    return _LEAVES[kind][1](content)
