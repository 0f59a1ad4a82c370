"""Where rows are read and written: a store, a snapshot, a transaction or a batch; what labels ask
for; what a client has sent.
"""

from __future__ import annotations

import hashlib
from abc import ABCMeta, abstractmethod
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple, NoReturn

import pyarrow as pa
from typing_extensions import Self

from kvstore.base.span import Span
from kvstore.base.timestamp import TimeLike, Timestamp, reached, to_timestamp
from kvstore.errors import (
    CorruptionError,
    FormatVersionError,
    NotUniqueError,
    NotYetWrittenError,
    TableAlteredError,
    UsageError,
)
from kvstore.limits import BATCH_BYTES_MAX, REVERT_ATTEMPTS, REVERT_ROWS_MAX, SCAN_CHUNK
from kvstore.mvcc import Version, WriteSet
from kvstore.mvcc.arrow import binary_array, items_of, rows_schema
from kvstore.tables.catalogue import Alteration, Catalogue, alter, change, drop, named_parts
from kvstore.tables.catalogue import unique as unique_index
from kvstore.tables.definition import Column, Definition, Index, definition_key
from kvstore.tables.exact import as_python
from kvstore.tables.joins import RowAnswers, stored_answers
from kvstore.tables.row_codec import (
    TableCodec,
    UnknownLayoutError,
    conform,
    default_value,
    row_dues,
)
from kvstore.timeline.expiries import Expires
from kvstore.timeline.parts import Parts

# --------------------------------------------------------------------------------------------------
# Where a table is read and written: a store, a snapshot, a transaction or a batch.
#
# The table (`table.py`) knows rows; these know keys and values.
#
# Invariants
# 1. The rows of one change, its index entries included, are one commit.


@dataclass(slots=True)
class RowChange:
    """Keys of a table that one call sets and deletes. A key that is set is not deleted. The keys
    that are set expire at `expires`, and in a table with a column of expiries when their row tells.
    The spans `ranges` are deleted first. A source that sends columns finds rows of batches in
    `columns`, as arrays of keys and values, and not in `keys` and `values`."""

    keys: list[bytes] = field(default_factory=list)
    values: list[bytes] = field(default_factory=list)
    gone: list[bytes] = field(default_factory=list)
    ranges: list[tuple[bytes, bytes]] = field(default_factory=list)
    columns: list[tuple[pa.Array, pa.Array]] = field(default_factory=list)
    expires: Expires | None = None

    def rows(self, codec: TableCodec) -> list[bytes]:
        """For each key that is set, the row with which it expires: empty for a row itself. Nothing
        if the keys do not expire."""
        if self.expires is None and codec.definition.expires is None:
            return []
        leading = [b""] * len(self.keys)
        for index in codec.definition.indexes:
            prefix = codec.index_codec(index).prefix
            at = [place for place, key in enumerate(self.keys) if key.startswith(prefix)]
            rows = codec.row_keys(index, [self.keys[place] for place in at])
            for place, row in zip(at, rows, strict=True):
                leading[place] = row
        return leading

    def expiry(self, codec: TableCodec) -> Expires | list[int | None] | None:
        """When the keys expire that are set: all at one time, or each at its own."""
        return self.dues(codec) if self.expires is None else self.expires

    def dues(self, codec: TableCodec) -> list[int | None] | None:
        """When each key expires that is set, if a column of the table tells it. An entry whose row
        the change does not set stays: it is a hint, which `Table.tidy` deletes."""
        column = codec.definition.expiry_column
        if column is None:
            return None
        rows = {
            key: value
            for key, value in zip(self.keys, self.values, strict=True)
            if key.startswith(codec.key.prefix)
        }
        found = codec.decode(
            binary_array(list(rows)), binary_array(list(rows.values())), [column.name]
        )
        dues = dict(zip(rows, row_dues(found.column(0)).to_pylist(), strict=True))
        leads = zip(self.keys, self.rows(codec), strict=True)
        return [dues.get(row or key) for key, row in leads]


GetMany = Callable[[list[bytes]], Sequence["bytes | None"]]
"""The values of keys, in their order."""

Passing = Callable[[TableCodec, list[Any], list[Any]], set[int]]
"""The places of the rows, by their keys and values, that pass a filter."""

MakeChange = Callable[[TableCodec, "RowSource"], RowChange]
"""Makes a change by the newest definition. It may be called again."""


class RowSource(metaclass=ABCMeta):
    """What a table stands on: keys and values, and the definitions by which they are rows. It reads
    `source`, which has the reads of `kvstore.readable`. Where nothing is written, `write` refuses.
    """

    sends_columns: ClassVar[bool] = False
    """Whether rows of batches stay encoded columns: see `RowChange`. They have no indexes then."""

    def __init__(self, source: Any, catalogue: Catalogue) -> None:
        self.source, self.catalogue = source, catalogue

    @abstractmethod
    def codec(self, name: str, as_of: TimeLike | None = None) -> TableCodec:
        """The definition of a table as of a time."""

    def get(self, key: bytes, as_of: TimeLike | None = None) -> bytes | None:
        """The value of a key."""
        found: bytes | None = self.source.get(key, **self._when(as_of))
        return found

    def get_many(
        self, keys: Sequence[bytes], as_of: TimeLike | None = None
    ) -> Sequence[bytes | None]:
        """The values of keys."""
        found: Sequence[bytes | None] = self.source.get_many(keys, **self._when(as_of))
        return found

    def batches(
        self, span: Span, as_of: TimeLike | None, *, reverse: bool, limit: int | None
    ) -> Iterable[pa.RecordBatch]:
        """Keys and values of a span."""
        found: Iterable[pa.RecordBatch] = self.source.scan_batches(
            span.start, span.end, reverse=reverse, limit=limit, **self._when(as_of)
        )
        return found

    def count(self, span: Span, as_of: TimeLike | None) -> int:
        """The number of keys of a span."""
        return sum(batch.num_rows for batch in self.batches(span, as_of, reverse=False, limit=None))

    def pairs(self, span: Span, *, reverse: bool) -> Iterator[tuple[bytes, bytes]]:
        """Keys and values of a span, one by one."""
        found: Iterator[tuple[bytes, bytes]] = self.source.scan(
            span.start, span.end, reverse=reverse
        )
        return found

    def held(self, as_of: TimeLike | None) -> RowsAtOneTime:
        """Reads at one time, which stays readable until the block of the result ends."""
        return HeldRows(self.source.snapshot(as_of), self.catalogue)

    def write(self, name: str, make: MakeChange, *, is_checked: bool) -> Timestamp | None:
        """Commit a change, or add it to what will be committed. With `is_checked`, and in a table
        with a unique index, the reads of the change must still be true then."""
        raise UsageError(f"table {name!r} cannot be written here", "write to the store")

    def checked(self, name: str, codec: TableCodec) -> Callable[[], None]:
        """A check for the commit of a batch: the definition is still the newest one."""
        raise UsageError(f"table {name!r} cannot be written here", "write to the store")

    def import_target(self, name: str) -> ImportTarget:
        """See `Table.import_target`."""
        raise UsageError(f"table {name!r} cannot be imported into here", "import into the store")

    def _when(self, as_of: TimeLike | None) -> dict[str, Any]:
        """The time of a read, as an argument of the source."""
        return {"as_of": as_of}


class ImportTarget(NamedTuple):
    """The parts that an import into a table needs: the store, or the client of its owner. `check`
    raises `TableAlteredError` unless `codec` belongs to the newest definition. In the process that
    owns the store it runs under the commit lock. Elsewhere it asks the owner, who compares the
    definition that the import names under its own lock."""

    store: Any
    codec: TableCodec
    check: Callable[[], None]


class StoreRows(RowSource):
    """The rows of a store, which a table reads and writes."""

    def __init__(self, store: Any, catalogue: Catalogue, parts: Parts) -> None:
        super().__init__(store, catalogue)
        self.store, self.parts = store, parts
        self._versions, self._committer = parts.versions, parts.committer
        # Hot: the store's own look-up, or its shortcut.
        self.get = store.get  # type: ignore[method-assign]

    def codec(self, name: str, as_of: TimeLike | None = None) -> TableCodec:
        at = None if as_of is None else self._committer.to_time(as_of, name="as_of")
        return self.catalogue.codec(name, at)

    def count(self, span: Span, as_of: TimeLike | None) -> int:
        found: int = self.store.count(span.start, span.end, as_of=as_of)
        return found

    def history(self, key: bytes) -> Sequence[Version]:
        """All kept versions of a key, newest first."""
        found: Sequence[Version] = self.store.history(key)
        return found

    def time(self, time: TimeLike | None, name: str) -> Timestamp:
        """A time that the caller gave, by default the newest complete one."""
        at = None if time is None else self._committer.to_time(time, name=name)
        return Timestamp(self.parts.reads.at(at))

    def answers(self) -> AbstractContextManager[RowAnswers]:
        """The rows that labels ask for, with the history of the moment at which the block begins
        held."""
        return stored_answers(self.parts)

    def write(self, name: str, make: MakeChange, *, is_checked: bool) -> Timestamp | None:
        while not is_checked:
            codec = self.codec(name)
            if any(index.is_unique for index in codec.definition.indexes):
                break
            with suppress(TableAlteredError):
                return self._commit(name, codec, make)
            self.catalogue.forget(name)

        def body(transaction: Any) -> Any:
            TransactionRows(transaction, self.catalogue).write(name, make, is_checked=True)
            return transaction

        timestamp: Timestamp | None = self.store.transact(body).timestamp
        return timestamp

    def write_blind(self, name: str, make: MakeChange) -> Timestamp | None:
        """Commit a change that has read nothing, whatever indexes the table has."""
        while True:
            with suppress(TableAlteredError):
                return self._commit(name, self.codec(name), make)
            self.catalogue.forget(name)

    def _commit(self, name: str, codec: TableCodec, make: MakeChange) -> Timestamp | None:
        """Commit a change. Raises `TableAlteredError` unless `codec` belongs to the newest
        definition."""
        made = make(codec, self)
        writes = WriteSet("the rows", BATCH_BYTES_MAX)
        for start, end in made.ranges:
            writes.delete_row_range(start, end)
        writes.delete_rows(made.gone)
        expires, dues = made.expires, self._committer.expiries
        due = made.dues(codec) if expires is None else dues.due(expires)
        writes.put_rows(made.keys, made.values, due, made.rows(codec))
        check = self.checked(name, codec)
        return self._committer.commit(writes, check=check) if writes else None

    def alter(self, name: str, alteration: Alteration | Callable[[Definition], Definition]) -> None:
        """Alter a table whose definition is known."""
        seen = self.codec(name).definition
        with self.catalogue.changing(name):
            change(self.store.transaction, seen, alteration)

    def drop(self, name: str) -> Timestamp:
        """Delete a table in one commit."""

        def body(transaction: Any) -> Any:
            drop(transaction, name)
            return transaction

        with self.catalogue.changing(name):
            timestamp: Timestamp = self.store.transact(body).timestamp
        return timestamp

    def revert(
        self,
        name: str,
        to: TimeLike,
        span: Callable[[TableCodec], Span],
        where: Passing | None,
    ) -> Timestamp | None:
        """Give the rows of a span the values that they had at a time, in one commit: all of them,
        or those that pass `where` now or then. The `span` is of the newest definition."""
        at = self._committer.to_time(to, name="to")
        with self.store.snapshot(at) as then:

            def body(transaction: Any) -> Any:
                if at < transaction.read_at:
                    rows = TransactionRows(transaction, self.catalogue)
                    rows.revert(name, then, span, where, self.store, self.parts)
                return transaction

            reverted = self.store.transact(body, attempts=REVERT_ATTEMPTS)
        timestamp: Timestamp | None = reverted.timestamp
        return timestamp

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


class RowsAtOneTime(RowSource):
    """The rows of something that has one time."""

    kind: ClassVar = "a snapshot"

    def held(self, as_of: TimeLike | None) -> Self:
        self._when(as_of)
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Whoever made the source ends it."""

    def _when(self, as_of: TimeLike | None) -> dict[str, Any]:
        if as_of is not None:
            raise one_time(self.kind)
        return {}


def one_time(kind: str) -> UsageError:
    """The refusal of a time by something that has one time."""
    return UsageError(f"{kind} has one time", "leave out as_of, or read the store")


def require_no_expiry_column(definition: Definition, remedy: str) -> None:
    """Raise `UsageError` where a column tells when rows expire. `remedy` names it as {column}."""
    column = definition.expiry_column
    if column is not None:
        raise UsageError(
            f"{definition.where}: column {column.name!r} tells when its rows expire",
            remedy.format(column=column.name),
        )


def refused(name: str, what: str) -> UsageError:
    """The refusal of a call by a table that stands on less than a store."""
    return UsageError(f"table {name!r} cannot be {what} here", "use the table of the store")


class PastRows(RowsAtOneTime):
    """The rows of a snapshot, and their history up to its time. Beside the snapshot its store, or
    its collection, has older times, which `history`, `changes`, `latest` and `join` ask for. No
    answer tells of a commit above the time of the snapshot."""

    def __init__(self, store: Any, snapshot: Any, catalogue: Catalogue) -> None:
        """`store` is read at any time, `snapshot` at the time of the table."""
        super().__init__(snapshot, catalogue)
        self.store = store
        self._as_of = Timestamp(snapshot.as_of)

    def codec(self, name: str, as_of: TimeLike | None = None) -> TableCodec:
        return self.catalogue.codec(name, self.time(as_of, "as_of"))

    def history(self, key: bytes) -> Sequence[Version]:
        """The kept versions of a key up to the time of the table."""
        return [found for found in self.store.history(key) if found.timestamp <= self._as_of]

    def time(self, time: TimeLike | None, name: str) -> Timestamp:
        """A time that the caller gave, by default the time of the table. An age counts from it.
        Raises `ClosedError` if the snapshot is closed."""
        self.source.join_side()
        return past_time(time, self._as_of, name)

    def answers(self) -> AbstractContextManager[RowAnswers]:
        """The rows that labels ask for, up to the time of the snapshot, with history held."""
        found: AbstractContextManager[RowAnswers] = self.source.join_side().opened()
        return found


def past_time(time: TimeLike | None, newest: Timestamp, name: str) -> Timestamp:
    """A time that the caller of a snapshot gave, by default the time `newest` of the snapshot, from
    which an age counts. Raises `NotYetWrittenError` for a later time."""
    if time is None:
        return newest
    at = reached(to_timestamp(time, name=name, now=lambda: newest), newest)
    if at > newest:
        raise NotYetWrittenError(as_of=Timestamp(at), upper=Timestamp(newest + 1))
    return Timestamp(at)


class HeldRows(RowsAtOneTime):
    """The rows of a snapshot that ends with the block."""

    def codec(self, name: str, as_of: TimeLike | None = None) -> TableCodec:
        self._when(as_of)
        return self.catalogue.codec(name, self.source.as_of)

    def __exit__(self, *_: object) -> None:
        self.source.close()


class TransactionRows(RowsAtOneTime):
    """The rows of a transaction, its own writes included. Reads count as reads of it."""

    kind = "a transaction"

    def codec(self, name: str, as_of: TimeLike | None = None) -> TableCodec:
        self._when(as_of)
        codec = self.catalogue.codec(name, self.source.read_at)
        if self.source.get(definition_key(name)) != codec.stored:
            self.catalogue.forget(name)
            codec = self.catalogue.codec(name, self.source.read_at)
        return codec

    def batches(
        self, span: Span, as_of: TimeLike | None, *, reverse: bool, limit: int | None
    ) -> Iterable[pa.RecordBatch]:
        self._when(as_of)
        return _gathered(self.source.scan(span.start, span.end, reverse=reverse, limit=limit))

    def write(self, name: str, make: MakeChange, *, is_checked: bool) -> None:
        codec = self.codec(name)
        made = make(codec, self)
        self.source.delete_rows(made.gone, made.ranges)
        self.source.put_rows(made.keys, made.values, made.expiry(codec), made.rows(codec))

    def revert(
        self,
        name: str,
        then: Any,
        span: Callable[[TableCodec], Span],
        where: Passing | None,
        store: Any,
        parts: Parts,
    ) -> None:
        """Give the rows of a span the values that they had in the snapshot `then`."""
        at, codec = Timestamp(then.as_of), self.codec(name)
        before = self.catalogue.codec(name, at).definition
        if before.number != codec.definition.number:
            raise UsageError(
                f"{codec.definition.where} was made anew since {at}",
                "read the rows of then from a snapshot, and put them",
            )
        within = span(codec)
        parts.reads.require_kept(within, at)
        self.source.require_unchanged(within)
        keys = changed_keys(store, then, within, self.source.read_at)
        made = restored_rows(codec, self, keys, then.get_many, where)
        self.source.delete_rows(made.gone)
        self.source.put_rows(made.keys, made.values, made.expiry(codec), made.rows(codec))


class BatchRows(RowSource):
    """The rows that a batch writes. A table cannot read them: each of its reads begins with `codec`
    or `held`. A change reads the older rows of the store, whose entries it deletes."""

    def __init__(self, batch: Any, rows: RowSource) -> None:
        """`rows` are those of the store of the batch."""
        super().__init__(rows.source, rows.catalogue)
        self._batch, self._rows = batch, rows

    def codec(self, name: str, as_of: TimeLike | None = None) -> NoReturn:
        raise UsageError(
            f"table {name!r} cannot be read in a batch", "read the store, or use a transaction"
        )

    def held(self, as_of: TimeLike | None) -> NoReturn:
        raise UsageError("rows cannot be read in a batch", "read the store, or use a transaction")

    def write(self, name: str, make: MakeChange, *, is_checked: bool) -> None:
        codec = self._rows.codec(name)
        if is_checked or any(index.is_unique for index in codec.definition.indexes):
            raise UsageError(
                f"a batch cannot check the rows of table {name!r}", "use a transaction instead"
            )
        made = self._made(name, codec, make)
        self._batch.require(self._rows.checked(name, codec))
        self._batch.delete_rows(made.gone, made.ranges)
        self._batch.put_rows(made.keys, made.values, made.expiry(codec), made.rows(codec))

    def _made(self, name: str, codec: TableCodec, make: MakeChange) -> RowChange:
        """The change by a definition that is known; by the newest one where the rows do not fit."""
        try:
            return make(codec, self._rows)
        except UsageError:
            self.catalogue.forget(name)
            newest = self._rows.codec(name)
            if newest.stored == codec.stored:
                raise
            return make(newest, self._rows)


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


# --------------------------------------------------------------------------------------------------
# Changes of rows: keys and values that are set, entries of indexes that are set and deleted.
#
# An entry of an index is a hint, and the row decides (`indexes.py`). So a write need not find every
# older entry of a row: it deletes the entry of the row that it replaces, as far as it knows it, and
# GC of tables deletes the others.
#
# Invariants
# 1. A commit that sets a row sets its entries too, in every index of the newest definition.
# 2. An entry is deleted only by a commit that sets its row to other values, or deletes it.
# 3. A row is deleted and replaced whatever it holds: the old row is read as its bytes, because a
#    damaged row may hold what no column holds.
# 4. Values of a unique index are compared as the bytes of its entries: all NaN are one value, and
#    so are 0.0 and -0.0.


def put_row(codec: TableCodec, reader: RowSource, row: Mapping[str, Any]) -> RowChange:
    """Set one row."""
    key, value = codec.row(row)
    change = RowChange([key], [value])
    if codec.definition.indexes:
        whole = codec.to_dict(key, value)
        _replace(codec, reader, change, key, whole)
    return change


def insert_row(codec: TableCodec, reader: RowSource, row: Mapping[str, Any]) -> RowChange:
    """Set a row that must be new. Raises `NotUniqueError` if there is a row of its key."""
    key, _ = codec.row(row)
    if reader.get(key) is not None:
        raise NotUniqueError(codec.definition.where, values="the key", other=codec.key.named(key))
    return put_row(codec, reader, row)


def delete_rows(codec: TableCodec, reader: RowSource, keys: Sequence[bytes]) -> RowChange:
    """Delete rows, whether or not they exist. Where the table has indexes, at most `SCAN_CHUNK` old
    rows are in memory."""
    change = RowChange(gone=[*keys])
    for first in range(0, len(keys) if codec.definition.indexes else 0, SCAN_CHUNK):
        piece = keys[first : first + SCAN_CHUNK]
        for key, old in zip(piece, reader.get_many(piece), strict=True):
            if old is not None:
                change.gone += codec.entries_of(key, old)
    return change


def delete_range(codec: TableCodec, reader: RowSource, span: Span) -> RowChange:
    """Delete the rows of a span of keys by one range delete, and their entries. Where the table has
    indexes, its rows in the span are read, unless they are all."""
    whole = Span.of_prefix(codec.key.prefix)
    assert span.end is not None, "it ends where its table does, or before"
    if span == whole:
        spans = [
            Span.of_prefix(codec.index_codec(index).prefix) for index in codec.definition.indexes
        ]
        ends = [(each.start, each.end) for each in (whole, *spans) if each.end is not None]
        return RowChange(ranges=ends)
    change, size = RowChange(ranges=[(span.start, span.end)]), 0
    if codec.definition.indexes:
        for batch in reader.batches(span, None, reverse=False, limit=None):
            keys, values = batch.column(0).to_pylist(), batch.column(1).to_pylist()
            before = len(change.gone)
            change.gone += _entries_of(codec, list(zip(keys, values, strict=True)))
            size += sum(map(len, change.gone[before:]))
            if size > BATCH_BYTES_MAX:
                raise UsageError(
                    f"{codec.definition.where}: the entries of these rows have more than "
                    f"{BATCH_BYTES_MAX} bytes, which is more than a commit takes",
                    "delete smaller ranges, or all rows at once",
                )
    return change


def changed_keys(store: Any, then: Any, span: Span, upto: Timestamp) -> list[bytes]:
    """The keys of a span that may have another value at `upto` than in the snapshot `then`, each
    once. Raises `UsageError` for more than `REVERT_ROWS_MAX`."""
    found: dict[bytes, None] = {}
    for each in store.changes(then.as_of, upto, span.start, span.end, revisions="latest"):
        if each.op == "delete_range":
            gone = Span(each.key, each.end_key).intersect(span.start, span.end)
            assert gone is not None, "it is a change of the span"
            found.update((key, None) for key, _ in then.scan(gone.start, gone.end))
        else:
            found[each.key] = None
        if len(found) > REVERT_ROWS_MAX:
            raise UsageError(
                f"more than {REVERT_ROWS_MAX} rows changed since {then.as_of}",
                "revert smaller spans, one after the other",
            )
    return list(found)


def restored_rows(
    codec: TableCodec,
    reader: RowSource,
    keys: Sequence[bytes],
    then: GetMany,
    where: Passing | None,
) -> RowChange:
    """Set the rows of `keys` to their values in `then`, as bytes: a layout never changes. A row
    that is the same, or was absent both times, stays as it is; so does one that passes `where`
    neither now nor then."""
    change, seen, differing = RowChange(), dict[bytes, bytes](), set[bytes]()
    pieces: list[list[tuple[bytes, bytes | None, bytes | None]]] = []
    for first in range(0, len(keys), SCAN_CHUNK):
        some = list(keys[first : first + SCAN_CHUNK])
        rows = zip(some, then(some), reader.get_many(some), strict=True)
        pieces.append([each for each in rows if each[1] != each[2]])
        if where is not None:
            pieces[-1] = _passing(codec, pieces[-1], where)
        differing.update(key for key, _, _ in pieces[-1])
    for piece in pieces:
        olds = [(key, old) for key, old, _ in piece if old is not None]
        change.keys += [key for key, _ in olds]
        change.values += [old for _, old in olds]
        change.gone += [key for key, old, _ in piece if old is None]
        if not codec.definition.indexes:
            continue
        change.gone += _entries_of(codec, [(key, new) for key, _, new in piece if new is not None])
        entries = _entries_of(codec, olds)
        change.keys += entries
        change.values += [b""] * len(entries)
        if olds and any(index.is_unique for index in codec.definition.indexes):
            columns = [pa.array(list(each), pa.binary()) for each in zip(*olds, strict=True)]
            batch, stored = codec.decode(*columns, is_checked=False), [key for key, _ in olds]
            for index in codec.definition.indexes:
                if index.is_unique:
                    found = codec.entries(index, batch).to_pylist()
                    _require_unique_batch(
                        codec, reader, index, batch, stored, found, seen, differing
                    )
    return change


def _passing(
    codec: TableCodec, rows: list[tuple[bytes, bytes | None, bytes | None]], where: Passing
) -> list[tuple[bytes, bytes | None, bytes | None]]:
    """The rows, each with its value at two times, that pass at one of them."""
    found: set[int] = set()
    for side in (1, 2):
        at = [place for place, row in enumerate(rows) if row[side] is not None]
        pairs = [(rows[place][0], rows[place][side]) for place in at]
        if pairs:
            keys, values = map(list, zip(*pairs, strict=True))
            found.update(at[place] for place in where(codec, keys, values))
    return [row for place, row in enumerate(rows) if place in found]


def _replace(
    codec: TableCodec, reader: RowSource, change: RowChange, key: bytes, row: dict[str, Any]
) -> None:
    """Add the entries of a row that is set, and delete the entries of the row that it replaces."""
    old = reader.get(key)
    before = [] if old is None else codec.entries_of(key, old)
    entries = [codec.entry(index, row) for index in codec.definition.indexes]
    for index, entry in zip(codec.definition.indexes, entries, strict=True):
        if index.is_unique:
            _require_unique(codec, reader, index, row, key, entry)
        change.keys.append(entry)
        change.values.append(b"")
    change.gone += [stale for stale in before if stale not in entries]


class SentArrays(NamedTuple):
    """Keys and values of rows that were sent, as lists and as arrays."""

    keys: list[bytes]
    values: list[bytes]
    key_array: pa.Array
    value_array: pa.Array

    def encoded(
        self, first: int, keys: pa.Array, values: pa.Array
    ) -> tuple[list[bytes], list[bytes]]:
        """The items of encoded rows, the first of which was sent as number `first`: the same
        objects where the sender has encoded them alike."""
        end = first + len(keys)
        if keys.equals(self.key_array[first:end]) and values.equals(self.value_array[first:end]):
            return self.keys[first:end], self.values[first:end]
        return items_of(keys), items_of(values)


def put_batches(
    codec: TableCodec,
    reader: RowSource,
    batches: Iterable[pa.RecordBatch],
    replaced: Container[bytes] = (),
    sent: SentArrays | None = None,
) -> RowChange:
    """Set the rows of batches that have the columns of the table. The last row of a key wins. The
    same commit sets or deletes the rows of `replaced`: what they are now takes no value of a unique
    index. `sent` are the rows as a client has sent them."""
    change = RowChange()
    seen: dict[bytes, bytes] = {}
    indexes = codec.definition.indexes
    rows = 0
    for batch in _pieces(batches):
        encoded = codec.encode(batch)
        if reader.sends_columns:
            change.columns.append(encoded)
            continue
        if sent is None:
            keys, values = (items_of(column) for column in encoded)
        else:
            keys, values = sent.encoded(rows, *encoded)
        rows += batch.num_rows
        change.keys += keys
        change.values += values
        entries = [items_of(codec.entries(index, batch)) for index in indexes]
        for index, found in zip(indexes, entries, strict=True):
            change.keys += found
            change.values += [b""] * len(found)
            if index.is_unique:
                _require_unique_batch(codec, reader, index, batch, keys, found, seen, replaced)
        if indexes:
            change.gone += _stale(codec, reader, keys, entries)
    return change


def put_rows(codec: TableCodec, reader: RowSource, rows: Iterable[Mapping[str, Any]]) -> RowChange:
    """Set rows. The last row of a key wins. An error names a row by its place, from 0 on."""
    change = RowChange()
    seen: dict[bytes, bytes] = {}
    for at, row in enumerate(rows):
        try:
            each = put_row(codec, reader, row)
        except NotUniqueError:
            raise
        except UsageError as error:
            raise error.at(after=f", in row {at}") from error
        _require_distinct(codec, seen, each)
        change.keys += each.keys
        change.values += each.values
        change.gone += each.gone
    return change


def _require_distinct(codec: TableCodec, seen: dict[bytes, bytes], change: RowChange) -> None:
    """Raise `NotUniqueError` if a row of `seen` has the values of this one in a unique index."""
    key, *entries = change.keys
    for index, entry in zip(codec.definition.indexes, entries, strict=True):
        if index.is_unique:
            first = seen.setdefault(value_part(codec, key, entry), key)
            if first != key:
                row = codec.to_dict(key, change.values[0])
                values = [row[name] for name in codec.definition.parts_named(index.parts)]
                if None not in values:
                    raise not_unique(codec, index, values, first)


def value_part(codec: TableCodec, key: bytes, entry: bytes) -> bytes:
    """The beginning of the entry of a row: the prefix of the index, and the values of its
    columns."""
    return entry[: len(entry) - (len(key) - len(codec.key.prefix))]


def _pieces(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        for first in range(0, batch.num_rows, SCAN_CHUNK):
            yield batch.slice(first, SCAN_CHUNK)


def _stale(
    codec: TableCodec, reader: RowSource, keys: list[bytes], entries: list[list[bytes]]
) -> list[bytes]:
    """The entries of the rows that are replaced."""
    values = reader.get_many(keys)
    pairs = zip(keys, values, strict=True)
    return _entries_of(codec, [(key, value) for key, value in pairs if value is not None])


def _entries_of(codec: TableCodec, pairs: Sequence[tuple[bytes, bytes]]) -> list[bytes]:
    """The entries of stored rows."""
    if not pairs:
        return []
    columns = [pa.array(list(column), pa.binary()) for column in zip(*pairs, strict=True)]
    try:
        batch = codec.decode(*columns, is_checked=False)
    except UnknownLayoutError:
        raise
    except CorruptionError:
        return [entry for pair in pairs for entry in codec.entries_of(*pair)]
    stale: list[bytes] = []
    for index in codec.definition.indexes:
        stale += codec.entries(index, batch).to_pylist()
    return stale


# -- unique indexes -----------------------------------------------------------------------------


def _require_unique(
    codec: TableCodec,
    reader: RowSource,
    index: Index,
    row: Mapping[str, Any],
    key: bytes,
    entry: bytes,
) -> None:
    """Raise `NotUniqueError` if another row has the values of `row` in a unique index. The reads
    count as reads of the transaction, so that two of them cannot both pass."""
    values = [row[name] for name in codec.definition.parts_named(index.parts)]
    if None in values:
        return
    taken = other_row(codec, reader, index, value_part(codec, key, entry), key)
    if taken is not None:
        raise not_unique(codec, index, values, taken)


def other_row(
    codec: TableCodec,
    reader: RowSource,
    index: Index,
    values: bytes,
    key: bytes,
    replaced: Container[bytes] = (),
) -> bytes | None:
    """The key of a row whose entry in an index begins with `values`, other than the rows of `key`
    and of `replaced`; None if there is none."""
    at = codec.definition.indexes.index(index)
    for batch in reader.batches(Span.of_prefix(values), None, reverse=False, limit=None):
        for entry in batch.column(0).to_pylist():
            found: bytes = codec.key.prefix + entry[len(values) :]
            if found == key or found in replaced:
                continue
            stored = reader.get(found)
            if stored is not None and codec.entries_of(found, stored)[at : at + 1] == [entry]:
                return found
    return None


def not_unique(
    codec: TableCodec, index: Index, values: Sequence[Any], taken: bytes
) -> NotUniqueError:
    """The error of values that another row has, whose key is `taken`."""
    definition = codec.definition
    named = zip(definition.parts_named(index.parts), values, strict=True)
    return NotUniqueError(
        f"{definition.where}, index {index.name!r}",
        values=", ".join(f"{name}={value!r:.100}" for name, value in named),
        other=codec.key.named(taken),
    )


def _require_unique_batch(
    codec: TableCodec,
    reader: RowSource,
    index: Index,
    batch: pa.RecordBatch,
    keys: list[bytes],
    entries: list[bytes],
    seen: dict[bytes, bytes],
    replaced: Container[bytes],
) -> None:
    columns = [batch.column(name) for name in codec.definition.parts_named(index.parts)]
    for row, (key, entry) in enumerate(zip(keys, entries, strict=True)):
        if any(column.null_count and not column[row].is_valid for column in columns):
            continue
        values = value_part(codec, key, entry)
        first = seen.setdefault(values, key)
        taken = first
        if first == key:
            other = other_row(codec, reader, index, values, key, replaced)
            if other is None:
                continue
            taken = other
        raise not_unique(codec, index, [as_python(column, row) for column in columns], taken)


# --------------------------------------------------------------------------------------------------
# Rows that a client has encoded, and definitions that it has altered: both are checked beside the
# store.
#
# A client sends keys and values of rows. The store encodes them anew by its newest definition, so
# that it can read each row that it stores, and makes the entries of indexes itself. To alter a
# table, a client sends the definition that the table is to have. The store makes the alteration by
# itself, and compares the result with the definition that was sent.
#
# Invariants
# 1. A row that is stored was decoded before, and fits the columns of the table.
# 2. A client writes no entry of an index.
# 3. A definition that is stored was made by an alteration of the newest one.


def digest_of(codec: TableCodec) -> str:
    """The SHA-256 of a definition, by which two processes tell whether they have the same one."""
    return hashlib.sha256(codec.stored).hexdigest()


def altered_as(definition: Definition, wanted: Definition) -> Definition:
    """`definition`, altered to the definition `wanted` that a client sent. Raises
    `TableAlteredError` if the client began with another definition, `UsageError` if no alteration
    leads to `wanted`."""
    if wanted.revision != definition.revision + 1:
        raise TableAlteredError(definition.name)
    found = alter(definition, _alteration(definition, wanted))
    if found != wanted:
        raise UsageError(
            f"{definition.where}: no alteration makes the definition that was sent",
            "alter the definition that the table has",
        )
    return found


def _alteration(before: Definition, after: Definition) -> Alteration:
    """The differences of two definitions as the arguments of `Table.alter`."""
    kept = [(one, after.by_id[one.id]) for one in before.columns if one.id in after.by_id]
    numbers = {index.number for index in after.indexes}
    indexes = {
        index.name: unique_index(*columns) if index.is_unique else columns
        for index in after.indexes
        if index.number > before.index_numbers
        for columns in [named_parts(after, index.parts)]
    }
    return Alteration(
        add={
            column.name: (column.field, default_value(column))
            for column in after.columns
            if column.id >= before.ids
        },
        drop=[column.name for column in before.columns if column.id not in after.by_id],
        widen={one.name: two.field for one, two in kept if one.field != two.field},
        add_index=indexes,
        drop_index=[index.name for index in before.indexes if index.number not in numbers],
        expires=_column_altered(before.expiry_column, after.expiry_column),
        valid_to=_column_altered(before.end_column, after.end_column),
    )


def _column_altered(before: Column | None, after: Column | None) -> str | Literal[False] | None:
    if (before and before.id) == (after and after.id):
        return None
    return False if after is None else after.name


def sent_change(
    codec: TableCodec,
    reader: RowSource,
    rows: Mapping[bytes, bytes | None],
    due: int | None,
    replaced: Container[bytes],
) -> RowChange:
    """The change that sets the rows of keys and values until `due`, and deletes rows without a
    value. `replaced` is as in `put_batches`.

    Raises `UsageError` for bytes that are no rows of the table, `TableAlteredError` for rows of a
    layout that it does not have.
    """
    if due is not None:
        require_no_expiry_column(codec.definition, "set {column} in the row")
    values = [value for value in rows.values() if value is not None]
    change = RowChange()
    try:
        if values:
            is_whole = len(values) == len(rows)
            keys = [*rows] if is_whole else [key for key, each in rows.items() if each is not None]
            sent = SentArrays(keys, values, binary_array(keys), binary_array(values))
            batch = conform(codec.definition, codec.decode(sent.key_array, sent.value_array))
            change = put_batches(codec, reader, [batch], replaced, sent)
        for key, value in rows.items() if len(values) < len(rows) else ():
            if value is None:
                codec.key.require([key])
                change.gone += delete_rows(codec, reader, [key]).gone
    except UnknownLayoutError:
        raise TableAlteredError(codec.definition.name) from None
    except CorruptionError as error:
        raise UsageError(
            f"a row that was sent: {error.problem}", "encode it by the table"
        ) from error
    except FormatVersionError as error:
        raise UsageError(f"a row that was sent: {error.what}", "encode it by the table") from error
    change.expires = None if due is None else Timestamp(due)
    return change
