"""A table: typed rows of a store, of a snapshot, of a transaction or of a batch, opened by its
name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import pyarrow as pa

from kvstore.base.arguments import COLUMNS, LIMIT, key_list
from kvstore.base.span import Span
from kvstore.base.timestamp import TimeLike, Timestamp
from kvstore.codec.tuples import desc
from kvstore.errors import HistoryGoneError, TableAlteredError, UsageError
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
from kvstore.tables.changes import (
    ROW_IMAGES,
    OnUnreadable,
    RowImages,
    TableFeed,
    change_schema,
    changed_batches,
    hand_over,
    open_feed,
)
from kvstore.tables.codec import (
    TableCodec,
    UnknownLayoutError,
    UnreadableRowError,
    batches_of,
    each_dict,
)
from kvstore.tables.definition import Index, row_of, schema_of_class
from kvstore.tables.indexes import (
    Tidying,
    build_index,
    found_batches,
    found_dicts,
    index_span,
    whole_index,
)
from kvstore.tables.joining import join_rows, latest_span
from kvstore.tables.joins import Side, TableSide
from kvstore.tables.sources import (
    ImportTarget,
    PastRows,
    RowChange,
    RowsAtOneTime,
    RowSource,
    StoreRows,
    delete_rows,
    insert_row,
    put_batches,
    put_row,
    put_rows,
)
from kvstore.timeline.expiries import Expires
from kvstore.timeline.parts import Parts

# --------------------------------------------------------------------------------------------------
# Rows that a read of a table has found.


class FoundRows:
    """Rows of a table: an iterator of dicts, or Arrow data for libraries that speak Arrow."""

    def __init__(
        self,
        schema: pa.Schema,
        batches: Iterator[pa.RecordBatch],
        rows: Iterator[Any] | None = None,
    ) -> None:
        """`rows` are the rows of `batches`, one by one. Only one of both is read."""
        self.schema = schema
        self._batches = batches
        self._rows = chain.from_iterable(map(each_dict, batches)) if rows is None else rows
        self._begun = False

    def __iter__(self) -> Iterator[Any]:
        self._begun = True
        return self._rows

    def __next__(self) -> Any:
        self._begun = True
        return next(self._rows)

    def to_reader(self) -> pa.RecordBatchReader:
        """The rows as typed record batches. Raises `UsageError` once rows were taken one by one."""
        if self._begun:
            raise UsageError("some rows were taken one by one", "find the rows again")
        self._rows = chain.from_iterable(map(each_dict, self._batches))
        return pa.RecordBatchReader.from_batches(self.schema, self._batches)

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


class Table:
    """Typed rows with a composite key. `store.table`, `snapshot.table`, `transaction.table` and
    `batch.table` give one.

    A read as of a time has the columns that the table had then. Times are given as to `Store`. A
    write returns the timestamp of its commit, None where a transaction or a batch commits later.
    """

    def __init__(
        self,
        name: str,
        rows: RowSource,
        model: type | None = None,
    ) -> None:
        """Whole rows are instances of `model`, if one is given, and dicts otherwise."""
        self.name = name
        self._model = model
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

    def codec(self, as_of: TimeLike | None = None) -> TableCodec:
        """The encoder and decoder of the rows of the table, as it was at a time. It needs no store,
        so that other processes can build rows."""
        return self._codec(as_of)

    def import_target(self) -> ImportTarget:
        """The parts that an import of rows needs: the store, the codec, and a check for the commit.
        Raises `UsageError` where the store is only read."""
        return self._store_rows("imported into").import_target(self.name)

    # -- reading ----------------------------------------------------------------------------

    def get(
        self, *key: Any, as_of: TimeLike | None = None, columns: Sequence[str] | None = None
    ) -> Any:
        """The row of a key; None if there is none. One look-up."""
        rows = self._rows
        codec = rows.codec(self.name, as_of)
        stored_key = codec.key.whole_key(key)
        value = rows.get(stored_key, as_of)
        if value is None:
            return None
        names = COLUMNS.check("columns", columns)
        try:
            row = codec.to_dict(stored_key, value, names)
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
    ) -> list[Any]:
        """The rows of keys, each a tuple, in their order; None for an absent one."""
        rows = self._rows
        codec = rows.codec(self.name, as_of)
        stored = codec.key.whole_keys(keys)
        names = COLUMNS.check("columns", columns)
        values = rows.get_many(stored, as_of)
        codec = rows.codec(self.name, as_of)  # the table may have been altered meanwhile
        found = codec.to_dicts(stored, values, names)
        if names is not None or self._model is None:
            return found
        return [row if row is None else self._made(row) for row in found]

    def scan(
        self,
        *key: Any,
        as_of: TimeLike | None = None,
        columns: Sequence[str] | None = None,
        reverse: bool = False,
        limit: int | None = None,
    ) -> pa.RecordBatchReader:
        """The rows whose key begins with the values `key`, in key order, as typed batches. Columns
        that are not asked for are not decoded. Memory is bounded. Raises `CorruptionError` that
        names the first row that cannot be read, behind the rows before it."""
        LIMIT.check("limit", limit)
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
    ) -> Iterator[Any]:
        """The rows of `scan`, one by one."""
        reader = self.scan(*key, as_of=as_of, columns=columns, reverse=reverse, limit=limit)
        found = chain.from_iterable(map(each_dict, reader))
        return found if columns is not None or self._model is None else map(self._made, found)

    def count(self, *key: Any, as_of: TimeLike | None = None) -> int:
        """The number of rows whose key begins with the values `key`. Costs a pass over their keys,
        as `Store.count`, and in a snapshot or a transaction over their values too."""
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
    ) -> FoundRows:
        """The rows whose columns of `index` begin with `values`, in the order of the index.

        Raises `UsageError` where the index was not whole at that time. Costs a look-up for each
        entry. In a live reader, whose writer removes history without waiting for it, a call without
        `as_of` begins again at a newer time as long as no row was taken. Behind the first rows it
        raises `HistoryGoneError`.
        """
        LIMIT.check("limit", limit)
        source = self._rows
        begins_again = as_of is None and isinstance(source, StoreRows)

        def begun() -> tuple[RowsAtOneTime, TableCodec, Index, Span]:
            held = source.held(as_of)
            codec = held.codec(self.name)
            found = whole_index(codec, index)
            return held, codec, found, index_span(codec, found, values)

        first = begun()
        schema = first[1].schema_of(columns)

        def rows(find: Callable[..., Iterator[Any]]) -> Iterator[Any]:
            (held, codec, found, span), is_taken = first, False
            while True:
                how = {"columns": columns, "reverse": reverse, "limit": limit}
                try:
                    with held:
                        for piece in find(codec, held, found, span, **how):
                            is_taken = is_taken or len(piece) > 0
                            yield piece
                    return
                except HistoryGoneError:
                    if is_taken or not begins_again:
                        raise
                held, codec, found, span = begun()
                if codec.schema_of(columns) != schema:
                    raise TableAlteredError(self.name)

        return FoundRows(schema, rows(found_batches), chain.from_iterable(rows(found_dicts)))

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
        `known_at`; None if there is none. `key` is the key without the event time. One seek."""
        rows = self._kept_rows("asked for its latest rows")
        known = rows.time(known_at, "known_at")
        codec = rows.codec(self.name, known)
        span = latest_span(codec, key, at)
        first = rows.store.scan(span.start, span.end, as_of=known, limit=1)
        found: tuple[bytes, bytes] | None = next(first, None)
        names = COLUMNS.check("columns", columns)
        return None if found is None else codec.to_dict(*found, names)

    def join(
        self,
        labels: object,
        on: str | Sequence[str],
        at: str | None = "ts",
        known_at: str | TimeLike | None = None,
        max_age: timedelta | None = None,
        columns: Sequence[str] | None = None,
        *,
        prefix: str = "",
    ) -> pa.RecordBatchReader:
        """The labels, each with the columns of the row that it asks for: a point-in-time join.

        `on` names the columns of the labels that are the key, `at` the column of their times. In a
        table with an event time a label gets the newest row with an event time of `at` at most,
        among the rows that were known at `known_at`: a time, or a column of the labels. In another
        table it gets the row as it was known at `at`. `row_timestamp` is the time of its commit.

        `columns` names the columns to add, by default each that the labels lack; their new names
        begin with `prefix`. All are null for a label without a row, and for a label whose row is
        older than `max_age`. Raises as `Store.join`. Costs a seek for each label; in a collection,
        a row group for each stretch of labels.
        """
        rows = self._kept_rows("joined")
        return join_rows(
            rows,
            rows.codec(self.name),
            labels,
            on=on,
            at=at,
            known_at=known_at,
            max_age=max_age,
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

        A row that its columns do not hold, which an older release took, raises `CorruptionError`
        behind the rows before it. With `on_unreadable` such a row is handed over as it is stored,
        and left out."""
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
        are deleted at that time, unless the row is written again."""
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
        """Cancel the expiry of a row and of its index entries; see `Store.persist`."""
        rows = self._store_rows("kept")
        found: Timestamp | None = rows.store.persist(rows.codec(self.name).key.whole_key(key))
        return found

    def update(self, /, *key: Any, **columns: Any) -> Timestamp | None:
        """Set some columns of a row, which does not expire afterwards even if it did before. Raises
        `UsageError` for a row that does not exist, and for a column of the key."""
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

        A row of an older release may have a key that no value of Python is: bytes stand for a text
        that is no UTF-8, a number of days or units for a time, as errors name them."""
        return self.delete_many([key])

    def delete_many(self, keys: Iterable[Any]) -> Timestamp | None:
        """Delete the rows of keys, each a tuple, or the value of a key of one column, as `delete`.
        One commit; None if there are no keys."""
        given = key_list(keys)

        def make(codec: TableCodec, rows: RowSource) -> RowChange:
            return delete_rows(codec, rows, codec.key.stored_keys(given))

        return self._write(make)

    def alter(
        self,
        add: Mapping[str, Added] | None = None,
        drop: Sequence[str] | str | None = None,
        widen: Mapping[str, pa.DataType | pa.Field] | None = None,
        add_index: Mapping[str, IndexColumns] | None = None,
        drop_index: Sequence[str] | str | None = None,
    ) -> None:
        """Change the columns and indexes of the table from now on. Stored rows stay as they are.

        `add={"tip": pa.float64()}` adds a column that is null in older rows, and
        `add={"tip": (pa.float64(), 0.0)}` one that is 0.0 there. `widen` gives columns a type that
        holds all their values. A new index is not whole until `build_index` has run. The entries of
        a dropped index are deleted; reads as of an earlier time have the index.

        Raises `UsageError` for a change that cannot be, `TableAlteredError` if another call altered
        the table meanwhile. Costs one commit, whatever the number of rows.
        """
        rows = self._store_rows("altered")
        rows.alter(self.name, Alteration(add, drop, widen, add_index, drop_index))

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

    def _codec(self, as_of: TimeLike | None = None) -> TableCodec:
        return self._rows.codec(self.name, as_of)

    def _made(self, row: dict[str, Any]) -> Any:
        return row if self._model is None else self._model(**row)

    def _kept_rows(self, what: str) -> StoreRows | PastRows:
        """The rows with their history."""
        return self._rows if isinstance(self._rows, PastRows) else self._store_rows(what)

    def _store_rows(self, what: str) -> StoreRows:
        if not isinstance(self._rows, StoreRows):
            raise UsageError(
                f"table {self.name!r} cannot be {what} here", "use the table of the store"
            )
        return self._rows

    def _write(
        self, make: Any, *, is_checked: bool = False, expires: Expires | None = None
    ) -> Timestamp | None:
        def once(codec: TableCodec, rows: RowSource) -> RowChange:
            change: RowChange = make(codec, rows)
            change.expires = expires
            return change

        return self._rows.write(self.name, once, is_checked=is_checked)

    def __repr__(self) -> str:
        return f"<kvstore.Table {self.name!r}>"


# --------------------------------------------------------------------------------------------------
# Tables of a store by name: found, or made if they are new.


class Given(NamedTuple):
    """The arguments that make a table: schema, key, indexes and event time, and the class whose
    instances its rows are."""

    arguments: tuple[
        pa.Schema,
        str | desc | Sequence[str | desc],
        Mapping[str, IndexColumns] | None,
        str | None,
    ]
    model: type | None


def arguments_given(
    name: str,
    schema: pa.Schema | type | None,
    key: str | desc | Sequence[str | desc] | None,
    indexes: Mapping[str, IndexColumns] | None,
    event_time: str | None,
) -> Given | None:
    """The arguments of a call that makes a table; None for one that finds it by its name alone."""
    if schema is None:
        if key is not None or indexes is not None or event_time is not None:
            raise UsageError(f"table {name!r}: no schema", "pass schema=, or the name alone")
        return None
    model = schema if isinstance(schema, type) else None
    if model is not None:
        schema = schema_of_class(model)
    if key is None:
        raise UsageError(f"table {name!r}: no key", "pass key=[columns]")
    return Given((schema, key, indexes, event_time), model)


def open_table(
    store: Any,
    parts: Parts,
    catalogue: Catalogue,
    name: str,
    schema: pa.Schema | type | None,
    key: str | desc | Sequence[str | desc] | None,
    indexes: Mapping[str, IndexColumns] | None,
    event_time: str | None,
) -> Table:
    """See `Store.table`."""
    require_name(name)
    rows = StoreRows(store, catalogue, parts)
    made = arguments_given(name, schema, key, indexes, event_time)
    if made is None:
        catalogue.codec(name)
        return Table(name, rows)
    if parts.committer.policy.commits is None:
        # Plain reads leave tables out before the first one shows.
        parts.reserve.has_tables = True
    with catalogue.changing(name):
        number_free = catalogue.number_free
        store.transact(lambda txn: make(txn, name, *made.arguments, number_free=number_free))
    return Table(name, rows, made.model)
