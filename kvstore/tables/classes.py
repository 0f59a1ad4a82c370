"""Classes as schemas: the annotated fields of a class are the columns, and its instances the rows.

A class may be a dataclass, a model of pydantic, or a struct of msgspec: any class with annotations
that is made from its fields by name. `X | None` is a column that may be null, and
`Annotated[int, pa.int32()]` names the Arrow type.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Annotated, Any, ClassVar, Final, Union, get_args, get_origin, get_type_hints
from uuid import UUID

import pyarrow as pa

from kvstore.errors import UsageError

_TYPES: Final[Mapping[type, pa.DataType]] = {
    bool: pa.bool_(),
    int: pa.int64(),
    float: pa.float64(),
    str: pa.string(),
    bytes: pa.binary(),
    date: pa.date32(),
    datetime: pa.timestamp("us", "UTC"),
    time: pa.time64("us"),
    timedelta: pa.duration("us"),
    Decimal: pa.decimal128(38, 9),
    UUID: pa.uuid(),
}


def schema_of_class(given: type) -> pa.Schema:
    """The columns of a class, in the order of its fields. Raises `UsageError` that names a field
    without a type of columns."""
    try:
        hints = get_type_hints(given, include_extras=True)
    except (NameError, TypeError) as error:
        raise UsageError(f"{given.__name__} as a schema: {error}", "annotate its fields") from error
    fields = [
        _field(given, name, hint)
        for name, hint in hints.items()
        if not name.startswith("_") and get_origin(hint) is not ClassVar and hint is not ClassVar
    ]
    inherited = {"model_config", "model_fields", "model_computed_fields"}  # of pydantic
    fields = [field for field in fields if field.name not in inherited]
    if not fields:
        raise UsageError(f"{given.__name__} has no annotated fields", "pass a pyarrow.Schema")
    return pa.schema(fields)


def _field(given: type, name: str, hint: Any) -> pa.Field:
    is_nullable = False
    found = None
    if get_origin(hint) in (Union, types.UnionType):
        rest = [each for each in get_args(hint) if each is not type(None)]
        is_nullable = len(rest) < len(get_args(hint))
        hint = rest[0] if len(rest) == 1 else hint
    if get_origin(hint) is Annotated:
        hint, *extras = get_args(hint)
        found = next((each for each in extras if isinstance(each, pa.DataType)), None)
    type_ = found or (_TYPES.get(hint) if isinstance(hint, type) else None)
    if type_ is None:
        raise UsageError(
            f"{given.__name__}.{name} is {hint!r}, which is no type of columns",
            "annotate it: Annotated[X, pa.int32()]",
        )
    return pa.field(name, type_, is_nullable)


def row_of(row: Any) -> Mapping[str, Any]:
    """The columns of an instance, or the dict that it is."""
    if isinstance(row, Mapping):
        return row
    names = getattr(type(row), "__annotations__", None)
    if names is None:
        raise UsageError(f"a row is a dict, not {type(row).__name__}", "pass {column: value}")
    fields = schema_of_class(type(row)).names
    return {name: getattr(row, name) for name in fields}
