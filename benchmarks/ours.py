"""kvstore as a subject: with its defaults, and in the states that its promises name."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path

import pyarrow as pa

import kvstore
import kvstore.mvcc
from benchmarks.data import Data
from benchmarks.raw import in_threads, incompressible
from benchmarks.subject import BackedUp, Work, tree_bytes
from kvstore import backup, bulk
from kvstore.mvcc.arrow import rows_schema

_FILL_ROWS = 10_000
_INCREMENT_ROWS = 100


def batches(data: Data, first: int, last: int) -> list[pa.RecordBatch]:
    """The rows from `first` to `last`, in batches as a loader writes them."""
    columns = {"key": data.keys[first:last], "value": data.values[first:last]}
    return pa.table(columns, schema=rows_schema()).to_batches(max_chunksize=16_384)


def _write_part(
    staging: Path, import_id: int, rows: int, first: int, last: int, pipe: Connection
) -> None:
    """Write the rows from `first` to `last` as a part when the pipe says so. Runs in a process."""
    share = batches(Data(rows), first, last)
    pipe.send("ready")
    pipe.recv()
    with bulk.PartWriter(staging, import_id) as writer:
        for batch in share:
            writer.write(batch)
        pipe.send(writer.finish())


class Ours(BackedUp):
    """A store that was filled by commits."""

    name = "kvstore"
    tombstones = 0
    """How many range tombstones cover the rows. They are older than the rows and hide none, but
    each read has to look at them. One more is newer than all rows and lies between two keys, so
    that no read can skip the tombstones by time alone."""

    def __init__(self, directory: Path, data) -> None:
        super().__init__(directory, data)
        self.store: kvstore.Store | None = None
        self.taking: kvstore.Store | None = None
        self.collection: backup.Collection | None = None

    def now(self) -> kvstore.Timestamp:
        return kvstore.Timestamp(self.store.sync() - 1)

    # -- writing --------------------------------------------------------------------------

    def fill(self) -> Work:
        def work() -> int:
            self.close()
            self.store = kvstore.open(self.fresh("db"))
            keys, values = self.data.keys, self.data.values
            for start, end in self._deleted_before():
                self.store.delete_range(start, end, durability="async")
            for at in range(0, len(keys), _FILL_ROWS):
                with self.store.batch(durability="async") as batch:
                    for key, value in zip(
                        keys[at : at + _FILL_ROWS], values[at : at + _FILL_ROWS], strict=True
                    ):
                        batch.put(key, value)
            if self.tombstones:
                self.store.delete_range(keys[-2] + b"\x00", keys[-1], durability="async")
            self.store.sync()
            return len(keys)

        return work

    def _deleted_before(self) -> list[tuple[bytes, bytes]]:
        if self.tombstones <= 1:
            return [(b"", b"\xff" * 17)] * self.tombstones
        keys, step = self.data.keys, self.data.rows // self.tombstones
        return [(keys[at], keys[at + step - 1]) for at in range(0, step * self.tombstones, step)]

    def settle(self) -> Work:
        def work() -> int:
            for family in ("data", "changes", "meta", "ranges"):
                self.store._engine.compact(family)
            return 1

        return work

    def commit(self, rows: int, count: int, step: int) -> Work:
        sets = [self.data.updates(rows, step * 1000 + number) for number in range(count)]

        def work() -> int:
            for keys, values in sets:
                with self.store.batch(durability="sync") as batch:
                    put = batch.put
                    for key, value in zip(keys, values, strict=True):
                        put(key, value)
            return rows * count

        return work

    def commit_threads(self, rows: int, count: int, threads: int, step: int) -> Work:
        sets = [self.data.updates(rows, step * 1000 + number) for number in range(count)]

        def writer(number: int) -> None:
            for keys, values in sets[number::threads]:
                with self.store.batch(durability="group") as batch:
                    put = batch.put
                    for key, value in zip(keys, values, strict=True):
                        put(key, value)

        def work() -> int:
            crew = [threading.Thread(target=writer, args=(n,)) for n in range(threads)]
            for thread in crew:
                thread.start()
            for thread in crew:
                thread.join()
            return rows * count

        return work

    def bulk_load(self) -> Work:
        rows = batches(self.data, 0, self.data.rows)
        staging, target = self.fresh("bulk-staging"), self.fresh("bulk")

        def work() -> int:
            load = bulk.Import.create(staging)
            with load.writer() as writer:
                for batch in rows:
                    writer.write(batch)
            load.seal()
            with kvstore.open(target) as store:
                bulk.ingest(store, staging, move=True)
            return self.data.rows

        return work

    def bulk_load_parts(self, workers: int) -> Work:
        """Load all rows by `workers` processes that have been started before, a share each."""
        staging, target = self.fresh("bulk-staging"), self.fresh("bulk")
        load = bulk.Import.create(staging)
        context = multiprocessing.get_context("spawn")
        pipes = []
        for number in range(workers):
            near, far = context.Pipe()
            piece = [self.data.rows * n // workers for n in (number, number + 1)]
            crew = (staging, load.import_id, self.data.rows, *piece, far)
            context.Process(target=_write_part, args=crew, daemon=True).start()
            far.close()
            pipes.append(near)
        for pipe in pipes:
            assert pipe.recv() == "ready"

        def work() -> int:
            for pipe in pipes:
                pipe.send("write")
            parts = [pipe.recv() for pipe in pipes]
            load.seal(parts)
            with kvstore.open(target) as store:
                bulk.ingest(store, staging, move=True)
            return sum(part.rows for part in parts)

        return work

    def ingest(self, megabytes: int) -> Work:
        """Add one sealed import of `megabytes`."""
        staging = self.fresh("ingest-staging")
        load = bulk.Import.create(staging)
        with load.writer(compression="none") as writer:
            for key, value in zip(*incompressible(megabytes), strict=True):
                writer.put(key, value)
        load.seal()
        return self._ingesting(staging)

    def ingest_rows(self) -> Work:
        """Add one sealed import of all rows. Built once; each call adds links to its files."""
        built, staging = self.directory / "ingest-built", self.fresh("ingest-staging")
        if not built.exists():
            load = bulk.Import.create(built)
            with load.writer() as writer:
                for key, value in zip(self.data.keys, self.data.values, strict=True):
                    writer.put(key, value)
            load.seal()
        staging.mkdir()
        for file in built.iterdir():
            os.link(file, staging / file.name)
        return self._ingesting(staging)

    def _ingesting(self, staging: Path) -> Work:
        if self.taking is not None:
            self.taking.close()
        self.taking = kvstore.open(self.fresh("ingest"))

        def work() -> int:
            bulk.ingest(self.taking, staging, move=True)
            return 1

        return work

    def transact(self, count: int, threads: int, synced: bool, step: int) -> Work:
        durability = "group" if synced else "async"

        def put(key: bytes, value: bytes) -> None:
            with self.store.transaction(durability=durability) as txn:
                txn.get(key)
                txn.put(key, value)

        return in_threads(put, self.data.updates(count, step), threads)

    def put_each(self, count: int, step: int) -> Work:
        return in_threads(
            partial(self.store.put, durability="async"), self.data.updates(count, step), 1
        )

    def update_each(self, count: int, step: int) -> Work:
        """As `put_each`, each with a look at the value before."""

        def update(key: bytes, value: bytes) -> None:
            self.store.update(key, lambda _: value, durability="async")

        return in_threads(update, self.data.updates(count, step), 1)

    def deliver(self, count: int, step: int) -> Work:
        """Durable puts, each delivered to a following thread; the next put awaits its answer."""
        rows = self.data.updates(count, step)
        feed = self.store.feed("latency", start=self.now())
        answered = threading.Semaphore(0)

        def consume() -> None:
            left = count
            for batch in feed.batches(follow=True):
                for _ in batch.events:
                    answered.release()
                    left -= 1
                if not left:
                    return

        def work() -> int:
            consumer = threading.Thread(target=consume)
            consumer.start()
            for key, value in zip(*rows, strict=True):
                self.store.put(key, value, durability="sync")
                answered.acquire()
            consumer.join()
            self.store.feeds.drop("latency")
            return count

        return work

    # -- backups --------------------------------------------------------------------------

    def increment(self, rows: int, is_single: bool) -> Work:
        """An incremental backup by a handle that stays open; `is_single` opens a new handle, as a
        script does, which has to read the collection's state first."""
        if is_single or self.collection is None:
            self.collection = backup.Collection(str(self.directory / "backup"))
        collection = self.collection
        return lambda: collection.backup(self.store).rows

    def backup_full(self, step: int) -> Work:
        """The first backup into a collection, each at a place of its own: the store refuses a known
        place whose backups are gone."""
        collection = backup.Collection(str(self.fresh(f"backup-full-{step}")))
        rows = self.data.rows

        def work() -> int:
            found = collection.backup(self.store).rows
            assert found >= rows, "history is backed up too"
            return rows

        return work

    def restore(self, is_compacted: bool = False) -> Work:
        """Restore the newest state of the collection into a new store."""
        collection = backup.Collection(str(self.directory / "backup"))
        if is_compacted:
            collection.compact()
        target = self.fresh("restored")

        def work() -> int:
            collection.restore(target, history=False)
            return self.data.rows

        return work

    def scan_collection(self, as_of: str) -> Work:
        """Scan a collection as of a time before its last change."""
        collection = backup.Collection(str(self.directory / "scanned"))
        if not (self.directory / "scanned").exists():
            collection.backup(self.store)
        at = self.marks[as_of]
        return lambda: sum(b.num_rows for b in collection.scan_batches(as_of=at))

    def increments(self, action: str, count: int) -> Work:
        """Do `action` to a collection of `count` small backups. Items are its bytes."""
        home = self.directory / f"increments-{count}"
        if not home.exists():
            self._back_up_often(home, count)
        collection = backup.Collection(str(home / "collection"))
        size, restored = collection.show().bytes, self.fresh(f"restored-{count}")
        actions = {
            "list": collection.list,
            "verify": collection.verify,
            "restore": lambda: collection.restore(restored),
        }

        def work() -> int:
            actions[action]()
            return size

        return work

    def _back_up_often(self, home: Path, count: int) -> None:
        collection = backup.Collection(str(home / "collection"))
        with kvstore.open(home / "store", durability="async") as store:
            for number in range(count):
                keys, values = self.data.updates(_INCREMENT_ROWS, number)
                with store.batch() as batch:
                    for key, value in zip(keys, values, strict=True):
                        batch.put(key, value)
                collection.backup(store)

    # -- giving up ------------------------------------------------------------------------

    def gc(self, rows: int, step: int) -> Work:
        """Remove the versions that a commit of `rows` updates superseded."""
        self._give_up_history()
        self.commit(rows, 1, step)()
        before = self.now()

        def work() -> int:
            report = self.store.gc(before=before)
            assert not report.held_back
            return report.versions

        return work

    def delete_range(self, rows: int, count: int) -> Work:
        """Delete one range again and again. Rows below a range tombstone cost it nothing."""
        start, end = self.data.middle(rows) if rows < self.data.rows else (b"", b"\xff" * 17)

        def work() -> int:
            for _ in range(count):
                self.store.delete_range(start, end, durability="sync")
            return count

        return work

    # -- reading --------------------------------------------------------------------------

    def get(self, count: int, step: int, as_of: str | None = None) -> Work:
        wanted = self.data.lookups(count, step)
        at = None if as_of is None else self.marks[as_of]

        def work() -> int:
            get = self.store.get
            found = 0
            for key in wanted:
                if get(key, at) is not None:
                    found += 1
            return found

        return work

    def get_many(self, count: int, step: int, as_of: str | None = None) -> Work:
        wanted = sorted(self.data.lookups(count, step))
        at = None if as_of is None else self.marks[as_of]
        return lambda: sum(v is not None for v in self.store.get_many(wanted, at))

    def scan(self, as_of: str | None = None) -> Work:
        at = None if as_of is None else self.marks[as_of]

        def work() -> int:
            count = 0
            for _key, _value in self.store.scan(as_of=at):
                count += 1
            return count

        return work

    def scan_arrow(self, as_of: str | None = None, workers: int = 1) -> Work:
        at = None if as_of is None else self.marks[as_of]
        if workers > 1:  # the start of processes is not timed: a service has them already
            assert sum(b.num_rows for b in self.store.scan_batches(workers=workers))
        return lambda: sum(b.num_rows for b in self.store.scan_batches(as_of=at, workers=workers))

    def changes(self, windows: int) -> Work:
        return self._in_windows(
            windows, lambda *times: sum(1 for _ in self.store.changes(*times, order="time"))
        )

    def changes_by_key(self, windows: int) -> Work:
        return self._in_windows(windows, lambda *times: sum(1 for _ in self.store.changes(*times)))

    def changes_arrow(self, windows: int) -> Work:
        return self._in_windows(
            windows, lambda *times: sum(b.num_rows for b in self.store.changes_batches(*times))
        )

    def changes_events(self, windows: int) -> Work:
        return self._in_windows(windows, lambda *times: sum(1 for _ in self.store.events(*times)))

    def changes_feed(self, windows: int) -> Work:
        """Read windows through a feed that starts over, until all changes are acknowledged."""

        def work() -> int:
            feed = self.store.feed("benchmark", start=self.marks["window-0"])
            found = sum(len(batch.events) for batch in feed)
            feed.ack(feed.position)
            return found

        return work

    def _in_windows(self, windows: int, read: Callable[..., int]) -> Work:
        """Read the changes after each mark, up to the next."""
        times = [self.marks[f"window-{number}"] for number in range(windows)] + [self.now()]
        return lambda: sum(read(*window) for window in pairwise(times))

    def _give_up_history(self) -> None:
        """Give up all versions and changes but the newest."""
        if any(hold.name == "feed/benchmark" for hold in self.store.holds.all()):
            self.store.feeds.drop("benchmark")
        self.store.gc(before=self.now())

    def disk(self) -> Work:
        return lambda: tree_bytes(self.directory / "db")

    def disk_trimmed(self) -> Work:
        """Bytes once history and the change log are given up to the present."""
        self._give_up_history()
        self.settle()()
        return self.disk()

    def close(self) -> None:
        if self.store is not None:
            self.store.close()
            self.store = None
