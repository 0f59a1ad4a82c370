"""The files of a journal: their names, which tell order and state, and the few file operations that
it needs.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from io import FileIO
from itertools import zip_longest
from typing import BinaryIO, Protocol, cast

from kvstore.base.forks import own, undivided
from kvstore.errors import (
    CorruptionError,
    LockedError,
    NotAStoreError,
    RetryableError,
)
from kvstore.limits import JOURNAL_READ_BYTES
from kvstore.storage.journal.records import Note, decode_note

# --------------------------------------------------------------------------------------------------
# The few file operations a journal needs, so that tests can put a failing disk below it.
#
# Assumptions about a file system: written bytes are durable after an fsync of their file, and a
# name (new, renamed or removed) after an fsync of its directory. A rename is atomic. A sector of
# JOURNAL_SECTOR_BYTES is written whole or not at all, also when it is overwritten. Bytes of a file
# that were never written read as zeros. Unsynced writes and names may reach the disk in any order.
# A successful fsync after a failed one says nothing of bytes written before the failure: they must
# be written again.


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


class _OsOutput:
    __slots__ = ("_file", "write")

    def __init__(self, path: str, mode: str) -> None:
        self._file = _open(path, mode)
        self.write = self._file.write  # bound once: no Python frame around the system call

    def sync(self) -> None:
        os.fsync(self._file.fileno())

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


# --------------------------------------------------------------------------------------------------
# File names of a journal, which alone tell the order and the state of its files.
#
#     %016x-journal-new      about to become live, or left by a crash: holds no record
#     %016x-journal          live: the one file that is written, with a durable opening
#     %016x-journal-final    sealed and durable
#     %016x-snapshot         being written, or left by a crash
#     %016x-snapshot-final   complete and durable
#     LOCK                   locked by the writer; holds a note (`records`) of the synced bytes
#     COMPACTING             locked by the process that writes a snapshot
#
# A journal's number is the ordinal of its first record. A snapshot's number is the ordinal of the
# last record that it covers, 0 for none. Numbers are hexadecimal and of fixed width, so that names
# sort as ordinals do.

LOCK_NAME = "LOCK"
COMPACTING_NAME = "COMPACTING"
JOURNAL, SNAPSHOT = "journal", "snapshot"
ORDINAL_MAX = 1 << 62
"""No journal reaches this ordinal, and a sum with it does not overflow 64 bits."""

NOTE_BYTES_MAX = 128
"""Bytes of `LOCK` that are read for a note, which has 48 bytes and a few more."""

_NAME = re.compile(r"([0-9a-f]{16})-([a-z]+)(-final)?$")
_UNBORN = re.compile(r"[0-9a-f]{16}-journal-new$")


@dataclass(frozen=True, slots=True, order=True)
class FileName:
    """One parsed name; sorts by number."""

    number: int
    base: str
    final: bool

    def __str__(self) -> str:
        return f"{self.number:016x}-{self.base}{'-final' if self.final else ''}"

    def path(self, directory: str) -> str:
        """The path of the file."""
        return os.path.join(directory, str(self))

    def unborn_path(self, directory: str) -> str:
        """The path of a live file until its opening is durable."""
        return f"{self.path(directory)}-new"

    def finished(self) -> FileName:
        """The name of the file when it is complete."""
        return FileName(self.number, self.base, True)


@dataclass(frozen=True, slots=True)
class Listing:
    """A directory's journal files, each kind in order of number."""

    journals: tuple[FileName, ...]
    live: FileName | None
    snapshots: tuple[FileName, ...]
    unfinished: tuple[FileName, ...]
    ignored: tuple[str, ...]

    @property
    def snapshot(self) -> FileName | None:
        """The newest complete snapshot."""
        return self.snapshots[-1] if self.snapshots else None

    def with_following(self) -> Iterator[tuple[FileName, int | None]]:
        """Each journal file, the live file last, and the number of the next file."""
        files = self.journals + ((self.live,) if self.live else ())
        return zip_longest(files, (file.number for file in files[1:]))

    def needed(self) -> tuple[FileName, ...]:
        """The journal files with records behind the newest snapshot, the live file last."""
        covered = self.snapshot.number if self.snapshot else 0
        return tuple(
            file
            for file, following in self.with_following()
            if following is None or following > covered + 1
        )

    def superseded(self) -> tuple[FileName, ...]:
        """Complete files that the newest snapshot makes unnecessary, oldest first.

        The newest journal file always stays: only its records tell the journal's last ordinal.
        """
        needed = set(self.needed())
        return tuple(
            sorted([file for file in self.journals if file not in needed] + [*self.snapshots[:-1]])
        )


def is_journal_file(name: str) -> bool:
    """Whether `name` is the name of a file that holds records or a snapshot."""
    match = _NAME.match(name)
    return match is not None and match[2] in (JOURNAL, SNAPSHOT)


def is_unborn(name: str) -> bool:
    """Whether `name` is the name of a live file whose creation a crash cut off."""
    return _UNBORN.match(name) is not None


def read_note(files: Files, directory: str) -> Note | None:
    """The note in `LOCK`. It stays true, so read it before the files that are compared with it."""
    try:
        with files.read(os.path.join(directory, LOCK_NAME)) as stream:
            return decode_note(stream.read(NOTE_BYTES_MAX))
    except FileNotFoundError:
        return None


def synced_bytes(note: Note | None, file: FileName) -> int:
    """How many bytes of a journal file were synced while it was live, by the note."""
    return note.bytes if note is not None and note.number == file.number else 0


def parse_directory(files: Files, directory: str) -> tuple[tuple[FileName, ...], tuple[str, ...]]:
    """A directory's journal files in order of number, and all other names.

    Raises `NotAStoreError` for a file of an unknown kind, which another release wrote.
    """
    found: list[FileName] = []
    ignored: list[str] = []
    for name in _steady_names(files, directory):
        match = _NAME.match(name)
        if match is not None:
            if match[2] not in (JOURNAL, SNAPSHOT):
                raise NotAStoreError(
                    directory,
                    f"file {name} is of an unknown kind",
                    "open it with the release that wrote it",
                )
            number = int(match[1], 16)
            if number > ORDINAL_MAX:
                raise CorruptionError(directory, f"{name} is numbered beyond the last ordinal")
            found.append(FileName(number, match[2], match[3] is not None))
        elif name not in (LOCK_NAME, COMPACTING_NAME) and not is_unborn(name):
            ignored.append(name)
    return tuple(sorted(found)), tuple(ignored)


def list_directory(files: Files, directory: str) -> Listing:
    """List the journal files in `directory`. Other names are reported as `ignored`.

    Raises `NotAStoreError` for a file of an unknown kind, which another release wrote, and
    `CorruptionError` if two files claim to be the live one.
    """
    found, ignored = parse_directory(files, directory)
    journals = [file for file in found if file.base == JOURNAL and file.final]
    live = [file for file in found if file.base == JOURNAL and not file.final]
    live = [file for file in live if file.finished() not in journals]  # renamed while we looked
    if len(live) > 1:
        named = ", ".join(map(str, live))
        raise CorruptionError(directory, f"more than one live journal file: {named}")
    if live and journals and journals[-1].number >= live[0].number:
        raise CorruptionError(directory, f"{journals[-1]} is not older than the live {live[0]}")
    return Listing(
        tuple(journals),
        live[0] if live else None,
        tuple(file for file in found if file.base == SNAPSHOT and file.final),
        tuple(file for file in found if file.base == SNAPSHOT and not file.final),
        ignored,
    )


def open_file(files: Files, directory: str, file: FileName) -> BinaryIO:
    """Open a listed file, even if it has got its final name since.

    Raises `RetryableError` if the file is gone: a snapshot covers it, so list the directory again.
    """
    try:
        return files.read(file.path(directory))
    except FileNotFoundError as error:
        if not file.final:
            return open_file(files, directory, file.finished())
        raise RetryableError(
            f"{file.path(directory)} was superseded while the journal was read", "read it again"
        ) from error


def _steady_names(files: Files, directory: str) -> list[str]:
    """The sorted names. A reader holds no lock, and a listing may miss a file that is being
    renamed. So list until two listings agree, a few times at most."""
    before = sorted(files.names(directory))
    for _ in range(10):
        after = sorted(files.names(directory))
        if after == before:
            break
        before = after
    return before
