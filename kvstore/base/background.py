"""Failures of work in the background: logged, counted, and followed by another try.

A thread that nobody waits for must not die of one failure, and must not fail in silence either.
Its loop notes each failure here; `Store.stats` shows them, the log has their tracebacks.

Invariants
1. Every failure is logged at the level ERROR, by a logger below `kvstore`.
2. The delay before the next try is bounded.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

from kvstore.base.clock import WallClock


class Failures:
    """The failures of one kind of background work. Threads may share it."""

    def __init__(self, logger: str, clock: WallClock) -> None:
        """`logger` names the logger, such as `"kvstore.retention.gc"`."""
        self._clock = clock
        self._logger = logging.getLogger(logger)
        self._lock = threading.Lock()
        self._in_a_row = 0
        self.count = 0
        self.last: BaseException | None = None
        self.last_ns = 0
        """When `last` was noted, by the clock; 0 for never."""
        self.on_note: Callable[[], None] = lambda: None
        """Called with each failure."""

    def note(self, what: str, error: BaseException, *, delays: bool = True) -> None:
        """Log and count a failure of `what`. It lengthens the delay unless `delays` is False."""
        with self._lock:
            self.count += 1
            self._in_a_row += delays
            self.last, self.last_ns = error, self._clock.wall_ns()
        self.on_note()
        self._logger.error("%s failed: %s: %s", what, type(error).__name__, error, exc_info=error)

    def succeeded(self) -> None:
        """Note that the work was done: the delay is the shortest again. Noted failures stay."""
        with self._lock:
            self._in_a_row = 0

    def delay_s(self, first_s: float, longest_s: float) -> float:
        """How long to wait now: twice as long after each failure in a row."""
        exponent = min(max(self._in_a_row - 1, 0), 64)
        return float(min(first_s * 2**exponent, longest_s))

    def figures(self, prefix: str) -> dict[str, Any]:
        """The figures for `Store.stats`: count, last error as text, when it was noted."""
        with self._lock:
            last = self.last
            text = "" if last is None else f"{type(last).__name__}: {last}"
            return {
                f"{prefix}_failures": self.count,
                f"{prefix}_last_error": text,
                f"{prefix}_failed_at_ns": self.last_ns,
            }
