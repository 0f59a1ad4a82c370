"""The few file operations a journal needs, so that tests can put a failing disk below it.

What is assumed of a file system: bytes written are durable after an fsync of their file, a name
(new, renamed or removed) after an fsync of its directory, and a rename is atomic. Nothing is
assumed of the order in which unsynced writes reach the disk.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO, Protocol

from kvstore.errors import AccessDeniedError, LockedError, OutOfSpaceError, StorageError


class Output(Protocol):
    """A file open for writing at its end."""

    def write(self, data: bytes, /) -> int:
        """Write some of `data` and say how many bytes; what is written survives the process."""
        ...

    def sync(self) -> None:
        """Return when everything written so far survives the machine."""
        ...

    def close(self) -> None:
        """Give the file back. Does not sync."""
        ...


class Lock(Protocol):
    """A held lock."""

    def close(self) -> None:
        """Let go."""
        ...


class Files(Protocol):
    """A file system, as far as a journal needs one. Errors are `OSError`s."""

    def make_directory(self, path: str) -> None:
        """Create `path`, and make its name durable. Fine if it exists."""
        ...

    def names(self, path: str) -> list[str]:
        """The names in the directory `path`, in any order."""
        ...

    def create(self, path: str) -> Output:
        """Open an empty file, whatever was there before."""
        ...

    def append(self, path: str) -> Output:
        """Open an existing file at its end."""
        ...

    def read(self, path: str) -> BinaryIO:
        """Open a file for reading."""
        ...

    def truncate(self, path: str, size: int) -> None:
        """Cut a file to `size`, and make that durable."""
        ...

    def rename(self, source: str, target: str) -> None:
        """Give a file another name in its directory, replacing what has it."""
        ...

    def remove(self, path: str) -> None:
        """Remove a file's name."""
        ...

    def sync_directory(self, path: str) -> None:
        """Return when the names in `path` survive the machine."""
        ...

    def lock(self, path: str) -> Lock:
        """Hold `path` alone until closed or the process ends. Raises `LockedError` at once."""
        ...


class _OsOutput:
    __slots__ = ("_file", "write")

    def __init__(self, path: str, mode: str) -> None:
        self._file = open(path, mode, buffering=0)  # noqa: SIM115 - closed by close()
        self.write = self._file.write  # bound once: no Python frame around the system call

    def sync(self) -> None:
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


class _OsLock:
    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._fd)
            raise LockedError(path) from error

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


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
        return open(path, "rb", buffering=0)

    def truncate(self, path: str, size: int) -> None:
        """Cut a file and fsync it."""
        with open(path, "r+b", buffering=0) as file:
            file.truncate(size)
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
        """flock: the kernel lets go when the process ends, however it ends."""
        return _OsLock(path)


OS_FILES = OsFiles()


@contextmanager
def storage_errors(where: str) -> Iterator[None]:
    """Translate what the operating system raises into this project's errors."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise OutOfSpaceError(where) from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise AccessDeniedError(where, str(error)) from error
        raise StorageError(f"{where}: {error}", "look at the disk, then open it again") from error


def write_all(output: Output, data: bytes) -> None:
    """Write every byte: one call may take only some (a signal, a quota, a full disk)."""
    written = output.write(data)
    while written < len(data):
        data = data[written:]
        written = output.write(data)
