"""The journal, and its baseline: a plain log with the same checksum, synced at the same moments.

The plain log has the same records, with ordinal, type and incarnation under the same checksum,
behind a length each; written in the same pieces into one file. So a ratio of 1 means that
stuffing, the head's own check, rotation, locking and being able to recover cost nothing.

    plain := | length u32 | CRC-32 u32 | incarnation u64 | ordinal u64 | type u8 | payload |, ...
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from zlib import crc32

from benchmarks.subject import Subject, Work
from kvstore.storage.journal import Journal, Record, Sync
from kvstore.tasks import NewTask, Tasks

_LENGTH = struct.Struct("<II")
_HEAD = struct.Struct("<QQB")
_FRONT = _LENGTH.size + _HEAD.size
_CLAIMS_MAX = 5_000
_INSERTS = 1_000
_REPLAYS = 10
"""A replay reads this many times the records of an append, because reading is faster."""


class JournalLog(Subject):
    """Journals, each made for one operation."""

    name = "journal"

    def append(self, record_bytes: int, count: int, synced: bool = False) -> Work:
        """Append `count` records, with an fsync each if `synced`."""
        payloads = payloads_of(record_bytes, count)
        sync = Sync.always() if synced else Sync.never()
        log = Journal.open(self.fresh("log"), sync=sync)
        return _appending(log, payloads)

    def replay(self, record_bytes: int, count: int) -> Work:
        """Open a journal, which reads all its records."""
        path, kept = self.fresh("replayed"), Kept()
        with Journal.open(path, sync=Sync.never()) as log:
            for _ in range(_REPLAYS):
                log.append_many(payloads_of(record_bytes, count))

        def work() -> int:
            Journal.open(path, apply=kept.apply, sync=Sync.never()).close()
            return kept.count

        return work

    def claim(self, waiting: int) -> Work:
        """Claim tasks of a durable queue, in order, while `waiting` tasks wait."""
        tasks = Tasks.open(self.fresh("tasks"), sync=Sync.never())
        for at in range(0, waiting, _INSERTS):
            tasks.modify(inserts=[NewTask("q", b"%d" % n, at + n) for n in range(_INSERTS)])
        claims = min(_CLAIMS_MAX, waiting)

        def work() -> int:
            with tasks:
                return sum(tasks.claim(["q"], hold=3600) is not None for _ in range(claims))

        return work


class PlainLog(Subject):
    """Plain logs, each made for one operation."""

    name = "plain log"

    def append(self, record_bytes: int, count: int, synced: bool = False) -> Work:
        log = _PlainFile(self.fresh("log"), sync=synced)
        return _appending(log, payloads_of(record_bytes, count))

    def replay(self, record_bytes: int, count: int) -> Work:
        path, kept = self.fresh("replayed"), Kept()
        with _PlainFile(path, sync=False) as log:
            for _ in range(_REPLAYS):
                log.append_many(payloads_of(record_bytes, count))

        def work() -> int:
            read_plain(path, kept.apply)
            return kept.count

        return work


class Kept:
    """A state in memory that each record changes, as every journal has one."""

    def __init__(self) -> None:
        self.payloads: dict[int, bytes] = {}
        self.count = 0

    def apply(self, record: Record) -> None:
        self.payloads[record.ordinal % 1000] = record.payload
        self.count += 1


class _PlainFile:
    """The file of a plain log, opened to append."""

    def __init__(self, path: Path, *, sync: bool) -> None:
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - closed by __exit__
        self._sync = sync
        self._next = 1

    def append(self, payload: bytes) -> None:
        head = _HEAD.pack(1, self._next, 0)
        self._file.write(_LENGTH.pack(len(payload), crc32(payload, crc32(head))) + head + payload)
        self._next += 1
        if self._sync:
            os.fsync(self._file.fileno())

    def append_many(self, payloads: Sequence[bytes]) -> None:
        parts = []
        ordinal = self._next
        for payload in payloads:
            head = _HEAD.pack(1, ordinal, 0)
            parts.append(_LENGTH.pack(len(payload), crc32(payload, crc32(head))) + head + payload)
            ordinal += 1
        self._file.write(b"".join(parts))
        self._next = ordinal
        if self._sync:
            os.fsync(self._file.fileno())

    def __enter__(self) -> _PlainFile:
        return self

    def __exit__(self, *_: object) -> None:
        os.fsync(self._file.fileno())
        self._file.close()


def read_plain(path: Path, apply: Callable[[Record], object], *, piece: int = 256 << 10) -> None:
    """Read a plain log back piece by piece, and check each record and the order."""
    expected = 1
    with open(path, "rb", buffering=0) as file:
        data = b""
        while more := file.read(piece):
            data += more
            at, size = 0, len(data)
            while at + _FRONT <= size:
                length, checksum = _LENGTH.unpack_from(data, at)
                end = at + _FRONT + length
                if end > size:
                    break
                incarnation, ordinal, kind = _HEAD.unpack_from(data, at + _LENGTH.size)
                payload = data[at + _FRONT : end]
                found = crc32(payload, crc32(data[at + _LENGTH.size : at + _FRONT]))
                if found != checksum or ordinal != expected:
                    raise ValueError(f"damaged at {at}")
                apply(Record(ordinal, kind, payload, incarnation))
                expected += 1
                at = end
            data = data[at:]


def payloads_of(size: int, count: int) -> list[bytes]:
    """Payloads, half text and half noise. Some contain the two bytes that begin a record."""
    noise = os.urandom(size)
    text = (b"the quick brown fox jumps over the lazy dog; " * (size // 45 + 1))[: size // 2]
    payload = text + noise[: size - len(text)]
    return [payload[number % 7 :] + payload[: number % 7] for number in range(count)]


def _appending(log: Journal | _PlainFile, payloads: Sequence[bytes]) -> Work:
    """Closing is timed on both sides: the last bytes of a log are written when it is closed."""

    def work() -> int:
        with log:
            for payload in payloads:
                log.append(payload)
        return len(payloads)

    return work
