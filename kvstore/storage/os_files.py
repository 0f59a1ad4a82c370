"""The few file operations that a journal and the files beside a store need, so that tests can put a
failing disk below them.

Assumptions about a file system: written bytes are durable after an fsync of their file, and a name
(new, renamed or removed) after an fsync of its directory. A rename is atomic. A sector of
JOURNAL_SECTOR_BYTES is written whole or not at all, also when it is overwritten. Bytes of a file
that were never written read as zeros. Unsynced writes and names may reach the disk in any order.
A successful fsync after a failed one says nothing of bytes written before the failure: they must be
written again.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from contextlib import suppress
from io import FileIO
from typing import BinaryIO, Protocol, cast

from kvstore.base.forks import own, undivided
from kvstore.errors import (
    LockedError,
    NotAStoreError,
)
from kvstore.limits import JOURNAL_READ_BYTES


class Sink(Protocol):
    """A place that takes bytes."""

    def write(self, data: bytes, /) -> int | None:
        """Write some of `data` and return the number of bytes. They survive the process."""
        ...


class Output(Sink, Protocol):
    """A file open for writing at its end."""

    def write(self, data: bytes, /) -> int:
        """See `Sink.write`."""
        ...

    def sync(self) -> None:
        """Make everything written so far survive a crash of the machine."""
        ...

    def close(self) -> None:
        """Close the file. Does not sync."""
        ...


class Lock(Protocol):
    """A held lock, and the few bytes in its file."""

    def write(self, data: bytes, /) -> None:
        """Write `data` at the beginning of the file, without a sync. A crash may lose part of
        it."""
        ...

    def close(self) -> None:
        """Release the lock."""
        ...


class Files(Protocol):
    """A file system, as far as a journal needs one. Errors are `OSError`s."""

    def make_directory(self, path: str) -> None:
        """Create `path` unless it exists, and make its name durable."""
        ...

    def names(self, path: str) -> list[str]:
        """The names in the directory `path`, in any order."""
        ...

    def create(self, path: str) -> Output:
        """Open an empty file. Replaces a file of that name."""
        ...

    def append(self, path: str) -> Output:
        """Open an existing file at its end."""
        ...

    def read(self, path: str) -> BinaryIO:
        """Open a regular file for reading. Never waits for a writer, as a pipe would."""
        ...

    def harden(self, path: str, *, size: int, start: int) -> None:
        """Cut a file to `size`, write its bytes from `start` on again, and make it durable.

        After a failed fsync, bytes that a reader sees may never reach the disk.
        """
        ...

    def rename(self, source: str, target: str) -> None:
        """Give a file or a directory another name beside it. Replaces a file of that name, or an
        empty directory."""
        ...

    def remove(self, path: str) -> None:
        """Remove a file's name."""
        ...

    def sync_directory(self, path: str) -> None:
        """Make the names in `path` survive a crash of the machine."""
        ...

    def lock(self, path: str) -> Lock:
        """Hold `path` alone until closed or the process ends. Raises `LockedError` at once."""
        ...


def require_named(fd: int, path: object) -> None:
    """Raise `OSError` for an open file that was removed, with its directory, say: what is written
    to it succeeds, and is gone when the file is closed. Takes 0.5 us."""
    if os.fstat(fd).st_nlink == 0:
        raise OSError(errno.ENOENT, "it was removed while the store was open", str(path))


class NamedDirectory:
    """A directory that has a file open, as it was found under its name."""

    __slots__ = ("_identity", "_path")

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self._path = os.path.abspath(directory)
        self._identity = self._found()

    def is_there(self) -> bool:
        """Whether the name still leads to the directory: it was neither moved nor replaced. True
        where nobody can tell. Takes 1 us."""
        try:
            return self._found() == self._identity
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:  # such as a directory above that this process may no longer enter
            return True

    def _found(self) -> tuple[int, int]:
        found = os.stat(self._path)
        return found.st_dev, found.st_ino


class _OsOutput:
    __slots__ = ("_file", "_place", "write")

    def __init__(self, path: str, mode: str) -> None:
        self._place = NamedDirectory(os.path.dirname(path) or ".")
        self._file = _open(path, mode)
        self.write = self._file.write  # bound once: no Python frame around the system call

    def sync(self) -> None:
        os.fsync(self._file.fileno())
        require_named(self._file.fileno(), self._file.name)
        if not self._place.is_there():
            what = "its directory was moved away while the store was open"
            raise OSError(errno.ENOENT, what, str(self._file.name))

    def close(self) -> None:
        self._file.close()


class _OsLock:
    def __init__(self, path: str) -> None:
        with undivided():
            self._fd = _open_regular(path, os.O_RDWR | os.O_CREAT, 0o644)
            own(self, path)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BaseException as error:
            self.close()  # closes this descriptor alone: another owner's lock stays
            if isinstance(error, BlockingIOError):
                raise LockedError(path) from error
            raise

    def write(self, data: bytes, /) -> None:
        os.pwrite(self._fd, data, 0)

    def fork_let_go(self) -> None:
        """Close a forked child's copy of the descriptor. The parent keeps its lock, which ends when
        the parent unlocks or when the last copy is closed."""
        if self._fd < 0:
            return
        os.close(self._fd)

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with suppress(OSError):  # also after an error the descriptor and its lock are gone
                try:
                    # Closing alone would leave the lock to a process that is just being forked.
                    fcntl.flock(fd, fcntl.LOCK_UN)
                finally:
                    os.close(fd)


class OsFiles:
    """The operating system's files."""

    def make_directory(self, path: str) -> None:
        """Create `path` and its parents, each name made durable."""
        path = os.path.abspath(path)
        if os.path.isdir(path):
            return
        self.make_directory(os.path.dirname(path))
        os.makedirs(path, exist_ok=True)
        self.sync_directory(os.path.dirname(path))

    def names(self, path: str) -> list[str]:
        """The names in the directory `path`."""
        return os.listdir(path)

    def create(self, path: str) -> Output:
        """Open an empty file."""
        return _OsOutput(path, "wb")

    def append(self, path: str) -> Output:
        """Open an existing file at its end."""
        return _OsOutput(path, "ab")

    def read(self, path: str) -> BinaryIO:
        """Open a file for reading, without a buffer: readers take large pieces."""
        return _open(path, "rb")

    def harden(self, path: str, *, size: int, start: int) -> None:
        """Cut a file, write its end again in place and fsync it. Holds one piece at a time."""
        with _open(path, "r+b") as file:
            file.truncate(size)
            while start < size:
                file.seek(start)
                data = file.read(min(JOURNAL_READ_BYTES, size - start))
                if not data:
                    raise OSError(errno.EIO, f"{path} ends at byte {start}")
                file.seek(start)
                write_all(file, data)
                start += len(data)
            os.fsync(file.fileno())

    def rename(self, source: str, target: str) -> None:
        """Rename atomically."""
        os.replace(source, target)

    def remove(self, path: str) -> None:
        """Unlink."""
        os.unlink(path)

    def sync_directory(self, path: str) -> None:
        """fsync the directory."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def lock(self, path: str) -> Lock:
        """Lock by `flock`: the kernel releases the lock when the process ends in any way."""
        return _OsLock(path)


OS_FILES = OsFiles()


def _open(path: str, mode: str) -> FileIO:
    return cast(FileIO, open(path, mode, buffering=0, opener=_open_regular))


def _open_regular(path: str, flags: int, mode: int = 0o666) -> int:
    """Open a journal's file. Refuses a link, which leads elsewhere, and a pipe, which waits."""
    try:
        fd = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, mode)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise _not_regular(path) from error
        raise
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise _not_regular(path)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _not_regular(path: str) -> NotAStoreError:
    return NotAStoreError(path, "not a regular file", "put the file itself in its place")


def write_all(output: Sink, data: bytes) -> None:
    """Write every byte. One call may write only some: a signal, a quota, a full disk."""
    written = output.write(data) or 0
    while written < len(data):
        data = data[written:]
        written = output.write(data) or 0
