"""When a journal calls fsync: the choice between a slow append and a lost one.

An appended record survives the process in any case, because the operating system has it. The
policy decides whether it survives a crash of the machine.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from kvstore.errors import KVStoreError, UsageError


@dataclass(frozen=True, slots=True)
class Sync:
    """At most `records_max` records are unsynced, or for at most `seconds_max`; 0 is no bound.

    Use the four constructors. Every policy syncs when a file is rotated and when the journal is
    closed.
    """

    records_max: int
    seconds_max: float

    def __post_init__(self) -> None:
        if self.records_max < 0 or self.seconds_max < 0:
            raise UsageError(f"{self} has a negative bound", "pass 0 or more")

    @classmethod
    def always(cls) -> Sync:
        """Sync before an append returns. Appends that wait together share one fsync."""
        return cls(1, 0)

    @classmethod
    def every(cls, records: int) -> Sync:
        """Sync in the append that makes the number of unsynced records `records`."""
        return cls(records, 0)

    @classmethod
    def interval(cls, seconds: float) -> Sync:
        """Sync at most `seconds` after an append, in a thread of the journal's own."""
        return cls(0, seconds)

    @classmethod
    def never(cls) -> Sync:
        """Leave syncing to the operating system."""
        return cls(0, 0)


class IntervalSync:
    """A thread that syncs `seconds` after it was notified, and sleeps while nothing is written."""

    def __init__(self, seconds: float, sync: Callable[[], object], *, name: str) -> None:
        self._seconds = seconds
        self._sync = sync
        self._written = threading.Event()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def notify(self) -> None:
        """Tell the thread that a record was written."""
        self._written.set()

    def stop(self) -> None:
        """End the thread without a sync."""
        self._stopped.set()
        self._written.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            self._written.wait()
            if self._stopped.wait(self._seconds):
                return
            self._written.clear()
            try:
                self._sync()
            except KVStoreError:
                return  # the journal is poisoned now: its next call raises
