"""The baseline: rocksdict as it is, with the store's own options and durability.

It keeps one value a key: no history, no change log, no range tombstones that can be read as of.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import SimpleQueue
from threading import Semaphore, Thread

import pyarrow as pa
import pyarrow.parquet as pq
import rocksdict as rocks

from benchmarks.subject import BackedUp, Work, tree_bytes
from kvstore.engine.rocks import family_options
from kvstore.limits import BLOCK_CACHE_BYTES
from kvstore.mvcc.arrow import rows_schema

_FILL_ROWS = 10_000


class Raw(BackedUp):
    """Plain keys in one RocksDB database."""

    name = "raw"

    def __init__(self, directory: Path, data) -> None:
        super().__init__(directory, data)
        self.db: rocks.Rdict | None = None
        self.taking: rocks.Rdict | None = None

    def now(self) -> object:
        return None

    # -- writing --------------------------------------------------------------------------

    def fill(self) -> Work:
        def work() -> int:
            self.close()
            self.db = opened_raw(self.fresh("db"))
            keys, values = self.data.keys, self.data.values
            for at in range(0, len(keys), _FILL_ROWS):
                self._write(keys[at : at + _FILL_ROWS], values[at : at + _FILL_ROWS])
            self.db.flush_wal(True)
            return len(keys)

        return work

    def settle(self) -> Work:
        def work() -> int:
            self.db.flush()
            options = rocks.CompactOptions()
            options.set_bottommost_level_compaction(rocks.BottommostLevelCompaction.force())
            self.db.compact_range(None, None, options)
            return 1

        return work

    def bulk_load(self) -> Work:
        keys, values = self.data.keys, self.data.values
        target = self.fresh("bulk")
        scratch = self.fresh("bulk-sst")
        scratch.mkdir()

        def work() -> int:
            file = scratch / "rows.sst"
            _write_sorted(file, keys, values)
            db = opened_raw(target)
            _ingest(db, [file])
            db.close()
            return len(keys)

        return work

    def ingest(self, megabytes: int) -> Work:
        """Add one prebuilt file of `megabytes` by move."""
        file = self.fresh("ingest.sst")
        _write_sorted(file, *incompressible(megabytes))
        return self._ingesting(file)

    def ingest_rows(self) -> Work:
        """Add one file of all rows by move. The file is built once; each call adds a link to it."""
        built, file = self.directory / "ingest-built.sst", self.fresh("ingest.sst")
        if not built.exists():
            _write_sorted(built, self.data.keys, self.data.values)
        os.link(built, file)
        return self._ingesting(file)

    def _ingesting(self, file: Path) -> Work:
        if self.taking is not None:
            self.taking.close()
        self.taking = opened_raw(self.fresh("ingest"))

        def work() -> int:
            _ingest(self.taking, [file])
            return 1

        return work

    def commit(self, rows: int, count: int, step: int) -> Work:
        sets = [self.data.updates(rows, step * 1000 + number) for number in range(count)]

        def work() -> int:
            for keys, values in sets:
                self._write(keys, values)
                self.db.flush_wal(True)
            return rows * count

        return work

    def put_each(self, count: int, step: int) -> Work:
        """Puts, not synced, each a batch of its own."""
        return in_threads(
            lambda key, value: self._write([key], [value]), self.data.updates(count, step), 1
        )

    def read_and_put(self, count: int, threads: int, synced: bool, step: int) -> Work:
        """Read one key and write it, `count` times, without a transaction."""

        def put(key: bytes, value: bytes) -> None:
            self.db.get(key)
            self._write([key], [value])
            if synced:
                self.db.flush_wal(True)

        return in_threads(put, self.data.updates(count, step), threads)

    def look_up_and_delete(self, rows: int, step: int) -> Work:
        """Look `rows` keys up, one by one, and delete them in one batch: the least work that
        removes rows which have to be found first."""
        keys, _ = self.data.updates(rows, step)

        def work() -> int:
            get = self.db.get
            batch = rocks.WriteBatch(raw_mode=True)
            for key in keys:
                if get(key) is not None:
                    batch.delete(key)
            self.db.write(batch)
            self.db.flush_wal(True)
            return rows

        return work

    def deliver(self, count: int, step: int) -> Work:
        """Durable puts: a queue hands each to another thread, whose answer the next put awaits."""
        rows = self.data.updates(count, step)
        queue: SimpleQueue[tuple[bytes, bytes] | None] = SimpleQueue()
        answered = Semaphore(0)

        def consume() -> None:
            while queue.get() is not None:
                answered.release()

        def work() -> int:
            consumer = Thread(target=consume)
            consumer.start()
            for key, value in zip(*rows, strict=True):
                self._write([key], [value])
                self.db.flush_wal(True)
                queue.put((key, value))
                answered.acquire()
            queue.put(None)
            consumer.join()
            return count

        return work

    def put_synced(self, count: int, step: int) -> Work:
        """Durable puts: a delete of any range should cost no more than one of them."""
        rows = list(zip(*self.data.updates(count, step), strict=True))

        def work() -> int:
            for key, value in rows:
                self._write([key], [value])
                self.db.flush_wal(True)
            return count

        return work

    # -- reading --------------------------------------------------------------------------

    def get(self, count: int, step: int) -> Work:
        wanted = self.data.lookups(count, step)

        def work() -> int:
            get = self.db.get
            found = 0
            for key in wanted:
                if get(key) is not None:
                    found += 1
            return found

        return work

    def scan(self) -> Work:
        def work() -> int:
            count = 0
            for _key, _value in self.db.items():
                count += 1
            return count

        return work

    def scan_rows(self, count: int, windows: int) -> Work:
        """Iterate over as many rows as the windows have changes: the least cost of any log."""
        keys = self.data.keys
        starts = range(0, len(keys) - count, max((len(keys) - count) // windows, 1))
        bounds = [(keys[start], keys[start + count]) for start in starts[:windows]]

        def work() -> int:
            found = 0
            for start, end in bounds:
                options = rocks.ReadOptions()
                options.set_iterate_upper_bound(end)
                found += len(list(self.db.items(from_key=start, read_opt=options)))
            return found

        return work

    def increment(self, rows: int, is_single: bool) -> Work:
        """Make a checkpoint, and copy the files of it that were not copied yet."""
        target = self.directory / "backup"
        target.mkdir(exist_ok=True)
        return self._copying(target, rows)

    def backup_full(self) -> Work:
        """Make a checkpoint, and copy all its files."""
        target = self.fresh("backup-full")
        target.mkdir()
        return self._copying(target, self.data.rows)

    def _copying(self, target: Path, rows: int) -> Work:
        checkpoint = self.fresh("checkpoint")

        def work() -> int:
            rocks.Checkpoint(self.db).create_checkpoint(str(checkpoint))
            copy_new_files(checkpoint, target)
            return rows

        return work

    def restore(self) -> Work:
        """Bulk-load rows from a Parquet file that is compressed as a collection's parts are: the
        least work of any restore."""
        file, target = self.directory / "rows.parquet", self.fresh("restored")
        if not file.exists():
            table = pa.table(
                {"key": self.data.keys, "value": self.data.values}, schema=rows_schema()
            )
            pq.write_table(table, file, compression="zstd", compression_level=1)
        sst = self.fresh("restored.sst")

        def work() -> int:
            writer = rocks.SstFileWriter(family_options("data", rocks.Cache(8 << 20)))
            writer.open(str(sst))
            for batch in pq.ParquetFile(file).iter_batches():
                columns = (column.to_pylist() for column in batch.columns)
                for key, value in zip(*columns, strict=True):
                    writer[key] = value
            writer.finish()
            db = opened_raw(target)
            _ingest(db, [sst])
            db.close()
            return self.data.rows

        return work

    def disk(self) -> Work:
        return lambda: tree_bytes(self.directory / "db")

    def close(self) -> None:
        if self.db is not None:
            self.db.close()
            self.db = None

    def _write(self, keys: Sequence[bytes], values: Sequence[bytes]) -> None:
        batch = rocks.WriteBatch(raw_mode=True)
        put = batch.put
        for key, value in zip(keys, values, strict=True):
            put(key, value)
        self.db.write(batch)


def opened_raw(path: Path) -> rocks.Rdict:
    options = family_options("data", rocks.Cache(BLOCK_CACHE_BYTES))
    options.create_if_missing(True)
    options.set_max_background_jobs(2)
    return rocks.Rdict(str(path), options)


def _write_sorted(file: Path, keys: Sequence[bytes], values: Sequence[bytes]) -> None:
    writer = rocks.SstFileWriter(family_options("data", rocks.Cache(8 << 20)))
    writer.open(str(file))
    for key, value in zip(keys, values, strict=True):
        writer[key] = value
    writer.finish()


def _ingest(db: rocks.Rdict, files: Sequence[Path]) -> None:
    options = rocks.IngestExternalFileOptions()
    options.set_move_files(True)
    db.ingest_external_file([str(file) for file in files], options)


def in_threads(
    put: Callable[[bytes, bytes], None],
    rows: tuple[Sequence[bytes], Sequence[bytes]],
    threads: int,
) -> Work:
    """Call `put` for each row; `threads` threads share the rows."""

    def run(number: int) -> None:
        for key, value in zip(rows[0][number::threads], rows[1][number::threads], strict=True):
            put(key, value)

    def work() -> int:
        crew = [Thread(target=run, args=(number,)) for number in range(1, threads)]
        for thread in crew:
            thread.start()
        run(0)
        for thread in crew:
            thread.join()
        return len(rows[0])

    return work


def incompressible(megabytes: int) -> tuple[list[bytes], list[bytes]]:
    """Sorted rows of 16 KiB, `megabytes` of them in all."""
    value = os.urandom(1 << 20)
    rows = megabytes * 64
    return (
        [row.to_bytes(16, "big") for row in range(rows)],
        [value[row % 64 * 16_384 :][:16_368] for row in range(rows)],
    )


def copy_new_files(checkpoint: Path, target: Path) -> None:
    """Copy the files of a checkpoint that `target` lacks; tables never change."""
    for file in checkpoint.iterdir():
        copied = target / file.name
        if file.is_file() and (file.suffix != ".sst" or not copied.exists()):
            shutil.copyfile(file, copied)
            _fsync(copied)
    _fsync(target)


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
