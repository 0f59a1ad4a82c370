"""Consensus: for each key a log of versions that only grows at its head, by compare-and-set.

A shard's state changes live here: the head is the newest state, and whoever sets the next
version has decided what happens next. Implementations: `MemoryConsensus`,
`file_consensus.FileConsensus` (local files, on the journal), `object_store.ObjectConsensus`
(S3, GCS, Azure) and `faults.FaultyConsensus` around any.

Rules of every implementation (tests/shard/contracts.py holds them to it)
1. `compare_and_set(key, expected, new)` commits if and only if the newest version is `expected`
   (None: there is none); otherwise it answers MISMATCH, whether `expected` is too low or too
   high. Sequence numbers grow, with or without gaps, and stay below 2**63.
2. A committed version survives a crash, and is never changed; only `truncate` removes it.
3. `head` may be stale (an older version that was once the newest), `scan` likewise; a
   compare-and-set never is.
4. `truncate(key, seqno)` removes the versions below `seqno`, which must not be above the head:
   the head always stays. Doing it twice does nothing more.
5. Keys are independent. Data may be empty.
6. Errors that another attempt meets again: `UsageError` (never committed; `AccessDeniedError`
   where the storage refuses), `OutOfSpaceError`, `StorageError` (the storage is broken; the
   outcome is unknown). Errors that may pass: `DeterminateError` (surely not done),
   `IndeterminateError` (unknown: look before doing what is not idempotent again).
"""

from __future__ import annotations

import enum
import re
import threading
from typing import NamedTuple, Protocol

from kvstore.errors import UsageError

SEQNO_MAX = (1 << 63) - 1
"""Sequence numbers fit a signed 64-bit integer, so every storage can hold them."""

_KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=-]{0,126}")


class Versioned(NamedTuple):
    """One version of a key: its sequence number and its bytes."""

    seqno: int
    data: bytes


class Cas(enum.Enum):
    """The outcome of a compare-and-set."""

    COMMITTED = "committed"
    MISMATCH = "mismatch"


class Consensus(Protocol):
    """The contract; see the module's rules."""

    def head(self, key: str) -> Versioned | None:
        """A recent version of `key`; None where there is none yet."""
        ...

    def compare_and_set(self, key: str, *, expected: int | None, new: Versioned) -> Cas:
        """Make `new` the head if the head is `expected`; `UsageError` if `new` is not above."""
        ...

    def scan(self, key: str, *, start: int, limit: int) -> list[Versioned]:
        """The first `limit` versions at or above `start`, ascending; empty where there are none."""
        ...

    def truncate(self, key: str, seqno: int) -> int | None:
        """Remove the versions below `seqno`; how many, or None if the storage cannot tell.

        Raises `UsageError` if `seqno` is above the head, or there is no head.
        """
        ...

    def list_keys(self) -> list[str]:
        """Every key that has a version, ascending."""
        ...


def require_cas(key: str, *, expected: int | None, new: Versioned) -> None:
    """Raise `UsageError` where `new` could never follow `expected`."""
    require_consensus_key(key)
    if not 0 <= new.seqno <= SEQNO_MAX:
        raise UsageError(f"sequence number v{new.seqno} is outside v0..v{SEQNO_MAX}")
    if expected is not None and new.seqno <= expected:
        raise UsageError(f"v{new.seqno} cannot follow v{expected}", "sequence numbers must grow")


def require_consensus_key(key: str) -> str:
    """Return `key` if every storage can hold it; raises `UsageError` otherwise."""
    if not _KEY.fullmatch(key):
        raise UsageError(f"{key!r} is not a consensus key", "use letters, digits, . _ = -")
    return key


def require_truncation(key: str, seqno: int, head: Versioned | None) -> None:
    """Raise `UsageError` where truncating at `seqno` would remove the head."""
    if head is None:
        raise UsageError(f"{key} has no versions to truncate")
    if seqno > head.seqno:
        raise UsageError(f"cannot truncate {key} at v{seqno}, above its head v{head.seqno}")


class MemoryConsensus:
    """Versions in lists, under a lock, shared by all who hold it; the reference for the others."""

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
