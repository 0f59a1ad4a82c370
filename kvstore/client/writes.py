"""The writes of a client, until they are sent."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvstore.limits import BATCH_BYTES_MAX
from kvstore.mvcc import OpenWriteSet
from kvstore.tables.space import is_entry


class SentWriteSet(OpenWriteSet):
    """The writes of a client. The server makes the entries of indexes, and knows which keys belong
    to tables; a transaction of the client reads its own entries here."""

    __slots__ = ("entries", "has_rows")

    def __init__(self, whose: str = "the write set", size_max: int | None = None) -> None:
        super().__init__(whose, BATCH_BYTES_MAX if size_max is None else size_max)
        self.entries: set[bytes] = set()
        self.has_rows = False

    def put_expiring(self, key: bytes, value: bytes, due: int) -> None:
        """Set `key` to `value` until `due`, an expiry as `sent_expiry` makes it."""
        self.put(key, value)
        self._expire(bytes(key), due)

    def expiries(self) -> list[int | None]:
        """The expiry of each point."""
        expiring = self.expiring or {}
        found = ((value, expiring.get(key)) for key, value in self._points.items())
        return [None if put is None or put.marked is not value else put.due for value, put in found]

    def put_rows(
        self,
        keys: Sequence[bytes],
        values: Sequence[bytes],
        due: int | None = None,
        rows: Sequence[bytes] = (),
    ) -> None:
        """Set keys of a table, until `due`, an expiry as `sent_expiry` makes it."""
        super().put_rows(keys, values)
        if due is not None:
            for key, row in zip(keys, rows, strict=True):
                self._expire(key, due, row)
        self.has_rows = True
        self.entries.update(filter(is_entry, keys))

    def delete_rows(self, keys: Iterable[bytes]) -> None:
        """Delete keys of a table."""
        keys = list(keys)
        super().delete_rows(keys)
        self.has_rows = True
        self.entries.update(filter(is_entry, keys))
