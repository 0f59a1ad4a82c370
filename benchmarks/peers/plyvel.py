"""LevelDB through plyvel: an LSM tree; synced batches."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path

import plyvel

from benchmarks.data import KEY_BYTES
from benchmarks.peers.layout import live, log_key, suffix
from benchmarks.subject import Subject, Work, tree_bytes

_CACHE_BYTES = 512 << 20
_DATA, _LOG = b"d", b"l"
_LOAD_ROWS = 10_000


class Plyvel(Subject):
    """Versions and a log under two prefixes, written in one batch."""

    name = "plyvel"

    def __init__(self, directory: Path, data) -> None:
        super().__init__(directory, data)
        self.db: plyvel.DB | None = None
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
            db = plyvel.DB(
                str(target),
                create_if_missing=True,
                lru_cache_size=_CACHE_BYTES,
                bloom_filter_bits=10,
                write_buffer_size=64 << 20,
            )
            tail = suffix(1)
            for at in range(0, len(keys), _LOAD_ROWS):
                last = at + _LOAD_ROWS >= len(keys)
                with db.write_batch(sync=last) as batch:
                    put = batch.put
                    for key, value in zip(
                        keys[at : at + _LOAD_ROWS], values[at : at + _LOAD_ROWS], strict=True
                    ):
                        put(_DATA + key + tail, value)
            if keep:
                self.db, self.version = db, 1
            else:
                db.close()
            return len(keys)

        return work

    def settle(self) -> Work:
        def work() -> int:
            self.db.compact_range()
            return 1

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
        with self.db.write_batch(sync=True) as batch:
            for number, (key, value) in enumerate(zip(keys, values, strict=True)):
                batch.put(_DATA + key + tail, value)
                batch.put(_LOG + log_key(version, number), key + value)
        self.version = version

    def get(self, count: int, step: int, as_of: str | None = None) -> Work:
        wanted = self.data.lookups(count, step)
        tail = suffix(self.version if as_of is None else self.marks[as_of])

        def work() -> int:
            found = 0
            with self.db.raw_iterator() as reader:
                seek, item = reader.seek, reader.item
                for key in wanted:
                    seek(_DATA + key + tail)
                    stored, value = item()
                    if stored[1 : 1 + KEY_BYTES] == key and value:
                        found += 1
            return found

        return work

    def _rows(self, start: bytes = b""):
        return self.db.prefixed_db(_DATA).iterator(start=start)

    def scan(self, as_of: str | None = None) -> Work:
        version = self.version if as_of is None else self.marks[as_of]
        return lambda: sum(1 for _ in live(self._rows(), version))

    def changes(self, since: str) -> Work:
        first = log_key(self.marks[since] + 1)

        def work() -> int:
            log = self.db.prefixed_db(_LOG).iterator(start=first, include_key=False)
            return len([(row[:KEY_BYTES], row[KEY_BYTES:]) for row in log])

        return work

    def delete_range(self, rows: int, step: int) -> Work:
        start, end = self.data.middle(rows)

        def work() -> int:
            rows_inside = takewhile(lambda row: row[0] < end, live(self._rows(start), self.version))
            inside = [key for key, _ in rows_inside]
            self._write(inside, [b""] * len(inside))
            return 1

        return work

    def disk(self) -> Work:
        return lambda: tree_bytes(self.directory / "db")

    def close(self) -> None:
        if self.db is not None:
            self.db.close()
