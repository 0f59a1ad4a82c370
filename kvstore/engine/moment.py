"""A RocksDB directory at one moment, looked at beside the process that writes it.

RocksDB opens a database by reading the MANIFEST first and the logs after it. Beside a writer the
logs are then newer than the list of files: the record of an import is seen, its files are not. So
a reader takes down how far MANIFEST and logs reach, and opens a copy of exactly these bytes in a
private directory. Sorted files never change: they are read where they lie. Nothing is written to
the database's own directory, which may be read-only or another user's.

    home/CURRENT, MANIFEST-%06d    copies
    home/%06d.log                  the newest a copy, older ones links: nobody appends to those
                                   (or copies, where an open file has no name to link to)
    directory/%06d.sst             found by RocksDB's option `db_paths`

Why these bytes are one moment, namely what a kill of the writer would have left there
1. MANIFEST and logs are only appended to. A file that was opened stays readable when its name is
   removed.
2. A MANIFEST that is the same, and as long, before and after the look at the logs says that no
   file came or went meanwhile. If it has grown, the look is repeated.
3. A log gets its first byte after the log before it got its last. The logs' ends are taken down
   newest first, so each older one is complete up to the newest one.
4. The names are listed twice, and a log above the first listing's newest is left out, so no log
   between two others is overlooked.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

from kvstore.errors import CorruptionError, StaleReaderError
from kvstore.journal.files import storage_errors
from kvstore.limits import MOMENT_COPY_BYTES, MOMENT_LOOKS_MAX

_MANIFEST = re.compile(rb"(MANIFEST-\d+)\n")
_LOG = re.compile(r"\d+\.log")
_OPEN_FILES: Final = Path("/proc/self/fd")


class _File(NamedTuple):
    """An open file, of which the first `size` bytes count."""

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
        """The moment of this call. Some 100 us.

        Raises `AccessDeniedError` if a file may not be read, and `StaleReaderError` if the writer
        changed its list of files during each of many looks.
        """
        with storage_errors(str(directory)):
            for _ in range(MOMENT_LOOKS_MAX):
                found = _look(directory)
                if found is not None:
                    return cls(directory, *found)
        raise StaleReaderError(str(directory))

    def is_past(self) -> bool:
        """Whether the list of files has changed since."""
        with storage_errors(str(self.directory)):
            try:
                return _end_of_manifest(self.directory) != self._manifest._replace(descriptor=-1)
            except FileNotFoundError:
                return True

    @contextmanager
    def home(self) -> Iterator[Path]:
        """A private directory to open it in, in the place for temporary files, for as long as the
        block runs. RocksDB does not need it any more once it is open."""
        where = "the directory for temporary files (TMPDIR)"
        with storage_errors(where):  # `TemporaryDirectory` is removed when a forked child exits
            home = Path(tempfile.mkdtemp(prefix="kvstore-read-"))
        try:
            self.lay_out(home, links=True)
            yield home
        finally:
            with storage_errors(where):
                shutil.rmtree(home)

    def lay_out(self, home: Path, *, links: bool = False) -> None:
        """Put CURRENT, MANIFEST and logs into the directory `home`.

        With `links`, older logs are links to what this process holds open, for itself alone.
        """
        with storage_errors(str(home)):
            home.mkdir(mode=0o700, exist_ok=True)
            (home / "CURRENT").write_text(f"{self._manifest.name}\n")
            _copy(self._manifest, home)
            for log in self._logs[:-1]:
                if links and _OPEN_FILES.is_dir():
                    (home / log.name).symlink_to(_OPEN_FILES / str(log.descriptor))
                else:
                    _copy(log, home)
            for log in self._logs[-1:]:
                _copy(log, home)


def _look(directory: Path) -> tuple[_File, list[_File]] | None:
    """MANIFEST and logs, None if the list of files changed meanwhile."""
    opened: list[int] = []
    is_steady = False
    try:
        end = _end_of_manifest(directory)
        manifest = _open(directory, end.name, opened)
        newest = max(map(_number, _logs(directory)), default=0)
        names = [name for name in _logs(directory) if _number(name) <= newest]
        logs = [(name, _open(directory, name, opened)) for name in names]
        ends = {name: os.fstat(log).st_size for name, log in reversed(logs)}
        if _end_of_manifest(directory) == end:
            is_steady = True
            found = [_File(name, log, ends[name]) for name, log in logs]
            return end._replace(descriptor=manifest), found
    except FileNotFoundError:  # the writer has just removed it
        if not (directory / "CURRENT").exists():
            raise
    finally:
        if not is_steady:
            _close(opened)
    return None


def _end_of_manifest(directory: Path) -> _File:
    """The MANIFEST that `CURRENT` names, and its length. Not opened: its descriptor is -1."""
    current = (directory / "CURRENT").read_bytes()
    match = _MANIFEST.fullmatch(current)
    if match is None:
        raise CorruptionError(str(directory / "CURRENT"), f"it names no MANIFEST: {current[:40]!r}")
    name = match[1].decode()
    return _File(name, -1, os.stat(directory / name).st_size)


def _logs(directory: Path) -> list[str]:
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
