"""Verification: do the stored bytes keep the invariants on which everything else relies?

`verify` walks a whole store in bounded memory and reports what breaks an invariant: entries that do
not decode, records that contradict the data, epochs that miss events.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import NamedTuple

from kvstore.base.span import Span
from kvstore.base.timestamp import TIMESTAMP_MAX, Timestamp
from kvstore.changes.epochs import (
    DOMAIN_MAX,
    PREFIX,
    Audit,
    Epoch,
    find_anchor,
    gap_before,
    unpack_run,
)
from kvstore.changes.index import (
    OP_DELETE,
    OP_DELETE_RANGE,
    OP_IMPORT,
    OP_PUT,
    OP_PUT_LARGE,
    OP_REVERT,
    ChangeIndex,
    Commit,
    Row,
)
from kvstore.codec.keys import (
    TOMBSTONE,
    VALUE,
    check_data_key,
    decode_suffix,
    encode_reference,
    encode_suffix,
    frame,
    is_reference,
    split_data_key,
    unframe,
)
from kvstore.engine.api import DATA, pairs
from kvstore.errors import CorruptionError, FormatVersionError, printable
from kvstore.limits import SCAN_CHUNK, VERIFY_PROBLEMS_MAX
from kvstore.mvcc import Fragments, RangeTombstone, Stamps
from kvstore.mvcc.arrow import binary_array
from kvstore.mvcc.meta import COLLECTED, INDEX_FLOOR, SINCE, STAGED, UPPER, Meta
from kvstore.mvcc.versions import stored_tombstones
from kvstore.retention.gc import collections
from kvstore.tables.catalogue import Catalogue, StoreDefinitions
from kvstore.tables.row_codec import TableCodec
from kvstore.timeline.committer import Committer
from kvstore.timeline.holds import HoldRecord
from kvstore.timeline.import_records import (
    KEYS_PREFIX,
    ImportRecord,
    PastImports,
    keys_name,
    read_keys,
)
from kvstore.timeline.imports import Imports
from kvstore.timeline.parts import Parts
from kvstore.timeline.read_times import Clear

# --------------------------------------------------------------------------------------------------
# The result of a verification: the problems, up to a bound, and counts of checked things.


class Problem(NamedTuple):
    """One problem and its place."""

    where: str
    problem: str

    def __str__(self) -> str:
        return f"{self.where}: {self.problem}"


@dataclass(frozen=True, slots=True)
class StoreReport:
    """The outcome. Counts are of the things that were checked."""

    problems: tuple[Problem, ...]
    complete: bool
    """False if there were more problems than are listed, or a pass ended at damage."""
    keys: int
    versions: int
    range_tombstones: int
    change_entries: int
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether no problem was found."""
        return not self.problems

    def require_ok(self) -> None:
        """Raise `CorruptionError` with the first problem, if there is one."""
        if self.problems:
            first = self.problems[0]
            more = f" ({len(self.problems)} problems)" if len(self.problems) > 1 else ""
            raise CorruptionError(first.where, first.problem + more)


class Findings:
    """Collects problems, at most `VERIFY_PROBLEMS_MAX`."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []
        self.complete = True

    def add(self, where: str, problem: str) -> None:
        """Note a problem."""
        if len(self.problems) < VERIFY_PROBLEMS_MAX:
            self.problems.append(Problem(where, problem))
        else:
            self.complete = False

    @contextmanager
    def reading(self) -> Iterator[None]:
        """A pass. Bytes that cannot be read end it and are noted as a problem."""
        try:
            yield
        except CorruptionError as error:
            self.add(error.where, error.problem)
            self.complete = False
        except FormatVersionError as error:
            self.add(error.path, f"format version {error.found}, not {error.supported}")
            self.complete = False


# --------------------------------------------------------------------------------------------------
# Checks that epochs fit each other, the time, and the change events that they count.
#
# Memory: the changesets whose epoch is still open where the pass is.


class EpochsAt(NamedTuple):
    """The epochs of one moment: written ones, in the runs below `run`, and pending ones."""

    run: int
    waiting: list[Epoch]
    domain: int


def epochs_at(committer: Committer) -> EpochsAt:
    """The epochs of this moment. The caller holds the commit lock."""
    run, waiting = committer.capture.pending()
    return EpochsAt(run, waiting, committer.capture.domain)


def check_epochs(
    findings: Findings,
    epochs: EpochsAt,
    meta: Meta,
    index: ChangeIndex,
    *,
    floor: int,
    upto: int,
) -> None:
    """Walk the epochs, and the headers of the change index above `floor`, up to `upto`."""
    with findings.reading():
        _check_order(findings, epochs, meta, upto=upto)
        anchor = find_anchor(_all(epochs, meta), floor=floor, upto=floor)
        if anchor is None:
            return
        audit = Audit(after=anchor.after)
        headers = index.headers(since=anchor.since, upto=upto)
        behind = _all(epochs, meta)
        if anchor.after is not None:
            next(epoch for epoch in behind if epoch == anchor.after)
        for epoch in audit.over(behind, headers):
            for where, problem in audit.judge(epoch):
                findings.add(where, problem)
        # A store without writers has epochs that are not written yet, or never will be.
        if epochs.domain < DOMAIN_MAX and (left := audit.left_over(epochs.domain)):
            findings.add("change index", f"{left} changesets are in no epoch")


def _check_order(findings: Findings, epochs: EpochsAt, meta: Meta, *, upto: int) -> None:
    """Runs are numbered without a gap, epochs join, and times do not fall."""
    numbers = [number for number, _ in meta.numbered(PREFIX) if number < epochs.run]
    expected = numbers[0] if numbers else 0
    for number in [*numbers, epochs.run]:
        if number != expected:
            findings.add(f"meta record {PREFIX}{expected:016x}", "the run of epochs is missing")
        expected = number + 1
    last: Epoch | None = None
    for epoch in _all(epochs, meta):
        name = f"epoch [{epoch.begin}, {epoch.end}) of domain {epoch.domain:016x}"
        if last is not None:
            gap = gap_before(epoch, domain=last.domain, edge=last.end)
            if gap is not None:
                findings.add(*gap)
            if epoch.closed_at < last.closed_at:
                findings.add(name, f"closed at {epoch.closed_at}, before the one before it")
        if epoch.begin >= epoch.end or epoch.closed_at > upto + 1:
            findings.add(name, f"ends or lies wrong, closed at {epoch.closed_at}")
        last = epoch


def _all(epochs: EpochsAt, meta: Meta) -> Iterator[Epoch]:
    written = (
        epoch
        for number, fields in meta.numbered(PREFIX)
        if number < epochs.run
        for epoch in unpack_run(fields)
    )
    return chain(written, epochs.waiting)


# --------------------------------------------------------------------------------------------------
# Checks that the records beside the data agree: frontiers, holds, imports.

Events = set[tuple[int, int, int]]
"""Operation, import id and timestamp of each import and revert in the change index."""


def check_frontiers(findings: Findings, meta: Meta, committer: Committer) -> None:
    """`collected <= since < upper`, `durable <= upper`, and the stored values equal the values in
    use."""
    with findings.reading():
        for _ in meta.records(""):
            pass
    with findings.reading():
        collections(meta)
    add = findings.add
    with committer.lock:  # under it the stored values move together with the values in use
        since, upper, durable = committer.since, committer.upper, committer.durable
        stored = {SINCE: since, UPPER: upper, COLLECTED: 0}
        for name in stored:
            with findings.reading():
                stored[name] = meta.timestamp(name)
    if stored[SINCE] != since:
        add("since", f"is {since}, but {stored[SINCE]} is stored")
    if since >= upper:
        add("since", f"{since} is not below upper {upper}")
    if stored[UPPER] > upper:
        add("upper", f"is {upper}, below a stored entry")
    if stored[COLLECTED] > since:
        add("since", f"{since} is below what GC has collected")
    if durable > upper:
        add("durable", f"{durable} is above upper {upper}")


def check_expiries(findings: Findings, committer: Committer) -> None:
    """No key is due before the time that the schedule of expiries waits for."""
    if committer.policy.commits is not None:
        return
    with findings.reading(), committer.lock:
        missed = committer.expiries.missed()
        if missed is not None:
            where, due = f"expiry of key {printable(missed.key)}", Timestamp(missed.due.time)
            findings.add(where, f"is due at {due}, and the schedule waits for a later time")


def check_hold(findings: Findings, hold: HoldRecord, since: int) -> None:
    """Each valid hold lies at or above `since`."""
    if not hold.lost and hold.timestamp < since:
        findings.add(f"hold {hold.name!r}", f"at {hold.timestamp}, below since {since}")


def check_import(
    findings: Findings, record: ImportRecord, events: Events | None, *, floor: int, upto: int
) -> None:
    """Times of an import are in order, and in the change index where it is complete (`events`)."""
    where, add = f"import {record.import_id:016x}", findings.add
    added, reverted = record.added, record.reverted
    if reverted is not None and (added is None or added >= reverted):
        add(where, f"added at {added}, reverted at {reverted}")
    for op, at in ((OP_IMPORT, added), (OP_REVERT, reverted)):
        if at is None:
            continue
        if at > upto:
            add(where, f"dated {at}, with upper at {upto + 1}")
        elif at > floor and events is not None and (op, record.import_id, at) not in events:
            add(where, f"its event at {at} is not in the change index")


def check_rows(findings: Findings, record: ImportRecord, rows: int, *, is_whole: bool) -> None:
    """As many rows are there as were added. GC and clears may have removed some."""
    if rows > record.rows or (is_whole and rows != record.rows):
        findings.add(f"import {record.import_id:016x}", f"{rows} rows, {record.rows} were added")


def check_key_lists(findings: Findings, meta: Meta, imports: Imports, committer: Committer) -> None:
    """Each key list is of an import in the records, and has a key in its spans for each row. Past
    imports can be read. Imports come and go meanwhile."""
    with findings.reading():
        for import_id, stored in meta.numbered(KEYS_PREFIX):
            where = f"import {import_id:016x}"
            keys = read_keys(stored)
            with committer.lock:  # under it the stored list moves together with the record
                is_there = meta.read(keys_name(import_id)) is not None
                record = imports.get(import_id)
            if not is_there:
                continue
            if record is None:
                findings.add(where, "has a key list and no record")
            elif len(keys) != record.rows:
                findings.add(where, f"{len(keys)} keys are listed, {record.rows} rows were added")
            elif not all(any(key in span for span in record.spans) for key in keys):
                findings.add(where, "a listed key lies outside its spans")
    with findings.reading():
        for _ in PastImports(meta).all():
            pass


def check_stamps(
    findings: Findings, records: Mapping[bytes, ImportRecord], stamps: Stamps, events: Events
) -> None:
    """The lifetimes in use agree with the records, and each event has a record."""
    expected = {
        reference: record.lifetime
        for reference, record in records.items()
        if record.added is not None
    }
    if dict(stamps) != expected:
        findings.add("imports", "the stamps in use differ from the records")
    for op, import_id, timestamp in sorted(events):
        record = records.get(encode_reference(import_id))
        dated = record and (record.added if op == OP_IMPORT else record.reverted)
        if dated != timestamp:
            findings.add(f"import {import_id:016x}", f"the change index dates it {timestamp}")


# --------------------------------------------------------------------------------------------------
# Verifies that each row of each table can be read: as Arrow, as Python, and by its columns.
#
# A damaged or forged row may hold texts that are no UTF-8, and times that Python does not have
# (`kvstore.tables.exact`). Such a row is named here with its key as `Table.delete` takes it. It can
# be deleted and put anew. Versions that were replaced are not looked at.


def unreadable_rows(parts: Parts, at: int) -> Iterator[Problem]:
    """The live rows of tables that cannot be read as of `at`, each with what to do. Costs a pass
    over the rows of all tables. Raises `CorruptionError` for a definition that is damaged."""
    catalogue = Catalogue(StoreDefinitions(parts))
    for name in catalogue.names():
        yield from _of_table(parts, catalogue.codec(name, at), at)


def check_tables(findings: Findings, parts: Parts, at: int) -> None:
    """Note each row of a table that cannot be read."""
    with findings.reading():
        for problem in unreadable_rows(parts, at):
            findings.add(*problem)


def _of_table(parts: Parts, codec: TableCodec, at: int) -> Iterator[Problem]:
    for keys, values in parts.versions.scan(Span.of_prefix(codec.key.prefix), at):
        for row, why in codec.faults(binary_array(keys), binary_array(values)):
            where = f"{codec.definition.where}, row {codec.key.named(keys[row])}"
            yield Problem(where, f"{why}; delete the row, or put it anew")


# --------------------------------------------------------------------------------------------------
# Walks a whole store in bounded memory, and lists everything that breaks an invariant.
#
# data      keys are well formed and ascend; times lie below upper, or in the window a replica is
#               taking; tombstones are empty; rows of imports have a record and lie in its spans
#     index     each commit has all its chunks, each row stands in its stream and has its version,
#               with the same value, and each version above the floor has its row
#     ranges    the map in memory agrees with the stored ones, and with the index above the floor
#     epochs    they join, runs and times are in order, and each counts the events that are there
#     expiries  none is due before the time that the schedule waits for
#     records   frontiers, holds, clears and imports agree with each other and with the rows
#     tables    each live row can be read by the columns of its table
#
# The comparison of index and versions takes no memory. Each row of the index is looked up in
# `data`. In the other direction both sides are counted and summed as hashes of (key, time). Only if
# these differ, a second pass looks up each version in the index, to name the missing ones.
#
# Commits continue meanwhile, because their versions are newer than the verified ones. GC and clears
# wait. A live reader does not follow its writer meanwhile, whose GC does not wait.

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
        self._staged = 0
        self._floor: int = committer.since
        with self.findings.reading():
            self._floor = max(self._floor, self._meta.timestamp(INDEX_FLOOR))
            self._staged = self._meta.timestamp(STAGED)
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
        if self.upto < timestamp and (timestamp <= self._coming or timestamp == self._staged):
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
