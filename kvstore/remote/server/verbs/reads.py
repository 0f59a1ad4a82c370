"""The verbs that read. Answers to many keys come in pieces."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from functools import partial
from itertools import chain, islice
from typing import Any, Final, Protocol, TypeAlias, TypeVar

import pyarrow as pa

from kvstore.base.span import Span
from kvstore.base.timestamp import NS_PER_SECOND, TimeLike, Timestamp
from kvstore.errors import UsageError
from kvstore.limits import (
    ARROW_BYTES_MAX,
    HISTORY_BYTES_MAX,
    JOIN_VALUE_BYTES_MAX,
    SERVER_STREAM_ROWS,
)
from kvstore.metrics import Distribution
from kvstore.mvcc.arrow import binary_array
from kvstore.remote import verbs
from kvstore.remote.protocol import KEYS_SCHEMA, VALUES_SCHEMA, to_json
from kvstore.remote.server.invocation import Answer, Invocation, serves
from kvstore.store import Store
from kvstore.tables.joins import times_given

# --------------------------------------------------------------------------------------------------
# Answers to many keys, in pieces as small as the batches of a scan.
#
# Invariants
# 1. A piece has the answer to one key, or answers of `ARROW_BYTES_MAX` bytes at most. So streams of
#    answers take no more of a server's memory than as many scans.
# 2. Each key is answered once, in its place.

Answering: TypeAlias = "Callable[[int, int], pa.RecordBatch | None]"
"""Answers the keys from a first place to below a second one. None where the answers to several keys
have more than `ARROW_BYTES_MAX` bytes."""


def in_pieces(
    answer: Answering, count: int, *, rows_first: int, rows_max: int
) -> Iterator[pa.RecordBatch]:
    """The answers to `count` keys. The first piece has at most `rows_first` keys. A later one has
    at most `rows_max`, at most twice as many as the one before, and so few that it takes about half
    of the bytes that fit."""
    start, rows = 0, min(rows_first, rows_max)
    while start < count:
        end = min(start + rows, count)
        found = answer(start, end)
        answered = end - start
        if found is None:
            assert answered > 1, "the answer to one key always fits"
            rows = answered // 2
            continue
        fitting = answered * ARROW_BYTES_MAX // (2 * max(found.nbytes, 1))
        start, rows = end, max(min(fitting, 2 * answered, rows_max), 1)
        yield found
        del found  # it would stay in memory beside the next piece


# --------------------------------------------------------------------------------------------------
# The verbs.

_FLOORS_SCHEMA: Final = pa.schema([("key", pa.binary()), ("value", pa.binary())])
_Times: TypeAlias = "TimeLike | list[TimeLike] | None"
T = TypeVar("T")


class _LookUp(Protocol[T]):
    """Finds the answers to keys. None where the answers to several keys have too many bytes.
    Errors number the keys from `first` on."""

    def __call__(
        self, keys: list[bytes], as_of: _Times, /, *, bytes_max: int, first: int = 0
    ) -> list[T] | None: ...


@serves(verbs.GET)
def get(call: Invocation) -> Answer:
    """The value of a key. `as_of` is the time of the read; the newest complete time by default."""
    value = call.store.get(call.key(), call.time("as_of"))
    return {"found": value is not None, "value": to_json(value)}


@serves(verbs.GET_MANY)
def get_many(call: Invocation) -> Answer:
    """The values of keys, in their order. `as_of` is one time, or a time for each key."""
    keys = call.keys()
    times = _times(call, len(keys))
    look_up = call.store.requests.get_many
    if call.table is None:
        found = _at_once(look_up, keys, times)
        _require_short(found, len(keys))
        return {"values": [to_json(value) for value in found]}
    pieces = _in_pieces(look_up, call.store, keys, times, _values)
    return pa.RecordBatchReader.from_batches(VALUES_SCHEMA, pieces)


@serves(verbs.FLOOR)
def floor(call: Invocation) -> Answer:
    """The greatest live keys at or below keys, each with its value. With `below` only keys that
    begin with it count."""
    keys = call.keys()
    stem = call.value("below")
    if call.access.prefix:
        stem = call.access.require_key(call.access.prefix if stem is None else stem)
    times = _times(call, len(keys))
    look_up = partial(call.store.requests.floors, prefix=stem)
    if call.table is None:
        rows = [row or (None, None) for row in _at_once(look_up, keys, times)]
        _require_short(chain.from_iterable(rows), len(keys))
        return {"floors": [{"key": to_json(key), "value": to_json(row)} for key, row in rows]}
    pieces = _in_pieces(look_up, call.store, keys, times, _floors)
    return pa.RecordBatchReader.from_batches(_FLOORS_SCHEMA, pieces)


@serves(verbs.SCAN)
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


@serves(verbs.KEYS)
def keys(call: Invocation) -> Answer:
    """Live keys of a span at one time, in order, without their values."""
    span = call.span()
    found = call.store.keys(
        span.start, span.end, None, call.time("as_of"), call.flag("reverse"), call.count("limit")
    )
    return pa.RecordBatchReader.from_batches(KEYS_SCHEMA, _key_batches(found))


@serves(verbs.COUNT_KEYS)
def count(call: Invocation) -> Answer:
    """The number of live keys of a span at one time."""
    span = call.span()
    return {"count": call.store.count(span.start, span.end, None, call.time("as_of"))}


@serves(verbs.TTL)
def ttl(call: Invocation) -> Answer:
    """How long until a key expires, in seconds, and the time at which it does; both are null if it
    does not expire, or is absent."""
    due = call.store.requests.due_of(call.key())
    left_s = None if due is None else (due - call.store.now()) / NS_PER_SECOND
    return {"seconds": left_s, "expires": due}


@serves(verbs.HISTORY)
def history(call: Invocation) -> Answer:
    """All kept versions of a key, newest first. The value of a deletion is null."""
    key = call.key()
    call.store.requests.require_history(key, HISTORY_BYTES_MAX)
    versions = call.store.history(key)
    return {
        "versions": [{"timestamp": int(t), "value": to_json(value)} for _, t, value in versions]
    }


@serves(verbs.CHANGES)
def changes(call: Invocation) -> Answer:
    """The changes of the window (since, upto], in time order, with their images."""
    span = call.span()
    return call.store.changes_batches(
        call["since"],
        call.time("upto"),
        span=None if span == Span() else span,
        images=call.word("images", "delta"),
        expand=call.word("expand", "imports"),
    )


@serves(verbs.SPLITS)
def splits(call: Invocation) -> Answer:
    """At most `count` spans of about equal size that cover a span."""
    spans = call.store.layout.splits(call.count("count") or 1, call.span())
    return {"splits": [{"start": to_json(each.start), "end": to_json(each.end)} for each in spans]}


@serves(verbs.STATS)
def stats(call: Invocation) -> Answer:
    """Counts and sizes of the store, by name."""
    call.access.require_whole("stats")
    return call.store.stats()


@serves(verbs.METRICS)
def metrics(call: Invocation) -> Answer:
    """The metrics of the store, by name: for each combination of labels a number, or the buckets
    and the sum of a histogram. The last bucket has no bound."""
    call.access.require_whole("metrics")
    found = call.store.metrics()
    return {
        name: [[list(labels), _figure(value)] for labels, value in metric.values.items()]
        for name, metric in found.items()
    }


@serves(verbs.TIMES)
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


@serves(verbs.RESOLVE)
def resolve(call: Invocation) -> Answer:
    """The time that a read as of `as_of` reads at: a time for later calls that must agree."""
    with call.store.snapshot(call.time("as_of")) as snapshot:
        return {"as_of": int(snapshot.as_of)}


def _times(call: Invocation, count: int) -> _Times:
    """The times of a read of many keys: one for all, or the times in the table or in the list."""
    if call.table is not None and "as_of" in call.table.column_names:
        times = zip(call.column("as_of"), call.column("instant"), strict=True)
        return times_given([_whole(*time) for time in times], count)
    given: Any = call.time("as_of")
    return times_given(given, count) if isinstance(given, list) else given


def _whole(time: object, instant: object) -> int:
    if type(instant) is int:
        return Timestamp.from_ns(instant)
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


def _at_once(look_up: _LookUp[T], keys: list[bytes], times: _Times) -> list[T]:
    """The answers to keys. Raises `UsageError` if the answers to several keys are too large."""
    found = look_up(keys, times, bytes_max=JOIN_VALUE_BYTES_MAX)
    if found is None:
        raise _too_large(len(keys))
    return found


def _in_pieces(
    look_up: _LookUp[T],
    store: Store,
    keys: list[bytes],
    times: _Times,
    batch_of: Callable[[list[T]], pa.RecordBatch],
) -> Iterator[pa.RecordBatch]:
    """The answers to keys, in pieces, and all at one time if one time is given. The first look-up
    is done before this returns, so wrong times are refused before an answer begins."""
    found = look_up(keys, times, bytes_max=ARROW_BYTES_MAX)
    if found is not None:  # without a snapshot, which waits for the commit under way
        return iter([batch_of(found)])

    def held() -> Iterator[pa.RecordBatch]:
        context: Any = nullcontext() if isinstance(times, list) else store.snapshot(times)
        with context as snapshot:

            def answer(start: int, end: int) -> pa.RecordBatch | None:
                at = times[start:end] if isinstance(times, list) else snapshot.as_of
                found = look_up(keys[start:end], at, bytes_max=ARROW_BYTES_MAX, first=start)
                return None if found is None else batch_of(found)

            rows = min(len(keys) // 2, SERVER_STREAM_ROWS)
            yield from in_pieces(answer, len(keys), rows_first=rows, rows_max=len(keys))

    return held()


def _require_short(answer: Iterable[bytes | None], count: int) -> None:
    """Raise `UsageError` for an answer of one key that is too large for JSON."""
    if sum(len(each or b"") for each in answer) > JOIN_VALUE_BYTES_MAX:
        raise _too_large(count)


def _too_large(count: int) -> UsageError:
    return UsageError(
        f"the answer to {count} keys has more than {JOIN_VALUE_BYTES_MAX} bytes",
        "ask for fewer keys at a time, or send them as an Arrow stream",
    )


def _values(found: list[bytes | None]) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.array(found, pa.binary())], schema=VALUES_SCHEMA)


def _floors(found: list[tuple[bytes, bytes] | None]) -> pa.RecordBatch:
    keys = [None if row is None else row[0] for row in found]
    values = [None if row is None else row[1] for row in found]
    columns = [pa.array(keys, pa.binary()), pa.array(values, pa.binary())]
    return pa.RecordBatch.from_arrays(columns, schema=_FLOORS_SCHEMA)
