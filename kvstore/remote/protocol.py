"""The language of a server and its clients: bytes in JSON and URLs, errors as JSON, rows as Arrow
columns.

    GET | PUT | DELETE  /v1/keys/<key>     one key, percent-encoded; the value is the body
    GET | POST          /v1/<verb>         every other verb; arguments in the query, or as JSON

Rows travel as Arrow IPC streams, other answers as JSON. `docs/reference/protocol.md` describes
all of it.

`kvstore.remote.verbs` declares the verbs, by the kinds of arguments in `parameters` and the kinds
of answers in `results`.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping
from enum import IntEnum
from typing import Any, Final
from urllib.parse import quote_from_bytes, unquote_to_bytes

import pyarrow as pa

from kvstore import errors
from kvstore.codec.json import bytes_json
from kvstore.errors import (
    Argument,
    IndeterminateError,
    KVStoreError,
    RetryableError,
    StorageError,
    UsageError,
)

__all__ = [
    "ARROW_TYPE",
    "EPOCHS_SCHEMA",
    "ERROR_NAME",
    "JSON_TYPE",
    "KEYS_PATH",
    "KEYS_SCHEMA",
    "LABELS_SCHEMA",
    "OCTETS_TYPE",
    "POSITION_NAME",
    "READ_SCHEMA",
    "SHARING",
    "SHARING_HEADER",
    "VALUES_SCHEMA",
    "VERBS_PATH",
    "WRITES_SCHEMA",
    "WriteOp",
    "arguments_json",
    "failure_fields",
    "failure_of",
    "from_json",
    "quoted",
    "to_json",
    "unquoted",
]


SHARING: Final = 1
"""The rules by which processes share a store, by number: what a guest reads in the files by itself,
and what it asks of the owner. A release that changes them raises it. A guest tells its number with
each request, and an owner refuses another one (`OtherReleaseError`)."""

SHARING_HEADER: Final = "Kvstore-Sharing"
"""The header of a guest's requests: the number, and the release for people."""


# --------------------------------------------------------------------------------------------------
# The Arrow columns and the media types in which rows travel.
#
#     rows of a scan       kvstore.mvcc.arrow.rows_schema
#     changes and events   kvstore.changes.batches.changes_schema
#     epochs               the fields of kvstore.changes.epochs.Epoch
#     keys alone           key binary
#     keys to be read      key binary, as_of int64 nullable (left out: one time for all)
#     values               value binary, nullable
#     labels of a join     key binary, at int64
#     writes and reads     op uint8 (see `WriteOp`), key binary, end binary nullable, value binary
#                          nullable, expires int64 nullable (left out: nothing expires)
#
# A stream that fails after it has begun ends with a batch of no rows, whose custom metadata has the
# error as JSON under `ERROR_NAME`, and without the end of the HTTP body.

ARROW_TYPE: Final = "application/vnd.apache.arrow.stream"
JSON_TYPE: Final = "application/json"
OCTETS_TYPE: Final = "application/octet-stream"

ERROR_NAME: Final = b"kvstore.error"
"""The key of the metadata that carries the error of a stream."""


POSITION_NAME: Final = b"kvstore.position"
"""The key of the metadata that carries the position of a feed behind a batch."""


class WriteOp(IntEnum):
    """The operation of a row of a batch. The codes of writes are the same as in the change
    index."""

    READ = 0
    PUT = 1
    READ_RANGE = 2
    DELETE = 3
    DELETE_RANGE = 5


READ_SCHEMA: Final = pa.schema(
    [
        pa.field("key", pa.binary(), nullable=False),
        pa.field("as_of", pa.int64()),
        pa.field("instant", pa.int64()),
    ]
)
"""`instant` has the time of a key that surely counts nanoseconds, in the place of `as_of`: a small
number there may count seconds by mistake, and is refused."""
KEYS_SCHEMA: Final = pa.schema([pa.field("key", pa.binary(), nullable=False)])
LABELS_SCHEMA: Final = pa.schema(
    [pa.field("key", pa.binary(), nullable=False), pa.field("at", pa.int64(), nullable=False)]
)
EPOCHS_SCHEMA: Final = pa.schema(
    [
        ("domain", pa.uint64()),
        ("begin", pa.uint64()),
        ("end", pa.uint64()),
        ("events", pa.int64()),
        ("closed_at", pa.int64()),
        ("quiescent", pa.bool_()),
        ("ended", pa.bool_()),
    ]
)
VALUES_SCHEMA: Final = pa.schema([pa.field("value", pa.binary())])
WRITES_SCHEMA: Final = pa.schema(
    [
        pa.field("op", pa.uint8(), nullable=False),
        pa.field("key", pa.binary(), nullable=False),
        pa.field("end", pa.binary()),
        pa.field("value", pa.binary()),
        pa.field("expires", pa.int64()),
    ]
)
"""`expires` is a time, or below zero the nanoseconds from the time at which the server takes it."""


# --------------------------------------------------------------------------------------------------
# Errors as JSON: the class, the message and the facts of an error of the one tree.
#
#     {"error": "HistoryGoneError", "what": "...", "remedy": "...",
#      "fields": {"as_of": 3, "since": 5, "span": null}}
#
# A fact is a number, a text, true, false, null, `{"bytes": <bytes>}` or `{"items": [facts]}`. Facts
# of other types travel as the text that a message would show.
#
# Invariants
# 1. Only classes of `kvstore.errors` are made from JSON. A name that this release does not know
#    becomes the nearest class that it knows by the status of the answer.
# 2. No argument of a call that failed is evaluated here: facts are copied, and no code runs.

_CLASSES: Final[dict[str, type[KVStoreError]]] = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, KVStoreError)
}
_DEPTH_MAX: Final = 8


def failure_fields(error: KVStoreError) -> dict[str, Any]:
    """An error as JSON. A class of another module travels as its parent in `kvstore.errors`."""
    kind = next(each for each in type(error).__mro__ if _CLASSES.get(each.__name__) is each)
    facts = {name: value for name, value in vars(error).items() if name not in ("what", "remedy")}
    return {
        "error": kind.__name__,
        "what": error.what,
        "remedy": error.remedy,
        "fields": {name: _to_fact(value) for name, value in facts.items()},
    }


def failure_of(fields: object, *, status: int, where: str) -> KVStoreError:
    """The error that JSON describes. `where` names the server, in case it is no error of ours."""
    if not isinstance(fields, dict) or not isinstance(fields.get("error"), str):
        return _foreign(status, where)
    kind = _CLASSES.get(fields["error"], _by_status(status))
    what, remedy = str(fields.get("what", "")), str(fields.get("remedy", ""))
    facts = fields.get("fields")
    error = kind.__new__(kind)
    KVStoreError.__init__(error, what, remedy)
    if isinstance(facts, dict):
        for name, fact in facts.items():
            if not isinstance(name, str) or not name.isidentifier() or name.startswith("_"):
                continue
            if not callable(getattr(kind, name, None)):  # a fact takes no place of a method
                vars(error)[name] = _from_fact(fact)
        if "words" in facts:
            vars(error)["words"] = _words_of(error.words)
    return error


def _words_of(fact: Any) -> tuple[tuple[str | Argument, ...], tuple[str | Argument, ...]] | None:
    """The words of an error (see `KVStoreError.words`); None where something else came."""
    try:
        what, remedy = fact
        return tuple(map(_word_of, what)), tuple(map(_word_of, remedy))
    except (TypeError, ValueError):
        return None


def _word_of(fact: Any) -> str | Argument:
    return fact if isinstance(fact, str) else Argument(*map(str, fact))


def _foreign(status: int, where: str) -> KVStoreError:
    """The error for an answer of something before the server, such as a proxy. A proxy also answers
    with 503 when the server has gone in the middle of a request that it had taken."""
    what, remedy = f"status {status} and no error of ours", "check the address, and the proxies"
    if status >= 500:
        return IndeterminateError(f"a request to {where}", f"{what}: {remedy} on the way")
    kind = RetryableError if status == _TOO_MANY_REQUESTS else UsageError
    return kind(f"{where} answered with {what}", f"{remedy} on the way")


def _by_status(status: int) -> type[KVStoreError]:
    if status in (_TOO_MANY_REQUESTS, 503):
        return RetryableError
    return StorageError if status >= 500 else UsageError


_TOO_MANY_REQUESTS: Final = 429


def _to_fact(value: object, depth: int = 0) -> Any:
    if value is None or isinstance(value, bool | float):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, str):
        return str(value)
    if isinstance(value, bytes):
        return {"bytes": to_json(value)}
    if isinstance(value, tuple | list) and depth < _DEPTH_MAX:
        return {"items": [_to_fact(item, depth + 1) for item in value]}
    return repr(value)


def _from_fact(fact: Any, depth: int = 0) -> Any:
    if not isinstance(fact, dict):
        return fact
    if "bytes" in fact:
        return from_json(fact["bytes"], name="a fact of an error")
    items = fact.get("items")
    if isinstance(items, list) and depth < _DEPTH_MAX:
        return tuple(_from_fact(item, depth + 1) for item in items)
    return None


# --------------------------------------------------------------------------------------------------
# Bytes in JSON and in URLs.
#
# in JSON    text where the bytes are UTF-8, else {"base64": "..."}
# in a URL   percent-encoded (RFC 3986); a dot too, so that no proxy takes `..` for a step up

VERBS_PATH: Final = "/v1/"
KEYS_PATH: Final = "/v1/keys/"


def to_json(raw: bytes | None) -> str | dict[str, str] | None:
    """Bytes as JSON; None is null."""
    return None if raw is None else bytes_json(raw)


def from_json(found: object, *, name: str) -> bytes:
    """The bytes that `to_json` wrote. Raises `UsageError`, which calls them `name`."""
    if isinstance(found, str):
        try:
            return found.encode()
        except UnicodeEncodeError as error:
            raise UsageError(f"{name}: {error}", 'pass {"base64": "..."}') from error
    if isinstance(found, dict) and list(found) == ["base64"]:
        try:
            return base64.b64decode(found["base64"], validate=True)
        except (TypeError, ValueError, binascii.Error) as error:
            raise UsageError(f"{name} is not base64: {error}", "encode it (RFC 4648)") from error
    raise UsageError(f"{name} is no bytes: {_kind(found)}", 'pass text, or {"base64": "..."}')


def arguments_json(arguments: Mapping[str, Any]) -> bytes:
    """The arguments of a verb as JSON. Arguments that are None are left out. Raises `UsageError`
    that names an argument of a type that no argument has."""
    given = {name: value for name, value in arguments.items() if value is not None}
    try:
        return json.dumps(given).encode()
    except TypeError as error:
        wrong = next(name for name, value in given.items() if not _has_json(value))
        raise UsageError(
            f"{wrong}={given[wrong]!r} is of type {_kind(given[wrong])}",
            "pass a value of a type that the call names",
        ) from error


def _has_json(value: object) -> bool:
    try:
        json.dumps(value)
    except TypeError:
        return False
    return True


def quoted(key: bytes) -> str:
    """A key as a part of a URL."""
    return quote_from_bytes(key, safe="").replace(".", "%2E")


def unquoted(text: bytes) -> bytes:
    """The bytes of a percent-encoded part of a URL."""
    return unquote_to_bytes(text) if b"%" in text else text


def _kind(found: Any) -> str:
    return "null" if found is None else type(found).__name__
