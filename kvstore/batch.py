"""A batch: writes that take effect together, at one timestamp, or not at all."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

from kvstore.errors import ClosedError, UsageError
from kvstore.limits import BATCH_BYTES_MAX, KEY_BYTES_MAX, VALUE_BYTES_MAX
from kvstore.mvcc.write import WriteSet
from kvstore.timestamp import Timestamp


class Batch:
    """Collects writes; leaving the `with` block commits them, an exception drops them all.

    `timestamp` is set once committed; None for a batch that was empty or dropped.
    """

    def __init__(self, commit: Callable[[WriteSet], Timestamp]) -> None:
        self._commit = commit
        self._writes: WriteSet | None = WriteSet()
        self.timestamp: Timestamp | None = None

    def put(self, key: bytes, value: bytes) -> None:
        """Set `key` to `value`. The last write to a key in the batch wins.

        Hot: what `WriteSet.put` does where all is well, without its call: a third less.
        """
        writes = self._writes
        if (
            writes is None
            or writes.size > BATCH_BYTES_MAX
            or type(key) is not bytes
            or type(value) is not bytes
            or len(key) > KEY_BYTES_MAX
            or len(value) > VALUE_BYTES_MAX
        ):
            self._open().put(key, value)
            return
        writes.points[key] = value
        writes.size += len(key) + len(value)

    def delete(self, key: bytes) -> None:
        """Delete `key`, whether or not it is there."""
        self._open().delete(key)

    def delete_range(self, start: bytes, end: bytes) -> None:
        """Delete `start <= key < end`, the batch's own writes so far included.

        Writes made after it win: delete and put again to replace a range atomically.
        """
        self._open().delete_range(start, end)

    def __enter__(self) -> Batch:
        self._open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        writes, self._writes = self._writes, None
        if error is None and writes:
            self.timestamp = self._commit(writes)

    def _open(self) -> WriteSet:
        if self._writes is None:
            raise ClosedError("the batch")
        if self._writes.size > BATCH_BYTES_MAX:
            raise UsageError(
                f"the batch holds {self._writes.size} bytes, at most {BATCH_BYTES_MAX} fit one",
                "commit smaller batches, or import them (bulk.Import)",
            )
        return self._writes
