"""The state of the memory engine, and the journal records from which it is built.

    record type   payload                                  meaning
    1 batch       entries                                  one engine batch
    2 rows        ingest id u64 | entries                  rows of an ingest, not yet in `data`
    3 taken       ingest id u64                            the rows of the ingest are in `data`
    4 dropped     ingest id u64                            the rows of the ingest are discarded
    5 state       entries                                  a piece of a snapshot

    entries := | count u32 | op u8 x count | key bytes u32 x count | value bytes u32 x count
               | keys | values |                           all integers little-endian
    op      := family (2 bits, 0 data, 1 ranges, 2 changes, 3 meta) | kind << 2
    kind    := 0 put | 1 delete | 2 delete range, whose value is the end of the range

Entries are stored as columns, so that all lengths of a record are read in one step.

Invariants
1. A batch is one record: the journal keeps it whole or not at all.
2. An ingest is many records, so that no record grows with its size. `taken` commits it. Rows
   without `taken` or `dropped` belong to the process that wrote them: the first record of another
   incarnation drops them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, islice
from operator import lt
from typing import Final, TypeAlias

from kvstore.engine.api import DATA, FAMILIES
from kvstore.engine.editions import Edition, pieces
from kvstore.errors import CorruptionError
from kvstore.journal import Record
from kvstore.limits import MEMORY_RECORD_BYTES

CONTENT: Final = "kvstore-memory-1"
"""The content that a journal of these records names; the number is the format's version."""

BATCH: Final = 1
ROWS: Final = 2
TAKEN: Final = 3
DROPPED: Final = 4
STATE: Final = 5

PUT: Final = 0
DELETE: Final = 1
DELETE_RANGE: Final = 2
FAMILY_MASK: Final = 0b11
KIND_SHIFT: Final = 2

FAMILY_NUMBERS: Final = {family: number for number, family in enumerate(FAMILIES)}
_DATA: Final = FAMILY_NUMBERS[DATA]
SortedRows: TypeAlias = "tuple[list[bytes], list[bytes]]"
"""Keys and values, ascending by key."""

_COUNT = struct.Struct("<I")
_INGEST_ID = struct.Struct("<Q")


_BATCH_OPS = bytes(
    family | kind << KIND_SHIFT for family in range(len(FAMILIES)) for kind in range(3)
)
_SORTED_OPS = bytes(family | PUT << KIND_SHIFT for family in range(len(FAMILIES)))


class Entries:
    """Operations in the order in which they take effect, as three columns."""

    __slots__ = ("keys", "ops", "values")

    def __init__(self) -> None:
        self.ops = bytearray()
        self.keys: list[bytes] = []
        self.values: list[bytes] = []

    def put(self, key: bytes, value: bytes, column_family: int) -> None:
        """Set `key` to `value`; the last write to a key wins."""
        self.ops.append(column_family)
        self.keys.append(key)
        self.values.append(value)

    def delete(self, key: bytes, column_family: int) -> None:
        """Remove `key`, whether or not it is there."""
        self.ops.append(column_family | DELETE << KIND_SHIFT)
        self.keys.append(key)
        self.values.append(b"")

    def delete_range(self, begin: bytes, end: bytes, column_family: int) -> None:
        """Remove the keys `begin <= key < end`."""
        self.ops.append(column_family | DELETE_RANGE << KIND_SHIFT)
        self.keys.append(begin)
        self.values.append(end)

    def apply(self, editions: Sequence[Edition]) -> None:
        """Apply each operation to the edition of its family."""
        for op, key, value in zip(self.ops, self.keys, self.values, strict=True):
            edition, kind = editions[op & FAMILY_MASK], op >> KIND_SHIFT
            if kind == PUT:
                edition.put(key, value)
            elif kind == DELETE:
                edition.delete(key)
            else:
                edition.delete_range(key, value)


class MemoryState:
    """The families of an engine and the ingests under way: a fold over journal records."""

    def __init__(self) -> None:
        self.families = [Edition() for _ in FAMILIES]
        self.ingests: dict[int, list[SortedRows]] = {}
        self._incarnation = 0

    def restore(self, record: Record) -> None:
        """Take in one record of a snapshot."""
        if record.type == STATE:
            family, keys, values = decode_sorted(record.payload)
            self.families[family].merge(keys, values)
            self._incarnation = record.incarnation
        elif record.type == ROWS:
            self.apply(record)
        else:
            raise _broken(record, f"type {record.type} in a snapshot")

    def apply(self, record: Record) -> None:
        """Take in the journal's next record."""
        if record.incarnation != self._incarnation:
            self._incarnation = record.incarnation
            self.ingests.clear()
        payload = record.payload
        if record.type == BATCH:
            entries = Entries()
            ops, entries.keys, entries.values = decode(payload)
            if ops.translate(None, _BATCH_OPS):
                raise _broken(record, "an operation is not known")
            entries.ops = bytearray(ops)
            entries.apply(self.families)
        elif record.type == ROWS:
            ingest_id = _ingest_id(payload[: _INGEST_ID.size])
            family, keys, values = decode_sorted(payload, at=_INGEST_ID.size)
            if family != _DATA:
                raise _broken(record, f"rows of an ingest for family {family}")
            self.add_rows(ingest_id, keys, values)
        elif record.type == TAKEN:
            self.families[_DATA] = self.with_ingest(_ingest_id(payload))
        elif record.type == DROPPED:
            self.ingests.pop(_ingest_id(payload), None)
        else:
            raise _broken(record, f"type {record.type} is not known")

    def records(self) -> Iterator[tuple[int, bytes]]:
        """The state as records for `restore`: (type, payload)."""
        yield from state_records(self.families)
        for ingest_id, rows in self.ingests.items():
            for keys, values in rows:
                yield ROWS, encode_rows(ingest_id, keys, values)

    def add_rows(self, ingest_id: int, keys: list[bytes], values: list[bytes]) -> None:
        """Keep rows of an ingest until it is taken or dropped."""
        self.ingests.setdefault(ingest_id, []).append((keys, values))

    def with_ingest(self, ingest_id: int) -> Edition:
        """A new edition of `data` with the rows of an ingest. Ends the ingest."""
        edition = self.families[_DATA].fork()
        for keys, values in self.ingests.pop(ingest_id, ()):
            edition.merge(keys, values)
        return edition


def state_records(families: Iterable[Edition]) -> Iterator[tuple[int, bytes]]:
    """Snapshot records of these families, in their order."""
    for number, edition in enumerate(families):
        for keys, values in bounded(pieces(edition)):
            yield STATE, encode(bytes([number]) * len(keys), keys, values)


def bounded(rows: Iterable[SortedRows]) -> Iterator[SortedRows]:
    """The same rows in pieces of at most `MEMORY_RECORD_BYTES`, or one row that is larger."""
    for keys, values in rows:
        sizes = [len(key) + len(value) for key, value in zip(keys, values, strict=True)]
        first = size = 0
        for index, row in enumerate(sizes):
            if size + row > MEMORY_RECORD_BYTES and index > first:
                yield keys[first:index], values[first:index]
                first, size = index, 0
            size += row
        if first < len(keys):
            yield keys[first:], values[first:]


def encode(ops: bytes | bytearray, keys: Sequence[bytes], values: Sequence[bytes]) -> bytes:
    """The bytes of entries in a record."""
    count = len(ops)
    lengths = [len(key) for key in keys]
    lengths += map(len, values)
    head = struct.pack(f"<I{count}s{2 * count}I", count, bytes(ops), *lengths)
    return b"".join((head, *keys, *values))


def encode_rows(ingest_id: int, keys: Sequence[bytes], values: Sequence[bytes]) -> bytes:
    """The payload of a `ROWS` record."""
    return encode_ingest(ingest_id) + encode(bytes([_DATA]) * len(keys), keys, values)


def encode_ingest(ingest_id: int) -> bytes:
    """The payload of a `TAKEN` or `DROPPED` record."""
    return _INGEST_ID.pack(ingest_id)


def decode(payload: bytes, *, at: int = 0) -> tuple[bytes, list[bytes], list[bytes]]:
    """Ops, keys and values from byte `at` on. Raises `CorruptionError`."""
    try:
        (count,) = _COUNT.unpack_from(payload, at)
        at += _COUNT.size
        ops, *lengths = struct.unpack_from(f"<{count}s{2 * count}I", payload, at)
    except struct.error as error:
        raise CorruptionError("a journal record", f"its columns are cut: {error}") from error
    ends = list(accumulate(lengths, initial=at + 9 * count))
    if ends[-1] != len(payload) or not count:
        raise CorruptionError("a journal record", f"{len(payload)} bytes, not {ends[-1]}")
    parts = [payload[ends[i] : ends[i + 1]] for i in range(2 * count)]
    return ops, parts[:count], parts[count:]


def decode_sorted(payload: bytes, *, at: int = 0) -> tuple[int, list[bytes], list[bytes]]:
    """The family, keys and values of entries that put ascending keys into one family.

    Raises `CorruptionError` for other entries: merging them would break the order of the map.
    """
    ops, keys, values = decode(payload, at=at)
    if ops[0] not in _SORTED_OPS or ops.strip(ops[:1]):
        raise CorruptionError("a journal record", "its entries are not puts into one family")
    if not all(map(lt, keys, islice(keys, 1, None))):
        raise CorruptionError("a journal record", "its keys do not ascend")
    return ops[0] & FAMILY_MASK, keys, values


def _broken(record: Record, problem: str) -> CorruptionError:
    return CorruptionError(f"journal record {record.ordinal}", problem)


def _ingest_id(payload: bytes) -> int:
    if len(payload) != _INGEST_ID.size:
        raise CorruptionError("a journal record", f"{len(payload)} bytes hold no ingest id")
    (ingest_id,) = _INGEST_ID.unpack_from(payload)
    return int(ingest_id)
