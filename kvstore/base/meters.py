"""Counters of one open store, and counts of work that is under way.

The parts that do the work raise the counters; `kvstore.metrics` gives them their names.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Final, Protocol, TypeAlias, TypeVar

from typing_extensions import Self

from kvstore.base.background import Failures
from kvstore.base.clock import Durations
from kvstore.base.notices import Burst
from kvstore.limits import CONFLICTS_WARNED, FSYNC_WARNED_S

# --------------------------------------------------------------------------------------------------
# Counters of one open store. The parts that do the work raise them; `kvstore.metrics` names them.
#
# Invariants
# 1. A counter never falls, and begins at 0 when the store is opened.
# 2. Raising a counter takes no lock of its own. Commits, imports, conflicts and clears are counted
#    under the commit lock, collections by the one run under way. Two threads seldom sync at once
#    (see `kvstore.timeline.durability`), and may then count as one fsync. So do two servers of one
#    store that answer at once. Failures in the background are rare, and are counted under a lock.

FSYNC_BOUNDS_S: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0)
"""The upper bounds of the buckets of `fsyncs`, in seconds: from a fast SSD to a failing disk."""


class Meters:
    """The counters of one open store."""

    __slots__ = (
        "changes",
        "clears",
        "collected_entries",
        "collections",
        "commits",
        "conflict_burst",
        "conflicts",
        "fsyncs",
        "imports_added",
        "imports_reverted",
        "pushes_pending",
        "requests",
        "requests_failed",
        "slow_fsyncs",
        "watched",
        "watching",
        "where",
    )

    def __init__(self, where: str) -> None:
        """`where` names the store in the log."""
        self.where = where
        self.commits = 0
        self.changes = 0
        self.conflicts = 0
        self.conflict_burst = Burst("kvstore.store", "many conflicts", CONFLICTS_WARNED)
        self.slow_fsyncs = Burst("kvstore.store", f"fsync longer than {FSYNC_WARNED_S:g} s", 1)
        self.imports_added = 0
        self.imports_reverted = 0
        self.clears = 0
        self.collected_entries = 0
        self.collections = Durations((0.01, 0.1, 1.0, 10.0, 60.0, 600.0, 3600.0))
        self.fsyncs = Durations(FSYNC_BOUNDS_S)
        self.requests = 0
        self.requests_failed = 0
        self.pushes_pending: dict[str, int] = {}
        """The events of a log of pushes that were seen and not taken, by the address of the log."""
        self.watching = threading.Lock()
        self.watched: dict[str, int] = {}
        """How often work that others do in the background has failed, by the name of the work."""

    def watch(self, work: str, failures: Failures) -> None:
        """Count the failures of `work`, which another part does in the background. No reference to
        `failures` is kept: its last error may hold the memory of the work."""
        with self.watching:
            self.watched.setdefault(work, 0)
        failures.on_note = partial(self._count_failure, work)

    def _count_failure(self, work: str) -> None:
        with self.watching:
            self.watched[work] += 1

    def warn_of_fsync(self, seconds: float) -> None:
        """Warn of a fsync that took long."""
        self.slow_fsyncs.count(store=self.where, took_s=round(seconds, 3))

    def note_conflict(self) -> None:
        """Count a conflict, and warn of many."""
        self.conflicts += 1
        self.conflict_burst.count(store=self.where)


# --------------------------------------------------------------------------------------------------
# Counts of work that is under way, which know how much there is to do.


class WorkCount(int):
    """The work that is done, and the `total`, None where it is unknown. With `is_about` the total
    is an estimate, which the count may pass."""

    total: int | None = None
    is_about: bool = False

    @classmethod
    def of(cls, done: int, total: int | None, *, is_about: bool = False) -> Self:
        """A count with its total."""
        made = cls(done)
        made.total, made.is_about = total, is_about
        return made

    @classmethod
    def at(cls, done: int, share: float) -> Self:
        """A count whose total is estimated from the `share` of the work that is done."""
        return cls.of(done, round(done / share) if share > 0 else None, is_about=True)


OnProgress: TypeAlias = "Callable[[int], None]"
"""Called with the number of rows done so far; an exception from it calls the work off."""


class _Batch(Protocol):
    """A batch of rows, as Arrow has it."""

    @property
    def num_rows(self) -> int: ...


_B = TypeVar("_B", bound=_Batch)


class Tally:
    """Counts the rows of long work, over all its passes, and calls `progress`, if there is one,
    with a `WorkCount`."""

    def __init__(
        self,
        progress: OnProgress | None = None,
        total: int | None = None,
        *,
        is_about: bool = False,
    ) -> None:
        self._progress = progress
        self._total, self._is_about = total, is_about
        self.rows = 0

    def add(self, rows: int) -> None:
        """Count more rows as done."""
        self.rows += rows
        if self._progress is not None:
            self._progress(WorkCount.of(self.rows, self._total, is_about=self._is_about))

    def over(self, batches: Iterator[_B]) -> Iterator[_B]:
        """Yield `batches`; a batch counts as done when the next one is asked for.

        `progress` is also called before the first.
        """
        self.add(0)
        for batch in batches:
            yield batch
            self.add(batch.num_rows)
