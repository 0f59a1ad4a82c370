"""Errors as JSON: the class, the message and the facts of an error of the one tree.

    {"error": "HistoryGoneError", "what": "...", "remedy": "...",
     "fields": {"as_of": 3, "since": 5, "span": null}}

A fact is a number, a text, true, false, null, `{"bytes": <bytes>}` or `{"items": [facts]}`. Facts
of other types travel as the text that a message would show.

Invariants
1. Only classes of `kvstore.errors` are made from JSON. A name that this release does not know
   becomes the nearest class that it knows by the status of the answer.
2. No argument of a call that failed is evaluated here: facts are copied, and no code runs.
"""

from __future__ import annotations

from typing import Any, Final

from kvstore import errors
from kvstore.errors import (
    IndeterminateError,
    KVStoreError,
    RetryableError,
    StorageError,
    UsageError,
)
from kvstore.protocol.values import from_json, to_json

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
            if isinstance(name, str) and name.isidentifier() and not name.startswith("_"):
                vars(error)[name] = _from_fact(fact)
    return error


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
