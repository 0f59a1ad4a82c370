"""Replication: a replica has the history of a store or of a collection, version for version.

    with kvstore.open("live") as live:
        backup.replicate(live, "replica", follow=True, stop=stop)

The first copy is built from sorted files, beside its place, and appears there as a whole. From
then on the replica takes window after window. Its own durable `upper` is the position: whichever
side crashes, the next run continues there. A hold on the live store keeps the history that the
replica lacks.

The replica serves reads meanwhile; `store.replication.promote()` makes it an ordinary store.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, suppress
from functools import partial
from itertools import chain, groupby
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

import pyarrow as pa
import pyarrow.compute as pc

import kvstore
from kvstore.backup.chains import no_backup
from kvstore.backup.collection import Collection
from kvstore.backup.restore import built_from, restore_store, version_files
from kvstore.backup.rows import exported
from kvstore.backup.shard import OP_DELETE, OP_PUT, Window
from kvstore.base.paths import is_there, require_absolute, require_parent
from kvstore.base.timestamp import AgeLike, Timestamp
from kvstore.errors import HistoryGoneError, KVStoreError, UsageError
from kvstore.feeds.replica import FirstCopy, Replica
from kvstore.limits import (
    CONTROL_POLL_S,
    REPLICA_BATCH_ROWS,
    REPLICA_WINDOW_BYTES,
    REPLICA_WINDOW_ROWS,
)
from kvstore.mvcc import OpenWriteSet, RangeTombstone, WriteSet
from kvstore.remote.control import StoreOrClient, as_store, client_of, present
from kvstore.store import Store
from kvstore.timeline.holds import REPLICA, Hold

if TYPE_CHECKING:
    from kvstore.remote.client import Client


def replicate(
    source: StoreOrClient | Collection | str,
    target: str | os.PathLike[str] | Store,
    follow: bool = False,
    *,
    stop: Stop | None = None,
    max_age: AgeLike | None = None,
    progress: Callable[[Timestamp], None] | None = None,
) -> Timestamp:
    """Bring the replica `target` up to `source`; returns the replica's `upper`.

    `source` is a live store, the client of one by its path (`kvstore.connect(path)`), or a
    collection of backups (or its URL). `target` is an open replica, which can be read meanwhile, or
    a path, where a replica is made if there is none. With `follow` the call continues until `stop`
    is set: commits of a live store are copied as they come, and a collection is polled every few
    seconds. `progress` is called with the replica's `upper` once it has caught up with the source,
    and whenever it moves on.

    A live store keeps history for its replica (hold `replica-...`), unless the replica falls
    further behind than `max_age`. Raises `UsageError` if `target` is an ordinary store, follows
    another store or is the source, if the source was put back from an older copy, or if the target
    has followed another copy of the store past a commit of the source;
    `HistoryGoneError` if the source no longer has the history that the replica lacks: make a new
    replica.
    """
    stop = stop or Stop()
    path = _path_of(target)
    live = None if isinstance(source, Collection | str) else source.path
    if live is not None and live.resolve() == path.resolve():
        raise UsageError(f"{path} is the source itself", "replicate into a path of its own")
    until, tell = stop if follow else None, progress or (lambda upper: None)
    with closing(_source(source, path, max_age)) as origin:
        if not isinstance(target, Store) and not is_there(path):
            first_copy(origin, path)
        if isinstance(target, Store):
            return _follow(origin, target, until, tell)
        with kvstore.open(path, create=False) as store:
            return _follow(origin, store, until, tell)


def first_copy(source: Source, path: Path) -> None:
    """Build a replica at `path` with the whole history of `source`. Memory is bounded."""
    source_id = source.source_id()
    with source.rows(None, source.upper()) as rows:
        upto = rows.upper - 1
        since = min(rows.whole_since, upto)
        seen = _Newest(rows.batches)
        build = partial(built_from, seen)
        copy = FirstCopy(source_id, seen.newest)
        restore_store(path, build, since=since, as_of=upto, replica_of=copy)
    source.done(upto)


def _follow(
    source: Source, target: Store, stop: Stop | None, tell: Callable[[Timestamp], None]
) -> Timestamp:
    replica = target.replication.replica()
    _require_source(source, target, replica)
    told = None
    while True:
        upper = source.upper()
        if upper > replica.upper:
            _take_window(source, target, replica, upper)
        if replica.upper != told:
            told = replica.upper
            tell(told)
        if stop is None or stop.is_set():
            return replica.upper
        source.wait(upper, stop)
        if stop.is_set():
            return replica.upper


def _require_source(source: Source, target: Store, replica: Replica) -> None:
    """Raise `UsageError` if the source is not the store that the replica follows, or has a commit
    below the replica's `upper` that the replica lacks: the replica has followed another copy of the
    store past it."""
    if replica.source != (source_id := source.source_id()):
        raise UsageError(
            f"{target.path} follows store {replica.source}, not {source_id}",
            "replicate into a path of its own",
        )
    found = source.newest_change(replica.upper)
    if found is not None and target.replication.has_change(*found) is False:
        raise UsageError(
            f"{target.path} lacks the commit of {Timestamp(found[0])}, although it reaches up to "
            f"{replica.upper}: it has followed another copy of the store, a checkpoint for example",
            "make a new replica of this source, or follow the other copy",
        )


def _take_window(source: Source, target: Store, replica: Replica, upper: int) -> None:
    """Copy `[replica.upper, upper)`: a small window in commits, a large one as sorted files."""
    # Another store or copy may have come to the path or URL of the source since the last window.
    _require_source(source, target, replica)
    last = replica.last_applied
    if last and source.lacks(last):
        raise UsageError(
            f"the source of {target.path} lacks its commit of {Timestamp(last)}: it was put back "
            "from an older copy",
            "promote the replica, or make a new one",
        )
    with source.rows(int(replica.upper) - 1, upper) as rows:
        head, rest = head_of(rows.batches)
        if rest is None:
            for commits, complete in _commits(head, upper):
                replica.apply(commits, complete)
            replica.sync()
        else:
            _ingest(target, replica, rows._replace(batches=chain(head, rest)))
    source.done(upper - 1)


def head_of(
    batches: Iterator[pa.RecordBatch],
) -> tuple[list[pa.RecordBatch], Iterator[pa.RecordBatch] | None]:
    """The first rows of a window, held in memory, and the rest; None where there is no rest."""
    held: list[pa.RecordBatch] = []
    rows = size = 0
    for batch in batches:
        held.append(batch)
        rows, size = rows + batch.num_rows, size + batch.nbytes
        if rows > REPLICA_WINDOW_ROWS or size > REPLICA_WINDOW_BYTES:
            return held, batches
    return held, None


def _commits(
    batches: list[pa.RecordBatch], upper: int
) -> Iterator[tuple[list[tuple[int, WriteSet]], int]]:
    """A window as commits in time order, grouped into writes; each comes with the `upper` that it
    completes."""
    pending: list[tuple[int, WriteSet]] = []
    count = 0
    for timestamp, rows in groupby(_by_time(batches), key=itemgetter(0)):
        if count >= REPLICA_BATCH_ROWS:
            yield pending, pending[-1][0] + 1
            pending, count = [], 0
        writes = OpenWriteSet()
        for _, op, key, value, end in rows:
            count += 1
            if op == OP_PUT:
                writes.put(key, value)
            elif op == OP_DELETE:
                writes.delete(key)
            else:
                writes.delete_range_below(key, end)
        pending.append((timestamp, writes))
    yield pending, upper


def _by_time(batches: list[pa.RecordBatch]) -> Iterable[tuple[int, int, bytes, bytes, bytes]]:
    if not batches:
        return ()
    table = pa.Table.from_batches(batches)
    table = table.take(pc.sort_indices(table, [("timestamp", "ascending"), ("key", "ascending")]))
    names = ("timestamp", "op", "key", "value", "end_key")
    return zip(*(table.column(name).to_pylist() for name in names), strict=True)


def _ingest(target: Store, replica: Replica, rows: SourceWindow) -> None:
    assert target.path is not None
    place = target.path.parent
    # Not `TemporaryDirectory`: the exit of a forked child would remove that.
    building = Path(tempfile.mkdtemp(prefix=f".{target.path.name}.taking-", dir=place))
    try:
        tombstones: list[RangeTombstone] = []
        seen = _Newest(rows.batches)
        files = (path for path, _ in version_files(building, seen, tombstones))
        replica.ingest(files, lambda: tombstones, seen.newest, rows.upper)
    finally:
        shutil.rmtree(building, ignore_errors=True)


class _Newest:
    """Batches of versions. `newest` gives the newest time in the batches so far, or 0."""

    def __init__(self, batches: Iterator[pa.RecordBatch]) -> None:
        self._batches = batches
        self._newest = 0

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        for batch in self._batches:
            found = pc.max(batch.column("timestamp")).as_py()
            self._newest = max(self._newest, found or 0)
            yield batch

    def newest(self) -> int:
        """The newest time in the batches so far; 0 where no batch had a row."""
        return self._newest


def _path_of(target: str | os.PathLike[str] | Store) -> Path:
    if isinstance(target, Store):
        if target.path is None:
            raise UsageError("a store in memory is no replica", "replicate to a path")
        return target.path
    path = require_absolute(target)
    if not is_there(path):
        require_parent(path)
    return path


def _source(
    source: StoreOrClient | Collection | str, path: Path, max_age: AgeLike | None
) -> Source:
    if isinstance(source, Collection | str):
        return CollectionSource(Collection(source) if isinstance(source, str) else source)
    source = present(source)
    # Named after the target's place, so that a repeated first copy finds its own hold.
    name = f"replica-{hashlib.blake2b(os.fsencode(path.resolve()), digest_size=6).hexdigest()}"
    client = client_of(source)
    if client is not None:
        return ClientSource(client, name, max_age=max_age, address=str(path.absolute()))
    assert isinstance(source, Store)
    return StoreSource(source, name, max_age=max_age, address=str(path.absolute()))


# --------------------------------------------------------------------------------------------------
# Sources of a replica: a live store, or a collection of its backups, behind one interface.

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

    def __init__(self, store: Store, hold: str, *, max_age: AgeLike | None, address: str) -> None:
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

    def __init__(self, client: Client, hold: str, *, max_age: AgeLike | None, address: str) -> None:
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
