"""Salvage: copies the readable records of a damaged journal into a new journal.

The damaged files are only read. The copy has a new identity. A report names each loss by file,
offset and ordinal. The copy is made beside its place, in a directory whose name ends in
`.unfinished`, and is renamed when it is whole: a salvage that was killed leaves no journal that
looks whole, and the next one begins anew.

keep="prefix"   records up to the first loss: a state that the journal once had. The default.
keep="all"      every readable record, renumbered behind a loss: a state that the journal never
                had, for records that do not depend on each other.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Final, Literal

from kvstore.errors import UsageError
from kvstore.errors.system import storage_errors
from kvstore.journal.files import OS_FILES, Files
from kvstore.journal.inspection import FileReport, Inspection, inspect, scan_of
from kvstore.journal.journal import Journal
from kvstore.journal.names import JOURNAL, SNAPSHOT, open_file
from kvstore.journal.records import Record
from kvstore.journal.scan import Damage, TornTail
from kvstore.journal.snapshot import write_snapshot
from kvstore.journal.sync import Sync

Keep = Literal["prefix", "all"]
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
    if keep not in ("prefix", "all"):
        raise UsageError(f"keep={keep!r} is neither 'prefix' nor 'all'", "pass one of the two")
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
