"""Blob and consensus in the memory of one process: the reference for the other implementations."""

from __future__ import annotations

import threading
from collections.abc import Iterator

from kvstore.storage.contract import (
    BlobInfo,
    Cas,
    Versioned,
    name_taken,
    require_cas,
    require_name,
    require_truncation,
)
from kvstore.storage.patience import PATIENCE, Patience


class MemoryBlob:
    """Blobs in a dict, shared by all handles on it."""

    def __init__(self, *, patience: Patience = PATIENCE) -> None:
        self.patience = patience
        self._blobs: dict[str, bytes] = {}

    def put(self, name: str, data: bytes, *, durable: bool = True) -> None:
        """See `Blob.put`. Atomic under the interpreter's lock."""
        if self._blobs.setdefault(require_name(name), bytes(data)) != data:
            raise name_taken(name)

    def get(self, name: str) -> bytes | None:
        """See `Blob.get`."""
        return self._blobs.get(name)

    def get_range(self, name: str, *, start: int, length: int) -> bytes | None:
        """See `Blob.get_range`."""
        data = self._blobs.get(name)
        return None if data is None else data[start : start + length]

    def size(self, name: str) -> int | None:
        """See `Blob.size`."""
        data = self._blobs.get(name)
        return None if data is None else len(data)

    def delete(self, name: str) -> int | None:
        """See `Blob.delete`."""
        data = self._blobs.pop(name, None)
        return None if data is None else len(data)

    def list(self, prefix: str = "") -> Iterator[BlobInfo]:
        """See `Blob.list`."""
        for name, data in sorted(self._blobs.items()):
            if name.startswith(prefix):
                yield BlobInfo(name, len(data))


class MemoryConsensus:
    """Versions in lists, under a lock, shared by all handles on it."""

    def __init__(self) -> None:
        self._logs: dict[str, list[Versioned]] = {}
        self._lock = threading.Lock()

    def head(self, key: str) -> Versioned | None:
        """See `Consensus.head`; never stale."""
        with self._lock:
            log = self._logs.get(key)
            return log[-1] if log else None

    def compare_and_set(self, key: str, *, expected: int | None, new: Versioned) -> Cas:
        """See `Consensus.compare_and_set`."""
        require_cas(key, expected=expected, new=new)
        with self._lock:
            log = self._logs.get(key, [])
            if (log[-1].seqno if log else None) != expected:
                return Cas.MISMATCH
            self._logs.setdefault(key, log).append(Versioned(new.seqno, bytes(new.data)))
            return Cas.COMMITTED

    def scan(self, key: str, *, start: int, limit: int) -> list[Versioned]:
        """See `Consensus.scan`; never stale."""
        with self._lock:
            return [v for v in self._logs.get(key, ()) if v.seqno >= start][:limit]

    def truncate(self, key: str, seqno: int) -> int | None:
        """See `Consensus.truncate`."""
        with self._lock:
            log = self._logs.get(key, [])
            require_truncation(key, seqno, log[-1] if log else None)
            kept = [v for v in log if v.seqno >= seqno]
            self._logs[key] = kept
            return len(log) - len(kept)

    def list_keys(self) -> list[str]:
        """See `Consensus.list_keys`."""
        with self._lock:
            return sorted(self._logs)
