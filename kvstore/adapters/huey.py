"""The storage of Huey's queues, schedules and results in a store.

    huey = KVStoreHuey("mail", where="tasks.db")

Keys, below the prefix and the name of the queue:

    q | priority, greatest first | time | number        a task that waits
    s | time | number                                   a task that is due then
    d | key                                             a result, a lock, a revoked task
    n | key                                             a counter

Invariants
1. A task is taken by one worker of all: who deletes its key has it.
2. Nothing is lost: a task is durable when `enqueue` returns.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator
from datetime import datetime, timedelta, timezone
from typing import Any, Final

from huey.api import Huey
from huey.constants import EmptyData
from huey.storage import BaseStorage

from kvstore.codec.tuples import desc, encode_tuple
from kvstore.errors import PreconditionError
from kvstore.remote.control import StoreOrClient
from kvstore.remote.handle import Handle, Where
from kvstore.transaction import Transaction

_TAKEN_AT_ONCE: Final = 256
"""Tasks that this process takes between two range deletes over the place where they stood. A look
for the next task would pass all their deletions otherwise."""
_DUE_AT_ONCE: Final = 1000
"""Due tasks that one commit moves out of the schedule."""


class KVStoreStorage(BaseStorage):
    """`where` is the path of a store, the URL of a server, or an open store. All processes that
    name it share its queues."""

    def __init__(
        self,
        name: str = "huey",
        where: Where | Handle | None = None,
        *,
        prefix: str = "huey/",
        token: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(name, **options)
        self.handle = Handle.of(where if where is not None else f"{name}.db", token=token)
        below = prefix.encode() + encode_tuple((name,))
        self._queue, self._schedule, self._data, self._counters = (
            below + kind for kind in (b"q", b"s", b"d", b"n")
        )
        self._numbers = itertools.count()
        self._taken = 0

    @property
    def store(self) -> StoreOrClient:
        """The store, or the client of it."""
        return self.handle.store

    def close(self) -> None:
        """Let the store go; see `Handle.close`."""
        self.handle.close()

    # -- the queue --------------------------------------------------------------------------

    def enqueue(self, data: bytes, priority: float | None = None) -> None:
        """Add a task."""
        place = (desc(float(priority or 0)), time.time_ns(), next(self._numbers))
        self.store.put(self._queue + encode_tuple(place), data)

    def dequeue(self) -> bytes | None:
        """Take the task that is next; None if there is none."""
        while True:
            key = next(iter(self.store.keys(prefix=self._queue, limit=1)), None)
            if key is None:
                return None
            data = self.store.pop(key)
            if data is not None:  # otherwise another worker was faster
                self._note_taken()
                return data

    def queue_size(self) -> int:
        """The number of tasks that wait."""
        return self.store.count(prefix=self._queue)

    def enqueued_items(self, limit: int | None = None) -> list[bytes]:
        """The tasks that wait, in their order."""
        return _values(self.store.scan(prefix=self._queue, limit=limit))

    def flush_queue(self) -> None:
        """Drop all tasks that wait."""
        self.store.delete_range(prefix=self._queue)

    def _note_taken(self) -> None:
        self._taken += 1
        if self._taken % _TAKEN_AT_ONCE:
            return

        def cover(transaction: Transaction) -> None:
            first = next(transaction.scan(prefix=self._queue, limit=1), None)
            if first is None:
                transaction.delete_range(prefix=self._queue)
            elif first[0] > self._queue:
                transaction.delete_range(self._queue, first[0])

        self.store.transact(cover, attempts=_TAKEN_AT_ONCE)

    # -- the schedule -----------------------------------------------------------------------

    def add_to_schedule(self, data: bytes, ts: datetime) -> None:
        """Add a task that is due at a time."""
        place = (_instant(ts), time.time_ns(), next(self._numbers))
        self.store.put(self._schedule + encode_tuple(place), data)

    def read_schedule(self, ts: datetime) -> list[bytes]:
        """Take the tasks that are due, at most a thousand by one commit."""
        end = self._schedule + encode_tuple((_instant(ts) + timedelta(microseconds=1),))

        def take(transaction: Transaction) -> list[bytes]:
            rows = list(transaction.scan(self._schedule, end, limit=_DUE_AT_ONCE))
            for key, _ in rows:
                transaction.delete(key)
            return [data for _, data in rows]

        found: list[bytes] = []
        while some := self.store.transact(take, attempts=_DUE_AT_ONCE):
            found += some
        return found

    def schedule_size(self) -> int:
        """The number of tasks in the schedule."""
        return self.store.count(prefix=self._schedule)

    def scheduled_items(self, limit: int | None = None) -> list[bytes]:
        """The tasks in the schedule, soonest first."""
        return _values(self.store.scan(prefix=self._schedule, limit=limit))

    def flush_schedule(self) -> None:
        """Drop the schedule."""
        self.store.delete_range(prefix=self._schedule)

    # -- results and counters ---------------------------------------------------------------

    def put_data(self, key: Any, value: bytes, is_result: bool = False) -> None:
        """Set a key."""
        self.store.put(self._data + _bytes(key), value)

    def peek_data(self, key: Any) -> Any:
        """The value of a key, or `EmptyData`."""
        return self.store.get(self._data + _bytes(key), default=EmptyData)

    def peek_many(self, keys: Iterable[Any]) -> dict[Any, bytes]:
        """The values of those keys that are there, by one call."""
        wanted = list(keys)
        values = self.store.get_many([self._data + _bytes(key) for key in wanted])
        return {key: each for key, each in zip(wanted, values, strict=True) if each is not None}

    def pop_data(self, key: Any) -> Any:
        """Delete a key and return its value, or `EmptyData`. One of many callers gets it."""
        value = self.store.pop(self._data + _bytes(key))
        return EmptyData if value is None else value

    def wait_result(
        self,
        key: Any,
        timeout: float | None = None,
        backoff: float = 1.15,
        max_delay: float = 1.0,
    ) -> bool:
        """Wait until a key is there. Nothing is polled: commits wake the call."""
        ends_at = None if timeout is None else time.monotonic() + timeout
        while True:
            seen = self.store.upper
            if self.has_data_for_key(key):
                return True
            left = None if ends_at is None else ends_at - time.monotonic()
            if left is not None and left <= 0:
                return False
            self.store.wait_beyond(seen, timeout=left)

    def has_data_for_key(self, key: Any) -> bool:
        """Whether a key is there."""
        return self.store.get(self._data + _bytes(key)) is not None

    def put_if_empty(self, key: Any, value: bytes, ttl: float | None = None) -> bool:
        """Set a key that is absent, until `ttl` seconds from now. One of many callers does."""
        expires = None if ttl is None else timedelta(seconds=ttl)
        try:
            self.store.put_if(self._data + _bytes(key), value, None, expires=expires)
        except PreconditionError:
            return False
        return True

    def incr(self, key: Any, amount: int = 1) -> int:
        """Add to a counter, and return the sum."""
        return self.store.increment(self._counters + _bytes(key), amount)

    def delete_counter(self, key: Any) -> None:
        """Delete a counter."""
        self.store.delete(self._counters + _bytes(key))

    def result_store_size(self) -> int:
        """The number of keys."""
        return self.store.count(prefix=self._data)

    def result_items(self) -> dict[str, bytes]:
        """All keys with their values."""
        rows = self.store.scan(prefix=self._data)
        return {key[len(self._data) :].decode(): value for key, value in rows}

    def flush_results(self) -> None:
        """Delete all keys."""
        self.store.delete_range(prefix=self._data)

    def flush_counters(self) -> None:
        """Delete all counters."""
        self.store.delete_range(prefix=self._counters)


class KVStoreHuey(Huey):
    """Huey with this storage: `KVStoreHuey("mail", where="tasks.db")`."""

    storage_class = KVStoreStorage


def _bytes(key: Any) -> bytes:
    return key.encode() if isinstance(key, str) else bytes(key)


def _values(rows: Iterator[tuple[bytes, bytes]]) -> list[bytes]:
    return [value for _, value in rows]


def _instant(ts: datetime) -> datetime:
    """Huey's times have no zone: they are UTC, or local in all processes alike."""
    return ts if ts.tzinfo is not None else ts.replace(tzinfo=timezone.utc)
