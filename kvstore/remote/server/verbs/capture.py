"""The verbs of changes with their commits: events, epochs, generations of streams, and waits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pyarrow as pa

from kvstore.base.span import Span
from kvstore.changes.batches import changes_schema, from_events
from kvstore.changes.epochs import Epoch
from kvstore.changes.events import Event
from kvstore.changes.streams import Generation
from kvstore.limits import ARROW_BYTES_MAX, FEED_POLL_S_MAX, SERVER_STREAM_ROWS
from kvstore.remote import verbs
from kvstore.remote.protocol import EPOCHS_SCHEMA
from kvstore.remote.server.invocation import Answer, Invocation, serves
from kvstore.remote.server.verbs.upkeep import progress_rows


@serves(verbs.EVENTS)
def events(call: Invocation) -> Answer:
    """The changes of the window (since, upto] as `changes` gives them, each commit in the order of
    its changes."""
    span = call.span()
    found = call.store.events(
        call["since"],
        call.time("upto"),
        span=None if span == Span() else span,
        images=call.word("images", "delta"),
        expand=call.word("expand", "imports"),
    )
    return pa.RecordBatchReader.from_batches(changes_schema(), _event_batches(found))


@serves(verbs.WAIT_BEYOND)
def wait_beyond(call: Invocation) -> Answer:
    """Wait until `upper` of the store is above the argument, for `wait` seconds at most. The answer
    has the `upper` of the store then."""
    call.store.wait_beyond(call["upper"], timeout=min(call.seconds("wait") or 0.0, FEED_POLL_S_MAX))
    return {"upper": int(call.store.upper)}


@serves(verbs.EPOCHS)
def epochs(call: Invocation) -> Answer:
    """The epochs that closed above `since`: runs of changesets, with counts of their events."""
    call.access.require_whole("epochs")
    found = call.store.epochs(call.time("since") or 0)
    return pa.RecordBatchReader.from_batches(EPOCHS_SCHEMA, _epoch_batches(found))


@serves(verbs.GENERATIONS)
def generations(call: Invocation) -> Answer:
    """The generations of streams, oldest first; the last one is open."""
    return {"generations": [_generation(each) for each in call.store.generations()]}


@serves(verbs.RESHARD)
def reshard(call: Invocation) -> Answer:
    """Split the change index over `streams` streams from now on. Returns the new generation."""
    return _generation(call.store.reshard(call["streams"]))


@serves(verbs.FORCE_QUIESCENCE)
def force_quiescence(call: Invocation) -> Answer:
    """Find a time at which no changeset was half done, no longer ago than `after` seconds: else
    hold new changesets back until the open ones have ended, for `timeout` seconds at most."""
    store, after, timeout = call.store, call.age("after"), call.seconds("timeout")
    return progress_rows(
        lambda tell: {"timestamp": int(store.force_quiescence(after, timeout=timeout))}
    )


def _generation(found: Generation) -> dict[str, Any]:
    return {
        "opened_at": int(found.opened_at),
        "closed_at": None if found.closed_at is None else int(found.closed_at),
        "streams": [stream.hex() for stream in found.streams],
    }


def _event_batches(events: Iterable[Event]) -> Iterator[pa.RecordBatch]:
    """Events as record batches, bounded in rows and bytes."""
    rows: list[Event] = []
    size = 0
    for event in events:
        rows.append(event)
        size += len(event.key) + sum(
            len(each) for each in (event.value, event.pre, event.post) if each is not None
        )
        if len(rows) >= SERVER_STREAM_ROWS or size >= ARROW_BYTES_MAX:
            yield from_events(rows)
            rows, size = [], 0
    if rows:
        yield from_events(rows)


def _epoch_batches(epochs: Iterable[Epoch]) -> Iterator[pa.RecordBatch]:
    rows: list[Epoch] = []
    for epoch in epochs:
        rows.append(epoch)
        if len(rows) >= SERVER_STREAM_ROWS:
            yield _epoch_batch(rows)
            rows = []
    if rows:
        yield _epoch_batch(rows)


def _epoch_batch(rows: list[Epoch]) -> pa.RecordBatch:
    columns = zip(*rows, strict=True)
    arrays = [
        pa.array(each, field.type) for each, field in zip(columns, EPOCHS_SCHEMA, strict=True)
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=EPOCHS_SCHEMA)
