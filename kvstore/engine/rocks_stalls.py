"""Waiting for RocksDB outside RocksDB while it takes no writes.

RocksDB stops writes while full memtables wait for a flush, or too many files for a compaction. A
write of rocksdict that meets a stop keeps Python's interpreter lock until the stop ends, so all
threads of the process stand still: readers, servers, heartbeats. So a writer that may meet one asks
first, by an empty write that RocksDB refuses at once, and waits without the lock.

Invariants
1. A stop for memtables begins with the write behind the one that filled a memtable or the log,
   while an older memtable waits for its flush. The empty write comes between the two, because
   filling takes longer than the time between two looks.
2. RocksDB slows writes down before files stop them, so no such stop comes unseen.
3. An empty write changes nothing: it has no sequence number and no record in the log.

Source: `DelayWrite` and `RecalculateWriteStallConditions` of RocksDB.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress

import rocksdict as rocks

from kvstore.engine.api import DATA
from kvstore.engine.rocks_figures import is_flush_due, is_slowed, is_stopped
from kvstore.limits import STALL_LOOK_S, STALL_PAUSE_S, STALL_PAUSE_S_MAX


class Stalls:
    """The stops of one database, as its writer sees them."""

    def __init__(self, families: Callable[[], Mapping[str, rocks.Rdict]]) -> None:
        """`families` gives the open families."""
        self._families = families
        self._look_at = 0.0
        self._is_near = False
        self._probe = rocks.WriteOptions()
        self._probe.no_slowdown = True
        self._probe.disable_wal = True  # type: ignore[method-assign,assignment]

    def wait(self) -> None:
        """Return once RocksDB takes writes, or fails them. Hot: 0.1 us where no stop is near, and
        3 us where one is."""
        now = time.monotonic()
        if now >= self._look_at:
            self._look_at = now + STALL_LOOK_S
            self._is_near = self._may_come()
        if self._is_near:
            pause = STALL_PAUSE_S
            while self._has_come():
                time.sleep(pause)
                pause = min(2 * pause, STALL_PAUSE_S_MAX)

    def _may_come(self) -> bool:
        with suppress(Exception):  # the database was closed meanwhile: the write tells that
            families = [*self._families().values()]
            return any(map(is_slowed, families[:1])) or any(map(is_flush_due, families))
        return False

    def _has_come(self) -> bool:
        """Whether a write would wait until a stop ends. A write that RocksDB only slows down does
        not: it waits for milliseconds."""
        with suppress(Exception):  # the write tells any failure
            family = self._families()[DATA]
            return self._is_refused(family) and is_stopped(family)
        return False

    def _is_refused(self, family: rocks.Rdict) -> bool:
        try:
            family.write(rocks.WriteBatch(raw_mode=True), self._probe)
        except Exception as error:
            if "Write stall" in str(error):
                return True
            raise
        return False
