"""Uploads: the parts of a window that a backup has written, before a batch names them.

One process writes the parts, or the tasks of a cluster do, each for a stretch of the key space. A
backup that fills more than one part writes a record after each full part, so that a crash costs one
part at most. The next backup of the same window takes the recorded parts and continues behind the
last row in them.

    blob "progress/<chain>/<lower>-<upper>-<attempt>/<number>.json" :=
        {"format": 1, "part": as in a shard's state, "key": hex, "timestamp", "op",
         "crc32": of these fields as JSON, keys sorted}

Invariants
1. The parts of an upload come in the order of their keys, and hold each row of the window once.
2. Nothing names the parts until the batch is appended. A failed upload leaves orphans, which change
   no result and are found by a scrub.
3. A record is written after its part, under a name that is never used twice.
4. The name of a record fixes its window. The source's rows in that window do not change while a
   hold below `upper` keeps them. Where the hold was lost, the records are not used.
5. Record n + 1 of an attempt begins where record n ends. Two scripts on one attempt cannot both
   write it: the second script gives up recording, and continues its backup.
6. No backup deletes a recorded part: another backup may have taken it. A scrub finds the parts of
   losing attempts once their window has been backed up.
"""

from __future__ import annotations

import json
import re
import secrets
import zlib
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import Any, Final, NamedTuple, Protocol

import pyarrow as pa

from backup.export import Exported, RowPosition, exported
from backup.shard import BatchDesc, Blob, OnProgress, Shard, ShardBatch, ShardPart, Tally
from backup.shard.state.codec import decode_part, encode_part
from kvstore.codec.json import read_object
from kvstore.errors import (
    CorruptionError,
    DeterminateError,
    FormatVersionError,
    IndeterminateError,
    UsageError,
)
from kvstore.storage.contract import FAILURES
from kvstore.store import Store

RECORD_FORMAT: Final = 1

_ROOT = "progress"
_NAME = re.compile(rf"{_ROOT}/[^/]+/(?P<attempt>\d+-\d+-[0-9a-f]+)/(?P<number>\d+)\.json")


class UploadedPart(NamedTuple):
    """An uploaded part, and the last row in it."""

    part: ShardPart
    last: RowPosition


class Attempt:
    """One upload of the window `[lower, upper)`. An earlier process may have begun it."""

    def __init__(self, blob: Blob, chain: str, name: str, uploaded: list[UploadedPart]) -> None:
        self._blob = blob
        self._folder = f"{_ROOT}/{chain}/{name}"
        self._next = len(uploaded)
        self._is_recording = True
        lower, upper, _ = name.split("-")
        self.lower, self.upper = int(lower), int(upper)
        self.parts = tuple(each.part for each in uploaded)
        self.after = uploaded[-1].last if uploaded else None
        self.recorded = {part.name for part in self.parts}

    @property
    def since(self) -> int | None:
        """The start of the window `(since, upper - 1]`; None is before all time."""
        return self.lower - 1 if self.lower else None

    @classmethod
    def begin(cls, blob: Blob, chain: str, lower: int, upper: int) -> Attempt:
        """Begin a new attempt. Nothing is written until a part is full."""
        return cls(blob, chain, f"{lower}-{upper}-{secrets.token_hex(6)}", [])

    def record(self, part: ShardPart, last: pa.RecordBatch) -> bool:
        """Record that `part`, which ends with the row `last`, is uploaded.

        Returns False, and records nothing, once another script records this attempt.
        """
        if not self._is_recording:
            return False
        key, timestamp, op = (last.column(name)[0].as_py() for name in ("key", "timestamp", "op"))
        fields = {
            "format": RECORD_FORMAT,
            "part": encode_part(part),
            "key": key.hex(),
            "timestamp": timestamp,
            "op": op,
        }
        name = f"{self._folder}/{self._next:06}.json"
        # The record may exist although the call failed: then the part must not be deleted.
        self.recorded.add(part.name)
        try:
            self._blob.put(name, _json({**fields, "crc32": zlib.crc32(_json(fields))}))
        except (UsageError, DeterminateError, IndeterminateError):
            self._is_recording = False
            return True
        self._next += 1
        return True


# -- uploading -------------------------------------------------------------------------------


class Uploaded(NamedTuple):
    """A batch to append. Its history is whole from `whole_since` on."""

    whole_since: int
    batch: ShardBatch


class Upload(Protocol):
    """Writes the rows of a window that follow the parts which an attempt has already recorded."""

    def __call__(
        self, store: Store, shard: Shard, attempt: Attempt, progress: OnProgress | None
    ) -> Uploaded:
        """Upload. Raises `HistoryGoneError` if the store no longer has the window."""
        ...


def upload_here(
    store: Store, shard: Shard, attempt: Attempt, progress: OnProgress | None
) -> Uploaded:
    """Upload in this process, in bounded memory; each full part is recorded."""
    window = exported(store, since=attempt.since, upto=attempt.upper - 1, after=attempt.after)
    total = None
    if attempt.since is None and progress is not None:
        figures = store.stats()
        done = sum(part.rows for part in attempt.parts)
        total = max(figures["data_entries"] - done, 0)
    return upload_window(window, shard, attempt, progress, total)


def upload_window(
    window: Exported,
    shard: Shard,
    attempt: Attempt,
    progress: OnProgress | None,
    total: int | None = None,
) -> Uploaded:
    """Upload exported rows in this process. `total` is an estimate of their number."""
    rows = window.rows
    if progress is not None:
        rows = Tally(progress, total, is_about=True).over(rows)
    desc = BatchDesc(attempt.lower, attempt.upper)
    return Uploaded(window.whole_since, shard.write_batch(desc, rows, on_full=attempt.record))


# -- records of earlier attempts -------------------------------------------------------------


class EarlierUploads(NamedTuple):
    """The records that earlier attempts left: whether there are any, and the attempt at the
    requested window with the most parts."""

    is_any: bool
    farthest: Attempt | None


def find(blob: Blob, chain: str, lower: int) -> EarlierUploads:
    """Find earlier attempts at the window that begins at `lower`. Costs one listing, mostly of
    nothing."""
    attempts = _attempts(blob, chain)
    found = [
        Attempt(blob, chain, name, uploaded)
        for name, numbers in attempts.items()
        if int(name.split("-")[0]) == lower and (uploaded := _read_all(blob, chain, name, numbers))
    ]
    farthest = max(found, key=lambda attempt: len(attempt.parts), default=None)
    return EarlierUploads(bool(attempts), farthest)


def forget(blob: Blob, chain: str, *, below: int | None = None) -> None:
    """Delete the records of windows that begin below `below`; by default all records of the
    chain."""
    for name, numbers in _attempts(blob, chain).items():
        if below is None or int(name.split("-")[0]) < below:
            # The first record goes last: without it the others count for nothing.
            for number in sorted(numbers, reverse=True):
                # A record that stays is outdated by its window; the next call deletes it.
                with suppress(*FAILURES):
                    blob.delete(f"{_ROOT}/{chain}/{name}/{number:06}.json")


def pending_parts(blob: Blob, chain: str, lower: int) -> set[str]:
    """Names of the recorded parts that the next backup, from `lower` on, may take."""
    return {
        uploaded.part.name
        for name, numbers in _attempts(blob, chain).items()
        if int(name.split("-")[0]) == lower
        for uploaded in _read_all(blob, chain, name, numbers)
    }


def _attempts(blob: Blob, chain: str) -> dict[str, list[int]]:
    """The numbers of the records of each attempt. One listing."""
    found: dict[str, list[int]] = {}
    for info in blob.patience.over(lambda: list(blob.list(f"{_ROOT}/{chain}/"))):
        if (name := _NAME.fullmatch(info.name)) is not None:  # otherwise a foreign file
            found.setdefault(name["attempt"], []).append(int(name["number"]))
    return found


def _read_all(blob: Blob, chain: str, name: str, numbers: list[int]) -> list[UploadedPart]:
    """The records of one attempt, up to the first that is missing or whose part is missing."""
    return list(_read_until_gap(blob, f"{_ROOT}/{chain}/{name}", sorted(numbers)))


def _read_until_gap(blob: Blob, folder: str, numbers: list[int]) -> Iterator[UploadedPart]:
    for expected, number in enumerate(numbers):
        uploaded = _read(blob, f"{folder}/{number:06}.json")
        if uploaded is None or number != expected:
            return
        part = uploaded.part
        if blob.patience.over(partial(blob.size, part.name)) != part.size:
            return
        yield uploaded


def _read(blob: Blob, where: str) -> UploadedPart | None:
    """A record; None where it is gone or damaged: then its part is uploaded again."""
    try:
        data = blob.patience.over(partial(blob.get, where))
        if data is None:
            return None
        fields = read_object(data, where=where)
        crc32 = fields.pop("crc32", None)  # a record without the field is accepted
        if crc32 not in (None, zlib.crc32(_json(fields))):
            return None
        version = fields.integer("format")
        if version != RECORD_FORMAT:
            raise FormatVersionError(where, found=version, supported=RECORD_FORMAT)
        key, timestamp, op = fields.hexed("key"), fields.integer("timestamp"), fields.integer("op")
        return UploadedPart(decode_part(fields.inner("part")), RowPosition(key, timestamp, op))
    except CorruptionError:
        return None


def _json(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields, sort_keys=True).encode()
