"""System calls that fail: of the calls that touch a directory the n-th, or all from the n-th on.

    with faults(path) as calls:                     # counts the calls
        work()
    with faults(path, nth=7, error=errno.EIO):      # the eighth fails
        work()

Covers the calls that Python code makes by itself: opening, reading, writing, cutting, syncing and
closing files, listing, renaming, linking and removing names, locks. Calls that C++ makes (RocksDB),
and calls on descriptors that C opened, are not seen. A call that fails has had no effect, but a
failed close has closed, as on Linux. Closing a directory cannot fail.

One block at a time, in one thread or several; not for processes that fork inside it.
"""

from __future__ import annotations

import builtins
import errno
import fcntl
import io
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final
from unittest import mock

ERRORS: Final = (errno.EIO, errno.ENOSPC, errno.EACCES, errno.EMFILE)

_BY_PATH: Final = (
    *("open", "listdir", "scandir", "stat", "lstat", "mkdir", "rmdir"),
    *("unlink", "remove", "rename", "replace", "link", "symlink", "truncate", "statvfs"),
)
_BY_DESCRIPTOR: Final = ("fsync", "fdatasync", "fstat", "ftruncate", "read", "write")
_BY_DESCRIPTOR_AT: Final = ("pread", "pwrite", "close")


class Calls:
    """The calls so far, by name and path, and which of them failed."""

    def __init__(self, root: str, nth: int | None, error: int, *, sticky: bool) -> None:
        self.names: list[str] = []
        self.failed: list[str] = []
        self._root = root
        self._nth = nth
        self._error = error
        self._sticky = sticky
        self._lock = threading.Lock()

    def count(self, name: str, path: str) -> OSError | None:
        """Note a call; the error that it is to raise."""
        with self._lock:
            at = len(self.names)
            self.names.append(f"{name} {os.path.relpath(path, self._root)}")
            if self._nth is None or not (at == self._nth or (self._sticky and at > self._nth)):
                return None
            self.failed.append(self.names[-1])
        return OSError(self._error, os.strerror(self._error), path)

    def concerns(self, path: object) -> str | None:
        """The path as text if it lies in the directory."""
        if isinstance(path, int):
            try:
                path = os.readlink(f"/proc/self/fd/{path}")
            except OSError:
                return None
        if not isinstance(path, str | bytes | os.PathLike):
            return None
        text = os.path.abspath(os.fsdecode(path))
        return text if text == self._root or text.startswith(self._root + os.sep) else None


@contextmanager
def faults(
    root: str | os.PathLike[str],
    *,
    nth: int | None = None,
    error: int = errno.EIO,
    sticky: bool = False,
) -> Iterator[Calls]:
    """Count the system calls below `root`; fail number `nth` of them, counted from 0, with `error`.

    With `sticky` all calls from that one on fail.
    """
    calls = Calls(str(Path(root).resolve()), nth, error, sticky=sticky)
    with ExitStack() as stack:
        for name in (*_BY_PATH, *_BY_DESCRIPTOR, *_BY_DESCRIPTOR_AT):
            real = getattr(os, name)
            stack.enter_context(mock.patch.object(os, name, _failing(calls, name, real)))
        flock = _failing(calls, "flock", fcntl.flock)
        stack.enter_context(mock.patch.object(fcntl, "flock", flock))
        opening = _opening(calls)
        for module in (builtins, io):
            stack.enter_context(mock.patch.object(module, "open", opening))
        yield calls


def _failing(calls: Calls, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
    def call(target: Any = ".", *args: Any, **options: Any) -> Any:
        path = calls.concerns(target)
        if name == "close" and path is not None and os.path.isdir(path):
            path = None
        failure = None if path is None else calls.count(name, path)
        if failure is None:
            return real(target, *args, **options)
        if name == "close":
            real(target)
        raise failure

    return call


class _File(io.FileIO):
    """A file whose calls are counted."""

    calls: Calls

    def _count(self, name: str) -> None:
        failure = self.calls.count(name, str(self.name))
        if failure is not None:
            raise failure

    def read(self, size: int | None = -1, /) -> bytes:
        self._count("read")
        return super().read(-1 if size is None else size)

    def readinto(self, buffer: Any, /) -> int | None:  # type: ignore[override, unused-ignore]
        self._count("read")
        return super().readinto(buffer)

    def write(self, data: Any, /) -> int:
        self._count("write")
        return super().write(data)

    def truncate(self, size: int | None = None, /) -> int:
        self._count("truncate")
        return super().truncate(size)

    def seek(self, position: int, whence: int = 0, /) -> int:
        self._count("seek")
        return super().seek(position, whence)

    def close(self) -> None:
        if self.closed:
            return
        failure = self.calls.count("close", str(self.name))
        super().close()
        if failure is not None:
            raise failure


def _opening(calls: Calls) -> Callable[..., Any]:
    real = builtins.open

    def open_counted(
        file: Any,
        mode: str = "r",
        buffering: int = -1,
        encoding: str | None = None,
        errors: str | None = None,
        newline: str | None = None,
        closefd: bool = True,
        opener: Any = None,
    ) -> Any:
        path = calls.concerns(file)
        if path is None or isinstance(file, int):
            return real(file, mode, buffering, encoding, errors, newline, closefd, opener)
        if opener is None:
            failure = calls.count("open", path)
            if failure is not None:
                raise failure
        raw = _File(path, mode.replace("b", "").replace("t", ""), opener=opener)
        raw.calls = calls
        if buffering == 0:
            return raw
        buffered: Any = io.BufferedReader(raw) if mode[0] == "r" else io.BufferedWriter(raw)
        if "b" in mode:
            return buffered
        return io.TextIOWrapper(buffered, encoding, errors, newline)

    return open_counted
