"""Reading one journal file forward: records in batches, and the damages between them.

Each record is decoded on its own, so a damage loses only the records that it touches. A scan
decides nothing: strict readers raise at the first `Damage`, and salvage continues.

Invariants
1. Every byte of the file belongs to a yielded record, a repeated record, the opening, the seal, a
   `Damage`, or the torn tail of a live file.
2. Records come in order of ordinal, each once. A gap is a `Damage` that names the ordinals.
3. If the first record of a live file that is not whole is a torn tail (`tail`), the file ends there
   and the bytes behind it are not read. A file without its opening is damaged, because a file gets
   its name after its opening is durable.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

from kvstore.errors import JournalDamagedError
from kvstore.journal.raw import RawRecords, decode_run
from kvstore.journal.records import (
    KIND_JOURNAL,
    TYPE_MARK,
    TYPE_OPEN,
    TYPE_RESERVED,
    TYPE_SEAL,
    Opening,
    Record,
    RecordError,
    decode,
    decode_mark,
    decode_opening,
    decode_seal,
)
from kvstore.journal.stuffing import PAIR, find_pair
from kvstore.journal.tail import synced_behind, torn_at


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
