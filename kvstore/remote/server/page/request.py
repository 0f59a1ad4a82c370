"""One request for a view: who may make it, its arguments, its time, links that keep them; and the
sections that answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from http.cookies import CookieError, SimpleCookie
from typing import Final, Protocol, TypeAlias
from urllib.parse import quote, urlencode, urlsplit

from kvstore.base.span import Span
from kvstore.base.timestamp import Timestamp
from kvstore.errors import AccessDeniedError, UsageError
from kvstore.limits import BROWSE_KEY_BYTES_MAX
from kvstore.remote.server.http import Head
from kvstore.remote.server.page.html import (
    DATA_TYPES,
    SHOWN_CHARS,
    Cell,
    PageView,
    at_millisecond,
    from_notation,
    shortened,
    to_notation,
)
from kvstore.remote.server.tokens import Grant, Tokens
from kvstore.remote.server.watch import Watch
from kvstore.remote.verbs import READ
from kvstore.store import Store

# --------------------------------------------------------------------------------------------------
# A section of the page: a name in its navigation, and the functions that make its views.

Look: TypeAlias = "Callable[[PageRequest], PageView]"


@dataclass(frozen=True, slots=True)
class Section:
    """A section at `/ui/<name>`.

    `view` answers GET. A section with `act` answers POST with it, for callers with `act_right`; its
    view is shown afterwards. A section without `in_navigation` is reached by links. A section that
    `is_whole` concerns all keys: a token with a prefix cannot see it.
    """

    name: str
    title: str
    view: Look
    act: Look | None = None
    right: str = READ
    act_right: str = READ
    in_navigation: bool = True
    is_whole: bool = True


# --------------------------------------------------------------------------------------------------
# One request for a view: its arguments, the time that the page shows, and links that keep it.
#
# Invariants
# 1. Sections read keys and spans by the methods of this class only, which ask the caller's access.
# 2. All reads of a call are at one time. A call without a time reads the newest time at its start.


class Revertible(Protocol):
    """What a page changes: the store itself, or its owner's client."""

    def revert_import(self, import_id: int) -> Timestamp:
        """See `Store.revert_import`."""
        ...


Owned = Callable[[], "AbstractContextManager[Revertible]"]
"""The store of this page to write to, for the time of a block."""


class PageRequest:
    """One request for a view of `store` by a caller with `access`."""

    def __init__(
        self,
        store: Store,
        access: Grant,
        fields: Mapping[str, str],
        owned: Owned,
        watch: Watch | None = None,
    ) -> None:
        """`watch` has the trends and the callers of the server, if the page has one."""
        self.store, self.access, self.owned, self.watch = store, access, owned, watch
        self._fields = fields

    # -- arguments --------------------------------------------------------------------------

    def text(self, name: str, default: str = "") -> str:
        """An argument as text."""
        return self._fields.get(name, default).strip()

    def raw_text(self, name: str) -> str:
        """An argument as text, with the spaces around it."""
        return self._fields.get(name, "")

    def raw(self, name: str) -> bytes:
        """An argument in the notation of bytes."""
        return from_notation(self._fields.get(name, ""))

    def name(self, name: str) -> str:
        """A text in the notation of bytes, such as the name of a column."""
        return self.raw(name).decode("utf-8", "replace")

    @property
    def file_format(self) -> str:
        """The format of the file that is asked for; empty for the page itself."""
        return self.choice("as", {"": None, **DATA_TYPES}, "")

    def choice(self, name: str, known: Mapping[str, object], default: str) -> str:
        """An argument that is one of the `known` words."""
        found = self.text(name) or default
        if found not in known:
            raise UsageError(
                f"{name}={found[:100]!r}", f"choose one of {', '.join(filter(None, known))}"
            )
        return found

    def number(self, name: str) -> int | None:
        """An argument as a number; None where it is missing."""
        found = self.text(name)
        if found and (not found.isdecimal() or len(found) > 19):
            raise UsageError(f"{name}={found[:100]!r}", "pass a number")
        return int(found) if found else None

    def key(self) -> bytes:
        """The key of the argument `key`, which the caller may read."""
        return self.access.require_key(self.raw("key"))

    def span(self, prefix: bytes, after: bytes = b"") -> Span:
        """The keys with a prefix, from `after` on, if the caller may read them."""
        span = self.access.span(Span.of(None, None, prefix or None))
        if not after:
            return span
        return self.access.span(Span(max(after, span.start), span.end))

    # -- time -------------------------------------------------------------------------------

    @property
    def at_text(self) -> str:
        """The time of the page as the caller wrote it; empty for the newest."""
        return self.text("at")

    @cached_property
    def chosen(self) -> Timestamp | None:
        """The time that the caller chose; None for the newest."""
        text = self.at_text
        if not text:
            return None
        chosen = self.store.to_time(text, name="at")
        newest = Timestamp(self.store.upper - 1)
        # A live reader cannot complete the present time: its newest time stands for it. So it
        # does for the millisecond by which the page tells it.
        present = max(self.store.now(), at_millisecond(newest))
        return newest if newest < chosen <= present else chosen

    @cached_property
    def as_of(self) -> Timestamp:
        """The time of each read."""
        return Timestamp(self.store.upper - 1) if self.chosen is None else self.chosen

    # -- links ------------------------------------------------------------------------------

    def link(self, path: str, **fields: str | int | bytes | None) -> str:
        """A link to a section, at the time of this page. Arguments that are None or empty are left
        out; bytes are written in their notation."""
        shown = {
            name: to_notation(value) if isinstance(value, bytes) else str(value)
            for name, value in {"at": self.at_text, **fields}.items()
            if value not in (None, b"", "")
        }
        query = urlencode(shown, quote_via=quote)
        return f"{path}?{query}" if query else path

    def key_cell(self, key: bytes, path: str = "key", **fields: bytes) -> Cell:
        """A key that leads to its page. A key that is too long for an address leads nowhere."""
        text = shortened(to_notation(key[: SHOWN_CHARS * 4]), SHOWN_CHARS)
        if len(key) > BROWSE_KEY_BYTES_MAX:
            return Cell(text, note=f"{len(key):,} bytes: too long for an address", is_code=True)
        return Cell(text, self.link(path, **(fields or {"key": key})), is_code=True)


# --------------------------------------------------------------------------------------------------
# The access to the page: tokens in a cookie, and requests that no other site can make.
#
# A browser cannot add a token to the address that a person types. So a person signs in once: the
# token travels in a form, or in the address that `kvstore ui` prints, and comes back in a cookie.
#
# Invariants
# 1. The cookie is out of reach of scripts, is sent to this page alone and by this page alone, and
#    ends with the browser.
# 2. A request that changes something comes from a form of this page. The browser says so in
#    `Sec-Fetch-Site` or `Origin`, which no script of another site can set.
# 3. Without tokens the page shows, and changes nothing. It then answers at names of this machine
#    only, so that a name of a stranger's zone that leads here reads nothing.

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
