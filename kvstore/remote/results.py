"""The answers of verbs as JSON: schemas for the document of a server."""

from __future__ import annotations

from typing import Any, Final

from kvstore.base.timestamp import TIMESTAMP_MAX
from kvstore.remote.parameters import BASE64_SCHEMA, Schema

BYTES: Final[Schema] = {"oneOf": [{"type": "string"}, BASE64_SCHEMA]}
TEXT: Final[Schema] = {"type": "string"}
FLAG: Final[Schema] = {"type": "boolean"}
COUNT: Final[Schema] = {"type": "integer", "minimum": 0}
INTEGER: Final[Schema] = {"type": "integer"}
NUMBER: Final[Schema] = {"type": "number"}
TIMESTAMP: Final[Schema] = {"type": "integer", "minimum": 0, "maximum": TIMESTAMP_MAX}
ANY_OBJECT: Final[Schema] = {"type": "object"}


def fields(**named: Schema) -> dict[str, Any]:
    """The schema of an object that has these fields and no other ones."""
    return {
        "type": "object",
        "properties": named,
        "required": list(named),
        "additionalProperties": False,
    }


def items(schema: Schema) -> dict[str, Any]:
    """The schema of a list."""
    return {"type": "array", "items": schema}


def or_null(schema: Schema) -> dict[str, Any]:
    """The schema of a value that may be null."""
    return {"oneOf": [schema, {"type": "null"}]}
