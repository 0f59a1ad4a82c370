"""Tools for a journal that nobody has open, or that was damaged: inspection, salvage, and
compaction beside a writer.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from typing import BinaryIO, Final, Literal

from kvstore.base.arguments import ArgumentKind, word
from kvstore.errors import LockedError, NotAStoreError, UsageError, storage_errors
from kvstore.storage.journal.framing import KIND_JOURNAL, KIND_SNAPSHOT, Note, Record
from kvstore.storage.journal.journal import (
    Journal,
    SnapshotInfo,
    Sync,
    remove_superseded,
    write_snapshot,
)
from kvstore.storage.journal.names import (
    JOURNAL,
    LOCK_NAME,
    SNAPSHOT,
    FileName,
    open_file,
    parse_directory,
    read_note,
    synced_bytes,
)
from kvstore.storage.journal.recovery import Damage, FileScan, StateMachine, TornTail, replay
from kvstore.storage.os_files import OS_FILES, Files

# --------------------------------------------------------------------------------------------------
# Inspection: reports each file of a journal, damaged or not, and the records that are missing.
#
# Costs one pass over every file. Takes no lock; beside a running writer the report shows one moment
# of the live file.


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


# --------------------------------------------------------------------------------------------------
# Salvage: copies the readable records of a damaged journal into a new journal.
#
# The damaged files are only read. The copy has a new identity. A report names each loss by file,
# offset and ordinal. The copy is made beside its place, in a directory whose name ends in
# `.unfinished`, and is renamed when it is whole: a salvage that was killed leaves no journal that
# looks whole, and the next one begins anew.
#
# keep="prefix"   records up to the first loss: a state that the journal once had. The default.
# keep="all"      every readable record, renumbered behind a loss: a state that the journal never
#                 had, for records that do not depend on each other.

Keep = Literal["prefix", "all"]
_KEEP: Final[ArgumentKind[Keep]] = word("prefix", "all")
_UNFINISHED: Final = ".unfinished"


@dataclass(frozen=True, slots=True)
class SalvageReport:
    """The outcome of a salvage.

    `snapshot` is the last ordinal that the copied snapshot covers, `records` the number of copied
    records behind it, `last` the last copied ordinal of the source. `dropped` readable records were
    not copied because they lie behind a loss. `losses` name the records that could not be read.
    """

    source: str
    destination: str
    snapshot: int | None
    snapshot_records: int
    records: int
    last: int
    dropped: int
    losses: tuple[Damage, ...]
    torn: TornTail | None


def salvage(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    keep: Keep = "prefix",
    content: str | None = None,
    files: Files = OS_FILES,
) -> SalvageReport:
    """Copy the readable records of the journal in `source` into a new journal in `destination`.

    `content` names the meaning of the records, if no file of the source tells it any more. Takes no
    lock on the source: close its writer first. Raises `UsageError`, before writing, if
    `destination` is not empty or the content is unknown, and `FormatVersionError` if a newer
    release wrote the source.
    """
    _KEEP.check("keep", keep)
    target = os.path.realpath(os.fspath(destination))
    found = inspect(os.path.abspath(os.fspath(source)), files=files)
    if not found.files and not found.missing:
        raise UsageError(f"{found.path} holds no journal", "check the path")
    said = content if found.content is None else found.content
    if said is None:
        raise UsageError(
            f"no file of {found.path} says any more what its records mean",
            'name the content: content="...", or --content',
        )
    with storage_errors(f"salvage from {found.path} to {target}"):
        if _names(files, target):
            raise UsageError(f"{target} is not empty", "salvage into a new directory")
        unfinished = target + _UNFINISHED
        files.make_directory(unfinished)
        for name in files.names(unfinished):
            files.remove(os.path.join(unfinished, name))
        report = _Salvage(files, found, unfinished, keep=keep, content=said).run()
        files.rename(unfinished, target)
        files.sync_directory(os.path.dirname(target))
        return replace(report, destination=target)


def _names(files: Files, directory: str) -> list[str]:
    try:
        return files.names(directory)
    except FileNotFoundError:
        return []


class _Salvage:
    def __init__(
        self, files: Files, found: Inspection, target: str, *, keep: Keep, content: str
    ) -> None:
        self._files = files
        self._source = found.path
        self._target = target
        self._keep = keep
        self._content = content
        self._found = found
        self._losses: list[Damage] = []
        self._last = 0
        self._records = 0
        self._dropped = 0

    def run(self) -> SalvageReport:
        snapshot = self._copy_snapshot()
        with Journal.open(
            self._target,
            restore=lambda record: None,
            content=self._content,
            sync=Sync.never(),
            files=self._files,
        ) as journal:
            for record in self._surviving():
                journal.append(record.payload, record.type)
                self._records += 1
            snapshot_records = journal.recovery.snapshot_records
        return SalvageReport(
            self._source,
            self._target,
            snapshot=snapshot,
            snapshot_records=snapshot_records,
            records=self._records,
            last=self._last,
            dropped=self._dropped,
            losses=tuple(self._losses),
            torn=next((file.torn for file in self._found.files if file.torn), None),
        )

    def _copy_snapshot(self) -> int | None:
        """Copy the newest sound snapshot. If none is sound, keep="all" copies the readable records
        of the newest."""
        snapshots = [
            file
            for file in reversed(self._found.files)
            if file.name.base == SNAPSHOT and file.name.final
        ]
        for file in snapshots:
            self._losses.extend(file.damages)
        chosen = next((file for file in snapshots if not file.damages), None)
        if chosen is None and self._keep == "all" and snapshots:
            chosen = snapshots[0]
        if chosen is None:
            return None
        write_snapshot(
            self._files,
            self._target,
            ((record.type, record.payload) for record in self._readable(chosen)),
            ordinal=chosen.name.number,
            incarnation=chosen.incarnation,
            content=self._content,
        )
        self._last = chosen.name.number
        return chosen.name.number

    def _surviving(self) -> Iterator[Record]:
        journals = [file for file in self._found.files if file.name.base == JOURNAL]
        lost = False
        for file in journals:
            for item in self._items(file):
                if isinstance(item, Damage):
                    lost = self._lose(item) or lost
                elif item.ordinal <= self._last:
                    continue  # the snapshot covers it
                else:
                    if item.ordinal > self._last + 1 and not lost:
                        lost = self._lose(self._gap(file, item))
                    if lost and self._keep == "prefix":
                        self._dropped += 1
                        continue
                    self._last = item.ordinal
                    yield item
        for missing in self._found.missing:
            self._lose(missing)

    def _gap(self, file: FileReport, record: Record) -> Damage:
        path = file.name.path(self._source)
        return Damage(path, 0, 0, self._last + 1, record.ordinal - 1, "ordinals are missing")

    def _lose(self, damage: Damage) -> bool:
        """Note a damage. Returns whether it lost records that the copy needs."""
        self._losses.append(damage)
        return damage.last is None or damage.last >= max(damage.first, self._last + 1)

    def _items(self, file: FileReport) -> Iterator[Record | Damage]:
        """Records and damages of one file. The next file bounds a damage at the end of this one."""
        following = [
            other.name.number
            for other in self._found.files
            if other.name.base == JOURNAL and other.name > file.name
        ]
        with closing(open_file(self._files, self._source, file.name)) as stream:
            for item in scan_of(stream, self._source, file.name, self._found.note):
                if not isinstance(item, Damage):
                    yield from item
                elif item.last is None and following:
                    yield replace(item, last=min(following) - 1)
                else:
                    yield item

    def _readable(self, file: FileReport) -> Iterator[Record]:
        with closing(open_file(self._files, self._source, file.name)) as stream:
            for item in scan_of(stream, self._source, file.name, self._found.note):
                if not isinstance(item, Damage):
                    yield from item


# --------------------------------------------------------------------------------------------------
# Compaction beside a running writer: another process makes one snapshot of many records.
#
# Compaction reads sealed files only, so the writer does not wait. The holder of the writer's lock
# removes the files that the snapshot supersedes: the writer when it next rotates or opens, or this
# module if there is no writer. (Without another process the writer itself compacts at replay:
# `Journal.open(..., snapshot=...)`.)


@dataclass(frozen=True, slots=True)
class CompactResult:
    """The outcome of a compaction. `snapshot` is None if no record was new.

    `removed` is empty beside a running writer, which removes the files itself.
    """

    snapshot: SnapshotInfo | None
    replayed: int
    removed: tuple[str, ...]


def compact(
    path: str | os.PathLike[str],
    fold: StateMachine,
    *,
    content: str | None = None,
    files: Files = OS_FILES,
) -> CompactResult:
    """Fold the sealed files of the journal in `path` into a new snapshot.

    Costs one replay, and the memory of the state. Raises `LockedError` while another compaction
    runs, `RetryableError` if the writer has written a newer snapshot meanwhile, and
    `JournalDamagedError`. After an error nothing has changed.
    """
    directory = os.path.abspath(os.fspath(path))
    with storage_errors(directory):
        found = replay(
            files,
            directory,
            restore=fold.restore,
            apply=fold.apply,
            content=content,
            include_live=False,
        )
    snapshot = None
    if found.records:
        snapshot = write_snapshot(
            files,
            directory,
            fold.records(),
            ordinal=found.last,
            incarnation=found.incarnation,
            content=found.content or "",
        )
    return CompactResult(snapshot, found.records, _remove_unless_written(files, directory))


def compact_by_content(
    path: str | os.PathLike[str], folds: Mapping[str, Callable[[], StateMachine]]
) -> CompactResult:
    """As `compact`, with the fold for the journal's content.

    Raises `NotAStoreError` if there is no fold for that content.
    """
    content = content_of(path)
    if content is None:
        what = "it has no journal, or none that tells what its records mean"
        raise NotAStoreError(os.fspath(path), what, "check the path")
    if content not in folds:
        raise NotAStoreError(
            os.fspath(path),
            f"its journal holds {content!r}",
            f"contents that can be compacted: {', '.join(sorted(folds))}",
        )
    return compact(path, folds[content](), content=content)


def _remove_unless_written(files: Files, directory: str) -> tuple[str, ...]:
    try:
        with storage_errors(directory):
            lock = files.lock(os.path.join(directory, LOCK_NAME))
    except LockedError:
        return ()
    try:
        return remove_superseded(files, directory)
    finally:
        lock.close()
