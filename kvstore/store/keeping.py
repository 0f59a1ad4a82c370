"""Upkeep: holds, garbage, clears, reverts, verification, copies."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

from kvstore.arguments import require_age, require_path, require_span
from kvstore.claims import USER, HoldRecord
from kvstore.codec.keys import span_bounds
from kvstore.engine import CHANGES, DATA, RANGES
from kvstore.errors import UsageError
from kvstore.gc import GcPolicy, GcReport, GcWorker
from kvstore.holds import Hold
from kvstore.journal import OS_FILES
from kvstore.journal.files import storage_errors
from kvstore.span import Span
from kvstore.store.following import Following
from kvstore.tasks import Tasks
from kvstore.timestamp import TimeLike, Timestamp, to_timestamp
from kvstore.txn import revert_range
from kvstore.verify import StoreReport, verify

TASKS_DIRECTORY: Final = "tasks"
"""In the store's directory, where the engines look at names of their own only."""


class Keeping(Following):
    """What is done to keep a store well."""

    def clear_range(self, start: bytes, end: bytes, *, compact: bool = True) -> Timestamp:
        """Destroy the history of `start <= key < end`, physically. Returns the time from which on
        the span reads as empty; earlier reads of it raise `HistoryGoneError`.

        Raises `HistoryHeldError`, with nothing done, while a hold or an open reader needs it.
        Costs O(bytes of the span), or the same whatever it holds with `compact=False`: then
        the space comes back as RocksDB compacts.
        """
        self._live().require_commits()
        return self._clearing.clear(Span(start, end), compact=compact)

    def revert_range(self, start: bytes, end: bytes | None, to: TimeLike) -> Timestamp | None:
        """Restore `start <= key < end` as it was at `to`, by new versions: history keeps both.

        Only keys whose value differs from the one at `to` get a version: equal values stay as they
        are, whatever was written or deleted between. So does a key that is absent at both times.

        One atomic commit of what differs, bounded by `REVERT_ROWS_MAX` keys; None if nothing
        does. Costs what changed in the span since `to`. Raises `HistoryGoneError` if `to` is
        below `since`, `ConflictError` if others keep writing into the span.
        """
        span, at = Span(start, end), to_timestamp(to, name="to")
        with self.snapshot(at):
            self._clears.require(span, at)
            return revert_range(
                self.transaction,
                lambda upto: self.changes(at, upto, start, end, "latest"),
                self._versions,
                span,
                at,
            )

    def hold(
        self,
        name: str,
        at: TimeLike | None = None,
        max_age: timedelta | None = None,
        *,
        durable: bool = True,
        kind: str = USER,
        address: str = "",
    ) -> Hold:
        """Keep history from `at` on until the hold is moved or released, over restarts too.

        Taking a hold that exists fences its owner. One that falls behind further than `max_age`
        is invalidated when GC wants the space; without `max_age` it keeps history for ever, also
        when what it was taken for is gone. If not `durable`, a crash before the next `sync`
        undoes it: saves an fsync where the caller syncs anyway. `kind` and `address` tell those
        who list the holds what it was taken for: neither may contain a secret.
        """
        when = None if at is None else to_timestamp(at, name="at")
        require_age(max_age, name="max_age")
        self._live()
        return self._holds.take(
            name, at=when, max_age=max_age, durable=durable, kind=kind, address=address
        )

    def holds(self) -> list[HoldRecord]:
        """All holds, by name: whose each is, since when, and when an owner last moved it."""
        return self._holds.all()

    def drop_hold(self, name: str) -> HoldRecord:
        """Remove the hold `name` whoever owns it: a remedy where its owner is gone for good.

        Returns what was removed; its `cost_of_dropping` says what the owner meets if there is one
        after all. Raises `UsageError` if there is no such hold.
        """
        self._live().require_writable()
        dropped = self._holds.drop(name) if isinstance(name, str) else None
        if dropped is None:
            raise UsageError(f"no hold {name!r}", "see store.holds() for those there are")
        return dropped

    def gc(
        self,
        before: TimeLike | None = None,
        keep: timedelta | None = None,
        *,
        compact: bool = False,
        progress: Callable[[int], None] | None = None,
    ) -> GcReport:
        """Give up history below `before` (or older than `keep`), and remove what it held.

        Goes as far as holds and open readers allow; holds over their budget are invalidated.
        Costs what changed since the last run. The files shrink as RocksDB compacts them, or at
        once with `compact`, which rewrites what was touched. `progress` is called with the
        versions removed so far; what it raises ends the run, which the next makes good.
        """
        self._live()
        when = None if before is None else to_timestamp(before, name="before")
        require_age(keep, name="keep")
        age = None if keep is None else keep.total_seconds()
        target = self._collector.target(before=when, keep_s=age)
        return self._collector.run(target, compact=compact, progress=progress)

    def start_gc(
        self, policy: GcPolicy, *, after_run: Callable[[GcReport], None] | None = None
    ) -> GcWorker:
        """Collect in the background until the store is closed, or a new policy replaces this.

        A run that fails, or `after_run` that raises, is logged (`kvstore.gc`) and shown by `stats`;
        the worker goes on.
        """
        self._live()
        if not isinstance(policy, GcPolicy):
            raise UsageError(f"gc={policy!r}", "pass a GcPolicy")
        if self._gc_worker is not None:
            self._gc_worker.stop()
        self._gc_worker = GcWorker(
            policy,
            lambda p: self.gc(keep=p.keep, compact=p.compact),
            failures=self._gc_failures,
            after_run=after_run,
        )
        return self._gc_worker

    def compact(self, span: Span | None = None) -> None:
        """Rewrite the files of a span's versions (default: of all), so that what GC and clears
        removed leaves the disk. Costs reading and writing them; everything else goes on."""
        self._live().require_writable()
        span = require_span(span)
        self._engine.compact(DATA, *span_bounds(span.start, span.end))

    def compact_index(self) -> None:
        """Rewrite the files of the change index and of range tombstones, as `compact`."""
        self._live().require_writable()
        self._engine.compact(RANGES)
        self._engine.compact(CHANGES)

    @property
    def tasks(self) -> Tasks:
        """The queue of work on this store, which survives the process; opened when first asked for.

        It lies in the store's directory and goes where that goes; a checkpoint has none of it.
        `kvstore.upkeep`, `bulk.tasks` and `backup.tasks` submit to it, and do what was submitted.
        Raises what `Tasks.open` raises: the store itself does not depend on it.
        """
        with self._tasks_lock:
            self._live().require_writable()
            if self._tasks is None:
                path = None if self.path is None else self.path / TASKS_DIRECTORY
                self._tasks = Tasks.open(path, clock=self._clock, failures=self._tasks_failures)
            return self._tasks

    def verify(self, *, progress: Callable[[int], None] | None = None) -> StoreReport:
        """Walk the whole store and list all that breaks an invariant. Bounded memory.

        Commits go on meanwhile, GC waits. Costs one pass over everything, and a look-up per
        change in the index. `progress` is called with the versions and changes looked at so far.
        """
        self._require_live()
        with self._collector.paused():
            return verify(self._parts, progress=progress)

    def stats(self) -> dict[str, Any]:
        """Counts and sizes, by name: frontiers, what is held in memory, estimates of the engine
        (`<family>_bytes`, `<family>_memtable_bytes`, `<family>_entries`). `held_by` describes who
        keeps history, oldest first. Background work that failed is told by `gc_failures` (how
        often), `gc_last_error` and `gc_failed_at_ns`, and the same of `tasks`. Costs microseconds;
        in a store in memory, whose sizes are counted, 0.03 us per entry."""
        committer = self._live()
        imports, holds = self.imports.all(), self._holds.all()
        now = committer.now()
        return {
            "since": int(committer.since),
            "upper": int(committer.upper),
            "durable": int(committer.durable),
            "range_fragments": len(self._versions.view.fragments),
            "imports": len(imports),
            "imports_adding": sum(record.added is None for record in imports),
            "holds": len(holds),
            "holds_lost": sum(hold.lost for hold in holds),
            "clears": len(self._clears.all()),
            "held_by": [claim.describe(now) for claim in self._holds.needing()],
            "gc_runs": 0 if self._gc_worker is None else self._gc_worker.runs,
            **self._gc_failures.figures("gc"),
            **self._tasks_failures.figures("tasks"),
            **self._engine.stats(),
        }

    def checkpoint(self, path: str | Path) -> Timestamp:
        """Make `path` (which must not exist) an independent, durable copy as of now, sharing files.

        Milliseconds at any size, on the same file system. Returns the newest complete time in it.
        """
        target = require_path(path)
        if target.exists():
            raise UsageError(f"{target} exists", "checkpoint into a path that does not")
        committer = self._live()
        with committer.lock:
            upper = committer.sync()
            self._engine.checkpoint(target)
        with storage_errors(str(target)):
            OS_FILES.sync_directory(str(target.absolute().parent))
        return Timestamp(upper - 1)
