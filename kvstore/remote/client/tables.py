"""Tables of a client: rows are encoded here, and committed and decoded beside the store.

Definitions are values of the store, which the client reads and keeps. The keys of a table never
change their form, so an older definition finds every row.

Invariants
1. A row is committed only if its definition was the newest one: otherwise it is encoded again.
2. A row that is read has the columns of its time.
"""

from __future__ import annotations

import json
import secrets
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from functools import cached_property, lru_cache, partial
from typing import Any, ClassVar, Final, Literal, NamedTuple, Protocol, TypeVar, overload

import numpy as np
import pyarrow as pa

from kvstore.base.arguments import COLUMNS, key_list
from kvstore.base.span import Span
from kvstore.base.timestamp import (
    NS_PER_SECOND,
    TIMESTAMP_MAX,
    AgeLike,
    TimeLike,
    Timestamp,
    plain_integer,
)
from kvstore.codec.tuples import desc
from kvstore.errors import KVStoreError, TableAlteredError, UsageError
from kvstore.limits import JOIN_ROWS_FIRST, JOIN_ROWS_MAX, SERVER_BODY_BYTES_MAX, TABLE_ATTEMPTS
from kvstore.mvcc import Version
from kvstore.remote import verbs
from kvstore.remote.client import transport
from kvstore.remote.client.calls import (
    ClientRequest,
    Reply,
    SentWriteSet,
    batch_request,
    bounds,
    columns_request,
    rows_request,
)
from kvstore.remote.client.transport import (
    Pool,
    ServedFrontiers,
    time_left,
    values_of,
    versions_of,
)
from kvstore.remote.protocol import LABELS_SCHEMA
from kvstore.remote.verbs import Verb
from kvstore.tables.catalogue import (
    Added,
    Alteration,
    Catalogue,
    IndexColumns,
    alter,
    define,
    require_name,
)
from kvstore.tables.definition import Definition, definition_key
from kvstore.tables.filters import RowFilter
from kvstore.tables.indexes import index_span
from kvstore.tables.joining import RowChoice, asked_rows, has_come, latest_span
from kvstore.tables.joins import (
    VALUE_FIELDS,
    Asked,
    Direction,
    OnFuture,
    OnNull,
    Piece,
    Pieces,
    Search,
    Side,
    TableSide,
    age_of,
    within,
)
from kvstore.tables.row_changes import ROW_IMAGES, OnUnreadable, RowImages
from kvstore.tables.row_codec import TableCodec, dicts
from kvstore.tables.sources import (
    ImportTarget,
    MakeChange,
    RowSource,
    TransactionRows,
    digest_of,
    one_time,
    past_time,
    refused,
    require_no_expiry_column,
)
from kvstore.tables.table import (
    FoundRows,
    Row,
    RowVersion,
    Table,
    arguments_given,
    model_of,
    row_versions,
)
from kvstore.timeline.durability import Durability
from kvstore.timeline.expiries import sent_expiry
from kvstore.transaction import Transaction

T = TypeVar("T")


class ClientDefinitions:
    """The definitions in the store of a client."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def history(self, key: bytes) -> Sequence[Version]:
        """See `Client.history`."""
        return versions_of(self._pool, key)

    def scan(self, start: bytes, end: bytes | None) -> Iterator[tuple[bytes, bytes]]:
        """See `Client.scan`."""
        for batch in self._pool.rows(verbs.SCAN, **bounds(Span(start, end))):
            yield from zip(batch.column(0).to_pylist(), batch.column(1).to_pylist(), strict=True)


class ClientRows(RowSource):
    """The rows of a client's store, which are written here. `ClientTable` asks the server for rows
    that it has decoded."""

    def __init__(self, client: Any, catalogue: Catalogue) -> None:
        super().__init__(client, catalogue)
        self.pool: Pool = client.pool
        self.made_by: dict[str, str] = {}
        """The digests of the definitions that encoded the rows of a batch."""

    def codec(self, name: str, as_of: TimeLike | None = None) -> TableCodec:
        """The definition that encodes rows. It has no indexes: the server makes their entries."""
        at = None if as_of is None else self.pool.call(verbs.RESOLVE, as_of=as_of)
        return _encoder(name, self.catalogue.codec(name, at).stored)

    def write(self, name: str, make: MakeChange, *, is_checked: bool) -> Timestamp | None:
        """See `RowSource.write`. One round trip; with `is_checked` a transaction."""
        if is_checked:

            def body(transaction: Transaction) -> Transaction:
                rows = TransactionRows(transaction, self.catalogue)
                rows.write(name, make, is_checked=True)
                return transaction

            timestamp: Timestamp | None = self.source.transact(body).timestamp
            return timestamp
        for _ in range(TABLE_ATTEMPTS - 1):
            known = self.catalogue.codec(name).stored
            try:
                return self._send(name, make)
            except (TableAlteredError, UsageError) as error:
                self.catalogue.forget(name)
                is_altered = isinstance(error, TableAlteredError)
                if not is_altered and self.catalogue.codec(name).stored == known:
                    raise  # the row is wrong by the newest definition too
        return self._send(name, make)

    def _send(self, name: str, make: MakeChange) -> Timestamp | None:
        codec = self.codec(name)
        made = make(codec, _SentRows(self.source, self.catalogue))
        definitions = {name: digest_of(self.catalogue.codec(name))}
        due = None if made.expires is None else sent_expiry(made.expires)
        if made.columns:  # hot: no row becomes an object here
            return self.pool.send(columns_request(made.columns, due, definitions))
        writes = SentWriteSet("the rows")
        for start, end in made.ranges:
            writes.delete_row_range(start, end)
        writes.delete_rows(made.gone)
        writes.put_rows(made.keys, made.values, due, made.rows(codec))
        if not writes:
            return None
        return self.pool.send(batch_request(writes, None, definitions=definitions))

    def checked(self, name: str, codec: TableCodec) -> Callable[[], None]:
        """Note the definition of the rows of a batch. The server checks it."""
        self.made_by[name] = digest_of(self.catalogue.codec(name))
        return _nothing

    def import_target(self, name: str) -> ImportTarget:
        """See `Table.import_target`. The codec has the indexes: their entries are built with the
        rows. One round trip."""
        self.catalogue.forget(name)
        codec = self.catalogue.codec(name)

        def check() -> None:
            self.catalogue.forget(name)
            if self.catalogue.codec(name).stored != codec.stored:
                raise TableAlteredError(name)

        return ImportTarget(self.source, codec, check)

    def commit(
        self, durability: Durability | None, writes: Any, *, check: object = None
    ) -> Timestamp:
        """Commit a batch with these rows."""
        request = batch_request(writes, durability, definitions=self.made_by)
        try:
            return self.pool.send(request)
        except TableAlteredError as error:
            self.catalogue.forget(error.table)
            raise

    def table(
        self,
        name: str,
        schema: pa.Schema | type | None,
        key: str | desc | Sequence[str | desc] | None,
        indexes: Mapping[str, IndexColumns] | None,
        event_time: str | None,
        expires: str | None,
        valid_to: str | None,
        row: type | None = None,
    ) -> ClientTable[Any]:
        """See `Client.table`."""
        require_name(name)
        made = arguments_given(name, schema, key, indexes, event_time, expires, valid_to)
        if made is None:
            return ClientTable(name, self, *model_of(name, self.catalogue.codec(name), row))
        definition = define(name, 1, *made.arguments).to_bytes().decode()
        has_indexes = indexes is not None
        self.pool.call(verbs.MAKE_TABLE, table=name, definition=definition, has_indexes=has_indexes)
        self.catalogue.forget(name)
        if row is not None:
            return ClientTable(name, self, *model_of(name, self.catalogue.codec(name), row))
        return ClientTable(name, self, made.model, made.fields)


class _SentRows(ClientRows):
    """The rows of a change that is a request of its own: rows of batches travel as columns. A batch
    or a transaction of the client collects them among its other writes."""

    sends_columns: ClassVar[bool] = True


class OpenSnapshot(Protocol):
    """A snapshot of a client, as its tables see it."""

    def open_at(self) -> Timestamp:
        """The time of the snapshot, which is kept readable. Raises `ClosedError` at its end."""
        ...


class ClientTable(Table[Row]):
    """A table of a client. It reads and writes rows as a table of the store does. To alter it and
    to build its indexes takes the right `admin`."""

    def __init__(
        self,
        name: str,
        rows: ClientRows,
        model: type[Row] | None = None,
        fields: tuple[str, ...] | None = None,
        snapshot: OpenSnapshot | None = None,
    ) -> None:
        """With `snapshot` the table is only read, at its time."""
        super().__init__(name, rows, model, fields)
        self._pool, self._catalogue = rows.pool, rows.catalogue
        self._snapshot = snapshot

    def import_target(self) -> ImportTarget:
        """See `Table.import_target`."""
        self._require_writable("imported into")
        return super().import_target()

    def codec(self, as_of: TimeLike | None = None) -> TableCodec:
        """See `Table.codec`. One round trip."""
        self._catalogue.forget(self.name)
        as_of = self._when(as_of)
        if as_of is None:
            return self._catalogue.codec(self.name)
        return self._catalogue.codec(self.name, self._pool.call(verbs.RESOLVE, as_of=as_of))

    @overload
    def get(self, *key: Any, as_of: TimeLike | None = None, columns: None = None) -> Row | None: ...

    @overload
    def get(
        self, *key: Any, as_of: TimeLike | None = None, columns: Sequence[str]
    ) -> dict[str, Any] | None: ...

    def get(
        self, *key: Any, as_of: TimeLike | None = None, columns: Sequence[str] | None = None
    ) -> Row | dict[str, Any] | None:
        """See `Table.get`. One round trip."""
        return self.get_many([key], as_of, columns=columns)[0]

    def get_many(
        self,
        keys: Iterable[Sequence[Any]],
        as_of: TimeLike | None = None,
        *,
        columns: Sequence[str] | None = None,
    ) -> list[Row | None]:
        """See `Table.get_many`. One round trip: the definition of that time comes with the rows."""
        given, names = key_list(keys), COLUMNS.check("columns", columns)
        at = self._when(as_of)

        def once(known: TableCodec) -> list[dict[str, Any] | None]:
            stored = known.key.whole_keys(given)
            asked = [definition_key(self.name), *stored]
            definition, *values = values_of(self._pool, asked, at)
            if definition is None and at is None:  # it was dropped
                raise TableAlteredError(self.name)
            # A time before the table has no definition, and no rows.
            codec = known if definition is None else _decoder(self.name, definition)
            if codec.key.prefix != known.key.prefix:  # it was made anew
                raise TableAlteredError(self.name)
            return codec.to_dicts(stored, values, self._fields if names is None else names)

        return self._each_made(self._by_newest(once, as_of), columns)

    def scan(
        self,
        *key: Any,
        as_of: TimeLike | None = None,
        columns: Sequence[str] | None = None,
        reverse: bool = False,
        limit: int | None = None,
        filter: object = None,  # noqa: A002  # as in `Table.scan`
    ) -> pa.RecordBatchReader:
        """See `Table.scan`. The server filters the rows, and decodes the columns that are asked
        for. Raises `UsageError` for a filter with a function that does not travel."""
        at, chosen = self._when(as_of), RowFilter.of(filter)
        sent = None if chosen is None else chosen.to_bytes()

        def once(codec: TableCodec) -> pa.RecordBatchReader:
            span = Span.of_prefix(codec.key.key(key))
            return self._rows_of(verbs.TABLE_SCAN, span, at, columns, reverse, limit, filter=sent)

        return self._by_newest(once, as_of)

    def find(
        self,
        index: str,
        *values: Any,
        as_of: TimeLike | None = None,
        columns: Sequence[str] | None = None,
        reverse: bool = False,
        limit: int | None = None,
    ) -> FoundRows[Row]:
        """See `Table.find`. The server looks the rows up."""

        def once(codec: TableCodec) -> pa.RecordBatchReader:
            span = index_span(codec, codec.definition.index(index), values)
            return self._rows_of(verbs.TABLE_FIND, span, at, wanted, reverse, limit, index=index)

        at = self._when(as_of)
        wanted = self._fields if columns is None else columns
        reader = self._by_newest(once, as_of)
        return FoundRows(reader.schema, iter(reader), made=self._maker(columns))

    def history(self, *key: Any, on_unreadable: OnUnreadable | None = None) -> list[RowVersion]:
        """See `Table.history`."""

        def once(known: TableCodec) -> list[RowVersion]:
            stored_key = known.key.stored_key(key)
            versions = versions_of(self._pool, stored_key)
            if self._snapshot is not None:
                upto = self._snapshot.open_at()
                versions = [each for each in versions if each.timestamp <= upto]
            codec = partial(self._catalogue.codec, self.name)
            if self.codec().key.prefix != known.key.prefix:  # which may be newer, or made anew
                raise TableAlteredError(self.name)
            return row_versions(codec, stored_key, versions, on_unreadable)

        return self._by_newest(once)

    def ttl(self, *key: Any) -> timedelta | None:
        """See `Table.ttl`. Two round trips."""
        self._require_writable("asked when a row expires")
        return time_left(self._pool, self.codec().key.whole_key(key))

    def count(
        self,
        *key: Any,
        as_of: TimeLike | None = None,
        filter: object = None,  # noqa: A002  # as in `Table.scan`
    ) -> int:
        """See `Table.count`. The server counts."""
        at, chosen = self._when(as_of), RowFilter.of(filter)
        sent = None if chosen is None else chosen.to_bytes()

        def once(codec: TableCodec) -> int:
            how: dict[str, Any] = {"as_of": at, "filter": sent}
            within = bounds(Span.of_prefix(codec.key.key(key)))
            return self._pool.call(verbs.TABLE_COUNT, table=self.name, **within, **how)

        return self._by_newest(once, as_of)

    def persist(self, *key: Any) -> Timestamp | None:
        """See `Table.persist`. Two round trips."""
        self._require_writable("kept")
        codec = self.codec()
        require_no_expiry_column(codec.definition, "update the row: {column}=None")
        return self._pool.call(verbs.PERSIST, key=codec.key.whole_key(key))

    def latest(
        self,
        *key: Any,
        at: Any = None,
        known_at: TimeLike | None = None,
        columns: Sequence[str] | None = None,
    ) -> dict[str, Any] | None:
        """See `Table.latest`."""

        def once(codec: TableCodec) -> dict[str, Any] | None:
            span = latest_span(codec, key, at)
            end = None if at is None else codec.definition.end_column
            asked = names
            if names is not None and end is not None and end.name not in names:
                asked = (*names, end.name)
            reader = self._rows_of(verbs.TABLE_SCAN, span, known, asked, False, 1)
            row = next((row for batch in reader for row in dicts(batch)), None)
            if row is None:
                return None
            until = None if end is None else row.get(end.name)  # it may be newer than `known_at`
            if until is not None and has_come(codec, until, at):
                return None
            return row if names is None else {name: row[name] for name in names}

        known, names = self._upto(known_at, "known_at"), COLUMNS.check("columns", columns)
        return self._by_newest(once, None if self._snapshot else known_at)

    def changes(
        self,
        since: TimeLike,
        upto: TimeLike | None = None,
        *,
        images: RowImages = "pre+post",
        columns: Sequence[str] | None = None,
        on_unreadable: OnUnreadable | None = None,
    ) -> pa.RecordBatchReader:
        """See `Table.changes`. Raises `UsageError` for `on_unreadable`: the server decodes the
        rows."""
        ROW_IMAGES.check("images", images)
        if on_unreadable is not None:
            raise UsageError(
                "on_unreadable of a client's table", "ask in the process of the store, or beside it"
            )
        how: dict[str, Any] = {"table": self.name, "images": images, "columns": columns}
        upto = self._upto(upto, "upto")
        return self._pool.rows(verbs.TABLE_CHANGES, since=since, upto=upto, **how)

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
        """See `Table.join`. The columns of keys and times travel to the server, in pieces."""
        choice = RowChoice(max_age, direction, tolerance, allow_exact, on_future, on_null)
        question = (on, at, known_at, choice, columns, prefix)
        upto = None if self._snapshot is None else self._snapshot.open_at()
        return join_served(self._pool, self.codec(), labels, *question, upto=upto)

    def join_side(self) -> TableSide:
        """See `Table.join_side`. Keys travel to the server, and rows back."""
        upto = None if self._snapshot is None else self._snapshot.open_at()
        return TableSide(Side(partial(remote_answers, self._pool, upto)), self.codec())

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
        """See `Table.alter`. Two round trips."""
        self._require_writable("altered")
        alteration = Alteration(add, drop, widen, add_index, drop_index, expires, valid_to)
        wanted = alter(self.codec().definition, alteration)
        definition = wanted.to_bytes().decode()
        try:
            self._pool.call(verbs.ALTER_TABLE, table=self.name, definition=definition)
        finally:
            self._catalogue.forget(self.name)

    def revert(
        self,
        to: TimeLike,
        *,
        where: object = None,
        start: Any = None,
        end: Any = None,
        prefix: Any = None,
    ) -> Timestamp | None:
        """See `Table.revert`. The server finds the changes and writes the rows."""
        self._require_writable("reverted")
        chosen = RowFilter.of(where)
        sent = None if chosen is None else chosen.to_bytes()

        def once(codec: TableCodec) -> Timestamp | None:
            within = bounds(codec.key.span(start, end, prefix))
            how: dict[str, Any] = {"to": to, "filter": sent}
            return self._pool.call(verbs.REVERT_TABLE, table=self.name, **within, **how)

        return self._by_newest(once)

    def clear(
        self,
        start: Any = None,
        end: Any = None,
        *,
        prefix: Any = None,
        where: object = None,
        compact: bool = True,
    ) -> Timestamp:
        """See `Table.clear`. The server finds the rows."""
        self._require_writable("cleared")
        chosen = RowFilter.of(where)
        how: dict[str, Any] = {"filter": None if chosen is None else chosen.to_bytes()}

        def once(codec: TableCodec) -> Timestamp:
            within = bounds(codec.key.span(start, end, prefix))
            given = {"table": self.name, "compact": compact, **within, **how}
            return self._pool.work(verbs.CLEAR_TABLE, None, **given)

        return self._by_newest(once)

    def drop(self) -> Timestamp:
        """See `Table.drop`."""
        self._require_writable("dropped")
        try:
            return self._pool.call(verbs.DROP_TABLE, table=self.name)
        finally:
            self._catalogue.forget(self.name)

    def build_index(
        self, index: str, *, progress: Callable[[int], None] | None = None
    ) -> Timestamp | None:
        """See `Table.build_index`. The server builds. An error that `progress` raises ends the
        work at its next step."""
        self._require_writable("indexed")
        found = self._pool.work(verbs.BUILD_INDEX, progress, table=self.name, index=index)
        self._catalogue.forget(self.name)
        return found

    # -- inside -----------------------------------------------------------------------------

    def _codec(self, as_of: TimeLike | None = None) -> TableCodec:
        return self.codec(as_of)

    def _write(self, *args: Any, **how: Any) -> Timestamp | None:
        self._require_writable("written")
        return super()._write(*args, **how)

    def _require_writable(self, what: str) -> None:
        if self._snapshot is not None:
            raise refused(self.name, what)

    def _when(self, as_of: TimeLike | None) -> TimeLike | None:
        """The time of a read: of the snapshot, if the table is of one."""
        if self._snapshot is None:
            return as_of
        if as_of is not None:
            raise one_time("a snapshot")
        return self._snapshot.open_at()

    def _upto(self, time: TimeLike | None, name: str) -> TimeLike | None:
        """A time up to which rows are asked for. A snapshot has none after its own."""
        if self._snapshot is None:
            return time
        return past_time(time, self._snapshot.open_at(), name)

    def _by_newest(self, ask: Callable[[TableCodec], T], as_of: TimeLike | None = None) -> T:
        """The answer to a question with keys. It is asked again where the definition that is known
        here is old, or newer than `as_of`: the table was altered, or dropped and made anew."""
        try:
            return ask(self._catalogue.codec(self.name))
        except (TableAlteredError, UsageError):
            return ask(self.codec(as_of))

    def _rows_of(
        self,
        verb: Verb[Any],
        span: Span,
        as_of: TimeLike | None,
        columns: Sequence[str] | None,
        reverse: bool,
        limit: int | None,
        **more: str | bytes | None,
    ) -> pa.RecordBatchReader:
        return self._pool.rows(
            verb,
            table=self.name,
            **bounds(span),
            as_of=as_of,
            columns=columns,
            reverse=reverse,
            limit=limit,
            **more,
        )


def _nothing() -> None:
    """The check of a batch that the server checks."""


@lru_cache(maxsize=64)
def _decoder(name: str, stored: bytes) -> TableCodec:
    """The codec of a definition; making one takes 100 us."""
    return TableCodec(Definition.from_bytes(name, stored))


@lru_cache(maxsize=64)
def _encoder(name: str, stored: bytes) -> TableCodec:
    """The codec of a definition without its indexes."""
    return TableCodec(replace(Definition.from_bytes(name, stored), indexes=()))


# --------------------------------------------------------------------------------------------------
# The side of a join that a server answers: labels go to the server, and history stays there.

LEASE_S: Final = 3600.0
"""Seconds for which a join keeps the history of the server, if its process ends before the join
does."""


@contextmanager
def remote_answers(pool: Pool, upto: int | None = None) -> Iterator[RemoteAnswers]:
    """Take a lease on all history that the server keeps. No label is above `upto`: the newest
    complete time of the server by default."""
    name = secrets.token_hex(12)
    pool.call(verbs.LEASE, name=name, seconds=LEASE_S)
    try:
        yield RemoteAnswers(pool, upto)
    finally:
        with suppress(KVStoreError):  # it ends by itself
            pool.call(verbs.RELEASE_LEASE, name=name)


class RemoteAnswers:
    """See `kvstore.tables.joins.Answers`. One round trip for each piece of labels."""

    def __init__(self, pool: Pool, upto: int | None) -> None:
        self._pool, self._upto = pool, upto
        self.rows_first = JOIN_ROWS_FIRST
        self.rows_max = JOIN_ROWS_MAX

    @cached_property
    def newest(self) -> int:
        """The time of the snapshot, or the newest complete time of the server at the first use."""
        return int(self._pool.call(verbs.RESOLVE)) if self._upto is None else self._upto

    def answer(self, labels: Asked, search: Search) -> list[pa.Array] | None:
        """The values of the labels and the timestamps of their versions."""
        if not search.is_future_newest:
            labels = within(labels, self._upto)
        has_age = search.age_max != TIMESTAMP_MAX
        arguments: dict[str, Any] = {
            "first": labels.first,
            "null_if_gone": search.is_gone_null,
            "max_age": search.age_max / NS_PER_SECOND if has_age else None,
        }
        if not search.is_plain:
            arguments |= {
                "direction": search.direction,
                "exclude_exact": not search.allows_exact,
                "newest": self.newest if search.newest is None else search.newest,
                "on_future": "newest" if search.is_future_newest else "error",
            }
        sent = pa.table([labels.keys, pa.array(labels.times, pa.int64())], schema=LABELS_SCHEMA)
        request = rows_request(verbs.JOIN, sent, arguments, Reply.json)
        if len(request.body) > SERVER_BODY_BYTES_MAX and len(labels.times) > 1:
            return None  # the labels come again in halves

        def read(reader: pa.RecordBatchReader) -> list[pa.Array] | None:
            size = 0
            batches: list[pa.RecordBatch] = []
            for batch in reader:
                size += batch.column(0).nbytes
                if size > search.bytes_max and len(labels.times) > 1:
                    return None
                batches.append(batch)
            table = pa.Table.from_batches(batches, pa.schema(VALUE_FIELDS)).combine_chunks()
            return [pa.concat_arrays(column.chunks) for column in table.columns]

        return transport.read_whole(self._pool, request, read)


# --------------------------------------------------------------------------------------------------
# The join of labels with a table of a client: labels travel in pieces, and columns come back.
#
# Invariants
# 1. All labels see one moment: the newest time of the server is asked for once, at the call.
# 2. A lease keeps the history of the server from the call until the end of the result.
# 3. Memory is bounded by a piece of labels and a batch of the answer.


class _Question(NamedTuple):
    """The columns of labels that travel, and the arguments of the verb `table_join`."""

    sent: list[str]
    at: str | None
    fields: dict[str, Any]
    max_age: timedelta | None


def join_served(
    pool: Pool,
    codec: TableCodec,
    labels: object,
    on: str | Sequence[str],
    at: str | None,
    known_at: str | TimeLike | None,
    choice: RowChoice,
    columns: Sequence[str] | None,
    prefix: str,
    *,
    upto: Timestamp | None,
) -> pa.RecordBatchReader:
    """The labels with columns of the rows that they ask for. See `Table.join`. No label asks for a
    time above `upto`."""
    choice.check(codec)
    asked = asked_rows(codec, labels, on, at, known_at, columns, prefix, choice)
    reader, names, chosen, schema = asked
    known = known_at
    is_column = isinstance(known_at, str) and known_at in reader.schema.names
    if known_at is not None and not is_column:
        if upto is None:
            known = int(ServedFrontiers(pool).to_time(known_at, name="known_at"))
        else:
            known = int(past_time(known_at, upto, "known_at"))
    sent = [*names, *([] if at is None else [at]), *([str(known_at)] if is_column else [])]
    fields = {"on": names, "at": at, "known_at": known, "columns": chosen, "upto": upto}
    given = choice.max_age if choice.tolerance is None else choice.tolerance
    count = plain_integer(given)  # of the units of event times that are integers
    age = age_of(choice.max_age, choice.tolerance) if count is None else None
    fields["tolerance"] = count
    for name in ("direction", "allow_exact", "on_future", "on_null"):
        fields[name] = getattr(choice, name)
    question = _Question(list(dict.fromkeys(sent)), at, fields, age)
    batches = _joined(pool, codec, reader, question, schema, upto)
    next(batches)
    return pa.RecordBatchReader.from_batches(schema, batches)


def _joined(
    pool: Pool,
    codec: TableCodec,
    reader: pa.RecordBatchReader,
    question: _Question,
    schema: pa.Schema,
    upto: Timestamp | None,
) -> Iterator[pa.RecordBatch]:
    with remote_answers(pool, upto) as answers:
        newest = answers.newest
        if codec.definition.has_event_time and question.fields["known_at"] is None:
            question.fields["known_at"] = newest
        is_backward = question.fields["direction"] == "backward"
        if not is_backward or question.fields["on_future"] == "newest":
            question.fields["newest"] = newest
        # A batch without columns first: taking it holds the history, within the call.
        yield pa.record_batch([], names=[])
        pieces = Pieces(reader, JOIN_ROWS_FIRST, JOIN_ROWS_FIRST)
        for piece in pieces:
            size = 0
            for batch in _answered(pool, codec, piece, question, newest, schema):
                size += sum(column.nbytes for column in batch.columns[len(reader.schema) :])
                yield batch
            pieces.learn(piece.rows, size)


def _answered(
    pool: Pool,
    codec: TableCodec,
    piece: Piece,
    question: _Question,
    newest: int,
    schema: pa.Schema,
) -> Iterator[pa.RecordBatch]:
    """The batches of a piece with the added columns. Where the answer breaks off, its rest is asked
    for again within the client's patience."""
    request = _request(codec, piece, question, newest)
    if len(request.body) > SERVER_BODY_BYTES_MAX and piece.rows > 1:
        for half in piece.halves():
            yield from _answered(pool, codec, half, question, newest, schema)
        return
    attempts = None
    while piece.rows:
        answered = 0
        opened = pool.open(request)  # this waits for an absent server by itself
        try:
            found = transport.rows_of(pool, *opened)
            for labels, columns in _side_by_side(piece.batches, found):
                yield pa.RecordBatch.from_arrays([*labels.columns, *columns], schema=schema)
                answered += labels.num_rows
            return
        except KVStoreError as error:
            if answered:
                piece, attempts = piece.behind(answered), None
                request = _request(codec, piece, question, newest)
            attempts = attempts or pool.attempts(request)
            attempts.failed(error)


def _request(
    codec: TableCodec, piece: Piece, question: _Question, newest: int
) -> ClientRequest[Any]:
    table = pa.Table.from_batches(piece.batches).select(question.sent)
    fields = question.fields
    if question.at is None:  # then the labels ask for the moment of the call
        fields = {**fields, "at": "_".join(["at", *question.sent])}
        table = table.append_column(fields["at"], pa.array(np.full(piece.rows, newest)))
    arguments = {
        "table": codec.definition.name,
        "question": json.dumps(fields),
        "max_age": question.max_age,
        "first": piece.first,
    }
    return rows_request(verbs.TABLE_JOIN, table, arguments, Reply.json)


def _side_by_side(
    labels: Iterable[pa.RecordBatch], found: Iterable[pa.RecordBatch]
) -> Iterator[tuple[pa.RecordBatch, list[pa.Array]]]:
    """Labels, and as many rows of their answers."""
    rest = deque(batch for batch in labels if batch.num_rows)
    for batch in found:
        at = 0
        while at < batch.num_rows:
            label = rest.popleft()
            rows = min(label.num_rows, batch.num_rows - at)
            yield label.slice(0, rows), batch.slice(at, rows).columns
            at += rows
            if rows < label.num_rows:
                rest.appendleft(label.slice(rows))
