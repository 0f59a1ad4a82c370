"""A feed of a client: the consumer of changes is here, and its position is with the store."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any

from kvstore.arguments import require_age, require_seconds
from kvstore.changes.event import Expand, Images
from kvstore.client import calls, streams
from kvstore.client.events import events_of
from kvstore.client.pool import FROM_CLIENT, Pool
from kvstore.client.reply import Reply, strange
from kvstore.errors import ClosedError, UsageError
from kvstore.feeds import STARTS, FeedBatch, Position, Share
from kvstore.forks import own
from kvstore.protocol import POSITION_NAME, span_fields
from kvstore.protocol.values import from_json, to_json
from kvstore.span import Span
from kvstore.timestamp import TimeLike, Timestamp


class ClientFeed:
    """A consumer's handle on a feed of a served store; `Client.feed` makes it. See `Feed`.

    It survives restarts of the server: a call that fails is sent again, and delivers nothing twice.
    """

    def __init__(self, pool: Pool, fields: Mapping[str, Any], opened: Mapping[str, Any]) -> None:
        """`fields` are the arguments of each call, `opened` the answer to the opening."""
        self._pool = pool
        self._fields = {**fields, "token": opened["token"]}
        self.name = str(fields["name"])
        self.share = Share(fields.get("worker") or 0, fields.get("workers") or 1)
        self.position = _position(opened)
        """The position after the last delivery of this handle."""
        self._closed = False
        own(self, repr(self), remedy=FROM_CLIENT)

    def batches(
        self, *, follow: bool = False, heartbeat: float | None = None
    ) -> Iterator[FeedBatch]:
        """See `Feed.batches`. Each batch is a round trip; following waits at the server."""
        if heartbeat is not None and not require_seconds(heartbeat, name="heartbeat"):
            raise UsageError(f"heartbeat={heartbeat}", "pass seconds above 0, or None")
        wait = min(heartbeat or self._pool.poll_s, self._pool.poll_s) if follow else 0.0
        while True:
            batch = self._fetch(wait)
            self.position = batch.position
            if batch.events or not follow or heartbeat is not None:
                yield batch
            if not follow and not batch.events and not batch.is_state:
                return

    def __iter__(self) -> Iterator[FeedBatch]:
        return self.batches()

    def ack(self, upto: FeedBatch | Position) -> None:
        """See `Feed.ack`."""
        position = upto.position if isinstance(upto, FeedBatch) else upto
        if position.is_beyond(self.position):
            raise UsageError(f"{position} was not delivered yet", "ack a delivered position")
        self._pool.send(calls.verb("ack", self._at(position), Reply.json, is_repeatable=True))

    def close(self) -> None:
        """Close the handle. The position stays. Repeatable."""
        self._closed = True

    def __enter__(self) -> ClientFeed:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<kvstore.ClientFeed {self.name!r}>"

    def _fetch(self, wait: float) -> FeedBatch:
        fields = {**self._at(self.position), "wait": wait}
        reader = streams.rows(self._pool, calls.verb("fetch", fields, Reply.json, is_read=True))
        told = (reader.schema.metadata or {}).get(POSITION_NAME)
        if told is None:
            raise strange(self._pool.where, "a batch without a position")
        found = json.loads(told)
        position = _position(found)
        is_state = self.position.state_from is not None
        is_cut = is_state or position.taken > 0
        return FeedBatch(list(events_of(reader, is_cut=is_cut)), position, is_state)

    def _at(self, position: Position) -> dict[str, Any]:
        if self._closed:
            raise ClosedError(f"feed {self.name!r}")
        timestamp, taken, state_from = position
        place = {"timestamp": int(timestamp), "taken": taken, "state_from": to_json(state_from)}
        return {**self._fields, **place}


def _position(found: Mapping[str, Any]) -> Position:
    """The position in an answer of the server."""
    key = found["state_from"]
    state_from = None if key is None else from_json(key, name="state_from")
    return Position(Timestamp(found["timestamp"]), found["taken"], state_from)


def feed_fields(
    name: str,
    streams: tuple[int, int] | None,
    images: Images,
    expand: Expand,
    span: Span | None,
    batch_rows: int | None,
    batch_bytes: int | None,
) -> dict[str, Any]:
    """The arguments of every call of a feed."""
    worker, workers = (None, None) if streams is None else Share.of(streams)
    return {
        "name": name,
        "worker": worker,
        "workers": workers,
        "images": images,
        "expand": expand,
        **span_fields(Span() if span is None else span),
        "batch_rows": batch_rows,
        "batch_bytes": batch_bytes,
    }


def start_fields(start: TimeLike | Position | None, max_age: timedelta | None) -> dict[str, Any]:
    """The arguments by which a feed begins."""
    age = require_age(max_age, name="max_age")
    position, since = (start, start.timestamp) if isinstance(start, Position) else (None, start)
    return {
        "since": since if since in STARTS else calls.ns(since, "start"),
        "taken": None if position is None else position.taken,
        "state_from": None if position is None else to_json(position.state_from),
        "max_age": None if age is None else age.total_seconds(),
    }
