"""Tables of a collection, published for systems that do not know this library.

    parquet    one file with the rows of one time
    delta      a Delta table: each window of the collection is a commit of it

A Delta commit carries `txn` with the id `kvstore/<store>/<table>` and, as its version, the time
up to which the table is published. Delta writes it with the rows of the commit, or not at all.

Invariants
1. The newest `txn` tells how far the table is published. A publisher that was killed begins
   behind it. It leaves files that no commit names, which Delta's `vacuum` removes.
2. The rows of a commit are the state at its time, so a window that is merged again changes
   nothing.
3. Two publishers at once do not double a row: Delta refuses the commit of the slower one.
"""

from __future__ import annotations

import heapq
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, TypeAlias, TypedDict

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kvstore.backup.chains import Chains
from kvstore.backup.shard import OP_DELETE_RANGE, Shard, ShardSnapshot, Window
from kvstore.base.arguments import word
from kvstore.base.span import Span, merge_spans
from kvstore.base.timestamp import TIMESTAMP_MAX, Timestamp
from kvstore.bulk.outside import outside_type, outside_values, write_parquet
from kvstore.errors import DeterminateError, KVStoreError, LockedError, UsageError
from kvstore.limits import SCAN_CHUNK
from kvstore.storage.address import parse_address
from kvstore.tables import TableCodec
from kvstore.tables.definition import Definition, definition_key, name_of
from kvstore.tables.exact import require_held
from kvstore.tables.joins import in_order
from kvstore.tables.nested import mapped
from kvstore.timeline.reserved import DEFINITIONS

Format: TypeAlias = Literal["parquet", "delta"]
FORMATS: Final[tuple[Format, ...]] = ("parquet", "delta")
OnRows: TypeAlias = "Callable[[int], None]"


class PublishReport(NamedTuple):
    """The time up to which a table is published, the rows that were written, and the commits."""

    as_of: Timestamp
    rows: int
    commits: int


class PublishOptions(TypedDict, total=False):
    """More arguments of `publish`: the columns to publish, deltalake's `storage_options`, and a
    call that gets the number of rows of a commit as they are written."""

    columns: Sequence[str] | None
    storage_options: Mapping[str, str] | None
    progress: OnRows


def publish(
    chains: Chains,
    table: str,
    url: str | os.PathLike[str],
    format: Format,  # noqa: A002  # the word that every such call has
    as_of: int | None,
    *,
    columns: Sequence[str] | None = None,
    storage_options: Mapping[str, str] | None = None,
    progress: OnRows = lambda rows: None,
) -> PublishReport:
    """Publish a table of a collection as of a time, by default the newest.

    `parquet` replaces the file `url` by the rows of that time. `delta` brings the Delta table `url`
    up to it: the end of each window becomes a commit, and a call after a kill continues behind the
    last commit. The columns of the key are always among `columns`.

    Raises `UsageError` for a table or a column that cannot be published, and `LockedError` if
    another process has committed to the Delta table meanwhile: publish again. A commit costs a read
    of its window, and Delta's own pass over the published keys. The first commit of a call looks
    for the table's definition in each batch of the collection. After an alteration of the table a
    commit replaces all rows.
    """
    word(*FORMATS, hint="pass 'parquet' or 'delta'").check("format", format)
    address = parse_address(url)
    with chains.snapshot(as_of) as (shard, snapshot):
        if format == "delta":
            record = chains.read()
            assert record is not None, "the collection has a chain"
            app = f"kvstore/{record.source}/{table}"
            place = os.path.abspath(address.path) if address.is_file else address.url
            target = DeltaTarget(place, app, storage_options or {})
            return _delta(shard, target, table, snapshot.as_of, columns, progress)
        if storage_options or not address.is_file:
            raise UsageError(
                f"a Parquet file is written to a path, not to {address.url}", "copy it there"
            )
        path = Path(address.path)
        rows = TableRows(snapshot, table, columns)
        at = Timestamp(snapshot.as_of)
        found = write_parquet(path, rows.typed, rows.state(), table, at, progress)
        return PublishReport(at, found.rows, 1)


class DeltaTarget:
    """A Delta table that one table of one store is published to."""

    def __init__(self, url: str, app: str, options: Mapping[str, str]) -> None:
        try:
            import deltalake  # an extra, and slow to import
        except ImportError as error:
            raise UsageError(
                "publishing as Delta needs the package deltalake", "install kvstore-mvcc[delta]"
            ) from error
        self._lake = deltalake
        self.url = url
        self._app, self._options = app, dict(options)
        self._table: Any = None

    def published(self) -> int | None:
        """The time up to which the table is published; None if there is no Delta table yet.

        Raises `UsageError` if a Delta table is there that has other rows.
        """
        with self._translated():
            if not self._lake.DeltaTable.is_deltatable(self.url, self._options or None):
                return None
            self._table = self._lake.DeltaTable(self.url, storage_options=self._options or None)
            found: int | None = self._table.transaction_version(self._app)
        if found is None:
            raise UsageError(
                f"{self.url} is a Delta table that was not published from this table",
                "publish to an empty place",
            )
        return found

    def has(self, schema: pa.Schema) -> bool:
        """Whether the Delta table has these columns, in these types."""
        found = pa.schema(self._table.schema().to_arrow())
        return bool(
            found.names == schema.names
            and all(a.type == b.type for a, b in zip(found, schema, strict=True))
        )

    def write(self, rows: Iterator[pa.RecordBatch], schema: pa.Schema, at: int) -> None:
        """Make the table of these rows, or replace all its rows and columns. One commit."""
        with self._translated(rows) as source:
            self._lake.write_deltalake(
                self.url if self._table is None else self._table,
                pa.RecordBatchReader.from_batches(schema, source),
                mode="error" if self._table is None else "overwrite",
                schema_mode=None if self._table is None else "overwrite",
                storage_options=self._options or None,
                commit_properties=self._stamped(at),
            )

    def merge(
        self, rows: Iterator[pa.RecordBatch], schema: pa.Schema, on: list[str], at: int
    ) -> None:
        """Set the rows of these keys, and delete the rows that have `GONE`. One commit, or none
        where nothing changes."""
        matches = " AND ".join(f"old.{_quoted(name)} = new.{_quoted(name)}" for name in on)
        with self._translated(rows) as source:
            merger = self._table.merge(
                pa.RecordBatchReader.from_batches(schema, source),
                matches,
                source_alias="new",
                target_alias="old",
                commit_properties=self._stamped(at),
            )
            merger = merger.when_matched_delete(f"new.{GONE}")
            merger = merger.when_matched_update_all(f"NOT new.{GONE}", except_cols=[GONE])
            merger.when_not_matched_insert_all(f"NOT new.{GONE}", except_cols=[GONE]).execute()

    def _stamped(self, at: int) -> Any:
        return self._lake.CommitProperties(
            app_transactions=[self._lake.Transaction(self._app, at)],
            custom_metadata={
                "kvstore.as_of": str(Timestamp(at)),
                "kvstore.base.timestamp": str(at),
            },
        )

    @contextmanager
    def _translated(
        self, rows: Iterable[pa.RecordBatch] = ()
    ) -> Iterator[Iterator[pa.RecordBatch]]:
        """The rows. Errors of Delta become ours, and an error of the rows is raised as it is."""
        failed: list[BaseException] = []

        def watched() -> Iterator[pa.RecordBatch]:
            try:
                yield from rows
            except BaseException as error:
                failed.append(error)
                raise

        try:
            yield watched()
        except self._lake.exceptions.CommitFailedError as error:
            raise LockedError(self.url, "another process, which has just committed") from error
        except (self._lake.exceptions.DeltaError, OSError) as error:
            if failed and isinstance(failed[0], KVStoreError):
                raise failed[0] from None
            raise DeterminateError(self.url, str(error).partition("\n")[0]) from error


def _delta(
    shard: Shard,
    target: DeltaTarget,
    table: str,
    upto: int,
    columns: Sequence[str] | None,
    progress: OnRows,
) -> PublishReport:
    """Publish window after window, up to `upto`."""
    since = target.published()
    if since is not None and since > upto:
        raise UsageError(
            f"{target.url} is published up to {Timestamp(since)}, after {Timestamp(upto)}",
            "Delta's time travel reads older states",
        )
    rows = commits = 0
    last: TableRows | None = None
    for at in _ends(shard, since, upto):
        found = _one_commit(shard, target, table, (since, at), columns, progress, last)
        if found is not None:
            since, last = at, found.table
            rows, commits = rows + found.size, commits + 1
    if since is None or since < upto:
        with shard.snapshot(upto) as snapshot:
            TableRows(snapshot, table, columns)  # raises: there is no such table
    return PublishReport(Timestamp(upto), rows, commits)


def _ends(shard: Shard, since: int | None, upto: int) -> list[int]:
    """The times of the next commits: the ends of windows after `since`, and `upto`."""
    oldest = shard.since if since is None else since + 1
    ends = {batch.upper - 1 for batch in shard.state.batches if oldest < batch.upper <= upto}
    return sorted(ends | ({upto} if upto >= oldest else set()))


class _Written(NamedTuple):
    """The table as of a commit, and the number of rows that the commit wrote."""

    table: TableRows
    size: int


def _one_commit(
    shard: Shard,
    target: DeltaTarget,
    table: str,
    window: tuple[int | None, int],
    columns: Sequence[str] | None,
    progress: OnRows,
    last: TableRows | None,
) -> _Written | None:
    """Publish one window: its changes, or all rows where there is nothing to change. `last` has the
    rows of the commit before. None if the table is not there: it was not made yet, or dropped."""
    since, at = window
    written = 0

    def counted(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        nonlocal written
        for batch in batches:
            written += batch.num_rows
            progress(written)
            yield batch

    with shard.snapshot(at) as snapshot:
        is_same = since is not None and not _is_altered(snapshot, table, since)
        if not is_same and not TableRows.has(snapshot, table):
            return None
        is_whole = since is not None and since >= shard.since  # an expiry may run meanwhile
        rows = TableRows(snapshot, table, columns, last if is_whole else None)
        schema = rows.outside()
        is_merged = is_whole and target.has(schema) and (is_same or rows.were_in(shard, since))
        if since is not None and is_merged:
            with shard.snapshot(since) as before:
                changes, flagged = rows.window(since, before), rows.flagged(schema)
                on = [column.name for column in rows.codec.key.columns]
                target.merge(counted(changes), flagged, on, at)
        else:
            batches = (rows.to_outside(batch, schema) for batch in rows.state())
            target.write(counted(batches), schema, at)
    target.published()
    progress(written)
    return _Written(rows, written)


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


# --------------------------------------------------------------------------------------------------
# Tables of a collection for readers that do not know this library: their rows, typed.
#
# A snapshot of a chain has the stored rows of all tables, and the definitions that decode them.
#
# Invariants
# 1. Rows are decoded by the table's definition at the time of the read.
# 2. The rows of a window are decided by the state at its end alone: a key that the window touched
#    has its row then, or is gone. So a window that is read again gives the same rows.

GONE: Final = "kvstore_gone"
"""The column of a window that tells whether a row is deleted."""


class TableRows:
    """The rows of one table in a snapshot."""

    def __init__(
        self,
        snapshot: ShardSnapshot,
        name: str,
        columns: Sequence[str] | None,
        before: TableRows | None = None,
    ) -> None:
        """`before` has the rows of an earlier snapshot, whose definition is taken if the table was
        not altered since: that costs a read of the window between. A search for the definition
        costs a look into each batch of the snapshot.

        Raises `UsageError` if the snapshot has no such table, or the table no such column.
        """
        self._snapshot = snapshot
        if before is None or _is_altered(snapshot, name, before._snapshot.as_of):
            self.codec = TableCodec(_definition(snapshot, name))
        else:
            self.codec = before.codec
        self.span = Span.of_prefix(self.codec.key.prefix)
        self._columns = None if columns is None else list(columns)
        self.typed = self.codec.schema_of(self._columns)
        """The chosen columns, in the types of the table."""

    @staticmethod
    def has(snapshot: ShardSnapshot, name: str) -> bool:
        """Whether the snapshot has a table of this name."""
        span = Span.of_key(definition_key(name))
        return any(batch.num_rows for batch in snapshot.read(span))

    def were_in(self, shard: Shard, since: int | None) -> bool:
        """Whether the table was there at an earlier time. If it was dropped and made anew, the
        window has no change of the rows of then."""
        name = self.codec.definition.name
        if since is None:
            return False
        with shard.snapshot(since) as before:
            return (
                TableRows.has(before, name)
                and _definition(before, name).number == self.codec.definition.number
            )

    def outside(self) -> pa.Schema:
        """The chosen columns in the types that other systems have (`kvstore.bulk.outside`).

        Raises `UsageError` for a column that has none, and where a column of the key is left out.
        """
        where = self.codec.definition.where
        for column in self.codec.key.columns:
            if column.name not in self.typed.names:
                raise UsageError(
                    f"{where}: columns without {column.name!r}, of its key", "add it to columns="
                )
        fields = []
        for field in self.typed:
            found = outside_type(field.type)
            if found is None or field.name == GONE:
                raise UsageError(
                    f"{where}, column {field.name!r}: no other system has a {field.type} like it",
                    "name the other columns: columns=",
                )
            fields.append(pa.field(field.name, mapped(found, _counted), field.nullable))
        return pa.schema(fields)

    def state(self) -> Iterator[pa.RecordBatch]:
        """All rows, in the types of the table, in key order."""
        for batch in self._snapshot.read(self.span):
            yield self.codec.decode(batch.column("key"), batch.column("value"), self._columns)

    def to_outside(self, rows: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
        """Rows in the types of `outside`."""
        columns = [
            outside_values(rows.column(field.name), field.type, self._named(field.name))
            for field in schema
        ]
        return pa.RecordBatch.from_arrays(columns, schema=schema)

    def window(self, since: int, before: ShardSnapshot) -> Iterator[pa.RecordBatch]:
        """The rows that the window from `since` to the snapshot touched, each key once, in key
        order, with the column `GONE`. `before` is a snapshot at `since`.

        A deleted row has the columns of its key alone. Costs a pass over the window, a look-up for
        each key of it, and a pass over the rows of `before` that range deletes cover.
        """
        schema = self.outside()
        ranges = self._ranges(since)
        touched = self._points(since)
        covered = (
            key
            for span in ranges
            for batch in before.read(span)
            for key in batch.column("key").to_pylist()
        )
        keys = _once(heapq.merge(touched, covered) if ranges else touched)
        while piece := list(islice(keys, SCAN_CHUNK)):
            yield self._rows_of(pa.array(piece, pa.binary()), schema)

    def flagged(self, schema: pa.Schema) -> pa.Schema:
        """The schema of `window`, for the schema of `outside`: a deleted row has nulls."""
        fields = [field.with_nullable(True) for field in schema]
        return pa.schema([*fields, pa.field(GONE, pa.bool_())])

    # -- inside -----------------------------------------------------------------------------

    def _named(self, column: str) -> Callable[[int], str]:
        return lambda row: f"{self.codec.definition.where}, column {column!r}, row {row} of a batch"

    def _changes(self, since: int) -> Iterator[pa.RecordBatch]:
        return self._snapshot.view(Window(since, self._snapshot.as_of), self.span)

    def _points(self, since: int) -> Iterator[bytes]:
        """The keys of puts and deletes of the window, ascending."""
        for batch in self._changes(since):
            is_point = np.asarray(batch.column("op")) != OP_DELETE_RANGE
            yield from batch.column("key").filter(pa.array(is_point)).to_pylist()

    def _ranges(self, since: int) -> list[Span]:
        """The spans of the rows that range deletes of the window cover."""
        found = []
        for batch in self._changes(since):
            is_range = np.asarray(batch.column("op")) == OP_DELETE_RANGE
            if is_range.any():
                rows = batch.filter(pa.array(is_range))
                bounds = (rows.column(name).to_pylist() for name in ("key", "end_key"))
                for key, end in zip(*bounds, strict=True):
                    inside = self.span.intersect(key, end)
                    found += [] if inside is None else [inside]
        return merge_spans(found)

    def _rows_of(self, keys: pa.Array, schema: pa.Schema) -> pa.RecordBatch:
        """The rows of keys at the end of the window, the gone ones behind the others."""
        times = np.full(len(keys), self._snapshot.as_of, np.int64)
        found = self._snapshot.find(
            in_order(keys, times), age_max=TIMESTAMP_MAX, bytes_max=TIMESTAMP_MAX
        )
        assert found is not None, "no bound was given"
        alive = found.values.is_valid()
        rows = self.codec.decode(keys.filter(alive), found.values.drop_null(), self._columns)
        here = self.to_outside(rows, schema)
        dead = keys.filter(pc.invert(alive))
        names = [column.name for column in self.codec.key.columns]
        parts = dict(zip(names, self.codec.key.arrays(dead), strict=True))
        for name, array in parts.items():
            require_held(array, array.type, f"{self.codec.definition.where}, column {name!r}", 0)
        gone = [
            outside_values(parts[field.name], field.type, self._named(field.name))
            if field.name in parts
            else pa.nulls(len(dead), field.type)
            for field in schema
        ]
        columns = [pa.concat_arrays(pair) for pair in zip(here.columns, gone, strict=True)]
        flags = pa.array(np.arange(len(keys)) >= rows.num_rows)
        return pa.RecordBatch.from_arrays([*columns, flags], schema=self.flagged(schema))


def _counted(kind: pa.DataType) -> pa.DataType:
    """A duration as a number of its units, which Delta has."""
    return pa.int64() if pa.types.is_duration(kind) else kind


def _is_altered(snapshot: ShardSnapshot, name: str, since: int) -> bool:
    """Whether the definition of a table was written after `since`."""
    window = Window(since, snapshot.as_of)
    found = snapshot.view(window, Span.of_key(definition_key(name)))
    return any(batch.num_rows for batch in found)


def _definition(snapshot: ShardSnapshot, name: str) -> Definition:
    for batch in snapshot.read(Span.of_key(definition_key(name))):
        if batch.num_rows:
            return Definition.from_bytes(name, batch.column("value")[0].as_py())
    names = [
        name_of(key)
        for batch in snapshot.read(DEFINITIONS)
        for key in batch.column("key").to_pylist()
    ]
    hint = f"there are {', '.join(names[:20])}" if names else "it has no table at that time"
    raise UsageError(f"there is no table {name!r} in the collection", hint)


def _once(keys: Iterable[bytes]) -> Iterator[bytes]:
    """The distinct keys of ascending ones."""
    last = None
    for key in keys:
        if key != last:
            yield key
            last = key
