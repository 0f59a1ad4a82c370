"""Planning a join, and the work of its tasks.

A worker plans the join, because the driver may have the store open: looking whether a store is open
would take the driver's own lock away (`spark_connector.origins.place`). So a path that the workers
cannot see fails when the join is planned.

Invariants
1. All tasks of a join read one place.
2. Each label comes out of its task once. A task that runs again gives the same rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from itertools import chain
from typing import Final, NamedTuple, TypeAlias

import pyarrow as pa
from pyspark.sql import SparkSession

from kvstore.commit import require_readable
from kvstore.errors import UsageError
from kvstore.joins import OnGone
from kvstore.span import Span
from kvstore.splits import split_span
from kvstore.timestamp import reached
from spark_connector.access import Access
from spark_connector.executors import asked
from spark_connector.joins.answers import added_columns
from spark_connector.joins.latest import latest_rows
from spark_connector.joins.table_rows import row_columns
from spark_connector.origins.opening import open_origin
from spark_connector.origins.origin import Origin
from spark_connector.origins.place import Place, find
from spark_connector.reading.typed import TypedRows, table_at
from spark_connector.worker import freeze_objects, plain_errors

KEY: Final = "kvstore_key"
AT: Final = "kvstore_at"
KNOWN: Final = "kvstore_known"
"""The columns of keys and of times that tasks get beside the labels' own columns. Labels of a table
with an event time have `KNOWN`, the time at which its rows were known."""

ANSWER: Final = ("kvstore_value", "kvstore_timestamp")
"""The columns that a task adds. They get their names in the result afterwards."""

BYTES_PER_SPLIT: Final = 4 << 20
"""Files of one split. The labels of a split stay together, and several splits make a task."""

SPLITS_MAX: Final = 1_000
"""A label finds its split by ten comparisons at most."""

_Batches: TypeAlias = "Iterable[pa.RecordBatch]"


class Plan(NamedTuple):
    """The place of a join, the least keys of all splits but the first, and the newest instant. If
    labels ask for rows, also the table of the rows."""

    place: Place
    splits: Sequence[bytes]
    newest: int
    table: TypedRows | None


def plan(spark: SparkSession, access: Access, as_of: int | None, table: str | None) -> Plan:
    """Plan a join. With `as_of` all its labels ask for that time. Costs one task.

    Raises `UsageError` if there is no such table, `NotAStoreError` or `LockedError` if the place
    cannot be read, and `HistoryGoneError` or `NotYetWrittenError` if `as_of` cannot.
    """
    work = partial(_planned, access, as_of, table, BYTES_PER_SPLIT)
    return asked(spark, work, f"planning a join with {access.url}")


def _planned(access: Access, as_of: int | None, table: str | None, split_bytes: int) -> Plan:
    with open_origin(find(access), covering=[] if as_of is None else [as_of]) as origin:
        since, upper, _ = origin.frontiers(reaching=as_of or 0)
        if as_of is not None:
            as_of = reached(as_of, upper - 1)
            require_readable(as_of, since=since, upper=upper)
        origin.keep(since if as_of is None else as_of)
        files = origin.files(upper - 1)
        count = sum(file.size_bytes for file in files) // split_bytes
        at = upper - 1 if as_of is None else as_of
        rows = None if table is None else table_at(origin, table, at)
        whole = Span() if rows is None else Span.of_prefix(rows.codec.key.prefix)
        spans = split_span(whole, files, min(max(count, 1), SPLITS_MAX))
        # The tasks choose their chain by the times of their labels.
        place = origin.place._replace(chain=None)
    return Plan(place, [span.start for span in spans[1:]], upper - 1, rows)


class Question(NamedTuple):
    """The question of a join to the labels of a task. `key` and `at` name their columns in errors.
    `columns` are the columns of the answer. `names` are the names in the result: of the labels'
    columns, and of these. With `by_event` labels ask for the newest row by its event time."""

    place: Place
    key: str
    at: str
    columns: Sequence[str]
    names: Sequence[str]
    max_age: timedelta | None
    on_gone: OnGone
    table: TypedRows | None = None
    by_event: bool = False


def joiner(question: Question) -> Callable[[_Batches], Iterator[pa.RecordBatch]]:
    """The task that adds the columns of the answer to its labels."""

    def join(batches: _Batches) -> Iterator[pa.RecordBatch]:
        freeze_objects()
        with plain_errors(), _named(question):
            labels = (_whole(batch, question) for batch in batches if batch.num_rows)
            first = next(labels, None)
            if first is None:  # opening the place would cost more than the task
                return
            with open_origin(question.place) as origin:
                yield from _joined(origin, first.schema, chain([first], labels), question)

    return join


@contextmanager
def _named(question: Question) -> Iterator[None]:
    """A `UsageError` of the block names the labels' own columns of keys and of times."""
    try:
        yield
    except UsageError as error:
        what = error.what
        for ours, theirs in ((KEY, question.key), (AT, question.at), (KNOWN, "known_at")):
            what = what.replace(repr(ours), repr(theirs))
        if what == error.what:
            raise
        raise UsageError(what, error.remedy) from None


def _joined(
    origin: Origin, schema: pa.Schema, labels: _Batches, question: Question
) -> Iterator[pa.RecordBatch]:
    table = question.table
    if table is not None and question.by_event:
        asked = (question.columns, question.names, question.max_age)
        yield from latest_rows(origin, table, labels, *asked, key=KEY, at=AT, known_at=KNOWN)
        return
    joined = origin.join(
        pa.RecordBatchReader.from_batches(schema, labels),
        key=KEY,
        at=AT,
        max_age=question.max_age,
        columns=ANSWER,
        on_gone=question.on_gone,
    )
    for batch in joined:
        yield _answered(batch, question)


def _whole(batch: pa.RecordBatch, question: Question) -> pa.RecordBatch:
    """The batch. Raises `UsageError` if a label has no key or no time."""
    named = {KEY: question.key, AT: question.at, KNOWN: "known_at"}
    for column, name in named.items():
        if column in batch.schema.names and batch.column(column).null_count:
            raise UsageError(f"a label has no {name}: it is null", "drop such labels first")
    return batch


def _answered(batch: pa.RecordBatch, question: Question) -> pa.RecordBatch:
    values, times = (batch.column(name) for name in ANSWER)
    if question.table is None:
        added = added_columns(values, times, question.columns)
    else:
        keys = batch.column(KEY)
        added = row_columns(question.table, keys, values, times, question.columns)
    kept = batch.drop_columns([KEY, AT, *ANSWER]).columns
    # Spark reads the batch by its names: no two columns may share one.
    return pa.RecordBatch.from_arrays([*kept, *added], names=question.names)
