"""Sources of a replica: a live store, or a collection of its backups, behind one interface."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple, Protocol

import pyarrow as pa

from backup.chains import no_backup
from backup.collection import Collection
from backup.export import exported
from backup.shard import Window
from kvstore.claims import REPLICA
from kvstore.control.scripts import as_store
from kvstore.errors import HistoryGoneError, KVStoreError
from kvstore.holds import Hold
from kvstore.limits import CONTROL_POLL_S
from kvstore.store import Store
from kvstore.timestamp import Timestamp

if TYPE_CHECKING:
    from kvstore.client import Client

POLL_SECONDS = 5.0
"""How often a collection is polled: storage sends no news, and backups come by the minute."""


class Stop:
    """Ends a call of `replicate(follow=True)` from another thread, at once."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._wakes: list[Callable[[], None]] = []

    def set(self) -> None:
        """Stop the call. Setting it twice does nothing more."""
        self._event.set()
        for wake in list(self._wakes):
            wake()

    def is_set(self) -> bool:
        """Whether it was set."""
        return self._event.is_set()

    def wait(self, seconds: float) -> bool:
        """Wait until it is set, `seconds` at most; returns whether it is set."""
        return self._event.wait(seconds)

    def wakes(self, wake: Callable[[], None]) -> None:
        """Have `set` call `wake`."""
        if wake not in self._wakes:
            self._wakes.append(wake)


class SourceWindow(NamedTuple):
    """The sorted versions of a window that ends below `upper`, whole from `whole_since` on."""

    whole_since: int
    upper: int
    batches: Iterator[pa.RecordBatch]


class Source(Protocol):
    """The store, or the collection of its backups, that a replica follows."""

    def source_id(self) -> str:
        """The id of the store whose history this source has."""
        ...

    def upper(self) -> int:
        """All history below can be read, and no crash of the source takes it back."""
        ...

    def lacks(self, commit: int) -> bool:
        """Whether the source surely had no commit at that time.

        A source that lacks a commit of its replica was put back from an older copy.
        """
        ...

    def newest_change(self, below: int) -> tuple[int, bytes] | None:
        """A commit below that time, the newest that the source finds without a search, and a key
        that it changed; None where it finds none.

        A replica that lacks it has followed another copy of its store meanwhile.
        """
        ...

    def rows(self, since: int | None, upper: int) -> AbstractContextManager[SourceWindow]:
        """The versions in `(since, upper)`; with `since=None` every version that is kept."""
        ...

    def done(self, upto: int) -> None:
        """Called when the replica durably has the whole history up to `upto`."""
        ...

    def wait(self, upper: int, stop: Stop) -> None:
        """Return when there may be history above `upper`, or once `stop` is set."""
        ...

    def close(self) -> None:
        """Close what this source has opened. The store or collection stays as it was."""
        ...


class StoreSource:
    """A live store. A hold keeps the history that the replica still lacks."""

    def __init__(self, store: Store, hold: str, *, max_age: timedelta | None, address: str) -> None:
        """`hold` names the hold, and `address` is shown beside it in lists of holds."""
        self._store = store
        self._name = hold
        self._address = address
        self._max_age = max_age
        self._hold: Hold | None = None

    def source_id(self) -> str:
        """See `Source.source_id`."""
        return self._store.store_id

    def upper(self) -> int:
        """See `Source.upper`. One fsync."""
        return int(self._store.sync())

    def lacks(self, commit: int) -> bool:
        """See `Source.lacks`."""
        return self._store.replication.has_commit(commit) is False

    def newest_change(self, below: int) -> tuple[int, bytes] | None:
        """See `Source.newest_change`."""
        return self._store.replication.newest_change(below)

    @contextmanager
    def rows(self, since: int | None, upper: int) -> Iterator[SourceWindow]:
        """See `Source.rows`. Raises `HistoryGoneError` if the window's history is gone.

        Where the first copy fails, a new hold is released.
        """
        undo = self._hold is None
        if self._hold is None:
            self._hold = self._store.hold(
                self._name, at=since, max_age=self._max_age, kind=REPLICA, address=self._address
            )
        try:
            if since is None:
                upper = self.upper()  # above the hold, which an earlier attempt may have taken
            found = exported(self._store, since=since, upto=upper - 1)
            undo = undo and since is None  # a first copy appears whole; later windows are added
            yield SourceWindow(found.whole_since, upper, found.rows)
        except BaseException:
            if undo and self._hold.is_new:
                with suppress(KVStoreError):  # the first error is the one to raise
                    self._hold.release()
                self._hold = None
            raise

    def done(self, upto: int) -> None:
        """See `Source.done`."""
        assert self._hold is not None
        self._hold.move(upto, durable=False)

    def wait(self, upper: int, stop: Stop) -> None:
        """See `Source.wait`. A commit wakes the call: nothing is polled."""
        stop.wakes(self._store.replication.wake)
        self._store.wait_beyond(upper, stop=stop.is_set)

    def close(self) -> None:
        """See `Source.close`."""


class ClientSource(StoreSource):
    """A live store that another process of this machine owns. Each window is read from the files
    as they are when it begins."""

    def __init__(
        self, client: Client, hold: str, *, max_age: timedelta | None, address: str
    ) -> None:
        self._client = client
        self._opened = ExitStack()
        store = self._opened.enter_context(as_store(client))
        super().__init__(store, hold, max_age=max_age, address=address)

    def upper(self) -> int:
        """See `Source.upper`. Opens the store's files anew."""
        self._opened.close()
        self._store = self._opened.enter_context(as_store(self._client))
        return super().upper()

    def wait(self, upper: int, stop: Stop) -> None:
        """See `Source.wait`. The owner is asked every `CONTROL_POLL_S`. No file of the store stays
        open meanwhile: the owner may have replaced it, and its space would not come back."""
        self._opened.close()
        while self._client.upper <= upper and not stop.wait(CONTROL_POLL_S):
            pass

    def close(self) -> None:
        """Close the files."""
        self._opened.close()


class CollectionSource:
    """A collection of backups: the replica is as fresh as the newest backup."""

    def __init__(self, collection: Collection, *, poll_seconds: float = POLL_SECONDS) -> None:
        self._collection = collection
        self._poll_seconds = poll_seconds

    def source_id(self) -> str:
        """See `Source.source_id`. Raises `UsageError` for a collection whose first backup has not
        ended."""
        found = self._collection.source
        if found is None or not self._collection.upper:
            raise no_backup(self._collection.url)
        return found

    def upper(self) -> int:
        """See `Source.upper`."""
        return int(self._collection.upper)

    def lacks(self, commit: int) -> bool:
        """See `Source.lacks`.

        A chain never loses a commit. But the newest chain may have begun after its store was put
        back from an older copy. Reads the parts of that time, unless one ends at it.
        """
        with self._collection.snapshot(None) as (shard, snapshot):
            if commit <= shard.since:
                return False
            parts = [part for batch in shard.state.batches for part in batch.parts]
            if any(part.time_max == commit for part in parts):
                return False
            return not any(rows.num_rows for rows in snapshot.view(Window(commit - 1, commit)))

    def newest_change(self, below: int) -> tuple[int, bytes] | None:
        """See `Source.newest_change`. The newest last commit of a part: the commits before the last
        one of a part are not looked for."""
        with self._collection.snapshot(None) as (shard, snapshot):
            parts = [part for batch in shard.state.batches for part in batch.parts]
            newest = max((part.time_max for part in parts if part.time_max < below), default=0)
            if newest <= shard.since:
                return None
            for rows in snapshot.view(Window(newest - 1, newest)):
                for key in rows.column("key")[:1]:
                    return newest, key.as_py()
        return None

    @contextmanager
    def rows(self, since: int | None, upper: int) -> Iterator[SourceWindow]:
        """See `Source.rows`. Raises `HistoryGoneError` if another chain has begun above `since`."""
        with self._collection.snapshot(upper - 1) as (shard, snapshot):
            if since is not None and since < shard.since:
                at, kept = Timestamp(since), Timestamp(shard.since)
                raise HistoryGoneError(
                    as_of=at, since=kept, remedy="make a new replica: this one lags"
                )
            low = -1 if since is None else since
            yield SourceWindow(shard.since, upper, snapshot.view(Window(low, upper - 1)))

    def done(self, upto: int) -> None:
        """See `Source.done`. Each window has its own snapshot: nothing is kept for the replica."""

    def wait(self, upper: int, stop: Stop) -> None:
        """See `Source.wait`."""
        while not stop.wait(self._poll_seconds) and self.upper() <= upper:
            pass

    def close(self) -> None:
        """See `Source.close`."""
