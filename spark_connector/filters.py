"""Filters that a reader of rows is told about: comparisons of columns with values.

    [("vendor", "=", "A"), ("trip", ">", 40)]            both
    [[("key", "startswith", b"a")], [("key", "in", [b"k", b"z"])]]      one of two

The form is the one of `pyarrow.parquet`: comparisons are joined by AND, lists of them by OR. As the
option `filters` they are JSON. A value that JSON has no form for is an object of one name:

    {"bytes": hex}  {"datetime": ISO}  {"date": ISO}  {"time": ISO}  {"decimal": text}
    {"uuid": text}
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from datetime import date, datetime, time
from decimal import Decimal, InvalidOperation
from typing import Any, Final, NamedTuple, TypeAlias
from uuid import UUID

from kvstore.errors import UsageError

OPERATORS: Final = ("=", "<", "<=", ">", ">=", "in", "startswith")

VALUES_MAX: Final = 10_000
"""Values of all filters of a read. They are in the plan of the query, and a key costs a seek."""


class Comparison(NamedTuple):
    """A column is compared with a value; with `in`, with each value of a tuple."""

    column: str
    operator: str
    value: Any


Filters: TypeAlias = "tuple[tuple[Comparison, ...], ...]"
"""A row is wanted if all comparisons of one of the groups hold. No group means: no row."""

_TAGGED: Final[dict[type, tuple[str, Callable[[Any], str], Callable[[str], Any]]]] = {
    bytes: ("bytes", bytes.hex, bytes.fromhex),
    datetime: ("datetime", datetime.isoformat, datetime.fromisoformat),
    date: ("date", date.isoformat, date.fromisoformat),
    time: ("time", time.isoformat, time.fromisoformat),
    Decimal: ("decimal", str, Decimal),
    UUID: ("uuid", str, UUID),
}
_READ: Final = {name: read for name, _, read in _TAGGED.values()}
_PLAIN: Final = (str, int, float, bool)
_FORM: Final = 'pass [("column", "operator", value), ...], or a list of such lists'


def checked(given: Iterable[Any]) -> Filters:
    """The filters of a caller. Raises `UsageError` for what is none."""
    items = list(given)
    if not all(isinstance(item, (list, tuple)) and item for item in items) or not items:
        raise UsageError(f"filters {_short(given)}", _FORM)
    groups = [items] if isinstance(items[0][0], str) else items
    found = tuple(tuple(_comparison(each) for each in group) for group in groups)
    count = sum(len(each.value) if each.operator == "in" else 1 for g in found for each in g)
    if count > VALUES_MAX:
        raise UsageError(
            f"filters with {count:,} values",
            f"at most {VALUES_MAX:,} are allowed: a frame of keys goes through lookup_join",
        )
    return found


def to_text(filters: Filters) -> str:
    """The filters as the option `filters` has them."""
    return json.dumps([[(c, o, _written(v)) for c, o, v in group] for group in filters])


def from_text(text: str) -> Filters:
    """The filters that the option `filters` has. Raises `UsageError` for another text."""
    try:
        found = json.loads(text, object_hook=_read)
    except (ValueError, RecursionError, TypeError, InvalidOperation) as error:
        raise UsageError(f"filters={text[:40]!r}: {error}", "let read_where write it") from None
    return checked(found if isinstance(found, list) else [found])


def _comparison(each: Any) -> Comparison:
    if not isinstance(each, (list, tuple)) or len(each) != 3 or not isinstance(each[0], str):
        raise UsageError(f"a filter {_short(each)}", _FORM)
    column, operator, value = each
    operator = "=" if operator == "==" else operator
    if operator not in OPERATORS:
        raise UsageError(f"a filter {_short(each)}", f"the operators are {' '.join(OPERATORS)}")
    if operator == "in":
        if isinstance(value, (str, bytes)) or not isinstance(value, (Sequence, set, frozenset)):
            raise UsageError(f"a filter {_short(each)}", "pass a list of values to in")
        value = tuple(value)
    if operator == "startswith" and not isinstance(value, (str, bytes)):
        raise UsageError(f"a filter {_short(each)}", "pass a text, or bytes for a binary column")
    for one in value if operator == "in" else [value]:
        if type(one) not in _TAGGED and type(one) not in _PLAIN:
            names = ", ".join(kind.__name__ for kind in (*_PLAIN, *_TAGGED))
            raise UsageError(f"a filter with a {type(one).__name__}", f"pass one of {names}")
    return Comparison(column, operator, value)


def _written(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_written(one) for one in value]
    tagged = _TAGGED.get(type(value))
    return value if tagged is None else {tagged[0]: tagged[1](value)}


def _read(found: dict[str, Any]) -> Any:
    if len(found) != 1:
        raise ValueError("a value of several names")
    [(name, text)] = found.items()
    if name not in _READ:
        raise ValueError(f"a value {name}")
    return _READ[name](text)


def _short(given: object) -> str:
    return repr(given)[:60]
