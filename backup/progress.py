"""Progress of a large backup: which parts of its window are uploaded, so that a crash costs one.

    blob "progress/<chain>/<lower>-<upper>-<attempt>/<number>.json" :=
        {"format": 1, "part": as in a shard's state, "key": hex, "timestamp", "op",
         "crc32": of these fields as JSON, keys sorted}

A backup that fills more than one part writes a record after each full one: the part, and the last
row in it. The next backup of the same window takes those parts and goes on behind that row.

Invariants
1. A record is written after its part, under a name that is never used twice.
2. The window is fixed by the name; what the source says of it does not change while a hold below
   `upper` keeps it. Where the hold was lost, the records are not used.
3. Record n + 1 of an attempt begins where record n ends. Two scripts on one attempt cannot both
   write it: the second gives up recording, not its backup.
4. A part that is recorded is deleted by no backup: another may have taken it. What is left of
   those that lost is found by a scrub, once their window has been backed up.
"""

from __future__ import annotations

import json
import re
import secrets
import zlib
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import Any, Final, NamedTuple

import pyarrow as pa

from backup.export import Position
from backup.shard import Blob, Part
from backup.shard.state.codec import decode_part, encode_part
from backup.shard.storage.contract import FAILURES
from kvstore.codec.json import read_object
from kvstore.errors import (
    CorruptionError,
    DeterminateError,
    FormatVersionError,
    IndeterminateError,
    UsageError,
)

PROGRESS_FORMAT: Final = 1

_ROOT = "progress"
_NAME = re.compile(rf"{_ROOT}/[^/]+/(?P<attempt>\d+-\d+-[0-9a-f]+)/(?P<number>\d+)\.json")


class Record(NamedTuple):
    """A part that is uploaded, and the last row in it."""

    part: Part
    last: Position


class Attempt:
    """One upload of the window `[lower, upper)`, perhaps begun by a process that is gone."""

    def __init__(self, blob: Blob, chain: str, name: str, records: list[Record]) -> None:
        self._blob = blob
        self._folder = f"{_ROOT}/{chain}/{name}"
        self._next = len(records)
        self._is_recording = True
        lower, upper, _ = name.split("-")
        self.lower, self.upper = int(lower), int(upper)
        self.parts = tuple(record.part for record in records)
        self.after = records[-1].last if records else None
        self.recorded = {part.name for part in self.parts}

    @property
    def since(self) -> int | None:
        """Where the window `(since, upper - 1]` begins; None is before all time."""
        return self.lower - 1 if self.lower else None

    @classmethod
    def begin(cls, blob: Blob, chain: str, lower: int, upper: int) -> Attempt:
        """A new one. Nothing is written until a part is full."""
        return cls(blob, chain, f"{lower}-{upper}-{secrets.token_hex(6)}", [])

    def record(self, part: Part, last: pa.RecordBatch) -> bool:
        """Write down that `part` is uploaded; its last row is `last`. False if others did."""
        if not self._is_recording:
            return False
        key, timestamp, op = (last.column(name)[0].as_py() for name in ("key", "timestamp", "op"))
        fields = {
            "format": PROGRESS_FORMAT,
            "part": encode_part(part),
            "key": key.hex(),
            "timestamp": timestamp,
            "op": op,
        }
        name = f"{self._folder}/{self._next:06}.json"
        # It may be there although the call failed: then the part must not be deleted.
        self.recorded.add(part.name)
        try:
            self._blob.put(name, _json({**fields, "crc32": zlib.crc32(_json(fields))}))
        except (UsageError, DeterminateError, IndeterminateError):
            self._is_recording = False
            return True
        self._next += 1
        return True


def _json(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields, sort_keys=True).encode()


def _read(blob: Blob, where: str) -> Record | None:
    """A record; None where it is gone, or damaged: then its part is uploaded again."""
    try:
        data = blob.patience.over(partial(blob.get, where))
        if data is None:
            return None
        fields = read_object(data, where=where)
        crc32 = fields.pop("crc32", None)  # which former releases did not write
        if crc32 not in (None, zlib.crc32(_json(fields))):
            return None
        version = fields.integer("format")
        if version != PROGRESS_FORMAT:
            raise FormatVersionError(where, found=version, supported=PROGRESS_FORMAT)
        position = Position(fields.hexed("key"), fields.integer("timestamp"), fields.integer("op"))
        return Record(decode_part(fields.inner("part")), position)
    except CorruptionError:
        return None


class Left(NamedTuple):
    """The traces of earlier uploads: whether there are any records, and the attempt that came
    farthest at the window asked for."""

    is_any: bool
    farthest: Attempt | None


def find(blob: Blob, chain: str, lower: int) -> Left:
    """The traces of the window from `lower` on. Costs one listing, mostly of nothing."""
    attempts = _attempts(blob, chain)
    found = [
        Attempt(blob, chain, name, records)
        for name, numbers in attempts.items()
        if int(name.split("-")[0]) == lower and (records := _records(blob, chain, name, numbers))
    ]
    return Left(bool(attempts), max(found, key=lambda attempt: len(attempt.parts), default=None))


def forget(blob: Blob, chain: str, *, below: int | None = None) -> None:
    """Delete the records of windows that begin below `below`; all of the chain's by default."""
    for name, numbers in _attempts(blob, chain).items():
        if below is None or int(name.split("-")[0]) < below:
            # The first goes last: an attempt without it is none.
            for number in sorted(numbers, reverse=True):
                # A record that stays is outdated by its window, and goes next time.
                with suppress(*FAILURES):
                    blob.delete(f"{_ROOT}/{chain}/{name}/{number:06}.json")


def pending_parts(blob: Blob, chain: str, lower: int) -> set[str]:
    """Names of the parts that a next backup from `lower` on may take."""
    return {
        record.part.name
        for name, numbers in _attempts(blob, chain).items()
        if int(name.split("-")[0]) == lower
        for record in _records(blob, chain, name, numbers)
    }


def _attempts(blob: Blob, chain: str) -> dict[str, list[int]]:
    """The numbers of the records of each attempt. One listing."""
    found: dict[str, list[int]] = {}
    for info in blob.patience.over(lambda: list(blob.list(f"{_ROOT}/{chain}/"))):
        if (name := _NAME.fullmatch(info.name)) is not None:  # else it is a foreign file
            found.setdefault(name["attempt"], []).append(int(name["number"]))
    return found


def _records(blob: Blob, chain: str, name: str, numbers: list[int]) -> list[Record]:
    """The records of one attempt, as far as none is missing and their parts are there."""
    return list(_whole(blob, f"{_ROOT}/{chain}/{name}", sorted(numbers)))


def _whole(blob: Blob, folder: str, numbers: list[int]) -> Iterator[Record]:
    for expected, number in enumerate(numbers):
        where = f"{folder}/{number:06}.json"
        record = _read(blob, where)
        if record is None or number != expected:
            return
        part = record.part
        if blob.patience.over(partial(blob.size, part.name)) != part.size:
            return
        yield record
