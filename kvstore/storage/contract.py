"""The contract of storage: blobs, each written once, and a consensus of small logs.

A *blob* is a byte string under a name. A shard keeps its parts and rollups in blobs. A *consensus*
holds for each key a log of versions that only grows at its head, by compare-and-set. The changes
of a shard's state live there: the process that sets the next version has decided what happens next.

Implementations: `memory_storage`, `local_files`, `object_store` (S3, GCS, Azure). `wrapped` has the
layers that may lie above a blob. The suites of `kvstore.backup.testing` check each one.

Rules of every blob
1. A name is written once. `put` is atomic: a reader sees nothing or all of it. Putting the same
   bytes again succeeds (a retry), other bytes raise `UsageError` and change nothing.
2. When `put` or `delete` returns, its effect survives a crash, unless `durable=False`.
3. `list` gives every name with the prefix once, ascending; names put or deleted meanwhile may
   or may not appear.

Rules of every consensus
1. `compare_and_set(key, expected, new)` commits if and only if the newest version is `expected`
   (None: there is none); otherwise it answers MISMATCH, whether `expected` is too low or too
   high. Sequence numbers grow, with or without gaps, and stay below 2**63.
2. A committed version survives a crash, and is never changed; only `truncate` removes it.
3. `head` may be stale (an older version that was once the newest), `scan` likewise; a
   compare-and-set never is.
4. `truncate(key, seqno)` removes the versions below `seqno`, which must not be above the head:
   the head always stays. Doing it twice does nothing more.
5. Keys are independent. Data may be empty.

Errors of both
1. Another attempt meets these again: `UsageError` (the call was not carried out;
   `AccessDeniedError` where the storage refuses), `OutOfSpaceError`, and `StorageError` (the
   storage is broken; the outcome of a compare-and-set is unknown).
2. These may pass: `DeterminateError` (the call was surely not carried out) and
   `IndeterminateError` (its outcome is unknown). Every call of a blob is idempotent, so both may be
   retried there. Before a compare-and-set is retried after the second, look at the head.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple, Protocol, runtime_checkable

from kvstore.errors import (
    AccessDeniedError,
    DeterminateError,
    NoBucketError,
    StorageError,
    UsageError,
    storage_errors,
)
from kvstore.storage.patience import Patience

NAME_CHARS_MAX = 255
_BLOB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=-]*(/[A-Za-z0-9][A-Za-z0-9._=-]*)*")
SEQNO_MAX = (1 << 63) - 1
"""Sequence numbers fit a signed 64-bit integer, so every storage can hold them."""
_CONSENSUS_KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=-]{0,126}")

FAILURES: Final = (AccessDeniedError, NoBucketError, DeterminateError, StorageError)
"""Failures of a storage. Callers suppress them where nothing depends on the call."""


class BlobInfo(NamedTuple):
    """One listed blob."""

    name: str
    size: int


class Blob(Protocol):
    """The contract; see the module's rules."""

    @property
    def patience(self) -> Patience:
        """How long users repeat their calls."""
        ...

    def put(self, name: str, data: bytes, *, durable: bool = True) -> None:
        """Write `data` under a new name, durably.

        If not `durable`, a crash of the machine may leave any part of it, or none.
        """
        ...

    def get(self, name: str) -> bytes | None:
        """All bytes of `name`; None where there is no such blob."""
        ...

    def get_range(self, name: str, *, start: int, length: int) -> bytes | None:
        """The bytes `[start, start + length)`, fewer at the end; None where there is no blob."""
        ...

    def size(self, name: str) -> int | None:
        """How many bytes `name` has; None where there is no such blob."""
        ...

    def delete(self, name: str) -> int | None:
        """Remove `name`; returns its size, or None if there was no such blob.

        A storage that does not report the size returns the size that it saw just before.
        """
        ...

    def list(self, prefix: str = "") -> Iterator[BlobInfo]:
        """Every blob whose name begins with `prefix`, ascending."""
        ...


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
        """Remove the versions below `seqno`; returns how many, None if the storage cannot tell.

        Raises `UsageError` if `seqno` is above the head, or there is no head.
        """
        ...

    def list_keys(self) -> list[str]:
        """Every key that has a version, ascending."""
        ...


class Storage(NamedTuple):
    """Where shards live."""

    blob: Blob
    consensus: Consensus


def require_name(name: str) -> str:
    """Return `name` if every storage can hold it: segments of plain characters between slashes.

    Raises `UsageError` otherwise, so that a name can never climb out of its folder.
    """
    if len(name) > NAME_CHARS_MAX or not _BLOB_NAME.fullmatch(name):
        raise UsageError(
            f"{name!r} is not a blob name", "use letters, digits, . _ = - between slashes"
        )
    return name


def name_taken(name: str) -> UsageError:
    """The error of putting other bytes under a name in use."""
    return UsageError(
        f"blob {name} exists with other bytes", "names are written once: take a new one"
    )


def put_retrying(blob: Blob, name: str, data: bytes) -> None:
    """Put under a unique name, again after a failure: putting the same bytes twice does no harm."""
    blob.patience.over(lambda: blob.put(name, data))


def put_first(blob: Blob, name: str, data: bytes) -> bool:
    """Put under a name that several processes want; retried after failures that may pass.

    False if the name exists with other bytes: somebody else was first. `data` differs from the
    bytes of everybody else.
    """
    try:
        put_retrying(blob, name, data)
    except (AccessDeniedError, NoBucketError):
        raise
    except UsageError:
        if blob.patience.over(lambda: blob.size(name)) is None:
            raise
        return False
    return True


@runtime_checkable
class Sweeps(Protocol):
    """A blob on which a crashed put may leave a file."""

    def sweep(self, *, before_ns: int) -> int:
        """Remove the files of crashed puts last written before `before_ns`; returns how many."""
        ...


def sweep(blob: Blob, *, before_ns: int) -> int:
    """See `Sweeps`. Returns 0 for a blob whose crashed puts leave nothing."""
    return blob.sweep(before_ns=before_ns) if isinstance(blob, Sweeps) else 0


@runtime_checkable
class TakesFiles(Protocol):
    """A blob that takes a file without holding it in memory."""

    def put_file(self, name: str, path: Path) -> None:
        """Write the bytes of a local file under a name that no other file will ever have.

        Repeating it after a failure does no harm. It does not look whether the name is taken.
        """
        ...


def put_file(blob: Blob, name: str, path: Path) -> None:
    """See `TakesFiles`; retried after failures that may pass. Other blobs take the whole file at
    once."""
    if isinstance(blob, TakesFiles):
        taker = blob
        blob.patience.over(lambda: taker.put_file(name, path))
    else:
        with storage_errors(str(path)):
            data = path.read_bytes()
        put_retrying(blob, name, data)


def require_consensus_key(key: str) -> str:
    """Return `key` if every storage can hold it; raises `UsageError` otherwise."""
    if not _CONSENSUS_KEY.fullmatch(key):
        raise UsageError(f"{key!r} is not a consensus key", "use letters, digits, . _ = -")
    return key


def require_cas(key: str, *, expected: int | None, new: Versioned) -> None:
    """Raise `UsageError` where `new` could never follow `expected`."""
    require_consensus_key(key)
    if not 0 <= new.seqno <= SEQNO_MAX:
        raise UsageError(
            f"sequence number v{new.seqno} is outside v0..v{SEQNO_MAX}", "choose a number inside"
        )
    if expected is not None and new.seqno <= expected:
        raise UsageError(f"v{new.seqno} cannot follow v{expected}", "sequence numbers must grow")


def require_truncation(key: str, seqno: int, head: Versioned | None) -> None:
    """Raise `UsageError` where truncating at `seqno` would remove the head."""
    if head is None:
        raise UsageError(f"{key} has no versions to truncate", "check the key")
    if seqno > head.seqno:
        raise UsageError(
            f"cannot truncate {key} at v{seqno}, above its head v{head.seqno}",
            "truncate at the head or below it",
        )
