"""LMDB: a memory-mapped B+ tree; a commit is an fsync."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import lmdb

from benchmarks.data import KEY_BYTES
from benchmarks.peers.layout import live, log_key, suffix
from benchmarks.subject import Subject, Work, tree_bytes

_MAP_BYTES = 64 << 30


class Lmdb(Subject):
    """Versions and a log in two sub-databases, written in one transaction."""

    name = "lmdb"

    def __init__(self, directory: Path, data) -> None:
        super().__init__(directory, data)
        self.env: lmdb.Environment | None = None
        self.version = 0

    def now(self) -> int:
        return self.version

    def fill(self) -> Work:
        return self._loading("db", keep=True)

    def bulk_load(self) -> Work:
        return self._loading("bulk", keep=False)

    def _loading(self, name: str, *, keep: bool) -> Work:
        keys, values = self.data.keys, self.data.values
        target = self.fresh(name)

        def work() -> int:
            env = lmdb.open(str(target), map_size=_MAP_BYTES, max_dbs=2)
            rows, tail = env.open_db(b"data"), suffix(1)
            with env.begin(write=True, db=rows) as txn:
                pairs = ((key + tail, value) for key, value in zip(keys, values, strict=True))
                txn.cursor().putmulti(pairs, append=True)
            if keep:
                self.env, self.rows, self.log = env, rows, env.open_db(b"log")
                self.version = 1
            else:
                env.close()
            return len(keys)

        return work

    def commit(self, rows: int, count: int, step: int) -> Work:
        sets = [self.data.updates(rows, step * 1000 + number) for number in range(count)]

        def work() -> int:
            for keys, values in sets:
                self._write(keys, values)
            return rows * count

        return work

    def _write(self, keys: Sequence[bytes], values: Sequence[bytes]) -> None:
        version = self.version + 1
        tail = suffix(version)
        with self.env.begin(write=True) as txn:
            for number, (key, value) in enumerate(zip(keys, values, strict=True)):
                txn.put(key + tail, value, db=self.rows)
                txn.put(log_key(version, number), key + value, db=self.log, append=True)
        self.version = version

    def get(self, count: int, step: int, as_of: str | None = None) -> Work:
        wanted = self.data.lookups(count, step)
        tail = suffix(self.version if as_of is None else self.marks[as_of])

        def work() -> int:
            found = 0
            with self.env.begin(db=self.rows) as txn:
                cursor = txn.cursor()
                seek, key_here, value_here = cursor.set_range, cursor.key, cursor.value
                for key in wanted:
                    if seek(key + tail) and key_here()[:KEY_BYTES] == key and value_here():
                        found += 1
            return found

        return work

    def scan(self, as_of: str | None = None) -> Work:
        version = self.version if as_of is None else self.marks[as_of]

        def work() -> int:
            with self.env.begin(db=self.rows) as txn:
                return sum(1 for _ in live(txn.cursor(), version))

        return work

    def changes(self, since: str) -> Work:
        first = log_key(self.marks[since] + 1)

        def work() -> int:
            changed = []
            with self.env.begin(db=self.log) as txn:
                cursor = txn.cursor()
                if cursor.set_range(first):
                    changed = [(row[:KEY_BYTES], row[KEY_BYTES:]) for _, row in cursor]
            return len(changed)

        return work

    def delete_range(self, rows: int, step: int) -> Work:
        start, end = self.data.middle(rows)

        def work() -> int:
            with self.env.begin(db=self.rows) as txn:
                cursor = txn.cursor()
                cursor.set_range(start)
                inside = []
                for key, _ in live(cursor, self.version):
                    if key >= end:
                        break
                    inside.append(key)
            self._write(inside, [b""] * len(inside))
            return 1

        return work

    def disk(self) -> Work:
        return lambda: tree_bytes(self.directory / "db")

    def close(self) -> None:
        if self.env is not None:
            self.env.close()
