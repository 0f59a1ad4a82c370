"""A table: typed rows of a store, of a snapshot, of a transaction or of a batch, opened by its
name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import partial
from itertools import chain, islice
from typing import Any, Generic, Literal, NamedTuple, cast, overload

import pyarrow as pa
from typing_extensions import TypeVar

from kvstore.base.arguments import COLUMNS, LIMIT, key_list
from kvstore.base.span import Span
from kvstore.base.timestamp import AgeLike, TimeLike, Timestamp
from kvstore.codec.shown import ROWS_SHOWN, ShownRows, html_of
from kvstore.codec.tuples import desc
from kvstore.errors import HistoryGoneError, KVStoreError, TableAlteredError, UsageError
from kvstore.feeds import Position
from kvstore.mvcc import Version
from kvstore.tables.catalogue import (
    Added,
    Alteration,
    Catalogue,
    IndexColumns,
    make,
    named_parts,
    require_name,
)
from kvstore.tables.definition import Index, model_fields, row_of, schema_of_class
from kvstore.tables.filters import RowFilter, passed_batches
from kvstore.tables.indexes import (
    Tidying,
    build_index,
    clear_rows,
    found_batches,
    found_dicts,
    index_span,
    whole_index,
)
from kvstore.tables.joining import RowChoice, join_rows, latest_row, latest_span
from kvstore.tables.joins import Direction, OnFuture, OnNull, Side, TableSide
from kvstore.tables.row_changes import (
    ROW_IMAGES,
    OnUnreadable,
    RowImages,
    TableFeed,
    change_schema,
    changed_batches,
    hand_over,
    open_feed,
)
from kvstore.tables.row_codec import (
    TableCodec,
    UnknownLayoutError,
    UnreadableRowError,
    batches_of,
    each_dict,
)
from kvstore.tables.sources import (
    ImportTarget,
    PastRows,
    RowChange,
    RowsAtOneTime,
    RowSource,
    StoreRows,
    delete_range,
    delete_rows,
    insert_row,
    put_batches,
    put_row,
    put_rows,
    refused,
    require_no_expiry_column,
)
from kvstore.timeline.expiries import Expires
from kvstore.timeline.parts import Parts

# --------------------------------------------------------------------------------------------------
# Rows that a read of a table has found.


Row = TypeVar("Row", default="dict[str, Any]")
"""The rows of a table: dicts, or instances of a class."""


class FoundRows(Generic[Row]):
    """Rows of a table: an iterator of dicts, or of instances of the table's class, or Arrow data
    for libraries that speak Arrow."""

    def __init__(
        self,
        schema: pa.Schema,
        batches: Iterator[pa.RecordBatch],
        rows: Iterator[dict[str, Any]] | None = None,
        made: Callable[[dict[str, Any]], Row] | None = None,
    ) -> None:
        """`rows` are the rows of `batches`, one by one. Only one of both is read. `made` makes an
        instance of a row."""
        self.schema = schema
        self._batches, self._made = batches, made
        self._rows: Iterator[Any] = iter(())
        self._show(chain.from_iterable(map(each_dict, batches)) if rows is None else rows)
        self._begun = False

    def _show(self, rows: Iterator[dict[str, Any]]) -> None:
        self._rows = rows if self._made is None else map(self._made, rows)

    def __iter__(self) -> Iterator[Row]:
        self._begun = True
        return self._rows

    def __next__(self) -> Row:
        self._begun = True
        found: Row = next(self._rows)
        return found

    def to_reader(self) -> pa.RecordBatchReader:
        """The rows as typed record batches. Raises `UsageError` once rows were taken one by one."""
        if self._begun:
            raise UsageError("some rows were taken one by one", "find the rows again")
        self._show(chain.from_iterable(map(each_dict, self._batches)))
        return pa.RecordBatchReader.from_batches(self.schema, self._batches)

    def __repr__(self) -> str:
        return f"<kvstore.FoundRows of {', '.join(self.schema.names):.200}>"

    def _repr_html_(self) -> str:
        """The first rows, for a notebook. They can still be taken afterwards, in both ways."""
        if self._begun:
            first = list(islice(self._rows, ROWS_SHOWN + 1))
            self._rows = chain(first, self._rows)
            return html_of("rows", self.schema, map(row_of, first))
        taken: list[pa.RecordBatch] = []
        while sum(batch.num_rows for batch in taken) <= ROWS_SHOWN:
            batch = next(self._batches, None)
            if batch is None:
                break
            taken.append(batch)
        self._batches = chain(taken, self._batches)
        self._show(chain.from_iterable(map(each_dict, self._batches)))
        shown = chain.from_iterable(map(each_dict, taken))
        return html_of("rows", self.schema, shown)

    def read_all(self) -> pa.Table:
        """The rows as one Arrow table."""
        return self.to_reader().read_all()

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        return self.to_reader().__arrow_c_stream__(requested_schema)


class RowVersion(NamedTuple):
    """A row from a time on. `row` is None from its deletion on."""

    timestamp: Timestamp
    row: dict[str, Any] | None


def row_versions(
    codec: Callable[[Timestamp], TableCodec],
    key: bytes,
    versions: Iterable[Version],
    on_unreadable: OnUnreadable | None,
) -> list[RowVersion]:
    """The stored `versions` of a row. `codec` is the definition at a time. See `Table.history`."""
    found = []
    for _, at, value in versions:
        row = None
        if value is not None:
            try:
                row = codec(at).to_dict(key, value)
            except UnreadableRowError as error:
                hand_over(error, ("version", at, key, value), on_unreadable)
                continue
        found.append(RowVersion(at, row))
    return found


# --------------------------------------------------------------------------------------------------
# A table: typed rows of a store, of a snapshot, of a transaction or of a batch.


class Table(Generic[Row]):
    """Typed rows with a composite key. `store.table`, `snapshot.table`, `transaction.table` and
    `batch.table` give one.

    A read as of a time has the columns that the table had then. Times are given as to `Store`. A
    write returns the timestamp of its commit, None where a transaction or a batch commits later.
    """

    def __init__(
        self,
        name: str,
        rows: RowSource,
        model: type[Row] | None = None,
        fields: tuple[str, ...] | None = None,
    ) -> None:
        """Whole rows are instances of `model`, if one is given, and dicts otherwise. `fields` are
        the columns that `model` has."""
        self.name = name
        self._model = model
        self._fields = fields
        self._rows = rows

    # -- what it is -------------------------------------------------------------------------

    @property
    def schema(self) -> pa.Schema:
        """The columns, as they are now."""
        return self._codec().definition.schema

    @property
    def key(self) -> list[str | desc]:
        """The columns of the key; a falling one as `desc(name)`. The event time is the last."""
        definition = self._codec().definition
        return named_parts(definition, definition.key)

    @property
    def indexes(self) -> dict[str, list[str | desc]]:
        """The columns of each index."""
        definition = self._codec().definition
        return {index.name: named_parts(definition, index.parts) for index in definition.indexes}

    @property
    def event_time(self) -> str | None:
        """The column of the event time, if the table has one."""
        definition = self._codec().definition
        return definition.key_columns[-1].name if definition.has_event_time else None

    @property
    def expires(self) -> str | None:
        """The column of the times at which rows expire, if the table has one."""
        column = self._codec().definition.expiry_column
        return None if column is None else column.name

    @property
    def valid_to(self) -> str | None:
        """The column of the event times until which rows are valid, if the table has one."""
        column = self._codec().definition.end_column
        return None if column is None else column.name

    def codec(self, as_of: TimeLike | None = None) -> TableCodec:
        """The encoder and decoder of the rows of the table, as it was at a time. It needs no store,
        so that other processes can build rows."""
        return self._codec(as_of)

    def import_target(self) -> ImportTarget:
        """The parts that an import of rows needs: the store, the codec, and a check that the table
        is not altered meanwhile. Raises `UsageError` where the store is only read."""
        return self._rows.import_target(self.name)

    # -- reading ----------------------------------------------------------------------------

    @overload
    def get(self, *key: Any, as_of: TimeLike | None = None, columns: None = None) -> Row | None: ...

    @overload
    def get(
        self, *key: Any, as_of: TimeLike | None = None, columns: Sequence[str]
    ) -> dict[str, Any] | None: ...

    def get(
        self, *key: Any, as_of: TimeLike | None = None, columns: Sequence[str] | None = None
    ) -> Row | dict[str, Any] | None:
        """The row of a key; None if there is none. One look-up."""
        rows = self._rows
        codec = rows.codec(self.name, as_of)
        stored_key = codec.key.whole_key(key)
        value = rows.get(stored_key, as_of)
        if value is None:
            return None
        names = COLUMNS.check("columns", columns)
        try:
            row = codec.to_dict(stored_key, value, self._fields if names is None else names)
        except UnknownLayoutError:
            if rows.codec(self.name, as_of) is codec:
                raise
            return self.get(*key, as_of=as_of, columns=columns)  # the table was altered meanwhile
        return row if self._model is None or names is not None else self._made(row)

    def get_many(
        self,
        keys: Iterable[Sequence[Any]],
        as_of: TimeLike | None = None,
        *,
        columns: Sequence[str] | None = None,
    ) -> list[Row | None]:
        """The rows of keys, each a tuple, in their order; None for an absent one."""
        rows = self._rows
        codec = rows.codec(self.name, as_of)
        stored = codec.key.whole_keys(keys)
        names = COLUMNS.check("columns", columns)
        values = rows.get_many(stored, as_of)
        codec = rows.codec(self.name, as_of)  # the table may have been altered meanwhile
        found = codec.to_dicts(stored, values, self._fields if names is None else names)
        return self._each_made(found, columns)

    def scan(
        self,
        *key: Any,
        as_of: TimeLike | None = None,
        columns: Sequence[str] | None = None,
        reverse: bool = False,
        limit: int | None = None,
        filter: object = None,  # noqa: A002  # the word of Arrow's own scans
    ) -> pa.RecordBatchReader:
        """The rows whose key begins with the values `key`, in key order, as typed batches. Columns
        that are not asked for are not decoded. Memory is bounded. Raises `CorruptionError` that
        names the first row that cannot be read, behind the rows before it.

        `filter` is an expression of `pyarrow.compute` over any columns of the table: the rows that
        it passes are the rows of `pyarrow.Table.filter`. Conditions on the first columns of the key
        leave few keys to read. So do conditions on the first columns of an index that leads to few
        rows. `limit` counts rows that pass. Raises `UsageError` for a filter that does not fit the
        columns.

        Example:

            import pyarrow.compute as pc

            schema = pa.schema([("carrier", pa.string()), ("number", pa.int64())])
            legs = store.table("legs", schema, ["carrier", "number"])
            legs.put_batch([{"carrier": c, "number": n} for c in ("AA", "UA") for n in range(9)])
            late = (pc.field("carrier") == "UA") & (pc.field("number") >= 7)
            assert [row["number"] for row in legs.rows(filter=late)] == [7, 8]
        """
        LIMIT.check("limit", limit)
        chosen = RowFilter.of(filter)
        if chosen is not None:
            return self._passed(chosen, key, as_of, columns, reverse=reverse, limit=limit)
        rows = self._rows
        span = Span.of_prefix(rows.codec(self.name, as_of).key.key(key))
        batches = rows.batches(span, as_of, reverse=reverse, limit=limit)
        codec = rows.codec(self.name, as_of)  # of the time that the scan has picked, or later
        schema = codec.schema_of(columns)
        return pa.RecordBatchReader.from_batches(schema, codec.decoded(batches, columns))

    def rows(
        self,
        *key: Any,
        as_of: TimeLike | None = None,
        columns: Sequence[str] | None = None,
        reverse: bool = False,
        limit: int | None = None,
        filter: object = None,  # noqa: A002  # as in `scan`
    ) -> Iterator[Row]:
        """The rows of `scan`, one by one. A notebook shows the first of them."""
        how: dict[str, Any] = {"reverse": reverse, "limit": limit, "filter": filter}
        wanted = self._fields if columns is None else columns
        reader = self.scan(*key, as_of=as_of, columns=wanted, **how)
        found: Iterator[Any] = chain.from_iterable(map(each_dict, reader))
        if columns is None and self._model is not None:
            found = map(self._made, found)
        return ShownRows(f"rows of {self.name}", reader.schema, found, row_of)

    def __len__(self) -> int:
        """The number of rows: see `count`."""
        return self.count()

    def __bool__(self) -> bool:
        """True: a table is there, also without rows."""
        return True

    def count(
        self,
        *key: Any,
        as_of: TimeLike | None = None,
        filter: object = None,  # noqa: A002  # as in `scan`
    ) -> int:
        """The number of rows whose key begins with the values `key`, and that pass `filter`. Costs
        a pass over their keys, as `Store.count`, and in a snapshot or a transaction over their
        values too; with a filter as much as the scan."""
        if filter is not None:
            passed = self.scan(*key, as_of=as_of, columns=[], filter=filter)
            return sum(batch.num_rows for batch in passed)
        rows = self._rows
        return rows.count(Span.of_prefix(rows.codec(self.name, as_of).key.key(key)), as_of)

    def find(
        self,
        index: str,
        *values: Any,
        as_of: TimeLike | None = None,
        columns: Sequence[str] | None = None,
        reverse: bool = False,
        limit: int | None = None,
    ) -> FoundRows[Row]:
        """The rows whose columns of `index` begin with `values`, in the order of the index.

        Raises `UsageError` where the index was not whole at that time. Costs a look-up for each
        entry. In a live reader, whose writer removes history without waiting for it, a call without
        `as_of` begins again at a newer time as long as no row was taken. Behind the first rows it
        raises `HistoryGoneError`.
        """
        LIMIT.check("limit", limit)

        def begun(held: RowsAtOneTime, codec: TableCodec) -> tuple[Index, Span]:
            found = whole_index(codec, index)
            return found, index_span(codec, found, values)

        wanted = self._fields if columns is None else columns
        how: dict[str, Any] = {"columns": wanted, "reverse": reverse, "limit": limit}
        schema, pieces = self._at_one_time(as_of, wanted, begun)
        rows = chain.from_iterable(pieces(partial(found_dicts, **how)))
        batches = pieces(partial(found_batches, **how))
        return FoundRows(schema, batches, rows, self._maker(columns))

    def history(self, *key: Any, on_unreadable: OnUnreadable | None = None) -> list[RowVersion]:
        """All kept versions of a row, newest first, each with the columns of its time. A version
        that its columns do not hold raises `CorruptionError`. With `on_unreadable` such a version
        is handed over as it is stored, and left out. The key may be of a row that cannot be read:
        see `delete`."""
        rows = self._kept_rows("asked for its history")
        stored_key = rows.codec(self.name).key.stored_key(key)
        codec = partial(rows.codec, self.name)
        return row_versions(codec, stored_key, rows.history(stored_key), on_unreadable)

    def latest(
        self,
        *key: Any,
        at: Any = None,
        known_at: TimeLike | None = None,
        columns: Sequence[str] | None = None,
    ) -> dict[str, Any] | None:
        """The newest row with an event time of `at` at most, among the rows that were known at
        `known_at`; None if there is none, and if that row was valid until `at` or less. `key` is
        the key without the event time. One seek."""
        rows = self._kept_rows("asked for its latest rows")
        known = rows.time(known_at, "known_at")
        codec = rows.codec(self.name, known)
        span = latest_span(codec, key, at)
        first = rows.store.scan(span.start, span.end, as_of=known, limit=1)
        found: tuple[bytes, bytes] | None = next(first, None)
        names = COLUMNS.check("columns", columns)
        return None if found is None else latest_row(codec, *found, names, at)

    def join(
        self,
        labels: object,
        on: str | Sequence[str],
        at: str | None = "ts",
        known_at: str | TimeLike | None = None,
        max_age: AgeLike | int | None = None,
        columns: Sequence[str] | None = None,
        *,
        prefix: str = "",
        direction: Direction = "backward",
        tolerance: AgeLike | int | None = None,
        allow_exact: bool = True,
        on_future: OnFuture = "error",
        on_null: OnNull = "error",
    ) -> pa.RecordBatchReader:
        """The labels, each with the columns of the row that it asks for: a point-in-time join.

        `on` names the columns of the labels that are the key, `at` the column of their times. In a
        table with an event time a label gets the newest row with an event time of `at` at most,
        among the rows that were known at `known_at`: a time, or a column of the labels. In another
        table it gets the row as it was known at `at`. `row_timestamp` is the time of its commit.

        `columns` names the columns to add, by default each that the labels lack; their new names
        begin with `prefix`. All are null for a label without a row, and for a label whose row is
        older than `max_age`. `direction`, `tolerance`, `allow_exact`, `on_future` and `on_null` are
        as in `Store.join`. In a table with an event time the first three concern the event time,
        `on_future` and `as_of` the time at which rows were known; where event times are integers,
        `max_age` may be one. A row that is valid until a time (`valid_to` of `Store.table`) is no
        answer from then on. Raises as `Store.join`. Costs a seek for each label; in a
        collection, a row group for each stretch of labels.
        """
        rows = self._kept_rows("joined")
        return join_rows(
            rows,
            rows.codec(self.name),
            labels,
            on=on,
            at=at,
            known_at=known_at,
            choice=RowChoice(max_age, direction, tolerance, allow_exact, on_future, on_null),
            columns=columns,
            prefix=prefix,
        )

    def join_side(self) -> TableSide:
        """The side of this table in a join of several sources: see `kvstore.join`."""
        rows = self._kept_rows("joined")
        return TableSide(Side(rows.answers), rows.codec(self.name))

    def changes(
        self,
        since: TimeLike,
        upto: TimeLike | None = None,
        *,
        images: RowImages = "pre+post",
        columns: Sequence[str] | None = None,
        on_unreadable: OnUnreadable | None = None,
    ) -> pa.RecordBatchReader:
        """The changes of rows in `(since, upto]`, in time order, with the names of Delta's change
        feed: `_change_type` (`insert`, `update_preimage`, `update_postimage`, `delete`),
        `_commit_version` and `_commit_timestamp`. `images` leaves out the rows before updates
        (`"post"`) or after them (`"pre"`). The columns are as the table has them at `upto`.

        A row whose columns do not hold its values is damaged or forged, and raises
        `CorruptionError` behind the rows before it. With `on_unreadable` such a row is handed over
        as it is stored, and left out."""
        ROW_IMAGES.check("images", images)
        rows = self._kept_rows("asked for its changes")
        upto = rows.time(upto, "upto")
        codec = rows.codec(self.name, upto)
        span = Span.of_prefix(codec.key.prefix)
        changes = rows.store.changes(since, upto, span.start, span.end, order="time")
        batches = changed_batches(
            rows.store,
            codec,
            changes,
            images=images,
            columns=columns,
            on_unreadable=on_unreadable,
        )
        return pa.RecordBatchReader.from_batches(change_schema(codec, columns), batches)

    def feed(
        self, name: str, start: TimeLike | Position | None = None, **choices: Any
    ) -> TableFeed:
        """A feed of the rows, as `Store.feed`: batches have `rows` with the columns of `changes`.
        `choices` are `images`, `columns` and `on_unreadable` as in `changes`, `streams`, `max_age`,
        `batch_rows`, `batch_bytes`."""
        return open_feed(self._store_rows("followed"), self.name, name, start, **choices)

    # -- writing ----------------------------------------------------------------------------

    def put(self, row: Any, *, expires: Expires | None = None) -> Timestamp | None:
        """Set a row, in place of the row with the same key. A column that is missing is null, or
        has its default. With `expires`, which is as in `Store.put`, the row and its index entries
        are deleted at that time, unless the row is written again. Where the table has a column that
        tells when rows expire (`Store.table`), the row has the time there, and `expires` raises
        `UsageError`."""
        values = row_of(row)
        return self._write(lambda codec, rows: put_row(codec, rows, values), expires=expires)

    def insert(self, row: Any, *, expires: Expires | None = None) -> Timestamp | None:
        """Set a row as `put` does, where its key has no row. Raises `NotUniqueError` if it has one,
        and writes nothing then. Of two calls at once for one key one succeeds. Costs a transaction;
        a batch cannot do it."""
        values = row_of(row)
        return self._write(
            lambda codec, rows: insert_row(codec, rows, values), is_checked=True, expires=expires
        )

    def put_batch(self, rows: object, *, expires: Expires | None = None) -> Timestamp | None:
        """Set the rows of an Arrow table, of batches, or of a frame of Polars, DuckDB or pandas;
        or of a list of dicts. One commit. `expires` is as in `put`, for all rows."""
        given = list(rows) if isinstance(rows, list | tuple) else rows
        if isinstance(given, list) and not any(isinstance(row, pa.RecordBatch) for row in given):
            each = list(map(row_of, given))
            return self._write(lambda codec, reader: put_rows(codec, reader, each), expires=expires)
        if isinstance(given, pa.RecordBatchReader):
            given = given.read_all()  # the commit may have to begin again

        def make(codec: TableCodec, reader: RowSource) -> RowChange:
            return put_batches(codec, reader, batches_of(codec.definition, given))

        return self._write(make, expires=expires)

    def ttl(self, *key: Any) -> timedelta | None:
        """How long until a row expires; None if it does not, or is absent. Two look-ups."""
        rows = self._store_rows("asked when a row expires")
        found: timedelta | None = rows.store.ttl(rows.codec(self.name).key.whole_key(key))
        return found

    def persist(self, *key: Any) -> Timestamp | None:
        """Cancel the expiry of a row and of its index entries; see `Store.persist`. Raises
        `UsageError` where a column tells when rows expire: set it to null."""
        rows = self._store_rows("kept")
        codec = rows.codec(self.name)
        require_no_expiry_column(codec.definition, "update the row: {column}=None")
        found: Timestamp | None = rows.store.persist(codec.key.whole_key(key))
        return found

    def update(self, /, *key: Any, **columns: Any) -> Timestamp | None:
        """Set some columns of a row, which does not expire afterwards even if it did before, unless
        a column of the table tells when. Raises `UsageError` for a row that does not exist, and for
        a column of the key."""
        if not columns:
            raise UsageError("update of no column", "pass column=value")

        def make(codec: TableCodec, rows: RowSource) -> RowChange:
            stored_key = codec.key.whole_key(key)
            value = rows.get(stored_key)
            if value is None:
                raise UsageError(f"{codec.definition.where} has no row {key!r:.200}", "put it")
            row = codec.to_dict(stored_key, value)
            for name in columns:
                if codec.definition.column(name).id in codec.definition.key_ids:
                    raise UsageError(
                        f"{codec.definition.where}: {name!r} is in the key",
                        "put the new row and delete the old one",
                    )
            return put_row(codec, rows, row | columns)

        return self._write(make, is_checked=True)

    def delete(self, *key: Any) -> Timestamp | None:
        """Delete a row, whether or not it exists. Its history stays.

        A damaged or forged row may have a key that no value of Python is: bytes stand for a text
        that is no UTF-8, a number of days or units for a time, as errors name them."""
        return self.delete_many([key])

    def delete_many(self, keys: Iterable[Any]) -> Timestamp | None:
        """Delete the rows of keys, each a tuple, or the value of a key of one column, as `delete`.
        One commit; None if there are no keys."""
        given = key_list(keys)

        def make(codec: TableCodec, rows: RowSource) -> RowChange:
            return delete_rows(codec, rows, codec.key.stored_keys(given))

        return self._write(make)

    def delete_range(
        self, start: Any = None, end: Any = None, *, prefix: Any = None
    ) -> Timestamp | None:
        """Delete the rows from the key `start` to below the key `end`, or those whose key begins
        with `prefix`, and their index entries. Each is a tuple of values of the key from its first
        column on, or the value of the first column; `prefix=()` means all rows. Their history
        stays. One commit.

        Costs one write, and a read of the rows where the table has indexes and not all of its rows
        go. Raises `UsageError` where their entries are more than a commit takes.

        Example:

            schema = pa.schema([("carrier", pa.string()), ("number", pa.int64())])
            seats = store.table("seats", schema, ["carrier", "number"])
            seats.put_batch([{"carrier": "UA", "number": n} for n in range(9)])
            seats.delete_range(("UA", 2), ("UA", 7))
            assert [row["number"] for row in seats.rows("UA")] == [0, 1, 7, 8]
        """
        if start is None and end is None and prefix is None:
            raise UsageError(
                "delete_range of no rows", "pass start or end, or prefix=(): then all rows go"
            )

        def make(codec: TableCodec, rows: RowSource) -> RowChange:
            return delete_range(codec, rows, codec.key.span(start, end, prefix))

        return self._write(make)

    def revert(
        self,
        to: TimeLike,
        *,
        where: object = None,
        start: Any = None,
        end: Any = None,
        prefix: Any = None,
    ) -> Timestamp | None:
        """Give rows the values that they had at the time `to`, and their index entries, in one
        commit; None if no row differs. All rows, or those of a span as in `delete_range`. With
        `where`, an expression as `filter` of `scan`, only the rows that pass it now or then: so a
        scan with this filter gives afterwards what it gave at `to`. History keeps the undone
        versions. A row that comes back does not expire, unless a column of the table tells when: a
        time that has passed deletes it right afterwards.

        Costs what changed in the store since `to`, or what exists in the span if that is less.
        Raises `HistoryGoneError` if `to` is below `since`, `NotUniqueError` where a row that comes
        back has the values of a row outside of the span in a unique index, `UsageError` for more
        than `REVERT_ROWS_MAX` rows, and `ConflictError` if others keep writing into the span.

        Example:

            schema = pa.schema([("id", pa.int64()), ("gate", pa.string())])
            gates = store.table("gates", schema, "id")
            before = gates.put({"id": 1, "gate": "B7"})
            gates.put_batch([{"id": 1, "gate": "?"}, {"id": 2, "gate": "?"}])
            gates.revert(before)
            assert list(gates.rows()) == [{"id": 1, "gate": "B7"}]
        """
        rows, chosen = self._store_rows("reverted"), RowFilter.of(where)

        def span(codec: TableCodec) -> Span:
            if chosen is not None:
                chosen.require(codec)
            return codec.key.span(start, end, prefix)

        return rows.revert(self.name, to, span, None if chosen is None else chosen.places)

    def clear(
        self,
        start: Any = None,
        end: Any = None,
        *,
        prefix: Any = None,
        where: object = None,
        compact: bool = True,
    ) -> Timestamp:
        """Destroy rows for good, with their index entries and the history of both: all rows, or
        those of a span as in `delete_range`. With `where`, an expression as `filter` of `scan`,
        only the rows of which a kept version passes it. The table stays.

        Returns the time from which the rows are absent; earlier reads of them, by key, by a scan
        across them and by an index, raise `HistoryGoneError`. Raises `HistoryHeldError`, with
        nothing done, while a hold, a feed or an open reader needs the history, and `UsageError`
        where the rows and their entries lie in more than `CLEAR_SPANS_MAX` places. The change
        index names the keys until `Store.gc` has passed that time, and the records of expiries name
        those of rows that were to expire until they would have. RocksDB's MANIFEST can name keys
        and entries that were bounds of its files until the store is opened next. Backups that were
        made before keep the rows until they expire.

        Costs a pass over the entries of all indexes, and with `where` one over the rows of the
        span; with `compact`, also a rewrite of the files from the first to the last of them.
        With `compact=False` the space comes back as RocksDB compacts. All rows at once cost no
        pass.

        Example:

            import pyarrow.compute as pc

            schema = pa.schema([("customer", pa.string()), ("trip", pa.int64())])
            rides = store.table("rides", schema, ["customer", "trip"])
            rides.put_batch([{"customer": c, "trip": n} for c in ("ada", "bo") for n in range(3)])
            rides.clear(prefix="ada")
            assert [row["trip"] for row in rides.rows()] == [0, 1, 2]
            rides.clear(where=pc.field("trip") < 2)
            assert rides.history("bo", 1) == []
        """
        chosen = RowFilter.of(where)

        def span(codec: TableCodec) -> Span:
            if chosen is not None:
                chosen.require(codec)
            return codec.key.span(start, end, prefix)

        places = None if chosen is None else chosen.places
        return clear_rows(self._store_rows("cleared"), self.name, span, places, compact=compact)

    def drop(self) -> Timestamp:
        """Drop the table: its rows, its index entries and its definition are deleted in one commit,
        at any number of rows. History stays: a snapshot of an earlier time has the table, until
        `Store.gc` has passed. `clear` first to destroy the rows for good.

        A table of the same name can be made afterwards, with any columns; it begins empty, and its
        history does not tell of the old one. A feed of the table gets the deletions; drop the feed
        when it has. Raises `NotFoundError` if the table is not there.
        """
        return self._store_rows("dropped").drop(self.name)

    def alter(
        self,
        add: Mapping[str, Added] | None = None,
        drop: Sequence[str] | str | None = None,
        widen: Mapping[str, pa.DataType | pa.Field] | None = None,
        add_index: Mapping[str, IndexColumns] | None = None,
        drop_index: Sequence[str] | str | None = None,
        expires: str | Literal[False] | None = None,
        valid_to: str | Literal[False] | None = None,
    ) -> None:
        """Change the columns and indexes of the table from now on. Stored rows stay as they are.

        `add={"tip": pa.float64()}` adds a column that is null in older rows, and
        `add={"tip": (pa.float64(), 0.0)}` one that is 0.0 there. `widen` gives columns a type that
        holds all their values. A new index is not whole until `build_index` has run. The entries of
        a dropped index are deleted; reads as of an earlier time have the index. `expires` names the
        column that tells when rows expire which are written from now on; with `expires=False` they
        stay. Rows that are there expire as they were to when they were written.

        Raises `UsageError` for a change that cannot be, `TableAlteredError` if another call altered
        the table meanwhile. Costs one commit, whatever the number of rows.
        """
        rows = self._store_rows("altered")
        rows.alter(
            self.name, Alteration(add, drop, widen, add_index, drop_index, expires, valid_to)
        )

    def build_index(
        self, index: str, *, progress: Callable[[int], None] | None = None
    ) -> Timestamp | None:
        """Make the entries of a new index for the rows that are there. Readers and writers do not
        wait.

        Returns the time from which `find` can use the index; None if it could already. After an
        interruption the next build begins where the last one was, or at the first row if `gc` has
        passed the beginning of the last one. `progress` is called with the number of rows so far.
        Raises `NotUniqueError` if two rows have the same values in a unique index.
        `kvstore.upkeep.submit_index` makes it a task. Costs a pass over the rows, and one over the
        rows of each import that may be reverted.
        """
        return build_index(self._store_rows("indexed"), self.name, index, progress)

    def tidy(self) -> int:
        """Delete the index entries that fit no kept version of their row, and return their number.
        Imports that replace rows leave such entries behind; `Store.gc` deletes them once nobody can
        revert the imports. Costs a look-up for each entry."""
        rows = self._store_rows("tidied")
        return Tidying(rows.parts, rows.store.transact, rows.catalogue).table(self.name)

    # -- inside -----------------------------------------------------------------------------

    def _passed(
        self,
        chosen: RowFilter,
        key: Sequence[Any],
        as_of: TimeLike | None,
        columns: Sequence[str] | None,
        *,
        reverse: bool,
        limit: int | None,
    ) -> pa.RecordBatchReader:
        """The rows of `scan` that pass a filter."""

        def begun(held: RowsAtOneTime, codec: TableCodec) -> tuple[Span]:
            chosen.require(codec)
            return (Span.of_prefix(codec.key.key(key)),)

        def read(codec: TableCodec, held: RowsAtOneTime, span: Span) -> Iterator[pa.RecordBatch]:
            how: dict[str, Any] = {"columns": columns, "reverse": reverse, "limit": limit}
            return passed_batches(codec, held, span, chosen, **how)

        schema, pieces = self._at_one_time(as_of, columns, begun)
        return pa.RecordBatchReader.from_batches(schema, pieces(read))

    def _at_one_time(
        self,
        as_of: TimeLike | None,
        columns: Sequence[str] | None,
        begin: Callable[[RowsAtOneTime, TableCodec], tuple[Any, ...]],
    ) -> tuple[pa.Schema, Callable[[Callable[..., Iterator[Any]]], Iterator[Any]]]:
        """The schema of the chosen columns, and a function that makes pieces of rows, all of one
        time, by one of the reads that it is given. `begin` makes the last arguments of the read,
        and raises its errors within this call. While no row was taken, a read of the newest time
        whose history goes away begins again at a newer time."""
        source = self._rows
        begins_again = as_of is None and isinstance(source, StoreRows)

        def begun() -> tuple[RowsAtOneTime, TableCodec, tuple[Any, ...]]:
            held = source.held(as_of)
            codec = held.codec(self.name)
            return held, codec, begin(held, codec)

        first = begun()
        schema = first[1].schema_of(columns)

        def pieces(read: Callable[..., Iterator[Any]]) -> Iterator[Any]:
            (held, codec, rest), is_taken = first, False
            while True:
                try:
                    with held:
                        for piece in read(codec, held, *rest):
                            is_taken = is_taken or len(piece) > 0
                            yield piece
                    return
                except HistoryGoneError:
                    if is_taken or not begins_again:
                        raise
                held, codec, rest = begun()
                if codec.schema_of(columns) != schema:
                    raise TableAlteredError(self.name)

        return schema, pieces

    def _codec(self, as_of: TimeLike | None = None) -> TableCodec:
        return self._rows.codec(self.name, as_of)

    def _made(self, row: dict[str, Any]) -> Row:
        return cast("Row", row) if self._model is None else self._model(**row)

    def _maker(self, columns: Sequence[str] | None) -> Callable[[dict[str, Any]], Row] | None:
        """What makes an instance of a row; None for dicts."""
        return None if self._model is None or columns is not None else self._made

    def _each_made(
        self, rows: list[dict[str, Any] | None], columns: Sequence[str] | None
    ) -> list[Row | None]:
        made = self._maker(columns)
        if made is None:
            return cast("list[Row | None]", rows)
        return [row if row is None else made(row) for row in rows]

    def _kept_rows(self, what: str) -> StoreRows | PastRows:
        """The rows with their history."""
        return self._rows if isinstance(self._rows, PastRows) else self._store_rows(what)

    def _store_rows(self, what: str) -> StoreRows:
        if not isinstance(self._rows, StoreRows):
            raise refused(self.name, what)
        return self._rows

    def _write(
        self, make: Any, *, is_checked: bool = False, expires: Expires | None = None
    ) -> Timestamp | None:
        def once(codec: TableCodec, rows: RowSource) -> RowChange:
            if expires is not None:
                require_no_expiry_column(codec.definition, "set {column} in the row")
            change: RowChange = make(codec, rows)
            change.expires = expires
            return change

        return self._rows.write(self.name, once, is_checked=is_checked)

    def __repr__(self) -> str:
        return f"<kvstore.Table {self.name!r}>"

    def _repr_html_(self) -> str:
        """The columns and the first rows, for a notebook."""
        try:
            reader = self.scan(limit=ROWS_SHOWN + 1)
            key = ", ".join(map(str, self.key))
            title = f"{self.name}: key {key}"
            return html_of(title, reader.schema, chain.from_iterable(map(each_dict, reader)))
        except KVStoreError as error:  # such as a row that cannot be read
            return html_of(f"{self.name}: {error}", pa.schema([]), [])


# --------------------------------------------------------------------------------------------------
# Tables of a store by name: found, or made if they are new.


class Given(NamedTuple):
    """The arguments that make a table: schema, key, indexes, event time and expiry, and the class
    whose instances its rows are."""

    arguments: tuple[
        pa.Schema,
        str | desc | Sequence[str | desc],
        Mapping[str, IndexColumns] | None,
        str | None,
        str | None,
        str | None,
    ]
    model: type | None

    @property
    def fields(self) -> tuple[str, ...] | None:
        """The columns that `model` has."""
        return None if self.model is None else tuple(self.arguments[0].names)


def model_of(
    name: str, codec: TableCodec, row: type[Row] | None
) -> tuple[type[Row] | None, tuple[str, ...] | None]:
    """The class of the rows of a table that is there, and the columns that it has."""
    if row is None:
        return None, None
    if not isinstance(row, type):
        raise UsageError(f"table {name!r}: row={row!r:.100}", "pass a class with annotated fields")
    return row, model_fields(row, codec.definition)


def table_on(name: str, rows: RowSource, row: type[Row] | None = None) -> Table[Row]:
    """The table `name` on `rows`, which is there."""
    return Table(name, rows, *model_of(name, rows.codec(name), row))


def arguments_given(
    name: str,
    schema: pa.Schema | type | None,
    key: str | desc | Sequence[str | desc] | None,
    indexes: Mapping[str, IndexColumns] | None,
    event_time: str | None,
    expires: str | None,
    valid_to: str | None,
) -> Given | None:
    """The arguments of a call that makes a table; None for one that finds it by its name alone."""
    if schema is None:
        if any(each is not None for each in (key, indexes, event_time, expires, valid_to)):
            raise UsageError(f"table {name!r}: no schema", "pass schema=, or the name alone")
        return None
    model = schema if isinstance(schema, type) else None
    if model is not None:
        schema = schema_of_class(model)
    if key is None:
        raise UsageError(f"table {name!r}: no key", "pass key=[columns]")
    return Given((schema, key, indexes, event_time, expires, valid_to), model)


def open_table(
    store: Any,
    parts: Parts,
    catalogue: Catalogue,
    name: str,
    schema: pa.Schema | type | None,
    key: str | desc | Sequence[str | desc] | None,
    indexes: Mapping[str, IndexColumns] | None,
    event_time: str | None,
    expires: str | None,
    valid_to: str | None,
    row: type | None,
) -> Table[Any]:
    """See `Store.table`."""
    require_name(name)
    rows = StoreRows(store, catalogue, parts)
    made = arguments_given(name, schema, key, indexes, event_time, expires, valid_to)
    if made is None:
        return table_on(name, rows, row)
    if parts.committer.policy.commits is None:
        # Plain reads leave tables out before the first one shows.
        parts.reserve.has_tables = True
    with catalogue.changing(name):
        number_free = catalogue.number_free
        store.transact(lambda txn: make(txn, name, *made.arguments, number_free=number_free))
    if row is not None:
        return table_on(name, rows, row)
    return Table(name, rows, made.model, made.fields)
