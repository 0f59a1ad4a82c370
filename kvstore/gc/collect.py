"""A run of garbage collection: it gives up history below a time and removes the unreadable records.

The steps of a run, in their order:

    since       write the new frontier durably: no reader asks for times below it any more
    versions    remove the garbage of each key that changed since the last run, oldest first; a
                value that a revert brought back gets the time of the revert
    ranges      remove the range tombstones at or below `since`: no version is left under them
    index       remove the change entries at or below `since`, and record that the run is done
    imports     turn imports that have neither rows nor change entries into past imports
    tidied      delete index entries of tables that old imports left behind
    settled     let small imports become plain versions (`kvstore.gc.settle`)
    files       merge small files where many lie together

A run finds its work in the change index. A version becomes garbage only when something newer is
written, so a run looks at the keys changed in `(last run, since]`, and passes over the spans of
range tombstones and of large imports of that window. A run costs what changed.

Invariants
1. Batches survive a crash in the order of the steps, so a crash leaves only records that nobody can
   read. If range tombstones went before versions, a crash would bring deleted keys back.
2. `collected` is the time up to which the steps to `index` are done. After a crash the next run
   starts there. The later steps look for their work in each run.
3. One run works at a time. Commits continue meanwhile: garbage at `since` stays garbage.

Source: the order of persistence is CockroachDB's (its MVCC GC queue).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path

from kvstore.changes.entry import OP_DELETE_RANGE, OP_IMPORT, OP_REVERT
from kvstore.claims import HoldRecord
from kvstore.codec.keys import SUFFIX_BYTES, decode_suffix, span_bounds
from kvstore.collected import CollectionRun, stage_collection
from kvstore.counts import WorkCount
from kvstore.engine.api import CHANGES, DATA, RANGES, WriteBatch, pairs
from kvstore.errors import ClosedError, UsageError
from kvstore.gc.leftovers import Leftovers
from kvstore.gc.removing import Removing
from kvstore.gc.search import Removal, garbage_in_spans, garbage_of_keys
from kvstore.gc.settle import Settling
from kvstore.limits import (
    GC_KEYS_PER_STEP,
    GC_SORTED_KEYS_BYTES_MAX,
    GC_SORTED_KEYS_MAX,
    GC_SPANS_PER_STEP,
    STALE_IMPORT_S,
)
from kvstore.meta import COLLECTED, INDEX_FLOOR, Meta, nothing
from kvstore.notices import notice
from kvstore.parts import Parts
from kvstore.span import Span, merge_spans
from kvstore.timestamp import NS_PER_SECOND, Timestamp


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
                self._committer.persist()
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
            "kvstore.gc",
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
