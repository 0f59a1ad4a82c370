"""Writes at timestamps of the test's own, for tests of reads below the commit path."""

from __future__ import annotations

from kvstore.mvcc import Versions, WriteSet, stage


class TimedVersions(Versions):
    """Versions that a test writes at any time above the newest one. Nothing checks the order."""

    def apply(self, writes: WriteSet, *, at: int) -> None:
        writes.seal()
        batch = self.engine.batch()
        stage(batch, writes, at, self.engine.families)
        self.engine.write(batch)
        self.publish_ranges(writes.tombstones(at))

    def put(self, key: bytes, value: bytes, *, at: int) -> None:
        writes = WriteSet()
        writes.put(key, value)
        self.apply(writes, at=at)

    def delete(self, key: bytes, *, at: int) -> None:
        writes = WriteSet()
        writes.delete(key)
        self.apply(writes, at=at)

    def delete_range(self, start: bytes, end: bytes, *, at: int) -> None:
        writes = WriteSet()
        writes.delete_range(start, end)
        self.apply(writes, at=at)
