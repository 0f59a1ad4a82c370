"""Writes at timestamps that the test chooses, for tests of reads below the commit path."""

from __future__ import annotations

from kvstore.mvcc import Versions, WriteSet, stage


class TimedVersions(Versions):
    """Versions that a test writes in ascending order of time. Nothing checks the order."""

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
