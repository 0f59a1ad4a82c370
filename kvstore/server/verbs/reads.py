"""The verbs that read: each is the method of `Store` with its name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from itertools import chain, islice
from typing import Any, Final

import pyarrow as pa

from kvstore.arrow import binary_array
from kvstore.changes.event import EXPAND, IMAGES
from kvstore.errors import UsageError
from kvstore.joins.labels import times_given
from kvstore.limits import JOIN_VALUE_BYTES_MAX, SERVER_STREAM_ROWS
from kvstore.metrics import Distribution
from kvstore.protocol import KEYS_SCHEMA, READ_SCHEMA, VALUES_SCHEMA, to_json
from kvstore.server.access import READ
from kvstore.server.invocation import Invocation
from kvstore.server.verbs.verb import SPAN, Answer, Verb, described
from kvstore.span import Span
from kvstore.store import Store
from kvstore.timestamp import NS_PER_SECOND, TimeLike

_WINDOW: Final = {"since": "time", "upto": "time"}


def get(call: Invocation) -> Answer:
    """The value of a key. `as_of` is the time of the read; the newest complete time by default."""
    value = call.store.get(call.key(), call.time("as_of"))
    return {"found": value is not None, "value": to_json(value)}


def get_many(call: Invocation) -> Answer:
    """The values of keys, in their order. `as_of` is one time, or a time for each key."""
    keys = call.keys()
    times = _times(call, len(keys))
    found = call.store.requests.get_many(keys, times, JOIN_VALUE_BYTES_MAX)
    if call.table is None:
        if found is None:
            raise _too_large(len(keys))
        return {"values": [to_json(value) for value in found]}
    pieces = iter([found]) if found is not None else _pieces(call.store, keys, times)
    batches = (_batch(VALUES_SCHEMA, [each]) for each in pieces)
    return pa.RecordBatchReader.from_batches(VALUES_SCHEMA, batches)


def floor(call: Invocation) -> Answer:
    """The greatest live keys at or below keys, each with its value. With `below` only keys that
    begin with it count."""
    keys = call.keys()
    stem = call.value("below")
    if call.access.prefix:
        stem = call.access.require_key(call.access.prefix if stem is None else stem)
    pieces = _floors(call.store, keys, _times(call, len(keys)), stem)
    if call.table is not None:
        pieces = chain([next(pieces, [])], pieces)  # wrong times are refused before the answer
        schema = pa.schema([("key", pa.binary()), ("value", pa.binary())])
        batches = (_batch(schema, list(zip(*each, strict=True))) for each in pieces if each)
        return pa.RecordBatchReader.from_batches(schema, batches)
    rows: list[tuple[bytes | None, bytes | None]] = []
    size = 0
    for piece in pieces:
        size += _size(piece)
        if size > JOIN_VALUE_BYTES_MAX:
            raise _too_large(len(keys))
        rows += piece
    return {"floors": [{"key": to_json(key), "value": to_json(row)} for key, row in rows]}


def scan(call: Invocation) -> Answer:
    """Live keys and values of a span at one time, in order."""
    span, limit = call.span(), call.count("limit")
    rows = call.count("batch_rows")
    return call.store.scan_batches(
        span.start,
        span.end,
        None,
        call.time("as_of"),
        call.flag("reverse"),
        limit,
        batch_rows=SERVER_STREAM_ROWS if rows is None else min(rows, SERVER_STREAM_ROWS),
    )


def keys(call: Invocation) -> Answer:
    """Live keys of a span at one time, in order, without their values."""
    span = call.span()
    found = call.store.keys(
        span.start, span.end, None, call.time("as_of"), call.flag("reverse"), call.count("limit")
    )
    return pa.RecordBatchReader.from_batches(KEYS_SCHEMA, _key_batches(found))


def count(call: Invocation) -> Answer:
    """The number of live keys of a span at one time."""
    span = call.span()
    return {"count": call.store.count(span.start, span.end, None, call.time("as_of"))}


def ttl(call: Invocation) -> Answer:
    """How long until a key expires, in seconds, and the time at which it does; both are null if it
    does not expire, or is absent."""
    due = call.store.requests.expiry.due(call.key())
    left_s = None if due is None else (due - call.store.now()) / NS_PER_SECOND
    return {"seconds": left_s, "expires": due}


def history(call: Invocation) -> Answer:
    """All kept versions of a key, newest first. The value of a deletion is null."""
    key = call.key()
    call.store.requests.require_history(key, JOIN_VALUE_BYTES_MAX)
    versions = call.store.history(key)
    return {
        "versions": [{"timestamp": int(t), "value": to_json(value)} for _, t, value in versions]
    }


def changes(call: Invocation) -> Answer:
    """The changes of the window (since, upto], in time order, with their images."""
    since = call.time("since")
    if since is None:
        raise UsageError("argument 'since' is missing", "pass a time; 0 for all changes")
    span = call.span()
    return call.store.changes_batches(
        since,
        call.time("upto"),
        span=None if span == Span() else span,
        images=call.words("images", IMAGES, "delta"),
        expand=call.words("expand", EXPAND, "imports"),
    )


def splits(call: Invocation) -> Answer:
    """At most `count` spans of about equal size that cover a span."""
    spans = call.store.layout.splits(call.count("count") or 1, call.span())
    return {"splits": [{"start": to_json(each.start), "end": to_json(each.end)} for each in spans]}


def stats(call: Invocation) -> Answer:
    """Counts and sizes of the store, by name."""
    call.access.require_whole("stats")
    return call.store.stats()


def metrics(call: Invocation) -> Answer:
    """The metrics of the store, by name: for each combination of labels a number, or the buckets
    and the sum of a histogram. The last bucket has no bound."""
    call.access.require_whole("metrics")
    found = call.store.metrics()
    return {
        name: [[list(labels), _figure(value)] for labels, value in metric.values.items()]
        for name, metric in found.items()
    }


def times(call: Invocation) -> Answer:
    """The frontiers of the store, its id, and the time now."""
    store = call.store
    return {
        "since": int(store.since),
        "upper": int(store.upper),
        "durable": int(store.durable),
        "whole_since": int(store.whole_since),
        "indexed_since": int(store.indexed_since),
        "now": int(store.now()),
        "store_id": store.store_id,
    }


def resolve(call: Invocation) -> Answer:
    """The time that a read as of `as_of` reads at: a time for later calls that must agree."""
    with call.store.snapshot(call.time("as_of")) as snapshot:
        return {"as_of": int(snapshot.as_of)}


_MANY: Final = {"keys": "list of bytes", "as_of": "time, or list of times"}

READS: Final = [
    Verb(name, READ, run, described(run), parameters, rows, is_read=is_read)
    for name, run, parameters, rows, is_read in (
        ("get", get, {"key": "bytes", "as_of": "time"}, None, True),
        ("get_many", get_many, _MANY, READ_SCHEMA, False),
        ("floor", floor, {**_MANY, "below": "bytes"}, READ_SCHEMA, False),
        (
            "scan",
            scan,
            {**SPAN, "as_of": "time", "reverse": "flag", "limit": "count", "batch_rows": "count"},
            None,
            True,
        ),
        (
            "keys",
            keys,
            {**SPAN, "as_of": "time", "reverse": "flag", "limit": "count"},
            None,
            True,
        ),
        ("count", count, {**SPAN, "as_of": "time"}, None, True),
        ("ttl", ttl, {"key": "bytes"}, None, True),
        ("history", history, {"key": "bytes"}, None, True),
        ("changes", changes, {**_WINDOW, **SPAN, "images": "text", "expand": "text"}, None, True),
        ("splits", splits, {**SPAN, "count": "count"}, None, True),
        ("stats", stats, {}, None, True),
        ("metrics", metrics, {}, None, True),
        ("times", times, {}, None, True),
        ("resolve", resolve, {"as_of": "time"}, None, True),
    )
]


def _times(call: Invocation, count: int) -> TimeLike | list[TimeLike] | None:
    """The times of a read of many keys: one for all, or the times in the table or in the list."""
    if call.table is not None and "as_of" in call.table.column_names:
        return times_given([_whole(time) for time in call.column("as_of")], count)
    if not call.is_list("as_of"):
        return call.time("as_of")
    given = [time if isinstance(time, str) else _whole(time) for time in call.items("as_of")]
    return times_given(given, count)


def _whole(time: object) -> int:
    if type(time) is not int:
        raise UsageError(f"time {time!r}", "pass nanoseconds for each key")
    return time


def _figure(value: float | Distribution) -> Any:
    if not isinstance(value, Distribution):
        return value
    *bounded, (_, count) = value.buckets  # JSON has no infinite number
    return {"buckets": [*bounded, (None, count)], "total": value.total}


def _key_batches(keys: Iterator[bytes]) -> Iterator[pa.RecordBatch]:
    while found := list(islice(keys, SERVER_STREAM_ROWS)):
        yield pa.RecordBatch.from_arrays([binary_array(found)], schema=KEYS_SCHEMA)


def _pieces(
    store: Store, keys: list[bytes], times: TimeLike | list[TimeLike] | None
) -> Iterator[list[bytes | None]]:
    """The values of keys, in pieces whose values have `JOIN_VALUE_BYTES_MAX` bytes, and all at one
    time if one time is given. A larger piece is cut in two."""
    todo = [(0, len(keys))]
    context: Any = nullcontext() if isinstance(times, list) else store.snapshot(times)
    with context as snapshot:
        while todo:
            start, end = todo.pop()
            at = times[start:end] if isinstance(times, list) else snapshot.as_of
            found = store.requests.get_many(keys[start:end], at, JOIN_VALUE_BYTES_MAX)
            if found is None:
                middle = (start + end) // 2
                todo += [(middle, end), (start, middle)]
            else:
                yield found


def _floors(
    store: Store, keys: list[bytes], times: TimeLike | list[TimeLike] | None, stem: bytes | None
) -> Iterator[Sequence[tuple[bytes | None, bytes | None]]]:
    """The floors of keys, all at one time if one time is given, in pieces that end behind
    `JOIN_VALUE_BYTES_MAX` bytes. Keys are looked up one by one: many at once could hold values
    without a bound."""
    if len(keys) == 1:  # without a snapshot, which waits for the commit under way
        yield [row or (None, None) for row in store.floor_many(keys, times, stem)]
        return
    rows: list[tuple[bytes | None, bytes | None]] = []
    size = 0
    context: Any = nullcontext() if isinstance(times, list) else store.snapshot(times)
    with context as snapshot:
        for number, key in enumerate(keys):
            at = times[number] if isinstance(times, list) else snapshot.as_of
            row = store.floor(key, at, stem)
            rows.append((None, None) if row is None else row)
            size += 0 if row is None else len(row[0]) + len(row[1])
            if size >= JOIN_VALUE_BYTES_MAX:
                yield rows
                rows, size = [], 0
        yield rows


def _size(rows: Sequence[tuple[bytes | None, bytes | None]]) -> int:
    return sum(len(key or b"") + len(value or b"") for key, value in rows)


def _too_large(count: int) -> UsageError:
    return UsageError(
        f"the answer to {count} keys has more than {JOIN_VALUE_BYTES_MAX} bytes",
        "ask for fewer keys at a time, or send them as an Arrow stream",
    )


def _batch(schema: pa.Schema, columns: Sequence[Sequence[Any]]) -> pa.RecordBatch:
    arrays = [pa.array(column, field.type) for column, field in zip(columns, schema, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)
