"""The reads of everything that has history: a store, a client of one, an open collection, and what
they are at one time.

Five primitives decide what a reader sees: the values of keys (`get_many`), the rows of a span
(`scan_batches`), the versions of a key (`history`), the changes of a window (`changes`), and the
side of a join (`join_side`). The other reads are made of them here. A class that can answer one of
these with less work has its own: `Store.get` is compiled, and `Client.keys` leaves values at the
server.
"""

from __future__ import annotations

from abc import ABCMeta, abstractmethod
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, TypeVar, overload

from kvstore.base.arguments import is_many, key_list
from kvstore.base.span import Span, require_key
from kvstore.base.timestamp import AgeLike, TimeLike, Timestamp
from kvstore.codec.shown import ROWS, ShownRows
from kvstore.errors import UsageError

if TYPE_CHECKING:
    import pyarrow as pa

    from kvstore.changes import Change, Order, Revisions
    from kvstore.mvcc import Version
    from kvstore.tables.joins import Direction, OnFuture, OnGone, OnNull, Side

T = TypeVar("T")

VALUE_COLUMNS: Final = ("value", "value_timestamp")
"""The columns that a join adds, unless its caller names others."""


class Joined(metaclass=ABCMeta):
    """Something that labels are joined to."""

    @abstractmethod
    def join_side(self) -> Side:
        """The side of this object in a join of several sources: see `kvstore.join`."""

    def join(
        self,
        labels: object,
        key: str = "id",
        at: str | None = "ts",
        max_age: AgeLike | None = None,
        *,
        columns: tuple[str, str] = VALUE_COLUMNS,
        on_gone: OnGone = "error",
        direction: Direction = "backward",
        tolerance: AgeLike | None = None,
        allow_exact: bool = True,
        on_future: OnFuture = "error",
        on_null: OnNull = "error",
    ) -> pa.RecordBatchReader:
        """The labels, each with the value that its key had at its time: a point-in-time join.

        `labels` is Arrow data, or a frame of Polars, DuckDB or pandas. Column `key` has keys,
        binary or text; column `at` has times, with a zone or as nanoseconds. If `at` is None, all
        labels ask for the newest complete time, and in a snapshot for its time, above which no
        label may ask. The result has the columns and the order of the labels, and two more
        `columns`: the value, and the timestamp of its version. Both are null where the key had no
        value then, and where the version is older than `max_age`.

        With `direction="forward"` a label gets the oldest version at or above its time, up to the
        newest time of the call, and with `"nearest"` the nearer one of both, the older if both are
        as near. Where the version is a deletion, `"forward"` gives null. Without `allow_exact`, a
        version of the label's own time does not count. `tolerance` is another name of `max_age`,
        which bounds the distance in each direction.

        With `on_future="newest"` a label above the newest time is answered as of that time, and one
        more column, `as_of`, tells for each label as of which time it was answered; ages count from
        the label. With `on_null="null"` a label whose key or time is null has null.

        Raises `UsageError` that names the column, for a column that is missing or of another type,
        for a null and for a name that both sides have; `NotYetWrittenError` and `HistoryGoneError`
        that name the first label whose time they concern. With `on_gone="null"` a label whose
        history is gone has null.

        Labels stream: memory is bounded, whatever their number. The result keeps history from the
        call until it is read to its end or dropped; Arrow's `close` does not reach it. A client
        sends labels in pieces, and a lease keeps the history.
        Costs a seek for each version, or a pass over the entries in between where labels are dense;
        a seek more for each label that looks forward.

        Example:

            early = store.put(b"UA/1545", b"on time")
            late = store.put(b"UA/1545", b"late")
            labels = pa.table({"id": ["UA/1545", "UA/1545"], "ts": [early, late]})
            found = store.join(labels).read_all()
            assert found["value"].to_pylist() == [b"on time", b"late"]
        """
        from kvstore.tables.joins import Join, join  # imported late: see `kvstore.cli.process`

        bound: dict[str, Any] = {"max_age": max_age, "tolerance": tolerance}
        how: dict[str, Any] = {"direction": direction, "allow_exact": allow_exact}
        source = Join(self, columns=columns, **bound, **how)
        on: dict[str, Any] = {"on_gone": on_gone, "on_future": on_future, "on_null": on_null}
        return join(labels, [source], key=key, at=at, **on)


class Readable(Joined):
    """Reads at any time that is kept. Times and keys are as in `Store`; None is the newest complete
    time."""

    @abstractmethod
    def get_many(
        self, keys: Sequence[bytes], as_of: TimeLike | Sequence[TimeLike] | None = None
    ) -> list[bytes | None]:
        """The values of `keys`, in the order of `keys`; None for an absent key.

        `as_of` is one time for all keys, or a list that has a time for each key. With a list,
        `HistoryGoneError` and `NotYetWrittenError` name the first key whose time they concern.
        """

    @abstractmethod
    def scan_batches(
        self,
        start: bytes | None = None,
        end: bytes | None = None,
        prefix: bytes | None = None,
        as_of: TimeLike | None = None,
        reverse: bool = False,
        limit: int | None = None,
        *,
        batch_rows: int | None = None,
    ) -> pa.RecordBatchReader:
        """The rows of `scan` as Arrow record batches: columns `key` and `value`, both binary. A
        batch has at most `batch_rows` rows, by default as many as a scan reads at once."""

    @abstractmethod
    def history(self, key: bytes) -> list[Version]:
        """All kept versions of `key`, newest first. The value of a deletion is None."""

    @abstractmethod
    def changes(
        self,
        since: TimeLike,
        upto: TimeLike | None = None,
        start: bytes | None = None,
        end: bytes | None = None,
        revisions: Revisions = "all",
        order: Order = "key",
        *,
        prefix: bytes | None = None,
    ) -> Iterator[Change]:
        """The changes of the window `(since, upto]`, by key or by time."""

    @overload
    def get(self, key: bytes, as_of: TimeLike | None = None) -> bytes | None: ...

    @overload
    def get(self, key: bytes, as_of: TimeLike | None, default: T) -> bytes | T: ...

    @overload
    def get(self, key: bytes, as_of: TimeLike | None = None, *, default: T) -> bytes | T: ...

    def get(
        self, key: bytes, as_of: TimeLike | None = None, default: T | None = None
    ) -> bytes | T | None:
        """The value of `key` at `as_of`; `default` if the key is absent or deleted."""
        found = self._value(key, as_of)
        return default if found is None else found

    def _value(self, key: bytes, as_of: TimeLike | None) -> bytes | None:
        return self.get_many([key], as_of)[0]

    def floor(
        self, key: bytes, as_of: TimeLike | None = None, prefix: bytes | None = None
    ) -> tuple[bytes, bytes] | None:
        """The greatest live key at or below `key`, with its value; None if there is none. With
        `prefix` only keys that begin with it count."""
        return self.floor_many([key], as_of, prefix)[0]

    def floor_many(
        self,
        keys: Sequence[bytes],
        as_of: TimeLike | Sequence[TimeLike] | None = None,
        prefix: bytes | None = None,
    ) -> list[tuple[bytes, bytes] | None]:
        """The `floor` of each of `keys`, in their order. `as_of` is as in `get_many`. Costs a scan
        of one row for each key."""
        wanted = [require_key(key) for key in key_list(keys)]
        times = list(as_of) if is_many(as_of) else [as_of] * len(wanted)
        if len(times) != len(wanted):
            raise UsageError(
                f"{len(wanted)} keys and {len(times)} times", "pass a time for each key"
            )
        whole = Span() if prefix is None else Span.of_prefix(prefix)
        found: list[tuple[bytes, bytes] | None] = []
        for key, at in zip(wanted, times, strict=True):
            span = whole.intersect(b"", key + b"\x00")
            if span is None:
                found.append(None)
                continue
            rows = self.scan(span.start, span.end, as_of=at, reverse=True, limit=1)
            found.append(next(rows, None))
        return found

    def scan(
        self,
        start: bytes | None = None,
        end: bytes | None = None,
        prefix: bytes | None = None,
        as_of: TimeLike | None = None,
        reverse: bool = False,
        limit: int | None = None,
    ) -> Iterator[tuple[bytes, bytes]]:
        """Live keys and values at one time, in ascending order, or descending with `reverse`.

        The span is `start <= key < end`, or all keys with `prefix`. Memory is bounded. The scan
        sees the same state to its end: later commits do not show.
        """
        found = self.scan_batches(start, end, prefix, as_of, reverse, limit)
        return ShownRows("scan", ROWS, pairs_of(found))


class ReadableAt(Joined):
    """Reads at one time, `as_of`, of something that is readable at any time."""

    as_of: Timestamp
    """The time of all reads."""

    @abstractmethod
    def _open(self) -> Readable:
        """What is read. Raises `ClosedError` once the reads have ended."""

    def get(self, key: bytes, default: bytes | None = None) -> bytes | None:
        """As `Store.get`, at this snapshot's time."""
        return self._open().get(key, self.as_of, default)

    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """As `Store.get_many`, at this snapshot's time."""
        return self._open().get_many(keys, self.as_of)

    def floor(self, key: bytes, prefix: bytes | None = None) -> tuple[bytes, bytes] | None:
        """As `Store.floor`, at this snapshot's time."""
        return self._open().floor(key, self.as_of, prefix)

    def floor_many(
        self, keys: Sequence[bytes], prefix: bytes | None = None
    ) -> list[tuple[bytes, bytes] | None]:
        """As `Store.floor_many`, at this snapshot's time."""
        return self._open().floor_many(keys, self.as_of, prefix)

    def scan(
        self,
        start: bytes | None = None,
        end: bytes | None = None,
        prefix: bytes | None = None,
        *,
        reverse: bool = False,
        limit: int | None = None,
    ) -> Iterator[tuple[bytes, bytes]]:
        """As `Store.scan`, at this snapshot's time."""
        return self._open().scan(start, end, prefix, self.as_of, reverse=reverse, limit=limit)

    def scan_batches(
        self,
        start: bytes | None = None,
        end: bytes | None = None,
        prefix: bytes | None = None,
        *,
        reverse: bool = False,
        limit: int | None = None,
        batch_rows: int | None = None,
    ) -> pa.RecordBatchReader:
        """As `Store.scan_batches`, at this snapshot's time."""
        return self._open().scan_batches(
            start, end, prefix, self.as_of, reverse, limit, batch_rows=batch_rows
        )


def pairs_of(batches: pa.RecordBatchReader) -> Iterator[tuple[bytes, bytes]]:
    """The rows of batches of `scan_batches`, one by one."""
    return chain.from_iterable(
        zip(batch.column(0).to_pylist(), batch.column(1).to_pylist(), strict=True)
        for batch in batches
    )
