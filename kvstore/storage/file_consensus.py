"""Consensus on local files: one journal for each key, shared by any number of processes.

    <root>/<key>/   a journal (kvstore.journal), content "kvstore.consensus/1"
    record          := | seqno u64, big-endian | data |
    snapshot        the versions that a truncation kept, as records of this kind

A compare-and-set opens the journal for writing, which only one process can, replays it, appends one
record, fsyncs and closes it. Where no other process has written since its own last write, the
replay is skipped: then the cost is one fsync. Readers replay without a lock, so they may miss the
newest version but never see half of a version.

Invariants
1. A version that was committed is in the journal and fsynced before the lock is released.
2. A crashed process may have written a whole version without acknowledging it. The next writer
   fsyncs that version and counts it: this is an indeterminate outcome.
3. Costs grow with the live versions only: truncation, which collection drives, keeps them few.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from kvstore.errors import (
    CorruptionError,
    DeterminateError,
    KVStoreError,
    LockedError,
    RetryableError,
    StorageError,
)
from kvstore.errors.system import storage_errors
from kvstore.journal import OS_FILES, Journal, Record, replay
from kvstore.journal.names import COMPACTING_NAME, LOCK_NAME
from kvstore.storage.contract import (
    Cas,
    Versioned,
    require_cas,
    require_consensus_key,
    require_truncation,
)
from kvstore.storage.os_errors import not_done, translate_os_error
from kvstore.storage.patience import PATIENCE, Patience

_CONTENT = "kvstore.consensus/1"
_SEQNO = struct.Struct(">Q")
_LOCK_WAIT_S_MAX = 30.0
"""The longest wait for other writers, which take a few milliseconds each. A call's patience may
have several such waits."""
_LOCK_PAUSE_S_MAX = 0.005
_READ_ATTEMPTS = 100
"""How often a truncation may overtake a reader before it gives up."""

_Signature = tuple[tuple[str, int, int, int], ...]


class _Cached(NamedTuple):
    signature: _Signature
    versions: list[Versioned]


class _Closed(NamedTuple):
    signature: _Signature
    journal: Journal


class FileConsensus:
    """Consensus below the folder `root`. Safe to share between threads and processes."""

    def __init__(self, root: str | os.PathLike[str], *, patience: Patience = PATIENCE) -> None:
        self.root = Path(root)
        self._patience = patience
        self._folders: dict[str, str] = {}
        self._cache: dict[str, _Cached] = {}
        self._closed: dict[str, _Closed] = {}  # as our own last writes left them

    def head(self, key: str) -> Versioned | None:
        """See `Consensus.head`. Costs a directory listing, and a replay if something changed."""
        versions = self._versions(key)
        return versions[-1] if versions else None

    def compare_and_set(self, key: str, *, expected: int | None, new: Versioned) -> Cas:
        """See `Consensus.compare_and_set`. Costs an fsync; after another's write, a replay of the
        live versions and a second fsync, which makes them durable."""
        require_cas(key, expected=expected, new=new)
        if expected is not None and self._is_unknown(key):
            return Cas.MISMATCH
        where = f"compare-and-set of {key} v{new.seqno}"
        with self._writing(key, where) as (journal, versions):
            if (versions[-1].seqno if versions else None) != expected:
                return Cas.MISMATCH
            journal.append(_SEQNO.pack(new.seqno) + new.data)
            versions.append(new)
        return Cas.COMMITTED

    def scan(self, key: str, *, start: int, limit: int) -> list[Versioned]:
        """See `Consensus.scan`. Costs as `head`."""
        return [v for v in self._versions(key) if v.seqno >= start][:limit]

    def truncate(self, key: str, seqno: int) -> int | None:
        """See `Consensus.truncate`. The versions that stay become the journal's new snapshot."""
        versions = self._versions(key)
        require_truncation(key, seqno, versions[-1] if versions else None)
        with self._writing(key, f"truncation of {key}") as (journal, found):
            kept = [version for version in found if version.seqno >= seqno]
            if len(kept) < len(found):
                journal.snapshot((0, _SEQNO.pack(v.seqno) + v.data) for v in kept)
            gone, found[:] = len(found) - len(kept), kept
            return gone

    def list_keys(self) -> list[str]:
        """See `Consensus.list_keys`. Looks into every key."""
        with storage_errors(str(self.root)):
            if not self.root.is_dir():
                return []
            names = sorted(path.name for path in self.root.iterdir() if path.is_dir())
        return [name for name in names if self._versions(name)]

    def _folder(self, key: str) -> str:
        folder = self._folders.get(key)
        if folder is None:
            folder = self._folders[key] = os.path.join(self.root, require_consensus_key(key))
        return folder

    def _is_unknown(self, key: str) -> bool:
        """Whether nothing was ever written at `key`."""
        folder = self._folder(key)
        try:
            os.stat(folder)  # not `isdir`, for which a failing disk has no folder
        except FileNotFoundError:
            return True
        except OSError as error:
            raise _not_done(f"look at {folder}", error) from error
        return False

    def _versions(self, key: str) -> list[Versioned]:
        """Every live version, ascending, without a lock."""
        folder = self._folder(key)
        for _ in range(_READ_ATTEMPTS):
            try:
                signature = _signature(folder)
                if signature is None:
                    self._closed.pop(key, None)
                    return []
                cached = self._cache.get(key)
                if cached is not None and cached.signature == signature:
                    return cached.versions
                versions = _replayed(folder)
            except RetryableError:
                continue  # a truncation replaced the files while we read
            except CorruptionError:
                if _changed_since(folder, signature):
                    continue  # a writer cut a torn tail off while we read
                raise
            except (StorageError, OSError) as error:
                raise _not_done(f"read of {folder}", error) from error
            self._cache[key] = _Cached(signature, versions)
            return versions
        raise DeterminateError(f"read of {folder}", "truncations kept overtaking it")

    @contextmanager
    def _writing(self, key: str, where: str) -> Iterator[tuple[Journal, list[Versioned]]]:
        """Open the journal of `key` for one writer, with its versions.

        The caller changes the list of versions as it changes the journal.
        """
        versions: list[Versioned] = []
        journal = self._opened(key, where, versions)
        try:
            with journal:
                yield journal, versions
                signature = _signature(self._folder(key)) or ()
                self._cache[key] = _Cached(signature, versions)
            self._closed[key] = _Closed(signature, journal)
        except (StorageError, OSError) as error:
            self._closed.pop(key, None)
            raise _unknown(where, error) from error

    def _opened(self, key: str, where: str, versions: list[Versioned]) -> Journal:
        take = _into(versions)
        monotonic = self._patience.monotonic
        deadline = monotonic() + min(_LOCK_WAIT_S_MAX, self._patience.seconds)
        pause = 0.0002
        folder = self._folder(key)
        while True:
            versions.clear()
            try:
                return self._reopened(key, versions) or Journal.open(
                    folder, restore=take, apply=take, content=_CONTENT
                )
            except LockedError as error:
                if monotonic() > deadline:
                    raise DeterminateError(where, str(error)) from error
            except StorageError as error:
                raise _not_done(where, error) from error
            self._patience.pause(pause)
            pause = min(pause * 2, _LOCK_PAUSE_S_MAX)

    def _reopened(self, key: str, versions: list[Versioned]) -> Journal | None:
        """The journal as our last write left it, if nobody has written since."""
        closed, cached = self._closed.get(key), self._cache.get(key)
        # Versions read since may come from another process: our journal does not know them.
        if closed is None or cached is None or closed.signature != cached.signature:
            return None
        folder = self._folder(key)
        if not closed.journal.reopen(lambda: closed.signature == _signature(folder)):
            return None
        versions += cached.versions
        return closed.journal


def _replayed(folder: str) -> list[Versioned]:
    versions: list[Versioned] = []
    take = _into(versions)
    replay(OS_FILES, folder, restore=take, apply=take, content=_CONTENT)
    return versions


def _into(versions: list[Versioned]) -> Callable[[Record], None]:
    """A function that adds the version in a record to `versions`."""

    def take(record: Record) -> None:
        payload = record.payload
        if len(payload) < _SEQNO.size:
            raise CorruptionError(f"consensus record {record.ordinal}", "it is too short")
        versions.append(Versioned(_SEQNO.unpack_from(payload)[0], payload[_SEQNO.size :]))

    return take


def _changed_since(folder: str, signature: _Signature | None) -> bool:
    """Whether the files of the folder have changed, as far as that can be told."""
    with suppress(OSError):
        return _signature(folder) != signature
    return False


def _signature(folder: str) -> _Signature | None:
    """Names, inodes, sizes and times of the journal's files: some change with every write.

    None where there is no folder. Leaves out a file that a truncation removes meanwhile.
    """
    found = []
    try:
        entries = os.scandir(folder)
    except FileNotFoundError:
        return None
    with entries:
        for entry in entries:
            if entry.name in (LOCK_NAME, COMPACTING_NAME):
                continue  # closing writes to LOCK after the signature was taken
            with suppress(FileNotFoundError):
                status = entry.stat()
                found.append((entry.name, status.st_ino, status.st_size, status.st_mtime_ns))
    return tuple(sorted(found))


def _not_done(where: str, error: OSError | StorageError) -> KVStoreError:
    """The error for a failure that surely had no effect."""
    cause = error.__cause__ if isinstance(error, StorageError) else error
    if isinstance(cause, OSError):
        return not_done(where, cause)
    assert isinstance(error, StorageError)
    return error


def _unknown(where: str, error: OSError | StorageError) -> KVStoreError:
    """The error for a failure in the middle of a write."""
    cause = error.__cause__ if isinstance(error, StorageError) else error
    if isinstance(cause, OSError):
        return translate_os_error(where, cause)
    assert isinstance(error, StorageError)
    return error
