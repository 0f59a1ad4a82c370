"""A batch: writes that take effect together, at one timestamp, or not at all."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Final

from kvstore.limits import BATCH_BYTES_MAX
from kvstore.mvcc.write import WriteSet
from kvstore.timestamp import Timestamp


class Batch:
    """Collects writes; leaving the `with` block commits them, an exception drops them all.

    `timestamp` is set once committed; None for a batch that was empty or dropped.
    """

    def __init__(self, commit: Callable[[WriteSet], Timestamp]) -> None:
        self._commit = commit
        self._writes = WriteSet("the batch", BATCH_BYTES_MAX)
        self.timestamp: Timestamp | None = None

    def put(self, key: bytes, value: bytes) -> None:
        """Set `key` to `value`. The last write to a key in the batch wins."""
        self._writes.put(key, value)

    def delete(self, key: bytes) -> None:
        """Delete `key`, whether or not it is there."""
        self._writes.delete(key)

    def delete_range(self, start: bytes, end: bytes) -> None:
        """Delete `start <= key < end`, the batch's own writes so far included.

        Writes made after it win: delete and put again to replace a range atomically.
        """
        self._writes.delete_range(start, end)

    def __enter__(self) -> Batch:
        self._writes.require_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        writes, self._writes = self._writes, _ENDED
        if error is None and writes:
            self.timestamp = self._commit(writes)


_ENDED: Final = WriteSet("the batch", size_max=-1)
