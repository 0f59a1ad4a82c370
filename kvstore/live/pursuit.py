"""The pursuit: a live reader catches up with the process that writes its store.

    pursuing <--a look fails, the next one succeeds--> suspended
        |                                                  |
        `------ the store is gone, or another one ---------`---> ended

A thread looks at the writer's files at short intervals and moves the reader's state. `refresh`
does the same at once. Nothing is asked of the writer, so a reader that is killed, stopped or slow
does not hold it up.

Invariants
1. One state is published at a time, whole, under the locks of the committer and the engine.
2. `upper` never goes back. With `durable_only` it stays at or below the writer's durable mark.
3. While the state may be torn, every read raises the error that is the reason.
"""

from __future__ import annotations

import threading
from typing import Final

from kvstore.background import Failures
from kvstore.clock import Clock
from kvstore.commit import Committer, read_durable_mark
from kvstore.engine.rocks_secondary import SecondaryEngine
from kvstore.errors import (
    ClosedError,
    CorruptionError,
    KVStoreError,
    StaleReaderError,
    StorageError,
    UsageError,
)
from kvstore.forks import own
from kvstore.limits import FOLLOW_RETRY_S_MAX
from kvstore.live.records import LiveRecords
from kvstore.timestamp import Timestamp

_FINAL: Final = (UsageError, CorruptionError)
"""Errors that another look does not mend."""


class Pursuit:
    """Moves the state of one live reader."""

    def __init__(
        self,
        committer: Committer,
        engine: SecondaryEngine,
        records: LiveRecords,
        *,
        durable_only: bool,
    ) -> None:
        self._committer = committer
        self._engine = engine
        self._records = records
        self._durable_only = durable_only
        self._is_behind = False
        """Whether the records may be older than the state of the engine."""
        self._is_ended = False
        self._durable = 0
        self._failures = Failures("kvstore.follow", Clock())
        committer.meters.watch("follow", self._failures)
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        own(self, f"the live reader of {engine.path}")

    def begin(self) -> None:
        """Show the first state, of which no reader knows yet. Raises as `refresh`."""
        committer = self._committer
        durable = self.durable()
        if self._durable_only:
            if not durable:
                raise UsageError(
                    f"the store at {self._engine.path} has no durable mark",
                    "open it to write once with this release, or follow it without durable_only",
                )
            committer.frontiers.upper = Timestamp(min(durable, committer.upper))
            self._require_durable()
        self._engine.keep_a_reader()

    def durable(self) -> int:
        """The durable mark of the writer. It never goes back."""
        self._durable = max(self._durable, read_durable_mark(self._engine.path))
        return self._durable

    def start(self, interval_s: float) -> None:
        """Catch up every `interval_s` seconds, in a thread."""
        self._thread = threading.Thread(
            target=self._run, args=(interval_s,), name="kvstore-follow", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """End the thread. Repeatable."""
        self._stopping.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def refresh(self) -> Timestamp:
        """Take the writer's state of now; returns `upper`. See `LiveReader.refresh`."""
        health, frontiers = self._committer.health, self._committer.frontiers
        with self._committer.lock, self._engine.lock:
            if self._stopping.is_set():
                raise ClosedError(self._committer.where)
            if self._is_ended:
                health.require()
            try:
                self._move()
                if not frontiers.is_sound:
                    health.suspend(None)
            except KVStoreError as error:
                self._is_ended = isinstance(error, _FINAL) or self._records.is_replaced
                health.suspend(error)
                raise
            except BaseException as error:  # an interrupt: the state may be half moved
                health.suspend(self._stale(f"a refresh was interrupted: {type(error).__name__}"))
                raise
        return frontiers.upper

    def _move(self) -> None:
        committer, records = self._committer, self._records
        if self._engine.catch_up() or self._is_behind:
            self._is_behind = True
            records.reload()
            self._engine.keep_a_reader()
            self._is_behind = False
        upper = records.upper
        if self._durable_only:
            upper = min(upper, self.durable())
        if upper > committer.frontiers.upper:
            committer.frontiers.advance(Timestamp(upper))
        self._require_durable()

    def _require_durable(self) -> None:
        """Raise while the writer has given up the history of the durable commits, and has not
        synced the later ones yet."""
        since, upper = self._committer.since, self._committer.upper
        if upper <= since:
            raise self._stale(
                f"history below {since} of {self._engine.path} is gone, and the store is durable "
                f"up to {upper} only"
            )

    def _stale(self, what: str) -> StaleReaderError:
        return StaleReaderError(str(self._engine.path), what, "try again after `max_staleness`")

    def _run(self, interval_s: float) -> None:
        longest_s = max(interval_s, FOLLOW_RETRY_S_MAX)
        while not self._stopping.wait(self._failures.delay_s(interval_s, longest_s)):
            try:
                self.refresh()
                self._failures.succeeded()
            except ClosedError:  # noqa: PERF203  # each turn waits
                return
            except Exception as error:  # noqa: BLE001  # noted, and told to every reader
                self._failures.note(f"following {self._engine.path}", error)
                if not isinstance(error, KVStoreError):  # a bug of ours must not look like silence
                    self._is_ended = True
                    self._committer.health.suspend(
                        StorageError(
                            f"following {self._engine.path} failed: {error!r}",
                            "close the reader, and follow the store again",
                        )
                    )
                if self._is_ended:
                    return
