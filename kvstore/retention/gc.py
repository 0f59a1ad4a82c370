"""Garbage collection: history below `since` is given up, and its space taken back.

A run first moves `since`, durably. The rules then decide which stored entries no read at or above
`since` can see; the change index names the keys to look at. Old small imports become plain
versions. A crash in between leaves what nobody can read, and the next run goes on.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

from kvstore.base.arguments import AGE
from kvstore.base.background import Failures
from kvstore.base.forks import own
from kvstore.base.meters import WorkCount
from kvstore.base.notices import notice
from kvstore.base.span import Span, merge_spans
from kvstore.base.timestamp import NS_PER_SECOND, Timestamp
from kvstore.changes.index import OP_DELETE_RANGE, OP_IMPORT, OP_REVERT
from kvstore.codec.keys import (
    FIRST_TIMED_SUFFIX,
    SUFFIX_BYTES,
    TAIL_BYTES,
    TERMINATOR,
    VALUE,
    check_data_key,
    decode_suffix,
    encode_suffix,
    escape,
    frame,
    span_bounds,
)
from kvstore.engine.api import CHANGES, DATA, RANGES, EntryReader, WriteBatch, chunks, pairs
from kvstore.errors import ClosedError, PoisonedError, UsageError, storage_errors
from kvstore.limits import (
    COLLECTIONS_TOLD,
    GC_DELAY_FACTOR_MAX,
    GC_KEYS_PER_STEP,
    GC_SHORT_SPAN_ENTRIES,
    GC_SORTED_KEYS_BYTES_MAX,
    GC_SORTED_KEYS_MAX,
    GC_SPANS_PER_STEP,
    REFUSED_LOAD_S,
    SCAN_CHUNK_BYTES,
    SETTLE_STEP_ROWS,
    STALE_IMPORT_S,
)
from kvstore.mvcc import Versions
from kvstore.mvcc.key_history import Lifetime, Stamps, StoredEntry
from kvstore.mvcc.meta import COLLECTED, INDEX_FLOOR, Meta, nothing, timestamp_of
from kvstore.mvcc.passes import entries_by_key, stored_keys
from kvstore.mvcc.versions import ReadView, imported_entries
from kvstore.timeline.committer import Committer
from kvstore.timeline.holds import HoldRecord
from kvstore.timeline.import_records import ImportRecord
from kvstore.timeline.imports import INGEST_DIRECTORY, REFUSED_PREFIX, Imports
from kvstore.timeline.parts import Parts
from kvstore.timeline.read_times import Clear

# --------------------------------------------------------------------------------------------------
# The runs of garbage collection that removed something: when, and how much.
#
#     meta record `collections` := {"runs": [{"at", "since", "versions"}, ...]}      oldest first
#
# Invariants
# 1. The record has `COLLECTIONS_TOLD` runs at most.
# 2. A run is noted in the engine batch that ends its work, so a run that a crash cut is not there.
#    The run that continues it notes its own removals.

COLLECTIONS: Final = "collections"


class CollectionRun(NamedTuple):
    """A run of GC began at `at`, gave up history below `since`, and removed this many versions."""

    at: Timestamp
    since: Timestamp
    versions: int


def collections(meta: Meta) -> list[CollectionRun]:
    """The newest runs, oldest first. Raises `CorruptionError`."""
    record = meta.read(COLLECTIONS)
    if record is None:
        return []
    return [
        CollectionRun(timestamp_of(run, "at"), timestamp_of(run, "since"), run.integer("versions"))
        for run in record.objects("runs")
    ]


def stage_collection(meta: Meta, batch: WriteBatch, run: CollectionRun) -> None:
    """Add a run to the record, in an engine batch."""
    kept = [*collections(meta), run][-COLLECTIONS_TOLD:]
    meta.stage(batch, COLLECTIONS, {"runs": [each._asdict() for each in kept]})


# --------------------------------------------------------------------------------------------------
# The garbage of one key: the stored entries that no read at or above `since` can see.
#
# Each record of a key has a lifetime: a version and a range tombstone live from their timestamp on,
# a row of an import lives from the time it was added until the time it was reverted. A read at t
# sees the newest record alive at t. Among the records that began at or below `since`, reads at or
# above `since` can see the newest; if its life ends, then also the newest record that outlives it;
# and so on, up to a record that lives for ever. All other records are garbage.
#
# A read tells the time of its version as well. Where the revert of an import brought a value back,
# this is the time of the revert. So the value's entry gets that time in the step that removes the
# row of the import. If the value's own life ends, the row stays until then.
#
# Invariants
# 1. Removing garbage changes no read at or above `since` and no window that starts there, nor the
#    time of a value.
# 2. That holds after each single removal in the order given, oldest first, so that a crash in
#    between leaves only unreadable records. Range tombstones go after all garbage.
# 3. A record that began above `since` is never garbage, nor is a row of an import not yet added.
#
# Source: CockroachDB's rule for one version (garbage if the next newer one, or a covering range
# tombstone, is at or below the threshold), extended by lifetimes that end.


class _Life(NamedTuple):
    """The lifetime of one record. Sorts by its begin; a range tombstone, which has no tail, sorts
    before a version of the same time, because the version wins."""

    began: int
    tail: bytes
    ended: int


def garbage(
    tails: Iterable[bytes], stamps: Stamps, deletions: Sequence[int], *, since: int
) -> list[bytes]:
    """The tails of the entries of one key that are garbage, in the order in which to remove them.

    `tails` are the tails of all entries of the key, `deletions` the times of the range tombstones
    over it. O(n log n) in their number.
    """
    lives = _lives(tails, stamps, deletions, since)
    doomed: list[bytes] = []
    seen_until = since
    for life in lives:
        if life.ended <= seen_until:
            doomed.append(life.tail)
            continue
        seen_until = life.ended
        if seen_until == _FOREVER and life.tail[-1:] != VALUE:
            doomed.append(life.tail)  # a deletion with nothing left under it
    found = _brought_back(lives, since) if doomed else None
    if found is not None and found.shown.ended != _FOREVER:
        doomed.remove(found.row.tail)  # the row gives the value its time
    return [tail for tail in reversed(doomed) if tail]


class Revived(NamedTuple):
    """A value that the revert of an import brought back: the tails of its entry and of the import's
    row, and the time of the revert."""

    tail: bytes
    row: bytes
    time: int


def revived(
    tails: Iterable[bytes], stamps: Stamps, deletions: Sequence[int], *, since: int
) -> Revived | None:
    """The value of a key that has to get the time of a revert when its `garbage` is removed. Its
    row is garbage."""
    found = _brought_back(_lives(tails, stamps, deletions, since), since)
    if found is None or found.shown.ended != _FOREVER:
        return None
    return Revived(found.shown.tail, found.row.tail, found.row.ended)


class _BroughtBack(NamedTuple):
    """The record that a read at `since` sees, and the row whose revert showed it again."""

    shown: _Life
    row: _Life


def _lives(
    tails: Iterable[bytes], stamps: Stamps, deletions: Sequence[int], since: int
) -> list[_Life]:
    """The records of a key that began at or below `since`, newest first."""
    lives = [_Life(t, b"", _FOREVER) for t in deletions if t <= since]
    for tail in tails:
        life = _life(tail, stamps)
        if life is not None and life.began <= since:
            lives.append(life)
    lives.sort(reverse=True)
    return lives


def _brought_back(lives: Sequence[_Life], since: int) -> _BroughtBack | None:
    """The value that the last revert at or below `since` brought back, if a read there sees it."""
    shown = next((life for life in lives if life.ended > since), None)
    if shown is None or shown.tail[-1:] != VALUE:
        return None
    ended = [life for life in lives if shown.began < life.ended <= since]
    for row in sorted(ended, key=lambda life: -life.ended):
        # A newer record that was alive until then hid the row: its revert changed nothing.
        if not any(row.began < other.began < row.ended <= other.ended for other in lives):
            return _BroughtBack(shown, row)
    return None


def _life(tail: bytes, stamps: Stamps) -> _Life | None:
    if tail >= FIRST_TIMED_SUFFIX:
        return _Life(decode_suffix(tail[:-1]), tail, _FOREVER)
    lifetime = stamps.get(tail[:-1])
    return None if lifetime is None else _Life(lifetime.added, tail, lifetime.reverted)


_FOREVER = Lifetime(0).reverted


# --------------------------------------------------------------------------------------------------
# Finding garbage: of keys that changed, by look-ups, and of whole spans, by passes.
#
# The section above has the rule for garbage. In a store without range tombstones and imports
# the rule is short, and a look-up is one seek: the newest version of a key at or below `since`
# stays, and the older ones go.
#
# Invariants
# 1. A search takes the view before it reads entries, as every reader does.
# 2. The oldest entries of a key come first, because they must be removed in this order.
# 3. A value that a revert brought back moves to the time of the revert where the row of the import
#    goes.
# 4. No engine reader is open while entries are yielded: the caller removes them then.
# 5. A search borrows one reader for many keys or spans: making one takes as long as ten seeks.


class Move(NamedTuple):
    """The stored key of a row that goes, and of a value that its revert brought back, now and with
    the time of the revert. One batch does all three."""

    row: bytes
    stored: bytes
    plain: bytes


Removal: TypeAlias = "bytes | Move"
"""The stored key of an entry that goes, or a move."""


def garbage_of_keys(
    versions: Versions, keys: Sequence[bytes], since: int, *, entries_max: int
) -> Iterator[Removal]:
    """The garbage of `keys`, which ascend. Holds about `entries_max` entries at once."""
    at = 0
    while at < len(keys):
        is_short = not any(versions.view)
        search = _superseded if is_short else _outlived
        found, at = search(versions, keys, at, since, entries_max)
        yield from found


def garbage_in_spans(
    versions: Versions, spans: Sequence[Span], since: int, *, entries_max: int
) -> Iterator[Removal]:
    """The garbage of `spans`, which ascend and are disjoint. One seek a span and a pass over it.
    Holds about `entries_max` entries at once."""
    engine = versions.engine
    at = 0
    while at < len(spans):
        view = versions.view
        doomed: list[Removal] = []
        long: Span | None = None
        ticket, reader = engine.borrow()
        while at < len(spans) and long is None and len(doomed) < entries_max:
            keys = _keys_of_short(versions, reader, spans[at])
            if keys is None:
                long = spans[at]
            else:
                doomed += _garbage(entries_by_key([(keys, keys)]), view, since)
            at += 1
        engine.give_back(ticket, reader)
        yield from doomed
        if long is not None:
            cursor = engine.cursor(DATA, *span_bounds(long.start, long.end))
            for entries in stored_keys(cursor):
                yield from _garbage([entries], versions.view, since)


def _keys_of_short(versions: Versions, reader: EntryReader, span: Span) -> list[bytes] | None:
    """The stored keys of a span, None if it has more than `GC_SHORT_SPAN_ENTRIES`."""
    begin, end = span_bounds(span.start, span.end)
    keys: list[bytes] = []
    reader.seek(begin)
    while (found := reader.key()) is not None:
        if end is not None and found >= end:
            return keys
        if len(keys) == GC_SHORT_SPAN_ENTRIES:
            return None
        keys.append(found)
        reader.next()
    versions.engine.check(reader)
    return keys


def _garbage(
    found: Iterable[tuple[bytes, list[StoredEntry]]], view: ReadView, since: int
) -> Iterator[Removal]:
    fragments, stamps = view
    for key, entries in found:
        stack = fragments.stack(key) if fragments else ()
        yield from _removals(frame(key), [tail for tail, _ in entries], stamps, stack, since)


def _removals(
    stem: bytes, tails: list[bytes], stamps: Stamps, stack: Sequence[int], since: int
) -> list[Removal]:
    """The removals of one key, whose framed form is `stem`."""
    doomed = garbage(tails, stamps, stack, since=since)
    found = None
    if len(doomed) < len(tails) and any(tail < FIRST_TIMED_SUFFIX for tail in doomed):
        found = revived(tails, stamps, stack, since=since)
    if found is None:
        return [stem + tail for tail in doomed]
    plain = stem + encode_suffix(found.time) + VALUE
    move = Move(stem + found.row, stem + found.tail, plain)
    return [move if tail == found.row else stem + tail for tail in doomed]


def _outlived(
    versions: Versions, keys: Sequence[bytes], at: int, since: int, entries_max: int
) -> tuple[list[Removal], int]:
    """The garbage of some of `keys[at:]`, and the index of the first key that was not searched."""
    fragments, stamps = versions.view
    engine = versions.engine
    ticket, reader = engine.borrow()
    doomed: list[Removal] = []
    while at < len(keys) and len(doomed) < entries_max:
        key = keys[at]
        at += 1
        stem = frame(key)
        tails: list[bytes] = []
        reader.seek(stem)
        while (found := reader.key()) is not None and found.startswith(stem):
            if len(found) != len(stem) + TAIL_BYTES or found[-1] > VALUE[0]:
                check_data_key(found)
            tails.append(found[-TAIL_BYTES:])
            reader.next()
        if found is None:
            engine.check(reader)
        stack = fragments.stack(key) if fragments else ()
        doomed += _removals(stem, tails, stamps, stack, since)
    engine.give_back(ticket, reader)
    return doomed, at


def _superseded(
    versions: Versions, keys: Sequence[bytes], at: int, since: int, entries_max: int
) -> tuple[list[Removal], int]:
    """The garbage of some of `keys[at:]`, and the index of the first key that was not searched.

    Hot: once per changed key, 5 us. No import is added while there are no stamps; rows of imports
    sort before the bound, so the search passes over none. A deletion with nothing left under it
    goes too.
    """
    engine = versions.engine
    ticket, reader = engine.borrow()
    seek, key_here, step = reader.seek, reader.key, reader.next
    bound = TERMINATOR + encode_suffix(since)
    doomed: list[Removal] = []
    while at < len(keys) and len(doomed) < entries_max:
        escaped = escape(keys[at])
        stem = escaped + TERMINATOR
        size = len(stem) + TAIL_BYTES
        at += 1
        seek(escaped + bound)
        newest = found = key_here()
        if newest is not None and newest.startswith(stem):
            older: list[bytes] = []
            # A damaged entry does not tell which of the others it superseded.
            if len(newest) != size or newest[-1] > VALUE[0]:
                check_data_key(newest)
            step()
            while (found := key_here()) is not None and found.startswith(stem):
                if len(found) != size:
                    check_data_key(found)
                older.append(found)
                step()
            doomed += older[::-1]
            if not newest[-1]:
                doomed.append(newest)
        if found is None:
            engine.check(reader)
    engine.give_back(ticket, reader)
    return doomed, at


# --------------------------------------------------------------------------------------------------
# Writes the removal of garbage, in batches.
#
# Most removals delete one entry. Where the revert of an import brought a value back, the value
# moves to the time of the revert, because GC takes the row that told this time.
#
# Invariants
# 1. One engine batch removes the row, writes the value at its new time, and removes the old entry.
#    So each reader sees the value once, and sees the time of the revert.
# 2. A clear between reading and writing a value takes the value: nothing that was cleared comes
#    back.
# 3. A batch has a bounded number of entries and of bytes.


class _Moved(NamedTuple):
    move: Move
    value: bytes


class RemovalBatch(NamedTuple):
    """Entries to be removed, and values to be moved. `clears` are the clears that were known before
    the values were read."""

    entries: list[bytes]
    moved: list[_Moved]
    clears: tuple[Clear, ...]

    @property
    def removed(self) -> int:
        """The number of versions that go."""
        return len(self.entries) + len(self.moved)


class Removing:
    """Writes the removals of one store."""

    def __init__(self, parts: Parts) -> None:
        self._engine, self._committer = parts.versions.engine, parts.committer
        self._clears = parts.clears

    def batches(self, removals: Iterable[Removal], *, entries_max: int) -> Iterator[RemovalBatch]:
        """The removals in batches, in their order. Reads the values that move, one look-up each."""
        clears = self._clears.all()
        entries: list[bytes] = []
        moved: list[_Moved] = []
        size = 0
        for removal in removals:
            if isinstance(removal, bytes):
                entries.append(removal)
            else:
                value = self._engine.get(DATA, removal.stored)
                if value is None:
                    continue  # a clear took the key
                moved.append(_Moved(removal, value))
                size += len(value)
            is_full = len(entries) >= entries_max or len(moved) >= SETTLE_STEP_ROWS
            if is_full or size > SCAN_CHUNK_BYTES:
                yield RemovalBatch(entries, moved, clears)
                entries, moved, size = [], [], 0
        if entries or moved:
            yield RemovalBatch(entries, moved, clears)

    def write(self, batch: RemovalBatch) -> list[bytes]:
        """Write one batch. Returns the stored keys that it touched."""

        def stage(writes: WriteBatch) -> None:
            data = self._engine.families[DATA]
            for entry in batch.entries:
                writes.delete(entry, data)
            for move, value in moved:
                writes.put(move.plain, value, data)
                writes.delete(move.stored, data)
                writes.delete(move.row, data)

        with self._committer.lock:
            moved = batch.moved
            if self._clears.all() is not batch.clears:
                moved = [
                    each for each in moved if self._engine.get(DATA, each.move.stored) is not None
                ]
            mend = self._committer.mend_by(nothing)
            self._committer.write_meta(stage, durable=False, mend=mend)
        return [*batch.entries, *chain.from_iterable(each.move for each in batch.moved)]


# --------------------------------------------------------------------------------------------------
# Settling: old small imports become plain versions, and their records go.
#
#     before   framed key | import id | kind     and a record that gives the id its time
#     after    framed key | suffix of that time | kind
#
# A store that takes an import every ten seconds takes three million in a year. Each record costs
# memory, opening, and every read that meets a row, so records are kept for recent imports and for
# large ones, whose number the data bounds.
#
# Invariants
# 1. An import settles if it was added at or below `since`, and stands. No window of changes begins
#    before it, its change entries are trimmed, it cannot be reverted, and its garbage is gone.
# 2. One engine batch writes a row in its new form and removes the old one. Both forms give the row
#    the same time, so every reader sees the row once and alike, whichever batch the reader saw
#    last.
# 3. The record goes in the batch of the last rows or later, and leaves the view of readers after
#    that. A reader that holds an older view knows both forms; one that takes the new view reads
#    entries afterwards, and meets only plain versions.
# 4. A crash leaves an import of which some rows have settled. The next run continues with the
#    others.
# 5. A clear between reading and writing a row takes the row: nothing that was cleared comes back.
#
# An import with a key list costs its rows. Small imports without one, whose keys are
# long, share one pass over their spans.


class _Row(NamedTuple):
    """A stored row of an import, its key as a plain version, and its value."""

    stored: bytes
    plain: bytes
    value: bytes


class Settled(NamedTuple):
    """The work of a batch: the stored keys that it replaced, and the imports that it made past."""

    stored: list[bytes]
    imports: int


class Settling:
    """Lets the old small imports of one store settle. One run works at a time."""

    def __init__(self, parts: Parts) -> None:
        self._imports, self._clears = parts.imports, parts.clears
        self._engine = parts.versions.engine
        self._committer = parts.committer

    def run(self, since: int) -> Iterator[Settled]:
        """Let imports settle that were added at or below `since`; yields after each batch."""
        clears = self._clears.all()
        rows: list[_Row] = []
        done: list[ImportRecord] = []
        size = 0
        for piece in self._pieces(since):
            if isinstance(piece, ImportRecord):
                done.append(piece)
            else:
                rows.append(piece)
                size += len(piece.value)
            if len(rows) + len(done) >= SETTLE_STEP_ROWS or size > SCAN_CHUNK_BYTES:
                yield self._write(rows, done, clears)
                rows, done, size = [], [], 0
        if rows or done:
            yield self._write(rows, done, clears)

    def _pieces(self, since: int) -> Iterator[_Row | ImportRecord]:
        """The rows that settle, and each import after its last row."""
        unlisted: list[ImportRecord] = []
        for record in self._imports.every():
            if record.settles(since):
                keys = self._imports.keys_of(record) if record.spans else []
                if keys is None:
                    unlisted.append(record)
                else:
                    yield from self._listed(record, keys)
        yield from chain(self._swept(unlisted), unlisted)

    def _listed(self, record: ImportRecord, keys: list[bytes]) -> Iterator[_Row | ImportRecord]:
        """The rows of an import and itself. One look-up a key."""
        suffix = _suffix_of(record)
        for found in imported_entries(
            self._engine, keys, record.reference, rows_max=SETTLE_STEP_ROWS
        ):
            for row in found:
                yield _settled(row.stored, suffix, row.value)
        yield record

    def _swept(self, records: list[ImportRecord]) -> Iterator[_Row]:
        """The rows of imports. One pass over all their spans."""
        suffixes = {record.reference: _suffix_of(record) for record in records}
        for span in merge_spans(span for record in records for span in record.spans):
            cursor = self._engine.cursor(DATA, *span_bounds(span.start, span.end))
            for keys, values in chunks(cursor):
                for stored, value in zip(keys, values, strict=True):
                    suffix = suffixes.get(stored[-TAIL_BYTES:-1])
                    if suffix is not None:
                        yield _settled(stored, suffix, value)

    def _write(
        self, rows: list[_Row], done: list[ImportRecord], clears: tuple[Clear, ...]
    ) -> Settled:
        """Write one batch. `clears` are the clears that were known before its rows were read."""

        def stage(batch: WriteBatch) -> None:
            data = self._engine.families[DATA]
            for row in rows:
                batch.put(row.plain, row.value, data)
                batch.delete(row.stored, data)

        with self._committer.lock:
            if self._clears.all() is not clears:
                rows = [row for row in rows if self._engine.get(DATA, row.stored) is not None]
            self._imports.retire(done, stage)
        return Settled([row.stored for row in rows], len(done))


def _suffix_of(record: ImportRecord) -> bytes:
    assert record.added is not None
    return encode_suffix(record.added)


def _settled(stored: bytes, suffix: bytes, value: bytes) -> _Row:
    return _Row(stored, stored[:-TAIL_BYTES] + suffix + stored[-1:], value)


# --------------------------------------------------------------------------------------------------
# Leftovers of imports: records of imports whose rows are gone, imports that were never added, and
# stray files.
#
# Invariants
# 1. An import becomes past here only when no row refers to it and no change entry names it: it was
#    added, or reverted, at or below `since`, and the index is trimmed.
# 2. Imports and files younger than a bound stay, because they may still be under way.


class Leftovers:
    """Removes the leftovers of the imports of one store."""

    def __init__(self, imports: Imports, committer: Committer, path: Path | None) -> None:
        self._imports = imports
        self._committer = committer
        self._path = path
        self._rows: dict[int, bytes] = {}
        """For each import, the row that was found last. Usually two look-ups show that it still
        exists."""

    def forget_history(self, since: int) -> int:
        """Turn each import whose last change is at or below `since`, and whose rows are gone, into
        a past import; returns their number. Small imports that stand are left to settle.

        A search for an import's first row starts where the last search ended, so that all searches
        together pass over the import's spans once.
        """
        gone: list[ImportRecord] = []
        for record in self._imports.every():
            changed = record.added if record.reverted is None else record.reverted
            if changed is None or changed > since or record.settles(since):
                continue
            if not (record.spans and self._has_rows(record)):
                gone.append(record)
                self._rows.pop(record.import_id, None)
        for at in range(0, len(gone), GC_KEYS_PER_STEP):
            self._imports.retire(gone[at : at + GC_KEYS_PER_STEP])
        return len(gone)

    def abort_stale(self, age_s: float) -> int:
        """Abort imports that were prepared `age_s` ago or earlier, and neither added since nor
        being added now; returns how many."""
        oldest = self._oldest(age_s)
        stale = [
            record.import_id
            for record in self._imports.all()
            if record.added is None and record.prepared is not None and record.prepared < oldest
        ]
        return sum(self._imports.abort_idle(import_id) for import_id in stale)

    def remove_files(self, age_s: float) -> None:
        """Remove files older than `age_s` from `ingest/`, except the files that an import waits
        for. Those of a refused load stay for `REFUSED_LOAD_S`."""
        if self._path is None:
            return
        # The machine's clock dates files, and the store's clock may be far ahead of it.
        now = min(self._committer.now(), time.time_ns())
        waiting = {f"{record.import_id:016x}" for record in self._imports.all() if not record.added}
        place = self._path / INGEST_DIRECTORY
        with storage_errors(str(place)):
            for left in place.iterdir() if place.is_dir() else ():
                with suppress(FileNotFoundError):  # its owner removed it meanwhile
                    is_refused = left.name.startswith(REFUSED_PREFIX)
                    stays_s = max(age_s, REFUSED_LOAD_S) if is_refused else age_s
                    oldest = now - int(stays_s * NS_PER_SECOND)
                    if left.name not in waiting and left.lstat().st_mtime_ns < oldest:
                        _remove(left)

    def _has_rows(self, record: ImportRecord) -> bool:
        seen = self._rows.get(record.import_id, min(span.start for span in record.spans))
        if self._imports.stored.has(record, seen):
            return True
        first = self._imports.first_row(record, seen)
        if first is not None:
            self._rows[record.import_id] = first
        return first is not None

    def _oldest(self, age_s: float) -> int:
        return self._committer.now() - int(age_s * NS_PER_SECOND)


def _remove(left: Path) -> None:
    """Remove a directory or a file. If the disk refuses, it stays for the next run."""
    if left.is_dir() and not left.is_symlink():
        shutil.rmtree(left, ignore_errors=True)
    else:
        with suppress(OSError):
            left.unlink()


# --------------------------------------------------------------------------------------------------
# A run of garbage collection: it gives up history below a time and removes the unreadable records.
#
# The steps of a run, in their order:
#
#     since       write the new frontier durably: no reader asks for times below it any more
#     versions    remove the garbage of each key that changed since the last run, oldest first; a
#                 value that a revert brought back gets the time of the revert
#     ranges      remove the range tombstones at or below `since`: no version is left under them
#     index       remove the change entries at or below `since`, and record that the run is done
#     imports     turn imports that have neither rows nor change entries into past imports
#     tidied      delete index entries of tables that old imports left behind
#     settled     let small imports become plain versions: see the section on settling
#     files       merge small files where many lie together
#
# A run finds its work in the change index. A version becomes garbage only when something newer is
# written, so a run looks at the keys changed in `(last run, since]`, and passes over the spans of
# range tombstones and of large imports of that window. A run costs what changed.
#
# Invariants
# 1. Batches survive a crash in the order of the steps, so a crash leaves only records that nobody
#    can read. If range tombstones went before versions, a crash would bring deleted keys back.
# 2. `collected` is the time up to which the steps to `index` are done. After a crash the next run
#    starts there. The later steps look for their work in each run.
# 3. One run works at a time. Commits continue meanwhile: garbage at `since` stays garbage.
#
# Source: the order of persistence is CockroachDB's (its MVCC GC queue).


@dataclass(frozen=True, slots=True)
class GcReport:
    """The outcome of one run. Counts are of removed entries."""

    since: Timestamp
    """History is kept from this time on."""
    previous: Timestamp
    """Before the run, history was kept from this time on."""
    versions: int
    range_tombstones: int
    change_entries: int
    imports: int
    """Imports that became past because their rows were garbage, and stale imports that were
    aborted."""
    lost_holds: tuple[HoldRecord, ...]
    """The holds that this run invalidated, because they exceeded their budget."""
    seconds: float
    held_by: tuple[HoldRecord, ...] = ()
    """The claims that kept history, oldest first: holds, and the oldest pin of each kind."""
    settled: int = 0
    """Small imports whose rows became plain versions."""
    tidied: int = 0
    """Index entries of tables that no row fitted, which imports had left behind."""

    @property
    def held_back(self) -> bool:
        """Whether a hold or an open reader kept more history than the caller asked for."""
        return bool(self.held_by)


def _tell_nobody(versions: int) -> None:
    pass


@dataclass(slots=True)
class _Tally:
    versions: int = 0
    ranges: int = 0
    entries: int = 0
    imports: int = 0
    settled: int = 0
    tidied: int = 0
    first: bytes = b""
    last: bytes = b""
    """All removed and rewritten entries lie between `first` and `last`."""
    tell: Callable[[int], None] = _tell_nobody
    """Called with the number of versions removed so far."""
    began: int = 0
    """The newest complete time when the run began."""
    window: tuple[int, int, int] = (0, 0, 0)
    """Three times: of the first commit of the run, of the commit that the run has read, and the
    time that its last commit can have at most."""
    passed: int = 0
    """The time whose share of the window tells the work that is done."""

    def tell_progress(self) -> None:
        """Call `tell`."""
        first, _, last = self.window
        self.tell(WorkCount.at(self.versions, (self.passed - first) / max(last - first, 1)))

    def touch(self, entries: list[bytes]) -> None:
        """Note the stored keys that one batch removed."""
        low, high = min(entries), max(entries)
        self.first = min(self.first or low, low)
        self.last = max(self.last, high)


class Collector:
    """Collects the garbage of one store. Tests set `at_step`, called with a name between steps."""

    def __init__(self, parts: Parts, path: Path | None) -> None:
        self._versions, self._index, self._committer = parts.versions, parts.index, parts.committer
        self._oldest_lacking = parts.oldest_lacking
        self._holds, self._imports, self._clears = parts.holds, parts.imports, parts.clears
        self._engine = parts.versions.engine
        self._path = path
        self._meta = Meta(self._engine)
        self._running = threading.Lock()
        self._runner: int | None = None
        self._stopped = False
        self.leftovers = Leftovers(parts.imports, parts.committer, path)
        self.settling = Settling(parts)
        self._removing = Removing(parts)
        self.keys_per_step = GC_KEYS_PER_STEP
        self.tidy: Callable[[int, Callable[[], None]], int] = lambda since, require_running: 0
        """Deletes index entries that imports up to a time left behind, and returns their number."""
        self.at_step: Callable[[str], None] = lambda name: None

    def collect(
        self,
        before: int | None = None,
        keep: timedelta | None = None,
        *,
        compact: bool = False,
        progress: Callable[[int], None] | None = None,
    ) -> GcReport:
        """Give up history below `before`, or older than `keep`; see `run`."""
        age = None if keep is None else keep.total_seconds()
        target = self.target(before=before, keep_s=age)
        return self.run(target, compact=compact, progress=progress)

    def run(
        self,
        target: int,
        *,
        compact: bool = False,
        progress: Callable[[int], None] | None = None,
    ) -> GcReport:
        """Move `since` to `target`, or as far as holds allow, and remove the records below.

        Costs what changed since the last run. With `compact` the run also rewrites the spans that
        it touched, which gives the space back at once. Waits for a run that is under way. Calls
        `progress` with the number of versions removed so far, after some thousands each:
        a `WorkCount`, whose total is estimated from the times of the commits.
        """
        started = time.perf_counter()
        with self._alone():
            self._committer.require_writable()
            previous = self._committer.since
            tally = _Tally(tell=progress or _tell_nobody)
            tally.began, lost, held_by = self._advance(target)
            since = self._committer.since
            if since > previous:
                self._committer.sync_all()
            self._remove_history(since, tally)
            self.require_running()
            tally.imports += self.leftovers.abort_stale(STALE_IMPORT_S)
            self.leftovers.remove_files(STALE_IMPORT_S)
            self._free_space(tally, compact=compact)
            seconds = time.perf_counter() - started
            meters = self._committer.meters
            meters.collections.note(seconds)
            meters.collected_entries += tally.versions + tally.ranges + tally.entries
        report = GcReport(
            since=since,
            previous=previous,
            versions=tally.versions,
            range_tombstones=tally.ranges,
            change_entries=tally.entries,
            imports=tally.imports,
            lost_holds=lost,
            seconds=seconds,
            held_by=held_by,
            settled=tally.settled,
            tidied=tally.tidied,
        )
        self._tell(report)
        return report

    def _tell(self, report: GcReport) -> None:
        notice(
            "kvstore.retention.gc",
            "collected",
            store=self._committer.where,
            since=str(report.since),
            versions=report.versions,
            change_entries=report.change_entries,
            imports=report.imports,
            held_by=len(report.held_by),
            lost_holds=[hold.name for hold in report.lost_holds],
            seconds=round(report.seconds, 3),
        )

    def target(self, *, before: int | None, keep_s: float | None) -> int:
        """The target time: `before` itself, or now less the age `keep_s`."""
        if (before is None) == (keep_s is None):
            raise UsageError("gc takes either before or keep", "pass one of them")
        if before is not None:
            return before
        assert keep_s is not None
        if keep_s < 0:
            raise UsageError(f"keep is negative: {keep_s:g} s", "pass the age to keep")
        return max(0, self._committer.now() - int(keep_s * NS_PER_SECOND))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Wait for a run that is under way, and keep others from starting inside the block."""
        with self._alone():
            self.require_running()
            yield

    def stop(self) -> None:
        """Have a run that is under way raise `ClosedError` at its next step; wait for its end."""
        self._stopped = True
        with self._running:
            pass

    def require_running(self) -> None:
        """Raise `ClosedError` after `stop`."""
        if self._stopped:
            raise ClosedError(f"the store at {self._path}")

    def require_outside(self) -> None:
        """Raise `UsageError` if called from `progress`, where waiting for the run would never
        end."""
        if self._runner == threading.get_ident():
            raise UsageError(
                "the progress of gc or verify would wait for its own end",
                "raise an error there to call it off, and call again once it has returned",
            )

    @contextmanager
    def _alone(self) -> Iterator[None]:
        self.require_outside()
        with self._running:
            self._runner = threading.get_ident()
            try:
                yield
            finally:
                self._runner = None

    # -- since ------------------------------------------------------------------------------

    def _advance(self, target: int) -> tuple[int, tuple[HoldRecord, ...], tuple[HoldRecord, ...]]:
        """Move `since`; returns the time now, the holds that were lost, and the claims that held
        `since` back."""
        committer = self._committer
        with committer.lock:
            self.require_running()
            newest = committer.close_upto_now() - 1
            lost = tuple(self._holds.invalidate_overdue(newest, self._oldest_lacking))
            held_by = self._holds.needing(target)
            allowed = min([newest, *(claim.timestamp for claim in held_by)])
            if min(target, allowed) > committer.since:
                committer.move_since(min(target, allowed))
            return newest, lost, held_by

    def _remove_history(self, since: int, tally: _Tally) -> None:
        """The steps after the first. Continues where a crash ended them."""
        collected = self._meta.timestamp(COLLECTED)
        if collected < since:
            self.at_step("since")
            self._remove_versions(collected, since, tally)
            self._remove_ranges(since, tally)
            self._trim(since, tally)
            tally.imports += self.leftovers.forget_history(since)
            self.at_step("imports")
        tally.tidied += self.tidy(since, self.require_running)
        self.at_step("tidied")
        self._settle(since, tally)

    # -- versions ---------------------------------------------------------------------------

    def _remove_versions(self, collected: int, since: int, tally: _Tally) -> None:
        if collected < self._meta.timestamp(INDEX_FLOOR):
            # The index of a restored store begins at the time of the restore.
            self._sweep([Span()], since, tally)
            return
        keys: set[bytes] = set()
        size = 0
        spans: list[Span] = []
        for found in self._changed(collected, since, tally):
            if isinstance(found, Span):
                spans.append(found)
            elif found not in keys:
                keys.add(found)
                size += len(found)
            if len(keys) >= GC_SORTED_KEYS_MAX or size >= GC_SORTED_KEYS_BYTES_MAX:
                self._look_up(keys, since, tally)
                keys.clear()
                size = 0
            if len(spans) >= GC_SPANS_PER_STEP:
                self._sweep(spans, since, tally)
                spans.clear()
        self._look_up(keys, since, tally)
        self._sweep(spans, since, tally)

    def _changed(self, collected: int, since: int, tally: _Tally) -> Iterator[bytes | Span]:
        """Keys and spans that changed in `(collected, since]`."""
        first = 0
        for commit in self._index.read(since=collected, upto=since):
            tally.entries += 1
            first = first or commit.timestamp
            tally.window = (first, commit.timestamp, since)
            for row in commit.entry.rows():
                if row.op == OP_DELETE_RANGE:
                    yield Span(row.key, row.value)
                elif row.op in (OP_IMPORT, OP_REVERT):
                    yield from self._imports.touched_by(row.key)
                else:
                    yield row.key

    def _look_up(self, keys: Iterable[bytes], since: int, tally: _Tally) -> None:
        """Remove the garbage of keys. One look-up each, in key order, a step of keys at a time."""
        ordered, most = sorted(keys), self.keys_per_step
        first, newest, _ = tally.window
        passed = max(first, tally.passed)
        for at in range(0, len(ordered), most):
            self.require_running()
            step = ordered[at : at + most]
            tally.passed = passed + (newest - passed) * (at + len(step)) // len(ordered)
            self._remove(garbage_of_keys(self._versions, step, since, entries_max=most), tally)

    def _sweep(self, spans: list[Span], since: int, tally: _Tally) -> None:
        """Remove the garbage of whole spans. One pass over each."""
        merged = list(merge_spans(spans))
        tally.passed = tally.window[1]
        most = self.keys_per_step
        self._remove(garbage_in_spans(self._versions, merged, since, entries_max=most), tally)

    def _remove(self, doomed: Iterable[Removal], tally: _Tally) -> None:
        for batch in self._removing.batches(doomed, entries_max=self.keys_per_step):
            self.require_running()
            stored = self._removing.write(batch)
            tally.versions += batch.removed
            tally.touch(stored)
            tally.tell_progress()
            self.at_step("versions")

    # -- range tombstones -------------------------------------------------------------------

    def _remove_ranges(self, since: int, tally: _Tally) -> None:
        """Remove the range tombstones at or below `since`, a stretch of the key space in a step. No
        version lies under them, so any of them may go first."""
        for span in self._versions.view.fragments.stretches(since):
            self._forget(span, since, tally)

    def _forget(self, span: Span, since: int, tally: _Tally) -> None:
        """Remove the range tombstones at or below `since` that start in `span`. One pass over it,
        under the commit lock."""
        committer, versions = self._committer, self._versions
        with committer.lock:
            self.require_running()
            doomed = [
                key
                for key, _ in pairs(self._engine.cursor(RANGES, *span_bounds(span.start, span.end)))
                if decode_suffix(key[-SUFFIX_BYTES:]) <= since
            ]

            def stage(batch: WriteBatch) -> None:
                for key in doomed:
                    batch.delete(key, self._engine.families[RANGES])

            kept = versions.view.fragments.forgetting(since, [span])
            show = partial(versions.publish_fragments, kept)
            mend = committer.mend_by(nothing)  # it reads the range tombstones anyway
            committer.write_meta(stage, show, durable=False, mend=mend)
        tally.ranges += len(doomed)
        self.at_step("ranges")

    # -- index and clears -------------------------------------------------------------------

    def _trim(self, since: int, tally: _Tally) -> None:
        run = CollectionRun(Timestamp(tally.began), Timestamp(since), tally.versions)

        def stage(batch: WriteBatch) -> None:
            self._index.stage_trim(batch, since)
            self._clears.stage_forget(batch, since)
            self._meta.stage_timestamp(batch, COLLECTED, since)
            if tally.versions or tally.ranges:
                stage_collection(self._meta, batch, run)

        def show() -> None:
            self._index.generations.forget(since)
            self._clears.forget(since)

        def reload() -> None:
            self._index.generations.reload()
            self._clears.reload()

        committer = self._committer
        with committer.lock:
            self.require_running()
            committer.write_meta(stage, show, durable=False, mend=committer.mend_by(reload))
        self.at_step("index")

    def _settle(self, since: int, tally: _Tally) -> None:
        """Let small imports become plain versions. Last, for nothing refers to them by then."""
        self.require_running()
        for done in self.settling.run(since):
            tally.settled += done.imports
            if done.stored:
                tally.touch(done.stored)
            self.at_step("settled")
            self.require_running()

    # -- space ------------------------------------------------------------------------------

    def _free_space(self, tally: _Tally, *, compact: bool) -> None:
        """Merge small files. With `compact`, first rewrite the spans that the run touched, so that
        files shrink now rather than some day."""
        if compact:
            self._compact(tally)
        rewritten = (tally.first, tally.last) if tally.settled and tally.last else None
        for _ in self._engine.merges(rewritten):
            self.require_running()

    def _compact(self, tally: _Tally) -> None:
        if tally.last:
            self._engine.compact(DATA, tally.first, tally.last + b"\x00")
        if tally.ranges:
            self._engine.compact(RANGES)
        if tally.entries:
            self._engine.compact(CHANGES)


# --------------------------------------------------------------------------------------------------
# GC in the background: a thread that a store owns, running at an interval and stopped by close.
#
# A failed run is logged (`kvstore.retention.gc`), counted in `Store.stats`, and tried again after
# the interval, after twice the interval if it fails again, and so on up to `GC_DELAY_FACTOR_MAX`
# intervals. A user's callback that raises is logged and counted too.
#
# Invariants
# 1. The thread waits on a condition and never sleeps: closing the store ends a wait at once, and a
#    run under way ends at its next step.
# 2. The thread ends by `stop`, on a closed store, or on a poisoned store, where nothing succeeds
#    until the store is opened again. No other failure ends it.
# 3. The lock is not held during a run or a callback.


@dataclass(frozen=True, slots=True)
class GcPolicy:
    """How much history a store keeps, and how often it removes older history."""

    keep: timedelta
    every: timedelta = timedelta(minutes=10)
    compact: bool = False
    """Whether each run rewrites the spans it touched: space comes back at once, at the cost of
    I/O."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "keep", AGE.check("keep", self.keep))
        object.__setattr__(self, "every", AGE.check("every", self.every))
        if not self.every:
            raise UsageError(f"{self}", "every must be positive")


class GcWorker:
    """The thread. `run` does one collection; `after_run` gets its report."""

    def __init__(
        self,
        policy: GcPolicy,
        run: Callable[[GcPolicy], GcReport],
        *,
        failures: Failures,
        after_run: Callable[[GcReport], None] | None = None,
    ) -> None:
        self.policy = policy
        self.failures = failures
        self.error: Exception | None = None
        """The error of the last run; None if it went well."""
        self.runs = 0
        self._run = run
        self._after_run = after_run
        # Take the lock, never the condition: a signal in the entry of a condition leaves it locked.
        self._lock = threading.RLock()
        self._woken = threading.Condition(self._lock)
        self._stopping = False
        self._due = False
        own(self, "the background GC of a store", endings=("stop",))
        self._thread = threading.Thread(target=self._work, name="kvstore-gc", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Run now rather than at the end of the interval."""
        with self._lock:
            self._due = True
            self._woken.notify_all()

    def stop(self) -> None:
        """End the thread and wait for it, unless the thread itself calls. Repeatable."""
        with self._lock:
            self._stopping = True
            self._woken.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _work(self) -> None:
        while True:
            with self._lock:
                self._woken.wait_for(self._is_due, self._delay_s())
                if self._stopping:
                    return
                self._due = False
            try:
                report = self._run(self.policy)
            except ClosedError:
                return
            except Exception as error:  # noqa: BLE001  # the next run may succeed
                self.error = error
                self.failures.note("garbage collection in the background", error)
                if isinstance(error, PoisonedError):
                    return
                continue
            self.runs += 1
            self.error = None
            self.failures.succeeded()
            if self._after_run is not None:
                self._call_back(self._after_run, report)

    def _call_back(self, after_run: Callable[[GcReport], None], report: GcReport) -> None:
        try:
            after_run(report)
        except BaseException as error:  # noqa: BLE001  # the user's: sys.exit() there is no reason
            if not self._stopping:
                self.failures.note("the callback after_run of a collection", error, delays=False)

    def _delay_s(self) -> float:
        """The wait until the next run: the interval, or longer after failures."""
        every_s = self.policy.every.total_seconds()
        delay_s = self.failures.delay_s(every_s, GC_DELAY_FACTOR_MAX * every_s)
        return min(delay_s, threading.TIMEOUT_MAX)

    def _is_due(self) -> bool:
        return self._stopping or self._due
