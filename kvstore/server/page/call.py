"""One request for a view: its arguments, the time that the page shows, and links that keep it.

Invariants
1. Sections read keys and spans by the methods of this class only, which ask the caller's access.
2. All reads of a call are at one time. A call without a time reads the newest time at its start.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Final
from urllib.parse import quote, urlencode

from kvstore.errors import UsageError
from kvstore.limits import BROWSE_KEY_BYTES_MAX
from kvstore.server.access import Grant
from kvstore.server.page.blocks import Cell
from kvstore.server.page.notation import at_millisecond, from_notation, shortened, to_notation
from kvstore.span import Span
from kvstore.store import Store
from kvstore.timestamp import Timestamp

Owned = Callable[[], "AbstractContextManager[Store]"]
"""The store of this page to write to, for the time of a block."""

SHOWN_CHARS: Final = 160
"""The characters of a key or value in a table."""


class PageRequest:
    """One request for a view of `store` by a caller with `access`."""

    def __init__(
        self, store: Store, access: Grant, fields: Mapping[str, str], owned: Owned
    ) -> None:
        self.store, self.access, self.owned = store, access, owned
        self._fields = fields

    # -- arguments --------------------------------------------------------------------------

    def text(self, name: str, default: str = "") -> str:
        """An argument as text."""
        return self._fields.get(name, default).strip()

    def raw(self, name: str) -> bytes:
        """An argument in the notation of bytes."""
        return from_notation(self._fields.get(name, ""))

    def choice(self, name: str, known: Mapping[str, object], default: str) -> str:
        """An argument that is one of the `known` words."""
        found = self.text(name) or default
        if found not in known:
            raise UsageError(f"{name}={found[:100]!r}", f"choose one of {', '.join(known)}")
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
