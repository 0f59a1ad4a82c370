"""A snapshot: the store at one time, held still while it is open."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, overload

from kvstore.base.timestamp import Timestamp
from kvstore.errors import ClosedError
from kvstore.readable import Readable, ReadableAt

if TYPE_CHECKING:
    import pyarrow as pa

    from kvstore.tables.joins import Side
    from kvstore.tables.sources import PastRows
    from kvstore.tables.table import Row, Table


class Snapshot(ReadableAt):
    """Reads at `as_of`, which stays readable until the snapshot is closed, or nobody has it."""

    _store: Any = None  # for the finalizer of one whose making was interrupted

    def __init__(
        self,
        store: Readable,
        as_of: Timestamp,
        release: Callable[[], object],
        side: Callable[[], Side],
        rows: Callable[[Snapshot], PastRows],
    ) -> None:
        self._rows = rows
        self._release = release
        self._side = side
        self.as_of = as_of
        self._store = store

    def join_side(self) -> Side:
        """The side of this snapshot in a join of several sources: see `kvstore.join`."""
        self._open()
        return self._side()

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
        self._open()
        found: pa.RecordBatchReader = self._store.scan_batches(
            start,
            end,
            prefix,
            self.as_of,
            reverse,
            limit,
            batch_rows=batch_rows,
            workers=workers,
        )
        return found

    @overload
    def table(self, name: str, *, row: type[Row]) -> Table[Row]: ...

    @overload
    def table(self, name: str) -> Table: ...

    def table(self, name: str, *, row: type[Any] | None = None) -> Table[Any]:
        """The table `name`, with the columns and rows that it had at this snapshot's time.
        `history`, `changes`, `latest` and `join` answer for older times too."""
        from kvstore.tables.table import table_on

        self._open()
        return table_on(name, self._rows(self), row)

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
        store: Readable = self._store
        return store
