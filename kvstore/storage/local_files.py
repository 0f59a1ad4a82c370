"""Blobs and consensus on local files, which any number of processes may share.

A blob is a file that appears under its name when it is complete. A consensus has one journal for
each key. Errors of the operating system are sorted by what the caller should do.
"""

from __future__ import annotations

import errno
import mmap
import os
import secrets
import shutil
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock
from typing import NamedTuple

from kvstore.base.paths import tell_of_parent
from kvstore.errors import (
    AccessDeniedError,
    CorruptionError,
    DeterminateError,
    IndeterminateError,
    KVStoreError,
    LockedError,
    OutOfSpaceError,
    RetryableError,
    StorageError,
    storage_errors,
)
from kvstore.storage.contract import (
    BlobInfo,
    Cas,
    Versioned,
    name_taken,
    require_cas,
    require_consensus_key,
    require_name,
    require_truncation,
)
from kvstore.storage.journal import Journal, Record, replay
from kvstore.storage.journal.names import COMPACTING_NAME, LOCK_NAME
from kvstore.storage.os_files import OS_FILES
from kvstore.storage.patience import PATIENCE, Patience

# --------------------------------------------------------------------------------------------------
# Errors of the operating system, sorted by what a caller of a storage should do about them.

_REFUSALS = (
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ENAMETOOLONG,
    errno.ELOOP,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.EEXIST,
)
"""The path or its permissions are wrong."""
_PASSING = frozenset(
    {
        errno.ENOENT,  # somebody removed the folder: the next attempt makes it again
        errno.EAGAIN,
        errno.EINTR,
        errno.EBUSY,
        errno.ENOMEM,
        errno.EMFILE,
        errno.ENFILE,
        errno.ENOLCK,
        # of network file systems
        errno.ESTALE,
        errno.ETIMEDOUT,
        errno.ECONNABORTED,
        errno.ECONNREFUSED,
        errno.ECONNRESET,
        errno.EHOSTDOWN,
        errno.EHOSTUNREACH,
        errno.ENETDOWN,
        errno.ENETRESET,
        errno.ENETUNREACH,
        errno.ENOTCONN,
        errno.EPIPE,
    }
)
"""Failures of the operating system that another attempt may not meet again."""
_BROKEN = "repair the storage; acknowledged writes stand"


def translate_os_error(where: str, error: OSError) -> KVStoreError:
    """The error for a failed write: a refusal, a full or broken disk, or an unknown outcome, after
    which the call may be retried."""
    lasting = _lasting(where, error)
    return lasting or IndeterminateError(where, str(error))


def not_done(where: str, error: OSError) -> KVStoreError:
    """The error for a call that surely had no effect: a refusal, a full or broken disk, or a
    failure that may pass."""
    lasting = _lasting(where, error)
    return lasting or DeterminateError(where, str(error))


def _lasting(where: str, error: OSError) -> KVStoreError | None:
    """The error to raise at once; None where another attempt may not meet `error` again."""
    if error.errno in _REFUSALS:
        return AccessDeniedError(where, str(error))
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return OutOfSpaceError(where)
    return None if error.errno in _PASSING else StorageError(f"{where} failed: {error}", _BROKEN)


# --------------------------------------------------------------------------------------------------
# Blobs as local files, which any number of processes may share.
#
# A put writes `.tmp-*` beside the target, fsyncs it, links it to its name (which fails where the
# name is taken, unlike a rename) and fsyncs the folder. A crash leaves at most a `.tmp-*` file,
# which no call lists and `sweep` removes.
#
# A file of 64 KiB or more is written past the page cache, 1 MiB at a time. Nobody reads a part
# soon, so pages of the page cache would be found, zeroed and written for nothing: an increment of
# 700 kB takes 1.3 ms with its fsync, and 2.8 ms through the page cache. Other processes gain more.
# A file of 30 MB in the page cache goes to the disk at its fsync. A service that calls fsync on the
# same disk then waits 10 to 17 ms for the whole file. Past the page cache the service waits for 1
# MiB.
#
# Direct writes need aligned memory. The process keeps one aligned buffer, because most of the cost
# lies in fresh pages. A write goes through the page cache while another thread has the buffer, and
# where the file system refuses direct writes.

_TEMPORARY = ".tmp-"
DIRECT: int = getattr(os, "O_DIRECT", 0)
_DIRECT_BYTES_MIN = 64 << 10
"""Smaller files are as quick through the page cache."""
_SLICE_BYTES = 1 << 20
"""Size of a direct write, and of the buffer. The process holds as much of it as it has used."""
_BLOCK_BYTES = 4096
"""The unit of direct writes, on every disk in use."""


class FileBlob:
    """Blobs as files under `root`; see the module."""

    def __init__(self, root: str | os.PathLike[str], *, patience: Patience = PATIENCE) -> None:
        self.root = Path(root)
        self.patience = patience
        self._made: set[str] = set()

    def put(self, name: str, data: bytes, *, durable: bool = True) -> None:
        """See `Blob.put`. Costs one write and, if durable, two fsyncs (file, folder)."""
        path = f"{self.root}/{require_name(name)}"  # text: `Path` objects take 0.1 ms more
        folder = os.path.dirname(path)
        try:
            self._make_folder(folder)
        except OSError as error:
            raise not_done(f"put of {path}", error) from error
        try:
            temporary = f"{folder}/{_TEMPORARY}{secrets.token_hex(8)}"
            try:
                if durable:
                    write_synced(temporary, data)
                else:
                    Path(temporary).write_bytes(data)
                os.link(temporary, path)
            except FileNotFoundError:  # somebody removed the folder
                self._made.clear()
                raise
            finally:
                with suppress(FileNotFoundError):
                    os.unlink(temporary)
            if durable:
                OS_FILES.sync_directory(folder)
        except FileExistsError:
            if self.get(name) != data:
                raise name_taken(name) from None
            try:  # an earlier put may have failed before its fsync
                OS_FILES.sync_directory(folder)
            except OSError as error:
                raise translate_os_error(f"put of {path}", error) from error
        except OSError as error:
            raise translate_os_error(f"put of {path}", error) from error

    def put_file(self, name: str, path: Path) -> None:
        """See `TakesFiles.put_file`. Costs two fsyncs."""
        target = f"{self.root}/{require_name(name)}"
        folder = os.path.dirname(target)
        temporary = f"{folder}/{_TEMPORARY}{secrets.token_hex(8)}"
        try:
            self._make_folder(folder)
            try:
                with path.open("rb") as source, open(temporary, "xb") as copy:
                    shutil.copyfileobj(source, copy, _SLICE_BYTES)
                    copy.flush()
                    os.fsync(copy.fileno())
                os.replace(temporary, target)
            finally:
                with suppress(FileNotFoundError):
                    os.unlink(temporary)
            OS_FILES.sync_directory(folder)
        except OSError as error:
            raise translate_os_error(f"put of {target}", error) from error

    def get(self, name: str) -> bytes | None:
        """See `Blob.get`."""
        try:
            with OS_FILES.read(str(self.path(name))) as file:
                return file.read()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise not_done(f"get of {name}", error) from error

    def get_range(self, name: str, *, start: int, length: int) -> bytes | None:
        """See `Blob.get_range`."""
        try:
            with OS_FILES.read(str(self.path(name))) as file:
                return os.pread(file.fileno(), length, start)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise not_done(f"get of {name}", error) from error

    def size(self, name: str) -> int | None:
        """See `Blob.size`."""
        try:
            return self.path(name).stat().st_size
        except FileNotFoundError:
            return None
        except OSError as error:
            raise not_done(f"size of {name}", error) from error

    def delete(self, name: str) -> int | None:
        """See `Blob.delete`."""
        path = self.path(name)
        try:
            size = path.stat().st_size
            path.unlink()
            OS_FILES.sync_directory(str(path.parent))
        except FileNotFoundError:
            return None
        except OSError as error:
            raise translate_os_error(f"delete of {path}", error) from error
        return size

    def list(self, prefix: str = "") -> Iterator[BlobInfo]:
        """See `Blob.list`. Walks the folder the prefix lies in."""
        folder = prefix.rpartition("/")[0]
        try:
            for name in sorted(_names(self.root, folder)):
                with suppress(FileNotFoundError):  # deleted since the walk
                    if name.startswith(prefix):
                        yield BlobInfo(name, (self.root / name).stat().st_size)
        except OSError as error:
            raise not_done(f"list of {self.root / folder}", error) from error

    def sweep(self, *, before_ns: int) -> int:
        """Remove the files of crashed puts last written before `before_ns`; returns how many."""
        swept = 0
        try:
            for path in self.root.rglob(f"{_TEMPORARY}*"):
                with suppress(FileNotFoundError):  # its put has just ended
                    if path.stat().st_mtime_ns < before_ns:
                        path.unlink()
                        swept += 1
        except OSError as error:
            raise translate_os_error(f"sweep of {self.root}", error) from error
        return swept

    def path(self, name: str) -> Path:
        """The file of `name`, whether it is there or not."""
        return self.root / require_name(name)

    def _make_folder(self, folder: str) -> None:
        """Create `folder` durably: every new level's entry is synced in the level above."""
        if folder in self._made:
            return
        if not os.path.isdir(folder):
            above = os.path.dirname(folder) or "."
            tell_of_parent(self.root.absolute().parent)
            if folder != above:
                self._make_folder(above)
            Path(folder).mkdir(exist_ok=True)
            OS_FILES.sync_directory(above)
        self._made.add(folder)


def _names(root: Path, folder: str) -> Iterator[str]:
    """Every file below `folder`, by its path from `root`, in no order."""
    with suppress(FileNotFoundError), os.scandir(root / folder) as entries:
        for entry in entries:
            name = f"{folder}/{entry.name}" if folder else entry.name
            if entry.is_dir():
                yield from _names(root, name)
            elif not entry.name.startswith(_TEMPORARY):
                yield name


def write_synced(path: str | Path, data: bytes) -> None:
    """Write `data` to the new file `path`, and return once it survives the machine.

    Its name may not survive: the caller fsyncs the folder. Raises `OSError`; a part of the file may
    be there then.
    """
    is_fit = bool(DIRECT) and len(data) >= _DIRECT_BYTES_MIN
    if not (is_fit and write_buffer.lock.acquire(blocking=False)):
        _write(path, iter([memoryview(data)]), len(data))
        return
    try:
        _write(path, write_buffer.slices(data), len(data), DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        with suppress(FileNotFoundError):
            os.unlink(path)
        _write(path, iter([memoryview(data)]), len(data))
    finally:
        write_buffer.lock.release()


class _Buffer:
    """Aligned memory, kept for the life of the process."""

    def __init__(self) -> None:
        self.lock = Lock()
        self._memory: mmap.mmap | None = None

    def slices(self, data: bytes) -> Iterator[memoryview]:
        """Views of the buffer with one slice of `data` after the other, the last one padded to
        whole blocks. The caller has the lock."""
        if self._memory is None:
            # Private: a forked process would write into a shared mapping, which is the default.
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            self._memory = mmap.mmap(-1, _SLICE_BYTES, flags=flags)
        for start in range(0, len(data), _SLICE_BYTES):
            filled = min(_SLICE_BYTES, len(data) - start)
            end = -(-filled // _BLOCK_BYTES) * _BLOCK_BYTES
            self._memory[:filled] = memoryview(data)[start : start + filled]
            self._memory[filled:end] = bytes(end - filled)
            yield memoryview(self._memory)[:end]


write_buffer = _Buffer()


def _write(path: str | Path, slices: Iterator[memoryview], size: int, direct: int = 0) -> None:
    """Write `slices` to a new file, and cut the file to `size` bytes.

    A direct write takes whole blocks, so the padding of the last block is cut off again. That is
    0.1 ms quicker than writing the last bytes through the page cache.
    """
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | direct, 0o666)
    try:
        for piece in slices:
            while piece:
                piece = piece[os.write(file, piece) :]
        if direct:
            os.ftruncate(file, size)
        os.fsync(file)
    finally:
        os.close(file)


# --------------------------------------------------------------------------------------------------
# Consensus on local files: one journal for each key, shared by any number of processes.
#
#     <root>/<key>/   a journal (kvstore.storage.journal), content "kvstore.consensus/1"
#     record          := | seqno u64, big-endian | data |
#     snapshot        the versions that a truncation kept, as records of this kind
#
# A compare-and-set opens the journal for writing, which only one process can, replays it, appends
# one record, fsyncs and closes it. Where no other process has written since its own last write, the
# replay is skipped: then the cost is one fsync. Readers replay without a lock, so they may miss the
# newest version but never see half of a version.
#
# Invariants
# 1. A version that was committed is in the journal and fsynced before the lock is released.
# 2. A crashed process may have written a whole version without acknowledging it. The next writer
#    fsyncs that version and counts it: this is an indeterminate outcome.
# 3. Costs grow with the live versions only: truncation, which collection drives, keeps them few.

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
        if not self._closed and not os.path.isdir(self.root):
            tell_of_parent(self.root.absolute().parent)
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
