"""A batch of a client: writes that are sent together."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import TracebackType

from kvstore.client.calls import Operation
from kvstore.errors import ClosedError, UsageError
from kvstore.limits import SERVER_BODY_BYTES_MAX
from kvstore.protocol import WriteOp
from kvstore.span import Span, require_key
from kvstore.timestamp import Timestamp


class ClientBatch:
    """Collects writes; leaving the `with` block sends them, an exception drops them all.

    `timestamp` is set once committed; None for a batch that was empty or dropped.
    """

    def __init__(self, commit: Callable[[Iterable[Operation]], Timestamp | None]) -> None:
        self._commit = commit
        self._operations: list[Operation] | None = []
        self._size = 0
        self.timestamp: Timestamp | None = None

    def put(self, key: bytes, value: bytes) -> None:
        """Set `key` to `value`. The last write to a key in the batch wins."""
        if not isinstance(value, bytes):
            raise UsageError(f"value must be bytes, not {type(value).__name__}", "encode it")
        self._add(WriteOp.PUT, require_key(key), None, value)

    def delete(self, key: bytes) -> None:
        """Delete `key`, whether or not it is there."""
        self._add(WriteOp.DELETE, require_key(key), None, None)

    def delete_range(self, start: bytes, end: bytes) -> None:
        """Delete `start <= key < end`, the batch's own writes so far included."""
        span = Span(start, end)
        if span.end is None:
            raise UsageError("delete_range needs an end", "pass the least key that is to be kept")
        self._add(WriteOp.DELETE_RANGE, span.start, span.end, None)

    def _add(self, op: WriteOp, key: bytes, end: bytes | None, value: bytes | None) -> None:
        if self._operations is None:
            raise ClosedError("the batch")
        self._size += len(key) + len(end or b"") + len(value or b"") + 16
        if self._size > SERVER_BODY_BYTES_MAX:
            raise UsageError(
                f"the batch has {self._size} bytes, at most {SERVER_BODY_BYTES_MAX} travel",
                "commit smaller ones, or import the data (bulk.Import)",
            )
        self._operations.append((op, key, end, value))

    def __enter__(self) -> ClientBatch:
        if self._operations is None:
            raise ClosedError("the batch")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        operations, self._operations = self._operations, None
        if error is None and operations:
            self.timestamp = self._commit(operations)
