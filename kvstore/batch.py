"""A batch: writes that take effect together, at one timestamp, or not at all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, overload

from kvstore.base.arguments import NUMBER, key_list
from kvstore.base.span import BytesLike
from kvstore.base.timestamp import Timestamp
from kvstore.codec.columns import row_puts
from kvstore.limits import BATCH_BYTES_MAX
from kvstore.mvcc.write_set import WriteSet
from kvstore.timeline.durability import Durability
from kvstore.timeline.expiries import Expires

if TYPE_CHECKING:
    from kvstore.tables.sources import RowSource
    from kvstore.tables.table import Row, Table


class Batch:
    """Collects writes; leaving the `with` block commits them, an exception drops them all.

    `timestamp` is set once committed; None for a batch that was empty or dropped.
    """

    def __init__(
        self,
        commit: Callable[..., Timestamp],
        writes: type[WriteSet] = WriteSet,
        *,
        rows: Callable[[], RowSource],
        due: Callable[[Expires], int],
    ) -> None:
        self._rows, self._due = rows, due
        self._commit = commit
        self._writes = writes("the batch", BATCH_BYTES_MAX)
        self._checks: list[Callable[[], None]] = []
        self.timestamp: Timestamp | None = None

    def put(self, key: bytes, value: bytes, expires: Expires | None = None) -> None:
        """Set `key` to `value`. The last write to a key in the batch wins, and decides whether the
        key expires. `expires` is as in `Store.put`."""
        # Python calls a function with keyword-only arguments 14 ns slower: `expires` is none.
        if expires is None:
            self._writes.put(key, value)
        else:
            self._writes.put_expiring(key, value, self._due(expires))

    def put_many(self, rows: object, *, expires: Expires | None = None) -> None:
        """Set many keys: a mapping, pairs of key and value, or Arrow data with the columns `key`
        and `value`. The last value of a key wins. `expires` is as in `Store.put`, for all rows that
        have no time of their own in a column `expires`."""
        due = None if expires is None else self._due(expires)
        for key, value, own in row_puts(rows):
            if due is None and own is None:
                self._writes.put(key, value)
            else:
                at = due if own is None else self._due(Timestamp(own))
                assert at is not None, "one of the two is set"
                self._writes.put_expiring(key, value, at)

    def delete(self, key: bytes) -> None:
        """Delete `key`, whether or not it is there."""
        self._writes.delete(key)

    def delete_range(
        self, start: bytes | None = None, end: bytes | None = None, prefix: bytes | None = None
    ) -> None:
        """Delete `start <= key < end`, or all keys with `prefix`, the batch's own writes so far
        included.

        Writes made after it win: delete and put again to replace a range atomically.
        """
        self._writes.delete_range(start, end, prefix)

    @overload
    def table(self, name: str, *, row: type[Row]) -> Table[Row]: ...

    @overload
    def table(self, name: str) -> Table: ...

    def table(self, name: str, *, row: type[Any] | None = None) -> Table[Any]:
        """The table `name`, written by this batch."""
        from kvstore.tables.sources import BatchRows
        from kvstore.tables.table import Table, model_of

        self._writes.require_open()
        rows = self._rows()
        return Table(name, BatchRows(self, rows), *model_of(name, rows.codec(name), row))

    def put_rows(
        self,
        keys: Sequence[bytes],
        values: Sequence[bytes],
        expires: Expires | list[int | None] | None = None,
        rows: Sequence[bytes] = (),
    ) -> None:
        """Set keys of a table: see `kvstore.tables`. A list has the due time of each key."""
        if expires is not None and not isinstance(expires, list):
            expires = self._due(expires)
        self._writes.put_rows(keys, values, expires, rows)

    def delete_rows(self, keys: Sequence[bytes], spans: Sequence[tuple[bytes, bytes]] = ()) -> None:
        """Delete keys and spans of keys of a table: see `kvstore.tables`."""
        for start, end in spans:
            self._writes.delete_row_range(start, end)
        self._writes.delete_rows(keys)

    def require(self, check: Callable[[], None]) -> None:
        """Call `check` under the commit lock, right before the commit. It may raise to call the
        commit off."""
        self._checks.append(check)

    def __repr__(self) -> str:
        if self.timestamp is not None:
            return f"<kvstore.Batch, committed at {self.timestamp}>"
        if self._writes is _ENDED:
            return "<kvstore.Batch, ended without a commit>"
        return f"<kvstore.Batch of {self._writes.told()}>"

    def __enter__(self) -> Batch:
        self._writes.require_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        writes, self._writes = self._writes, _ENDED
        if error is None and writes:
            how = {"check": self._check} if self._checks else {}  # a client's commit has no checks
            self.timestamp = self._commit(writes, **how)

    def _check(self) -> None:
        for check in self._checks:
            check()


def trim(
    store: Any, prefixes: bytes | Sequence[bytes], keep: int, durability: Durability | None
) -> Timestamp | None:
    """See `Store.trim`. `store` is a store or a client of one."""
    keep = NUMBER.check("keep", keep)
    with store.batch(durability=durability) as batch:
        for prefix in [prefixes] if isinstance(prefixes, BytesLike) else key_list(prefixes):
            last = list(store.keys(prefix=prefix, reverse=True, limit=keep + 1))
            if len(last) <= keep:
                continue
            if keep:
                batch.delete_range(prefix, last[keep - 1])
            else:
                batch.delete_range(prefix=prefix)
    found: Timestamp | None = batch.timestamp
    return found


_ENDED: Final = WriteSet("the batch", size_max=-1)
