"""Upkeep of one store: garbage collection in the background, and the rewriting of files.

The durable forms of the same work, as tasks, are in `kvstore.upkeep`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvstore.arguments import require_span
from kvstore.background import Failures
from kvstore.clock import WallClock
from kvstore.codec.keys import span_bounds
from kvstore.commit import Committer
from kvstore.engine import CHANGES, DATA, RANGES, Engine
from kvstore.errors import ClosedError, KVStoreError, UsageError
from kvstore.gc import Collector, GcPolicy, GcReport, GcWorker
from kvstore.limits import STALE_IMPORT_S
from kvstore.span import Span


class Upkeep:
    """Keeps one store small."""

    def __init__(
        self, engine: Engine, committer: Committer, collector: Collector, clock: WallClock
    ) -> None:
        self._engine = engine
        self._committer = committer
        self._collector = collector
        self._failures = Failures("kvstore.gc", clock)
        self._worker: GcWorker | None = None

    def start_gc(
        self, policy: GcPolicy, *, after_run: Callable[[GcReport], None] | None = None
    ) -> GcWorker:
        """Collect in the background until the store is closed, or a new policy replaces this.

        A run that fails, or `after_run` that raises, is logged (`kvstore.gc`) and shown by
        `Store.stats`; the worker continues.
        """
        self._collector.require_running()
        if not isinstance(policy, GcPolicy):
            raise UsageError(f"gc={policy!r}", "pass a GcPolicy")
        self.stop_gc()
        self._worker = GcWorker(policy, self._run, failures=self._failures, after_run=after_run)
        return self._worker

    def stop_gc(self) -> None:
        """End the collection in the background, and wait for a run that is under way."""
        if self._worker is not None:
            self._worker.stop()

    def compact(self, span: Span | None = None) -> None:
        """Rewrite the files of a span's versions (default: all versions). That frees the disk space
        of versions that GC and clears removed. Costs a read and a write of these files; reads and
        commits continue meanwhile."""
        self._committer.require_writable()
        span = require_span(span)
        self._engine.compact(DATA, *span_bounds(span.start, span.end))

    def compact_index(self) -> None:
        """Rewrite the files of the change index and of range tombstones, as `compact`."""
        self._committer.require_writable()
        self._engine.compact(RANGES)
        self._engine.compact(CHANGES)

    def merge_files(self) -> None:
        """Merge one group of small files, if many lie together. Each opening, checkpoint and
        parallel scan ends with this call, because it flushes the memtables."""
        self._aside("merging small files", lambda: next(self._engine.merges(), None))

    def remove_leftovers(self) -> None:
        """Remove the files that imports left a day ago or earlier, when their process was killed.
        Each opening ends with this call, because a store may have no other upkeep."""
        leftovers = self._collector.leftovers
        self._aside("removing leftovers", lambda: leftovers.remove_files(STALE_IMPORT_S))

    def _aside(self, what: str, work: Callable[[], object]) -> None:
        """Do `work` after a call has done its own. A failure of `work` is noted, and the call
        succeeds."""
        try:
            work()
        except ClosedError:
            pass  # another thread closed the store meanwhile
        except KVStoreError as error:
            self._failures.note(what, error, delays=False)

    def watch(self, work: str, failures: Failures) -> None:
        """Have the metrics count the failures of `work` that another package does in the
        background."""
        self._committer.meters.watch(work, failures)

    def figures(self) -> dict[str, Any]:
        """The figures of `Store.stats` on garbage collection in the background."""
        runs = 0 if self._worker is None else self._worker.runs
        return {"gc_runs": runs, **self._failures.figures("gc")}

    def _run(self, policy: GcPolicy) -> GcReport:
        return self._collector.collect(keep=policy.keep, compact=policy.compact)
