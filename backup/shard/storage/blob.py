"""Blob: named byte strings on any storage, each written once.

A shard keeps parts and rollups here. Implementations: `MemoryBlob`, `FileBlob` (local files,
crash-safe), `object_store.ObjectBlob` (S3, GCS, Azure) and `faults.FaultyBlob` around any.

Rules of every implementation (tests/shard/contracts.py holds them to it)
1. A name is written once. `put` is atomic: a reader sees nothing or all of it. Putting the same
   bytes again succeeds (a retry), other bytes raise `UsageError` and change nothing.
2. When `put` or `delete` returns, its effect survives a crash, unless `durable=False`.
3. `list` gives every name with the prefix once, ascending; names put or deleted meanwhile may
   or may not appear.
4. Errors that another attempt meets again: `UsageError` (never done; `AccessDeniedError` where
   the storage refuses), `OutOfSpaceError`, `StorageError` (the storage is broken).
   Errors that may pass: `DeterminateError` (surely not done: retry freely), `IndeterminateError`
   (unknown: all calls here are idempotent, so retry as well). `patience` says for how long.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple, Protocol, runtime_checkable

from backup.shard.storage.newfile import write_synced
from backup.shard.storage.patience import PATIENCE, Patience
from kvstore.errors import (
    AccessDeniedError,
    DeterminateError,
    IndeterminateError,
    KVStoreError,
    OutOfSpaceError,
    StorageError,
    UsageError,
)
from kvstore.journal import OS_FILES

NAME_CHARS_MAX = 255
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=-]*(/[A-Za-z0-9][A-Za-z0-9._=-]*)*")
_TEMPORARY = ".tmp-"
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
_BROKEN = "see to the storage there; what was acknowledged stands"

FAILURES: Final = (AccessDeniedError, DeterminateError, StorageError)
"""How a storage fails: what is passed over where the call may as well be left undone."""


class BlobInfo(NamedTuple):
    """One listed blob."""

    name: str
    size: int


class Blob(Protocol):
    """The contract; see the module's rules."""

    @property
    def patience(self) -> Patience:
        """How long the calls of its users are made again."""
        ...

    def put(self, name: str, data: bytes, *, durable: bool = True) -> None:
        """Write `data` under a new name, durably; if not `durable`, a crash of the machine may
        leave any of it, or none."""
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
        """Remove `name`; its size (0 for an empty one), or None if there was none.

        A storage that does not report it answers the size it saw just before.
        """
        ...

    def list(self, prefix: str = "") -> Iterator[BlobInfo]:
        """Every blob whose name begins with `prefix`, ascending."""
        ...

    def restore(self, name: str) -> None:
        """Succeed if `name` exists afterwards; raises `DeterminateError` if it cannot be had.

        Storages that keep deleted versions may bring one back; the others only look.
        """
        ...


def require_name(name: str) -> str:
    """Return `name` if every storage can hold it: segments of plain characters between slashes.

    Raises `UsageError` otherwise, so that a name can never climb out of its folder.
    """
    if len(name) > NAME_CHARS_MAX or not _NAME.fullmatch(name):
        raise UsageError(
            f"{name!r} is not a blob name", "use letters, digits, . _ = - between slashes"
        )
    return name


def name_taken(name: str) -> UsageError:
    """The error of putting other bytes under a name in use."""
    return UsageError(
        f"blob {name} exists with other bytes", "names are written once: take a new one"
    )


class MemoryBlob:
    """Blobs in a dict. Shared by all handles on it; the reference for the others."""

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

    def restore(self, name: str) -> None:
        """See `Blob.restore`: deleted bytes are not kept."""
        restore_existing(self, name)


class FileBlob:
    """Blobs as files under `root`; any number of processes may use one folder.

    A put writes `.tmp-*` beside the target, fsyncs it, links it to its name (which fails where
    the name is taken, unlike a rename) and fsyncs the folder. A crash leaves at most a `.tmp-*`
    file, which no call lists and `sweep` removes.
    """

    def __init__(self, root: str | os.PathLike[str], *, patience: Patience = PATIENCE) -> None:
        self.root = Path(root)
        self.patience = patience
        self._made: set[str] = set()

    def put(self, name: str, data: bytes, *, durable: bool = True) -> None:
        """See `Blob.put`. Costs one write and, if durable, two fsyncs (file, folder)."""
        path = f"{self.root}/{require_name(name)}"  # of strings: objects take 0.1 ms more
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
            OS_FILES.sync_directory(folder)  # an earlier put may have failed before its own
        except OSError as error:
            raise translate_os_error(f"put of {path}", error) from error

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

    def restore(self, name: str) -> None:
        """See `Blob.restore`: deleted files are not kept."""
        restore_existing(self, name)

    def sweep(self, *, before_ns: int) -> int:
        """Remove what crashed puts left that was last written before `before_ns`; how many."""
        swept = 0
        for path in self.root.rglob(f"{_TEMPORARY}*"):
            with suppress(FileNotFoundError):  # its put has just ended
                if path.stat().st_mtime_ns < before_ns:
                    path.unlink()
                    swept += 1
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
            if folder != above:
                self._make_folder(above)
            Path(folder).mkdir(exist_ok=True)
            OS_FILES.sync_directory(above)
        self._made.add(folder)


@runtime_checkable
class Sweeps(Protocol):
    """A blob on which a crashed put leaves something."""

    def sweep(self, *, before_ns: int) -> int:
        """Remove what crashed puts left that was last written before `before_ns`; how many."""
        ...


def sweep(blob: Blob, *, before_ns: int) -> int:
    """See `Sweeps`; nothing where a storage leaves nothing."""
    return blob.sweep(before_ns=before_ns) if isinstance(blob, Sweeps) else 0


def restore_existing(blob: Blob, name: str) -> None:
    """Restore on a storage that keeps nothing deleted: succeeds if the blob exists."""
    if blob.size(name) is None:
        raise DeterminateError(f"restore of {name}", "it was deleted, and nothing deleted is kept")


def translate_os_error(where: str, error: OSError) -> KVStoreError:
    """A failed write of the operating system: refused, a full or broken disk, or an unknown
    outcome that may pass."""
    lasting = _lasting(where, error)
    return lasting or IndeterminateError(where, str(error))


def not_done(where: str, error: OSError) -> KVStoreError:
    """A call of the operating system that surely had no effect: refused, a full or broken disk, or
    a failure that may pass."""
    lasting = _lasting(where, error)
    return lasting or DeterminateError(where, str(error))


def _lasting(where: str, error: OSError) -> KVStoreError | None:
    """The error to raise at once; None where another attempt may not meet `error` again."""
    if error.errno in _REFUSALS:
        return AccessDeniedError(where, str(error))
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return OutOfSpaceError(where)
    return None if error.errno in _PASSING else StorageError(f"{where} failed: {error}", _BROKEN)


def _names(root: Path, folder: str) -> Iterator[str]:
    """Every file below `folder`, by its path from `root`, in no order."""
    with suppress(FileNotFoundError), os.scandir(root / folder) as entries:
        for entry in entries:
            name = f"{folder}/{entry.name}" if folder else entry.name
            if entry.is_dir():
                yield from _names(root, name)
            elif not entry.name.startswith(_TEMPORARY):
                yield name
