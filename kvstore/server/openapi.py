"""The OpenAPI document of a server, made from its table of verbs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from kvstore.protocol import ARROW_TYPE, JSON_TYPE, KEYS_PATH, OCTETS_TYPE, VERBS_PATH
from kvstore.server.verbs import Verb
from kvstore.version import __version__

_BYTES: Final = {
    "description": "bytes: text where they are UTF-8, else base64",
    "oneOf": [
        {"type": "string"},
        {
            "type": "object",
            "properties": {"base64": {"type": "string", "contentEncoding": "base64"}},
            "required": ["base64"],
        },
    ],
}
_TIME: Final = {
    "description": "nanoseconds since 1970 (UTC), or ISO-8601 with a zone",
    "oneOf": [{"type": "integer", "format": "int64"}, {"type": "string", "format": "date-time"}],
}
_TYPES: Final[dict[str, dict[str, Any]]] = {
    "bytes": {"$ref": "#/components/schemas/Bytes"},
    "time": {"$ref": "#/components/schemas/Time"},
    "count": {"type": "integer", "minimum": 0},
    "integer": {"type": "integer"},
    "seconds": {"type": "number", "minimum": 0},
    "flag": {"type": "boolean"},
    "text": {"type": "string"},
}
_ERROR: Final = {
    "type": "object",
    "required": ["error", "what", "remedy", "fields"],
    "properties": {
        "error": {"type": "string", "description": "the class in kvstore.errors"},
        "what": {"type": "string"},
        "remedy": {"type": "string"},
        "fields": {"type": "object"},
    },
}
_TOKEN: Final = {
    "name": "Idempotency-Key",
    "in": "header",
    "description": "writer, or writer.number: the server does the request once",
    "schema": {"type": "string", "pattern": r"^[A-Za-z0-9_-]{1,64}(\.\d{1,18}(\.\d{1,19})?)?$"},
}


def openapi(verbs: Iterable[Verb]) -> dict[str, Any]:
    """The document (OpenAPI 3.1)."""
    known = {verb.name: verb for verb in verbs}
    paths: dict[str, Any] = {KEYS_PATH + "{key}": _of_keys(known)}
    for verb in known.values():
        paths[VERBS_PATH + verb.name] = _of_verb(verb)
    return {
        "openapi": "3.1.0",
        "info": {"title": "kvstore", "version": __version__},
        "security": [{}, {"token": []}],
        "paths": paths,
        "components": {
            "schemas": {"Bytes": _BYTES, "Time": _TIME, "Error": _ERROR},
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _of_keys(verbs: dict[str, Verb]) -> dict[str, Any]:
    key = {
        "name": "key",
        "in": "path",
        "required": True,
        "description": "the bytes of the key, percent-encoded",
        "schema": {"type": "string"},
    }
    octets = {OCTETS_TYPE: {"schema": {"type": "string", "format": "binary"}}}
    found: dict[str, Any] = {"parameters": [key]}
    for method, name in (("get", "get"), ("put", "put"), ("delete", "delete")):
        verb = verbs[name]
        query = {name: kind for name, kind in verb.parameters.items() if name not in _OF_PATH}
        operation = _operation(verb, octets if name == "get" else {JSON_TYPE: {}})
        operation["operationId"] = f"{name}_key"
        operation["parameters"] = _query(query) + ([_TOKEN] if verb.once else [])
        if name == "put":
            operation["requestBody"] = {"required": True, "content": octets}
        if name == "get":
            operation["responses"]["404"] = {"description": "the key is absent"}
        found[method] = operation
    return found


_OF_PATH: Final = ("key", "value")


def _of_verb(verb: Verb) -> dict[str, Any]:
    posted = _operation(verb, {JSON_TYPE: {}, ARROW_TYPE: {}})
    posted["parameters"] = [_TOKEN] if verb.once else []
    properties = {name: _type(kind) for name, kind in verb.parameters.items()}
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    content: dict[str, Any] = {JSON_TYPE: {"schema": schema}}
    if verb.rows is not None:
        columns = ", ".join(f"{field.name}: {field.type}" for field in verb.rows)
        content[ARROW_TYPE] = {"schema": {"description": f"an Arrow IPC stream of {columns}"}}
    posted["requestBody"] = {"content": content}
    found = {"post": posted}
    if verb.is_read:
        read = _operation(verb, {JSON_TYPE: {}, ARROW_TYPE: {}})
        read["operationId"] = f"{verb.name}_by_query"
        read["parameters"] = _query(dict(verb.parameters))
        found["get"] = read
    return found


def _operation(verb: Verb, content: dict[str, Any]) -> dict[str, Any]:
    error = {"$ref": "#/components/schemas/Error"}
    return {
        "operationId": verb.name,
        "description": f"{verb.text} Needs the right `{verb.right}`.",
        "responses": {
            "200": {"description": "done", "content": content},
            "default": {
                "description": "an error of kvstore.errors",
                "content": {JSON_TYPE: {"schema": error}},
            },
        },
    }


def _query(parameters: dict[str, str]) -> list[dict[str, Any]]:
    return [
        {"name": name, "in": "query", "schema": _type(kind)} for name, kind in parameters.items()
    ]


def _type(kind: str) -> dict[str, Any]:
    """The schema of an argument, from the words that `Verb.parameters` uses."""
    first = kind.partition(",")[0]
    if first.startswith("list of "):
        return {"type": "array", "items": _TYPES.get(first.removeprefix("list of "), {})}
    return _TYPES.get(first, {})
