"""A RocksDB directory at one moment, read beside the process that writes it.

RocksDB reads the MANIFEST first and the logs after it. Beside a writer the logs may then be newer
than the list of files: RocksDB sees the record of an import and not its files. So a reader notes
the lengths of MANIFEST and logs, and opens a copy of exactly these bytes in a private directory.
Sorted files never change and are read where they lie. Nothing is written to the database's own
directory, which may be read-only or another user's.

    home/CURRENT, MANIFEST-%06d    copies
    home/%06d.log                  a copy of the newest log; links to older logs, which no longer
                                   grow (copies, where an open file has no name to link to)
    directory/%06d.sst             found by RocksDB's option `db_paths`

These bytes are one moment: the bytes that killing the writer would have left. The reasons are
1. MANIFEST and logs are only appended to. A file that was opened stays readable when its name is
   removed.
2. The MANIFEST is read before and after the logs. If its name and length are the same, no file
   came or went meanwhile. If not, everything is read again.
3. A log gets its first byte after the previous log got its last. The lengths of logs are noted
   newest first, so each older log is complete.
4. The names are listed twice. A log that is newer than every log of the first listing is left
   out, so no log between two others is overlooked.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, NamedTuple

from kvstore.base.forks import own
from kvstore.errors import CorruptionError, StaleReaderError, storage_errors
from kvstore.limits import MOMENT_COPY_BYTES, MOMENT_LOOKS_MAX

_MANIFEST = re.compile(rb"(MANIFEST-\d+)\n")
_LOG = re.compile(r"\d+\.log")
_OPEN_FILES: Final = Path("/proc/self/fd")


class ManifestEnd(NamedTuple):
    """The MANIFEST that `CURRENT` names: its name, its file on the disk, and its length.

    RocksDB adds to the MANIFEST whenever a file comes or goes. So two equal ends say that no file
    came or went in between.
    """

    name: str
    device: int
    inode: int
    size: int


class _File(NamedTuple):
    """An open file. Its first `size` bytes belong to the moment."""

    name: str
    descriptor: int
    size: int


class Moment:
    """The MANIFEST and logs of a directory at one moment. Holds them open until closed."""

    def __init__(self, directory: Path, manifest: _File, logs: list[_File]) -> None:
        """`logs` in order of their numbers."""
        self.directory = directory.absolute()
        self._manifest = manifest
        self._logs = logs
        descriptors = [file.descriptor for file in (manifest, *logs)]
        self.close = weakref.finalize(self, _close, descriptors)

    @classmethod
    def of(cls, directory: Path) -> Moment:
        """The moment of this call. Takes 100 us.

        Raises `AccessDeniedError` if a file may not be read, and `StaleReaderError` if the writer
        changed its list of files during each of many attempts.
        """
        with storage_errors(str(directory)):
            for _ in range(MOMENT_LOOKS_MAX):
                found = _look(directory)
                if found is not None:
                    return cls(directory, *found)
        raise StaleReaderError(str(directory))

    def is_past(self) -> bool:
        """Whether the list of files has changed since this moment."""
        with storage_errors(str(self.directory)):
            try:
                end = manifest_end(self.directory)
                return (end.name, end.size) != (self._manifest.name, self._manifest.size)
            except FileNotFoundError:
                return True

    @contextmanager
    def home(self) -> Iterator[Path]:
        """A private temporary directory in which RocksDB can open this moment. It is removed behind
        the block: an open database does not need it."""
        where = "the directory for temporary files (TMPDIR)"
        with storage_errors(where):  # `TemporaryDirectory` is removed when a forked child exits
            home = Path(tempfile.mkdtemp(prefix="kvstore-read-"))
        try:
            self._lay_out(home)
            yield home
        finally:
            with storage_errors(where):
                shutil.rmtree(home)

    def _lay_out(self, home: Path) -> None:
        """Put CURRENT, MANIFEST and logs into the directory `home`. Older logs are links to the
        open files of this process, which no other process can follow."""
        with storage_errors(str(home)):
            (home / "CURRENT").write_text(f"{self._manifest.name}\n")
            _copy(self._manifest, home)
            for log in self._logs[:-1]:
                if _OPEN_FILES.is_dir():
                    (home / log.name).symlink_to(_OPEN_FILES / str(log.descriptor))
                else:
                    _copy(log, home)
            for log in self._logs[-1:]:
                _copy(log, home)


def _look(directory: Path) -> tuple[_File, list[_File]] | None:
    """MANIFEST and logs, None if the list of files changed during the call."""
    opened: list[int] = []
    is_steady = False
    try:
        end = manifest_end(directory)
        manifest = _open(directory, end.name, opened)
        newest = max(map(_number, log_names(directory)), default=0)
        names = [name for name in log_names(directory) if _number(name) <= newest]
        logs = [(name, _open(directory, name, opened)) for name in names]
        ends = {name: os.fstat(log).st_size for name, log in reversed(logs)}
        if manifest_end(directory) == end:
            is_steady = True
            found = [_File(name, log, ends[name]) for name, log in logs]
            return _File(end.name, manifest, end.size), found
    except FileNotFoundError:  # the writer has just removed it
        if not (directory / "CURRENT").exists():
            raise
    finally:
        if not is_steady:
            _close(opened)
    return None


def manifest_end(directory: Path) -> ManifestEnd:
    """The end of the MANIFEST that `CURRENT` names now. Takes 10 us.

    Raises `FileNotFoundError` where there is no `CURRENT`, and where the writer has just removed
    the MANIFEST that it named."""
    current = (directory / "CURRENT").read_bytes()
    match = _MANIFEST.fullmatch(current)
    if match is None:
        raise CorruptionError(str(directory / "CURRENT"), f"it names no MANIFEST: {current[:40]!r}")
    name = match[1].decode()
    found = os.stat(directory / name)
    return ManifestEnd(name, found.st_dev, found.st_ino, found.st_size)


def log_names(directory: Path) -> list[str]:
    """The names of the logs, in order of their numbers."""
    return sorted(filter(_LOG.fullmatch, os.listdir(directory)), key=_number)


def _number(name: str) -> int:
    return int(name.partition(".")[0])


def _open(directory: Path, name: str, opened: list[int]) -> int:
    opened.append(os.open(directory / name, os.O_RDONLY | os.O_CLOEXEC))
    return opened[-1]


def _copy(file: _File, home: Path) -> None:
    at = 0
    with (home / file.name).open("wb") as target:
        while at < file.size:
            size = min(file.size - at, MOMENT_COPY_BYTES)
            piece = os.pread(file.descriptor, size, at)
            if not piece:  # a writer that opened the store has cut a torn tail
                break
            target.write(piece)
            at += len(piece)


def _close(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


# --------------------------------------------------------------------------------------------------
# Homes: private directories in which readers open a database that another process writes.
#
# RocksDB writes an information log beside a database, and rocksdict a file of its own. A home takes
# both, so that the writer's directory may be read-only storage or another user's.
#
#     TMPDIR/kvstore-follow-*/CURRENT, MANIFEST-%06d    links to the writer's files
#                             LOCK                      locked as long as the reader is open
#                             info/                     RocksDB's information log
#
# Invariants
# 1. A home whose lock is free was abandoned by a reader that was killed. The next reader removes
#    it.
# 2. A home gets its name when it is locked, so that no other reader takes it for an abandoned one.

_PREFIX: Final = "kvstore-follow-"
_WHERE: Final = "the directory for temporary files (TMPDIR)"


class ReaderHome:
    """The home of one reader. It is removed when it is closed, and not in a forked child."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._lock = lock
        own(self, f"the directory {path}")

    @classmethod
    def made(cls, directory: Path, manifest: str) -> ReaderHome:
        """A new home for a reader of the database at `directory`. Raises `OutOfSpaceError`."""
        with storage_errors(_WHERE):
            unnamed = Path(tempfile.mkdtemp(prefix=f"new-{_PREFIX}"))
            lock = os.open(unnamed / "LOCK", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX)
                for name in ("CURRENT", manifest):
                    (unnamed / name).symlink_to(directory.absolute() / name)
                path = unnamed.with_name(unnamed.name.removeprefix("new-"))
                unnamed.rename(path)
            except BaseException:
                os.close(lock)
                shutil.rmtree(unnamed, ignore_errors=True)
                raise
            home = cls(path, lock)
            _remove_abandoned(path.parent)
        return home

    def close(self) -> None:
        """Remove the home. Repeatable."""
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)  # the next reader removes what stays
            lock, self._lock = self._lock, -1
            os.close(lock)


def _remove_abandoned(parent: Path) -> None:
    for home in parent.glob(f"{_PREFIX}*"):
        with suppress(OSError):  # it is another user's, or another reader removes it
            lock = os.open(home / "LOCK", os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(home)
            finally:
                os.close(lock)
