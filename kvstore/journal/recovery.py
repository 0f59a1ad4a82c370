"""Replay: builds a state from a journal's newest snapshot and every record behind it.

Replay checks that records are whole, in order and of this journal. It checks no limit and no clock,
as a writer does: every accepted record is replayed as it was recorded. It takes no lock and changes
no file.

Invariants
1. `restore` gets every record of the newest complete snapshot, then `apply` every journal record
   above it, in order of ordinal, each once.
2. Only the tail of the live file may be torn. It is reported, and the writer cuts it. All ordinals
   that the note in `LOCK` calls synced exist.
3. Any other missing or damaged record raises an error before a record behind it is applied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Protocol

from kvstore.errors import JournalDamagedError, NotAStoreError, UsageError
from kvstore.journal.files import Files
from kvstore.journal.names import (
    LOCK_NAME,
    FileName,
    Listing,
    list_directory,
    open_file,
    read_note,
    synced_bytes,
)
from kvstore.journal.records import KIND_SNAPSHOT, Note, Record
from kvstore.journal.scan import Damage, FileScan, TornTail

Apply = Callable[[Record], object]


class StateMachine(Protocol):
    """A state that replay builds from records and that a snapshot stores as records."""

    def restore(self, record: Record) -> object:
        """Add one record of a snapshot. Its ordinal counts within the snapshot."""
        ...

    def apply(self, record: Record) -> object:
        """Add the journal's next record."""
        ...

    def records(self) -> Iterator[tuple[int, bytes]]:
        """The state as records for `restore`: (type, payload)."""
        ...


@dataclass(frozen=True, slots=True)
class RecoveredFile:
    """The live file as replay found it: its first `bytes` bytes are sound and hold `records`
    records.

    Marks and the note call `synced` bytes synced. `sealed` is True after a crash between the seal
    and the new name.
    """

    name: FileName
    records: int
    bytes: int
    synced: int
    sealed: bool


@dataclass(frozen=True, slots=True)
class Recovery:
    """The findings of a replay: `last` is the last ordinal, 0 for an empty journal."""

    last: int
    incarnation: int
    content: str | None
    snapshot: int | None
    snapshot_records: int
    records: int
    repeated: int
    journal_bytes: int
    snapshot_bytes: int
    torn: TornTail | None
    ignored: tuple[str, ...]
    live: RecoveredFile | None


def replay(
    files: Files,
    directory: str,
    *,
    restore: Apply | None,
    apply: Apply | None,
    content: str | None = None,
    include_live: bool = True,
) -> Recovery:
    """Replay the journal in `directory`. Costs one pass over its newest files.

    Raises `JournalDamagedError`, `NotAStoreError` if the journal holds other `content`,
    `UsageError` if it has records for which no function was passed, and `RetryableError` if a file
    was superseded while it was read.
    """
    return _Replay(files, directory, content).run(restore, apply, include_live=include_live)


class _Replay:
    def __init__(self, files: Files, directory: str, content: str | None) -> None:
        self._files = files
        self._directory = directory
        self._content = content
        self._incarnation = 0
        self._least = 0  # the least incarnation of the records to come
        self._last = 0
        self._records = 0
        self._repeated = 0
        self._bytes = 0
        self._torn: TornTail | None = None
        self._live: RecoveredFile | None = None
        self._note: Note | None = None

    def run(self, restore: Apply | None, apply: Apply | None, *, include_live: bool) -> Recovery:
        note = self._note = read_note(self._files, self._directory)
        listing = list_directory(self._files, self._directory)
        snapshot_records = self._load_snapshot(listing, restore)
        snapshot_bytes, self._bytes = self._bytes, 0
        covered = self._last
        for file in listing.needed():
            if file.final or include_live:
                self._play(file, apply, covered=covered)
        if note is not None and include_live:
            self._check_note(note)
        return Recovery(
            last=self._last,
            incarnation=self._incarnation,
            content=self._content,
            snapshot=listing.snapshot.number if listing.snapshot else None,
            snapshot_records=snapshot_records,
            records=self._records,
            repeated=self._repeated,
            journal_bytes=self._bytes,
            snapshot_bytes=snapshot_bytes,
            torn=self._torn,
            ignored=listing.ignored,
            live=self._live,
        )

    def _load_snapshot(self, listing: Listing, restore: Apply | None) -> int:
        file = listing.snapshot
        if file is None:
            return 0
        path = file.path(self._directory)
        if restore is None:
            raise UsageError(f"{path} holds a state to be restored", "pass restore=")
        with closing(open_file(self._files, self._directory, file)) as stream:
            scan = FileScan(stream, path=path, first=1, kind=KIND_SNAPSHOT)
            for batch in strict(scan):
                self._check_content(scan)
                for record in batch:
                    restore(record)
        self._check_content(scan)
        self._last = file.number
        self._incarnation = scan.incarnation
        # The writer of the snapshot may be a later one than the writer of the records behind it. So
        # only its identity counts.
        self._least = scan.incarnation >> 32 << 32
        self._bytes = scan.size
        return scan.records

    def _play(self, file: FileName, apply: Apply | None, *, covered: int) -> None:
        path = file.path(self._directory)
        self._check_order(file, path, covered=covered)
        with closing(open_file(self._files, self._directory, file)) as stream:
            scan = FileScan(
                stream,
                path=path,
                first=file.number,
                incarnation=self._least,
                live=not file.final,
                synced=synced_bytes(self._note, file),
            )
            for batch in strict(scan):
                self._check_content(scan)
                self._apply(batch, apply, covered=covered, path=path)
        self._check_content(scan)
        self._last = max(self._last, scan.expected - 1)
        self._least = scan.incarnation
        self._incarnation = max(self._incarnation, scan.incarnation)
        self._repeated += scan.repeated
        self._bytes += scan.size
        if not file.final:
            self._torn = scan.torn
            good = scan.torn.offset if scan.torn else scan.size
            self._live = RecoveredFile(file, scan.records, good, scan.synced, scan.sealed)

    def _check_note(self, note: Note) -> None:
        """Refuse a journal that has lost its end, or was replaced by an older copy."""
        if self._incarnation and note.incarnation >> 32 != self._incarnation >> 32:
            problem = "its note is of another journal"
        elif note.last > self._last:
            problem = (
                f"the records up to ordinal {note.last} were synced, as {LOCK_NAME} says "
                "(remove that to continue with an older copy)"
            )
        else:
            return
        raise JournalDamagedError(
            self._directory,
            offset=self._live.bytes if self._live else 0,
            first=self._last + 1,
            last=note.last,
            problem=problem,
        )

    def _check_order(self, file: FileName, path: str, *, covered: int) -> None:
        expected = self._last + 1
        if file.number > expected:
            raise JournalDamagedError(
                path, offset=0, first=expected, last=file.number - 1, problem="ordinals are missing"
            )
        if covered < file.number < expected:
            raise JournalDamagedError(
                path,
                offset=0,
                first=file.number,
                last=expected - 1,
                problem="the file before it has the same ordinals",
            )

    def _apply(self, batch: list[Record], apply: Apply | None, *, covered: int, path: str) -> None:
        if batch[0].ordinal <= covered:
            batch = [record for record in batch if record.ordinal > covered]
        if batch and apply is None:
            raise UsageError(f"{path} holds records to be replayed", "pass apply=")
        assert apply is not None or not batch
        self._records += len(batch)
        for record in batch:
            apply(record)  # type: ignore[misc]

    def _check_content(self, scan: FileScan) -> None:
        assert scan.opening is not None, "a file without it is damaged"
        found = scan.opening.content
        if self._content is not None and found != self._content:
            raise NotAStoreError(
                self._directory,
                f"its journal holds {found!r}, not {self._content!r}",
                f"open it as {found!r}, or give another directory",
            )
        self._content = found


def strict(scan: FileScan) -> Iterator[list[Record]]:
    """The batches of a scan. Raises at the first damage."""
    for item in scan:
        if isinstance(item, Damage):
            raise item.error()
        yield item
