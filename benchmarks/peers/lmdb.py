"""LMDB: a memory-mapped B+ tree; a commit is an fsync."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import lmdb

from benchmarks.data import KEY_BYTES
from benchmarks.peers.layout import live, log_key, suffix
from benchmarks.peers.peer import Peer
from benchmarks.subject import Work

_MAP_BYTES = 64 << 30


class Lmdb(Peer):
    """Versions and a log in two sub-databases, written in one transaction."""

    name = "lmdb"

    env: lmdb.Environment | None = None

    def load(self, target: Path, keys: list[bytes], values: list[bytes], *, keep: bool) -> None:
        env = lmdb.open(str(target), map_size=_MAP_BYTES, max_dbs=2)
        rows, tail = env.open_db(b"data"), suffix(1)
        with env.begin(write=True, db=rows) as txn:
            pairs = ((key + tail, value) for key, value in zip(keys, values, strict=True))
            txn.cursor().putmulti(pairs, append=True)
        if keep:
            self.env, self.rows, self.log = env, rows, env.open_db(b"log")
        else:
            env.close()

    def write(self, keys: Sequence[bytes], values: Sequence[bytes], version: int) -> None:
        tail = suffix(version)
        with self.env.begin(write=True) as txn:
            for number, (key, value) in enumerate(zip(keys, values, strict=True)):
                txn.put(key + tail, value, db=self.rows)
                txn.put(log_key(version, number), key + value, db=self.log, append=True)

    def get(self, count: int, step: int, as_of: str | None = None) -> Work:
        wanted = self.data.lookups(count, step)
        tail = suffix(self.at(as_of))

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
        version = self.at(as_of)

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
            self.write_next(inside, [b""] * len(inside))
            return 1

        return work

    def close(self) -> None:
        if self.env is not None:
            self.env.close()
