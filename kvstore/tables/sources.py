"""Where a table is read and written: a store, a snapshot, a transaction or a batch.

The table (`table.py`) knows rows; these know keys and values.

Invariants
1. The rows of one change, its index entries included, are one commit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import pyarrow as pa
from typing_extensions import Self

from kvstore.arrow import binary_array, rows_schema
from kvstore.commit import Expires
from kvstore.errors import TableAlteredError, UsageError
from kvstore.joins import StoredSide
from kvstore.limits import BATCH_BYTES_MAX, SCAN_CHUNK
from kvstore.mvcc import Version, WriteSet
from kvstore.parts import Parts
from kvstore.span import Span
from kvstore.tables.answers import RowAnswers, StoredRowSource
from kvstore.tables.catalogue import Catalogue, change
from kvstore.tables.codec import TableCodec
from kvstore.tables.definition import Definition
from kvstore.tables.evolve import Alteration
from kvstore.tables.space import definition_key
from kvstore.timestamp import TimeLike, Timestamp


@dataclass(slots=True)
class RowChange:
    """Keys of a table that one call sets and deletes. A key that is set is not deleted. The keys
    that are set expire at `expires`."""

    keys: list[bytes] = field(default_factory=list)
    values: list[bytes] = field(default_factory=list)
    gone: list[bytes] = field(default_factory=list)
    expires: Expires | None = None

    def rows(self, codec: TableCodec) -> list[bytes]:
        """For each key that is set, the row with which it expires: empty for a row itself. Nothing
        if the keys do not expire."""
        if self.expires is None:
            return []
        leading = [b""] * len(self.keys)
        for index in codec.definition.indexes:
            prefix = codec.index_codec(index).prefix
            at = [place for place, key in enumerate(self.keys) if key.startswith(prefix)]
            rows = codec.row_keys(index, [self.keys[place] for place in at])
            for place, row in zip(at, rows, strict=True):
                leading[place] = row
        return leading


MakeChange = Callable[[TableCodec, "RowReader"], RowChange]
"""Makes a change by the newest definition. It may be called again."""


class RowReader(Protocol):
    """Reads keys and values of tables."""

    def codec(self, name: str, as_of: TimeLike | None = None) -> TableCodec:
        """The definition of a table as of a time."""
        ...

    def get(self, key: bytes, as_of: TimeLike | None = None) -> bytes | None:
        """The value of a key."""
        ...

    def get_many(
        self, keys: Sequence[bytes], as_of: TimeLike | None = None
    ) -> Sequence[bytes | None]:
        """The values of keys."""
        ...

    def batches(
        self, span: Span, as_of: TimeLike | None, *, reverse: bool, limit: int | None
    ) -> Iterable[pa.RecordBatch]:
        """Keys and values of a span."""
        ...

    def pairs(self, span: Span, *, reverse: bool) -> Iterator[tuple[bytes, bytes]]:
        """Keys and values of a span, one by one, at the time of a held reader."""
        ...

    def history(self, key: bytes) -> Sequence[Version]:
        """All kept versions of a key, newest first."""
        ...

    def held(self, as_of: TimeLike | None) -> HeldReader:
        """Reads at one time, which stays readable until the block ends."""
        ...


class HeldReader(RowReader, AbstractContextManager["HeldReader"], Protocol):
    """Reads at one time."""


class RowWriter(Protocol):
    """Writes keys and values of tables."""

    def write(self, name: str, make: MakeChange, *, is_checked: bool) -> Timestamp | None:
        """Commit a change, or add it to what will be committed. With `is_checked` the reads of the
        change must still be true then."""
        ...


class ImportTarget(NamedTuple):
    """The parts that an import into a table needs. `check` runs under the commit lock, and raises
    `TableAlteredError` unless `codec` belongs to the newest definition."""

    store: Any
    codec: TableCodec
    check: Callable[[], None]


class StoreRows:
    """The rows of a store, which a table reads and writes."""

    def __init__(self, store: Any, catalogue: Catalogue, parts: Parts) -> None:
        self.store, self.catalogue = store, catalogue
        self.parts = parts
        self._versions, self._committer = parts.versions, parts.committer
        self.get = store.get  # hot: the store's shortcut, if it has one

    def codec(self, name: str, as_of: TimeLike | None = None) -> TableCodec:
        at = None if as_of is None else self._committer.to_time(as_of, name="as_of")
        return self.catalogue.codec(name, at)

    def get_many(
        self, keys: Sequence[bytes], as_of: TimeLike | None = None
    ) -> Sequence[bytes | None]:
        found: Sequence[bytes | None] = self.store.get_many(keys, as_of)
        return found

    def batches(
        self, span: Span, as_of: TimeLike | None, *, reverse: bool, limit: int | None
    ) -> Iterable[pa.RecordBatch]:
        reader: Iterable[pa.RecordBatch] = self.store.scan_batches(
            span.start, span.end, as_of=as_of, reverse=reverse, limit=limit
        )
        return reader

    def pairs(self, span: Span, *, reverse: bool) -> Iterator[tuple[bytes, bytes]]:
        found: Iterator[tuple[bytes, bytes]] = self.store.scan(
            span.start, span.end, reverse=reverse
        )
        return found

    def history(self, key: bytes) -> Sequence[Version]:
        found: Sequence[Version] = self.store.history(key)
        return found

    def time(self, time: TimeLike | None, name: str) -> Timestamp:
        """A time that the caller gave, by default the newest complete one."""
        return StoredRowSource(self.parts).time(time, name)

    def first(self, span: Span, at: Timestamp) -> tuple[bytes, bytes] | None:
        """The first live key in `span` at `at`, with its value. One seek."""

        def read(time: int) -> tuple[bytes, bytes] | None:
            chunk = next(self._versions.scan(span, time, limit=1), None)
            return None if chunk is None else (chunk[0][0], chunk[1][0])

        return self.parts.reads.read(at, span, read)

    def side(self) -> StoredSide:
        """The side of the store in a join."""
        return StoredSide(self.parts)

    def answers(self) -> AbstractContextManager[RowAnswers]:
        """See `RowSource.answers`."""
        return StoredRowSource(self.parts).answers()

    def held(self, as_of: TimeLike | None) -> HeldRows:
        return HeldRows(self.store.snapshot(as_of), self.catalogue)

    def write(self, name: str, make: MakeChange, *, is_checked: bool) -> Timestamp | None:
        def body(transaction: Any) -> Any:
            TransactionRows(transaction, self.catalogue).write(name, make, is_checked=True)
            return transaction

        if is_checked:
            transaction = self.store.transact(body)
            return transaction.timestamp  # type: ignore[no-any-return]  # of the store
        while True:
            codec = self.codec(name)
            made = make(codec, self)
            writes = WriteSet("the rows", BATCH_BYTES_MAX)
            writes.delete_rows(made.gone)
            dues = self._committer.expiries
            due = None if made.expires is None else dues.due(made.expires)
            writes.put_rows(made.keys, made.values, due, made.rows(codec))
            with suppress(TableAlteredError):
                check = self.checked(name, codec)
                return self._committer.commit(writes, check=check) if writes else None
            self.catalogue.forget(name)

    def alter(self, name: str, alteration: Alteration | Callable[[Definition], Definition]) -> None:
        """Alter a table whose definition is known."""
        seen = self.codec(name).definition
        with self.catalogue.changing(name):
            change(self.store.transaction, seen, alteration)

    def import_target(self, name: str) -> ImportTarget:
        """See `Table.import_target`."""
        if self._committer.policy.commits is not None:
            raise UsageError(
                f"table {name!r} is only read by this process",
                "import in the process that has its store open to write",
            )
        self.catalogue.forget(name)
        codec = self.catalogue.codec(name)
        return ImportTarget(self.store, codec, self.checked(name, codec))

    def checked(self, name: str, codec: TableCodec) -> Callable[[], None]:
        """A check for a commit: the definition is still the newest one."""
        key, stored = definition_key(name), codec.stored

        def check() -> None:
            if self._versions.get(key, self._committer.upper - 1) != stored:
                raise TableAlteredError(name)

        return check


class SnapshotRows:
    """The rows of a snapshot, all at its time."""

    def __init__(self, snapshot: Any, catalogue: Catalogue) -> None:
        self._snapshot, self._catalogue = snapshot, catalogue

    def codec(self, name: str, as_of: TimeLike | None = None) -> TableCodec:
        self._refuse(as_of)
        return self._catalogue.codec(name, self._snapshot.as_of)

    def get(self, key: bytes, as_of: TimeLike | None = None) -> bytes | None:
        self._refuse(as_of)
        found: bytes | None = self._snapshot.get(key)
        return found

    def get_many(
        self, keys: Sequence[bytes], as_of: TimeLike | None = None
    ) -> Sequence[bytes | None]:
        self._refuse(as_of)
        found: Sequence[bytes | None] = self._snapshot.get_many(keys)
        return found

    def batches(
        self, span: Span, as_of: TimeLike | None, *, reverse: bool, limit: int | None
    ) -> Iterable[pa.RecordBatch]:
        self._refuse(as_of)
        reader: Iterable[pa.RecordBatch] = self._snapshot.scan_batches(
            span.start, span.end, reverse=reverse, limit=limit
        )
        return reader

    def pairs(self, span: Span, *, reverse: bool) -> Iterator[tuple[bytes, bytes]]:
        found: Iterator[tuple[bytes, bytes]] = self._snapshot.scan(
            span.start, span.end, reverse=reverse
        )
        return found

    def history(self, key: bytes) -> Sequence[Version]:
        raise UsageError("a snapshot has one time", "ask the store for the history of a row")

    def held(self, as_of: TimeLike | None) -> Self:
        self._refuse(as_of)
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """The caller ends it."""

    def _refuse(self, as_of: TimeLike | None) -> None:
        if as_of is not None:
            raise UsageError("a snapshot has one time", "leave out as_of, or read the store")


class HeldRows(SnapshotRows):
    """A snapshot that ends with the block."""

    def __exit__(self, *_: object) -> None:
        self._snapshot.close()


class TransactionRows:
    """The rows of a transaction, its own writes included. Reads count as reads of it."""

    def __init__(self, transaction: Any, catalogue: Catalogue) -> None:
        self._transaction, self._catalogue = transaction, catalogue

    def codec(self, name: str, as_of: TimeLike | None = None) -> TableCodec:
        self._refuse(as_of)
        codec = self._catalogue.codec(name, self._transaction.read_at)
        if self._transaction.get(definition_key(name)) != codec.stored:
            self._catalogue.forget(name)
            codec = self._catalogue.codec(name, self._transaction.read_at)
        return codec

    def get(self, key: bytes, as_of: TimeLike | None = None) -> bytes | None:
        self._refuse(as_of)
        return self._value(key)

    def get_many(
        self, keys: Sequence[bytes], as_of: TimeLike | None = None
    ) -> Sequence[bytes | None]:
        self._refuse(as_of)
        return [self._value(key) for key in keys]

    def batches(
        self, span: Span, as_of: TimeLike | None, *, reverse: bool, limit: int | None
    ) -> Iterable[pa.RecordBatch]:
        self._refuse(as_of)
        rows = self._transaction.scan(span.start, span.end, reverse=reverse, limit=limit)
        return _gathered(rows)

    def pairs(self, span: Span, *, reverse: bool) -> Iterator[tuple[bytes, bytes]]:
        found: Iterator[tuple[bytes, bytes]] = self._transaction.scan(
            span.start, span.end, reverse=reverse
        )
        return found

    def history(self, key: bytes) -> Sequence[Version]:
        raise UsageError("a transaction has one time", "ask the store for the history of a row")

    def held(self, as_of: TimeLike | None) -> Self:
        self._refuse(as_of)
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """The caller ends it."""

    def write(self, name: str, make: MakeChange, *, is_checked: bool) -> None:
        codec = self.codec(name)
        made = make(codec, self)
        self._transaction.delete_rows(made.gone)
        self._transaction.put_rows(made.keys, made.values, made.expires, made.rows(codec))

    def _value(self, key: bytes) -> bytes | None:
        found = self._transaction.get(key)
        # The transaction's own put that expires is of a subclass, which the loops refuse.
        return found if found is None else bytes(found)

    def _refuse(self, as_of: TimeLike | None) -> None:
        if as_of is not None:
            raise UsageError("a transaction has one time", "leave out as_of, or read the store")


class WritesRows(Protocol):
    """The rows of the store of a batch."""

    catalogue: Catalogue

    def codec(self, name: str, as_of: TimeLike | None = None) -> TableCodec:
        """The definition that encodes rows."""
        ...

    def checked(self, name: str, codec: TableCodec) -> Callable[[], None]:
        """A check for the commit: the definition is still the newest one."""
        ...


class BatchRows:
    """The rows that a batch writes. It reads older rows of the store, to find their entries."""

    def __init__(self, batch: Any, rows: WritesRows) -> None:
        self._batch, self._rows = batch, rows

    def write(self, name: str, make: MakeChange, *, is_checked: bool) -> None:
        codec = self._rows.codec(name)
        if is_checked or any(index.is_unique for index in codec.definition.indexes):
            raise UsageError(
                f"a batch cannot check the rows of table {name!r}", "use a transaction instead"
            )
        made = self._made(name, codec, make)
        self._batch.require(self._rows.checked(name, codec))
        self._batch.delete_rows(made.gone)
        self._batch.put_rows(made.keys, made.values, made.expires, made.rows(codec))

    def _made(self, name: str, codec: TableCodec, make: MakeChange) -> RowChange:
        """The change by a definition that is known; by the newest one where the rows do not fit."""
        rows: Any = self._rows  # without indexes nothing is read
        try:
            return make(codec, rows)
        except UsageError:
            rows.catalogue.forget(name)
            newest = rows.codec(name)
            if newest.stored == codec.stored:
                raise
            return make(newest, rows)


def _gathered(rows: Iterator[tuple[bytes, bytes]]) -> Iterator[pa.RecordBatch]:
    keys: list[bytes] = []
    values: list[bytes] = []
    for key, value in rows:
        keys.append(key)
        values.append(value)
        if len(keys) >= SCAN_CHUNK:
            yield _batch(keys, values)
            keys, values = [], []
    if keys:
        yield _batch(keys, values)


def _batch(keys: list[bytes], values: list[bytes]) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays(
        [binary_array(keys), binary_array(values)], schema=rows_schema()
    )
