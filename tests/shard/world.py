"""A shard in memory whose consensus fails as a script says."""

from __future__ import annotations

from collections.abc import Callable

from kvstore.backup.shard.rows.batch_writer import BatchDesc
from kvstore.backup.shard.shard import Shard
from kvstore.backup.shard.state.trace import ShardBatch
from kvstore.base.clock import ManualClock
from kvstore.errors import (
    DeterminateError,
    IndeterminateError,
)
from kvstore.storage.contract import Blob, Cas, Consensus, Versioned
from kvstore.storage.memory_storage import MemoryBlob, MemoryConsensus
from kvstore.storage.patience import Patience
from tests.shard.rows import put, state_of, versions

QUICK = Patience(pause=lambda seconds: None)
"""Tries again without waiting. Each pause counts as if it had passed."""


class ScriptedConsensus:
    """Real consensus, but each compare-and-set fails as the next step of the script says."""

    def __init__(self, inner: Consensus) -> None:
        self.inner = inner
        self.script: list[str] = []
        self.between: Callable[[], None] = lambda: None

    def head(self, key: str) -> Versioned | None:
        return self.inner.head(key)

    def compare_and_set(self, key: str, *, expected: int | None, new: Versioned) -> Cas:
        fault = self.script.pop(0) if self.script else "fine"
        if fault == "refused":
            raise DeterminateError("compare-and-set", "refused")
        if fault == "unsent":
            self.between()
            raise IndeterminateError("compare-and-set", "timed out")
        cas = self.inner.compare_and_set(key, expected=expected, new=new)
        if fault == "lost":
            self.between()
            raise IndeterminateError("compare-and-set", "its reply was lost")
        return cas

    def scan(self, key: str, *, start: int, limit: int) -> list[Versioned]:
        return self.inner.scan(key, start=start, limit=limit)

    def truncate(self, key: str, seqno: int) -> int | None:
        return self.inner.truncate(key, seqno)

    def list_keys(self) -> list[str]:
        return self.inner.list_keys()


class World:
    """One memory shard, its clock and its script."""

    def __init__(self) -> None:
        self.blob = MemoryBlob()
        self.consensus = ScriptedConsensus(MemoryConsensus())
        self.clock = ManualClock()

    def open(self, **options: object) -> Shard:
        return open_shard(self.blob, self.consensus, clock=self.clock, **options)


def open_shard(blob: Blob, consensus: Consensus, **options: object) -> Shard:
    return Shard.open(blob, consensus, "s", **{"patience": QUICK, **options})  # type: ignore[arg-type]


def batch_of(shard: Shard, upper: int, key: bytes = b"k", value: bytes = b"v") -> ShardBatch:
    rows = versions([put(key, upper - 1, value)])
    return shard.write_batch(BatchDesc(shard.refresh().upper, upper), rows)


def write(shard: Shard, *uppers: int, key: bytes = b"k") -> None:
    for upper in uppers:
        value = f"v{upper}".encode()
        shard.writer().compare_and_append(batch_of(shard, upper, key, value))


def read(shard: Shard, as_of: int) -> dict[bytes, bytes | None]:
    with shard.snapshot(as_of) as snapshot:
        return state_of(snapshot.read())
