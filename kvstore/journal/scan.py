"""Reading one journal file forward: records in batches, and what is damaged between them.

The file is cut at its pairs, a piece at a time; each part is decoded on its own, so damage costs
the records it touches and no others. A scan decides nothing: strict readers raise at the first
`Damage`, salvage goes on.

Invariants
1. Every byte of the file belongs to a record given out, a repeated record, the opening, the
   seal, a `Damage`, or the torn tail of a live file.
2. Records come in order of ordinal, each once; a jump is a `Damage` that names the ordinals.
3. A short read is not the end of the file: only an empty one is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO
from zlib import crc32

from kvstore.errors import JournalDamagedError
from kvstore.journal.records import (
    HEAD_AT,
    KIND_JOURNAL,
    PAYLOAD_AT,
    TYPE_OPEN,
    TYPE_RESERVED,
    TYPE_SEAL,
    Opening,
    Record,
    RecordError,
    decode,
    decode_opening,
    decode_seal,
    unpack_prefix,
)
from kvstore.journal.stuffing import FIRST_MAX, PAIR, StuffingError, find_pair, unstuff
from kvstore.journal.tail import is_torn_start, torn_at
from kvstore.limits import JOURNAL_READ_BYTES


@dataclass(frozen=True, slots=True)
class Damage:
    """Bytes `offset..end` of `path` that are no records; `first..last` are missing there.

    `last` is None if the file ends with the damage; below `first` if no record was lost.
    """

    path: str
    offset: int
    end: int
    first: int
    last: int | None
    problem: str

    def error(self) -> JournalDamagedError:
        """As the error that stops a strict reader."""
        return JournalDamagedError(
            self.path, offset=self.offset, first=self.first, last=self.last, problem=self.problem
        )


@dataclass(frozen=True, slots=True)
class TornTail:
    """The last `size` bytes of a live file, from `offset` on: a write that a crash cut off."""

    path: str
    offset: int
    size: int


class RawRecords:
    """A byte stream cut at its pairs: yields (offset of the first pair, what follows each).

    `lead` holds the bytes before the first pair; `end` is the stream's length once it is read.
    Holds one piece and one record at a time.
    """

    def __init__(self, stream: BinaryIO, *, start: int = 0) -> None:
        self._stream = stream
        self._start = start
        self.lead = b""
        self.end = start

    def __iter__(self) -> Iterator[tuple[int, list[bytes]]]:
        held: list[bytes] = []
        record_at = -1
        while data := self._stream.read(JOURNAL_READ_BYTES):
            data_at, self.end = self.end, self.end + len(data)
            pair = find_pair(data)
            if data[0] == PAIR[1] and held and held[-1][-1:] == PAIR[:1]:
                held[-1] = held[-1][:-1]
                pair = -1  # the pair lies across the pieces
            elif pair < 0:
                held.append(data)
                continue
            before = b"".join((*held, data[: max(pair, 0)]))
            raws = data[pair + 2 :].split(PAIR)
            last = raws.pop()
            if record_at < 0:
                self.lead = before
                record_at = data_at + pair
            else:
                raws.insert(0, before)
            if raws:
                yield record_at, raws
            held, record_at = [last], self.end - len(last) - len(PAIR)
        if record_at < 0:
            self.lead = b"".join(held)
        else:
            yield record_at, [b"".join(held)]


def decode_run(
    raws: list[bytes], at: int, *, expected: int, incarnation: int, records: list[Record]
) -> int:
    """Decode from `at` on while all is as expected, and say where it stopped being so.

    The hot loop of replay: it knows only the ordinary case and leaves judging to `FileScan`.
    """
    for index in range(at, len(raws)):
        raw = raws[index]
        size = len(raw) - 1
        if PAYLOAD_AT <= size <= FIRST_MAX and raw[0] == size:
            check, checksum, found_in, ordinal, kind, length = unpack_prefix(raw, 1)
            found = crc32(raw[1 + HEAD_AT : 1 + PAYLOAD_AT])
            payload = raw[1 + PAYLOAD_AT :]
        else:
            try:
                body = unstuff(raw)
            except StuffingError:
                return index
            if len(body) < PAYLOAD_AT:
                return index
            check, checksum, found_in, ordinal, kind, length = unpack_prefix(body)
            found = crc32(body[HEAD_AT:PAYLOAD_AT])
            payload = body[PAYLOAD_AT:]
        if (
            ordinal != expected
            or found_in != incarnation
            or crc32(payload, found) != checksum
            or found != check
            or kind >= TYPE_RESERVED
            or length != len(payload)
        ):
            return index
        records.append(Record(ordinal, kind, payload, incarnation))
        expected += 1
    return len(raws)


class FileScan:
    """One file's records: iterate for batches of `Record`s and the `Damage` between them.

    `first` is the ordinal the file must begin with. `live` says that its tail may be torn.
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
    ) -> None:
        self._raws = RawRecords(stream)
        self._path = path
        self._kind = kind
        self._live = live
        self._last: Record | None = None
        self._bad: tuple[int, str] | None = None  # where damage began that has not ended
        self._final_raw: tuple[int, bytes] = (0, b"")
        self._damaged = False
        self.opening: Opening | None = None
        self.expected = first
        self.incarnation = incarnation
        self.records = 0
        self.repeated = 0
        self.sealed = False
        self.torn: TornTail | None = None

    @property
    def size(self) -> int:
        """How many bytes have been read."""
        return self._raws.end

    def __iter__(self) -> Iterator[list[Record] | Damage]:
        for batch_at, raws in self._raws:
            offset, at = batch_at, 0
            if self._raws.lead and not self._damaged and self.opening is None:
                self._begin_damage(0, "no record begins here")
            while at < len(raws):
                if self.opening and not self.sealed and self._bad is None:
                    records: list[Record] = []
                    stop = decode_run(
                        raws,
                        at,
                        expected=self.expected,
                        incarnation=self.incarnation,
                        records=records,
                    )
                    if records:
                        self._take(records)
                        yield records
                    offset += sum(map(len, raws[at:stop])) + len(PAIR) * (stop - at)
                    at = stop
                    if at == len(raws):
                        break
                yield from self._judge(raws[at], offset)
                self._final_raw = (offset, raws[at])
                offset += len(PAIR) + len(raws[at])
                at += 1
        yield from self._finish()

    def _take(self, records: list[Record]) -> None:
        self._last = records[-1]
        self.expected = self._last.ordinal + 1
        self.records += len(records)

    def _begin_damage(self, offset: int, problem: str) -> None:
        self._damaged = True
        if self._bad is None:
            self._bad = (offset, problem)

    def _judge(self, raw: bytes, offset: int) -> Iterator[list[Record] | Damage]:
        """Take one record that is not the ordinary next one: good, repeated or damaged."""
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
            self._enter(record)
        except RecordError as error:
            self._begin_damage(offset, str(error))
            return
        if record.type < TYPE_RESERVED:
            self._take([record])
            yield [record]

    def _admit(self, record: Record) -> None:
        """Refuse a record of another journal, of a writer that was replaced, or out of place."""
        if self.sealed:
            raise RecordError("a record stands behind the seal")
        if self.incarnation and record.incarnation >> 32 != self.incarnation >> 32:
            raise RecordError("a record of another journal")
        if record.incarnation < self.incarnation:
            raise RecordError("a record of an earlier writer, behind one of a later")
        opens = record.type == TYPE_OPEN
        if opens == (self.opening is not None) and not self._damaged:
            raise RecordError("an opening in the middle" if opens else "no opening record")

    def _enter(self, record: Record) -> None:
        """Take in what the journal's own records say, and the incarnation of any."""
        if record.type == TYPE_OPEN:
            opening = decode_opening(record.payload, path=self._path)
            if opening.kind != self._kind:
                raise RecordError("the opening is of another kind of file")
            self.opening = opening
        elif record.type == TYPE_SEAL:
            count = decode_seal(record.payload)
            if count != self.records and not self._damaged:
                raise RecordError(f"{self.records} records, the seal says {count}")
            self.sealed = True
        elif record.type >= TYPE_RESERVED:
            raise RecordError(f"record type {record.type} is not known")
        self.incarnation = max(self.incarnation, record.incarnation)

    def _end_damage(self, *, end: int, last: int | None) -> Damage:
        assert self._bad is not None
        offset, problem = self._bad
        self._bad = None
        return Damage(self._path, offset, end, self.expected, last, problem)

    def _finish(self) -> Iterator[list[Record] | Damage]:
        end = self._raws.end
        if self._bad is None and self._raws.lead and not self._damaged and not self.opening:
            if self._live and is_torn_start(self._raws.lead):
                self.torn = TornTail(self._path, 0, end)
                return
            self._begin_damage(0, "no record begins here")
        offset, raw = self._final_raw
        if self._live and self._bad is not None and self._bad[0] == offset and not self._raws.lead:
            cut = torn_at(raw)
            if cut is not None:
                self._bad, self._damaged = None, False
                if cut:
                    yield from self._judge(raw[:cut], offset)
                if self._bad is None:
                    cut_at = offset + len(PAIR) + cut if cut else offset
                    self.torn = TornTail(self._path, cut_at, end - cut_at)
                    return
        if self._bad is None and not self._live and not self.sealed:
            self._begin_damage(end, "the file ends without its seal")
        if self._bad is not None:
            yield self._end_damage(end=end, last=None)
