"""Inspection: reports each file of a journal, damaged or not, and the records that are missing.

Costs one pass over every file. Takes no lock; beside a running writer the report shows one moment
of the live file.
"""

from __future__ import annotations

import os
from contextlib import closing
from dataclasses import dataclass
from typing import BinaryIO

from kvstore.errors.system import storage_errors
from kvstore.journal.files import OS_FILES, Files
from kvstore.journal.names import (
    SNAPSHOT,
    FileName,
    open_file,
    parse_directory,
    read_note,
    synced_bytes,
)
from kvstore.journal.records import KIND_JOURNAL, KIND_SNAPSHOT, Note
from kvstore.journal.scan import Damage, FileScan, TornTail


@dataclass(frozen=True, slots=True)
class FileReport:
    """One file: `first..last` are the ordinals of its `records` readable records."""

    name: FileName
    size: int
    records: int
    first: int | None
    last: int | None
    content: str | None
    incarnation: int
    sealed: bool
    repeated: int
    damages: tuple[Damage, ...]
    torn: TornTail | None


@dataclass(frozen=True, slots=True)
class Inspection:
    """A directory's files in order of name. `ignored` are names that are not a journal's, `note` is
    the note in `LOCK`."""

    path: str
    files: tuple[FileReport, ...]
    ignored: tuple[str, ...]
    note: Note | None = None

    @property
    def content(self) -> str | None:
        """The meaning of the records, by the first file that tells it."""
        return next((file.content for file in self.files if file.content is not None), None)

    @property
    def sound(self) -> bool:
        """Whether no file is damaged. A torn tail is no damage, nor is an unfinished snapshot."""
        return not self.missing and not any(
            file.damages for file in self.files if file.name.final or file.name.base != SNAPSHOT
        )

    @property
    def missing(self) -> tuple[Damage, ...]:
        """Records that the note in `LOCK` calls synced and that no file has, not even damaged."""
        if self.note is None:
            return ()
        last = max([0, *map(_last_known, self.files)])
        if self.note.last <= last:
            return ()
        problem = "synced records are missing, as LOCK says"
        return (Damage(self.path, 0, 0, last + 1, self.note.last, problem),)


def inspect(path: str | os.PathLike[str], *, files: Files = OS_FILES) -> Inspection:
    """Read every file of the journal in `path` and report on each. Raises `FormatVersionError`."""
    directory = os.path.abspath(os.fspath(path))
    with storage_errors(directory):
        note = read_note(files, directory)
        names, ignored = parse_directory(files, directory)
        reports = tuple(inspect_file(files, directory, name, note) for name in names)
    return Inspection(directory, reports, ignored, note)


def content_of(path: str | os.PathLike[str], *, files: Files = OS_FILES) -> str | None:
    """The meaning of the records, by the first file that tells it. Reads one piece of that file."""
    directory = os.path.abspath(os.fspath(path))
    with storage_errors(directory):
        for name in parse_directory(files, directory)[0]:
            with closing(open_file(files, directory, name)) as stream:
                scan = scan_of(stream, directory, name)
                next(iter(scan), None)
            if scan.opening is not None:
                return scan.opening.content
    return None


def inspect_file(
    files: Files, directory: str, name: FileName, note: Note | None = None
) -> FileReport:
    """Read one file as far as it can be read. `note` is the note in the directory's `LOCK`."""
    damages: list[Damage] = []
    first = last = None
    with closing(open_file(files, directory, name)) as stream:
        scan = scan_of(stream, directory, name, note)
        for item in scan:
            if isinstance(item, Damage):
                damages.append(item)
            else:
                first = item[0].ordinal if first is None else first
                last = item[-1].ordinal
    return FileReport(
        name,
        size=scan.size,
        records=scan.records,
        first=first,
        last=last,
        content=scan.opening.content if scan.opening else None,
        incarnation=scan.incarnation,
        sealed=scan.sealed,
        repeated=scan.repeated,
        damages=tuple(damages),
        torn=scan.torn,
    )


def _last_known(file: FileReport) -> int:
    """The last ordinal in a file, also one that is lost in a damage with a known end."""
    if file.name.base == SNAPSHOT:
        return file.name.number if file.name.final else 0
    return max([file.last or 0, *(damage.last or 0 for damage in file.damages)])


def scan_of(stream: BinaryIO, directory: str, name: FileName, note: Note | None = None) -> FileScan:
    """The scan of a file, by its name and the note in `LOCK`."""
    snapshot = name.base == SNAPSHOT
    return FileScan(
        stream,
        path=name.path(directory),
        first=1 if snapshot else name.number,
        kind=KIND_SNAPSHOT if snapshot else KIND_JOURNAL,
        live=not name.final,
        synced=0 if snapshot else synced_bytes(note, name),
    )
