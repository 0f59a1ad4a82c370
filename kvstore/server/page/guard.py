"""The access to the page: tokens in a cookie, and requests that no other site can make.

A browser cannot add a token to the address that a person types. So a person signs in once: the
token travels in a form, or in the address that `kvstore ui` prints, and comes back in a cookie.

Invariants
1. The cookie is out of reach of scripts, is sent to this page alone and by this page alone, and
   ends with the browser.
2. A request that changes something comes from a form of this page. The browser says so in
   `Sec-Fetch-Site` or `Origin`, which no script of another site can set.
3. Without tokens the page shows, and changes nothing. It then answers at names of this machine
   only, so that a name of a stranger's zone that leads here reads nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from http.cookies import CookieError, SimpleCookie
from typing import Final
from urllib.parse import urlsplit

from kvstore.errors import AccessDeniedError
from kvstore.server.access import READ, Grant, Tokens
from kvstore.server.head import Head

LOOKING: Final = Grant(frozenset({READ}))
"""The access of a browser where the server has no tokens."""

SAFE: Final = ("GET", "HEAD")
_OWN: Final = frozenset({b"same-origin", b"none"})


class Guard:
    """Finds the access of each caller of the page."""

    def __init__(self, tokens: Tokens | None) -> None:
        self._tokens = tokens

    @property
    def asks_for_tokens(self) -> bool:
        """Whether a person signs in."""
        return self._tokens is not None

    def access(self, head: Head) -> Grant | None:
        """The access of the caller; None for one that has to sign in. Raises `AccessDeniedError`
        for a request of another site, and for one of another machine without tokens."""
        if self._tokens is None:
            head.require_here()
            _require_own_site(head)
            return LOOKING
        if head.method not in SAFE:
            _require_own_site(head)
        header = head.headers.get(b"authorization", b"")
        if not header:
            secret = _cookie(head)
            if not secret:
                return None
            header = b"Bearer " + secret.encode("latin-1", "replace")
        try:
            return self._tokens.access(header)
        except AccessDeniedError:
            return None

    def cookie_of(self, head: Head, secret: str) -> bytes | None:
        """The header that signs the bearer of a token in; None for an unknown token."""
        assert self._tokens is not None, "a page without tokens asks for none"
        try:
            self._tokens.access(b"Bearer " + secret.encode("utf-8", "replace"))
        except AccessDeniedError:
            return None
        return _cookie_header(head, secret)

    def forget(self, head: Head) -> bytes:
        """The header that signs a caller out."""
        return _cookie_header(head, "") + b"; Max-Age=0"


def _cookie_header(head: Head, secret: str) -> bytes:
    secure = "; Secure" if head.is_secure else ""
    return f"{_name(head)}={secret}; HttpOnly; SameSite=Strict{secure}".encode("latin-1", "replace")


def _name(head: Head) -> str:
    """The cookie's name. Cookies know no ports, so two servers of one machine need two names."""
    port = head.headers.get(b"host", b"").rpartition(b":")[2].decode("latin-1")
    return f"kvstore-page-{port if port.isdecimal() else 'default'}"


def _cookie(head: Head) -> str:
    try:
        found = SimpleCookie(head.headers.get(b"cookie", b"").decode("latin-1"))
    except CookieError:
        return ""
    name = _name(head)
    return found[name].value if name in found else ""


def _require_own_site(head: Head) -> None:
    """Raise `AccessDeniedError` for a request that a page of another site has caused."""
    site = head.headers.get(b"sec-fetch-site")
    if site is not None:
        is_own = site in _OWN and (site == b"same-origin" or head.method in SAFE)
    else:
        is_own = _is_own_origin(head.headers, head.method)
    if not is_own:
        raise AccessDeniedError("the page", "another site asks for it", "open the page by itself")


def _is_own_origin(headers: Mapping[bytes, bytes], method: str) -> bool:
    origin = headers.get(b"origin")
    if origin is None:
        return method in SAFE or b"authorization" in headers  # no browser adds that by itself
    try:
        return urlsplit(origin).netloc == headers.get(b"host", b"")
    except ValueError:
        return False
