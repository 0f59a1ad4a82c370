"""Bytes in JSON and in URLs.

in JSON    text where the bytes are UTF-8, else {"base64": "..."}
in a URL   percent-encoded (RFC 3986); a dot too, so that no proxy takes `..` for a step up
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import quote_from_bytes, unquote_to_bytes

from kvstore.arguments import require_span
from kvstore.errors import UsageError
from kvstore.span import Span

VERBS_PATH: Final = "/v1/"
KEYS_PATH: Final = "/v1/keys/"


def to_json(raw: bytes | None) -> str | dict[str, str] | None:
    """Bytes as JSON; None is null."""
    if raw is None:
        return None
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(raw).decode()}


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


def span_fields(span: Span) -> dict[str, Any]:
    """The bounds of a span as arguments of a verb. Raises `UsageError`."""
    span = require_span(span)
    return {"start": to_json(span.start) if span.start else None, "end": to_json(span.end)}


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
