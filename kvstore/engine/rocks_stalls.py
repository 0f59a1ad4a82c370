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
from collections.abc import Callable
from contextlib import suppress
from typing import Final

import rocksdict as rocks

from kvstore.limits import STALL_PAUSE_S, STALL_PAUSE_S_MAX

_STOPPED: Final = "rocksdb.is-write-stopped"
SIGNS: Final = (
    "rocksdb.num-immutable-mem-table",  # a full memtable waits for its flush
    "rocksdb.actual-delayed-write-rate",  # of all families
    _STOPPED,  # of all families
)
"""Properties of families. One is above 0 where a write may meet a stop."""


class Stalls:
    """The stops of one database, as its writer meets them."""

    def __init__(self, family: Callable[[], rocks.Rdict]) -> None:
        """`family` gives a family of the database, and raises where that is closed."""
        self._family = family
        self._probe = rocks.WriteOptions()
        self._probe.no_slowdown = True
        self._probe.disable_wal = True  # type: ignore[method-assign,assignment]

    def wait(self) -> None:
        """Return once RocksDB takes writes, or fails them. Costs 3 us where it takes them."""
        pause = STALL_PAUSE_S
        while self._has_come():
            time.sleep(pause)
            pause = min(2 * pause, STALL_PAUSE_S_MAX)

    def _has_come(self) -> bool:
        """Whether a write would wait until a stop ends. A write that RocksDB only slows down does
        not: it waits for milliseconds."""
        with suppress(Exception):  # the write tells any failure
            family = self._family()
            return self._is_refused(family) and bool(family.property_int_value(_STOPPED))
        return False

    def _is_refused(self, family: rocks.Rdict) -> bool:
        try:
            family.write(rocks.WriteBatch(raw_mode=True), self._probe)
        except Exception as error:
            if "Write stall" in str(error):
                return True
            raise
        return False
