"""Rows of tables for the callers of a server: read typed, and committed once.

Invariants
1. A row is committed only while the definition that encoded it is the newest one of its table.
2. A row of a unique index is committed only if no other row has its values at that moment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import pyarrow as pa

from kvstore.base.span import Span
from kvstore.base.timestamp import TimeLike, Timestamp
from kvstore.errors import (
    TableAlteredError,
    UsageError,
    printable,
)
from kvstore.limits import ARROW_BYTES_MAX, BATCH_BYTES_MAX
from kvstore.mvcc import WriteSet
from kvstore.requests import Requests
from kvstore.tables.catalogue import Catalogue
from kvstore.tables.codec import TableCodec
from kvstore.tables.definition import Definition
from kvstore.tables.joining import join_rows
from kvstore.tables.sources import (
    HeldRows,
    StoredRowSource,
    StoreRows,
    TransactionRows,
    altered_as,
    digest_of,
    sent_change,
)
from kvstore.timeline.durability import Durability
from kvstore.timeline.expiries import Expires
from kvstore.timeline.request_notes import RequestToken
from kvstore.transaction import (
    ReadSet,
    Transaction,
    Transactions,
    transact,
)

Rows = Mapping[bytes, "bytes | None"]
"""Values of rows by key; None deletes a row."""
Dues = Mapping[bytes, "int | None"]
"""The times at which rows are deleted, by key. A row without a time here stays."""


class SentRows:
    """The rows that callers of one store read and send."""

    def __init__(self, store: Any) -> None:
        self._requests: Requests = store.requests
        self._transactions, self._parts = self._requests.transactions, self._requests.parts
        self._catalogue: Catalogue = self._transactions.catalogue
        self._reader = StoreRows(store, self._catalogue, self._parts)

    def held(self, as_of: TimeLike | None) -> HeldRows:
        """The rows at one time, which stays readable until the block ends."""
        return self._reader.held(as_of)

    def join(self, name: str, labels: object, **question: Any) -> pa.RecordBatchReader:
        """The labels with columns of the rows that they ask for: see `Table.join`. A batch is
        as small as a batch of a scan."""
        source = StoredRowSource(self._parts, ARROW_BYTES_MAX)
        codec = self._catalogue.codec(name)
        return join_rows(source, codec, labels, bytes_max=ARROW_BYTES_MAX, **question)

    def alter(self, name: str, wanted: Definition) -> TableCodec:
        """Give a table the definition that a caller has made by altering the newest one. Raises as
        `Table.alter`."""
        self._reader.alter(name, partial(altered_as, wanted=wanted))
        return self._catalogue.codec(name)

    def commit(
        self,
        write: Callable[[Any], None],
        rows: Rows,
        dues: Dues,
        definitions: Mapping[str, str],
        token: RequestToken | None,
        durability: Durability | None,
    ) -> Timestamp | None:
        """Commit rows, and what `write` does with the write set that it is given. `dues` has the
        times at which rows are deleted.

        `definitions` has, by the name of each table, the digest of the definition that encoded its
        rows. Raises `TableAlteredError` where the store has another definition: encode the rows
        anew.
        """
        codecs = [self._codec(name, digest) for name, digest in definitions.items()]
        if any(index.is_unique for codec in codecs for index in codec.definition.indexes):
            begin = partial(self._begin, None, ReadSet(), token, durability)
            body = partial(self._send, write, rows, dues, codecs)
            return transact(begin, body).timestamp
        writes = self._requests.write_set("the batch", BATCH_BYTES_MAX)
        write(writes)
        for codec, mine, due in _by_table(codecs, rows, dues):
            made = sent_change(codec, self._reader, mine, due, rows)
            writes.delete_rows(made.gone)
            writes.put_rows(made.keys, made.values, due, made.rows(codec))

        def check() -> None:
            for codec in codecs:
                self._require_newest(codec)

        return self._requests.commit(writes, token, durability, check=check) if writes else None

    def commit_reads(
        self,
        write: Callable[[Any], None],
        rows: Rows,
        dues: Dues,
        reads: ReadSet,
        read_at: int,
        token: RequestToken | None,
        durability: Durability | None,
    ) -> Timestamp | None:
        """As `Requests.commit_reads`, with rows of tables."""
        known = [self._catalogue.codec(name, read_at) for name in self._catalogue.names()]
        codecs = [codec for codec in known if any(key.startswith(codec.key.prefix) for key in rows)]
        begin = partial(self._begin, read_at, reads, token, durability)
        # A conflict is the client's: it has read, and runs its transaction again.
        return transact(begin, partial(self._send, write, rows, dues, codecs), attempts=1).timestamp

    def _begin(
        self,
        read_at: int | None,
        reads: ReadSet,
        token: RequestToken | None,
        durability: Durability | None,
    ) -> Transaction:
        owner = _SentTransactions(self._requests, self._transactions, reads, token)
        transaction = Transaction(owner, 0, durability=durability)
        if read_at is None:
            self._parts.committer.catch_up()  # a row that has expired takes no value
            read_at = self._parts.committer.upper - 1
        transaction.read_at = Timestamp(read_at)
        return transaction

    def _send(
        self,
        write: Callable[[Any], None],
        rows: Rows,
        dues: Dues,
        codecs: Iterable[TableCodec],
        transaction: Transaction,
    ) -> Transaction:
        write(transaction)
        reader = TransactionRows(transaction, self._catalogue)
        left = dict(rows)
        for codec, mine, due in _by_table(codecs, rows, dues):
            if reader.codec(codec.definition.name).stored != codec.stored:
                raise TableAlteredError(codec.definition.name)
            made = sent_change(codec, reader, mine, due, left)
            transaction.delete_rows(made.gone)
            transaction.put_rows(made.keys, made.values, due, made.rows(codec))
            for key in mine:
                del left[key]
        return transaction

    def _codec(self, name: str, digest: str) -> TableCodec:
        """The newest codec of a table. Raises `TableAlteredError` if it has another digest."""
        for _ in range(2):
            codec = self._catalogue.codec(name)
            if digest_of(codec) == digest:
                return codec
            self._catalogue.forget(name)
        raise TableAlteredError(name)

    def _require_newest(self, codec: TableCodec) -> None:
        name = codec.definition.name
        try:
            self._reader.checked(name, codec)()
        except TableAlteredError:
            self._catalogue.forget(name)
            raise


class _SentTransactions:
    """The owner of one transaction that a client has read for: its commit checks these reads too,
    and is done once."""

    def __init__(
        self,
        requests: Requests,
        transactions: Transactions,
        reads: ReadSet,
        token: RequestToken | None,
    ) -> None:
        self._requests, self._reads, self._token = requests, reads, token
        self.versions, self.write_set = transactions.versions, transactions.write_set
        self.narrow: Callable[[Span], Span] = transactions.narrow
        self.catalogue = transactions.catalogue

    def due(self, expires: Expires) -> int:
        """The time itself: the caller has compared it with now."""
        assert isinstance(expires, int)
        return expires

    def commit(
        self,
        writes: WriteSet,
        reads: ReadSet,
        read_at: int,
        pin: int,
        *,
        durability: Durability | None,
    ) -> Timestamp:
        """See `Transactions.commit`."""
        for key in self._reads.points():
            reads.add_key(key)
        for span in self._reads.spans():
            reads.add_span(span)
        return self._requests.commit_reads(writes, reads, read_at, self._token, durability)

    def end(self, pin: int) -> None:
        """Nothing was begun."""

    def abandon(self, pin: int) -> None:
        """Nothing was begun."""


def _by_table(
    codecs: Iterable[TableCodec], rows: Rows, dues: Dues
) -> list[tuple[TableCodec, Rows, int | None]]:
    """The rows of each table that expire at one time, and this time. Raises `UsageError` for a key
    that is no row of these tables."""
    found: list[tuple[TableCodec, Rows, int | None]] = []
    left = dict(rows)
    for codec in codecs:
        mine: dict[int | None, dict[bytes, bytes | None]] = {}
        for key in rows:
            if key.startswith(codec.key.prefix):
                mine.setdefault(dues.get(key), {})[key] = left.pop(key)
        found += [(codec, each, due) for due, each in mine.items()]
    if left:
        raise UsageError(
            f"key {printable(min(left))} belongs to tables, and is no row of a table that is named",
            "name its definition; the store makes the entries of indexes itself",
        )
    return found
