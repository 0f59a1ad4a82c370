"""The changes of a served store, and the times and groups of its commits."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any, Final

import pyarrow as pa

from kvstore.arguments import require_age, require_count, require_integer, require_wait
from kvstore.changes import Change, Order, Revisions
from kvstore.changes.changeset import ambient
from kvstore.changes.epoch import Epoch
from kvstore.changes.event import Event, Expand, Images
from kvstore.changes.generation import Generation, generation
from kvstore.changesets import INSIDE_CHANGESET
from kvstore.client import calls, streams
from kvstore.client.calls import ClientRequest
from kvstore.client.changesets import ClientChangeset
from kvstore.client.events import changes_of, events_of
from kvstore.client.feeds import ClientFeed, feed_fields, start_fields
from kvstore.client.frontiers import ServedFrontiers
from kvstore.client.reply import Reply
from kvstore.client.work import work_of
from kvstore.errors import UsageError
from kvstore.feeds import Position
from kvstore.limits import STREAMS_MAX
from kvstore.protocol import EPOCHS_SCHEMA, span_fields
from kvstore.span import Span, one_span
from kvstore.timestamp import TimeLike, Timestamp

_EPOCH: Final = tuple(EPOCHS_SCHEMA.names)


class ServedCapture(ServedFrontiers):
    """The calls of a client that concern changes."""

    def changes(
        self,
        since: TimeLike,
        upto: TimeLike | None = None,
        start: bytes | None = None,
        end: bytes | None = None,
        revisions: Revisions = "all",
        order: Order = "key",
        *,
        prefix: bytes | None = None,
    ) -> Iterator[Change]:
        """See `Store.changes`."""
        span = Span.of(start, end, prefix)
        request = _versions(since, upto, span, revisions, order=order)
        return changes_of(streams.rows(self._pool, request))

    def events(
        self,
        since: TimeLike,
        upto: TimeLike | None = None,
        *,
        span: Span | None = None,
        images: Images = "delta",
        expand: Expand = "imports",
    ) -> Iterator[Event]:
        """See `Store.events`."""
        request = _changes(since, upto, span or Span(), images, expand, name="events")
        return events_of(streams.rows(self._pool, request))

    def changes_batches(
        self,
        since: TimeLike,
        upto: TimeLike | None = None,
        *,
        span: Span | None = None,
        images: Images = "delta",
        expand: Expand = "imports",
    ) -> pa.RecordBatchReader:
        """See `Store.changes_batches`."""
        request = _changes(since, upto, span or Span(), images, expand)
        return streams.rows(self._pool, request)

    def versions_batches(
        self,
        since: TimeLike,
        upto: TimeLike | None = None,
        *,
        span: Span | None = None,
        revisions: Revisions = "all",
        ranges: bool = False,
    ) -> pa.RecordBatchReader:
        """The puts and deletes that `Store.changes` gives by key, as Arrow batches; with `ranges`
        the range deletes alone."""
        request = _versions(since, upto, span or Span(), revisions, ranges=ranges)
        return streams.rows(self._pool, request)

    def feed(
        self,
        name: str,
        start: TimeLike | Position | None = None,
        streams: tuple[int, int] | None = None,
        images: Images = "delta",
        expand: Expand = "imports",
        *,
        span: Span | None = None,
        prefix: bytes | None = None,
        max_age: timedelta | None = None,
        batch_rows: int | None = None,
        batch_bytes: int | None = None,
    ) -> ClientFeed:
        """See `Store.feed`. The position is with the store, so the server may be started anew."""
        span = one_span(span, prefix)
        fields = feed_fields(name, streams, images, expand, span, batch_rows, batch_bytes)
        opening = {**fields, **start_fields(start, max_age)}
        opened = self._pool.send(calls.verb("open_feed", opening, Reply.json))
        return ClientFeed(self._pool, fields, opened)

    def drop_feed(self, name: str) -> None:
        """Give up a feed: its position, and its claim on history."""
        self._pool.send(calls.verb("drop_feed", {"name": name}, Reply.json))

    # -- waits and groups -------------------------------------------------------------------

    def wait_beyond(
        self, upper: int, *, timeout: float | None = None, stop: Callable[[], bool] = lambda: False
    ) -> None:
        """See `Store.wait_beyond`. The server waits, for ten seconds at a time at most; `stop` is
        asked before each time."""
        upper = require_integer(upper, name="upper")
        seconds = require_wait(timeout)
        ends_at = None if seconds is None else time.monotonic() + seconds
        while not stop():
            most = self._pool.poll_s
            left = most if ends_at is None else max(ends_at - time.monotonic(), 0.0)
            fields = {"upper": upper, "wait": min(left, most)}
            request = calls.verb("wait_beyond", fields, Reply.json, is_read=True)
            if self._pool.send(request)["upper"] > upper or not left:
                return

    def changeset(self) -> ClientChangeset:
        """See `Store.changeset`. The writes of this client inside the block, in this context,
        belong to it. The server ends it after five minutes without a write; the next write raises
        `ClosedError`."""
        return ClientChangeset(self._pool)

    def epochs(self, since: TimeLike = 0) -> Iterator[Epoch]:
        """See `Store.epochs`."""
        fields = {"since": calls.ns(since, "since")}
        request = calls.verb("epochs", fields, Reply.json, is_read=True)
        for batch in streams.rows(self._pool, request):
            for row in zip(*(batch.column(name).to_pylist() for name in _EPOCH), strict=True):
                found = Epoch(*row)
                yield found._replace(closed_at=Timestamp(found.closed_at))

    def generations(self) -> list[Generation]:
        """See `Store.generations`."""
        found = self._pool.send(calls.fields_of("generations"))["generations"]
        return [_generation(each) for each in found]

    def reshard(self, streams: int) -> Generation:
        """See `Store.reshard`. Needs the right `admin`."""
        fields = {"streams": require_count(streams, name="streams", most=STREAMS_MAX)}
        return _generation(self._pool.send(calls.verb("reshard", fields, Reply.json)))

    def force_quiescence(
        self, after: timedelta | None = None, *, timeout: float | None = None
    ) -> Timestamp:
        """See `Store.force_quiescence`. Needs the right `admin`."""
        require_age(after, name="after")
        if ambient(self._pool) is not None:
            raise UsageError(*INSIDE_CHANGESET)
        age_s = None if after is None else after.total_seconds()
        found = work_of(self._pool, "force_quiescence", None, after=age_s, timeout=timeout)
        return Timestamp(found["timestamp"])


def _generation(found: dict[str, Any]) -> Generation:
    streams = [bytes.fromhex(stream) for stream in found["streams"]]
    made, closed_at = generation(found["opened_at"], streams), found["closed_at"]
    return made if closed_at is None else replace(made, closed_at=Timestamp(closed_at))


def _changes(
    since: TimeLike,
    upto: TimeLike | None,
    span: Span,
    images: str,
    expand: str,
    *,
    name: str = "changes",
) -> ClientRequest[dict[str, Any]]:
    """See `Store.changes_batches`; with the name `"events"` see `Store.events`."""
    window = {"since": calls.since(since), "upto": calls.ns(upto, "upto")}
    fields = {**window, **span_fields(span), "images": images, "expand": expand}
    return calls.verb(name, fields, Reply.json, is_read=True)


def _versions(
    since: TimeLike,
    upto: TimeLike | None,
    span: Span,
    revisions: str,
    *,
    ranges: bool = False,
    order: str | None = None,
) -> ClientRequest[dict[str, Any]]:
    """The puts and deletes of a window by key; see `Store.changes`. With `ranges` only the range
    deletes, with `order` all changes in that order."""
    window = {"since": calls.since(since), "upto": calls.ns(upto, "upto")}
    choice = {"revisions": revisions, "ranges": ranges, "order": order}
    fields = {**window, **span_fields(span), **choice}
    return calls.verb("versions", fields, Reply.json, is_read=True)
