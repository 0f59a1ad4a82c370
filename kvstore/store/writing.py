"""Writing to a store: puts, deletes, batches, conditional writes, transactions."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from kvstore.batch import Batch
from kvstore.commit import Durability, require_durability
from kvstore.mvcc import WriteSet
from kvstore.span import Span
from kvstore.store.reading import Reading
from kvstore.timestamp import TimeLike, Timestamp, to_timestamp
from kvstore.txn import UNCHECKED, Transaction, Unchecked, transact

T = TypeVar("T")


class Writing(Reading):
    """Writes: each takes effect at one time, whole."""

    def put(self, key: bytes, value: bytes, *, durability: Durability | None = None) -> Timestamp:
        """Set `key`; returns the commit's timestamp. Never reads. `durability` as in `open`."""
        writes = WriteSet()
        writes.put(key, value)
        return self._committer.commit(writes, durability=durability)

    def delete(self, key: bytes, *, durability: Durability | None = None) -> Timestamp:
        """Delete `key`, whether or not it is there; its history stays. Never reads."""
        writes = WriteSet()
        writes.delete(key)
        return self._committer.commit(writes, durability=durability)

    def delete_range(
        self,
        start: bytes,
        end: bytes,
        idempotent: bool = False,
        *,
        durability: Durability | None = None,
    ) -> Timestamp | None:
        """Delete all keys `start <= key < end`; history stays. One write, whatever it covers.

        With `idempotent`, only if something in the span is alive; None if nothing was. That
        looks for the first live key of the span.
        """
        writes = WriteSet()
        writes.delete_range(start, end)
        committer = self._live()
        if idempotent:
            span = Span(start, end)
            return self._conditional.delete_live_range(writes, span, durability=durability)
        return committer.commit(writes, durability=durability)

    def put_if(
        self,
        key: bytes,
        value: bytes,
        expected: bytes | Unchecked | None = UNCHECKED,
        *,
        unchanged_since: TimeLike | None = None,
        durability: Durability | None = None,
    ) -> Timestamp:
        """Set `key` if its value is `expected` (None: if it is absent), and, where
        `unchanged_since` is given, if nothing was written to it after that time.

        Raises `PreconditionError`, with nothing written, if it is not so.
        """
        writes = WriteSet()
        writes.put(key, value)
        return self._write_if(writes, key, expected, unchanged_since, durability)

    def delete_if(
        self,
        key: bytes,
        expected: bytes | Unchecked | None = UNCHECKED,
        *,
        unchanged_since: TimeLike | None = None,
        durability: Durability | None = None,
    ) -> Timestamp:
        """Delete `key` on a condition, as `put_if`."""
        writes = WriteSet()
        writes.delete(key)
        return self._write_if(writes, key, expected, unchanged_since, durability)

    def pop(self, key: bytes, *, durability: Durability | None = None) -> bytes | None:
        """Delete `key` and return what it was; None, with nothing written, if it was absent."""
        self._live()
        return self._conditional.pop(key, durability=durability)

    def transaction(self, *, durability: Durability | None = None) -> Transaction:
        """A serialisable transaction: `with store.transaction() as txn: ...` commits at its end.

        Raises `ConflictError` there, with nothing written, if others wrote what it read.
        """
        self._live()
        if durability is not None:
            require_durability(durability)
        return self._transactions.begin(durability=durability)

    def transact(
        self,
        body: Callable[[Transaction], T],
        *,
        attempts: int | None = None,
        wait: Callable[[float], None] = time.sleep,
        durability: Durability | None = None,
    ) -> T:
        """Run `body` in a transaction, again after each conflict; returns its result.

        `body` may run several times. Raises the last `ConflictError` after `attempts`, by default
        those of `kvstore.limits`.
        """
        begin = partial(self.transaction, durability=durability)
        return transact(begin, body, attempts=attempts, wait=wait)

    def batch(self, *, durability: Durability | None = None) -> Batch:
        """Writes that take effect together: `with store.batch() as b: b.put(...)`."""
        self._live()
        if durability is not None:
            require_durability(durability)
        return Batch(lambda writes: self._live().commit(writes, durability=durability))

    def revert_import(self, import_id: int) -> Timestamp:
        """Undo an import from now on; its history stays. One record, whatever its size.

        Raises `UsageError` for an import that was not added here, `HistoryGoneError` for one that
        was added at or below `since`. Reverting twice returns the first time.
        """
        self._live()
        return self.imports.revert(import_id)

    def _write_if(
        self,
        writes: WriteSet,
        key: bytes,
        expected: bytes | Unchecked | None,
        unchanged_since: TimeLike | None,
        durability: Durability | None,
    ) -> Timestamp:
        self._live()
        since = None
        if unchanged_since is not None:
            since = to_timestamp(unchanged_since, name="unchanged_since")
        return self._conditional.write_if(
            writes, key, expected=expected, unchanged_since=since, durability=durability
        )
