"""Point-in-time joins: labels come in as Arrow batches, and go out with what was known then.

The labels of a piece are sorted by key and time, and looked up in one walk through the store, which
seeks or merges (`kvstore.loops.plain.timed`). The values are put back in the order of the labels.

Invariants
1. Each label comes out once, in its place, with all its columns.
2. A label gets the value of the newest version at or below its time: see `kvstore.mvcc.version`.
3. GC and clears leave history alone from the first batch of the result until its end.
4. Memory is bounded by the limits of a piece. A piece whose values are too large is halved.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Final, Literal, NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa

from kvstore.arguments import require_age
from kvstore.errors import NotYetWrittenError, UsageError
from kvstore.joins.labels import Labels, gone, require_complete, require_kept
from kvstore.joins.sources import (
    LabelColumns,
    Piece,
    Pieces,
    label_reader,
    labels_of,
    require_columns,
)
from kvstore.limits import JOIN_VALUE_BYTES_MAX
from kvstore.mvcc.lookup import SearchBounds, TimedValues
from kvstore.parts import Parts
from kvstore.timestamp import TIMESTAMP_MAX, Timestamp

OnGone: TypeAlias = Literal["error", "null"]

VALUE_COLUMNS: Final = ("value", "value_timestamp")
TIME_TYPE: Final = pa.timestamp("ns", "UTC")


class Question(NamedTuple):
    """The question of a join to each label. `added` are the names of the columns of the answer. A
    value older than `age_max` is null. No label may ask for a time above `newest`, which is the
    time of all labels if no column has times."""

    columns: LabelColumns
    added: tuple[str, str]
    age_max: int
    is_gone_null: bool
    newest: int | None


def join(
    parts: Parts,
    labels: object,
    *,
    key: str,
    at: str | None,
    max_age: timedelta | None,
    columns: tuple[str, str],
    on_gone: OnGone,
    newest: int | None = None,
) -> pa.RecordBatchReader:
    """The labels with the columns of their values. With `newest` no label may ask for a later
    time."""
    require_age(max_age, name="max_age")
    age_max = TIMESTAMP_MAX if max_age is None else max_age // timedelta(microseconds=1) * 1000
    if on_gone not in ("error", "null"):
        raise UsageError(f"on_gone={on_gone!r}", "pass 'error' or 'null'")
    for name, given in (("key", key), ("at", "" if at is None else at)):
        if not isinstance(given, str):
            raise UsageError(f"{name} must be a column's name, not {type(given).__name__}")
    question = Question(
        LabelColumns(key, at),
        _names(columns),
        min(age_max, TIMESTAMP_MAX),
        on_gone == "null",
        newest,
    )
    parts.committer.health.require()
    reader = label_reader(labels)
    require_columns(reader.schema, question.columns, question.added)
    value, timestamp = question.added
    schema = reader.schema.append(pa.field(value, pa.binary()))
    schema = schema.append(pa.field(timestamp, TIME_TYPE))
    return pa.RecordBatchReader.from_batches(schema, _joined(parts, reader, schema, question))


def _names(columns: tuple[str, str]) -> tuple[str, str]:
    if (
        not isinstance(columns, tuple | list)
        or len(columns) != 2
        or not all(isinstance(name, str) for name in columns)
        or columns[0] == columns[1]
    ):
        raise UsageError(
            f"columns={columns!r}", "pass two names: of the value and of its timestamp"
        )
    return columns[0], columns[1]


def _joined(
    parts: Parts, reader: pa.RecordBatchReader, schema: pa.Schema, question: Question
) -> Iterator[pa.RecordBatch]:
    pins = parts.pins  # in a forked child, which ends the pass, handles have no fields
    pin = pins.new()
    try:
        with parts.committer.lock:
            pins.keep(pin, parts.committer.since, kind="join")
        if question.newest is None and question.columns.at is None:
            question = question._replace(newest=parts.reads.at(None))
        pieces = Pieces(reader)
        for piece in pieces:
            size = 0
            for batch in _answered(parts, piece, schema, question):
                size += batch.column(question.added[0]).nbytes
                yield batch
            pieces.learn(piece.rows, size)
    finally:
        pins.let_go(pin, None)


def _answered(
    parts: Parts, piece: Piece, schema: pa.Schema, question: Question
) -> Iterator[pa.RecordBatch]:
    """The batches of a piece with their values."""
    labels = labels_of(piece, question.columns, question.newest or 0)
    found = _found(parts, labels, question)
    if found is None:
        del labels
        for half in piece.halves():
            yield from _answered(parts, half, schema, question)
        return
    values = pa.array(found.values, pa.binary())
    timestamps = pa.array(found.times, mask=found.times < 0).cast(TIME_TYPE)
    at = 0
    for batch in piece.batches:
        rows = batch.num_rows
        added = [values.slice(at, rows), timestamps.slice(at, rows)]
        at += rows
        if rows:
            yield pa.RecordBatch.from_arrays([*batch.columns, *added], schema=schema)


def _found(parts: Parts, labels: Labels, question: Question) -> TimedValues | None:
    """The versions of the labels. None where their values have too many bytes."""
    if question.newest is not None:
        _require_upto(labels, question.newest)
    require_complete(parts, labels)
    bounds = SearchBounds(question.age_max, JOIN_VALUE_BYTES_MAX)
    lost = gone(parts, labels)
    if lost is None:
        return parts.versions.get_timed(labels.keys, labels.times.data, bounds)
    if not question.is_gone_null:
        require_kept(parts, labels)
    kept = np.flatnonzero(~lost)
    keys = [labels.keys[at] for at in kept.tolist()]
    found = parts.versions.get_timed(keys, labels.times[kept].data, bounds)
    if found is None:
        return None
    values: list[bytes | None] = [None] * len(labels.keys)
    times = np.full(len(values), -1, np.int64)
    times[kept] = found.times
    for at, value in zip(kept.tolist(), found.values, strict=True):
        values[at] = value
    return TimedValues(values, times)


def _require_upto(labels: Labels, newest: int) -> None:
    late = np.flatnonzero(labels.times > newest)
    if len(late):
        first = int(late[0])
        raise NotYetWrittenError(
            as_of=Timestamp(labels.times[first]),
            upper=Timestamp(newest + 1),
            remedy=f"{labels.named(first)}, asks for it: the snapshot ends at {Timestamp(newest)}",
        )
