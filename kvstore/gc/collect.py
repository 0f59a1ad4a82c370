"""Giving up history below a time, and taking back what then nobody can read.

    since       the new frontier, durably; from here on nobody asks for what lies below
    versions    garbage of each key changed since the last run, oldest first
    ranges      range tombstones at or below since: nothing is left under them
    index       change entries at or below since; and that this run is done
    imports     all but the names and times of imports of which no row and no change entry is left

The work is found in the change index: a version can only become garbage where something newer
was written, so the keys changed in (last run, since] are all there is to look at; a range
tombstone or an import is looked at through a pass over its span. A run costs what changed.

Invariants
1. The order above is the order of persistence (batches survive in order), so a crash leaves junk
   that nobody can read. Range tombstones before versions would bring deleted keys back.
2. `collected` says up to where all is done; a run that was cut off is made good by the next,
   which starts from there.
3. One run at a time. Commits go on meanwhile: what is garbage at `since` stays garbage.

Source: the order of persistence is CockroachDB's (its MVCC GC queue).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvstore.changes.entry import OP_DELETE_RANGE, OP_IMPORT, OP_REVERT
from kvstore.claims import HoldRecord
from kvstore.codec.keys import SUFFIX_BYTES, decode_suffix
from kvstore.engine.api import CHANGES, DATA, RANGES, WriteBatch, pairs
from kvstore.errors import ClosedError, UsageError
from kvstore.gc.leftovers import Leftovers
from kvstore.gc.search import garbage_in_span, garbage_of_keys
from kvstore.limits import GC_KEYS_PER_STEP, GC_SPANS_PER_STEP, STALE_IMPORT_S
from kvstore.meta import COLLECTED, INDEX_FLOOR, Meta
from kvstore.parts import Parts
from kvstore.span import Span, merge_spans
from kvstore.timestamp import NS_PER_SECOND, Timestamp


@dataclass(frozen=True, slots=True)
class GcReport:
    """What one run did. Counts are entries removed."""

    since: Timestamp
    """History is kept from here on."""
    previous: Timestamp
    """Where it was kept from before the run."""
    versions: int
    range_tombstones: int
    change_entries: int
    imports: int
    """Records of imports forgotten, and stale ones taken back."""
    lost_holds: tuple[HoldRecord, ...]
    """Holds over their budget, invalidated by this run."""
    held_back: bool
    """Whether a hold or an open reader kept more history than was asked for."""
    seconds: float
    held_by: tuple[HoldRecord, ...] = ()
    """The claims that kept it, oldest first: holds, and the oldest pin of each kind."""


def _tell_nobody(versions: int) -> None:
    pass


@dataclass(slots=True)
class _Tally:
    versions: int = 0
    ranges: int = 0
    entries: int = 0
    imports: int = 0
    first: bytes = b""
    last: bytes = b""
    """Between these lie the entries that were removed."""
    tell: Callable[[int], None] = _tell_nobody
    """Told how many versions were removed so far."""


class Collector:
    """Collects one store. `at_step` is called with a name between steps (tests crash there)."""

    def __init__(self, parts: Parts, path: Path | None) -> None:
        self._versions, self._index, self._committer = parts.versions, parts.index, parts.committer
        self._holds, self._imports, self._clears = parts.holds, parts.imports, parts.clears
        self._engine = parts.versions.engine
        self._path = path
        self._meta = Meta(self._engine)
        self._running = threading.Lock()
        self._runner: int | None = None
        self._stopped = False
        self._leftovers = Leftovers(parts.imports, parts.committer, path)
        self.keys_per_step = GC_KEYS_PER_STEP
        self.at_step: Callable[[str], None] = lambda name: None

    def run(
        self,
        target: int,
        *,
        compact: bool = False,
        stale_s: float | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> GcReport:
        """Move `since` to `target`, or as far as holds allow, and remove what lies below.

        Costs what changed since the last run; with `compact` also a rewrite of the spans it
        touched, which gives the space back at once. Waits for a run that is under way. `progress`
        is called with the versions removed so far, after some thousands each.
        """
        started = time.perf_counter()
        with self._alone():
            self._committer.require_writable()
            previous = self._committer.since
            lost, held_by = self._advance(target)
            since = self._committer.since
            if since > previous:
                self._committer.persist()
            tally = _Tally(tell=progress or _tell_nobody)
            collected = self._meta.timestamp(COLLECTED)
            if collected < since:
                self.at_step("since")
                self._remove_versions(collected, since, tally)
                self._remove_ranges(since, tally)
                self._trim(since)
                tally.imports += self._leftovers.forget_history(since)
                self.at_step("imports")
            self._require_running()
            age_s = STALE_IMPORT_S if stale_s is None else stale_s
            tally.imports += self._leftovers.abort_stale(age_s)
            self._leftovers.remove_files(age_s)
            if compact:
                self._compact(tally)
        return GcReport(
            since=since,
            previous=previous,
            versions=tally.versions,
            range_tombstones=tally.ranges,
            change_entries=tally.entries,
            imports=tally.imports,
            lost_holds=lost,
            held_back=bool(held_by),
            seconds=time.perf_counter() - started,
            held_by=held_by,
        )

    def target(self, *, before: int | None, keep_s: float | None) -> int:
        """The time that `before`, or an age, asks for."""
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
        """Keep runs from starting, having waited for one that is under way."""
        with self._alone():
            self._require_running()
            yield

    def stop(self) -> None:
        """Have a run that is under way end at its next step (with `ClosedError`); wait for it."""
        self._stopped = True
        with self._running:
            pass

    def require_outside(self) -> None:
        """Raises `UsageError` in the `progress` of a run, for what would wait for the run's end."""
        if self._runner == threading.get_ident():
            raise UsageError(
                "the progress of gc or verify would wait for its own end",
                "raise an error there to call it off, and go on once it has returned",
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

    def _advance(self, target: int) -> tuple[tuple[HoldRecord, ...], tuple[HoldRecord, ...]]:
        """Move `since`; returns the holds that were lost, and the claims in the way."""
        committer = self._committer
        with committer.lock:
            self._require_running()
            newest = committer.close_upto_now() - 1
            lost = tuple(self._holds.invalidate_overdue(newest))
            held_by = self._holds.needing(target)
            allowed = min([newest, *(claim.timestamp for claim in held_by)])
            if min(target, allowed) > committer.since:
                committer.move_since(min(target, allowed))
            return lost, held_by

    # -- versions ---------------------------------------------------------------------------

    def _remove_versions(self, collected: int, since: int, tally: _Tally) -> None:
        if collected < self._meta.timestamp(INDEX_FLOOR):
            # The index of a restored store begins at the time it was restored at.
            self._sweep([Span()], since, tally)
            return
        keys: set[bytes] = set()
        spans: list[Span] = []
        for found in self._changed(collected, since, tally):
            if isinstance(found, Span):
                spans.append(found)
            else:
                keys.add(found)
            if len(keys) >= self.keys_per_step:
                self._look_up(keys, since, tally)
                keys.clear()
            if len(spans) >= GC_SPANS_PER_STEP:
                self._sweep(spans, since, tally)
                spans.clear()
        self._look_up(keys, since, tally)
        self._sweep(spans, since, tally)

    def _changed(self, collected: int, since: int, tally: _Tally) -> Iterator[bytes | Span]:
        """Keys and spans that changed in `(collected, since]`."""
        for commit in self._index.read(since=collected, upto=since):
            tally.entries += 1
            for row in commit.entry.rows():
                if row.op == OP_DELETE_RANGE:
                    yield Span(row.key, row.value)
                elif row.op in (OP_IMPORT, OP_REVERT):
                    yield from self._imports.spans_of(row.key)[1]
                else:
                    yield row.key

    def _look_up(self, keys: Iterable[bytes], since: int, tally: _Tally) -> None:
        """Remove the garbage of keys. One look-up each, in key order."""
        found = garbage_of_keys(self._versions, sorted(keys), since, entries_max=self.keys_per_step)
        self._remove(found, tally)

    def _sweep(self, spans: list[Span], since: int, tally: _Tally) -> None:
        """Remove the garbage of whole spans. One pass over each."""
        for span in merge_spans(spans):
            self._remove(garbage_in_span(self._versions, span, since), tally)

    def _remove(self, doomed: Iterable[bytes], tally: _Tally) -> None:
        waiting: list[bytes] = []
        for key in doomed:
            waiting.append(key)
            if len(waiting) >= self.keys_per_step:
                self._delete(waiting, tally)
                waiting = []
        if waiting:
            self._delete(waiting, tally)

    def _delete(self, entries: list[bytes], tally: _Tally) -> None:
        def stage(batch: WriteBatch) -> None:
            data = self._engine.families[DATA]
            for entry in entries:
                batch.delete(entry, data)

        self._require_running()
        self._committer.write_meta(stage, durable=False)
        tally.versions += len(entries)
        low, high = min(entries), max(entries)
        tally.first = min(tally.first or low, low)
        tally.last = max(tally.last, high)
        tally.tell(tally.versions)
        self.at_step("versions")

    # -- range tombstones -------------------------------------------------------------------

    def _remove_ranges(self, since: int, tally: _Tally) -> None:
        """Remove the range tombstones at or below `since`. One pass over all that are stored."""
        committer, versions = self._committer, self._versions
        with committer.lock:
            self._require_running()
            if not versions.view.fragments.tombstones(Span(), since=0, upto=since):
                return
            doomed = [
                key
                for key, _ in pairs(self._engine.cursor(RANGES))
                if decode_suffix(key[-SUFFIX_BYTES:]) <= since
            ]

            def stage(batch: WriteBatch) -> None:
                for key in doomed:
                    batch.delete(key, self._engine.families[RANGES])

            committer.write_meta(stage, durable=False)
            versions.publish_fragments(versions.view.fragments.forgetting(since))
        tally.ranges += len(doomed)
        self.at_step("ranges")

    # -- index and clears -------------------------------------------------------------------

    def _trim(self, since: int) -> None:
        def stage(batch: WriteBatch) -> None:
            self._index.stage_trim(since, batch)
            self._clears.stage_forget(since, batch)
            self._meta.stage_timestamp(batch, COLLECTED, since)

        with self._committer.lock:
            self._require_running()
            self._committer.write_meta(stage, durable=False)
            self._clears.forget(since)
        self.at_step("index")

    # -- space ------------------------------------------------------------------------------

    def _compact(self, tally: _Tally) -> None:
        """Rewrite what was touched, so that the files shrink now and not some day."""
        if tally.versions:
            self._engine.compact(DATA, tally.first, tally.last + b"\x00")
        if tally.ranges:
            self._engine.compact(RANGES)
        if tally.entries:
            self._engine.compact(CHANGES)

    def _require_running(self) -> None:
        if self._stopped:
            raise ClosedError(f"the store at {self._path}")
