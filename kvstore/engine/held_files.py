"""The sorted files of a family, held open for a pass that reads them itself.

RocksDB's iterator gives one entry a call. `kvstore.loops.files` reads the blocks of the files, with
no interpreter lock, several times as fast. This module gives it the files: which ones there are,
in which order they hide each other, and that they stay.

A descriptor keeps a file that RocksDB removes. So nothing is left behind a pass that was killed.

Invariants
1. The files are those of one version of the family: RocksDB tells them at once, with their levels.
2. What lies in memory only is not among them: the caller's engine has flushed it before.
3. A file of a lower number of the level hides one of a greater number. In level 0 RocksDB tells the
   newest file first. The files of another level ascend and do not meet.
4. A file that has something that `kvstore.loops.files` does not read (range deletes of RocksDB,
   merges, blobs, another comparator or index, another format of tables) is not read by it: the
   caller makes a pass of RocksDB instead.
5. A descriptor is closed once no thread reads from it.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

from kvstore.base.forks import own
from kvstore.engine.api import FileSpan, ReadAt
from kvstore.engine.sorted_file import TableFooter, table_footer
from kvstore.errors import ClosedError, CorruptionError, storage_errors
from kvstore.limits import HELD_FILES_MAX
from kvstore.loops.files import Answers, Files, Pass

_LEVEL: Final = re.compile(r"^--- level (\d+) --- version# \d+ ---$")
_FILE: Final = re.compile(
    r"^ (\d+):(\d+)\[\d+ \.\. \d+\]"
    r"\['([0-9A-F]*)' seq:\d+, type:\d+ \.\. '([0-9A-F]*)' seq:\d+, type:\d+\]"
)
"""A line of the property `rocksdb.sstables`: number, bytes, first and last key."""

_Span: TypeAlias = "tuple[bytes, bytes | None]"

_LOOKS_MAX: Final = 20
"""Looks at the list of files before a pass gives up: each time a merge has removed one of them."""


class LevelFile(NamedTuple):
    """A sorted file of a family: its number, its level, and what `FileSpan` has."""

    number: int
    level: int
    span: FileSpan


def live_files(family: Any) -> list[LevelFile]:
    """The files of a family at one moment, the newest of level 0 first. Raises `ValueError` if
    RocksDB tells them in another form."""
    found, level = [], -1
    for line in (family.property_value("rocksdb.sstables") or "").splitlines():
        if head := _LEVEL.match(line):
            level = int(head[1])
        elif file := _FILE.match(line):
            number, size, first, last = file.groups()
            span = FileSpan(bytes.fromhex(first), bytes.fromhex(last), int(size))
            found.append(LevelFile(int(number), level, span))
        elif line.strip():
            raise ValueError(f"RocksDB tells of a file by {line[:200]!r}")
    return found


class Footers:
    """What the ends of files tell, each read once: a file never changes."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._known: dict[int, TableFooter] = {}

    def path(self, file: LevelFile) -> Path:
        """Where a file lies."""
        return self._directory / f"{file.number:06d}.sst"

    def of(self, file: LevelFile, descriptor: int) -> TableFooter:
        """The footer of an open file. Raises `ValueError` for one that no pass of ours reads."""
        if file.number not in self._known:
            self._known[file.number] = table_footer(descriptor)
        return self._known[file.number]

    def keep(self, files: list[LevelFile]) -> None:
        """Forget the files that are gone."""
        if len(self._known) > 2 * len(files) + HELD_FILES_MAX:
            live = {file.number for file in files}
            self._known = {number: each for number, each in self._known.items() if number in live}


def close_all(descriptors: list[int]) -> None:
    """Close descriptors of files that were only read, and forget them. The system lets one go also
    where it tells an error, which says nothing of what was read."""
    for descriptor in descriptors:
        with suppress(OSError):
            os.close(descriptor)
    descriptors.clear()


class OpenFile(NamedTuple):
    """A sorted file that is open."""

    path: Path
    span: FileSpan
    footer: TableFooter
    descriptor: int


class OpenFiles:
    """The files that cross a span, open. Close them when the pass ends."""

    def __init__(self, where: str, runs: Sequence[Sequence[OpenFile]]) -> None:
        """`runs` as `kvstore.loops.files.Files` has them. Their descriptors belong to this object
        from now on."""
        self.spans: Sequence[FileSpan] = [file.span for run in runs for file in run]
        """The files, to cut the span by."""
        self.has_flushed = False
        self._where = where
        self._paths = [[file.path for file in run] for run in runs]
        self._files = Files([[(file.descriptor, *file.footer) for file in run] for run in runs])
        self._descriptors = [file.descriptor for run in runs for file in run]
        self._lock = threading.Lock()
        self._users = 0
        self.is_closed = False
        """Whether the files were let go, perhaps by the end of the engine."""
        own(self, f"a scan of {where}")

    def take(self, one: Pass, rows: int, bytes_max: int, entries: int) -> bool:
        """Have a pass over these files go on: see `Pass.take`."""
        with self._lock:
            if self.is_closed:
                raise ClosedError(f"a scan of {self._where}")
            self._users += 1
        try:
            return one.take(rows, bytes_max, entries)
        except ValueError as error:
            what, at, (run, number) = error.args
            raise CorruptionError(
                str(self._paths[run][number]), f"{what}, at byte {at:,}"
            ) from error
        except OSError as error:
            code, (run, number) = error.args
            path = str(self._paths[run][number])
            with storage_errors(path):
                raise OSError(code, os.strerror(code), path) from error
            raise AssertionError("an error of the system was taken for none") from error
        finally:
            with self._lock:
                self._users -= 1
                self._let_go()

    def begin(
        self,
        begin: bytes,
        end: bytes | None,
        read: ReadAt,
        *,
        keys_only: bool = False,
        whole: bool = False,
        answers: Answers | None = None,
    ) -> Pass:
        """A pass over stored keys: see `Pass`."""
        return Pass(
            self._files, begin, end, *read, keys_only=keys_only, whole=whole, answers=answers
        )

    def close(self) -> None:
        """Let the files go. Repeatable. A thread that reads from them finishes its step first."""
        with self._lock:
            self.is_closed = True
            self._let_go()

    def __del__(self) -> None:
        self.close()  # a pass that was dropped before its first step

    def fork_let_go(self) -> None:
        """In a forked child: the descriptors are copies."""
        close_all(self._descriptors)

    def _let_go(self) -> None:
        if self.is_closed and not self._users:
            close_all(self._descriptors)


def hold_files(
    where: str, footers: Footers, list_files: Callable[[], list[LevelFile]], span: _Span
) -> OpenFiles | None:
    """Open the files that cross `begin <= stored key < end`. None where a pass has to go by
    RocksDB: there are too many, one is of a kind that is not read, or they come and go too fast."""
    begin, end = span
    for _ in range(_LOOKS_MAX):
        try:
            every = list_files()
        except ValueError:
            return None
        footers.keep(every)
        files = [
            file
            for file in every
            if file.span.last >= begin and (end is None or file.span.first < end)
        ]
        if len(files) > HELD_FILES_MAX:
            return None
        opened: list[OpenFile] = []
        try:
            for file in files:
                path = footers.path(file)
                descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                opened.append(OpenFile(path, file.span, _NO_FOOTER, descriptor))
                opened[-1] = opened[-1]._replace(footer=footers.of(file, descriptor))
            held = OpenFiles(where, [[opened[at] for at in run] for run in _runs(files)])
            opened.clear()
            return held
        except FileNotFoundError:
            continue  # a merge has removed it since the look
        except (OSError, ValueError):
            return None  # no descriptors are left, or RocksDB is to say what is wrong
        finally:
            close_all([one.descriptor for one in opened])
    return None


_NO_FOOTER: Final = TableFooter(0, 0, 0, False)


def _runs(files: list[LevelFile]) -> Iterator[list[int]]:
    """The places of the files in runs: each file of level 0, and each other level."""
    levels: dict[int, list[int]] = {}
    for at, file in enumerate(files):
        if file.level == 0:
            yield [at]
        else:
            levels.setdefault(file.level, []).append(at)
    for _, places in sorted(levels.items()):
        yield sorted(places, key=lambda at: files[at].span.first)
