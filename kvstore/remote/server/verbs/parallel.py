"""The verbs of reads that many tasks share, and of joins: `Store` has them for one process.

A reader in many processes takes a lease on a time, looks where the files lie, and reads span by
span as of that time. A lease is a hold of the kind `"reader"`. A reader that is gone cannot release
it, so a lease ends by itself.

Invariants
1. A lease ends `READER_LEASE_S_MAX` after it was taken last, at the latest, and there are
   `READER_LEASES_MAX` at most. Each new lease removes the leases that have ended.
2. A caller with the right to read takes and releases leases, and no other hold: the names of leases
   have a prefix of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import timedelta
from itertools import chain
from typing import Final

import numpy as np
import pyarrow as pa

from kvstore.base.timestamp import TIMESTAMP_MAX
from kvstore.changes import Change
from kvstore.changes.batches import changes_schema, version_changes_schema
from kvstore.changes.index import OP_DELETE, OP_DELETE_RANGE, OP_PUT
from kvstore.errors import RetryableError, UsageError
from kvstore.limits import (
    ARROW_BYTES_MAX,
    READER_LEASES_MAX,
    SERVER_STREAM_ROWS,
)
from kvstore.mvcc.arrow import binary_array
from kvstore.remote import verbs
from kvstore.remote.protocol import to_json
from kvstore.remote.server.invocation import Answer, Invocation, serves
from kvstore.remote.server.verbs.reads import in_pieces
from kvstore.tables.joins import VALUE_FIELDS, Asked, Search
from kvstore.timeline.holds import READER, READER_HOLDS

_DUE_CHANGES_SCHEMA: Final = version_changes_schema().append(changes_schema().field("expires"))
_OPS: Final = {"put": OP_PUT, "delete": OP_DELETE, "delete_range": OP_DELETE_RANGE}


@serves(verbs.LEASE)
def lease(call: Invocation) -> Answer:
    """Keep history from `at` on (default: the whole kept history) for `seconds`, under a name that
    the reader chooses. The same call again moves the lease, or makes it longer."""
    holds, now = call.store.holds, int(call.store.now())
    seconds: float = call["seconds"]
    at, name = call.time("at"), _lease_name(call)
    time = call.store.since if at is None else call.store.to_time(at, name="at")
    leases = [record for record in holds.all() if record.name.startswith(READER_HOLDS)]
    ended = [
        record.name
        for record in leases
        if record.lost or now - record.timestamp > (record.max_age_ns or 0)
    ]
    if len(leases) - len(ended) >= READER_LEASES_MAX and name not in {r.name for r in leases}:
        raise RetryableError(f"readers have {READER_LEASES_MAX} leases", "try again later")
    # The budget of a hold counts from the time that it holds.
    age = timedelta(microseconds=max(now - time, 0) // 1000) + timedelta(seconds=seconds)
    taken = holds.take_all(
        {name: time},
        max_age=age,
        durable=False,  # a reader that finds its lease gone has an error, never wrong rows
        kind=READER,
        dropping=[each for each in ended if each != name],
    )
    return {"at": int(time), "is_new": taken[name].is_new}


@serves(verbs.RELEASE_LEASE)
def release_lease(call: Invocation) -> Answer:
    """End a lease. Nothing happens if it has ended."""
    name = _lease_name(call)
    known = any(record.name == name for record in call.store.holds.all())
    if known:
        call.store.holds.drop(name)
    return {"released": known}


@serves(verbs.FILES)
def files(call: Invocation) -> Answer:
    """The files that hold versions in a span: the keys that they lie between, and their bytes. A
    reader cuts the span by them. Rows that are not on file yet do not count. `hides_reserved` tells
    whether a plain read of the span leaves out the keys of tables and expiries."""
    span = call.span()
    found = [
        {
            "first": to_json(max(file.first, span.start)),
            "last": to_json(file.last if span.end is None else min(file.last, span.end)),
            "size_bytes": file.size_bytes,
        }
        for file in call.store.layout.files()
        if file.last >= span.start and (span.end is None or file.first < span.end)
    ]
    return {"files": found, "hides_reserved": call.store.requests.narrow(span) != span}


@serves(verbs.VERSIONS)
def versions(call: Invocation) -> Answer:
    """The puts and deletes of the window (since, upto], by key, oldest first. With `ranges` its
    range deletes alone, each cut to the span. With `order`, which is `key` or `time`, all changes
    in this order, range deletes and due times included. `revisions` is `all` or `latest`."""
    since, upto, span = call["since"], call.time("upto"), call.span()
    revisions, order = call.word("revisions", "all"), call.word("order", "")
    store = call.store
    changes: Iterable[Change]
    if call.flag("ranges"):
        until = store.upper - 1 if upto is None else upto
        changes = store.replication.range_deletes(since, until, span, revisions)
    else:
        changes = store.changes(since, upto, span.start, span.end, revisions, order or "key")
        if not order:
            changes = (change for change in changes if change.op != "delete_range")
    schema = _DUE_CHANGES_SCHEMA if order else version_changes_schema()
    return pa.RecordBatchReader.from_batches(schema, _batches(changes, schema))


@serves(verbs.COUNT_CHANGES)
def count_changes(call: Invocation) -> Answer:
    """The number of changes in the window (since, upto], rows of imports included. Costs a bounded
    number of entries of the change index; where there are more, the number is an estimate."""
    call.access.require_whole("count_changes")
    found = call.store.browsing.count_changes(call["since"], call.time("upto"))
    return {"changes": found.changes, "is_exact": found.is_exact}


@serves(verbs.JOIN)
def join(call: Invocation) -> Answer:
    """For each key and time the value of the key at that time, and the timestamp of its version.
    Both are null where there is none, or where it is older than `max_age`. `first` is the number of
    the first row in errors. With `null_if_gone` a row whose history is gone has null. `direction`
    and `on_future` are as in `Store.join`, and `exclude_exact` is the opposite of its
    `allow_exact`; versions above `newest` do not count."""
    table = call.table
    if table is None:
        raise UsageError("a join without rows", "send an Arrow stream of keys and times")
    if call.access.prefix:
        call.access.require_keys(call.column("key"))
    age = call.age("max_age")
    age_ns = TIMESTAMP_MAX if age is None else age // timedelta(microseconds=1) * 1000
    is_gone_null = call.flag("null_if_gone")
    search = Search(
        min(age_ns, TIMESTAMP_MAX),
        is_gone_null,
        ARROW_BYTES_MAX,
        call.word("direction", "backward"),
        not call.flag("exclude_exact"),
        call.count("newest"),
        call.word("on_future", "error") == "newest",
    )
    keys, times = (table.column(name).combine_chunks() for name in ("key", "at"))
    asked = Asked(keys, times.to_numpy(), call.count("first") or 0)
    schema = pa.schema(VALUE_FIELDS)
    answers = _answered(call, asked, search, schema)
    first = next(answers, pa.RecordBatch.from_pylist([], schema))  # most errors come before rows
    return pa.RecordBatchReader.from_batches(schema, chain([first], answers))


def _lease_name(call: Invocation) -> str:
    return f"{READER_HOLDS}{call['name']}"


def _batches(changes: Iterable[Change], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Changes as record batches, bounded in rows and bytes."""
    rows: list[Change] = []
    size = 0
    for change in changes:
        rows.append(change)
        size += len(change.key) + len(change.value or b"")
        if len(rows) >= SERVER_STREAM_ROWS or size >= ARROW_BYTES_MAX:
            yield _batch(rows, schema)
            rows, size = [], 0
    if rows:
        yield _batch(rows, schema)


def _batch(rows: list[Change], schema: pa.Schema) -> pa.RecordBatch:
    times, ops, keys, ends, values = zip(*rows, strict=True)
    columns = [
        binary_array(keys),
        pa.array(times, pa.int64()),
        pa.array([_OPS[op] for op in ops], pa.uint8()),
        pa.array(values, pa.binary()),
        pa.array(ends, pa.binary()),
        pa.array([change.expires for change in rows], pa.int64()),
    ]
    return pa.RecordBatch.from_arrays(columns[: len(schema)], schema=schema)


def _answered(
    call: Invocation, asked: Asked, search: Search, schema: pa.Schema
) -> Iterator[pa.RecordBatch]:
    keys, times, first = asked
    with call.store.join_side().opened() as answers:

        def answer(start: int, end: int) -> pa.RecordBatch | None:
            at = np.ascontiguousarray(times[start:end])
            columns = answers.answer(Asked(keys[start:end], at, first + start), search)
            if columns is None:
                return None
            return pa.RecordBatch.from_arrays(columns, schema=schema)

        yield from in_pieces(
            answer, len(times), rows_first=answers.rows_first, rows_max=answers.rows_max
        )
