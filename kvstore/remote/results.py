"""The answers of verbs as JSON: what a server may answer, and what a client makes of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from kvstore.base.timestamp import TIMESTAMP_MAX, Timestamp
from kvstore.remote.parameters import BASE64_SCHEMA, Schema
from kvstore.remote.protocol import from_json

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True, slots=True)
class Result(Generic[T_co]):
    """An answer, or a part of one."""

    schema: Schema
    """The JSON that a server answers with."""
    read: Callable[[Any], T_co]
    """The value that a client gets. It may raise any error for JSON that breaks the schema: the
    client then says that another server is at the address."""


def _as_it_is(found: Any) -> Any:
    return found


def _bytes(found: Any) -> bytes:
    return from_json(found, name="the server's answer")


def _timestamp(found: Any) -> Timestamp:
    if type(found) is not int or not 0 <= found <= TIMESTAMP_MAX:
        raise ValueError(f"timestamp {found!r}"[:100])
    return Timestamp(found)


BYTES: Final[Result[bytes]] = Result({"oneOf": [{"type": "string"}, BASE64_SCHEMA]}, _bytes)
TEXT: Final[Result[str]] = Result({"type": "string"}, _as_it_is)
FLAG: Final[Result[bool]] = Result({"type": "boolean"}, _as_it_is)
COUNT: Final[Result[int]] = Result({"type": "integer", "minimum": 0}, _as_it_is)
INTEGER: Final[Result[int]] = Result({"type": "integer"}, int)
NUMBER: Final[Result[float]] = Result({"type": "number"}, _as_it_is)
TIMESTAMP: Final[Result[Timestamp]] = Result(
    {"type": "integer", "minimum": 0, "maximum": TIMESTAMP_MAX}, _timestamp
)
NANOSECONDS: Final[Result[int]] = Result(TIMESTAMP.schema, _as_it_is)
"""A time in a record, whose own reader makes it a `Timestamp`."""
ANY_OBJECT: Final[Result[Mapping[str, Any]]] = Result({"type": "object"}, _as_it_is)


def fields(**named: Result[Any]) -> Result[dict[str, Any]]:
    """An object that has these fields. A client leaves out the fields of a newer server."""

    def read(found: Any) -> dict[str, Any]:
        return {name: kind.read(found[name]) for name, kind in named.items()}

    return Result(_object(named), read)


def one(name: str, kind: Result[T], **others: Result[Any]) -> Result[T]:
    """An object whose field `name` is what a client wants of it."""
    return Result(_object({**others, name: kind}), lambda found: kind.read(found[name]))


def items(kind: Result[T]) -> Result[list[T]]:
    """A list."""
    schema = {"type": "array", "items": kind.schema}
    return Result(schema, lambda found: [kind.read(each) for each in found])


def or_null(kind: Result[T]) -> Result[T | None]:
    """A value that may be null."""
    schema = {"oneOf": [kind.schema, {"type": "null"}]}
    return Result(schema, lambda found: None if found is None else kind.read(found))


def _object(named: Mapping[str, Result[Any]]) -> Schema:
    return {
        "type": "object",
        "properties": {name: kind.schema for name, kind in named.items()},
        "required": list(named),
        "additionalProperties": False,
    }
