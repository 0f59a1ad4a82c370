"""Replication: a replica has the history of another store, version for version.

    with kvstore.open("live") as live:
        backup.replicate(live, "replica", follow=True, stop=stop)

The first copy is built from sorted files, beside its place, and appears there as a whole. From then
on the replica takes window after window. Its own durable `upper` is the position: whichever side
crashes, the next run continues there. A hold on the live store keeps the history that the replica
lacks.

The replica serves reads meanwhile; `store.replication.promote()` makes it an ordinary store.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from datetime import timedelta
from functools import partial
from itertools import chain, groupby
from operator import itemgetter
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

import kvstore
from backup.collection import Collection
from backup.restore import built_from, restore_store, version_files
from backup.shard import OP_DELETE, OP_PUT
from backup.source import ClientSource, CollectionSource, Source, SourceWindow, Stop, StoreSource
from kvstore.arguments import is_there, require_absolute
from kvstore.control.scripts import StoreOrClient, client_of
from kvstore.errors import UsageError
from kvstore.limits import REPLICA_BATCH_ROWS, REPLICA_WINDOW_BYTES, REPLICA_WINDOW_ROWS
from kvstore.mvcc import OpenWriteSet, RangeTombstone, WriteSet
from kvstore.replica import FirstCopy, Replica
from kvstore.store import Store
from kvstore.timestamp import Timestamp


def replicate(
    source: StoreOrClient | Collection | str,
    target: str | os.PathLike[str] | Store,
    follow: bool = False,
    *,
    stop: Stop | None = None,
    max_age: timedelta | None = None,
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
    return require_absolute(target)


def _source(
    source: StoreOrClient | Collection | str, path: Path, max_age: timedelta | None
) -> Source:
    if isinstance(source, Collection | str):
        return CollectionSource(Collection(source) if isinstance(source, str) else source)
    # Named after the target's place, so that a repeated first copy finds its own hold.
    name = f"replica-{hashlib.blake2b(os.fsencode(path.resolve()), digest_size=6).hexdigest()}"
    client = client_of(source)
    if client is not None:
        return ClientSource(client, name, max_age=max_age, address=str(path.absolute()))
    assert isinstance(source, Store)
    return StoreSource(source, name, max_age=max_age, address=str(path.absolute()))
