"""Tables of a client: rows are encoded here, and committed and decoded beside the store.

Definitions are values of the store, which the client reads and keeps. The keys of a table never
change their form, so an older definition finds every row.

Invariants
1. A row is committed only if its definition was the newest one: otherwise it is encoded again.
2. A row that is read has the columns of its time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import lru_cache
from typing import Any

import pyarrow as pa

from kvstore.arguments import chosen_columns, require_limit
from kvstore.client import calls, streams
from kvstore.client.calls import ClientRequest, ns
from kvstore.client.joins import RemoteSide
from kvstore.client.pool import Pool
from kvstore.client.reply import Reply
from kvstore.client.table_joins import join_served
from kvstore.client.work import work_of
from kvstore.client.writes import SentWriteSet
from kvstore.codec.tuples import desc
from kvstore.commit import Durability, sent_expiry
from kvstore.errors import TableAlteredError, UsageError
from kvstore.limits import TABLE_ATTEMPTS
from kvstore.mvcc import Version
from kvstore.protocol import span_fields
from kvstore.span import Span
from kvstore.tables.catalogue import Catalogue
from kvstore.tables.changing import RowImages, require_images
from kvstore.tables.codec import TableCodec, dicts
from kvstore.tables.definition import Definition
from kvstore.tables.evolve import Added, Alteration, IndexColumns, alter, define, require_name
from kvstore.tables.finding import index_span
from kvstore.tables.found import FoundRows, RowVersion
from kvstore.tables.joining import latest_span
from kvstore.tables.opening import arguments_given
from kvstore.tables.sent import digest_of
from kvstore.tables.side import TableSide
from kvstore.tables.sources import MakeChange, RowChange, TransactionRows
from kvstore.tables.space import definition_key
from kvstore.tables.table import Table
from kvstore.timestamp import TimeLike, Timestamp
from kvstore.txn import Transaction

Transact = Callable[[Callable[[Transaction], Transaction]], Transaction]


class ClientDefinitions:
    """The definitions in the store of a client."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def history(self, key: bytes) -> Sequence[Version]:
        """See `Client.history`."""
        return self._pool.send(calls.history(key))

    def scan(self, *, prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
        """See `Client.scan`."""
        request = calls.scan(Span.of_prefix(prefix), None, False, None, None)
        for batch in streams.rows(self._pool, request):
            yield from zip(batch.column(0).to_pylist(), batch.column(1).to_pylist(), strict=True)


class ClientRows:
    """The rows of a client's store: they are written here, and read by `ClientTable`."""

    def __init__(self, pool: Pool, catalogue: Catalogue, transact: Transact) -> None:
        self.pool, self.catalogue = pool, catalogue
        self._transact = transact
        self.made_by: dict[str, str] = {}
        """The digests of the definitions that encoded the rows of a batch."""

    def codec(self, name: str, as_of: TimeLike | None = None) -> TableCodec:
        """The definition that encodes rows. It has no indexes: the server makes their entries."""
        return _encoder(name, self.catalogue.codec(name).stored)

    def write(self, name: str, make: MakeChange, *, is_checked: bool) -> Timestamp | None:
        """See `RowWriter.write`. One round trip; with `is_checked` a transaction."""
        if is_checked:

            def body(transaction: Transaction) -> Transaction:
                rows = TransactionRows(transaction, self.catalogue)
                rows.write(name, make, is_checked=True)
                return transaction

            return self._transact(body).timestamp
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
        made: RowChange = make(codec, self)  # type: ignore[arg-type]  # reads nothing
        writes = SentWriteSet("the rows")
        writes.delete_rows(made.gone)
        due = None if made.expires is None else sent_expiry(made.expires)
        writes.put_rows(made.keys, made.values, due, made.rows(codec))
        if not writes:
            return None
        definitions = {name: digest_of(self.catalogue.codec(name))}
        return self.pool.send(calls.batch(writes, None, definitions=definitions))

    def checked(self, name: str, codec: TableCodec) -> Callable[[], None]:
        """Note the definition of the rows of a batch. The server checks it."""
        self.made_by[name] = digest_of(self.catalogue.codec(name))
        return _nothing

    def commit(
        self, durability: Durability | None, writes: Any, *, check: object = None
    ) -> Timestamp:
        """Commit a batch with these rows."""
        request = calls.batch(writes, durability, definitions=self.made_by)
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
    ) -> ClientTable:
        """See `Client.table`."""
        require_name(name)
        made = arguments_given(name, schema, key, indexes, event_time)
        if made is None:
            self.catalogue.codec(name)
            return ClientTable(name, self)
        fields = {
            "table": name,
            "definition": define(name, 1, *made.arguments).to_bytes().decode(),
            "has_indexes": indexes is not None,
        }
        self.pool.send(calls.verb("make_table", fields, Reply.json))
        self.catalogue.forget(name)
        return ClientTable(name, self, made.model)


class ClientTable(Table):
    """A table of a client. It reads and writes rows as a table of the store does. To alter it and
    to build its indexes takes the right `admin`."""

    def __init__(self, name: str, rows: ClientRows, model: type | None = None) -> None:
        super().__init__(name, None, rows, model)
        self._pool, self._catalogue = rows.pool, rows.catalogue

    def codec(self, as_of: TimeLike | None = None) -> TableCodec:
        """See `Table.codec`. One round trip."""
        self._catalogue.forget(self.name)
        if as_of is None:
            return self._catalogue.codec(self.name)
        resolve = calls.verb("resolve", {"as_of": ns(as_of)}, Reply.json, is_read=True)
        found = self._pool.send(resolve)
        return self._catalogue.codec(self.name, found["as_of"])

    def get(
        self, *key: Any, as_of: TimeLike | None = None, columns: Sequence[str] | None = None
    ) -> Any:
        """See `Table.get`. One round trip."""
        return self.get_many([key], as_of, columns=columns)[0]

    def get_many(
        self,
        keys: Iterable[Sequence[Any]],
        as_of: TimeLike | None = None,
        *,
        columns: Sequence[str] | None = None,
    ) -> list[Any]:
        """See `Table.get_many`. One round trip: the definition of that time comes with the rows."""
        known = self._catalogue.codec(self.name)
        stored = known.key.whole_keys(keys)
        request = calls.get_many([definition_key(self.name), *stored], as_of)
        definition, *values = self._pool.send(request)
        # A time before the table has no definition, and no rows.
        codec = known if definition is None else _decoder(self.name, definition)
        names = chosen_columns(columns)
        found = codec.to_dicts(stored, values, names)
        return (
            found
            if names is not None
            else [row if row is None else self._made(row) for row in found]
        )

    def scan(
        self,
        *key: Any,
        as_of: TimeLike | None = None,
        columns: Sequence[str] | None = None,
        reverse: bool = False,
        limit: int | None = None,
    ) -> pa.RecordBatchReader:
        """See `Table.scan`. The server decodes the columns that are asked for."""
        codec = self._catalogue.codec(self.name)
        span = Span.of_prefix(codec.key.key(key))
        return self._rows_of("table_scan", span, as_of, columns, reverse, limit)

    def find(
        self,
        index: str,
        *values: Any,
        as_of: TimeLike | None = None,
        columns: Sequence[str] | None = None,
        reverse: bool = False,
        limit: int | None = None,
    ) -> FoundRows:
        """See `Table.find`. The server looks the rows up."""

        def once(codec: TableCodec) -> pa.RecordBatchReader:
            span = index_span(codec, codec.definition.index(index), values)
            return self._rows_of("table_find", span, as_of, columns, reverse, limit, index=index)

        try:
            reader = once(self._catalogue.codec(self.name))
        except (TableAlteredError, UsageError):
            # The definition that is known here may be old, or newer than `as_of`.
            reader = once(self.codec(as_of))
        return FoundRows(reader.schema, iter(reader))

    def history(self, *key: Any) -> list[RowVersion]:
        """See `Table.history`."""
        stored_key = self._catalogue.codec(self.name).key.whole_key(key)
        versions = self._pool.send(calls.history(stored_key))
        self._catalogue.forget(self.name)  # the versions may be of a newer definition
        return [
            RowVersion(
                at,
                None
                if value is None
                else self._catalogue.codec(self.name, at).to_dict(stored_key, value),
            )
            for _, at, value in versions
        ]

    def ttl(self, *key: Any) -> timedelta | None:
        """See `Table.ttl`. One round trip."""
        return self._pool.send(calls.ttl(self._catalogue.codec(self.name).key.whole_key(key)))

    def latest(
        self,
        *key: Any,
        at: Any = None,
        known_at: TimeLike | None = None,
        columns: Sequence[str] | None = None,
    ) -> dict[str, Any] | None:
        """See `Table.latest`."""
        span = latest_span(self._catalogue.codec(self.name), key, at)
        reader = self._rows_of("table_scan", span, known_at, columns, False, 1)
        found = [row for batch in reader for row in dicts(batch)]
        return found[0] if found else None

    def changes(
        self,
        since: TimeLike,
        upto: TimeLike | None = None,
        *,
        images: RowImages = "pre+post",
        columns: Sequence[str] | None = None,
    ) -> pa.RecordBatchReader:
        """See `Table.changes`."""
        require_images(images)
        window = {"since": calls.since(since), "upto": ns(upto, "upto")}
        fields = {"table": self.name, **window, "images": images, "columns": _listed(columns)}
        return streams.rows(self._pool, _of_verb("table_changes", fields))

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
        """See `Table.join`. The columns of keys and times travel to the server, in pieces."""
        question = (on, at, known_at, max_age, columns, prefix)
        return join_served(self._pool, self.codec(), labels, *question)

    def join_side(self) -> TableSide:
        """See `Table.join_side`. Keys travel to the server, and rows back."""
        return TableSide(RemoteSide(self._pool), self.codec())

    def alter(
        self,
        add: Mapping[str, Added] | None = None,
        drop: Sequence[str] | str | None = None,
        widen: Mapping[str, pa.DataType | pa.Field] | None = None,
        add_index: Mapping[str, IndexColumns] | None = None,
        drop_index: Sequence[str] | str | None = None,
    ) -> None:
        """See `Table.alter`. Two round trips."""
        alteration = Alteration(add, drop, widen, add_index, drop_index)
        wanted = alter(self.codec().definition, alteration)
        fields = {"table": self.name, "definition": wanted.to_bytes().decode()}
        try:
            self._pool.send(calls.verb("alter_table", fields, Reply.json))
        finally:
            self._catalogue.forget(self.name)

    def build_index(
        self, index: str, *, progress: Callable[[int], None] | None = None
    ) -> Timestamp | None:
        """See `Table.build_index`. The server builds. An error that `progress` raises ends the
        work at its next step."""
        found = work_of(self._pool, "build_index", progress, table=self.name, index=index)
        self._catalogue.forget(self.name)
        stamp = found["timestamp"]
        return None if stamp is None else Timestamp(stamp)

    # -- inside -----------------------------------------------------------------------------

    def _codec(self, as_of: TimeLike | None = None) -> TableCodec:
        return self.codec(as_of)

    def _is_checked(self) -> bool:
        return False  # the server checks unique indexes

    def _rows_of(
        self,
        verb: str,
        span: Span,
        as_of: TimeLike | None,
        columns: Sequence[str] | None,
        reverse: bool,
        limit: int | None,
        **more: str,
    ) -> pa.RecordBatchReader:
        fields = {
            "table": self.name,
            **span_fields(span),
            "as_of": ns(as_of),
            "columns": _listed(columns),
            "reverse": reverse,
            "limit": require_limit(limit),
            **more,
        }
        return streams.rows(self._pool, _of_verb(verb, fields))


def _of_verb(verb: str, fields: Mapping[str, Any]) -> ClientRequest[Reply]:
    return calls.verb(verb, fields, _whole, is_read=True)


def _whole(reply: Reply) -> Reply:
    return reply


def _listed(columns: Sequence[str] | None) -> Sequence[str] | None:
    return columns if columns is None or isinstance(columns, str) else list(columns)


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
