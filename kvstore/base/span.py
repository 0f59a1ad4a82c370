"""Spans: half-open ranges `[start, end)` of byte keys. `end=None` is the end of the key space."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, TypeAlias

from kvstore.errors import Argument, UsageError, printable
from kvstore.limits import KEY_BYTES_MAX

RESERVED: Final = b"\xff" * 9
"""The keys from here on belong to tables and to expiries. Each of them begins with these bytes, so
one bound keeps them out of a span. Eight bytes would be the largest integer of 64 bits, which is a
likely key."""
BytesLike: TypeAlias = bytes | bytearray | memoryview
"""A key or a value as callers pass it. A buffer that can change is copied."""


def require_key(key: object, *, name: str = "key", room: int = 0) -> bytes:
    """Return `key` if it can be stored. Raises `UsageError` on another type and on a longer key.

    A key of a subclass of `bytes` (numpy has one), a `bytearray` or a `memoryview` is copied into
    plain bytes, because the layers below take nothing else. The key may be `room` bytes longer than
    the longest key.
    """
    if type(key) is not bytes:
        if not isinstance(key, bytes | bytearray | memoryview):
            raise UsageError(
                (Argument(name), f" must be bytes, not {type(key).__name__}"), "encode it first"
            )
        key = bytes(key)
    if len(key) - room > KEY_BYTES_MAX:
        most = KEY_BYTES_MAX + room
        raise UsageError(
            (Argument(name), f" has {len(key)} bytes, at most {most} are allowed"), "shorten it"
        )
    return key


@dataclass(frozen=True, slots=True)
class Span:
    """The keys `start <= key < end`. The default is every key.

    Raises `UsageError` when `start >= end`: an empty span in a call is a mistake of the caller.
    """

    start: bytes = b""
    end: bytes | None = None

    def __post_init__(self) -> None:
        # Scans of a few rows pass here: a bound that can stay as it is costs no call.
        start, end = self.start, self.end
        if type(start) is not bytes or len(start) > KEY_BYTES_MAX:
            start = self._require_bound("start")
        if end is None:
            return
        if type(end) is not bytes or len(end) > KEY_BYTES_MAX:
            end = self._require_bound("end")
        if start >= end:
            raise UsageError(
                f"empty span [{printable(start)}, {printable(end)})", "start must be below end"
            )

    @classmethod
    def of_prefix(cls, prefix: bytes) -> Span:
        """All keys that begin with `prefix`; an empty prefix is every key."""
        prefix = require_key(prefix, name="prefix")
        return cls(prefix, prefix_end(prefix))

    @classmethod
    def of_key(cls, key: bytes) -> Span:
        """The one key, as a span."""
        key = require_key(key)
        return cls(key, key + b"\0")

    @classmethod
    def of(
        cls, start: bytes | None = None, end: bytes | None = None, prefix: bytes | None = None
    ) -> Span:
        """The span that the arguments `start`, `end` and `prefix` of a scan describe.

        Raises `UsageError` if a prefix comes with bounds, or the span is empty.
        """
        if prefix is None:
            return cls(b"" if start is None else start, end)
        if start is not None or end is not None:
            raise UsageError("a prefix goes without start and end", "pass one or the other")
        return cls.of_prefix(prefix)

    @classmethod
    def to_delete(cls, start: bytes | None, end: bytes | None, prefix: bytes | None) -> Span:
        """The span that a range delete names, as `of`. It has an end: a prefix above which no key
        lies ends where the keys of tables begin. Raises `UsageError` for neither end nor prefix."""
        span = cls.of(start, end, prefix)
        if span.end is None and prefix is not None and span.start < RESERVED:
            span = cls(span.start, RESERVED)
        if span.end is None:
            remedy = "pass the least key that is to be kept, or a prefix"
            raise UsageError("delete_range needs an end", remedy)
        return span

    def __contains__(self, key: bytes) -> bool:
        return self.start <= key and (self.end is None or key < self.end)

    def plain(self) -> Span:
        """The span without the reserved keys. A span that begins among them asks for them and
        stays as it is."""
        if self.start >= RESERVED or (self.end is not None and self.end <= RESERVED):
            return self
        return Span(self.start, RESERVED)

    def intersect(self, start: bytes, end: bytes | None) -> Span | None:
        """The common part of this span and `[start, end)`. None if there is none."""
        low = max(self.start, start)
        high = end if self.end is None else self.end if end is None else min(self.end, end)
        return Span(low, high) if high is None or low < high else None

    def _require_bound(self, name: str) -> bytes:
        given = getattr(self, name)
        # A bound may lie just above the longest key: the end of a span of this key alone does.
        bound = require_key(given, name=name, room=1)
        if bound is not given:
            object.__setattr__(self, name, bound)
        return bound


def prefix_end(prefix: bytes) -> bytes | None:
    """The least key above all keys that begin with `prefix`; None if there is none."""
    stem = prefix.rstrip(b"\xff")
    return stem[:-1] + bytes([stem[-1] + 1]) if stem else None


def merge_spans(spans: Iterable[Span]) -> list[Span]:
    """The fewest spans that cover the same keys, ascending. O(n log n)."""
    merged: list[Span] = []
    for span in sorted(spans, key=lambda span: span.start):
        last = merged[-1] if merged else None
        if last is None or (last.end is not None and last.end < span.start):
            merged.append(span)
        elif last.end is not None and (span.end is None or span.end > last.end):
            merged[-1] = Span(last.start, span.end)
    return merged


def one_span(span: Span | None, prefix: bytes | None) -> Span | None:
    """The span that a caller chose, by `span` or by `prefix`. Raises `UsageError` for both."""
    if prefix is None:
        return span
    if span is not None:
        raise UsageError("span and prefix were given", "pass one of the two")
    return Span.of_prefix(prefix)
