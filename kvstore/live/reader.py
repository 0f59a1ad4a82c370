"""A live reader: a store that another process writes, read as it moves.

Invariants
1. At `upper` a live reader shows the writer's state of that time: whole commits, in their order,
   imports and range deletes included. `upper` never goes back.
2. A read at an older time gives what the writer gives, or raises `HistoryGoneError`. GC of the
   writer does not wait for readers: the writer holds what must stay readable (`Store.hold`).
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

from kvstore.arguments import require_integer, require_path, require_seconds, require_wait
from kvstore.clock import Clock
from kvstore.engine.rocks_secondary import SecondaryEngine
from kvstore.errors import UsageError
from kvstore.limits import FOLLOW_INTERVAL_S_MIN, FOLLOW_WAIT_S
from kvstore.live.pursuit import Pursuit
from kvstore.live.records import LiveRecords
from kvstore.opening import assemble, engine_at, require_format
from kvstore.store import Store
from kvstore.timestamp import Timestamp


def follow(
    path: str | os.PathLike[str], max_staleness: float = 0.05, durable_only: bool = False
) -> LiveReader:
    """A reader of the store at `path` that follows the process that writes it.

    `upper` moves by itself: a commit shows here at most about `max_staleness` seconds after it was
    written, unless the machine is overloaded. With `durable_only` a commit shows once it is
    durable, so a power cut takes back nothing that was shown. Any number of processes may follow a
    store, and none holds the writer up. Nothing is written at `path`, which may be read-only
    storage; the directory for temporary files (`TMPDIR`) takes a few links and a small log.

    Raises `NotAStoreError` where no store is, `FormatVersionError` if a newer release wrote it, and
    `UsageError` for a store in memory, whose rows are in its own process. Opening takes some 5 ms,
    and 5 ms per MB of unflushed log (`limits.LOG_BYTES_MAX`).
    """
    directory = require_path(path)
    staleness = require_seconds(max_staleness, name="max_staleness")
    if engine_at(directory) == "memory":
        raise UsageError(
            f"the store at {directory} is in memory: its own process alone can follow it",
            "open_read_only reads its journal, as of the time of opening; a store of the engine "
            "rocksdb can be followed",
        )
    engine = SecondaryEngine(directory)
    try:
        with engine.lock:
            require_format(directory, engine)
            reader = assemble(
                LiveReader, directory, engine, durability="async", clock=Clock(), read_only=True
            )
            reader.pursue(engine, staleness, durable_only=durable_only)
        return reader
    except BaseException:
        engine.close()
        raise


class LiveReader(Store):
    """A store as another process writes it: get one by `kvstore.follow`, and use it from any
    thread. Reads have the arguments and errors of `Store`. Every write raises `UsageError`.

    If the state of the writer cannot be shown, every read raises the reason: `StaleReaderError`
    while a later look may succeed, and for good if the store was replaced by another copy;
    `NotAStoreError` if it was removed. Then call `kvstore.follow` again. A snapshot keeps no
    history at the writer: its reads raise `HistoryGoneError` once the writer has given it up. A
    scan keeps its state, and the files that it reads, on disk too, until it ends.
    """

    _pursuit: Pursuit | None = None
    _interval_s = 0.0
    _looked_at = _next_due = -1

    def pursue(self, engine: SecondaryEngine, max_staleness: float, *, durable_only: bool) -> None:
        """Begin to follow the writer. `kvstore.follow` calls this once."""
        records = LiveRecords(self._parts, engine)
        self._pursuit = Pursuit(self._committer, engine, records, durable_only=durable_only)
        self._pursuit.begin()
        self._interval_s = min(max(max_staleness / 2, FOLLOW_INTERVAL_S_MIN), threading.TIMEOUT_MAX)
        self._pursuit.start(self._interval_s)

    @property
    def durable(self) -> Timestamp:
        """Every change below this time survives a crash: the writer has noted it. 0 if the writer's
        release does not note it."""
        self._require_open()
        assert self._pursuit is not None, "follow began it"
        return Timestamp(min(self._pursuit.durable(), self.upper))

    def refresh(self) -> Timestamp:
        """Catch up with the writer now, and return `upper`: every commit that had returned in the
        writer before this call is below it.

        Costs 30 us where nothing was written, and 5 us a commit otherwise. Raises as the reads do.
        """
        self._require_open()
        assert self._pursuit is not None, "follow began it"
        return self._pursuit.refresh()

    @property
    def since(self) -> Timestamp:
        """See `Store.since`."""
        return self._settled(super().since)

    @property
    def whole_since(self) -> Timestamp:
        """See `Store.whole_since`."""
        return self._settled(super().whole_since)

    def _settled(self, since: Timestamp) -> Timestamp:
        """`since`, once `upper` is above it: a move of the reader raises `upper` last."""
        if since >= self._committer.frontiers.upper:
            with self._committer.lock:
                pass  # the move has ended
        return since

    @property
    def is_waiting(self) -> bool:
        """Whether a key has expired and the writer has not deleted it yet. The writer does so at
        its next commit, or its next read of the newest state. A look at the clock, and a seek
        behind each move of `upper` if the store has keys that expire."""
        if not self._parts.reserve.has_expiries:
            return False
        upper = self.upper
        if upper != self._looked_at:
            self._next_due = self._committer.expiries.first(upper)
            self._looked_at = upper
        return self._next_due <= self.now()

    def wait_beyond(
        self, upper: int, *, timeout: float | None = None, stop: Callable[[], bool] = lambda: False
    ) -> None:
        """Return once `self.upper` is above `upper`, `stop()` is true, or after `timeout` seconds.

        The writer hands over the timestamp of its commit, and the reader waits for it: then it
        reads the commit. Looks at the writer's files after 2 ms, and then less and less often, down
        to the pace of the reader. Raises as the reads do.
        """
        upper = require_integer(upper, name="upper")
        seconds = require_wait(timeout)
        end = None if seconds is None else time.monotonic() + seconds
        pause_s = FOLLOW_WAIT_S
        while self.refresh() <= upper and not stop():
            left = pause_s if end is None else min(end - time.monotonic(), pause_s)
            if left <= 0:
                return
            super().wait_beyond(upper, timeout=left, stop=stop)
            pause_s = max(min(pause_s * 1.2, self._interval_s), FOLLOW_WAIT_S)

    def close(self) -> None:
        """End the pursuit and all work on the store. Repeatable. The writer is not touched."""
        if self._pursuit is not None:
            self._pursuit.close()
        super().close()
