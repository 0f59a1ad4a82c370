"""Walks a whole store in bounded memory, and lists everything that breaks an invariant.

    data      keys are well formed and ascend; times lie below upper, or in the window a replica is
              taking; tombstones are empty; rows of imports have a record and lie in its spans
    index     each commit has all its chunks, each row stands in its stream and has its version,
              with the same value, and each version above the floor has its row
    ranges    the map in memory agrees with the stored ones, and with the index above the floor
    epochs    they join, runs and times are in order, and each counts the events that are there
    expiries  none is due before the time that the schedule waits for
    records   frontiers, holds, clears and imports agree with each other and with the rows
    tables    each live row can be read by the columns of its table

The comparison of index and versions takes no memory. Each row of the index is looked up in `data`.
In the other direction both sides are counted and summed as hashes of (key, time). Only if these
differ, a second pass looks up each version in the index, to name the missing ones.

Commits continue meanwhile, because their versions are newer than the verified ones. GC and clears
wait. A live reader does not follow its writer meanwhile, whose GC does not wait.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from functools import lru_cache

from kvstore.changes.entry import (
    OP_DELETE,
    OP_DELETE_RANGE,
    OP_PUT,
    OP_PUT_LARGE,
    Row,
)
from kvstore.changes.index import Commit
from kvstore.clears import Clear
from kvstore.codec.keys import (
    TOMBSTONE,
    VALUE,
    check_data_key,
    decode_suffix,
    encode_suffix,
    is_reference,
    split_data_key,
)
from kvstore.codec.ordered import frame, unframe
from kvstore.engine.api import DATA, pairs
from kvstore.errors import CorruptionError, printable
from kvstore.imports import ImportRecord
from kvstore.limits import SCAN_CHUNK
from kvstore.meta import INDEX_FLOOR, Meta
from kvstore.mvcc import Fragments, RangeTombstone
from kvstore.mvcc.versions import stored_tombstones
from kvstore.parts import Parts
from kvstore.span import Span
from kvstore.timestamp import TIMESTAMP_MAX
from kvstore.verify.epochs import check_epochs, epochs_at
from kvstore.verify.records import (
    check_expiries,
    check_frontiers,
    check_hold,
    check_import,
    check_key_lists,
    check_rows,
    check_stamps,
)
from kvstore.verify.report import Findings, StoreReport
from kvstore.verify.tables import check_tables

_HASH_MASK = (1 << 64) - 1
_COMMITS_CACHED = 16


def verify(parts: Parts, *, progress: Callable[[int], None] | None = None) -> StoreReport:
    """Verify a store. The caller keeps GC away. O(everything stored), one look-up per change.

    `progress` is called with the number of versions and changes checked so far.
    """
    started = time.perf_counter()
    pins, committer = parts.pins, parts.committer
    pin = pins.new()
    # Another process sees no pin, so a live reader stands still until its walk has ended.
    standing = committer.lock if committer.policy.is_live else nullcontext()
    try:
        with standing:
            with committer.lock:
                pins.keep(pin, committer.since, kind="verification")
                walk = _Walk(parts)
            walk.tell = progress or walk.tell
            walk.data()
            walk.index()
            walk.compare()
            walk.ranges()
            walk.epochs()
            walk.records()
            check_expiries(walk.findings, committer)
            if parts.reserve.has_tables:
                check_tables(walk.findings, parts, walk.upto)
    finally:
        pins.let_go(pin, None)
    return StoreReport(
        problems=tuple(walk.findings.problems),
        complete=walk.findings.complete,
        keys=walk.keys,
        versions=walk.entries,
        range_tombstones=len(walk.stored_ranges),
        change_entries=walk.chunks,
        seconds=time.perf_counter() - started,
    )


class _Side:
    """One side of the comparison of index and versions: a count and a sum of hashes."""

    def __init__(self) -> None:
        self.count = 0
        self.sum = 0

    def add(self, key: bytes, timestamp: int) -> None:
        self.count += 1
        self.sum = (self.sum + hash((key, timestamp))) & _HASH_MASK

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, _Side)
        return (self.count, self.sum) == (other.count, other.sum)

    __hash__ = None  # type: ignore[assignment]


class _Walk:
    """One verification. It is made under the commit lock, so that it starts from one moment."""

    def __init__(self, parts: Parts) -> None:
        versions, index, committer = parts.versions, parts.index, parts.committer
        self._engine = versions.engine
        self._index = index
        self._committer = committer
        self._holds, self._imports = parts.holds, parts.imports
        self._meta = Meta(self._engine)
        self.findings = Findings()
        self.keys = self.entries = self.chunks = 0
        self.tell: Callable[[int], None] = lambda looked_at: None
        self._clears: tuple[Clear, ...] = parts.clears.all()
        self._cleared = newest_clears(self._clears)
        self.upto = committer.upper - 1
        self._coming = committer.policy.coming
        self._floor: int = committer.since
        with self.findings.reading():
            self._floor = max(self._floor, self._meta.timestamp(INDEX_FLOOR))
        self._view = versions.view
        self._epochs = epochs_at(committer)
        self._records = {record.reference: record for record in parts.imports.all()}
        self._cursor = self._engine.cursor(DATA)
        self.stored_ranges: list[RangeTombstone] = []
        with self.findings.reading():
            self.stored_ranges.extend(stored_tombstones(self._engine))
            last = index.last()
            if last > self.upto:
                self.findings.add("change index", f"has entries at {last}, not below upper")
            known = {s for found in index.generations.all() for s in found.every_stream()}
            for stream in index.stored_streams():
                if stream not in known:
                    self.findings.add("change index", f"has the unknown stream {stream.hex()}")
        self._stored, self._indexed = _Side(), _Side()
        self._rows: Counter[bytes] = Counter()
        self._indexed_ranges: list[RangeTombstone] = []
        self._events: set[tuple[int, int, int]] = set()
        self._index_whole = False

    # -- data -------------------------------------------------------------------------------

    def data(self) -> None:
        """The pass over the stored entries."""
        previous, stem, before = b"", b"", b""
        with self.findings.reading():
            for entry, value in pairs(self._cursor):
                self.entries += 1
                if self.entries % SCAN_CHUNK == 0:
                    self.tell(self.entries)
                if entry <= previous:
                    self.findings.add(f"data key {entry.hex()}", "is not above the one before")
                previous = entry
                try:
                    check_data_key(entry)
                except CorruptionError as error:
                    self.findings.add(error.where, error.problem)
                    continue
                framed, suffix, kind = split_data_key(entry)
                if entry[:-1] == before:
                    where = f"key {printable(unframe(framed))}"
                    self.findings.add(where, "is put and deleted at one time")
                before = entry[:-1]
                if framed != stem:
                    stem = framed
                    self.keys += 1
                self._entry(unframe(framed), suffix, kind, value)

    def _entry(self, key: bytes, suffix: bytes, kind: bytes, value: bytes) -> None:
        where = f"key {printable(key)}"
        if kind == TOMBSTONE and value:
            self.findings.add(where, f"a tombstone with a value of {len(value)} bytes")
        if is_reference(suffix):
            self._rows[suffix] += 1
            record = self._records.get(suffix)
            if record is None:
                self.findings.add(where, f"a row of import {suffix.hex()}, which has no record")
            elif not any(key in span for span in record.spans):
                self.findings.add(where, f"outside the spans of its import {suffix.hex()}")
            return
        timestamp = decode_suffix(suffix)
        if self.upto < timestamp <= self._coming:
            return
        if not 0 < timestamp <= self.upto:
            self.findings.add(where, f"a version at {timestamp}, with upper at {self.upto + 1}")
        elif self._is_cleared(key, timestamp):
            self.findings.add(where, f"a version at {timestamp}, which had been cleared")
        elif timestamp > self._floor:
            self._stored.add(key, timestamp)

    def _is_cleared(self, key: bytes, timestamp: int) -> bool:
        return timestamp < self._cleared.newest(key, TIMESTAMP_MAX)

    # -- index ------------------------------------------------------------------------------

    def index(self) -> None:
        """The pass over the change index above the floor."""
        rows = 0
        with self.findings.reading():
            for commit in self._index.read(since=self._floor, upto=self.upto):
                self.chunks += 1
                for row in commit.entry.rows():
                    self._row(row, commit)
                rows += commit.entry.count
                self.tell(self.entries + rows)
            self._index_whole = True

    def _row(self, row: Row, commit: Commit) -> None:
        timestamp = commit.timestamp
        if row.op in (OP_PUT, OP_PUT_LARGE, OP_DELETE):
            self._point(row, timestamp)
            self._place(row.key, commit)
        elif row.op == OP_DELETE_RANGE:
            self._indexed_ranges.append(RangeTombstone(row.key, row.value, timestamp))
        else:  # an import or its revert: reading refuses all others
            self._events.add((row.op, int.from_bytes(row.key, "big"), timestamp))

    def _point(self, row: Row, timestamp: int) -> None:
        if self._is_cleared(row.key, timestamp):
            return
        self._indexed.add(row.key, timestamp)
        kind = TOMBSTONE if row.op == OP_DELETE else VALUE
        found = self._engine.get(DATA, frame(row.key) + encode_suffix(timestamp) + kind)
        where = f"key {printable(row.key)} at {timestamp}"
        if found is None:
            self.findings.add(where, "in the change index, but not in the versions")
        elif row.op == OP_PUT and found != row.value:
            self.findings.add(where, "the change index has another value than the versions")

    def _place(self, key: bytes, commit: Commit) -> None:
        """Consumers find a key's changes in the stream that its generation gives it."""
        if self._index.generations.at(commit.timestamp).stream_of(key) != commit.stream:
            where = f"key {printable(key)} at {commit.timestamp}"
            self.findings.add(where, f"in the change stream {commit.stream.hex()}, not its own")

    # -- both -------------------------------------------------------------------------------

    def compare(self) -> None:
        """Name the versions above the floor that the index lacks."""
        if not self._index_whole or self._stored == self._indexed:
            return
        before = len(self.findings.problems)
        keys_at = lru_cache(_COMMITS_CACHED)(self._keys_at)
        with self.findings.reading():
            for entry, _ in pairs(self._engine.cursor(DATA)):
                framed, suffix, _ = split_data_key(entry)
                if is_reference(suffix):
                    continue
                timestamp = decode_suffix(suffix)
                if self._floor < timestamp <= self.upto:
                    key = unframe(framed)
                    if key not in keys_at(timestamp) and not self._is_cleared(key, timestamp):
                        self.findings.add(
                            f"key {printable(key)} at {timestamp}",
                            "in the versions, but not in the change index",
                        )
        if len(self.findings.problems) == before and self._stored.count < self._indexed.count:
            self.findings.add("change index", "has the same change more than once")

    def _keys_at(self, timestamp: int) -> frozenset[bytes]:
        commits = self._index.read(since=timestamp - 1, upto=timestamp)
        return frozenset(row.key for commit in commits for row in commit.entry.rows())

    # -- ranges -----------------------------------------------------------------------------

    def ranges(self) -> None:
        """Range tombstones are the same in memory, on disk and in the index."""
        fragments = self._view.fragments
        if Fragments.of(self.stored_ranges) != fragments:
            self.findings.add("range tombstones", "in memory differ from the stored ones")
        for start, end, timestamp in self.stored_ranges:
            if not (start < end and 0 < timestamp <= self.upto):
                self.findings.add(
                    f"range tombstone at {printable(start)}", f"ends or lies wrong, at {timestamp}"
                )
        if not self._index_whole:
            return
        left = [piece for whole in self._indexed_ranges for piece in self._uncleared(whole)]
        if Fragments.of(left) != fragments.forgetting(self._floor):
            self.findings.add("range tombstones", "differ from the change index")

    def _uncleared(self, whole: RangeTombstone) -> Iterator[RangeTombstone]:
        alone = Fragments().adding(whole)
        for clear in self._clears:
            if whole.timestamp < clear.timestamp and alone and clear.span.end is not None:
                alone = alone.clearing(clear.span.start, clear.span.end)
        yield from alone.tombstones(Span(), since=0, upto=whole.timestamp)

    # -- epochs and records -----------------------------------------------------------------

    def epochs(self) -> None:
        """Epochs agree with the change index above the floor."""
        check_epochs(
            self.findings,
            self._epochs,
            self._meta,
            self._index,
            floor=self._floor,
            upto=self.upto,
        )

    def records(self) -> None:
        """Frontiers, holds and imports."""
        since = self._committer.since
        check_frontiers(self.findings, self._meta, self._committer)
        for hold in self._holds.all():
            check_hold(self.findings, hold, since)
        events = self._events if self._index_whole else None
        for record in self._records.values():
            check_import(self.findings, record, events, floor=self._floor, upto=self.upto)
            whole = record.added is not None and record.added > since and not self._is_cut(record)
            check_rows(self.findings, record, self._rows[record.reference], is_whole=whole)
        check_key_lists(self.findings, self._meta, self._imports, self._committer)
        check_stamps(self.findings, self._records, self._view.stamps, self._events)

    def _is_cut(self, record: ImportRecord) -> bool:
        return any(
            clear.span.intersect(span.start, span.end) is not None
            for clear in self._clears
            for span in record.spans
        )


def newest_clears(clears: Iterable[Clear]) -> Fragments:
    """The newest of these clears over each key, as a map of one timestamp a stretch: verify asks it
    for each version. The clears come oldest first."""
    newest = Fragments()
    for clear in clears:
        start, end = clear.span.start, clear.span.end
        assert end is not None, "a clear has an end"
        newest = newest.clearing(start, end).adding(RangeTombstone(start, end, clear.timestamp))
    return newest
