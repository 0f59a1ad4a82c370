"""A snapshot: the store at one time, held still while it is open."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol

from kvstore.base.arguments import VALUE_COLUMNS
from kvstore.base.timestamp import Timestamp
from kvstore.errors import ClosedError

if TYPE_CHECKING:
    import pyarrow as pa

    from kvstore.tables.joining import PastRows
    from kvstore.tables.joins import OnGone, StoredSide
    from kvstore.tables.table import Table


class Readable(Protocol):
    """The reads that a snapshot needs of its store."""

    def get(self, key: bytes, as_of: Timestamp, default: bytes | None) -> bytes | None:
        """The value of `key` at `as_of`."""
        ...

    def get_many(self, keys: Sequence[bytes], as_of: Timestamp) -> list[bytes | None]:
        """The values of `keys` at `as_of`."""
        ...

    def floor(
        self, key: bytes, as_of: Timestamp, prefix: bytes | None
    ) -> tuple[bytes, bytes] | None:
        """The greatest live key at or below `key` at `as_of`."""
        ...

    def floor_many(
        self, keys: Sequence[bytes], as_of: Timestamp, prefix: bytes | None
    ) -> list[tuple[bytes, bytes] | None]:
        """The floor of each of `keys` at `as_of`."""
        ...

    def scan(
        self,
        start: bytes | None,
        end: bytes | None,
        prefix: bytes | None,
        as_of: Timestamp,
        *,
        reverse: bool,
        limit: int | None,
    ) -> Iterator[tuple[bytes, bytes]]:
        """Live rows of a span at `as_of`."""
        ...

    def scan_batches(
        self,
        start: bytes | None,
        end: bytes | None,
        prefix: bytes | None,
        as_of: Timestamp,
        *,
        reverse: bool,
        limit: int | None,
        batch_rows: int | None,
        workers: int,
    ) -> pa.RecordBatchReader:
        """The same as Arrow record batches."""
        ...


class Snapshot:
    """Reads at `as_of`, which stays readable until the snapshot is closed, or nobody has it."""

    _store: Readable | None = None  # for the finalizer of one whose making was interrupted

    def __init__(
        self,
        store: Readable,
        as_of: Timestamp,
        release: Callable[[], object],
        side: Callable[[], StoredSide],
        rows: Callable[[Snapshot], PastRows],
    ) -> None:
        self._rows = rows
        self._release = release
        self._side = side
        self.as_of = as_of
        self._store = store

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

    def join(
        self,
        labels: object,
        key: str = "id",
        at: str | None = "ts",
        max_age: timedelta | None = None,
        *,
        columns: tuple[str, str] = VALUE_COLUMNS,
        on_gone: OnGone = "error",
    ) -> pa.RecordBatchReader:
        """As `Store.join`, with no label above this snapshot's time. If `at` is None, all labels
        ask for this snapshot's time."""
        from kvstore.tables.joins import Join, join  # imported late: see `kvstore.cli.process`

        source = Join(self, max_age=max_age, columns=columns)
        return join(labels, [source], key=key, at=at, on_gone=on_gone)

    def join_side(self) -> StoredSide:
        """The side of this snapshot in a join of several sources: see `kvstore.join`."""
        self._open()
        return self._side()

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
        workers: int = 1,
    ) -> pa.RecordBatchReader:
        """As `Store.scan_batches`, at this snapshot's time."""
        return self._open().scan_batches(
            start,
            end,
            prefix,
            self.as_of,
            reverse=reverse,
            limit=limit,
            batch_rows=batch_rows,
            workers=workers,
        )

    def table(self, name: str) -> Table:
        """The table `name`, with the columns and rows that it had at this snapshot's time.
        `history`, `changes`, `latest` and `join` answer for older times too."""
        from kvstore.tables.table import Table

        self._open()
        rows = self._rows(self)
        rows.codec(name)
        return Table(name, rows, None)

    def close(self) -> None:
        """End the claim on history. Repeatable."""
        if self._store is not None:
            self._release()
            self._store = None  # last: after an interrupt the finalizer ends the pin

    def __repr__(self) -> str:
        return f"<kvstore.Snapshot as of {self.as_of}>"

    def __enter__(self) -> Snapshot:
        self._open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def _open(self) -> Readable:
        if self._store is None:
            raise ClosedError("the snapshot")
        return self._store
