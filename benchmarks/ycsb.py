"""The workloads A to F of YCSB, in one loop for all subjects.

    A  half reads, half updates              D  95 % reads of the newest rows, 5 % inserts
    B  95 % reads, 5 % updates               E  95 % scans of up to 100 rows, 5 % inserts
    C  reads only                            F  half reads, half reads that are followed by a write

Keys of reads and updates are zipfian with the constant 0.99 and spread over all rows, as the suite
defines them (Cooper, Silberstein, Tam, Ramakrishnan and Sears, "Benchmarking cloud serving systems
with YCSB", 2010). Each subject keeps one value a key, and no write waits for the disk. A read of
lmdb has a transaction of its own, so that it sees every write before it.

The store has a cache of newest values for a tenth of the rows. As many reads as there are rows come
before the first round, so that caches are filled. Before each further workload the files settle: a
tree of RocksDB or LevelDB whose last writes lie in no order takes up to twice as long for a read,
and each workload would be measured behind the writes of the ones before it.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from functools import cache
from itertools import islice
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import rocksdict as rocks

import kvstore
from benchmarks.raw import opened_raw
from benchmarks.subject import Subject, Work

READ: Final = 0
WRITE: Final = 1
SCAN: Final = 2
READ_AND_WRITE: Final = 3

MIXES: Final = {
    "a": ((0.5, READ), (0.5, WRITE)),
    "b": ((0.95, READ), (0.05, WRITE)),
    "c": ((1.0, READ),),
    "d": ((0.95, READ), (0.05, WRITE)),
    "e": ((0.95, SCAN), (0.05, WRITE)),
    "f": ((0.5, READ), (0.5, READ_AND_WRITE)),
}
"""The share of each operation in each workload."""

GROWING: Final = frozenset("de")
"""The workloads whose writes are inserts."""

SKEW: Final = 0.99
SCAN_ROWS_MAX: Final = 100
CACHED_PART: Final = 10
CACHED_ROW_BYTES: Final = 276
_FILL_ROWS: Final = 10_000
_SEED: Final = 20_264


class Calls(NamedTuple):
    """The operations of a subject. `scan` reads a number of rows from a key on, and counts them."""

    read: Callable[[bytes], Any]
    write: Callable[[bytes, bytes], Any]
    scan: Callable[[bytes, int], int]


class Ycsb(Subject):
    """A subject that keeps one value a key."""

    durability = "none"

    def calls(self) -> Calls:
        """The operations, bound once."""
        raise NotImplementedError

    def put_all(self, keys: list[bytes], values: list[bytes]) -> None:
        """Write rows in one batch."""
        raise NotImplementedError

    def open(self) -> None:
        """Open an empty store."""
        raise NotImplementedError

    def ycsb_fill(self) -> Work:
        """Load all rows."""
        keys, values = self.data.keys, self.data.values
        self.close()
        self.open()

        def work() -> int:
            for at in range(0, len(keys), _FILL_ROWS):
                self.put_all(keys[at : at + _FILL_ROWS], values[at : at + _FILL_ROWS])
            self.settle()
            return self.ycsb("c", len(keys), 9_000)()

        return work

    def ycsb_settle(self) -> Work:
        """Settle the files behind the writes of the last workload, and read some of them."""
        warm = self.ycsb("c", self.data.rows // 5, 9_001)

        def work() -> int:
            self.settle()
            return warm()

        return work

    def settle(self) -> None:
        """Bring the files into the order that they have after a while."""

    def ycsb(self, mix: str, count: int, step: int) -> Work:
        """`count` operations of a workload."""
        plan = self._planned(mix, count, step)
        read, write, scan = self.calls()

        def work() -> int:
            for kind, key, value, rows in plan:
                if kind == READ:
                    assert read(key) is not None
                elif kind == WRITE:
                    write(key, value)
                elif kind == SCAN:
                    assert scan(key, rows)
                else:
                    assert read(key) is not None
                    write(key, value)
            return count

        return work

    def _planned(self, mix: str, count: int, step: int) -> list[tuple[int, bytes, bytes, int]]:
        pick = np.random.default_rng((_SEED, step, ord(mix)))
        shares, kinds = zip(*MIXES[mix], strict=True)
        chosen = pick.choice(kinds, count, p=shares).tolist()
        ranks = _zipfian(pick, self.data.rows, count)
        keys = [self.data.keys[at] for at in _spread(self.data.rows)[ranks].tolist()]
        _, values = self.data.updates(min(count, self.data.rows), step)
        lengths = pick.integers(1, SCAN_ROWS_MAX + 1, count).tolist()
        if mix in GROWING:
            keys = self._with_inserts(mix, chosen, keys, ranks.tolist(), step)
        # Copies: an object that the store keeps has its hash already.
        keys = [b"%b" % key for key in keys]
        return [
            (kind, key, values[at % len(values)], length)
            for at, (kind, key, length) in enumerate(zip(chosen, keys, lengths, strict=True))
        ]

    @staticmethod
    def _with_inserts(
        mix: str, chosen: list[int], keys: list[bytes], ranks: list[int], step: int
    ) -> list[bytes]:
        """Writes get new keys. Reads of D take the keys that came last, the newest most often."""
        inserted: list[bytes] = []
        made = []
        for at, (kind, key, rank) in enumerate(zip(chosen, keys, ranks, strict=True)):
            if kind == WRITE:
                inserted.append(b"\x80new%06d%06d" % (step, at))
                made.append(inserted[-1])
            elif mix == "d" and rank < len(inserted):
                made.append(inserted[-1 - rank])
            else:
                made.append(key)
        return made


def _zipfian(pick: np.random.Generator, rows: int, count: int) -> npt.NDArray[np.int64]:
    """Ranks from 0 on, the least most often."""
    weights = _weights(rows)
    found = np.searchsorted(weights, pick.random(count) * weights[-1])
    return np.minimum(found, rows - 1).astype(np.int64)


@cache
def _spread(rows: int) -> npt.NDArray[np.int64]:
    """The row of each rank."""
    return np.random.default_rng(_SEED).permutation(rows)


@cache
def _weights(rows: int) -> npt.NDArray[np.float64]:
    """The sums of the weights of the ranks."""
    return np.cumsum(1 / np.arange(1, rows + 1) ** SKEW)


class OursYcsb(Ycsb):
    """A store, with its history and its change index."""

    _store: kvstore.Store | None = None

    def open(self) -> None:
        cache = self.data.rows // CACHED_PART * CACHED_ROW_BYTES
        self._store = kvstore.open(
            self.fresh("store"),
            durability="async",
            options=kvstore.Options(value_cache_bytes=cache),
        )

    def put_all(self, keys: list[bytes], values: list[bytes]) -> None:
        assert self._store is not None
        self._store.put_many(zip(keys, values, strict=True))

    def settle(self) -> None:
        assert self._store is not None
        for family in ("data", "changes"):
            self._store._engine.compact(family)

    def calls(self) -> Calls:
        assert self._store is not None
        rows = self._store.scan
        return Calls(
            self._store.get,
            self._store.put,
            lambda key, count: len(list(rows(key, limit=count))),
        )

    def close(self) -> None:
        if self._store is not None:
            self._store.close()


class RawYcsb(Ycsb):
    """rocksdict as it is."""

    _db: rocks.Rdict | None = None

    def open(self) -> None:
        self._db = opened_raw(self.fresh("db"))

    def put_all(self, keys: list[bytes], values: list[bytes]) -> None:
        assert self._db is not None
        batch = rocks.WriteBatch(raw_mode=True)
        for key, value in zip(keys, values, strict=True):
            batch.put(key, value)
        self._db.write(batch)

    def settle(self) -> None:
        assert self._db is not None
        self._db.flush()
        self._db.compact_range(None, None)

    def calls(self) -> Calls:
        assert self._db is not None
        rows = self._db.items
        return Calls(
            self._db.get,
            self._db.put,
            lambda key, count: len(list(islice(rows(from_key=key), count))),
        )

    def close(self) -> None:
        if self._db is not None:
            self._db.close()


class LmdbYcsb(Ycsb):
    """LMDB with a transaction for each read and each write."""

    _env: Any = None

    def open(self) -> None:
        import lmdb

        self._env = lmdb.open(str(self.fresh("db")), map_size=64 << 30, sync=False, metasync=False)

    def put_all(self, keys: list[bytes], values: list[bytes]) -> None:
        with self._env.begin(write=True) as txn:
            txn.cursor().putmulti(list(zip(keys, values, strict=True)))

    def calls(self) -> Calls:
        begin = self._env.begin

        def read(key: bytes) -> Any:
            with begin() as txn:
                return txn.get(key)

        def write(key: bytes, value: bytes) -> None:
            with begin(write=True) as txn:
                txn.put(key, value)

        def scan(key: bytes, count: int) -> int:
            with begin() as txn:
                cursor = txn.cursor()
                return len(list(islice(cursor, count))) if cursor.set_range(key) else 0

        return Calls(read, write, scan)

    def close(self) -> None:
        if self._env is not None:
            self._env.close()


class SqliteYcsb(Ycsb):
    """SQLite: a table that is clustered by the key."""

    _db: Any = None

    def open(self) -> None:
        self._db = sqlite3.connect(self.fresh("rows.db"), isolation_level=None)
        self._db.executescript(
            "PRAGMA journal_mode = WAL; PRAGMA synchronous = OFF; PRAGMA cache_size = -524288;"
            "PRAGMA mmap_size = 4294967296;"
            "CREATE TABLE rows (key BLOB PRIMARY KEY, value BLOB) WITHOUT ROWID;"
        )

    def put_all(self, keys: list[bytes], values: list[bytes]) -> None:
        self._db.execute("BEGIN")
        self._db.executemany("REPLACE INTO rows VALUES (?, ?)", zip(keys, values, strict=True))
        self._db.execute("COMMIT")

    def calls(self) -> Calls:
        execute = self._db.execute
        get = "SELECT value FROM rows WHERE key = ?"
        put = "REPLACE INTO rows VALUES (?, ?)"
        rows = "SELECT key, value FROM rows WHERE key >= ? ORDER BY key LIMIT ?"
        return Calls(
            lambda key: execute(get, (key,)).fetchone(),
            lambda key, value: execute(put, (key, value)),
            lambda key, count: len(execute(rows, (key, count)).fetchall()),
        )

    def close(self) -> None:
        if self._db is not None:
            self._db.close()
