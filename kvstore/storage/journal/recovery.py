"""Replay: from the files of a journal to a state, and the damages between the records.

A torn tail of the live file is what a crash leaves, and is cut. Damage anywhere else is an error
that names file, offset and ordinals.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import BinaryIO, Protocol

from kvstore.errors import (
    JournalDamagedError,
    NotAStoreError,
    UsageError,
    storage_errors,
)
from kvstore.limits import JOURNAL_READ_BYTES, JOURNAL_SECTOR_BYTES
from kvstore.storage.journal.framing import (
    KIND_JOURNAL,
    KIND_SNAPSHOT,
    MARK_RAW_BYTES_MAX,
    PAIR,
    PAYLOAD_AT,
    TYPE_MARK,
    TYPE_OPEN,
    TYPE_RESERVED,
    TYPE_SEAL,
    Note,
    Opening,
    RawRecords,
    Record,
    RecordError,
    StuffingError,
    block_ends,
    checksum_matches,
    decode,
    decode_mark,
    decode_opening,
    decode_run,
    decode_seal,
    find_pair,
    length_in,
    unstuff,
    unstuff_prefix,
)
from kvstore.storage.journal.names import (
    LOCK_NAME,
    FileName,
    Listing,
    list_directory,
    open_file,
    read_note,
    synced_bytes,
)
from kvstore.storage.os_files import OS_FILES, Files

# --------------------------------------------------------------------------------------------------
# Reading one journal file forward: records in batches, and the damages between them.
#
# Each record is decoded on its own, so a damage loses only the records that it touches. A scan
# decides nothing: strict readers raise at the first `Damage`, and salvage continues.
#
# Invariants
# 1. Every byte of the file belongs to a yielded record, a repeated record, the opening, the seal, a
#    `Damage`, or the torn tail of a live file.
# 2. Records come in order of ordinal, each once. A gap is a `Damage` that names the ordinals.
# 3. If the first record of a live file that is not whole is a torn tail (`tail`), the file ends
#    there and the bytes behind it are not read. A file without its opening is damaged, because a
#    file gets its name after its opening is durable.


@dataclass(frozen=True, slots=True)
class Damage:
    """The bytes `offset..end` of `path` are no records, and the ordinals `first..last` are missing.

    `last` is None if the damage reaches the end of the file, and below `first` if no record was
    lost.
    """

    path: str
    offset: int
    end: int
    first: int
    last: int | None
    problem: str

    def error(self) -> JournalDamagedError:
        """The error that stops a strict reader."""
        return JournalDamagedError(
            self.path, offset=self.offset, first=self.first, last=self.last, problem=self.problem
        )


@dataclass(frozen=True, slots=True)
class TornTail:
    """The last `size` bytes of a live file, from `offset` on: unsynced writes that a crash cut."""

    path: str
    offset: int
    size: int


class FileScan:
    """One file's records: iterate for batches of `Record`s and the `Damage` between them.

    The file must begin with the ordinal `first`. The tail of a `live` file may be torn, behind its
    first `synced` bytes. `stream` can seek.
    """

    def __init__(
        self,
        stream: BinaryIO,
        *,
        path: str,
        first: int,
        kind: int = KIND_JOURNAL,
        incarnation: int = 0,
        live: bool = False,
        synced: int = 0,
    ) -> None:
        self._stream = stream
        self._raws = RawRecords(stream)
        self.path = path
        self._kind = kind
        self.live = live
        self._last: Record | None = None
        self._bad: tuple[int, str] | None = None  # the beginning of a damage that has not ended
        self._damaged = False
        self._is_asked = False  # `_ask_whether_torn` has looked at the first damage
        self.opening: Opening | None = None
        self.expected = first
        self.incarnation = incarnation
        self.records = 0
        self.repeated = 0
        self.sealed = False
        self.synced = synced
        """The synced bytes, by the caller and the marks."""
        self.torn: TornTail | None = None

    @property
    def size(self) -> int:
        """The bytes of the file; during the scan, the bytes read so far."""
        return self._raws.end if self.torn is None else self.torn.offset + self.torn.size

    def __iter__(self) -> Iterator[list[Record] | Damage]:
        for offset, data in self._raws:
            at = 0
            while at < len(data):
                if self.opening and not self.sealed and self._bad is None:
                    records: list[Record] = []
                    at, self.synced = decode_run(
                        data,
                        at,
                        base=offset,
                        expected=self.expected,
                        incarnation=self.incarnation,
                        synced=self.synced,
                        records=records,
                    )
                    if records:
                        self._take(records)
                        yield records
                    if at == len(data):
                        break
                following = find_pair(data, at + 1)
                raw = data[at:] if following < 0 else data[at:following]
                yield from self._judge_or_pass_over(offset + at, raw)
                at += len(raw)
                if self._bad is not None and self.live and not self._is_asked:
                    ends = self._raws.ended and at == len(data)
                    yield from self._ask_whether_torn(raw, ends=ends)
                    if self.torn is not None:
                        return
        yield from self._finish()

    def _judge_or_pass_over(self, offset: int, raw: bytes) -> Iterator[list[Record] | Damage]:
        if raw.startswith(PAIR):
            yield from self._judge(raw[len(PAIR) :], offset)
        else:
            self._begin_damage(offset, "no record begins here")

    def _ask_whether_torn(self, raw: bytes, *, ends: bool) -> Iterator[list[Record] | Damage]:
        """End the scan at the damage that begins with `raw`, if it is a torn tail."""
        assert self._bad is not None
        self._is_asked = True
        offset = self._bad[0]
        good = torn_at(raw, offset, ends=ends)
        if good is None or (self.opening is None and not good):
            return
        position = self._stream.tell()
        end = self._raws.end if ends else self._stream.seek(0, os.SEEK_END)
        behind = 0  # beside a writer the file may have grown since it ended with `raw`
        if not ends:
            behind = synced_behind(self._stream, offset + good, identity=self.incarnation >> 32)
            self._stream.seek(position)
        if max(behind, self.synced) > offset + good:
            return
        self._bad, self._damaged = None, False
        if good:
            yield from self._judge(raw[len(PAIR) : good], offset)
        if self._bad is None:
            self.torn = TornTail(self.path, offset + good, end - offset - good)

    def _take(self, records: list[Record]) -> None:
        self._last = records[-1]
        self.expected = self._last.ordinal + 1
        self.records += len(records)

    def _begin_damage(self, offset: int, problem: str) -> None:
        self._damaged = True
        if self._bad is None:
            self._bad = (offset, problem)

    def _judge(self, raw: bytes, offset: int) -> Iterator[list[Record] | Damage]:
        """Judge a record that `decode_run` did not accept: sound, repeated or damaged."""
        try:
            record, _ = decode(raw)
            self._admit(record)
            if record == self._last:
                self.repeated += 1
                return
            if record.ordinal < self.expected:
                raise RecordError(f"ordinal {record.ordinal} comes again with other contents")
            if self._bad is None and record.ordinal > self.expected:
                self._begin_damage(offset, "ordinals are missing")
            if self._bad is not None:
                yield self._end_damage(end=offset, last=record.ordinal - 1)
                self.expected = record.ordinal
            self._enter(record, offset)
        except RecordError as error:
            self._begin_damage(offset, str(error))
            return
        if record.type < TYPE_RESERVED:
            self._take([record])
            yield [record]

    def _admit(self, record: Record) -> None:
        """Refuse a record of another journal, of a replaced writer, or in a wrong place."""
        if self.sealed:
            raise RecordError("a record stands behind the seal")
        if self.incarnation and record.incarnation >> 32 != self.incarnation >> 32:
            raise RecordError("a record of another journal")
        if record.incarnation < self.incarnation:
            raise RecordError("a record of an earlier writer, behind one of a later")
        opens = record.type == TYPE_OPEN
        if opens == (self.opening is not None) and not self._damaged:
            raise RecordError("an opening in the middle" if opens else "no opening record")

    def _enter(self, record: Record, offset: int) -> None:
        """Use an opening, a seal or a mark, and the incarnation of any record."""
        if record.type == TYPE_OPEN:
            opening = decode_opening(record.payload, path=self.path)
            if opening.kind != self._kind:
                raise RecordError("the opening is of another kind of file")
            self.opening = opening
        elif record.type == TYPE_SEAL:
            count = decode_seal(record.payload)
            if count != self.records and not self._damaged:
                raise RecordError(f"{self.records} records, the seal says {count}")
            self.sealed = True
        elif record.type == TYPE_MARK and self._kind == KIND_JOURNAL:
            self.synced = max(self.synced, decode_mark(record.payload, at=offset))
        elif record.type >= TYPE_RESERVED:
            raise RecordError(f"record type {record.type} is not known")
        self.incarnation = max(self.incarnation, record.incarnation)

    def _end_damage(self, *, end: int, last: int | None) -> Damage:
        assert self._bad is not None
        offset, problem = self._bad
        self._bad = None
        return Damage(self.path, offset, end, self.expected, last, problem)

    def _finish(self) -> Iterator[list[Record] | Damage]:
        end = self._raws.end
        if not end:
            self._begin_damage(0, "the file is empty")
        if self._bad is None and self.live and end < self.synced:
            self._begin_damage(end, f"{self.synced} bytes of the file were synced")
        if self._bad is None and not self.live and not self.sealed:
            self._begin_damage(end, "the file ends without its seal")
        if self._bad is not None:
            yield self._end_damage(end=end, last=None)


# --------------------------------------------------------------------------------------------------
# Torn tails: tells the remains of unsynced writes after a crash from records damaged later.
#
# Unsynced records were never acknowledged and may be cut; damage is an error. A power cut leaves
# each unsynced sector of a file in an older state or in the newest, in any combination, and the
# file at any length that it had since the sync. An older sector of a file that only grows has
# zeros, or zeros from the place where a later write began. So the journal ends at the first record
# that is not whole, if
#
# 1. the record lost a sector: its bytes in one of its sectors are all zeros, or the file ends in
#    it;
# 2. its bytes in front of the first such sector are a strict prefix of a valid record;
# 3. nothing says that it was synced: no mark behind it, no mark in front of it, no note in `LOCK`.
#    Whole records behind it prove nothing, because their sectors may have arrived first.
#
# Everything else is damage, because neither a writer nor an honest disk leaves it.
#
# Invariant: no single flipped bit makes a whole record look torn, unless a sector of it is all
# zeros. The head has its own check, and the framing cannot announce more bytes than the head says.
# (Tests flip every bit.)

_MARK_BODY_BYTES = bytes((PAYLOAD_AT + 8,))


def torn_at(raw: bytes, at: int, *, ends: bool) -> int | None:
    """Where in `raw` a torn tail begins by rules 1 and 2, None if `raw` is damaged.

    `raw` stands at byte `at` of its file and reaches from there to the next pair, or with `ends` to
    the end of the file. The answer is 0, or the length of the whole record that `raw` begins with.
    Costs a few passes over `raw`.
    """
    good = 0
    if raw.startswith(PAIR):
        good = _whole_record(raw[len(PAIR) :]) or 0
        good += len(PAIR) if good else 0
    lost = _lost_at(raw, good, at, ends=ends)
    if lost is None or good == len(raw):
        return None
    kept = raw[good:lost]
    if kept in (b"", PAIR[:1]):
        return good
    if good or not kept.startswith(PAIR):
        return None
    return 0 if _is_strict_prefix(kept[len(PAIR) :]) else None


def _lost_at(raw: bytes, begin: int, at: int, *, ends: bool) -> int | None:
    """Where the first sector begins, from `begin` on, whose bytes in `raw` are all zeros."""
    start = begin
    while start < len(raw):
        end = start + JOURNAL_SECTOR_BYTES - (at + start) % JOURNAL_SECTOR_BYTES
        if (end <= len(raw) or ends) and not raw[start:end].strip(b"\0"):
            return start
        start = end
    return len(raw) if ends else None


def synced_behind(stream: BinaryIO, at: int, *, identity: int) -> int:
    """The most synced bytes that a mark behind byte `at` tells, 0 where there is no mark.

    Costs one pass over the rest of the stream, one piece at a time. Leaves the stream anywhere.
    """
    stream.seek(at)
    synced, data, more = 0, b"", True
    while more:
        piece = stream.read(JOURNAL_READ_BYTES)
        more = bool(piece)
        data += piece
        pair = data.find(PAIR)
        while pair >= 0 and (pair + MARK_RAW_BYTES_MAX <= len(data) or not more):
            following = data.find(PAIR, pair + len(PAIR), pair + MARK_RAW_BYTES_MAX)
            end = pair + MARK_RAW_BYTES_MAX if following < 0 else following
            synced = max(synced, _synced_by(data[pair + len(PAIR) : end], at + pair, identity))
            pair = data.find(PAIR, pair + len(PAIR))
        keep = pair if pair >= 0 else max(0, len(data) - 1)
        at, data = at + keep, data[keep:]
    return synced


def _synced_by(raw: bytes, at: int, identity: int) -> int:
    if raw[:1] > _MARK_BODY_BYTES:
        return 0  # a larger record, as most are
    whole = _whole_record(raw)
    if not whole:
        return 0
    record, _ = decode(raw[:whole])
    if record.type != TYPE_MARK or record.incarnation >> 32 != identity:
        return 0
    try:
        return decode_mark(record.payload, at=at)
    except RecordError:
        return 0


def _is_strict_prefix(raw: bytes) -> bool:
    try:
        body, announced, implies_pair = unstuff_prefix(raw)
    except StuffingError:
        return False
    if len(body) < PAYLOAD_AT:
        return True  # no whole record is as short as this
    length = length_in(body)
    if length is None:
        return False
    missing = PAYLOAD_AT + length - len(body)
    if announced and missing:
        return announced <= missing
    if implies_pair and missing != 2:
        return missing > 2
    if missing == 2 and implies_pair:  # all but the last pair, and the empty block behind it
        return checksum_matches(body + PAIR)
    if announced:  # the first digit of that empty block is there
        return raw[-1] == 0 and not unstuff_prefix(raw[:-1]).announced and checksum_matches(body)
    return missing > 0


def _whole_record(raw: bytes) -> int | None:
    """How many bytes of `raw` the valid record at its beginning takes; None if there is none."""
    length: int | None = None
    for end, decoded in block_ends(raw):
        if decoded < PAYLOAD_AT:
            continue
        if length is None:
            length = length_in(unstuff(raw[:end]))
        if length is None or decoded > PAYLOAD_AT + length:
            return None
        if decoded == PAYLOAD_AT + length:
            return end if checksum_matches(unstuff(raw[:end])) else None
    return None


# --------------------------------------------------------------------------------------------------
# Reading a journal's records without building a state.
#
# Readers hold no lock and may run beside the writer. They see whole records only: they stop at the
# tail of the live file, which may be torn or unfinished.


def read(
    path: str | os.PathLike[str], *, from_ordinal: int | None = None, files: Files = OS_FILES
) -> Iterator[Record]:
    """Yield the records of all files, in order.

    `from_ordinal` is the least wanted ordinal, None the oldest that exists. Holds one piece of a
    file at a time. Raises `JournalDamagedError` where a record cannot be read, `UsageError` if a
    snapshot has replaced records from `from_ordinal` on, and `RetryableError` if a file was
    superseded while it was read.
    """
    directory = os.fspath(path)
    with storage_errors(directory):
        yield from _read(directory, from_ordinal, files)


def _read(directory: str, from_ordinal: int | None, files: Files) -> Iterator[Record]:
    note = read_note(files, directory)
    listing = list_directory(files, directory)
    journals = list(listing.with_following())
    covered = listing.snapshot.number if listing.snapshot else 0
    oldest = journals[0][0].number if journals else covered + 1
    least = oldest if from_ordinal is None else from_ordinal
    if least < oldest:
        raise UsageError(
            f"{directory} begins at ordinal {oldest}, {least} is gone", f"read from {oldest} on"
        )
    for file, following in journals:
        if following is not None and following <= least:
            continue
        with closing(open_file(files, directory, file)) as stream:
            scan = FileScan(
                stream,
                path=file.path(directory),
                first=file.number,
                live=not file.final,
                synced=synced_bytes(note, file),
            )
            yield from _forward(scan, least, following)


def _forward(scan: FileScan, least: int, following: int | None) -> Iterator[Record]:
    for batch in strict(scan):
        yield from batch if batch[0].ordinal >= least else (r for r in batch if r.ordinal >= least)
    if following is not None and following != scan.expected:
        problem = "ordinals are missing"
        raise Damage(scan.path, scan.size, scan.size, scan.expected, following - 1, problem).error()


# --------------------------------------------------------------------------------------------------
# Replay: builds a state from a journal's newest snapshot and every record behind it.
#
# Replay checks that records are whole, in order and of this journal. It checks no limit and no
# clock, as a writer does: every accepted record is replayed as it was recorded. It takes no lock
# and changes no file.
#
# Invariants
# 1. `restore` gets every record of the newest complete snapshot, then `apply` every journal record
#    above it, in order of ordinal, each once.
# 2. Only the tail of the live file may be torn. It is reported, and the writer cuts it. All
#    ordinals that the note in `LOCK` calls synced exist.
# 3. Any other missing or damaged record raises an error before a record behind it is applied.

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
