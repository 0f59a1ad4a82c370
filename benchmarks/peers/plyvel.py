"""LevelDB through plyvel: an LSM tree; synced batches."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path

import plyvel

from benchmarks.data import KEY_BYTES
from benchmarks.peers.layout import live, log_key, suffix
from benchmarks.peers.peer import Peer
from benchmarks.subject import Work

_CACHE_BYTES = 512 << 20
_DATA, _LOG = b"d", b"l"
_LOAD_ROWS = 10_000


class Plyvel(Peer):
    """Versions and a log under two prefixes, written in one batch."""

    name = "plyvel"

    db: plyvel.DB | None = None

    def load(self, target: Path, keys: list[bytes], values: list[bytes], *, keep: bool) -> None:
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
            self.db = db
        else:
            db.close()

    def settle(self) -> Work:
        def work() -> int:
            self.db.compact_range()
            return 1

        return work

    def write(self, keys: Sequence[bytes], values: Sequence[bytes], version: int) -> None:
        tail = suffix(version)
        with self.db.write_batch(sync=True) as batch:
            for number, (key, value) in enumerate(zip(keys, values, strict=True)):
                batch.put(_DATA + key + tail, value)
                batch.put(_LOG + log_key(version, number), key + value)

    def get(self, count: int, step: int, as_of: str | None = None) -> Work:
        wanted = self.data.lookups(count, step)
        tail = suffix(self.at(as_of))

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
        version = self.at(as_of)
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
            self.write_next(inside, [b""] * len(inside))
            return 1

        return work

    def close(self) -> None:
        if self.db is not None:
            self.db.close()
