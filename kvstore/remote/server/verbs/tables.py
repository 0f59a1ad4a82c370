"""Tables for the callers of a server: their rows, and the verbs that read and make them.

A caller sends keys as the table encodes them: a client has the definition, which is a value of the
store. Rows come as Arrow streams, decoded beside the store; the verb `batch` commits them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import pyarrow as pa

from kvstore.base.span import Span
from kvstore.base.timestamp import TIMESTAMP_MAX, TimeLike, Timestamp
from kvstore.codec.json import read_object
from kvstore.errors import CorruptionError, TableAlteredError, UsageError, printable
from kvstore.limits import ARROW_BYTES_MAX, BATCH_BYTES_MAX, SERVER_STREAM_ROWS
from kvstore.mvcc import WriteSet
from kvstore.remote import verbs
from kvstore.remote.server.invocation import Answer, Invocation, serves
from kvstore.remote.server.verbs.upkeep import progress_rows
from kvstore.requests import Requests
from kvstore.tables.catalogue import Catalogue, arguments_of, require_name
from kvstore.tables.definition import Definition
from kvstore.tables.filters import RowFilter, passed_batches
from kvstore.tables.indexes import clear_rows, found_batches, whole_index
from kvstore.tables.joining import RowChoice, join_rows
from kvstore.tables.row_codec import TableCodec
from kvstore.tables.sources import (
    Passing,
    PastRows,
    RowsAtOneTime,
    StoreRows,
    TransactionRows,
    altered_as,
    delete_range,
    digest_of,
    sent_change,
)
from kvstore.timeline.durability import Durability
from kvstore.timeline.expiries import Expires
from kvstore.timeline.request_notes import RequestToken
from kvstore.transaction import ReadSet, Transaction, Transactions, transact

# --------------------------------------------------------------------------------------------------
# Rows of tables for the callers of a server: read typed, and committed once.
#
# Invariants
# 1. A row is committed only while the definition that encoded it is the newest one of its table.
# 2. A row of a unique index is committed only if no other row has its values at that moment.


class SentChange(NamedTuple):
    """The rows that a caller sets and deletes."""

    rows: Mapping[bytes, bytes | None]
    """Values of rows by key; None deletes a row."""
    dues: Mapping[bytes, int | None]
    """The times at which rows are deleted, by key. A row without a time here stays."""
    spans: Sequence[Span]
    """Spans whose rows are deleted first."""


class SentRows:
    """The rows that callers of one store read and send."""

    def __init__(self, store: Any) -> None:
        self._requests: Requests = store.requests
        self._transactions, self._parts = self._requests.transactions, self._requests.parts
        self._catalogue: Catalogue = self._transactions.catalogue
        self._reader = StoreRows(store, self._catalogue, self._parts)

    def held(self, as_of: TimeLike | None) -> RowsAtOneTime:
        """The rows at one time, which stays readable until the block ends."""
        return self._reader.held(as_of)

    def join(
        self, name: str, labels: object, upto: int | None, **question: Any
    ) -> pa.RecordBatchReader:
        """The labels with columns of the rows that they ask for: see `Table.join`. A batch is
        as small as a batch of a scan. With `upto` no label asks for a later time, and the columns
        are those of then."""
        how: dict[str, Any] = {"bytes_max": ARROW_BYTES_MAX, **question}
        if upto is None:
            return join_rows(self._reader, self._catalogue.codec(name), labels, **how)
        with self._reader.store.snapshot(Timestamp(upto)) as then:
            rows = PastRows(self._reader.store, then, self._catalogue)
            return join_rows(rows, rows.codec(name), labels, **how)

    def alter(self, name: str, wanted: Definition) -> TableCodec:
        """Give a table the definition that a caller has made by altering the newest one. Raises as
        `Table.alter`."""
        self._reader.alter(name, partial(altered_as, wanted=wanted))
        return self._catalogue.codec(name)

    def revert(
        self,
        name: str,
        to: TimeLike,
        span: Callable[[TableCodec], Span],
        where: Passing | None,
    ) -> Timestamp | None:
        """See `Table.revert`."""
        return self._reader.revert(name, to, span, where)

    def clear(
        self,
        name: str,
        span: Callable[[TableCodec], Span],
        where: Passing | None,
        compact: bool,
    ) -> Timestamp:
        """See `Table.clear`."""
        return clear_rows(self._reader, name, span, where, compact=compact)

    def commit(
        self,
        write: Callable[[Any], None],
        sent: SentChange,
        definitions: Mapping[str, str],
        token: RequestToken | None,
        durability: Durability | None,
    ) -> Timestamp | None:
        """Commit rows, and what `write` does with the write set that it is given.

        `definitions` has, by the name of each table, the digest of the definition that encoded its
        rows. Raises `TableAlteredError` where the store has another definition: encode the rows
        anew.
        """
        codecs = [self._codec(name, digest) for name, digest in definitions.items()]
        if any(index.is_unique for codec in codecs for index in codec.definition.indexes):
            begin = partial(self._begin, None, ReadSet(), token, durability)
            body = partial(self._send, write, sent, codecs)
            return transact(begin, body).timestamp
        writes = self._requests.write_set("the batch", BATCH_BYTES_MAX)
        write(writes)
        for codec, span in _spans_by_table(codecs, sent.spans):
            made = delete_range(codec, self._reader, span)
            for start, end in made.ranges:
                writes.delete_row_range(start, end)
            writes.delete_rows(made.gone)
        for codec, mine, due in _by_table(codecs, sent):
            made = sent_change(codec, self._reader, mine, due, sent.rows)
            writes.delete_rows(made.gone)
            expiry = made.dues(codec) if due is None else due
            writes.put_rows(made.keys, made.values, expiry, made.rows(codec))

        def check() -> None:
            for codec in codecs:
                self._require_newest(codec)

        return self._requests.commit(writes, token, durability, check=check) if writes else None

    def commit_reads(
        self,
        write: Callable[[Any], None],
        sent: SentChange,
        reads: ReadSet,
        read_at: int,
        token: RequestToken | None,
        durability: Durability | None,
    ) -> Timestamp | None:
        """As `Requests.commit_reads`, with rows of tables."""
        known = [self._catalogue.codec(name, read_at) for name in self._catalogue.names()]
        keys = [*sent.rows, *(span.start for span in sent.spans)]
        codecs = [codec for codec in known if any(key.startswith(codec.key.prefix) for key in keys)]
        begin = partial(self._begin, read_at, reads, token, durability)
        # A conflict is the client's: it has read, and runs its transaction again.
        return transact(begin, partial(self._send, write, sent, codecs), attempts=1).timestamp

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
        sent: SentChange,
        codecs: Iterable[TableCodec],
        transaction: Transaction,
    ) -> Transaction:
        write(transaction)
        reader = TransactionRows(transaction, self._catalogue)
        for codec in codecs:
            if reader.codec(codec.definition.name).stored != codec.stored:
                raise TableAlteredError(codec.definition.name)
        for codec, span in _spans_by_table(codecs, sent.spans):
            made = delete_range(codec, reader, span)
            transaction.delete_rows(made.gone, made.ranges)
        left = dict(sent.rows)
        for codec, mine, due in _by_table(codecs, sent):
            made = sent_change(codec, reader, mine, due, left)
            transaction.delete_rows(made.gone)
            transaction.put_rows(made.keys, made.values, made.expiry(codec), made.rows(codec))
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
    codecs: Iterable[TableCodec], sent: SentChange
) -> list[tuple[TableCodec, Mapping[bytes, bytes | None], int | None]]:
    """The rows of each table that expire at one time, and this time. Raises `UsageError` for a key
    that is no row of these tables."""
    found: list[tuple[TableCodec, Mapping[bytes, bytes | None], int | None]] = []
    for codec in codecs if sent.rows and not sent.dues else ():
        if _are_rows_of(codec, sent.rows):  # hot: the batch of one table
            return [(codec, sent.rows, None)]
    left = dict(sent.rows)
    for codec in codecs:
        mine: dict[int | None, dict[bytes, bytes | None]] = {}
        for key in sent.rows:
            if key.startswith(codec.key.prefix):
                mine.setdefault(sent.dues.get(key), {})[key] = left.pop(key)
        found += [(codec, each, due) for due, each in mine.items()]
    if left:
        raise _no_row(min(left))
    return found


def _are_rows_of(codec: TableCodec, keys: Iterable[bytes]) -> bool:
    prefix = codec.key.prefix
    return min(keys).startswith(prefix) and max(keys).startswith(prefix)


def _spans_by_table(
    codecs: Iterable[TableCodec], spans: Sequence[Span]
) -> list[tuple[TableCodec, Span]]:
    """The table of each span. Raises `UsageError` for a span that is not of rows of these
    tables."""
    found = []
    for span in spans:
        for codec in codecs:
            whole = Span.of_prefix(codec.key.prefix)
            if span.intersect(whole.start, whole.end) == span:
                found.append((codec, span))
                break
        else:
            raise _no_row(span.start)
    return found


def _no_row(key: bytes) -> UsageError:
    return UsageError(
        f"key {printable(key)} belongs to tables, and is no row of a table that is named",
        "name its definition; the store makes the entries of indexes itself",
    )


# --------------------------------------------------------------------------------------------------
# The verbs of tables.


@serves(verbs.TABLE_SCAN)
def table_scan(call: Invocation) -> Answer:
    """Rows of a table at one time, typed, in key order. `start` and `end` are keys as the table
    encodes them; all rows by default. `filter` is an expression of Arrow over the columns, as Arrow
    serializes it."""
    reverse, limit = call.flag("reverse"), call.count("limit")
    rows = SentRows(call.store).held(call.time("as_of"))
    codec, columns = rows.codec(_name(call)), _columns(call)
    span, chosen = _span(call, codec.key.prefix), _filter(call, codec)

    def batches() -> Iterator[pa.RecordBatch]:
        with rows:
            if chosen is None:
                found = rows.batches(span, None, reverse=reverse, limit=limit)
                yield from codec.decoded(found, columns)
            else:
                how: dict[str, Any] = {"columns": columns, "reverse": reverse, "limit": limit}
                yield from passed_batches(codec, rows, span, chosen, **how)

    return _typed(codec.schema_of(columns), batches())


@serves(verbs.TABLE_COUNT)
def table_count(call: Invocation) -> Answer:
    """The number of rows of a table at one time. The arguments are as in `table_scan`."""
    rows = SentRows(call.store).held(call.time("as_of"))
    codec = rows.codec(_name(call))
    span, chosen = _span(call, codec.key.prefix), _filter(call, codec)
    with rows:
        if chosen is None:
            return {"count": call.store.count(span.start, span.end, as_of=rows.source.as_of)}
        how: dict[str, Any] = {"columns": [], "reverse": False, "limit": None}
        passed = passed_batches(codec, rows, span, chosen, **how)
        return {"count": sum(batch.num_rows for batch in passed)}


@serves(verbs.TABLE_FIND)
def table_find(call: Invocation) -> Answer:
    """Rows of a table whose entries in an index lie from `start` to below `end`, in the order of
    the index. The bounds are keys as the index encodes them."""
    reverse, limit = call.flag("reverse"), call.count("limit")
    rows = SentRows(call.store).held(call.time("as_of"))
    codec, columns = rows.codec(_name(call)), _columns(call)
    index = whole_index(codec, call["index"])
    span = _span(call, codec.index_codec(index).prefix)
    how: dict[str, Any] = {"columns": columns, "reverse": reverse, "limit": limit}

    def batches() -> Iterator[pa.RecordBatch]:
        with rows:
            yield from found_batches(codec, rows, index, span, **how)

    return _typed(codec.schema_of(columns), batches())


@serves(verbs.TABLE_CHANGES)
def table_changes(call: Invocation) -> Answer:
    """The changes of rows in the window (since, upto], typed, with the names of Delta's change
    feed."""
    images = call.word("images", "pre+post")
    reader = call.store.table(_name(call)).changes(
        call["since"], call.time("upto"), images=images, columns=_columns(call)
    )
    return _typed(reader.schema, reader)


@serves(verbs.TABLE_JOIN)
def table_join(call: Invocation) -> Answer:
    """For each label the columns of the row that it asks for, in the order of the labels, which
    are an Arrow stream. `question` is a JSON object of the arguments of `Table.join`: `on`, `at`,
    `known_at`, `columns`, and those that choose a row, with an age that is an integer as
    `tolerance`. It may have `upto`, above which no label may ask, and `newest`, above which nothing
    counts. `first` is the number of the first label in errors."""
    labels, age = call.table, call.age("max_age")
    if labels is None:
        raise UsageError("a join without labels", "send an Arrow stream of keys and times")
    question = _question(call)
    asked = {name: question.pop(name) for name in RowChoice._fields if name in question}
    choice = RowChoice(**{"max_age": age, **asked})
    found = SentRows(call.store).join(
        _name(call), labels, choice=choice, prefix="", first=call.count("first") or 0, **question
    )
    added = pa.schema(list(found.schema)[labels.num_columns :])
    return _typed(added, (batch.select(added.names) for batch in found))


@serves(verbs.MAKE_TABLE)
def make_table(call: Invocation) -> Answer:
    """Make a table, or find the one that is there and the same. `definition` is its definition as
    JSON, as the store would keep it."""
    given = arguments_of(_definition(call))
    table = call.store.table(
        _name(call),
        given.schema,
        given.key,
        given.indexes if call.flag("has_indexes") else None,
        given.event_time,
        given.expires,
        given.valid_to,
    )
    return {"definition": json.loads(table.codec().stored)}


@serves(verbs.ALTER_TABLE)
def alter_table(call: Invocation) -> Answer:
    """Alter a table. `definition` is the definition that it is to have: the caller has altered the
    newest one."""
    codec = SentRows(call.store).alter(_name(call), _definition(call))
    return {"definition": json.loads(codec.stored)}


@serves(verbs.DROP_TABLE)
def drop_table(call: Invocation) -> Answer:
    """Drop a table: its definition, its rows and the entries of its indexes are deleted in one
    commit. History stays."""
    return {"timestamp": int(call.store.table(_name(call)).drop())}


@serves(verbs.CLEAR_TABLE)
def clear_table(call: Invocation) -> Answer:
    """Destroy the rows from `start` to below `end`, with their entries and their history; all rows
    by default. The bounds are keys as the table encodes them. With `filter`, as in `table_scan`,
    only the rows of which a kept version passes it."""
    rows, name, compact = SentRows(call.store), _name(call), call.flag("compact")
    span, passing = _passing_span(call)
    return progress_rows(lambda tell: {"timestamp": int(rows.clear(name, span, passing, compact))})


@serves(verbs.REVERT_TABLE)
def revert_table(call: Invocation) -> Answer:
    """Give the rows from `start` to below `end` the values that they had at the time `to`, in one
    commit. The bounds are keys as the table encodes them. With `filter`, as in `table_scan`, only
    the rows that pass it now or then. The timestamp is null if no row differs."""
    span, passing = _passing_span(call)
    at = SentRows(call.store).revert(_name(call), call["to"], span, passing)
    return {"timestamp": None if at is None else int(at)}


@serves(verbs.BUILD_INDEX)
def build_index(call: Invocation) -> Answer:
    """Make the entries of a new index for the rows that are there."""
    table, index = call.store.table(_name(call)), call["index"]
    return progress_rows(lambda tell: {"timestamp": table.build_index(index, progress=tell)})


def _name(call: Invocation) -> str:
    call.access.require_whole("a call of a table")
    return require_name(call["table"])


def _definition(call: Invocation) -> Definition:
    """The definition of a table that a caller has made."""
    name, text = _name(call), call["definition"]
    try:
        return Definition.from_bytes(name, text.encode())
    except CorruptionError as error:
        raise UsageError(
            f"the definition of table {name!r}: {error.problem}", "send it whole"
        ) from error


def _question(call: Invocation) -> dict[str, Any]:
    try:
        found = read_object(call["question"].encode(), where="question")
        given = {name: found[name] for name in ("on", "at", "known_at", "columns")}
        given |= {name: found.get(name) for name in ("upto", "newest")}
        given |= {name: found[name] for name in RowChoice._fields if name in found}
        on, columns = given["on"], given["columns"]
        is_sound = all(
            type(each) is list and all(type(name) is str for name in each) for each in (on, columns)
        )
        if not is_sound or not isinstance(given["at"], str | None):
            raise KeyError("names")
        if not isinstance(given["known_at"], str | int | None):
            raise KeyError("known_at")
        for name in ("upto", "newest", "tolerance"):
            if not isinstance(given.get(name), int | None) or (given.get(name) or 0) < 0:
                raise KeyError(name)
        if "max_age" in given or (given["newest"] or 0) > TIMESTAMP_MAX:
            raise KeyError("newest")
    except (CorruptionError, KeyError) as error:
        raise UsageError(
            f"question: {error}", "send a JSON object with on, at, known_at and columns"
        ) from error
    return given


def _filter(call: Invocation, codec: TableCodec) -> RowFilter | None:
    sent = call.value("filter")
    if sent is None:
        return None
    chosen = RowFilter.from_bytes(sent)
    chosen.require(codec)
    return chosen


def _passing_span(call: Invocation) -> tuple[Callable[[TableCodec], Span], Passing | None]:
    """The span of a call by the newest definition, and its filter."""
    sent = call.value("filter")
    chosen = None if sent is None else RowFilter.from_bytes(sent)

    def span(codec: TableCodec) -> Span:
        if chosen is not None:
            chosen.require(codec)
        return _span(call, codec.key.prefix)

    return span, None if chosen is None else chosen.places


def _columns(call: Invocation) -> list[str] | None:
    return call.items("columns") if call.has("columns") else None


def _span(call: Invocation, prefix: bytes) -> Span:
    """The span of the arguments `start` and `end`, which lies among the keys of `prefix`."""
    whole, start, end = Span.of_prefix(prefix), call.value("start"), call.value("end")
    span = Span(whole.start if start is None else start, whole.end if end is None else end)
    if span.intersect(whole.start, whole.end) != span:
        raise TableAlteredError(_name(call))
    return span


def _typed(schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> pa.RecordBatchReader:
    """Batches as they travel: none is empty, and none has more rows than a stream sends at once."""

    def pieces() -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for first in range(0, batch.num_rows, SERVER_STREAM_ROWS):
                yield batch.slice(first, SERVER_STREAM_ROWS)

    return pa.RecordBatchReader.from_batches(schema, pieces())
