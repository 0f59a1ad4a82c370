"""The head of an HTTP request: the parts of its line and headers that a server of a store needs.

Invariants
1. A path is compared as bytes, after one decoding of each part: `..`, double slashes and encoded
   slashes are bytes of a key like any other, and lead nowhere.
2. A browser on this machine may be steered by a stranger's page. Callers without a token are served
   only if no header shows a browser, a proxy or another host's name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final, NamedTuple
from urllib.parse import quote

from kvstore.errors import AccessDeniedError, UsageError
from kvstore.protocol import JSON_TYPE, unquoted
from kvstore.store import RequestToken

TOKEN_PATTERN: Final = (
    r"([A-Za-z0-9_-]{1,64})(?:\.([0-9]{1,18})(?:\.([0-9]{1,18}|[0-8][0-9]{18}))?)?"
)
"""A writer, the number of its request, and a time before it was first sent."""
_TOKEN: Final = re.compile(TOKEN_PATTERN.encode())
_LOCAL_HOSTS: Final = frozenset({b"127.0.0.1", b"localhost", b"[::1]", b"kvstore"})
_LOCAL_CLIENTS: Final = ("127.", "::1", "::ffff:127.")
_BROWSERS: Final = frozenset({b"origin", b"sec-fetch-site", b"referer"})
FRAMING: Final = frozenset({b"content-length", b"transfer-encoding"})
"""Headers that tell where a body ends. A request has one of them at most."""
_PROXIES: Final = frozenset({b"forwarded", b"x-forwarded-for", b"via"})


class Head(NamedTuple):
    """The line and the headers of a request."""

    method: str
    path: bytes
    query: bytes
    headers: Mapping[bytes, bytes]
    client: str | None
    is_secure: bool = False
    """Whether it came by TLS, to this process or to a proxy that says so."""

    @property
    def length(self) -> int | None:
        """The length of the body; None where it comes in chunks. Raises `UsageError`."""
        found = self.headers.get(b"content-length")
        coding = self.headers.get(b"transfer-encoding")
        if found is None:
            if coding is not None and coding.lower() != b"chunked":
                raise UsageError("a body in a coding besides chunked", "send it as it is")
            return None if coding is not None else 0
        if coding is not None or not found.isdigit() or len(found) > 18:
            raise UsageError("content-length is no number", "send the length of the body")
        return int(found)

    @property
    def wants_json(self) -> bool:
        """Whether the caller asks for JSON where rows travel as Arrow."""
        return JSON_TYPE.encode() in self.headers.get(b"accept", b"")

    @property
    def token(self) -> RequestToken | None:
        """The token of the request, by the header `Idempotency-Key`. Raises `UsageError`."""
        text = self.headers.get(b"idempotency-key")
        if text is None:
            return None
        match = _TOKEN.fullmatch(text)
        if match is None:
            raise UsageError(
                "Idempotency-Key", "send up to 64 letters, digits, - and _, and a dot and a number"
            )
        writer, serial, known = match.groups()
        return RequestToken(
            writer.decode(), int(serial or 0), None if known is None else int(known)
        )

    @property
    def changeset(self) -> str | None:
        """The name of the changeset that the request belongs to, by the header
        `Kvstore-Changeset`."""
        name = self.headers.get(b"kvstore-changeset")
        return None if name is None else name.decode("latin-1")

    def require_local(self) -> None:
        """Raise `AccessDeniedError` unless a program on this machine calls. Serves servers without
        tokens."""
        self._require_near(not _BROWSERS.isdisjoint(self.headers))

    def require_here(self) -> None:
        """Raise `AccessDeniedError` unless a program or a browser on this machine calls, by a name
        of this machine. The caller finds out by itself which site a browser acts for."""
        self._require_near(False)

    def _require_near(self, is_browser: bool) -> None:
        client = self.client
        cause = ""
        if client is not None and not client.startswith(_LOCAL_CLIENTS):
            cause = "it comes from another machine"
        elif is_browser or not _PROXIES.isdisjoint(self.headers):
            cause = "it comes from a browser, or through a proxy"
        elif client is not None and _host(self.headers) not in _LOCAL_HOSTS:
            cause = "it names another host"
        if cause:
            raise AccessDeniedError(
                "the call", f"{cause}, and the server has no tokens", "give the server tokens"
            )


def head_of(scope: Mapping[str, Any]) -> Head:
    """The head of an ASGI request. Its path is below the place where the application is mounted."""
    raw: bytes = scope.get("raw_path") or quote(scope["path"]).encode()
    root = scope.get("root_path", "")
    if root:
        raw = raw.removeprefix(quote(root).encode())
    client = scope.get("client")
    headers = dict(scope["headers"])
    if len(headers) < len(scope["headers"]):
        for name in FRAMING:  # of several lines a proxy may believe another one than we do
            lines = [value for each, value in scope["headers"] if each == name]
            if len(lines) > 1:
                headers[name] = b", ".join(lines)
    scheme = headers.get(b"x-forwarded-proto", scope.get("scheme", "").encode())
    return Head(
        scope["method"],
        raw.partition(b"?")[0],
        scope["query_string"],
        headers,
        None if client is None or not client[0] else client[0],
        scheme == b"https",
    )


def fields_of(query: bytes) -> dict[str, Any]:
    """The arguments of a query string, as bytes. Raises `UsageError` for one that comes twice."""
    found: dict[str, Any] = {}
    for part in query.split(b"&") if query else ():
        name, _, value = part.partition(b"=")
        text = unquoted(name).decode("utf-8", "replace")
        if text in found:
            raise UsageError(f"argument {text!r} comes twice", "pass it once")
        found[text] = unquoted(value)
    return found


def _host(headers: Mapping[bytes, bytes]) -> bytes:
    host = headers.get(b"host", b"").lower()
    if host.startswith(b"["):
        return host.partition(b"]")[0] + b"]"
    return host.partition(b":")[0]
