"""Errors of reads at a time below `since` or at or above `upper`."""

from __future__ import annotations

from kvstore.errors.root import KVStoreError, span_text


class HistoryGoneError(KVStoreError):
    """History at `as_of` may be gone: it is kept from `since` on. Where `span` is given, `since`
    concerns this span, and the whole store otherwise. `nearest` has the nearest earlier and later
    instants that can be read, where history below `since` was thinned or has a hole."""

    def __init__(
        self,
        *,
        as_of: int,
        since: int,
        span: tuple[bytes, bytes | None] | None = None,
        remedy: str = "",
        nearest: tuple[int, ...] = (),
    ) -> None:
        where = "" if span is None else f" in {span_text(span)}"
        instants = " and ".join(map(str, nearest))
        if nearest:
            remedy = remedy or f"the nearest kept instants are {instants}: read at one of them"
        super().__init__(
            f"history{where} at {as_of} is gone: it is kept from {since} on",
            remedy or f"read at {since} or later; a hold keeps history for longer",
        )
        self.nearest = nearest
        self.as_of = as_of
        self.since = since
        self.span = span


class NotYetWrittenError(KVStoreError):
    """Commits at or below `as_of` may still come: the store is complete below `upper`."""

    def __init__(self, *, as_of: int, upper: int, remedy: str = "") -> None:
        super().__init__(
            f"time {as_of} is not complete: the store is complete below {upper}",
            remedy or f"read below {upper}, or wait",
        )
        self.as_of = as_of
        self.upper = upper
