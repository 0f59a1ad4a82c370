"""The OpenAPI document of a server, made from the declarations by which it checks requests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from kvstore.errors import (
    AccessDeniedError,
    OutOfSpaceError,
    RetryableError,
    StorageError,
    UsageError,
)
from kvstore.remote import results
from kvstore.remote.parameters import TIME, VALUE, Parameter, Schema
from kvstore.remote.protocol import (
    ARROW_TYPE,
    JSON_TYPE,
    KEYS_PATH,
    OCTETS_TYPE,
    VERBS_PATH,
)
from kvstore.remote.server.http import TOKEN_PATTERN, status_of_class
from kvstore.remote.server.invocation import ServedVerb
from kvstore.remote.verbs import READ, UnknownChangesetError, Verb
from kvstore.version import __version__

_ERROR: Final = {
    "type": "object",
    "required": ["error", "what", "remedy", "fields"],
    "properties": {
        "error": {"type": "string", "description": "the class in kvstore.errors"},
        "what": {"type": "string"},
        "remedy": {"type": "string"},
        "fields": {"type": "object"},
    },
    "additionalProperties": False,
}
_TOKEN_SCHEMA: Final = {
    "name": "Idempotency-Key",
    "in": "header",
    "description": "writer, or writer.number: the server does the request once",
    "schema": {"type": "string", "pattern": f"^{TOKEN_PATTERN}$"},
}
_CHANGESET: Final = {
    "name": "Kvstore-Changeset",
    "in": "header",
    "description": "the name of an open changeset, which the write belongs to",
    "schema": {"type": "string", "pattern": "^[0-9a-f]{32}$"},
}
_ROWS: Final = results.fields(rows=results.items(results.ANY_OBJECT), whole=results.FLAG).schema
_OF_ALL: Final = (UsageError, AccessDeniedError, RetryableError, StorageError)
"""Errors that any verb may raise: the request is wrong, or is refused, or comes at a bad moment."""
_MEANINGS: Final = {
    400: "the request is not as this document describes it",
    401: "a caller without a token that the server knows",
    403: "the caller has no right to it",
    404: "the request names something that is not there",
    409: "the state of the store refuses the request; nothing was done",
    410: "the history of this time is gone",
    412: "the condition does not hold; nothing was done",
    413: "the request is too large",
    415: "a body of another type",
    425: "the time was not written yet",
    500: "the storage has failed, or the server has a defect",
    503: "surely not done: try again",
    507: "the disk is full",
}


def openapi(verbs: Iterable[ServedVerb]) -> dict[str, Any]:
    """The document (OpenAPI 3.1)."""
    verbs = list(verbs)
    paths: dict[str, Any] = {KEYS_PATH + "{key}": _of_keys(verbs)}
    for verb in verbs:
        paths[VERBS_PATH + verb.declared.name] = _of_verb(verb.declared, verb.text)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "kvstore",
            "version": __version__,
            "description": "Arguments of a POST may also be in its query, each in one place. A "
            "path that takes GET takes HEAD as well. Every other method is answered with 405.",
        },
        "security": [{}, {"token": []}],
        "paths": paths,
        "components": {
            "schemas": {"Error": _ERROR, "Bytes": VALUE.schema, "Time": TIME.schema},
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _of_keys(verbs: Iterable[ServedVerb]) -> dict[str, Any]:
    octets = {OCTETS_TYPE: {"schema": {"type": "string", "format": "binary"}}}
    found: dict[str, Any] = {}
    for served in verbs:
        verb, method = served.declared, served.declared.key_method
        if not method:
            continue
        key = {
            "name": "key",
            "in": "path",
            "required": True,
            "description": "the bytes of the key, percent-encoded",
            "schema": verb.parameters["key"].query_schema,
        }
        query = {name: kind for name, kind in verb.parameters.items() if name not in _OF_PATH}
        assert verb.result is not None
        answer: dict[str, Any] = {JSON_TYPE: {"schema": verb.result.schema}}
        operation = _operation(verb, served.text, octets | answer if method == "GET" else answer)
        operation["operationId"] = f"{verb.name}_key"
        operation["parameters"] = [key, *_query(query), *_headers(verb)]
        if method == "PUT":
            # A request without a body sets the empty value.
            operation["requestBody"] = {"required": False, "content": octets}
            operation["responses"]["413"] = _failure(413)
        if method == "GET":
            absent = results.fields(found=results.Result({"const": False}, bool)).schema
            operation["responses"]["404"] = {
                "description": "the key is absent",
                "content": {JSON_TYPE: {"schema": absent}},
            }
        found[method.lower()] = operation
    return found


_OF_PATH: Final = ("key", "value")


def _of_verb(verb: Verb[Any], text: str) -> dict[str, Any]:
    answer: dict[str, Any] = {}
    if not verb.has_json or verb.rows is not None:
        answer[ARROW_TYPE] = {}
    shown = [verb.result.schema] if verb.result is not None and verb.has_json else []
    if ARROW_TYPE in answer:
        shown.append(_ROWS)
    answer[JSON_TYPE] = {"schema": shown[0] if len(shown) == 1 else {"oneOf": shown}}
    posted = _operation(verb, text, answer)
    posted["parameters"] = _headers(verb)
    content: dict[str, Any] = {}
    takes_json = verb.rows is None or any(kind.is_rows for kind in verb.parameters.values())
    schema = _arguments(verb)
    if takes_json:
        content[JSON_TYPE] = {"schema": schema}
    if verb.rows is not None:
        columns = ", ".join(f"{field.name}: {field.type}" for field in verb.rows) or "any columns"
        described = f"an Arrow IPC stream of {columns}; other arguments are in the query"
        content[ARROW_TYPE] = {"schema": {"description": described}}
    if verb.rows is not None and not takes_json:
        posted["parameters"] += _query(verb.parameters)
    is_required = bool(schema.get("required") or verb.one_of) or not takes_json
    posted["requestBody"] = {"required": is_required, "content": content}
    for status in (413, 415):
        posted["responses"][str(status)] = _failure(status)
    found = {"post": posted}
    if "GET" in verb.methods:
        read = _operation(verb, text, answer)
        read["operationId"] = f"{verb.name}_by_query"
        read["parameters"] = _query(verb.parameters)
        found["get"] = read
    return found


def _arguments(verb: Verb[Any]) -> dict[str, Any]:
    """The schema of the JSON object of a call: the rules of `Verb.read`."""
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {name: _schema(kind) for name, kind in verb.parameters.items()},
        "additionalProperties": False,
    }
    required = [name for name, kind in verb.parameters.items() if kind.is_required]
    if required:
        schema["required"] = required
    if verb.one_of:
        schema["anyOf"] = [{"required": [name]} for name in verb.one_of]
    if verb.apart:
        schema["allOf"] = [{"not": {"required": list(pair)}} for pair in verb.apart]
    if verb.needs:
        schema["dependentRequired"] = {one: [other] for one, other in verb.needs}
    return schema


def _operation(verb: Verb[Any], text: str, content: dict[str, Any]) -> dict[str, Any]:
    statuses = {401, *map(status_of_class, (*_OF_ALL, *verb.errors))}
    if verb.right != READ:
        statuses.add(status_of_class(OutOfSpaceError))
    if verb.is_grouped:
        statuses.add(status_of_class(UnknownChangesetError))
    return {
        "operationId": verb.name,
        "description": f"{text} Needs the right `{verb.right}`.",
        "responses": {
            "200": {"description": "done", "content": content},
            **{str(status): _failure(status) for status in sorted(statuses)},
        },
    }


def _failure(status: int) -> dict[str, Any]:
    error = {"$ref": "#/components/schemas/Error"}
    return {"description": _MEANINGS[status], "content": {JSON_TYPE: {"schema": error}}}


def _headers(verb: Verb[Any]) -> list[dict[str, Any]]:
    return [_TOKEN_SCHEMA] * verb.once + [_CHANGESET] * verb.is_grouped


def _schema(kind: Parameter) -> Schema:
    """The schema of an argument in JSON. The commonest ones have names."""
    for name, named in (("Bytes", VALUE), ("Time", TIME)):
        if kind.schema is named.schema and not kind.is_nullable:
            return {"$ref": f"#/components/schemas/{name}"}
    return kind.json_schema


def _query(parameters: Mapping[str, Parameter]) -> list[dict[str, Any]]:
    found = []
    for name, kind in parameters.items():
        schema = _schema(kind) if kind.query_schema is None else kind.query_schema
        if schema:
            found.append(
                {"name": name, "in": "query", "required": kind.is_required, "schema": schema}
            )
    return found
