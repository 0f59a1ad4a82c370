"""The verbs of feeds: a consumer on another machine, whose position is a hold of the store.

The server keeps nothing of a consumer between two calls. Each call brings the name, the token of
the hold and the position, so a consumer continues with a server that was started anew.

Invariants
1. A call with the token of a consumer that was fenced raises `FencedError`, and delivers nothing.
2. A fetch waits `FEED_POLL_S_MAX` at most.
3. A token with a prefix opens, reads and acknowledges feeds of this prefix only.
"""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa

from kvstore.base.span import Span
from kvstore.changes.batches import changes_schema
from kvstore.errors import HistoryGoneError
from kvstore.feeds import FEED_NAME, Feed, FeedBatch, Position
from kvstore.limits import FEED_BATCH_BYTES, FEED_BATCH_ROWS, FEED_POLL_S_MAX
from kvstore.remote import verbs
from kvstore.remote.protocol import POSITION_NAME, quoted, to_json
from kvstore.remote.server.invocation import Answer, Invocation, serves


@serves(verbs.OPEN_FEED)
def open_feed(call: Invocation) -> Answer:
    """Open a feed: take its hold, and fence its former consumer. `since` is a time, `now` or
    nothing, `taken` the events that were taken of the commit behind it."""
    start: Any = call.time("since")  # `now` is left to the store
    taken = call.count("taken")
    if taken is not None and start is not None:
        at = call.store.to_time(start, name="since")
        start = Position(at, taken, call.value("state_from"))
    feed = call.store.feeds.open(
        _feed_name(call), start, _streams(call), max_age=call.age("max_age"), **_wanted(call)
    )
    return {"token": feed.token, **_told(feed.position)}


@serves(verbs.FETCH)
def fetch(call: Invocation) -> Answer:
    """The next batch of a feed, with the position behind it. Without an event the call waits for
    one, for `wait` seconds at most. The last batch of the state comes at once, and may be empty: a
    client tells by the position before a batch whether its events are rows of the state."""
    feed = _resumed(call)
    if feed.position.timestamp < feed.acked:
        raise HistoryGoneError(as_of=feed.position.timestamp, since=feed.acked)
    wait = min(call.seconds("wait") or 0.0, FEED_POLL_S_MAX)
    batches = feed.batches(follow=bool(wait), heartbeat=wait or None)
    batch = next(batches, FeedBatch([], feed.position))
    if not batch.events and wait and not batch.is_state:
        batch = next(batches)
    told = json.dumps(_told(batch.position))
    schema = changes_schema().with_metadata({POSITION_NAME: told.encode()})
    found = batch.to_arrow().replace_schema_metadata(schema.metadata)
    return pa.RecordBatchReader.from_batches(schema, [found])


@serves(verbs.ACK)
def ack(call: Invocation) -> Answer:
    """Release the history up to a position: the consumer has processed it."""
    feed = _resumed(call)
    feed.ack(feed.position)
    return {"acked": int(feed.acked)}


@serves(verbs.DROP_FEED)
def drop_feed(call: Invocation) -> Answer:
    """Give up a feed: its position, and its claim on history."""
    call.access.require_whole("dropping a feed")
    call.store.feeds.drop(_feed_name(call))
    return {}


def _told(position: Position) -> dict[str, Any]:
    timestamp, taken, state_from = position
    return {"timestamp": int(timestamp), "taken": taken, "state_from": to_json(state_from)}


def _resumed(call: Invocation) -> Feed:
    at, taken = call.store.to_time(call["timestamp"], name="timestamp"), call.count("taken") or 0
    position = Position(at, taken, call.value("state_from"))
    streams = _streams(call)
    return call.store.feeds.resume(
        _feed_name(call), call["token"], position, streams, **_wanted(call)
    )


def _wanted(call: Invocation) -> dict[str, Any]:
    span = call.span()
    return {
        "images": call.word("images", "delta"),
        "expand": call.word("expand", "imports"),
        "span": None if span == Span() else span,
        "batch_rows": min(call.count("batch_rows") or FEED_BATCH_ROWS, FEED_BATCH_ROWS),
        "batch_bytes": min(call.count("batch_bytes") or FEED_BATCH_BYTES, FEED_BATCH_BYTES),
    }


def _streams(call: Invocation) -> tuple[int, int] | None:
    workers = call.count("workers")
    return None if workers is None else (call.count("worker") or 0, workers)


def _feed_name(call: Invocation) -> str:
    """The name of a feed in the store. The feeds of a token with a prefix have it in their names,
    so the token takes over no other consumer. A percent-encoded prefix has no colon."""
    name, prefix = call["name"], call.access.prefix
    return f"{quoted(prefix)}:{FEED_NAME.check('name', name)}" if prefix else name
